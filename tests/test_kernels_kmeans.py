"""k-means against scikit-learn and float64 loops."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from sklearn.cluster import KMeans
from sklearn.datasets import load_digits, make_blobs
from sklearn.metrics import adjusted_rand_score

from jfcl.kernels import kmeans

KEY = jax.random.key(0)


def blobs(seed, offset=0.0):
    points, truth = make_blobs(90, 5, centers=4, cluster_std=0.5, random_state=seed)
    return (points + offset).astype(np.float32), truth


@settings(max_examples=6)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 1000.0]))
def test_is_as_good_as_scikit_learn(seed, offset):
    points, _ = blobs(seed, offset)
    ours = kmeans(points, 4, key=jax.random.key(seed))
    theirs = KMeans(4, n_init=10, random_state=seed).fit(points.astype(np.float64))
    assert ours.inertia <= 1.01 * theirs.inertia_ + 1e-3
    z, c = points.astype(np.float64), np.asarray(ours.centers, np.float64)
    squares = ((z[:, None] - c[None]) ** 2).sum(-1)
    np.testing.assert_allclose(ours.inertia, squares.min(1).sum(), rtol=2e-3)
    np.testing.assert_array_equal(ours.cluster, squares.argmin(1))
    for k in range(4):  # a fixed point of Lloyd's step
        np.testing.assert_allclose(c[k], z[np.asarray(ours.cluster) == k].mean(0), atol=2e-3)


def test_many_starts_find_the_optimum_of_a_few_points():
    points = np.random.default_rng(3).normal(size=(8, 3))
    labels = np.stack(np.meshgrid(*[np.arange(3)] * 8), -1).reshape(-1, 8)  # of all partitions
    members = (labels[:, None] == np.arange(3)[:, None]).astype(float)
    sums, sizes = members @ points, np.maximum(members.sum(-1, keepdims=True), 1)
    best = ((points**2).sum() - (sums**2 / sizes).sum((1, 2))).min()
    keys = jax.random.split(KEY, 30)
    found = jax.vmap(lambda key: kmeans(np.float32(points), 3, key=key, num_restarts=100).inertia)(keys)
    np.testing.assert_allclose(found, best, rtol=1e-5)


def test_rounding_does_not_reorder_the_clusters():
    """Most starts find the same two clusters, in either order: one process and two number them alike."""
    rng = np.random.default_rng(0)
    for seed in range(30):
        points = rng.normal(size=(9, 20)).astype(np.float32)
        points[::2] += 3
        rounded = points * (1 + 2e-7 * rng.normal(size=points.shape)).astype(np.float32)
        first, second = (kmeans(x, 2, key=jax.random.key(seed)).cluster for x in (points, rounded))
        np.testing.assert_array_equal(first, second)


@pytest.mark.slow
def test_digits():
    points = load_digits().data.astype(np.float32)
    ours = kmeans(points, 10, key=KEY)
    theirs = KMeans(10, n_init=10, random_state=0).fit(points)
    assert ours.inertia <= 1.01 * theirs.inertia_


def test_inertia_of_narrow_clusters_far_apart():
    rng = np.random.default_rng(0)
    place = rng.choice(4, 90)
    points = (1000 * place[:, None] + 1e-2 * rng.standard_normal((90, 5))).astype(np.float32)
    found = kmeans(points, 4, key=KEY)
    z = points.astype(np.float64)
    exact = sum(((z[place == k] - z[place == k].mean(0)) ** 2).sum() for k in range(4))
    np.testing.assert_allclose(found.inertia, exact, rtol=0.02)


@pytest.mark.slow
def test_one_point_far_away_costs_the_others_no_digits():
    points = np.float32([[0], [1], [8], [9], [1e6]])
    found = kmeans(points, 3, key=KEY)
    assert sorted(found.centers[:, 0].tolist()) == [0.5, 8.5, 1e6]


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.int32])
def test_narrow_types_and_duplicates(dtype):
    points = jnp.asarray([[0, 0], [0, 0], [8, 1], [8, 1]], dtype)
    found = kmeans(points, 3, key=KEY)
    assert found.inertia == 0 and found.centers.dtype == jnp.float32
    assert len(set(found.cluster.tolist())) == 2


def test_masked_and_broken_points_do_not_exist():
    points, truth = blobs(1)
    broken, mask = points.copy(), np.arange(90) % 4 != 1
    broken[~mask] = np.nan
    found = kmeans(broken, 4, key=KEY, mask=jnp.asarray(mask))
    assert (np.asarray(found.cluster) == -1).tolist() == (~mask).tolist()
    assert adjusted_rand_score(np.asarray(found.cluster)[mask], truth[mask]) == 1
    assert np.isfinite(found.centers).all() and np.isfinite(found.inertia)


@pytest.mark.slow
def test_inside_jit_broken_points_are_masked():
    points, _ = blobs(1)
    points[7] = np.inf
    found = jax.jit(lambda z: kmeans(z, 4, key=KEY))(points)
    assert np.flatnonzero(np.asarray(found.cluster) == -1).tolist() == [7] and np.isfinite(found.inertia)


@pytest.mark.slow
def test_one_cluster_and_as_many_as_points():
    points, _ = blobs(2)
    one = kmeans(points, 1, key=KEY)
    np.testing.assert_allclose(one.centers[0], points.mean(0), atol=1e-5)
    every = kmeans(points[:9], 9, key=KEY)
    assert every.inertia < 1e-3 and sorted(every.cluster.tolist()) == list(range(9))


def test_more_clusters_than_different_points():
    found = kmeans(np.ones((90, 5), np.float32), 4, key=KEY)
    assert found.inertia == 0 and np.isfinite(found.centers).all()


@pytest.mark.slow
def test_many_at_once():
    batch = np.stack([blobs(seed)[0] for seed in range(3)])
    keys = jax.random.split(KEY, 3)
    many = jax.vmap(lambda z, key: kmeans(z, 4, key=key))(batch, keys)
    for i in range(3):
        truth = blobs(i)[1]
        assert adjusted_rand_score(many.cluster[i], truth) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"points": np.ones(3)}, r"points must be of shape \[N, D\]"),
        ({"num_clusters": 0}, "num_clusters must be from 1 to the number of points, 5, got 0"),
        ({"num_clusters": 6}, "num_clusters must be from 1 to the number of points, 5, got 6"),
        ({"mask": np.arange(5) < 2}, "num_clusters must be from 1 to the number of points, 2, got 3"),
        ({"num_restarts": 0}, "num_restarts must be an integer, at least 1"),
        ({"points": np.full((5, 2), np.nan)}, "points must be finite"),
    ],
)
def test_bad_input_is_named(options, words):
    options = {"points": jnp.ones((5, 2)), "num_clusters": 3, "key": KEY} | options
    with pytest.raises(ValueError, match=words):
        kmeans(options.pop("points"), options.pop("num_clusters"), **options)


@pytest.mark.parametrize(("far", "scale"), [(1e6, 1.0), (1e8, 1.0), (1e20, 1.0), (1e3, 1e-22), (1e3, 1e20)])
def test_rounding_and_the_range_of_squares_divide_no_cluster(far, scale):
    rng = np.random.default_rng(0)
    truth = np.append(np.arange(30) % 3, [3, 3, 3])
    points = 3 * rng.normal(size=(3, 50))[truth % 3] + 0.1 * rng.normal(size=(33, 50))
    points[truth == 3] = far  # three equal points, as of hostile clients
    for seed in range(3):
        found = kmeans(np.float32(points * scale), 4, key=jax.random.key(seed))
        assert adjusted_rand_score(truth, found.cluster) == 1
        assert np.isfinite(found.centers).all()
