"""Checks and steps that partitions share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jfcl.core import check, check_count

Seed = int | Sequence[int]


def check_enough(num_examples: int, num_clients: int, examples_per_client: int | None = None) -> None:
    """Raises `ValueError` unless every client can have `examples_per_client` (default: 1) of the examples."""
    each = 1 if examples_per_client is None else examples_per_client
    check_count("examples_per_client", each)
    check_count("num_clients", num_clients)
    check_count("num_examples", num_examples)
    check(each <= num_examples, "the number of examples", num_examples, f"at least {each}, what one client needs")
    accepted = f"at most {num_examples // each} ({num_examples} examples, at least {each} a client)"
    check(num_clients * each <= num_examples, "num_clients", num_clients, accepted)


def count_of(examples) -> int:
    """Returns the number of examples, given that number or their labels."""
    return examples if np.ndim(examples) == 0 else len(examples)


def as_labels(labels) -> np.ndarray:
    """Returns the labels as an array; raises `ValueError` unless they are `[n]` integers."""
    labels = np.asarray(labels)
    fits = labels.ndim == 1 and labels.dtype.kind in "iu"
    check(fits, "labels", f"{labels.dtype} {labels.shape}", "a vector of integers")
    return labels


def sorted_by(labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns all indices in the order of their labels, those of equal labels in random order."""
    shuffled = rng.permutation(len(labels))
    return shuffled[np.argsort(labels[shuffled], kind="stable")]


def parts_of(owner: np.ndarray, owners) -> list[np.ndarray]:
    """Returns the indices of the examples of each of `owners` (sorted integers), where `owner` `[n]` has them."""
    order = np.argsort(owner, kind="stable")
    first, last = (np.searchsorted(owner[order], owners, side=side) for side in ("left", "right"))
    return [order[a:b].astype(np.int64) for a, b in zip(first, last, strict=True)]


def equal_sizes(num_examples: int, num_clients: int, examples_per_client: int | None) -> np.ndarray:
    """Returns `[N]` sizes: `examples_per_client`, or, where it is `None`, those of equal parts of all examples."""
    if examples_per_client is not None:
        return np.full(num_clients, examples_per_client)
    return num_examples // num_clients + (np.arange(num_clients) < num_examples % num_clients)


def sizes_like(weight: np.ndarray, num_examples: int, *, seed: Seed, min_size: int) -> np.ndarray:
    """Returns `[N]` sizes in random order: `min_size` each, and the rest in proportion to `weight` `[N]`."""
    check_count("min_size", min_size)
    check_enough(num_examples, len(weight), min_size)
    rest = num_examples - len(weight) * min_size
    return np.random.default_rng(seed).permutation(apportioned(rest, weight) + min_size)


def apportioned(total: int, weight: np.ndarray) -> np.ndarray:
    """Returns integers with the sum `total`, each within one of its share in proportion to `weight`.

    Shares are rounded down, and what is left goes to those of the largest remainders.
    """
    share = total * weight / weight.sum()
    sizes = np.floor(share).astype(np.int64)
    sizes[np.argsort(sizes - share, kind="stable")[: total - sizes.sum()]] += 1
    return sizes
