"""Callbacks of `simulate`: calls, early stopping, errors; results stay the same bits."""

import json
import math
import signal
import sys
import types

import jax
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import jfcl
from jfcl import cli
from jfcl.core import Algorithm
from jfcl.data import ClientStore
from jfcl.experiments import trackers
from jfcl.simulation.callbacks import CallbackError, EarlyStopping, End
from jfcl.testing import problem

CLIENTS, CLUSTER, TASK, TRAINING = problem()
FEDAVG = jfcl.fedavg(TASK, TRAINING)
DITTO = jfcl.ditto(TASK, TRAINING)
STORE = ClientStore.from_clients(CLIENTS, cluster=CLUSTER)
ROUNDS = 6


def simulate(*callbacks, algorithm=FEDAVG, **options):
    options = {"key": jax.random.key(3), "num_rounds": ROUNDS, "test_clients": CLIENTS} | options
    return jfcl.simulate(algorithm, CLIENTS, callbacks=list(callbacks), **options)


def population(*callbacks, **options):
    people = jfcl.Population(STORE, cohort=4, test_clients=STORE)
    options = {"key": jax.random.key(3), "num_rounds": ROUNDS} | options
    return jfcl.simulate(DITTO, people, callbacks=list(callbacks), **options)


RUNS = {"clients": simulate, "population": population}
WHOLE = {}  # uninterrupted runs without callbacks


def whole(name):
    if name not in WHOLE:
        WHOLE[name] = RUNS[name]()
    return WHOLE[name]


def same(a, b):
    """Asserts that two histories are equal bit for bit, except for times."""
    for x, y in zip(jax.tree.leaves((a.state, a.clients)), jax.tree.leaves((b.state, b.clients)), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    assert (a.records, a.rounds, a.ended) == (b.records, b.rounds, b.ended)


def files_of(folder):
    """The run's files by name, without times and the process."""
    timed = ("lock", "summary.json")
    found = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    found = {name: content for name, content in found.items() if name not in timed}
    for name in [name for name in found if name.endswith("about.json")]:
        about = json.loads(found[name])
        del about["totals"]["time"], about["sha256"]
        found[name] = about
    return found


class States(jfcl.callbacks.Callback):
    """Reads the state after every evaluation, and alters what it is given."""

    def on_start(self, run):
        self.run, self.states = run, []

    def on_records(self, records):
        self.states.append(jax.tree.map(np.copy, self.run.state()))
        jax.tree.map(lambda x: x.fill(0), self.run.state())


@pytest.mark.parametrize("name", RUNS)
def test_a_callback_reads_the_state(name):
    states = States()
    history = RUNS[name](states)
    same(history, whole(name))
    assert len(states.states) == ROUNDS
    if name == "clients":
        for x, y in zip(jax.tree.leaves(states.states[-1]), jax.tree.leaves(history.state), strict=True):
            np.testing.assert_array_equal(x[0], np.asarray(y))
        jax.tree.map(np.testing.assert_array_equal, states.run.state(), states.states[-1])  # also after the run
        first = simulate(num_rounds=1).state.params
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda x: x[0], states.states[0].params), first)


class Recorder:
    """Records the calls, and alters all that it is given."""

    def __init__(self):
        self.calls = []

    def on_start(self, run):
        self.calls.append(("start", run._replace(config=dict(run.config), records=list(run.records))))
        run.config.clear()
        run.records.clear()

    def on_records(self, records):
        self.calls.append(("records", [(row["seed"], row["round"], row["loss"]) for row in records]))
        for row in records:
            row.clear()

    def on_checkpoint(self, round, folder):
        assert (folder / "checkpoints" / str(round) / "about.json").exists()
        self.calls.append(("checkpoint", round))

    def on_end(self, end):
        self.calls.append(("end", end))


class At:
    """Answers `answer` in round `round`, or raises it."""

    def __init__(self, round, answer, method="on_records"):
        def act(*values):
            done = {"on_records": lambda: values[0][0]["round"], "on_checkpoint": lambda: values[0]}
            if done.get(method, lambda: round)() == round:
                if isinstance(answer, BaseException):
                    raise answer
                return answer

        setattr(self, method, act)


