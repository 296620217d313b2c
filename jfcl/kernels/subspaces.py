"""Subspaces that points span: their principal vectors, and the angles between the subspaces of clients."""

from functools import partial

import jax
import jax.numpy as jnp

from jfcl.core.checks import check, check_choice, check_count
from jfcl.kernels.base import row_mask, rows_of, sum_dtype
from jfcl.kernels.blocks import HIGHEST, finite_rows, matmul, usable_rows

ANGLES = ("absolute", "smallest", "sum")
TILE = 2**24  # products of vectors that are in memory at once


def principal_vectors(
    points: jax.Array,
    num_vectors: int,
    *,
    groups: jax.Array | None = None,
    num_groups: int = 1,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Returns the first right singular vectors of points, of each group of them: a truncated SVD by inner products.

    These are the unit vectors in the directions in which the sum of squares of the points, not centred, is largest.

    Args:
      points: `[N, D]`.
      num_vectors: `p`, of each group.
      groups: `[N]` integers in `0 .. num_groups - 1`, such as labels; default: one group.
      num_groups: the number of groups.
      mask: `[N]` bool: points that count.

    Returns:
      `[num_groups, p, D]`, largest singular value first, each with its coordinate of largest magnitude positive; zeros
      beyond the rank of a group. In float32, singular values below 1e-3 `n^(1/4)` times the largest count as zero,
      since inner products do not resolve them. Points with NaN or infinity are left out.

    Raises:
      ValueError: wrong rank or lengths, counts below 1.

    Cost: the eigenvectors of an `[n, n]` matrix, `n = min(N, D)`, for each group that has points (under `jax.vmap` for
    each group); `N D n` multiplications.

    Example:
      >>> import jax.numpy as jnp
      >>> principal_vectors(jnp.array([[0.0, 2.0], [0.0, 3.0], [1.0, 0.0]]), 1).tolist()
      [[[0.0, 1.0]]]
    """
    (points,) = rows_of(jnp.asarray(points), name="points")
    check_count("num_vectors", num_vectors)
    check_count("num_groups", num_groups)
    mask = row_mask(mask, len(points))
    groups = jnp.zeros(len(points), jnp.int32) if groups is None else jnp.asarray(groups)
    fits = groups.shape == mask.shape and jnp.issubdtype(groups.dtype, jnp.integer)
    check(fits, "groups", f"{groups.dtype} {groups.shape}", f"integers of shape {mask.shape}")
    return _principal_vectors(points, groups, mask, num_vectors, num_groups)


@partial(jax.jit, static_argnames=("num_vectors", "num_groups"))
def _principal_vectors(points, groups, mask, num_vectors, num_groups):
    usable = mask & finite_rows([points])
    z = usable_rows(points.astype(sum_dtype(points)), usable)
    count, dim = z.shape
    taken = min(num_vectors, count, dim)
    products = matmul(z, z.T) if count <= dim else None

    def of_group(member):
        member = member.astype(z.dtype)
        few = products is not None
        matrix = products * member[:, None] * member[None, :] if few else matmul(z.T, z * member[:, None])
        values, vectors = jnp.linalg.eigh(matrix)
        values, vectors = values[::-1][:taken], vectors[:, ::-1][:, :taken].T
        vectors = vectors if not few else matmul(vectors * member[None, :], z)
        lengths = jnp.sqrt(jnp.square(vectors).sum(axis=1))
        least = values[0] * 8 * len(matrix) ** 0.5 * jnp.finfo(z.dtype).eps
        real = (values > least) & (lengths > 0)
        unit = jnp.where(real, 1 / jnp.where(real, lengths, 1.0), 0.0)
        # The largest coordinate is positive, so that equal points have equal vectors.
        most = jnp.take_along_axis(vectors, jnp.abs(vectors).argmax(axis=1)[:, None], axis=1)
        return jnp.pad(vectors * unit[:, None] * jnp.where(most < 0, -1.0, 1.0), ((0, num_vectors - taken), (0, 0)))

    def of_any(group):
        member = usable & (groups == group)
        return jax.lax.cond(member.any(), of_group, lambda _: jnp.zeros((num_vectors, dim), z.dtype), member)

    return jax.lax.map(of_any, jnp.arange(num_groups))


def subspace_angles(bases: jax.Array, others: jax.Array | None = None, *, measure: str = "absolute") -> jax.Array:
    """Returns the angle between every two subspaces, in degrees.

    Args:
      bases: `[N, P, D]`, unit vectors that span the subspace of each client; rows of zeros do not count.
      others: `[m, Q, D]`; default: the same.
      measure: `"absolute"`, the smallest angle between a vector of one and a vector of the other, as lines (PACFL's
        first measure, except for signs); `"smallest"`, the smallest principal angle; `"sum"`, the sum of the principal
        angles, as many as the lower of the two dimensions.

    Returns:
      `[N, m]` from 0 on; symmetric, with a zero diagonal, without `others`. An angle to a subspace without vectors is
      90 degrees. Small angles are correct to some hundredths of a degree in float32.

    Raises:
      ValueError: wrong rank or width, an unknown measure.

    Cost: `N m P Q D` multiplications, and `N m` singular value decompositions for principal angles, in tiles: memory
    `O(N m)` beside the input.

    Example:
      >>> import jax.numpy as jnp
      >>> lines = jnp.array([[[1.0, 0.0]], [[0.0, 1.0]], [[0.0, -1.0]]])
      >>> subspace_angles(lines).tolist()
      [[0.0, 90.0, 90.0], [90.0, 0.0, 0.0], [90.0, 0.0, 0.0]]
    """
    check_choice("measure", measure, ANGLES)
    bases = jnp.asarray(bases)
    second = bases if others is None else jnp.asarray(others)
    fits = bases.ndim == 3 == second.ndim and bases.shape[2] == second.shape[2]
    check(fits, "bases", (bases.shape, second.shape), "of shape [N, P, D], with one D")
    angles = _subspace_angles(bases, second, measure)
    if others is not None:
        return angles
    return jnp.where(jnp.eye(len(bases), dtype=bool), 0.0, jnp.minimum(angles, angles.T))


@partial(jax.jit, static_argnames="measure")
def _subspace_angles(bases, others, measure):
    if measure != "absolute":
        (bases, ranks), (others, other_ranks) = jax.vmap(_orthonormal)(bases), jax.vmap(_orthonormal)(others)

    def to_all(subspace):  # its vectors [P, D], and their rank
        basis = subspace if measure == "absolute" else subspace[0]
        products = jnp.einsum("pd,nqd->npq", basis, others, precision=HIGHEST)
        if measure == "absolute":
            return jnp.rad2deg(jnp.arccos(jnp.minimum(jnp.abs(products).max(axis=(1, 2)), 1.0)))
        cosines = jnp.clip(jnp.linalg.svd(products, compute_uv=False), 0.0, 1.0)  # falling
        angles = jnp.rad2deg(jnp.arccos(cosines))
        if measure == "smallest":
            return angles[:, 0]
        common = jnp.minimum(subspace[1], other_ranks)
        counts = jnp.arange(angles.shape[1])[None, :] < common[:, None]
        return jnp.where(common == 0, 90.0, jnp.where(counts, angles, 0.0).sum(axis=1))

    tile = max(TILE // (bases.shape[1] * others.shape[0] * others.shape[1]), 1)
    return jax.lax.map(to_all, bases if measure == "absolute" else (bases, ranks), batch_size=tile)


def _orthonormal(vectors):
    """Returns `(basis [P, D], rank [])` of the span of unit vectors `[P, D]`, with zeros behind the rank."""
    basis = _principal_vectors(
        vectors, jnp.zeros(len(vectors), jnp.int32), jnp.ones(len(vectors), bool), len(vectors), 1
    )
    return basis[0], (jnp.abs(basis[0]).max(axis=1) > 0).sum()
