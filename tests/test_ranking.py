"""`jfcl.analysis.ranking` against SciPy, published examples (Demšar, JMLR 2006), and loops from the equations."""

import itertools

import numpy as np
import pytest
import scipy.stats

from jfcl.analysis import ranking

RNG = np.random.default_rng(0)
# Demšar's table 6: the areas under the curve of C4.5, C4.5+m, C4.5+cf and C4.5+m+cf on 14 data sets; two
# are printed as 0.975, and ranked 2 and 3.
DEMSAR = np.array(
    [
        [0.763, 0.768, 0.771, 0.798],
        [0.599, 0.591, 0.590, 0.569],
        [0.954, 0.971, 0.968, 0.967],
        [0.628, 0.661, 0.654, 0.657],
        [0.882, 0.888, 0.886, 0.898],
        [0.936, 0.931, 0.916, 0.931],
        [0.661, 0.668, 0.609, 0.685],
        [0.583, 0.583, 0.563, 0.625],
        [0.775, 0.838, 0.866, 0.875],
        [1.000, 1.000, 1.000, 1.000],
        [0.940, 0.962, 0.965, 0.962],
        [0.619, 0.666, 0.614, 0.669],
        [0.972, 0.981, 0.9751, 0.975],
        [0.957, 0.978, 0.946, 0.970],
    ]
)


def score_loop(values):
    """The score of one method, from its definition."""
    finished = [[v for v in run if np.isfinite(v)] for run in values]
    each = [v for run in finished for v in run]
    return (sum(each) / len(each) if each else 0) - 2 * sum(not run for run in finished)


def test_scores_are_means_over_clients_with_tests_less_two_for_each_failed_run():
    values = RNG.random((5, 3, 4))
    values[1, 2] = values[2] = values[3, :, 1] = np.nan
    np.testing.assert_allclose(ranking.scores(values), [score_loop(v) for v in values], rtol=1e-12)
    # Drawn clients and seeds are as good as their copies.
    seeds, clients = np.array([2, 2, 0]), RNG.integers(4, size=(3, 4))
    counts = np.zeros((1, 3, 4))
    for seed, row in zip(seeds, clients, strict=True):
        np.add.at(counts[0, seed], row, 1)
    copies = np.stack([[v[seed][row] for seed, row in zip(seeds, clients, strict=True)] for v in values])
    expected = [score_loop(v) for v in copies]
    np.testing.assert_allclose(ranking.scores(values, counts)[0], expected, rtol=1e-12)


def test_a_failed_run_is_below_every_run_that_has_ended():
    values = np.array([[[1.0], [1.0], [np.nan]], [[0.0], [0.0], [0.0]], [[1.0], [np.nan], [np.nan]]])
    assert ranking.ranks(ranking.scores(values)).tolist() == [2, 1, 3]


def test_ranks_are_those_of_scipy_and_of_the_published_example():
    scores = np.round(RNG.random((6, 7)), 1)  # with ties
    np.testing.assert_array_equal(ranking.ranks(scores), scipy.stats.rankdata(-scores, axis=1))
    np.testing.assert_allclose(ranking.ranks(DEMSAR).mean(axis=0), [3.143, 2.0, 2.893, 1.964], atol=5e-4)
    assert ranking.ranks(np.array([0.5, 0.5000002, 0.500002])).tolist() == [2.5, 2.5, 1.0]  # equal with six decimals


def test_friedman_is_that_of_scipy_without_ties_and_that_of_the_published_example():
    scores = RNG.random((9, 5))
    mean_ranks = ranking.ranks(scores).mean(axis=0)
    np.testing.assert_allclose(ranking.friedman(mean_ranks, 9), scipy.stats.friedmanchisquare(*scores.T), rtol=1e-12)
    assert ranking.friedman(ranking.ranks(DEMSAR).mean(axis=0), 14)[0] == pytest.approx(9.28, abs=0.01)
    tied = np.round(scores, 1)  # without the correction for ties the test is the more careful one
    assert ranking.friedman(ranking.ranks(tied).mean(axis=0), 9)[1] >= scipy.stats.friedmanchisquare(*tied.T).pvalue


