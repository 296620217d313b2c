"""The files of a store of clients: fields and their compact types, writing, and checks on opening.

A store is a folder, written whole or not at all:

    store.json    format, counts, the fields' shapes and types, bytes of every file, SHA-256 of its numbers
    x.npy, y.npy  `[total, ...]`, all examples, one after the other, in a compact type
    offsets.npy   `[N + 1]` int64: the examples of client `i` are rows `offsets[i] : offsets[i + 1]`
    rows.npy      `[total]`, only of an indexed store: then those are entries of `rows`, which point into `x` and `y`
    cluster.npy   `[N]` int32, the true clusters, where they are known
"""

import array
import hashlib
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jfcl.core.checks import INT32, INT32_MAX, check, check_apart, check_integers, require
from jfcl.core.files import BAD_ARRAY, read_json, seal, write_json
from jfcl.data.values import as_numpy, is_table

FORMAT = 1
TYPES = [np.dtype(code).name for code in np.typecodes["AllInteger"] + np.typecodes["Float"] + "?"]
JAX_TYPES = {"float64": "float32", "int64": "int32", "uint64": "uint32"}  # jax's own, unless 64 bits are enabled


class Field(NamedTuple):
    """The storage of one array of the examples: `value = stored / per_unit + offset`."""

    shape: tuple[int, ...]  # of one example
    dtype: str  # in a cohort
    stored: str  # on disk; where it is not `dtype`, values are rounded to the nearest one of this type
    per_unit: float = 1.0  # 255 for pixels that are kept as bytes
    offset: float = 0.0  # the value of a stored 0, in stores of earlier versions


def encode(field: Field, values: np.ndarray, where: str) -> np.ndarray:
    """Returns `values` as they are stored; raises `ValueError` for another shape, and for numbers that are lost so."""
    shape = values.shape[1:]
    require(shape == field.shape, f"{where}: an example has the shape {shape}, and in the store {field.shape}")
    kinds = list(dict.fromkeys((field.stored, field.dtype)))
    if np.dtype(field.dtype).kind == "f" and np.dtype(field.stored).kind in "iu":
        values, kinds = np.rint(values * field.per_unit), [field.stored]
    with np.errstate(over="ignore", invalid="ignore"):
        for kind in kinds:
            converted = values.astype(kind)
            both_floats = converted.dtype.kind == values.dtype.kind == "f"
            fits = np.isfinite(converted) if both_floats else converted == values
            if not fits.all():
                accepted = f"of numbers that {kind} holds, the type that is stored or of the first client"
                check(False, where, values[~fits][0].item(), accepted)
        return values.astype(field.stored)


def decode(field: Field, stored: np.ndarray, out: np.ndarray) -> None:
    """Writes the values of `stored` `[n, ...]` into `out` `[n, ...]`."""
    if np.dtype(field.dtype).kind != "f" or field.stored == field.dtype:
        np.copyto(out, stored, casting="unsafe")
        return
    # A division, not a product: 255ths of a pixel are then exactly the quotients of its bytes.
    np.divide(stored, np.dtype(field.dtype).type(field.per_unit), out=out, dtype=field.dtype)
    if field.offset:
        out += np.dtype(field.dtype).type(field.offset)


