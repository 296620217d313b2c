"""The optimal bipartition of a cluster (Clustered Federated Learning, equation 25 and Algorithm 1), and dendrograms.

Merging the most similar pairs until two groups are left is Kruskal's maximum spanning tree less its weakest edge:
single linkage. Prim's algorithm finds the same in N steps over one row of similarities each: the clients in the order
in which they join, and the similarity at which each does. Everything here is read off those two vectors:

* the weakest joining similarity is the optimal cross similarity, and all who joined before are one side;
* groups at any level are runs of that order, so the dendrogram is the tree of its weakest places.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jfcl.core.checks import check
from jfcl.kernels.base import is_computable, row_mask, sum_dtype
from jfcl.kernels.similarity import as_clusters, as_similarity
from jfcl.kernels.spanning_tree import TreeEdges, cut_with_size

LINKAGES = ("single", "complete")


class Bipartition(NamedTuple):
    """Two sides of a cluster.

    `side`: `[N]` bool, False for the first active client's side (and for inactive clients).
    `cross_similarity`: `[]`, the largest similarity across; `inf` where fewer than two clients are active, the
    minimum over no bipartition at all. (With `min_size` above 1: the similarity of the edge removed.)
    """

    side: jax.Array
    cross_similarity: jax.Array


def optimal_bipartition(
    similarity: jax.Array, active: jax.Array | None = None, *, linkage: str = "single", min_size: int = 1
) -> Bipartition:
    """The bipartition whose largest similarity across is smallest (Clustered Federated Learning, equation 25).

    Several bipartitions can be optimal when similarities are equal. Then the side of the first active client is the
    smallest possible: everybody connected to it through similarities above `cross_similarity`, and nobody else. That
    depends on values alone, not on the order in which an algorithm happens to look at them.

    With `min_size` above 1: of all edges of the maximum spanning tree of the active clients, the weakest whose removal
    leaves at least `min_size` clients on both sides is removed, as in HDBSCAN's condensed tree (Campello, Moulavi,
    Sander 2013). The sides are the two components of the tree without that one edge, and `cross_similarity` is that
    edge's similarity. This is not the minimum of equation 25 over bipartitions with `min_size` clients on each side:
    that minimum is reached by collecting the outliers of all groups on one side, which separates no groups. Of equal
    similarities that of the pair `(i, j)`, `i < j`, first in lexicographic order counts as the largest, so that
    the tree and the edge are unique; the sides then depend on the clients' numbers too.

    Args:
      similarity: `[N, N]`, symmetric; the diagonal is not looked at.
      active: `[N]` bool, the members of the cluster to split; default all. Others are on neither side's account.
      linkage: `"single"`: the paper's, exact. `"complete"`: what the authors' later public code does instead, the
        last merge of complete linkage; it keeps sides compact and is not optimal in the sense of the paper.
      min_size: clients that either side must have; above 1 for single linkage only (complete linkage has no spanning
        tree, only its last merge).

    Returns:
      `Bipartition(side [N] bool, cross_similarity [])`. Where no edge leaves `min_size` clients on both sides, `side`
      is all False and `cross_similarity` is `inf`. Inside `jit`, NaN and infinite similarities count as -1.

    Raises:
      ValueError: not square, not symmetric, NaN or infinity (the last two outside `jit` only), an unknown linkage;
        `min_size` below 1, not an integer, more than half of `N`, or above 1 with complete linkage.

    Cost: `N` steps of `O(N)`, each similarity read once. With `min_size` above 1 the same and a sort of `2 N` integers.
    Complete linkage: at most `3 N` such steps, and a copy.

    Example:
      >>> import jax.numpy as jnp
      >>> a = jnp.array([[1.0, 0.9, 0.1], [0.9, 1.0, -0.2], [0.1, -0.2, 1.0]])
      >>> side, cross = optimal_bipartition(a)
      >>> side.tolist(), round(float(cross), 3)
      ([False, False, True], 0.1)

      Two groups and an outlier, which `min_size` leaves with the group that it is nearest to:

      >>> x = jnp.array([0.0, 1.0, 6.0, 7.0, 20.0])
      >>> a = 1 - jnp.abs(x[:, None] - x[None, :]) / 20
      >>> optimal_bipartition(a).side.tolist(), optimal_bipartition(a, min_size=2).side.tolist()
      ([False, False, False, False, True], [False, False, True, True, True])
    """
    similarity = as_similarity(similarity)
    check(linkage in LINKAGES, "linkage", linkage, f"one of {LINKAGES}")
    min_size = as_min_size(min_size, len(similarity))
    check(min_size == 1 or linkage == "single", "min_size", min_size, 'for linkage="complete" 1')
    active = row_mask(active, len(similarity), name="active")
    return _optimal_bipartition(similarity, active, linkage, min_size)


def as_min_size(min_size: Any, count: int) -> int:
    """`min_size` as an `int`, or a `ValueError`."""
    integer = isinstance(min_size, (int, np.integer)) and not isinstance(min_size, bool)
    check(integer and min_size >= 1, "min_size", min_size, "an integer, at least 1")
    fits = min_size == 1 or 2 * min_size <= count
    advice = "for two sides of that many; choose a smaller one or add clients"
    check(fits, "min_size", int(min_size), f"at most half of the N = {count} clients, {count // 2}, {advice}")
    return int(min_size)


@jax.jit(static_argnames=("linkage", "min_size"))
def _optimal_bipartition(similarity, active, linkage, min_size=1):
    if linkage == "complete" and len(similarity) > 1:
        return _complete(similarity, active)[0]
    if min_size > 1:
        return bipartition_of_tree(_spanning_tree(similarity, active), active, min_size)
    step, joined_at = _prim(similarity, active)
    weakest = jnp.argmin(joined_at)  # the first weakest: what joined before it hangs together by more
    cross = float_of_key(joined_at[weakest])
    two = active.sum() >= 2
    return Bipartition((step >= weakest) & active & two, jnp.where(two, cross, jnp.inf).astype(cross.dtype))


def bipartition_of_tree(edges: TreeEdges, active: jax.Array, min_size: int) -> Bipartition:
    """The bipartition by the weakest edge of a spanning tree of the active clients with `min_size` on both sides."""
    cut = cut_with_size(edges, jnp.argmax(active).astype(jnp.int32), len(active), min_size)
    cross = float_of_key(cut.key)
    return Bipartition(cut.side, jnp.where(cut.found, cross, jnp.inf).astype(cross.dtype))


# Similarities are compared as integers in the same order: integer maxima vectorise, float ones (NaN!) do not, and two
# reductions, the maximum and then the first place where it stands, beat one `argmax` five times over.


def order_key(x: jax.Array) -> jax.Array:
    """Integers in the order of the floats `x`; NaN and infinities count as -1, and -0.0 as 0.0."""
    x = x.astype(sum_dtype(x))
    x = jnp.where(jnp.isfinite(x), jnp.where(x == 0, jnp.zeros_like(x), x), -jnp.ones_like(x))
    bits, most = _bits(x.dtype)
    i = jax.lax.bitcast_convert_type(x, bits)
    return i ^ ((i >> (8 * x.dtype.itemsize - 1)) & most)


def float_of_key(key: jax.Array) -> jax.Array:
    """The float that `order_key` came from."""
    dtype = jnp.dtype(jnp.float32 if key.dtype == jnp.int32 else jnp.float64)
    _, most = _bits(dtype)
    return jax.lax.bitcast_convert_type(key ^ ((key >> (8 * dtype.itemsize - 1)) & most), dtype)


def _bits(dtype):
    bits = jnp.int32 if dtype.itemsize == 4 else jnp.int64
    return bits, jnp.array(jnp.iinfo(bits).max, bits)


def _first_max(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    largest = key.max()
    places = jnp.arange(len(key), dtype=jnp.int32)
    return largest, jnp.where(key == largest, places, len(key)).min()


def _prim(similarity: jax.Array, active: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Prim's algorithm from the first active client, ties to the lowest index.

    Returns:
      `step` `[N]` int32: when each client joined, the first active one at 0 (nonsense for inactive ones);
      `joined_at` `[N]` integer keys: the similarity at which the client of step `t` joined, the largest key at step 0
      and after the last active one.
    """
    count = len(similarity)
    lowest, largest = (getattr(jnp.iinfo(_bits(order_key(similarity[:1]).dtype)[0]), name) for name in ("min", "max"))
    first = jnp.argmax(active).astype(jnp.int32)
    num_active = active.sum()
    kind = order_key(similarity[0]).dtype
    out = jnp.array(lowest, kind)
    # `best` is each client's similarity to those inside, and never above `limit`: the lowest key for whoever is inside
    # already, or inactive.
    limit = jnp.where(active, jnp.array(largest, kind), out).at[first].set(out)

    def put(array, value, place):
        return jax.lax.dynamic_update_index_in_dim(array, value, place, 0)

    def join(t, carry):
        best, limit, newest, step, joined_at = carry
        row = order_key(jax.lax.dynamic_index_in_dim(similarity, newest, keepdims=False))
        best = jnp.minimum(jnp.maximum(best, row), limit)
        highest, newest = _first_max(best)
        highest = jnp.where(t < num_active, highest, jnp.array(largest, kind))
        step = put(step, jnp.where(t < num_active, t, step[newest]), newest)
        return best, put(limit, out, newest), newest, step, put(joined_at, highest, t)

    carry = (
        jnp.full(count, out),
        limit,
        first,
        jnp.zeros(count, jnp.int32),
        jnp.full(count, jnp.array(largest, kind)),
    )
    return jax.lax.fori_loop(1, count, join, carry)[3:]


