"""Inputs in bytes: the floats that they stand for, and the runs on these, bit for bit."""

from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jfcl
from jfcl import attacks, mapping
from jfcl.core import Clients, Packed, client_shapes, concatenate_clients, num_bytes, unpacked
from jfcl.data import Dataset, build, in_bytes
from jfcl.data.build import select_clients
from jfcl.data.images import unit
from jfcl.experiments import Config, load_run, run, setups
from jfcl.mapping import axis, memory

SHAPE = (6, 6, 1)


class Convolution(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.relu(nn.Conv(2, (3, 3))(x)).mean(axis=(1, 2)))


def pixels(name="pixels", shape=SHAPE):
    rng = np.random.default_rng(0)
    x, y = unit(rng.integers(0, 256, (120, *shape), np.uint8)), rng.integers(0, 3, 120).astype(np.int32)
    return Dataset(name, {"x": x, "y": y}, None, 3, None, "")


@pytest.fixture(scope="module")
def floats():
    return build(pixels(), num_clients=4, num_clusters=2, heterogeneity="rotation", newcomer_examples=4)


@pytest.fixture(scope="module")
def packed(floats):
    return in_bytes(floats)


MLP = jfcl.models.classification(jfcl.models.MLP(3, (4,)), SHAPE, 3)
CNN = jfcl.models.classification(Convolution(), SHAPE, 3)
SPAN = jfcl.local_training(optax.sgd(0.1), num_steps=3, span="always")
EPOCH = jfcl.local_training(optax.sgd(0.1), num_epochs=1, batch_size=10)
STEPS = jfcl.local_training(optax.sgd(0.1), num_steps=2, batch_size=7, augment=jfcl.augment.crop_flip)
SPREAD = mapping.sharded(mapping.client_mesh(2))


@pytest.mark.parametrize("per_unit", [1, 2, 16, 128, 255])
def test_bytes_are_exact_quotients(per_unit):
    stored = np.tile(np.arange(256, dtype=np.uint8), (3, 1))
    expected = np.divide(stored, np.float32(per_unit), dtype=np.float32)
    x = Packed(stored, per_unit)
    for values in (x, x[:], jax.jit(unpacked)(x), jax.jit(jax.vmap(unpacked))(x), x.reshape(3, 256)):
        assert values.dtype == np.float32
        np.testing.assert_array_equal(np.asarray(values), expected)
    with pytest.raises(TypeError, match="unsupported operand"):
        x / 2


def same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


CASES = {
    "span": lambda: jfcl.fedavg(MLP, SPAN),
    "cnn": lambda: jfcl.fedavg(CNN, EPOCH, cohort=3),
    "augment": lambda: jfcl.fedavg(CNN, STEPS),
    "ifca": lambda: jfcl.ifca(MLP, SPAN, num_clusters=2),
    "pacfl": lambda: jfcl.pacfl(MLP, EPOCH, num_clusters=2),
    "knn_per": lambda: jfcl.knn_per(MLP, EPOCH, num_neighbours=3),
    "flux": lambda: jfcl.flux(MLP, EPOCH, num_clusters=2),
    "fedem": lambda: jfcl.fedem(MLP, EPOCH, num_clusters=2),
    "gradients": lambda: jfcl.federated_clustering(CNN, STEPS, radius=1.0),
    "devices": lambda: jfcl.ifca(CNN, EPOCH, num_clusters=2, client_axis=SPREAD),
}


@pytest.mark.filterwarnings("ignore:.*all clients use one of")
@pytest.mark.slow_cases("flux", "fedem", "gradients", "devices")
@pytest.mark.parametrize("name", CASES)
def test_a_run_on_bytes_is_that_on_floats(name, floats, packed):
    """Training, evaluation, and newcomers; `devices` has a client more than they divide evenly."""
    algorithm, options = CASES[name](), {"client_axis": SPREAD} if name == "devices" else {}
    count, histories = 3 if name == "devices" else 4, []
    for federation in (floats, packed):
        some = select_clients(federation, slice(count))
        histories.append(jfcl.simulate(algorithm, some, key=jax.random.key(0), num_rounds=2, **options))
    one, other = histories
    np.testing.assert_equal(other.records, one.records)
    same(other.clients, one.clients)
    same(*(jax.tree.leaves(jax.device_get(history.served)) for history in (one, other)))


def test_a_run_on_drifting_bytes_is_that_on_floats():
    drift = build(pixels(), num_clients=4, num_clusters=2, heterogeneity="rotation", drift=np.int32([[0] * 4, [1] * 4]))
    of_bytes = in_bytes(drift)
    assert isinstance(of_bytes.drift.test.examples["x"], Packed)
    algorithm = jfcl.fedavg(MLP, EPOCH)
    one, other = (jfcl.simulate(algorithm, part, key=jax.random.key(0), num_rounds=2) for part in (drift, of_bytes))
    np.testing.assert_equal(other.records, one.records)


