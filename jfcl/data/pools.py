"""A data set split into the pools that clients of training and of tests divide.

The order of the steps keeps test data out of training. First the examples are split into a training and a test pool:
the official test split where there is one, else `test_fraction` of the examples, stratified by label. If clients are
writers, a writer's test examples are those of the official test split, or `test_fraction` of its own without any. Only
then are examples divided among clients and transformed. So an example that a client trains on is in no client's test
data, under any transformation.

`jfcl.data.build` stacks the clients in memory; `jfcl.data.generate_store` writes them to a folder.
"""

import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np

from jfcl.core import Clients, check, check_at_most_clients, check_choice, check_count, client_ids, stack_clients
from jfcl.core.checks import require
from jfcl.core.options import Interval, Range, check_options
from jfcl.data.dataset import Dataset, labels_of, normalised
from jfcl.data.heterogeneity import HETEROGENEITY, OF_CLASSES, OF_PLANE, SELECTIVE, VARIANTS, shifts_of
from jfcl.data.partition import OF_LABELS, OF_SIZES, PARTITIONS, as_distribution, by_sizes, partitions_with, parts_of
from jfcl.data.sources import load

# One stream of random numbers per decision, `default_rng([seed, stream, ...])`: no decision shifts another.
HOLD_OUT, SUBSAMPLE, PARTITION, ALLOT, NEWCOMERS, TRANSFORM = range(6)

Examples = dict[str, Any]  # {"x": [n, ...], "y": [n]}, and further arrays [n, ...], or pytrees of them


class Rules(NamedTuple):
    """The rules of a division: arguments of `jfcl.data.build` under their names."""

    num_clients: int | None
    num_clusters: Annotated[int, Range(1)] = 1
    heterogeneity: str = "none"
    partition: str = "iid"
    examples_per_client: Annotated[int | None, Range(1)] = None
    test_fraction: Annotated[float, Interval("(0, 1)")] = 0.2
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0
    labels_per_client: Annotated[int, Range(1)] = 2
    alpha: Any = 0.5  # this and others, which a partition checks
    exponent: Any = 1.0
    min_size: Annotated[int, Range(1)] = 1
    distribution: Any = None
    strength: Annotated[float, Interval("[0, 1]")] = 1.0
    sigma: Any = 1.0
    num_groups: Any = 3
    mixture: Annotated[float | None, Interval("(0, inf)")] = None

    @property
    def shifts(self) -> tuple[str, ...]:
        """The shifts that have an effect; none with strength 0."""
        return shifts_of(self.heterogeneity) if self.strength else ()

    @property
    def clusters_text(self) -> str:
        """The number of clusters, with the heterogeneity, its strength and the mixture where there are several."""
        words = self.heterogeneity + ("" if self.strength == 1 else f", strength {self.strength:g}")
        words += "" if self.mixture is None else f", mixture {float(self.mixture):g}"
        return "1 cluster" if self.num_clusters == 1 else f"{self.num_clusters} clusters ({words})"

    @property
    def selects(self) -> tuple[str, ...]:
        """The shifts that select examples, at most one."""
        return tuple(name for name in self.shifts if name in SELECTIVE)

    @property
    def variants(self) -> int:
        """The number of kinds of clients in each cluster, which differ by something else than the cluster."""
        return max((VARIANTS.get(name, 1) for name in self.shifts), default=1)

    def cells(self, cluster: np.ndarray) -> np.ndarray:
        """Returns the cells `k + K v` of clients with clusters `k`, of which a cluster has each variant `v` in turn."""
        order, nth = np.argsort(cluster, kind="stable"), np.empty(len(cluster), np.int64)
        nth[order] = np.arange(len(order)) - np.searchsorted(cluster[order], cluster[order])  # in its cluster
        return cluster + self.num_clusters * (nth % self.variants)


class Pool(NamedTuple):
    """Examples to divide: `rows` `[n]` of `examples`; `kind`, the label (or writer) of each of the `examples`."""

    examples: Examples
    rows: np.ndarray
    kind: np.ndarray


class Pooled(NamedTuple):
    """A data set, the rules of its division, and its pools of disjoint examples."""

    dataset: Dataset
    rules: Rules
    train: Pool
    test: Pool
    tested_on: str  # where the test pool comes from, in words
    left_out: str = ""  # which writers cannot be clients, in words


