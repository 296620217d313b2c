"""Centered clipping and the robust aggregators against loops over their papers' equations in float64."""

import os
import subprocess
import sys
from functools import partial
from itertools import combinations

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.optimize import minimize

from jfcl import kernels
from jfcl.kernels import AGGREGATORS, PRE_AGGREGATORS, centered_clip
from jfcl.kernels.robust import sort_columns
from jfcl.kernels.robust_vectors import products_are_cheaper
from jfcl.robust import aggregate
from jfcl.testing import count_compilations

SEEDS = st.integers(0, 2**31)
N, D, F = 11, 5, 2
OPTIONS = {
    "centered_clip": {"radius": 1.5, "num_iters": 3},
    "trimmed_mean": {"num_malicious": F},
    "mean_around_median": {"num_malicious": F},
    "krum": {"num_malicious": F},
    "multi_krum": {"num_malicious": F},
    "bulyan": {"num_malicious": F},
    "caf": {"num_malicious": F},
    "smea": {"num_malicious": F},
    "monna": {"num_malicious": F},
    "dnc": {"num_malicious": F},
}
PRE_OPTIONS = {
    "clip_norms": {"radius": 1.0},
    "adaptive_clip": {"num_malicious": F},
    "nearest_neighbour_mixing": {"num_malicious": F},
    "bucketing": {"bucket_size": 3, "key": jax.random.key(0)},
}
SIZES = {"sign_guard": 60}  # other than D: of five numbers, shares of signs are often equal
FILTERS = ("caf", "smea", "monna", "dnc", "clipped_clustering", "sign_guard")
EVERY = pytest.mark.parametrize("name", AGGREGATORS)


def updates(seed, count=N, dim=D):
    return np.random.default_rng(seed).standard_normal((count, dim)).astype(np.float32)


def call(name, z, of=None):
    """The aggregator of `z`, and of three clients that do not count; so one program of each serves most tests."""
    more = np.insert(z, [2, 5, 5], np.float32(7), axis=0)
    more[2], more[6, 1], more[7] = np.nan, np.inf, 1e30
    mask = np.arange(len(more)) != 7  # the client with 1e30 is masked; NaN and infinity are found
    of = of or partial(AGGREGATORS[name], **OPTIONS.get(name, {}))
    return of(more, mask=jnp.asarray(mask))


# The papers' definitions, one loop each.


def clipping(z, radius, num_iters, center=None):
    z = z.astype(np.float64)
    v = np.zeros(z.shape[1]) if center is None else center.astype(np.float64)
    for _ in range(num_iters):
        v = v + sum((z_i - v) * min(1, radius / max(np.linalg.norm(z_i - v), 1e-300)) for z_i in z) / len(z)
    return v


def trimmed(z, f):
    return np.sort(z, axis=0)[f : len(z) - f].mean(0)


def around_median(z, keep):
    out = []
    for column in z.T:
        order = np.argsort(abs(column - np.median(column)), kind="stable")
        out.append(column[order[:keep]].mean())
    return np.array(out)


def krum_scores(z, f):
    squares = ((z[:, None] - z[None]) ** 2).sum(-1)
    return np.array([np.sort(np.delete(squares[i], i))[: max(len(z) - f - 2, 1)].sum() for i in range(len(z))])


def krum(z, f):
    return z[krum_scores(z, f).argmin()]


def multi_krum(z, f):
    return z[np.argsort(krum_scores(z, f))[: len(z) - f]].mean(0)


def bulyan(z, f):
    left, chosen = list(range(len(z))), []
    for _ in range(len(z) - 2 * f):
        best = left[int(krum_scores(z[left], f).argmin())]
        left.remove(best)
        chosen.append(best)
    return around_median(z[sorted(chosen)], len(z) - 4 * f)


def geometric(z):
    cost = lambda v: np.linalg.norm(z - v, axis=1).sum()  # noqa: E731
    return minimize(
        cost, np.median(z, axis=0), method="Nelder-Mead", options={"xatol": 1e-7, "fatol": 1e-10, "maxiter": 10**4}
    ).x


def leading(z, weights):
    """The largest eigenvalue of the weighted covariance, and the squared projections on its eigenvector."""
    away = z - np.average(z, axis=0, weights=weights)
    values, vectors = np.linalg.eigh(np.cov(z.T, ddof=0, aweights=weights))
    return values[-1], (away @ vectors[:, -1]) ** 2


def caf(z, f):
    weights, means = np.ones(len(z)), []
    while weights.sum() > len(z) - 2 * f:
        value, along = leading(z, weights)
        means.append((value, np.average(z, axis=0, weights=weights)))
        along[weights == 0] = 0
        weights = weights * (1 - along / along.max())
    return min(means, key=lambda pair: pair[0])[1]