def _spanning_tree(similarity: jax.Array, active: jax.Array) -> TreeEdges:
    """The maximum spanning tree of the active clients by Prim's algorithm; edge `i` joins client `i` to its parent.

    Of equal similarities the pair `(i, j)`, `i < j`, first in lexicographic order counts as the largest: for one client
    that is the lowest other one.
    """
    count = len(similarity)
    kind = order_key(similarity[:1]).dtype
    out = jnp.array(jnp.iinfo(kind).min, kind)
    places = jnp.arange(count, dtype=jnp.int32)
    root = jnp.argmax(active).astype(jnp.int32)

    def lowest(values, among):
        return jnp.where(among, values, count).min()

    def join(_, carry):
        best, parent, outside, newest = carry
        row = order_key(jax.lax.dynamic_index_in_dim(similarity, newest, keepdims=False))
        closer = outside & ((row > best) | ((row == best) & (newest < parent)))
        best, parent = jnp.where(closer, row, best), jnp.where(closer, newest, parent)
        low, high = jnp.minimum(places, parent), jnp.maximum(places, parent)
        first = outside & (best == jnp.where(outside, best, out).max())
        first = first & (low == lowest(low, first))
        newest = jnp.minimum(lowest(places, first & (high == lowest(high, first))), count - 1)
        return best, parent, outside & (places != newest), newest

    carry = (jnp.full(count, out), jnp.full(count, count, jnp.int32), active & (places != root), root)
    best, parent, _, _ = jax.lax.fori_loop(1, count, join, carry)
    real = active & (places != root)
    return TreeEdges(places, jnp.where(real, parent, places), best, real)


