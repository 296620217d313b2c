"""Training a first dense layer in the span of the client's examples, against plain loops in float64."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jfcl
from jfcl.core import dense_start, get_parameter
from jfcl.testing import check_algorithm
from jfcl.training import local, span
from jfcl.training.losses import mean_loss, under_all

D, H, OUT, M = 12, 5, 3, 8
HEAVY_BALL = optax.sgd(0.02, momentum=0.9)
MLP = jfcl.models.regression(jfcl.models.MLP(OUT, hidden=(H,)), (D,))


def data(seed=0, m=M, size=M):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(m, D)).astype(np.float32), rng.normal(size=(m, OUT)).astype(np.float32)
    x[size:], y[size:] = np.nan, np.inf
    return {"x": x, "y": y}


def slope64(p, x, y):
    """The mean squared error of the MLP and its gradient, by hand."""
    z = x @ p["Dense_0"]["kernel"] + p["Dense_0"]["bias"]
    h = np.maximum(z, 0)
    error = h @ p["Dense_1"]["kernel"] + p["Dense_1"]["bias"] - y
    d_out = 2 * error / len(x)
    d_z = (d_out @ p["Dense_1"]["kernel"].T) * (z > 0)
    first = {"kernel": x.T @ d_z, "bias": d_z.sum(axis=0)}
    second = {"kernel": h.T @ d_out, "bias": d_out.sum(axis=0)}
    return (error**2).sum() / len(x), {"Dense_0": first, "Dense_1": second}


def train64(params, batches, *, lr, momentum=0.0, prox=0.0, anchor=None):
    """Gradient descent with heavy-ball momentum over `batches` of `(x, y)`; the model and the mean loss."""
    p = jax.tree.map(lambda v: np.asarray(v, np.float64), params)
    start = p if anchor is None else jax.tree.map(lambda v: np.asarray(v, np.float64), anchor)
    buffer, losses = jax.tree.map(np.zeros_like, p), []
    for x, y in batches:
        loss, grads = slope64(p, x.astype(np.float64), y.astype(np.float64))
        losses.append(loss)
        grads = jax.tree.map(lambda g, v, s: g + prox * (v - s), grads, p, start)
        buffer = jax.tree.map(lambda b, g: momentum * b + g, buffer, grads)
        p = jax.tree.map(lambda v, b: v - lr * b, p, buffer)
    return p, np.mean(losses)


def drawn_rows(key, training, size, m):
    """The rows of every batch, from the same draws: what `local_training` says about them, spelt out."""
    key = jax.random.split(key)[0]

    def order(key):
        return np.argsort(np.asarray(jax.random.uniform(key, (m,)))[:size])

    b = training.batch_size
    if b is None or b >= m:
        yield from [np.arange(size)] * (training.num_steps or training.num_epochs)
    elif training.num_steps:
        for t in range(training.num_steps):
            rows = order(key)[(t * b + np.arange(b)) % size]
            yield rows[: min(b, size)]
    else:
        for e in range(training.num_epochs):
            rows = order(jax.random.fold_in(key, e))
            yield from [rows[first : first + b] for first in range(0, size, b)]


@cache
def compiled(task, training):
    def run(key, params, examples, size, **options):
        opt_state = local.start_optimizer(training, params, jnp.zeros((), jnp.int32))
        return local.train(task, training, key, params, examples, size, opt_state, **options)

    return jax.jit(run)


def run(task, training, params, examples, size, key, **options):
    return compiled(task, training)(key, params, examples, jnp.asarray(size, jnp.int32), **options)


def as_optax_needs(function, *args, **kwargs):
    """Some of optax adds integers to floats."""
    with jax.numpy_dtype_promotion("standard"):
        return function(*args, **kwargs)


def assert_close(got, want, tolerance=2e-5):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=jax.tree_util.keystr(path))


@pytest.mark.slow_cases(
    "{'num_epochs': 3, 'batch_size': 3}",
    "{'num_steps': 1}",
    "{'num_steps': 6}",
    "{'num_steps': 7, 'batch_size': 3}",
    "{'num_epochs': 4}",
)
@pytest.mark.parametrize(
    "options",
    [
        {"num_steps": 1},
        {"num_steps": 6},
        {"num_epochs": 4},
        {"num_steps": 7, "batch_size": 3},
        {"num_epochs": 3, "batch_size": 3},
        {"num_steps": 5, "batch_size": 3, "prox": 0.7},
    ],
    ids=str,
)
@given(seed=st.integers(0, 1000), size=st.integers(1, M))
def test_against_plain_descent_in_float64(options, seed, size):
    """Padding is NaN; batches wrap where they are larger than the client; the last of an epoch may be short."""
    training = jfcl.local_training(HEAVY_BALL, span="always", **options)
    key, examples, params = jax.random.key(seed), data(seed, size=size), MLP.init(jax.random.key(seed + 1))
    batches = [(examples["x"][rows], examples["y"][rows]) for rows in drawn_rows(key, training, size, M)]
    want, loss = train64(params, batches, lr=0.02, momentum=0.9, prox=options.get("prox", 0.0))
    got = run(MLP, training, params, examples, size, key)
    assert got.opt_state == ()  # it did train in the span
    assert_close(got.params, want)
    np.testing.assert_allclose(got.loss, loss, rtol=1e-4)
    assert got.num_steps == len(batches)


@pytest.mark.slow_cases("{'num_steps': 1}", "{'num_steps': 7, 'batch_size': 3}")
@pytest.mark.parametrize("options", [{"num_steps": 1}, {"num_steps": 6}, {"num_steps": 7, "batch_size": 3}], ids=str)
def test_a_pull_to_another_model_adds_one_direction(options):
    training = jfcl.local_training(HEAVY_BALL, span="always", prox=5.0, **options)
    key, examples, size = jax.random.key(3), data(3, size=6), 6
    params, anchor = (jax.tree.map(lambda p, i=i: p + 0.1 * i, MLP.init(jax.random.key(i))) for i in (1, 2))
    batches = [(examples["x"][rows], examples["y"][rows]) for rows in drawn_rows(key, training, size, M)]
    want, loss = train64(params, batches, lr=0.02, momentum=0.9, prox=5.0, anchor=anchor)
    got = run(MLP, training, params, examples, size, key, anchor=anchor)
    assert got.opt_state == ()
    assert_close(got.params, want)
    np.testing.assert_allclose(got.loss, loss, rtol=1e-4)


def test_outputs_that_an_optimizer_mixes_are_not_pulled_in_the_span():
    centralized, params = optax.chain(optax.centralize(), optax.sgd(0.05)), MLP.init(jax.random.key(0))
    for pulled in (False, True):
        found = as_optax_needs(span.in_span, dense_start(MLP), centralized, params, pulled=pulled)
        assert (found is None) is pulled


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [
        optax.sgd(0.05),
        optax.sgd(0.05, momentum=0.8, nesterov=True),
        optax.chain(optax.ema(0.9, debias=True), optax.sgd(0.05)),
        optax.sgd(optax.exponential_decay(0.05, 2, 0.5)),
        optax.MultiSteps(optax.sgd(0.05), 2).gradient_transformation(),
        optax.multi_transform(
            {"sgd": optax.sgd(0.05), "adam": optax.adam(0.01)},
            lambda params: jax.tree.map(lambda p: "sgd" if p.ndim == 2 else "adam", params),
        ),
        optax.chain(optax.centralize(), optax.sgd(0.05)),  # subtracts means over the outputs: still in the span
    ],
    ids=["sgd", "nesterov", "ema", "schedule", "accumulated", "adam on biases", "centralize"],
)
def test_optimizers_agree_with_plain_training(optimizer):
    key, params = jax.random.key(0), MLP.init(jax.random.key(1))
    plain, spanned = (
        as_optax_needs(
            run,
            MLP,
            jfcl.local_training(optimizer, num_steps=6, batch_size=3, keep="schedule", span=how),
            params,
            data(),
            M,
            key,
        )
        for how in ("never", "always")
    )
    assert_close(spanned.params, plain.params)
    np.testing.assert_allclose(spanned.loss, plain.loss, rtol=1e-5)
    assert plain.opt_state != () and spanned.opt_state == ()


@pytest.mark.slow_cases("False")
@pytest.mark.parametrize("squeeze", [False, True])
def test_a_single_layer_and_a_kernel_without_width(squeeze):
    """`Linear`, and a task of a user's own whose kernel is a vector."""
    examples = data()
    if squeeze:

        def line(params, x):
            return x @ params["w"] + params["b"]

        def cost(outputs, batch):
            return 0.5 * (outputs - batch["y"]) ** 2

        start = jfcl.DenseStart("w", lambda x: x, lambda params, products, x: products + params["b"], whole=line)
        task = jfcl.Task(lambda key: {"w": jnp.ones(D), "b": jnp.ones(())}, line, cost, dense_start=start)
        examples["y"] = examples["y"][:, 0]
    else:
        task = jfcl.models.regression(jfcl.models.Linear(OUT), (D,))
    params = task.init(jax.random.key(1))
    plain, spanned = (
        run(
            task, jfcl.local_training(optax.sgd(0.02, 0.5), num_steps=9, span=s), params, examples, M, jax.random.key(0)
        )
        for s in ("never", "always")
    )
    assert spanned.opt_state == ()
    assert_close(spanned.params, plain.params)


