"""Dendrograms, silhouettes and assignments against SciPy and scikit-learn."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.cluster.hierarchy
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import pdist, squareform
from sklearn.cluster import AgglomerativeClustering
from sklearn.metrics import adjusted_rand_score, silhouette_samples, silhouette_score

from jfcl.kernels import LINKAGES, cut, cut_by_silhouette, least_cost_assignment, linkage_tree, silhouette


def points(seed, n=13, d=3):
    return np.random.default_rng(seed).normal(size=(n, d))


def matrix(x):
    return np.float32(squareform(pdist(x)))


@pytest.mark.slow_cases("single", "weighted")
@pytest.mark.parametrize("linkage", LINKAGES)
def test_a_tree_is_scipys(linkage):
    for seed in range(4):
        x = points(seed)
        theirs = scipy.cluster.hierarchy.linkage(pdist(x), linkage)
        ours = np.asarray(linkage_tree(matrix(x), linkage), np.float64)
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@pytest.mark.slow_cases("average", "single", "ward", "weighted")
@pytest.mark.parametrize("linkage", LINKAGES)
def test_points_that_do_not_count_change_no_merge(linkage):
    x, mask = points(5), np.array([False, True, True, False] + [True] * 8 + [False])
    ours = linkage_tree(np.where(mask[:, None] & mask, matrix(x), np.nan), linkage, mask=mask)
    alone = scipy.cluster.hierarchy.linkage(pdist(x[mask]), linkage)
    np.testing.assert_allclose(ours[3:, 2], alone[:, 2], rtol=1e-5)
    assert scipy.cluster.hierarchy.is_valid_linkage(np.asarray(ours, np.float64))
    for number in (1, 2, 4, 10):
        found = np.asarray(cut(ours, num_clusters=number))
        truth = scipy.cluster.hierarchy.fcluster(alone, number, "maxclust") if number < 10 else np.arange(10)
        assert adjusted_rand_score(found[mask], truth) == 1
        assert (found[~mask] == found[1]).all()


@pytest.mark.slow
@pytest.mark.parametrize("linkage", LINKAGES)
def test_equal_distances_and_extremes_make_valid_trees(linkage):
    n = 9
    for scale in (1e-30, 0.1, 1e25):
        tree = np.asarray(linkage_tree(np.float32(scale) * (1 - np.eye(n, dtype=np.float32)), linkage), np.float64)
        assert scipy.cluster.hierarchy.is_valid_linkage(tree) and scipy.cluster.hierarchy.is_monotonic(tree)
        np.testing.assert_allclose(tree[0, 2], scale, rtol=1e-6)
    none = linkage_tree(matrix(points(0)), linkage, mask=np.zeros(13, bool))
    assert scipy.cluster.hierarchy.is_valid_linkage(np.asarray(none, np.float64))
    assert linkage_tree(np.zeros((1, 1), np.float32), linkage).shape == (0, 4)
    far = jax.jit(partial(linkage_tree, linkage=linkage))(jnp.float32([[0, 1, jnp.inf], [1, 0, 9], [jnp.inf, 9, 0]]))
    assert far[0].tolist() == [0.0, 1.0, 1.0, 2.0] and np.isfinite(far).all()


def test_many_broken_distances_stay_the_largest():
    part, place = np.arange(400) // 200, np.arange(400)
    broken = np.where((place[:, None] + place) % 2, np.inf, np.nan)
    distances = jnp.where(part[:, None] == part[None, :], 1.0, broken)
    tree = jax.jit(partial(linkage_tree, linkage="ward"))(distances)
    np.testing.assert_array_equal(cut(tree, num_clusters=2), part)


def test_distances_of_16_bits_make_the_tree_of_wider_copies():
    distances = matrix(points(0, n=150)).astype(jnp.bfloat16)  # whose integers end at 256
    np.testing.assert_array_equal(linkage_tree(distances), linkage_tree(distances.astype(np.float32)))


def test_a_cut_with_a_threshold_has_at_most_the_number_of_clusters():
    tree = scipy.cluster.hierarchy.linkage(np.random.default_rng(0).standard_normal((12, 2)), "complete")
    for most, threshold in [(1, 0.0), (3, tree[-3, 2]), (5, tree[-3, 2]), (12, -1.0)]:
        by_both = cut(jnp.asarray(tree, jnp.float32), num_clusters=most, threshold=threshold + 1e-5)
        by_threshold = scipy.cluster.hierarchy.fcluster(tree, threshold + 1e-5, "distance")
        by_number = scipy.cluster.hierarchy.fcluster(tree, most, "maxclust")
        wanted = by_threshold if by_threshold.max() <= most else by_number
        assert adjusted_rand_score(wanted, by_both) == 1 and by_both.max() + 1 == wanted.max()


def test_a_merge_at_the_threshold_applies():
    tree = np.float32([[0, 1, 0.5, 2], [2, 3, 0.75, 3]])
    assert cut(tree, threshold=0.5).tolist() == [0, 0, 1]


def test_what_is_no_matrix_of_distances_is_refused():
    with pytest.raises(ValueError, match="unknown linkage"):
        linkage_tree(matrix(points(0)), "median")
    with pytest.raises(ValueError, match="distances must be of shape"):
        linkage_tree(np.zeros((2, 3), np.float32))
    with pytest.raises(ValueError, match="symmetric"):
        linkage_tree(np.float32([[0, 1], [2, 0]]))
    with pytest.raises(ValueError, match="most must be"):
        cut_by_silhouette(matrix(points(0)), most=1)
    with pytest.raises(ValueError, match=r"cost must be of shape \[n, m\] with n <= m"):
        least_cost_assignment(np.zeros((3, 2), np.float32))


SILHOUETTE = jax.jit(partial(silhouette, num_clusters=6))


@given(st.integers(0, 10**6), st.sampled_from([2, 5]))
def test_silhouettes_are_those_of_scikit_learn(seed, k):
    x = points(seed)
    labels = np.random.default_rng(seed).integers(0, k, 13)
    labels[:k] = np.arange(k)
    ours = SILHOUETTE(matrix(x), labels)
    np.testing.assert_allclose(ours, silhouette_samples(x, labels), atol=1e-5)


def chosen_by_loop(x, most, margin=1.1):
    """The rule of CLoVE's authors, with scikit-learn."""
    best = labels = None
    for k in range(2, min(most, len(x) - 1) + 1):
        found = AgglomerativeClustering(k).fit_predict(x)
        score = silhouette_score(x, found)
        if best is None or score > margin * best:
            best, labels = score, found
    return labels


