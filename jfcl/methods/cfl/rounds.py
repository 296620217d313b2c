"""One communication round of Clustered Federated Learning, for `cfl` and `byzantine_cfl`.

A round has two sides. The clients train and send updates, hidden if they like (section V-B). The server,
`server.serve`, decides on these updates alone. The clients update the models, as only they can reveal a hidden mean.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from jfcl import mapping
from jfcl.core.checks import check
from jfcl.core.clients import attack_key, check_at_most_clients, client_ids, max_examples, num_clients
from jfcl.core.options import Needs, OneOf, Range
from jfcl.core.parameters import is_finite, joined, num_bytes, path_flags
from jfcl.core.types import Algorithm, Clients, PyTree, Served
from jfcl.kernels import OPERATORS, orthonormal
from jfcl.kernels.base import DENSE_UP_TO, if_rare
from jfcl.methods import round as phases
from jfcl.methods.averaging import Averaging
from jfcl.methods.cfl import server
from jfcl.methods.cfl.entries import ENTRIES
from jfcl.methods.cfl.fallback import in_active_clusters, num_training, undo_harmful_splits
from jfcl.methods.cfl.server import Rules, Sent
from jfcl.methods.cfl.splits import Sides, missed_splits, no_sides
from jfcl.methods.cfl.state import CFLState, LastUpdates, ParameterTree, known_size, no_updates, remember_updates
from jfcl.robust.aggregate import attacked, check_aggregator, clients_check, where_rows
from jfcl.training import losses

SIMILARITIES = ("updates", "gradients")
Privacy = Annotated[str | None, OneOf(OPERATORS)]
PrivacySeed = Annotated[int, Range(0, 2**32 - 1), Needs("privacy")]


class Method(NamedTuple):
    """The arguments of `rounds`: the server's `rules`, and what clients keep from it."""

    rules: Rules
    privacy: str | None
    privacy_seed: int
    validation: float = 0.0
    fallback_rounds: int = 0

    @property
    def common(self) -> Averaging:
        """The model, the training and the common options of methods."""
        return self.rules.common

    def hide(self, update: PyTree) -> PyTree:
        """Returns the message with one client's update."""
        return hide(update, self.privacy, self.privacy_seed)


class TakingPart(NamedTuple):
    """The clients' places in a round, `[N]` each.

    Attributes:
      member: bool, clients with examples that are not excluded.
      examples: int32, a client's examples; of absent clients those that the server remembers.
      present: bool, members that train in this round if they are in the cohort.
      learns: int32, examples to train on.
      missed, pending: of `splits.missed_splits`.
      weight: float32, their weights in means.
    """

    member: jax.Array
    examples: jax.Array
    present: jax.Array
    learns: jax.Array
    missed: jax.Array
    pending: jax.Array
    weight: jax.Array


def rounds(method: Method) -> Algorithm:
    """Builds the `Algorithm` of these rules, and checks the options that all rules share."""
    rules, common = method.rules, method.common
    task, has_shared = common.task, common.shared is not None
    phases.check_scopes(common)
    if common.cohort is not None:
        accepted = 'left out with similarity="gradients": updates are kept, not gradients'
        check(rules.similarity == "updates", "cohort", common.cohort, accepted)
    if method.privacy is not None:
        accepted = "left out where parameters are shared, or statistics are averaged: hidden updates have no parts"
        check(not has_shared and task.statistics is None, "privacy", method.privacy, accepted)
    phases.check_weights(common.weights)
    check(not has_shared or common.aggregator is None, "aggregator", common.aggregator, "left out with shared")
    check_aggregator(common.aggregator)
    common = common._replace(client_axis=mapping.or_auto(common.client_axis))
    method = method._replace(rules=rules._replace(common=common))
    refresh = (lambda state, clients: in_active_clusters(state)) if method.validation else None
    check_clients = clients_check(common.adversary, common.weights)
    return Algorithm(
        partial(init, method),
        partial(step, method),
        task,
        check_clients,
        refresh,
        serve,
        entries=ENTRIES,
        last_updates=None if rules.common.cohort is None else lambda state: state.heard.round,
    )


def serve(state: CFLState, clients: Clients | None) -> Served:
    """Returns the models of the clusters, of which those that were split off are active."""
    return Served(state.params, state.cluster, state.personal, active=state.active, excluded=state.excluded)


