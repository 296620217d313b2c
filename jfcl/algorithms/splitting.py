"""One communication round of Clustered Federated Learning, for `cfl` and `byzantine_cfl`.

A round has two sides. The clients train and send updates, hidden if they like (section V-B). The server, `serve`,
sees those updates and nothing else of a model: it decides on splits and averages, for all clusters at once, inside
the compiled program.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from jfcl.algorithms import sides as siding
from jfcl.algorithms.aggregate import adversary_check, attacked, cluster_mean, robust_cluster_mean, where_rows
from jfcl.algorithms.averaging import WEIGHTS, client_weight, initial_models, initial_optimizers, round_metrics
from jfcl.algorithms.heard import enough_heard, forget, is_current, known_size, listen, nothing_heard
from jfcl.client import local, losses
from jfcl.core import (
    Adversary,
    Algorithm,
    Clients,
    PyTree,
    Task,
    attack_key,
    check,
    check_choice,
    check_count,
    client_ids,
    client_keys,
    is_finite,
    max_examples,
    num_bytes,
    num_clients,
    random_order,
    take_clients,
)
from jfcl.execution import mapping
from jfcl.kernels import (
    OPERATORS,
    bipartition_of_updates,
    optimal_bipartition,
    orthonormal,
    pairwise_cosine,
    similarity_tolerance,
)
from jfcl.kernels import separation_gap as gap_of
from jfcl.kernels.base import finite_rows, rows_of, squared_norms
from jfcl.kernels.bipartition import LINKAGES
from jfcl.kernels.similarity import signed_sums

SIMILARITIES = ("updates", "gradients")
DENSE_UP_TO = 4096  # clients whose similarities are always kept as a matrix
DENSE_SHARE = 8  # beyond, only a matrix that is so many times smaller than the updates; else tiles, computed repeatedly
SKETCH_COLUMNS = 4096  # a block of columns in the sketches; part of what they are, since signs are drawn per block


class ParameterTree(NamedTuple):
    """What is kept of every split, by the slot `k` of the cluster that it made (section V-C). See `parameter_tree`.

    Attributes:
      born: `[K]` int32, the round of the split; 0 where there was none.
      cross_similarity: `[K]`, of the bipartition.
      model: pytree of `[K, ...]`, the parent's model before the split.
      side: `[K, N]` int8: 0 for clients not in the parent, 1 for those that stayed in its slot, 2 for those that moved.
      updates: `[K, N, S]`, what the parent's clients had sent: all numbers if those are at most `tree_dim`, else
        `tree_dim` sums of them with random signs, whose cosines are off by about `1 / sqrt(tree_dim)`.
      privacy: `[]` int32, how these were hidden: not at all, or by which of `OPERATORS`, from 1 on.
    """

    born: jax.Array
    cross_similarity: jax.Array
    model: PyTree
    side: jax.Array
    updates: jax.Array
    privacy: jax.Array


class CFLState(NamedTuple):
    """The state of Clustered Federated Learning; `K` is its capacity, clusters that exist are `active`.

    Attributes:
      params: pytree of `[K, ...]`, the clusters' models.
      cluster: `[N]` int32.
      active: `[K]` bool.
      parent: `[K]` int32, the cluster from which each was split; -1 for the first and for slots never used. The slot of
        a split that was undone is not `active`, has a parent, and is not used again: its clients belong to that parent.
      since: `[K]` int32, the round in which each cluster got its present members.
      final: `[K]` bool, clusters that are not looked at any more.
      round: `[]` int32, rounds done.
      scale: `[2]`, mean and largest update norm of the first round, for relative thresholds.
      excluded: `[N]` int32, the round in which a client was shut out or has left; 0 for the others.
      tree: `ParameterTree`.
      client: the local optimisers' states `[N, ...]` under `keep="everything"`, else `()`.
      sides: `jfcl.algorithms.sides.Sides`, for clients that a split did not place; `()` where none can be carried out.
      heard: `jfcl.algorithms.heard.Heard`, with a cohort in each round; else `()`.
    """

    params: PyTree
    cluster: jax.Array
    active: jax.Array
    parent: jax.Array
    since: jax.Array
    final: jax.Array
    round: jax.Array
    scale: jax.Array
    excluded: jax.Array
    tree: ParameterTree
    client: PyTree
    sides: PyTree = ()
    heard: PyTree = ()


class Rules(NamedTuple):
    """What a variant of the method decides. `K` clusters throughout.

    Attributes:
      max_clusters: `K`; `None`: 8, or as many as there are clients.
      ripe: `(state, mean_norm [K], max_norm [K], members [K]) -> (stationary [K], wanted [K])` bool.
      accept: `(splits) -> [K]` bool: which bipartitions to carry out.
      keep_larger: instead of making the second side a cluster, shut the smaller side out for ever.
      similarity: of `"updates"` or `"gradients"`.
      aggregator: in place of the mean, or None.
      true_cluster: `[N]`, for the separation gap, or None.
      tree_dim: numbers kept of an update at a split.
      recursive: clusters that stand still and are not split are final.
      min_size: clients that either side must have.
      min_examples: clients with fewer have no voice.
      linkage: of `LINKAGES`.
      cohort: clients in each round, or None for all.
      thresholds: `(state) -> [2]`, what the norms are compared with, for the metrics; or None.
    """

    max_clusters: int | None
    ripe: Callable[..., tuple[jax.Array, jax.Array]]
    accept: Callable[[Any], jax.Array]
    keep_larger: bool = False
    similarity: str = "updates"
    aggregator: Callable[..., PyTree] | None = None
    true_cluster: Any = None
    tree_dim: int = 0
    recursive: bool = False
    min_size: int = 1
    min_examples: int = 1
    linkage: str = "single"
    cohort: int | None = None
    thresholds: Callable[[CFLState], jax.Array] | None = None


class Sent(NamedTuple):
    """What the server gets in a round.

    Attributes:
      updates: pytree of `[N, ...]`: an orthonormal operator's image of them where they are hidden. With a cohort, the
        last known ones.
      usable: `[N]` bool: clients that took part and sent finite numbers.
      present: `[N]` bool: clients that took part.
      weight: `[N]` float32, what each counts in the means of the models; 0 for clients that are not usable or pending.
      voice_weight: `[N]` float32, what each counts where it has a voice.
      able: `[N]` bool: clients that would have a voice in their cluster if their update is known.
      comparable: `[N]` bool: clients whose update is known, and of their cluster's model.
      expected: `[N]` bool: clients whose last answer was finite, or that have not answered yet.
      missed, pending: of `sides.missed_splits`; pending clients trained the model before the split they missed.
      gradients: `() -> ` the same as `updates` of gradients, for the server to ask for.
    """

    updates: PyTree
    usable: jax.Array
    present: jax.Array
    weight: jax.Array
    voice_weight: jax.Array
    able: jax.Array
    comparable: jax.Array
    expected: jax.Array
    missed: jax.Array
    pending: jax.Array
    gradients: Callable[[], PyTree]


class Splits(NamedTuple):
    """The bipartition of each cluster, `[K]`, and the side that every client would be on, `[N]` bool.

    `smaller` is the number of clients on the smaller side; 0 where all clients are alike but for rounding.
    """

    cross_similarity: jax.Array
    smaller: jax.Array
    side: jax.Array


def bipartitions(
    vectors: PyTree,
    cluster: jax.Array,
    usable: jax.Array,
    wanted: jax.Array,
    *,
    min_size: int = 1,
    linkage: str = "single",
) -> Splits:
    """The optimal bipartition of every wanted cluster.

    Args:
      vectors: pytree of `[N, ...]`, updates or gradients.
      cluster: `[N]` int32 in `0..K-1`.
      usable: `[N]` bool; clients that are not are on no side (False).
      wanted: `[K]` bool: clusters to look at.
      min_size, linkage: as in `cfl`. Complete linkage needs all similarities at once, however many clients there are.

    Returns:
      `Splits`; for clusters not wanted, and those without a bipartition of that size, the cross similarity is `inf`.
    """
    count = len(cluster)
    leaves = jax.tree.leaves(vectors)
    numbers = sum(leaf.size for leaf in leaves) // count
    coarsest = max((leaf.dtype for leaf in leaves), key=lambda dtype: jnp.finfo(dtype).eps)
    tolerance = similarity_tolerance(numbers, coarsest)
    dense = count <= max(DENSE_UP_TO, numbers // DENSE_SHARE) or linkage != "single"
    given = pairwise_cosine(vectors, mask=usable) if dense else vectors
    if linkage != "single":
        split = partial(optimal_bipartition, linkage=linkage)
    else:
        split = partial(optimal_bipartition if dense else bipartition_of_updates, min_size=min_size)

    def one(k, wanted):
        members = usable & (cluster == k)
        nothing = (jnp.full((), jnp.inf, jnp.float32), jnp.zeros((), jnp.int32), jnp.zeros(count, bool))

        def look():
            side, cross = split(given, members)
            ones = side.sum().astype(jnp.int32)
            smaller = jnp.minimum(ones, members.sum().astype(jnp.int32) - ones)
            return cross.astype(jnp.float32), jnp.where(1 - cross <= tolerance, 0, smaller), side

        return jax.lax.cond(wanted, look, lambda: nothing)

    cross, smaller, sides = mapping.chunked(1)(one)(jnp.arange(len(wanted), dtype=jnp.int32), wanted)
    return Splits(cross, smaller, sides.any(axis=0))


def separation_gaps(vectors: PyTree, cluster: jax.Array, usable: jax.Array, true_cluster: Any, count: int) -> jax.Array:
    """`[K]`: the separation gap (Definition 2) inside every cluster; `nan` for those of fewer than two clients."""
    similarity = pairwise_cosine(vectors, mask=usable)
    of_rows = jnp.pad(jnp.asarray(true_cluster), (0, len(cluster) - len(true_cluster)))  # behind: padding clients

    def one(k):
        members = usable & (cluster == k)
        gap = gap_of(similarity, of_rows, members)
        return jnp.where(members.sum() > 1, gap, jnp.nan)

    return mapping.chunked(1)(one)(jnp.arange(count, dtype=jnp.int32))


class Accepted(NamedTuple):
    """`into` `[K]` int32: the slot of the new cluster, `K` where there is no split; `full` `[]` bool: too few slots."""

    into: jax.Array
    full: jax.Array


def allot(accept: jax.Array, used: jax.Array) -> Accepted:
    """Gives every accepted split (`[K]` bool) a slot that is not `used`, lowest first, while there are any."""
    capacity = len(used)
    free = jnp.argsort(used, stable=True).astype(jnp.int32)
    turn = jnp.cumsum(accept).astype(jnp.int32) - 1
    fits = accept & (turn < (~used).sum())
    return Accepted(jnp.where(fits, free[jnp.clip(turn, 0, capacity - 1)], capacity), (accept & ~fits).any())


def sketch(updates: PyTree, usable: jax.Array, dim: int) -> jax.Array:
    """`[N, S]`: stacked updates as `ParameterTree.updates` keeps them; zeros for clients that are not usable."""
    rows = rows_of(updates)
    if sum(x.shape[1] for x in rows) <= dim:
        whole = jnp.concatenate([x.astype(jnp.float32) for x in rows], axis=1)
        return jnp.where(usable[:, None], whole, 0.0)
    if dim == 0:
        return jnp.zeros((len(usable), 0))
    return signed_sums(rows, usable, jax.random.key(0), dim, SKETCH_COLUMNS).astype(jnp.float32)


class Served(NamedTuple):
    """What the server decides: `into` `[K]` (see `Accepted`), each cluster's mean update, and what to report."""

    into: jax.Array
    means: PyTree
    metrics: dict[str, jax.Array]


