"""A method with mixtures of models from outside the library: trained, evaluated, resumed, in a population."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fedem_method import State, fedem
from scipy.special import log_softmax, logsumexp

import jfcl
from jfcl.core import Clients, Served, mixture_task
from jfcl.experiments import Config, export_model, load_run
from jfcl.experiments import run as run_config
from jfcl.testing import check_algorithm

TASK = jfcl.models.classification(jfcl.models.Linear(3), (4,), 3)
KEY = jax.random.key(0)
TRAINING = jfcl.local_training(optax.sgd(0.5), num_steps=5)
METHOD = fedem(TASK, TRAINING, num_clusters=2)
RNG = np.random.default_rng(3)
MODELS = {"Dense_0": {"kernel": np.float32(RNG.normal(size=(5, 4, 3))), "bias": np.float32(RNG.normal(size=(5, 3)))}}


def problem(n=8, m=30, seed=0):
    """Two models label the examples; client `i` has a share `i / (n - 1)` of the second."""
    rng = np.random.default_rng(seed)
    models = np.random.default_rng(7).normal(size=(2, 4, 3)) * 3
    x = rng.normal(size=(n, m, 4)).astype(np.float32)
    of = (np.arange(m)[None] < np.linspace(0, m, n)[:, None]).astype(int)
    y = np.einsum("nmd,nmdc->nmc", x, models[of]).argmax(-1).astype(np.int32)
    return Clients({"x": x, "y": y}, np.full(n, m, np.int32), np.arange(n, dtype=np.int32))


TRAIN, TEST, NEW = problem(), problem(seed=1), problem(n=5, seed=2)._replace(id=None)


def run(**options):
    given = {"key": KEY, "num_rounds": 20, "eval_every": 10, "test_clients": TEST, "newcomers": NEW}
    return jfcl.simulate(METHOD, TRAIN, **(given | options))


def mixture_loss(served, clients):
    """The mean negative log-likelihood of each client's labels under its mixture, in float64."""
    params = served.models["Dense_0"]
    kernel, bias = (np.asarray(params[name], np.float64) for name in ("kernel", "bias"))
    logits = np.einsum("nmd,kdc->nkmc", clients.examples["x"], kernel) + bias[None, :, None]
    each = np.take_along_axis(log_softmax(logits, -1), clients.examples["y"][:, None, :, None], -1)[..., 0]
    return -logsumexp(each, axis=1, b=np.asarray(served.to, np.float64)[:, :, None]).mean(axis=1)


def test_a_mixture_is_trained_and_reported_as_a_mixture():
    history = run()
    want = mixture_loss(history.served, TEST)
    np.testing.assert_allclose(history.clients["loss"][0], want, rtol=1e-4)
    np.testing.assert_allclose(history.records[-1]["loss"], want.mean(), rtol=1e-4)
    alone = np.asarray(jfcl.evaluate(TASK, history.served.models, TEST, None)["loss"])
    assert want.mean() < alone.mean()  # most clients have examples of both models
    np.testing.assert_array_equal(history.clients["cluster"][0], np.asarray(history.served.to).argmax(axis=1))
    corners = np.asarray(history.served.to)[[0, -1]]
    assert abs(corners[0, 0] - corners[1, 0]) > 0.9  # the first client has the one model, the last the other


def test_newcomers_fit_their_mixtures():
    history = run()
    served = METHOD.adopt(history.state, jax.tree.map(jnp.asarray, NEW))
    np.testing.assert_allclose(history.records[-1]["newcomer_loss"], mixture_loss(served, NEW).mean(), rtol=1e-4)


def test_a_mixture_resumes_bit_for_bit(tmp_path):
    whole = run(out=tmp_path / "whole")
    run(out=tmp_path / "parts", stop_after=10)
    parts = run(out=tmp_path / "parts", resume=True)
    for a, b in zip(jax.tree.leaves(whole.state), jax.tree.leaves(parts.state), strict=True):
        np.testing.assert_array_equal(a, b)
    assert whole.records == parts.records
    assert (tmp_path / "whole" / "clients.csv").read_bytes() == (tmp_path / "parts" / "clients.csv").read_bytes()


