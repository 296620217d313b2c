"""The failure modes of section 2.1 of Federated-Clustering (Werner et al. 2023), figure 1: models of one number."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jfcl import methods
from jfcl.core import Algorithm, Clients, Task
from jfcl.training.local import local_training


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

    def saddle(x, s):
        return 4 / (3 * lr) * (x**4 / 4 - 2 * x**3 / 3 + x**2 / 2)

    def noisy(x, s):
        return 0.5 * (x - 1) ** 2 + 3 * s * x

    losses, optima = {
        "myopic": ([lambda x, s: x**2 / (6 * lr), saddle, lambda x, s: (x - 3) ** 2 / (2 * lr)], [0.0, 0.0, 3.0]),
        "ifca": ([lambda x, s: (x + 0.5) ** 2, lambda x, s: (x - 0.5) ** 2], [-0.5, 0.5]),
        "cfl": ([lambda x, s: 0.5 * (x - 1) ** 2, noisy, lambda x, s: 0.5 * (x + 2) ** 2], [1.0, 1.0, -2.0]),
    }[name]

    def cost(outputs, batch):
        return jax.vmap(lambda kind, *at: jax.lax.switch(kind, losses, *at))(batch["y"], outputs, batch["x"])

    n = len(losses)
    kinds = np.repeat(np.arange(n, dtype=np.int32)[:, None], 2, axis=1)
    signs = np.tile(np.float32([1, -1]), (n, 1))
    clients = Clients({"x": signs, "y": kinds}, np.full(n, 2, np.int32))
    task = Task(lambda key: {"x": jnp.zeros(())}, lambda params, x: params["x"] + 0 * x, cost)
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
    step, noisy = (local_training(optax.sgd(lr), num_steps=1, batch_size=batch) for batch in (None, 1))

    def start(*values):
        return {"init_params": {"x": np.squeeze(np.float32(values))}}

    a, b, c = (failure(name, lr).task for name in ("myopic", "ifca", "cfl"))
    myopic = methods.myopic_clustering(a, step, num_clusters=2, radius=0.01 / lr, **start(1.5))
    ifca = partial(methods.ifca, b, step, num_clusters=2, **start(-1.5, 0.0))
    cfl = methods.cfl(c, noisy, eps_1=jnp.inf, eps_2=1e-6, max_clusters=2, **start(0.0))
    fc = partial(methods.federated_clustering, threshold_rounds=30)
    of_a, of_b = fc(a, step, radius=0.9 / lr, **start(1.5)), fc(b, step, radius=1.5, **start(0.0))
    of_c = fc(c, noisy, radius=1.5, **start(0.0))
    return {
        "myopic": [("myopic_clustering", myopic, "(0, 1, 3)"), ("federated_clustering", of_a, "(0, 0, 3)")],
        "ifca": [
            ("ifca, option I", ifca(average="gradients"), "(0, 0) in all rounds"),
            ("ifca, option II", ifca(), "(0, 0) in all rounds"),
            ("federated_clustering", of_b, "(-1/2, 1/2)"),
        ],
        "cfl": [
            ("cfl", cfl, "(1, -1/2, -1/2) in half of the runs"),
            ("federated_clustering", of_c, "(1, 1, -2) in the mean"),
        ],
    }