def pool_dataset(dataset: Dataset | str, rules: Rules, partitions: Iterable[str], data_dir: str | None) -> Pooled:
    """Checks the arguments that `build` and `generate_store` share, and splits the examples into two pools."""
    heterogeneity, partition = rules.heterogeneity, rules.partition
    check_options(Rules, rules._asdict())
    names = shifts_of(heterogeneity)
    for option, given in {"strength": rules.strength != 1, "mixture": rules.mixture is not None}.items():
        accepted = "left out with heterogeneity 'none', with which clusters do not differ"
        check(names or not given, option, getattr(rules, option), accepted)
    if rules.mixture is not None:
        check_transforms(rules, "mixture")
    check_choice("partition", partition, partitions)
    for option in ("labels_per_client", "alpha", "exponent", "sigma", "num_groups", "min_size", "distribution"):
        value, takers = getattr(rules, option), partitions_with(option)
        fits = partition in takers or np.array_equal(value, Rules._field_defaults[option])
        check(fits, option, value, f"left out with partition {partition!r}: it is of {', '.join(takers)}")
    if isinstance(dataset, str):
        dataset = load(dataset, data_dir)
    if rules.num_clients is not None or partition != "writer":
        check_count("num_clients", rules.num_clients)
        check_at_most_clients("num_clusters", rules.num_clusters, rules.num_clients)
    differ = rules.num_clusters == 1 or heterogeneity != "none" or partition == "distribution"
    shifts = ", ".join(name for name in HETEROGENEITY if name != "none")
    accepted = f"given for num_clusters={rules.num_clusters}, one of {shifts}: with 'none' the clusters do not differ"
    check(differ, "heterogeneity", heterogeneity, accepted)
    dataset = with_channels(normalised(dataset), rules.shifts)
    some = dataset.train["x"][:100]
    if some.ndim > 2 and some.min() >= 0 and 32 < some.max() <= 255 and (some == np.rint(some)).all():
        text = f"images of whole numbers up to {some.max():g}, which hardly train; give x / 255"
        warnings.warn(f"data set {dataset.name!r}: {text}", stacklevel=3)
    if partition == "writer":
        needs = f"writer ids, which {dataset.name!r} does not have (Dataset.writer; by= of jfcl.data.from_frame)"
        require(dataset.writer is not None, f"partition 'writer' needs {needs}")
        why = "the examples of a writer would be in several clusters"
        require(not {*names} & {*SELECTIVE}, f"partition 'writer' does not fit heterogeneity {heterogeneity!r}: {why}")
    for what in (partition, *names):
        fits = dataset.num_classes is not None or what not in (*OF_LABELS, *OF_CLASSES)
        check(fits, "dataset", dataset.name, f"a classification data set for {what!r}, which goes by single labels")
    size = rules.examples_per_client
    for option in ("min_size", "labels_per_client"):
        fits = size is None or getattr(rules, option) <= size or partition not in partitions_with(option)
        check(fits, option, getattr(rules, option), f"at most {size}, the examples_per_client")
    if partition == "distribution":
        table = as_distribution(rules.distribution, rules.num_clients, dataset.num_classes)
        rules = rules._replace(distribution=table)
    if partition == "writer":
        pooled = Pooled(dataset, rules, *_pools_of_writers(dataset, rules))
        return pooled._replace(left_out=_left_out(pooled))
    return Pooled(dataset, rules, *_pools(dataset, rules, labels_of(dataset, "train")))


def check_transforms(rules: Rules, option: str) -> None:
    """Raises `ValueError` for shifts that select examples: with this option clients are in several clusters."""
    accepted = f"one that transforms examples: with {option} clients keep those that they have"
    check(not rules.selects, "heterogeneity", rules.heterogeneity, accepted)


def with_channels(dataset: Dataset, shifts: Iterable[str]) -> Dataset:
    """Returns the data set, its grey images with three channels where they are coloured."""

    def widened(split: Examples | None) -> Examples | None:
        if split is None or split["x"].shape[1:][2:] != (1,):
            return split
        return split | {"x": np.repeat(split["x"], 3, axis=-1)}

    return dataset._replace(train=widened(dataset.train), test=widened(dataset.test)) if "colour" in shifts else dataset


