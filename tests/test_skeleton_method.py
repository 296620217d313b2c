"""The skeleton that CONTRIBUTING.md points to is a method like those of the library."""

from functools import partial

import jax
import numpy as np
import pytest
from skeleton_method import server_momentum

import jfcl
from jfcl.testing import check_algorithm, problem


def test_it_passes_the_conformance_test():
    check_algorithm(server_momentum)


def test_without_momentum_it_is_fedavg():
    clients, _, task, training = problem()
    run = partial(jfcl.rollout, clients=clients, key=jax.random.key(0), num_rounds=3)
    ours, _ = run(server_momentum(task, training, beta=0.0))
    fedavg, _ = run(jfcl.fedavg(task, training))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), ours.params, fedavg.params)


def test_it_names_a_wrong_option():
    _, _, task, training = problem()
    with pytest.raises(ValueError, match="beta"):
        server_momentum(task, training, beta=1.0)
