"""Tables with named columns: how these become inputs and targets, so that a new row is read as those of training.

How a data set was read is a plain dictionary, `Dataset.table`, which a run's folder keeps:

* `"by"`, `"target"`: the columns of the clients and of the targets.
* `"inputs"`: of each input column in turn `{"column": name}`; with `"mean"` and `"deviation"` where it was scaled; with
  `"values"` where it holds names, of which each became an input of zeros and ones; with `"shape"` and the
  `"channels_first"` that was given, where it holds images or vectors; with `"between"` where texts are joined by it.
* `"kind"`, `"num_classes"`: "classification" with the number of classes, "regression", or `None` for maps of labels.
* `"labels"`: the names of the labels 0, 1, ..., where they were numbered; `None` for labels that are numbers already,
  and for a regression.
* `"left_out"`: columns that are not inputs, since they number the rows.
"""

import itertools
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jfcl.core import check, require, shown
from jfcl.data.images import alike
from jfcl.data.values import array_of, as_type, inputs_of, is_table, plain, side_by_side

KINDS = ("classification", "regression")
MANY = 100  # from so large a label on, whole numbers of which most do not occur may be quantities
# Numbers as people and programs write them ("1,5", "1e3", "0x1f", "$1'000", "5 %"), dates and times of day. Of many
# spaces at the beginning of a text, `*+` tries one division only.
_NUMBER = re.compile(r"\s*+[$€£¥]?\s*+[-+−]?\s*+[$€£¥]?(0x[\da-f]+|[\d.,'’_\s]*\d\.?(e[-+]?\d+)?)\s*+[%$€£¥]?\s*", re.I)
_DATE = re.compile(r"\s*(\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}([T\s].*)?|\d{1,2}:\d{2}(:\d{2}.*)?)\s*")
MOST_NAMES = 100  # different names in a column that become inputs; more are identifiers or texts
FEWEST_ROWS = 10  # of which consecutive integers are no coincidence
_FILE = re.compile(r"\.(csv|tsv)(\.(gz|bz2|zip|xz|zst))?$|\.parquet$", re.I)
_INDEX = re.compile(r"|Unnamed: \d+|index|level_\d+|rownames")  # names that pandas and R give to the numbers of rows


class Table(NamedTuple):
    """A split of a table: the names of its columns, `read(names)`, their values by name, and what is known of them.

    `features` has an object with `num_classes` for some columns, as Hugging Face and TFDS have it; `categorical` are
    columns of names, even of numbers. By default the inputs are all columns that are left (`takes_all`), or the
    one with a usual name.
    """

    names: list[Any]
    read: Callable[[list[Any]], Mapping[Any, Any]]
    features: Mapping[Any, Any] = {}
    categorical: Sequence[Any] = ()
    takes_all: bool = False


def table_of(table: Any, argument: str, by: str | None = None) -> Table:
    """Returns a split with names that differ: of a frame of pandas, polars or pyarrow, or of a file by its name."""
    if isinstance(table, Table):
        return table
    if is_file(table):
        frame = read_file(table, argument, by)
    else:
        frame = table.to_pandas() if hasattr(table, "to_pandas") else table  # of polars, pyarrow
        check(is_table(frame), argument, type(frame), "a frame with columns")
        names, levels = list(frame.columns), getattr(frame.columns, "nlevels", 1)
        accepted = "of one level: frame.columns = ['_'.join(map(str, names)) for names in frame.columns]"
        check(levels == 1, f"{argument}: columns", f"{levels} levels, {names[:3]}", accepted)
        _check_names(names, argument)
    in_index = by is not None and by in getattr(frame.index, "names", ()) and by not in frame.columns
    check(not in_index, "by", by, "a column, not the index: frame.reset_index() makes it one")
    categorical = [name for name in frame.columns if hasattr(frame[name].dtype, "categories")]

    def values(name):
        series = frame[name]
        return series.astype(object).where(series.notna(), None).tolist() if name in categorical else series

    read = lambda wanted: {name: values(name) for name in wanted}  # noqa: E731
    return Table(list(frame.columns), read, categorical=categorical, takes_all=True)


def _check_names(names: list[Any], where: str) -> None:
    twice = sorted(str(name) for name, count in Counter(names).items() if count > 1)
    check(not twice, f"{where}: the names of columns", twice, "different: each of these occurs more than once")


