"""Synthetic problems: independent solvers find the truth in the data, and the geometry is right."""

import numpy as np
import pytest

from jfcl.core import check_clients
from jfcl.data import fc_regression, ifca_regression, synthetic


def pooled(fed, cluster):
    rows = np.flatnonzero(fed.cluster == cluster)
    x = fed.train.examples["x"][rows].astype(np.float64)
    return x.reshape(-1, x.shape[-1]), fed.train.examples["y"][rows].astype(np.float64).ravel()


@pytest.mark.parametrize("reading", ["norm", "coordinate"])
def test_ifca_truth_is_recovered_by_least_squares(reading):
    fed = ifca_regression(
        num_clients=9,
        examples_per_client=200,
        dim=30,
        num_clusters=3,
        radius=0.5,
        noise=0.1,
        reading=reading,
        seed=4,
    )
    check_clients(fed.train)
    check_clients(fed.test)
    assert fed.truth.shape == (3, 30) and fed.num_classes is None and fed.input_shape == (30,)
    for k in range(3):
        assert fed.cluster.tolist() == [0, 1, 2] * 3
        x, y = pooled(fed, k)
        found, residual, *_ = np.linalg.lstsq(x, y, rcond=None)
        np.testing.assert_allclose(found, fed.truth[k], atol=0.02)
        np.testing.assert_allclose(np.sqrt(residual[0] / (len(y) - 30)), 0.1, rtol=0.1)
        values = set(np.round(fed.truth[k], 6).tolist())
        if reading == "norm":
            np.testing.assert_allclose(np.linalg.norm(fed.truth[k].astype(np.float64)), 0.5, rtol=1e-6)
            assert len(values) == 2 and 0.0 in values
        else:
            assert values == {0.0, 0.5}
    everything = fed.train.examples["x"]
    np.testing.assert_allclose([everything.mean(), everything.std()], [0, 1], atol=0.02)
    # Held-out examples are of the same problem, and are not the training examples.
    error = fed.test.examples["y"] - np.einsum("nmd,nd->nm", fed.test.examples["x"], fed.truth[fed.cluster])
    np.testing.assert_allclose(error.std(), 0.1, rtol=0.2)
    assert not np.isin(fed.test.examples["x"], everything).all(axis=-1).any()


def test_the_two_readings_differ_by_the_norm():
    norm = ifca_regression(num_clients=2, examples_per_client=2, seed=1).truth
    code = ifca_regression(num_clients=2, examples_per_client=2, seed=1, reading="coordinate").truth
    np.testing.assert_allclose(norm, code / np.linalg.norm(code, axis=1, keepdims=True), rtol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(code, axis=1), np.sqrt(500), rtol=0.1)  # "norm about 22 R"


def test_small_dimensions_still_have_different_clusters():
    for seed in range(20):
        truth = ifca_regression(num_clients=7, examples_per_client=1, dim=3, num_clusters=7, seed=seed).truth
        assert len({tuple(row) for row in truth.tolist()}) == 7 and (truth != 0).any(axis=1).all()


def test_fc_regression_is_underdetermined_alone_and_determined_together():
    fed = fc_regression(num_clusters=4, clients_per_cluster=16, seed=2)
    assert fed.train.examples["x"].shape == (64, 9, 10) and set(fed.truth.ravel().tolist()) == {0.0, 100.0}
    for k in range(4):
        x, y = pooled(fed, k)
        np.testing.assert_allclose(x.mean(), k + 1, atol=0.15)
        np.testing.assert_allclose(x.std(axis=0).mean(), 1, atol=0.1)
        np.testing.assert_allclose(np.linalg.lstsq(x, y, rcond=None)[0], fed.truth[k], atol=1e-3)
    alone = fed.train.examples["x"][0].astype(np.float64)
    found = np.linalg.lstsq(alone, fed.train.examples["y"][0].astype(np.float64), rcond=None)[0]
    assert np.linalg.norm(found - fed.truth[0]) > 1


@pytest.mark.parametrize("make", [ifca_regression, fc_regression])
def test_synthetic_problems_follow_their_seed(make):
    one, same, other = (make(dim=5, examples_per_client=3, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one.train.examples["x"], same.train.examples["x"])
    assert one.split_hash == same.split_hash != other.split_hash and len(one.split_hash) == 16
    assert not np.array_equal(one.train.examples["x"], other.train.examples["x"])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ifca_regression(reading="nrom"), "unknown reading 'nrom': did you mean 'norm'"),
        (
            lambda: ifca_regression(num_clients=2, num_clusters=3),
            "num_clusters must be at most the 2 clients there are, got 3",
        ),
        (lambda: ifca_regression(dim=2, num_clusters=4), "num_clusters must be at most 3 "),
        (lambda: ifca_regression(noise=-1.0), "noise must be 0 or more"),
        (lambda: ifca_regression(radius=np.nan), "radius must be finite"),
        (lambda: fc_regression(clients_per_cluster=0), "clients_per_cluster must be an integer, at least 1"),
        (lambda: fc_regression(examples_per_client=0), "examples_per_client must be an integer, at least 1"),
        (lambda: ifca_regression(seed=-1), "seed must be an integer, at least 0, got -1"),
        (lambda: fc_regression(seed=2**63), "seed must be at most 9223372036854775807"),
    ],
)
def test_synthetic_refuses(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize(("count", "dim"), [(1000, 13), pytest.param(8000, 13, marks=pytest.mark.slow), (5, 40)])
def test_truths_are_different_however_many(count, dim):
    found = synthetic._binary_vectors(np.random.default_rng(0), count, dim)
    assert len(np.unique(found, axis=0)) == count and found.any(axis=1).all() and set(np.unique(found)) == {0, 1}
