"""PACFL against a loop in float64, its degenerate cases, newcomers, and what it refuses."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.cluster.hierarchy
from padded_clients import padded
from scipy.spatial.distance import squareform
from sklearn.metrics import adjusted_rand_score

import jfcl
from jfcl.core import Clients
from jfcl.testing import check_algorithm, problem

F, CLASSES = 9, 3
TASK = jfcl.models.classification(jfcl.models.Linear(CLASSES), (F,), CLASSES)
TWO = jfcl.local_training(optax.sgd(0.1), num_steps=2)


def clients_of(seed=0, n=10, m=14, k=2):
    """Clients of `k` subspaces of inputs; client `i` is of subspace `i % k`."""
    rng = np.random.default_rng(seed)
    spans = rng.normal(size=(k, 3, F))
    size = rng.integers(8, m + 1, n).astype(np.int32)
    x = np.einsum("nmr,nrd->nmd", rng.normal(size=(n, m, 3)), spans[np.arange(n) % k])
    x += 0.05 * rng.normal(size=x.shape)
    return Clients({"x": x.astype(np.float32), "y": rng.integers(0, CLASSES, (n, m)).astype(np.int32)}, size)


def angles_of(clients, p, by_label):
    """The paper's matrix, with lines for vectors."""
    bases = []
    for i, s in enumerate(clients.size):
        x, y = np.float64(clients.examples["x"][i, :s]), clients.examples["y"][i, :s]
        groups = [x[y == c] for c in range(CLASSES) if (y == c).any()] if by_label else [x]
        bases.append(np.concatenate([np.linalg.svd(group.T, full_matrices=False)[0][:, :p].T for group in groups]))
    n = len(bases)
    angles = np.zeros((n, n))
    for i in range(n):
        for j in range(i):
            cosines = np.abs(bases[i] @ bases[j].T).max()
            angles[i, j] = angles[j, i] = np.rad2deg(np.arccos(min(cosines, 1)))
    return angles, [len(b) for b in bases]


def clusters_by_loop(angles, threshold):
    """Merges the closest two while they are close enough; the row of a merged cluster is the mean of the two rows."""
    members, a = [[i] for i in range(len(angles))], angles + np.diag(np.full(len(angles), np.inf))
    while len(members) > 1 and a.min() <= threshold:
        i, j = sorted(np.unravel_index(a.argmin(), a.shape))
        row = np.delete((a[i] + a[j]) / 2, j)
        row[i] = np.inf
        a = np.delete(np.delete(a, j, 0), j, 1)
        a[i] = a[:, i] = row
        members[i] += members.pop(j)
    cluster = np.zeros(len(angles), int)
    for c, some in enumerate(members):
        cluster[some] = c
    return cluster


@pytest.mark.slow_cases("False-*", "True-2-1-*", "True-2-2-*", "*-many clusters")
@pytest.mark.parametrize("cut", [slice(4, 6), slice(-2, None)], ids=["many clusters", "few clusters"])
@pytest.mark.parametrize(
    ("by_label", "p", "seed"), [(*which, seed) for which in ((True, 2), (False, 3)) for seed in range(3)]
)
def test_the_clusters_are_the_papers(by_label, p, seed, cut):
    clients = clients_of(seed)
    angles, counts = angles_of(clients, p, by_label)
    heights = np.sort(scipy.cluster.hierarchy.linkage(squareform(angles), "weighted")[:, 2])
    threshold = heights[cut].mean()
    options = {"num_clusters": 10, "angle_threshold": float(threshold), "num_vectors": p, "by_label": by_label}
    algorithm = jfcl.pacfl(TASK, TWO, **options)
    more = padded(clients)

    @jax.jit
    def init(threshold, clients):
        return jfcl.pacfl(TASK, TWO, **options | {"angle_threshold": threshold}).init(jax.random.key(0), clients)

    state = init(np.float32(threshold), more)
    # Clients without examples are in the first cluster, also where nothing merges.
    alone = init(np.float32(-1), more._replace(size=np.where(np.isin(np.arange(12), [3, 5, 7]), 0, more.size)))
    assert alone.cluster.tolist() == [0, 1, 2, 0, 3, 0, 4, 0, 5, 6, 0, 0]
    wanted, found = clusters_by_loop(angles, threshold), np.asarray(state.cluster)[:10]
    assert adjusted_rand_score(found, wanted) == 1
    # As newcomers, they join the cluster with the smallest mean angle.
    means = [angles[:, found == c].mean(axis=1) for c in range(wanted.max() + 1)]
    np.testing.assert_array_equal(jax.jit(algorithm.adopt)(state, more).to[:10], np.argmin(means, axis=0))
    _, metrics = jax.jit(algorithm.step)(jax.random.key(1), state, more)
    same = wanted[:, None] == wanted[None, :]
    apart = ~np.eye(10, dtype=bool)
    np.testing.assert_allclose(metrics["angle_between"], angles[~same].mean(), atol=1e-2)
    np.testing.assert_allclose(metrics["angle_within"], angles[same & apart].mean(), atol=0.1)
    assert metrics["clusters_found"] == wanted.max() + 1
    model = 4 * (F * CLASSES + CLASSES)
    np.testing.assert_allclose(metrics["bytes_up"], 10 * model + 4 * F * sum(counts))
    assert metrics["bytes_down"] == 10 * model


