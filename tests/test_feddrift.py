"""FedDrift against a loop of its steps in float64, its degenerate case, its capacity, and what it refuses."""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from padded_clients import padded
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

import jfcl
from jfcl.core import Clients, Task
from jfcl.core.clients import client_ids
from jfcl.methods.round import select_cohort
from jfcl.simulation.evaluation import unlike
from jfcl.simulation.resident import with_padding, without_padding
from jfcl.testing import check_algorithm, problem

D, N, T = 3, 8, 5
LINEAR = Task(
    init=lambda key: {"w": jax.random.normal(key, (D,))},
    apply=lambda p, x: x @ p["w"],
    cost=lambda outputs, batch: 0.5 * (outputs - batch["y"]) ** 2,
    correct=lambda outputs, batch: ((outputs > 0) == (batch["y"] > 0)).astype(jnp.float32),
)
TWO = jfcl.local_training(optax.sgd(0.2), num_steps=2)
TRUTH = np.array([[3.0, 0, -1], [-3.0, 1, 1], [0, 4, 2]])


def drifting(seed, window=T):
    """Returns the clients at each step: some cells are empty, and with a window old ones are gone."""
    rng = np.random.default_rng(seed)
    count = rng.integers(2, 7, (N, T)) * (rng.random((N, T)) > 0.1)
    count[:, 0] = np.maximum(count[:, 0], 1)  # a run begins with clients that have examples
    concept = np.minimum(np.cumsum(rng.random((N, T)) < 0.3, axis=1), 2)
    cells = {}
    for i, t in np.ndindex(N, T):
        x = rng.normal(size=(count[i, t], D))
        y = x @ TRUTH[concept[i, t]] + 0.1 * rng.normal(size=len(x))
        cells[i, t] = np.float32(x), np.float32(y)
    phases, m = [], 6 * window
    for now in range(T):
        arrays = {"x": np.zeros((N, m, D), np.float32), "y": np.zeros((N, m), np.float32)}
        arrays["step"], size = np.zeros((N, m), np.int32), np.zeros(N, np.int32)
        for i in range(N):
            for t in range(max(0, now - window + 1), now + 1):
                rows = slice(size[i], size[i] + count[i, t])
                arrays["x"][i, rows], arrays["y"][i, rows], arrays["step"][i, rows] = *cells[i, t], t
                size[i] += count[i, t]
        phases.append(Clients(arrays, size))
    return phases, {cell: tuple(np.float64(part) for part in data) for cell, data in cells.items() if len(data[0])}


