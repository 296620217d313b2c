"""Assignments of least cost: each row gets a column of its own."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jfcl.core.checks import check
from jfcl.kernels.base import rows_of
from jfcl.kernels.blocks import refuse_nonfinite


def least_cost_assignment(cost: jax.Array) -> jax.Array:
    """Returns the column of each row, all different, for which the sum of the costs is least (Kuhn 1955, Munkres 1957).

    Args:
      cost: `[n, m]` with `n <= m`.

    Returns:
      `[n]` int32. Inside `jit`, a cost that is not finite counts as the largest one that is.

    Raises:
      ValueError: another shape, more rows than columns; outside `jit`: costs that are not finite.

    Cost: `O(n² m)`, one row after the other along shortest augmenting paths.

    Example:
      >>> import jax.numpy as jnp
      >>> least_cost_assignment(jnp.array([[1.0, 2.0, 9.0], [1.0, 4.0, 9.0]])).tolist()
      [1, 0]
    """
    (cost,) = rows_of(jnp.asarray(cost), name="cost")
    check(cost.shape[0] <= cost.shape[1], "cost", cost.shape, "of shape [n, m] with n <= m")
    refuse_nonfinite([cost], name="cost")
    return _least_cost(cost)


@jax.jit
def _least_cost(cost):
    rows, columns = cost.shape
    finite = jnp.isfinite(cost)
    cost = jnp.where(finite, cost, jnp.where(finite, cost, -jnp.inf).max())
    cost = jnp.pad(cost - cost.min(), ((0, 0), (0, 1)))  # the last column stands for the row that is added
    real = jnp.arange(columns + 1) < columns
    far = jnp.array(jnp.inf, cost.dtype)

    def add_row(row, carry):
        price_of_row, price_of_column, owner = carry  # owner: [m + 1], the row that has a column, or -1
        owner = owner.at[columns].set(row)

        def search(carry):
            column, used, least, before, price_of_row, price_of_column = carry
            used = used.at[column].set(True)
            reduced = cost[owner[column]] - price_of_row[owner[column]] - price_of_column
            nearer = real & ~used & (reduced < least)
            least, before = jnp.where(nearer, reduced, least), jnp.where(nearer, column, before)
            open_ = jnp.where(real & ~used, least, far)
            column = jnp.argmin(open_).astype(jnp.int32)
            step = open_[column]
            price_of_row = price_of_row.at[jnp.where(used, owner, rows)].add(step, mode="drop")
            price_of_column = price_of_column - jnp.where(used, step, jnp.zeros_like(step))
            least = jnp.where(used, least, least - step)
            return column, used, least, before, price_of_row, price_of_column

        start = jnp.int32(columns), ~real & False, jnp.full(columns + 1, far), jnp.full(columns + 1, columns, jnp.int32)
        column, _, _, before, *prices = jax.lax.while_loop(
            lambda carry: owner[carry[0]] >= 0, search, (*start, price_of_row, price_of_column)
        )

        def give(carry):  # along the path, each column to the row that reached it
            column, owner = carry
            return before[column], owner.at[column].set(owner[before[column]])

        _, owner = jax.lax.while_loop(lambda carry: carry[0] != columns, give, (column, owner))
        return *prices, owner

    owner = jnp.full(columns + 1, -1, jnp.int32)
    start = jnp.zeros(rows, cost.dtype), jnp.zeros(columns + 1, cost.dtype), owner
    owner = jax.lax.fori_loop(0, rows, add_row, start)[2][:columns]
    places = jnp.arange(columns, dtype=jnp.int32)
    return jnp.zeros(rows, jnp.int32).at[jnp.where(owner >= 0, owner, rows)].set(places, mode="drop")
