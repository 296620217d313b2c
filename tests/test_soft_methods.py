"""FedEM, FedRC and FedSoft: their rounds in NumPy's float64 from the papers' equations, and what they become."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jfcl
from jfcl.methods.fedrc import label_shares
from jfcl.methods.fedsoft import drawn

KEY, N, M, D, C, K = jax.random.key(3), 8, 9, 3, 4, 3
TASK = jfcl.models.classification(jfcl.models.Linear(C), (D,), C)
LINE = jfcl.models.task(
    lambda key: {"w": 0.5 * jax.random.normal(key, (D,))}, lambda p, x: x @ p["w"], kind="regression", half=True
)
LR, STEPS = 0.3, 4
TRAINING = jfcl.local_training(optax.sgd(LR), num_steps=STEPS)


def clients(kind="labels", seed=0, n=N):
    """Clients of 2 to 9 examples; the padding is not a number."""
    rng = np.random.default_rng(seed)
    size = rng.integers(2, M + 1, n).astype(np.int32)
    x, models = rng.normal(size=(n, M, D)).astype(np.float32), rng.normal(size=(2, D, C)) * 2
    of = (rng.random((n, M)) < np.linspace(0, 1, n)[:, None]).astype(int)
    values = np.einsum("nmd,nmdc->nmc", x, models[of])
    y = values.argmax(-1).astype(np.int32) if kind == "labels" else values[..., 0].astype(np.float32)
    x[np.arange(M)[None] >= size[:, None]] = np.nan
    return jfcl.Clients({"x": x, "y": y}, size)


def of_clients(data):
    """The real examples of each client in float64."""
    for x, y, n in zip(data.examples["x"], data.examples["y"], data.size, strict=True):
        yield x[:n].astype(float), y[:n]


def softmax_losses(model, x, y):
    """The losses `[n]`, and `dℓ/dlogits` `[n, C]`."""
    logits = x @ model["kernel"] + model["bias"]
    logits = logits - logits.max(1, keepdims=True)
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return -np.log(p[np.arange(len(y)), y]), p - np.eye(C)[y]


def line_losses(model, x, y):
    error = x @ model["w"] - y
    return error**2 / 2, error


def gradient(model, x, back):
    """The mean gradient of losses with the derivatives `back`."""
    back = back if back.ndim == 2 else back[:, None]
    values = {"kernel": x.T @ back / len(x), "bias": back.mean(0), "w": (x.T @ back / len(x))[:, 0]}
    return {name: values[name] for name in model}


def float64(tree):
    return {name: np.asarray(x, float) for name, x in tree.get("Dense_0", tree).items()}


def em_round(losses_of, models, mixtures, data, present, lr=LR, steps=STEPS, move=None, table=None):
    """One round of FedEM, or of FedRC with `table` T: equations (1) to (4), and FedRC's (5); and the mean losses."""
    sums, weight, counts, mean_losses = None, 0, np.zeros((C, len(models))), np.full(len(present), np.nan)
    mixtures = mixtures.copy()
    for i, (x, y) in enumerate(of_clients(data)):
        if not present[i]:
            continue
        losses = np.stack([losses_of(model, x, y)[0] for model in models], 1)
        q = mixtures[i] * np.exp(-losses) / (1 if table is None else table[y])
        q /= q.sum(1, keepdims=True)
        mixtures[i] = q.mean(0)
        if table is not None:
            np.add.at(counts, y, q)
        trained, mean_losses[i] = [], 0
        for k, model in enumerate(models):
            for _ in range(steps):
                losses, back = losses_of(model, x, y)
                mean_losses[i] += (q[:, k] * losses).mean() / steps
                g = gradient(model, x, q[:, k].reshape(-1, *[1] * (back.ndim - 1)) * back)
                g = g if move is None else move(g)
                model = {name: model[name] - lr * g[name] for name in model}
            trained.append({name: len(x) * p for name, p in model.items()})
        weight += len(x)
        sums = trained if sums is None else [{n: a[n] + b[n] for n in a} for a, b in zip(sums, trained, strict=True)]
    models = [{name: p / weight for name, p in model.items()} for model in sums]
    counts = np.maximum(counts / weight, 1e-8)
    counts = counts / counts.sum(0)
    return models, mixtures, counts, mean_losses


