"""Spectral clustering: eigenvectors of affinities, clusters in them, and the Davies-Bouldin index."""

from functools import partial

import jax
import jax.numpy as jnp

from jfcl.core.checks import check_count
from jfcl.kernels.base import sum_dtype
from jfcl.kernels.blocks import matmul
from jfcl.kernels.dendrogram import ChosenCut, as_pairs, number_by_first

WORST = 1.0  # a division is taken only below this Davies-Bouldin index
ABSENT = -2.0  # eigenvalue of points that do not count: below all others, which are from -1 to 1


def spectral_clusters(
    affinity: jax.Array, *, most: int, limit: jax.Array | None = None, mask: jax.Array | None = None
) -> ChosenCut:
    """Clusters points by affinities, into as many clusters as the Davies-Bouldin index chooses.

    For each number `K`, the first `K` eigenvectors of the normalised Laplacian give the clusters, by a QR decomposition
    with column pivots (Damle, Minden, Ying), and the vectors 2 to `K + 1` the index. The number with the smallest index
    is taken, if that is below 1.

    Args:
      affinity: `[N, N]`, symmetric, at least 0; the diagonal does not count.
      most: the largest number of clusters, from 2 on. Numbers above the number of points minus one are not tried.
      limit: `[]` integer, another bound, which may be a tracer.
      mask: `[N]` bool: points that count; the others are in the first one's cluster.

    Returns:
      `ChosenCut(cluster [N], num_clusters [], scores [most + 1])`, numbered by the first point of each cluster. The
      scores are the indices; that of a number that is not tried is NaN.

    Raises:
      ValueError: affinities that are not square, not finite or not symmetric; `most` below 2.

    Cost: the eigenvectors of an `[N, N]` matrix.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.array([0.0, 1.0, 2.5, 6.0, 7.0, 8.5])
      >>> spectral_clusters(jnp.exp(-((x[:, None] - x[None, :]) ** 2) / 4), most=3).cluster.tolist()
      [0, 0, 0, 1, 1, 1]
    """
    check_count("most", most, least=2)
    affinity, mask = as_pairs(affinity, mask, name="affinity")
    vectors = spectral_embedding(affinity, mask, most + 1)
    bound = mask.sum() - 1 if limit is None else jnp.minimum(limit, mask.sum() - 1)
    measures, cuts = [jnp.full((), WORST)], [jnp.zeros(len(mask), jnp.int32)]
    for count in range(2, most + 1):
        cluster = pivoted_clusters(vectors[:, :count], mask)
        measure = davies_bouldin(vectors[:, 1 : count + 1], cluster, mask, count)
        measures.append(jnp.where(count <= bound, measure, jnp.nan))
        cuts.append(number_by_first(jnp.where(mask, cluster, cluster[jnp.argmax(mask)]), count))
    measures = jnp.stack(measures)
    cluster = jnp.stack(cuts)[jnp.argmin(jnp.where(jnp.isnan(measures), jnp.inf, measures))]
    scores = jnp.concatenate([jnp.full(2, jnp.nan), measures[1:]])
    return ChosenCut(cluster, cluster.max() + 1, scores)


