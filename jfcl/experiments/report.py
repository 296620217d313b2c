"""`jfcl report`: one page of HTML on a run, or on several side by side."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jfcl._version import __version__
from jfcl.analysis import plots
from jfcl.core import check, files
from jfcl.core.plain import check_path
from jfcl.experiments import html_page as html
from jfcl.experiments import report_tables
from jfcl.experiments.comparison import (
    MOST_DRAWN,
    by_name,
    differences_notes,
    of_runs,
    results_notes,
    results_rows,
    seeds_text,
    size_text,
    unused,
    with_name,
)
from jfcl.experiments.partial import PartialRun, Tree, clusters_by_round, first_seed, planned_rounds, read_partial
from jfcl.experiments.privacy import privacy_text
from jfcl.methods.cfl.parameter_tree import Node

MOST_ROWS = 300  # of a matrix of similarities; larger ones are drawn from as many rows, evenly spaced
MOST_BYTES = 2**28  # of models that are compared
NAME = "report.html"


def report(runs: str | Path | Sequence[str | Path], *, out: str | Path | None = None) -> Path:
    """Writes one page of HTML on a run, or on several side by side; it needs no other file and no network.

    The page has the results, the curves with bands over seeds, the cluster of each client over rounds, the similarities
    ordered by cluster, CFL's parameter tree, the worst clients, bytes and seconds, options, versions and the commands
    that resume the run. Of a run that is not finished it reports what there is, with a note on the page and a warning.
    Of more than 20 runs it shows tables of all, curves of the first 20, and no sections on single runs. Nothing else in
    the runs' folders changes.

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
    folders = [runs] if isinstance(runs, str | Path) or not isinstance(runs, Iterable) else list(runs)
    check(len(folders) > 0, "runs", folders, "at least one folder")
    named = by_name(folders)
    file = _place(folders, out)
    found = {name: read_partial(folder) for name, folder in named.items()}
    write_report(found, file)
    for run in found.values():
        if run.note:
            warnings.warn(f"in the report of {run.folder}: {run.note}", stacklevel=2)
    return file


def _place(folders: Sequence[str | Path], out: str | Path | None) -> Path:
    """Returns the file of a report."""
    if out is not None:
        check_path("out", out)
        check(Path(out).suffix == ".html", "out", str(out), "a file that ends in .html")
        return Path(out)
    if len(folders) == 1:
        return Path(folders[0]) / NAME
    return unused(with_name(folders[0]).parent / "report", ".html")


def write_report(runs: dict[str, PartialRun], file: Path) -> None:
    """Writes the page on runs, by their names, whole or not at all; in a run's folder, with the lock of the run."""
    content = page_of(runs)
    if not (file.parent / "config.json").exists():
        files.write_whole(file, content)
        return
    try:
        with files.lock(file.parent / "lock"):
            files.write_whole(file, content)
    except ValueError as error:
        raise ValueError(f"{error}; or write the report elsewhere with out (--out FILE.html)") from None


def page_of(runs: dict[str, PartialRun]) -> bytes:
    """Returns the page on runs, by their names."""
    names, alone = list(runs), len(runs) == 1
    listed = f": {', '.join(names)}" if len(runs) <= MOST_DRAWN else ""
    title = names[0] if alone else f"{len(runs)} runs{listed}"
    head = [html.element("h1", title), _status(runs[title]) if alone else "", _unfinished(runs), _results(runs)]
    parts = [] if alone else [_differences(runs)]
    drawn = dict(list(runs.items())[:MOST_DRAWN])
    parts += [html.section("Curves", html.figures(_curves(drawn)))]
    parts += [html.section("Bytes and seconds", _costs(runs))]
    for name, run in runs.items() if listed else ():
        body = _of_run(run, "" if alone else f"{name}-")
        parts += body if alone else [html.section(name, _status(run), *body)]
    return html.page(f"{title} (jfcl report)", f"jfcl {__version__}", [*head, *parts])


