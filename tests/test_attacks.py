"""Attacks do what their papers say, to the malicious clients and to nobody else."""

import inspect
from functools import partial
from statistics import NormalDist

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import rollout

import jfcl
from jfcl import attacks, kernels
from jfcl.core import Clients
from jfcl.experiments import Config, setups
from jfcl.experiments.lookup import find_attack
from jfcl.methods import METHODS
from jfcl.robust.aggregate import ravel_clients
from jfcl.testing import problem

KEY = jax.random.key(0)
MALICIOUS = np.array([False, True, False, False, True])
USABLE = np.array([True, True, True, False, True])
UPDATES = {
    "w": np.random.default_rng(0).standard_normal((5, 3, 2)).astype(np.float32),
    "b": np.random.default_rng(1).standard_normal(5).astype(np.float32),
}
GOOD = USABLE & ~MALICIOUS


def sent(attack, **more):
    offered = {"cluster": jnp.zeros(5, jnp.int32)} | more
    taken = {name: value for name, value in offered.items() if name in inspect.signature(attack).parameters}
    arrays = jax.tree.map(jnp.asarray, (UPDATES, MALICIOUS, USABLE))
    result = jax.jit(attack)(KEY, *arrays, **taken)
    for name, leaf in UPDATES.items():
        np.testing.assert_array_equal(result[name][~MALICIOUS], leaf[~MALICIOUS])
    return {name: np.asarray(leaf)[MALICIOUS] for name, leaf in result.items()}


CLUSTERS = jnp.array([9, 9, 9, 7, 7])  # in any numbering


@pytest.mark.slow_cases("attack-<lambda>0", "attack-<lambda>8")
@pytest.mark.parametrize(
    ("attack", "formula"),
    [
        (attacks.sign_flip(2.0), lambda x: -2 * x[MALICIOUS]),
        (attacks.scaled(3.0), lambda x: 3 * x[MALICIOUS]),
        (attacks.zero(), lambda x: 0 * x[MALICIOUS]),
        (attacks.nan(), lambda x: np.nan * x[MALICIOUS]),
        (attacks.ipm(0.5), lambda x: -0.5 * x[GOOD].mean(0)),
        (attacks.alie(1.5), lambda x: x[GOOD].mean(0) - 1.5 * x[GOOD].std(0)),
        (attacks.mimic(), lambda x: x[2]),
        (attacks.opposite(), lambda x: -x[2]),
        (attacks.force_split(), lambda x: np.stack([-x[0] - x[2], 0 * x[0]])),
        (attacks.hijack(10.0), lambda x: np.stack([5 * (x[0] + x[2]), 0 * x[0]])),
    ],
)
def test_formula(attack, formula):
    """The first hostile client is in a cluster with the good ones 0 and 2, of which 2 has the lower id."""
    result = sent(attack, cluster=CLUSTERS, ids=jnp.array([9, 1, 7, 2, 3]))
    for name, leaf in UPDATES.items():
        want = formula(leaf.astype(np.float64))
        np.testing.assert_allclose(result[name], np.broadcast_to(want, result[name].shape), rtol=1e-5, atol=1e-6)


def test_force_split_brings_the_mean_to_rest():
    result = sent(attacks.force_split())
    for name, leaf in UPDATES.items():
        np.testing.assert_allclose(leaf[GOOD].sum(0) + result[name].sum(0), 0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["cfl", "ifca"])
