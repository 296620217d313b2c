"""Inputs that are held as bytes, a quarter of float32, until a client uses them."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np


@partial(jax.tree_util.register_dataclass, data_fields=["stored"], meta_fields=["per_unit"])
@dataclass(frozen=True, eq=False)
class Packed:
    """An array of float32 that are exactly bytes divided by `per_unit`; `jfcl.data.in_bytes` makes it.

    It stands for the array in `examples["x"]`, with `stored` as its leaf. NumPy, an index and the methods of arrays
    read the floats; operators refuse it.

    Attributes:
      stored: `[N, M, ...]` uint8.
      per_unit: a power of 2 up to 128, or 255.

    Example:
      >>> x = Packed(np.array([[0, 51, 255]], np.uint8), 255)
      >>> x.shape, x[0].tolist(), x.sum().item(), np.asarray(x).dtype
      ((1, 3), [0.0, 0.20000000298023224, 1.0], 1.2000000476837158, dtype('float32'))
    """

    stored: Any
    per_unit: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.float32)

    def floats(self) -> Any:
        """Returns the array, bit for bit that of a division in float32."""
        x = self.stored.astype(np.float32)
        if self.per_unit != 255:
            return x / np.float32(self.per_unit)
        # XLA multiplies by 1/255 instead of dividing, which rounds otherwise. This is the quotient, as x / 255 is
        # (x + x / 255) / 256, where the sum hides the error of x / 255, also in a fused multiply-add.
        return (x + x * np.float32(1 / 255)) * np.float32(1 / 256)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(Packed(np.asarray(self.stored), self.per_unit).floats(), dtype)

    def __len__(self) -> int:
        return len(self.stored)

    def __getitem__(self, rows: Any) -> Any:
        return Packed(self.stored[rows], self.per_unit).floats()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # of protocols, such as those of NumPy
            raise AttributeError(name)
        return getattr(self.floats(), name)


def unpacked(examples: Any) -> Any:
    """Returns a pytree with arrays of floats in the place of those that are `Packed`."""

    def is_packed(x: Any) -> bool:
        return isinstance(x, Packed)

    return jax.tree.map(lambda x: x.floats() if is_packed(x) else x, examples, is_leaf=is_packed)
