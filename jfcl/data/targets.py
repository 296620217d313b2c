"""Targets and keys of a table: labels that are numbered, numbers of a regression, names of clients."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np

from jfcl.core import check, shown
from jfcl.data.values import as_type, check_whole, plain, stacked

KINDS = ("classification", "regression")
# Numbers as people and programs write them ("1,5", "1e3", "0x1f", "$1'000", "5 %"), dates and times of day.
_NUMBER = re.compile(r"\s*[$€£¥]?\s*[-+−]?\s*[$€£¥]?(0x[\da-f]+|[\d.,'’_\s]*\d\.?(e[-+]?\d+)?)\s*[%$€£¥]?\s*", re.I)
_DATE = re.compile(r"\s*(\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}([T\s].*)?|\d{1,2}:\d{2}(:\d{2}.*)?)\s*")


def written_number(text: str) -> bool:
    """Returns whether a text is a number, a date or a time.

    Example:
      >>> [written_number(text) for text in ("1,5", " 3", "$1'000", "2024-01-31", "3+", "a 3")]
      [True, True, True, True, False, False]
    """
    return bool(_NUMBER.fullmatch(text) or _DATE.fullmatch(text))


def targets_of(
    splits: dict[str, Any], column: str, num_classes: int | None, kind: str | None
) -> tuple[dict[str, np.ndarray], int | None, list[Any] | None]:
    """Returns the targets of every split, the number of classes, and their names where they were numbered.

    The number of classes is `None` for a regression.
    """
    where, arrays = f"column {column!r}", {}
    for split, values in splits.items():
        values = plain(values, where)
        rows = values if isinstance(values, np.ndarray) and values.dtype.kind in "biu" else list(values)
        if isinstance(rows, list):
            check_whole(rows, where)
            rows = np.array(rows, object) if isinstance(rows[0], str) else stacked(rows, where)
        arrays[split] = rows
    single = all(array.ndim == 1 for array in arrays.values())
    if not single:  # maps of truths
        arrays = {s: array.astype(np.uint8) if array.dtype.kind == "b" else array for s, array in arrays.items()}
    kinds = "".join(sorted({array.dtype.kind for array in arrays.values()}))
    if kind == "regression" and set(kinds) <= set("biuf"):
        return {split: as_type(np.float32, array, where) for split, array in arrays.items()}, None, None
    check(kind != "regression", "kind", kind, f"classification, or left out: {where} holds other values than numbers")
    if kinds in ("O", "b", "bO"):
        found, names = numbered(arrays, column)
        if kind is None and any(isinstance(name, str) and written_number(name) for name in names):
            raise ValueError(
                f"{where} holds numbers or dates written as texts ({shown(names[0])}): give kind='classification' where"
                " they are names of labels, or make them numbers, as with pandas.to_numeric"
            )
        return found, len(names), names
    if "f" in kinds and set(kinds) <= set("fiu"):
        every = {split: as_type(np.float32, array, where) for split, array in arrays.items()}
        whole = single and all((array == np.rint(array)).all() for array in every.values())
        if kind is None and whole:
            some = ", ".join(map(str, np.unique(every["train"])[:4].tolist()))
            raise ValueError(
                f"{where} holds whole numbers as floats ({some}, ...): give kind='classification' for labels, or"
                " kind='regression' for quantities"
            )
        if kind is None:
            return every, None, None
        check(whole, f"{where}: labels", "numbers with fractions", "whole numbers, or give kind='regression'")
        arrays, kinds = {split: array.astype(np.int64) for split, array in arrays.items()}, "i"
    if kinds in ("i", "u", "iu") and all(array.ndim > 2 for array in arrays.values()):  # maps of labels
        return {split: as_type(np.int32, array, where) for split, array in arrays.items()}, None, None
    single = single and set(kinds) <= set("iu")
    accepted = "of one kind in all splits, a label or floats in each row (several labels: several columns in y)"
    check(single, where, {s: f"{a.dtype} {a.shape}" for s, a in arrays.items()}, accepted)
    low, high = min(array.min() for array in arrays.values()), max(array.max() for array in arrays.values())
    labels = {split: as_type(np.int32, array, where) for split, array in arrays.items()}
    fits = num_classes is None or (low >= 0 and high < num_classes)
    accepted = f"in 0..{(num_classes or 0) - 1} (-1 stands for an unknown one)"
    check(fits, f"{where}: labels", [int(low), int(high)], accepted)
    if low < 0:
        found, names = numbered(labels, column)
        return found, len(names), names
    return labels, num_classes or int(high) + 1, None


def numbered(splits: dict[str, Any], column: str) -> tuple[dict[str, np.ndarray], list[Any]]:
    """Returns the number of each value in the sorted list of all different ones, and that list."""
    where = f"column {column!r}"
    rows = {split: np.asarray(v).tolist() if isinstance(v, np.ndarray) else list(v) for split, v in splits.items()}
    for values in rows.values():
        check_whole(values, where)
    first = next(iter(rows["train"]))
    try:
        names = set(itertools.chain(*rows.values()))
    except TypeError:
        accepted = "of strings, integers or other hashable keys"
        raise ValueError(f"{where}: must be {accepted} to name clients, got {type(first).__name__}s") from None
    try:
        names = sorted(names)
    except TypeError:
        kinds = sorted({type(name).__name__ for name in names})
        raise ValueError(f"{where}: keys must be of one type, got {' and '.join(kinds)}; convert them to str") from None
    number = {name: i for i, name in enumerate(names)}
    return {split: np.array([number[v] for v in values], np.int32) for split, values in rows.items()}, names
