"""Every registered method keeps the library's promises."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

import jfcl
from jfcl.algorithms import METHODS
from jfcl.core import Algorithm
from jfcl.testing import check_algorithm, problem

OPTIONS = {"oracle": {"cluster": problem().cluster}, "ifca": {"num_clusters": 2}}
FINDS_CLUSTERS = {"ifca", "oracle"}


@pytest.mark.parametrize("name", METHODS)
def test_conformance(name):
    check_algorithm(partial(METHODS[name].make, **OPTIONS.get(name, {})), recovers=name in FINDS_CLUSTERS)


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


def changes_types(good, key, state, clients):
    state, metrics = good.step(key, state, clients)
    return state._replace(round=state.round.astype(jnp.float32)), metrics


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (forgets_bytes, "metrics must have loss"),
        (counts_padding, "padding clients must not change a model"),
        (looks_at_padding, "padding examples must not change a bit"),
        (changes_types, "keep the state's shapes and types"),
    ],
)
def test_the_check_finds_broken_methods(change, words):
    with pytest.raises(AssertionError, match=words):
        check_algorithm(broken(change))


def test_recovery_is_checked():
    with pytest.raises(AssertionError, match="no seed found the clusters"):
        check_algorithm(jfcl.fedavg, recovers=True)
