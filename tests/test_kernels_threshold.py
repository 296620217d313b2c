"""Threshold-Clustering against loops over equation (24) in float64."""

from functools import cache, partial

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from sklearn.cluster import KMeans
from sklearn.datasets import make_blobs

from jfcl.kernels import threshold_clustering
from jfcl.kernels.threshold import all_products, center_from_row, gram_is_cheaper

SEEDS = st.integers(0, 2**31)
FORMS = pytest.mark.parametrize("form", ["direct", "gram"])


def equation_24(points, centers, num_rounds, radius_of, strict=False):
    """`radius_of(round, k, distances)`."""
    z, v = points.astype(np.float64), centers.astype(np.float64)
    path = []
    for l in range(num_rounds):
        new = np.empty_like(v)
        for k in range(len(v)):
            distances = np.array([np.sqrt(((z_i - v[k]) ** 2).sum()) for z_i in z])
            radius = radius_of(l, k, distances)
            inside = distances < radius if strict else distances <= radius
            new[k] = sum(z[i] if inside[i] else v[k] for i in range(len(z))) / len(z)
        v = new
        path.append(v)
    return np.stack(path)


def blobs(seed, count=24, dim=6, offset=0.0):
    points, truth = make_blobs(count, dim, centers=3, cluster_std=1.0, random_state=seed % 2**31)
    return (points + offset).astype(np.float32), truth


@pytest.mark.slow_cases("False-*", "True-direct")
@FORMS
@pytest.mark.parametrize("own", [False, True])
@given(seed=SEEDS, offset=st.sampled_from([0.0, 10.0]))
def test_quantile_is_numpys(form, seed, offset, own):
    points, _ = blobs(seed, offset=offset)
    centers = points if own else points[:2] + np.float32(0.5)
    truth = equation_24(points, centers, 4, lambda l, k, d: np.quantile(d, 0.3))
    last = threshold_clustering(points, None if own else centers, quantile=0.3, num_rounds=4, form=form)
    np.testing.assert_allclose(last, truth[-1], atol=2e-5)


RADII = {
    "linear": lambda l, k, d: np.quantile(d, 0.3),
    "index": lambda l, k, d: np.sort(d)[int(0.3 * len(d))],
    "index_shrunk": lambda l, k, d: 0.99 * np.sort(d)[int(0.3 * len(d))],
    "index_strict": lambda l, k, d: np.sort(d)[int(0.3 * len(d))],
}


@pytest.mark.slow
@given(SEEDS, st.sampled_from([0.0, 1000.0]), st.sampled_from(sorted(RADII)))
def test_centre_of_a_row_is_equation_24(seed, offset, rule):
    """The form of accelerators: relative to zero, and in the direct form where that has too few digits."""
    points, _ = blobs(seed, offset=offset)
    row = seed % len(points)
    tree = {"a": points[:, :4].reshape(-1, 2, 2), "b": points[:, 4:]}
    everything = {"weights": jnp.ones(len(points)), "mask": np.ones(len(points), bool)}
    ours = center_from_row(tree, jnp.int32(row), quantile=0.3, num_rounds=4, quantile_rule=rule, **everything)
    truth = equation_24(points, points[row : row + 1], 4, RADII[rule], strict=rule == "index_strict")[-1]
    tolerance = {"atol": 2e-5 if offset == 0 else 2e-3}
    np.testing.assert_allclose(ours["a"].reshape(1, 4), truth[:, :4], **tolerance)
    np.testing.assert_allclose(ours["b"], truth[:, 4:], **tolerance)


