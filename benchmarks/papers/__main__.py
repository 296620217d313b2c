"""The command `python -m benchmarks.papers NAME`: runs an experiment of a paper, and prints and keeps its results."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import warnings
from typing import Any

import jax

from benchmarks.common import print_table
from benchmarks.papers import RECIPES, reproduce
from jfcl import mapping
from jfcl.experiments import jobs
from jfcl.simulation.probe import cache_dir


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.papers", allow_abbrev=False)
    made.description = "Run an experiment of a paper: a table with its numbers and ours, and a figure."
    made.epilog = "What has run in --out is not repeated: after Ctrl-C, continue with the same command."
    made.add_argument("name", metavar="NAME", nargs="?", help="one of those that --list shows")
    made.add_argument("--list", action="store_true", help="show the names of the experiments")
    made.add_argument("--full", action="store_true", help="setting of the paper; default: one for a CPU of 2 cores")
    for name in ("rounds", "seeds", "examples-per-client"):
        made.add_argument(f"--{name}", type=int, metavar="N", help="another number than that of the setting")
    text = "another entry of the setting, with a value in JSON: --set 'mnist=[[4800, 50]]' --set panels=c"
    made.add_argument("--set", type=entry, action="append", default=[], metavar="ENTRY=VALUE", help=text)
    made.add_argument("--data-dir", metavar="DIR", help="official data files, as in jfcl run [JFCL_DATA_DIR]")
    made.add_argument("--out", metavar="DIR", help="folder for results [runs/reproduce/NAME-small, or -full]")
    made.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time, each in its own process [1]")
    made.add_argument("--quiet", action="store_true", help="no progress bars")
    return made


def entry(text: str) -> tuple[str, Any]:
    """Returns name and value of an argument `--set ENTRY=VALUE`; a value that is no JSON is a text.

    Example:
      >>> entry("panels=c"), entry("mnist=[[4800, 50]]")
      (('panels', 'c'), ('mnist', [[4800, 50]]))
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"give ENTRY=VALUE, such as panels=c, and not {text!r}")
    with contextlib.suppress(ValueError):
        value = json.loads(value)
    return name, value


def changes_of(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the entries of the setting that `args` change."""
    given = {name: getattr(args, name) for name in ("rounds", "seeds", "examples_per_client")}
    return {name: value for name, value in given.items() if value is not None} | dict(args.set)


def run(args: argparse.Namespace) -> None:
    """Runs the experiment that `args` name, and prints its table."""
    if args.jobs > 1:
        jobs.share_gpu()
    mapping.divide_cpu(mapping.num_cores())
    if cache_dir() is not None and jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "xla"))
    options = {"full": args.full, "out": args.out, "data_dir": args.data_dir, "progress": not args.quiet}
    result = reproduce(args.name, **options, jobs=args.jobs, **changes_of(args))
    rows = result["rows"]
    print_table(result["title"], list(dict.fromkeys(name for row in rows for name in row)), rows)
    print(result["notes"], end="\n" if result["notes"] else "")
    print(f"{result['size']} setting: {', '.join(f'{k} {v}' for k, v in result['setting'].items())}")
    out = args.out or f"runs/reproduce/{result['name']}-{result['size']}"
    print(f"{result['seconds']:.0f} s on {result['device']}; kept in {out}")


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status: 0, 2 (bad input), 130 (interrupted)."""
    args = parser().parse_args(argv)
    warnings.showwarning = lambda message, *_, **__: print(f"note: {message}", file=sys.stderr)
    try:
        if args.list or args.name is None:
            print("\n".join(f"{name:<34}{recipe.title}" for name, recipe in RECIPES.items()))
        else:
            run(args)
    except KeyboardInterrupt:
        print("\ninterrupted; what has run is kept, continue with the same command", file=sys.stderr)
        return 130
    except (ValueError, OSError, MemoryError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
