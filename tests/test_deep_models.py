"""ResNet-18, MobileNet, vision transformer and decoder at small widths, against their equations in NumPy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jfcl
from jfcl.core import divided
from jfcl.data import DATASETS, Dataset
from jfcl.experiments import Config, setup
from jfcl.models import (
    GPT,
    LANGUAGE_MODELS,
    MODELS,
    MobileNet,
    MobileNetBatchNorm,
    ResNet,
    ResNetBatchNorm,
    ViT,
    classification,
    conv,
    language_model,
)

SHAPE, CLASSES, WORDS, LENGTH = (8, 8, 3), 3, 9, 5
NHWC = ("NHWC", "HWIO", "NHWC")
SMALL = {
    "resnet18_gn": partial(ResNet, width=4, stages=(1, 1)),
    "resnet18_bn": partial(ResNetBatchNorm, width=4, stages=(1, 1)),
    "mobilenet_gn": partial(MobileNet, width=4, blocks=((2, 2),)),
    "mobilenet_bn": partial(MobileNetBatchNorm, width=4, blocks=((2, 2),)),
    "vit": partial(ViT, width=8, depth=1, heads=2),
    "gpt": partial(GPT, width=8, depth=1, heads=2),
}


def small(name, **changes):
    """Returns the task of a model at its small width."""
    make = partial(SMALL[name], **changes)
    if name in LANGUAGE_MODELS:
        return language_model(make(WORDS), LENGTH, WORDS)
    return classification(make(CLASSES), SHAPE, CLASSES)


def batches(name, shape, seed=0):
    """Returns random examples for a model, `[*shape, ...]`."""
    rng = np.random.default_rng(seed)
    if name in LANGUAGE_MODELS:
        x = rng.integers(1, WORDS, (*shape, LENGTH)).astype(np.int32)
        x[..., -1, 3:] = 0  # the last text of each client ends early
    else:
        x = rng.normal(size=(*shape, *SHAPE)).astype(np.float32)
    return {"x": x, "y": rng.integers(0, CLASSES, shape).astype(np.int32)}


def spread(task, seed=0):
    """Returns parameters that tell a wrong equation: no zeros and ones, variances above 0; and the same in float64."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    params = jax.tree.map(lambda p: rng.uniform(0.2, 1.0, p.shape) * rng.choice([-1, 1], p.shape), shapes)
    params = jax.tree_util.tree_map_with_path(lambda path, p: abs(p) if path[-1].key == "var" else p, params)
    narrow = jax.tree.map(lambda p: p.astype(np.float32), params)
    return narrow, jax.tree.map(lambda p: p.astype(np.float64), narrow)


# The equations in float64.


