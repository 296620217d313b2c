"""Where the numbers end: overflow, 16 bits, NaN for a round, one client, padding under attack."""

import inspect
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiled import rollout

import jfcl
from jfcl import attacks, kernels
from jfcl.core import Adversary, Algorithm, Clients, Task
from jfcl.methods import METHODS
from jfcl.methods.restarts import mean_over_examples
from jfcl.training.losses import lowest_loss, masked_mean

KEY = jax.random.key(0)
# A client's data are copies of one number, which the model "b" runs after.
BIAS = Task(
    init=lambda key: {"b": jnp.zeros(())},
    apply=lambda p, x: jnp.broadcast_to(p["b"], len(x)),
    cost=lambda outputs, batch: 0.5 * (batch["y"].astype(outputs.dtype) - outputs) ** 2,
)
ONE_STEP = jfcl.local_training(optax.sgd(0.5), num_steps=1)


def people(*values, padding=0):
    y = np.float32([*values, *[0] * padding]).reshape(-1, 1)
    size = np.int32([1] * len(values) + [0] * padding)
    return Clients({"x": np.zeros_like(y), "y": y}, size)


def good_and_one(value, count=8, dim=5):
    good = np.random.default_rng(0).standard_normal((count, dim)).astype(np.float32)
    return good, np.concatenate([good, np.full((1, dim), value, np.float32)])


@pytest.mark.slow_cases("krum-1e+17", "krum-1e+19")
@pytest.mark.parametrize("value", [1e17, 1e19, 1e20, 3e38])
@pytest.mark.parametrize("name", ["krum", "multi_krum", "bulyan", "centered_clip"])
def test_an_update_whose_square_overflows_is_not_the_nearest_of_all(name, value):
    good, updates = good_and_one(value)
    options = {"radius": 1.0, "num_iters": 5} if name == "centered_clip" else {"num_malicious": 1}
    result = np.asarray(kernels.AGGREGATORS[name](updates, **options))
    assert np.abs(result).max() <= np.abs(good).max() + 5


@pytest.mark.slow  # the maximum of NaN and 0 is 0 in the programs that the other tests run (see conftest.py)
def test_distances_of_two_that_overflow_are_infinite():
    squares = kernels.squared_distances(np.float32([[1e20], [1.1e20], [0], [1]]))
    np.testing.assert_array_equal(squares[0], [0, np.inf, np.inf, np.inf])
    assert not np.isnan(squares).any()
    to_centers = kernels.squared_distances(np.float32([[1e20], [0], [1]]), np.float32([[1.1e20], [1]]))
    np.testing.assert_array_equal(to_centers, [[np.inf, np.inf], [np.inf, 1], [np.inf, 0]])


@pytest.mark.slow
@pytest.mark.parametrize("own_centers", [True, False])
@pytest.mark.parametrize("rule", [{"quantile": 0.5}, {"radius": 4.0}])
def test_threshold_clustering_in_inner_products_leaves_such_points_out(rule, own_centers):
    _, points = good_and_one(1e20)
    start = None if own_centers else points[:2]
    direct, gram = (
        kernels.threshold_clustering(points, start, num_rounds=3, form=form, **rule) for form in ("direct", "gram")
    )
    np.testing.assert_allclose(gram[: 8 if own_centers else 2], direct[: 8 if own_centers else 2], atol=1e-5)
    assert np.abs(np.asarray(gram[:2])).max() < 10


@pytest.mark.slow
def test_sixteen_bits_are_added_up_in_more():
    many = Task(lambda key: {"b": jnp.zeros((), jnp.bfloat16)}, BIAS.apply, BIAS.cost)
    clients = people(*np.ones(1000))
    for axis in (jax.vmap, jfcl.chunked(1)):
        state, _ = jfcl.rollout(
            jfcl.fedavg(many, jfcl.local_training(optax.sgd(1.0), num_steps=1), client_axis=axis),
            clients,
            key=KEY,
            num_rounds=1,
        )
        assert state.params["b"].dtype == jnp.bfloat16
        assert state.params["b"].tolist() == [1.0]
    for name in ("trimmed_mean", "mean_around_median", "bulyan"):
        updates = jnp.full((200, 3), 700, jnp.float16)
        assert kernels.AGGREGATORS[name](updates, num_malicious=2).tolist() == [700, 700, 700]


