"""`jfcl plan`: the run of a `Config`, compiled for an accelerator that is not there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import numpy as np
from rich.table import Column, Table
from rich.text import Text

from jfcl import mapping
from jfcl.analysis import plots
from jfcl.core import Clients, check, client_shapes, files, max_examples, num_bytes
from jfcl.experiments.comparison import size_text
from jfcl.experiments.config import PRECISIONS, Config, as_dict, of_population
from jfcl.experiments.setups import load_dataset, make_algorithm, make_federation, make_task, make_training
from jfcl.experiments.tables import LOOK
from jfcl.experiments.validation import validate
from jfcl.planning import targets
from jfcl.planning.plan import Plan, plan
from jfcl.simulation.folder import finite_or_none

LARGEST_PARTS = 8  # in the table and the picture
FILES = ("plan.json", "plan.png", "step.hlo.txt", "init.hlo.txt")
_ONE = lambda count: slice(0, 1)  # noqa: E731


def plan_run(
    config: Config, target: str | None, *, data_dir: str | None = None, tick: Callable[[str, int], None] | None = None
) -> Plan:
    """Returns the plan of a run on `target`.

    The data are divided among the clients, which shows the numbers of examples, but those of one client alone are
    stacked and transformed.

    Raises:
      ValueError: what `run` and `jfcl.plan` refuse; a population; a mapping that a target has not.
    """
    validate(config)
    check(target is not None, "target", target, "given, such as --target v5e:2x4 or --target h100")
    chosen = targets.target(target)
    accepted = "left out: plan --clients as many as the cohort"
    check(not of_population(config), "population, store", (config.population, config.store), accepted)
    check(config.devices is None, "devices", config.devices, "left out: the target has its own")
    targets.mesh(chosen)  # refuses a compiler that is not there before data are read
    dataset, vocab_size = load_dataset(config, data_dir)
    federation = make_federation(config, dataset, _ONE)
    task = make_task(config, federation, vocab_size, target="tpu" if chosen.chip.is_tpu else "gpu")
    training = make_training(config, max_examples(federation.train))
    both = federation.train, federation.test
    clients, tests = (client_shapes(Clients(one.examples, one.size), config.clients) for one in both)
    inner = {"vmap": [jax.vmap]}.get(config.mapping)
    with jax.default_matmul_precision(PRECISIONS[config.precision]):
        return plan(
            partial(make_algorithm, config, task, training, federation),
            clients,
            target=target,
            inner=inner if config.chunk is None else [mapping.chunked(config.chunk)],
            other_bytes=num_bytes((tests, federation.newcomers)) / chosen.count,
            seeds=config.seeds,
            name=f"{config.method} with model {config.model!r}",
            tick=tick,
        )


def write_plan(found: Plan, config: Config, out: Path) -> None:
    """Writes `FILES` into the folder `out`; those of an earlier plan are replaced."""
    about = {"method": config.method, "model": config.model, "num_rounds": config.rounds, "predicted": True}
    about |= {"seconds": found.seconds(config.rounds), "config": as_dict(config)}
    out.mkdir(parents=True, exist_ok=True)
    content = (
        files.json_bytes(finite_or_none(about | found.as_dict())),
        plots.png(picture(found)),
        found.step_hlo.encode(),
        found.init_hlo.encode(),
    )
    files.replace_together(out, dict(zip(FILES, content, strict=True)))


# ---------------------------------------------------------------------------------------------------------------
# What is printed.


def tables(found: Plan, config: Config) -> list[Table]:
    """Returns the tables of a plan, in 80 columns: the mappings, what a round needs, and its largest parts."""
    shown = [_candidates_table(found, config), _facts_table(found, config)]
    return shown if found.cost is None else [*shown, _parts_table(found)]


def _table(title: str | None, name: str, *numbers: str) -> Table:
    columns = (Column(head, justify="right") for head in numbers)
    return Table(name, *columns, title=title and Text(title), **LOOK)


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


def _sizes(found: Plan) -> dict[str, float]:
    """Returns the bytes on a chip, part by part."""
    return {
        "data": found.data_bytes,
        "state and padding": max(found.argument_bytes - found.data_bytes, 0),
        "results": found.output_bytes,
        "temporaries": found.temp_bytes,
        "tests": found.other_bytes,
    }


def _facts_table(found: Plan, config: Config) -> Table:
    table, cost = Table(Column(), Column(overflow="fold"), show_header=False, **LOOK), found.cost
    limit = size_text(found.limit_bytes)
    sizes = ", ".join(f"{name} {size_text(size)}" for name, size in _sizes(found).items())
    each = "" if cost is None else f" ({sizes})"
    table.add_row("fits", f"{'yes' if found.fits else 'no'}: {size_text(found.needed_bytes)} of {limit} a chip{each}")
    if cost is None:
        return table
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


def _largest(found: Plan) -> dict[str, float]:
    """Returns the seconds of the largest parts of a round, and of the others together."""
    parts = list(found.cost.parts.items())
    rest = sum(seconds for _, seconds in parts[LARGEST_PARTS:])
    return dict(parts[:LARGEST_PARTS]) | ({"others": rest} if rest else {})


def _parts_table(found: Plan) -> Table:
    table = _table(None, "part of a round", "predicted", "%")
    whole = sum(found.cost.parts.values()) or 1.0
    for name, seconds in _largest(found).items():
        table.add_row(name, _duration(seconds), f"{100 * seconds / whole:.0f}")
    return table


def picture(found: Plan) -> plots.Figure:
    """Plots the memory of a chip, part by part, against its limit, and the predicted seconds of a round by function."""
    figure = plots.new_figure(9, 3.8, layout="constrained")
    memory, seconds = figure.subplots(1, 2, width_ratios=(1, 2))
    bottom = 0.0
    sizes = {"needed": found.needed_bytes} if found.cost is None else _sizes(found)
    for name, size in sizes.items():
        memory.bar(0, size / 1e9, 0.6, bottom=bottom / 1e9, label=f"{name}, {size_text(size)}")
        bottom += size
    memory.axhline(found.limit_bytes / 1e9, color="black", ls="--", lw=1)
    memory.set(xlim=(-0.5, 0.5), xticks=[], ylabel="GB a chip", title=f"memory of {size_text(found.limit_bytes)}")
    memory.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.02), frameon=False)
    if found.cost is None:
        seconds.text(0.5, 0.5, "refused by the compiler: it does not fit", ha="center")
        seconds.set_axis_off()
        return figure
    parts = _largest(found)
    at = np.arange(len(parts))[::-1]
    seconds.barh(at, [1000 * value for value in parts.values()])
    seconds.set_yticks(at, list(parts), fontsize=7)
    seconds.set(xlabel="ms a round, predicted", title=f"{found.target}: {_duration(found.cost.seconds)} a round")
    seconds.grid(axis="x", alpha=0.3)
    return figure
