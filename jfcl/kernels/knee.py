"""The knee of a rising curve: where its values begin to grow fast."""

import jax
import jax.numpy as jnp

from jfcl.core.checks import check
from jfcl.kernels.base import row_mask, sum_dtype


def knee(values: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
    """Returns the value at the knee of the sorted values (Kneedle: Satopaa, Albrecht, Irwin, Raghavan 2011).

    The curve of the sorted values is mirrored, so that it is concave and the knee is the first from its high end, and
    both axes are scaled to `[0, 1]`. A knee is a local maximum of the difference to the diagonal, after which it falls
    by more than a step of the horizontal axis (sensitivity 1) before it has passed a minimum.

    Args:
      values: `[N]`.
      mask: `[N]` bool: values that count.

    Returns:
      `[]`, one of the values; the largest where there is no knee, such as for values on a line, or all equal.

    Raises:
      ValueError: values of another rank than 1.

    Cost: a sort of `N` values.

    Example:
      >>> import jax.numpy as jnp
      >>> float(knee(jnp.array([1.0, 9.0, 1.1, 1.2, 5.0, 1.4])))
      1.399999976158142
    """
    values = jnp.asarray(values)
    check(values.ndim == 1 and len(values) > 0, "values", values.shape, "of shape [N], with at least one value")
    return _knee(values.astype(sum_dtype(values)), row_mask(mask, len(values)))


@jax.jit
def _knee(values, mask):
    length, count = len(values), mask.sum()
    falling = jnp.sort(jnp.where(mask, values, -jnp.inf), descending=True)
    place = jnp.arange(length)
    step = 1.0 / jnp.maximum(count - 1, 1).astype(values.dtype)
    top, low = falling[0], falling[jnp.maximum(count - 1, 0)]
    rise = (top - falling) / jnp.where(top > low, top - low, 1.0)
    above = rise - place.astype(values.dtype) * step
    before, after = above[jnp.maximum(place - 1, 0)], jnp.where(place >= count - 1, above, jnp.roll(above, -1))
    # Each place is compared with the last local maximum at or before it, or with the high end. From a minimum that is
    # not below the threshold the difference rises to the next maximum, so that it needs no test.
    maximum = jax.lax.cummax(jnp.where((above >= before) & (above >= after), place, 0))
    ends = after < above[maximum] - step
    return falling[jnp.where(ends.any(), maximum[jnp.argmax(ends)], 0)]