@pytest.mark.slow_cases("float16")
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_means_of_many_losses_in_sixteen_bits(dtype):
    # 70,000 losses of 2.8125 and 2.5312 (exactly, in both types): their sums, and their number, exceed any float16.
    count = 70_000
    losses = np.full(count + 5, 2.8125, dtype)
    masked = jax.jit(masked_mean)(losses, np.arange(count + 5) < count)
    for mean in (masked, jax.jit(mean_over_examples)(losses, np.ones(count + 5, np.float32))):
        assert mean.dtype == jnp.float32
        np.testing.assert_allclose(mean, 2.8125, rtol=1e-2)  # a float32 sum, term by term
    clients = Clients({"x": np.zeros((2, count), dtype), "y": np.zeros((2, count), dtype)}, np.int32([count, 3]))
    task = BIAS._replace(correct=lambda outputs, batch: (batch["y"] == 0).astype(dtype))
    models = {"b": np.asarray([2.375, 2.25], dtype)}
    found = jfcl.evaluate(task, models, clients, None)
    assert found["cluster"].tolist() == [1, 1]
    np.testing.assert_allclose(found["loss"], 2.53125, rtol=1e-2)
    np.testing.assert_allclose(found["accuracy"], 1, rtol=1e-2)
    chosen = jax.jit(partial(lowest_loss, task, client_axis=jfcl.chunked(1)))(models, clients)
    assert chosen.tolist() == [1, 1]


def test_means_of_float64_losses_stay_so():
    with jax.enable_x64(True):
        losses, weights = np.ones(3), np.ones(3, np.float32)
        means = jax.eval_shape(masked_mean, losses, weights > 0), jax.eval_shape(mean_over_examples, losses, weights)
        assert [mean.dtype for mean in means] == ["float64"] * 2


