"""Modules of users: dropout acts in training or is refused, and errors name the batch that the module is given."""

import inspect
import warnings
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jfcl
from jfcl.models import classification, conv, max_pool, modules

D, C = 4, 3


def linen(call, name="Net", **fields):
    """Returns a module of flax.linen with the method `call`."""
    return type(name, (nn.Module,), {"__call__": nn.compact(call), **fields})()


def dropping(**options):
    return nn.Dropout(0.5, **options)


def train(self, x, train=False):
    return nn.Dense(C)(dropping(deterministic=not train)(x))


def training(self, x, training=False):
    return nn.Dense(C)(dropping(deterministic=not training)(x))


def is_train(self, x, is_train=False):
    return nn.Dense(C)(dropping(deterministic=not is_train)(x))


def is_training(self, x, *, is_training: bool):
    return nn.Dense(C)(dropping(deterministic=not is_training)(x))


def inference(self, x, inference=True):
    return nn.Dense(C)(dropping(deterministic=inference)(x))


def has_rng(self, x):
    return nn.Dense(C)(dropping(deterministic=not self.has_rng("dropout"))(x))


def noisy(self, x, learn=False):
    x = x + jax.random.normal(self.make_rng("noise"), x.shape) if learn else x
    return nn.Dense(C)(x)


def other(self, x, learn=False):
    return nn.Dense(C)(dropping(deterministic=not learn)(x))


def other_way(self, x, still=True):
    return nn.Dense(C)(dropping(deterministic=still)(x))


def required(self, x, learn):
    return nn.Dense(C)(dropping(deterministic=not learn)(x))


def beside(self, x, train=False, drop=False):
    return nn.Dense(C)(dropping(deterministic=not drop)(x))


def always(self, x):
    return nn.Dense(C)(dropping(deterministic=False)(x))


def reversed_flag(self, x, train=False):
    return nn.Dense(C)(dropping(deterministic=train)(x))


def normalised(self, x, learn=False):
    return nn.Dense(C)(nn.BatchNorm(use_running_average=not learn)(x))


def streams(self, x, train=False):
    first, second = (self.make_rng(name) for name in ("dropout", "noise")) if train else [jax.random.key(0)] * 2
    return nn.Dense(C)(jax.random.normal(first, x.shape) - jax.random.normal(second, x.shape))


class OfNnx(nnx.Module):
    def __init__(self, *, rngs, drop="own", rate=0.5, width=D):
        self.last = nnx.Linear(width, C, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs if drop == "own" else None)
        if drop == "given":
            self.rngs = rngs

    def __call__(self, x, return_features=False):
        x = self.drop(x, rngs=self.rngs if hasattr(self, "rngs") else None)
        return (self.last(x), x) if return_features else self.last(x)


class OtherNnx(OfNnx):
    def __call__(self, x, learn=False):
        return self.last(self.drop(x, deterministic=not learn))


class AttentionNnx(nnx.Module):
    def __init__(self, *, rngs):
        self.attention = nnx.MultiHeadAttention(2, D, dropout_rate=0.5, decode=False, keep_rngs=False, rngs=rngs)

    def __call__(self, x):
        return self.attention(x[:, None])[:, 0, :C]


class EvalNnx(OfNnx):
    def __call__(self, x, extra=False):
        return self.last(self.drop(x, deterministic=True))


@pytest.mark.slow_cases("module0-None", "module1-None")
@pytest.mark.parametrize(
    ("module", "argument"),
    [
        *((linen(call), None) for call in (train, training, is_train, is_training, inference, has_rng)),
        *((linen(call), "learn") for call in (noisy, other, required)),
        (OfNnx, None),
        (partial(OfNnx, drop="given"), None),
        (OtherNnx, "learn"),
    ],
)
def test_random_numbers_are_drawn_in_training_alone(module, argument):
    task = classification(module, (D,), C, training_argument=argument)
    params = task.init(jax.random.key(0))
    batch = {"x": jnp.ones((8, D)), "y": jnp.zeros(8, jnp.int32)}
    losses = [task.train_loss(jax.random.key(k), params, batch, jnp.ones(8, bool))[0] for k in (1, 2)]
    assert np.abs(losses[0] - losses[1]).max() > 1e-3
    np.testing.assert_array_equal(task.loss(params, batch), np.full(8, task.loss(params, batch)[0]))


