"""`sweep`: a method with all combinations of its options, judged on examples that no client trains on.

The combinations are the *cells* of a grid. Cells that differ in traced numbers alone, and all seeds, are *rows* of one
compiled program. A call of the program advances some rows, so that finished cells are kept while others still run.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np

from jfcl import mapping
from jfcl.analysis import metrics, plots
from jfcl.core import Algorithm, Clients, check, check_choice, check_clients, check_key, require
from jfcl.core.options import OneOf, Range, check_options
from jfcl.data import hold_out
from jfcl.mapping import memory
from jfcl.mapping.jitted import make_room_for_programs
from jfcl.simulation.evaluation import SERVE, Silence, serving_part
from jfcl.simulation.folder import check_folder
from jfcl.simulation.grid_folder import SweepFolder
from jfcl.simulation.loop import rounds_at_once
from jfcl.simulation.progress import Watch
from jfcl.simulation.resident import Resident
from jfcl.simulation.run import check_data, check_method, seed_names, warn_if_steps_come_at_once

# The results on held-out examples, and whether more is better.
METRICS = {
    "accuracy": True,
    "worst_client_accuracy": True,
    "worst_decile_accuracy": True,
    "pooled_accuracy": True,
    "loss": False,
    "perplexity": False,
}
MOST_CELLS = 10**5
Value = int | float | str | bool


class Cell(NamedTuple):
    """One combination of options, and its results on the held-out examples.

    Attributes:
      values: the options by name.
      per_seed: for each seed `seed`, `diverged` (whether its models or results are not finite, or no client sent a
        finite update) and, unless it diverged, the metrics of `jfcl.metrics.summarize`.
      mean, std: of the metrics over seeds; empty if a seed diverged. A deviation is None for one seed.
    """

    values: dict[str, Value]
    per_seed: list[dict[str, Any]]
    mean: dict[str, float]
    std: dict[str, float | None]


class Sweep(NamedTuple):
    """The result of a sweep.

    Attributes:
      grid: the values of every option.
      cells: in the order of `itertools.product`: the last option changes fastest.
      metric: that the cells are judged by.
      best: the number of the best cell, the first of equals; `None` if all have diverged.
      seconds, compile_seconds: of this call, without compilation, and of compilation.
    """

    grid: dict[str, list[Value]]
    cells: list[Cell]
    metric: str
    best: int | None
    seconds: float
    compile_seconds: float

    def rows(self) -> list[dict[str, Any]]:
        """Returns a dict for each cell with its options and its mean metrics, ready for `pandas.DataFrame`."""
        return [cell.values | cell.mean for cell in self.cells]


@memory.out_of_memory()
def sweep(
    make: Callable[..., Algorithm],
    grid: Mapping[str, Sequence[Value]],
    clients: Clients,
    *,
    key: jax.Array,
    num_rounds: Annotated[int, Range(1)],
    held_out: Clients | None = None,
    share: float = 0.2,
    metric: Annotated[str | None, OneOf(METRICS)] = None,
    traced: Collection[str] | None = None,
    seeds: list[int] | None = None,
    serve: Annotated[str, OneOf(SERVE)] = "loss",
    row_axis: mapping.Mapping | None = None,
    at_once: Annotated[int | None, Range(1)] = None,
    client_axis: mapping.Mapping | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    config: dict[str, Any] | None = None,
    progress: bool = False,
) -> Sweep:
    """Runs a method with every combination of options, and judges each on held-out examples after the last round.

    Options with numbers that may be tracers, and seeds, are arguments of one compiled program; every combination of the
    other options is compiled by itself. All cells have the same keys, clients and held-out examples. A cell that
    diverges is marked, and the others continue.

    Args:
      make: `(**options) -> Algorithm`, with the names of `grid`. The task of the algorithms should be made once,
        outside of it. With the default `row_axis`, the algorithms must not use `jfcl.sharded`.
      grid: the values of each option: numbers, texts and booleans.
      clients: training data.
      key: one key, or `[R]` of them: the seeds of each cell.
      num_rounds: `T`.
      held_out: examples to judge on, row `i` of client `i`, which must be neither trained on nor those of the final
        test; default: `jfcl.data.hold_out(clients, share)`, and the clients train on the rest.
      share: the share of every client's examples that is held out where `held_out` is None.
      metric: a name in `METRICS`; default: `"accuracy"`, or `"loss"` for a task without.
      traced: the options that are tracers in `make`; default: those with floats only.
      seeds: names of the `R` keys; default `0 .. R-1`.
      serve: as in `jfcl.simulate`.
      row_axis: mapping over cells and seeds of one program; default: divided among all devices, and on each `jax.vmap`,
        on a CPU one after another.
      at_once: rows on each device in one call of the program; default: 1 on a CPU, else as many as fit into memory.
      client_axis: mapping of evaluations over clients; default: `jfcl.auto()`.
      out: a folder for the results: `cells/NUMBER.json` for each finished cell, `sweep.json`, and for two options or
        more `heatmap.png`.
      resume: continue the sweep in `out`, or begin it. Finished cells are verified and kept, the others run again.
      config: JSON-like description of clients and options, kept in `out`; a resumption with another one is refused.
      progress: show a bar.

    Returns:
      `Sweep`. Cost: cells times seeds times a run; memory: `at_once` states and temporaries on a device.

    Raises:
      ValueError: bad input, before anything is compiled: an empty axis, a value twice, values that `make` refuses, an
        option in `traced` that `make` cannot take as a tracer, a folder with another sweep.
      KeyboardInterrupt: on Ctrl-C; finished cells are kept.

    Example:
      >>> import jax, jfcl, numpy as np, optax
      >>> task = jfcl.models.task(lambda key: {"b": jax.numpy.zeros(())}, lambda p, x: x + p["b"], kind="regression")
      >>> clients = jfcl.Clients({"x": np.zeros((2, 5), np.float32), "y": np.ones((2, 5), np.float32)}, np.full(2, 5))
      >>> def make(lr, num_clusters):
      ...     return jfcl.ifca(task, jfcl.local_training(optax.sgd(lr), num_steps=1), num_clusters=num_clusters)
      >>> grid = {"lr": [0.1, 0.25, 0.5], "num_clusters": [1, 2]}
      >>> found = jfcl.sweep(make, grid, clients, key=jax.random.key(0), num_rounds=2)
      >>> found.cells[found.best].values, [round(cell.mean["loss"], 2) for cell in found.cells[::2]]
      ({'lr': 0.5, 'num_clusters': 1}, [0.41, 0.06, 0.0])
    """
    # Check the options, without the data.
    check_options(sweep, locals())
    check_key(key)
    require(out is not None or not resume, "resume needs out, the folder of the sweep")
    require(jax.process_count() == 1, f"a sweep runs in one process, and this is one of {jax.process_count()}")
    keys = key[None] if key.ndim == 0 else key
    seeds = seed_names(seeds, len(keys))
    grid = check_grid(grid)
    traced = check_traced(grid, traced)
    if out is not None:
        check_folder(out, resume, "sweep")

    # The data.
    held_share = None if held_out is not None else share
    check_clients(clients)
    if held_out is None:
        clients, held_out = hold_out(clients, share)
    client_axis = mapping.or_auto(client_axis)
    check_data(client_axis, {"clients": clients, "held_out": held_out})
    warn_if_steps_come_at_once(clients)

    # One group of rows for each combination of options that are no tracers. Everything that `make` refuses shows here.
    if row_axis is None:  # rows are divided among all devices
        mesh = mapping.client_mesh()
        row_axis = mapping.auto() if mesh.size == 1 else mapping.sharded(mesh, mapping.auto())
    axes = {"row_axis": row_axis, "client_axis": client_axis}
    data = Shared(clients, held_out, keys, num_rounds, serve, axes)
    cells = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    numbers = defaultdict(list)  # of the cells of a group, by their options that are no tracers
    for i, values in enumerate(cells):
        numbers[static_options(values, traced)].append(i)
    groups = [Group(make, cells, group, traced, data, at_once) for group in numbers.values()]
    task = groups[0].task
    metric = metric or ("loss" if task.correct is None else "accuracy")
    has_metric = metric == "loss" or (task.perplexity if metric == "perplexity" else task.correct is not None)
    check(has_metric, "metric", metric, "one that the task has")

    # Run.
    setting = {"grid": grid, "traced": sorted(traced), "num_rounds": num_rounds}
    setting |= {"seeds": seeds, "share": held_share, "metric": metric, "serve": serve, "config": config}
    setting |= {"key": np.asarray(jax.random.key_data(keys)).tolist()}
    finished: dict[int, list[dict[str, Any]]] = {}
    total, folder = len(cells) * len(keys) * num_rounds, None
    with contextlib.ExitStack() as opened, Watch(total, description="cells", progress=progress) as watch:
        if out is not None:
            folder = opened.enter_context(SweepFolder.open(out, setting, resume))
            finished = folder.finished(cells)
            if resume:
                watch.tell(f"resuming {out}: {len(finished)} of {len(cells)} configurations are there")
        watch.begin(len(finished) * len(keys) * num_rounds, total)
        for group in groups:
            make_room_for_programs()
            for cell, per_seed in group.run(finished, seeds, watch):
                finished[cell] = per_seed
                if folder is not None:
                    folder.keep(cell, cells[cell], per_seed)
        judged = [make_cell(values, finished[i]) for i, values in enumerate(cells)]
        result = Sweep(grid, judged, metric, best_of(judged, metric), *watch.clock())
        if folder is not None:
            drawn = plots.png(picture(result)) if len(grid) > 1 else None
            folder.finish(result.best, [cell._asdict() for cell in judged], drawn)
    return result


# Grids and results.


def check_grid(grid: Mapping[str, Sequence[Value]]) -> dict[str, list[Value]]:
    """Returns the grid with Python's types; `ValueError` for an empty axis, a repeated value, or too many cells."""
    check(isinstance(grid, Mapping) and len(grid) > 0, "grid", grid, "a dict of options and their values, not empty")
    checked = {}
    for name, values in grid.items():
        whole = isinstance(values, (Sequence, np.ndarray)) and not isinstance(values, str) and len(values) > 0
        check(whole, f"grid: {name}", values, "a list of at least one value")
        values = [value.item() if isinstance(value, (np.generic, jax.Array)) else value for value in values]
        if {*map(type, values)} == {int, float}:
            values = [float(value) for value in values]
        for i, value in enumerate(values):
            check(isinstance(value, Value) and value == value, f"grid: {name}", value, "numbers, texts or booleans")
            twice = any(type(value) is type(v) and value == v for v in values[:i])
            require(not twice, f"grid: {name} has {value!r} twice")
        checked[str(name)] = values
    count = int(np.prod([float(len(values)) for values in checked.values()]))
    require(count <= MOST_CELLS, f"grid has {count} combinations, more than {MOST_CELLS}")
    return checked


