"""A population on the host: ragged, memory-mapped clients, of which a cohort at a time becomes `Clients`.

A store is a folder, written whole or not at all:

    store.json    format, counts, the fields' shapes and types, bytes and SHA-256 of every file
    x.npy, y.npy  `[total, ...]`, all examples, one after the other, in a compact type
    offsets.npy   `[N + 1]` int64: the examples of client `i` are rows `offsets[i] : offsets[i + 1]`
    rows.npy      `[total]`, only of an indexed store: then those are entries of `rows`, which point into `x` and `y`
    cluster.npy   `[N]` int32, the true clusters, where they are known

In an indexed store many clients share examples: a million clients of a data set that is dealt again and again need
at most four bytes for each example, and the data set itself once for every way in which clusters change it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console
from rich.progress import Progress

from jfcl.core import Clients, aligned_zeros, check, check_clients, check_count
from jfcl.core.files import read_json, seal, sync_folder, write_json

FORMAT = 1
JAX_TYPES = {"float64": "float32", "int64": "int32", "uint64": "uint32"}  # jax's own, unless 64 bits are enabled


class Field(NamedTuple):
    """How one array of the examples is kept: `value = stored / per_unit + offset`.

    Attributes:
      shape: of one example.
      dtype: what a cohort gets.
      stored: the type on disk; where it is not `dtype`, values are rounded to the nearest that it holds.
      per_unit: 255 for pixels that are kept as bytes.
      offset: what 0 stands for.
    """

    shape: tuple[int, ...]
    dtype: str
    stored: str
    per_unit: float = 1.0
    offset: float = 0.0


def encode(field: Field, values: np.ndarray, name: str, where: str) -> np.ndarray:
    """`values` as they are stored; `ValueError` for NaN, infinity, another shape, or what the type cannot hold."""
    check(values.shape[1:] == field.shape, f"{where}: {name}", values.shape[1:], f"of shape {field.shape} an example")
    if values.dtype.kind == "f":
        check(np.isfinite(values).all(), f"{where}: {name}", "NaN or infinity", "finite")
    if np.dtype(field.stored).kind not in "iu":
        with np.errstate(over="ignore"):
            stored = values.astype(field.stored, casting="same_kind")
        check(np.isfinite(stored).all(), f"{where}: {name}", "too large a number", f"what {field} can hold")
        return stored
    as_given = field.per_unit == 1 and field.offset == 0
    levels = values if as_given else (values - field.offset) * field.per_unit
    if levels.dtype.kind == "f":
        whole = not as_given or field.dtype != field.stored or (levels == np.rint(levels)).all()
        check(whole, f"{where}: {name}", "fractions", f"whole numbers, as of the first client ({field.stored})")
        levels = np.rint(levels)
    limits = np.iinfo(field.stored)
    fits = not levels.size or (levels.min() >= limits.min and levels.max() <= limits.max)
    check(fits, f"{where}: {name}", (values.min(), values.max()) if not fits else None, f"what {field} can hold")
    return levels.astype(field.stored)


def decode(field: Field, stored: np.ndarray, out: np.ndarray) -> None:
    """Writes the values of `stored` `[n, ...]` into `out` `[n, ...]`."""
    if np.dtype(field.dtype).kind != "f" or field.stored == field.dtype:
        np.copyto(out, stored, casting="unsafe")
        return
    # Divided rather than multiplied: 255ths of a pixel are then the very numbers that division made of its bytes.
    np.divide(stored, np.dtype(field.dtype).type(field.per_unit), out=out, dtype=field.dtype)
    if field.offset:
        out += np.dtype(field.dtype).type(field.offset)


class ClientStore:
    """A population of clients on the host; `gather` makes `Clients` of any of them.

    Make one with `create`, `create_indexed` or `from_clients`, or with `jfcl.data.generate_store`; `open` it again.

    Attributes:
      path: its folder; `None` for one in memory.
      fields: `{"x": Field, "y": Field}`.
      arrays: the examples as they are stored, memory-mapped.
      offsets, rows, cluster: as in the module's description; `rows` and `cluster` may be `None`.
      max_size: the number of examples of the largest client: what cohorts are padded to.
      about: what else `store.json` says: `num_classes`, `description`, and how it was made.
      hash: 16 hex digits that change whenever anything in it does.

    Example:
      >>> store = ClientStore.from_clients(Clients({"x": np.float32([[1, 2], [3, 0]])}, np.int32([2, 1])))
      >>> len(store), store.max_size, store.gather([1]).examples["x"].tolist()
      (2, 2, [[3.0, 0.0]])
    """

    def __init__(self, path, fields, arrays, offsets, rows=None, cluster=None, about=None, hash=""):
        self.path, self.fields, self.arrays = path, fields, arrays
        self.offsets, self.rows, self.cluster = offsets, rows, cluster
        self.about, self.hash = about or {}, hash
        self.max_size = int(self.about["max_size"] if "max_size" in self.about else np.diff(offsets).max())

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def sizes(self, ids: Any = None) -> np.ndarray:
        """`[N]` int32: the number of examples of every client, or `[C]`, of those with `ids`."""
        if ids is None:
            return np.diff(self.offsets).astype(np.int32)
        ids = np.asarray(ids, np.int64)  # 255 + 1 is 0 in a byte
        return (self.offsets[ids + 1] - self.offsets[ids]).astype(np.int32)

    def gather(self, ids: Any, *, pad_to: int | None = None) -> Clients:
        """The clients `ids` (`[C]` integers) as a cohort, in that order.

        Args:
          pad_to: the length `M` of the example axis; default: `max_size`, so that all cohorts have one shape.

        Returns:
          `Clients` of NumPy arrays in memory that jax on a CPU takes over without a copy; ids as given. Cost: one pass
          over the cohort's examples, no loop over clients; other clients are not touched.

        Raises:
          ValueError: ids that are no clients; a client larger than `pad_to`.
        """
        ids = np.asarray(ids)
        check(ids.ndim == 1 and ids.dtype.kind in "iu" and len(ids) > 0, "ids", ids, "a vector of integers, not empty")
        check(ids.min() >= 0 and ids.max() < len(self), "ids", (ids.min(), ids.max()), f"in 0..{len(self) - 1}")
        length = self.max_size if pad_to is None else pad_to
        size = self.sizes(ids)
        check(size.max() <= length, "pad_to", pad_to, f"at least {size.max()}, the largest client's examples")
        slots = np.arange(length)
        real = slots[None, :] < size[:, None]
        source = (self.offsets[ids][:, None] + slots[None, :])[real]
        if self.rows is not None:
            source = self.rows[source]
        target = None if len(source) == real.size else np.flatnonzero(real)

        def stack(field: Field, array: np.ndarray) -> np.ndarray:
            out = aligned_zeros((len(ids), length, *field.shape), field.dtype)
            flat = out.reshape(-1, *field.shape)
            if target is None and field.stored == field.dtype:
                np.take(array, source, axis=0, out=flat, mode="clip")  # "raise" would go through a copy
            elif target is None:
                decode(field, array[source], flat)
            else:
                values = np.empty((len(source), *field.shape), field.dtype)
                decode(field, array[source], values)
                flat[target] = values
            return out

        examples = {name: stack(field, self.arrays[name]) for name, field in self.fields.items()}
        return Clients(examples, size, ids.astype(np.int32))

    def clients(self) -> Iterator[dict[str, np.ndarray]]:
        """Every client's examples, one client at a time, without padding."""
        for i in range(len(self)):
            size = int(self.offsets[i + 1] - self.offsets[i])
            examples = self.gather(np.array([i]), pad_to=max(size, 1)).examples
            yield {name: values[0, :size] for name, values in examples.items()}

    @classmethod
    def from_clients(cls, clients: Clients, *, cluster: Any = None, **about: Any) -> ClientStore:
        """A store in memory of `clients` (`x` and the like by name), whose names must be their rows."""
        n = len(clients.size)
        named = clients.id is None or np.array_equal(clients.id, np.arange(n))
        check(named, "clients.id", clients.id, f"left out, or 0..{n - 1}: a store's clients are named by their place")
        check(isinstance(clients.examples, dict), "clients.examples", type(clients.examples), "a dict of arrays")
        check_clients(clients, allow_empty=True)
        size = np.asarray(clients.size)
        arrays, fields = {}, {}
        for name, values in clients.examples.items():
            values = np.asarray(values)
            arrays[name] = values[np.arange(values.shape[1])[None, :] < size[:, None]]
            fields[name] = Field(values.shape[2:], values.dtype.name, values.dtype.name)
            m = values.shape[1]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(size, dtype=np.int64)])
        digest = hashlib.sha256(offsets.tobytes())
        for name in sorted(arrays):
            digest.update(np.ascontiguousarray(arrays[name]).tobytes())
        cluster = None if cluster is None else _check_cluster(cluster, n)
        return cls(None, fields, arrays, offsets, None, cluster, {"max_size": m} | about, digest.hexdigest()[:16])

    @classmethod
    def create(
        cls,
        path: str | Path,
        clients: Iterable[dict[str, Any]],
        *,
        stored: dict[str, tuple] | None = None,
        cluster: Any = None,
        **about: Any,
    ) -> ClientStore:
        """Writes clients as they come, in bounded memory; the folder appears when the last one has been written.

        Args:
          path: a folder that is not there yet.
          clients: one dict of `[m_i, ...]` arrays per client; all with the same names and shapes of an example.
          stored: a compact type for some: `{"x": ("uint8", 255.0, 0.0)}` for type, `per_unit` and `offset` of `Field`;
            the last two may be left out, and are for floats kept as integers only. Values are rounded to what it
            holds. Default: as given (64 bits become 32).
          cluster: `[N]` integers, the true clusters.
          about: kept in `store.json`: `num_classes`, `description`, and whatever is JSON.

        Raises:
          ValueError: no clients, arrays of one client that differ in length, names or shapes that change, NaN or
            infinity, values that do not fit the compact type, `cluster` of another length. Nothing is left then.

        Example:
          >>> import tempfile
          >>> people = ({"x": np.full((m, 2), 0.5, np.float32)} for m in (3, 1))
          >>> store = ClientStore.create(tempfile.mkdtemp() + "/s", people, stored={"x": ("uint8", 16.0)})
          >>> store.arrays["x"].dtype.name, store.arrays["x"].shape, store.gather([0, 1]).size.tolist()
          ('uint8', (4, 2), [3, 1])
        """

        def fill(writer: _Writer) -> None:
            for i, client in enumerate(clients):
                writer.client(writer.examples(client, f"client {i}"))

        return cls._written(path, fill, stored, cluster, about)

    @classmethod
    def create_indexed(
        cls,
        path: str | Path,
        base: Iterable[dict[str, Any]],
        rows: Iterable[np.ndarray],
        *,
        stored: dict[str, tuple] | None = None,
        cluster: Any = None,
        **about: Any,
    ) -> ClientStore:
        """A store whose clients are rows of a base that many of them share.

        Args:
          base: dicts of `[n, ...]` arrays, written one after the other: row `r` is the `r`-th of all their examples.
          rows: `[m_i]` integers per client, its examples among them.
          path, stored, cluster, about: as in `create`.

        Raises:
          ValueError: rows outside the base, and what `create` refuses.
        """

        def fill(writer: _Writer) -> None:
            count = sum(writer.examples(part, "base") for part in base)
            out = writer.file("rows", (), np.min_scalar_type(max(count - 1, 0)).name)
            for i, mine in enumerate(rows):
                mine = np.asarray(mine)
                fits = (
                    mine.ndim == 1
                    and mine.dtype.kind in "iu"
                    and (not len(mine) or (mine.min() >= 0 and mine.max() < count))
                )
                check(fits, f"rows of client {i}", mine, f"a vector of integers in 0..{count - 1}")
                out.write(mine.astype(out.dtype))
                writer.client(len(mine))

        return cls._written(path, fill, stored, cluster, about)

    @classmethod
    def _written(cls, path, fill, stored, cluster, about) -> ClientStore:
        path = Path(path)
        if path.exists():
            raise ValueError(f"path must be a folder that is not there yet, got {str(path)!r}")
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        try:
            with contextlib.closing(_Writer(scratch, stored or {})) as writer:
                fill(writer)
                writer.finish(cluster, about)
            os.rename(scratch, path)
            sync_folder(path.parent)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return cls.open(path)

    @classmethod
    def open(cls, path: str | Path, *, verify: bool = False) -> ClientStore:
        """The store in `path`, memory-mapped: nothing is read but `store.json` and where clients' examples lie.

        Args:
          verify: read everything and compare its SHA-256.

        Raises:
          ValueError: no store, one of another format, a file that is missing, was cut short or (with `verify`) changed.
        """
        path = Path(path)
        if not (path / "store.json").exists():
            raise ValueError(f"{path} holds no store of clients: store.json is missing")
        about = read_json(path / "store.json", check_format=FORMAT)
        missing = [name for name in ("files", "fields") if not isinstance(about.get(name), dict)]
        check(not missing, f"{path / 'store.json'}", f"none of {missing}", "whole: files and fields")
        arrays = {}
        for name, wanted in about["files"].items():
            file = path / f"{name}.npy"
            found = file.stat().st_size if file.exists() else 0
            if found != wanted["bytes"]:
                what = "was cut short or changed" if file.exists() else "is missing"
                raise ValueError(f"{file} {what}: expected {wanted['bytes']} bytes, found {found}")
            # A plain array over the map: NumPy's memmap objects cost a Python call at every indexing.
            empty = 0 in wanted["shape"]
            try:
                arrays[name] = np.load(file, mmap_mode=None if empty else "r").view(np.ndarray)
            except (
                ValueError,
                EOFError,
                OSError,
                TypeError,
                SyntaxError,
                tokenize.TokenError,
            ) as error:  # of a header that was changed
                raise ValueError(f"{file} was changed: {error}") from None
        fields = {
            name: Field(tuple(f["shape"]), f["dtype"], f["stored"], f["per_unit"], f["offset"])
            for name, f in about["fields"].items()
        }
        _check_types(path, arrays, about["files"], fields)
        _check_places(path, arrays["offsets"], arrays.get("rows"), len(arrays[next(iter(fields))]))
        digest = hashlib.sha256(json.dumps([about["files"], about["fields"]], sort_keys=True).encode())
        store = cls(
            path,
            fields,
            {name: arrays[name] for name in fields},
            arrays["offsets"],
            arrays.get("rows"),
            arrays.get("cluster"),
            about,
            digest.hexdigest()[:16],
        )
        if verify:
            store.verify()
        return store

    def verify(self, *, progress: bool = False) -> None:
        """Reads all files of the store and compares their SHA-256; of a store in memory, nothing.

        Args:
          progress: show a bar where there is much to read.

        Raises:
          ValueError: a file was changed since the store was made; the message names it.
        """
        if self.path is None:
            return
        arrays = self.arrays | {"offsets": self.offsets, "rows": self.rows, "cluster": self.cluster}
        total = sum(array.nbytes for array in arrays.values() if array is not None)
        bar = Progress(console=Console(stderr=True), transient=True, disable=not progress or total < 2**28)
        with bar:
            line = bar.add_task(f"verifying {self.path}", total=total)
            for name, wanted in self.about["files"].items():
                digest = hashlib.sha256()
                for first in range(0, len(arrays[name]), 65536):
                    part = np.ascontiguousarray(arrays[name][first : first + 65536])
                    digest.update(part.reshape(-1).view(np.uint8))
                    bar.advance(line, part.nbytes)
                if digest.hexdigest() != wanted["sha256"]:
                    said = f"expected SHA-256 {wanted['sha256']}, found {digest.hexdigest()}"
                    raise ValueError(f"{self.path / name}.npy was changed: {said}")


