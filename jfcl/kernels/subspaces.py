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
      beyond the rank of a group: in float32, singular values below 1e-6 `n^(1/2)` times the largest count as zero.
      Points with NaN or infinity are left out.

    Raises:
      ValueError: wrong rank or lengths, counts below 1.

    Cost: the eigenvectors of an `[n, n]` matrix, `n = min(N, D)`, for each group that has points (under `jax.vmap` for
    each group); `N D n` multiplications. Inner products resolve singular values down to about 1/50 of the largest; for
    smaller ones this is repeated without the vectors that have been found.

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


@partial(jax.jit, static_argnames=("num_vectors", "num_groups", "power"))
def _principal_vectors(points, groups, mask, num_vectors, num_groups, power=2):
    usable = mask & finite_rows([points])
    z = usable_rows(points.astype(sum_dtype(points)), usable)
    count, dim = z.shape
    taken = min(num_vectors, count, dim)
    few = count <= dim
    products = matmul(z, z.T) if few else None
    eps, width = jnp.finfo(z.dtype).eps, min(count, dim)
    resolved = max(eps**0.5, 8 * width**0.5 * eps)  # of squares, as a share of the largest: others are rough
    limit = (8 * width**0.5 * eps) ** power  # of squares, as a share of the largest of all: less is rounding

    def of_group(member):
        counts = member.astype(z.dtype)[:, None]

        def products_of(rest):
            return matmul(rest, rest.T) if few else matmul(rest.T, rest)

        def going(carry):
            return carry[-1]

        def add_largest(carry):
            matrix, rest, basis, found, top, _ = carry
            values, vectors = jnp.linalg.eigh(matrix)
            values, vectors = values[::-1][:taken], vectors[:, ::-1][:, :taken].T
            vectors = matmul(vectors, rest) if few else vectors
            vectors = vectors - matmul(matmul(vectors, basis.T), basis)
            lengths = jnp.sqrt(jnp.square(vectors).sum(axis=1))
            top = jnp.maximum(top, values[0])
            real = (values > values[0] * resolved) & (values > top * limit) & (lengths > 0)
            place = jnp.where(real, found + jnp.arange(taken), taken)
            basis = basis.at[place].set(vectors / jnp.where(real, lengths, 1.0)[:, None], mode="drop")
            found = found + real.sum()
            more = real.any() & (found < taken)

            def without_found():
                less = rest - matmul(matmul(rest, basis.T), basis)
                return products_of(less), less

            return *jax.lax.cond(more, without_found, lambda: (matrix, rest)), basis, found, top, more

        first = products * counts * counts.T if few else matmul(z.T, z * counts)
        start = first, z * counts, jnp.zeros((taken, dim), z.dtype), 0, jnp.zeros((), z.dtype), True
        basis = jax.lax.while_loop(going, add_largest, start)[2]
        # The largest coordinate is positive, so that equal points have equal vectors.
        most = jnp.take_along_axis(basis, jnp.abs(basis).argmax(axis=1)[:, None], axis=1)
        return jnp.pad(basis * jnp.where(most < 0, -1.0, 1.0), ((0, num_vectors - taken), (0, 0)))

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
    """Returns `(basis [P, D], rank [])` of the span of unit vectors `[P, D]`, with zeros behind the rank.

    Vectors that differ by less than about 1e-3 count as one: principal vectors have errors of some 1e-4.
    """
    count = len(vectors)
    one_group = jnp.zeros(count, jnp.int32), jnp.ones(count, bool)
    basis = _principal_vectors(vectors, *one_group, count, 1, power=1)
    return basis[0], (jnp.abs(basis[0]).max(axis=1) > 0).sum()
