"""Runs the command line: `python -m jfcl` is `jfcl`."""

import sys

from jfcl.cli import main

sys.exit(main())
