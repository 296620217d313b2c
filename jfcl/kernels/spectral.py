"""Spectral clustering: eigenvectors of affinities, clusters in them, and the measure of Davies and Bouldin."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from jfcl.core.checks import check_count
from jfcl.kernels.base import row_mask, rows_of, sum_dtype
from jfcl.kernels.blocks import HIGHEST, checked_rows
from jfcl.kernels.dendrogram import number_by_first
from jfcl.kernels.silhouette import ChosenCut
from jfcl.kernels.similarity import as_clusters, as_similarity

WORST = 1.0  # measure of Davies and Bouldin, that a division is to be below
ABSENT = -2.0  # eigenvalue of points that do not count: below all others, which are from -1 to 1


def spectral_embedding(affinity: jax.Array, num_vectors: int, *, mask: jax.Array | None = None) -> jax.Array:
    """Returns the first eigenvectors of the normalised Laplacian of affinities (Shi, Malik 2000; Ng, Jordan, Weiss).

    They are those of `I - D^(-1/2) A D^(-1/2)`, where `D` has the sums of the rows of `A`, divided by the roots of
    these sums, as in scikit-learn.

    Args:
      affinity: `[N, N]`, symmetric, at least 0; the diagonal does not count.
      num_vectors: `p`, from 1 on.
      mask: `[N]` bool: points that count.

    Returns:
      `[N, p]`, the smallest eigenvalue first, so that the first column is constant in a connected graph; of any sign.
      0 for points that do not count, and in columns beyond the number of points.

    Raises:
      ValueError: affinities that are not square, not finite or not symmetric; `num_vectors` below 1.

    Cost: the eigenvectors of an `[N, N]` matrix.

    Example:
      >>> import jax.numpy as jnp
      >>> pairs = jnp.kron(jnp.eye(2), jnp.ones((2, 2))) + 0.1
      >>> (spectral_embedding(pairs, 2)[:, 1] > 0).tolist() in ([True, True, False, False], [False, False, True, True])
      True
    """
    affinity = jnp.atleast_1d(jnp.asarray(affinity))
    mask = row_mask(mask, len(affinity))
    if affinity.shape == 2 * mask.shape:
        affinity = jnp.where(mask[:, None] & mask[None, :], affinity, jnp.zeros_like(affinity))
    check_count("num_vectors", num_vectors)
    return _spectral_embedding(as_similarity(affinity, name="affinity"), mask, num_vectors)


@partial(jax.jit, static_argnames="num_vectors")
def _spectral_embedding(affinity, mask, num_vectors):
    affinity = affinity.astype(sum_dtype(affinity))
    same = jnp.eye(len(mask), dtype=bool)
    affinity = jnp.where(same, 0.0, affinity)
    degree = affinity.sum(axis=1)
    root = jnp.sqrt(jnp.where(degree > 0, degree, 1.0))
    matrix = affinity / (root[:, None] * root[None, :])
    # A point without any affinity is a part of its own, with eigenvalue 0 of the Laplacian.
    matrix = jnp.where(same, jnp.where(mask, (degree == 0).astype(matrix.dtype), ABSENT)[:, None], matrix)
    vectors = jnp.linalg.eigh(matrix)[1][:, ::-1][:, :num_vectors]
    counts = mask[:, None] & (jnp.arange(vectors.shape[1]) < mask.sum())[None, :]
    vectors = jnp.where(counts, vectors / root[:, None], 0.0)
    return jnp.pad(vectors, ((0, 0), (0, num_vectors - vectors.shape[1])))


def pivoted_clusters(vectors: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
    """Returns as many clusters of points as they have coordinates, the eigenvectors of a graph (Damle, Minden, Ying).

    A QR decomposition with column pivots finds `K` points in directions as different as there are. The rotation nearest
    to these directions takes the points near the axes, and each belongs to the nearest one (`cluster_qr` of
    scikit-learn). There is no start to choose, and no rotation of the coordinates changes the clusters.

    Args:
      vectors: `[N, K]`, as from `spectral_embedding`.
      mask: `[N]` bool: points that count, at least `K`.

    Returns:
      `[N]` int32 in `0 .. K-1`; -1 for points that do not count.

    Raises:
      ValueError: vectors of another rank.

    Cost: `O(N K²)`.

    Example:
      >>> import jax.numpy as jnp
      >>> pivoted_clusters(jnp.array([[1.0, 1.0], [1.0, 0.9], [1.0, -2.0]])).tolist() in ([1, 1, 0], [0, 0, 1])
      True
    """
    (vectors,), mask = checked_rows(jnp.asarray(vectors), mask)
    return _pivoted_clusters(vectors, mask)


@jax.jit
def _pivoted_clusters(vectors, mask):
    vectors = jnp.where(mask[:, None], vectors.astype(sum_dtype(vectors)), 0.0)
    rest, pivots = vectors, []
    for _ in range(vectors.shape[1]):
        lengths = jnp.where(mask, jnp.square(rest).sum(axis=1), -1.0)
        pivots.append(jnp.argmax(lengths))
        direction = rest[pivots[-1]] / jnp.sqrt(jnp.maximum(lengths.max(), jnp.finfo(rest.dtype).tiny))
        rest = rest - jnp.matmul(rest, direction, precision=HIGHEST)[:, None] * direction[None, :]
    left, _, right = jnp.linalg.svd(vectors[jnp.stack(pivots)].T)
    turned = jnp.matmul(vectors, jnp.matmul(left, right, precision=HIGHEST), precision=HIGHEST)
    return jnp.where(mask, jnp.abs(turned).argmax(axis=1), -1).astype(jnp.int32)


def davies_bouldin(
    points: jax.Array, clusters: jax.Array, *, num_clusters: int, mask: jax.Array | None = None
) -> jax.Array:
    """Returns the mean over the clusters of `max_j (s_i + s_j) / d_ij`; small where they are narrow and far apart.

    `s_i` is the mean distance of the points of cluster `i` to their mean, and `d_ij` the distance of two such means
    (Davies, Bouldin 1979).

    Args:
      points: `[N, D]`.
      clusters: `[N]` integers in `0 .. num_clusters - 1`.
      num_clusters: `K`; some of them may be empty.
      mask: `[N]` bool: points that count.

    Returns:
      `[]`, at least 0; infinite with fewer than two clusters, or where two have the same mean.

    Raises:
      ValueError: arrays of other shapes.

    Cost: `O(N K + K²)` distances.

    Example:
      >>> import jax.numpy as jnp
      >>> float(davies_bouldin(jnp.array([[0.0], [2.0], [7.0], [9.0]]), jnp.array([0, 0, 1, 1]), num_clusters=2))
      0.2857142984867096
    """
    (points,) = rows_of(jnp.asarray(points), name="points")
    check_count("num_clusters", num_clusters)
    clusters = as_clusters(clusters, len(points))
    return _davies_bouldin(points, clusters, row_mask(mask, len(points)), num_clusters)


@partial(jax.jit, static_argnames="num_clusters")
def _davies_bouldin(points, clusters, mask, num_clusters):
    points = jnp.where(mask[:, None], points.astype(sum_dtype(points)), 0.0)
    members = (clusters[:, None] == jnp.arange(num_clusters)[None, :]) & mask[:, None]
    members = members.astype(points.dtype)
    size = members.sum(axis=0)
    divisor, used = jnp.maximum(size, 1), size > 0
    means = jnp.matmul(members.T, points, precision=HIGHEST) / divisor[:, None]
    away = jnp.sqrt(jnp.square(points - means[jnp.maximum(clusters, 0)]).sum(axis=1))
    width = jnp.matmul(members.T, away, precision=HIGHEST) / divisor
    apart = jnp.sqrt(jnp.square(means[:, None, :] - means[None, :, :]).sum(axis=2))
    pairs = used[:, None] & used[None, :] & ~jnp.eye(num_clusters, dtype=bool)
    ratio = jnp.where(apart > 0, (width[:, None] + width[None, :]) / jnp.where(apart > 0, apart, 1.0), jnp.inf)
    worst = jnp.where(pairs, ratio, 0.0).max(axis=1)
    return jnp.where(used.sum() > 1, worst.sum() / jnp.maximum(used.sum(), 1).astype(worst.dtype), jnp.inf)


def spectral_clusters(
    affinity: jax.Array, *, most: int, limit: jax.Array | None = None, mask: jax.Array | None = None
) -> ChosenCut:
    """Clusters points by affinities, into as many clusters as the measure of Davies and Bouldin chooses.

    For each number `K`, the first `K` vectors of `spectral_embedding` give the clusters (`pivoted_clusters`), and the
    vectors 2 to `K + 1` the measure. The number with the smallest measure is taken, if that is below 1.

    Args:
      affinity: `[N, N]`, symmetric, at least 0; the diagonal does not count.
      most: the largest number of clusters, from 2 on. Numbers above the number of points minus one are not tried.
      limit: `[]` integer, another bound, which may be a tracer.
      mask: `[N]` bool: points that count; the others are in the first one's cluster.

    Returns:
      `ChosenCut(cluster [N], num_clusters [], scores [most + 1])`, numbered by the first point of each cluster. The
      scores are the measures; that of a number that is not tried is NaN.

    Raises:
      ValueError: as `spectral_embedding`; `most` below 2.

    Cost: the eigenvectors of an `[N, N]` matrix.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.array([0.0, 1.0, 2.5, 6.0, 7.0, 8.5])
      >>> spectral_clusters(jnp.exp(-((x[:, None] - x[None, :]) ** 2) / 4), most=3).cluster.tolist()
      [0, 0, 0, 1, 1, 1]
    """
    check_count("most", most, least=2)
    vectors = spectral_embedding(affinity, most + 1, mask=mask)
    mask = row_mask(mask, len(vectors))
    bound = mask.sum() - 1 if limit is None else jnp.minimum(limit, mask.sum() - 1)
    measures, cuts = [jnp.full((), WORST)], [jnp.zeros(len(mask), jnp.int32)]
    for count in range(2, most + 1):
        cluster = _pivoted_clusters(vectors[:, :count], mask)
        measure = _davies_bouldin(vectors[:, 1 : count + 1], cluster, mask, count)
        measures.append(jnp.where(count <= bound, measure, jnp.nan))
        cuts.append(number_by_first(jnp.where(mask, cluster, cluster[jnp.argmax(mask)]), count))
    measures = jnp.stack(measures)
    cluster = jnp.stack(cuts)[jnp.argmin(jnp.where(jnp.isnan(measures), jnp.inf, measures))]
    scores = jnp.concatenate([jnp.full(2, jnp.nan), measures[1:]])
    return ChosenCut(cluster, cluster.max() + 1, scores)
