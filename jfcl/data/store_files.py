"""The files of a store of clients: fields and their compact types, writing, and checks on opening.

A store is a folder, written whole or not at all:

    store.json    format, counts, the fields' shapes and types, bytes and SHA-256 of every file
    x.npy, y.npy  `[total, ...]`, all examples, one after the other, in a compact type
    offsets.npy   `[N + 1]` int64: the examples of client `i` are rows `offsets[i] : offsets[i + 1]`
    rows.npy      `[total]`, only of an indexed store: then those are entries of `rows`, which point into `x` and `y`
    cluster.npy   `[N]` int32, the true clusters, where they are known
"""

from __future__ import annotations

import hashlib
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jfcl.core import INT32_MAX, check, check_apart, check_unmasked, held_type, shown
from jfcl.core.files import seal, write_json

FORMAT = 1
TYPES = [np.dtype(code).name for code in np.typecodes["AllInteger"] + np.typecodes["Float"] + "?"]
JAX_TYPES = {"float64": "float32", "int64": "int32", "uint64": "uint32"}  # jax's own, unless 64 bits are enabled


class Field(NamedTuple):
    """The storage of one array of the examples: `value = stored / per_unit + offset`.

    Attributes:
      shape: of one example.
      dtype: the type in a cohort.
      stored: the type on disk; where it is not `dtype`, values are rounded to the nearest one of this type.
      per_unit: 255 for pixels that are kept as bytes.
      offset: the value of a stored 0.
    """

    shape: tuple[int, ...]
    dtype: str
    stored: str
    per_unit: float = 1.0
    offset: float = 0.0


def encode(field: Field, values: np.ndarray, name: str, where: str) -> np.ndarray:
    """Returns `values` as they are stored.

    Raises:
      ValueError: NaN or infinity, another shape, or a value that the stored type cannot hold.
    """
    check(values.shape[1:] == field.shape, f"{where}: {name}", values.shape[1:], f"of shape {field.shape} an example")
    fits = np.can_cast(values.dtype, field.stored, "same_kind") or np.dtype(field.stored).kind in "iu"
    check(fits, f"{where}: {name}", values.dtype, f"{field.stored}, as of the first client")
    if values.dtype.kind == "f":
        check(np.isfinite(values).all(), f"{where}: {name}", "NaN or infinity", "finite")
    if np.dtype(field.stored).kind not in "iu":
        with np.errstate(over="ignore"):
            stored = values.astype(field.stored, casting="same_kind")
        check(np.isfinite(stored).all(), f"{where}: {name}", "too large a number", f"within the range of {field}")
        return stored
    as_given = field.per_unit == 1 and field.offset == 0
    levels = values if as_given else (values - field.offset) * field.per_unit
    if levels.dtype.kind == "f":
        whole = not as_given or field.dtype != field.stored or (levels == np.rint(levels)).all()
        check(whole, f"{where}: {name}", "fractions", f"whole numbers, as of the first client ({field.stored})")
        levels = np.rint(levels)
    limits = [np.iinfo(kind) for kind in (field.stored, field.dtype) if np.dtype(kind).kind in "iu"]
    fits = not levels.size or all(levels.min() >= limit.min and levels.max() <= limit.max for limit in limits)
    check(fits, f"{where}: {name}", (values.min(), values.max()) if not fits else None, f"within the range of {field}")
    return levels.astype(field.stored)


def decode(field: Field, stored: np.ndarray, out: np.ndarray) -> None:
    """Writes the values of `stored` `[n, ...]` into `out` `[n, ...]`."""
    if np.dtype(field.dtype).kind != "f" or field.stored == field.dtype:
        np.copyto(out, stored, casting="unsafe")
        return
    # A division, not a product: 255ths of a pixel are then exactly the quotients of its bytes.
    np.divide(stored, np.dtype(field.dtype).type(field.per_unit), out=out, dtype=field.dtype)
    if field.offset:
        out += np.dtype(field.dtype).type(field.offset)