@pytest.mark.slow
@pytest.mark.parametrize("measure", ["absolute", "smallest", "sum"])
def test_each_measure_finds_separate_subspaces(measure):
    clients = clients_of(5, k=3)
    algorithm = jfcl.pacfl(TASK, TWO, num_clusters=3, measure=measure, by_label=False, num_vectors=2)
    state = jax.jit(algorithm.init)(jax.random.key(0), clients)
    assert adjusted_rand_score(state.cluster, np.arange(10) % 3) == 1


@pytest.mark.slow
def test_one_cluster_is_fedavg_and_as_many_as_clients_are_local_training():
    clients, key = clients_of(1), jax.random.key(4)
    start = {"init_params": jax.tree.map(np.asarray, TASK.init(jax.random.key(9)))}

    def models(algorithm):
        state, _ = jfcl.rollout(algorithm, clients, key=key, num_rounds=3)
        return jax.tree.map(lambda p: p[state.cluster], state.params)

    def same(a, b):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7), a, b)

    whole = jfcl.pacfl(TASK, TWO, num_clusters=10, angle_threshold=180.0, cohort=4, **start)
    same(models(whole), models(jfcl.fedavg(TASK, TWO, cohort=4, **start)))
    alone = jfcl.pacfl(TASK, TWO, num_clusters=10, angle_threshold=-1.0, **start)
    same(models(alone), models(jfcl.local_only(TASK, TWO, **start)))


@pytest.mark.slow
@pytest.mark.parametrize("personal", [None, lambda path: path.endswith("bias")])
def test_newcomers_join_the_cluster_with_the_smallest_mean_angle(personal):
    clients, newcomers = clients_of(2, n=10), clients_of(2, n=6, m=11)
    algorithm = jfcl.pacfl(TASK, TWO, num_clusters=2, by_label=False, personal=personal)
    history = jfcl.simulate(
        algorithm, clients, key=jax.random.key(0), num_rounds=1, test_clients=clients, newcomers=newcomers
    )
    state = history.state
    to = np.asarray(jax.jit(algorithm.adopt)(state, newcomers).to)
    new = np.concatenate([newcomers.examples["x"], np.zeros((6, 3, F), np.float32)], axis=1)
    joint = Clients(
        {"x": np.concatenate([clients.examples["x"], new]), "y": np.zeros((16, 14), int)},
        np.concatenate([clients.size, newcomers.size]),
    )
    angles, _ = angles_of(joint, 3, False)
    means = np.stack([angles[10:, :10][:, np.asarray(state.cluster) == c].mean(axis=1) for c in range(2)], axis=1)
    np.testing.assert_array_equal(to, means.argmin(axis=1))
    assert np.isfinite(history.records[-1]["newcomer_loss"])


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        (lambda c: c | {"x": c["x"].astype(np.int32)}, {}, "as images / 255 are: between words there is no angle"),
        (lambda c: c | {"x": {"a": c["x"]}}, {}, "must be of a floating-point type, .* got <class 'dict'>"),
        (lambda c: c | {"y": c["y"][..., None]}, {}, "an integer for each example: by_label"),
        (lambda c: c, {"num_clusters": 11}, "num_clusters must be at most the 10 clients there are"),
        (lambda c: c, {"measure": "largest"}, "unknown measure"),
        (lambda c: c, {"angle_threshold": float("nan")}, "angle_threshold must be"),
    ],
)
def test_what_has_no_meaning_is_refused(change, options, words):
    clients = clients_of()
    clients = clients._replace(examples=change(clients.examples))
    with pytest.raises(ValueError, match=words):
        algorithm = jfcl.pacfl(TASK, TWO, **{"num_clusters": 2} | options)
        jax.eval_shape(algorithm.init, jax.random.key(0), jax.tree.map(jnp.asarray, clients))


def test_a_task_without_classes_has_no_labels():
    _, _, task, training = problem()
    with pytest.raises(ValueError, match="by_label must be False for a task without"):
        jfcl.pacfl(task, training, num_clusters=2)


@pytest.mark.slow
def test_it_conforms_without_labels():
    check_algorithm(partial(jfcl.pacfl, num_clusters=2, by_label=False, num_vectors=2), examples_tolerance=1e-3)
