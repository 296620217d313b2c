import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jfcl.mapping import auto, chunked, map_reduce


def affine(x, shift, tree):
    return {"y": jnp.tanh(x) @ x + shift, "z": tree["a"] * x[0]}


@given(n=st.integers(1, 9), size=st.integers(1, 11), seed=st.integers(0, 99))
def test_chunked_equals_vmap(n, size, seed):
    key = jax.random.key(seed)
    x, a = jax.random.normal(key, (n, 4)), jnp.arange(float(n))
    axes = (0, None, 0)
    got = chunked(size)(affine, in_axes=axes)(x, jnp.float32(2), {"a": a})
    want = jax.vmap(affine, in_axes=axes)(x, jnp.float32(2), {"a": a})
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-6), got, want)


@given(n=st.integers(1, 9), size=st.integers(1, 11))
def test_map_reduce_sums_what_is_sent_and_stacks_what_is_kept(n, size):
    x = np.random.default_rng(n).normal(size=(n, 3)).astype(np.float32)

    def fn(row):
        return row * 2, row.sum()

    for mapping in (jax.vmap, chunked(size)):
        total, kept = map_reduce(mapping, fn, lambda t, sent: t + sent.sum(axis=0), jnp.zeros(3))(x)
        np.testing.assert_allclose(total, 2 * x.astype(np.float64).sum(axis=0), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(kept, x.astype(np.float64).sum(axis=1), rtol=1e-5, atol=1e-5)


def test_chunks_bound_the_memory():
    """Temporaries grow with the chunk, not with the number of clients."""

    def fn(x):
        return jnp.cos(jnp.outer(x, x)) @ x, ()

    def temporaries(n, mapping):
        run = jax.jit(map_reduce(mapping, fn, lambda t, sent: t + sent.sum(axis=0), jnp.zeros(256)))
        return run.lower(jnp.ones((n, 256))).compile().memory_analysis().temp_size_in_bytes

    one = 256 * 256 * 4
    assert temporaries(64, chunked(2)) < 8 * one
    assert temporaries(512, chunked(2)) < 8 * one
    assert temporaries(64, jax.vmap) > 32 * one


def test_data_are_not_copied_into_the_loop():
    data = jnp.zeros((64, 1000, 10))  # 2.6 MB; what leaves the loop is small
    sums = jax.jit(lambda x: chunked(1)(lambda row: row.sum())(x))
    assert sums.lower(data).compile().memory_analysis().temp_size_in_bytes < data.nbytes / 4


@pytest.mark.parametrize("size", [1, 2])
def test_arrays_of_no_numbers_keep_their_shape(size):
    assert chunked(size)(lambda x: jnp.zeros((3, 0)))(jnp.arange(5)).shape == (5, 3, 0)


def test_a_mapping_is_its_size():
    assert chunked(3) == chunked(3) and hash(chunked(3)) == hash(chunked(3)) and chunked(2) != chunked(3)


def test_auto_runs():
    assert auto()(lambda x: x + 1)(jnp.zeros(2)).tolist() == [1, 1]


def test_refuses():
    with pytest.raises(ValueError, match="chunk size must be an integer, at least 1, got 0"):
        chunked(0)(lambda x: x)
    with pytest.raises(ValueError, match="in_axes must hold 0 and None only"):
        chunked(2)(lambda x: x, in_axes=1)(jnp.zeros((2, 2)))