def _complete(similarity: jax.Array, active: jax.Array) -> tuple[Bipartition, jax.Array, jax.Array]:
    """Complete linkage by nearest-neighbour chains (Murtagh 1983), ties to the lowest index.

    A chain of clusters, each the most similar of the one before, ends in two that are each other's: they merge.

    Returns:
      The bipartition of the last merge, with the largest similarity across it; `pairs` `[N-1, 2]`: the slots of the
      clusters merged, in order of merging (the second slot goes on); `heights` `[N-1]` keys. Only the first
      `active.sum() - 1` rows mean anything.
    """
    count = len(similarity)
    keys = order_key(similarity)
    out = jnp.array(jnp.iinfo(keys.dtype).min, keys.dtype)
    usable = active[:, None] & active[None, :] & ~jnp.eye(count, dtype=bool)
    keys = jnp.where(usable, keys, out)
    num_merges = active.sum() - 1

    def tip_of(chain, length, alive):
        """The last two of the chain; a new chain begins with the first cluster there is."""
        first = jnp.argmax(alive).astype(jnp.int32)
        return jnp.where(length == 0, first, chain[jnp.maximum(length - 1, 0)]), chain[jnp.maximum(length - 2, 0)]

    def walk(_, carry):
        keys, rows, alive, chain, length, member_of, merged, pairs, heights, side = carry
        going = merged < num_merges
        tip, before = tip_of(chain, length, alive)
        row, row_before = rows
        highest, nearest = _first_max(row)
        back = row[before] == highest  # prefer the one we came from: chains end
        merge = going & back & (length >= 2)

        # Merge `a` into `b`: the new cluster is as similar to others as the less similar of the two.
        a, b = jnp.minimum(before, tip), jnp.maximum(before, tip)
        joint = jnp.minimum(row, row_before).at[a].set(out).at[b].set(out)
        row_a = jnp.where(merge, out, jnp.where(a == tip, row, row_before))
        row_b = jnp.where(merge, joint, jnp.where(b == tip, row, row_before))
        for slot, values in ((a, row_a), (b, row_b)):
            zero = jnp.zeros_like(slot)
            keys = jax.lax.dynamic_update_slice(keys, values[None, :], (slot, zero))
            keys = jax.lax.dynamic_update_slice(keys, values[:, None], (zero, slot))
        side = jnp.where(merge, member_of == a, side)
        place = jnp.where(merge, merged, count)  # out of range: dropped
        pairs = pairs.at[place].set(jnp.stack([a, b]), mode="drop")
        heights = heights.at[place].set(highest, mode="drop")
        alive = alive.at[a].set(jnp.where(merge, False, alive[a]))
        member_of = jnp.where(merge & (member_of == a), b, member_of)

        push = going & ~merge
        chain = chain.at[jnp.where(push, length, count)].set(jnp.where(length == 0, tip, nearest), mode="drop")
        length = length + jnp.where(push, 1, 0) - jnp.where(merge, 2, 0)
        # The rows of the next step are read here, after the last write: read before the next write, they would make
        # XLA copy the whole matrix in every step.
        rows = tuple(keys[i] for i in tip_of(chain, length, alive))
        merged = merged + merge.astype(merged.dtype)
        return keys, rows, alive, chain, length, member_of, merged, pairs, heights, side

    slots = jnp.arange(count, dtype=jnp.int32)
    start = jnp.argmax(active).astype(jnp.int32)
    carry = (
        keys,
        (keys[start], keys[0]),
        active,
        slots,
        jnp.zeros((), jnp.int32),
        slots,
        jnp.zeros((), num_merges.dtype),
        jnp.zeros((max(count - 1, 0), 2), jnp.int32),
        jnp.full(max(count - 1, 0), out),
        jnp.zeros(count, bool),
    )
    *_, pairs, heights, side = jax.lax.fori_loop(0, 3 * count, walk, carry)
    two = active.sum() >= 2
    side = jnp.where(side[jnp.argmax(active)], ~side, side) & active & two
    across = (side[:, None] & (~side & active)[None, :]) & two
    cross = jnp.where(across, float_of_key(order_key(similarity)), -jnp.inf).max()
    return Bipartition(side, jnp.where(two, cross, jnp.inf).astype(cross.dtype)), pairs, heights


