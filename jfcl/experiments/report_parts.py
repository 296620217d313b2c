"""The parts of `jfcl report` on one run: figures, tables, options and commands."""

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
from jfcl.core import shown
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
    png = None if run is None else run.read_picture(name)
    if png is None and draw is not None:
        png = plots.png(draw())
    if png is None:
        return None
    return Figure(f"{label}{name}", caption, *struct.unpack(">II", png[16:24]), base64.b64encode(png).decode())


def parts_of(run: Results, label: str) -> dict[str, Any]:
    """Returns what the page says of one run; `label` begins the identities of its parts, and is empty for one run."""
    private = run.summary.get("privacy")
    return {
        "label": label,
        "status": _status(run),
        "privacy": [] if private is None else privacy_text(private).splitlines(),
        "clusters": _clusters(run, label),
        **_similarity_and_tree(run, label),
        "worst": _worst_clients(run, label),
        "seeds": _seeds(run, label),
        **_options(run),
        **dict(zip(("commands", "hints"), commands(run), strict=True)),
    }


def _status(run: Results) -> str:
    """Returns what was run, and whether it is finished."""
    summary, planned, done = run.summary, run.planned_rounds, run.summary["num_rounds"]
    method, dataset = (summary.get(name) or run.config.get(name) for name in ("method", "dataset"))
    about = summary.get("description") or (dataset and f"data set {dataset}")
    state = "Finished" if run.is_finished else "Not finished"
    whole = planned is None or (run.is_finished and planned == done)
    rounds = f"{done} rounds" if whole else f"{done} of {planned} rounds"
    return f"{f'Method {method}; ' if method else ''}{f'{about}. ' if about else ''}{state}: {rounds}."


def _clusters(run: Results, label: str) -> Figure | None:
    """Returns the picture of the clusters of all clients over rounds, of the first seed."""
    kept, draw, by = [r for r in run.records if r.get("cluster")], None, "true cluster"
    if kept:
        count = len(kept[0]["cluster"])
        records = [r for r in kept if r["seed"] == kept[0]["seed"] and len(r["cluster"]) == count]
        true = run.first_seed().get("true_cluster", ())
        known = true if len(true) == count else None
        draw, by = partial(plots.assignments, records, known), "last cluster" if known is None else by
    caption = f"Cluster of each client over rounds, of the first seed; clients are sorted by their {by}."
    return figure(run, "clusters", draw, caption, label)


def _similarity_and_tree(run: Results, label: str) -> dict[str, Any]:
    """Returns the matrix of similarities, of updates where a run keeps them, else of models; and the parameter tree."""
    found: dict[str, Any] = dict.fromkeys(("similarity", "too_large", "tree", "splits"))
    state, clients = run.read_tree(), run.first_seed()
    if state is None:
        found["tree"] = figure(run, "tree", None, _tree_caption(run), label)
    else:
        nodes = parameter_tree.nodes(state)
        true = clients.get("true_cluster")
        true = true if true is not None and all((node.clients < len(true)).all() for node in nodes) else None
        found["tree"] = figure(run, "tree", partial(plots.tree, nodes, true), _tree_caption(run), label)
        found["splits"] = _branch(nodes, 0, true)
        updates, cluster = parameter_tree.first_split(state)
        if min(updates.shape) > 0:
            born = nodes[nodes[0].children[0]].round
            caption = f"Cosine similarities of the updates of {len(updates)} clients in round {born}, when the first"
            caption += " split was made; ordered by final cluster."
            return found | {"similarity": _matrix(label, [updates], cluster, caption)}
    of_clients = run.config.get("population") is None and run.config.get("store") is None
    if not (clients and of_clients and run.has("params.npz")):
        return found
    size = (run.folder / "params.npz").stat().st_size
    if size > MOST_BYTES:
        return found | {"too_large": size_text(size)}
    return found | {"similarity": _of_models(run, clients, label)}


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


def _tree_caption(run: Results) -> str:
    seed = run.summary["per_seed"][0]["seed"] if run.summary["per_seed"] else 0
    return f"Splits of seed {seed}, rounds downwards; the width is the number of clients, the colour the true cluster."


def _branch(nodes: Sequence[parameter_tree.Node], at: int, true: np.ndarray | None) -> dict[str, Any]:
    """Returns the text on a cluster, and those on the clusters that it was split into."""
    node = nodes[at]
    count, kinds = len(node.clients), ""
    if true is not None and count:
        pairs = zip(*np.unique(true[node.clients], return_counts=True), strict=True)
        kinds = f" (true clusters: {', '.join(f'{number} of {kind}' for kind, number in pairs)})"
    if not node.children:
        return {"text": f"cluster {node.slot}, since round {node.round}: {count} clients{kinds}", "below": []}
    when = nodes[node.children[0]].round
    text = f"{count} clients{kinds}, split in round {when}; largest similarity across {node.cross_similarity:.3f}"
    return {"text": text, "below": [_branch(nodes, child, true) for child in node.children]}


