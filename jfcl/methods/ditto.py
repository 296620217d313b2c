"""Ditto (Li, Hu, Beirami, Smith 2021): personal models held near a global one."""

from typing import Annotated, Unpack

import jax
import jax.numpy as jnp

from jfcl.core import Algorithm, Clients, Task, num_clients
from jfcl.core.options import Interval, Real, Search
from jfcl.methods.averaging import Averaging
from jfcl.methods.fedavg import fedavg
from jfcl.methods.options import AVERAGING, Options, factory
from jfcl.methods.personal import PersonalState, initial_state, next_personal, serve_personal, train_personal
from jfcl.methods.round import loss_of_all, select_cohort, take_rows
from jfcl.training import local


@factory(*AVERAGING)
def ditto(
    task: Task,
    training: local.LocalTraining,
    *,
    lam: Annotated[Real, Interval("[0, inf)"), Search(0.03, 10.0)] = 1.0,
    **options: Unpack[Options],
) -> Algorithm:
    """Trains a global model `w` by FedAvg, and each client's own `v_i` on `f_i(v) + λ/2 ‖v − w‖²`.

    FedAvg weighs clients by size. The authors' code draws larger clients into the cohort more often in its place, and
    gives all equal weights (`weights="equal"`, with a cohort drawn uniformly here).

    Args:
      task: as in `jfcl.fedavg`.
      training: of both models; a proximal term in it is that of the global model.
      lam: `λ`, the strength of the pull to the global model, 0 or more: 0 is local training, infinity would be FedAvg.
        `w` is the global model that the round began with (Algorithm 1 of the paper).

    Returns:
      `Algorithm` with a `PersonalState`, whose `common` is FedAvg's state with the global model. An adversary attacks
      updates of the global model; personal models are not sent. A client outside the cohort keeps its personal model.
      Cost of a round: twice that of FedAvg, also in `client_steps`, those of both models; memory `O(N D)`. Bytes: as
      FedAvg. `nonfinite` is the larger of two numbers: clients with such an update, and with such a personal model.

    Raises:
      ValueError: `λ < 0`, and as in `jfcl.fedavg`.

    Example:
      >>> import jax, jfcl, numpy as np, optax
      >>> task = jfcl.models.task(lambda _: {"b": jax.numpy.zeros(())}, lambda p, x: x + p["b"], kind="regression")
      >>> y = np.repeat(np.float32([1, 5]), 3).reshape(2, 3)
      >>> clients = jfcl.Clients({"x": np.zeros((2, 3), np.float32), "y": y}, np.full(2, 3, np.int32))
      >>> algorithm = jfcl.ditto(task, jfcl.local_training(optax.sgd(0.1), num_steps=20), lam=2.0)
      >>> state, _ = jfcl.rollout(algorithm, clients, key=jax.random.key(0), num_rounds=5)
      >>> np.round(state.params["b"], 2).tolist(), np.round(state.common.params["b"], 2).tolist()  # halfway
      ([2.0, 4.0], [3.0])
    """
    common, rules = fedavg(task, training, **options), Averaging(task, training, 1, **options)

    def init(key: jax.Array, clients: Clients) -> PersonalState:
        state = common.init(key, clients)
        model = jax.tree.map(lambda p: p[0], state.params)
        return initial_state(task, training, key, clients, model)._replace(common=state)

    def step(key: jax.Array, state: PersonalState, clients: Clients):
        global_model = jax.tree.map(lambda p: p[0], state.common.params)

        # The cohort of FedAvg: both models are trained on the same batches.
        cohort = select_cohort(key, clients, rules.cohort)
        trained, finite = train_personal(rules, cohort, state, pull=lambda _: (global_model, lam))
        common_state, metrics = common.step(key, state.common, clients)
        present = take_rows(cohort, ~jnp.isnan(metrics["loss"]))  # NaN for absent clients alone
        new = next_personal(cohort, state, trained, present & finite)._replace(common=common_state)
        loss = jnp.where(present, jnp.where(jnp.isnan(trained.loss), jnp.inf, trained.loss), jnp.nan)
        metrics |= {
            "loss": loss_of_all(cohort, loss, num_clients(clients)),
            "client_steps": 2 * metrics["client_steps"],
            "nonfinite": jnp.maximum(metrics["nonfinite"], (present & ~finite).sum().astype(jnp.int32)),
        }
        return new, metrics

    return Algorithm(init, step, task, serve=serve_personal)
