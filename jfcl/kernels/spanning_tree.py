"""Maximum spanning trees of similarities, and their weakest edge that leaves enough clients on both sides.

Prim's algorithm takes N steps over one row of similarities each. Clients of different clusters count as less similar
than any two of one cluster, so that one run finds the trees of all clusters, one after the other. The Euler tour of a
tree passes every edge twice. Between the two lies the subtree below the edge, so the positions on the tour give the
sizes of all subtrees at once. Pointer doubling (Tarjan and Vishkin 1985) finds the positions in `log2 N` steps on whole
arrays, at any depth.

On an accelerator, Borůvka's algorithm (1926) takes `log2 N` steps (`weakest_joins`), as in `bipartition_of_updates`,
but with all similarities at hand. A step costs some passes over `[N, N]`, which take as long on a GPU or TPU as a step
of Prim's algorithm over `[N]`, of which there are N. A group's join is its largest similarity to an outsider: the
largest across one bipartition. So no join is below the optimal cross similarity. All joins together connect the
cluster, so that one of them crosses the optimal bipartition: the weakest join is the optimal cross similarity. That
holds for any choice among equals, also where joins form circles.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jfcl.kernels.base import sum_dtype

# Similarities are compared as integers in the same order: integer maxima vectorise, float ones (NaN!) do not, and two
# reductions, the maximum and then the first place where it stands, beat one `argmax` five times over.


def order_key(x: jax.Array) -> jax.Array:
    """Returns integers in the order of the floats `x`; NaN and infinities count as -1, and -0.0 as 0.0."""
    x = x.astype(sum_dtype(x))
    x = jnp.where(jnp.isfinite(x), jnp.where(x == 0, jnp.zeros_like(x), x), -jnp.ones_like(x))
    bits, most = _bits(x.dtype)
    i = jax.lax.bitcast_convert_type(x, bits)
    return i ^ ((i >> (8 * x.dtype.itemsize - 1)) & most)


def float_of_key(key: jax.Array) -> jax.Array:
    """Returns the float of an `order_key`."""
    dtype = jnp.dtype(jnp.float32 if key.dtype == jnp.int32 else jnp.float64)
    _, most = _bits(dtype)
    return jax.lax.bitcast_convert_type(key ^ ((key >> (8 * dtype.itemsize - 1)) & most), dtype)


def _bits(dtype):
    bits = jnp.int32 if dtype.itemsize == 4 else jnp.int64
    return bits, jnp.array(jnp.iinfo(bits).max, bits)


def first_max(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the largest key and the first place at which it stands."""
    largest = key.max()
    places = jnp.arange(len(key), dtype=jnp.int32)
    return largest, jnp.where(key == largest, places, len(key)).min()


class TreeEdges(NamedTuple):
    """Edges, `[E]` each: the two ends int32, the similarity's integer key, and which edges exist."""

    left: jax.Array
    right: jax.Array
    key: jax.Array
    real: jax.Array


def key_limits(kind) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns three keys: below that of any float, the next one, which stands between clusters, and above."""
    lowest, highest = jnp.iinfo(kind).min, jnp.iinfo(kind).max
    return jnp.array(lowest, kind), jnp.array(lowest + 1, kind), jnp.array(highest, kind)


def _keys_of(client: jax.Array, similarity: jax.Array, cluster: jax.Array | None) -> jax.Array:
    """Returns `[N]`, the keys of one client's similarities; those to other clusters are the lowest but one."""
    keys = order_key(jax.lax.dynamic_index_in_dim(similarity, client, keepdims=False))
    return keys if cluster is None else jnp.where(cluster == cluster[client], keys, key_limits(keys.dtype)[1])


