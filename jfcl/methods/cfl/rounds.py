"""One communication round of Clustered Federated Learning, for `cfl` and `byzantine_cfl`.

A round has two sides. The clients train and send updates, hidden if they like (section V-B). The server,
`server.serve`, decides on these updates alone. The clients update the models, as only they can reveal a hidden mean.
"""

from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from jfcl.core.checks import check
from jfcl.core.clients import attack_key, check_at_most_clients, client_ids, num_clients, server_key
from jfcl.core.options import Needs, OneOf, Range
from jfcl.core.parameters import is_finite, joined, num_bytes, path_flags
from jfcl.core.types import Algorithm, Clients, Entries, PyTree, Served
from jfcl.kernels import OPERATORS, orthonormal
from jfcl.kernels.base import DENSE_UP_TO, if_rare
from jfcl.methods import round as phases
from jfcl.methods.averaging import checked
from jfcl.methods.cfl import server, splits
from jfcl.methods.cfl.server import Rules, Sent
from jfcl.methods.cfl.state import CFLState, ParameterTree, known_size, no_updates, remember_updates
from jfcl.robust.aggregate import attacked, of_round, where_rows
from jfcl.training import losses

SIMILARITIES = ("updates", "gradients")
Privacy = Annotated[str | None, OneOf(OPERATORS)]
PrivacySeed = Annotated[int, Range(0, 2**32 - 1), Needs("privacy")]
FEW_ROUNDS = 10  # fewer are too few for a conclusion
NEVER = 1e-20  # an eps_1 below this is meant to prevent splits


def rounds(rules: Rules) -> Algorithm:
    """Checks the options that both variants share, and builds the `Algorithm` of these rules."""
    common, task = rules.common, rules.common.task
    if common.cohort is not None:
        accepted = 'left out with similarity="gradients": updates are kept, not gradients'
        check(rules.similarity == "updates", "cohort", common.cohort, accepted)
    if rules.privacy is not None:
        accepted = "left out where parameters are shared, or statistics are averaged: hidden updates have no parts"
        check(common.shared is None and task.statistics is None, "privacy", rules.privacy, accepted)
    rules = rules._replace(common=checked(common))
    algorithm = Algorithm(partial(init, rules), partial(step, rules), task, serve=serve, entries=ENTRIES)
    if rules.validation:
        algorithm = algorithm._replace(refresh=lambda state, clients: splits.in_active_clusters(state))
    return algorithm if common.cohort is None else algorithm._replace(last_updates=lambda state: state.heard.round)


def serve(state: CFLState, clients: Clients | None) -> Served:
    """Returns the models of the clusters; those of clusters that exist are active."""
    return Served(state.params, state.cluster, state.personal, active=state.active, excluded=state.excluded)


def init(rules: Rules, key: jax.Array, clients: Clients) -> CFLState:
    """Returns the state before the first round: all clients in one cluster."""
    common, n = rules.common, num_clients(clients)
    capacity = 8 if common.num_clusters is None else common.num_clusters
    check_at_most_clients("max_clusters", common.num_clusters, n)
    check_at_most_clients("cohort", common.cohort, n)
    if rules.true_cluster is not None:
        shape = jnp.shape(rules.true_cluster)
        fits = shape == (n,) or (clients.id is not None and len(shape) == 1)
        check(fits, "true_cluster", shape, f"of shape ({n},)")
        check(n <= DENSE_UP_TO, "true_cluster", f"{n} clients", f"left out beyond {DENSE_UP_TO} clients")
    model = phases.initial_models(common.task, key, 1, common.init_params)
    params = jax.tree.map(lambda p: jnp.broadcast_to(p, (capacity, *p.shape[1:])), model)
    cluster = jnp.zeros(n, jnp.int32)
    opt_states = phases.initial_optimizers(common.task, common.training, params, cluster)
    params, personal = phases.initial_scopes(common.personal, params, cluster)
    sent = jax.eval_shape(lambda p: hide(jax.tree.map(lambda x: x[0], p), rules.privacy, rules.privacy_seed), params)
    vector, can_split = rules.to_compare(sent), capacity > 1
    length = min(sum(x.size for x in jax.tree.leaves(vector)), rules.tree_dim) if can_split else 0
    tree = ParameterTree(
        born=jnp.zeros(capacity, jnp.int32),
        cross_similarity=jnp.full(capacity, jnp.inf, jnp.float32),
        model=params,
        side=jnp.zeros((capacity, n), jnp.int8),
        updates=jnp.zeros((capacity, n, length)),
        privacy=jnp.asarray([None, *OPERATORS].index(rules.privacy), jnp.int32),
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
        personal=personal,
        sides=splits.no_sides(vector, capacity, n, small=rules.min_examples > 1) if can_split else (),
        heard=() if common.cohort is None else no_updates(sent, n),
    )


