"""Federations: nothing leaks from test to train, clients hold what they should, bad input is named."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.ndimage import rotate

import jfcl
from jfcl.core import check_clients
from jfcl.data import HETEROGENEITY, PARTITIONS, Dataset, build, generate_store, load, tokenize
from jfcl.data.concepts import CONCEPTS
from jfcl.data.heterogeneity import SELECTIVE
from jfcl.data.pools import allot, stratified_hold_out

CLASSES = 4


def tagged(n=240, n_test=None, seed=0, size=5):
    """A data set whose images all differ by a constant, with the number of each beside it."""
    rng = np.random.default_rng(seed)
    total = n + (n_test or 0)
    tag = (1 + np.arange(total, dtype=np.float32)) / 4096
    x = np.broadcast_to(tag[:, None, None, None], (total, size, size, 1)).copy()
    y = rng.permutation(np.arange(total) % CLASSES).astype(np.int32)
    writer = np.concatenate([np.arange(n) % 12, 100 + np.arange(total - n) % 7]).astype(np.int32)
    split = lambda a: (a[:n], a[n:] if n_test else None)  # noqa: E731
    (x, xt), (y, yt), (writer, wt), (row, rt) = split(x), split(y), split(writer), split(np.arange(total))
    test = None if n_test is None else {"x": xt, "y": yt, "row": rt}
    return Dataset(
        "tagged", {"x": x, "y": y, "row": row}, test, CLASSES, {"train": writer, "test": wt}, "tagged images"
    )


def tags(clients, client=None):
    """The numbers of real examples in the data set."""
    rows = range(len(clients.size)) if client is None else [client]
    return np.concatenate([clients.examples["row"][i, : clients.size[i]] for i in rows]).tolist()


@pytest.mark.slow_cases(*(f"rotation-{partition}" for partition in PARTITIONS if partition not in ("iid", "writer")))
@pytest.mark.parametrize(
    ("heterogeneity", "partition"),  # a writer does not belong to one class
    [(h, p) for h in ("none", "rotation", "class", "topic") for p in PARTITIONS if p != "writer" or h not in SELECTIVE]
    + [(h, "iid") for h in HETEROGENEITY if h not in CONCEPTS and h not in ("none", "rotation", *SELECTIVE)],
)
def test_no_base_image_is_in_train_and_test(partition, heterogeneity):
    table = np.random.default_rng(0).uniform(0.5, 1, (7, CLASSES))
    options = {
        "pathological": {"labels_per_client": 1},
        "distribution": {"distribution": table},
        "label_groups": {"num_groups": 1},
    }.get(partition, {})
    clusters = (
        1 if heterogeneity == "none" and partition != "distribution" else 2 if heterogeneity == "swap_pairs" else 3
    )
    for reuse, n_test, each in [("none", None, 4), ("cluster", 80, None), ("auto", None, None), ("auto", 80, 4)]:
        data = tagged(n_test=n_test)
        unlike = heterogeneity != "none" or clusters == 1  # otherwise new clients are of no cluster
        newcomers = 3 if unlike and (partition != "writer" or n_test) else None
        fed = build(
            data,
            num_clients=7,
            num_clusters=clusters,
            heterogeneity=heterogeneity,
            partition=partition,
            reuse=reuse,
            examples_per_client=each,
            newcomer_examples=newcomers,
            test_fraction=0.3,
            seed=5,
            **options,
        )
        where = (partition, heterogeneity, reuse, n_test, each)
        for clients in [fed.train, fed.test] + ([fed.newcomers] if newcomers else []):
            check_clients(clients)
            held = clients.examples["y"][np.arange(clients.examples["y"].shape[1]) < clients.size[:, None]]
            assert held.dtype == np.int32 and set(held.tolist()) <= set(range(CLASSES)), where
            assert clients.size.dtype == np.int32 and clients.examples["x"].dtype == np.float32
        train, test = tags(fed.train), tags(fed.test)
        assert len(fed.train.size) == len(fed.test.size) == 7
        assert fed.cluster.tolist() == [i % clusters for i in range(7)] and fed.cluster.dtype == np.int32
        assert not set(train) & set(test), where
        if newcomers:
            assert not set(train) & set(tags(fed.newcomers)), where
            assert len(fed.newcomer_cluster) == len(fed.newcomers.size)
        if reuse == "none" or heterogeneity in ("class", "topic"):
            assert len(set(train)) == len(train), where
        for k in range(clusters):  # whatever the reuse, an image is at one client of a cluster
            inside = [tag for i in np.flatnonzero(fed.cluster == k) for tag in tags(fed.train, i)]
            assert len(set(inside)) == len(inside), where


@pytest.mark.parametrize(
    "heterogeneity", ["none", "label_swap", "label_permutation", "private_label", "offset", "three_concepts"]
)
def test_labels_are_the_clusters_labels(heterogeneity):
    data, clusters = tagged(n_test=60), 1 if heterogeneity == "none" else 3
    fed = build(data, num_clients=6, num_clusters=clusters, heterogeneity=heterogeneity, newcomer_examples=10, seed=3)
    base = np.concatenate([data.train["y"], data.test["y"]])
    tables = [{} for _ in range(clusters)]
    everyone = [(fed.train, fed.cluster), (fed.test, fed.cluster), (fed.newcomers, fed.newcomer_cluster)]
    for clients, cluster in everyone:
        for i, k in enumerate(cluster):
            for tag, y in zip(tags(clients, i), clients.examples["y"][i, : clients.size[i]].tolist(), strict=True):
                # One renaming per cluster, the same in training, test and newcomers.
                assert tables[k].setdefault(int(base[tag]), y) == y
    assert all(sorted(table.values()) == list(range(CLASSES)) for table in tables)
    if heterogeneity == "none":
        assert all(a == b for table in tables for a, b in table.items())
    else:
        assert len({tuple(sorted(table.items())) for table in tables}) == 3


def test_class_and_topic_give_clusters_their_labels():
    fed = build(tagged(), num_clients=8, num_clusters=2, heterogeneity="class")
    topic = build(tagged(), num_clients=8, num_clusters=3, heterogeneity="topic")
    for clients in ("train", "test"):
        for i in range(8):
            part = getattr(fed, clients)
            assert set(part.examples["y"][i, : part.size[i]].tolist()) <= ({0, 1}, {2, 3})[i % 2]
            part = getattr(topic, clients)
            assert set(part.examples["y"][i, : part.size[i]].tolist()) == {i % 3}


def test_rotated_images_are_the_clusters_turn():
    digits = load("digits")
    fed = build(digits, num_clients=8, num_clusters=4, heterogeneity="rotation", examples_per_client=50)
    originals = {image.tobytes(): int(label) for image, label in zip(*digits.train.values(), strict=True)}
    for clients in (fed.train, fed.test):
        for i in range(8):
            for x, y in zip(clients.examples["x"][i], clients.examples["y"][i, : clients.size[i]], strict=False):
                for _ in range(i % 4):  # turn back, a quarter clockwise at a time
                    x = x.transpose(1, 0, 2)[:, ::-1]
                assert originals[np.ascontiguousarray(x).tobytes()] == y


def test_reuse_cluster_gives_every_cluster_everything_once():
    """IFCA's arithmetic in small: m n = K * (all images)."""
    data = tagged(n=120, n_test=40)
    fed = build(
        data,
        num_clients=12,
        num_clusters=4,
        heterogeneity="rotation",
        examples_per_client=40,
        newcomer_examples=10,
    )
    for k in range(4):
        assert sorted(t for i in range(k, 12, 4) for t in tags(fed.train, i)) == list(range(120))
        assert sorted(t for i in range(k, 12, 4) for t in tags(fed.test, i)) == list(range(120, 160))
        rows = np.flatnonzero(fed.newcomer_cluster == k)
        assert sorted(t for i in rows for t in tags(fed.newcomers, i)) == list(range(120, 160))
    assert fed.newcomers.size.tolist() == [10] * 16