@partial(jax.jit, static_argnames="num_vectors")
def spectral_embedding(affinity: jax.Array, mask: jax.Array, num_vectors: int) -> jax.Array:
    """Returns `[N, p]`, the first eigenvectors of the normalised Laplacian (Ng, Jordan, Weiss 2001).

    They are divided by the roots of the points' sums of affinities, as in scikit-learn. Points that do not count have
    affinities of 0, and 0 in the result.
    """
    affinity = affinity.astype(sum_dtype(affinity))
    same = jnp.eye(len(mask), dtype=bool)
    affinity = jnp.where(same, 0.0, affinity)
    degree = affinity.sum(axis=1)
    root = jnp.sqrt(jnp.where(degree > 0, degree, 1.0))
    matrix = affinity / (root[:, None] * root[None, :])
    # A point without any affinity is a part of its own, with eigenvalue 0 of the Laplacian.
    matrix = jnp.where(same, jnp.where(mask, (degree == 0).astype(matrix.dtype), ABSENT)[:, None], matrix)
    # The first vector is known. Where parts hardly touch, other vectors have its eigenvalue but for rounding, and would
    # be mixed with it: it is moved behind them.
    first = jnp.where(mask, root, 0.0)
    first = first / jnp.sqrt(jnp.maximum(jnp.square(first).sum(), 1e-30))
    matrix = matrix + (ABSENT - 1.0) * first[:, None] * first[None, :]
    others = jnp.linalg.eigh(matrix)[1][:, ::-1][:, : num_vectors - 1]
    vectors = jnp.concatenate([first[:, None], others], axis=1)
    counts = mask[:, None] & (jnp.arange(vectors.shape[1]) < mask.sum())[None, :]
    vectors = jnp.where(counts, vectors / root[:, None], 0.0)
    return jnp.pad(vectors, ((0, 0), (0, num_vectors - vectors.shape[1])))


@jax.jit
def pivoted_clusters(vectors: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns `[N]` int32 in `0 .. K-1`: the axis nearest to each of `vectors` `[N, K]`; -1 where masked.

    The axes are those nearest to `K` vectors in directions as different as there are (`cluster_qr` of scikit-learn).
    """
    vectors = jnp.where(mask[:, None], vectors.astype(sum_dtype(vectors)), 0.0)
    residual, pivots = vectors, []
    for _ in range(vectors.shape[1]):
        lengths = jnp.where(mask, jnp.square(residual).sum(axis=1), -1.0)
        pivots.append(jnp.argmax(lengths))
        direction = residual[pivots[-1]] / jnp.sqrt(jnp.maximum(lengths.max(), jnp.finfo(residual.dtype).tiny))
        residual = residual - matmul(residual, direction)[:, None] * direction[None, :]
    u, _, vh = jnp.linalg.svd(vectors[jnp.stack(pivots)].T)
    turned = matmul(vectors, matmul(u, vh))
    return jnp.where(mask, jnp.abs(turned).argmax(axis=1), -1).astype(jnp.int32)


@partial(jax.jit, static_argnames="num_clusters")
def davies_bouldin(points: jax.Array, clusters: jax.Array, mask: jax.Array, num_clusters: int) -> jax.Array:
    """Returns the mean over the clusters of `max_j (s_i + s_j) / d_ij` (Davies, Bouldin 1979); `inf` for one cluster.

    `s_i` is the mean distance of the points of cluster `i` to their mean, and `d_ij` the distance of two such means.
    """
    points = jnp.where(mask[:, None], points.astype(sum_dtype(points)), 0.0)
    members = (clusters[:, None] == jnp.arange(num_clusters)[None, :]) & mask[:, None]
    members = members.astype(points.dtype)
    size = members.sum(axis=0)
    divisor, used = jnp.maximum(size, 1), size > 0
    means = matmul(members.T, points) / divisor[:, None]
    away = jnp.sqrt(jnp.square(points - means[jnp.maximum(clusters, 0)]).sum(axis=1))
    width = matmul(members.T, away) / divisor
    apart = jnp.sqrt(jnp.square(means[:, None, :] - means[None, :, :]).sum(axis=2))
    pairs = used[:, None] & used[None, :] & ~jnp.eye(num_clusters, dtype=bool)
    ratio = jnp.where(apart > 0, (width[:, None] + width[None, :]) / jnp.where(apart > 0, apart, 1.0), jnp.inf)
    worst = jnp.where(pairs, ratio, 0.0).max(axis=1)
    return jnp.where(used.sum() > 1, worst.sum() / jnp.maximum(used.sum(), 1).astype(worst.dtype), jnp.inf)