def test_a_mixture_in_a_population():
    store, tests = (jfcl.data.ClientStore.from_clients(part) for part in (TRAIN, TEST))
    people = jfcl.Population(store, cohort=8, test_clients=tests, evaluate=range(8))
    history = jfcl.simulate(METHOD, people, key=KEY, num_rounds=8, eval_every=8)
    rows = np.asarray(history.rows.arrays[0])
    served = Served(history.state.params, rows)
    np.testing.assert_allclose(history.clients["loss"][0], mixture_loss(served, TEST), rtol=1e-4)
    np.testing.assert_array_equal(history.clients["weights"][0], rows)


def test_a_mixture_is_exported(tmp_path):
    served = run().served
    model = served.models, served.to[3]
    export_model(mixture_task(TASK), model, tmp_path / "model.npz", input_shape=(4,))
    outputs = np.asarray(jax.jit(mixture_task(TASK).apply)(model, TEST.examples["x"][3]), np.float64)
    picked = np.take_along_axis(log_softmax(outputs, -1), TEST.examples["y"][3][:, None], 1)
    np.testing.assert_allclose(-picked.mean(), mixture_loss(served, TEST)[3], rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda served: served._replace(to=served.to * 2), "mixture must be at least 0, with sum 1"),
        (lambda served: served._replace(to=served.to[:, :1]), "served .* must be int32"),
        (lambda served: served._replace(to=served.to[:3]), "served .* must be int32"),
        (lambda served: served._replace(found=jnp.zeros(3, jnp.int32)), "served found must be rows of 8 clients"),
        (lambda served: served._replace(shares=served.to[:, 0]), r"served shares must be float32 \[8, K\]"),
        (lambda served: served._replace(shares=served.to * 2), "at least 0, with sum 1"),
        (lambda served: served.models, "serve must be a function that returns a Served"),
    ],
    ids=["sums", "models", "clients", "found", "one share", "shares", "type"],
)
def test_what_is_served_wrongly_is_refused(change, words):
    wrong = METHOD._replace(serve=lambda state, clients: change(METHOD.serve(state, clients)))
    with pytest.raises(ValueError, match=words):
        jfcl.simulate(wrong, TRAIN, key=KEY, num_rounds=1)
    store = jfcl.data.ClientStore.from_clients(TRAIN)
    with pytest.raises(ValueError, match=words):
        jfcl.simulate(wrong, jfcl.Population(store, 8, test_clients=store, evaluate=8), key=KEY, num_rounds=1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda to: 0.7 * to, "mixture must be at least 0, with sum 1"),
        (lambda to: 2 + to.argmax(axis=1).astype(jnp.int32), r"in 0\.\.1, rows of the models"),
    ],
    ids=["sums", "models"],
)
def test_what_is_served_wrongly_by_the_examples_is_refused(change, words):
    def serve(state, clients):
        served = METHOD.serve(state, clients)
        kind = jnp.zeros(8, jnp.int32) if words.startswith("in") else served.to
        return served._replace(to=kind if clients is None else change(served.to))

    with pytest.raises(ValueError, match=words):
        jfcl.simulate(METHOD._replace(serve=serve), TRAIN, key=KEY, num_rounds=1, test_clients=TEST)
    with pytest.raises(ValueError, match=words):  # nor is it compared in a sweep
        jfcl.sweep(lambda unused: METHOD._replace(serve=serve), {"unused": [1]}, TRAIN, key=KEY, num_rounds=1)


def test_what_a_cohort_is_served_wrongly_is_refused_without_tests():
    wrong = METHOD._replace(serve=lambda state, clients: Served(state.params, 0.7 * state.mixture))
    people = jfcl.Population(jfcl.data.ClientStore.from_clients(TRAIN), cohort=8)
    with pytest.raises(ValueError, match="sum 1"):
        jfcl.simulate(wrong, people, key=KEY, num_rounds=1)


