"""Pieces that the papers' recipes share: options of a setting, records by seed, rows of tables, panels of figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.papers.recipes import Bench, Outcome, Row
from jfcl.analysis import plots
from jfcl.analysis.metrics import deviation
from jfcl.experiments.config import Config
from jfcl.experiments.options import COMMON, method_options, methods_with

Records = Sequence[Row]


def configure(method: str, setting: dict[str, Any]) -> Config:
    """Returns the run of a method with those entries of a setting that are its options."""
    names = {name for name in COMMON if method in methods_with(name)} | method_options(method).keys()
    given = {name: value for name, value in setting.items() if name in names}
    if "restarts" in names and given.get("restarts") is None:  # the papers have none
        given["restarts"] = 1
    return Config(method, **given)


def by_seed(records: Records) -> dict[int, list[Row]]:
    """Returns the records of each seed."""
    return {seed: [r for r in records if r["seed"] == seed] for seed in sorted({r["seed"] for r in records})}


def first_seed(records: Records) -> list[Row]:
    """Returns the records of the first seed."""
    return by_seed(records)[records[0]["seed"]]


def column(records: Records, name: str, slot: int | None = None) -> np.ndarray:
    """Returns a metric by record, `[E]`, or one cluster's entry of it; NaN where it is None."""
    return np.array([r[name] if slot is None else r[name][slot] for r in records], float)


def seed_columns(records: Records, name: str, slot: int = 0) -> np.ndarray:
    """Returns one cluster's entry of a metric by round and seed, `[E, R]`."""
    return np.stack([column(mine, name, slot) for mine in by_seed(records).values()], axis=1)


def mean_and_std(values: Sequence[float], name: str = "accuracy %") -> Row:
    """Returns the mean and the sample standard deviation of a value over seeds, as columns."""
    return {name: float(np.mean(values)), "std": deviation(values)}


def accuracy_columns(summary: dict[str, Any], name: str = "accuracy %") -> Row:
    """Returns the columns of a run: its accuracy, and the seconds of all seeds without compilation."""
    accuracies = [100 * row["accuracy"] for row in summary["per_seed"]]
    return mean_and_std(accuracies, name) | {"seconds": summary["seconds"]}


def paper_columns(accuracy: float, paper: float | None) -> Row:
    """Returns the columns of the paper's accuracy, None where it gives none, and of our difference from it.

    Example:
      >>> paper_columns(94.5, 95.0)
      {'paper %': 95.0, 'difference': -0.5}
    """
    return {"paper %": paper, "difference": None if paper is None else accuracy - paper}


def panels(
    width: float, height: float, rows: int = 1, columns: int = 1, **shared: Any
) -> tuple[plots.Figure, np.ndarray]:
    """Returns a figure in inches, and its axes `[rows, columns]`."""
    figure = plots.new_figure(width, height, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, **shared)
    for axes in grid.flat:
        axes.set_prop_cycle(color=plots.PALETTE)
    return figure, grid


def label_axes(axes: plots.Axes, fontsize: float | None = None, **texts: Any) -> None:
    """Sets labels, title and scales of a panel, and adds its legend."""
    axes.set(**texts)
    axes.legend(fontsize=fontsize)


def plot_metric(
    axes: plots.Axes, records: Records, name: str, *style: str, slot: int | None = None, **options: Any
) -> None:
    """Plots a metric by round."""
    axes.plot([r["round"] for r in records], column(records, name, slot), *style, **options)


def plot_band(axes: plots.Axes, x: Sequence[float], values: np.ndarray, **options: Any) -> None:
    """Plots the mean over the seeds of `values [E, R]`, in a band from the least to the largest."""
    (line,) = axes.plot(x, values.mean(axis=1), **options)
    axes.fill_between(x, values.min(axis=1), values.max(axis=1), color=line.get_color(), alpha=0.15)


def kept_cells(
    bench: Bench, compute: Callable[[str | None, dict[str, Any], Row], Row], setting: dict[str, Any], cells: list[Row]
) -> list[list[Row]]:
    """Returns what `compute(data_dir, setting, cell)` returns for each cell, by seed; the cell that it gets has one.

    Each result is kept in a file of its own.
    """

    def name(cell: Row) -> str:
        return "-".join(map(str, cell.values())).replace(" ", "_").replace("'", "")

    of_seeds = [[cell | {"seed": seed} for seed in range(setting["seeds"])] for cell in cells]
    calls = {name(one): (compute, bench.data_dir, setting, one) for of in of_seeds for one in of}
    kept = bench.keep_all(calls, "cells")
    return [[kept[name(one)] for one in of] for of in of_seeds]


def accuracy_of(kept: Sequence[Row]) -> Row:
    """Returns the columns of a cell: its last accuracy in percent, over seeds, and the seconds of all seeds."""
    return mean_and_std([one["accuracy %"][-1] for one in kept]) | {"seconds": sum(one["seconds"] for one in kept)}


def plot_epochs(axes: plots.Axes, kept: Sequence[Row], label: str) -> None:
    """Plots the accuracy by epoch, the mean over seeds."""
    axes.plot(kept[0]["epoch"], np.mean([one["accuracy %"] for one in kept], axis=0), label=label)


class Cell(NamedTuple):
    """A run of a recipe, which becomes a row of its table and a curve of its figure.

    Attributes:
      labels: the first columns of its row, and the name of its folder; the accuracy follows.
      config: the run.
      paper: the last columns of its row; the difference from `paper %` is added.
    """

    labels: Row
    config: Config
    paper: Row


def run_cells(
    bench: Bench,
    cells: Sequence[Cell],
    accuracy: str = "accuracy %",
    measured: Callable[[dict[str, Any], Records], Row] = lambda summary, records: {},
) -> tuple[list[Row], list[Records]]:
    """Runs the cells: a row for each, with mean and deviation over seeds, and the records of each.

    `measured` returns the columns after the accuracy.
    """
    folders = ["-".join(cell.labels.values()).replace(" ", "_").replace(",", "").lower() for cell in cells]
    runs = bench.run_all({folder: cell.config for folder, cell in zip(folders, cells, strict=True)})
    rows = []
    for folder, cell in zip(folders, cells, strict=True):
        summary, records = runs[folder]
        row = cell.labels | accuracy_columns(summary, accuracy) | measured(summary, records) | cell.paper
        if "paper %" in cell.paper:
            row |= paper_columns(row[accuracy], cell.paper["paper %"])
        rows.append(row)
    return rows, [runs[folder][1] for folder in folders]


def compare(
    bench: Bench, cells: Sequence[Cell], xlabel: str, *, title: str = "", lw: float | None = None, **options: Any
) -> Outcome:
    """Returns the rows of `run_cells(bench, cells, **options)`, and each first seed's accuracy by step for a figure.

    A step is a round, or as many steps as a round has where `xlabel` is `"local steps"`.
    """
    rows, runs = run_cells(bench, cells, **options)
    figure, [[axes]] = panels(6.4, 4.2)
    for cell, records in zip(cells, runs, strict=True):
        first = first_seed(records)
        steps = cell.config.local_steps or 1 if xlabel == "local steps" else 1
        x, label = [r["round"] * steps for r in first], ", ".join(cell.labels.values())
        axes.plot(x, 100 * column(first, "accuracy"), label=label, lw=lw)
    label_axes(axes, 7, xlabel=xlabel, ylabel="accuracy %", title=title)
    return Outcome(rows, figure)