def smea(z, f):
    subsets = [z[list(c)] for c in combinations(range(len(z)), len(z) - f)]
    return min(subsets, key=lambda some: leading(some, np.ones(len(some)))[0]).mean(0)


def monna(z, f, trusted=0):
    return z[np.argsort(np.linalg.norm(z - z[trusted], axis=1), kind="stable")[: len(z) - f]].mean(0)


def dnc(z, f, draws=(slice(None),)):
    times = np.zeros(len(z))  # left out
    for places in draws:
        away = z[:, places] - z[:, places].mean(0)
        along = (away @ np.linalg.svd(away)[2][0]) ** 2
        times[np.argsort(along)[len(z) - f :]] += 1
    return z[times == times.min()].mean(0), times.min()


def clipped_mean(z, chosen):
    norms = np.linalg.norm(z, axis=1)
    return (z * np.minimum(1, np.median(norms) / norms)[:, None])[chosen].mean(0)


def clipped_clustering(z):
    group = fcluster(linkage(z, "average", metric="cosine"), 2, "maxclust")
    return clipped_mean(z, group == np.bincount(group).argmax())


def sign_guard(z):
    """By the best of all ways to divide the updates into two groups; also the second best sum of squares."""
    shares = np.stack([(z > 0).mean(1), (z < 0).mean(1), (z == 0).mean(1)], axis=1)
    ways = (np.arange(2 ** (len(z) - 1))[:, None] >> np.arange(len(z))) & 1
    cost = lambda g: sum(((x - x.mean(0)) ** 2).sum() for x in (shares[g == 0], shares[g == 1]) if len(x))  # noqa: E731
    costs = np.array([cost(g) for g in ways])
    group = ways[costs.argmin()]
    norms = np.linalg.norm(z, axis=1)
    usual = (norms >= 0.1 * np.median(norms)) & (norms <= 3 * np.median(norms))
    return clipped_mean(z, (group == np.bincount(group).argmax()) & usual), np.diff(np.sort(costs)[:2])[0]


ORACLES = {
    "mean": lambda z: z.mean(0),
    "centered_clip": lambda z: clipping(z, 1.5, 3),
    "coordinate_median": lambda z: np.median(z, axis=0),
    "trimmed_mean": lambda z: trimmed(z, F),
    "mean_around_median": lambda z: around_median(z, len(z) - F),
    "krum": lambda z: krum(z, F),
    "multi_krum": lambda z: multi_krum(z, F),
    "bulyan": lambda z: bulyan(z, F),
    "geometric_median": geometric,
    "caf": lambda z: caf(z, F),
    "smea": lambda z: smea(z, F),
    "monna": lambda z: monna(z, F),
    "dnc": lambda z: dnc(z, F)[0],
    "clipped_clustering": clipped_clustering,
}
AROUND_ZERO = ("centered_clip", "clipped_clustering")  # their results do not move with the updates


@pytest.mark.parametrize("name", ORACLES)
@settings(max_examples=5)
@given(SEEDS, st.sampled_from([0.0, 100.0]))
def test_definition(name, seed, offset):
    z = updates(seed) + np.float32(0 if name in AROUND_ZERO else offset)
    tolerance = 1e-4 + 2e-6 * offset if name == "geometric_median" else 2e-5 * (1 + offset)
    np.testing.assert_allclose(call(name, z), ORACLES[name](z.astype(np.float64)), atol=tolerance)


def test_caf_leaves_nothing_to_the_farthest_update():
    for seed in range(20):
        z = updates(seed)
        z[[3, 8]] += 50
        np.testing.assert_allclose(call("caf", z), caf(z.astype(np.float64), F), atol=1e-3)


@pytest.mark.slow_cases(*sorted(set(AGGREGATORS) - {"trimmed_mean"}))
@EVERY
def test_inside_jit_it_is_the_same(name):
    z, options = updates(0), OPTIONS.get(name, {})
    inside_jit = jax.jit(partial(AGGREGATORS[name], **options))
    np.testing.assert_allclose(call(name, z, inside_jit), call(name, z), atol=2e-5)
    np.testing.assert_allclose(AGGREGATORS[name](z, **options), call(name, z), atol=2e-5)  # and without a mask


IN_ONE_PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jfcl import kernels
rng = np.random.default_rng(3)
x, y, w = (rng.normal(size=shape).astype(np.float32) for shape in [(3, 20, 64), (3, 20, 10), (64, 10)])

@jax.jit
def updates_and_mean(x, y):
    slope = jnp.einsum("nmd,nmh->ndh", x, jax.nn.softmax(x @ w) - y) / 20
    updates = (-0.01 * slope / jnp.sqrt(0.1 + slope * slope) + w - w).reshape(3, -1)
    return updates, kernels.mean_around_median(updates, num_malicious=0)

