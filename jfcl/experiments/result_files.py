"""The result files of a run, written at its end."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jfcl.analysis import metrics, plots
from jfcl.core import client_ids
from jfcl.experiments.config import Config
from jfcl.experiments.privacy import privacy_of
from jfcl.experiments.serving import npz_bytes
from jfcl.experiments.setups import Setup
from jfcl.mapping import hosts
from jfcl.methods import METHODS
from jfcl.simulation import folder
from jfcl.simulation.folder import finite_or_none
from jfcl.simulation.loop import History
from jfcl.simulation.results import clients_csv, summarize


def summarize_run(config: Config, history: History, parts: Setup) -> dict[str, Any]:
    """Returns the content of `summary.json`: plain JSON, with `None` for NaN and infinity."""
    summary = {
        "method": config.method,
        "dataset": config.dataset,
        "heterogeneity": config.heterogeneity,
        "description": parts.federation.description,
        "num_clients": len(parts.federation.cluster),
        "num_clusters": parts.federation.num_clusters,
        "split_hash": parts.federation.split_hash,
    }
    summary |= {} if parts.federation.table is None else {"table": parts.federation.table}
    summary |= summarize(history)
    true, served = parts.federation.mixture, history.served
    found = history.clients.get("weights", served.to if served.shares is None else served.shares)
    if true is not None and found is not None and found.shape[1:2] == true.shape[:1] and found.ndim == 3:
        each = [metrics.mixture_recovery(np.asarray(weights), true) for weights in found]
        summary |= {name: float(np.mean([one[name] for one in each])) for name in each[0]}
    if config.dp_clip is not None:
        clusters = np.asarray(history.clients["cluster"])[0]
        clip = next(r for r in history.records if r["round"] == history.rounds).get("clip", config.dp_clip)
        summary["privacy"] = privacy_of(config, config.clients, history.rounds, clusters, clip)
    return finite_or_none(summary)


def silhouettes_by_number(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the silhouettes by the number of clusters as records, those of each seed's last round that has any.

    Example:
      >>> silhouettes_by_number([{"seed": 0, "round": 4, "silhouettes": [None, None, 0.5]}])
      [{'seed': 0, 'number of clusters': 2, 'mean silhouette': 0.5}]
    """
    scores = {r["seed"]: found for r in records if (found := _numbered(r.get("silhouettes", ())))}
    names = "number of clusters", "mean silhouette"
    return [{"seed": seed} | dict(zip(names, pair, strict=True)) for seed in scores for pair in scores[seed]]


def _numbered(scores: Any) -> list[tuple[int, float]]:
    """Returns the scores that are finite, and their places."""
    return [(k, score) for k, score in enumerate(scores) if score is not None and np.isfinite(score)]


def write_results(out: Path, summary: dict[str, Any], history: History, parts: Setup) -> None:
    """Writes `clients.csv`, `params.npz`, the plots and, last, `summary.json`, which marks the run as finished.

    `personal.npz` holds personal parameters, and `mixture.npz` the weights of clients' mixtures, where the run has any
    and is not one of a population, whose state is that of the last cohort.
    """
    name, records, served = summary["method"], history.records, history.served
    of_all = history.rows is None  # the clients of the state are those that are evaluated
    arrays = {"params": served.models}
    if of_all and jax.tree.leaves(served.personal):
        arrays["personal"] = served.personal
    if of_all and served.to is not None and served.to.ndim == 3:
        arrays["mixture"] = {"weights": served.to}
    first = jax.tree.map(lambda leaf: np.asarray(leaf[0] if of_all else leaf), arrays)  # a population has one seed
    contents = {f"{part}.npz": npz_bytes(tree) for part, tree in first.items()}
    # The table of clients, with the hostile and the excluded ones where a run has any.
    extra = {} if parts.malicious is None else {"malicious": parts.malicious}
    if of_all and served.excluded is not None:
        extra["excluded_in_round"] = np.asarray(served.excluded)
    # With several processes this one holds some of the clients only, which are then numbered in their order.
    cluster, train = parts.federation.cluster, parts.federation.train
    ids = list(range(len(cluster))) if hosts.several() else client_ids(train).tolist()
    contents |= clients_csv(history, parts.seeds, ids, cluster, extra)
    # Pictures, and the parameter trees.
    figures = {"loss": plots.curves({name: records}, "train_loss")}
    figures |= {of: plots.curves({name: records}, of) for of in ("accuracy", "perplexity") if of in history.clients}
    if parts.federation.drift is not None:
        figures |= {
            of: plots.curves({name: records}, of) for of in ("next_accuracy", "adjusted_rand") if of in records[0]
        }
    if "accuracy" in history.clients:  # not of a regression
        figures["clients"] = plots.client_accuracies({name: history.clients["accuracy"]})
    method = METHODS.get(name)  # None: of a user
    if of_all and method and method.tree and served.active.shape[1] > 1:
        for s, seed in enumerate(parts.seeds):
            label, tree = f"tree-{seed}" if s else "tree", jax.tree.map(lambda x, s=s: x[s], history.state)
            method.tree.save_tree(buffer := io.BytesIO(), tree)
            contents[f"{label}.npz"] = buffer.getvalue()
            figures[label] = plots.tree(method.tree.nodes(tree), cluster)
    if "cluster" in records[0]:
        figures["clusters"] = plots.assignments(records, cluster)
    if by_number := silhouettes_by_number(records):
        figures["silhouettes"] = plots.curves({name: by_number}, "mean silhouette", over="number of clusters")
    contents |= {f"plots/{name}.png": plots.png(figure) for name, figure in figures.items()}
    folder.write_results(out, contents, summary)
