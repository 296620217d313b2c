"""The knee of a curve against the loop of Kneedle, and its laws."""

import numpy as np
import pytest

from jfcl.kernels import knee


def knee_by_loop(values):
    """Kneedle of a convex, increasing curve, after its paper, with sensitivity 1, on its mirror image."""
    y = np.sort(np.float64(values))
    n, x = len(y), np.arange(len(y)) / (len(y) - 1)
    above = (y[-1] - y[::-1]) / (y[-1] - y[0]) - x
    threshold = place = None
    for i in range(n - 1):
        left, right = above[max(i - 1, 0)], above[i + 1]
        if above[i] >= left and above[i] >= right:
            threshold, place = above[i] - 1 / (n - 1), i
        if above[i] <= left and above[i] <= right:
            threshold = None
        if threshold is not None and right < threshold:
            return y[n - 1 - place]
    return y[-1]


def curves():
    for seed in range(40):
        rng = np.random.default_rng(seed)
        yield (
            rng,
            np.float32(
                [
                    rng.gamma(1.0, size=20),
                    rng.normal(5, 1, 20),
                    np.exp(rng.normal(size=20)),
                    np.concatenate([rng.uniform(1, 2, 16), rng.uniform(5, 9, 4)]),
                ][seed % 4]
            ),
        )


def test_it_is_the_one_of_the_loop():
    for rng, values in curves():
        wanted = knee_by_loop(values)
        np.testing.assert_allclose(knee(values), wanted, rtol=1e-6)
        np.testing.assert_allclose(knee(8 * values[rng.permutation(20)]), 8 * wanted, rtol=1e-6)
        at = np.sort(rng.permutation(24)[:20])
        more = np.full(24, 7.0, np.float32)
        more[at] = values
        np.testing.assert_allclose(knee(more, mask=np.isin(np.arange(24), at)), wanted, rtol=1e-6)


def test_without_a_knee_it_is_the_largest_value():
    for values in ([2.0, 2.0, 2.0], [3.0], [0.0, 1.0], [0.0, 1.0, 2.0, 3.0, 4.0]):
        mask = np.arange(24) < len(values)
        assert knee(np.resize(np.float32(values), 24), mask=mask) == max(values)


def test_a_matrix_is_refused():
    with pytest.raises(ValueError, match=r"values must be of shape \[N\]"):
        knee(np.zeros((2, 2), np.float32))
