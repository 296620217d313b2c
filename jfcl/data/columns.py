"""A `Dataset` from a table with a column of clients: a pandas frame, a data set of Hugging Face."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jfcl.core import check, check_choice
from jfcl.data.dataset import Dataset
from jfcl.data.tables import columns_of, described, fit_inputs, frame_of, names_in, read_inputs, row_numbers
from jfcl.data.targets import KINDS, numbered, targets_of
from jfcl.data.text import TOKENS
from jfcl.data.values import array_beside, inputs_of, side_by_side

INPUTS = ("x", "image", "img", "text", "features")  # usual names of columns
TARGETS = ("y", "label", "labels", "target", "character", "fine_label")
Columns = Mapping[str, Any]  # of each name a sequence with an entry per example
SPLITS = ("train", "test")


class Table(NamedTuple):
    """A split of a table: the names of its columns, `read(names) -> Columns`, and what is known of each column.

    `features` has an object with `num_classes` for some columns, as Hugging Face and TFDS have it; `categorical` are
    columns of names, even of numbers.
    """

    names: list[Any]
    read: Callable[[list[Any]], Columns]
    features: Mapping[Any, Any] = {}
    categorical: Sequence[Any] = ()


def from_frame(
    frame: Any,
    *,
    test: Any = None,
    by: str | None = None,
    x: str | Sequence[str] | None = None,
    y: str | Sequence[str] | None = None,
    kind: str | None = None,
    scale: bool = False,
    extra: Sequence[str] = (),
    tokens: str = "words",
    channels_first: bool | None = None,
    name: str = "frame",
) -> Dataset:
    """Returns the data set in a pandas frame, in which the column `by` names the client of every row.

    `jfcl.data.build(dataset, partition="writer")` then makes a client of each name.

    Args:
      frame: a row per example, in a frame of pandas; a table of polars or pyarrow becomes one. Or the name of a file:
        `.parquet`, or comma or tab separated values (`.csv`, `.tsv`, also packed as `.csv.gz`), of which the values of
        `by` are read as texts.
      test: a further frame or file, the official test split.
      by: the column of the clients: strings, integers, or other keys. `None`: the data set has no writers.
      x: the column of the inputs, or several, which become the entries of a vector (texts are joined; beside numbers,
        each of the names in a column of texts becomes an entry that is 1 where the row has it, else 0). Default: all
        columns but `by`, `y`, `extra`, and those that number the rows: the index in a saved csv (`Unnamed: 0`) and
        integers from 0 or 1 on, which would reveal the order of the rows.
      y: the column of the targets. Default: the one named "y", "label" or another usual name. Several columns of
        numbers or booleans become targets `[n, T]` float32, for a regression or a task of your own.
      kind: what the targets are: "classification" or "regression". Default: integers, strings and booleans are labels,
        and numbers with fractions are targets of a regression; whole numbers that are floats, such as 0.0 and 1.0, need
        `kind`, and so do integers that begin neither at -1, 0 nor 1, as ages and years do, or of which most do not
        occur, such as prices.
      scale: whether inputs that are single numbers are scaled to mean 0 and deviation 1 over all rows of `frame`, also
        those that `build` then holds out. Give `test` for statistics of training examples alone.
      extra: columns that become further arrays of the examples under their names, such as weights or masks.
      tokens, name: as in `Dataset`; channels_first: of images that are arrays, as in `from_arrays`.

    Returns:
      `Dataset`, inputs as from `from_arrays`. Maps of labels `[H, W]` become int32 targets, with `num_classes=None`;
      otherwise integers from 0 stay labels, strings, booleans and negative integers are numbered in their order, and
      floats are those of a regression. Texts need no targets. `writer_names` are the different values of `by`, sorted.
      `table` says how columns were read (`description` in words), so that `jfcl.data.read_rows` reads further rows.
      Cost: a copy of the columns that are used.

    Raises:
      ValueError: a column that does not exist (with the nearest name and all columns), missing values, numbers that
        float32 or int32 cannot hold (with the first row) or tell apart, dates, more than 100 different texts beside
        numbers, inputs of different shapes, keys that are not hashable, names of columns that occur twice.

    Example:
      >>> import pandas as pd
      >>> frame = pd.DataFrame({"user": ["b", "a", "b"], "age": [30, 40, 31], "m": [1.8, 1.7, 1.8], "y": [0, 1, 0]})
      >>> data = from_frame(frame, by="user")
      >>> data.train["x"].shape, data.train["y"].tolist(), data.writer["train"].tolist(), data.writer_names
      ((3, 2), [0, 1, 0], [1, 0, 1], ['a', 'b'])
    """
    splits = {"train": frame_of(frame, "frame", by)} | ({} if test is None else {"test": frame_of(test, "test", by)})
    train = splits["train"]
    in_index = by is not None and by in getattr(train.index, "names", ()) and by not in train.columns
    check(not in_index, "by", by, "a column, not the index: frame.reset_index() makes it one")
    categorical = [column for column in train.columns if hasattr(train[column].dtype, "categories")]
    tables = {s: Table(list(t.columns), partial(columns_of, t), categorical=categorical) for s, t in splits.items()}
    options = {"by": by, "x": x, "y": y, "kind": kind, "scale": scale, "extra": extra, "tokens": tokens, "name": name}
    return as_dataset(tables, channels_first=channels_first, all_columns=True, **options)


def from_huggingface(dataset: Any, *, name: str = "huggingface", **options: Any) -> Dataset:
    """Returns a data set of Hugging Face's `datasets`, in which the column `by` names the client of every row.

    `jfcl.data.build(dataset, partition="writer")` then makes a client of each name. FEMNIST
    (`datasets.load_dataset("flwrlabs/femnist")`) needs `by="writer_id"` alone; Shakespeare (`"flwrlabs/shakespeare"`)
    needs `by="character_id", x=["x", "y"], tokens="characters"`: texts of 80 characters and the next one, which are the
    81 tokens of `jfcl.data.tokenize(dataset, length=81)` for a language model.

    Args:
      dataset: a `datasets.Dataset` or `IterableDataset`; or a dictionary of splits, of which "train" and "test" are
        read.
      options: `by`, `x`, `y`, `kind`, `scale`, `extra`, `tokens` and `channels_first` of `from_frame`; the default of
        `x` is the column "x", "image", "text" or another usual name.

    Returns:
      `Dataset`, in memory as a whole; the number of classes is that of a `ClassLabel`, where there is one.

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
    splits = dict(dataset) if isinstance(dataset, dict) else {"train": dataset}
    check("train" in splits, "dataset", sorted(splits), "one split, or a dictionary of splits with 'train'")
    tables = {}
    for split in [split for split in SPLITS if split in splits]:
        table = splits[split]
        accepted = "of Hugging Face's datasets (load_dataset, load_from_disk)"
        check(hasattr(table, "column_names"), "dataset", type(table), accepted)
        names = list(table.column_names or next(iter(table), ()))  # a stream may not know them
        tables[split] = Table(names, partial(_read, table), getattr(table, "features", None) or {})
    return as_dataset(tables, name=name, **options)


