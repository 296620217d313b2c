"""Shifts: what clusters differ by is what the equations say, strength 0 is no shift, bad input is named."""

import itertools
import tracemalloc

import jax
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import hsv_to_rgb, rgb_to_hsv
from scipy.ndimage import gaussian_filter, rotate

from jfcl.analysis.metrics import mixture_recovery
from jfcl.data import HETEROGENEITY, ClientStore, Dataset, build, from_frame, generate_store, load, mixture_of
from jfcl.data.concepts import CONCEPTS
from jfcl.data.corruptions import CORRUPTIONS, corrupt
from jfcl.experiments import Config, run
from jfcl.experiments.setups import load_clients

SHIFTS = [name for name in HETEROGENEITY if name != "none" and name not in CONCEPTS]


def numbered(name="digits"):
    """A data set with the number of each example beside it."""
    data = load(name)
    return data._replace(train=data.train | {"row": np.arange(len(data.train["y"]))}, test=None)


def examples_of(clients, i):
    return {name: values[i, : clients.size[i]] for name, values in clients.examples.items()}


def everyone(fed):
    """Yields `(client, cluster, its examples)` of training, tests and newcomers."""
    parts = [(fed.train, fed.cluster), (fed.test, fed.cluster)]
    parts += [] if fed.newcomers is None else [(fed.newcomers, fed.newcomer_cluster)]
    for clients, cluster in parts:
        for i, k in enumerate(cluster.tolist()):
            yield i, k, examples_of(clients, i)


def assert_same(one, other):
    np.testing.assert_array_equal(one.size, other.size)
    for name in one.examples:
        np.testing.assert_array_equal(one.examples[name], other.examples[name])
        assert one.examples[name].dtype == other.examples[name].dtype


@pytest.mark.parametrize("heterogeneity", [*SHIFTS, "rotation+label_swap"])
def test_strength_0_is_no_shift_bit_for_bit(heterogeneity):
    options = {"num_clients": 6, "reuse": "none", "seed": 4}
    fed = build("digits", num_clusters=3, heterogeneity=heterogeneity, strength=0, **options)
    none = build("digits", **options)
    assert_same(fed.train, none.train)
    assert_same(fed.test, none.test)
    assert fed.cluster.tolist() == [0, 1, 2, 0, 1, 2] and fed.input_shape == none.input_shape


def test_whole_strength_is_the_default_and_others_have_other_hashes():
    options = {"num_clients": 6, "num_clusters": 3, "heterogeneity": "rotation"}
    feds = [build("digits", **options, **more) for more in ({}, {"strength": 1}, {"strength": 0.5}, {"strength": 0})]
    assert feds[0].split_hash == feds[1].split_hash == "9f0faadaf67cc0dd"  # as before there were strengths
    assert len({fed.split_hash for fed in feds}) == 3 and "(rotation, strength 0.5)" in feds[2].description
    assert_same(feds[0].train, feds[1].train)


def test_inputs_of_the_clusters_are_as_the_equations_say():
    """Rotation by a share of the angle, colour by a share of the hue, of all labels and of half of them."""
    data = numbered()
    x, y = data.train["x"], data.train["y"]
    options = {"num_clients": 6, "num_clusters": 3, "strength": 0.5, "newcomer_examples": 30}
    feds = {name: build(data, heterogeneity=name, **options) for name in ("rotation", "class_rotation", "colour")}
    for _, k, one in everyone(feds["rotation"]):
        turned = rotate(x[one["row"]], 60.0 * k, axes=(2, 1), reshape=False, order=1)
        np.testing.assert_allclose(one["x"], turned, atol=1e-6)
    for _, k, one in everyone(feds["class_rotation"]):
        turned = rotate(x[one["row"]], 60.0 * k, axes=(2, 1), reshape=False, order=1)
        turns = (y[one["row"]] < 5)[:, None, None, None]
        np.testing.assert_allclose(one["x"], np.where(turns, turned, x[one["row"]]), atol=1e-6)
        np.testing.assert_array_equal(one["y"], y[one["row"]])
    hues = np.array([[1, 0.25, 0.25], [0.25, 1, 0.25], [0.25, 0.25, 1]])  # red, green, blue
    for _, k, one in everyone(feds["colour"]):
        np.testing.assert_allclose(one["x"], x[one["row"]] * (0.5 + 0.5 * hues[k]), rtol=1e-6)
    assert feds["colour"].input_shape == (8, 8, 3)