def is_file(name: Any) -> bool:
    """Returns whether a name is that of a file with a table, by its suffix: `.csv`, `.tsv`, `.parquet`, also packed."""
    return isinstance(name, str | os.PathLike) and _FILE.search(os.fspath(name)) is not None


def read_file(path: str | os.PathLike, argument: str, by: str | None = None) -> Any:
    """Returns the frame in a Parquet file, or in one of comma or tab separated values, with the column `by` as text."""
    path = Path(path)
    check(path.is_file(), argument, str(path), "a file that exists")
    try:
        import pandas as pd

        if path.suffix.lower() == ".parquet":
            return pd.read_parquet(path)
        sep = "\t" if ".tsv" in path.name.lower() else ","
        names = pd.read_csv(path, sep=sep, header=None, nrows=1, dtype=str, na_filter=False).iloc[0].tolist()
        frame = pd.read_csv(path, sep=sep, dtype=None if by is None else {by: str}, low_memory=False)
    except ImportError as error:
        raise ValueError(f"{argument}: {path} is read by pandas (pip install pandas pyarrow): {error}") from None
    except Exception as error:  # of the readers of several formats
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"{argument}: {path} cannot be read as a table with a line of names ({why})") from None
    _check_names(names, str(path))  # which pandas would number
    other = next((mark for mark in ";\t|" if len(names) == 1 and mark in names[0]), None)
    if other is not None:
        raise ValueError(f"{path}: its columns are separated by {other!r}; pandas.read_csv(sep={other!r}) reads them")
    whole = isinstance(frame.index, pd.RangeIndex)  # otherwise the first columns became an index
    require(whole, f"{path}: a row has more entries than the {len(names)} names of columns")
    return frame


def names_in(values: Any, where: str) -> list[str]:
    """Returns the values of a column of names as texts, also where they are numbers."""
    rows = plain(values, where)
    return [str(value) for value in (rows.tolist() if isinstance(rows, np.ndarray) else rows)]


def row_numbers(columns: dict[Any, list[np.ndarray]]) -> list[Any]:
    """Returns the columns, given by their values in every split, that number the rows of a table, or of a larger one.

    These have the name that an index gets in a file, and different integers; or they have the integers from 0 or 1 on
    (in 10 rows or more), in any order: in training, or in all splits together.
    """

    def number(name, values):
        if not np.isfinite(values).all() or (values != np.rint(values)).any() or len(np.unique(values)) < len(values):
            return False
        from_start = len(values) >= FEWEST_ROWS and values.min() in (0, 1) and np.ptp(values) == len(values) - 1
        return from_start or _INDEX.fullmatch(str(name))

    parts = {name: list(map(np.asarray, values)) for name, values in columns.items()}
    single = [name for name, arrays in parts.items() if all(a.ndim == 1 and a.dtype.kind in "iuf" for a in arrays)]
    return [name for name in single if number(name, parts[name][0]) or number(name, np.concatenate(parts[name]))]


def written_number(text: Any) -> bool:
    """Returns whether a value is a text with a number, a date or a time, such as "1,5", "$1'000" or "2024-01-31"."""
    return isinstance(text, str) and bool(_NUMBER.fullmatch(text) or _DATE.fullmatch(text))


def written_example(texts: list[Any]) -> str:
    """Returns for a message the first text that is a written number, and the first that is none, such as "?"."""
    first = {written_number(text): shown(text) for text in reversed(texts)}
    return first[True] + (f" beside {first[False]}" if False in first else "")


def fit_inputs(columns: dict[Any, list[np.ndarray]], categorical: Collection[Any], scale: bool, between: str) -> list:
    """Returns how the columns of the inputs, as of `inputs_of`, are read: `"inputs"` of `Dataset.table`."""
    texts = [column for column, parts in columns.items() if parts[0].dtype == object]
    joined, inputs = len(texts) == len(columns) and not categorical, []
    for column, (train, *_) in columns.items():
        inputs.append({"column": column})
        names = sorted(set(train.tolist())) if column in texts else []
        written = [] if column in categorical else list(filter(written_number, names))
        if names and column not in categorical and 2 * len(written) >= len(names):
            what = f"column {column!r} holds numbers or dates written as texts, such as {written_example(names)}"
            remedy = "make them numbers, as with pandas.to_numeric or read_csv(decimal=',')"
            raise ValueError(f"{what}; {remedy}, or names with astype('category'), or leave it out")
        if names and joined:
            inputs[-1]["between"] = between
        elif names:
            all_differ = len(names) >= FEWEST_ROWS and len(names) == len(train)
            fits = len(names) <= MOST_NAMES and (not all_differ or column in categorical)
            accepted = f"of at most {MOST_NAMES} names, to be an input beside numbers; or give x (--inputs) without it"
            check(fits, f"column {column!r}", f"{len(names)} different texts in {len(train)} rows", accepted)
            inputs[-1]["values"] = names
        elif train.shape[1:] != (1,):
            inputs[-1]["shape"] = list(train.shape[1:])
        elif scale:
            numbers = train.astype(np.float64)
            inputs[-1] |= {"mean": float(numbers.mean()), "deviation": float(numbers.std()) or 1.0}
    return inputs