def init(method: Method, key: jax.Array, clients: Clients) -> CFLState:
    """Returns the state before the first round: all clients in one cluster."""
    rules, n = method.rules, num_clients(clients)
    capacity = min(8, n) if rules.common.num_clusters is None else rules.common.num_clusters
    check_at_most_clients("max_clusters", capacity, n)
    check_at_most_clients("cohort", rules.common.cohort, n)
    most = max_examples(clients)
    check(rules.min_examples <= most, "min_examples", rules.min_examples, f"at most {most}, the most of a client")
    if rules.true_cluster is not None:
        shape = jnp.shape(rules.true_cluster)
        fits = shape == (n,) or (clients.id is not None and len(shape) == 1 and shape[0] < n)
        check(fits, "true_cluster", shape, f"of shape ({n},)")
        check(n <= DENSE_UP_TO, "true_cluster", f"{n} clients", f"left out beyond {DENSE_UP_TO} clients")
    one = phases.initial_models(method.common.task, key, 1, method.common.init_params)
    params = jax.tree.map(lambda p: jnp.broadcast_to(p, (capacity, *p.shape[1:])), one)
    cluster = jnp.zeros(n, jnp.int32)
    opt_states = phases.initial_optimizers(method.common.task, method.common.training, params, cluster)
    params, own = phases.initial_scopes(method.common.personal, params, cluster)
    sent = jax.eval_shape(method.hide, jax.tree.map(lambda p: p[0], params))
    can_split = capacity > 1
    compared = rules.compared(sent)
    length = min(sum(x.size for x in jax.tree.leaves(compared)), rules.tree_dim) if can_split else 0
    tree = ParameterTree(
        born=jnp.zeros(capacity, jnp.int32),
        cross_similarity=jnp.full(capacity, jnp.inf, jnp.float32),
        model=params,
        side=jnp.zeros((capacity, n), jnp.int8),
        updates=jnp.zeros((capacity, n, length)),
        privacy=jnp.asarray(privacy_code(method.privacy), jnp.int32),
    )
    return CFLState(
        params=params,
        cluster=cluster,
        active=jnp.arange(capacity) == 0,
        parent=jnp.full(capacity, -1, jnp.int32),
        since=jnp.zeros(capacity, jnp.int32),
        final=jnp.zeros(capacity, bool),
        round=jnp.zeros((), jnp.int32),
        scale=jnp.zeros(2),
        excluded=jnp.zeros(n, jnp.int32),
        tree=tree,
        client=opt_states,
        personal=own,
        sides=no_sides(compared, capacity, n, small=rules.min_examples > 1) if can_split else (),
        heard=no_updates(sent, n) if rules.common.cohort is not None else (),
    )


def step(method: Method, key: jax.Array, state: CFLState, clients: Clients):
    """Returns `(state, metrics)` after one round."""
    rules, client_axis, metrics = method.rules, method.common.client_axis, {}

    # Undo splits that harm.
    if method.validation:
        state = in_active_clusters(state)
        judging = method.validation, method.fallback_rounds, shared_flags(rules, state.params), client_axis
        state, metrics["undone"] = undo_harmful_splits(method.common.task, state, clients, *judging)

    # Select the cohort. Clients of size 0 are not on the device, and only remembered.
    part = taking_part(method, state, clients)
    here = part.present & (jnp.asarray(clients.size) > 0)
    cohort = phases.select_cohort(key, clients._replace(size=jnp.where(here, part.learns, 0)), rules.common.cohort)
    kept = here, (state.cluster, part.missed, part.pending), (state.client, state.personal)
    here, place, own = phases.take_rows(cohort, kept)

    # Train it.
    client = train_client(method, state)
    updates, finite, loss, steps, trained = phases.train_clients(client_axis, client, cohort, place, own)
    lies_key, ids = attack_key(cohort.key), client_ids(cohort.clients)
    updates, usable = attacked(method.common.adversary, lies_key, updates, ids, here & finite, place[0])
    opt_states, own = phases.put_rows(cohort, kept[2], where_rows(here & finite, trained, own))

    # Report.
    size = float(num_bytes(jax.eval_shape(lambda u: jax.tree.map(lambda x: x[0], u), updates)))
    up = 2 * size if rules.similarity == "gradients" else size  # clients send their update and their gradient
    metrics |= phases.round_metrics(here, loss, usable, steps, up, size)
    metrics["loss"] = phases.loss_of_all(cohort, metrics["loss"], num_clients(clients))

    # The server decides and averages, without the models.
    sent, last = messages(method, state, part, cohort, updates, here, usable)
    sent = sent._replace(gradients=lambda: gradients(method, state, part, clients, lies_key, usable))
    record = state._replace(params=(), client=(), personal=(), heard=(), tree=state.tree._replace(model=()))
    record, into, means, decided = server.serve(rules, record, sent)

    # Update the models: new clusters start from their parent's, and all move by the mean update.
    means = reveal(means, jax.tree.map(lambda p: p[0], state.params), method.privacy, method.privacy_seed)
    new, metrics["overflowed"] = new_models(state, record, into, means, shared_flags(rules, state.params))
    if isinstance(last, LastUpdates):  # those of clients that have moved belong to other models
        last = last._replace(round=jnp.where(new.cluster != state.cluster, 0, last.round))
    return new._replace(client=opt_states, personal=own, heard=last), metrics | decided


