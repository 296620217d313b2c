import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import (
    adjusted_rand_score,
    confusion_matrix,
    f1_score,
    normalized_mutual_info_score,
    roc_auc_score,
)
from sklearn.metrics.cluster import contingency_matrix
from still_method import still

import jfcl
from jfcl.analysis.metrics import cluster_recovery, deviation, evaluate, rounds_to_recovery, summarize
from jfcl.core import Clients, Task
from jfcl.mapping.axis import chunked, client_mesh, sharded
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


@pytest.mark.slow_cases("vmap")
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


def test_infinite_values_have_no_deviation_and_no_warning():
    assert np.isnan(deviation([np.inf, 1.0])) and deviation([1.0, 3.0]) == np.sqrt(2)


def test_clients_that_would_give_wrong_results_are_refused():
    task = jfcl.models.classification(jfcl.models.Linear(3), (2,), 3)
    params = jax.tree.map(lambda p: p[None], task.init(jax.random.key(0)))
    x, y = np.zeros((2, 4, 2), np.float32), np.ones((2, 4), np.int32)
    clients, holed = Clients({"x": x, "y": y}, np.full(2, 4, np.int32)), x.copy()
    holed[1, 2] = np.nan
    for wrong, words in [
        (clients._replace(examples={"x": holed, "y": y}), r"clients.examples\['x'\]: NaN or infinity in 1 example"),
        (clients._replace(examples={"x": x, "y": 2 + y}), r"clients: labels must lie in 0..2, got 3 at client 0"),
        (clients._replace(examples={"x": x[..., :1], "y": y}), r"inputs have shape \(1,\), but the model is made for"),
        (clients.examples, "clients must be Clients, as from jfcl.stack_clients"),
    ]:
        with pytest.raises(ValueError, match=words):
            evaluate(task, params, wrong, np.zeros(2, np.int32))


def test_newcomers_get_the_model_of_lowest_loss():
    clients, params = data(), {"w": np.random.default_rng(1).normal(size=(3, 2)).astype(np.float32)}
    got = evaluate(SIGN, params, clients, client_axis=jax.vmap)
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
    accuracy = np.array([0.9, 0.1, np.nan] + [0.5] * 27)
    size = np.array([10, 30, 0] + [10] * 27)
    result = summarize({"loss": 1 - accuracy, "accuracy": accuracy}, size)
    assert result["accuracy"] == pytest.approx((0.9 + 0.1 + 13.5) / 29)
    assert result["pooled_accuracy"] == pytest.approx((9 + 3 + 135) / 310)
    assert result["worst_client_accuracy"] == pytest.approx(0.1)
    assert result["worst_decile_accuracy"] == pytest.approx(0.3)  # the two worst of 29
    assert result["loss"] == pytest.approx(0.5)
    big = np.float32([2**24, 1, 1, 1, 1])  # of which a sum in float32 is the first
    result = summarize({"loss": big, "accuracy": big, "own": big}, np.ones(5))
    assert [result[name] for name in ("loss", "accuracy", "own")] == [(2**24 + 4) / 5] * 3


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
    largest = contingency_matrix(true, found).max(axis=0)  # by found cluster
    assert agreement["purity"] == pytest.approx(largest.sum() / len(found))


def test_adjusted_rand_by_pair_counting():
    rng = np.random.default_rng(0)
    found, true = rng.integers(0, 3, 30), rng.integers(0, 4, 30)
    pairs = list(itertools.combinations(range(30), 2))
    same_found = np.array([found[i] == found[j] for i, j in pairs])
    same_true = np.array([true[i] == true[j] for i, j in pairs])
    both, a, b, n = (same_found & same_true).sum(), same_found.sum(), same_true.sum(), len(pairs)
    expected = a * b / n
    assert cluster_recovery(found, true)["adjusted_rand"] == pytest.approx((both - expected) / ((a + b) / 2 - expected))


def test_agreement_is_exact_at_its_ends():
    """Rounding alone would give 1 + 2e-16 and 1e-16."""
    three, five = np.repeat(range(3), [1, 5, 5]), np.repeat(range(5), range(1, 6))
    assert cluster_recovery(three, three)["nmi"] == 1
    assert cluster_recovery(np.repeat([0, 1], [15, 30]), np.tile(five, 3))["nmi"] == 0
    assert cluster_recovery([0, 0, 1, 1], [0, 1, 0, 1])["adjusted_rand"] == -0.5  # worse than by chance


def test_rounds_to_recovery():
    assert rounds_to_recovery([5, 10], [0.5, 0.9]) is None
    assert rounds_to_recovery([5, 10, 15], [1.0, 1.0, 1.0]) == 5
    assert rounds_to_recovery([5, 10, 15, 20, 25], [0.9, 1.0, 0.9, 1.0, 1.0]) == 20