def test_methods_tell_attackers_the_clusters(method):
    """Two clusters are found with honest clients; then those who are hostile bring both to rest."""
    clients, _, task, training = problem()
    training = training._replace(num_steps=1)
    options = {"eps_1": 0.4, "eps_2": 0.5, "max_clusters": 2} if method == "cfl" else {"num_clusters": 2}
    make = partial(METHODS[method].make, task, training, weights="equal", **options)
    state, _ = jfcl.rollout(make(), clients, key=KEY, num_rounds=40)
    found = np.asarray(state.cluster)
    assert len(set(found.tolist())) == 2
    hostile = np.array([np.flatnonzero(found == k)[0] for k in set(found.tolist())])
    mask = np.isin(np.arange(len(found)), hostile)
    moved = jax.tree.map(lambda p: p + 0.5, state.params)  # so that there is something to learn
    state = state._replace(params=moved)
    if method == "cfl":
        state = state._replace(final=state.final | True)  # nothing is split now
    after = make(adversary=jfcl.Adversary(attacks.force_split(), mask)).step(KEY, state, clients)[0]
    honest = make().step(KEY, state, clients)[0]
    for k in set(found.tolist()):
        np.testing.assert_allclose(after.params["w"][k], moved["w"][k], atol=1e-5)
        assert np.abs(np.asarray(honest.params["w"][k] - moved["w"][k])).max() > 0.01