def step(rules: Rules, key: jax.Array, state: CFLState, clients: Clients):
    """Returns `(state, metrics)` after one round."""
    common, client_axis, metrics = rules.common, rules.common.client_axis, {}
    if rules.true_cluster is not None:  # by the clients' ids; those of padding clients may lie beyond it
        rules = rules._replace(true_cluster=jnp.asarray(rules.true_cluster)[client_ids(clients)])
    is_shared = path_flags(common.shared or (lambda path: False), state.params)

    # Undo splits that harm.
    if rules.validation:
        state, metrics["undone"] = splits.undo_harmful_splits(rules, state, clients, is_shared)

    # Select the cohort. Clients of size 0 are not on the device, and only remembered.
    examples, (missed, pending) = known_size(state.heard, clients.size), splits.missed_splits(state)
    member = (examples > 0) & (state.excluded == 0)
    present = member & (~state.final[state.cluster] | pending) if rules.recursive else member
    learns = jnp.where(present, splits.num_training(examples, rules.validation), 0)
    weight = phases.weights_of(common.weights, clients._replace(size=learns))
    here = present & (jnp.asarray(clients.size) > 0)
    cohort = phases.select_cohort(key, clients._replace(size=jnp.where(here, learns, 0)), common.cohort)
    place, before = (state.cluster, missed, pending), (state.client, state.personal)
    here, of_cohort, local_state = phases.take_rows(cohort, (here, place, before))

    # Train it.
    def train(key, examples, size, place, local_state):
        opt_state, personal = local_state
        data = starting_model(state, *place), personal, examples, size, opt_state, state.round
        trained, update, personal = phases.train_scopes(common, key, *data)
        finite, message = is_finite((update, personal)), hide(update, rules.privacy, rules.privacy_seed)
        return message, finite, trained.loss, trained.num_steps, (trained.opt_state, personal)

    trained = phases.train_clients(client_axis, train, cohort, of_cohort, local_state)
    updates, finite, loss, steps, after = trained
    lies_key, ids = attack_key(cohort.key), client_ids(cohort.clients)
    updates, usable = attacked(common.adversary, lies_key, updates, ids, here & finite, of_cohort[0])
    opt_states, personal = phases.put_rows(cohort, before, where_rows(here & finite, after, local_state))

    # Report.
    size = float(num_bytes(jax.eval_shape(lambda u: jax.tree.map(lambda x: x[0], u), updates)))
    sends = 1 + (rules.similarity == "gradients")  # clients send their update and their gradient
    metrics |= phases.round_metrics(here, loss, usable, steps + sends - 1, sends * size, size)
    metrics["loss"] = phases.loss_of_all(cohort, metrics["loss"], num_clients(clients))

    # What the server knows: these updates, and with a cohort the last ones of the other clients.
    last, gradients_of = state.heard, partial(gradients, rules, state, place, learns, clients, lies_key, usable)
    if cohort.rows is None:
        comparable, expected = usable & ~pending, usable
    else:
        when = jnp.where(of_cohort[2], 0, state.round + 1)
        last = remember_updates(last._replace(size=examples), cohort, updates, when, here, usable)
        updates, expected = last.update, ~last.mute
        comparable = (last.round > state.since[state.cluster]) & ~pending
        usable, present = (jnp.zeros_like(member).at[cohort.rows].set(x) for x in (usable, here))
    counts = weight * (usable & ~pending).astype(jnp.float32)
    able = member & (examples >= rules.min_examples)
    known = able, comparable, expected, missed, pending
    sent = Sent(updates, usable, present, counts, weight, *known, gradients_of, client_ids(clients))

    # The server decides and averages, without the models.
    if common.aggregator is not None:
        aggregator = of_round(common.aggregator, server_key(cohort.key))
        rules = rules._replace(common=common._replace(aggregator=aggregator))
    record = state._replace(params=(), client=(), personal=(), heard=(), tree=state.tree._replace(model=()))
    record, into, means, decided = server.serve(rules, record, sent)

    # Update the models: new clusters start from their parent's, and all move by the mean update.
    model = jax.tree.map(lambda p: p[0], state.params)
    means = reveal(means, model, rules.privacy, rules.privacy_seed)
    new, overflowed = new_models(state, record, into, means, is_shared)
    if len(state.active) > 1:  # without another cluster none goes on
        metrics["overflowed"] = overflowed
    if common.cohort is not None:  # the updates of clients that have moved belong to other models
        last = last._replace(round=jnp.where(new.cluster != state.cluster, 0, last.round))
    return new._replace(client=opt_states, personal=personal, heard=last), metrics | decided


