"""Frozen models, low-rank adapters and cached features, against NumPy and against training of the whole model."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from small_network import NORMAL, PLAIN, C, D, H, M, N, Net

import jfcl
from jfcl.core import parameter_names
from jfcl.core.parameters import named_parameters
from jfcl.mapping.jitted import jitted
from jfcl.mapping.memory import memory_of
from jfcl.testing import count_compilations

SIZES = np.array([6, 4, 6, 3], np.int32)
TRAINING = jfcl.local_training(optax.sgd(0.2), num_steps=3)
CPU = jfcl.client_mesh(2)


def data(sizes=SIZES, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(N, M, D)).astype(np.float32)
    return jfcl.Clients({"x": x, "y": rng.integers(0, C, (N, M)).astype(np.int32)}, np.asarray(sizes, np.int32))


class Called(Net):
    """The same with the flag as an argument of the layer's call."""

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.BatchNorm(momentum=0.5)(nn.Dense(H)(x), use_running_average=not train)
        return nn.Dense(C)(jnp.tanh(x))


class Normalised(nn.Module):
    """Its kernels are divided by their norms before they are used."""

    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(nn.WeightNorm(nn.Dense(H))(x))
        return nn.Dense(C)(x)


class Doubled(nn.Dense):
    @nn.compact
    def __call__(self, inputs, *, factor):
        return factor * super().__call__(inputs=inputs)


class Derived(nn.Module):
    """Its first layer is of a class derived from `nn.Dense`, which calls that."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(C, name="Dense_0")(inputs=jnp.tanh(Doubled(H)(inputs=x, factor=2.0)))


class Nnx(nnx.Module):
    def __init__(self, *, rngs):
        self.first = nnx.Linear(D, H, rngs=rngs)
        self.norm = nnx.BatchNorm(H, momentum=0.5, rngs=rngs)
        self.last = nnx.Linear(H, C, rngs=rngs)

    def __call__(self, x):
        return self.last(jnp.tanh(self.norm(self.first(x))))


class CalledNnx(Nnx):
    """The same with the flag as an argument of the layer's call."""

    def __call__(self, x, train: bool):
        return self.last(jnp.tanh(self.norm(self.first(x), use_running_average=not train)))


OF_NNX = jfcl.models.classification(Nnx, (D,), C)
TEXT = jfcl.models.language_model(jfcl.models.LSTMLanguageModel(9, 2, 2, 1), 4, 9)
PAIR = jfcl.models.task(
    lambda key: {"w": jax.random.normal(key, (D, H)), "v": jnp.ones((H, C))},
    lambda p, x: jnp.tanh(x @ p["w"]) @ p["v"],
    kind="classification",
)
VECTOR = jfcl.models.task(lambda key: {"v": jnp.ones(D)}, lambda p, x: x @ p["v"], kind="regression")
HALF = jfcl.models.task(
    lambda key: {"a": jnp.ones((), jnp.float16), "b": jnp.ones((), jnp.float16)},
    lambda p, x: p["a"] * x + p["b"],
    kind="regression",
)


def pretrained(task, seed=1):
    """Returns parameters, none of which is as at the start."""
    params, rng = jax.jit(task.init)(jax.random.key(seed)), np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(x + rng.uniform(0.1, 0.3, x.shape), x.dtype), jax.device_get(params))


def is_head(path):
    return path.startswith(("Dense_1/", "last/"))