class StackedNnx(nnx.Module):
    """Two layers of dropout in one, as of a transformer."""

    def __init__(self, *, rngs):
        make = nnx.vmap(lambda rngs: nnx.Dropout(0.5, rngs=rngs), in_axes=0, out_axes=0)
        self.layers = nnx.split_rngs(splits=2)(make)(rngs)

    def __call__(self, x):
        return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


def test_stacked_layers_of_nnx_draw_numbers_of_their_own():
    task = jfcl.models.regression(StackedNnx, (D,))
    batch = {"x": jnp.ones((400, D)), "y": jnp.zeros((400, D))}
    losses, _ = task.train_loss(jax.random.key(1), task.init(jax.random.key(0)), batch, jnp.ones(400, bool))
    remaining = losses.mean() / (2 * 2) ** 2 / D
    assert 0.22 < remaining < 0.28


def test_streams_of_other_names_draw_other_numbers_than_dropout():
    task = classification(linen(streams), (D,), C)
    params, batch = task.init(jax.random.key(0)), {"x": jnp.ones((8, D)), "y": jnp.zeros(8, jnp.int32)}
    losses, _ = task.train_loss(jax.random.key(1), params, batch, jnp.ones(8, bool))
    assert np.abs(losses - task.loss(params, batch)).max() > 1e-3


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (linen(other), r"draws random numbers with learn=True.*one of train, .* or give training_argument='learn'"),
        (linen(noisy), "draws random numbers with learn=True"),
        (linen(beside), r"with drop=True.*training_argument='drop' \(with training_argument='train' it stays"),
        (linen(other_way), r"with still=False.*rename this argument to one of deterministic, \w+, inference$"),
        (linen(required), "Net.__call__ needs the argument 'learn'.*training_argument='learn'"),
        (linen(normalised), "behaves differently in training.*or name yours by training_argument='learn'"),
        (linen(always), r"draws random numbers in evaluation.*write nn.Dropout\(rate, deterministic=not train\)"),
        (linen(reversed_flag), "draws random numbers in evaluation"),
        (OtherNnx, "OtherNnx draws random numbers with learn=True"),
        (partial(OfNnx, drop="none"), "dropout of OfNnx has no random numbers: give nnx.Dropout rngs=rngs"),
        (partial(OtherNnx, drop="none"), "give nnx.Dropout rngs=rngs"),
        (AttentionNnx, "dropout of AttentionNnx has no random numbers.*MultiHeadAttention keep_rngs=True"),
    ],
)
def test_dropout_that_never_acts_is_refused(module, words):
    with pytest.raises(ValueError, match=words):
        classification(module, (D,), C)


def without_dropout(self, x, learn=False):
    return nn.Dense(C)(nn.Dropout(0.0, deterministic=not learn)(x))


def features_of_its_own(self, x):
    return nn.Dense(C)(x @ jax.random.normal(jax.random.key(3), (D, 5)))


def features(self, x, return_features=False):
    hidden = nn.Dense(2)(x)
    return (nn.Dense(C)(hidden), hidden) if return_features else nn.Dense(C)(hidden)


def longer(self, x, more=False, fails=False):
    if fails:
        raise KeyError("of the user")
    return nn.Dense(C)(nn.Dense(D)(x) if more else x)


@pytest.mark.parametrize(
    ("module", "differs"),
    [
        *((linen(call), False) for call in (without_dropout, features, longer, features_of_its_own)),
        (partial(OfNnx, drop="none", rate=0.0), False),
        (EvalNnx, True),  # it has a random stream, which its dropout does not use
        (partial(EvalNnx, drop="none"), False),
    ],
)
def test_other_booleans_are_left_alone(module, differs):
    assert (classification(module, (D,), C).train_loss is not None) == differs


def one_example(self, x, train=False):
    return nn.Dense(C)(x.reshape(-1))


def two_outputs(self, x):
    return nn.Dense(C)(x), x


def no_batch(self, x):
    return nn.Dense(C)(x).sum(axis=0)


def whole(self, x):
    return jnp.round(nn.Dense(C)(x)).astype(jnp.int32)


