"""Data sets by name: embedded in scikit-learn, official files in a data directory, or tensorflow-datasets."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jfcl.core import check_choice


class Dataset(NamedTuple):
    """A data set on the host.

    Attributes:
      name: what `load` calls it.
      train: `{"x": [n, ...], "y": [n]}`. Images are float32 in `[0, 1]`, `[n, H, W, C]`; labels int32 from 0.
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


def _digits(data_dir) -> Dataset:
    from sklearn.datasets import load_digits

    digits = load_digits()
    train = {
        "x": (digits.images / 16).astype(np.float32)[..., None],
        "y": digits.target.astype(np.int32),
    }
    return Dataset("digits", train, None, 10, None, DATASETS["digits"][1])


def load(name: str, data_dir=None) -> Dataset:
    check_choice("dataset", name, DATASETS)
    return DATASETS[name][0](data_dir)


DATASETS = {
    "digits": (_digits, "1,797 handwritten digits, 8x8, embedded in scikit-learn"),
}
