"""`jfcl report`: one page of HTML on a run, or on several side by side; `templates/report.html` is its text."""

from __future__ import annotations

import base64
import contextlib
import shlex
import struct
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jfcl._version import __version__
from jfcl.analysis import plots
from jfcl.core import check, files, plain, shown, texts
from jfcl.experiments import comparison
from jfcl.experiments.comparison import is_configured, number, rate_text, size_text
from jfcl.experiments.privacy import privacy_text
from jfcl.experiments.results import Results, odd_records, read_results
from jfcl.simulation.loop import ALL_DONE

NAME = "report.html"
WORST = 10  # clients in the table of the worst
CURVES = {"accuracy": "accuracy", "loss": "train_loss"}  # pictures over rounds, and their metrics
CURVES |= {"perplexity": "perplexity", "next_accuracy": "next_accuracy"}
COSTS = {  # entries of a summary: head, text of a value
    "num_rounds": ("rounds", str),
    "num_clients": ("clients", "{:,.0f}".format),
    "bytes_up": ("bytes up, all clients and rounds of a seed", size_text),
    "bytes_down": ("bytes down, all clients and rounds of a seed", size_text),
    "seconds": ("seconds, all seeds together", "{:,.1f}".format),
    "compile_seconds": ("seconds of compilation", "{:,.1f}".format),
    "rounds_per_second": ("rounds a second, each of all seeds", rate_text),
    "client_steps_per_second": ("client-steps a second", rate_text),
    "device": ("device", str),
}
Figure = dict[str, Any]  # a picture that is part of the page, as `figure` returns it
MOST_ROWS = 300  # of a matrix of similarities; larger ones are drawn from as many rows, evenly spaced


class Table(NamedTuple):
    """A table: its `id`, the heads of its columns, its rows, each with the name first, a caption, a class.

    Columns may have heads of groups above theirs: each with its number of columns, from the second one on.
    """

    name: str
    heads: Sequence[str]
    rows: Sequence[Sequence[object]]
    caption: str = ""
    kind: str = ""
    groups: Sequence[tuple[str, int]] = ()


class Link(NamedTuple):
    """A cell of a table: its text, the `id` of what it leads to, a class."""

    text: str
    to: str = ""
    kind: str = ""


def report(runs: str | Path | Sequence[str | Path], *, out: str | Path | None = None) -> Path:
    """Writes one page of HTML on a run, or on several side by side; it needs no other file and no network.

    The page has the results, the curves with bands over seeds, the cluster of each client over rounds, the similarities
    ordered by cluster, the parameter tree, the worst clients, bytes and seconds, options, versions and the commands
    that resume the run. Of a run that is not finished it reports what there is, with a note on the page and a warning.
    For more than 20 runs it shows tables of all, curves of the first 20, and no sections on single runs. Nothing else
    in the runs' folders changes.

    Args:
      runs: a run's folder, or several.
      out: the file, `*.html`; default: `report.html` in the folder of one run, or a new file beside the first of
        several.

    Returns:
      The file.

    Raises:
      ValueError: a folder without a run; a run that is damaged, or of another version; `out` with another ending; a run
        that another process writes, for a page in its folder.

    Example:
      >>> import tempfile
      >>> from jfcl.experiments import Config, run
      >>> folder = tempfile.mkdtemp()
      >>> _ = run(Config("fedavg", clients=4, rounds=2), out=folder)  # writes a report as well
      >>> report(folder).name
      'report.html'
    """
    named = comparison.by_name(runs)
    if out is None:
        first = next(iter(named.values()))
        file = first / NAME if len(named) == 1 else comparison.beside(first, "report", ".html")
    else:
        plain.check_path("out", out)
        check(Path(out).suffix == ".html", "out", str(out), "a file that ends in .html")
        file = Path(out)
    results = {name: read_results(folder) for name, folder in named.items()}
    write_report(results, file)
    for run in results.values():
        if run.note:
            warnings.warn(f"in the report of {run.folder}: {run.note}", stacklevel=2)
    return file


