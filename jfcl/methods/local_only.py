"""Local training: every client trains alone, without any communication; the baseline of federated methods."""

from typing import Unpack

import jax
import jax.numpy as jnp

from jfcl.core import Algorithm, Clients, Task
from jfcl.methods.averaging import Averaging
from jfcl.methods.options import Options, factory
from jfcl.methods.personal import PersonalState, initial_state, serve_personal, train_alone
from jfcl.methods.round import round_metrics
from jfcl.training import local


@factory("init_params", "client_axis")
def local_only(task: Task, training: local.LocalTraining, **options: Unpack[Options]) -> Algorithm:
    """Trains a model for each client alone; a round is one local training of each, from the result of the last.

    Args:
      task, training: as in `jfcl.fedavg`.
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
    rules = Averaging(task, training, 1, **options)

    def init(key: jax.Array, clients: Clients) -> PersonalState:
        return initial_state(task, training, key, clients, options["init_params"])

    def step(key: jax.Array, state: PersonalState, clients: Clients):
        state, trained, usable = train_alone(rules, key, state, clients)
        present = jnp.asarray(clients.size) > 0
        return state, round_metrics(present, trained.loss, usable, trained.num_steps, 0, 0)

    return Algorithm(init, step, task, serve=serve_personal)
