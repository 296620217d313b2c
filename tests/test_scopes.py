"""Scopes of parameters and models that train otherwise than they are evaluated, against loops in NumPy."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiled import rollout
from flax import nnx
from padded_clients import padded
from small_network import EPS, KEPT, NORMAL, PLAIN, C, D, H, M, N

import jfcl
from jfcl.core.parameters import divided, joined, part_like, trained_part
from jfcl.simulation.resident import with_padding, without_padding

LR, STEPS = 0.2, 3


def data(seed=0, sizes=(6, 4, 6, 3)):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(N, M, D)).astype(np.float32) + np.arange(N)[:, None, None]
    return jfcl.Clients({"x": x, "y": rng.integers(0, C, (N, M))}, np.asarray(sizes, np.int32))


TRAINING = jfcl.local_training(optax.sgd(LR), num_steps=STEPS)


# The oracle: one client's gradient descent, in float64, written from the equations of the two layers.


def flat(tree):
    """Returns a model as `{"Dense_0/kernel": array, ...}` in float64."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(part.key for part in path): np.asarray(leaf, np.float64) for path, leaf in leaves}


def gradient(p, x, y):
    """Returns the gradient of the mean cross-entropy, and the statistics of the batch (None without them)."""
    a = x @ p["Dense_0/kernel"] + p["Dense_0/bias"]
    normal = "BatchNorm_0/scale" in p
    if normal:
        mean, var = a.mean(0), a.var(0)
        z = (a - mean) / np.sqrt(var + EPS)
        u = z * p["BatchNorm_0/scale"] + p["BatchNorm_0/bias"]
    else:
        u = a
    h = np.tanh(u)
    o = h @ p["Dense_1/kernel"] + p["Dense_1/bias"]
    e = np.exp(o - o.max(1, keepdims=True))
    d = (e / e.sum(1, keepdims=True) - np.eye(C)[y]) / len(x)
    g = {"Dense_1/kernel": h.T @ d, "Dense_1/bias": d.sum(0)}
    d = (d @ p["Dense_1/kernel"].T) * (1 - h**2)
    if normal:
        g |= {"BatchNorm_0/scale": (d * z).sum(0), "BatchNorm_0/bias": d.sum(0)}
        d = d * p["BatchNorm_0/scale"]
        d = (d - d.mean(0) - z * (d * z).mean(0)) / np.sqrt(var + EPS)
    g |= {"Dense_0/kernel": x.T @ d, "Dense_0/bias": d.sum(0)}
    return g, (mean, var) if normal else None


def descend(p, x, y, steps, moves=lambda name: True):
    """Returns the model after `steps` of gradient descent on the parameters that move."""
    p = dict(p)
    for _ in range(steps):
        g, statistics = gradient(p, x, y)
        if statistics is not None:
            for name, new in zip(("mean", "var"), statistics, strict=True):
                if moves(f"BatchNorm_0/{name}"):
                    p[f"BatchNorm_0/{name}"] = KEPT * p[f"BatchNorm_0/{name}"] + (1 - KEPT) * new
        for name in g:
            if moves(name):
                p[name] = p[name] - LR * g[name]
    return p


def loop(task, personal, rounds=2, head_steps=None):
    """Returns the common parameters, and each client's own, after rounds of FedAvg on those that are not personal."""
    clients = data()
    start = flat(task.init(jax.random.split(jax.random.key(0), 1)[0]))
    common = {name: x for name, x in start.items() if not personal(name)}
    own = [{name: x for name, x in start.items() if personal(name)} for _ in range(N)]
    for _ in range(rounds):
        trained = []
        for i in range(N):
            x, y = (np.asarray(clients.examples[k][i][: clients.size[i]]) for k in "xy")
            model, steps = {**common, **own[i]}, STEPS
            if head_steps is not None:
                model = descend(model, x.astype(np.float64), y, head_steps, personal)
                model = descend(model, x.astype(np.float64), y, steps, lambda name: not personal(name))
            else:
                model = descend(model, x.astype(np.float64), y, steps)
            trained.append(model)
            own[i] = {name: model[name] for name in own[i]}
        weight = clients.size / clients.size.sum()
        common = {name: sum(w * t[name] for w, t in zip(weight, trained, strict=True)) for name in common}
    return common, own


