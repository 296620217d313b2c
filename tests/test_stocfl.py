"""StoCFL against a loop in float64, its degenerate cases, newcomers, its capacity, and what it refuses."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiled import rollout
from linear_clients import descend, linear, linear_clients, trained
from padded_clients import padded

import jfcl
from jfcl.core import Clients
from jfcl.core.clients import client_ids
from jfcl.methods.assigned import UNSEEN
from jfcl.methods.round import select_cohort
from jfcl.simulation.resident import with_padding, without_padding
from jfcl.testing import check_algorithm, problem

D, SEE = 4, 3
LINEAR = linear(D)
TWO = jfcl.local_training(optax.sgd(0.1), num_steps=2)
START = {"w": np.float32([0.5, -0.5, 1.0, 0.2])}
TRUTH = np.array([[3.0, 0, -1, 1], [-3.0, 1, 1, 0], [0, 4, 2, -4]])


def regression(seed, n=12, m=12, spread=0.0):
    return linear_clients(TRUTH, seed, n, m, m // 2, spread)


def cosine(a, b):
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


class Loop:
    """The server of the paper: clusters are named by the smallest id of their clients."""

    def __init__(self, clients, threshold, pull):
        self.clients, self.threshold, self.pull = clients, threshold, pull
        n = len(clients.size)
        self.members, self.cluster_of = {i: [i] for i in range(n)}, list(range(n))
        self.models, self.seen, self.losses, self.omega = {}, {}, {}, START["w"].astype(np.float64)

    def unite(self, a, b):
        a, b = self.cluster_of[a], self.cluster_of[b]
        if a == b:
            return 0
        a, b = min(a, b), max(a, b)
        if len(self.members[a]) < len(self.members[b]) and b in self.models:
            self.models[a] = self.models[b]
        self.models.pop(b, None)
        for i in self.members[b]:
            self.cluster_of[i] = a
        self.members[a] += self.members.pop(b)
        return 1

    def round(self, rows):
        start = START["w"].astype(np.float64)
        new = [i for i in rows if i not in self.seen]
        self.seen |= {i: descend(start, self.clients, i, SEE) - start for i in new}
        buckets = {}
        for i in sorted(rows):
            buckets.setdefault(self.cluster_of[i], []).append(self.seen[i])
        means = {c: np.mean(some, axis=0) for c, some in buckets.items()}
        pairs = [(cosine(means[a], means[b]), a, b) for a in means for b in means if a < b]
        merged = sum(self.unite(a, b) for s, a, b in sorted(pairs, key=lambda p: -p[0]) if s >= self.threshold)
        for i in rows:
            self.models.setdefault(self.cluster_of[i], self.omega)
        begin, omega = dict(self.models), self.omega
        for c in {self.cluster_of[i] for i in rows}:
            some = [i for i in rows if self.cluster_of[i] == c]
            after = {i: trained(begin[c], self.clients, i, 2, self.pull, omega) for i in some}
            self.models[c] = np.mean([w for w, _ in after.values()], axis=0)
            self.losses |= {i: loss for i, (_, loss) in after.items()}
        self.omega = np.mean([descend(omega, self.clients, i, 2) for i in rows], axis=0)
        return len(new), merged


def followed(step, serve, key, state, clients, loop, rows):
    """Compares a round of the clients `rows` with that of the loop, and returns the state after it."""
    new, merged = loop.round(rows)
    state, metrics = step(key, state, clients)
    wanted = [loop.losses[i] for i in rows]
    np.testing.assert_allclose(np.asarray(metrics["loss"])[rows], wanted, rtol=1e-4, atol=1e-6)
    served = serve(state)
    to, seen = np.asarray(served.to)[:12], sorted(loop.seen)
    assert [int(i) for i in np.flatnonzero(np.asarray(state.unchanged)[:12] != UNSEEN)] == seen
    ours, theirs = to[seen], np.array(loop.cluster_of)[seen]
    np.testing.assert_array_equal(ours[:, None] == ours[None, :], theirs[:, None] == theirs[None, :])
    models = np.asarray(served.models["w"], np.float64)[to]
    wanted = [loop.models[loop.cluster_of[i]] if i in loop.seen else loop.omega for i in range(12)]
    np.testing.assert_allclose(models, wanted, rtol=1e-5, atol=1e-5)
    assert metrics["merged"] == merged and metrics["capacity_reached"] == 0
    assert metrics["clusters_found"] == len(set(theirs.tolist()))
    assert metrics["bytes_up"] == metrics["bytes_down"] == 4 * D * (2 * len(rows) + new)
    assert metrics["client_steps"] == 4 * len(rows) + SEE * new
    return state


@pytest.mark.slow_cases("*-None", "0.3-0.0-4")
@pytest.mark.parametrize("cohort", [None, 4])
@pytest.mark.parametrize(("threshold", "spread"), [(0.3, 0.0), (0.8, 1.5)])
def test_a_round_is_the_papers(threshold, spread, cohort):
    options = {"merge_threshold": threshold, "prox": 0.4, "observe_epochs": SEE, "cohort": cohort}
    algorithm = jfcl.stocfl(LINEAR, TWO, init_params=START, **options)
    init, step = jax.jit(algorithm.init), jax.jit(algorithm.step)
    serve = jax.jit(lambda state: algorithm.serve(state, None))
    drawn = jax.jit(lambda key, clients: client_ids(select_cohort(key, clients, cohort).clients))
    for seed in range(3):
        clients = regression(seed, spread=spread)
        more = padded(clients)
        key = jax.random.key(seed)
        state = init(key, more)
        loop = Loop(clients, threshold, 0.4)
        for t in range(6):
            round_key = jax.random.fold_in(key, t)
            rows = [i for i in drawn(round_key, more).tolist() if i < 12]
            state = followed(step, serve, round_key, state, more, loop, rows)
    # Clients of one truth: two new ones unite before they meet a cluster with a model; a cluster merges into one that
    # merges again, while client 5 is away.
    rng = np.random.default_rng(0)
    x = np.repeat(rng.normal(size=(1, 12, D)).astype(np.float32), 12, axis=0)
    y = np.einsum("nmd,nd->nm", x, TRUTH[0] + 0.2 * rng.normal(size=(12, D))).astype(np.float32)
    more = padded(Clients({"x": x, "y": y}, np.full(12, 12, np.int32)))
    state, loop = init(key, more), Loop(more, threshold, 0.4)
    for rows in ([8], [8, 9, 10, 11], [4, 5], [2, 3], [0, 1, 6, 7], [2, 4], [0, 2]):
        here = more._replace(size=np.where(np.isin(np.arange(14), rows), more.size, 0))
        keys = map(jax.random.key, range(99))
        without = (k for k in keys if cohort is None or 5 in rows or 5 not in drawn(k, here).tolist())
        state = followed(step, serve, next(without), state, here, loop, rows)
    assert len(set(loop.cluster_of[:8])) == 1


@pytest.mark.slow
def test_one_cluster_is_fedavg_and_no_merging_is_local_training():
    clients, key = regression(1), jax.random.key(2)

    def models(algorithm):
        state, _ = rollout(algorithm, clients, key=key, num_rounds=3)
        served = algorithm.serve(state, None)
        return np.asarray(served.models["w"])[np.arange(12) if served.to is None else np.asarray(served.to)]

    options = {"prox": 0.0, "observe_epochs": SEE, "init_params": START}
    fedavg = jfcl.fedavg(LINEAR, TWO, weights="equal", init_params=START)
    np.testing.assert_allclose(
        models(jfcl.stocfl(LINEAR, TWO, merge_threshold=-1.0, **options)), models(fedavg), rtol=1e-5
    )
    alone = jfcl.local_only(LINEAR, TWO, init_params=START)
    ours = models(jfcl.stocfl(LINEAR, TWO, merge_threshold=1.5, **options))
    np.testing.assert_allclose(ours, models(alone), rtol=1e-5)


def test_a_cohort_of_one_merges_nothing_and_rows_are_taken_in_order_after_a_resumption():
    clients, key = padded(regression(0)), jax.random.key(0)
    algorithm = jfcl.stocfl(LINEAR, TWO, init_params=START, cohort=1, observe_epochs=SEE, client_axis=jax.vmap)
    saved, step = jax.eval_shape(algorithm.init, key, regression(0)), jax.jit(algorithm.step)
    state = jax.jit(algorithm.init)(key, clients)
    for t in range(3):
        state, metrics = step(jax.random.fold_in(key, t), with_padding(without_padding(state, saved), state), clients)
        assert metrics["merged"] == 0
    rows = np.asarray(state.cluster)[np.flatnonzero(state.unchanged != UNSEEN)]
    assert sorted(rows.tolist()) == list(range(int(metrics["clusters_found"]))) and len(rows) > 1


def test_padding_clients_change_no_row_that_clients_are_served():
    clients, key = regression(0), jax.random.key(0)
    algorithm = jfcl.stocfl(LINEAR, TWO, init_params=START)
    few, more = (algorithm.serve(algorithm.init(key, part), None).to for part in (clients, padded(clients)))
    assert few.tolist() == more[:12].tolist()


@pytest.mark.slow
def test_what_clients_are_served_is_computed_by_one_program():
    algorithm = jfcl.stocfl(LINEAR, TWO, init_params=START)
    state = jax.eval_shape(algorithm.init, jax.random.key(0), regression(0))
    traced = jax.make_jaxpr(jax.vmap(lambda one: algorithm.serve(one, None)))(
        jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), state)
    )
    assert len(traced.eqns) == 1


@pytest.mark.slow
def test_clients_beyond_the_capacity_wait_with_the_common_model():
    clients = regression(2, n=9, m=40)
    algorithm = jfcl.stocfl(LINEAR, TWO, merge_threshold=0.8, max_clusters=2, observe_epochs=SEE, init_params=START)
    state, metrics = rollout(algorithm, clients, key=jax.random.key(0), num_rounds=3)
    assert metrics["capacity_reached"].tolist() == [3, 3, 3] and metrics["clusters_found"].tolist() == [2, 2, 2]
    served = algorithm.serve(state, None)
    assert np.asarray(served.to).tolist() == [1, 2, 0] * 3  # row 0 is the common model
    np.testing.assert_array_equal(served.models["w"][0], state.memory.common.params["w"][0])
    assert served.active.tolist() == [True, True, True]

    # They get, train and send the common model only.
    assert metrics["bytes_up"].tolist() == metrics["bytes_down"].tolist() == [4 * D * n for n in (18 + 9 - 3, 15, 15)]
    assert metrics["client_steps"].tolist() == [30 + 9 * SEE, 30, 30]
    common = jfcl.fedavg(LINEAR, TWO, weights="equal", init_params=START)
    _, of_common = rollout(common, clients, key=jax.random.key(0), num_rounds=3)
    np.testing.assert_allclose(metrics["loss"][:, 2::3], of_common["loss"][:, 2::3], rtol=1e-6)


@pytest.mark.slow
def test_a_client_without_a_finite_update_is_observed_again():
    clients = regression(2, n=6)
    clients.examples["x"][4] = 1e30
    algorithm = jfcl.stocfl(LINEAR, TWO, merge_threshold=0.5, observe_epochs=SEE, init_params=START)
    state, metrics = rollout(algorithm, clients, key=jax.random.key(0), num_rounds=3)
    assert np.flatnonzero(state.unchanged == UNSEEN).tolist() == [4]
    assert algorithm.serve(state, None).to[4] == 0  # the common model
    assert metrics["clusters_found"].tolist() == [3, 3, 3] and metrics["capacity_reached"].tolist() == [0, 0, 0]
    assert metrics["bytes_up"].tolist() == [4 * D * n for n in (12 + 6 - 1, 12, 12)]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((state.params, state.memory)))
    assert algorithm.adopt(state, clients).to.tolist()[4:] == [0, algorithm.serve(state, None).to[5]]


@pytest.mark.slow
def test_newcomers_join_a_similar_cluster_or_get_the_common_model():
    clients, newcomers = regression(3, m=30), regression(4, n=4, m=30)
    newcomers.examples["y"][3] *= 0
    newcomers.examples["y"][3] += newcomers.examples["x"][3] @ np.float32([0, -4, -2, -4])
    algorithm = jfcl.stocfl(LINEAR, TWO, merge_threshold=0.5, observe_epochs=SEE, init_params=START)
    history = jfcl.simulate(
        algorithm, clients, key=jax.random.key(0), num_rounds=2, test_clients=clients, newcomers=newcomers
    )
    served = algorithm.serve(history.state, None)
    to = np.asarray(algorithm.adopt(history.state, newcomers).to)
    assert to[:3].tolist() == np.asarray(served.to)[:3].tolist() and to[3] == 0
    assert np.isfinite(history.records[-1]["newcomer_loss"])


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"cohort": 4, "max_clusters": 6}, {"merge_threshold": 1.5, "max_clusters": 3}])
def test_options_conform(options):
    check_algorithm(partial(jfcl.stocfl, observe_epochs=3, **options))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_clusters": 8}, "max_clusters must be at most the 7 clients there are, got 8"),
        ({"merge_threshold": 3.0}, r"merge_threshold must be in \[-2, 2\]"),
        ({"prox": -1.0}, "prox must be"),
    ],
)
def test_what_has_no_meaning_is_refused(options, words):
    clients, _, task, training = problem()
    with pytest.raises(ValueError, match=words):
        algorithm = jfcl.stocfl(task, training, **options)
        jax.eval_shape(algorithm.init, jax.random.key(0), jax.tree.map(jnp.asarray, clients))


def test_it_has_no_privacy():
    _, _, task, training = problem()
    with pytest.raises(TypeError, match="stocfl has no argument 'dp'"):
        jfcl.stocfl(task, training, dp=None)
