"""FLUX against a loop in float64, its degenerate case, newcomers without labels, and what it refuses."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from padded_clients import padded
from sklearn.cluster import DBSCAN, KMeans
from sklearn.metrics import adjusted_rand_score
from test_kernels_knee import knee_by_loop

import jfcl
from jfcl.core import Clients
from jfcl.testing import problem

F, CLASSES, N = 4, 3, 12
START = {"b": np.zeros(CLASSES, np.float32), "w": np.float32(np.random.default_rng(8).normal(size=(F, CLASSES)))}
TASK = jfcl.models.task(lambda _: START, lambda p, x: x @ p["w"] + p["b"][None], kind="classification")
TASK = TASK._replace(num_classes=CLASSES)
ONE = jfcl.local_training(optax.sgd(0.3), num_steps=1)


def clients_of(seed=0, n=N, m=30, k=3, by_label=False):
    """Clients of `k` clusters of unequal size: means of inputs, or of those of a label, that differ between them."""
    rng = np.random.default_rng(seed)
    size, of = rng.integers(20, m + 1, n).astype(np.int32), rng.integers(0, k, n)
    y = rng.integers(0, CLASSES, (n, m)).astype(np.int32)
    y[0, : size[0]] = np.r_[2, np.arange(size[0] - 1) % 2]  # a label that one example has, which has no deviation
    moves = np.random.default_rng(99).normal(size=(k, CLASSES if by_label else 1, F))
    x = 0.3 * rng.normal(size=(n, m, F)) + 2 * moves[of[:, None], y if by_label else 0]
    return Clients({"x": np.float32(x), "y": y}, size), of


def averaged(clients, w, b, members):
    """One round of FedAvg among some clients, each with one step of gradient descent."""
    total, new_w, new_b = sum(int(clients.size[i]) for i in members), 0.0, 0.0
    for i in members:
        s = int(clients.size[i])
        x, y = np.float64(clients.examples["x"][i, :s]), np.eye(CLASSES)[clients.examples["y"][i, :s]]
        z = x @ w + b
        gradient = (np.exp(z) / np.exp(z).sum(axis=1, keepdims=True) - y) / s
        new_w, new_b = (
            new_w + s / total * (w - 0.3 * x.T @ gradient),
            new_b + s / total * (b - 0.3 * gradient.sum(axis=0)),
        )
    return (new_w, new_b) if members else (w, b)


def described(clients, w, b, projection, labels):
    rows = []
    for i, s in enumerate(clients.size):
        z = (np.float64(clients.examples["x"][i, :s]) @ w + b) @ np.float64(projection)
        parts = [z] + [z[clients.examples["y"][i, :s] == c] for c in range(labels)]
        missing = [len(part) < 2 and at > 0 for at, part in enumerate(parts)]
        means, deviations = (
            [-1 + 0 * z[0] if no else f(part, axis=0) for no, part in zip(missing, parts, strict=True)]
            for f in (np.mean, np.std)
        )
        rows.append([means[0], deviations[0], *means[1:], *deviations[1:]])
    return np.array(rows)


@pytest.mark.slow_cases("auto-*", "3-True")
@pytest.mark.parametrize(("k", "by_label"), [(3, False), ("auto", True), ("auto", False), (3, True)])
def test_the_rounds_are_those_of_the_loop(k, by_label):
    clients, of = clients_of(1, by_label=by_label)
    newcomers, _ = clients_of(2, n=6)
    algorithm = jfcl.flux(
        TASK, ONE, num_clusters=k, by_label=by_label, rounds_before=2, cohort=7, init_params=START, client_axis=jax.vmap
    )
    more = padded(clients)
    state = jax.device_get(jax.jit(algorithm.init)(jax.random.key(0), more))
    w, b = np.float64(START["w"]), np.zeros(CLASSES)
    for _ in range(2):
        w, b = averaged(clients, w, b, range(N))
    np.testing.assert_allclose(state.memory.model["w"], w, atol=1e-5)
    projection = np.asarray(state.memory.projection)
    np.testing.assert_allclose(projection.T @ projection, np.eye(CLASSES), atol=1e-5)

    moments = described(clients, w, b, projection, CLASSES if by_label else 0)
    least, most = moments.min(axis=(0, 2)), moments.max(axis=(0, 2))
    points = ((moments - least[:, None]) / (most - least)[:, None]).reshape(N, -1)
    if k == "auto":
        distances = np.linalg.norm(points[:, None] - points[None], axis=2) + np.diag(np.full(N, np.inf))
        radius = knee_by_loop(distances.min(axis=1))
        wanted = DBSCAN(eps=radius * (1 + 1e-6), min_samples=2).fit_predict(points)
        wanted[wanted < 0] = 100 + np.flatnonzero(wanted < 0)
    else:
        wanted = KMeans(3, n_init=10, random_state=0).fit_predict(points)
        assert adjusted_rand_score(of, wanted) == 1, "the problem is no test"
        assert state.memory.radius == 0
    cluster = np.asarray(state.cluster[:N])
    assert adjusted_rand_score(wanted, cluster) == 1
    centers = np.stack([points[cluster == c, : 2 * CLASSES].mean(axis=0) for c in range(cluster.max() + 1)])
    np.testing.assert_allclose(state.memory.centers[: len(centers)], centers, atol=1e-5)

    # Newcomers have no labels.
    part = described(newcomers, w, b, projection, 0)
    part = ((part - least[:2, None]) / (most - least)[:2, None]).reshape(6, -1)
    to = np.linalg.norm(part[:, None] - centers[None], axis=2).argmin(axis=1)
    nameless = newcomers._replace(examples={"x": newcomers.examples["x"]})
    np.testing.assert_array_equal(jax.jit(algorithm.adopt)(state, nameless).to, to)

    # A round with a cohort.
    after, metrics = jax.device_get(jax.jit(algorithm.step)(jax.random.key(1), state, more))
    present = np.isfinite(np.asarray(metrics["loss"]))[:N]
    assert present.sum() == 7
    for c in range(len(centers)):
        wanted_w, wanted_b = averaged(clients, w, b, np.flatnonzero(present & (cluster == c)).tolist())
        np.testing.assert_allclose(after.params["w"][c], wanted_w, atol=1e-5)
        np.testing.assert_allclose(after.params["b"][c], wanted_b, atol=1e-5)
    model, moment = 4 * CLASSES * (F + 1), 4 * moments[0].size
    np.testing.assert_allclose(metrics["bytes_up"], 7 * model + N * (2 * model + moment))
    np.testing.assert_allclose(metrics["bytes_down"], 7 * model + N * 2 * model)
    assert metrics["clusters_found"] == len(centers)
    if k == "auto":
        np.testing.assert_allclose(metrics["radius"], radius, rtol=1e-5)


def test_the_radius_is_that_of_the_loop_where_clusters_are_narrow():
    rng = np.random.default_rng(0)
    moves = 2 * rng.normal(size=(3, 1, F))[np.arange(N) % 3]
    x = np.float32(rng.normal(size=(1, 30, F)) + moves + 1e-3 * rng.normal(size=(N, 30, F)))
    clients = Clients({"x": x, "y": np.zeros((N, 30), np.int32)}, np.full(N, 30, np.int32))
    algorithm = jfcl.flux(TASK, ONE, num_clusters="auto", by_label=False, rounds_before=1, init_params=START)
    state = jax.device_get(jax.jit(algorithm.init)(jax.random.key(0), clients))
    model, projection = state.memory.model, state.memory.projection
    moments = described(clients, np.float64(model["w"]), np.float64(model["b"]), projection, 0)
    least, most = moments.min(axis=(0, 2)), moments.max(axis=(0, 2))
    points = ((moments - least[:, None]) / (most - least)[:, None]).reshape(N, -1)
    distances = np.linalg.norm(points[:, None] - points[None], axis=2) + np.diag(np.full(N, np.inf))
    np.testing.assert_allclose(state.memory.radius, knee_by_loop(distances.min(axis=1)), rtol=5e-3)


@pytest.mark.slow
def test_one_cluster_is_fedavg():
    clients, key = clients_of(1)[0], jax.random.key(4)
    one = jfcl.flux(TASK, ONE, num_clusters=1, rounds_before=2, init_params=START)
    state, _ = jfcl.rollout(one, clients, key=key, num_rounds=3)
    wanted, _ = jfcl.rollout(jfcl.fedavg(TASK, ONE, init_params=START), clients, key=key, num_rounds=5)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), state.params, wanted.params)


@pytest.mark.slow
@pytest.mark.parametrize("most", [2, 5, 15])
def test_there_are_never_more_clusters_than_models(most):
    clients, _ = clients_of(3)
    algorithm = jfcl.flux(TASK, ONE, num_clusters="auto", most_clusters=most, radius_scale=0.0, rounds_before=1)
    state = algorithm.init(jax.random.key(0), clients)
    assert len(np.unique(state.cluster)) == min(most, N), "nothing is joined at distance 0 until there are too many"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_clusters": 13}, "num_clusters must be at most the 12 clients there are"),
        ({"num_clusters": 2, "rounds_before": 0}, "rounds_before must be"),
        ({"num_clusters": "some"}, "num_clusters must be"),
        ({"num_clusters": 2, "labels": (N, 30, 1)}, "an integer for each example: by_label"),
    ],
)
def test_what_has_no_meaning_is_refused(options, words):
    clients, _ = clients_of()
    shape = options.pop("labels", (N, 30))
    clients = clients._replace(examples=clients.examples | {"y": clients.examples["y"].reshape(shape)})
    with pytest.raises(ValueError, match=words):
        algorithm = jfcl.flux(TASK, ONE, **options)
        jax.eval_shape(algorithm.init, jax.random.key(0), jax.tree.map(jnp.asarray, clients))


def test_a_task_without_classes_has_no_labels():
    _, _, task, training = problem()
    with pytest.raises(ValueError, match="by_label must be False for a task without"):
        jfcl.flux(task, training, num_clusters=2)


def test_features_are_one_array():
    several = TASK._replace(
        apply=lambda params, x: {"logits": TASK.apply(params, x)},
        cost=lambda outputs, batch: TASK.cost(outputs["logits"], batch),
    )
    algorithm = jfcl.flux(several, ONE, num_clusters=2)
    with pytest.raises(ValueError, match="task must be one with represent, the features of inputs, got"):
        jax.eval_shape(algorithm.init, jax.random.key(0), jax.tree.map(jnp.asarray, clients_of()[0]))