def test_kernels_of_float64_are_as_exact():
    z = np.random.default_rng(0).normal(size=(7, 2))
    share = np.minimum(1, 0.5 / np.linalg.norm(z, axis=1))[:, None]
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        rotation, x = kernels.orthonormal("rotation", jax.random.key(0), 2), jnp.asarray(z)
        pairs = [
            (kernels.mean(x), z.mean(axis=0)),
            (kernels.bucketing(x, bucket_size=7, key=jax.random.key(0))[0][0], z.mean(axis=0)),
            (kernels.clip_norms(x, radius=0.5)[0], share * z),
            (kernels.centered_clip(x, radius=0.5), (share * z).mean(axis=0)),
            (kernels.threshold_clustering(x, x[:1], radius=1e3, num_rounds=1)[0], z.mean(axis=0)),
            (rotation.invert(rotation.apply(x)), z),
        ]
    for found, expected in pairs:
        np.testing.assert_allclose(found, expected, rtol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_kernels_of_sixteen_bits_add_up_in_more(dtype):
    rng = np.random.default_rng(0)
    points = jnp.asarray(rng.standard_normal((5000, 2)), dtype)
    exact = np.asarray(points, np.float64)
    one_ulp = float(jnp.finfo(dtype).eps)
    mean = kernels.mean(points + jnp.asarray(2, dtype))
    np.testing.assert_allclose(np.float64(mean), (exact + 2).mean(axis=0), rtol=2 * one_ulp)
    # The quantile is a place among 5,000 distances, which float16 counts in fours and bfloat16 in 32s.
    distances = np.linalg.norm(exact, axis=1)
    inside = distances <= np.quantile(distances, 0.3)
    center = exact[inside].sum(axis=0) / 5000
    moved = kernels.threshold_clustering(points, jnp.zeros((1, 2), dtype), quantile=0.3, num_rounds=1, form="direct")
    np.testing.assert_allclose(np.float64(moved[0]), center, atol=1e-4 + one_ulp * abs(center).max())
    if dtype == jnp.bfloat16:
        return
    # Inner products beyond the largest float16.
    long = jnp.full((3, 5000), 4, dtype).at[1].set(8)
    moved = kernels.threshold_clustering(long, long[:1], radius=1.0, num_rounds=1, form="direct")
    assert moved.tolist() == [[4.0] * 5000]
    assert kernels.squared_distances(long, long[:1])[:, 0].tolist() == [0.0, 16 * 5000.0, 0.0]


@pytest.mark.slow
def test_bulyan_of_few_is_one_of_them():
    updates = jnp.float32([[9.0], [9.25], [0.0], [0.0], [0.0], [0.0], [0.0]])
    mask = jnp.arange(7) < 2
    assert kernels.bulyan(updates, num_malicious=1, mask=mask).tolist() in ([9.0], [9.25])


@pytest.mark.slow
def test_one_client_is_a_dendrogram_without_merges():
    one = jnp.ones((1, 1))
    tree = kernels.linkage_tree(1 - one)
    assert tree.shape == (0, 4)
    assert kernels.cut(tree, num_clusters=1).tolist() == [0]
    assert not kernels.optimal_bipartition(one, linkage="complete").side.any()
    state, _ = jfcl.rollout(jfcl.flhc(BIAS, ONE_STEP, num_clusters=1), people(1.0), key=KEY, num_rounds=3)
    np.testing.assert_allclose(state.params["b"], [1 - 0.5**4])  # one round before the clustering


@pytest.mark.slow_cases("*-attack", "fedavg-attack0", "fedavg-attack1", "fedavg-attack2")
@pytest.mark.parametrize(
    ("method", "attack"),
    [
        *[(jfcl.fedavg, attack) for attack in (attacks.ipm(), attacks.alie(), attacks.hijack(), attacks.mimic())],
        (jfcl.federated_clustering, attacks.ipm()),
        pytest.param(jfcl.cfl, attacks.alie(), marks=pytest.mark.slow),
        pytest.param(jfcl.byzantine_cfl, attacks.mimic(), marks=pytest.mark.slow),
    ],
)
def test_attackers_do_not_see_padding(method, attack):
    options = {"eps_1": 1e-30, "max_clusters": 2} if method is jfcl.cfl else {}
    if method is jfcl.federated_clustering:
        options = {"radius": 100.0, "weights": "size"}

    def after_a_round(padding):
        adversary = Adversary(attack, np.array([False] * 3 + [True]))
        algorithm = method(BIAS, ONE_STEP, adversary=adversary, **options)
        clients = people(1.0, 2.0, 4.0, 3.0, padding=padding)
        return np.asarray(rollout(algorithm, clients, key=KEY, num_rounds=1)[0].params["b"])[:1]

    np.testing.assert_allclose(after_a_round(3), after_a_round(0), rtol=1e-6)


@pytest.mark.slow_cases("federated_clustering", "myopic_clustering")
@pytest.mark.parametrize("method", [jfcl.federated_clustering, jfcl.myopic_clustering, jfcl.fedavg])
def test_one_good_client_without_a_finite_update_does_not_disarm_the_attack(method):
    options = {"num_clusters": 1} if method is jfcl.myopic_clustering else {}
    if method is not jfcl.fedavg:
        options |= {"radius": 1e3}

    def model(*values):
        adversary = Adversary(attacks.hijack(4.0), np.array([False, False, True]))
        algorithm = method(BIAS, ONE_STEP, adversary=adversary, weights="equal", **options)
        state, _ = rollout(algorithm, people(*values), key=KEY, num_rounds=1)
        return np.asarray(state.params["b"])[0]

    # Of the two who count, one sends four times what the other does.
    np.testing.assert_allclose(model(1.0, np.nan, 0.0), 0.5 * (1 + 4) / 2, rtol=1e-5)


@pytest.mark.slow_cases("cfl", "ditto", "fedavg", "momentum_clustering")
@pytest.mark.parametrize("method", [jfcl.fedavg, jfcl.local_only, jfcl.cfl, jfcl.ditto, jfcl.momentum_clustering])
def test_momentum_outlives_a_round_without_a_finite_update(method):
    training = jfcl.local_training(optax.sgd(0.1, momentum=0.9), num_steps=1, keep="everything")
    options = {"num_clusters": 1} if method is jfcl.momentum_clustering else {}
    options |= {"eps_1": 1e-30, "max_clusters": 2} if method is jfcl.cfl else {}
    algorithm = method(BIAS, training, **options)
    state = jax.jit(algorithm.init)(KEY, people(1.0, 2.0))
    failed = []
    for t, values in enumerate([(1.0, 2.0), (1.0, np.nan), (1.0, 2.0), (1.0, 2.0)]):
        state, metrics = jax.jit(algorithm.step)(jax.random.key(t), state, people(*values))
        failed.append(int(metrics["nonfinite"]))
    assert failed == [0, 1, 0, 0]


@pytest.mark.slow
def test_a_client_that_comes_late_begins_its_momentum_with_its_first_gradient():
    algorithm = jfcl.momentum_clustering(BIAS, ONE_STEP, num_clusters=1, momentum=0.9, radius=1e3)
    state = jax.jit(algorithm.init)(KEY, people(1.0, 6.0))
    for t, second in enumerate((np.nan, 6.0)):
        before = state.params["b"]
        state, _ = jax.device_get(jax.jit(algorithm.step)(jax.random.key(t), state, people(1.0, second)))
    np.testing.assert_allclose(state.momentum["b"][1], before[1] - 6.0)  # equation 29


class Start(NamedTuple):
    failed: jax.Array
    round: jax.Array


@pytest.mark.parametrize("lost", ["loss", "update"])
def test_restarts_take_no_start_of_lower_loss_in_which_a_client_has_failed(lost):
    def init(key, clients):
        return Start(jax.random.bernoulli(key), jnp.zeros((), jnp.int32))

    def step(key, state, clients):
        broken = jnp.where(state.failed, jnp.float32([jnp.inf if lost == "loss" else 0, 0, 0]), 1.0)
        metrics = {"loss": broken, "nonfinite": (state.failed & (lost == "update")).astype(jnp.int32)}
        return state._replace(round=state.round + 1), metrics

    best = jax.jit(jfcl.with_restarts(Algorithm(init, step), num_restarts=8, num_rounds=1).init)
    assert not any(best(jax.random.key(seed), people(0.0, 0.5, 1.0)).failed for seed in range(3))


class Draws(NamedTuple):
    unequal: jax.Array
    drawn: jax.Array
    round: jax.Array


def test_restarts_weigh_clients_by_their_examples_and_each_round_draws_anew():
    def init(key, clients):
        return Draws(jax.random.bernoulli(key), jnp.zeros(2), jnp.zeros((), jnp.int32))

    def step(key, state, clients):  # the unequal start has the lower mean over clients
        loss = jnp.where(state.unequal, jnp.float32([2, 0, 0]), 1.0)
        drawn = state.drawn.at[state.round].set(jax.random.uniform(key))
        return state._replace(drawn=drawn, round=state.round + 1), {"loss": loss}

    init = jax.jit(jfcl.with_restarts(Algorithm(init, step), num_restarts=8, num_rounds=2).init)
    best = init(jax.random.key(0), people(0.0, 0.5, 1.0)._replace(size=np.int32([8, 1, 1])))
    assert not best.unequal and best.drawn[0] != best.drawn[1]


@pytest.mark.slow
def test_ditto_trains_on_where_the_global_model_has_no_loss():
    # The loss is no number left of the data, where the common model goes because of the others.
    root = Task(
        BIAS.init,
        BIAS.apply,
        lambda outputs, batch: jnp.sqrt(batch["y"] - outputs + 2.0) + 0.1 * (outputs - 3.0) ** 2,
    )
    options = {"key": KEY, "num_rounds": 8}
    clients = people(-1.5, 30.0, 30.0, 30.0)
    state, metrics = rollout(jfcl.ditto(root, ONE_STEP, lam=0.0), clients, **options)
    personal = state.params["b"]
    alone = rollout(jfcl.local_only(root, ONE_STEP), clients, **options)[0].params["b"]
    np.testing.assert_array_equal(personal, alone)
    assert not np.isnan(metrics["loss"]).any(), "NaN is the loss of clients that are absent"


def test_unsigned_sizes_are_refused():
    clients = people(1.0, 2.0)
    with pytest.raises(ValueError, match="size must be of a signed integer type, got"):
        jfcl.simulate(jfcl.fedavg(BIAS, ONE_STEP), clients._replace(size=np.uint8([1, 1])), key=KEY, num_rounds=1)


MORE = {
    "oracle": {"cluster": np.zeros(4, np.int32)},
    "myopic_clustering": {"quantile": 0.5},
    "momentum_clustering": {"quantile": 0.5},
    "one_shot": {"local_rounds": 1},
    "pacfl": {"by_label": False},
    "flux": {"by_label": False},
}


@pytest.mark.parametrize("name", METHODS)
def test_a_model_for_the_task_or_an_optimiser_for_the_training_is_refused(name):
    factory = METHODS[name].make
    has_number = "num_clusters" in inspect.signature(factory).parameters
    options = MORE.get(name, {}) | ({"num_clusters": 2} if has_number else {})
    with pytest.raises(ValueError, match="training must be the result of jfcl"):
        factory(BIAS, optax.sgd(0.1), **options)
    with pytest.raises(ValueError, match="task must be a Task"):
        factory(jfcl.models.MLP(10), ONE_STEP, **options)


SCHEDULE_FREE = optax.contrib.schedule_free_sgd(0.5)  # whose state holds parameters
DRAWN = BIAS._replace(init=lambda key: {"b": 9 * jax.random.normal(key)})


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [partial(jfcl.one_shot, local_rounds=5), jfcl.flhc, partial(jfcl.hypcluster, warm_rounds=3)]
)
def test_optimisers_begin_at_the_models_that_init_has_found(make):
    clients = people(1.0, 5.0, 1.0, 5.0, 1.0, 5.0)
    training = jfcl.local_training(SCHEDULE_FREE, num_steps=1, keep="everything")
    algorithm = make(DRAWN, training, num_clusters=2, server_optimizer=optax.contrib.schedule_free_sgd(1.0))
    state = jax.device_get(jax.jit(algorithm.init)(KEY, clients))
    of_clients = {"b": state.params["b"][state.cluster]}
    np.testing.assert_array_equal(state.server.z["b"], state.params["b"])
    np.testing.assert_array_equal(state.client.z["b"], of_clients["b"])


