"""Drift: patterns, data by steps, runs in phases."""

import csv
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sklearn.metrics import adjusted_rand_score
from still_method import still
from test_methods import KIND, factory

import jfcl
import jfcl.experiments
from jfcl.cli import main
from jfcl.core import check_clients, check_labels
from jfcl.data import Dataset, build, drift_pattern, generate_store, load
from jfcl.experiments import Config
from jfcl.experiments.config import read_config
from jfcl.experiments.setups import make_federation
from jfcl.methods import METHODS
from jfcl.testing import problem

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
    assert drift_pattern("recurrent", 10, num_steps=3).any(axis=1).tolist() == [False, True, False]

    # FlexCFL: pairs swap, so that clusters keep their sizes; about one client in twenty moves, or stays by its pair.
    swap = drift_pattern("swap", 4000, num_steps=6, seed=3)
    assert (swap[0] == np.arange(4000) % 4).all() and (np.sort(swap, axis=1) == np.sort(swap[0])).all()
    assert 0.75 * 0.04 < np.mean(np.diff(swap, axis=0) != 0) < 0.75 * 0.06
    hostile, moves = jfcl.attacks.choose_malicious(4000, 0.3, seed=3), np.zeros((4, 4), int)
    np.add.at(moves, (swap[0, hostile], swap[1, hostile]), 1)
    assert (moves != moves.T).any()  # hostile clients are not paired with one another
    r = drift_pattern("R", 500, seed=1)
    assert not r[:2].any() and (r[2::2] == r[3::2]).all() and len(np.unique(r[2])) == 4 and (r[4] != r[6]).any()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "y"}, "unknown drift 'y': did you mean 'Y'"),
        ({"num_clients": 9}, "num_clients must be at least 10, as in pattern 'Y'"),
        ({"num_steps": 5}, "num_steps must be 10, the steps of pattern 'Y'"),
        ({"num_clusters": 1}, "num_clusters must be at least 2, the clusters of the drift"),
        ({"name": "sudden", "num_clusters": 1}, "num_clusters must be at least 2 with drift"),
        ({"name": "swap", "num_steps": 1}, "num_steps must be an integer, at least 2"),
        ({"name": "R", "num_steps": 2}, "num_steps must be an integer, at least 3"),  # all clients would stay
        ({"name": "recurrent", "num_steps": 2}, "num_steps must be an integer, at least 3"),
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


def test_clients_that_drift_stay_corrupted():
    """Every other client of a cluster has corrupted images, whatever its cluster is later."""
    pattern = np.stack([np.arange(8) % 2, np.arange(8) // 4])
    options = {"num_clients": 8, "num_clusters": 2, "drift": pattern}
    plain, fed = (build("digits", heterogeneity=name, **options) for name in ("swap_pairs", "three_concepts"))
    pairs = [(plain.train, fed.train), *((plain.drift.tests(t), fed.drift.tests(t)) for t in (0, 1))]
    for clean, corrupted in pairs:
        differ = (clean.examples["x"] != corrupted.examples["x"]).any(axis=(2, 3, 4))
        assert not differ[[0, 1, 4, 5]].any()
        assert all(row[:size].mean() > 0.9 for row, size in zip(differ, clean.size, strict=True) if row.any())
        assert differ[[2, 3, 6, 7]].any(axis=1).all()


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


def test_the_concepts_are_those_of_the_papers(tmp_path):
    def sea(x, k):
        return float(x[0]) + float(x[1]) <= [9, 8, 7, 9.5][k]

    def sine(x, k):
        return (float(x[1]) <= np.sin(float(x[0]))) != (k == 1)

    def circle(x, k):
        a, b, r = [(0.2, 0.5, 0.15), (0.6, 0.5, 0.25)][k]
        return np.hypot(float(x[0]) - a, float(x[1]) - b) > r

    for name, rule, count, wrong in (("sea", sea, 4, 0.1), ("sine", sine, 2, 0.0), ("circle", circle, 2, 0.0)):
        options = {"num_clients": 4, "num_clusters": count, "heterogeneity": name, "examples_per_client": 1000}
        store, _ = generate_store(tmp_path / name, name, **options)
        for train in (build(name, **options).train, store.gather(np.arange(4))):
            errors = []
            for i in range(4):
                x, y = (train.examples[of][i, :1000] for of in ("x", "y"))
                errors.append(np.mean([rule(p, i % count) != label for p, label in zip(x, y.tolist(), strict=True)]))
                assert x.min() >= 0 and x.max() <= (10 if name == "sea" else 1)
            assert abs(np.mean(errors) - wrong) < (0.02 if wrong else 1e-3), (name, errors)  # 1e-3: at float32's border


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"drift": [[0, 1, 0]]}, "num_clients must be 3, the clients of the drift, got 4"),
        ({"drift": np.full((2, 4), 3)}, "num_clusters must be at least 4, the clusters of the drift"),
        ({"drift": np.full((2, 4), 0.5)}, "drift must be the name of a pattern, or integers"),
        ({"drift": np.full((2, 4), -1)}, "drift must be of clusters from 0"),
        ({"drift": "Y"}, "num_clients must be at least 10, as in pattern 'Y', got 4"),
        ({"drift": np.zeros((9, 4), int), "examples_per_client": 8}, "client must be at least 9, one for each step"),
        ({"reuse": "cluster"}, "reuse must be none"),
        ({"newcomer_examples": 3}, "newcomer_examples must be left out with drift"),
        ({"heterogeneity": "class"}, "heterogeneity must be one that transforms examples"),
        ({"drift_window": 0}, "drift_window must be an integer, at least 1"),
    ],
)
def test_wrong_drift_is_refused(options, words):
    given = {"num_clients": 4, "num_clusters": 2, "heterogeneity": "label_swap", "drift": np.zeros((2, 4), int)}
    with pytest.raises(ValueError, match=words):
        build("digits", **given | options)


