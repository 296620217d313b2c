from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jfcl.core import is_finite, num_bytes
from jfcl.mapping.axis import chunked
from jfcl.robust.aggregate import cluster_mean, ravel_clients, robust_cluster_mean


def loop_cluster_mean(x, cluster, weights, k):
    """Sums in float64, one client after another."""
    out = np.zeros((k, *x.shape[1:]))
    for c in range(k):
        total = sum(weights[i] for i in range(len(x)) if cluster[i] == c)
        for i in range(len(x)):
            if cluster[i] == c and weights[i] > 0:
                out[c] += weights[i] * x[i].astype(np.float64) / total
    return out


@given(n=st.sampled_from([1, 12]), k=st.sampled_from([1, 4]), seed=st.integers(0, 999))
def test_cluster_mean_against_a_loop(n, k, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 3, 2)).astype(np.float32)
    cluster = rng.integers(0, k, n).astype(np.int32)
    weights = (rng.integers(0, 4, n)).astype(np.float32)
    got = jax.jit(cluster_mean, static_argnums=3)({"x": x}, cluster, weights, k)["x"]
    np.testing.assert_allclose(got, loop_cluster_mean(x, cluster, weights, k), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@given(n=st.integers(2, 10), seed=st.integers(0, 999))
def test_mean_ignores_order_and_scale_of_weights(n, seed):
    rng = np.random.default_rng(seed)
    x, w = rng.normal(size=(n, 5)).astype(np.float32), rng.uniform(0.5, 2, n).astype(np.float32)
    order = rng.permutation(n)
    one = jnp.zeros(n, jnp.int32)
    mean = cluster_mean(x, one, jnp.asarray(w), 1)
    np.testing.assert_allclose(mean, cluster_mean(x[order], one, jnp.asarray(3 * w[order]), 1), rtol=1e-4, atol=1e-5)


def test_the_mean_of_many_equal_rows_is_one_of_them():
    rows, zeros = np.full((100_000, 3), 0.1, np.float32), np.zeros(100_000, np.int32)
    mean = cluster_mean(rows, zeros, jnp.full(100_000, 0.3), 1)
    np.testing.assert_allclose(mean[0], rows[0], rtol=2e-5)


def test_rows_without_weight_may_hold_anything():
    x, mean = np.float32([[1.0], [np.nan], [np.inf]]), jax.jit(partial(cluster_mean, num_clusters=1))
    assert mean(x, np.zeros(3, np.int32), np.float32([2.0, 0.0, 0.0])).tolist() == [[1.0]]
    assert mean(x, np.zeros(3, np.int32), np.zeros(3, np.float32)).tolist() == [[0.0]]


def test_rows_of_no_cluster_are_added_nowhere():
    x, cluster = np.float32([[1.0], [2.0], [4.0]]), np.int32([0, -1, 1])
    for axis in (jax.vmap, chunked(1)):
        mean = jax.jit(cluster_mean, static_argnums=(3, 4))(x, cluster, np.ones(3, np.float32), 2, axis)
        assert mean.tolist() == [[1.0], [4.0]]


def test_a_cluster_without_members_has_a_mean_of_zero_whatever_an_aggregator_returns():
    """CFL adds it to the cluster's model, which is in use although a cohort has no client of it."""

    def divided_by_the_members(x, mask):
        return jnp.where(mask[:, None], x, 0.0).sum(axis=0) / mask.sum().astype(x.dtype)

    x, cluster, usable = np.float32([[1.0], [3.0], [np.nan]]), np.int32([2, 2, 0]), np.array([True, True, False])
    mean = jax.jit(partial(robust_cluster_mean, divided_by_the_members, num_clusters=3))
    assert mean(x, cluster, usable).tolist() == [[0.0], [0.0], [2.0]]


def test_ravel_puts_the_leaves_side_by_side():
    tree = {"a": jnp.arange(12.0).reshape(2, 3, 2), "b": (jnp.ones((2, 1)), jnp.zeros((2,)))}
    assert ravel_clients(tree).tolist() == [[0, 1, 2, 3, 4, 5, 1, 0], [6, 7, 8, 9, 10, 11, 1, 0]]


@pytest.mark.slow_cases("cpu", "tpu")
def test_is_finite_and_bytes(form):
    of_rows, of_one = jax.jit(jax.vmap(is_finite)), jax.jit(lambda *leaves: is_finite(leaves))
    for wrong in (np.nan, np.inf, -np.inf):
        rows = {"a": np.float32([[1.0, -2.0], [3.0, wrong], [1e38, -3e38]]), "whole": np.zeros((3, 3), np.int32)}
        assert of_rows(rows).tolist() == [True, False, True]
    assert of_one(np.zeros((0, 2), np.float32))
    assert of_one(np.ones(2, np.float32), np.float32(0)) and not of_one(np.ones(2, np.float32), np.float32(np.nan))
    assert num_bytes({"a": np.ones((2, 3), np.float32), "b": np.int8(0)}) == 25