def loop_conv(x, w, stride=1, groups=1):
    """Convolution with zero padding of half the kernel: a product for every place and output channel's group."""
    size, (inputs, outputs) = w.shape[0], w.shape[2:]
    x = np.pad(x, ((0, 0), *[(size // 2, size // 2)] * 2, (0, 0)))
    height, width = ((n - size) // stride + 1 for n in x.shape[1:3])
    out = np.zeros((len(x), height, width, outputs))
    for i, j, o in np.ndindex(height, width, outputs):
        first = o // (outputs // groups) * inputs
        window = x[:, i * stride : i * stride + size, j * stride : j * stride + size, first : first + inputs]
        out[:, i, j, o] = (window * w[None, ..., o]).sum(axis=(1, 2, 3))
    return out


class Norms:
    """Normalisation by groups or batches, in the order of a module's layers; `new` holds the new running statistics."""

    def __init__(self, train=False):
        self.train, self.new = train, []

    def __call__(self, x, p):
        if "mean" in p:
            mean, var = (x.mean((0, 1, 2)), x.var((0, 1, 2))) if self.train else (p["mean"], p["var"])
            self.new.append(tuple(0.9 * p[name] + 0.1 * new for name, new in (("mean", mean), ("var", var))))
            x = (x - mean) / np.sqrt(var + 1e-5)
        else:
            groups = next(g for g in (32, 16, 8, 4, 2, 1) if x.shape[-1] % g == 0)
            parts = x.reshape(*x.shape[:3], groups, -1)
            parts = parts - parts.mean((1, 2, 4), keepdims=True)
            x = (parts / np.sqrt((parts**2).mean((1, 2, 4), keepdims=True) + 1e-6)).reshape(x.shape)
        return x * p["scale"] + p["bias"]


def numbered(p, kind):
    """Returns a function that returns the parameters of the next layer of a kind."""
    layers = iter([p[name] for name in sorted(p, key=lambda n: int(n.rsplit("_")[-1])) if name.startswith(kind)])
    return lambda: next(layers)


def loop_resnet(p, x, norm):
    kind = "BatchNorm" if "BatchNorm_0" in p else "GroupNorm"
    x = np.maximum(norm(loop_conv(x, p["Conv_0"]["kernel"]), p[f"{kind}_0"]), 0)
    for i, stride in enumerate((1, 2)):
        block = p[f"ResidualBlock_{i}"]
        out = np.maximum(norm(loop_conv(x, block["Conv_0"]["kernel"], stride), block[f"{kind}_0"]), 0)
        out = norm(loop_conv(out, block["Conv_1"]["kernel"]), block[f"{kind}_1"])
        if "Conv_2" in block:
            x = norm(loop_conv(x, block["Conv_2"]["kernel"], stride), block[f"{kind}_2"])
        x = np.maximum(out + x, 0)
    return x.mean((1, 2)) @ p["Dense_0"]["kernel"] + p["Dense_0"]["bias"]


def loop_mobilenet(p, x, norm):
    conv_of, norm_of = numbered(p, "Conv"), numbered(p, "BatchNorm" if "BatchNorm_0" in p else "GroupNorm")
    x = np.maximum(norm(loop_conv(x, conv_of()["kernel"]), norm_of()), 0)
    x = np.maximum(norm(loop_conv(x, conv_of()["kernel"], 2, x.shape[-1]), norm_of()), 0)
    x = np.maximum(norm(loop_conv(x, conv_of()["kernel"]), norm_of()), 0)
    return x.mean((1, 2)) @ p["Dense_0"]["kernel"] + p["Dense_0"]["bias"]


def dense(x, p):
    return x @ p["kernel"] + p["bias"]


def layer_norm(x, p):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * p["scale"] + p["bias"]


def loop_block(x, p, heads, causal):
    """A block on one sequence `[L, width]`, one head and place after another."""
    a, inner = p["attention"], layer_norm(x, p["LayerNorm_0"])
    q, k, v = (dense(inner, a[name]).reshape(len(x), heads, -1) for name in ("query", "key", "value"))
    mixed = np.zeros_like(q)
    for i, h in np.ndindex(len(x), heads):
        seen = slice(0, i + 1 if causal else len(x))
        weights = np.exp(k[seen, h] @ q[i, h] / np.sqrt(q.shape[-1]))
        mixed[i, h] = weights / weights.sum() @ v[seen, h]
    x = x + dense(mixed.reshape(x.shape), a["out"])
    z = dense(layer_norm(x, p["LayerNorm_1"]), p["Dense_0"])
    return x + dense(z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))) / 2, p["Dense_1"])  # GELU


def loop_vit(p, x, pool):
    logits = []
    for image in x:
        rows = [image[i : i + 4, j : j + 4].ravel() for i in (0, 4) for j in (0, 4)]
        out = dense(np.stack(rows), p["patches"])
        out = np.concatenate([p["token"][0], out]) if pool == "token" else out
        out = layer_norm(loop_block(out + p["positions"][0], p["TransformerBlock_0"], 2, False), p["LayerNorm_0"])
        logits.append(dense(out[0] if pool == "token" else out.mean(0), p["Dense_0"]))
    return np.stack(logits)


def loop_gpt(p, x):
    out = [p["Embed_0"]["embedding"][text] + p["positions"][: len(text)] for text in x]
    out = [layer_norm(loop_block(text, p["TransformerBlock_0"], 2, True), p["LayerNorm_0"]) for text in out]
    return np.stack([dense(text, p["Dense_0"]) for text in out])


LOOPS = {"resnet": loop_resnet, "mobilenet": loop_mobilenet}


@pytest.mark.slow_cases("mobilenet_bn", "resnet18_gn")
@pytest.mark.parametrize("name", ["resnet18_gn", "resnet18_bn", "mobilenet_gn", "mobilenet_bn"])
def test_convolutional_networks_are_their_equations(name):
    task, batch = small(name), batches(name, (4,))
    params, exact = spread(task)
    loop = LOOPS[name.split("_")[0].removesuffix("18")]
    want = loop(exact, batch["x"].astype(np.float64), Norms())
    got = jax.jit(task.apply)(params, batch["x"])
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3 * np.abs(want).max())
    assert np.ptp(want, axis=0).min() > 0.01 * np.abs(want).max(), "the images matter"
    if name.endswith("_gn"):
        assert task.train_loss is None and task.statistics is None
        return
    # In training: the batch's statistics, of real examples alone, and running ones that follow them.
    padded = {k: np.concatenate([v, 100 + v[:1]]) for k, v in batch.items()}
    norms = Norms(train=True)
    logits = loop(exact, batch["x"].astype(np.float64), norms)
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(4), batch["y"]]
    got, new = jax.jit(task.train_loss)(jax.random.key(0), params, padded, np.arange(5) < 4)
    np.testing.assert_allclose(got[:4], losses, rtol=1e-3, atol=1e-3)
    _, statistics = divided(task.statistics, new)
    means = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(statistics) if path[-1].key == "mean"]
    for want in (mean for mean, _ in norms.new):
        assert any(m.shape == want.shape and np.allclose(m, want, rtol=1e-3, atol=1e-3) for m in means)
    assert len(means) == len(norms.new)


