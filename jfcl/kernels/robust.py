"""Robust aggregators: one vector from the updates of all clients, some of them hostile.

Every aggregator takes `updates`, `[N, D]` or a pytree of arrays stacked on a leading client axis, and returns `[D]` or
that pytree without the axis. Common to all:

* `mask`: `[N]` bool, who counts.
* Clients whose update has NaN or infinity are left out, never part of anything; `return_excluded=True` returns
  `(aggregate, excluded)` with their number, `[]` int32 (masked clients are not among them).
* Nobody left: zeros.
* `num_malicious`: how many clients of those who count may be hostile, `f` in the papers.

Pre-aggregators return `(updates, mask)` to hand on:

    mixed, mask = nearest_neighbour_mixing(updates, num_malicious=2)
    result = krum(mixed, num_malicious=2, mask=mask)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jfcl.core.checks import check
from jfcl.kernels.base import (
    PyTree,
    distances_from,
    finite_rows,
    fold_blocks,
    is_computable,
    num_rows,
    row_mask,
    rows_of,
    squared_norms,
    sum_dtype,
)
from jfcl.kernels.similarity import _squared_distances, usable_rows, weighted_sum

MEDIAN_TOLERANCE = 1e-6  # of the geometric median: the length of the mean unit vector towards all updates
MEDIAN_STEPS = 300  # at most
MAX_SUBSETS_OF = 20  # clients in minimum_diameter: every subset is looked at


def aggregate(
    updates: PyTree,
    mask: jax.Array | None,
    return_excluded: bool,
    rule: Callable[[list[jax.Array], jax.Array], list[jax.Array]],
) -> Any:
    """What all aggregators share: `rule(rows, usable)` makes vectors `[d]` of matrices `[N, d]` and who counts."""
    rows, usable = counted(updates, mask)
    leaves, structure = jax.tree.flatten(updates)
    parts = [v.reshape(jnp.shape(leaf)[1:]) for v, leaf in zip(rule(rows, usable), leaves, strict=True)]
    result = jax.tree.unflatten(structure, parts)
    return (result, (row_mask(mask, len(usable)) & ~usable).sum().astype(jnp.int32)) if return_excluded else result


def counted(updates: PyTree, mask: jax.Array | None) -> tuple[list[jax.Array], jax.Array]:
    """The rows, and which of them count: not masked, and finite."""
    rows = rows_of(updates)
    return rows, row_mask(mask, len(rows[0])) & finite_rows(rows)


def check_malicious(updates: PyTree, num_malicious: Any, most: Callable[[int], int], why: str) -> int:
    """The number of rows, after checking that `num_malicious` is from 0 to `most(N)`."""
    count = num_rows(updates)
    if is_computable(num_malicious):
        whole = 0 <= num_malicious <= most(count) and num_malicious == int(num_malicious)
        check(whole, "num_malicious", num_malicious, f"a whole number from 0 to {most(count)} ({why})")
    return count


@jax.jit
def _combine(rows, weights, usable):
    """`Σ_i weights[i] z_i`, for every matrix and every row of weights (`[N]`, or `[K, N]`)."""
    return [weighted_sum(x, weights, usable) for x in rows]


def mean(
    updates: PyTree,
    *,
    weights: jax.Array | None = None,
    mask: jax.Array | None = None,
    return_excluded: bool = False,
) -> Any:
    """The weighted mean; not robust, what the others are compared with.

    Args:
      updates: `[N, D]` or a stacked pytree.
      weights: `[N]`, at least 0; default: all equal.
      mask, return_excluded: see the module.

    Raises:
      ValueError: wrong rank or lengths; negative weights (outside `jit`).

    Cost: one pass.

    Example:
      >>> import jax.numpy as jnp
      >>> mean(jnp.array([[1.0], [3.0], [jnp.nan]]), return_excluded=True)
      (Array([2.], dtype=float32), Array(1, dtype=int32))
    """
    weights = check_weights(updates, weights)
    return aggregate(
        updates, mask, return_excluded, lambda rows, usable: _combine(rows, shares(weights, usable), usable)
    )


def check_weights(updates: PyTree, weights: jax.Array | None) -> jax.Array:
    """`[N]` float32 weights, ones for `None`."""
    count = num_rows(updates)
    if weights is None:
        return jnp.ones(count, jnp.float32)
    weights = jnp.asarray(weights)
    check(weights.shape == (count,), "weights", weights.shape, f"of shape ({count},)")
    if is_computable(weights):
        check((weights >= 0).all(), "weights", weights.tolist(), "at least 0, and not NaN")
    return weights.astype(jnp.float32)


def shares(weights: jax.Array, usable: jax.Array) -> jax.Array:
    """`weights` of the usable rows, scaled to sum to 1 (all zero where they sum to 0)."""
    weights = jnp.where(usable, weights, jnp.zeros_like(weights))
    total = weights.sum()
    return weights / jnp.where(total > 0, total, jnp.ones_like(total))


def by_columns(fn: Callable[[jax.Array], jax.Array], rows: list[jax.Array], block: int = 512) -> list[jax.Array]:
    """`fn` from `[N, c]` to `[c]` for all columns of every matrix, a block that fits the cache at a time."""

    def of_matrix(x):
        def put(start, length, out):
            part = jax.lax.dynamic_slice_in_dim(x, start, length, axis=1)
            return jax.lax.dynamic_update_slice_in_dim(out, fn(part).astype(out.dtype), start, axis=0)

        return fold_blocks(put, jnp.zeros(x.shape[1], x.dtype), x.shape[1], block)

    return [of_matrix(x) for x in rows]


def sort_columns(x: jax.Array) -> jax.Array:
    """`[N, c]` with every column in ascending order.

    A bitonic network (Batcher 1968): `log2(N)²/2` steps of minima and maxima of whole rows, which vectorise, where
    XLA's sort on a CPU goes number by number and takes 8 to 24 times as long.
    """
    count, width = x.shape
    if count > 512:  # the network is a long program by then
        return jnp.sort(x, axis=0)
    padded = 2 ** math.ceil(math.log2(count))
    x = jnp.pad(x, ((0, padded - count), (0, 0)), constant_values=jnp.inf)
    size = 2
    while size <= padded:
        # Two ascending halves: the second, turned round, makes them one hill; then ever shorter steps level it.
        low, high = x.reshape(padded // size, 2, size // 2, width).swapaxes(0, 1)
        high = high[:, ::-1]
        x = jnp.stack([jnp.minimum(low, high), jnp.maximum(low, high)[:, ::-1]], axis=1).reshape(padded, width)
        stride = size // 4
        while stride:
            low, high = x.reshape(padded // (2 * stride), 2, stride, width).swapaxes(0, 1)
            x = jnp.stack([jnp.minimum(low, high), jnp.maximum(low, high)], axis=1).reshape(padded, width)
            stride //= 2
        size *= 2
    return x[:count]


def _column_trimmed_mean(part: jax.Array, usable: jax.Array, trimmed: jax.Array) -> jax.Array:
    """`[c]` from `[N, c]`: the mean of the usable numbers without the `trimmed` lowest and highest."""
    ordered = sort_columns(jnp.where(usable[:, None], part, jnp.full((), jnp.inf, part.dtype)))
    places = jnp.arange(len(usable))
    keep = (places >= trimmed) & (places < usable.sum() - trimmed)
    kept = jnp.where(keep[:, None], ordered, jnp.zeros((), part.dtype))
    dtype = sum_dtype(part)
    return (kept.sum(axis=0, dtype=dtype) / jnp.maximum(keep.sum(), 1).astype(dtype)).astype(part.dtype)


@jax.jit
def _trimmed_means(rows, usable, trimmed):
    return by_columns(lambda part: _column_trimmed_mean(part, usable, trimmed), rows)


def _medians(rows, usable):
    return _trimmed_means(rows, usable, jnp.maximum(usable.sum() - 1, 0) // 2)


def coordinate_median(updates: PyTree, *, mask: jax.Array | None = None, return_excluded: bool = False) -> Any:
    """The median of every coordinate (Yin et al. 2018); of an even number, the mean of the middle two.

    Args:
      updates: `[N, D]` or a stacked pytree.
      mask, return_excluded: see the module.

    Raises:
      ValueError: wrong rank or lengths.

    Cost: sorts N numbers D times.

    Example:
      >>> import jax.numpy as jnp
      >>> coordinate_median(jnp.array([[1.0], [2.0], [1e6]])).tolist()
      [2.0]
    """
    return aggregate(updates, mask, return_excluded, _medians)


def trimmed_mean(
    updates: PyTree, *, num_malicious: int, mask: jax.Array | None = None, return_excluded: bool = False
) -> Any:
    """The mean of every coordinate without its `f` largest and `f` smallest numbers (Yin et al. 2018).

    Args:
      updates: `[N, D]` or a stacked pytree.
      num_malicious: `f`, less than half of the clients.
      mask, return_excluded: see the module.

    Raises:
      ValueError: wrong rank or lengths; `2 f >= N`.

    Cost: sorts N numbers D times.

    Example:
      >>> import jax.numpy as jnp
      >>> trimmed_mean(jnp.array([[1.0], [2.0], [3.0], [1e6]]), num_malicious=1).tolist()
      [2.5]
    """
    check_malicious(updates, num_malicious, lambda n: (n - 1) // 2, "2 f < N")
    return aggregate(
        updates,
        mask,
        return_excluded,
        lambda rows, usable: _trimmed_means(rows, usable, _at_most_half(num_malicious, usable)),
    )


def _at_most_half(num_malicious, usable):
    """`f`, or what is left of it after exclusions: fewer than half of the usable rows."""
    return jnp.minimum(jnp.asarray(num_malicious), jnp.maximum(usable.sum() - 1, 0) // 2)


@jax.jit
def _means_around_median(rows, usable, num_kept):
    num_kept = jnp.minimum(num_kept, usable.sum())

    def of_columns(part):
        median = _column_trimmed_mean(part, usable, jnp.maximum(usable.sum() - 1, 0) // 2)
        away = jnp.where(usable[:, None], jnp.abs(part - median[None, :]), jnp.full((), jnp.inf, part.dtype))
        reach = sort_columns(away)[jnp.maximum(num_kept - 1, 0)][None, :]

        dtype = sum_dtype(part)

        def sums(which):
            kept = jnp.where(which, part, jnp.zeros((), part.dtype))
            return kept.sum(axis=0, dtype=dtype), which.sum(axis=0).astype(dtype)

        # Numbers at the very edge, one on either side say, share the places that are left.
        inner, num_inner = sums((away < reach) & usable[:, None])
        edge, num_edge = sums((away == reach) & usable[:, None])
        kept = num_kept.astype(dtype)
        total = inner + jnp.where(num_edge > 0, edge * (kept - num_inner) / jnp.maximum(num_edge, 1.0), 0.0)
        return (total / jnp.maximum(kept, 1.0)).astype(part.dtype)

    return by_columns(of_columns, rows)


def mean_around_median(
    updates: PyTree, *, num_malicious: int, mask: jax.Array | None = None, return_excluded: bool = False
) -> Any:
    """MeaMed: in every coordinate the mean of the `N - f` numbers nearest to the median (Xie et al. 2018).

    Numbers that are equally far share the last places.

    Args:
      updates: `[N, D]` or a stacked pytree.
      num_malicious: `f`, less than half of the clients.
      mask, return_excluded: see the module.

    Raises:
      ValueError: wrong rank or lengths; `2 f >= N`.

    Cost: sorts N numbers D times, twice.

    Example:
      >>> import jax.numpy as jnp
      >>> mean_around_median(jnp.array([[1.0], [2.0], [3.0], [1e6]]), num_malicious=1).tolist()
      [2.0]
    """
    check_malicious(updates, num_malicious, lambda n: (n - 1) // 2, "2 f < N")
    return aggregate(
        updates,
        mask,
        return_excluded,
        lambda rows, usable: _means_around_median(rows, usable, usable.sum() - _at_most_half(num_malicious, usable)),
    )


def _krum_scores(squares: jax.Array, usable: jax.Array, num_malicious: jax.Array) -> jax.Array:
    """`[N]`: the sum of each row's squared distances to its `n - f - 2` nearest others; `inf` for unusable rows.

    A row so long that its squared distances overflow has the largest number there is: last of those who count.
    """
    others = usable[:, None] & usable[None, :] & ~jnp.eye(len(usable), dtype=bool)
    nearest = jnp.sort(jnp.where(others & ~jnp.isnan(squares), squares, jnp.inf), axis=1)
    few = jnp.minimum(jnp.maximum(usable.sum() - num_malicious - 2, 1), usable.sum() - 1)
    scores = jnp.where(jnp.arange(len(usable)) < few, nearest, 0.0).sum(axis=1)
    return jnp.where(usable, jnp.minimum(scores, jnp.finfo(scores.dtype).max), jnp.inf)


@jax.jit
def _best_scored(squares, usable, num_malicious, num_selected):
    """`[N]` shares: equal for the `num_selected` rows with the lowest Krum scores."""
    scores = _krum_scores(squares, usable, num_malicious)
    rank = jnp.zeros(len(usable), jnp.int32).at[jnp.argsort(scores, stable=True)].set(jnp.arange(len(usable)))
    return shares(((rank < num_selected) & usable).astype(squares.dtype), usable)


def krum(updates: PyTree, *, num_malicious: int, mask: jax.Array | None = None, return_excluded: bool = False) -> Any:
    """The update with the smallest sum of squared distances to its `N - f - 2` nearest others (Blanchard et al. 2017).

    Args:
      updates: `[N, D]` or a stacked pytree.
      num_malicious: `f`, at most `N - 3` (the paper's guarantee asks for `2 f + 2 < N`).
      mask, return_excluded: see the module.

    Returns:
      One of the updates; of equally good ones the first.

    Raises:
      ValueError: wrong rank or lengths; `f > N - 3`.

    Cost: `N² D` multiplications.

    Example:
      >>> import jax.numpy as jnp
      >>> krum(jnp.array([[1.0], [1.1], [1.3], [50.0]]), num_malicious=1).tolist()
      [1.0]
    """
    return multi_krum(updates, num_malicious=num_malicious, num_selected=1, mask=mask, return_excluded=return_excluded)


def multi_krum(
    updates: PyTree,
    *,
    num_malicious: int,
    num_selected: int | None = None,
    mask: jax.Array | None = None,
    return_excluded: bool = False,
) -> Any:
    """The mean of the updates with the best Krum scores (Blanchard et al. 2017).

    Args:
      updates: `[N, D]` or a stacked pytree.
      num_malicious: `f`, at most `N - 3`.
      num_selected: how many to average; default `N - f`.
      mask, return_excluded: see the module.

    Raises:
      ValueError: wrong rank or lengths; `f > N - 3`; `num_selected` outside `1 .. N`.

    Cost: `N² D` multiplications.

    Example:
      >>> import jax.numpy as jnp
      >>> print(multi_krum(jnp.array([[1.0], [1.1], [1.3], [50.0]]), num_malicious=1, num_selected=2))
      [1.05]
    """
    count = check_malicious(updates, num_malicious, lambda n: max(n - 3, 0), "f <= N - 3")
    if num_selected is not None and is_computable(num_selected):
        check(1 <= num_selected <= count, "num_selected", num_selected, f"from 1 to N = {count}")

    def rule(rows, usable):
        selected = usable.sum() - jnp.asarray(num_malicious) if num_selected is None else jnp.asarray(num_selected)
        squares = _squared_distances(rows, usable)
        weights = _best_scored(squares, usable, jnp.asarray(num_malicious), jnp.maximum(selected, 1))
        return _combine(rows, weights, usable)

    return aggregate(updates, mask, return_excluded, rule)


def bulyan(updates: PyTree, *, num_malicious: int, mask: jax.Array | None = None, return_excluded: bool = False) -> Any:
    """Krum, `N - 2 f` times over, then in every coordinate the mean around their median (El Mhamdi et al. 2018).

    Args:
      updates: `[N, D]` or a stacked pytree.
      num_malicious: `f`, with `4 f + 3 <= N`.
      mask, return_excluded: see the module.

    Returns:
      The mean of the `N - 4 f` chosen numbers nearest to the median of the `N - 2 f` chosen, in every coordinate.

    Raises:
      ValueError: wrong rank or lengths; `4 f + 3 > N`.

    Cost: `N² D` multiplications, `N` times Krum's scores, and a sort of N numbers D times.

    Example:
      >>> import jax.numpy as jnp
      >>> updates = jnp.array([[1.0], [2.0], [3.0], [2.5], [1.5], [2.0], [1e6]])
      >>> bulyan(updates, num_malicious=1).round(3).tolist()
      [2.0]
    """
    check_malicious(updates, num_malicious, lambda n: max((n - 3) // 4, 0), "4 f + 3 <= N")

    def rule(rows, usable):
        f = jnp.asarray(num_malicious)
        chosen = _chosen_by_bulyan(_squared_distances(rows, usable), usable, f)
        return _means_around_median(rows, chosen, jnp.maximum(chosen.sum() - 2 * f, 1))

    return aggregate(updates, mask, return_excluded, rule)


@jax.jit
def _chosen_by_bulyan(squares, usable, f):
    """`[N]` bool: the `n - 2 f` rows, or one, that Krum picks, each taken away before the next is picked."""

    def take(i, carry):
        left, chosen = carry
        best = jnp.argmin(_krum_scores(squares, left, f))
        go = (i < jnp.maximum(usable.sum() - 2 * f, 1)) & left.any()
        return left.at[best].set(left[best] & ~go), chosen.at[best].set(chosen[best] | go)

    return jax.lax.fori_loop(0, len(usable), take, (usable, jnp.zeros_like(usable)))[1]


def minimum_diameter(
    updates: PyTree, *, num_malicious: int, mask: jax.Array | None = None, return_excluded: bool = False
) -> Any:
    """MDA: the mean of the `N - f` updates whose largest mutual distance is smallest (El Mhamdi et al. 2021).

    Many subsets share their widest pair; of those the one with the smallest sum of squared distances is taken.

    Args:
      updates: `[N, D]` or a stacked pytree; at most 20 clients, since every subset is looked at.
      num_malicious: `f`, less than half of the clients.
      mask, return_excluded: see the module.

    Raises:
      ValueError: wrong rank or lengths; `2 f >= N`; more than 20 clients.

    Cost: `N 2^N` operations and `2^N` numbers of memory.

    Example:
      >>> import jax.numpy as jnp
      >>> minimum_diameter(jnp.array([[1.0], [1.5], [2.0], [50.0]]), num_malicious=1).tolist()
      [1.5]
    """
    count = check_malicious(updates, num_malicious, lambda n: (n - 1) // 2, "2 f < N")
    check(count <= MAX_SUBSETS_OF, "updates", f"{count} clients", f"of at most {MAX_SUBSETS_OF} clients")

    def rule(rows, usable):
        squares = _squared_distances(rows, usable)
        keep = usable.sum() - _at_most_half(num_malicious, usable)
        return _combine(rows, shares(_tightest(squares, usable, keep).astype(jnp.float32), usable), usable)

    return aggregate(updates, mask, return_excluded, rule)


@jax.jit
def _tightest(squares, usable, size):
    """`[N]` bool: of all subsets of `size` usable rows, the (first) one with the smallest diameter."""
    count = len(usable)
    subsets = jnp.arange(2**count, dtype=jnp.uint32)
    # Sums of distances must stay finite, or no subset with someone far away would be smaller than another.
    squares = jnp.minimum(squares, jnp.finfo(squares.dtype).max / count**2)

    def has(i):
        return ((subsets >> i.astype(jnp.uint32)) & 1).astype(bool)

    def widen(i, widths):  # by the distances from row i to the later rows
        def to(j, widths):
            square = jnp.where(has(i) & has(j), squares[i, j], 0.0)
            return jnp.maximum(widths[0], square), widths[1] + square

        return jax.lax.fori_loop(i + 1, count, to, widths)

    zeros = jnp.zeros(len(subsets), squares.dtype)
    diameters, sums = jax.lax.fori_loop(0, count, widen, (zeros, zeros))
    members = (usable.astype(jnp.uint32) << jnp.arange(count, dtype=jnp.uint32)).sum().astype(jnp.uint32)
    valid = (jax.lax.population_count(subsets).astype(jnp.int32) == size) & ((subsets & ~members) == 0)
    diameters = jnp.where(valid, diameters, jnp.inf)
    best = subsets[jnp.argmin(jnp.where(diameters == diameters.min(), sums, jnp.inf))]
    return ((best >> jnp.arange(count, dtype=jnp.uint32)) & 1).astype(bool)


def geometric_median(
    updates: PyTree,
    *,
    weights: jax.Array | None = None,
    num_iters: int | None = None,
    smoothing: float = 1e-6,
    mask: jax.Array | None = None,
    return_excluded: bool = False,
) -> Any:
    """The point with the smallest sum of distances to all updates, by smoothed Weiszfeld steps (Pillutla et al. 2022).

    From the coordinate-wise median, `v ← Σ_i β_i z_i / Σ_i β_i` with `β_i = w_i / max(smoothing, ‖z_i − v‖)`.

    Args:
      updates: `[N, D]` or a stacked pytree.
      weights: `[N]`, at least 0; default: all equal.
      num_iters: steps, at least 1; Pillutla et al. find 3 to 5 enough. Default: until the weighted mean of the unit
        vectors towards the updates is shorter than 1e-6, at most 300 steps; then the sum of distances is within 2e-6 of
        its minimum, relatively. At the end the nearest update is taken where it is the median itself, which steps only
        approach.
      smoothing: distances below count as this much, so that a step out of an update is possible.
      mask, return_excluded: see the module.

    Raises:
      ValueError: wrong rank or lengths; negative weights; fewer than one step; smoothing not above 0.

    Cost: two passes a step (10 to 30 steps where updates surround their median, more where they lie nearly in a line or
    the median is near an update), and one sort of N numbers D times.

    Example:
      >>> import jax.numpy as jnp
      >>> v = geometric_median(jnp.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1e6]]))
      >>> bool(jnp.abs(v).max() < 1.5)
      True
    """
    weights = check_weights(updates, weights)
    check(num_iters is None or num_iters >= 1, "num_iters", num_iters, "at least 1")
    if is_computable(smoothing):
        check(smoothing > 0, "smoothing", smoothing, "above 0")
    return aggregate(
        updates,
        mask,
        return_excluded,
        lambda rows, usable: _weiszfeld(rows, usable, weights, jnp.asarray(smoothing, jnp.float32), num_iters),
    )


@partial(jax.jit, static_argnames="num_iters")
def _weiszfeld(rows, usable, weights, smoothing, num_iters):
    def step(_, point):
        distances = distances_from(rows, point, usable)
        return _combine(rows, shares(weights / jnp.maximum(distances, smoothing), usable), usable)

    if num_iters is not None:
        return jax.lax.fori_loop(0, num_iters, step, _medians(rows, usable))
    counted = jnp.where(usable, weights, jnp.zeros_like(weights))

    def towards(carry):
        point, _, t = carry
        pulls = counted / jnp.maximum(distances_from(rows, point, usable), smoothing)
        new = _combine(rows, shares(pulls, usable), usable)
        # A step is the mean unit vector towards the updates times their harmonic mean distance.
        reach = counted.sum() / jnp.maximum(pulls.sum(), jnp.finfo(pulls.dtype).tiny)
        moved = _norm([(a - b).astype(pulls.dtype) for a, b in zip(new, point, strict=True)])
        rounding = _norm([a.astype(pulls.dtype) * float(jnp.finfo(a.dtype).eps) for a in new])
        return new, moved > MEDIAN_TOLERANCE * reach + rounding, t + 1

    start = (_medians(rows, usable), jnp.ones((), bool), jnp.zeros((), jnp.int32))
    point, _, _ = jax.lax.while_loop(lambda carry: carry[1] & (carry[2] < MEDIAN_STEPS), towards, start)
    return _or_nearest(rows, usable, counted, point)


def _norm(point: list[jax.Array]) -> jax.Array:
    return jnp.sqrt(sum(jnp.square(x).sum() for x in point))


def _or_nearest(rows, usable, weights, point):
    """`point`, or the update nearest to it where that is the median: where it weighs as much as all others pull.

    Towards an update that pulls hardly less than the others, Weiszfeld's steps become ever shorter.
    """
    nearest = jnp.argmin(distances_from(rows, point, usable))
    update = [x[nearest] for x in rows]
    distances = distances_from(rows, update, usable)
    here = usable & (distances == 0)
    pulls = jnp.where(here, 0.0, weights / jnp.where(here, 1.0, distances)).astype(weights.dtype)
    share = shares(pulls, usable)
    mean = _combine(rows, share, usable)
    pull = _norm([(a - b).astype(weights.dtype) for a, b in zip(mean, update, strict=True)]) * pulls.sum()
    is_median = usable.any() & (pull <= jnp.where(here, weights, 0.0).sum())
    return [jnp.where(is_median, a, b) for a, b in zip(update, point, strict=True)]


# Before aggregating.


def _with_rows(updates: PyTree, rows: list[jax.Array]) -> PyTree:
    """`updates` with other numbers: `rows` `[n, d]` for every leaf `[N, ...]`."""
    leaves, structure = jax.tree.flatten(updates)
    shaped = [x.reshape(len(x), *jnp.shape(leaf)[1:]) for x, leaf in zip(rows, leaves, strict=True)]
    return jax.tree.unflatten(structure, shaped)


@jax.jit
def _shorten(rows, usable, radius):
    norms = jnp.sqrt(squared_norms(rows))
    scale = jnp.where(norms > radius, radius / jnp.maximum(norms, jnp.finfo(norms.dtype).tiny), 1.0)
    return [usable_rows(x * scale[:, None].astype(x.dtype), usable) for x in rows]


def clip_norms(updates: PyTree, *, radius: Any, mask: jax.Array | None = None) -> tuple[PyTree, jax.Array]:
    """Shortens every update to a length of at most `radius`.

    Args:
      updates: `[N, D]` or a stacked pytree.
      radius: a number, or `[N]`, at least 0.
      mask: who counts.

    Returns:
      `(updates, mask)`: those who do not count, and those with NaN or infinity, as zeros and masked.

    Raises:
      ValueError: wrong rank or lengths; a negative radius.

    Cost: two passes.

    Example:
      >>> import jax.numpy as jnp
      >>> print(clip_norms(jnp.array([[3.0, 4.0], [0.3, 0.4]]), radius=1.0)[0].round(3))
      [[0.6 0.8]
       [0.3 0.4]]
    """
    rows, usable = counted(updates, mask)
    radius = jnp.asarray(radius, jnp.float32)
    check(radius.shape in ((), usable.shape), "radius", radius.shape, f"a number, or of shape {usable.shape}")
    if is_computable(radius):
        check((radius >= 0).all(), "radius", radius.tolist(), "at least 0, and not NaN")
    return _with_rows(updates, _shorten(rows, usable, radius)), usable


def adaptive_clip(updates: PyTree, *, num_malicious: int, mask: jax.Array | None = None) -> tuple[PyTree, jax.Array]:
    """ARC: shortens the `⌊2 (f/N) (N − f)⌋` longest updates to the length of the next (Allouah et al. 2025).

    Args:
      updates: `[N, D]` or a stacked pytree.
      num_malicious: `f`, less than half of the clients.
      mask: who counts.

    Returns:
      `(updates, mask)`, as `clip_norms`.

    Raises:
      ValueError: wrong rank or lengths; `2 f >= N`.

    Cost: two passes.

    Example:
      >>> import jax.numpy as jnp
      >>> adaptive_clip(jnp.array([[1.0], [2.0], [4.0], [8.0]]), num_malicious=1)[0].tolist()
      [[1.0], [2.0], [4.0], [4.0]]
    """
    check_malicious(updates, num_malicious, lambda n: (n - 1) // 2, "2 f < N")
    rows, usable = counted(updates, mask)
    radius = _arc_radius(rows, usable, _at_most_half(num_malicious, usable))
    return _with_rows(updates, _shorten(rows, usable, radius)), usable


@jax.jit
def _arc_radius(rows, usable, f):
    count = usable.sum()
    num_clipped = (2 * f * (count - f)) // jnp.maximum(count, 1)
    norms = jnp.where(usable, jnp.sqrt(squared_norms(rows)), -jnp.inf)
    longest_first = jnp.sort(norms, descending=True)
    return jnp.maximum(longest_first[jnp.minimum(num_clipped, len(usable) - 1)], 0.0)


def nearest_neighbour_mixing(
    updates: PyTree, *, num_malicious: int, mask: jax.Array | None = None
) -> tuple[PyTree, jax.Array]:
    """NNM: replaces every update by the mean of the `N − f` nearest to it, itself among them (Allouah et al. 2023).

    Args:
      updates: `[N, D]` or a stacked pytree.
      num_malicious: `f`, less than half of the clients.
      mask: who counts.

    Returns:
      `(updates, mask)`, as `clip_norms`.

    Raises:
      ValueError: wrong rank or lengths; `2 f >= N`.

    Cost: `3 N² D` multiplications.

    Example:
      >>> import jax.numpy as jnp
      >>> nearest_neighbour_mixing(jnp.array([[0.0], [1.0], [10.0]]), num_malicious=1)[0].tolist()
      [[0.5], [0.5], [5.5]]
    """
    check_malicious(updates, num_malicious, lambda n: (n - 1) // 2, "2 f < N")
    rows, usable = counted(updates, mask)
    keep = usable.sum() - _at_most_half(num_malicious, usable)
    return _with_rows(updates, _combine(rows, _nearest(_squared_distances(rows, usable), usable, keep), usable)), usable


@jax.jit
def _nearest(squares, usable, keep):
    """`[N, N]` shares: of each usable row's `keep` nearest, itself always among them."""
    itself = jnp.eye(len(usable), dtype=bool)
    squares = jnp.where(itself, -1.0, squares)  # a duplicate must not displace the update itself
    order = jnp.argsort(squares, axis=1, stable=True)
    rank = jnp.argsort(order, axis=1)
    near = (rank < keep) & usable[None, :] & usable[:, None]
    return near.astype(squares.dtype) / jnp.maximum(near.sum(axis=1, keepdims=True), 1).astype(squares.dtype)


