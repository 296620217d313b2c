"""The experiments of Provably Personalized and Robust Federated Learning (Werner et al. 2023): figures 2 to 5, and 7.

Where the paper's text leaves a choice open, its authors' code decides (github.com/liehe/PRFL); each experiment states
what is ours.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import make_blobs

from benchmarks.papers import report
from benchmarks.papers.recipes import Bench, Outcome, recipe
from jfcl import data, methods, models
from jfcl.analysis.metrics import deviation
from jfcl.core import Algorithm, Clients, PyTree, Task
from jfcl.experiments.config import Config
from jfcl.kernels import threshold_clustering
from jfcl.training.local import LocalTraining, local_training

_CIFAR = {"dataset": "cifar10", "clients": 20, "clusters": 4, "examples_per_client": None, "batch_size": 32, "seeds": 1}
_CIFAR |= {"augment": "crop_flip", "threshold_rounds": 10}
_DIGITS = {"dataset": "digits", "model": "mlp", "rounds": 200, "augment": None, "subgroup_size": None, "fc_every": 1}


# Figures 2 and 3: synthetic regression.


def regression(num_clusters: int, clients_per_cluster: int, seed: int, half: bool):
    """`(clients, cluster, truth [K, d], task)`; the loss is the squared error or half of it."""
    federation = data.synthetic.fc_regression(
        num_clusters=num_clusters, clients_per_cluster=clients_per_cluster, seed=seed
    )
    dim = federation.input_shape[0]
    task = models.task(
        lambda key: {"w": jnp.zeros(dim)}, lambda params, x: x @ params["w"], kind="regression", half=half
    )
    return jax.device_put(federation.train), federation.cluster, federation.truth, task


def dissimilarities(task: Task, training: LocalTraining, clients: Clients, cluster: np.ndarray, rounds: int):
    """`(within, between)`, `[rounds]` each: gradients' largest and least difference at the oracle's models."""
    algorithm = methods.oracle(task, training, cluster=cluster, weights="equal")
    same = jnp.asarray(cluster[None, :] == np.arange(4)[:, None])
    share = same.astype(jnp.float32) / same.sum(axis=1, keepdims=True, dtype=jnp.float32)

    def gradient(model, examples):
        return jax.grad(lambda p: task.loss(p, examples).mean())(model)["w"]

    def ratios(params):
        of_clients = jax.vmap(gradient, (None, 0))
        g = jax.vmap(of_clients, (0, None))(params, clients.examples)
        middle = (g * share[:, :, None]).sum(axis=1)
        away = jnp.square(g - middle[:, None]).sum(axis=2)
        within = jnp.where(same, away / jnp.square(middle).sum(axis=1)[:, None], 0.0)
        return within.max(), jnp.where(same, jnp.inf, away).min()

    def run(key):
        def body(state, t):
            return algorithm.step(key, state, clients)[0], ratios(state.params)

        return jax.lax.scan(body, algorithm.init(key, clients), jnp.arange(rounds))[1]

    return (np.asarray(v) for v in jax.jit(run)(jax.random.key(0)))


@recipe(
    "federated_clustering.figure2",
    full={"clients_per_cluster": 75, "rounds": 100, "lr": 1e-4, "seeds": 3},
    small={"seeds": 1},
)
def figure_2(bench: Bench, setting: dict[str, Any]) -> Outcome:
    """FC, figure 2: gradients within and between clusters.

    Gradients are taken at the models of perfectly known clusters.
    """
    rows, (figure, [[left, right]]) = [], report.panels(10, 3.8, 1, 2)
    training = local_training(optax.sgd(setting["lr"]), num_steps=1)
    for seed in range(setting["seeds"]):
        clients, cluster, _, task = regression(4, setting["clients_per_cluster"], seed, half=False)
        within, between = dissimilarities(task, training, clients, cluster, setting["rounds"])
        row = {"seed": seed, "intra, largest": float(within.max()), "paper's figure": 10.2, "its code": 6.11}
        row |= {"inter, least": float(between.min()), "paper's figure ": 2.2e7, "its code ": 2.71e5}
        rows.append(row)
        left.plot(within, label=f"seed {seed}")
        right.plot(between)
    left.set(xlabel="step", title=r"intra: largest $\|g_i - \bar g\|^2 / \|\bar g\|^2$ in a cluster", yscale="log")
    right.set(xlabel="step", title=r"inter: least $\|g_j - \bar g\|^2$ of other clusters", yscale="log")
    left.legend()
    return Outcome(rows, figure, "the paper's formulas (31), (32) are lost; ours are in the figure's titles")


PANELS = ((4, 4), (4, 16), (16, 4))  # clusters, clients in each
CODES_IFCA = "ifca, as the authors' code"
# Of an independent run of the authors' code. Both compute in float64, on data in float32: targets of the size of 1,000
# are rounded, and errors cannot go below some 1e-5.
FIGURE_3 = {
    "oracle": (1.5e-5, 5.6e-6, 0.0092),
    "federated_clustering": (1.5e-5, 5.7e-6, 0.018),
    "local": (0.120, 0.084, 0.121),
    "fedavg": (190.0, 133.0, 194.0),
    "ifca": (0.0115, 6.2e-6, 0.17),
    CODES_IFCA: (0.0115, 0.228, 140.0),
}
# IFCA has the others' exponential momentum here: without it, 0.1 diverges, as 0.001 does in the last panel.
RATES = {"ifca": (0.01, 0.1, 0.001), CODES_IFCA: (0.01, 0.1, 0.001), "fedavg": (0.1, 0.1, 0.001)}


@recipe("federated_clustering.figure3", full={"rounds": 800, "seeds": 10}, small={"seeds": 3})
def figure_3(bench: Bench, setting: dict[str, Any]) -> Outcome:
    """FC, figure 3: synthetic regression, distance to the truth.

    Models start near the truth; a panel for each number of clusters and of clients in each.
    """
    rows, (figure, [line]) = [], report.panels(13, 3.8, 1, 3)
    for panel, (axes, (k, each)) in enumerate(zip(line, PANELS, strict=True)):
        for name, independent in FIGURE_3.items():
            lr = RATES.get(name, (0.1, 0.1, 0.01))[panel]
            with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):  # which makes int64 of some counts too
                errors = _distances(name, lr, k, each, setting["seeds"], setting["rounds"])
            ends = errors[:, -1]
            row = {"clusters": k, "clients in each": each, "method": name, "end error": float(np.median(ends))}
            row |= {"least": float(ends.min()), "largest": float(ends.max()), "independent run": independent[panel]}
            rows.append(row)
            axes.plot(np.median(errors, axis=0), label=name, lw=1)
        axes.set(xlabel="step", yscale="log", title=f"{k} clusters of {each} clients")
    line[0].set_ylabel(r"mean $\|\theta^* - \theta_i\|$")
    line[0].legend(fontsize=8)
    return Outcome(rows, figure, "medians over seeds, which draw data and starts; the paper shows curves only")


def moving_average(decay: float) -> optax.GradientTransformation:
    """`m ← decay m + (1 − decay) g`, the first `m` being the first gradient (equation 29; `optax.ema` begins at 0).

    Example:
      >>> import jax.numpy as jnp
      >>> average = moving_average(0.9)
      >>> first, state = average.update(jnp.array([1.0]), average.init(jnp.zeros(1)))
      >>> first.tolist(), average.update(jnp.array([2.0]), state)[0].round(3).tolist()
      ([1.0], [1.100...])
    """

    def init(params):
        return optax.EmaState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def update(gradients, state, params=None):
        keep = jnp.where(state.count == 0, 0.0, decay)
        mix = lambda g, m: keep.astype(g.dtype) * m + (1 - keep).astype(g.dtype) * g  # noqa: E731
        mean = jax.tree.map(mix, gradients, state.ema)
        return mean, optax.EmaState(state.count + 1, mean)

    return optax.GradientTransformation(init, update)


class CodesIFCA(NamedTuple):
    """All models, `[M, d]`, and the one that each client chose, `[N]`."""

    params: PyTree
    cluster: jax.Array


def ifca_of_the_code(task: Task, lr: float, starts: PyTree, num_clusters: int) -> Algorithm:
    """IFCA as the authors' code for figure 3 has it, without momentum: clients choose among `M` models, and `K` move.

    The code takes every `K`-th client's model as a start, where it needs one from each cluster. With more clients in a
    cluster than clusters, `M > K`: most clients choose a model that never moves. With fewer, there are not enough.
    """

    def init(key: jax.Array, clients: Clients) -> CodesIFCA:
        return CodesIFCA(starts, jnp.zeros(len(clients.size), jnp.int32))

    def step(key: jax.Array, state: CodesIFCA, clients: Clients):
        def client(examples):
            loss = lambda params: task.loss(params, examples).mean()  # noqa: E731
            chosen = jax.vmap(loss)(state.params).argmin().astype(jnp.int32)
            model = jax.tree.map(lambda p: p[chosen], state.params)
            return chosen, jax.tree.map(lambda p, g: p - lr * g, model, jax.grad(loss)(model))

        chosen, trained = jax.vmap(client)(clients.examples)
        mine = chosen[:, None] == jnp.arange(len(jax.tree.leaves(starts)[0]))[None, :]
        moves = mine.any(axis=0) & (jnp.arange(mine.shape[1]) < num_clusters)
        sums = lambda new: mine.astype(new.dtype).T @ new  # noqa: E731
        count = jnp.maximum(mine.sum(axis=0), 1)[:, None]
        mean = lambda p, new: jnp.where(moves[:, None], sums(new) / count.astype(p.dtype), p)  # noqa: E731
        return CodesIFCA(jax.tree.map(mean, state.params, trained), chosen), {}

    return Algorithm(init, step, task)


def _distances(name: str, lr: float, num_clusters: int, each: int, seeds: int, rounds: int) -> np.ndarray:
    """`[seeds, rounds]`: mean distance of a method's models to the truth."""
    training = local_training(optax.chain(moving_average(0.9), optax.sgd(lr)), num_steps=1, keep="everything")
    problems = [regression(num_clusters, each, seed, half=True) for seed in range(seeds)]
    _, cluster, _, task = problems[0]  # client i is in cluster i mod K, whatever the seed

    def make(near) -> Algorithm:
        if name == CODES_IFCA:  # the clients of its data are in the order of their clusters
            starts = near[np.argsort(cluster, kind="stable")][::num_clusters]
            return ifca_of_the_code(task, lr, {"w": starts}, num_clusters)
        of_cluster, of_client, one = {"w": near[:num_clusters]}, {"w": near}, {"w": near.mean(axis=0)}
        rule = {"quantile": 1 / num_clusters, "quantile_rule": "index_strict", "threshold_rounds": 10}
        factory, start, options = {
            "oracle": (methods.oracle, of_cluster, {"cluster": cluster, "weights": "equal"}),
            "local": (methods.local_only, of_client, {}),
            "fedavg": (methods.fedavg, one, {"weights": "equal"}),
            "ifca": (methods.ifca, of_cluster, {"num_clusters": num_clusters}),
            "federated_clustering": (methods.federated_clustering, of_client, rule),
        }[name]
        return factory(task, training, init_params=start, client_axis=jax.vmap, **options)

    def run(clients, truth, near):
        algorithm = make(near)

        def body(state, t):
            state, _ = algorithm.step(jax.random.key(0), state, clients)  # full batches: nothing is drawn
            return state, jnp.linalg.norm(state.params["w"][state.cluster] - truth[cluster], axis=1).mean()

        return jax.lax.scan(body, algorithm.init(jax.random.key(0), clients), jnp.arange(rounds))[1]

    clients = jax.tree.map(lambda *x: jnp.stack(x), *[p[0] for p in problems])
    clients = clients._replace(examples=jax.tree.map(lambda x: x.astype(float), clients.examples))
    truth = np.stack([p[2] for p in problems])
    noise = [np.random.default_rng([seed, 3]).normal(0, 0.1, truth[0][cluster].shape) for seed in range(seeds)]
    near = truth[:, cluster] + np.stack(noise)
    return np.asarray(jax.jit(jax.vmap(run))(clients, truth, near))


