"""The server's part of a round. It has the clients' messages and its own record, and no model.

For all clusters at once, inside the compiled program, it finds the clusters that are ripe for a decision, computes
their bipartitions, lets the method's rules decide, and averages the updates of each cluster.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jfcl import mapping
from jfcl.core import PyTree, divided, joined
from jfcl.kernels.base import finite_rows, if_rare, rows_of, squared_norms
from jfcl.methods.cfl.bipartitions import Splits, bipartitions, no_splits, separation_gaps
from jfcl.methods.cfl.last_updates import enough_known
from jfcl.methods.cfl.state import CFLState
from jfcl.robust.aggregate import cluster_mean, robust_cluster_mean, shared_means


class Rules(NamedTuple):
    """The decisions of a variant of the method. `K` clusters throughout.

    Attributes:
      max_clusters: `K`; `None`: 8, or as many as there are clients.
      ripe: `(state, mean_norm [K], max_norm [K], members [K]) -> (stationary [K], wanted [K])` bool.
      accept: `(splits) -> [K]` bool: the bipartitions to act on.
      decide: `(rules, state, sent, found) -> Decision`: the action on them.
      similarity: of `"updates"` or `"gradients"`.
      aggregator: in place of the mean, or None.
      true_cluster: `[N]`, for the separation gap, or None.
      tree_dim: numbers kept of an update at a split.
      recursive: stationary clusters that are not split are final.
      compares_zero: clients with an update of zero, which has no direction, have a voice.
      min_size: least number of clients on either side.
      min_examples: clients with fewer do not influence decisions.
      linkage: of `jfcl.kernels.bipartition.LINKAGES`.
      cohort: clients in each round, or None for all.
      thresholds: `(state) -> [2]`, those of the norms, for the metrics; or None.
      shared: takes a parameter's path; true for those averaged over all clusters; or None.
      statistics: of the task.
    """

    max_clusters: int | None
    ripe: Callable[..., tuple[jax.Array, jax.Array]]
    accept: Callable[[Splits], jax.Array]
    decide: Callable[..., Decision]
    similarity: str = "updates"
    aggregator: Callable[..., PyTree] | None = None
    true_cluster: Any = None
    tree_dim: int = 0
    recursive: bool = False
    compares_zero: bool = True
    min_size: int = 1
    min_examples: int = 1
    linkage: str = "single"
    cohort: int | None = None
    thresholds: Callable[[CFLState], jax.Array] | None = None
    shared: Callable[[str], bool] | None = None
    statistics: Callable[[str], bool] | None = None

    def compared(self, updates: PyTree) -> PyTree:
        """Returns the part of updates that similarities and norms compare: all but the statistics."""
        return divided(self.statistics, updates)[0]


class Sent(NamedTuple):
    """The server's input in a round.

    Attributes:
      updates: pytree of `[N, ...]`: an orthonormal operator's image of them where they are hidden. With a cohort, the
        last known ones.
      usable: `[N]` bool: clients that took part and sent finite numbers.
      present: `[N]` bool: clients that took part.
      weight: `[N]` float32, of each client in the means of the models; 0 for clients that are not usable or pending.
      voice_weight: `[N]` float32, of each client where it has a voice.
      able: `[N]` bool: clients that have a voice in their cluster if their update is known.
      comparable: `[N]` bool: clients with a known update that was computed at their cluster's model.
      expected: `[N]` bool: clients that sent a finite update last, or none yet.
      missed, pending: of `sides.missed_splits`; pending clients trained the model before the split that they missed.
      gradients: `() -> ` the gradients in the form of `updates`.
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


class Found(NamedTuple):
    """The comparison of a round, from which `Rules.decide` decides.

    Attributes:
      vectors: pytree of `[N, ...]`, the updates or gradients.
      voice: `[N]` bool: clients with a voice and a comparable vector.
      members: `[K]` int32, how many of them each cluster has.
      stationary: `[K]` bool.
      splits: `Splits`.
      accepted: `[K]` bool.
    """

    vectors: PyTree
    voice: jax.Array
    members: jax.Array
    stationary: jax.Array
    splits: Splits
    accepted: jax.Array


# Result of `Rules.decide`: the state; `[K]` int32, by cluster the slot of the new cluster (`K`: no split); `[]` bool,
# whether there were too few slots; `[N]`, `Sent.weight` with 0 for clients that do not count now; further metrics.
Decision = tuple[CFLState, jax.Array, jax.Array, jax.Array, dict[str, jax.Array]]


