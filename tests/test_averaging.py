"""FedAvg, the oracle, local training and IFCA against loops in float64, written from the papers."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiled import rollout
from hypothesis import given
from hypothesis import strategies as st
from linear_clients import linear, trained
from padded_clients import padded

import jfcl
from jfcl.core import Clients, Task, client_keys
from jfcl.mapping.axis import chunked
from jfcl.methods.averaging import Averaging, averaging
from jfcl.methods.round import select_cohort
from jfcl.training.local import draw_batch
from jfcl.training.losses import lowest_loss

D = 3
LINEAR = linear(D)


def regression(seed=0, n=6, m=5):
    rng = np.random.default_rng(seed)
    size = rng.integers(1, m + 1, n).astype(np.int32)
    x = rng.normal(size=(n, m, D)).astype(np.float32)
    truth = rng.normal(size=(2, D))[np.arange(n) % 2]
    y = (np.einsum("nmd,nd->nm", x, truth) + 0.01 * rng.normal(size=(n, m))).astype(np.float32)
    return Clients({"x": x, "y": y}, size)


def loss64(w, x, y):
    return 0.5 * np.mean((x @ w - y) ** 2)


def local64(w, x, y, lr, steps):
    for _ in range(steps):
        w = w - lr * x.T @ (x @ w - y) / len(y)
    return w


def rows(clients):
    for x, y, s in zip(clients.examples["x"], clients.examples["y"], clients.size, strict=True):
        yield x[:s].astype(np.float64), y[:s].astype(np.float64), int(s)


def algorithm2(models, clients, *, lr, steps, option, weights, rounds):
    """IFCA's Algorithm 2, one client after another. With one model it is FedAvg."""
    models = np.array(models, np.float64)
    for _ in range(rounds):
        chosen, results, counts = [], [], []
        for x, y, size in rows(clients):
            j = int(np.argmin([loss64(w, x, y) for w in models]))
            chosen.append(j)
            counts.append(size if weights == "size" else 1)
            results.append(local64(models[j], x, y, lr, steps))
        new = models.copy()
        for j in range(len(models)):
            mine = [i for i, c in enumerate(chosen) if c == j]
            if mine and option == "models":
                new[j] = sum(counts[i] * results[i] for i in mine) / sum(counts[i] for i in mine)
            elif mine:  # (gamma / m) * sum of gradients; a step of gradient descent moves by -gamma * gradient
                new[j] = models[j] + sum(counts[i] * (results[i] - models[j]) for i in mine) / sum(counts)
        models = new
    return models, chosen


@cache
def compiled_ifca(num_clusters, steps, option, weights):
    training = jfcl.local_training(optax.sgd(0.1), num_steps=steps)

    @jax.jit
    def run(start, clients):
        options = {"num_clusters": num_clusters, "average": option, "weights": weights, "init_params": {"w": start}}
        return jfcl.rollout(jfcl.ifca(LINEAR, training, **options), clients, key=jax.random.key(0), num_rounds=3)[0]

    return run


@pytest.mark.slow_cases("gradients-1-size", "models-*")
@pytest.mark.parametrize("weights", ["equal", "size"])
@pytest.mark.parametrize(("option", "steps"), [("models", 1), ("models", 4), ("gradients", 1)])
@given(seed=st.integers(0, 50), num_clusters=st.sampled_from([2, 4]))
def test_ifca_is_algorithm_2(option, steps, weights, seed, num_clusters):
    clients = regression(seed)
    start = np.random.default_rng(seed + 1).normal(size=(num_clusters, D)).astype(np.float32)
    want, chosen = algorithm2(start, clients, lr=0.1, steps=steps, option=option, weights=weights, rounds=3)
    state = compiled_ifca(num_clusters, steps, option, weights)(start, clients)
    np.testing.assert_allclose(state.params["w"], want, rtol=2e-3, atol=2e-4)
    assert state.cluster.tolist() == chosen