def test_newcomers_share_no_example_with_further_clients_of_their_cluster():
    """An example is its image as its cluster has it."""
    options = {"num_clients": 12, "num_clusters": 4, "heterogeneity": "rotation", "reuse": "cluster"}
    fed = build(tagged(n=120, n_test=80), newcomers_of=8, newcomer_examples=5, **options)
    for k in range(4):
        new, first, further = (
            {tag for i in rows for tag in tags(clients, i)}
            for clients, rows in [
                (fed.newcomers, np.flatnonzero(fed.newcomer_cluster == k)),
                (fed.test, (k, k + 4)),
                (fed.test, [k + 8]),
            ]
        )
        assert new <= first and not new & further and len(new) >= len(first) - 4
    with pytest.raises(ValueError, match="newcomers_of must be an integer, at least 1, got 0"):
        build(tagged(n=120, n_test=80), newcomers_of=0, newcomer_examples=5, **options)


def test_newcomers_of_clusters_that_differ_by_a_table_are_refused():
    options = {"partition": "distribution", "distribution": [[1, 1, 0, 0], [0, 0, 1, 1]], "newcomer_examples": 5}
    with pytest.raises(ValueError, match="newcomer_examples must be left out where clusters differ by their distrib"):
        build(tagged(), num_clients=2, num_clusters=2, **options)


def test_auto_reuses_only_when_it_must():
    data = tagged(n=120, n_test=40)
    settings = {"num_clusters": 2, "heterogeneity": "rotation", "examples_per_client": 10}
    once = tags(build(data, num_clients=12, **settings).train)
    assert sorted(once) == list(range(120))
    twice = tags(build(data, num_clients=14, **settings).train)
    assert len(twice) == 140 and len(set(twice)) < 140
    with pytest.raises(ValueError, match=r"times examples_per_client must be at most 120, .*, got 260"):
        build(data, num_clients=26, reuse="none", **settings)
    with pytest.raises(ValueError, match=r"times examples_per_client must be at most 120, .* got 130"):
        build(data, num_clients=26, **settings)


def test_hold_out_is_stratified():
    digits = load("digits")
    fed = build(digits, num_clients=10, test_fraction=0.25)
    y = fed.test.examples["y"][np.arange(fed.test.size.max()) < fed.test.size[:, None]]
    for label in range(10):
        assert (y == label).sum() == round(0.25 * (digits.train["y"] == label).sum())


def test_of_kinds_that_occur_once_one_stays_in_training():
    train, test = stratified_hold_out(np.array([0, 1, 2]), 0.9, seed=0)
    assert len(train) == 1 and len(test) == 2


