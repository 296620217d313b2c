"""Drift: clusters that change over time. A pattern says which cluster each client is in at each step of time."""

import zlib
from typing import Any, NamedTuple

import jax
import numpy as np

from jfcl.core import Clients, check, check_choice, check_count, client_ids, max_examples

STEPS = 10  # of a pattern, if nothing else is said
GROUPS = (0.3, 0.6)  # of clients that drift in three ways: their bounds
EVERY = 2  # steps between the draws of "R"
SWAPS = 0.05  # the probability that a pair swaps
LEAST = {"R": EVERY + 1, "recurrent": 3}  # steps, with fewer of which no client would move

# A pattern in each line: a row for every step, a digit for every client.
_LINES = """
A 0000000000 0100000000 0100000100 0111010100 0111010110 1011011010 1001001010 1000101011 1000101001 1000101001
B 0000000000 1110000000 1112220000 2212222100 2221222130 2321233130 3321133210 3033133213 0033313223 0003311322
C 0000000000 1112220000 1112220030 2211222130 2221232130 2321133130 3323133210 3033313213 0033313223 0003311322
D 1112220033 1112220033 2211222032 2221232002 2321133002 3323133202 3033313201 0033313221 0003311321 0003311321
E 0000000000 1113330000 1113330020 3311333120 3331323120 3231122120 2232122310 2022212312 0022212332 0002211233
F 0000000000 0000000000 1112220000 1112220030 2211222130 2221232130 2321133133 3323133213 3033313213 0033312223
W 0000000000 0000000000 0100000100 0100000100 0111010100 0111010110 1111011110 1111011110 1111111111 1111111111
X 0000000000 0100000000 0100000000 0100000100 0111010100 0111010110 1111011110 1111011110 1111111111 1111111111
Y 0000000000 0000000000 0000000000 0100000100 0111010100 0111010110 1111011110 1111011110 1111111111 1111111111
"""
_FEDDRIFT = dict(line.split(maxsplit=1) for line in _LINES.strip().splitlines())
_FEDDRIFT["Z"] = _FEDDRIFT["Y"].replace("1", "2")
PATTERNS = {
    "A": "from FedDrift: 10 clients over 10 steps, which move between two clusters, and back",
    **{name: "from FedDrift: 10 clients over 10 steps, which move among four clusters" for name in "BCDEF"},
    "R": "from FedDrift: each client in a cluster drawn anew every second step",
    **{name: "from FedDrift: 10 clients over 10 steps, which move one by one to a second cluster" for name in "WXYZ"},
    "sudden": "from FedCCFA: all clients move to three other clusters half-way through, 3:3:4",
    "incremental": "from FedCCFA: as sudden, but the three groups move one step after another",
    "recurrent": "from FedCCFA: as sudden, and back after three quarters",
    "swap": "from FlexCFL: random pairs of clients swap their clusters",
}


