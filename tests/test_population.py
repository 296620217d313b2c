import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
import warnings
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

import jfcl
from jfcl.core import Algorithm
from jfcl.data import ClientStore
from jfcl.data.store import example_shapes
from jfcl.mapping import memory
from jfcl.simulation.client_rows import ClientRows
from jfcl.simulation.cohorts import _stratified, make_sampler, prefetched, who_answers
from jfcl.simulation.layout import check_cohorts, layout_of
from jfcl.simulation.streamed import _check_hardest, _evaluated
from jfcl.testing import count_compilations, problem

CLIENTS, CLUSTER, TASK, TRAINING = problem()
STORE = ClientStore.from_clients(CLIENTS, cluster=CLUSTER)
DRIFTING = CLIENTS._replace(examples=CLIENTS.examples | {"step": np.zeros(CLIENTS.examples["x"].shape[:2], np.int32)})
DRIFTING = ClientStore.from_clients(DRIFTING)
KEY = jax.random.key(3)
EVERYTHING = jfcl.local_training(optax.sgd(0.05, momentum=0.9), num_steps=2, keep="everything")
ONE_STEP = EVERYTHING._replace(num_steps=1)
METHODS = {
    "fedavg": jfcl.fedavg(TASK, TRAINING),
    "fedavg with momenta": jfcl.fedavg(TASK, EVERYTHING),
    "fedavgm": jfcl.fedavg(TASK, TRAINING, server_optimizer=optax.sgd(1.0, momentum=0.9)),
    "ifca": jfcl.ifca(TASK, TRAINING, num_clusters=2),
    "hypcluster": jfcl.hypcluster(TASK, TRAINING, num_clusters=2),
    "clove": jfcl.clove(TASK, TRAINING, num_clusters=2),
    "stocfl": jfcl.stocfl(TASK, TRAINING, max_clusters=5, observe_epochs=2),
    "oracle": jfcl.oracle(TASK, TRAINING, cluster=CLUSTER),
    "local": jfcl.local_only(TASK, EVERYTHING),
    "cfl": jfcl.cfl(TASK, TRAINING, eps_1=np.inf, eps_2=1e-9, min_rounds=4, max_clusters=3),
    "ditto": jfcl.ditto(TASK, EVERYTHING),
    "federated_clustering": jfcl.federated_clustering(TASK, TRAINING, quantile=0.5),
    "momentum_clustering": jfcl.momentum_clustering(TASK, ONE_STEP, num_clusters=2, quantile=0.5),
}


def population(algorithm=METHODS["ifca"], store=STORE, **options):
    """A run of six rounds of four clients, unless `options` of `Population` and of `simulate` say otherwise."""
    options = {"key": KEY, "num_rounds": 6, "cohort": 4, "test_clients": store} | options
    of_clients = {name: options.pop(name) for name in jfcl.Population._fields[1:] if name in options}
    return jfcl.simulate(algorithm, jfcl.Population(store, **of_clients), **options)


def same(a, b, **tolerance):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if tolerance:
            np.testing.assert_allclose(x, y, **tolerance)
        else:
            np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


# ---- Everyone, every round: the same as `simulate` -----------------------------------------------------------------


@pytest.mark.parametrize("method", ["ifca", *[pytest.param(m, marks=pytest.mark.slow) for m in METHODS if m != "ifca"]])
def test_the_whole_population_as_the_cohort_is_simulate(method):
    algorithm = METHODS[method]
    there = jfcl.simulate(algorithm, CLIENTS, key=KEY, num_rounds=4, test_clients=CLIENTS, true_cluster=CLUSTER)
    here = population(algorithm, num_rounds=4, cohort=7)
    same(there.state, here.state, rtol=1e-6, atol=1e-6)
    for a, b in zip(there.records, here.records, strict=True):
        for name in ("loss", "train_loss", "bytes_up", "bytes_down", "client_steps", "adjusted_rand", "cluster"):
            np.testing.assert_allclose(a[name], b[name], rtol=1e-5, atol=1e-6, err_msg=name)
    assert here.records[-1]["seen"] == 7 and here.records[-1]["asked"] == 4 * 7
    assert there.client_steps == here.client_steps and set(there.clients) <= set(here.clients)


@pytest.mark.slow
def test_records_hold_the_splits_since_the_last_one():
    here = population(METHODS["cfl"], num_rounds=6, cohort=7, eval_every=6)
    there = jfcl.simulate(METHODS["cfl"], CLIENTS, key=KEY, num_rounds=6, eval_every=6)
    each = population(METHODS["cfl"], num_rounds=6, cohort=7)
    splits = [max(row["split_from"]) for row in each.records]
    assert max(splits) >= 0 > splits[-1]  # in a round before the last
    assert here.records[0]["split_from"] == there.records[0]["split_from"] != each.records[-1]["split_from"]


def test_records_hold_a_number_for_each_of_as_many_models_as_the_cohort_has_clients():
    algorithm = jfcl.fedem(TASK, TRAINING, num_clusters=4, hard=True)
    mass = population(algorithm, num_rounds=1, test_clients=None).records[0]["cluster_mass"]
    assert len(mass) == 4 and np.isclose(sum(mass), 1)


def test_a_hard_mixture_of_one_model_is_evaluated():
    one = population(jfcl.fedem(TASK, TRAINING, num_clusters=1, hard=True), num_rounds=1)
    assert one.clients["model"].tolist() == [[0] * len(CLUSTER)] and np.isfinite(one.records[0]["loss"])


def test_means_of_a_methods_own_metrics_are_over_the_clients_that_answer():
    def step(key, state, clients):
        state, metrics = METHODS["fedavg"].step(key, state, clients)
        return state, metrics | {"own": jnp.where(clients.size > 0, 1.0, 5.0)}

    row = population(METHODS["fedavg"]._replace(step=step), num_rounds=1, dropout=0.5, test_clients=None).records[0]
    assert row["dropped"] > 0 and row["own"] == 1.0


def test_the_state_says_whom_a_method_serves_whose_clients_do_not_choose_by_loss():
    """The two models of the oracle start alike, so that by loss all clients would be served the first at first."""
    algorithm = jfcl.oracle(
        TASK, TRAINING._replace(optimizer=optax.sgd(0.0)), cluster=CLUSTER, init_params=TASK.init(KEY)
    )
    for serve in ("loss", "state"):
        history = population(algorithm, num_rounds=1, serve=serve)
        assert history.clients["model"].tolist() == history.clients["cluster"].tolist() == [CLUSTER.tolist()]
    history = population(num_rounds=2, serve="state", key=jax.random.key(8))
    of_last_rounds, seen = history.rows.arrays[0], history.rows.seen
    assert len(set(of_last_rounds[seen])) == 2
    assert history.clients["model"][0, seen].tolist() == of_last_rounds[seen].tolist()


