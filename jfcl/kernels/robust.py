"""What the robust aggregators share, and the mean, to which they are compared.

Every aggregator takes `updates`, `[N, D]` or a pytree of arrays stacked on a leading client axis, and returns `[D]` or
that pytree without the client axis. Common to all:

* `mask`: `[N]` bool, the clients that count.
* Clients with NaN or infinity in their update are left out. With `return_excluded=True` the result is
  `(aggregate, excluded)`, where `excluded` `[]` int32 is the number of such clients (masked clients do not count).
* The aggregate of no clients is zero.
* `num_malicious`: how many of the clients that count may be hostile, `f` in the papers.

The families: `medians`, `selection`, `geometric_median`, `clipping`, and `pre_aggregation` for what comes before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jfcl.core.checks import check
from jfcl.kernels.base import (
    PyTree,
    check_whole,
    finite_rows,
    is_computable,
    num_rows,
    row_mask,
    rows_of,
    weighted_sum,
)


def aggregate(
    updates: PyTree,
    mask: jax.Array | None,
    return_excluded: bool,
    rule: Callable[[list[jax.Array], jax.Array], list[jax.Array]],
) -> Any:
    """Applies `rule(rows, usable)`, which returns one vector `[d]` for each matrix `[N, d]`, to stacked updates."""
    rows, usable = counted(updates, mask)
    leaves, structure = jax.tree.flatten(updates)
    parts = [v.reshape(jnp.shape(leaf)[1:]) for v, leaf in zip(rule(rows, usable), leaves, strict=True)]
    result = jax.tree.unflatten(structure, parts)
    return (result, num_excluded(mask, usable)) if return_excluded else result


def counted(updates: PyTree, mask: jax.Array | None) -> tuple[list[jax.Array], jax.Array]:
    """Returns the rows, and `[N]` bool: the rows that count, which are finite and not masked."""
    rows = rows_of(updates)
    return rows, row_mask(mask, len(rows[0])) & finite_rows(rows)


def num_excluded(mask: jax.Array | None, usable: jax.Array) -> jax.Array:
    """Returns `[]` int32: how many rows of `mask` are not usable."""
    return (row_mask(mask, len(usable)) & ~usable).sum().astype(jnp.int32)


def check_malicious(updates: PyTree, num_malicious: Any, most: Callable[[int], int], why: str) -> int:
    """Returns the number of rows, after checking that `num_malicious` is from 0 to `most(N)`."""
    count = num_rows(updates)
    check_whole("num_malicious", num_malicious, 0, most(count), why)
    return count


def check_minority(updates: PyTree, num_malicious: Any) -> int:
    """Returns the number of rows, after checking that `num_malicious` is less than half of it."""
    return check_malicious(updates, num_malicious, lambda n: (n - 1) // 2, "2 f < N")


def at_most_half(num_malicious: Any, usable: jax.Array) -> jax.Array:
    """Returns `f`, reduced to fewer than half of the usable rows where exclusions have left too few."""
    return jnp.minimum(jnp.asarray(num_malicious, jnp.int32), jnp.maximum(usable.sum() - 1, 0) // 2)


@jax.jit
def combine(rows: list[jax.Array], weights: jax.Array, usable: jax.Array) -> list[jax.Array]:
    """Returns `Σ_i weights[i] z_i` for every matrix and every row of weights (`[N]`, or `[K, N]`)."""
    return [weighted_sum(x, weights, usable) for x in rows]


def check_weights(updates: PyTree, weights: jax.Array | None) -> jax.Array:
    """Returns `[N]` float32 weights, ones for `None`."""
    count = num_rows(updates)
    if weights is None:
        return jnp.ones(count, jnp.float32)
    weights = jnp.asarray(weights)
    check(weights.shape == (count,), "weights", weights.shape, f"of shape ({count},)")
    if is_computable(weights):
        fits = ((weights >= 0) & jnp.isfinite(weights)).all()
        check(fits, "weights", weights.tolist(), "at least 0 and finite")
    return weights.astype(jnp.float32)


def shares(weights: jax.Array, usable: jax.Array) -> jax.Array:
    """Returns the `weights` of the usable rows, scaled to sum to 1 (all zero where they sum to 0)."""
    weights = jnp.where(usable, weights, jnp.zeros_like(weights))
    total = weights.sum()
    return weights / jnp.where(total > 0, total, jnp.ones_like(total))


def mean(
    updates: PyTree, *, weights: jax.Array | None = None, mask: jax.Array | None = None, return_excluded: bool = False
) -> Any:
    """Returns the weighted mean. It is not robust: one client can move it anywhere.

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
        updates, mask, return_excluded, lambda rows, usable: combine(rows, shares(weights, usable), usable)
    )
