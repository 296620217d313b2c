"""Figure 4 of Federated-Clustering (Werner et al. 2023) as the authors' code has it: VGG-16 on CIFAR-10.

The code is github.com/liehe/PRFL. Images are drawn again in every epoch, so that a client comes to see all of them, and
come in batches of 32, the last of an epoch with what is left. Otherwise than there, evaluation is on all test images,
and crops, mirrors and dropout are drawn again in each step and for each client: that code sets its random numbers back
after each call of a client.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.papers import report
from benchmarks.papers.federated_clustering_mnist import BATCH, accuracies, ditto_of_the_code
from benchmarks.papers.recipes import Bench, Outcome, Row, recipe
from jfcl import data, methods, models
from jfcl.core import Algorithm, Clients, Task
from jfcl.models.networks import Conv
from jfcl.training.augment import crop_flip
from jfcl.training.local import local_training

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)  # of the code, the latter smaller than those of pixels
BLOCKS = ((2, 1), (2, 2), (3, 4), (3, 8), (3, 8))  # convolutions, and their channels in multiples of the first's
PAPER = {"local": "", "fedavg": "poor", "ditto": "poor", "federated_clustering": "above local", "oracle": "above local"}
LR, MOMENTUM = 0.1, 0.9


class VGG16(nn.Module):
    """The code's VGG-16, with dropout before both hidden dense layers, on pixels in [0, 1], which it standardises.

    Attributes:
      channels: of the first convolutions.
      dense: width of the hidden dense layers.
    """

    channels: int = 64
    dense: int = 512

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        mean, std = (jnp.asarray(each, x.dtype).reshape(1, 1, 1, 3) for each in (MEAN, STD))
        x = (x - mean) / std
        outgoing = nn.initializers.variance_scaling(2.0, "fan_out", "normal")
        for count, width in BLOCKS:  # after each, the sides are halved
            for place in range(1, count + 1):
                x = Conv(width * self.channels, 3, 1, pool=place == count, kernel_init=outgoing)(x)
        x = x.reshape(len(x), -1)
        for width in (self.dense, self.dense, 10):
            if width != 10:
                x = nn.Dropout(0.5, deterministic=not train)(x)
            reach = x.shape[1] ** -0.5
            uniform = lambda key, shape, dtype, reach=reach: jax.random.uniform(key, shape, dtype, -reach, reach)  # noqa: E731
            x = nn.Dense(width, kernel_init=uniform, bias_init=uniform)(x)
            x = nn.relu(x) if width != 10 else x
        return x


def with_momentum(gather_only: bool) -> optax.GradientTransformation:
    """Steps along the momentum; or, `gather_only`, along the gradients, while the momentum gathers them all the same.

    Example:
      >>> import jax.numpy as jnp
      >>> one, two = with_momentum(False), with_momentum(True)
      >>> step, state = one.update(jnp.ones(1), one.init(jnp.zeros(1)))
      >>> two.update(jnp.ones(1), state)[0].tolist(), one.update(jnp.ones(1), state)[0].round(2).tolist()
      ([-0.100...], [-0.18...])
    """
    trace = optax.trace(MOMENTUM)

    def update(gradients, state, params=None):
        momentum, state = trace.update(gradients, state)
        return jax.tree.map(lambda g: -LR * g, gradients if gather_only else momentum), state

    return optax.GradientTransformation(trace.init, update)


def clustering_every(clustering: Algorithm, local: Algorithm, every: int, rounds: int) -> Algorithm:
    """Clusters in every `every`-th of an epoch's rounds; in the others clients train alone."""

    def step(key: jax.Array, state: Any, clients: Clients):
        turn = state.round % rounds % every
        one = lambda algorithm: lambda s: algorithm.step(key, s, clients)[0]  # noqa: E731
        return jax.lax.cond(turn == every - 1, one(clustering), one(local), state), {}

    return Algorithm(clustering.init, step, clustering.task)


def figure_4_method(task: Task, name: str, cluster: np.ndarray, rounds: int, setting: dict[str, Any]) -> Algorithm:
    """A method as in the code.

    *Local* steps have no momentum, nor have those between two of Federated-Clustering's, which gather it. Ditto's
    global model stays as it begins. The four models of IFCA are one, so that it is FedAvg.
    """
    own = local_training(
        with_momentum(False), num_steps=1, batch_size=BATCH, augment=crop_flip, keep="everything", span="never"
    )
    alone = methods.local_only(task, own._replace(optimizer=with_momentum(True)))
    if name == "local":
        return alone
    if name == "ditto":
        return ditto_of_the_code(task, own._replace(optimizer=optax.trace(MOMENTUM)), lr=LR, lam=0.1)
    if name == "federated_clustering":
        options = {"quantile": setting["quantile"], "quantile_rule": "index", "subgroup_size": setting["subgroup_size"]}
        clustering = methods.federated_clustering(task, own, threshold_rounds=10, **options)
        return clustering_every(clustering, alone, setting["every"], rounds)
    make, options = {"fedavg": (methods.fedavg, {}), "oracle": (methods.oracle, {"cluster": cluster})}[name]
    return make(task, own, weights="equal", **options)


@functools.lru_cache(maxsize=1)
def _cifar(data_dir: str | None) -> data.Dataset:
    return data.load("cifar10", data_dir)


@recipe(
    "federated_clustering.figure4_code",
    full={"methods": list(PAPER), "clients": 20, "images": 2500, "epochs": 60, "eval_every": 5, "seeds": 1}
    | {"channels": 64, "dense": 512, "quantile": 0.2, "subgroup_size": 10, "every": 10},
    small={"images": 500, "epochs": 2, "channels": 4, "dense": 64, "eval_every": 1},
)
def figure_4(bench: Bench, setting: dict[str, Any]) -> Outcome:
    """FC, figure 4 as the authors' code: private labels on CIFAR-10, images drawn again in every epoch."""
    _cifar(bench.data_dir)  # before any process starts
    cells = [{"method": name} for name in setting["methods"]]
    rows, (figure, [[axes]]) = [], report.panels(6, 4)
    for cell, kept in zip(cells, report.kept_cells(bench, _cell, setting, cells), strict=True):
        rows.append(cell | report.accuracy_of(kept) | {"paper": PAPER[cell["method"]]})
        report.plot_epochs(axes, kept, cell["method"])
    report.label_axes(axes, 8, xlabel="epoch", ylabel="test accuracy %")
    return Outcome(rows, figure, "the authors' IFCA is FedAvg here: its four models are one object")


def _cell(data_dir: str | None, setting: dict[str, Any], of: Row) -> Row:
    """Trains one method with one seed."""
    clients, rounds = setting["clients"], -(-setting["images"] // BATCH)
    task = models.classification(VGG16(setting["channels"], setting["dense"]), (32, 32, 3), 10)
    algorithm = figure_4_method(task, of["method"], (np.arange(clients) % 4).astype(np.int32), rounds, setting)
    schedule = {name: setting[name] for name in ("epochs", "eval_every", "images")} | {"rounds": rounds}
    options = schedule | {"in_order": True, "redraw": True}
    return accuracies(algorithm, _cifar(data_dir), "private_label", clients, of["seed"], **options) | of
