"""What a user has, as `Clients` or a `Dataset`: arrays and rows of each client; tables with a column of clients."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from jfcl.core import Clients, check, check_choice, require, stack_clients
from jfcl.data import tables
from jfcl.data.dataset import TOKENS, Dataset
from jfcl.data.values import array_beside, as_numpy, as_type, inputs_of, is_table, side_by_side

INPUTS = ("x", "image", "img", "text", "features")  # usual names of columns
TARGETS = ("y", "label", "labels", "target", "character", "fine_label")
SPLITS = ("train", "test")


def from_arrays(clients: Iterable[Any], *, channels_first: bool | None = None) -> Clients:
    """Stacks one pair of inputs and targets per client, in the form that the tasks of `jfcl.models` read.

    Args:
      clients: for each client `(x, y)`: arrays `[m_i, ...]` and `[m_i]` (or lists of numbers), or frames with columns
        of numbers, the same for all clients, and series. Or a dictionary with "x" and "y", or other usual names such as
        "image" and "label", and any further arrays `[m_i, ...]`, such as weights.
      channels_first: whether images are `[m_i, C, H, W]`, as in PyTorch, and become `[m_i, H, W, C]`. `None`: as
        their shape shows, where one of its ends is 4 or less.

    Returns:
      `Clients` with examples `{"x": [N, M, ...], "y": [N, M]}` on the host, and the further arrays under their names.
      Inputs: single numbers and floats become float32, rows of integers (token ids) int32. Images become float32 in
      `[0, 1]` with a channel axis: `[m, H, W]` or `[m, H, W, C]` of bytes, 16-bit integers or booleans, and lists of
      images of PIL in any mode, of which grey, colour and transparency (a further channel) may be mixed. Targets:
      integers int32, floats float32; images of PIL are maps of labels. Further arrays keep their values, in 32 bits at
      most.

    Raises:
      ValueError: no clients; a client that is not such a pair, or has no examples; different numbers of inputs and
        targets; inputs of different shapes; missing values; numbers that float32 or int32 cannot hold; images whose
        white value is unknown, such as integers of 32 bits; a shape that does not show where the channels are; a column
        of frames that numbers the rows, such as the index in a saved csv (`Unnamed: 0`).

    Example:
      >>> clients = from_arrays([(np.ones((2, 3)), [0, 1]), {"image": np.ones((1, 3)), "label": [1]}])
      >>> clients.examples["x"].shape, clients.examples["y"].tolist(), clients.size.tolist()
      ((2, 2, 3), [[0, 1], [1, 0]], [2, 1])
    """
    return _stacked((_parts(f"client {i}", client) for i, client in enumerate(clients)), channels_first)


def from_torch(datasets: Iterable[Any], *, channels_first: bool | None = None) -> Clients:
    """Stacks one `torch.utils.data.Dataset` per client: any object with `len` and rows `(x, y)` at `0 .. len-1`.

    PyTorch is not needed: a row may hold tensors, arrays, numbers or images, or be a dictionary, with further arrays.

    Args:
      datasets: the data set of each client, a `torch.utils.data.Subset` for example. Every row is read once.
      channels_first: as in `from_arrays`. Images of PIL have their channels last already.

    Returns:
      `Clients`, as from `from_arrays`.

    Example:
      >>> rows = [(np.zeros((3, 8, 8), np.float32), 1), (np.ones((3, 8, 8), np.float32), 0)]
      >>> from_torch([rows, rows[:1]]).examples["x"].shape
      (2, 2, 8, 8, 3)
    """

    def parts(i, dataset):
        sized = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        check(sized, f"client {i}", type(dataset), "a data set with len and rows (x, y)")
        require(len(dataset) > 0, f"client {i} has no rows")
        return _columns(f"client {i}", [_parts(f"client {i}, row {j}", dataset[j]) for j in range(len(dataset))])

    return _stacked((parts(i, dataset) for i, dataset in enumerate(datasets)), channels_first)


def _columns(where: str, rows: list[Any]) -> Any:
    """Returns the entries of rows as one list, or a dict of lists where they are dicts."""
    if not isinstance(rows[0], dict):
        return [as_numpy(row, where) for row in rows]
    odd = next((row for row in rows if not isinstance(row, dict) or list(row) != list(rows[0])), None)
    check(odd is None, where, odd, f"of rows with the names {list(rows[0])}, as in the first")
    return {name: _columns(f"{where}: {name}", [row[name] for row in rows]) for name in rows[0]}


def _stacked(clients: Iterable[dict[str, Any]], channels_first: bool | None) -> Clients:
    """Stacks clients, of which some may have integers where others have float32: float64 holds both, and is undone."""
    beside, columns = [], []

    def inputs() -> Iterator[tuple[str, Any]]:
        for i, parts in enumerate(clients):
            x = parts.pop("x")
            beside.append(parts)
            columns.append(list(x.columns) if is_table(x) else None)
            check(columns[i] == columns[0], f"client {i}: x: columns", columns[i], f"{columns[0]}, as in client 0")
            yield f"client {i}: x", x

    xs, moved = inputs_of(inputs(), channels_first)
    if columns and columns[0]:
        named = zip(columns[0], np.concatenate(xs).T, strict=True)
        numbers = tables.row_numbers({name: [values] for name, values in named})
        require(not numbers, f"x: the columns {numbers} number the rows of all clients, and are no inputs; drop them")
    parts = [_client(f"client {i}", x, parts, moved) for i, (x, parts) in enumerate(zip(xs, beside, strict=True))]
    stacked = stack_clients(parts)
    as_float32 = jax.tree.map(lambda x: x.astype(np.float32) if x.dtype == np.float64 else x, stacked.examples)
    return stacked._replace(examples=as_float32)


def _parts(where: str, value: Any) -> dict[str, Any]:
    """Returns the inputs, the targets and the further arrays of a client (or of a row)."""
    if isinstance(value, dict):
        names = [[name for name in usual if name in value] for usual in (INPUTS, TARGETS)]
        accepted = f"of one of {', '.join(INPUTS)} and one of {', '.join(TARGETS)}"
        check(list(map(len, names)) == [1, 1], f"{where}: the names", list(value), accepted)
        (x,), (y,) = names
        return {"x": value[x], "y": value[y], **{name: value[name] for name in value if name not in (x, y)}}
    is_sequence = isinstance(value, tuple | list)
    what = f"{type(value).__name__}{f' of {len(value)}' if is_sequence else ''}"
    accepted = "a pair (x, y), or a dict with 'x' and 'y', and other names for further arrays"
    check(is_sequence and len(value) == 2, where, what, accepted)
    return {"x": value[0], "y": value[1]}


def _client(where: str, x: np.ndarray, parts: dict[str, Any], moved: bool) -> dict[str, Any]:
    """Returns the arrays of a client with the types of the library; `moved`: images had their channels first."""
    check(x.dtype != object, f"{where}: x", x[0], "numbers; texts become numbers by jfcl.data.tokenize")
    arrays = {n: array_beside(values, f"{where}: {n}", moved=moved, plane=x.shape[1:3]) for n, values in parts.items()}
    y = arrays["y"]
    check(not isinstance(y, dict), f"{where}: y", y, "an array of numbers [m, ...]")
    arrays["y"] = y if y.dtype.kind == "f" else as_type(np.int32, y, f"{where}: y")
    return {"x": x, **arrays}


# ---------------------------------------------------------------------------------------------------------------
# Tables.


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
    check_choice("tokens", tokens, TOKENS)
    if kind is not None:
        check_choice("kind", kind, tables.KINDS)
    splits = {"train": tables.table_of(frame, "frame", by)}
    if test is not None:
        splits["test"] = tables.table_of(test, "test", by)
    train, extra = splits["train"], [extra] if isinstance(extra, str) else list(extra)
    xs, ys = _choose([column for column in train.names if column not in extra], by, x, y, train.takes_all)
    taken = [column for column in extra if column in ("x", "y", *xs, by, *ys) or extra.count(column) > 1]
    check(not taken, "extra", extra, f"of columns with names of their own, each once, without {taken}")
    wanted = list(dict.fromkeys([*xs, *ys, *([] if by is None else [by]), *extra]))
    for split, table in splits.items():
        for column in wanted:
            check_choice(f"column of the split {split!r}", column, table.names)
    values = {split: table.read(wanted) for split, table in splits.items()}
    columns = {column: {split: values[split][column] for split in splits} for column in wanted}

    # Inputs.
    categorical, left_out = [column for column in xs if column in train.categorical], []
    if train.takes_all and x is None:
        left_out = tables.row_numbers({c: list(columns[c].values()) for c in xs if c not in categorical})
        xs = [column for column in xs if column not in left_out]
        check(xs, "x", None, f"given: the only inputs, {left_out}, number the rows")
    arrays, moved = {}, False
    for column in xs:
        where, parts = f"column {column!r}", list(columns[column].values())
        parts = [tables.names_in(part, where) for part in parts] if column in categorical else parts
        arrays[column], first = inputs_of([(where, part) for part in parts], channels_first)
        moved = moved or first
    inputs = tables.fit_inputs(arrays, categorical, scale, "" if tokens == "characters" else " ")
    for entry in inputs:
        entry |= {"channels_first": channels_first} if "shape" in entry else {}
    read = {s: {"x": tables.read_inputs([arrays[c][i] for c in xs], inputs)} for i, s in enumerate(splits)}

    # Targets, further arrays and clients.
    target, num_classes, names = ys[0] if len(ys) == 1 else ys or None, None, None
    if len(ys) == 1:
        num_classes = getattr(train.features.get(target), "num_classes", None)
        labels, kind, num_classes, names = tables.targets_of(columns[target], target, num_classes, kind)
    elif ys:
        check(kind != "classification", "kind", kind, "regression, or left out, with several columns of targets")
        kind, labels = "regression", {s: side_by_side({column: columns[column][s] for column in ys}) for s in splits}
    else:
        is_text = read["train"]["x"].dtype == object
        check(is_text, "y", None, f"given: no other column has a usual name ({', '.join(TARGETS)})")
        kind, labels = None, {split: np.zeros(len(part["x"]), np.int32) for split, part in read.items()}
    for split, part in read.items():
        beside, plane = {"y": labels[split]} | {c: columns[c][split] for c in extra}, part["x"].shape[1:3]
        part |= {c: array_beside(values, f"column {c!r}", moved=moved, plane=plane) for c, values in beside.items()}
    writer, keys = (None, None) if by is None else tables.numbered(columns[by], by)

    # How they were read.
    table = {"by": by, "target": target, "kind": kind, "inputs": inputs, "labels": names}
    table |= {"num_classes": num_classes, "left_out": left_out}
    words = [name if by is None else f"{name}, by {by}", tables.described(table)]
    if num_classes is not None and "test" in read:
        seen = np.isin(labels["test"], labels["train"])
        new = [str(names[label] if names else label) for label in np.unique(labels["test"][~seen])[:8].tolist()]
        check(seen.any(), f"column {target!r} of the split 'test'", new, "labels of which some occur in training")
        words += [f"labels that only the test split has: {', '.join(new)}"] if new else []
    return Dataset(name, read["train"], read.get("test"), num_classes, writer, "; ".join(words), keys, tokens, table)


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
    found = {}
    for split in [split for split in SPLITS if split in splits]:
        table = splits[split]
        accepted = "of Hugging Face's datasets (load_dataset, load_from_disk)"
        check(hasattr(table, "column_names"), "dataset", type(table), accepted)
        names = list(table.column_names or next(iter(table), ()))  # a stream may not know them
        found[split] = tables.Table(names, partial(_read, table), getattr(table, "features", None) or {})
    return from_frame(found["train"], test=found.get("test"), name=name, **options)


def _read(table: Any, wanted: list[str]) -> dict[str, Any]:
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


def _choose(names: list[Any], by: Any, x: Any, y: Any, takes_all: bool) -> tuple[list[Any], list[Any]]:
    """Returns the columns `(inputs, targets)`, by their usual names where `x` or `y` is `None`.

    With `takes_all`, the inputs are then all columns that are left.
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
        check(xs or not takes_all or len(ys) < 2, "y", None, accepted)  # the others would be inputs
        ys = ys[:1]
    if x is None:
        unused = [name for name in names if name not in (by, *ys)]
        xs = unused if takes_all else [name for name in INPUTS if name in unused][:1]
        check(xs, "x", None, f"given: none of the columns {names} has a usual name ({', '.join(INPUTS)})")
    both = [name for name in xs if name in (by, *ys)]
    require(not both, f"x names the columns {both}, which by and y name too")
    return xs, ys
