"""Maximum spanning trees of similarities, and their weakest edge that leaves enough clients on both sides.

Prim's algorithm takes N steps over one row of similarities each. Clients of different clusters count as less similar
than any two of one cluster, so that one run finds the trees of all clusters, one after the other. `join_order` finds
no more than the bipartition needs, `spanning_tree` the edges too.

On an accelerator, Borůvka's algorithm (1926) takes `log2 N` steps (`weakest_joins`). A step costs some passes over
`[N, N]`, which take as long there as one of Prim's N steps over `[N]`. A group's join is its largest similarity to an
outsider, the largest across one bipartition, and so not below the optimal cross similarity. All joins together connect
the cluster, so that one of them crosses the optimal bipartition: the weakest join is the optimal cross similarity. That
holds for any choice among equals, also where joins form circles.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jfcl.kernels.base import sum_dtype

# Similarities are compared as integers in the same order: integer maxima vectorise, float ones (NaN!) do not, and the
# maximum, then the first place where it stands, is five times as fast as one `argmax`.


def order_key(x: jax.Array) -> jax.Array:
    """Returns integers in the order of the floats `x`; NaN and infinities count as -1, and -0.0 as 0.0."""
    x = x.astype(sum_dtype(x))
    x = jnp.where(jnp.isfinite(x), jnp.where(x == 0, jnp.zeros_like(x), x), -jnp.ones_like(x))
    return _with_negatives_reversed(jax.lax.bitcast_convert_type(x, jnp.int32 if x.dtype.itemsize == 4 else jnp.int64))


def float_of_key(key: jax.Array) -> jax.Array:
    """Returns the float of an `order_key`."""
    dtype = jnp.float32 if key.dtype == jnp.int32 else jnp.float64
    return jax.lax.bitcast_convert_type(_with_negatives_reversed(key), dtype)


def _with_negatives_reversed(i: jax.Array) -> jax.Array:
    """Returns integers with all bits of negative ones but the sign flipped: bits of floats become keys, keys bits."""
    return i ^ ((i >> (8 * i.dtype.itemsize - 1)) & jnp.iinfo(i.dtype).max)


def key_limits(dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns three keys: one below those of all floats, the next, which stands between clusters, and one above all."""
    limits = jnp.iinfo(dtype)
    return tuple(jnp.array(key, dtype) for key in (limits.min, limits.min + 1, limits.max))


def _keys_of(client: jax.Array, similarity: jax.Array, cluster: jax.Array | None) -> jax.Array:
    """Returns `[N]`, the keys of one client's similarities; those to other clusters are the lowest but one."""
    keys = order_key(jax.lax.dynamic_index_in_dim(similarity, client, keepdims=False))
    return keys if cluster is None else jnp.where(cluster == cluster[client], keys, key_limits(keys.dtype)[1])


