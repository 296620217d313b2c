"""Which method is better over many settings: ranks with intervals, their tests, the methods worth a cost; pictures.

A *setting* is a data set with a shift of some strength. Its `values` are `[A, R, N]`: the accuracies, from 0 to 1, of
`A` methods, `R` seeds and `N` clients, the same clients for every method. A run without any value has failed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from jfcl.analysis import plots
from jfcl.core import check

LEVEL = 0.05  # of every test; the intervals are those of 95 %
NAMES = {"textcoords": "offset points", "fontsize": 8, "va": "center"}  # of points in a picture
# The places of a name beside its point, and the side of the name that is there.
PLACES = [(5, 5, "left"), (5, -5, "left"), (-5, 5, "right"), (-5, -5, "right"), (0, 11, "center"), (0, -11, "center")]
PLACES += [(x, y, side) for y in (16, -16, 25, -25) for x, side in ((5, "left"), (-5, "right"))]
DIGITS = 6  # of scores that are ranked: accuracies are float32, and equal ones differ by the order of their sums


def scores(values: np.ndarray, counts: np.ndarray | None = None) -> np.ndarray:
    """Returns the mean accuracies `[A]` of a setting, less 2 for each run that has failed.

    A method with a failed run is so below every method with fewer of them, whatever its other runs have reached.
    Clients without a value (NaN) have no test examples, and are left out.

    Args:
      values: `[A, R, N]`.
      counts: `[B, R, N]`, how often each client of each seed is drawn, for scores `[B, A]`; default: once.

    Example:
      >>> scores(np.array([[[0.5, 0.75], [0.25, 0.5]], [[1.0, 1.0], [np.nan, np.nan]]])).tolist()
      [0.5, -1.0]
    """
    drawn = np.ones((1, *values.shape[1:])) if counts is None else counts
    has_value = np.isfinite(values)
    total = np.einsum("arn,brn->ba", np.where(has_value, values, 0), drawn)
    number = np.einsum("arn,brn->ba", has_value.astype(float), drawn)
    failed = np.einsum("ar,brn->ba", ~has_value.any(axis=2), drawn) / values.shape[2]
    result = total / np.maximum(number, 1) - 2 * failed
    return result[0] if counts is None else result


def ranks(scores: np.ndarray) -> np.ndarray:
    """Returns the ranks of scores along the last axis: 1 for the highest; equal ones share the mean of their ranks.

    Scores are equal if they are so with six decimals.

    Example:
      >>> ranks(np.array([0.5, 0.9, 0.5])).tolist()
      [2.5, 1.0, 2.5]
    """
    scores = np.round(scores, DIGITS)
    score, rivals = scores[..., :, None], scores[..., None, :]
    return 0.5 + (rivals > score).sum(axis=-1) + (rivals == score).sum(axis=-1) / 2


def rank_intervals(settings: Sequence[np.ndarray], *, draws: int = 1000, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Returns `(low [A], high [A])`, bootstrap intervals of 95 % of the methods' mean ranks over settings.

    Seeds and clients are drawn with replacement, apart from each other (Owen 2007), the same for every method and every
    setting: all seeds have the same clients, and draws within each seed would count one client as `R` independent ones,
    as draws within each setting would where settings share images. Settings are not drawn: the intervals hold for
    these. What is drawn is noisier than the data, which moves ranks towards the middle: the intervals are the
    quantiles around the mean of the draws, moved to the mean ranks of the data, and are widened by `sqrt(R / (R - 1))`,
    since few seeds differ less among themselves than from new ones. Cost: `draws · A · R · N` operations for each
    setting.

    Example:
      >>> low, high = rank_intervals([np.array([[[0.9, 0.8]], [[0.1, 0.2]]])])
      >>> low.tolist(), high.tolist()
      ([1.0, 2.0], [1.0, 2.0])
    """
    drawn = 0.0
    for values in settings:
        rng = np.random.default_rng(seed)
        seeds, clients = (rng.multinomial(n, np.full(n, 1 / n), size=draws) for n in values.shape[1:])
        counts = (seeds[:, :, None] * clients[:, None, :]).astype(float)
        drawn = drawn + ranks(scores(values, counts)) / len(settings)
    mean_ranks = np.mean([ranks(scores(values)) for values in settings], axis=0)
    least = min(values.shape[1] for values in settings)
    wider = math.sqrt(least / (least - 1)) if least > 1 else 1.0
    ends = np.quantile(drawn, [LEVEL / 2, 1 - LEVEL / 2], axis=0) - drawn.mean(axis=0)
    ends = np.stack([np.minimum(ends[0], 0), np.maximum(ends[1], 0)])  # rare draws move the mean out of both quantiles
    low, high = np.clip(mean_ranks + wider * ends, 1, len(mean_ranks))
    return low, high