@pytest.mark.parametrize(("fraction", "held"), [(0.01, [1, 1]), (0.99, [2, 4])])
def test_of_kinds_that_occur_more_often_one_is_held_out_and_one_stays(fraction, held):
    kind = np.repeat([0, 1, 2], [3, 5, 1])
    train, test = stratified_hold_out(kind, fraction, seed=0)
    assert np.bincount(kind[test]).tolist() == held and sorted([*train, *test]) == list(range(9))


@pytest.mark.parametrize("options", [{"partition": "label"}, {"partition": "dirichlet", "alpha": 0.2}])
def test_test_labels_follow_the_clients_training_labels(options):
    fed = build(load("digits"), num_clients=10, test_fraction=0.3, seed=1, **options)
    shared = 0
    for i in range(10):
        train = np.bincount(fed.train.examples["y"][i, : fed.train.size[i]], minlength=10)
        test = np.bincount(fed.test.examples["y"][i, : fed.test.size[i]], minlength=10)
        assert not (test[train == 0]).any(), "tested on a label it never trains on"
        # The share of every label's test examples is the share of its training examples, to within rounding.
        expected = train * 0.3 / 0.7
        assert np.abs(test - expected).max() < 2
        shared += test.sum()
    assert shared == sum(round(0.3 * c) for c in np.bincount(load("digits").train["y"]))


@pytest.mark.parametrize("partition", ["iid", "power_law"])
def test_labels_that_are_frequent_by_chance_are_not_so_in_the_test_data(partition):
    """Otherwise a model that learns its client's chances would be tested on them: local models seem better than are."""
    fed = build(tagged(n=4000, n_test=4000, size=1), num_clients=100, partition=partition)
    shares = [
        np.array([(y[:n] == 0).mean() for y, n in zip(part.examples["y"], part.size, strict=True)])
        for part in (fed.train, fed.test)
    ]
    assert abs(np.corrcoef(*shares)[0, 1]) < 0.3  # 3 standard deviations; 0.9 if the labels were matched
    assert np.abs(fed.test.size - fed.train.size).max() <= 1


def test_iid_test_sets_have_nearly_equal_sizes():
    sizes = build(load("digits"), num_clients=40, num_clusters=4, heterogeneity="rotation").test.size
    assert sizes.min() >= 7 and sizes.max() <= 11


def test_rounding_of_the_shares_of_a_test_set_does_not_add_up():
    kinds = np.repeat(np.arange(30), 3)  # of each, 7 clients are owed 3 / 7
    parts = allot(np.arange(90), kinds, [np.arange(30)] * 7, seed=0)
    assert {len(part) for part in parts} <= {12, 13, 14}


def test_more_clients_than_test_examples_still_all_have_one():
    fed = build(tagged(n=240), num_clients=150, num_clusters=3, heterogeneity="rotation", test_fraction=0.1, seed=0)
    assert fed.test.size.min() == 1 and len(set(tags(fed.test))) == 24
    assert not set(tags(fed.test)) & set(tags(fed.train))


def test_tests_are_divided_without_a_pass_over_all_for_each_client(monkeypatch):
    sizes, isin, data = [], np.isin, tagged(n=240)
    writers = data._replace(writer={"train": np.arange(240, dtype=np.int32) % 80})
    monkeypatch.setattr(np, "isin", lambda a, b: sizes.append(np.size(a) + np.size(b)) or isin(a, b))
    build(writers, partition="writer")
    build(data, num_clients=200, test_fraction=0.1)
    assert sum(sizes) < 10 * 240


def test_writers_are_clients():
    data = tagged(n=240, n_test=70)
    fed = build(data, partition="writer", num_clusters=2, heterogeneity="rotation", newcomer_examples=8)
    assert len(fed.train.size) == 12
    for i in range(12):
        own = data.writer["train"][tags(fed.train, i) + tags(fed.test, i)]
        assert set(own.tolist()) == {i} and len(own) == 20
        assert fed.test.size[i] == 4
    for i in range(7):  # newcomers are the official test split's writers
        assert {int(data.writer["test"][t - 240]) for t in tags(fed.newcomers, i)} == {100 + i}
    capped = build(data, partition="writer", num_clients=5, examples_per_client=3)
    assert capped.train.size.tolist() == [3] * 5
    ids = data.writer["train"].copy()
    ids[ids == 11] = np.where(np.arange((ids == 11).sum()) > 0, -1, 11)  # of one example none is left to test on
    alone = data._replace(writer={**data.writer, "train": ids})
    assert len(build(alone, partition="writer").train.size) == 11
    everywhere = build(data, partition="writer", num_clusters=2, heterogeneity="rotation", reuse="cluster")
    assert np.bincount(everywhere.writer).tolist() == [2] * 12  # in both clusters


def test_split_hash_knows_every_decision():
    base = {"num_clients": 6, "num_clusters": 2, "heterogeneity": "label_permutation", "seed": 1}
    one = build(tagged(), **base)
    again = build(tagged(), **base)
    assert one.split_hash == again.split_hash and len(one.split_hash) == 16
    np.testing.assert_array_equal(one.train.examples["x"], again.train.examples["x"])
    changes = [
        {"seed": 2},
        {"num_clients": 8},
        {"num_clusters": 3},
        {"heterogeneity": "private_label"},
        {"partition": "dirichlet"},
        {"test_fraction": 0.5},
        {"examples_per_client": 5},
        {"reuse": "cluster"},
        {"newcomer_examples": 4},
    ]
    hashes = {build(tagged(), **(base | change)).split_hash for change in changes}
    more = tagged()._replace(num_classes=tagged().num_classes + 1)  # which labels are renamed to
    assert len(hashes | {one.split_hash, build(more, **base).split_hash}) == len(changes) + 2
    base["heterogeneity"] = "class_rotation"  # half of the labels
    assert build(tagged(), **base).split_hash != build(more, **base).split_hash


