"""Ditto, kNN-Per, HypCluster, one-shot, FL+HC and FeSEM against scikit-learn, SciPy and loops in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.cluster.hierarchy
from compiled import rollout
from linear_clients import descend, linear, linear_clients, trained
from scipy.special import log_softmax
from sklearn.cluster import AgglomerativeClustering, KMeans
from sklearn.metrics import silhouette_score
from sklearn.neighbors import NearestNeighbors

import jfcl
from jfcl import attacks
from jfcl.core import Adversary, Algorithm, Clients, Task
from jfcl.methods.knn_per import MIXINGS, Mixture, neighbours
from jfcl.methods.once import with_first_costs
from jfcl.methods.round import round_metrics

D = 3
LINEAR = linear(D)
TWO = jfcl.local_training(optax.sgd(0.1), num_steps=2)
START = {"w": np.float32([0.5, -0.5, 1.0])}


def regression(seed=0, n=8):
    return linear_clients(np.array([[3.0, 0, -1], [-3.0, 1, 1]]), seed, n, m=6, least=3)


def test_ditto_is_algorithm_1():
    clients = regression()

    @jax.jit
    def run(lam):
        algorithm = jfcl.ditto(LINEAR, TWO, lam=lam, init_params=START)
        return jfcl.rollout(algorithm, clients, key=jax.random.key(0), num_rounds=4)

    share = clients.size / clients.size.sum()
    for lam in (0.0, 1.5):
        state, metrics = run(lam)
        w = START["w"].astype(np.float64)
        own = np.tile(w, (8, 1))
        for t in range(4):
            own, losses = map(np.array, zip(*(trained(own[i], clients, i, 2, lam, w) for i in range(8)), strict=True))
            np.testing.assert_allclose(metrics["loss"][t], losses, rtol=1e-3, atol=1e-6)
            w = sum(share[i] * descend(w, clients, i, 2) for i in range(8))
        np.testing.assert_allclose(state.params["w"], own, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(state.common.params["w"], w[None], rtol=1e-4, atol=1e-5)
        assert metrics["client_steps"].tolist() == [2 * 2 * 8] * 4 and metrics["bytes_up"].tolist() == [8 * D * 4] * 4

    # In the second round all personal models overflow, and stay as they were; the global one does not.
    overflown, metrics = run(1e38)
    assert metrics["nonfinite"].tolist() == [0, 8, 8, 8] and np.isfinite(overflown.params["w"]).all()
    np.testing.assert_array_equal(overflown.common.params["w"], state.common.params["w"])


@pytest.mark.slow
def test_ditto_without_a_pull_is_local_training_and_a_cohort_moves_alone():
    clients = regression(1)
    key = jax.random.key(5)
    free = jfcl.rollout(jfcl.ditto(LINEAR, TWO, lam=0.0, init_params=START), clients, key=key, num_rounds=3)[0]
    alone = jfcl.rollout(jfcl.local_only(LINEAR, TWO, init_params=START), clients, key=key, num_rounds=3)[0]
    np.testing.assert_allclose(free.params["w"], alone.params["w"], rtol=1e-6)
    some = jfcl.ditto(LINEAR, TWO, cohort=3, init_params=START)
    state = some.init(key, clients)
    new, metrics = jax.jit(some.step)(jax.random.key(1), state, clients)
    moved = (np.asarray(new.params["w"]) != np.asarray(state.params["w"])).any(axis=1)
    assert moved.sum() == 3 and (moved == ~np.isnan(metrics["loss"])).all()


@pytest.mark.slow
def test_ditto_trains_the_models_of_the_cohort_alone():
    trained = []

    def counted(function, *args, **options):
        def mapped(*rows):
            trained.append(len(rows[0]))
            return jax.vmap(function, *args, **options)(*rows)

        return mapped

    algorithm = jfcl.ditto(LINEAR, TWO, cohort=3, init_params=START, client_axis=counted)
    clients, key = regression(1), jax.random.key(5)
    algorithm.step(key, algorithm.init(key, clients), clients)
    assert trained == [3, 3]  # personal models, and the global one


@pytest.mark.slow_cases("cfl", "ditto", "make4", "make5", "make6", "make7")
@pytest.mark.parametrize(
    "make",
    [
        jfcl.fedavg,
        jfcl.cfl,
        jfcl.ditto,
        partial(jfcl.ifca, num_clusters=2),
        partial(jfcl.fesem, num_clusters=2),
        partial(jfcl.one_shot, num_clusters=2),
        partial(jfcl.federated_clustering, quantile=0.5),
        partial(jfcl.momentum_clustering, num_clusters=2, quantile=0.5),
    ],
)
def test_the_bytes_of_a_model_may_exceed_int32(make):
    """Only shapes: a model of 2.4 GB."""
    task = jfcl.models.task(
        lambda key: {"w": jnp.zeros(600_000_000)}, lambda p, x: x * p["w"][:1].sum(), kind="regression"
    )
    clients = Clients({"x": np.zeros((3, 2), np.float32), "y": np.zeros((3, 2), np.float32)}, np.full(3, 2, np.int32))
    algorithm = make(task, jfcl.local_training(optax.sgd(0.1), num_steps=1))
    state = jax.eval_shape(algorithm.init, jax.random.key(0), clients)
    metrics = jax.eval_shape(algorithm.step, jax.random.key(0), state, clients)[1]
    assert metrics["bytes_up"].dtype == jnp.float32


def test_bytes_beyond_int32_are_summed():
    present = jnp.array([True, False, True])
    summed = round_metrics(present, jnp.zeros(3), present, 1, 2_400_000_000, 2**40)
    assert summed["bytes_up"] == 4.8e9 and summed["bytes_down"] == 2.0**41


def classification(seed=0, n=5, m=14):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, m, 2)).astype(np.float32)
    y = ((x[:, :, 0] > 0) ^ (np.arange(n) % 2 == 1)[:, None]).astype(np.int32)
    size = rng.integers(10, m + 1, n).astype(np.int32)
    task = jfcl.models.task(
        lambda key: {"w": jax.random.normal(key, (2, 2))}, lambda p, x: x @ p["w"], kind="classification"
    )
    return Clients({"x": x, "y": y}, size), task


def mixture64(w, clients, i, first, x, mixing, k, scale):
    """kNN-Per's probabilities by scikit-learn's neighbours."""
    memory = clients.examples["x"][i, :first].astype(np.float64) @ w
    label = clients.examples["y"][i, :first]
    outputs = x.astype(np.float64) @ w
    distances, rows = NearestNeighbors(n_neighbors=k).fit(memory).kneighbors(outputs)
    weight = np.exp(-(distances**2) / scale)
    own = np.stack([(weight * (label[rows] == c)).sum(axis=1) for c in range(2)], axis=1)
    soft = np.exp(outputs - outputs.max(axis=1, keepdims=True))
    return mixing * own / weight.sum(axis=1, keepdims=True) + (1 - mixing) * soft / soft.sum(axis=1, keepdims=True)


@pytest.mark.slow_cases("None")
@pytest.mark.parametrize("scale", [None, 0.5])
def test_knn_per_is_its_mixture(scale):
    clients, task = classification()
    algorithm = jfcl.knn_per(task, TWO, num_neighbours=3, mixing=0.6, scale=scale)
    state, _ = rollout(algorithm, clients, key=jax.random.key(0), num_rounds=3)
    x = np.random.default_rng(1).normal(size=(20, 2)).astype(np.float32)
    state = jax.device_get(state)
    w = state.common.params["w"][0].astype(np.float64)
    task = algorithm.task
    scores = jax.jit(lambda p, b: (task.apply(p, b["x"]), task.loss(p, b), task.scores(task.correct, p, b)))
    for i in range(5):
        mine = jax.tree.map(lambda p, i=i: p[i], state.params)
        truth = mixture64(w, clients, i, int(clients.size[i]), x, 0.6, 3, scale or 2.0)
        y = (truth[:, 0] > 0.5).astype(np.int32)
        outputs, losses, right = scores(mine, {"x": x, "y": y})
        np.testing.assert_allclose(np.exp(outputs), truth, atol=1e-5)
        np.testing.assert_allclose(losses, -np.log(truth[np.arange(20), y]), atol=1e-4)
        assert right.tolist() == (truth.argmax(axis=1) == y).tolist()


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "center"), [(jnp.float32, 2000), (jnp.bfloat16, 2)])
def test_neighbours_far_from_zero_are_the_nearest(dtype, center):
    """Also those of representations in bfloat16, in which distances would have ties."""
    rng = np.random.default_rng(0)
    memory, x = (jnp.asarray(center + rng.uniform(-1, 1, (n, 8)), dtype) for n in (30, 40))
    label, wide = np.arange(30), [np.asarray(part, np.float64) for part in (memory[:20], x)]
    truth = NearestNeighbors(n_neighbors=1).fit(wide[0]).kneighbors(wide[1])[1][:, 0]
    method = Mixture(LABELS, LABELS.apply, 1, 0.5, 0.2, None)
    found = neighbours(method, memory, jnp.asarray(label), jnp.int32(20), x, 30)
    np.testing.assert_array_equal(found.argmax(axis=1), truth)


@pytest.mark.slow_cases("one")
@pytest.mark.parametrize("far", ["one", "all"])
def test_neighbours_of_examples_far_from_each_other_are_the_nearest(far):
    """In float32, squares of 5,000 leave no digit of distances below 1."""
    rng = np.random.default_rng(0)
    centers = np.repeat(rng.uniform(-5000, 5000, (20, 1)), 5, axis=0) if far == "all" else np.zeros((100, 1))
    memory, x = ((centers + rng.normal(size=(100, 1))).astype(np.float32) for _ in range(2))
    memory[0] = 5000.0
    label = rng.integers(0, 2, 100)
    squares = (x.astype(np.float64) - memory[None, :, 0]) ** 2
    near = np.argsort(squares, axis=1)[:, :3]
    weight = np.exp(-np.take_along_axis(squares, near, axis=1))
    truth = (weight * label[near]).sum(axis=1) / weight.sum(axis=1)
    method = Mixture(LABELS, LABELS.apply, 3, 0.5, 0.2, None)
    of = jax.jit(partial(neighbours, method, num_classes=2))
    found = of(memory, label, np.int32(100), x)
    np.testing.assert_allclose(found[:, 1], truth, atol=1e-4)


@pytest.mark.slow
def test_knn_per_chooses_the_weight_on_examples_kept_aside():
    clients, task = classification(2)
    algorithm = jfcl.knn_per(task, TWO, num_neighbours=3, validation=0.3)
    state, metrics = jfcl.rollout(algorithm, clients, key=jax.random.key(0), num_rounds=5)
    first = clients.size - np.floor(np.float32(0.3) * clients.size).astype(int)
    part = clients._replace(size=first.astype(np.int32))
    plain = jfcl.rollout(jfcl.fedavg(task, TWO), part, key=jax.random.key(0), num_rounds=5)[0]
    np.testing.assert_allclose(state.common.params["w"], plain.params["w"], rtol=1e-6)
    w = np.asarray(state.common.params["w"][0], np.float64)
    for i in range(5):
        aside = slice(first[i], int(clients.size[i]))
        x, y = clients.examples["x"][i, aside], clients.examples["y"][i, aside]
        right = [
            (mixture64(w, clients, i, first[i], x, mixing, 3, 2.0).argmax(axis=1) == y).sum() for mixing in MIXINGS
        ]
        assert state.params.mixing[i] == np.float32(MIXINGS[int(np.argmax(right))])
    assert metrics["mixing"].shape == (5, 5) and len(set(np.asarray(state.params.mixing).tolist())) > 1


def test_knn_per_knows_its_classes_and_its_neighbours():
    clients, task = classification()
    wrong = jax.tree.map(np.copy, clients)
    wrong.examples["y"][0, 0] = 99
    known = task._replace(num_classes=int(clients.examples["y"].max()) + 1)
    with pytest.raises(ValueError, match="labels must lie in"):
        jfcl.simulate(jfcl.knn_per(known, TWO, num_neighbours=2), wrong, key=jax.random.key(0), num_rounds=1)
    # 0.29 * 100 is below 29 in float64, and 29 in float32, in which the examples are divided.
    hundred = Clients({"x": np.zeros((2, 100, D), np.float32), "y": np.zeros((2, 100), np.int32)}, np.full(2, 100))
    with pytest.raises(ValueError, match="num_neighbours must be at most 71"):
        jfcl.knn_per(task, TWO, num_neighbours=72, validation=0.29).check(hundred)


@pytest.mark.slow
def test_knn_per_looks_at_what_enters_the_last_layer():
    task = jfcl.models.classification(jfcl.models.MLP(10, hidden=(6, 4)), (5,), 10)
    params = task.init(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (3, 5))
    hidden = x
    for name in ("Dense_0", "Dense_1"):
        hidden = np.maximum(
            np.asarray(hidden) @ np.asarray(params[name]["kernel"]) + np.asarray(params[name]["bias"]), 0
        )
    np.testing.assert_allclose(task.represent(params, x), hidden, rtol=1e-6)


@pytest.mark.slow_cases("None")
@pytest.mark.parametrize("mixing", [None, 0.5])
def test_knn_per_of_a_client_without_examples_is_the_global_model(mixing):
    clients, task = classification()
    algorithm = jfcl.knn_per(task, TWO, num_neighbours=3, mixing=mixing)
    empty = clients._replace(size=np.where(np.arange(5) == 2, 0, clients.size))
    state = jax.device_get(jax.jit(algorithm.init)(jax.random.key(0), empty))
    x = clients.examples["x"][2]
    own = jax.jit(algorithm.task.apply)(jax.tree.map(lambda p: p[2], state.params), x)
    np.testing.assert_allclose(own, log_softmax(x @ state.common.params["w"][0], axis=1), rtol=1e-5)


def test_knn_per_of_a_process_without_examples():
    clients, task = classification()
    empty = clients._replace(size=np.zeros_like(clients.size))
    jfcl.knn_per(task, TWO, num_neighbours=3).check(empty)  # others hold the clients with examples
    with pytest.raises(ValueError, match="num_neighbours must be at most"):
        jfcl.knn_per(task, TWO, num_neighbours=10**6).check(clients)


def test_the_warm_start_of_hypcluster_is_fedavg_in_parts():
    clients = regression(3)
    key = jax.random.key(2)
    warm = jfcl.hypcluster(LINEAR, TWO, num_clusters=2, warm_rounds=3, init_params=START)
    state = jax.device_get(jax.jit(warm.init)(key, clients))
    assert (state.params["w"][0] != state.params["w"][1]).any() and state.round == 0
    # Some split into two parts of four gives these models by FedAvg inside each.
    from itertools import combinations

    def inside(part):
        w = START["w"].astype(np.float64)
        share = clients.size[list(part)] / clients.size[list(part)].sum()
        for _ in range(3):
            w = sum(s * descend(w, clients, i, 2) for s, i in zip(share, part, strict=True))
        return w

    found = [
        [part for part in combinations(range(8), 4) if np.allclose(inside(part), w, atol=1e-4)]
        for w in state.params["w"]
    ]
    assert len(found[0]) == len(found[1]) == 1 and not set(found[0][0]) & set(found[1][0])
    step = jax.jit(warm.step)
    (_, first), (_, later) = (step(jax.random.key(1), state._replace(round=np.int32(t)), clients) for t in (0, 1))
    first, later = jax.device_get((first, later))
    assert first["bytes_up"] - later["bytes_up"] == 3 * 8 * D * 4
    assert first["client_steps"] - later["client_steps"] == 3 * 8 * 2


def test_one_shot_is_scikit_learns_k_means_of_local_models_then_fedavg():
    clients = regression(4)
    algorithm = jfcl.one_shot(LINEAR, TWO, num_clusters=2, local_rounds=5, init_params=START)
    state = jax.jit(algorithm.init)(jax.random.key(0), clients)
    local = np.stack([descend(START["w"].astype(np.float64), clients, i, 10) for i in range(8)])
    truth = KMeans(2, n_init=10, random_state=0).fit(local).labels_
    cluster = np.asarray(state.cluster)
    assert ((cluster[:, None] == cluster[None]) == (truth[:, None] == truth[None])).all()
    models = []
    for k in range(2):
        members = np.flatnonzero(cluster == k)
        models.append(np.average(local[members], axis=0, weights=clients.size[members]))
    np.testing.assert_allclose(state.params["w"], models, rtol=1e-4, atol=1e-5)
    new, metrics = jax.jit(algorithm.step)(jax.random.key(1), state, clients)
    for k in range(2):
        members = np.flatnonzero(cluster == k)
        share = clients.size[members] / clients.size[members].sum()
        mean = sum(s * descend(models[k], clients, i, 2) for s, i in zip(share, members, strict=True))
        np.testing.assert_allclose(new.params["w"][k], mean, rtol=1e-4, atol=1e-5)
    assert metrics["client_steps"] == 8 * 2 * (5 + 1) and metrics["bytes_up"] == 2 * 8 * D * 4


def test_one_shot_chooses_the_number_of_clusters_by_silhouettes():
    clients = regression(4)
    algorithm = jfcl.one_shot(LINEAR, TWO, num_clusters="auto", local_rounds=5, init_params=START)  # more than clients
    state = jax.jit(algorithm.init)(jax.random.key(0), clients)
    _, metrics = jax.jit(algorithm.step)(jax.random.key(1), state, clients)
    local = np.stack([descend(START["w"].astype(np.float64), clients, i, 10) for i in range(8)])
    scores = [silhouette_score(local, AgglomerativeClustering(k).fit_predict(local)) for k in range(2, 8)]
    np.testing.assert_allclose(metrics["silhouettes"], [np.nan] * 2 + scores + [np.nan] * 8, rtol=1e-4)
    assert metrics["clusters_found"] == 2 and scores[0] * 1.1 > max(scores)
    np.testing.assert_array_equal(state.cluster == state.cluster[0], np.arange(8) % 2 == 0)


def dendrogram(clients, distance, linkage):
    """FedAvg after two rounds, and SciPy's tree of the updates that clients make from there."""
    w = START["w"].astype(np.float64)
    share = clients.size / clients.size.sum()
    for _ in range(2):
        w = sum(share[i] * descend(w, clients, i, 2) for i in range(9))
    updates = np.stack([descend(w, clients, i, 2) - w for i in range(9)])
    return w, scipy.cluster.hierarchy.linkage(updates, linkage, metric=distance)


