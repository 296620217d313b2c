"""Kernels on an accelerator against NumPy in float64; `pytest -m gpu` where there is one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jfcl import kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() == "cpu", reason="needs an accelerator"),
]


def normal(*shape):
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def test_cosines_are_float32_not_tf32():
    updates = normal(1500, 3000)
    exact = updates.astype(np.float64)
    exact /= np.linalg.norm(exact, axis=1, keepdims=True)
    np.testing.assert_allclose(kernels.pairwise_cosine(updates), exact @ exact.T, atol=2e-6)


def test_matrix_and_tiles_split_alike():
    updates = normal(3000, 500)
    one, other = kernels.optimal_bipartition(kernels.pairwise_cosine(updates)), kernels.bipartition_of_updates(updates)
    np.testing.assert_array_equal(one.side, other.side)
    np.testing.assert_allclose(one.cross_similarity, other.cross_similarity, atol=1e-6)


def test_forms_agree():
    points = normal(100, 20_000) + 10
    for run in (
        lambda form: kernels.threshold_clustering(points, quantile=0.3, num_rounds=5, form=form),
        lambda form: kernels.centered_clip(points, radius=100.0, num_iters=5, form=form),
    ):
        np.testing.assert_allclose(run("gram"), run("direct"), rtol=1e-4)


def test_medians():
    updates = normal(99, 5000)
    np.testing.assert_array_equal(kernels.coordinate_median(jnp.asarray(updates)), np.median(updates, axis=0))