def serve(rules: Rules, client_axis: mapping.Mapping, state: CFLState, sent: Sent) -> tuple[CFLState, Served]:
    """The server's part of a round. It sees `sent` and its own books: `state` comes without models.

    Returns:
      `(state, Served)`; the state's models are the caller's to put back.
    """
    capacity = len(state.active)
    vectors, usable, comparable = sent.updates, sent.usable, sent.comparable
    if rules.similarity == "gradients":
        vectors = sent.gradients()
        finite = finite_rows(rows_of(vectors))
        usable, comparable = usable & finite, comparable & finite
    voice = comparable & sent.able

    def means(vectors: PyTree, cluster: jax.Array, weight: jax.Array) -> PyTree:
        """The weighted mean of each cluster's vectors, `[K, ...]`, added up in the order of the clients."""
        if rules.aggregator is not None:
            return robust_cluster_mean(rules.aggregator, vectors, cluster, weight > 0, capacity)
        return cluster_mean(vectors, cluster, weight, capacity, client_axis)

    # How far each cluster still moves, and how far its most discontented client would. With a cohort, old updates are
    # longer than new ones: the longest is taken of this round's, so that age alone is not taken for disagreement.
    norms = jnp.sqrt(squared_norms(rows_of(vectors)))
    newest = voice if rules.cohort is None else voice & usable
    max_norm = jax.ops.segment_max(jnp.where(newest, norms, 0.0), state.cluster, capacity)
    max_norm = jnp.maximum(max_norm, 0.0)
    mean_vectors = means(vectors, state.cluster, jnp.where(voice, sent.voice_weight, 0.0))
    mean_norm = jnp.sqrt(squared_norms(rows_of(mean_vectors)))
    members = jax.ops.segment_sum(voice.astype(jnp.int32), state.cluster, capacity)
    scale = jnp.where(state.scale[1] == 0, jnp.stack([mean_norm[0], max_norm[0]]), state.scale)
    state = state._replace(scale=scale)
    stationary, wanted = rules.ripe(state, mean_norm, max_norm, members)
    examined = state.active & ~state.final & (members > 0)
    if rules.cohort is not None:
        examined = examined & enough_heard(voice, sent.able & ~sent.pending, state.cluster, capacity)
    stationary, wanted = stationary & examined, wanted & examined

    def compare():
        options = {"min_size": rules.min_size, "linkage": rules.linkage}
        return bipartitions(vectors, state.cluster, voice, wanted, **options)

    nothing = Splits(
        jnp.full(capacity, jnp.inf, jnp.float32), jnp.zeros(capacity, jnp.int32), jnp.zeros(len(usable), bool)
    )
    splits = jax.lax.cond(wanted.any(), compare, lambda: nothing)
    accepted = wanted & rules.accept(splits)
    metrics = {"decisions": wanted.sum().astype(jnp.int32)}
    if rules.thresholds is not None:
        metrics["thresholds"] = rules.thresholds(state)
    if rules.true_cluster is not None:
        metrics["separation_gap"] = separation_gaps(vectors, state.cluster, voice, rules.true_cluster, capacity)

    into, full = jnp.full(capacity, capacity, jnp.int32), jnp.zeros((), bool)
    if rules.keep_larger:
        leaves = _minority(state, splits, accepted, members, voice) | (
            sent.present & ~usable
        )  # an update with NaN resembles none
        excluded = jnp.where(leaves, state.round + 1, state.excluded)
        state, weight = state._replace(excluded=excluded), jnp.where(leaves, 0.0, sent.weight)
    else:
        into, full = allot(accepted, state.active | (state.parent >= 0))
        final = state.final
        if rules.recursive:
            final = final | (stationary & (into == capacity))
        sent = sent._replace(usable=usable, comparable=comparable)
        state, relocated = _carry_out(rules, state._replace(final=final), vectors, sent, splits, into)
        weight = jnp.where(relocated, 0.0, sent.weight)
        if rules.recursive:
            metrics["ended"] = _has_ended(state, sent)

    split_from = jnp.full(capacity, -1, jnp.int32).at[into].set(jnp.arange(capacity, dtype=jnp.int32), mode="drop")
    metrics |= {
        "mean_norm": mean_norm,
        "max_norm": max_norm,
        "cross_similarity": splits.cross_similarity,
        "split_from": split_from,
        "num_clusters": state.active.sum().astype(jnp.int32),
        "num_excluded": (state.excluded > 0).sum().astype(jnp.int32),
        "capacity_reached": full,
    }
    # The children average at once, each its own clients' updates of this round.
    served = Served(into, means(sent.updates, state.cluster, weight), metrics)
    return state._replace(round=state.round + 1), served


