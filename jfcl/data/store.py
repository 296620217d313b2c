"""A population on the host: ragged, memory-mapped clients, of which a simulation has one cohort at a time."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import jax
import numpy as np
from rich.console import Console
from rich.progress import track

from jfcl.core import INT32, Clients, aligned_zeros, check, check_clients, check_integers, max_examples, shape_struct
from jfcl.core.checks import require
from jfcl.core.files import new_folder
from jfcl.core.options import Interval, Range
from jfcl.core.plain import check_path, check_plain
from jfcl.data.store_files import Field, StoreWriter, decode, read_store

Examples = dict[str, Any]  # arrays [m, ...] by name
ROWS_IN_MEMORY = 2**28  # bytes of rows of all clients; more is memory-mapped


class ClientStore:
    """A population of clients on the host; `gather` returns any of them as `Clients`.

    `create`, `create_indexed`, `from_clients` and `jfcl.data.generate_store` make a store; `open` opens one.

    Attributes:
      path: its folder; `None` for one in memory.
      fields, arrays: the `Field` of each array of the examples, and the arrays as they are stored, memory-mapped.
      offsets, rows, cluster: as in `jfcl.data.store_files`; `rows` and `cluster` may be `None`.
      max_size: the number of examples of the largest client, to which cohorts are padded.
      about: the content of `store.json`: `num_classes`, `description`, the arguments of `generate_store`, and others.
      hash: 16 hex digits that change whenever the content does.

    Example:
      >>> store = ClientStore.from_clients(Clients({"x": np.float32([[1, 2], [3, 0]])}, np.int32([2, 1])))
      >>> len(store), store.max_size, store.gather([1]).examples["x"].tolist()
      (2, 2, [[3.0, 0.0]])
    """

    def __init__(self, path, fields, arrays, offsets, rows=None, cluster=None, about=None, hash="", max_size=None):
        self.path, self.fields, self.arrays = path, fields, arrays
        self.offsets, self.rows, self.cluster = offsets, rows, cluster
        self.about, self.hash = about or {}, hash
        self.max_size = int(np.diff(offsets).max()) if max_size is None else max_size

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def sizes(self, ids: Any = None) -> np.ndarray:
        """Returns `[N]` int32, the number of examples of every client, or `[C]`, of those with `ids`."""
        if ids is None:
            return np.diff(self.offsets).astype(np.int32)
        ids = np.asarray(ids, np.int64)  # 255 + 1 is 0 in a byte
        return (self.offsets[ids + 1] - self.offsets[ids]).astype(np.int32)

    def gather(self, ids: Any) -> Clients:
        """Returns the clients `ids` (`[C]` integers) as a cohort, in that order, padded to `max_size`.

        Returns:
          `Clients` of NumPy arrays with these ids, in memory that JAX on a CPU uses without a copy. Cost: one pass over
          the cohort's examples, no loop over clients; other clients are not read.

        Raises:
          ValueError: ids outside `0..N-1`.
        """
        ids = check_integers("ids", ids, within=(0, len(self) - 1))
        size, slots = self.sizes(ids), np.arange(self.max_size)
        real = slots[None, :] < size[:, None]
        source = (self.offsets[ids][:, None] + slots[None, :])[real]
        if self.rows is not None:
            source = self.rows[source]
        target = None if len(source) == real.size else np.flatnonzero(real)

        def stack(field: Field, array: np.ndarray) -> np.ndarray:
            out = aligned_zeros((len(ids), self.max_size, *field.shape), field.dtype)
            flat = out.reshape(-1, *field.shape)
            values = flat if target is None else np.empty((len(source), *field.shape), field.dtype)
            if field.stored == field.dtype:
                np.take(array, source, axis=0, out=values, mode="clip")  # "raise" would go through a copy
            else:
                decode(field, array[source], values)
            if target is not None:
                flat[target] = values
            return out

        examples = {name: stack(field, self.arrays[name]) for name, field in self.fields.items()}
        return Clients(examples, size, ids.astype(np.int32))

    @classmethod
    def from_clients(cls, clients: Clients, *, cluster: Any = None, **about: Any) -> Self:
        """Returns a store in memory of `clients`, with examples in a dict and ids `0..N-1`."""
        clients = clients._replace(size=np.asarray(clients.size))  # a list is right here
        n = len(clients.size)
        rows = clients.id is None or np.array_equal(clients.id, np.arange(n))
        check(rows, "clients.id", clients.id, f"left out, or 0..{n - 1}, the clients' rows in the store")
        single = isinstance(clients.examples, dict) and all(hasattr(x, "dtype") for x in clients.examples.values())
        check(single, "clients.examples", jax.tree.structure(clients.examples), "a dict of single arrays")
        check_clients(clients, allow_empty=True)
        real = np.arange(max_examples(clients))[None, :] < clients.size[:, None]
        arrays = {name: np.asarray(values)[real] for name, values in clients.examples.items()}
        fields = {name: Field(a.shape[1:], a.dtype.name, a.dtype.name) for name, a in arrays.items()}
        offsets = np.concatenate([[0], np.cumsum(clients.size, dtype=np.int64)])
        cluster = None if cluster is None else check_integers("cluster", cluster, n, within=INT32).astype(np.int32)
        digest = hashlib.sha256(offsets.tobytes())
        for array in (*(arrays[name] for name in sorted(arrays)), *(() if cluster is None else (cluster,))):
            digest.update(np.ascontiguousarray(array).tobytes())
        return cls(None, fields, arrays, offsets, None, cluster, about, digest.hexdigest()[:16], max_examples(clients))

    @classmethod
    def create(cls, path: str | Path, clients: Iterable[Examples], *, cluster=None, **about):
        """Writes clients one after the other, in bounded memory; the folder appears after the last one.

        Args:
          path: a folder that does not exist yet.
          clients: one dict of `[m_i, ...]` arrays per client; all with the same names and shapes of an example.
          cluster: `[N]` integers, the true clusters.
          about: further content of `store.json`: `num_classes`, `description`, and other JSON values.

        Raises:
          ValueError: no clients, arrays of one client that differ in length, names or shapes that change, NaN or
            infinity, numbers that the type of the first client does not hold (64 bits become 32), `cluster` of another
            length. Nothing is left on disk then.

        Example:
          >>> import tempfile
          >>> clients = ({"x": np.full((m, 2), 0.5, np.float32)} for m in (3, 1))
          >>> store = ClientStore.create(tempfile.mkdtemp() + "/s", clients)
          >>> store.arrays["x"].shape, store.gather([0, 1]).size.tolist()
          ((4, 2), [3, 1])
        """
        with _writing(path, {}, cluster, about) as writer:
            for i, client in enumerate(clients):
                writer.sizes.append(writer.examples(client, f"client {i}"))
        return cls.open(path)

    @classmethod
    def create_indexed(
        cls, path: str | Path, base: Iterable[Examples], rows: Iterable[Any], *, stored=None, cluster=None, **about
    ) -> Self:
        """Writes a store of clients that share the examples of a base.

        A million clients of one data set then need at most four bytes for each example, and the data set once for every
        way in which clusters transform it.

        Args:
          base: dicts of `[n, ...]` arrays, written one after the other: row `r` is the `r`-th of all their examples.
          rows: `[m_i]` integers per client, its examples among them.
          stored: smaller types on disk: `{"x": ("uint8", 255.0)}` for the type and `per_unit` of `Field`.
          path, cluster, about: as in `create`.
        """
        with _writing(path, stored or {}, cluster, about) as writer:
            count = sum(writer.examples(part, "base") for part in base)
            out = writer.file("rows", (), np.min_scalar_type(max(count - 1, 0)).name)
            for i, part in enumerate(rows):
                if len(part):
                    part = check_integers(f"rows of client {i}", part, within=(0, count - 1))
                    out.write(part.astype(out.dtype))
                writer.sizes.append(len(part))
        return cls.open(path)

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Opens the store in `path`, memory-mapped: only `store.json` and the places of clients' examples are read.

        A store of another format, and a file that is missing or truncated, is refused; `verify` reads everything.
        """
        check_path("path", path)
        path = Path(path)
        check_plain(path)
        if not (path / "store.json").exists():
            raise ValueError(f"{path} holds no store of clients: store.json is missing")
        meta, fields, arrays = read_store(path)
        digest = hashlib.sha256(json.dumps([meta["files"], meta["fields"]], sort_keys=True).encode())
        places = [arrays.get(name) for name in ("offsets", "rows", "cluster")]
        return cls(path, fields, {name: arrays[name] for name in fields}, *places, meta, digest.hexdigest()[:16])

    def verify(self, *, progress: bool = False) -> None:
        """Raises `ValueError` for a file whose numbers do not have the SHA-256 in `store.json`; all files are read.

        Args:
          progress: show a progress bar.
        """
        if self.path is None:
            return
        arrays = self.arrays | {"offsets": self.offsets, "rows": self.rows, "cluster": self.cluster}
        digests = {name: hashlib.sha256() for name in self.about["files"]}
        parts = [(name, first) for name in digests for first in range(0, len(arrays[name]), 65536)]
        bar = {"console": Console(stderr=True), "transient": True, "disable": not progress}
        for name, first in track(parts, f"verifying {self.path}", **bar):
            part = np.ascontiguousarray(arrays[name][first : first + 65536])
            digests[name].update(part.reshape(-1).view(np.uint8))
        for name, digest in digests.items():
            actual, expected = digest.hexdigest(), self.about["files"][name]["sha256"]
            if actual != expected:
                raise ValueError(f"{self.path / name}.npy was changed: expected SHA-256 {expected}, found {actual}")


