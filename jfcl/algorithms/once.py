"""Methods that cluster the clients once, before or after a little training, and then run FedAvg in each cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jfcl import local, mapping
from jfcl.aggregate import num_bytes
from jfcl.algorithms.averaging import averaging
from jfcl.core import Algorithm, Clients, PyTree, Task, check, check_count, num_clients

# (model's bytes, clients) -> for "bytes_up", "bytes_down" and "client_steps": what one client adds, a number or [N]
Costs = Callable[[int, Clients], dict[str, Any]]


def with_first_costs(algorithm: Algorithm, costs: Costs) -> Algorithm:
    """`algorithm` whose first round's metrics also count what its `init` had the clients send and compute.

    The state must count its rounds in `round` `[]` and stack models of one size in `params`.
    """

    def step(key: jax.Array, state, clients: Clients):
        first = (state.round == 0).astype(jnp.float32)
        real = (jnp.asarray(clients.size) > 0).astype(jnp.float32)
        model = num_bytes(jax.tree.map(lambda p: p[0], state.params))
        paid = {name: jnp.asarray(cost).astype(jnp.float32) for name, cost in costs(model, clients).items()}
        state, metrics = algorithm.step(key, state, clients)
        return state, metrics | {name: metrics[name] + (real * cost).sum() * first for name, cost in paid.items()}

    return Algorithm(algorithm.init, step, algorithm.task)


def clustered_once(
    task: Task,
    training: local.LocalTraining,
    find: Callable[[jax.Array, Clients], tuple[PyTree, jax.Array]],
    costs: Costs,
    *,
    num_clusters: int,
    **options: Any,
) -> Algorithm:
    """FedAvg inside the clusters that `find(key, clients) -> (params [K, ...], cluster [N])` finds in `init`.

    Args:
      options: of `averaging`: `weights`, `server_optimizer`, `cohort`, `adversary`, `aggregator`, `client_axis`.
    """
    check_count("num_clusters", num_clusters)
    options["client_axis"] = options.get("client_axis") or mapping.auto()
    inner = averaging(
        task,
        training,
        num_clusters=num_clusters,
        start=lambda params, clients: jnp.zeros(num_clients(clients), jnp.int32),
        **options,
    )

    def init(key: jax.Array, clients: Clients):
        n = num_clients(clients)
        check(num_clusters <= n, "num_clusters", num_clusters, f"at most the {n} clients there are")
        start_key, find_key = jax.random.split(key)
        params, cluster = find(find_key, clients)
        return inner.init(start_key, clients)._replace(params=params, cluster=cluster.astype(jnp.int32))

    return with_first_costs(Algorithm(init, inner.step, task), costs)
