"""Assignments of least cost: each row gets a column of its own."""

import jax
import jax.numpy as jnp
from optax.assignment import hungarian_algorithm

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
    finite = jnp.isfinite(cost)
    cost = jnp.where(finite, cost, jnp.where(finite, cost, -jnp.inf).max())
    rows, columns = hungarian_algorithm((cost - cost.min()).astype(float))
    return jnp.zeros(len(cost), jnp.int32).at[rows].set(columns.astype(jnp.int32))
