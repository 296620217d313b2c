"""FedGWC against a loop in float64, its degenerate cases, absentees, and what it refuses."""

from functools import partial

import jax
import numpy as np
import optax
import pytest
from padded_clients import padded
from sklearn.cluster import SpectralClustering
from sklearn.manifold import SpectralEmbedding
from sklearn.metrics import adjusted_rand_score, davies_bouldin_score

import jfcl
from jfcl.core import Clients

F, N, COHORT, STEPS = 3, 12, 4, 2
TASK = jfcl.models.task(
    lambda key: {"w": jax.random.normal(key, (F,))}, lambda p, x: (x * p["w"][None]).sum(axis=1), kind="regression"
)
TRAINING = jfcl.local_training(optax.sgd(0.05), num_steps=STEPS)
FACTOR = float(TASK.cost(np.float32([3.0]), {"y": np.float32([0.0])})[0]) / 9  # of a squared error


def clients_of(seed=0, n=N, m=14):
    """Clients of one linear regression; the targets of every second one have noise, so that its losses are larger."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, m, F)).astype(np.float32)
    y = x @ np.array([2.0, -1.0, 0.5]) + (np.arange(n) % 2 * 3.0)[:, None] * rng.choice([-1, 1], size=(n, m))
    return Clients({"x": x, "y": np.float32(y)}, rng.integers(8, m + 1, n).astype(np.int32))


def trained(clients, i, w):
    """Returns the losses before each step, and the model after them."""
    s, losses = int(clients.size[i]), []
    x, y = np.float64(clients.examples["x"][i, :s]), np.float64(clients.examples["y"][i, :s])
    for _ in range(STEPS):
        losses.append(FACTOR * np.mean((x @ w - y) ** 2))
        w = w - 0.05 * 2 * FACTOR * x.T @ (x @ w - y) / s
    return losses, w


def parts_of(rewards, limit, scale):
    """Returns the labels of the best division of a cluster with these rewards, or None."""
    n = len(rewards)
    seen = (rewards - rewards.min()) / (rewards.max() - rewards.min())
    affinity = np.zeros((n, n))
    for i in range(n):
        for j in set(range(n)) - {i}:
            rest = [k for k in range(n) if k not in (i, j)]
            affinity[i, j] = np.exp(-scale * ((seen[i, rest] - seen[j, rest]) ** 2).sum())
    best, found = 1.0, None
    for count in range(2, min(limit, 4) + 1):
        options = {"affinity": "precomputed", "random_state": 0}
        points = SpectralEmbedding(count, **options).fit_transform(affinity)
        labels = SpectralClustering(count, n_components=count, assign_labels="cluster_qr", **options).fit_predict(
            affinity
        )
        if (measure := davies_bouldin_score(points, labels)) < best:
            best, found = measure, labels
    return found


@pytest.mark.parametrize("compare", ["own", pytest.param("others", marks=pytest.mark.slow)])
def test_the_rounds_are_those_of_the_loop(compare):
    clients, tolerance, k = clients_of(0), 0.02, 4
    make = partial(jfcl.fedgwc, TASK, TRAINING, tolerance=tolerance, max_clusters=k, compare=compare)
    algorithm, more = make(cohort=COHORT, client_axis=jax.vmap), padded(clients)
    step, state = jax.jit(algorithm.step), jax.jit(algorithm.init)(jax.random.key(1), more)
    models = np.float64(state.params["w"])
    np.testing.assert_array_equal(models, np.broadcast_to(models[0], models.shape))
    rewards, cluster = np.zeros((N, N)), np.zeros(N, int)
    change, calm, made, divided = np.ones(k), np.zeros(k, int), 1, 0
    for t in range(28):
        state, metrics = jax.device_get(step(jax.random.key(10 + t), state, more))
        present = np.flatnonzero(np.isfinite(np.asarray(metrics["loss"]))[:N])
        assert len(present) == COHORT
        new, of_round, of_training = np.copy(models), cluster.copy(), np.full(N, np.nan)
        for c in range(made):
            here = [i for i in present if of_round[i] == c]
            if not here:
                continue
            weight = np.float64(clients.size[here]) / sum(clients.size[here])
            losses, after = (np.array(a) for a in zip(*(trained(clients, i, models[c]) for i in here), strict=True))
            new[c], of_training[here] = weight @ after, losses.mean(axis=1)
            if len(here) < 2:
                continue
            mean = weight @ losses
            reward = np.exp(-0.5 * (losses - mean) ** 2 / (weight @ (losses - mean) ** 2)).mean(axis=1)
            share = len(here) / (of_round == c).sum()
            step_of = share * (reward[:, None] - rewards[np.ix_(here, here)])
            rewards[np.ix_(here, here)] += step_of
            change[c] += share * ((step_of**2).mean() - change[c])
            calm[c] = calm[c] + 1 if change[c] < tolerance else 0
        models, begun = new, made
        np.testing.assert_allclose(metrics["loss"][:N], of_training, rtol=1e-4)
        np.testing.assert_allclose(metrics["changes"][:made], change[:made], atol=1e-5)
        for c in range(begun):
            members = np.flatnonzero(of_round == c)
            limit = min(len(members) // COHORT, 1 + k - made)
            if calm[c] >= N / COHORT and len(members) >= 2 * COHORT:
                labels = parts_of(
                    rewards[np.ix_(members, members)].T if compare == "others" else rewards[np.ix_(members, members)],
                    limit,
                    4.0,
                )
                change[c], calm[c] = 1, 0
                if labels is not None:
                    numbers = list(dict.fromkeys(labels))
                    rows = [c, *range(made, made + len(numbers) - 1)]
                    for i, label in zip(members, labels, strict=True):
                        cluster[i] = rows[numbers.index(label)]
                    models[rows], change[rows], calm[rows] = models[c], 1, 0
                    made, divided = rows[-1] + 1, divided + 1
        np.testing.assert_allclose(state.memory.rewards[:N, :N], rewards, atol=2e-5)
        np.testing.assert_array_equal(state.cluster[:N], cluster)
        np.testing.assert_allclose(state.params["w"][:made], models[:made], atol=1e-5)
        assert metrics["clusters_found"] == made
        assert metrics["bytes_up"] == 4 * (F + STEPS) * COHORT and metrics["bytes_down"] == 4 * F * COHORT
        assert algorithm.serve(state, None).active.tolist() == [c < made for c in range(k)]
    assert divided, "a cluster was divided on the way"


def test_a_client_that_sends_nan_gets_no_reward():
    nan = jfcl.Adversary(jfcl.attacks.nan(), np.arange(N) == 3)
    algorithm = jfcl.fedgwc(TASK, TRAINING, max_clusters=2, adversary=nan, client_axis=jax.vmap)
    state = algorithm.init(jax.random.key(1), clients_of())
    rewards = np.asarray(jax.jit(algorithm.step)(jax.random.key(2), state, clients_of())[0].memory.rewards)
    assert not rewards[3].any() and not rewards[:, 3].any()
    others = np.arange(N) != 3
    assert (rewards[others][:, others] > 0).all()


def recovered(clients, algorithm, truth, num_rounds):
    """Returns the adjusted Rand index after the round in which the first cluster is divided; None if none is."""
    state, step = jax.jit(algorithm.init)(jax.random.key(0), clients), jax.jit(algorithm.step)
    for t in range(num_rounds):
        state, metrics = step(jax.random.key(t), state, clients)
        if metrics["clusters_found"] > 1:
            return adjusted_rand_score(truth, state.cluster)


@pytest.mark.slow
def test_clients_with_larger_losses_are_found():
    clients = clients_of(1, n=24)
    algorithm = jfcl.fedgwc(TASK, TRAINING, cohort=6, client_axis=jax.vmap)
    assert recovered(clients, algorithm, np.arange(24) % 2, 200) > 0.6


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"max_clusters": 1, "cohort": 4}, {"tolerance": np.inf}])
def test_without_models_or_a_cohort_it_is_fedavg(options):
    clients, key = clients_of(1), jax.random.key(4)
    state, _ = jfcl.rollout(jfcl.fedgwc(TASK, TRAINING, **options), clients, key=key, num_rounds=9)
    fedavg = jfcl.fedavg(TASK, TRAINING, cohort=options.get("cohort"))
    wanted, _ = jfcl.rollout(fedavg, clients, key=key, num_rounds=9)
    assert not state.cluster.any()
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), state.params["w"][0], wanted.params["w"][0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"training": jfcl.local_training(optax.sgd(0.1), num_epochs=1)}, "give num_steps"),
        ({"cohort": 1}, "cohort must be at least 2"),
        ({"compare": "all"}, "unknown compare"),
    ],
)
def test_what_has_no_meaning_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        jfcl.fedgwc(TASK, **({"training": TRAINING} | options))


def test_all_models_start_as_one():
    algorithm = jfcl.fedgwc(TASK, TRAINING, cohort=COHORT, max_clusters=2, init_params={"w": np.ones((2, F))})
    with pytest.raises(ValueError, match=r"init_params\['w'\] must have shape \(1, 3\) or \(3,\), got \(2, 3\)"):
        jax.eval_shape(algorithm.init, jax.random.key(0), clients_of())
