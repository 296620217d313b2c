"""Centered clipping (Karimireddy, He, Jaggi 2021: Learning from History for Byzantine Robust Optimization)."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jfcl.core.checks import check
from jfcl.kernels import combinations
from jfcl.kernels.base import (
    FORMS,
    HIGHEST,
    PyTree,
    fold_rows,
    is_computable,
    rows_of,
    squared_norms,
    sum_dtype,
    usable_rows,
)
from jfcl.kernels.robust import aggregate, check_weights, shares


def centered_clip(
    updates: PyTree,
    *,
    radius: Any,
    center: PyTree | None = None,
    num_iters: int = 1,
    weights: jax.Array | None = None,
    mask: jax.Array | None = None,
    form: str = "auto",
    return_excluded: bool = False,
) -> Any:
    """Returns the mean of the updates, each clipped to within `radius` of the centre, after `num_iters` iterations.

        v ← v + Σ_i w_i (z_i − v) min(1, τ / ‖z_i − v‖)

    One client moves the result by at most `num_iters · radius · w_i` with any update. An infinite radius gives the
    weighted mean.

    Args:
      updates: `[N, D]`, or a pytree of arrays stacked on a leading client axis.
      radius: `τ`, a number above 0.
      center: `[D]`, or the pytree without the client axis: the first centre `v`, the last round's result in the paper;
        default zeros.
      num_iters: iterations, at least 1.
      weights: `[N]`, at least 0, scaled to sum to 1; default: all equal.
      mask: `[N]` bool, the clients that count.
      form: `"direct"`: one pass over the updates an iteration. `"gram"`: inner products once, then `N²` operations an
        iteration (faster for many iterations of few clients). `"auto"`: the form with less work.
      return_excluded: return `(result, excluded)`, with the number of clients left out for NaN or infinity.

    Returns:
      `[D]`, or the pytree without the client axis.

    Raises:
      ValueError: wrong rank or lengths; a radius not above 0; no iterations; negative weights; a centre of another
        shape or (outside `jit`) not finite; an unknown form.

    Cost: direct: one read of every update an iteration, in blocks that stay in the cache. Gram: `N² D` multiplications.

    Example:
      >>> import jax.numpy as jnp
      >>> centered_clip(jnp.array([[1.0, 0.0], [0.0, 1.0], [600.0, 800.0]]), radius=1.0).round(3).tolist()
      [0.533..., 0.6...]
    """
    rows = rows_of(updates)
    weights = check_weights(updates, weights)
    check(num_iters >= 1, "num_iters", num_iters, "at least 1")
    check(form in FORMS, "form", form, f"one of {FORMS}")
    if is_computable(radius):
        check(jnp.ndim(radius) == 0 and radius > 0, "radius", radius, "a number above 0")
    if center is None:
        start = [jnp.zeros(x.shape[1], x.dtype) for x in rows]
    else:
        shapes = [jnp.shape(leaf)[1:] for leaf in jax.tree.leaves(updates)]
        found = [jnp.shape(leaf) for leaf in jax.tree.leaves(center)]
        check(found == shapes, "center", found, f"of shapes {shapes}")
        start = [jnp.asarray(c).reshape(-1).astype(x.dtype) for c, x in zip(jax.tree.leaves(center), rows, strict=True)]
        if is_computable(start):
            check(all(jnp.isfinite(c).all() for c in start), "center", "NaN or infinity", "finite")
    if form == "auto":
        form = "gram" if gram_is_cheaper(len(rows[0]), num_iters) else "direct"
    run = _gram if form == "gram" else _direct
    radius = jnp.asarray(radius, jnp.float32)

    def rule(rows, usable):
        return run(rows, usable, start, radius, weights, num_iters=num_iters)

    return aggregate(updates, mask, return_excluded, rule)


def gram_is_cheaper(count: int, num_iters: int) -> bool:
    """Returns whether `N² D` products and three passes are faster than `num_iters` passes (see `threshold.py`)."""
    return 3 + count / 40 < num_iters


def _pull(distances: jax.Array, radius: jax.Array) -> jax.Array:
    """Returns `min(1, τ/d)`, 1 at distance 0."""
    return jnp.where(distances > radius, radius / jnp.maximum(distances, jnp.finfo(distances.dtype).tiny), 1.0)


@partial(jax.jit, static_argnames="num_iters")
def _direct(rows, usable, start, radius, weights, *, num_iters):
    weights, wide = shares(weights, usable), sum_dtype(*rows)

    def iterations(clean):
        def iterate(_, center):
            def add(parts, begin, length, step):
                share = jax.lax.dynamic_slice_in_dim(weights, begin, length)
                # In float16 the difference of finite numbers may not be.
                away = [x.astype(wide) - v.astype(wide)[None, :] for x, v in zip(parts, center, strict=True)]
                if clean is not None:
                    here = jax.lax.dynamic_slice_in_dim(clean, begin, length)
                    away = [usable_rows(d, here) for d in away]
                share *= _pull(jnp.sqrt(squared_norms(away)), radius)
                moves = [jnp.matmul(share.astype(wide), d.astype(wide), precision=HIGHEST) for d in away]
                return [s + move for s, move in zip(step, moves, strict=True)]

            step = fold_rows(add, [jnp.zeros(v.shape, wide) for v in center], rows)
            return [(v.astype(s.dtype) + s).astype(v.dtype) for v, s in zip(center, step, strict=True)]

        return jax.lax.fori_loop(0, num_iters, iterate, start)

    # Applying the mask in every block costs a third of the time, and mostly all clients count.
    return jax.lax.cond(usable.all(), lambda: iterations(None), lambda: iterations(usable))


@partial(jax.jit, static_argnames="num_iters")
def _gram(rows, usable, start, radius, weights, *, num_iters):
    weights = shares(weights, usable)
    starts = [v[None, :] for v in start]
    products = combinations.inner_products(rows, starts, usable)

    def iterate(_, at):
        share = weights * _pull(combinations.distances(products, at)[0][0], radius)
        stay = 1.0 - share.sum()
        return combinations.Coefficients(share[None, :] + stay * at.a, stay * at.b)

    at = jax.lax.fori_loop(0, num_iters, iterate, combinations.at_start(products, 1))
    return [v[0] for v in combinations.positions(at, rows, starts, usable)]