@pytest.mark.slow
def test_identities_are_estimated_on_the_batch_that_is_trained_on():
    """With as many examples for both: pick and gradient are those of one batch, in float64 by hand."""
    clients, key = regression(4), jax.random.key(7)
    start = np.random.default_rng(0).normal(size=(2, D)).astype(np.float32)
    training = jfcl.local_training(optax.sgd(0.1), num_steps=1, batch_size=2)
    algorithm = jfcl.ifca(LINEAR, training, num_clusters=2, identity_batch=2, init_params={"w": start})
    state, _ = jax.jit(algorithm.step)(key, algorithm.init(jax.random.key(0), clients), clients)
    keys = client_keys(jax.random.split(key)[1], clients)
    chosen, models = [], []
    for i in range(len(clients.size)):
        own = {name: jnp.asarray(value[i]) for name, value in clients.examples.items()}
        batch, real = draw_batch(LINEAR, training, keys[i], own, jnp.asarray(clients.size[i]))
        x, y = (np.asarray(batch[name], np.float64)[np.asarray(real)] for name in "xy")
        chosen.append(int(np.argmin([loss64(w, x, y) for w in start])))
        models.append(local64(start[chosen[-1]].astype(np.float64), x, y, 0.1, 1))
    assert state.cluster.tolist() == chosen != lowest_loss(LINEAR, {"w": start}, clients, client_axis=jax.vmap).tolist()
    want = [np.mean([m for m, c in zip(models, chosen, strict=True) if c == k], axis=0) for k in (0, 1)]
    np.testing.assert_allclose(state.params["w"], want, rtol=1e-4, atol=1e-5)


@pytest.mark.slow_cases("2")
@pytest.mark.parametrize("stable_rounds", [None, 2])
def test_an_identity_batch_of_everything_is_everything(stable_rounds):
    clients = regression(5)
    start = np.random.default_rng(0).normal(size=(2, D)).astype(np.float32)
    want, chosen = algorithm2(start, clients, lr=0.1, steps=3, option="models", weights="equal", rounds=5)
    training = jfcl.local_training(optax.sgd(0.1), num_steps=3)
    options = {"stable_rounds": stable_rounds, "init_params": {"w": start}}
    algorithm = jfcl.ifca(LINEAR, training, num_clusters=2, identity_batch=50, **options)
    state, _ = rollout(algorithm, clients, key=jax.random.key(0), num_rounds=5)
    np.testing.assert_allclose(state.params["w"], want, rtol=1e-4, atol=1e-5)
    assert state.cluster.tolist() == chosen


@pytest.mark.slow
@pytest.mark.parametrize("stable_rounds", [None, 2])
@pytest.mark.parametrize("identity_batch", [None, 3])
def test_an_augmentation_that_changes_nothing_changes_no_choice(identity_batch, stable_rounds):
    clients, states = regression(5), []
    training = jfcl.local_training(optax.sgd(0.1), num_steps=3, augment=lambda key, batch: batch)
    for identity_augment in (False, True):
        options = {"stable_rounds": stable_rounds, "identity_batch": identity_batch}
        algorithm = jfcl.ifca(LINEAR, training, num_clusters=2, identity_augment=identity_augment, **options)
        states.append(jfcl.rollout(algorithm, clients, key=jax.random.key(0), num_rounds=5)[0])
    assert (states[0].cluster == states[1].cluster).all()
    np.testing.assert_allclose(states[1].params["w"], states[0].params["w"], rtol=1e-5, atol=1e-6)


@pytest.mark.slow_cases("0.0", "1000.0")
@pytest.mark.parametrize("padding", [0.0, 1e3, np.nan])
def test_padding_changes_no_changed_examples(padding):
    """An augmentation that mixes examples, such as one that subtracts their mean, sees blank padding."""
    x = np.full((2, 4, 1), padding, np.float32)
    x[:, :2] = 1.0
    y = np.float32([[1, 1, 0, 0], [5, 5, 0, 0]])
    task = jfcl.models.task(lambda key: {"w": jnp.ones(1)}, lambda p, x: x @ p["w"], kind="regression")

    def shift(key, batch):
        return {**batch, "x": batch["x"] + jnp.max(batch["x"]) - 1.0}

    training = jfcl.local_training(optax.sgd(0.0), num_steps=1, augment=shift)
    start = {"w": np.float32([[1.0], [5.0]])}
    algorithm = jfcl.ifca(task, training, num_clusters=2, identity_augment=True, init_params=start)
    clients = Clients({"x": x, "y": y}, np.full(2, 2, np.int32))
    state = jax.jit(algorithm.init)(jax.random.key(0), Clients({"x": np.nan_to_num(x), "y": y}, clients.size))
    state, _ = jax.jit(algorithm.step)(jax.random.key(1), state, clients)
    assert state.cluster.tolist() == [0, 1]


@pytest.mark.slow
def test_models_are_compared_on_examples_of_their_own():
    """Between two equal models, one change of all examples of a client decides at random, for each client anew."""
    clients = regression(4, n=400)
    start = np.ones((2, D), np.float32)

    def shift(key, batch):
        return {**batch, "x": batch["x"] + jax.random.normal(key, (1, D))}

    training = jfcl.local_training(optax.sgd(0.0), num_steps=1, augment=shift)
    options = {"num_clusters": 2, "init_params": {"w": start}}
    chosen = []
    for identity_augment in (False, True):
        algorithm = jfcl.ifca(LINEAR, training, identity_augment=identity_augment, **options)
        state = algorithm.init(jax.random.key(0), clients)
        for t in (1, 2):
            state, _ = jax.jit(algorithm.step)(jax.random.key(t), state, clients)
            chosen.append(np.asarray(state.cluster))
    assert (chosen[0] == 0).all() and (chosen[1] == 0).all()  # the first of equals
    assert all(abs(c.mean() - 0.5) < 0.1 for c in chosen[2:]) and abs((chosen[2] == chosen[3]).mean() - 0.5) < 0.1


