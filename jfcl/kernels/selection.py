"""Robust aggregators that select some of the updates by their mutual distances: Krum, Bulyan, minimum diameter."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jfcl.core.checks import check
from jfcl.kernels.base import PyTree, check_whole
from jfcl.kernels.distances import squared_row_distances
from jfcl.kernels.medians import means_around_median
from jfcl.kernels.robust import aggregate, at_most_half, check_malicious, check_minority, combine, shares

MAX_SUBSETS_OF = 20  # clients in minimum_diameter, which enumerates all subsets


def _krum_scores(squares: jax.Array, usable: jax.Array, num_malicious: jax.Array) -> jax.Array:
    """Returns `[N]`: the sum of each row's squared distances to its `n - f - 2` nearest others.

    The score of an unusable row is `inf`. A sum that overflows counts as the largest finite number, so that usable
    rows always come before unusable ones.
    """
    others = usable[:, None] & usable[None, :] & ~jnp.eye(len(usable), dtype=bool)
    nearest = jnp.sort(jnp.where(others & ~jnp.isnan(squares), squares, jnp.inf), axis=1)
    few = jnp.minimum(jnp.maximum(usable.sum() - num_malicious - 2, 1), usable.sum() - 1)
    scores = jnp.where(jnp.arange(len(usable)) < few, nearest, 0.0).sum(axis=1)
    return jnp.where(usable, jnp.minimum(scores, jnp.finfo(scores.dtype).max), jnp.inf)


@jax.jit
def _best_scored(squares, usable, num_malicious, num_selected):
    """Returns `[N]` shares: equal for the `num_selected` rows with the lowest Krum scores, zero for the others."""
    scores = _krum_scores(squares, usable, num_malicious)
    rank = jnp.zeros(len(usable), jnp.int32).at[jnp.argsort(scores, stable=True)].set(jnp.arange(len(usable)))
    return shares(((rank < num_selected) & usable).astype(squares.dtype), usable)


def krum(updates: PyTree, *, num_malicious: int, mask: jax.Array | None = None, return_excluded: bool = False) -> Any:
    """Returns the update nearest to its `N - f - 2` nearest others, by the sum of squares (Blanchard et al. 2017).

    Args:
      updates: `[N, D]` or a stacked pytree.
      num_malicious: `f`, at most `N - 3` (the paper's guarantee requires `2 f + 2 < N`).
      mask, return_excluded: see `jfcl.kernels.robust`.

    Returns:
      One of the updates; of equal scores the first.

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
    """Returns the mean of the updates with the lowest Krum scores (Blanchard et al. 2017).

    Args:
      updates: `[N, D]` or a stacked pytree.
      num_malicious: `f`, at most `N - 3`.
      num_selected: how many to average; default `N - f`.
      mask, return_excluded: see `jfcl.kernels.robust`.

    Raises:
      ValueError: wrong rank or lengths; `f > N - 3`; `num_selected` outside `1 .. N`.

    Cost: `N² D` multiplications.

    Example:
      >>> import jax.numpy as jnp
      >>> print(multi_krum(jnp.array([[1.0], [1.1], [1.3], [50.0]]), num_malicious=1, num_selected=2))
      [1.05]
    """
    count = check_malicious(updates, num_malicious, lambda n: max(n - 3, 0), "f <= N - 3")
    if num_selected is not None:
        check_whole("num_selected", num_selected, 1, count, "N")

    def rule(rows, usable):
        selected = usable.sum() - jnp.asarray(num_malicious) if num_selected is None else jnp.asarray(num_selected)
        squares = squared_row_distances(rows, usable)
        weights = _best_scored(squares, usable, jnp.asarray(num_malicious), jnp.maximum(selected, 1))
        return combine(rows, weights, usable)

    return aggregate(updates, mask, return_excluded, rule)


def bulyan(updates: PyTree, *, num_malicious: int, mask: jax.Array | None = None, return_excluded: bool = False) -> Any:
    """Selects `N - 2 f` updates by repeated Krum, then averages around their median (El Mhamdi et al. 2018).

    Args:
      updates: `[N, D]` or a stacked pytree.
      num_malicious: `f`, with `4 f + 3 <= N`.
      mask, return_excluded: see `jfcl.kernels.robust`.

    Returns:
      In every coordinate, the mean of the `N - 4 f` selected numbers nearest to the median of the `N - 2 f` selected.

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
        f = jnp.asarray(num_malicious, jnp.int32)
        chosen = _chosen_by_bulyan(squared_row_distances(rows, usable), usable, f)
        return means_around_median(rows, chosen, jnp.maximum(chosen.sum() - 2 * f, 1))

    return aggregate(updates, mask, return_excluded, rule)


@jax.jit
def _chosen_by_bulyan(squares, usable, f):
    """Returns `[N]` bool: the `n - 2 f` rows, at least one, that Krum selects one at a time without replacement."""

    def take(i, carry):
        left, chosen = carry
        best = jnp.argmin(_krum_scores(squares, left, f))
        go = (i < jnp.maximum(usable.sum() - 2 * f, 1)) & left.any()
        return left.at[best].set(left[best] & ~go), chosen.at[best].set(chosen[best] | go)

    return jax.lax.fori_loop(0, len(usable), take, (usable, jnp.zeros_like(usable)))[1]


def minimum_diameter(
    updates: PyTree, *, num_malicious: int, mask: jax.Array | None = None, return_excluded: bool = False
) -> Any:
    """MDA: returns the mean of the `N - f` updates with the smallest largest distance (El Mhamdi et al. 2021).

    Many subsets share their widest pair. Of those, the one with the smallest sum of squared distances is taken.

    Args:
      updates: `[N, D]` or a stacked pytree; at most 20 clients, because all subsets are enumerated.
      num_malicious: `f`, less than half of the clients.
      mask, return_excluded: see `jfcl.kernels.robust`.

    Raises:
      ValueError: wrong rank or lengths; `2 f >= N`; more than 20 clients.

    Cost: `N 2^N` operations and `2^N` numbers of memory.

    Example:
      >>> import jax.numpy as jnp
      >>> minimum_diameter(jnp.array([[1.0], [1.5], [2.0], [50.0]]), num_malicious=1).tolist()
      [1.5]
    """
    count = check_minority(updates, num_malicious)
    check(count <= MAX_SUBSETS_OF, "updates", f"{count} clients", f"of at most {MAX_SUBSETS_OF} clients")

    def rule(rows, usable):
        squares = squared_row_distances(rows, usable)
        keep = usable.sum() - at_most_half(num_malicious, usable)
        return combine(rows, shares(_tightest(squares, usable, keep).astype(jnp.float32), usable), usable)

    return aggregate(updates, mask, return_excluded, rule)


@jax.jit
def _tightest(squares, usable, size):
    """Returns `[N]` bool: of all subsets of `size` usable rows, the first one with the smallest diameter."""
    count = len(usable)
    subsets = jnp.arange(2**count, dtype=jnp.uint32)
    # Sums of distances must stay finite: otherwise all subsets with one very distant row would compare as equal.
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
