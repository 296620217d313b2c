"""Partitions: disjoint, complete, terminating, as skewed as asked; heterogeneity against plain loops."""

import collections
import itertools
import re

import hypothesis.strategies as st
import numpy as np
import pytest
import scipy.stats
from hypothesis import assume, example, given
from PIL import Image

from jfcl.data import (
    HETEROGENEITY,
    by_distribution,
    by_label,
    by_sizes,
    by_writer,
    dirichlet,
    iid,
    label_groups,
    lognormal,
    pathological,
    power_law,
    quantity,
    stratified,
)
from jfcl.data.heterogeneity import label_permutations, swapped_labels

seeds = st.integers(0, 2**32 - 1)


def assert_partition(parts, num_clients, num_examples, *, complete=True, least=1):
    assert len(parts) == num_clients
    assert all(part.dtype == np.int64 and part.ndim == 1 and len(part) >= least for part in parts)
    count = collections.Counter(itertools.chain.from_iterable(part.tolist() for part in parts))
    assert not count or max(count.values()) == 1, "an example belongs to two clients"
    assert set(count) <= set(range(num_examples))
    if complete:
        assert len(count) == num_examples


def fitting(n, clients, each):
    """`(clients, examples of each)` for which `n` examples are enough."""
    each = None if each is None else min(each, n)
    return 1 + clients % (n // (each or 1)), each


def assert_equal_parts(parts, clients, n, each):
    assert_partition(parts, clients, n, complete=each is None)
    sizes = {len(part) for part in parts}
    assert sizes == {each} if each else max(sizes) - min(sizes) <= 1


labelled = st.lists(st.integers(0, 4), min_size=1, max_size=120).map(np.array)


@given(n=st.integers(1, 200), clients=st.integers(1, 30), each=st.none() | st.integers(1, 20), seed=seeds)
def test_iid_law(n, clients, each, seed):
    clients, each = fitting(n, clients, each)
    assert_equal_parts(iid(n, clients, seed=seed, examples_per_client=each), clients, n, each)


@given(labels=labelled, clients=st.integers(1, 30), each=st.none() | st.integers(1, 20), seed=seeds)
def test_stratified_law(labels, clients, each, seed):
    n = len(labels)
    clients, each = fitting(n, clients, each)
    parts = stratified(labels, clients, seed=seed, examples_per_client=each)
    assert_equal_parts(parts, clients, n, each)
    for label in np.unique(labels):
        counts = np.array([(labels[part] == label).sum() for part in parts])
        share = (labels == label).sum() / n * (each or n / clients)
        assert (np.abs(counts - share) < 1).all()


@given(labels=labelled, clients=st.integers(1, 30), per_client=st.integers(1, 4), seed=seeds)
def test_by_label_law(labels, clients, per_client, seed):
    per_client = min(per_client, len(labels))
    clients = 1 + clients % (len(labels) // per_client)
    parts = by_label(labels, clients, labels_per_client=per_client, seed=seed)
    assert_partition(parts, clients, len(labels))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= per_client


@given(
    labels=labelled,
    clients=st.integers(1, 30),
    alpha=st.sampled_from([1e-300, 1e-12, 1e-3, 0.1, 1.0, 1e6, 1.7e308]),
    least=st.integers(1, 4),
    seed=seeds,
)
@example(labels=np.zeros(30, int), clients=29, alpha=1e-3, least=1, seed=0)
def test_dirichlet_law(labels, clients, alpha, least, seed):
    least = min(least, len(labels))
    clients = 1 + clients % (len(labels) // least)
    parts = dirichlet(labels, clients, alpha=alpha, seed=seed, min_size=least)
    assert_partition(parts, clients, len(labels), least=least)


def test_the_largest_alpha_gives_equal_shares():
    labels = np.arange(1000) % 10
    assert {len(part) for part in dirichlet(labels, 10, alpha=1.7e308, seed=0)} == {100}


@given(
    n=st.integers(1, 500),
    clients=st.integers(1, 40),
    exponent=st.floats(0, 5),
    least=st.integers(1, 5),
    seed=seeds,
)
def test_power_law_law(n, clients, exponent, least, seed):
    least = min(least, n)
    clients = 1 + clients % (n // least)
    assert_partition(power_law(n, clients, exponent=exponent, seed=seed, min_size=least), clients, n, least=least)


@given(labels=labelled, clients=st.integers(1, 30), per_client=st.integers(1, 5), seed=seeds)
def test_pathological_law(labels, clients, per_client, seed):
    values, counts = np.unique(labels, return_counts=True)
    per_client = min(per_client, len(values))
    clients = min(clients, counts.min())  # every label is enough for all
    assume(clients * per_client <= len(labels))
    parts = pathological(labels, clients, labels_per_client=per_client, seed=seed)
    assert_partition(parts, clients, len(labels), complete=clients * per_client >= len(values))
    assert {len(np.unique(labels[part])) for part in parts} == {per_client}
    for value in values:  # equal shares among the clients of a label
        held = [n for part in parts if (n := (labels[part] == value).sum())]
        assert not held or max(held) - min(held) <= 1
        if clients >= len(values):  # the first labels are dealt in turn
            assert len(held) >= clients // len(values)


def test_the_labels_of_pathological_clients_do_not_follow_their_numbers():
    labels = np.arange(400) % 4
    first = np.array([labels[part[0]] for part in pathological(labels, 40, labels_per_client=1, seed=0)])
    assert all(len(set(first[i::4].tolist())) > 1 for i in range(4))  # client i is in cluster i mod K


def test_few_pathological_clients_have_all_labels_together():
    for seed in range(5):
        parts = pathological(np.arange(100) % 10, 3, labels_per_client=4, seed=seed)
        assert len(np.concatenate(parts)) == 100


@given(data=st.data(), labels=labelled, seed=seeds)
def test_distribution_law(data, labels, seed):
    clients = data.draw(st.integers(1, min(8, len(labels))))
    number = st.integers(0, 5) | st.floats(0.01, 1e300)
    table = np.array(data.draw(st.lists(st.lists(number, min_size=5, max_size=5), min_size=clients, max_size=clients)))
    with np.errstate(over="ignore"):
        used = np.flatnonzero(table.any(axis=0))
    try:
        parts = by_distribution(labels, clients, distribution=table, seed=seed)
    except ValueError as error:
        assert re.search("leaves clients .* without|not all 0", str(error))
        return
    assert_partition(parts, clients, len(labels), complete=np.isin(labels, used).all())
    for j in used:
        column = [float(v) / float(max(table[:, j])) for v in table[:, j]]
        for part, weight in zip(parts, column, strict=True):
            assert abs((labels[part] == j).sum() - (labels == j).sum() * weight / sum(column)) < 1 + 1e-9


def test_a_distribution_of_counts_is_exact():
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 9, (7, 5))
    labels = rng.permutation(np.repeat(np.arange(5), counts.sum(axis=0)))
    parts = by_distribution(labels, 7, distribution=counts, seed=3)
    assert [np.bincount(labels[part], minlength=5).tolist() for part in parts] == counts.tolist()


@given(writer=st.lists(st.integers(-1, 6), min_size=1, max_size=60), seed=seeds)
def test_by_writer_law(writer, seed):
    writer = np.array(writer)
    ids = sorted(set(writer[writer >= 0].tolist()))
    assume(ids)
    parts = by_writer(writer, seed=seed)
    assert [np.flatnonzero(writer == i).tolist() for i in ids] == [part.tolist() for part in parts]
    some = by_writer(writer, num_clients=len(ids) // 2 + 1, seed=seed)
    assert len({int(writer[part[0]]) for part in some}) == len(ids) // 2 + 1


def test_partitions_follow_their_seed():
    labels = np.arange(300) % 7
    makers = {
        "iid": lambda seed: iid(300, 9, seed=seed),
        "stratified": lambda seed: stratified(labels, 9, seed=seed),
        "label": lambda seed: by_label(labels, 9, seed=seed),
        "dirichlet": lambda seed: dirichlet(labels, 9, seed=seed),
        "power_law": lambda seed: power_law(300, 9, seed=seed),
        "quantity": lambda seed: quantity(300, 9, seed=seed),
        "lognormal": lambda seed: lognormal(300, 9, seed=seed),
        "label_groups": lambda seed: label_groups(np.arange(300) % 7, 9, seed=seed),
        "pathological": lambda seed: pathological(labels, 9, seed=seed),
        "distribution": lambda seed: by_distribution(labels, 9, distribution=np.ones((9, 7)), seed=seed),
        "writer": lambda seed: by_writer(labels, num_clients=3, seed=seed),
    }
    for name, make in makers.items():
        flat = [np.concatenate(make(seed)) for seed in (1, 1, 2, 3)]
        np.testing.assert_array_equal(flat[0], flat[1], err_msg=name)
        assert any(not np.array_equal(flat[0], other) for other in flat[2:]), name


def test_shards_hold_few_labels():
    labels = np.repeat(np.arange(10), 60)
    parts = by_label(np.random.default_rng(0).permutation(labels), 100, labels_per_client=2, seed=0)
    assert {len(part) for part in parts} == {6}
    shuffled = np.random.default_rng(0).permutation(labels)
    assert max(len(np.unique(shuffled[part])) for part in parts) <= 2


def test_dirichlet_proportions_have_the_right_moments():
    # Var of one share of a symmetric Dirichlet over N: (1/N)(1 - 1/N) / (N alpha + 1).
    n, labels = 10, np.zeros(5_000, int)
    for alpha in (0.1, 1.0, 10.0):
        shares = np.array([[len(p) for p in dirichlet(labels, n, alpha=alpha, seed=s)] for s in range(100)]) / 5e3
        expected = (1 / n) * (1 - 1 / n) / (n * alpha + 1)
        np.testing.assert_allclose(shares.var(), expected, rtol=0.15)


def test_power_law_has_its_exponent():
    sizes = np.sort([len(part) for part in power_law(10**6, 100, exponent=1.5, seed=3)])[::-1]
    slope = scipy.stats.linregress(np.log(np.arange(1, 101)), np.log(sizes)).slope
    np.testing.assert_allclose(slope, -1.5, rtol=1e-2)
    assert {len(part) for part in power_law(100, 10, exponent=0.0, seed=0)} == {10}


def test_drawn_sizes_have_the_right_moments():
    """Shares of Dirichlet(alpha): variance (1/N)(1 - 1/N)/(N alpha + 1). Logarithms: standard deviation sigma."""
    sizes = np.array([[len(part) for part in quantity(10**4, 4, alpha=0.7, seed=seed)] for seed in range(500)])
    assert abs(np.var(sizes / 10**4) / (0.25 * 0.75 / (4 * 0.7 + 1)) - 1) < 0.2
    sizes = [len(part) for part in lognormal(10**6, 2000, sigma=0.8, seed=0)]
    assert abs(np.std(np.log(sizes)) - 0.8) < 0.05
    assert {len(part) for part in lognormal(100, 10, sigma=0.0, seed=0)} == {10}
    for make in (quantity, lognormal):
        assert_partition(make(50, 7, seed=2, min_size=4), 7, 50, least=4)


def test_labels_of_a_group_go_together():
    """Over clients, the counts of two labels of a group are highly correlated, and those of others are not."""
    labels = np.arange(6000) % 6
    parts = label_groups(labels, 20, num_groups=3, alpha=0.4, seed=1)
    assert_partition(parts, 20, 6000)
    counts = np.array([np.bincount(labels[part], minlength=6) for part in parts])
    together = np.corrcoef(counts.T) > 0.9
    assert together.sum() == 12 and (together.sum(axis=1) == 2).all()  # each label with itself and one other


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: iid(10, 11, seed=0), "num_clients must be at most 10"),
        (lambda: iid(10, 4, seed=0, examples_per_client=3), "num_clients must be at most 3"),
        (lambda: iid(10, 0, seed=0), "num_clients must be an integer, at least 1, got 0"),
        (lambda: stratified(np.zeros(10, int), 4, seed=0, examples_per_client=3), "num_clients must be at most 3"),
        (lambda: stratified(np.zeros(10), 2, seed=0), "labels must be a vector of integers"),
        (lambda: by_label(np.zeros(10, int), 6, labels_per_client=2, seed=0), "at most 5"),
        (lambda: by_label(np.zeros(10), 2, seed=0), "labels must be a vector of integers"),
        (lambda: dirichlet(np.zeros(10, int), 2, alpha="0.5", seed=0), "alpha must be positive"),
        (lambda: dirichlet(np.zeros(10, int), 2, alpha=0.0, seed=0), "alpha must be positive"),
        (lambda: dirichlet(np.zeros(10, int), 2, alpha=np.nan, seed=0), "alpha must be positive"),
        (lambda: dirichlet(np.zeros(10, int), 4, min_size=3, seed=0), "at most 3"),
        (lambda: power_law(10, 2, exponent=-1.0, seed=0), "exponent must be at least 0"),
        (lambda: quantity(10, 2, alpha=0.0, seed=0), "alpha must be positive"),
        (lambda: lognormal(10, 2, sigma=-1.0, seed=0), "sigma must be at least 0"),
        (lambda: lognormal(10, 2, sigma="1", seed=0), "sigma must be at least 0"),
        (lambda: label_groups([0, 1] * 5, 2, num_groups=3, seed=0), "num_groups must be at most 2"),
        (
            lambda: pathological(np.zeros(10, int), 2, seed=0),
            "labels_per_client must be at most 1, the number of labels",
        ),
        (
            lambda: pathological([0, 0, 0, 1], 2, labels_per_client=2, seed=0),
            "label 1 has 1 examples for the 2",
        ),
        (lambda: pathological(np.zeros(3, int), 4, labels_per_client=1, seed=0), "num_clients must be at most 3"),
        (lambda: by_distribution([0, 1], 2, distribution=[[1, 0]], seed=0), r"of shape \(2, 2\): a row per client"),
        (lambda: by_distribution([0, 2], 2, distribution=np.eye(2), seed=0), r"labels must be in 0\.\.1"),
        (lambda: by_distribution([0, 1], 2, distribution=[[1, 1], [0, 0]], seed=0), r"leaves clients \[1\] without"),
        (lambda: by_distribution([0, 1], 1, distribution=[[1, -1]], seed=0), "finite numbers, at least 0"),
        (lambda: by_distribution([0, 1], 1, distribution=[["a", 1]], seed=0), "must be a table of numbers"),
        (lambda: by_sizes(10, [5, 6], seed=0), "sizes must be at most 10 in all"),
        (lambda: by_sizes(10, [5, 0], seed=0), "sizes must be in 1..10"),
        (lambda: by_writer([0, 1, 1], num_clients=3, seed=0), "at most 2, the number of writers, got 3"),
        (lambda: by_writer([-1, -1], seed=0), "no writer has an example"),
    ],
)
def test_partition_refuses(call, words):
    with pytest.raises(ValueError, match=words):
        call()


# ---------------------------------------------------------------------------------------------------------
# Heterogeneity


@pytest.mark.parametrize("num_clusters", [1, 2, 4])
def test_quarter_turns_are_exact(num_clusters):
    images = np.random.default_rng(0).integers(0, 256, (5, 6, 6, 3)).astype(np.uint8)
    for k in range(num_clusters):
        turned, _ = HETEROGENEITY["rotation"][0](images, None, k, num_clusters, 10)
        for image, got in zip(images, turned, strict=True):
            # Pillow turns counter-clockwise too, and shares no code with NumPy.
            np.testing.assert_array_equal(got, np.asarray(Image.fromarray(image).rotate(360 * k // num_clusters)))


def test_quarter_turns_by_a_strength_are_exact():
    """0.35 * 360 * 5 / 7 is 89.99999999999999 in float64, and 0.55 * 360 * 10 / 11 is 180.00000000000003."""
    square, wide = np.random.default_rng(0).random((3, 6, 6, 1)), np.random.default_rng(1).random((3, 4, 6, 1))
    turn = HETEROGENEITY["rotation"][0]
    np.testing.assert_array_equal(turn(square, None, 5, 7, strength=0.35)[0], np.rot90(square, 1, axes=(1, 2)))
    np.testing.assert_array_equal(turn(wide, None, 10, 11, strength=0.55)[0], np.rot90(wide, 2, axes=(1, 2)))


@pytest.mark.parametrize(("cluster", "num_clusters"), [(1, 3), (2, 3), (1, 8), (3, 5)])
def test_other_angles_are_bilinear(cluster, num_clusters):
    size, angle = 9, 2 * np.pi * cluster / num_clusters
    image = np.random.default_rng(1).random((size, size)).astype(np.float32)
    got, _ = HETEROGENEITY["rotation"][0](image[None, :, :, None], None, cluster, num_clusters, 10)
    middle = (size - 1) / 2
    expected = np.full((size, size), np.nan)
    for i, j in itertools.product(range(size), repeat=2):
        # Counter-clockwise on screen, rows growing downwards: the output at (i, j) is the input turned back.
        up, right = middle - i, j - middle
        a = middle - (up * np.cos(angle) - right * np.sin(angle))
        b = middle + (up * np.sin(angle) + right * np.cos(angle))
        if 0 <= a <= size - 1 and 0 <= b <= size - 1:
            p, q = min(int(a), size - 2), min(int(b), size - 2)
            s, t = a - p, b - q
            corners = image[p : p + 2, q : q + 2].astype(np.float64)
            expected[i, j] = np.array([1 - s, s]) @ corners @ np.array([1 - t, t])
    inside = ~np.isnan(expected)
    assert inside.sum() > 40
    np.testing.assert_allclose(got[0, :, :, 0][inside], expected[inside], atol=1e-5)
    assert got.dtype == np.float32 and np.abs(got[0, :, :, 0][~inside]).max(initial=0) <= 1


@given(clusters=st.integers(1, 5), classes=st.integers(10, 12), seed=seeds)
def test_swapped_pairs_are_disjoint_while_they_can_be(clusters, classes, seed):
    pairs = swapped_labels(clusters, classes, seed)
    assert len(set(pairs.ravel().tolist())) == 2 * clusters
    if classes == 10:
        assert pairs[:2].tolist() == [[1, 7], [3, 5]][:clusters]


@given(classes=st.integers(2, 8), seed=seeds)
def test_swapped_pairs_never_repeat(classes, seed):
    most = classes * (classes - 1) // 2
    pairs = swapped_labels(most, classes, seed)
    assert {tuple(pair) for pair in pairs.tolist()} == set(itertools.combinations(range(classes), 2))
    with pytest.raises(ValueError, match=f"at most {most}"):
        swapped_labels(most + 1, classes, seed)


@given(clusters=st.integers(1, 6), classes=st.integers(3, 12), seed=seeds)
def test_label_permutations_are_permutations_and_differ(clusters, classes, seed):
    table = label_permutations(clusters, classes, seed)
    np.testing.assert_array_equal(np.sort(table, axis=1), np.tile(np.arange(classes), (clusters, 1)))
    assert len({tuple(row) for row in table.tolist()}) == clusters
    y = np.random.default_rng(seed).integers(0, classes, 40).astype(np.int32)
    for k in range(clusters):
        got = HETEROGENEITY["label_permutation"][0](y, y, k, clusters, classes, seed)[1]
        assert got.tolist() == [int(table[k][label]) for label in y] and got.dtype == np.int32


def test_label_swap_and_private_label_by_hand():
    y = np.arange(10, dtype=np.int32)
    swap, private = HETEROGENEITY["label_swap"][0], HETEROGENEITY["private_label"][0]
    assert swap(y, y, 0, 2, 10)[1].tolist() == [0, 7, 2, 3, 4, 5, 6, 1, 8, 9]
    assert swap(y, y, 1, 2, 10)[1].tolist() == [0, 1, 2, 5, 4, 3, 6, 7, 8, 9]
    assert private(y, y, 3, 4, 10)[1].tolist() == [3, 4, 5, 6, 7, 8, 9, 0, 1, 2]


@given(clusters=st.integers(1, 12), classes=st.integers(1, 12))
def test_classes_are_divided_without_rest(clusters, classes):
    assume(clusters <= classes)
    every = np.arange(classes)
    owned = [HETEROGENEITY["class"][0](every, every, k, clusters, classes)[0].tolist() for k in range(clusters)]
    assert list(itertools.chain(*owned)) == list(range(classes)) and all(owned)


@pytest.mark.parametrize(
    ("name", "x", "y", "cluster", "clusters", "classes", "words"),
    [
        (
            "rotation",
            np.zeros((2, 4, 6, 1)),
            [0, 1],
            1,
            4,
            10,
            "square ones cannot be turned by 90 degrees, got .4 for images of 4 x",
        ),
        ("rotation", np.zeros((2, 7), np.int32), [0, 1], 1, 4, 10, "must be images"),
        ("private_label", np.zeros(2), [0, 1], 0, 11, 10, "num_clusters must be at most 10"),
        ("class", np.zeros(2), [0, 1], 0, 11, 10, "num_clusters must be at most 10"),
        ("topic", np.zeros(2), [0, 1], 0, 5, 4, "num_clusters must be at most 4"),
        ("label_permutation", np.zeros(2), [0, 1], 0, 3, 2, "at most 2, the number of permutations of 2 labels"),
    ],
)
def test_heterogeneity_refuses(name, x, y, cluster, clusters, classes, words):
    with pytest.raises(ValueError, match=words):
        HETEROGENEITY[name][0](x, np.array(y), cluster, clusters, classes)


def test_half_turn_needs_no_square():
    image = np.arange(24.0).reshape(1, 4, 6, 1)
    got, _ = HETEROGENEITY["rotation"][0](image, None, 1, 2, 10)
    np.testing.assert_array_equal(got, image[:, ::-1, ::-1])