@contextlib.contextmanager
def _writing(path: str | Path, stored: dict[str, tuple], cluster: Any, about: dict[str, Any]) -> Iterator[StoreWriter]:
    """Yields the writer of a store in `path`, which appears at the end."""
    with new_folder(Path(path)) as folder, contextlib.closing(StoreWriter(folder, stored)) as writer:
        yield writer
        writer.finish(cluster, about)


def check_fits(store: ClientStore, other: ClientStore, name: str) -> None:
    """Raises `ValueError` unless two stores have the same number of clients and the same kind of examples."""
    require(len(store) == len(other), f"{name} has {len(other)} clients, and the store {len(store)}")
    types, actual = ({of: (f.shape, f.dtype) for of, f in part.fields.items()} for part in (store, other))
    require(types.items() <= actual.items(), f"{name} has examples of shapes and types {actual}, and the store {types}")


def check_store_labels(store: ClientStore, num_classes: int, name: str) -> None:
    """Raises `ValueError` unless the labels `y` of a store are integers in `0..num_classes-1`; reads them all."""
    field, y = store.fields["y"], store.arrays["y"]
    check(np.dtype(field.dtype).kind in "iu", f"{name}: y", field.dtype, "labels of an integer type")
    low, high = int(y.min()), int(y.max())
    check(low >= 0 and high < num_classes, f"{name}: labels", [low, high], f"in 0..{num_classes - 1}")


