import warnings
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

import jfcl
from jfcl.core import Clients, Task
from jfcl.training.local import KEEP, draw_batch, local_training, optimizer_at, start_optimizer, steps_per_round, train
from jfcl.training.losses import mean_loss
from jfcl.training.optimizer import rekeyed

LINEAR = Task(
    init=lambda key: {"w": jnp.zeros(3)},
    apply=lambda p, x: x @ p["w"],
    cost=lambda outputs, batch: 0.5 * (outputs - batch["y"]) ** 2,
)
# Its gradient says which examples a batch held: a step of rate 1 lowers w[i] by (times i is in it) / (batch length).
COUNTING = Task(
    init=lambda key: {"w": jnp.zeros(16)},
    apply=lambda p, x: p["w"][x],
    cost=lambda outputs, batch: outputs,
)


@cache
def program(task, training):
    def run(key, params, examples, size, steps_done, opt_state, options):
        if opt_state is None:
            opt_state = start_optimizer(training, params, steps_done)
        return train(task, training, key, params, examples, size, opt_state, **options)

    return jax.jit(run)


def do(task, training, params, examples, size, key=0, steps_done=0, opt_state=None, **options):
    """What `train` returns, in NumPy's arrays."""
    key, size, steps_done = jax.random.key(key), np.int32(size), np.int32(steps_done)
    return jax.device_get(program(task, training)(key, params, examples, size, steps_done, opt_state, options))


def regression(seed=0, m=6):
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(m, 3)).astype(np.float32), "y": rng.normal(size=m).astype(np.float32)}


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("prox", [0.0, 0.7])
def test_full_batch_steps_against_float64(momentum, prox):
    data, size, start = regression(), 4, np.array([1.0, -1.0, 0.5])
    x, y = data["x"][:size].astype(np.float64), data["y"][:size].astype(np.float64)
    w, buffer, losses = start.copy(), np.zeros(3), []
    for _ in range(5):
        residual = x @ w - y
        losses.append(0.5 * np.mean(residual**2))
        gradient = x.T @ residual / size + prox * (w - start)
        buffer = momentum * buffer + gradient
        w = w - 0.1 * buffer
    training = local_training(optax.sgd(0.1, momentum=momentum), num_steps=5, prox=prox)._replace(each_step=prox > 0)
    out = do(LINEAR, training, {"w": jnp.asarray(start, jnp.float32)}, data, size)
    np.testing.assert_allclose(out.params["w"], w, rtol=1e-5)
    np.testing.assert_allclose(out.loss, np.mean(losses), rtol=1e-5)
    assert out.num_steps == 5
    np.testing.assert_allclose(out.losses, losses if prox > 0 else (), rtol=1e-5)


SIXTEEN = {"x": np.arange(16, dtype=np.int32)}


@cache
def by_epochs(batch, epochs):
    return local_training(optax.sgd(1.0), num_epochs=epochs, batch_size=batch)._replace(each_step=True)