@pytest.mark.slow_cases("equal")
@pytest.mark.parametrize("weights", ["equal", "size"])
def test_fedavg_is_ifca_with_one_model(weights):
    clients = regression(3)
    start = np.ones((1, D), np.float32)
    want, _ = algorithm2(start, clients, lr=0.1, steps=4, option="models", weights=weights, rounds=5)
    training = jfcl.local_training(optax.sgd(0.1), num_steps=4)
    key = jax.random.key(5)
    for algorithm in (
        jfcl.fedavg(LINEAR, training, weights=weights, init_params={"w": start[0]}),
        jfcl.ifca(LINEAR, training, num_clusters=1, weights=weights, init_params={"w": start}),
    ):
        state, _ = rollout(algorithm, clients, key=key, num_rounds=5)
        np.testing.assert_allclose(state.params["w"], want, rtol=1e-4, atol=1e-5)


def test_oracle_is_fedavg_inside_each_cluster():
    clients, cluster = regression(4), np.array([0, 1, 0, 1, 0, 1])
    start = np.zeros(D, np.float32)
    training = jfcl.local_training(optax.sgd(0.1), num_steps=4)
    state, _ = rollout(
        jfcl.oracle(LINEAR, training, cluster=cluster, init_params={"w": start}),
        clients,
        key=jax.random.key(0),
        num_rounds=3,
    )
    for k in range(2):
        mine = np.flatnonzero(cluster == k)
        part = Clients(jax.tree.map(lambda x, m=mine: x[m], clients.examples), clients.size[mine])
        want, _ = algorithm2(start[None], part, lr=0.1, steps=4, option="models", weights="size", rounds=3)
        np.testing.assert_allclose(state.params["w"][k], want[0], rtol=1e-4, atol=1e-5)
    assert state.cluster.tolist() == cluster.tolist()


def test_local_training_is_each_client_alone():
    clients = regression(5)
    training = jfcl.local_training(optax.sgd(0.1, momentum=0.9), num_steps=2, keep="everything", prox=0.3)
    state, metrics = rollout(
        jfcl.local_only(LINEAR, training, init_params={"w": np.zeros(D, np.float32)}),
        clients,
        key=jax.random.key(0),
        num_rounds=3,
    )
    for i, (x, y, _) in enumerate(rows(clients)):
        w, b, start = np.zeros((3, D))
        for t in range(6):  # momentum is carried over the three rounds; each pulls to its start
            start = w if t % 2 == 0 else start
            b = 0.9 * b + x.T @ (x @ w - y) / len(y) + 0.3 * (w - start)
            w = w - 0.1 * b
        np.testing.assert_allclose(state.params["w"][i], w, rtol=1e-4, atol=1e-5)
    assert float(metrics["bytes_up"].sum()) == 0 and metrics["client_steps"].tolist() == [12, 12, 12]


def test_a_client_without_a_model_changes_none_and_keeps_its_momentum():
    """As one of StoCFL beyond the capacity: it trains a model that is not its own, and has the cluster -1."""
    heavy, last = jfcl.local_training(optax.sgd(0.1, momentum=0.9), num_steps=1, keep="everything"), jnp.arange(6) - 1
    rules = Averaging(LINEAR, heavy, 5, start=lambda *_: last, init_params={"w": np.zeros(D, np.float32)})
    state, _ = rollout(averaging(rules), regression(5), key=jax.random.key(0), num_rounds=1)
    (momentum,) = jax.tree.leaves(state.client)
    assert not momentum[0].any() and momentum[1:].any(axis=1).all()
    want = [local64(np.zeros(D), x, y, 0.1, 1) for x, y, _ in rows(regression(5))][1:]
    np.testing.assert_allclose(state.params["w"], want, rtol=1e-4, atol=1e-5)