@pytest.mark.slow
@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
@pytest.mark.parametrize("linkage", ["complete", "single"])
def test_flhc_is_scipys_dendrogram_of_the_updates(distance, linkage):
    clients = regression(5, n=9)
    w, tree = dendrogram(clients, distance, linkage)
    options = {"distance": distance, "linkage": linkage, "rounds_before": 2, "init_params": START}
    state = jax.jit(jfcl.flhc(LINEAR, TWO, num_clusters=4, **options).init)(jax.random.key(0), clients)
    truth = scipy.cluster.hierarchy.fcluster(tree, 4, "maxclust")
    cluster = np.asarray(state.cluster)
    assert ((cluster[:, None] == cluster[None]) == (truth[:, None] == truth[None])).all()
    np.testing.assert_allclose(state.params["w"], np.tile(w, (4, 1)), rtol=1e-4, atol=1e-5)


@pytest.mark.slow_cases("*-euclidean", "single-*")
@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
@pytest.mark.parametrize("linkage", ["complete", "single"])
def test_flhc_cuts_at_a_distance_within_the_number_of_clusters(distance, linkage):
    clients = regression(5, n=9)
    w, tree = dendrogram(clients, distance, linkage)
    options = {"distance": distance, "linkage": linkage, "rounds_before": 2, "init_params": START}
    options["distance_threshold"] = limit = (tree[-2, 2] + tree[-3, 2]) / 2  # three clusters
    state = jax.jit(jfcl.flhc(LINEAR, TWO, num_clusters=5, **options).init)(jax.random.key(0), clients)
    truth, cluster = scipy.cluster.hierarchy.fcluster(tree, limit, "distance"), np.asarray(state.cluster)
    assert len(set(truth)) == 3
    np.testing.assert_array_equal(cluster[:, None] == cluster[None], truth[:, None] == truth[None])
    np.testing.assert_allclose(state.params["w"], np.tile(w, (5, 1)), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_flhc_has_no_more_clusters_than_models():
    clients = regression(5, n=9)
    options = {"distance": "euclidean", "rounds_before": 2, "distance_threshold": 0.0, "init_params": START}
    state = jax.jit(jfcl.flhc(LINEAR, TWO, num_clusters=2, **options).init)(jax.random.key(0), clients)
    assert len(set(state.cluster.tolist())) == 2


@pytest.mark.slow
def test_flhc_compares_chosen_layers_as_fedclust_the_weights_of_the_last_one():
    clients, rng = regression(5, n=9), np.random.default_rng(13)
    start = {"body": rng.normal(size=(D, 3)).astype(np.float32), "head": rng.normal(size=3).astype(np.float32)}
    task = LINEAR._replace(init=lambda _: start, apply=lambda p, x: x @ p["body"] @ p["head"])
    models = []
    for i in range(9):
        body, head = (np.float64(p) for p in start.values())
        x, y = (np.float64(clients.examples[name][i, : clients.size[i]]) for name in "xy")
        for _ in range(2):
            residual = (x @ body @ head - y) / len(x)
            slopes = np.outer(x.T @ residual, head), body.T @ x.T @ residual
            body, head = body - 0.05 * slopes[0], head - 0.05 * slopes[1]
        models.append([*head, *body.ravel()])
    of = lambda rows: scipy.cluster.hierarchy.linkage(rows, "average")  # noqa: E731
    trees = of(np.array(models)[:, :3]), of(models)
    truth, whole = (scipy.cluster.hierarchy.fcluster(tree, 3, "maxclust") for tree in trees)
    options = {"rounds_before": 0, "distance": "euclidean", "linkage": "average"}
    training = jfcl.local_training(optax.sgd(0.05), num_steps=2)
    algorithm = jfcl.flhc(task, training, num_clusters=3, layers=lambda path: path == "head", **options)
    state = algorithm.init(jax.random.key(0), clients)
    same = truth[:, None] == truth[None]
    np.testing.assert_array_equal(state.cluster[:, None] == state.cluster[None], same)
    assert ((whole[:, None] == whole[None]) != same).any(), "all layers give the same clusters here"
    costs = algorithm.init_costs(state, clients)
    assert costs["bytes_up"] == 9 * 4 * 3 and costs["bytes_down"] == 9 * 4 * (3 * D + 3)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 1e-9])