def starts(algorithm, state):
    served = jax.tree.map(np.asarray, algorithm.serve(state, None))
    return [float64(jax.tree.map(lambda p, k=k: p[k], served.models)) for k in range(len(served.to[0]))]


def assert_models(served, models):
    for k, model in enumerate(models):
        for name, p in float64(jax.tree.map(lambda p, k=k: p[k], served.models)).items():
            np.testing.assert_allclose(p, model[name], atol=1e-5)


@pytest.mark.slow_cases("fedem-labels-*", "fedrc-labels-options2")
@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("fedem", "labels", {}),
        ("fedem", "values", {"cohort": 5}),
        ("fedrc", "labels", {}),
        ("fedrc", "labels", {"cohort": 4}),
    ],
)
def test_a_round_is_that_of_the_papers_equations(name, kind, options):
    data, task, losses_of = clients(kind), TASK, softmax_losses
    if kind == "values":
        task, losses_of = LINE, line_losses
    algorithm = getattr(jfcl, name)(task, TRAINING, num_clusters=K, **options)
    state, step = jax.jit(algorithm.init)(KEY, data), jax.jit(algorithm.step)
    models, mixtures = starts(algorithm, state), np.full((N, K), 1 / K)
    table = np.full((C, K), 1 / C) if name == "fedrc" else None
    for t in range(4):
        state, metrics = step(jax.random.fold_in(KEY, t), state, data)
        present = ~np.isnan(metrics["loss"])
        assert present.sum() == options.get("cohort", N) == metrics["participants"]
        models, mixtures, counts, losses = em_round(losses_of, models, mixtures, data, present, table=table)
        np.testing.assert_allclose(metrics["loss"], losses, rtol=1e-4)
        table = table if table is None else counts
        served = jax.tree.map(np.asarray, algorithm.serve(state, None))
        assert_models(served, models)
        np.testing.assert_allclose(served.to, mixtures, atol=1e-5)
    metrics = jax.tree.map(np.asarray, metrics)
    numbers = K * sum(p.size for p in models[0].values()) + (C * K if name == "fedrc" else 0)
    assert metrics["bytes_up"] == metrics["bytes_down"] == 4 * numbers * present.sum()
    entropy = -(mixtures * np.log(mixtures)).sum(1).mean()
    np.testing.assert_allclose(metrics["mixture_entropy"], entropy, rtol=1e-4)
    np.testing.assert_allclose(metrics["cluster_mass"], data.size @ mixtures / data.size.sum(), rtol=1e-4)
    if name == "fedrc":
        np.testing.assert_allclose(metrics["label_spread"], -(table * np.log(table)).sum(0), rtol=1e-4)


def test_each_model_has_its_own_optimiser():
    """Clipping is by the norm of one model's gradient, not that of all, and a schedule counts on over the rounds."""
    data = clients()
    optimizer = optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(optax.linear_schedule(LR, 0, 2 * STEPS)))
    training = jfcl.local_training(optimizer, num_steps=STEPS, keep="schedule")
    algorithm = jfcl.fedem(TASK, training, num_clusters=K)
    state = jax.jit(algorithm.init)(KEY, data)
    models, mixtures, num_moves = starts(algorithm, state), np.full((N, K), 1 / K), itertools.count()
    for t in range(2):

        def move(g, t=t):
            rate = 1 - (t * STEPS + next(num_moves) % STEPS) / (2 * STEPS)
            norm = np.sqrt(sum((p**2).sum() for p in g.values()))
            return {name: p * rate * min(1, 0.05 / norm) for name, p in g.items()}

        state, _ = jax.jit(algorithm.step)(KEY, state, data)
        models, mixtures, *_ = em_round(softmax_losses, models, mixtures, data, np.full(N, True), move=move)
        assert_models(jax.tree.map(np.asarray, algorithm.serve(state, None)), models)


