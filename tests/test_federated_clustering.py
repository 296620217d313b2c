"""Federated-, Myopic- and Momentum-Clustering against loops in float64, written from the paper's algorithms."""

import sys
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiled import rollout
from linear_clients import gradient64, linear, linear_clients, loss64

import jfcl
from benchmarks.papers.federated_clustering import ifca_of_the_code, moving_average
from jfcl import mapping
from jfcl.core import Clients, Task
from jfcl.methods.federated_clustering import (
    MEMORY,
    draw_groups,
    models_at_once,
    warn_if_alone,
)
from jfcl.methods.myopic_clustering import densest

D = 3
LINEAR = linear(D)
STEP = jfcl.local_training(optax.sgd(0.1), num_steps=1)
KEY = jax.random.key(0)


def rule_of(radius=None, quantile=None):
    """The arguments of `threshold_clustering`, as the methods hand them on."""
    return {"radius": radius, "quantile": quantile, "num_rounds": 1, "quantile_rule": "linear"}


def regression(seed=0, n=8):
    return linear_clients(np.array([[3.0, 0, -1], [-3.0, 1, 1]]), seed, n, m=6, least=2)


def threshold64(points, center, share, num_rounds, radius=None, quantile=None):
    v = np.array(center, np.float64)
    for _ in range(num_rounds):
        distances = np.linalg.norm(points - v, axis=1)
        tau = np.quantile(distances, quantile) if radius is None else radius
        v = sum(share[i] * (points[i] if distances[i] <= tau else v) for i in range(len(points)))
    return v


@pytest.mark.slow_cases("cpu-equal-*", "cpu-size-radius", "gpu-*", "tpu-equal-*", "tpu-size-quantile")
@pytest.mark.parametrize("rule", [{"radius": 2.5}, {"quantile": 0.4}], ids=["radius", "quantile"])
@pytest.mark.parametrize("weights", ["equal", "size"])
@pytest.mark.parametrize("target", ["cpu", "tpu", "gpu"])
def test_algorithm_2(rule, weights, target, monkeypatch):
    """In the form for each platform, as computed by a CPU."""
    monkeypatch.setattr(mapping, "platform_of", lambda client_axis: target)
    clients = regression()
    start = np.random.default_rng(1).normal(size=(8, D))
    algorithm = jfcl.federated_clustering(
        LINEAR, STEP, threshold_rounds=3, weights=weights, init_params={"w": start.astype(np.float32)}, **rule
    )
    state, metrics = jax.device_get(rollout(algorithm, clients, key=jax.random.key(0), num_rounds=5))
    share = clients.size / clients.size.sum() if weights == "size" else np.full(8, 1 / 8)
    models = start.astype(np.float32).astype(np.float64)
    for t in range(5):
        losses = [loss64(w, clients, i) for i, w in enumerate(models)]
        np.testing.assert_allclose(metrics["loss"][t], losses, rtol=1e-3, atol=1e-5)
        at = [np.stack([gradient64(w, clients, j) for j in range(8)]) for w in models]
        centers = [threshold64(at[i], at[i][i], share, 3, **rule) for i in range(8)]
        models = np.stack([w - 0.1 * v for w, v in zip(models, centers, strict=True)])
    np.testing.assert_allclose(state.params["w"], models, rtol=1e-4, atol=1e-5)
    assert metrics["bytes_up"][0] == metrics["bytes_down"][0] == 8 * 8 * D * 4
    assert metrics["client_steps"][0] == 64


def test_the_models_at_once_follow_the_target(monkeypatch):
    few, one, every = mapping.chunked(3), mapping.chunked(1), jax.vmap
    numbers = MEMORY // 3
    axis = mapping.sharded(mapping.client_mesh(2), every)
    for target, expected in (("cpu", one), ("tpu", one), ("gpu", few)):
        monkeypatch.setattr(mapping, "platform_of", lambda client_axis, target=target: target)
        assert models_at_once(numbers, None) == expected
        assert models_at_once(numbers, axis).inner == (every if target == "cpu" else expected)
        assert models_at_once(numbers, every) == (every if target == "cpu" else expected)
        assert models_at_once(numbers, mapping.chunked(7)) == mapping.chunked(7)


