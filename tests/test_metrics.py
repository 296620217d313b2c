import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

from jfcl.analysis.metrics import cluster_recovery, evaluate, per_cluster, rounds_to_recovery, summarize
from jfcl.core import Clients, Task
from jfcl.execution.mapping import chunked, client_mesh, sharded
from jfcl.testing import count_compilations

SIGN = Task(
    init=lambda key: {"w": jnp.zeros(2)},
    apply=lambda p, x: x @ p["w"],
    cost=lambda outputs, batch: (outputs - batch["y"]) ** 2,
    correct=lambda outputs, batch: ((outputs > 0) == (batch["y"] > 0)).astype(jnp.float32),
)


def data(n=5, m=4, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, m, 2)).astype(np.float32)
    y = rng.normal(size=(n, m)).astype(np.float32)
    size = np.array([4, 1, 0, 3, 2], np.int32)[:n]
    x[2] = np.nan
    return Clients({"x": x, "y": y}, size)


@pytest.mark.parametrize("axis", [jax.vmap, chunked(2)])
def test_evaluate_against_a_loop(axis):
    clients, params = data(), {"w": np.random.default_rng(1).normal(size=(3, 2)).astype(np.float32)}
    cluster = np.array([2, 0, 1, 1, 2], np.int32)
    got = evaluate(SIGN, params, clients, cluster, client_axis=axis)
    for i in range(5):
        size = clients.size[i]
        if size == 0:
            assert np.isnan(got["loss"][i]) and np.isnan(got["accuracy"][i])
            continue
        x, y = clients.examples["x"][i, :size].astype(np.float64), clients.examples["y"][i, :size]
        out = x @ params["w"][cluster[i]]
        np.testing.assert_allclose(got["loss"][i], np.mean((out - y) ** 2), rtol=1e-5)
        np.testing.assert_allclose(got["accuracy"][i], np.mean((out > 0) == (y > 0)), rtol=1e-6)
    assert got["cluster"].tolist() == cluster.tolist()


def test_newcomers_get_the_model_of_lowest_loss():
    clients, params = data(), {"w": np.random.default_rng(1).normal(size=(3, 2)).astype(np.float32)}
    got = evaluate(SIGN, params, clients, None, client_axis=jax.vmap)
    each = [evaluate(SIGN, params, clients, np.full(5, k, np.int32), client_axis=jax.vmap) for k in range(3)]
    losses = np.stack([e["loss"] for e in each])
    real = clients.size > 0
    assert (np.asarray(got["cluster"])[real] == losses[:, real].argmin(axis=0)).all()
    np.testing.assert_allclose(np.asarray(got["loss"])[real], losses[:, real].min(axis=0), rtol=1e-6)


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ([0, 1, 2, 3, 0], "cluster must be in 0 .. 2, got array"),
        ([0, -1, 2, 1, 0], "cluster must be in 0 .. 2"),
        ([0, 1, 2], "cluster must be an integer for each of the 5 clients"),
        ([0.0, 1.0, 2.0, 0.0, 0.0], "cluster must be an integer for each"),
    ],
)
def test_clusters_without_a_model_are_refused(cluster, words):
    with pytest.raises(ValueError, match=words):
        evaluate(SIGN, {"w": np.zeros((3, 2), np.float32)}, data(), cluster)


def test_models_on_several_devices_are_indexed_by_newcomers():
    """JAX refuses to index an array of another mesh; kNN-Per's models hold labels that are indexed in this way."""
    mesh, rng = client_mesh(2), np.random.default_rng(3)
    lookup = Task(
        init=lambda key: {"table": jnp.zeros(4)},
        apply=lambda p, x: p["table"][x],
        cost=lambda outputs, batch: (outputs - batch["y"]) ** 2,
    )
    table = rng.normal(size=(2, 4))
    x, y = rng.integers(0, 4, (4, 3)), rng.normal(size=(4, 3))
    clients = Clients({"x": x.astype(np.int32), "y": y.astype(np.float32)}, np.full(4, 3, np.int32))
    placed = jax.device_put(np.float32(table), jax.NamedSharding(mesh, jax.P("clients")))
    got = evaluate(lookup, {"table": placed}, clients, None, client_axis=sharded(mesh, jax.vmap))
    losses = np.array([[np.mean((t[x[i]] - y[i]) ** 2) for t in table] for i in range(4)])
    assert got["cluster"].tolist() == losses.argmin(axis=1).tolist()
    np.testing.assert_allclose(got["loss"], losses.min(axis=1), rtol=1e-5)


