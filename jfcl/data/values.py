"""Values of examples as users have them (lists, arrays, tensors, frames, images) as arrays in the types of the library.

All loaders read a column of any kind here: `plain` unwraps its values, `array_of` makes it an array, `inputs_of` makes
it inputs, and `array_beside` an array beside them.
"""

import datetime
import decimal
import fractions
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jfcl.core.checks import check, check_apart, check_unmasked, held_type, require, shown
from jfcl.data import images

_DATES = (datetime.date, datetime.time, datetime.timedelta, np.datetime64, np.timedelta64)


def inputs_of(parts: Iterable[tuple[str, Any]], channels_first: bool | None) -> tuple[list[np.ndarray], bool]:
    """Returns the inputs `[n, ...]` of every part `(where, values)`, as `from_frame` describes them.

    The second result is whether images had their channels first. Where some parts are images that were divided by their
    white, others beyond `[0, 1]` are refused.
    """
    inputs, names, pictured, moved, divided = [], [], [], False, False
    for where, values in parts:
        rows = plain(values, where)
        names.append(where)
        pictured.append(isinstance(rows, list) and any(map(images.is_picture, rows)))
        if pictured[-1]:
            inputs.append(images.pictures(rows, where))
            continue
        array = stacked(rows, where)
        if array.dtype != object:
            if images.has_channels_first(array.shape, where, channels_first):
                array, moved = images.channels_last(array), True
            x = images.images_or_ids(array, where)
            divided |= x is not array
            if x is array:
                x = as_type(np.int32 if array.dtype.kind in "iu" and array.ndim > 1 else np.float32, array, where)
            require(x.size > 0, f"{where}: an input is empty, of shape {list(x.shape[1:])}")
            array = x[:, None] if x.ndim == 1 else x
        inputs.append(array)
    for where, x in zip(names, inputs, strict=True) if divided or any(pictured) else ():
        in_unit = x.dtype != np.float32 or (x.min() >= 0 and x.max() <= 1)
        check(in_unit, where, "other floats", "divided by the white, in [0, 1], as images of bytes and of PIL are")
    return (images.alike(inputs) if inputs and all(pictured) else inputs), moved


def array_beside(values: Any, where: str, *, moved: bool = False, plane: tuple[int, ...] = ()) -> Any:
    """Returns an array `[n, ...]` beside the inputs, or a dict of them, with its values in a type of JAX.

    Images of PIL hold labels. Arrays `[n, C, H, W]` in the `plane` of images that were `moved` become `[n, H, W, C]`.
    """
    if isinstance(values, dict):
        parts = {name: (part, f"{where}[{name!r}]") for name, part in values.items()}
        return {name: array_beside(*part, moved=moved, plane=plane) for name, part in parts.items()}
    array = array_of(values, where)
    check(array.dtype != object, where, "texts", "numbers; jfcl.data.from_frame numbers texts, of all clients alike")
    if is_table(values) and array.shape[1] == 1:
        array = array[:, 0]
    if moved and array.ndim == 4 and array.shape[2:] == plane:
        array = images.channels_last(array)
    if array.dtype.kind == "f":
        return as_type(np.float32, array, where)
    return as_type(np.int32, array, where) if array.dtype.itemsize > 4 else array


def array_of(values: Any, where: str) -> np.ndarray:
    """Returns a column of any kind as `[n, ...]`: numbers, or texts as objects; images of PIL are maps of labels."""
    return stacked(plain(values, where), where)


def plain(values: Any, where: str) -> Any:
    """Returns numbers `[n, ...]`, also of frames, sparse matrices and decimals, or a list of other values.

    Refused are single values, none, missing ones, and dates.
    """
    if is_table(values):
        names = list(values.columns)
        differ = names and len(set(names)) == len(names)
        check(differ, f"{where}: columns", names, "names that differ, one at least")
        return side_by_side({name: values[name] for name in names}, where)
    values = values.toarray() if hasattr(values, "tocsr") else as_numpy(values, where)  # a sparse matrix of SciPy
    several = np.ndim(values) > 0 if isinstance(values, np.ndarray) else hasattr(values, "__iter__")
    check(several, where, values, "an array or a list with an entry for each example")
    rows = values if isinstance(values, np.ndarray) and values.dtype.kind in "biuf" else list(values)
    require(len(rows) > 0, f"{where} has no example; leave out clients without any")
    if isinstance(rows, np.ndarray):
        return rows
    accepted = "numbers in the place of dates and times, such as the days since the first one (.dt.days) or the hour"
    check(not isinstance(rows[0], _DATES), where, type(rows[0]).__name__, accepted)

    def is_missing(value: Any) -> bool:
        is_nan = isinstance(value, float | np.floating) and value != value
        return value is None or is_nan or type(value).__name__ in ("NAType", "NaTType")

    missing = [i for i, value in enumerate(rows) if is_missing(value)]
    if missing:
        raise ValueError(f"{where}: {len(missing)} missing values, first in row {missing[0]}; drop or fill them")
    return np.array(rows, np.float64) if isinstance(rows[0], decimal.Decimal | fractions.Fraction) else rows


