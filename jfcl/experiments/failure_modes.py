"""The failure modes of section 2.1 of Federated-Clustering (Werner et al. 2023), figure 1: models of one number."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

from jfcl import algorithms
from jfcl.client.local import local_training
from jfcl.core import Algorithm, Clients, Task
from jfcl.experiments.recipes import Bench, Outcome


class Failure(NamedTuple):
    """Three or two clients with a loss each, on which a method goes wrong.

    Attributes:
      task: its parameter is one number.
      clients: each holds two copies of its loss; those of a noisy client differ, and a batch is one of them.
      optima: `[N]`, where each client's true cluster has its minimum.
    """

    task: Task
    clients: Clients
    optima: np.ndarray


def failure(name: str, lr: float) -> Failure:
    """`"myopic"`, `"ifca"` or `"cfl"`: figure 1 (a), (b), (c). `lr` is the learning rate that (a) is made for.

    (a) `f₁ = x²/(6η)`, `f₂' = 4/(3η)·x·(x−1)²` (a saddle at 1), `f₃ = (x−3)²/(2η)`; (b) `(x+½)²`, `(x−½)²`; (c)
    `f₁ = f₂ = ½(x−1)²`, `f₃ = ½(x+2)²`, with noise ±3 on client 2's gradients.
    """
    losses, optima = {
        "myopic": (
            [
                lambda x, s: x**2 / (6 * lr),
                lambda x, s: 4 / (3 * lr) * (x**4 / 4 - 2 * x**3 / 3 + x**2 / 2),
                lambda x, s: (x - 3) ** 2 / (2 * lr),
            ],
            [0.0, 0.0, 3.0],
        ),
        "ifca": ([lambda x, s: (x + 0.5) ** 2, lambda x, s: (x - 0.5) ** 2], [-0.5, 0.5]),
        "cfl": (
            [
                lambda x, s: 0.5 * (x - 1) ** 2,
                lambda x, s: 0.5 * (x - 1) ** 2 + 3 * s * x,
                lambda x, s: 0.5 * (x + 2) ** 2,
            ],
            [1.0, 1.0, -2.0],
        ),
    }[name]

    def loss(params, batch):
        return jax.vmap(lambda kind, s: jax.lax.switch(kind, losses, params["x"], s))(batch["y"], batch["x"])

    n = len(losses)
    kinds = np.repeat(np.arange(n, dtype=np.int32)[:, None], 2, axis=1)
    signs = np.tile(np.float32([1, -1]), (n, 1))
    clients = Clients({"x": signs, "y": kinds}, np.full(n, 2, np.int32))
    task = Task(lambda key: {"x": jnp.zeros(())}, loss, lambda params, x: params["x"] + 0 * x)
    return Failure(task, clients, np.array(optima))


def paths(algorithm: Algorithm, clients: Clients, seeds: int, rounds: int) -> np.ndarray:
    """`[seeds, rounds + 1, N]`: the one number that each client is served, from the start on."""

    def run(key):
        state = algorithm.init(jax.random.fold_in(key, 0), clients)

        def body(state, t):
            state, _ = algorithm.step(jax.random.fold_in(key, t), state, clients)
            return state, state.params["x"][state.cluster]

        _, path = jax.lax.scan(body, state, jnp.arange(1, rounds + 1))
        return jnp.concatenate([state.params["x"][state.cluster][None], path])

    return np.asarray(jax.jit(jax.vmap(run))(jax.vmap(jax.random.key)(jnp.arange(seeds, dtype=jnp.uint32))))


def failure_runs(lr: float) -> dict[str, list[tuple[str, Algorithm, str]]]:
    """For each failure mode: the method that fails and Federated-Clustering, and what the paper says of them."""

    def step(**options):
        return local_training(optax.sgd(lr), num_steps=1, **options)

    def at(*values):
        return {"x": np.float32(values) if len(values) > 1 else np.float32(values[0])}

    a, b, c = (failure(name, lr).task for name in ("myopic", "ifca", "cfl"))
    fc = partial(algorithms.federated_clustering, threshold_rounds=30)
    options = {"num_clusters": 2, "init_params": at(-1.5, 0.0)}
    return {
        "myopic": [
            (
                "myopic_clustering",
                algorithms.myopic_clustering(a, step(), num_clusters=2, radius=0.01 / lr, init_params=at(1.5)),
                "(0, 1, 3)",
            ),
            ("federated_clustering", fc(a, step(), radius=0.9 / lr, init_params=at(1.5)), "(0, 0, 3)"),
        ],
        "ifca": [
            ("ifca, option I", algorithms.ifca(b, step(), average="gradients", **options), "(0, 0) in all rounds"),
            ("ifca, option II", algorithms.ifca(b, step(), **options), "(0, 0) in all rounds"),
            ("federated_clustering", fc(b, step(), radius=1.5, init_params=at(0.0)), "(-1/2, 1/2)"),
        ],
        "cfl": [
            (
                "cfl",
                algorithms.cfl(c, step(batch_size=1), eps_1=jnp.inf, eps_2=1e-6, max_clusters=2, init_params=at(0.0)),
                "(1, -1/2, -1/2) in half of the runs",
            ),
            (
                "federated_clustering",
                fc(c, step(batch_size=1), radius=1.5, init_params=at(0.0)),
                "(1, 1, -2) in the mean",
            ),
        ],
    }


def failures(bench: Bench, setting: dict[str, Any]) -> Outcome:
    """The three failure modes: where clients' models go, for the method that fails and for Federated-Clustering."""
    lr, rows = 0.1, []
    figure = Figure(figsize=(12, 9), layout="constrained")
    grid = figure.subplots(3, 3, sharex=True)
    for line, (name, methods) in zip(grid, failure_runs(lr).items(), strict=True):
        problem = failure(name, lr)
        for axes in line[len(methods) :]:
            axes.set_axis_off()
        for axes, (label, algorithm, said) in zip(line, methods, strict=False):
            path = paths(algorithm, problem.clients, setting["seeds"], setting["rounds"])
            late = path[:, setting["rounds"] // 2 :].mean(axis=1)  # over rounds too: one client's steps are noisy
            wrong = np.abs(late - problem.optima[None, :]).max(axis=1) > 0.4
            row = {"failure of": name, "method": label, "optima": _numbers(problem.optima)}
            row |= {"models, mean of runs": _numbers(late.mean(axis=0)), "runs that go wrong": float(wrong.mean())}
            rows.append(row | {"paper": said})
            for i in range(path.shape[2]):
                axes.plot(path[0, :, i], lw=1, label=f"client {i + 1}")
                axes.axhline(problem.optima[i], color=f"C{i}", lw=1, ls=":")
            axes.set_title(f"{name}: {label}", fontsize=9)
            axes.legend(fontsize=7)
        line[0].set_ylabel("model")
    return Outcome(rows, figure, "dotted: the minimum of each client's true cluster")


def _numbers(values: np.ndarray) -> str:
    return "(" + ", ".join(f"{v + 0.0:.2f}" for v in np.round(values, 2)) + ")"