def test_momentum_holds_the_clustered_gradient():
    """Heavy ball of the centres over rounds, not of the client's own gradients."""
    clients = regression(2)
    training = jfcl.local_training(optax.sgd(0.05, momentum=0.9), num_steps=1, keep="everything")
    algorithm = jfcl.federated_clustering(LINEAR, training, radius=2.5, threshold_rounds=2)
    state = jax.jit(algorithm.init)(jax.random.key(0), clients)
    models, buffers = np.asarray(state.params["w"], np.float64), np.zeros((8, D))
    for t in range(4):
        state, _ = jax.jit(algorithm.step)(jax.random.key(t), state, clients)
        for i in range(8):
            at = np.stack([gradient64(models[i], clients, j) for j in range(8)])
            buffers[i] = 0.9 * buffers[i] + threshold64(at, at[i], np.full(8, 1 / 8), 2, radius=2.5)
            models[i] -= 0.05 * buffers[i]
    np.testing.assert_allclose(state.params["w"], models, rtol=1e-4, atol=1e-5)


def test_other_local_steps_are_the_clients_own():
    clients = regression(3)
    training = STEP._replace(num_steps=3)
    algorithm = jfcl.federated_clustering(LINEAR, training, radius=2.5, threshold_rounds=2)
    state = jax.jit(algorithm.init)(jax.random.key(0), clients)
    models = np.asarray(state.params["w"], np.float64)
    state, metrics = jax.jit(algorithm.step)(jax.random.key(1), state, clients)
    for i in range(8):
        at = np.stack([gradient64(models[i], clients, j) for j in range(8)])
        losses = [loss64(models[i], clients, i)]
        models[i] -= 0.1 * threshold64(at, at[i], np.full(8, 1 / 8), 2, radius=2.5)
        for _ in range(2):
            losses.append(loss64(models[i], clients, i))
            models[i] -= 0.1 * gradient64(models[i], clients, i)
        np.testing.assert_allclose(metrics["loss"][i], np.mean(losses), rtol=1e-4)
    np.testing.assert_allclose(state.params["w"], models, rtol=1e-4, atol=1e-5)
    assert metrics["client_steps"] == 64 + 16


def test_later_steps_draw_other_examples():
    """Each example has a parameter of its own, which a step with it lowers by 1."""
    task = Task(lambda key: {"w": jnp.zeros(6)}, lambda p, x: p["w"][x], lambda outputs, batch: outputs)
    clients = Clients({"x": np.tile(np.arange(6, dtype=np.int32), (8, 1))}, np.full(8, 6, np.int32))
    training = jfcl.local_training(optax.sgd(1.0), num_steps=2, batch_size=1)
    algorithm = jfcl.federated_clustering(task, training, radius=0.0)
    state, _ = rollout(algorithm, clients, key=KEY, num_rounds=1)
    assert (state.params["w"].sum(axis=1) == -2).all() and (state.params["w"].min(axis=1) == -1).any()


@pytest.mark.slow
def test_an_infinite_radius_is_everybodys_mean():
    clients = regression(4)
    options = {"init_params": {"w": np.ones(D, np.float32)}}
    key = jax.random.key(0)
    mean = jfcl.rollout(jfcl.fedavg(LINEAR, STEP, weights="equal", **options), clients, key=key, num_rounds=6)[0]
    everything = jfcl.federated_clustering(LINEAR, STEP, radius=jnp.inf, **options)
    found = jfcl.rollout(everything, clients, key=key, num_rounds=6)[0].params["w"]
    np.testing.assert_allclose(found, np.broadcast_to(mean.params["w"], (8, D)), rtol=1e-5)


