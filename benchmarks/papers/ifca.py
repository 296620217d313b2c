"""The experiments of IFCA (Ghosh, Chung, Yin, Ramchandran 2020): figures 3 and 4, tables 1 and 2."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.papers import report
from benchmarks.papers.recipes import Bench, Outcome, Row, recipe
from jfcl import data
from jfcl.analysis import plots
from jfcl.core import check_choice
from jfcl.experiments.config import Config

STEP_SIZES = {2: (0.01, 0.1, 1.0), 4: (0.5, 1.0, 2.0)}
DIM = 1000
BLOCK = 10  # rounds between two measurements of the models' distance
LOT = 60  # trajectories in one program: the data are read once for all of them

_SWEEP = {"radii": [0.1, 0.25, 0.5, 0.75, 1.0], "noises": [0.0, 0.1, 0.2, 0.4], "clients": [50, 100, 200, 400]}
_SWEEP |= {"examples": [50, 100, 200], "inits": 10, "rounds": 300}
_SWEEP |= {"reading": "norm", "start": "bernoulli", "to": "matched"}


@partial(jax.jit, static_argnames="rounds")
def advance(models: jax.Array, cell: jax.Array, lr: jax.Array, x: jax.Array, y: jax.Array, rounds: int) -> jax.Array:
    """`rounds` of IFCA's gradient averaging for `P` trajectories: models `[P, K, d]`, `cell` and `lr` `[P]`.

    What `jfcl.ifca(average="gradients")` does with linear models and squared errors (a test compares them). All
    trajectories have the clients' inputs in common, so that residuals and gradients of all clients, models and
    trajectories are one matrix product each: `4 N n d P K` operations a round.

    `x` is `[N, n, d]`, `y` `[cells, N, n]`.
    """
    num_clients, n, dim = x.shape
    rows = x.reshape(-1, dim)
    targets = jnp.moveaxis(y, 0, 2)[:, :, cell, None]  # [N, n, P, 1]

    def one_round(_, models):
        flat = models.reshape(-1, dim)  # [P K, d]
        residuals = (rows @ flat.T).reshape(num_clients, n, *models.shape[:2]) - targets  # [N, n, P, K]
        losses = jnp.square(residuals).sum(axis=1)
        chosen = jax.nn.one_hot(losses.argmin(axis=2), models.shape[1])[:, None]  # [N, 1, P, K]
        gradients = ((residuals * chosen).reshape(len(rows), -1).T @ rows).reshape(models.shape)
        return models - lr[:, None, None] * 2.0 * gradients / (n * num_clients)

    return jax.lax.fori_loop(0, rounds, one_round, models)


@np.errstate(all="ignore")  # of diverging trajectories
def sweep_trial(
    seed: int, cells: list[tuple[float, float]], num_clusters: int, num_clients: int, examples: int, setting: dict
) -> np.ndarray:
    """`[cells]` bool: does a trial succeed, for every `(R, σ)`? All cells have the same inputs and directions.

    A trajectory (a cell, an initialisation, a step size) that is within 0.6 σ at two looks running decides its cell.
    One is given up that no longer moves. All others go on for all rounds.
    """
    federation = data.synthetic.ifca_regression(
        num_clients=num_clients,
        examples_per_client=examples,
        dim=DIM,
        num_clusters=num_clusters,
        radius=1.0,
        noise=0.0,
        reading=setting["reading"],
        test_examples=1,
        seed=seed,
    )
    x = jnp.asarray(federation.train.examples["x"])
    rng = np.random.default_rng([seed, 9])
    noise = rng.standard_normal(x.shape[:2]).astype(np.float32)
    y = jnp.stack([r * federation.train.examples["y"] + s * noise for r, s in cells])
    inits, rates = setting["inits"], STEP_SIZES[num_clusters]
    starts = rng.integers(0, 2, (inits, num_clusters, DIM)).astype(np.float32)
    if setting["start"] == "scaled":
        starts /= np.linalg.norm(starts, axis=2, keepdims=True)
    grid = [(c, i, s) for c in range(len(cells)) for i in range(inits) for s in range(len(rates))]
    cell, init, rate = (np.array(v) for v in zip(*grid, strict=True))
    scale = np.array([r if setting["start"] == "scaled" else 1.0 for r, _ in cells], np.float32)
    now = starts[init] * scale[cell][:, None, None]  # [trajectories, K, d]
    truth, near = federation.truth, np.zeros(len(grid), bool)
    radius, sigma = (np.array(v) for v in zip(*cells, strict=True))
    # Without noise "0.6 σ" leaves no room: then 1 % of R, which is ours.
    enough = np.where(sigma > 0, 0.6 * sigma, 0.01 * radius)
    done = np.zeros(len(cells), bool)
    alive = np.ones(len(grid), bool)
    for begun in range(0, setting["rounds"], BLOCK):
        block = min(BLOCK, setting["rounds"] - begun)
        rows = np.flatnonzero(alive)
        for part in np.array_split(rows, -(-len(rows) // LOT)) if len(rows) else []:
            lot = np.resize(part, LOT)  # repeated to one length, so that one program does
            moved = np.asarray(advance(now[lot], cell[lot], np.float32(rates)[rate[lot]], x, y, block))[: len(part)]
            away = distance_to_truth(moved, truth[None] * radius[cell[part]][:, None, None], setting["to"])
            close = away <= enough[cell[part]]
            done[cell[part[close & near[part]]]] = True
            near[part] = close
            size = np.maximum(1e-3, np.abs(moved).max(axis=(1, 2)))
            still = np.abs(moved - now[part]).max(axis=(1, 2)) <= 1e-6 * size
            alive[part] = ~still & np.isfinite(moved).all(axis=(1, 2))
            done[cell[part[close & still]]] = True
            now[part] = moved
        alive &= ~done[cell]
    done[cell[near]] = True
    return done


def distance_to_truth(found: np.ndarray, truth: np.ndarray, to: str) -> np.ndarray:
    """`[P]`: mean over the models `[P, K, d]` of their distance to the truth.

    `to="matched"`: each to its own, under the best naming (the paper). `"nearest"`: each to the nearest (the code).
    """
    from scipy.optimize import linear_sum_assignment

    with np.errstate(all="ignore"):
        pairs = np.linalg.norm(found[:, :, None] - truth[:, None], axis=3)
    pairs = np.where(np.isfinite(pairs), pairs, 1e30)
    if to == "nearest":
        return pairs.min(axis=2).mean(axis=1)
    return np.array([p[linear_sum_assignment(p)].mean() for p in pairs])


@recipe("ifca.figure3", full=_SWEEP | {"panels": "abcd", "trials": 40}, small={"panels": "a", "trials": 2})
def figure_3(bench: Bench, setting: dict[str, Any]) -> Outcome:
    """IFCA, figure 3: success on linear regression by separation, noise, clients and examples.

    Panels (a, b) are by separation and noise, (c, d) by clients and examples.
    """
    for panel in setting["panels"]:
        check_choice("panel", panel, "abcd")
    check_choice("start", setting["start"], ["bernoulli", "scaled"])  # scaled: as the truths, to norm R
    check_choice("to", setting["to"], ["matched", "nearest"])
    groups = [(panel, *group) for panel in setting["panels"] for group in _groups(setting, panel)]
    calls = {
        f"{panel}-{m}-{n}-{trial}": (_trial, trial, cells, k, m, n, setting)
        for panel, k, m, n, cells in groups
        for trial in range(setting["trials"])
    }
    kept, rows = bench.keep_all(calls, "trials"), []
    for panel, k, m, n, cells in groups:
        trials = [kept[f"{panel}-{m}-{n}-{trial}"]["success"] for trial in range(setting["trials"])]
        for (radius, noise), share in zip(cells, np.mean(trials, axis=0), strict=True):
            row = {"panel": panel, "clusters": k, "clients": m, "examples": n, "R": radius, "noise": noise}
            rows.append(row | {"success": float(share)})
    figure, [line] = report.panels(5 * len(setting["panels"]), 3.8, 1, len(setting["panels"]))
    for axes, panel in zip(line, setting["panels"], strict=True):
        found = [row for row in rows if row["panel"] == panel]
        _plot_successes(axes, found, of_noise=panel in "ab")
        title = f"({panel}) K={found[0]['clusters']}"
        report.label_axes(axes, 7, ylabel="success", title=title, ylim=(-0.05, 1.05))
    return Outcome(rows, figure, "the paper: success grows with R, with the clients and with their examples")


def _groups(setting: dict[str, Any], panel: str) -> list[tuple[int, int, int, list[tuple[float, float]]]]:
    """Returns `(clusters, clients, examples, cells)` of a panel; a cell is a pair of separation and noise."""
    k = 2 if panel in "ac" else 4
    if panel in "ab":
        cells = [(r, s) for s in setting["noises"] for r in setting["radii"]]
        return [(k, 100 if k == 2 else 400, 100, cells)]
    radii = (0.1, 0.25) if k == 2 else (0.5, 0.75)
    counts = [c * k // 2 for c in setting["clients"]]
    return [(k, m, n, [(r, 0.1) for r in radii]) for m in counts for n in setting["examples"]]


def _plot_successes(axes: plots.Axes, rows: list[Row], of_noise: bool) -> None:
    """Plots a line per noise, by separation, or per number of examples and separation, by clients."""
    by, along = (("noise",), "R") if of_noise else (("examples", "R"), "clients")
    for values in sorted({tuple(r[name] for name in by) for r in rows}):
        line = [r for r in rows if tuple(r[name] for name in by) == values]
        label = ", ".join(f"{name} {value:g}" for name, value in zip(by, values, strict=True))
        axes.plot([r[along] for r in line], [r["success"] for r in line], marker=".", label=label)
    axes.set_xlabel(along)


def _trial(seed: int, cells: list[tuple[float, float]], *args: Any) -> Row:
    return {"cells": cells, "success": sweep_trial(seed, cells, *args).tolist()}


# Rotated MNIST and CIFAR, and FEMNIST: ordinary runs.

MNIST = ((4800, 50), (2400, 100), (1200, 200))
TABLE_1 = {
    "ifca": (94.20, 95.05, 95.25, 81.51),
    "fedavg": (86.74, 88.65, 89.73, 77.87),
    "local": (63.32, 73.66, 80.05, 33.97),
}


def _mnist(method: str, setting: dict[str, Any], m: int, n: int) -> Config:
    """The code's setting: 10 full-batch steps of 0.1; for local models 10 rounds of them."""
    given = {"dataset": "mnist", "clients": m, "clusters": 4, "examples_per_client": n, "newcomer_examples": n}
    given |= {"reuse": "cluster", "local_steps": 10, "lr": 0.1, "weights": "equal"}
    given |= {"restarts": 5, "restart_rounds": 3}  # of IFCA
    if method == "local":
        given |= {"rounds": setting["local_rounds"], "newcomer_examples": None}
    return report.configure(method, setting | given)