def test_the_critical_difference_has_the_published_constants():
    published = [1.960, 2.343, 2.569, 2.728, 2.850, 2.949, 3.031, 3.102, 3.164]  # Demšar's table 5, of 2 to 10 methods
    for count, q in enumerate(published, start=2):
        expected = q * np.sqrt(count * (count + 1) / (6 * 14))
        assert ranking.critical_difference(count, 14) == pytest.approx(expected, rel=4e-4)


def test_groups_are_the_largest_that_do_not_differ():
    for _ in range(20):
        mean_ranks, difference = np.sort(RNG.uniform(1, 8, 8)), RNG.uniform(0.2, 4)
        fits = [(i, j) for i, j in itertools.combinations(range(8), 2) if mean_ranks[j] - mean_ranks[i] < difference]
        largest = [(i, j) for i, j in fits if not any(a <= i and j <= b and (a, b) != (i, j) for a, b in fits)]
        assert ranking.groups(mean_ranks, difference) == largest
    assert ranking.groups(np.array([1.0, 2.0, 2.5]), 1.0) == [(1, 2)]


def test_signed_rank_is_exact():
    for count in (4, 7, 12):
        without_ties = RNG.normal(size=count)
        expected = scipy.stats.wilcoxon(without_ties, method="exact").pvalue
        assert ranking.signed_rank(without_ties) == pytest.approx(expected, rel=1e-12)
    tied = np.array([1.0, -1.0, 2.0, 2.0, 0.0, 3.0, 3.0, 3.0])  # every sign of each, by brute force
    kept = tied[tied != 0]
    each = scipy.stats.rankdata(abs(kept))
    sums = np.array([each[np.array(signs) > 0].sum() for signs in itertools.product([-1, 1], repeat=len(kept))])
    away = abs(sums - each.sum() / 2) >= abs(each[kept > 0].sum() - each.sum() / 2)
    assert ranking.signed_rank(tied) == pytest.approx(away.mean(), rel=1e-12)
    assert ranking.signed_rank(np.full(9, 2e-7)) == 1  # zeros, with six decimals


def test_holm_steps_down():
    p = [0.03, 0.001, 0.6, 0.02, 0.02]
    by_hand, so_far = {}, 0.0
    for place, i in enumerate(sorted(range(5), key=lambda i: p[i])):
        so_far = max(so_far, min(1, p[i] * (5 - place)))
        by_hand[i] = so_far
    assert ranking.holm(p) == pytest.approx([by_hand[i] for i in range(5)])
    assert ranking.holm([0.7, 0.4]) == [0.8, 0.8] and ranking.holm([0.7, 0.6]) == [1, 1] and ranking.holm([]) == []


def test_neighbours_are_tested_in_their_order():
    scores = RNG.random((8, 3)) - np.array([0.0, 0.2, 0.6])
    first, second = (scipy.stats.wilcoxon(scores[:, i], scores[:, i + 1], method="exact").pvalue for i in range(2))
    assert second < first  # the smaller is doubled, and the other is at least as large
    assert ranking.neighbours(scores) == pytest.approx([max(2 * second, first), 2 * second])


def test_rank_intervals_are_those_of_a_loop_that_draws_seeds_and_clients():
    settings = [RNG.normal([[[0.4]], [[0.5]], [[0.6]]], 0.2, (3, 3, 6)) for _ in range(5)]
    settings[1][2, 0] = np.nan  # a failed run of the best method
    low, high = ranking.rank_intervals(settings, draws=200)

    def mean_ranks(settings):
        return np.mean([scipy.stats.rankdata([-score_loop(v) for v in values]) for values in settings], axis=0)

    rng, drawn = np.random.default_rng(0), []
    draws = (rng.multinomial(n, np.full(n, 1 / n), size=200) for n in (3, 6))
    for seeds, clients in zip(*draws, strict=True):  # the same in every setting
        drawn.append(mean_ranks(np.repeat(np.repeat(settings, seeds, axis=2), clients, axis=3)))
    mean, around = mean_ranks(settings), np.quantile(drawn, [0.025, 0.975], axis=0) - np.mean(drawn, axis=0)
    np.testing.assert_allclose([low, high], np.clip(mean + np.sqrt(3 / 2) * around, 1, 3), rtol=1e-12)
    assert (low <= mean).all() and (mean <= high).all() and (low < high).all()