def test_regression_data_sets_work():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((50, 3)).astype(np.float32)
    data = Dataset("lines", {"x": x, "y": x.sum(axis=1)}, None, None, None, "")
    fed = build(data, num_clients=5)
    assert fed.num_classes is None and fed.input_shape == (3,)
    assert fed.train.size.sum() == 40 and fed.test.size.tolist() == [2] * 5
    np.testing.assert_allclose(fed.train.examples["y"], fed.train.examples["x"].sum(axis=-1), rtol=1e-6)
    for options in ({"partition": "label"}, {"heterogeneity": "label_swap", "num_clusters": 2}):
        with pytest.raises(ValueError, match="classification data set"):
            build(data, num_clients=5, **options)


def test_large_numbers_are_finite():
    x = np.full((20, 2), 3e38, np.float32)
    data = Dataset("large", {"x": x, "y": np.zeros(20, np.float32)}, None, None, None, "")
    assert build(data, num_clients=2).train.examples["x"].max() == x[0, 0]


def spoiled(**changes):
    data = tagged(n=40)
    train = {name: values.copy() for name, values in data.train.items()}
    for name, (index, value) in changes.items():
        train[name][index] = value
    return data._replace(train=train)


@pytest.mark.parametrize(
    ("data", "options", "words"),
    [
        (tagged, {"heterogeneity": "rotatoin"}, "unknown heterogeneity 'rotatoin': did you mean 'rotation'?"),
        (tagged, {"partition": "dirichlett"}, "unknown partition 'dirichlett': did you mean 'dirichlet'?"),
        (tagged, {"reuse": "always"}, "unknown reuse"),
        (tagged, {"distribution": np.ones((6, CLASSES))}, "distribution must be left out with partition 'iid'"),
        (lambda: "digist", {}, "unknown dataset 'digist': did you mean 'digits'?"),
        (lambda: "digist", {"num_clients": None}, "unknown dataset 'digist': did you mean 'digits'?"),
        (lambda: "digits", {"num_clients": None}, "num_clients must be an integer"),
        (tagged, {"num_clusters": 2}, "heterogeneity must be given for num_clusters=2, one of rotation, label_swap"),
        (tagged, {"num_clusters": 2, "partition": "label", "heterogeneity": "none"}, "with 'none' the clusters do not"),
        (tagged, {"num_clusters": 7}, "num_clusters must be at most the 6 clients there are, got 7"),
        (tagged, {"num_clusters": 0}, "num_clusters must be an integer, at least 1"),
        (tagged, {"num_clients": None}, "num_clients must be an integer"),
        (
            tagged,
            {"num_clients": 241},
            "num_clients must be at most 192, the training examples of 'tagged' ",
        ),
        (tagged, {"examples_per_client": 0}, "examples_per_client must be"),
        (tagged, {"newcomer_examples": 1000}, "newcomer_examples must be at most 48"),
        (tagged, {"test_fraction": 1.0}, r"test_fraction must be in \(0, 1\), got 1.0"),
        (tagged, {"seed": -1}, "seed must be an integer, at least 0, got -1"),
        (tagged, {"partition": "writer", "num_clients": 13}, "at most 12, the number of writers"),
        (
            lambda: load("digits"),
            {"partition": "writer"},
            "writer ids, which 'digits' does not have",
        ),
        (
            lambda: load("digits"),
            {"heterogeneity": "class", "num_clients": 20, "num_clusters": 11},
            "at most 10",
        ),
        (lambda: spoiled(x=((3, 1, 1, 0), np.nan)), {}, "inputs: NaN or infinity in 1 example.s., first at 3"),
        (lambda: spoiled(x=((3, 1, 1, 0), np.inf)), {}, "inputs: NaN or infinity"),
        (lambda: spoiled(y=(5, CLASSES)), {}, "labels must be in 0..3, got .0, 4."),
        (lambda: spoiled(y=(5, -1)), {}, "labels must be in 0..3, got .-1, 3."),
        (lambda: tagged()._replace(train=np.ones(3)), {}, r"\(train\) must be a dict with arrays 'x' and 'y', got"),
        (lambda: tagged()._replace(train={"x": np.ones(3)}), {}, "must be a dict with arrays .* got {'x': 'ndarray'}"),
        (lambda: tagged()._replace(writer={}), {}, r"\(train\): writer must be a dict with the writer ids"),
        (lambda: tagged()._replace(writer={"train": "abc"}), {}, r"\(train\): writer must be a vector of 240 integers"),
        (
            lambda: tagged()._replace(num_classes="4"),
            {},
            "num_classes .* must be an integer, at least 1",
        ),
        (
            lambda: tuple(tagged()),
            {},
            "dataset must be a jfcl.data.Dataset .jfcl.data.from_frame makes .*, got 'tuple'",
        ),
        (
            lambda: tagged()._replace(train={"x": np.ones((3, 2)), "y": np.ones((3, 2), int)}),
            {},
            r"y must be a label for each input, integers \(y.argmax\(-1\) of one-hot rows.*got 'int64 .3, 2.'",
        ),
    ],
)
def test_bad_input_is_named(data, options, words):
    with pytest.raises(ValueError, match=words):
        build(data(), **({"num_clients": 6} | options))


