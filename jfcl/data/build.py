"""Federations: clients of a data set, stacked in memory, with their true clusters."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jfcl.core import Clients, aligned_zeros, check, check_at_most_clients, check_choice, check_count, free_host_memory
from jfcl.core.checks import require
from jfcl.data import pools
from jfcl.data.dataset import Dataset
from jfcl.data.drift import Drift, check_pattern, drift_pattern
from jfcl.data.heterogeneity import OF_CLASSES
from jfcl.data.partition import PARTITIONS, apportioned, by_writer, dirichlet_draw, iid

Rows = list[np.ndarray]  # of each client the rows of its examples in a data set
STEPS, MIXTURE = 100, 101  # streams of random numbers beside those of `pools`


class Federation(NamedTuple):
    """A population of clients with its true clusters. All arrays are NumPy, on the host.

    Attributes:
      train: `Clients` of `N` clients, examples `{"x": [N, M, ...], "y": [N, M]}`, and the further arrays of the data
        set under their names.
      test: `Clients` in the same order: test examples of each client's distribution, none empty; `None` only where
        nothing was held out.
      cluster, num_clusters: `[N]` int32, the true cluster of every client, and `K`.
      num_classes, input_shape: the number of labels, `None` for regression, and the shape of one input.
      split_hash: 16 hex digits that change with a client's rows of the data set, its cluster or its transformation, but
        not with the values in these rows.
      description: one line.
      newcomers, newcomer_cluster: further clients `[N', M', ...]`, without training data, and their clusters.
      truth: the true models where they are known (`[K, d]` for the linear regressions), else `None`.
      writer, names: `[N]` integers and list, the writer of every client and its name, where clients are writers.
      table: of a table, how it was read, for `jfcl.data.read_rows` (`Dataset.table`).
      drift: of drifting data, a `jfcl.data.Drift`, else `None`. `train` then has the examples of all steps, with the
        step of each in `"step"` `[N, M]`; `cluster` and `test` are those of the last step.
      mixture: `[N, K]` float32, the share of each cluster in a client's training examples, where clients mix clusters;
        `cluster` then has the largest share. Else `None`.
      vocab_size: of texts, the number of token ids, else `None`.
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
    writer: np.ndarray | None = None
    names: list[Any] | None = None
    table: dict[str, Any] | None = None
    drift: Drift | None = None
    mixture: np.ndarray | None = None
    vocab_size: int | None = None


