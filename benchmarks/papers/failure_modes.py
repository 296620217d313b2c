"""The failure modes of section 2.1 of Federated-Clustering (Werner et al. 2023), figure 1: models of one number.

`notebooks/01_failure_modes.ipynb` shows the same problems.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.papers import report
from benchmarks.papers.recipes import Bench, Outcome, recipe
from jfcl import methods
from jfcl.core import Algorithm, Clients, Task
from jfcl.training.local import local_training


class Failure(NamedTuple):
    """Three or two clients with a loss each, on which a method goes wrong.

    Attributes:
      clients: each holds two copies of its loss; those of a noisy client differ, and a batch is one of them.
      optima: `[N]`, where each client's true cluster has its minimum.
      runs: the method that fails, and Federated-Clustering, with what the paper says of them.
    """

    clients: Clients
    optima: np.ndarray
    runs: dict[str, tuple[Algorithm, str]]


def problem(*losses: Callable) -> tuple[Task, Clients]:
    """Returns a task whose parameter is one number, and a client for each loss `f(x, sign)` of it."""

    def cost(outputs, batch):
        return jax.vmap(lambda kind, *at: jax.lax.switch(kind, losses, *at))(batch["y"], outputs, batch["x"])

    n = len(losses)
    examples = {"x": np.tile(np.float32([1, -1]), (n, 1)), "y": np.repeat(np.arange(n, dtype=np.int32)[:, None], 2, 1)}
    task = Task(lambda key: {"x": jnp.zeros(())}, lambda params, x: params["x"] + 0 * x, cost)
    return task, Clients(examples, np.full(n, 2, np.int32))


def failure_modes(lr: float) -> dict[str, Failure]:
    """Returns `"myopic"`, `"ifca"` and `"cfl"`: figure 1 (a), (b), (c); (a) is made for the learning rate.

    (a) `f₁ = x²/(6η)`, `f₂' = 4/(3η)·x·(x−1)²` (a saddle at 1), `f₃ = (x−3)²/(2η)`; (b) `(x+½)²`, `(x−½)²`; (c)
    `f₁ = f₂ = ½(x−1)²`, `f₃ = ½(x+2)²`, with noise ±3 on client 2's gradients.
    """
    step, noisy = (local_training(optax.sgd(lr), num_steps=1, batch_size=batch) for batch in (None, 1))

    def start(*values):
        return {"init_params": {"x": np.squeeze(np.float32(values))}}

    def saddle(x, s):
        return 4 / (3 * lr) * (x**4 / 4 - 2 * x**3 / 3 + x**2 / 2)

    a, of_a = problem(lambda x, s: x**2 / (6 * lr), saddle, lambda x, s: (x - 3) ** 2 / (2 * lr))
    b, of_b = problem(lambda x, s: (x + 0.5) ** 2, lambda x, s: (x - 0.5) ** 2)
    congruent = [lambda x, s: 0.5 * (x - 1) ** 2, lambda x, s: 0.5 * (x - 1) ** 2 + 3 * s * x]
    c, of_c = problem(*congruent, lambda x, s: 0.5 * (x + 2) ** 2)
    myopic = methods.myopic_clustering(a, step, num_clusters=2, radius=0.01 / lr, **start(1.5))
    ifca = partial(methods.ifca, b, step, num_clusters=2, **start(-1.5, 0.0))
    cfl = methods.cfl(c, noisy, eps_1=jnp.inf, eps_2=1e-6, max_clusters=2, **start(0.0))
    fc = partial(methods.federated_clustering, threshold_rounds=30)
    a, b = fc(a, step, radius=0.9 / lr, **start(1.5)), fc(b, step, radius=1.5, **start(0.0))
    c = fc(c, noisy, radius=1.5, **start(0.0))
    stays, half = "(0, 0) in all rounds", "(1, -1/2, -1/2) in half of the runs"
    runs_of_b = {"ifca, option I": (ifca(average="gradients"), stays), "ifca, option II": (ifca(), stays)}
    runs = {
        "myopic": {"myopic_clustering": (myopic, "(0, 1, 3)"), "federated_clustering": (a, "(0, 0, 3)")},
        "ifca": runs_of_b | {"federated_clustering": (b, "(-1/2, 1/2)")},
        "cfl": {"cfl": (cfl, half), "federated_clustering": (c, "(1, 1, -2) in the mean")},
    }
    clients = {"myopic": of_a, "ifca": of_b, "cfl": of_c}
    optima = {"myopic": [0.0, 0.0, 3.0], "ifca": [-0.5, 0.5], "cfl": [1.0, 1.0, -2.0]}
    return {name: Failure(clients[name], np.array(optima[name]), runs[name]) for name in runs}


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


@recipe("federated_clustering.failures", full={"rounds": 1000, "seeds": 1000}, small={"seeds": 200})
def failures(bench: Bench, setting: dict[str, Any]) -> Outcome:
    """FC, figure 1: where Myopic-Clustering, IFCA and CFL go wrong, and Federated-Clustering does not.

    A row of panels for each failure mode: the clients' models by round.
    """
    rows, (figure, grid) = [], report.panels(12, 9, 3, 3, sharex=True)
    for line, (name, mode) in zip(grid, failure_modes(0.1).items(), strict=True):
        for axes in line[len(mode.runs) :]:
            axes.set_axis_off()
        for axes, (label, (algorithm, paper)) in zip(line, mode.runs.items(), strict=False):
            path = paths(algorithm, mode.clients, setting["seeds"], setting["rounds"])
            late = path[:, setting["rounds"] // 2 :].mean(axis=1)  # over rounds too: one client's steps are noisy
            wrong = np.abs(late - mode.optima).max(axis=1) > 0.4
            row = {"failure of": name, "method": label, "optima": _numbers(mode.optima)}
            row |= {"models, mean of runs": _numbers(late.mean(axis=0)), "runs that go wrong": float(wrong.mean())}
            rows.append(row | {"paper": paper})
            for i, optimum in enumerate(mode.optima):
                (model,) = axes.plot(path[0, :, i], lw=1, label=f"client {i + 1}")
                axes.axhline(optimum, color=model.get_color(), lw=1, ls=":")
            report.label_axes(axes, 7, title=f"{name}: {label}")
        line[0].set_ylabel("model")
    return Outcome(rows, figure, "dotted: the minimum of each client's true cluster")


def _numbers(values: np.ndarray) -> str:
    return "(" + ", ".join(f"{v + 0.0:.2f}" for v in np.round(values, 2)) + ")"