def test_text_must_be_tokenized_first():
    data = Dataset("t", {"x": np.array(["a", "b"], object), "y": np.zeros(2, np.int32)}, None, 1, None, "")
    with pytest.raises(ValueError, match=r"inputs must be numbers.*tokenize"):
        build(data, num_clients=1)


def test_images_must_be_scaled_first():
    images = {"x": np.full((2, 4, 4, 1), 255, np.uint8), "y": np.zeros(2, np.int32)}
    with pytest.raises(ValueError, match=r"images must be .*, such as x / 255; .* got .uint8 .2, 4, 4, 1."):
        build(Dataset("t", images, None, 1, None, ""), num_clients=1)


def test_images_of_bytes_as_floats_are_a_warning():
    x, y = np.random.default_rng(0).integers(0, 256, (40, 4, 4, 1)).astype(np.float32), np.arange(40) % 2
    with pytest.warns(UserWarning, match=r"whole numbers up to 25\d, which hardly train; give x / 255"):
        build(Dataset("a", {"x": x, "y": y}, None, 2, None, ""), num_clients=4)
    build(Dataset("a", {"x": x / 255, "y": y}, None, 2, None, ""), num_clients=4)


def test_rotation_of_what_is_not_square():
    data = tagged()
    wide = data._replace(train={"x": data.train["x"][:, :3], "y": data.train["y"]})
    with pytest.raises(ValueError, match="other images than square ones cannot be turned by 90 degrees"):
        build(wide, num_clients=4, num_clusters=4, heterogeneity="rotation")
    assert build(wide, num_clients=4, num_clusters=2, heterogeneity="rotation").input_shape == (3, 5, 1)


@pytest.mark.parametrize("name", ["rotation", "corruption"])
def test_images_of_16_bits_shift_as_others(name):
    x, y = np.random.default_rng(0).random((30, 8, 8, 1)).astype(np.float16), np.arange(30) % 2
    options = {"num_clients": 3, "num_clusters": 3, "heterogeneity": name}
    data = [Dataset("a", {"x": x.astype(kind), "y": y}, None, 2, None, "") for kind in (np.float16, np.float32)]
    half, whole = (build(one, **options).train.examples["x"] for one in data)
    assert half.dtype == np.float16
    np.testing.assert_allclose(half[::2], whole[::2], atol=1e-3)  # noise, of cluster 1, depends on the bytes


def test_labels_of_bytes_are_renamed_beyond_them():
    y = np.arange(157, 197).astype(np.uint8)
    data = Dataset("a", {"x": np.zeros((40, 2), np.float32), "y": y}, None, 300, None, "")
    labels = build(data, num_clients=4, num_clusters=4, heterogeneity="offset").train.examples["y"]
    assert labels[1].min() >= 157 + 99


@pytest.mark.parametrize("entry", ["build", "store"])
def test_maps_turn_with_their_images(entry, tmp_path):
    """By thirds of a circle too: a map's labels are those of SciPy's nearest pixels, and none is new."""
    rng = np.random.default_rng(0)
    x, y = rng.random((60, 9, 9, 2), np.float32), rng.choice([0, 3, 7], (60, 9, 9)).astype(np.int32)
    train = {"x": x, "y": y, "row": np.arange(60), "soft": y[..., None].astype(np.float32), "box": rng.random((60, 4))}
    data = Dataset("maps", train, None, None, None, "")
    options = {"num_clients": 6, "num_clusters": 3, "heterogeneity": "rotation"}
    if entry == "build":
        fed = build(data, newcomer_examples=3, **options)
        found = [(fed.train, fed.cluster), (fed.test, fed.cluster), (fed.newcomers, fed.newcomer_cluster)]
    else:
        stores = generate_store(tmp_path / "p", data, examples_per_client=7, **options)
        found = [(store.gather(np.arange(6)), store.cluster) for store in stores]
    for clients, cluster in found:
        assert len(set(cluster.tolist())) == 3
        for i, size in enumerate(clients.size):
            one = {name: values[i, :size] for name, values in clients.examples.items()}
            turn = {"angle": 120.0 * cluster[i], "axes": (2, 1), "reshape": False}
            np.testing.assert_allclose(one["x"], rotate(x[one["row"]], order=1, **turn), atol=1e-6)
            np.testing.assert_array_equal(one["y"], rotate(y[one["row"]], order=0, **turn))
            np.testing.assert_array_equal(one["soft"][..., 0], one["y"])
            np.testing.assert_allclose(one["box"], train["box"][one["row"]], rtol=1e-6)
            assert set(np.unique(one["y"])) <= {0, 3, 7}


