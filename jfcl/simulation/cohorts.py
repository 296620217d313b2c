"""Which clients of a population are asked in a round, and which of them answer."""

from __future__ import annotations

from typing import Any

import numpy as np

from jfcl.core import check, check_choice
from jfcl.data.store import ClientStore, check_cohort

SAMPLING = ("uniform", "size", "stratified")


def make_sampler(store: ClientStore, count: int, sampling: str = "uniform", strata: Any = None):
    """`(rng) -> [count]` ids in ascending order, drawn without replacement.

    Args:
      sampling: "uniform"; "size": one after the other, each with a probability proportional to its number of examples
        among those left; "stratified": uniformly within strata, from each its share of the clients, rounded up or down
        at random so that it is right on average.
      strata: `[N]` integers; default: the store's true clusters.

    Returns:
      A function that costs `O(count)` for "uniform" and "stratified", `O(count log N)` for "size" (`O(N)` where the
      cohort is a large part of the population, or a few clients have most of the examples).

    Raises:
      ValueError: unknown `sampling`, `strata` of another length or where they are not used, `count` clients that there
        are not.
    """
    n = len(store)
    check_choice("sampling", sampling, SAMPLING)
    check_cohort(store, count)
    if sampling == "stratified":
        strata = store.cluster if strata is None else strata
        check(strata is not None, "strata", None, "given: the store knows no clusters")
        strata = np.asarray(strata)
        fits = strata.shape == (n,) and strata.dtype.kind in "iu"
        check(fits, "strata", f"{strata.dtype} {strata.shape}", f"integers of shape ({n},), one for every client")
        members = np.argsort(strata, kind="stable")
        edges = np.concatenate([[0], np.cumsum(np.unique(strata, return_counts=True)[1])])
        shares = np.diff(edges) * count / n
        whole = np.floor(shares + 1e-9).astype(np.int64)
        left = count - whole.sum()

        def stratified(rng):
            # One more from some strata, from each with the probability that its share is short of (systematic
            # sampling): a stratum of half a client's share is asked every other round, and not never.
            order = rng.permutation(len(shares))
            ends = np.minimum(np.cumsum((shares - whole)[order].clip(0)), left)
            ends[-1] = left
            quota = whole.copy()
            quota[order] += np.diff(np.floor(ends + rng.random()).astype(np.int64), prepend=0)
            drawn = [
                members[first + rng.choice(last - first, q, replace=False, shuffle=False)]
                for first, last, q in zip(edges[:-1], edges[1:], quota, strict=True)
                if q
            ]
            return np.sort(np.concatenate(drawn))

        return stratified
    check(strata is None, "strata", strata, 'left out unless sampling="stratified"')
    if sampling == "uniform":
        return lambda rng: np.sort(rng.choice(n, count, replace=False, shuffle=False))

    nonempty = int((store.sizes() > 0).sum())
    check(count <= nonempty, "cohort", count, f"at most {nonempty}, the clients with examples, when drawn by size")
    total = int(store.offsets[-1])

    def by_size(rng):
        # An example drawn at random is a client drawn by its size; one drawn before does not count.
        drawn = np.empty(0, np.int64)
        for _ in range(8 if count * 4 < nonempty else 0):
            owners = np.searchsorted(store.offsets, rng.integers(0, total, 2 * count), side="right") - 1
            drawn = np.concatenate([drawn, owners])
            drawn = drawn[np.sort(np.unique(drawn, return_index=True)[1])]
            if len(drawn) >= count:
                return np.sort(drawn[:count])
        # The others by the same law in one pass: the first to ring of exponential clocks whose rates are the sizes.
        size = store.sizes().astype(np.float64)
        size[drawn] = 0
        rings = np.full(n, np.inf)
        rings[size > 0] = rng.standard_exponential(int((size > 0).sum())) / size[size > 0]
        rest = np.argpartition(rings, count - len(drawn) - 1)[: count - len(drawn)]
        return np.sort(np.concatenate([drawn, rest]))

    return by_size


def who_answers(
    rng: np.random.Generator, asked: int, cohort: int, dropout: float
) -> tuple[np.ndarray, np.ndarray, int]:
    """`(rows [cohort], answered [cohort] bool, dropped)`: which of the `asked` clients make up the round.

    Everybody fails to answer with probability `dropout`; the first `cohort` of those who answer, in random order, are
    in. Where fewer do, the round has places for clients that did not.

    Example:
      >>> rows, answered, dropped = who_answers(np.random.default_rng(0), 6, 4, 0.0)
      >>> len(rows), answered.tolist(), dropped
      (4, [True, True, True, True], 0)
    """
    answers = rng.random(asked) >= dropout
    order = rng.permutation(asked)
    order = order[np.argsort(~answers[order], kind="stable")]
    rows = np.sort(order[:cohort])
    return rows, answers[rows], int((~answers).sum())
