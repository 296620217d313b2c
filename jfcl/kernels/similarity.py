"""Cosine similarities of clients, random projections, and checks of similarity matrices."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jfcl.core.checks import check, check_count
from jfcl.kernels import blocks
from jfcl.kernels.base import COLUMNS, PyTree, if_rare, is_computable, shares_columns, sum_dtype, sum_over_columns


def pairwise_cosine(updates: PyTree, *, mask: jax.Array | None = None) -> jax.Array:
    """Returns the cosine similarity of every two clients' updates (Clustered Federated Learning, equation 44).

    Args:
      updates: `[N, D]`, or a pytree of arrays stacked on a leading client axis.
      mask: `[N]` bool; rows that do not count (padding clients) have similarity 0 to all rows, even with NaN.

    Returns:
      `[N, N]` float32 (float64 for float64 updates), exactly symmetric, within [-1, 1]. A zero row has similarity 0
      to all rows, itself included; so does a row with a norm below the smallest normal number. Inside `jit`, a row with
      NaN or infinity has similarity -1 to every other row, so that bipartitions separate it first.

    Cost: `N² D` operations (the upper triangle), `O(N²)` memory beside the input.

    Example:
      >>> import jax.numpy as jnp
      >>> pairwise_cosine(jnp.array([[3.0, 0.0], [0.0, 2.0], [-1.0, 0.0]])).tolist()
      [[1.0, 0.0, -1.0], [0.0, 1.0, 0.0], [-1.0, 0.0, 1.0]]
    """
    return _pairwise_cosine(*blocks.checked_rows(updates, mask, "updates"))


@jax.jit
def _pairwise_cosine(rows, mask):
    finite = blocks.finite_rows(rows)
    usable = mask & finite
    scale = unit_scale(rows, usable)
    similarity = blocks.symmetric_product(rows, lambda part, leaf, start: scaled_rows(part, usable, scale))
    similarity = jnp.clip(similarity, -1.0, 1.0)
    itself = jnp.eye(len(mask), dtype=bool)
    counted = mask[:, None] & mask[None, :]
    nonzero = scale[1] > 0
    similarity = jnp.where(itself, nonzero.astype(similarity.dtype)[:, None], similarity)
    broken = ~finite[:, None] | ~finite[None, :]
    return jnp.where(broken & counted, jnp.where(itself, 1.0, -1.0).astype(similarity.dtype), similarity)


def similarity_tolerance(num_parameters: int, dtype: Any = jnp.float32) -> float:
    """Returns how far rounding alone brings the computed similarity of parallel updates below 1.

    `1 - similarity <= similarity_tolerance(D, dtype)` therefore means that the updates are identical except for their
    lengths, within the precision. Directions that differ by an angle above `sqrt(2 tolerance)` are distinguished.

    The bound is the sum of two:

    * `8 (sqrt(D) + 1) u` for sums of `D` products. Rounding errors of mean zero leave a sum of `D` terms, in any order,
      off by more than `λ sqrt(D) u` of the sum of magnitudes with probability `2 exp(-λ² / 2)` at most (Higham, Mary
      2019, theorem 2.4; the worst case is `D u`). A similarity has such an error in the product, and half of one in
      each of the two lengths; `λ = 4`. `u` is the unit roundoff of float32, or of float64 for float64 updates.
      Products of long rows on a GPU have smaller errors (see `jfcl.kernels.gram_gpu`).
    * `2 u'` for updates in a type of fewer digits, with unit roundoff `u'`, to which both normalised rows are rounded.

    Args:
      num_parameters: `D`, the numbers in one client's update, at least 1.
      dtype: of the updates; of leaves in several types, the one with the fewest digits.

    Returns:
      A Python float: 1.0e-5 for 400 numbers in float32, 4.8e-4 for a million.

    Example:
      >>> similarity_tolerance(10_000) < 5e-5 < similarity_tolerance(10_000, "bfloat16")
      True
    """
    check_count("num_parameters", num_parameters, most=2**62)
    dtype = jnp.dtype(dtype)
    check(jnp.issubdtype(dtype, jnp.floating), "dtype", dtype, "a floating-point type")
    roundoff = lambda dtype: float(jnp.finfo(dtype).eps) / 2  # noqa: E731
    sums = 8 * (math.sqrt(num_parameters) + 1) * roundoff(jnp.float64 if dtype == jnp.float64 else jnp.float32)
    return sums + (2 * roundoff(dtype) if dtype.itemsize < 4 else 0.0)


def unit_scale(rows: list[jax.Array], usable: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns two factors `[N]` that scale a row to length 1; the second is 0 for zero and unusable rows.

    Where a sum of squares over- or underflows, the first is a power of two that prevents it; otherwise it is 1.
    """

    def plain():
        return jnp.ones(norms.shape, norms.dtype), norms

    def careful():
        limits = jnp.finfo(norms.dtype)
        largest = jnp.stack([jnp.abs(x).max(axis=1, initial=0).astype(norms.dtype) for x in rows]).max(axis=0)
        largest = jax.lax.pmax(largest, COLUMNS) if shares_columns() else largest
        exponent = jnp.clip(jnp.frexp(largest)[1], limits.minexp + 1, limits.maxexp - 3)
        power = jnp.ldexp(jnp.ones_like(norms), -jnp.where(usable & (largest > 0), exponent, 0))

        def add(part, leaf, start, total):
            return total + blocks.squares_of_share([scaled_rows(part, usable, (power, jnp.ones_like(power)))])

        width = blocks.column_block(len(norms))
        return power, sum_over_columns(blocks.fold_columns(add, jnp.zeros_like(norms), rows, width))

    norms = blocks.squared_norms(rows)
    tiny = jnp.finfo(norms.dtype).tiny
    # Numbers above sqrt(tiny/eps) lose nothing to underflow in a sum of squares.
    safe = jnp.isfinite(norms) & (norms > 1e10 * tiny)
    power, norms = if_rare(~(safe | ~usable).all(), careful, plain)
    norms = jnp.where(usable, norms, jnp.zeros_like(norms))
    return power, jnp.where(norms > tiny, jax.lax.rsqrt(jnp.maximum(norms, tiny)), jnp.zeros_like(norms))