@pytest.mark.parametrize("shape", [(60, 18, 18), (60, 3, 9, 9), (60, 4, 4)])
def test_what_may_be_a_map_is_not_left_behind(shape, tmp_path):
    train = {"x": np.zeros((60, 9, 9, 1), np.float32), "y": np.zeros(60, np.float32), "odd": np.zeros(shape)}
    data = Dataset("maps", train, None, None, None, "")
    options = {"num_clients": 6, "num_clusters": 3, "heterogeneity": "rotation"}
    for make in (build, lambda *args, **more: generate_store(tmp_path / "p", *args, examples_per_client=5, **more)):
        with pytest.raises(ValueError, match=r"beside x \['odd'\] has shape .*whether it is a map that must move"):
            make(data, **options)
    assert not (tmp_path / "p").exists()
    assert build(data, num_clients=6).train.examples["odd"].shape[2:] == shape[1:]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"w": np.ones(39)}, r"\['w'\] has 39 entries for 40 inputs; give one for each"),
        ({"w": np.float32(1)}, "w must be an array or a list with an entry for each example"),
        ({"w": np.array(["a"] * 40)}, r"\['w'\] must be numbers"),
        ({"more": {"w": np.full(40, np.nan)}}, r"\['more'\]\['w'\]: NaN or infinity in 40"),
        (
            {"x": np.zeros((40, 3, 8, 8), np.float32)},
            r"with channels last: .*, got \[40, 3, 8, 8\]",
        ),
        ({"x": np.zeros((40, 8, 8), np.uint16)}, r"images must be of floating-point numbers.*got .uint16 \[40, 8, 8\]"),
        ({"x": np.zeros((40, 64), np.uint8)}, r"images must be of floating-point numbers.*got .uint8 \[40, 64\]"),
        ({"x": np.zeros((40, 8), bool)}, "inputs must be numbers; .* got .bool"),
        ({"x": np.zeros((40, 0))}, "the inputs are empty, of shape"),
        ({"x": np.float32(3)}, "x must be an array or a list with an entry for each example"),
        ({"x": np.full((40, 2), 1e39)}, "inputs must be of numbers that float32 holds"),
        ({"x": np.full((40, 2), 2**40)}, "inputs must be of numbers that int32 holds"),
        ({"x": np.arange(40) + 10**9}, "inputs must be of numbers that float32 tells apart"),
        ({"y": 1e9 + np.arange(40.0)}, "targets must be of numbers that float32 tells apart"),
        ({"y": np.array(["a", "b"] * 20)}, "targets must be numbers; np.unique"),
        ({"y": np.array([0, "a"] * 20, object)}, "y: must hold numbers, arrays, images or texts, got 'a' in row 1"),
        ({"y": np.array([0, None] * 20, object)}, "y: 20 missing values, first in row 1"),
        ({"y": np.arange(40).astype("datetime64[D]")}, "y must be numbers in the place of dates"),
        ({"y": np.ones(40) * 1j}, "y: must hold numbers"),
        ({"w": np.arange(40) + 2**40}, r"\['w'\] must be of numbers that int32 holds"),
        *[({name: np.ma.array(np.ones(40, int), mask=[1] + [0] * 39)}, f"{name}: a masked array") for name in "xyw"],
        ({"more": {"w": np.ma.array(np.ones(40), mask=[1] + [0] * 39)}}, "more/w: a masked array"),
    ],
)
def test_arrays_that_would_be_read_wrongly_are_named(change, words):
    data = tagged(n=40)
    data = data._replace(train=data.train | change, num_classes=None if "y" in change else CLASSES)
    with pytest.raises(ValueError, match=words):
        build(data, num_clients=2)


@pytest.mark.parametrize("kind", [">f4", ">f8", "longdouble", "float16", "F", "turned", "masked", "read-only"])
def test_numbers_of_every_type_are_kept(kind, tmp_path):
    x = (
        np.random.default_rng(0)
        .normal(size=(40, 3))
        .astype(kind if kind[-1].isdigit() or kind == "longdouble" else "f4")
    )
    x = {"F": np.asfortranarray(x), "turned": x[::-1, ::-1], "masked": np.ma.array(x, mask=False)}.get(kind, x)
    x.flags.writeable = kind != "read-only"
    whole = np.arange(40).astype(">i2" if kind[0] == ">" else "u8")
    data = Dataset("m", {"x": x, "y": whole % 2, "w": x[:, 0], "id": whole}, None, 2, None, "")
    stores = generate_store(tmp_path / "s", data, num_clients=2, examples_per_client=16)
    for made in (build(data, num_clients=2).train, stores[0].gather([0, 1])):
        check_clients(made)
        real = np.arange(made.examples["x"].shape[1]) < made.size[:, None]
        found = {name: np.asarray(jax.numpy.asarray(values))[real] for name, values in made.examples.items()}
        plain = np.asarray(x, np.float32)[found["id"]]
        np.testing.assert_array_equal(found["x"], plain)
        np.testing.assert_array_equal(found["w"], plain[:, 0])
        np.testing.assert_array_equal(found["y"], found["id"] % 2)


def test_arrays_beside_x_and_y_are_those_of_both_splits():
    data = tagged(40, 20)
    extra = data._replace(train=data.train | {"w": np.ones(40)})
    with pytest.raises(ValueError, match=r"\(test\): the shapes of its arrays must be those of training, .*'w'"):
        build(extra, num_clients=2)