updates, mean = updates_and_mean(x, y)
np.testing.assert_allclose(mean, np.asarray(updates, np.float64).mean(axis=0), atol=1e-6)
"""


@pytest.mark.slow  # a process, since XLA reads its flags once
def test_no_number_is_lost_where_a_distance_is_computed_twice():
    environment = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0", "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run([sys.executable, "-c", IN_ONE_PROGRAM], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow_cases("bulyan", "geometric_median", "mean_around_median", "multi_krum", *FILTERS)
@EVERY
def test_pytree_is_its_concatenation(name):
    z = updates(1)
    tree = {"a": z[:, :3].reshape(N, 1, 3), "b": z[:, 3], "c": z[:, 4:]}
    result = AGGREGATORS[name](tree, **OPTIONS.get(name, {}))
    assert result["a"].shape == (1, 3) and result["b"].shape == ()
    flat = np.concatenate([np.ravel(result[k]) for k in "abc"])
    np.testing.assert_allclose(flat, call(name, z), atol=1e-5)


# Not for Bulyan: its last choices are between mutual nearest neighbours, whose scores are equal; nor for SignGuard:
# shares of five signs are often equal. MoNNA trusts the first.
@pytest.mark.parametrize("name", sorted(set(AGGREGATORS) - {"bulyan", "monna", "sign_guard"}))
@given(SEEDS)
def test_order_does_not_matter(name, seed):
    z = updates(seed)
    order = np.random.default_rng(seed).permutation(N)
    np.testing.assert_allclose(call(name, z[order]), call(name, z), atol=1e-4)


# Not for DnC: of two liars with different lies, one may be in the middle of the direction of most variance.
@pytest.mark.slow_cases("sign_guard")
@pytest.mark.parametrize("name", [name for name in AGGREGATORS if name != "dnc"])
@given(SEEDS, st.sampled_from([10.0, 1e6]))
def test_two_liars_of_eleven_are_bounded(name, seed, size):
    z = updates(seed)
    z[[3, 8]] = size * updates(seed + 1)[:2]
    good = np.delete(z, [3, 8], axis=0)
    reach = np.linalg.norm(good - good.mean(0), axis=1).max()
    off = np.linalg.norm(np.asarray(call(name, z)) - good.mean(0))
    if name == "mean":
        assert size < 100 or off > 10 * reach
    else:
        assert off <= 2 * reach + (3 * 1.5 if name == "centered_clip" else 0)


@EVERY
def test_nobody_left_gives_zeros(name):
    assert not np.asarray(call(name, np.full((N, SIZES.get(name, D)), np.nan, np.float32))).any()


@EVERY
def test_second_call_compiles_nothing(name):
    dim = SIZES.get(name, D)
    call(name, updates(0, dim=dim))
    with count_compilations() as compiled:
        call(name, updates(1, dim=dim))
    assert compiled.count == 0


@pytest.mark.slow_cases(*sorted(set(AGGREGATORS) - {"centered_clip", "trimmed_mean"}))
@EVERY
def test_many_at_once(name):
    batch = np.stack([updates(seed) for seed in range(3)])
    many = jax.vmap(partial(AGGREGATORS[name], **OPTIONS.get(name, {})))(batch)
    for one, z in zip(many, batch, strict=True):
        np.testing.assert_allclose(one, call(name, z), atol=1e-5)


@pytest.mark.slow_cases("shape2", "shape3")
@pytest.mark.parametrize("shape", [(1, 3), (2, 3), (5, 40), (37, 2000), (600, 3)])
def test_columns_are_sorted(shape):
    x = np.random.default_rng(0).integers(-9, 9, shape).astype(np.float32)
    np.testing.assert_array_equal(sort_columns(jnp.asarray(x)), np.sort(x, axis=0))


# Centered clipping.


@pytest.mark.parametrize("num_iters", [3, 4])  # by passes over the updates, and by their inner products
@given(SEEDS, st.sampled_from([0.3, 2.0, 1e9]), st.booleans())
def test_clipping_from_a_centre(num_iters, seed, radius, momentum):
    z = updates(seed) + np.float32(10)
    center = z[0] + np.float32(0.5) if momentum else None
    ours = centered_clip(z, radius=radius, center=center, num_iters=num_iters)
    np.testing.assert_allclose(ours, clipping(z, radius, num_iters, center), atol=5e-5)


@pytest.mark.parametrize("num_iters", [1, 4])
@given(SEEDS)
def test_one_client_moves_the_result_by_bounded_steps(num_iters, seed):
    z, other = updates(seed), updates(seed)
    other[4] = 1e8 * updates(seed + 1)[4]
    run = lambda u: np.asarray(centered_clip(u, radius=0.7, num_iters=num_iters))  # noqa: E731
    assert np.linalg.norm(run(z) - run(other)) <= num_iters * 2 * 0.7 / N + 1e-5
    np.testing.assert_allclose(centered_clip(z, radius=np.inf, num_iters=num_iters), z.mean(0), atol=1e-5)


@pytest.mark.slow
def test_clipping_many_rows_goes_block_by_block():
    z = updates(0, count=300, dim=20_000)  # six blocks
    np.testing.assert_allclose(centered_clip(z, radius=100.0, num_iters=2), clipping(z, 100.0, 2), atol=1e-5)


def test_clipping_takes_the_cheaper_form():
    assert products_are_cheaper(N, 4) and not products_are_cheaper(N, 3) and not products_are_cheaper(1000, 28)


def test_clipping_adds_up_sixteen_bits_in_more(monkeypatch):
    monkeypatch.setattr("jfcl.kernels.blocks.BLOCK_NUMBERS", 18)  # a row of 17 numbers at a time
    center = centered_clip(jnp.ones((1000, 17), jnp.bfloat16), radius=jnp.inf)
    assert center.dtype == jnp.bfloat16
    np.testing.assert_array_equal(center, np.ones(17))


# Filters.


@settings(max_examples=4)
@given(SEEDS)
def test_sign_guard(seed):
    z = updates(seed, dim=60)
    z[:, :3] *= np.random.default_rng(seed).integers(0, 2, (N, 3)).astype(np.float32)  # some zeros
    z[[1, 5, 9], :30] = 0  # by shares of positive and of negative numbers alone, update 6 would be the other group
    z[[2, 4]] *= np.float32([[9.0], [0.05]])
    z[6] = abs(z[6])
    wanted, margin = sign_guard(z.astype(np.float64))
    assume(margin > 1e-6)
    np.testing.assert_allclose(call("sign_guard", z), wanted, atol=1e-5)


def test_dnc_draws_coordinates():
    """Where every update is left out by a draw, those count that the fewest draws leave out."""
    columns = jax.jit(jax.vmap(partial(jax.random.choice, a=12, shape=(3,), replace=False)))
    fewest = []
    for seed in range(3):
        z, key = updates(seed, count=5, dim=12), jax.random.key(seed)
        tree = {"a": z[:, :1], "b": z[:, 1:7].reshape(5, 2, 3), "c": z[:, 7:]}
        found = kernels.dnc(tree, num_malicious=F, key=key, num_draws=9, num_coordinates=3)
        wanted, times = dnc(z.astype(np.float64), F, columns(jax.random.split(key, 9)))
        np.testing.assert_allclose(np.concatenate([np.ravel(found[k]) for k in "abc"]), wanted, atol=1e-5)
        fewest.append(times)
    assert min(fewest) == 0 < max(fewest)


@pytest.mark.parametrize("name", FILTERS)
def test_filters_leave_out_those_who_send_the_same_lie(name):
    dim = SIZES.get(name, D)
    z = updates(0, dim=dim) + 2
    z[[3, 8]] = -40 * abs(updates(1, dim=dim)[0])
    good = np.delete(z, [3, 8], axis=0)
    off = np.linalg.norm(call(name, z) - good.mean(0))
    assert off < 0.4 * np.linalg.norm(good.mean(0)) < np.linalg.norm(call("mean", z) - good.mean(0))


@pytest.mark.parametrize("name", FILTERS)
def test_filters_of_equal_zero_and_overflowing_updates(name):
    dim = SIZES.get(name, D)
    for wanted in (0, 1):
        z = np.full((N, dim), wanted, np.float32)
        np.testing.assert_allclose(call(name, z), np.full(dim, wanted), atol=1e-6)
    z = updates(0, dim=dim)
    for lies in ([[1e12], [-2e12]], [[1e25], [-3e38]]):  # of float32, their fourth powers or squares are no numbers
        z[[3, 8]] = np.float32(lies)
        assert np.linalg.norm(call(name, z)) < 3 * np.sqrt(dim / D)


def test_smea_of_few_leaves_out_less_than_half_of_them():
    z = updates(0)
    z[3:] = np.nan
    np.testing.assert_allclose(call("smea", z), smea(z[:3].astype(np.float64), 1), atol=1e-5)


def test_of_equal_groups_that_of_the_first_client_counts():
    z = np.abs(updates(0, dim=60))
    z[10] = np.nan
    for negative in (np.arange(N) > 4, np.arange(N) < 5, np.arange(N) % 2 == 0, np.arange(N) % 2 == 1):
        found = call("sign_guard", np.where(negative[:, None], -z, z))
        assert (found < 0).all() if negative[0] else (found > 0).all()


def test_monna_trusts_another_where_the_trusted_does_not_count():
    z = updates(0)
    mask = np.arange(N) != 4
    found = kernels.monna(z, num_malicious=F, trusted=4, mask=jnp.asarray(mask))
    np.testing.assert_allclose(found, monna(z[mask], F), atol=1e-6)
    np.testing.assert_allclose(kernels.monna(z, num_malicious=F, trusted=4), monna(z, F, 4), atol=1e-6)


@pytest.mark.slow
def test_clipped_clustering_clips_to_a_given_radius():
    z = np.float32([[3, 4], [3, 4], [0.3, 0.4], [-9, 0]])
    np.testing.assert_allclose(kernels.clipped_clustering(z, radius=1.0), [0.5, 2 / 3], rtol=1e-6)


# Before aggregating.


def test_clip_norms():
    z = updates(0)
    clipped, mask = kernels.clip_norms(z, radius=1.0)
    norms = np.linalg.norm(z, axis=1, keepdims=True)
    np.testing.assert_allclose(clipped, z * np.minimum(1, 1 / norms), rtol=1e-5)
    assert mask.all()


def test_clip_norms_of_sixteen_bits():
    """The factor of a long update is no number of float16."""
    clipped, _ = kernels.clip_norms(jnp.full((1, 10**6), 6e4, jnp.float16), radius=1.0)
    np.testing.assert_allclose(np.linalg.norm(np.float64(clipped)), 1.0, rtol=1e-3)


@pytest.mark.slow_cases("adaptive_clip", "bulyan")
@pytest.mark.parametrize("name", ["adaptive_clip", "mean_around_median", "bulyan"])
def test_a_whole_number_may_be_a_float(name):
    z = updates(0, count=N + 3)
    one, same = (getattr(kernels, name)(z, num_malicious=f) for f in (1.0, 1))
    jax.tree.map(np.testing.assert_array_equal, one, same)


@given(SEEDS)
def test_adaptive_clip(seed):
    z = updates(seed)
    norms = np.linalg.norm(z, axis=1)
    radius = np.sort(norms)[::-1][int(2 * F / N * (N - F))]
    clipped, _ = kernels.adaptive_clip(z, num_malicious=F)
    np.testing.assert_allclose(clipped, z * np.minimum(1, radius / norms)[:, None], rtol=1e-5)


@given(SEEDS)
def test_nearest_neighbour_mixing(seed):
    z = updates(seed)
    z[3] = z[7]  # a duplicate is as near as the update itself
    mixed, _ = kernels.nearest_neighbour_mixing(z, num_malicious=F)
    for i in range(N):
        order = np.argsort(((z - z[i]) ** 2).sum(1), kind="stable")
        np.testing.assert_allclose(mixed[i], z[order[: N - F]].mean(0), atol=1e-5)


@pytest.mark.slow
@given(SEEDS)
def test_bucketing(seed):
    z = updates(seed)
    z[4] = np.nan
    buckets, mask = kernels.bucketing(z, bucket_size=3, key=jax.random.key(seed))
    assert buckets.shape == (4, D) and mask.sum() == 4
    # Ten good updates in buckets of 3, 3, 3 and 1: their sizes give back the sum.
    np.testing.assert_allclose(3 * buckets[:3].sum(0) + buckets[3], np.delete(z, 4, 0).sum(0), atol=1e-4)
    different, _ = kernels.bucketing(z, bucket_size=3, key=jax.random.key(seed + 1))
    assert not np.allclose(buckets, different)


def test_padding_clients_change_no_bucket_of_many_clients():
    z = np.arange(1700, dtype=np.float32)[:, None]
    alone, _ = kernels.bucketing(z, bucket_size=4, key=jax.random.key(0))
    padded, mask = kernels.bucketing(
        np.pad(z, ((0, 1), (0, 0))), bucket_size=4, key=jax.random.key(0), mask=np.arange(1701) < 1700
    )
    np.testing.assert_allclose(padded[:425], alone, rtol=1e-6)
    assert mask.sum() == 425


@pytest.mark.parametrize("unit", [2.0**-100, 1.0, 2.0**100])
def test_updates_of_any_unit_are_shortened_and_never_lengthened(unit):
    z = np.float32([[3, 4], [0.3, 0.4], [0, 0]])
    short = kernels.clip_norms(z * np.float32(unit), radius=unit)[0] / np.float32(unit)
    np.testing.assert_allclose(short, [[0.6, 0.8], [0.3, 0.4], [0, 0]], rtol=1e-6)
    short = kernels.adaptive_clip(z * np.float32(unit), num_malicious=1)[0] / np.float32(unit)
    np.testing.assert_allclose(short, [[0.3, 0.4], [0.3, 0.4], [0, 0]], rtol=1e-6)


def test_buckets_take_memory_for_the_clients():
    z = jax.ShapeDtypeStruct((10_000, 1), np.float32)
    program = jax.jit(partial(kernels.bucketing, bucket_size=2, key=jax.random.key(0))).lower(z).compile()
    assert program.memory_analysis().temp_size_in_bytes < 100 * z.size  # and not for each client and bucket


@pytest.mark.parametrize("name", ["mean", "centered_clip"])
def test_many_equal_updates_are_their_mean(name):
    z = np.full((100_000, 2), 0.1, np.float32)
    options = {"radius": 1e6} if name == "centered_clip" else {}
    np.testing.assert_allclose(kernels.AGGREGATORS[name](z, **options), z[0], rtol=2e-5)


@pytest.mark.slow_cases("nearest_neighbour_mixing")
@pytest.mark.parametrize("name", PRE_AGGREGATORS)
def test_what_comes_before_masks_broken_clients_and_keeps_shapes(name):
    z = updates(0)
    z[5, 0] = np.inf
    tree = {"a": z[:, :4].reshape(N, 2, 2), "b": z[:, 4]}
    before = jax.jit(partial(PRE_AGGREGATORS[name], **PRE_OPTIONS[name]))
    changed, mask = jax.device_get(before(tree, mask=np.arange(N) != 2))
    assert mask.sum() == (3 if name == "bucketing" else N - 2)
    assert changed["a"].shape[1:] == (2, 2) and all(np.isfinite(leaf).all() for leaf in changed.values())
    result = kernels.trimmed_mean(changed, num_malicious=1, mask=mask)
    assert np.isfinite(result["a"]).all()


CHAINS = {
    "krum": [],
    "nnm+krum": ["nearest_neighbour_mixing"],
    "nearest_neighbour_mixing+trimmed_mean": ["nearest_neighbour_mixing"],
    "bucketing+geometric_median": ["bucketing"],
    "clip_norms+bucketing+mean": ["clip_norms", "bucketing"],
}


@pytest.mark.slow_cases("bucketing+*", "krum", "nearest_neighbour_mixing+*")
@pytest.mark.parametrize("name", CHAINS)
def test_an_aggregator_by_name_is_its_parts_by_hand(name):
    before, last = CHAINS[name], name.split("+")[-1]
    z = updates(0)
    z[4, 1] = np.nan
    mask = jnp.arange(N) != 2
    options = dict(OPTIONS.get(last, {}))
    by_hand, of_hand = z, mask
    for part in before:
        options |= PRE_OPTIONS[part]
        by_hand, of_hand = PRE_AGGREGATORS[part](by_hand, **PRE_OPTIONS[part], mask=of_hand)
    made = kernels.make_aggregator(name, **options)
    result = made(z, mask=mask)
    np.testing.assert_array_equal(result, AGGREGATORS[last](by_hand, **OPTIONS.get(last, {}), mask=of_hand))
    assert set(options) <= set(kernels.aggregator_options(name))


@pytest.mark.parametrize("name", ["bucketing+coordinate_median", "dnc"])
def test_an_aggregator_draws_by_the_key_of_its_call_unless_one_is_given(name):
    options = {"bucket_size": 3} if name != "dnc" else {"num_malicious": F, "num_draws": 1, "num_coordinates": 1}
    free, bound = (kernels.make_aggregator(name, **options, **more) for more in ({}, {"key": jax.random.key(1)}))
    z, keys = updates(0), [jax.random.key(seed) for seed in (1, 3)]
    first, second = (free(z, key=key) for key in keys)
    assert not np.allclose(first, second)
    np.testing.assert_array_equal(bound(z), first)
    np.testing.assert_array_equal(free(z), free(z, key=jax.random.key(0)))
    rounds = [[aggregate.of_round(made, key)(z) for key in keys] for made in (free, bound)]
    np.testing.assert_array_equal(rounds, [[first, second], [first, first]])


def exact_median(z, weights):
    """`(median, cost)` in float64: Weiszfeld's steps, or the best of the points themselves."""
    cost = lambda v: (weights * np.linalg.norm(z - v, axis=1)).sum()  # noqa: E731
    v = np.average(z, axis=0, weights=weights)
    for _ in range(3000):
        pulls = weights / np.maximum(np.linalg.norm(z - v, axis=1), 1e-12)
        v = pulls @ z / pulls.sum()
    return min([v, *z], key=cost), cost