@given(size=st.integers(1, 16), batch=st.sampled_from([1, 5]), epochs=st.just(2))
def test_an_epoch_visits_every_example_once(size, batch, epochs):
    out = do(COUNTING, by_epochs(batch, epochs), {"w": np.zeros(16, np.float32)}, SIXTEEN, size)
    batches = -(-size // batch)
    assert out.num_steps == epochs * batches
    assert out.losses.shape == (epochs * -(-16 // batch),) and not out.losses[out.num_steps :].any()
    np.testing.assert_allclose(out.losses.sum(), float(out.loss) * float(out.num_steps), rtol=1e-5)
    last = size - (batches - 1) * batch  # the last batch is smaller: its examples weigh 1 / last
    visits = -np.asarray(out.params["w"], np.float64)
    assert (visits[size:] == 0).all()
    assert np.all(visits[:size] > 0)
    np.testing.assert_allclose(visits.sum(), epochs * batches, rtol=1e-5)
    if last == batch:
        np.testing.assert_allclose(visits[:size], epochs / batch, rtol=1e-5)
    else:
        full, short = 1 / batch, 1 / last
        shares = (visits[:size] - epochs * full) / (short - full)  # how often each was in a short batch
        np.testing.assert_allclose(shares, np.round(shares), atol=1e-3)
        np.testing.assert_allclose(np.round(shares).sum(), epochs * last)


@cache
def by_steps(batch, steps):
    return local_training(optax.sgd(1.0), num_steps=steps, batch_size=batch)


@given(size=st.integers(1, 16), batch=st.sampled_from([1, 5]), steps=st.just(6))
def test_steps_deal_examples_out_evenly(size, batch, steps):
    out = do(COUNTING, by_steps(batch, steps), {"w": np.zeros(16, np.float32)}, SIXTEEN, size)
    used = min(batch, size)  # a client smaller than the batch uses all it has
    visits = -np.asarray(out.params["w"], np.float64) * used
    np.testing.assert_allclose(visits, np.round(visits), atol=1e-3)
    visits = np.round(visits)
    assert visits.sum() == steps * used and (visits[size:] == 0).all()
    assert visits[:size].max() - visits[:size].min() <= (1 if batch <= size else 0)


def test_a_drawn_batch_holds_an_example_once():
    draw = jax.jit(partial(draw_batch, COUNTING, by_steps(5, 6)))
    for size in (1, 3, 5, 16):
        batch, real = jax.device_get(draw(jax.random.key(size), SIXTEEN, np.int32(size)))
        rows = batch["x"][real].tolist()
        assert len(rows) == len({*rows}) == min(5, size) and max(batch["x"].tolist()) < size


def test_epochs_are_reshuffled_and_clients_shuffle_differently():
    """One full epoch each: the order shows in what a batch of one, with momentum, leaves behind."""
    training = local_training(optax.sgd(1.0, momentum=0.5), num_epochs=1, batch_size=1)
    start = {"w": np.zeros(16, np.float32)}
    results = [do(COUNTING, training, start, SIXTEEN, 16, key=k).params["w"] for k in (0, 0, 1)]
    assert (results[0] == results[1]).all() and (results[0] != results[2]).any()
    two = local_training(optax.sgd(1.0, momentum=0.5), num_epochs=2, batch_size=1)
    twice = do(COUNTING, two, start, SIXTEEN, 16).params["w"]
    orders = np.argsort(np.asarray(results[0])), np.argsort(np.asarray(twice))
    assert (orders[0] != orders[1]).any()


@pytest.mark.parametrize(
    "options", [{"num_steps": 3}, {"num_steps": 3, "batch_size": 2}, {"num_epochs": 2, "batch_size": 2}]
)
def test_padding_is_never_looked_at(options):
    training = local_training(optax.sgd(0.1, momentum=0.9), **options)
    data = regression()
    clean = do(LINEAR, training, {"w": jnp.ones(3)}, data, 4)
    dirty = {k: v.copy() for k, v in data.items()}
    dirty["x"][4:], dirty["y"][4:] = np.nan, np.inf
    for a, b in zip(
        jax.tree.leaves(clean), jax.tree.leaves(do(LINEAR, training, {"w": jnp.ones(3)}, dirty, 4)), strict=True
    ):
        assert (a == b).all()


def test_padding_in_a_short_last_batch_is_never_looked_at():
    training = local_training(optax.sgd(0.1), num_epochs=2, batch_size=2)
    data = regression()
    clean = do(LINEAR, training, {"w": jnp.ones(3)}, data, 3)
    data["x"][3:] = np.nan
    assert (do(LINEAR, training, {"w": jnp.ones(3)}, data, 3).params["w"] == clean.params["w"]).all()


@pytest.mark.parametrize(
    ("options", "size"),
    [({"num_steps": 3}, 4), ({"num_steps": 3, "batch_size": 5}, 4), ({"num_epochs": 2, "batch_size": 4}, 6)],
)
def test_padding_does_not_reach_a_gradient_that_zeros_do_not_have(options, size):
    """The direction of a vector has no gradient where the vector is 0; in the last case a batch is short."""

    def line(squares_of, params, x):
        hidden = x * params["v"][None]
        return (hidden / jnp.sqrt(squares_of(hidden))).sum(axis=1)

    def squares(hidden):
        return jnp.square(hidden).sum(axis=1, keepdims=True)

    def never_zero(hidden):
        return jnp.where(squares(hidden) == 0, 1.0, squares(hidden))

    unsafe, safe = (
        LINEAR._replace(apply=partial(line, squares_of), cost=lambda outputs, batch: (outputs - batch["y"]) ** 2)
        for squares_of in (squares, never_zero)
    )
    training, params = local_training(optax.sgd(0.1), **options), {"v": jnp.array([1.0, 2.0, 3.0])}
    found, wanted = (do(task, training, params, regression(), size) for task in (unsafe, safe))
    np.testing.assert_allclose(found.params["v"], wanted.params["v"], rtol=1e-6)
    np.testing.assert_allclose(found.loss, wanted.loss, rtol=1e-6)
    assert np.isfinite(found.loss) and np.abs(found.params["v"] - params["v"]).max() > 1e-3


def test_a_client_without_examples_learns_nothing():
    for options in ({"num_steps": 3}, {"num_epochs": 2, "batch_size": 2}):
        out = do(LINEAR, local_training(optax.sgd(0.1), **options), {"w": jnp.ones(3)}, regression(), 0)
        assert (out.params["w"] == 1).all() and out.loss == 0


def test_anchor_pulls():
    training = local_training(optax.sgd(0.5), num_steps=200, prox=1e3 * 1e-3)
    far = {"w": jnp.array([5.0, 5.0, 5.0])}
    zero = {"x": np.zeros((2, 3), np.float32), "y": np.zeros(2, np.float32)}
    out = do(LINEAR, training, {"w": jnp.zeros(3)}, zero, 2, anchor=far)
    np.testing.assert_allclose(out.params["w"], 5.0, rtol=1e-4)


@pytest.mark.parametrize("by_model", [False, True])
def test_augment_and_the_model_get_another_key_at_every_step(by_model):
    task = Task(LINEAR.init, lambda p, x: x * p["w"][0], lambda outputs, batch: outputs)

    def noise(key, batch):
        return {"x": jnp.broadcast_to(jax.random.normal(key), batch["x"].shape)}

    if by_model:  # as dropout
        task = task._replace(train_loss=lambda key, p, batch, real: (task.loss(p, noise(key, batch)), p))
    options, data = {} if by_model else {"augment": noise}, {"x": np.zeros(4, np.float32)}
    for steps, lasting in ((2, {"num_steps": 2}), (4, {"num_epochs": 2, "batch_size": 2})):
        training = local_training(optax.sgd(0.0), **lasting, **options)._replace(each_step=True)
        losses = do(task, training, {"w": np.ones(3, np.float32)}, data, 4).losses  # the noise of each step
        assert len({*losses.tolist()} - {0.0}) == steps


def test_schedules_restart_or_count_on():
    def schedule(count):  # rate 1 for three steps, then 0
        return jnp.where(count < 3, 1.0, 0.0)

    params, data = {"w": jnp.zeros(16)}, {"x": jnp.arange(16)}
    moved = {}
    for keep in ("nothing", "schedule"):
        training = local_training(optax.sgd(0.0), num_steps=2, keep=keep)._replace(optimizer=optax.sgd(schedule))
        moved[keep] = -float(do(COUNTING, training, params, data, 16, steps_done=jnp.asarray(2)).params["w"].sum())
    assert moved["nothing"] == pytest.approx(2) and moved["schedule"] == pytest.approx(1)


def test_adam_restarts_its_moments_under_schedule():
    training = local_training(optax.adam(optax.constant_schedule(0.1)), num_steps=1, keep="schedule")
    adam, scale = start_optimizer(training, {"count": jnp.zeros(2)}, jnp.asarray(7))
    assert adam.count == 0 and scale.count == 7


def test_steps_per_round():
    sizes = jnp.array([0, 1, 5, 6])
    epochs = local_training(optax.sgd(1.0), num_epochs=2, batch_size=5)
    assert jax.vmap(lambda s: steps_per_round(epochs, s, 6))(sizes).tolist() == [0, 2, 2, 4]
    whole = local_training(optax.sgd(1.0), num_epochs=2)
    assert jax.vmap(lambda s: steps_per_round(whole, s, 6))(sizes).tolist() == [0, 2, 2, 2]


def test_mean_loss_masks():
    data = regression()
    data["x"][2:] = np.nan
    got = jax.jit(partial(mean_loss, LINEAR))({"w": np.ones(3, np.float32)}, data, np.int32(2))
    want = np.mean(0.5 * (data["x"][:2].astype(np.float64).sum(axis=1) - data["y"][:2]) ** 2)
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_what_has_no_gradient_is_refused():
    """Integers among the parameters, and as losses: these would leave the model as it is."""
    once = local_training(optax.sgd(0.1), num_steps=1)
    with pytest.raises(ValueError, match=r"the parameter n must be of floating-point numbers; .* got 'int32'"):
        do(LINEAR, once, {"w": jnp.ones(3), "n": jnp.int32(3)}, regression(), 2)
    wrong = LINEAR._replace(cost=lambda outputs, batch: (outputs > batch["y"]).astype(jnp.int32))
    with pytest.raises(ValueError, match=r"type of a task's losses must be floating-point numbers, .* got 'int32'"):
        do(wrong, once, {"w": jnp.ones(3)}, regression(), 2)


def test_an_augmentation_returns_a_batch():
    def forgetful(key, batch):
        batch["x"] = -batch["x"]

    with pytest.raises(ValueError, match="augment must be a function that returns the new batch, got None"):
        do(LINEAR, local_training(optax.sgd(0.1), num_steps=1, augment=forgetful), {"w": jnp.ones(3)}, regression(), 2)


@pytest.mark.parametrize(("change", "shape"), [(jnp.mean, r"\(\)"), (lambda losses: losses[:, None], r"\(\d+, 1\)")])
def test_losses_are_one_for_each_example(change, shape):
    task, data = LINEAR._replace(cost=lambda outputs, batch: change(LINEAR.cost(outputs, batch))), regression()
    params, size = {"w": jnp.ones(3)}, jnp.asarray(2)
    for call in (
        lambda: mean_loss(task, params, data, size),
        lambda: do(task, local_training(optax.sgd(0.1), num_steps=1), params, data, 2),
    ):
        with pytest.raises(ValueError, match=rf"losses .or of correct. must be \(\d+,\), one number.*got {shape}"):
            call()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "give exactly one of num_steps and num_epochs, got None and None"),
        ({"num_steps": 1, "num_epochs": 2}, "give exactly one of num_steps and num_epochs, got 1 and 2"),
        ({"num_steps": 0}, "num_steps must be an integer, at least 1"),
        ({"num_epochs": 0}, "num_epochs"),
        ({"num_steps": 1, "batch_size": 0}, "batch_size"),
        ({"num_steps": 1, "prox": -1.0}, "prox must be 0 or more"),
        ({"num_steps": 1, "keep": "evrything"}, "did you mean 'everything'"),
        ({"num_steps": 1, "augment": "flip"}, r"augment must be a function \(key, batch\) -> batch.*got 'flip'"),
    ],
)
def test_refuses(options, words):
    with pytest.raises(ValueError, match=words):
        local_training(optax.sgd(0.1), **options)


