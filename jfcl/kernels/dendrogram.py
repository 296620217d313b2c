"""Dendrograms of single and complete linkage, and the flat clusters that they contain."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jfcl.core.checks import check
from jfcl.kernels.base import check_whole, sum_dtype
from jfcl.kernels.similarity import as_similarity
from jfcl.kernels.spanning_tree import first_max, float_of_key, join_order, key_limits, order_key


def single_linkage_tree(similarity: jax.Array) -> jax.Array:
    """Returns the single-linkage dendrogram of symmetric similarities `[N, N]`, at the cost of the optimal bipartition.

    It is `[N-1, 4]` in SciPy's `linkage` format: the two merged clusters (`0 .. N-1` are clients, `N + i` is the result
    of merge `i`), their distance `1 - similarity`, and the size of the result; ordered by distance. For
    `scipy.cluster.hierarchy` convert it to float64 first; ids are exact up to 2²⁴.

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
    step, joined_at = join_order(similarity, jnp.ones(count, bool))
    steps = jnp.arange(count, dtype=jnp.int32)
    at_step = jnp.zeros(count, jnp.int32).at[step].set(steps)
    gaps = joined_at[1:]  # between the clients of steps t and t + 1
    order = jnp.argsort(gaps, descending=True, stable=True)

    # Clusters are runs of steps in the order of joining; a run is recorded at its two ends.
    def merge(i, carry):
        begin_of, end_of, name_of, merges = carry  # of a run's last step, of its first step, of its first step
        t = order[i]
        begin, end = begin_of[t], end_of[t + 1]
        merges = merges.at[i].set(_merge(name_of[begin], name_of[t + 1], end - begin + 1))
        return begin_of.at[end].set(begin), end_of.at[begin].set(end), name_of.at[begin].set(count + i), merges

    carry = (steps, steps, at_step, jnp.zeros((count - 1, 3), jnp.int32))
    return _tree(jax.lax.fori_loop(0, count - 1, merge, carry)[3], float_of_key(gaps[order]))


def complete_linkage_tree(similarity: jax.Array) -> jax.Array:
    """Returns the complete-linkage dendrogram (the variant of the CFL authors' public code), as `single_linkage_tree`.

    The distance of two clusters is that of their least similar clients. Cost: at most `3 N` steps of `O(N)`, and a copy
    of the similarities.

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
    _, pairs, heights = complete_linkage(similarity, jnp.ones(count, bool))
    # Chains merge out of order. Heights never fall from a cluster to the one that contains it, so sorting is enough.
    order = jnp.argsort(heights, descending=True, stable=True)
    pairs = pairs[order]

    def merge(i, carry):
        name_of, size_of, merges = carry  # of slots
        a, b = pairs[i, 0], pairs[i, 1]
        size = size_of[a] + size_of[b]
        merges = merges.at[i].set(_merge(name_of[a], name_of[b], size))
        return name_of.at[b].set(count + i), size_of.at[b].set(size), merges

    carry = (jnp.arange(count, dtype=jnp.int32), jnp.ones(count, jnp.int32), jnp.zeros((count - 1, 3), jnp.int32))
    return _tree(jax.lax.fori_loop(0, count - 1, merge, carry)[2], float_of_key(heights[order]))


def complete_linkage(similarity: jax.Array, active: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Merges the active clients by complete linkage, with nearest-neighbour chains (Murtagh 1983).

    In a chain of clusters each is the most similar one of its predecessor. It ends in two that are each other's most
    similar cluster, which merge. Ties go to the lowest index.

    Returns:
      `side` `[N]` bool: one of the two clusters of the last merge; `pairs` `[N-1, 2]`: the slots of the merged
      clusters, in order of merging (the second slot holds the result); `heights` `[N-1]`: the integer keys of their
      similarities. Only the first `active.sum() - 1` rows of the last two are valid.
    """
    count = len(similarity)
    keys = order_key(similarity)
    out = key_limits(keys.dtype)[0]
    usable = active[:, None] & active[None, :] & ~jnp.eye(count, dtype=bool)
    keys = jnp.where(usable, keys, out)
    num_merges = active.sum() - 1

    def tip_of(chain, length, alive):
        """Returns the last two clusters of the chain; a new chain begins with the first cluster."""
        first = jnp.argmax(alive).astype(jnp.int32)
        return jnp.where(length == 0, first, chain[jnp.maximum(length - 1, 0)]), chain[jnp.maximum(length - 2, 0)]

    def walk(_, carry):
        keys, rows, alive, chain, length, member_of, merged, pairs, heights, side = carry
        going = merged < num_merges
        tip, before = tip_of(chain, length, alive)
        row, row_before = rows
        highest, nearest = first_max(row)
        back = row[before] == highest  # of equals, the previous one is preferred, so that chains end
        merge = going & back & (length >= 2)

        # Merge `a` into `b`: the similarity of the new cluster is that of the less similar of the two.
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

        # Otherwise extend the chain.
        push = going & ~merge
        chain = chain.at[jnp.where(push, length, count)].set(jnp.where(length == 0, tip, nearest), mode="drop")
        length = length + jnp.where(push, 1, 0) - jnp.where(merge, 2, 0)
        # Read the rows of the next step here, after the last write. Read before the next write, XLA would copy the
        # whole matrix in every step.
        rows = tuple(keys[i] for i in tip_of(chain, length, alive))
        merged = merged + merge.astype(merged.dtype)
        return keys, rows, alive, chain, length, member_of, merged, pairs, heights, side

    slots = jnp.arange(count, dtype=jnp.int32)
    start = jnp.argmax(active).astype(jnp.int32)
    chain = slots, jnp.zeros((), jnp.int32), slots
    merges = jnp.zeros((), num_merges.dtype), jnp.zeros((count - 1, 2), jnp.int32), jnp.full(count - 1, out)
    carry = (keys, (keys[start], keys[0]), active, *chain, *merges, jnp.zeros(count, bool))
    *_, pairs, heights, side = jax.lax.fori_loop(0, 3 * count, walk, carry)
    return side, pairs, heights


