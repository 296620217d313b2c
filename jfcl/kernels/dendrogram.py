"""Dendrograms of distances, by any linkage whose clusters never come nearer when they merge, and their clusters.

Where the number of clusters is not known, silhouettes choose it.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jfcl.core.checks import check, check_choice, check_count, require
from jfcl.kernels.base import check_whole, row_mask, sum_dtype
from jfcl.kernels.blocks import matmul
from jfcl.kernels.similarity import as_clusters, as_similarity

LINKAGES = ("single", "complete", "average", "weighted", "ward")
MARGIN = 1.1  # by which the mean silhouette of more clusters must be better
FARTHEST = 1e15  # times the largest distance, in the place of infinite ones: infinity means missing here


def linkage_tree(distances: jax.Array, linkage: str = "average", *, mask: jax.Array | None = None) -> jax.Array:
    """Returns the dendrogram of distances, as `scipy.cluster.hierarchy.linkage`.

    Args:
      distances: `[N, N]`, symmetric, at least 0.
      linkage: the distance of two clusters: `"single"`, that of their nearest points; `"complete"`, of their farthest;
        `"average"`, the mean of all pairs (UPGMA); `"weighted"`, the mean of the distances of the two clusters that
        merged last (WPGMA); `"ward"`, by the growth of the sum of squared distances to the means.
      mask: `[N]` bool: points that count. The others join the first of these, at distance 0 and before all merges, so
        that they make no cluster and change none.

    Returns:
      `[N-1, 4]` in SciPy's format: the two merged clusters (`0 .. N-1` are points, `N + i` is the result of merge `i`),
      their distance, and the number of points in the result; ordered by distance. `jfcl.kernels.cut` cuts it. Of equal
      distances, the one that a chain of nearest neighbours from the first point on meets first comes first, as in
      SciPy for all but single linkage. Inside `jit`, a distance that is not finite is farther than all others.

    Raises:
      ValueError: an unknown linkage; distances that are not square, not finite or not symmetric.

    Cost: `3 N` steps of `O(N)` (nearest-neighbour chains, Murtagh 1983), and a copy of the distances.

    Example:
      >>> import jax.numpy as jnp
      >>> d = jnp.array([[0.0, 1.0, 4.0], [1.0, 0.0, 6.0], [4.0, 6.0, 0.0]])
      >>> linkage_tree(d).tolist()
      [[0.0, 1.0, 1.0, 2.0], [2.0, 3.0, 5.0, 3.0]]
    """
    check_choice("linkage", linkage, LINKAGES)
    return _linkage_tree(*as_pairs(distances, mask), linkage)


def as_pairs(matrix: jax.Array, mask: jax.Array | None, *, name: str = "distances") -> tuple[jax.Array, jax.Array]:
    """Returns `(matrix [N, N], mask [N] bool)`, checked as by `as_similarity`; 0 for points that do not count."""
    matrix = jnp.atleast_1d(jnp.asarray(matrix))
    mask = row_mask(mask, len(matrix))
    if matrix.shape == 2 * mask.shape:
        matrix = jnp.where(mask[:, None] & mask[None, :], matrix, jnp.zeros_like(matrix))
    return as_similarity(matrix, name=name), mask


@partial(jax.jit, static_argnames="linkage")
def _linkage_tree(distances, mask, linkage):
    count = len(distances)
    if count == 1:
        return jnp.zeros((0, 4), distances.dtype)
    mask = mask.at[0].set(mask[0] | ~mask.any())
    # In units of a power of two, the squares of Ward's linkage neither overflow nor underflow.
    pairs = mask[:, None] & mask[None, :] & ~jnp.eye(count, dtype=bool)
    largest = jnp.where(pairs & jnp.isfinite(distances), distances, 0.0).max()
    unit = jnp.ldexp(jnp.ones((), distances.dtype), jnp.frexp(largest)[1])
    power = 2 if linkage == "ward" else 1
    scaled = jnp.where(jnp.isnan(distances), jnp.inf, distances / unit)
    merged, heights = _chains(jnp.where(pairs, jnp.minimum(scaled, FARTHEST) ** power, jnp.inf), mask, linkage)

    # Points that do not count join the first one that does, before all merges.
    place = jnp.arange(count - 1, dtype=jnp.int32)
    behind = place >= mask.sum() - 1  # rows of the merges without any
    uncounted = jnp.argsort(mask, stable=True).astype(jnp.int32)[place - (mask.sum() - 1).astype(jnp.int32)]
    joined = jnp.stack([uncounted, jnp.full_like(uncounted, jnp.argmax(mask))], axis=1)
    merged = jnp.where(behind[:, None], joined, merged)
    order = jnp.argsort(jnp.where(behind, -1.0, heights), stable=True)
    heights = jnp.minimum((jnp.sqrt(heights) if linkage == "ward" else heights) * unit, jnp.finfo(heights.dtype).max)
    heights = jnp.where(behind, 0.0, heights)[order]

    def name(i, carry):
        name_of, size_of, tree = carry  # of slots
        a, b = merged[order[i], 0], merged[order[i], 1]
        left, right = name_of[a], name_of[b]
        size = size_of[a] + size_of[b]
        row = jnp.stack([jnp.minimum(left, right), jnp.maximum(left, right), size])
        return name_of.at[b].set(count + i), size_of.at[b].set(size), tree.at[i].set(row)

    carry = (jnp.arange(count, dtype=jnp.int32), jnp.ones(count, jnp.int32), jnp.zeros((count - 1, 3), jnp.int32))
    names = jax.lax.fori_loop(0, count - 1, name, carry)[2].astype(distances.dtype)
    return jnp.stack([names[:, 0], names[:, 1], heights, names[:, 2]], axis=1)


def _chains(distances: jax.Array, mask: jax.Array, linkage: str) -> tuple[jax.Array, jax.Array]:
    """Merges the points that count along chains of nearest neighbours, which end in two that are each other's nearest.

    Returns:
      `pairs` `[N-1, 2]`, the slots of the merged clusters in order of merging (the second slot holds the result), and
      `heights` `[N-1]`, which never fall from a cluster to the one that contains it. `mask.sum() - 1` rows are valid.
    """
    count, out = len(distances), jnp.array(jnp.inf, distances.dtype)

    def tip_of(chain, length, alive):
        """Returns the last two clusters of the chain; a new chain begins with the first cluster."""
        first = jnp.argmax(alive).astype(jnp.int32)
        return jnp.where(length == 0, first, chain[jnp.maximum(length - 1, 0)]), chain[jnp.maximum(length - 2, 0)]

    def walk(_, carry):
        distances, rows, alive, size, top, chain, length, merged, pairs, heights = carry
        going = merged < mask.sum() - 1
        tip, before = tip_of(chain, length, alive)
        row, row_before = rows
        nearest = jnp.argmin(row).astype(jnp.int32)
        # Of equals, the previous one is preferred, so that chains end.
        merge = going & (row[before] <= row[nearest]) & (length >= 2)

        # Merge `a` into `b`.
        a, b = jnp.minimum(before, tip), jnp.maximum(before, tip)
        height = jnp.maximum(row[before], jnp.maximum(top[a], top[b]))  # rounding may bring it below
        joint = _distances_to_both(linkage, row, row_before, size[tip], size[before], size, row[before])
        joint = joint.at[a].set(out).at[b].set(out)
        row_a = jnp.where(merge, out, jnp.where(a == tip, row, row_before))
        row_b = jnp.where(merge, joint, jnp.where(b == tip, row, row_before))
        for slot, values in ((a, row_a), (b, row_b)):
            zero = jnp.zeros_like(slot)
            distances = jax.lax.dynamic_update_slice(distances, values[None, :], (slot, zero))
            distances = jax.lax.dynamic_update_slice(distances, values[:, None], (zero, slot))
        place = jnp.where(merge, merged, count)  # out of range: dropped
        pairs = pairs.at[place].set(jnp.stack([a, b]), mode="drop")
        heights = heights.at[place].set(height, mode="drop")
        alive = alive.at[a].set(alive[a] & ~merge)
        size = size.at[b].set(jnp.where(merge, size[a] + size[b], size[b]))
        top = top.at[b].set(jnp.where(merge, height, top[b]))

        # Otherwise extend the chain.
        push = going & ~merge
        chain = chain.at[jnp.where(push, length, count)].set(jnp.where(length == 0, tip, nearest), mode="drop")
        length = length + jnp.where(push, 1, 0) - jnp.where(merge, 2, 0)
        # Read the rows of the next step here, after the last write. Read before the next write, XLA would copy the
        # whole matrix in every step.
        rows = tuple(distances[i] for i in tip_of(chain, length, alive))
        return distances, rows, alive, size, top, chain, length, merged + merge.astype(merged.dtype), pairs, heights

    zeros, zero = jnp.zeros(count, distances.dtype), jnp.zeros((), jnp.int32)
    start = jnp.argmax(mask).astype(jnp.int32)
    clusters = mask, jnp.ones_like(zeros), zeros
    chain = jnp.zeros(count, jnp.int32), zero
    merges = zero, jnp.zeros((count - 1, 2), jnp.int32), zeros[1:]
    carry = distances, (distances[start], distances[0]), *clusters, *chain, *merges
    return jax.lax.fori_loop(0, 3 * count, walk, carry)[-2:]


def _distances_to_both(linkage, x, y, size_x, size_y, sizes, between):
    """Returns the distances of all clusters to the union of two, from those to each (Lance, Williams 1967)."""
    if linkage == "single":
        return jnp.minimum(x, y)
    if linkage == "complete":
        return jnp.maximum(x, y)
    if linkage == "weighted":
        return (x + y) / 2
    if linkage == "average":
        return (size_x * x + size_y * y) / (size_x + size_y)
    squares = (size_x + sizes) * x + (size_y + sizes) * y - sizes * between  # Ward: of squared distances
    return squares / (size_x + size_y + sizes)


def cut(tree: jax.Array, *, num_clusters: int | None = None, threshold: float | None = None) -> jax.Array:
    """Returns flat clusters from a dendrogram.

    Args:
      tree: `[N-1, 4]` in SciPy's `linkage` format, distances not falling.
      num_clusters: the number of clusters to cut into.
      threshold: the largest distance (`1 - similarity`) of a merge that applies. With both, more merges apply where
        there would be more than `num_clusters`.

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
    require(num_clusters is not None or threshold is not None, "Give num_clusters, threshold, or both.")
    count, applies = len(tree) + 1, False
    if num_clusters is not None:
        check_whole("num_clusters", num_clusters, 1, count, "N")
        applies = jnp.arange(count - 1) < count - num_clusters
    if threshold is not None:
        check(threshold == threshold, "threshold", threshold, "a number")
        applies |= tree[:, 2] <= threshold
    return _cut(tree, applies)


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


