"""Principal vectors and angles against NumPy and SciPy."""

import jax
import numpy as np
import pytest
import scipy.linalg

from jfcl.kernels import principal_vectors, subspace_angles


def degrees(cosine):
    return np.rad2deg(np.arccos(np.clip(cosine, -1, 1)))


@pytest.mark.parametrize("shape", [(9, 20), (30, 6)])
def test_principal_vectors_are_those_of_the_svd(shape):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32) + 1
    vectors = np.asarray(principal_vectors(x, 3)[0], np.float64)
    theirs = np.linalg.svd(x.astype(np.float64).T)[0][:, :3].T  # left singular vectors of the points as columns
    np.testing.assert_allclose(np.abs((vectors * theirs).sum(axis=1)), 1, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)


@pytest.mark.parametrize("shape", [(9, 20), (30, 6)])
def test_principal_vectors_of_small_singular_values_are_those_of_the_svd(shape):
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.normal(size=(size, 4)))[0] for size in shape)
    x = (left * [1e3, 1.0, 0.5, 0.1] @ right.T).astype(np.float32)
    vectors = np.asarray(principal_vectors(x, 5)[0], np.float64)
    np.testing.assert_allclose(np.abs((vectors[:4] * right.T).sum(axis=1)), 1, atol=1e-4)
    assert not vectors[4].any()  # beyond the rank


def test_each_group_has_its_own_and_what_does_not_count_has_none():
    rng = np.random.default_rng(1)
    x, groups = rng.normal(size=(12, 5)).astype(np.float32), rng.integers(0, 2, 12)
    mask = np.arange(12) < 10
    x[10:] = np.nan
    found = principal_vectors(x, 2, groups=groups, num_groups=3, mask=mask)
    for group in (0, 1):
        theirs = np.linalg.svd(x[mask & (groups == group)].astype(np.float64).T)[0][:, :2].T
        np.testing.assert_allclose(np.abs((np.asarray(found[group]) * theirs).sum(axis=1)), 1, atol=1e-5)
    assert not np.asarray(found[2]).any()
    few = np.asarray(principal_vectors(x[:2], 4)[0])  # the rank is 2
    assert (np.linalg.norm(few, axis=1) > 0.5).tolist() == [True, True, False, False]


def bases_of(seed, n=5, p=4, d=11):
    rng = np.random.default_rng(seed)
    bases = rng.normal(size=(n, p, d))
    bases /= np.linalg.norm(bases, axis=2, keepdims=True)
    bases[1, 3] = 0  # a subspace of a lower dimension
    bases[2] = bases[0][::-1] * -1  # an equal one
    return bases.astype(np.float32)


def test_angles_are_scipys():
    bases = bases_of(0)
    # Of two arguments, as without the second the smaller of `[i, j]` and `[j, i]` counts.
    smallest, sums = (np.asarray(subspace_angles(bases, bases, measure=name)) for name in ("smallest", "sum"))
    for i in range(5):
        for j in range(5):
            a, b = (x[np.abs(x).max(axis=1) > 0].T.astype(np.float64) for x in (bases[i], bases[j]))
            angles = np.rad2deg(scipy.linalg.subspace_angles(a, b))  # falling
            small = 0.1 if i == j or {i, j} == {0, 2} else 2e-3  # arccos of nearly 1 in float32
            np.testing.assert_allclose(smallest[i, j], angles[-1], atol=small)
            np.testing.assert_allclose(sums[i, j], angles.sum(), atol=4 * small)


def test_the_absolute_angle_is_the_smallest_between_lines():
    bases, others = bases_of(1), bases_of(2, n=3)[:, :2]
    ours = np.asarray(jax.jit(subspace_angles)(bases, others))
    theirs = np.array([[degrees(np.abs(a @ b.T).max()) for b in others] for a in bases.astype(np.float64)])
    np.testing.assert_allclose(ours, theirs, atol=1e-3)
    square = np.asarray(jax.jit(subspace_angles)(bases))
    assert (square == square.T).all() and (np.diagonal(square) == 0).all() and square[0, 2] < 0.1


@pytest.mark.slow_cases("smallest", "sum")
@pytest.mark.parametrize("measure", ["absolute", "smallest", "sum"])
def test_a_subspace_without_directions_is_at_right_angles(measure):
    nothing = np.zeros((3, 2, 11), np.float32)
    assert (np.asarray(subspace_angles(bases_of(1), nothing, measure=measure)) == 90).all()


@pytest.mark.slow_cases("sum")
@pytest.mark.parametrize("measure", ["absolute", "sum"])
def test_tiles_change_nothing(measure, monkeypatch):
    bases = bases_of(3)
    whole = np.asarray(subspace_angles(bases, measure=measure))
    monkeypatch.setattr("jfcl.kernels.subspaces.TILE", 1)
    np.testing.assert_allclose(subspace_angles(bases[:, :, ::-1], measure=measure), whole, atol=0.5)


def test_what_is_no_basis_is_refused():
    with pytest.raises(ValueError, match="bases must be of shape"):
        subspace_angles(np.zeros((3, 2), np.float32))
    with pytest.raises(ValueError, match="unknown measure"):
        subspace_angles(bases_of(0), measure="largest")
    with pytest.raises(ValueError, match="groups must be"):
        principal_vectors(np.zeros((3, 2), np.float32), 1, groups=np.zeros(2, np.int32))
    with pytest.raises(ValueError, match="num_vectors must be"):
        principal_vectors(np.zeros((3, 2), np.float32), 0)
