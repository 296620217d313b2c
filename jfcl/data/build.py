"""From a data set to clients: hold out, partition, assign to clusters, and transform every cluster's data.

The order of things is what keeps test data out of training. First the *base* examples are split into a
training and a test pool: the official test split where there is one, else `test_fraction` of the examples,
stratified by label (by writer, if clients are writers). Only then are examples given to clients and
transformed, so a base example that some client trains on, under any rotation, is in nobody's test set.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jfcl.core import Clients, aligned_zeros, check, check_choice, check_count, free_host_memory
from jfcl.data.dataset import Dataset
from jfcl.data.heterogeneity import HETEROGENEITY, SELECTIVE
from jfcl.data.partition import (
    OF_LABELS,
    PARTITIONS,
    by_label,
    by_sizes,
    by_writer,
    dirichlet,
    iid,
    power_law_sizes,
    stratified,
)
from jfcl.data.sources import load

# One stream of random numbers per decision, `default_rng([seed, stream, ...])`: no decision shifts another.
_HOLD_OUT, _SUBSAMPLE, _PARTITION, _ALLOT, _NEWCOMERS, _TRANSFORM = range(6)


class Federation(NamedTuple):
    """A population of clients with its truth. All arrays are NumPy, on the host.

    Attributes:
      train: `Clients` of `N` clients, examples `{"x": [N, M, ...], "y": [N, M]}`.
      test: `Clients` in the same order: held-out examples of each client's own distribution, none empty.
        `None` only where nothing was held out (some synthetic problems).
      cluster: `[N]` int32, the true cluster of every client.
      num_clusters: `K`.
      num_classes: number of labels, `None` for regression.
      input_shape: the shape of one input.
      split_hash: 16 hex digits that change whenever any client's examples, cluster or transformation change.
      description: one line.
      newcomers, newcomer_cluster: further clients `[N', M', ...]` that no model was trained on, and their
      clusters.
      truth: what is known about the true models (`[K, d]` for the linear regressions), else `None`.
    """

    train: Clients
    test: Clients | None
    cluster: np.ndarray
    num_clusters: int
    num_classes: int | None
    input_shape: tuple[int, ...]
    split_hash: str
    description: str
    newcomers: Clients | None = None
    newcomer_cluster: np.ndarray | None = None
    truth: Any = None


def build(
    dataset: Dataset | str,
    *,
    num_clients: int | None = None,
    num_clusters: int = 1,
    heterogeneity: str = "none",
    partition: str = "iid",
    examples_per_client: int | None = None,
    test_fraction: float = 0.2,
    reuse: str = "auto",
    newcomer_examples: int | None = None,
    seed: int = 0,
    labels_per_client: int = 2,
    alpha: float = 0.5,
    exponent: float = 1.0,
    min_size: int = 1,
    data_dir: str | None = None,
    rows: Callable[[int], slice] | None = None,
) -> Federation:
    """Divides a data set among clients with known clusters. Client `i` is in cluster `i mod K`.

    Args:
      dataset: a `Dataset`, or a name for `load(name, data_dir)`.
      num_clients: `N`; `None` only with `partition="writer"`: one client per writer.
      num_clusters: `K`, at most `N`; it need not divide `N`.
      heterogeneity: a name in `HETEROGENEITY`: how clusters differ.
      partition: a name in `PARTITIONS`: how a pool of examples is divided among clients. `labels_per_client`
        is for "label", `alpha` for "dirichlet", `exponent` for "power_law", `min_size` for the last two.
      examples_per_client: "iid": exactly so many each; "writer": at most so many of each writer's; others: so
        many on average. `None`: everything is used.
      test_fraction: the share held out where there is no official test split, or where clients are writers
        (each writer's own examples are then held out). In `(0, 1)`.
      reuse: "none": a base example belongs to one client. "cluster": every cluster divides the whole data set
        anew, so that each base example occurs `K` times, under `K` transformations (IFCA: `m n = 60000 K`).
        "auto": "none" if there are `N * examples_per_client` examples, else "cluster".
      newcomer_examples: if given, the test pool is also dealt to new clients with so many examples each:
        `floor(test / newcomer_examples)` in every cluster (IFCA: 10000 K / n test clients). They share
        examples with `test`, never with `train`. With "writer" they are the official test split's writers, at
        most so many examples each.
      seed: at least 0; everything is a function of it and the other arguments.
      data_dir: where `load` looks, for a dataset given by name.
      rows: which of the `N` clients to stack, for a process that holds only its own (`mapping.own_rows`): `train` and
        `test` then have those alone, with their ids. The rest of the result does not change.

    Returns:
      A `Federation`. The test examples of a cluster are divided among its clients in proportion to how often
      each has the label in training (the writer, for writers), so that a client's test labels follow its own
      distribution; where there are fewer test examples than clients, some are given to several. Memory: the
      padded arrays and the data set itself. Time: a few copies of the output.

    Raises:
      ValueError: an unknown name; more clusters than clients; too few examples; labels out of range; NaN; a
        heterogeneity or partition the data set does not support.

    Example:
      >>> fed = build("digits", num_clients=40, num_clusters=4, heterogeneity="rotation")
      >>> fed.train.examples["x"].shape, fed.cluster[:6].tolist(), int(fed.test.size.sum())
      ((40, 36, 8, 8, 1), [0, 1, 2, 3, 0, 1], 359)
    """
    check_choice("heterogeneity", heterogeneity, HETEROGENEITY)
    check_choice("partition", partition, PARTITIONS)
    check_choice("reuse", reuse, ["auto", "none", "cluster"])
    check_count("num_clusters", num_clusters)
    check_count("seed", seed, least=0, most=2**63 - 1)
    check(0 < test_fraction < 1, "test_fraction", test_fraction, "strictly between 0 and 1")
    for name, count in [
        ("examples_per_client", examples_per_client),
        ("newcomer_examples", newcomer_examples),
    ]:
        if count is not None:
            check_count(name, count)
    if num_clients is not None or partition != "writer":
        check_count("num_clients", num_clients)
    if num_clients is not None:
        check_enough_clients(num_clients, num_clusters)
    if isinstance(dataset, str):
        dataset = load(dataset, data_dir)
    check_dataset(dataset)
    if partition == "writer" and dataset.writer is None:
        raise ValueError(
            f"partition 'writer' needs writer ids, which {dataset.name!r} does not have; try 'mnist_writers'"
        )
    if partition in OF_LABELS or heterogeneity in SELECTIVE:
        what = f"partition {partition!r}" if heterogeneity not in SELECTIVE else f"heterogeneity {heterogeneity!r}"
        check(dataset.num_classes is not None, "dataset", dataset.name, f"a classification data set for {what}")

    # 1. Base pools. `kind` is what a client's test examples are matched to: labels, or writers.
    kind = dataset.writer["train"] if partition == "writer" else _labels(dataset, "train")
    if partition == "writer" or dataset.test is None:
        train_pool, test_pool = hold_out(kind, test_fraction, seed=(seed, _HOLD_OUT))
        test_source, test_kind = dataset.train, kind
    else:
        train_pool, test_pool = np.arange(len(dataset.train["y"])), np.arange(len(dataset.test["y"]))
        test_source, test_kind = dataset.test, _labels(dataset, "test")

    # 2. Groups: clients that divide one pool among themselves.
    if num_clients is None:
        both = np.intersect1d(kind[train_pool], kind[test_pool])  # a writer of one example has none to be tested on
        num_clients = int((both >= 0).sum())
        check_enough_clients(num_clients, num_clusters)
    _check_room(dataset, num_clients)
    cluster = (np.arange(num_clients) % num_clusters).astype(np.int32)
    if reuse == "auto":
        enough = examples_per_client is None or num_clients * examples_per_client <= len(train_pool)
        reuse = "none" if enough or partition == "writer" else "cluster"
    per_cluster = reuse == "cluster" or heterogeneity in SELECTIVE
    groups = [np.flatnonzero(cluster == k) for k in range(num_clusters)] if per_cluster else [np.arange(num_clients)]

    def of_cluster(pool, y, k):
        """The part of `pool` that clients of cluster `k` may have."""
        if heterogeneity not in SELECTIVE:
            return pool
        return HETEROGENEITY[heterogeneity][0](pool, y[pool], k, num_clusters, dataset.num_classes)[0]

    train_of: list[np.ndarray] = [np.empty(0, np.int64)] * num_clients
    test_of = list(train_of)
    for g, clients in enumerate(groups):
        train, test = (
            of_cluster(train_pool, dataset.train["y"], g),
            of_cluster(test_pool, test_source["y"], g),
        )
        if partition == "writer":
            parts = _writers(kind, train, test, len(clients), examples_per_client, seed, g)
        else:
            options = {
                "labels_per_client": labels_per_client,
                "alpha": alpha,
                "exponent": exponent,
                "min_size": min_size,
            }
            parts = _divide(partition, train, kind, len(clients), examples_per_client, seed, g, options, dataset.name)
        for i, part in zip(clients, parts, strict=True):
            train_of[i] = part
        shares = allot(test, test_kind, [kind[part] for part in parts], seed=(seed, _ALLOT, g))
        for i, share in zip(clients, shares, strict=True):
            test_of[i] = share

    # 3. Stack, and transform each client's examples on the way.
    own = slice(None) if rows is None else rows(num_clients)
    transform = (heterogeneity, num_clusters, dataset.num_classes, (seed, _TRANSFORM))
    new_of, new_cluster, newcomers = [], None, None
    if newcomer_examples is not None:
        new_source, new_of, new_cluster = _newcomers(
            dataset, partition, test_source, test_pool, of_cluster, newcomer_examples, num_clusters, seed
        )
        newcomers = stack(new_source, new_of, new_cluster, *transform)
    held = "official test split" if test_source is dataset.test else f"{test_fraction:g} held out"
    sizes = np.array([len(part) for part in train_of])
    each = f"{sizes.min()}" if sizes.min() == sizes.max() else f"{sizes.min()} to {sizes.max()}"
    return Federation(
        train=stack(dataset.train, train_of, cluster, *transform, own),
        test=stack(test_source, test_of, cluster, *transform, own),
        cluster=cluster,
        num_clusters=num_clusters,
        num_classes=dataset.num_classes,
        input_shape=tuple(dataset.train["x"].shape[1:]),
        split_hash=split_hash(
            [dataset.name, heterogeneity, num_clusters, seed], cluster, [*train_of, *test_of, *new_of]
        ),
        description=(
            f"{dataset.name}: {num_clients} clients of {each} examples ({partition}), "
            f"{num_clusters} cluster(s) ({heterogeneity}), {held}"
        ),
        newcomers=newcomers,
        newcomer_cluster=new_cluster,
    )


def hold_out(kind, fraction: float, *, seed) -> tuple[np.ndarray, np.ndarray]:
    """Splits indices into train and test, stratified: of every kind with `n > 1` examples, `round(fraction
    n)` are held out, at least 1 and at most `n - 1`; an only example stays in training.

    Args:
      kind: `[n]` integers (labels or writers).

    Returns:
      `(train, test)`, sorted index arrays that together hold `0 .. n-1`.

    Example:
      >>> train, test = hold_out(np.array([0, 0, 0, 0, 1, 1, 2]), 0.25, seed=0)
      >>> len(train), len(test)
      (5, 2)
    """
    rng = np.random.default_rng(seed)
    held = np.zeros(len(kind), bool)
    for value in np.unique(kind):
        of_kind = np.flatnonzero(kind == value)
        if len(of_kind) > 1:
            count = int(np.clip(round(fraction * len(of_kind)), 1, len(of_kind) - 1))
            held[rng.permutation(of_kind)[:count]] = True
    if not held.any():  # every kind occurs once (regression targets): nothing to stratify by
        held[rng.permutation(len(kind))[: max(1, round(fraction * len(kind)))]] = True
    return np.flatnonzero(~held), np.flatnonzero(held)


def allot(pool, kind, train_kinds, *, seed) -> list[np.ndarray]:
    """Divides test examples among clients so that each follows the mix of kinds it trains on.

    The examples of a kind are divided in proportion to how many training examples of it each client has,
    rounded so that rounding errors do not add up over kinds. A client left without any gets one of a kind
    that it trains on, which another client then also has.

    Args:
      pool: `[P]` indices of test examples; `kind[pool]` are their labels (or writers).
      train_kinds: a list of `N` arrays: the kinds of each client's training examples.

    Returns:
      List of `N` sorted index arrays, none empty.

    Raises:
      ValueError: a client none of whose kinds is in the pool.

    Example:
      >>> parts = allot(np.arange(6), np.array([0, 0, 0, 0, 1, 1]), [[0, 0, 0, 0], [1, 1]], seed=0)
      >>> [part.tolist() for part in parts]
      [[0, 1, 2, 3], [4, 5]]
    """
    rng = np.random.default_rng(seed)
    kinds, train_kind = np.unique(np.concatenate(train_kinds), return_inverse=True)
    row = np.repeat(np.arange(len(train_kinds)), [len(part) for part in train_kinds])
    owed = np.zeros(len(train_kinds))
    given: list[list[np.ndarray]] = [[] for _ in train_kinds]
    pool = pool[np.argsort(kind[pool], kind="stable")]
    begin, end = (np.searchsorted(kind[pool], kinds, side=side) for side in ("left", "right"))
    by_kind = np.argsort(train_kind, kind="stable")
    cuts = np.searchsorted(train_kind[by_kind], np.arange(len(kinds) + 1))
    for c in range(len(kinds)):
        clients, count = np.unique(row[by_kind[cuts[c] : cuts[c + 1]]], return_counts=True)
        examples = rng.permutation(pool[begin[c] : end[c]])
        share = count / count.sum() * len(examples)
        take = np.floor(share + 1e-9).astype(np.int64)
        extra = np.lexsort((rng.random(len(clients)), take - share - owed[clients]))[: len(examples) - take.sum()]
        take[extra] += 1
        owed[clients] += share - take
        for i, part in zip(clients, np.split(examples, np.cumsum(take)[:-1]), strict=True):
            given[i].append(part)
    parts = [np.sort(np.concatenate(part)).astype(np.int64) for part in given]
    for i, part in enumerate(parts):
        if not len(part):
            own = pool[np.isin(kind[pool], train_kinds[i])]
            if not len(own):
                raise ValueError(
                    f"no test examples for client {i}: none of the labels (or writers) it trains on is in "
                    f"the test pool of {len(pool)} examples; hold out more (test_fraction)"
                )
            parts[i] = rng.choice(own, 1)
    return parts


def stack(source, parts, cluster, heterogeneity, num_clusters, num_classes, seed, own=slice(None)) -> Clients:
    """`Clients` of rows `own` from all clients' indices; each one's examples are transformed straight into its row."""
    length = max(len(part) for part in parts)
    count = len(parts)
    ids = np.arange(count, dtype=np.int32)[own]
    parts, cluster = parts[own], cluster[own]
    size = np.array([len(part) for part in parts], np.int32)
    x = aligned_zeros((len(parts), length, *source["x"].shape[1:]), source["x"].dtype)
    y = aligned_zeros((len(parts), length, *source["y"].shape[1:]), source["y"].dtype)
    function = HETEROGENEITY[heterogeneity][0] if heterogeneity not in SELECTIVE else HETEROGENEITY["none"][0]
    for i, part in enumerate(parts):
        x[i, : size[i]], y[i, : size[i]] = function(
            source["x"][part], source["y"][part], int(cluster[i]), num_clusters, num_classes, seed
        )
    return Clients({"x": x, "y": y}, size, None if len(ids) == count else ids)


def split_hash(settings: list, cluster, parts) -> str:
    """16 hex digits of the SHA-256 over settings, clusters and every client's indices."""
    digest = hashlib.sha256(repr(settings).encode())
    digest.update(np.asarray(cluster, "<i4").tobytes())
    for part in parts:
        digest.update(np.int64(len(part)).astype("<i8").tobytes())
        digest.update(np.asarray(part, "<i8").tobytes())
    return digest.hexdigest()[:16]


def check_enough_clients(num_clients: int, num_clusters: int) -> None:
    """Every cluster needs a client."""
    if num_clusters > num_clients:
        raise ValueError(f"num_clusters must be at most the number of clients, {num_clients}, got {num_clusters}")


def _check_room(dataset: Dataset, num_clients: int) -> None:
    """`ValueError` for more clients than the memory can hold, of one example each: before anything is made of them."""
    needed, free = num_clients * (dataset.train["x"][:1].nbytes + 256), free_host_memory()  # 256: of its lists of rows
    if needed > free:
        raise ValueError(
            f"num_clients: {num_clients} clients need {num_clients} examples and {needed / 1e9:.1f} GB, but"
            f" {free / 1e9:.1f} GB are free; use fewer clients, or a population of them in a store"
        )


def check_dataset(dataset: Dataset) -> None:
    """Looks at a data set for what would spoil every run on it.

    Raises:
      ValueError: raw text; `x` and `y` of different lengths or empty; NaN or infinite inputs; labels outside
        `0..num_classes-1`; writer ids of another length.
    """
    for name, split in [("train", dataset.train), ("test", dataset.test)]:
        if split is None:
            continue
        where = f"data set {dataset.name!r} ({name})"
        x, y = split["x"], split["y"]
        if x.dtype.kind not in "fiu":
            raise ValueError(
                f"{where}: inputs must be numbers, got {x.dtype}; turn text into ids with jfcl.data.tokenize"
            )
        if len(x) != len(y) or not len(x):
            raise ValueError(f"{where}: needs as many labels as inputs and at least one, got {len(x)} and {len(y)}")
        # A sum of a row is finite exactly when its entries are (overflow of real data aside).
        if x.dtype.kind == "f" and not np.isfinite(x.reshape(len(x), -1).sum(axis=1)).all():
            bad = np.flatnonzero(~np.isfinite(x.reshape(len(x), -1).sum(axis=1)))
            raise ValueError(f"{where}: NaN or infinite inputs in {len(bad)} example(s), first at {bad[0]}")
        if dataset.num_classes is not None and y.dtype.kind not in "iu":
            raise ValueError(f"{where}: labels must be integers, got {y.dtype}")
        if dataset.num_classes is not None and (y.min() < 0 or y.max() >= dataset.num_classes):
            raise ValueError(f"{where}: labels must lie in 0..{dataset.num_classes - 1}, got {y.min()}..{y.max()}")
        if dataset.num_classes is None and not np.isfinite(y).all():
            raise ValueError(f"{where}: NaN or infinite targets")
        if dataset.writer is not None and len(dataset.writer[name]) != len(y):
            raise ValueError(f"{where}: {len(dataset.writer[name])} writer ids for {len(y)} examples")


def _labels(dataset: Dataset, split: str) -> np.ndarray:
    """What is stratified by: the labels, or nothing (one kind) for regression."""
    y = getattr(dataset, split)["y"]
    return y if dataset.num_classes is not None else np.zeros(len(y), np.int32)


def _divide(partition, pool, kind, num_clients, examples_per_client, seed, group, options, name) -> list[np.ndarray]:
    """The pool's indices, divided among the clients of one group."""
    if num_clients * (examples_per_client or 1) > len(pool):
        per_client = "" if examples_per_client is None else f" with {examples_per_client} examples each"
        raise ValueError(
            f"num_clients: {num_clients} clients{per_client} need {num_clients * (examples_per_client or 1)} "
            f"examples, but {name!r} has {len(pool)} training examples for them; use fewer clients, fewer "
            "examples_per_client, or reuse='cluster'"
        )
    stream = (seed, _PARTITION, group)
    if partition == "iid":
        parts = iid(len(pool), num_clients, seed=stream, examples_per_client=examples_per_client)
    elif partition == "stratified":
        parts = stratified(kind[pool], num_clients, seed=stream, examples_per_client=examples_per_client)
    else:
        if examples_per_client is not None:
            chosen = np.random.default_rng((seed, _SUBSAMPLE, group)).permutation(len(pool))
            pool = pool[np.sort(chosen[: num_clients * examples_per_client])]
        if partition == "label":
            wanted = options["labels_per_client"]
            parts = by_label(kind[pool], num_clients, labels_per_client=wanted, seed=stream)
        elif partition == "dirichlet":
            alpha, min_size = options["alpha"], options["min_size"]
            parts = dirichlet(kind[pool], num_clients, alpha=alpha, min_size=min_size, seed=stream)
        else:
            exponent, min_size = options["exponent"], options["min_size"]
            sizes = power_law_sizes(len(pool), num_clients, exponent=exponent, min_size=min_size, seed=stream)
            parts = by_sizes(len(pool), sizes, seed=(*stream, 1))
    return [pool[part] for part in parts]


def _writers(writer, train, test, num_clients, examples_per_client, seed, group) -> list[np.ndarray]:
    """One writer per client, among those with training and test examples in these pools."""
    eligible = np.where(np.isin(writer[train], writer[test]), writer[train], -1)
    parts = by_writer(eligible, num_clients=num_clients, seed=(seed, _PARTITION, group))
    if examples_per_client is not None:
        rng = np.random.default_rng((seed, _SUBSAMPLE, group))
        parts = [np.sort(rng.permutation(part)[:examples_per_client]) for part in parts]
    return [train[part] for part in parts]


def _newcomers(dataset, partition, source, pool, of_cluster, examples, num_clusters, seed):
    """Source, indices and clusters of new clients, made from test examples only."""
    if partition == "writer":
        if dataset.test is None:
            raise ValueError(f"newcomer_examples: {dataset.name!r} has no test split with writers of its own")
        parts = by_writer(dataset.writer["test"], seed=0)
        rng = np.random.default_rng((seed, _NEWCOMERS))
        parts = [np.sort(rng.permutation(part)[:examples]) for part in parts]
        cluster = (np.arange(len(parts)) % num_clusters).astype(np.int32)
        everything = np.arange(len(dataset.test["y"]))
        allowed = [set(of_cluster(everything, dataset.test["y"], k).tolist()) for k in range(num_clusters)]
        kept = [[j for j in part if j in allowed[k]] for part, k in zip(parts, cluster, strict=True)]
        rows = [i for i, part in enumerate(kept) if part]
        return dataset.test, [np.array(kept[i], np.int64) for i in rows], cluster[rows]
    parts, cluster = [], []
    for k in range(num_clusters):
        own = of_cluster(pool, source["y"], k)
        count = len(own) // examples
        if count == 0:
            raise ValueError(
                f"newcomer_examples must be at most {len(own)}, the test examples of cluster {k}, got {examples}"
            )
        new = iid(len(own), count, seed=(seed, _NEWCOMERS, k), examples_per_client=examples)
        parts += [own[part] for part in new]
        cluster += [k] * count
    return source, parts, np.array(cluster, np.int32)
