"""Tables that the command line prints."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table
from rich.text import Text

from jfcl import data, kernels, models
from jfcl.experiments.comparison import number, results_rows, size_text
from jfcl.experiments.config import Config
from jfcl.experiments.optimizers import OPTIMIZERS, SCHEDULES
from jfcl.methods import METHODS
from jfcl.planning import targets
from jfcl.planning.plan import Plan
from jfcl.robust import attacks
from jfcl.simulation.grid_results import METRICS, Sweep
from jfcl.training.augment import AUGMENTATIONS

LOOK = {"box": SIMPLE_HEAD, "show_edge": False, "title_justify": "left", "title_style": ""}  # of a table
MOST_SHOWN = 30  # cells of a sweep
LARGEST_PARTS = 8  # of a round


def numbers_table(title: str, names: Sequence[str], heads: Sequence[str]) -> Table:
    """Returns an empty table with columns of names and columns of numbers, one blank apart."""
    columns = [Column(name, overflow="fold") for name in names]
    columns += [Column(head, justify="right", no_wrap=True) for head in heads]
    return Table(*columns, title=Text(title), padding=0, **LOOK)


def results_table(summaries: dict[str, dict[str, Any]], title: str) -> Table:
    """Returns a table with one line per run: mean ± sample standard deviation over seeds, in 80 columns."""
    heads, rows = results_rows(summaries)
    table = numbers_table(title, heads[:1], heads[1:])
    for name, *cells in rows:
        table.add_row(Text(name), *cells)
    return table


def bench_table(found: dict[str, Any]) -> Table:
    """Returns the table of `jfcl bench`: a row for each measured round."""
    title = "One round: {local_steps} local steps of batch {batch_size}, {examples} examples a client"
    heads = ("clients", "rounds\n/s", "client-\nsteps/s", "temp.\nMB", "compile\ns")
    table = numbers_table(title.format(**found["settings"]), ("method", "model", "mapping"), heads)
    for row in found["rows"]:
        cells = [row["method"], row["model"], row["mapping"], f"{row['clients']:,}"]
        if "left_out" in row:
            cells += ["–", row["left_out"]]
        else:
            memory = "–" if row["temporary_mb"] is None else f"{row['temporary_mb']:,.1f}"
            rounds = row["rounds/s"]
            cells += [f"{rounds:,.0f}" if rounds >= 100 else f"{rounds:.3g}", f"{row['client_steps/s']:,.0f}"]
            cells += [memory, f"{row['compile_seconds']:.1f}"]
        table.add_row(*cells)
    return table


def lists() -> dict[str, dict[str, str]]:
    """Returns the lists of `jfcl list`: of each, the names and one line on each of them."""

    def first_lines(functions) -> dict[str, str]:
        return {name: (fn.__doc__ or "").split("\n")[0] for name, fn in functions.items()}

    return {
        "methods": {name: method.summary for name, method in METHODS.items()}
        | {"MODULE:FACTORY": "a method of your own: a function in a file of the current folder, or of a package"},
        "datasets": {name: entry[1] for name, entry in data.DATASETS.items()}
        | {
            "(any other)": "an image classification set of tensorflow-datasets, by its name there",
            "MODULE:FUNCTION": "a data set of your own: a function that returns a jfcl.data.Dataset",
        },
        "models": {name: entry[1] for name, entry in models.MODELS.items()}
        | {"MODULE:NAME": "a model of your own: a flax module or a function, of the number of outputs"},
        "heterogeneities": {name: entry[1] for name, entry in data.HETEROGENEITY.items()},
        "partitions": {name: entry[1] for name, entry in data.PARTITIONS.items()},
        "optimizers": {name: optimizer.summary for name, optimizer in OPTIMIZERS.items()},
        "schedules": SCHEDULES,
        "augmentations": first_lines(AUGMENTATIONS),
        "attacks": first_lines(attacks.UPDATE_ATTACKS | attacks.DATA_ATTACKS)
        | {"MODULE:NAME": "an attack of your own: (key, updates, malicious, usable), or (rng, x, y, num_classes)"},
        "aggregators": first_lines(kernels.AGGREGATORS)
        | {f"{name}+...": text for name, text in first_lines(kernels.PRE_AGGREGATORS).items()}
        | {"nnm+...": "as nearest_neighbour_mixing+..."}
        | {"MODULE:NAME": "an aggregator of your own: a function (updates, *, mask) -> update"},
    }


def list_tables(titles: Iterable[str]) -> list[Table]:
    """Returns the tables of `jfcl list` with these titles."""
    tables = []
    for title in titles:
        table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
        for name, text in lists()[title].items():
            table.add_row(f"  {name}", text)
        tables.append(table)
    return tables


def sweep_table(found: Sweep, title: str) -> Table:
    """Returns the table of the best cells, in 80 columns: mean ± sample standard deviation over seeds."""
    texts = not any("accuracy" in cell.mean for cell in found.cells)
    columns = {"accuracy": ("client\nacc. %", 100, 1), "worst_client_accuracy": ("worst\nclient %", 100, 1)}
    columns = ({} if texts else columns) | {"loss": ("loss", 1, 3)}
    if found.metric not in columns:
        columns[found.metric] = (found.metric.replace("_", "\n"), 1, 3)
    table = numbers_table(title, list(found.grid), [head for head, *_ in columns.values()])
    sign = -1 if METRICS[found.metric] else 1
    order = sorted(found.cells, key=lambda cell: sign * cell.mean[found.metric] if cell.mean else math.inf)
    for cell in order[:MOST_SHOWN]:
        cells = [
            number(cell.mean.get(name), cell.std.get(name), digits, scale)
            for name, (_, scale, digits) in columns.items()
        ]
        names = [Text(f"{value:g}" if isinstance(value, float) else str(value)) for value in cell.values.values()]
        table.add_row(*names, *cells)
    return table


def plan_tables(found: Plan, config: Config) -> list[Table]:
    """Returns the tables of a plan, in 80 columns: the mappings, what a round needs, and its largest parts."""
    shown = [_candidates_table(found, config), _facts_table(found, config)]
    return shown if found.cost is None else [*shown, _parts_table(found)]


def _table(title: str | None, name: str, *numbers: str) -> Table:
    columns = (Column(head, justify="right") for head in numbers)
    return Table(name, *columns, title=title and Text(title), **LOOK)


def _candidates_table(found: Plan, config: Config) -> Table:
    chosen = targets.target(found.target)
    title = f"{config.method}, model {config.model}, on {found.target}: {chosen.count} x {chosen.chip.name}"
    table = _table(title, "clients of a chip at a time", "memory", "a round, predicted")
    for c in found.candidates:
        large = c.needed_bytes > found.limit_bytes
        name = {"vmap": "all", "chunked": f"{c.chunk}"}.get(c.mapping, c.mapping)
        late = "does not fit" if large or c.seconds is None else _duration(c.seconds)
        table.add_row(name, size_text(c.needed_bytes), late)
    return table


def _facts_table(found: Plan, config: Config) -> Table:
    table, cost = Table(Column(), Column(overflow="fold"), show_header=False, **LOOK), found.cost
    limit = size_text(found.limit_bytes)
    fits = f"{'yes' if found.fits else 'no'}: {size_text(found.needed_bytes)} of {limit} a chip"
    if cost is None:
        table.add_row("fits", fits)
        return table
    sizes = {"data": found.data_bytes, "state and padding": max(found.argument_bytes - found.data_bytes, 0)}
    sizes |= {"results": found.output_bytes, "temporaries": found.temp_bytes, "tests": found.other_bytes}
    table.add_row("fits", f"{fits} ({', '.join(f'{name} {size_text(size)}' for name, size in sizes.items())})")
    run = f"{config.rounds} rounds and the start: {_duration(found.seconds(config.rounds))}"
    table.add_row("predicted", f"{_duration(cost.seconds)} a round; {run}")
    if found.common is not None and found.common.seconds < 0.95 * cost.seconds:
        table.add_row("", f"{_duration(found.common.seconds)} a round without its rare branches")
    table.add_row("operations", f"{cost.flops / 1e9:.4g} GFLOP a chip; {100 * cost.mfu:.2g} % of the bfloat16 peak")
    table.add_row("moved", f"{size_text(cost.bytes_moved)} between a chip and its memory")
    sent = [f"{count} {op} ({size_text(size)})" for op, (count, size) in cost.collectives.items()]
    table.add_row("between chips", ", ".join(sent) or "nothing")
    table.add_row("in sequence", f"{cost.sequential_steps:,} trips of loops")
    unknown = list(dict.fromkeys(loop.function for loop in cost.loops if loop.trips is None))
    if unknown:
        table.add_row("counted once", f"loops with trips that depend on the data: {', '.join(unknown)}")
    for where, precisions in cost.precision.items():
        total = sum(precisions.values())
        shares = [f"{name} {100 * value / total:.3g} %" for name, value in precisions.items() if value >= total / 1000]
        table.add_row(f"products of {where}", ", ".join(shares))
    guessed = sum(cost.guessed.values())
    if guessed > 0.02 * cost.seconds:
        largest = next(iter(cost.guessed))
        table.add_row("guessed", f"{100 * guessed / cost.seconds:.0f} % of the time, for the most part {largest}")
    return table


def _parts_table(found: Plan) -> Table:
    table, parts = _table(None, "part of a round", "predicted", "%"), list(found.cost.parts.items())
    rest = sum(seconds for _, seconds in parts[LARGEST_PARTS:])
    whole = sum(seconds for _, seconds in parts) or 1.0
    for name, seconds in [*parts[:LARGEST_PARTS], *([("others", rest)] if rest else [])]:
        table.add_row(name, _duration(seconds), f"{100 * seconds / whole:.0f}")
    return table


def _duration(seconds: float | None) -> str:
    """Returns a duration in a fitting unit.

    Example:
      >>> [_duration(s) for s in (None, 0.00345, 12.3, 7300.0)]
      ['–', '3.45 ms', '12.3 s', '2.03 h']
    """
    if seconds is None or seconds != seconds:
        return "–"
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