def scaled_rows(x: jax.Array, usable: jax.Array, scale: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Returns `x` with row `i` times both factors of `scale`; zeros in rows that are not `usable`."""
    power, inverse = (s[:, None] for s in scale)
    # In the factors' type: rounded to 16 bits, they would scale a whole row wrongly, or be infinite.
    return jnp.where(usable[:, None], x.astype(power.dtype) * power * inverse, 0.0).astype(x.dtype)


def signed_sums(
    rows: list[jax.Array], usable: jax.Array, key: jax.Array, count: int, block: int | None = None
) -> jax.Array:
    """Returns `[N, count]`, sums of each row's numbers with random signs, drawn block by block; 0 for unusable rows.

    The signs depend on `key`, on the widths of `rows`, on `block` (columns; default: chosen by `N`), and on the device
    where each has a share of the columns.
    """
    dtype = sum_dtype(*rows)
    key = jax.random.fold_in(key, jax.lax.axis_index(COLUMNS)) if shares_columns() else key

    def add(part, leaf, start, total):
        place = jax.random.fold_in(jax.random.fold_in(key, leaf), start)
        bits = jax.random.bits(place, (part.shape[1], -(-count // 32), 1), jnp.uint32)  # 32 signs each
        bits = (bits >> jnp.arange(32, dtype=jnp.uint32)[None, None, :]) & jnp.uint32(1)
        signs = 1.0 - 2.0 * bits.reshape(part.shape[1], -1)[:, :count].astype(dtype)
        return total + blocks.matmul(blocks.usable_rows(part, usable).astype(dtype), signs)

    zeros = jnp.zeros((len(usable), count), dtype)
    return sum_over_columns(blocks.fold_columns(add, zeros, rows, block or blocks.column_block(len(usable))))


def as_similarity(similarity: Any, *, name: str = "similarity") -> jax.Array:
    """Returns `similarity` `[N, N]`, float32 at least, checked to be square, and outside `jit` finite and symmetric.

    Symmetry is checked on products with a vector of random signs from both sides, which read the matrix twice. Rounding
    passes; one difference of a hundredth of the largest root mean square of a row, or of 1 where those are smaller,
    does not (several may cancel).
    """
    similarity = jnp.asarray(similarity)
    square = similarity.ndim == 2 and similarity.shape[0] == similarity.shape[1] > 0
    check(square, name, similarity.shape, "of shape [N, N] with N >= 1")
    real = any(jnp.issubdtype(similarity.dtype, kind) for kind in (jnp.floating, jnp.integer))
    check(real, name, similarity.dtype, "of real numbers")
    similarity = similarity.astype(sum_dtype(similarity))  # 16 bits hold neither counts nor names of clusters
    if is_computable(similarity):
        difference = float(_asymmetry(similarity))
        if difference != difference:  # NaN
            blocks.refuse_nonfinite([similarity], name)
        # Sums of large entries have larger errors; similarities need no third read.
        fits = difference <= 5e-3 or difference <= 5e-3 * float(_largest_row(similarity))
        check(fits, name, f"rows and columns that differ by {difference:.2g}", "symmetric")
    return similarity


@jax.jit
def _asymmetry(similarity):
    signs = jax.random.rademacher(jax.random.key(0), (len(similarity),), similarity.dtype)
    return jnp.abs(similarity @ signs - signs @ similarity).max()


@jax.jit
def _largest_row(similarity):
    """Returns the largest root mean square of a row."""
    return jnp.sqrt(blocks.squared_norms([similarity]).max() / len(similarity))


def as_clusters(clusters: Any, count: int) -> jax.Array:
    """Returns `clusters` as integers `[count]`, or raises `ValueError`."""
    clusters = jnp.asarray(clusters)
    fits = clusters.shape == (count,) and jnp.issubdtype(clusters.dtype, jnp.integer)
    check(fits, "clusters", (clusters.shape, str(clusters.dtype)), f"integers of shape ({count},)")
    return clusters
