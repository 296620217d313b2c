"""CLoVE against a loop of its round in float64, its degenerate cases, and what it refuses."""

from functools import partial

import jax
import numpy as np
import optax
import pytest
from linear_clients import linear, linear_clients, loss64, trained
from padded_clients import padded
from scipy.optimize import linear_sum_assignment
from sklearn.cluster import AgglomerativeClustering, KMeans
from sklearn.metrics import adjusted_rand_score, silhouette_score

import jfcl
from jfcl.core.clients import client_ids
from jfcl.methods.assigned import UNSEEN
from jfcl.methods.clove import _clusters
from jfcl.methods.round import select_cohort
from jfcl.simulation.evaluation import unlike
from jfcl.testing import check_algorithm, problem

D = 3
LINEAR = linear(D)
TWO = jfcl.local_training(optax.sgd(0.1), num_steps=2)
TRUTH = np.array([[3.0, 0, -1], [-3.0, 1, 1], [0, 4, 2]])


def regression(seed, m=7):
    return linear_clients(TRUTH, seed, 12, m, least=3 if m < 10 else m // 2)


def clusters_of(vectors, k):
    """k-means, or the authors' rule for an unknown number."""
    if k != "auto":
        return KMeans(k, n_init=200, random_state=0).fit_predict(vectors)
    best = found = None
    for number in range(2, len(vectors)):
        labels = AgglomerativeClustering(number).fit_predict(vectors)
        score = silhouette_score(vectors, labels)
        if best is None or score > 1.1 * best:
            best, found = score, labels
    return found


def one_round(models, clients, rows, k, square_root):
    """The paper's round for the clients `rows`: `(models, {client: model}, losses in training)`."""
    losses = np.array([[loss64(w, clients, i) for w in models] for i in rows])
    cluster = clusters_of(np.sqrt(losses) if square_root else losses, k)
    cost = np.array([losses[cluster == c].sum(axis=0) for c in range(cluster.max() + 1)])
    match = dict(zip(*linear_sum_assignment(cost), strict=True))
    chosen = {i: match[c] for i, c in zip(rows, cluster, strict=True)}
    new, after = models.copy(), {i: trained(models[chosen[i]], clients, i, 2) for i in rows}
    for model in set(chosen.values()):
        members = [i for i in rows if chosen[i] == model]
        new[model] = np.average([after[i][0] for i in members], axis=0, weights=clients.size[members])
    return new, chosen, [after[i][1] for i in rows]


@pytest.mark.slow_cases("3-*", "auto-False-8")
@pytest.mark.parametrize("cohort", [None, 8])
@pytest.mark.parametrize(("k", "square_root"), [(3, False), (3, True), ("auto", False)])
def test_a_round_is_the_papers(k, square_root, cohort):
    most = 3 if k != "auto" else 11
    start = {"w": np.random.default_rng(50).normal(size=(most, D)).astype(np.float32) * 2}
    options = {"num_clusters": k, "square_root": square_root, "cohort": cohort, "first": "losses"}
    options |= {"init_params": start} | ({"most_clusters": most} if k == "auto" else {})
    algorithm = jfcl.clove(LINEAR, TWO, **options)
    init, step = jax.jit(algorithm.init), jax.jit(algorithm.step)
    of_cohort = jax.jit(lambda key, clients: client_ids(select_cohort(key, clients, cohort).clients))
    for seed in range(3):
        clients = regression(seed)
        more = padded(clients)
        state = init(jax.random.key(seed), more)
        models, chosen = start["w"].astype(np.float64), {}
        for t in range(3):
            key = jax.random.fold_in(jax.random.key(seed), t)
            rows = [i for i in of_cohort(key, more).tolist() if i < 12]
            models, found, losses = one_round(models, clients, rows, k, square_root)
            chosen |= found
            state, metrics = jax.device_get(step(key, state, more))
            np.testing.assert_allclose(metrics["loss"][rows], losses, rtol=1e-4)
            np.testing.assert_allclose(state.params["w"], models, rtol=1e-5, atol=1e-5)
            assert [int(state.cluster[i]) for i in chosen] == list(chosen.values())
            assert metrics["clusters_found"] == len(set(found.values()))
            present = cohort or 12
            model = 4 * D
            down = most * model if metrics["compared"] else model
            assert metrics["bytes_down"] == present * down
            assert ("silhouettes" in metrics) == (k == "auto")
            assert metrics["bytes_up"] == present * (model + 4 * most * metrics["compared"])
        assert ((np.asarray(state.unchanged)[:12] == UNSEEN) == [i not in chosen for i in range(12)]).all()


@pytest.mark.slow
def test_models_are_assigned_by_losses_also_where_their_roots_are_clustered():
    losses, last = np.float32([[0, 9], [9, 20]]), np.zeros(2, np.int32)
    options = {"num_clusters": 2, "auto": False, "square_root": True}
    chosen, *_ = _clusters(losses, np.ones(2, bool), last, jax.random.key(0), **options)
    assert chosen.tolist() == [1, 0]  # 9 + 9 is less than 0 + 20; the sum of the roots is more


@pytest.mark.slow
def test_one_model_is_fedavg():
    clients, key = regression(0), jax.random.key(3)
    start = {"w": np.float32([1, 2, 3])}
    runs = [
        jfcl.rollout(algorithm, clients, key=key, num_rounds=4)[0].params["w"]
        for algorithm in (
            jfcl.clove(LINEAR, TWO, num_clusters=1, cohort=5, init_params=start),
            jfcl.fedavg(LINEAR, TWO, cohort=5, init_params=start),
        )
    ]
    np.testing.assert_array_equal(*runs)


@pytest.mark.slow
def test_with_models_that_separate_the_clients_it_is_ifca():
    clients, key = regression(1, m=60), jax.random.key(3)
    start = {"w": (TRUTH * 0.9).astype(np.float32)}
    options = {"num_clusters": 3, "init_params": start}
    ours = jfcl.rollout(jfcl.clove(LINEAR, TWO, first="losses", **options), clients, key=key, num_rounds=4)[0]
    ifca = jfcl.rollout(jfcl.ifca(LINEAR, TWO, weights="size", **options), clients, key=key, num_rounds=4)[0]
    np.testing.assert_allclose(ours.params["w"], ifca.params["w"], rtol=1e-6)
    np.testing.assert_array_equal(ours.cluster, ifca.cluster)


@pytest.mark.slow
def test_the_first_round_divides_the_clients_at_random_and_a_stable_one_compares_nobody():
    clients = regression(2, m=60)
    algorithm = jfcl.clove(LINEAR, TWO, num_clusters=3, stable_rounds=2)
    state, metrics = jfcl.rollout(algorithm, clients, key=jax.random.key(0), num_rounds=9)
    first = algorithm.step(
        jax.random.fold_in(jax.random.key(0), 1), algorithm.init(jax.random.key(0), clients), clients
    )
    assert np.bincount(first[0].cluster).tolist() == [4, 4, 4]
    assert metrics["compared"][0] == 0 and metrics["compared"][1] == 1
    quiet = np.flatnonzero(np.asarray(metrics["compared"][1:]) == 0)[0] + 1
    assert (metrics["compared"][quiet:] == 0).all() and quiet >= 3
    assert metrics["bytes_down"][-1] == 12 * 4 * D
    assert adjusted_rand_score(state.cluster, np.arange(12) % 3) == 1


def test_stable_clients_are_compared_again_when_a_step_of_time_begins():
    clients = regression(2, m=60)
    algorithm = jfcl.clove(LINEAR, TWO, num_clusters=3, first="losses", stable_rounds=2, client_axis=jax.vmap)
    step, state, kept, last = jax.jit(algorithm.step), None, np.zeros(12, int), np.full(12, -1)
    for now, turn in enumerate((0, 1, 1)):  # in the last step nothing changes
        x = clients.examples["x"]
        y = np.einsum("nmd,nd->nm", x, TRUTH[(np.arange(12) + turn * (np.arange(12) < 6)) % 3])
        examples = {"x": x, "y": np.float32(y), "step": np.full(y.shape, now, np.int32)}
        today = clients._replace(examples=examples)
        state = algorithm.init(jax.random.key(0), today) if state is None else state
        for t in range(8):
            state, metrics = step(jax.random.key(8 * now + t), state, today)
            assert bool(metrics["compared"]) == (min(kept.min(), t) < 2)  # rounds of each client, and of the step
            cluster = np.asarray(state.cluster)
            kept, last = np.where(cluster == last, kept + 1, 0), cluster
        assert adjusted_rand_score(last, (np.arange(12) + turn * (np.arange(12) < 6)) % 3) == 1
        assert not metrics["compared"]


@pytest.mark.slow
def test_newcomers_and_clients_that_never_took_part_get_the_model_of_lowest_loss():
    clients = regression(3)
    algorithm = jfcl.clove(LINEAR, TWO, num_clusters=3, cohort=9)
    history = jfcl.simulate(
        algorithm, clients, key=jax.random.key(1), num_rounds=1, test_clients=clients, newcomers=clients
    )
    state = history.state
    losses = np.array([[loss64(np.float64(w), clients, i) for w in state.params["w"]] for i in range(12)])
    unseen = np.asarray(state.unchanged) == UNSEEN
    assert unseen.sum() == 3
    served = np.asarray(algorithm.serve(state, clients).to)
    np.testing.assert_array_equal(served[unseen], losses.argmin(axis=1)[unseen])
    np.testing.assert_array_equal(served[~unseen], np.asarray(state.cluster)[~unseen])
    np.testing.assert_allclose(history.records[-1]["newcomer_loss"], losses.min(axis=1).mean(), rtol=1e-4)


@pytest.mark.slow
def test_a_client_with_a_loss_that_is_not_finite_keeps_its_cluster():
    clients = regression(4)
    clients.examples["y"][5] = np.nan
    algorithm = jfcl.clove(LINEAR, TWO, num_clusters=3, first="losses")
    state = jax.jit(algorithm.init)(jax.random.key(0), clients)
    state, metrics = jax.jit(algorithm.step)(jax.random.key(1), state, clients)
    assert state.cluster[5] == 0 and metrics["nonfinite"] == 1 and np.isfinite(state.params["w"]).all()
    assert metrics["nonfinite_losses"] == 1
    warns = algorithm.entries.notes
    assert warns({"nonfinite_losses": 1}, False)["losses"].startswith("1 client(s) had a loss that is not finite")
    assert warns({"nonfinite_losses": 0}, False) == warns({"nonfinite_losses": 1}, True) == {}


def test_auto_has_its_types_with_64_bits_and_makes_no_nan():
    clients = regression(0)
    clients = clients._replace(examples={"x": clients.examples["x"], "y": np.zeros((12, 7), np.int32)})
    task, key = jfcl.models.classification(jfcl.models.Linear(2), (D,), 2), jax.eval_shape(lambda: jax.random.key(0))
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"), jax.debug_nans(True):
        algorithm = jfcl.clove(task, TWO, num_clusters="auto")
        state = jax.eval_shape(algorithm.init, key, clients)
        new, metrics = jax.eval_shape(algorithm.step, key, state, clients)
    assert not unlike(new, state) and metrics["silhouettes"].dtype == np.float32


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"num_clusters": "auto", "most_clusters": 4, "first": "losses"},
        {"num_clusters": 2, "cohort": 4, "stable_rounds": None, "personal": lambda path: path == "b"},
        {"num_clusters": 2, "shared": lambda path: path == "b", "square_root": True},
    ],
    ids=["auto", "cohort, personal", "shared, square_root"],
)
def test_options_conform(options):
    check_algorithm(partial(jfcl.clove, **options))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_clusters": 4, "cohort": 3}, "num_clusters must be at most the 3 clients of a cohort, got 4"),
        ({"num_clusters": 8}, "num_clusters must be at most the 7 clients there are, got 8"),
        ({"num_clusters": "all"}, "num_clusters must be of type int or 'auto'"),
        ({"num_clusters": 0}, "num_clusters must be"),
        ({"num_clusters": "auto", "most_clusters": 1}, "most_clusters must be"),
        ({"num_clusters": 2, "first": "last"}, "unknown first"),
    ],
)
def test_what_has_no_meaning_is_refused(options, words):
    clients, _, task, training = problem()
    with pytest.raises(ValueError, match=words):
        jfcl.clove(task, training, **options).init(jax.random.key(0), clients)


