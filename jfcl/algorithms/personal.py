"""The state of methods with one model per client, and its initial value."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jfcl.algorithms.round import initial_models, initial_optimizers
from jfcl.client.local import LocalTraining
from jfcl.core import Clients, PyTree, Task, num_clients


class PersonalState(NamedTuple):
    """The state of methods with one model per client.

    Attributes:
      params: pytree of `[N, ...]`: client `i`'s model is row `i`.
      cluster: `[N]` int32, `0 .. N-1`.
      round: `[]` int32, rounds done.
      client: the clients' optimiser states `[N, ...]` under `keep="everything"`, else `()`.
    """

    params: PyTree
    cluster: jax.Array
    round: jax.Array
    client: PyTree


def initial_state(
    task: Task, training: LocalTraining, key: jax.Array, clients: Clients, init_params: PyTree | None
) -> PersonalState:
    """Returns the initial state: one random model for all clients, or `init_params`, one model or `N` stacked."""
    n = num_clients(clients)
    if init_params is None:
        one = initial_models(task, key, 1, None)
        params = jax.tree.map(lambda p: jnp.broadcast_to(p, (n, *p.shape[1:])), one)
    else:
        params = initial_models(task, key, n, init_params)
    every = jnp.arange(n, dtype=jnp.int32)
    return PersonalState(params, every, jnp.zeros((), jnp.int32), initial_optimizers(training, params, clients))