def taking_part(method: Method, state: CFLState, clients: Clients) -> TakingPart:
    """Returns which clients train in this round, and on how many examples."""
    examples = known_size(state.heard, clients.size)
    member = (examples > 0) & (state.excluded == 0)
    missed, pending = missed_splits(state)
    present = member & (~state.final[state.cluster] | pending) if method.rules.recursive else member
    learns = jnp.where(present, num_training(examples, method.validation), 0)
    weight = phases.weights_of(method.common.weights, clients._replace(size=learns))
    return TakingPart(member, examples, present, learns, missed, pending, weight)


def starting_model(state: CFLState, cluster: jax.Array, missed: jax.Array, pending: jax.Array) -> PyTree:
    """Returns one client's model at the start of a round: its cluster's, or that from before a split that it missed."""

    def of_cluster():
        return jax.tree.map(lambda p: p[cluster], state.params)

    if not isinstance(state.sides, Sides):
        return of_cluster()
    return if_rare(pending, lambda: jax.tree.map(lambda p: p[missed], state.tree.model), of_cluster)


def train_client(method: Method, state: CFLState) -> Callable:
    """Returns one client's part of the round, for `train_clients`."""

    def client(key, examples, size, place, kept):
        opt_state, own = kept
        begin, rest = starting_model(state, *place), (examples, size, opt_state, state.round)
        how = method.common.task, method.common.training, method.common.personal_steps
        trained, update, own = phases.train_scopes(*how, key, begin, own, *rest)
        finite = is_finite((update, own))
        return method.hide(update), finite, trained.loss, trained.num_steps, (trained.opt_state, own)

    return client


def gradients(method: Method, state: CFLState, part: TakingPart, clients: Clients, key: jax.Array, usable: jax.Array):
    """Returns the messages with the gradients of all clients `[N, ...]` at the models that they started from."""

    def gradient(examples, size, place, own):
        begin = starting_model(state, *place)
        loss = lambda p: losses.mean_loss(method.common.task, joined(p, own), examples, size)  # noqa: E731
        return method.hide(jax.grad(loss)(begin))

    place = state.cluster, part.missed, part.pending
    found = method.common.client_axis(gradient)(clients.examples, part.learns, place, state.personal)
    key = jax.random.fold_in(key, 1)
    return attacked(method.common.adversary, key, found, client_ids(clients), usable, state.cluster)[0]