def _check_types(path: Path, arrays: dict[str, np.ndarray], files: dict[str, Any], fields: dict[str, Field]) -> None:
    """`ValueError` where a file's header, which its digest leaves out, is not the one that was written."""
    count = len(arrays[next(iter(fields))])
    types = {"offsets": "int64", "cluster": "int32", "rows": np.min_scalar_type(max(count - 1, 0))}
    types |= {name: field.stored for name, field in fields.items()}
    for name, array in arrays.items():
        if array.dtype != np.dtype(types[name]) or list(array.shape) != files[name]["shape"]:
            raise ValueError(f"{path / name}.npy was changed: it holds {array.dtype} {array.shape}")


def _check_places(path: Path, offsets: np.ndarray, rows: np.ndarray | None, count: int) -> None:
    """`ValueError` if clients' examples were to lie where there are none: `gather` counts on it."""
    ends = len(rows) if rows is not None else count
    whole = len(offsets) > 1 and offsets[0] == 0 and offsets[-1] == ends and bool((np.diff(offsets) >= 0).all())
    if not whole:
        raise ValueError(f"{path / 'offsets.npy'} was changed: it does not divide {ends} examples among clients")
    if rows is not None and len(rows) and rows.max() >= count:
        raise ValueError(f"{path / 'rows.npy'} was changed: row {rows.max()} of {count} examples")


