"""Populations of any size: a data set dealt to clients again and again, or a synthetic problem drawn in blocks.

Nothing is ever held whole but the data set itself; see `jfcl.data.store` for the files.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jfcl.core import check, check_choice, check_count
from jfcl.core.files import sync_folder
from jfcl.data.build import (
    _ALLOT,
    _HOLD_OUT,
    _TRANSFORM,
    _divide,
    _labels,
    allot,
    check_dataset,
    check_enough_clients,
    hold_out,
)
from jfcl.data.dataset import Dataset
from jfcl.data.heterogeneity import HETEROGENEITY, SELECTIVE
from jfcl.data.partition import OF_LABELS, PARTITIONS
from jfcl.data.sources import load
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
) -> tuple[ClientStore, ClientStore]:
    """Divides a data set among any number of clients with known clusters. Client `i` is in cluster `i mod K`.

    Every cluster deals the data set, changed its way, to its clients; when it is used up, it is shuffled and dealt
    anew. A client's own examples are all different, and no example that anybody trains on is in anybody's test set.
    As long as one deal is enough, clients are those of `jfcl.data.build(..., reuse="cluster")`.

    Args:
      path: a folder that is not there yet; gets two stores, `train` and `test`.
      dataset: a `Dataset`, or a name for `load(name, data_dir)`.
      num_clients: `N`, however large.
      examples_per_client: training examples of each; on average, where `partition` makes sizes differ.
      num_clusters, heterogeneity, partition, test_fraction, seed, labels_per_client, alpha, exponent, min_size: as in
        `jfcl.data.build`; `partition` may not be "writer".
      about: what else `store.about["made"]` is to say, JSON-like.
      layout: "index": each cluster's data set is kept once, clients as rows of it. "rows": every client's examples are
        written out.

    Returns:
      `(train, test)`, of the same clients; test examples of a deal are divided among its clients by what they train on.
      Inputs are kept as bytes where that loses nothing. Cost for each million clients of 20 digits: half a minute and
      72 MB; with layout "rows" five times that and 1.6 GB.

    Raises:
      ValueError: an unknown name, more clusters than clients, more `examples_per_client` than a cluster has examples,
        what `jfcl.data.build` refuses. Nothing is left in `path` then.

    Example:
      >>> import tempfile
      >>> folder = tempfile.mkdtemp() + "/population"
      >>> train, test = generate_store(
      ...     folder, "digits", num_clients=1000, examples_per_client=20, num_clusters=4, heterogeneity="rotation"
      ... )
      >>> len(train), train.gather([5, 999]).examples["x"].shape, train.arrays["x"].shape
      (1000, (2, 20, 8, 8, 1), (5752, 8, 8, 1))
    """
    check_choice("heterogeneity", heterogeneity, HETEROGENEITY)
    check_choice("partition", partition, [name for name in PARTITIONS if name != "writer"])
    check_choice("layout", layout, LAYOUTS)
    for name, count in (
        ("num_clients", num_clients),
        ("num_clusters", num_clusters),
        ("examples_per_client", examples_per_client),
    ):
        check_count(name, count)
    check_count("seed", seed, least=0, most=2**63 - 1)
    check(0 < test_fraction < 1, "test_fraction", test_fraction, "strictly between 0 and 1")
    check_enough_clients(num_clients, num_clusters)
    if isinstance(dataset, str):
        dataset = load(dataset, data_dir)
    check_dataset(dataset)
    values = 0 if heterogeneity in SELECTIVE else num_clusters * dataset.train["x"].size // 2  # at least, without tests
    _check_room(Path(path), values, num_clients, examples_per_client)
    uses_labels = partition in OF_LABELS or heterogeneity in SELECTIVE
    check(dataset.num_classes is not None or not uses_labels, "dataset", dataset.name, "a classification data set")

    kind, test_kind, test_source = _labels(dataset, "train"), None, dataset.test
    if dataset.test is None:
        pool, test_pool = hold_out(kind, test_fraction, seed=(seed, _HOLD_OUT))
        test_source, test_kind = dataset.train, kind
    else:
        pool, test_pool = np.arange(len(dataset.train["y"])), np.arange(len(dataset.test["y"]))
        test_kind = _labels(dataset, "test")

    def own(pool: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
        """The part of `pool` that each cluster's clients may have."""
        if heterogeneity not in SELECTIVE:
            return [pool] * num_clusters
        choose = HETEROGENEITY[heterogeneity][0]
        return [choose(pool, y[pool], k, num_clusters, dataset.num_classes)[0] for k in range(num_clusters)]

    pools, test_pools = own(pool, dataset.train["y"]), own(test_pool, test_source["y"])
    options = {"labels_per_client": labels_per_client, "alpha": alpha, "exponent": exponent, "min_size": min_size}

    def dealt(k: int, test: bool) -> Iterator[np.ndarray]:
        """The clients of cluster `k` one by one: their indices in the data set, or in its test split."""
        wanted = len(range(k, num_clients, num_clusters))
        at_once = len(pools[k]) // examples_per_client
        if at_once == 0:
            raise ValueError(
                f"examples_per_client must be at most {len(pools[k])}, the training examples of cluster {k}, got"
                f" {examples_per_client}"
            )
        for deal in itertools.count():
            count = min(at_once, wanted) if deal == 0 else at_once
            group = k + num_clusters * deal
            parts = _divide(partition, pools[k], kind, count, examples_per_client, seed, group, options, dataset.name)
            if test:
                train_kinds = [kind[part] for part in parts]
                parts = allot(test_pools[k], test_kind, train_kinds, seed=(seed, _ALLOT, group))
            yield from parts[:wanted]
            wanted -= count
            if wanted <= 0:
                return

    function = HETEROGENEITY[heterogeneity][0] if heterogeneity not in SELECTIVE else HETEROGENEITY["none"][0]

    def changed(source: dict[str, np.ndarray], rows: np.ndarray, k: int) -> dict[str, np.ndarray]:
        seeds = (seed, _TRANSFORM)
        x, y = function(source["x"][rows], source["y"][rows], k, num_clusters, dataset.num_classes, seeds)
        return {"x": x, "y": y}

    def base(source, pools) -> Iterator[dict[str, np.ndarray]]:
        for k, pool in enumerate(pools):
            for first in range(0, len(pool), BLOCK):
                yield changed(source, pool[first : first + BLOCK], k)

    def write(folder: Path, source, pools, test: bool) -> None:
        streams = [dealt(k, test) for k in range(num_clusters)]
        turns = (next(streams[i % num_clusters]) for i in range(num_clients))
        common = {
            "stored": _compact(base(source, pools)),
            "cluster": (np.arange(num_clients) % num_clusters).astype(np.int32),
            "num_classes": dataset.num_classes,
            "num_clusters": num_clusters,
            "description": f"{dataset.name}: {num_clients} clients of {examples_per_client} examples ({partition}),"
            f" {num_clusters} cluster(s) ({heterogeneity})",
            "made": {
                "dataset": dataset.name,
                "num_clients": num_clients,
                "examples_per_client": examples_per_client,
                "num_clusters": num_clusters,
                "heterogeneity": heterogeneity,
                "partition": partition,
                "test_fraction": test_fraction,
                "seed": seed,
            }
            | options
            | (about or {}),
        }
        if layout == "index":
            starts = np.concatenate([[0], np.cumsum([len(pool) for pool in pools])])
            rows = (
                starts[i % num_clusters] + np.searchsorted(pools[i % num_clusters], part)
                for i, part in enumerate(turns)
            )
            ClientStore.create_indexed(folder, base(source, pools), rows, **common)
        else:
            clients = (changed(source, part, i % num_clusters) for i, part in enumerate(turns))
            ClientStore.create(folder, clients, **common)

    def fill(folder: Path) -> None:
        write(folder / "train", dataset.train, pools, False)
        write(folder / "test", test_source, test_pools, True)

    return _both(path, fill)


