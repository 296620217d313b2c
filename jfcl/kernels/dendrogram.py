"""Dendrograms of single linkage, and the flat clusters that a dendrogram contains."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jfcl.core.checks import check
from jfcl.kernels.base import check_whole, sum_dtype
from jfcl.kernels.similarity import as_similarity
from jfcl.kernels.spanning_tree import float_of_key, join_order


def single_linkage_tree(similarity: jax.Array) -> jax.Array:
    """Returns the single-linkage dendrogram of symmetric similarities `[N, N]`, at the cost of the optimal bipartition.

    For other linkages see `linkage_tree`, of `1 - similarity`.

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