def _check_cluster(cluster: Any, n: int) -> np.ndarray:
    cluster = np.asarray(cluster)
    fits = cluster.shape == (n,) and cluster.dtype.kind in "iu"
    check(fits, "cluster", f"{cluster.dtype} {cluster.shape}", f"integers of shape ({n},), one for every client")
    return cluster.astype(np.int32)


class _File:
    """A `.npy` file that grows by rows: NumPy leaves room in the header for the number of them."""

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


class _Writer:
    """The files of a store that is being written."""

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
        """Writes some examples; returns how many."""
        check(isinstance(examples, dict) and len(examples) > 0, where, examples, "a dict of arrays")
        examples = {name: np.asarray(values) for name, values in examples.items()}
        if not self.fields:
            unknown = sorted(set(self.stored) - set(examples))
            check(not unknown, "stored", unknown, f"among the examples' names, {sorted(examples)}")
            for name, values in examples.items():
                reserved = name in ("offsets", "rows", "cluster")
                check(
                    name.isidentifier() and not reserved, f"{where}: name", name, "a name that is not the store's own"
                )
                check(values.dtype.kind in "fiub", f"{where}: {name}", values.dtype, "numbers")
                dtype = JAX_TYPES.get(values.dtype.name, values.dtype.name)
                field = Field(values.shape[1:], dtype, *self.stored.get(name, (dtype,)))
                levels = np.dtype(dtype).kind == "f" and np.dtype(field.stored).kind in "iu"
                check(
                    levels or (field.per_unit, field.offset) == (1, 0),
                    f"stored of {name}",
                    self.stored.get(name),
                    f"a type alone: per_unit and offset are for {dtype} only where it is float kept as integers",
                )
                self.fields[name] = field
                self.file(name, values.shape[1:], self.fields[name].stored)
        check(set(examples) == set(self.fields), where, sorted(examples), f"of the names {sorted(self.fields)}")
        lengths = {len(values) for values in examples.values()}
        check(len(lengths) == 1, where, sorted(lengths), "arrays of one length")
        for name, values in examples.items():
            self.files[name].write(encode(self.fields[name], values, name, where))
        return lengths.pop()

    def client(self, size: int) -> None:
        """Notes that the next client has `size` examples."""
        self.num_clients, self.total, self.largest = self.num_clients + 1, self.total + size, max(self.largest, size)
        self.offsets.write(np.array([self.total], np.int64))

    def finish(self, cluster: Any, about: dict[str, Any]) -> None:
        """Checks what can be checked only now, and writes `store.json`."""
        check(self.num_clients > 0, "clients", "none", "at least one")
        check(self.largest > 0, "clients", f"{self.num_clients} without examples", "one with an example, at least")
        if cluster is not None:
            cluster = _check_cluster(cluster, self.num_clients)
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


def check_fits(store: ClientStore, other: ClientStore, name: str) -> None:
    """Two stores of the same clients, row by row, and of the same kind of examples, or `ValueError`."""
    check(len(store) == len(other), name, f"{len(other)} clients", f"of as many clients as the store, {len(store)}")
    for field, mine in store.fields.items():
        theirs = other.fields.get(field)
        same = theirs is not None and (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        check(same, f"{name}: {field}", theirs, f"of shape {mine.shape} and type {mine.dtype}, as in the store")


def check_cohort(store: ClientStore, cohort: int) -> None:
    """A cohort that the store can give, or `ValueError`."""
    check_count("cohort", cohort)
    check(cohort <= len(store), "cohort", cohort, f"at most the {len(store)} clients of the store")


def example_shapes(store: ClientStore, cohort: int) -> Clients:
    """What a cohort of `cohort` clients looks like, as `jax.ShapeDtypeStruct`: nothing is read."""
    examples = {
        name: jax.ShapeDtypeStruct((cohort, store.max_size, *field.shape), field.dtype)
        for name, field in store.fields.items()
    }
    vector = jax.ShapeDtypeStruct((cohort,), np.int32)
    return Clients(examples, vector, vector)