def unpacks(self, x):
    height, width = x.shape[1:]
    return nn.Dense(height * width)(x)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (linen(one_example), r"Net must map a batch of inputs \[B, 4\], here \(2, 4\).*shape \(8, 3\).*\(4, 3\)"),
        (linen(two_outputs), "outputs of Net must be one array, got 'tuple'"),
        (linen(no_batch), r"the outputs of Net must be logits of shape .2, 3. for a batch of 2, got \(3,\)"),
        (linen(whole), "the outputs of Net must be real numbers, got 'int32'"),
        (partial(OfNnx, width=7), r"OfNnx must map a batch of inputs \[B, 4\], here \(2, 4\).*got \(4,\) and \(7,\)"),
        (nn.Dense, "must be an instance of a flax.linen module, such as Dense.*, got 'the class Dense'"),
        (nnx.Linear, r"rngs alone \(functools.partial .*; Linear\(rngs=...\) fails: .*missing 2 required"),
    ],
)
def test_errors_of_a_module_name_the_batch(module, words):
    with pytest.raises(ValueError, match=words):
        classification(module, (D,), C)


def test_a_value_error_of_a_module_has_a_note():
    with pytest.raises(ValueError, match="not enough values to unpack") as caught:
        jfcl.models.regression(linen(unpacks), (D,))
    assert "Net was called on a batch of inputs [B, 4], here (1, 4) float32" in caught.value.__notes__


@pytest.mark.parametrize(
    ("last", "warns"),
    [
        (nn.softmax, True),
        (lambda x: nn.softmax(x.astype(jnp.bfloat16)).astype(jnp.float32).reshape(len(x), -1), True),
        (jax.jit(nn.softmax), True),
        (lambda x: jnp.exp(x) / jnp.exp(x).sum(axis=1, keepdims=True), False),  # two exponentials: not recognised
        (nn.log_softmax, False),
        (nn.sigmoid, False),
        (lambda x: nn.softmax(x) * 5, False),
        (lambda x: nn.softmax(x, axis=0), False),
        (lambda x: x / x.sum(axis=1, keepdims=True), False),
    ],
)
def test_a_softmax_at_the_end_is_warned_of(last, warns):
    module = linen(lambda self, x: last(nn.Dense(C)(x)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        classification(module, (D,), C)
        jfcl.models.regression(module, (D,))
    assert ["Net ends in a softmax" in str(w.message) for w in caught] == [True] * warns
    assert all(w.filename == __file__ for w in caught)


class Images(nnx.Module):
    def __init__(self, convolution, *, rngs):
        self.conv = nnx.Conv(1, 2, (3, 3), conv_general_dilated=convolution, rngs=rngs)
        self.last = nnx.Linear(2 * 2 * 2, C, rngs=rngs)

    def __call__(self, x):
        return self.last(max_pool(nnx.relu(self.conv(x)), 2).reshape(len(x), -1))


@pytest.mark.slow
def test_a_convolution_of_nnx_trains():
    """With `jfcl.models.conv` and with XLA's own: the same loss and gradients, and a step lowers the loss."""
    x, y = np.random.default_rng(0).normal(size=(6, 4, 4, 1)).astype(np.float32), np.int32([0, 1, 2, 0, 1, 2])
    losses, gradients = [], []
    for convolution in (conv, jax.lax.conv_general_dilated):
        task = classification(partial(Images, convolution), (4, 4, 1), C)
        params = task.init(jax.random.key(0))
        step = jax.jit(jax.value_and_grad(lambda p, task=task: task.loss(p, {"x": x, "y": y}).mean()))
        value, gradient = step(params)
        losses += [value, step(jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient))[0]]
        gradients.append(gradient)
    assert losses[1] < losses[0]
    np.testing.assert_allclose(losses[:2], losses[2:], rtol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), *gradients)


def test_max_pool_refuses():
    x = np.ones((2, 5, 6, 3), np.float32)
    for window in (0, 2.0, (2, 2)):
        with pytest.raises(ValueError, match="window must be an integer, at least 1"):
            max_pool(x, window)
    with pytest.raises(ValueError, match=r"x must be of shape \[B, H, W, C\]"):
        max_pool(x[0], 2)