def test_server_optimizer_steps_along_the_mean_update():
    """Of the clusters in the cohort; the others keep their models and momenta."""
    clients, cluster, start = regression(6), np.array([0, 1, 1, 0, 1, 0]), np.ones(D, np.float32)
    training, server = jfcl.local_training(optax.sgd(0.1), num_steps=2), optax.sgd(0.5, momentum=0.9)
    options = {"cluster": cluster, "server_optimizer": server, "cohort": 2, "init_params": {"w": start}}
    algorithm = jfcl.oracle(LINEAR, training, **options)
    state, step = jax.jit(algorithm.init)(jax.random.key(0), clients), jax.jit(algorithm.step)
    w, buffer, rested = np.ones((2, D)), np.zeros((2, D)), 0
    for t in range(6):
        state, metrics = step(jax.random.key(t), state, clients)
        present = np.flatnonzero(~np.isnan(metrics["loss"]))
        for k in range(2):
            mine = present[cluster[present] == k]
            if len(mine) == 0:
                rested += buffer[k].any()
                continue
            part = Clients(jax.tree.map(lambda x, m=mine: x[m], clients.examples), clients.size[mine])
            after, _ = algorithm2(w[k][None], part, lr=0.1, steps=2, option="models", weights="size", rounds=1)
            buffer[k] = 0.9 * buffer[k] - (after[0] - w[k])
            w[k] = w[k] - 0.5 * buffer[k]
        np.testing.assert_allclose(state.params["w"], w, rtol=1e-4, atol=1e-5)
    assert rested, "each cluster has clients in every round"


def test_optimisers_that_take_the_loss_get_it():
    """Polyak's step `f / |g|^2` in float64: on a client with its proximal term, on the server with the round's loss.

    That is of the clients with a finite update.
    """
    clients, start = regression(6), np.ones(D, np.float32)
    clients.examples["x"][2] = np.nan
    rule, sgd = optax.polyak_sgd(max_learning_rate=1e9), optax.sgd(0.1)

    def after(optimizer, prox, **options):
        training = jfcl.local_training(optimizer, num_steps=2, prox=prox)
        algorithm = jfcl.fedavg(LINEAR, training, weights="equal", init_params={"w": start}, **options)
        return np.asarray(rollout(algorithm, clients, key=jax.random.key(0), num_rounds=1)[0].params["w"])[0]

    models, losses = [], []
    for x, y, _ in (data for i, data in enumerate(rows(clients)) if i != 2):
        w, moved = start.astype(np.float64), start.astype(np.float64)
        for _ in range(2):
            slope = x.T @ (x @ w - y) / len(y) + 0.3 * (w - start)
            w = w - (loss64(w, x, y) + 0.15 * ((w - start) ** 2).sum()) / (slope @ slope) * slope
            losses.append(loss64(moved, x, y))
            moved = local64(moved, x, y, 0.1, 1)
        models.append((w, moved))
    by_client, by_sgd = np.mean(models, axis=0)
    np.testing.assert_allclose(after(rule, 0.3), by_client, rtol=1e-4, atol=1e-4)
    slope = start - by_sgd
    by_server = start - np.mean(losses) / (slope @ slope) * slope
    np.testing.assert_allclose(after(sgd, 0.0, server_optimizer=rule), by_server, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("side", ["optimizer", "server_optimizer"])
@pytest.mark.parametrize(
    "optimizer",
    [
        optax.lookahead(optax.sgd(0.1), 5, 0.5),
        optax.lbfgs(),
        optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5)),
        optax.contrib.differentially_private_aggregate(1.0, 1.0, key=jax.random.key(0)),
        optax.MultiSteps(optax.lbfgs(), 2),
    ],
)
def test_optimisers_that_need_more_than_the_loss_are_refused(optimizer, side):
    training = jfcl.local_training(optimizer if side == "optimizer" else optax.sgd(0.1), num_steps=1)
    with pytest.raises(ValueError, match=rf"^{side} must be an optax optimiser that needs gradients, parameters and"):
        jfcl.fedavg(LINEAR, training, **({} if side == "optimizer" else {side: optimizer}))
    plateau = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau())
    masked = optax.masked(optax.sgd(0.1), {"w": True})  # fits this task's parameters alone
    for accepted in (plateau, optax.polyak_sgd(), masked, optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1))):
        jfcl.fedavg(LINEAR, training._replace(optimizer=accepted), server_optimizer=accepted)
    private = {"weights": "equal", "dp": jfcl.privacy.GaussianDP(clip=1.0, noise=1.0)}
    with pytest.raises(ValueError, match=r"server_optimizer must be .* needs gradients and parameters alone"):
        jfcl.fedavg(LINEAR, training._replace(optimizer=masked), server_optimizer=optax.polyak_sgd(), **private)


def test_an_unused_model_keeps_its_parameters():
    clients = regression(7)
    start = np.stack([np.zeros(D), np.full(D, 1e3)]).astype(np.float32)
    algorithm = jfcl.ifca(
        LINEAR,
        jfcl.local_training(optax.sgd(0.1), num_steps=1),
        num_clusters=2,
        init_params={"w": start},
        server_optimizer=optax.sgd(1.0, momentum=0.9),
    )
    state, _ = rollout(algorithm, clients, key=jax.random.key(0), num_rounds=4)
    used, unused = np.asarray(state.params["w"])
    assert (unused == 1e3).all() and (used != 0).any()
    assert state.cluster.tolist() == [0] * 6


