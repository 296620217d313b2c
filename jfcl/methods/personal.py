"""The state of methods with one model per client, and its initial value."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jfcl.core import Clients, Cohort, PyTree, Served, Task, is_finite, num_clients
from jfcl.methods.averaging import Averaging
from jfcl.methods.round import initial_models, initial_optimizers, put_rows, select_cohort, take_rows, train_clients
from jfcl.robust.aggregate import where_rows
from jfcl.training.local import LocalTraining, Trained, train

Pull = Callable[[PyTree], tuple[PyTree, Any]]  # (row) -> (anchor, strength) of a term strength / 2 ‖w − anchor‖²


class PersonalState(NamedTuple):
    """The state of methods with one model per client.

    Attributes:
      params: pytree of `[N, ...]`: client `i`'s model is row `i`.
      cluster: `[N]` int32, `0 .. N-1`.
      round: `[]` int32, rounds done.
      client: the clients' optimiser states `[N, ...]` under `keep="everything"`, else `()`.
      share: `[N, K]`, what FedSoft estimates of the clients' clusters, else `()`.
      common: the models that clients have in common besides, in a state of their own or `[K, ...]`; else `()`.
    """

    params: PyTree
    cluster: jax.Array
    round: jax.Array
    client: PyTree = ()
    share: jax.Array | tuple[()] = ()
    common: PyTree = ()


def serve_personal(state: Any, clients: Clients | None = None) -> Served:
    """Returns each client's own model, of a state with `params` `[N, ...]`."""
    return Served(state.params, None)


def initial_state(
    task: Task, training: LocalTraining, key: jax.Array, clients: Clients, init_params: PyTree | None
) -> PersonalState:
    """Returns the initial state: one random model for all clients, or `init_params`, one model or `N` stacked."""
    n = num_clients(clients)
    if init_params is None:
        model = initial_models(task, key, 1, None)
        params = jax.tree.map(lambda p: jnp.broadcast_to(p, (n, *p.shape[1:])), model)
    else:
        params = initial_models(task, key, n, init_params)
    every = jnp.arange(n, dtype=jnp.int32)
    return PersonalState(params, every, jnp.zeros((), jnp.int32), initial_optimizers(task, training, params, None))


def train_alone(rules: Averaging, key: jax.Array, state: Any, clients: Clients) -> tuple[Any, Trained, jax.Array]:
    """Does one round of local training of all clients, without any communication.

    Returns:
      `(state, trained [N, ...], usable [N] bool)`: `usable` are the clients with examples and a finite model, the
      others keep the one they had.
    """
    cohort = select_cohort(key, clients)
    trained, finite = train_personal(rules, cohort, state)
    usable = finite & (jnp.asarray(clients.size) > 0)
    return next_personal(cohort, state, trained, usable), trained, usable


def train_personal(
    rules: Averaging, cohort: Cohort, state: Any, pull: Pull | None = None, rows: PyTree = None
) -> tuple[Trained, jax.Array]:
    """Trains the cohort's own models, and returns `(Trained of [C, ...], finite [C] bool)`.

    `state` has `params` and `client` `[N, ...]`, and `round`. `pull` is that of the client's own proximal term in place
    of that of the training, and takes its row of `rows` `[N, ...]`.
    """

    def client(key, examples, size, params, opt_state, row):
        anchor, strength = (None, rules.training.prox) if pull is None else pull(row)
        training = rules.training._replace(prox=strength)
        trained = train(rules.task, training, key, params, examples, size, opt_state, state.round, anchor=anchor)
        return trained, is_finite(trained.params)

    return train_clients(rules.client_axis, client, cohort, *take_rows(cohort, (state.params, state.client, rows)))


def next_personal(cohort: Cohort, state: Any, trained: Trained, keep: jax.Array) -> Any:
    """Returns `state` after a round: with the trained models and optimisers of the clients to `keep`, `[C]` bool."""
    before = state.params, state.client
    after = where_rows(keep, (trained.params, trained.opt_state), take_rows(cohort, before))
    params, client = put_rows(cohort, before, after)
    return state._replace(params=params, round=state.round + 1, client=client)