def _of_run(run: PartialRun, label: str) -> list[str]:
    """Returns the sections on one run; `label` begins the identities of their parts, and is empty for a run alone."""
    tree, level = run.read_tree(), 3 if label else 2
    sections = {
        "Privacy": _privacy(run),
        "Clusters over rounds": [_clusters(run, label)],
        "Similarity": _similarity(run, tree, label),
        "Parameter tree": _tree(run, tree, label),
        "Worst clients": [report_tables.worst_clients(run, label)],
        "Seeds": [report_tables.seeds(run, label)],
        "Options and versions": report_tables.options(run, label),
        "Resume, extend, repeat": report_tables.commands(run),
    }
    return [html.section(title, *parts, level=level) for title, parts in sections.items()]


# ---------------------------------------------------------------------------------------------------------------
# All runs together.


def _status(run: PartialRun) -> str:
    """Returns what was run, and whether it is finished."""
    summary, planned = run.summary, planned_rounds(run)
    done = summary["num_rounds"]
    method, dataset = (summary.get(name) or run.config.get(name) for name in ("method", "dataset"))
    about = summary.get("description") or (dataset and f"data set {dataset}")
    state = "Finished" if run.is_finished else "Not finished"
    whole = planned is None or (run.is_finished and planned == done)
    rounds = f"{done} rounds" if whole else f"{done} of {planned} rounds"
    sentence = f"{f'Method {method}; ' if method else ''}{f'{about}. ' if about else ''}{state}: {rounds}."
    return html.element("p", sentence)


def _unfinished(runs: dict[str, PartialRun]) -> str:
    texts = [run.note for run in runs.values() if run.note]
    return f'<div class="note" id="missing"><strong>Not finished</strong>\n{html.items(texts)}</div>' if texts else ""


def _results(runs: dict[str, PartialRun]) -> str:
    with_records = {name: run.summary for name, run in runs.items() if run.summary["per_seed"]}
    if not with_records:
        return html.section("Results", html.element("p", "No round was evaluated."))
    heads, rows = results_rows(with_records)
    seeds = " or ".join(sorted({seeds_text(summary) for summary in with_records.values()}))
    rounds = list(dict.fromkeys(str(summary["num_rounds"]) for summary in with_records.values()))
    caption = html.sentences([f"after round {' or '.join(rounds)}; {seeds}", *results_notes(with_records)])
    return html.section("Results", html.table("results", heads, rows, caption))


def _differences(runs: dict[str, PartialRun]) -> str:
    """Returns the options in which runs differ."""
    done = {name: {"num_rounds": run.summary["num_rounds"]} for name, run in runs.items()}
    configs = {name: run.config | done[name] for name, run in runs.items()}
    used = {name: report_tables.used_config(run) | done[name] for name, run in runs.items()}
    rows = [[name, *values] for name, values in of_runs(configs, used)]
    notes = html.element("p", html.sentences(found), _class="note") if (found := differences_notes(configs)) else ""
    table = html.table("differences", ["option", *runs], rows, kind="text") if rows else ""
    return html.section("Differences", notes, table)


def _curves(runs: dict[str, PartialRun]) -> list[str]:
    """Returns the figures that show all runs."""
    records = {plots.label(name): run.records for name, run in runs.items()}
    band = "The line is the mean over seeds, the band reaches from the lowest to the highest seed."
    metrics = {
        "accuracy": ("accuracy", f"Accuracy on test examples, mean over clients. {band}"),
        "loss": ("train_loss", f"Loss of the local training. {band}"),
        "perplexity": ("perplexity", f"Perplexity on test examples. {band}"),
    }
    found = []
    for name, (metric, caption) in metrics.items():
        rows = {run: rows for run, rows in records.items() if _has_values(rows, metric)}
        found.append(_figure(runs, name, partial(plots.curves, rows, metric) if rows else None, caption))
    accuracies = {plots.label(name): run.clients["accuracy"] for name, run in runs.items() if "accuracy" in run.clients}
    accuracies = {name: values for name, values in accuracies.items() if np.isfinite(values).any()}
    caption = "Final accuracy of every client, sorted; the clients of all seeds together."
    draw = partial(plots.client_accuracies, accuracies) if accuracies else None
    found.append(_figure(runs, "clients", draw, caption))
    last = {name: rows for name, rows in records.items() if _has_values(rows, "accuracy")}
    if len(last) > 1:
        caption = (
            "Final accuracy: mean over clients, and of the worst client; with the sample standard deviation over seeds."
        )
        found.append(_figure(runs, "methods", partial(plots.bars, last), caption))
    return found


