"""Private training against a loop in NumPy, written from the papers, and against published values of the accountant."""

import math
import re
import shlex
import zlib
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jfcl.privacy import GaussianDP, epsilon, noise_of_sums
from scipy import stats

import jfcl
from jfcl.cli.parser import parse
from jfcl.core import Clients, Task
from jfcl.experiments import Config, run
from jfcl.experiments.options import all_options
from jfcl.experiments.privacy import privacy_of, privacy_text
from jfcl.robust import privacy
from jfcl.simulation.folder import finite_or_none
from jfcl.testing import check_algorithm, problem

D = 3
TASK = Task(
    init=lambda key: {"b": jnp.zeros(()), "w": jax.random.normal(key, (D,))},
    apply=lambda p, x: x @ p["w"] + p["b"],
    cost=lambda outputs, batch: 0.5 * (outputs - batch["y"]) ** 2,
)
TRAINING = jfcl.local_training(optax.sgd(0.1), num_steps=2)
SERVER_ID = 2**31 - 2  # of the server's key
needs_accountant = pytest.mark.skipif(find_spec("dp_accounting") is None, reason="needs the extra jfcl[privacy]")


def regression(n=9, m=5, seed=0):
    rng = np.random.default_rng(seed)
    size = rng.integers(1, m + 1, n).astype(np.int32)
    size[3] = 0
    x = rng.normal(size=(n, m, D)).astype(np.float32)
    truth = rng.normal(size=(2, D))[np.arange(n) % 2]
    return Clients({"x": x, "y": np.einsum("nmd,nd->nm", x, truth).astype(np.float32)}, size)


def update64(model, x, y):
    """One client's update [1 + D], bias first, after two steps of gradient descent."""
    start, model = model, model.copy()
    inputs = np.concatenate([np.ones((len(x), 1)), x], axis=1)
    for _ in range(2):
        model = model - 0.1 * inputs.T @ (inputs @ model - y) / len(y)
    return model - start


def loss64(model, x, y):
    return np.mean((x @ model[1:] + model[0] - y) ** 2)


@partial(jax.jit, static_argnums=1)
def normals(round_key, num_clusters):
    """The standard normal draws of a round: [K, 1 + D] for the sums, [K] for the sizes, one for the clipping norm."""
    server_key = jax.random.fold_in(jax.random.split(round_key)[1], SERVER_ID)
    keys = jax.random.split(jax.random.fold_in(server_key, zlib.crc32(b"differential privacy")), 4)
    bias, weights = jax.random.normal(keys[0], (num_clusters,)), jax.random.normal(keys[1], (num_clusters, D))
    of_sums = jnp.concatenate([bias[:, None], weights], axis=1)
    return of_sums, jax.random.normal(keys[2], (num_clusters,)), jax.random.normal(keys[3])


def private_round(models, clip, present, clients, dp, expected, draws):
    """A round of DP-FedAvg for K models in float64: new models, choices, the noise on means, the next clipping norm."""
    k = len(models)
    sums, sizes, inside = np.zeros_like(models), np.zeros(k), 0
    chosen = {}
    for i in present:
        x, y = (clients.examples[name][i, : clients.size[i]].astype(np.float64) for name in "xy")
        j = chosen[i] = int(np.argmin([loss64(w, x, y) for w in models]))
        update = update64(models[j], x, y)
        norm = np.sqrt(np.sum(update**2))
        sums[j] += update * min(1, clip / norm)
        sizes[j] += 1
        inside += norm <= clip
    # The counts of several clusters and of adaptive clipping take a share of the budget: z_sums from Theorem 1.
    used = (1 / 4) ** 2 * (k > 1) + (1 / 10) ** 2 * (dp.quantile is not None)
    of_sums = dp.noise / np.sqrt(1 - used) * clip
    sums += of_sums * draws[0]
    sizes = sizes + 4 * dp.noise * draws[1] if k > 1 else np.full(1, expected)
    new = models.copy()
    for j in range(k):
        if sizes[j] >= dp.min_size:
            new[j] += sums[j] / sizes[j]
    if dp.quantile is not None:
        share = 1 / 2 + (inside - len(present) / 2 + 5 * dp.noise * draws[2]) / expected
        clip = clip * np.exp(-dp.clip_rate * (share - dp.quantile))
    return new, chosen, np.where(sizes >= dp.min_size, of_sums / sizes, np.nan), clip


