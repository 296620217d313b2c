"""Synthetic problems with several concepts, from the literature on drift: points, and how each concept labels them.

The functions have the signature of `jfcl.data.heterogeneity`. Labels of concept `k` are those of the points under
concept 0, turned where the two concepts differ: noise of the labels stays where it is.

Source: Jothimurugesan, Hsieh, Wang, Joshi, Gibbons, *Federated Learning under Distributed Concept Drift* (2023),
section 5 and its code; SEA is that of Street and Kim (2001), SINE and CIRCLE are of Gama et al. (2004).
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jfcl.core import check
from jfcl.data.corruptions import is_drawn


class Concepts(NamedTuple):
    """A synthetic problem, of points that are uniform in `[0, most] ** dim`."""

    dim: int
    most: float
    count: int  # of concepts
    rule: Callable[[np.ndarray, int], np.ndarray]  # (x [n, dim], k) -> [n] bool, the labels of concept k
    noise: float = 0.0  # the probability that a label is turned


def _sea(x: np.ndarray, k: int) -> np.ndarray:
    return x[:, 0] + x[:, 1] <= (9.0, 8.0, 7.0, 9.5)[k]


def _sine(x: np.ndarray, k: int) -> np.ndarray:
    return (x[:, 1] <= np.sin(x[:, 0])) ^ (k == 1)


def _circle(x: np.ndarray, k: int) -> np.ndarray:
    a, b, radius = ((0.2, 0.5, 0.15), (0.6, 0.5, 0.25))[k]
    return (x[:, 0] - a) ** 2 + (x[:, 1] - b) ** 2 > radius**2


CONCEPTS = {
    "sea": Concepts(3, 10.0, 4, _sea, noise=0.1),
    "sine": Concepts(2, 1.0, 2, _sine),
    "circle": Concepts(2, 1.0, 2, _circle),
}


def points(name: str, count: int, seed: int) -> dict[str, np.ndarray]:
    """Returns `count` points of a problem with their labels under concept 0: `x` `[n, d]` float32, `y` `[n]` int32.

    Example:
      >>> points("sine", 4, seed=0)["y"].tolist()
      [1, 0, 1, 0]
    """
    problem, rng = CONCEPTS[name], np.random.default_rng([seed, count])
    x = rng.uniform(0, problem.most, (count, problem.dim)).astype(np.float32)
    y = problem.rule(x, 0) ^ (rng.uniform(size=count) < problem.noise)
    return {"x": x, "y": y.astype(np.int32)}


def concept(name: str, x, y, cluster, num_clusters, num_classes=None, seed=0, strength=1.0):
    """Labels a share `strength` of the points of the problem `name` by concept `cluster`, the others by concept 0.

    Raises:
      ValueError: other data than points of this problem; more clusters than it has concepts.

    Example:
      >>> x = np.float32([[0.1, 0.9], [0.9, 0.1]])
      >>> concept("sine", x, np.int32([0, 1]), 1, 2)[1].tolist()
      [1, 0]
    """
    problem, where = CONCEPTS[name], f"heterogeneity {name!r}"
    of_two = num_classes in (None, 2) and np.asarray(y).dtype.kind in "iu"
    fits = np.ndim(x) == 2 and np.shape(x)[1] == problem.dim and of_two
    check(fits, f"{where}: the examples", np.shape(x), f"points [n, {problem.dim}] of two classes, as dataset {name!r}")
    check(num_clusters <= problem.count, "num_clusters", num_clusters, f"at most {problem.count}, those of {name!r}")
    differ = (problem.rule(x, 0) ^ problem.rule(x, cluster)) & is_drawn(x, seed, strength)
    return x, y ^ differ.astype(np.int32)