def build(
    dataset: Dataset | str,
    *,
    num_clients: int | None = None,
    num_clusters: int = 1,
    heterogeneity: str = "none",
    strength: float = 1.0,
    partition: str = "iid",
    examples_per_client: int | None = None,
    test_fraction: float = 0.2,
    reuse: str = "auto",
    newcomer_examples: int | None = None,
    newcomers_of: int | None = None,
    seed: int = 0,
    labels_per_client: int = 2,
    alpha: float = 0.5,
    exponent: float = 1.0,
    sigma: float = 1.0,
    num_groups: int = 3,
    min_size: int = 1,
    distribution: Any = None,
    mixture: float | None = None,
    drift: str | np.ndarray | None = None,
    drift_window: int | None = None,
    data_dir: str | None = None,
    rows: Callable[[int], slice] | None = None,
) -> Federation:
    """Divides a data set among clients with known clusters. Client `i` is in cluster `i mod K`, unless clients drift.

    Args:
      dataset: a `Dataset`, or a name for `load(name, data_dir)`.
      num_clients: `N`; `None` only with `partition="writer"`: one client per writer (with `reuse="cluster"`, in every
        cluster).
      num_clusters: `K`, at most `N`; it need not divide `N`.
      heterogeneity: a name in `HETEROGENEITY`: how clusters differ. "none" is for one cluster, or for clusters that
        differ by their `distribution` of labels. Several names joined by "+" are applied in turn; "class" and "topic"
        select the examples by the labels of the data set, before any other.
      strength: in `[0, 1]`: how much clusters differ. 0 is no shift at all: the data are those of "none", while clients
        keep the names of their clusters. 1 is the whole shift; `jfcl.data.heterogeneity` says what lies between.
      partition: a name in `PARTITIONS`: how a pool of examples is divided among clients. `labels_per_client` is for
        "label" and "pathological", `alpha` for "dirichlet", "quantity" and "label_groups", `exponent` for "power_law",
        `sigma` for "lognormal", `num_groups` for "label_groups", and `min_size` for all of these but the first two.
      distribution: `[N, num_classes]` for "distribution": the clients' shares in the examples of each label, among the
        clients that divide the same examples (those of a cluster, where `reuse` is "cluster").
      examples_per_client: the number of each client's training examples: exactly ("iid", "stratified"), at most
        ("writer"), or on average (others; less with "pathological" and "distribution" where a label has no client).
        `None`: all examples are used.
      test_fraction: the share held out where there is no official test split, in `(0, 1)`; of writers, of each that has
        no examples in the official one. A writer with one example is no client, since none is left to be tested on;
        `description` counts and names such writers.
      reuse: "none": an example of the data set belongs to one client. "cluster": every cluster divides the whole data
        set, so that each example occurs `K` times, under `K` transformations (IFCA: `m n = 60000 K`). "auto": "none" if
        there are `N * examples_per_client` examples, else "cluster".
      newcomer_examples: if given, the test pool is also divided among new clients with this number of examples each:
        `floor(test / newcomer_examples)` in every cluster (IFCA: 10000 K / n test clients). They share examples with
        `test`, never with `train`. With "writer" they are the writers of the official test split that are not in
        training, with at most this number.
      newcomers_of: newcomers share test examples with this number of clients, the first ones, and none with further
        clients of their cluster; default: with all.
      seed: at least 0; the result is a function of it and the other arguments.
      mixture: clients mix clusters: the shares of the clusters in a client's examples are drawn from a symmetric
        Dirichlet distribution of this concentration (FedEM: 0.4). With a small one, most of a client's examples come
        from one cluster.
      drift: the cluster of each client at each step of time: the name of a pattern (see `jfcl.data.drift_pattern`), or
        a matrix `[T, N]` of integers below `num_clusters`. A client's training examples are divided among the steps at
        random, and transformed as those of its cluster at the step; its test examples stand for every cluster.
        `jfcl.simulate` runs the steps one after another.
      drift_window: the newest steps of which clients keep the examples; default: they keep all up to now.
      data_dir: of `load`, for a data set given by name.
      rows: the rows of the `N` clients to stack, for a process that holds only its own (`mapping.own_rows`): `train`
        and `test` then have those clients alone, with their ids.

    Returns:
      A `Federation`. The test examples of a cluster are divided among its clients in proportion to the labels (or
      writers) of their training examples, so that a client's test labels follow its own distribution; at random where
      the partition does not depend on labels, such as "iid". Where there are fewer test examples than clients, several
      clients share some. Memory: the padded arrays and the data set itself.

    Raises:
      ValueError: an unknown name; more clusters than clients; several clusters that do not differ; too few examples;
        labels out of range; NaN; a heterogeneity or partition the data set does not support; an option of another
        partition; a drift with another number of clients or clusters, or with fewer examples of a client than steps; a
        mixture that is not positive; either of them with clusters that select examples, `reuse="cluster"` or newcomers.

    Example:
      >>> fed = build("digits", num_clients=40, num_clusters=4, heterogeneity="rotation")
      >>> fed.train.examples["x"].shape, fed.cluster[:6].tolist(), int(fed.test.size.sum())
      ((40, 36, 8, 8, 1), [0, 1, 2, 3, 0, 1], 359)
    """
    rules = pools.Rules(**{name: value for name, value in locals().items() if name in pools.Rules._fields})
    check_choice("reuse", reuse, ["auto", "none", "cluster"])
    if newcomer_examples is not None:
        check_count("newcomer_examples", newcomer_examples)
    pooled = pools.pool_dataset(dataset, rules, PARTITIONS, data_dir)
    dataset, transform = pooled.dataset, pools.transform_of(pooled)
    if num_clients is None:
        num_clients = len(pools.clients_of(pooled)) * (num_clusters if reuse == "cluster" else 1)
        check_at_most_clients("num_clusters", num_clusters, num_clients)
    for name in (name for name, value in {"drift": drift, "mixture": mixture}.items() if value is not None):
        check(reuse != "cluster", "reuse", reuse, f"none (or auto) with {name}")
        check(newcomer_examples is None, "newcomer_examples", newcomer_examples, f"left out with {name}")
        pools.check_transforms(rules, name)
        reuse = "none"
    if drift is not None:
        check(mixture is None, "mixture", mixture, "left out with drift")
        if isinstance(drift, str):
            drift = drift_pattern(drift, num_clients, num_clusters=num_clusters, seed=seed)
        pattern = check_pattern(drift, num_clients, num_clusters)
    if drift_window is not None:
        check_count("drift_window", drift_window)
    needed, free = num_clients * (dataset.train["x"][:1].nbytes + 256), free_host_memory()  # 256: for its list of rows
    accepted = f"at most what memory holds, of which {free / 1e9:.1f} GB are free; use fewer clients, or generate_store"
    check(needed < free, "num_clients", num_clients, accepted)

    # Which client has which rows of the data set.
    cluster = (np.arange(num_clients) % num_clusters).astype(np.int32)
    train, test = _divided(pooled, cluster, reuse)
    new, new_cluster, new_examples = [], None, None
    if newcomer_examples is not None:
        new, new_cluster, new_examples = _newcomers(pooled, newcomer_examples, test, newcomers_of)

    # Stack, and transform each client's examples on the way.
    cells, of_tests, shares = pooled.rules.cells(cluster), pooled.rules.cells(cluster), None
    if mixture is not None:
        _, of_tests, _ = zip(*mixed(test, cells, rules, of_test=True), strict=True)
        _, cells, shares = zip(*mixed(train, cells, rules, of_test=False), strict=True)
        shares = np.array(shares, np.float32)
        cluster = shares.argmax(axis=1).astype(np.int32)
    here = slice(None) if rows is None else rows(num_clients)
    writer = pooled.train.kind[[part[0] for part in train]] if partition == "writer" else None
    named = writer is not None and dataset.writer_names is not None
    sizes = " to ".join(map(str, sorted({min(map(len, train)), max(map(len, train))})))
    description = (
        f"{dataset.name}: {num_clients} clients of {sizes} examples ({partition}), {pooled.rules.clusters_text},"
        f" {pooled.tested_on}{pooled.left_out and f'; left out: {pooled.left_out}'}"
    )
    settings = [dataset.name, heterogeneity, num_clusters, seed, *_beyond_rows(dataset, pooled.rules)]
    if drift is None:
        steps, of_train = None, _stacked(train, cells, transform, dataset.train, here)
        of_test = _stacked(test, of_tests, transform, pooled.test.examples, here)
    else:
        variant = cells - cluster  # of each client, whatever its cluster
        train, examples = _in_steps(train, dataset.train, len(pattern), seed)
        cells = [(pattern + variant)[examples["step"][part], i] for i, part in enumerate(train)]
        of_train = _stacked(train, cells, transform, examples, here)
        tests = [_stacked(test, k + variant, transform, pooled.test.examples, here) for k in range(num_clusters)]
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *(part.examples for part in tests))
        steps = Drift(pattern, tests[0]._replace(examples=stacked), drift_window)
        of_test, cluster = steps.tests(len(pattern) - 1), pattern[-1]
        description += f", drift in {len(pattern)} steps"
        settings.append(pattern.tolist())
    return Federation(
        train=of_train,
        test=of_test,
        cluster=cluster,
        num_clusters=num_clusters,
        num_classes=dataset.num_classes,
        input_shape=tuple(dataset.train["x"].shape[1:]),
        split_hash=split_hash(settings, cluster, [*train, *test, *new]),
        description=description,
        newcomers=_stacked(new, pooled.rules.cells(new_cluster), transform, new_examples) if new else None,
        newcomer_cluster=new_cluster,
        writer=writer,
        names=[dataset.writer_names[i] for i in writer] if named else None,
        table=dataset.table,
        drift=steps,
        mixture=shares,
        vocab_size=dataset.vocab_size,
    )


