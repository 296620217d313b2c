"""Drift: patterns, data by steps, runs in phases."""

import numpy as np
import pytest

from jfcl.core import check_clients, check_labels
from jfcl.data import PATTERNS, build, drift_pattern, generate_store, load

# ---------------------------------------------------------------------------------------------------------------
# Data.


def test_patterns_are_those_of_the_papers():
    y = drift_pattern("Y", 25)
    assert y.shape == (10, 25) and (y[:, 10:20] == y[:, :10]).all() and (y[:, 20:] == y[:, :5]).all()
    first = [int(np.argmax(column)) if column.any() else None for column in y[:, :10].T]
    assert first == [6, 3, 4, 4, 8, 4, 6, 3, 5, 8] and (np.diff(y, axis=0) >= 0).all()  # each client moves once
    assert (drift_pattern("Z", 10) == 2 * y[:, :10]).all()
    counts = {"A": 2, "W": 2, "X": 2} | dict.fromkeys("BCDEF", 4)
    assert {name: len(np.unique(drift_pattern(name, 10))) for name in counts} == counts

    # FedCCFA: 3:3:4 of the clients, at rounds 100 (110, 120) of 200, and back at 150.
    expected = np.zeros((20, 10), int)
    expected[10:] = [1, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    assert (drift_pattern("sudden", 10, num_steps=20) == expected).all()
    assert (drift_pattern("recurrent", 10, num_steps=20)[:15] == expected[:15]).all()
    assert not drift_pattern("recurrent", 10, num_steps=20)[15:].any()
    late = drift_pattern("incremental", 10, num_steps=20)
    assert [int(np.argmax(late[:, i] > 0)) for i in (0, 3, 6)] == [10, 11, 12] and (late[12:] == expected[12:]).all()
    assert (drift_pattern("sudden", 10, num_steps=2, num_clusters=2)[1] == 1).all()

    # FlexCFL: pairs swap, so that clusters keep their sizes; about one client in twenty moves, or stays by its pair.
    swap = drift_pattern("swap", 4000, num_steps=6, seed=3)
    assert (swap[0] == np.arange(4000) % 4).all() and (np.sort(swap, axis=1) == np.sort(swap[0])).all()
    assert 0.75 * 0.04 < np.mean(np.diff(swap, axis=0) != 0) < 0.75 * 0.06
    r = drift_pattern("R", 500, seed=1)
    assert not r[:2].any() and (r[2::2] == r[3::2]).all() and len(np.unique(r[2])) == 4 and (r[4] != r[6]).any()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "y"}, "unknown drift 'y': did you mean 'Y'"),
        ({"num_clients": 9}, "num_clients must be at least 10, the clients of pattern 'Y'"),
        ({"num_steps": 5}, "num_steps must be 10, the steps of pattern 'Y'"),
        ({"num_clusters": 1}, "num_clusters must be at least 2, the clusters of the drift"),
        ({"name": "sudden", "num_clusters": 1}, "num_clusters must be at least 2 with drift"),
        ({"name": "swap", "num_steps": 1}, "num_steps must be an integer, at least 2"),
    ],
)
def test_wrong_patterns_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        drift_pattern(**{"name": "Y", "num_clients": 10} | options)


