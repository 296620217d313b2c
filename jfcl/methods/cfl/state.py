"""The state of Clustered Federated Learning."""

from __future__ import annotations

from typing import NamedTuple

import jax

from jfcl.core import PyTree


class ParameterTree(NamedTuple):
    """The record of all splits, by the slot `k` of the cluster that each made (section V-C). See `parameter_tree`.

    Attributes:
      born: `[K]` int32, the round of the split; 0 where there was none.
      cross_similarity: `[K]`, of the bipartition.
      model: pytree of `[K, ...]`, the parent's model before the split.
      side: `[K, N]` int8: 0 for clients not in the parent, 1 for those that stayed in its slot, 2 for those that moved.
      updates: `[K, N, S]`, the updates of the parent's clients: all numbers if those are at most `tree_dim`, else
        `tree_dim` sums of them with random signs. Cosines of these sums are off by about `1 / sqrt(tree_dim)`.
      privacy: `[]` int32, how the updates were hidden: 0 for not at all, else 1 + the index in `OPERATORS`.
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
      final: `[K]` bool, clusters that are not examined any more.
      round: `[]` int32, rounds done.
      scale: `[2]`, mean and largest update norm of the first round, for relative thresholds.
      excluded: `[N]` int32, the round in which a client was excluded or has left; 0 for the others.
      tree: `ParameterTree`.
      client: the local optimisers' states `[N, ...]` under `keep="everything"`, else `()`.
      sides: `jfcl.methods.cfl.sides.Sides`, for clients that a split did not place; `()` where no split is possible.
      heard: `jfcl.methods.cfl.last_updates.LastUpdates`, with a cohort in each round; else `()`.
      personal: the clients' own parameters `[N, ...]`, as in `AveragingState`; `()` without any.
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
    personal: PyTree = ()
