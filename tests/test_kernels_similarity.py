"""Similarities and distances against NumPy in float64 and scikit-learn."""

import sys
from functools import partial

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from scipy.spatial.distance import cdist
from sklearn.metrics.pairwise import cosine_similarity

from jfcl.core.platforms import compiles_for_cuda
from jfcl.kernels import (
    bipartition_of_updates,
    clip_norms,
    optimal_bipartition,
    pairwise_cosine,
    similarity_tolerance,
    squared_distances,
)
from jfcl.kernels.gram_gpu import upper_products
from jfcl.planning import targets

SEEDS = st.integers(0, 2**31)
SHAPES = st.sampled_from([(7, 3), (300, 5)])  # 300 clients: two strips


def normal(shape, seed, scale=1.0):
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def cosine(updates):
    """Equation 44 in float64."""
    updates = updates.astype(np.float64)
    norms = np.linalg.norm(updates, axis=1)
    return updates @ updates.T / np.outer(norms, norms)


@given(SHAPES, SEEDS, st.sampled_from([1e-30, 1e-3, 1.0, 1e25]))
def test_cosine_at_any_scale(shape, seed, scale):
    updates = normal(shape, seed, scale)
    ours = np.asarray(pairwise_cosine(updates))
    np.testing.assert_allclose(ours, cosine(updates), atol=5e-7)
    if scale == 1:
        np.testing.assert_allclose(ours, cosine_similarity(updates.astype(np.float64)), atol=5e-7)
    np.testing.assert_array_equal(ours, ours.T)
    assert (np.diagonal(ours) == 1).all() and (abs(ours) <= 1).all()


@given(SEEDS, st.floats(1e-3, 1e3))
def test_lengths_do_not_matter(seed, scale):
    updates = normal((7, 3), seed)
    lengths = np.random.default_rng(seed).uniform(0.1, scale + 0.1, (7, 1)).astype(np.float32)
    np.testing.assert_allclose(pairwise_cosine(updates), pairwise_cosine(lengths * updates), atol=1e-6)


@given(SEEDS)
def test_order_of_clients_is_carried_along(seed):
    updates, order = normal((300, 5), seed), np.random.default_rng(seed).permutation(300)
    one, other = np.asarray(pairwise_cosine(updates)), np.asarray(pairwise_cosine(updates[order]))
    np.testing.assert_allclose(one[np.ix_(order, order)], other, atol=5e-7)


def parallel(dim, seed):
    """Rows that differ in length only, of several kinds; in float64."""
    rng = np.random.default_rng(seed)
    kinds = [rng.standard_normal(dim), np.full(dim, rng.uniform(0.1, 1)), np.resize(rng.uniform(0.1, 1, 3), dim)]
    kinds += [np.exp(3 * rng.standard_normal(dim)), 1 / np.sqrt(np.arange(1, dim + 1))]
    lengths = np.array([1, 1, *rng.uniform(0.05, 20, 2)])[:, None]
    return [lengths * row[None] / abs(row).max() for row in kinds]


@pytest.mark.slow_cases("1-float32", "10000*-float32", "500-float16")
@pytest.mark.parametrize(
    ("dim", "dtype"),
    [(1, "float32"), (2048, "float32"), (10**4, "float32"), (10**6, "float32"), (500, "bfloat16"), (500, "float16")],
)
def test_rounding_stays_below_the_tolerance(dim, dtype):
    tolerance = similarity_tolerance(dim, dtype)
    seeds = range(20 if dim <= 10**4 else 1)
    for rows in (rows for seed in seeds for rows in parallel(dim, seed)):
        updates = jnp.asarray(rows, dtype)
        exact = cosine(np.asarray(updates.astype(jnp.float32)))
        assert exact.min() > 1 - tolerance
        assert abs(np.asarray(pairwise_cosine(updates), np.float64) - exact).max() <= tolerance
        if dim == 10**4:
            assert 1 - bipartition_of_updates(updates).cross_similarity <= tolerance


def test_tolerance_in_float64():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        for rows in parallel(2048, 0):
            assert 1 - float(pairwise_cosine(rows).min()) <= similarity_tolerance(2048, "float64") < 1e-13
        jax.eval_shape(bipartition_of_updates, rows)  # without a warning of JAX: all indices have one type


