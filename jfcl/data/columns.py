"""A `Dataset` from a table with a column of clients: a pandas frame, a data set of Hugging Face."""

from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jfcl.core import check, check_choice
from jfcl.data.dataset import Dataset
from jfcl.data.images import channels_last
from jfcl.data.text import TOKENS
from jfcl.data.values import as_type, check_whole, inputs_of, kept, stacked

INPUTS = ("x", "image", "img", "text", "features")  # names of columns that are found
TARGETS = ("y", "label", "labels", "target", "character", "fine_label")
Columns = Mapping[str, Any]  # of each name a sequence with an entry per example
SPLITS = ("train", "test")


def from_frame(
    frame: Any,
    *,
    by: str | None = None,
    x: str | Sequence[str] | None = None,
    y: str | None = None,
    extra: Sequence[str] = (),
    test: Any = None,
    tokens: str = "words",
    channels_first: bool | None = None,
    name: str = "frame",
) -> Dataset:
    """Returns the data set in a pandas frame, in which the column `by` names the client of every row.

    `jfcl.data.build(dataset, partition="writer")` then makes a client of each name.

    Args:
      frame: a row per example.
      by: the column of the clients: strings, integers, or other keys. `None`: the data set has no writers.
      x: the column of the inputs, or several, which become the entries of a vector (texts are joined). Default: all
        columns but `by`, `y` and `extra`.
      y: the column of the targets. Default: "y", "label" or another usual name.
      extra: columns that become further arrays of the examples under their names, such as weights or masks.
      test: a further frame, the official test split.
      tokens: of texts, as in `Dataset`.
      channels_first: of images that are arrays, as in `from_arrays`.
      name: of the data set.

    Returns:
      `Dataset`. Inputs are read as by `from_arrays`: single numbers and floats become float32, images (of PIL, or
      arrays of bytes or 16 bits) float32 in `[0, 1]` with a channel axis, rows of integers (token ids) int32. Targets:
      maps `[H, W]` of integers become int32, and `num_classes` is then `None`; otherwise integers from 0 are kept,
      strings and booleans are numbered in their order, and floats are those of a regression. Texts need no targets.
      `writer_names` are the different values of `by`, sorted. Cost: a copy of the columns that are used.

    Raises:
      ValueError: a column that does not exist (with the nearest name and all columns), missing values, or numbers that
        float32 or int32 cannot hold (with the first row), inputs of different shapes (with both), keys that are not
        hashable.

    Example:
      >>> import pandas as pd
      >>> frame = pd.DataFrame({"user": ["b", "a", "b"], "age": [30, 40, 31], "m": [1.8, 1.7, 1.8], "y": [0, 1, 0]})
      >>> data = from_frame(frame, by="user")
      >>> data.train["x"].shape, data.train["y"].tolist(), data.writer["train"].tolist(), data.writer_names
      ((3, 2), [0, 1, 0], [1, 0, 1], ['a', 'b'])
    """

    def read(table: Any, wanted: list[str]) -> Columns:
        return {column: table[column].to_numpy() for column in wanted}

    for given, table in [("frame", frame), ("test", test)]:
        is_frame = hasattr(table, "columns") and hasattr(table, "__getitem__")
        check(is_frame or (given == "test" and table is None), given, type(table), "a frame with columns")
    splits = {"train": frame} | ({} if test is None else {"test": test})
    beside = [extra] if isinstance(extra, str) else list(extra)
    wanted = choose([name for name in frame.columns if name not in beside], by, x, y, others=True)
    about = {"tokens": tokens, "name": name, "extra": extra, "channels_first": channels_first}
    return as_dataset(splits, read, *wanted, columns=lambda table: list(table.columns), **about)