def stacked(params):
    return np.concatenate([np.asarray(params["b"])[:, None], params["w"]], axis=1).astype(np.float64)


@pytest.mark.slow_cases("ifca-*")
@pytest.mark.parametrize(
    ("num_clusters", "cohort", "dp"),
    [
        (1, 5, GaussianDP(0.3, 0.7, quantile=0.6)),
        (2, None, GaussianDP(0.3, 0.3, quantile=0.5, clip_rate=0.4, min_size=3)),
        (2, 5, GaussianDP(0.2, 0.5, min_size=2, sampling="fixed")),
    ],
    ids=["fedavg-poisson-adaptive", "ifca-all-adaptive", "ifca-fixed"],
)
def test_is_dp_fedavg_and_adaptive_clipping_in_numpy(num_clusters, cohort, dp):
    clients = regression()
    if num_clusters == 1:
        algorithm = jfcl.fedavg(TASK, TRAINING, weights="equal", dp=dp, cohort=cohort)
    else:
        algorithm = jfcl.ifca(TASK, TRAINING, num_clusters=2, dp=dp, cohort=cohort)
    step, state = jax.jit(algorithm.step), jax.jit(algorithm.init)(jax.random.key(3), clients)
    clip, counts, unreleased = dp.clip, set(), 0
    for t in range(6):
        key = jax.random.key(t)
        new, metrics = jax.tree.map(np.asarray, step(key, state, clients))
        present = np.flatnonzero(~np.isnan(metrics["loss"]))
        assert len(present) == metrics["participants"] and 3 not in present
        draws, models = jax.tree.map(np.float64, normals(key, num_clusters)), stacked(state.params)
        np.testing.assert_allclose(metrics["clip"], clip, rtol=1e-5)
        want, chosen, noise, clip = private_round(models, clip, present, clients, dp, cohort or 8, draws)
        np.testing.assert_allclose(metrics["noise"], noise, rtol=1e-5)
        np.testing.assert_allclose(stacked(new.params), want, rtol=1e-5, atol=1e-5)
        assert {i: int(new.cluster[i]) for i in present} == chosen
        absent = np.setdiff1d(np.arange(9), present)
        assert (new.cluster[absent] == np.asarray(state.cluster)[absent]).all()
        stayed = (want == models).all(axis=1).sum()
        assert metrics["released"] == num_clusters - stayed
        counts.add(len(present))
        unreleased += stayed
        state = new
    assert (len(counts) > 1) == (cohort is not None and dp.sampling == "poisson")  # cohorts differ in size
    assert (unreleased > 0) == (num_clusters > 1)  # a small cluster keeps its model


def test_gradients_have_the_noise_of_what_divides_them():
    clients, key, dp = regression(), jax.random.key(5), GaussianDP(0.5, 0.05)
    training = jfcl.local_training(optax.sgd(0.1), num_steps=1)
    algorithm = jfcl.ifca(TASK, training, dp=dp, num_clusters=2, average="gradients")
    state, metrics = jax.jit(algorithm.step)(key, jax.jit(algorithm.init)(jax.random.key(3), clients), clients)
    counts = np.bincount(np.asarray(state.cluster)[clients.size > 0], minlength=2)
    sizes = counts + 4 * 0.05 * np.asarray(normals(key, 2)[1])
    is_released = sizes >= dp.min_size
    noise = 0.05 / np.sqrt(1 - 1 / 16) * 0.5 / 8
    np.testing.assert_allclose(metrics["noise"], np.where(is_released, noise, np.nan), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "ifca"])