@pytest.mark.parametrize(
    ("method", "malicious", "said"),
    [
        ("fedavg", [1, 2], r"malicious must be of shape \(7,\), got \(2,\)"),
        ("fedavg", np.zeros(40, bool), r"malicious must be of shape \(7,\), got \(40,\)"),
        ("fedavg", np.zeros(7, int), r"malicious must be bool, of shape \[N\], got .*int"),
        *[
            (method, np.zeros(3, bool), r"malicious must be of shape \(7,\), got \(3,\)")
            for method in ("cfl", "ifca", "ditto", "knn_per", "federated_clustering", "fesem")
        ],
    ],
)
def test_a_mask_that_does_not_fit_is_refused(method, malicious, said, tmp_path):
    clients, _, task, training = problem("classification" if method == "knn_per" else "regression")
    options = {"knn_per": {"num_neighbours": 2}, "cfl": {"max_clusters": 2}}.get(method, {})
    options |= {"num_clusters": 2} if method in ("ifca", "fesem") else {}
    algorithm = METHODS[method].make(
        task, training, adversary=jfcl.Adversary(attacks.ipm(), np.array(malicious)), **options
    )
    with pytest.raises(ValueError, match=said):
        jfcl.simulate(algorithm, clients, key=KEY, num_rounds=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_gaussian_is_drawn_anew_for_every_client_and_round():
    attack, x = jax.jit(attacks.gaussian(2.0)), np.zeros((5, 4000), np.float32)
    drawn = [attack(jax.random.key(seed), {"a": x, "b": x}, MALICIOUS, USABLE) for seed in (0, 1)]
    one, other = (np.asarray(updates["a"]) for updates in drawn)
    assert not np.allclose(one[1], drawn[0]["b"][1])
    assert abs(one[MALICIOUS].std() - 2) < 0.1 and abs(one[MALICIOUS].mean()) < 0.1
    assert not np.allclose(one[1], one[4]) and not np.allclose(one[1], other[1])
    swapped = attack(jax.random.key(0), {"a": x}, MALICIOUS, USABLE, ids=np.array([0, 4, 2, 3, 1]))["a"]
    np.testing.assert_array_equal(swapped[1], one[4])  # draws are those of a client, in whatever row


# Those that look for the most harm; by bisection and loops in float64, of the update as one vector.

FLAT = np.concatenate([UPDATES[name].reshape(5, -1) for name in ("b", "w")], axis=1).astype(np.float64)
MEAN, STD = FLAT[GOOD].mean(0), FLAT[GOOD].std(0)


def largest(fits):
    """The largest number that fits, to 15 digits."""
    low, high = 0.0, 1e4
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def searched(lie, aggregate):
    """ByzFL's search for the strength at which `lie` moves the aggregate most."""
    all_usable = lambda size: np.concatenate([FLAT[GOOD], np.tile(lie(size), (2, 1))])  # noqa: E731
    moved = lambda size: np.linalg.norm(aggregate(all_usable(size)) - MEAN)  # noqa: E731
    best, farthest, step, growing = 0.0, moved(0.0), 10.0, True
    for _ in range(19):
        here = moved(best + step)
        growing = growing and here > farthest
        best, farthest = (best + step, here) if here > farthest else (best, farthest)
        step *= 2 if growing else 0.8
    return lie(best)


def assert_sent(attack, lie):
    result = sent(attack)
    for one in np.concatenate([result[name].reshape(2, -1) for name in ("b", "w")], axis=1):
        np.testing.assert_allclose(one, lie, rtol=1e-5, atol=1e-5)


def test_min_max_and_min_sum_are_as_far_out_as_they_may_be():
    squares = ((FLAT[GOOD][:, None] - FLAT[GOOD]) ** 2).sum(-1)
    of_lie = lambda size: ((MEAN - size * STD - FLAT[GOOD]) ** 2).sum(-1)  # noqa: E731
    size = largest(lambda size: of_lie(size).max() <= squares.max())
    assert_sent(attacks.min_max(), MEAN - size * STD)
    size = largest(lambda size: of_lie(size).sum() <= squares.sum(1).max())
    assert_sent(attacks.min_sum(), MEAN - size * STD)


def test_min_max_of_large_and_of_small_updates_is_as_far_out():
    updates = np.float32([[1, 3], [2, 5], [6, 4], [0, 0]])
    attack = jax.jit(attacks.min_max())
    lies = [attack(KEY, updates * c, np.arange(4) == 3, np.ones(4, bool))[3] / c for c in (1.0, 1e12, 1e-12)]
    np.testing.assert_allclose(lies[1:], [lies[0]] * 2, rtol=1e-4)


def without_large(updates, *, mask):
    return jax.tree.map(lambda x: jnp.where(jnp.abs(x) > 40, 0, x).mean(axis=0), updates)


@pytest.mark.slow_cases("coordinate_median", "mean", "trimmed_mean")
@pytest.mark.parametrize(
    ("aggregator", "aggregate"),
    [
        (None, lambda z: z.mean(0)),
        (kernels.coordinate_median, lambda z: np.median(z, axis=0)),
        (partial(kernels.trimmed_mean, num_malicious=1), lambda z: np.sort(z, axis=0)[1:-1].mean(0)),
        (without_large, lambda z: np.where(np.abs(z) > 40, 0, z).mean(0)),  # smaller steps are better again
    ],
    ids=["mean", "coordinate_median", "trimmed_mean", "without_large"],
)
def test_optimal_attacks_search_against_the_aggregator(aggregator, aggregate):
    assert_sent(attacks.optimal_alie(aggregator), searched(lambda size: MEAN + size * STD, aggregate))
    assert_sent(attacks.optimal_ipm(aggregator), searched(lambda size: -size * MEAN, aggregate))


def test_an_attack_by_name_receives_the_aggregator():
    """The median of the good updates 1, 2 and 6 and of a lie beyond 6 is 4; the mean would follow the lie anywhere."""
    attack = find_attack("optimal_alie", aggregator=kernels.make_aggregator("coordinate_median"))
    updates = np.float32([[1], [2], [6], [0]])
    result = np.asarray(jax.jit(attack)(KEY, updates, np.arange(4) == 3, np.ones(4, bool)))
    np.testing.assert_allclose(result[3, 0], 3 + 10 * np.std([1, 2, 6]), rtol=1e-6)


def test_a_run_with_monna_trusts_a_benign_client():
    config = Config("fedavg", clients=10, attack="ipm", malicious=0.3, aggregator="monna", data_seed=2)
    malicious = setups.malicious_clients(config)
    assert malicious[0] and not malicious[setups.make_aggregator(config).keywords["trusted"]]


def test_fang_lies_just_beyond_the_good_numbers():
    many = np.random.default_rng(2).standard_normal((5, 400)).astype(np.float32) + np.float32(0.3)
    many[:, 0] = 0
    result = jax.jit(attacks.fang())(KEY, many, MALICIOUS, USABLE)
    mean, good = many[GOOD].mean(0), many[GOOD]
    extreme = np.where(mean > 0, good.min(0), good.max(0))
    twice = np.where(mean > 0, extreme < 0, extreme > 0)  # farther out is twice the number, or else half of it
    ends = np.sort([extreme, np.where(twice, 2 * extreme, extreme / 2)], axis=0)
    one, other = np.asarray(result)[MALICIOUS]
    for lie in (one, other):
        assert (lie >= ends[0] - 1e-6).all() and (lie <= ends[1] + 1e-6).all()
        assert 0.4 < np.mean((lie - ends[0])[1:] / (ends[1] - ends[0])[1:]) < 0.6
    assert (one[1:] != other[1:]).all()


@pytest.mark.slow_cases("min_sum", "optimal_ipm")
@pytest.mark.parametrize("name", ["min_max", "min_sum", "fang", "optimal_ipm"])
def test_lies_of_equal_updates_and_without_good_ones_are_finite(name):
    attack = jax.jit(attacks.UPDATE_ATTACKS[name]())
    updates = np.tile(np.random.default_rng(0).uniform(1.4, 2, 50).astype(np.float32), (4, 1))
    for malicious in (np.arange(4) < 1, np.ones(4, bool)):  # the mean of three equal numbers may be off by rounding
        lie = np.asarray(attack(KEY, updates, malicious, np.ones(4, bool)))[0]
        assert np.isfinite(lie).all()
        if name in ("min_max", "min_sum") and not malicious.all():
            np.testing.assert_allclose(lie, updates[0], rtol=1e-6)  # nothing is farther out than the mean


def test_far_is_where_the_paper_puts_it():
    x = np.zeros((5, 4000), np.float32)
    found = np.asarray(jax.jit(attacks.far())(KEY, x, MALICIOUS, USABLE))[MALICIOUS]
    assert abs(found.mean() - 1e6) < 20 and abs(found.std() - 200) < 10


def test_alie_hides_as_far_out_as_a_majority_allows():
    x = np.random.default_rng(0).standard_normal((28, 2000)).astype(np.float32)
    malicious, usable = np.arange(28) >= 20, np.arange(28) < 25
    result = np.asarray(jax.jit(attacks.alie())(KEY, x, malicious & usable, usable))
    n, f = 25, 5  # of those that take part
    z = NormalDist().inv_cdf((n - f - (n // 2 + 1 - f)) / (n - f))
    np.testing.assert_allclose(result[22], x[:20].mean(0) - z * x[:20].std(0), atol=1e-5)


def clients():
    rng = np.random.default_rng(0)
    x, y = rng.random((5, 6, 8, 8, 1)).astype(np.float32), rng.integers(0, 10, (5, 6)).astype(np.int32)
    return Clients({"x": x, "y": y}, np.array([6, 4, 6, 6, 5], np.int32))


@pytest.mark.parametrize("name", attacks.DATA_ATTACKS)
def test_data_attacks_touch_real_examples_of_the_malicious_only(name):
    before = clients()
    after = attacks.poison(before, MALICIOUS, name, num_classes=10, seed=3)
    for part in "xy":
        np.testing.assert_array_equal(after.examples[part][~MALICIOUS], before.examples[part][~MALICIOUS])
        np.testing.assert_array_equal(after.examples[part][1, 4:], before.examples[part][1, 4:])
        np.testing.assert_array_equal(before.examples[part], clients().examples[part])
    alone = Clients(jax.tree.map(lambda x: x[4:], before.examples), before.size[4:], np.int32([4]))  # of the same draws
    alone = attacks.poison(alone, MALICIOUS[4:], name, num_classes=10, seed=3)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[0], b[4]), alone.examples, after.examples)
    changed = any((after.examples[p][i, :4] != before.examples[p][i, :4]).any() for p in "xy" for i in (1, 4))
    assert changed
    x, y = after.examples["x"][1, :4], after.examples["y"][1, :4]
    if name == "label_zero":
        assert not y.any()
    elif name == "label_reverse":
        np.testing.assert_array_equal(y, 9 - before.examples["y"][1, :4])
    elif name == "noisy_inputs":
        assert x.min() < -8 and x.max() > 8
    else:
        marked = (x[:, -3:, -3:] == 1.0).all(axis=(1, 2, 3))
        assert marked.sum() == 2 and not y[marked].any()
        np.testing.assert_array_equal(y[~marked], before.examples["y"][1, :4][~marked])


def test_data_attacks_on_a_regression():
    """Targets are no labels: -1.5 and 100 are as good as 0."""
    before = Clients(
        {"x": np.zeros((2, 3, 2), np.float32), "y": np.float32([[1, 2, 3], [-1.5, 100, 0]])}, np.full(2, 3)
    )
    hostile = np.array([False, True])
    noisy = attacks.poison(before, hostile, "noisy_inputs", num_classes=None).examples
    np.testing.assert_array_equal(noisy["y"], before.examples["y"])
    assert not noisy["x"][0].any() and noisy["x"][1].all()
    assert not attacks.poison(before, hostile, "label_zero", num_classes=None).examples["y"][1].any()
    with pytest.raises(ValueError, match="label_reverse needs labels"):
        attacks.poison(before, hostile, "label_reverse", num_classes=None)


def test_labels_of_bytes_are_reversed_beyond_them():
    before = Clients({"x": np.zeros((1, 2, 2), np.float32), "y": np.int8([[1, 2]])}, np.full(1, 2))
    after = attacks.poison(before, np.array([True]), "label_reverse", num_classes=200)
    assert after.examples["y"].tolist() == [[198, 197]]


def test_an_attack_and_what_is_held_out_are_independent():
    size = np.array([1000], np.int32)
    images = {"x": np.zeros((1, 1000, 3, 3, 1), np.float32), "y": np.ones((1, 1000), np.int32)}

    def first_half(rng, x, y, num_classes):
        return x, np.where(np.isin(np.arange(len(y)), rng.permutation(len(y))[: len(y) // 2]), 0, y)

    for attack in ("backdoor", first_half):
        after = attacks.poison(Clients(images, size), np.array([True]), attack, num_classes=2)
        for part in jfcl.data.hold_out(after, 0.4):
            assert abs((part.examples["y"] == 0).mean() - 0.5) < 0.07  # 3 standard deviations


def test_choice_is_a_share_and_depends_on_the_seed():
    assert attacks.choose_malicious(100, 0.3).sum() == 30 and not attacks.choose_malicious(5, 0.0).any()
    assert (attacks.choose_malicious(100, 0.3, seed=1) != attacks.choose_malicious(100, 0.3)).any()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"aggregator": "krum"}, "aggregator must be a function .updates, mask=.*make_aggregator.*got 'krum'"),
        ({"aggregator": kernels.krum}, "aggregator must be .*missing a required .*num_malicious"),
        ({"adversary": jfcl.Adversary("ipm", np.ones(7, bool))}, "adversary must be jfcl.Adversary"),
        ({"adversary": jfcl.Adversary(attacks.ipm, np.ones(7, bool))}, "an attack such as jfcl.attacks.ipm.. returns"),
        ({"client_axis": "vmap"}, "client_axis must be a mapping, such as jax.vmap"),
    ],
)
@pytest.mark.parametrize("make", [jfcl.fedavg, jfcl.cfl])
def test_names_and_functions_of_other_arguments_are_refused(make, options, said):
    _, _, task, training = problem()
    with pytest.raises(ValueError, match=said):
        make(task, training, **options)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"malicious must be a fraction in \[0, 1\), got 1.0"):
        attacks.choose_malicious(5, 1.0)
    with pytest.raises(ValueError, match="unknown attack 'label_none': did you mean 'label_zero'"):
        attacks.poison(clients(), MALICIOUS, "label_none", num_classes=10)
    with pytest.raises(ValueError, match=r"malicious must be of shape \(5,\)"):
        attacks.poison(clients(), MALICIOUS[:3], "label_zero", num_classes=10)


