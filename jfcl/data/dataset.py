"""A data set: the examples that are divided among clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jfcl.core import check, check_apart, check_held, named_leaves

_NUMBERS_TEXTS = (
    "np.unique(labels, return_inverse=True) numbers those of all splits together, as jfcl.data.from_frame does"
)


class Dataset(NamedTuple):
    """A data set on the host.

    Attributes:
      name: its name in `load`.
      train: `{"x": [n, ...], "y": [n]}`. Images are float32 in `[0, 1]`, `[n, H, W, C]`; text is an array
        of strings until `tokenize` makes it ids; labels are int32 from 0, regression targets float32. Further entries
        are arrays `[n, ...]` of numbers, or pytrees of them: weights, masks. They follow the examples everywhere.
      test: the official test split, with the same entries, or `None` where there is none.
      num_classes: `None` for regression, and for texts without labels.
      writer: `{"train": [n], "test": [n']}` int32, the writer of each example, or `None` where it is not known.
      description: one line.
      writer_names: the name of writer `i`, of any type: a user's key, a speaker. `None` where they have no names.
      tokens: of texts: what `tokenize` cuts them into, "words" or "characters".
      table: of a table: the columns of the inputs, the names of the labels and what was scaled, for
        `jfcl.data.read_rows`; `None` for other data sets.
    """

    name: str
    train: dict[str, np.ndarray]
    test: dict[str, np.ndarray] | None
    num_classes: int | None
    writer: dict[str, np.ndarray] | None
    description: str
    writer_names: Sequence[Any] | None = None
    tokens: str = "words"
    table: dict[str, Any] | None = None


def check_form(dataset: Dataset) -> None:
    """Checks that the parts of a data set are those that `Dataset` describes, whatever their values.

    Raises:
      ValueError: a split that is no dict of arrays `x` and `y`; labels that are no vector; a split without writer ids;
        further arrays that differ between the splits.
    """
    for name, split in [("train", dataset.train), ("test", dataset.test)]:
        if split is None and name == "test":
            continue
        where, is_dict = f"data set {dataset.name!r} ({name})", isinstance(split, dict)
        kinds = {of: type(values).__name__ for of, values in split.items()} if is_dict else type(split).__name__
        whole = is_dict and all(hasattr(split.get(of), "dtype") for of in ("x", "y"))
        check(whole, where, kinds, "a dict with arrays 'x' and 'y'")
        for of in ("x", "y"):
            check(split[of].ndim > 0, f"{where}: {of}", split[of], "an array with an entry for each example")
        vector = dataset.num_classes is None or split["y"].ndim == 1
        check(vector, f"{where}: y", split["y"].shape, "a vector, with a label for each input")
        if dataset.writer is not None:
            writer, accepted = dataset.writer, 'a dict with the writer ids of each split, such as {"train": ids}'
            check(isinstance(writer, dict) and name in writer, f"{where}: writer", type(writer).__name__, accepted)
            ids, accepted = np.asarray(writer[name]), "a vector of integers, with a writer for each input"
            check(ids.ndim == 1 and ids.dtype.kind in "iu", f"{where}: writer", f"{ids.dtype} {ids.shape}", accepted)
    if dataset.test is not None:
        shape, wanted = dataset.test["x"].shape[1:], dataset.train["x"].shape[1:]
        where = f"data set {dataset.name!r} (test): the shape of an input"
        check(shape == wanted, where, shape, f"that of training, {wanted}")
        here, there = (_kinds_beside(part) for part in (dataset.test, dataset.train))
        where = f"data set {dataset.name!r} (test): the arrays beside x and y"
        check(here == there, where, here, f"those of training, {there}")


def _beside(split: dict[str, Any]) -> dict[str, Any]:
    """Returns the arrays beside `x` and `y` by their names."""
    return named_leaves({name: values for name, values in split.items() if name not in ("x", "y")})


def _kinds_beside(split: dict[str, Any]) -> dict[str, str]:
    kinds = {name: np.asarray(values) for name, values in _beside(split).items()}
    return {name: f"{values.dtype} {list(values.shape[1:])}" for name, values in kinds.items()}


def check_dataset(dataset: Dataset) -> None:
    """Checks a data set for errors that would affect every run on it.

    Raises:
      ValueError: those of `check_form`; raw text; images of integers, or with their channels first; arrays of different
        lengths or empty; NaN or infinite numbers; labels outside `0..num_classes-1`; writer ids of another length.
    """
    check(isinstance(dataset, Dataset), "dataset", type(dataset).__name__, "a jfcl.data.Dataset")
    count = dataset.num_classes
    whole = count is None or (isinstance(count, (int, np.integer)) and not isinstance(count, bool) and count >= 1)
    check(whole, f"data set {dataset.name!r}: num_classes", count, "an integer of at least 1, or None")
    check_form(dataset)
    for name, split in [("train", dataset.train), ("test", dataset.test)]:
        if split is None:
            continue
        where = f"data set {dataset.name!r} ({name})"
        x, y = split["x"], split["y"]
        if x.dtype.kind not in "fiu":
            raise ValueError(
                f"{where}: inputs must be numbers, got {x.dtype}; turn text into ids with jfcl.data.tokenize, images of"
                " PIL into arrays with jfcl.data.from_frame, and other types into float32"
            )
        if x.dtype.kind in "iu" and (x.ndim > 2 or x.dtype == np.uint8):
            span = f"{x.dtype} {list(x.shape[1:])} in {x.min()}..{x.max()}" if x.size else str(x.dtype)
            raise ValueError(
                f"{where}: images must be of floating-point numbers, such as x / 255, got {span}; token ids are int32"
                " [n, L]"
            )
        if x.ndim == 4 and x.shape[1] <= 4 < min(x.shape[2:]):
            raise ValueError(
                f"{where}: images must have their channels last, [n, H, W, C], got {list(x.shape)};"
                " np.moveaxis(x, 1, -1) moves them (volumes have a fifth axis)"
            )
        if len(x) != len(y) or not len(x):
            raise ValueError(f"{where}: needs as many labels as inputs and at least one, got {len(x)} and {len(y)}")
        check(x.size > 0, f"{where}: the shape of an input", list(x.shape[1:]), "without a 0")
        if dataset.num_classes is not None and y.dtype.kind not in "iu":
            remedies = {"f": "y.astype(np.int32) makes whole numbers so, and num_classes=None a regression of others"}
            remedies |= {"b": "y.astype(np.int32) makes them so"} | dict.fromkeys("OSU", _NUMBERS_TEXTS)
            hint = f"; {remedies[y.dtype.kind]}" if y.dtype.kind in remedies else ""
            raise ValueError(f"{where}: labels must be integers, got {y.dtype}{hint}")
        if y.dtype.kind not in "biuf":
            raise ValueError(f"{where}: targets must be numbers, got {y.dtype}; of labels, {_NUMBERS_TEXTS}")
        for of, values in {"inputs": x, "targets": y}.items():
            check_held(f"{where}: {of}", values)
            if values.ndim <= 2 and (values.dtype.kind == "f" or (of == "inputs" and values.ndim == 1)):
                check_apart(f"{where}: {of}", values)
        if dataset.num_classes is not None and (y.min() < 0 or y.max() >= dataset.num_classes):
            raise ValueError(f"{where}: labels must lie in 0..{dataset.num_classes - 1}, got {y.min()}..{y.max()}")
        for of, values in _beside(split).items():
            values = np.asarray(values)
            fits = values.ndim > 0 and values.dtype.kind in "biuf" and len(values) == len(x)
            check(fits, f"{where}: {of}", f"{values.dtype} {values.shape}", f"an array of numbers [{len(x)}, ...]")
            check_held(f"{where}: {of}", values)
            if values.ndim <= 2 and values.dtype.kind == "f":
                check_apart(f"{where}: {of}", values)
        if dataset.writer is not None and len(dataset.writer[name]) != len(y):
            raise ValueError(f"{where}: {len(dataset.writer[name])} writer ids for {len(y)} examples")


def labels_of(dataset: Dataset, split: str) -> np.ndarray:
    """Returns `[n]` the labels of a split, by which it is stratified; zeros where it has none."""
    y = getattr(dataset, split)["y"]
    return y if dataset.num_classes is not None else np.zeros(len(y), np.int32)