def test_recovery_refuses_other_lengths():
    with pytest.raises(ValueError, match="vectors of one length"):
        cluster_recovery([0, 1], [0, 1, 1])
    with pytest.raises(ValueError, match="got -1 for all"):
        cluster_recovery([0, 1], [-1, -1])


def test_recovery_without_those_who_do_not_count():
    found, true = np.array([4, 4, 0, 0, 2, 4]), np.array([0, 0, 1, 1, -1, -1])
    assert cluster_recovery(found, true) == cluster_recovery(found[:4], true[:4])


@pytest.mark.parametrize("cluster", [np.zeros(5, np.int32), None])
def test_evaluating_again_compiles_nothing(cluster):
    params = {"w": np.ones((3, 2), np.float32)}
    evaluate(SIGN, params, data(), cluster, client_axis=chunked(2))
    with count_compilations() as compiled:
        evaluate(SIGN, params, data(seed=1), cluster, client_axis=chunked(2))
    assert compiled.count == 0


# ---------------------------------------------------------------------------------------------------------------
# Metrics of outputs.


def outputs_of(classes, seed, n=5, m=40):
    """Logits `[n, m, classes]` with ties, labels, and sizes, of which one client has a single label."""
    rng = np.random.default_rng(seed)
    logits = np.round(rng.normal(size=(n, m, classes)), 1).astype(np.float32)
    y = rng.integers(0, classes, (n, m)).astype(np.int32)
    y[1] = 1
    return logits, y, np.array([m, m, 7, 1, 0], np.int32)


IDENTITY = jfcl.models.task(lambda key: {"b": jnp.zeros(())}, lambda p, x: x + p["b"], kind="classification")


@pytest.mark.slow_cases("3-macro_f1-0")
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("classes", "name"), [(3, "macro_f1"), (4, "calibration_error"), (2, "auc"), (3, "confusion_matrix")]
)
def test_metrics_of_outputs_are_those_of_scikit_learn(classes, name, seed):
    logits, y, size = outputs_of(classes, seed)
    if classes == 4:  # probabilities of 1 / 3, the upper end of a bin, and of 0.30 in the same bin, right and wrong
        logits[0, :2], y[0, :2] = [[0, 0, 0, -99], [0, 0, 0, -1]], [0, 3]
    params, clients = {"b": jnp.zeros(1)}, jfcl.Clients({"x": logits, "y": y}, size)
    function = getattr(jfcl.metrics, name)
    found = jfcl.evaluate(IDENTITY, params, clients, np.zeros(5, int), metrics={name: function})[name]
    for i, m in enumerate(size):
        if m == 0:
            assert np.isnan(found[i]).all()
            continue
        z, labels = logits[i, :m].astype(np.float64), y[i, :m]
        p = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
        guess = z.argmax(axis=1)
        if name == "macro_f1":
            want = f1_score(labels, guess, average="macro")
        elif name == "confusion_matrix":
            want = confusion_matrix(labels, guess, labels=range(classes))
        elif name == "auc":
            want = roc_auc_score(labels, logits[i, :m, 1] - logits[i, :m, 0]) if len(set(labels)) == 2 else np.nan
        else:
            top, right = p.max(axis=1), guess == labels
            bins = np.minimum(np.ceil(top * 15).astype(int) - 1, 14)
            want = sum(abs((right[bins == b] - top[bins == b]).sum()) for b in range(15)) / m
        np.testing.assert_allclose(found[i], want, rtol=1e-4, atol=1e-5)


def test_outputs_that_are_nan_are_never_right():
    """The largest of NaN is the first: a diverged model would have the share of class 0 as its accuracy."""
    logits, y, real = jnp.array([[np.nan, np.nan], [0.0, np.nan], [2.0, 1.0]]), jnp.array([0, 1, 0]), jnp.ones(3, bool)
    assert IDENTITY.correct(logits, {"y": y}).tolist() == [0, 0, 1]
    assert jfcl.metrics.confusion_matrix(logits, {"y": y}, real).tolist() == [[1, 0], [0, 0]]
    assert np.isclose(jfcl.metrics.macro_f1(logits, {"y": y}, real), 1 / 2 * (2 / 3 + 0))
    logits = jnp.array([[0.0, np.nan], [0.0, 1.0], [0.0, np.nan], [0.0, 0.0]])
    assert jfcl.metrics.auc(logits, {"y": jnp.array([1, 1, 0, 0])}, jnp.ones(4, bool)) == 1 / 4  # one of four pairs
    logits = logits.at[0, 1].set(jnp.inf)
    assert jfcl.metrics.auc(logits, {"y": jnp.array([1, 1, 0, 0])}, jnp.ones(4, bool)) == 1 / 2


