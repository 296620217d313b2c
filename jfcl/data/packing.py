"""Inputs in the smallest type that holds them exactly: bytes, where floats are bytes divided by one number."""

from typing import Any

import jax
import numpy as np

from jfcl.core import Clients, Packed, check
from jfcl.data.build import Federation
from jfcl.mapping import hosts

LEVELS = (1, 16, 255)  # steps per unit at which inputs are tried as bytes: tokens, digits, pixels


def is_exact(x: np.ndarray, per_unit: int) -> bool:
    """Returns whether the numbers of `x` are exactly bytes divided by `per_unit`."""
    if x.dtype.kind != "f" or not (x.min(initial=0) >= 0 and x.max(initial=0) * per_unit <= 255):
        return False
    return np.array_equal(np.divide(to_bytes(x, per_unit), x.dtype.type(per_unit), dtype=x.dtype), x)


def to_bytes(x: np.ndarray, per_unit: int) -> np.ndarray:
    """Returns the bytes of numbers for which `is_exact` is true."""
    return np.rint(x * per_unit).astype(np.uint8)


def in_bytes(data: Clients | Federation) -> Clients | Federation:
    """Returns clients with their inputs held as bytes where that is exact, in a quarter of the memory of float32.

    Images are bytes divided by 255 unless a shift has computed other numbers: rotations by quarter turns, renamed
    labels and selected classes keep them, corruptions and colours do not. A client turns them into the same floats
    where it uses them, with mini-batches only those of a batch.

    Args:
      data: of clients on the host.

    Returns:
      The same with `jfcl.core.Packed` in the place of `examples["x"]`, which NumPy reads as the floats, where it is an
      array of float32 that are exactly bytes divided by 255, 16 or 1. Other clients are as they were.

    Raises:
      ValueError: other than a `Federation` or `Clients`.

    Example:
      >>> import jfcl
      >>> fed = jfcl.data.build("digits", num_clients=4, num_clusters=2, heterogeneity="rotation")
      >>> packed = in_bytes(fed).train.examples["x"]
      >>> packed.stored.dtype, bool((np.asarray(packed) == fed.train.examples["x"]).all())
      (dtype('uint8'), True)
    """
    check(isinstance(data, Clients | Federation), "data", type(data).__name__, "Clients, or a Federation")

    def is_part(value: Any) -> bool:
        return isinstance(value, Clients) or not isinstance(value, tuple)

    return jax.tree.map(lambda value: _packed(value) if isinstance(value, Clients) else value, data, is_leaf=is_part)


def _packed(clients: Clients) -> Clients:
    """Returns `clients` as `in_bytes` does."""
    x = clients.examples.get("x") if isinstance(clients.examples, dict) else None
    fits = getattr(x, "dtype", None) == np.float32 and not isinstance(x, Packed)
    rows = np.asarray(x) if fits else ()
    exact = [fits and all(is_exact(row, level) for row in rows) for level in LEVELS]
    levels = [level for level, is_so in zip(LEVELS, hosts.everybodys(exact).all(axis=0), strict=True) if is_so]
    if not levels:
        return clients
    stored = np.empty(rows.shape, np.uint8)
    for row, place in zip(rows, stored, strict=True):
        place[...] = to_bytes(row, levels[-1])
    return clients._replace(examples={**clients.examples, "x": Packed(stored, levels[-1])})