def test_padding_changes_no_bit_and_a_client_without_examples_learns_nothing():
    params, key = MLP.init(jax.random.key(1)), jax.random.key(0)
    training = jfcl.local_training(optax.sgd(0.02, momentum=0.9), span="always", num_epochs=2, batch_size=2)
    dirty = data(size=5)
    clean = jax.tree.map(lambda x: np.where(np.isfinite(x), x, 0).astype(x.dtype), dirty)
    a, b = (jax.tree.map(np.asarray, run(MLP, training, params, e, 5, key)) for e in (clean, dirty))
    assert all((x == y).all() for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    nothing = run(MLP, training, params, data(size=0), 0, key)
    assert_close(nothing.params, params, tolerance=0)


@pytest.mark.slow
def test_products_may_be_given():
    params, examples, key = MLP.init(jax.random.key(1)), data(size=6), jax.random.key(0)
    x = np.where(np.isfinite(examples["x"]), examples["x"], 0)
    products = jnp.asarray(x @ np.asarray(params["Dense_0"]["kernel"]))
    for options in ({"num_steps": 1}, {"num_steps": 5}, {"num_epochs": 2, "batch_size": 3}):
        training = jfcl.local_training(optax.sgd(0.02), span="always", **options)
        alone = run(MLP, training, params, examples, 6, key)
        assert_close(run(MLP, training, params, examples, 6, key, products=products).params, alone.params)
        other = run(MLP, training, params, examples, 6, key, products=products + 1)  # they are used, not computed again
        assert abs(other.loss - alone.loss) > 1e-3


# ---------------------------------------------------------------------------------------------------------------


def test_the_first_layer_that_training_leaves(form):
    x, a = data()["x"], np.random.default_rng(1).normal(size=(M, H)).astype(np.float32)
    begin, start = MLP.init(jax.random.key(0)), dense_start(MLP)
    inside = span.Span(jnp.asarray(x), jnp.zeros((M, H)), None)
    left = span.leave(start, inside, jax.tree.map(jnp.zeros_like, begin) | {"Dense_0": {"kernel": a, "bias": 0}}, begin)
    want = {"kernel": x.astype(np.float64).T @ a, "bias": a.astype(np.float64).sum(axis=0)}
    assert_close(left["Dense_0"], jax.tree.map(np.add, begin["Dense_0"], want))


def test_costs():
    """Counted by hand: products and gradient each step, against X W_0, X X^T, G A each step, and X^T A; and passes."""
    one_pass = span.PASS * 784 * 200
    ends = 2 * 200 * 784 * 200 + one_pass
    assert span.plain_cost(200, 200, 10, 784, 200) == 10 * (2 * 200 * 784 * 200 + one_pass)
    assert span.span_cost(200, 200, 10, 784, 200) == ends + 200 * 200 * 784 + 10 * 200 * 200 * 200
    given = ends - 200 * 784 * 200
    assert span.span_cost(200, 20, 30, 784, 200, has_products=True) == given + 200 * 200 * 784 + 30 * 20 * 200 * 200
    assert span.span_cost(200, 200, 1, 784, 200) == ends  # one step on all examples needs no X X^T
    assert span.span_cost(200, 200, 1, 784, 200, has_products=True) == given
    pull = 200 * 784 * 200 + one_pass  # X V, and a pass over V
    assert span.span_cost(200, 200, 1, 784, 200, pulled=True) == ends + pull


@pytest.mark.parametrize(
    ("m", "options", "given", "wanted"),
    [
        (200, {"num_steps": 10}, False, True),
        (200, {"num_steps": 10, "span": "never"}, False, False),
        (200, {"num_steps": 10, "batch_size": 20}, False, False),  # one epoch does not quite repay X X^T
        (100, {"num_steps": 5, "batch_size": 20}, False, True),  # but with fewer examples, for the fewer passes
        (200, {"num_epochs": 10, "batch_size": 20}, False, True),
        (200, {"num_steps": 1}, False, False),  # the same
        (200, {"num_steps": 1}, True, True),
        (5000, {"num_steps": 1}, True, True),
        (5000, {"num_steps": 10}, True, False),  # more examples than inputs
        (200, {"num_steps": 10, "prox": 0.1}, False, True),
        (200, {"num_steps": 10, "keep": "schedule"}, False, True),
        (200, {"num_steps": 10, "keep": "everything"}, False, False),
        (200, {"num_steps": 10, "augment": lambda key, batch: batch}, False, False),
    ],
)
def test_auto_takes_what_costs_less(m, options, given, wanted):
    task = jfcl.models.classification(jfcl.models.MLP(10), (28, 28, 1), 10)
    params = jax.eval_shape(task.init, jax.random.key(0))
    training = jfcl.local_training(optax.sgd(0.1, momentum=0.9), **options)
    start = local.start_in_span(task, training, params, m, False, given)
    assert (start is not None) is wanted


@pytest.mark.slow
def test_auto_leaves_alone_what_is_not_linear():
    task = jfcl.models.classification(jfcl.models.MLP(10), (28, 28, 1), 10)
    params = jax.eval_shape(task.init, jax.random.key(0))
    for optimizer, wanted in ((optax.sgd(0.1), True), (optax.adam(0.1), False)):
        training = jfcl.local_training(optimizer, num_steps=10)
        start = as_optax_needs(local.start_in_span, task, training, params, 200, False, False)
        assert (start is not None) is wanted


def mix_inputs(updates, params):
    return jax.tree.map(lambda g: g - g.mean(axis=0, keepdims=True) if g.ndim == 2 else g, updates)


def of_size(least):
    return lambda params: jax.tree.map(lambda p: p.size > least, params)


@pytest.mark.slow_cases(
    "adamw", "adaptive", "lars", "late decay", "masked decay", "noise", "norm 1e-3", "norm 1e3", "radam", "rmsprop"
)
@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adam(0.1),
        optax.adamw(0.1),
        optax.rmsprop(0.1),
        optax.sign_sgd(0.1),
        optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1)),
        optax.chain(
            optax.add_decayed_weights(0.1, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)), optax.sgd(1.0)
        ),
        optax.chain(optax.clip_by_global_norm(1e3), optax.sgd(0.1)),
        optax.chain(optax.clip_by_global_norm(1e-3), optax.sgd(0.1)),
        optax.chain(optax.clip(1.0), optax.sgd(0.1)),
        optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)),
        optax.chain(optax.stateless(mix_inputs), optax.sgd(0.1)),  # linear, but outside of the span
        optax.noisy_sgd(0.1, key=jax.random.key(0)),
        optax.lars(0.1),
        optax.radam(0.1),  # linear for the first five steps
        optax.chain(optax.add_decayed_weights(optax.linear_schedule(0.0, 0.1, 9, 5000)), optax.sgd(0.1)),
        optax.chain(optax.add_decayed_weights(0.1, mask=of_size(8)), optax.sgd(0.1)),
        optax.chain(optax.masked(optax.clip(1.0), of_size(10**4)), optax.sgd(0.1)),  # of many examples alone
        optax.masked(optax.sgd(0.1), {"other": True}),  # cannot be tried
        optax.set_to_zero(),  # nothing to be seen
    ],
    ids=[
        *("adam", "adamw", "rmsprop", "sign", "decay", "masked decay", "norm 1e3", "norm 1e-3", "clip", "adaptive"),
        *("mixed inputs", "noise", "lars", "radam", "late decay", "decay by size", "clip by size"),
        *("another tree", "zero"),
    ],
)
def test_optimizers_that_leave_the_span_are_refused(optimizer):
    params = MLP.init(jax.random.key(0))
    training = jfcl.local_training(optimizer, num_steps=2, span="always", keep="schedule")
    with pytest.raises(ValueError, match=r"span must be auto or never here: the optimizer is not linear.*got 'always'"):
        as_optax_needs(local.start_in_span, MLP, training, params, M, False, False)


