"""The server's part of a round. It has the clients' messages and its own record, and no model.

For all clusters at once, inside the compiled program, it finds the clusters that are ripe for a decision, computes
their bipartitions, lets the method's rules decide, and averages the updates of each cluster.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jfcl import kernels, mapping
from jfcl.core import PyTree, divided, joined, path_flags, trained_part
from jfcl.kernels.base import DENSE_UP_TO, if_rare, rows_of
from jfcl.kernels.bipartition import Bipartition, bipartitions_of_clusters
from jfcl.kernels.blocks import finite_rows, squared_norms
from jfcl.mapping.columns import over_columns
from jfcl.methods.averaging import Averaging
from jfcl.methods.cfl.state import CFLState, enough_known
from jfcl.robust.aggregate import cluster_mean, robust_cluster_mean


class Rules(NamedTuple):
    """The decisions of a variant of the method, and what clients keep from the server. `K` clusters throughout.

    Attributes:
      common: the model, and the common options of methods. Its `num_clusters` are `K`; None: 8.
      ripe: `(state, mean_norm [K], max_norm [K], members [K]) -> (stationary [K], wanted [K])` bool.
      accept: `(splits) -> [K]` bool: the bipartitions to act on.
      decide: `(rules, state, sent, comparison) -> Decision`: the action on them.
      compares_zero: clients with an update of zero, which has no direction, are compared.
      thresholds: `(state) -> [2]`, those of the norms, for the metrics; or None.
      similarity and the others: as in `cfl`.
    """

    common: Averaging
    ripe: Callable[..., tuple[jax.Array, jax.Array]]
    accept: Callable[[Splits], jax.Array]
    decide: Callable[..., Decision]
    compares_zero: bool = True
    thresholds: Callable[[CFLState], jax.Array] | None = None
    similarity: str = "updates"
    linkage: str = "single"
    min_size: int = 1
    min_examples: int = 1
    recursive: bool = False
    validation: float = 0.0
    fallback_rounds: int = 0
    privacy: str | None = None
    privacy_seed: int = 0
    tree_dim: int = 0
    true_cluster: Any = None

    def to_compare(self, updates: PyTree) -> PyTree:
        """Returns the part of updates that similarities and norms compare: all but the statistics."""
        return trained_part(self.common.task, updates)


class Sent(NamedTuple):
    """The server's input in a round.

    Attributes:
      updates: pytree of `[N, ...]`; where they are hidden, their images under an orthonormal operator. With a cohort,
        the last known ones.
      usable: `[N]` bool: clients that took part and sent finite numbers.
      present: `[N]` bool: clients that took part.
      weight: `[N]` float32, of each client in the means of the models; 0 for clients that are not usable or pending.
      compared_weight: `[N]` float32, of each client in the mean that its cluster is examined by.
      able: `[N]` bool: clients with enough examples (`min_examples`) to be compared if their update is known.
      comparable: `[N]` bool: clients with a known update that was computed at their cluster's model.
      expected: `[N]` bool: clients that sent a finite update last, or none yet.
      missed, pending: of `splits.missed_splits`; pending clients trained the model before the split that they missed.
      gradients: `() -> ` the gradients in the form of `updates`.
      ids: `[N]` int32, of the clients.
    """

    updates: PyTree
    usable: jax.Array
    present: jax.Array
    weight: jax.Array
    compared_weight: jax.Array
    able: jax.Array
    comparable: jax.Array
    expected: jax.Array
    missed: jax.Array
    pending: jax.Array
    gradients: Callable[[], PyTree]
    ids: jax.Array


class Splits(NamedTuple):
    """The bipartition of each cluster.

    Attributes:
      cross_similarity: `[K]`, infinity where no bipartition was computed or possible.
      smaller: `[K]` int32, clients on the smaller side; 0 where all updates are alike but for rounding.
      side: `[N]` bool, each client's side in the bipartition of its cluster: False with the smallest id that is
        compared. It is the side that stays, also with clients that are placed later, in whatever order clients are.
    """

    cross_similarity: jax.Array
    smaller: jax.Array
    side: jax.Array


class Comparison(NamedTuple):
    """The comparison of a round, from which `Rules.decide` decides.

    Attributes:
      vectors: pytree of `[N, ...]`, the updates or gradients.
      compared: `[N]` bool: able clients with a comparable vector.
      members: `[K]` int32, how many of them each cluster has.
      stationary: `[K]` bool.
      splits: the bipartitions.
      accepted: `[K]` bool.
    """

    vectors: PyTree
    compared: jax.Array
    members: jax.Array
    stationary: jax.Array
    splits: Splits
    accepted: jax.Array


# Result of `Rules.decide`: the state; `[K]` int32, by cluster the slot of the new cluster (`K`: no split); `[]` bool,
# whether there were too few slots; `Sent.weight` `[N]` with 0 for clients that do not count now; further metrics.
Decision = tuple[CFLState, jax.Array, jax.Array, jax.Array, dict[str, jax.Array]]


def serve(rules: Rules, state: CFLState, sent: Sent):
    """Decides on splits and averages, from `sent` and `state`, which comes without models.

    Returns `(state, into [K], means [K, ...], metrics)`: `into` as in `Decision`, each cluster's mean update.
    """
    common, capacity = rules.common, len(state.active)
    client_axis = common.client_axis

    # Compare updates, or gradients.
    vectors = rules.to_compare(sent.updates)
    if rules.similarity == "gradients":
        vectors = rules.to_compare(sent.gradients())
        finite = finite_rows(rows_of(vectors))
        sent = sent._replace(usable=sent.usable & finite, comparable=sent.comparable & finite)
    compared = sent.comparable & sent.able

    def means(vectors: PyTree, cluster: jax.Array, weight: jax.Array) -> PyTree:
        """Returns the weighted mean of each cluster's vectors, `[K, ...]`, added up in the order of the clients."""
        if common.aggregator is None:
            return cluster_mean(vectors, cluster, weight, capacity, client_axis)
        robust, plain = divided(common.task.statistics, vectors)
        robust = robust_cluster_mean(common.aggregator, robust, cluster, weight > 0, capacity)
        return joined(robust, cluster_mean(plain, cluster, weight, capacity, client_axis) if plain else ())

    # Norms: the mean update of each cluster, and its longest update. With a cohort, old updates are longer than new
    # ones; the longest is then one of this round, so that age does not count as disagreement.
    norms = jnp.sqrt(squared_norms(rows_of(vectors)))
    compared = compared if rules.compares_zero else compared & (norms > 0)
    newest = compared if common.cohort is None else compared & sent.usable
    max_norm = jnp.maximum(jax.ops.segment_max(jnp.where(newest, norms, 0.0), state.cluster, capacity), 0.0)
    mean_vectors = means(vectors, state.cluster, jnp.where(compared, sent.compared_weight, 0.0))
    mean_norm = jnp.sqrt(squared_norms(rows_of(mean_vectors)))
    members = jax.ops.segment_sum(compared.astype(jnp.int32), state.cluster, capacity)
    scale = jnp.where(state.scale[1] == 0, jnp.stack([mean_norm[0], max_norm[0]]), state.scale)
    state = state._replace(scale=scale)

    # Bipartitions of the clusters that are ripe for one.
    stationary, wanted = rules.ripe(state, mean_norm, max_norm, members)
    examined = state.active & ~state.final & (members > 0)
    wanted = wanted & examined
    if common.cohort is not None:
        expected = sent.able & ~sent.pending
        wanted = wanted & enough_known(compared, expected, state.cluster, capacity)
        # Old updates say little on the model of today: a cluster ends in a round with most of its clients.
        examined = examined & enough_known(newest, expected, state.cluster, capacity, most=True)
    sides = jnp.zeros(capacity, jnp.int32), jnp.zeros(len(compared), bool)
    nothing = Splits(jnp.full(capacity, jnp.inf, jnp.float32), *sides)
    compare = partial(bipartitions, rules, vectors, state.cluster, compared, wanted, sent.ids)
    splits = if_rare(wanted.any(), compare, lambda: nothing)
    comparison = Comparison(vectors, compared, members, stationary & examined, splits, wanted & rules.accept(splits))
    metrics = {
        "decisions": wanted.sum().astype(jnp.int32),
        "mean_norm": mean_norm,
        "max_norm": max_norm,
        "cross_similarity": splits.cross_similarity,
    }
    if rules.thresholds is not None:
        metrics["thresholds"] = rules.thresholds(state)
    if rules.true_cluster is not None:
        metrics["separation_gap"] = separation_gaps(rules, state, vectors, compared)

    # The decision, and the mean of each cluster after it: the children of a split average their own clients' updates.
    state, into, full, weight, more = rules.decide(rules, state, sent, comparison)
    slots = jnp.arange(capacity, dtype=jnp.int32)
    metrics |= more | {
        "split_from": jnp.full(capacity, -1, jnp.int32).at[into].set(slots, mode="drop"),
        "num_clusters": state.active.sum().astype(jnp.int32),
        "num_excluded": (state.excluded > 0).sum().astype(jnp.int32),
        "capacity_reached": full,
    }
    mean_updates = means(sent.updates, state.cluster, weight)
    if common.shared is not None:  # their means are those of all clusters
        of_all = cluster_mean(sent.updates, jnp.zeros(len(weight), jnp.int32), weight, 1, client_axis)
        flags = path_flags(common.shared, mean_updates)
        pick = lambda f, m, joint: jnp.broadcast_to(joint, m.shape) if f else m  # noqa: E731
        mean_updates = jax.tree.map(pick, flags, mean_updates, of_all)
    return state._replace(round=state.round + 1), into, mean_updates, metrics


