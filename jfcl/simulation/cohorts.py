"""The cohort of a round: sampling, dropout and stragglers, and its transfer to the device while another one trains."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import numpy as np

from jfcl.core import Clients, check, check_choice
from jfcl.data.store import ClientStore

SAMPLING = ("uniform", "size", "stratified")
COHORT_STREAM = 0  # of the random numbers of a run on the host


class DrawnCohort(NamedTuple):
    """The clients of one round of a population.

    Attributes:
      ids: `[C]`, ascending.
      size: `[C]` int32, 0 for clients that did not answer.
      clients: on the device.
      counts: the numbers of clients that were `asked`, that `dropped` out, and that were `cut`, since they were late.
    """

    ids: np.ndarray
    size: np.ndarray
    clients: Clients
    counts: dict[str, int]


def make_sampler(store: ClientStore, count: int, sampling: str = "uniform"):
    """Returns a function `(rng) -> [count]` of ids in ascending order, drawn without replacement.

    Args:
      sampling: "uniform"; "size": one after the other, each of the clients left with a probability proportional to its
        number of examples; "stratified": uniformly within the store's true clusters, from each its share of the
        clients, rounded up or down at random with the exact share as the mean.

    Cost of a draw: `O(count)` for "uniform" and "stratified", `O(count log N)` for "size" (`O(N)` where the cohort is a
    large part of the population, or a few clients have most of the examples).
    """
    n = len(store)
    check_choice("sampling", sampling, SAMPLING)
    if sampling == "stratified":
        accepted = "uniform or size: the store holds no true clusters, which are the strata"
        check(store.cluster is not None, "sampling", sampling, accepted)
        return _stratified(store.cluster, n, count)
    if sampling == "uniform":
        return lambda rng: np.sort(rng.choice(n, count, replace=False, shuffle=False))
    return _by_size(store, count)


def _stratified(strata: np.ndarray, n: int, count: int):
    """Returns the function of `make_sampler` for "stratified"."""
    sizes = np.unique(strata, return_counts=True)[1]
    members = np.split(np.argsort(strata, kind="stable"), np.cumsum(sizes)[:-1])
    shares = sizes * count / n
    whole = np.floor(shares + 1e-9).astype(np.int64)
    remainder = count - whole.sum()

    def stratified(rng):
        # Systematic sampling: one more from some strata, with probability equal to the fractional part of the share. A
        # stratum with a share of half a client is thus sampled in every other round.
        order = rng.permutation(len(shares))
        ends = np.minimum(np.cumsum((shares - whole)[order].clip(0)), remainder)
        ends[-1] = remainder
        quota = whole.copy()
        quota[order] += np.diff(np.floor(ends + rng.random()).astype(np.int64), prepend=0)
        drawn = [rng.choice(ids, q, replace=False, shuffle=False) for ids, q in zip(members, quota, strict=True) if q]
        return np.sort(np.concatenate(drawn))

    return stratified


def _by_size(store: ClientStore, count: int):
    """Returns the function of `make_sampler` for "size"."""
    n = len(store)
    nonempty = int((store.sizes() > 0).sum())
    check(count <= nonempty, "cohort", count, f"at most {nonempty}, the clients with examples, when drawn by size")
    total = int(store.offsets[-1])

    def by_size(rng):
        # By rejection: the client of a random example is a client drawn by size; a client drawn before is skipped.
        drawn = np.empty(0, np.int64)
        for _ in range(8 if count * 4 < nonempty else 0):
            owners = np.searchsorted(store.offsets, rng.integers(0, total, 2 * count), side="right") - 1
            drawn = np.concatenate([drawn, owners])
            drawn = drawn[np.sort(np.unique(drawn, return_index=True)[1])]
            if len(drawn) >= count:
                return np.sort(drawn[:count])
        # The others by the same law in one pass: the earliest of exponential clocks with the sizes as rates.
        size = store.sizes().astype(np.float64)
        size[drawn] = 0
        rings = np.full(n, np.inf)
        rings[size > 0] = rng.standard_exponential(int((size > 0).sum())) / size[size > 0]
        further = np.argpartition(rings, count - len(drawn) - 1)[: count - len(drawn)]
        return np.sort(np.concatenate([drawn, further]))

    return by_size


def who_answers(rng: np.random.Generator, asked: int, count: int, dropout: float) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns `(rows [count], answered [count] bool, dropped)`: the part of `asked` clients that makes up a round.

    Each client fails to answer with probability `dropout`. The first `count` answers, in random order, are taken; if
    there are fewer, clients without an answer fill the cohort.
    """
    answers = rng.random(asked) >= dropout
    order = rng.permutation(asked)
    order = order[np.argsort(~answers[order], kind="stable")]
    rows = np.sort(order[:count])
    return rows, answers[rows], int((~answers).sum())


def prefetched(prepare: Callable[[int], DrawnCohort], last: int) -> Callable[[int], DrawnCohort]:
    """Returns a function of a round `t` that returns its cohort; a thread prepares the next one while one trains.

    The function is called for consecutive rounds, up to round `last`, and raises the errors of the thread.
    """
    thread, coming = ThreadPoolExecutor(1, thread_name_prefix="jfcl-cohort"), None
    has_64_bits = jax.config.jax_enable_x64  # of this thread: others do not share what a `with` sets

    def prepared(t: int) -> DrawnCohort:
        with jax.enable_x64(has_64_bits):
            return prepare(t)

    def take(t: int) -> DrawnCohort:
        nonlocal coming
        cohort = (coming or thread.submit(prepared, t)).result()
        coming = thread.submit(prepared, t + 1) if t < last else None
        return cohort

    return take