def test_shared_layers_are_averaged_over_everyone_and_the_rest_per_cluster():
    task = Task(
        init=lambda key: {"body": jax.random.normal(key, (D, 2)), "head": jax.random.normal(key, (2,))},
        apply=lambda p, x: x @ p["body"] @ p["head"],
        cost=lambda outputs, batch: 0.5 * (outputs - batch["y"]) ** 2,
    )
    clients = regression(8)
    training = jfcl.local_training(optax.sgd(0.05), num_steps=2)
    begin = {"body": np.ones((D, 2), np.float32), "head": np.array([[1, 1], [-1, -1]], np.float32)}
    options = {"num_clusters": 2, "weights": "size", "init_params": begin}

    def one_round(algorithm):
        return jax.device_get(rollout(algorithm, clients, key=jax.random.key(1), num_rounds=1))

    new, metrics = one_round(jfcl.ifca(task, training, shared=lambda path: path == "body", **options))
    apart, _ = one_round(jfcl.ifca(task, training, **options))
    assert (new.cluster == apart.cluster).all() and set(new.cluster.tolist()) == {0, 1}
    np.testing.assert_allclose(new.params["head"], apart.params["head"], rtol=1e-5)
    weight = np.array([clients.size[np.asarray(new.cluster) == k].sum() for k in range(2)], np.float64)
    want = np.tensordot(weight / weight.sum(), np.asarray(apart.params["body"], np.float64), axes=1)
    np.testing.assert_allclose(new.params["body"][0], want, rtol=1e-4)
    assert (new.params["body"][0] == new.params["body"][1]).all()
    body, head = 4 * 2 * D, 4 * 2
    assert metrics["bytes_down"] == 6 * (body + 2 * head) and metrics["bytes_up"] == 6 * (body + head)


def test_stable_identities_save_downloads_and_change_nothing_else():
    clients = regression(9)
    training = jfcl.local_training(optax.sgd(0.1), num_steps=2)
    start = {"w": np.random.default_rng(0).normal(size=(2, D)).astype(np.float32)}
    runs = {}
    for stable in (None, 3):
        algorithm = jfcl.ifca(LINEAR, training, num_clusters=2, stable_rounds=stable, init_params=start)
        some = padded(clients) if stable else clients  # clients without examples have no part in it
        runs[stable] = jax.device_get(rollout(algorithm, some, key=jax.random.key(0), num_rounds=12))
    (state, metrics), (short, saving) = runs[None], runs[3]
    assert (state.params["w"] == short.params["w"]).all() and (state.cluster == short.cluster[:6]).all()
    assert set(metrics["bytes_down"].tolist()) == {6 * 2 * 4.0 * D}
    options = {"lr": 0.1, "steps": 2, "option": "models", "weights": "equal"}
    chosen = [algorithm2(start["w"], clients, **options, rounds=t)[1] for t in range(1, 13)]
    kept, down = np.zeros(6), []  # in the first round nobody can have changed
    for now, before in zip(chosen, [[-1] * 6, *chosen], strict=False):
        down.append(6 * (2 if kept.min() < 3 else 1) * 4.0 * D)
        kept = np.where(np.equal(now, before), kept + 1, 0)
    assert saving["bytes_down"].tolist() == down and down[-1] < down[0]
    assert saving["bytes_up"].tolist() == metrics["bytes_up"].tolist()


def test_the_first_round_does_not_prove_an_identity_stable():
    """In round 1 the models are those that `init` chose by: nobody can have changed."""
    clients = regression(9)
    training = jfcl.local_training(optax.sgd(0.1), num_steps=2)
    algorithm = jfcl.ifca(LINEAR, training, num_clusters=2, stable_rounds=1)
    state = jax.jit(algorithm.init)(jax.random.key(0), clients)
    state, first = jax.jit(algorithm.step)(jax.random.key(1), state, clients)
    assert state.unchanged.tolist() == [0] * 6
    state, second = jax.jit(algorithm.step)(jax.random.key(2), state, clients)
    assert float(first["bytes_down"]) == float(second["bytes_down"]) == 6 * 2 * 4.0 * D


