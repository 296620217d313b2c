"""Values of examples as users have them (lists, arrays, tensors, images) as arrays in the types of the library."""

from __future__ import annotations

import datetime
import decimal
import fractions
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from jfcl.core import check, check_apart, check_unmasked, held_type, shown
from jfcl.data import images
from jfcl.data.dataset import Dataset


def inputs_of(parts: Iterable[tuple[str, Any]], channels_first: bool | None) -> tuple[list[np.ndarray], bool]:
    """Returns the inputs `[n, ...]` of every part (client or split), as `from_frame` and `from_arrays` describe them.

    Args:
      parts: `(where, values)` of each; `where` names them in errors.
      channels_first: whether images are `[C, H, W]`; `None`: as their shape shows.

    Returns:
      The inputs, images with the same channels in all parts, which are last; and whether they were first.
    """
    made, pictured, moved = [], [], False
    for where, values in parts:
        array = plain(values, where)
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf":
            rows = list(array)
            check_whole(rows, where)
            pictured.append(any(map(images.is_picture, rows)))
            if all(isinstance(row, str) for row in rows):
                made.append(np.array(rows, object))
                continue
            if pictured[-1]:
                check(not channels_first, "channels_first", True, f"left out: {where} holds images of PIL")
                made.append(images.pictures(rows, where))
                continue
            array = stacked(rows, where)
        else:
            pictured.append(False)
        if images.has_channels_first(array.shape, where, channels_first):
            array, moved = images.channels_last(array), True
        x = images.images_or_ids(array, where)
        if x is array:
            x = as_type(np.int32 if array.dtype.kind in "iu" and array.ndim > 1 else np.float32, array, where)
        check(x.size > 0 or not len(x), f"{where}: the shape of an input", list(x.shape[1:]), "without a 0")
        made.append(x[:, None] if x.ndim == 1 else x)
    return (images.alike(made) if made and all(pictured) else made), moved


def kept(values: Any, where: str, *, moved: bool = False, plane: tuple[int, ...] = ()) -> Any:
    """Returns an array `[n, ...]` beside the inputs, or a dict of them, with its values in a type of JAX.

    Images of PIL hold labels. Arrays `[n, C, H, W]` in the `plane` of images that were `moved` become `[n, H, W, C]`.
    """
    if isinstance(values, dict):
        options = {"moved": moved, "plane": plane}
        return {name: kept(part, f"{where}[{name!r}]", **options) for name, part in values.items()}
    array = plain(values, where)
    if is_table(values) and array.shape[1] == 1:
        array = array[:, 0]
    several = array.ndim > 0 if isinstance(array, np.ndarray) else hasattr(array, "__iter__")
    check(several, where, values, "an array with an entry for each example")
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf":
        rows = list(array)
        check_whole(rows, where)
        texts = any(isinstance(row, str) for row in rows)
        check(not texts, where, "texts", "numbers; jfcl.data.from_frame numbers texts, of all clients alike")
        array = stacked(rows, where)
    if moved and array.ndim == 4 and array.shape[2:] == plane:
        array = images.channels_last(array)
    if array.dtype.kind == "f":
        return as_type(np.float32, array, where)
    return as_type(np.int32, array, where) if array.dtype.itemsize > 4 else array


def is_table(values: Any) -> bool:
    """Returns whether values are a table with named columns, as a pandas frame."""
    return hasattr(values, "columns") and hasattr(values, "__getitem__") and not isinstance(values, dict)


def plain(values: Any, where: str) -> Any:
    """Returns `as_numpy` of values, also of those that hide numbers: frames, series and sparse matrices.

    A frame becomes `[n, columns]`; a list of decimals becomes numbers.

    Raises:
      ValueError: a frame with a column of other than numbers; dates; names of columns that occur twice.
    """
    if is_table(values):
        names = list(values.columns)
        check(names and len(set(names)) == len(names), f"{where}: columns", names, "names that differ, one at least")
        columns = [plain(values[name], f"{where}: column {name!r}") for name in names]
        for i, column in enumerate(columns):
            if column.dtype == object and len(column) and not any(isinstance(value, str) for value in column):
                check_whole(list(column), f"{where}: column {names[i]!r}")
                columns[i] = stacked(list(column), f"{where}: column {names[i]!r}")
        for name, column in zip(names, columns, strict=True):
            fits = column.ndim == 1 and column.dtype.kind in "biuf"
            accepted = "one column of numbers; jfcl.data.from_frame reads texts and categories, of all clients alike"
            check(fits, f"{where}: column {name!r}", f"{column.dtype} {column.shape}", accepted)
        named = zip(names, columns, strict=True)
        return np.stack([as_type(np.float32, c, f"{where}: column {name!r}") for name, c in named], axis=1)
    if hasattr(values, "tocsr") and hasattr(values, "toarray"):  # of scipy
        return values.toarray()
    array = as_numpy(values, where)
    in_turn = isinstance(array, list) or (isinstance(array, np.ndarray) and array.ndim == 1)
    first = array[0] if in_turn and len(array) else None
    dated = isinstance(array, np.ndarray) and array.dtype.kind in "mM"
    if dated or isinstance(first, datetime.date | datetime.time | datetime.timedelta | np.datetime64 | np.timedelta64):
        kind = array.dtype if dated else type(first).__name__
        accepted = (
            "numbers in the place of dates and times, such as the days since the first one (.dt.days) or the hour"
        )
        check(False, where, kind, accepted)
    if isinstance(first, decimal.Decimal | fractions.Fraction):
        check_whole(list(array), where)
        return np.array([float(value) for value in array])
    return array