def test_without_noise_and_with_a_large_norm_it_is_the_plain_method(name):
    clients = regression()
    make = partial(jfcl.ifca, num_clusters=2) if name == "ifca" else partial(jfcl.fedavg, weights="equal")
    states = []
    for dp in (None, GaussianDP(1e9, 0.0)):
        algorithm = make(TASK, TRAINING, dp=dp)
        states.append(jfcl.rollout(algorithm, clients, key=jax.random.key(0), num_rounds=3)[0])
    jax.tree.map(np.testing.assert_array_equal, states[0].params, states[1].params)
    assert states[0].clip == ()


# The sensitivity.

NUMBERS = st.floats(-(2.0**110), 2.0**110, width=32, allow_subnormal=False)
CLIPPED = jax.jit(privacy.clipped)


@given(st.lists(NUMBERS, min_size=4, max_size=4), st.sampled_from([1e-3, 1.0, 50.0]))
def test_a_clipped_update_has_at_most_that_norm_and_its_direction(values, clip):
    update = {"b": jnp.float32(values[0]), "w": jnp.array(values[1:], jnp.float32)}
    sent, inside = CLIPPED(update, clip)
    before, after = (np.append(u["b"], u["w"]).astype(np.float64) for u in (update, sent))
    norm = np.linalg.norm(before)
    assert np.linalg.norm(after) <= clip * (1 + 1e-6)
    np.testing.assert_allclose(after, before * min(1, clip / max(norm, 1e-300)), rtol=1e-5, atol=1e-37)
    assert bool(inside) == (norm <= clip) or math.isclose(norm, clip, rel_tol=1e-5)


@pytest.mark.slow_cases("*-clipped0")
@pytest.mark.parametrize("clip", [privacy.clipped, CLIPPED])
@pytest.mark.parametrize("largest", [8e37, 9e37, 3.4e38])
def test_the_largest_updates_are_clipped(largest, clip):
    """The reciprocal of these numbers is subnormal in float32, and 0 on a device."""
    sent, inside = clip({"w": jnp.float32([largest, largest / 3, 1])}, 1.0)
    assert np.linalg.norm(np.float64(sent["w"])) <= 1 + 1e-6 and not inside


def test_norms_and_sizes_at_their_bounds_count():
    assert CLIPPED({"b": jnp.float32(3), "w": jnp.float32([4, 0, 0])}, 5.0)[1]
    dp, release = GaussianDP(clip=5.0, noise=0.0, min_size=3), jax.jit(privacy.release, static_argnums=0)
    sums, sizes = release(dp, jax.random.key(0), 5.0, {"w": jnp.ones((2, 1))}, jnp.float32([3, 2]), jnp.float32(5))
    assert sizes.tolist() == [3, 0] and sums["w"].tolist() == [[1], [0]]


@cache
def compiled_sums(clip):
    """The sums of two clusters, which option I of IFCA divides by the number of all clients, and the start."""
    training = TRAINING._replace(num_steps=1)
    algorithm = jfcl.ifca(TASK, training, num_clusters=2, average="gradients", dp=GaussianDP(clip, 0.0))
    state = jax.jit(algorithm.init)(jax.random.key(3), regression())
    step = jax.jit(lambda clients: algorithm.step(jax.random.key(0), state, clients)[0].params)
    return lambda clients: 8 * (stacked(step(clients)) - stacked(state.params))


@given(st.integers(0, 8), st.lists(NUMBERS | st.just(np.nan), min_size=4, max_size=4))
def test_one_client_moves_all_sums_together_by_at_most_the_norm(row, values):
    """Whatever its data are, and whichever cluster they make it choose."""
    clients, clip = regression(), 0.25
    x, y = clients.examples["x"].copy(), clients.examples["y"].copy()
    x[row], y[row] = np.float32(values[:3]), np.float32(values[3])
    sums, gone = compiled_sums(clip), clients.size.copy()
    gone[row] = 0
    without = sums(clients._replace(size=gone)) * (8 - (clients.size[row] > 0)) / 8  # divided by one client less
    assert np.linalg.norm(without) > clip  # the others are there
    assert np.linalg.norm(without - sums(Clients({"x": x, "y": y}, clients.size))) <= clip * (1 + 1e-4)