def test_rows_of_any_length_in_float64():
    z = normal((2, 3), 0).astype(np.float64)
    expected = cosine(z)
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        for scale in (1e-300, 1e300):
            updates = jnp.asarray(z * [[1.0], [scale]])
            np.testing.assert_allclose(pairwise_cosine(updates), expected, atol=1e-13)
            np.testing.assert_allclose(clip_norms(updates, radius=0.5)[0][1], min(scale, 0.5) * z[1], rtol=1e-13)


@pytest.mark.slow_cases("10000")
@pytest.mark.parametrize("dim", [100, 10**4])
def test_directions_further_apart_than_the_tolerance_are_told_apart(dim):
    rng = np.random.default_rng(0)
    row, other = rng.standard_normal(dim), rng.standard_normal(dim)
    other -= (other @ row) / (row @ row) * row
    angle = np.sqrt(2 * 2 * similarity_tolerance(dim))  # a cosine below 1 by twice the tolerance
    rows = [row, np.cos(angle) * row + np.sin(angle) * other * np.linalg.norm(row) / np.linalg.norm(other)]
    assert angle < 0.02
    assert 1 - float(pairwise_cosine(np.float32(rows))[0, 1]) > similarity_tolerance(dim)


def test_many_columns_go_block_by_block():
    updates = normal((20, 5000), 0)
    np.testing.assert_allclose(pairwise_cosine(updates), cosine(updates), atol=5e-7)


def test_pytree_is_its_concatenation():
    tree = {"w": normal((9, 4, 3), 0), "b": normal((9, 2), 1), "scale": normal((9,), 2)}
    flat = np.concatenate([leaf.reshape(9, -1) for leaf in jax.tree.leaves(tree)], axis=1)
    np.testing.assert_allclose(pairwise_cosine(tree), cosine(flat), atol=5e-7)
    np.testing.assert_allclose(squared_distances(tree), cdist(flat, flat, "sqeuclidean"), atol=1e-4)


def test_zero_and_masked_rows():
    updates, mask = normal((7, 3), 0), jnp.asarray(np.arange(7) != 4)
    updates[1] = 0
    updates[4] = np.nan
    similarity = np.asarray(pairwise_cosine(updates, mask=mask))
    rest = [0, 2, 3, 5, 6]
    np.testing.assert_allclose(similarity[np.ix_(rest, rest)], cosine(updates[rest]), atol=5e-7)
    assert not similarity[[1, 4]].any() and not similarity[:, [1, 4]].any()
    distances, others = np.asarray(squared_distances(updates, mask=mask)), np.delete(updates, 4, 0)
    assert np.isinf(np.delete(distances[4], 4)).all() and distances[4, 4] == 0
    np.testing.assert_allclose(np.delete(np.delete(distances, 4, 0), 4, 1), cdist(others, others) ** 2, atol=1e-5)


def test_tiny_next_to_huge_rows():
    updates = np.array([[1e-30, 0], [1e30, 1e30], [0, 3e38], [1e-44, 0]], np.float32)
    similarity = np.asarray(pairwise_cosine(updates))
    np.testing.assert_allclose(similarity[:3, :3], cosine(updates[:3]), atol=1e-6)
    assert not similarity[3].any()  # below the smallest normal number: as good as zero


def test_inside_jit_a_broken_row_is_opposed_to_all():
    updates = normal((5, 3), 0)
    updates[2, 1] = np.inf
    similarity = np.asarray(jax.jit(pairwise_cosine)(updates))
    assert (np.delete(similarity[2], 2) == -1).all() and similarity[2, 2] == 1
    rest = [0, 1, 3, 4]
    np.testing.assert_allclose(similarity[np.ix_(rest, rest)], cosine(updates[rest]), atol=5e-7)
    assert np.isinf(np.asarray(jax.jit(squared_distances)(updates))[2, [0, 1, 3, 4]]).all()


def test_bfloat16_products_in_float32_sums():
    updates = normal((20, 4096), 0)
    similarity = pairwise_cosine(jnp.asarray(updates, jnp.bfloat16))
    assert similarity.dtype == jnp.float32
    np.testing.assert_allclose(similarity, cosine(updates), atol=2e-3)


def test_sixteen_bits_are_scaled_in_more():
    similarity = pairwise_cosine(jnp.array([[1e-5, 0], [0, 1e-5], [1e-5, 1e-5], [0, 0]], jnp.float16))
    half = np.sqrt(0.5)
    np.testing.assert_allclose(similarity, [[1, 0, half, 0], [0, 1, half, 0], [half, half, 1, 0], [0] * 4], atol=1e-3)