def _has_values(records: Iterable[dict[str, Any]], metric: str) -> bool:
    return any(record.get(metric) is not None for record in records)


def _figure(
    runs: dict[str, PartialRun], name: str, draw: Callable[[], plots.Figure] | None, caption: str, label: str = ""
) -> str:
    """Returns a figure: of one finished run the picture in `plots/`, otherwise a new one; nothing without either."""
    png = next(iter(runs.values())).read_picture(name) if len(runs) == 1 else None
    if png is None and draw is not None:
        png = plots.png(draw())
    return "" if png is None else html.figure(f"{label}{name}", png, caption)


def _costs(runs: dict[str, PartialRun]) -> str:
    """Returns the table of bytes and seconds, a column for each run."""
    summaries = [run.summary for run in runs.values()]

    def numbers(name: str, digits: int) -> list[str]:
        return ["–" if (value := s.get(name)) is None else f"{value:,.{digits}f}" for s in summaries]

    def per_round(name: str) -> list[str]:
        totals = [(s.get(name), s["num_rounds"]) for s in summaries]
        return [size_text(None if total is None else total / max(rounds, 1)) for total, rounds in totals]

    rows = {
        "rounds": [str(s["num_rounds"]) for s in summaries],
        "clients": numbers("num_clients", 0),
        "bytes up, all clients and rounds": [size_text(s.get("bytes_up")) for s in summaries],
        "bytes down, all clients and rounds": [size_text(s.get("bytes_down")) for s in summaries],
        "bytes up in a round": per_round("bytes_up"),
        "bytes down in a round": per_round("bytes_down"),
        "seconds, all seeds together": numbers("seconds", 1),
        "seconds of compilation": numbers("compile_seconds", 1),
        "rounds a second": numbers("rounds_per_second", 2),
        "client-steps a second": numbers("client_steps_per_second", 0),
        "device": [str(s.get("device") or "–") for s in summaries],
    }
    return html.table("costs", ["", *runs], [[name, *values] for name, values in rows.items()])


# ---------------------------------------------------------------------------------------------------------------
# One run.


def _privacy(run: PartialRun) -> list[str]:
    """Returns what a private run guarantees; nothing for another run."""
    found = run.summary.get("privacy")
    return [] if found is None else [html.element("p", line) for line in privacy_text(found).splitlines()]


def _clusters(run: PartialRun, label: str) -> str:
    """Returns the picture of the clusters of all clients over rounds, of the first seed."""
    records, draw, by = clusters_by_round(run.records), None, "true cluster"
    if records:
        true = first_seed(run.clients).get("true_cluster", np.zeros(0))
        known = true if len(true) == len(records[0]["cluster"]) else None
        draw, by = partial(plots.assignments, records, known), "last cluster" if known is None else by
    caption = f"Cluster of each client over rounds, of the first seed; clients are sorted by their {by}."
    return _figure({"": run}, "clusters", draw, caption, label)