def cifar_config(method: str, setting: dict[str, Any]) -> Config:
    """The code's setting, with its crops, flips and colours.

    As in the code, initial models are drawn again until each gets 35 % of a cohort, and the kernels of the hidden dense
    layers alone decay. Unlike there, these draws are compared on images without changes, no comparison has the decay,
    and local models are those of all clients; the code's are of 20 clients, with standardised images cut to [0, 1].

    `setting["changed"]`, as in the code: a window, its light and contrast are those of a whole batch, and clients
    compare models on changed images. Otherwise they are drawn for each image, and models compared on whole images.
    """
    given = {"dataset": "cifar10", "clusters": 2, "reuse": "cluster", "model": "benchmarks.papers.networks:CNNCifar24"}
    augment = "tutorial_batch" if setting["changed"] else "tutorial"
    given |= {"augment": f"benchmarks.papers.networks:{augment}", "identity_augment": setting["changed"]}
    given |= {"local_epochs": 5, "batch_size": 50, "lr": 0.25, "lr_decay": 0.99}
    given |= {"weight_decay": 0.004, "decay_only": "Dense_0/kernel,Dense_1/kernel"}
    if method == "local":
        given |= {"rounds": setting["local_rounds"]}
    return report.configure(method, setting | given | {"min_share": 0.35})


