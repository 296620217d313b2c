"""Tables that the command line prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table
from rich.text import Text

from jfcl import data, kernels, models
from jfcl.experiments.comparison import results_rows
from jfcl.experiments.optimizers import OPTIMIZERS, SCHEDULES
from jfcl.methods import METHODS
from jfcl.robust import attacks
from jfcl.training.augment import AUGMENTATIONS

LOOK = {"box": SIMPLE_HEAD, "show_edge": False, "title_justify": "left", "title_style": ""}  # of a table


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