def hard_medians():
    """`name: (points, whether they determine the median well)`, all `[11, 3]`, so that one program serves them."""
    rng = np.random.default_rng(0)
    cloud = rng.standard_normal((11, 3))
    line = np.outer(rng.standard_normal(11), [1, 0.5, 0]) + 1e-3 * rng.standard_normal((11, 3))
    opposite = np.concatenate([cloud[:5], -cloud[:5], np.zeros((1, 3))])
    triangle = np.resize([[0, 0, 0], [1, 0, 0], [0.5, np.tan(np.pi / 6) / 2, 0]], (11, 3))  # 120 degrees
    return {
        "nearly in a line": (line, True),
        "the median is one of them": (opposite, True),
        "most of them coincide": (np.where(np.arange(11)[:, None] < 6, 1.0, cloud + 10), True),
        "three far away": (np.where(np.arange(11)[:, None] < 3, 1e4 * cloud, cloud), True),
        "far from the origin": (cloud + 100, True),
        "two groups": (np.where(np.arange(11)[:, None] < 6, 0.01 * cloud, 10 + 0.01 * cloud), True),
        "an angle of 120 degrees": (triangle, False),
        "most coincide, with less weight": (np.where(np.arange(11)[:, None] < 6, 1.0, cloud + 10), False),
    }