def bucketing(
    updates: PyTree, *, bucket_size: int, key: jax.Array, mask: jax.Array | None = None
) -> tuple[PyTree, jax.Array]:
    """The means of random buckets of `bucket_size` updates (Karimireddy, He, Jaggi 2022).

    Args:
      updates: `[N, D]` or a stacked pytree.
      bucket_size: `s`, from 1 to N.
      key: decides who shares a bucket.
      mask: who counts; buckets are filled with those first.

    Returns:
      `(updates, mask)` of `⌈N / s⌉` buckets; empty ones are masked.

    Raises:
      ValueError: wrong rank or lengths; a bucket size outside `1 .. N`.

    Cost: two passes.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> bucketing(jnp.array([[1.0], [2.0], [3.0], [6.0]]), bucket_size=4, key=jax.random.key(0))[0].tolist()
      [[3.0]]
    """
    rows, usable = counted(updates, mask)
    count = len(usable)
    check(1 <= bucket_size <= count, "bucket_size", bucket_size, f"from 1 to N = {count}")
    shuffled = jax.random.permutation(key, count)
    order = shuffled[jnp.argsort(~usable[shuffled], stable=True)]
    bucket = jnp.zeros(count, jnp.int32).at[order].set(jnp.arange(count, dtype=jnp.int32) // bucket_size)
    num_buckets = -(-count // bucket_size)
    members = (bucket[None, :] == jnp.arange(num_buckets, dtype=jnp.int32)[:, None]) & usable[None, :]
    sizes = members.sum(axis=1)
    mixing = members.astype(jnp.float32) / jnp.maximum(sizes, 1).astype(jnp.float32)[:, None]
    return _with_rows(updates, _combine(rows, mixing, usable)), sizes > 0