def _minority(state: CFLState, splits: Splits, accepted: jax.Array, members: jax.Array, voice: jax.Array) -> jax.Array:
    """`[N]` bool: clients on the smaller side of an accepted bipartition; of equal halves the first client's stays."""
    ones = jax.ops.segment_sum((splits.side & voice).astype(jnp.int32), state.cluster, len(state.active))
    out_is_side = 2 * ones <= members
    return accepted[state.cluster] & voice & (splits.side == out_is_side[state.cluster])


def _carry_out(
    rules: Rules, state: CFLState, vectors: PyTree, sent: Sent, splits: Splits, into: jax.Array
) -> tuple[CFLState, jax.Array]:
    """Carries out this round's splits, and places the clients that no bipartition places (see `sides`).

    Returns:
      `(state, relocated [N] bool)`: clients that changed their cluster otherwise than in a split of this round, so that
      their update is of neither cluster's model.
    """
    capacity, new_round, tree = len(state.active), state.round + 1, state.tree
    if not isinstance(state.sides, siding.Sides):  # one cluster, never split
        return state, jnp.zeros(len(state.cluster), bool)
    was_split = into < capacity
    split_here = was_split[state.cluster]
    voice = sent.comparable & sent.able & split_here
    silent = sent.comparable & ~sent.able & split_here
    moves = splits.side & split_here

    def note():
        parts = jnp.where(moves, 2, jnp.where(voice, 1, 0)).astype(jnp.int8)
        sides = jnp.where(state.cluster[None, :] == jnp.arange(capacity)[:, None], parts[None, :], jnp.int8(0))
        seen = sketch(sent.updates, voice, rules.tree_dim)
        kept = jnp.where((sides > 0)[:, :, None], seen[None, :, :], 0.0)
        noted = tree._replace(
            born=tree.born.at[into].set(new_round, mode="drop"),
            cross_similarity=tree.cross_similarity.at[into].set(splits.cross_similarity, mode="drop"),
            side=tree.side.at[into].set(sides, mode="drop"),
            updates=tree.updates.at[into].set(kept, mode="drop"),
        )
        return noted, *siding.split(state, vectors, voice, silent, moves, into)

    tree, sides, moves = jax.lax.cond(was_split.any(), note, lambda: (tree, state.sides, moves))
    state = state._replace(
        cluster=jnp.where(moves, into[state.cluster], state.cluster).astype(jnp.int32),
        active=state.active.at[into].set(True, mode="drop"),
        parent=state.parent.at[into].set(jnp.arange(capacity, dtype=jnp.int32), mode="drop"),
        since=jnp.where(was_split, new_round, state.since).at[into].set(new_round, mode="drop"),
        tree=tree,
        sides=sides,
    )
    return siding.place(state, vectors, sent.missed, sent.pending, sent.usable & ~voice & ~silent, sent.able)


