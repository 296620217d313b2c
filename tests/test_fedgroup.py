"""FedGroup and FlexCFL against a loop in float64, their degenerate case, newcomers, and what they refuse."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.cluster.hierarchy
from compiled import rollout
from linear_clients import descend, linear, linear_clients, trained
from padded_clients import padded
from scipy.spatial.distance import squareform
from sklearn.cluster import AgglomerativeClustering, KMeans
from sklearn.metrics import adjusted_rand_score, silhouette_score

import jfcl
from jfcl.core import Clients, random_order
from jfcl.core.clients import client_ids
from jfcl.kernels import profile_distances
from jfcl.methods.assigned import UNSEEN
from jfcl.methods.round import select_cohort
from jfcl.testing import check_algorithm, problem

D, STEPS = 4, 5
LINEAR = linear(D)
TWO = jfcl.local_training(optax.sgd(0.1), num_steps=2)
START = {"w": np.float32([0.5, -0.5, 1.0, 0.2])}
TRUTH = np.array([[3.0, 0, -1, 1], [-3.0, 1, 1, 0], [0, 4, 2, -4]])


def regression(seed, n=12):
    return linear_clients(TRUTH, seed, n, m=20, least=10)


def cosine(a, b):
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


def embedding(updates, k):
    principal = np.linalg.svd(updates.T)[0][:, :k].T
    return np.array([[cosine(u, v) for v in principal] for u in updates])


def grouped(updates, k, measure):
    """The groups of the pretrained clients."""
    if measure == "edc":
        return KMeans(k, n_init=20, random_state=0).fit_predict(embedding(updates, k))
    madc = profiles(updates)
    tree = scipy.cluster.hierarchy.linkage(squareform(madc), "complete")
    return scipy.cluster.hierarchy.fcluster(tree, k, "maxclust") - 1


def profiles(updates):
    """The mean differences of cosines."""
    similar = np.array([[cosine(u, v) for v in updates] for u in updates])
    n = len(updates)
    madc = np.zeros((n, n))
    for i in range(n):
        for j in range(i):
            rest = [z for z in range(n) if z not in (i, j)]
            madc[i, j] = madc[j, i] = np.abs(similar[i, rest] - similar[j, rest]).mean()
    return madc


@pytest.mark.slow_cases("edc-0.0-6")
@pytest.mark.parametrize(("measure", "mixing", "cohort"), [("edc", 0.0, 6), ("madc", 0.0, None), ("edc", 0.3, 2)])
def test_the_groups_and_rounds_are_the_papers(measure, mixing, cohort):
    options = {"num_clusters": 3, "pretrain_steps": STEPS, "pretrain_clients": 7, "measure": measure}
    options |= {"mixing": mixing, "cohort": cohort, "init_params": START}
    algorithm = jfcl.fedgroup(LINEAR, TWO, **options)
    init, step = jax.jit(algorithm.init), jax.jit(algorithm.step)
    of_cohort = jax.jit(lambda key, clients: client_ids(select_cohort(key, clients, cohort).clients))
    for seed in range(2):
        clients = regression(seed)
        more = padded(clients)
        key = jax.random.key(seed)
        state = init(key, more)

        # The groups of seven clients.
        first = jax.jit(random_order)(jax.random.split(key, 4)[0], more)[:7].tolist()
        start = START["w"].astype(np.float64)
        update = {i: descend(start, clients, i, STEPS) - start for i in range(12)}
        labels = grouped(np.array([update[i] for i in first]), 3, measure)
        ours = np.asarray(state.cluster)
        name = {labels[j]: int(ours[i]) for j, i in enumerate(first)}  # of a group in the loop: its number here
        assert [name[label] for label in labels] == ours[first].tolist() and len(set(name.values())) == 3
        group = {i: name[label] for i, label in zip(first, labels, strict=True)}
        direction = np.array([np.mean([update[i] for i in first if group[i] == g], axis=0) for g in range(3)])
        models = start + direction
        np.testing.assert_allclose(state.params["w"], models, rtol=1e-5, atol=1e-5)

        for t in range(3):
            round_key = jax.random.fold_in(key, t)
            rows = [i for i in of_cohort(round_key, more).tolist() if i < 12]
            cold = [i for i in rows if i not in group]
            for i in cold:
                group[i] = int(np.argmax([cosine(update[i], d) for d in direction]))
            new, after = models.copy(), {i: trained(models[group[i]], clients, i, 2) for i in rows}
            for g in {group[i] for i in rows}:
                members = [i for i in rows if group[i] == g]
                new[g] = np.average([after[i][0] for i in members], axis=0, weights=clients.size[members])
            if mixing:
                norms, mixed = np.linalg.norm(new, axis=1), new.copy()
                for g in range(3):  # also those without clients in the cohort
                    others = [h for h in range(3) if h != g]
                    total = new[g] + mixing * sum((new[h] / norms[h] for h in others), np.zeros(D))
                    mixed[g] = total / (1 + mixing * sum(1 / norms[h] for h in others))
                new = mixed
            models = new
            state, metrics = jax.device_get(step(round_key, state, more))
            np.testing.assert_allclose(state.params["w"], models, rtol=1e-5, atol=2e-5)
            np.testing.assert_allclose(metrics["loss"][rows], [after[i][1] for i in rows], rtol=1e-4)
            assert [int(state.cluster[i]) for i in group] == list(group.values())
            assert metrics["cold_starts"] == len(cold)
            model, pretrained = 4 * D, 7 if t == 0 else 0
            sent = model * (len(rows) + len(cold) + pretrained)
            np.testing.assert_allclose([metrics["bytes_up"], metrics["bytes_down"]], sent, rtol=1e-6)
            steps = 2 * len(rows) + STEPS * (len(cold) + pretrained)
            np.testing.assert_allclose(metrics["client_steps"], steps, rtol=1e-6)
        seen = np.asarray(state.unchanged) != UNSEEN
        assert seen[:12].tolist() == [i in group for i in range(12)]


def test_one_client_with_large_updates_does_not_hide_the_groups_of_the_others():
    clients, start = regression(0), START["w"].astype(np.float64)
    y = np.asarray(clients.examples["y"]).copy()
    y[3] *= 1e4
    clients = clients._replace(examples={**clients.examples, "y": y})
    algorithm = jfcl.fedgroup(LINEAR, TWO, num_clusters=3, pretrain_steps=STEPS, init_params=START)
    ours = np.asarray(jax.jit(algorithm.init)(jax.random.key(0), clients).cluster)
    updates = np.array([descend(start, clients, i, STEPS) - start for i in range(12)])
    assert adjusted_rand_score(grouped(updates, 3, "edc"), ours) == 1


@pytest.mark.slow
@pytest.mark.parametrize("measure", ["edc", "madc"])
def test_the_number_of_groups_is_that_of_the_largest_silhouette(measure):
    clients, start = regression(0), START["w"].astype(np.float64)
    options = {"pretrain_steps": STEPS, "measure": measure, "most_clusters": 4, "init_params": START}
    algorithm = jfcl.fedgroup(LINEAR, TWO, num_clusters="auto", **options)
    state = jax.jit(algorithm.init)(jax.random.key(0), clients)
    _, metrics = jax.jit(algorithm.step)(jax.random.key(1), state, clients)
    updates = np.array([descend(start, clients, i, STEPS) - start for i in range(12)])
    if measure == "edc":
        points, how = embedding(updates, 4), {"linkage": "ward"}
        distances = np.linalg.norm(points[:, None] - points[None], axis=2)
    else:
        points = distances = profiles(updates)
        how = {"linkage": "complete", "metric": "precomputed"}
    cuts = [AgglomerativeClustering(k, **how).fit_predict(points) for k in (2, 3, 4)]
    scores = [silhouette_score(distances, cut, metric="precomputed") for cut in cuts]
    np.testing.assert_allclose(metrics["silhouettes"], [np.nan, np.nan, *scores], rtol=1e-3)
    best = 0
    for i, score in enumerate(scores):
        best = i if score > 1.1 * scores[best] else best
    assert metrics["clusters_found"] == best + 2 == {"edc": 3, "madc": 2}[measure]
    assert adjusted_rand_score(state.cluster, cuts[best]) == 1


@pytest.mark.slow
def test_one_group_is_fedavg_from_the_mean_of_the_pretrained_models():
    clients, key = regression(3), jax.random.key(1)
    algorithm = jfcl.fedgroup(LINEAR, TWO, num_clusters=1, pretrain_steps=STEPS, init_params=START)
    start = np.mean([descend(START["w"].astype(np.float64), clients, i, STEPS) for i in range(12)], axis=0)
    ours = rollout(algorithm, clients, key=key, num_rounds=3)[0].params["w"]
    fedavg = jfcl.fedavg(LINEAR, TWO, init_params={"w": np.float32(start)})
    theirs = rollout(fedavg, clients, key=key, num_rounds=3)[0].params["w"]
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_profiles_are_compared_without_the_two():
    rng = np.random.default_rng(0)
    a = rng.normal(size=(6, 6))
    a = np.float32(a + a.T)
    a[5] = a[:, 5] = np.nan
    mask = np.arange(6) < 5
    ours = profile_distances(a, mask=mask)
    for i in range(6):
        for j in range(6):
            rest = [z for z in range(5) if z not in (i, j)]
            wanted = np.abs(a[i, rest] - a[j, rest]).mean() if i != j and max(i, j) < 5 else 0
            np.testing.assert_allclose(ours[i, j], wanted, rtol=1e-5, atol=1e-6)
    assert not np.asarray(profile_distances(a[:2, :2])).any()


@pytest.mark.slow
def test_newcomers_start_cold():
    clients, newcomers = regression(4), regression(5, n=6)
    algorithm = jfcl.fedgroup(LINEAR, TWO, num_clusters=3, pretrain_steps=STEPS, init_params=START)
    history = jfcl.simulate(
        algorithm, clients, key=jax.random.key(0), num_rounds=2, test_clients=clients, newcomers=newcomers
    )
    start = START["w"].astype(np.float64)
    directions = np.asarray(history.state.memory.directions, np.float64)
    updates = [descend(start, newcomers, i, STEPS) - start for i in range(6)]
    wanted = [int(np.argmax([cosine(u, d) for d in directions])) for u in updates]
    assert np.asarray(algorithm.adopt(history.state, newcomers).to).tolist() == wanted
    assert np.isfinite(history.records[-1]["newcomer_loss"]) and history.init_rounds == 1


@pytest.mark.slow
def test_shared_parameters_are_those_of_all_groups():
    made = problem()
    options = {
        "num_clusters": 2,
        "pretrain_steps": STEPS,
        "shared": lambda path: path == "b",
        "mixing": 0.5,
        "cohort": 3,
    }
    algorithm = jfcl.fedgroup(made.task, made.training, **options)
    state, step = jax.jit(algorithm.init)(jax.random.key(0), made.clients), jax.jit(algorithm.step)
    for t in range(3):
        shared, own = state.params["b"], state.params["w"]
        assert shared[0] == shared[1] != 0 and (own[0] != own[1]).any()
        state, _ = step(jax.random.key(t), state, made.clients)


@pytest.mark.slow
def test_a_client_without_a_finite_update_starts_cold_again():
    clients = regression(4, n=6)
    clients.examples["x"][4] = 1e30
    algorithm = jfcl.fedgroup(LINEAR, TWO, num_clusters=2, pretrain_steps=STEPS, init_params=START)
    state, metrics = rollout(algorithm, clients, key=jax.random.key(0), num_rounds=3)
    assert metrics["cold_starts"].tolist() == [1, 1, 1]
    assert np.flatnonzero(state.unchanged == UNSEEN).tolist() == [4]
    assert np.isfinite(state.params["w"]).all()


@pytest.mark.slow
@pytest.mark.parametrize("measure", ["edc", "madc"])
def test_without_directions_a_client_starts_cold_once(measure):
    clients = regression(4, n=6)
    clients.examples["y"][:] = 0
    options = {"num_clusters": 2, "pretrain_clients": 3, "measure": measure, "init_params": {"w": np.zeros(D)}}
    _, metrics = rollout(jfcl.fedgroup(LINEAR, TWO, **options), clients, key=jax.random.key(0), num_rounds=2)
    assert metrics["cold_starts"].tolist() == [3, 0]


def labelled(labels, seed=0, m=12):
    """Clients whose inputs depend on their labels."""
    rng = np.random.default_rng(seed)
    y = np.array([rng.permutation(np.resize(some, m)) for some in labels]).astype(np.int32)
    x = np.eye(4, dtype=np.float32)[y] + 0.1 * rng.normal(size=(len(labels), m, 4)).astype(np.float32)
    return Clients({"x": x, "y": y}, np.full(len(labels), m, np.int32))


def test_labels_that_are_no_integers_do_not_migrate():
    task = jfcl.models.classification(jfcl.models.Linear(4), (4,), 4)
    algorithm = jfcl.fedgroup(task, TWO, num_clusters=2, migrate=0.1)
    for examples in ({"x": np.zeros((4, 3, 4), np.float32)}, regression(0).examples):
        clients = Clients(examples, np.full(len(examples["x"]), 3, np.int32))
        with pytest.raises(ValueError, match="the labels 'y' of the examples must be an integer for each example"):
            jax.eval_shape(algorithm.init, jax.random.key(0), jax.tree.map(jnp.asarray, clients))


@pytest.mark.slow
def test_a_client_with_other_labels_migrates():
    task = jfcl.models.classification(jfcl.models.Linear(4), (4,), 4)
    pairs = [[0, 1], [2, 3]] * 4
    before, after = labelled(pairs), labelled([[2, 3], *pairs[1:]])
    for migrate, moves in ((0.1, 1), (None, 0)):
        algorithm = jfcl.fedgroup(task, TWO, num_clusters=2, pretrain_steps=STEPS, migrate=migrate)
        state = algorithm.init(jax.random.key(0), before)
        assert state.cluster[0] != state.cluster[1]
        step = jax.jit(algorithm.step)
        state, metrics = step(jax.random.key(1), state, before)
        assert metrics["migrations"] == 0
        state, metrics = step(jax.random.key(2), state, after)
        assert metrics["migrations"] == metrics["cold_starts"] == moves
        assert (state.cluster[0] == state.cluster[1]) == bool(moves)
        state, metrics = step(jax.random.key(3), state, after)
        assert metrics["migrations"] == 0

        # Small changes count together, since the client has joined its group.
        y = np.copy(after.examples["y"])
        for t, wanted in enumerate((0, moves, 0)):
            y[2, np.flatnonzero(y[2] < 2)[0]] = 3
            state, metrics = step(jax.random.key(4 + t), state, Clients(after.examples | {"y": y.copy()}, after.size))
            assert metrics["migrations"] == wanted


@pytest.mark.slow  # without optimisation the shares are equal
def test_no_client_migrates_without_other_labels():
    rng = np.random.default_rng(0)
    task = jfcl.models.classification(jfcl.models.Linear(10), (7,), 10)
    sizes = rng.integers(1, 60, 40)
    parts = [{"x": rng.normal(size=(n, 7)), "y": rng.integers(0, 10, n)} for n in sizes]
    parts = [{"x": part["x"].astype(np.float32), "y": part["y"].astype(np.int32)} for part in parts]
    clients = jfcl.stack_clients(parts)
    options = {"pretrain_steps": STEPS, "pretrain_clients": 20, "cohort": 10, "migrate": 0.0}
    algorithm = jfcl.fedgroup(task, TWO, num_clusters=3, **options)
    history = jfcl.simulate(algorithm, clients, key=jax.random.key(0), num_rounds=6)
    assert [record["migrations"] for record in history.records] == [0] * 6


@pytest.mark.slow
def test_a_client_migrates_by_its_further_examples_if_their_labels_are_others():
    task = jfcl.models.classification(jfcl.models.Linear(4), (4,), 4)
    clients = labelled([[0, 1], [2, 3]] * 4)
    pairs = np.array([[0, 1] * 3, [2, 3] * 3] * 4, np.int32)
    halves = np.concatenate([pairs, pairs], axis=1)
    halves[0, 6:] = pairs[1]  # of the first client the second half has the labels of the others
    clients = clients._replace(examples={"x": np.eye(4, dtype=np.float32)[halves], "y": halves})
    algorithm = jfcl.fedgroup(task, TWO, num_clusters=2, pretrain_steps=STEPS, migrate=0.1)
    state, step = algorithm.init(jax.random.key(0), clients._replace(size=clients.size // 2)), jax.jit(algorithm.step)
    before, (state, metrics) = state.cluster, step(jax.random.key(1), state, clients)
    assert metrics["migrations"] == metrics["cold_starts"] == 1
    np.testing.assert_array_equal(state.cluster[1:], before[1:])
    shares = [[0.25, 0.25, 0.25, 0.25], [0, 0, 0.5, 0.5], [0.5, 0.5, 0, 0]]
    np.testing.assert_allclose(state.memory.shares[:3], shares, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"cohort": 4, "mixing": 0.1}, {"migrate": 0.1, "measure": "madc"}, {"personal": lambda path: path == "b"}],
    ids=["cohort, mixing", "migrate, madc", "personal"],
)
def test_options_conform(options):
    kind, examples = ("network", 1e-5) if "migrate" in options else ("regression", 0.0)  # one with known classes
    method = partial(jfcl.fedgroup, num_clusters=2, pretrain_steps=3, pretrain_clients=4, **options)
    check_algorithm(method, kind=kind, padding_tolerance=1e-6, examples_tolerance=examples)


@pytest.mark.slow_cases("options5-unknown measure")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_clusters": 13}, "num_clusters must be at most the 12 clients there are, got 13"),
        ({"num_clusters": 3, "pretrain_clients": 2}, "pretrain_clients must be at least the 3 groups, got 2"),
        ({"num_clusters": 2, "migrate": 0.1}, "migrate must be left out for a task without classes"),
        ({"num_clusters": "auto", "most_clusters": 1}, "most_clusters must be"),
        ({"num_clusters": 2, "mixing": -1.0}, "mixing must be"),
        ({"num_clusters": 2, "measure": "cosine"}, "unknown measure"),
    ],
)
def test_what_has_no_meaning_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        algorithm = jfcl.fedgroup(LINEAR, TWO, **options)
        jax.eval_shape(algorithm.init, jax.random.key(0), jax.tree.map(jnp.asarray, regression(0)))
