"""Tables of CLoVE, PACFL and FedEM, methods whose papers compare them with others: a run of each method and seed.

CLoVE's and PACFL's figures are second-hand, FedEM's those of its README. `benchmarks/assigned.py` has CLoVE's linear
regression and rotations, and `benchmarks/mixtures.py` FedEM's synthetic data.
"""

from __future__ import annotations

from functools import partial
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
    """Two convolutions of 5 x 5 pixels, each with 2 x 2 pooling, and dense layers; by default that of CLoVE's code."""

    num_outputs: int
    channels: tuple[int, int] = (6, 16)
    hidden: tuple[int, ...] = ()

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for channels in self.channels:
            x = nn.Conv(channels, (5, 5), padding="VALID", conv_general_dilated=conv)(x)
            x = nn.max_pool(nn.relu(x), (2, 2), (2, 2))
        x = x.reshape(len(x), -1)
        for width in self.hidden:
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(self.num_outputs)(x)


NETWORKS = {"CLoVE": CNN, "PACFL": partial(CNN, hidden=(120, 84)), "MLP": models.MLP}
NETWORKS["FedEM"] = partial(CNN, channels=(32, 64), hidden=(2048,))
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
        if "trained alone %" in kept[0]:
            row["trained alone %"] = float(np.mean([one["trained alone %"] for one in kept]))
        compared = row.get("trained alone %", row["accuracy %"])
        rows.append(row | report.paper_columns(compared, paper[cell["data"]].get(cell["method"])))
    return Outcome(rows, None)


def _trained(
    of: Row,
    federation: data.Federation,
    phases: list[tuple[LocalTraining, int]],
    setting: dict[str, Any],
    measure: str = "accuracy",
    alone: bool = False,
    **options: Any,
) -> Row:
    """Returns the row of a method after its training with one seed.

    Args:
      phases: trainings, and the rounds of each.
      measure: the accuracy of a record.
      alone: also test each client's model after one more training of the client alone.
    """
    network = NETWORKS[setting["network"]](federation.num_classes)
    task = models.classification(network, federation.input_shape, federation.num_classes)
    first, test = jax.random.key(of["seed"]), {"test_clients": federation.test}
    clusters = None if federation.num_clusters == 1 else federation.cluster
    state, seconds = None, 0.0
    for phase, (training, rounds) in enumerate(phases):
        algorithm = METHODS[of["method"]](task, training, **_options(of["method"], setting), **options)
        key = jax.random.fold_in(first, phase) if phase else first
        run = {"num_rounds": rounds, "eval_every": rounds, "true_cluster": clusters, "state": state}
        history = simulate(algorithm, federation.train, key=key, **run, **test)
        state, seconds = history.state, seconds + history.seconds + history.compile_seconds
    last, served = history.records[-1], history.served
    found = {"accuracy %": [100 * last[measure]], "adjusted Rand": last.get("adjusted_rand")}
    found |= {"clusters": last["clusters_in_use"], "seconds": seconds}
    if alone:
        params = served.models if served.to is None else jax.tree.map(lambda p: p[served.to], served.models)
        of_each = methods.local_only(task, phases[-1][0], init_params=params)
        history = simulate(of_each, federation.train, key=jax.random.fold_in(first, len(phases)), num_rounds=1, **test)
        found["trained alone %"] = 100 * history.records[-1][measure]
    return of | found


def _federation(data_dir: str | None, setting: dict[str, Any], of: Row, **options: Any) -> data.Federation:
    sizes = {"num_clients": setting["clients"], "examples_per_client": setting["examples_per_client"]}
    return data.build(of["data"], data_dir=data_dir, seed=of["seed"], **sizes, **options)


CLOVE = {
    "mnist": {"CLoVE": 99.8, "IFCA": 99.1, "FedGroup": 99.4},
    "cifar10": {"CLoVE": 90.5, "IFCA": 85.7},
}
CLOVE_CLIENTS = {"mnist": 25, "cifar10": 15}


@recipe(
    "clove.labels",
    full={
        "datasets": list(CLOVE),
        "methods": ["CLoVE", "IFCA", "FedGroup"],
        "clients": None,
        "clusters": 5,
        "rounds": 100,
    }
    | {"examples_per_client": 500, "network": "CLoVE", "lr": {"mnist": 1e-2, "cifar10": 1e-3}, "seeds": 3},
    small={"datasets": ["mnist"], "clients": 25, "rounds": 10, "network": "MLP", "lr": {"mnist": 1e-3}, "seeds": 1},
)
def clove_labels(bench: Bench, setting: dict[str, Any]) -> Outcome:
    """CLoVE (Bhatia et al. 2025), clusters of two labels each: CLoVE, IFCA and FlexCFL, here FedGroup."""
    return _table(bench, setting, _clove_cell, CLOVE)


