"""Populations of any size: a data set divided among clients repeatedly, or a synthetic problem drawn in blocks.

Only the data set is held in memory as a whole; `jfcl.data.store_files` describes the files.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress, TaskID

from jfcl.core import check, check_at_most_clients, check_choice, check_count
from jfcl.core.files import new_folder
from jfcl.data.dataset import Dataset
from jfcl.data.heterogeneity import SELECTIVE
from jfcl.data.partition import OF_ONE_DIVISION, PARTITIONS
from jfcl.data.split import (
    Examples,
    Pool,
    Split,
    SplitPlan,
    divide,
    divide_test,
    of_cluster,
    split_dataset,
    take,
    transform_of,
)
from jfcl.data.store import ClientStore
from jfcl.data.synthetic import fc_regression, ifca_regression, xor_toy

LAYOUTS = ("index", "rows")
SYNTHETIC = {"ifca_regression": ifca_regression, "fc_regression": fc_regression, "xor_toy": xor_toy}
BLOCK = 4096  # examples that are transformed at once
LEVELS = (1.0, 16.0, 255.0)  # steps per unit at which inputs are tried as bytes: tokens, digits, pixels


def generate_store(
    path: str | Path,
    dataset: Dataset | str,
    *,
    num_clients: int,
    examples_per_client: int,
    num_clusters: int = 1,
    heterogeneity: str = "none",
    partition: str = "iid",
    test_fraction: float = 0.2,
    layout: str = "index",
    seed: int = 0,
    labels_per_client: int = 2,
    alpha: float = 0.5,
    exponent: float = 1.0,
    min_size: int = 1,
    about: dict[str, Any] | None = None,
    data_dir: str | None = None,
    progress: bool = False,
) -> tuple[ClientStore, ClientStore]:
    """Divides a data set among any number of clients with known clusters. Client `i` is in cluster `i mod K`.

    Every cluster divides the data set, transformed in its way, among its clients, as often as needed, each time in
    another random order. A client's examples are all different, and no example in a client's training data is in any
    client's test data. Where one division is enough, the clients are those of `jfcl.data.build(..., reuse="cluster")`.

    Args:
      path: a folder that is not there yet, for two stores, `train` and `test`.
      dataset: a `Dataset`, or a name for `load(name, data_dir)`.
      num_clients: `N`, of any size.
      examples_per_client: training examples of each; on average, where `partition` makes sizes differ.
      num_clusters, heterogeneity, partition, test_fraction, seed, labels_per_client, alpha, exponent, min_size: as in
        `jfcl.data.build`; `partition` may be neither "writer" nor
        "distribution".
      about: further JSON values for `store.about["made"]`.
      layout: "index": each cluster's data set is kept once, clients as rows of it. "rows": every client's examples are
        written in full.
      progress: show a progress bar.

    Returns:
      `(train, test)`, of the same clients; the test examples of a division are divided as those of `jfcl.data.build`.
      Inputs are kept as bytes where that is exact. Cost for each million clients of 20 digits: half a minute and 72 MB;
      with layout "rows" five times as long and 1.6 GB.

    Raises:
      ValueError: an unknown name, more clusters than clients, more `examples_per_client` than a cluster has examples,
        and the errors of `jfcl.data.build`. Nothing is left in `path` then.

    Example:
      >>> import tempfile
      >>> folder = tempfile.mkdtemp() + "/population"
      >>> train, test = generate_store(
      ...     folder, "digits", num_clients=1000, examples_per_client=20, num_clusters=4, heterogeneity="rotation"
      ... )
      >>> len(train), train.gather([5, 999]).examples["x"].shape, train.arrays["x"].shape
      (1000, (2, 20, 8, 8, 1), (5752, 8, 8, 1))
    """
    check_choice("layout", layout, LAYOUTS)
    check_count("num_clients", num_clients)
    check_count("examples_per_client", examples_per_client)
    options = {"labels_per_client": labels_per_client, "alpha": alpha, "exponent": exponent, "min_size": min_size}
    made = {
        "num_clients": num_clients,
        "examples_per_client": examples_per_client,
        "num_clusters": num_clusters,
        "heterogeneity": heterogeneity,
        "partition": partition,
        "test_fraction": test_fraction,
        "seed": seed,
    }
    partitions = [name for name in PARTITIONS if name not in OF_ONE_DIVISION]
    split = split_dataset(dataset, **made, partitions=partitions, data_dir=data_dir, options=options)
    dataset = split.dataset
    nested = [name for name, part in dataset.train.items() if not isinstance(part, np.ndarray)]
    check(not nested, "dataset", nested, "of single arrays, since each is a file of the store")
    values = 0 if heterogeneity in SELECTIVE else num_clusters * dataset.train["x"].size // 2  # at least, without tests
    _check_room(Path(path), values, num_clients, examples_per_client)
    known = {
        "num_classes": dataset.num_classes,
        "num_clusters": num_clusters,
        **({} if dataset.table is None else {"table": dataset.table}),
        "description": f"{dataset.name}: {num_clients} clients of {examples_per_client} examples ({partition}),"
        f" {num_clusters} cluster(s) ({heterogeneity})",
        "made": {"dataset": dataset.name} | made | options | (about or {}),
    }
    splits = [of_cluster(split, k) for k in range(num_clusters)]
    fewest, k = min((len(own.train.rows), k) for k, own in enumerate(splits))
    accepted = f"at most {fewest}, the training examples of cluster {k}"
    check(examples_per_client <= fewest, "examples_per_client", examples_per_client, accepted)

    cluster = (np.arange(num_clients) % num_clusters).astype(np.int32)
    sizes = np.bincount(cluster)
    console = Console(stderr=True)
    bar = Progress(console=console, transient=True, disable=not (progress and console.is_interactive))
    with new_folder(Path(path)) as folder, bar:
        line = bar.add_task("building the store", total=2 * num_clients)
        for is_test, part in enumerate(("train", "test")):
            streams = [_deals(own, k, int(sizes[k]), is_test) for k, own in enumerate(splits)]
            rows = (next(streams[k]) for k in cluster)  # computed client by client
            plan = SplitPlan(_counted(rows, bar, line), cluster, transform_of(split))
            _write(folder / part, plan, [own.test if is_test else own.train for own in splits], layout, known)
    return open_stores(path)


def _counted(parts: Iterator[np.ndarray], bar: Progress, line: TaskID) -> Iterator[np.ndarray]:
    """Yields `parts`, and moves the bar after every 1,024 of them."""
    for i, part in enumerate(parts):
        if i % 1024 == 1023:
            bar.advance(line, 1024)
        yield part


def _deals(split: Split, cluster: int, num_clients: int, of_test: bool) -> Iterator[np.ndarray]:
    """Yields the rows of the clients of a cluster one by one, from as many divisions of its pool as they need."""
    at_once = len(split.train.rows) // split.examples_per_client
    for deal in itertools.count():
        count = min(at_once, num_clients) if deal == 0 else at_once
        group = cluster + split.num_clusters * deal
        parts = divide(split, count, group)
        yield from (divide_test(split, parts, group) if of_test else parts)[:num_clients]
        num_clients -= count
        if num_clients <= 0:
            return


def _write(folder: Path, plan: SplitPlan, pools: list[Pool], layout: str, about: dict[str, Any]) -> None:
    """Writes a plan as a store: each cluster's pool once and clients as rows of it, or every client's examples."""

    def base() -> Iterator[Examples]:
        for k, pool in enumerate(pools):
            for first in range(0, len(pool.rows), BLOCK):
                yield plan.transform(take(pool.examples, pool.rows[first : first + BLOCK]), k)

    about = {"stored": _compact(base()), "cluster": plan.cluster, **about}
    clients = zip(plan.cluster.tolist(), plan.rows, strict=True)
    if layout == "index":
        starts = np.concatenate([[0], np.cumsum([len(pool.rows) for pool in pools])])
        rows = (starts[k] + np.searchsorted(pools[k].rows, part) for k, part in clients)
        ClientStore.create_indexed(folder, base(), rows, **about)
    else:
        ClientStore.create(folder, (plan.transform(take(pools[k].examples, part), k) for k, part in clients), **about)


def _check_room(path: Path, values: int, num_clients: int, examples_per_client: int) -> None:
    """Raises `ValueError` for a store larger than the disk, at a byte for each of its base's `values` and each row."""
    there = next(folder for folder in path.absolute().parents if folder.exists())
    needed, free = values + num_clients * (8 + examples_per_client), shutil.disk_usage(there).free
    if needed > free:
        raise ValueError(
            f"num_clients: a store of {num_clients} clients needs {needed / 1e9:.1f} GB in {there}, of which"
            f" {free / 1e9:.1f} GB are free; use fewer clients, clusters or examples"
        )


