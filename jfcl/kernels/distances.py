"""Inner products and squared distances of points, a point in the middle of most of them, and centres among them.

A centre that starts at `c` and moves by averaging points is always `v = Σ_i a_i z_i + b c` with `Σ_i a_i + b = 1`. Its
distances to the points follow from inner products. So after one `Z Zᵀ` (the Gram matrix) a step of a centre, as
`Coefficients` instead of a vector, costs `N²` operations instead of `N D`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jfcl.core.checks import check
from jfcl.kernels import blocks
from jfcl.kernels.base import PyTree, rows_of, sum_dtype, sum_over_columns
from jfcl.kernels.dendrogram import as_pairs
from jfcl.kernels.similarity import signed_sums


def squared_distances(points: PyTree, centers: PyTree | None = None, *, mask: jax.Array | None = None) -> jax.Array:
    """Returns squared Euclidean distances, `‖x‖² − 2 x·y + ‖y‖²`, relative to an origin among the points.

    Relative to zero, an offset that all points share would cost the digits of their differences; relative to the mean,
    so would a few hostile points far away. The origin is the mean of a quarter of the points, those nearest to a
    central one.

    Args:
      points: `[N, D]`, or a pytree of arrays stacked on a leading axis.
      centers: `[K, D]` or a pytree of the same structure; default: the points themselves.
      mask: `[N]` bool; points that do not count are infinitely far from all others.

    Returns:
      `[N, N]` (symmetric, zero diagonal), or `[N, K]`; at least 0. The error is of the order of `eps` times the
      squared distance to the origin, so very close pairs far from it have few correct digits. All distances of a point
      are infinite if its square overflows. Inside `jit`, points with NaN or infinity count as masked.

    Cost: `N² D` (`2 N K D`) operations and three passes over the points.

    Example:
      >>> import jax.numpy as jnp
      >>> squared_distances(jnp.array([[0.0, 0.0], [3.0, 4.0], [0.0, 1.0]])).tolist()
      [[0.0, 25.0, 1.0], [25.0, 0.0, 18.0], [1.0, 18.0, 0.0]]
    """
    rows, mask = blocks.checked_rows(points, mask)
    if centers is None:
        return squared_row_distances(rows, mask)
    center_rows = rows_of(centers, name="centers")
    widths = [x.shape[1] for x in rows], [x.shape[1] for x in center_rows]
    check(widths[0] == widths[1], "centers", widths[1], f"as wide as the points, {widths[0]}")
    blocks.refuse_nonfinite(center_rows, "centers")
    return _squared_distances_to(rows, center_rows, mask)


@jax.jit
def squared_row_distances(rows: list[jax.Array], mask: jax.Array) -> jax.Array:
    """Returns `[N, N]` squared distances of all rows; `inf` for pairs with a masked or non-finite row."""
    usable = mask & blocks.finite_rows(rows)
    products = blocks.symmetric_product(rows, centred(central_origin(rows, usable), usable))
    norms = jnp.diagonal(products)
    squares = jnp.maximum(norms[:, None] + norms[None, :] - 2.0 * products, 0.0)
    same = jnp.eye(len(usable), dtype=bool)
    valid = usable[:, None] & usable[None, :] & ~jnp.isnan(squares)  # NaN: the difference of two that overflow
    return jnp.where(same, 0.0, jnp.where(valid, squares, jnp.inf))


@jax.jit
def _squared_distances_to(rows, centers, mask):
    usable = mask & blocks.finite_rows(rows)
    origin = central_origin(rows, usable)
    shifted = [blocks.usable_rows(x - o[None, :], usable) for x, o in zip(rows, origin, strict=True)]
    centers = [y - o[None, :] for y, o in zip(centers, origin, strict=True)]
    dtype = sum_dtype(*rows)
    products = sum_over_columns(sum(blocks.product_of_rows(x, y, dtype) for x, y in zip(shifted, centers, strict=True)))
    norms, center_norms = blocks.squared_norms(shifted), blocks.squared_norms(centers)
    squares = jnp.maximum(norms[:, None] - 2.0 * products + center_norms[None, :], 0.0)
    return jnp.where(usable[:, None] & ~jnp.isnan(squares), squares, jnp.inf)


def profile_distances(similarity: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
    """Returns the mean absolute difference between two clients' similarities to the others.

    It is FedGroup's MADC of cosine similarities (Duan et al. 2021): in high dimensions, the similarities to all others
    tell more than the one of the two.

    Args:
      similarity: `[N, N]`, symmetric.
      mask: `[N]` bool: clients that count.

    Returns:
      `[N, N]`, symmetric, with a zero diagonal; 0 for two clients without others, and for those that do not count.

    Raises:
      ValueError: similarities that are not square, not finite or not symmetric.

    Cost: `N³` operations, `O(N²)` memory.

    Example:
      >>> import jax.numpy as jnp
      >>> a = jnp.array([[1.0, 0.5, 0.25], [0.5, 1.0, -0.5], [0.25, -0.5, 1.0]])
      >>> profile_distances(a).tolist()
      [[0.0, 0.75, 1.0], [0.75, 0.0, 0.25], [1.0, 0.25, 0.0]]
    """
    return _profile_distances(*as_pairs(similarity, mask, name="similarity"))


@jax.jit
def _profile_distances(similarity, mask):
    num_others = mask.sum() - 2  # than a pair that counts

    def to_all(i):
        apart = jnp.abs(similarity - similarity[i][None, :])  # [j, z]; 0 for clients that do not count
        pair = jnp.diagonal(apart) + apart[:, i]  # z is neither of the two
        distance = (apart.sum(axis=1) - pair) / jnp.maximum(num_others, 1).astype(apart.dtype)
        return jnp.where(mask & mask[i] & (num_others > 0) & (jnp.arange(len(mask)) != i), distance, 0.0)

    distances = jax.lax.map(to_all, jnp.arange(len(similarity)))
    return jnp.maximum((distances + distances.T) / 2, 0.0)


def centred(origin: list[jax.Array], usable: jax.Array) -> Callable[[jax.Array, int, Any], jax.Array]:
    """Returns a function `(part, leaf, start)` of blocks of columns: rows minus `origin`, zero for unusable rows."""

    def shift(part, leaf, start):
        offset = jax.lax.dynamic_slice_in_dim(origin[leaf], start, part.shape[1])
        return blocks.usable_rows(part - offset[None, :], usable)

    return shift


def central_origin(rows: list[jax.Array], usable: jax.Array) -> list[jax.Array]:
    """Returns a point in the middle of most usable rows: the mean of the quarter of them nearest to a central one.

    Distances are estimated from 16 random signed sums of each row, to within about a third. The central row is, of 64
    rows, the one with the smallest median distance to all. So nearly half of the rows may be anywhere.
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
    return [blocks.weighted_sum(x, weights, near) for x in rows]