WEIGHTS = {"an angle of 120 degrees": [1] * 3 + [0] * 8, "most coincide, with less weight": [1] * 6 + [1.3] * 5}


@pytest.mark.parametrize("case", hard_medians())
def test_the_geometric_median_is_precise(case):
    points, sharp = hard_medians()[case]
    points = points.astype(np.float32)
    assert not np.any(kernels.geometric_median(points, weights=np.zeros(11, np.float32)))  # of no weight it is zero
    weights = np.float64(WEIGHTS.get(case, [1] * 11))
    truth, cost = exact_median(points.astype(np.float64), weights)
    found = kernels.geometric_median(points, weights=weights.astype(np.float32))
    spread = np.median(np.linalg.norm(points - truth, axis=1)) + np.linalg.norm(truth) / 10
    assert cost(np.asarray(found, np.float64)) <= (1 + 1e-5) * cost(truth)
    assert np.linalg.norm(found - truth) <= (1e-4 if sharp else 1e-2) * spread


def test_small_updates_have_their_geometric_median():
    points = np.float32([[0, 0], [1, 0], [0, 1], [0.3, 0.3], [0, 900]])  # the fourth is the median
    light, weights = np.float32([[0, 0]] * 3 + [[1, 0], [3, 0]]), np.float32([0.1, 0.1, 0.1, 1, 1.5])
    for scale in (1e-8, 1e-12):
        np.testing.assert_array_equal(kernels.geometric_median(points * scale), points[3] * scale)
        found = kernels.geometric_median(light * scale, weights=weights)  # although most are at the start
        np.testing.assert_allclose(found / scale, light[4], atol=1e-3)