def synthetic_store(
    path: str | Path, name: str, *, num_clients: int, seed: int = 0, block: int = 1024, **options: Any
) -> tuple[ClientStore, ClientStore]:
    """Draws a population of one of the papers' synthetic problems, block by block.

    Args:
      path: a folder that is not there yet, for two stores, `train` and `test`.
      name: "ifca_regression", "fc_regression" or "xor_toy", of `jfcl.data`.
      num_clients: `N`, of any size. The clients of the regressions are those of the function; those of "xor_toy" depend
        on `block`.
      block: the number of clients drawn at once.
      options: of that function, except for the number of clients.

    Returns:
      `(train, test)`, of the same clients.

    Raises:
      ValueError: an unknown name, and the errors of the function.

    Example:
      >>> import tempfile
      >>> train, _ = synthetic_store(tempfile.mkdtemp() + "/p", "ifca_regression", num_clients=50, dim=3)
      >>> train.gather([49]).examples["x"].shape
      (1, 100, 3)
    """
    check_choice("name", name, SYNTHETIC)
    check_count("num_clients", num_clients)
    check_count("block", block)
    num_clusters = 2 if name == "xor_toy" else options.get("num_clusters", 4 if name == "fc_regression" else 2)
    check_count("num_clusters", num_clusters)
    check_at_most_clients("num_clusters", num_clusters, num_clients)
    block = -(-max(block, num_clusters) // num_clusters) * num_clusters  # whole clusters: client i is in i mod K
    count = {"clients_per_cluster": block // num_clusters} if name == "fc_regression" else {"num_clients": block}
    cluster = (np.arange(num_clients) % num_clusters).astype(np.int32)

    def clients(part: str) -> Iterator[dict[str, np.ndarray]]:
        for first in range(0, num_clients, block):
            made = SYNTHETIC[name](**count, **options, seed=seed, first_client=first)
            data = getattr(made, part)
            for i in range(min(block, num_clients - first)):
                yield {field: values[i, : data.size[i]] for field, values in data.examples.items()}

    about = {
        "num_classes": 2 if name == "xor_toy" else None,
        "num_clusters": num_clusters,
        "description": f"{name}: {num_clients} clients, {num_clusters} clusters",
        "made": {"dataset": name, "num_clients": num_clients, "seed": seed} | options,
    }
    with new_folder(Path(path)) as folder:
        for part in ("train", "test"):
            ClientStore.create(folder / part, clients(part), cluster=cluster, **about)
    return open_stores(path)


def open_stores(path: str | Path) -> tuple[ClientStore, ClientStore]:
    """Opens the `(train, test)` of `generate_store` or `synthetic_store` in `path`.

    Example:
      >>> import tempfile
      >>> folder = tempfile.mkdtemp() + "/population"
      >>> _ = generate_store(folder, "digits", num_clients=30, examples_per_client=5)
      >>> train, test = open_stores(folder)
      >>> len(train), train.max_size
      (30, 5)
    """
    return ClientStore.open(Path(path) / "train"), ClientStore.open(Path(path) / "test")


def _compact(parts: Iterator[dict[str, np.ndarray]]) -> dict[str, tuple]:
    """Returns the smallest types that hold every value of the examples exactly, for `ClientStore.create`."""

    def is_exact(x, per_unit):
        stored = np.rint(x * per_unit).astype(np.uint8)
        return np.array_equal(np.divide(stored, x.dtype.type(per_unit), dtype=x.dtype), x)

    levels, largest = set(LEVELS), {}  # largest: of integers from 0 on, otherwise below 0
    for part in parts:
        for name, values in part.items():
            whole = values.dtype.kind in "iu" and values.min(initial=0) >= 0 and largest.get(name, 0) >= 0
            largest[name] = max(largest.get(name, 0), int(values.max(initial=0))) if whole else -1
        x = part["x"]
        levels = {p for p in levels if x.dtype.kind == "f" and x.min() >= 0 and x.max() * p <= 255 and is_exact(x, p)}
    stored: dict[str, tuple] = {name: (np.min_scalar_type(most).name,) for name, most in largest.items() if most >= 0}
    return stored | ({"x": ("uint8", max(levels))} if levels else {})
