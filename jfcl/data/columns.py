"""A `Dataset` from a table with a column of clients: a pandas frame, a data set of Hugging Face."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jfcl.core import check, check_choice
from jfcl.data.dataset import Dataset
from jfcl.data.images import channels_last
from jfcl.data.tables import (
    check_no_numbers,
    column_of,
    described,
    encode_names,
    frame_of,
    is_file,
    joined_columns,
    numbers,
    read_file,
    row_numbers,
    scaled,
)
from jfcl.data.targets import KINDS, numbered, targets_of
from jfcl.data.text import TOKENS
from jfcl.data.values import inputs_of, kept

INPUTS = ("x", "image", "img", "text", "features")  # names of columns that are found
TARGETS = ("y", "label", "labels", "target", "character", "fine_label")
Columns = Mapping[str, Any]  # of each name a sequence with an entry per example
SPLITS = ("train", "test")


def from_frame(
    frame: Any,
    *,
    by: str | None = None,
    x: str | Sequence[str] | None = None,
    y: str | Sequence[str] | None = None,
    kind: str | None = None,
    scale: bool = False,
    extra: Sequence[str] = (),
    test: Any = None,
    tokens: str = "words",
    channels_first: bool | None = None,
    name: str = "frame",
) -> Dataset:
    """Returns the data set in a pandas frame, in which the column `by` names the client of every row.

    `jfcl.data.build(dataset, partition="writer")` then makes a client of each name.

    Args:
      frame: a row per example, in a frame of pandas; a table of polars or pyarrow becomes one. Or the name of a file:
        comma or tab separated values (`.csv`, `.tsv`, also packed as `.csv.gz`) or `.parquet`, of which the values of
        `by` are read as texts.
      by: the column of the clients: strings, integers, or other keys. `None`: the data set has no writers.
      x: the column of the inputs, or several, which become the entries of a vector (texts are joined; beside numbers,
        each of the names in a column of texts becomes an entry that is 1 where the row has it, else 0). Default: all
        columns but `by`, `y`, `extra`, and those that number the rows: the index in a saved csv (`Unnamed: 0`) and
        integers from 0 or 1 on, which would tell the order of the rows. Name them in `x` to have them.
      y: the column of the targets. Default: the one named "y", "label" or another usual name. Several columns of
        numbers or truths become targets `[n, T]` float32, for a regression or a task of your own.
      kind: what the targets are: "classification" or "regression". Default: integers, strings and truths are labels,
        and numbers with fractions are of a regression; whole numbers that are floats, such as 0.0 and 1.0, may be
        both, and need it.
      scale: whether inputs that are single numbers are scaled to mean 0 and deviation 1 over the training table.
      extra: columns that become further arrays of the examples under their names, such as weights or masks.
      test: a further frame or file, the official test split.
      tokens: of texts, as in `Dataset`.
      channels_first: of images that are arrays, as in `from_arrays`.
      name: of the data set.

    Returns:
      `Dataset`. Inputs are read as by `from_arrays`: single numbers and floats become float32, images (of PIL, or
      arrays of bytes or 16 bits) float32 in `[0, 1]` with a channel axis, rows of integers (token ids) int32. Targets:
      maps `[H, W]` of integers become int32, and `num_classes` is then `None`; otherwise integers from 0 are kept,
      strings, booleans and negative integers are numbered in their order, and floats are those of a regression. Texts
      need no targets. `writer_names` are the different values of `by`, sorted. `table` has the columns of the inputs,
      the names of the labels and what was scaled (`description` has them in words), with which
      `jfcl.data.read_rows` reads further rows. Cost: a copy of the columns that are used.

    Raises:
      ValueError: a column that does not exist (with the nearest name and all columns), missing values, or numbers that
        float32 or int32 cannot hold (with the first row) or tell apart, dates, more than 100 different texts beside
        numbers, inputs of different shapes (with both), keys that are not hashable, names of columns that occur twice.

    Example:
      >>> import pandas as pd
      >>> frame = pd.DataFrame({"user": ["b", "a", "b"], "age": [30, 40, 31], "m": [1.8, 1.7, 1.8], "y": [0, 1, 0]})
      >>> data = from_frame(frame, by="user")
      >>> data.train["x"].shape, data.train["y"].tolist(), data.writer["train"].tolist(), data.writer_names
      ((3, 2), [0, 1, 0], [1, 0, 1], ['a', 'b'])
    """

    frame, test = (read_file(t, a, by) if is_file(t) else t for a, t in [("frame", frame), ("test", test)])
    splits = {"train": frame_of(frame, "frame")} | ({} if test is None else {"test": frame_of(test, "test")})
    frame, beside = splits["train"], [extra] if isinstance(extra, str) else list(extra)
    in_index = [level for level in getattr(frame.index, "names", ()) if level is not None and level == by]
    check(not in_index or by in frame.columns, "by", by, "a column, not the index: frame.reset_index() makes it one")
    by, xs, y = choose([name for name in frame.columns if name not in beside], by, x, y, others=True)
    categorical = {name for name in xs if hasattr(frame[name].dtype, "categories")}
    left_out = []
    if x is None:
        there = {c: [t[c] for t in splits.values()] for c in xs if all(c in t.columns for t in splits.values())}
        numbered = {c: [np.asarray(part) for part in parts] for c, parts in there.items() if c not in categorical}
        left_out = row_numbers(numbered)
        xs = [column for column in xs if column not in left_out]
        accepted = f"given: the only inputs, {left_out}, number the rows"
        check(xs, "x", None, accepted)

    def read(table: Any, wanted: list[str]) -> Columns:
        return {column: column_of(table, column, as_names=column in categorical) for column in wanted}

    about = {"tokens": tokens, "name": name, "extra": extra, "channels_first": channels_first, "kind": kind}
    about |= {"scale": scale, "categorical": categorical, "left_out": left_out}
    return as_dataset(splits, read, by, xs, y, columns=lambda table: list(table.columns), **about)


def from_huggingface(
    dataset: Any,
    *,
    by: str | None = None,
    x: str | Sequence[str] | None = None,
    y: str | Sequence[str] | None = None,
    kind: str | None = None,
    scale: bool = False,
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
      kind, scale, extra, tokens, channels_first, name: as in `from_frame`.

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
    about |= {"kind": kind, "scale": scale}
    of_labels = None if isinstance(y, list) else getattr(features.get(y), "num_classes", None)
    return as_dataset(splits, read, by, xs, y, num_classes=of_labels, **about)


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
    names: list[str],
    by: str | None,
    x: str | Sequence[str] | None,
    y: str | Sequence[str] | None,
    *,
    others: bool = False,
) -> tuple[str | None, list[str], str | list[str] | None]:
    """Returns the columns `(by, inputs, targets)`, found by their usual names where they are not given.

    With `others`, the inputs that are not given are all columns that are left.
    """
    if y is not None and not isinstance(y, str | int):
        y = list(y)
        check(y and len(set(y)) == len(y), "y", y, "one column at least, each once")
        y = y[0] if len(y) == 1 else y
    for argument, value in [("by", by), *(("y", one) for one in (y if isinstance(y, list) else [y]))]:
        if value is not None:
            check_choice(f"column for {argument}", value, names)
    chosen = [x] if isinstance(x, str | int) else None if x is None else list(x)
    for value in chosen or ():
        check_choice("column for x", value, names)
    check(chosen is None or chosen, "x", x, "at least one column")
    taken = {by, *(chosen or ())}
    usual = [name for name in TARGETS if name in names and name not in taken] if y is None else []
    accepted = f"given (--target on the command line): the columns {usual} all have usual names of targets"
    check(not (others and chosen is None and len(usual) > 1), "y", None, accepted)  # the others would be inputs
    y = usual[0] if usual else y
    if chosen is None:
        left = [name for name in names if name != by and name not in (y if isinstance(y, list) else [y])]
        chosen = left if others else [name for name in INPUTS if name in left][:1]
        if not chosen:
            raise ValueError(f"x must be given: none of the columns {names} has a usual name ({', '.join(INPUTS)})")
    of_others = {by, *(y if isinstance(y, list) else [y])} - {None}
    check(by is None or isinstance(y, list) or by != y, "y", y, "another column than by")
    twice = [name for name in of_others if name in chosen] + [name for name in chosen if chosen.count(name) > 1]
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
    kind: str | None = None,
    scale: bool = False,
    categorical: Collection[str] = (),
    left_out: Sequence[str] = (),
) -> Dataset:
    """Returns the data set of the splits "train" and maybe "test", of which `read(split, columns)` reads columns."""
    check_choice("tokens", tokens, TOKENS)
    if kind is not None:
        check_choice("kind", kind, KINDS)
    ys = [] if y is None else y if isinstance(y, list) else [y]
    extra = [extra] if isinstance(extra, str) else list(extra)
    taken = [column for column in extra if column in (*xs, by, *ys) or column in ("x", "y") or extra.count(column) > 1]
    check(not taken, "extra", extra, f"of columns with names of their own, each once, without {taken}")
    wanted = list(dict.fromkeys([*xs, *ys, *([] if by is None else [by]), *extra]))
    found, targets, keys = {}, {}, {}
    for split, table in splits.items():
        for column in wanted:
            check_choice(f"column of the split {split!r}", column, columns(table))
        found[split] = values = read(table, wanted)
        check(len(values[xs[0]]) > 0, f"the split {split!r}", "0 rows", "at least one")
        targets[split] = None if y is None else numbers([values[c] for c in y], y) if len(ys) > 1 else values[y]
        keys[split] = None if by is None else values[by]
    between = "" if tokens == "characters" else " "
    parts, inputs, moved = _inputs(found, xs, between, channels_first, categorical, scale)
    names_of_labels = None
    if y is None:
        texts = parts["train"]["x"].dtype == object
        check(texts, "y", y, f"given: no column has a usual name ({', '.join(TARGETS)})")
        labels = {split: np.zeros(len(part["x"]), np.int32) for split, part in parts.items()}
    elif len(ys) > 1:
        check(kind != "classification", "kind", kind, "regression, or left out, with several columns of targets")
        labels, num_classes = targets, None
    else:
        labels, num_classes, names_of_labels = targets_of(targets, y, num_classes, kind)
    shapes = {part["x"].shape[1:] for part in parts.values()}
    check(len(shapes) == 1, f"inputs {xs}", sorted(shapes), "of one shape in all splits")
    for split, part in parts.items():
        part["y"] = labels[split]
        plane = part["x"].shape[1:3]
        if moved and part["y"].ndim == 4 and part["y"].shape[2:] == plane:
            part["y"] = channels_last(part["y"])
        part |= {c: kept(found[split][c], f"column {c!r}", moved=moved, plane=plane) for c in extra}
    writer, names = (None, None) if by is None else numbered(keys, by)
    maps = num_classes is None and parts["train"]["y"].dtype.kind != "f"  # of labels
    table = {"by": by, "target": y, "kind": None if maps else "regression" if num_classes is None else "classification"}
    table |= {"inputs": inputs, "labels": names_of_labels, "num_classes": num_classes, "left_out": list(left_out)}
    about = [name if by is None else f"{name}, by {by}", described(table)]
    if num_classes is not None and "test" in parts:
        of_train, of_test = (np.unique(parts[split]["y"]) for split in ("train", "test"))
        accepted = "labels of which some occur in training: none does, as where labels are unknown"
        check(np.isin(of_test, of_train).any(), f"column {y!r} of the split 'test'", of_test[:8].tolist(), accepted)
        of_test = np.setdiff1d(of_test, of_train)[:8].tolist()
        of_test = [names_of_labels[label] for label in of_test] if names_of_labels else of_test
        about += [f"labels that only the test split has: {', '.join(map(str, of_test))}"] if of_test else []
    about = "; ".join(about)
    return Dataset(name, parts["train"], parts.get("test"), num_classes, writer, about, names, tokens, table)


def _inputs(
    splits: dict[str, Columns],
    xs: list[str],
    between: str,
    channels_first: bool | None,
    categorical: Collection[str],
    scale: bool,
) -> tuple[dict[str, dict[str, np.ndarray]], list[dict[str, Any]], bool]:
    """Returns `{"x": [n, ...]}` of every split, how each column was read, and whether images had channels first.

    Several columns of single numbers, names or texts are put together.
    """
    made, moved = {}, False
    for column in xs:
        parts = [(f"column {column!r}", values[column]) for values in splits.values()]
        made[column], first = inputs_of(parts, channels_first)
        moved = moved or first
    texts = [column for column, parts in made.items() if parts[0].dtype == object]
    for column, parts in made.items():
        kinds = {split: "texts" if x.dtype == object else "numbers" for split, x in zip(splits, parts, strict=True)}
        check(len(set(kinds.values())) == 1, f"column {column!r}", kinds, "of one kind in all splits")
        if column in texts and column not in categorical:
            check_no_numbers(parts[0], column)
    joined = len(texts) == len(xs) and not categorical
    inputs = {column: {"column": column} for column in xs}
    for column, parts in made.items():
        about = inputs[column]
        if column in texts and not joined:
            made[column], about["values"] = encode_names(parts, column, categorical=column in categorical)
        elif column in texts:
            about["between"] = between
        elif parts[0].shape[1:] != (1,):
            about |= {"shape": list(parts[0].shape[1:]), "channels_first": channels_first}
        elif scale:
            made[column] = scaled(parts, about)
    columns = {split: {column: parts[i] for column, parts in made.items()} for i, split in enumerate(splits)}
    return {split: {"x": joined_columns(c, between)} for split, c in columns.items()}, list(inputs.values()), moved