def _similarity(run: PartialRun, tree: Tree | None, label: str) -> list[str]:
    """Returns the matrix of similarities, ordered by cluster: of updates where a run keeps them, else of models."""
    if tree is not None and min(tree.updates.shape) > 0:
        born = tree.nodes[tree.nodes[0].children[0]].round
        caption = f"Cosine similarities of the updates of {len(tree.updates)} clients in round {born}, when the first"
        caption += " split was made; ordered by final cluster."
        return [_matrix(label, [tree.updates], tree.cluster, caption)]
    clients, models = first_seed(run.clients), None
    if clients and run.config.get("population") is None and run.config.get("store") is None:
        if run.models_size() > MOST_BYTES:
            text = f"The models have {size_text(run.models_size())}: their similarities are not computed."
            return [html.element("p", text)]
        models = run.read_models()
    if models is None:
        return []
    served = clients.get("model", clients["cluster"])
    leaves = [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(models)]
    used = np.unique(served)
    if len(used) < 3 or used[0] < 0 or used[-1] >= len(leaves[0]):
        return []
    leaves = [leaf.reshape(len(leaf), -1)[used] for leaf in leaves]
    by = "true_cluster" if "true_cluster" in clients else "cluster"
    of_most = [np.bincount(np.maximum(clients[by][served == k], 0)).argmax() for k in used]
    caption = f"Cosine similarities of the {len(used)} final models, as differences from their mean; ordered by the"
    caption += f" {by.replace('_', ' ')} of most of their clients."
    return [_matrix(label, [leaf - leaf.mean(axis=0) for leaf in leaves], np.array(of_most), caption)]


def _matrix(label: str, rows: Sequence[np.ndarray], cluster: np.ndarray, caption: str) -> str:
    """Returns the picture of the cosines of rows `[N, ...]` that are given in parts."""
    order = np.argsort(cluster, kind="stable")
    if len(order) > MOST_ROWS:
        order = order[np.linspace(0, len(order) - 1, MOST_ROWS).astype(int)]
        caption += f" {MOST_ROWS} of them are drawn, evenly spaced."
    return html.figure(f"{label}similarity", plots.png(plots.similarity(cosines(rows, order), cluster[order])), caption)


def cosines(parts: Sequence[np.ndarray], order: np.ndarray) -> np.ndarray:
    """Returns the cosines `[n, n]` between the rows `order` of `[N, D]`, given in parts `[N, D_i]`; 0 for zero rows.

    Example:
      >>> parts = [np.array([[3.0], [0.0], [2.0]]), np.array([[4.0], [0.0], [0.0]])]
      >>> cosines(parts, np.array([0, 2, 1])).round(3).tolist()
      [[1.0, 0.6, 0.0], [0.6, 1.0, 0.0], [0.0, 0.0, 0.0]]
    """
    products = sum(part[order] @ part[order].T for part in parts)
    length = np.sqrt(np.diag(products))
    scale = np.where(length > 0, 1 / np.where(length > 0, length, 1), 0)
    return products * scale[:, None] * scale


def _tree(run: PartialRun, tree: Tree | None, label: str) -> list[str]:
    """Returns the parameter tree as a picture and as a list."""
    seed = run.summary["per_seed"][0]["seed"] if run.summary["per_seed"] else 0
    caption = (
        f"Splits of seed {seed}, rounds downwards; the width is the number of clients, the colour the true cluster."
    )
    if tree is None:
        return [_figure({"": run}, "tree", None, caption, label)]
    true = first_seed(run.clients).get("true_cluster")
    true = true if true is not None and all((node.clients < len(true)).all() for node in tree.nodes) else None
    figure = _figure({"": run}, "tree", partial(plots.tree, tree.nodes, true), caption, label)
    return [figure, f'<ul class="tree" id="{html.escaped(label)}splits">\n{_branch(tree.nodes, 0, true)}\n</ul>']


def _branch(nodes: Sequence[Node], at: int, true: np.ndarray | None) -> str:
    """Returns the list of a cluster and of those that it was split into."""
    node = nodes[at]
    count = len(node.clients)
    kinds = "" if true is None or not count else _kinds(true[node.clients])
    if not node.children:
        return html.element("li", f"cluster {node.slot}, since round {node.round}: {count} clients{kinds}")
    when = nodes[node.children[0]].round
    text = f"{count} clients{kinds}, split in round {when}; largest similarity across {node.cross_similarity:.3f}"
    below = "\n".join(_branch(nodes, child, true) for child in node.children)
    return f"<li>{html.escaped(text)}\n<ul>\n{below}\n</ul></li>"


def _kinds(true: np.ndarray) -> str:
    kinds, counts = np.unique(true, return_counts=True)
    listed = ", ".join(f"{count} of {kind}" for kind, count in zip(kinds, counts, strict=True))
    return f" (true clusters: {listed})"
