"""Every registered method keeps the library's promises."""

import inspect
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiled import rollout

import jfcl
from jfcl import attacks, kernels
from jfcl.core import Algorithm, names
from jfcl.core.options import options_of
from jfcl.mapping.axis import client_mesh, sharded
from jfcl.mapping.placement import place
from jfcl.methods import METHODS
from jfcl.methods.options import factory as as_factory
from jfcl.simulation.evaluation import unlike
from jfcl.testing import check_algorithm, problem

OPTIONS = {
    "oracle": {"cluster": problem().cluster},
    "ifca": {"num_clusters": 2},
    "cfl": {"eps_1": 0.4, "eps_2": 0.5, "max_clusters": 4},
    "federated_clustering": {"radius": 3.0},
    "myopic_clustering": {"num_clusters": 2, "radius": 3.0},
    "momentum_clustering": {"num_clusters": 2, "quantile": 0.3},
    "knn_per": {"num_neighbours": 2},
    "hypcluster": {"num_clusters": 2, "warm_rounds": 2},
    "one_shot": {"num_clusters": 2},
    "flhc": {"num_clusters": 2},
    "fesem": {"num_clusters": 2, "local_rounds": 3},
    "clove": {"num_clusters": 2},
    "cfl_gp": {"num_clusters": 2},
    "pacfl": {"num_clusters": 2, "num_vectors": 2, "by_label": False},
    "fedgroup": {"num_clusters": 2, "pretrain_steps": 3},
    "flux": {"num_clusters": 2, "by_label": False, "rounds_before": 2},
    "fedgwc": {"cohort": 3, "tolerance": 1.0, "max_clusters": 3},
    "stocfl": {"max_clusters": 4, "observe_epochs": 2},
    "fedem": {"num_clusters": 2},
    "fedrc": {"num_clusters": 2},
    "fedsoft": {"num_clusters": 2, "lam": 0.5},
}
ONE_STEP = {"myopic_clustering", "momentum_clustering"}
KIND = {
    "knn_per": "classification",
    "fedem": "classification",
    "fedrc": "classification",
    "feddrift": "classification",
    "fedper": "network",
    "fedrep": "network",
    "lg_fedavg": "network",
    "fedbn": "network",
}
EXAMPLES = {"pacfl": 1e-3, "fedem": 1e-6, "fedrc": 1e-6}  # products of examples: its state, K models side by side
MULTIPLIES = {"myopic_clustering", "momentum_clustering"}
# CFL's clients need enough examples to know their own model, which 3 of 4 unknowns are not; see test_cfl for it.
FINDS_CLUSTERS = {"ifca", "oracle"}  # CLoVE: some clients have larger losses than others under all models


def factory(name, **more):
    make = partial(METHODS[name].make, **(OPTIONS.get(name, {}) | more))
    if name not in ONE_STEP:
        return make
    return lambda task, training, client_axis=None: make(  # their clients send gradients
        task, training._replace(num_steps=1), client_axis=client_axis
    )


