"""Tables that the command line prints."""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

from jfcl import data, kernels, models
from jfcl.experiments.comparison import COLUMNS, number, rate_text, results_rows, size_text
from jfcl.experiments.config import Config
from jfcl.experiments.optimizers import OPTIMIZERS, SCHEDULES
from jfcl.methods import METHODS
from jfcl.planning import targets
from jfcl.planning.plan import Plan
from jfcl.robust import attacks
from jfcl.simulation.grid import METRICS, Sweep
from jfcl.training.augment import AUGMENTATIONS

LOOK = {"box": SIMPLE_HEAD, "show_edge": False}  # of a table
MOST_SHOWN = 30  # cells of a sweep
LARGEST_PARTS = 8  # of a round
# The lists of `jfcl list` whose entries have their line behind the thing itself, and what further lines lists have.
REGISTRIES = {"methods": METHODS, "datasets": data.DATASETS, "models": models.MODELS}
REGISTRIES |= {"heterogeneities": data.HETEROGENEITY, "partitions": data.PARTITIONS, "optimizers": OPTIMIZERS}
FURTHER = {
    "methods": {"MODULE:FACTORY": "a method of your own: a function in a file of the current folder, or of a package"},
    "datasets": {
        "(any other)": "an image classification set of tensorflow-datasets, by its name there",
        "MODULE:FUNCTION": "a data set of your own: a function that returns a jfcl.data.Dataset",
    },
    "models": {"MODULE:NAME": "a model of your own: a flax module or a function, of the number of outputs"},
    "heterogeneities": {"rotation+label_swap": "several at once, one after the other"},
    "augmentations": {"MODULE:NAME": "an augmentation of your own: a function (key, batch) -> batch"},
    "attacks": {"MODULE:NAME": "one of your own: (key, updates, malicious, usable), or (rng, x, y, num_classes)"},
    "aggregators": {"MODULE:NAME": "an aggregator of your own: a function (updates, *, mask) -> update"},
}


def numbers_table(names: Sequence[str], heads: Sequence[str], padding: int = 0) -> Table:
    """Returns an empty table with columns of names and columns of numbers."""
    columns = [Column(name, overflow="fold") for name in names]
    columns += [Column(head, justify="right", no_wrap=True) for head in heads]
    return Table(*columns, padding=(0, padding), **LOOK)


def titled(title: str, table: Table) -> Group:
    """Returns a table below its title, which may be wider: a title of rich is wrapped to the width of its table."""
    return Group(Text(title), table)


def results_table(summaries: dict[str, dict[str, Any]], title: str) -> Group:
    """Returns a table with one line per run: mean ± sample standard deviation over seeds, in 80 columns."""
    heads, rows = results_rows(summaries, further=False)
    table = numbers_table(heads[:1], heads[1:])
    for name, *cells in rows:
        table.add_row(Text(name), *cells)
    return titled(title, table)


def bench_table(benchmark: dict[str, Any]) -> Group:
    """Returns the table of `jfcl bench`: a row for each measured round."""
    title = "One round: {local_steps} local steps of batch {batch_size}, {examples} examples a client"
    heads = ("clients", "rounds\n/s", "client-\nsteps/s", "temp.\nMB", "compile\ns")
    table = numbers_table(("method", "model", "mapping"), heads)
    for row in benchmark["rows"]:
        cells = ["–", row.get("left_out")]
        if "left_out" not in row:
            rounds, memory = row["rounds/s"], row["temporary_mb"]
            cells = [rate_text(rounds), rate_text(row["client_steps/s"])]
            cells += ["–" if memory is None else f"{memory:,.1f}", f"{row['compile_seconds']:.1f}"]
        table.add_row(row["method"], row["model"], row["mapping"], f"{row['clients']:,}", *cells)
    return titled(title.format(**benchmark["settings"]), table)


def lists() -> dict[str, dict[str, str]]:
    """Returns the lists of `jfcl list`: of each, the names and one line on each of them."""

    def first_lines(functions) -> dict[str, str]:
        begin = r"^((\w+: )?)[Rr]eturns,? (the attack that )?"
        return {name: re.sub(begin, r"\1", (fn.__doc__ or "").split("\n")[0]) for name, fn in functions.items()}

    lists = {title: {name: entry[1] for name, entry in registry.items()} for title, registry in REGISTRIES.items()}
    lists |= {"drifts": data.PATTERNS, "schedules": SCHEDULES, "augmentations": first_lines(AUGMENTATIONS)}
    parts = {f"{name}+...": line for name, line in first_lines(kernels.PRE_AGGREGATORS).items()}
    lists["attacks"] = first_lines(attacks.UPDATE_ATTACKS | attacks.DATA_ATTACKS)
    lists["aggregators"] = first_lines(kernels.AGGREGATORS) | parts | {"nnm+...": "as nearest_neighbour_mixing+..."}
    return {title: names | FURTHER.get(title, {}) for title, names in lists.items()}


def list_tables(titles: Iterable[str]) -> list[Table]:
    """Returns the tables of `jfcl list` with these titles."""
    tables = []
    for title in titles:
        table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
        for name, text in lists()[title].items():
            table.add_row(f"  {name}", text)
        tables.append(table)
    return tables


