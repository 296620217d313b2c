"""Forms of computations on accelerators: each program contains its own platform's, and the same numbers come out."""

import importlib.util
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jfcl
from jfcl import attacks, mapping
from jfcl.core import by_platform
from jfcl.mapping import axis
from jfcl.models import conv, max_pool
from jfcl.models.tasks import cross_entropy
from jfcl.training.losses import fill_padding

NHWC = ("NHWC", "HWIO", "NHWC")


def program(function, *args, platform):
    """The program for `platform`, which is not there, before its compiler."""
    return jax.jit(function).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def test_every_platform_has_its_form():
    def which(x):
        return by_platform(x, cpu=jnp.sin, accelerator=jnp.cos, tpu=jnp.tan)

    def slope(x):
        return jax.grad(lambda x: which(x).sum())(x)

    x, names = jnp.ones((2, 3)), ("sine", "cosine", "tan")
    for function in (which, jax.vmap(which)):
        for platform, form in zip(("cpu", "cuda", "tpu"), names, strict=True):
            text = program(function, x, platform=platform)
            assert [name for name in names if f"stablehlo.{name} " in text] == [form]
    slopes = {p: program(jax.vmap(slope), x, platform=p) for p in ("cpu", "cuda", "tpu")}
    assert "stablehlo.tan " in slopes["tpu"] and "stablehlo.tan " not in slopes["cpu"] + slopes["cuda"]
    np.testing.assert_array_equal(which(x), jnp.sin(x))
    np.testing.assert_array_equal(jax.lax.map(which, x), jnp.sin(x))
    on_two = mapping.sharded(mapping.client_mesh(2), mapping.chunked(1))(which)
    np.testing.assert_array_equal(jax.jit(on_two)(jnp.ones(4)), jnp.sin(jnp.ones(4)))


def test_the_loss_of_an_accelerator_gathers_nothing():
    logits, labels = jnp.ones((4, 6, 5)), jnp.zeros((4, 6), jnp.int32)

    def gradient(logits, labels):
        return jax.vmap(jax.value_and_grad(lambda v, y: cross_entropy(v, y).sum()))(logits, labels)

    texts = {p: program(gradient, logits, labels, platform=p) for p in ("cpu", "cuda", "tpu")}
    found = {p: any(f"stablehlo.{name}" in text for name in ("gather", "scatter")) for p, text in texts.items()}
    assert found == {"cpu": True, "cuda": False, "tpu": False}


def test_pooling_has_windows_on_a_tpu_alone():
    def gradient(x):
        return jax.vmap(jax.grad(lambda v: max_pool(v, 2).sum()))(x)

    texts = {p: program(gradient, jnp.ones((3, 2, 8, 8, 1)), platform=p) for p in ("cpu", "cuda", "tpu")}
    assert {p: "select_and_scatter" in text for p, text in texts.items()} == {"cpu": False, "cuda": False, "tpu": True}
    kept = {p: "optimization_barrier" in text and "tensor<3x2x4x4x1xi8>" in text for p, text in texts.items()}
    assert kept == {"cpu": False, "cuda": True, "tpu": False}  # places of the largest values, of one byte each
    forward = {p: program(lambda x: max_pool(x, 2), jnp.ones((2, 8, 8, 1)), platform=p) for p in texts}
    assert {p: "reduce_window" in text for p, text in forward.items()} == {"cpu": False, "cuda": False, "tpu": True}


@pytest.mark.parametrize(
    ("channels", "outputs", "on_a_gpu"),
    [(1, 32, (0, 2)), (8, 32, (1, 1)), (1, 4, (1, 1))],
    ids=["an image", "many channels", "few outputs"],
)
def test_clients_weights_are_groups_of_a_convolution_or_matrix_products(channels, outputs, on_a_gpu):
    """Of the forward pass and the gradient of weights: how many are convolutions with groups, and matrix products."""

    def train(x, w):
        return jax.grad(lambda w: jnp.square(conv(x, w, (1, 1), "SAME", dimension_numbers=NHWC)).sum())(w)

    x, w = jnp.ones((3, 2, 8, 8, channels)), jnp.ones((3, 5, 5, channels, outputs))
    texts = {p: program(jax.vmap(train), x, w, platform=p) for p in ("cpu", "cuda", "tpu")}
    found = {p: (text.count("group_count = 3"), text.count("dot_general")) for p, text in texts.items()}
    assert found == {"cpu": (0, 2), "cuda": on_a_gpu, "tpu": (2, 0)}
    assert "stablehlo.convolution" not in texts["cpu"]