def select_clients(federation: Federation, rows: slice) -> Federation:
    """Returns the federation of some of the clients, numbered anew from 0; all newcomers stay."""

    def chosen(value: Any) -> Any:
        if isinstance(value, Clients):
            return jax.tree.map(lambda x: x[rows], value._replace(id=None))
        return None if value is None else value[rows]

    of_clients = ("train", "test", "cluster", "writer", "names", "mixture")
    fields, drift = {name: chosen(getattr(federation, name)) for name in of_clients}, federation.drift
    if drift is not None:
        examples = jax.tree.map(lambda x: x[:, rows], drift.test.examples)
        test = chosen(drift.test._replace(examples=()))._replace(examples=examples)
        fields["drift"] = drift._replace(cluster=drift.cluster[:, rows], test=test)
    description = f"{federation.description}; {len(fields['cluster'])} of these clients"
    return federation._replace(description=description, **fields)


def mixed(
    parts: Iterable[np.ndarray], cells: np.ndarray, rules: pools.Rules, of_test: bool
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yields the rows of each client, the cells of these, and the drawn shares `[K]` of the clusters."""
    count, drawn = rules.num_clusters, np.random.default_rng((rules.seed, MIXTURE))
    for i, rows in enumerate(parts):
        numbers = apportioned(len(rows), dirichlet_draw(drawn, rules.mixture, count))
        order = np.random.default_rng((rules.seed, MIXTURE, int(of_test), i)).permutation(len(rows))
        yield rows, np.repeat(np.arange(count), numbers)[order] + cells[i] // count * count, numbers / len(rows)


def _in_steps(rows: Rows, examples: pools.Examples, count: int, seed: int) -> tuple[Rows, pools.Examples]:
    """Divides each client's `rows` at random among `count` steps, one after the other; the examples get a `"step"`."""
    least = min(map(len, rows))
    check(least >= count, "the examples of a client", least, f"at least {count}, one for each step of the drift")
    require("step" not in examples, "the data set has an array 'step', the name of the one that drift adds")
    rows = [np.random.default_rng((seed, STEPS, i)).permutation(part) for i, part in enumerate(rows)]
    step = np.zeros(len(examples["y"]), np.int32)  # a row is of one client (`reuse="none"`), and so of one step
    for part in rows:
        for t, of_step in enumerate(np.array_split(part, count)):
            step[of_step] = t
    return rows, examples | {"step": step}


def _divided(pooled: pools.Pooled, cluster: np.ndarray, reuse: str) -> tuple[Rows, Rows]:
    """Returns the rows of every client's training and test examples."""
    rules, num_clients = pooled.rules, len(cluster)
    if reuse == "auto":
        count = rules.examples_per_client
        enough = count is None or num_clients * count <= len(pooled.train.rows)
        reuse = "none" if enough or rules.partition == "writer" else "cluster"
    # The clients of a group divide one pool among themselves.
    per_cluster = reuse == "cluster" or bool(rules.selects)
    groups = [np.flatnonzero(cluster == k) for k in range(rules.num_clusters)] if per_cluster else [range(num_clients)]
    train, test = ([np.empty(0, np.int64)] * num_clients for _ in range(2))
    for group, clients in enumerate(groups):
        shared = pools.of_cluster(pooled, group)
        if rules.partition == "distribution":  # the rows of these clients
            shared = shared._replace(rules=rules._replace(distribution=rules.distribution[clients]))
        parts = pools.divide(shared, len(clients), group)
        for i, part, share in zip(clients, parts, pools.divide_test(shared, parts, group), strict=True):
            train[i], test[i] = part, share
    return train, test


def _newcomers(
    pooled: pools.Pooled, count: int, test: Rows, shared: int | None
) -> tuple[Rows, np.ndarray, pools.Examples]:
    """Returns the rows and clusters of new clients of `count` examples, and the examples that the rows are of.

    They share the `test` examples of the first `shared` clients, or of all.
    """
    rules, dataset, parts, cluster = pooled.rules, pooled.dataset, [], []
    accepted = "left out where clusters differ by their distribution alone, in which new clients have no row"
    check(rules.num_clusters == 1 or rules.heterogeneity != "none", "newcomer_examples", count, accepted)
    if shared is not None:
        check_count("newcomers_of", shared)
    first = test[:shared]
    if rules.partition == "writer":
        check(dataset.test is not None, "newcomer_examples", count, "left out without a test split")
        seen = np.isin(dataset.writer["test"], dataset.writer["train"])
        check(not seen.all(), "newcomer_examples", count, "left out: all writers of the test split are in training")
        rng = np.random.default_rng((rules.seed, pools.NEWCOMERS))
        parts = by_writer(np.where(seen, -1, dataset.writer["test"]), seed=0)
        parts = [np.sort(rng.permutation(part)[:count]) for part in parts]
        cluster = np.arange(len(parts)) % rules.num_clusters
        return parts, cluster.astype(np.int32), dataset.test
    for k in range(rules.num_clusters):
        pool = pools.of_cluster(pooled, k).test.rows
        further = [test[i] for i in range(k, len(test), rules.num_clusters) if i >= len(first)]
        pool = pool[np.isin(pool, np.concatenate(first)) & ~np.isin(pool, np.concatenate([[], *further]))]
        clients = len(pool) // count
        check(clients > 0, "newcomer_examples", count, f"at most {len(pool)}, the test examples of cluster {k}")
        new = iid(len(pool), clients, seed=(rules.seed, pools.NEWCOMERS, k), examples_per_client=count)
        parts += [pool[part] for part in new]
        cluster += [k] * clients
    return parts, np.array(cluster, np.int32), pooled.test.examples


def _stacked(rows: Rows, cells: Any, transform: Callable, examples: pools.Examples, here=slice(None)) -> Clients:
    """Returns `Clients` of rows `here` of all clients, padded to the largest client of all.

    `cells` has the cell of each client, or an array of those of its rows.
    """
    length, count = max(map(len, rows)), len(rows)
    ids, rows, cells = np.arange(count, dtype=np.int32)[here], rows[here], cells[here]
    size = np.array([len(part) for part in rows], np.int32)
    stacked = jax.tree.map(lambda x: aligned_zeros((len(size), length, *x.shape[1:]), x.dtype), examples)
    for i, part in enumerate(rows):
        of_rows = np.broadcast_to(cells[i], len(part))
        for cell in np.unique(of_rows):
            place = np.flatnonzero(of_rows == cell)
            transformed = transform(pools.take(examples, part[place]), int(cell))
            for out, values in zip(jax.tree.leaves(stacked), jax.tree.leaves(transformed), strict=True):
                out[i, place] = values
    return Clients(stacked, size, None if len(ids) == count else ids)


def _beyond_rows(dataset: Dataset, rules: pools.Rules) -> list[Any]:
    """Returns what decides on the examples beside the rows, where it is not the default."""
    by_classes = not {*OF_CLASSES}.isdisjoint(rules.shifts)
    has_spare_classes = by_classes and int(dataset.train["y"].max()) + 1 != dataset.num_classes
    extra = [dataset.num_classes] * has_spare_classes + ([] if dataset.table is None else [dataset.table])
    extra += [] if rules.strength == 1 else [f"strength {float(rules.strength)}"]
    return extra + ([] if rules.mixture is None else [f"mixture {float(rules.mixture)}"])


def split_hash(settings: list, cluster, parts) -> str:
    """Returns 16 hex digits of the SHA-256 over settings, clusters and every client's indices."""
    digest = hashlib.sha256(repr(settings).encode())
    digest.update(np.asarray(cluster, "<i4").tobytes())
    for part in parts:
        digest.update(np.int64(len(part)).astype("<i8").tobytes())
        digest.update(np.asarray(part, "<i8").tobytes())
    return digest.hexdigest()[:16]