def _pools(dataset: Dataset, rules: Rules, kind: np.ndarray) -> tuple[Pool, Pool, str]:
    """Returns the training and test pools, and where the second comes from: the official split, if there is one."""
    if dataset.test is None:
        rows, held = stratified_hold_out(kind, rules.test_fraction, seed=(rules.seed, HOLD_OUT))
        words = f"{rules.test_fraction:g} held out"
        return Pool(dataset.train, rows, kind), Pool(dataset.train, held, kind), words
    train, test = Pool(dataset.train, np.arange(len(kind)), kind), labels_of(dataset, "test")
    return train, Pool(dataset.test, np.arange(len(test)), test), "official test split"


def _pools_of_writers(dataset: Dataset, rules: Rules) -> tuple[Pool, Pool, str]:
    """Returns `_pools` where clients are writers: those without official test examples are tested on some of their own.

    The official test examples of writers that are not in training are for newcomers.
    """
    writer, fraction = np.asarray(dataset.writer["train"]), rules.test_fraction
    of_test = np.asarray(dataset.writer["test"]) if dataset.test is not None else np.empty(0, np.int64)
    tested = np.flatnonzero(np.isin(of_test, writer) & (of_test >= 0))
    if not len(tested):
        return _pools(dataset._replace(test=None), rules, writer)
    untested = np.flatnonzero(~np.isin(writer, of_test[tested]) & (writer >= 0))
    test, held, words = Pool(dataset.test, tested, of_test), np.empty(0, np.int64), "official test split"
    if (np.unique(writer[untested], return_counts=True)[1] > 1).any():
        held = untested[stratified_hold_out(writer[untested], fraction, seed=(rules.seed, HOLD_OUT))[1]]
        both = take(dataset.test, tested), take(dataset.train, held)
        kind = np.concatenate([of_test[tested], writer[held]])
        test = Pool(jax.tree.map(lambda *parts: np.concatenate(parts), *both), np.arange(len(kind)), kind)
        count = len(np.unique(writer[held]))
        words += f", and {fraction:g} held out of {count} writer(s) that are not in it"
    return Pool(dataset.train, np.setdiff1d(np.arange(len(writer)), held), writer), test, words


def clients_of(pooled: Pooled) -> np.ndarray:
    """Returns the writers that can be clients, sorted: those with both training and test examples."""
    both = np.intersect1d(*(pool.kind[pool.rows] for pool in (pooled.train, pooled.test)))
    return both[both >= 0]


def _left_out(pooled: Pooled) -> str:
    """Returns in words which writers cannot be clients, of those in training; raises `ValueError` where none can."""
    writers = np.unique(pooled.train.kind[pooled.train.kind >= 0])
    alone = np.setdiff1d(writers, clients_of(pooled))
    require(len(alone) < len(writers), "partition 'writer' needs writers with two examples, one to test on; none has")
    if not len(alone):
        return ""
    names = pooled.dataset.writer_names
    listed = ", ".join(str(i if names is None else names[i]) for i in alone[:3].tolist()) + ", ..." * (len(alone) > 3)
    return f"{len(alone)} of {len(writers)} writers, which have one example and none to be tested on ({listed})"


def of_cluster(pooled: Pooled, cluster: int) -> Pooled:
    """Returns the data set with the parts of its pools that clients of a cluster may have."""
    rules = pooled.rules
    if not rules.selects:
        return pooled
    select = HETEROGENEITY[rules.selects[0]][0]
    options = rules.num_clusters, pooled.dataset.num_classes, (rules.seed, TRANSFORM), rules.strength

    def part(pool: Pool) -> Pool:
        return pool._replace(rows=select(pool.rows, pool.examples["y"][pool.rows], cluster, *options)[0])

    return pooled._replace(train=part(pooled.train), test=part(pooled.test))


def transform_of(pooled: Pooled) -> Callable[[Examples, int], Examples]:
    """Returns `(examples, cell) -> examples`, how the data of a cell (`Rules.cells`) differ from the data set."""
    rules = pooled.rules
    options = rules.num_clusters, pooled.dataset.num_classes, (rules.seed, TRANSFORM), rules.strength

    def transform(examples: Examples, cell: int) -> Examples:
        for name in rules.shifts:
            function, k = HETEROGENEITY[name][0], cell if name in VARIANTS else cell % rules.num_clusters
            if name in OF_PLANE:
                beside = {name: values for name, values in examples.items() if name != "x"}
                x, beside = function(examples["x"], beside, k, *options)
                examples = {"x": x, **beside}
            elif name not in SELECTIVE:
                x, y = function(examples["x"], examples["y"], k, *options)
                examples = {**examples, "x": x, "y": y}
        return examples

    return transform