def test_offset_and_concept_rename_labels_as_their_papers_do():
    data = numbered()
    x, y = data.train["x"], data.train["y"]
    for _, k, one in everyone(build(data, num_clients=8, num_clusters=4, heterogeneity="offset")):
        np.testing.assert_array_equal(one["y"], (y[one["row"]] + 3 * k) % 10)  # StoCFL
    concepts = np.stack([y, 9 - y, (y + 1) % 10])
    fed, corrupted = (
        build(data, num_clients=12, newcomer_examples=100, num_clusters=3, heterogeneity="three_concepts"),
        [],
    )
    for _, k, one in everyone(fed):
        np.testing.assert_array_equal(one["y"], concepts[k, one["row"]])
        differ = (one["x"] != x[one["row"]]).any(axis=(1, 2, 3))
        assert differ.mean() > 0.95 or not differ.any()
        corrupted.append(differ.any())
        assert one["x"].min() >= 0 and one["x"].max() <= 1
    # Every other client of a cluster, and so every other new one.
    assert corrupted == 2 * [i // 3 % 2 == 1 for i in range(12)] + 3 * [False, True, False]


@pytest.mark.parametrize("heterogeneity", ["label_swap", "label_permutation", "swap_pairs", "private_label", "sine"])
def test_strength_is_the_share_of_relabelled_examples(heterogeneity):
    data = numbered(heterogeneity if heterogeneity in CONCEPTS else "digits")
    options = {"num_clients": 6, "num_clusters": 2, "heterogeneity": heterogeneity}
    whole = build(data, **options)
    part = build(data, strength=0.3, **options)
    base, changed, able = data.train["y"], 0, 0
    for (_, _, one), (_, _, new) in zip(everyone(whole), everyone(part), strict=True):
        np.testing.assert_array_equal(one["row"], new["row"])
        moved = one["y"] != base[one["row"]]
        assert ((new["y"] == one["y"]) | (new["y"] == base[new["row"]])).all()
        changed, able = changed + (new["y"] != base[new["row"]]).sum(), able + moved.sum()
    assert abs(changed / able - 0.3) < 4 * (0.3 * 0.7 / able) ** 0.5  # 4 standard deviations


def test_strength_is_the_share_of_a_clusters_labels():
    """P_k(y) = (1 - s) P(y) + s P_k(y), and no example is at two clients."""
    data = numbered()
    fed = build(data, num_clients=6, num_clusters=2, heterogeneity="class", strength=0.6)
    rows = np.concatenate([one["row"] for _, _, one in everyone(fed)])
    assert sorted(rows.tolist()) == list(range(len(data.train["y"])))
    for k in range(2):
        labels = np.concatenate([one["y"] for _, cluster, one in everyone(fed) if cluster == k])
        share = (labels // 5 == k).mean()
        assert abs(share - (0.6 + 0.4 * 0.5)) < 0.05
    topic = build(data, num_clients=6, num_clusters=3, heterogeneity="topic", strength=0.5)
    assert {int(label) for _, _, one in everyone(topic) for label in one["y"]} == {0, 1, 2}


def corrupted(kind, image):
    """One image `[H, W]` in float64, by loops, without the noise."""
    height, width = image.shape
    if kind == "blur":
        return gaussian_filter(image, 0.7, mode="nearest")
    if kind == "contrast":
        return (image - image.mean()) * 0.4 + image.mean()
    if kind == "brightness":
        return image + 0.15
    out = np.zeros_like(image)
    rows, columns = int(0.85 * height), int(0.85 * width)
    blocks = [[i * rows // height for i in range(height)], [j * columns // width for j in range(width)]]
    for i in range(height):
        for j in range(width):
            same = [(a, b) for a in range(height) for b in range(width)
                    if blocks[0][a] == blocks[0][i] and blocks[1][b] == blocks[1][j]]  # fmt: skip
            out[i, j] = np.mean([image[place] for place in same])
    return out


def test_corruptions_are_as_their_equations_say():
    x = load("digits").train["x"][:300]
    for kind in ("blur", "contrast", "brightness", "pixelate"):
        wanted = np.stack([corrupted(kind, image[..., 0].astype(np.float64)) for image in x[:5]])
        np.testing.assert_allclose(corrupt(x[:5], kind, 3)[..., 0], wanted.clip(0, 1), atol=1e-6)
    colours = np.random.default_rng(0).random((2, 6, 6, 3), np.float32)
    for kind in ("blur", "contrast", "pixelate"):  # of each channel by itself
        wanted = [[corrupted(kind, image[..., c].astype(np.float64)) for c in range(3)] for image in colours]
        np.testing.assert_allclose(corrupt(colours, kind, 3), np.moveaxis(wanted, 1, -1).clip(0, 1), atol=1e-6)
    added = corrupt(np.full_like(x, 0.5), "noise", 3) - 0.5  # equal images have equal noise
    assert (added == added[:1]).all() and abs(added[0].std() - 0.08) < 0.03
    noisy = corrupt(x, "noise", 3, seed=1)
    inside = (x > 0.35) & (x < 0.65)
    assert abs((noisy - x)[inside].std() - 0.08) < 0.005
    order = np.random.default_rng(0).permutation(len(x))
    np.testing.assert_array_equal(corrupt(x[order], "noise", 3, seed=1), noisy[order])
    assert (corrupt(x, "noise", 3, seed=2) != noisy).any()
    for kind in CORRUPTIONS:
        far = [np.abs(corrupt(x, kind, severity) - x).mean() for severity in range(6)]
        assert far[0] < 1e-7 and (np.diff(far) >= 0).all() and far[5] > far[1]


def test_brighter_colours_keep_their_hue():
    """CIFAR-10-C adds to the value in HSV."""
    x = np.random.default_rng(0).random((5, 6, 6, 4), np.float32)  # with transparency
    x[0, 0, 0, :3] = 0
    hsv = rgb_to_hsv(x[..., :3].astype(np.float64))
    hsv[..., 2] = (hsv[..., 2] + 0.15).clip(0, 1)
    for given, kept in ((x, x[..., 3:]), (x[..., :3], x[..., 4:])):
        wanted = np.concatenate([hsv_to_rgb(hsv), kept], axis=-1)
        np.testing.assert_allclose(corrupt(given, "brightness", 3), wanted, atol=1e-6)


def test_each_cluster_has_its_corruption():
    data = numbered()
    fed = build(data, num_clients=6, num_clusters=6, heterogeneity="corruption", strength=0.6)
    for _, k, one in everyone(fed):
        clean = data.train["x"][one["row"]]
        wanted = clean if k == 0 else corrupt(clean, [*CORRUPTIONS][k - 1], 3, seed=(0, 5))
        np.testing.assert_allclose(one["x"], wanted, atol=1e-6)


@pytest.mark.parametrize(
    "heterogeneity, strength", [("three_concepts", 1), ("class+corruption", 0.4), ("colour+offset", 0.7)]
)
def test_populations_have_the_same_shifts(tmp_path, heterogeneity, strength):
    options = {"num_clients": 12, "num_clusters": 3, "heterogeneity": heterogeneity, "strength": strength}
    options |= {"examples_per_client": 20, "seed": 3}
    fed = build("digits", reuse="cluster", **options)
    for store, wanted in zip(generate_store(tmp_path / "p", "digits", **options), (fed.train, fed.test), strict=True):
        assert_same(store.gather(np.arange(12)), wanted)
        np.testing.assert_array_equal(store.cluster, fed.cluster)


def test_examples_are_selected_by_the_labels_of_the_data_set():
    """Wherever the name stands: cluster 1 has the digits from 5, each renamed to the next one."""
    for heterogeneity in ("private_label+class", "class+private_label"):
        fed = build("digits", num_clients=2, num_clusters=2, heterogeneity=heterogeneity)
        assert set(examples_of(fed.train, 1)["y"].tolist()) == {6, 7, 8, 9, 0}


@pytest.mark.parametrize("heterogeneity", ["private_label", "three_concepts"])
def test_populations_mix_clusters_too(tmp_path, heterogeneity):
    options = {"num_clients": 12, "num_clusters": 3, "heterogeneity": heterogeneity, "mixture": 0.5, "seed": 3}
    fed = build("digits", examples_per_client=20, **options)
    stores = generate_store(tmp_path / "p", "digits", examples_per_client=20, **options)
    for store, wanted in zip(stores, (fed.train, fed.test), strict=True):
        assert_same(store.gather(np.arange(12)), wanted)
        np.testing.assert_array_equal(store.cluster, fed.cluster)
    np.testing.assert_array_equal(mixture_of(stores[0]), fed.mixture)
    # More clients than one division has: each client still has other rows, in the shares that were drawn.
    many, _ = generate_store(tmp_path / "q", "digits", examples_per_client=100, **options | {"num_clients": 50})
    found = mixture_of(many, [49, 3])
    shares = np.array([np.random.default_rng((3, 101)).dirichlet([0.5] * 3, 50)[i] for i in (49, 3)])
    np.testing.assert_allclose(found, shares, atol=0.01)
    assert many.cluster[[49, 3]].tolist() == shares.argmax(axis=1).tolist() and many.sizes().tolist() == [100] * 50
    with pytest.raises(ValueError, match=r"ids must be in 0\.\.49, got \[-1, 3\]"):
        mixture_of(many, [3, -1])
    plain, _ = generate_store(tmp_path / "r", "digits", num_clients=3, examples_per_client=5)
    assert mixture_of(plain) is None


def test_two_shifts_are_both_applied():
    data = numbered()
    options = {"num_clients": 8, "num_clusters": 4}
    both = build(data, heterogeneity="rotation+label_swap", **options)
    turned = build(data, heterogeneity="rotation", **options).train.examples["x"]
    swapped = build(data, heterogeneity="label_swap", **options).train.examples["y"]
    np.testing.assert_array_equal(both.train.examples["x"], turned)
    np.testing.assert_array_equal(both.train.examples["y"], swapped)


def test_mixed_clients_have_their_shares_of_the_clusters():
    """The label tells the cluster of each example: `(y - base) mod 10`."""
    data = numbered()
    base, options = data.train["y"], {"num_clients": 12, "num_clusters": 3, "heterogeneity": "private_label"}
    fed = build(data, mixture=0.5, **options)
    plain = build(data, **options)
    assert fed.mixture.shape == (12, 3) and fed.split_hash != plain.split_hash
    np.testing.assert_array_equal(fed.cluster, fed.mixture.argmax(axis=1))
    for clients, others, most in ((fed.train, plain.train, 1e-6), (fed.test, plain.test, 0.06)):
        np.testing.assert_array_equal(clients.examples["row"], others.examples["row"])  # the same division
        for i in range(12):
            one = examples_of(clients, i)
            shares = np.bincount((one["y"] - base[one["row"]]) % 10, minlength=10) / len(one["y"])
            np.testing.assert_allclose(shares[:3], fed.mixture[i], atol=most)
    both = build(data, mixture=0.5, **options | {"heterogeneity": "three_concepts"})
    for i, _, one in everyone(both):
        differ = (one["x"] != data.train["x"][one["row"]]).any(axis=(1, 2, 3))
        assert differ.mean() > 0.9 if i // 3 % 2 else not differ.any()
    same, one = (build(data, mixture=alpha, **options).mixture for alpha in (1e4, 1e-6))
    assert np.abs(same - 1 / 3).max() < 0.03 and one.max(axis=1).min() == 1
    drawn = build(data, mixture=2.0, **options | {"num_clients": 300}).mixture
    assert abs(drawn.var() - (1 / 3) * (2 / 3) / (3 * 2 + 1)) < 0.01  # of a Dirichlet distribution, up to rounding


def test_mixtures_are_compared_under_the_best_matching():
    rng = np.random.default_rng(0)
    true, found = rng.dirichlet([0.5] * 3, 20), rng.dirichlet([0.5] * 4, 20)
    padded = np.column_stack([true, np.zeros(20)])
    errors = {p: np.abs(found[:, p] - padded).sum(axis=1).mean() / 2 for p in itertools.permutations(range(4))}
    best = min(errors, key=errors.get)
    result = mixture_recovery(found=found, true=true)
    np.testing.assert_allclose(result["mixture_error"], errors[best])
    np.testing.assert_allclose(result["mixture_correlation"], np.corrcoef(found[:, best].ravel(), padded.ravel())[0, 1])
    with pytest.raises(ValueError, match="found must be shares"):
        mixture_recovery(found=np.zeros(20, int), true=true)


def test_mixtures_of_many_clients_are_compared_in_memory_for_their_weights():
    shares = np.random.default_rng(0).dirichlet(np.ones(20), 2000)
    tracemalloc.start()
    mixture_recovery(found=shares, true=shares[:, ::-1])
    assert tracemalloc.get_traced_memory()[1] < 12 * shares.nbytes  # and not for each pair of clusters
    tracemalloc.stop()


@pytest.mark.slow
def test_a_run_records_how_well_the_mixtures_are_found():
    options = {"heterogeneity": "private_label", "mixture": 0.4, "clients": 6, "clusters": 2, "rounds": 1}
    for method in ("fedem", "fedsoft"):
        summary = run(Config(method, model="linear", **options))[0]
        assert 0 <= summary["mixture_error"] <= 1 and -1 <= summary["mixture_correlation"] <= 1
        assert "mixture 0.4" in summary["description"]
    summary, history, parts = run(Config("fedem", model="linear", attack="label_reverse", malicious=0.4, **options))
    benign = ~parts.malicious  # the others have labels of no mixture
    found, true = np.asarray(history.served.to)[0, benign], parts.federation.mixture[benign]
    error = min(np.abs(found[:, order] - true).sum(axis=1).mean() / 2 for order in ([0, 1], [1, 0]))
    np.testing.assert_allclose(summary["mixture_error"], error, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedem", "fedrc", "fedsoft"])
def test_a_population_records_how_well_the_mixtures_are_found(method, tmp_path):
    """Of all clients that are evaluated, although the last cohort are some others."""
    options = {"heterogeneity": "private_label", "mixture": 0.4, "clusters": 2, "model": "linear", "data_seed": 2}
    options |= {"rounds": 3, "population": 30, "cohort": 20, "examples_per_client": 10}
    options["store"] = str(tmp_path / "store")
    summary, history = run(Config(method, **options))[:2]
    store = ClientStore.open(tmp_path / "store" / "train")
    found, true = history.clients["weights"][0], mixture_of(store, history.clients["id"])
    assert found.shape == (30, 2) and history.served.models is not None
    np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-5)
    wanted = mixture_recovery(found=found, true=true)
    assert {name: summary[name] for name in wanted} == wanted
    opened = run(Config(method, store=options["store"], rounds=1, cohort=20, model="linear"))[0]
    assert "mixture 0.4" in opened["description"] and 0 <= opened["mixture_error"] <= 1
    with pytest.raises(ValueError, match=r"of another population \(mixture"):
        run(Config(method, **options | {"mixture": 0.5}))


@pytest.mark.parametrize(
    "options, said",
    [
        ({"mixture": 0}, "mixture must be positive, got 0"),
        ({"mixture": np.inf}, "mixture must be finite"),
        ({"mixture": 1.0, "heterogeneity": "class"}, "with mixture clients keep those that they have, got 'class'"),
        ({"mixture": 1.0, "heterogeneity": "none", "num_clusters": 1}, "mixture must be left out with het.* 'none'"),
        ({"mixture": 1.0, "reuse": "cluster"}, "reuse must be none .or auto. with mixture"),
        ({"mixture": 1.0, "newcomer_examples": 5}, "newcomer_examples must be left out with mixture"),
        ({"mixture": 1.0, "num_clients": 20, "examples_per_client": 100}, "must be at most 1438"),
        ({"strength": "half"}, "strength must be of type float, got 'half'"),
        ({"strength": 1.5}, r"strength must be in \[0, 1\], got 1.5"),
        ({"strength": -0.1}, r"strength must be in \[0, 1\], got -0.1"),
        ({"heterogeneity": "none", "num_clusters": 1, "strength": 0.5}, "strength must be left out with het.* 'none'"),
        ({"heterogeneity": "rotation+"}, "unknown heterogeneity ''"),
        ({"heterogeneity": "rotation+rotation"}, "of different names"),
        ({"heterogeneity": "rotation+none"}, "'none' alone"),
        ({"heterogeneity": "class+topic"}, "with one of class, topic"),
        ({"heterogeneity": "private_label+offset"}, "with one of label_swap, .*got 'private_label.offset'"),  # c + 10
        ({"heterogeneity": "corruption", "num_clusters": 7}, "num_clusters must be at most 6, the number of corrupt"),
        (
            {"heterogeneity": "three_concepts", "num_clusters": 4},
            "num_clusters must be at most 3, the number of conc",
        ),
        ({"heterogeneity": "offset", "num_clusters": 11}, "num_clusters must be at most 10, the number of labels"),
    ],
)
def test_bad_shifts_are_named(options, said):
    with pytest.raises(ValueError, match=said):
        build("digits", **({"num_clients": 12, "num_clusters": 2, "heterogeneity": "rotation"} | options))


@pytest.mark.parametrize("heterogeneity", ["rotation", "class_rotation", "colour", "corruption", "three_concepts"])
def test_token_ids_have_no_angle_and_no_colour(heterogeneity):
    train = {"x": np.arange(160, dtype=np.int32).reshape(20, 8), "y": np.arange(20, dtype=np.int32) % 4}
    with pytest.raises(ValueError, match=rf"heterogeneity '({heterogeneity}|rotation)': the examples must be images"):
        build(Dataset("ids", train, None, 4, None, ""), num_clients=4, num_clusters=2, heterogeneity=heterogeneity)


def test_images_that_are_not_in_0_to_1_are_not_corrupted():
    digits = load("digits")
    wide = digits._replace(train=digits.train | {"x": 2 * digits.train["x"] - 1})
    with pytest.raises(ValueError, match=r"must be floats in \[0, 1\], got 'float32 in -1..1'"):
        build(wide, num_clients=4, num_clusters=2, heterogeneity="corruption")


def test_shifts_on_the_command_line():
    config = Config("fedavg", heterogeneity="colour+offset", strength=0.5, clients=6, clusters=2)
    fed = load_clients(config, None, jax.vmap)
    options = {"num_clients": 6, "num_clusters": 2, "heterogeneity": "colour+offset", "strength": 0.5}
    assert_same(fed.train, build("digits", **options).train)
    with pytest.raises(ValueError, match="did you mean 'colour'"):
        Config("fedavg", heterogeneity="color")


def test_a_regression_has_no_concepts():
    data = from_frame(pd.DataFrame(np.random.default_rng(0).random((40, 3)), columns=["a", "b", "y"]))
    with pytest.raises(ValueError, match=r"points \[n, 2\] of two classes"):
        build(data, num_clients=4, num_clusters=2, heterogeneity="sine")
