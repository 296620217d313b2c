"""The parts of `jfcl report` on one run: figures, tables and commands."""

from __future__ import annotations

import base64
import shlex
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jfcl.analysis import plots
from jfcl.experiments.comparison import OF_CLUSTERS, compares_clusters, is_configured, number, size_text
from jfcl.experiments.privacy import privacy_text
from jfcl.experiments.results import Results
from jfcl.methods.cfl import parameter_tree
from jfcl.simulation.loop import ALL_DONE

WORST = 10  # clients in the table of the worst
MOST_ROWS = 300  # of a matrix of similarities; larger ones are drawn from as many rows, evenly spaced
MOST_BYTES = 2**28  # of models that are compared


class Table(NamedTuple):
    """A table: its `id`, the heads of its columns, its rows, each with the name first, a caption, a class."""

    name: str
    heads: Sequence[str]
    rows: Sequence[Sequence[object]]
    caption: str = ""
    kind: str = ""


class Figure(NamedTuple):
    """A picture that is part of the page: its `id`, its caption, its size, the PNG file in base 64."""

    name: str
    caption: str
    width: int
    height: int
    data: str


def figure(
    run: Results | None, name: str, draw: Callable[[], plots.Figure] | None, caption: str, label: str = ""
) -> Figure | None:
    """Returns a figure: of a finished run the picture in `plots/`, otherwise a new one; None without either."""
    png = (run and run.read_picture(name)) or (draw and plots.png(draw()))
    if not png:
        return None
    return Figure(f"{label}{name}", caption, *struct.unpack(">II", png[16:24]), base64.b64encode(png).decode())


def parts_of(run: Results, label: str) -> dict[str, Any]:
    """Returns what the page says of one run; `label` begins the identities of its parts, and is empty for one run."""
    private = run.summary.get("privacy")
    return {
        "label": label,
        "results": run,
        "is_configured": is_configured(run.config),
        "privacy": [] if private is None else privacy_text(private).splitlines(),
        "clusters": _clusters(run, label),
        **_similarity_and_tree(run, label),
        "worst": _worst_clients(run, label),
        "seeds": _seeds(run, label),
        "commands": commands(run),
    }


def _clusters(run: Results, label: str) -> Figure | None:
    """Returns the picture of the clusters of all clients over rounds, of the first seed."""
    records, draw, by = [r for r in run.records if r.get("cluster")], None, "true cluster"
    if records:
        seed, count = records[0]["seed"], len(records[0]["cluster"])
        records = [r for r in records if r["seed"] == seed and len(r["cluster"]) == count]
        true = run.first_seed().get("true_cluster", ())
        known = true if len(true) == count else None
        draw, by = partial(plots.assignments, records, known), "last cluster" if known is None else by
    caption = f"Cluster of each client over rounds, of the first seed; clients are sorted by their {by}."
    return figure(run, "clusters", draw, caption, label)


def _similarity_and_tree(run: Results, label: str) -> dict[str, Any]:
    """Returns the matrix of similarities, of updates where a run keeps them, else of models; and the parameter tree."""
    parts: dict[str, Any] = dict.fromkeys(("similarity", "too_large", "tree", "splits"))
    state, clients, draw = run.read_tree(), run.first_seed(), None
    if state is not None:
        nodes, true = parameter_tree.nodes(state), clients.get("true_cluster")
        true = true if true is not None and all((node.clients < len(true)).all() for node in nodes) else None
        draw, parts["splits"] = partial(plots.tree, nodes, true), _branch(nodes, 0, true)
    seed = run.summary["per_seed"][0]["seed"] if run.summary["per_seed"] else 0
    caption = f"Splits of seed {seed}, rounds downwards; the width is the number of clients, the colour the true"
    parts["tree"] = figure(run, "tree", draw, f"{caption} cluster.", label)
    # Similarities of updates, or of models.
    if state is not None and min((split := parameter_tree.first_split(state))[0].shape) > 0:
        caption = f"Cosine similarities of the updates of {len(split[0])} clients in round"
        caption += f" {nodes[nodes[0].children[0]].round}, when the first split was made; ordered by final cluster."
        return parts | {"similarity": _matrix(label, [split[0]], split[1], caption)}
    of_clients = run.config.get("population") is None and run.config.get("store") is None
    if clients and of_clients and run.has("params.npz"):
        size = (run.folder / "params.npz").stat().st_size
        if size > MOST_BYTES:
            return parts | {"too_large": size_text(size)}
        parts["similarity"] = _of_models(run, clients, label)
    return parts


