"""A linear model, clients of several truths, and gradient descent on their losses in NumPy, which many files share."""

import jax
import numpy as np

from jfcl.core import Clients, Task

RATE = 0.1  # of `descend`


def linear(dim: int) -> Task:
    """Half of the squared error of `x @ w`."""
    return Task(
        init=lambda key: {"w": jax.random.normal(key, (dim,))},
        apply=lambda p, x: x @ p["w"],
        cost=lambda outputs, batch: 0.5 * (outputs - batch["y"]) ** 2,
    )


def linear_clients(truth, seed, n, m, least, spread=0.0) -> Clients:
    """`n` clients of `least` to `m` examples: the rows of `truth` in turn, and `spread` about them."""
    rng = np.random.default_rng(seed)
    size = rng.integers(least, m + 1, n).astype(np.int32)
    x = rng.normal(size=(n, m, truth.shape[1])).astype(np.float32)
    own = truth[np.arange(n) % len(truth)] + spread * rng.normal(size=(n, truth.shape[1]))
    return Clients({"x": x, "y": np.einsum("nmd,nd->nm", x, own).astype(np.float32)}, size)


def examples_of(clients, i):
    """The inputs and targets of client `i` in float64, without padding."""
    return (np.asarray(clients.examples[name][i, : int(clients.size[i])], np.float64) for name in "xy")


def gradient64(w, clients, i):
    x, y = examples_of(clients, i)
    return x.T @ (x @ w - y) / len(y)


def loss64(w, clients, i):
    x, y = examples_of(clients, i)
    return 0.5 * np.mean((x @ w - y) ** 2)


def trained(w, clients, i, steps, pull=0.0, near=0.0):
    """`w` after full-batch steps of client `i`, pulled to `near`; and the mean of its losses before the steps."""
    losses = []
    for _ in range(steps):
        losses.append(loss64(w, clients, i))
        w = w - RATE * (gradient64(w, clients, i) + pull * (w - near))
    return w, np.mean(losses)


def descend(*args):
    return trained(*args)[0]
