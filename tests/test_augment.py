import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jfcl
from benchmarks.papers.networks import CNNCifar24, tutorial, tutorial_batch
from jfcl.experiments import Config, run
from jfcl.experiments.optimizers import make_training
from jfcl.training.augment import AUGMENTATIONS, crop_flip

AUGMENTATIONS = AUGMENTATIONS | {"tutorial": tutorial, "tutorial_batch": tutorial_batch}
IMAGES = np.random.default_rng(0).uniform(size=(40, 28, 30, 2)).astype(np.float32)
BATCH = {"x": IMAGES, "y": np.arange(40, dtype=np.int32)}


def augmented(name, seed, batch=BATCH):
    return jax.device_get(jax.jit(AUGMENTATIONS[name])(jax.random.key(seed), batch))


def test_flip_mirrors_about_half_of_the_images():
    out = augmented("flip", 1)["x"]
    turned = np.array([np.array_equal(o, x[:, ::-1]) for o, x in zip(out, IMAGES, strict=True)])
    kept = np.array([np.array_equal(o, x) for o, x in zip(out, IMAGES, strict=True)])
    assert (turned ^ kept).all() and 10 <= turned.sum() <= 30


def test_crop_flip_is_a_window_of_the_padded_image():
    out = augmented("crop_flip", 1)["x"]
    moves = set()
    for o, x in zip(out, IMAGES, strict=True):
        around = np.pad(x, ((4, 4), (4, 4), (0, 0)))
        fits = [
            (i, j, turned)
            for i in range(9)
            for j in range(9)
            for turned in (False, True)
            if np.array_equal(o[:, ::-1] if turned else o, around[i : i + 28, j : j + 30])
        ]
        assert len(fits) == 1
        moves.add(fits[0])
    assert len(moves) > 25 and {i for i, _, _ in moves} >= {0, 8}  # both ends are reached


def windows_of_other_light(out):
    """`(factor, shift, row, column, mirrored)` of each image: it is `a * window + b` per channel, `a` for all alike."""
    assert out.shape == (40, 24, 24, 2)
    drawn = []
    for o, x in zip(out.astype(np.float64), IMAGES.astype(np.float64), strict=True):
        found = []
        for i in range(5):
            for j in range(7):
                for mirrored in (False, True):
                    window = x[i : i + 24, j : j + 24]
                    window = window[:, ::-1] if mirrored else window
                    slopes, shifts = [], []
                    for c in range(2):
                        a, b = np.polyfit(window[..., c].ravel(), o[..., c].ravel(), 1)
                        slopes.append(a)
                        shifts.append(o[..., c].mean() - window[..., c].mean())
                        if np.abs(a * window[..., c] + b - o[..., c]).max() > 1e-4:
                            break
                    else:
                        assert np.ptp(slopes) < 1e-3 and np.ptp(shifts) < 1e-4  # all channels alike
                        assert abs(shifts[0]) <= 63 / 255 + 1e-6  # contrast leaves the mean as brightness made it
                        found.append((round(slopes[0], 3), round(shifts[0], 3), i, j, mirrored))
        assert len(found) == 1
        drawn += found
    return drawn


def test_tutorial_is_a_window_of_other_brightness_and_contrast():
    factors = [one[0] for one in windows_of_other_light(augmented("tutorial", 2)["x"])]
    assert 0.2 <= min(factors) < 0.5 and 1.5 < max(factors) <= 1.8


@pytest.mark.slow
def test_tutorial_batch_draws_once_for_all_but_the_mirror():
    drawn = [windows_of_other_light(augmented("tutorial_batch", seed)["x"]) for seed in (2, 3)]
    assert all(len({one[:4] for one in batch}) == 1 for batch in drawn)
    assert drawn[0][0][:2] != drawn[1][0][:2]
    assert all(10 <= sum(one[4] for one in batch) <= 30 for batch in drawn)


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_labels_stay_and_draws_differ(name):
    one, again, other = (augmented(name, seed) for seed in (0, 0, 1))
    assert (one["y"] == BATCH["y"]).all()
    assert (one["x"] == again["x"]).all() and not (one["x"] == other["x"]).all()


