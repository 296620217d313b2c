"""A method whose models stay as they begin: for tests of what surrounds the training, since it compiles quickly."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jfcl.core import Algorithm, Task


class Still(NamedTuple):
    """The models `[K, ...]`, the model of each client `[N]`, and the number of rounds."""

    params: Any
    cluster: jax.Array
    round: jax.Array


def still(task: Task, start: Callable[[jax.Array], Any], loss: Callable[[jax.Array], Any] = lambda t: 1.0) -> Algorithm:
    """Returns the method with the models `start(key)`; `loss(t)` is the training loss of all clients in round `t`."""

    def init(key, clients):
        models, n = start(key), len(clients.size)
        return Still(models, jnp.arange(n, dtype=jnp.int32) % len(jax.tree.leaves(models)[0]), jnp.int32(0))

    def step(key, state, clients):
        t, n = state.round + 1, len(clients.size)
        costs = dict.fromkeys(("bytes_up", "bytes_down", "client_steps"), jnp.float32(n))
        return state._replace(round=t), {"loss": jnp.full(n, loss(t), jnp.float32)} | costs

    return Algorithm(init, step, task)