def read_inputs(arrays: Sequence[np.ndarray], inputs: list[dict[str, Any]]) -> np.ndarray:
    """Returns the inputs `[n, ...]` of the columns `arrays`, as of `inputs_of`, read as `fit_inputs` says."""
    read = [_read(array, entry, f"column {entry['column']!r}") for array, entry in zip(arrays, inputs, strict=True)]
    if len(read) == 1:
        return read[0]
    if all("between" in entry for entry in inputs):
        return np.array([inputs[0]["between"].join(row) for row in zip(*read, strict=True)], object)
    kinds = {entry["column"]: f"{array.dtype} {array.shape[1:]}" for array, entry in zip(read, inputs, strict=True)}
    fits = all(array.ndim == 2 and array.dtype == np.float32 for array in read)
    check(fits, "x", kinds, "columns of numbers, or of texts, where there are several")
    return np.concatenate(read, axis=1)


def _read(array: np.ndarray, entry: dict[str, Any], where: str) -> np.ndarray:
    """Returns the values of a column as the inputs that they become."""
    is_text = "between" in entry or "values" in entry
    check((array.dtype == object) == is_text, where, array[0], "texts" if is_text else "numbers, as in training")
    if "between" in entry:
        return array
    if "values" in entry:
        names = entry["values"]
        new = sorted({*array.tolist()} - {*names})
        require(not new, f"{where} has names that training does not have, {new[:3]}, beside {shown(names)}")
        return (array[:, None] == np.array(names, object)).astype(np.float32)
    shape = entry.get("shape", [1])
    if len(shape) == 3:  # grey images among those in colour
        array = alike([np.empty((0, *shape), np.float32), array])[1]
    actual = list(array.shape[1:])
    check(actual == shape, f"{where}: the shape of an input", actual, f"{shape}, as in training")
    if "mean" not in entry:
        return array
    with np.errstate(over="ignore"):
        scaled = ((array.astype(np.float64) - entry["mean"]) / entry["deviation"]).astype(np.float32)
    of_training = f"those of training, of mean {entry['mean']:g} and deviation {entry['deviation']:g}"
    require(np.isfinite(scaled).all(), f"{where}: {np.abs(array).max():g} is too far from {of_training}")
    return scaled


def targets_of(
    splits: dict[str, Any], column: Any, num_classes: int | None, kind: str | None
) -> tuple[dict[str, np.ndarray], str | None, int | None, list[Any] | None]:
    """Returns the targets of every split, and `"kind"`, `"num_classes"` and `"labels"` of `Dataset.table`."""
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
        return every, "regression", None, None
    if kinds <= set("Ob"):
        labels, names = numbered(arrays, column)
        if kind is None and any(map(written_number, names)):
            either = "give kind='classification' for names of labels, or make them numbers, as with pandas.to_numeric"
            raise ValueError(f"{where} holds numbers or dates written as texts ({written_example(names)}): {either}")
        return labels, "classification", len(names), names
    if floats:
        check(whole(arrays), f"{where}: labels", "numbers with fractions", "whole numbers, or give kind='regression'")
    elif kinds <= set("iu") and all(array.ndim > 2 for array in arrays.values()):  # maps of labels
        return {split: as_type(np.int32, array, where) for split, array in arrays.items()}, None, None, None
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
        return labels, "classification", len(names), names
    return labels, "classification", num_classes or int(high) + 1, None