@pytest.mark.slow_cases("4")
@pytest.mark.parametrize("cohort", [None, 4])
def test_initial_models_are_drawn_until_each_has_its_share(cohort):
    """Models are those of the first draw whose choices, by losses in NumPy, give each its share; all clients choose."""
    task = jfcl.models.task(lambda key: {"b": 4.0 * jax.random.normal(key)}, lambda p, x: x + p["b"], kind="regression")
    y = np.repeat(np.float32([1, -1, 2, -2, 3, -3, 0, 0]), 3).reshape(8, 3)
    clients = Clients({"x": np.zeros((8, 3), np.float32), "y": y}, np.array([3] * 6 + [0] * 2, np.int32))
    options = {"num_clusters": 2, "min_share": 0.3, "cohort": cohort}
    algorithm = jfcl.ifca(task, jfcl.local_training(optax.sgd(0.1), num_steps=1), **options)
    drawn = []
    for seed in range(12):
        key = jax.random.key(seed)
        state = jax.jit(algorithm.init)(key, clients)
        cohort_key, models_key = jax.random.split(key)
        rows = np.arange(6) if cohort is None else np.asarray(select_cohort(cohort_key, clients, cohort).rows)
        for draw in range(1000):
            keys = jax.random.split(jax.random.fold_in(models_key, draw), 2)
            models = np.array([float(task.init(k)["b"]) for k in keys])
            chosen = ((y[:, :, None].astype(float) - models) ** 2).mean(axis=1).argmin(axis=1)
            if np.bincount(chosen[rows], minlength=2).min() >= 0.3 * len(rows):
                break
        np.testing.assert_allclose(state.params["b"], models, rtol=1e-6)
        np.testing.assert_array_equal(state.cluster[:6], chosen[:6])
        drawn.append(draw)
    assert max(drawn) > 0  # some first draws were refused


@pytest.mark.slow
def test_restarts_keep_the_best_and_cost_what_they_cost():
    clients = regression(10, n=8)
    training = jfcl.local_training(optax.sgd(0.1), num_steps=2)
    plain = jfcl.ifca(LINEAR, training, num_clusters=2)
    tried = jfcl.ifca(LINEAR, training, num_clusters=2, restarts=4, restart_rounds=3)
    key = jax.random.key(11)
    state = jax.jit(tried.init)(key, clients)
    losses = []
    for i in range(4):  # the same four runs, by hand
        init_key, rounds_key = jax.random.split(jax.random.fold_in(key, i))
        s = jax.jit(plain.init)(init_key, clients)
        for r in range(3):
            s, metrics = jax.jit(plain.step)(jax.random.fold_in(rounds_key, r), s, clients)
        losses.append((float(np.average(metrics["loss"], weights=clients.size)), s))
    best = min(losses, key=lambda pair: pair[0])[1]
    np.testing.assert_allclose(state.params["w"], best.params["w"], rtol=1e-5)
    assert max(loss for loss, _ in losses) > min(loss for loss, _ in losses)
    after, first = jax.jit(tried.step)(jax.random.key(0), state, clients)
    _, second = jax.jit(tried.step)(jax.random.key(0), after, clients)
    assert first["bytes_down"] == 13 * second["bytes_down"] and first["client_steps"] == 13 * 16


def test_a_cohort_takes_part_and_the_others_rest():
    clients = regression(12, n=9)
    training = jfcl.local_training(optax.sgd(0.1), num_steps=2)
    algorithm = jfcl.ifca(LINEAR, training, num_clusters=2, cohort=4, weights="size")
    state, step = jax.device_get(jax.jit(algorithm.init)(jax.random.key(0), clients)), jax.jit(algorithm.step)
    seen = []
    for t in range(6):
        new, metrics = jax.device_get(step(jax.random.key(t), state, clients))
        present = np.flatnonzero(~np.isnan(metrics["loss"]))
        assert len(present) == 4 and metrics["participants"] == 4
        part = Clients(jax.tree.map(lambda x, p=present: x[p], clients.examples), clients.size[present])
        want, chosen = algorithm2(state.params["w"], part, lr=0.1, steps=2, option="models", weights="size", rounds=1)
        np.testing.assert_allclose(new.params["w"], want, rtol=1e-3, atol=1e-4)
        assert new.cluster[present].tolist() == chosen
        losses = [trained(state.params["w"][k], clients, i, 2)[1] for i, k in zip(present, chosen, strict=True)]
        np.testing.assert_allclose(metrics["loss"][present], losses, rtol=1e-3)
        rest = np.setdiff1d(np.arange(9), present)
        assert (new.cluster[rest] == state.cluster[rest]).all()
        seen.append(tuple(present))
        state = new
    assert len(set(seen)) > 1


