"""Grids of options, and the results of a sweep."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jfcl.analysis import plots
from jfcl.analysis.metrics import deviation
from jfcl.core import check, check_choice

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
      per_seed: for each seed `seed`, `diverged` (whether its models are no longer finite, or no client sent a finite
        update) and, unless it diverged, the metrics of `jfcl.metrics.summarize`.
      mean, std: of the metrics over seeds; empty if a seed diverged.
    """

    values: dict[str, Value]
    per_seed: list[dict[str, Any]]
    mean: dict[str, float]
    std: dict[str, float]


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


def check_grid(grid: Mapping[str, Sequence[Value]]) -> dict[str, list[Value]]:
    """Returns the grid with Python's types; `ValueError` for an empty axis, a value twice, or too many cells."""
    check(isinstance(grid, Mapping) and len(grid) > 0, "grid", grid, "a dict of options and their values, not empty")
    checked = {}
    for name, values in grid.items():
        whole = isinstance(values, (Sequence, np.ndarray)) and not isinstance(values, str) and len(values) > 0
        check(whole, f"grid: {name}", values, "a list of at least one value")
        values = [value.item() if isinstance(value, (np.generic, jax.Array)) else value for value in values]
        numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
        if numbers and any(isinstance(value, float) for value in values):
            values = [float(value) for value in values]
        for i, value in enumerate(values):
            check(isinstance(value, Value), f"grid: {name}", value, "numbers, texts or booleans")
            check(value == value, f"grid: {name}", value, "no NaN")
            twice = [(type(v), v) for v in values].index((type(value), value)) != i
            check(not twice, f"grid: {name}", value, "given once")
        checked[str(name)] = values
    count = int(np.prod([float(len(values)) for values in checked.values()]))
    check(count <= MOST_CELLS, "grid", f"{count} combinations", f"of at most {MOST_CELLS}")
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


def grouped(cells: list[dict[str, Value]], traced: Collection[str]) -> Iterable[list[int]]:
    """Returns the numbers of the cells, grouped by their options that are no tracers."""
    groups: dict[tuple, list[int]] = {}
    for i, values in enumerate(cells):
        groups.setdefault(static_options(values, traced), []).append(i)
    return groups.values()


def static_options(values: dict[str, Value], traced: Collection[str]) -> tuple[tuple[str, str, Value], ...]:
    """Returns name, type and value of a cell's options that are no tracers; the types tell 1 from `True`."""
    return tuple((name, type(value).__name__, value) for name, value in values.items() if name not in traced)


def make_cell(values: dict[str, Value], per_seed: list[dict[str, Any]]) -> Cell:
    """Returns a cell with the mean and the sample standard deviation over its seeds, None for one."""
    if any(row["diverged"] for row in per_seed):
        return Cell(values, per_seed, {}, {})
    columns = {name: [row[name] for row in per_seed] for name in METRICS if name in per_seed[0]}
    mean = {name: float(np.mean(column)) for name, column in columns.items()}
    return Cell(values, per_seed, mean, {name: deviation(column) for name, column in columns.items()})


def best_of(cells: list[Cell], metric: str) -> int | None:
    """Returns the number of the cell with the best mean, the first of equals; `None` if all have diverged."""
    sign = 1 if METRICS[metric] else -1
    scores = [sign * cell.mean[metric] if cell.mean else -np.inf for cell in cells]
    return int(np.argmax(scores)) if max(scores) > -np.inf else None


def picture(found: Sweep) -> plots.Figure:
    """Returns the heat-map of a `Sweep` over its first two options, with the best result over the others.

    Example:
      >>> cells = [Cell({"a": a, "b": b}, [], {"loss": a * b}, {}) for a in (1.0, 2.0) for b in (3, 4)]
      >>> picture(Sweep({"a": [1.0, 2.0], "b": [3, 4]}, cells, "loss", 0, 0, 0)).axes[0].get_ylabel()
      'a'
    """
    (rows, columns), better = list(found.grid)[:2], METRICS[found.metric]
    values = np.full((len(found.grid[rows]), len(found.grid[columns])), np.nan)
    best = np.fmax if better else np.fmin
    for cell in found.cells:
        at = found.grid[rows].index(cell.values[rows]), found.grid[columns].index(cell.values[columns])
        values[at] = best(values[at], cell.mean.get(found.metric, np.nan))
    others = ", ".join(list(found.grid)[2:])
    label = f"{found.metric.replace('_', ' ')} on held-out examples{f', best over {others}' if others else ''}"
    return plots.heatmap(
        values, {rows: found.grid[rows], columns: found.grid[columns]}, label=label, more_is_better=better
    )