def test_concepts_refuse_other_data():
    with pytest.raises(ValueError, match="heterogeneity 'sine': the examples must be points"):
        build("digits", num_clients=4, num_clusters=2, heterogeneity="sine")
    with pytest.raises(ValueError, match="num_clusters must be at most 2, those of 'circle'"):
        build("circle", num_clients=4, num_clusters=3, heterogeneity="circle")
    with pytest.raises(ValueError, match="num_clusters must be at most 5, the number of pairs among 10 labels"):
        build("digits", num_clients=9, num_clusters=6, heterogeneity="swap_pairs")


# ---------------------------------------------------------------------------------------------------------------
# Runs.

TRAINING = jfcl.local_training(optax.sgd(0.3), num_steps=2)
PATTERN = np.array([[0, 0, 0, 1], [0, 0, 0, 1], [1, 0, 0, 1]])


def task_and_data(window=None):
    options = {"heterogeneity": "sine", "examples_per_client": 30, "drift": PATTERN, "drift_window": window}
    fed = build("sine", num_clients=4, num_clusters=2, **options)
    return jfcl.models.classification(jfcl.models.Linear(2), (2,), 2), fed


def algorithm_and_data():
    task, fed = task_and_data(window=2)
    return jfcl.ifca(task, TRAINING, num_clusters=2), fed


def run(make, fed, num_rounds=7, **options):
    return jfcl.simulate(make, fed, key=jax.random.key(3), num_rounds=num_rounds, **options)


@pytest.mark.slow_cases("None")
@pytest.mark.parametrize("window", [None, 1])
def test_a_run_is_that_of_its_steps_one_after_another(window):
    """The steps of 7 rounds are 2, 2 and 3; the oracle calls `step` in a plain loop and evaluates in NumPy."""
    task, fed = task_and_data(window)
    algorithm = jfcl.ifca(task, TRAINING, num_clusters=2)
    history = run(algorithm, fed, serve="state", eval_every=2)
    assert fed.drift.ends(7) == [2, 4, 7]
    first, state_of = fed.drift.clients(fed.train, 0), {}
    state = jax.jit(algorithm.init)(jax.random.fold_in(jax.random.key(3), 0), first)
    for t, step in enumerate([0, 0, 1, 1, 2, 2, 2], 1):
        clients = fed.drift.clients(fed.train, step)
        state, _ = jax.jit(algorithm.step)(jax.random.fold_in(jax.random.key(3), t), state, clients)
        state_of[t] = jax.device_get(state)

    def accuracy(state, tests):
        each = []
        for i, k in enumerate(state.cluster):
            model = jax.tree.map(lambda p, k=k: np.float64(p[k]), state.params)["Dense_0"]
            x, y = (tests.examples[of][i, : tests.size[i]] for of in ("x", "y"))
            each.append(np.mean(np.argmax(x @ model["kernel"] + model["bias"], axis=1) == y))
        return np.array(each)

    evaluated = [(r["round"], r["step"], r["changed"]) for r in history.records]
    assert evaluated == [(2, 0, 0), (4, 1, 0), (6, 2, 1), (7, 2, 1)]
    for record in history.records:
        t, step = record["round"], record["step"]
        now, after = (accuracy(state_of[t], fed.drift.tests(s)) for s in (step, step + 1))
        np.testing.assert_allclose(record["accuracy"], now.mean(), atol=1e-6)
        np.testing.assert_allclose(record["next_accuracy"], after.mean(), atol=1e-6)
        stays = PATTERN[step] == PATTERN[min(step + 1, 2)]
        np.testing.assert_allclose(record["next_stable_accuracy"], after[stays].mean(), atol=1e-6)
        wanted = adjusted_rand_score(PATTERN[step], state_of[t].cluster)
        np.testing.assert_allclose(record["adjusted_rand"], wanted, atol=1e-6)
    assert history.clients["examples"].tolist() == [[30 if window is None else 10] * 4]
    np.testing.assert_array_equal(history.clients["accuracy"][0], accuracy(state_of[7], fed.test).astype(np.float32))


