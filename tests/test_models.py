import sys
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.signal import correlate
from scipy.special import log_softmax
from small_network import KEPT, NORMAL, D

import jfcl
from benchmarks.papers.networks import cnn_fashion32
from jfcl.models import (
    LANGUAGE_MODELS,
    MODELS,
    classification,
    conv,
    in_bfloat16,
    max_pool,
    parameter_paths,
    regression,
)
from jfcl.models.conv import _canonical, _of_blocks, _of_few_channels, _of_patches, _weights_by_places, patches
from jfcl.models.tasks import cross_entropy

GEOMETRIES = [
    ((1, 1), ((0, 0), (0, 0))),
    ((1, 1), ((1, 1), (1, 1))),
    ((1, 1), ((2, 1), (0, 3))),
    ((2, 2), ((1, 1), (1, 1))),
    ((2, 3), ((0, 1), (2, 0))),
    ((1, 1), ((1, -2), (-1, 0))),
]


def loop_conv(x, w, strides, padding):
    """Cross-correlation in float64, one example and output channel after another (SciPy's)."""
    x = np.pad(x.astype(np.float64), ((0, 0), *(np.maximum(pair, 0) for pair in padding), (0, 0)))
    (top, bottom), (left, right) = np.maximum(-np.array(padding), 0)  # negative padding cuts
    x = x[:, top : x.shape[1] - bottom, left : x.shape[2] - right]
    return np.stack(
        [
            np.stack(
                [
                    correlate(one, w[..., o].astype(np.float64), mode="valid")[:: strides[0], :: strides[1], 0]
                    for o in range(w.shape[-1])
                ],
                -1,
            )
            for one in x
        ]
    )


def tensors(seed=0, b=2, h=9, w=8, c=3, k=(3, 2), o=4):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(b, h, w, c)).astype(np.float32), rng.normal(size=(*k, c, o)).astype(np.float32)


def with_pull(function):
    """Returns `(g, *arguments) -> (value, *gradients of <g, value>)`, one program."""

    @jax.jit
    def both(g, *arguments):
        value, pull = jax.vjp(function, *arguments)
        return value, *pull(g)

    return both


@pytest.mark.parametrize(("strides", "padding"), GEOMETRIES)
def test_conv_against_scipy(strides, padding):
    x, w = tensors()
    np.testing.assert_allclose(
        conv(x, w, strides, padding, dimension_numbers=("NHWC", "HWIO", "NHWC")),
        loop_conv(x, w, strides, padding),
        atol=1e-4,
    )


@pytest.mark.parametrize("of", [_of_few_channels, _of_patches])
@pytest.mark.parametrize(("strides", "padding"), GEOMETRIES)
def test_matrix_products_of_a_gpu_convolve(of, strides, padding):
    x, w = tensors()
    found = jax.jit(lambda x, w: of(x, w, strides, padding))(x, w)
    np.testing.assert_allclose(found, loop_conv(x, w, strides, padding), atol=1e-4)


@pytest.mark.parametrize("padding", [padding for strides, padding in GEOMETRIES if strides == (1, 1)])
def test_gradient_of_weights_by_places_of_the_kernel(padding):
    x, w = tensors()
    moved = np.eye(w.size, dtype=np.float32).reshape(-1, *w.shape)  # each weight alone
    g = np.random.default_rng(1).normal(size=loop_conv(x, w, (1, 1), padding).shape).astype(np.float32)
    exact = [(g * loop_conv(x, one, (1, 1), padding)).sum() for one in moved]
    found = jax.jit(lambda x, g: _weights_by_places(x, g, w.shape[:2], padding))(x, g)
    np.testing.assert_allclose(found.ravel(), exact, atol=1e-4)


@pytest.mark.parametrize("channels", [1, 6])  # an image, and a layer
@pytest.mark.parametrize("padding", [padding for strides, padding in GEOMETRIES if strides == (1, 1)])
def test_blocks_of_a_gpu_convolve(padding, channels):
    x, w = tensors(c=channels)
    found = jax.jit(lambda x, w: _of_blocks(x, w, padding))(x, w)
    np.testing.assert_allclose(found, loop_conv(x, w, (1, 1), padding), atol=1e-4)


@pytest.mark.slow_cases("*-150", "cpu-strides0-padding0-2")
@pytest.mark.parametrize(
    ("strides", "padding", "batch"),
    [(*geometry, 2) for geometry in GEOMETRIES] + [(*GEOMETRIES[1], b) for b in (1, 16, 17, 35, 150)],
)
def test_gradients_are_adjoint_to_the_loop(strides, padding, batch, form):
    """<g, conv(dx, w) + conv(x, dw)> = <grad_x, dx> + <grad_w, dw>, with conv the float64 loop."""
    x, w = tensors(b=batch)
    f = _canonical((9, 8), (3, 2), strides, padding)
    rng = np.random.default_rng(1)
    g = rng.normal(size=loop_conv(x, w, strides, padding).shape).astype(np.float32)
    _, *gradients = with_pull(f)(g, x, w)
    grad_x, grad_w = (np.asarray(v, np.float64) for v in gradients)
    for _ in range(3):
        dx, dw = rng.normal(size=x.shape).astype(np.float32), rng.normal(size=w.shape).astype(np.float32)
        np.testing.assert_allclose(
            (g * loop_conv(dx, w, strides, padding)).sum(), (grad_x * dx).sum(), rtol=1e-3, atol=1e-2
        )
        np.testing.assert_allclose(
            (g * loop_conv(x, dw, strides, padding)).sum(), (grad_w * dw).sum(), rtol=1e-3, atol=1e-2
        )


