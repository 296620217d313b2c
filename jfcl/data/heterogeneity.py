"""Known heterogeneity: how the data of cluster `k` differ from those of the others.

Each function has the signature `(x, y, cluster, num_clusters, num_classes, seed, strength) -> (x, y)` for examples of
one cluster: `x` `[n, ...]`, `y` `[n]` integer labels (for those in `OF_PLANE`, any arrays beside the images), `cluster`
the true cluster `k` in `0..K-1`. Most transform every example; `by_class` and `by_topic` select the examples of the
cluster.

`seed` determines the random choices for all clusters together (which labels are swapped), never a choice for one
client. `strength` is in `(0, 1]`; with 1 a shift is whole. It is a share of the angle, the severity or the colour where
inputs are moved. Where labels are changed or selected, it is the share of the examples to which this happens: labels
given the inputs, or labels, then have the distribution `(1 - strength) P_0 + strength P_k`. (Of labels that are
selected, `P_k` has this weight where all clusters have equally many examples; a larger one where cluster `k` has more.)
`jfcl.data.build` has checked both, and that labels lie in `0..num_classes-1`.
"""

import itertools
import math
from functools import partial

import jax
import numpy as np

from jfcl.core import check, check_choice
from jfcl.core.checks import in_plane
from jfcl.data.concepts import CONCEPTS, concept
from jfcl.data.corruptions import CORRUPTIONS, check_images, corrupt, draws_of, is_drawn


def _check_at_most(num_clusters: int, most: int, of: str) -> None:
    check(num_clusters <= most, "num_clusters", num_clusters, f"at most {most}, the number of {of}")


def none(x, y, cluster, num_clusters, num_classes=None, seed=0, strength=1.0):
    """Leaves the examples as they are: all clusters have the same distribution."""
    return x, y