def _table_1(bench: Bench, sizes: list[tuple[str, int, Callable[[str], Config]]], notes: str) -> Outcome:
    """The rows of `sizes`: a title, the paper's column, and the run of a method."""

    def measured(summary, records):
        new = [row.get("newcomer_accuracy") for row in summary["per_seed"]]
        row = {"newcomers %": None if None in new else 100 * float(np.mean(new)), "rounds": summary["num_rounds"]}
        if summary["method"] != "ifca":
            return row
        identity = float(np.mean([seed["cluster_accuracy"] for seed in summary["per_seed"]]))
        found = [seed["rounds_to_recovery"] for seed in summary["per_seed"]]
        return row | {"identity": identity, "99 % from round": None if None in found else max(found)}

    cells = [
        report.Cell({"data": title, "method": method}, make(method), {"paper %": paper[index]})
        for title, index, make in sizes
        for method, paper in TABLE_1.items()
    ]
    outcome = report.compare(bench, cells, "round", accuracy="clients %", measured=measured)
    return outcome._replace(notes=notes)


@recipe(
    "ifca.table1",
    full={"mnist": list(MNIST), "rounds": 300, "local_rounds": 10, "seeds": 5, "eval_every": 10},
    small={"mnist": [(1200, 200)], "rounds": 20, "seeds": 1, "eval_every": 5},
)
def table_1(bench: Bench, setting: dict[str, Any]) -> Outcome:
    """IFCA, table 1: rotated MNIST."""
    sizes = [
        (f"mnist {m} x {n}", MNIST.index((m, n)), partial(_mnist, setting=setting, m=m, n=n))
        for m, n in setting["mnist"]
    ]
    notes = "" if setting["rounds"] == 300 else f"after {setting['rounds']} rounds; the paper's after 300"
    return _table_1(bench, sizes, notes)


