"""The skeleton of CONTRIBUTING.md fulfils the guarantees of the library's methods."""

from functools import partial

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from skeleton_method import server_momentum

import jfcl
from jfcl.mapping import client_mesh, place, sharded
from jfcl.testing import check_algorithm, problem


@pytest.mark.slow
def test_it_passes_the_conformance_test():
    check_algorithm(server_momentum)


def test_it_is_fedavg_with_momentum():
    clients, _, task, training = problem()
    key, fedavg = jax.random.key(0), jfcl.fedavg(task, training)
    algorithm = server_momentum(task, training, beta=0.5)
    state, common = jax.jit(lambda: (algorithm.init(key, clients), fedavg.init(key, clients)))()
    step, fedavg_step = jax.jit(algorithm.step), jax.jit(fedavg.step)
    for _ in range(2):
        averaged = fedavg_step(key, common._replace(params=state.params), clients)[0].params
        expected = jax.tree.map(lambda a, v: a + 0.5 * v, averaged, state.velocity)
        state, _ = step(key, state, clients)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), state.params, expected)


def test_it_runs_on_two_devices_with_momentum():
    """Momentum starts as `zeros_like` of the model, which the function of one client must get as an argument."""
    clients, _, task, training = problem()
    axis = sharded(client_mesh(2))
    algorithm = server_momentum(task, training._replace(optimizer=optax.sgd(0.1, momentum=0.9)), client_axis=axis)
    clients = place(axis, clients)
    state = jax.jit(algorithm.init)(jax.random.key(0), clients)
    state = jax.device_put(state, NamedSharding(axis.mesh, PartitionSpec()))
    _, metrics = jax.jit(algorithm.step)(jax.random.key(1), state, clients)
    assert np.isfinite(metrics["loss"][:7]).all() and np.isnan(metrics["loss"][7])


def test_it_names_a_wrong_option():
    _, _, task, training = problem()
    with pytest.raises(ValueError, match="beta"):
        server_momentum(task, training, beta=1.0)