@pytest.mark.slow_cases("False-everything", "True-schedule")
@pytest.mark.parametrize("keep", ["schedule", "everything"])
@pytest.mark.parametrize("injected", [False, True])
def test_schedules_count_the_rounds_that_a_client_sits_out(keep, injected):
    schedule = optax.exponential_decay(1.0, 2, 0.5, staircase=True)  # a round has two steps
    optimizer = optax.inject_hyperparams(optax.sgd)(schedule) if injected else optax.sgd(schedule, momentum=0.0)
    training = local_training(optimizer, num_epochs=1, batch_size=2, keep=keep)
    params = {"w": np.zeros(16, np.float32)}
    examples, opt_state = {"x": np.zeros(6, np.int32)}, start_optimizer(training, params, np.int32(0))
    moved = []
    for done in (0, 1, 3):  # it sits out the third round
        begin = optimizer_at(training, params, opt_state, np.int32(done), np.int32(4), 6)
        out = do(COUNTING, training, params, examples, 4, opt_state=begin)
        moved.append(-float(out.params["w"][0]))
        opt_state = out.opt_state if keep == "everything" else opt_state
    np.testing.assert_allclose(moved, [2.0, 1.0, 0.25])


SLOW = optax.exponential_decay(0.1, 10, 0.5)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.sgd(SLOW),
        optax.chain(optax.clip(1.0), optax.masked(optax.adam(SLOW), lambda p: jax.tree.map(lambda _: True, p))),
        optax.inject_hyperparams(optax.adam)(SLOW),
        optax.chain(optax.add_decayed_weights(SLOW), optax.sgd(0.1)),
    ],
    ids=["sgd", "inside", "injected", "decay"],
)
def test_schedules_that_restart_are_warned_of(optimizer):
    with pytest.warns(UserWarning, match="begins again in every round") as caught:
        local_training(optimizer, num_steps=1)
    assert len(caught) == 1 and caught[0].filename == __file__
    accumulating = optax.MultiSteps(optimizer, 2)  # its schedule counts half of the local steps
    for keep in ("schedule", "everything"):  # warnings are errors
        training = local_training(optimizer, num_steps=1, keep=keep)
        state = start_optimizer(training, {"w": jnp.zeros(2)}, jnp.int32(7))
        assert 7 in [int(x) for x in jax.tree.leaves(state) if x.ndim == 0]
        with pytest.raises(ValueError, match="keep must be nothing for a schedule in optax"):
            local_training(accumulating, num_steps=1, keep=keep)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adamw(0.1),  # it counts, but for its moments
        optax.sgd(0.1, momentum=0.9),
        optax.inject_hyperparams(optax.adam)(0.1),
        optax.add_noise(0.1, 0.5, key=0),
        optax.masked(optax.sgd(SLOW), {"other": True}),  # nothing is known before the model is
    ],
    ids=["adamw", "sgd", "injected", "noise", "masked"],
)
def test_other_counters_are_not_warned_of(optimizer):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training = local_training(optimizer, num_steps=1)
    assert not caught and training.optimizer is optimizer