class Loop:
    """The server of the paper: its models in the order in which they were made, and whose cells are whose."""

    def __init__(self, cells, start, *, drift, merge, compare, eager, window):
        self.cells, self.window, self.compare, self.eager = cells, window, compare, eager
        self.drift, self.merge, self.models = drift, merge, dict(enumerate(start))
        self.owner, self.last, self.present = {}, {}, {i: min(i, len(start) - 1) for i in range(N)}

    def score(self, m, cells):
        x, y = (np.concatenate([self.cells[cell][part] for cell in cells]) for part in (0, 1))
        outputs = x @ self.models[m]
        return np.mean((outputs > 0) == (y > 0)) if self.compare == "accuracy" else -np.mean((outputs - y) ** 2) / 2

    def begin(self, t):
        self.held = [(i, s) for i, s in self.cells if t - self.window < s <= t]
        old, drifted, new = sorted(self.models), [], {}
        for i in range(N):
            if (i, t) not in self.cells:
                continue
            best = max(old, key=lambda m: self.score(m, [(i, t)])) if t else self.present[i]
            score = self.score(best, [(i, t)])
            self.present[i] = best
            if self.last.get(i, -np.inf) - score > self.drift:
                drifted.append(i)
                if not (self.eager and len(drifted) > 1):
                    row = max([*self.models, *new, self.made - 1]) + 1
                    new[row] = self.models[best]
                self.present[i] = row
            self.last[i], self.owner[i, t] = score, self.present[i]
        self.models |= new
        self.made = max(self.models) + 1 if t == 0 else max(self.made, max(self.models) + 1)
        return len(drifted), 0 if self.eager or t == 0 else self.unite(old)

    def unite(self, old):
        of = {m: [cell for cell in self.held if self.owner[cell] == m] for m in old}
        old = [m for m in old if of[m]]
        if len(old) < 2:
            return 0
        scores = np.array([[self.score(a, of[b]) for b in old] for a in old])
        lost = np.diag(scores)[:, None] - scores
        distances = np.maximum(np.maximum(lost, lost.T), 0)
        label = fcluster(linkage(squareform(distances, checks=False), "complete"), self.merge, "distance")
        for c in set(label):
            root, *others = some = [m for m, found in zip(old, label, strict=True) if found == c]
            if others:
                weights = np.array([len(of[m]) for m in some])
                self.models[root] = weights @ np.array([self.models[m] for m in some]) / weights.sum()
            for m in others:
                del self.models[m]
                self.owner = {cell: root if k == m else k for cell, k in self.owner.items()}
                self.present = {i: root if k == m else k for i, k in self.present.items()}
        return len(old) - len(set(label))

    def round(self, rows):
        trained, self.losses = 0, np.full(N, np.nan)
        here = {self.present[i] for i in range(N) if any(j == i for j, _ in self.held)}
        for m in here:
            sums, total = 0.0, 0
            for i in rows:
                mine = [cell for cell in self.held if cell[0] == i and self.owner[cell] == m]
                if mine:
                    x, y = (np.concatenate([self.cells[cell][part] for cell in mine]) for part in (0, 1))
                    w, losses = self.models[m], []
                    for _ in range(2):
                        losses.append(np.mean((x @ w - y) ** 2) / 2)
                        w = w - 0.2 * x.T @ (x @ w - y) / len(x)
                    if m == self.present[i]:
                        self.losses[i] = np.mean(losses)
                    sums, total, trained = sums + len(x) * w, total + len(x), trained + 1
            if total:
                self.models[m] = sums / total
        return trained