def _check_room(path: Path, values: int, num_clients: int, examples_per_client: int) -> None:
    """`ValueError` for a store larger than the disk, at a byte for each of its base's `values` and each row."""
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
    """A population of one of the papers' synthetic problems, drawn block by block.

    Args:
      path: a folder that is not there yet; gets two stores, `train` and `test`.
      name: "ifca_regression", "fc_regression" or "xor_toy", of `jfcl.data`.
      num_clients: `N`, however large. The clients of the regressions are those that the function makes; those of
        "xor_toy" depend on `block`.
      block: clients drawn at once.
      options: of that function; not the number of clients.

    Returns:
      `(train, test)`, of the same clients.

    Raises:
      ValueError: an unknown name, and what the function refuses.

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
    check_enough_clients(num_clients, num_clusters)
    block = -(-max(block, num_clusters) // num_clusters) * num_clusters  # whole clusters: client i is in i mod K
    count = {"clients_per_cluster": block // num_clusters} if name == "fc_regression" else {"num_clients": block}
    cluster = (np.arange(num_clients) % num_clusters).astype(np.int32)

    def clients(part: str) -> Iterator[dict[str, np.ndarray]]:
        for first in range(0, num_clients, block):
            made = SYNTHETIC[name](**count, **options, seed=seed, first_client=first)
            data = getattr(made, part)
            for i in range(min(block, num_clients - first)):
                yield {field: values[i, : data.size[i]] for field, values in data.examples.items()}

    def fill(folder: Path) -> None:
        for part in ("train", "test"):
            ClientStore.create(
                folder / part,
                clients(part),
                cluster=cluster,
                num_classes=2 if name == "xor_toy" else None,
                num_clusters=num_clusters,
                description=f"{name}: {num_clients} clients, {num_clusters} clusters",
                made={"dataset": name, "num_clients": num_clients, "seed": seed} | options,
            )

    return _both(path, fill)


def open_stores(path: str | Path) -> tuple[ClientStore, ClientStore]:
    """The `(train, test)` that `generate_store` or `synthetic_store` left in `path`."""
    return ClientStore.open(Path(path) / "train"), ClientStore.open(Path(path) / "test")


def _both(path: str | Path, fill) -> tuple[ClientStore, ClientStore]:
    """Has `fill(folder)` write both stores, into a folder that gets its name when they are whole."""
    path = Path(path)
    if path.exists():
        raise ValueError(f"path must be a folder that is not there yet, got {str(path)!r}")
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        fill(scratch)
        os.rename(scratch, path)
        sync_folder(path.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return open_stores(path)


def _compact(parts: Iterator[dict[str, np.ndarray]]) -> dict[str, tuple]:
    """The smallest types that keep every value of the examples as it is, for `ClientStore.create`."""
    levels, largest = set(LEVELS), {"x": 0, "y": 0}
    whole = {"x": True, "y": True}  # integers from 0 on
    for part in parts:
        for name, values in part.items():
            whole[name] = whole[name] and values.dtype.kind in "iu" and values.min() >= 0
            largest[name] = max(largest[name], int(values.max())) if whole[name] else 0
        x = part["x"]
        levels = {p for p in levels if x.dtype.kind == "f" and x.min() >= 0 and x.max() * p <= 255 and _same(x, p)}
    stored: dict[str, tuple] = {name: (np.min_scalar_type(largest[name]).name,) for name in whole if whole[name]}
    return stored | ({"x": ("uint8", max(levels))} if levels else {})


def _same(x: np.ndarray, per_unit: float) -> bool:
    return np.array_equal(np.divide(np.rint(x * per_unit).astype(np.uint8), x.dtype.type(per_unit), dtype=x.dtype), x)