@pytest.mark.parametrize(
    ("task", "options", "words"),
    [
        (MLP._replace(apply=lambda params, x: MLP.apply(params, x)), {}, "no dense_start"),
        (MLP, {"augment": lambda key, batch: batch}, "augment changes"),
        (MLP, {"keep": "everything"}, "from outside"),
    ],
)
def test_always_says_why_it_cannot(task, options, words):
    params = task.init(jax.random.key(0))
    training = jfcl.local_training(optax.sgd(0.1), num_steps=2, span="always", **options)
    with pytest.raises(ValueError, match=words):
        local.start_in_span(task, training, params, M, False, False)


def test_an_unknown_span_is_refused():
    with pytest.raises(ValueError, match="did you mean 'always'"):
        jfcl.local_training(optax.sgd(0.1), num_steps=1, span="alway")


@pytest.mark.slow
def test_hyperparameters_may_be_tracers():
    """A factory is called inside `vmap`: the learning rate has no value when the optimiser is tried."""
    params, key = MLP.init(jax.random.key(1)), jax.random.key(0)

    def final(lr, how, make):
        training = jfcl.local_training(make(lr), num_steps=5, span=how)
        return local.train(MLP, training, key, params, data(), jnp.int32(M), training.optimizer.init(params))

    rates = jnp.array([0.0, 0.01, 0.05])
    plain, spanned = (
        jax.jit(jax.vmap(partial(final, how=how, make=lambda lr: optax.sgd(lr, 0.9))))(rates)
        for how in ("never", "always")
    )
    assert_close(spanned.params, plain.params)
    with pytest.raises(ValueError, match="not linear"):
        as_optax_needs(jax.vmap(partial(final, how="always", make=optax.adam)), rates)