# A client takes part in a tenth of the rounds, so that local models train for 60 rounds of 600 in the paper's setting.
@recipe(
    "ifca.table1_cifar10",
    full={"clients": 200, "examples_per_client": 500, "cohort": 20, "rounds": 600, "local_rounds": 60, "seeds": 5}
    | {"eval_every": 10, "changed": False},
    small={"clients": 20, "cohort": 4, "rounds": 30, "local_rounds": 6, "seeds": 1, "eval_every": 5},
)
def table_1_cifar10(bench: Bench, setting: dict[str, Any]) -> Outcome:
    """IFCA, table 1: rotated CIFAR-10, some of the clients in each round."""
    title = f"cifar10 {setting['clients']} x {setting['examples_per_client']}"
    full = (setting["clients"], setting["cohort"], setting["rounds"]) == (200, 20, 600)
    notes = "" if full else "the paper's: 200 clients, 20 in a round, 600 rounds"
    return _table_1(bench, [(title, 3, partial(cifar_config, setting=setting))], notes)


@recipe(
    "ifca.figure4",
    full={"mnist": list(MNIST), "rounds": 300, "seeds": 5, "eval_every": 1},
    small={"mnist": [(1200, 200)], "rounds": 10, "seeds": 1},
)
def figure_4(bench: Bench, setting: dict[str, Any]) -> Outcome:
    """IFCA, figure 4: clients in the right cluster by round, rotated MNIST."""
    rows, (figure, [[axes]]) = [], report.panels(6.4, 4.2)
    runs = bench.run_all({f"mnist_{m}_x_{n}": _mnist("ifca", setting, m, n) for m, n in setting["mnist"]})
    for (m, n), (summary, records) in zip(setting["mnist"], runs.values(), strict=True):
        for end in summary["per_seed"]:
            row = {"data": f"mnist {m} x {n}", "seed": end["seed"], "identity at the end": end["cluster_accuracy"]}
            rows.append(row | {"99 % from round": end["rounds_to_recovery"], "paper": "about 30"})
        for seed, mine in report.by_seed(records).items():
            report.plot_metric(axes, mine, "cluster_accuracy", label=f"{m} x {n}, seed {seed}")
    report.label_axes(axes, 7, xlabel="round", ylabel="clients in the right cluster")
    return Outcome(rows, figure, "the restarts are ours: 5, in rounds 1 to 3")


@recipe(
    "ifca.table2",
    full={"dataset": "femnist", "model": "cnn_femnist", "clients": 1000, "batch_size": 20, "lr": 0.1, "cohort": 6}
    | {"rounds": 4000, "local_rounds": 50, "share": "Conv_0,Conv_1,Dense_0", "seeds": 5, "eval_every": 50},
    small={"dataset": "mnist_writers", "model": "mlp", "clients": 200, "cohort": 20}
    | {"rounds": 200, "local_rounds": 20, "share": "Dense_0", "seeds": 1, "eval_every": 10},
)
def table_2(bench: Bench, setting: dict[str, Any]) -> Outcome:
    """IFCA, table 2: clients are writers; FEMNIST, or MNIST's writers in its stead.

    IFCA with shared layers, one-shot, global and local models. FEMNIST is read where the user has LEAF's files; without
    them the writers of MNIST stand in, and the papers' numbers are not theirs.
    """
    writers = setting | {"partition": "writer", "heterogeneity": "none", "local_epochs": 1, "clusters": 1}

    def cell(method: str, paper: float, **own: Any) -> report.Cell:
        labels = {"data": setting["dataset"], "method": " ".join([method, *(f"K={k}" for k in own.values())])}
        return report.Cell(labels, report.configure(method, writers | own), {"paper, FEMNIST %": paper})

    def best(summary, records):
        return {"best round %": max(100 * r["accuracy"] for r in records)}

    cells = [
        cell("fedavg", 84.45),
        cell("local", 75.85),
        cell("ifca", 87.99, num_models=2),
        cell("one_shot", 87.41, num_models=2),
        cell("ifca", 87.89, num_models=3),
        cell("one_shot", 87.38, num_models=3),
    ]
    femnist = setting["dataset"] == "femnist"
    notes = "" if femnist else "MNIST's writers stand in for FEMNIST's: other data, other figures"
    return report.compare(bench, cells, "round", measured=best)._replace(notes=notes)
