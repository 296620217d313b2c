"""Partitions in which clients differ in their labels; see `jfcl.data.partition`."""

from __future__ import annotations

import numpy as np

from jfcl.core import check, check_count
from jfcl.data.parts import Seed, apportioned, as_labels, check_enough, equal_sizes, parts_of, sorted_by

LARGEST = 1e290  # alpha of Dirichlet: all shares are equal long before, and beyond it their sum overflows in the draw


def by_label(labels, num_clients: int, *, labels_per_client: int = 2, seed: Seed) -> list[np.ndarray]:
    """Cuts the examples, sorted by label, into `N * labels_per_client` equal shards, and deals those to clients.

    A shard at the border between two labels holds both, so a client may have a few labels more than
    `labels_per_client`. With classes of equal size, and a number of shards that divides them, it has no more.

    Args:
      labels: `[n]` integers.

    Returns:
      List of `N` sorted index arrays that together hold every example; sizes differ by at most
      `labels_per_client`.

    Raises:
      ValueError: fewer examples than shards.

    Source: McMahan et al. 2017, section 3 ("pathological non-iid").

    Example:
      >>> parts = by_label([0, 1, 2, 3] * 10, 4, labels_per_client=1, seed=0)
      >>> sorted({int(i % 4) for i in part}.pop() for part in parts)
      [0, 1, 2, 3]
    """
    labels = as_labels(labels)
    check_count("labels_per_client", labels_per_client)
    check_enough(len(labels), num_clients, labels_per_client)
    rng = np.random.default_rng(seed)
    shards = np.array_split(sorted_by(labels, rng), num_clients * labels_per_client)
    dealt = rng.permutation(len(shards)).reshape(num_clients, labels_per_client)
    return [np.sort(np.concatenate([shards[s] for s in row])) for row in dealt]


def pathological(labels, num_clients: int, *, labels_per_client: int = 2, seed: Seed) -> list[np.ndarray]:
    """Gives every client exactly `labels_per_client` labels, and divides each label equally among its clients.

    In contrast to the shards of `by_label`, no client has more labels, and sizes differ: those of a label with few
    clients are large. The clients' first labels are dealt in turn, in a random order; further ones are drawn at random.
    With fewer clients than labels, the labels that no client has yet are dealt first.

    Args:
      labels: `[n]` integers.

    Returns:
      List of `N` sorted index arrays. They hold every example if `N * labels_per_client` is at least the number of
      labels; else the examples of labels without a client stay unused. Cost: O(examples log examples + N * labels).

    Raises:
      ValueError: more `labels_per_client` than labels; a label with fewer examples than clients.

    Source: Li, Diao, Chen, He 2022 ("Federated learning on non-iid data silos"), quantity-based label imbalance.

    Example:
      >>> labels = np.arange(100) % 10
      >>> [len(np.unique(labels[part])) for part in pathological(labels, 7, labels_per_client=3, seed=0)]
      [3, 3, 3, 3, 3, 3, 3]
    """
    labels = as_labels(labels)
    check_count("labels_per_client", labels_per_client)
    check_enough(len(labels), num_clients, labels_per_client)
    values, label = np.unique(labels, return_inverse=True)
    k = len(values)
    check(labels_per_client <= k, "labels_per_client", labels_per_client, f"at most {k}, the number of labels")
    rng = np.random.default_rng(seed)
    # A client holds the labels of its highest scores: 2 for a label that it is dealt, below 1 for one that is drawn.
    score, nth = rng.random((num_clients, k)), np.arange(max(num_clients, min(k, num_clients * labels_per_client)))
    score[nth % num_clients, rng.permutation(k)[nth % k]] = 2
    held = rng.permutation(np.argsort(-score, axis=1, kind="stable")[:, :labels_per_client])
    order, starts = sorted_by(label, rng), np.concatenate([[0], np.cumsum(np.bincount(label))])
    owner = np.full(len(labels), -1)
    for j in range(k):
        owners, examples = np.flatnonzero((held == j).any(axis=1)), order[starts[j] : starts[j + 1]]
        if len(owners) > len(examples):
            few = np.diff(starts) < num_clients
            enough = (~few).sum() >= labels_per_client
            remedy = "leave out the examples of labels " + ", ".join(map(str, values[few].tolist()))
            raise ValueError(
                f"labels_per_client, num_clients: label {values[j]} has {len(examples)} examples for the {len(owners)}"
                f" clients that should have it; {remedy if enough else f'use at most {np.diff(starts).min()} clients'}"
            )
        if len(owners):
            owner[examples] = np.repeat(owners, equal_sizes(len(examples), len(owners), None))
    return parts_of(owner, range(num_clients))