def test_a_mean_rank_is_in_its_interval_where_few_draws_differ():
    one_setting = np.repeat([[[0.9] * 6], [[0.5] * 6], [[0.1] * 5 + [0.85]]], 2, axis=1)
    low, high = ranking.rank_intervals([one_setting])
    assert low[1] <= 2 <= high[1] < 2.1


@pytest.mark.slow
@pytest.mark.parametrize("settings_alike", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_rank_intervals_hold_the_mean_rank_of_new_seeds_and_clients(seeds, settings_alike):
    rng = np.random.default_rng(0)
    levels = np.linspace(0.7, 0.76, 6) + rng.normal(0, 0.02, (8, 6))  # [settings, methods]

    def drawn(std, *shape):
        """Normal numbers, of which settings share a part: that of their images."""
        own, shared = rng.normal(0, std, (8, *shape)), rng.normal(0, std, (1, *shape))
        return np.sqrt(1 - settings_alike) * own + np.sqrt(settings_alike) * shared

    def new():
        of_clients = drawn(0.1, 1, 1, 30) + drawn(0.05, 6, 1, 30)  # the same for every seed
        of_runs = drawn(0.015, 6, seeds, 1) + drawn(0.02, 6, seeds, 30)
        return levels[:, :, None, None] + of_clients + of_runs

    truth = np.mean([scipy.stats.rankdata(-new().mean(axis=(2, 3)), axis=1).mean(axis=0) for _ in range(2000)], axis=0)
    holds = []
    for _ in range(150):
        low, high = ranking.rank_intervals([*new()], draws=300)
        holds.append((low <= truth) & (truth <= high))
    assert 0.92 <= np.mean(holds) <= 0.99


def test_the_pareto_front_is_what_nothing_dominates():
    cost, value = np.round(RNG.random((2, 30)), 1)  # with ties
    for i, is_worth in enumerate(ranking.pareto(cost, value)):
        at_least = (cost <= cost[i]) & (value >= value[i])
        assert is_worth == (not (at_least & ((cost < cost[i]) | (value > value[i]))).any())


def test_the_complete_part_lacks_nothing():
    is_there = np.ones((6, 5), bool)
    is_there[2] = False  # a setting that was not run
    is_there[:4, 3] = False  # a method that cannot run most of the others
    rows, columns = ranking.complete(is_there)
    assert rows.tolist() == [0, 1, 3, 4, 5] and columns.tolist() == [0, 1, 2, 4]
    assert [len(part) for part in ranking.complete(np.zeros((2, 2), bool))] == [0, 2]
    half, whole = [True, False], [True, True]  # rows that lack a half go before a column that lacks two thirds
    assert [part.tolist() for part in ranking.complete(np.array([half, half, whole]))] == [[2], [0, 1]]


def test_names_in_the_picture_of_costs_cover_neither_each_other_nor_a_point():
    names = [f"method_{i}" for i in range(7)]
    cost, value = 1 + np.arange(7) / 100, 70 + np.array([0, 1, 1.1, 1.2, 1.3, 1.4, 8])  # six of them side by side
    figure = ranking.plot_costs([*names, "far"], {"seconds": np.append(cost, 2.0)}, np.append(value, 50.0), {"far"})
    axes, boxes = figure.axes[0], [text.get_window_extent() for text in figure.axes[0].texts]
    assert len(boxes) == 8
    for box in boxes:
        assert box.count_overlaps(boxes) == 1  # itself
        assert box.count_contains(axes.transData.transform(np.c_[cost, value])) == 0
        assert axes.bbox.contains(*box.min) and axes.bbox.contains(*box.max)
