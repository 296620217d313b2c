"""A data set: the examples that clients are given."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Dataset(NamedTuple):
    """A data set on the host.

    Attributes:
      name: what `load` calls it.
      train: `{"x": [n, ...], "y": [n]}`. Images are float32 in `[0, 1]`, `[n, H, W, C]`; text is an array
        of strings until `tokenize` makes it ids; labels are int32 from 0, regression targets float32.
      test: the official test split, or `None` where there is none.
      num_classes: `None` for regression.
      writer: `{"train": [n], "test": [n']}` int32, who wrote each example, or `None` where that is not known.
      description: one line.
    """

    name: str
    train: dict[str, np.ndarray]
    test: dict[str, np.ndarray] | None
    num_classes: int | None
    writer: dict[str, np.ndarray] | None
    description: str
