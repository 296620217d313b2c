"""Bipartitions against brute force, Kruskal's algorithm written out, and SciPy's linkage."""

import itertools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from scipy.cluster.hierarchy import cophenet, fcluster, linkage
from scipy.sparse.csgraph import connected_components, minimum_spanning_tree
from scipy.spatial.distance import squareform

from jfcl.kernels import (
    Bipartition,
    bipartition_of_updates,
    cut,
    linkage_tree,
    optimal_bipartition,
    pairwise_cosine,
    separation_gap,
)
from jfcl.kernels.bipartition import bipartitions_of_clusters
from jfcl.kernels.spanning_tree import float_of_key, weakest_joins

SIZES = st.sampled_from([2, 3, 9])
SEEDS = st.integers(0, 2**31)


def similarities(count, seed, levels=None):
    """A random symmetric float32 matrix in [-1, 1]; few `levels` make ties."""
    rng = np.random.default_rng(seed)
    upper = rng.uniform(-1, 1, (count, count)) if levels is None else rng.integers(-levels, levels + 1, (count, count))
    upper = np.triu(upper / (levels or 1), 1).astype(np.float32)
    return upper + upper.T + np.eye(count, dtype=np.float32)


def of_min_size(similarity, min_size, active=None):
    """The bipartition of one cluster with so many clients on both sides."""
    active = jnp.ones(len(similarity), bool) if active is None else jnp.asarray(active)
    side, cross = bipartitions_of_clusters(jnp.asarray(similarity), active, None, 1, min_size)
    return Bipartition(side, cross[0])


def cross_of(similarity, side, active):
    a, b = np.flatnonzero(side & active), np.flatnonzero(~side & active)
    return similarity[np.ix_(a, b)].max() if len(a) and len(b) else np.inf


def brute_force(similarity, active):
    """All optimal bipartitions: the smallest largest similarity across, and each side without the first client."""
    members = np.flatnonzero(active)
    best, sides = np.inf, []
    for choice in itertools.product([False, True], repeat=max(len(members) - 1, 0)):
        side = np.zeros(len(active), bool)
        side[members[1:]] = choice
        cross = cross_of(similarity, side, active) if any(choice) else np.inf
        if cross < best:
            best, sides = cross, []
        if cross == best and any(choice):
            sides.append(side)
    return best, sides


def algorithm_1(similarity):
    """The paper's algorithm to the letter: merge the most similar pair's clusters until two are left."""
    count = len(similarity)
    clusters = [{i} for i in range(count)]
    order = np.argsort(-similarity, axis=None, kind="stable")
    for i, j in zip(*np.unravel_index(order, similarity.shape), strict=True):
        if len(clusters) == 2:
            return clusters
        a, b = (next(c for c in clusters if x in c) for x in (i, j))
        if a is not b:
            clusters = [c for c in clusters if c is not a and c is not b] + [a | b]
    return clusters


@given(SIZES, SEEDS, st.sampled_from([None, 1, 3]), st.booleans())
def test_no_bipartition_is_better(count, seed, levels, some_inactive):
    similarity = similarities(count, seed, levels)
    active = np.random.default_rng(seed + 1).random(count) < (0.7 if some_inactive else 2)
    side, cross = optimal_bipartition(similarity, jnp.asarray(active))
    side = np.asarray(side)
    best, sides = brute_force(similarity, active)
    assert cross == np.float32(best)
    assert not (side & ~active).any()
    if active.sum() >= 2:
        assert cross_of(similarity, side, active) == best
        assert not side[np.flatnonzero(active)[0]]
        # The tie rule: of all optimal bipartitions the one with the fewest clients on the first client's side.
        assert side.sum() == max(s.sum() for s in sides)
    else:
        assert not side.any() and cross == np.inf


@given(st.sampled_from([3, 9]), SEEDS)
def test_algorithm_1_of_the_paper(count, seed):
    similarity = similarities(count, seed)
    side, _ = optimal_bipartition(similarity)
    assert {frozenset(np.flatnonzero(side)), frozenset(np.flatnonzero(~np.asarray(side)))} == {
        frozenset(c) for c in algorithm_1(np.where(np.eye(count), -2, similarity))
    }


def scipy_tree(similarity, method):
    distance = 1.0 - np.asarray(similarity, np.float64)
    np.fill_diagonal(distance, 0)
    return linkage(squareform(distance, checks=False), method)


