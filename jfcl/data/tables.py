"""Tables with named columns: which columns become inputs, and how, so that a new row is read as those of training.

How a data set was read is a plain dictionary, `Dataset.table`, which a run's folder keeps:

* `"by"`, `"target"`: the columns of the clients and of the targets.
* `"inputs"`: of each input column in turn `{"column": name}`; with `"mean"` and `"deviation"` where it was scaled; with
  `"values"` where it holds names, of which each became an input of zeros and ones; with `"shape"` and the
  `"channels_first"` that was given, where it holds images or vectors; with `"between"` where texts are joined by it.
* `"kind"`, `"num_classes"`: "classification" with the number of classes, "regression", or `None` for maps of labels.
* `"labels"`: the names of the labels 0, 1, ..., where they were numbered; `None` for labels that are numbers already,
  and for a regression.
* `"left_out"`: columns that are no inputs, since they number the rows.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jfcl.core import check, shown
from jfcl.data.images import alike
from jfcl.data.targets import targets_of, written_number
from jfcl.data.values import as_type, check_whole, inputs_of, is_table, plain

MOST_NAMES = 100  # different names in a column that become inputs; more are identifiers or texts
FEWEST_ROWS = 10  # of which consecutive integers are no coincidence
_FILE = re.compile(r"\.(csv|tsv)(\.(gz|bz2|zip|xz|zst))?$|\.parquet$", re.I)
_INDEX = re.compile(r"|Unnamed: \d+|index|level_\d+|rownames")  # names that pandas and R give to the numbers of rows


def frame_of(table: Any, argument: str) -> Any:
    """Returns a table as a pandas frame with names that differ; those of polars and pyarrow are converted.

    Raises:
      ValueError: other than a table; names that occur twice, or of several levels.
    """
    if not is_table(table) and hasattr(table, "to_pandas"):
        table = _to_pandas(table, argument)
    check(is_table(table), argument, type(table), "a frame with columns")
    if hasattr(table, "to_pandas"):  # polars
        table = _to_pandas(table, argument)
    if getattr(table.columns, "nlevels", 1) > 1:
        raise ValueError(
            f"{argument} has columns of several levels, {list(table.columns)[:3]}...; give each one name:"
            " frame.columns = ['_'.join(map(str, names)) for names in frame.columns]"
        )
    check_names(list(table.columns), argument)
    return table


def check_names(names: list[Any], where: str) -> None:
    """Raises `ValueError` for names of columns that occur more than once."""
    twice = sorted({str(name) for name in names if names.count(name) > 1})
    check(not twice, f"{where}: the names of columns", twice, "different: each of these occurs more than once")


def is_file(name: Any) -> bool:
    """Returns whether a name is that of a file with a table, by its suffix.

    Example:
      >>> is_file("shop.CSV"), is_file("data/shop.csv.gz"), is_file("digits")
      (True, True, False)
    """
    return isinstance(name, str | os.PathLike) and _FILE.search(os.fspath(name)) is not None


def read_file(path: str | os.PathLike, argument: str, by: str | None = None) -> Any:
    """Returns the frame in a file of comma or tab separated values, or in a Parquet file; `by` is read as text.

    Raises:
      ValueError: no such file, one that pandas cannot read, or no pandas.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{argument}: there is no file {path}")
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
    check_names(names, str(path))  # which pandas would number
    return frame


def _to_pandas(table: Any, argument: str) -> Any:
    try:
        return table.to_pandas()
    except ImportError as error:
        raise ValueError(f"{argument}: a {type(table).__module__} table is read by way of pandas: {error}") from None


def column_of(frame: Any, name: Any, *, as_names: bool = False) -> np.ndarray:
    """Returns the values of a column; `as_names`: those of a categorical one as texts, also where they are numbers."""
    series = frame[name]
    if not hasattr(series.dtype, "categories"):
        return plain(series, f"column {name!r}")
    values = series.astype(object).to_numpy()
    missing = series.isna().to_numpy()
    return np.array([None if m else str(v) if as_names else v for v, m in zip(values, missing, strict=True)], object)


def row_numbers(columns: dict[Any, list[np.ndarray]]) -> list[Any]:
    """Returns the columns that number the rows of a table, or of a larger one that it was a part of.

    Args:
      columns: of each column its values in every split.

    Returns:
      Those with the name that an index gets in a file, and different integers; and those with the integers from 0 or 1
      on (in 10 rows or more), in any order: in training, whose test split may begin anew, or in all splits together.
    """

    def number(name, values):
        if not np.isfinite(values).all() or (values != np.rint(values)).any() or len(np.unique(values)) < len(values):
            return False
        from_start = len(values) >= FEWEST_ROWS and values.min() in (0, 1) and np.ptp(values) == len(values) - 1
        return from_start or _INDEX.fullmatch(str(name))

    single = {
        name: parts for name, parts in columns.items() if all(p.ndim == 1 and p.dtype.kind in "iuf" for p in parts)
    }
    return [name for name, parts in single.items() if number(name, parts[0]) or number(name, np.concatenate(parts))]