def check_traced(grid: dict[str, list[Value]], traced: Collection[str] | None) -> frozenset[str]:
    """Returns the options that are tracers, by default those of floats; `ValueError` for one that holds no numbers."""
    floats = {name for name, values in grid.items() if all(isinstance(value, float) for value in values)}
    if traced is None:
        return frozenset(floats)
    for name in traced:
        check_choice("traced", name, grid)
        whole = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in grid[name])
        check(whole, f"traced: {name}", grid[name], "numbers")
    return frozenset(traced)


def static_options(values: dict[str, Value], traced: Collection[str]) -> tuple[tuple[str, str, Value], ...]:
    """Returns name, type and value of a cell's options that are no tracers; the types tell 1 from `True`."""
    return tuple((name, type(value).__name__, value) for name, value in values.items() if name not in traced)


def make_cell(values: dict[str, Value], per_seed: list[dict[str, Any]]) -> Cell:
    """Returns a cell with the mean and the sample standard deviation over its seeds, None for one."""
    if any(row["diverged"] for row in per_seed):
        return Cell(values, per_seed, {}, {})
    columns = {name: [row[name] for row in per_seed] for name in METRICS if name in per_seed[0]}
    mean = {name: float(np.mean(column)) for name, column in columns.items()}
    return Cell(values, per_seed, mean, {name: metrics.deviation(column) for name, column in columns.items()})