@pytest.mark.slow_cases("crop_flip", "flip", "tutorial")
@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_maps_move_with_their_images_and_nothing_else_does(name):
    """Images of which one channel is a map beside them, in every type and rank that maps have."""
    mask = np.random.default_rng(1).integers(1, 200, (9, 26, 25)).astype(np.uint8)
    x = np.stack([mask, mask], axis=-1).astype(np.float32)
    batch = {
        "x": x,
        "y": mask.astype(np.int32),
        "more": {"w": x[..., :1], "open": mask > 99},
        "box": np.ones((9, 4), np.float32),
    }
    out = augmented(name, 3, batch)
    y = out["y"]
    assert out["x"].shape == (*y.shape, 2) and out["y"].dtype == np.int32 and out["more"]["open"].dtype == bool
    np.testing.assert_array_equal(out["more"]["w"][..., 0], y)
    np.testing.assert_array_equal(out["more"]["open"], y > 99)
    np.testing.assert_array_equal(out["box"], batch["box"])
    assert not np.array_equal(y[:, :24, :24], mask[:, :24, :24])
    for image, moved in zip(np.asarray(out["x"], np.float64), y, strict=True):  # light and contrast keep a line
        fit = np.polyfit(moved.ravel(), image[..., 0].ravel(), 1)
        np.testing.assert_allclose(np.polyval(fit, moved), image[..., 0], atol=1e-3)
    for odd in ((9, 52, 50), (9, 5, 26, 25)):  # another resolution, channels first
        with pytest.raises(ValueError, match=r"augment: the array \['y'\] has shape .*: whether it is a map"):
            jax.eval_shape(AUGMENTATIONS[name], jax.random.key(3), {"x": x, "y": np.zeros(odd, np.float32)})


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_refuses_what_is_no_image(name):
    with pytest.raises(ValueError, match=r"augment needs images \[B, H, W, C\], got x of shape \(3, 4\)"):
        AUGMENTATIONS[name](jax.random.key(0), {"x": np.zeros((3, 4), np.float32)})


@pytest.mark.slow_cases("tutorial_batch")
@pytest.mark.parametrize("name", ["tutorial", "tutorial_batch"])
def test_tutorial_refuses_small_images(name):
    words = "augment needs images of 24 x 24 or more, got 8 x 8"
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(AUGMENTATIONS[name], jax.random.key(0), {"x": np.zeros((1, 8, 8, 1), np.float32)})