# ---- The calls, and the results -------------------------------------------------------------------------------------


@pytest.mark.slow_cases("population")
@pytest.mark.parametrize("name", RUNS)
def test_all_methods_are_called_in_order_and_change_nothing(name, tmp_path):
    run, recorder = RUNS[name], Recorder()
    options = {"eval_every": 2, "checkpoint_seconds": 0.0, "description": "some run", "config": {"lr": 0.5}}
    plain = run(out=tmp_path / "plain", **options)
    tracked = run(recorder, out=tmp_path / "tracked", **options)
    same(plain, tracked)
    assert files_of(tmp_path / "plain") == files_of(tmp_path / "tracked")

    start = recorder.calls[0][1]
    assert start.config["lr"] == 0.5 and (start.description, start.num_rounds) == ("some run", ROUNDS)
    assert (start.seeds, start.round, start.records, start.folder) == ([0], 0, [], tmp_path / "tracked")
    loss = {row["round"]: row["loss"] for row in plain.records}
    expected = []
    for t in range(1, ROUNDS + 1):
        expected += [("records", [(0, t, loss[t])])] if t % 2 == 0 else []
        expected += [("checkpoint", t)] if ("checkpoint", t) in recorder.calls else []  # after blocks, by the clock
    assert ("checkpoint", ROUNDS) in expected
    assert recorder.calls[1:] == [*expected, ("end", End("finished", "all rounds are done", ROUNDS))]


def test_a_resumed_run_hands_over_its_records(tmp_path):
    recorder = Recorder()
    stopped = simulate(out=tmp_path, stop_after=2)
    assert stopped.ended == "stop_after is 2 rounds"
    simulate(recorder, out=tmp_path, resume=True)
    start = recorder.calls[0][1]
    assert start.round == 2 and start.records == stopped.records
    assert [call[1][0][1] for call in recorder.calls if call[0] == "records"] == [3, 4, 5, 6]


def test_the_end_is_reported_after_ctrl_c_and_after_divergence():
    def interrupt(records):
        signal.raise_signal(signal.SIGINT)

    first, second = Recorder(), Recorder()
    with pytest.raises(KeyboardInterrupt):
        simulate(first, types.SimpleNamespace(on_records=interrupt))
    assert first.calls[-1] == ("end", End("interrupted", "interrupted by Ctrl-C", 1))

    def step(key, state, clients):
        state, metrics = FEDAVG.step(key, state, clients)
        return state._replace(params=jax.tree.map(lambda p: p * np.float32(np.inf), state.params)), metrics

    with pytest.raises(jfcl.DivergedError) as raised:
        simulate(second, algorithm=Algorithm(FEDAVG.init, step, TASK))
    assert second.calls[-1] == ("end", End("failed", f"DivergedError: {raised.value}", 0))


# ---- Early stopping -------------------------------------------------------------------------------------------------


@given(
    st.lists(st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, math.nan]), min_size=2, max_size=2), max_size=12),
    st.integers(1, 4),
    st.integers(1, 3),
    st.booleans(),
)
@example([[math.nan, math.nan]], 1, 2, False)
def test_early_stopping_is_its_definition(values, patience, every, lower):
    """The first evaluation that is `patience` rounds after the last maximum of every seed was first reached.

    Where there was no number yet, the rounds since the first evaluation count.
    """
    stopping = EarlyStopping(patience=patience, metric="loss" if lower else "score")
    name, sign = ("loss", -1) if lower else ("score", 1)
    for i in range(len(values)):
        done, seen = (i + 1) * every, sign * np.array(values[: i + 1])
        lasts = [(np.nanargmax(seen[:, s]) + 1) * every if not np.isnan(seen[:, s]).all() else every for s in range(2)]
        answer = stopping.on_records([{"seed": s, "round": done, name: values[i][s]} for s in range(2)])
        waited = done - max(lasts)
        assert (answer is not None) == (waited >= patience)
        if answer is not None:
            assert answer == f"{name} has not improved for {waited} rounds, since round {max(lasts)}"