def _merge(left: jax.Array, right: jax.Array, size: jax.Array) -> jax.Array:
    """Returns `[3]`: the names of two clusters, the lower one first, and the size of their union."""
    return jnp.stack([jnp.minimum(left, right), jnp.maximum(left, right), size])


def _tree(merges: jax.Array, similarities: jax.Array) -> jax.Array:
    """Returns `[N-1, 4]` from `[N-1, 3]` (see `_merge`) and the similarities of the merges."""
    names = merges.astype(similarities.dtype)
    return jnp.stack([names[:, 0], names[:, 1], 1.0 - similarities, names[:, 2]], axis=1)


def cut(tree: jax.Array, *, num_clusters: int | None = None, threshold: float | None = None) -> jax.Array:
    """Returns flat clusters from a dendrogram.

    Args:
      tree: `[N-1, 4]` in SciPy's `linkage` format, distances not falling.
      num_clusters: the number of clusters to cut into.
      threshold: the largest distance (`1 - similarity`) of a merge that applies. Give exactly one of the two.

    Returns:
      `[N]` int32 in `0 .. K-1`, numbered by the first client of each cluster.

    Example:
      >>> import jax.numpy as jnp
      >>> tree = jnp.array([[0.0, 1.0, 0.5, 2.0], [2.0, 3.0, 0.75, 3.0]])
      >>> cut(tree, num_clusters=2).tolist(), cut(tree, threshold=0.4).tolist()
      ([0, 0, 1], [0, 1, 2])
    """
    tree = jnp.asarray(tree)
    check(tree.ndim == 2 and tree.shape[1] == 4, "tree", tree.shape, "of shape [N-1, 4]")
    tree = tree.astype(sum_dtype(tree))
    one_of_both = (num_clusters is None) != (threshold is None)
    check(one_of_both, "num_clusters, threshold", (num_clusters, threshold), "one of the two")
    count = len(tree) + 1
    if num_clusters is not None:
        check_whole("num_clusters", num_clusters, 1, count, "N")
        return _cut(tree, jnp.arange(count - 1) < count - num_clusters)
    check(threshold == threshold, "threshold", threshold, "a number")
    return _cut(tree, tree[:, 2] <= threshold)


@jax.jit
def _cut(tree, applies):
    """Returns the clusters after the merges of `tree` that apply `[N-1]` bool."""
    count = len(tree) + 1
    if count == 1:
        return jnp.zeros(1, jnp.int32)
    children = tree[:, :2].astype(jnp.int32)

    def descend(i, root):  # from the last merge to the first: both children of one that applies have its root
        merge = count - 2 - i
        of_children = jnp.where(applies[merge], root[count + merge], children[merge])
        return root.at[children[merge]].set(of_children)

    names = jnp.arange(2 * count - 1, dtype=jnp.int32)
    root = jax.lax.fori_loop(0, count - 1, descend, names)[:count]
    return number_by_first(root, 2 * count - 1)


def number_by_first(labels: jax.Array, num_labels: int) -> jax.Array:
    """Renumbers `[N]` labels below `num_labels` as `0, 1, …` by their first appearance."""
    places = jnp.arange(len(labels), dtype=jnp.int32)
    first = jnp.full(num_labels, len(labels), jnp.int32).at[labels].min(places)[labels]
    rank = jnp.cumsum(first == places).astype(jnp.int32) - 1
    return rank[first]