def test_an_empty_batch_has_gradients_of_zero(form):
    x, w = tensors(b=0)
    out, pull = jax.vjp(_canonical((9, 8), (3, 2), (1, 1), ((0, 0), (0, 0))), x, w)
    grad_x, grad_w = pull(out)
    assert out.shape == (0, 7, 7, 4) and grad_x.shape == x.shape
    np.testing.assert_array_equal(grad_w, np.zeros_like(w))


@pytest.mark.slow_cases(
    "*-VALID-own weights",
    "cpu-2-1-SAME-own weights",
    "cpu-6-*",
    "gpu-2-1-SAME-own weights",
    "gpu-6-*",
    "cpu-2-1-SAME-shared weights",
)
@pytest.mark.parametrize("own", [True, False], ids=["own weights", "shared weights"])
@pytest.mark.parametrize(
    ("channels", "strides", "padding"), [(2, 1, "SAME"), (6, 1, "VALID"), (6, 2, ((1, 1), (1, 1)))]
)
def test_vmapped_conv_is_each_client_alone(padding, own, channels, strides, form):
    layer = nn.Conv(4, (3, 3), strides, padding=padding, conv_general_dilated=conv)
    x = np.random.default_rng(0).normal(size=(3, 2, 7, 6, channels)).astype(np.float32)
    keys = jax.random.split(jax.random.key(0), 3)
    params = jax.tree.map(np.asarray, jax.jit(jax.vmap(lambda k: layer.init(k, x[0])))(keys))
    if not own:
        params = jax.tree.map(lambda p: p[0], params)

    def loss(params, x):
        return jnp.sin(layer.apply(params, x)).sum()

    vmapped = jax.jit(jax.vmap(jax.value_and_grad(loss, argnums=(0, 1)), in_axes=(0 if own else None, 0)))(params, x)
    reference = nn.Conv(4, (3, 3), strides, padding=padding)  # flax's own, lax underneath
    alone = jax.jit(jax.value_and_grad(lambda p, v: jnp.sin(reference.apply(p, v)).sum(), argnums=(0, 1)))
    params, vmapped = jax.tree.map(np.asarray, (params, vmapped))
    for i in range(3):
        mine = jax.tree.map(lambda p, i=i: p[i], params) if own else params
        found = jax.tree.map(lambda v, i=i: v[i], vmapped)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-3), found, alone(mine, x[i]))


@pytest.mark.parametrize("form", ["gpu"], indirect=True)
@pytest.mark.parametrize(("channels", "batch"), [(1, 5), (1, 7), (6, 2), (1, 0)])  # in parts, in one, of a layer, none
def test_gradients_of_blocks_are_those_of_lax(channels, batch, form):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, batch, 7, 8, channels)).astype(np.float32)
    w = rng.normal(size=(2, 3, 3, channels, 4)).astype(np.float32)

    def loss(use, w, x):
        return jnp.sin(use(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))).sum()

    def gradients(use):
        return jax.vmap(jax.value_and_grad(partial(loss, use), argnums=(0, 1)))(w, x)

    uses = partial(conv, pooled=True), jax.lax.conv_general_dilated
    found, expected = jax.jit(lambda: [gradients(use) for use in uses])()
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), found, expected)
    text = str(jax.make_jaxpr(partial(gradients, partial(conv, pooled=True)))())
    assert batch == 0 or ("dot_general" in text and "conv_general_dilated" not in text)  # lax would agree as well


@pytest.mark.parametrize("form", ["gpu"], indirect=True)
def test_many_channels_at_few_places_are_products_of_windows(form, monkeypatch):
    monkeypatch.setattr(sys.modules["jfcl.models.conv"], "WIDE", 6)
    rng = np.random.default_rng(0)
    x, g = (rng.normal(size=(2, 1, 3, 4, channels)).astype(np.float32) for channels in (6, 8))
    w = rng.normal(size=(2, 3, 3, 6, 8)).astype(np.float32)

    def results(x, w, g):
        out, pull = jax.vjp(lambda *a: conv(*a, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")), x, w)
        return out, *pull(g)

    found = jax.jit(jax.vmap(results))(x, w, g)
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1), (0, 0))).astype(np.float64)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))  # [2, 1, 3, 4, 6, 3, 3]
    np.testing.assert_allclose(found[0], np.einsum("nbhwcij,nijco->nbhwo", windows, w), atol=1e-4)
    np.testing.assert_allclose(found[2], np.einsum("nbhwcij,nbhwo->nijco", windows, g), atol=1e-4)
    np.testing.assert_allclose((found[1] * x).sum(), (found[0] * g).sum(), rtol=1e-4)  # of a linear function
    text = str(jax.make_jaxpr(jax.vmap(results))(x, w, g))
    assert text.count("dot_general[") == 3 and "conv_general_dilated" not in text