def quick(*names):
    """Every method, where `make test` takes those with `names` only: they share their rounds with most others."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]


@pytest.mark.parametrize("name", quick("fedavg", "local"))
def test_no_device_gathers_the_data_of_others(name):
    """The compiled round of clients divided among two devices moves models and sums, never examples.

    But for Federated-Clustering, in which every model meets a batch of every client: that is what it gathers.
    """
    clients, _, task, training = problem(KIND.get(name, "regression"))
    axis = sharded(client_mesh(2))
    placed = place(axis, clients)
    algorithm = factory(name)(task, training, client_axis=axis)
    state = jax.jit(algorithm.init)(jax.random.key(0), placed)
    text = jax.jit(algorithm.step).lower(jax.random.key(1), state, placed).compile().as_text()
    results = re.findall(
        r"= (\(?\w+\[[^=]*?) (?:all-gather|all-to-all|collective-permute|all-reduce)(?:-start)?\(", text
    )
    moved = [shape for result in results for shape in re.findall(r"\w+\[([\d,]*)\]", result)]
    n, m = placed.examples["y"].shape
    examples = {f"{n},{m},4", f"{n // 2},{m},4", f"{n},{m}"}
    assert not examples & set(moved) or name == "federated_clustering", moved
    assert "all-reduce" in text or "all-gather" in text or name == "local", "nothing is said between devices at all"


@pytest.mark.parametrize("name", quick("fedsoft", "stocfl"))
def test_types_stay_with_64_bits_enabled(name):
    clients, _, task, training = problem(KIND.get(name, "regression"))
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        algorithm, key = factory(name)(task, training), jax.eval_shape(lambda: jax.random.key(0))
        state = jax.eval_shape(algorithm.init, key, clients)
        new, _ = jax.eval_shape(algorithm.step, key, state, clients)
        assert not unlike(new, state)
        for serve in filter(None, (algorithm.serve, algorithm.adopt)):
            served = jax.eval_shape(serve, state, clients)
            assert served.to is None or served.to.dtype in (jnp.int32, jnp.float32)


@pytest.mark.parametrize("name", quick("stocfl", "cfl_gp", "fedsoft"))
def test_clients_without_examples_in_a_round_keep_their_rows(name):
    clients, _, task, _ = problem(KIND.get(name, "regression"))
    decay = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1))  # which moves a model without examples, too
    training = jfcl.local_training(decay, num_steps=3)
    algorithm = factory(name, **({"period": 1} if name == "cfl_gp" else {}))(task, training)
    state, _ = rollout(algorithm, clients, key=jax.random.key(0), num_rounds=3)
    absent = clients._replace(size=np.where(np.isin(np.arange(7), [2, 3]), 0, clients.size).astype(np.int32))
    after, _ = jax.jit(algorithm.step)(jax.random.key(9), state, absent)
    of_examples = {"knn_per": "params", "feddrift": "memory"}  # computed from the examples that clients have now
    if name in of_examples:
        state, after = (s._replace(**{of_examples[name]: ()}) for s in (state, after))
    for (path, old), new in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(after), strict=True):
        if old.shape[:1] == (7,):
            np.testing.assert_array_equal(new[2:4], old[2:4], err_msg=jax.tree_util.keystr(path))


def test_conformance_needs_assertions():
    without = {"__name__": jfcl.testing.__name__}
    exec(compile(inspect.getsource(jfcl.testing), "testing.py", "exec", optimize=1), without)
    with pytest.raises(ValueError, match="needs Python without -O"):
        without["check_algorithm"](jfcl.fedavg)


@pytest.mark.parametrize("name", quick("ifca"))
def test_conformance(name):
    check_algorithm(
        factory(name),
        recovers=name in FINDS_CLUSTERS,
        kind=KIND.get(name, "regression"),
        padding_tolerance=1e-6 if name in MULTIPLIES else 0.0,
        examples_tolerance=EXAMPLES.get(name, 1e-6 if KIND.get(name) == "network" else 0.0),
    )


WRONG = {bool: "no", int: 2.5, float: "0.1", str: 3}


@pytest.mark.parametrize("name", METHODS)
def test_an_option_of_a_wrong_type_is_refused_by_name(name):
    _, _, task, training = problem(KIND.get(name, "regression"))
    training = training._replace(num_steps=1) if name in ONE_STEP else training
    for option in options_of(METHODS[name].make).values():
        given = OPTIONS.get(name, {}) | {option.name: WRONG[option.kind]}
        with pytest.raises(ValueError, match=rf"\b{option.name}\b"):
            METHODS[name].make(task, training, **given)


@pytest.mark.parametrize("name", METHODS)
def test_an_unknown_argument_is_refused_with_the_nearest_name(name):
    _, _, task, training = problem(KIND.get(name, "regression"))
    with pytest.raises(TypeError, match="did you mean 'init_params'"):
        METHODS[name].make(task, training, **OPTIONS.get(name, {}), init_parms=None)
    text = METHODS[name].make.__doc__
    assert all(f"  {option}: " in text or f"{option}, " in text for option in ("init_params", "client_axis")), text


def test_a_method_without_an_option_refuses_it():
    _, _, task, training = problem()
    with pytest.raises(TypeError, match=r"ifca: missing a required .*'num_clusters'"):
        jfcl.ifca(task, training)
    with pytest.raises(TypeError, match="ditto has no argument 'dp'"):
        jfcl.ditto(task, training, dp=None)


WEIGHTED = [name for name in METHODS if "weights" in options_of(METHODS[name].make)]


@pytest.mark.parametrize("name", [n if n == "fedavg" else pytest.param(n, marks=pytest.mark.slow) for n in WEIGHTED])
def test_weights_of_clients_may_be_given(name):
    """The sizes as an array are `weights="size"`, in a cohort too; arrays that are no weights of these are refused."""
    clients, _, task, training = problem(KIND.get(name, "regression"))
    clients = clients._replace(id=np.array([3, 9, 1, 0, 4, 5, 8], np.int32))  # as in a population
    clients.examples["step"] = np.zeros((7, 6), np.int32)  # of FedDrift
    by_id = np.full(10, np.nan, np.float32)
    by_id[clients.id] = clients.size
    others = {"knn_per": {"mixing": 0.5}}.get(name, {})  # else a part of the examples chooses it
    if name == "oracle":
        clients = clients._replace(id=None)
        by_id = clients.size
    options = {"cohort": 4} if "cohort" in options_of(METHODS[name].make) and name != "one_shot" else {}
    options |= others

    def after(weights):
        algorithm = factory(name, weights=weights, **options)(task, training)
        if algorithm.check is not None:
            algorithm.check(clients)
        state = jax.jit(algorithm.init)(jax.random.key(0), clients)
        return jax.jit(algorithm.step)(jax.random.key(1), state, clients)[0]

    jax.tree.map(np.testing.assert_array_equal, after("size"), after(np.nan_to_num(by_id)))
    n = len(by_id)
    for wrong in (by_id * np.nan, -np.ones(n), np.zeros(n), np.ones((n, 1)), np.ones(n - 1), np.array(["a"] * n)):
        with pytest.raises(ValueError, match="weights must be"):
            after(wrong)


NO_STATISTICS = {"federated_clustering", "momentum_clustering", "myopic_clustering"}  # clients send gradients


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in METHODS if KIND.get(name) != "network" and name not in NO_STATISTICS]
)
def test_conformance_of_a_network_with_dropout_batch_statistics_and_personal_layers(name):
    takes = "personal" in inspect.signature(METHODS[name].make).parameters
    own = {"personal": lambda path: path.startswith("Dense_1")} if takes else {}
    tolerances = {"padding_tolerance": 1e-6, "examples_tolerance": EXAMPLES.get(name, 1e-6)}
    check_algorithm(partial(factory(name), **own), kind="network", **tolerances)


@pytest.mark.parametrize("name", sorted(NO_STATISTICS))
def test_gradients_have_no_statistics(name):
    _, _, task, training = problem("network")
    with pytest.raises(ValueError, match=r"send gradients.*no batch statistics"):
        factory(name)(task, training)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"cohort": 4},
        {"restarts": 3, "restart_rounds": 2},
        {"stable_rounds": 2, "shared": lambda path: path == "b"},
    ],
    ids=["cohort", "restarts", "shortcut and sharing"],
)
def test_ifca_with_options(options):
    check_algorithm(partial(jfcl.ifca, num_clusters=2, **options))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"similarity": "gradients", "relative": True, "eps_1": 0.9, "eps_2": 0.1, "aggregator": kernels.mean},
        {"validation": 0.25, "fallback_rounds": 1, "privacy": "sign", "recursive": True, "tree_dim": 2},
        {"cohort": 4, "eps_1": np.inf, "eps_2": 1e-9},  # clients that are not there wait in the cluster that stays
    ],
    ids=["gradients, relative, aggregator", "fall-back, hidden, recursive", "cohort"],
)
def test_cfl_with_options(options):
    check_algorithm(partial(jfcl.cfl, **OPTIONS["cfl"] | options))


@pytest.mark.slow_cases(
    "*-alie",
    "*-nan",
    "fedavg-fang",
    "fedavg-far",
    "fedavg-force_split",
    "fedavg-gaussian",
    "fedavg-hijack",
    "fedavg-ipm",
    "fedavg-m*",
    "fedavg-optimal*",
    "fedavg-scaled",
    "fedavg-sign_flip",
    "fedavg-zero",
)
@pytest.mark.parametrize(
    ("name", "attack"),
    [
        *[("fedavg", attack) for attack in attacks.UPDATE_ATTACKS],
        *[(name, attack) for name in ("oracle", "ifca", "cfl", "byzantine_cfl") for attack in ("nan", "alie")],
    ],
)
def test_attacked_methods_keep_their_models_finite(name, attack):
    clients, _, task, training = problem()
    adversary = jfcl.Adversary(attacks.UPDATE_ATTACKS[attack](), jnp.arange(7) >= 5)
    algorithm = METHODS[name].make(task, training, adversary=adversary, **OPTIONS.get(name, {}))
    state, metrics = rollout(algorithm, clients, key=jax.random.key(0), num_rounds=2)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))
    assert metrics["nonfinite"][0] == (2 if attack == "nan" else 0)


@pytest.mark.slow
def test_an_attack_is_seen_and_an_aggregator_withstands_it():
    clients, _, task, training = problem()
    clients = jax.tree.map(lambda x: x[np.array([0, 2, 4, 0, 2, 4, 0])], clients._replace(id=None))
    adversary = jfcl.Adversary(attacks.gaussian(50.0), jnp.arange(7) >= 5)

    def model(**options):
        algorithm = jfcl.fedavg(task, training, **options)
        return np.asarray(jfcl.rollout(algorithm, clients, key=jax.random.key(0), num_rounds=20)[0].params["w"][0])

    truth = np.array([2, 2, -2, 1])
    assert np.abs(model() - truth).max() < 0.5
    assert np.abs(model(adversary=adversary) - truth).max() > 2
    for aggregator in (
        partial(kernels.trimmed_mean, num_malicious=2),
        partial(kernels.multi_krum, num_malicious=2),
        kernels.coordinate_median,
        kernels.geometric_median,
    ):
        assert np.abs(model(adversary=adversary, aggregator=aggregator) - truth).max() < 0.6, aggregator


def broken(change):
    def make(task, training, *, client_axis=None):
        good = jfcl.fedavg(task, training, client_axis=client_axis)
        return Algorithm(good.init, partial(change, good), task) if change is not None else good

    return make


def forgets_bytes(good, key, state, clients):
    state, metrics = good.step(key, state, clients)
    return state, {"loss": metrics["loss"]}


def counts_padding(good, key, state, clients):
    n = jnp.float32(clients.size.shape[0])
    state, metrics = good.step(key, state, clients)
    return state._replace(params=jax.tree.map(lambda p: p + n, state.params)), metrics


def looks_at_padding(good, key, state, clients):
    everything = jnp.nanmean(clients.examples["x"])
    state, metrics = good.step(key, state, clients)
    return state._replace(params=jax.tree.map(lambda p: p + everything, state.params)), metrics


def looks_for_padding_before_others(good, key, state, clients):
    before = (clients.size[:-1] == 0) & (clients.size[1:] > 0)
    state, metrics = good.step(key, state, clients)
    return state._replace(params=jax.tree.map(lambda p: p + before.any().astype(p.dtype), state.params)), metrics


def changes_types(good, key, state, clients):
    state, metrics = good.step(key, state, clients)
    return state._replace(round=state.round.astype(jnp.float32)), metrics


@pytest.mark.slow_cases(
    "changes_types-keep the state's shapes and types",
    "counts_padding-padding clients must not change a model",
    "looks_at_padding-padding (examples|clients) must not change",
    "looks_for_padding_before_others-*",
)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (forgets_bytes, "metrics must have loss"),
        (counts_padding, "padding clients must not change a model"),
        (looks_at_padding, "padding (examples|clients) must not change"),
        (looks_for_padding_before_others, "clients in another order, with padding among them"),
        (changes_types, "keep the state's shapes and types"),
    ],
)
def test_the_check_finds_broken_methods(change, words):
    with pytest.raises(AssertionError, match=words):
        check_algorithm(broken(change))


@pytest.mark.slow
def test_recovery_is_checked():
    with pytest.raises(AssertionError, match="no seed found the clusters"):
        check_algorithm(jfcl.fedavg, recovers=True)


@pytest.mark.slow
def test_eight_devices_give_what_one_gives():
    """Every method; 7 clients, so that one device has only a padding client. In a process that has eight devices."""
    code = f"""