def read_fields(path: Path, about: dict[str, Any]) -> dict[str, Field]:
    """Returns the fields in the content of a `store.json`; raises `ValueError` for one that jfcl would not write.

    A store may come from elsewhere: the names of its files must be those of its own arrays.
    """
    where = f"{path / 'store.json'} is damaged:"
    fields, files = about.get("fields"), about.get("files")
    if not (isinstance(fields, dict) and fields and isinstance(files, dict)):
        raise ValueError(f"{where} it lacks files or fields")
    own = {"offsets", *fields} | {name for name in ("rows", "cluster") if name in files}
    if set(files) != own or not all(_is_free(name) for name in fields):
        raise ValueError(f"{where} its files are {sorted(files)}, and its fields {sorted(fields)}")

    def is_count(value: Any) -> bool:
        return type(value) is int and 0 <= value < 2**63

    for name, file in files.items():
        known = isinstance(file, dict) and is_count(file.get("bytes")) and isinstance(file.get("sha256"), str)
        if not known or not isinstance(file.get("shape"), list) or not all(map(is_count, file["shape"])):
            raise ValueError(f"{where} it does not say what is in {name}.npy")
    found = {}
    for name, field in fields.items():
        whole = isinstance(field, dict) and field.keys() == set(Field._fields) and isinstance(field["shape"], list)
        whole = whole and all(map(is_count, field["shape"]))
        whole = whole and all(isinstance(field[kind], str) and field[kind] in TYPES for kind in ("dtype", "stored"))
        numbers = whole and all(type(field[of]) in (int, float) for of in ("per_unit", "offset"))
        if not numbers or not (0 < field["per_unit"] < math.inf and abs(field["offset"]) < math.inf):
            raise ValueError(f"{where} the field {name} is {shown(field)}")
        found[name] = Field(**field)._replace(shape=tuple(field["shape"]))
    return found