def _read(table: Any, wanted: list[str]) -> Columns:
    """Returns columns of a data set of Hugging Face, or of a stream."""
    kinds, columns = getattr(table, "features", None) or {}, {}
    if not (hasattr(table, "with_format") and hasattr(table, "__len__")):
        rows = [{column: row[column] for column in wanted} for row in table]
        return {column: [_typed(row[column], kinds.get(column)) for row in rows] for column in wanted}
    for column in wanted:
        leaf = _leaf(kinds.get(column))  # NumPy's format reads the palette's numbers of an image, and rounds to float32
        form = {"type": None if type(leaf).__name__ == "Image" else "numpy"}
        form |= {"dtype": np.float64} if getattr(leaf, "dtype", None) == "float64" else {}
        columns[column] = _typed(table.select_columns([column]).with_format(**form)[:][column], kinds.get(column))
    return columns


def _leaf(feature: Any) -> Any:
    """Returns the feature that a list of Hugging Face holds, at any depth, or the feature itself."""
    while (inner := feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)) is not None:
        feature = inner
    return feature


def _typed(values: Any, feature: Any) -> Any:
    """Returns arrays with the type of integers that their feature names: Hugging Face reads all as 64 bits or lists."""
    kind, is_array = getattr(_leaf(feature), "dtype", None), _leaf(feature) is not feature or hasattr(feature, "shape")
    if not is_array or kind not in ("bool", "uint8", "uint16", "int8", "int16"):
        return values
    arrays = [values] if isinstance(values, np.ndarray) else list(map(np.asarray, values))
    arrays = [array.astype(kind) if array.dtype.kind in "biu" else array for array in arrays]  # others miss values
    return arrays[0] if isinstance(values, np.ndarray) else arrays


def _choose(names: list[Any], by: Any, x: Any, y: Any, *, all_columns: bool) -> tuple[list[Any], list[Any]]:
    """Returns the columns `(inputs, targets)`, by their usual names where `x` or `y` is `None`.

    With `all_columns`, the inputs are then all columns that are left.
    """
    several = ([value] if isinstance(value, str | int) else () if value is None else value for value in (y, x))
    ys, xs = (list(dict.fromkeys(columns)) for columns in several)
    for argument, value, columns in [("by", None, [by] if by is not None else []), ("y", y, ys), ("x", x, xs)]:
        check(value is None or columns, argument, value, "one column at least")
        for column in columns:
            check_choice(f"column for {argument}", column, names)
    if y is None:
        ys = [name for name in TARGETS if name in names and name not in (by, *xs)]
        accepted = f"given (--target on the command line): the columns {ys} all have usual names of targets"
        check(xs or not all_columns or len(ys) < 2, "y", None, accepted)  # the others would be inputs
        ys = ys[:1]
    if x is None:
        unused = [name for name in names if name not in (by, *ys)]
        xs = unused if all_columns else [name for name in INPUTS if name in unused][:1]
        check(xs, "x", None, f"given: none of the columns {names} has a usual name ({', '.join(INPUTS)})")
    both = [name for name in xs if name in (by, *ys)]
    check(not both, "x", xs, f"of other columns than by and y, without {both}")
    return xs, ys