# ---- Noise of an optimiser -----------------------------------------------------------------------------------------

WIDE = 400
FLAT = Task(
    init=lambda key: {"w": jnp.zeros(WIDE)},
    apply=lambda p, x: x * 0.0 * p["w"].sum(),  # without a gradient: what moves is noise
    cost=lambda outputs, batch: outputs,
)
SIGMA = 0.3
NOISY = {
    "add_noise": optax.chain(optax.add_noise(SIGMA**2, 0.0, key=0), optax.sgd(1.0)),
    "private": optax.chain(
        optax.stateless(lambda grads, _: jax.tree.map(lambda g: g[None], grads)),  # as of one example
        optax.contrib.differentially_private_aggregate(1.0, SIGMA, key=0),
        optax.sgd(1.0),
    ),
}
THREE = Clients({"x": np.zeros((3, 2), np.float32), "y": np.zeros((3, 2), np.float32)}, np.array([2, 1, 2], np.int32))


def noises(optimizer, keep, clients=THREE, **options):
    """`[2, N, D]`: what each client's model moves by in each of two rounds of two steps."""
    training = local_training(optimizer, num_steps=2, keep=keep)
    algorithm = jfcl.local_only(FLAT, training, **options)
    step, state = jax.jit(algorithm.step), jax.jit(algorithm.init)(jax.random.key(0), clients)
    seen = [np.zeros(WIDE)]
    for t in range(2):
        with jax.numpy_dtype_promotion("standard"):  # as optax needs
            state, _ = step(jax.random.key(t), state, clients)
        seen.append(np.asarray(state.params["w"], np.float64))
    assert not any(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in jax.tree.leaves(state))
    return np.stack([seen[1] - seen[0], seen[2] - seen[1]])