def serve(rules: Rules, client_axis: mapping.Mapping, state: CFLState, sent: Sent):
    """Decides on splits and averages, from `sent` and `state`, which comes without models.

    Returns:
      `(state, into [K], means [K, ...], metrics)`: `into` as in `Decision`, each cluster's mean update. The caller puts
      the models back into the state.
    """
    capacity = len(state.active)

    # Compare updates, or gradients.
    vectors = rules.compared(sent.updates)
    if rules.similarity == "gradients":
        vectors = rules.compared(sent.gradients())
        finite = finite_rows(rows_of(vectors))
        sent = sent._replace(usable=sent.usable & finite, comparable=sent.comparable & finite)
    voice = sent.comparable & sent.able

    def means(vectors: PyTree, cluster: jax.Array, weight: jax.Array) -> PyTree:
        """Returns the weighted mean of each cluster's vectors, `[K, ...]`, added up in the order of the clients."""
        if rules.aggregator is None:
            return cluster_mean(vectors, cluster, weight, capacity, client_axis)
        robust, plain = divided(rules.statistics, vectors)
        robust = robust_cluster_mean(rules.aggregator, robust, cluster, weight > 0, capacity)
        return joined(robust, cluster_mean(plain, cluster, weight, capacity, client_axis) if plain else ())

    # Norms: the mean update of each cluster, and its longest update. With a cohort, old updates are longer than new
    # ones; the longest is then one of this round, so that age does not count as disagreement.
    norms = jnp.sqrt(squared_norms(rows_of(vectors)))
    voice = voice if rules.compares_zero else voice & (norms > 0)
    newest = voice if rules.cohort is None else voice & sent.usable
    max_norm = jax.ops.segment_max(jnp.where(newest, norms, 0.0), state.cluster, capacity)
    max_norm = jnp.maximum(max_norm, 0.0)
    mean_vectors = means(vectors, state.cluster, jnp.where(voice, sent.voice_weight, 0.0))
    mean_norm = jnp.sqrt(squared_norms(rows_of(mean_vectors)))
    members = jax.ops.segment_sum(voice.astype(jnp.int32), state.cluster, capacity)
    scale = jnp.where(state.scale[1] == 0, jnp.stack([mean_norm[0], max_norm[0]]), state.scale)
    state = state._replace(scale=scale)

    # Bipartitions of the clusters that are ripe for one.
    stationary, wanted = rules.ripe(state, mean_norm, max_norm, members)
    examined = state.active & ~state.final & (members > 0)
    wanted = wanted & examined
    if rules.cohort is not None:
        expected = sent.able & ~sent.pending
        wanted = wanted & enough_known(voice, expected, state.cluster, capacity)
        # Old updates say little on the model of today: a cluster ends in a round with most of its clients.
        examined = examined & enough_known(newest, expected, state.cluster, capacity, most=True)
    stationary = stationary & examined

    def compare():
        options = {"min_size": rules.min_size, "linkage": rules.linkage}
        return bipartitions(vectors, state.cluster, voice, wanted, client_axis, **options)

    nothing = no_splits(capacity, len(voice))
    splits = if_rare(wanted.any(), compare, lambda: nothing)
    accepted = wanted & rules.accept(splits)
    metrics = {"decisions": wanted.sum().astype(jnp.int32)}
    if rules.thresholds is not None:
        metrics["thresholds"] = rules.thresholds(state)
    if rules.true_cluster is not None:
        known = rules.true_cluster, capacity, client_axis
        metrics["separation_gap"] = separation_gaps(vectors, state.cluster, voice, *known)

    # The decision, and the mean of each cluster after it: the children of a split average their own clients' updates.
    found = Found(vectors, voice, members, stationary, splits, accepted)
    state, into, full, weight, more = rules.decide(rules, state, sent, found)
    slots = jnp.arange(capacity, dtype=jnp.int32)
    metrics |= more | {
        "mean_norm": mean_norm,
        "max_norm": max_norm,
        "cross_similarity": splits.cross_similarity,
        "split_from": jnp.full(capacity, -1, jnp.int32).at[into].set(slots, mode="drop"),
        "num_clusters": state.active.sum().astype(jnp.int32),
        "num_excluded": (state.excluded > 0).sum().astype(jnp.int32),
        "capacity_reached": full,
    }
    mean_updates = means(sent.updates, state.cluster, weight)
    mean_updates = shared_means(rules.shared, mean_updates, sent.updates, weight, client_axis)
    return state._replace(round=state.round + 1), into, mean_updates, metrics