@pytest.mark.slow
def test_clients_may_keep_the_momentum_of_each_model():
    data, momentum = clients(), optax.sgd(LR, momentum=0.5)
    algorithm = jfcl.fedem(TASK, jfcl.local_training(momentum, num_steps=1, keep="everything"), num_clusters=K)
    twice = jfcl.fedem(TASK, jfcl.local_training(momentum, num_steps=1), num_clusters=K)
    states = [jfcl.rollout(method, data, key=KEY, num_rounds=2)[0] for method in (algorithm, twice)]
    assert jax.tree.leaves(states[0].client)[0].shape[:2] == (N, K)
    away = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), *(state.params["models"] for state in states))
    assert max(jax.tree.leaves(away)) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedem", "fedrc"])
def test_one_model_is_fedavg(name):
    data, options = clients(), {"cohort": 5, "server_optimizer": optax.sgd(0.5, momentum=0.9)}
    one = jfcl.rollout(jfcl.fedavg(TASK, TRAINING, **options), data, key=KEY, num_rounds=3)[0]
    algorithm = getattr(jfcl, name)(TASK, TRAINING, num_clusters=1, **options)
    state = jfcl.rollout(algorithm, data, key=KEY, num_rounds=3)[0]
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), algorithm.serve(state, None).models, one.params)


@pytest.mark.slow
def test_equal_starts_are_fedavg_with_a_smaller_step():
    data, start = clients(), TASK.init(jax.random.key(9))
    algorithm = jfcl.fedem(TASK, TRAINING, num_clusters=K, init_params=start)
    state = jfcl.rollout(algorithm, data, key=KEY, num_rounds=3)[0]
    slower = jfcl.local_training(optax.sgd(LR / K), num_steps=STEPS)
    one = jfcl.rollout(jfcl.fedavg(TASK, slower, init_params=start), data, key=KEY, num_rounds=3)[0]
    for k in range(K):
        same = jax.tree.map(lambda p, k=k: p[k : k + 1], algorithm.serve(state, None).models)
        jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), same, one.params)


def test_the_shares_of_labels_of_a_model_without_examples_are_equal():
    table = np.float32([[0.75, 0, 3e-8], [0.25, 0, 0]])
    wanted = np.array([[0.75, 0.5, 0.75], [0.25, 0.5, 0.25]])
    np.testing.assert_allclose(label_shares(jnp.asarray(table), 1e-8), wanted, rtol=1e-5)


@pytest.mark.slow
def test_fedrc_with_one_label_is_fedem():
    data = clients()
    data = data._replace(examples=data.examples | {"y": np.full_like(data.examples["y"], 2)})
    served = []
    for make in (jfcl.fedem, jfcl.fedrc):
        algorithm = make(TASK, TRAINING, num_clusters=K)
        state = jfcl.rollout(algorithm, data, key=KEY, num_rounds=3)[0]
        served.append(algorithm.serve(state, None))
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), *served)


MALICIOUS = jfcl.Adversary(jfcl.attacks.UPDATE_ATTACKS["nan"](), np.arange(N) == 2)
DP = {"dp": jfcl.privacy.GaussianDP(clip=1.0, noise=0.1), "weights": "equal"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (jfcl.fedem, DP),
        (jfcl.fedem, {"adversary": MALICIOUS, "aggregator": jfcl.kernels.coordinate_median}),
        (jfcl.fedrc, {"adversary": MALICIOUS}),
        (jfcl.fedsoft, {"adversary": MALICIOUS}),
    ],
    ids=["privacy", "aggregator", "attack on FedRC", "attack on FedSoft"],
)
def test_hostile_and_private_clients(make, options):
    """Updates that are not finite are left out; a client's own part stays with it."""
    algorithm = make(TASK, TRAINING, num_clusters=2, **options)
    state, metrics = jfcl.rollout(algorithm, clients(), key=KEY, num_rounds=2)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(algorithm.serve(state, None).models))
    assert int(metrics["nonfinite"][-1]) == int("adversary" in options)


def fitted(models, data, steps):
    """The mixtures of clients after EM steps on them alone, from equal weights."""
    mixtures = np.full((len(data.size), len(models)), 1 / len(models))
    for i, (x, y) in enumerate(of_clients(data)):
        losses = np.stack([softmax_losses(model, x, y)[0] for model in models], 1)
        for _ in range(steps):
            q = mixtures[i] * np.exp(-losses)
            mixtures[i] = (q / q.sum(1, keepdims=True)).mean(0)
    return mixtures