# Figures 4 and 5: ordinary runs.


def _configure(setting: dict[str, Any], heterogeneity: str, method: str, **own: Any) -> Config:
    common = {"lr": 0.1, "momentum": 0.9, "local_steps": 1, "keep": "everything", "heterogeneity": heterogeneity}
    return report.configure(method, common | setting | own)


def _fc(setting: dict[str, Any], make: Callable[..., Config], quantile: float, every: int | None = None) -> Config:
    """Federated-Clustering at every so many of the setting's steps."""
    every = every or setting["fc_every"]
    rounds = max(1, setting["rounds"] // every)
    return make("federated_clustering", quantile=quantile, local_steps=every, rounds=rounds)


def _compare(bench: Bench, configs: dict[str, Config], paper: dict[str, str], title: str) -> Outcome:
    cells = [report.Cell({"run": name}, config, {"paper": paper.get(name, "")}) for name, config in configs.items()]
    return report.compare(bench, cells, "local steps", title=title, lw=1)


@recipe(
    "federated_clustering.figure4",
    full=_CIFAR
    | {"model": "vgg16", "rounds": 4680, "subgroup_size": 10, "fc_every": 10}
    | {"quantiles": [0.025, 0.05, 0.1, 0.15, 0.25], "every": [5, 20, 40]},
    small=_DIGITS | {"quantiles": [0.05, 0.1, 0.25], "every": [5, 20]},
)
def figure_4(bench: Bench, setting: dict[str, Any]) -> Outcome:
    """FC, figure 4: private labels on CIFAR-10.

    The runs compare the methods, the quantiles, and clustering every so many steps. With `--full`, as in the authors'
    code, clients cluster in groups of ten, at every tenth step, images are cropped and flipped at random, and VGG-16
    has no batch norm. Otherwise than there, its dense layers have no dropout, local steps have momentum, IFCA has four
    models (there, all four are one object), and Ditto's global model is trained (there, it stays as it begins).
    """
    make = partial(_configure, setting, "private_label")
    fc = partial(_fc, setting, make)
    configs = {"local": make("local"), "global": make("fedavg"), "ifca": make("ifca"), "ditto": make("ditto", lam=0.1)}
    configs |= {"ground truth": make("oracle"), "fc": fc(0.2)}
    configs |= {f"fc, quantile {q}": fc(q) for q in setting["quantiles"]}
    configs |= {f"fc, every {every} steps": fc(0.2, every) for every in setting["every"]}
    paper = {"fc": "above local", "ditto": "poor", "ifca": "poor", "global": "poor"}
    return _compare(bench, configs, paper, "private labels")


@recipe(
    "federated_clustering.figure5",
    full=_CIFAR
    | {"dataset": "cifar100", "clients": 100, "clusters": 10, "model": "vgg8", "rounds": 1600}
    | {"subgroup_size": 20, "fc_every": 20},
    small=_DIGITS | {"clients": 30, "clusters": 5},
)
def figure_5(bench: Bench, setting: dict[str, Any]) -> Outcome:
    """FC, figure 5: clusters with labels of their own.

    Ten clusters with labels of their own (CIFAR-100 where there is one): global, local, Federated-Clustering. With
    `--full`, groups of twenty clients cluster at every twentieth step, as in the authors' code.
    """
    make = partial(_configure, setting, "class")
    configs = {"global": make("fedavg"), "local": make("local"), "fc": _fc(setting, make, 0.1)}
    return _compare(bench, configs, {"global": "stuck", "fc": "improves throughout"}, "labels of their own")


# Figure 7: Threshold-Clustering itself.

FIGURE_7 = {0.5: 1.495, 1.0: 2.946, 2.0: 5.939, 4.0: 13.29}


@recipe("federated_clustering.figure7", full={"rounds": 50, "seeds": 100}, small={"seeds": 10})
def figure_7(bench: Bench, setting: dict[str, Any]) -> Outcome:
    """FC, figure 7: Threshold-Clustering on blobs, by round.

    How far the centres that start at every point are from the points of its true cluster, by threshold round.
    """
    rows, (figure, [[axes]]) = [], report.panels(5.6, 3.8)
    for std, paper in FIGURE_7.items():
        curves = []
        for seed in range(setting["seeds"]):
            points, cluster = make_blobs(90, 10, centers=10, cluster_std=std, random_state=seed)
            points = points.astype(np.float32)
            path, one = [points], {"quantile": 0.1, "quantile_rule": "index_strict", "num_rounds": 1}
            for _ in range(setting["rounds"]):
                path.append(threshold_clustering(points, path[-1], **one))
            away = np.asarray(path[1:])[:, :, None] - points[None, None]
            squares = (away**2).sum(axis=3)  # [rounds, centre, point]
            same = cluster[:, None] == cluster[None]
            curves.append((squares * same).sum(axis=(1, 2)) / same.sum())
        curve = np.sqrt(np.mean(curves, axis=0))
        axes.plot(np.arange(1, len(curve) + 1), curve, label=f"standard deviation {std:g}")
        flat = curve <= curve[-1] + 0.05 * (curve[0] - curve[-1])
        row = {"standard deviation": std, "end": float(curve[-1]), "paper's end": paper}
        row["over seeds"] = deviation(np.sqrt([one[-1] for one in curves]))
        rows.append(row | {"95 % of the way by round": int(np.argmax(flat)) + 1})
    report.label_axes(axes, xlabel="threshold round", ylabel="root mean square distance")
    return Outcome(rows, figure, "means over seeds, which draw the points; the paper repeats ten times")