def read_store(path: Path) -> tuple[dict[str, Any], dict[str, Field], dict[str, np.ndarray]]:
    """Returns the content of `store.json`, the fields, and all arrays, memory-mapped and checked but for their digests.

    A store may come from elsewhere: clients' examples must lie within its arrays, which `gather` does not check.
    """
    meta = read_json(path / "store.json", check_format=FORMAT)
    try:
        fields = {name: Field(**field)._replace(shape=tuple(field["shape"])) for name, field in meta["fields"].items()}
        count = max((meta["files"][name]["shape"][0] for name in fields), default=0)
        types = {"offsets": "int64", "cluster": "int32", "rows": np.min_scalar_type(max(count - 1, 0))}
        types |= {name: field.stored for name, field in fields.items()}
        sound = _is_sound(meta, fields, count)
    except (AttributeError, LookupError, TypeError):
        sound = False
    if not sound:
        raise ValueError(f"{path / 'store.json'} is damaged: jfcl does not write such fields, files and counts")
    arrays = {name: _open_array(path / f"{name}.npy", file, types[name]) for name, file in meta["files"].items()}

    offsets, rows = arrays["offsets"], arrays.get("rows")
    ends = count if rows is None else len(rows)
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != ends or (np.diff(offsets) < 0).any():
        raise ValueError(f"{path / 'offsets.npy'} was changed: it does not divide {ends} examples among clients")
    if rows is not None and len(rows) and rows.max() >= count:
        raise ValueError(f"{path / 'rows.npy'} was changed: row {rows.max()} of {count} examples")
    if "cluster" in arrays:
        check_integers(f"{path / 'cluster.npy'}", arrays["cluster"], len(offsets) - 1)
    return meta, fields, arrays


def _is_sound(meta: dict[str, Any], fields: dict[str, Field], count: int) -> bool:
    """Returns whether `store.json` is as jfcl writes it, with `count` examples and no files but those of the store."""

    def is_field(name: str, field: Field) -> bool:
        real = 0 < field.per_unit < math.inf and abs(field.offset) < math.inf
        return _is_free(name) and field.dtype in TYPES and field.stored in TYPES and real

    files, of_file = meta["files"], {"bytes": int, "sha256": str, "shape": list}
    counts = [meta[name] for name in ("num_classes", "num_clusters") if meta.get(name) is not None]
    return (
        bool(fields)
        and all(is_field(name, field) for name, field in fields.items())
        and set(files) == {"offsets", *fields} | {name for name in ("rows", "cluster") if name in files}
        and all({name: type(value) for name, value in file.items()} == of_file for file in files.values())
        and all(files[name]["shape"] == [count, *field.shape] for name, field in fields.items())
        and all(len(files[name]["shape"]) == 1 for name in files.keys() - fields.keys())
        and all(type(count) is int and 0 < count <= INT32_MAX for count in counts)
        and isinstance(meta.get("description", ""), str)
        and isinstance(meta.get("made", {}), dict)
    )


def _open_array(file: Path, wanted: dict[str, Any], dtype: Any) -> np.ndarray:
    """Returns the array of a file, memory-mapped; raises `ValueError` where it is not as `store.json` says."""
    size = file.stat().st_size if file.exists() else 0
    if size != wanted["bytes"]:
        what = "was cut short or changed" if file.exists() else "is missing"
        raise ValueError(f"{file} {what}: expected {wanted['bytes']} bytes, found {size}")
    try:  # a plain array over the map: NumPy's memmap objects cost a Python call at every indexing
        opened = np.lib.format.open_memmap(file, mode="r").view(np.ndarray)
    except BAD_ARRAY as error:
        raise ValueError(f"{file} was changed: {error}") from None
    if (opened.dtype, list(opened.shape)) != (np.dtype(dtype), wanted["shape"]):  # headers are not in a file's digest
        raise ValueError(f"{file} was changed: it holds {opened.dtype} {opened.shape}; see store.json")
    return opened


def _is_free(name: Any) -> bool:
    """Returns whether an array of the examples may have this name, which is that of a file as well."""
    return isinstance(name, str) and name.isidentifier() and name not in ("offsets", "rows", "cluster")