def from_huggingface(
    dataset: Any,
    *,
    by: str | None = None,
    x: str | Sequence[str] | None = None,
    y: str | None = None,
    extra: Sequence[str] = (),
    tokens: str = "words",
    channels_first: bool | None = None,
    name: str = "huggingface",
) -> Dataset:
    """Returns a data set of Hugging Face's `datasets`, in which the column `by` names the client of every row.

    `jfcl.data.build(dataset, partition="writer")` then makes a client of each name. FEMNIST
    (`datasets.load_dataset("flwrlabs/femnist")`) needs `by="writer_id"` alone; Shakespeare (`"flwrlabs/shakespeare"`)
    needs `by="character_id", x=["x", "y"], tokens="characters"`: texts of 80 characters and the next one, which are the
    81 tokens of `jfcl.data.tokenize(dataset, length=81)` for a language model.

    Args:
      dataset: a `datasets.Dataset` or `IterableDataset`; a dictionary of splits, of which "train" is read, and "test"
        if it is there; or the folder in which `save_to_disk` has left one.
      by: the column of the clients. `None`: the data set has no writers.
      x: the column of the inputs, or several, which are joined as in `from_frame`. Default: "x", "image", "text" or
        another usual name.
      y: the column of the targets. Default: "y", "label", "character" or another usual name.
      extra, tokens, channels_first, name: as in `from_frame`.

    Returns:
      `Dataset` with values as in `from_frame`; the number of classes is that of a `ClassLabel`, where there is one. It
      is held in memory as a whole.

    Raises:
      ValueError: those of `from_frame`; a folder without a data set, or one given without the package `datasets` (the
        extra `jfcl[huggingface]`); a dictionary without "train".

    Example:
      >>> rows = {"text": ["a cat", "a dog", "no"], "label": [0, 1, 1], "user": [7, 7, 3]}
      >>> class Rows:  # stands for datasets.Dataset.from_dict(rows)
      ...     column_names = list(rows)
      ...     def __iter__(self):
      ...         return (dict(zip(rows, row)) for row in zip(*rows.values()))
      >>> data = from_huggingface(Rows(), by="user")
      >>> data.train["x"].tolist(), data.writer["train"].tolist(), data.num_classes
      (['a cat', 'a dog', 'no'], [1, 1, 0], 2)
    """
    if isinstance(dataset, str | os.PathLike):
        dataset = _from_disk(Path(dataset))
    splits = dict(dataset) if isinstance(dataset, dict) else {"train": dataset}
    check("train" in splits, "dataset", sorted(splits), "one split, or a dictionary of splits with 'train'")
    splits = {split: splits[split] for split in SPLITS if split in splits}
    for table in splits.values():
        check(hasattr(table, "column_names"), "dataset", type(table), "of Hugging Face's datasets, or a folder of one")

    def columns_of(table: Any) -> list[str]:
        return list(table.column_names or next(iter(table), ()))  # a stream may not know them

    def read(table: Any, wanted: list[str]) -> Columns:
        kinds = getattr(table, "features", None) or {}
        if not (hasattr(table, "with_format") and hasattr(table, "__len__")):
            rows = [{column: row[column] for column in wanted} for row in table]
            return {column: [_typed(row[column], kinds.get(column)) for row in rows] for column in wanted}
        table = table.select_columns(wanted)
        # NumPy's format reads the palette's numbers of an image.
        plain = [column for column in wanted if _holds_images(kinds.get(column))]
        found = table.select_columns(plain).with_format(None)[:] if plain else {}
        others = [column for column in wanted if column not in plain]
        found |= table.select_columns(others).with_format("numpy")[:] if others else {}
        return {column: _typed(found[column], kinds.get(column)) for column in wanted}

    by, xs, y = choose(columns_of(splits["train"]), by, x, y)
    features = getattr(splits["train"], "features", None) or {}
    about = {"tokens": tokens, "name": name, "columns": columns_of, "extra": extra, "channels_first": channels_first}
    return as_dataset(splits, read, by, xs, y, num_classes=getattr(features.get(y), "num_classes", None), **about)


def _holds_images(feature: Any) -> bool:
    """Returns whether a feature of Hugging Face holds images, maybe in lists."""
    inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
    return type(feature).__name__ == "Image" or (inner is not None and _holds_images(inner))


