"""k-means on the device: k-means++ starts, Lloyd's steps, the best of several runs."""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jfcl.core.checks import check, check_count
from jfcl.kernels import blocks
from jfcl.kernels.base import COLUMNS, if_rare, is_computable, shares_columns, sum_dtype
from jfcl.kernels.distances import central_origin

TOLERANCE, MOST_STEPS = 1e-4, 300  # of Lloyd's steps in a run
AT_ONCE = 2**20  # distances and numbers of centres, of all runs that are made at once


class KMeans(NamedTuple):
    """`centers` `[K, D]`; `cluster` `[N]` int32, -1 for masked points; `inertia` `[]`, the sum of squared distances."""

    centers: jax.Array
    cluster: jax.Array
    inertia: jax.Array


def kmeans(
    points: jax.Array,
    num_clusters: int,
    *,
    key: jax.Array,
    num_restarts: int = 10,
    mask: jax.Array | None = None,
) -> KMeans:
    """Clusters points so that their squared distances to the cluster means are small (Lloyd 1982).

    Starts are k-means++ (Arthur, Vassilvitskii 2007), the greedy kind: the best of `2 + ln K` candidates for every
    centre. An empty cluster takes the point that is farthest from its centre.

    Args:
      points: `[N, D]`.
      num_clusters: `K`, from 1 to the number of points that count.
      key: of the starts.
      num_restarts: runs, at least 1; the one with the lowest inertia is returned, up to rounding the first. A run ends
        when the squared moves of all centres sum to at most 1e-4 times the mean variance of a coordinate, or after 300
        steps.
      mask: `[N]` bool: points that count. Inside `jit`, points with NaN or infinity do not.

    Returns:
      `KMeans(centers [K, D], cluster [N] int32, inertia [])`. Points are assigned by distances with the error
      of `squared_distances`: clusters that are narrow for their distance from most points are divided by rounding.

    Cost: `2 N K D` operations a step, twice; `N D` numbers of memory (the points around an origin among them). As many
    runs are made at once as have `2^20` distances and numbers of centres together.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> best = kmeans(jnp.array([[0.0], [1.0], [8.0], [9.0]]), 2, key=jax.random.key(0))
      >>> sorted(best.centers[:, 0].tolist()), float(best.inertia)
      ([0.5, 8.5], 1.0)
    """
    (points,), mask = blocks.checked_rows(jnp.asarray(points), mask)
    total = int(mask.sum()) if is_computable(mask) else len(points)
    check(1 <= num_clusters <= total, "num_clusters", num_clusters, f"from 1 to the number of points, {total}")
    check_count("num_restarts", num_restarts)
    return _kmeans(points, key, mask, num_clusters=num_clusters, num_restarts=num_restarts)


@partial(jax.jit, static_argnames=("num_clusters", "num_restarts"))
def _kmeans(points, key, mask, *, num_clusters, num_restarts):
    points = points.astype(sum_dtype(points))
    usable = mask & blocks.finite_rows([points])
    (origin,) = central_origin([points], usable)
    unit = _unit(points, usable)
    shifted = blocks.usable_rows((points - origin[None, :]) / unit, usable)
    best = _best_run(shifted, key, usable, num_clusters, num_restarts)
    centers, cluster = best.centers * unit + origin[None, :], jnp.where(usable, best.cluster, -1)
    return KMeans(centers, cluster, best.inertia * unit * unit)