@pytest.mark.slow_cases("*-everything", "add_noise-nothing")
@pytest.mark.parametrize(("name", "keep"), [("add_noise", k) for k in KEEP] + [("private", "everything")])
def test_each_client_and_round_has_noise_of_its_own(name, keep):
    found = noises(NOISY[name], keep, client_axis=jax.vmap)
    related = np.corrcoef(found.reshape(6, WIDE)) - np.eye(6)
    assert np.abs(related).max() < 0.2  # four standard errors
    assert scipy.stats.kstest(found.ravel() / (SIGMA * np.sqrt(2)), "norm").pvalue > 1e-3  # of two steps
    if (name, keep) == ("add_noise", "everything"):
        others = THREE._replace(id=np.array([2, 1, 0], np.int32))
        again = noises(NOISY[name], keep, others, client_axis=jfcl.chunked(1))  # one at a time, in another order
        np.testing.assert_array_equal(again[:, ::-1], found)


def test_keys_of_integers_are_replaced_where_they_have_the_name_of_a_key():
    class State(NamedTuple):
        rng_key: jax.Array
        words: jax.Array

    state = {name: State(jax.random.PRNGKey(3), jnp.arange(2, dtype=jnp.uint32)) for name in ("key", "other")}
    (first, other), (second, _) = (rekeyed(jax.random.key(k), state, state).values() for k in (0, 1))
    assert (first.rng_key != other.rng_key).any()
    assert first.rng_key.dtype == jnp.uint32 and first.rng_key.shape == (2,)
    assert (first.rng_key != second.rng_key).any() and (first.rng_key != state["key"].rng_key).any()
    assert (first.words == state["key"].words).all()
    plain = optax.adam(0.1).init({"key": jnp.zeros(2)})
    assert rekeyed(jax.random.key(0), plain, plain) is plain