def test_it_has_no_privacy_and_others_choose_no_number():
    _, _, task, training = problem()
    with pytest.raises(TypeError, match="clove has no argument 'dp'"):
        jfcl.clove(task, training, num_clusters=2, dp=None)
    with pytest.raises(ValueError, match="num_clusters must be of type int"):
        jfcl.ifca(task, training, num_clusters="auto")


@pytest.mark.slow
def test_in_one_process_clove_and_ifca_are_evaluated_each_in_its_way():
    clients = regression(0)
    how = {"key": jax.random.key(0), "num_rounds": 1, "test_clients": clients}
    alone = jfcl.simulate(jfcl.ifca(LINEAR, TWO, num_clusters=3), clients, **how, serve="state")
    clove = jfcl.simulate(jfcl.clove(LINEAR, TWO, num_clusters=3), clients, **how)
    ifca = jfcl.simulate(jfcl.ifca(LINEAR, TWO, num_clusters=3), clients, **how)
    lowest = np.array([[loss64(w, clients, i) for w in ifca.state.params["w"]] for i in range(12)]).min(axis=1)
    np.testing.assert_allclose(ifca.clients["loss"][0], lowest, rtol=1e-5)
    own = np.array([loss64(clove.state.params["w"][k], clients, i) for i, k in enumerate(clove.state.cluster)])
    np.testing.assert_allclose(clove.clients["loss"][0], own, rtol=1e-5)
    assert (own > lowest).any() and (alone.clients["loss"] > ifca.clients["loss"]).any()  # the two rules differ here