def tutorial_network(params, x: np.ndarray) -> np.ndarray:
    """The logits of the authors' network for images `[B, 24, 24, C]`, in float64 by the equations."""

    def windows(x, size, stride, fill):
        """`[B, H, W, C, size, size]`, with TensorFlow's padding SAME."""
        pads = [max((-(-n // stride) - 1) * stride + size - n, 0) for n in x.shape[1:3]]
        x = np.pad(x, [(0, 0), *[(p // 2, p - p // 2) for p in pads], (0, 0)], constant_values=fill)
        return np.lib.stride_tricks.sliding_window_view(x, (size, size), (1, 2))[:, ::stride, ::stride]

    def convolve(x, layer):
        summed = np.einsum("bhwcij,ijco->bhwo", windows(x, 5, 1, 0), layer["kernel"], optimize=True)
        return np.maximum(summed + layer["bias"], 0)

    def pool(x):
        return windows(x, 3, 2, -np.inf).max(axis=(4, 5))

    def normalise(x):
        near = [np.square(x[..., max(0, c - 4) : c + 5]).sum(axis=-1) for c in range(x.shape[-1])]
        return x / (1 + 0.001 / 9 * np.stack(near, axis=-1)) ** 0.75

    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    std = np.maximum(x.std(axis=(1, 2, 3)), 1 / np.sqrt(24 * 24 * x.shape[-1]))[:, None, None, None]
    x = (x - x.mean(axis=(1, 2, 3), keepdims=True)) / std
    x = pool(normalise(convolve(normalise(pool(convolve(x, p["Conv_0"]))), p["Conv_1"])))
    x = x.reshape(len(x), -1)
    for name in ("Dense_0", "Dense_1"):
        x = np.maximum(x @ p[name]["kernel"] + p[name]["bias"], 0)
    return x @ p["Dense_2"]["kernel"] + p["Dense_2"]["bias"]


@pytest.mark.slow
def test_cnn_cifar24_is_the_network_of_the_authors_code():
    task = jfcl.models.classification(CNNCifar24(10), (32, 32, 3), 10)
    params = task.init(jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 1_068_298
    for name, std, bias in (("Conv_0", 0.05, 0), ("Conv_1", 0.05, 0.1), ("Dense_0", 0.04, 0.1), ("Dense_1", 0.04, 0.1)):
        kernel = np.asarray(params[name]["kernel"])
        assert np.abs(kernel).max() <= 2 * std and abs(kernel.std() / (0.88 * std) - 1) < 0.03
        np.testing.assert_array_equal(params[name]["bias"], np.float32(bias))
    x = np.random.default_rng(0).uniform(size=(3, 32, 32, 3))
    x[2] = 0.5  # without contrast: nothing is divided by zero
    middle = x[:, 4:28, 4:28]
    rough = jax.tree.map(lambda leaf: 3 * leaf, params)  # at larger activations, normalisation is felt
    want = tutorial_network(rough, middle)
    with jax.default_matmul_precision("float32"):
        for images in (x, middle):
            got = task.apply(rough, jnp.asarray(images, jnp.float32))
            np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3 * np.abs(want).max())
    with pytest.raises(ValueError, match="images of 8 x 8 are too small for this model: it uses 24 x 24"):
        jfcl.models.classification(CNNCifar24(10), (8, 8, 1), 10)


@pytest.mark.slow
def test_initial_models_of_cnn_cifar24_have_about_the_same_loss():
    """Of models with larger initial logits, one may be better for all clients."""
    x, y = np.random.default_rng(0).uniform(size=(100, 24, 24, 3)).astype(np.float32), np.arange(100) % 10
    spread = {}
    for name, make in (("cnn_cifar", jfcl.models.CNNCifar), ("cnn_cifar24", CNNCifar24)):
        task = jfcl.models.classification(make(10), (24, 24, 3), 10)
        found = [task.loss(task.init(jax.random.key(seed)), {"x": x, "y": y}).mean() for seed in range(4)]
        spread[name] = np.ptp(found)
    assert spread["cnn_cifar24"] < spread["cnn_cifar"] / 5


@pytest.mark.slow
def test_training_on_flips_alone_equals_training_on_flipped_clients():
    """An augmentation that always mirrors is training on mirrored data: it is applied, to every batch, once."""
    always = lambda key, batch: {**batch, "x": batch["x"][:, :, ::-1]}  # noqa: E731
    fed = jfcl.data.build("digits", num_clients=3, num_clusters=1, heterogeneity="none")
    task = jfcl.models.classification(jfcl.models.Linear(10), fed.input_shape, 10)
    mirrored = fed.train._replace(
        examples={**fed.train.examples, "x": np.asarray(fed.train.examples["x"])[:, :, :, ::-1]}
    )
    states = []
    for clients, augment in ((fed.train, always), (mirrored, None)):
        training = jfcl.local_training(optax.sgd(0.1), num_steps=3, batch_size=8, augment=augment)
        states.append(jfcl.rollout(jfcl.fedavg(task, training), clients, key=jax.random.key(0), num_rounds=2)[0])
    for a, b in zip(jax.tree.leaves(states[0].params), jax.tree.leaves(states[1].params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_run_with_augmentation():
    small = Config("ifca", clients=6, clusters=2, rounds=2, local_epochs=1, batch_size=20, augment="crop_flip")
    summary, _, setup = run(small)
    assert setup.training.augment is crop_flip and np.isfinite(summary["per_seed"][0]["accuracy"])
    own = Config("ifca", augment="benchmarks.papers.networks:tutorial")
    assert make_training(own, 20).augment is tutorial
    with pytest.raises(ValueError, match="unknown augment 'crop': did you mean 'crop_flip'"):
        run(Config("ifca", augment="crop"))
    with pytest.raises(ValueError, match="model 'lstm' reads texts, but data set 'digits' holds none"):
        run(Config("ifca", model="lstm", augment="flip"))