def friedman(mean_ranks: np.ndarray, num_problems: int) -> tuple[float, float]:
    """Returns Friedman's statistic and its p-value: that of equally good methods to have mean ranks `[A]` so far apart.

    The equation is that of Demšar (JMLR 2006), section 3.2.2. A correction for ties would make the statistic larger.

    Example:
      >>> friedman(np.array([3.143, 2.0, 2.893, 1.964]), 14)  # Demšar's example: 9.28
      (9.28..., 0.025...)
    """
    from scipy.special import chdtrc  # takes long to import

    count = len(mean_ranks)
    away = np.sum((mean_ranks - (count + 1) / 2) ** 2)
    statistic = float(12 * num_problems / (count * (count + 1)) * away)
    return statistic, float(chdtrc(count - 1, statistic))


def critical_difference(num_methods: int, num_problems: int) -> float:
    """Returns Nemenyi's critical difference: mean ranks that are less apart do not differ at the level of 5 %.

    That of Demšar (JMLR 2006), section 3.2.2: `q · sqrt(A (A + 1) / 6 P)` of `A` methods on `P` problems.

    Example:
      >>> round(critical_difference(4, 14), 2)  # Demšar's example, whose q is rounded: 1.25
      1.25
    """
    from scipy.stats import studentized_range  # takes long to import

    check(num_methods >= 2, "num_methods", num_methods, "at least 2")
    q = studentized_range.ppf(1 - LEVEL, num_methods, np.inf) / math.sqrt(2)
    return float(q * math.sqrt(num_methods * (num_methods + 1) / (6 * num_problems)))


def groups(mean_ranks: np.ndarray, difference: float) -> list[tuple[int, int]]:
    """Returns the largest groups of methods that do not differ: first and last in `mean_ranks`, which are sorted.

    Example:
      >>> groups(np.array([1.0, 1.5, 2.2, 4.0]), 1.0)
      [(0, 1), (1, 2)]
    """
    last = np.searchsorted(mean_ranks, mean_ranks + difference, side="left") - 1
    return [(i, int(j)) for i, j in enumerate(last) if j > i and (i == 0 or j > last[i - 1])]