def test_vmap_of_vmap_and_scan():
    """Seeds over clients over local steps: the shapes that simulations really have."""
    x = np.random.default_rng(0).normal(size=(2, 3, 2, 6, 6, 1)).astype(np.float32)
    w = np.random.default_rng(1).normal(size=(2, 3, 3, 3, 1, 2)).astype(np.float32)

    def train(use, x, w):
        def step(w, _):
            g = jax.grad(lambda w: jnp.square(use(x, w)).mean())(w)
            return w - 0.1 * g, ()

        return jax.lax.scan(step, w, length=3)[0]

    def ours(x, w):
        return conv(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def theirs(x, w):
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    got = np.asarray(jax.jit(jax.vmap(jax.vmap(lambda x, w: train(ours, x, w))))(x, w))
    alone = jax.jit(lambda x, w: train(theirs, x, w))
    for s in range(2):
        for i in range(3):
            np.testing.assert_allclose(got[s, i], alone(x[s, i], w[s, i]), rtol=1e-3, atol=1e-4)
    shared = jax.jit(jax.vmap(jax.vmap(ours, (0, None)), (0, 0)))  # a model per seed, shared by its clients
    per_seed = np.asarray(shared(x, w[:, 0]))
    np.testing.assert_allclose(per_seed[1, 2], theirs(x[1, 2], w[1, 0]), rtol=1e-3, atol=1e-4)


def test_other_convolutions_go_to_lax():
    x, w = np.ones((1, 6, 6, 4), np.float32), np.ones((3, 3, 2, 4), np.float32)
    grouped = conv(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=2)
    assert grouped.shape == (1, 6, 6, 4) and float(grouped[0, 2, 2, 0]) == 18
    x = x[..., :2]
    dilated = conv(
        x,
        np.ones((3, 3, 2, 4), np.float32),
        (1, 1),
        "VALID",
        rhs_dilation=(2, 2),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    assert dilated.shape == (1, 2, 2, 4) and float(dilated[0, 0, 0, 0]) == 18
    assert patches(x, (3, 3), (1, 1), ((0, 0), (0, 0))).shape == (1, 4, 4, 18)


@pytest.mark.slow_cases("cpu-*", "gpu-3-*", "tpu-3-*")
@pytest.mark.parametrize(("window", "shape", "ties"), [(2, (2, 8, 8, 3), False), (3, (1, 7, 5, 2), True)])
def test_max_pool_is_flaxs(shape, window, ties, form):
    draws = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    x = np.round(draws) if ties else draws

    def flaxs(v):
        return nn.max_pool(v, (window, window), strides=(window, window))

    @jax.jit
    def results(x):
        pools = [lambda v: max_pool(v, window), flaxs]
        slopes = [jax.grad(lambda v, pool=pool: jnp.sin(pool(v)).sum()) for pool in pools]
        along = jax.jvp(pools[0], (x,), (x,))[1]
        return [p(x) for p in pools], [s(x) for s in slopes], jax.vmap(slopes[0])(jnp.stack([x, -x])), along

    (pooled, wanted), (ours, reference), twice, along = jax.tree.map(np.asarray, results(x))
    np.testing.assert_array_equal(pooled, wanted)
    np.testing.assert_allclose(ours, reference, rtol=1e-6)
    np.testing.assert_array_equal(twice[0], ours)
    np.testing.assert_array_equal(along, pooled)


@pytest.mark.slow_cases("cpu-*")
@pytest.mark.parametrize("window", [2, 3])
def test_the_first_of_equal_largest_values_receives_the_gradient(window, form):
    """In loops over the windows, with whole numbers among which many are equal."""
    rng = np.random.default_rng(window)
    x = rng.integers(0, 3, (2, 7, 8, 3)).astype(np.float32)
    g = rng.normal(size=(2, 7 // window, 8 // window, 3)).astype(np.float32)
    want, gradient = np.zeros(g.shape), np.zeros(x.shape)
    for b, i, j, c in np.ndindex(g.shape):
        rows, columns = (slice(k * window, (k + 1) * window) for k in (i, j))
        tile = x[b, rows, columns, c]
        want[b, i, j, c] = tile.max()
        first = np.unravel_index(tile.argmax(), tile.shape)
        gradient[b, i * window + first[0], j * window + first[1], c] = g[b, i, j, c]
    pooled, found = with_pull(lambda v: max_pool(v, window))(g, x)
    np.testing.assert_array_equal(pooled, want)
    np.testing.assert_array_equal(found, gradient.astype(np.float32))


SIZES = {
    "linear": 7_850,
    "mlp": 159_010,
    "mlp2048": 2048 * 785 + 2049 * 10,
    "cnn_mnist": 832 + 25_632 + 801 * 256 + 2_570,
    # (inputs x kernel + 1) x outputs, layer by layer; 4 x 4 x 64 values reach the first dense layer of cnn5.
    "cnn5": (27 + 1) * 32 + (288 + 1) * 64 + (576 + 1) * 64 + (1024 + 1) * 64 + 65 * 10,
    "vgg": 28 * 32 + 289 * 64 + 577 * 128 + 5 * 1153 * 128 + 2 * 129 * 128 + 129 * 10,
    "vgg16": 14_714_688 + 2 * 513 * 512 + 513 * 10,  # torchvision's 13 convolutions; dense layers of 512
    "vgg8": 28 * 16 + 145 * 32 + 289 * 64 + 577 * 128 + 1153 * 512 + 2 * 513 * 512 + 513 * 10,
}
DEEP = {"resnet18_gn", "resnet18_narrow", "resnet18_bn", "mobilenet_gn", "mobilenet_bn", "vit"}  # test_deep_models.py
INPUTS = {"cnn_cifar": (24, 24, 3), "cnn5": (32, 32, 3), "vgg": (32, 32, 3), "vgg16": (32, 32, 3), "vgg8": (32, 32, 3)}


@pytest.mark.slow_cases("cnn5", "vgg", "vgg16", "vgg8")
@pytest.mark.parametrize("name", SIZES)
def test_sizes(name):
    task = classification(MODELS[name][0](10), INPUTS.get(name, (28, 28, 1)), 10)
    params = jax.eval_shape(task.init, jax.random.key(0))
    assert sum(p.size for p in jax.tree.leaves(params)) == SIZES[name]


@pytest.mark.slow
def test_the_network_of_the_authors_code_in_numpy():
    """Bilinear images of 32 x 32, standardised; two convolutions without padding, pooled; PyTorch's initialisation."""
    module = cnn_fashion32(10)
    x = np.random.default_rng(0).uniform(size=(1, 28, 28, 1)).astype(np.float32)
    logits, variables = module.init_with_output(jax.random.key(0), x)
    params = jax.tree.map(lambda p: np.asarray(p, np.float64), variables["params"])

    at = np.clip((np.arange(32) + 0.5) * 28 / 32 - 0.5, 0, 27)
    low, share = np.minimum(at.astype(int), 26), at - np.minimum(at.astype(int), 26)
    line = np.zeros((32, 28))
    line[np.arange(32), low], line[np.arange(32), low + 1] = 1 - share, share
    h = ((line @ x[0, :, :, 0].astype(np.float64) @ line.T - 0.1307) / 0.3081)[None, :, :, None]
    for name in ("Conv_0", "Conv_1"):
        h = loop_conv(h, params[name]["kernel"], (1, 1), ((0, 0), (0, 0))) + params[name]["bias"]
        h = np.maximum(h.reshape(1, h.shape[1] // 2, 2, h.shape[2] // 2, 2, 32).max(axis=(2, 4)), 0)
    assert h.shape == (1, 5, 5, 32)
    h = np.maximum(h.reshape(1, -1) @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"], 0)
    h = h @ params["Dense_1"]["kernel"] + params["Dense_1"]["bias"]
    np.testing.assert_allclose(logits, h, rtol=1e-4, atol=1e-5)
    for name, fan_in in {"Conv_0": 25, "Conv_1": 800, "Dense_0": 800, "Dense_1": 256}.items():
        for part in params[name].values():
            assert 0.7 * fan_in**-0.5 < np.abs(part).max() <= fan_in**-0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [name for name in MODELS if name not in LANGUAGE_MODELS and name not in DEEP],
)
def test_every_model_learns_under_vmap(name):
    shape = INPUTS.get(name, (28, 28, 1))
    task = classification(MODELS[name][0](10), shape, 10)
    keys = jax.random.split(jax.random.key(0), 2)
    params = jax.vmap(task.init)(keys)
    rng = np.random.default_rng(0)
    batch = {
        "x": rng.uniform(size=(2, 3, *shape)).astype(np.float32),
        "y": rng.integers(0, 10, (2, 3)).astype(np.int32),
    }

    def step(params, batch):
        loss, g = jax.value_and_grad(lambda p: task.loss(p, batch).mean())(params)
        return loss, jax.tree.map(lambda p, d: p - 1e-3 * d, params, g)

    steps = jax.jit(jax.vmap(step))
    first, new = steps(params, batch)
    second, _ = steps(new, batch)
    assert all(bool(jnp.isfinite(p).all()) for p in jax.tree.leaves(new))
    assert (second < first).all()
    alone = task.loss(jax.tree.map(lambda p: p[1], params), jax.tree.map(lambda v: v[1], batch))
    np.testing.assert_allclose(alone.mean(), first[1], rtol=1e-4)


@pytest.mark.slow
def test_vgg_is_the_papers_layers_one_by_one():
    """003, 7.2, from the printed list, with flax's pooling and XLA's convolution."""
    task = classification(jfcl.models.VGG(10), (32, 32, 3), 10)
    params = jax.jit(task.init)(jax.random.key(1))
    x = np.random.default_rng(0).uniform(size=(2, 32, 32, 3)).astype(np.float32)
    out, layers = jnp.asarray(x), iter(range(8))
    for pooled in ([32], [64], [128, 128], [128, 128], [128, 128]):
        for width in pooled:
            layer = params[f"Conv_{next(layers)}"]
            assert layer["kernel"].shape == (3, 3, out.shape[-1], width)
            out = nn.relu(nn.Conv(width, (3, 3), padding=1).apply({"params": layer}, out))
        out = nn.max_pool(out, (2, 2), strides=(2, 2))
    assert out.shape == (2, 1, 1, 128)
    out = out.reshape(2, 128)
    for i in range(3):
        layer = params[f"Dense_{i}"]
        out = out @ layer["kernel"] + layer["bias"][None]
        out = nn.relu(out) if i < 2 else out
    np.testing.assert_allclose(jax.jit(task.apply)(params, x), out, rtol=1e-4, atol=1e-4)
    assert np.std(out) > 0.1  # 11 layers of ReLU, and yet the images tell


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape", "layers"),
    [
        # The second layer makes 11 x 11, of which 10 x 10 are pooled.
        ("cnn_mnist", (28, 28, 1), [(5, 1, True), (5, 1, True)]),
        ("cnn_mnist", (27, 30, 1), [(5, 1, True), (5, 1, True)]),
        ("cnn5", (32, 32, 3), [(3, 0, True), (3, 0, True), (3, 0, False)]),
        ("cnn_femnist", (28, 28, 1), [(5, 2, True), (5, 2, True)]),
    ],
)
def test_networks_layer_by_layer(name, shape, layers):
    """Convolution, ReLU and pooling one after the other, in flax's and XLA's own: the same logits and gradients."""
    task = classification(MODELS[name][0](10), shape, 10)
    params = jax.jit(task.init)(jax.random.key(1))
    rng = np.random.default_rng(0)
    x, weight = rng.uniform(size=(3, *shape)).astype(np.float32), rng.normal(size=(3, 10)).astype(np.float32)

    def by_hand(params, out):
        for i, (size, padding, pooled) in enumerate(layers):
            layer = params[f"Conv_{i}"]
            out = nn.relu(nn.Conv(layer["bias"].size, (size, size), padding=padding).apply({"params": layer}, out))
            out = nn.max_pool(out, (2, 2), strides=(2, 2)) if pooled else out
        out = nn.relu(nn.Dense(params["Dense_0"]["bias"].size).apply({"params": params["Dense_0"]}, out.reshape(3, -1)))
        return nn.Dense(10).apply({"params": params["Dense_1"]}, out)

    ours, theirs = (
        jax.jit(jax.value_and_grad(lambda p, f=f: (f(p, x) * weight).sum()))(params) for f in (task.apply, by_hand)
    )
    np.testing.assert_allclose(task.apply(params, x), by_hand(params, x), rtol=1e-4, atol=1e-5)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.slow_cases("cpu")
def test_the_loss_and_its_gradient_are_those_of_softmax_regression(form):
    """In float64: the gradient with respect to logits is softmax minus one-hot; a label out of range gives NaN."""
    rng = np.random.default_rng(0)
    logits, labels = (50 * rng.normal(size=(9, 5))).astype(np.float32), rng.integers(0, 5, 9).astype(np.int32)
    log_probability = log_softmax(logits.astype(np.float64), axis=1)
    g = rng.normal(size=9).astype(np.float32)
    labels[8], right = 5, labels[:8]
    losses, gradient = with_pull(lambda v: cross_entropy(v, labels))(g, logits)
    np.testing.assert_allclose(losses[:8], -log_probability[np.arange(8), right], rtol=1e-5, atol=1e-5)
    want = (np.exp(log_probability[:8]) - np.eye(5)[right]) * g[:8, None]
    np.testing.assert_allclose(gradient[:8], want, rtol=1e-4, atol=1e-5)
    assert np.isnan(gradient[8]).all()  # a client is not trained on its other examples alone
    losses = jax.jit(lambda labels: cross_entropy(logits, labels))
    for label in (5, -1):
        assert np.isnan(losses(np.full(9, label, np.int32))).all()


def test_cross_entropy_and_accuracy_against_scipy():
    task = classification(jfcl.models.Linear(3), (4,), 3)
    params = jax.jit(task.init)(jax.random.key(0))
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20, 4)).astype(np.float32), rng.integers(0, 3, 20).astype(np.int32)
    logits = x.astype(np.float64) @ np.asarray(params["Dense_0"]["kernel"], np.float64) + np.asarray(
        params["Dense_0"]["bias"]
    )
    batch = {"x": x, "y": y}
    losses, right = jax.jit(lambda p: (task.loss(p, batch), task.scores(task.correct, p, batch)))(params)
    np.testing.assert_allclose(losses, -log_softmax(logits, axis=1)[np.arange(20), y], rtol=1e-4, atol=1e-5)
    assert right.tolist() == (logits.argmax(axis=1) == y).astype(float).tolist()
    assert jax.eval_shape(task.apply, params, x).shape == (20, 3)


def test_regression_sums_over_outputs():
    task = regression(jfcl.models.Linear(2), (3,), half=True)
    params = jax.jit(task.init)(jax.random.key(0))
    x, y = np.ones((2, 3), np.float32), np.zeros((2, 2), np.float32)
    out, losses = jax.jit(lambda p: (task.apply(p, x), task.loss(p, {"x": x, "y": y})))(params)
    out = np.asarray(out, np.float64)
    np.testing.assert_allclose(losses, 0.5 * (out**2).sum(axis=1), rtol=1e-5)
    assert task.correct is None


def test_outputs_with_an_axis_of_length_one_are_those_of_scalar_targets():
    """They are not broadcast against each other."""
    x, y = np.float32([[1, 0], [0, 1], [1, 1]]), np.float32([1, 2, 4])
    task, params = regression(jfcl.models.Linear(1), (2,)), {"Dense_0": {"kernel": [[1.0], [3.0]], "bias": [0.5]}}
    losses = task.loss(jax.tree.map(jnp.float32, params, is_leaf=lambda x: isinstance(x, list)), {"x": x, "y": y})
    assert losses.tolist() == [0.25, 2.25, 0.25]
    with pytest.raises(ValueError, match=r"must be the targets' shape, \(3,\), or \(3, 1\), got \(3, 2\)"):
        wide = regression(jfcl.models.Linear(2), (2,))
        wide.loss(wide.init(jax.random.key(0)), {"x": x, "y": y})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mlp", "cnn", "regression"])
def test_a_model_in_bfloat16_is_close_and_its_parameters_are_float32(kind):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 12, 12, 1)).astype(np.float32), rng.integers(0, 3, 40).astype(np.int32)
    if kind == "regression":
        wide = regression(jfcl.models.Linear(1), (12, 12, 1))
        y = y.astype(np.float32) + np.float32(0.0078125)  # more digits than bfloat16 has
    else:
        wide = classification({"mlp": jfcl.models.MLP, "cnn": jfcl.models.CNNMnist}[kind](3), (12, 12, 1), 3)
    narrow, batch = in_bfloat16(wide), {"x": x, "y": y}
    params = wide.init(jax.random.key(0))
    assert in_bfloat16(wide) is narrow
    rounded = jax.tree.map(lambda p: np.asarray(p.astype(jnp.bfloat16), np.float64), params)
    if kind == "regression":  # in float64, on the rounded inputs
        inputs = np.asarray(jnp.asarray(x).astype(jnp.bfloat16), np.float64).reshape(40, -1)
        want = inputs @ rounded["Dense_0"]["kernel"] + rounded["Dense_0"]["bias"]
        np.testing.assert_allclose(narrow.apply(params, x), want, rtol=1e-2, atol=1e-2)
        np.testing.assert_array_equal(narrow.loss(params, batch), (narrow.apply(params, x)[:, 0] - y) ** 2)
    for function, argument in ((lambda t: t.loss, batch), (lambda t: t.apply, x)):
        got, exact = (function(task)(params, argument) for task in (narrow, wide))
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, exact, rtol=0.1, atol=0.1)
        assert not np.array_equal(got, exact)
    gradients = [jax.grad(lambda p, t=t: t.loss(p, batch).mean())(params) for t in (narrow, wide)]
    for got, exact in zip(*map(jax.tree.leaves, gradients), strict=True):
        assert got.dtype == np.float32 and np.linalg.norm(got - exact) < 0.1 * np.linalg.norm(exact)
    text = jax.jit(jax.grad(lambda p: narrow.loss(p, batch).mean())).lower(params).as_text()
    assert "xbf16>" in next(line for line in text.splitlines() if "dot_general" in line)