@pytest.mark.slow
def test_each_client_begins_at_its_own_model():
    training = jfcl.local_training(SCHEDULE_FREE, num_steps=1, keep="everything")
    start = {"init_params": {"b": np.float32([1, 5])}}
    for algorithm in (
        jfcl.local_only(BIAS, training, **start),
        jfcl.oracle(BIAS, training, cluster=np.array([0, 1]), **start),
        jfcl.federated_clustering(BIAS, training, radius=0.1, **start),
    ):
        state, _ = rollout(algorithm, people(1.0, 5.0), key=KEY, num_rounds=2)  # both at their optimum
        np.testing.assert_allclose(state.params["b"], [1, 5])


@pytest.mark.slow
def test_an_update_of_zero_excludes_no_client():
    state, _ = jfcl.rollout(jfcl.byzantine_cfl(BIAS, ONE_STEP), people(*[1.0] * 6), key=KEY, num_rounds=40)
    assert not state.excluded.any()
    state, _ = jfcl.rollout(jfcl.byzantine_cfl(BIAS, ONE_STEP), people(0.0, 1.0, 1.2, 1.1, -3.0), key=KEY, num_rounds=1)
    assert state.excluded.tolist() == [0, 0, 0, 0, 1]  # the first has no direction, the last the opposite one


