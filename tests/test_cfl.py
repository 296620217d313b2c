"""Clustered Federated Learning against loops over the papers' algorithms in float64."""

import itertools
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiled import rollout

import jfcl
from jfcl import kernels
from jfcl.core import Clients
from jfcl.methods.averaging import Averaging
from jfcl.methods.cfl import server
from jfcl.methods.cfl.server import bipartitions
from jfcl.methods.cfl.splits import allot, undo_harmful_splits

LR, STEPS = 0.1, 2
TASK = jfcl.models.task(lambda key: {"w": jnp.zeros(3)}, lambda p, x: x @ p["w"], kind="regression")
TRAINING = jfcl.local_training(optax.sgd(LR), num_steps=STEPS)


def regression(truth, cluster, *, noise=0.05, seed=0, examples=12):
    rng = np.random.default_rng(seed)
    n = len(cluster)
    x = rng.standard_normal((n, examples, 3)).astype(np.float32)
    y = np.einsum("nmd,nd->nm", x, np.asarray(truth)[cluster]) + noise * rng.standard_normal((n, examples))
    size = rng.integers(examples // 2, examples + 1, n).astype(np.int32)
    return Clients({"x": x, "y": y.astype(np.float32)}, size)


def local_update(clients, i, w):
    """SGD_n(w, D_i) - w for the task's loss, in float64."""
    n = clients.size[i]
    x, y = (np.asarray(clients.examples[k][i][:n], np.float64) for k in "xy")
    start = w.copy()
    for _ in range(STEPS):
        w = w - LR * loss_gradient(x, y, w)
    return w - start


def local_loss(clients, i, w):
    """The mean of the losses before the steps."""
    n, losses = clients.size[i], []
    x, y = (np.asarray(clients.examples[k][i][:n], np.float64) for k in "xy")
    for _ in range(STEPS):
        losses.append(np.mean((x @ w - y) ** 2))
        w = w - LR * loss_gradient(x, y, w)
    return np.mean(losses)


def loss_gradient(x, y, w):
    """Of the mean squared error, which is the library's regression loss."""
    return 2 * x.T @ (x @ w - y) / len(x)


def best_bipartition(updates, members):
    """Equation 35 by looking at all bipartitions; the first client's side and the largest similarity across."""
    u = {i: updates[i] / np.linalg.norm(updates[i]) for i in members}
    best = (np.inf, None)
    for choice in itertools.product([False, True], repeat=len(members) - 1):
        if any(choice):
            second = {m for m, c in zip(members[1:], choice, strict=True) if c}
            cross = max(u[i] @ u[j] for i in members if i not in second for j in second)
            best = min(best, (cross, sorted(second)), key=lambda b: b[0])
    return best


def algorithm_5(clients, rounds, eps_1, eps_2, gamma_max):
    """With weights by size, to the letter; returns the clusters as sets, and every client's model."""
    n = len(clients.size)
    clusters, models = [list(range(n))], {0: np.zeros(3)}
    for _ in range(rounds):
        next_clusters, next_models = [], {}
        for k, members in enumerate(clusters):
            updates = {i: local_update(clients, i, models[k].copy()) for i in members}

            def mean(group, updates=updates):
                return np.average([updates[i] for i in group], axis=0, weights=clients.size[group])

            groups = [members]
            if (
                np.linalg.norm(mean(members)) < eps_1
                and max(np.linalg.norm(u) for u in updates.values()) > eps_2
                and len(members) > 1
            ):
                cross, second = best_bipartition(updates, members)
                if np.sqrt((1 - cross) / 2) > gamma_max:
                    groups = [[i for i in members if i not in second], second]
            for group in groups:
                next_models[len(next_clusters)] = models[k] + mean(group)
                next_clusters.append(group)
        clusters, models = next_clusters, next_models
    return clusters, {i: models[k] for k, group in enumerate(clusters) for i in group}


TRUTH = [[2, 0, 0], [-1, 1.7, 0], [-1, -1.7, 0.5]]
CLUSTER = np.array([0, 1, 2, 0, 1, 2, 0, 1])


@pytest.mark.slow_cases("25-0.0", "60-*")
@pytest.mark.parametrize(("rounds", "gamma_max"), [(10, 0.0), (25, 0.0), (60, 0.0), (60, 0.95)])
def test_is_algorithm_5(rounds, gamma_max):
    clients = regression(TRUTH, CLUSTER)
    algorithm = jfcl.cfl(TASK, TRAINING, eps_1=0.05, eps_2=0.2, gamma_max=gamma_max, max_clusters=8)
    state, metrics = jax.device_get(rollout(algorithm, clients, key=jax.random.key(0), num_rounds=rounds))
    clusters, models = algorithm_5(clients, rounds, 0.05, 0.2, gamma_max)
    found = {frozenset(np.flatnonzero(state.cluster == k).tolist()) for k in set(state.cluster.tolist())}
    assert found == {frozenset(c) for c in clusters}
    np.testing.assert_allclose(state.params["w"][state.cluster], np.stack([models[i] for i in range(8)]), atol=1e-4)
    assert metrics["num_clusters"][-1] == len(clusters) == state.active.sum()
    if rounds == 60 and gamma_max == 0:
        assert len(clusters) == 3


@pytest.mark.slow
def test_congruent_clients_are_never_split():
    clients = regression([[1, -1, 2]], np.zeros(8, int), noise=0.0)
    algorithm = jfcl.cfl(TASK, TRAINING, eps_1=0.05, eps_2=0.1)
    state, metrics = jfcl.rollout(algorithm, clients, key=jax.random.key(0), num_rounds=60)
    assert state.active.sum() == 1 and metrics["max_norm"][-1, 0] < 0.1
    assert np.isinf(metrics["cross_similarity"]).all()  # nobody even looked


@pytest.mark.slow
def test_parents_and_rounds_of_splits_are_kept():
    clients = regression(TRUTH, CLUSTER)
    algorithm = jfcl.cfl(TASK, TRAINING, eps_1=0.05, eps_2=0.1, max_clusters=5)
    state, metrics = jfcl.rollout(algorithm, clients, key=jax.random.key(0), num_rounds=60)
    assert state.parent.tolist()[0] == -1 and (np.asarray(state.parent)[np.asarray(state.active)][1:] >= 0).all()
    assert (np.asarray(state.parent)[~np.asarray(state.active)] == -1).all()
    for k in np.flatnonzero(state.active):
        if state.since[k]:
            assert np.isfinite(metrics["cross_similarity"][state.since[k] - 1]).any()
    # Free slots hold a model that somebody is served.
    np.testing.assert_array_equal(state.params["w"][-1], state.params["w"][0])


@pytest.mark.slow
@pytest.mark.parametrize("tree_dim", [0, 2])
def test_resumed_equals_uninterrupted_bit_for_bit(tree_dim, tmp_path):
    clients = regression(TRUTH, CLUSTER)
    algorithm = jfcl.cfl(TASK, TRAINING, eps_1=0.05, eps_2=0.2, tree_dim=tree_dim, validation=0.2)
    run = {"key": jax.random.key(0), "num_rounds": 40, "eval_every": 5}
    whole = jfcl.simulate(algorithm, clients, **run)
    jfcl.simulate(algorithm, clients, **run, out=tmp_path / "run", stop_after=20)
    resumed = jfcl.simulate(algorithm, clients, **run, out=tmp_path / "run", resume=True)
    assert whole.state.active.sum() > 1
    jax.tree.map(np.testing.assert_array_equal, resumed.state, whole.state)
    assert resumed.records[-1]["split_from"] == whole.records[-1]["split_from"]


def test_few_clients_go_on_with_another_number_of_devices(tmp_path):
    """With a padding client there are 8, without it 7: the splits between two records are of as many models."""
    clients = jax.tree.map(lambda x: x[:7], regression(TRUTH, CLUSTER))
    for axis, stop in ((jfcl.sharded(jfcl.client_mesh(2)), 1), (jfcl.chunked(1), 3)):
        algorithm = jfcl.cfl(TASK, TRAINING, eps_1=0.05, eps_2=0.2, client_axis=axis)
        options = {"key": jax.random.key(0), "num_rounds": 3, "eval_every": 3, "client_axis": axis, "stop_after": stop}
        history = jfcl.simulate(algorithm, clients, out=tmp_path / "run", resume=True, **options)
    assert len(history.records[-1]["split_from"]) == 8


def test_full_capacity_says_so_and_goes_on():
    clients = regression(TRUTH, CLUSTER)
    algorithm = jfcl.cfl(TASK, TRAINING, eps_1=0.05, eps_2=0.1, max_clusters=2)
    with pytest.warns(UserWarning, match="a cluster would be split, but max_clusters are in use"):
        history = jfcl.simulate(algorithm, clients, key=jax.random.key(0), num_rounds=60, eval_every=10)
    assert history.state.active.tolist() == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("eval_every", [7, 60])
def test_what_happens_between_records_is_told(eval_every):
    """Splits, undone splits and full capacity are events of single rounds."""

    def told(clients, rounds=60, **options):
        algorithm = jfcl.cfl(TASK, TRAINING, **options)
        run = {"key": jax.random.key(0), "num_rounds": rounds}
        _, each = jfcl.rollout(algorithm, clients, **run)
        history = jfcl.simulate(algorithm, clients, **run, eval_every=eval_every)
        ends = [0, *(r["round"] for r in history.records)]
        for record, (a, b) in zip(history.records, itertools.pairwise(ends), strict=True):
            np.testing.assert_array_equal(record["split_from"], each["split_from"][a:b].max(axis=0))
            assert record["capacity_reached"] is bool(each["capacity_reached"][a:b].any())
            if "undone" in each:
                assert record["undone"] == float(each["undone"][:b].sum())
        return each

    clients = regression(TRUTH, CLUSTER)
    each = told(clients, eps_1=0.05, eps_2=0.2)
    assert (each["split_from"] >= 0).sum() == 2
    with pytest.warns(UserWarning, match="a cluster would be split, but max_clusters are in use"):
        each = told(clients, eps_1=0.05, eps_2=0.1, max_clusters=2, recursive=True)
    assert 0 < each["capacity_reached"].sum() < 60
    same = regression([[1, -1, 2]], np.zeros(8, int), noise=2.0, examples=6)
    judged = {"validation": 0.4, "fallback_rounds": 6, "min_rounds": 10}
    assert int(told(same, eps_1=np.inf, eps_2=1e-9, max_clusters=2, **judged)["undone"].sum()) == 1


def test_clients_too_small_to_judge_a_split_are_told_of():
    clients = regression(TRUTH, CLUSTER, examples=6)
    run = {"key": jax.random.key(0), "num_rounds": 1}
    with pytest.warns(UserWarning, match=r"validation is 0.1: 8 of 8 clients have too few examples to judge"):
        jfcl.simulate(jfcl.cfl(TASK, TRAINING, validation=0.1), clients, **run)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jfcl.simulate(jfcl.cfl(TASK, TRAINING, validation=0.4), clients, **run)


def test_what_a_round_refuses_leaves_no_run_behind(tmp_path):
    algorithm = jfcl.cfl(TASK, TRAINING, aggregator=partial(kernels.bulyan, num_malicious=3))
    with pytest.raises(ValueError, match="num_malicious"):
        jfcl.simulate(algorithm, regression(TRUTH, CLUSTER), key=jax.random.key(0), num_rounds=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_patience_and_least_size():
    clients = regression(TRUTH, CLUSTER)
    options = {"eps_1": 0.05, "eps_2": 0.1}
    first = {}
    for min_rounds in (1, 40):
        algorithm = jfcl.cfl(TASK, TRAINING, min_rounds=min_rounds, **options)
        state, _ = jfcl.rollout(algorithm, clients, key=jax.random.key(0), num_rounds=60)
        first[min_rounds] = int(state.since[state.since > 0].min())
    assert first[1] < 40 <= first[40]
    algorithm = jfcl.cfl(TASK, TRAINING, min_size=4, **options)
    state, _ = jfcl.rollout(algorithm, clients, key=jax.random.key(0), num_rounds=60)
    assert np.bincount(state.cluster)[np.flatnonzero(state.active)].tolist() == [4, 4]


@pytest.mark.slow_cases("2")
@pytest.mark.parametrize("min_size", [1, 2])
def test_tiles_find_what_the_matrix_finds(min_size, monkeypatch):
    rng = np.random.default_rng(0)
    updates = {"a": rng.standard_normal((30, 4)).astype(np.float32), "b": rng.standard_normal((30, 2)).astype("f")}
    cluster, usable = rng.integers(0, 3, 30), rng.random(30) < 0.9
    common = Averaging(None, None, 3, client_axis=jax.vmap)
    rules = server.Rules(common, None, None, None, min_size=min_size)

    def found():
        wanted = np.array([True, False, True])
        return jax.jit(partial(bipartitions, rules))(updates, cluster, usable, wanted, np.arange(30))

    dense = found()
    monkeypatch.setattr(server, "DENSE_UP_TO", 10)
    monkeypatch.setattr(server, "DENSE_SHARE", 100)
    tiled = found()
    np.testing.assert_allclose(tiled.cross_similarity, dense.cross_similarity, atol=1e-6)
    np.testing.assert_array_equal(tiled.side, dense.side)
    np.testing.assert_array_equal(tiled.smaller, dense.smaller)
    assert np.isinf(dense.cross_similarity)[1] and not np.asarray(dense.side)[cluster == 1].any()


def test_slots_are_given_in_order_and_never_twice():
    given = jax.jit(allot)
    into, full = given(np.array([1, 0, 1, 1, 0, 0], bool), np.array([1, 0, 1, 1, 0, 1], bool))
    assert into.tolist() == [1, 6, 4, 6, 6, 6] and full
    assert not given(np.zeros(6, bool), np.ones(6, bool))[1]


@pytest.mark.slow
def test_identical_clients_are_not_split_by_rounding():
    """In 257 dimensions, where similarities of equal updates are below 1; one client of another mind is split off."""
    task = jfcl.models.task(lambda key: {"w": jnp.zeros(257)}, lambda p, x: x @ p["w"], kind="regression")
    training = jfcl.local_training(optax.sgd(1e-3), num_steps=1)
    algorithm = jfcl.cfl(task, training, eps_1=np.inf, eps_2=1e-30, max_clusters=4)

    @jax.jit
    def run(x, y):
        clients = jfcl.Clients({"x": x, "y": y}, np.full(6, 4, np.int32))
        return jfcl.rollout(algorithm, clients, key=jax.random.key(0), num_rounds=3)

    cross = []
    for seed in range(8):  # whether and where sums are rounded depends on the processor
        rng = np.random.default_rng(seed)
        x = np.repeat(rng.normal(size=(1, 4, 257)), 6, axis=0).astype(np.float32)
        y = np.repeat(rng.normal(size=(1, 4)), 6, axis=0).astype(np.float32)
        state, metrics = run(x, y)
        assert state.active.sum() == 1 and (metrics["decisions"] == 1).all()
        cross += metrics["cross_similarity"][:, 0].tolist()
        state, _ = run(x, np.concatenate([y[:5], -y[5:]]))
        assert state.cluster.tolist() == [0, 0, 0, 0, 0, 1]
    assert min(cross) < 1  # or there was nothing to see


@pytest.mark.slow
@pytest.mark.parametrize("linkage", ["single", "complete"])
def test_a_round_runs_with_64_bits_enabled(linkage):
    clients = regression(TRUTH, CLUSTER)
    algorithm = jfcl.cfl(TASK, TRAINING, eps_1=np.inf, eps_2=1e-9, linkage=linkage, max_clusters=3)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        state, _ = jax.jit(algorithm.step)(jax.random.key(0), algorithm.init(jax.random.key(0), clients), clients)
    assert state.active.sum() == 2


@pytest.mark.slow
def test_a_round_holds_the_updates_once():
    count, dim = 64, 60_000
    task = jfcl.models.task(lambda key: {"w": jnp.zeros(dim)}, lambda p, x: x @ p["w"], kind="regression")
    clients = Clients(
        {"x": np.zeros((count, 2, dim), np.float32), "y": np.zeros((count, 2), np.float32)}, np.full(count, 2)
    )
    algorithm = jfcl.cfl(task, TRAINING, eps_1=np.inf, eps_2=1e-9, max_clusters=2, tree_dim=16)
    state = jax.eval_shape(algorithm.init, jax.random.key(0), clients)
    memory = jax.jit(algorithm.step).lower(jax.random.key(0), state, clients).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 1.5 * 4 * count * dim


# Hidden updates (section V-B).


@pytest.mark.slow
@pytest.mark.parametrize("privacy", ["permutation", "sign", "rotation"])
@pytest.mark.parametrize("similarity", ["updates", "gradients"])
def test_hidden_updates_change_nothing(privacy, similarity):
    clients = regression(TRUTH, CLUSTER)

    length = 1 if similarity == "updates" else 1 / (LR * STEPS)  # the thresholds are of what is compared

    def run(**options):
        thresholds = {"eps_1": 0.05 * length, "eps_2": 0.1 * length}
        algorithm = jfcl.cfl(TASK, TRAINING, similarity=similarity, **thresholds, **options)
        return jfcl.rollout(algorithm, clients, key=jax.random.key(0), num_rounds=40)

    (state, metrics), (secret, hidden) = run(), run(privacy=privacy)
    np.testing.assert_array_equal(secret.cluster, state.cluster)
    np.testing.assert_array_equal(secret.parent, state.parent)
    assert state.active.sum() >= 3
    np.testing.assert_allclose(secret.params["w"], state.params["w"], atol=1e-6 if privacy != "rotation" else 1e-5)
    for name in ("mean_norm", "max_norm", "cross_similarity"):
        np.testing.assert_allclose(hidden[name], metrics[name], atol=1e-5 * length)
    padded = 4 if privacy == "rotation" else 3
    np.testing.assert_array_equal(hidden["bytes_up"], metrics["bytes_up"] * padded / 3)


@pytest.mark.slow_cases("None-*", "permutation-*", "sign-updates", "rotation-gradients")
@pytest.mark.parametrize("similarity", ["updates", "gradients"])
@pytest.mark.parametrize("privacy", [None, "permutation", "sign", "rotation"])
def test_the_server_sees_hidden_updates_only(privacy, similarity, monkeypatch):
    clients = regression(TRUTH, CLUSTER)
    seen, serve = [], server.serve

    def traced(rules, state, sent):
        seen.append((state, sent._replace(gradients=sent.gradients())))
        return serve(rules, state, sent)

    monkeypatch.setattr(server, "serve", traced)
    algorithm = jfcl.cfl(
        TASK, TRAINING, eps_1=np.inf, eps_2=1e-9, similarity=similarity, privacy=privacy, privacy_seed=3
    )
    state = algorithm.init(jax.random.key(0), clients)
    updates = np.stack([local_update(clients, i, np.zeros(3)) for i in range(8)])
    algorithm.step(jax.random.key(1), state, clients)
    ((books, sent),) = seen
    if privacy is None:  # the look is able to see: without privacy there they are
        np.testing.assert_allclose(sent.updates["w"], updates, atol=1e-5)
        return
    # What it gets has the updates' inner products, and is not the updates; and there is no model among its books.
    hidden = np.asarray(sent.updates["hidden"], np.float64)
    np.testing.assert_allclose(hidden @ hidden.T, updates @ updates.T, atol=1e-4)
    assert books.params == () and books.client == () and books.tree.model == ()
    gradients = -updates / (LR * STEPS)  # nearly: what two steps of gradient descent have done
    for leaf in jax.tree.leaves((books, sent)):
        leaf = np.asarray(leaf)
        for secret in (updates, gradients):
            if leaf.ndim and leaf.shape[-1] >= 3:
                rows = leaf.reshape(-1, leaf.shape[-1])[:, :3]
                close = [np.allclose(row, s, rtol=0.05) for row in rows for s in secret]
                assert not any(close)


# The Federated Learning solution to fall back to (section II-A).


@pytest.mark.slow
def test_harmful_splits_are_undone_and_others_are_not():
    options = {
        "eps_1": np.inf,
        "eps_2": 1e-9,
        "min_rounds": 10,
        "max_clusters": 2,
        "validation": 0.4,
        "fallback_rounds": 6,
    }
    clients = regression([[1, -1, 2]], np.zeros(8, int), noise=2.0, examples=6)
    algorithm = jfcl.cfl(TASK, TRAINING, **options)
    states = [jfcl.rollout(algorithm, clients, key=jax.random.key(0), num_rounds=t)[0] for t in (20, 60)]
    _, metrics = jfcl.rollout(algorithm, clients, key=jax.random.key(0), num_rounds=60)
    assert metrics["undone"].sum() == 1 and metrics["num_clusters"].max() == 2
    end = states[1]
    assert end.active.tolist() == [True, False] and end.final.tolist() == [True, False]
    assert (np.asarray(end.cluster) == 0).all() and (np.asarray(end.tree.side) == 0).all()
    assert (metrics["num_clusters"][-20:] == 1).all()  # and is not split again

    clients = regression(TRUTH[:2], CLUSTER % 2)
    algorithm = jfcl.cfl(TASK, TRAINING, **options)
    state, metrics = jfcl.rollout(algorithm, clients, key=jax.random.key(0), num_rounds=60)
    assert metrics["undone"].sum() == 0
    assert state.cluster.tolist() in ((CLUSTER % 2).tolist(), (1 - CLUSTER % 2).tolist())


def test_only_the_sides_of_a_split_wait_until_it_is_judged():
    options = {"eps_1": np.inf, "eps_2": 1e-9, "validation": 0.25, "fallback_rounds": 4}
    algorithm = jfcl.cfl(TASK, TRAINING, **options)
    _, metrics = jfcl.rollout(algorithm, regression(TRUTH, CLUSTER), key=jax.random.key(0), num_rounds=7)
    assert np.flatnonzero((np.asarray(metrics["split_from"]) >= 0).any(axis=1)).tolist() == [0, 5]
    assert np.flatnonzero(metrics["decisions"]).tolist() == [0, 5]


@pytest.mark.parametrize(("similarity", "messages"), [("updates", 1), ("gradients", 2)])
def test_gradients_are_sent_besides_updates(similarity, messages):
    algorithm = jfcl.cfl(TASK, TRAINING, similarity=similarity)
    _, metrics = jfcl.rollout(algorithm, regression(TRUTH, CLUSTER), key=jax.random.key(0), num_rounds=1)
    assert metrics["bytes_up"][0] == messages * metrics["bytes_down"][0] > 0
    assert metrics["client_steps"][0] == len(CLUSTER) * (STEPS + messages - 1)  # a gradient that is sent is a step


def test_what_an_undone_split_restores():
    clients = regression([[1, -1, 2]], np.zeros(8, int), noise=2.0, examples=6)
    algorithm = jfcl.cfl(
        TASK, TRAINING, eps_1=np.inf, eps_2=1e-9, min_rounds=10, max_clusters=2, validation=0.4, fallback_rounds=6
    )
    state, before = algorithm.init(jax.random.key(0), clients), None
    for t in range(1, 61):
        previous = state
        state, metrics = jax.jit(algorithm.step)(jax.random.key(t), state, clients)
        if (metrics["split_from"] >= 0).any():
            before, born = previous, t
        if metrics["undone"]:
            assert t == born + 6 + 1
            plain = before._replace(final=jnp.array([True, False]), round=previous.round)
            again, _ = jax.jit(algorithm.step)(jax.random.key(t), plain, clients)
            np.testing.assert_array_equal(again.params["w"], state.params["w"])  # it goes on from where it was
            # Clients that are absent now are found by the slot of the split, so that no other split may have it.
            ripe = state._replace(final=jnp.zeros(2, bool), round=state.round + 20)
            later, metrics = jax.jit(algorithm.step)(jax.random.key(t), ripe, clients)
            assert metrics["decisions"] == 1 and metrics["capacity_reached"] and later.active.tolist() == [True, False]
            break
    else:
        pytest.fail("nothing was undone")


@pytest.mark.slow
def test_shared_parameters_stay_shared_when_a_split_is_undone():
    task = jfcl.models.task(
        lambda _: {"b": jnp.zeros((1, 2)), "s": jnp.zeros((1, 2))}, lambda p, x: x + p["b"] + p["s"], kind="regression"
    )
    centres = np.float32([[3, 0]] * 3 + [[-9, 0]] * 3)
    y = centres[:, None] + 3 * np.random.default_rng(0).normal(size=(6, 8, 2)).astype(np.float32)
    clients = Clients({"x": np.zeros((6, 8, 2), np.float32), "y": y}, np.full(6, 8, np.int32))
    options = {"eps_1": np.inf, "eps_2": 1e-3, "relative": False, "max_clusters": 6, "min_rounds": 1}
    algorithm = jfcl.cfl(
        task,
        jfcl.local_training(optax.sgd(0.05), num_steps=4),
        **options,
        shared=lambda path: path == "s",
        validation=0.5,
        fallback_rounds=2,
    )
    step, key = jax.jit(algorithm.step), jax.random.key(0)
    state, undone = algorithm.init(key, clients), 0
    for t in range(12):
        state, metrics = step(jax.random.fold_in(key, t), state, clients)
        undone += int(metrics["undone"])
        assert np.unique(np.asarray(state.params["s"])[np.asarray(state.active)], axis=0).shape[0] == 1
    assert undone > 0 and state.active.sum() > 1


def test_a_split_with_a_loss_of_nan_is_undone():
    """The loss of a model below 0 is NaN: worse than any number. A client that has left does not judge."""
    task = jfcl.core.Task(
        init=lambda key: {"b": jnp.ones(())},
        apply=lambda p, x: jnp.log(p["b"]) + 0.0 * x,
        cost=lambda outputs, batch: outputs,
    )
    clients = Clients({"x": np.zeros((2, 4), np.float32)}, np.full(2, 4, np.int32))
    algorithm = jfcl.cfl(task, TRAINING, max_clusters=2)
    state = jax.jit(algorithm.init)(jax.random.key(0), clients)
    state = state._replace(
        cluster=np.int32([0, 1]),
        active=np.ones(2, bool),
        parent=np.int32([-1, 0]),
        round=np.int32(3),
        tree=state.tree._replace(born=np.int32([0, 1]), model={"b": np.ones(2, np.float32)}),
    )
    common = Averaging(task, TRAINING, 2, client_axis=jax.vmap)
    rules = server.Rules(common, None, None, None, validation=0.5, fallback_rounds=2)
    judge = jax.jit(lambda now: undo_harmful_splits(rules, now, clients, {"b": False}))
    for child, left, undone in ((-2.0, 0, 1), (2.0, 0, 1), (0.5, 0, 0), (2.0, 3, 0)):
        now = state._replace(params={"b": np.float32([1.0, child])}, excluded=np.int32([0, left]))
        found = jax.device_get(judge(now))
        assert (found[1], found[0].active.sum()) == (undone, 2 - undone)


@pytest.mark.slow
def test_examples_kept_aside_are_not_learnt_from():
    clients = regression(TRUTH, CLUSTER)
    keep = np.floor(np.float32(0.25) * clients.size).astype(int)
    spoilt = jax.tree.map(np.copy, clients)
    for i in range(8):
        spoilt.examples["y"][i, clients.size[i] - keep[i] :] += 100
    algorithm = jfcl.cfl(TASK, TRAINING, validation=0.25)
    one, two = (
        jfcl.rollout(algorithm, c, key=jax.random.key(0), num_rounds=3)[0].params["w"] for c in (clients, spoilt)
    )
    np.testing.assert_array_equal(one, two)
    assert keep.min() >= 1


def test_recursive_clusters_end():
    clients = regression(TRUTH, CLUSTER)
    algorithm = jfcl.cfl(TASK, TRAINING, eps_1=0.01, eps_2=0.1, recursive=True)
    state, metrics = jfcl.rollout(algorithm, clients, key=jax.random.key(0), num_rounds=200)
    assert metrics["participants"][0] == 8 and metrics["participants"][-1] == 0 and metrics["bytes_up"][-1] == 0
    active = np.asarray(state.active)
    assert np.asarray(state.final)[active].all()
    found = [set(np.flatnonzero(state.cluster == k).tolist()) for k in np.flatnonzero(active)]
    assert sorted(map(sorted, found)) == sorted(np.flatnonzero(k == CLUSTER).tolist() for k in range(3))
    for k in np.flatnonzero(active):  # each rests at its own clients' optimum
        members = np.flatnonzero(state.cluster == k)
        w = np.asarray(state.params["w"][k], np.float64)
        mean = np.average([local_update(clients, i, w) for i in members], axis=0, weights=clients.size[members])
        assert np.linalg.norm(mean) < 0.01


@pytest.mark.slow
def test_recursive_clusters_end_with_their_own_clients():
    """With a cohort, clients that were absent, or alone, would end a cluster whose clients disagree."""
    task = jfcl.models.task(lambda _: {"b": jnp.zeros((1, 2))}, lambda p, x: x + p["b"], kind="regression")
    y = np.repeat(np.float32([[9, 1], [9, -1], [-9, 1], [-9, -1]])[:, None], 3, axis=1)
    clients = Clients({"x": np.zeros((4, 3, 2), np.float32), "y": y}, np.full(4, 3, np.int32))
    options = {"eps_1": 0.2, "eps_2": 0.3, "relative": False, "max_clusters": 4, "min_rounds": 3, "cohort": 2}
    algorithm = jfcl.cfl(task, jfcl.local_training(optax.sgd(0.5), num_steps=1), **options, recursive=True)
    step = jax.jit(algorithm.step)
    for seed in range(6):
        key = jax.random.key(seed)
        state = algorithm.init(key, clients)
        for t in range(60):
            state, metrics = step(jax.random.fold_in(key, t), state, clients)
        assert metrics["ended"] and sorted(state.cluster.tolist()) == [0, 1, 2, 3]


def test_separation_gap_is_definition_2():
    clients = regression(TRUTH, CLUSTER)
    true_cluster = np.where(np.arange(8) == 3, -1, CLUSTER)  # one is unknown, and does not count
    kept = np.flatnonzero(true_cluster >= 0).tolist()
    algorithm = jfcl.cfl(TASK, TRAINING, eps_1=1e-9, eps_2=1.0, true_cluster=true_cluster, max_clusters=2)
    _, metrics = jfcl.rollout(algorithm, clients, key=jax.random.key(0), num_rounds=1)
    updates = np.stack([local_update(clients, i, np.zeros(3)) for i in range(8)])
    unit = updates / np.linalg.norm(updates, axis=1, keepdims=True)
    intra = min(unit[i] @ unit[j] for i in kept for j in kept if i != j and CLUSTER[i] == CLUSTER[j])
    cross, _ = best_bipartition(updates, kept)
    np.testing.assert_allclose(metrics["separation_gap"][0, 0], intra - cross, atol=1e-5)
    assert np.isnan(metrics["separation_gap"][0, 1])

    # By the clients' ids, which stand in any order in a population.
    order = np.array([3, 0, 7, 1, 6, 2, 5, 4], np.int32)
    _, again = jfcl.rollout(algorithm, jfcl.core.take_clients(clients, order), key=jax.random.key(0), num_rounds=1)
    np.testing.assert_allclose(again["separation_gap"][0, 0], intra - cross, atol=1e-5)


# The Byzantine variant.


def byzantine_algorithm_1(clients, send, rounds, threshold):
    """One cluster kept, to the letter, with `send(round, i, update)` what client i sends."""
    inside, model, excluded = list(range(len(clients.size))), np.zeros(3), {}
    for t in range(1, rounds + 1):
        updates = {i: send(t, i, local_update(clients, i, model.copy())) for i in inside}
        if len(inside) >= 3:
            cross, second = best_bipartition(updates, inside)
            if cross < threshold:
                out = second if 2 * len(second) <= len(inside) else [i for i in inside if i not in second]
                excluded |= dict.fromkeys(out, t)
                inside = [i for i in inside if i not in out]
        model = model + np.average([updates[i] for i in inside], axis=0, weights=clients.size[inside])
    return excluded, model


def test_byzantine_variant_is_its_algorithm():
    clients = regression([[1, -1, 2], [-1, 1, -2]], np.array([0, 0, 0, 1, 0, 1, 0, 0]), noise=0.3)
    jfcl.byzantine_cfl(TASK, TRAINING, threshold=-1.0)  # the paper's thresholds are in [-1, 1)
    algorithm = jfcl.byzantine_cfl(TASK, TRAINING, threshold=0.02)
    state, metrics = rollout(algorithm, clients, key=jax.random.key(0), num_rounds=8)
    excluded, model = byzantine_algorithm_1(clients, lambda t, i, u: u, 8, 0.02)
    assert {i: int(t) for i, t in enumerate(state.excluded) if t} == excluded
    np.testing.assert_allclose(np.asarray(state.params["w"])[0], model, atol=1e-4)
    gone = [sum(t <= now for t in excluded.values()) for now in range(9)]
    assert metrics["num_excluded"].tolist() == gone[1:]
    assert metrics["participants"].tolist() == [8 - count for count in gone[:-1]]
    assert set(excluded) >= {3, 5}
    halves = np.array([1, 0, 0, 1, 1, 0, 1, 0])
    equal = regression([[1, -1, 2], [-1, 1, -2]], halves, noise=0.1)
    state, _ = rollout(algorithm, equal, key=jax.random.key(0), num_rounds=8)
    np.testing.assert_array_equal(np.asarray(state.excluded) > 0, halves == 0)  # the first client stays


@pytest.mark.slow
def test_byzantine_variant_that_excludes_no_client_is_fedavg_to_the_bit():
    clients = regression([[1, -1, 2]], np.zeros(8, int), noise=0.1)
    ours, fedavg = (
        jfcl.rollout(method(TASK, TRAINING), clients, key=jax.random.key(0), num_rounds=5)
        for method in (jfcl.byzantine_cfl, jfcl.fedavg)
    )
    assert not ours[0].excluded.any()
    np.testing.assert_array_equal(ours[0].params["w"], fedavg[0].params["w"])
    np.testing.assert_allclose(ours[1]["loss"], fedavg[1]["loss"], rtol=1e-6)  # a mean in another program


def test_who_sends_nan_is_shut_out_at_once():
    clients = regression([[1, -1, 2]], np.zeros(6, int), noise=0.1)
    adversary = jfcl.Adversary(jfcl.attacks.nan(), np.arange(6) == 4)
    algorithm = jfcl.byzantine_cfl(TASK, TRAINING, adversary=adversary)
    state, metrics = rollout(algorithm, clients, key=jax.random.key(0), num_rounds=2)
    assert state.excluded.tolist() == [0, 0, 0, 0, 1, 0] and metrics["nonfinite"].tolist() == [1, 0]


def test_attackers_of_every_kind_are_shut_out():
    clients = regression([[1, -1, 2]], np.zeros(10, int), noise=0.1)
    malicious = np.array([False] * 7 + [True] * 3)
    for attack in (jfcl.attacks.sign_flip(), jfcl.attacks.ipm()):
        algorithm = jfcl.byzantine_cfl(TASK, TRAINING, adversary=jfcl.Adversary(attack, malicious))
        state, _ = jfcl.rollout(algorithm, clients, key=jax.random.key(0), num_rounds=3)
        np.testing.assert_array_equal(state.excluded > 0, malicious)
        np.testing.assert_array_equal(state.excluded[7:], 1)


@pytest.mark.slow
@pytest.mark.parametrize("similarity", ["updates", "gradients"])
def test_attackers_lie_in_whatever_is_compared(similarity):
    clients = regression([[1, -1, 2]], np.zeros(10, int), noise=0.1)
    adversary = jfcl.Adversary(jfcl.attacks.sign_flip(), np.arange(10) >= 7)
    algorithm = jfcl.byzantine_cfl(TASK, TRAINING, adversary=adversary, similarity=similarity)
    state, _ = jfcl.rollout(algorithm, clients, key=jax.random.key(0), num_rounds=1)
    assert state.excluded.tolist() == [0] * 7 + [1] * 3


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: jfcl.cfl(TASK, TRAINING, eps_1=0.0), "eps_1 must be above 0, got 0.0"),
        (lambda: jfcl.cfl(TASK, TRAINING, eps_2=-1.0), "eps_2 must be above 0"),
        (lambda: jfcl.cfl(TASK, TRAINING, gamma_max=1.0), r"gamma_max must be in \[0, 1\), got 1.0"),
        (lambda: jfcl.cfl(TASK, TRAINING, max_clusters=0), "max_clusters must be an integer, at least 1"),
        (lambda: jfcl.cfl(TASK, TRAINING, min_rounds=0), "min_rounds must be an integer"),
        (lambda: jfcl.cfl(TASK, TRAINING, similarity="models"), "unknown similarity 'models'"),
        (lambda: jfcl.cfl(TASK, TRAINING, weights="none"), "unknown weights 'none'"),
        (lambda: jfcl.cfl(TASK, TRAINING, privacy="rotate"), "unknown privacy 'rotate': did you mean 'rotation'"),
        (lambda: jfcl.cfl(TASK, TRAINING, validation=1.0), r"validation must be in \[0, 1\), got 1.0"),
        (lambda: jfcl.cfl(TASK, TRAINING, fallback_rounds=0), "fallback_rounds must be an integer"),
        (lambda: jfcl.cfl(TASK, TRAINING, tree_dim=-1), "tree_dim must be an integer, at least 0"),
        (lambda: jfcl.byzantine_cfl(TASK, TRAINING, threshold=1.0), r"threshold must be in \[-1, 1\), got 1.0"),
    ],
)
def test_bad_input_is_named(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_thresholds_that_mislead_are_warned_of():
    with pytest.warns(UserWarning, match=r"eps_2 \(0.5\) is not above eps_1 \(0.5\): clients that agree will be split"):
        jfcl.cfl(TASK, TRAINING, eps_1=0.5, eps_2=0.5)


def test_true_clusters_must_fit():
    algorithm = jfcl.cfl(TASK, TRAINING, true_cluster=np.zeros(3, int))
    with pytest.raises(ValueError, match=r"true_cluster must be of shape \(8,\), got \(3,\)"):
        algorithm.init(jax.random.key(0), regression(TRUTH, CLUSTER))


def test_more_slots_than_clients_are_refused():
    algorithm = jfcl.cfl(TASK, TRAINING, max_clusters=9)
    with pytest.raises(ValueError, match="max_clusters must be at most the 8 clients there are, got 9"):
        algorithm.init(jax.random.key(0), regression(TRUTH, CLUSTER))