def _of_models(run: Results, clients: dict[str, np.ndarray], label: str) -> Figure | None:
    """Returns the matrix of similarities of at least three models that are served, as differences from their mean."""
    served = clients.get("model", clients["cluster"])
    leaves = [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(run.read_models())]
    used = np.unique(served)
    if len(used) < 3 or used[0] < 0 or used[-1] >= len(leaves[0]):
        return None
    leaves = [leaf.reshape(len(leaf), -1)[used] for leaf in leaves]
    by = "true_cluster" if "true_cluster" in clients else "cluster"
    of_most = [np.bincount(np.maximum(clients[by][served == k], 0)).argmax() for k in used]
    caption = f"Cosine similarities of the {len(used)} final models, as differences from their mean; ordered by the"
    caption += f" {by.replace('_', ' ')} of most of their clients."
    return _matrix(label, [leaf - leaf.mean(axis=0) for leaf in leaves], np.array(of_most), caption)


def _matrix(label: str, rows: Sequence[np.ndarray], cluster: np.ndarray, caption: str) -> Figure | None:
    """Returns the picture of the cosines of rows `[N, ...]` that are given in parts, ordered by cluster."""
    order = np.argsort(cluster, kind="stable")
    if len(order) > MOST_ROWS:
        order = order[np.linspace(0, len(order) - 1, MOST_ROWS).astype(int)]
        caption += f" {MOST_ROWS} of them are drawn, evenly spaced."
    return figure(None, "similarity", lambda: plots.similarity(cosines(rows, order), cluster[order]), caption, label)


def cosines(parts: Sequence[np.ndarray], order: np.ndarray) -> np.ndarray:
    """Returns the cosines `[n, n]` between the rows `order` of `[N, D]`, given in parts `[N, D_i]`; 0 for zero rows."""
    products = sum(part[order] @ part[order].T for part in parts)
    length = np.sqrt(np.diag(products))
    scale = np.where(length > 0, 1 / np.where(length > 0, length, 1), 0)
    return products * scale[:, None] * scale


def _branch(nodes: Sequence[parameter_tree.Node], at: int, true: np.ndarray | None) -> dict[str, Any]:
    """Returns a cluster, the numbers of its clients by their true cluster, and those that it was split into."""
    node = nodes[at]
    kinds = [] if true is None else zip(*np.unique(true[node.clients], return_counts=True), strict=True)
    return {"node": node, "kinds": [*kinds], "below": [_branch(nodes, child, true) for child in node.children]}


def _worst_clients(run: Results, label: str) -> Table | None:
    """Returns the table of the clients of lowest accuracy, or of highest loss where no accuracy is known."""
    clients, first = run.clients, run.first_seed()
    by = next((n for n in ("accuracy", "loss") if n in clients and np.isfinite(clients[n]).any()), None)
    if by is None:
        return None
    # The clients with test examples, the worst first.
    values = clients[by].reshape(-1, len(first["client"]))  # of each seed
    tested = np.flatnonzero(np.isfinite(values).any(axis=0))
    mean, low, high = (f(values[:, tested], axis=0) for f in (np.nanmean, np.nanmin, np.nanmax))
    sign, scale, digits, unit = (1, 100, 1, "accuracy %") if by == "accuracy" else (-1, 1, 3, "loss")
    worst = np.lexsort((first["client"][tested], sign * mean))[:WORST]
    # A row for each.
    columns = {"examples": "training examples", "true_cluster": "true cluster", "cluster": "cluster"}
    columns = {"client": "client"} | {name: head for name, head in columns.items() if name in clients}
    shown = {f"mean {unit}": mean, "lowest seed": low, "highest seed": high} if len(values) > 1 else {unit: mean}
    rows = [
        [first[name][tested[i]] for name in columns] + [number(v[i], None, digits, scale) for v in shown.values()]
        for i in worst
    ]
    caption = f"The {len(worst)} worst of {len(tested)} clients with test examples, by their {by} on these. The cluster"
    caption += f" is that of seed {first['seed'][0]}."
    return Table(f"{label}worst", [*columns.values(), *shown], rows, caption)


def _seeds(run: Results, label: str) -> Table | None:
    """Returns the table of the results by seed, for several."""
    per_seed, recovers = run.summary["per_seed"], compares_clusters(run.summary)
    if len(per_seed) < 2:
        return None
    styles = {"accuracy": (100, 1), "worst_client_accuracy": (100, 1), "perplexity": (1, 1), "loss": (1, 3)}
    styles |= {"cluster_accuracy": (100, 1), "adjusted_rand": (1, 2), "clusters_in_use": (1, 0)}
    styles |= {"rounds_to_recovery": (1, 0)} if recovers else {}
    skipped = {n for n in styles if all(row.get(n) is None for row in per_seed)} - {"rounds_to_recovery"}
    styles = {n: style for n, style in styles.items() if n not in skipped and (recovers or n not in OF_CLUSTERS)}
    heads = [n.replace("_", " ") + (" %" if scale == 100 else "") for n, (scale, _) in styles.items()]
    heads = ["found at round" if head == "rounds to recovery" else head for head in heads]
    rows = [[number(row.get(n), None, digits, scale) for n, (scale, digits) in styles.items()] for row in per_seed]
    return Table(f"{label}seeds", ["seed", *heads], [[row["seed"], *rows[i]] for i, row in enumerate(per_seed)])


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