def separation_gap(similarity: jax.Array, clusters: jax.Array, active: jax.Array | None = None) -> jax.Array:
    """The separation gap (Clustered Federated Learning, Definition 2): how clearly the true clusters stand apart.

    The smallest similarity of two clients of the same true cluster less the optimal cross similarity. Above 0, the
    optimal bipartition separates no two clients of one cluster. (The paper says "if and only if"; at or below 0 it
    can be right nevertheless.)

    Args:
      similarity: `[N, N]`, symmetric.
      clusters: `[N]` integers, the true clusters.
      active: `[N]` bool: the members of the cluster to split; default all.

    Returns:
      `[]`. Where no two active clients share a cluster, no pair can be separated, and the smallest similarity counts
      as 1; with fewer than two active clients, `-inf`.

    Raises:
      ValueError: as `optimal_bipartition`; clusters of another length.

    Cost: that of `optimal_bipartition`.

    Example:
      >>> import jax.numpy as jnp
      >>> a = jnp.array([[1.0, 0.9, 0.1], [0.9, 1.0, -0.2], [0.1, -0.2, 1.0]])
      >>> round(float(separation_gap(a, jnp.array([0, 0, 1]))), 3)
      0.8
    """
    similarity = as_similarity(similarity)
    clusters = as_clusters(clusters, len(similarity))
    return _separation_gap(similarity, clusters, row_mask(active, len(similarity), name="active"))


