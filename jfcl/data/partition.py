"""Partitions of the examples of a data set among clients.

A partition has the signature `f(labels, num_clients, *, seed, **options)`. `labels` is `[n]` integers, one for each
example (for `by_writer`, its writer); partitions that do not depend on labels also take the number `n`. It returns a
list of `N` disjoint, sorted `np.int64` arrays of indices in `0 .. n-1`, none empty, and raises `ValueError` for fewer
examples than the clients need. The result is a function of the arguments alone; `seed` is an integer or a sequence of
integers, for `np.random.default_rng`.
"""

import heapq
import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np

from jfcl.core import check, check_count, check_integers, is_number, require

Seed = int | Sequence[int]
LARGEST = 1e290  # alpha of Dirichlet: all shares are equal long before, and beyond it their sum overflows in the draw


def iid(num_examples, num_clients: int, *, seed: Seed, examples_per_client: int | None = None) -> list[np.ndarray]:
    """Divides a random permutation into equal parts.

    Args:
      num_examples: `n`, or the labels `[n]`.
      examples_per_client: every client gets exactly that many and the others stay unused; `None`: all examples are
        divided, and sizes differ by at most one.

    Example:
      >>> [len(part) for part in iid(10, 3, seed=0)]
      [4, 3, 3]
    """
    num_examples = _enough(num_examples, num_clients, examples_per_client=examples_per_client)
    divided = num_examples if examples_per_client is None else num_clients * examples_per_client
    return by_sizes(num_examples, _equal_sizes(divided, num_clients), seed=seed)