@pytest.mark.slow
@given(st.sampled_from([2, 60]), SEEDS)
def test_the_dendrogram_is_scipys(count, seed):
    similarity = similarities(count, seed)
    ours, theirs = np.asarray(linkage_tree(1 - similarity, "single"), np.float64), scipy_tree(similarity, "single")
    np.testing.assert_allclose(ours[:, 2], theirs[:, 2], atol=2e-7)
    np.testing.assert_array_equal(ours[:, 3], theirs[:, 3])
    np.testing.assert_allclose(cophenet(ours), cophenet(theirs), atol=2e-7)
    for k in {1, 2, count // 2 + 1, count}:
        ours_k = np.asarray(cut(jnp.asarray(ours, jnp.float32), num_clusters=k))
        theirs_k = fcluster(theirs, k, "maxclust")
        assert len(set(zip(ours_k, theirs_k, strict=True))) == len(set(ours_k)) == len(set(theirs_k)) == k
        firsts = [int(np.flatnonzero(ours_k == c)[0]) for c in range(k)]
        assert firsts == sorted(firsts)  # numbered by first client
    height = theirs[count // 2 - 1, 2] + 1e-4
    ours_t = np.asarray(cut(linkage_tree(1 - similarity, "single"), threshold=height))
    theirs_t = fcluster(theirs, height, "distance")
    assert len(set(zip(ours_t, theirs_t, strict=True))) == len(set(ours_t)) == len(set(theirs_t))


@given(SEEDS, st.booleans())
def test_complete_linkage_variant_is_the_last_merge_of_the_active(seed, some_inactive):
    similarity = similarities(9, seed)
    active = np.random.default_rng(seed).permutation([True] * 6 + [not some_inactive] * 3)
    side, cross = optimal_bipartition(similarity, jnp.asarray(active), linkage="complete")
    side = np.asarray(side)
    theirs = fcluster(scipy_tree(similarity[np.ix_(active, active)], "complete"), 2, "maxclust")
    assert len(set(zip(side[active], theirs, strict=True))) == 2
    assert cross == cross_of(similarity, side, active)
    assert not side[np.flatnonzero(active)[0]] and not side[~active].any()


@given(SEEDS, st.booleans())
def test_permuting_clients_permutes_the_sides(seed, tied):
    similarity = similarities(9, seed, levels=1 if tied else None)
    order = np.random.default_rng(seed).permutation(9)
    one, other = optimal_bipartition(similarity), optimal_bipartition(similarity[np.ix_(order, order)])
    assert one.cross_similarity == other.cross_similarity
    if not tied:
        moved = np.asarray(one.side)[order]
        assert (moved == other.side).all() or (moved == ~np.asarray(other.side)).all()


@pytest.mark.slow
@given(st.integers(1, 9), st.integers(1, 4), SEEDS, st.sampled_from([3, 50]), st.sampled_from(["prim", "boruvka", 2]))
def test_bipartitions_of_all_clusters_are_those_of_each(count, num_clusters, seed, levels, form):
    rng = np.random.default_rng(seed)
    a = rng.integers(-levels, levels + 1, (count, count)) / levels  # few levels: ties everywhere
    a = ((a + a.T) / 2).astype(np.float32)
    cluster, active = rng.integers(0, num_clusters, count).astype(np.int32), rng.random(count) < 0.8
    if form == "boruvka":  # the form of accelerators
        side, key = weakest_joins(jnp.asarray(a), jnp.asarray(active), jnp.asarray(cluster), num_clusters)
        cross = float_of_key(key)
    else:
        side, cross = bipartitions_of_clusters(a, active, cluster, num_clusters, 2 if form == 2 else 1)
    assert not np.asarray(side)[~active].any()
    for k in range(num_clusters):
        rows = np.flatnonzero(active & (cluster == k))
        if len(rows) < 2:
            assert form == "boruvka" or (cross[k] == np.inf and not np.asarray(side)[rows].any())
        elif form == 2 and len(rows) < 4:
            assert cross[k] == np.inf
        else:
            alone = of_min_size(a[np.ix_(rows, rows)], 2 if form == 2 else 1)
            assert cross[k] == alone.cross_similarity
            np.testing.assert_array_equal(np.asarray(side)[rows], alone.side)


@pytest.mark.slow
def test_boruvka_of_many_is_prim():
    rng = np.random.default_rng(0)
    a = np.asarray(pairwise_cosine(rng.standard_normal((300, 12)).astype(np.float32)))
    for rounded in (a, np.round(a, 1)):
        prim = optimal_bipartition(rounded)
        side, key = jax.jit(weakest_joins, static_argnums=3)(
            jnp.asarray(rounded), jnp.ones(300, bool), jnp.zeros(300, jnp.int32), 1
        )
        assert float_of_key(key)[0] == prim.cross_similarity
        np.testing.assert_array_equal(side, prim.side)


def test_two_identical_clients_are_still_two_sides():
    side, cross = optimal_bipartition(np.ones((2, 2), np.float32))  # Algorithm 1 as printed fails here
    assert side.tolist() == [False, True] and cross == 1


def test_zero_and_minus_zero_are_one_similarity():
    a = np.float32([[1.0, 0.0, -0.0], [0.0, 1.0, 0.5], [-0.0, 0.5, 1.0]])
    assert optimal_bipartition(a).side.tolist() == [False, True, True]


@given(SEEDS)
def test_inside_jit_broken_clients_are_split_off_first(seed):
    similarity = similarities(9, seed) * 0.5
    similarity[4, :] = similarity[:, 4] = np.nan
    for kind in ("single", "complete"):
        side, cross = jax.jit(optimal_bipartition, static_argnames="linkage")(similarity, linkage=kind)
        assert cross == -1 and side.tolist() == [False] * 4 + [True] + [False] * 4


@pytest.mark.slow
def test_many_bipartitions_at_once():
    batch = jnp.stack([similarities(7, seed) for seed in range(5)])
    active = jnp.asarray(np.random.default_rng(0).random((5, 7)) < 0.8)
    for kind in ("single", "complete"):
        many = jax.vmap(lambda s, a, kind=kind: optimal_bipartition(s, a, linkage=kind))(batch, active)
        for i in range(5):
            one = optimal_bipartition(batch[i], active[i], linkage=kind)
            np.testing.assert_array_equal(many.side[i], one.side)
            assert many.cross_similarity[i] == one.cross_similarity


# From the updates.


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 40, 150])
@given(SEEDS, st.sampled_from([7, 64]), st.sampled_from(["random", "clusters", "signs", "active"]))
def test_from_updates_it_is_the_same(count, seed, block_size, kind):
    rng = np.random.default_rng(seed)
    updates = rng.standard_normal((count, 16)).astype(np.float32)
    active = None
    if kind == "clusters":
        updates = 0.3 * updates + rng.standard_normal((4, 16)).astype(np.float32)[rng.integers(0, 4, count)]
    elif kind == "signs":
        updates = np.sign(updates)  # cosines are sixteenths, exactly: ties everywhere
    elif kind == "active":
        active = jnp.asarray(rng.random(count) < 0.6)
    dense = optimal_bipartition(pairwise_cosine(updates), active)
    tiled = bipartition_of_updates(updates, active, block_size=block_size)
    np.testing.assert_allclose(tiled.cross_similarity, dense.cross_similarity, atol=1e-6)
    np.testing.assert_array_equal(tiled.side, dense.side)