def test_it_is_tried_once_per_optimizer(monkeypatch):
    tried, attempt = [], span._try
    monkeypatch.setattr(span, "_try", lambda *args: tried.append(1) or attempt(*args))
    optimizer, params = optax.sgd(0.1), MLP.init(jax.random.key(0))
    for _ in range(2):
        assert span.stays_in_span(optimizer, params, "Dense_0/kernel", None, False)
    assert len(tried) == 1
    assert not as_optax_needs(span.stays_in_span, optax.adam(0.1), params, "Dense_0/kernel", None, False)
    assert len(tried) == 2


# ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow_cases(
    "MLP(\\n    # attributes\\n    num_outputs = 3\\n    hidden = (200,)\\n)-(4, 2)",
    "MLP(\\n    # attributes\\n    num_outputs = 3\\n    hidden = (6, 5)\\n)-(7,)",
)
@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (jfcl.models.Linear(3), (4, 2)),
        (jfcl.models.MLP(3), (4, 2)),
        (jfcl.models.MLP(3, hidden=(6, 5)), (7,)),
        (jfcl.models.MLP(3, hidden=()), (7,)),
    ],
    ids=str,
)
def test_a_dense_start_is_the_model(module, shape):
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(6, *shape)).astype(np.float32), "y": rng.integers(0, 3, 6).astype(np.int32)}
    task = jfcl.models.classification(module, shape, 3)
    params, start = task.init(jax.random.key(0)), dense_start(task)
    params = jax.tree.map(lambda p: p + 0.1, params)  # biases begin at 0
    products = batch["x"].reshape(6, -1) @ np.asarray(get_parameter(params, start.kernel))
    outputs = start.apply(params, products, batch["x"])
    np.testing.assert_allclose(outputs, task.apply(params, batch["x"]), rtol=1e-5, atol=1e-6)
    used = jax.grad(lambda p: start.apply(p, products, batch["x"]).sum())(params)
    assert not get_parameter(used, start.kernel).any()