@pytest.mark.slow_cases("fedrc")
@pytest.mark.parametrize("make", [jfcl.fedem, jfcl.fedrc], ids=["fedem", "fedrc"])
def test_clients_without_a_round_fit_their_mixtures_and_hard_serves_the_largest_weight(make):
    data, new = clients(), clients(seed=5, n=6)
    algorithm, hard = (make(TASK, TRAINING, num_clusters=K, hard=hard) for hard in (False, True))
    mixtures = np.random.default_rng(0).dirichlet(np.ones(K), N).astype(np.float32)
    mixtures[[1, 4]] = 1 / K  # as before a client's first round
    state = jax.jit(algorithm.init)(KEY, data)
    state = state._replace(personal=state.personal | {"mixture": mixtures})

    def served_by(state):
        return [(method.adopt(state, new).to, method.serve(state, data).to) for method in (algorithm, hard)]

    soft, largest = jax.tree.map(np.asarray, jax.jit(served_by)(state))
    served = jax.tree.map(np.asarray, algorithm.serve(state, None))
    models = [float64(jax.tree.map(lambda p, k=k: p[k], served.models)) for k in range(K)]
    of_new, of_all = fitted(models, new, 10), mixtures.copy()
    of_all[[1, 4]] = fitted(models, data, 10)[[1, 4]]
    for want, found, best in zip((of_new, of_all), soft, largest, strict=True):
        np.testing.assert_allclose(found, want, atol=1e-5)
        np.testing.assert_array_equal(best, want.argmax(1))
    np.testing.assert_array_equal(served.to, mixtures)
    np.testing.assert_array_equal(hard.serve(state, None).to, mixtures.argmax(1))


@pytest.mark.slow
@pytest.mark.parametrize("of_population", [False, True], ids=["cohort", "population"])
def test_records_and_results_are_of_the_mixtures_that_clients_are_served(of_population):
    """Also those of clients that have not taken part."""
    data = clients()
    store = jfcl.data.ClientStore.from_clients(data)
    algorithm = jfcl.fedem(TASK, TRAINING, num_clusters=K, cohort=None if of_population else 3)
    people = jfcl.Population(store, cohort=3, test_clients=store, evaluate=range(N)) if of_population else data
    tests = {} if of_population else {"test_clients": data}
    history = jfcl.simulate(algorithm, people, key=KEY, num_rounds=1, **tests)
    weights = history.clients["weights"][0] if of_population else history.served.to
    models = rows(history.served.models, K)
    want = fitted(models, data, 10)
    others = np.abs(weights - want).max(1) > 1e-4  # those that have taken part have done one step
    assert others.sum() <= 3 and np.ptp(want, axis=1).min() > 1e-3
    for i, (x, y) in enumerate(of_clients(data)):
        likelihood = np.exp(-np.stack([softmax_losses(model, x, y)[0] for model in models], 1)) @ weights[i]
        np.testing.assert_allclose(history.clients["loss"][0][i], -np.log(likelihood).mean(), rtol=1e-4)
    np.testing.assert_array_equal(history.clients["cluster"][0], weights.argmax(1))


def soft_round(losses_of, own, centres, shares, data, weights, present, lam):
    """One round of FedSoft: (4) of the clients in `present`, and (5) by `weights` `[N, K]`; and the mean losses."""
    own, mean_losses = list(own), np.where(present, 0.0, np.nan)
    for i, (x, y) in enumerate(of_clients(data)):
        for _ in range(STEPS if present[i] else 0):
            losses, back = losses_of(own[i], x, y)
            mean_losses[i] += losses.mean() / STEPS
            g = gradient(own[i], x, back)
            pull = {n: lam * sum(u * (own[i][n] - c[n]) for u, c in zip(shares[i], centres, strict=True)) for n in g}
            own[i] = {n: own[i][n] - LR * (g[n] + pull[n]) for n in g}
    return own, means(own, weights), mean_losses


def means(own, weights):
    return [{n: sum(w * m[n] for w, m in zip(column, own, strict=True)) for n in own[0]} for column in weights.T]


def estimated(losses_of, centres, data, smoothing):
    found = []
    for x, y in of_clients(data):
        best = np.stack([losses_of(c, x, y)[0] for c in centres], 1).argmin(1)
        found.append(np.bincount(best, minlength=len(centres)) / len(y))
    return np.maximum(found, smoothing)