# Noise.


def test_noise_has_the_documented_spread_and_is_fresh():
    dp, clip, large = GaussianDP(2.0, 0.8, quantile=0.5), jnp.float32(3.0), {"a": (2, 50, 100), "b": (2, 5000)}

    def draw(shapes, key):
        zeros = {name: jnp.zeros(shape) for name, shape in shapes.items()}
        return privacy.release(dp, key, clip, zeros, jnp.full(2, 1000.0), jnp.float32(2000))

    both = jax.jit(jax.vmap(partial(draw, large)))(jax.random.split(jax.random.key(0)))[0]
    draws = np.concatenate([np.reshape(x, (4, -1)) for x in both.values()]).astype(np.float64)
    want = 3.0 * noise_of_sums(dp, 2)
    np.testing.assert_allclose(draws.std(axis=1), want, rtol=4 / np.sqrt(2 * 5000))
    assert stats.kstest(draws.ravel() / want, "norm").pvalue > 1e-3
    assert np.abs(np.corrcoef(draws) - np.eye(8)).max() < 5 / np.sqrt(5000)
    sizes = jax.jit(jax.vmap(partial(draw, {"a": (2,)})))(jax.random.split(jax.random.key(2), 2000))[1]
    np.testing.assert_allclose(np.std(np.asarray(sizes, np.float64), axis=0), 4 * 0.8, rtol=0.1)
    assert abs(np.corrcoef(np.asarray(sizes, np.float64).T)[0, 1]) < 0.1


@pytest.mark.slow_cases("4")
@pytest.mark.parametrize("cohort", [4, 12])
def test_poisson_cohorts_are_independent_draws(cohort):
    size = np.ones(30, np.int32)
    size[[2, 17]] = 0
    clients = Clients({"x": np.zeros((30, 1), np.float32)}, size)
    keys = jax.random.split(jax.random.key(0), 4000)

    def drawn(key):
        found = privacy.poisson_cohort(key, clients, cohort)
        return jnp.zeros(30, jnp.int32).at[found.rows].set(found.clients.size)

    took_part = np.asarray(jax.jit(jax.vmap(drawn))(keys))
    assert took_part.max() == 1 and took_part[:, [2, 17]].sum() == 0
    assert [privacy.expected_participants(clients, count) for count in (None, cohort, 29)] == [28, cohort, 28]
    q, took_part = cohort / 28, np.delete(took_part, [2, 17], axis=1)
    spread = np.sqrt(q * (1 - q) / 4000)
    assert np.abs(took_part.mean(axis=0) - q).max() < 4.5 * spread
    observed = np.bincount(took_part.sum(axis=1), minlength=29)
    expected = stats.binom.pmf(np.arange(29), 28, q) * 4000
    common = expected > 20
    chi2 = ((observed - expected)[common] ** 2 / expected[common]).sum()
    assert stats.chi2.sf(chi2, common.sum() - 1) > 1e-3


@pytest.mark.parametrize(("num_clients", "cohort"), [(10**6, 1), (10**6, 10), (999_999, 100), (3, 1), (3, 2), (3, 3)])
def test_a_client_is_drawn_as_often_as_is_accounted_for(num_clients, cohort, monkeypatch):
    """The largest draw of 32 bits with which a client takes part, found by halving."""
    least, most = -1, 2**32 - 1
    clients = Clients({"x": jnp.zeros((1, 1))}, jnp.ones(1, jnp.int32))
    monkeypatch.setattr(privacy, "expected_participants", lambda *_: jnp.float32(num_clients))
    while least < most:
        middle = (least + most + 1) // 2
        monkeypatch.setattr(jax.random, "bits", lambda key, at=middle: jnp.uint32(at))
        drawn = privacy.poisson_cohort(jax.random.key(0), clients, cohort).clients.size[0]
        least, most = (middle, most) if drawn else (least, middle - 1)
    rate, accounted = (least + 1) / 2**32, cohort / num_clients
    assert accounted * (1 - 1e-3) < rate <= accounted