def plain_dataset(dataset: Any) -> Any:
    """Returns a data set with frames, series, sparse matrices, tensors and JAX's arrays as arrays of NumPy.

    Raises:
      ValueError: those of `plain`, such as missing values of a masked array.
    """

    def of_split(split: Any, name: str) -> Any:
        if not isinstance(split, dict):
            return split
        where = f"data set {dataset.name!r} ({name})"

        def one(path, values):
            return plain(values, f"{where}: {jax.tree_util.keystr(path, simple=True, separator='/')}")

        return jax.tree_util.tree_map_with_path(one, split)

    if not isinstance(dataset, Dataset):
        return dataset
    splits = {name: of_split(getattr(dataset, name), name) for name in ("train", "test")}
    writer = dataset.writer
    if isinstance(writer, dict):
        where = f"data set {dataset.name!r}: writer"
        writer = {name: as_numpy(ids, where) for name, ids in writer.items()}
    return dataset._replace(**splits, writer=writer)


def as_numpy(values: Any, where: str = "examples") -> Any:
    """Returns tensors of PyTorch and JAX, and numbers of their small types, as NumPy's; other values as they are.

    Arrays have the byte order of the machine, and numbers 64 bits at most.

    Raises:
      ValueError: a masked array with missing values; a tensor that is sparse, quantised or without values.
    """
    if hasattr(values, "detach"):
        values = _of_tensor(values, where)
    check_unmasked(where, values)
    if hasattr(values, "__array__") and not images.is_picture(values):
        values = np.asarray(values)
    small = isinstance(values, np.ndarray) and values.dtype.kind == "V" and values.dtype.names is None
    if small and jax.dtypes.issubdtype(values.dtype, np.floating):
        return values.astype(np.float32)
    return values.astype(held_type(values.dtype), copy=False) if isinstance(values, np.ndarray) else values


def _of_tensor(tensor: Any, where: str) -> np.ndarray:
    try:
        tensor = tensor.detach().cpu()
        try:
            return tensor.numpy()
        except TypeError:
            if not tensor.is_floating_point():  # sparse or quantised
                raise
            return tensor.float().numpy()  # bfloat16 and smaller
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise ValueError(f"{where}: a tensor that cannot become an array of NumPy ({error})") from None


def as_type(dtype: type, array: np.ndarray, where: str) -> np.ndarray:
    """Returns numbers `[n, ...]` as float32 or int32; raises `ValueError` for those that it cannot hold."""
    with np.errstate(over="ignore", invalid="ignore"):
        made = array.astype(dtype)
        rows = made.reshape(len(made), -1)
        if dtype == np.int32:
            good = (rows == array.reshape(rows.shape)).all(axis=1)
        else:  # a sum in float64 of numbers in float32 is finite exactly when all of them are
            good = np.isfinite(rows.sum(axis=1, dtype=np.float64))
    if dtype == np.float32 and good.all() and array.ndim <= 2:
        check_apart(where, array)
    bad = np.flatnonzero(~good)
    if len(bad):
        finite = np.isfinite(array[bad[0]]).all()
        what = f"numbers beyond {made.dtype}" if finite else "NaN or infinity"
        remedy = "make them smaller, or texts where they are names" if finite else "drop or fill them"
        raise ValueError(f"{where}: {len(bad)} rows with {what}, first row {bad[0]}; {remedy}")
    return made


def stacked(rows: list[Any], where: str) -> np.ndarray:
    """Returns `[n, ...]` of numbers, arrays or images of labels.

    Raises:
      ValueError: rows of other kinds, of different shapes, or images and maps of different types.
    """

    def one(i, row):
        if images.is_picture(row):
            return images.labels_shown(row, f"{where}: row {i}")
        nested = isinstance(row, list | tuple) and len(row) > 0 and images.is_picture(row[0])
        return np.asarray(None if nested else as_numpy(row))

    arrays = [one(i, row) for i, row in enumerate(rows)]
    for i, array in enumerate(arrays):
        if array.dtype.kind not in "biuf":
            raise ValueError(f"{where}: must hold numbers, arrays, images or texts, got {shown(rows[i])} in row {i}")
        if array.shape != arrays[0].shape:
            raise ValueError(f"{where}: row {i} has shape {array.shape}, row 0 has {arrays[0].shape}")
        kinds = {array.dtype.kind, arrays[0].dtype.kind}
        if array.ndim > 1 and array.dtype != arrays[0].dtype and kinds != {"f"}:
            raise ValueError(f"{where}: row {i} is of {array.dtype}, row 0 of {arrays[0].dtype}; give one type")
    return np.stack(arrays)


def check_whole(rows: list[Any], where: str) -> None:
    """Raises `ValueError` for missing values: None, NaN, and those of pandas."""
    bad = [i for i, v in enumerate(rows) if v is None or type(v).__name__ in ("NAType", "NaTType") or _is_nan(v)]
    if bad:
        raise ValueError(f"{where}: {len(bad)} missing values, first in row {bad[0]}; drop or fill them")


def _is_nan(value: Any) -> bool:
    return isinstance(value, float | np.floating) and bool(np.isnan(value))
