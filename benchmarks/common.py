"""What the benchmarks share besides `jfcl.experiments.bench`: environments of peers, tables and JSON of results."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import jfcl
from jfcl.simulation.folder import environment

ROOT = Path(__file__).resolve().parent
RESULTS = ROOT / "results"


def run_peer(name: str, script: str, case: dict[str, Any]) -> dict[str, Any] | None:
    """What a script of `peers/` measured for `case`, in the environment `.venv-<name>`, that of jfcl in our own.

    `None` where the environment is not set up.
    """
    python = Path(sys.executable) if name == "jfcl" else ROOT.parent / f".venv-{name}" / "bin" / "python"
    if not python.exists():
        return None
    done = subprocess.run(
        [python, ROOT / "peers" / script, json.dumps(case)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{script} failed on {case}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])  # Flower and pfl print much before


def report(
    name: str | None,
    title: str,
    columns: list[str],
    rows: list[dict[str, Any]],
    command: str | None = None,
    *,
    partial: bool = False,
) -> None:
    """Prints `rows` as a table and writes them, with device, versions and `command`, to `results/<name>.json`.

    The command is that of this process; a file to which several calls add their rows gives its own. Without a `name`
    nothing is written. Rows that are `partial` go to a file of their own, which stays if the script fails, and goes
    with the call for all rows.
    """
    print_table(title, columns, rows)
    if name is None:
        return
    RESULTS.mkdir(exist_ok=True)
    path, part = results_file(name), results_file(f"{name}-partial")
    part.unlink(missing_ok=True)
    command = command or f"python benchmarks/{Path(sys.argv[0]).name} {shlex.join(sys.argv[1:])}".rstrip()
    path = part if partial or is_of_another(path, command) else path
    path.write_text(json.dumps({"command": command, **environment(), "rows": rows}, indent=1) + "\n")
    print(f"written: {path}")


def results_file(name: str) -> Path:
    """Returns the file of results of this name that were measured on this device."""
    device = environment()["device"].split(" x ")[-1].replace(",", "").replace(" ", "-").lower()
    return RESULTS / f"{name}-{device}.json"


def rows_there(name: str) -> list[dict[str, Any]]:
    """Returns the rows of `results_file(name)`; none if it is not there."""
    file = results_file(name)
    return kept_rows(json.loads(file.read_text())) if file.exists() else []


def kept_rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows of `results`, to which others will be added; those of another version of jfcl name theirs."""
    version = results["versions"]["jfcl"]
    return [row if version == jfcl.__version__ else {"jfcl": version} | row for row in results["rows"]]


def is_of_another(path: Path, command: str) -> bool:
    """Returns whether the results in `path` are of another command, so that a trial must not replace them."""
    return path.exists() and json.loads(path.read_text()).get("command") != command


def print_table(title: str, columns: list[str], rows: list[dict[str, Any]], *, width: int = 120) -> None:
    """Prints `rows` as a table, without the columns that no row has."""
    columns = [column for column in columns if any(row.get(column) is not None for row in rows)]
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column.replace("_", " "), justify="left" if i < 3 else "right")
    for row in rows:
        table.add_row(*[cell(row.get(column)) for column in columns])
    Console(width=width).print(table)


def cell(value: Any) -> str:
    """How a table shows a value: three significant digits, whole numbers from 100 on, a dash for nothing."""
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return "–" if value is None else str(value)