@pytest.mark.slow_cases("equal")
@pytest.mark.parametrize("weights", ["equal", "size"])
def test_sums_of_gradients_are_divided_by_all_machines(weights):
    """Line 14 of Algorithm 2 in float64, with a cohort, a padding client and a client that sends NaN."""
    clients = regression(3, n=9)
    size = clients.size.copy()
    size[4] = 0
    clients.examples["x"][7] = np.nan
    clients = clients._replace(size=size)
    start = np.random.default_rng(1).normal(size=(2, D)).astype(np.float32)
    options = {"num_clusters": 2, "average": "gradients", "weights": weights, "cohort": 5}
    algorithm = jfcl.ifca(LINEAR, ONE, init_params={"w": start}, **options)
    state, step = jax.jit(algorithm.init)(jax.random.key(0), clients), jax.jit(algorithm.step)
    counts, data, broken = (size if weights == "size" else size > 0).astype(float), list(rows(clients)), 0
    for t in range(4):
        new, metrics = step(jax.random.key(t), state, clients)
        models = np.asarray(state.params["w"], np.float64)
        present = np.flatnonzero(~np.isnan(metrics["loss"]))
        sent = [i for i in present if i != 7]
        broken += len(present) - len(sent)
        m = counts.sum()
        want = models.copy()
        for i in sent:
            x, y, s = data[i]
            j = int(np.argmin([loss64(w, x, y) for w in models]))
            want[j] -= 0.1 / m * counts[i] * x.T @ (x @ models[j] - y) / s
        np.testing.assert_allclose(new.params["w"], want, rtol=1e-4, atol=1e-5)
        state = new
    assert broken > 0


def test_clients_without_examples_are_never_drawn():
    clients = regression(13, n=8)
    size = clients.size.copy()
    size[[1, 4, 6]] = 0
    algorithm = jfcl.fedavg(LINEAR, jfcl.local_training(optax.sgd(0.1), num_steps=1), cohort=5)
    _, metrics = rollout(algorithm, clients._replace(size=size), key=jax.random.key(0), num_rounds=1)
    assert sorted(np.flatnonzero(~np.isnan(metrics["loss"][0]))) == [0, 2, 3, 5, 7]


@pytest.mark.slow_cases("nan")
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_updates_are_left_out_and_counted(bad):
    clients = regression(14)
    x = clients.examples["x"].copy()
    x[2, 0] = bad
    spoiled = Clients({"x": x, "y": clients.examples["y"]}, clients.size)
    keep = np.array([0, 1, 3, 4, 5])
    rest = Clients(jax.tree.map(lambda v: v[keep], clients.examples), clients.size[keep])
    start = np.ones((1, D), np.float32)
    want, _ = algorithm2(start, rest, lr=0.1, steps=2, option="models", weights="size", rounds=2)
    algorithm = jfcl.fedavg(LINEAR, jfcl.local_training(optax.sgd(0.1), num_steps=2), init_params={"w": start[0]})
    state, metrics = rollout(algorithm, spoiled, key=jax.random.key(0), num_rounds=2)
    np.testing.assert_allclose(state.params["w"], want, rtol=1e-4, atol=1e-5)
    assert metrics["nonfinite"].tolist() == [1, 1]


@pytest.mark.slow
def test_learning_rates_sweep_in_one_program():
    clients = regression(15)
    traces = []

    @jax.jit
    def final(lr):
        traces.append(lr)
        algorithm = jfcl.ifca(LINEAR, jfcl.local_training(optax.sgd(lr), num_steps=2), num_clusters=2)
        return jfcl.rollout(algorithm, clients, key=jax.random.key(0), num_rounds=3)[0].params["w"]

    rates = np.linspace(0.01, 0.1, 10, dtype=np.float32)
    swept = jax.jit(jax.vmap(final))(rates)
    each = [final(lr) for lr in rates]
    assert len(traces) == 1  # neither vmap nor another rate traces anew
    np.testing.assert_allclose(swept, np.stack(each), rtol=1e-4, atol=1e-5)
    assert (np.asarray(each[0]) != np.asarray(each[-1])).any()


def test_a_round_holds_models_and_a_chunk_of_updates_rather_than_one_of_each_client():
    big = Task(
        init=lambda key: {"w": jax.random.normal(key, (1000, D))},
        apply=lambda p, x: (x @ p["w"].T).sum(axis=-1),
        cost=lambda outputs, batch: 0.5 * (outputs - batch["y"]) ** 2,
    )
    clients = regression(0, n=256)
    algorithm = jfcl.ifca(big, ONE, num_clusters=2, client_axis=chunked(1))
    state = jax.eval_shape(algorithm.init, jax.random.key(0), clients)
    compiled = jax.jit(algorithm.step).lower(jax.random.key(0), state, clients).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 32 * 4 * 1000 * D