def test_summary():
    accuracy = np.array([0.9, 0.1, np.nan] + [0.5] * 18)
    size = np.array([10, 30, 0] + [10] * 18)
    result = summarize({"loss": 1 - accuracy, "accuracy": accuracy}, size)
    assert result["accuracy"] == pytest.approx((0.9 + 0.1 + 9) / 20)
    assert result["pooled_accuracy"] == pytest.approx((9 + 3 + 90) / 220)
    assert result["worst_client_accuracy"] == pytest.approx(0.1)
    assert result["worst_decile_accuracy"] == pytest.approx(0.3)  # the two worst of twenty
    assert result["loss"] == pytest.approx(0.5)


def test_per_cluster():
    result = per_cluster(
        {"loss": np.array([1.0, 2.0, 4.0]), "accuracy": np.array([0.0, 0.5, 1.0])}, np.array([3, 1, 1])
    )
    assert result == {1: {"clients": 2, "loss": 3.0, "accuracy": 0.75}, 3: {"clients": 1, "loss": 1.0, "accuracy": 0.0}}
    empty = per_cluster({"loss": np.array([np.nan, 2.0, np.nan])}, np.array([0, 0, 1]))
    assert empty[0] == {"clients": 2, "loss": 2.0} and np.isnan(empty[1]["loss"])


labels = st.lists(st.integers(0, 3), min_size=1, max_size=9)


@given(found=labels, seed=st.integers(0, 99))
def test_cluster_accuracy_is_the_best_matching(found, seed):
    found = np.array(found)
    true = np.random.default_rng(seed).integers(0, 4, len(found))
    best = max(np.mean(np.array(names)[found] == true) for names in itertools.permutations(range(4)))
    assert cluster_recovery(found, true)["cluster_accuracy"] == pytest.approx(best)


@given(found=labels, seed=st.integers(0, 99))
def test_recovery_ignores_names(found, seed):
    found = np.array(found)
    rng = np.random.default_rng(seed)
    true = rng.integers(0, 3, len(found))
    renamed = rng.permutation(10)[found]
    a, b = cluster_recovery(found, true), cluster_recovery(renamed, true)
    assert a == pytest.approx(b)
    assert a["clusters_in_use"] == len(set(found.tolist()))
    assert cluster_recovery(found, found)["adjusted_rand"] == 1 and cluster_recovery(found, found)["purity"] == 1


@given(found=labels, seed=st.integers(0, 99), kinds=st.integers(1, 4))
def test_recovery_agrees_with_scikit_learn(found, seed, kinds):
    true = np.random.default_rng(seed).integers(0, kinds, len(found))
    agreement = cluster_recovery(np.array(found), true)
    assert agreement["adjusted_rand"] == pytest.approx(adjusted_rand_score(true, found), abs=1e-14)
    assert agreement["nmi"] == pytest.approx(normalized_mutual_info_score(true, found), abs=1e-14)


def test_adjusted_rand_by_pair_counting():
    rng = np.random.default_rng(0)
    found, true = rng.integers(0, 3, 30), rng.integers(0, 4, 30)
    pairs = list(itertools.combinations(range(30), 2))
    same_found = np.array([found[i] == found[j] for i, j in pairs])
    same_true = np.array([true[i] == true[j] for i, j in pairs])
    both, a, b, n = (same_found & same_true).sum(), same_found.sum(), same_true.sum(), len(pairs)
    expected = a * b / n
    assert cluster_recovery(found, true)["adjusted_rand"] == pytest.approx((both - expected) / ((a + b) / 2 - expected))


def test_rounds_to_recovery():
    assert rounds_to_recovery([5, 10], [0.5, 0.9]) is None
    assert rounds_to_recovery([5, 10, 15], [1.0, 1.0, 1.0]) == 5
    assert rounds_to_recovery([5, 10, 15], [1.0, 0.9, 1.0]) == 15


def test_recovery_refuses_other_lengths():
    with pytest.raises(ValueError, match="vectors of one length"):
        cluster_recovery([0, 1], [0, 1, 1])
    with pytest.raises(ValueError, match="got -1 for all"):
        cluster_recovery([0, 1], [-1, -1])


def test_recovery_without_those_who_do_not_count():
    found, true = np.array([4, 4, 0, 0, 2, 4]), np.array([0, 0, 1, 1, -1, -1])
    assert cluster_recovery(found, true) == cluster_recovery(found[:4], true[:4]) | {"clusters_in_use": 3}


@pytest.mark.parametrize("cluster", [np.zeros(5, np.int32), None])
def test_evaluating_again_compiles_nothing(cluster):
    params = {"w": np.ones((3, 2), np.float32)}
    evaluate(SIGN, params, data(), cluster, client_axis=chunked(2))
    with count_compilations() as compiled:
        evaluate(SIGN, params, data(seed=1), cluster, client_axis=chunked(2))
    assert compiled.count == 0