@pytest.mark.slow_cases("0", "2", "3", "4")
@pytest.mark.parametrize("seed", range(5))
def test_the_number_of_clusters_is_that_of_the_authors_rule(seed):
    rng = np.random.default_rng(seed)
    centers = rng.normal(size=(2 + seed, 4)) * 6
    x = centers[rng.integers(0, len(centers), 24)] + rng.normal(size=(24, 4))
    labels = chosen_by_loop(x, 15)
    padded = np.concatenate([np.full((2, 4), 99.0), x, np.full((1, 4), -99.0)])
    mask = np.abs(padded).max(axis=1) < 90
    choose = jax.jit(partial(cut_by_silhouette, most=15))
    found = choose(matrix(padded), mask=mask)
    assert adjusted_rand_score(labels, np.asarray(found.cluster)[mask]) == 1
    alike = choose(1 - np.eye(27, dtype=np.float32), mask=np.arange(27) < 5)  # all scores are 0: there are two
    assert alike.num_clusters == 2 and np.flatnonzero(alike.scores == 0).tolist() == [2, 3, 4]


@pytest.mark.slow
def test_few_points_are_one_cluster():
    for n in (1, 2):
        chosen = cut_by_silhouette(matrix(points(0, n)) if n > 1 else np.zeros((1, 1), np.float32), most=4)
        assert chosen.num_clusters == 1 and chosen.cluster.tolist() == [0] * n
    assert cut_by_silhouette(matrix(points(0, 3)), most=4).num_clusters == 2


@pytest.mark.slow
@given(st.integers(0, 10**6), st.integers(1, 7), st.integers(0, 3))
def test_an_assignment_costs_what_scipys_does(seed, n, more):
    rng = np.random.default_rng(seed)
    cost = rng.normal(size=(n, n + more)).astype(np.float32) * np.float32(10.0 ** rng.integers(-3, 6))
    if seed % 2:
        cost = np.round(cost)  # ties
    ours = np.asarray(least_cost_assignment(cost))
    assert len(set(ours)) == n and ours.max() < n + more
    rows, columns = linear_sum_assignment(cost.astype(np.float64))
    least = cost.astype(np.float64)[rows, columns].sum()
    np.testing.assert_allclose(
        cost.astype(np.float64)[np.arange(n), ours].sum(), least, rtol=1e-5, atol=1e-5 * abs(cost).max()
    )


def test_costs_that_are_not_finite_are_avoided():
    cost = np.float32([[np.nan, 1, 2], [0, np.inf, 5], [1, 1, 1]])
    found = np.asarray(jax.jit(jax.vmap(least_cost_assignment))(np.stack([cost, cost.T])))
    for each, of in zip(found, (cost, cost.T), strict=True):
        assert sorted(each.tolist()) == [0, 1, 2] and np.isfinite(of[np.arange(3), each]).all()


@pytest.mark.slow
@pytest.mark.parametrize("linkage", ["average", "weighted", "complete"])
def test_equal_distances_merge_in_the_order_of_scipy(linkage):
    distances = np.full((5, 5), 4.0) - 4.0 * np.eye(5)
    for a, b, distance in ((0, 2, 2.0), (1, 4, 1.0), (2, 3, 1.0)):
        distances[a, b] = distances[b, a] = distance
    ours = linkage_tree(distances.astype(np.float32), linkage)
    np.testing.assert_array_equal(ours, scipy.cluster.hierarchy.linkage(squareform(distances), linkage))