def test_a_cpu_compares_models_with_convolutions_one_after_another():
    """At once, they would take many times the memory of one."""
    task = jfcl.models.classification(jfcl.models.CNNMnist(10), (28, 28, 1), 10)
    images = jax.ShapeDtypeStruct((1, 20, 28, 28, 1), "float32"), jax.ShapeDtypeStruct((1, 20), "int32")
    clients = Clients(dict(zip("xy", images, strict=True)), jax.ShapeDtypeStruct((1,), "int32"))

    def temporaries(count):
        models = jax.eval_shape(jax.vmap(task.init), jax.random.split(jax.random.key(0), count))
        lowered = jax.jit(partial(lowest_loss, task, client_axis=chunked(1))).lower(models, clients)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temporaries(4) < 1.1 * temporaries(2)


def test_lowest_loss_takes_the_first_of_equals_and_never_a_broken_model():
    clients = regression(16)
    params = {"w": np.float32([[np.nan] * D, [0] * D, [0] * D])}
    chosen = jax.jit(partial(lowest_loss, LINEAR, client_axis=jax.vmap))(params, clients)
    assert chosen.tolist() == [1] * 6


def test_warm_start_from_one_model_is_copied():
    algorithm = jfcl.ifca(
        LINEAR, jfcl.local_training(optax.sgd(0.1), num_steps=1), num_clusters=2, init_params={"w": np.ones(D)}
    )
    assert algorithm.init(jax.random.key(0), regression()).params["w"].tolist() == [[1] * D] * 2


ONE = jfcl.local_training(optax.sgd(0.1), num_steps=1)
FIVE = jfcl.local_training(optax.sgd(0.1), num_steps=5)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: jfcl.ifca(LINEAR, ONE, num_clusters=0), "num_clusters must be an integer, at least 1, got 0"),
        (
            lambda: jfcl.ifca(LINEAR, ONE, num_clusters=2, identity_batch=0),
            "identity_batch must be an integer, at least 1",
        ),
        (lambda: jfcl.ifca(LINEAR, ONE, num_clusters=2, average="model"), "did you mean 'models'"),
        (
            lambda: jfcl.ifca(LINEAR, FIVE, num_clusters=2, average="gradients"),
            "average must be models, or gradients of 1 local step",
        ),
        (
            lambda: jfcl.ifca(LINEAR, ONE, num_clusters=3, min_share=0.4),
            "min_share must be at most 1 / 3, an equal share for each model, got 0.4",
        ),
        (
            lambda: jfcl.ifca(LINEAR, ONE, num_clusters=3, min_share=0.1, cohort=2),
            "cohort must be at least the 3 models, for min_share, got 2",
        ),
        (
            lambda: jfcl.ifca(LINEAR, ONE, num_clusters=2, restarts=3, restart_rounds=5, stable_rounds=5),
            "stable_rounds must be more",
        ),
        (lambda: jfcl.fedavg(LINEAR, ONE, weights="sizes"), "did you mean 'size'"),
        (lambda: jfcl.fedavg(LINEAR, ONE, cohort=0), "cohort must be an integer, at least 1"),
        (lambda: jfcl.oracle(LINEAR, ONE, cluster=[0, -1]), "cluster must be in 0"),
        (lambda: jfcl.oracle(LINEAR, ONE, cluster=[0.5, 1]), "a vector of integers"),
        (
            lambda: jfcl.ifca(LINEAR, ONE, num_clusters=2, shared=lambda p: True, server_optimizer=optax.adam(0.1)),
            "server_optimizer must be left out",
        ),
    ],
)
def test_factories_refuse(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        (jfcl.ifca(LINEAR, ONE, num_clusters=7), "num_clusters must be at most the 6 clients"),
        (jfcl.fedavg(LINEAR, ONE, cohort=7), "cohort must be at most the 6 clients"),
        (jfcl.oracle(LINEAR, ONE, cluster=[0, 1]), r"cluster must be of shape \(6,\)"),
        (jfcl.fedavg(LINEAR, ONE, init_params={"w": np.ones(4)}), r"init_params\['w'\] must have shape"),
        (jfcl.fedavg(LINEAR, ONE, init_params={"v": np.ones(3)}), "structure of the task's parameters"),
    ],
)
def test_init_refuses(algorithm, words):
    with pytest.raises(ValueError, match=words):
        algorithm.init(jax.random.key(0), regression())


def test_ifca_refuses_to_rest_on_drifting_data():
    clients, algorithm = regression(), jfcl.ifca(LINEAR, ONE, num_clusters=2, stable_rounds=2)
    drifting = clients._replace(examples=clients.examples | {"step": np.zeros_like(clients.examples["y"], np.int32)})
    algorithm.check(clients)
    with pytest.raises(ValueError, match="stable_rounds must be left out for drifting data"):
        algorithm.check(drifting)
