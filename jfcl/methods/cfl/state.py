"""The state of Clustered Federated Learning, and the server's memory of updates."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jfcl.core import Cohort, PyTree
from jfcl.methods.round import put_rows, take_rows
from jfcl.robust.aggregate import where_rows


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
      sides: `jfcl.methods.cfl.splits.Sides`, for clients that a split did not place; `()` where no split is possible.
      heard: `LastUpdates`, with a cohort in each round; else `()`.
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


class LastUpdates(NamedTuple):
    """The last update of every client, for runs with a cohort in each round.

    Two clients can be compared only where the updates of both are known, and a cohort seldom holds all clients of a
    cluster. An update from before the last change of its cluster was computed at another model, and does not count.

    Attributes:
      update: pytree of `[N, ...]`, the last update, as it was sent.
      round: `[N]` int32, the round in which it was computed; 0 for clients without one. Its age is `state.round` less
        this.
      size: `[N]` int32, examples of the client; 0 for clients that have never been in a cohort.
      mute: `[N]` bool, clients whose last update was not finite.
    """

    update: PyTree
    round: jax.Array
    size: jax.Array
    mute: jax.Array


def no_updates(sent: PyTree, count: int) -> LastUpdates:
    """Returns the `LastUpdates` of `count` clients before the first round; `sent`: shapes of one client's update."""
    update = jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), sent)
    return LastUpdates(update, jnp.zeros(count, jnp.int32), jnp.zeros(count, jnp.int32), jnp.zeros(count, bool))


def known_size(last: Any, size: jax.Array) -> jax.Array:
    """Returns `[N]` int32: `size`, or the remembered size of clients that are absent (0). `last` may be `()`."""
    size = jnp.asarray(size, jnp.int32)
    return jnp.where(size > 0, size, last.size) if isinstance(last, LastUpdates) else size


def remember_updates(
    last: LastUpdates, cohort: Cohort, updates: PyTree, when: jax.Array, here: jax.Array, usable: jax.Array
) -> LastUpdates:
    """Returns the last updates after a round; clients of the cohort without a `usable` update keep their earlier one.

    `when` `[C]` is the round, 0 for updates that were not computed at the model of the client's cluster.
    """
    arrays = last.update, last.round, last.mute
    update, before, mute = take_rows(cohort, arrays)
    new = where_rows(usable, updates, update), jnp.where(usable, when, before), jnp.where(here, ~usable, mute)
    update, rounds, mute = put_rows(cohort, arrays, new)
    return LastUpdates(update, rounds, last.size, mute)


def enough_known(
    compared: jax.Array, able: jax.Array, cluster: jax.Array, capacity: int, *, most: bool = False
) -> jax.Array:
    """Returns the clusters `[K]` in which half of the `able` clients `[N]` (with `most`, more) are `compared`."""
    num_compared, all_able = (jax.ops.segment_sum(x.astype(jnp.int32), cluster, capacity) for x in (compared, able))
    return (2 * num_compared >= all_able + int(most)) & (num_compared > 0)