@jax.jit
def _separation_gap(similarity, clusters, active):
    pair = active[:, None] & active[None, :] & ~jnp.eye(len(active), dtype=bool)
    same = pair & (clusters[:, None] == clusters[None, :])
    intra = jnp.minimum(jnp.where(same, similarity, jnp.inf).min(), 1.0)
    return intra - _optimal_bipartition(similarity, active, "single").cross_similarity


def single_linkage_tree(similarity: jax.Array) -> jax.Array:
    """The whole single-linkage dendrogram, for what the optimal bipartition costs.

    Args:
      similarity: `[N, N]`, symmetric.

    Returns:
      `[N-1, 4]` in SciPy's `linkage` format: the two clusters merged (`0 .. N-1` are clients, `N + i` is what merge
      `i` made), their distance `1 - similarity`, and the size of the result; ordered by distance. For
      `scipy.cluster.hierarchy` convert it to float64 first; ids are exact up to 2²⁴.

    Raises:
      ValueError: as `optimal_bipartition`.

    Cost: `O(N²)`.

    Example:
      >>> import jax.numpy as jnp
      >>> a = jnp.array([[1.0, 0.5, 0.25], [0.5, 1.0, 0.0], [0.25, 0.0, 1.0]])
      >>> single_linkage_tree(a).tolist()
      [[0.0, 1.0, 0.5, 2.0], [2.0, 3.0, 0.75, 3.0]]
    """
    return _single_linkage_tree(as_similarity(similarity))


@jax.jit
def _single_linkage_tree(similarity):
    count = len(similarity)
    if count == 1:
        return jnp.zeros((0, 4), similarity.dtype)
    step, joined_at = _prim(similarity, jnp.ones(count, bool))
    at_step = jnp.zeros(count, jnp.int32).at[step].set(jnp.arange(count, dtype=jnp.int32))
    gaps = joined_at[1:]  # between the clients of steps t and t + 1
    order = jnp.argsort(gaps, descending=True, stable=True)
    similarities = float_of_key(gaps[order])

    # Clusters are runs of steps; a run is known at its two ends.
    def merge(i, carry):
        begin_of, end_of, name_of, tree = carry  # of a run's last step, of its first step, of its first step
        t = order[i]
        begin, end = begin_of[t], end_of[t + 1]
        left, right = name_of[begin], name_of[t + 1]
        names = jnp.stack([jnp.minimum(left, right), jnp.maximum(left, right)])
        row = jnp.concatenate([names, (end - begin + 1)[None]])
        return (
            begin_of.at[end].set(begin),
            end_of.at[begin].set(end),
            name_of.at[begin].set(count + i),
            tree.at[i].set(row),
        )

    steps = jnp.arange(count, dtype=jnp.int32)
    *_, merges = jax.lax.fori_loop(
        0, count - 1, merge, (steps, steps, at_step, jnp.zeros((max(count - 1, 0), 3), jnp.int32))
    )
    return _tree(merges, similarities)


def _tree(merges: jax.Array, similarities: jax.Array) -> jax.Array:
    """`[N-1, 4]` from `[N-1, 3]` (two names, size) and the similarities of the merges."""
    names = merges.astype(similarities.dtype)
    return jnp.stack([names[:, 0], names[:, 1], 1.0 - similarities, names[:, 2]], axis=1)


def complete_linkage_tree(similarity: jax.Array) -> jax.Array:
    """The complete-linkage dendrogram (the variant of the CFL authors' public code), in SciPy's `linkage` format.

    Args:
      similarity: `[N, N]`, symmetric.

    Returns:
      `[N-1, 4]`, as `single_linkage_tree`; the distance of two clusters is that of their least similar clients.

    Raises:
      ValueError: as `optimal_bipartition`.

    Cost: at most `3 N` steps of `O(N)`, and a copy of the similarities.

    Example:
      >>> import jax.numpy as jnp
      >>> a = jnp.array([[1.0, 0.5, 0.25], [0.5, 1.0, 0.0], [0.25, 0.0, 1.0]])
      >>> complete_linkage_tree(a).tolist()
      [[0.0, 1.0, 0.5, 2.0], [2.0, 3.0, 1.0, 3.0]]
    """
    return _complete_linkage_tree(as_similarity(similarity))