def is_head(name):
    return name.startswith("Dense_1")


@pytest.mark.slow_cases("fedavg of statistics", "fedper of statistics", "lg_fedavg")
@pytest.mark.parametrize(
    ("make", "task", "personal", "head_steps"),
    [
        (jfcl.fedavg, NORMAL, lambda name: False, None),
        (jfcl.fedper, PLAIN, is_head, None),
        (jfcl.fedper, NORMAL, is_head, None),
        (partial(jfcl.fedrep, personal_steps=2), PLAIN, is_head, 2),
        (jfcl.lg_fedavg, PLAIN, lambda name: not is_head(name), None),
        (jfcl.fedbn, NORMAL, lambda name: "BatchNorm" in name, None),
    ],
    ids=["fedavg of statistics", "fedper", "fedper of statistics", "fedrep", "lg_fedavg", "fedbn"],
)
def test_methods_are_their_loops(make, task, personal, head_steps):
    clients, algorithm = data(), make(task, TRAINING)
    state = jax.jit(algorithm.init)(jax.random.key(0), clients)
    for t in range(2):
        state, metrics = jax.jit(algorithm.step)(jax.random.key(t), state, clients)
    common, own = loop(task, personal, head_steps=head_steps)
    got = flat(state.params)
    assert got.keys() == common.keys()
    for name, wanted in common.items():
        np.testing.assert_allclose(got[name][0], wanted, rtol=1e-5, atol=1e-5, err_msg=name)
    kept = flat(state.personal)
    for i in range(N):
        for name, wanted in own[i].items():
            np.testing.assert_allclose(kept[name][i], wanted, rtol=1e-5, atol=1e-5, err_msg=name)
    assert metrics["bytes_up"] == N * 4 * sum(x.size for x in common.values()), "personal parameters are never sent"
    assert metrics["client_steps"] == N * (STEPS + (head_steps or 0))


def test_models_are_compared_under_a_personal_first_dense_layer():
    """The comparison multiplies the first layers of all models at once where they are not the client's own."""
    clients, task = data(), jfcl.models.classification(jfcl.models.MLP(C), (D,), C)
    options = {"num_clusters": 2, "personal": lambda path: path.startswith("Dense_0"), "client_axis": jax.vmap}
    algorithm = jfcl.ifca(task, TRAINING, **options)
    state = algorithm.init(jax.random.key(0), clients)
    new, _ = jax.jit(algorithm.step)(jax.random.key(1), state, clients)
    own, sent = flat(state.personal), flat(state.params)
    for i, size in enumerate(clients.size):
        x, y = clients.examples["x"][i, :size], clients.examples["y"][i, :size]
        h = np.maximum(x @ own["Dense_0/kernel"][i] + own["Dense_0/bias"][i], 0)
        outputs = [h @ sent["Dense_1/kernel"][k] + sent["Dense_1/bias"][k] for k in range(2)]
        losses = [np.mean(np.log(np.exp(o).sum(1)) - o[np.arange(size), y]) for o in outputs]
        assert new.cluster[i] == np.argmin(losses)


@pytest.mark.slow
def test_steps_of_personal_parts_count_in_first_updates_too():
    options = {"num_clusters": 2, "personal": is_head, "personal_steps": 3, "pretrain_steps": 4, "pretrain_clients": 2}
    algorithm = jfcl.fedgroup(PLAIN, TRAINING, **options)
    _, metrics = rollout(algorithm, data(), key=jax.random.key(1), num_rounds=1)
    assert metrics["client_steps"] == N * (STEPS + 3) + N * (4 + 3)  # two are pretrained, the others start cold