def _has_ended(state: CFLState, sent: Sent) -> jax.Array:
    """`[]` bool: all clusters are final, and no client that could still be placed waits for its side."""
    if not isinstance(state.sides, siding.Sides):
        return (state.final | ~state.active).all()
    waits = siding.missed_splits(state)[1] & sent.able & sent.expected
    return (state.final | ~state.active).all() & ~waits.any()


def keep_finite(params: PyTree, before: PyTree, active: jax.Array) -> tuple[PyTree, jax.Array]:
    """`params` `[K, ...]` with a cluster's model `before` the round where the new one has NaN or infinity.

    Returns:
      `(params, overflowed [K] bool)`. Where no active cluster has a finite model all stay as they are, so that the
      simulation ends with its error.
    """
    finite = jax.vmap(is_finite)(params)
    overflowed = active & ~finite & (active & finite).any()
    return where_rows(overflowed, before, params), overflowed


def missed_splits(state: CFLState) -> tuple[jax.Array, jax.Array]:
    """`sides.missed_splits`; of a state that is never split, none."""
    if not isinstance(state.sides, siding.Sides):
        return state.cluster, jnp.zeros(state.cluster.shape, bool)
    return siding.missed_splits(state)


def starting_model(state: CFLState, cluster: jax.Array, missed: jax.Array, pending: jax.Array) -> PyTree:
    """The model that one client begins a round with: its cluster's, or that from before a split that it missed."""

    def of_cluster():
        return jax.tree.map(lambda p: p[cluster], state.params)

    if not isinstance(state.sides, siding.Sides):
        return of_cluster()
    return jax.lax.cond(pending, lambda: jax.tree.map(lambda p: p[missed], state.tree.model), of_cluster)


