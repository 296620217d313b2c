"""A data set split into the pools that clients of training and of tests divide.

The order of the steps keeps test data out of training. First the *base* examples are split into a training and a test
pool: the official test split where there is one, else `test_fraction` of the examples, stratified by label. If clients
are writers, a writer's test examples are those of the official test split; a writer without any there is tested on
`test_fraction` of its own. Only then are examples divided among clients and transformed. So a base example in the
training data of a client is in no client's test data, under any transformation.

`jfcl.data.build` stacks the clients in memory; `jfcl.data.generate_store` writes them to a folder.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from jfcl.core import check, check_at_most_clients, check_choice, check_count
from jfcl.data.dataset import Dataset, labels_of, normalised
from jfcl.data.heterogeneity import HETEROGENEITY, OF_PLANE, RELABELLING, SELECTIVE
from jfcl.data.partition import OF_LABELS, PARTITIONS, as_distribution, parts_of
from jfcl.data.sources import load

# One stream of random numbers per decision, `default_rng([seed, stream, ...])`: no decision shifts another.
HOLD_OUT, SUBSAMPLE, PARTITION, ALLOT, NEWCOMERS, TRANSFORM = range(6)

Examples = dict[str, Any]  # {"x": [n, ...], "y": [n]}, and further arrays [n, ...], or pytrees of them


class Rules(NamedTuple):
    """The rules of a division: arguments of `jfcl.data.build`; `options` are those of partitions by name."""

    num_clients: int | None
    num_clusters: int
    heterogeneity: str
    partition: str
    examples_per_client: int | None
    test_fraction: float
    seed: int
    options: dict[str, Any]


class Pool(NamedTuple):
    """Examples to divide: `rows` `[n]` of `examples`; `kind`, the label (or writer) of each of the `examples`."""

    examples: Examples
    rows: np.ndarray
    kind: np.ndarray


class Split(NamedTuple):
    """A data set and the rules of its division.

    Attributes:
      train, test: the pools, of disjoint examples.
      held: where the test pool comes from, in words.
      left_out: which writers cannot be clients, in words; "" where all can.
    """

    dataset: Dataset
    rules: Rules
    train: Pool
    test: Pool
    held: str = ""
    left_out: str = ""


def split_dataset(dataset: Dataset | str, rules: Rules, partitions: Iterable[str], data_dir: str | None) -> Split:
    """Checks the arguments that `build` and `generate_store` share, and splits the examples into two pools.

    Raises:
      ValueError: an unknown name; a count out of range; more clusters than clients; clusters that do not differ; a
        data set that the partition or the heterogeneity does not support, or with errors of its own (`normalised`).
    """
    num_clients, num_clusters, heterogeneity, partition, each, fraction, seed, options = rules
    check_choice("heterogeneity", heterogeneity, HETEROGENEITY)
    check_choice("partition", partition, partitions)
    check_count("num_clusters", num_clusters)
    check_count("seed", seed, least=0, most=2**63 - 1)
    check(0 < fraction < 1, "test_fraction", fraction, "strictly between 0 and 1")
    if each is not None:
        check_count("examples_per_client", each)
    if isinstance(dataset, str):
        dataset = load(dataset, data_dir)
    if num_clients is not None or partition != "writer":
        check_count("num_clients", num_clients)
        check_at_most_clients("num_clusters", num_clusters, num_clients)
    if num_clusters > 1 and heterogeneity == "none" and partition != "distribution":
        differing = ", ".join(name for name in HETEROGENEITY if name != "none")
        raise ValueError(
            f"heterogeneity must be given for num_clusters={num_clusters}, one of {differing}: with 'none' the clusters"
            " do not differ (leave out num_clusters)"
        )
    dataset = normalised(dataset)
    if partition == "writer" and dataset.writer is None:
        raise ValueError(
            f"partition 'writer' needs writer ids, which {dataset.name!r} does not have; try 'mnist_writers', or, for"
            " data of your own, Dataset.writer (by= of jfcl.data.from_frame)"
        )
    divided = partition == "writer" and heterogeneity in SELECTIVE
    accepted = f"another one with {heterogeneity!r}: the examples of a writer would be in several clusters"
    check(not divided, "partition", partition, accepted)
    if partition in OF_LABELS or heterogeneity in (*SELECTIVE, *RELABELLING):
        what = f"partition {partition!r}" if partition in OF_LABELS else f"heterogeneity {heterogeneity!r}"
        accepted = f"a classification data set for {what}, which goes by single labels"
        check(dataset.num_classes is not None, "dataset", dataset.name, accepted)
    for option in ("min_size", "labels_per_client"):
        check_count(option, options[option])
        fits = each is None or options[option] <= each or option not in _options_of(partition)
        check(fits, option, options[option], f"at most {each}, the examples_per_client")
    if partition == "distribution":
        table = as_distribution(options["distribution"], num_clients, dataset.num_classes)
        rules = rules._replace(options=options | {"distribution": table})
    if partition != "writer":
        return Split(dataset, rules, *_pools(dataset, labels_of(dataset, "train"), fraction, seed))
    split = Split(dataset, rules, *_pools_of_writers(dataset, fraction, seed))
    return split._replace(left_out=_left_out(split))


def _options_of(partition: str) -> Container[str]:
    return inspect.signature(PARTITIONS[partition][0]).parameters


def _pools(dataset: Dataset, kind: np.ndarray, fraction: float, seed: int) -> tuple[Pool, Pool, str]:
    """Returns the training and test pools, and where the second comes from: the official split, if there is one."""
    if dataset.test is not None:
        rows, of_test = (np.arange(len(part["y"])) for part in (dataset.train, dataset.test))
        test = Pool(dataset.test, of_test, labels_of(dataset, "test"))
        return Pool(dataset.train, rows, kind), test, "official test split"
    rows, held = hold_out(kind, fraction, seed=(seed, HOLD_OUT))
    return Pool(dataset.train, rows, kind), Pool(dataset.train, held, kind), f"{fraction:g} held out"


def _pools_of_writers(dataset: Dataset, fraction: float, seed: int) -> tuple[Pool, Pool, str]:
    """Returns `_pools` where clients are writers: those without official test examples are tested on some of their own.

    The official test examples of writers that are not in training are for newcomers.
    """
    writer = np.asarray(dataset.writer["train"])
    of_test = np.asarray(dataset.writer["test"]) if dataset.test is not None else np.empty(0, np.int64)
    tested = np.flatnonzero(np.isin(of_test, writer) & (of_test >= 0))
    if not len(tested):
        return _pools(dataset._replace(test=None), writer, fraction, seed)
    others = np.flatnonzero(~np.isin(writer, of_test[tested]) & (writer >= 0))
    test, held, words = Pool(dataset.test, tested, of_test), np.empty(0, np.int64), "official test split"
    if (np.unique(writer[others], return_counts=True)[1] > 1).any():
        held = others[hold_out(writer[others], fraction, seed=(seed, HOLD_OUT))[1]]
        both = take(dataset.test, tested), take(dataset.train, held)
        both = jax.tree.map(lambda *parts: np.concatenate(parts), *both)
        kind = np.concatenate([of_test[tested], writer[held]])
        test = Pool(both, np.arange(len(kind)), kind)
        count = len(np.unique(writer[held]))
        words += f", and {fraction:g} held out of {count} writer(s) that are not in it"
    return Pool(dataset.train, np.setdiff1d(np.arange(len(writer)), held), writer), test, words


def clients_of(split: Split) -> np.ndarray:
    """Returns the writers that can be clients, sorted: those with both training and test examples."""
    both = np.intersect1d(*(pool.kind[pool.rows] for pool in (split.train, split.test)))
    return both[both >= 0]


def _left_out(split: Split) -> str:
    """Returns in words which writers cannot be clients, of those in training; raises `ValueError` where none can."""
    writers = np.unique(split.train.kind[split.train.kind >= 0])
    alone = np.setdiff1d(writers, clients_of(split))
    accepted = f"another one for {split.dataset.name!r}: no writer has two examples, of which one is to be tested on"
    check(len(alone) < len(writers), "partition", "writer", accepted)
    if not len(alone):
        return ""
    names = split.dataset.writer_names
    named = ", ".join(str(i if names is None else names[i]) for i in alone[:3].tolist())
    more = ", ..." if len(alone) > 3 else ""
    return f"{len(alone)} of {len(writers)} writers, which have one example and none to be tested on ({named}{more})"


def of_cluster(split: Split, cluster: int) -> Split:
    """Returns the split with the parts of its pools that clients of a cluster may have."""
    rules = split.rules
    if rules.heterogeneity not in SELECTIVE:
        return split
    choose = HETEROGENEITY[rules.heterogeneity][0]

    def part(pool: Pool) -> Pool:
        labels = pool.examples["y"][pool.rows]
        return pool._replace(rows=choose(pool.rows, labels, cluster, rules.num_clusters, split.dataset.num_classes)[0])

    return split._replace(train=part(split.train), test=part(split.test))


def transform_of(split: Split) -> Callable[[Examples, int], Examples]:
    """Returns `(examples, cluster) -> examples`, how the data of a cluster differ from the data set.

    Heterogeneities that select examples leave them as they are.
    """
    rules = split.rules
    function = HETEROGENEITY["none" if rules.heterogeneity in SELECTIVE else rules.heterogeneity][0]
    clusters, classes, seed = rules.num_clusters, split.dataset.num_classes, (rules.seed, TRANSFORM)

    def transform(examples: Examples, cluster: int) -> Examples:
        x, others = examples["x"], {name: values for name, values in examples.items() if name != "x"}
        if rules.heterogeneity in OF_PLANE:
            x, others = function(x, others, cluster, clusters, classes, seed)
        else:
            x, others["y"] = function(x, examples["y"], cluster, clusters, classes, seed)
        return {"x": x, **others}

    return transform


def take(examples: Examples, rows: np.ndarray) -> Examples:
    """Returns the examples at `rows`."""
    return jax.tree.map(lambda values: values[rows], examples)


def divide(split: Split, num_clients: int, group: int) -> list[np.ndarray]:
    """Divides the training pool among the clients of one group; `group` selects the random numbers.

    Returns:
      The rows of each client. Writers without examples in the test pool are left out.

    Raises:
      ValueError: too few examples or writers.
    """
    rules, train = split.rules, split.train
    partition, each, rows = PARTITIONS[rules.partition][0], rules.examples_per_client, train.rows
    stream, rng = (rules.seed, PARTITION, group), np.random.default_rng((rules.seed, SUBSAMPLE, group))
    if rules.partition == "writer":
        able = clients_of(split)
        without = f", without {split.left_out}" if split.left_out else ""
        accepted = f"at most {len(able)}, the number of writers{without}"
        check(num_clients <= len(able), "num_clients", num_clients, accepted)
        writer = np.where(np.isin(train.kind[rows], able), train.kind[rows], -1)
        parts = partition(writer, num_clients, seed=stream)
        return [rows[part if each is None else np.sort(rng.permutation(part)[:each])] for part in parts]
    needed = num_clients * (each or 1)
    if needed > len(rows):
        per_client = "" if each is None else f" with {each} examples each"
        remedies = ["fewer clients"] if (each or 1) <= len(rows) else []
        remedies += [f"examples_per_client of at most {len(rows) // num_clients}"] if num_clients <= len(rows) else []
        raise ValueError(
            f"num_clients: {num_clients} clients{per_client} need {needed} examples, but {split.dataset.name!r} has"
            f" {len(rows)} training examples for them; use {' or '.join(remedies) or 'more examples'}"
        )
    options = {"examples_per_client": each, "examples_seed": (*stream, 1), **rules.options}
    taken = {name: value for name, value in options.items() if name in _options_of(rules.partition)}
    if each is not None and "examples_per_client" not in taken:  # as many on average
        rows = rows[np.sort(rng.permutation(len(rows))[:needed])]
    return [rows[part] for part in partition(train.kind[rows], num_clients, seed=stream, **taken)]


def divide_test(split: Split, parts: list[np.ndarray], group: int) -> list[np.ndarray]:
    """Divides the test pool among the clients that `divide` has given the `parts` of the training pool.

    A client's test examples are of its own labels or writers where the partition decides on them. Otherwise all clients
    draw from one distribution: labels that are frequent in a client's training data by chance are not so in its tests.

    Raises:
      ValueError: a client with training examples of such labels alone that the test pool does not have; no test
        examples at all.
    """
    train, test, rules = split.train.kind, split.test.kind, split.rules
    if not len(split.test.rows):
        raise ValueError(
            f"heterogeneity {rules.heterogeneity!r}: a cluster of {sum(map(len, parts))} training examples has no test"
            " examples; use fewer clusters, or more examples of their labels"
        )
    if rules.partition not in (*OF_LABELS, "writer"):
        train, test = np.zeros_like(train), np.zeros_like(test)
    tested = np.unique(test[split.test.rows])
    untested = next((i for i, part in enumerate(parts) if not np.isin(train[part], tested).any()), None)
    if untested is not None:
        official = split.test.examples is not split.train.examples
        here = train[np.concatenate(parts)]
        lost = np.setdiff1d(here, tested)
        why = "none in the official test split" if official else "one, and none to hold out"
        listed = ", ".join(map(str, lost[:8].tolist())) + (", ..." if len(lost) > 8 else "")
        remedies = ["leave their examples out of the training data"] if np.isin(here, tested).any() else []
        remedies.append("use partition='iid'")
        least = int(np.isin(here, lost).sum()) + 1  # so many examples are not all of these labels
        if rules.partition == "dirichlet" and least * len(parts) <= len(here):
            remedies.append(f"set min_size={least} of jfcl.data.build")
        raise ValueError(
            f"partition {rules.partition!r}: client {untested} has no test examples, since of its labels there is"
            f" {why}: {listed}; {', or '.join(remedies)}"
        )
    kinds = [train[part] for part in parts]
    return allot(split.test.rows, test, kinds, seed=(rules.seed, ALLOT, group))


def hold_out(kind, fraction: float, *, seed) -> tuple[np.ndarray, np.ndarray]:
    """Splits indices into train and test, stratified by `kind`.

    Of every kind with `n > 1` examples, `round(fraction n)` are held out, at least 1 and at most `n - 1`. The only
    example of a kind stays in training; where every kind has only one, all together are divided as one kind. A single
    example is held out.

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
    starts = np.cumsum(np.unique(kind, return_counts=True)[1])[:-1]
    for of_kind in np.split(np.argsort(kind, kind="stable"), starts):
        if len(of_kind) > 1:
            count = int(np.clip(round(fraction * len(of_kind)), 1, len(of_kind) - 1))
            held[rng.permutation(of_kind)[:count]] = True
    if not held.any():  # every kind occurs once: no stratification
        count = int(np.clip(round(fraction * len(kind)), 1, max(len(kind) - 1, 1)))
        held[rng.permutation(len(kind))[:count]] = True
    return np.flatnonzero(~held), np.flatnonzero(held)