def test_a_client_has_its_own_examples_at_every_step_under_the_cluster_of_the_step():
    digits, pattern = load("digits"), drift_pattern("B", 10)
    fed = build(digits, num_clients=10, num_clusters=4, heterogeneity="swap_pairs", drift="B", seed=2)
    label = {x.tobytes(): int(y) for x, y in zip(*digits.train.values(), strict=True)}
    swapped = lambda y, k: y if k == 0 else {2 * k - 1: 2 * k, 2 * k: 2 * k - 1}.get(y, y)  # noqa: E731
    assert (fed.drift.cluster == pattern).all() and (fed.cluster == pattern[9]).all() and fed.drift.num_steps == 10
    check_clients(fed.train)
    seen = set()
    for i in range(10):
        size, times = fed.train.size[i], fed.train.examples["step"][i]
        assert (np.diff(times[:size]) >= 0).all() and times.dtype == np.int32
        assert set(np.bincount(times[:size], minlength=10)) <= {size // 10, size // 10 + 1}  # none is without
        for x, y, t in zip(fed.train.examples["x"][i, :size], fed.train.examples["y"][i], times, strict=False):
            assert swapped(label[x.tobytes()], pattern[t, i]) == y
            seen.add(x.tobytes())
    assert len(seen) == fed.train.size.sum() == 1438  # each at one client, once
    for t in (0, 4, 9, 10):  # after the last step nothing changes
        tests = fed.drift.tests(t)
        check_labels(tests, 10)
        for i in range(10):
            for x, y in zip(tests.examples["x"][i, : tests.size[i]], tests.examples["y"][i], strict=False):
                assert x.tobytes() not in seen and swapped(label[x.tobytes()], pattern[min(t, 9), i]) == y
    assert fed.test.examples["y"].tolist() == fed.drift.tests(9).examples["y"].tolist()


@pytest.mark.parametrize("window", [None, 1, 3])
def test_clients_hold_the_examples_of_a_window(window):
    options = {"heterogeneity": "sine", "partition": "power_law", "examples_per_client": 40, "num_clusters": 2}
    pattern = drift_pattern("sudden", 3, num_steps=5, num_clusters=2)
    fed = build("sine", num_clients=3, drift=pattern, drift_window=window, **options)
    everything = fed.train
    for t in range(5):
        held = fed.drift.clients(everything, t)
        assert held.examples["x"].shape == everything.examples["x"].shape and held.size.dtype == np.int32
        for i in range(3):
            times = everything.examples["step"][i, : everything.size[i]]
            rows = [m for m, s in enumerate(times) if s <= t and (window is None or s > t - window)]
            assert held.size[i] == len(rows) > 0
            for name in ("x", "y", "step"):
                assert (held.examples[name][i, : len(rows)] == everything.examples[name][i, rows]).all()


def test_the_concepts_are_those_of_the_papers():
    def sea(x, k):
        return float(x[0]) + float(x[1]) <= [9, 8, 7, 9.5][k]

    def sine(x, k):
        return (float(x[1]) <= np.sin(float(x[0]))) != (k == 1)

    def circle(x, k):
        a, b, r = [(0.2, 0.5, 0.15), (0.6, 0.5, 0.25)][k]
        return np.hypot(float(x[0]) - a, float(x[1]) - b) > r

    for name, rule, count, wrong in (("sea", sea, 4, 0.1), ("sine", sine, 2, 0.0), ("circle", circle, 2, 0.0)):
        fed = build(name, num_clients=4, num_clusters=count, heterogeneity=name, examples_per_client=1000)
        errors = []
        for i in range(4):
            x, y = (fed.train.examples[of][i, :1000] for of in ("x", "y"))
            errors.append(np.mean([rule(p, i % count) != label for p, label in zip(x, y.tolist(), strict=True)]))
            assert x.min() >= 0 and x.max() <= (10 if name == "sea" else 1)
        assert abs(np.mean(errors) - wrong) < (0.02 if wrong else 1e-3), (name, errors)  # 1e-3: float32 at the border


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"drift": [[0, 1, 0]]}, "num_clients must be 3, the clients of the drift, got 4"),
        ({"drift": np.full((2, 4), 3)}, "num_clusters must be at least 4, the clusters of the drift"),
        ({"drift": np.full((2, 4), 0.5)}, "drift must be the name of a pattern, or integers"),
        ({"drift": np.full((2, 4), -1)}, "drift must be of clusters from 0"),
        ({"drift": "Y"}, "num_clients must be at least 10, the clients of pattern 'Y', got 4"),
        ({"drift": np.zeros((9, 4), int), "examples_per_client": 8}, "client must be at least 9, one for each step"),
        ({"reuse": "cluster"}, "reuse must be none"),
        ({"newcomer_examples": 3}, "newcomer_examples must be left out with drift"),
        ({"heterogeneity": "class"}, "heterogeneity must be one that transforms examples"),
        ({"drift_window": 0}, "drift_window must be an integer, at least 1"),
        ({"drift": None, "drift_window": 1}, "drift_window must be left out without drift"),
    ],
)
def test_wrong_drift_is_refused(options, words):
    given = {"num_clients": 4, "num_clusters": 2, "heterogeneity": "label_swap", "drift": np.zeros((2, 4), int)}
    with pytest.raises(ValueError, match=words):
        build("digits", **given | options)


def test_concepts_refuse_other_data(tmp_path):
    with pytest.raises(ValueError, match="heterogeneity 'sine': the examples must be points"):
        build("digits", num_clients=4, num_clusters=2, heterogeneity="sine")
    with pytest.raises(ValueError, match="num_clusters must be at most 2, the concepts of circle"):
        build("circle", num_clients=4, num_clusters=3, heterogeneity="circle")
    with pytest.raises(ValueError, match="num_clusters must be at most 5, the number of pairs among 10 labels"):
        build("digits", num_clients=9, num_clusters=6, heterogeneity="swap_pairs")
    generate_store(tmp_path / "store", "sea", num_clients=5, examples_per_client=9, num_clusters=4, heterogeneity="sea")
    assert PATTERNS.keys() >= {"A", "F", "R", "Y", "sudden", "swap"}