@pytest.mark.slow_cases("models")
@pytest.mark.parametrize(
    ("to", "words"),
    [
        (np.full((5, 2), 0.7, np.float32), "sum 1"),
        (np.array([0, 1, 0, 2, 0], np.int32), r"in 0\.\.1, rows"),
        (np.ones((5, 1), np.float32), r"served .* float32 \[5, 2\]"),
        (np.zeros(5, np.float32), r"served .* must be int32 \[5\]"),
    ],
    ids=["sums", "models", "weights", "type"],
)
def test_what_newcomers_are_served_wrongly_is_refused(to, words):
    wrong = METHOD._replace(adopt=lambda state, clients: Served(state.params, jnp.asarray(to)))
    with pytest.raises(ValueError, match=words):
        jfcl.simulate(wrong, TRAIN, key=KEY, num_rounds=1, newcomers=NEW)
    nothing = METHOD._replace(adopt=lambda state, clients: None)
    with pytest.raises(ValueError, match="adopt must be a function that returns a Served"):
        jfcl.simulate(nothing, TRAIN, key=KEY, num_rounds=1, newcomers=NEW)


def test_newcomers_may_have_models_of_their_own():
    models = jax.tree.map(jnp.asarray, MODELS)
    method = METHOD._replace(adopt=lambda state, clients: Served(models, None))
    history = jfcl.simulate(method, TRAIN, key=KEY, num_rounds=1, newcomers=NEW)
    want = np.asarray(jfcl.evaluate(TASK, MODELS, NEW, np.arange(5))["loss"]).mean()
    assert history.records[-1]["newcomer_loss"] == pytest.approx(want, rel=1e-5)


def test_a_task_without_mix_is_refused():
    with pytest.raises(ValueError, match="models of this task cannot be mixed"):
        method = fedem(TASK._replace(mix=None), TRAINING, num_clusters=2)
        jfcl.simulate(method, TRAIN, key=KEY, num_rounds=1, test_clients=TEST)


def test_weights_of_the_only_model_are_that_model():
    to = np.array([0, 2, 1, 1, 0, 2, 2, 0])
    one = jfcl.evaluate(TASK, MODELS, TEST, to)
    several = jfcl.evaluate(TASK, MODELS, TEST, np.eye(5)[to])
    for name in ("loss", "accuracy", "cluster"):
        np.testing.assert_allclose(one[name], several[name], rtol=1e-5)


class Keyed(NamedTuple):
    params: dict
    mixture: jax.Array
    key: jax.Array


def keyed_fedem(task, training, *, client_axis=None):
    """Returns the FedEM above, whose state also has a random key."""
    inner = fedem(task, training, num_clusters=2, client_axis=client_axis)

    def step(key, state, clients):
        new, metrics = inner.step(key, State(*state[:2]), clients)
        return Keyed(*new, jax.random.fold_in(state.key, 1)), metrics

    return inner._replace(init=lambda key, clients: Keyed(*inner.init(key, clients), key), step=step)


@pytest.mark.slow
def test_the_method_of_the_page_passes_the_conformance_test():
    check_algorithm(keyed_fedem, padding_tolerance=1e-6, examples_tolerance=1e-6)  # it multiplies matrices over both


@pytest.mark.slow
def test_a_configured_run_keeps_its_mixtures(tmp_path):
    config = Config("fedem_method:fedem", clients=6, clusters=2, rounds=3, model="linear", local_steps=5)
    _, history, parts = run_config(config, out=tmp_path / "run")
    found = load_run(tmp_path / "run")
    np.testing.assert_array_equal(found.weights, history.served.to[0])
    x = parts.federation.test.examples["x"][2]
    probabilities = np.exp(np.asarray(found.predictor(2)(x)))
    np.testing.assert_allclose(probabilities.sum(-1), 1, rtol=1e-4)
    with pytest.raises(ValueError, match="mixtures"):
        found.choose({"x": x}, by="inputs")


@pytest.mark.parametrize(("make", "cohort"), [(partial(jfcl.fedem, hard=True), 1), (jfcl.ifca, 2)])
def test_a_history_has_what_its_clients_were_served(make, cohort):
    """Also of clients that have not taken part, or would now choose otherwise than in their last round."""
    method = make(TASK, TRAINING, num_clusters=2, cohort=cohort)
    history = jfcl.simulate(method, TRAIN, key=KEY, num_rounds=8, eval_every=8, test_clients=TEST)
    served = history.served
    np.testing.assert_array_equal(served.to, history.clients["model"][0])
    assert (np.asarray(method.serve(history.state, None).to) != served.to).any()
    again = jfcl.evaluate(TASK, served.models, TEST, served.to)["loss"]
    np.testing.assert_allclose(again, history.clients["loss"][0], rtol=1e-5)