def test_flhc_finds_the_clusters_of_short_updates(scale):
    task = Task(
        init=lambda key: {"b": jnp.zeros(())},
        apply=lambda p, x: p["b"] + 0.0 * x,
        cost=lambda outputs, batch: 0.5 * (outputs - batch["y"]) ** 2,
    )
    y = np.repeat(np.float32([1, 5, 1.1, 5.1])[:, None], 2, axis=1)
    clients = Clients({"x": np.zeros((4, 2), np.float32), "y": y}, np.full(4, 2, np.int32))
    training = jfcl.local_training(optax.sgd(scale), num_steps=1)
    for limit, most in ((None, 2), (0.5 * scale, 4)):
        algorithm = jfcl.flhc(
            task, training, num_clusters=most, rounds_before=0, distance="euclidean", distance_threshold=limit
        )
        assert algorithm.init(jax.random.key(0), clients).cluster.tolist() == [0, 1, 0, 1]
    alone = jfcl.flhc(task, training, num_clusters=4, rounds_before=0, distance="euclidean", distance_threshold=0.0)
    assert scale < 1 or alone.init(jax.random.key(0), clients).cluster.tolist() == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("make", [jfcl.one_shot, jfcl.fesem])
def test_empty_clusters_start_at_the_mean_of_all(make):
    task = Task(
        init=lambda key: {"b": jnp.full((), 3.0)},
        apply=lambda p, x: p["b"] + 0.0 * x,
        cost=lambda outputs, batch: 0.5 * (outputs - batch["y"]) ** 2,
    )
    clients = Clients({"x": np.zeros((4, 2), np.float32), "y": np.ones((4, 2), np.float32)}, np.full(4, 2, np.int32))
    state = make(task, TWO, num_clusters=2, local_rounds=1).init(jax.random.key(0), clients)
    assert state.cluster.tolist() == [0] * 4 and state.params["b"][0] == state.params["b"][1] != 3