def moved(task, params, seed=2):
    """Returns adapters with a B that is not zero."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), params)


# Low-rank adapters.


@pytest.mark.slow
@pytest.mark.parametrize("which", ["first", "both"])
def test_adapters_are_those_of_numpy(which):
    """The loss, and the gradient of the mean loss with respect to A, B and a bias, of the paper's equation."""
    params, alpha, rank = pretrained(PLAIN), 3.0, 2
    targets = (lambda path: path == "Dense_0/kernel") if which == "first" else (lambda path: path.endswith("kernel"))
    task = jfcl.models.lora(
        PLAIN, params, rank=rank, targets=targets, alpha=alpha, trainable=lambda path: path == "Dense_1/bias"
    )
    own = moved(task, task.init(jax.random.key(0)))
    batch = {k: v[0] for k, v in data().examples.items()}
    loss, grads = jax.value_and_grad(lambda p: task.loss(p, batch).mean())(own)

    def f64(tree):
        return {
            name: np.asarray(x, np.float64)
            for name, x in zip(parameter_names(tree), jax.tree.leaves(tree), strict=True)
        }

    base, p, scale = f64(params), f64(own), alpha / rank
    w = {k: base[f"{k}/kernel"] for k in ("Dense_0", "Dense_1")}
    for k in w:
        if f"{k}/kernel/a" in p:
            w[k] = w[k] + scale * p[f"{k}/kernel/a"] @ p[f"{k}/kernel/b"]
    x, y = np.asarray(batch["x"], np.float64), batch["y"]
    h = np.tanh(x @ w["Dense_0"] + base["Dense_0/bias"])
    o = h @ w["Dense_1"] + p["Dense_1/bias"]
    e = np.exp(o - o.max(1, keepdims=True))
    e /= e.sum(1, keepdims=True)
    d_o = (e - np.eye(C)[y]) / M
    d_w = {"Dense_1": h.T @ d_o, "Dense_0": x.T @ ((d_o @ w["Dense_1"].T) * (1 - h**2))}
    wanted = {"Dense_1/bias": d_o.sum(0)}
    for k in w:
        if f"{k}/kernel/a" in p:
            wanted[f"{k}/kernel/a"] = scale * d_w[k] @ p[f"{k}/kernel/b"].T
            wanted[f"{k}/kernel/b"] = scale * p[f"{k}/kernel/a"].T @ d_w[k]
    np.testing.assert_allclose(loss, -np.log(e[np.arange(M), y]).mean(), rtol=1e-5)
    found = f64(grads)
    assert found.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    "task",
    [
        PLAIN,
        NORMAL,
        *(jfcl.models.classification(module, (D,), C) for module in (Normalised(), Derived())),
        OF_NNX,
        PAIR,
    ],
    ids=["linen", "normal", "normalised", "derived", "nnx", "functions"],
)
def test_merged_models_predict_the_same(task):
    params, x = pretrained(task), data().examples["x"][0]
    adapted = jfcl.models.lora(task, params, rank=2, alpha=3.0, targets=(lambda path: True) if task is PAIR else None)
    start = jax.jit(adapted.init)(jax.random.key(0))
    apply, adapt = jax.jit(lambda p: task.apply(p, x)), jax.jit(lambda p: adapted.apply(p, x))
    np.testing.assert_allclose(adapt(start), apply(params), rtol=1e-5, atol=1e-6)
    own = moved(adapted, start)
    whole = jfcl.models.merged(adapted, own)
    assert jax.tree.structure(whole) == jax.tree.structure(params)
    factors, before, after = map(named_parameters, (own, params, whole))
    for name in {name[:-2] for name in factors if name.endswith("/a")}:
        added = 3 / 2 * np.float64(factors[f"{name}/a"]) @ np.float64(factors[f"{name}/b"])
        np.testing.assert_allclose(after[name] - before[name], added, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(adapt(own), apply(whole), rtol=1e-4, atol=1e-5)
    assert np.abs(np.asarray(apply(whole)) - np.asarray(apply(params))).max() > 1e-2
    if task.head is not None:  # adapters of adapters, and a part of them
        inner = jfcl.models.frozen(adapted, own, trainable=lambda path: path.endswith("/b"))
        part = inner.init(None)
        twice = jfcl.models.merged(inner, part)
        np.testing.assert_allclose(twice["Dense_0"]["kernel"], whole["Dense_0"]["kernel"], rtol=1e-6)


def test_adapters_of_a_model_in_bfloat16_are_in_bfloat16():
    params, x = pretrained(PLAIN), data().examples["x"][0]
    adapted = jfcl.models.lora(jfcl.models.in_bfloat16(PLAIN), params, rank=1)
    own = moved(adapted, adapted.init(jax.random.key(0)))
    whole = PLAIN.apply(jfcl.models.merged(adapted, own), x)
    assert np.abs(adapted.apply(own, x) - whole).max() < 0.03 * np.abs(whole).max()
    products = [e for e in jax.make_jaxpr(adapted.apply)(own, x).eqns if e.primitive.name == "dot_general"]
    of_inputs = [e for e in products if e.outvars[0].aval.shape[0] == len(x)]  # not the unused A B
    assert of_inputs and {e.outvars[0].aval.dtype for e in of_inputs} == {jnp.dtype(jnp.bfloat16)}


def test_the_start_of_adapters():
    params = pretrained(PLAIN)
    task = jfcl.models.lora(PLAIN, params, rank=2, targets=lambda path: path == "Dense_0/kernel", spread=0.5)
    draws = jax.device_get(jax.jit(jax.vmap(task.init))(jax.random.split(jax.random.key(0), 500))["Dense_0"]["kernel"])
    assert draws["a"].shape == (500, D, 2) and draws["b"].shape == (500, 2, H)
    np.testing.assert_allclose(draws["a"].std(), D**-0.5, rtol=0.05)
    np.testing.assert_allclose(draws["b"].std(), 0.5, rtol=0.05)
    fresh = jfcl.models.lora(PLAIN, params, rank=1, targets=lambda p: "Dense_0/k" in p, trainable=is_head, fresh=True)
    init = jax.jit(fresh.init)
    heads = [np.asarray(init(jax.random.key(k))["Dense_1"]["kernel"]) for k in (0, 1)]
    assert np.abs(heads[0] - heads[1]).max() > 1e-2
    np.testing.assert_array_equal(heads[0], jax.jit(PLAIN.init)(jax.random.key(0))["Dense_1"]["kernel"])
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        adapted = jfcl.models.lora(PLAIN, params, rank=1, spread=np.float64(0.5))
        assert {x.dtype for x in jax.tree.leaves(jax.eval_shape(adapted.init, jax.random.key(0)))} == {np.dtype("f4")}


@pytest.mark.slow
def test_adapters_copy_no_kernel():
    """Beside a dense layer, no array of the kernel's size is made for a client."""
    task = jfcl.models.classification(jfcl.models.MLP(C, hidden=(31,)), (29,), C)
    adapted = jfcl.models.lora(task, task.init(jax.random.key(0)), rank=1)
    own = jax.vmap(adapted.init)(jax.random.split(jax.random.key(0), 3))
    batch = {"x": np.ones((3, 2, 29), np.float32), "y": np.zeros((3, 2), np.int32)}
    grads = jax.jit(jax.vmap(jax.grad(lambda p, b: adapted.loss(p, b).mean())))
    program = grads.lower(own, batch).compile().as_text()
    assert "[3,2,31]" in program and "[3,29,31]" not in program and "[3,31,29]" not in program


# Frozen parts.


@pytest.mark.slow
@pytest.mark.parametrize("task", [PLAIN, NORMAL], ids=["plain", "normal"])
def test_frozen_is_training_with_a_learning_rate_of_zero(task):
    """Also with batch normalisation behind, of which the statistics move with the parameters of its layer."""
    params, clients = pretrained(task), data()

    def trains(path):
        return not path.startswith("Dense_0/")

    part = jfcl.models.frozen(task, params, trainable=trains)
    rates = {"moves": optax.sgd(0.2), "stays": optax.set_to_zero()}

    def label(tree):
        return jax.tree_util.tree_map_with_path(lambda p, _: "moves" if trains(p[0].key + "/") else "stays", tree)

    whole_training = jfcl.local_training(optax.multi_transform(rates, label), num_steps=3)
    states = []
    for algorithm in (
        jfcl.fedavg(task, whole_training, init_params=params),
        jfcl.fedavg(part, TRAINING),
    ):
        state = algorithm.init(jax.random.key(0), clients)
        for t in range(2):
            state, metrics = jax.jit(algorithm.step)(jax.random.key(t), state, clients)
        states.append(state.params)
    whole, rest = states
    assert parameter_names(rest) == [name for name in parameter_names(whole) if trains(name)]
    named = dict(zip(parameter_names(whole), jax.tree.leaves(whole), strict=True))
    for name, x in zip(parameter_names(rest), jax.tree.leaves(rest), strict=True):
        np.testing.assert_allclose(x, named[name], rtol=1e-5, atol=1e-6, err_msg=name)
    assert metrics["bytes_up"] == N * 4 * sum(x[0].size for x in jax.tree.leaves(rest)), "what is trained is sent"


@pytest.mark.slow_cases("argument", "attribute")
@pytest.mark.parametrize(
    "task",
    [NORMAL, *(jfcl.models.classification(net, (D,), C) for net in (Called(), Nnx, CalledNnx))],
    ids=["attribute", "argument", "nnx", "nnx argument"],
)
def test_frozen_statistics_do_not_move(task):
    params = pretrained(task)
    part = jfcl.models.frozen(task, params, trainable=is_head)
    batch = {k: v[0] for k, v in data().examples.items()}
    own, real, key = part.init(None), np.arange(M) < 4, jax.random.key(0)

    @jax.jit
    def losses(own, params):
        frozen, new = part.train_loss(key, own, batch, real)
        return frozen, new, task.train_loss(key, params, batch, real)[0], task.loss(params, batch)

    frozen, new, trained, evaluated = jax.device_get(losses(own, params))
    np.testing.assert_allclose(frozen, evaluated, rtol=1e-5)
    assert jax.tree.structure(new) == jax.tree.structure(own) and part.statistics is None
    assert np.abs(trained - evaluated).max() > 1e-3, "the whole model normalises by batches"


# Methods, mappings and memory.


def adapters_of(task, **options):
    return jfcl.models.lora(task, pretrained(task), rank=1, spread=0.5, **options)


METHODS = {
    "ifca": partial(jfcl.ifca, num_clusters=2),
    "cfl": partial(jfcl.cfl, eps_1=np.inf, eps_2=1e-6, relative=False, max_clusters=2, tree_dim=4),
    "fedper": jfcl.fedper,
}
AXES = (jfcl.sharded(CPU), jfcl.chunked(1), jax.vmap)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_methods_train_adapters_alone(name):
    task, clients = adapters_of(NORMAL), data()
    states = []
    for axis in AXES if name == "ifca" else AXES[:2]:
        algorithm = METHODS[name](task, TRAINING, client_axis=axis)
        state = algorithm.init(jax.random.key(0), clients)
        state, metrics = jax.jit(algorithm.step)(jax.random.key(1), state, clients)
        states.append(state)
    for other in states[1:]:
        for a, b in zip(jax.tree.leaves(states[0].params), jax.tree.leaves(other.params), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
        np.testing.assert_array_equal(states[0].cluster, other.cluster)
    sent = D + H + (0 if name == "fedper" else H + C)  # A and B of two kernels, of rank 1
    assert sum(x[0].size for x in jax.tree.leaves(state.params)) == sent
    assert metrics["bytes_up"] == N * 4 * sent
    if name == "fedper":
        assert {x.shape for x in jax.tree.leaves(state.personal)} == {(N, H, 1), (N, 1, C)}


@pytest.mark.slow
def test_ifca_recovers_clusters_by_adapters():
    """Two clusters with opposite labels; the head is the backbone's."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 40, D)).astype(np.float32)
    y = (x[:, :, 0] > 0).astype(np.int32)
    y[4:] = 1 - y[4:]
    clients = jfcl.Clients({"x": x, "y": y}, np.full(8, 40, np.int32))
    task = jfcl.models.lora(PLAIN, pretrained(PLAIN), rank=2, spread=0.3)
    training = jfcl.local_training(optax.sgd(0.5), num_steps=10)
    true = np.repeat([0, 1], 4)
    axis = jfcl.sharded(CPU)
    history = jfcl.simulate(
        jfcl.ifca(task, training, num_clusters=2, client_axis=axis),
        clients,
        key=jax.random.key(1),
        num_rounds=6,
        eval_every=6,
        test_clients=clients,
        true_cluster=true,
        client_axis=axis,
    )
    assert history.records[-1]["cluster_accuracy"] == 1.0 and history.records[-1]["accuracy"] > 0.95


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (jfcl.models.MLP(2, hidden=(3000, 3000)), (100,)),
        (jfcl.models.MODELS["resnet18_gn"][0](2), (32, 32, 3)),
    ],
    ids=["mlp", "resnet18"],
)
def test_a_frozen_backbone_is_in_memory_once(module, shape):
    """At most 1.2 times one backbone plus the stacked adapters of 100 clients, by the compiler's count."""
    task = jfcl.models.classification(module, shape, 2)
    adapted = jfcl.models.lora(task, pretrained(task), rank=1)
    x, y = np.ones((100, 2, *shape), np.float32), np.zeros((100, 2), np.int32)
    clients = jfcl.Clients({"x": x, "y": y}, np.full(100, 2, np.int32))
    algorithm = jfcl.local_only(adapted, TRAINING, client_axis=jfcl.chunked(1))
    key = jax.random.key(0)
    state = jax.eval_shape(algorithm.init, key, clients)
    shapes = jax.eval_shape(lambda: clients)

    def size(tree):
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))

    step = jitted(algorithm.step, donate_argnames="state")
    lowered = step.lower(key, state, shapes)
    assert len(lowered.as_text()) < 1e6, "the kernels are not written into the program"
    found = memory_of(lowered.compile())
    backbone, adapters = size(jax.eval_shape(task.init, key)), size(state.params)
    assert backbone <= found.arguments, "the compiler counts the backbone"
    assert found.total - size(shapes) <= 1.2 * backbone + adapters


