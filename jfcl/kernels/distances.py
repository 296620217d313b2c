"""Inner products and squared distances of points, and a point in the middle of most of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jfcl.core.checks import check
from jfcl.kernels.base import PyTree, row_mask, rows_of, sum_dtype, sum_over_columns
from jfcl.kernels.blocks import (
    finite_rows,
    product_of_rows,
    refuse_nonfinite,
    squared_norms,
    symmetric_product,
    usable_rows,
    weighted_sum,
)
from jfcl.kernels.similarity import signed_sums


def gram(points: PyTree, *, mask: jax.Array | None = None) -> jax.Array:
    """Returns the inner products of all points, `Z Zᵀ`.

    Args:
      points: `[N, D]`, or a pytree of arrays stacked on a leading axis.
      mask: `[N]` bool; rows that do not count have inner product 0, also with NaN.

    Returns:
      `[N, N]`, exactly symmetric. Inside `jit`, rows with NaN or infinity count as masked.

    Raises:
      ValueError: wrong rank or lengths, no points; outside `jit`: rows with NaN or infinity that count.

    Cost: `N² D` multiplications, `O(N²)` memory beside the input.

    Example:
      >>> import jax.numpy as jnp
      >>> gram(jnp.array([[1.0, 2.0], [3.0, 4.0]])).tolist()
      [[5.0, 11.0], [11.0, 25.0]]
    """
    rows = rows_of(points, name="points")
    mask = row_mask(mask, len(rows[0]))
    refuse_nonfinite(rows, name="points", rows_that_count=mask)
    return _gram(rows, mask)


@jax.jit
def _gram(rows, mask):
    usable = mask & finite_rows(rows)
    return symmetric_product(rows, lambda part, leaf, start: usable_rows(part, usable))


def squared_distances(points: PyTree, centers: PyTree | None = None, *, mask: jax.Array | None = None) -> jax.Array:
    """Returns squared Euclidean distances, `‖x‖² − 2 x·y + ‖y‖²`, relative to an origin among the points.

    Relative to zero, an offset that all points share would cost the digits of their differences. Their mean is no
    suitable origin where a few hostile points are far away. The origin is therefore the mean of the quarter of the
    points nearest to a central one.

    Args:
      points: `[N, D]`, or a pytree of arrays stacked on a leading axis.
      centers: `[K, D]` or a pytree of the same structure; default: the points themselves.
      mask: `[N]` bool; points that do not count are infinitely far from all others.

    Returns:
      `[N, N]` (symmetric, zero diagonal), or `[N, K]`; at least 0. The error is of the order of `eps` times the
      squared distance to the origin, so very close pairs far from it have few correct digits. All distances of a point
      are infinite if its square overflows. Inside `jit`, points with NaN or infinity count as masked.

    Raises:
      ValueError: wrong rank or lengths, no points; outside `jit`: rows with NaN or infinity that count.

    Cost: `N² D` (`2 N K D`) multiplications and three passes over the points.

    Example:
      >>> import jax.numpy as jnp
      >>> squared_distances(jnp.array([[0.0, 0.0], [3.0, 4.0], [0.0, 1.0]])).tolist()
      [[0.0, 25.0, 1.0], [25.0, 0.0, 18.0], [1.0, 18.0, 0.0]]
    """
    rows = rows_of(points, name="points")
    mask = row_mask(mask, len(rows[0]))
    refuse_nonfinite(rows, name="points", rows_that_count=mask)
    if centers is None:
        return squared_row_distances(rows, mask)
    others = rows_of(centers, name="centers")
    widths = [x.shape[1] for x in rows], [x.shape[1] for x in others]
    check(widths[0] == widths[1], "centers", widths[1], f"as wide as the points, {widths[0]}")
    refuse_nonfinite(others, name="centers")
    return _squared_distances_to(rows, others, mask)


@jax.jit
def squared_row_distances(rows: list[jax.Array], mask: jax.Array) -> jax.Array:
    """Returns `[N, N]` squared distances of all rows; `inf` for pairs with a masked or non-finite row."""
    usable = mask & finite_rows(rows)
    products = centred_gram(rows, central_origin(rows, usable), usable)
    norms = jnp.diagonal(products)
    squares = jnp.maximum(norms[:, None] + norms[None, :] - 2.0 * products, 0.0)
    same = jnp.eye(len(usable), dtype=bool)
    known = usable[:, None] & usable[None, :] & ~jnp.isnan(squares)  # NaN: the difference of two that overflow
    return jnp.where(same, 0.0, jnp.where(known, squares, jnp.inf)).astype(squares.dtype)


@jax.jit
def _squared_distances_to(rows, others, mask):
    usable = mask & finite_rows(rows)
    origin = central_origin(rows, usable)
    moved = [usable_rows(x - o[None, :], usable) for x, o in zip(rows, origin, strict=True)]
    others = [y - o[None, :] for y, o in zip(others, origin, strict=True)]
    dtype = sum_dtype(*rows)
    products = sum_over_columns(sum(product_of_rows(x, y, dtype) for x, y in zip(moved, others, strict=True)))
    squares = jnp.maximum(squared_norms(moved)[:, None] - 2.0 * products + squared_norms(others)[None, :], 0.0)
    return jnp.where(usable[:, None] & ~jnp.isnan(squares), squares, jnp.inf)


def centred_gram(rows: list[jax.Array], origin: list[jax.Array], usable: jax.Array) -> jax.Array:
    """Returns `(Z − origin)(Z − origin)ᵀ` `[N, N]`, zero for unusable rows, without a shifted copy of `Z`."""

    def moved(part, leaf, start):
        by = jax.lax.dynamic_slice_in_dim(origin[leaf], start, part.shape[1])
        return usable_rows(part - by[None, :], usable)

    return symmetric_product(rows, moved)


def central_origin(rows: list[jax.Array], usable: jax.Array) -> list[jax.Array]:
    """Returns a point in the middle of most usable rows: the mean of the quarter of them nearest to a central one.

    Distances are estimated from 16 random signed sums of each row, to within about a third. The central row is, of 64
    rows, the one with the smallest median distance to all. So nearly half of the rows may be anywhere.

    Returns:
      One vector `[d]` for each matrix `[N, d]`. Cost: 16 multiplications a number, two passes over the rows.
    """
    count = len(usable)
    sketch = signed_sums(rows, usable, jax.random.key(0), 16)
    candidates = jnp.round(jnp.linspace(0, count - 1, min(count, 64))).astype(jnp.int32)
    far = jnp.full((), jnp.inf, sketch.dtype)

    def distances(candidate):
        squares = jnp.square(sketch - sketch[candidate][None, :]).sum(axis=1)
        counts = usable & usable[candidate] & ~jnp.isnan(squares)  # NaN: sums of the row overflow
        return jnp.where(counts, squares, far)

    to_all = jax.lax.map(distances, candidates)  # [64, N]
    half = jnp.maximum((usable.sum() - 1) // 2, 0)
    medians = jnp.sort(to_all, axis=1)[:, half]
    nearest = to_all[jnp.argmin(medians)]
    limit = jnp.sort(nearest)[jnp.maximum((usable.sum() - 1) // 4, 0)]
    near = (nearest <= limit) & usable
    weights = near.astype(sketch.dtype) / jnp.maximum(near.sum(), 1).astype(sketch.dtype)
    return [weighted_sum(x, weights, near) for x in rows]