def test_a_module_with_a_list_has_no_hash_and_works():
    task = classification(nn.Sequential([nn.Dense(5), nn.relu, nn.Dense(C)]), (D,), C)
    assert jfcl.models.parameter_paths(task)[:2] == ["layers_0/bias", "layers_0/kernel"]
    batch = {"x": jnp.ones((2, D)), "y": jnp.zeros(2, jnp.int32)}
    assert jax.eval_shape(lambda key: task.loss(task.init(key), batch), jax.random.key(0)).shape == (2,)


def test_one_hidden_layer_of_a_number():
    assert jfcl.models.MLP(C, 16) == jfcl.models.MLP(C, hidden=(16,))
    assert classification(jfcl.models.MLP(C, 16), (D,), C) is classification(jfcl.models.MLP(C, [16]), (D,), C)


def test_a_last_layer_that_is_called_by_name_is_found():
    task = classification(linen(lambda self, x: nn.Dense(C)(inputs=nn.relu(x))), (D,), C)
    assert task.represent(task.init(jax.random.key(0)), jnp.array([[-1.0, 2, -3, 4]])).tolist() == [[0, 2, 0, 4]]


def test_a_module_without_parameters_is_a_task():
    task = classification(linen(lambda self, x: x[:, :C]), (D,), C)
    assert task.init(jax.random.key(0)) == {} and task.apply({}, jnp.arange(4.0)[None]).tolist() == [[0, 1, 2]]


class Rematerialised(nn.Module):
    """Its last dense layer is computed again for gradients."""

    @nn.compact
    def __call__(self, x):
        return nn.remat(nn.Dense)(3)(nn.relu(nn.Dense(8)(x)))


class Scanned(nn.Module):
    """Its last dense layers are three in a loop."""

    @nn.compact
    def __call__(self, x):
        def layer(module, carry, _):
            return nn.relu(nn.Dense(5, name="layer")(carry)), None

        loop = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return loop(self, x, None)[0][:, :3]


@pytest.mark.slow_cases("module0")
@pytest.mark.parametrize("module", [Rematerialised(), Scanned()])
def test_a_last_dense_layer_inside_a_transformation_has_no_inputs_outside(module):
    """The representation is the outputs, as without a dense layer; there is no head."""
    task = jfcl.models.classification(module, (5,), 3)
    params, x = task.init(jax.random.key(0)), np.random.default_rng(0).standard_normal((4, 5), np.float32)
    np.testing.assert_allclose(jax.jit(task.represent)(params, x), task.apply(params, x), rtol=1e-6, atol=1e-6)
    assert task.head is None


class LinenNorm(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = False):
        return nn.Dense(3)(nn.BatchNorm(use_running_average=not train)(x))


class NnxNorm(nnx.Module):
    def __init__(self, *, rngs):
        self.norm, self.dense = nnx.BatchNorm(5, rngs=rngs), nnx.Linear(5, 3, rngs=rngs)

    def __call__(self, x):
        return self.dense(self.norm(x))


def test_without_assertions_a_module_is_refused():
    without = {"__name__": modules.__name__}
    exec(compile(inspect.getsource(modules), "modules.py", "exec", optimize=1), without)
    with pytest.raises(ValueError, match=r"models of flax.linen need Python without -O"):
        without["at_layers"](nn.Dense, None)


@pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types:FutureWarning")  # in flax's nnx.BatchNorm
@pytest.mark.parametrize("module", [LinenNorm(), NnxNorm])
def test_statistics_keep_their_type_with_wider_inputs(module):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        task = jfcl.models.classification(module, (5,), 3)
        x = np.random.default_rng(0).standard_normal((2, 6, 5))
        clients = jfcl.Clients({"x": x, "y": np.zeros((2, 6), np.int32)}, np.full(2, 6, np.int32))
        fedavg = jfcl.fedavg(task, jfcl.local_training(optax.sgd(0.1), num_steps=2, batch_size=3))
        state = jax.eval_shape(fedavg.init, jax.random.key(0), clients)
        after = jax.eval_shape(fedavg.step, jax.random.key(1), state, clients)[0]
        assert {leaf.dtype for leaf in jax.tree.leaves(after.params)} == {np.dtype(np.float32)}
