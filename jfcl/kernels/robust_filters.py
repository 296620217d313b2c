"""Robust aggregators that leave updates out by their spectrum, direction or signs, and average the others."""

import math
from functools import partial
from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfcl.core.checks import check, check_count
from jfcl.kernels import blocks
from jfcl.kernels.base import PyTree, check_positive, check_whole, is_computable, like, sum_dtype
from jfcl.kernels.dendrogram import cut, linkage_tree
from jfcl.kernels.distances import inner_products
from jfcl.kernels.kmeans import kmeans
from jfcl.kernels.robust import combine, counted, lowest, medians, minority, shares
from jfcl.kernels.similarity import pairwise_cosine

MOST_SUBSETS = 50_000  # that SMEA compares: 6 of 20 clients, 5 of 24, 4 of 34
NORMS = (0.1, 3.0)  # SignGuard's range of norms, in multiples of their median


def _leading(products: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the largest eigenvalue `λ` `[]` of the covariance of weighted rows, and all rows' `τ` `[N]`.

    `τ_i = ((z_i − μ) · v)²` is the squared projection on the eigenvector `v`. With `X` the rows `z_i − μ` times the
    roots of their weights, `Xᵀ X` has the eigenvalues of `X Xᵀ`, which follows from the inner products of the rows.
    """
    share = shares(weights, weights > 0)
    with_mean = blocks.matmul(products, share)
    centred = products - with_mean[:, None] - with_mean[None, :] + (share * with_mean).sum()
    root = jnp.sqrt(share)
    gram = root[:, None] * centred * root[None, :]
    scale = jnp.maximum(jnp.abs(gram).max(), jnp.finfo(gram.dtype).tiny)  # LAPACK may return NaN for large numbers
    values, vectors = jnp.linalg.eigh(gram / scale)
    largest = jnp.maximum(values[-1] * scale, 0.0)
    along = blocks.matmul(centred, root * vectors[:, -1])  # √λ (z_i − μ) · v
    return largest, jnp.square(along / jnp.sqrt(jnp.maximum(largest, jnp.finfo(along.dtype).tiny)))


def caf(updates: PyTree, *, num_malicious: int, mask: jax.Array | None = None) -> PyTree:
    """CAF: lowers the weights of updates that lie far out along the direction of most variance (Allouah et al. 2025).

    From weights `c_i = 1`, while their sum is above `N − 2 f`: with `v` the leading eigenvector of the weighted
    covariance and `τ_i` the squared projection of update `i` on it, `c_i ← c_i (1 − τ_i / max τ)`. The result is that
    of the weighted means whose covariance has the smallest largest eigenvalue. `f` is `num_malicious`, less than half
    of the clients. For the other arguments see `jfcl.kernels`.

    The maximum is over updates with weight left. ByzFL takes it over all, so that with one update far away the weights
    of the others hardly change, and replaces the eigenvector by one step of the power method from a random start.

    Cost: `N² D` operations, and the eigenvectors of `[N, N]` at most `N` times (2 to 10 times for normal numbers
    of 10 to 100 clients).

    Example:
      >>> import jax.numpy as jnp
      >>> caf(jnp.array([[1.0], [2.0], [3.0], [1e6]]), num_malicious=1).round(3).tolist()
      [2.0]
    """
    rows, usable = counted(updates, mask)
    return like(updates, _filtered(rows, usable, minority(num_malicious, usable)))


@jax.jit
def _filtered(rows, usable, f):
    products = inner_products(rows, None, usable)
    everyone = (usable & ~products.far).astype(products.points.dtype)
    least = (usable.sum() - 2 * f).astype(everyone.dtype)

    def lower(carry):
        weights, best, spread, _ = carry
        value, along = _leading(products.points, weights)
        best = jnp.where(value < spread, weights, best)
        along = jnp.where(weights > 0, along, 0.0)
        most = along.max()
        weights *= (most - along) / jnp.where(most > 0, most, 1.0)  # 1 - along / most may not reach 0 in XLA
        return weights, best, jnp.minimum(value, spread), most > 0

    def going(carry):
        return carry[3] & (carry[0].sum() > least)

    start = everyone, everyone, jnp.full((), jnp.inf, everyone.dtype), jnp.ones((), bool)
    return combine(rows, shares(jax.lax.while_loop(going, lower, start)[1], usable), usable)


def smea(updates: PyTree, *, num_malicious: int, mask: jax.Array | None = None) -> PyTree:
    """SMEA: the mean of the `N − f` updates whose covariance has the smallest largest eigenvalue (Allouah et al. 2023).

    `f` is `num_malicious`, a Python number, less than half of the clients. It compares all subsets, at most 50,000. For
    the other arguments see `jfcl.kernels`. ByzFL replaces the eigenvalue by one step of the power method from a random
    start, which may choose another subset.

    Cost: `N² D` operations, and the eigenvalues of `[N, N]` for each of the `N! / (f! (N − f)!)` subsets.

    Example:
      >>> import jax.numpy as jnp
      >>> smea(jnp.array([[1.0], [2.0], [3.0], [1e6]]), num_malicious=1).tolist()
      [2.0]
    """
    rows, usable = counted(updates, mask)
    check(is_computable(num_malicious), "num_malicious", num_malicious, "a Python number, which sets the subsets")
    f, count = minority(num_malicious, usable), len(usable)
    subsets, shown = math.comb(count, int(num_malicious)), f"{num_malicious} of {count} clients"
    few = f"so small that there are at most {MOST_SUBSETS} subsets to compare (these are {subsets}); caf has none"
    check(subsets <= MOST_SUBSETS, "num_malicious", shown, few)
    left_out = np.array(list(combinations(range(count), int(num_malicious))), np.int32)
    return like(updates, _least_spread(rows, usable, left_out, f))


@jax.jit
def _least_spread(rows, usable, left_out, f):
    products = inner_products(rows, None, usable)

    def without(subset):
        return usable.at[subset].set(False)

    def spread(subset):
        members = without(subset)
        value = _leading(products.points, members.astype(products.points.dtype))[0]
        value = jnp.where((members & products.far).any(), jnp.finfo(value.dtype).max, value)
        # With rows that do not count, f may be smaller: those that leave out f of the others are all its subsets.
        return jnp.where(members.sum() == usable.sum() - f, value, jnp.inf)

    best = left_out[jnp.argmin(jax.lax.map(spread, left_out, batch_size=256))]
    return combine(rows, shares(without(best).astype(products.points.dtype), usable), usable)


def monna(updates: PyTree, *, num_malicious: int, trusted: int = 0, mask: jax.Array | None = None) -> PyTree:
    """MoNNA: the mean of the `N − f` updates nearest to that of a trusted client (Farhadkhani et al. 2023).

    `f` is `num_malicious`, less than half of the clients, and `trusted` the row of a client that is known to be honest;
    where it does not count, the first one that does takes its place. In the paper every client trusts itself. For the
    other arguments see `jfcl.kernels`. Cost: two passes.

    Example:
      >>> import jax.numpy as jnp
      >>> monna(jnp.array([[1.0], [2.0], [3.0], [1e6]]), num_malicious=1).tolist()
      [2.0]
    """
    rows, usable = counted(updates, mask)
    check_whole("trusted", trusted, 0, len(usable) - 1, "a row")
    count = usable.sum() - minority(num_malicious, usable)
    return like(updates, _nearest_to(rows, usable, jnp.asarray(trusted), count))


@jax.jit
def _nearest_to(rows, usable, trusted, count):
    center = jnp.where(usable[trusted], trusted, jnp.argmax(usable))
    distances = blocks.distances_from(rows, [x[center] for x in rows], usable)
    return combine(rows, lowest(distances, usable, count), usable)


def dnc(
    updates: PyTree,
    *,
    num_malicious: int,
    num_draws: int = 5,
    num_coordinates: int = 10_000,
    key: jax.Array | None = None,
    mask: jax.Array | None = None,
) -> PyTree:
    """DnC: leaves out the `f` updates farthest along the leading singular vector (Shejwalkar, Houmansadr 2021).

    It does so for each of several draws of coordinates, and returns the mean of the updates that none of them leaves
    out; where there are no such updates, of those that the fewest draws leave out.

    Args:
      num_malicious: `f`, less than half of the clients.
      num_draws: draws of coordinates, at least 1. Updates of at most `num_coordinates` numbers need no draws.
      num_coordinates: in a draw, at least 1.
      key: of the draws, the same in every call; default: a fixed one.
      updates, mask: see `jfcl.kernels`.

    Cost: for each draw, a sort of D random numbers, `N² num_coordinates` operations and the eigenvectors of
    `[N, N]`. Blades averages the updates that any draw keeps; the paper those that all keep.

    Example:
      >>> import jax.numpy as jnp
      >>> dnc(jnp.array([[1.0], [2.0], [3.0], [1e6]]), num_malicious=1).tolist()
      [2.0]
    """
    check_count("num_draws", num_draws)
    check_count("num_coordinates", num_coordinates)
    rows, usable = counted(updates, mask)
    draw = jax.random.key(0) if key is None else key
    f = minority(num_malicious, usable)
    return like(updates, _divided(rows, usable, f, draw, num_draws=num_draws, num_coordinates=num_coordinates))


@partial(jax.jit, static_argnames=("num_draws", "num_coordinates"))
def _divided(rows, usable, f, key, *, num_draws, num_coordinates):
    all_fit = sum(x.shape[1] for x in rows) <= num_coordinates

    def left_out(key):
        products = inner_products(rows if all_fit else [_some_columns(rows, key, num_coordinates)], None, usable)
        near = usable & ~products.far
        scores = jnp.where(near, _leading(products.points, near.astype(products.points.dtype))[1], jnp.inf)
        return usable & (lowest(scores, usable, usable.sum() - f) == 0)

    times = jax.lax.map(left_out, jax.random.split(key, 1 if all_fit else num_draws)).sum(axis=0)
    chosen = usable & (times == jnp.where(usable, times, num_draws).min())
    return combine(rows, shares(chosen.astype(sum_dtype(*rows)), usable), usable)


def _some_columns(rows: list[jax.Array], key: jax.Array, count: int) -> jax.Array:
    """Returns `[N, count]`, random columns of all the matrices."""
    start, dtype = 0, sum_dtype(*rows)
    places = jax.random.choice(key, sum(x.shape[1] for x in rows), (count,), replace=False)
    columns = jnp.zeros((len(rows[0]), count), dtype)
    for x in (x for x in rows if x.shape[1]):
        inside = (places >= start) & (places < start + x.shape[1])
        some = x[:, jnp.clip(places - start, 0, x.shape[1] - 1)].astype(dtype)
        columns, start = jnp.where(inside[None, :], some, columns), start + x.shape[1]
    return columns


def clipped_clustering(updates: PyTree, *, radius: Any = None, mask: jax.Array | None = None) -> PyTree:
    """Clips updates, and returns the mean of the larger of two groups of similar direction (Li, Ngai, Voigt 2023).

    The groups are those of average linkage of `1 − cosine`; of equal groups, the one with the first client. Updates are
    clipped to `radius`, by default the median of their norms. In the paper it is the median of all norms so far: a
    caller who remembers them passes it as `radius`. For the other arguments see `jfcl.kernels`.

    Cost: `N² D` operations, and `3 N` steps of `O(N)`.

    Example:
      >>> import jax.numpy as jnp
      >>> updates = jnp.array([[1.0, 0.0], [2.0, 0.0], [9.0, 0.0], [0.0, -9.0]])
      >>> clipped_clustering(updates).round(3).tolist()
      [2.833..., 0.0]
    """
    if radius is not None:
        check_positive("radius", radius)
    rows, usable = counted(updates, mask)
    return like(updates, _similar(rows, usable, None if radius is None else jnp.asarray(radius, sum_dtype(*rows))))


@jax.jit
def _similar(rows, usable, radius):
    norms, median = _norms(rows, usable)
    tree = linkage_tree(1.0 - pairwise_cosine(rows, mask=usable), mask=usable)
    group = cut(tree, num_clusters=min(2, len(usable)))
    return _clipped_mean(rows, norms, _majority(group, usable), median if radius is None else radius)


def sign_guard(updates: PyTree, *, mask: jax.Array | None = None) -> PyTree:
    """SignGuard: the clipped mean of updates of usual length and usual shares of signs (Xu et al. 2022).

    These are updates with a norm of 0.1 to 3 times the median norm, and in the larger of two groups, those of k-means
    on the shares of coordinates that are positive, negative and zero. They are clipped to the median norm; without any,
    the result is zero. For the arguments see `jfcl.kernels`.

    The authors' code looks at a random tenth of the coordinates, and finds the number of groups by mean shift; Blades
    has two groups and all coordinates, as here.

    Cost: three passes, and k-means on `[N, 3]`.

    Example:
      >>> import jax.numpy as jnp
      >>> updates = jnp.array([[1.0, 1.0], [1.0, 2.0], [2.0, 1.0], [-1.0, -1.0], [9.0, 9.0]])
      >>> sign_guard(updates).round(3).tolist()
      [1.333..., 1.333...]
    """
    rows, usable = counted(updates, mask)
    return like(updates, _same_signs(rows, usable))


@jax.jit
def _same_signs(rows, usable):
    norms, median = _norms(rows, usable)

    def count(part, leaf, start, counts):
        ones = jnp.ones((part.shape[1], 1), norms.dtype)
        signs = [blocks.matmul((side > 0).astype(norms.dtype), ones) for side in (part, -part)]
        return counts + jnp.concatenate(signs, axis=1)

    counts = blocks.fold_columns(count, jnp.zeros((len(usable), 2), norms.dtype), rows, blocks.BLOCK_COLUMNS)
    share = counts / max(sum(x.shape[1] for x in rows), 1)
    features = jnp.concatenate([share, 1.0 - share.sum(axis=1, keepdims=True)], axis=1)
    group = kmeans(features, min(2, len(usable)), key=jax.random.key(0), mask=usable).cluster
    usual = (norms >= NORMS[0] * median) & (norms <= NORMS[1] * median)
    return _clipped_mean(rows, norms, _majority(group, usable) & usual, median)


def _norms(rows: list[jax.Array], usable: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the norms of the rows, `[N]`, and the median of those that count, `[]`."""
    norms = jnp.sqrt(blocks.squared_norms(rows))
    return norms, medians([norms[:, None]], usable)[0][0]


def _majority(group: jax.Array, usable: jax.Array) -> jax.Array:
    """Returns `[N]` bool, the rows that count in the larger of the groups 0 and 1; in that of the first if equal."""
    sizes = jnp.stack([(usable & (group == k)).sum() for k in (0, 1)])
    larger = jnp.where(sizes[0] == sizes[1], group[jnp.argmax(usable)], jnp.argmax(sizes))
    return usable & (group == larger)


def _clipped_mean(rows, norms, chosen, radius):
    """Returns the mean of the chosen rows, each shortened to at most `radius`; one whose square overflows is zero."""
    shorter = jnp.where(norms > radius, radius / jnp.where(norms > 0, norms, 1.0), 1.0).astype(norms.dtype)
    return combine(rows, shares(chosen.astype(norms.dtype), chosen) * shorter, chosen)