@pytest.mark.parametrize("cohort", [1, 10, 100, 10_000])
def test_a_poisson_cohort_has_rows_for_all(cohort):
    most = privacy.most_drawn(cohort)
    for n in (2 * cohort, 20 * cohort, 10**7):
        assert stats.binom.sf(most, n, cohort / n) < 1e-12


# Accounting.


@needs_accountant
@pytest.mark.parametrize(
    ("num_clients", "cohort", "noise", "epochs", "delta", "want"),
    [
        # The published cases of TensorFlow Privacy's compute_dp_sgd_privacy, of which these accountants are the part.
        (60_000, 150, 1.3, 15, 1e-5, 0.7242234026109595),
        (100_000, 100, 1.0, 30, 1e-7, 1.4154988495444845),
    ],
)
def test_epsilon_is_the_published_one(num_clients, cohort, noise, epochs, delta, want):
    rounds = epochs * num_clients // cohort
    given = {"num_clients": num_clients, "cohort": cohort, "num_rounds": rounds, "delta": delta}
    assert math.isclose(epsilon(GaussianDP(1.0, noise), **given), want, rel_tol=1e-9)


@needs_accountant
def test_epsilon_of_all_clients_is_that_of_the_gaussian_mechanism():
    """T rounds of all clients are one Gaussian of multiplier σ/√T: 4.530877117 is (1, 1e-6)-private by its Rényi bound
    (a case of dp-accounting's tests), which is above the exact δ of Balle and Wang (2018)."""
    z = 4.530877117
    found = epsilon(GaussianDP(1.0, 2 * z), num_clients=100, num_rounds=4, delta=1e-6)
    assert math.isclose(found, 1.0, rel_tol=1e-3)
    mu = 1 / z
    exact = stats.norm.cdf(mu / 2 - found / mu) - math.exp(found) * stats.norm.cdf(-mu / 2 - found / mu)
    assert 0 < exact < 1e-6


@needs_accountant
def test_a_round_with_counts_costs_what_its_noise_multiplier_says():
    import dp_accounting as accounting

    dp = GaussianDP(1.0, 0.9, quantile=0.5)
    parts = [noise_of_sums(dp, 3), 4 * 0.9, 5 * 0.9 / 0.5]  # each over its sensitivity
    event = accounting.ComposedDpEvent([accounting.GaussianDpEvent(z) for z in parts])
    rdp = accounting.rdp.RdpAccountant().compose(accounting.PoissonSampledDpEvent(0.02, event), 50)
    found = epsilon(dp, num_clients=1000, cohort=20, num_rounds=50, delta=1e-4)
    assert math.isclose(found, rdp.get_epsilon(1e-4), rel_tol=1e-9)


@pytest.mark.slow
@needs_accountant
@pytest.mark.parametrize("sampling", privacy.SAMPLING)
def test_epsilon_is_monotone(sampling):
    base = {"noise": 1.0, "cohort": 20, "num_rounds": 50, "delta": 1e-4}

    def of(**changes):
        options = base | changes
        dp = GaussianDP(1.0, options.pop("noise"), sampling=sampling)
        return epsilon(dp, num_clients=1000, **options)

    best = of()
    for name, worse in (("noise", 0.8), ("cohort", 40), ("num_rounds", 100), ("delta", 1e-5)):
        assert of(**{name: worse}) > best > 0, name
    assert of(num_rounds=0) == 0


@needs_accountant
def test_fixed_cohorts_cost_at_most_the_mechanism_on_a_replaced_client():
    def of(dp, **given):
        return epsilon(dp, num_clients=100, num_rounds=3, **given)

    fixed = GaussianDP(1.0, 4.0, sampling="fixed")
    whole = of(GaussianDP(1.0, 2.0))  # a replaced client moves a sum twice as far
    assert of(fixed, cohort=5) < of(fixed, cohort=95) == whole
    assert of(fixed) == of(fixed._replace(sampling="poisson")) < whole