@pytest.mark.slow_cases("*--*", "attack-bfloat16-2000")
@pytest.mark.parametrize(
    "attack, dtype, lie",
    [
        (attacks.ipm(), jnp.float16, -100),
        (attacks.alie(), jnp.float16, 200),
        (attacks.hijack(), jnp.bfloat16, 2000),
        (attacks.force_split(), jnp.bfloat16, -1000),
    ],
)
def test_sums_over_many_clients_of_half_precision(attack, dtype, lie):
    malicious, updates = np.arange(600) >= 500, np.full((600, 1), 200, dtype)
    more = [np.zeros(600, np.int32)] if "cluster" in inspect.signature(attack).parameters else []
    found = np.asarray(jax.jit(attack)(KEY, updates, malicious, np.ones(600, bool), *more))
    assert found.dtype == dtype and (found[malicious] == lie).all() and (found[~malicious] == 200).all()


def test_noisy_inputs_are_for_real_numbers():
    clients = Clients({"x": np.zeros((2, 3, 1), np.uint8), "y": np.zeros((2, 3), np.int32)}, np.full(2, 3))
    with pytest.raises(ValueError, match="noisy_inputs needs inputs of floating-point numbers, and these are uint8"):
        attacks.poison(clients, np.array([True, False]), "noisy_inputs", num_classes=2)