def rows(tree, count):
    tree = jax.tree.map(np.asarray, tree)
    return [float64(jax.tree.map(lambda p, i=i: p[i], tree)) for i in range(count)]


@pytest.mark.slow_cases("{'selection': 3}", "{}")
@pytest.mark.parametrize("options", [{}, {"estimate_every": 2, "weights": "equal"}, {"selection": 3}], ids=str)
def test_a_round_of_fedsoft_is_that_of_the_papers_equations(options):
    data, lam = clients(), 0.4
    size = np.ones(N) if "weights" in options else data.size.astype(float)
    algorithm = jfcl.fedsoft(TASK, TRAINING, num_clusters=K, lam=lam, smoothing=1e-2, **options)
    state, step = jax.jit(algorithm.init)(KEY, data), jax.jit(algorithm.step)
    for t in range(3):
        own, centres = rows(state.params, N), rows(state.common, K)
        before = np.asarray(state.share)
        state, metrics = jax.tree.map(np.asarray, step(jax.random.fold_in(KEY, t), state, data))
        present = ~np.isnan(metrics["loss"])
        due = t % options.get("estimate_every", 1) == 0
        shares = estimated(softmax_losses, centres, data, 1e-2) if due else before
        np.testing.assert_allclose(state.share, shares, atol=1e-6)
        v = shares * size[:, None] / (shares * size[:, None]).sum(0)
        own, new, losses = soft_round(softmax_losses, own, centres, shares, data, v, present, lam)
        np.testing.assert_allclose(metrics["loss"], losses, rtol=1e-4)
        for found, want in zip(rows(state.params, N), own, strict=True):
            for name in want:
                np.testing.assert_allclose(found[name], want[name], atol=1e-5)
        new_centres = rows(state.common, K)
        if "selection" in options:  # each is the plain mean of three of those that trained
            assert 3 <= present.sum() <= 9
            parts = [list(part) for part in itertools.combinations(np.flatnonzero(present), 3)]
            candidates = means(own, np.array([np.isin(np.arange(N), part) / 3 for part in parts]).T)
            for found in new_centres:
                away = [max(np.abs(found[n] - c[n]).max() for n in found) for c in candidates]
                assert min(away) < 1e-5
        else:
            assert present.all()
            for found, want in zip(new_centres, new, strict=True):
                for name in want:
                    np.testing.assert_allclose(found[name], want[name], atol=1e-5)
        model = 4 * sum(p.size for p in own[0].values())
        assert metrics["bytes_down"] == (N * K if due else present.sum()) * model  # all centres have their mean
        assert metrics["bytes_up"] == present.sum() * model + due * N * K * 4
    served = algorithm.serve(state, None)
    np.testing.assert_array_equal(served.found, np.asarray(state.share).argmax(1))
    assert served.to is None
    away = data._replace(size=np.where(np.arange(N) == 1, 0, data.size))  # with no examples in a round, it keeps its u
    after, _ = step(KEY, state._replace(round=np.int32(4)), away)
    same = np.isclose(after.share, state.share, atol=1e-6).all(axis=1)
    assert same[1] and not same.all()


def test_clients_are_drawn_with_the_probabilities_of_draws_without_replacement():
    data, weights = clients(n=4), np.array([[1, 5], [2, 0], [3, 1], [4, 1]], np.float32)
    keys = jax.random.split(jax.random.key(0), 4000)
    often = np.asarray(jax.jit(jax.vmap(lambda key: drawn(key, jnp.asarray(weights), data, 2)))(keys)).mean(0)
    want = np.zeros_like(often)
    for k in range(2):
        v = weights[:, k] / weights[:, k].sum()
        for a, b in itertools.permutations(range(4), 2):
            if v[a]:
                want[[a, b], k] += v[a] * v[b] / (1 - v[a])
    np.testing.assert_allclose(often, want, atol=0.03)
    np.testing.assert_allclose(often.sum(0), 2, atol=1e-4)


