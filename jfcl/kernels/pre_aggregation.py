"""Steps before an aggregator: clipping, mixing of nearest neighbours, buckets.

Each returns `(updates, mask)` for the next step:

    mixed, mask = nearest_neighbour_mixing(updates, num_malicious=2)
    result = krum(mixed, num_malicious=2, mask=mask)

`jfcl.kernels.make_aggregator("nearest_neighbour_mixing+krum", num_malicious=2)` is the same as one function.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jfcl.core.checks import check
from jfcl.kernels.base import PyTree, check_whole, is_computable, squared_norms, usable_rows
from jfcl.kernels.distances import squared_row_distances
from jfcl.kernels.robust import at_most_half, check_minority, combine, counted
from jfcl.kernels.similarity import scaled_rows, unit_scale


def _with_rows(updates: PyTree, rows: list[jax.Array]) -> PyTree:
    """Returns a pytree like `updates`, with the numbers of `rows` `[n, d]` for every leaf `[N, ...]`."""
    leaves, structure = jax.tree.flatten(updates)
    shaped = [x.reshape(len(x), *jnp.shape(leaf)[1:]) for x, leaf in zip(rows, leaves, strict=True)]
    return jax.tree.unflatten(structure, shaped)


@jax.jit
def _shorten(rows, usable, radius):
    norms = jnp.sqrt(squared_norms(rows))
    power, inverse = unit_scale(rows, usable)
    longer = norms > radius  # also where the square overflows
    power, inverse = jnp.where(longer, power, 1.0), jnp.where(longer, inverse * radius, 1.0)
    # In the type of the norms: rounded to 16 bits, the factor of a long update can be 0.
    return [usable_rows(scaled_rows(x, usable, (power, inverse)), usable) for x in rows]


def clip_norms(updates: PyTree, *, radius: Any, mask: jax.Array | None = None) -> tuple[PyTree, jax.Array]:
    """Shortens every update to a length of at most `radius`.

    Args:
      updates: `[N, D]` or a stacked pytree.
      radius: a number, or `[N]`, at least 0.
      mask: `[N]` bool, the clients that count.

    Returns:
      `(updates, mask)`: clients that do not count, or have NaN or infinity, as zeros and masked.

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
      mask: `[N]` bool, the clients that count.

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
    check_minority(updates, num_malicious)
    rows, usable = counted(updates, mask)
    radius = _arc_radius(rows, usable, at_most_half(num_malicious, usable))
    return _with_rows(updates, _shorten(rows, usable, radius)), usable


@jax.jit
def _arc_radius(rows, usable, f):
    count = usable.sum()
    # floor(2 f (n - f) / n). The product may exceed int32: with an estimate in floats, the difference is small again,
    # and right although both of its terms wrap around.
    n = jnp.maximum(count, 1)
    estimate = (2 * f.astype(jnp.float32) * ((n - f) / n)).astype(jnp.int32)
    num_clipped = estimate + (2 * f * (n - f) - estimate * n) // n
    norms = jnp.where(usable, jnp.sqrt(squared_norms(rows)), -jnp.inf)
    longest_first = jnp.sort(norms, descending=True)
    return jnp.maximum(longest_first[jnp.minimum(num_clipped, len(usable) - 1)], 0.0)


def nearest_neighbour_mixing(
    updates: PyTree, *, num_malicious: int, mask: jax.Array | None = None
) -> tuple[PyTree, jax.Array]:
    """NNM: replaces every update by the mean of the `N − f` nearest to it, itself included (Allouah et al. 2023).

    Args:
      updates: `[N, D]` or a stacked pytree.
      num_malicious: `f`, less than half of the clients.
      mask: `[N]` bool, the clients that count.

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
    check_minority(updates, num_malicious)
    rows, usable = counted(updates, mask)
    keep = usable.sum() - at_most_half(num_malicious, usable)
    return _with_rows(
        updates, combine(rows, _nearest(squared_row_distances(rows, usable), usable, keep), usable)
    ), usable


@jax.jit
def _nearest(squares, usable, keep):
    """Returns `[N, N]` shares: equal for each usable row's `keep` nearest, which always include itself."""
    itself = jnp.eye(len(usable), dtype=bool)
    squares = jnp.where(usable, jnp.minimum(squares, jnp.finfo(squares.dtype).max), jnp.inf)  # unusable ones last
    squares = jnp.where(itself, -1.0, squares)  # a duplicate must not displace the update itself
    order = jnp.argsort(squares, axis=1, stable=True)
    rank = jnp.argsort(order, axis=1)
    near = (rank < keep) & usable[None, :] & usable[:, None]
    return near.astype(squares.dtype) / jnp.maximum(near.sum(axis=1, keepdims=True), 1).astype(squares.dtype)


def bucketing(
    updates: PyTree, *, bucket_size: int, key: jax.Array, mask: jax.Array | None = None
) -> tuple[PyTree, jax.Array]:
    """Returns the means of random buckets of `bucket_size` updates (Karimireddy, He, Jaggi 2022).

    Args:
      updates: `[N, D]` or a stacked pytree.
      bucket_size: `s`, from 1 to N.
      key: determines the buckets.
      mask: `[N]` bool, the clients that count; they fill the first buckets.

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
    check_whole("bucket_size", bucket_size, 1, count, "N")
    shuffled = jax.random.permutation(key, count)
    order = shuffled[jnp.argsort(~usable[shuffled], stable=True)]
    bucket = jnp.zeros(count, jnp.int32).at[order].set(jnp.arange(count, dtype=jnp.int32) // bucket_size)
    num_buckets = -(-count // bucket_size)
    members = (bucket[None, :] == jnp.arange(num_buckets, dtype=jnp.int32)[:, None]) & usable[None, :]
    sizes = members.sum(axis=1)
    mixing = members.astype(jnp.float32) / jnp.maximum(sizes, 1).astype(jnp.float32)[:, None]
    return _with_rows(updates, combine(rows, mixing, usable)), sizes > 0