def side_by_side(columns: Mapping[Any, Any], where: str = "") -> np.ndarray:
    """Returns `[n, columns]` float32; raises `ValueError` for a column of other than single numbers or truths."""

    def vector(name: Any, values: Any) -> np.ndarray:
        of = f"{where}{where and ': '}column {name!r}"
        array = array_of(values, of)
        accepted = "one column of numbers; jfcl.data.from_frame reads texts and categories, of all clients alike"
        check(array.ndim == 1 and array.dtype.kind in "biuf", of, f"{array.dtype} {array.shape}", accepted)
        return as_type(np.float32, array, of)

    return np.stack([vector(*column) for column in columns.items()], axis=1)


def stacked(rows: Any, where: str) -> np.ndarray:
    """Returns `[n, ...]` of what `plain` returns: of numbers, arrays or images of labels, or of texts as objects."""
    if isinstance(rows, np.ndarray):
        return rows
    if all(isinstance(row, str) for row in rows):
        return np.array(rows, object)

    def one(i, row):
        if images.is_picture(row):
            return images.labels_shown(row, f"{where}: row {i}")
        holds_images = isinstance(row, list | tuple) and len(row) > 0 and images.is_picture(row[0])
        return np.asarray(None if holds_images else as_numpy(row))

    arrays = [one(i, row) for i, row in enumerate(rows)]
    first = arrays[0]
    for i, array in enumerate(arrays):
        if array.dtype.kind not in "biuf":
            raise ValueError(f"{where}: must hold numbers, arrays, images or texts, got {shown(rows[i])} in row {i}")
        if array.shape != first.shape:
            raise ValueError(f"{where}: row {i} has shape {array.shape}, row 0 has {first.shape}")
        if array.ndim > 1 and array.dtype != first.dtype and {array.dtype.kind, first.dtype.kind} != {"f"}:
            raise ValueError(f"{where}: row {i} is of {array.dtype}, row 0 of {first.dtype}; give one type")
    return np.stack(arrays)


def as_numpy(values: Any, where: str = "examples") -> Any:
    """Returns tensors of PyTorch and JAX, and numbers of their small types, as NumPy's; other values as they are.

    Arrays have the byte order of the machine, and numbers 64 bits at most. Masked arrays with missing values, and
    tensors that are sparse, quantised or without values, are refused.
    """
    if hasattr(values, "detach"):
        try:
            values = values.detach().cpu()
            # NumPy lacks bfloat16 and smaller types.
            small = hasattr(values, "is_floating_point") and values.is_floating_point() and values.element_size() < 4
            values = (values.float() if small else values).numpy()
        except (TypeError, RuntimeError, NotImplementedError) as error:
            raise ValueError(f"{where}: a tensor that cannot become an array of NumPy ({error})") from None
    check_unmasked(where, values)
    if hasattr(values, "__array__") and not images.is_picture(values):
        values = np.asarray(values)
    if not isinstance(values, np.ndarray):
        return values
    if values.dtype.kind == "V" and values.dtype.names is None and jax.dtypes.issubdtype(values.dtype, np.floating):
        return values.astype(np.float32)
    return values.astype(held_type(values.dtype), copy=False)


def as_type(dtype: type, array: np.ndarray, where: str) -> np.ndarray:
    """Returns numbers `[n, ...]` as float32 or int32; raises `ValueError` for those that it cannot hold."""
    with np.errstate(over="ignore", invalid="ignore"):
        converted = array.astype(dtype)
    held = converted == array if dtype == np.int32 else np.isfinite(converted)
    bad = np.flatnonzero(~held.reshape(len(held), -1).all(axis=1))
    if len(bad):
        finite = np.isfinite(array[bad[0]]).all()
        what = f"numbers beyond {converted.dtype}" if finite else "NaN or infinity"
        remedy = "make them smaller, or texts where they are names" if finite else "drop or fill them"
        raise ValueError(f"{where}: {len(bad)} rows with {what}, first row {bad[0]}; {remedy}")
    if dtype == np.float32 and array.ndim <= 2:
        check_apart(where, array)
    return converted


def is_table(values: Any) -> bool:
    """Returns whether values are a table with named columns, as a pandas frame."""
    return hasattr(values, "columns") and hasattr(values, "__getitem__") and not isinstance(values, dict)