def negated_in_place(key, updates, malicious, usable):
    for name in updates:
        updates[name] = -updates[name]
    return updates


@pytest.mark.parametrize("attack", [lambda key, u, malicious, usable: jax.tree.map(jnp.negative, u), negated_in_place])
def test_an_attack_changes_updates_of_hostile_clients_alone(attack):
    """Also where it forgets the mask, or writes into the dict that it is given."""
    clients, _, task, training = problem()
    malicious = np.arange(len(clients.size)) == 1
    states = []
    for one in (attack, attacks.sign_flip()):
        algorithm = jfcl.fedavg(task, training, adversary=jfcl.Adversary(one, malicious))
        states.append(rollout(algorithm, clients, key=KEY, num_rounds=2)[0])
    assert jax.tree.all(jax.tree.map(np.array_equal, *(state.params for state in states)))


@pytest.mark.parametrize("method", [jfcl.fedavg, jfcl.cfl])
def test_an_aggregator_draws_anew_in_every_round(method):
    clients, _, task, training = problem()

    def random_step(updates, *, mask, key):
        return jax.tree.map(lambda x: jax.random.uniform(key, x.shape[1:], x.dtype), updates)

    options = {"weights": "equal"} | ({"max_clusters": 1} if method is jfcl.cfl else {})
    for aggregator, moves in (random_step, 2), (partial(random_step, key=KEY), 1):
        algorithm = method(task, training, aggregator=aggregator, **options)
        state, steps = algorithm.init(KEY, clients), []
        for key in jax.random.split(KEY, 2):
            new, _ = algorithm.step(key, state, clients)
            steps.append(ravel_clients(new.params)[0] - ravel_clients(state.params)[0])
            state = new
        assert len(np.unique(np.round(steps, 4), axis=0)) == moves


@pytest.mark.parametrize(
    ("attack", "said"),
    [
        (lambda key, u, malicious, usable: None, "attack must be a function that returns .*, got"),
        (lambda key, u, malicious, usable: jax.tree.map(lambda x: x[:3], u), "attack must be a function that returns"),
        (lambda key, u, malicious, usable: jax.tree.map(lambda x: x.mean(0), u), "attack must be a function that"),
    ],
)
def test_what_an_attack_returns_is_checked(attack, said):
    clients, _, task, training = problem()
    algorithm = jfcl.fedavg(task, training, adversary=jfcl.Adversary(attack, np.zeros(len(clients.size), bool)))
    with pytest.raises(ValueError, match=said):
        jfcl.rollout(algorithm, clients, key=KEY, num_rounds=1)


@pytest.mark.parametrize("given", [attacks.zero(), (attacks.zero(), MALICIOUS)])
def test_an_adversary_is_an_attack_with_its_clients(given):
    _, _, task, training = problem()
    with pytest.raises(ValueError, match=r"adversary must be jfcl.Adversary\(attack, malicious\)"):
        jfcl.fedavg(task, training, adversary=given)