def join_order(
    similarity: jax.Array, active: jax.Array, cluster: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Runs Prim's algorithm, in every cluster from its first active client, ties to the lowest index.

    The results are `[N]`: the step at which each active client joins, and, by step, the key of the similarity at which
    a client joins, the largest one for the first client of a cluster.
    """
    count = len(similarity)
    first = jnp.argmax(active).astype(jnp.int32)
    num_active = active.sum()
    dtype = order_key(similarity[0]).dtype
    out, apart, largest = key_limits(dtype)
    # `best` is each client's largest similarity to the tree, and at most `limit`, which is the lowest key for clients
    # that are in the tree already, or inactive.
    limit = jnp.where(active, largest, out).at[first].set(out)

    put = partial(jax.lax.dynamic_update_index_in_dim, axis=0)

    def join(t, carry):
        best, limit, newest, step, joined_at = carry
        best = jnp.minimum(jnp.maximum(best, _keys_of(newest, similarity, cluster)), limit)
        highest = best.max()
        newest = jnp.where(best == highest, jnp.arange(count, dtype=jnp.int32), count).min()
        highest = jnp.where((t < num_active) & (highest > apart), highest, largest)
        step = put(step, jnp.where(t < num_active, t, step[newest]), newest)
        return best, put(limit, out, newest), newest, step, put(joined_at, highest, t)

    carry = (jnp.full(count, out), limit, first, jnp.zeros(count, jnp.int32), jnp.full(count, largest))
    return jax.lax.fori_loop(1, count, join, carry)[3:]


class Tree(NamedTuple):
    """Maximum spanning trees, `[N]` each."""

    parent: jax.Array  # of each client, itself for a root
    key: jax.Array  # of the similarity to the parent
    real: jax.Array  # whether there is a parent
    order: jax.Array  # the clients as they join, so after their parents


def spanning_tree(similarity: jax.Array, active: jax.Array, cluster: jax.Array | None = None) -> Tree:
    """Returns each cluster's maximum spanning tree of active clients.

    Of equal similarities, that of the pair `(i, j)`, `i < j`, first in lexicographic order counts as the largest.
    """
    count = len(similarity)
    out, apart, _ = key_limits(order_key(similarity[:1]).dtype)
    places = jnp.arange(count, dtype=jnp.int32)
    root = jnp.argmax(active).astype(jnp.int32)

    def lowest(values, mask):
        return jnp.where(mask, values, count).min()

    def join(t, carry):
        best, parent, outside, newest, order = carry
        row = _keys_of(newest, similarity, cluster)
        closer = outside & ((row > best) | ((row == best) & (newest < parent)))
        best, parent = jnp.where(closer, row, best), jnp.where(closer, newest, parent)
        low, high = jnp.minimum(places, parent), jnp.maximum(places, parent)
        first = outside & (best == jnp.where(outside, best, out).max())
        first = first & (low == lowest(low, first))
        newest = jnp.minimum(lowest(places, first & (high == lowest(high, first))), count - 1)
        order = order.at[t].set(jnp.where(outside.any(), newest, root))
        return best, parent, outside & (places != newest), newest, order

    nobody = jnp.full(count, count, jnp.int32)
    carry = (jnp.full(count, out), nobody, active & (places != root), root, jnp.full(count, root))
    best, parent, _, _, order = jax.lax.fori_loop(1, count, join, carry)
    real = active & (places != root) & (best > apart)
    return Tree(jnp.where(real, parent, places), best, real, order)


def cut_with_size(
    tree: Tree, active: jax.Array, cluster: jax.Array, num_clusters: int, min_size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Removes the weakest edge of every cluster's tree that leaves at least `min_size` clients on both sides.

    Returns:
      `(side, key, exists)`: `[N]` bool, the part without the cluster's first active client; `[K]`, the key of the
      removed edge; `[K]` bool, whether there is one.
    """
    parent, key, real, order = tree
    count = len(active)
    places = jnp.arange(count, dtype=jnp.int32)

    def add(i, below):  # from the leaves to the roots
        client = order[count - 1 - i]
        return below.at[parent[client]].add(jnp.where(real[client], below[client], 0))

    def mark(i, side):
        client = order[i]
        return side.at[client].set(side[client] | (real[client] & side[parent[client]]))

    def highest(usable, value):
        """Returns the `usable` edges with the highest value of their cluster."""
        value = jnp.where(usable, value, jnp.iinfo(value.dtype).min)
        return usable & (value == jax.ops.segment_max(value, cluster, num_clusters)[cluster])

    below = jax.lax.fori_loop(0, count, add, active.astype(jnp.int32))
    members = jax.ops.segment_sum(active.astype(jnp.int32), cluster, num_clusters)
    usable = real & (below >= min_size) & (members[cluster] - below >= min_size)
    weakest = usable
    for value in (~key, jnp.minimum(places, parent), jnp.maximum(places, parent)):  # `~` reverses the order
        weakest = highest(weakest, value)
    side = jax.lax.fori_loop(0, count, mark, weakest)
    first = jax.ops.segment_min(jnp.where(active, places, count - 1), cluster, num_clusters)
    exists = jax.ops.segment_sum(usable.astype(jnp.int32), cluster, num_clusters) > 0
    side = (side ^ side[first[cluster]]) & active & exists[cluster]
    removed = jax.ops.segment_max(jnp.where(weakest, key, jnp.iinfo(key.dtype).min), cluster, num_clusters)
    return side, removed, exists


def weakest_joins(
    similarity: jax.Array, active: jax.Array, cluster: jax.Array, num_clusters: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the sides of every cluster's optimal bipartition, and its cross similarity, in `log2 N` steps.

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

    `keys` are `[N, N]` symmetric integers, the lowest one where there is no connection. The result is
    `(group [N] int32, weakest [N])`: a member, by which each client's group is named, and the smallest key of the joins
    of the groups that the client was in; the largest integer without one.
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