def test_auc_takes_memory_for_examples_and_not_for_pairs():
    m = 100_000  # 10 billion pairs
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in [((m, 2), "float32"), ((m,), "int32"), ((m,), "bool")]
    ]
    program = jax.jit(lambda logits, y, real: jfcl.metrics.auc(logits, {"y": y}, real)).lower(*shapes).compile()
    assert program.memory_analysis().temp_size_in_bytes < 100 * m
    y = jnp.arange(m) % 2
    assert program(jax.nn.one_hot(y, 2), y, jnp.ones(m, bool)) == 1.0


@pytest.mark.parametrize("name", ["macro_f1", "calibration_error", "auc", "confusion_matrix"])
def test_outputs_of_padding_do_not_count(name):
    """They may be NaN, as those of a model that divides its inputs by their length."""
    function, y = getattr(jfcl.metrics, name), jnp.array([0, 1, 1])
    found, wanted = (
        function(jnp.array([[2.0, 0.0], [0.0, 1.0], [last, last]]), {"y": y}, jnp.array([True, True, False]))
        for last in (np.nan, 0.0)
    )
    np.testing.assert_array_equal(found, wanted)


def test_outputs_of_a_few_examples_at_a_time_are_computed_once():
    logits, y, size = outputs_of(3, 0)
    rows = []

    def apply(params, x):
        rows.append(len(x))
        return IDENTITY.apply(params, x)

    task = IDENTITY._replace(apply=apply, at_once=8)
    params, clients = {"b": jnp.zeros(1)}, jfcl.Clients({"x": logits, "y": y}, size)
    given = params, clients, np.zeros(5, int)
    whole, parts = (jfcl.evaluate(t, *given, metrics={"f1": jfcl.metrics.macro_f1}) for t in (IDENTITY, task))
    assert set(rows) == {8}
    for name in ("loss", "f1"):
        np.testing.assert_allclose(whole[name], parts[name], rtol=1e-6)


def test_functions_that_write_into_a_batch_change_no_other_result():
    logits, y, size = outputs_of(3, 0)

    def cost(outputs, batch):
        batch["y"] = jax.nn.one_hot(batch["y"], 3)
        return optax.softmax_cross_entropy(outputs, batch["y"])

    def labels(outputs, batch, real):
        return batch.pop("y").sum().astype(jnp.float32)  # padding is 0

    given = {"b": jnp.zeros(1)}, jfcl.Clients({"x": logits, "y": y}, size), np.zeros(5, int)
    found = jfcl.evaluate(IDENTITY._replace(cost=cost), *given, metrics={"first": labels, "second": labels})
    wanted = jfcl.evaluate(IDENTITY, *given)
    np.testing.assert_array_equal(found["accuracy"], wanted["accuracy"])
    wanted = [y[i, :n].sum() if n else np.nan for i, n in enumerate(size)]
    np.testing.assert_array_equal(found["second"], wanted)


@pytest.mark.parametrize("metric", [jfcl.metrics.calibration_error, jfcl.metrics.confusion_matrix])
def test_metrics_of_classes_refuse_outputs_without_any(metric):
    with pytest.raises(ValueError, match=r"the outputs must be logits \[M, C\] of a classification"):
        metric(np.zeros(3, np.float32), {"y": np.zeros(3, np.int32)}, np.ones(3, bool))
    with pytest.raises(ValueError, match=r"the outputs must be logits .* got \{'logits': \(3, 2\)\}"):
        metric({"logits": np.zeros((3, 2))}, {"y": np.zeros(3, np.int32)}, np.ones(3, bool))


@pytest.mark.parametrize("metric", [jfcl.metrics.calibration_error, jfcl.metrics.auc])
def test_metrics_of_outputs_of_16_bits_are_those_of_wider_copies(metric):
    logits, y = np.random.default_rng(0).normal(size=(1000, 2)).astype(np.float16), np.arange(1000) % 2
    found, wanted = (float(metric(x, {"y": y}, np.ones(1000, bool))) for x in (logits, logits.astype(np.float32)))
    assert found == pytest.approx(wanted, rel=1e-6)


STILL = still(IDENTITY, lambda key: {"b": jnp.zeros(1)})


def test_a_run_records_metrics_of_outputs(tmp_path):
    logits, y, _ = outputs_of(3, 0)
    clients = jfcl.Clients({"x": logits, "y": y}, np.full(5, 40, np.int32))
    given = {"key": jax.random.key(0), "num_rounds": 2, "test_clients": clients, "newcomers": clients}
    metrics = {"f1": jfcl.metrics.macro_f1, "confident": lambda outputs, batch, real: jax.nn.softmax(outputs).max()}
    history = jfcl.simulate(STILL, clients, metrics=metrics, out=tmp_path / "run", **given)
    want = [f1_score(y[i], logits[i].argmax(axis=1), average="macro") for i in range(5)]
    np.testing.assert_allclose(history.clients["f1"][0], want, rtol=1e-5)
    np.testing.assert_allclose(history.records[-1]["f1"], np.mean(want), rtol=1e-5)
    assert history.records[-1]["newcomer_f1"] == pytest.approx(history.records[-1]["f1"])
    header = (tmp_path / "run" / "clients.csv").read_text().splitlines()[0]
    assert header.endswith("accuracy,loss,confident,f1")