@pytest.mark.slow
def test_fedsoft_without_a_pull_is_local_training_and_with_one_centre_fedprox():
    data, key = clients(), jax.random.key(4)
    alone = jfcl.rollout(jfcl.local_only(TASK, TRAINING), data, key=key, num_rounds=3)[0]
    free = jfcl.rollout(jfcl.fedsoft(TASK, TRAINING, num_clusters=K, lam=0.0), data, key=key, num_rounds=3)[0]
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), free.params, alone.params)
    start = TASK.init(jax.random.key(9))
    prox = jfcl.fedavg(TASK, TRAINING._replace(prox=0.3), init_params=start)
    soft = jfcl.fedsoft(TASK, TRAINING, num_clusters=1, lam=0.3, init_params=start)
    states = [jax.jit(algorithm.step)(KEY, algorithm.init(KEY, data), data)[0] for algorithm in (prox, soft)]
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), states[0].params, states[1].common)


def test_newcomers_of_fedsoft_have_the_centre_of_most_of_their_examples():
    data, new = clients(), clients(seed=5, n=6)
    algorithm = jfcl.fedsoft(TASK, TRAINING, num_clusters=K)
    state = jax.jit(algorithm.init)(KEY, data)
    served = jax.jit(algorithm.adopt)(state, new)
    want = estimated(softmax_losses, rows(state.common, K), new, 1e-4).argmax(1)
    np.testing.assert_array_equal(served.to, want)