class _File:
    """A `.npy` file that grows by rows: NumPy reserves space in the header for their number."""

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: str):
        self.shape, self.dtype, self.count, self.digest = shape, np.dtype(dtype), 0, hashlib.sha256()
        self.handle = path.open("wb", buffering=2**20)
        self._header()

    def _header(self) -> None:
        descr = np.lib.format.dtype_to_descr(self.dtype)
        header = {"descr": descr, "fortran_order": False, "shape": (self.count, *self.shape)}
        np.lib.format.write_array_header_1_0(self.handle, header)

    def write(self, values: np.ndarray) -> None:
        data = np.ascontiguousarray(values).tobytes()
        self.handle.write(data)
        self.digest.update(data)
        self.count += len(values)

    def finish(self) -> dict[str, Any]:
        size = self.handle.tell()
        self.handle.seek(0)
        self._header()
        self.handle.flush()
        os.fsync(self.handle.fileno())
        return {"bytes": size, "shape": [self.count, *self.shape], "sha256": self.digest.hexdigest()}


class StoreWriter:
    """The files of a store while it is written."""

    def __init__(self, path: Path, stored: dict[str, tuple]):
        self.path, self.stored, self.fields, self.files = path, stored, {}, {}
        self.sizes = array.array("q")  # the number of examples of each client, of which there may be 100 million
        self.file("offsets", (), "int64")

    def file(self, name: str, shape: tuple[int, ...], dtype: str) -> _File:
        self.files[name] = _File(self.path / f"{name}.npy", shape, dtype)
        return self.files[name]

    def examples(self, examples: dict[str, Any], where: str) -> int:
        """Writes some examples, and returns their number."""
        filled = isinstance(examples, dict) and len(examples) > 0
        check(filled, where, type(examples).__name__, "a dict of arrays, {'x': ..., 'y': ...}")
        arrays = {}
        for name, values in examples.items():
            array = np.asarray(as_numpy(values, f"{where}: {name}"))
            fits = array.dtype.kind in "fiub" and array.ndim > 0 and not is_table(values)
            accepted = "an array of numbers [m, ...]; jfcl.data.from_arrays takes frames"
            check(fits, f"{where}: {name}", f"{array.dtype} {array.shape}", accepted)
            if array.dtype.kind == "f" and array.ndim <= 2:
                check_apart(f"{where}: {name}", array)
            arrays[name] = array
        if not self.fields:
            for name, array in arrays.items():
                check(_is_free(name), f"{where}: name", name, "a name that the store does not use itself")
                dtype = JAX_TYPES.get(array.dtype.name, array.dtype.name)
                self.fields[name] = field = Field(array.shape[1:], dtype, *self.stored.get(name, (dtype,)))
                self.file(name, field.shape, field.stored)
        names = sorted(self.fields)
        require(sorted(arrays) == names, f"{where} has the arrays {sorted(arrays)}, and the store {names}")
        lengths = {len(array) for array in arrays.values()}
        require(len(lengths) == 1, f"{where} has arrays of different lengths, {sorted(lengths)}")
        for name, array in arrays.items():
            self.files[name].write(encode(self.fields[name], array, f"{where}: {name}"))
        return lengths.pop()

    def finish(self, cluster: Any, about: dict[str, Any]) -> None:
        """Checks the number of clients and examples, and writes `store.json`."""
        largest, offsets = max(self.sizes, default=0), np.zeros(len(self.sizes) + 1, np.int64)
        np.cumsum(np.asarray(self.sizes, np.int64), out=offsets[1:])
        require(largest > 0, f"none of the {len(self.sizes)} clients has an example")
        self.files["offsets"].write(offsets)
        if cluster is not None:
            clusters = check_integers("cluster", cluster, len(self.sizes), within=INT32)
            self.file("cluster", (), "int32").write(clusters.astype(np.int32))
        meta = {
            "format": FORMAT,
            "num_clients": len(self.sizes),
            "num_examples": int(offsets[-1]),
            "max_size": largest,
            "fields": {name: field._asdict() for name, field in self.fields.items()},
            "files": {name: file.finish() for name, file in self.files.items()},
        }
        write_json(self.path / "store.json", seal(about | meta))

    def close(self) -> None:
        for file in self.files.values():
            file.handle.close()