def test_programs_share_large_arrays():
    weights = jnp.asarray(np.random.default_rng(0).normal(size=(150, 150)), jnp.float32)
    others = np.random.default_rng(1).normal(size=(150, 150)).astype(np.float32)  # an array of NumPy is one, too
    small = jnp.arange(150.0)

    def product(x, start, *, times, shift=None):
        step = lambda i, c: jnp.tanh(c @ weights + c @ others) + small  # noqa: E731
        return {"y": jax.lax.fori_loop(0, times, step, x) + (0.0 if shift is None else shift), "s": start + 1}

    inner = jitted(product, static_argnames=("times",), donate_argnames="start")
    outer = jitted(lambda x: inner(x, jnp.zeros(2), times=2)["y"])
    x = jnp.ones(150)
    wanted = np.ones(150)
    for _ in range(2):
        wanted = np.tanh(wanted @ (np.asarray(weights, np.float64) + others)) + np.arange(150)
    start = jnp.zeros(2)
    found = inner(x, start, times=2, shift=jnp.ones(()))
    np.testing.assert_allclose(found["y"], wanted + 1, rtol=1e-3)
    assert start.is_deleted() and found["s"].tolist() == [1, 1]
    np.testing.assert_allclose(outer(x), wanted, rtol=1e-3)
    for program in (inner.lower(x, jnp.zeros(2), times=2), outer.lower(x)):
        assert program.compile().memory_analysis().argument_size_in_bytes >= 2 * weights.nbytes
    with count_compilations() as compiled:
        inner(x, jnp.zeros(2), times=2, shift=jnp.ones(()))
        outer(x)
    assert compiled.count == 0
    sharding = jax.sharding.NamedSharding(CPU, jax.sharding.PartitionSpec("clients"))
    np.testing.assert_allclose(outer(jax.device_put(x, sharding)), wanted, rtol=1e-3)
    inner.clear_cache()
    np.testing.assert_allclose(outer(x), wanted, rtol=1e-3)