def allot(pool, kind, train_kinds, *, seed) -> list[np.ndarray]:
    """Divides test examples among clients in proportion to the kinds of their training examples.

    The examples of a kind are divided in proportion to each client's number of training examples of that kind, rounded
    so that rounding errors do not add up over kinds. A client without any test example gets one of a kind in its
    training data, which another client then also has.

    Args:
      pool: `[P]` indices of test examples; `kind[pool]` are their labels (or writers).
      train_kinds: a list of `N` arrays: the kinds of each client's training examples.

    Returns:
      List of `N` sorted index arrays, none empty.

    Raises:
      ValueError: a client without any of its kinds in the pool.

    Example:
      >>> parts = allot(np.arange(6), np.array([0, 0, 0, 0, 1, 1]), [[0, 0, 0, 0], [1, 1]], seed=0)
      >>> [part.tolist() for part in parts]
      [[0, 1, 2, 3], [4, 5]]
    """
    rng = np.random.default_rng(seed)
    kinds, train_kind = np.unique(np.concatenate(train_kinds), return_inverse=True)
    row = np.repeat(np.arange(len(train_kinds)), [len(part) for part in train_kinds])
    owed = np.zeros(len(train_kinds))
    owner = np.full(len(kind), -1)
    pool = pool[np.argsort(kind[pool], kind="stable")]
    begin, end = (np.searchsorted(kind[pool], kinds, side=side) for side in ("left", "right"))
    by_kind = np.argsort(train_kind, kind="stable")
    cuts = np.searchsorted(train_kind[by_kind], np.arange(len(kinds) + 1))
    for c in range(len(kinds)):
        clients, count = np.unique(row[by_kind[cuts[c] : cuts[c + 1]]], return_counts=True)
        examples = rng.permutation(pool[begin[c] : end[c]])
        share = count / count.sum() * len(examples)
        whole = np.floor(share + 1e-9).astype(np.int64)
        extra = np.lexsort((rng.random(len(clients)), whole - share - owed[clients]))[: len(examples) - whole.sum()]
        whole[extra] += 1
        owed[clients] += share - whole
        owner[examples] = np.repeat(clients, whole)
    parts = parts_of(owner, range(len(train_kinds)))
    for i, part in enumerate(parts):
        if not len(part):
            own = pool[np.isin(kind[pool], train_kinds[i])]
            if not len(own):
                raise ValueError(
                    f"no test examples for client {i}: the pool has none of the kinds of its training data"
                )
            parts[i] = rng.choice(own, 1)
    return parts