def sweep_table(swept: Sweep, title: str) -> Group:
    """Returns the table of the best cells, in 80 columns: mean ± sample standard deviation over seeds."""
    columns = {"loss": ("loss", 3, 1)}
    if any("accuracy" in cell.mean for cell in swept.cells):
        columns = {name: COLUMNS[name] for name in ("accuracy", "worst_client_accuracy")} | columns
    columns.setdefault(swept.metric, (swept.metric.replace("_", "\n"), 3, 1))
    table = numbers_table(list(swept.grid), [head for head, *_ in columns.values()])
    sign = -1 if METRICS[swept.metric] else 1
    order = sorted(swept.cells, key=lambda cell: sign * cell.mean[swept.metric] if cell.mean else math.inf)
    for cell in order[:MOST_SHOWN]:
        names = [Text(f"{value:g}" if isinstance(value, float) else str(value)) for value in cell.values.values()]
        cells = (number(cell.mean.get(name), cell.std.get(name), *form) for name, (_, *form) in columns.items())
        table.add_row(*names, *cells)
    return titled(title, table)


def plan_tables(planned: Plan, config: Config) -> list[Table | Group]:
    """Returns the tables of a plan, in 80 columns: the mappings, what a round needs, and its largest parts."""
    chosen, cost = targets.target(planned.target), planned.cost
    title = f"{config.method}, model {config.model}, on {planned.target}: {chosen.count} x {chosen.chip.name}"
    mappings = numbers_table(["clients of a chip at a time"], ["memory", "a round, predicted"], 1)
    for c in planned.candidates:
        large = c.needed_bytes > planned.limit_bytes
        name = {"vmap": "all", "chunked": f"{c.chunk}"}.get(c.mapping, c.mapping)
        duration = "does not fit" if large or c.seconds is None else _duration(c.seconds)
        mappings.add_row(name, size_text(c.needed_bytes), duration)
    facts = Table(Column(), Column(overflow="fold"), show_header=False, **LOOK)
    for row in _facts(planned, config):
        facts.add_row(*row)
    if cost is None:
        return [titled(title, mappings), facts]
    # The parts of a round.
    parts, seconds = numbers_table(["part of a round"], ["predicted", "%"], 1), list(cost.parts.items())
    remaining, whole = sum(s for _, s in seconds[LARGEST_PARTS:]), sum(s for _, s in seconds) or 1.0
    for name, s in [*seconds[:LARGEST_PARTS], *([("others", remaining)] if remaining else [])]:
        parts.add_row(name, _duration(s), f"{100 * s / whole:.0f}")
    return [titled(title, mappings), facts, parts]


def _facts(planned: Plan, config: Config) -> Iterator[tuple[str, str]]:
    """Yields the rows of the table of what a round needs."""
    cost, limit = planned.cost, size_text(planned.limit_bytes)
    fits = f"{'yes' if planned.fits else 'no'}: {size_text(planned.needed_bytes)} of {limit} a chip"
    if cost is None:
        yield "fits", fits
        return
    sizes = {"data": planned.data_bytes, "state and padding": max(planned.argument_bytes - planned.data_bytes, 0)}
    sizes |= {"results": planned.output_bytes, "temporaries": planned.temp_bytes, "tests": planned.other_bytes}
    of_round = planned.argument_bytes + planned.output_bytes + planned.temp_bytes + planned.other_bytes
    which = "" if planned.needed_bytes <= of_round else f" for the start; a round: {size_text(of_round)}"
    yield "fits", f"{fits}{which} ({', '.join(f'{name} {size_text(size)}' for name, size in sizes.items())})"
    whole = _duration(planned.seconds(config.rounds))
    yield "predicted", f"{_duration(cost.seconds)} a round; {config.rounds} rounds and the start: {whole}"
    if planned.common is not None and planned.common.seconds < 0.95 * cost.seconds:
        yield "", f"{_duration(planned.common.seconds)} a round without its rare branches"
    yield "operations", f"{cost.flops / 1e9:.4g} GFLOP a chip; {100 * cost.mfu:.2g} % of the bfloat16 peak"
    yield "moved", f"{size_text(cost.bytes_moved)} between a chip and its memory"
    sent = [f"{count} {op} ({size_text(size)})" for op, (count, size) in cost.collectives.items()]
    yield "between chips", ", ".join(sent) or "nothing"
    yield "in sequence", f"{cost.sequential_steps:,} trips of loops"
    if unknown := dict.fromkeys(loop.function for loop in cost.loops if loop.trips is None):
        yield "counted once", f"loops with trips that depend on the data: {', '.join(unknown)}"
    for where, precisions in cost.precision.items():
        total = sum(precisions.values())
        shares = [f"{name} {100 * value / total:.3g} %" for name, value in precisions.items() if value >= total / 1000]
        yield f"products of {where}", ", ".join(shares)
    guessed = sum(cost.guessed.values())
    if guessed > 0.02 * cost.seconds:
        share = f"{100 * guessed / cost.seconds:.0f} % of the time"
        yield "guessed", f"{share}, for the most part {next(iter(cost.guessed))}"


def _duration(seconds: float | None) -> str:
    """Returns a duration in a fitting unit.

    Example:
      >>> _duration(0.9999), _duration(1e7)
      ('1 s', '116 d')
    """
    if seconds is None or seconds != seconds:
        return "–"
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds >= 0.9995 else f"{1000 * seconds:.3g} ms"