@pytest.mark.slow_cases("loss", "each*", "eager*")
@pytest.mark.parametrize(
    ("options", "cohort", "window"),
    [
        ({"compare": "loss", "drift_threshold": 1.0}, None, T),
        ({"compare": "accuracy", "drift_threshold": 0.22, "merge_threshold": 0.13}, 3, T),
        ({"compare": "loss", "drift_threshold": 1.0, "merge_threshold": 2.0, "start": "each"}, 5, 2),
        ({"compare": "loss", "drift_threshold": 1.0, "eager": True}, None, 3),
    ],
    ids=["loss", "accuracy, cohort", "each, cohort, window", "eager, window"],
)
def test_steps_are_the_papers(options, cohort, window):
    events, step = np.zeros(2, int), None
    of_cohort = jax.jit(lambda key, clients: client_ids(select_cohort(key, clients, cohort).clients))
    for seed in range(2):
        phases, cells = drifting(seed, window)
        more = [padded(clients) for clients in phases]
        rng, each = np.random.default_rng(seed + 50), options.get("start") == "each"
        start = rng.normal(size=(len(more[0].size) if each else 1, D)).astype(np.float32)
        of_loop = {"drift": options["drift_threshold"], "eager": options.get("eager", False)}
        of_loop |= {"merge": options.get("merge_threshold", of_loop["drift"]), "compare": options["compare"]}
        loop = Loop(cells, np.float64(start[: N if each else 1]), window=window, **of_loop)
        algorithm = jfcl.feddrift(LINEAR, TWO, init_params={"w": start}, cohort=cohort, **options)
        state = jax.jit(algorithm.init)(jax.random.key(seed), more[0])
        step = step or jax.jit(algorithm.step)  # which does not depend on the start
        for t, r in np.ndindex(T, 2):
            known, key = len(loop.models), jax.random.fold_in(jax.random.key(seed), 10 * t + r)
            rows = [i for i in of_cohort(key, more[t]).tolist() if i < N]
            drifted, merged = loop.begin(t) if r == 0 else (0, 0)
            trained = loop.round(rows)
            state, metrics = jax.device_get(step(key, state, more[t]))
            found = {name: int(metrics[name]) for name in ("drifted", "merged", "models", "capacity_reached")}
            assert found == dict(drifted=drifted, merged=merged, models=len(loop.models), capacity_reached=0)
            np.testing.assert_allclose(metrics["loss"][:N], loop.losses, rtol=1e-4)
            events += drifted, merged

            # Which model has which cell, the models themselves, and what is sent.
            of_cell = {}
            for i in range(N):
                steps = more[t].examples["step"][i, : more[t].size[i]]
                models = np.asarray(state.memory.model)[i, : more[t].size[i]]
                of_cell |= {(i, int(s)): set(models[steps == s].tolist()) for s in steps}
            assert all(len(models) == 1 for models in of_cell.values()) and sorted(of_cell) == sorted(loop.held)
            pairs = {(loop.owner[cell], *models) for cell, models in of_cell.items()}
            pairs |= {(loop.present[i], int(state.cluster[i])) for i in range(N)}
            assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})
            for ours, theirs in ((b, a) for a, b in pairs):
                np.testing.assert_allclose(state.params["w"][ours], loop.models[theirs], rtol=1e-5, atol=1e-5)
            asked, numbers = (r == 0) * (phases[t].size > 0).sum(), 1 if loop.eager else 1 + known
            costs = {"bytes_down": (trained + asked * known) * 4 * D, "client_steps": 2 * trained}
            costs |= {"bytes_up": trained * 4 * D + asked * 4 * known * numbers}
            assert {name: int(metrics[name]) for name in costs} == costs
    assert events[0] > 0 and (events[1] > 0 or options.get("eager")), "the problems have no drift, or nothing to merge"


def run(algorithm, phases, rounds=2):
    """Returns the state after `rounds` of each phase, and the metrics of all rounds."""
    state, step, rows = algorithm.init(jax.random.key(0), phases[0]), jax.jit(algorithm.step), []
    for t, r in np.ndindex(len(phases), rounds):
        state, metrics = step(jax.random.fold_in(jax.random.key(1), rounds * t + r), state, phases[t])
        rows.append(metrics)
    return state, rows


@pytest.mark.slow
def test_without_drift_it_is_fedavg_on_all_past_data():
    phases, _ = drifting(7)
    batches = jfcl.local_training(optax.sgd(0.1), num_epochs=2, batch_size=4)
    options = {"cohort": 3, "server_optimizer": optax.sgd(0.7, momentum=0.5)}
    ours = run(jfcl.feddrift(LINEAR, batches, drift_threshold=np.inf, max_models=2, **options), phases)
    fedavg = run(jfcl.fedavg(LINEAR, batches, **options), phases)
    np.testing.assert_allclose(ours[0].params["w"][0], fedavg[0].params["w"][0], rtol=1e-6)
    for mine, theirs in zip(ours[1], fedavg[1], strict=True):
        for name in ("loss", "participants", "client_steps"):
            np.testing.assert_allclose(mine[name], theirs[name], rtol=1e-5)


def two_steps(*concepts):
    """Returns clients whose examples are their step's concept, in both phases."""
    y = np.repeat(np.float32(concepts), 2, axis=1)
    step = np.tile(np.int32([0, 0, 1, 1]), (len(y), 1))
    clients = Clients({"x": 0 * y, "y": y, "step": step}, np.full(len(y), 2, np.int32))
    return [clients, clients._replace(size=2 * clients.size)]


BIAS = jfcl.models.task(lambda _: {"b": jnp.zeros(())}, lambda p, x: x + p["b"], kind="regression")
EXACT = jfcl.local_training(optax.sgd(0.5), num_steps=1)  # the mean of the targets