def drift_pattern(
    name: str, num_clients: int, *, num_steps: int | None = None, num_clusters: int = 4, seed: int = 0
) -> np.ndarray:
    """Returns a pattern by its name: the cluster of every client at every step of time.

    Args:
      name: a name in `PATTERNS`. "A" to "F", "R" and "W" to "Z" are FedDrift's; "sudden", "incremental" and "recurrent"
        are FedCCFA's, "swap" is FlexCFL's.
      num_clients: `N`. FedDrift's patterns have 10 columns; the client after the tenth has the first column again.
      num_steps: `T`; default: 10. FedDrift's patterns have 10, except "R". "R" and "recurrent" take 3 or more,
        the others 2 or more; with fewer than 5, the last groups of "incremental" do not move.
      num_clusters: `K`, at least 1 plus the largest cluster in a pattern of FedDrift (2 for "A", "W", "X" and "Y",
        3 for "Z", 4 for the others). In "R" and "swap" all occur, in FedCCFA's those that three groups can reach.
      seed: for "R" and "swap".

    Returns:
      `[T, N]` int32. "swap" begins with client `i` in cluster `i mod K`, the others with all clients in cluster 0
      (except "D"). In each step of "swap" clients are paired at random, and a pair swaps with probability 0.05, as in
      each round of FlexCFL.

    Raises:
      ValueError: an unknown name; fewer clients than the pattern has columns; another number of steps than it has; too
        few clusters.

    Source: the files `data/changepoints` of github.com/microsoft/FedDrift; the experiments of FedCCFA (rounds 100 to
    120, and back at 150, of 200); `swap_data` of github.com/morningD/FlexCFL.

    Example:
      >>> drift_pattern("Y", 10)[3:6].tolist()
      [[0, 1, 0, 0, 0, 0, 0, 1, 0, 0], [0, 1, 1, 1, 0, 1, 0, 1, 0, 0], [0, 1, 1, 1, 0, 1, 0, 1, 1, 0]]
      >>> drift_pattern("sudden", 10, num_steps=4)[2].tolist()
      [1, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    """
    check_choice("drift", name, PATTERNS)
    check_count("num_clients", num_clients)
    check_count("num_clusters", num_clusters)
    if name in _FEDDRIFT:
        rows = np.array([[int(k) for k in row] for row in _FEDDRIFT[name].split()], np.int32)
        steps, columns = rows.shape
        check(num_steps in (None, steps), "num_steps", num_steps, f"{steps}, the steps of pattern {name!r}")
        check(num_clients >= columns, "num_clients", num_clients, f"at least {columns}, as in pattern {name!r}")
        return check_pattern(rows[:, np.arange(num_clients) % columns], num_clients, num_clusters)
    num_steps = STEPS if num_steps is None else num_steps
    check_count("num_steps", num_steps, least=LEAST.get(name, 2))
    check_count("seed", seed, least=0, most=2**63 - 1)
    check(num_clusters > 1, "num_clusters", num_clusters, "at least 2 with drift")
    # Not the numbers by which hostile clients are drawn from the same seed: these would be paired with one another.
    step, rng = np.arange(num_steps)[:, None], np.random.default_rng([seed, zlib.crc32(b"drift")])
    if name == "R":
        drawn = rng.integers(0, num_clusters, (num_steps, num_clients))[step[:, 0] // EVERY]
        return np.where(step < EVERY, 0, drawn).astype(np.int32)
    if name == "swap":
        rows = [np.arange(num_clients) % num_clusters]
        for _ in range(num_steps - 1):
            order, cluster = rng.permutation(num_clients), rows[-1].copy()
            pairs = order[: num_clients // 2 * 2].reshape(-1, 2)
            a, b = pairs[rng.uniform(size=len(pairs)) < SWAPS].T
            cluster[a], cluster[b] = cluster[b], cluster[a]
            rows.append(cluster)
        return np.array(rows, np.int32)
    group = np.searchsorted(GROUPS, (np.arange(num_clients) + 0.5) / num_clients)
    begin = num_steps // 2 + (group if name == "incremental" else 0)
    moved = (step >= begin) & ((step < 3 * num_steps // 4) | (name != "recurrent"))
    return np.where(moved, 1 + group % (num_clusters - 1), 0).astype(np.int32)


def check_pattern(pattern: Any, num_clients: int, num_clusters: int) -> np.ndarray:
    """Returns a pattern as `[T, N]` int32; raises `ValueError` for other than clusters `0..K-1` of these clients."""
    pattern = np.asarray(pattern)
    fits = pattern.ndim == 2 and pattern.size > 0 and pattern.dtype.kind in "iu"
    check(fits, "drift", pattern, "the name of a pattern, or integers [steps, clients]")
    columns, most = pattern.shape[1], int(pattern.max())
    check(columns == num_clients, "num_clients", num_clients, f"{columns}, the clients of the drift")
    check(pattern.min() >= 0, "drift", int(pattern.min()), "of clusters from 0")
    check(most < num_clusters, "num_clusters", num_clusters, f"at least {most + 1}, the clusters of the drift")
    return pattern.astype(np.int32)


class Drift(NamedTuple):
    """The steps of time of a federation, whose clients' examples have the array `"step"` `[N, M]` beside `x` and `y`.

    Attributes:
      cluster: `[T, N]` int32, the true cluster of every client at every step.
      test: `Clients` with arrays `[K, N, M', ...]`: the test examples of each client, in each cluster.
      window: the newest steps whose examples the clients hold; None: they hold all examples up to now.
    """

    cluster: np.ndarray
    test: Clients
    window: int | None = None

    @property
    def num_steps(self) -> int:
        """`T`."""
        return len(self.cluster)

    def clients(self, train: Clients, step: int) -> Clients:
        """Returns what the clients hold at a step, in arrays of the shapes of `train`, in rising order of step.

        Args:
          train: the examples of all steps.
          step: from 0.

        Example:
          >>> train = Clients({"step": np.int32([[0, 0, 1, 1, 2]])}, np.int32([5]))
          >>> drift = Drift(np.zeros((3, 1), np.int32), None, window=1)
          >>> drift.clients(train, 1).examples["step"].tolist(), drift.clients(train, 1).size.tolist()
          ([[1, 1, 2, 0, 0]], [2])
        """
        times = np.asarray(train.examples["step"])
        real = np.arange(max_examples(train)) < np.asarray(train.size)[:, None]
        oldest = 0 if self.window is None else step - self.window + 1
        begin, end = ((real & (times < first)).sum(axis=1) for first in (oldest, step + 1))
        examples = train.examples
        if begin.any():  # bring the newest examples to the front
            rows = (begin[:, None] + np.arange(times.shape[1])) % times.shape[1]
            clients = np.arange(len(rows))[:, None]
            examples = jax.tree.map(lambda x: np.asarray(x)[clients, rows], examples)
        return train._replace(examples=examples, size=(end - begin).astype(np.int32))

    def tests(self, step: int) -> Clients:
        """Returns each client's test examples in its cluster at a step; after the last step nothing changes."""
        ids = np.asarray(client_ids(self.test._replace(examples=())))
        cluster, clients = self.cluster[min(step, self.num_steps - 1), ids], np.arange(len(ids))
        return self.test._replace(examples=jax.tree.map(lambda x: np.asarray(x)[cluster, clients], self.test.examples))

    def ends(self, num_rounds: int) -> list[int]:
        """Returns `[T]`, the last round of each step, where `num_rounds` are divided among the steps."""
        return [(step + 1) * num_rounds // self.num_steps for step in range(self.num_steps)]