def test_from_updates_of_sixteen_bits_it_is_that_of_what_they_hold():
    rng = np.random.default_rng(0)
    common = rng.standard_normal(512)
    groups = np.stack([common, common + 0.1 * rng.standard_normal(512)])[np.arange(40) % 2]  # cosines beyond 0.99
    updates = (groups + 0.03 * rng.standard_normal((40, 512))).astype(jnp.bfloat16)
    held = updates.astype(np.float64)
    held /= np.linalg.norm(held, axis=1, keepdims=True)
    ours = bipartition_of_updates(updates)
    np.testing.assert_array_equal(ours.side, np.arange(40) % 2 == 1)
    np.testing.assert_allclose(ours.cross_similarity, (held[::2] @ held[1::2].T).max(), atol=5e-4)


@pytest.mark.parametrize("scale", [1e-37, 3e37])
def test_from_updates_of_any_length_it_is_the_same(scale):
    rng, group = np.random.default_rng(0), np.array([0, 0, 1, 1, 0, 1])
    centers = rng.standard_normal((2, 1000))
    updates = centers[group] + 0.6 * centers.sum(axis=0) + 0.7 * rng.standard_normal((6, 1000))
    updates = np.float32(updates * np.where(np.arange(6) == 2, 1, scale)[:, None])
    side, cross = bipartition_of_updates(updates)
    assert side.tolist() == (group == 1).tolist()
    np.testing.assert_allclose(cross, optimal_bipartition(pairwise_cosine(updates)).cross_similarity, atol=1e-6)


