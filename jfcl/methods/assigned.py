"""Clusters that the server assigns in a round: clients are embedded, a rule assigns them, FedAvg runs in each cluster.

CLoVE and the methods like it are this round with an embedding and a rule of their own. Where the rule runs once, before
the first round, it is `clustered_once` in `jfcl.methods.once`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jfcl.core import Algorithm, Batch, Clients, Cohort, PyTree, Task, trained_part
from jfcl.mapping.columns import on_every_device
from jfcl.methods import averaging as inner
from jfcl.methods import round as phases
from jfcl.methods.averaging import Averaging, AveragingState
from jfcl.methods.ifca import LowestLoss
from jfcl.robust.aggregate import ravel_clients
from jfcl.training import local
from jfcl.training.losses import indexable

UNSEEN = 0  # `unchanged` of clients that have not taken part yet, as of padding in a checkpoint; others begin at 1


class Assignment(NamedTuple):
    """What the server decides before the clients of a cohort train.

    Attributes:
      cluster: `[C]` int32, the model that each client trains.
      memory: the method's next `AveragingState.memory`.
      begin: `(params, server)`, from which the models and their server optimisers start; None: those of the state.
      assigned: `[C]` bool, clients that do not count as new any more; default: those with examples.
      bytes_up, bytes_down, steps: `[]` or `[C]`, of each client, besides those of FedAvg.
      metrics: of the method.
    """

    cluster: jax.Array
    memory: PyTree = ()
    begin: tuple[PyTree, PyTree] | None = None
    assigned: jax.Array | None = None
    bytes_up: Any = 0.0
    bytes_down: Any = 0.0
    steps: Any = 0.0
    metrics: Mapping[str, jax.Array] = MappingProxyType({})


Assign = Callable[[Cohort, AveragingState], Assignment]


def assigned(
    rules: Averaging, assign: Assign, *, remember: Callable[[jax.Array, Clients, AveragingState], Any] | None = None
) -> Algorithm:
    """Builds an `Algorithm` of this round, for authors of methods.

    `assign` embeds the clients of a cohort, by `embedded`, and assigns them to clusters, inside which FedAvg has these
    rules. `remember` is `(key, clients, state) -> state` with the first `memory`, before the first round. Metrics are
    those of `averaging` and of `assign`. A client that has not taken part is served the model of lowest loss.
    """
    rules = inner.checked(rules)

    def init(key: jax.Array, clients: Clients) -> AveragingState:
        state = inner.init(rules, key, clients)
        return state if remember is None else remember(key, clients, state)

    serve = ServeAssigned(LowestLoss(rules.task, rules.num_clusters, rules.client_axis))
    return Algorithm(init, partial(step, rules, assign), rules.task, serve=serve)


def step(rules: Averaging, assign: Assign, key: jax.Array, state: AveragingState, clients: Clients):
    """Returns `(state, metrics)` after one round; a client with the cluster -1 changes no model."""
    # Assign the clients of the cohort, which is that of the FedAvg round below, by the same key.
    cohort = phases.select_cohort(key, clients, rules.cohort)
    real = jnp.asarray(cohort.clients.size) > 0
    assignment = assign(cohort, state)
    last, before = phases.take_rows(cohort, (state.cluster, state.unchanged))
    unchanged = jnp.where(assignment.cluster == last, before + 1, jnp.ones_like(before))
    counted = real if assignment.assigned is None else real & assignment.assigned
    after = assignment.cluster, jnp.where(counted, unchanged, before)
    cluster, unchanged = phases.put_rows(cohort, (state.cluster, state.unchanged), after)
    params, server = assignment.begin or (state.params, state.server)

    # Run FedAvg inside the clusters.
    state = state._replace(params=params, server=server, cluster=cluster, memory=assignment.memory)
    state, metrics = inner.step(rules, key, state, clients)

    # Add the costs of the embedding.
    present = real.astype(jnp.float32)
    costs = {"bytes_up": assignment.bytes_up, "bytes_down": assignment.bytes_down, "client_steps": assignment.steps}
    metrics |= {name: metrics[name] + (present * cost).sum() for name, cost in costs.items()}
    return state._replace(unchanged=unchanged), metrics | dict(assignment.metrics)


def embedded(rules: Averaging, client: Callable[..., PyTree], cohort: Cohort, *rows: PyTree) -> PyTree:
    """Returns what the clients of a cohort send to be assigned, a copy on every device: the server's work is small.

    `client` is `(key, examples, size, *rows)`, with the key of the client's training in the round.
    """
    return on_every_device(rules.client_axis, phases.train_clients(rules.client_axis, client, cohort, *rows))


def embedded_again(
    rules: Averaging, client: Callable[..., PyTree], cohort: Cohort, due: jax.Array, old: PyTree, *rows: PyTree
) -> PyTree:
    """Returns the result of `embedded` for the clients that are `due` `[C]` bool, and `old` `[C, ...]` for others."""

    def one(key, examples, size, due, old, *rows):
        return jax.lax.cond(due, lambda: client(key, examples, size, *rows), lambda: old)

    return jax.lax.cond(due.any(), lambda: embedded(rules, one, cohort, due, old, *rows), lambda: old)


def update_of(
    task: Task, training: local.LocalTraining, key: jax.Array, start: PyTree, examples: Batch, size: jax.Array
) -> jax.Array:
    """Returns the update `[D]` of one client that trains once from the model `start`."""
    start = indexable(start)
    trained = local.train(task, training, key, start, examples, size, (), jnp.zeros((), jnp.int32))
    update = jax.tree.map(lambda a, b: (a - b)[None], trained.params, start)
    return ravel_clients(trained_part(task, update))[0]


@dataclass(frozen=True)  # equal ones share programs; a tuple would equal those of other classes
class ServeAssigned:
    """`Algorithm.serve` of these methods: a client's cluster, or the model of lowest loss before its first round."""

    lowest: LowestLoss

    def __call__(self, state: AveragingState, clients: Clients | None):
        """Returns the models of the clusters, and the clients' personal parameters."""
        served, new = self.lowest(state, None), state.unchanged == UNSEEN
        if clients is None:
            return served
        return served._replace(to=phases.known_or_fitted(new, lambda: self.lowest(state, clients).to, state.cluster))