import jax
jax.config.update("jax_num_cpu_devices", 8)
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_methods import METHODS, served_under
import jfcl, numpy as np
for name in METHODS:
    one, eight = served_under(name, jax.vmap), served_under(name, jfcl.sharded(jfcl.client_mesh(8)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4, err_msg=name), one, eight)
    print(name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == list(METHODS)


def served_under(name, axis):
    """The models that the 7 clients of the problem are served after four rounds."""
    clients, _, task, training = problem(KIND.get(name, "regression"))
    algorithm = factory(name)(task, training, client_axis=axis)
    run = jax.jit(lambda key, clients: jfcl.rollout(algorithm, clients, key=key, num_rounds=4)[0])
    state = run(jax.random.key(0), place(axis, clients))
    return jax.tree.map(lambda p: np.asarray(p)[np.asarray(state.cluster)[:7]], state.params)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*all clients use one of the 2 models")
@pytest.mark.parametrize(
    "name",
    [n for n in METHODS if n not in {"fedbn", "pacfl"}],  # for batch normalisation, and for inputs that are no words
)
def test_models_that_look_up_their_inputs_run_on_several_devices(name):
    """Embeddings are indexed: JAX refuses that for arrays from outside of the function that each device runs."""
    rng = np.random.default_rng(0)
    words, labels = rng.integers(0, 5, (7, 6, 3)).astype(np.int32), rng.integers(0, 2, (7, 6)).astype(np.int32)
    clients = jfcl.Clients({"x": words, "y": labels, "step": 0 * labels}, np.full(7, 6, np.int32))
    task = jfcl.models.task(
        lambda key: {"e": jax.random.normal(key, (5, 2)), "b": jnp.zeros(2)},
        lambda p, x: p["e"][x].sum(axis=1) + p["b"][None],
        kind="classification",
    )
    own = {"personal": lambda path: path == "e"} if name in {"fedper", "fedrep", "lg_fedavg"} else {}
    training = jfcl.local_training(optax.sgd(0.1), num_steps=2)
    losses = []
    for axis in (jfcl.chunked(1), sharded(client_mesh(2))):
        algorithm = factory(name, **own)(task, training, client_axis=axis)
        data = {"test_clients": clients, "newcomers": clients, "client_axis": axis}
        history = jfcl.simulate(algorithm, clients, key=jax.random.key(0), num_rounds=2, **data)
        losses.append([history.records[-1]["loss"], history.records[-1]["newcomer_loss"]])
    np.testing.assert_allclose(*losses, rtol=1e-4)


@pytest.mark.slow_cases("Mine.\\n\\nReturns:\\n  `Algorithm`.")
@pytest.mark.parametrize("about", ["Mine.", "Mine.\n\nArgs:\n  task: of it.", "Mine.\n\nReturns:\n  `Algorithm`."])
def test_a_factory_of_ones_own_has_the_entries_of_shared_options(about):
    def mine(task, training, **options):
        return jfcl.fedavg(task, training, **options)

    mine.__doc__ = about
    made = as_factory("cohort", "weights")(mine)
    assert made.__doc__.startswith("Mine.\n\nArgs:\n") and "\n  cohort: " in made.__doc__
    _, _, task, training = problem()
    assert isinstance(made(task, training, cohort=2), jfcl.Algorithm)
    with pytest.raises(TypeError, match="mine has no argument 'cohrt': did you mean 'cohort'"):
        made(task, training, cohrt=2)


def test_no_method_of_the_library_is_said_to_be_absent():
    assert names._table()["values"]["method"].keys().isdisjoint(METHODS)
    assert names.value_hint("method", "FlexCFL", METHODS) == ": it is fedgroup with --migrate."
