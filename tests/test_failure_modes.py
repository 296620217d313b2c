"""Section 2.1 of Federated-Clustering: three ways to go wrong, each of which it gets right."""

import jax
import numpy as np
import pytest

from benchmarks.papers.failure_modes import failure_modes, paths

LR = 0.1


@pytest.fixture(scope="module")
def runs():
    return {
        (name, label): paths(algorithm, mode.clients, seeds=100, rounds=300)
        for name, mode in failure_modes(LR).items()
        for label, (algorithm, _) in mode.runs.items()
    }


@pytest.mark.slow
def test_the_losses_are_the_papers():
    mode, at = failure_modes(LR)["myopic"], np.array([1.5, 1.0, 3.0])
    task = mode.runs["myopic_clustering"][0].task

    def losses(model):
        return jax.vmap(lambda examples: task.loss({"x": model}, examples)[0])(mode.clients.examples)

    found = jax.jit(jax.vmap(jax.jacobian(losses)))(np.float32(at))
    truth = np.stack([at / (3 * LR), 4 / (3 * LR) * at * (at - 1) ** 2, (at - 3) / LR], axis=1)
    np.testing.assert_allclose(found, truth, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_myopic_clustering_merges_and_stays_stuck(runs):
    path = runs["myopic", "myopic_clustering"]
    np.testing.assert_allclose(path[:, 1], np.tile([1, 1, 3], (100, 1)), atol=1e-5)  # right after one step
    np.testing.assert_allclose(path[:, -1], np.tile([0, 1, 3], (100, 1)), atol=0.05)  # and never again
    np.testing.assert_allclose(runs["myopic", "federated_clustering"][:, -1], np.tile([0, 0, 3], (100, 1)), atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("option", ["ifca, option I", "ifca, option II"])
def test_ifca_never_moves(runs, option):
    assert (runs["ifca", option] == 0).all()  # both clients are served the second model, which stands at 0
    np.testing.assert_allclose(runs["ifca", "federated_clustering"][:, -1], np.tile([-0.5, 0.5], (100, 1)), atol=1e-3)


@pytest.mark.slow
def test_cfl_splits_wrongly_in_half_of_the_runs_and_never_repairs_it(runs):
    late = runs["cfl", "cfl"][:, 150:].mean(axis=1)
    wrong = np.abs(late - [1, -0.5, -0.5]).max(axis=1) < 0.4
    right = np.abs(late - [1, 1, -2]).max(axis=1) < 0.4
    assert (wrong ^ right).all() and 35 <= wrong.sum() <= 65
    late = runs["cfl", "federated_clustering"][:, 150:].mean(axis=1)
    assert np.abs(late - [1, 1, -2]).max() < 0.9  # a single client's noise, averaged over 150 rounds
    np.testing.assert_allclose(late.mean(axis=0), [1, 1, -2], atol=0.1)