@pytest.mark.parametrize("method", ["fedgroup", "pacfl"])
def test_newcomers_get_the_mean_of_the_clients_personal_parameters(method):
    algorithm = getattr(jfcl, method)(PLAIN, TRAINING, num_clusters=1, personal=is_head)
    state, _ = rollout(algorithm, padded(data()), key=jax.random.key(1), num_rounds=1)
    saved = jax.eval_shape(algorithm.init, jax.random.key(0), data())
    state = with_padding(without_padding(state, saved), state)  # as of a run that is resumed
    adopted, own = flat(jax.jit(algorithm.adopt)(state, data()).personal), flat(state.personal)
    for name, rows in adopted.items():
        np.testing.assert_allclose(rows, np.broadcast_to(own[name][:N].mean(axis=0), rows.shape), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["one_shot", "flhc"])
def test_personal_parameters_are_not_sent_before_the_clustering(method):
    """With one cluster. One-shot: two rounds alone, then means. FL+HC: two rounds of FedRep, then an update of each."""
    start = PLAIN.init(jax.random.split(jax.random.key(0), 1)[0])
    options = {"num_clusters": 1, "personal": is_head, "init_params": start}
    options |= {"local_rounds": 2} if method == "one_shot" else {"rounds_before": 2, "personal_steps": 3}
    state = getattr(jfcl, method)(PLAIN, TRAINING, **options).init(jax.random.key(1), data())
    clients, trained = data(), []
    if method == "flhc":
        common, trained = loop(PLAIN, is_head, head_steps=3)[0], loop(PLAIN, is_head, rounds=3, head_steps=3)[1]
    else:
        for i in range(N):
            x, y = (np.asarray(clients.examples[k][i][: clients.size[i]]) for k in "xy")
            trained.append(descend(flat(start), x.astype(np.float64), y, 2 * STEPS))
        weight, common = clients.size / clients.size.sum(), flat(start)
        common = {name: sum(w * t[name] for w, t in zip(weight, trained, strict=True)) for name in common}
    got, kept = flat(state.params), flat(state.personal)
    assert got.keys() == {name for name in common if not is_head(name)}
    assert kept.keys() == set(filter(is_head, trained[0]))
    for name, model in got.items():
        np.testing.assert_allclose(model[0], common[name], rtol=1e-5, atol=1e-5, err_msg=name)
    for name, rows in kept.items():
        np.testing.assert_allclose(rows, [t[name] for t in trained], rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_one_shot_clusters_begin_with_one_shared_part():
    algorithm = jfcl.one_shot(PLAIN, TRAINING, num_clusters=2, local_rounds=1, shared=lambda name: not is_head(name))
    model = flat(algorithm.init(jax.random.key(0), data()).params)
    whole = flat(jfcl.one_shot(PLAIN, TRAINING, num_clusters=1, local_rounds=1).init(jax.random.key(0), data()).params)
    for name, rows in model.items():
        if is_head(name):
            assert not np.allclose(rows[0], rows[1])
        else:
            np.testing.assert_allclose(rows, np.repeat(whole[name], 2, axis=0), rtol=1e-5, atol=1e-6, err_msg=name)


def test_the_schedule_of_a_personal_part_goes_on():
    """The learning rate of the head follows the rounds too: with one of 0 from the second round on, nothing moves."""
    falls = optax.sgd(lambda step: jnp.where(step < STEPS, LR, 0.0))
    training = jfcl.local_training(falls, num_steps=STEPS, keep="schedule")
    algorithm = jfcl.fedrep(PLAIN, training, personal_steps=2)
    state = jax.jit(algorithm.init)(jax.random.key(0), data())
    first, _ = jax.jit(algorithm.step)(jax.random.key(0), state, data())
    second, _ = jax.jit(algorithm.step)(jax.random.key(1), first, data())
    assert not np.array_equal(flat(state.personal)["Dense_1/kernel"], flat(first.personal)["Dense_1/kernel"])
    jax.tree.map(np.testing.assert_array_equal, (second.params, second.personal), (first.params, first.personal))


@pytest.mark.slow
def test_the_evaluation_uses_each_clients_own_parameters():
    clients, algorithm = data(), jfcl.fedper(PLAIN, TRAINING)
    history = jfcl.simulate(algorithm, clients, key=jax.random.key(0), num_rounds=2, test_clients=clients)
    assert history.clients.keys() == {"cluster", "model", "loss", "accuracy", "examples"}
    assert history.clients["examples"].tolist() == [clients.size.tolist()], "those of training"
    params, kept, losses = flat(history.state.params), flat(history.state.personal), []
    for i in range(N):
        x, y = (np.asarray(clients.examples[k][i][: clients.size[i]]) for k in "xy")
        model = {name: a[0] for name, a in params.items()} | {name: a[i] for name, a in kept.items()}
        h = np.tanh(x @ model["Dense_0/kernel"] + model["Dense_0/bias"])
        o = h @ model["Dense_1/kernel"] + model["Dense_1/bias"]
        losses.append((np.log(np.exp(o).sum(1)) - o[np.arange(len(y)), y]).mean())
    np.testing.assert_allclose(history.clients["loss"].ravel(), losses, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"cohort": 3}, {"similarity": "gradients"}, {"shared": lambda path: path == "Dense_0/bias"}],
    ids=["plain", "cohort", "gradients", "shared"],
)
def test_cfl_compares_what_is_sent_and_trained(options):
    """Statistics of very different scale do not change a split; personal parameters are not in the updates."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(N, M, D)).astype(np.float32)
    y = (x[:, :, 0] > 0).astype(np.int32)
    y[2:] = 1 - y[2:]
    x[::2] = x[::2] + np.float32([50.0, 0, 0])  # shifts the statistics of clients 0 and 2, and little else
    clients = jfcl.Clients({"x": x, "y": y}, np.full(N, M, np.int32))
    options = {"eps_1": np.inf, "eps_2": 1e-6, "relative": False, "max_clusters": 2, "tree_dim": 8, **options}
    algorithm = jfcl.cfl(NORMAL, TRAINING, personal=lambda path: path == "Dense_1/bias", **options)
    state = algorithm.init(jax.random.key(0), clients)
    state, _ = jax.jit(algorithm.step)(jax.random.key(1), state, clients)
    trained = sum(x.size for name, x in flat(NORMAL.init(jax.random.key(0))).items() if "mean" not in name)
    lengths = [d.shape[1] for d in state.sides.direction]
    assert sum(lengths) == trained - H - C, "neither statistics nor personal parameters are compared"
    if not {"cohort", "similarity"} & set(options):
        assert state.cluster.tolist() == [0, 0, 1, 1], "clients with opposite labels part, whatever their statistics"
    if "shared" in options:
        bias = np.asarray(state.params["Dense_0"]["bias"])
        np.testing.assert_array_equal(bias[0], bias[1])
        assert (
            np.abs(np.asarray(state.params["Dense_0"]["kernel"][0] - state.params["Dense_0"]["kernel"][1])).max() > 1e-3
        )


@pytest.mark.slow
def test_robust_aggregation_leaves_statistics_to_the_mean():
    clients = data(sizes=(6, 6, 6, 6))
    make = partial(jfcl.fedavg, NORMAL, TRAINING)
    plain, robust = make(), make(aggregator=jfcl.kernels.coordinate_median)
    states = []
    for algorithm in (plain, robust):
        state = algorithm.init(jax.random.key(0), clients)
        states.append(jax.jit(algorithm.step)(jax.random.key(1), state, clients)[0].params)
    for name in ("mean", "var"):
        first, second = (np.asarray(p["BatchNorm_0"][name]) for p in states)
        np.testing.assert_allclose(first, second, rtol=1e-5)
    kernels = [np.asarray(p["Dense_0"]["kernel"]) for p in states]
    assert np.abs(kernels[0] - kernels[1]).max() > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("shared", [None, lambda name: name.startswith("BatchNorm")], ids=["own", "shared"])
def test_gradient_averaging_moves_statistics_to_their_mean(shared):
    """A step is divided by all clients, and so shorter; statistics are means, as with model averaging."""
    clients, states = data(), []
    options = {"num_clusters": 2, "cohort": 2, "shared": shared, "weights": "size"}
    for average in ("models", "gradients"):
        algorithm = jfcl.ifca(NORMAL, TRAINING._replace(num_steps=1), average=average, **options)
        state = algorithm.init(jax.random.key(3), clients)
        states.append((state, jax.jit(algorithm.step)(jax.random.key(1), state, clients)[0]))
    (start, models), (_, gradients) = (tuple(flat(s.params) for s in pair) for pair in states)
    for name, x in models.items():
        if name.endswith(("mean", "var")):
            np.testing.assert_allclose(gradients[name], x, rtol=1e-5, err_msg=name)
            assert np.abs(x - start[name]).max() > 0.1
    moved, shorter = (np.linalg.norm(p["Dense_0/kernel"] - start["Dense_0/kernel"]) for p in (models, gradients))
    assert 0 < shorter < 0.8 * moved


def test_no_optimizer_moves_statistics():
    """Weight decay shrinks parameters, and the server hardly steps; statistics follow the batches alone."""
    clients = data()
    decay = jfcl.local_training(optax.chain(optax.add_decayed_weights(0.5), optax.sgd(1e-9)), num_steps=STEPS)
    slow = jfcl.fedavg(NORMAL, decay, server_optimizer=optax.sgd(1e-9))
    state = jax.jit(slow.init)(jax.random.key(0), clients)
    start = flat(state.params)
    got = flat(jax.jit(slow.step)(jax.random.key(1), state, clients)[0].params)
    p = {name: x[0] for name, x in start.items()}
    weight = clients.size / clients.size.sum()
    for name in ("BatchNorm_0/mean", "BatchNorm_0/var"):
        each = []
        for i in range(N):
            x = np.asarray(clients.examples["x"][i][: clients.size[i]], np.float64)
            a = x @ p["Dense_0/kernel"] + p["Dense_0/bias"]
            new, value = (a.mean(0) if "mean" in name else a.var(0)), p[name]
            for _ in range(STEPS):
                value = KEPT * value + (1 - KEPT) * new
            each.append(value)
        np.testing.assert_allclose(got[name][0], weight @ np.stack(each), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got["Dense_0/kernel"], start["Dense_0/kernel"], atol=1e-6)


class Dropping(nn.Module):
    @nn.compact
    def __call__(self, x, deterministic: bool):
        return nn.Dense(C)(nn.Dropout(0.5, deterministic=deterministic)(nn.Dense(40)(x)))


class Nnx(nnx.Module):
    def __init__(self, *, rngs):
        self.first = nnx.Linear(D, H, rngs=rngs)
        self.norm = nnx.BatchNorm(H, momentum=KEPT, epsilon=EPS, rngs=rngs)
        self.drop = nnx.Dropout(0.0, rngs=rngs)
        self.last = nnx.Linear(H, C, rngs=rngs)

    def __call__(self, x):
        return self.last(self.drop(jnp.tanh(self.norm(self.first(x)))))


@pytest.mark.slow
def test_dropout_depends_on_client_round_and_step_alone():
    """A client alone, or among others, with padding or without, draws the same; evaluation draws nothing."""
    task = jfcl.models.classification(Dropping(), (D,), C)
    clients = data()._replace(id=np.arange(N, dtype=np.int32))
    algorithm = jfcl.local_only(task, TRAINING)
    step = lambda c: algorithm.step(jax.random.key(1), algorithm.init(jax.random.key(0), c), c)[0].params  # noqa: E731
    every = step(clients)
    alone = step(jax.tree.map(lambda x: x[2:3], clients))
    for a, b in zip(jax.tree.leaves(every), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(a[2], b[0], rtol=1e-6)
    params = task.init(jax.random.key(3))
    batch = {"x": clients.examples["x"][0], "y": clients.examples["y"][0]}
    real = jnp.ones(M, bool)
    draws = [task.train_loss(jax.random.key(k), params, batch, real)[0] for k in (0, 0, 1)]
    np.testing.assert_array_equal(draws[0], draws[1])
    assert np.abs(np.asarray(draws[0] - draws[2])).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("form", ["class", "partial", "module"])
def test_nnx_modules_train_as_linen_ones(form):
    module = {"class": Nnx, "partial": partial(Nnx)}.get(form) or Nnx(rngs=nnx.Rngs(1))
    task = jfcl.models.classification(module, (D,), C)
    params = task.init(jax.random.key(0))
    names = {"first": "Dense_0", "norm": "BatchNorm_0", "last": "Dense_1"}
    linen = {names[layer]: tree for layer, tree in params.items()}
    clients = data()
    batch = {k: v[1] for k, v in clients.examples.items()}
    real = np.arange(M) < clients.size[1]
    np.testing.assert_allclose(task.loss(params, batch), NORMAL.loss(linen, batch), rtol=1e-5)
    key = jax.random.key(5)
    (ours, new), (wanted, like) = task.train_loss(key, params, batch, real), NORMAL.train_loss(key, linen, batch, real)
    np.testing.assert_allclose(ours[real], wanted[real], rtol=1e-5)
    np.testing.assert_allclose(new["norm"]["var"], like["BatchNorm_0"]["var"], rtol=1e-5)
    assert {n for n in jfcl.models.parameter_paths(task) if task.statistics(n)} == {"norm/mean", "norm/var"}
    state, _ = jfcl.rollout(jfcl.fedbn(task, TRAINING), clients, key=key, num_rounds=2)
    assert state.personal["norm"]["mean"].shape == (N, H)


class Places(nn.Module):
    """Batch normalisation of every place of an example, `[B, L, D]`, as rows of its own."""

    @nn.compact
    def __call__(self, x, train: bool):
        rows = nn.BatchNorm(use_running_average=not train, momentum=KEPT)(x=x.reshape(-1, D))
        return nn.Dense(C)(rows.reshape(len(x), -1))


class OwnNorm(nnx.BatchNorm):
    def __call__(self, x):
        return super().__call__(x)


class PlacesNnx(nnx.Module):
    def __init__(self, *, rngs):
        self.norm, self.last = OwnNorm(D, momentum=KEPT, rngs=rngs), nnx.Linear(2 * D, C, rngs=rngs)

    def __call__(self, x):
        return self.last(self.norm(x.reshape(-1, D)).reshape(len(x), -1))


@pytest.mark.slow_cases("linen")
@pytest.mark.parametrize(("net", "layer"), [(Places(), "BatchNorm_0"), (PlacesNnx, "norm")], ids=["linen", "nnx"])
def test_padding_is_left_out_of_statistics_of_places(net, layer):
    task = jfcl.models.classification(net, (2, D), C)
    params, real = jax.jit(task.init)(jax.random.key(0)), np.arange(M) < 4
    x = np.random.default_rng(0).normal(size=(M, 2, D)).astype(np.float32)
    _, new = jax.jit(task.train_loss)(jax.random.key(1), params, {"x": x, "y": np.zeros(M, np.int32)}, real)
    rows = x[:4].astype(np.float64).reshape(-1, D)
    np.testing.assert_allclose(new[layer]["mean"], (1 - KEPT) * rows.mean(axis=0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(new[layer]["var"], KEPT + (1 - KEPT) * rows.var(axis=0), rtol=1e-4)


def test_parts_of_a_model():
    tree = {"a": {"x": 1, "y": 2}, "b": 3}
    rest, own = divided(lambda path: path.startswith("a"), tree)
    assert (rest, own) == ({"a": {"x": None, "y": None}, "b": 3}, {"a": {"x": 1, "y": 2}, "b": None})
    assert joined(rest, own) == tree == joined(tree, ()) and part_like(own, {"a": {"x": 5, "y": 6}, "b": 7}) == {
        "a": {"x": 5, "y": 6},
        "b": None,
    }
    assert divided(None, tree) == (tree, ()) and trained_part(PLAIN, tree) is tree


class NoFlag(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(C)(nn.Dropout(0.5)(x))


class Named(nn.Module):
    @nn.compact
    def __call__(self, x, learning: bool):
        return nn.Dense(C)(nn.Dropout(0.5, deterministic=not learning)(x))


class Counter(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        self.variable("count", "seen", lambda: jnp.zeros((), jnp.int32))
        return nn.Dense(C)(x)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jfcl.models.classification(NoFlag(), (D,), C), "NoFlag behaves differently.*training_argument"),
        (
            lambda: jfcl.models.classification(Named(), (D,), C, training_argument="learns"),
            "training_argument must be an argument of Named: x, learning, got 'learns'",
        ),
        (lambda: jfcl.models.classification(Counter(), (D,), C), "counters cannot be averaged"),
        (lambda: jfcl.models.classification(3, (D,), C), "module must be a flax.linen module, a flax.nnx module"),
        (
            lambda: jfcl.fedavg(PLAIN, TRAINING, personal=lambda p: "x" in p),
            "holds for no parameter; .* some of Dense_0/bias",
        ),
        (
            lambda: jfcl.ifca(PLAIN, TRAINING, num_clusters=2, shared=lambda p: "x" in p),
            "shared holds for no parameter; .* some of Dense_0/bias",
        ),
        (lambda: jfcl.ifca(PLAIN, TRAINING, num_clusters=2, shared="Dense_0"), "shared must be a function of a param"),
        (
            lambda: jfcl.fedavg(PLAIN, TRAINING, personal=lambda p: True),
            "holds for all parameters; .* some of Dense_0/bias",
        ),
        (
            lambda: jfcl.fedavg(NORMAL, TRAINING, personal=lambda p: "mean" not in p and "var" not in p),
            "holds for all parameters",
        ),
        (lambda: jfcl.fedavg(PLAIN, TRAINING, personal_steps=2), "personal_steps must be left out without personal"),
        (lambda: jfcl.fedavg(PLAIN, TRAINING, personal="Dense_1"), "personal must be a function"),
        (
            lambda: jfcl.ifca(PLAIN, TRAINING, num_clusters=2, personal=is_head, shared=is_head),
            "shared or personal, not both",
        ),
        (lambda: jfcl.fedbn(PLAIN, TRAINING), "needs a model with batch normalisation"),
        (
            lambda: jfcl.fedper(jfcl.models.classification(Nnx, (D,), C), TRAINING),
            "the last dense layer of this task's model is not known",
        ),
        (
            lambda: jfcl.fedrep(jfcl.models.classification(jfcl.models.Linear(C), (D,), C), TRAINING),
            "no body before its last dense layer: Dense_0 is its only one",
        ),
        (lambda: jfcl.cfl(NORMAL, TRAINING, privacy="sign"), "privacy must be left out where"),
        (
            lambda: jfcl.models.task(PLAIN.init, PLAIN.apply, kind="classification", statistics=is_head),
            "statistics must be left out without train",
        ),
    ],
)
def test_refuses(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_named_flag_is_used():
    task = jfcl.models.classification(Named(), (D,), C, training_argument="learning")
    assert task.train_loss is not None and task.statistics is None