def test_hostile_clients_draw_at_once_on_an_accelerator():
    arguments = jax.random.key(0), jnp.ones((4, 3)), jnp.arange(4) < 2, jnp.ones(4, bool)
    texts = {p: program(attacks.gaussian(), *arguments, platform=p) for p in ("cpu", "cuda", "tpu")}
    assert {p: "stablehlo.while" in text for p, text in texts.items()} == {"cpu": True, "cuda": False, "tpu": False}


def test_padding_is_filled_in_one_pass_on_a_tpu():
    examples = {"x": jnp.ones((4, 3, 3, 1)), "y": jnp.ones(4, jnp.int32)}
    texts = {p: program(fill_padding, examples, jnp.int32(2), platform=p) for p in ("cpu", "cuda", "tpu")}
    found = {p: "optimization_barrier" in text for p, text in texts.items()}
    assert found == {"cpu": False, "cuda": False, "tpu": True}


@pytest.mark.slow_cases("cpu")
def test_padding_is_the_first_example_or_zeros(form):
    rng = np.random.default_rng(0)
    images = rng.normal(size=(3, 5, 2, 2, 1)).astype(np.float32)
    images[:, -1] = np.nan
    examples = {"x": images, "y": rng.integers(1, 9, (3, 5)).astype(np.int32), "half": images.astype(np.float16)}
    filled = jax.jit(jax.vmap(fill_padding))(examples, np.int32([0, 2, 4]))
    blank = jax.jit(jax.vmap(lambda *of_one: fill_padding(*of_one, zeros=True)))(examples, np.int32([0, 2, 4]))
    for name, values in examples.items():
        want = np.array(values)
        for i, size in enumerate([0, 2, 4]):
            want[i, size:] = want[i, 0] if size else 0
        assert filled[name].dtype == values.dtype
        np.testing.assert_array_equal(filled[name], want)
        np.testing.assert_array_equal(blank[name][1, 2:], 0)


# ---------------------------------------------------------------------------------------------------------------
# Flat inputs.


def images(n=4, m=6):
    rng = np.random.default_rng(0)
    examples = {"x": rng.normal(size=(n, m, 14, 14, 1)), "y": rng.integers(0, 3, (n, m))}
    examples = {"x": examples["x"].astype(np.float32), "y": examples["y"].astype(np.int32)}
    return jfcl.Clients(examples, np.array([m, m - 2, m, 1][:n], np.int32))


@pytest.fixture(scope="module")
def cnn():
    return jfcl.models.classification(jfcl.models.CNNMnist(3), (14, 14, 1), 3)


@pytest.mark.slow
def test_a_task_accepts_flat_inputs(cnn):
    batch = {name: value[0] for name, value in images().examples.items()}
    flat = {**batch, "x": batch["x"].reshape(6, -1)}
    params = cnn.init(jax.random.key(0))
    np.testing.assert_array_equal(cnn.loss(params, flat), cnn.loss(params, batch))
    for function in (cnn.apply, cnn.represent):
        np.testing.assert_array_equal(function(params, flat["x"]), function(params, batch["x"]))


