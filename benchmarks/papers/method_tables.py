"""Tables of CLoVE, PACFL and FedEM, methods whose papers compare them with others: a run of each method and seed.

CLoVE's and PACFL's figures are second-hand, FedEM's those of its README. `benchmarks/assigned.py` has CLoVE's linear
regression and rotations, and `benchmarks/mixtures.py` FedEM's synthetic data.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax

from benchmarks.papers import report
from benchmarks.papers.recipes import Bench, Outcome, Row, recipe
from jfcl import data, methods, models
from jfcl.core import check_choice
from jfcl.models import conv
from jfcl.simulation.run import simulate
from jfcl.training.local import LocalTraining, local_training


class CNN(nn.Module):
    """The network of CLoVE's code: convolutions with 6 and 16 channels of 5 x 5 pixels, and a dense layer."""

    num_outputs: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for channels in (6, 16):
            x = nn.Conv(channels, (5, 5), padding="VALID", conv_general_dilated=conv)(x)
            x = nn.max_pool(nn.relu(x), (2, 2), (2, 2))
        return nn.Dense(self.num_outputs)(x.reshape(len(x), -1))


NETWORKS = {"CNN": CNN, "MLP": models.MLP}
METHODS = {"CLoVE": methods.clove, "FedGroup": methods.fedgroup, "IFCA": methods.ifca, "PACFL": methods.pacfl}
METHODS |= {"FedEM": methods.fedem, "FedAvg": methods.fedavg, "local": methods.local_only}


def _options(method: str, setting: dict[str, Any]) -> dict[str, Any]:
    """Returns the number of clusters; of PACFL the threshold that finds it."""
    if method == "PACFL":
        return {"num_clusters": setting["clients"], "angle_threshold": setting["angle"]}
    return {} if method in ("FedAvg", "local") else {"num_clusters": setting["clusters"]}


def _table(bench: Bench, setting: dict[str, Any], compute: Any, paper: dict[str, dict[str, float]]) -> Outcome:
    """Returns a row for each data set and method."""
    check_choice("network", setting["network"], NETWORKS)
    cells, rows = [{"data": d, "method": m} for d in setting["datasets"] for m in setting["methods"]], []
    for dataset in setting["datasets"]:
        data.load(dataset, bench.data_dir)  # before any process starts
    for cell, kept in zip(cells, report.kept_cells(bench, compute, setting, cells), strict=True):
        row = cell | report.accuracy_of(kept)
        found = [one["adjusted Rand"] for one in kept]
        row["adjusted Rand"] = None if None in found else float(np.mean(found))
        row["clusters"] = float(np.mean([one["clusters"] for one in kept]))
        rows.append(row | report.paper_columns(row["accuracy %"], paper[cell["data"]].get(cell["method"])))
    return Outcome(rows, None)


def _trained(
    of: Row, federation: data.Federation, training: LocalTraining, setting: dict[str, Any], **options: Any
) -> Row:
    """Returns the row of a method after its training with one seed."""
    network = NETWORKS[setting["network"]](federation.num_classes)
    task = models.classification(network, federation.input_shape, federation.num_classes)
    algorithm = METHODS[of["method"]](task, training, **_options(of["method"], setting), **options)
    clusters = None if federation.num_clusters == 1 else federation.cluster
    history = simulate(
        algorithm,
        federation.train,
        key=jax.random.key(of["seed"]),
        num_rounds=setting["rounds"],
        test_clients=federation.test,
        true_cluster=clusters,
        eval_every=setting["rounds"],
    )
    last = history.records[-1]
    found = {"accuracy %": [100 * last["accuracy"]], "adjusted Rand": last.get("adjusted_rand")}
    found["clusters"] = last["clusters_in_use"]
    return of | found | {"seconds": history.seconds + history.compile_seconds}


def _federation(data_dir: str | None, setting: dict[str, Any], of: Row, **options: Any) -> data.Federation:
    sizes = {"num_clients": setting["clients"], "examples_per_client": setting["examples_per_client"]}
    return data.build(of["data"], data_dir=data_dir, seed=of["seed"], **sizes, **options)


CLOVE = {
    "mnist": {"CLoVE": 99.8, "IFCA": 99.1, "FedGroup": 99.4},
    "cifar10": {"CLoVE": 90.5, "IFCA": 85.7},
}