def best_of(cells: list[Cell], metric: str) -> int | None:
    """Returns the number of the cell with the best mean, the first of equals; `None` if all have diverged."""
    sign = 1 if METRICS[metric] else -1
    scores = [sign * cell.mean[metric] if cell.mean else -np.inf for cell in cells]
    return int(np.argmax(scores)) if max(scores) > -np.inf else None


def picture(result: Sweep) -> plots.Figure:
    """Returns the heat-map of a `Sweep` over its first two options, with the best result over the others.

    Example:
      >>> cells = [Cell({"a": a, "b": b}, [], {"loss": a * b}, {}) for a in (1.0, 2.0) for b in (3, 4)]
      >>> picture(Sweep({"a": [1.0, 2.0], "b": [3, 4]}, cells, "loss", 0, 0, 0)).axes[0].get_ylabel()
      'a'
    """
    (rows, columns), better = list(result.grid)[:2], METRICS[result.metric]
    values = np.full((len(result.grid[rows]), len(result.grid[columns])), np.nan)
    best = np.fmax if better else np.fmin
    for cell in result.cells:
        at = result.grid[rows].index(cell.values[rows]), result.grid[columns].index(cell.values[columns])
        values[at] = best(values[at], cell.mean.get(result.metric, np.nan))
    further = ", ".join(list(result.grid)[2:])
    label = f"{result.metric.replace('_', ' ')} on held-out examples{f', best over {further}' if further else ''}"
    return plots.heatmap(
        values, {rows: result.grid[rows], columns: result.grid[columns]}, label=label, more_is_better=better
    )