def test_an_accelerator_holds_images_flat(cnn, monkeypatch):
    clients, others = images(), jfcl.models.task(cnn.init, cnn.apply, kind="classification")
    assert mapping.held(jax.vmap, cnn, clients) is clients
    monkeypatch.setattr(axis, "platform", lambda devices=None: "tpu")
    held = mapping.held(jax.vmap, cnn, clients)
    np.testing.assert_array_equal(held.examples["x"], clients.examples["x"].reshape(4, 6, 196))
    assert held.examples["y"] is clients.examples["y"] and held.size is clients.size
    shapes = mapping.held(jax.vmap, cnn, jax.eval_shape(lambda: jax.tree.map(jnp.asarray, clients)))
    assert shapes.examples["x"].shape == (4, 6, 196)
    assert mapping.held(jax.vmap, others, clients) is clients and mapping.held(jax.vmap, cnn, None) is None


@pytest.mark.slow
@pytest.mark.parametrize("augment", [None, jfcl.augment.flip])
def test_a_run_on_flat_images_is_that_on_images(augment, cnn, monkeypatch):
    training = jfcl.local_training(optax.sgd(0.1), num_steps=2, batch_size=4, augment=augment)
    algorithm = jfcl.fedavg(cnn, training, client_axis=jax.vmap)

    def run():
        clients = images()
        history = jfcl.simulate(
            algorithm, clients, key=jax.random.key(0), num_rounds=2, test_clients=clients, client_axis=jax.vmap
        )
        return jax.tree.leaves(history.state.params), history.records[-1]["loss"]

    want, loss = run()
    shapes = []
    step = algorithm.step
    algorithm = algorithm._replace(step=lambda *a: (shapes.append(a[2].examples["x"].shape), step(*a))[1])
    monkeypatch.setattr(axis, "platform", lambda devices=None: "tpu")
    got, same = run()
    assert shapes and set(shapes) == {(4, 6, 196)}
    assert same == pytest.approx(loss, rel=1e-5)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------------------------------------------
# Programs of the TPU's compiler, in a process with its environment.

COMPILE = """
import os
os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
os.environ |= {"TPU_ACCELERATOR_TYPE": "v5litepod-4", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
import jax, jax.numpy as jnp, numpy as np, optax, jfcl
from jax.experimental import topologies
from jfcl import mapping
chips = topologies.get_topology_desc(platform="tpu", topology_name="v5e:1x1", chips_per_host_bounds=[1, 1, 1]).devices
mesh = jax.sharding.Mesh(np.array(chips), ("clients",), axis_types=(jax.sharding.AxisType.Auto,))
axis = mapping.sharded(mesh, mapping.chunked(4))
module = {module}
task = jfcl.models.classification(module, (28, 28, 1), 10)
method = jfcl.ifca(task, jfcl.local_training(optax.sgd(0.1), {training}), num_clusters=2, client_axis=axis)
shape = jax.ShapeDtypeStruct
examples = {"x": shape((8, 40, 28, 28, 1), "float32"), "y": shape((8, 40), "int32")}
clients = jfcl.Clients(examples, shape((8,), "int32"))
clients = mapping.held(axis, task, clients)
assert clients.examples["x"].shape == (8, 40, 784), clients
key = jax.eval_shape(lambda: jax.random.key(0))
state = jax.eval_shape(method.init, key, clients)
everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
put = lambda x: shape(x.shape, x.dtype, sharding=everywhere)
assert jax.default_backend() == "cpu"
print(jax.jit(method.step).lower(*jax.tree.map(put, (key, state, clients))).compile().as_text())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "training"),
    [("jfcl.models.MLP(10)", "num_steps=2"), ("jfcl.models.CNNMnist(10)", "num_steps=2, batch_size=20")],
    ids=["mlp", "cnn"],
)
def test_the_tpus_compiler_gets_its_forms(module, training):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("install libtpu, of the version that this jax asks for, to compile for a TPU that is not there")
    source = COMPILE.replace("{module}", module).replace("{training}", training)
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    gathers = [line for line in lines if " gather(" in line]
    assert not [line for line in gathers if "take_along_axis" in line]
    assert any("select-and-scatter(" in line for line in lines) == ("CNN" in module)
    # The compiler makes windows of softmax, too.
    assert any("reduce-window(" in line and "reduce_window_max" in line for line in lines) == ("CNN" in module)