@pytest.mark.slow
def test_momentum_lasts_to_the_end_of_a_step_for_each_model():
    phases = two_steps([1, 5], [1, 1])
    heavy = jfcl.local_training(optax.sgd(0.1, momentum=0.9), num_steps=1, keep="everything")
    algorithm = jfcl.feddrift(BIAS, heavy, drift_threshold=1.0, compare="loss", cohort=2)
    state, _ = run(algorithm, phases, rounds=3)
    b, moved = 0.0, []
    for new in (1, 5):
        begin, v = b, {}
        for target in (1, new):
            b, v[target] = begin, 0.0
            for _ in range(3):
                v[target] = 0.9 * v[target] + 2 * (b - target)
                b -= 0.1 * v[target]
            moved.append(b)
        b = moved[0]
    np.testing.assert_allclose(state.params["b"][state.cluster], [moved[3], moved[2]], rtol=1e-5)


@pytest.mark.slow
def test_without_a_free_model_clients_keep_the_best_and_newcomers_get_one_that_exists():
    phases = two_steps([1, 5], [1, 9], [1, 1])
    algorithm = jfcl.feddrift(BIAS, EXACT, drift_threshold=1.0, compare="loss", max_models=2)
    state, metrics = run(algorithm, phases)
    assert [(int(m["drifted"]), int(m["capacity_reached"]), int(m["models"])) for m in metrics] == [
        (0, 0, 1), (0, 0, 1), (2, 1, 2), (0, 0, 2),
    ]  # fmt: skip
    np.testing.assert_array_equal(state.cluster, [1, 0, 0])
    np.testing.assert_allclose(state.params["b"], [2.6, 5])  # 2.6: two of the examples are a 9
    backwards = [jax.tree.map(lambda x: x[::-1], part._replace(id=np.arange(3))) for part in phases]
    state, _ = run(algorithm, backwards)  # the smallest id gets the free model
    np.testing.assert_array_equal(state.cluster, [0, 0, 1])
    np.testing.assert_allclose(state.params["b"], [2.6, 5])
    zeros = two_steps([0, 0])[1]  # as the model that has not begun would predict
    history = jfcl.simulate(algorithm, phases[0], key=jax.random.key(0), num_rounds=1, newcomers=zeros)
    assert history.records[-1]["newcomer_loss"] == 1


def test_padding_clients_bring_no_further_models(monkeypatch):
    monkeypatch.setattr(sys.modules["jfcl.methods.feddrift"], "MODELS", 1)
    phases = [padded(clients) for clients in two_steps([1, 5], [1, 9], [1, 3])]  # the last has lost no more than 3
    algorithm = jfcl.feddrift(BIAS, EXACT, drift_threshold=3.0, compare="loss", start="each", client_axis=jax.vmap)
    state, metrics = run(algorithm, phases, rounds=1)
    assert [int(metrics[-1][name]) for name in ("drifted", "capacity_reached", "merged")] == [2, 1, 1]
    np.testing.assert_array_equal(np.flatnonzero(state.memory.active), [0, 1, 3])


def test_a_resumed_run_with_padding_clients_begins_no_step():
    clients, heavy = padded(two_steps([1, 5], [1, 9])[0]), optax.sgd(0.1, momentum=0.9)
    training = jfcl.local_training(heavy, num_steps=1, keep="everything")
    algorithm = jfcl.feddrift(BIAS, training, drift_threshold=1.0, compare="loss")
    state, like = (run(algorithm, [part], rounds=1)[0] for part in (clients, jax.tree.map(lambda x: x[:2], clients)))
    resumed = with_padding(jax.device_get(without_padding(state, like)), state)  # as from a checkpoint
    after = [algorithm.step(jax.random.key(2), each, clients) for each in (state, resumed)]
    assert after[1][0].params["b"].tolist() == after[0][0].params["b"].tolist()
    for name in ("bytes_up", "bytes_down", "client_steps"):
        assert after[1][1][name] == after[0][1][name], name


