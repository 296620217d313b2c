"""`jfcl plan`: the run of a `Config`, compiled for an accelerator that is not there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import numpy as np

from jfcl import mapping
from jfcl.analysis import plots
from jfcl.core import Clients, check, client_shapes, files, max_examples, num_bytes
from jfcl.experiments.comparison import size_text
from jfcl.experiments.config import Config
from jfcl.experiments.options import PRECISIONS
from jfcl.experiments.setups import load_dataset, make_algorithm, make_federation, make_task, make_training
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
    check(target is not None, "target", target, "given, such as --target v5e:2x4 or --target h100")
    chosen = targets.target(target)
    accepted = "left out: plan --clients as many as the cohort"
    check(not config.of_population, "population, store", (config.population, config.store), accepted)
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
    about |= {"seconds": found.seconds(config.rounds), "config": config.values}
    out.mkdir(parents=True, exist_ok=True)
    content = (
        files.json_bytes(finite_or_none(about | found.as_dict())),
        plots.png(picture(found)),
        found.step_hlo.encode(),
        found.init_hlo.encode(),
    )
    files.replace_together(out, dict(zip(FILES, content, strict=True)))


def duration(seconds: float | None) -> str:
    """Returns a duration in a fitting unit.

    Example:
      >>> [duration(s) for s in (None, 0.00345, 12.3, 7300.0)]
      ['–', '3.45 ms', '12.3 s', '2.03 h']
    """
    if seconds is None or seconds != seconds:
        return "–"
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def sizes_of(found: Plan) -> dict[str, float]:
    """Returns the bytes on a chip, part by part."""
    return {
        "data": found.data_bytes,
        "state and padding": max(found.argument_bytes - found.data_bytes, 0),
        "results": found.output_bytes,
        "temporaries": found.temp_bytes,
        "tests": found.other_bytes,
    }


def largest_parts(found: Plan) -> dict[str, float]:
    """Returns the seconds of the largest parts of a round, and of the others together."""
    parts = list(found.cost.parts.items())
    rest = sum(seconds for _, seconds in parts[LARGEST_PARTS:])
    return dict(parts[:LARGEST_PARTS]) | ({"others": rest} if rest else {})


def picture(found: Plan) -> plots.Figure:
    """Plots the memory of a chip, part by part, against its limit, and the predicted seconds of a round by function."""
    figure = plots.new_figure(9, 3.8, layout="constrained")
    memory, seconds = figure.subplots(1, 2, width_ratios=(1, 2))
    bottom = 0.0
    sizes = {"needed": found.needed_bytes} if found.cost is None else sizes_of(found)
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
    parts = largest_parts(found)
    at = np.arange(len(parts))[::-1]
    seconds.barh(at, [1000 * value for value in parts.values()])
    seconds.set_yticks(at, list(parts), fontsize=7)
    seconds.set(xlabel="ms a round, predicted", title=f"{found.target}: {duration(found.cost.seconds)} a round")
    seconds.grid(axis="x", alpha=0.3)
    return figure