@pytest.mark.parametrize("kind", [jnp.float16, jnp.bfloat16], ids=["float16", "bfloat16"])
def test_examples_of_16_bits_train_like_their_float32(kind):
    """In 16 bits, products would have two or three digits, and those of two examples exceed the largest float16."""
    rng = np.random.default_rng(0)
    task = jfcl.models.classification(jfcl.models.MLP(3, hidden=(5,)), (D,), 3)
    narrow = jnp.asarray(200 * rng.random((M, D)), kind)
    y, params = rng.integers(0, 3, M).astype(np.int32), task.init(jax.random.key(0))
    training = jfcl.local_training(optax.sgd(1e-5), num_steps=4, span="always")
    with jax.numpy_dtype_promotion("standard"):
        found, wanted = (
            run(task, training, params, {"x": x, "y": y}, M, jax.random.key(0))
            for x in (narrow, narrow.astype(jnp.float32))
        )
        models = jax.tree.map(lambda p: p[None], params)
        compared = under_all(task, models)({"x": narrow, "y": y}, jnp.int32(M))[0]
        alone = mean_loss(task, params, {"x": narrow, "y": y}, jnp.int32(M))
    assert_close(found.params, wanted.params, 1e-6)
    np.testing.assert_allclose(compared[0], alone, rtol=1e-5)
    moved = get_parameter(found.params, "Dense_0/kernel") - get_parameter(params, "Dense_0/kernel")
    assert np.abs(moved).max() > 1e-4


