"""A method to copy: FedAvg with momentum on the server (FedAvgM, Hsu et al. 2019). One file: its state, its factory."""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from jfcl import mapping
from jfcl.core import Algorithm, Clients, PyTree, Task, client_keys, is_finite, num_bytes
from jfcl.core.options import Interval, Real, check_options
from jfcl.robust.aggregate import cluster_mean
from jfcl.training import local


class ServerMomentumState(NamedTuple):
    """The state of `server_momentum`. Every method has `params` and `cluster`.

    Attributes:
      params: pytree of `[1, ...]`, the model.
      cluster: `[N]` int32, the model of each client: 0.
      velocity: pytree of `[1, ...]`, the server's momentum.
    """

    params: PyTree
    cluster: jax.Array
    velocity: PyTree


def server_momentum(
    task: Task,
    training: local.LocalTraining,
    *,
    beta: Annotated[Real, Interval("[0, 1)")] = 0.9,
    client_axis: mapping.Mapping | None = None,
) -> Algorithm:
    """Trains one model: `v ← β v + mean of the clients' updates`, `w ← w + v`.

    Args:
      task, training, client_axis: as in `jfcl.fedavg`; the clients' optimisers start afresh in every round.
      beta: share of the velocity that is left after a round; 0 is FedAvg.

    Returns:
      `Algorithm` with a `ServerMomentumState`. Cost of a round: `N` local trainings; memory `O(N D)`.

    Raises:
      ValueError: `beta` outside [0, 1).
    """
    # Validate before anything compiles: the options as they are declared, then the rest.
    check_options(server_momentum, locals())
    local.check_parts(task, training)
    client_axis = mapping.auto() if client_axis is None else client_axis

    def init(key: jax.Array, clients: Clients) -> ServerMomentumState:
        params = jax.tree.map(lambda p: p[None], task.init(key))
        cluster = jnp.zeros(clients.size.shape, jnp.int32)
        return ServerMomentumState(params, cluster, jax.tree.map(jnp.zeros_like, params))

    def step(key: jax.Array, state: ServerMomentumState, clients: Clients):
        model = jax.tree.map(lambda p: p[0], state.params)
        size = jnp.asarray(clients.size)

        # Train: written for one client, mapped over all. Keys depend on the clients' ids, not on their rows. The model
        # is an argument, the same for all: devices that divide the clients cannot take it from outside.
        def client(model, key, examples, size):
            optimizer = local.start_optimizer(training, model, jnp.zeros((), jnp.int32))
            trained = local.train(task, training, key, model, examples, size, optimizer)
            update = jax.tree.map(jnp.subtract, trained.params, model)
            return update, is_finite(update), trained.loss

        of_clients = client_axis(client, in_axes=(None, 0, 0, 0))
        updates, finite, loss = of_clients(model, client_keys(key, clients), clients.examples, size)

        # Aggregate: by size; clients without examples and non-finite updates have weight 0.
        mean = cluster_mean(updates, state.cluster, jnp.where(finite, size, 0), 1, client_axis)

        # Server update.
        velocity = jax.tree.map(lambda v, u: beta * v + u, state.velocity, mean)
        params = jax.tree.map(jnp.add, state.params, velocity)

        # Metrics: these three are required; `loss` is NaN for absent clients.
        present = size > 0
        sent = num_bytes(model) * present.sum().astype(jnp.float32)
        metrics = {"loss": jnp.where(present, loss, jnp.nan), "bytes_up": sent, "bytes_down": sent}
        return state._replace(params=params, velocity=velocity), metrics

    return Algorithm(init, step, task)