def check_no_numbers(texts: np.ndarray, column: Any) -> None:
    """Raises `ValueError` for a column of texts of which half are numbers or dates, which would be read as names."""
    names = sorted(set(texts.tolist()))
    written = [name for name in names if written_number(name)]
    if 2 * len(written) < len(names):
        return
    others = [name for name in names if name not in written][:4]
    beside = f", beside {', '.join(map(repr, others))}" if others else ""
    raise ValueError(
        f"column {column!r} holds numbers or dates written as texts ({shown(written[0])}{beside}); make them"
        " numbers, as with pandas.to_numeric or read_csv(decimal=',', na_values=...), or names with"
        " astype('category'), or leave the column out of the inputs"
    )


def encode_names(parts: Sequence[np.ndarray], column: Any, *, categorical: bool) -> tuple[list[np.ndarray], list[str]]:
    """Returns the names of a column in every split as `[n, names]` zeros and ones, and the names in training, sorted.

    Raises:
      ValueError: more than 100 different names, or one for each row (if not `categorical`); a name that training does
        not have.
    """
    names = sorted(set(parts[0].tolist()))
    each = len(names) >= FEWEST_ROWS and len(names) == len(parts[0])
    if len(names) > MOST_NAMES or (each and not categorical):
        raise ValueError(
            f"column {column!r} holds {len(names)} different texts in {len(parts[0])} rows, too many to be inputs"
            " beside numbers; give the columns of the inputs without it (x, or --inputs), or fewer names, at most"
            f" {MOST_NAMES}"
        )
    return [_one_hot(part, names, f"column {column!r}") for part in parts], names


def _one_hot(values: Sequence[Any], names: list[str], where: str) -> np.ndarray:
    for i, value in enumerate(values):
        if not isinstance(value, str) or value not in names:
            raise ValueError(f"{where}: row {i} holds {value!r}, which training does not have; it has {shown(names)}")
    return (np.asarray(values, object)[:, None] == np.array(names, object)).astype(np.float32)


def scaled(parts: Sequence[np.ndarray], about: dict[str, Any]) -> list[np.ndarray]:
    """Returns numbers `[n, 1]` with mean 0 and deviation 1 over the training table, which goes into `about`."""
    train = parts[0].astype(np.float64)
    about |= {"mean": float(train.mean()), "deviation": float(train.std()) or 1.0}
    return [_scale(part, about) for part in parts]


def _scale(values: np.ndarray, about: dict[str, Any]) -> np.ndarray:
    with np.errstate(over="ignore"):
        made = ((values.astype(np.float64) - about["mean"]) / about["deviation"]).astype(np.float32)
    accepted = f"closer to those of training, of mean {about['mean']:g} and deviation {about['deviation']:g}"
    check(np.isfinite(made).all(), f"column {about['column']!r}: numbers", float(np.abs(values).max()), accepted)
    return made


