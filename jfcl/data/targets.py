"""Targets and keys of a table: labels that are numbered, numbers of a regression, names of clients."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np

from jfcl.core import check, shown
from jfcl.data.values import array_of, as_type, plain

KINDS = ("classification", "regression")
MANY = 100  # from so large a label on, whole numbers of which most do not occur may be quantities
# Numbers as people and programs write them ("1,5", "1e3", "0x1f", "$1'000", "5 %"), dates and times of day. Of many
# spaces at the beginning of a text, `*+` tries one division only.
_NUMBER = re.compile(r"\s*+[$€£¥]?\s*+[-+−]?\s*+[$€£¥]?(0x[\da-f]+|[\d.,'’_\s]*\d\.?(e[-+]?\d+)?)\s*+[%$€£¥]?\s*", re.I)
_DATE = re.compile(r"\s*(\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}([T\s].*)?|\d{1,2}:\d{2}(:\d{2}.*)?)\s*")


def written_number(text: Any) -> bool:
    """Returns whether a value is a text with a number, a date or a time, such as "1,5", "$1'000" or "2024-01-31"."""
    return isinstance(text, str) and bool(_NUMBER.fullmatch(text) or _DATE.fullmatch(text))


def written_example(texts: list[Any]) -> str:
    """Returns for a message the first text that is a written number, and the first that is none, such as "?"."""
    first = {written_number(text): shown(text) for text in reversed(texts)}
    return first[True] + (f" beside {first[False]}" if False in first else "")


def targets_of(
    splits: dict[str, Any], column: Any, num_classes: int | None, kind: str | None
) -> tuple[dict[str, np.ndarray], int | None, list[Any] | None]:
    """Returns the targets of every split, the number of classes (of labels alone), and their names if numbered."""
    where = f"column {column!r}"
    arrays = {split: array_of(values, where) for split, values in splits.items()}
    single = all(array.ndim == 1 for array in arrays.values())
    if not single:  # maps of truths
        arrays = {s: array.astype(np.uint8) if array.dtype.kind == "b" else array for s, array in arrays.items()}
    kinds = {array.dtype.kind for array in arrays.values()}
    floats = "f" in kinds and kinds <= set("fiu")

    def whole(arrays):
        return single and all((array == np.rint(array)).all() for array in arrays.values())

    if kind == "regression" or (kind is None and floats):
        check("O" not in kinds, "kind", kind, f"classification, or left out: {where} holds other values than numbers")
        every = {split: as_type(np.float32, array, where) for split, array in arrays.items()}
        if kind is None and whole(every):
            some = ", ".join(map(str, np.unique(every["train"])[:4].tolist()))
            either = "give kind='classification' for labels, or kind='regression' for quantities"
            raise ValueError(f"{where} holds whole numbers as floats ({some}, ...): {either}")
        return every, None, None
    if kinds <= set("Ob"):
        labels, names = numbered(arrays, column)
        if kind is None and any(map(written_number, names)):
            either = "give kind='classification' for names of labels, or make them numbers, as with pandas.to_numeric"
            raise ValueError(f"{where} holds numbers or dates written as texts ({written_example(names)}): {either}")
        return labels, len(names), names
    if floats:
        check(whole(arrays), f"{where}: labels", "numbers with fractions", "whole numbers, or give kind='regression'")
    elif kinds <= set("iu") and all(array.ndim > 2 for array in arrays.values()):  # maps of labels
        return {split: as_type(np.int32, array, where) for split, array in arrays.items()}, None, None
    accepted = "of one kind in all splits, a label or floats in each row (several labels: several columns in y)"
    check(single and kinds <= set("iuf"), where, {s: f"{a.dtype} {a.shape}" for s, a in arrays.items()}, accepted)
    labels = {split: as_type(np.int32, array, where) for split, array in arrays.items()}
    low, high = min(array.min() for array in labels.values()), max(array.max() for array in labels.values())
    accepted = f"in 0..{(num_classes or 0) - 1} (-1 stands for an unknown one)"
    check(num_classes is None or (low >= 0 and high < num_classes), f"{where}: labels", [low, high], accepted)
    if kind is None and num_classes is None:
        different = len(np.unique(np.concatenate([*labels.values()])))
        if abs(int(low)) > 1 or (high >= MANY and 2 * different <= high):  # an age, a temperature, a price
            what = f"{where} holds {different} different whole numbers from {low} to {high}"
            raise ValueError(f"{what}: give kind='regression' for quantities, or kind='classification' for labels")
    if low < 0:
        labels, names = numbered(labels, column)
        return labels, len(names), names
    return labels, num_classes or int(high) + 1, None


def numbered(splits: dict[str, Any], column: Any) -> tuple[dict[str, np.ndarray], list[Any]]:
    """Returns the number of each value in the sorted list of all different ones, and that list."""
    where = f"column {column!r}"
    rows = {split: plain(values, where) for split, values in splits.items()}
    for split, values in rows.items():
        if isinstance(values, np.ndarray):
            check(not (values != values).any(), where, "NaN", "without missing values: drop or fill them")
            rows[split] = values.tolist()
    try:
        names = sorted(set(itertools.chain(*rows.values())))
    except TypeError:
        kinds = " and ".join(sorted({type(name).__name__ for name in itertools.chain(*rows.values())}))
        accepted = "of strings, integers or other hashable keys, all of one type; convert them to str"
        raise ValueError(f"{where}: must be {accepted}, got {kinds}") from None
    number = {name: i for i, name in enumerate(names)}
    return {split: np.array([number[v] for v in values], np.int32) for split, values in rows.items()}, names