def join_order(
    similarity: jax.Array, active: jax.Array, cluster: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Runs Prim's algorithm from the first active client, ties to the lowest index.

    Args:
      similarity: `[N, N]`.
      active: `[N]` bool.
      cluster: `[N]` int32; default: one cluster of all. The clusters' clients join one cluster after the other, in each
        from its first active client on.

    Returns:
      `step` `[N]` int32: when each client joins the tree, the first active one at 0 (undefined for inactive ones);
      `joined_at` `[N]` integer keys: the similarity at which the client of step `t` joins, the largest key for the
      first client of a cluster and after the last active client.
    """
    count = len(similarity)
    first = jnp.argmax(active).astype(jnp.int32)
    num_active = active.sum()
    kind = order_key(similarity[0]).dtype
    out, apart, largest = key_limits(kind)
    # `best` is each client's largest similarity to the tree, and at most `limit`, which is the lowest key for clients
    # that are in the tree already, or inactive.
    limit = jnp.where(active, largest, out).at[first].set(out)

    def put(array, value, place):
        return jax.lax.dynamic_update_index_in_dim(array, value, place, 0)

    def join(t, carry):
        best, limit, newest, step, joined_at = carry
        best = jnp.minimum(jnp.maximum(best, _keys_of(newest, similarity, cluster)), limit)
        highest, newest = first_max(best)
        highest = jnp.where((t < num_active) & (highest > apart), highest, largest)
        step = put(step, jnp.where(t < num_active, t, step[newest]), newest)
        return best, put(limit, out, newest), newest, step, put(joined_at, highest, t)

    carry = (jnp.full(count, out), limit, first, jnp.zeros(count, jnp.int32), jnp.full(count, largest))
    return jax.lax.fori_loop(1, count, join, carry)[3:]


def spanning_tree(similarity: jax.Array, active: jax.Array, cluster: jax.Array | None = None) -> TreeEdges:
    """Returns each cluster's maximum spanning tree of active clients; edge `i` joins client `i` to its parent.

    Of equal similarities the pair `(i, j)`, `i < j`, first in lexicographic order counts as the largest: for one client
    that is the lowest other one.
    """
    count = len(similarity)
    out, apart, _ = key_limits(order_key(similarity[:1]).dtype)
    places = jnp.arange(count, dtype=jnp.int32)
    root = jnp.argmax(active).astype(jnp.int32)

    def lowest(values, among):
        return jnp.where(among, values, count).min()

    def join(_, carry):
        best, parent, outside, newest = carry
        row = _keys_of(newest, similarity, cluster)
        closer = outside & ((row > best) | ((row == best) & (newest < parent)))
        best, parent = jnp.where(closer, row, best), jnp.where(closer, newest, parent)
        low, high = jnp.minimum(places, parent), jnp.maximum(places, parent)
        first = outside & (best == jnp.where(outside, best, out).max())
        first = first & (low == lowest(low, first))
        newest = jnp.minimum(lowest(places, first & (high == lowest(high, first))), count - 1)
        return best, parent, outside & (places != newest), newest

    carry = (jnp.full(count, out), jnp.full(count, count, jnp.int32), active & (places != root), root)
    best, parent, _, _ = jax.lax.fori_loop(1, count, join, carry)
    real = active & (places != root) & (best > apart)
    return TreeEdges(places, jnp.where(real, parent, places), best, real)


def cut_with_size(
    edges: TreeEdges, root: jax.Array, count: int, min_size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Removes the weakest edge that leaves at least `min_size` nodes on both sides.

    Args:
      edges: a tree that contains `root`.
      root: `[]` int32, a node.
      count: `N`; nodes are `0 .. N-1`, those outside the tree are on neither side.
      min_size: at least 1.

    Returns:
      `(side, key, found)`: `[N]` bool, the part without the root; `[]`, the key of the removed edge; `[]` bool. Where
      no edge leaves enough nodes on both sides, `side` is all False and `key` is undefined. Of equal keys the edge
      `(i, j)`, `i < j`, that comes last in lexicographic order is the weakest.

    Cost: one sort of `2 E` integers and `O(E log E)` operations in `log2 E` steps.
    """
    position = tour_positions(edges, root, count)
    out, back = jnp.split(position, 2)
    enter, leave = jnp.minimum(out, back), jnp.maximum(out, back)
    below = (leave - enter + 1) // 2
    nodes = edges.real.sum().astype(jnp.int32) + 1
    usable = edges.real & (below >= min_size) & (nodes - below >= min_size)

    def among(usable, key, lowest):
        """Returns the `usable` edges with the lowest or highest `key`."""
        end = jnp.iinfo(key.dtype).max if lowest else jnp.iinfo(key.dtype).min
        masked = jnp.where(usable, key, jnp.array(end, key.dtype))
        return usable & (masked == (masked.min() if lowest else masked.max()))

    weakest = among(usable, edges.key, lowest=True)
    weakest = among(weakest, jnp.minimum(edges.left, edges.right), lowest=False)
    weakest = among(weakest, jnp.maximum(edges.left, edges.right), lowest=False)
    edge = jnp.argmax(weakest)
    found = usable.any()
    walked = (position >= enter[edge]) & (position < leave[edge]) & jnp.tile(edges.real, 2) & found
    target = jnp.concatenate([edges.right, edges.left])
    side = jnp.zeros(count, bool).at[jnp.where(walked, target, count)].set(True, mode="drop")
    return side, edges.key[edge], found


def tour_positions(edges: TreeEdges, root: jax.Array, count: int) -> jax.Array:
    """Returns `[2 E]` int32: the step of the Euler tour from `root` at each edge, to the right (`:E`) and back (`E:`).

    After `u -> v` the tour takes the edge after `v -> u` in the cyclic order of all edges out of `v`.
    """
    num_walks = 2 * len(edges.left)
    source = jnp.where(jnp.tile(edges.real, 2), jnp.concatenate([edges.left, edges.right]), count)
    order = jnp.argsort(source, stable=True).astype(jnp.int32)
    sources = source[order]
    places = jnp.arange(num_walks, dtype=jnp.int32)
    first = jax.ops.segment_min(places, sources, count + 1, indices_are_sorted=True)
    is_last = jnp.append(sources[1:] != sources[:-1], True)
    following = jnp.zeros(num_walks, jnp.int32).at[order].set(order[jnp.where(is_last, first[sources], places + 1)])
    after = following[jnp.roll(places, num_walks // 2)]

    start = order[jnp.minimum(first[root], num_walks - 1)]
    is_end = after == start
    after = jnp.where(is_end, places, after)
    to_end = jnp.where(is_end, 0, 1)

    def double(_, carry):
        to_end, after = carry
        return to_end + to_end[after], after[after]

    to_end, _ = jax.lax.fori_loop(0, math.ceil(math.log2(num_walks)), double, (to_end, after))
    return to_end[start] - to_end


# The optimal bipartition of every cluster in `log2 N` steps on whole matrices, for accelerators.


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