def starting_model(state: CFLState, cluster: jax.Array, missed: jax.Array, pending: jax.Array) -> PyTree:
    """Returns one client's model at the start of a round: its cluster's, or that from before a split that it missed."""

    def of_cluster():
        return jax.tree.map(lambda p: p[cluster], state.params)

    if not isinstance(state.sides, splits.Sides):
        return of_cluster()
    return if_rare(pending, lambda: jax.tree.map(lambda p: p[missed], state.tree.model), of_cluster)


def gradients(rules: Rules, state: CFLState, place: tuple, learns: jax.Array, clients: Clients, key, usable) -> PyTree:
    """Returns the messages with the gradients of all clients `[N, ...]` at the models that they started from."""
    task = rules.common.task

    def gradient(examples, size, place, personal):
        loss = lambda p: losses.mean_loss(task, joined(p, personal), examples, size)  # noqa: E731
        return hide(jax.grad(loss)(starting_model(state, *place)), rules.privacy, rules.privacy_seed)

    sent = rules.common.client_axis(gradient)(clients.examples, learns, place, state.personal)
    key = jax.random.fold_in(key, 1)
    return attacked(rules.common.adversary, key, sent, client_ids(clients), usable, state.cluster)[0]


def new_models(
    state: CFLState, record: CFLState, into: jax.Array, means: PyTree, is_shared: PyTree
) -> tuple[CFLState, jax.Array]:
    """Puts the models into the server's record after a round: those of clusters, and those before this round's splits.

    Returns `(state, overflowed [K] bool)`, see `keep_finite`; clusters that overflowed are final. `state` is that
    before the round, `into` as in `server.Decision`, `means` are the mean updates.
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
    """Returns `params` with a cluster's model `before` the round where the new one is not finite, and these clusters.

    Where no active cluster has a finite model all stay as they are, so that the simulation ends with its error.
    """
    finite = jax.vmap(is_finite)(params)
    overflowed = active & ~finite & (active & finite).any()
    safe = where_rows(overflowed, before, params)
    return jax.tree.map(lambda shared, p, s: p if shared else s, is_shared, params, safe), overflowed


# Hidden updates (section V-B): clients send their updates through a secret orthonormal operator.


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


# What records hold of the metrics, and what a user is told of them.


def notes(record: dict[str, Any], is_last: bool) -> dict[str, str]:
    """Returns warnings of a record: full capacity and models that overflowed; at the end of a run, no decision."""
    if is_last:
        return _never_examined(record)
    texts = {}
    if record.get("capacity_reached"):
        texts["capacity"] = "a cluster would be split, but max_clusters are in use"
    if np.any(record.get("overflowed", False)):
        which = np.flatnonzero(record["overflowed"]).tolist()
        texts["overflowed"] = f"the models of clusters {which} overflowed: they keep their last finite one"
    return texts


def _never_examined(record: dict[str, Any]) -> dict[str, str]:
    """Returns the reason why no cluster was examined for a split, where updates are long."""
    if record["round"] < FEW_ROUNDS or record.get("decisions", 1) or "thresholds" not in record:
        return {}
    mean, longest, (below, above) = record["mean_norm"][0], record["max_norm"][0], record["thresholds"]
    if longest <= above or below <= NEVER:
        return {}
    why = "is not below eps_1, {:.3g}: train for more rounds, or choose a larger eps_1"
    if mean < below:
        why = "is below eps_1, {:.3g}, but too few rounds have passed (min_rounds), or too few clients are compared"
        why += " (min_size, min_examples, cohort)"
    text = f"no cluster was ever examined for a split. The longest update, {longest:.3g}, is above eps_2, {above:.3g};"
    return {"unexamined": f"{text} the mean update, {mean:.3g}, {why.format(below)}"}


ENTRIES = Entries(
    sums=("undone", "decisions"),
    largest=("split_from", "capacity_reached", "overflowed"),
    ended="every cluster is final",
    notes=notes,
)
