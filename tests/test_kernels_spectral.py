"""Spectral clustering and the measure of Davies and Bouldin against scikit-learn."""

from functools import partial

import jax
import numpy as np
import pytest
from sklearn.cluster import SpectralClustering
from sklearn.manifold import SpectralEmbedding
from sklearn.metrics import adjusted_rand_score, davies_bouldin_score

from jfcl.kernels import davies_bouldin, pivoted_clusters, spectral_clusters, spectral_embedding


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
    more = np.full((16, 16), np.nan, np.float32)  # clients that do not count
    more[:14, :14] = affinity
    vectors = np.asarray(spectral_embedding(more, 4, mask=mask))
    assert not vectors[14:].any()
    assert np.ptp(vectors[:14, 0]) < 1e-5, "the first vector is constant"
    vectors = vectors[:14]
    signs = np.sign((vectors[:, 1:] * wanted).sum(axis=0))
    np.testing.assert_allclose(vectors[:, 1:] * signs, wanted, atol=1e-5)
    theirs = SpectralClustering(3, assign_labels="cluster_qr", **options).fit_predict(np.float64(affinity))
    ours = pivoted_clusters(np.where(mask[:, None], np.pad(vectors[:, :3], ((0, 2), (0, 0))), 9.0), mask=mask)
    assert adjusted_rand_score(theirs, ours[:14]) == 1 and ours[14:].tolist() == [-1, -1]
    assert adjusted_rand_score(blob, ours[:14]) > 0.5


def test_a_rotation_changes_no_cluster():
    vectors = spectral_embedding(affinity_of(5)[0], 3)
    rotation = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))[0].astype(np.float32)
    wanted = pivoted_clusters(vectors)
    assert adjusted_rand_score(wanted, pivoted_clusters(np.asarray(vectors) @ rotation)) == 1


def test_a_point_without_affinities_is_a_part_of_its_own():
    affinity = np.zeros((4, 4), np.float32)
    affinity[:3, :3] = 1
    cluster = pivoted_clusters(spectral_embedding(affinity, 2))
    assert adjusted_rand_score([0, 0, 0, 1], cluster) == 1
    assert not np.asarray(spectral_embedding(affinity, 3, mask=np.array([True, True, False, False])))[:, 2].any()


@pytest.mark.parametrize("seed", range(4))
def test_the_measure_is_that_of_scikit_learn(seed):
    rng = np.random.default_rng(seed)
    points, cluster = np.float32(rng.normal(size=(15, 2))), np.int32(rng.permutation(np.arange(15) % 3))
    mask = np.arange(15) < 12
    wanted = davies_bouldin_score(points[mask], cluster[mask])
    ours = jax.jit(davies_bouldin, static_argnames="num_clusters")(points, 2 * cluster, num_clusters=6, mask=mask)
    np.testing.assert_allclose(ours, wanted, rtol=1e-5)


def test_it_is_infinite_where_nothing_is_apart():
    points, one = np.zeros((4, 2), np.float32), np.zeros(4, np.int32)
    assert np.isinf(davies_bouldin(points, one, num_clusters=2))
    assert np.isinf(davies_bouldin(points, np.int32([0, 0, 1, 1]), num_clusters=2))


def test_what_has_no_meaning_is_refused():
    with pytest.raises(ValueError, match="symmetric"):
        spectral_embedding(np.float32([[0, 1], [0, 0]]), 1)
    with pytest.raises(ValueError, match="clusters must be integers"):
        davies_bouldin(np.zeros((3, 1), np.float32), np.zeros(2, np.int32), num_clusters=2)


def test_the_number_of_clusters_is_that_of_the_least_measure():
    affinity, blob = affinity_of(1, blobs=2)
    affinity = affinity**2  # narrower: the blobs are far apart
    found = jax.device_get(jax.jit(partial(spectral_clusters, most=3))(affinity, mask=np.arange(14) > 0))
    vectors = np.asarray(spectral_embedding(affinity[1:, 1:], 4))
    measures = [
        davies_bouldin_score(vectors[:, 1 : k + 1], np.asarray(pivoted_clusters(vectors[:, :k]))) for k in (2, 3)
    ]
    np.testing.assert_allclose(found.scores[2:], measures, rtol=1e-3)
    assert measures[0] < min(measures[1], 1) and found.num_clusters == 2
    assert adjusted_rand_score(blob[1:], found.cluster[1:]) == 1 and found.cluster[0] == found.cluster[1] == 0
    one = jax.device_get(jax.jit(partial(spectral_clusters, most=3, limit=1))(affinity, mask=np.arange(14) > 0))
    assert not one.cluster.any() and one.num_clusters == 1 and np.isnan(one.scores).all()