@pytest.mark.slow
def test_noise_anneals_by_the_steps_of_all_rounds_under_schedule():
    """The variance at step t is eta / t^gamma: with gamma = 2, round two of two steps has 1/9 + 1/16 of eta."""
    annealed = optax.chain(optax.add_noise(SIGMA**2, 2.0, key=0), optax.sgd(1.0))
    for keep, share in (("nothing", 1 + 1 / 4), ("schedule", 1 / 9 + 1 / 16)):
        found = noises(annealed, keep)
        np.testing.assert_allclose(found[0].std(), SIGMA * np.sqrt(1 + 1 / 4), rtol=0.1)
        np.testing.assert_allclose(found[1].std(), SIGMA * np.sqrt(share), rtol=0.1)


@pytest.mark.slow
def test_the_servers_noise_is_of_its_model_and_round_and_runs_with_noise_resume_exactly(tmp_path):
    training = local_training(NOISY["add_noise"], num_steps=1, keep="everything")
    server = optax.chain(optax.add_noise(1e4, 0.0, key=0), optax.sgd(1.0))
    start = {"w": np.zeros((2, WIDE), np.float32)}
    algorithm = jfcl.oracle(FLAT, training, cluster=[0, 1, 1], init_params=start, server_optimizer=server, cohort=2)
    options = {"key": jax.random.key(5), "eval_every": 4}
    with jax.numpy_dtype_promotion("standard"):
        whole = jfcl.simulate(algorithm, THREE, num_rounds=4, out=tmp_path / "whole", **options)
        one = jfcl.simulate(algorithm, THREE, num_rounds=1, out=tmp_path / "parts", **options)
        resumed = jfcl.simulate(algorithm, THREE, num_rounds=4, out=tmp_path / "parts", resume=True, **options)
    for a, b in zip(jax.tree.leaves(whole.state), jax.tree.leaves(resumed.state), strict=True):
        np.testing.assert_array_equal(a, b)
    first = np.asarray(one.state.params["w"], np.float64)
    later = np.asarray(whole.state.params["w"], np.float64) - first
    related = np.corrcoef(np.concatenate([first[first.any(axis=1)], later])) - np.eye(2 + first.any(axis=1).sum())
    assert np.abs(related).max() < 0.2 and 80 < later[1].std() < 250


def test_an_optimizer_whose_steps_have_other_shapes_is_refused():
    per_example = optax.chain(optax.contrib.differentially_private_aggregate(1.0, 1.0, key=0), optax.sgd(1.0))
    with pytest.raises(ValueError, match=r"optimizer must be .* change their shapes"):
        noises(per_example, "nothing")


def test_steps_of_sizes_in_int16():
    training = local_training(optax.sgd(0.1), num_epochs=100, batch_size=1)
    assert steps_per_round(training, jnp.int16(400), 400) == 40_000


def test_images_in_bytes_train_like_their_floats():
    rng = np.random.default_rng(0)
    examples = {"x": rng.integers(0, 256, (6, 3), np.uint8), "y": rng.normal(size=6).astype(np.float32)}
    task = LINEAR._replace(apply=lambda p, x: (x.astype(jnp.float32) / 255) @ p["w"])
    training, start = local_training(optax.sgd(0.1), num_steps=4, batch_size=2), {"w": np.ones(3, np.float32)}
    of_bytes = do(task, training, start, examples, 5)
    of_floats = do(LINEAR, training, start, examples | {"x": examples["x"].astype(np.float32) / 255}, 5)
    np.testing.assert_allclose(of_bytes[0]["w"], of_floats[0]["w"], rtol=1e-6)
