"""Kernels inside `jit` on constants, which are no tracers although nothing can be computed from them there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jfcl import kernels

POINTS = jnp.asarray(np.random.default_rng(0).standard_normal((9, 4)), jnp.float32)
SIMILARITY = jnp.asarray(np.corrcoef(np.random.default_rng(1).standard_normal((9, 4))), jnp.float32)
CALLS = {
    "pairwise_cosine": lambda: kernels.pairwise_cosine(POINTS),
    "squared_distances": lambda: kernels.squared_distances(POINTS, POINTS[:2]),
    "optimal_bipartition": lambda: kernels.optimal_bipartition(SIMILARITY),
    "separation_gap": lambda: kernels.separation_gap(SIMILARITY, jnp.arange(9) % 2),
    "bipartition_of_updates": lambda: kernels.bipartition_of_updates(POINTS),
    "threshold_clustering": lambda: kernels.threshold_clustering(POINTS, radius=1.0, num_rounds=2),
    "centered_clip": lambda: kernels.centered_clip(POINTS, radius=1.0, center=POINTS[0]),
    "multi_krum": lambda: kernels.multi_krum(POINTS, num_malicious=2),
    "geometric_median": lambda: kernels.geometric_median(POINTS),
    "kmeans": lambda: kernels.kmeans(POINTS, 2, key=jax.random.key(0)),
}


@pytest.mark.slow_cases(
    "bipartition_of_updates",
    "centered_clip",
    "geometric_median",
    "kmeans",
    "multi_krum",
    "pairwise_cosine",
    "separation_gap",
    "squared_distances",
    "threshold_clustering",
)
@pytest.mark.parametrize("name", CALLS)
def test_constants(name):
    outside, inside = CALLS[name](), jax.jit(CALLS[name])()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), outside, inside)
    under_vmap = jax.vmap(lambda _: CALLS[name]())(jnp.arange(2))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b[1], atol=1e-5), outside, under_vmap)