def test_several_outputs_in_bfloat16():
    task = jfcl.Task(None, lambda w, x: {"sum": x @ w, "x": x}, lambda outputs, batch: outputs["sum"])
    outputs = jax.eval_shape(
        in_bfloat16(task._replace(init=lambda key: jnp.ones(3))).apply, np.ones(3), np.ones((2, 3))
    )
    assert {name: x.dtype for name, x in outputs.items()} == {"sum": jnp.float32, "x": jnp.float32}


def test_running_means_of_a_model_in_bfloat16_are_float32():
    """1000 and 1001 are one number of bfloat16."""
    task, batch = in_bfloat16(NORMAL), {"x": np.ones((2, D), np.float32), "y": np.zeros(2, np.int32)}

    @jax.jit
    def new_mean(old):
        params = NORMAL.init(jax.random.key(0))
        params["BatchNorm_0"]["mean"] += old
        return task.train_loss(jax.random.key(1), params, batch, np.ones(2, bool))[1]["BatchNorm_0"]["mean"]

    with jax.numpy_dtype_promotion("standard"):  # flax adds both types
        np.testing.assert_allclose(new_mean(1001.0) - new_mean(1000.0), KEPT, atol=1e-3)


@pytest.mark.slow
def test_training_in_bfloat16_ends_near_that_in_float32():
    """Also in the span of the examples; the trained model is float32, and no bfloat16 number stays in it."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(3, 20, 16)).astype(np.float32), rng.integers(0, 3, (3, 20)).astype(np.int32)
    clients = jfcl.Clients({"x": x, "y": y}, np.full(3, 20, np.int32))
    wide = classification(jfcl.models.MLP(3, hidden=(8,)), (16,), 3)
    ends = []
    for task, span in ((wide, "never"), (in_bfloat16(wide), "never"), (in_bfloat16(wide), "always")):
        algorithm = jfcl.fedavg(task, jfcl.local_training(optax.sgd(0.1), num_steps=5, span=span))
        start = jax.jit(algorithm.init)(jax.random.key(0), clients)
        state, _ = jax.jit(algorithm.step)(jax.random.key(1), start, clients)
        update = jax.tree.leaves(jax.tree.map(jnp.subtract, state.params, start.params))
        ends.append(np.concatenate([np.ravel(part) for part in update]))
        assert {p.dtype for p in jax.tree.leaves(state.params)} == {np.dtype(np.float32)}
    for narrow in ends[1:]:
        assert 0 < np.linalg.norm(narrow - ends[0]) < 0.05 * np.linalg.norm(ends[0])


def test_tasks_are_cached_and_named():
    assert classification(jfcl.models.MLP(10), (8, 8, 1), 10) is classification(jfcl.models.MLP(10), (8, 8, 1), 10)
    assert parameter_paths(classification(jfcl.models.MLP(10), (8, 8, 1), 10)) == [
        "Dense_0/bias",
        "Dense_0/kernel",
        "Dense_1/bias",
        "Dense_1/kernel",
    ]


@pytest.mark.parametrize("name", ["resnet18_gn", "vgg"])
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28)])
def test_networks_refuse_channels_first(name, shape):
    with pytest.raises(ValueError, match=r"input_shape must be \[H, W, C\] for \w+; .* channels that are first"):
        jfcl.models.classification(jfcl.models.MODELS[name][0](10), shape, 10)


class WithBatchNorm(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.BatchNorm(use_running_average=False)(x))


def test_refuses():
    with pytest.raises(ValueError, match=r"must be logits of shape .2, 10. for a batch of 2"):
        classification(jfcl.models.MLP(9), (8, 8, 1), 10)
    with pytest.raises(ValueError, match=r"WithBatchNorm behaves differently in training.*training_argument"):
        classification(WithBatchNorm(), (4,), 2)
    with pytest.raises(ValueError, match="images are too small for this model: 1 x 1 is left where 2 x 2 is pooled"):
        classification(jfcl.models.VGG(10), (28, 28, 1), 10)
    labels = {"x": np.ones((4, 8, 8, 1), np.float32), "y": np.zeros((4, 1), np.int32)}
    task = classification(jfcl.models.Linear(10), (8, 8, 1), 10)
    with pytest.raises(ValueError, match=r"labels must be \(4,\), one label for each .*, got \(4, 1\)"):
        jax.eval_shape(lambda key: task.loss(task.init(key), labels), jax.random.key(0))
    with pytest.raises(ValueError, match="did you mean 'regression'"):
        jfcl.models.task(lambda key: {}, lambda p, x: x, kind="regresion")
    with pytest.raises(ValueError, match="half must be False without kind"):
        jfcl.models.task(lambda key: {}, lambda p, x: x, kind="classification", half=True)


def test_a_task_has_a_kind_or_a_cost():
    line = {"init": lambda key: jnp.ones(3), "apply": lambda w, x: x @ w}
    batch = {"x": np.ones((2, 3), np.float32), "y": np.float32([1, 3]), "w": np.float32([5, 2])}

    def cost(outputs, batch):
        return batch["w"] * jnp.abs(outputs - batch["y"])

    task = jfcl.models.task(**line, cost=cost)
    assert task.loss(jnp.ones(3), batch).tolist() == [10, 0] and (task.correct, task.mix) == (None, None)

    def close(outputs, batch):
        return (jnp.abs(outputs - batch["y"]) < 1).astype(jnp.float32)

    for options in ({"cost": cost}, {"kind": "regression"}):
        task = jfcl.models.task(**line, **options, correct=close)
        assert task.scores(task.correct, jnp.ones(3), batch).tolist() == [0, 1]

    def train(key, w, x, real):
        return 2 * (x @ w), w

    dropped = jfcl.models.task(**line, cost=cost, train=train)
    assert dropped.train_loss(None, jnp.ones(3), batch, None)[0].tolist() == [25, 6]
    # Training would go on with the functions before.
    two = {"a": jnp.ones(3), "b": jnp.ones(3)}
    half = jfcl.models.frozen(dropped._replace(init=lambda key: two), two, trainable=lambda path: path == "a")
    for made in (dropped, jfcl.models.in_bfloat16(dropped), half):
        for change in ({"cost": close}, {"apply": lambda w, x: x}, {"inputs": lambda batch: batch["z"]}):
            with pytest.raises(ValueError, match=r"task.inputs is not that of task.train_loss"):
                jfcl.fedavg(made._replace(**change), jfcl.local_training(optax.sgd(0.1), num_steps=1))
            own = made._replace(**change, train_loss=lambda key, params, batch, real: (batch["y"], params))
            jfcl.fedavg(own, jfcl.local_training(optax.sgd(0.1), num_steps=1))
    for options in ({}, {"kind": "regression", "cost": cost}):
        with pytest.raises(ValueError, match="either kind"):
            jfcl.models.task(**line, **options)
    with pytest.raises(ValueError, match="cost must be a function"):
        jfcl.models.task(**line, cost="squares")


def test_outputs_are_computed_once():
    calls = []

    def apply(w, x):
        calls.append(len(x))
        return x @ w

    task = jfcl.models.task(lambda key: jnp.zeros((3, 2)), apply, kind="classification")
    clients = jfcl.Clients({"x": np.ones((2, 4, 3), np.float32), "y": np.zeros((2, 4), np.int32)}, np.int32([4, 2]))
    found = jfcl.evaluate(task, jnp.zeros((1, 3, 2)), clients, np.zeros(2, np.int32))
    assert calls == [4] and found["accuracy"].tolist() == [1, 1]
    with pytest.raises(ValueError, match="shape of a task's losses"):
        wrong = task._replace(correct=lambda outputs, batch: outputs)
        jfcl.evaluate(wrong, jnp.zeros((1, 3, 2)), clients, np.zeros(2, np.int32))


def test_what_is_read_and_how_many_outputs_there_are_at_once():
    """A model of two arrays, in parts: losses and gradients are the same."""
    rng = np.random.default_rng(0)
    batch = {name: rng.normal(size=(7, 3)).astype(np.float32) for name in ("x", "z")} | {"y": np.zeros(7, np.float32)}
    line = jfcl.models.task(lambda key: jnp.ones(3), lambda w, pair: (pair[0] * pair[1]) @ w, kind="regression")
    task = line._replace(inputs=lambda batch: (batch["x"], batch["z"]), reads=("x", "y", "z"))
    want = (batch["x"] * batch["z"]).astype(np.float64).sum(axis=1) ** 2
    whole, wanted = losses_and_gradient(task, batch)
    np.testing.assert_allclose(whole, want, rtol=1e-5)
    for most in (3, 7):
        losses, grads = losses_and_gradient(task._replace(at_once=most), batch)
        np.testing.assert_allclose(losses, want, rtol=1e-5)
        np.testing.assert_allclose(grads, wanted, rtol=1e-5)
    with pytest.raises(ValueError, match=r"computed of a batch must be \(3, ...\), one row for each.*got \(\)"):
        task._replace(cost=lambda outputs, batch: outputs.mean(), at_once=3).loss(np.ones(3, np.float32), batch)
    with pytest.raises(ValueError, match="cost must be a function, got None"):
        jfcl.fedavg(task._replace(cost=None), jfcl.local_training(optax.sgd(0.1), num_steps=1))


def losses_and_gradient(task, batch):
    run = jax.jit(lambda w: (task.loss(w, batch), jax.grad(lambda w: task.loss(w, batch).mean())(w)))
    return run(np.ones(3, np.float32))


@pytest.mark.slow_cases("classes of words")
@pytest.mark.parametrize("shape", [(4, 5), (4, 6, 5)], ids=["classes", "classes of words"])
def test_a_mixture_of_classifiers_is_the_mean_of_probabilities(shape):
    rng = np.random.default_rng(0)
    logits, weights = 3 * rng.normal(size=(3, *shape)).astype(np.float32), np.float32([0.25, 0, 0.75])
    want = np.einsum("k,k...->...", weights.astype(np.float64), np.exp(log_softmax(logits.astype(np.float64), axis=-1)))
    if len(shape) == 3:
        task = jfcl.models.language_model(jfcl.models.LSTMLanguageModel(5, 2, 2), 7, 5)
    else:
        task = classification(jfcl.models.Linear(5), (3,), 5)
    logits[1] = np.nan  # of a model that does not count
    got = jax.jit(task.mix)(logits, weights)
    np.testing.assert_allclose(got, np.log(want), rtol=1e-4, atol=1e-5)
    far = jax.jit(task.mix)(np.float32([[[0, 500]], [[0, 500]]]), np.float32([0.5, 0.5]))
    np.testing.assert_allclose(far, [[-500, 0]], rtol=1e-6)


def test_a_mixture_of_regressions_is_the_mean():
    task = regression(jfcl.models.Linear(2), (3,))
    values = np.float32([[[1, 2]], [[np.inf, np.nan]], [[5, 0]]])
    assert jax.jit(task.mix)(values, np.float32([0.25, 0, 0.75])).tolist() == [[4, 0.5]]


@pytest.mark.slow_cases("int8-200", "uint8-256")
@pytest.mark.parametrize(("dtype", "classes"), [(np.uint8, 256), (np.uint8, 300), (np.int8, 200)])
def test_labels_of_few_bits_may_be_of_many_classes(dtype, classes):
    logits = np.random.default_rng(0).normal(size=(3, classes)).astype(np.float32)
    labels = np.array([0, 100, 120])
    wide, narrow = (jax.jit(cross_entropy)(logits, labels.astype(kind)) for kind in (np.int32, dtype))
    np.testing.assert_array_equal(wide, narrow)
    assert np.isfinite(narrow).all()


@pytest.mark.slow_cases("*-prox must be of type float.* got 'a'")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: classification(jfcl.models.MLP(3), 28, 3), r"input_shape must be a tuple of integers.* got 28"),
        (
            lambda: classification(jfcl.models.MLP(3), (0, 2), 3),
            r"input_shape must be .* each at least 1.* got \(0, 2\)",
        ),
        (
            lambda: classification(jfcl.models.CNNMnist(3), (5,), 3),
            r"must be \[H, W, C\] for CNNMnist, which reads images.* got \(5,\)",
        ),
        (lambda: jfcl.models.regression(jfcl.models.MLP(1), (2.5,)), r"input_shape must be .* got \(2.5,\)"),
        (lambda: classification(jfcl.models.MLP(3), (4,), "3"), "num_classes must be an integer, at least 1, got '3'"),
        (lambda: classification(jfcl.models.ViT(3, patch=0), (8, 8, 1), 3), "ViT must map .* ZeroDivisionError"),
        (
            lambda: cross_entropy(np.zeros((2, 3)), np.zeros(2)),
            "type of the labels must be one of integers.* got 'float64'",
        ),
        (lambda: jfcl.models.parameter_paths(jfcl.models.MLP(3)), "task must be a Task, .* got 'MLP'"),
        (lambda: jfcl.models.in_bfloat16(jfcl.models.MLP(3)), "task must be a Task, .* got 'MLP'"),
        (lambda: jfcl.local_training(optax.sgd(0.1), num_steps=1, prox=None), "prox must be of type float.* got None"),
        (lambda: jfcl.local_training(optax.sgd(0.1), num_steps=1, prox="a"), "prox must be of type float.* got 'a'"),
    ],
)
def test_wrong_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