@pytest.mark.slow_cases("momentum_clustering", "myopic_clustering")
@pytest.mark.parametrize("method", [jfcl.myopic_clustering, jfcl.momentum_clustering, jfcl.federated_clustering])
def test_a_step_that_overflows_is_not_taken_and_is_counted(method):
    steep = jfcl.local_training(optax.sgd(3e38), num_steps=1)
    options = {} if method is jfcl.federated_clustering else {"num_clusters": 2}
    algorithm = method(BIAS, steep, radius=0.1, **options)
    state, metrics = jfcl.rollout(algorithm, people(0.0, 1e10), key=KEY, num_rounds=1)
    assert jnp.isfinite(state.params["b"]).all() and metrics["nonfinite"].tolist() == [1]


@pytest.mark.slow
@pytest.mark.parametrize("make", [attacks.gaussian, attacks.mimic, attacks.opposite, attacks.alie, attacks.far])
def test_attacks_depend_on_ids_and_not_on_rows(make):
    adversary = Adversary(make(), np.array([True, False, False, True, False, False]))
    values, order = np.float32([1, 2, 3, 4, 5, 6]), np.array([5, 3, 1, 0, 2, 4])
    models = []
    for ids in (np.arange(6), order):
        clients = people(*values[ids])._replace(id=ids.astype(np.int32))
        algorithm = jfcl.fedavg(BIAS, ONE_STEP, adversary=adversary)
        models.append(jfcl.rollout(algorithm, clients, key=KEY, num_rounds=2)[0].params["b"])
    np.testing.assert_allclose(models[0], models[1], rtol=1e-5)
