"""Orthonormal operators against explicit matrices."""

from functools import partial

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from scipy.linalg import hadamard

from jfcl.kernels import OPERATORS, orthonormal

EVERY = pytest.mark.parametrize("name", OPERATORS)
DIMS = st.sampled_from([1, 130])


def vectors(seed, dim):
    return np.random.default_rng(seed).standard_normal((4, dim)).astype(np.float32)


@partial(jax.jit, static_argnums=0)
def hidden(name, key, x):
    """Returns `x` hidden, seen again, the hidden mean, and `x` hidden with another axis between."""
    hide = orthonormal(name, key, x.shape[1])
    y = hide.apply(x)
    return y, hide.invert(y), hide.apply(x.mean(0)), hide.apply(x[:, None, :])[:, 0]


@pytest.mark.slow_cases("permutation", "sign")
@EVERY
@given(DIMS, st.integers(0, 2**31))
def test_is_orthonormal_and_has_an_inverse(name, dim, seed):
    x = vectors(seed, dim)
    y, back, mean, between = hidden(name, jax.random.key(seed), x)
    np.testing.assert_allclose(np.asarray(y, np.float64) @ np.asarray(y).T, x.astype(np.float64) @ x.T, atol=1e-4)
    if name == "rotation":
        np.testing.assert_allclose(back, x, atol=1e-5)
    else:
        np.testing.assert_array_equal(back, x)
    np.testing.assert_allclose(mean, np.asarray(y).mean(0), atol=1e-5)  # means commute with it
    np.testing.assert_allclose(between, y, atol=1e-6)


@EVERY
def test_matrix(name):
    hide = orthonormal(name, jax.random.key(3), 8)
    matrix = np.asarray(hide.apply(jnp.eye(8))).T
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(8), atol=1e-6)
    if name == "permutation":
        assert set(np.unique(matrix)) == {0, 1}
    elif name == "sign":
        np.testing.assert_array_equal(abs(matrix), np.eye(8))
        assert set(np.diagonal(matrix)) == {-1, 1}
    else:
        np.testing.assert_allclose(matrix * matrix[0], hadamard(8) / 8, atol=1e-6)


@pytest.mark.slow_cases("4096")
@pytest.mark.parametrize("dim", [128, 4096])
def test_rotation_is_the_hadamard_matrix_with_signs(dim):
    apply = jax.jit(lambda x: orthonormal("rotation", jax.random.key(1), dim).apply(x))
    x = vectors(0, dim)
    signs = np.asarray(apply(np.eye(dim, dtype=np.float32)))[:, 0] * np.sqrt(dim)
    np.testing.assert_allclose(apply(x), (x * signs) @ hadamard(dim) / np.sqrt(dim), atol=1e-4)


@EVERY
def test_depends_on_the_key_and_on_nothing_else(name):
    x = vectors(0, 130)
    same = [orthonormal(name, jax.random.key(5), 130).apply(x) for _ in range(2)]
    np.testing.assert_array_equal(*same)
    assert not np.allclose(same[0], orthonormal(name, jax.random.key(6), 130).apply(x))
    inside = jax.jit(lambda key, x: orthonormal(name, key, 130).apply(x))(jax.random.key(5), x)
    np.testing.assert_allclose(inside, same[0], atol=1e-6)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"name must be one of .*got 'shuffle'"):
        orthonormal("shuffle", jax.random.key(0), 3)
    with pytest.raises(ValueError, match="dim must be an integer, at least 1, got 0"):
        orthonormal("sign", jax.random.key(0), 0)
    hide = orthonormal("rotation", jax.random.key(0), 5)
    with pytest.raises(ValueError, match=r"x must be of shape \[\.\.\., 5\], got \(2, 6\)"):
        hide.apply(jnp.ones((2, 6)))
    with pytest.raises(ValueError, match=r"x must be of shape \[\.\.\., 8\], got \(5,\)"):
        hide.invert(jnp.ones(5))


@pytest.mark.slow_cases("rotation", "sign")
@EVERY
def test_integers_are_numbers_too(name):
    hide = orthonormal(name, jax.random.key(0), 6)
    whole = jnp.arange(12).reshape(2, 6)
    np.testing.assert_array_equal(hide.apply(whole), hide.apply(whole.astype(jnp.float32)))