@pytest.mark.slow
def test_weights_reach_the_loss_in_memory_and_in_a_population(tmp_path):
    """One step of all clients on weighted squares is NumPy's."""
    rng = np.random.default_rng(0)
    train = {"x": rng.normal(size=(40, 2)).astype(np.float32), "y": rng.normal(size=40).astype(np.float32)}
    train["w"] = rng.random(40).astype(np.float32)
    data = Dataset("weighted", train, None, None, None, "")
    line = jfcl.models.task(lambda key: {"w": jnp.zeros(2)}, lambda params, x: x @ params["w"], kind="regression")
    cost = lambda outputs, batch: batch["w"] * line.cost(outputs, batch)  # noqa: E731
    task = line._replace(cost=cost, reads=("x", "y", "w"))
    fedavg = jfcl.fedavg(task, jfcl.local_training(optax.sgd(0.5), num_steps=1))
    store, tests = generate_store(tmp_path / "p", data, num_clients=4, examples_per_client=8)
    fed = build(data, num_clients=4, examples_per_client=8, newcomer_examples=2)
    options = {"key": jax.random.key(0), "num_rounds": 1}
    runs = [(fed.train, fed.test, jfcl.simulate(fedavg, fed.train, test_clients=fed.test, **options))]
    people = jfcl.Population(store, cohort=4, test_clients=tests)
    whole = np.arange(4)
    runs += [(store.gather(whole), tests.gather(whole), jfcl.simulate(fedavg, people, **options))]
    for clients, test, history in runs:
        x, y, w = (np.float64(clients.examples[name]) for name in ("x", "y", "w"))  # 8 examples each
        step = 0.5 * np.einsum("nmd,nm->d", x, 2 * w * y) / 32
        np.testing.assert_allclose(history.state.params["w"][0], step, rtol=1e-5)
        tx, ty, tw = (np.float64(test.examples[name]) for name in ("x", "y", "w"))
        wanted = np.mean((tw * (tx @ step - ty) ** 2).sum(axis=1) / test.size)
        np.testing.assert_allclose(history.records[-1]["loss"], wanted, rtol=1e-5)
    assert fed.newcomers.examples["w"].min() > 0
    without = fed.train._replace(examples={name: fed.train.examples[name] for name in ("x", "y")})
    with pytest.raises(ValueError, match=r"clients.examples must be a dict with 'x' and 'y' and 'w', got"):
        jfcl.simulate(fedavg, without, **options)


def test_further_arrays_of_texts_and_of_stores(tmp_path):
    rows = {"y": np.array([0, 1, 0]), "w": np.array([0.5, 1.5, 2.5], np.float32), "more": {"n": np.arange(3)}}
    data = Dataset("t", {"x": np.array(["a b", "c", "abc a"], object), **rows}, None, 2, None, "")
    words, _ = tokenize(data, length=3)
    np.testing.assert_array_equal(words.train["w"], rows["w"])
    letters, _ = tokenize(data._replace(tokens="characters"), length=3)  # 1, 0 and 2 rows
    assert letters.train["w"].tolist() == [0.5, 2.5, 2.5] and letters.train["more"]["n"].tolist() == [0, 2, 2]
    with pytest.raises(ValueError, match="dataset must be of single arrays, since each is a file of the store, got"):
        generate_store(tmp_path / "p", words, num_clients=1, examples_per_client=1)


def test_a_writer_belongs_to_one_cluster():
    with pytest.raises(
        ValueError, match="partition 'writer' does not fit heterogeneity 'class': the examples of a writer"
    ):
        build(tagged(240, 56), partition="writer", num_clusters=2, heterogeneity="class")


def rows_by_client(data, fed):
    """Returns of each writer its training and its test rows by their tags."""
    clients = [(sorted(tags(fed.train, i)), sorted(tags(fed.test, i))) for i in range(len(fed.writer))]
    return dict(zip(fed.writer.tolist(), clients, strict=True))


def test_writers_keep_the_official_test_split():
    data = tagged(240, 56)
    data = data._replace(writer=data.writer | {"test": (np.arange(56) % 9).astype(np.int32)})  # 9, 10, 11: none in it
    fed = build(data, partition="writer")
    for writer, (train, test) in rows_by_client(data, fed).items():
        own = np.flatnonzero(data.writer["train"] == writer).tolist()
        if writer < 9:
            assert train == own and test == (240 + np.flatnonzero(data.writer["test"] == writer)).tolist()
        else:
            assert sorted(train + test) == own and len(test) == 4
    assert "official test split, and 0.2 held out of 3 writer(s) that are not in it" in fed.description
    both = data._replace(writer=data.writer | {"test": (np.arange(56) % 12).astype(np.int32)})
    assert build(both, partition="writer").description.endswith(", 1 cluster, official test split")
    drawn = rows_by_client(both, build(both, partition="writer", num_clients=5))
    assert len(drawn) == 5
    for writer, rows in drawn.items():
        own = [np.flatnonzero(both.writer[split] == writer).tolist() for split in ("train", "test")]
        assert rows == (own[0], [240 + row for row in own[1]])


def test_writers_of_one_example_are_counted_and_named():
    data = tagged(240)
    ids = np.repeat(np.arange(10), 24).astype(np.int32)
    ids[[0, 1]] = [10, 11]  # alone
    data = data._replace(writer={"train": ids}, writer_names=[f"user{i}" for i in range(12)])
    fed = build(data, partition="writer")
    assert fed.writer.tolist() == list(range(10)) and "left out: 2 of 12 writers" in fed.description
    assert "(user10, user11)" in fed.description
    with pytest.raises(ValueError, match=r"at most 10, the number of writers, without 2 of 12 writers, .*, got 11"):
        build(data, partition="writer", num_clients=11)
    every = data._replace(writer={"train": np.arange(240, dtype=np.int32)})
    for count in (None, 3):
        with pytest.raises(ValueError, match="partition 'writer' needs writers with two examples"):
            build(every, partition="writer", num_clients=count)


