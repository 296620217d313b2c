"""The flat clusters that a dendrogram contains."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jfcl.core.checks import check
from jfcl.kernels.base import check_whole, sum_dtype


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
    exactly_one = (num_clusters is None) != (threshold is None)
    check(exactly_one, "num_clusters, threshold", (num_clusters, threshold), "one of the two")
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