@cache
def template(name: str) -> Any:
    """Returns one of `templates/`, in which every text is escaped, and control characters are written out."""
    import jinja2  # only where a page is written
    from markupsafe import Markup

    pages = jinja2.Environment(
        loader=jinja2.PackageLoader("jfcl.experiments"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else texts.printable(value),
    )
    pages.filters |= {"shown": shown, "privacy": privacy_text, "sentences": _sentences}
    return pages.get_template(name)


def write_report(runs: dict[str, Results], file: Path) -> None:
    """Writes the page on named runs, whole or not at all; in a run's folder, it holds the lock of the run.

    The template calls the functions below for the parts that it shows.
    """
    detailed = runs if len(runs) <= comparison.MOST_DRAWN else {}  # runs with sections of their own
    several = f"{len(runs)} runs{': ' * bool(detailed)}{', '.join(detailed)}"
    unfinished = [run.folder for run in runs.values() if not run.is_finished]
    with odd_records(unfinished[0]) if unfinished else contextlib.nullcontext():
        page = template("report.html").render(
            command="report",
            title=next(iter(runs)) if len(runs) == 1 else several,
            version=__version__,
            page=sys.modules[__name__],
            runs=runs,
            detailed=detailed,
        )
    is_of_run, lock = (file.parent / "config.json").exists(), file.parent / "lock"
    try:
        with files.lock(lock) if is_of_run else contextlib.nullcontext():
            files.write_whole(file, f"{page}\n".encode(errors="replace"))
    except ValueError as error:
        raise ValueError(f"{error}; or write the report elsewhere with out (--out FILE.html)") from None


def _sentences(notes: Iterable[str]) -> str:
    """Returns notes as one text."""
    return " ".join(f"{note[0].upper()}{note[1:]}." for note in notes)


# ---------------------------------------------------------------------------------------------------------------
# All runs.


def figure(
    run: Results | None, name: str, draw: Callable[[], plots.Figure] | None, caption: str = "", label: str = ""
) -> Figure | None:
    """Returns a figure: of a finished run the picture in `plots/`, otherwise a new one; None without either.

    It has an `id`, a caption (without one here, that of the template), a size, and the PNG file in base 64.
    """
    png = (run and run.read_picture(name)) or (draw and plots.png(draw()))
    if not png:
        return None
    width, height = struct.unpack(">II", png[16:24])
    data = base64.b64encode(png).decode()
    return {"name": f"{label}{name}", "caption": caption, "width": width, "height": height, "data": data}


def results(runs: dict[str, Results]) -> Table | None:
    """Returns the table of results; None where no round was evaluated."""
    summaries = {name: run.summary for name, run in runs.items() if run.summary["per_seed"]}
    if not summaries:
        return None
    heads, rows = comparison.results_rows(summaries)
    rounds = " or ".join(dict.fromkeys(str(summary["num_rounds"]) for summary in summaries.values()))
    first = f"after round {rounds}; {comparison.seeds_text(summaries)}"
    return Table("results", heads, rows, _sentences([first, *comparison.results_notes(summaries)]))


def differences(runs: dict[str, Results]) -> Table | None:
    """Returns the table of the options in which runs differ; None where they differ in none."""
    differ = [[option, *values.values()] for option, values in comparison.run_differences(runs).items()]
    return Table("differences", ["option", *runs], differ, kind="text") if differ else None


def curves(runs: dict[str, Results]) -> list[Figure]:
    """Returns the figures that show all runs, or the first of many."""
    runs = dict(list(runs.items())[: comparison.MOST_DRAWN])
    single = next(iter(runs.values())) if len(runs) == 1 else None
    records = {plots.label(name): run.records for name, run in runs.items()}

    def with_values(metric: str) -> dict[str, list[dict[str, Any]]]:
        return {name: rows for name, rows in records.items() if any(row.get(metric) is not None for row in rows)}

    figures = []
    for name, metric in CURVES.items():
        rows = with_values(metric)
        figures.append(figure(single, name, partial(plots.curves, rows, metric) if rows else None))
    accuracies = {plots.label(name): run.clients.get("accuracy", np.empty(0)) for name, run in runs.items()}
    accuracies = {name: values for name, values in accuracies.items() if np.isfinite(values).any()}
    draw = partial(plots.client_accuracies, accuracies) if accuracies else None
    figures.append(figure(single, "clients", draw))
    if len(evaluated := with_values("accuracy")) > 1:
        figures.append(figure(None, "methods", partial(plots.bars, evaluated)))
    return [drawn for drawn in figures if drawn]


def costs(runs: dict[str, Results]) -> Table:
    """Returns the table of bytes and seconds, a column for each run."""
    rows = []
    for name, (head, text) in COSTS.items():
        values = [run.summary.get(name) for run in runs.values()]
        rows.append([head, *("–" if value is None else text(value) for value in values)])
    return Table("costs", ["", *runs], rows)


# ---------------------------------------------------------------------------------------------------------------
# One run. `label`, empty for a single run, is the beginning of its parts' ids.


def clusters(run: Results, label: str) -> Figure | None:
    """Returns the picture of the clusters of all clients over rounds, of the first seed, if the method finds any."""
    records, draw, by = [r for r in run.records if r.get("cluster")], None, "true cluster"
    if records and run.summary.get("finds_clusters", True):  # not of one model, or of one for each client
        seed, count = records[0]["seed"], len(records[0]["cluster"])
        records = [r for r in records if r["seed"] == seed and len(r["cluster"]) == count]
        true = run.first_seed().get("true_cluster", ())
        truth = true if len(true) == count and len(np.unique(true)) > 1 else None
        draw, by = partial(plots.assignments, records, truth), "last cluster" if truth is None else by
    caption = f"Cluster of each client over rounds, of the first seed; clients are sorted by their {by}."
    return figure(run, "clusters", draw, caption, label)


def similarity_and_tree(run: Results, label: str) -> dict[str, Any]:
    """Returns the parameter tree, its splits, and the similarities of the updates that the first of them compared."""
    parts: dict[str, Any] = dict.fromkeys(("similarity", "tree", "splits"))
    if run.tree is None:
        return parts
    state = run.tree.load_tree(run.folder / "tree.npz")
    nodes, true, seed = run.tree.nodes(state), run.first_seed().get("true_cluster"), run.first_seed()["seed"][0]
    caption = f"Splits of seed {seed}, rounds downwards; the width is the number of clients, the colour the true"
    parts["tree"] = figure(run, "tree", partial(plots.tree, nodes, true), f"{caption} cluster.", label)
    parts["splits"] = _branch(nodes, 0, true)
    updates, cluster = run.tree.first_split(state)
    if min(updates.shape) > 0:
        caption = f"Cosine similarities of the updates of {len(updates)} clients in round"
        caption += f" {nodes[nodes[0].children[0]].round}, when the first split was made; ordered by final cluster."
        order = np.argsort(cluster, kind="stable")
        if len(order) > MOST_ROWS:
            order = order[np.linspace(0, len(order) - 1, MOST_ROWS).astype(int)]
            caption += f" {MOST_ROWS} of them are drawn, evenly spaced."
        if (kept := updates.shape[1]) == run.config.get("tree_dim"):
            caption += f" They are approximate, by {kept:,} sums that are kept of each update (tree_dim)."
        draw = partial(plots.similarity, cosines(updates[order]), cluster[order])
        parts["similarity"] = figure(None, "similarity", draw, caption, label)
    return parts


def cosines(rows: np.ndarray) -> np.ndarray:
    """Returns the cosines `[n, n]` between rows `[n, D]`; 0 for zero rows."""
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    rows = rows / np.where(length > 0, length, 1)
    return rows @ rows.T


def _branch(nodes: Sequence[Any], at: int, true: np.ndarray | None) -> dict[str, Any]:
    """Returns a cluster, the numbers of its clients by their true cluster, and those that it was split into."""
    node = nodes[at]
    kinds = [] if true is None else zip(*np.unique(true[node.clients], return_counts=True), strict=True)
    return {"node": node, "kinds": [*kinds], "below": [_branch(nodes, child, true) for child in node.children]}


def worst_clients(run: Results, label: str) -> Table | None:
    """Returns the table of the clients of lowest accuracy, or of highest loss where no accuracy is known."""
    clients, first = run.clients, run.first_seed()
    by = next((n for n in ("accuracy", "loss") if n in clients and not np.isnan(clients[n]).all()), None)
    if by is None:
        return None
    # The clients with test examples, the worst first.
    values = clients[by].reshape(-1, len(first["client"]))  # of each seed
    tested = np.flatnonzero(~np.isnan(values).all(axis=0))
    mean, low, high = (f(values[:, tested], axis=0) for f in (np.nanmean, np.nanmin, np.nanmax))
    sign, scale, digits, unit = (1, 100, 1, "accuracy %") if by == "accuracy" else (-1, 1, 3, "loss")
    worst = np.lexsort((first["client"][tested], sign * mean))[:WORST]
    # A row for each.
    columns = {"examples": "training examples", "true_cluster": "true cluster"}
    if run.summary.get("finds_clusters", True):  # else it is 0 for all, or the client's own number
        columns["cluster"] = "cluster"
    columns = {"client": "client"} | {name: head for name, head in columns.items() if name in clients}
    shown = {f"mean {unit}": mean, "lowest seed": low, "highest seed": high} if len(values) > 1 else {unit: mean}
    rows = [
        [first[name][tested[i]] for name in columns] + [number(v[i], None, digits, scale) for v in shown.values()]
        for i in worst
    ]
    caption = f"The {len(worst)} worst of {len(tested)} clients with test examples, by their {by} on these."
    caption += f" The cluster is that of seed {first['seed'][0]}." if "cluster" in columns else ""
    return Table(f"{label}worst", [*columns.values(), *shown], rows, caption)


def seeds(run: Results, label: str) -> Table | None:
    """Returns the table of the results by seed, for several."""
    per_seed, columns = run.summary["per_seed"], {}
    if len(per_seed) < 2:
        return None
    for name, column in comparison.COLUMNS.items():
        has_values = name == "rounds_to_recovery" or any(row.get(name) is not None for row in per_seed)
        if has_values and (name not in comparison.OF_CLUSTERS or comparison.compares_clusters(run.summary)):
            columns[name] = column
    rows = [[row["seed"], *(number(row.get(n), None, *form) for n, (_, *form) in columns.items())] for row in per_seed]
    return Table(f"{label}seeds", ["seed", *(head for head, *_ in columns.values())], rows)


def commands(run: Results) -> list[str]:
    """Returns the commands that continue or repeat a configured run, with comments."""
    if not is_configured(run.config):
        return []
    base = f"jfcl run --config {shlex.quote(str(run.folder / 'config.json'))} --out"
    resume, lines = f"{base} {shlex.quote(str(run.folder))} --resume", []
    planned, done = run.planned_rounds, run.summary["num_rounds"]
    if not run.is_finished:
        lines = ["# continue where it stopped", resume]
    # A run that ended early ends there again, and a schedule cannot be extended.
    elif planned == done and run.config.get("schedule_rounds") is None:
        lines = ["# continue for as many rounds again", f"{resume} --rounds {2 * run.config['num_rounds']}"]
    elif planned > done and run.summary.get("ended") == ALL_DONE:  # it was resumed for fewer rounds
        lines = [f"# continue to round {planned}", resume]
    return [*lines, "# repeat it in another folder", f"{base} {shlex.quote(f'{run.folder}-2')}"]
