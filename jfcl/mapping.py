"""The client axis: how a function written for one client becomes a function of all of them.

A *mapping* has the interface of `jax.vmap`: `mapping(fn, in_axes=0)` takes `fn` of one client to a function of stacked
clients. `jax.vmap` is one; `chunked(size)` is another, which bounds memory by vmapping `size` clients at a time. All
give the same results, so choosing among them is about speed and memory alone: on a CPU `chunked(1)` (the default of
`auto`) is the fastest for models of any size, on an accelerator `jax.vmap` is.

Servers that need only sums over clients use `map_reduce`, which never holds what the clients send all at once:
`O(chunk * D + K * D)` memory instead of `O(N * D)`.

This file is the only place that calls `jax.lax.map` (and, with several devices, `shard_map`) over clients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jfcl.core import PyTree, check_count

Mapping = Callable[..., Callable[..., Any]]


class chunked(NamedTuple):
    """A mapping that takes `size` clients at a time: `vmap` inside, a sequential loop outside.

    Memory falls from `O(N)` to `O(size)` copies of a client's temporaries; results equal `jax.vmap`'s.

    Attributes:
      size: clients per chunk, at least 1. It need not divide `N`: the rest is a smaller chunk (and compiles once more).

    Example:
      >>> import jax.numpy as jnp
      >>> chunked(2)(lambda x: x * x)(jnp.arange(5)).tolist()
      [0, 1, 4, 9, 16]
    """

    size: int

    def __call__(self, fn: Callable[..., Any], in_axes: Any = 0) -> Callable[..., Any]:
        check_count("chunk size", self.size)

        def mapped(*args):
            _, kept = map_reduce(self, lambda *a: ((), fn(*a)), lambda total, sent: total, (), in_axes)(*args)
            return kept

        return mapped


def auto() -> Mapping:
    """The mapping that suits the default backend: one client at a time on a CPU, all at once on an accelerator.

    Example:
      >>> auto()(lambda x: x + 1)(jnp.zeros(3)).tolist()
      [1.0, 1.0, 1.0]
    """
    return chunked(1) if jax.default_backend() == "cpu" else jax.vmap


def map_reduce(
    mapping: Mapping,
    fn: Callable[..., tuple[PyTree, PyTree]],
    fold: Callable[[PyTree, PyTree], PyTree],
    zero: PyTree,
    in_axes: Any = 0,
) -> Callable[..., tuple[PyTree, PyTree]]:
    """Maps `fn` over clients, folds what they send into a running total and stacks what they keep.

    Args:
      mapping: `jax.vmap`, `chunked(size)`, or any function with their interface.
      fn: function of ONE client that returns `(sent, kept)`.
      fold: `(total, sent stacked over some clients [c, ...]) -> total`. It must add: folding in two parts after each
        other gives what folding all of them at once does.
      zero: the total of no clients.
      in_axes: as in `jax.vmap`: 0 or None for every argument, or a tuple of them.

    Returns:
      A function of stacked arguments that returns `(total, kept stacked [N, ...])`.

    Example:
      >>> import jax.numpy as jnp
      >>> add = lambda total, sent: total + sent.sum(axis=0)
      >>> total, squares = map_reduce(chunked(2), lambda x: (x, x * x), add, 0.0)(jnp.arange(3.0))
      >>> float(total), squares.tolist()
      (3.0, [0.0, 1.0, 4.0])
    """

    def whole(*args):
        sent, kept = mapping(fn, in_axes=in_axes)(*args)
        return fold(zero, sent), kept

    def in_chunks(*args):
        axes = tuple(in_axes) if isinstance(in_axes, (tuple, list)) else (in_axes,) * len(args)
        mapped = [arg for arg, axis in zip(args, axes, strict=True) if axis is not None]
        if any(axis not in (None, 0) for axis in axes) or not jax.tree.leaves(mapped):
            raise ValueError(
                f"chunked maps leading axes: in_axes must hold 0 and None only, and one 0; got {in_axes!r}"
            )
        n = jax.tree.leaves(mapped)[0].shape[0]
        size = min(mapping.size, n)

        def some(first, count):
            """What `count` clients from row `first` on send (stacked) and keep."""

            def row(x):  # without a client axis for one client: XLA then sees plain matrix products and convolutions
                rows = jax.lax.dynamic_slice_in_dim(x, first, count)
                return rows[0] if count == 1 else rows

            taken = [arg if axis is None else jax.tree.map(row, arg) for arg, axis in zip(args, axes, strict=True)]
            if count == 1:
                return jax.tree.map(lambda x: x[None], fn(*taken))
            return jax.vmap(fn, in_axes=axes)(*taken)

        def one_chunk(total, first):
            sent, kept = some(first, size)
            return fold(total, sent), kept

        # Scanning over row numbers, not over rows: the data, never reshaped, are then not copied into the loop.
        total, kept = jax.lax.scan(one_chunk, jax.tree.map(jnp.asarray, zero), jnp.arange(n // size) * size)
        kept = jax.tree.map(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), kept)
        if n % size:
            sent, rest = some(n - n % size, n % size)
            total = fold(total, sent)
            kept = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), kept, rest)
        return total, kept

    return in_chunks if isinstance(mapping, chunked) else whole