@pytest.mark.parametrize("name", ["calibration_error", "rmse", "mae", "nll"])
def test_a_lower_error_is_better(name):
    stopping = EarlyStopping(patience=1, metric=name)
    errors = [{"seed": 0, "round": t, name: error} for t, error in ((1, 0.5), (2, 0.25), (3, 0.375))]
    assert [stopping.on_records([row]) is None for row in errors] == [True, True, False]


def test_a_margin_leaves_out_small_changes():
    stopping, answers = EarlyStopping(patience=2, metric="accuracy", margin=0.1), []
    for t, value in enumerate([0.5, 0.55, 0.61, 0.62, 0.7], 1):
        answers.append(stopping.on_records([{"seed": 0, "round": t, "accuracy": value}]))
    assert [answer is None for answer in answers] == [True, True, True, True, False]  # 0.61 is the last improvement


@pytest.mark.slow_cases("population")
@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_is_stopped_early_can_be_resumed(name, tmp_path):
    run, reason = RUNS[name], "loss has not improved for 2 rounds, since round 1"
    losses = [row["loss"] for row in whole(name).records]
    assert max(losses[1:]) < losses[0]

    def stopping():
        return EarlyStopping(patience=2, metric="loss", lower_is_better=False)

    # It ends at the same round, with the same bits, in one part and in several.
    early = run(stopping(), out=tmp_path / "a")
    assert (early.rounds, early.ended) == (3, reason)
    assert early.records == whole(name).records[:3]
    run(stopping(), out=tmp_path / "b", stop_after=1)
    same(run(stopping(), out=tmp_path / "b", resume=True), early)
    # Resumed again, it has ended already.
    recorder = Recorder()
    same(run(recorder, stopping(), out=tmp_path / "b", resume=True), early)
    assert [call[0] for call in recorder.calls] == ["start", "end"]
    # Without the callback, it continues, and equals a run that never had one.
    same(run(out=tmp_path / "b", resume=True), whole(name))


def test_a_text_ends_a_run_at_an_evaluated_round_alone(tmp_path):
    enough = At(None, "enough", "on_start")
    history = simulate(enough, eval_every=4)
    assert (history.rounds, history.ended, len(history.records)) == (4, "enough", 1)
    simulate(out=tmp_path, eval_every=4, stop_after=5)
    assert simulate(enough, out=tmp_path, eval_every=4, resume=True).rounds == ROUNDS  # not 5, without records
    assert simulate(At(ROUNDS, "enough")).ended == "all rounds are done"


@pytest.mark.parametrize("method", ["on_checkpoint", "on_end"])
def test_what_other_methods_return_does_not_count(method, tmp_path):
    returning = At(2, "done", method)
    history = simulate(returning, out=tmp_path, stop_after=2, checkpoint_seconds=0.0)
    assert history.ended == "stop_after is 2 rounds" and not (tmp_path / "summary.json").exists()
    history = simulate(At(3, 0, method), out=tmp_path, resume=True, checkpoint_seconds=0.0)
    assert (history.rounds, history.ended) == (ROUNDS, "all rounds are done")


# ---- Errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow_cases("on_checkpoint-2-population", "on_end-*-population", "on_start-0-population")
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("method, done", [("on_start", 0), ("on_records", 2), ("on_checkpoint", 2), ("on_end", ROUNDS)])
def test_a_callback_that_raises_is_named_and_the_run_resumes(name, method, done, tmp_path):
    recorder, run = Recorder(), RUNS[name]
    error = OSError("the server is gone")
    failing = At(done, error, method)
    with pytest.raises(CallbackError) as raised:
        run(recorder, failing, out=tmp_path, checkpoint_seconds=0.0)
    assert raised.value.__cause__ is error
    assert str(raised.value) == (
        f"callback At.{method} raised OSError: the server is gone, after round {done};"
        f" {tmp_path} is saved up to there, resume=True (--resume) continues"
    )
    end = recorder.calls[-1][1]
    assert (end.status, end.round) == ("finished" if method == "on_end" else "failed", done)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir() if p.name == str(done)] == [str(done)] * (done > 0)
    same(run(out=tmp_path, resume=True), whole(name))


