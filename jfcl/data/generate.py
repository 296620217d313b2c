"""Populations of any size: a data set divided among clients repeatedly, as often as they need.

Only the data set is held in memory as a whole; `jfcl.data.store` describes the files.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from jfcl.core import check, check_count, check_integers
from jfcl.core.files import new_folder
from jfcl.data import pools
from jfcl.data.build import mixed
from jfcl.data.dataset import Dataset
from jfcl.data.packing import LEVELS, is_exact
from jfcl.data.partition import OF_ONE_DIVISION, PARTITIONS
from jfcl.data.store import ClientStore

BLOCK = 4096  # examples that are transformed at once


def generate_store(
    path: str | Path,
    dataset: Dataset | str,
    *,
    num_clients: int,
    examples_per_client: int,
    about: dict[str, Any] | None = None,
    data_dir: str | None = None,
    progress: bool = False,
    **options: Any,
) -> tuple[ClientStore, ClientStore]:
    """Divides a data set among any number of clients with known clusters. Client `i` is in cluster `i mod K`.

    Every cluster divides the data set, transformed in its way, among its clients, as often as needed, each time in
    another random order. A client's examples are all different, and no example in a client's training data is in any
    client's test data. Where one division is enough, the clients are those of `jfcl.data.build(..., reuse="cluster")`.
    With a `mixture`, all clients divide the data set, as those of `build` do, and `store.cluster` is the cluster with
    the largest share; `mixture_of` has the shares.

    Args:
      path: a folder that does not exist yet, for two stores, `train` and `test`. Each holds every cluster's data set
        once, and clients as rows of it.
      num_clients: `N`, of any size.
      examples_per_client: training examples of each; on average, where `partition` makes sizes differ.
      about: further JSON values for `store.about["made"]`.
      progress: show a progress bar.
      dataset, data_dir: as in `jfcl.data.build`.
      options: those of `jfcl.data.build` that say how clusters differ and how a data set is divided (`num_clusters`,
        `heterogeneity`, `partition`, `alpha`, `mixture`, `seed`, ...); `partition` may be neither "writer" nor
        "distribution".

    Returns:
      `(train, test)`, of the same clients. Inputs are kept as bytes where that is exact. Cost for each million clients
      of 20 digits: about a minute and 75 MB.

    Raises:
      ValueError: more `examples_per_client` than a cluster has examples, and those of `jfcl.data.build`; nothing is
        left in `path` then.

    Example:
      >>> import tempfile
      >>> folder = tempfile.mkdtemp() + "/population"
      >>> train, test = generate_store(
      ...     folder, "digits", num_clients=1000, examples_per_client=20, num_clusters=4, heterogeneity="rotation"
      ... )
      >>> len(train), train.gather([5, 999]).examples["x"].shape, train.arrays["x"].shape
      (1000, (2, 20, 8, 8, 1), (5752, 8, 8, 1))
    """
    check_count("examples_per_client", examples_per_client)
    rules = pools.Rules(num_clients=num_clients, examples_per_client=examples_per_client, **options)
    pooled = pools.pool_dataset(dataset, rules, [name for name in PARTITIONS if name not in OF_ONE_DIVISION], data_dir)
    dataset = pooled.dataset
    nested = [name for name, part in dataset.train.items() if not isinstance(part, np.ndarray)]
    check(not nested, "dataset", nested, "of single arrays, since each is a file of the store")
    _check_room(Path(path), pooled)
    settings = {name: value for name, value in rules._asdict().items() if name != "distribution"}
    meta = {
        "num_classes": dataset.num_classes,
        "num_clusters": rules.num_clusters,
        **({} if dataset.table is None else {"table": dataset.table}),
        "description": f"{dataset.name}: {num_clients} clients of {examples_per_client} examples ({rules.partition}),"
        f" {rules.clusters_text}",
        "made": {"dataset": dataset.name} | settings | (about or {}),
    }
    by_cluster = [pools.of_cluster(pooled, k) for k in range(rules.num_clusters)]
    with new_folder(Path(path)) as folder:
        cluster = _write(folder, "train", by_cluster, meta, progress)
        _write(folder, "test", by_cluster, meta, progress, cluster)
    return open_stores(path)


def _write(
    folder: Path, part: str, by_cluster: list[pools.Pooled], meta: dict[str, Any], progress: bool, cluster: Any = None
) -> np.ndarray:
    """Writes the store `part`: the pool of every cell, transformed, and clients as rows of it; returns the clusters."""
    rules, transform = by_cluster[0].rules, pools.transform_of(by_cluster[0])
    num_clients, of_test = rules.num_clients, part == "test"
    kind = (np.arange(num_clients) % len(by_cluster)).astype(np.int32)
    cells, cluster = rules.cells(kind), kind if cluster is None else cluster
    of_part = [getattr(pooled, part) for pooled in by_cluster] * rules.variants

    def base() -> Iterator[pools.Examples]:
        for k, pool in enumerate(of_part):
            for first in range(0, len(pool.rows), BLOCK):
                yield transform(pools.take(pool.examples, pool.rows[first : first + BLOCK]), k)

    starts = np.cumsum([0, *(len(pool.rows) for pool in of_part)])

    def rows() -> Iterator[np.ndarray]:
        if rules.mixture is None:
            streams = [_deals(pooled, k, int((kind == k).sum()), of_test) for k, pooled in enumerate(by_cluster)]
            for k in cells.tolist():
                yield starts[k] + np.searchsorted(of_part[k].rows, next(streams[k % len(by_cluster)]))
            return
        # All cells have the same pool, which all clients divide.
        parts = mixed(_deals(by_cluster[0], 0, num_clients, of_test), cells, rules, of_test)
        for i, (part, of_rows, shares) in enumerate(parts):
            if not of_test:
                cluster[i] = shares.argmax()  # the store is closed after its last client
            yield starts[of_rows] + np.searchsorted(of_part[0].rows, part)

    console = Console(stderr=True)
    bar = {"console": console, "transient": True, "disable": not (progress and console.is_interactive)}
    tracked = track(rows(), f"building the {part} store", total=num_clients, **bar)
    ClientStore.create_indexed(folder / part, base(), tracked, stored=_compact(base()), cluster=cluster, **meta)
    return cluster


def _deals(pooled: pools.Pooled, cluster: int, num_clients: int, of_test: bool) -> Iterator[np.ndarray]:
    """Yields the rows of the clients of a cluster one by one, from as many divisions of its pool as they need."""
    most = max(len(pooled.train.rows) // pooled.rules.examples_per_client, 1)  # where there are fewer, `divide` says so
    at_once = min(most, num_clients)
    for deal in range(-(-num_clients // at_once)):
        group = cluster + pooled.rules.num_clusters * deal
        parts = pools.divide(pooled, at_once, group)
        yield from (pools.divide_test(pooled, parts, group) if of_test else parts)[: num_clients - deal * at_once]


def _check_room(path: Path, pooled: pools.Pooled) -> None:
    """Raises `ValueError` for a store larger than the disk, at a byte for each number of its base and each row."""
    parent, rules = next(folder for folder in path.absolute().parents if folder.exists()), pooled.rules
    copies = 0 if rules.selects else rules.num_clusters
    values = copies * pooled.dataset.train["x"].size // 2  # at least, without tests
    needed, free = values + rules.num_clients * (8 + rules.examples_per_client), shutil.disk_usage(parent).free
    accepted = f"at most what {parent} holds: the store needs {needed / 1e9:.1f} GB, of which {free / 1e9:.1f} are free"
    check(needed <= free, "num_clients", rules.num_clients, accepted)


def mixture_of(store: ClientStore, ids: Any = None) -> np.ndarray | None:
    """Returns the true shares of the clusters in the examples of clients that mix them, from `generate_store`.

    Args:
      store: that of training examples.
      ids: `[C]`, of some clients; default: all.

    Returns:
      `[C, K]` float32, as `Federation.mixture`; None for a store without a mixture.

    Raises:
      ValueError: ids outside `0..N-1`.

    Example:
      >>> import tempfile
      >>> folder, options = tempfile.mkdtemp() + "/population", {"num_clients": 30, "examples_per_client": 5}
      >>> options |= {"num_clusters": 2, "heterogeneity": "private_label", "mixture": 0.4}
      >>> train, test = generate_store(folder, "digits", **options)
      >>> mixture_of(train).shape, mixture_of(train, [3]).sum().item()
      ((30, 2), 1.0)
    """
    settings = store.about.get("made", {})
    if settings.get("mixture") is None or store.rows is None:
        return None
    ids = range(len(store)) if ids is None else check_integers("ids", ids, within=(0, len(store) - 1))
    rules = pools.Rules(**{name: settings.get(name) for name in pools.Rules._fields})
    count = rules.num_clusters
    per_cell = len(store.arrays["x"]) // (count * rules.variants)  # the store has the same examples once for each cell
    parts = [store.rows[store.offsets[i] : store.offsets[i + 1]] for i in ids]
    return np.array([np.bincount(rows // per_cell % count, minlength=count) / len(rows) for rows in parts], np.float32)


def open_stores(path: str | Path) -> tuple[ClientStore, ClientStore]:
    """Opens the `(train, test)` of `generate_store` in `path`.

    Example:
      >>> import tempfile
      >>> folder = tempfile.mkdtemp() + "/population"
      >>> _ = generate_store(folder, "digits", num_clients=30, examples_per_client=5)
      >>> [len(store) for store in open_stores(folder)]
      [30, 30]
    """
    return ClientStore.open(Path(path) / "train"), ClientStore.open(Path(path) / "test")


def _compact(parts: Iterator[dict[str, np.ndarray]]) -> dict[str, tuple]:
    """Returns the smallest types that hold every value of the examples exactly, for `ClientStore.create_indexed`."""
    levels, largest = set(LEVELS), {}  # largest: of integers from 0 on, otherwise below 0
    for part in parts:
        for name, values in part.items():
            whole = values.dtype.kind in "iu" and values.min(initial=0) >= 0 and largest.get(name, 0) >= 0
            largest[name] = max(largest.get(name, 0), int(values.max(initial=0))) if whole else -1
        levels = {level for level in levels if is_exact(part["x"], level)}
    stored: dict[str, tuple] = {name: (np.min_scalar_type(most).name,) for name, most in largest.items() if most >= 0}
    return stored | ({"x": ("uint8", float(max(levels)))} if levels else {})
