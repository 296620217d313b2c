"""What the robust aggregators share, the mean, and the aggregators of every coordinate alone.

`robust_vectors` has those that compare whole updates, `aggregators` the steps before an aggregator, and all by name.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jfcl.core.checks import check
from jfcl.kernels.base import PyTree, check_values, check_whole, like, row_mask, rows_of, sum_dtype
from jfcl.kernels.blocks import finite_rows, fold_columns, weighted_sum


def counted(updates: PyTree, mask: jax.Array | None) -> tuple[list[jax.Array], jax.Array]:
    """Returns the rows, and `[N]` bool: the rows that count, which are finite and not masked."""
    rows = rows_of(updates)
    return rows, row_mask(mask, len(rows[0])) & finite_rows(rows)


def minority(num_malicious: Any, usable: jax.Array) -> jax.Array:
    """Returns `f`, lowered to less than half of the usable rows; `ValueError` from half of all rows on."""
    check_whole("num_malicious", num_malicious, 0, (len(usable) - 1) // 2, "2 f < N")
    return jnp.minimum(jnp.asarray(num_malicious, jnp.int32), jnp.maximum(usable.sum() - 1, 0) // 2)


@jax.jit
def combine(rows: list[jax.Array], weights: jax.Array, usable: jax.Array) -> list[jax.Array]:
    """Returns `Σ_i weights[i] z_i` for every matrix and every row of weights (`[N]`, or `[K, N]`)."""
    return [weighted_sum(x, weights, usable) for x in rows]


def check_weights(weights: jax.Array | None, rows: list[jax.Array]) -> jax.Array:
    """Returns `[N]` weights in the type of sums over `rows`, ones for `None`."""
    count, dtype = len(rows[0]), sum_dtype(*rows)
    if weights is None:
        return jnp.ones(count, dtype)
    weights = jnp.asarray(weights, dtype)
    check(weights.shape == (count,), "weights", weights.shape, f"of shape ({count},)")
    fits = lambda weights: (weights >= 0) & jnp.isfinite(weights.sum())  # noqa: E731
    check_values("weights", weights, fits, "at least 0, with a finite sum")
    return weights


def shares(weights: jax.Array, usable: jax.Array) -> jax.Array:
    """Returns the `weights` of the usable rows, scaled to sum to 1 (all zero where they sum to 0)."""
    weights = jnp.where(usable, weights, jnp.zeros_like(weights))
    total = weights.sum()
    return weights / jnp.where(total > 0, total, jnp.ones_like(total))


def lowest(scores: jax.Array, usable: jax.Array, count: jax.Array) -> jax.Array:
    """Returns `[N]` shares: equal for the `count` usable rows with the lowest scores, of equal ones the first."""
    scores = jnp.where(usable, jnp.minimum(scores, jnp.finfo(scores.dtype).max), jnp.inf)  # unusable rows are last
    rank = jnp.argsort(jnp.argsort(scores, stable=True))
    return shares(((rank < count) & usable).astype(scores.dtype), usable)


def mean(updates: PyTree, *, weights: jax.Array | None = None, mask: jax.Array | None = None) -> PyTree:
    """Returns the weighted mean. It is not robust: one client can move it anywhere.

    For the arguments see `jfcl.kernels`. Cost: one pass.

    Example:
      >>> import jax.numpy as jnp
      >>> mean(jnp.array([[1.0], [3.0], [jnp.nan]])).tolist()
      [2.0]
    """
    rows, usable = counted(updates, mask)
    return like(updates, combine(rows, shares(check_weights(weights, rows), usable), usable))


def by_columns(fn: Callable[[jax.Array], jax.Array], rows: list[jax.Array], block: int = 512) -> list[jax.Array]:
    """Applies `fn`, from `[N, c]` to `[c]`, to all columns of every matrix, in blocks of columns that fit the cache."""

    def put(part, leaf, start, out):
        return jax.lax.dynamic_update_slice_in_dim(out, fn(part).astype(out.dtype), start, axis=0)

    return [fold_columns(put, jnp.zeros(x.shape[1], x.dtype), [x], block) for x in rows]


def sort_columns(x: jax.Array) -> jax.Array:
    """Returns `[N, c]` with every column in ascending order.

    It is a bitonic network (Batcher 1968): `log2(N)²/2` steps of minima and maxima of whole rows, which vectorise.
    XLA's sort on a CPU compares numbers one by one and takes 8 to 24 times as long.
    """
    count, width = x.shape
    if count > 512:  # the network is a long program by then
        return jnp.sort(x, axis=0)
    padded = 2 ** math.ceil(math.log2(count))
    x = jnp.pad(x, ((0, padded - count), (0, 0)), constant_values=jnp.inf)
    size = 2
    while size <= padded:
        # Two ascending halves, the second reversed, are one bitonic sequence, which shorter and shorter steps sort.
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


def _ordered(part: jax.Array, usable: jax.Array) -> jax.Array:
    """Returns `[N, c]` with the usable numbers of every column in ascending order, before infinities."""
    return sort_columns(jnp.where(usable[:, None], part, jnp.full((), jnp.inf, part.dtype)))


def _middle_mean(ordered: jax.Array, count: jax.Array, trimmed: jax.Array) -> jax.Array:
    """Returns `[c]`: the mean of the first `count` ordered numbers without the `trimmed` lowest and highest."""
    places = jnp.arange(len(ordered))
    keep = (places >= trimmed) & (places < count - trimmed)
    middle = jnp.where(keep[:, None], ordered, jnp.zeros((), ordered.dtype))
    dtype = sum_dtype(ordered)
    return (middle.sum(axis=0, dtype=dtype) / jnp.maximum(keep.sum(), 1).astype(dtype)).astype(ordered.dtype)


@jax.jit
def _trimmed_means(rows, usable, trimmed):
    return by_columns(lambda part: _middle_mean(_ordered(part, usable), usable.sum(), trimmed), rows)


def medians(rows: list[jax.Array], usable: jax.Array) -> list[jax.Array]:
    """Returns the median of every column of every matrix: a mean without all but the middle one or two numbers."""
    return _trimmed_means(rows, usable, jnp.maximum(usable.sum() - 1, 0) // 2)


def coordinate_median(updates: PyTree, *, mask: jax.Array | None = None) -> PyTree:
    """Returns the median of every coordinate (Yin et al. 2018); of an even number, the mean of the middle two.

    For the arguments see `jfcl.kernels`. Cost: sorts N numbers D times.

    Example:
      >>> import jax.numpy as jnp
      >>> coordinate_median(jnp.array([[1.0], [2.0], [1e6]])).tolist()
      [2.0]
    """
    rows, usable = counted(updates, mask)
    return like(updates, medians(rows, usable))


def trimmed_mean(updates: PyTree, *, num_malicious: int, mask: jax.Array | None = None) -> PyTree:
    """Returns the mean of every coordinate without its `f` largest and `f` smallest numbers (Yin et al. 2018).

    `f` is `num_malicious`, less than half of the clients. For the arguments see `jfcl.kernels`. Cost: sorts N
    numbers D times.

    Example:
      >>> import jax.numpy as jnp
      >>> trimmed_mean(jnp.array([[1.0], [2.0], [3.0], [1e6]]), num_malicious=1).tolist()
      [2.5]
    """
    rows, usable = counted(updates, mask)
    return like(updates, _trimmed_means(rows, usable, minority(num_malicious, usable)))


@jax.jit
def means_around_median(rows: list[jax.Array], usable: jax.Array, count: jax.Array) -> list[jax.Array]:
    """Returns, for every column of every matrix, the mean of the `count` usable numbers nearest to their median.

    In order, these stand side by side. XLA may compute a distance twice and round it otherwise: that decides between
    numbers at equal distance, and none is lost.
    """
    total = usable.sum()
    count = jnp.minimum(count, total)

    def of_columns(part):
        ordered, dtype = _ordered(part, usable), sum_dtype(part)
        median = _middle_mean(ordered, total, jnp.maximum(total - 1, 0) // 2)[None, :]
        places, zero = jnp.arange(len(ordered))[:, None], jnp.zeros((), part.dtype)

        # From the lowest numbers on, one is exchanged for the next above as long as that is nearer.
        after = jnp.roll(ordered, -count, axis=0)
        is_next = places + count < total
        farther, level = is_next & (median - ordered > after - median), is_next & (median - ordered == after - median)
        first = farther.sum(axis=0, keepdims=True)
        nearest, at_first = (places >= first) & (places < first + count), places == first

        # Numbers at exactly the largest distance that counts, on either side, share the remaining places.
        low, high = (jnp.where(at_first, x, zero).sum(axis=0, keepdims=True) for x in (ordered, after))
        edge = (at_first & level).any(axis=0, keepdims=True) & ((ordered == low) | (ordered == high))

        def sums(which):
            return jnp.where(which, ordered, zero).sum(axis=0, dtype=dtype), which.sum(axis=0).astype(dtype)

        (inner, num_inner), (outer, num_outer) = sums(nearest & ~edge), sums(edge)
        num = count.astype(dtype)
        mean = inner + outer * (num - num_inner) / jnp.maximum(num_outer, 1.0)
        return (mean / jnp.maximum(num, 1.0)).astype(part.dtype)

    return by_columns(of_columns, rows)


def mean_around_median(updates: PyTree, *, num_malicious: int, mask: jax.Array | None = None) -> PyTree:
    """MeaMed: returns, in every coordinate, the mean of the `N - f` numbers nearest to the median (Xie et al. 2018).

    `f` is `num_malicious`, less than half of the clients; numbers at equal distance share the last places. For the
    arguments see `jfcl.kernels`. Cost: sorts N numbers D times.

    Example:
      >>> import jax.numpy as jnp
      >>> mean_around_median(jnp.array([[1.0], [2.0], [3.0], [1e6]]), num_malicious=1).tolist()
      [2.0]
    """
    rows, usable = counted(updates, mask)
    return like(updates, means_around_median(rows, usable, usable.sum() - minority(num_malicious, usable)))