def rotation(x, y, cluster, num_clusters, num_classes=None, seed=0, strength=1.0):
    """Turns the images of cluster `k` counter-clockwise by `strength * 360 k / K` degrees.

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
    accepted = "images [n, H, W, C]; for others name a change of labels, such as label_permutation, or none"
    check(np.ndim(x) == 4, "heterogeneity 'rotation': the examples", np.shape(x), accepted)
    angle = round(strength * 360.0 * cluster / num_clusters, 9)  # 0.35 * 360 * 5 / 7 is a quarter, too
    fits = x.shape[1] == x.shape[2] or angle in (0.0, 180.0)
    accepted = f"2 (0 and 180 degrees): other images than square ones cannot be turned by {angle:g} degrees"
    check(fits, "num_clusters", f"{num_clusters} for images of {x.shape[1]} x {x.shape[2]}", accepted)

    def turned(values, order):
        if angle % 90 == 0:
            return np.rot90(values, int(angle // 90), axes=(1, 2))
        from scipy.ndimage import rotate  # takes long to import

        kind = {"bool": np.uint8, "float16": np.float32}.get(values.dtype.name, values.dtype)  # SciPy lacks these two
        numbers = values.astype(kind, copy=False)
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
    unused = [pair for pair in itertools.combinations(range(num_classes), 2) if pair not in pairs]
    pairs += [unused[i] for i in rng.permutation(len(unused))]
    return np.array(pairs[:num_clusters], np.int32)


def label_swap(x, y, cluster, num_clusters, num_classes, seed=0, strength=1.0):
    """Exchanges the two labels `swapped_labels(K, num_classes, seed)[k]` in cluster `k`.

    Source: CFL, section VI (figures 5 to 7).
    """
    table = _exchanged(num_classes, *swapped_labels(num_clusters, num_classes, seed)[cluster])
    return x, _relabelled(x, y, table, seed, strength)


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


def label_permutation(x, y, cluster, num_clusters, num_classes, seed=0, strength=1.0):
    """Renames label `c` to `label_permutations(K, num_classes, seed)[k, c]` in cluster `k`.

    Source: CFL, section VI-C (figure 8).
    """
    return x, _relabelled(x, y, label_permutations(num_clusters, num_classes, seed)[cluster], seed, strength)


def swap_pairs(x, y, cluster, num_clusters, num_classes, seed=0, strength=1.0):
    """Exchanges the labels `2 k - 1` and `2 k` in cluster `k`, and none in cluster 0.

    Source: FedDrift, section 5 (MNIST-2, MNIST-4); FedCCFA.

    Example:
      >>> swap_pairs(np.zeros(3), np.int32([1, 3, 4]), 2, 3, 10)[1].tolist()
      [1, 4, 3]
    """
    _check_at_most(num_clusters, (num_classes + 1) // 2, f"pairs among {num_classes} labels, and none")
    table = _exchanged(num_classes, max(2 * cluster - 1, 0), 2 * cluster)
    return x, _relabelled(x, y, table, seed, strength)


def private_label(x, y, cluster, num_clusters, num_classes, seed=0, strength=1.0):
    """Renames label `c` to `(c + k) mod num_classes` in cluster `k`; all clusters differ, as `K <= num_classes`.

    Source: Federated-Clustering, section 4.2 (table 1, figures 4 and 6).

    Example:
      >>> private_label(np.zeros(2), np.int32([0, 9]), 3, 4, 10)[1].tolist()
      [3, 2]
    """
    _check_at_most(num_clusters, num_classes, "labels")
    return x, _relabelled(x, y, _shifted(num_classes, cluster), seed, strength)


def offset(x, y, cluster, num_clusters, num_classes, seed=0, strength=1.0):
    """Renames label `c` to `(c + k step) mod num_classes` in cluster `k`, with the `step` that spreads `K` clusters.

    That is the largest with `(K - 1) step < num_classes`: 3 for 4 clusters of 10 labels.

    Source: StoCFL (`y + 0, 3, 6, 9`).

    Example:
      >>> [offset(np.zeros(1), np.int32([8]), k, 4, 10)[1].item() for k in range(4)]
      [8, 1, 4, 7]
    """
    _check_at_most(num_clusters, num_classes, "labels")
    step = (num_classes - 1) // max(num_clusters - 1, 1)
    return x, _relabelled(x, y, _shifted(num_classes, cluster * step), seed, strength)


def _exchanged(num_classes: int, a: int, b: int) -> np.ndarray:
    table = np.arange(num_classes, dtype=np.int32)
    table[[a, b]] = b, a
    return table


def _shifted(num_classes: int, by: int) -> np.ndarray:
    return (np.arange(num_classes, dtype=np.int32) + by) % num_classes


def _relabelled(x, y, table: np.ndarray, seed, strength: float) -> np.ndarray:
    """Returns the labels `table[y]` for a share `strength` of the examples, drawn from their inputs; `y` for others."""
    return np.where(is_drawn(x, seed, strength), table[y], y).astype(table.dtype)


def by_class(x, y, cluster, num_clusters, num_classes, seed=0, strength=1.0):
    """Selects the examples with labels in the `k`-th of `K` runs of consecutive labels for cluster `k`.

    Source: CFL, figure 7 (digits 0-4 and 5-9); Federated-Clustering, figure 5 (10 clusters of 10 labels).

    Example:
      >>> by_class(np.arange(4), np.int32([0, 5, 9, 4]), 1, 2, 10)[0].tolist()
      [1, 2]
    """
    _check_at_most(num_clusters, num_classes, "labels")
    runs = np.array_split(np.arange(num_classes), num_clusters)
    owner = np.repeat(np.arange(num_clusters), list(map(len, runs)))[y]
    return _selected(x, y, owner, cluster, num_clusters, seed, strength)


def by_topic(x, y, cluster, num_clusters, num_classes, seed=0, strength=1.0):
    """Selects the examples of topic (label) `k` for cluster `k`; topics `K` and above stay unused.

    Source: CFL, figure 9 (AG News, clients of one topic each).
    """
    _check_at_most(num_clusters, num_classes, "topics")
    return _selected(x, y, np.where(np.asarray(y) < num_clusters, y, -1), cluster, num_clusters, seed, strength)


def _selected(x, y, owner: np.ndarray, cluster, num_clusters, seed, strength):
    """Selects the examples with the `owner` `cluster`; a share `1 - strength` of them has any cluster; -1 stays."""
    if strength != 1:
        rng = np.random.default_rng(seed)
        draws = rng.integers(num_clusters, size=len(owner))
        owner = np.where((owner < 0) | (rng.random(len(owner)) < strength), owner, draws)
    return x[owner == cluster], y[owner == cluster]


def class_rotation(x, y, cluster, num_clusters, num_classes, seed=0, strength=1.0):
    """Turns the images of the first half of the labels as `rotation` does; those of other labels stay as they are.

    Args:
      x, y: as for `rotation`; `y` is the labels `[n]`, or a dict that has them under "y".
    """
    turned = rotation(x, y, cluster, num_clusters, num_classes, seed, strength)
    turns = np.asarray(y["y"] if isinstance(y, dict) else y) < (num_classes + 1) // 2
    pick = lambda new, old: np.where(turns.reshape(-1, *[1] * (np.ndim(old) - 1)), new, old)  # noqa: E731
    return jax.tree.map(pick, turned, (x, y))


def colour(x, y, cluster, num_clusters, num_classes=None, seed=0, strength=1.0):
    """Colours the images of cluster `k` by the `k`-th of `K` hues, from red through green and blue.

    A channel is multiplied by its share in the hue: with `strength` 1, `(1 + cos(2 pi (k / K - c / 3))) / 2` for `c`
    in 0, 1, 2. `jfcl.data.build` gives grey images three channels first.

    Example:
      >>> [colour(np.ones((1, 1, 1, 3)), None, k, 3)[0].ravel().round(2).tolist() for k in range(2)]
      [[1.0, 0.25, 0.25], [0.25, 1.0, 0.25]]
    """
    check_images(x, "heterogeneity 'colour': the examples")
    check(x.shape[-1] == 3, "heterogeneity 'colour': the examples", x.shape, "images of one or three channels")
    share = (1 + np.cos(2 * np.pi * (cluster / num_clusters - np.arange(3) / 3))) / 2
    return x * (1 - strength * (1 - share)).astype(x.dtype), y


def corruption(x, y, cluster, num_clusters, num_classes=None, seed=0, strength=1.0):
    """Corrupts the images of cluster `k` by the `k`-th of `CORRUPTIONS`, to severity `5 strength`; cluster 0 is clean.

    Noise depends on the image and `seed` alone. Severities 1 to 5 are the strengths 0.2 to 1.
    """
    kinds = [None, *CORRUPTIONS]
    _check_at_most(num_clusters, len(kinds), f"corruptions ({', '.join(CORRUPTIONS)}) and clean images")
    check_images(x, "heterogeneity 'corruption': the examples")
    return (x if cluster == 0 else corrupt(x, kinds[cluster], 5 * strength, seed=seed)), y


def three_concepts(x, y, cluster, num_clusters, num_classes, seed=0, strength=1.0):
    """Gives cluster `k` the `k`-th of three concepts, and corrupts the images of every other client of a cluster.

    Label `c` is `c` in cluster 0, `num_classes - 1 - c` in cluster 1, and `(c + 1) mod num_classes` in cluster 2. An
    image of a corrupted client has one of `CORRUPTIONS` and a severity from 1 to 5, times `strength`, drawn from it.
    With Dirichlet shares of the labels (partition "dirichlet", `alpha` 1) three shifts come together, of which only the
    concepts are clusters.

    Args:
      cluster: in `0..2K-1`; from `K` on, cluster `k - K` with corrupted images.

    Source: FedRC (Guo, Tang, Lin 2024) and its code, in which 40 % of the clients have the first concept, and 30 % each
    of the others.
    """
    tables = np.stack([_shifted(num_classes, 0), _shifted(num_classes, 0)[::-1], _shifted(num_classes, 1)])
    _check_at_most(num_clusters, min(len(tables), num_classes), f"concepts of {num_classes} labels")
    is_corrupted, k = divmod(cluster, num_clusters)
    y = _relabelled(x, y, tables[k], seed, strength)
    check_images(x, "heterogeneity 'three_concepts': the examples")
    if is_corrupted:
        x, clean, kinds = x.copy(), x, list(CORRUPTIONS)
        cell = draws_of(x, seed) % (5 * len(kinds))
        for i in np.unique(cell).tolist():
            x[cell == i] = corrupt(clean[cell == i], kinds[i // 5], strength * (1 + i % 5), seed=seed)
    return x, y


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
    "offset": (offset, "label c renamed to (c + k step) mod C, with the largest step"),
    "colour": (colour, "images in the k-th of K hues"),
    "corruption": (corruption, "clean images, then noise, blur, contrast, brightness, pixelate"),
    "class_rotation": (class_rotation, "images of the first half of the labels turned by 360 k / K degrees"),
    "three_concepts": (three_concepts, "labels c, C - 1 - c or c + 1, and half of the clients with corrupted images"),
}
# These select examples instead of transforming them.
SELECTIVE = ("class", "topic")
# These change the labels of examples: two of them may undo each other, and clusters would be equal.
RENAMING = ("label_swap", "label_permutation", "swap_pairs", "private_label", "offset", "three_concepts", *CONCEPTS)
OF_PLANE = ("rotation", "class_rotation")  # these move images, and the maps beside them
# These depend on the number of classes.
OF_CLASSES = (*SELECTIVE, *(name for name in RENAMING if name not in CONCEPTS))
OF_CLASSES += ("class_rotation",)
VARIANTS = {"three_concepts": 2}  # so many kinds of clients in a cluster, which differ otherwise than by it


def shifts_of(heterogeneity: str) -> tuple[str, ...]:
    """Returns the names in a heterogeneity such as "rotation+label_swap", in the order of application.

    Raises:
      ValueError: an unknown name; one that occurs twice; "none" beside others; two that select examples, or two that
        change labels.

    Example:
      >>> shifts_of("rotation+label_swap"), shifts_of("none")
      (('rotation', 'label_swap'), ())
    """
    names = tuple(str(heterogeneity).split("+"))
    for name in names:
        check_choice("heterogeneity", name, HETEROGENEITY)
    check(len(set(names)) == len(names), "heterogeneity", heterogeneity, "of different names")
    check("none" not in names or len(names) == 1, "heterogeneity", heterogeneity, "'none' alone, or without it")
    for kind in (SELECTIVE, RENAMING):
        check(len({*names} & {*kind}) < 2, "heterogeneity", heterogeneity, f"with one of {', '.join(kind)}")
    return () if names == ("none",) else names