def signed_rank(differences: np.ndarray) -> float:
    """Returns the p-value of Wilcoxon's signed-rank test, two-sided, exact also with ties; zeros are left out.

    Example:
      >>> signed_rank(np.array([0.1, 0.2, 0.3, 0.4, 0.5]))  # the smallest that five differences can have, 2 / 2^5
      0.0625
    """
    differences = np.round(differences, DIGITS)
    differences = differences[differences != 0]
    twice = np.rint(2 * ranks(-np.abs(differences))).astype(int)  # ranks of ties are halves
    chance = np.ones(1)  # of each sum of ranks of the positive differences, where every sign is as likely
    for rank in twice:
        chance = (np.pad(chance, (0, rank)) + np.pad(chance, (rank, 0))) / 2
    total = twice.sum()
    away = abs(2 * twice[differences > 0].sum() - total)
    return min(1.0, float(chance[np.abs(2 * np.arange(total + 1) - total) >= away].sum()))


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns the p-values of several tests after Holm's correction (1979).

    Example:
      >>> holm([0.01, 0.04, 0.03])
      [0.03, 0.06, 0.06]
    """
    order, largest, corrected = np.argsort(p_values, kind="stable"), 0.0, [0.0] * len(p_values)
    for place, i in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - place) * p_values[i]))
        corrected[i] = largest
    return corrected


def neighbours(scores: np.ndarray) -> list[float]:
    """Returns the p-values, after Holm's correction, of each method against the next, `A - 1` in all.

    Args:
      scores: `[P, A]`, of the problems and the methods, which are sorted by their ranks.

    Example:
      >>> neighbours(np.array([[0.9, 0.8, 0.8]] * 6))  # 2 · 2 / 2^6
      [0.0625, 1.0]
    """
    return holm([signed_rank(a - b) for a, b in pairwise(scores.T)])


def pareto(cost: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Returns which methods `[A]` are worth their cost: no other is at least as good and as cheap, and better in one.

    Example:
      >>> pareto(np.array([1.0, 2.0, 3.0]), np.array([0.5, 0.9, 0.8])).tolist()
      [True, True, False]
    """
    cheap, good = cost[:, None] <= cost, value[:, None] >= value  # [other, each]
    better = (cost[:, None] < cost) | (value[:, None] > value)
    return ~(cheap & good & better).any(axis=0)