@pytest.mark.slow
def test_radius_zero_is_local_training_on_the_same_batches():
    """Client `i` sees its own batch of the round."""
    clients = regression(5)
    training = STEP._replace(batch_size=2)
    options = {"init_params": {"w": np.ones(D, np.float32)}}
    key = jax.random.key(7)
    alone = jfcl.rollout(jfcl.local_only(LINEAR, training, **options), clients, key=key, num_rounds=4)[0]
    zero = jfcl.federated_clustering(LINEAR, training, radius=0.0, **options)
    found = jfcl.rollout(zero, clients, key=key, num_rounds=4)[0]
    np.testing.assert_allclose(found.params["w"], alone.params["w"], rtol=1e-6)


@pytest.mark.slow_cases("12", "13")
@pytest.mark.parametrize("n", [12, 13, 15])
def test_subgroups_are_partitions_drawn_anew(n):
    clients = regression(6, n=n)
    size = clients.size.copy()
    size[3] = 0
    clients = clients._replace(size=size)
    drawn = []
    for seed in range(6):
        groups = jax.device_get(jax.jit(draw_groups, static_argnums=2)(jax.random.key(seed), clients, 4))
        members = [np.asarray(r)[np.asarray(ok)] for r, ok in zip(groups.rows, groups.real, strict=True)]
        assert sorted(np.concatenate(members).tolist()) == [i for i in range(n) if i != 3]
        assert all(len(m) == 4 for m in members[: (n - 1) // 4])
        for g, rows in enumerate(members):
            assert (np.asarray(groups.of)[rows] == g).all()
        drawn.append(tuple(np.asarray(groups.of).tolist()))
    assert len(set(drawn)) > 1


def test_subgroups_cluster_among_themselves():
    clients = regression(7, n=9)
    options = {"radius": 2.5, "threshold_rounds": 2, "subgroup_size": 4, "weights": "size"}
    algorithm = jfcl.federated_clustering(LINEAR, STEP, **options)
    state = jax.jit(algorithm.init)(jax.random.key(0), clients)
    models = np.asarray(state.params["w"], np.float64)
    key = jax.random.key(3)
    new, metrics = jax.device_get(jax.jit(algorithm.step)(key, state, clients))
    of = np.asarray(jax.jit(lambda key: draw_groups(jax.random.split(key)[0], clients, 4).of)(key))
    for i in range(9):
        group = np.flatnonzero(of == of[i])
        at = np.stack([gradient64(models[i], clients, j) for j in group])
        share = clients.size[group] / clients.size[group].sum()
        v = threshold64(at, at[group.tolist().index(i)], share, 2, radius=2.5)
        np.testing.assert_allclose(new.params["w"][i], models[i] - 0.1 * v, rtol=1e-4, atol=1e-5)
    assert metrics["bytes_up"] == (16 + 16 + 1) * D * 4  # 4, 4 and 1 clients


@pytest.mark.slow
def test_attackers_are_far_from_every_centre():
    clients = regression(8, n=10)
    adversary = jfcl.Adversary(jfcl.attacks.gaussian(1e3), jnp.arange(10) >= 7)
    honest = Clients(jax.tree.map(lambda x: x[:7], clients.examples), clients.size[:7])
    options = {"radius": 2.5, "init_params": {"w": np.zeros(D, np.float32)}, "threshold_rounds": 40}
    attacked = jfcl.federated_clustering(LINEAR, STEP, adversary=adversary, **options)
    alone = jfcl.federated_clustering(LINEAR, STEP, **options)
    key = jax.random.key(0)
    found = jfcl.rollout(attacked, clients, key=key, num_rounds=30)[0].params["w"][:7]
    truth = jfcl.rollout(alone, honest, key=key, num_rounds=30)[0].params["w"]
    np.testing.assert_allclose(found, truth, atol=1e-2)  # 40 threshold rounds forget the share of the absent
    fed = jfcl.rollout(jfcl.fedavg(LINEAR, STEP, adversary=adversary), clients, key=key, num_rounds=30)[0]
    assert np.abs(fed.params["w"]).max() > 10


@pytest.mark.slow
def test_a_client_without_finite_gradients_keeps_its_model():
    clients = regression(9)
    x = clients.examples["x"].copy()
    x[2, 0] = np.inf
    spoiled = Clients({"x": x, "y": clients.examples["y"]}, clients.size)
    for make in (
        partial(jfcl.federated_clustering, radius=2.5),
        partial(jfcl.myopic_clustering, num_clusters=2, radius=2.5),
        partial(jfcl.momentum_clustering, num_clusters=2, radius=2.5),
    ):
        algorithm = make(LINEAR, STEP)
        start = algorithm.init(jax.random.key(0), spoiled)
        state, metrics = jfcl.rollout(algorithm, spoiled, key=jax.random.key(0), num_rounds=3, state=start)
        assert (state.params["w"][2] == start.params["w"][2]).all() and metrics["nonfinite"].tolist() == [1] * 3
        assert np.isfinite(state.params["w"]).all() and (state.params["w"][0] != start.params["w"][0]).any()


def densest64(points, count, radius=None, quantile=None):
    """The starts of the centres, by hand."""
    distances = np.linalg.norm(points[:, None] - points[None], axis=2)
    left, chosen = set(range(len(points))), []
    few = int(np.ceil(quantile * len(points))) - 1 if quantile else None
    for _ in range(count):
        if not left:
            left = set(range(len(points)))
        best = None
        for i in sorted(left):
            inner = sorted(distances[i][list(left)])
            reach = radius if radius is not None else inner[min(few, len(inner) - 1)]
            score = -sum(d <= reach for d in inner) if radius is not None else reach
            best = min(best, (score, distances[i].sum(), i, reach)) if best else (score, distances[i].sum(), i, reach)
        chosen.append(best[2])
        left = {j for j in left if distances[best[2]][j] > best[3]} - {best[2]}
    return chosen


def test_a_whole_number_of_neighbours_is_not_one_more_by_rounding():
    """42 points by the quantile 1 / 14: the start is the point with the nearest 3, and not the nearest 4."""
    points = jnp.concatenate([jnp.array([0, 0.3, 0.6, 8, 9, 10, 11]), 20.0 + 5.0 * jnp.arange(35.0)])
    found = densest(points[:, None], jnp.ones(42, bool), jnp.arange(42), rule_of(quantile=1 / 14), 1)[:, 0]
    assert float(found[0]) < 1


@pytest.mark.slow
def test_every_dense_place_gets_a_start_where_few_points_remain():
    """With 0.4 of ten points around each start, two remain for the third; equal points go with one start."""
    far = jnp.array([0, 0.1, 0.2, 0.3, 10, 10.1, 10.2, 10.3, 30, 30.1])
    ties = jnp.array([1.0] * 7 + [9.0])
    for points, quantile, count in ((far, 0.4, 3), (ties, 0.25, 2)):
        n, rule = len(points), rule_of(quantile=quantile)
        found = densest(points[:, None], jnp.ones(n, bool), jnp.arange(n), rule, count)[:, 0]
        wanted = densest64(np.asarray(points, np.float64)[:, None], count, quantile=quantile)
        np.testing.assert_array_equal(found, points[np.array(wanted)])
        assert len(set(np.round(found / 5).tolist())) == count


@pytest.mark.slow_cases("quantile-*", "radius-0.0", "radius-0.7")
@pytest.mark.parametrize("momentum", [None, 0.0, 0.7])
@pytest.mark.parametrize("rule", [{"radius": 2.5}, {"quantile": 0.3}], ids=["radius", "quantile"])
def test_algorithms_1_and_4(momentum, rule):
    clients = regression(10)
    options = {"num_clusters": 2, "threshold_rounds": 3, **rule}
    make = jfcl.myopic_clustering if momentum is None else partial(jfcl.momentum_clustering, momentum=momentum)
    algorithm = make(LINEAR, STEP, **options)
    state = jax.jit(algorithm.init)(jax.random.key(0), clients)
    models, m = np.asarray(state.params["w"], np.float64), None
    for t in range(4):
        state, metrics = jax.jit(algorithm.step)(jax.random.key(t), state, clients)
        gradients = np.stack([gradient64(models[i], clients, i) for i in range(8)])
        losses = [loss64(models[i], clients, i) for i in range(8)]
        np.testing.assert_allclose(metrics["loss"], losses, rtol=1e-4, atol=1e-5)
        m = gradients if momentum is None or m is None else (1 - momentum) * gradients + momentum * m
        centers = [threshold64(m, m[k], np.full(8, 1 / 8), 3, **rule) for k in densest64(m, 2, **rule)]
        group = np.linalg.norm(m[:, None] - np.stack(centers)[None], axis=2).argmin(axis=1)
        models -= 0.1 * np.stack(centers)[group]
        assert state.group.tolist() == group.tolist()
    np.testing.assert_allclose(state.params["w"], models, rtol=1e-4, atol=1e-5)
    assert metrics["bytes_up"] == metrics["bytes_down"] == 8 * D * 4


@pytest.mark.parametrize("momentum", [pytest.param(None, marks=pytest.mark.slow), 0.7])
def test_centres_are_carried_over(momentum):
    clients = regression(10)
    options = {"num_clusters": 2, "threshold_rounds": 2, "quantile": 0.4, "centers": "carry"}
    make = jfcl.myopic_clustering if momentum is None else partial(jfcl.momentum_clustering, momentum=momentum)
    algorithm = make(LINEAR, STEP, **options)
    state = jax.jit(algorithm.init)(jax.random.key(0), clients)
    models, m, centers = np.asarray(state.params["w"], np.float64), None, None
    for t in range(4):
        state, _ = jax.jit(algorithm.step)(jax.random.key(t), state, clients)
        gradients = np.stack([gradient64(models[i], clients, i) for i in range(8)])
        m = gradients if momentum is None or m is None else (1 - momentum) * gradients + momentum * m
        starts = m[densest64(m, 2, quantile=0.4)] if centers is None else centers
        centers = np.stack([threshold64(m, v, np.full(8, 1 / 8), 2, quantile=0.4) for v in starts])
        group = np.linalg.norm(m[:, None] - centers[None], axis=2).argmin(axis=1)
        models -= 0.1 * centers[group]
        np.testing.assert_allclose(state.centers["w"], centers, rtol=1e-4, atol=1e-5)
        assert state.group.tolist() == group.tolist()
    np.testing.assert_allclose(state.params["w"], models, rtol=1e-4, atol=1e-5)
    if momentum is not None:  # of a client that has sent NaN, the first one is its first finite gradient
        spoilt = jax.tree.map(np.copy, clients)
        spoilt.examples["y"][3] = np.nan
        state, _ = jax.jit(algorithm.step)(KEY, jax.jit(algorithm.init)(KEY, clients), spoilt)
        first = gradient64(np.asarray(state.params["w"][3], np.float64), clients, 3)
        state, _ = jax.jit(algorithm.step)(KEY, state, clients)
        np.testing.assert_allclose(state.momentum["w"][3], first, rtol=1e-4)


@pytest.mark.slow
def test_centres_are_carried_to_clients_that_begin():
    """In a population a round may have only clients that take part for the first time."""
    algorithm = jfcl.myopic_clustering(LINEAR, STEP, num_clusters=2, radius=1e-3, centers="carry")
    first, step = regression(10), jax.jit(algorithm.step)
    state, _ = step(jax.random.key(0), algorithm.init(jax.random.key(0), first), first)
    others = regression(5)
    fresh = algorithm.init(jax.random.key(0), others)
    arrived = fresh._replace(centers=state.centers, chosen=state.chosen, round=state.round)
    after, _ = step(jax.random.key(1), arrived, others)  # none has a gradient within the radius
    assert state.chosen and not fresh.chosen
    np.testing.assert_allclose(after.centers["w"], state.centers["w"], rtol=1e-6)


@pytest.mark.slow
def test_many_clients_need_no_square_array(monkeypatch):
    monkeypatch.setattr(sys.modules["jfcl.methods.myopic_clustering"], "MOST_STARTS", 40)
    rng = np.random.default_rng(0)
    group = np.repeat([0, 1, 2], [45, 40, 40])
    points = np.float32([[0, 0], [6, 0], [0, 6]])[group] + 0.1 * rng.standard_normal((125, 2)).astype(np.float32)
    usable = jnp.arange(125) != 3
    points[3] = np.nan
    for rule in ({"radius": 1.0, "quantile": None}, {"radius": None, "quantile": 0.3}):
        fixed = rule_of(**rule)
        find = jax.jit(lambda *of_clients, fixed=fixed: densest(*of_clients, fixed, 3))
        blank = jnp.where(usable[:, None], points, 0.0)
        starts = np.asarray(find(blank, usable, jnp.arange(125)))
        order = jnp.array([*reversed(range(125)), 3])  # another order, and a padding client
        np.testing.assert_allclose(find(blank[order], usable[order], order), starts)
        assert {tuple(v) for v in np.round(starts / 6)} == {(0, 0), (1, 0), (0, 1)}
        assert all((start == points[usable]).all(axis=1).any() for start in starts)
    clients = regression(n=125)
    algorithm = jfcl.momentum_clustering(LINEAR, STEP, num_clusters=3)
    state = jax.eval_shape(algorithm.init, jax.random.key(0), clients)
    program = str(jax.make_jaxpr(algorithm.step)(jax.random.key(0), state, clients))
    assert "[125,125]" not in program and "[40,125]" in program


@pytest.mark.parametrize("rule", ["linear", "index", "index_shrunk", "index_strict"])
def test_a_quantile_that_leaves_every_client_alone_is_warned_of(rule):
    for count in range(2, 12):
        distances = np.arange(count, dtype=float)
        for quantile in (0.0, 0.1, 0.2, 0.25, 0.3, 0.5, 1.0):
            place = min(int(np.floor(round(count * quantile, 6))), count - 1)
            if rule == "linear":
                inside = distances <= np.quantile(distances, quantile) * (1 + 1e-12)
            elif rule == "index_strict":
                inside = distances < distances[place]
            else:
                inside = distances <= distances[place] * (0.99 if rule == "index_shrunk" else 1)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                warn_if_alone(quantile, count, rule)
            assert bool(caught) == (inside.sum() <= 1), (count, quantile)


def test_the_warning_comes_before_the_run():
    five = regression(n=5)
    words = r"quantile is 0.2 \(linear\) of the distances of 5 .* the nearest other is within 0.25"
    with pytest.raises(UserWarning, match=words):  # warnings are errors in tests: nothing has been compiled by then
        jfcl.simulate(jfcl.federated_clustering(LINEAR, STEP), five, key=jax.random.key(0), num_rounds=1)
    with pytest.warns(UserWarning, match="of the distances of 3 "):
        jfcl.federated_clustering(LINEAR, STEP, subgroup_size=3).check(regression(n=9))
    jfcl.federated_clustering(LINEAR, STEP).check(regression(n=6))
    jfcl.federated_clustering(LINEAR, STEP, radius=0.1).check(five)


def test_figure_3s_moving_average_starts_at_the_first_gradient():
    rng = np.random.default_rng(0)
    gradients = rng.normal(size=(6, 3)).astype(np.float32)
    average = moving_average(0.9)
    state, expected = average.init(jnp.zeros(3)), gradients[0].astype(np.float64)
    for t, g in enumerate(gradients):
        expected = expected if t == 0 else 0.9 * expected + 0.1 * g  # equation 29
        found, state = average.update(jnp.asarray(g), state)
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(("num_clusters", "each"), [(2, 4), (4, 2)])  # more models than clusters, and fewer
def test_ifca_of_the_authors_code_is_its_loop(num_clusters, each):
    five = regression(n=num_clusters * each)
    x, y = (np.asarray(five.examples[name], np.float64) for name in "xy")
    models = np.random.default_rng(3).normal(size=(num_clusters * each, x.shape[2]))[::num_clusters]
    algorithm = ifca_of_the_code(LINEAR, 0.1, {"w": jnp.asarray(models, jnp.float32)}, num_clusters)
    state = algorithm.init(jax.random.key(0), five)
    assert len(models) == each
    for _ in range(3):
        chosen, trained = [], []
        for xi, yi in zip(x, y, strict=True):
            j = int(np.argmin([np.square(xi @ w - yi).mean() for w in models]))
            chosen.append(j)
            trained.append(models[j] - 0.1 * xi.T @ (xi @ models[j] - yi) / len(yi))
        for j in range(min(num_clusters, each)):  # the others never move
            if j in chosen:
                models[j] = np.mean([t for t, c in zip(trained, chosen, strict=True) if c == j], axis=0)
        state, _ = jax.jit(algorithm.step)(jax.random.key(0), state, five)
        assert state.cluster.tolist() == chosen
        np.testing.assert_allclose(state.params["w"], models, rtol=1e-4, atol=1e-5)


def test_centres_start_where_most_are_and_not_at_outliers():
    rng = np.random.default_rng(0)
    points = np.concatenate([rng.normal(0, 0.1, (6, 2)), rng.normal(5, 0.1, (5, 2)), [[90, 90], [-70, 3]]])
    for rule in ({"radius": 1.0, "quantile": None}, {"radius": None, "quantile": 0.25}):
        find = jax.jit(partial(densest, rule=rule_of(**rule), num_clusters=2))
        starts = np.asarray(find(np.float32(points), np.ones(13, bool), np.arange(13, dtype=np.int32)))
        assert sorted(np.round(starts.mean(axis=1)).tolist()) == [0, 5]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: jfcl.federated_clustering(LINEAR, STEP, radius=1.0, quantile=0.2),
            "Give radius or quantile, not both",
        ),
        (lambda: jfcl.federated_clustering(LINEAR, STEP, quantile=1.2), r"quantile must be in \[0, 1\], got 1.2"),
        (lambda: jfcl.federated_clustering(LINEAR, STEP, radius=-1.0), "radius must be 0 or more"),
        (
            lambda: jfcl.federated_clustering(LINEAR, STEP, subgroup_size=1),
            "subgroup_size must be an integer, at least 2",
        ),
        (lambda: jfcl.federated_clustering(LINEAR, STEP, threshold_rounds=0), "threshold_rounds must be an integer"),
        (lambda: jfcl.federated_clustering(LINEAR, STEP, quantile_rule="linaer"), "did you mean 'linear'"),
        (lambda: jfcl.federated_clustering(LINEAR, jfcl.local_training(optax.sgd(0.1), num_epochs=1)), "num_steps"),
        (lambda: jfcl.federated_clustering(LINEAR, STEP._replace(prox=0.1)), "prox must be 0"),
        (
            lambda: jax.vmap(lambda mu: jfcl.federated_clustering(LINEAR, STEP._replace(prox=mu)) and mu)(jnp.zeros(2)),
            "prox must be 0",
        ),
        (
            lambda: jfcl.federated_clustering(LINEAR, STEP._replace(span="always")),
            "span must be auto or never",
        ),
        (lambda: jfcl.momentum_clustering(LINEAR, STEP, num_clusters=2, momentum=1.0), r"momentum must be in \[0, 1\)"),
        (
            lambda: jfcl.momentum_clustering(LINEAR, STEP._replace(num_steps=2), num_clusters=2),
            "must have one step, not 2",
        ),
        (lambda: jfcl.myopic_clustering(LINEAR, STEP, num_clusters=0), "num_clusters must be an integer"),
        (lambda: jfcl.momentum_clustering(LINEAR, STEP, num_clusters=2, centers="cary"), "did you mean 'carry'"),
    ],
)
def test_factories_refuse(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        (jfcl.federated_clustering(LINEAR, STEP, subgroup_size=9), "subgroup_size must be at most the 8 clients"),
        (jfcl.myopic_clustering(LINEAR, STEP, num_clusters=9), "num_clusters must be at most the 8 clients"),
    ],
)
def test_init_refuses(algorithm, words):
    with pytest.raises(ValueError, match=words):
        algorithm.init(jax.random.key(0), regression())