@pytest.mark.slow_cases("mean")
@pytest.mark.parametrize("pool", ["mean", "token"])
def test_the_vision_transformer_is_its_equations(pool):
    task, x = small("vit", pool=pool), batches("vit", (3,))["x"]
    params, exact = spread(task)
    want = loop_vit(exact, x.astype(np.float64), pool)
    np.testing.assert_allclose(jax.jit(task.apply)(params, x), want, rtol=1e-3, atol=1e-3)
    assert np.ptp(want, axis=0).min() > 1e-2
    assert task.train_loss is None, "without dropout, training and evaluation are one program"


def test_the_decoder_is_its_equations_and_sees_no_later_word():
    task, x = small("gpt"), batches("gpt", (3,))["x"][:, :-1]
    params, exact = spread(task)
    predict = jax.jit(task.apply)
    logits = predict(params, x)
    np.testing.assert_allclose(logits, loop_gpt(exact, x), rtol=1e-3, atol=1e-3)
    for t in range(x.shape[1]):
        other = x.copy()
        other[:, t] = (x[:, t] + 1) % WORDS
        changed = np.abs(predict(params, other) - logits).max(axis=(0, 2))
        assert (changed[:t] == 0).all() and (changed[t:] > 1e-3).all(), t
    shorter = predict(params, x[:, :2])
    np.testing.assert_allclose(shorter, logits[:, :2], rtol=1e-4, atol=1e-4)
    assert task.train_loss is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit", "gpt"])