def new_models(state: CFLState, books: CFLState, into: jax.Array, means: PyTree) -> tuple[CFLState, jax.Array]:
    """Puts the models into the server's books after a round: those of clusters, and those before this round's splits.

    Args:
      state: before the round.
      books: after it, without models.
      into: as in `Served`.
      means: pytree of `[K, ...]`, the mean updates.

    Returns:
      `(state, overflowed [K] bool)`, see `keep_finite`; clusters that overflowed are final.
    """

    def at_splits(models):
        """`models` with those of clusters that are split in the slots of the new clusters."""
        return jax.tree.map(lambda x, p: x.at[into].set(p, mode="drop"), models, state.params)

    before = at_splits(state.params)
    params, overflowed = keep_finite(jax.tree.map(jnp.add, before, means), before, books.active)
    # Free slots hold the first model, so that an old one is never the best of all.
    first = jax.tree.map(lambda p: jnp.broadcast_to(p[:1], p.shape), params)
    params = where_rows(books.active, params, first)
    tree = books.tree._replace(model=at_splits(state.tree.model))
    return books._replace(params=params, tree=tree, final=books.final | overflowed), overflowed


def in_active_clusters(state: CFLState) -> CFLState:
    """`state` with the clients of a split that was undone, which may have been absent then, in the parent's cluster."""
    k = state.cluster
    return state._replace(cluster=jnp.where(state.active[k], k, state.parent[k]))


