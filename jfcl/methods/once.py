"""Methods that cluster the clients once, before or after a little training, and then run FedAvg in each cluster."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jfcl.core import Algorithm, Clients, check, max_examples, num_bytes
from jfcl.methods.averaging import Averaging, averaging, check_enough, state_of
from jfcl.methods.round import rows_in_use
from jfcl.training import local


def labels_of(clients: Clients, why: str) -> jax.Array:
    """Returns the labels `[N, M]` of the examples; raises `ValueError`, which says `why`, unless each has one."""
    y = clients.examples.get("y") if isinstance(clients.examples, dict) else None
    fits = y is not None and jnp.issubdtype(y.dtype, jnp.integer) and y.ndim == 2
    value = "none" if y is None else f"{y.dtype} {y.shape}"
    check(fits, "the labels 'y' of the examples", value, f"an integer for each example: {why}")
    return y


def with_first_costs(
    algorithm: Algorithm,
    training: local.LocalTraining,
    *,
    messages: int,
    rounds: int,
    more_steps: int | None = None,
    cohort: int | None = None,
    sent: Callable[[Any], jax.Array] | None = None,
) -> Algorithm:
    """Returns `algorithm` with the rounds of its `init`, and their communication and computation in its first `step`.

    Args:
      algorithm: its state counts its rounds in `round` `[]` and stacks models of one size in `params`.
      training: the local training of each of these rounds.
      messages: number of models that a client got, and sent.
      rounds: rounds of local training of a client.
      more_steps: its local steps in each of them besides those of `training`; default: none.
      cohort: clients that took part in each; default: all.
      sent: `(state) -> [N]`, or one number for all, the bytes that each client sent besides models.
    """

    def init_costs(state, clients: Clients) -> dict[str, jax.Array]:
        size = jnp.asarray(clients.size)
        present = (size > 0).astype(jnp.float32)
        if cohort is not None:
            present = present * jnp.minimum(cohort / present.sum(), 1.0)
        steps = local.steps_per_round(training, size, max_examples(clients)).astype(jnp.float32) + (more_steps or 0)
        model = float(messages * num_bytes(jax.tree.map(lambda p: p[0], state.params)))  # may exceed int32
        more = 0.0 if sent is None else sent(state)
        costs = {"bytes_up": model + more, "bytes_down": model, "client_steps": rounds * steps}
        return {name: (present * cost).sum() for name, cost in costs.items()}

    def step(key: jax.Array, state, clients: Clients):
        first, costs = (state.round == 0).astype(jnp.float32), init_costs(state, clients)
        state, metrics = algorithm.step(key, state, clients)
        return state, metrics | {name: metrics[name] + first * cost for name, cost in costs.items()}

    return algorithm._replace(step=step, init_costs=init_costs, init_rounds=rounds)


def after_rounds(
    algorithm: Algorithm, start_key: jax.Array, rounds_key: jax.Array, num_rounds: int, clients: Clients
) -> Any:
    """Returns the state of `algorithm` after its first rounds, as a part of the `init` of another method."""

    def one_round(t, state):
        return algorithm.step(jax.random.fold_in(rounds_key, t), state, clients)[0]

    return jax.lax.fori_loop(0, num_rounds, one_round, algorithm.init(start_key, clients))


def clustered_once(
    rules: Averaging,
    find: Callable[[jax.Array, Clients], tuple],
    *,
    further: Callable[[Any, Clients], dict[str, jax.Array]] | None = None,
    **costs: Any,
) -> Algorithm:
    """Returns FedAvg inside the clusters that `find` finds in `init`.

    Args:
      rules: of FedAvg; its `init_params` are for `find`.
      find: `(key, clients) -> (cluster [N], params [K, ...], personal [N, ...])`, as in `AveragingState`, or one model
        `[1, ...]` for all clusters; a fourth result is its `memory`.
      further: `(state, clients) ->` further metrics of a round.
      costs: those of `find`, as in `with_first_costs`.
    """
    inner = averaging(rules._replace(init_params=None))

    def init(key: jax.Array, clients: Clients):
        check_enough(rules, clients)
        cluster, models, *others = find(jax.random.split(key)[1], clients)
        models = jax.tree.map(lambda p: jnp.broadcast_to(p, (rules.num_clusters, *p.shape[1:])), models)
        return state_of(rules, clients, cluster, models, *others)

    def step(key: jax.Array, state, clients: Clients):
        new, metrics = inner.step(key, state, clients)
        return new, metrics if further is None else metrics | further(state, clients)

    return with_first_costs(inner._replace(init=init, step=step), rules.training, **costs)


def clusters_in_use(state: Any, clients: Clients) -> jax.Array:
    """Returns the number of clusters `[]` int32 that have clients with examples."""
    k, real = len(jax.tree.leaves(state.params)[0]), jnp.asarray(clients.size) > 0
    return rows_in_use(state.cluster, real, k).sum().astype(jnp.int32)