# Cached features.


def test_a_linear_model_of_features_is_the_last_layer():
    clients, params = data(), pretrained(NORMAL)
    features = jfcl.models.cache_features(NORMAL, params, clients, batch_size=7)
    assert features.examples["x"].shape == (N, M, H) and (features.examples["x"][3, 3:] == 0).all()
    whole = jfcl.models.frozen(NORMAL, params, trainable=is_head)
    last = jfcl.models.classification(jfcl.models.Linear(C), (H,), C)._replace(
        init=lambda key: {"Dense_0": params["Dense_1"]}
    )
    results = []
    for task, c in ((whole, clients), (last, features)):
        history = jfcl.simulate(
            jfcl.fedavg(task, TRAINING), c, key=jax.random.key(0), num_rounds=3, eval_every=3, test_clients=c
        )
        head = history.state.params["Dense_1" if task is whole else "Dense_0"]
        results.append((head, history.records[-1]["loss"], history.records[-1]["accuracy"]))
    for a, b in zip(jax.tree.leaves(results[0]), jax.tree.leaves(results[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


# Flax's variables, and errors.


def test_flax_variables():
    module, x = Net(True), data().examples["x"][0]
    variables = module.init(jax.random.key(3), x)
    params = jfcl.models.from_flax(variables)
    np.testing.assert_array_equal(NORMAL.apply(params, x), module.apply(variables, x))
    back = jfcl.models.to_flax(NORMAL, params)
    assert set(back) == {"params", "batch_stats"}
    jax.tree.map(np.testing.assert_array_equal, back, variables)


def test_parameters_of_another_kind_are_not_flax_variables():
    with pytest.raises(ValueError, match="params must be a nested dict, as in a flax module, got 'list'"):
        jfcl.models.to_flax(PLAIN, [np.ones(2)])


PARAMS = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), jax.eval_shape(PLAIN.init, jax.random.key(0)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jfcl.models.lora(PLAIN, PARAMS, rank=0), "rank must be an integer, at least 1"),
        (lambda: jfcl.models.lora(PLAIN, PARAMS, rank=3), "rank must be an integer, at least 1 and at most 2"),
        (lambda: jfcl.models.lora(PLAIN, PARAMS, rank=1, alpha=-1.0), "alpha must be positive"),
        (lambda: jfcl.models.lora(PLAIN, PARAMS, rank=1, spread=-1.0), "spread must be 0 or more"),
        (lambda: jfcl.models.lora(PLAIN, PARAMS, rank=1, fresh=True), "fresh must be left out without trainable"),
        (
            lambda: jfcl.models.lora(PLAIN, PARAMS, rank=1, targets=lambda p: "bias" in p),
            r"targets must be true for some of the matrices alone: Dense_0/kernel \(3, 5\), Dense_1.*got 'Dense_0/bias",
        ),
        (
            lambda: jfcl.models.lora(PLAIN, PARAMS, rank=1, targets=lambda p: p == "Dense_7/kernel"),
            "true for some of the matrices alone: Dense_0/kernel.*got 'no parameter'",
        ),
        (
            lambda: jfcl.models.lora(VECTOR, pretrained(VECTOR), rank=1, targets=lambda p: True),
            "targets must be true for some of the matrices alone: the model has none, got 'v'",
        ),
        (lambda: jfcl.models.lora(PAIR, pretrained(PAIR), rank=1), r"targets must be true.*v \(5, 2\), w \(3, 5\)"),
        (lambda: jfcl.models.lora(PLAIN, PARAMS, rank=1, trainable=is_head), "or are trainable, not both"),
        (
            lambda: jfcl.models.frozen(PLAIN, PARAMS, trainable=lambda p: "x" in p),
            "holds for no parameter; .* some of Dense_0/bias",
        ),
        (
            lambda: jfcl.models.frozen(NORMAL, pretrained(NORMAL), trainable=lambda p: "/mean" in p),
            "trainable holds for no parameter; .* some of BatchNorm_0/bias",
        ),
        (
            lambda: jfcl.models.frozen(PLAIN, PARAMS, trainable=lambda p: True),
            "holds for all parameters; .* some of Dense_0/bias",
        ),
        (lambda: jfcl.models.frozen(PLAIN, PARAMS, trainable="Dense_1"), "trainable must be a function"),
        (
            lambda: jfcl.models.frozen(PLAIN, {"Dense_0": PARAMS["Dense_0"]}, trainable=is_head),
            "params must have the structure.*Dense_1/bias is missing",
        ),
        (
            lambda: jfcl.models.frozen(PLAIN, {"params": PARAMS}, trainable=is_head),
            "jfcl.models.from_flax.*Dense_0/bias is missing",
        ),
        (
            lambda: jfcl.models.lora(PLAIN, jax.tree.map(lambda x: x[:1], PARAMS), rank=1),
            r"Dense_0/bias is \(1,\), where the task has \(5,\)",
        ),
        (lambda: jfcl.models.frozen(PLAIN, jax.tree.map(lambda x: x * np.nan, PARAMS), trainable=is_head), "finite"),
        (lambda: jfcl.models.frozen(HALF, {"a": 1.0, "b": np.float32(70_000)}, trainable=lambda p: p == "a"), "finite"),
        (
            lambda: jfcl.models.cache_features(OF_NNX, pretrained(OF_NNX), data()),
            "task must be of a flax.linen module",
        ),
        (
            lambda: jfcl.models.cache_features(TEXT, pretrained(TEXT), data()),
            "task must be of a flax.linen module, from classification or regression",
        ),
        (
            lambda: jfcl.models.in_bfloat16(jfcl.models.lora(PLAIN, PARAMS, rank=1)),
            r"task must be one with all its parameters: give in_bfloat16\(task\) to frozen or lora",
        ),
        (lambda: jfcl.models.merged(PLAIN, PARAMS), "task must be made by jfcl.models.frozen or lora"),
        (lambda: jfcl.models.lora(Net(), PARAMS, rank=1), "task must be a Task, .* got 'Net'"),
        (lambda: jfcl.models.merged(Net(), PARAMS), "task must be a Task, .* got 'Net'"),
        (lambda: jfcl.models.to_flax(Net(), PARAMS), "task must be a Task, .* got 'Net'"),
        (lambda: jfcl.models.lora(PLAIN, PARAMS, rank=1, alpha="3"), "alpha must be positive and finite.* got '3'"),
        (lambda: jfcl.models.lora(PLAIN, PARAMS, rank=1, spread=None), "spread must be 0 or more.* got None"),
        (
            lambda: jfcl.models.frozen(PLAIN, jax.tree.map(lambda p: p.astype(complex), PARAMS), trainable=is_head),
            "must be real numbers, as the task's, got 'complex numbers'",
        ),
        (
            lambda: jfcl.models.from_flax({"params": np.ones(3)}),
            "variables must be a dict of flax's collections, nested dicts",
        ),
        (lambda: jfcl.models.from_flax({"Dense_0": {}}), 'variables must be a dict of flax.*"params" among'),
    ],
)
def test_refuses(make, message):
    with pytest.raises(ValueError, match=message):
        make()