def take(examples: Examples, rows: np.ndarray) -> Examples:
    """Returns the examples at `rows`."""
    return jax.tree.map(lambda values: values[rows], examples)


def divide(pooled: Pooled, num_clients: int, group: int) -> list[np.ndarray]:
    """Returns the rows of each client of a group in the training pool; `group` selects the random numbers."""
    rules, train = pooled.rules, pooled.train
    partition, size, rows = PARTITIONS[rules.partition][0], rules.examples_per_client, train.rows
    stream, rng = (rules.seed, PARTITION, group), np.random.default_rng((rules.seed, SUBSAMPLE, group))
    if rules.partition == "writer":
        writers = clients_of(pooled)
        accepted = f"at most {len(writers)}, the number of writers{pooled.left_out and f', without {pooled.left_out}'}"
        check(num_clients <= len(writers), "num_clients", num_clients, accepted)
        parts = partition(np.where(np.isin(train.kind[rows], writers), train.kind[rows], -1), num_clients, seed=stream)
        return [rows[part if size is None else np.sort(rng.permutation(part)[:size])] for part in parts]
    needed = num_clients * (size or 1)
    accepted = f"at most {len(rows)}, the training examples of {pooled.dataset.name!r} for these clients"
    check(needed <= len(rows), "num_clients" + " times examples_per_client" * (size is not None), needed, accepted)
    options = {name: getattr(rules, name) for name in inspect.signature(partition).parameters if name in rules._fields}
    if size is not None and "examples_per_client" not in options:  # as many on average
        rows = rows[np.sort(rng.permutation(len(rows))[:needed])]
    parts = partition(train.kind[rows], **options | {"num_clients": num_clients, "seed": stream})
    if rules.partition in OF_SIZES:  # which examples clients have does not depend on the order of their sizes
        parts = by_sizes(len(rows), list(map(len, parts)), seed=(*stream, 1))
    return [rows[part] for part in parts]


def divide_test(pooled: Pooled, parts: list[np.ndarray], group: int) -> list[np.ndarray]:
    """Divides the test pool among the clients of which `divide` returned `parts` of the training pool.

    A client's test examples are of its labels or writers where the partition decides on them. Otherwise all clients
    draw from one distribution: labels that are frequent in a client's training data by chance are not so in its tests.
    """
    train, test, rules = pooled.train.kind, pooled.test.kind, pooled.rules
    why = f"a cluster of {sum(map(len, parts))} training examples has no test examples"
    require(len(pooled.test.rows) > 0, f"num_clusters must be below {rules.num_clusters}: {why}")
    if rules.partition not in (*OF_LABELS, "writer"):
        train, test = np.zeros_like(train), np.zeros_like(test)
    tested = np.unique(test[pooled.test.rows])
    has_tests = np.isin(train, tested)
    untested = [i for i, part in enumerate(parts) if not has_tests[part].any()]
    if untested:
        lost = np.setdiff1d(train[np.concatenate(parts)], tested)
        listed = ", ".join(map(str, lost[:8].tolist())) + ", ..." * (len(lost) > 8)
        what = f"client {untested[0]} has no test examples, since there are none of these labels: {listed}"
        remedies = "leave their examples out of the training data, or use partition='iid'"
        raise ValueError(f"partition {rules.partition!r}: {what}; {remedies}")
    return allot(pooled.test.rows, test, [train[part] for part in parts], seed=(rules.seed, ALLOT, group))


def stratified_hold_out(kind, fraction: float, *, seed) -> tuple[np.ndarray, np.ndarray]:
    """Splits indices into train and test, sorted, stratified by `kind`, `[n]` integers (labels or writers).

    Of a kind with several examples, each side has at least one. The only example of a kind stays in training; where
    every kind has only one, all are divided as one kind.
    """
    rng = np.random.default_rng(seed)
    held = np.zeros(len(kind), bool)
    several = [rows for rows in parts_of(kind, np.unique(kind)) if len(rows) > 1]
    for rows in several or [np.arange(len(kind))]:
        count = int(np.clip(round(fraction * len(rows)), 1, max(len(rows) - 1, 1)))
        held[rng.permutation(rows)[:count]] = True
    return np.flatnonzero(~held), np.flatnonzero(held)