def _clove_cell(data_dir: str | None, setting: dict[str, Any], of: Row) -> Row:
    clients = setting["clients"] or CLOVE_CLIENTS[of["data"]]
    options = {"num_clusters": setting["clusters"], "heterogeneity": "class"}
    federation = _federation(data_dir, setting | {"clients": clients}, of, **options)
    training = local_training(optax.adam(setting["lr"][of["data"]]), num_epochs=1, batch_size=100)
    return _trained(of, federation, [(training, setting["rounds"])], setting)


PACFL = {"fashion_mnist": {"PACFL": 94.4, "IFCA": 94.0}, "cifar10": {"PACFL": 90.5, "IFCA": 89.7}}


@recipe(
    "pacfl.labels",
    full={"datasets": list(PACFL), "methods": ["PACFL", "IFCA", "FedAvg", "local"], "clients": 100, "clusters": 5}
    | {"angle": 4.9, "rounds": 200, "cohort": 10, "local_epochs": 10, "examples_per_client": 500, "network": "PACFL"}
    | {"seeds": 3},
    small={"datasets": ["fashion_mnist"], "rounds": 20, "local_epochs": 5, "examples_per_client": 100, "seeds": 1}
    | {"network": "MLP"},
)
def pacfl_labels(bench: Bench, setting: dict[str, Any]) -> Outcome:
    """PACFL (Vahidian et al. 2023), two labels for each client: its protocol, with figures from the table of FedDAG.

    Its code tests a client's model after the client has trained it alone: *trained alone*.
    """
    return _table(bench, setting, _pacfl_cell, PACFL)


def _pacfl_cell(data_dir: str | None, setting: dict[str, Any], of: Row) -> Row:
    federation = _federation(data_dir, setting, of, partition="pathological", labels_per_client=2)
    optimizer = optax.sgd(0.01, momentum=0.5)
    training = local_training(optimizer, num_epochs=setting["local_epochs"], batch_size=10)
    cohort = {} if of["method"] == "local" else {"cohort": setting["cohort"]}
    rounds = (
        setting["rounds"] * setting["cohort"] // setting["clients"] if of["method"] == "local" else setting["rounds"]
    )
    return _trained(of, federation, [(training, max(rounds, 1))], setting, alone=True, **cohort)


FEDEM = {  # of EMNIST with digits and letters; here are letters alone
    "emnist_letters": {"FedEM": 83.5, "FedAvg": 82.6, "local": 71.9},
    "cifar10": {"FedEM": 84.3, "FedAvg": 78.2, "local": 70.2},
}
FEDEM_DATA: dict[str, dict[str, Any]] = {
    "emnist_letters": {"clients": 100, "examples_per_client": 651, "partition": "dirichlet"},
    "cifar10": {"clients": 80, "examples_per_client": 625, "partition": "label_groups"},
}
FEDEM_LR = {"emnist_letters": {"FedEM": 0.05, "FedAvg": 0.01, "local": 0.01}}
FEDEM_LR["cifar10"] = {"FedEM": 0.03, "FedAvg": 0.01, "local": 0.03}


@recipe(
    "fedem.readme",
    full={"datasets": list(FEDEM), "methods": ["FedEM", "FedAvg", "local"], "clients": None, "clusters": 3}
    | {"alpha": 0.4, "rounds": 200, "examples_per_client": None, "network": "FedEM", "lr": FEDEM_LR, "seeds": 3},
    small={"datasets": ["emnist_letters"], "clients": 40, "rounds": 40, "examples_per_client": 150, "seeds": 1}
    | {"network": "MLP"},
)
def fedem_readme(bench: Bench, setting: dict[str, Any]) -> Outcome:
    """FedEM (Marfoq et al. 2021), the README of its code: labels whose shares differ by client.

    CIFAR-10 has three groups of labels, each divided as a label of the letters is. The learning rates are those of the
    code, a tenth of them after half of the rounds, and a hundredth after three quarters. An accuracy is that of all
    clients' test examples together.
    """
    return _table(bench, setting, _fedem_cell, FEDEM)


def _fedem_cell(data_dir: str | None, setting: dict[str, Any], of: Row) -> Row:
    of_data = FEDEM_DATA[of["data"]]
    sizes = {name: setting[name] or of_data[name] for name in ("clients", "examples_per_client")}
    federation = _federation(data_dir, setting | sizes, of, partition=of_data["partition"], alpha=setting["alpha"])
    rounds, phases = setting["rounds"], []
    half, last = rounds // 2, max(rounds // 2, 3 * (rounds // 4))
    for share, count in ((1, half), (0.1, last - half), (0.01, rounds - last)):
        lr = share * setting["lr"][of["data"]][of["method"]]
        optimizer = optax.chain(optax.add_decayed_weights(5e-4), optax.sgd(lr, momentum=0.9))
        # As in the code, momentum outlives rounds.
        phases.append((local_training(optimizer, num_epochs=1, batch_size=128, keep="everything"), count))
    return _trained(of, federation, [phase for phase in phases if phase[1]], setting, measure="pooled_accuracy")