def test_dropout_is_of_training_alone(name):
    task, batch = small(name, dropout=0.5), batches(name, (4,))
    params, plain = spread(task)[0], small(name)
    loss = jax.jit(task.loss)(params, batch)
    np.testing.assert_array_equal(loss, jax.jit(plain.loss)(params, batch))
    real = np.ones(4, bool)
    train = jax.jit(task.train_loss)
    one, again, other = (train(jax.random.key(k), params, batch, real)[0] for k in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert (one != other).all() and (one != loss).all()


# What the publications and the layers' shapes say, at 32 x 32 x 3, 10 classes or 10,000 words.


def block_size(width):
    """Attention's four layers, two layers around 4 * width, two layer normalisations."""
    return 4 * (width + 1) * width + (width + 1) * 4 * width + (4 * width + 1) * width + 4 * width


MOBILE = [(32, 64), (64, 128), (128, 128), (128, 256), (256, 256), (256, 512), *[(512, 512)] * 5]
MOBILE += [(512, 1024), (1024, 1024)]
STAGES = [(16, 16), (16, 32), (32, 64), (64, 128)]  # channels before and in a stage, a quarter of ResNet-18's
SIZES = {
    "resnet18_gn": 11_173_962,  # 11.17 M
    # Stem; of each stage 4 convolutions of 3 x 3 with a norm each, and a shortcut's but in the first; 129 a class.
    "resnet18_narrow": 29 * 16
    + sum(9 * (i + 3 * o) * o + 8 * o for i, o in STAGES)
    + sum(i * o + 2 * o for i, o in STAGES[1:])
    + 129 * 10,
    "resnet18_bn": 11_173_962,
    # 27 * 32 weights and 2 * 32 of the norm; 9 a channel, then a product of channels, with two norms; 1,025 a class.
    "mobilenet_gn": 27 * 32 + 2 * 32 + sum(9 * i + i * o + 2 * i + 2 * o for i, o in MOBILE) + 1025 * 10,
    "mobilenet_bn": 3_217_226,
    "vit": 49 * 192 + 64 * 192 + 6 * block_size(192) + 2 * 192 + 193 * 10,
    "gpt": 10_000 * 128 + 31 * 128 + 6 * block_size(128) + 2 * 128 + 129 * 10_000,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_sizes_as_published(name):
    make = MODELS[name][0]
    if name in LANGUAGE_MODELS:
        task = language_model(make(10_000), 32, 10_000)
    else:
        task = classification(make(10), (32, 32, 3), 10)
    trained, _ = divided(task.statistics, jax.eval_shape(task.init, jax.random.key(0)))
    assert sum(p.size for p in jax.tree.leaves(trained)) == SIZES[name]
    assert task.head == "Dense_0"


@pytest.mark.parametrize("name", ["cnn_mnist", "vit", "gpt"])
def test_parameters_are_float32_where_jax_computes_in_float64(name):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        if name in LANGUAGE_MODELS:
            task, x = small(name), jax.ShapeDtypeStruct((2, LENGTH - 1), jnp.int32)
        else:
            task = classification(MODELS[name][0](CLASSES), (16, 16, 3), CLASSES)
            x = jax.ShapeDtypeStruct((2, 16, 16, 3), jnp.float64)
        params = jax.eval_shape(task.init, jax.random.key(0))
        assert {p.dtype for p in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}
        assert jax.eval_shape(task.apply, params, x).dtype == (jnp.float32 if name == "gpt" else jnp.float64)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_a_round_of_fedavg_is_a_loop_over_clients(name):
    """All clients at once, each with its own kernels after the first of two steps."""
    task = small(name)
    examples = batches(name, (2, 3))
    clients = jfcl.Clients(examples, np.array([3, 2], np.int32))
    algorithm = jfcl.fedavg(task, jfcl.local_training(optax.sgd(0.1), num_steps=2), client_axis=jax.vmap)
    start = jax.jit(algorithm.init)(jax.random.key(0), clients)
    state, metrics = jax.jit(algorithm.step)(jax.random.key(1), start, clients)

    def mean(params, batch):
        if task.train_loss is None:
            return task.loss(params, batch).mean(), params
        losses, new = task.train_loss(jax.random.key(0), params, batch, jnp.ones(len(batch["x"]), bool))
        return losses.mean(), new

    ends, gradient = [], jax.jit(jax.grad(mean, has_aux=True))
    for i in range(2):
        params = jax.tree.map(lambda p: p[0], start.params)
        batch = {k: v[i, : clients.size[i]] for k, v in examples.items()}
        for _ in range(2):
            g, new = gradient(params, batch)
            params = jax.tree.map(lambda p, g: p - 0.1 * g, new, g)  # of statistics the gradient is 0
        ends.append(params)
    want = jax.tree.map(lambda a, b: (3 * a + 2 * b) / 5, *ends)
    for got, expected in zip(jax.tree.leaves(state.params), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(got[0], expected, rtol=1e-3, atol=1e-4)
    assert np.isfinite(metrics["loss"]).all()


# (kernel, channels, outputs, strides, padding, groups)
CASES = [
    (1, 3, 4, (1, 1), ((0, 0), (0, 0)), 1),
    (1, 3, 4, (2, 3), ((1, 0), (0, 2)), 1),
    (3, 4, 4, (1, 1), ((1, 1), (1, 1)), 4),
    (3, 2, 6, (2, 1), ((1, 0), (2, -1)), 2),  # three outputs of each channel
]


@pytest.mark.slow_cases("cpu-3-2-6-strides3-padding3-2")
@pytest.mark.parametrize(("size", "channels", "outputs", "strides", "padding", "groups"), CASES)
def test_pointwise_and_depthwise_convolutions_are_laxs(size, channels, outputs, strides, padding, groups, form):
    """Values, and gradients in both arguments, of each client alone by lax."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 2, 6, 7, channels)).astype(np.float32)
    w = rng.normal(size=(3, size, size, channels // groups, outputs)).astype(np.float32)

    def value(convolve, x, w):
        out = convolve(x, w, strides, padding, dimension_numbers=NHWC, feature_group_count=groups)
        return jnp.sin(out).sum(), out

    def differentiate(convolve):
        return jax.value_and_grad(partial(value, convolve), argnums=(0, 1), has_aux=True)

    def both(x, w):
        return jax.vmap(differentiate(conv))(x, w), jax.vmap(differentiate(conv), in_axes=(0, None))(x, w[0])

    own, shared = jax.jit(both)(x, w)
    reference = jax.jit(differentiate(jax.lax.conv_general_dilated))
    for i in range(3):
        for got, kernel in ((own, w[i]), (shared, w[0])):
            alone = reference(x[i], kernel)
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(alone), strict=True):
                np.testing.assert_allclose(a[i], b, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_configurations_name_them(monkeypatch):
    texts = np.array(["a cat saw a dog", "a dog saw the cat"] * 6, object)
    made = Dataset("pets", {"x": texts, "y": np.arange(12, dtype=np.int32) % 2}, None, 2, None, "")
    monkeypatch.setitem(DATASETS, "pets", (lambda data_dir: made, ""))
    few = {"clients": 2, "clusters": 1, "heterogeneity": "none"}
    task = setup(Config("fedavg", model="gpt", dataset="pets", length=4, **few)).task
    assert task.perplexity and jax.eval_shape(task.init, jax.random.key(0))["positions"].shape == (3, 128)
    assert setup(Config("fedavg", model="resnet18_bn", **few)).task.train_loss is not None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: small("vit", patch=3), "patch must be a divisor of the images' height and width, 8 and 8, got 3"),
        (lambda: small("vit", heads=3), "heads must be a divisor of the width 8, got 3"),
        (lambda: small("gpt", heads=0), "heads must be a divisor of the width 8, got 0"),
        (lambda: small("gpt", dropout=1.0), "dropout must be at least 0 and below 1, got 1.0"),
        (lambda: small("vit", pool="max"), "unknown pool 'max'"),
        (
            lambda: small("gpt").apply(spread(small("gpt"))[0], np.ones((1, 6), np.int32)),
            "words of a text must be at most 4, the learned positions, got 6",
        ),
    ],
)
def test_refuses(make, message):
    with pytest.raises(ValueError, match=message):
        make()
