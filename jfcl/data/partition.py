"""Partitions of the examples of a data set among clients.

A partition has the signature `f(labels, num_clients, *, seed, **options)`. `labels` is `[n]` integers, one for each
example (for `by_writer`, its writer); partitions that do not depend on labels also take the number `n`. It returns a
list of `N` disjoint `np.int64` arrays of indices in `0 .. n-1`, none empty. The result is a function of the arguments
alone; `seed` is an integer or a sequence of integers, for `np.random.default_rng`.
"""

from __future__ import annotations

import numpy as np

from jfcl.core import check, check_count
from jfcl.data.label_skew import by_distribution, by_label, dirichlet, inner_dirichlet, pathological
from jfcl.data.parts import Seed, as_labels, check_enough, count_of, equal_sizes, parts_of, sizes_like, sorted_by


def iid(num_examples, num_clients: int, *, seed: Seed, examples_per_client: int | None = None) -> list[np.ndarray]:
    """Divides a random permutation into equal parts.

    Args:
      num_examples: `n`, or the labels `[n]`.
      examples_per_client: every client gets exactly that many and the rest stays unused; `None`: all examples are
        divided, and sizes differ by at most one.

    Returns:
      List of `N` sorted index arrays. Cost: O(examples).

    Raises:
      ValueError: fewer examples than the clients need.

    Example:
      >>> [len(part) for part in iid(10, 3, seed=0)]
      [4, 3, 3]
    """
    num_examples = count_of(num_examples)
    check_enough(num_examples, num_clients, examples_per_client)
    return by_sizes(num_examples, equal_sizes(num_examples, num_clients, examples_per_client), seed=seed)


