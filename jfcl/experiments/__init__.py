"""Runs from configurations: their results, reports, comparisons and sweeps."""

from jfcl.experiments.comparison import compare
from jfcl.experiments.config import Config, from_saved
from jfcl.experiments.report import report
from jfcl.experiments.results import load_params, read_run
from jfcl.experiments.run import run
from jfcl.experiments.serving import export_model, load_run
from jfcl.experiments.setups import setup
from jfcl.experiments.shifts import shifts
from jfcl.experiments.sweeps import run_sweep

__all__ = ["Config", "compare", "export_model", "from_saved", "load_params", "load_run", "read_run", "report", "run"]
__all__ += ["run_sweep", "setup", "shifts"]