def test_geometric_medians_of_many_at_once():
    many = np.stack([points for points, _ in hard_medians().values()]).astype(np.float32)
    together = jax.jit(jax.vmap(kernels.geometric_median))(many)
    for points, found in zip(many, together, strict=True):
        np.testing.assert_allclose(found, kernels.geometric_median(points), rtol=1e-4, atol=1e-5)


Z = np.ones((6, 2), np.float32)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (lambda: centered_clip(np.ones(3), radius=1.0), r"updates must be of shape \[N, D\]"),
        (lambda: centered_clip(Z, radius=0.0), "radius must be a number above 0, got 0.0"),
        (lambda: centered_clip(Z, radius=float("nan")), "radius must be a number above 0"),
        (lambda: centered_clip(Z, radius=1.0, num_iters=0), "num_iters must be an integer, at least 1"),
        (lambda: centered_clip(Z, radius=1.0, center=np.ones(3)), r"center must be of shapes \[\(2,\)\]"),
        (lambda: centered_clip(Z, radius=1.0, center=np.full(2, np.nan)), "center must be finite"),
        (lambda: kernels.mean(Z, weights=-np.ones(6)), "weights must be at least 0"),
        (lambda: kernels.mean(Z, weights=np.full(6, 1e38)), "weights must be .* with a finite sum"),
        (lambda: kernels.mean(Z, weights=np.ones(2)), r"weights must be of shape \(6,\)"),
        (lambda: centered_clip(Z, radius=1.0, mask=np.ones(5, bool)), "mask must be bool of shape"),
        (lambda: kernels.trimmed_mean(Z, num_malicious=3), "num_malicious must be a whole number from 0 to 2"),
        (lambda: kernels.trimmed_mean(Z, num_malicious=-1), "num_malicious must be a whole number from 0 to 2"),
        (lambda: kernels.trimmed_mean(Z, num_malicious=1.5), "must be a whole number from 0 to 2 .*, got 1.5"),
        (
            lambda: kernels.krum(Z, num_malicious=4),
            r"num_malicious must be a whole number from 0 to 3 \(f <= N - 3\), got 4",
        ),
        (lambda: kernels.multi_krum(Z, num_malicious=1, num_selected=0), "num_selected must be .* from 1 to 6"),
        (lambda: kernels.multi_krum(Z, num_malicious=1, num_selected=2.5), "a whole number from 1 .*2.5"),
        (lambda: kernels.bulyan(Z, num_malicious=1), r"\(4 f \+ 3 <= N\)"),
        (
            lambda: kernels.smea(np.ones((40, 2)), num_malicious=5),
            "at most 50000 subsets to compare .these are 658008",
        ),
        (lambda: jax.jit(kernels.smea)(Z, num_malicious=1), "num_malicious must be a Python number"),
        (lambda: kernels.monna(Z, num_malicious=1, trusted=6), "trusted must be a whole number from 0 to 5"),
        (lambda: kernels.dnc(Z, num_malicious=1, num_draws=0), "num_draws must be"),
        (lambda: kernels.clipped_clustering(Z, radius=0.0), "radius must be a number above 0"),
        (lambda: kernels.clip_norms(Z, radius=-1.0), "radius must be at least 0"),
        (lambda: kernels.bucketing(Z, bucket_size=7, key=jax.random.key(0)), "bucket_size must be a whole"),
        (lambda: kernels.make_aggregator("nnm+krun"), "unknown aggregator 'krun': did you mean 'krum'"),
        (
            lambda: kernels.make_aggregator("krum+nnm"),
            r"nnm\) and at the end one aggregator \(mean, .*'krum\+nnm'",
        ),
        (lambda: kernels.make_aggregator("krum+mean"), "pre-aggregators .* at the end one aggregator .*, joined by"),
        (
            lambda: kernels.make_aggregator([lambda u, mask: (u["a"], u["b"]), "mean"])(
                {"a": np.ones((2, 1)), "b": {}}
            ),
            "must be of functions that return .updates, mask. before the last one",
        ),
        (lambda: kernels.make_aggregator("nnm"), "at the end one aggregator"),
        (lambda: kernels.make_aggregator("krum", radius=1), "must be one of num_malicious, got 'radius'"),
        (lambda: kernels.make_aggregator("krum", mask=None), "must be one of num_malicious, got 'mask'"),
        (lambda: kernels.make_aggregator("bucketing+krum", num_malicious=1), "needs bucket_size"),
    ],
)
def test_bad_input_is_named(run, words):
    with pytest.raises(ValueError, match=words):
        run()