def test_centres_of_rows_of_many_sets_with_weights_and_broken_points():
    """One of the sets has a point that is not finite, one is narrow and far from zero, one has weights and a mask."""
    rng = np.random.default_rng(0)
    sets = rng.standard_normal((4, 12, 3, 2)).astype(np.float32)
    sets[1, 5, 0, 0] = np.nan
    sets[2] = 1e-4 * sets[2] + 100
    mask = np.arange(12) < np.array([12, 12, 12, 9])[:, None]
    weights = jnp.asarray(rng.uniform(0.5, 2, (4, 12)), jnp.float32)
    row = jnp.array([0, 1, 2, 3])
    options = {"quantile": 0.5, "num_rounds": 3}
    ours = jax.jit(jax.vmap(lambda z, row, w, ok: center_from_row({"z": z}, row, weights=w, mask=ok, **options)["z"]))(
        sets, row, weights, mask
    )
    flat = sets.reshape(4, 12, 6)
    for i, own in enumerate(row.tolist()):
        ok = mask[i] & np.isfinite(flat[i]).all(axis=1)
        z, v = flat[i, ok].astype(np.float64), flat[i, own].astype(np.float64)
        share = np.float64(weights[i])[ok] / np.float64(weights[i])[ok].sum()
        for _ in range(3):
            distances = np.linalg.norm(z - v, axis=1)
            v = v + (share * (distances <= np.quantile(distances, 0.5))) @ (z - v)
        np.testing.assert_allclose(ours[i].ravel(), v, atol=1e-5)


def test_inner_products_of_leaves_of_any_rank():
    x = np.random.default_rng(0).standard_normal((7, 3, 5, 2)).astype(np.float32)
    flat = x.reshape(7, -1).astype(np.float64)
    for form in (x, x.reshape(7, -1)):
        ours = all_products(jnp.asarray(form))
        np.testing.assert_allclose(ours, flat @ flat.T, atol=1e-5)
        np.testing.assert_array_equal(ours, ours.T)


@pytest.mark.slow_cases("direct")
@FORMS
@given(SEEDS)
def test_a_narrow_cluster_far_from_most_points(form, seed):
    rng = np.random.default_rng(seed)
    points = (rng.standard_normal((20, 5)) + np.where(np.arange(20) < 12, 0.0, 1e4)[:, None]).astype(np.float32)
    ours = threshold_clustering(points, points[-1:], quantile=0.2, num_rounds=3, form=form)
    truth = equation_24(points, points[-1:], 3, lambda l, k, d: np.quantile(d, 0.2))
    np.testing.assert_allclose(ours, truth[-1], atol=0.02)


def narrow_clusters(seed):
    """Three clusters, 3,000 times as far apart as they are wide."""
    rng = np.random.default_rng(seed)
    places = 1e3 * np.array([[0, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 1]])
    points, starts = (np.repeat(places, n, axis=0) + 0.3 * rng.standard_normal((3 * n, 4)) for n in (8, 1))
    return points.astype(np.float32), starts.astype(np.float32)


@pytest.mark.slow_cases("gram")
@FORMS
@given(SEEDS)
def test_narrow_clusters_far_apart(form, seed):
    points, starts = narrow_clusters(seed)
    # Between the 4th and the 5th of the distances, so that rounding of the input decides nothing.
    truth = equation_24(points, starts, 3, lambda l, k, d: np.sort(d)[3:5].mean())
    ours = threshold_clustering(points, starts, quantile=3.5 / 23, num_rounds=3, form=form)
    np.testing.assert_allclose(ours, truth[-1], atol=2e-3)


@pytest.mark.slow_cases("gram")
@FORMS
@given(SEEDS)
def test_radius_by_round_and_centre(form, seed):
    points, _ = blobs(seed)
    radii = np.random.default_rng(seed).uniform(1, 15, (3, 2)).astype(np.float32)
    for radius in (radii, radii[0], radii[0, 0]):
        ours = threshold_clustering(points, points[:2], radius=radius, num_rounds=3, form=form)
        by_round = np.broadcast_to(radius, (3, 2))
        truth = equation_24(points, points[:2], 3, lambda l, k, d, by_round=by_round: by_round[l, k])
        np.testing.assert_allclose(ours, truth[-1], atol=2e-5)