# Rows: cells and seeds that are one compiled program, some of them at a time.


class Shared(NamedTuple):
    """The data, keys and settings that all cells share."""

    clients: Clients
    held_out: Clients
    keys: jax.Array
    num_rounds: int
    serve: str
    axes: dict[str, mapping.Mapping]


@dataclass(frozen=True)
class Maker:
    """The function of the traced options; those with the same other options are equal, and share programs."""

    make: Callable[..., Algorithm]
    static: tuple

    def __call__(self, **values: Any) -> Algorithm:
        return self.make(**{name: value for name, _, value in self.static}, **values)


class Group:
    """The cells of one compiled program: they differ in traced options alone.

    Attributes:
      task: of the algorithms.
    """

    def __init__(self, make, cells, numbers, traced, data, at_once):
        """Raises every error of a round, and takes as many rows at once as fit into memory.

        The data are on the devices meanwhile, and again while the group runs: never those of two groups.
        """
        self._data, self._maker = data, Maker(make, static_options(cells[numbers[0]], traced))
        self._rows, self._cells, self._traced = list(itertools.product(numbers, range(len(data.keys)))), cells, traced
        algorithms = [make(**cells[i]) for i in numbers]
        method = algorithms[0]
        check(isinstance(method, Algorithm), "make", type(method).__name__, "a function that returns an Algorithm")
        check(method.task is not None, "make", "an Algorithm without task", "a function that returns one with a task")
        check_method(method, {"clients": data.clients, "held_out": data.held_out})
        alike = {serving_part(algorithm) for algorithm in algorithms}
        self._serving = self._maker if len(alike) > 1 else alike.pop()
        self.task = method.task

        row_axis = data.axes["row_axis"]
        devices = row_axis.mesh.size if isinstance(row_axis, mapping.sharded) else 1
        most = -(-len(self._rows) // devices)
        per_device = min(most, at_once or (1 if mapping.platform_of(row_axis) == "cpu" else most))
        while True:
            self._size = per_device * devices
            try:
                self._placed()
                return
            except ValueError:
                if per_device == 1 or at_once is not None:
                    raise
                per_device = -(-per_device // 2)

    def _placed(self) -> Resident:
        """Returns the source of rows; raises every error of a round, and that of options that cannot be tracers."""
        data, options = self._data, {"seeds": list(range(self._size)), **self._data.axes}
        try:
            arguments = self._arguments(self._rows[: self._size])
            source = Resident(self._maker, data.clients, *arguments, test_clients=data.held_out, **options)
            source.place(data.serve, serving=self._serving)
        except (TypeError, ValueError) as error:  # those of jax, of which some are ValueErrors, and of checks
            why = str(error).splitlines()[0]
            if not self._traced or "trace" not in why.lower():
                raise
            names = ", ".join(self._traced)
            raise ValueError(f"traced must be options that make takes as tracers, got {names} ({why})") from None
        return source

    def _arguments(self, rows: list[tuple[int, int]]) -> tuple[jax.Array, dict[str, np.ndarray]]:
        """Returns the keys and traced options of some rows, filled up with the first row to the size of a call."""
        rows = rows + rows[:1] * (self._size - len(rows))
        values = {name: np.array([self._cells[i][name] for i, _ in rows], np.float32) for name in self._traced}
        return self._data.keys[np.array([seed for _, seed in rows])], values

    def run(self, done: Collection[int], seeds: list[int], watch: Watch) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        """Yields `(cell, per_seed)` of each cell that is not `done`, as soon as all its seeds are finished."""
        rows, results = [row for row in self._rows if row[0] not in done], defaultdict(list)
        source = self._placed() if rows else None
        for begin in range(0, len(rows), self._size):
            some = rows[begin : begin + self._size]
            for (cell, seed), result in zip(some, self._run_rows(source, some, watch), strict=True):
                results[cell].append({"seed": seeds[seed]} | result)
                if len(results[cell]) == len(seeds):
                    yield cell, results.pop(cell)

    def _run_rows(self, source: Resident, rows: list[tuple[int, int]], watch: Watch) -> list[dict[str, Any]]:
        """Returns the results of some rows."""
        rounds, note, count = self._data.num_rounds, f"cell {rows[0][0] + 1}", len(rows)
        source.rows = self._arguments(rows)
        state, silence = source.first_state(), Silence(*np.zeros((2, self._size), np.int32))
        done, at_most, lost, ended = 0, 1, np.zeros(self._size, bool), np.zeros(self._size, bool)
        while done < rounds and not (lost | ended).all():  # rounds that are left out would change nothing
            if watch.interrupted:
                raise KeyboardInterrupt
            length, began = min(at_most, rounds - done), watch.seconds()
            block = source.advance(state, done + 1, length, silence)
            state, silence, done = block.state, block.silence, done + length
            lost |= ~np.asarray(block.finite) | (block.most_silent >= source.most_silent)
            ended = np.asarray(block.values.get("ended", False))
            at_most = rounds_at_once(length, watch.seconds() - began)
            watch.advance(length * count, note)
        watch.advance((rounds - done) * count, note)
        judged, size, results = source.held_out(state, lost), np.asarray(self._data.held_out.size), []
        for i in range(count):
            summary = metrics.summarize({name: values[i] for name, values in judged.items()}, size)
            diverged = bool(lost[i]) or not np.isfinite(list(summary.values())).all()
            results.append({"diverged": diverged} | ({} if diverged else summary))
        return results