def test_integers_are_numbers_too():
    np.testing.assert_allclose(pairwise_cosine(jnp.array([[3, 4], [4, 3]])), [[1, 0.96], [0.96, 1]], atol=1e-6)


@given(SHAPES, SEEDS, st.sampled_from([0.0, 10.0, 1000.0]))
def test_distances_in_spite_of_a_common_offset(shape, seed, offset):
    points = normal(shape, seed) + np.float32(offset)
    centers = points[:1] + np.float32(0.5)
    truth = cdist(points.astype(np.float64), points.astype(np.float64), "sqeuclidean")
    ours = np.asarray(squared_distances(points))
    np.testing.assert_allclose(ours, truth, atol=1e-4)
    np.testing.assert_array_equal(ours, ours.T)
    assert (ours >= 0).all() and not np.diagonal(ours).any()
    np.testing.assert_allclose(
        squared_distances(points, centers), cdist(points.astype("d"), centers.astype("d"), "sqeuclidean"), atol=1e-4
    )


def test_distances_in_spite_of_far_attackers():
    points = normal((20, 8), 0, 1e-2)
    points[::3] = 1e6 + normal((7, 8), 1, 200)  # 35 %
    good = np.arange(20) % 3 != 0
    truth = cdist(points[good].astype("d"), points[good].astype("d"), "sqeuclidean")
    np.testing.assert_allclose(np.asarray(squared_distances(points))[np.ix_(good, good)], truth, rtol=1e-4, atol=1e-8)


@pytest.mark.slow
def test_many_at_once():
    batch = np.stack([normal((7, 3), seed) for seed in range(3)])
    for kernel in (pairwise_cosine, squared_distances):
        many = jax.vmap(kernel)(batch)
        for one, updates in zip(many, batch, strict=True):
            np.testing.assert_allclose(one, kernel(updates), atol=1e-6)


@pytest.mark.slow
def test_wide_updates_are_not_copied():
    shape = jax.ShapeDtypeStruct((50, 1_000_000), jnp.float32)  # 200 MB
    for kernel in (pairwise_cosine, squared_distances):
        memory = jax.jit(kernel).lower(shape).compile().memory_analysis()
        assert memory.temp_size_in_bytes < 20e6, kernel


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: similarity_tolerance(0), "num_parameters must be an integer, at least 1, got 0"),
        (lambda: similarity_tolerance(9, np.int32), "dtype must be a floating-point type"),
        (lambda: pairwise_cosine(np.ones(3)), r"updates must be of shape \[N, D\], got \(3,\)"),
        (lambda: pairwise_cosine(np.ones((0, 3))), r"of at least one client \(N = 0\)"),
        (lambda: pairwise_cosine({}), "updates must be an array"),
        (lambda: pairwise_cosine([np.ones((3, 2)), np.ones((4, 2))]), "stacked on one leading client axis"),
        (lambda: pairwise_cosine(np.ones((3, 2), bool)), "of real numbers"),
        (lambda: pairwise_cosine(np.ones((3, 2), ">f4")), "of real numbers in a type of JAX"),
        (lambda: pairwise_cosine(pd.DataFrame(np.ones((3, 2)))), "of real numbers in a type of JAX"),
        (lambda: pairwise_cosine(np.ones((3, 2)), mask=np.ones(2, bool)), "mask must be bool of shape"),
        (lambda: pairwise_cosine(np.ones((3, 2)), mask=np.ones(3)), "mask must be bool of shape"),
        (lambda: pairwise_cosine(np.array([[1.0], [np.nan]])), r"finite, got 'NaN or infinity in 1 row\(s\)'"),
        (lambda: squared_distances(np.array([[np.inf]])), "points must be finite"),
        (
            lambda: squared_distances(np.ones((3, 2)), np.ones((3, 4))),
            r"centers must be as wide as the points, \[2\]",
        ),
    ],
)
def test_bad_input_is_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_a_row_near_the_largest_float_costs_the_others_no_digits():
    x = 100 + 0.01 * normal((20, 8), 0)
    x[3] = 3e38
    got = np.asarray(squared_distances(x))
    others = np.delete(np.arange(20), 3)
    true = cdist(x[others].astype(np.float64), x[others].astype(np.float64), "sqeuclidean")
    np.testing.assert_allclose(got[np.ix_(others, others)], true, rtol=1e-3, atol=1e-9)