@pytest.mark.slow_cases("*-gram", "index-1-False-direct")
@FORMS
@pytest.mark.parametrize(
    ("rule", "factor", "strict"), [("index", 1, False), ("index_shrunk", 0.99, False), ("index_strict", 1, True)]
)
@given(seed=SEEDS, quantile=st.sampled_from([0.0, 0.1, 0.2, 0.55, 1.0]))
def test_rules_of_the_authors_code(form, rule, factor, strict, seed, quantile):
    points, _ = blobs(seed)

    def radius_of(l, k, distances):
        return factor * np.sort(distances)[min(int(len(distances) * quantile), len(distances) - 1)]

    # Centres off the points, and one round: ranks of float32 and float64 distances agree.
    centers = points[:3] + np.float32(0.3)
    ours = threshold_clustering(points, centers, quantile=quantile, quantile_rule=rule, num_rounds=1, form=form)
    np.testing.assert_allclose(ours, equation_24(points, centers, 1, radius_of, strict)[-1], atol=2e-5)


@pytest.mark.slow
@FORMS
@given(SEEDS)
def test_three_means_rule(form, seed):
    # Distances to a centre in one of three blobs on a line, unevenly far apart: three groups of distances.
    rng = np.random.default_rng(seed)
    places = np.repeat([0.0, 20.0, 50.0], 8)[:, None] * np.ones((1, 6))
    points = (places + rng.standard_normal((24, 6))).astype(np.float32)

    def radius_of(l, k, distances):
        means = KMeans(3, n_init=5, random_state=0).fit(distances[:, None]).cluster_centers_
        return np.sort(means.ravel())[1:].mean()

    ours = threshold_clustering(points, points[:2], radius="three_means", num_rounds=1, form=form)
    np.testing.assert_allclose(ours, equation_24(points, points[:2], 1, radius_of)[-1], atol=1e-4)


@pytest.mark.slow_cases("gram")
@FORMS
@given(SEEDS)
def test_masked_points_do_not_exist(form, seed):
    points, _ = blobs(seed)
    mask = np.random.default_rng(seed).permutation(24) < 17
    broken = np.where(mask[:, None], points, np.nan)
    full = equation_24(points[mask], points[:2], 3, lambda l, k, d: np.quantile(d, 0.4))[-1]
    options = {"quantile": 0.4, "num_rounds": 3, "form": form}
    masked = threshold_clustering(broken, points[:2], mask=jnp.asarray(mask), **options)
    np.testing.assert_allclose(masked, full, atol=2e-5)
    np.testing.assert_allclose(compiled(**options)(broken, points[:2]), full, atol=2e-5)


@cache
def compiled(**options):
    return jax.jit(partial(threshold_clustering, **options))


@pytest.mark.slow
@FORMS
@given(SEEDS)
def test_far_attackers_cost_no_digits(form, seed):
    points, _ = blobs(seed)
    points[::3] = 1e6 * np.random.default_rng(seed).standard_normal((8, 6))
    truth = equation_24(points, points, 5, lambda l, k, d: np.quantile(d, 0.2))[-1]
    ours = threshold_clustering(points, quantile=0.2, num_rounds=5, form=form)
    good = np.arange(24) % 3 != 0
    np.testing.assert_allclose(np.asarray(ours)[good], truth[good], atol=1e-4)


@pytest.mark.slow_cases("gram")
@FORMS
@given(SEEDS)
def test_laws(form, seed):
    points, _ = blobs(seed)
    rng = np.random.default_rng(seed)

    def run(z, **options):
        return np.asarray(threshold_clustering(z, points[:2], num_rounds=3, form=form, **options))

    # An infinite radius is the mean; a zero radius leaves a centre alone where no point is.
    np.testing.assert_allclose(run(points, radius=np.inf), np.tile(points.mean(0), (2, 1)), atol=1e-5)
    away = points[:2] + np.float32(0.5)
    np.testing.assert_allclose(threshold_clustering(points, away, radius=0.0, num_rounds=3, form=form), away, atol=2e-5)
    # The order of the points does not matter, nor do a shift and a scale.
    np.testing.assert_allclose(run(points[rng.permutation(24)], quantile=0.3), run(points, quantile=0.3), atol=2e-5)
    moved = threshold_clustering(3 * points + 5, 3 * points[:2] + 5, quantile=0.3, num_rounds=3, form=form)
    np.testing.assert_allclose(moved, 3 * run(points, quantile=0.3) + 5, atol=2e-4)
    # One hostile point moves a centre by at most the radius over N.
    hostile = np.concatenate([points, 1e4 * rng.standard_normal((1, 6)).astype(np.float32)])
    clean = np.asarray(threshold_clustering(hostile, points[:2], radius=4.0, num_rounds=1, form=form))
    without = points[:2] + (run_once(points, points[:2], 4.0) - points[:2]) * 24 / 25
    assert np.linalg.norm(clean - without, axis=1).max() <= 4.0 / 25 + 1e-4