def test_a_cost_of_ones_own_is_that_in_the_span():
    task = MLP._replace(cost=lambda outputs, batch: jnp.abs(outputs - batch["y"]).sum(axis=1))
    params = task.init(jax.random.key(1))
    ends = [
        run(
            of, jfcl.local_training(optax.sgd(0.01), num_steps=3, span=how), params, data(), M, jax.random.key(0)
        ).params
        for of, how in ((task, "never"), (task, "always"), (MLP, "never"))
    ]
    assert_close(*ends[:2])
    assert float(jnp.abs(ends[1]["Dense_0"]["kernel"] - ends[2]["Dense_0"]["kernel"]).max()) > 1e-4


def test_modules_that_are_not_known_have_none():
    class Scaled(jfcl.models.MLP):
        def __call__(self, x):
            return super().__call__(2 * x)

    assert dense_start(jfcl.models.classification(Scaled(3), (4,), 3)) is None
    assert dense_start(jfcl.models.classification(jfcl.models.CNNMnist(10), (28, 28, 1), 10)) is None


# ---------------------------------------------------------------------------------------------------------------

SMALL = jfcl.models.regression(jfcl.models.Linear(1), (4,), half=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "options"),
    [
        (jfcl.fedavg, {}),
        (jfcl.ifca, {"num_clusters": 2}),
        (jfcl.ifca, {"num_clusters": 2, "stable_rounds": 2, "weights": "size"}),
        (jfcl.ditto, {"lam": 0.5}),
    ],
    ids=["fedavg", "ifca", "ifca with the shortcut", "ditto"],
)
def test_methods_keep_their_promises_in_the_span(method, options):
    def make(task, training, client_axis=None):
        return method(SMALL, training._replace(span="always"), client_axis=client_axis, **options)

    check_algorithm(make, examples_tolerance=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "client_axis", "options"),
    [
        (1, jax.vmap, {}),
        (10, jfcl.chunked(1), {}),
        (10, jfcl.chunked(3), {"stable_rounds": 1}),
    ],
    ids=["one step", "one at a time", "shortcut"],
)
def test_ifca_ends_the_same_with_and_without(steps, client_axis, options):
    """Three rounds of a network on four clusters of clients, as in IFCA's experiments but smaller."""
    rng = np.random.default_rng(0)
    n, m, d = 8, 20, 100
    means = rng.normal(size=(4, 10, d)).astype(np.float32)
    y = rng.integers(0, 10, (n, m)).astype(np.int32)
    x = means[np.arange(n)[:, None] % 4, y] + 0.5 * rng.normal(size=(n, m, d)).astype(np.float32)
    clients = jfcl.Clients({"x": x, "y": y}, rng.integers(m // 2, m + 1, n).astype(np.int32))
    task = jfcl.models.classification(jfcl.models.MLP(10, hidden=(30,)), (d,), 10)
    start = jax.vmap(task.init)(jax.random.split(jax.random.key(1), 4))
    ends = {}
    for name, of, how in (
        ("plain", task._replace(dense_start=None), "never"),
        ("looked", task, "never"),
        ("span", task, "auto"),
    ):
        training = jfcl.local_training(optax.sgd(0.1), num_steps=steps, span=how)
        in_span = local.start_in_span(of, training, task.init(jax.random.key(0)), m, False, True)
        assert (in_span is not None) is (name == "span")
        algorithm = jfcl.ifca(of, training, num_clusters=4, client_axis=client_axis, init_params=start, **options)
        ends[name] = jax.jit(partial(jfcl.rollout, algorithm, num_rounds=3))(clients, key=jax.random.key(0))
    for name in ("looked", "span"):
        state, metrics = ends[name]
        assert (state.cluster == ends["plain"][0].cluster).all()
        np.testing.assert_allclose(metrics["loss"], ends["plain"][1]["loss"], rtol=1e-4)
        for a, b, s in zip(*map(jax.tree.leaves, (state.params, ends["plain"][0].params, start)), strict=True):
            assert jnp.linalg.norm(a - b) <= 1e-3 * jnp.linalg.norm(b - s)


def biases(yes, no):
    """The function of parameters that names biases `yes`, and others `no`."""
    return lambda params: jax.tree_util.tree_map_with_path(
        lambda path, _: yes if "bias" in str(path[-1]) else no, params
    )


@pytest.mark.parametrize(
    "apart",
    [
        optax.multi_transform({"b": optax.sgd(0.3), "w": optax.sgd(0.1)}, biases("b", "w")),
        optax.chain(optax.add_decayed_weights(0.5, mask=biases(True, False)), optax.sgd(0.1)),
    ],
    ids=["rate", "decay"],
)
def test_a_bias_that_moves_otherwise_than_the_kernel_is_trained_beside_the_span(apart):
    """An optimiser may have another rate for biases, as `optax.multi_transform` does, or decay them alone."""
    params, start = jax.tree.map(lambda p: p + 0.1, MLP.init(jax.random.key(1))), dense_start(MLP)
    assert span.in_span(start, optax.sgd(0.1), params) is start
    assert span.in_span(start, apart, params) == start._replace(bias=None)
    ends = [
        run(MLP, jfcl.local_training(apart, num_steps=4, span=how), params, data(), M, jax.random.key(0)).params
        for how in ("never", "always")
    ]
    assert_close(*ends)
    assert float(jnp.abs(ends[1]["Dense_0"]["bias"] - params["Dense_0"]["bias"]).max()) > 1e-3
