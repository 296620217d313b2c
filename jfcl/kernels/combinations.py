"""Centres among points, represented by coefficients instead of vectors of D numbers.

A centre that starts at `c` and moves by averaging points is always `v = Σ_i a_i z_i + b c` with `Σ_i a_i + b = 1`. Its
distances to the points follow from inner products. So after one `Z Zᵀ` (the Gram matrix) a step costs `N²` operations
for a centre instead of `N D`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jfcl.kernels.base import sum_over_columns
from jfcl.kernels.blocks import HIGHEST, fold_columns, product_of_rows, squared_norms, usable_rows, weighted_sum
from jfcl.kernels.distances import central_origin, centred_gram


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
    origin = origin_of(rows, starts, usable)
    points = centred_gram(rows, origin, usable)
    far = ~(jnp.diagonal(points) < jnp.finfo(points.dtype).max / 16)  # sums of a few products must not overflow either
    points = jnp.where(far[:, None] | far[None, :], jnp.zeros_like(points), points)
    if starts is None:
        return Products(points, far, None, None)
    moved = [s - o[None, :] for s, o in zip(starts, origin, strict=True)]

    def add(part, leaf, start, total):
        by = jax.lax.dynamic_slice_in_dim(origin[leaf], start, part.shape[1])
        of_starts = jax.lax.dynamic_slice_in_dim(moved[leaf], start, part.shape[1], axis=1)
        return total + product_of_rows(of_starts, usable_rows(part - by[None, :], usable), total.dtype)

    zeros = jnp.zeros((len(moved[0]), len(usable)), points.dtype)
    of_starts = jnp.where(far[None, :], zeros, sum_over_columns(fold_columns(add, zeros, rows, 4096)))
    return Products(points, far, of_starts, squared_norms(moved))


def origin_of(rows: list[jax.Array], starts: list[jax.Array] | None, usable: jax.Array) -> list[jax.Array]:
    """Returns an origin near the points that count: the only centre's start, or of several centres a central point.

    Points within a radius of the only centre are near its start, too, wherever most of the points are.
    """
    if starts is None or len(starts[0]) > 1:
        return central_origin(rows, usable)
    return [x[0] for x in starts]


def at_start(products: Products, num_centers: int) -> Coefficients:
    """Returns the coefficients of every centre at its start."""
    count, dtype = len(products.points), products.points.dtype
    if products.starts is None:
        return Coefficients(jnp.eye(count, dtype=dtype), jnp.zeros(count, dtype))
    return Coefficients(jnp.zeros((num_centers, count), dtype), jnp.ones(num_centers, dtype))


def distances(products: Products, centers: Coefficients) -> tuple[jax.Array, jax.Array]:
    """Returns `[K, N]` distances of centres and points, and `[K]` squared norms of the centres, from the origin.

    A centre with a share of a `far` point is far from all.
    """
    a, b = centers
    to_points = jnp.matmul(a, products.points, precision=HIGHEST)
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
    moved = [weighted_sum(x, a, usable) for x in rows]
    if starts is None:
        return moved
    return [m + b.astype(m.dtype)[:, None] * s for m, s in zip(moved, starts, strict=True)]