def test_a_method_ends_after_the_last_change_of_the_data():
    task, fed = task_and_data(window=1)
    algorithm = still(task, lambda key: jax.tree.map(lambda x: x[None], task.init(key)))

    def step(*args):
        state, metrics = algorithm.step(*args)
        return state, metrics | {"ended": jnp.bool_(True)}

    history = run(algorithm._replace(step=step), fed)
    assert history.rounds == 5 and fed.drift.ends(7) == [2, 4, 7]


def test_the_clients_of_every_round_have_the_clusters_and_examples_of_its_step(tmp_path):
    algorithm, fed = algorithm_and_data()
    hidden = np.array([0, 0, 0, -1])  # as of a hostile client: its cluster does not count at any step
    options = {"out": tmp_path / "run", "keep_clients": True, "eval_every": 7, "true_cluster": hidden}
    with pytest.warns(UserWarning, match="all clients use one of the 2 models"):
        history = run(algorithm, fed, **options)
    with (tmp_path / "run" / "clients_by_round.csv").open() as file:
        rows = list(csv.DictReader(file))
    for t, step in {"2": 0, "4": 1, "7": 2}.items():
        mine = [row for row in rows if row["round"] == t]
        assert [int(row["true_cluster"]) for row in mine] == [*PATTERN[step, :3], -1]
        record = next(record for record in history.records if record["round"] == int(t))
        np.testing.assert_allclose(
            record["adjusted_rand"], adjusted_rand_score(PATTERN[step, :3], record["cluster"][:3])
        )
        assert record["clusters_in_use"] == len({*record["cluster"][:3]})
        assert [int(row["examples"]) for row in mine] == fed.drift.clients(fed.train, step).size.tolist()
    assert {int(row["examples"]) for row in rows} == {10, 20}


@pytest.mark.slow_cases("1", "2", "6")
@pytest.mark.parametrize("done", [1, 2, 3, 6])
def test_a_run_that_is_killed_in_any_step_goes_on_bit_for_bit(tmp_path, done):
    algorithm, fed = algorithm_and_data()
    whole = run(algorithm, fed)
    part = run(algorithm, fed, out=tmp_path, stop_after=done)
    assert part.records == whole.records[:done]
    for _ in range(2):  # the second time nothing is left to do
        history = run(algorithm, fed, out=tmp_path, resume=True)
        assert history.records == whole.records
        jax.tree.map(np.testing.assert_array_equal, (history.state, history.clients), (whole.state, whole.clients))
    summary, records = jfcl.experiments.read_run(tmp_path)
    assert records == whole.records
    assert summary["drift"]["per_seed"][0]["round"] == [2, 4, 7] and len(summary["drift"]["mean"]) == 4
    with pytest.raises(ValueError, match="schedule_rounds: it has 7, asked for 9"):
        run(algorithm, fed, num_rounds=9, out=tmp_path, resume=True)
    with pytest.raises(ValueError, match=f"federation: it has '{fed.split_hash}', asked for 'another'"):
        run(algorithm, fed._replace(split_hash="another"), out=tmp_path, resume=True)


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import test_drift

class Kill:
    def on_records(self, records):
        if records[0]["round"] == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)