# The number of clusters that silhouettes choose.


class ChosenCut(NamedTuple):
    """`cluster` `[N]` int32; `num_clusters` `[]` int32; `scores` `[most + 1]`, the mean silhouette by number."""

    cluster: jax.Array
    num_clusters: jax.Array
    scores: jax.Array


def silhouette(
    distances: jax.Array, clusters: jax.Array, *, num_clusters: int, mask: jax.Array | None = None
) -> jax.Array:
    """Returns the silhouette of each point (Rousseeuw 1987): `(b - a) / max(a, b)`.

    `a` is the mean distance to the others of its cluster, `b` the least mean distance to the points of another one.

    Args:
      distances: `[N, N]`, symmetric, at least 0.
      clusters: `[N]` integers in `0 .. num_clusters - 1`.
      num_clusters: `K`; some of them may be empty.
      mask: `[N]` bool: points that count.

    Returns:
      `[N]` in [-1, 1]; 0 for a point that is alone in its cluster, for all points where there is one cluster, and for
      points that do not count.

    Raises:
      ValueError: arrays of other shapes; distances that are not finite or not symmetric.

    Cost: `N² K` multiplications.

    Example:
      >>> import jax.numpy as jnp
      >>> d = jnp.array([[0.0, 1.0, 4.0], [1.0, 0.0, 4.0], [4.0, 4.0, 0.0]])
      >>> silhouette(d, jnp.array([0, 0, 1]), num_clusters=2).tolist()
      [0.75, 0.75, 0.0]
    """
    distances, mask = as_pairs(distances, mask)
    clusters = as_clusters(clusters, len(distances))
    check_count("num_clusters", num_clusters)
    return _silhouette(distances, clusters, mask, num_clusters)


