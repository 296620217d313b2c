"""The geometric median of the updates, by smoothed Weiszfeld steps."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jfcl.core.checks import check
from jfcl.kernels.base import PyTree, distances_from
from jfcl.kernels.medians import medians
from jfcl.kernels.robust import aggregate, check_weights, combine, shares

MEDIAN_TOLERANCE = 1e-6  # the length of the mean unit vector towards all updates at which the steps end
MEDIAN_STEPS = 300  # at most


def geometric_median(
    updates: PyTree,
    *,
    weights: jax.Array | None = None,
    num_iters: int | None = None,
    smoothing: float = 1e-6,
    mask: jax.Array | None = None,
    return_excluded: bool = False,
) -> Any:
    """Returns the point with the smallest sum of distances to all updates (Pillutla et al. 2022).

    From the coordinate-wise median, `v ← Σ_i β_i z_i / Σ_i β_i` with `β_i = w_i / max(smoothing, ‖z_i − v‖)`.

    Args:
      updates: `[N, D]` or a stacked pytree.
      weights: `[N]`, at least 0; default: all equal.
      num_iters: steps, at least 1; 3 to 5 are enough in Pillutla et al. Default: until the weighted mean of the unit
        vectors towards the updates is shorter than 1e-6, at most 300 steps. The sum of distances is then within a
        factor of `1 + 2e-6` of its minimum. At the end, the nearest update is returned where it is the median itself,
        which the steps only approach.
      smoothing: smaller distances count as this one, so that a step away from an update is possible.
      mask, return_excluded: see `jfcl.kernels.robust`.

    Raises:
      ValueError: wrong rank or lengths; negative weights; fewer than one step; smoothing not above 0.

    Cost: two passes a step (10 to 30 steps where updates surround their median, more where they lie nearly on a line or
    the median is near an update), and one sort of N numbers D times.

    Example:
      >>> import jax.numpy as jnp
      >>> v = geometric_median(jnp.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1e6]]))
      >>> bool(jnp.abs(v).max() < 1.5)
      True
    """
    weights = check_weights(updates, weights)
    check(num_iters is None or num_iters >= 1, "num_iters", num_iters, "at least 1")
    check(smoothing > 0, "smoothing", smoothing, "above 0")

    def rule(rows, usable):
        return _weiszfeld(rows, usable, weights, jnp.asarray(smoothing, jnp.float32), num_iters)

    return aggregate(updates, mask, return_excluded, rule)


@partial(jax.jit, static_argnames="num_iters")
def _weiszfeld(rows, usable, weights, smoothing, num_iters):
    counted = jnp.where(usable, weights, jnp.zeros_like(weights))

    def step(point):
        """Returns the next point, and the updates' weights in it before they are scaled to sum to 1."""
        pulls = counted / jnp.maximum(distances_from(rows, point, usable), smoothing)
        return combine(rows, shares(pulls, usable), usable), pulls

    if num_iters is not None:
        return jax.lax.fori_loop(0, num_iters, lambda _, point: step(point)[0], medians(rows, usable))

    def towards(carry):
        point, _, t = carry
        new, pulls = step(point)
        # A step is the mean unit vector towards the updates times their harmonic mean distance.
        reach = counted.sum() / jnp.maximum(pulls.sum(), jnp.finfo(pulls.dtype).tiny)
        moved = _norm([(a - b).astype(pulls.dtype) for a, b in zip(new, point, strict=True)])
        rounding = _norm([a.astype(pulls.dtype) * float(jnp.finfo(a.dtype).eps) for a in new])
        return new, moved > MEDIAN_TOLERANCE * reach + rounding, t + 1

    start = (medians(rows, usable), jnp.ones((), bool), jnp.zeros((), jnp.int32))
    point, _, _ = jax.lax.while_loop(lambda carry: carry[1] & (carry[2] < MEDIAN_STEPS), towards, start)
    return _or_nearest(rows, usable, counted, point)


def _norm(point: list[jax.Array]) -> jax.Array:
    return jnp.sqrt(sum(jnp.square(x).sum() for x in point))


def _or_nearest(rows, usable, weights, point):
    """Returns `point`, or the update nearest to it where that update is the median.

    An update is the median where its own weight is at least the length of the other updates' summed pull. Near an
    update with almost that weight, Weiszfeld's steps become ever shorter.
    """
    nearest = jnp.argmin(distances_from(rows, point, usable))
    update = [x[nearest] for x in rows]
    distances = distances_from(rows, update, usable)
    here = usable & (distances == 0)
    pulls = jnp.where(here, 0.0, weights / jnp.where(here, 1.0, distances)).astype(weights.dtype)
    share = shares(pulls, usable)
    mean = combine(rows, share, usable)
    pull = _norm([(a - b).astype(weights.dtype) for a, b in zip(mean, update, strict=True)]) * pulls.sum()
    is_median = (weights > 0).any() & (pull <= jnp.where(here, weights, 0.0).sum())
    return [jnp.where(is_median, a, b) for a, b in zip(update, point, strict=True)]