def dirichlet(labels, num_clients: int, *, alpha: float = 0.5, seed: Seed, min_size: int = 1) -> list[np.ndarray]:
    """Divides every label's examples among clients in proportions drawn from Dirichlet(alpha, ..., alpha).

    The usual recipe draws again until no client is too small, which for small `alpha` never ends. Here there is one
    draw. Then, while a client has fewer than `min_size` examples, it gets a random one of the largest client.
    Proportions are as drawn except for these few examples, and the division always terminates.

    Args:
      labels: `[n]` integers.
      alpha: positive; a small one is skewed (one client holds nearly all of a label), a large one is iid.
      min_size: the least number of examples of a client.

    Returns:
      List of `N` sorted index arrays that together hold every example. Cost: O(examples + labels * N).

    Raises:
      ValueError: `alpha` not positive and finite; fewer than `N * min_size` examples.

    Source: Hsu, Qi, Brown 2019 ("Measuring the effects of non-identical data distribution").

    Example:
      >>> sum(len(part) for part in dirichlet([0, 1] * 50, 20, alpha=1e-3, seed=0))
      100
    """
    labels = as_labels(labels)
    check(np.isfinite(alpha) and alpha > 0, "alpha", alpha, "positive and finite")
    check_count("min_size", min_size)
    check_enough(len(labels), num_clients, min_size)
    rng = np.random.default_rng(seed)
    owner = np.empty(len(labels), np.int64)
    for label in np.unique(labels):
        of_label = rng.permutation(np.flatnonzero(labels == label))
        share = rng.dirichlet(np.full(num_clients, min(alpha, LARGEST)))
        if not np.isfinite(share).all():  # alpha so small that the draw underflows: the limit is one client
            share = np.eye(num_clients)[rng.integers(num_clients)]
        cuts = np.floor(np.cumsum(share) * len(of_label) + 1e-9).astype(np.int64)
        cuts[-1] = len(of_label)
        owner[of_label] = np.searchsorted(cuts, np.arange(len(of_label)), side="right")
    size = np.bincount(owner, minlength=num_clients)
    parts = [rng.permutation(part).tolist() for part in parts_of(owner, range(num_clients))]
    for i in np.flatnonzero(size < min_size):
        while size[i] < min_size:
            largest = int(size.argmax())  # above min_size, because there are N * min_size examples in all
            parts[i].append(parts[largest].pop())
            size[i] += 1
            size[largest] -= 1
    return [np.sort(np.array(part, np.int64)) for part in parts]


def inner_dirichlet(
    labels,
    num_clients: int,
    *,
    alpha: float = 0.5,
    seed: Seed,
    examples_per_client: int | None = None,
    sizes=None,
) -> list[np.ndarray]:
    """Divides the examples into parts of given sizes, each with label proportions drawn from Dirichlet(alpha, ...).

    In `dirichlet`, the shares of the clients in each label are drawn, and sizes differ. Here every client draws its own
    proportions of the labels, and sizes are given. Places are filled one at a time in random order: its client draws a
    label from its proportions, among the labels with examples left. Where all its labels have run out, it draws one in
    proportion to the examples that are left.

    Args:
      labels: `[n]` integers.
      alpha: positive; a small one is skewed (clients of few labels), a large one has equal proportions of labels.
      examples_per_client: every client gets exactly that many and the rest stays unused; `None`: all examples are
        divided, and sizes differ by at most one.
      sizes: `[N]` positive integers in place of equal sizes, with a sum of at most `n`.

    Returns:
      List of `N` sorted index arrays. Cost: O(labels * (examples log examples + N * labels)).

    Raises:
      ValueError: `alpha` not positive and finite; fewer examples than the clients need; `sizes` that do not fit.

    Source: Acar et al. 2021 ("Federated learning based on dynamic regularization"); `InnerDirichletPartitioner` of
    flwr-datasets.

    Example:
      >>> labels = np.arange(100) % 10
      >>> parts = inner_dirichlet(labels, 4, alpha=0.01, seed=0, examples_per_client=10)
      >>> [len(part) for part in parts], max(len(np.unique(labels[part])) for part in parts) < 5
      ([10, 10, 10, 10], True)
    """
    labels = as_labels(labels)
    check(np.isfinite(alpha) and alpha > 0, "alpha", alpha, "positive and finite")
    check_enough(len(labels), num_clients, examples_per_client)
    if sizes is None:
        sizes = equal_sizes(len(labels), num_clients, examples_per_client)
    else:
        sizes = np.asarray(sizes)
        fits = sizes.shape == (num_clients,) and sizes.dtype.kind in "iu" and sizes.min() >= 1
        check(fits, "sizes", sizes, f"[{num_clients}] positive integers")
        check(sizes.sum() <= len(labels), "sizes", int(sizes.sum()), f"at most {len(labels)} in all")
        check(examples_per_client is None, "examples_per_client", examples_per_client, "left out with sizes")
    rng = np.random.default_rng(seed)
    label = np.unique(labels, return_inverse=True)[1]
    left = np.bincount(label)
    share = rng.dirichlet(np.full(len(left), min(alpha, LARGEST)), size=num_clients)
    lost = ~np.isfinite(share).all(axis=1)  # alpha so small that the draw underflows: the limit is one label
    share[lost] = np.eye(len(left))[rng.integers(len(left), size=lost.sum())]
    client = rng.permutation(np.repeat(np.arange(num_clients), sizes))
    drawn = _draw(share, left, client, rng.random(len(client)))
    owner = np.full(len(labels), -1)
    order, starts = sorted_by(label, rng), np.concatenate([[0], np.cumsum(left)])
    for j in range(len(left)):
        places = np.flatnonzero(drawn == j)
        owner[order[starts[j] : starts[j] + len(places)]] = client[places]
    return parts_of(owner, range(num_clients))


