"""Clients that a bipartition does not place, in CFL: small, absent, enrolled and drawn into cohorts; against NumPy."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.cluster.hierarchy import fcluster, linkage
from test_cfl import (
    CLUSTER,
    LR,
    STEPS,
    TASK,
    TRAINING,
    TRUTH,
    best_bipartition,
    local_loss,
    local_update,
    loss_gradient,
    regression,
)

import jfcl
from jfcl.analysis.metrics import cluster_recovery
from jfcl.methods.cfl.parameter_tree import enrol
from jfcl.methods.cfl.rounds import keep_finite
from jfcl.methods.cfl.state import enough_known
from jfcl.robust.attacks import UPDATE_ATTACKS

KEY = jax.random.key(0)
CLIENTS = regression(TRUTH, CLUSTER)


def power_law(num_clients, *, seed, truth=TRUTH):
    """Clients of 1 to 60 examples, most of them with few."""
    rng = np.random.default_rng(seed)
    cluster = rng.integers(0, len(truth), num_clients)
    clients = regression(truth, cluster, examples=60, seed=seed)
    return clients._replace(size=np.minimum(rng.zipf(1.4, num_clients), 60).astype(np.int32)), cluster


def rand(found, truth):
    return cluster_recovery(np.asarray(found), np.asarray(truth))["adjusted_rand"]


def test_small_clients_are_not_compared_and_follow_the_side_that_they_resemble():
    clients, _ = power_law(30, seed=3)
    big = np.flatnonzero(clients.size >= 20)
    assert 6 <= len(big) <= 12 and (clients.size == 1).sum() >= 8
    algorithm = jfcl.cfl(TASK, TRAINING, eps_1=np.inf, eps_2=1e-9, min_examples=20, max_clusters=2)
    state, metrics = jax.jit(algorithm.step)(KEY, algorithm.init(KEY, clients), clients)
    updates = np.stack([local_update(clients, i, np.zeros(3)) for i in range(30)])
    norms = np.linalg.norm(updates, axis=1)
    mean = np.average(updates[big], axis=0, weights=clients.size[big])
    np.testing.assert_allclose(metrics["max_norm"][0], norms[big].max(), rtol=1e-5)
    np.testing.assert_allclose(metrics["mean_norm"][0], np.linalg.norm(mean), rtol=1e-5)
    np.testing.assert_allclose(state.scale, [np.linalg.norm(mean), norms[big].max()], rtol=1e-5)
    cross, second = best_bipartition(updates, big.tolist())
    np.testing.assert_allclose(metrics["cross_similarity"][0], cross, atol=1e-5)
    unit = updates / norms[:, None]
    sides = [unit[second].mean(axis=0), unit[[i for i in big if i not in second]].mean(axis=0)]
    moved, stayed = (unit @ s / np.linalg.norm(s) for s in sides)
    np.testing.assert_array_equal(
        state.cluster, np.where(np.isin(np.arange(30), big), np.isin(np.arange(30), second), moved > stayed)
    )
    for k in (0, 1):  # the models are means of all clients, small ones too
        mine = np.flatnonzero(np.asarray(state.cluster) == k)
        np.testing.assert_allclose(
            state.params["w"][k], np.average(updates[mine], axis=0, weights=clients.size[mine]), atol=1e-5
        )
    assert set(np.flatnonzero(state.tree.side[1])) == set(big)  # newcomers are compared with these alone


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"similarity": "gradients"}, {"cohort": 20}])
def test_small_clients_do_not_stop_the_others_from_finding_their_clusters(options):
    clients, cluster = power_law(60, seed=5)
    big = clients.size >= 20
    algorithm = jfcl.cfl(TASK, TRAINING, min_examples=20, **options)
    state, metrics = jax.jit(lambda: jfcl.rollout(algorithm, clients, key=KEY, num_rounds=120))()
    assert rand(state.cluster[big], cluster[big]) == 1 and state.active.sum() == 3
    assert not options or metrics["participants"][0] == options.get("cohort", 60)
    mine = np.linalg.norm(np.asarray(state.params["w"])[state.cluster] - np.asarray(TRUTH)[cluster], axis=1)
    assert mine[big].max() < 0.1
    if not options:
        assert not state.sides.changing.any()  # small clients come to rest


@pytest.mark.slow
def test_a_small_client_is_compared_again_until_two_rounds_agree():
    """Client 7 brings the data of the other cluster when it is placed, at the split or in the round after it."""
    cluster = np.array([0, 1, 0, 1, 0, 1, 0, 1])
    clients = regression(TRUTH[:2], cluster)
    clients = clients._replace(size=np.where(np.arange(8) == 7, 5, 12).astype(np.int32))
    examples = jax.tree.map(np.copy, clients.examples)
    for name in examples:
        examples[name][7] = examples[name][0]
    misled = clients._replace(examples=examples)
    absent = clients._replace(size=np.where(np.arange(8) == 7, 0, 12).astype(np.int32))
    algorithm = jfcl.cfl(TASK, TRAINING, eps_1=np.inf, eps_2=1e-9, min_examples=10, max_clusters=2)
    step = jax.jit(algorithm.step)
    for until_placed in ([misled], [absent, misled]):
        state = algorithm.init(KEY, clients)
        for data in until_placed:
            state, _ = step(KEY, state, data)
        assert state.cluster.tolist() == [0, 1, 0, 1, 0, 1, 0, 0] and state.sides.changing.tolist() == [False] * 7 + [
            True
        ]
        state, _ = step(KEY, state, clients)
        assert state.cluster.tolist() == cluster.tolist() and state.sides.changing[7]
        state, _ = step(KEY, state, clients)
        assert state.cluster.tolist() == cluster.tolist() and not state.sides.changing.any()


@pytest.mark.slow
def test_a_client_that_always_sends_nan_does_not_keep_a_recursive_run_with_cohorts_from_ending():
    broken = jfcl.Adversary(UPDATE_ATTACKS["nan"](), jnp.arange(8) == 3)
    algorithm = jfcl.cfl(TASK, TRAINING, eps_1=0.01, eps_2=0.1, recursive=True, cohort=6, adversary=broken)
    with pytest.warns(UserWarning, match="held NaN or infinity"):
        history = jfcl.simulate(algorithm, CLIENTS, key=KEY, num_rounds=600, eval_every=20)
    assert history.records[-1]["ended"] and history.rounds < 600 and history.state.heard.mute.tolist()[3]


@pytest.mark.slow
def test_a_thousand_clients_of_which_464_have_one_example():
    """The figures of docs/howto/small_clients.md, by benchmarks/cfl_small_clients.py."""
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
    from cfl_small_clients import problem

    task, clients, cluster = problem()
    big = clients.size >= 20
    assert len(cluster) == 1000 and (clients.size == 1).sum() == 464
    training = jfcl.local_training(optax.sgd(0.05), num_steps=5)

    def run(algorithm, rounds):
        return jax.jit(lambda: jfcl.rollout(algorithm, clients, key=KEY, num_rounds=rounds))()[0]

    assert (
        rand(run(jfcl.cfl(task, training), 40).cluster[big], cluster[big]) < 0.05
    )  # outliers are split off one by one
    assert rand(run(jfcl.cfl(task, training, min_examples=20), 40).cluster[big], cluster[big]) >= 0.95
    start = jax.tree.map(lambda p: p[0], run(jfcl.fedavg(task, training), 200).params)
    warm = run(jfcl.cfl(task, training, min_examples=20, init_params=start), 40)
    assert rand(warm.cluster[big], cluster[big]) >= 0.95


STEP = jfcl.cfl(TASK, TRAINING, eps_1=0.05, eps_2=0.2)


def test_clients_that_miss_the_round_of_a_split_are_placed_by_their_next_update():
    clients, late = regression(TRUTH[:2], CLUSTER % 2), np.array([2, 4, 5])

    def absent():
        size = clients.size.copy()
        size[late] = 0
        return clients._replace(size=size)

    def nan():
        y = clients.examples["y"].copy()
        y[late] = np.nan
        return clients._replace(examples={**clients.examples, "y": y})

    algorithm = jfcl.cfl(TASK, TRAINING, eps_1=np.inf, eps_2=1e-9, min_rounds=8, max_clusters=2)
    init, step = jax.jit(algorithm.init), jax.jit(algorithm.step)
    for spoilt in (absent(), nan()):
        state = init(KEY, clients)
        for t in range(1, 30):
            old, (state, metrics) = state, step(jax.random.fold_in(KEY, t), state, spoilt if t in (8, 9) else clients)
            assert (metrics["split_from"].max() == 0) == (t == 8)
            if t in (8, 9):
                assert state.cluster[late].tolist() == [0, 0, 0] and state.sides.placed[late].tolist() == [0, 0, 0]
            if t == 10:  # they trained the model before the split, and count in no mean of this round
                before = np.asarray(state.tree.model["w"][1], np.float64)
                updates = np.stack([local_update(clients, i, before.copy()) for i in range(8)])
                unit = updates / np.linalg.norm(updates, axis=1, keepdims=True)
                sides = [unit[np.asarray(state.tree.side[1]) == side].mean(axis=0) for side in (1, 2)]
                nearer = [unit @ side / np.linalg.norm(side) for side in sides]
                np.testing.assert_array_equal(state.cluster[late], (nearer[1] > nearer[0])[late])
                assert state.sides.placed[late].tolist() == [8, 8, 8]
                for k, w in enumerate(np.asarray(old.params["w"][:2], np.float64)):
                    some = [i for i in np.flatnonzero(old.cluster == k) if i not in late]
                    mean = np.average([local_update(clients, i, w) for i in some], axis=0, weights=clients.size[some])
                    np.testing.assert_allclose(state.params["w"][k], w + mean, atol=1e-5)
        assert rand(state.cluster, CLUSTER % 2) == 1


@pytest.mark.slow
def test_from_the_optimum_of_fedavg_all_clusters_are_found_at_the_default_thresholds():
    fedavg = jfcl.fedavg(TASK, TRAINING)
    start = jfcl.rollout(fedavg, CLIENTS, key=KEY, num_rounds=300)[0].params
    algorithm = jfcl.cfl(TASK, TRAINING, init_params=start)
    state, metrics = jfcl.rollout(algorithm, CLIENTS, key=KEY, num_rounds=60)
    assert metrics["mean_norm"][0, 0] < 1e-3 * metrics["max_norm"][0, 0]
    assert rand(state.cluster, CLUSTER) == 1 and state.active.sum() == 3
    np.testing.assert_allclose(metrics["thresholds"][-1] / state.scale[1], [0.1, 0.5], rtol=1e-5)


@pytest.mark.slow
def test_one_threshold_alone_leaves_the_other_relative():
    def thresholds(**options):
        algorithm = jfcl.cfl(TASK, TRAINING, **options)
        state, metrics = jax.jit(algorithm.step)(KEY, algorithm.init(KEY, CLIENTS), CLIENTS)
        return metrics["thresholds"], state.scale

    found, (_, longest) = thresholds(eps_1=0.05)
    np.testing.assert_allclose(found, [0.05, 0.5 * longest], rtol=1e-6)
    found, _ = thresholds(relative=False)
    np.testing.assert_allclose(found, [0.4, 1.6], rtol=1e-6)


@pytest.mark.slow
def test_with_gradients_the_thresholds_are_of_gradients():
    algorithm = jfcl.cfl(TASK, TRAINING, similarity="gradients", linkage="complete", eps_1=np.inf, eps_2=1e-9)
    state, metrics = jax.jit(algorithm.step)(KEY, algorithm.init(KEY, CLIENTS), CLIENTS)
    gradients = []
    for i, n in enumerate(CLIENTS.size):
        x, y = (np.asarray(CLIENTS.examples[k][i][:n], np.float64) for k in "xy")
        gradients.append(loss_gradient(x, y, np.zeros(3)))
    gradients = np.stack(gradients)
    mean = np.average(gradients, axis=0, weights=CLIENTS.size)
    np.testing.assert_allclose(metrics["mean_norm"][0], np.linalg.norm(mean), rtol=1e-5)
    np.testing.assert_allclose(metrics["max_norm"][0], np.linalg.norm(gradients, axis=1).max(), rtol=1e-5)
    by_scipy = fcluster(linkage(gradients, "complete", metric="cosine"), 2, "maxclust")
    assert rand(state.cluster, by_scipy) == 1


def test_a_run_that_never_examines_a_cluster_says_why():
    algorithm = jfcl.cfl(TASK, TRAINING, relative=True, eps_1=1e-6)
    with pytest.warns(UserWarning, match=r"no cluster was ever examined.*above eps_2, 0\.\d+; the mean update"):
        history = jfcl.simulate(algorithm, CLIENTS, key=KEY, num_rounds=10, eval_every=10)
    assert history.records[-1]["decisions"] == 0


@pytest.mark.slow
def test_a_cluster_that_overflows_leaves_the_others_alone():
    def attack(key, updates, malicious, usable, cluster):
        hit = (malicious & (cluster == 1))[:, None]
        return jax.tree.map(lambda u: jnp.where(hit, jnp.asarray(3e38, u.dtype), u), updates)

    plain = jfcl.simulate(STEP, CLIENTS, key=KEY, num_rounds=60, eval_every=60)
    hostile = jfcl.cfl(TASK, TRAINING, eps_1=0.05, eps_2=0.2, adversary=jfcl.Adversary(attack, np.arange(8) >= 0))
    with pytest.warns(UserWarning, match=r"the models of clusters \[1\] overflowed"):
        history = jfcl.simulate(hostile, CLIENTS, key=KEY, num_rounds=60, eval_every=30)
    state = history.state
    assert np.isfinite(state.params["w"]).all() and bool(state.final[1]) and not state.final[0]
    assert history.records[-1]["overflowed"][1] and not history.records[-1]["overflowed"][0]
    first = np.flatnonzero(np.asarray(plain.state.cluster) == 0)
    np.testing.assert_array_equal(np.flatnonzero(np.asarray(state.cluster) == 0), first)
    np.testing.assert_allclose(state.params["w"][0], plain.state.params["w"][0], rtol=1e-5)


@pytest.mark.slow
def test_where_every_cluster_overflows_nothing_is_hidden():
    new = {"own": jnp.array([[jnp.inf], [1.0], [jnp.nan]]), "all": jnp.full((3, 1), 7.0)}
    old, is_shared = jax.tree.map(jnp.zeros_like, new), {"own": False, "all": True}
    kept, overflowed = keep_finite(new, old, jnp.array([True, True, False]), is_shared)
    assert kept["own"][:2].tolist() == [[0.0], [1.0]] and overflowed.tolist() == [True, False, False]
    assert kept["all"].tolist() == [[7.0]] * 3  # shared parameters stay the same in all clusters
    kept, overflowed = keep_finite(new, old, jnp.array([True, False, True]), is_shared)
    assert not np.isfinite(kept["own"][0, 0]) and not overflowed.any()
    wild = jfcl.cfl(TASK, jfcl.local_training(optax.sgd(1e15), num_steps=1))
    with warnings.catch_warnings(), pytest.raises(jfcl.DivergedError):
        warnings.simplefilter("ignore")
        jfcl.simulate(wild, CLIENTS, key=KEY, num_rounds=10)


def test_a_recursive_run_ends_when_every_cluster_is_final(tmp_path):
    algorithm = jfcl.cfl(TASK, TRAINING, eps_1=0.01, eps_2=0.1, recursive=True)
    keys = jax.random.split(KEY, 2)
    run = {"key": keys, "num_rounds": 400, "eval_every": 7}
    history = jfcl.simulate(algorithm, CLIENTS, **run, out=tmp_path / "run")
    assert 7 < history.rounds < 400 and history.rounds % 7 == 0
    assert all(r["ended"] for r in history.records[-2:]) and not all(r["ended"] for r in history.records[-4:-2])
    assert (history.state.final | ~history.state.active).all()
    again = jfcl.simulate(algorithm, CLIENTS, **run, out=tmp_path / "run", resume=True)
    assert again.rounds == history.rounds and len(again.records) == len(history.records)
    jax.tree.map(np.testing.assert_array_equal, again.state, history.state)


@pytest.mark.slow
def test_a_run_starts_from_a_given_state(tmp_path):
    first = jfcl.rollout(STEP, CLIENTS, key=KEY, num_rounds=20)[0]
    wanted = jax.jit(lambda s: jfcl.rollout(STEP, CLIENTS, key=jax.random.key(5), num_rounds=5, state=s)[0])(first)
    run = {"key": jax.random.key(5), "num_rounds": 5}
    history = jfcl.simulate(STEP, CLIENTS, **run, state=first, out=tmp_path / "run")
    jax.tree.map(np.testing.assert_array_equal, history.state, wanted)
    assert history.rounds == 5 and history.state.round == 25
    resumed = jfcl.simulate(STEP, CLIENTS, **run, state=wanted, out=tmp_path / "run", resume=True)
    jax.tree.map(np.testing.assert_array_equal, resumed.state, wanted)  # the checkpoint has precedence
    fedavg, keys = jfcl.fedavg(TASK, TRAINING), jax.random.split(KEY, 2)
    two = jfcl.simulate(fedavg, CLIENTS, key=keys, num_rounds=2).state
    four = jfcl.simulate(fedavg, CLIENTS, key=keys, num_rounds=2, state=two).state
    assert four.round.tolist() == [4, 4] and two.round.tolist() == [2, 2]
    assert not np.allclose(two.params["w"], four.params["w"])
    for bad, said in (
        (
            jax.tree.map(lambda x: x[0], two),
            r"state must be of this algorithm.*\.cluster is int32 \[8\], not int32 \[2, 8\]",
        ),
        (first, "state must be of this algorithm.*not there"),
    ):
        with pytest.raises(ValueError, match=said):
            jfcl.simulate(fedavg, CLIENTS, key=keys, num_rounds=1, state=bad)


@pytest.mark.slow
@pytest.mark.parametrize("tree_dim", [1024, 0])
def test_newcomers_are_enrolled(tree_dim):
    training = jfcl.local_training(optax.sgd(LR, momentum=0.1), num_steps=STEPS, keep="everything")
    algorithm = jfcl.cfl(TASK, training, eps_1=0.05, eps_2=0.2, tree_dim=tree_dim, min_examples=2)
    state, _ = jfcl.rollout(algorithm, CLIENTS, key=KEY, num_rounds=60)
    truth = np.array([2, 0, 1, 1, 2])
    late = regression(TRUTH, truth, seed=9)
    grown = enrol(state, late, task=TASK, training=training, key=jax.random.key(1))
    every = jax.tree.map(lambda *x: np.concatenate(x), CLIENTS, late)
    history = jfcl.simulate(algorithm, every, key=jax.random.key(2), num_rounds=4, eval_every=4, state=grown)
    assert rand(history.state.cluster, [*CLUSTER, *truth]) == 1
    np.testing.assert_array_equal(history.state.cluster[:8], state.cluster)
    if tree_dim:
        np.testing.assert_array_equal(grown.cluster, history.state.cluster)
    wide = regression(TRUTH, truth)._replace(
        examples={"x": np.zeros((5, 12, 4), np.float32), "y": np.zeros((5, 12), np.float32)}
    )
    with pytest.raises(ValueError, match=r"clients: inputs have shape \(4,\), but the model is made for \(3,\)"):
        enrol(state, wide, task=TASK._replace(input_shape=(3,)), training=training, key=KEY)
    with pytest.raises(ValueError, match="state must be the state of a run that splits clusters"):
        enrol(state._replace(sides=()), late, task=TASK, training=training, key=KEY)
    noisy = training._replace(optimizer=optax.add_noise(0.1, 0.0, key=0))
    with jax.numpy_dtype_promotion("standard"):  # which optax relies on
        begun = jfcl.cfl(TASK, noisy, tree_dim=0).init(KEY, CLIENTS)
        grown = enrol(begun, late, task=TASK, training=noisy, key=KEY)
    assert {len(x) for x in jax.tree.leaves(grown.client)} == {13}


def test_a_cohorts_updates_are_kept_with_their_age():
    algorithm = jfcl.cfl(TASK, TRAINING, cohort=3, eps_1=1e-30, eps_2=1e9, relative=True)
    state, when = algorithm.init(KEY, CLIENTS), np.zeros(8, int)
    step, known = jax.jit(algorithm.step), np.zeros((8, 3))
    for t in range(1, 6):
        before = np.asarray(state.params["w"][0], np.float64)
        state, metrics = step(jax.random.key(t), state, CLIENTS)
        came = np.flatnonzero(~np.isnan(metrics["loss"]))
        assert len(came) == metrics["participants"] == 3
        losses = [local_loss(CLIENTS, i, before) for i in came]
        np.testing.assert_allclose(np.asarray(metrics["loss"])[came], losses, rtol=1e-4)
        when[came] = t
        known[came] = [local_update(CLIENTS, i, before.copy()) for i in came]
        np.testing.assert_array_equal(state.heard.round, when)
        np.testing.assert_allclose(state.heard.update["w"], known, atol=1e-5)
        mean = np.average(known[came], axis=0, weights=CLIENTS.size[came])
        np.testing.assert_allclose(state.params["w"][0], before + mean, atol=1e-5)
        there = when > 0
        np.testing.assert_allclose(
            metrics["mean_norm"][0],
            np.linalg.norm(np.average(known[there], axis=0, weights=CLIENTS.size[there])),
            rtol=1e-4,
        )
        np.testing.assert_allclose(metrics["max_norm"][0], np.linalg.norm(known[came], axis=1).max(), rtol=1e-4)

    # With units in which the thresholds are passed, a split: an update at another model than its client's is not kept.
    state, metrics = step(jax.random.key(6), state._replace(scale=np.float32([1e38, 1e-37])), CLIENTS)
    when[~np.isnan(metrics["loss"])] = 6
    moved = np.asarray(state.cluster) == 1
    assert 0 < moved.sum() < 8
    np.testing.assert_array_equal(state.heard.round, np.where(moved, 0, when))


def test_a_cluster_is_compared_with_half_of_its_clients_and_ends_with_more():
    cluster, counts = np.repeat(np.arange(4, dtype=np.int32), 4), np.repeat([1, 2, 3, 4], 4)
    able = cluster < 3
    compared = able & (np.arange(16) % 4 < counts)
    assert enough_known(compared, able, cluster, 4).tolist() == [False, True, True, False]
    assert enough_known(compared, able, cluster, 4, most=True).tolist() == [False, False, True, False]


def test_cohorts_find_the_clusters_and_split_no_clients_that_agree():
    algorithm = jfcl.cfl(TASK, TRAINING, cohort=4)
    run = jax.jit(lambda clients, key: jfcl.rollout(algorithm, clients, key=key, num_rounds=120)[0])
    assert rand(run(CLIENTS, KEY).cluster, CLUSTER) == 1
    same = regression(TRUTH[:1], np.zeros(8, int))
    for seed in range(3):
        assert run(same, jax.random.key(seed)).active.sum() == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"min_size": 5}, "min_size must be at most 4, half of the 8 clients"),
        ({"min_examples": 13}, "min_examples must be a number of examples that two clients at least have; 0 of 8"),
        (
            {"min_size": 2, "min_examples": 11},
            "min_size must be at most .*, half of the . clients with min_examples=11",
        ),
        ({"cohort": 9}, "cohort must be at most the 8 clients there are, got 9"),
    ],
)
def test_options_that_no_split_can_satisfy_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        jfcl.simulate(jfcl.cfl(TASK, TRAINING, **options), CLIENTS, key=KEY, num_rounds=1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"min_examples": 0}, "min_examples must be an integer, at least 1"),
        ({"cohort": 0}, "cohort must be an integer, at least 1"),
        ({"linkage": "average"}, "unknown linkage 'average'"),
        ({"linkage": "complete", "min_size": 2}, 'linkage must be "single" with min_size=2'),
        ({"cohort": 2, "similarity": "gradients"}, "cohort must be left out"),
    ],
)
def test_bad_options_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        jfcl.cfl(TASK, TRAINING, **options)