@pytest.mark.slow
def test_one_model_that_all_who_drift_share():
    phases = two_steps([1, 5], [1, 5], [1, 1])
    state, metrics = run(jfcl.feddrift(BIAS, EXACT, drift_threshold=1.0, compare="loss", eager=True), phases)
    assert metrics[2]["drifted"] == 2 and metrics[2]["models"] == 2 and metrics[2]["merged"] == 0
    np.testing.assert_array_equal(state.params["b"][state.cluster], [5, 5, 1])


@pytest.mark.slow
def test_seeds_and_thresholds_side_by_side_are_single_runs():
    phases, _ = drifting(3)

    def advance(drift, merge, key, state, clients):
        options = {"drift_threshold": drift, "merge_threshold": merge, "compare": "loss", "max_models": 12}
        return jfcl.feddrift(LINEAR, TWO, **options).step(key, state, clients)[0]

    drift, merge = jnp.float32([0.5, 2.0, jnp.inf]), jnp.float32([0.2, 3.0, 1.0])
    first = jfcl.feddrift(LINEAR, TWO, compare="loss", max_models=12).init(jax.random.key(0), phases[0])
    many, single = jax.tree.map(lambda x: jnp.stack([x] * 3), first), [first] * 3
    together, alone = jax.jit(jax.vmap(advance, (0, 0, 0, 0, None))), jax.jit(advance)
    for t, r in np.ndindex(T, 2):
        keys = jax.vmap(jax.random.key)(jnp.arange(3, dtype=jnp.uint32) + 10 * (2 * t + r))
        many = together(drift, merge, keys, many, phases[t])
        single = [alone(drift[s], merge[s], keys[s], single[s], phases[t]) for s in range(3)]
    assert len(set(many.memory.taken.tolist())) == 3 and many.memory.taken[2] == 1
    for s in range(3):
        for name in ("params", "cluster", "memory"):
            ours, theirs = getattr(single[s], name), jax.tree.map(lambda x, s=s: x[s], getattr(many, name))
            jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"aggregator": jfcl.kernels.coordinate_median, "eager": True},
        {
            "adversary": jfcl.Adversary(jfcl.attacks.ipm(), np.arange(7) == 2),
            "server_optimizer": optax.sgd(0.7, momentum=0.5),
        },
        {"start": "each", "max_models": 16, "cohort": 4, "merge_threshold": 0.3},
    ],
    ids=["aggregator, eager", "adversary, server optimiser", "each, cohort"],
)
def test_options_conform(options):
    check_algorithm(partial(jfcl.feddrift, **options), kind="classification")


def test_a_hostile_client_counts_once_however_many_models_it_trains():
    """Two of four clients send NaN for both models, which are as many updates as there are participants."""
    task = jfcl.models.task(lambda key: {"b": jnp.zeros(())}, lambda p, x: x + p["b"], kind="regression")
    nan = jfcl.Adversary(jfcl.attacks.nan(), np.arange(4) < 2)
    options = {"drift_threshold": 1.0, "compare": "loss", "eager": True, "max_models": 2, "adversary": nan}
    algorithm = jfcl.feddrift(task, jfcl.local_training(optax.sgd(0.5), num_steps=1), **options)
    y = np.float32([[1, 5], [1, 5], [1, 5], [1, 1]])
    clients = Clients({"x": 0 * y, "y": y, "step": np.tile(np.int32([0, 1]), (4, 1))}, np.ones(4, np.int32))
    state, step = algorithm.init(jax.random.key(0), clients), jax.jit(algorithm.step)
    for now in (clients, clients._replace(size=np.full(4, 2, np.int32))):
        state, metrics = step(jax.random.key(1), state, now)
        assert int(metrics["nonfinite"]) == 2 and int(metrics["participants"]) == 4
    assert state.cluster.tolist() == [1, 1, 1, 0] and np.isfinite(state.params["b"]).all()
    assert float(metrics["bytes_down"]) == 4 * (7 + 4)  # trainings, and models to compare