def _silhouette(distances, clusters, mask, num_clusters):
    members = jax.nn.one_hot(clusters, num_clusters, dtype=distances.dtype) * mask[:, None].astype(distances.dtype)
    sums, sizes = matmul(distances, members), members.sum(axis=0)
    is_own = clusters[:, None] == jnp.arange(num_clusters)[None, :]
    size = jnp.where(is_own, sizes[None, :], 0.0).sum(axis=1)
    inside = jnp.where(is_own, sums, 0.0).sum(axis=1) / jnp.maximum(size - 1, 1)
    means = jnp.where(is_own | (sizes == 0)[None, :], jnp.inf, sums / jnp.maximum(sizes, 1)[None, :])
    outside = means.min(axis=1)
    widest = jnp.maximum(inside, outside)
    defined = mask & (size > 1) & jnp.isfinite(widest) & (widest > 0)
    return jnp.where(defined, (outside - inside) / jnp.where(defined, widest, 1.0), 0.0)


def cut_by_silhouette(
    distances: jax.Array, *, most: int, linkage: str = "ward", mask: jax.Array | None = None
) -> ChosenCut:
    """Cuts the dendrogram of distances into as many clusters as their mean silhouette chooses.

    The numbers `2, 3, ...` are tried in turn; a larger one is taken only where its mean silhouette is above 1.1 times
    the best so far (the rule of CLoVE's authors).

    Args:
      distances: `[N, N]`, symmetric, at least 0.
      most: the largest number of clusters, from 2 on. Numbers above the number of points minus one are not tried.
      linkage: as in `jfcl.kernels.linkage_tree`.
      mask: `[N]` bool: points that count; the others are in the first one's cluster.

    Returns:
      `ChosenCut(cluster [N], num_clusters [], scores [most + 1])`; the score of a number that is not tried is NaN. With
      fewer than 3 points, there is one cluster.

    Raises:
      ValueError: as `linkage_tree`; `most` below 2.

    Cost: that of `linkage_tree`, and `N² K` multiplications for each `K` up to `most`.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.array([0.0, 1.0, 10.0, 11.0, 30.0, 31.0])
      >>> chosen = cut_by_silhouette(jnp.abs(x[:, None] - x[None, :]), most=5)
      >>> chosen.cluster.tolist(), int(chosen.num_clusters)
      ([0, 0, 1, 1, 2, 2], 3)
    """
    distances, mask = as_pairs(distances, mask)
    check_count("most", most, least=2)
    tree, points = linkage_tree(distances, linkage, mask=mask), mask.sum()
    numbers = jnp.arange(most + 1, dtype=jnp.int32)
    cuts = jax.vmap(lambda number: cut(tree, num_clusters=number))(numbers)  # [most + 1, N]

    def score(cluster):
        values = _silhouette(distances, cluster, mask, most)
        return values.sum() / jnp.maximum(points, 1).astype(values.dtype)

    tried = (numbers >= 2) & (numbers < points)
    scores = jnp.where(tried, jax.vmap(score)(cuts), jnp.nan)

    def better(number, carry):
        best, chosen = carry
        take = tried[number] & ((number == 2) | (scores[number] > MARGIN * best))
        return jnp.where(take, scores[number], best), jnp.where(take, number, chosen).astype(jnp.int32)

    _, chosen = jax.lax.fori_loop(2, most + 1, better, (jnp.zeros((), scores.dtype), jnp.ones((), jnp.int32)))
    return ChosenCut(cuts[chosen], chosen, scores)