@pytest.mark.slow
def test_flhc_leaves_alone_whose_distance_overflows():
    y = np.repeat(np.float32([[0, 10], [0, 13], [50, 0], [53, 0], [1e25, -1e25]])[:, None], 3, axis=1)
    clients = Clients({"x": np.zeros((5, 3, 2), np.float32), "y": y}, np.full(5, 3, np.int32))
    task = jfcl.models.task(lambda _: {"b": jnp.zeros((1, 2))}, lambda p, x: x + p["b"], kind="regression")
    training = jfcl.local_training(optax.sgd(0.25), num_steps=1)
    algorithm = jfcl.flhc(task, training, num_clusters=3, distance="euclidean", rounds_before=0)
    cluster = algorithm.init(jax.random.key(0), clients).cluster.tolist()
    assert cluster[0] == cluster[1] != cluster[2] == cluster[3] and cluster.count(cluster[4]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one_shot", "flhc", "fesem"])
def test_attackers_lie_where_the_clusters_are_found(name):
    clients, malicious = regression(), np.arange(8) >= 6
    make = partial(getattr(jfcl, name), LINEAR, TWO, num_clusters=2, init_params=START)

    def found(attack, who):
        algorithm = make(adversary=Adversary(attack, who))
        return jfcl.rollout(algorithm, clients, key=jax.random.key(0), num_rounds=2)[0]

    honest = jfcl.rollout(make(), clients, key=jax.random.key(0), num_rounds=2)[0]
    nobody = found(attacks.gaussian(100.0), malicious & False)
    np.testing.assert_allclose(nobody.params["w"], honest.params["w"], rtol=1e-5, atol=1e-6)
    assert (nobody.cluster == honest.cluster).all()
    first = make(adversary=Adversary(attacks.gaussian(100.0), malicious)).init(jax.random.key(0), clients)
    assert not np.array_equal(first.cluster, make().init(jax.random.key(0), clients).cluster)
    assert np.isfinite(found(attacks.nan(), malicious).params["w"]).all()


@pytest.mark.slow_cases("one_shot")
@pytest.mark.parametrize("name", ["one_shot", "flhc"])  # FeSEM begins as one-shot
def test_a_client_without_a_finite_model_does_not_change_the_clustering(name):
    clients = regression()
    broken = jax.tree.map(np.copy, clients)
    broken.examples["x"][7] = np.nan
    absent = clients._replace(size=np.where(np.arange(8) == 7, 0, clients.size))
    init = jax.jit(getattr(jfcl, name)(LINEAR, TWO, num_clusters=3, init_params=START).init)
    got, wanted = init(jax.random.key(0), broken), init(jax.random.key(0), absent)
    np.testing.assert_array_equal(got.cluster, wanted.cluster)
    np.testing.assert_array_equal(got.params["w"], wanted.params["w"])


def test_costs_of_the_clustering_are_those_of_the_clients_with_examples():
    idle = Algorithm(None, lambda *_: (state, {"bytes_up": 0.0, "bytes_down": 0.0, "client_steps": 0.0}), LINEAR)
    clients = regression()._replace(size=np.int32([3, 0, 5, 0, 0, 6, 0, 0]))
    state = jfcl.local_only(LINEAR, TWO).init(jax.random.key(0), clients)
    for cohort, part in ((None, 3), (2, 2), (5, 3)):
        paying = with_first_costs(idle, TWO, messages=4, rounds=5, more_steps=7, cohort=cohort)
        metrics = paying.step(jax.random.key(0), state, clients)[1]
        paid = [float(metrics[name]) for name in ("bytes_up", "bytes_down", "client_steps")]
        np.testing.assert_allclose(paid, [part * 4 * D * 4, part * 4 * D * 4, part * 5 * (2 + 7)], rtol=1e-6)


@pytest.mark.slow
def test_restarts_pay_for_what_every_start_trains():
    clients = regression()
    one = jfcl.hypcluster(LINEAR, TWO, num_clusters=2, warm_rounds=5, init_params=START)
    best = jfcl.with_restarts(one, num_restarts=3, num_rounds=2)
    state = best.init(jax.random.key(0), clients)
    step = jax.jit(best.step)
    state, first = step(jax.random.key(1), state, clients)
    _, second = step(jax.random.key(2), state, clients)
    model = 8 * D * 4
    assert first["bytes_up"] == (3 * (5 + 2) + 1) * model and second["bytes_up"] == model
    assert first["client_steps"] == (3 * (5 + 2) + 1) * 8 * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one_shot", "fesem"])
def test_fewer_models_than_clusters_leave_clusters_empty(name):
    clients = regression()._replace(size=np.int32([4, 4, 0, 0, 0, 0, 0, 0]))
    algorithm = getattr(jfcl, name)(LINEAR, TWO, num_clusters=3, init_params=START)
    eager, compiled = (init(jax.random.key(0), clients) for init in (algorithm.init, jax.jit(algorithm.init)))
    np.testing.assert_array_equal(eager.cluster, compiled.cluster)
    assert len(set(eager.cluster.tolist()[:2])) == 2 and np.isfinite(eager.params["w"]).all()


@pytest.mark.slow
def test_the_local_rounds_of_one_shot_draw_other_examples():
    """Each example has a parameter of its own, which a step with it lowers by 1."""
    task = Task(lambda key: {"w": jnp.zeros(6)}, lambda p, x: p["w"][x], lambda outputs, batch: outputs)
    clients = Clients({"x": np.tile(np.arange(6, dtype=np.int32), (8, 1))}, np.full(8, 6, np.int32))
    training = jfcl.local_training(optax.sgd(1.0), num_steps=1, batch_size=1)
    algorithm = jfcl.one_shot(task, training, num_clusters=1, local_rounds=2)
    state = jax.jit(algorithm.init)(jax.random.key(0), clients)
    steps = np.round(-8 * np.asarray(state.params["w"][0]))  # with each example, of the 8 clients
    assert steps.sum() == 16 and (steps % 2 == 1).any()


def test_fesem_joins_the_nearest_model():
    clients = regression(6)
    algorithm = jfcl.fesem(LINEAR, TWO, num_clusters=2, init_params=START)
    state = jax.eval_shape(algorithm.init, jax.random.key(0), clients)  # which finds clusters by one-shot
    state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state)
    state = state._replace(params={"w": np.float32([[1.5, -0.9, 1.3], [0.3, 0.0, 1.6]])})
    for t in range(4):
        models, cluster = np.asarray(state.params["w"], np.float64), np.asarray(state.cluster)
        sent, losses = zip(*(trained(models[cluster[i]], clients, i, 2) for i in range(8)), strict=True)
        sent = np.stack(sent)
        nearest = np.linalg.norm(sent[:, None] - models[None], axis=2).argmin(axis=1)
        state, metrics = jax.device_get(jax.jit(algorithm.step)(jax.random.key(t), state, clients))
        np.testing.assert_allclose(metrics["loss"], losses, rtol=1e-4)
        assert state.cluster.tolist() == nearest.tolist()
        for k in range(2):
            members = np.flatnonzero(nearest == k)
            mean = np.average(sent[members], axis=0, weights=clients.size[members]) if len(members) else models[k]
            np.testing.assert_allclose(state.params["w"][k], mean, rtol=1e-4, atol=1e-5)
    assert metrics["bytes_up"] == 8 * D * 4


