import sys
from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jfcl
from jfcl import mapping as client_mapping
from jfcl.core import Clients
from jfcl.mapping import axis as axis_module
from jfcl.mapping import memory
from jfcl.mapping.axis import auto, chunked, client_mesh, map_reduce, pmapped, sharded
from jfcl.mapping.memory import in_lots, sharding_of
from jfcl.mapping.placement import held, num_rows, place
from jfcl.simulation import evaluation


def affine(x, shift, tree):
    return {"y": jnp.tanh(x) @ x + shift, "z": tree["a"] * x[0]}


@pytest.mark.parametrize(("n", "size"), [(1, 1), (9, 4), (9, 11)])
def test_chunked_equals_vmap(n, size):
    x, a = np.random.default_rng(0).normal(size=(n, 4)).astype(np.float32), np.arange(n, dtype=np.float32)
    axes = (0, None, 0)
    got = jax.jit(chunked(size)(affine, in_axes=axes))(x, jnp.float32(2), {"a": a})
    want = jax.jit(jax.vmap(affine, in_axes=axes))(x, jnp.float32(2), {"a": a})
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-6), got, want)


@pytest.mark.parametrize(("n", "size"), [(1, 1), (9, 4), (9, 11)])
def test_map_reduce_sums_what_is_sent_and_stacks_what_is_kept(n, size):
    x = np.random.default_rng(n).normal(size=(n, 3)).astype(np.float32)

    def fn(row):
        return row * 2, row.sum()

    for mapping in (jax.vmap, chunked(size), sharded(client_mesh(2), chunked(size)), pmapped(2, jax.vmap)):
        total, kept = jax.jit(map_reduce(mapping, fn, lambda t, sent: t + sent.sum(axis=0), jnp.zeros(3)))(x)
        np.testing.assert_allclose(total, 2 * x.astype(np.float64).sum(axis=0), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(kept, x.astype(np.float64).sum(axis=1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n", [9_000, 9_216])
def test_sums_over_many_clients_one_at_a_time_keep_their_digits(n):
    def client(x):
        return 21 * x, x + 1

    x = np.random.default_rng(0).uniform(0.5, 1.5, n).astype(np.float32)
    total, kept = jax.jit(map_reduce(chunked(1), client, lambda total, sent: total + sent[0], 0.0))(x)
    np.testing.assert_allclose(total, 21 * x.astype(np.float64).sum(), rtol=3e-6)
    np.testing.assert_array_equal(kept, x + np.float32(1))


def test_chunks_bound_the_memory():
    """Temporaries grow with the chunk, not with the number of clients."""

    def fn(x):
        return jnp.cos(jnp.outer(x, x)) @ x, ()

    def temporaries(n, mapping):
        run = jax.jit(map_reduce(mapping, fn, lambda t, sent: t + sent.sum(axis=0), jnp.zeros(256)))
        return run.lower(jnp.ones((n, 256))).compile().memory_analysis().temp_size_in_bytes

    one = 256 * 256 * 4
    assert temporaries(64, chunked(2)) < 8 * one
    assert temporaries(512, chunked(2)) < 8 * one
    assert temporaries(64, jax.vmap) > 32 * one


def test_data_are_not_copied_into_the_loop():
    data = jnp.zeros((64, 1000, 10))  # 2.6 MB; what leaves the loop is small
    sums = jax.jit(lambda x: chunked(1)(lambda row: row.sum())(x))
    assert sums.lower(data).compile().memory_analysis().temp_size_in_bytes < data.nbytes / 4


@pytest.mark.parametrize("size", [1, 2])
def test_arrays_of_no_numbers_keep_their_shape(size):
    assert chunked(size)(lambda x: jnp.zeros((3, 0)))(jnp.arange(5)).shape == (5, 3, 0)


def test_a_mapping_is_its_size():
    assert chunked(3) == chunked(3) and hash(chunked(3)) == hash(chunked(3)) and chunked(2) != chunked(3)


def test_auto_runs():
    assert auto()(lambda x: x + 1)(jnp.zeros(2)).tolist() == [1, 1]


def test_refuses():
    with pytest.raises(ValueError, match="chunk size must be an integer, at least 1, got 0"):
        chunked(0)(lambda x: x)
    with pytest.raises(ValueError, match="in_axes must be 0 and None only"):
        chunked(2)(lambda x: x, in_axes=1)(jnp.zeros((2, 2)))
    for mapping in (chunked(1), chunked(2), sharded(client_mesh(1))):
        with pytest.raises(ValueError, match=r"stacked arguments must be of one length.*3.*5"):
            mapping(lambda x, y: x + y)(jnp.zeros(5), jnp.zeros(3))
        with pytest.raises(ValueError, match="at least one client"):
            mapping(lambda x: x)(jnp.zeros(0))


def test_results_may_be_numbers_of_python():
    assert chunked(1)(lambda x: 2.0)(jnp.zeros(3)).tolist() == [2.0] * 3


@pytest.mark.slow_cases("1-*-inner1", "1-*-vmap", "4-*-inner*", "7-*-inner2", "7-*-vmap")
@pytest.mark.parametrize("inner", [jax.vmap, chunked(1), chunked(2)])
@pytest.mark.parametrize("several", [lambda inner: sharded(client_mesh(2), inner), lambda inner: pmapped(2, inner)])
@pytest.mark.parametrize("n", [1, 4, 7])
def test_several_devices_equal_vmap(several, inner, n):
    x, keys = np.random.default_rng(n).normal(size=(n, 4)).astype(np.float32), jax.random.split(jax.random.key(n), n)

    def draw(key, x, shift):
        return {"y": jax.random.normal(key) + x.sum(), "z": x * shift}

    axes = (0, 0, None)
    got = jax.jit(several(inner)(draw, in_axes=axes))(keys, x, jnp.float32(2))
    want = jax.jit(jax.vmap(draw, in_axes=axes))(keys, x, jnp.float32(2))
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-6), got, want)


def test_a_model_from_outside_is_refused_in_a_sentence_where_jax_refuses_it():
    """Under a mesh, `zeros_like` of an array from outside of a function that devices divide is an error of JAX."""
    axis = sharded(client_mesh(2))
    model = jax.device_put(np.ones(3, np.float32), NamedSharding(axis.mesh, PartitionSpec()))

    def from_outside(model, x):
        return axis(lambda x: jnp.zeros_like(model) + x)(x)

    def as_argument(model, x):
        return axis(lambda model, x: jnp.zeros_like(model) + x, in_axes=(None, 0))(model, x)

    x = np.arange(4, dtype=np.float32)
    with pytest.raises(ValueError, match=r"client_axis\(fn, in_axes=\(None, 0\)\)"):
        jax.jit(from_outside)(model, x)
    np.testing.assert_array_equal(jax.jit(as_argument)(model, x), np.broadcast_to(x[:, None], (4, 3)))


@pytest.mark.parametrize("several", [sharded(client_mesh(2), jax.vmap), pmapped(2, jax.vmap)])
def test_gradients_are_not_summed_over_devices(several):
    """With shard_map's defaults, a gradient in parameters that all devices share is the sum of all devices'."""
    x = jnp.arange(4.0)

    @jax.jit
    def gradients(w):
        return several(lambda x: jax.grad(lambda w: w * w * x)(w))(x)

    np.testing.assert_allclose(gradients(jnp.float32(3)), 6 * np.arange(4.0))


def test_clients_are_placed_once_with_empty_ones_behind():
    x = np.arange(12, dtype=np.float32).reshape(3, 2, 2)
    axis = sharded(client_mesh(2))
    placed = place(axis, Clients({"x": x}, np.array([2, 1, 2], np.int32), np.array([5, 9, 7], np.int32)))
    assert num_rows(axis, 3) == 4 and placed.size.tolist() == [2, 1, 2, 0] and placed.id.tolist() == [5, 9, 7, 10]
    np.testing.assert_array_equal(placed.examples["x"][:3], x)
    assert {tuple(s.data.shape) for s in placed.examples["x"].addressable_shards} == {(2, 2, 2)}
    for shape, axis, divided in (((4, 4), 0, ("clients",)), ((4, 4), 1, (None, "clients")), ((4, 3), 1, ())):
        spec = sharding_of(np.zeros(shape), client_mesh(2), 4, axis).spec
        assert spec == jax.sharding.PartitionSpec(*divided)
    untouched = place(jax.vmap, Clients({"x": x}, np.array([2, 1, 2], np.int32)))
    assert untouched.id is None and untouched.size.shape == (3,)


def test_more_devices_than_there_are():
    with pytest.raises(ValueError, match=r"num_devices must be at most the 2 there are; more of a CPU are forced"):
        client_mesh(3)
    with pytest.raises(ValueError, match=r"pmapped: num_devices must be an integer, at least 1 and at most 2"):
        pmapped(3)(lambda x: x)(jnp.zeros(3))


def test_a_device_maps_its_clients_as_is_fastest_there(monkeypatch):
    assert sharded(client_mesh()).inner == pmapped().inner == chunked(1)
    images = Clients({"x": np.zeros((2, 5, 4, 3), np.float32)}, np.full(2, 5))
    task = jfcl.models.task(lambda key: jnp.ones(()), lambda w, x: w * x, kind="regression")
    flat = task._replace(input_shape=(4, 3))
    assert held(jax.vmap, flat, images) is images and in_lots(jax.vmap, task, images) is jax.vmap
    monkeypatch.setattr(axis_module, "platform", lambda devices=None: "gpu")
    assert sharded(client_mesh()).inner is pmapped().inner is jax.vmap
    assert held(jax.vmap, flat, images).examples["x"].shape == (2, 5, 12) and held(jax.vmap, task, images) is images
    assert in_lots(jax.vmap, task, images, num_models=3) == chunked(2**15 // (3 * 5))  # forward passes at once


def test_what_is_no_mesh_and_devices_inside_devices():
    with pytest.raises(ValueError, match=r"sharded: mesh must be a mesh, such as jfcl.client_mesh\(\), got None"):
        sharded(None)(lambda x: x)(jnp.zeros(2))
    with pytest.raises(ValueError, match="inner must be the mapping of one device's clients"):
        sharded(client_mesh(), pmapped())(lambda x: x)(jnp.zeros(2))


def test_all_cores_are_devices_or_the_reason_is_said(monkeypatch):
    """`use_all_cores` divides the clients; it refuses where JAX has started with one device for several cores."""
    divided = []
    monkeypatch.setattr(axis_module, "divide_cpu", divided.append)
    monkeypatch.setattr(axis_module, "num_cores", lambda: 6)
    mapped = client_mapping.use_all_cores()  # the tests run on two devices
    assert divided == [6] and mapped == sharded(client_mesh(2)) and client_mapping.idle_cores() == 0
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert client_mapping.idle_cores() == 5
    with pytest.raises(RuntimeError, match="one device for 6 cores; call"):
        client_mapping.use_all_cores()
    monkeypatch.setattr(axis_module, "num_cores", lambda: 1)
    assert client_mapping.use_all_cores() == auto()
    monkeypatch.setattr(axis_module, "platform", lambda devices=None: "tpu")
    assert client_mapping.use_all_cores() is jax.vmap


def test_losses_are_in_lots_on_an_accelerator(monkeypatch):
    clients = Clients({"x": np.zeros((7, 100, 3), np.float32), "y": np.zeros((7, 100), np.int32)}, np.full(7, 100))
    cnn = jfcl.models.classification(jfcl.models.CNNMnist(3), (12, 12, 1), 3)
    mlp = jfcl.models.classification(jfcl.models.MLP(3), (3,), 3)
    divided, few = sharded(client_mesh(2), jax.vmap), chunked(2)
    for axis in (jax.vmap, divided, few):
        assert memory.in_lots(axis, cnn, clients, 4) is axis  # on a CPU
    monkeypatch.setattr(client_mapping, "platform_of", lambda axis: "gpu")
    monkeypatch.setattr(memory, "LOT", 1000)
    assert memory.in_lots(jax.vmap, cnn, clients) == chunked(10)
    assert memory.in_lots(jax.vmap, cnn, clients, 4) == chunked(2)
    assert memory.in_lots(jax.vmap, cnn, clients, 40) == chunked(1)
    assert memory.in_lots(divided, cnn, clients, 4) == replace(divided, inner=chunked(2))
    for axis in (few, replace(divided, inner=few)):
        assert memory.in_lots(axis, cnn, clients) is axis
    assert memory.in_lots(jax.vmap, mlp, clients) is jax.vmap


@pytest.mark.slow
def test_results_in_lots_are_those_of_all_clients_at_once(monkeypatch):
    """IFCA's start, its choices and evaluations, with the lots of an accelerator on this CPU."""
    federation = jfcl.data.build(
        "digits", num_clients=5, examples_per_client=12, num_clusters=2, heterogeneity="rotation"
    )
    training = jfcl.local_training(optax.sgd(0.1), num_steps=1)

    def records():
        net = nn.Sequential([nn.Conv(4, (3, 3)), nn.relu, lambda x: x.reshape(len(x), -1), nn.Dense(10)])
        task = jfcl.models.classification(
            net, federation.input_shape, 10
        )  # another one in each call: nothing is cached
        algorithm = jfcl.ifca(task, training, num_clusters=2, client_axis=jax.vmap)
        options = {"test_clients": federation.test, "key": jax.random.key(0), "num_rounds": 1, "client_axis": jax.vmap}
        [record] = jfcl.simulate(algorithm, federation.train, **options).records
        return record["loss"], record["accuracy"], record["cluster"]

    want, sizes = records(), []

    def in_twos(axis, task, clients, num_models=1):
        sizes.append(num_models)
        return chunked(2)

    for module in (sys.modules["jfcl.methods.ifca"], evaluation):
        monkeypatch.setattr(module, "in_lots", in_twos)
    got = records()
    np.testing.assert_allclose(got[:2], want[:2], rtol=1e-5)
    assert got[2] == want[2] and sizes.count(2) >= 2 and 1 in sizes