def test_types_stay_with_64_bits_enabled_and_a_model_for_each_client():
    clients, _, task, training = problem("classification")
    algorithm = jfcl.feddrift(task, training, start="each")
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        key = jax.eval_shape(lambda: jax.random.key(0))
        state = jax.eval_shape(algorithm.init, key, clients)
        assert not unlike(jax.eval_shape(algorithm.step, key, state, clients)[0], state)


def with_steps(step):
    y = np.ones((2, 3), np.float32)
    return Clients({"x": y, "y": y} | ({} if step is None else {"step": step}), np.full(2, 2, np.int32))


@pytest.mark.parametrize(
    ("clients", "words"),
    [
        (with_steps(None), r"a dict with 'step', the time step of each example.*got \['x', 'y'\]"),
        (with_steps(np.int32([[0, 1, 9], [1, 0, 9]])), r"'step'\] must be 0 or more, and never fall"),
        (with_steps(np.int32([[0, 1, 9], [-1, 0, 9]])), r"'step'\] must be 0 or more, and never fall"),
        (with_steps(np.zeros((2, 3), np.float32)), r"'step'\] must be integers \[2, 3\], got 'float32"),
    ],
    ids=["no steps", "falls", "negative", "floats"],
)
def test_examples_without_their_steps_are_refused(clients, words):
    algorithm = jfcl.feddrift(BIAS, EXACT, compare="loss")
    with pytest.raises(ValueError, match=words):
        jfcl.simulate(algorithm, clients, key=jax.random.key(0), num_rounds=1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"drift_threshold": -0.1}, "drift_threshold must be in"),
        ({"compare": "f1"}, "unknown compare"),
        ({"start": "each", "max_models": 6}, "max_models must be at least 7, the number of clients, with start='each'"),
        ({"cohort": 8}, "cohort must be at most the 7 clients there are, got 8"),
    ],
)
def test_what_has_no_meaning_is_refused(options, words):
    clients, _, task, training = problem("classification")
    with pytest.raises(ValueError, match=words):
        jfcl.feddrift(task, training, **options).init(jax.random.key(0), clients)


def test_what_it_cannot_do_is_refused():
    _, _, task, training = problem()
    with pytest.raises(ValueError, match="compare must be loss for a task without an accuracy, got 'accuracy'"):
        jfcl.feddrift(task, training)
    with pytest.raises(TypeError, match="feddrift has no argument 'personal'"):
        jfcl.feddrift(task, training, compare="loss", personal=None)


def test_an_accuracy_that_falls_by_just_the_threshold_is_no_drift():
    task = jfcl.models.classification(jfcl.models.Linear(2), (1,), 2)
    start = jax.tree.map(jnp.zeros_like, task.init(jax.random.key(0)))  # predicts the first class
    right = np.array([[r, r - 2] for r in range(20, 50)])  # of 50, in two steps: all fall by 0.04
    y = np.int32(np.tile(np.arange(50), (30, 2, 1)) >= right[:, :, None]).reshape(30, 100)
    examples = {
        "x": np.zeros((30, 100, 1), np.float32),
        "y": y,
        "step": np.tile(np.repeat(np.int32([0, 1]), 50), (30, 1)),
    }
    clients = jfcl.Clients(examples, np.full(30, 50, np.int32))
    training = jfcl.local_training(optax.sgd(0.0), num_steps=1)
    algorithm = jfcl.feddrift(task, training, drift_threshold=0.04, max_models=2, init_params=start)
    state, step = algorithm.init(jax.random.key(0), clients), jax.jit(algorithm.step)
    for now in (clients, clients._replace(size=2 * clients.size)):
        state, metrics = step(jax.random.key(1), state, now)
    assert metrics["drifted"] == 0