def test_an_answer_of_another_type_is_an_error():
    with pytest.raises(CallbackError, match=r"At.on_records raised TypeError: it must return None or a text, not bool"):
        simulate(At(1, True))


def test_only_callbacks_that_began_are_ended():
    first, last = Recorder(), Recorder()
    with pytest.raises(CallbackError, match=r"At\.on_start raised ValueError: no, after round 0$"):
        simulate(first, At(0, ValueError("no"), "on_start"), last)
    assert [call[0] for call in first.calls] == ["start", "end"] and last.calls == []


@pytest.mark.parametrize(
    "callbacks, message",
    [
        (EarlyStopping(patience=2), "callbacks must be a list of callbacks, got <jfcl"),
        ([3], "callbacks must be objects, not classes, with at least one of the methods on_start, .*, got 3"),
        ([EarlyStopping], "callbacks must be objects, not classes, .*, got <class 'jfcl"),
        ([types.SimpleNamespace(on_end=3)], "callbacks must be objects, .*, got namespace"),
    ],
)
def test_bad_callbacks_are_refused(callbacks, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        jfcl.simulate(FEDAVG, CLIENTS, key=jax.random.key(0), num_rounds=2, callbacks=callbacks, out=tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"patience": 0}, "patience must be an integer, at least 1, got 0"),
        ({"patience": 2, "metric": 3}, "metric must be of type str, got 3"),
        ({"patience": 2, "margin": -1.0}, "margin must be 0 or more, got -1.0"),
    ],
)
def test_early_stopping_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        EarlyStopping(**options)


def test_early_stopping_names_the_metrics_that_there_are():
    with pytest.raises(CallbackError, match=r"metric must be a number in the records: loss, .*'acuracy'"):
        simulate(EarlyStopping(patience=2, metric="acuracy"))


# ---- The command line -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_stops_early_and_continues(tmp_path, capsys, monkeypatch):
    out = tmp_path / "run"
    command = ["run", "fedavg", "--clients", "4", "--clusters", "2", "--eval-every", "1", "--quiet", "--lr", "0.5"]
    command += ["--rounds", "15", "--out", str(out)]

    # A tracker that fails.
    monkeypatch.setitem(trackers.TRACKERS, "wandb", lambda: At(1, OSError("no network")))
    assert cli.main([*command, "--track", "wandb"]) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert "jfcl: stopped: callback At.on_records raised OSError: no network, after round 1" in error

    # Early stopping.
    assert cli.main([*command, "--resume", "--patience", "1"]) == 0
    summary = json.loads((out / "summary.json").read_text())
    accuracy = [json.loads(line)["accuracy"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    done = next(t for t in range(2, 16) if accuracy[t - 1] <= max(accuracy[: t - 1]))  # the first without improvement
    assert summary["num_rounds"] == done < 15
    assert summary["ended"] == f"accuracy has not improved for 1 rounds, since round {done - 1}"
    assert f"ended after {done} of 15 rounds: {summary['ended']}" in " ".join(capsys.readouterr().out.split())

    # With more patience, as its own configuration then says.
    rounds = []
    look = types.SimpleNamespace(on_records=lambda records: rounds.append(len(records)))
    monkeypatch.setitem(trackers.TRACKERS, "wandb", lambda: look)
    more = ["--out", str(out), "--resume", "--quiet", "--patience", "3", "--track", "wandb"]
    assert cli.main(["run", "--config", str(out / "config.json"), *more]) == 0
    assert rounds
    assert json.loads((out / "config.json").read_text())["patience"] == 3
    assert json.loads((out / "summary.json").read_text())["num_rounds"] == done + len(rounds)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--monitor", "loss"], "monitor must be left out without --patience, got 'loss'"),
        (["--patience", "3", "--monitor", "los"], "did you mean 'loss'?"),
        (["--patience", "0"], "patience must be an integer, at least 1, got 0"),
        (["--track", "tensorbord"], "did you mean 'tensorboard'?"),
        (["--track", "mlflow"], "pip install 'jfcl[mlflow]'"),
    ],
)
def test_the_command_refuses(flags, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)  # not installed
    assert cli.main(["run", "fedavg", "--rounds", "2", "--out", str(tmp_path / "run"), *flags]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()