@pytest.mark.slow_cases("10-3", "5-0", "65537-32000", "7-2")
@pytest.mark.parametrize(("count", "f"), [(10, 3), (7, 2), (726, 297), (5, 0), (65_537, 32_000), (300_000, 140_000)])
def test_adaptive_clip_counts_beyond_int32(count, f):
    """`floor(2 f (n - f) / n)` updates are clipped, to the norm of the next one; Python's integers have no bound."""
    clipped, _ = kernels.adaptive_clip(jnp.arange(count, dtype=jnp.float32)[:, None], num_malicious=f)
    assert float(clipped.max()) == pytest.approx(count - 1 - 2 * f * (count - f) // count, rel=1e-6)


@pytest.mark.slow_cases("1")
@pytest.mark.parametrize("num_iters", [1, 4])
def test_centered_clip_of_float16_updates_far_apart(num_iters):
    """Their difference is no number of float16."""
    z, center = jnp.array([[-20.0], [-20.0], [65504.0]], jnp.float16), jnp.array([-20.0], jnp.float16)
    moved = kernels.centered_clip(z, center=center, radius=1.0, num_iters=num_iters)
    assert abs(float(moved[0]) + 20) <= 0.35 * num_iters  # the radius, times the share of one client


def test_norms_beyond_float32_are_shortened():
    long = jnp.array([[3e19, 4e19], [3.0, 4.0]])
    np.testing.assert_allclose(kernels.clip_norms(long, radius=1.0)[0], [[0.6, 0.8]] * 2, rtol=1e-6)


@pytest.mark.slow
def test_masked_updates_are_farther_than_those_whose_distance_overflows():
    updates, mask = jnp.array([[0.0], [1e30], [3e30], [6e30]]), jnp.array([False, True, True, True])
    mixed, _ = kernels.nearest_neighbour_mixing(updates, num_malicious=1, mask=mask)
    wanted = [[0.0], [2e30], [2e30], [3.5e30]]  # of equal distances the first
    np.testing.assert_allclose(mixed, wanted, rtol=1e-6)