@pytest.mark.slow
def test_models_of_clients_are_their_own_with_the_default_of_serve_too():
    """Rows of `cluster` are places in a cohort, and say nothing of the clients evaluated."""
    alone, given = METHODS["local"], {"num_rounds": 4, "eval_every": 4}
    said, default = (population(a, **given) for a in (alone, jfcl.Algorithm(alone.init, alone.step, TASK)))
    for name in ("loss", "model"):
        np.testing.assert_array_equal(said.clients[name], default.clients[name])
    chosen = alone._replace(serve=lambda state, clients: jfcl.Served(state.params, state.cluster))
    with pytest.raises(ValueError, match=r"algorithm must be one with Served\.to None"):
        population(chosen, **given)


@pytest.mark.slow
def test_cfl_splits_by_the_cohort_and_places_the_others_when_they_come():
    """Linear regressions of two clusters, a quarter of the clients on the device at a time."""
    from test_cfl import TASK, TRAINING, regression

    cluster = np.arange(32) % 2
    clients = regression([[2, 0, 0], [-1, 1.7, 0]], cluster)
    store = ClientStore.from_clients(clients, cluster=cluster)
    algorithm = jfcl.cfl(TASK, TRAINING, max_clusters=3)
    history = population(algorithm, store, num_rounds=60, cohort=8, eval_every=60, serve="state")
    state, found = history.state, history.clients["cluster"][0]
    assert state.active.sum() == 2 and history.rows.seen.all()
    assert state.tree.side.shape == (3, 8)
    assert (found == found[0]).tolist() == (cluster == cluster[0]).tolist()
    assert history.records[-1]["loss"] < 0.05


@pytest.mark.slow
def test_cfl_compares_the_last_updates_of_other_clients_as_well():
    """With all others remembered, a population is `step` on all clients, of whom the cohort alone has examples."""
    from test_cfl import TASK, TRAINING, regression

    cluster = np.arange(12) % 2
    clients = regression([[2, 0, 0], [-1, 1.7, 0]], cluster)
    store = ClientStore.from_clients(clients, cluster=cluster)
    algorithm, rounds = jfcl.cfl(TASK, TRAINING, max_clusters=3, cohort=2), 150
    options = {"num_rounds": rounds, "cohort": 2, "eval_every": 1, "serve": "state", "evaluate": 12}
    history = population(algorithm, store, remember=10, **options)
    assert history.records[-1]["adjusted_rand"] == 1 and history.state.active.sum() == 2

    everybody = clients._replace(id=np.arange(12, dtype=np.int32))
    sampler, words = make_sampler(store, 2), np.asarray(jax.random.key_data(KEY)).tolist()
    state = algorithm.init(jax.random.fold_in(KEY, 0), everybody)
    step, counts = jax.jit(algorithm.step), []
    for t in range(1, rounds + 1):
        drawn = np.zeros(12, bool)
        drawn[sampler(np.random.default_rng([*words, 0, t]))] = True
        state, _ = step(jax.random.fold_in(KEY, t), state, everybody._replace(size=np.where(drawn, clients.size, 0)))
        counts.append(int(state.active.sum()))
    assert counts == [r["num_clusters"] for r in history.records] and counts[-1] == 2
    assert {r["participants"] for r in history.records} == {2}
    found, wanted = history.clients["cluster"][0], np.asarray(state.cluster)
    order = [0, 1, 2] if found[0] == wanted[0] else [1, 0, 2]  # which side moves depends on the order of the clients
    assert np.asarray(order)[found].tolist() == wanted.tolist()
    same(state.params["w"][:2], history.state.params["w"][np.array(order)[:2]], rtol=1e-3, atol=1e-4)
    assert history.state.tree.side.shape == (3, 2) and history.rows.seen.all()


@pytest.mark.slow
def test_remembered_clients_are_those_heard_last_and_a_run_resumes_with_them(tmp_path):
    algorithm = jfcl.cfl(TASK, TRAINING, max_clusters=2, cohort=3)
    straight = population(algorithm, cohort=3, remember=2)
    stopped = {"cohort": 3, "remember": 2, "out": tmp_path, "rows_in_memory": 0}
    population(algorithm, stop_after=3, **stopped)
    again = population(algorithm, resume=True, **stopped)
    same(straight.state, again.state)
    same([x[straight.rows.seen] for x in straight.rows.arrays], [x[straight.rows.seen] for x in again.rows.arrays])
    assert straight.records == again.records
    with pytest.raises(ValueError, match="remember: it has 2, asked for 1"):
        population(algorithm, resume=True, **stopped | {"remember": 1})


@pytest.mark.slow
def test_cfl_with_validation_undoes_splits_of_clients_that_are_elsewhere():
    """Clients of one cluster are split by force; after the judgement all of them are served the parent again."""
    from test_cfl import TASK, TRAINING, regression

    clients = regression([[2, 0, 0]], np.zeros(24, int), noise=1.0)
    store = ClientStore.from_clients(clients, cluster=np.zeros(24, int))
    judged = {"eps_1": np.inf, "eps_2": 1e-9, "min_rounds": 10, "validation": 0.4, "fallback_rounds": 6}
    algorithm = jfcl.cfl(TASK, TRAINING, max_clusters=2, **judged)
    history = population(algorithm, store, num_rounds=60, cohort=8, eval_every=1, serve="state")
    counts = [r["num_clusters"] for r in history.records]
    assert max(counts) == 2 and counts[-1] == 1 and history.records[-1]["undone"] == 1
    assert history.state.active.tolist() == [True, False] and history.state.parent.tolist() == [-1, 0]
    assert set(history.state.cluster.tolist()) == {0}
    assert set(history.clients["cluster"].ravel().tolist()) == {0}


@pytest.mark.slow
def test_byzantine_cfl_shuts_out_the_minority_of_a_cohort():
    from test_cfl import TASK, TRAINING, regression

    clients = regression([[2, 0, 0]], np.zeros(24, int))
    malicious = np.arange(24) < 5
    adversary = jfcl.Adversary(jfcl.attacks.sign_flip(), malicious)
    algorithm = jfcl.byzantine_cfl(TASK, TRAINING, threshold=-0.5, adversary=adversary)
    store = ClientStore.from_clients(clients, cluster=np.zeros(24, int))
    history = population(algorithm, store, num_rounds=20, cohort=12)
    excluded = history.rows.arrays[[x.dtype for x in history.rows.arrays].index(np.int32) + 1]
    assert (excluded[malicious & history.rows.seen] > 0).all() and not (excluded[~malicious] > 0).any()