def undo_harmful_splits(task: Task, state: CFLState, clients: Clients, learns_from: Callable, patience: int, axis):
    """Takes back the splits of `patience` rounds ago after which their clients do worse on examples kept aside.

    Section II-A: "if after splitting up the clients a degradation in model performance is observed, it is always
    possible to fall back to the Federated Learning solution". The parent gets its clients and its model back, and is
    final.

    Returns:
      `(state, undone [])`.
    """
    capacity = len(state.active)
    due = state.active & (state.tree.born > 0) & (state.round - state.tree.born == patience)
    slots = jnp.arange(capacity, dtype=jnp.int32)
    # Of every cluster: the split that is due in which it took part, as the new side or as the one that stayed.
    judged = jnp.full(capacity, -1, jnp.int32).at[jnp.where(due, state.parent, capacity)].set(slots, mode="drop")
    judged = jnp.where(due, slots, judged)

    def performance(models, k, batch):
        params = jax.tree.map(lambda p: p[k], models)
        return -task.loss(params, batch) if task.correct is None else task.correct(params, batch)

    def client(examples, size, cluster):
        k = judged[cluster]
        rows = jnp.arange(jax.tree.leaves(examples)[0].shape[0])
        aside = (rows >= learns_from(size)) & (rows < size)
        blank = losses.blank_padding(examples, size)
        now = losses.masked_mean(performance(state.params, cluster, blank), aside)
        before = losses.masked_mean(performance(state.tree.model, k, blank), aside)
        return now - before, (k >= 0) & aside.any()

    def judge():
        gain, counts = axis(client)(clients.examples, jnp.asarray(clients.size), state.cluster)
        counts = counts & (state.excluded == 0)
        gain = jax.ops.segment_sum(jnp.where(counts, gain, 0.0), judged[state.cluster], capacity)
        undo = due & (gain < 0)
        target = jnp.where(undo, state.parent, capacity)
        params = jax.tree.map(lambda p, m: p.at[target].set(m, mode="drop"), state.params, state.tree.model)
        return state._replace(
            params=params,
            cluster=jnp.where(undo[state.cluster], state.parent[state.cluster], state.cluster),
            active=state.active & ~undo,
            final=state.final.at[target].set(True, mode="drop"),
            tree=state.tree._replace(
                born=jnp.where(undo, 0, state.tree.born),
                side=jnp.where(undo[:, None], jnp.int8(0), state.tree.side),
            ),
        ), undo.sum().astype(jnp.int32)

    return jax.lax.cond(due.any(), judge, lambda: (state, jnp.zeros((), jnp.int32)))


