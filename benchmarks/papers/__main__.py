"""The command `python -m benchmarks.papers NAME`: runs an experiment of a paper, and prints and keeps its results."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.papers import RECIPES, jobs, reproduce
from jfcl import mapping
from jfcl.core import check_choice
from jfcl.simulation.probe import cache_dir


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.papers",
        description="Run an experiment of a paper: a table with the numbers of the paper and ours, and its figure."
        " Finished runs in --out are not repeated.",
        allow_abbrev=False,
    )
    made.add_argument("name", metavar="NAME", nargs="?", help="one of those that --list shows")
    made.add_argument("--list", action="store_true", help="show the names of the experiments")
    made.add_argument("--full", action="store_true", help="setting of the paper; default: one for a CPU of 2 cores")
    made.add_argument("--rounds", type=int, metavar="N", help="another number of rounds than that of the setting")
    made.add_argument("--seeds", type=int, metavar="N", help="another number of seeds")
    made.add_argument("--examples-per-client", type=int, metavar="N", help="another number of examples")
    made.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="ENTRY=VALUE",
        help="another entry of the setting, with a value in JSON: --set 'mnist=[[4800, 50]]' --set panels=c",
    )
    made.add_argument("--data-dir", metavar="DIR", help="official data files [JFCL_DATA_DIR, as in jfcl run]")
    made.add_argument("--out", metavar="DIR", help="folder for results [runs/reproduce/NAME-small, or -full]")
    made.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time, each in its own process [1]")
    made.add_argument("--quiet", action="store_true", help="no progress bars")
    return made


def entries(given: list[str], known: dict[str, Any]) -> dict[str, Any]:
    """Returns the `known` entries in the arguments `--set ENTRY=VALUE`; a value that is no JSON is a text.

    Example:
      >>> entries(["panels=c", "mnist=[[4800, 50]]"], {"panels": "abcd", "mnist": []})
      {'panels': 'c', 'mnist': [[4800, 50]]}
    """
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--set takes ENTRY=VALUE, such as panels=c, and not {text!r}")
        check_choice("entry of --set", name, known)
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def table(rows: list[dict[str, Any]], title: str) -> Table:
    """Returns the table of a result: the columns are the names in `rows`."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    made = Table(*columns, title=title, title_justify="left", title_style="", box=SIMPLE_HEAD, show_edge=False)
    for row in rows:
        cells = (row.get(name) for name in columns)
        made.add_row(*("–" if v is None else f"{v:.3g}" if isinstance(v, float) else str(v) for v in cells))
    return made


def _run(args: argparse.Namespace, console: Console) -> None:
    """Runs the experiment that `args` name, and prints its table."""
    check_choice("recipe", args.name, RECIPES)
    changes = {"rounds": args.rounds, "seeds": args.seeds, "examples_per_client": args.examples_per_client}
    changes |= entries(args.set, RECIPES[args.name].full)
    if args.jobs > 1:
        jobs.share_gpu()
    mapping.divide_cpu(mapping.num_cores())
    if (folder := cache_dir()) is not None and jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(folder / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    result = reproduce(
        args.name,
        full=args.full,
        out=args.out,
        data_dir=args.data_dir,
        progress=not args.quiet,
        jobs=args.jobs,
        **changes,
    )
    console.print(table(result["rows"], result["title"]))
    if result["notes"]:
        console.print(result["notes"], markup=False)
    console.print(f"{result['size']} setting: {', '.join(f'{k} {v}' for k, v in result['setting'].items())}")
    console.print(f"{result['seconds']:.0f} s on {result['device']}")
    out = Path(args.out or f"runs/reproduce/{result['name']}-{result['size']}")
    console.print(f"kept in {out}: result.json, figure.png{', and the runs' * any(out.glob('*/'))}", markup=False)


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status: 0, 2 (bad input), 130 (interrupted)."""
    args = parser().parse_args(argv)
    console, errors = Console(highlight=False, emoji=False), Console(stderr=True, soft_wrap=True, emoji=False)
    if not console.is_terminal:
        console.width = max(console.width, 120)
    if args.list or args.name is None:
        for name, recipe in RECIPES.items():
            console.print(f"{name:<32}{recipe.title}", markup=False)
        return 0
    warnings.showwarning = lambda message, *_, **__: errors.print(f"note: {message}", markup=False)
    try:
        _run(args, console)
    except KeyboardInterrupt:
        errors.print("\ninterrupted; what has run is kept, continue with the same command")
        return 130
    except (ValueError, OSError, MemoryError) as error:
        errors.print(f"error: {error}", markup=False)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
