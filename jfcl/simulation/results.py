"""The results that a finished run leaves in its folder: `summary.json` and `clients.csv`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jfcl.analysis.metrics import OWN_NAMES, deviation, rounds_to_recovery
from jfcl.core.texts import csv_bytes
from jfcl.simulation.evaluation import Subjects, is_mixture
from jfcl.simulation.folder import environment, write_results
from jfcl.simulation.loop import History

SEED_METRICS = ("accuracy", "worst_client_accuracy", "loss", "cluster_accuracy", "adjusted_rand", "clusters_in_use")
BYTES = ("bytes_up", "bytes_down")


def summarize_records(
    records: list[dict[str, Any]], last: int | None = None, further: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns `per_seed`, `mean` and `std` of `summary.json`: the metrics of round `last`, from the records.

    `std` is the sample standard deviation, None for one seed. Without `last` they are those of each seed's own last
    record: seeds that ran apart may have ended at other rounds.
    """
    per_seed, by_seed = [], defaultdict(list)
    for record in records:
        by_seed[record["seed"]].append(record)
    of_seeds = {r["seed"]: r for r in records if last is None or r["round"] == last}
    for record in of_seeds.values():
        of_seed = by_seed[record["seed"]]
        right = [r.get("cluster_accuracy") for r in of_seed]  # None where the true clusters are unknown
        recovered = None if None in right else rounds_to_recovery([r["round"] for r in of_seed], right)
        row = {"seed": record["seed"]} | {name: record.get(name) for name in (*SEED_METRICS, *further)}
        row |= {"rounds_to_recovery": recovered, **{name: record.get(name) for name in BYTES}}
        row |= {name: value for name, value in record.items() if name == "perplexity" or name.startswith("newcomer_")}
        per_seed.append(row)

    def over_seeds(statistic) -> dict[str, float | None]:
        names = [name for name in per_seed[0] if name != "seed"]
        columns = {name: [row.get(name) for row in per_seed] for name in names}
        return {name: None if None in values else statistic(values) for name, values in columns.items()}

    return {
        "per_seed": per_seed,
        "mean": over_seeds(lambda values: float(np.mean(values))),
        "std": over_seeds(deviation),
    }


def finds_clusters(history: History) -> bool:
    """Returns whether a method has several models, and not simply one for each client."""
    served = history.served
    if served.to is None:
        return served.found is not None
    axis = served.to.ndim - (2 if is_mixture(served) else 1)  # of the models, after that of seeds, if there is one
    return jax.tree.leaves(served.models)[0].shape[axis] > 1


def summarize(history: History) -> dict[str, Any]:
    """Returns the entries of `summary.json` that follow from a run alone: its end, its costs and its last metrics."""
    over_seeds = summarize_records(history.records, further=[n for n in history.clients if n not in OWN_NAMES])
    seconds = max(history.seconds, 1e-9)
    return {
        "num_rounds": history.rounds,
        "init_rounds": history.init_rounds,
        "ended": history.ended,
        "seconds": history.seconds,
        "compile_seconds": history.compile_seconds,
        "client_steps_per_second": history.client_steps / seconds or None,  # a method need not report any
        "rounds_per_second": history.rounds / seconds,
        "finds_clusters": finds_clusters(history),
        **{name: over_seeds["mean"][name] for name in BYTES},
        **environment(),
        **over_seeds,
    }


def clients_csv(
    history: History,
    seeds: Sequence[int],
    ids: Sequence[int],
    true_cluster: np.ndarray | None,
    extra: dict[str, np.ndarray] | None = None,
) -> dict[str, bytes]:
    """Returns the tables of clients by their names: `clients.csv`, with a line per seed and client.

    With `keep_clients`, `clients_by_round.csv` has the same columns after `round`, for every evaluated round.

    Args:
      history: its clients, and the `clients` of its records.
      seeds, ids: names of the `R` seeds and of the `N` clients.
      true_cluster: `[N]`, or None where it is unknown.
      extra: further columns of integers, `[R, N]` each.
    """
    clients, known = history.clients, {} if true_cluster is None else {"true_cluster": true_cluster}
    own = (clients.get("model", clients["cluster"]) != clients["cluster"]).any()  # models of clients of one cluster
    own |= any(
        (row := r["clients"]).get("model", row["cluster"]) != row["cluster"] for r in history.records if "clients" in r
    )
    names = [name for name in ("accuracy", "loss", "perplexity") if name in clients]
    names += [name for name in clients if name not in OWN_NAMES]

    def lines(of_seeds: Sequence[dict[str, Any]]) -> Iterator[list]:
        for s, results in enumerate(of_seeds):
            counts = {"examples": clients["examples"][s], **known, "cluster": results["cluster"]}
            counts |= {name: np.broadcast_to(v, clients["cluster"].shape)[s] for name, v in (extra or {}).items()}
            counts |= {"model": results["model"]} if own else {}
            for i, client in enumerate(ids):
                found = [int(values[i]) for values in counts.values()]
                yield [seeds[s], client, *found, *[f"{results[name][i]:.6g}" for name in names]]

    head = ["seed", "client", "examples", *known, "cluster", *(extra or {}), *["model"] * int(own), *names]
    last = [{name: values[s] for name, values in clients.items() if values.ndim == 2} for s in range(len(seeds))]
    contents = {"clients.csv": csv_bytes([head, *lines(last)])}
    of_round: dict[int, list[dict[str, Any]]] = {}
    for record in history.records:
        if "clients" in record:
            of_round.setdefault(record["round"], []).append(record["clients"])
    if of_round:
        kept = [["round", *head], *([t, *line] for t, rows in of_round.items() for line in lines(rows))]
        contents["clients_by_round.csv"] = csv_bytes(kept)
    return contents


def keep_results(out: str | Path, history: History, config: dict[str, Any], subjects: Subjects) -> None:
    """Writes `clients.csv` and `summary.json` of a run in Python, the method and data of which only `config` can name.

    Nothing is written where no round was evaluated.
    """
    if not history.records:
        return
    true_cluster = subjects.true_cluster
    known = None if true_cluster is None else np.unique(true_cluster[true_cluster >= 0])
    named = {name: value if isinstance(value := config.get(name), str) else None for name in ("method", "dataset")}
    counts = {"num_clients": subjects.num_clients, "num_clusters": None if known is None else len(known)}
    summary = named | counts | {"split_hash": None} | summarize(history)
    listed = "cluster" in history.clients  # not by a population without test examples
    contents = clients_csv(history, subjects.seeds, subjects.ids, true_cluster) if listed else {}
    write_results(Path(out), contents, summary)