def stratified(labels, num_clients: int, *, seed: Seed, examples_per_client: int | None = None) -> list[np.ndarray]:
    """Divides the examples, sorted by label, in turn, into equal parts with every label's share.

    With few examples on a client, `iid` leaves many clients without some of the labels. Here the counts of a label
    differ by at most one between clients, and each client has every label with a share of at least one example. With
    `examples_per_client`, each has exactly that many, evenly spaced in that order.

    Example:
      >>> labels = np.repeat([0, 1, 2], [60, 30, 30])
      >>> [np.bincount(labels[part]).tolist() for part in stratified(labels, 2, seed=0, examples_per_client=8)]
      [[4, 2, 2], [4, 2, 2]]
    """
    labels = _as_labels(labels, num_clients, examples_per_client=examples_per_client)
    rng = np.random.default_rng(seed)
    order = _sorted_by(labels, rng)
    divided = len(order) if examples_per_client is None else num_clients * examples_per_client
    order = order[np.arange(divided) * len(order) // divided]
    return [np.sort(order[i::num_clients]) for i in rng.permutation(num_clients)]


def by_writer(writer, num_clients: int | None = None, *, seed: Seed) -> list[np.ndarray]:
    """Makes one client of each writer (or user, speaker, ...): real, unequal clients.

    Args:
      writer: `[n]` integers; examples with a negative one belong to no client.
      num_clients: how many writers are drawn at random; `None`: all of them, in the order of their ids.

    Returns:
      List of `N` sorted index arrays; the writer of client `i` is `writer[parts[i][0]]`.

    Example:
      >>> [part.tolist() for part in by_writer([7, 3, 7, -1], seed=0)]
      [[1], [0, 2]]
    """
    writer = check_integers("writer", writer)
    ids = np.unique(writer[writer >= 0])
    if num_clients is not None:
        check_count("num_clients", num_clients)
        check(num_clients <= len(ids), "num_clients", num_clients, f"at most {len(ids)}, the number of writers")
        ids = np.sort(np.random.default_rng(seed).permutation(ids)[:num_clients])
    require(len(ids) > 0, "no writer has an example")
    return parts_of(writer, ids)


def by_sizes(num_examples: int, sizes, *, seed: Seed) -> list[np.ndarray]:
    """Divides a random permutation into parts of `sizes`, positive integers; the other examples stay unused.

    Example:
      >>> [len(part) for part in by_sizes(10, [5, 1, 2], seed=0)]
      [5, 1, 2]
    """
    sizes = check_integers("sizes", sizes, within=(1, num_examples))
    check(sizes.sum() <= num_examples, "sizes", int(sizes.sum()), f"at most {num_examples} in all")
    order = np.random.default_rng(seed).permutation(num_examples)[: sizes.sum()]
    return [np.sort(part) for part in np.split(order, np.cumsum(sizes)[:-1])]


def power_law(
    num_examples, num_clients: int, *, exponent: float = 1.0, seed: Seed, min_size: int = 1
) -> list[np.ndarray]:
    """Divides the examples at random into parts whose sizes decrease as `rank ** -exponent`: few large, many small.

    Args:
      num_examples: `n`, or the labels `[n]`.
      exponent: at least 0, which gives equal sizes.
      min_size: the examples that every client gets first; the others are divided by the power law.

    Example:
      >>> sorted(len(part) for part in power_law(110, 4, exponent=1.0, seed=0, min_size=5))
      [16, 19, 27, 48]
    """
    check(is_number(exponent) and 0 <= exponent < np.inf, "exponent", exponent, "at least 0 and finite")
    weights = np.arange(1, num_clients + 1, dtype=np.float64) ** -float(exponent)
    return _by_weights(num_examples, num_clients, seed, min_size, lambda rng: weights)


def quantity(num_examples, num_clients: int, *, alpha: float = 0.5, seed: Seed, min_size: int = 1) -> list[np.ndarray]:
    """Divides the examples at random into parts of sizes drawn from Dirichlet(alpha, ..., alpha).

    Args:
      alpha: positive; a small one gives a few clients nearly all examples, a large one equal sizes.
      num_examples, min_size: as in `power_law`.

    Source: Li, Diao, Chen, He 2022 ("Federated learning on non-iid data silos"), quantity skew; PACFL.

    Example:
      >>> sorted(len(part) for part in quantity(100, 4, alpha=1.0, seed=0))
      [1, 2, 39, 58]
    """
    return _by_weights(num_examples, num_clients, seed, min_size, lambda rng: dirichlet_draw(rng, alpha, num_clients))


def lognormal(num_examples, num_clients: int, *, sigma: float = 1.0, seed: Seed, min_size: int = 1) -> list[np.ndarray]:
    """Divides the examples at random into parts of sizes in proportion to draws from a log-normal distribution.

    Args:
      sigma: the standard deviation of the logarithms, at least 0, which gives equal sizes, and at most 100.
      num_examples, min_size: as in `power_law`.

    Source: FedEM, appendix I.1 (sigma 2).

    Example:
      >>> sorted(len(part) for part in lognormal(100, 4, sigma=1.0, seed=0))
      [18, 22, 23, 37]
    """
    check(is_number(sigma) and 0 <= sigma <= 100, "sigma", sigma, "at least 0, and at most 100")
    return _by_weights(num_examples, num_clients, seed, min_size, lambda rng: rng.lognormal(0, sigma, num_clients))


def _by_weights(num_examples, num_clients: int, seed: Seed, min_size: int, draw) -> list[np.ndarray]:
    """Divides the examples at random into parts of `min_size` and a rest in proportion to `draw(rng)`, shuffled."""
    num_examples = _enough(num_examples, num_clients, min_size=min_size)
    rng = np.random.default_rng(seed)
    sizes = apportioned(num_examples - num_clients * min_size, draw(rng)) + min_size
    return by_sizes(num_examples, rng.permutation(sizes), seed=seed)


def by_label(labels, num_clients: int, *, labels_per_client: int = 2, seed: Seed) -> list[np.ndarray]:
    """Cuts the examples, sorted by label, into `N * labels_per_client` equal shards, and deals those to clients.

    A shard at the border between two labels holds both, so a client may have a few labels more. With classes of equal
    size, and a number of shards that divides them, it has no more.

    Source: McMahan et al. 2017, section 3 ("pathological non-iid").

    Example:
      >>> parts = by_label([0, 1, 2, 3] * 10, 4, labels_per_client=1, seed=0)
      >>> sorted({int(i % 4) for i in part}.pop() for part in parts)
      [0, 1, 2, 3]
    """
    labels = _as_labels(labels, num_clients, labels_per_client=labels_per_client)
    rng = np.random.default_rng(seed)
    shards = np.array_split(_sorted_by(labels, rng), num_clients * labels_per_client)
    dealt = rng.permutation(len(shards)).reshape(num_clients, labels_per_client)
    return [np.sort(np.concatenate([shards[s] for s in row])) for row in dealt]


def pathological(labels, num_clients: int, *, labels_per_client: int = 2, seed: Seed) -> list[np.ndarray]:
    """Gives every client exactly `labels_per_client` labels, and divides each label equally among its clients.

    In contrast to the shards of `by_label`, no client has more labels, and sizes differ: those of a label with few
    clients are large. The clients' first labels are dealt in turn, in a random order; further ones are drawn at random.
    With fewer clients than labels, the labels that no client has yet are dealt first. A label with fewer examples than
    clients is refused, and the examples of one without a client stay unused.

    Source: Li, Diao, Chen, He 2022 ("Federated learning on non-iid data silos"), quantity-based label imbalance.

    Example:
      >>> labels = np.arange(100) % 10
      >>> [len(np.unique(labels[part])) for part in pathological(labels, 7, labels_per_client=3, seed=0)]
      [3, 3, 3, 3, 3, 3, 3]
    """
    labels = _as_labels(labels, num_clients, labels_per_client=labels_per_client)
    values, label, counts = np.unique(labels, return_inverse=True, return_counts=True)
    k = len(values)
    check(labels_per_client <= k, "labels_per_client", labels_per_client, f"at most {k}, the number of labels")
    rng = np.random.default_rng(seed)
    # A client holds the labels of its highest scores: 2 for a label that it is dealt, below 1 for one that is drawn.
    score, nth = rng.random((num_clients, k)), np.arange(max(num_clients, min(k, num_clients * labels_per_client)))
    score[nth % num_clients, rng.permutation(k)[nth % k]] = 2
    held = rng.permutation(np.argsort(-score, axis=1, kind="stable")[:, :labels_per_client])
    owner = np.full(len(labels), -1)
    for j, examples in enumerate(np.split(_sorted_by(label, rng), np.cumsum(counts)[:-1])):
        owners = np.flatnonzero((held == j).any(axis=1))
        if len(owners) > len(examples):
            few = ", ".join(map(str, values[counts < num_clients].tolist()))
            said = f"label {values[j]} has {len(examples)} examples for the {len(owners)} clients that should have it"
            raise ValueError(f"{said}; use at most {counts.min()} clients, or leave out the examples of labels {few}")
        if len(owners):
            owner[examples] = np.repeat(owners, _equal_sizes(len(examples), len(owners)))
    return parts_of(owner, range(num_clients))


def dirichlet(labels, num_clients: int, *, alpha: float = 0.5, seed: Seed, min_size: int = 1) -> list[np.ndarray]:
    """Divides every label's examples among clients in proportions drawn from Dirichlet(alpha, ..., alpha).

    The usual recipe draws again until no client is too small, which for small `alpha` never ends. Here there is one
    draw. Then, while a client has fewer than `min_size` examples, it gets a random one of the largest client.
    Proportions are as drawn except for these few examples, and the division always terminates.

    Args:
      alpha: positive; a small one is skewed (one client holds nearly all of a label), a large one is iid.
      min_size: the least number of examples of a client.

    Source: Yurochkin et al. 2019 ("Bayesian nonparametric federated learning of neural networks"). Hsu, Qi, Brown 2019
    draw the shares of the labels in each client instead.

    Example:
      >>> sum(len(part) for part in dirichlet([0, 1] * 50, 20, alpha=1e-3, seed=0))
      100
    """
    labels = _as_labels(labels, num_clients, min_size=min_size)
    rng = np.random.default_rng(seed)
    owner = np.empty(len(labels), np.int64)
    for label in np.unique(labels):
        of_label = rng.permutation(np.flatnonzero(labels == label))
        share = dirichlet_draw(rng, alpha, num_clients)
        cuts = np.floor(np.cumsum(share) * len(of_label) + 1e-9).astype(np.int64)
        cuts[-1] = len(of_label)
        owner[of_label] = np.searchsorted(cuts, np.arange(len(of_label)), side="right")
    size = np.bincount(owner, minlength=num_clients)
    parts = [rng.permutation(part).tolist() for part in parts_of(owner, range(num_clients))]
    heap = sorted(zip((-size).tolist(), range(num_clients), strict=True))
    for i in np.flatnonzero(size < min_size):
        while len(parts[i]) < min_size:
            count, largest = heap[0]  # above min_size, because there are N * min_size examples in all
            parts[i].append(parts[largest].pop())
            heapq.heapreplace(heap, (count + 1, largest))
    return [np.sort(np.array(part, np.int64)) for part in parts]


def label_groups(
    labels, num_clients: int, *, num_groups: int = 3, alpha: float = 0.5, seed: Seed, min_size: int = 1
) -> list[np.ndarray]:
    """Divides the labels into groups at random, and the examples of each group as `dirichlet` does those of a label.

    Clients with the same groups thus have the same labels, in the shares of the data set.

    Args:
      num_groups: the groups, of equal numbers of labels up to one; at most the number of labels.
      alpha, min_size: as in `dirichlet`.

    Source: FedEM, section 4.1 (CIFAR-10 and CIFAR-100, alpha 0.4).

    Example:
      >>> parts = label_groups(np.arange(90) % 6, 3, num_groups=2, alpha=1e-3, seed=1)
      >>> [sorted({int(i % 6) for i in part}) for part in parts]
      [[2], [0, 1, 2], [3, 4, 5]]
    """
    labels = _as_labels(labels, num_clients, min_size=min_size)
    values, label = np.unique(labels, return_inverse=True)
    check_count("num_groups", num_groups)
    check(num_groups <= len(values), "num_groups", num_groups, f"at most {len(values)}, the number of labels")
    order = np.random.default_rng(seed).permutation(len(values))
    return dirichlet(order[label] % num_groups, num_clients, alpha=alpha, seed=seed, min_size=min_size)


def by_distribution(labels, num_clients: int, *, distribution, seed: Seed) -> list[np.ndarray]:
    """Divides every label's examples among clients in the proportions of a table.

    Args:
      labels: `[n]` integers from 0.
      distribution: `[N, K]` finite numbers, at least 0; column `j` has the clients' shares in the examples of label
        `j`, up to a common factor. A table of counts that add up to the number of a label's examples gives exactly
        these counts.

    Returns:
      List of `N` sorted index arrays: every count is within one of its share. They hold every example of the labels
      with a positive entry in their column.

    Source: `DistributionPartitioner` of flwr-datasets.

    Example:
      >>> labels = np.array([0] * 8 + [1] * 4)
      >>> parts = by_distribution(labels, 2, distribution=[[3, 0], [1, 1]], seed=0)
      >>> [np.bincount(labels[part], minlength=2).tolist() for part in parts]
      [[6, 0], [2, 4]]
    """
    labels = _as_labels(labels, num_clients)
    table = as_distribution(distribution, num_clients)
    in_table = labels.min() >= 0 and labels.max() < table.shape[1]
    check(in_table, "labels", [labels.min(), labels.max()], f"in 0..{table.shape[1] - 1}, a column of the table each")
    rng = np.random.default_rng(seed)
    owner = np.full(len(labels), -1)
    for j in np.flatnonzero(table.any(axis=0)):
        examples = rng.permutation(np.flatnonzero(labels == j))
        counts = apportioned(len(examples), table[:, j] / table[:, j].max())
        owner[examples] = np.repeat(np.arange(num_clients), counts)
    parts = parts_of(owner, range(num_clients))
    none = [i for i, part in enumerate(parts) if not len(part)]
    require(not none, f"distribution leaves clients {none[:5]} without examples")
    return parts


def _enough(examples: Any, num_clients: int, **needed: int | None) -> int:
    """Returns the number of examples, given by it or by their labels; `ValueError` for fewer than clients need.

    `needed` is the option that says how many a client needs at least, under its name; by default, and for None, 1.
    """
    num_examples = np.size(examples) if np.ndim(examples) else examples
    needed = {name: count for name, count in needed.items() if count is not None}
    for name, count in {**needed, "num_clients": num_clients, "num_examples": num_examples}.items():
        check_count(name, count)
    size = max(needed.values(), default=1)
    accepted = f"at most {num_examples // size} ({num_examples} examples, at least {size} a client)"
    check(num_clients * size <= num_examples, "num_clients", num_clients, accepted)
    return num_examples


def parts_of(owner: np.ndarray, owners) -> list[np.ndarray]:
    """Returns the indices of the examples of each of `owners` (sorted integers), where `owner` `[n]` has them."""
    order = np.argsort(owner, kind="stable")
    first, last = (np.searchsorted(owner[order], owners, side=side) for side in ("left", "right"))
    return [order[a:b].astype(np.int64) for a, b in zip(first, last, strict=True)]


def as_distribution(distribution, num_clients: int, num_labels: int | None = None) -> np.ndarray:
    """Returns a table of `by_distribution` as float64; raises `ValueError` unless it is `[N, labels]` and valid."""
    try:
        table = np.asarray(distribution, np.float64)
    except (TypeError, ValueError):
        table = np.full((), np.nan)
    columns = num_labels or (table.shape[-1] if table.ndim == 2 else 1)
    accepted = f"a table of numbers of shape ({num_clients}, {columns}): a row per client, a column per label"
    check(table.shape == (num_clients, columns), "distribution", np.shape(table), accepted)
    valid = np.isfinite(table).all() and (table >= 0).all() and table.any()
    check(valid, "distribution", table, "a table of finite numbers, at least 0, and not all 0")
    return table


def _as_labels(labels, num_clients: int, **needed: int | None) -> np.ndarray:
    """Returns labels as an array, enough of them for all clients, as `_enough` says."""
    labels = check_integers("labels", labels)
    _enough(labels, num_clients, **needed)
    return labels


def _sorted_by(labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns all indices in the order of their labels, those of equal labels in random order."""
    shuffled = rng.permutation(len(labels))
    return shuffled[np.argsort(labels[shuffled], kind="stable")]


def _equal_sizes(num_examples: int, num_clients: int) -> np.ndarray:
    """Returns `[N]` sizes of equal parts, up to one example."""
    return num_examples // num_clients + (np.arange(num_clients) < num_examples % num_clients)


def dirichlet_draw(rng: np.random.Generator, alpha: float, count: int) -> np.ndarray:
    """Returns `[count]` shares from Dirichlet(alpha, ..., alpha), with `alpha` positive and finite."""
    check(is_number(alpha) and 0 < alpha < np.inf, "alpha", alpha, "positive and finite")
    share = rng.dirichlet(np.full(count, min(alpha, LARGEST)))
    if not np.isfinite(share).all():  # alpha so small that the draw underflows: the limit is one that has all
        share = np.eye(count)[rng.integers(count)]
    return share


def apportioned(total: int, weight: np.ndarray) -> np.ndarray:
    """Returns integers with the sum `total`, each within one of its share in proportion to `weight`.

    Shares are rounded down, and what is left goes to those of the largest remainders.
    """
    share = total * weight / weight.sum()
    sizes = np.floor(share).astype(np.int64)
    sizes[np.argsort(sizes - share, kind="stable")[: total - sizes.sum()]] += 1
    return sizes


PARTITIONS = {
    "iid": (iid, "equal parts at random"),
    "stratified": (stratified, "equal parts, each with the shares of labels of the whole"),
    "writer": (by_writer, "one client per real writer (data sets with writer ids)"),
    "label": (by_label, "a few labels per client (shards, McMahan et al.)"),
    "pathological": (pathological, "exactly this number of labels per client (Li et al., NIID-Bench)"),
    "dirichlet": (dirichlet, "each label's shares of the clients drawn from a Dirichlet distribution"),
    "distribution": (by_distribution, "each label's shares of the clients given as a table"),
    "power_law": (power_law, "random content, sizes that follow a power law"),
    "quantity": (quantity, "random content, sizes drawn from a Dirichlet distribution"),
    "lognormal": (lognormal, "random content, sizes drawn from a log-normal distribution"),
    "label_groups": (label_groups, "groups of labels, each divided as a label by dirichlet (FedEM)"),
}
# Those that need a classification data set.
OF_LABELS = ("stratified", "label", "pathological", "dirichlet", "distribution", "label_groups")
# Those that decide on sizes alone.
OF_SIZES = ("power_law", "quantity", "lognormal")
OF_ONE_DIVISION = ("writer", "distribution")  # not for populations, which divide a data set repeatedly


def partitions_with(option: str) -> tuple[str, ...]:
    """Returns the partitions that take an option.

    Example:
      >>> partitions_with("alpha")
      ('dirichlet', 'quantity', 'label_groups')
    """
    return tuple(name for name, (make, _) in PARTITIONS.items() if option in inspect.signature(make).parameters)