def complete(is_present: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the settings and the methods of a complete part of a table, by their numbers.

    As long as something is missing, the setting or the method that lacks the largest share is left out; a setting also
    where it lacks half as much as a method.

    Args:
      is_present: `[S, A]`.

    Example:
      >>> settings, methods = complete(np.array([[True, True, False]] * 4 + [[True, False, True]]))
      >>> settings.tolist(), methods.tolist()
      ([0, 1, 2, 3], [0, 1])
    """
    rows, columns = (np.arange(n) for n in is_present.shape)
    while len(rows) and len(columns) and not (part := is_present[np.ix_(rows, columns)]).all():
        of_row, of_column = 1 - part.mean(axis=1), 1 - part.mean(axis=0)
        if 2 * of_row.max() >= of_column.max():
            rows = np.delete(rows, of_row.argmax())
        else:
            columns = np.delete(columns, of_column.argmax())
    return rows, columns


# ---------------------------------------------------------------------------------------------------------------
# Pictures.


def plot_ranks(methods: Sequence[str], mean_ranks: np.ndarray, low: np.ndarray, high: np.ndarray) -> plots.Figure:
    """Plots the mean ranks with their intervals, the first method on top.

    Example:
      >>> figure = plot_ranks(["a", "b"], np.array([1.2, 1.8]), np.array([1.0, 1.5]), np.array([1.5, 2.0]))
      >>> [text.get_text() for text in figure.axes[0].get_yticklabels()]
      ['a', 'b']
    """
    figure = plots.new_figure(6, 1.2 + 0.24 * len(methods))
    axes, at = figure.subplots(), np.arange(len(methods))
    away = np.abs([mean_ranks - low, high - mean_ranks])
    axes.errorbar(mean_ranks, at, xerr=away, fmt="o", color=plots.PALETTE[0], capsize=3)
    axes.set_yticks(at, [plots.label(method) for method in methods])
    axes.set(xlabel="mean rank, 1 is the best", ylim=(len(at) - 0.5, -0.5))
    axes.grid(axis="x", alpha=0.3)
    return figure


def plot_difference(methods: Sequence[str], mean_ranks: np.ndarray, difference: float) -> plots.Figure:
    """Plots the critical-difference diagram of Demšar (JMLR 2006), figure 1; the methods are sorted by rank.

    Example:
      >>> figure = plot_difference(["a", "b", "c"], np.array([1.0, 1.5, 2.9]), 0.8)
      >>> [text.get_text().strip() for text in figure.axes[0].texts]
      ['a (1.00)', 'b (1.50)', 'c (2.90)', 'critical difference 0.80']
    """
    count, joined = len(methods), groups(mean_ranks, difference)
    half, top = -(-count // 2), 0.9 + 0.28 * len(joined)  # the names begin below the bars
    figure = plots.new_figure(6.4, 1.2 + 0.28 * (top + half))
    axes = figure.subplots()
    for i, (method, rank) in enumerate(zip(methods, mean_ranks, strict=True)):
        y, x, side = (top + i, 0.6, "right") if i < half else (top + count - 1 - i, count + 0.4, "left")
        axes.plot([rank, rank, x], [0, y, y], color="0.4", lw=0.8)
        axes.text(x, y, f" {plots.label(method)} ({rank:.2f}) ", ha=side, va="center", fontsize=9)
    for i, (first, last) in enumerate(joined):
        ends = mean_ranks[[first, last]] + [-0.04, 0.04]
        axes.plot(ends, [0.5 + 0.28 * i] * 2, color=plots.PALETTE[3], lw=3.5)
    axes.plot([1, 1 + difference], [-1.4, -1.4], color="black", lw=1.5, marker="|")
    axes.text(1, -1.6, f"critical difference {difference:.2f}", fontsize=9)
    axes.set(xlim=(0.5, count + 0.5), ylim=(top + half - 0.5, -2.3), yticks=[], xticks=range(1, count + 1))
    axes.spines[["left", "right", "bottom"]].set_visible(False)
    axes.spines["top"].set_position(("data", 0))
    axes.xaxis.tick_top()
    return figure


def plot_costs(
    methods: Sequence[str], costs: dict[str, np.ndarray], value: np.ndarray, named: set[str]
) -> plots.Figure:
    """Plots a value by each of some costs `[A]`; a line joins the methods that are worth their cost.

    These, and those in `named`, have their names beside them. A cost that differs by more than ten times has a
    logarithmic axis, with 0. A NaN is not drawn.

    Example:
      >>> figure = plot_costs(["a", "b"], {"seconds": np.array([1.0, 2.0])}, np.array([0.9, 0.8]), set())
      >>> [text.get_text() for text in figure.axes[0].texts]
      ['a']
    """
    figure = plots.new_figure(6.2, 2.9 * len(costs), layout="constrained")
    panels = figure.subplots(len(costs), squeeze=False)[:, 0]
    for axes, (name, cost) in zip(panels, costs.items(), strict=True):
        finite = np.flatnonzero(np.isfinite(cost + value))
        front = finite[pareto(cost[finite], value[finite])]
        least, most = min((c for c in cost[finite] if c > 0), default=1), max(cost[finite], default=1)
        if most > 10 * least:
            axes.set_xscale("symlog", linthresh=least)
        line = front[np.argsort(cost[front])]
        axes.step(cost[line], value[line], where="post", color=plots.PALETTE[1], zorder=1)
        for i in finite:
            axes.plot(cost[i], value[i], "o", color=plots.PALETTE[0] if i in front else "0.5")
            if i in front or methods[i] in named:
                axes.annotate(plots.label(methods[i]), (cost[i], value[i]), xytext=(0, 0), **NAMES)
        axes.set(xlabel=name, ylabel="accuracy %")
        axes.margins(0.12)
        axes.grid(alpha=0.3)
    figure.draw_without_rendering()  # which decides where the points are
    for axes in panels:
        _place_names(axes, axes.transData.transform([line.get_xydata()[0] for line in axes.lines[1:]]))
    return figure


def _place_names(axes: Any, points: np.ndarray) -> None:
    """Moves each name to the place beside its point where it covers least of the other names and of points `[A, 2]`."""
    names: list[Any] = []

    def covered(place: tuple[int, int, str]) -> int:
        name.set(position=place[:2], ha=place[2])
        box = name.get_window_extent()
        outside = sum(not axes.bbox.contains(*corner) for corner in (box.min, box.max))
        return outside + box.count_overlaps(names) + box.padded(3).count_contains(points)

    for name in axes.texts:
        covered(min(PLACES, key=covered))
        names.append(name.get_window_extent())