def test_bytes_take_a_quarter_of_the_memory(floats, packed):
    for part in ("train", "test", "newcomers"):
        x, of_bytes = (getattr(federation, part).examples["x"] for federation in (floats, packed))
        assert of_bytes.shape == x.shape and num_bytes(of_bytes) == x.size
    needed = []
    for clients in (floats.train, packed.train):
        algorithm, shapes = jfcl.fedavg(CNN, EPOCH), client_shapes(clients, 4)
        key = jax.eval_shape(lambda: jax.random.key(0))
        state = jax.eval_shape(algorithm.init, key, shapes)
        needed.append(memory.memory_of(jax.jit(algorithm.step).lower(key, state, shapes).compile()))
    assert needed[0].arguments - needed[1].arguments == 3 * floats.train.examples["x"].size
    assert needed[1].temporaries < needed[0].temporaries + floats.train.examples["x"][0].nbytes


def test_what_is_not_exact_stays():
    corrupted = build(pixels("p", (8, 8, 3)), num_clients=4, num_clusters=2, heterogeneity="corruption")
    words = Clients({"x": np.ones((2, 3, 4), np.int32)}, np.full(2, 3, np.int32))
    sevenths = Clients({"x": np.full((2, 3, 4), 1 / 7, np.float32)}, np.full(2, 3, np.int32))
    missing = Clients({"x": np.float32([[[0, 1], [np.nan, 1]]])}, np.int32([1]))
    for clients in (corrupted.train, words, sevenths, missing, words._replace(examples=np.ones((2, 3)))):
        assert in_bytes(clients) is clients
    with pytest.raises(ValueError, match="data must be Clients, or a Federation, got 'dict'"):
        in_bytes(words.examples)
    again = in_bytes(in_bytes(build("digits", num_clients=4)).train)
    assert again.examples["x"].per_unit == 16 and isinstance(again.examples["x"].stored, np.ndarray)


def test_what_reads_clients_on_the_host_reads_floats(floats, packed):
    malicious = np.array([False, True, False, False])
    for attack in ("backdoor", "noisy_inputs"):
        bad, other = (attacks.poison(part.train, malicious, attack, num_classes=3) for part in (floats, packed))
        same(other, bad)
        assert isinstance(in_bytes(bad).examples["x"], Packed) == (attack == "backdoor")
    store = jfcl.data.ClientStore.from_clients(packed.train)
    same(store.gather([0, 2]).examples["x"], floats.train.examples["x"][[0, 2]])
    same(concatenate_clients(packed.train, floats.train), concatenate_clients(floats.train, floats.train))


def test_an_accelerator_holds_bytes_flat(floats, packed, monkeypatch):
    monkeypatch.setattr(axis, "platform", lambda devices=None: "tpu")
    for part in (packed.train, client_shapes(packed.train, 4)):
        x = mapping.held(jax.vmap, MLP, part).examples["x"]
        assert x.stored.shape == (*floats.train.examples["x"].shape[:2], 36) and x.stored.dtype == np.uint8


@pytest.mark.filterwarnings("ignore:.*all clients use one of")
def test_a_configured_run_on_an_accelerator_has_bytes(tmp_path, monkeypatch):
    """Its results, and what it serves, are those of floats."""
    config = Config("ifca", clients=6, clusters=2, rounds=2, local_steps=1, model="linear", mapping="vmap")
    expected = run(config)
    monkeypatch.setattr(mapping, "platform_of", lambda client_axis: "gpu")
    _, history, parts = run(config, out=tmp_path / "run")
    assert isinstance(parts.federation.train.examples["x"], Packed)
    np.testing.assert_equal(history.records, expected[1].records)
    found, test = load_run(tmp_path / "run"), expected[2].federation.test
    x = test.examples["x"][0, :5]
    same(found.predictor(0)(x), found.predictor(0)(found.setup.federation.test.examples["x"][0, :5]))
    assert found.choose({"x": x}, by="inputs") in (0, 1)
    assert found.adopt(test).to.shape == (6,)
    with pytest.raises(ValueError, match="x must be floats, as in training"):
        found.predictor(0)((x * 16).astype(np.uint8))
    own = SimpleNamespace(method="my_methods:reads_x")  # a method of the user may read the inputs itself
    assert setups.in_bytes(own, expected[2].federation) is expected[2].federation


def test_any_function_of_one_array_reads_the_floats(floats, packed):
    """A method of one's own: `jnp.asarray` and the methods of an array, on the host and in a compiled function."""
    means = [jax.jit(jax.vmap(lambda x: x.mean()))(part.train.examples["x"]) for part in (floats, packed)]
    same(*means)
    same(np.asarray(jnp.asarray(packed.train.examples["x"])), floats.train.examples["x"])