algorithm, fed = test_drift.algorithm_and_data()
test_drift.run(algorithm, fed, out=sys.argv[2], checkpoint_seconds=0.0, callbacks=[Kill()])
"""


@pytest.mark.slow
@pytest.mark.parametrize("at", [4, 5])  # the last round of a step, and the first one
def test_a_process_that_is_killed_in_a_step_goes_on_bit_for_bit(tmp_path, at):
    algorithm, fed = algorithm_and_data()
    killed = subprocess.run([sys.executable, "-c", KILLED, Path(__file__).parent, tmp_path, str(at)], check=False)
    assert killed.returncode == -signal.SIGKILL
    kept = [int(p.name) for p in (tmp_path / "checkpoints").glob("[0-9]*")]
    assert 0 < max(kept) < 7, "it was killed on the way"
    history, whole = run(algorithm, fed, out=tmp_path, resume=True), run(algorithm, fed)
    assert history.records == whole.records
    jax.tree.map(np.testing.assert_array_equal, history.state, whole.state)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_method_runs_on_drifting_data(name):
    rng, kind = np.random.default_rng(0), KIND.get(name, "classification")
    x = rng.normal(size=(300, 4)).astype(np.float32)
    points = Dataset("points", {"x": x, "y": (x[:, 0] > x[:, 1]).astype(np.int32)}, None, 2, None, "")
    pattern = np.array([[0, 1, 0, 1, 0, 1, 1], [1, 1, 0, 0, 0, 1, 1]])
    fed = build(points, num_clients=7, num_clusters=2, heterogeneity="private_label", drift=pattern)
    *_, task, training = problem(kind)
    history = run(factory(name)(task, training), fed, num_rounds=4)
    assert [r["step"] for r in history.records] == [0, 0, 1, 1] and history.rounds == 4 + history.init_rounds
    assert all(np.isfinite(r["loss"]) and 0 <= r["next_accuracy"] <= 1 for r in history.records)
    assert history.records[-1]["changed"] == 2


@pytest.mark.slow
def test_the_oracle_follows_the_clusters():
    task, fed = task_and_data(window=1)
    algorithm = jfcl.oracle(task, TRAINING, cluster=fed.drift.cluster)
    history = run(algorithm, fed)
    assert [r["adjusted_rand"] for r in history.records] == [1.0] * 7
    assert [r["cluster"] for r in history.records] == PATTERN[[0, 0, 1, 1, 2, 2, 2]].tolist()
    hidden = run(algorithm, fed, true_cluster=np.int32([-1, 0, 0, 1]))  # of hostile clients
    assert [r["adjusted_rand"] for r in hidden.records] == [1.0] * 7
    with pytest.raises(ValueError, match="the clients' data do not drift"):
        jfcl.simulate(algorithm, fed.test, key=jax.random.key(0), num_rounds=1)


def test_all_steps_at_once_are_noted():
    """`fed.train` has the examples of all steps, and `fed.test` those of the last: no drift takes place."""
    task, fed = task_and_data()
    algorithm = jfcl.fedavg(task, TRAINING)
    with pytest.warns(UserWarning, match="hold examples of 3 steps of time, all from the first round on; only sim"):
        history = run(algorithm, fed.train, num_rounds=1)
    run(algorithm, fed.train, num_rounds=1, state=history.state)  # as in a loop over the steps
    run(algorithm, fed.drift.clients(fed.train, 0), num_rounds=1)
    with pytest.warns(UserWarning, match="all from the first round on"), pytest.raises(ZeroDivisionError):
        jfcl.sweep(lambda lr: 1 / 0, {"lr": [0.1]}, fed.train, key=jax.random.key(0), num_rounds=1)


def test_results_over_time():
    accuracy = [0.8, 0.9, 0.5, 0.84, 0.86, 0.7, 0.8, 0.83, 0.84]
    steps = [0, 0, 1, 1, 1, 2, 2, 3, 3]
    changed = {0: 0, 1: 3, 2: 0, 3: 1}
    records = [
        {"round": 10 * t, "step": s, "changed": changed[s], "accuracy": a, "next_accuracy": a / 2}
        for t, (s, a) in enumerate(zip(steps, accuracy, strict=True), 1)
    ]
    found = jfcl.metrics.drift_results(records)
    assert found["round"] == [20, 50, 70, 90] and found["next_accuracy"] == [0.45, 0.43, 0.4, 0.42]
    assert found["recovery"] == [None, 30, None, 10]  # 0.95 * 0.9 = 0.855 in round 50; 0.76 in round 80
    assert jfcl.metrics.drift_results(records[:3])["recovery"] == [None, None]
    records = [
        {"round": t, "step": s, "changed": s, "accuracy": a} for t, s, a in [(1, 0, 1.0), (2, 1, 0.949), (3, 1, 0.95)]
    ]
    assert jfcl.metrics.drift_results(records)["recovery"] == [None, 2]  # at 95 %


def test_runs_refuse_what_does_not_fit_drift():
    task, fed = task_and_data()
    algorithm = jfcl.fedavg(task, TRAINING)
    with pytest.raises(ValueError, match="num_rounds must be at least 3, one for each step of the drift, got 2"):
        run(algorithm, fed, num_rounds=2)
    with pytest.raises(ValueError, match="test_clients must be left out with drift"):
        run(algorithm, fed, test_clients=fed.test)


# ---------------------------------------------------------------------------------------------------------------
# The command line.


@pytest.mark.slow
def test_a_configured_run_keeps_its_results_over_time(tmp_path, capsys):
    options = "--dataset sine --drift Y --model linear --rounds 10 --local-steps 1 --examples-per-client 20"
    main(f"run oracle {options} --drift-window 1 --seeds 2 --out {tmp_path / 'run'} --mapping vmap --quiet".split())
    summary, records = jfcl.experiments.read_run(tmp_path / "run")
    assert [r["step"] for r in records[::2]] == list(range(10)) and summary["num_clients"] == 10
    assert [row["adjusted_rand"] for row in summary["drift"]["per_seed"]] == [[1.0] * 10] * 2
    mean = np.mean([row["next_accuracy"] for row in summary["drift"]["per_seed"]])
    np.testing.assert_allclose(summary["drift"]["mean"]["next_accuracy"], mean)
    assert {"next_accuracy.png", "adjusted_rand.png"} <= {f.name for f in (tmp_path / "run" / "plots").iterdir()}
    assert "before adapting, of clients whose cluster stays: " in " ".join(capsys.readouterr().out.split())
    config = read_config(str(tmp_path / "run" / "config.json"))
    assert config["drift"] == "Y" and "schedule_rounds" not in config
    figure = jfcl.plots.curves({"oracle": records})
    dotted = [line.get_xdata()[0] for line in figure.axes[0].lines if line.get_linestyle() == ":"]
    assert dotted == [3, 4, 5, 6, 8]  # the pattern changes with rows 3, 4, 5, 6 and 8
    assert "Dotted lines: clients change clusters." in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rounds": 9}, "rounds must be at least 10, one for each step of the drift, got 9"),
        ({"drift": "sudden", "drift_steps": 101}, "rounds must be at least 101, one for each step of the drift"),
        ({"clients": 9}, "^clients must be at least 10, as in pattern 'Y', got 9"),
        ({"drift_steps": 3}, "^drift_steps must be 10, the steps of pattern 'Y', got 3"),
        ({"drift": "sudde"}, "did you mean 'sudden'"),
        ({"population": 100}, "drift must be left out with --population"),
        ({"drift": None, "drift_steps": 3}, "drift_steps must be left out without --drift"),
        ({"method": "cfl", "track_gap": True}, "track_gap must be left out with --drift"),
        ({"patience": 2}, "patience must be left out with --drift"),
        ({"heterogeneity": "none"}, "heterogeneity must be another with --drift, by which .*, got 'none'"),
    ],
)
def test_wrong_configurations_of_drift_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        jfcl.experiments.run(Config(**{"method": "fedavg", "drift": "Y"} | options))


def test_the_steps_of_a_drift_are_those_that_run():
    assert Config("fedavg", drift="Y").drift_steps == 10 and Config("fedavg").drift_steps is None


@pytest.mark.slow
def test_a_run_that_ends_early_has_the_clusters_of_its_last_step(tmp_path):
    class Ends(jfcl.callbacks.Callback):
        def on_records(self, records):
            return "enough"

    config = Config("fedavg", drift="sudden", drift_steps=2, clients=4, clusters=2, rounds=2, model="linear")
    _, _, parts = jfcl.experiments.run(config, out=tmp_path / "run", callbacks=[Ends()])
    first, last = parts.federation.drift.cluster
    with (tmp_path / "run" / "clients.csv").open() as file:
        assert [int(row["true_cluster"]) for row in csv.DictReader(file)] == first.tolist() != last.tolist()


def test_clients_for_tuning_drift_as_the_others():
    config = Config("fedavg", drift="sudden", drift_steps=2, clients=10, tuning_clients=10, examples_per_client=4)
    federation = make_federation(config, load("digits"), everyone=True)
    np.testing.assert_array_equal(federation.drift.cluster, np.tile(drift_pattern("sudden", 10, num_steps=2), 2))


def test_a_sweep_refuses_drift():
    with pytest.raises(ValueError, match="drift must be left out of a sweep"):
        jfcl.experiments.run_sweep(Config("fedavg", drift="Y"), {"lr": [0.1]})


def test_hostile_clients_are_left_out_of_the_tests_at_every_step():
    parts = jfcl.experiments.setup(Config("fedavg", drift="sudden", drift_steps=3, attack="label_zero", malicious=0.2))
    assert (parts.federation.drift.tests(0).size[parts.malicious] == 0).all() and parts.malicious.sum() == 2
