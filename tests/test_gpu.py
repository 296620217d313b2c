"""Kernels on an accelerator against NumPy in float64; `pytest -m gpu` where there is one."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jfcl import kernels
from jfcl.core import free_host_memory
from jfcl.mapping.memory import free_memory
from jfcl.models import conv
from jfcl.simulation.folder import environment

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() == "cpu", reason="needs an accelerator"),
]


def normal(*shape):
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def test_the_cpu_may_be_the_default_device():
    with jax.default_device(jax.devices("cpu")[0]):
        assert "CPU" in environment()["device"]
        assert free_memory() == pytest.approx(free_host_memory(), rel=0.1)


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
    """The threshold must not pass near a point: rounding would then decide whether the point is within it."""
    near, far = normal(30, 20_000) + 10, 3 * normal(70, 20_000)
    points = np.concatenate([near, far])
    run = partial(kernels.threshold_clustering, points, radius=300.0, num_rounds=5)
    np.testing.assert_allclose(run(form="gram"), run(form="direct"), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_iters", [2, 9])  # by passes over the updates, and by their inner products
def test_centered_clip_is_the_papers(num_iters):
    updates = normal(100, 20_000)
    v, z = np.zeros(20_000), updates.astype(np.float64)
    for _ in range(num_iters):
        v += ((z - v) * np.minimum(1, 100 / np.linalg.norm(z - v, axis=1))[:, None]).mean(axis=0)
    np.testing.assert_allclose(kernels.centered_clip(updates, radius=100.0, num_iters=num_iters), v, atol=1e-4)


def test_medians():
    updates = normal(99, 5000)
    np.testing.assert_array_equal(kernels.coordinate_median(jnp.asarray(updates)), np.median(updates, axis=0))


@pytest.mark.parametrize("channels", [1, 3, 16])
def test_convolutions_of_clients_with_their_own_weights(channels):
    x, w, g = normal(4, 5, 12, 12, channels), normal(4, 5, 5, channels, 8), normal(4, 5, 10, 10, 8)

    def convolve(x, w):
        return conv(x, w, (1, 1), ((1, 1), (1, 1)), dimension_numbers=("NHWC", "HWIO", "NHWC"))

    with jax.default_matmul_precision("float32"):
        out, pull = jax.vjp(jax.vmap(convolve), x, w)
        out, to_x, to_w = (np.asarray(v, np.float64) for v in (out, *pull(g)))
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1), (0, 0))).astype(np.float64)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (5, 5), axis=(2, 3))  # [4, 5, 10, 10, channels, 5, 5]
    np.testing.assert_allclose(out, np.einsum("nbhwcij,nijco->nbhwo", windows, w), atol=2e-4)
    np.testing.assert_allclose(to_w, np.einsum("nbhwcij,nbhwo->nijco", windows, g), atol=1e-3)
    np.testing.assert_allclose((to_x * x).sum(), (out * g).sum(), rtol=1e-4, atol=1e-2)