def example_shapes(store: ClientStore, cohort: int) -> Clients:
    """Returns a cohort's arrays as `jax.ShapeDtypeStruct`, without reading any."""
    shapes = {name: (cohort, store.max_size, *field.shape) for name, field in store.fields.items()}
    examples = {name: shape_struct(store.fields[name], shape) for name, shape in shapes.items()}
    vector = jax.ShapeDtypeStruct((cohort,), np.int32)
    return Clients(examples, vector, vector)


class Population(NamedTuple):
    """Clients of any number on the host, how cohorts of them are drawn, and which of them are evaluated.

    Attributes:
      clients: the training examples of all clients.
      cohort: `C`, the number of clients in a round. (Methods have an option `cohort` for clients on the device.)
      test_clients: test examples of the same clients; without them nothing is evaluated.
      sampling: "uniform", "size" or "stratified", as in `jfcl.simulation.cohorts.make_sampler`.
      dropout: the probability, in [0, 1), that a sampled client does not answer. It then counts as a client without
        examples, and its row stays as it is.
      stragglers: over-selection, 0 or more: `C (1 + stragglers)` clients are drawn (rounded, a half to the even
        number), and the first `C` answers, in random order, make up the round. The others count as drawn (`asked`), but
        their work and bytes do not count.
      remember: for a method that keeps each client's last update (`cfl` with `cohort=C`): the number of clients outside
        the cohort, those with the latest updates, that are compared with the cohort. Default: 1,000, or all. Their
        rows, which hold the updates, are copied to the device in every round; their examples are not.
      join: `(key, clients) -> state`, which gives new clients their first rows; default: `algorithm.init`. Required if
        that learns models from the clients: for IFCA with restarts, the init of IFCA without; the first cohort then
        decides.
      change: `(clients) -> clients`, of NumPy arrays: applied to every cohort after it is gathered, for example
        `jfcl.attacks.poison` for malicious clients.
      evaluate: the number of evaluated clients, drawn once; or their ids.
      rows_in_memory: bytes of rows of all clients beyond which they are memory-mapped, in the run's folder if it has
        one. No effect on a run that is resumed.

    Example:
      >>> import numpy as np
      >>> people = Clients({"x": np.zeros((100, 4, 2), np.float32), "y": np.zeros((100, 4), np.int32)}, np.full(100, 4))
      >>> Population(ClientStore.from_clients(people), cohort=10, stragglers=0.5).asked
      15
    """

    clients: ClientStore
    cohort: Annotated[int, Range(1)]
    test_clients: ClientStore | None = None
    sampling: str = "uniform"
    dropout: Annotated[float, Interval("[0, 1)")] = 0.0
    stragglers: Annotated[float, Interval("[0, inf)")] = 0.0
    remember: Annotated[int | None, Range(0)] = None
    join: Callable[[jax.Array, Clients], Any] | None = None
    change: Callable[[Clients], Clients] | None = None
    evaluate: int | Sequence[int] = 1000
    rows_in_memory: Annotated[float, Interval("[0, inf]")] = ROWS_IN_MEMORY

    @property
    def asked(self) -> int:
        """The number of clients that are drawn for a round."""
        return round(self.cohort * (1 + self.stragglers))
