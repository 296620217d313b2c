"""Silhouettes of clusters, and the number of clusters that they choose."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jfcl.core.checks import check_count
from jfcl.kernels.blocks import matmul
from jfcl.kernels.dendrogram import as_pairs, cut, linkage_tree
from jfcl.kernels.similarity import as_clusters

MARGIN = 1.1  # by which the mean silhouette of more clusters must be better


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
    counted = jnp.where(mask[:, None] & mask[None, :], distances, jnp.zeros_like(distances))
    sums, sizes = matmul(counted, members), members.sum(axis=0)
    is_own = clusters[:, None] == jnp.arange(num_clusters)[None, :]
    size = jnp.where(is_own, sizes[None, :], 0.0).sum(axis=1)
    inside = jnp.where(is_own, sums, 0.0).sum(axis=1) / jnp.maximum(size - 1, 1)
    means = jnp.where(is_own | (sizes == 0)[None, :], jnp.inf, sums / jnp.maximum(sizes, 1)[None, :])
    outside = means.min(axis=1)
    widest = jnp.maximum(inside, outside)
    defined = mask & (size > 1) & jnp.isfinite(widest) & (widest > 0)
    return jnp.where(defined, (outside - inside) / jnp.where(defined, widest, 1.0), 0.0)


def cut_by_silhouette(
    distances: jax.Array,
    *,
    most: int,
    linkage: str = "ward",
    mask: jax.Array | None = None,
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