def _typed(values: Any, feature: Any) -> Any:
    """Returns arrays with the type of integers that their feature names: Hugging Face reads all as 64 bits or lists."""
    inner = feature
    while isinstance(inner, list) or hasattr(inner, "feature"):
        inner = inner[0] if isinstance(inner, list) else inner.feature
    small = getattr(inner, "dtype", None) in ("bool", "uint8", "uint16", "int8", "int16")
    if inner is feature and not hasattr(feature, "shape"):
        small = False  # a column of single numbers
    if not small or (isinstance(values, np.ndarray) and values.dtype == object):
        return values
    return (
        np.asarray(values, inner.dtype)
        if isinstance(values, np.ndarray)
        else [np.asarray(v, inner.dtype) for v in values]
    )


def _from_disk(path: Path) -> Any:
    accepted = "a folder left by save_to_disk; for a data set of the hub, give datasets.load_dataset(name)"
    check(path.is_dir(), "dataset", str(path), accepted)
    if importlib.util.find_spec("datasets") is None:
        raise ValueError(f"dataset: {path} is read by the package datasets: pip install 'jfcl[huggingface]'")
    import datasets

    try:
        return datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise ValueError(f"dataset must be {accepted}, got {str(path)!r}: {error}") from None


def choose(
    names: list[str], by: str | None, x: str | Sequence[str] | None, y: str | None, *, others: bool = False
) -> tuple[str | None, list[str], str | None]:
    """Returns the columns `(by, inputs, targets)`, found by their usual names where they are not given.

    With `others`, the inputs that are not given are all columns that are left.
    """
    for argument, value in [("by", by), ("y", y)]:
        if value is not None:
            check_choice(f"column for {argument}", value, names)
    chosen = [x] if isinstance(x, str | int) else None if x is None else list(x)
    for value in chosen or ():
        check_choice("column for x", value, names)
    check(chosen is None or chosen, "x", x, "at least one column")
    taken = {by, *(chosen or ())}
    y = y if y is not None else next((name for name in TARGETS if name in names and name not in taken), None)
    if chosen is None:
        left = [name for name in names if name not in (by, y)]
        chosen = left if others else [name for name in INPUTS if name in left][:1]
        if not chosen:
            raise ValueError(f"x must be given: none of the columns {names} has a usual name ({', '.join(INPUTS)})")
    twice = [name for name in {by, y} - {None} if name in chosen]
    check(not twice, "x", chosen, f"of other columns than by and y, without {twice}")
    return by, chosen, y


def as_dataset(
    splits: dict[str, Any],
    read: Callable[[Any, list[str]], Columns],
    by: str | None,
    xs: list[str],
    y: str | None,
    *,
    tokens: str,
    name: str,
    columns: Callable[[Any], list[str]],
    num_classes: int | None = None,
    extra: Sequence[str] = (),
    channels_first: bool | None = None,
) -> Dataset:
    """Returns the data set of the splits "train" and maybe "test", of which `read(split, columns)` reads columns."""
    check_choice("tokens", tokens, TOKENS)
    extra = [extra] if isinstance(extra, str) else list(extra)
    taken = [column for column in extra if column in (*xs, by, y) or column in ("x", "y") or extra.count(column) > 1]
    check(not taken, "extra", extra, f"of columns with names of their own, each once, without {taken}")
    wanted = list(dict.fromkeys([*xs, *([] if y is None else [y]), *([] if by is None else [by]), *extra]))
    found, targets, keys = {}, {}, {}
    for split, table in splits.items():
        for column in wanted:
            check_choice(f"column of the split {split!r}", column, columns(table))
        found[split] = values = read(table, wanted)
        check(len(values[xs[0]]) > 0, f"the split {split!r}", "0 rows", "at least one")
        targets[split] = None if y is None else values[y]
        keys[split] = None if by is None else values[by]
    parts, moved = _inputs(found, xs, "" if tokens == "characters" else " ", channels_first)
    if y is None:
        texts = parts["train"]["x"].dtype == object
        check(texts, "y", y, f"given: no column has a usual name ({', '.join(TARGETS)})")
        labels = {split: np.zeros(len(part["x"]), np.int32) for split, part in parts.items()}
    else:
        labels, num_classes = _targets(targets, y, num_classes)
    shapes = {part["x"].shape[1:] for part in parts.values()}
    check(len(shapes) == 1, f"inputs {xs}", sorted(shapes), "of one shape in all splits")
    for split, part in parts.items():
        part["y"] = labels[split]
        plane = part["x"].shape[1:3]
        if moved and part["y"].ndim == 4 and part["y"].shape[2:] == plane:
            part["y"] = channels_last(part["y"])
        part |= {c: kept(found[split][c], f"column {c!r}", moved=moved, plane=plane) for c in extra}
    writer, names = (None, None) if by is None else _numbered(keys, by)
    about = name if by is None else f"{name}, by {by}"
    return Dataset(name, parts["train"], parts.get("test"), num_classes, writer, about, names, tokens)