def run_once(points, centers, radius):
    return equation_24(points, centers, 1, lambda l, k, d: radius)[-1].astype(np.float32)


@pytest.mark.slow
def test_recovers_blobs():
    points, truth = blobs(3, count=60, dim=10)
    moved = np.asarray(threshold_clustering(points, quantile=0.3, num_rounds=40))
    means = np.stack([points[truth == c].mean(0) for c in range(3)])
    spread = np.linalg.norm(points - means[truth], axis=1).mean()
    assert np.linalg.norm(moved - means[truth], axis=1).max() < 0.5 * spread


@pytest.mark.slow
def test_forms_agree_on_many_wide_points():
    points = np.random.default_rng(0).standard_normal((100, 20_000)).astype(np.float32) + 10
    points[50:] += 0.05
    gram, direct = (
        threshold_clustering(points, points[:3], quantile=0.4, num_rounds=10, form=form) for form in ("gram", "direct")
    )
    np.testing.assert_allclose(gram, direct, rtol=1e-5)


def test_auto_takes_the_cheaper_form():
    assert gram_is_cheaper(300, 300, 10) and not gram_is_cheaper(10_000, 1, 3)


@pytest.mark.slow
def test_inside_vmap():
    batch = np.stack([blobs(seed)[0] for seed in range(3)])
    many = jax.vmap(lambda z: threshold_clustering(z, z[:2], quantile=0.3, num_rounds=3))(batch)
    for one, z in zip(many, batch, strict=True):
        np.testing.assert_allclose(one, threshold_clustering(z, z[:2], quantile=0.3, num_rounds=3), atol=1e-5)


POINTS = np.ones((4, 2), np.float32)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"points": np.ones(3)}, r"points must be of shape \[N, D\]"),
        ({"points": np.ones((0, 2))}, "at least one client"),
        (
            {"centers": np.ones((2, 3))},
            r"centers must be \[K, ...\] with the shapes \[\(2,\)\], as the points have, got \[\(3,\)\]",
        ),
        ({"radius": None}, "give radius or quantile, and not both, got None and None"),
        ({"quantile": 0.5}, "give radius or quantile, and not both, got 1.0 and 0.5"),
        ({"radius": -1.0}, "radius must be at least 0"),
        ({"radius": float("nan")}, "radius must be at least 0, and not NaN"),
        ({"radius": None, "quantile": 1.5}, r"quantile must be within \[0, 1\], got 1.5"),
        ({"radius": np.ones(5)}, r"radius must be of one of the shapes \(\(\), \(2,\), \(3, 2\)\)"),
        ({"radius": "two_means"}, "three_means"),
        ({"num_rounds": 0}, "num_rounds must be an integer, at least 1, got 0"),
        ({"quantile_rule": "nearest"}, "quantile_rule must be one of"),
        ({"form": "fast"}, "form must be one of"),
        ({"mask": np.ones(3, bool)}, "mask must be bool of shape"),
        ({"points": np.full((4, 2), np.nan)}, r"points must be finite, got 'NaN or infinity in 4 row\(s\)'"),
        ({"centers": np.full((2, 2), np.inf)}, "centers must be finite"),
    ],
)
def test_bad_input_is_named(options, words):
    options = {"points": POINTS, "centers": POINTS[:2], "radius": 1.0, "num_rounds": 3} | options
    with pytest.raises(ValueError, match=words):
        threshold_clustering(options.pop("points"), options.pop("centers"), **options)