def test_large_symmetric_matrices_are_symmetric():
    rng = np.random.default_rng(0)
    distances = 1e4 * rng.standard_normal((600, 600)).astype(np.float32)
    distances = distances + distances.T
    np.fill_diagonal(distances, 0)
    optimal_bipartition(distances)
    distances[3, 5] += 3e4
    with pytest.raises(ValueError, match="must be symmetric"):
        optimal_bipartition(distances)


@pytest.mark.parametrize("scale", [1.0, 1e25])
def test_a_leaf_without_numbers_changes_nothing(scale):
    updates = normal((7, 3), 0, scale)
    empty = np.zeros((7, 0), np.float32)
    np.testing.assert_array_equal(pairwise_cosine({"a": updates, "b": empty}), pairwise_cosine(updates))
    clipped = clip_norms({"a": updates, "b": empty}, radius=1.0)[0]
    np.testing.assert_array_equal(clipped["a"], clip_norms(updates, radius=1.0)[0])
    assert clipped["b"].shape == (7, 0) and not pairwise_cosine(empty).any()


@pytest.mark.slow
@pytest.mark.parametrize(("n", "d"), [(3, 8192), (70, 9001)])
def test_products_of_long_rows_on_a_gpu(n, d):
    """The kernel for GPUs, interpreted: below the error that `similarity_tolerance` allows, symmetric, also mapped."""
    x = np.random.default_rng(0).normal(0.2, 1, (2, n, d)).astype(np.float32)
    x[:, 0] = 0
    got = np.asarray(jax.vmap(partial(upper_products, interpret=True, splits=2))(x), np.float64)
    want = np.einsum("bnd,bmd->bnm", x.astype(np.float64), x.astype(np.float64))
    sizes = np.einsum("bnd,bmd->bnm", np.abs(x, dtype=np.float64), np.abs(x, dtype=np.float64))
    assert (np.abs(got - want) <= similarity_tolerance(d) / 2 * sizes).all()
    np.testing.assert_array_equal(got, got.swapaxes(1, 2))


def test_products_of_long_rows_are_those_of_their_two_halves():
    """Half of a number's digits alone would be a product in bfloat16, which errs by 2^-9."""
    x = (1 + np.arange(1024, dtype=np.float32) / 1024)[None] * np.array([[1.0], [-1.0]], np.float32)
    got = np.asarray(upper_products(x, interpret=True))
    want = (x.astype(np.float64) ** 2).sum(axis=1)
    np.testing.assert_allclose(np.diagonal(got), want, rtol=2**-16)
    np.testing.assert_allclose(got[0, 1], -want[0], rtol=2**-16)


@pytest.mark.parametrize(("differs", "columns"), [("absent", 9000), ("function", 9001), ("argument", 9002)])
def test_without_pallas_for_triton_long_rows_are_multiplied_in_float32(differs, columns, monkeypatch):
    from jax.experimental import pallas
    from jax.experimental.pallas import triton

    if differs == "absent":
        monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
        monkeypatch.delattr(pallas, "triton", raising=False)
    elif differs == "function":
        monkeypatch.delattr(triton, "load")
    else:
        monkeypatch.setattr(triton, "CompilerParams", lambda: None)
    x = normal((5, columns), 0)  # of a shape of its own: the function is traced once for each
    with pytest.warns(UserWarning, match="Pallas"):
        got = np.asarray(upper_products(x))
    np.testing.assert_allclose(got, x.astype(np.float64) @ x.T.astype(np.float64), atol=1e-2)
    np.testing.assert_array_equal(got, got.T)


@pytest.mark.slow
@pytest.mark.skipif(not compiles_for_cuda(), reason="needs the extra jfcl[plan-gpu] or jfcl[cuda]")
def test_long_rows_are_multiplied_by_the_kernel_on_a_gpu():
    device = targets.mesh("h100").devices.item()
    rows = jax.ShapeDtypeStruct((40, 9000), np.float32, sharding=jax.sharding.SingleDeviceSharding(device))
    program = jax.jit(pairwise_cosine).lower(rows).compile().as_text()
    assert "__gpu$xla.gpu.triton" in program or "triton_kernel_call" in program, program[:2000]
