"""Local training: every client on its own, nothing sent; what federation has to beat."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jfcl.algorithms.aggregate import where_rows
from jfcl.algorithms.averaging import round_metrics
from jfcl.algorithms.personal import PersonalState, initial_state
from jfcl.client import local
from jfcl.core import Algorithm, Clients, PyTree, Task, client_keys, is_finite, max_examples
from jfcl.execution import mapping


def local_only(
    task: Task,
    training: local.LocalTraining,
    *,
    init_params: PyTree | None = None,
    client_axis: mapping.Mapping | None = None,
) -> Algorithm:
    """Client `i` trains model `i`; a round is one local training of each, from where the last one ended.

    Args:
      task, training, client_axis: as in `jfcl.fedavg`.
      init_params: one model that all start from, or `N` stacked; default: one random model for all.

    Returns:
      `Algorithm` with a `PersonalState`. Cost of a round: `N` local trainings; memory `O(N D)`.

    Example:
      >>> import jax, jfcl, numpy as np, optax
      >>> task = jfcl.models.task(lambda key: {"b": jax.numpy.zeros(())}, lambda p, x: x + p["b"], kind="regression")
      >>> clients = jfcl.Clients(
      ...     {"x": np.zeros((2, 4), np.float32), "y": np.float32([[1] * 4, [5] * 4])}, np.full(2, 4, np.int32)
      ... )
      >>> algorithm = jfcl.local_only(task, jfcl.local_training(optax.sgd(0.5), num_steps=1))
      >>> state, metrics = algorithm.step(jax.random.key(1), algorithm.init(jax.random.key(0), clients), clients)
      >>> state.params["b"].tolist(), float(metrics["bytes_up"])
      ([1.0, 5.0], 0.0)
    """
    local.check_parts(task, training)
    client_axis = mapping.auto() if client_axis is None else client_axis

    def init(key: jax.Array, clients: Clients) -> PersonalState:
        return initial_state(task, training, key, clients, init_params)

    def step(key: jax.Array, state: PersonalState, clients: Clients):
        m = max_examples(clients)

        def client(key, params, examples, size, opt_state):
            opt_state = local.optimizer_at(training, params, opt_state, state.round, size, m)
            trained = local.train(task, training, key, params, examples, size, opt_state)
            finite = is_finite(trained.params)
            return trained.params, finite, trained.loss, trained.num_steps, local.carried(training, trained.opt_state)

        size = jnp.asarray(clients.size)
        _, clients_key = jax.random.split(key)  # as in `averaging`: the same clients see the same randomness
        params, finite, loss, steps, opt_states = client_axis(client)(
            client_keys(clients_key, clients), state.params, clients.examples, size, state.client
        )
        real = size > 0
        state = state._replace(
            params=where_rows(finite & real, params, state.params),
            round=state.round + 1,
            client=where_rows(finite & real, opt_states, state.client),
        )
        return state, round_metrics(real, loss, finite, steps, 0, 0)

    return Algorithm(init, step, task)