def allot(pool, kind, train_kinds, *, seed) -> list[np.ndarray]:
    """Divides the test examples `pool` of each kind in proportion to the clients' training examples of that kind.

    Rounding errors do not add up over kinds. A client without any test example gets one of a kind in its training data,
    which another client then also has.
    """
    rng = np.random.default_rng(seed)
    kinds, train_kind = np.unique(np.concatenate(train_kinds), return_inverse=True)
    row = np.repeat(np.arange(len(train_kinds)), [len(part) for part in train_kinds])
    owed = np.zeros(len(train_kinds))
    owner = np.full(len(kind), -1)
    pool = pool[np.argsort(kind[pool], kind="stable")]
    begin, end = (np.searchsorted(kind[pool], kinds, side=side) for side in ("left", "right"))
    for c, of_kind in enumerate(parts_of(train_kind, range(len(kinds)))):
        clients, count = np.unique(row[of_kind], return_counts=True)
        examples = rng.permutation(pool[begin[c] : end[c]])
        share = count / count.sum() * len(examples)
        whole = np.floor(share + 1e-9).astype(np.int64)
        extra = np.lexsort((rng.random(len(clients)), whole - share - owed[clients]))[: len(examples) - whole.sum()]
        whole[extra] += 1
        owed[clients] += share - whole
        owner[examples] = np.repeat(clients, whole)
    parts = parts_of(owner, range(len(train_kinds)))
    for i in [i for i, part in enumerate(parts) if not len(part)]:
        its_kinds = np.searchsorted(kinds, np.unique(train_kinds[i]))
        counts = np.cumsum(end[its_kinds] - begin[its_kinds])
        drawn = rng.integers(counts[-1], size=1)  # among the examples of these kinds, one kind after another
        at = np.searchsorted(counts, drawn, side="right")
        parts[i] = pool[end[its_kinds[at]] - (counts[at] - drawn)]
    return parts


def hold_out(clients: Clients, share: float, *, seed: int = 0) -> tuple[Clients, Clients]:
    """Divides every client's examples at random into those to train on and those held out, to choose hyperparameters.

    Args:
      clients: `[N, M, ...]`, on the host.
      share: of each client's examples that are held out, in (0, 1): rounded down, at least one, and never all of them.
        A client with a single example keeps it for training.
      seed: of the draws, which depend on the client's id too, but not on other clients.

    Returns:
      `(train, held_out)`, `Clients` with the same ids in the same order, as NumPy arrays. Cost: a copy of the data.

    Raises:
      ValueError: a share outside (0, 1), no client with two examples.

    Example:
      >>> clients = Clients({"x": np.arange(20.0).reshape(2, 10, 1)}, np.array([10, 3], np.int32))
      >>> train, held_out = hold_out(clients, 0.2)
      >>> train.size.tolist(), held_out.size.tolist(), train.examples["x"].shape, held_out.examples["x"].shape
      ([8, 2], [2, 1], (2, 8, 1), (2, 2, 1))
    """
    check(0 < share < 1, "share", share, "in (0, 1)")
    check_count("seed", seed, least=0, most=2**32 - 1)
    size, ids = np.asarray(clients.size), np.asarray(client_ids(clients))
    counts = np.where(size > 1, np.clip((share * size + 1e-9).astype(int), 1, np.maximum(size - 1, 1)), 0)
    require((counts > 0).any(), "no client has two examples, one to hold out")
    examples, train, held_out = jax.tree.map(np.asarray, clients.examples), [], []
    for i, count in enumerate(counts):
        # The last number: `jfcl.attacks.poison` draws by the first two which of the same examples it changes.
        drawn = np.random.default_rng([seed, int(ids[i]), 1]).permutation(size[i])[:count]
        for part, rows in ((train, np.setdiff1d(np.arange(size[i]), drawn)), (held_out, np.sort(drawn))):
            part.append(jax.tree.map(lambda x, i=i, rows=rows: x[i, rows], examples))
    return stack_clients(train)._replace(id=ids), stack_clients(held_out)._replace(id=ids)
