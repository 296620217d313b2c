"""The optimal bipartition of every cluster in `log2 N` steps on whole matrices, for accelerators.

Borůvka's algorithm (1926), as in `bipartition_of_updates`, but with all similarities at hand. A step costs some passes
over `[N, N]`, which take as long on a GPU or TPU as a step of Prim's algorithm over `[N]`, of which there are N.

A group's join is its largest similarity to an outsider: the largest across one bipartition. So no join is below the
optimal cross similarity. All joins together connect the cluster, so that one of them crosses the optimal bipartition:
the weakest join is the optimal cross similarity. That holds for any choice among equals, also where joins form circles.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jfcl.kernels.spanning_tree import key_limits, order_key


def weakest_joins(
    similarity: jax.Array, active: jax.Array, cluster: jax.Array, num_clusters: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the optimal cross similarity of every cluster, and the sides of its bipartition.

    Args:
      similarity: `[N, N]`, symmetric.
      active: `[N]` bool; the others are on no side.
      cluster: `[N]` int32 in `0..K-1`.
      num_clusters: `K`.

    Returns:
      `(side [N] bool, key [K])`: clients that similarities above the cross similarity do not connect to their cluster's
      first active client, and the integer keys of cross similarities; undefined for clusters of fewer than two.
    """
    count = len(active)
    places = jnp.arange(count, dtype=jnp.int32)
    keys = order_key(similarity)
    out = key_limits(keys.dtype)[0]
    pair = active[:, None] & active[None, :] & (cluster[:, None] == cluster[None, :])
    keys = jnp.where(pair, keys, out)
    joined_at = jax.ops.segment_min(components(keys)[1], cluster, num_clusters)
    group = components(jnp.where(keys > joined_at[cluster][:, None], keys, out))[0]
    first = jax.ops.segment_min(jnp.where(active, places, count - 1), cluster, num_clusters)
    return active & (group != group[first[cluster]]), joined_at


def components(keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Joins every group to that of its most similar outsider, until no group has an outsider.

    Args:
      keys: `[N, N]` symmetric integers, the lowest one where there is no connection.

    Returns:
      `(group [N] int32, weakest [N])`: a member, by which each client's group is named, and the smallest key of the
      joins of the groups that the client was in; the largest integer without one.
    """
    count = len(keys)
    out, _, largest = key_limits(keys.dtype)
    places = jnp.arange(count, dtype=jnp.int32)
    rounds = max(math.ceil(math.log2(count)), 1)  # the number of groups with outsiders at least halves

    def at(x, place):
        """Returns `x[place]` by comparisons, which a TPU does faster than a gather."""
        return jnp.where(place[:, None] == places[None, :], x[None, :], -1).max(axis=1)

    def join(_, carry):
        group, weakest = carry
        same = group[:, None] == group[None, :]
        best = jnp.where(same, out, keys).max(axis=1)
        best = jnp.where(same, best[None, :], out).max(axis=1)  # of the group
        target = jnp.where(~same & (keys == best[:, None]), group[None, :], count).min(axis=1)
        target = jnp.where(same, target[None, :], count).min(axis=1)
        joins = best > out

        # A group's new name is the lowest one on the circle in which its chain of targets ends.
        def double(_, carry):
            ahead, lowest = carry
            return at(ahead, ahead), jnp.minimum(lowest, at(lowest, ahead))

        ahead = jnp.where(joins, target, group)
        ahead, lowest = jax.lax.fori_loop(0, rounds + 1, double, (ahead, jnp.minimum(group, ahead)))
        return at(lowest, ahead), jnp.where(joins, jnp.minimum(weakest, best), weakest)

    return jax.lax.fori_loop(0, rounds, join, (places, jnp.full(count, largest)))
