"""The results that a finished run leaves in its folder: `summary.json` and `clients.csv`."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jfcl.analysis.metrics import RESERVED, deviation, drift_results, rounds_to_recovery
from jfcl.core.texts import csv_bytes
from jfcl.data.drift import Drift
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
        if last is None or record["round"] <= last:
            by_seed[record["seed"]].append(record)
    for seed, of_seed in by_seed.items():
        record = of_seed[-1]
        if last not in (None, record["round"]):
            continue
        right = [r.get("cluster_accuracy") for r in of_seed]  # None where the true clusters are unknown
        recovered = None if None in right else rounds_to_recovery([r["round"] for r in of_seed], right)
        row = {name: record.get(name) for name in (*SEED_METRICS, *further)} | {"rounds_to_recovery": recovered}
        row |= {name: record.get(name) for name in BYTES}
        row |= {name: value for name, value in record.items() if name == "perplexity" or name.startswith("newcomer_")}
        per_seed.append({"seed": seed} | row)

    columns = {name: [row.get(name) for row in per_seed] for name in per_seed[0] if name != "seed"}
    statistics = {"mean": lambda values: float(np.mean(values)), "std": deviation}
    return {"per_seed": per_seed} | {
        which: {name: None if None in values else statistic(values) for name, values in columns.items()}
        for which, statistic in statistics.items()
    }


def summarize_drift(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the entry `drift` of `summary.json`: the results of each seed by steps; nothing without drift.

    `mean` and `std` over seeds are those of the means over steps before adapting, and of the rounds to recovery, where
    the accuracy recovers.
    """
    by_seed = defaultdict(list)
    for record in records:
        by_seed[record["seed"]].append(record)
    if "next_accuracy" not in records[-1]:
        return {}
    per_seed = [{"seed": seed} | drift_results(of_seed) for seed, of_seed in by_seed.items()]
    means = {}
    for name in ("next_accuracy", "next_stable_accuracy", "adjusted_rand", "recovery"):
        numbers = [[value for value in row[name] if value is not None] for row in per_seed]
        means[name] = [float(np.mean(values)) for values in numbers if values]
    mean = {name: float(np.mean(values)) if values else None for name, values in means.items()}
    std = {name: deviation(values) for name, values in means.items()}
    return {"drift": {"per_seed": per_seed, "mean": mean, "std": std}}


def finds_clusters(history: History) -> bool:
    """Returns whether a method has several models, and not simply one for each client."""
    served = history.served
    if served.to is None:
        return served.found is not None
    axis = served.to.ndim - (2 if is_mixture(served) else 1)  # of the models, after that of seeds, if there is one
    return jax.tree.leaves(served.models)[0].shape[axis] > 1


def summarize(history: History) -> dict[str, Any]:
    """Returns the entries of `summary.json` that follow from a run alone: its end, its costs and its last metrics."""
    over_seeds = summarize_records(history.records, further=[n for n in history.clients if n not in RESERVED])
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
        **summarize_drift(history.records),
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

    `seeds` and `ids` name the `R` seeds and the `N` clients. `true_cluster` is `[N]`, of drifting data `[T, N]`; None
    where it is unknown. `extra` are further columns of integers, `[R, N]` each.
    """
    last, by_round = history.clients, defaultdict(list)
    steps = {record["round"]: record.get("step", 0) for record in history.records}
    for record in history.records:
        if "clients" in record:
            by_round[record["round"]].append(record["clients"])
    shape, truth = last["cluster"].shape, {} if true_cluster is None else {"true_cluster": np.atleast_2d(true_cluster)}
    extra = {name: np.broadcast_to(values, shape) for name, values in (extra or {}).items()}
    # The model is a column where clients of one cluster have models of their own.
    results = [last, *itertools.chain.from_iterable(by_round.values())]
    served = ["model"] * any(np.not_equal(r.get("model", r["cluster"]), r["cluster"]).any() for r in results)
    names = [name for name in ("accuracy", "loss", "perplexity") if name in last]
    names += [name for name in last if name not in RESERVED]

    def lines(of_seeds: Sequence[dict[str, Any]], step: int) -> Iterator[tuple]:
        for s, results in enumerate(of_seeds):
            true = [of_steps[step] for of_steps in truth.values()]
            counts = [results["examples"], *true, results["cluster"], *(v[s] for v in extra.values())]
            counts += [results.get(name, results["cluster"]) for name in served]
            # A run may be resumed with further metrics.
            numbers = [[f"{x:.6g}" for x in results[n]] if n in results else [""] * len(ids) for n in names]
            yield from zip([seeds[s]] * len(ids), ids, *(map(int, v) for v in counts), *numbers, strict=True)

    head = ["seed", "client", "examples", *truth, "cluster", *extra, *served, *names]
    of_last = [{name: values[s] for name, values in last.items() if values.ndim == 2} for s in range(len(seeds))]
    tables = {"clients.csv": [head, *lines(of_last, history.records[-1].get("step", 0))]}
    if by_round:
        rows = ([t, *line] for t, of_seeds in by_round.items() for line in lines(of_seeds, steps[t]))
        tables["clients_by_round.csv"] = [["round", *head], *rows]
    return {name: csv_bytes(table) for name, table in tables.items()}


def keep_results(
    out: str | Path, history: History, config: dict[str, Any], subjects: Subjects, drift: Drift | None
) -> None:
    """Writes `clients.csv` and `summary.json` of a run in Python, the method and data of which only `config` can name.

    Nothing is written where no round was evaluated.
    """
    if not history.records:
        return
    true_cluster = subjects.true_cluster
    if drift is not None:
        true_cluster = np.where(true_cluster < 0, -1, drift.cluster)
    clusters = None if true_cluster is None else np.unique(true_cluster[true_cluster >= 0])
    named = {name: value if isinstance(value := config.get(name), str) else None for name in ("method", "dataset")}
    counts = {"num_clients": subjects.num_clients, "num_clusters": None if clusters is None else len(clusters)}
    summary = named | counts | {"split_hash": None} | summarize(history)
    listed = "cluster" in history.clients  # not by a population without test examples
    contents = clients_csv(history, subjects.seeds, subjects.ids, true_cluster) if listed else {}
    write_results(Path(out), contents, summary)
