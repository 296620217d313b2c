"""Section 2.1 of Federated-Clustering: three ways to go wrong, each of which it gets right."""

import numpy as np
import pytest

from benchmarks.papers.failure_modes import failure, failure_runs, paths

LR = 0.1


@pytest.fixture(scope="module")
def runs():
    found = {}
    for name, methods in failure_runs(LR).items():
        clients = failure(name, LR).clients
        for label, algorithm, _ in methods:
            found[name, label] = paths(algorithm, clients, seeds=100, rounds=300)
    return found


def test_the_losses_are_the_papers():
    import jax

    problem = failure("myopic", LR)
    at = np.array([1.5, 1.0, 3.0])
    for x in at:
        gradients = [
            float(
                jax.grad(
                    lambda p, i=i: problem.task.loss(p, jax.tree.map(lambda e: e[i], problem.clients.examples))[0]
                )({"x": np.float32(x)})["x"]
            )
            for i in range(3)
        ]
        truth = [x / (3 * LR), 4 / (3 * LR) * x * (x - 1) ** 2, (x - 3) / LR]
        np.testing.assert_allclose(gradients, truth, rtol=1e-4, atol=1e-4)


def test_myopic_clustering_merges_and_stays_stuck(runs):
    path = runs["myopic", "myopic_clustering"]
    np.testing.assert_allclose(path[:, 1], np.tile([1, 1, 3], (100, 1)), atol=1e-5)  # right after one step
    np.testing.assert_allclose(path[:, -1], np.tile([0, 1, 3], (100, 1)), atol=0.05)  # and never again
    np.testing.assert_allclose(runs["myopic", "federated_clustering"][:, -1], np.tile([0, 0, 3], (100, 1)), atol=1e-3)


@pytest.mark.parametrize("option", ["ifca, option I", "ifca, option II"])
def test_ifca_never_moves(runs, option):
    assert (runs["ifca", option] == 0).all()  # both clients are served the second model, which stands at 0
    np.testing.assert_allclose(runs["ifca", "federated_clustering"][:, -1], np.tile([-0.5, 0.5], (100, 1)), atol=1e-3)


def test_cfl_splits_wrongly_in_half_of_the_runs_and_never_repairs_it(runs):
    late = runs["cfl", "cfl"][:, 150:].mean(axis=1)
    wrong = np.abs(late - [1, -0.5, -0.5]).max(axis=1) < 0.4
    right = np.abs(late - [1, 1, -2]).max(axis=1) < 0.4
    assert (wrong ^ right).all() and 35 <= wrong.sum() <= 65
    late = runs["cfl", "federated_clustering"][:, 150:].mean(axis=1)
    assert np.abs(late - [1, 1, -2]).max() < 0.9  # a single client's noise, averaged over 150 rounds
    np.testing.assert_allclose(late.mean(axis=0), [1, 1, -2], atol=0.1)
