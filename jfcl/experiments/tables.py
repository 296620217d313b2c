"""Tables that the command line prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from jfcl import data, kernels, models
from jfcl.algorithms import METHODS, attacks
from jfcl.client.augment import AUGMENTATIONS
from jfcl.experiments import RECIPES
from jfcl.simulation.folder import read_json

NOT_COMPARED = ("method", "split_hash", "cohorts", "key", "versions")


def number(value: float | None, std: float | None, digits: int) -> str:
    """Returns `value`, and the standard deviation where there is one, with so many decimals."""
    if value is None:
        return "–"
    return f"{value:.{digits}f}" + ("" if std is None else f"±{std:.{digits}f}")


def size_text(value: float) -> str:
    """Returns a number of bytes in the largest fitting unit, such as `"1.5 MB"`."""
    units = ("B", "kB", "MB", "GB", "TB")
    steps = next((i for i in range(len(units)) if value < 1000 ** (i + 1)), len(units) - 1)
    return f"{value / 1000**steps:.{min(steps, 1)}f} {units[steps]}"


def numbers_table(title: str, names: Sequence[str], heads: Sequence[str]) -> Table:
    """Returns an empty table with columns of names and columns of numbers, one blank apart."""
    table = Table(title=Text(title), box=SIMPLE_HEAD, show_edge=False, padding=0, title_justify="left", title_style="")
    for name in names:
        table.add_column(name, overflow="fold")
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def results_table(summaries: dict[str, dict[str, Any]], title: str) -> Table:
    """Returns a table with one row per run: mean ± standard deviation over seeds, in 80 columns."""
    texts = any("perplexity" in summary["mean"] for summary in summaries.values())
    first = ("perplex-\nity", "perplexity", 1, 1) if texts else ("client\nacc. %", "accuracy", 100, 1)
    metrics = (
        first,
        ("worst\nclient %", "worst_client_accuracy", 100, 1),
        ("identity\nacc. %", "cluster_accuracy", 100, 1),
        ("adjusted\nRand", "adjusted_rand", 1, 2),
    )
    others = ("clusters\nin use", "found at\nround", "sent up\nand down", "steps/s")
    table = numbers_table(title, ["run"], [*(head for head, *_ in metrics), *others])
    for name, summary in summaries.items():
        mean, std = summary["mean"], summary["std"]
        several, alone = len(summary["per_seed"]) > 1, summary["num_clusters"] == 1  # one cluster is always found
        cells = []
        for _, metric, scale, digits in metrics:
            unknown = mean.get(metric) is None or (alone and metric in ("cluster_accuracy", "adjusted_rand"))
            deviation = scale * std[metric] if several and not unknown else None
            cells.append(number(None if unknown else scale * mean[metric], deviation, digits))
        recovered = [row["rounds_to_recovery"] for row in summary["per_seed"]]
        found = [r for r in recovered if r is not None and not alone]
        rounds = "–" if not found else f"{sum(found) / len(found):.0f}"
        if found and len(found) < len(recovered):
            rounds += f"\n({len(found)} of {len(recovered)})"
        sent = f"{size_text(summary['bytes_up'])}\n{size_text(summary['bytes_down'])}"
        in_use = number(mean["clusters_in_use"], None, 1)
        table.add_row(Text(name), *cells, in_use, rounds, sent, f"{summary['client_steps_per_second']:,.0f}")
    return table


def seeds_text(summary: dict[str, Any]) -> str:
    """Returns the seeds of a run, for the title of a table."""
    count = len(summary["per_seed"])
    return f"mean ± std over {count} seeds" if count > 1 else f"seed {summary['per_seed'][0]['seed']}"


def differences(folders: list[str]) -> list[str]:
    """Returns the options in which runs differ, with their values."""
    configs = [read_json(Path(folder) / "config.json") for folder in folders]
    for config, folder in zip(configs, folders, strict=True):  # rounds that were computed
        config["num_rounds"] = read_json(Path(folder) / "summary.json")["num_rounds"]
    for config in configs:
        if config.get("population") is not None or config.get("store") is not None:
            config["clients"] = None  # without effect there
    texts = []
    for name in dict.fromkeys(name for config in configs for name in config):
        values = list(dict.fromkeys(str(config.get(name)) for config in configs))
        if len(values) > 1 and name not in NOT_COMPARED:
            texts.append(f"{name.removeprefix('num_')} ({', '.join('–' if v == 'None' else v for v in values)})")
    return texts


def rows_table(rows: list[dict[str, Any]], title: str) -> Table:
    """Returns the table of a recipe: the columns are the names in `rows`."""
    table = Table(title=title, title_justify="left", title_style="", box=SIMPLE_HEAD, show_edge=False)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    for name in columns:
        table.add_column(name)
    for row in rows:
        table.add_row(*[_cell(row.get(name)) for name in columns])
    return table


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def bench_table(found: dict[str, Any]) -> Table:
    """Returns the table of `jfcl bench`: a row for each measured round."""
    title = "One round: {local_steps} local steps of batch {batch_size}, {examples} examples a client"
    heads = ("clients", "rounds\n/s", "client-\nsteps/s", "of\npeak", "temp.\nMB", "compile\ns")
    table = numbers_table(title.format(**found["settings"]), ("method", "model", "mapping"), heads)
    for row in found["rows"]:
        cells = [row["method"], row["model"], row["mapping"], f"{row['clients']:,}"]
        if "left_out" in row:
            cells += ["–", row["left_out"]]
        else:
            memory = "–" if row["temporary_mb"] is None else f"{row['temporary_mb']:,.1f}"
            rounds = row["rounds/s"]
            cells += [f"{rounds:,.0f}" if rounds >= 100 else f"{rounds:.3g}", f"{row['client_steps/s']:,.0f}"]
            cells += [f"{row['peak']:.0%}", memory, f"{row['compile_seconds']:.1f}"]
        table.add_row(*cells)
    return table


def lists() -> dict[str, dict[str, str]]:
    """Returns the lists of `jfcl list`: of each, the names and one line on each of them."""

    def first_lines(functions) -> dict[str, str]:
        return {name: (fn.__doc__ or "").split("\n")[0] for name, fn in functions.items()}

    return {
        "methods": {name: method.summary for name, method in METHODS.items()},
        "datasets": {name: entry[1] for name, entry in data.DATASETS.items()}
        | {"(any other)": "an image classification set of tensorflow-datasets, by its name there"},
        "models": {name: entry[1] for name, entry in models.MODELS.items()},
        "heterogeneities": {name: entry[1] for name, entry in data.HETEROGENEITY.items()},
        "partitions": {name: entry[1] for name, entry in data.PARTITIONS.items()},
        "augmentations": first_lines(AUGMENTATIONS),
        "attacks": first_lines(attacks.UPDATE_ATTACKS | attacks.DATA_ATTACKS),
        "aggregators": first_lines(kernels.AGGREGATORS)
        | {f"{name}+...": text for name, text in first_lines(kernels.PRE_AGGREGATORS).items()}
        | {"nnm+...": "as nearest_neighbour_mixing+..."},
        "recipes": {name: recipe.title for name, recipe in RECIPES.items()},
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