@recipe(
    "clove.labels",
    full={
        "datasets": list(CLOVE),
        "methods": ["CLoVE", "IFCA", "FedGroup"],
        "clients": 25,
        "clusters": 5,
        "rounds": 100,
    }
    | {"examples_per_client": 500, "network": "CNN", "lr": {"mnist": 1e-2, "cifar10": 1e-3}, "seeds": 3},
    small={"datasets": ["mnist"], "rounds": 10, "network": "MLP", "lr": {"mnist": 1e-3}, "seeds": 1},
)
def clove_labels(bench: Bench, setting: dict[str, Any]) -> Outcome:
    """CLoVE (Bhatia et al. 2025), clusters of two labels each: CLoVE, IFCA and FlexCFL, here FedGroup."""
    return _table(bench, setting, _clove_cell, CLOVE)


def _clove_cell(data_dir: str | None, setting: dict[str, Any], of: Row) -> Row:
    federation = _federation(data_dir, setting, of, num_clusters=setting["clusters"], heterogeneity="class")
    training = local_training(optax.adam(setting["lr"][of["data"]]), num_epochs=1, batch_size=100)
    return _trained(of, federation, training, setting)


PACFL = {"fashion_mnist": {"PACFL": 94.4, "IFCA": 94.0}, "cifar10": {"PACFL": 90.5, "IFCA": 89.7}}


@recipe(
    "pacfl.labels",
    full={"datasets": list(PACFL), "methods": ["PACFL", "IFCA", "FedAvg", "local"], "clients": 100, "clusters": 5}
    | {"angle": 4.9, "rounds": 200, "cohort": 10, "local_epochs": 10, "examples_per_client": 500, "network": "CNN"}
    | {"seeds": 3},
    small={"datasets": ["fashion_mnist"], "rounds": 20, "local_epochs": 5, "examples_per_client": 100, "seeds": 1}
    | {"network": "MLP"},
)
def pacfl_labels(bench: Bench, setting: dict[str, Any]) -> Outcome:
    """PACFL (Vahidian et al. 2023), two labels for each client: its protocol, with figures from the table of FedDAG."""
    return _table(bench, setting, _pacfl_cell, PACFL)


def _pacfl_cell(data_dir: str | None, setting: dict[str, Any], of: Row) -> Row:
    federation = _federation(data_dir, setting, of, partition="pathological", labels_per_client=2)
    optimizer = optax.sgd(0.01, momentum=0.5)
    training = local_training(optimizer, num_epochs=setting["local_epochs"], batch_size=10)
    cohort = {} if of["method"] == "local" else {"cohort": setting["cohort"]}
    rounds = (
        setting["rounds"] * setting["cohort"] // setting["clients"] if of["method"] == "local" else setting["rounds"]
    )
    return _trained(of, federation, training, setting | {"rounds": max(rounds, 1)}, **cohort)


FEDEM = {  # of EMNIST with digits and letters; here are letters alone
    "emnist_letters": {"FedEM": 83.5, "FedAvg": 82.6, "local": 71.9},
    "cifar10": {"FedEM": 84.3, "FedAvg": 78.2, "local": 70.2},
}


@recipe(
    "fedem.readme",
    full={"datasets": list(FEDEM), "methods": ["FedEM", "FedAvg", "local"], "clients": 80, "clusters": 3, "alpha": 0.4}
    | {"rounds": 200, "examples_per_client": 500, "network": "CNN", "seeds": 3},
    small={"datasets": ["emnist_letters"], "clients": 40, "rounds": 30, "examples_per_client": 150, "seeds": 1}
    | {"network": "MLP"},
)
def fedem_readme(bench: Bench, setting: dict[str, Any]) -> Outcome:
    """FedEM (Marfoq et al. 2021), the README of its code: labels in three groups, whose shares differ by client."""
    return _table(bench, setting, _fedem_cell, FEDEM)


def _fedem_cell(data_dir: str | None, setting: dict[str, Any], of: Row) -> Row:
    federation = _federation(data_dir, setting, of, partition="label_groups", alpha=setting["alpha"])
    lr = {"emnist_letters": 0.05, "cifar10": 0.03}[of["data"]]
    optimizer = optax.chain(optax.add_decayed_weights(5e-4), optax.sgd(lr, momentum=0.9))
    training = local_training(optimizer, num_epochs=1, batch_size=128, keep="everything")  # as in the code
    return _trained(of, federation, training, setting)