def _best_run(shifted, key, usable, num_clusters, num_restarts):
    """Returns the run of the lowest inertia, `KMeans` with any cluster for unusable points, which are zeros here."""
    z = shifted
    dim, norms, products = z.shape[1], blocks.squared_norms([z]), blocks.product_of_rows
    squares_of = lambda x: blocks.squared_norms([x])  # noqa: E731
    in_coefficients = shares_columns()
    if in_coefficients:
        # Centres as combinations of the points: only the inner products of the points are summed over columns, once.
        dim, products, squares_of = dim * jax.lax.axis_size(COLUMNS), *_products_of_combinations(z)
        z = jnp.eye(len(z), dtype=z.dtype)
    count = jnp.maximum(usable.sum(), 1).astype(z.dtype)
    weights = usable.astype(z.dtype)
    center_of_mass = blocks.matmul(weights, z) / count
    of_mass = squares_of(center_of_mass[None, :])[0]
    variance = jnp.maximum((norms.sum() / count - of_mass) / dim, 0.0)

    def distances(centers):
        """`[N, K]` squared; 0 for unusable points."""
        squares = norms[:, None] - 2.0 * products(z, centers) + squares_of(centers)[None, :]
        return jnp.maximum(squares, 0.0) * weights[:, None]

    def from_points(places):
        """`[N, c]`, `distances` from points; 0 where rounding hides them, or a far point would be a centre twice."""
        squares = distances(z[places])
        own = squares[places, jnp.arange(len(places))]
        return jnp.where(squares <= own[None, :], 0.0, squares)

    def inertia(centers, cluster):
        """Sums squared differences; expanded squares have no correct digits for narrow clusters far apart."""

        def add(parts, start, length, total):
            block = jax.lax.dynamic_slice_in_dim(cluster, start, length)
            counts = jax.lax.dynamic_slice_in_dim(weights, start, length)
            return total + blocks.matmul(squares_of(parts[0] - centers[block]), counts)

        return blocks.fold_rows(add, jnp.zeros((), z.dtype), [z])

    def start(key):
        def next_center(k, carry):
            centers, nearest = carry
            chance = jnp.where(nearest.sum() > 0, nearest, weights)  # all points are centres: any will do
            candidates = jax.random.choice(
                jax.random.fold_in(key, k), len(z), (2 + int(math.log(num_clusters)),), p=chance / chance.sum()
            )
            reached = jnp.minimum(nearest[:, None], from_points(candidates))
            best = jnp.argmin(reached.sum(axis=0))
            return centers.at[k].set(z[candidates[best]]), reached[:, best]

        first = jax.random.choice(jax.random.fold_in(key, 0), len(z), (1,), p=weights / count)
        centers = jnp.zeros((num_clusters, z.shape[1]), z.dtype).at[0].set(z[first[0]])
        return jax.lax.fori_loop(1, num_clusters, next_center, (centers, from_points(first)[:, 0]))[0]

    def lloyd(carry):
        centers, _, step = carry
        squares = distances(centers)
        cluster = jnp.argmin(squares, axis=1)
        members = jax.nn.one_hot(cluster, num_clusters, dtype=z.dtype, axis=0) * weights[None, :]
        sizes = members.sum(axis=1)
        means = blocks.matmul(members, z) / jnp.maximum(sizes, 1.0)[:, None]
        farthest = jnp.argsort(squares.min(axis=1), descending=True)  # the e-th empty cluster takes the e-th farthest
        empty = sizes == 0
        moved = jnp.where(empty[:, None], z[farthest[jnp.cumsum(empty) - 1]], means)
        return moved, squares_of(moved - centers).sum(), step + 1

    def run(key):
        moving = (start(key), jnp.full((), jnp.inf, z.dtype), 0)
        going = lambda carry: (carry[1] > TOLERANCE * variance) & (carry[2] < MOST_STEPS)  # noqa: E731
        centers = jax.lax.while_loop(going, lloyd, moving)[0]
        cluster = jnp.argmin(distances(centers), axis=1).astype(jnp.int32)
        return KMeans(centers, cluster, inertia(centers, cluster))

    # Few numbers are clustered by many runs at once, which an accelerator does in the time of one.
    at_once = AT_ONCE // (len(z) * num_clusters + num_clusters * z.shape[1])
    batch_size = None if in_coefficients or at_once < 2 else min(at_once, num_restarts)
    runs = jax.lax.map(run, jax.random.split(key, num_restarts), batch_size=batch_size)
    # The first of those that differ by rounding: they are mostly one partition, with the clusters in another order.
    least = runs.inertia.min() * (1.0 + 100.0 * jnp.finfo(runs.inertia.dtype).eps)
    best = jax.tree.map(lambda x: x[jnp.argmax(runs.inertia <= least)], runs)
    return best._replace(centers=blocks.matmul(best.centers, shifted)) if in_coefficients else best


def _unit(points, usable):
    """Returns `[]`, a power of two: in units of it, sums of squares of the points neither overflow nor underflow."""

    def careful():
        largest = jnp.abs(blocks.usable_rows(points, usable)).max(initial=0.0)
        largest = jax.lax.pmax(largest, COLUMNS) if shares_columns() else largest
        exponent = jnp.clip(jnp.frexp(largest)[1] - 40, limits.minexp + 1, limits.maxexp - 3)
        return jnp.ldexp(one, jnp.where(largest > 0, exponent, 0))

    norms, limits, one = blocks.squared_norms([points]), jnp.finfo(points.dtype), jnp.ones((), points.dtype)
    highest = jnp.where(usable, norms, 0.0).max()
    return if_rare(~((highest > 1e12 * limits.tiny) & (highest < 1e-12 * limits.max)), careful, lambda: one)


def _products_of_combinations(z):
    """Returns the functions of products and squared norms for combinations of the rows `z`, by their coefficients."""
    gram = blocks.symmetric_product([z], lambda part, leaf, start: part)

    def products(x, y):
        return blocks.matmul(x, blocks.matmul(y, gram).T)

    def squares_of(x):
        return jnp.maximum((x * blocks.matmul(x, gram)).sum(axis=1), 0.0)

    return products, squares_of