def test_a_missing_accountant_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "dp_accounting", None)
    with pytest.raises(ImportError, match=r"dp-accounting: pip install 'jfcl\[privacy\]'"):
        epsilon(GaussianDP(1.0, 1.0), num_clients=10, num_rounds=1)
    with pytest.raises(ValueError, match=r"dp_noise must be used with an accountant.*jfcl\[privacy\]"):
        Config("fedavg", dp_clip=1.0, dp_noise=1.0)
    assert Config("fedavg", dp_clip=1.0)


# What is refused.


def fedavg(dp, **options):
    return jfcl.fedavg(TASK, TRAINING, **{"weights": "equal"} | options, dp=dp)


GOOD = GaussianDP(1.0, 1.0)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: fedavg(1.0), "dp must be a jfcl.privacy.GaussianDP, got 1.0"),
        (lambda: fedavg(GaussianDP(0.0, 1.0)), "dp.clip must be positive, got 0.0"),
        (lambda: fedavg(GaussianDP(math.inf, 1.0)), "dp.clip must be finite"),
        (lambda: fedavg(GaussianDP("1", 1.0)), "dp.clip must be of type float"),
        (lambda: fedavg(GaussianDP(1.0, -0.1)), "dp.noise must be 0 or more, got -0.1"),
        (lambda: fedavg(GaussianDP(1.0, math.nan)), "dp.noise must be finite"),
        (lambda: fedavg(GOOD._replace(quantile=1.5)), r"dp.quantile must be in \[0, 1\], got 1.5"),
        (lambda: fedavg(GOOD._replace(clip_rate=0.0)), "dp.clip_rate must be positive"),
        (lambda: fedavg(GOOD._replace(min_size=0)), "dp.min_size must be an integer, at least 1"),
        (lambda: fedavg(GOOD._replace(sampling="poison")), "unknown sampling 'poison': did you mean 'poisson'"),
        (lambda: fedavg(GOOD, weights="size"), "weights must be \"equal\" with dp: .* got 'size'"),
        (lambda: fedavg(GOOD, aggregator=jfcl.kernels.krum), "aggregator must be left out with dp"),
        (
            lambda: fedavg(GOOD, adversary=jfcl.Adversary(jfcl.attacks.ipm(), np.arange(9) < 2)),
            "adversary must be left out with dp",
        ),
        (
            lambda: jfcl.ifca(TASK, TRAINING, num_clusters=2, restarts=2, dp=GOOD),
            "leave out restarts, stable_rounds and min_share with dp",
        ),
        (
            lambda: jfcl.ifca(TASK, TRAINING, num_clusters=2, min_share=0.5, dp=GOOD),
            "leave out restarts, stable_rounds and min_share with dp",
        ),
        (
            lambda: jfcl.ifca(TASK, TRAINING, num_clusters=2, stable_rounds=2, dp=GOOD),
            "leave out restarts, stable_rounds and min_share with dp",
        ),
        (
            lambda: jfcl.hypcluster(TASK, TRAINING, num_clusters=2, weights="equal", warm_rounds=1, dp=GOOD),
            "warm_rounds must be 0 with dp",
        ),
        (
            lambda: jfcl.fedavg(*problem("network")[2:], weights="equal", dp=GOOD),
            "batch statistics must be personal with dp .*group norm, got 'BatchNorm_0/mean",
        ),
        (
            lambda: epsilon(GOOD._replace(noise=0.0), num_clients=10, num_rounds=1),
            "dp.noise must be above 0 for an epsilon: without noise there is no guarantee",
        ),
        (lambda: epsilon(GOOD, num_clients=10, num_rounds=1, delta=1.0), r"delta must be in \(0, 1\), got 1.0"),
        (lambda: epsilon(GOOD, num_clients=10, num_rounds=1, cohort=11), "cohort must be an integer"),
    ],
)
def test_factories_refuse(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("fedavg", {"dp_noise": 1.0}, "dp_noise must be left out without --dp-clip"),
        ("fedavg", {"dp_clip": 0.0}, "dp_clip must be positive, got 0.0"),
        ("fedavg", {"dp_clip": 1.0, "dp_noise": -1.0}, "dp_noise must be 0 or more, got -1.0"),
        ("fedavg", {"dp_clip": 1.0, "dp_delta": 0.1}, "dp_delta must be left out without --dp-noise"),
        ("fedavg", {"dp_clip": 1.0, "aggregator": "krum"}, "aggregator must be left out with --dp-clip"),
        ("fedavg", {"dp_clip": 1.0, "attack": "ipm", "malicious": 0.2}, "attack must be left out with --dp-clip"),
        ("fedavg", {"dp_clip": 1.0, "patience": 2}, "patience must be left out with --dp-clip"),
        ("cfl", {"dp_clip": 1.0}, "method cfl has no option dp_clip .only fedavg, oracle, ifca, hypcluster"),
        (
            "fedavg",
            {"dp_clip": 1.0, "population": 200, "dp_sampling": "poisson"},
            "dp_sampling must be fixed with --population",
        ),
        ("fedavg", {"dp_clip": 1.0, "population": 200, "stragglers": 0.5}, "stragglers must be 0 with --dp-clip"),
    ],
)
def test_the_command_line_refuses(method, options, words):
    with pytest.raises(ValueError, match=words):
        Config(method, **options)


