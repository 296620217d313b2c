"""Robust aggregators that compare whole updates: Krum, Bulyan, the geometric median, centered clipping."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jfcl.core.checks import check, check_count
from jfcl.kernels import blocks
from jfcl.kernels.base import PyTree, check_positive, check_whole, like, sum_dtype, sum_over_columns
from jfcl.kernels.distances import at_start, center_distances, inner_products, moved, positions, squared_row_distances
from jfcl.kernels.robust import check_weights, combine, counted, lowest, means_around_median, medians, shares

MEDIAN_TOLERANCE = 1e-6  # the length of the mean unit vector towards all updates at which the steps end
MEDIAN_STEPS = 300  # at most
SMOOTHING = 1e-6  # the largest distance below which all distances count alike


def _krum_scores(squares: jax.Array, usable: jax.Array, num_malicious: jax.Array) -> jax.Array:
    """Returns `[N]`: the sum of each row's squared distances to its `n - f - 2` nearest others.

    Unusable rows have `inf`; a sum that overflows counts as the largest finite number, before them.
    """
    pairs = usable[:, None] & usable[None, :] & ~jnp.eye(len(usable), dtype=bool)
    nearest = jnp.sort(jnp.where(pairs & ~jnp.isnan(squares), squares, jnp.inf), axis=1)
    few = jnp.minimum(jnp.maximum(usable.sum() - num_malicious - 2, 1), usable.sum() - 1)
    scores = jnp.where(jnp.arange(len(usable)) < few, nearest, 0.0).sum(axis=1)
    return jnp.where(usable, jnp.minimum(scores, jnp.finfo(scores.dtype).max), jnp.inf)


def krum(updates: PyTree, *, num_malicious: int, mask: jax.Array | None = None) -> PyTree:
    """Returns the update nearest to its `N - f - 2` nearest others, by the sum of squares (Blanchard et al. 2017).

    Of equal scores it is the first. `f` is `num_malicious`, at most `N - 3` (the paper's guarantee requires
    `2 f + 2 < N`). For the arguments see `jfcl.kernels`. Cost: `N² D` operations.

    Example:
      >>> import jax.numpy as jnp
      >>> krum(jnp.array([[1.0], [1.1], [1.3], [50.0]]), num_malicious=1).tolist()
      [1.0]
    """
    return multi_krum(updates, num_malicious=num_malicious, num_selected=1, mask=mask)


def multi_krum(
    updates: PyTree, *, num_malicious: int, num_selected: int | None = None, mask: jax.Array | None = None
) -> PyTree:
    """Returns the mean of the updates with the lowest Krum scores (Blanchard et al. 2017).

    The scores are those of `krum`. `num_selected` is how many to average, from 1 to N; default `N - f`. For the other
    arguments see `jfcl.kernels`. Cost: `N² D` operations.

    Example:
      >>> import jax.numpy as jnp
      >>> print(multi_krum(jnp.array([[1.0], [1.1], [1.3], [50.0]]), num_malicious=1, num_selected=2))
      [1.05]
    """
    rows, usable = counted(updates, mask)
    check_whole("num_malicious", num_malicious, 0, max(len(usable) - 3, 0), "f <= N - 3")
    if num_selected is not None:
        check_whole("num_selected", num_selected, 1, len(usable), "N")
    selected = usable.sum() - jnp.asarray(num_malicious) if num_selected is None else jnp.asarray(num_selected)
    squares = squared_row_distances(rows, usable)
    weights = lowest(_krum_scores(squares, usable, jnp.asarray(num_malicious)), usable, jnp.maximum(selected, 1))
    return like(updates, combine(rows, weights, usable))


def bulyan(updates: PyTree, *, num_malicious: int, mask: jax.Array | None = None) -> PyTree:
    """Selects `N - 2 f` updates by repeated Krum, then averages around their median (El Mhamdi et al. 2018).

    In every coordinate, the result is the mean of the `N - 4 f` selected numbers nearest to the median of the `N - 2 f`
    selected. `f` is `num_malicious`, with `4 f + 3 <= N`. For the arguments see `jfcl.kernels`. Cost: `N² D`
    operations, `N` times Krum's scores, and a sort of N numbers D times.

    Example:
      >>> import jax.numpy as jnp
      >>> updates = jnp.array([[1.0], [2.0], [3.0], [2.5], [1.5], [2.0], [1e6]])
      >>> bulyan(updates, num_malicious=1).round(3).tolist()
      [2.0]
    """
    rows, usable = counted(updates, mask)
    check_whole("num_malicious", num_malicious, 0, max((len(usable) - 3) // 4, 0), "4 f + 3 <= N")
    f = jnp.asarray(num_malicious, jnp.int32)
    chosen = _chosen_by_bulyan(squared_row_distances(rows, usable), usable, f)
    return like(updates, means_around_median(rows, chosen, jnp.maximum(chosen.sum() - 2 * f, 1)))


@jax.jit
def _chosen_by_bulyan(squares, usable, f):
    """Returns `[N]` bool: the `n - 2 f` rows, at least one, that Krum selects one at a time without replacement."""

    def take(i, carry):
        remaining, chosen = carry
        best = jnp.argmin(_krum_scores(squares, remaining, f))
        go = (i < jnp.maximum(usable.sum() - 2 * f, 1)) & remaining.any()
        return remaining.at[best].set(remaining[best] & ~go), chosen.at[best].set(chosen[best] | go)

    return jax.lax.fori_loop(0, len(usable), take, (usable, jnp.zeros_like(usable)))[1]


def geometric_median(
    updates: PyTree,
    *,
    weights: jax.Array | None = None,
    mask: jax.Array | None = None,
) -> PyTree:
    """Returns the point with the smallest sum of distances to all updates (Pillutla et al. 2022).

    From the coordinate-wise median, `v ← Σ_i β_i z_i / Σ_i β_i` with `β_i = w_i / max(ν, ‖z_i − v‖)`, until the
    weighted mean of the unit vectors towards the updates is shorter than 1e-6, at most 300 steps. The sum of distances
    is then within a factor of `1 + 2e-6` of its minimum. Before them, a start that is an update is left by a step of
    Vardi and Zhang (2000). At the end, the nearest update is returned where it is the median itself, which the steps
    only approach. `ν`, by which a step away from an update is possible, is 1e-6, and at most 1e-6 of the median
    distance at the start: updates of any scale have their median. See `jfcl.kernels` for the arguments.

    Cost: two passes a step (10 to 30 steps where updates surround their median, more where they lie nearly on a line or
    the median is near an update), and one sort of N numbers D times.

    Example:
      >>> import jax.numpy as jnp
      >>> v = geometric_median(jnp.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1e6]]))
      >>> bool(jnp.abs(v).max() < 1.5)
      True
    """
    rows, usable = counted(updates, mask)
    return like(updates, _weiszfeld(rows, usable, check_weights(weights, rows)))


@jax.jit
def _weiszfeld(rows, usable, weights):
    counted, smoothing = jnp.where(usable, weights, jnp.zeros_like(weights)), jnp.asarray(SMOOTHING, weights.dtype)

    def towards(carry):
        point, _, t = carry
        # The weights of the updates in the next point, before they are scaled to sum to 1.
        pulls = counted / jnp.maximum(blocks.distances_from(rows, point, usable), least)
        new = combine(rows, shares(pulls, usable), usable)
        # A step is the mean unit vector towards the updates times their harmonic mean distance.
        reach = counted.sum() / jnp.maximum(pulls.sum(), jnp.finfo(pulls.dtype).tiny)
        length = _norm([(a - b).astype(pulls.dtype) for a, b in zip(new, point, strict=True)])
        rounding = _norm([a.astype(pulls.dtype) * float(jnp.finfo(a.dtype).eps) for a in new])
        return new, length > MEDIAN_TOLERANCE * reach + rounding, t + 1

    # From an update that is not the median the steps would be too short: they end by rounding.
    first = medians(rows, usable)
    update, beyond, own_share, distances = _nearest_update(rows, usable, counted, first)
    # Among updates that are all nearer than the smoothing, a far one would pull as much as any other.
    typical = medians([distances[:, None]], (counted > 0) & (distances > 0))[0][0]
    least = jnp.where(typical > 0, jnp.minimum(smoothing, 1e-6 * typical), smoothing)
    away = [u + (1.0 - own_share).astype(u.dtype) * (b - u) for u, b in zip(update, beyond, strict=True)]
    first = [jnp.where(distances.min() == 0, a, b) for a, b in zip(away, first, strict=True)]
    start = (first, jnp.ones((), bool), jnp.zeros((), jnp.int32))
    point, _, _ = jax.lax.while_loop(lambda carry: carry[1] & (carry[2] < MEDIAN_STEPS), towards, start)
    # Near an update with almost enough weight to be the median, the steps become ever shorter.
    update, _, own_share, _ = _nearest_update(rows, usable, counted, point)
    is_median = (counted > 0).any() & (own_share >= 1)
    return [jnp.where(is_median, a, b) for a, b in zip(update, point, strict=True)]


def _norm(point: list[jax.Array]) -> jax.Array:
    return jnp.sqrt(sum_over_columns(sum(jnp.square(x).sum() for x in point)))


def _nearest_update(rows, usable, weights, point):
    """Returns the update nearest to `point`, with what decides whether it is the median (Vardi and Zhang 2000).

    Returns:
      `(update, beyond, share, distances)`: the mean to which the other updates pull from there, the share of the pull
      that the update's own weight holds, 1 where it is the median, and the distances `[N]` of all updates from `point`.
    """
    to_point = blocks.distances_from(rows, point, usable)
    nearest = jnp.argmin(to_point)
    update = [x[nearest] for x in rows]
    distances = blocks.distances_from(rows, update, usable)
    here = usable & (distances == 0)
    pulls = jnp.where(here, 0.0, weights / jnp.where(here, 1.0, distances)).astype(weights.dtype)
    beyond = combine(rows, shares(pulls, usable), usable)
    pull = _norm([(a - b).astype(weights.dtype) for a, b in zip(beyond, update, strict=True)]) * pulls.sum()
    held = jnp.where(here, weights, 0.0).sum()
    return update, beyond, jnp.where(pull > held, held / jnp.where(pull > 0, pull, 1.0), 1.0), to_point


def centered_clip(
    updates: PyTree,
    *,
    radius: Any,
    center: PyTree | None = None,
    num_iters: int = 1,
    mask: jax.Array | None = None,
) -> PyTree:
    """Returns the mean of the updates, each clipped to within `radius` of the centre, after `num_iters` iterations.

        v ← v + (1/N) Σ_i (z_i − v) min(1, τ / ‖z_i − v‖)

    One client moves the result by at most `num_iters · radius / N` with any update. An infinite radius gives the mean.

    Args:
      radius: `τ`, a number above 0.
      center: `[D]`, or the pytree without the client axis, finite: the first centre `v`, the last round's result in the
        paper; default zeros.
      num_iters: iterations, at least 1.
      updates, mask: see `jfcl.kernels`.

    Cost: one read of every update an iteration, in blocks that stay in the cache. For many iterations of few clients,
    `N² D` operations once, and `N²` operations an iteration.

    Example:
      >>> import jax.numpy as jnp
      >>> centered_clip(jnp.array([[1.0, 0.0], [0.0, 1.0], [600.0, 800.0]]), radius=1.0).round(3).tolist()
      [0.533..., 0.6...]
    """
    check_count("num_iters", num_iters)
    check_positive("radius", radius)
    rows, usable = counted(updates, mask)
    if center is None:
        start = [jnp.zeros(x.shape[1], x.dtype) for x in rows]
    else:
        shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(center)]
        wanted = [jnp.shape(leaf)[1:] for leaf in jax.tree.leaves(updates)]
        check(shapes == wanted, "center", shapes, f"of shapes {wanted}")
        parts = zip(jax.tree.leaves(center), rows, strict=True)
        start = [jnp.asarray(c).reshape(-1).astype(x.dtype) for c, x in parts]
        blocks.refuse_nonfinite([c[None, :] for c in start], "center")
    run = _clip_by_products if products_are_cheaper(len(usable), num_iters) else _clip
    limit = jnp.asarray(radius, sum_dtype(*rows))
    return like(updates, run(rows, usable, start, limit, num_iters=num_iters))


def products_are_cheaper(count: int, num_iters: int) -> bool:
    """Returns whether `N² D` products and three passes are faster than `num_iters` passes (see `threshold.py`)."""
    return 3 + count / 40 < num_iters


def _pull(distances: jax.Array, radius: jax.Array) -> jax.Array:
    """Returns `min(1, τ/d)`, 1 at distance 0."""
    return jnp.where(distances > radius, radius / jnp.maximum(distances, jnp.finfo(distances.dtype).tiny), 1.0)


@partial(jax.jit, static_argnames="num_iters")
def _clip(rows, usable, start, radius, *, num_iters):
    wide = sum_dtype(*rows)
    weights = shares(usable.astype(wide), usable)

    def iterations(clean):
        def iterate(_, center):
            def add(parts, begin, length, step):
                share = jax.lax.dynamic_slice_in_dim(weights, begin, length)
                # In float16 the difference of finite numbers may not be.
                away = [x.astype(wide) - v.astype(wide)[None, :] for x, v in zip(parts, center, strict=True)]
                if clean is not None:
                    here = jax.lax.dynamic_slice_in_dim(clean, begin, length)
                    away = [blocks.usable_rows(d, here) for d in away]
                share *= _pull(jnp.sqrt(blocks.squared_norms(away)), radius)
                moves = [blocks.product_over_rows(blocks.matmul, share, d) for d in away]
                return [s + move for s, move in zip(step, moves, strict=True)]

            step = blocks.fold_rows(add, [jnp.zeros(v.shape, wide) for v in center], rows)
            return [(v.astype(wide) + s).astype(v.dtype) for v, s in zip(center, step, strict=True)]

        return jax.lax.fori_loop(0, num_iters, iterate, start)

    # Applying the mask in every block costs a third of the time, and mostly all clients count.
    return jax.lax.cond(usable.all(), lambda: iterations(None), lambda: iterations(usable))


@partial(jax.jit, static_argnames="num_iters")
def _clip_by_products(rows, usable, start, radius, *, num_iters):
    """As `_clip`, with the centre as a combination of the updates and of the first centre."""
    weights = shares(usable.astype(radius.dtype), usable)
    starts = [v[None, :] for v in start]
    products = inner_products(rows, starts, usable)

    def iterate(_, center):
        return moved(center, weights[None, :] * _pull(center_distances(products, center)[0], radius))

    center = jax.lax.fori_loop(0, num_iters, iterate, at_start(products))
    return [v[0] for v in positions(center, rows, starts, usable)]