def check_counts(path: Path, about: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Raises `ValueError` where the counts and texts of a `store.json` are not those of its arrays."""
    sizes = np.diff(arrays["offsets"])
    wanted = {"num_clients": len(sizes), "num_examples": int(sizes.sum()), "max_size": int(sizes.max())}
    differ = [name for name, value in wanted.items() if type(about.get(name)) is not int or about[name] != value]
    for name in ("num_classes", "num_clusters"):
        value = about.get(name)
        differ += [name] if value is not None and (type(value) is not int or not 0 < value <= INT32_MAX) else []
    differ += ["description"] if not isinstance(about.get("description", ""), str) else []
    differ += ["made"] if not isinstance(about.get("made", {}), dict) else []
    clusters = arrays.get("cluster")
    if clusters is not None and clusters.shape != (len(sizes),):
        differ.append("cluster")
    if differ:
        raise ValueError(f"{path / 'store.json'} is damaged: {', '.join(differ)} are not those of the store")


def check_types(path: Path, arrays: dict[str, np.ndarray], files: dict[str, Any], fields: dict[str, Field]) -> None:
    """Raises `ValueError` where a file's header, which is not part of its digest, differs from the original one."""
    count = len(arrays[next(iter(fields))])
    types = {"offsets": "int64", "cluster": "int32", "rows": np.min_scalar_type(max(count - 1, 0))}
    types |= {name: field.stored for name, field in fields.items()}
    for name, array in arrays.items():
        if array.dtype != np.dtype(types[name]) or list(array.shape) != files[name]["shape"]:
            raise ValueError(f"{path / name}.npy was changed: it holds {array.dtype} {array.shape}")


def check_places(path: Path, offsets: np.ndarray, rows: np.ndarray | None, count: int) -> None:
    """Raises `ValueError` where clients' examples would lie outside the arrays, which `gather` does not check."""
    ends = len(rows) if rows is not None else count
    whole = len(offsets) > 1 and offsets[0] == 0 and offsets[-1] == ends and bool((np.diff(offsets) >= 0).all())
    if not whole:
        raise ValueError(f"{path / 'offsets.npy'} was changed: it does not divide {ends} examples among clients")
    if rows is not None and len(rows) and rows.max() >= count:
        raise ValueError(f"{path / 'rows.npy'} was changed: row {rows.max()} of {count} examples")


def check_of_clients(name: str, values: Any, n: int) -> np.ndarray:
    """Returns `values` as an array of `[n]` int32, or raises `ValueError`."""
    values = np.asarray(values)
    fits = values.shape == (n,) and values.dtype.kind in "iu"
    check(fits, name, f"{values.dtype} {values.shape}", f"integers of shape ({n},), one for every client")
    largest = max(abs(int(values.min())), abs(int(values.max())))
    check(largest <= INT32_MAX, name, largest, f"at most {INT32_MAX}")
    return values.astype(np.int32)


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
        about = {"descr": descr, "fortran_order": False, "shape": (self.count, *self.shape)}
        np.lib.format.write_array_header_1_0(self.handle, about)

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
        self.path, self.stored = path, stored
        self.fields: dict[str, Field] = {}
        self.files: dict[str, _File] = {}
        self.num_clients = self.total = self.largest = 0
        self.offsets = self.file("offsets", (), "int64")
        self.offsets.write(np.zeros(1, np.int64))

    def file(self, name: str, shape: tuple[int, ...], dtype: str) -> _File:
        self.files[name] = _File(self.path / f"{name}.npy", shape, dtype)
        return self.files[name]

    def examples(self, examples: dict[str, Any], where: str) -> int:
        """Writes some examples, and returns their number."""
        found = list(examples) if isinstance(examples, dict) else type(examples).__name__
        check(isinstance(examples, dict) and len(examples) > 0, where, found, "a dict of arrays, {'x': ..., 'y': ...}")
        framed = [name for name, values in examples.items() if hasattr(values, "columns")]
        check(not framed, where, f"frames for {framed}", "of arrays; jfcl.data.from_arrays takes frames")
        for name, values in examples.items():
            check_unmasked(f"{where}: {name}", values)
        examples = {name: np.asarray(values) for name, values in examples.items()}
        examples = {name: values.astype(held_type(values.dtype), copy=False) for name, values in examples.items()}
        for name, values in examples.items():
            if values.dtype.kind == "f" and values.ndim <= 2:
                check_apart(f"{where}: {name}", values)
            fits = values.dtype.kind in "fiub" and values.ndim > 0
            check(fits, f"{where}: {name}", f"{values.dtype} {values.shape}", "numbers [m, ...]")
        if not self.fields:
            unknown = sorted(set(self.stored) - set(examples))
            check(not unknown, "stored", unknown, f"among the examples' names, {sorted(examples)}")
            for name, values in examples.items():
                check(_is_free(name), f"{where}: name", name, "a name that the store does not use itself")
                dtype = JAX_TYPES.get(values.dtype.name, values.dtype.name)
                given = self.stored.get(name, (dtype,))
                fits = isinstance(given, tuple | list) and given[0] in np.sctypeDict and (*given, 1.0, 0.0)[1] > 0
                fits = fits and np.dtype(given[0]).kind in "fiub"
                accepted = 'like ("uint8", 255.0, 0.0): a type, per_unit above 0, and offset'
                check(fits and len(given) <= 3, f"stored of {name}", given, accepted)
                field = Field(values.shape[1:], dtype, *given)
                levels = np.dtype(dtype).kind == "f" and np.dtype(field.stored).kind in "iu"
                accepted = f"a type alone: per_unit and offset are for {dtype} only where it is float kept as integers"
                plain = (field.per_unit, field.offset) == (1, 0)
                check(levels or plain, f"stored of {name}", given, accepted)
                self.fields[name] = field
                self.file(name, field.shape, field.stored)
        check(set(examples) == set(self.fields), where, sorted(examples), f"of the names {sorted(self.fields)}")
        lengths = {len(values) for values in examples.values()}
        check(len(lengths) == 1, where, sorted(lengths), "arrays of one length")
        for name, values in examples.items():
            self.files[name].write(encode(self.fields[name], values, name, where))
        return lengths.pop()

    def client(self, size: int) -> None:
        """Records the number of examples of the next client."""
        self.num_clients, self.total, self.largest = self.num_clients + 1, self.total + size, max(self.largest, size)
        self.offsets.write(np.array([self.total], np.int64))

    def finish(self, cluster: Any, about: dict[str, Any]) -> None:
        """Checks the number of clients and examples, and writes `store.json`."""
        check(self.num_clients > 0, "clients", "none", "at least one")
        check(self.largest > 0, "clients", f"{self.num_clients} without examples", "one with an example, at least")
        if cluster is not None:
            cluster = check_of_clients("cluster", cluster, self.num_clients)
            self.file("cluster", (), "int32").write(cluster)
        known = {
            "format": FORMAT,
            "num_clients": self.num_clients,
            "num_examples": self.total,
            "max_size": self.largest,
            "fields": {name: field._asdict() for name, field in self.fields.items()},
            "files": {name: file.finish() for name, file in self.files.items()},
        }
        write_json(self.path / "store.json", seal(about | known))

    def close(self) -> None:
        for file in self.files.values():
            file.handle.close()