@pytest.mark.slow
def test_knn_per_too():
    clients, _, task, training = problem("classification")
    algorithm = jfcl.knn_per(task, training, num_neighbours=2, mixing=0.5)
    there = jfcl.simulate(algorithm, clients, key=KEY, num_rounds=3, test_clients=clients)
    here = population(algorithm, ClientStore.from_clients(clients), num_rounds=3, cohort=7)
    same(there.state, here.state, rtol=1e-6, atol=1e-6)
    assert there.records[-1]["accuracy"] == pytest.approx(here.records[-1]["accuracy"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedper", "ifca"])
def test_personal_parameters_are_rows_of_the_population(name):
    clients, _, task, training = problem("network")
    own = {"personal": lambda path: path.startswith("Dense_1")} if name == "ifca" else {}
    make = {"fedper": jfcl.fedper, "ifca": partial(jfcl.ifca, num_clusters=2)}[name]
    algorithm = make(task, training, **own)
    options = {"num_rounds": 3, "eval_every": 3}
    there = jfcl.simulate(algorithm, clients, key=KEY, test_clients=clients, **options)
    store = ClientStore.from_clients(clients)
    here = population(algorithm, store, cohort=7, test_clients=store, **options)
    same(there.state, here.state, rtol=1e-5, atol=1e-5)
    assert there.records[-1]["accuracy"] == pytest.approx(here.records[-1]["accuracy"])
    some = population(algorithm, store, cohort=3, test_clients=store, **options)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(some.state.personal))


@pytest.mark.slow
def test_knn_per_serves_the_present_model_to_those_who_took_no_part():
    clients, _, task, training = problem("classification")
    store = ClientStore.from_clients(clients)
    options = {"num_rounds": 4, "cohort": 2, "test_clients": store}
    mixed = population(jfcl.knn_per(task, training, num_neighbours=2, mixing=0.0), store, **options)
    common = population(jfcl.fedavg(task, training), store, **options)  # the same model, and no neighbours
    assert [r["accuracy"] for r in mixed.records] == [r["accuracy"] for r in common.records]


# ---- A cohort at a time --------------------------------------------------------------------------------------------


def drawn(history_key, cohort, rounds, sampler=None):
    """The cohorts of a run without dropout, drawn as the documentation says: from the key and the round alone."""
    words = np.asarray(jax.random.key_data(history_key)).tolist()
    sampler = sampler or make_sampler(STORE, cohort)
    return [sampler(np.random.default_rng([*words, 0, t])) for t in range(1, rounds + 1)]


class Heard(NamedTuple):
    params: Any
    cluster: Any
    round: Any
    heard: Any  # [N], the last round of a client with examples
    visits: Any  # [2, N], with examples and without


def test_remembered_clients_are_those_heard_last_and_keep_what_the_server_changes(tmp_path):
    people = jfcl.Clients(jax.tree.map(lambda x: np.resize(x, (12, *x.shape[1:])), CLIENTS.examples), np.full(12, 3))
    store = ClientStore.from_clients(people)

    def init(key, clients):
        none = jnp.zeros(len(clients.size), jnp.int32)
        return Heard(jax.tree.map(lambda x: x[None], TASK.init(key)), none, jnp.int32(0), none, jnp.stack([none, none]))

    def step(key, state, clients):
        t, here = state.round + 1, clients.size > 0
        visits = state.visits + jnp.stack([here, ~here]).astype(jnp.int32)
        metrics = dict.fromkeys(("bytes_up", "bytes_down", "client_steps"), jnp.zeros(()))
        metrics |= {"loss": jnp.ones(len(here)), "present": jnp.zeros(12).at[clients.id].add(1.0)}
        return state._replace(round=t, heard=jnp.where(here, t, state.heard), visits=visits), metrics

    algorithm = Algorithm(init, step, TASK, last_updates=lambda state: state.heard)
    options = {"cohort": 3, "test_clients": None, "out": tmp_path / "run"}
    history = population(algorithm, store, remember=4, **options)
    with pytest.raises(ValueError, match=r"cohorts\.remember: it has 4, asked for 3"):
        population(algorithm, store, remember=3, resume=True, **options)
    heard, visits = np.zeros(12, np.int32), np.zeros((12, 2), np.int32)
    for t, ids in enumerate(drawn(KEY, 3, 6, make_sampler(store, 3)), 1):
        present = np.array(history.records[t - 1]["present"])
        assert sorted(present) == [0] * 5 + [1] * 7 and present[ids].all()
        present[ids] = 0
        remembered = np.flatnonzero(present)
        assert sorted(heard[remembered]) == sorted(np.delete(heard, ids))[-4:]
        visits[ids, 0] += 1
        visits[remembered, 1] += heard[remembered] > 0  # who never took part has no row
        heard[ids] = t
    _, *rows = history.rows.arrays
    np.testing.assert_array_equal(history.rows.seen, heard > 0)
    for array, wanted in zip(rows, (heard, visits), strict=True):
        np.testing.assert_array_equal(array[heard > 0], wanted[heard > 0])
    for n, most in ((12, 9), (5000, 1000)):  # by default
        assert check_cohorts(algorithm, n, 3, None, None, partial(example_shapes, store))[0] == most


@pytest.mark.slow_cases("False")
@pytest.mark.parametrize("mapped", [False, True])
def test_every_client_goes_on_where_it_stopped(mapped):
    """Local training with momentum: each client's model is what training it alone in its own rounds gives."""
    evaluated = [5, 2, 6, 0, 1, 4]
    history = population(METHODS["local"], rows_in_memory=0 if mapped else 1e9, num_rounds=5, evaluate=evaluated)
    cohorts = drawn(KEY, 4, 5)
    assert history.rows.mapped == mapped
    assert sorted(set(np.concatenate(cohorts).tolist())) == np.flatnonzero(history.rows.seen).tolist()
    algorithm = METHODS["local"]
    init, step = jax.jit(algorithm.init), jax.jit(algorithm.step)
    whole = init(jax.random.fold_in(KEY, 0), CLIENTS)
    for t, ids in enumerate(cohorts, 1):  # all seven on the device; who is not in the cohort is put back as it was
        new, _ = step(jax.random.fold_in(KEY, t), whole, CLIENTS)
        present = np.isin(np.arange(7), ids)

        def keep(a, b, present=present):
            return jnp.where(present.reshape(-1, *[1] * (a.ndim - 1)), a, b)

        whole = whole._replace(
            params=jax.tree.map(keep, new.params, whole.params), client=jax.tree.map(keep, new.client, whole.client)
        )
    layout, _ = layout_of(algorithm, algorithm.init, partial(example_shapes, STORE), 4)
    wanted = layout.apart(whole)[1]
    assert len(wanted) == len(history.rows.arrays) == 4  # two of the model, two of its momentum: not `cluster`
    for mine, array in zip(wanted, history.rows.arrays, strict=True):
        np.testing.assert_allclose(array[history.rows.seen], np.asarray(mine)[history.rows.seen], rtol=1e-6, atol=1e-7)
    losses = jfcl.evaluate(TASK, whole.params, CLIENTS, whole.cluster)["loss"]
    np.testing.assert_allclose(history.clients["loss"][0], losses[np.array(evaluated)], rtol=1e-5)  # unseen: the start
    assert history.clients["id"].tolist() == evaluated
    assert history.clients["examples"].tolist() == [CLIENTS.size[evaluated].tolist()]


def test_fedavg_of_cohorts_is_a_loop_over_them():
    history = population(METHODS["fedavg"], num_rounds=3)
    b, w = None, None
    for t, ids in enumerate(drawn(KEY, 4, 3), 1):
        if t == 1:
            start = jax.jit(METHODS["fedavg"].init)(jax.random.fold_in(KEY, 0), CLIENTS).params
            b, w = (np.asarray(start[name], np.float64)[0] for name in "bw")
        sent, losses = [], []
        for i in ids:
            m = int(CLIENTS.size[i])
            x = np.asarray(CLIENTS.examples["x"][i, :m], np.float64)
            y = np.asarray(CLIENTS.examples["y"][i, :m], np.float64)
            mine_b, mine_w = b.copy(), w.copy()
            for _ in range(3):  # full-batch gradient descent at 0.1
                error = x @ mine_w + mine_b - y
                losses.append(np.mean(error**2) / 2)
                mine_b, mine_w = mine_b - 0.1 * error.mean(), mine_w - 0.1 * x.T @ error / m
            sent.append((m, mine_b, mine_w))
        np.testing.assert_allclose(history.records[t - 1]["train_loss"], np.mean(losses), rtol=1e-5)
        total = sum(m for m, _, _ in sent)
        b, w = sum(m * x for m, x, _ in sent) / total, sum(m * x for m, _, x in sent) / total
    np.testing.assert_allclose(history.state.params["w"][0], w, rtol=1e-5)
    np.testing.assert_allclose(history.state.params["b"][0], b, rtol=1e-5)


@pytest.mark.slow
def test_clusters_are_found_a_cohort_at_a_time():
    found = [population(num_rounds=30, key=jax.random.key(s)).records[-1] for s in range(4)]
    assert max(r["cluster_accuracy"] for r in found) == 1 and max(r["seen"] for r in found) == 7


def test_nothing_is_compiled_again():
    population(num_rounds=5)
    key = jax.random.key(8)
    with count_compilations() as compiled:
        records = population(num_rounds=5, key=key, dropout=0.5, stragglers=0.5).records
    assert compiled.count == 0
    asked, dropped, cut = (records[-1][name] for name in ("asked", "dropped", "cut"))
    assert asked == 5 * 6 and 0 < dropped < 30 and cut > 0
    assert sum(row["participants"] for row in records) == asked - dropped - cut


@pytest.mark.slow
@pytest.mark.parametrize(("method", "cohort"), [(jfcl.fedavg, 4), (jfcl.fedavg, 3), (jfcl.local_only, 3)])
def test_cohorts_are_divided_among_devices(method, cohort):
    several = jfcl.mapping.sharded(jfcl.mapping.client_mesh(2))
    alone = population(method(TASK, TRAINING), cohort=cohort)
    divided = population(method(TASK, TRAINING, client_axis=several), cohort=cohort, client_axis=several)
    same(alone.state, divided.state, rtol=1e-5, atol=1e-6)
    for a, b in zip(alone.records, divided.records, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)


def test_evaluation_changes_nothing():
    often, rarely = population(), population(eval_every=4)
    same(often.state, rarely.state)
    assert [r["round"] for r in rarely.records] == [4, 6]
    assert {**often.records[3]} == {**rarely.records[0]} and often.records[5] == rarely.records[1]


@pytest.mark.slow
def test_dropout_and_stragglers():
    history = population(METHODS["fedavg with momenta"], num_rounds=40, dropout=0.3, stragglers=0.5, cohort=4)
    last = history.records[-1]
    assert last["asked"] == 40 * 6  # 4 and a half of 4
    assert 0.2 < last["dropped"] / last["asked"] < 0.4
    took_part = last["asked"] - last["dropped"] - last["cut"]
    assert last["bytes_up"] == took_part * 5 * 4 and last["client_steps"] == took_part * 2
    assert all(r["participants"] <= 4 for r in history.records)
    with_all_gone = population(num_rounds=3, dropout=0.99, cohort=2)  # rounds of nobody
    assert np.isfinite(jax.tree.leaves(with_all_gone.state.params)[0]).all()


def test_who_does_not_answer_keeps_what_it_had():
    history = population(METHODS["local"], num_rounds=1, dropout=0.5, cohort=7)
    participants = history.records[-1]["participants"]
    assert 0 < participants < 7 and history.rows.seen.sum() == participants
    start = jax.jit(METHODS["local"].init)(jax.random.fold_in(KEY, 0), CLIENTS).params["w"]
    moved = ~np.isclose(history.state.params["w"], start).all(axis=1)
    np.testing.assert_array_equal(moved, history.rows.seen)


@given(st.integers(1, 9), st.integers(0, 5), st.floats(0, 0.95), st.integers(0, 9))
def test_those_who_answer_come_first(cohort, more, dropout, seed):
    rows, answered, dropped = who_answers(np.random.default_rng(seed), cohort + more, cohort, dropout)
    assert len(rows) == cohort and (np.diff(rows) > 0).all() and rows.max() < cohort + more
    assert answered.sum() == min(cohort, cohort + more - dropped)


# ---- Sampling ------------------------------------------------------------------------------------------------------

RAGGED = ClientStore.from_clients(
    jfcl.Clients({"x": np.zeros((40, 9, 1), np.float32)}, np.arange(40, dtype=np.int32) % 10)
)


def counts(sampler, draws, n=40):
    found = np.zeros(n)
    for t in range(draws):
        ids = sampler(np.random.default_rng([5, t]))
        assert len(np.unique(ids)) == len(ids) and (np.diff(ids) > 0).all()
        found[ids] += 1
    return found


@pytest.mark.parametrize("cohort", [1, 33])
def test_uniform_sampling_is_uniform(cohort):
    found = counts(make_sampler(RAGGED, cohort), 1000)
    # Draws without replacement vary less than multinomial ones, by (n - 1) / (n - cohort).
    assert chisquare(found).statistic * 39 / (40 - cohort) < 39 + 4 * np.sqrt(2 * 39)


def test_uniform_sampling_of_a_large_population():
    store = ClientStore(None, {}, {}, np.arange(1_000_001, dtype=np.int64), about={"max_size": 1})
    strata = np.arange(1_000_000) % 4
    for sampler in (
        make_sampler(store, 1000),
        make_sampler(store, 1000, "size"),
        _stratified(strata, len(store), 1000),
    ):
        tracemalloc.start()
        sampler(np.random.default_rng(0))
        assert tracemalloc.get_traced_memory()[1] < 1_000_000  # nothing of the population's length
        tracemalloc.stop()
    found = counts(make_sampler(store, 1000), 200, 1_000_000).reshape(20, -1).sum(axis=1)
    assert chisquare(found).pvalue > 0.001


def test_sampling_by_size_one_at_a_time():
    found = counts(make_sampler(RAGGED, 1, "size"), 2000)
    expected = np.tile(np.arange(10), 4) / 180 * 2000
    assert (found[expected == 0] == 0).all()
    assert chisquare(found[expected > 0], expected[expected > 0]).pvalue > 0.001


def test_a_client_with_nearly_all_examples_is_drawn_once():
    offsets = np.cumsum([0, 10**6, *[1] * 39])
    sampler = make_sampler(ClientStore(None, {}, {}, offsets, about={"max_size": 10**6}), 5, "size")
    for t in range(5):
        assert len({0, *sampler(np.random.default_rng(t)).tolist()}) == 5


def test_the_first_example_of_a_client_is_its_own():
    sampler = make_sampler(ClientStore(None, {}, {}, np.arange(41), about={"max_size": 1}), 2, "size")
    drawn = [sampler(np.random.default_rng(t)).tolist() for t in range(200)]
    assert {i for pair in drawn for i in pair} == {*range(40)}


def test_a_method_checks_the_clients_with_the_fewest_examples():
    people = jfcl.Clients({"x": np.zeros((4, 5, 1), np.float32)}, np.int32([0, 5, 1, 3]))
    seen = []
    _check_hardest(Algorithm(None, None, None, seen.append), ClientStore.from_clients(people), 2)
    assert seen[0].size.tolist() == [1, 3]


@pytest.mark.parametrize("size", [[1, 2, 3, 4]])
def test_sampling_by_size_without_replacement(size):
    """Two of four: the probability of every pair, summed over the order in which it is drawn."""
    people = jfcl.Clients({"x": np.zeros((40, 30, 1), np.float32)}, np.int32(size + [0] * 36))
    few = make_sampler(ClientStore.from_clients(people), 2, "size")
    pairs = {(i, j): 0 for i in range(4) for j in range(i + 1, 4)}
    for t in range(4000):
        pairs[tuple(few(np.random.default_rng([1, t])).tolist())] += 1
    p = np.array(size) / sum(size)
    wanted = [p[i] * p[j] / (1 - p[i]) + p[j] * p[i] / (1 - p[j]) for i, j in pairs]
    assert chisquare(list(pairs.values()), 4000 * np.array(wanted)).pvalue > 0.001


def test_both_ways_of_sampling_by_size_are_one_law():
    """A few of many examples, first by rejection (many clients), then by clocks (the same clients alone)."""
    size = np.array([1, 1, 1, 30], np.int32)
    alone = make_sampler(ClientStore.from_clients(jfcl.Clients({"x": np.zeros((4, 30, 1))}, size)), 1, "size")
    many = np.tile(size, 10)
    store = ClientStore.from_clients(jfcl.Clients({"x": np.zeros((40, 30, 1))}, many))
    small = np.zeros(2)
    for t in range(1500):
        small[0] += alone(np.random.default_rng([2, t]))[0] < 3
        small[1] += make_one(store, t) % 4 < 3
    assert np.abs(small / 1500 - 3 / 33).max() < 4 * np.sqrt(3 / 33 * 30 / 33 / 1500)


def make_one(store, t):
    return make_sampler(store, 1, "size")(np.random.default_rng([3, t]))[0]


def test_stratified_shares():
    strata = np.repeat([0, 1, 5], [20, 15, 5])
    sampler = _stratified(strata, 40, 8)
    for t in range(50):
        assert np.bincount(strata[sampler(np.random.default_rng(t))], minlength=6).tolist() == [4, 3, 0, 0, 0, 1]
    found = counts(sampler, 1000)
    assert chisquare(found[:20]).pvalue > 0.001 and chisquare(found[20:35]).pvalue > 0.001
    assert {
        tuple(np.bincount(CLUSTER[make_sampler(STORE, 5, "stratified")(np.random.default_rng(t))])) for t in range(20)
    } == {(2, 3), (3, 2)}
    assert _stratified(strata, 40, 40)(np.random.default_rng(0)).tolist() == list(range(40))


@pytest.mark.slow_cases("sizes0-5", "sizes1-2", "sizes2-10", "sizes4-40", "sizes5-3", "sizes6-7")
@pytest.mark.parametrize(
    ("sizes", "count"),
    [([4] * 10, 5), ([10] * 4, 2), ([1, 13, 26], 10), ([10] * 4, 10), ([7, 11, 22], 40), ([40], 3), ([1] * 40, 7)],
)
def test_no_stratum_is_left_out_for_good(sizes, count):
    """Every client is asked equally often, and every stratum its share of clients, rounded up or down."""
    strata = np.repeat(np.arange(len(sizes)), sizes)
    sampler = _stratified(strata, 40, count)
    share = np.array(sizes) * count / 40
    for t in range(200):
        found = np.bincount(strata[sampler(np.random.default_rng([5, t]))], minlength=len(sizes))
        assert found.sum() == count and (np.abs(found - share) < 1).all()
    # Wide: where a stratum's share is rounded, its clients are asked together.
    times = counts(sampler, 1000)
    assert np.abs(times / 1000 - count / 40).max() < 0.08


# ---- Stopping and going on -----------------------------------------------------------------------------------------


@pytest.mark.slow_cases("*-ditto", "True-*")
@pytest.mark.parametrize("method", ["ifca", "local", "ditto"])
@pytest.mark.parametrize("mapped", [False, True])
def test_resuming_is_exact(method, mapped, tmp_path):
    options = {"dropout": 0.2, "stragglers": 0.3, "rows_in_memory": 0 if mapped else 1e9, "eval_every": 2}
    straight = population(METHODS[method], out=tmp_path / "a", **options)
    for stop in (1, 4, None):
        stopped = population(METHODS[method], out=tmp_path / "b", resume=stop != 1, stop_after=stop, **options)
        options["rows_in_memory"] = 1e9 if mapped else 0  # of no effect on rows that are there
    assert stopped.rows.mapped == straight.rows.mapped
    same(straight.state, stopped.state)
    same(straight.rows.arrays, stopped.rows.arrays)
    same(straight.rows.seen, stopped.rows.seen)
    assert straight.records == stopped.records
    assert (tmp_path / "a" / "metrics.jsonl").read_text() == (tmp_path / "b" / "metrics.jsonl").read_text()
    again = population(METHODS[method], out=tmp_path / "b", resume=True, **options)  # nothing is left to do
    same(straight.state, again.state)
    np.testing.assert_array_equal(straight.clients["loss"], again.clients["loss"])


ROW = [jax.ShapeDtypeStruct((3,), jnp.bfloat16), jax.ShapeDtypeStruct((), np.int32)]  # NumPy's files have no bfloat16


@pytest.mark.parametrize("cut", [False, True])
def test_rows_that_have_changed_after_the_checkpoint_come_back(cut, monkeypatch, tmp_path):
    rows = ClientRows(10, ROW, folder=tmp_path, in_memory=0)
    rng = np.random.default_rng(0)

    def write(rows):
        ids = np.sort(rng.choice(10, 4, replace=False))
        rows.write(ids, [rng.normal(size=(4, 3)).astype(jnp.bfloat16), rng.integers(0, 9, 4).astype(np.int32)])

    write(rows), rows.checkpointed(), write(rows), rows.checkpointed(), write(rows), rows.checkpointed()
    before, saved = [a.copy() for a in rows.arrays], jax.tree.map(np.copy, rows.saved())
    write(rows), write(rows)
    if cut:  # the process was killed while a row was being written
        real = os.pwrite
        monkeypatch.setattr(os, "pwrite", lambda file, data, place: real(file, bytes(data)[:2], place) and len(data))
        write(rows)
        monkeypatch.undo()
    back = ClientRows(10, ROW, folder=tmp_path, resume=True, in_memory=0)
    whole, size, seen = (tmp_path / "rows.bin").read_bytes(), 10, np.flatnonzero(saved["seen"])
    for c in (seen[0], seen[-1]):  # one bit of either
        at = (int(saved["rows"][0][c]) * 10 + int(c)) * size + 3
        (tmp_path / "rows.bin").write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(ValueError, match=f"is damaged: the row of client {c} "):
            back.restore(saved)
        assert not back.seen.any()
    (tmp_path / "rows.bin").write_bytes(whole)
    back.restore(saved)
    assert back.arrays[0].dtype == jnp.bfloat16
    for mine, wanted in zip(back.arrays, before, strict=True):
        np.testing.assert_array_equal(mine[saved["seen"]], wanted[saved["seen"]])
    np.testing.assert_array_equal(back.seen, saved["seen"])


def test_files_of_rows_without_a_change(tmp_path):
    rows = ClientRows(5, ROW, folder=tmp_path, in_memory=0)
    rows.checkpointed()
    saved = jax.tree.map(np.copy, rows.saved())
    rows.write(np.arange(0), [np.zeros((0, 3), jnp.bfloat16), np.zeros(0, np.int32)])  # no client has answered
    rows.write(np.arange(2), [np.ones((2, 3), jnp.bfloat16), np.ones(2, np.int32)])  # new ones: nothing is overwritten
    back = ClientRows(5, ROW, folder=tmp_path, resume=True, in_memory=0)
    back.restore(saved)
    assert not back.seen.any()


@pytest.mark.parametrize("damage", ["cut short", "is missing", "a bit"])
def test_damaged_rows_are_not_gone_on_with(damage, tmp_path):
    options = {"rows_in_memory": 0, "out": tmp_path / "run"}
    population(METHODS["local"], stop_after=2, **options)
    folder = tmp_path / "run" / "client_rows"
    first = folder / "rows.bin"
    if damage == "cut short":
        first.write_bytes(first.read_bytes()[:-4])
    elif damage == "a bit":
        data = np.frombuffer(first.read_bytes(), np.uint8).reshape(2 * len(CLUSTER), -1).copy()
        data[:, 0] ^= 1
        first.write_bytes(data.tobytes())
    else:
        first.unlink()
    words = {"cut short": "rows.bin was cut short", "a bit": "the row of client . differs from its checksum"}
    before = sorted((p, p.read_bytes()) for p in tmp_path.rglob("*") if p.is_file())
    with pytest.raises(ValueError, match=words.get(damage, "rows.bin is missing")):
        population(METHODS["local"], resume=True, **options)
    assert before == sorted((p, p.read_bytes()) for p in tmp_path.rglob("*") if p.is_file())


def test_a_run_without_a_checkpoint_yet_begins_anew(tmp_path):
    options = {"rows_in_memory": 0, "out": tmp_path / "run"}
    straight = population(METHODS["local"], out=tmp_path / "whole", rows_in_memory=0)
    population(METHODS["local"], stop_after=1, **options)
    shutil.rmtree(tmp_path / "run" / "checkpoints")  # as if it had been killed before the first
    options["rows_in_memory"] = 1e9
    population(METHODS["local"], resume=True, stop_after=2, **options)
    again = population(METHODS["local"], resume=True, **options)
    same(straight.state, again.state)
    assert again.rounds == 6 and again.records == straight.records


def test_too_little_memory_is_said_before_anything_runs(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "free_memory", lambda: 50.0)
    with pytest.raises(ValueError, match=r"of memory, and 0.0 GB are free"):
        population(out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_tests_of_evaluated_clients_count_before_anything_runs(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "free_memory", lambda: 0.35e6)
    examples = {"x": np.zeros((7, 900, 4), np.float32), "y": np.ones((7, 900), np.float32)}
    store = ClientStore.from_clients(jfcl.Clients(examples, np.full(7, 900, np.int32)))  # 18 kB a client
    with pytest.raises(ValueError, match=r"of memory, and 0.0 GB are free"):
        population(METHODS["local"], store, num_rounds=1, out=tmp_path / "run")  # 4 twice, and 7 with their tests
    assert not (tmp_path / "run").exists()
    population(METHODS["local"], store, num_rounds=1, evaluate=2)


SCRIPT = """
import sys, jax, jfcl, optax, numpy as np
from jfcl.data import ClientStore
from jfcl.data.store import example_shapes
from jfcl.testing import problem
clients, cluster, task, _ = problem()
training = jfcl.local_training(optax.sgd(0.05, momentum=0.9), num_steps=2, keep="everything")
people = jfcl.Population(
    ClientStore.from_clients(clients, cluster=cluster), cohort=4, rows_in_memory=0,
    test_clients=ClientStore.from_clients(clients),
)
jfcl.simulate(
    jfcl.ditto(task, training), people, key=jax.random.key(3), num_rounds=int(sys.argv[2]), out=sys.argv[1],
    resume=sys.argv[3] == "resume", checkpoint_seconds=0.2, eval_every=50,
)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_run_goes_on_as_if_it_had_not_been(how, tmp_path):
    started = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, tmp_path / "run", "100000", "new"], stderr=subprocess.PIPE
    )
    deadline = time.time() + 120
    place, done = tmp_path / "run" / "checkpoints", []
    while time.time() < deadline and max(done, default=0) < 100:
        time.sleep(0.05)
        done = [int(p.name) for p in place.glob("*") if p.name.isdigit()]
    time.sleep(0.1)  # rows change again
    os.kill(started.pid, how)
    started.communicate(timeout=60)
    assert started.returncode != 0
    kept = max(int(p.name) for p in (tmp_path / "run" / "checkpoints").iterdir() if p.name.isdigit())
    options = {"num_rounds": kept + 130, "eval_every": 50, "rows_in_memory": 0}
    options["test_clients"] = ClientStore.from_clients(CLIENTS)  # as in the script
    there = population(METHODS["ditto"], out=tmp_path / "run", resume=True, checkpoint_seconds=1e9, **options)
    here = population(METHODS["ditto"], **options)
    same(here.state, there.state)
    same(here.rows.seen, there.rows.seen)
    for a, b in zip(here.rows.arrays, there.rows.arrays, strict=True):
        np.testing.assert_array_equal(a[here.rows.seen], b[here.rows.seen])
    assert here.records == there.records
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [r["round"] for r in here.records]


# ---- What goes wrong -----------------------------------------------------------------------------------------------


def test_the_thread_has_64_bits_where_they_are_enabled():
    with jax.enable_x64(True):
        take = prefetched(lambda t: jnp.asarray(np.ones(1)).dtype, 2)
        assert [take(1), take(2)] == ["float64", "float64"]


def test_an_error_in_the_thread_surfaces(monkeypatch, tmp_path):
    gather, calls = STORE.gather, []

    def failing(ids, **options):
        calls.append(ids)
        assert threading.current_thread() is not threading.main_thread()
        if len(calls) > 4:
            raise OSError("the disk has gone")
        return gather(ids, **options)

    monkeypatch.setattr(STORE, "gather", failing)
    with pytest.raises(OSError, match="the disk has gone"):
        population(METHODS["fedavg"], test_clients=None, out=tmp_path / "run", checkpoint_seconds=0)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) >= 2  # what was done is not lost
    monkeypatch.undo()
    resumed = population(METHODS["fedavg"], test_clients=None, out=tmp_path / "run", resume=True)
    same(population(METHODS["fedavg"], test_clients=None).state, resumed.state)


@pytest.mark.filterwarnings("ignore:round 1, seed 0. 4 client update")
def test_divergence_is_said():
    wild = jfcl.fedavg(TASK, jfcl.local_training(optax.sgd(1e20), num_steps=9))
    with pytest.raises(jfcl.DivergedError, match="round 2, seed 0: no client sent a finite update"):
        population(wild)
    lost = jfcl.fedavg(TASK, TRAINING, server_optimizer=optax.scale(np.inf))
    with pytest.raises(jfcl.DivergedError, match="round 1, seed 0: a model is no longer finite"):
        population(lost)


ZEROS = {"x": np.zeros((7, 2, 9), np.float32), "y": np.zeros((7, 2))}
OTHER = ClientStore.from_clients(jfcl.Clients(ZEROS, np.full(7, 2)))
UNTESTED = ClientStore.from_clients(CLIENTS._replace(size=np.where(np.arange(7) == 2, 0, CLIENTS.size)))
RESTARTED = jfcl.ifca(TASK, TRAINING, num_clusters=2, restarts=2)


class Keyed(NamedTuple):
    params: Any
    cluster: Any
    keys: Any


def keyed(key, clients):
    state = METHODS["fedavg"].init(key, clients)
    return Keyed(state.params, state.cluster, jfcl.core.client_keys(key, clients))


ATTACKED = jfcl.fedavg(TASK, TRAINING, adversary=jfcl.Adversary(jfcl.attacks.zero(), np.arange(6) > 3))


@pytest.mark.parametrize(
    "options, said",
    [
        ({"cohort": 8}, "cohort must be an integer, at least 1 and at most 7, got 8"),
        ({"cohort": 0}, "cohort must be an integer, at least 1"),
        ({"num_rounds": 0}, "num_rounds"),
        ({"sampling": "unifrom"}, "unknown sampling 'unifrom': did you mean 'uniform'"),
        ({"sampling": "stratified", "store": OTHER}, "sampling must be uniform or size"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        ({"dropout": -0.1}, "dropout must be"),
        ({"dropout": float("nan")}, "dropout must be"),
        ({"stragglers": -1}, "stragglers must be 0 or more"),
        ({"stragglers": 1.0}, "draws 8 clients a round, and there are 7"),
        ({"serve": "lost"}, "did you mean 'loss'"),
        ({"evaluate": 0}, "evaluate must be an integer"),
        ({"evaluate": [7]}, r"evaluate must be in 0..6"),
        ({"evaluate": [2, 3, 2]}, "evaluate must be ids that are given once each"),
        ({"evaluate": [2], "test_clients": UNTESTED}, "evaluate must be clients of which one at least has test"),
        ({"test_clients": OTHER}, "test_clients has examples of shapes and types"),
        ({"store": OTHER}, r"algorithm must be of a model for the store's examples, x float32 \(9,\)"),
        ({"store": DRIFTING, "test_clients": None}, "drifting data cannot be a population"),
        ({"resume": True}, "resume needs out, the folder"),
        ({"seeds": ["x"]}, "seeds must be different integers"),
        ({"rows_in_memory": "a"}, "rows_in_memory must be of type float, got 'a'"),
        ({"key": jax.random.split(KEY)}, "key must be a single key"),
        ({"newcomers": CLIENTS}, "newcomers must be left out for a population"),
        ({"test_clients": CLIENTS}, "test_clients must be a ClientStore, such as"),
        ({"hyperparams": {"lr": 1.0}}, "hyperparams must be left out for a population"),
        ({"seed_axis": jax.vmap}, "seed_axis must be left out for a population"),
        ({"remember": 2}, "remember must be left out for a method that keeps no updates"),
        (
            {"algorithm": jfcl.cfl(TASK, TRAINING, max_clusters=2, cohort=4), "remember": 4},
            "remember must be at most the 3 clients beside the cohort",
        ),
        ({"algorithm": jfcl.stocfl(TASK, TRAINING)}, "max_clusters must be given for a cohort of 4"),
        pytest.param({"algorithm": RESTARTED}, "join must be given", marks=pytest.mark.slow),
        ({"algorithm": jfcl.fesem(TASK, TRAINING, num_clusters=2)}, "join must be given"),
        pytest.param(
            {"algorithm": jfcl.flhc(TASK, TRAINING, num_clusters=2)}, "join must be given", marks=pytest.mark.slow
        ),
        ({"join": METHODS["local"].init}, "join must be an init with states of the same shapes"),
        pytest.param(
            {"algorithm": METHODS["cfl"], "join": METHODS["ifca"].init}, "join must be an init", marks=pytest.mark.slow
        ),
        ({"algorithm": jfcl.ifca(TASK, TRAINING, num_clusters=5)}, "num_clusters must be at most the 4 clients"),
        (
            {"algorithm": jfcl.oracle(TASK, TRAINING, cluster=CLUSTER[:6])},
            r"cluster must be one for each client, also for 6, got \(6,\)",
        ),
        ({"algorithm": jfcl.Algorithm(keyed, METHODS["fedavg"].step, TASK)}, r"state.keys has random keys of clients"),
        ({"algorithm": ATTACKED}, "malicious must be one for each client, also for 6"),
    ],
)
def test_bad_input_is_refused_before_anything_compiles(options, said, tmp_path):
    population(num_rounds=1)
    with count_compilations() as compiled, pytest.raises(ValueError, match=said):
        population(**({"out": tmp_path / "run"} | options if "resume" not in options else options))
    assert compiled.count == 0 and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_restarts_with_join(tmp_path):
    history = population(RESTARTED, join=METHODS["ifca"].init, num_rounds=3, out=tmp_path / "run", resume=True)
    assert [row["round"] for row in history.records] == [2, 3, 4] and history.init_rounds == 1
    again = population(RESTARTED, join=METHODS["ifca"].init, num_rounds=4, out=tmp_path / "run", resume=True)
    assert [row["round"] for row in again.records] == [2, 3, 4, 5]
    same(population(RESTARTED, join=METHODS["ifca"].init, num_rounds=4).state, again.state)
    assert history.records[-1]["bytes_up"] > population(num_rounds=3).records[-1]["bytes_up"]  # restarts are paid for


def test_knn_per_with_too_few_examples_is_refused():
    clients, _, task, training = problem("classification")
    with pytest.raises(ValueError, match="num_neighbours must be at most 3"):
        population(jfcl.knn_per(task, training, num_neighbours=4, mixing=0.5), ClientStore.from_clients(clients))


def test_another_population_is_not_resumed(tmp_path):
    population(out=tmp_path / "run", num_rounds=1)
    before = sorted((p, p.read_bytes()) for p in tmp_path.rglob("*") if p.is_file())
    other = ClientStore.from_clients(CLIENTS._replace(size=CLIENTS.size - 1), cluster=CLUSTER)
    changes = {"cohort": 5, "dropout": 0.5, "key": jax.random.key(9), "store": other, "test_clients": other}
    for name, value in (changes | {"evaluate": [0], "stragglers": 0.5, "sampling": "size"}).items():
        said = {"test_clients": "test_store", "evaluate": "evaluated"}.get(name, name)
        with pytest.raises(ValueError, match=rf"another configuration \(cohorts\.{said}: it has"):
            population(out=tmp_path / "run", resume=True, **{name: value})
    with pytest.raises(ValueError, match="seeds must be 0, the name in the records"):
        population(out=tmp_path / "run", resume=True, seeds=[3])
    with pytest.raises(ValueError, match="already holds a run"):
        population(out=tmp_path / "run")
    assert before == sorted((p, p.read_bytes()) for p in tmp_path.rglob("*") if p.is_file())


@pytest.mark.parametrize("label", [-1, 3, 255])
@pytest.mark.parametrize("name", ["clients", "test_clients"])
def test_labels_that_the_model_does_not_have_are_refused(name, label):
    def store(last):
        y = np.int32([[0, 1], [2, last]])
        return ClientStore.from_clients(jfcl.Clients({"x": np.zeros((2, 2, 4), np.float32), "y": y}, np.int32([2, 2])))

    algorithm = jfcl.fedavg(jfcl.models.classification(jfcl.models.Linear(3), (4,), 3), TRAINING)
    with pytest.raises(ValueError, match=f"^{name}: labels must be in 0..2, got"):
        stores = {"clients": store(0), "test_clients": store(0)} | {name: store(label)}
        population(algorithm, stores["clients"], test_clients=stores["test_clients"], cohort=1)


def test_evaluated_clients_are_drawn_once_and_in_ascending_order():
    ids = _evaluated(20, 50, [0, 3])
    assert len(ids) == 20 and (np.diff(ids) > 0).all() and ids.max() < 50
    assert _evaluated(60, 50, [0, 3]).tolist() == list(range(50))


def test_what_follows_from_shared_arrays_is_computed_again_for_evaluated_clients():
    def refresh(state, clients):
        total = clients.size.sum().astype(jnp.float32)
        return state._replace(params={"w": jnp.zeros_like(state.params["w"]), "b": total + 0 * state.params["b"]})

    tests = ClientStore.from_clients(CLIENTS._replace(size=np.ones(7, np.int32)))
    algorithm = METHODS["ifca"]._replace(refresh=refresh)
    history = population(algorithm, num_rounds=1, cohort=2, test_clients=tests, evaluate=[4, 1])
    error = CLIENTS.examples["y"][[4, 1], 0] - CLIENTS.size[[4, 1]].sum()  # their training examples
    np.testing.assert_allclose(history.clients["loss"][0], error**2 / 2, rtol=1e-5)
    assert history.clients["examples"].tolist() == [CLIENTS.size[[4, 1]].tolist()]


def test_evaluated_clients_of_unknown_clusters():
    store = ClientStore.from_clients(CLIENTS, cluster=np.where(np.arange(7) < 2, -1, CLUSTER))
    assert "cluster_accuracy" not in population(METHODS["fedavg"], store, num_rounds=1, evaluate=[0, 1]).records[-1]


def test_without_tests_nothing_is_evaluated():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        history = population(test_clients=None)
    assert "loss" not in history.records[0] and "train_loss" in history.records[0]
    assert set(history.clients) == {"id", "examples"}
