"""Optimisers and schedules of the command line, against equations in NumPy and against optax."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jfcl import cli
from jfcl.core.names import _table
from jfcl.experiments import Config, from_saved, run, setup
from jfcl.experiments.config import to_saved
from jfcl.experiments.optimizers import make_training
from jfcl.experiments.options import all_options
from jfcl.methods import METHODS, Method
from jfcl.simulation.folder import RunFolder

LR, DECAY, STEPS = 0.3, 0.1, 6
ONE = {"clients": 1, "clusters": 1, "heterogeneity": "none", "model": "linear", "local_steps": 2}


@pytest.fixture(autouse=True)
def _promotion():
    with jax.numpy_dtype_promotion("standard"):  # which optax relies on
        yield


def moved(config: Config) -> np.ndarray:
    """The parameters after `STEPS` random gradients, in one go."""
    optimizer = make_training(config, 10).optimizer
    params, state = jnp.array([1.0, -2.0, 0.5]), None
    state = optimizer.init(params)
    for gradient in np.random.default_rng(0).normal(size=(STEPS, 3)).astype(np.float32):
        updates, state = optimizer.update(jnp.asarray(gradient), state, params)
        params = optax.apply_updates(params, updates)
    return np.asarray(params)


def by_equation(name: str, *, decay: float = 0.0, momentum: float = 0.9, clip: float = math.inf) -> np.ndarray:
    """The same by the equations of the papers, in float64."""
    p, m, v = np.array([1.0, -2.0, 0.5]), np.zeros(3), np.zeros(3)
    v += 0.1 if name == "adagrad" else 0  # optax begins there
    for t, g in enumerate(np.random.default_rng(0).normal(size=(STEPS, 3)).astype(np.float32), 1):
        g = g * min(1.0, clip / np.linalg.norm(g))
        g = g + (0 if name in ("adamw", "lion") else decay * p)
        if name in ("sgd", "momentum", "nesterov"):
            m = g if name == "sgd" else momentum * m + g
            step = g + momentum * m if name == "nesterov" else m
        elif name in ("adam", "adamw"):
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            step = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        elif name == "rmsprop":
            v = 0.9 * v + 0.1 * g * g
            step = g / np.sqrt(v + 1e-8)
        elif name == "adagrad":
            v = v + g * g
            step = g / np.sqrt(v + 1e-7)
        elif name == "lion":
            step, m = np.sign(0.9 * m + 0.1 * g), 0.99 * m + 0.01 * g
        p = p - LR * (step + (decay * p if name in ("adamw", "lion") else 0))
    return p


@pytest.mark.slow_cases("sgd")
@pytest.mark.parametrize("name", ["sgd", "momentum", "nesterov", "adam", "adamw", "rmsprop", "adagrad", "lion"])
def test_optimizers_are_the_equations(name):
    for options in ({"decay": DECAY}, {"decay": DECAY, "clip": 0.7}):
        config = Config("fedavg", lr=LR, optimizer=name, weight_decay=DECAY, clip_norm=options.get("clip"))

        np.testing.assert_allclose(moved(config), by_equation(name, **options), atol=2e-5)
    if name in ("momentum", "nesterov"):
        given = Config("fedavg", lr=LR, optimizer=name, momentum=0.5)
        np.testing.assert_allclose(moved(given), by_equation(name, momentum=0.5), atol=2e-5)


@pytest.mark.parametrize("name", ["sgd", "adamw", "lion"])
def test_decay_only_leaves_the_other_parameters_alone(name):
    """Those that it selects move as with decay everywhere, the others as without."""
    params = {"Dense_0": {"kernel": jnp.array([1.0, -2.0]), "bias": jnp.array([0.5])}, "Dense_1": jnp.array([3.0])}
    gradient = jax.tree.map(lambda p: 0.3 * jnp.ones_like(p), params)

    def step(**options):
        optimizer = make_training(Config("fedavg", lr=LR, optimizer=name, **options), 10).optimizer
        return optax.apply_updates(params, optimizer.update(gradient, optimizer.init(params), params)[0])

    some = step(weight_decay=DECAY, decay_only="Dense_0/kernel, Dense_1")
    all_, none = step(weight_decay=DECAY), step(weight_decay=1e-30)
    np.testing.assert_array_equal(some["Dense_0"]["kernel"], all_["Dense_0"]["kernel"])
    np.testing.assert_array_equal(some["Dense_1"], all_["Dense_1"])
    np.testing.assert_array_equal(some["Dense_0"]["bias"], none["Dense_0"]["bias"])
    assert all_["Dense_0"]["bias"] != none["Dense_0"]["bias"]


def test_decay_only_names_parameters_of_the_model():
    with pytest.raises(ValueError, match="decay_only must be left out without --weight-decay, got 'Dense_0'"):
        run(Config("fedavg", decay_only="Dense_0"))
    with pytest.raises(ValueError, match="decay_only must be the beginning of one of the model's parameters: Dense_0"):
        run(Config("fedavg", weight_decay=0.1, decay_only="Dense_0,kernel", rounds=1, model="linear"))


def test_without_the_new_options_the_optimizer_is_as_it_was():
    for options, optimizer in [
        ({}, optax.sgd(LR)),
        ({"momentum": 0.9}, optax.sgd(LR, momentum=0.9)),
        ({"weight_decay": DECAY}, optax.chain(optax.add_decayed_weights(DECAY), optax.sgd(LR))),
    ]:
        params = jnp.array([1.0, -2.0, 0.5])
        state = optimizer.init(params)
        made = make_training(Config("fedavg", lr=LR, **options), 10).optimizer
        assert jax.tree.structure(made.init(params)) == jax.tree.structure(state)
        for gradient in np.random.default_rng(0).normal(size=(STEPS, 3)).astype(np.float32):
            updates, state = optimizer.update(jnp.asarray(gradient), state, params)
            params = optax.apply_updates(params, updates)
        np.testing.assert_array_equal(moved(Config("fedavg", lr=LR, **options)), params)


def rate(t: int, name: str, total: int, steps: int) -> float:
    """The learning rate after `t` of `total` local steps, `steps` in a round."""
    if name == "step":
        return LR * 0.5 ** (t // (2 * steps))
    rising = round(0.2 * total) if name == "warmup_cosine" else 0
    if t < rising:
        return LR * t / rising
    share = (t - rising) / (total - rising)
    return LR * (0.1 + 0.9 * (1 + math.cos(math.pi * share)) / 2)


OPTIONS = {
    "cosine": {"lr_end": 0.1},
    "warmup_cosine": {"lr_end": 0.1, "warmup": 0.2},
    "step": {"step_rounds": 2, "step_factor": 0.5},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_schedules_count_the_local_steps_of_the_whole_run(name):
    """One client that trains on all examples: FedAvg is gradient descent, with the schedule over all its steps."""
    rounds = 5
    config = Config("fedavg", lr=LR, rounds=rounds, schedule=name, **OPTIONS[name], **ONE)
    parts = setup(config)
    assert parts.training.keep == "schedule"
    clients, total = parts.federation.train, rounds * 2

    def loss(params):
        return parts.task.loss(params, {n: jnp.asarray(x[0]) for n, x in clients.examples.items()}).mean()

    key = jax.random.key(0)
    state = parts.algorithm.init(jax.random.fold_in(key, 0), clients)
    params, slope = jax.tree.map(lambda p: p[0], state.params), jax.jit(jax.grad(loss))
    for t in range(total):
        lr = rate(t, name, total, 2)
        params = jax.tree.map(lambda p, g, lr=lr: p - np.float32(lr) * g, params, slope(params))
    found = run(config)[1].state.params
    for leaf, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(leaf[0, 0], wanted, atol=2e-5)


@pytest.mark.parametrize("window", [1, 4, 12])
def test_a_round_of_drifting_data_has_the_steps_of_a_window(window):
    drifting = {"clients": 10, "drift": "F", "drift_window": window, "local_epochs": 1, "batch_size": 2}
    parts = setup(Config("fedavg", **drifting, model="linear", lr=1.0, lr_decay=0.5))
    train, drift = parts.federation.train, parts.federation.drift
    steps = -(-max(int(drift.clients(train, t).size.max()) for t in range(drift.num_steps)) // 2)
    optimizer, rates = parts.training.optimizer, []
    state = optimizer.init(jnp.ones(()))
    for _ in range(steps + 1):
        update, state = optimizer.update(jnp.ones(()), state)
        rates.append(-float(update))
    assert rates == [1.0] * steps + [0.5]


def test_passes_over_the_examples_and_defaults():
    config = Config("fedavg", schedule="step", rounds=7, local_epochs=2, batch_size=4)
    made = make_training(config, 10).optimizer  # 2 * 3 steps a round, a third of the rounds: 2
    state = made.init(jnp.zeros(()))
    steps = []
    for _ in range(25):
        update, state = made.update(jnp.ones(()), state)
        steps.append(float(-update))
    np.testing.assert_allclose(steps, [0.1] * 12 + [0.01] * 12 + [0.001], rtol=1e-5)
    made = make_training(Config("fedavg", local_steps=41, lr=1.0, lr_decay=0.5), 10).optimizer  # 41 * (1 / 41) < 1
    _, moved = jax.lax.scan(lambda state, one: made.update(one, state)[::-1], made.init(jnp.zeros(())), jnp.ones(83))
    np.testing.assert_array_equal(moved, -np.repeat(np.float32([1, 0.5, 0.25]), [41, 41, 1]))
    few = {"validation": 0.05, "local_epochs": 1, "batch_size": 7}  # of 8 examples, one is set aside nonetheless
    made = make_training(Config("knn_per", lr=1.0, lr_decay=0.5, **few), 8).optimizer
    _, moved = jax.lax.scan(lambda state, one: made.update(one, state)[::-1], made.init(jnp.zeros(())), jnp.ones(3))
    assert moved.tolist() == [-1, -0.5, -0.25]
    restarted = {"rounds": 3, "restarts": 2, "restart_rounds": 5}  # whose rounds count
    made = make_training(Config("ifca", local_steps=2, lr=1.0, schedule="cosine", **restarted), 10).optimizer
    _, moved = jax.lax.scan(lambda state, one: made.update(one, state)[::-1], made.init(jnp.zeros(())), jnp.ones(17))
    np.testing.assert_allclose(-moved, (1 + np.cos(np.pi * np.arange(17) / 16)) / 2, atol=1e-6)
    assert make_training(Config("fedavg", schedule="constant"), 10).keep == "nothing"
    assert make_training(Config("federated_clustering", schedule="cosine"), 10).keep == "everything"


def test_schedules_know_no_option_of_a_method_by_its_name(monkeypatch):
    def noted(task, training, *, client_axis=None, validation: float = 0.0):
        """Trains on all examples.

        Args:
          validation: a number, no share of the examples.
        """

    monkeypatch.setitem(METHODS, "noted", Method(noted, ""))
    few = {"local_epochs": 1, "batch_size": 2, "lr": 1.0, "lr_decay": 0.5}
    made = make_training(Config("noted", validation=0.5, **few), 8).optimizer  # 4 steps a round
    _, moved = jax.lax.scan(lambda state, one: made.update(one, state)[::-1], made.init(jnp.zeros(())), jnp.ones(5))
    assert moved.tolist() == [-1, -1, -1, -1, -0.5]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer": "sdg"}, "unknown optimizer 'sdg': did you mean 'sgd'?"),
        ({"schedule": "cosin"}, "unknown schedule 'cosin': did you mean 'cosine'?"),
        ({"optimizer": "adam", "momentum": 0.9}, "momentum must be left out with --optimizer adam"),
        ({"method": "momentum_clustering", "optimizer": "nesterov"}, "optimizer must be one without momentum"),
        ({"warmup": 0.2, "schedule": "cosine"}, "warmup must be left out without --schedule warmup_cosine, got 0.2"),
        ({"lr_end": 0.1}, "lr_end must be left out without --schedule cosine or warmup_cosine"),
        ({"step_rounds": 3, "schedule": "cosine"}, "step_rounds must be left out without --schedule step"),
        ({"schedule": "warmup_cosine", "warmup": 1.0}, "warmup must be in (0, 1), got 1.0"),
        ({"schedule": "cosine", "lr_decay": 0.9}, "lr_decay must be left out without --schedule constant"),
        ({"schedule": "cosine", "keep": "nothing"}, "keep must be schedule or everything with --schedule cosine"),
        ({"lr_decay": 0.9, "keep": "nothing"}, "keep must be schedule or everything with --lr-decay, which counts"),
        ({"clip_norm": 0.0}, "clip_norm must be positive, got 0.0"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, words):
    with pytest.raises(ValueError) as error:
        Config(**{"method": "fedavg"} | options)
    assert words in str(error.value)


def test_a_planned_rate_keeps_its_number_of_rounds(tmp_path):
    config = Config("fedavg", rounds=2, optimizer="adam", clip_norm=1.0, schedule="cosine")
    saved = to_saved(config, "h")
    assert Config(**from_saved(saved)) == dataclasses.replace(config, precision=saved["precision"])
    with RunFolder.open(tmp_path, saved):
        pass
    with RunFolder.open(tmp_path, to_saved(config, "h"), resume=True):
        pass
    longer = RunFolder.open(tmp_path, to_saved(dataclasses.replace(config, rounds=3), "h"), resume=True)
    with pytest.raises(ValueError, match="schedule_rounds: it has 2, asked for 3"), longer:
        pass
    for options in ({}, {"schedule": "constant"}, {"schedule": "step", "step_rounds": 5}):  # may be longer
        assert to_saved(Config("fedavg", **options), "h")["schedule_rounds"] is None


@pytest.mark.parametrize(
    ("wrong", "ours"),
    [
        ("--learning-rate", "--lr"),
        ("--learning_rate=0.1", "--lr"),
        ("--epochs", "--local-epochs"),
        ("--num-rounds", "--rounds"),
        ("--num-clients", "--clients"),
        ("--n-clusters", "--clusters"),
        ("--batch_size=3", "--batch-size"),
        ("--gamma", "--lr-decay"),
        ("--optim", "--optimizer"),
        ("--lerning-rate", "--lr"),
    ],
)
def test_names_of_other_libraries_lead_to_ours(wrong, ours, capsys):
    assert cli.main(["run", "fedavg", wrong]) == 2
    said = capsys.readouterr().err
    assert re.search(rf"unknown option {wrong.split('=')[0]}: did you mean {ours}( \(.*\))?\?", said)


def test_names_of_other_libraries_are_none_of_ours():
    known = {*all_options(), "method", "out", "data_dir"}
    others = _table()["options"]
    assert set(others.values()) <= known and not known & others.keys()
    with pytest.raises(TypeError, match="no option 'num_rounds': did you mean 'rounds'"):
        Config("fedavg", num_rounds=3)