def test_personal_statistics_are_not_sent():
    task, training = problem("network")[2:]
    algorithm = jfcl.fedbn(task, training, weights="equal", dp=GOOD)
    state = jax.eval_shape(algorithm.init, jax.random.key(0), problem("network").clients)
    assert state.clip == ()


# Whole runs.


OPTIONS = {"clients": 6, "cohort": 3, "rounds": 2, "examples_per_client": 5, "local_steps": 1, "chunk": 1}
PRIVATE = {"dp_clip": 0.5, "dp_noise": 2.0, "dp_quantile": 0.5, "dp_delta": 1e-3}


@needs_accountant
def test_the_report_has_epsilon_and_the_noise_of_each_cluster():
    config = Config("ifca", num_models=3, **OPTIONS, **PRIVATE)
    last = {"clip": 0.25, "noise": [0.1, None, 0.2]}
    found = privacy_of(config, 6, 2, np.array([0, 0, 0, 1, 1, 2]), last)
    want = epsilon(GaussianDP(0.5, 2.0, quantile=0.5), num_clients=6, cohort=3, num_rounds=2, delta=1e-3)
    assert found["epsilon"] == want and found["delta"] == 1e-3 and found["sampling"] == "poisson"
    assert [row["epsilon"] for row in found["clusters"]] == [want] * 3
    assert [row["share"] for row in found["clusters"]] == pytest.approx([1 / 2, 1 / 3, 1 / 6])
    np.testing.assert_array_equal([row["noise"] for row in found["clusters"]], [0.1, np.nan, 0.2])
    text = privacy_text(finite_or_none(found))
    assert f"epsilon {want:.3g} at delta 0.001 after 2 rounds" in text and "update: 0.1, –, 0.2; an" in text
    clipped = Config("fedavg", dp_clip=0.5, **OPTIONS)
    clipped = privacy_of(clipped, 6, 2, np.zeros(6, int), {"clip": 0.5, "noise": [0.0]})
    assert clipped["epsilon"] is clipped["delta"] is None and "not private" in privacy_text(clipped)