def messages(
    method: Method,
    state: CFLState,
    part: TakingPart,
    cohort: phases.Cohort,
    updates: PyTree,
    here: jax.Array,
    usable: jax.Array,
) -> tuple[Sent, PyTree]:
    """Returns the server's input, without gradients, and the last updates of all clients (`()` without a cohort).

    Args:
      method: the arguments.
      state: before the round.
      part: from `taking_part`.
      cohort: of the round.
      updates: pytree of `[C, ...]`.
      here, usable: `[C]` bool, clients that took part, and those with a finite update.
    """
    rows, last = cohort.rows, state.heard
    able = part.member & (part.examples >= method.rules.min_examples)
    if rows is None:
        present, comparable, expected = part.present, usable & ~part.pending, usable
    else:
        counts = ~part.pending[rows]
        last = remember_updates(last, state.round + 1, part.examples, rows, updates, here, usable, counts)
        updates, expected = last.update, ~last.mute
        comparable = (last.round > state.since[state.cluster]) & ~part.pending
        usable, present = (jnp.zeros_like(part.member).at[rows].set(x) for x in (usable, here))
    weight = part.weight * (usable & ~part.pending).astype(jnp.float32)
    of_splits = able, comparable, expected, part.missed, part.pending
    return Sent(updates, usable, present, weight, part.weight, *of_splits, gradients=None), last


def shared_flags(rules: Rules, params: PyTree) -> PyTree:
    """Returns the structure of `params` with a bool for each array: whether it is averaged over all clusters."""
    return path_flags(rules.common.shared or (lambda path: False), params)


def new_models(
    state: CFLState, record: CFLState, into: jax.Array, means: PyTree, is_shared: PyTree
) -> tuple[CFLState, jax.Array]:
    """Puts the models into the server's record after a round: those of clusters, and those before this round's splits.

    Args:
      state: before the round.
      record: after it, without models.
      into: `[K]` int32, the slot of the cluster that each cluster's split made, `K` without one.
      means: pytree of `[K, ...]`, the mean updates.
      is_shared: from `shared_flags`.

    Returns:
      `(state, overflowed [K] bool)`, see `keep_finite`; clusters that overflowed are final.
    """

    def at_splits(models):
        """Returns `models` with those of clusters that are split in the slots of the new clusters."""
        return jax.tree.map(lambda x, p: x.at[into].set(p, mode="drop"), models, state.params)

    before = at_splits(state.params)
    params, overflowed = keep_finite(jax.tree.map(jnp.add, before, means), before, record.active, is_shared)
    # Free slots hold the first model, so that an old one is never the best of all.
    first = jax.tree.map(lambda p: jnp.broadcast_to(p[:1], p.shape), params)
    params = where_rows(record.active, params, first)
    tree = record.tree._replace(model=at_splits(state.tree.model))
    return record._replace(params=params, tree=tree, final=record.final | overflowed), overflowed


def keep_finite(params: PyTree, before: PyTree, active: jax.Array, is_shared: PyTree) -> tuple[PyTree, jax.Array]:
    """Returns `params` `[K, ...]` with a cluster's model `before` the round where the new one has NaN or infinity.

    Shared parameters are new in every cluster: if these are not finite, no cluster has a finite model.

    Returns:
      `(params, overflowed [K] bool)`. Where no active cluster has a finite model all stay as they are, so that the
      simulation ends with its error.
    """
    finite = jax.vmap(is_finite)(params)
    overflowed = active & ~finite & (active & finite).any()
    kept = where_rows(overflowed, before, params)
    return jax.tree.map(lambda shared, new, own: new if shared else own, is_shared, params, kept), overflowed


# Hidden updates (section V-B): clients send their updates through a secret orthonormal operator.


def privacy_code(privacy: str | None) -> int:
    """Returns the value of `ParameterTree.privacy` for an operator's name, or None."""
    return 0 if privacy is None else 1 + list(OPERATORS).index(privacy)


def _operator(privacy: str, seed: int, dim: int):
    """Returns the clients' operator. Its key is independent of all keys of the server."""
    return orthonormal(privacy, jax.random.fold_in(jax.random.key(seed), 0x5EC8E7), dim)


def hide(update: PyTree, privacy: str | None, seed: int) -> PyTree:
    """Returns the message of a client: its update, or one vector `{"hidden": [P]}` where updates are hidden."""
    if privacy is None:
        return update
    flat = ravel_pytree(update)[0]
    return {"hidden": _operator(privacy, seed, len(flat)).apply(flat)}


def reveal(means: PyTree, like: PyTree, privacy: str | None, seed: int) -> PyTree:
    """Returns the mean updates `[K, ...]` behind the server's means of hidden updates; `like` is one model."""
    if privacy is None:
        return means
    flat, unravel = ravel_pytree(like)
    return jax.vmap(unravel)(_operator(privacy, seed, len(flat)).invert(means["hidden"]))