@jax.jit
def _complete_linkage_tree(similarity):
    count = len(similarity)
    if count == 1:
        return jnp.zeros((0, 4), similarity.dtype)
    _, pairs, heights = _complete(similarity, jnp.ones(count, bool))
    # Chains merge out of order; heights never fall from a cluster to what it becomes part of, so sorting is enough.
    order = jnp.argsort(heights, descending=True, stable=True)
    pairs, similarities = pairs[order], float_of_key(heights[order])

    def merge(i, carry):
        name_of, size_of, merges = carry  # of slots
        a, b = pairs[i, 0], pairs[i, 1]
        left, right = name_of[a], name_of[b]
        size = size_of[a] + size_of[b]
        row = jnp.stack([jnp.minimum(left, right), jnp.maximum(left, right), size])
        return name_of.at[b].set(count + i), size_of.at[b].set(size), merges.at[i].set(row)

    carry = (
        jnp.arange(count, dtype=jnp.int32),
        jnp.ones(count, jnp.int32),
        jnp.zeros((max(count - 1, 0), 3), jnp.int32),
    )
    return _tree(jax.lax.fori_loop(0, count - 1, merge, carry)[2], similarities)


def cut(tree: jax.Array, *, num_clusters: int | None = None, threshold: float | None = None) -> jax.Array:
    """Flat clusters from a dendrogram.

    Args:
      tree: `[N-1, 4]` in SciPy's `linkage` format, distances not falling.
      num_clusters: cut into this many.
      threshold: or keep every merge at a distance (`1 - similarity`) of at most this. Exactly one of the two.

    Returns:
      `[N]` int32 in `0 .. K-1`, numbered by the first client of each cluster.

    Raises:
      ValueError: another shape, both or neither given, `num_clusters` outside `1 .. N`, a threshold that is NaN.

    Cost: `O(N log N)`.

    Example:
      >>> import jax.numpy as jnp
      >>> tree = jnp.array([[0.0, 1.0, 0.5, 2.0], [2.0, 3.0, 0.75, 3.0]])
      >>> cut(tree, num_clusters=2).tolist(), cut(tree, threshold=0.4).tolist()
      ([0, 0, 1], [0, 1, 2])
    """
    tree = jnp.asarray(tree)
    check(tree.ndim == 2 and tree.shape[1] == 4, "tree", tree.shape, "of shape [N-1, 4]")
    tree = tree.astype(sum_dtype(tree))
    check((num_clusters is None) != (threshold is None), "num_clusters, threshold", (num_clusters, threshold), "one")
    count = len(tree) + 1
    if num_clusters is not None:
        if is_computable(num_clusters):
            check(1 <= num_clusters <= count, "num_clusters", num_clusters, f"from 1 to N = {count}")
        return _cut(tree, jnp.arange(count - 1) < count - num_clusters)
    if is_computable(threshold):
        check(threshold == threshold, "threshold", threshold, "a number")
    return _cut(tree, tree[:, 2] <= threshold)


@jax.jit
def _cut(tree, kept):
    count = len(tree) + 1
    if count == 1:
        return jnp.zeros(1, jnp.int32)
    children = tree[:, :2].astype(jnp.int32)

    def descend(i, root):  # from the last merge to the first: a kept merge hands its root to both children
        merge = count - 2 - i
        mine = jnp.where(kept[merge], root[count + merge], children[merge])
        return root.at[children[merge]].set(mine)

    names = jnp.arange(2 * count - 1, dtype=jnp.int32)
    root = jax.lax.fori_loop(0, count - 1, descend, names)[:count]
    return number_by_first(root, 2 * count - 1)


def number_by_first(labels: jax.Array, num_labels: int) -> jax.Array:
    """`[N]` labels below `num_labels` renumbered `0, 1, …` by their first appearance."""
    places = jnp.arange(len(labels), dtype=jnp.int32)
    first = jnp.full(num_labels, len(labels), jnp.int32).at[labels].min(places)
    is_first = first[labels] == places
    rank = jnp.cumsum(is_first).astype(jnp.int32) - 1
    return rank[first[labels]]