def described(table: dict[str, Any]) -> str:
    """Returns in words how a table was read."""

    def listed(names):
        return ", ".join(map(str, names[:8])) + (f", ... ({len(names)} in all)" if len(names) > 8 else "")

    inputs = []
    for one in table["inputs"]:
        inputs.append(f"{one['column']} ({listed(one['values'])})" if "values" in one else one["column"])
    words = [f"inputs {listed(inputs)}"]
    if any("mean" in one for one in table["inputs"]):
        words[0] += ", numbers scaled to mean 0 and deviation 1"
    if table["target"] is not None:
        target = table["target"] if isinstance(table["target"], list) else [table["target"]]
        of = f" ({listed(table['labels'])})" if table["labels"] else ""
        words.append(f"target {listed(target)}{of}")
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

    Raises:
      ValueError: a column that is missing, a name or a label that training does not have, and the errors of
        `from_frame`.

    Example:
      >>> import jfcl, pandas as pd
      >>> train = pd.DataFrame({"device": ["pc", "phone"], "age": [20, 40], "buys": ["no", "yes"]})
      >>> data = jfcl.data.from_frame(train, y="buys", scale=True)
      >>> new = pd.DataFrame({"age": [30], "device": ["phone"], "buys": ["yes"]})
      >>> rows = jfcl.data.read_rows(new, data.table)
      >>> rows["x"].tolist(), rows["y"].tolist(), data.table["labels"]
      ([[0.0, 1.0, 0.0]], [1], ['no', 'yes'])
    """
    accepted = "how a table was read, as Dataset.table"
    check(isinstance(table, dict) and "inputs" in table, "table", table, accepted)
    frame = frame_of(frame, "frame")
    check(len(frame) > 0, "frame", "0 rows", "of at least one")
    names, made = list(frame.columns), {}
    for about in table["inputs"]:
        column = about["column"]
        _check_present("inputs", column, frame)
        made[column] = _read(column_of(frame, column, as_names="values" in about), about, f"column {column!r}")
    rows = {"x": joined_columns(made, table["inputs"][0].get("between", " "))}
    target = table["target"]
    targets = target if isinstance(target, list) else [target]
    if target is None or not set(targets) & set(names):
        return rows
    for one in targets:
        _check_present("targets", one, frame)
    values = [column_of(frame, one) for one in targets]
    rows["y"] = (
        numbers(values, targets) if isinstance(target, list) else _labels(values[0], table, f"column {target!r}")
    )
    return rows


def _check_present(role: str, column: Any, frame: Any) -> None:
    """Refuses rows without a column of training, which has this `role` there."""
    if column not in frame.columns:
        names = shown(list(frame.columns))
        raise ValueError(f"frame has no column {column!r}, one of the {role} in training; it has {names}")


def _read(values: Any, about: dict[str, Any], where: str) -> np.ndarray:
    """Returns a column of the inputs as that of training was read."""
    if "values" in about:
        check_whole(list(values), where)
        return _one_hot(list(values), about["values"], where)
    (array,), _ = inputs_of([(where, values)], about.get("channels_first"))
    is_text = "between" in about
    check((array.dtype == object) == is_text, where, values[0], "texts" if is_text else "numbers, as in training")
    if is_text:
        return array
    shape = about.get("shape", [1])
    if len(shape) == 3:  # grey images among those in colour
        array = alike([np.empty((0, *shape), np.float32), array])[1]
    check(
        list(array.shape[1:]) == shape,
        f"{where}: the shape of an input",
        list(array.shape[1:]),
        f"{shape}, as in training",
    )
    return _scale(array, about) if "mean" in about else array


def _labels(values: Any, table: dict[str, Any], where: str) -> np.ndarray:
    """Returns a column of targets as that of training was read."""
    names, accepted = table["labels"], f"one of the labels of training, {shown(table['labels'])}"
    if names is not None:
        check_whole(list(values), where)
        for value in values.tolist():
            check(isinstance(value, str | int | float) and value in names, where, value, accepted)
        return np.array([names.index(value) for value in values.tolist()], np.int32)
    made, count, renamed = targets_of({"train": values}, table["target"], None, table["kind"])
    y, classes = made["train"], table["num_classes"]
    fits = renamed is None and (count is None) == (classes is None) and (classes is None or count <= classes)
    fits = fits and (table["kind"] is not None or y.dtype.kind != "f")  # maps of labels
    check(
        fits,
        where,
        shown(values[:8].tolist()),
        "targets as in training" if classes is None else f"labels in 0..{classes - 1}",
    )
    return y


def joined_columns(made: dict[str, np.ndarray], between: str) -> np.ndarray:
    """Returns `[n, ...]` of columns: one as it is, texts joined, single numbers and zeros and ones side by side."""
    if len(made) == 1:
        return next(iter(made.values()))
    if all(values.dtype == object for values in made.values()):
        return np.array([between.join(row) for row in zip(*made.values(), strict=True)], object)
    single = {column: values.ndim == 2 and values.dtype == np.float32 for column, values in made.items()}
    wrong = {column: f"{made[column].dtype} {made[column].shape[1:]}" for column in made if not single[column]}
    check(not wrong, "x", wrong, "columns of numbers, or of texts, where there are several")
    return np.concatenate(list(made.values()), axis=1)


def numbers(columns: Sequence[Any], names: Sequence[Any]) -> np.ndarray:
    """Returns `[n, T]` float32 of `T` columns of numbers or truths."""
    made = []
    for name, values in zip(names, columns, strict=True):
        array = plain(values, f"column {name!r}")
        if array.dtype.kind not in "biuf":
            check_whole(list(array), f"column {name!r}")
            array = plain(list(array), f"column {name!r}")
        fits = isinstance(array, np.ndarray) and array.ndim == 1 and array.dtype.kind in "biuf"
        accepted = "numbers, or true and false, where there are several columns of targets"
        check(fits, f"column {name!r}", shown(values[0]), accepted)
        made.append(as_type(np.float32, array, f"column {name!r}"))
    return np.stack(made, axis=1)