METHODS = {
    "fedem": jfcl.fedem(TASK, TRAINING, num_clusters=2),
    "fedrc": jfcl.fedrc(TASK, TRAINING, num_clusters=2),
    "fedsoft": jfcl.fedsoft(TASK, TRAINING, num_clusters=2, selection=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_a_run_resumes_bit_for_bit(name, tmp_path):
    options = {
        "key": KEY,
        "num_rounds": 6,
        "eval_every": 2,
        "test_clients": clients(seed=1),
        "newcomers": clients(seed=2),
    }
    data = clients()
    data = data._replace(examples=jax.tree.map(np.nan_to_num, data.examples))
    whole = jfcl.simulate(METHODS[name], data, out=tmp_path / "whole", **options)
    jfcl.simulate(METHODS[name], data, out=tmp_path / "parts", stop_after=2, **options)
    parts = jfcl.simulate(METHODS[name], data, out=tmp_path / "parts", resume=True, **options)
    jax.tree.map(np.testing.assert_array_equal, whole.state, parts.state)
    assert whole.records == parts.records


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_a_population_of_all_clients_is_the_simulation(name):
    data = clients()
    store, people = jfcl.data.ClientStore.from_clients(data), None
    people = jfcl.Population(store, cohort=N, test_clients=store, evaluate=range(N))
    found = jfcl.simulate(METHODS[name], people, key=KEY, num_rounds=4, eval_every=4)
    few = jfcl.Population(store, cohort=4, test_clients=store, evaluate=range(N))
    some = jfcl.simulate(METHODS[name], few, key=KEY, num_rounds=4, eval_every=4)
    whole = jfcl.simulate(METHODS[name], data, key=KEY, num_rounds=4, eval_every=4, test_clients=data)
    for measure in ("loss", "train_loss", "mixture_entropy", "cluster_mass"):
        np.testing.assert_allclose(found.records[-1][measure], whole.records[-1][measure], rtol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found.served.models, whole.served.models)
    weights = whole.served.to if whole.served.shares is None else whole.served.shares
    np.testing.assert_allclose(found.clients["weights"][0], weights, atol=1e-5)
    assert np.isfinite(some.records[-1]["loss"])
    weights, seen = some.clients["weights"][0], some.rows.seen
    assert 4 <= seen.sum() < N and (np.ptp(weights[seen], axis=1) > 1e-3).any()
    if name != "fedsoft":
        assert np.ptp(weights[~seen], axis=1).min() > 1e-6
        return
    centres, parts = rows(some.state.common, 2), list(of_clients(data))
    shares = estimated(softmax_losses, centres, data, 1e-4)
    np.testing.assert_allclose(weights[~seen], (shares / shares.sum(1, keepdims=True))[~seen], atol=1e-5)
    for i in np.flatnonzero(~seen):  # it is served the centre of most of its examples
        loss = softmax_losses(centres[shares[i].argmax()], *parts[i])[0].mean()
        np.testing.assert_allclose(some.clients["loss"][0][i], loss, rtol=1e-4)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: jfcl.fedem(TASK, TRAINING, num_clusters=0), "num_clusters must be an integer, at least 1"),
        (
            lambda: jfcl.fedem(TASK, TRAINING._replace(optimizer=optax.polyak_sgd()), num_clusters=2),
            "optimizer must be",
        ),
        (
            lambda: jfcl.fedem(TASK, TRAINING, num_clusters=2, server_optimizer=optax.polyak_sgd()),
            "server_optimizer must be",
        ),
        (lambda: jfcl.fedrc(LINE, TRAINING, num_clusters=2), "task must be a classification"),
        (lambda: jfcl.fedrc(TASK, TRAINING, num_clusters=2, floor=0.0), r"floor must be in \(0, 1\)"),
        (lambda: jfcl.fedsoft(TASK, TRAINING, num_clusters=2, lam=-1.0), "lam must be 0 or more"),
        (lambda: jfcl.fedsoft(TASK, TRAINING, num_clusters=2, smoothing=0.0), r"smoothing must be in \(0, 1\]"),
        (lambda: jfcl.fedsoft(TASK, TRAINING, num_clusters=2, selection=0), "selection must be"),
    ],
)
def test_what_has_no_meaning_is_refused_by_the_factory(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("shape", [(), (1,)])
def test_fedrc_refuses_one_output_for_two_labels(shape):
    task = jfcl.models.task(
        lambda key: {"w": jax.random.normal(key, (D, *shape))},
        lambda p, x: x @ p["w"],
        cost=lambda z, batch: optax.sigmoid_binary_cross_entropy(z.reshape(-1), batch["y"].astype(z.dtype)),
        correct=lambda z, batch: ((z.reshape(-1) > 0) == batch["y"]).astype(jnp.float32),
        mix=lambda z, weights: jnp.tensordot(weights, z, 1),
    )
    with pytest.raises(ValueError, match="outputs for a batch must be"):
        jax.eval_shape(jfcl.fedrc(task, TRAINING, num_clusters=2).init, KEY, clients())


def without_labels():
    data = clients()
    return data._replace(examples={"x": data.examples["x"]})


PAIR = clients()._replace(examples=tuple(clients().examples.values()))
OF_PAIRS = jfcl.Task(TASK.init, TASK.apply, lambda z, pair: TASK.cost(z, {"y": pair[1]}), mix=TASK.mix)


@pytest.mark.parametrize(
    ("algorithm", "data", "words"),
    [
        (jfcl.fedem(OF_PAIRS._replace(inputs=lambda pair: pair[0]), TRAINING, num_clusters=2), PAIR, "must be a dict"),
        (
            jfcl.fedem(TASK._replace(mix=None), TRAINING, num_clusters=2),
            clients(),
            "models of this task cannot be mixed",
        ),
        (METHODS["fedrc"], without_labels(), "'y'"),
        (
            jfcl.fedsoft(TASK, TRAINING, num_clusters=2, selection=9),
            clients(),
            "selection must be at most the 8 clients",
        ),
    ],
    ids=["pairs", "mix", "labels", "selection"],
)
def test_what_does_not_fit_the_clients_is_refused_before_a_round(algorithm, data, words):
    with pytest.raises(ValueError, match=words):
        jfcl.simulate(algorithm, data, key=KEY, num_rounds=1)


def test_personal_layers_are_no_option_of_mixtures():
    with pytest.raises(TypeError, match="fedem has no argument 'personal'"):
        jfcl.fedem(TASK, TRAINING, num_clusters=2, personal=lambda path: True)


@pytest.mark.slow
def test_an_augmentation_sees_the_users_arrays_alone():
    data = clients()

    def doubled(key, batch):
        assert set(batch) == {"x", "y"}
        return {"x": 2 * batch["x"], "y": batch["y"]}

    twice = data._replace(examples=data.examples | {"x": 2 * data.examples["x"]})
    algorithm = jfcl.fedem(TASK, TRAINING._replace(augment=doubled), num_clusters=1)
    state = jax.jit(algorithm.step)(KEY, algorithm.init(KEY, data), data)[0]
    one = jfcl.fedavg(TASK, TRAINING)
    want = jax.jit(one.step)(KEY, one.init(KEY, data), twice)[0]
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), algorithm.serve(state, None).models, want.params)