def as_dataset(
    splits: dict[str, Table],
    *,
    name: str,
    by: Any = None,
    x: Any = None,
    y: Any = None,
    kind: str | None = None,
    scale: bool = False,
    extra: Sequence[str] = (),
    tokens: str = "words",
    channels_first: bool | None = None,
    all_columns: bool = False,
) -> Dataset:
    """Returns the data set of the splits "train" and maybe "test" of a table, with the options of `from_frame`."""
    check_choice("tokens", tokens, TOKENS)
    if kind is not None:
        check_choice("kind", kind, KINDS)
    extra, train = [extra] if isinstance(extra, str) else list(extra), splits["train"]
    xs, ys = _choose([column for column in train.names if column not in extra], by, x, y, all_columns=all_columns)
    taken = [column for column in extra if column in ("x", "y", *xs, by, *ys) or extra.count(column) > 1]
    check(not taken, "extra", extra, f"of columns with names of their own, each once, without {taken}")
    wanted = list(dict.fromkeys([*xs, *ys, *([] if by is None else [by]), *extra]))
    for split, table in splits.items():
        for column in wanted:
            check_choice(f"column of the split {split!r}", column, table.names)
    columns = {split: table.read(wanted) for split, table in splits.items()}

    # Inputs.
    categorical, left_out = [column for column in xs if column in train.categorical], []
    if all_columns and x is None:
        left_out = row_numbers({c: [part[c] for part in columns.values()] for c in xs if c not in categorical})
        xs = [column for column in xs if column not in left_out]
        check(xs, "x", None, f"given: the only inputs, {left_out}, number the rows")
    arrays, moved = {}, False
    for column in xs:
        where, parts = f"column {column!r}", [part[column] for part in columns.values()]
        parts = [names_in(part, where) for part in parts] if column in categorical else parts
        arrays[column], first = inputs_of([(where, part) for part in parts], channels_first)
        moved = moved or first
    inputs = fit_inputs(arrays, categorical, scale, "" if tokens == "characters" else " ")
    for entry in inputs:
        entry |= {"channels_first": channels_first} if "shape" in entry else {}
    read = {s: {"x": read_inputs([arrays[c][i] for c in xs], inputs)} for i, s in enumerate(splits)}

    # Targets, further arrays and clients.
    labels, num_classes, names = _targets(columns, ys, kind, train.features, read["train"]["x"].dtype == object)
    for split, part in read.items():
        beside, plane = {"y": labels[split]} | {c: columns[split][c] for c in extra}, part["x"].shape[1:3]
        part |= {c: array_beside(values, f"column {c!r}", moved=moved, plane=plane) for c, values in beside.items()}
    writer, keys = (None, None) if by is None else numbered({s: part[by] for s, part in columns.items()}, by)

    # How they were read.
    maps = num_classes is None and labels["train"].dtype.kind != "f"  # of labels
    kind = None if maps else "regression" if num_classes is None else "classification"
    target = ys[0] if len(ys) == 1 else ys or None
    table = {"by": by, "target": target, "kind": kind, "inputs": inputs, "labels": names}
    table |= {"num_classes": num_classes, "left_out": left_out}
    words = [name if by is None else f"{name}, by {by}", described(table)]
    if num_classes is not None and "test" in read:
        seen = np.isin(labels["test"], labels["train"])
        new = [str(names[label] if names else label) for label in np.unique(labels["test"][~seen])[:8].tolist()]
        check(seen.any(), f"column {target!r} of the split 'test'", new, "labels of which some occur in training")
        words += [f"labels that only the test split has: {', '.join(new)}"] if new else []
    return Dataset(name, read["train"], read.get("test"), num_classes, writer, "; ".join(words), keys, tokens, table)


def _targets(
    columns: dict[str, Columns], ys: list[Any], kind: str | None, features: Mapping[Any, Any], texts: bool
) -> tuple[dict[str, np.ndarray], int | None, list[Any] | None]:
    """Returns the targets of every split, the number of classes, and their names where they were numbered."""
    if not ys:
        check(texts, "y", None, f"given: no other column has a usual name ({', '.join(TARGETS)})")
        return {s: np.zeros(len(next(iter(part.values()))), np.int32) for s, part in columns.items()}, None, None
    if len(ys) > 1:
        check(kind != "classification", "kind", kind, "regression, or left out, with several columns of targets")
        return {split: side_by_side({c: part[c] for c in ys}) for split, part in columns.items()}, None, None
    num_classes = getattr(features.get(ys[0]), "num_classes", None)
    return targets_of({split: part[ys[0]] for split, part in columns.items()}, ys[0], num_classes, kind)