def test_remedies_for_too_few_examples_help(tmp_path):
    data = tagged(100)
    with pytest.raises(ValueError, match=r"num_clients times examples_per_client must be at most 80, .* got 320"):
        build(data, num_clients=40, num_clusters=4, heterogeneity="rotation", examples_per_client=8, reuse="none")
    options = {"num_clients": 40, "num_clusters": 4, "heterogeneity": "rotation"}
    build(data, **options, examples_per_client=2, reuse="none")
    build(data, **options, examples_per_client=8, reuse="cluster")
    with pytest.raises(ValueError, match=r"num_clients must be at most 80, .* got 81"):
        build(data, num_clients=81)
    build(data, num_clients=80)
    for make in (build, lambda *args, **options: jfcl.data.generate_store(tmp_path / "s", *args, **options)):
        for partition, option in [("dirichlet", "min_size"), ("label", "labels_per_client")]:
            options = {"num_clients": 20, "partition": partition, "examples_per_client": 3}
            with pytest.raises(ValueError, match=f"{option} must be at most 3, the examples_per_client, got 4"):
                make(data, **options, **{option: 4})


@pytest.mark.parametrize("options", [{"alpha": 0.1}, {"partition": "label", "alpha": 0.1}, {"sigma": np.ones(2)}])
def test_options_of_other_partitions_are_refused(options):
    with pytest.raises(ValueError, match=r"(alpha|sigma) must be left out with partition '(iid|label)': it is of "):
        build("digits", num_clients=4, **options)


def test_unequal_clients_that_exceed_memory(monkeypatch, tmp_path):
    monkeypatch.setattr("jfcl.core.stacking.free_host_memory", lambda: 2**27)
    sizes = [20_000] + [10] * 399
    clients = [{"x": np.zeros((size, 10), np.float32), "y": np.zeros(size, np.int32)} for size in sizes]
    with pytest.raises(
        ValueError, match=r"examples \(400, 20000, 10\) need 0\.3 GB .*cut the largest client, .*ClientStore"
    ):
        jfcl.stack_clients(clients)
    data = Dataset("m", {"x": np.zeros((23_990, 10), np.float32), "y": np.zeros(23_990, np.int32)}, None, 1, None, "")
    data = data._replace(writer={"train": np.repeat(np.arange(400), sizes).astype(np.int32)})
    with pytest.raises(ValueError, match=r"\(400, 16000, 10\)"):
        build(data, partition="writer")
    build(data, partition="writer", examples_per_client=100)
    store = jfcl.data.ClientStore.create(tmp_path / "s", clients)
    assert store.gather([1, 0]).size.tolist() == [10, 20_000]


@pytest.mark.parametrize("official", [False, True])
@pytest.mark.parametrize("partition", ["dirichlet", "pathological"])
def test_remedies_for_labels_without_test_examples_help(partition, official):
    """Of labels 3 and 4 there is nothing to test on; whatever the message says cures that."""
    rng = np.random.default_rng(0)
    y = np.concatenate([rng.integers(0, 3, 57), [3] * (2 if official else 1), [4]]).astype(np.int32)
    x = np.arange(len(y), dtype=np.float32)[:, None]
    test = {"x": x[:30], "y": y[:30]} if official else None
    data = Dataset("rare", {"x": x, "y": y}, test, 5, None, "")
    options = {"num_clients": 10, "partition": partition}
    options |= {"alpha": 0.05} if partition == "dirichlet" else {"labels_per_client": 1}
    refused = 0
    for seed in range(20):
        try:
            build(data, **options, seed=seed)
        except ValueError as error:
            refused += 1
            assert re.search(r": 3, 4; leave their examples out|leave out the examples of labels 3, 4", str(error))
            fewer = data._replace(train={name: values[y < 3] for name, values in data.train.items()})
            build(fewer, **options, seed=seed)
            build(data, num_clients=10, seed=seed)
    assert refused


def test_labels_of_other_clusters_are_not_named_among_those_without_test_examples():
    y = np.repeat([0, 1, 2, 3], [40, 40, 20, 1]).astype(np.int32)
    data = Dataset("rare", {"x": np.zeros((101, 1), np.float32), "y": y}, None, 4, None, "")
    options = {"num_clients": 8, "num_clusters": 2, "heterogeneity": "class", "partition": "dirichlet", "alpha": 0.05}
    said = set()
    for seed in range(20):
        try:
            build(data, **options, seed=seed)
        except ValueError as error:
            said.add(re.search(r"none of these labels: ([\d, ]+);", str(error))[1])
    assert said == {"3"}


def test_newcomers_are_writers_that_are_not_in_training():
    data = tagged(240, 56)
    known = data.writer["test"].copy()
    known[known == 100] = 3  # of training
    mixed = data._replace(writer=data.writer | {"test": known})
    fed = build(mixed, partition="writer", newcomer_examples=8)
    assert {int(known[t - 240]) for t in tags(fed.newcomers)} == set(range(101, 107))
    with pytest.raises(ValueError, match="newcomer_examples must be left out: all writers"):
        build(data._replace(writer=data.writer | {"test": known * 0}), partition="writer", newcomer_examples=8)