def _draw(share: np.ndarray, left: np.ndarray, client: np.ndarray, u: np.ndarray) -> np.ndarray:
    """Draws a label for each place in turn, without replacement.

    Args:
      share: `[N, K]`, the clients' proportions of the labels.
      left: `[K]`, the examples of each label.
      client: `[n]`, the client of each place.
      u: `[n]` numbers in `[0, 1)`, from which the labels follow by inversion.

    Returns:
      `[n]` labels. Draws are computed together up to the first of a label that has run out: at most `K + 1` times.
    """
    (num_clients, k), left = share.shape, left.copy()
    drawn, first = np.empty(len(client), np.int64), 0
    while first < len(client):
        weight = np.where(left > 0, share, 0.0)
        weight[weight.sum(axis=1) == 0] = left
        bound = np.cumsum(weight, axis=1)
        bound = bound / bound[:, -1:] + np.arange(num_clients)[:, None]  # of client i in [i, i + 1]: one sorted vector
        i = client[first:]
        last = k - 1 - np.argmax(weight[:, ::-1] > 0, axis=1)  # i + u may be rounded up to i + 1
        label = np.minimum(np.searchsorted(bound.ravel(), i + u[first:], side="right") - i * k, last[i])
        end = len(label)
        for j in range(k):
            places = np.flatnonzero(label == j)
            end = min(end, places[left[j]]) if len(places) > left[j] else end
        drawn[first : first + end] = label[:end]
        left -= np.bincount(label[:end], minlength=k)
        first += end
    return drawn


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

    Raises:
      ValueError: a table of another shape, or with negative or infinite entries; a client without examples.

    Source: `DistributionPartitioner` of flwr-datasets.

    Example:
      >>> labels = np.array([0] * 8 + [1] * 4)
      >>> parts = by_distribution(labels, 2, distribution=[[3, 0], [1, 1]], seed=0)
      >>> [np.bincount(labels[part], minlength=2).tolist() for part in parts]
      [[6, 0], [2, 4]]
    """
    labels = as_labels(labels)
    check_enough(len(labels), num_clients)
    table = as_distribution(distribution, num_clients, np.shape(distribution)[-1] if np.ndim(distribution) == 2 else 1)
    in_table = labels.min() >= 0 and labels.max() < table.shape[1]
    check(in_table, "labels", (labels.min(), labels.max()), f"in 0..{table.shape[1] - 1}, a column of the table each")
    rng = np.random.default_rng(seed)
    owner = np.full(len(labels), -1)
    for j in np.flatnonzero(table.any(axis=0)):
        examples = rng.permutation(np.flatnonzero(labels == j))
        counts = apportioned(len(examples), table[:, j] / table[:, j].max())
        owner[examples] = np.repeat(np.arange(num_clients), counts)
    parts = parts_of(owner, range(num_clients))
    none = [i for i, part in enumerate(parts) if not len(part)]
    check(not none, "distribution", f"a table that leaves clients {none[:5]} without", "one with examples for all")
    return parts


def as_distribution(distribution, num_clients: int, num_labels: int) -> np.ndarray:
    """Returns a table of `by_distribution` as float64; raises `ValueError` unless it is `[N, labels]` and valid."""
    try:
        table = np.asarray(distribution, np.float64)
    except (TypeError, ValueError):
        raise ValueError("distribution must be a table of numbers, a row per client, a column per label") from None
    wanted = f"of shape ({num_clients}, {num_labels}): a row per client, a column per label"
    check(table.shape == (num_clients, num_labels), "distribution", table.shape, wanted)
    valid = np.isfinite(table).all() and (table >= 0).all() and table.any()
    check(valid, "distribution", table, "a table of finite numbers, at least 0, and not all 0")
    return table