def test_from_a_pytree_with_broken_and_zero_rows_inside_jit():
    rng = np.random.default_rng(0)
    updates = {"w": rng.standard_normal((20, 3, 2)).astype(np.float32), "b": rng.standard_normal((20, 4)).astype("f")}
    updates["b"][6] = np.inf
    for leaf in updates.values():
        leaf[11] = 0
    tiled = jax.jit(lambda u: bipartition_of_updates(u, block_size=8))(updates)
    assert tiled.cross_similarity == -1 and np.flatnonzero(tiled.side).tolist() == [6]


@pytest.mark.slow
def test_on_sharded_rows():
    updates = np.random.default_rng(0).standard_normal((40, 16)).astype(np.float32)
    mesh = jax.make_mesh((2,), ("clients",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.device_put(updates, jax.NamedSharding(mesh, jax.P("clients")))
    one, two = (bipartition_of_updates(u, block_size=8) for u in (jnp.asarray(updates), sharded))
    np.testing.assert_array_equal(one.side, two.side)
    np.testing.assert_allclose(one.cross_similarity, two.cross_similarity, atol=1e-6)


@pytest.mark.slow
def test_memory_grows_with_n_only():
    shape = jax.ShapeDtypeStruct((20_000, 64), jnp.float32)
    compiled = jax.jit(bipartition_of_updates).lower(shape).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 60e6  # the similarities would take 1,600 MB


# Sides of at least `min_size` clients.


def weakest_edge(similarity, active, min_size):
    """Every edge of SciPy's spanning tree removed in turn: the side without the first active client, the similarity."""
    members = np.flatnonzero(active)
    count = len(members)
    weight = np.triu(3 - np.asarray(similarity, np.float64)[np.ix_(members, members)], 1)
    order = np.zeros((count, count))  # of equal similarities the first pair is the largest
    order[np.triu_indices(count, 1)] = np.linspace(0, 1e-8, count * (count - 1) // 2)
    tree = minimum_spanning_tree(weight + order).toarray()
    for i, j in sorted(np.argwhere(tree), key=lambda edge: -tree[tuple(edge)]):
        rest = tree.copy()
        rest[i, j] = 0
        _, part = connected_components(rest, directed=False)
        if min((part == part[0]).sum(), (part != part[0]).sum()) >= min_size:
            side = np.zeros(len(active), bool)
            side[members[part != part[0]]] = True
            return side, similarity[members[i], members[j]]
    return np.zeros(len(active), bool), np.inf


@pytest.mark.slow
@pytest.mark.parametrize("count", [4, 9])
@given(SEEDS, st.sampled_from([None, 1, 3]), st.booleans())
def test_min_size_removes_the_weakest_edge_with_enough_on_both_sides(count, seed, levels, some_inactive):
    similarity = similarities(count, seed, levels)
    active = np.random.default_rng(seed + 1).random(count) < (0.8 if some_inactive else 2)
    for min_size in range(1 if levels is None else 2, count // 2 + 1):
        side, cross = weakest_edge(similarity, active, min_size)
        ours = of_min_size(similarity, min_size, active)
        np.testing.assert_array_equal(ours.side, side)
        assert ours.cross_similarity == cross


@given(SEEDS)
def test_permuting_clients_permutes_sides_of_min_size(seed):
    similarity = similarities(9, seed)
    active = np.random.default_rng(seed + 1).random(9) < 0.9
    order = np.random.default_rng(seed).permutation(9)
    one = of_min_size(similarity, 3, active)
    other = of_min_size(similarity[np.ix_(order, order)], 3, active[order])
    assert one.cross_similarity == other.cross_similarity
    moved = np.asarray(one.side)[order]
    flipped = ~moved & active[order] & moved.any()
    assert (moved == other.side).all() or (flipped == other.side).all()


def test_min_size_finds_the_groups_behind_outliers():
    rng = np.random.default_rng(0)
    axis, group = np.eye(16), np.repeat([1, 2], 10)
    groups = axis[0] + axis[group] + 0.05 * rng.standard_normal((20, 16))  # cosines of about 1/2 across
    outliers = axis[3:7] + 0.1 * axis[0]  # less like each other than like both groups
    rows = np.concatenate([groups, outliers]).astype(np.float32)
    plain = optimal_bipartition(pairwise_cosine(rows))
    assert plain.side.sum() == 1 and plain.side[20:].any()
    side, cross = of_min_size(pairwise_cosine(rows), 5)
    np.testing.assert_array_equal(np.asarray(side)[:20], group == 2)
    assert 0.4 < cross < 0.6 and plain.cross_similarity < 0.2


def test_where_no_edge_leaves_enough_there_is_no_bipartition():
    star = np.full((9, 9), 0.1, np.float32)
    star[0], star[:, 0] = 0.5, 0.5
    for count in (9, 5, 0):
        side, cross = of_min_size(star, 3, np.arange(9) < count)
        assert cross == np.inf and not np.asarray(side).any()


def test_min_size_inside_jit_and_of_many_at_once():
    batch = np.stack([similarities(7, seed) for seed in range(5)])
    batch[4, 2, :] = batch[4, :, 2] = np.nan  # counts as -1
    active = np.random.default_rng(0).random((5, 7)) < 0.9
    many = jax.vmap(lambda s, a: of_min_size(s, 2, a))(jnp.asarray(batch), jnp.asarray(active))
    for i in range(5):
        side, cross = weakest_edge(np.where(np.isnan(batch[i]), np.float32(-1), batch[i]), active[i], 2)
        np.testing.assert_array_equal(many.side[i], side)
        assert many.cross_similarity[i] == cross


# The separation gap.


@given(SEEDS, st.integers(1, 4))
def test_positive_gap_means_a_correct_split(seed, num_clusters):
    rng = np.random.default_rng(seed)
    clusters = rng.integers(0, num_clusters, 9)
    updates = rng.standard_normal((4, 6))[clusters] + 0.4 * rng.standard_normal((9, 6))
    similarity = pairwise_cosine(updates.astype(np.float32))
    gap = separation_gap(similarity, jnp.asarray(clusters))
    side, cross = optimal_bipartition(similarity)
    s = np.asarray(similarity)
    pairs = [s[i, j] for i in range(9) for j in range(i) if clusters[i] == clusters[j]]
    np.testing.assert_allclose(gap, min(pairs, default=1.0) - cross, atol=1e-6)
    assert separation_gap(similarity, jnp.arange(9)) == 1 - cross  # no pair
    if gap > 0:
        assert all(len(set(np.asarray(side)[clusters == c])) == 1 for c in set(clusters))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: optimal_bipartition(np.ones((2, 3))), r"similarity must be of shape \[N, N\] .*got \(2, 3\)"),
        (lambda: optimal_bipartition(np.ones(3)), "similarity must be of shape"),
        (lambda: optimal_bipartition(np.zeros((0, 0))), "N >= 1"),
        (lambda: optimal_bipartition(np.array([[1.0, 0.5], [0.2, 1.0]])), "symmetric"),
        (lambda: optimal_bipartition(np.array([[1.0, np.nan], [np.nan, 1.0]])), "finite, got 'NaN or infinity in 2"),
        (lambda: optimal_bipartition(np.eye(3), np.ones(2, bool)), r"active must be bool of shape \(3,\)"),
        (lambda: optimal_bipartition(np.eye(3), linkage="average"), "linkage must be one of"),
        (lambda: cut(np.ones((2, 3)), num_clusters=1), r"tree must be of shape \[N-1, 4\]"),
        (lambda: cut(np.ones((2, 4)), num_clusters=4), r"num_clusters must be .* whole .* 1 to 3 \(N\), got 4"),
        (lambda: cut(np.ones((2, 4)), num_clusters=2.5), "num_clusters must be a whole number .*got 2.5"),
        (lambda: cut(np.ones((2, 4))), "Give num_clusters, threshold, or both"),
        (lambda: separation_gap(np.eye(3), np.zeros(2, np.int32)), r"clusters must be integers of shape \(3,\)"),
        (lambda: bipartition_of_updates(np.ones(3)), r"updates must be of shape \[N, D\]"),
        (lambda: bipartition_of_updates(np.ones((3, 2)), block_size=0), "block_size must be an integer, at least 1"),
        (lambda: bipartition_of_updates(np.full((3, 2), np.inf)), "NaN or infinity in 3 row"),
    ],
)
def test_bad_input_is_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()
