"""The table on MNIST in the README of CFLA, a library of clustered federated learning: github.com/Totorino02/CFLA.

Its figures are of one run of its scripts: the mean and the standard deviation over clients.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax

from benchmarks.papers import report
from benchmarks.papers.federated_clustering_mnist import normalised_mnist
from benchmarks.papers.networks import LeNet5
from benchmarks.papers.recipes import Bench, Outcome, Row, recipe
from jfcl import data, methods, models
from jfcl.core import Algorithm, Clients, check_choice, stack_clients
from jfcl.simulation.run import simulate
from jfcl.training.local import local_training

GROUPS = ((0, 4, 18), (4, 7, 17), (7, 9, 15))  # the first and the last label of a group, and its clients
README = {"IFCA": (97.3, 0.5), "FL+HC": (97.1, 0.4), "FeSEM": (90.4, 12.2), "FeSEM, equal models": (90.4, 12.2)}
METHODS = (*README, "FedAvg in each group", "local")
NETWORKS = {"LeNet-5": LeNet5, "MLP": models.MLP}
WITHOUT_COHORTS = ("FeSEM", "local")


def make_method(name: str, cluster: np.ndarray, setting: dict[str, Any]) -> Algorithm:
    """Returns a method with the options of CFLA's scripts, SGD without momentum.

    Where CFLA's FeSEM begins, with `K` equal models, the first of them is the nearest for all clients: what is left is
    FedAvg. Its IFCA begins so, too: there the rounding of losses over shuffled batches decides.
    """
    task = models.classification(NETWORKS[setting["network"]](10), (28, 28, 1), 10)
    training = local_training(optax.sgd(0.01), num_epochs=setting["local_epochs"], batch_size=32)
    cohort = {} if name in WITHOUT_COHORTS else {"cohort": setting["cohort"]}
    threshold = {"distance_threshold": 0.5, "linkage": "average", "rounds_before": 5}
    make, options = {
        "IFCA": (methods.ifca, {"num_clusters": 3, "restarts": 5, "restart_rounds": 3, "weights": "equal"}),
        "FL+HC": (methods.flhc, {"num_clusters": len(cluster), **threshold}),
        "FeSEM": (methods.fesem, {"num_clusters": 10, "weights": "equal"}),
        "FeSEM, equal models": (methods.fedavg, {"weights": "equal"}),
        "FedAvg in each group": (methods.oracle, {"cluster": cluster}),
        "local": (methods.local_only, {}),
    }[name]
    return make(task, training, **options, **cohort)


def deal(dataset: data.Dataset, seed: int, share: float, images: int) -> tuple[Clients, Clients, np.ndarray]:
    """Returns the clients, their tests and their groups: a group shares out the training images of its labels.

    A client has so many of its `images` at most, trains on a `share` of them and is tested on the others. Images of a
    label of two groups are in both.
    """
    rng, y = np.random.default_rng(seed), dataset.train["y"]
    rows = [np.flatnonzero((y >= first) & (y <= last)) for first, last, _ in GROUPS]
    parts = [
        part[:images]
        for of, (*_, count) in zip(rows, GROUPS, strict=True)
        for part in np.array_split(rng.permutation(of), count)
    ]
    pick = lambda of: {name: dataset.train[name][of] for name in "xy"}  # noqa: E731
    cuts = [int(len(part) * share) for part in parts]
    train = stack_clients(pick(part[:cut]) for part, cut in zip(parts, cuts, strict=True))
    test = stack_clients(pick(part[cut:]) for part, cut in zip(parts, cuts, strict=True))
    return train, test, np.repeat(np.arange(len(GROUPS), dtype=np.int32), [count for *_, count in GROUPS])


@recipe(
    "cfla.mnist",
    full={"methods": list(METHODS), "rounds": 100, "cohort": 10, "local_epochs": 3, "share": 0.2, "seeds": 3}
    | {"images": 2000, "network": "LeNet-5"},  # more images than a client has
    small={"network": "MLP", "seeds": 1},
)
def mnist(bench: Bench, setting: dict[str, Any]) -> Outcome:
    """CFLA, the README's table on MNIST: 50 clients of three groups of labels.

    The methods that know no cohorts here have as many rounds as a client takes part in.
    """
    check_choice("network", setting["network"], NETWORKS)
    normalised_mnist(bench.data_dir)  # before any process starts
    cells, rows = [{"method": name} for name in setting["methods"]], []
    for cell, kept in zip(cells, report.kept_cells(bench, _cell, setting, cells), strict=True):
        over = {name: float(np.mean([one[name] for one in kept])) for name in ("over clients", "adjusted Rand")}
        row = cell | report.accuracy_of(kept) | over
        paper, paper_over = README.get(cell["method"], (None, None))
        rows.append(row | report.paper_columns(row["accuracy %"], paper) | {"its over clients": paper_over})
    return Outcome(rows, None, "std: over seeds; over clients: standard deviation of a run's clients, mean over seeds")


def _cell(data_dir: str | None, setting: dict[str, Any], of: Row) -> Row:
    """Trains one method with one seed."""
    method, seed = of.values()
    train, test, cluster = deal(normalised_mnist(data_dir), seed, setting["share"], setting["images"])
    part = len(cluster) // setting["cohort"] if method in WITHOUT_COHORTS else 1
    history = simulate(
        make_method(method, cluster, setting),
        train,
        key=jax.random.key(seed),
        num_rounds=max(setting["rounds"] // part, 1),
        test_clients=test,
        true_cluster=cluster,
        eval_every=setting["rounds"],
    )
    accuracies, last = 100 * np.asarray(history.clients["accuracy"]), history.records[-1]
    found = {"accuracy %": [float(accuracies.mean())], "over clients": float(accuracies.std())}
    return of | found | {"adjusted Rand": last["adjusted_rand"], "seconds": history.seconds + history.compile_seconds}