def _inputs(
    splits: dict[str, Columns], xs: list[str], between: str, channels_first: bool | None
) -> tuple[dict[str, dict[str, np.ndarray]], bool]:
    """Returns `{"x": [n, ...]}` of every split: one column, or several of single numbers or texts put together."""
    made, moved = {}, False
    for column in xs:
        parts = [(f"column {column!r}", values[column]) for values in splits.values()]
        made[column], first = inputs_of(parts, channels_first)
        moved = moved or first
    columns = {split: {column: parts[i] for column, parts in made.items()} for i, split in enumerate(splits)}
    return {split: {"x": _joined(of_split, between)} for split, of_split in columns.items()}, moved


def _joined(made: dict[str, np.ndarray], between: str) -> np.ndarray:
    if len(made) == 1:
        return next(iter(made.values()))
    if all(values.dtype == object for values in made.values()):
        return np.array([between.join(row) for row in zip(*made.values(), strict=True)], object)
    single = {column: values.ndim == 2 and values.dtype == np.float32 for column, values in made.items()}
    wrong = {column: f"{made[column].dtype} {made[column].shape[1:]}" for column in made if not single[column]}
    check(not wrong, "x", wrong, "columns of numbers, or of texts, where there are several")
    return np.concatenate(list(made.values()), axis=1)


def _targets(splits: dict[str, Any], column: str, num_classes: int | None) -> tuple[dict[str, np.ndarray], int | None]:
    """Returns the targets of every split, and the number of classes; `None` for a regression."""
    where, arrays = f"column {column!r}", {}
    for split, values in splits.items():
        rows = values if isinstance(values, np.ndarray) and values.dtype.kind in "biu" else list(values)
        if isinstance(rows, list):
            check_whole(rows, where)
            rows = np.array(rows, object) if isinstance(rows[0], str) else stacked(rows, where)
        arrays[split] = rows
    kinds = "".join(sorted({array.dtype.kind for array in arrays.values()}))
    if kinds in ("O", "b", "bO"):
        numbers, names = _numbered(arrays, column)
        return numbers, len(names)
    if "f" in kinds and set(kinds) <= set("fiu"):
        return {split: as_type(np.float32, array, where) for split, array in arrays.items()}, None
    if kinds in ("i", "u", "iu") and all(array.ndim > 2 for array in arrays.values()):  # maps of labels
        return {split: as_type(np.int32, array, where) for split, array in arrays.items()}, None
    single = all(array.ndim == 1 and array.dtype.kind in "iu" for array in arrays.values())
    check(single, where, {s: f"{a.dtype} {a.shape}" for s, a in arrays.items()}, "a label or floats in each row")
    low, high = min(array.min() for array in arrays.values()), max(array.max() for array in arrays.values())
    check(low >= 0, where, low, "labels from 0; strings are numbered by themselves")
    return {split: as_type(np.int32, array, where) for split, array in arrays.items()}, num_classes or int(high) + 1


def _numbered(splits: dict[str, Any], column: str) -> tuple[dict[str, np.ndarray], list[Any]]:
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