class Products(NamedTuple):
    """Inner products relative to an origin among the points, from which distances are computed."""

    points: jax.Array  # [N, N]
    far: jax.Array  # [N] bool: points with squares that overflow: zero in the products, at an infinite distance
    starts: jax.Array | None  # [K, N]: of each centre's start with each point; None: the starts are points
    start_norms: jax.Array | None  # [K]


class Coefficients(NamedTuple):
    """`K` centres: `a` `[K, N]` for the points, `b` `[K]` for each centre's own start."""

    a: jax.Array
    b: jax.Array


def inner_products(rows: list[jax.Array], starts: list[jax.Array] | None, usable: jax.Array) -> Products:
    """Returns the products of `rows` (`[N, d]` each) and `starts` (`[K, d]` each); unusable rows count as zero."""
    # Points within a radius of the only centre are near its start, too, wherever most of the points are.
    origin = [x[0] for x in starts] if starts is not None and len(starts[0]) == 1 else central_origin(rows, usable)
    from_origin = centred(origin, usable)
    points = blocks.symmetric_product(rows, from_origin)
    far = ~(jnp.diagonal(points) < jnp.finfo(points.dtype).max / 16)  # sums of a few products must not overflow either
    points = jnp.where(far[:, None] | far[None, :], jnp.zeros_like(points), points)
    if starts is None:
        return Products(points, far, None, None)
    shifted = [s - o[None, :] for s, o in zip(starts, origin, strict=True)]

    def add(part, leaf, start, total):
        of_starts = jax.lax.dynamic_slice_in_dim(shifted[leaf], start, part.shape[1], axis=1)
        return total + blocks.product_of_rows(of_starts, from_origin(part, leaf, start), total.dtype)

    zeros = jnp.zeros((len(shifted[0]), len(usable)), points.dtype)
    of_starts = jnp.where(far[None, :], zeros, sum_over_columns(blocks.fold_columns(add, zeros, rows, 4096)))
    return Products(points, far, of_starts, blocks.squared_norms(shifted))


def at_start(products: Products) -> Coefficients:
    """Returns the coefficients of every centre at its start."""
    count, dtype = len(products.points), products.points.dtype
    if products.starts is None:
        return Coefficients(jnp.eye(count, dtype=dtype), jnp.zeros(count, dtype))
    return Coefficients(jnp.zeros_like(products.starts), jnp.ones_like(products.start_norms))


def moved(centers: Coefficients, inside: jax.Array) -> Coefficients:
    """Returns the centres after a step: shares `inside` `[K, N]` of the points, and the rest of 1 of the centre."""
    stay = 1.0 - inside.sum(axis=1)
    return Coefficients(inside + stay[:, None] * centers.a, stay * centers.b)


def center_distances(products: Products, centers: Coefficients) -> tuple[jax.Array, jax.Array]:
    """Returns `[K, N]` distances of centres and points, and `[K]` squared norms of the centres, from the origin.

    A centre with a share of a `far` point is far from all.
    """
    a, b = centers
    to_points = blocks.matmul(a, products.points)
    norms = (a * to_points).sum(axis=1)
    if products.starts is not None:
        norms += 2.0 * b * (a * products.starts).sum(axis=1) + b * b * products.start_norms
        to_points += b[:, None] * products.starts
    point_norms = jnp.diagonal(products.points)
    squares = point_norms[None, :] - 2.0 * to_points + norms[:, None]
    away = products.far[None, :] | ((a != 0) & products.far[None, :]).any(axis=1, keepdims=True)
    return jnp.sqrt(jnp.where(away | jnp.isnan(squares), jnp.inf, jnp.maximum(squares, 0.0))), norms


def positions(centers: Coefficients, rows: list[jax.Array], starts: list[jax.Array] | None, usable) -> list[jax.Array]:
    """Returns the centres as vectors: `[K, d]` for each matrix of `rows`."""
    a, b = centers
    sums = [blocks.weighted_sum(x, a, usable) for x in rows]
    if starts is None:
        return sums
    return [m + b.astype(m.dtype)[:, None] * s for m, s in zip(sums, starts, strict=True)]