LABELLED, LABELS = classification()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: jfcl.ditto(LINEAR, TWO, lam=-0.1), "lam must be 0 or more, got -0.1"),
        (lambda: jfcl.ditto(LINEAR, TWO, lam=np.inf), "lam must be finite"),
        (lambda: jfcl.knn_per(LABELS, TWO, mixing=1.5), r"mixing must be in \[0, 1\], got 1.5"),
        (lambda: jfcl.knn_per(LABELS, TWO, num_neighbours=0), "num_neighbours must be an integer, at least 1"),
        (lambda: jfcl.knn_per(LABELS, TWO, scale=0.0), "scale must be positive"),
        (lambda: jfcl.knn_per(LABELS, TWO, validation=1.0), r"validation must be in \(0, 1\)"),
        (lambda: jfcl.knn_per(LINEAR, TWO), "task must be a classification"),
        (lambda: jfcl.hypcluster(LINEAR, TWO, num_clusters=2, warm_rounds=-1), "warm_rounds must be an integer"),
        (lambda: jfcl.one_shot(LINEAR, TWO, num_clusters=2, local_rounds=0), "local_rounds must be an integer"),
        (lambda: jfcl.one_shot(LINEAR, TWO, num_clusters=0), "num_clusters must be an integer"),
        (lambda: jfcl.flhc(LINEAR, TWO, num_clusters=2, linkage="singel"), "did you mean 'single'"),
        (lambda: jfcl.flhc(LINEAR, TWO, num_clusters=2, distance="cosinus"), "did you mean 'cosine'"),
        (
            lambda: jfcl.flhc(LINEAR, TWO, num_clusters=2, layers=lambda path: path == "head"),
            "layers holds for no parameter",
        ),
        (lambda: jfcl.fesem(LINEAR, TWO._replace(keep="everything"), num_clusters=2), "training.keep must be"),
    ],
)
def test_factories_refuse(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("algorithm", "clients", "words"),
    [
        (jfcl.one_shot(LINEAR, TWO, num_clusters=9), regression(), "num_clusters must be at most the 8 clients"),
        (jfcl.flhc(LINEAR, TWO, num_clusters=9), regression(), "num_clusters must be at most the 8 clients"),
        (jfcl.fesem(LINEAR, TWO, num_clusters=9), regression(), "num_clusters must be at most the 8 clients"),
        (jfcl.knn_per(LABELS, TWO, num_neighbours=12), LABELLED, "num_neighbours must be at most"),
    ],
)
def test_init_refuses(algorithm, clients, words):
    with pytest.raises(ValueError, match=words):
        algorithm.init(jax.random.key(0), clients)