@needs_accountant
@pytest.mark.slow
def test_a_run_reports_its_epsilon(tmp_path):
    summary, history, _ = run(Config("fedavg", **OPTIONS, **PRIVATE), out=tmp_path)
    found = summary["privacy"]
    want = epsilon(GaussianDP(0.5, 2.0, quantile=0.5), num_clients=6, cohort=3, num_rounds=2, delta=1e-3)
    assert found["epsilon"] == want and found["clusters"][0]["share"] == 1
    assert found["clip"] == history.records[-1]["clip"] != 0.5
    assert f"private: epsilon {want:.3g} at delta 0.001" in (tmp_path / "report.html").read_text()
    summary, history, _ = run(Config("fedem", num_models=2, **OPTIONS, **PRIVATE))
    [one] = summary["privacy"]["clusters"]  # a sum of the updates of all models, of all three participants
    scale = history.records[-1]["clip"] * 2.0 / math.sqrt(1 - 1 / 100)
    assert one["share"] == 1 and one["noise"] == pytest.approx(scale / 3)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_clients():
    big = Task(
        init=lambda key: {"w": jax.random.normal(key, (1000, D))},
        apply=lambda p, x: (x @ p["w"].T).sum(axis=-1),
        cost=lambda outputs, batch: 0.5 * (outputs - batch["y"]) ** 2,
    )
    used = {}
    for n in (32, 256):
        clients = regression(n)
        dp = GaussianDP(1.0, 1.0, quantile=0.5)
        algorithm = jfcl.fedavg(big, TRAINING, weights="equal", dp=dp, client_axis=jfcl.chunked(1))
        state = jax.eval_shape(algorithm.init, jax.random.key(0), clients)
        compiled = jax.jit(algorithm.step).lower(jax.random.key(0), state, clients).compile()
        used[n] = compiled.memory_analysis().temp_size_in_bytes
    assert used[256] < used[32] + 100_000 < 256 * 4 * 1000 * D


@pytest.mark.slow
@pytest.mark.parametrize("cohort", [None, 4])
@pytest.mark.parametrize("name", ["fedavg", "ifca"])
@pytest.mark.filterwarnings("ignore:.*all clients use one of the 2 models")
def test_conformance(name, cohort):
    make = partial(jfcl.ifca, num_clusters=2) if name == "ifca" else partial(jfcl.fedavg, weights="equal")
    dp = GaussianDP(2.0, 0.05, quantile=0.5, min_size=2)
    check_algorithm(partial(make, dp=dp, cohort=cohort), recovers=name == "ifca" and cohort is None)


@needs_accountant
def test_the_page_states_the_epsilon_of_its_commands():
    page = (Path(jfcl.__file__).parent.parent / "docs" / "howto" / "private.md").read_text()
    stated = re.findall(r"^(jfcl run .*?) *# ε = ([\d.]+)$", page.replace("\\\n", " "), flags=re.MULTILINE)
    assert len(stated) == 4
    for command, number in stated:
        args = vars(parse(shlex.split(command)[1:]))
        config = Config(**{name: args[name] for name in ("method", *all_options()) if name in args})
        count = config.population or config.clients
        last = {"clip": config.dp_clip, "noise": [0.1]}
        found = privacy_of(config, count, config.rounds, np.zeros(count, np.int32), last)
        assert f"{found['epsilon']:.3g}" == number, command


def test_the_clipping_norm_keeps_its_type_under_x64():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        clip, like = jnp.float32(1.0), {"w": np.zeros(2, np.float32)}
        present = np.ones(3, bool)
        dp = GaussianDP(1.0, 0.1, quantile=0.5)
        next_clip = partial(privacy.next_clip, dp)
        new = jax.eval_shape(next_clip, jax.random.key(0), clip, present, present, like, jnp.float32(3.0))
    assert new.dtype == jnp.float32


def test_one_client_has_no_default_delta():
    options = {"clients": 1, "clusters": 1, "dp_clip": 1.0, "dp_noise": 1.0}
    with pytest.raises(ValueError, match="dp_delta must be given for one client"):
        Config("fedavg", **options)
    assert Config("fedavg", **options, dp_delta=0.1).dp_delta == 0.1


def test_the_clipping_norm_of_two_clients_under_much_noise_stays_a_number():
    dp, inside = GaussianDP(clip=1.0, noise=4.0, quantile=0.5), np.ones(2, bool)

    def move(clip, key):
        clip = privacy.next_clip(dp, key, clip, inside, inside, np.zeros(3, np.float32), jnp.float32(2))
        return clip, clip

    keys = jax.random.split(jax.random.key(0), 2000)
    for start in (1e-20, 1.0, 1e20):
        norms = np.asarray(jax.lax.scan(move, jnp.float32(start), keys)[1])
        assert np.isfinite(norms).all() and (norms > 0).all() and len(set(norms.tolist())) > 100