@pytest.mark.slow_cases("gram")
@FORMS
@given(SEEDS)
def test_weights_count_points_in_the_mean(form, seed):
    points, _ = blobs(seed, count=12)
    weights = np.random.default_rng(seed).integers(0, 4, 12)
    weights[0] = 1
    ours = threshold_clustering(points, points[:2], radius=6.0, num_rounds=3, weights=jnp.asarray(weights), form=form)
    repeated = np.repeat(points, weights, axis=0)  # a point of weight 3 is three points
    truth = equation_24(repeated, points[:2], 3, lambda l, k, d: 6.0)[-1]
    np.testing.assert_allclose(ours, truth, atol=2e-5)


@pytest.mark.slow
@FORMS
def test_stacked_pytrees_are_their_matrix(form):
    points, _ = blobs(3)
    as_tree = {"b": points[:, :1, None], "w": points[:, 1:].reshape(-1, 1, 5)}
    options = {"quantile": 0.4, "num_rounds": 3, "form": form}
    for some in (slice(None), slice(0, 2)):
        centers = None if some == slice(None) else jax.tree.map(lambda x, some=some: x[some], as_tree)
        ours = threshold_clustering(as_tree, centers, **options)
        truth = threshold_clustering(points, None if centers is None else points[some], **options)
        assert ours["w"].shape == (len(points[some]), 1, 5)
        np.testing.assert_allclose(ours["b"][..., 0, 0], truth[..., 0], atol=1e-6)
        np.testing.assert_allclose(ours["w"][..., 0, :], truth[..., 1:], atol=1e-6)
    with pytest.raises(ValueError, match="centers must be a tree like points"):
        threshold_clustering(as_tree, points[:2], **options)


@pytest.mark.slow_cases("*-gram", "limit0-direct", "limit1-direct")
@pytest.mark.parametrize("form", ["gram", "direct"])
@pytest.mark.parametrize("limit", [{"quantile": 0.8}, {"quantile": 1.0}, {"radius": "three_means"}])
def test_a_point_whose_distance_overflows_is_outside(form, limit):
    points = np.float32([[1, 0], [1.1, 0], [0.9, 0], [1, 0.1], [1e25, 1e25]])
    center = threshold_clustering(points, points[:1], num_rounds=3, form=form, **limit)
    assert np.abs(center).max() < 1.2


@pytest.mark.slow_cases("gram")
@pytest.mark.parametrize("form", ["gram", "direct"])
def test_a_point_at_the_quantile_is_inside_in_float32_too(form):
    points = np.arange(101, dtype=np.float32)[:, None]
    center = threshold_clustering(points, points[:1], num_rounds=1, quantile=0.53, form=form)
    np.testing.assert_allclose(center, [[np.arange(54).sum() / 101]], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["gram", "direct"])
def test_the_place_of_a_quantile_is_a_whole_number_in_float32_too(form):
    points = np.arange(1, 101, dtype=np.float32)[:, None]
    options = {"num_rounds": 1, "quantile": 0.53, "quantile_rule": "index_strict", "form": form}
    center = threshold_clustering(points, np.zeros((1, 1), np.float32), **options)
    np.testing.assert_allclose(center, [[np.arange(54).sum() / 100]], rtol=1e-5)  # number 53 from 0 on, which is 54


@pytest.mark.slow
@pytest.mark.parametrize("form", ["gram", "direct"])
def test_a_quantile_between_two_distances_that_overflow_is_beyond_all_others(form):
    points = np.concatenate([blobs(0)[0][:7], np.full((3, 6), 1e20, np.float32)])
    ours, below = (threshold_clustering(points, points[:1], num_rounds=1, quantile=q, form=form) for q in (0.85, 6 / 9))
    assert np.abs(below).max() > 0.1
    np.testing.assert_allclose(ours, below, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["gram", "direct"])
def test_what_does_not_count_has_no_centre(form):
    points, _ = blobs(0)
    mask = np.arange(24) != 5
    options = {"num_rounds": 3, "radius": 6.0, "form": form}
    ours = threshold_clustering(points, mask=jnp.asarray(mask), **options)
    np.testing.assert_allclose(ours[mask], threshold_clustering(points[mask], **options), atol=2e-5)
    assert not ours[5].any()