class Decoder(nn.Module):
    """Uses a kernel in its layer and, transposed, in the inputs of another one, or in the outputs."""

    last: bool

    @nn.compact
    def __call__(self, x):
        layer = nn.Dense(3, name="encoder")
        hidden = nn.relu(layer(x))
        decoded = hidden @ layer.variables["params"]["kernel"].T
        return decoded if self.last else nn.Dense(4)(jnp.concatenate([hidden, decoded], axis=1))


@pytest.mark.slow_cases("apply-*")
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("first", ["apply", "represent"])
def test_adapters_of_a_kernel_with_a_second_use_are_summed(last, first):
    """In each function of the task, whichever is called first."""
    task = jfcl.models.classification(Decoder(last), (4,), 4)
    adapted = jfcl.models.lora(task, task.init(jax.random.key(0)), rank=2, spread=0.5)
    own, x = adapted.init(jax.random.key(1)), np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    merged = jfcl.models.merged(adapted, own)
    for name in sorted(["apply", "represent"], key=lambda name: name != first):
        got, want = jax.jit(getattr(adapted, name))(own, x), jax.jit(getattr(task, name))(merged, x)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_adapters_are_beside_a_kernel_in_one_function_and_summed_in_another():
    class Gated(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = nn.Dense(4, name="out", use_bias=False)
            hidden = nn.Dense(6, name="in", use_bias=False)(x)
            return layer(hidden) + nn.tanh(hidden) @ layer.variables["params"]["kernel"]

    task = jfcl.models.classification(Gated(), (5,), 4)
    adapted = jfcl.models.lora(task, task.init(jax.random.key(0)), rank=2, spread=0.5)
    own, x = adapted.init(jax.random.key(1)), jax.random.normal(jax.random.key(2), (3, 5))
    adapted.represent(own, x)  # where the second kernel has no use
    np.testing.assert_allclose(
        adapted.apply(own, x), task.apply(jfcl.models.merged(adapted, own), x), rtol=1e-4, atol=1e-5
    )