def numbered(splits: dict[str, Any], column: Any) -> tuple[dict[str, np.ndarray], list[Any]]:
    """Returns the number of each value in the sorted list of all different ones, and that list."""
    where = f"column {column!r}"
    rows = {split: plain(values, where) for split, values in splits.items()}
    for split, values in rows.items():
        if isinstance(values, np.ndarray):
            require(not (values != values).any(), f"{where} has missing values (NaN): drop or fill them")
            rows[split] = values.tolist()
    try:
        names = sorted(set(itertools.chain(*rows.values())))
    except TypeError:
        kinds = " and ".join(sorted({type(name).__name__ for name in itertools.chain(*rows.values())}))
        accepted = "of strings, integers or other hashable keys, all of one type; convert them to str"
        raise ValueError(f"{where}: must be {accepted}, got {kinds}") from None
    number = {name: i for i, name in enumerate(names)}
    return {split: np.array([number[v] for v in values], np.int32) for split, values in rows.items()}, names


def described(table: dict[str, Any]) -> str:
    """Returns in words how a table was read."""

    def listed(names: list[Any]) -> str:
        return ", ".join(map(str, names[:8])) + (f", ... ({len(names)} in all)" if len(names) > 8 else "")

    columns = [f"{c['column']}" + (f" ({listed(c['values'])})" if "values" in c else "") for c in table["inputs"]]
    scaled = ", numbers scaled to mean 0 and deviation 1" * any("mean" in entry for entry in table["inputs"])
    words = [f"inputs {listed(columns)}{scaled}"]
    if table["target"] is not None:
        targets = table["target"] if isinstance(table["target"], list) else [table["target"]]
        words.append(f"target {listed(targets)}" + (f" ({listed(table['labels'])})" if table["labels"] else ""))
    if table["left_out"]:
        words.append(f"left out, as they number the rows: {listed(table['left_out'])}")
    return "; ".join(words)


def read_rows(frame: Any, table: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns further rows of a table as a data set's own were read: by the names of columns, in any order.

    Args:
      frame: a pandas frame with the input columns of `table`, and others.
      table: how the data set was read: `Dataset.table`, `Federation.table`, or `"table"` in a run's `summary.json`.

    Returns:
      `{"x": [n, ...], "y": [n]}`, without `"y"` where the frame has no column of the targets.

    Example:
      >>> import jfcl, pandas as pd
      >>> train = pd.DataFrame({"device": ["pc", "phone"], "age": [20, 40], "buys": ["no", "yes"]})
      >>> data = jfcl.data.from_frame(train, y="buys", scale=True)
      >>> new = pd.DataFrame({"age": [30], "device": ["phone"], "buys": ["yes"]})
      >>> rows = jfcl.data.read_rows(new, data.table)
      >>> rows["x"].tolist(), rows["y"].tolist(), data.table["labels"]
      ([[0.0, 1.0, 0.0]], [1], ['no', 'yes'])
    """
    check(isinstance(table, dict) and "inputs" in table, "table", table, "how a table was read, as Dataset.table")
    rows_of, target = table_of(frame, "frame"), table["target"]
    targets = target if isinstance(target, list) else [target]
    has_target = target is not None and any(name in rows_of.names for name in targets)
    wanted = {entry["column"]: "inputs" for entry in table["inputs"]}
    wanted |= dict.fromkeys(targets if has_target else (), "targets")
    for column, role in wanted.items():
        accepted = f"a frame with the column {column!r}, one of the {role} in training"
        check(column in rows_of.names, "frame", rows_of.names, accepted)
    columns, arrays = rows_of.read(list(wanted)), []
    for entry in table["inputs"]:
        values, where = columns[entry["column"]], f"column {entry['column']!r}"
        values = names_in(values, where) if "values" in entry else values
        arrays += inputs_of([(where, values)], entry.get("channels_first"))[0]
    rows = {"x": read_inputs(arrays, table["inputs"])}
    if isinstance(target, list) and has_target:
        return rows | {"y": side_by_side({name: columns[name] for name in target})}
    return rows | ({"y": _labels(columns[target], table)} if has_target else {})


def _labels(values: Any, table: dict[str, Any]) -> np.ndarray:
    """Returns a column of targets as that of training was read."""
    column, names, classes = table["target"], table["labels"], table["num_classes"]
    where = f"column {column!r}"
    if names is not None:
        rows = array_of(values, where).tolist()
        new = [value for value in rows if value not in names]
        check(not new, where, new[:3], f"of the labels of training, {shown(names)}")
        return np.array([names.index(value) for value in rows], np.int32)
    targets, *kinds = targets_of({"train": values}, column, classes, table["kind"])
    check(kinds == [table["kind"], classes, None], where, shown(list(values)[:8]), "of targets as in training")
    return targets["train"]