@pytest.mark.slow
def test_a_population_records_metrics_of_outputs():
    logits, y, _ = outputs_of(3, 0)
    store = jfcl.data.ClientStore.from_clients(jfcl.Clients({"x": logits, "y": y}, np.full(5, 40, np.int32)))
    algorithm = jfcl.fedavg(IDENTITY, jfcl.local_training(optax.sgd(0.1), num_steps=1))
    people = jfcl.Population(store, cohort=5, test_clients=store, evaluate=range(5))
    metrics = {"f1": jfcl.metrics.macro_f1}
    crowd = jfcl.simulate(algorithm, people, metrics=metrics, key=jax.random.key(0), num_rounds=1)
    want = [f1_score(y[i], logits[i].argmax(axis=1), average="macro") for i in range(5)]
    np.testing.assert_allclose(crowd.clients["f1"][0], want, rtol=1e-5)


def test_a_model_without_a_leading_axis_is_refused():
    task = jfcl.models.classification(jfcl.models.Linear(2), (3,), 2)
    clients = jfcl.Clients({"x": np.zeros((1, 2, 3), np.float32), "y": np.zeros((1, 2), np.int32)}, np.array([2]))
    with pytest.raises(ValueError, match=r"params must be models stacked on a leading axis, \[K, ...\]; jax.tree.map"):
        evaluate(task, task.init(jax.random.key(0)), clients)


@pytest.mark.slow_cases("{'bytes_up': <functi-metrics must be othe")
@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"loss": jfcl.metrics.macro_f1}, "metrics must be other names than those of results"),
        ({"bytes_up": jfcl.metrics.macro_f1}, "metrics must be other names than those of the method's own"),
        ({"round": jfcl.metrics.macro_f1}, "metrics must be other names than those of entries of records"),
        ({"worst_client_accuracy": jfcl.metrics.macro_f1}, "metrics must be other names than those of entries"),
        ({"newcomer_loss": jfcl.metrics.macro_f1}, "metrics must be other names than those of entries"),
        ({"true_cluster": jfcl.metrics.macro_f1}, "metrics must be other names than those of entries"),
        ({"f1": 3}, r"metrics\['f1'\] must be a function"),
        (
            {"two": lambda outputs, batch: 0.0},
            r"metrics\['two'\] must be a function \(outputs, batch, real\) -> a number; ",
        ),
        ({"F 1": jfcl.metrics.macro_f1}, "metrics must be names such as"),
        (jfcl.metrics.macro_f1, "metrics must be a dict of functions"),
        ({"table": jfcl.metrics.confusion_matrix}, r"metrics\['table'\] must be a function that returns one number"),
        ({"auc": jfcl.metrics.auc}, "the outputs must be logits of two classes for auc"),
        ({"sum": lambda outputs, *_: float(outputs.sum())}, r"metrics\['sum'\] must be a function that JAX compiles"),
        ({"any": lambda outputs, _, real: outputs[real].max()}, r"metrics\['any'\] must be .* no mask as an index"),
        ({"none": lambda *_: None}, r"metrics\['none'\] must be a function that returns one number, got None"),
        ({"i": lambda outputs, *_: jax.lax.complex(outputs, outputs).sum()}, r"'i'\] must be .* returns one number"),
        ({"text": lambda *_: "x"}, r"metrics\['text'\] must be a function that returns one number, got 'x'"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_metrics_that_are_none_are_refused(metrics, words):
    logits, y, _ = outputs_of(3, 0)
    clients = jfcl.Clients({"x": logits, "y": y}, np.full(5, 40, np.int32))
    with pytest.raises(ValueError, match=words):
        jfcl.simulate(STILL, clients, key=jax.random.key(0), num_rounds=1, test_clients=clients, metrics=metrics)


def test_metrics_without_test_examples_are_refused():
    """They would be missing in the results without a word."""
    logits, y, _ = outputs_of(3, 0)
    clients = jfcl.Clients({"x": logits, "y": y}, np.full(5, 40, np.int32))
    people = jfcl.Population(jfcl.data.ClientStore.from_clients(clients), cohort=2)
    for source in (clients, people):
        with pytest.raises(ValueError, match="metrics must be left out without test_clients and newcomers"):
            jfcl.simulate(STILL, source, key=jax.random.key(0), num_rounds=1, metrics={"f1": jfcl.metrics.macro_f1})
