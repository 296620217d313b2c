"""Spectral clustering and the measure of Davies and Bouldin against scikit-learn."""

from functools import partial

import jax
import numpy as np
import pytest
from sklearn.cluster import SpectralClustering
from sklearn.manifold import SpectralEmbedding
from sklearn.metrics import adjusted_rand_score, davies_bouldin_score

from jfcl.kernels.spectral import davies_bouldin, pivoted_clusters, spectral_clusters, spectral_embedding


def affinity_of(seed, n=14, blobs=3):
    """Affinities of points of three blobs, and their blobs."""
    rng = np.random.default_rng(seed)
    blob = rng.permutation(np.arange(n) % blobs)
    points = 3 * np.eye(blobs)[blob] + 0.7 * rng.normal(size=(n, blobs))
    squares = np.square(points[:, None] - points[None, :]).sum(axis=2)
    return np.exp(-squares / 4).astype(np.float32), blob


@pytest.mark.parametrize("seed", range(4))
def test_embedding_and_clusters_are_those_of_scikit_learn(seed):
    affinity, blob = affinity_of(seed)
    options = {"affinity": "precomputed", "random_state": 0}
    wanted = SpectralEmbedding(3, **options).fit_transform(np.float64(affinity))
    mask = np.arange(16) < 14
    vectors = np.asarray(spectral_embedding(np.pad(affinity, (0, 2)), mask, 4))
    assert not vectors[14:].any()
    assert np.ptp(vectors[:14, 0]) < 1e-5, "the first vector is constant"
    vectors = vectors[:14]
    signs = np.sign((vectors[:, 1:] * wanted).sum(axis=0))
    np.testing.assert_allclose(vectors[:, 1:] * signs, wanted, atol=1e-5)
    theirs = SpectralClustering(3, assign_labels="cluster_qr", **options).fit_predict(np.float64(affinity))
    ours = pivoted_clusters(np.where(mask[:, None], np.pad(vectors[:, :3], ((0, 2), (0, 0))), 9.0), mask)
    assert adjusted_rand_score(theirs, ours[:14]) == 1 and ours[14:].tolist() == [-1, -1]
    assert adjusted_rand_score(blob, ours[:14]) > 0.5


def test_clusters_that_hardly_touch_have_the_measure_of_scikit_learn():
    rng = np.random.default_rng(0)
    affinity = rng.uniform(0.3, 1.0, size=(14, 14))
    affinity = (affinity + affinity.T) / 2
    blob = np.arange(14) % 2
    affinity *= np.where(blob[:, None] == blob[None, :], 1.0, 1e-12)  # too small to tell 1 from 1 + 1e-12 in float32
    wanted = SpectralEmbedding(2, affinity="precomputed", random_state=0).fit_transform(affinity)
    found = spectral_clusters(np.float32(affinity), most=3)
    assert adjusted_rand_score(blob, found.cluster) == 1
    np.testing.assert_allclose(found.scores[2], davies_bouldin_score(wanted, blob), rtol=1e-3)


def test_a_rotation_changes_no_cluster():
    everyone = np.ones(14, bool)
    vectors = spectral_embedding(affinity_of(5)[0], everyone, 3)
    rotation = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))[0].astype(np.float32)
    wanted = pivoted_clusters(vectors, everyone)
    assert adjusted_rand_score(wanted, pivoted_clusters(np.asarray(vectors) @ rotation, everyone)) == 1


def test_a_point_without_affinities_is_a_part_of_its_own():
    affinity, everyone = np.zeros((5, 5), np.float32), np.ones(5, bool)
    affinity[:4, :4] = [[1, 1, 0.1, 0.1]] * 2 + [[0.1, 0.1, 1, 1]] * 2  # of which the eigenvalue is 2 / 3
    cluster = pivoted_clusters(spectral_embedding(affinity, everyone, 2), everyone)
    assert adjusted_rand_score([0, 0, 0, 0, 1], cluster) == 1
    affinity[2:] = affinity[:, 2:] = 0
    assert not np.asarray(spectral_embedding(affinity, np.arange(5) < 2, 3))[:, 2].any()


@pytest.mark.parametrize("seed", range(4))
def test_the_measure_is_that_of_scikit_learn(seed):
    rng = np.random.default_rng(seed)
    points, cluster = np.float32(rng.normal(size=(15, 2))), np.int32(rng.permutation(np.arange(15) % 3))
    mask = np.arange(15) < 12
    wanted = davies_bouldin_score(points[mask], cluster[mask])
    ours = davies_bouldin(points, 2 * cluster, mask, 6)
    np.testing.assert_allclose(ours, wanted, rtol=1e-5)


def test_it_is_infinite_where_nothing_is_apart():
    points, everyone = np.zeros((4, 2), np.float32), np.ones(4, bool)
    assert np.isinf(davies_bouldin(points, np.zeros(4, np.int32), everyone, 2))
    assert np.isinf(davies_bouldin(points, np.int32([0, 0, 1, 1]), everyone, 2))


def test_what_has_no_meaning_is_refused():
    with pytest.raises(ValueError, match="symmetric"):
        spectral_clusters(np.float32([[0, 1], [0, 0]]), most=2)


def test_the_number_of_clusters_is_that_of_the_least_measure():
    affinity, blob = affinity_of(1, blobs=2)
    affinity = affinity**2  # narrower: the blobs are far apart
    others = np.where((np.arange(14) > 0) & (np.arange(14) > 0)[:, None], affinity, np.nan)
    choose = jax.jit(partial(spectral_clusters, most=3))
    found = jax.device_get(choose(others, mask=np.arange(14) > 0))
    everyone = np.ones(13, bool)
    vectors = np.asarray(spectral_embedding(affinity[1:, 1:], everyone, 4))
    clusters = {k: np.asarray(pivoted_clusters(vectors[:, :k], everyone)) for k in (2, 3)}
    measures = [davies_bouldin_score(vectors[:, 1 : k + 1], clusters[k]) for k in (2, 3)]
    np.testing.assert_allclose(found.scores[2:], measures, rtol=1e-3)
    assert measures[0] < min(measures[1], 1) and found.num_clusters == 2
    assert adjusted_rand_score(blob[1:], found.cluster[1:]) == 1 and found.cluster[0] == found.cluster[1] == 0
    limited = jax.jit(partial(spectral_clusters, most=3, mask=np.arange(14) > 0))
    one, two = (jax.device_get(limited(affinity, limit=most)) for most in (1, 2))
    assert not one.cluster.any() and one.num_clusters == 1 and np.isnan(one.scores).all()
    np.testing.assert_allclose(two.scores, [np.nan, np.nan, measures[0], np.nan], rtol=1e-3)
    vague = limited(affinity_of(0, blobs=1)[0], limit=2)
    assert 1 < vague.scores[2] < 2 and vague.num_clusters == 1
    assert np.isnan(choose(affinity, mask=np.arange(14) < 3).scores).tolist() == [True, True, False, True]