def stratified(labels, num_clients: int, *, seed: Seed, examples_per_client: int | None = None) -> list[np.ndarray]:
    """Divides the examples, sorted by label, in turn, into equal parts with every label's share.

    With few examples on a client, `iid` leaves many clients without some of the labels. Here the counts of a label
    differ by at most one between clients, and each client has every label with a share of at least one example.

    Args:
      labels: `[n]` integers.
      examples_per_client: every client gets exactly that many, evenly spaced in that order; `None`: all examples are
        divided, and sizes differ by at most one.

    Returns:
      List of `N` sorted index arrays. Cost: O(examples log examples).

    Raises:
      ValueError: fewer examples than the clients need.

    Example:
      >>> labels = np.repeat([0, 1, 2], [60, 30, 30])
      >>> [np.bincount(labels[part]).tolist() for part in stratified(labels, 2, seed=0, examples_per_client=8)]
      [[4, 2, 2], [4, 2, 2]]
    """
    labels = as_labels(labels)
    check_enough(len(labels), num_clients, examples_per_client)
    rng = np.random.default_rng(seed)
    order = sorted_by(labels, rng)
    if examples_per_client is not None:
        wanted = num_clients * examples_per_client
        order = order[np.arange(wanted) * len(order) // wanted]
    return [np.sort(order[i::num_clients]) for i in rng.permutation(num_clients)]


def by_writer(writer, num_clients: int | None = None, *, seed: Seed) -> list[np.ndarray]:
    """Makes one client of each writer (or user, speaker, ...): real, unequal clients.

    Args:
      writer: `[n]` integers; examples with a negative one belong to no client.
      num_clients: how many writers are drawn at random; `None`: all of them, in the order of their ids.

    Returns:
      List of `N` sorted index arrays; the writer of client `i` is `writer[parts[i][0]]`.

    Raises:
      ValueError: more clients than writers.

    Example:
      >>> [part.tolist() for part in by_writer([7, 3, 7, -1], seed=0)]
      [[1], [0, 2]]
    """
    writer = np.asarray(writer)
    check(writer.ndim == 1 and writer.dtype.kind in "iu", "writer", writer.dtype, "a vector of integers")
    ids = np.unique(writer[writer >= 0])
    if num_clients is not None:
        check_count("num_clients", num_clients)
        check(num_clients <= len(ids), "num_clients", num_clients, f"at most {len(ids)}, the number of writers")
        ids = np.sort(np.random.default_rng(seed).permutation(ids)[:num_clients])
    check(len(ids) > 0, "writer", "no writer id", "at least one writer with examples")
    return parts_of(writer, ids)


def power_law_sizes(
    num_examples: int, num_clients: int, *, exponent: float = 1.0, seed: Seed, min_size: int = 1
) -> np.ndarray:
    """Returns client sizes that decrease as `rank ** -exponent`: a few large clients, many small ones.

    Args:
      exponent: at least 0; 0 gives equal sizes.
      min_size: the examples that every client gets first; the rest is divided by the power law.

    Returns:
      `[N]` int64, in random order, with the sum `num_examples`.

    Raises:
      ValueError: negative or infinite `exponent`; fewer than `N * min_size` examples.

    Example:
      >>> sorted(power_law_sizes(110, 4, exponent=1.0, seed=0, min_size=5).tolist())
      [16, 19, 27, 48]
    """
    check(np.isfinite(exponent) and exponent >= 0, "exponent", exponent, "at least 0 and finite")
    check_enough(num_examples, num_clients)
    weight = np.arange(1, num_clients + 1, dtype=np.float64) ** -float(exponent)
    return sizes_like(weight, num_examples, seed=seed, min_size=min_size)


def by_sizes(num_examples: int, sizes, *, seed: Seed) -> list[np.ndarray]:
    """Divides a random permutation into parts of the given sizes.

    Args:
      sizes: `[N]` positive integers with a sum of at most `num_examples`; the rest stays unused.

    Raises:
      ValueError: a client without examples; a sum of sizes above `num_examples`.

    Example:
      >>> [len(part) for part in by_sizes(10, [5, 1, 2], seed=0)]
      [5, 1, 2]
    """
    sizes = np.asarray(sizes)
    check(sizes.ndim == 1 and sizes.dtype.kind in "iu" and len(sizes) > 0, "sizes", sizes, "a vector of integers")
    check(sizes.min() >= 1, "sizes", sizes, "positive: every client needs an example")
    check(sizes.sum() <= num_examples, "sizes", int(sizes.sum()), f"at most {num_examples} in all")
    order = np.random.default_rng(seed).permutation(num_examples)[: sizes.sum()]
    return [np.sort(part) for part in np.split(order, np.cumsum(sizes)[:-1])]


def power_law(
    num_examples,
    num_clients: int,
    *,
    exponent: float = 1.0,
    seed: Seed,
    min_size: int = 1,
    examples_seed: Seed | None = None,
) -> list[np.ndarray]:
    """Divides the examples at random into parts with `power_law_sizes`.

    Args:
      num_examples: `n`, or the labels `[n]`.
      exponent, min_size: as in `power_law_sizes`.
      seed: of the sizes.
      examples_seed: of the division of the examples; default: `seed`.

    Example:
      >>> sum(len(part) for part in power_law(100, 7, exponent=2.0, seed=0))
      100
    """
    num_examples = count_of(num_examples)
    sizes = power_law_sizes(num_examples, num_clients, exponent=exponent, seed=seed, min_size=min_size)
    return by_sizes(num_examples, sizes, seed=seed if examples_seed is None else examples_seed)


def linear(
    num_examples, num_clients: int, *, seed: Seed, min_size: int = 1, examples_seed: Seed | None = None
) -> list[np.ndarray]:
    """Divides the examples at random into parts of sizes that grow linearly: in proportion to 1, 2, ..., `N`.

    Args:
      num_examples: `n`, or the labels `[n]`.
      seed: of the order of the sizes among the clients.
      min_size: the examples that every client gets first; the rest is divided in these proportions.
      examples_seed: of the division of the examples; default: `seed`.

    Returns:
      List of `N` sorted index arrays that together hold every example.

    Raises:
      ValueError: fewer than `N * min_size` examples.

    Source: `LinearPartitioner` of flwr-datasets.

    Example:
      >>> sorted(len(part) for part in linear(64, 4, seed=0))
      [7, 13, 19, 25]
    """
    num_examples = count_of(num_examples)
    check_enough(num_examples, num_clients)
    sizes = sizes_like(np.arange(1.0, num_clients + 1), num_examples, seed=seed, min_size=min_size)
    return by_sizes(num_examples, sizes, seed=seed if examples_seed is None else examples_seed)


def exponential(
    num_examples,
    num_clients: int,
    *,
    exponent: float = 1.0,
    seed: Seed,
    min_size: int = 1,
    examples_seed: Seed | None = None,
) -> list[np.ndarray]:
    """Divides the examples at random into parts of sizes in proportion to `exp(exponent * rank)`, rank 1, ..., `N`.

    With `exponent` 1, three clients have 95 % of the examples, whatever `N` is; a small one, such as 0.1, is milder.

    Args:
      num_examples: `n`, or the labels `[n]`.
      exponent: at least 0; 0 gives equal sizes.
      seed, min_size, examples_seed: as in `linear`.

    Returns:
      List of `N` sorted index arrays that together hold every example.

    Raises:
      ValueError: negative or infinite `exponent`; fewer than `N * min_size` examples.

    Source: `ExponentialPartitioner` of flwr-datasets, which has exponent 1 and refuses clients without examples.

    Example:
      >>> sorted(len(part) for part in exponential(1000, 4, seed=0))
      [33, 88, 237, 642]
    """
    num_examples = count_of(num_examples)
    check(np.isfinite(exponent) and exponent >= 0, "exponent", exponent, "at least 0 and finite")
    check_enough(num_examples, num_clients)
    weight = np.exp(-float(exponent) * np.arange(num_clients))
    sizes = sizes_like(weight, num_examples, seed=seed, min_size=min_size)
    return by_sizes(num_examples, sizes, seed=seed if examples_seed is None else examples_seed)


PARTITIONS = {
    "iid": (iid, "equal parts at random"),
    "stratified": (stratified, "equal parts with every label's share"),
    "writer": (by_writer, "one client per real writer (data sets with writer ids)"),
    "label": (by_label, "a few labels per client (shards, McMahan et al.)"),
    "pathological": (pathological, "exactly so many labels per client (Li et al., NIID-Bench)"),
    "dirichlet": (dirichlet, "each label's shares of the clients drawn from a Dirichlet distribution"),
    "inner_dirichlet": (inner_dirichlet, "equal sizes, each client's label proportions drawn from a Dirichlet one"),
    "distribution": (by_distribution, "each label's shares of the clients given as a table"),
    "power_law": (power_law, "random content, sizes that follow a power law"),
    "linear": (linear, "random content, sizes that grow linearly"),
    "exponential": (exponential, "random content, sizes that grow exponentially"),
}
# Those that need a classification data set.
OF_LABELS = ("stratified", "label", "pathological", "dirichlet", "inner_dirichlet", "distribution")
OF_ONE_DIVISION = ("writer", "distribution")  # not for populations, which divide a data set repeatedly