def _worst_clients(run: Results, label: str) -> Table | None:
    """Returns the table of the clients of lowest accuracy, or of highest loss where no accuracy is known."""
    clients = run.clients
    by = next((n for n in ("accuracy", "loss") if n in clients and np.isfinite(clients[n]).any()), None)
    if by is None:
        return None
    of_client: dict[int, list[float]] = {}
    for client, value in zip(clients["client"].tolist(), clients[by].tolist(), strict=True):
        if np.isfinite(value):
            of_client.setdefault(client, []).append(value)
    sign, scale, digits, unit = (1, 100, 1, "accuracy %") if by == "accuracy" else (-1, 1, 3, "loss")
    worst = sorted(of_client, key=lambda client: (sign * np.mean(of_client[client]), client))[:WORST]
    # A row for each.
    first, several, rows = run.first_seed(), len(np.unique(clients["seed"])) > 1, []
    columns = {"examples": "training examples", "true_cluster": "true cluster", "cluster": "cluster"}
    columns = {name: head for name, head in columns.items() if name in clients}
    for client in worst:
        about = [int(first[name][first["client"] == client][0]) for name in columns]
        values = of_client[client]
        over = [float(np.mean(values)), min(values), max(values)] if several else values
        rows.append([client, *about, *(number(value, None, digits, scale) for value in over)])
    heads = ["client", *columns.values(), *([f"mean {unit}", "lowest seed", "highest seed"] if several else [unit])]
    caption = (
        f"The {len(worst)} worst of {len(of_client)} clients with test examples, by their {unit.split()[0]} on these."
    )
    return Table(f"{label}worst", heads, rows, f"{caption} The cluster is that of seed {first['seed'][0]}.")


def _seeds(run: Results, label: str) -> Table | None:
    """Returns the table of the results by seed, for several."""
    per_seed, recovers = run.summary["per_seed"], compares_clusters(run.summary)
    if len(per_seed) < 2:
        return None
    names = {"accuracy": (100, 1), "worst_client_accuracy": (100, 1), "perplexity": (1, 1), "loss": (1, 3)}
    names |= {"cluster_accuracy": (100, 1), "adjusted_rand": (1, 2), "clusters_in_use": (1, 0)}
    names = {n: style for n, style in names.items() if any(row.get(n) is not None for row in per_seed)}
    names = {n: style for n, style in names.items() if recovers or n not in OF_CLUSTERS}
    heads = [n.replace("_", " ") + (" %" if scale == 100 else "") for n, (scale, _) in names.items()]
    rows = []
    for row in per_seed:
        cells = [number(row.get(n), None, digits, scale) for n, (scale, digits) in names.items()]
        found = row.get("rounds_to_recovery")
        rows.append([row["seed"], *cells, *(["–" if found is None else found] if recovers else [])])
    return Table(f"{label}seeds", ["seed", *heads, *(["found at round"] if recovers else [])], rows)


def _options(run: Results) -> dict[str, Any]:
    """Returns the options of a run, those that were given marked, and the versions."""
    given, options = run.config.get("given", ()), []
    for name, value in run.config.items():
        if name not in ("versions", "split_hash", "key", "given"):
            name = "rounds" if name == "num_rounds" else name
            text = "–" if value is None else value if isinstance(value, str) else shown(value)
            options.append((name, text, isinstance(given, list) and name in given))
    versions, text = run.summary.get("versions") or run.config.get("versions"), ""
    if isinstance(versions, dict):
        text = ", ".join(f"{name} {version}" for name, version in versions.items())
        text += f"; split of the data {run.config['split_hash']}" if run.config.get("split_hash") else ""
    return {"options": options, "is_configured": is_configured(run.config), "versions": text}


def commands(run: Results) -> tuple[list[str], list[str]]:
    """Returns the commands that continue or repeat a run, and what to know of them."""
    if not is_configured(run.config):
        how = "To resume it, call jfcl.simulate with the same arguments, out and resume=True."
        return [], [how] if run.config else []
    folder = shlex.quote(str(run.folder))
    base = f"jfcl run --config {shlex.quote(str(run.folder / 'config.json'))}"
    planned, done, lines, hints = run.planned_rounds, run.summary["num_rounds"], [], []
    if not run.is_finished:
        lines = ["# continue where it stopped", f"{base} --out {folder} --resume"]
        at = f"round {run.checkpoints[0]}" if run.checkpoints else "the beginning: there is no checkpoint yet"
        hints = [f"--resume continues from {at}."]
    # A run that ended early ends there again, and a schedule cannot be extended.
    elif planned == done and run.config.get("schedule_rounds") is None:
        rounds = 2 * run.config["num_rounds"]
        lines = ["# continue for as many rounds again", f"{base} --out {folder} --resume --rounds {rounds}"]
    elif planned > done and run.summary.get("ended") == ALL_DONE:  # it was resumed for fewer rounds
        lines = [f"# continue to round {planned}", f"{base} --out {folder} --resume"]
    lines += ["# repeat it in another folder", f"{base} --out {shlex.quote(f'{run.folder}-2')}"]
    if run.config.get("dataset") != "digits":
        hints.append("Add --data-dir unless JFCL_DATA_DIR is the folder of the data.")
    return lines, hints
