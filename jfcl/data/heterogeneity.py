"""Known heterogeneity: how the data of cluster `k` differ from those of the others.

Each function has the signature `(x, y, cluster, num_clusters, num_classes, seed) -> (x, y)` for the examples of one
client: `x` `[n, ...]`, `y` `[n]` integer labels (for `rotation`, any arrays beside the images), `cluster` its true
cluster `k` in `0..K-1`. Most transform every example; `by_class` and `by_topic` select the examples of the cluster.
`seed` determines the random choices for all clusters together (which labels are swapped), never a choice for one
client. `jfcl.data.build` has checked `cluster`, and that labels lie in `0..num_classes-1`.
"""

from __future__ import annotations

import itertools
import math
from functools import partial

import jax
import numpy as np

from jfcl.core import check
from jfcl.core.checks import in_plane
from jfcl.data.concepts import CONCEPTS, concept


def _check_at_most(num_clusters: int, most: int, of: str) -> None:
    check(num_clusters <= most, "num_clusters", num_clusters, f"at most {most}, the number of {of}")


def none(x, y, cluster, num_clusters, num_classes=None, seed=0):
    """Leaves the examples as they are: all clusters have the same distribution."""
    return x, y


def rotation(x, y, cluster, num_clusters, num_classes=None, seed=0):
    """Turns the images of cluster `k` counter-clockwise by `360 k / K` degrees.

    Quarter turns are exact (`np.rot90`). Other angles are bilinear, and corners outside the image become 0. Maps in the
    image's plane, `[n, H, W, ...]`, turn with it; between their pixels the nearest is taken, since they may be labels.

    Args:
      x: `[n, H, W, C]` images; square, unless the turn is by 0 or 180 degrees.
      y: `[n, ...]` targets, or a pytree of such arrays.

    Raises:
      ValueError: not images; a turn of images that are not square; a map of another resolution, or with its channels
        before its plane.

    Source: IFCA, section 6.2 (K=4: 0, 90, 180, 270 degrees; K=2: 0, 180).
    """
    check(np.ndim(x) == 4, "heterogeneity 'rotation': the examples", np.shape(x), "images [n, H, W, C]")
    angle = 360.0 * cluster / num_clusters
    fits = x.shape[1] == x.shape[2] or angle in (0.0, 180.0)
    accepted = f"2 (0 and 180 degrees): other images than square ones cannot be turned by {angle:g} degrees"
    check(fits, "num_clusters", f"{num_clusters} for images of {x.shape[1]} x {x.shape[2]}", accepted)

    def turned(values, order):
        if (4 * cluster) % num_clusters == 0:
            return np.rot90(values, 4 * cluster // num_clusters, axes=(1, 2))
        from scipy.ndimage import rotate  # takes long to import

        numbers = values.astype(np.uint8) if values.dtype == bool else values
        return rotate(numbers, angle, axes=(2, 1), reshape=False, order=order).astype(values.dtype)

    def beside(path, values):
        moves = in_plane(np.shape(values), x.shape[1:3], f"rotation: the array beside x {jax.tree_util.keystr(path)}")
        return turned(np.asarray(values), 0) if moves else values

    return turned(x, 1), jax.tree_util.tree_map_with_path(beside, y)


def swapped_labels(num_clusters: int, num_classes: int, seed=0) -> np.ndarray:
    """Returns `[K, 2]`, the two labels that each cluster exchanges.

    With 10 classes the first two clusters have the CFL paper's examples, 1 and 7, 3 and 5. The others are drawn from
    `seed`: no label is in two pairs as long as `K <= num_classes // 2`, and no pair occurs twice beyond that.
    """
    _check_at_most(num_clusters, num_classes * (num_classes - 1) // 2, f"pairs of {num_classes} labels")
    rng = np.random.default_rng(seed)
    pairs = [(1, 7), (3, 5)] if num_classes == 10 else []
    labels = rng.permutation([label for label in range(num_classes) if label not in {1, 7, 3, 5} or not pairs])
    pairs += [tuple(sorted(pair)) for pair in labels[: len(labels) // 2 * 2].reshape(-1, 2).tolist()]
    others = [pair for pair in itertools.combinations(range(num_classes), 2) if pair not in pairs]
    pairs += [others[i] for i in rng.permutation(len(others))]
    return np.array(pairs[:num_clusters], np.int32)


def label_swap(x, y, cluster, num_clusters, num_classes, seed=0):
    """Exchanges the two labels `swapped_labels(K, num_classes, seed)[k]` in cluster `k`.

    Source: CFL, section VI (figures 5 to 7).
    """
    a, b = swapped_labels(num_clusters, num_classes, seed)[cluster]
    table = np.arange(num_classes, dtype=np.int32)
    table[[a, b]] = b, a
    return x, table[y]


def label_permutations(num_clusters: int, num_classes: int, seed=0) -> np.ndarray:
    """Returns `[K, num_classes]`, a random permutation of the labels for every cluster (0 too), all different."""
    _check_at_most(num_clusters, math.factorial(min(num_classes, 20)), f"permutations of {num_classes} labels")
    rng = np.random.default_rng(seed)
    if num_classes <= 6:  # few permutations: repeated draws until all differ could take long
        every = np.array(list(itertools.permutations(range(num_classes))), np.int32)
        return every[rng.permutation(len(every))[:num_clusters]]
    permutations: dict[tuple, None] = {}
    while len(permutations) < num_clusters:
        permutations.setdefault(tuple(rng.permutation(num_classes).tolist()))
    return np.array(list(permutations), np.int32)


def label_permutation(x, y, cluster, num_clusters, num_classes, seed=0):
    """Renames label `c` to `label_permutations(K, num_classes, seed)[k, c]` in cluster `k`.

    Source: CFL, section VI-C (figure 8).
    """
    return x, label_permutations(num_clusters, num_classes, seed)[cluster][y]


def swap_pairs(x, y, cluster, num_clusters, num_classes, seed=0):
    """Exchanges the labels `2 k - 1` and `2 k` in cluster `k`, and none in cluster 0.

    Source: FedDrift, section 5 (MNIST-2, MNIST-4); FedCCFA.

    Example:
      >>> swap_pairs(np.zeros(3), np.int32([1, 3, 4]), 2, 3, 10)[1].tolist()
      [1, 4, 3]
    """
    _check_at_most(num_clusters, (num_classes + 1) // 2, f"pairs among {num_classes} labels, and none")
    table = np.arange(num_classes, dtype=np.int32)
    if cluster > 0:
        table[[2 * cluster - 1, 2 * cluster]] = 2 * cluster, 2 * cluster - 1
    return x, table[y]


def private_label(x, y, cluster, num_clusters, num_classes, seed=0):
    """Renames label `c` to `(c + k) mod num_classes` in cluster `k`; all clusters differ, as `K <= num_classes`.

    Source: FC, section 4.2 (table 1, figures 4 and 6).

    Example:
      >>> private_label(np.zeros(2), np.int32([0, 9]), 3, 4, 10)[1].tolist()
      [3, 2]
    """
    _check_at_most(num_clusters, num_classes, "labels")
    return x, ((np.arange(num_classes, dtype=np.int32) + cluster) % num_classes)[y]


def class_labels(cluster: int, num_clusters: int, num_classes: int) -> np.ndarray:
    """Returns the labels of cluster `k` for `by_class`: the `k`-th of `K` runs of consecutive labels."""
    _check_at_most(num_clusters, num_classes, "labels")
    return np.array_split(np.arange(num_classes, dtype=np.int32), num_clusters)[cluster]


def by_class(x, y, cluster, num_clusters, num_classes, seed=0):
    """Selects the examples with labels in `class_labels(k, K, num_classes)` for cluster `k`.

    Source: CFL, figure 7 (digits 0-4 and 5-9); FC, figure 5 (10 clusters of 10 labels).

    Example:
      >>> by_class(np.arange(4), np.int32([0, 5, 9, 4]), 1, 2, 10)[0].tolist()
      [1, 2]
    """
    keep = np.isin(y, class_labels(cluster, num_clusters, num_classes))
    return x[keep], y[keep]


def by_topic(x, y, cluster, num_clusters, num_classes, seed=0):
    """Selects the examples of topic (label) `k` for cluster `k`; topics `K` and above stay unused.

    Source: CFL, figure 9 (AG News, clients of one topic each).
    """
    _check_at_most(num_clusters, num_classes, "topics")
    keep = np.asarray(y) == cluster
    return x[keep], y[keep]


HETEROGENEITY = {
    "none": (none, "one distribution for all"),
    "rotation": (rotation, "images turned by 360 k / K degrees"),
    "label_swap": (label_swap, "two labels exchanged, another pair in every cluster"),
    "label_permutation": (label_permutation, "all labels renamed by a random permutation"),
    "swap_pairs": (swap_pairs, "labels 2 k - 1 and 2 k exchanged, none in cluster 0"),
    "private_label": (private_label, "label c renamed to (c + k) mod C"),
    "class": (by_class, "every cluster has its own labels"),
    "topic": (by_topic, "every cluster has one label (topic)"),
    **{name: (partial(concept, name), f"of data set {name}: another rule for its labels") for name in CONCEPTS},
}
# These select examples instead of transforming them.
SELECTIVE = ("class", "topic")
OF_PLANE = ("rotation",)  # these move images, and the maps beside them
RELABELLING = ("label_swap", "label_permutation", "swap_pairs", "private_label")  # by the number of classes