def rounds(
    task: Task,
    training: local.LocalTraining,
    rules: Rules,
    *,
    weights: str,
    privacy: str | None,
    privacy_seed: int,
    validation: float,
    patience: int,
    init_params: PyTree | None,
    adversary: Adversary | None,
    client_axis: mapping.Mapping | None,
) -> Algorithm:
    """The `Algorithm` of these rules; the arguments are those of `cfl`, `patience` its `fallback_rounds`."""
    if rules.max_clusters is not None:
        check_count("max_clusters", rules.max_clusters)
    check_choice("similarity", rules.similarity, SIMILARITIES)
    check_choice("linkage", rules.linkage, LINKAGES)
    check_count("min_size", rules.min_size)
    check_count("min_examples", rules.min_examples)
    if rules.cohort is not None:
        check_count("cohort", rules.cohort)
        of_updates = rules.similarity == "updates"
        check(
            of_updates, "cohort", rules.cohort, 'left out with similarity="gradients": updates are kept, not gradients'
        )
    check_choice("weights", weights, WEIGHTS)
    check_count("tree_dim", rules.tree_dim, least=0)
    if privacy is not None:
        check_choice("privacy", privacy, OPERATORS)
    client_axis = mapping.auto() if client_axis is None else client_axis

    def hide(update: PyTree) -> PyTree:
        return update if privacy is None else hidden(update, privacy, privacy_seed)

    def reveal(means: PyTree, like: PyTree) -> PyTree:
        if privacy is None:
            return means
        flat, unravel = ravel_pytree(like)
        return jax.vmap(unravel)(secret_operator(privacy, privacy_seed, len(flat)).invert(means["hidden"]))

    def learns_from(size: jax.Array) -> jax.Array:
        """How many of a client's `size` examples are for training; the others judge splits."""
        return size - jnp.floor(validation * size.astype(jnp.float32)).astype(size.dtype) if validation else size

    def init(key: jax.Array, clients: Clients) -> CFLState:
        n = num_clients(clients)
        capacity = min(8, n) if rules.max_clusters is None else rules.max_clusters
        check(capacity <= n, "max_clusters", capacity, f"at most the {n} clients there are")
        check(rules.cohort is None or rules.cohort <= n, "cohort", rules.cohort, f"at most the {n} clients there are")
        m = max_examples(clients)
        accepted = f"at most the {m} examples of the largest client; clients with fewer have no voice"
        check(rules.min_examples <= m, "min_examples", rules.min_examples, accepted)
        if rules.true_cluster is not None:
            shape = jnp.shape(rules.true_cluster)
            fits = shape == (n,) or (clients.id is not None and len(shape) == 1 and shape[0] < n)
            check(fits, "true_cluster", shape, f"of shape ({n},)")
            check(n <= DENSE_UP_TO, "true_cluster", f"{n} clients", f"left out beyond {DENSE_UP_TO} clients")
        one = initial_models(task, key, 1, init_params)
        params = jax.tree.map(lambda p: jnp.broadcast_to(p, (capacity, *p.shape[1:])), one)
        sent = jax.eval_shape(hide, jax.tree.map(lambda p: p[0], params))
        keeps = capacity > 1 and not rules.keep_larger
        length = min(sum(x.size for x in jax.tree.leaves(sent)), rules.tree_dim) if keeps else 0
        tree = ParameterTree(
            born=jnp.zeros(capacity, jnp.int32),
            cross_similarity=jnp.full(capacity, jnp.inf),
            model=params,
            side=jnp.zeros((capacity, n), jnp.int8),
            updates=jnp.zeros((capacity, n, length)),
            privacy=jnp.asarray(privacy_code(privacy), jnp.int32),
        )
        return CFLState(
            params=params,
            cluster=jnp.zeros(n, jnp.int32),
            active=jnp.arange(capacity) == 0,
            parent=jnp.full(capacity, -1, jnp.int32),
            since=jnp.zeros(capacity, jnp.int32),
            final=jnp.zeros(capacity, bool),
            round=jnp.zeros((), jnp.int32),
            scale=jnp.zeros(2),
            excluded=jnp.zeros(n, jnp.int32),
            tree=tree,
            client=initial_optimizers(training, params, clients),
            sides=siding.no_sides(sent, capacity, n, small=rules.min_examples > 1) if keeps else (),
            heard=nothing_heard(sent, n) if rules.cohort is not None else (),
        )

    def step(key: jax.Array, state: CFLState, clients: Clients):
        m = max_examples(clients)
        cohort_key, clients_key = jax.random.split(key)  # as in `averaging`: the same clients see the same randomness
        metrics = {}
        if validation:
            state = in_active_clusters(state)
            state, metrics["undone"] = undo_harmful_splits(task, state, clients, learns_from, patience, client_axis)
        examples = known_size(state.heard, clients.size)
        member = (examples > 0) & (state.excluded == 0)
        missed, pending = missed_splits(state)
        present = member & (~state.final[state.cluster] | pending) if rules.recursive else member
        size = jnp.where(present, learns_from(examples), 0)
        answers = present & (jnp.asarray(clients.size) > 0)  # the others are only remembered
        drawn = clients._replace(size=jnp.where(answers, size, 0))
        of_clients = (answers, drawn.size, (state.cluster, missed, pending), state.client)
        rows = None
        if rules.cohort is not None:
            rows = random_order(cohort_key, drawn)[: rules.cohort]
            drawn, of_clients = take_clients(drawn, rows), jax.tree.map(lambda x: x[rows], of_clients)
        here, learns, place, opt_states = of_clients

        def client(key, examples, size, place, opt_state):
            begin = starting_model(state, *place)
            opt_state = local.optimizer_at(training, begin, opt_state, state.round, size, m)
            trained = local.train(task, training, key, begin, examples, size, opt_state)
            update = jax.tree.map(jnp.subtract, trained.params, begin)
            opt_state = local.carried(training, trained.opt_state)
            return hide(update), is_finite(update), trained.loss, trained.num_steps, opt_state

        updates, finite, loss, steps, trained_states = client_axis(client)(
            client_keys(clients_key, drawn), drawn.examples, learns, place, opt_states
        )
        updates, usable = attacked(
            adversary, attack_key(clients_key), updates, client_ids(drawn), here & finite, place[0]
        )
        trained_states = where_rows(here & finite, trained_states, opt_states)
        sent_bytes = float(num_bytes(jax.eval_shape(lambda u: jax.tree.map(lambda x: x[0], u), updates)))
        metrics |= round_metrics(here, loss, usable, steps, sent_bytes, sent_bytes)

        def gradients():
            def gradient(examples, size, place):
                begin = starting_model(state, *place)
                return hide(jax.grad(lambda p: losses.mean_loss(task, p, examples, size))(begin))

            gradients = client_axis(gradient)(clients.examples, size, (state.cluster, missed, pending))
            gradients_key = jax.random.fold_in(attack_key(clients_key), 1)
            return attacked(adversary, gradients_key, gradients, client_ids(clients), usable, state.cluster)[0]

        able, heard = member & (examples >= rules.min_examples), state.heard
        if rows is None:
            comparable, expected = usable & ~pending, usable
        else:
            heard = listen(heard, state.round + 1, examples, rows, updates, here, usable, ~pending[rows])
            updates, expected = heard.update, ~heard.mute
            comparable = is_current(heard, state.since[state.cluster]) & ~pending
            usable, present = (jnp.zeros_like(member).at[rows].set(x) for x in (usable, here))
            metrics["loss"] = jnp.full(len(member), jnp.nan).at[rows].set(metrics["loss"])
            trained_states = jax.tree.map(lambda old, new: old.at[rows].set(new), state.client, trained_states)
        voice_weight = client_weight(weights, size)
        weight = voice_weight * (usable & ~pending).astype(jnp.float32)
        of_splits = (able, comparable, expected, missed, pending, gradients)
        sent = Sent(updates, usable, present, weight, voice_weight, *of_splits)
        books = state._replace(params=(), client=(), heard=(), tree=state.tree._replace(model=()))
        books, served = serve(rules, client_axis, books, sent)

        # The clients again: new clusters start from their parent's model, and everybody adds the mean update.
        means = reveal(served.means, jax.tree.map(lambda p: p[0], state.params))
        books, overflowed = new_models(state, books, served.into, means)
        if not rules.keep_larger:
            metrics["overflowed"] = overflowed
        heard = forget(heard, books.cluster != state.cluster)
        return books._replace(client=trained_states, heard=heard), metrics | served.metrics

    def refresh(state: CFLState, clients: Clients) -> CFLState:
        return in_active_clusters(state)

    return Algorithm(init, step, task, adversary_check(adversary), refresh if validation else None)


def privacy_code(privacy: str | None) -> int:
    """As `ParameterTree.privacy` has it."""
    return 0 if privacy is None else 1 + list(OPERATORS).index(privacy)


def secret_operator(privacy: str, seed: int, dim: int):
    """The clients' operator. Nothing that the server draws from leads to its key."""
    return orthonormal(privacy, jax.random.fold_in(jax.random.key(seed), 0x5EC8E7), dim)


def hidden(update: PyTree, privacy: str, seed: int) -> PyTree:
    """What a client sends instead of its update: one vector, `{"hidden": [P]}`."""
    flat = ravel_pytree(update)[0]
    return {"hidden": secret_operator(privacy, seed, len(flat)).apply(flat)}