# Bipartitions.

# Beyond `DENSE_UP_TO` clients only a matrix this many times smaller than the updates; else tiles, computed repeatedly.
DENSE_SHARE = 8


def bipartitions(
    rules: Rules, vectors: PyTree, cluster: jax.Array, usable: jax.Array, wanted: jax.Array, ids: jax.Array
) -> Splits:
    """Computes the optimal bipartition of every `wanted` cluster `[K]`, of its `usable` clients `[N]`.

    Complete linkage and a least size need all similarities at once.
    """
    count, capacity = len(cluster), len(wanted)
    leaves = jax.tree.leaves(vectors)
    numbers = sum(leaf.size for leaf in leaves) // count
    coarsest = max((leaf.dtype for leaf in leaves), key=lambda dtype: jnp.finfo(dtype).eps)
    tolerance = kernels.similarity_tolerance(numbers, coarsest)
    needs_all = rules.linkage != "single" or rules.min_size > 1
    dense = needs_all or count <= max(DENSE_UP_TO, numbers // DENSE_SHARE)

    def one_by_one(bipartition, points, cluster, active):
        """Returns the `Bipartition` of all clusters, computed one by one; without two active clients there is none."""
        nothing = Bipartition(jnp.zeros(count, bool), jnp.full((), jnp.inf, jnp.float32))

        def one(k):
            members = active & (cluster == k)

            def compute():
                side, cross = bipartition(points, members)
                return Bipartition(side, cross.astype(jnp.float32))

            return jax.lax.cond(members.sum() > 1, compute, lambda: nothing)

        side, cross = mapping.chunked(1)(one)(jnp.arange(capacity, dtype=jnp.int32))
        return Bipartition(side.any(axis=0), cross)

    def from_similarities(vectors, cluster, usable, active):
        similarity = kernels.pairwise_cosine(vectors, mask=usable)
        if rules.linkage == "single":
            return (), bipartitions_of_clusters(similarity, active, cluster, capacity, rules.min_size)
        return (), one_by_one(partial(kernels.optimal_bipartition, linkage=rules.linkage), similarity, cluster, active)

    active = usable & wanted[cluster]
    if dense:
        side, cross = over_columns(rules.common.client_axis, from_similarities)(vectors, cluster, usable, active)[1]
    else:
        side, cross = one_by_one(kernels.bipartition_of_updates, vectors, cluster, active)

    rank = jnp.where(active, ids, jnp.iinfo(jnp.int32).max)
    is_first = active & (rank == jax.ops.segment_min(rank, cluster, capacity)[cluster])
    side = active & (side != (jax.ops.segment_sum((is_first & side).astype(jnp.int32), cluster, capacity) > 0)[cluster])
    ones, members = (jax.ops.segment_sum(x.astype(jnp.int32), cluster, capacity) for x in (side, active))
    smaller = jnp.where(1 - cross <= tolerance, 0, jnp.minimum(ones, members - ones))
    return Splits(cross.astype(jnp.float32), smaller, side)


def separation_gaps(rules: Rules, state: CFLState, vectors: PyTree, usable: jax.Array) -> jax.Array:
    """Returns `[K]`: the separation gap (Definition 2) in each cluster; NaN for fewer than two usable clients."""

    def from_similarities(vectors, cluster, usable, of_rows):
        similarity = kernels.pairwise_cosine(vectors, mask=usable)

        def one(k):
            members = usable & (cluster == k) & (of_rows >= 0)
            return jnp.where(members.sum() > 1, kernels.separation_gap(similarity, of_rows, members), jnp.nan)

        return (), mapping.chunked(1)(one)(jnp.arange(len(state.active), dtype=jnp.int32))

    axis = over_columns(rules.common.client_axis, from_similarities)
    return axis(vectors, state.cluster, usable, rules.true_cluster)[1]
