"""What a run in Python leaves in its folder: checkpoints, and results that `jfcl compare` and `jfcl report` read."""

import csv
import json
import warnings
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from still_method import still

import jfcl
from jfcl import cli
from jfcl.data import ClientStore
from jfcl.experiments import read_run
from jfcl.experiments.comparison import results_notes, results_rows
from jfcl.simulation import evaluation, progress
from jfcl.simulation import folder as runs
from jfcl.simulation.callbacks import EarlyStopping
from jfcl.simulation.results import finds_clusters, summarize_records
from jfcl.testing import problem

CLIENTS, CLUSTER, TASK, TRAINING = problem("classification")
FEDAVG, IFCA = jfcl.fedavg(TASK, TRAINING), jfcl.ifca(TASK, TRAINING, num_clusters=2)
KEYS = jax.vmap(jax.random.key)(jnp.arange(2, dtype=jnp.uint32))
N, ROUNDS = len(CLUSTER), 4


def models_of(count):
    return lambda key: {"w": jax.random.normal(key, (count, 4)), "b": jnp.zeros(count)}


ONE, TWO = (still(TASK, models_of(count)) for count in (1, 2))


def simulate(algorithm=ONE, **options):
    options = {"key": KEYS, "num_rounds": ROUNDS, "test_clients": CLIENTS, "true_cluster": CLUSTER} | options
    return jfcl.simulate(algorithm, CLIENTS, **options)


def test_a_run_in_python_leaves_its_results(tmp_path):
    history = simulate(TWO, out=tmp_path, seeds=[5, 6], config={"method": "mine", "lr": 0.5})
    summary, records = read_run(tmp_path)  # verifies the files
    assert records == history.records
    last = [row for row in records if row["round"] == ROUNDS]
    for name in ("accuracy", "worst_client_accuracy", "loss", "cluster_accuracy", "clusters_in_use", "bytes_up"):
        values = [row[name] for row in last]
        assert summary["mean"][name] == pytest.approx(np.mean(values)), name
        assert summary["std"][name] == pytest.approx(np.std(values, ddof=1)), name
        assert [row[name] for row in summary["per_seed"]] == values, name
    about = {"method": "mine", "dataset": None, "num_clients": N, "num_clusters": len(set(CLUSTER.tolist()))}
    about |= {"num_rounds": ROUNDS, "ended": history.ended, "seconds": history.seconds, "finds_clusters": True}
    assert {name: summary[name] for name in about} == about
    assert summary["client_steps_per_second"] == pytest.approx(history.client_steps / history.seconds)
    assert summary["device"] and summary["versions"]["jfcl"] == jfcl.__version__
    rows = list(csv.DictReader((tmp_path / "clients.csv").read_text().splitlines()))
    assert [(int(row["seed"]), int(row["client"])) for row in rows] == [(s, i) for s in (5, 6) for i in range(N)]
    assert [int(row["true_cluster"]) for row in rows] == 2 * CLUSTER.tolist()
    for name in ("examples", "cluster", "accuracy", "loss"):
        found = [float(row[name]) for row in rows]
        np.testing.assert_allclose(found, history.clients[name].reshape(-1), rtol=1e-5, err_msg=name)


@pytest.mark.slow
def test_only_runs_that_have_ended_have_results(tmp_path):
    options = {"out": tmp_path, "eval_every": 2}
    has = lambda: (tmp_path / "summary.json").exists()  # noqa: E731
    simulate(stop_after=2, **options)
    assert not has()
    wanted = simulate(resume=True, **options)
    summary = (tmp_path / "summary.json").read_bytes()
    assert read_run(tmp_path)[1] == wanted.records
    # A kill after the last checkpoint, and before the results.
    for name in ("summary.json", "clients.csv"):
        (tmp_path / name).unlink()
    simulate(resume=True, **options)
    read_run(tmp_path)
    again = (tmp_path / "summary.json").read_bytes()
    assert json.loads(summary)["per_seed"] == json.loads(again)["per_seed"]
    # A finished run that is resumed does nothing, so that its speed stays what it was.
    simulate(resume=True, **options)
    assert (tmp_path / "summary.json").read_bytes() == again
    # An extension; results of a caller's own.
    simulate(resume=True, **(options | {"num_rounds": 8, "stop_after": 5}))
    assert not has()
    simulate(resume=True, **(options | {"num_rounds": 8, "summary": False}))
    assert not has()
    assert json.loads((tmp_path / "config.json").read_text())["num_rounds"] == 8


@pytest.mark.slow
def test_a_run_that_a_callback_ends_is_finished(tmp_path):
    class Enough:
        def on_records(self, records):
            return "two are enough" if records[0]["round"] == 2 else None

    history = simulate(out=tmp_path, callbacks=[Enough()])
    summary, _ = read_run(tmp_path)
    assert (summary["num_rounds"], summary["ended"]) == (2, "two are enough") == (history.rounds, history.ended)


def test_runs_in_python_are_compared_and_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    simulate(out="runs/mean", config={"lr": 0.5}, callbacks=[EarlyStopping(patience=1, metric="loss", margin=10.0)])
    other = jax.random.split(jax.random.key(9), 2)  # makes no difference that a reader is told
    simulate(TWO, out="runs/clusters", key=other, config={"lr": 0.25, "method": "mine"})
    assert cli.main(["compare", "runs/mean", "runs/clusters"]) == 0
    printed = capsys.readouterr().out
    assert "different splits" not in printed
    right = [100 * row["cluster_accuracy"] for row in read_run("runs/clusters")[0]["per_seed"]]
    found = f"{np.mean(right):.1f}±{np.std(right, ddof=1):.1f}"
    mean, clusters = ([line.split() for line in printed.splitlines() if line.startswith(name)] for name in ("m", "c"))
    assert mean[0][3:5] == ["–", "–"] and clusters[0][3] == found  # one model finds none
    assert "they differ in lr: 0.5 (mean), 0.25 (clusters); rounds: 2 (mean), 4 (clusters)" in printed
    assert cli.main(["report", "runs/mean"]) == 0
    page = (tmp_path / "runs/mean/report.html").read_text()
    assert "Finished: 2 of 4 rounds." in page and "Not finished" not in page
    assert read_run("runs/mean")[0]["device"] in page and capsys.readouterr().err == ""


@pytest.mark.slow_cases("True")
@pytest.mark.parametrize("tests", [True, False])
def test_a_run_of_a_population_leaves_its_results(tests, tmp_path):
    store = ClientStore.from_clients(CLIENTS, cluster=CLUSTER)
    people = jfcl.Population(store, cohort=4, test_clients=store if tests else None, evaluate=[1, 3])
    history = jfcl.simulate(FEDAVG, people, key=KEYS[0], num_rounds=2, out=tmp_path)
    summary, records = read_run(tmp_path)
    assert records == history.records and summary["num_clients"] == N
    assert (summary["mean"]["accuracy"] is not None) == tests == (tmp_path / "clients.csv").exists()
    if tests:
        rows = list(csv.DictReader((tmp_path / "clients.csv").read_text().splitlines()))
        assert [(row["client"], row["true_cluster"]) for row in rows] == [(str(i), str(CLUSTER[i])) for i in (1, 3)]
    assert cli.main(["report", str(tmp_path)]) == 0
    assert "Not finished" not in (tmp_path / "report.html").read_text()


def test_true_clusters_that_are_unknown_are_left_out(tmp_path):
    simulate(out=tmp_path, true_cluster=None, test_clients=None, config={"method": "mine"})
    assert (tmp_path / "clients.csv").read_text().splitlines()[0] == "seed,client,examples,cluster"
    summary, _ = read_run(tmp_path)
    assert (summary["num_clusters"], summary["split_hash"], summary["mean"]["accuracy"]) == (None, None, None)
    assert cli.main(["report", str(tmp_path)]) == 0


# ---- Checkpoints -----------------------------------------------------------------------------------------------------


class Checkpoints:
    def __init__(self):
        self.rounds = []

    def on_checkpoint(self, round, folder):
        self.rounds.append(round)


@pytest.mark.parametrize("first, wanted", [(0.0, [1, ROUNDS]), (1e9, [ROUNDS])])
def test_the_first_checkpoint_is_early(first, wanted, tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "FIRST_CHECKPOINT", first)
    seen = Checkpoints()
    simulate(out=tmp_path, checkpoint_seconds=1e9, callbacks=[seen])
    assert seen.rounds == wanted
    # Of a run that is resumed there is one already.
    seen = Checkpoints()
    simulate(out=tmp_path, resume=True, num_rounds=ROUNDS + 3, checkpoint_seconds=1e9, callbacks=[seen])
    assert seen.rounds == [ROUNDS + 3]


@pytest.mark.parametrize("kind", ["clients", "population"])
def test_a_resumed_run_names_its_first_round(kind, tmp_path, capsys):
    def run(**options):
        options = {"out": tmp_path, "num_rounds": 2000, "progress": True} | options
        if kind == "clients":
            return simulate(**options)
        people = jfcl.Population(ClientStore.from_clients(CLIENTS), cohort=4)
        return jfcl.simulate(FEDAVG, people, key=KEYS[0], eval_every=9, **options)

    def said():
        return " ".join(capsys.readouterr().err.split())

    class Failing:
        def on_start(self, run):
            raise RuntimeError

    with pytest.raises(jfcl.callbacks.CallbackError):
        run(callbacks=[Failing()])
    assert "resum" not in said().replace("resume=True", "").replace("--resume", "")
    run(resume=True, stop_after=2)
    assert f"no checkpoint in {tmp_path} yet: beginning with the first round" in said()
    run(resume=True, stop_after=3)
    assert "resuming after round 2 of 2,000" in said()
    run(resume=True, stop_after=4, progress=False)
    assert said() == ""
    new = run(resume=True, stop_after=2, out=tmp_path / "new")  # a job that was put back before it began
    assert f"no checkpoint in {tmp_path / 'new'} yet: beginning with the first round" in said() and new.rounds == 2


# ---- A learning rate that is too high --------------------------------------------------------------------------------


def test_a_loss_that_grows_is_noted():
    wild = still(TASK, models_of(1), lambda t: jnp.where(t == 1, 1.0, 1e9))
    message = r"round 2, .* training loss, .*, is far above that of round 1, .*--lr"
    with pytest.warns(UserWarning, match=message) as warned:
        simulate(wild, num_rounds=2)
    assert warned[0].filename == __file__  # where `jfcl.simulate` was called


@pytest.mark.parametrize("loss, is_noted", [(24.0, True), (22.0, False), (float("inf"), True), (float("nan"), False)])
def test_a_loss_far_above_guessing_is_noted(loss, is_noted):
    algorithm = SimpleNamespace(task=SimpleNamespace(num_classes=10))  # guessing: 2.3
    subjects = evaluation.Subjects(algorithm, [0, 1], [], 0, None, None, None, choices=1)
    records = [{"seed": s, "round": t, "train_loss": loss if s else 1.0} for t in (1, 2) for s in (0, 1)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        progress.warn_if_loss_is_high(records, subjects)
        progress.warn_if_loss_is_high([], subjects)
    assert [
        f"round 2, seed 1: the training loss, {loss:.3g}, is far above that of guessing" in str(w.message) for w in said
    ] == [True] * is_noted


def test_notes_come_in_the_methods_order(recwarn):
    """That of a set would change with the seed of Python's hashes."""
    notes = {name: f"note {name}" for name in "hgfedcba"}
    algorithm = ONE._replace(entries=jfcl.core.types.Entries(notes=lambda row, is_last: dict(notes)))
    subjects = evaluation.Subjects(algorithm, [0], [], N, None, None, None, choices=1)
    progress.warn_once({"f"}, [{"seed": 0, "round": 1}], subjects)
    assert [str(w.message) for w in recwarn] == [f"round 1, seed 0: note {name}" for name in "hgedcba"]


def test_a_run_that_diverges_says_how_to_repeat_it(tmp_path):
    def exploding(key, state, clients):
        state, metrics = ONE.step(key, state, clients)
        return state._replace(params=jax.tree.map(lambda p: p * jnp.inf, state.params)), metrics

    algorithm = jfcl.Algorithm(ONE.init, exploding, TASK)
    with pytest.raises(jfcl.DivergedError, match=r"\(--lr\) .* another folder \(--out\), since .*x keeps this run$"):
        simulate(algorithm, out=tmp_path / "x")  # there is no checkpoint
    assert not runs.RunFolder(tmp_path / "x").rounds()
    with pytest.raises(jfcl.DivergedError, match=r"a lower learning rate \(--lr\) usually helps$"):
        simulate(algorithm)


def test_a_run_that_stopped_between_evaluations_cannot_end_there(tmp_path):
    simulate(out=tmp_path, eval_every=2, stop_after=3)
    with pytest.raises(ValueError, match="num_rounds must be more than the 3 rounds already done"):
        simulate(out=tmp_path, eval_every=2, num_rounds=3, resume=True)
    assert [row["round"] for row in simulate(out=tmp_path, eval_every=2, resume=True).records] == [2, 2, 4, 4]


@pytest.mark.parametrize("name", ["accuracy", "round", "seed", "cluster", "newcomer_loss", "asked"])
def test_metrics_with_the_names_of_results_are_refused(name):
    """A training accuracy would be shown as that on test examples; another round would make the records unreadable."""

    def named(key, state, clients):
        state, metrics = ONE.step(key, state, clients)
        return state, metrics | {name: jnp.float32(1.0)}

    with pytest.raises(ValueError, match=f"metrics must be other names: .*, got '{name}'"):
        simulate(jfcl.Algorithm(ONE.init, named, TASK))


@pytest.mark.parametrize("kind", ["clients", "population"])
def test_a_metric_with_the_name_of_the_methods_own_is_refused_before_the_run_begins(kind, tmp_path):
    store = jfcl.data.ClientStore.from_clients(CLIENTS)
    clients = CLIENTS if kind == "clients" else jfcl.Population(store, cohort=2, test_clients=store)
    options = {"key": KEYS[0], "num_rounds": 1, "out": tmp_path / "run"}
    options |= {"test_clients": CLIENTS} if kind == "clients" else {}
    with pytest.raises(ValueError, match=r"other names than those of the method's own .*, got 'bytes_up'"):
        jfcl.simulate(FEDAVG, clients, metrics={"bytes_up": jfcl.metrics.macro_f1}, **options)
    assert not (tmp_path / "run").exists()


def test_every_other_entry_of_a_record_is_such_a_name():
    history = simulate(newcomers=CLIENTS)
    shape = jax.eval_shape(ONE.step, KEYS[0], jax.eval_shape(ONE.init, KEYS[0], CLIENTS), CLIENTS)[1]
    others = {name for name in history.records[-1] if not name.startswith(evaluation.OF_NEWCOMERS)} - set(shape)
    names = set(evaluation.OF_RECORDS) | {"loss"}  # that of the test examples, in the place of the method's
    elsewhere = {"excluded", "perplexity", "loss", "clients", "step", "changed", "asked", "dropped", "cut", "seen"}
    elsewhere |= {"time", "silence", "init_rounds", "not_finite"}
    assert others <= names and names - others == elsewhere


def test_the_accuracy_of_newcomers_is_a_note_on_the_table(tmp_path):
    simulate(newcomers=CLIENTS, out=tmp_path)
    summary = read_run(tmp_path)[0]
    accuracy = [100 * row["newcomer_accuracy"] for row in summary["per_seed"]]
    text = f"{np.mean(accuracy):.1f}±{np.std(accuracy, ddof=1):.1f} % (a)"
    assert results_notes({"a": summary}) == [f"client acc. of newcomers: {text}"]


def test_rounds_that_test_examples_have_chosen_are_a_note_on_the_table(tmp_path):
    for metric in ("accuracy", "train_loss"):
        simulate(out=tmp_path / metric, callbacks=[EarlyStopping(patience=1, metric=metric)])
    summaries = {name: read_run(tmp_path / name)[0] for name in ("accuracy", "train_loss")}
    assert [summary["num_rounds"] for summary in summaries.values()] == [2, 2]
    [note] = results_notes(summaries)
    assert note == "early stopping chose the rounds by the test examples of these figures: accuracy (accuracy)"


@pytest.mark.slow
@pytest.mark.parametrize(("make", "clusters"), [(partial(jfcl.ifca, num_clusters=7), True), (jfcl.local_only, False)])
def test_clusters_of_one_client_each_are_clusters(make, clusters):
    history = simulate(make(TASK, TRAINING))
    n = history.clients["cluster"].shape[1]
    alone = history._replace(clients={"cluster": np.tile(np.arange(n), (2, 1))})
    assert finds_clusters(alone) is clusters


def test_a_resumption_with_other_seeds_or_names_of_them_is_refused(tmp_path):
    simulate(out=tmp_path, stop_after=2)
    for name, value in {"seeds": [4, 5], "key": jax.random.split(jax.random.key(9), 2)}.items():
        with pytest.raises(ValueError, match=rf"a run of another configuration \({name}"):
            simulate(out=tmp_path, resume=True, **{name: value})


def test_seeds_that_end_at_other_rounds_count_alike():
    ends = ((0, 3), (1, 2))
    rows = [{"seed": s, "round": t, "loss": 10.0 * s + t} for s, end in ends for t in range(1, end + 1)]
    found = summarize_records(rows)
    assert [row["loss"] for row in found["per_seed"]] == [3.0, 12.0] and found["mean"]["loss"] == 7.5
    assert [row["loss"] for row in summarize_records(rows, 3)["per_seed"]] == [3.0]


def test_rounds_after_the_last_one_that_all_seeds_have_reached_do_not_count():
    rows = [{"seed": s, "round": t, "cluster_accuracy": a} for s, t, a in ((0, 1, 1.0), (1, 1, 0.5), (0, 2, 0.5))]
    assert [row["rounds_to_recovery"] for row in summarize_records(rows, 1)["per_seed"]] == [1, None]


def test_a_method_without_steps_has_no_speed(tmp_path):
    def step(key, state, clients):
        state, metrics = ONE.step(key, state, clients)
        return state, {name: metrics[name] for name in ("loss", "bytes_up", "bytes_down")}

    simulate(jfcl.Algorithm(ONE.init, step, TASK), out=tmp_path)
    summary = read_run(tmp_path)[0]
    assert summary["client_steps_per_second"] is None and "–" not in results_rows({"mine": summary})[1][0][-2:]


def test_a_resumption_with_another_key_is_refused_beside_a_configuration(tmp_path):
    simulate(out=tmp_path, stop_after=2, config={"method": "mine"}, seeds=[4, 5])
    other = jax.random.split(jax.random.key(9), 2)
    with pytest.raises(ValueError, match=r"a run of another configuration \(key"):
        simulate(out=tmp_path, config={"method": "mine"}, key=other, resume=True)
    with pytest.raises(ValueError, match=r"a run of another configuration \(seeds"):
        simulate(out=tmp_path, config={"method": "mine"}, seeds=[4, 6], resume=True)
    history = simulate(out=tmp_path, config={"method": "mine"}, seeds=[4, 5], resume=True)
    assert [r["seed"] for r in history.records[-2:]] == [4, 5]


@pytest.mark.slow
def test_runs_without_an_evaluation_are_compared_by_their_training_loss(tmp_path):
    for name in ("a", "b"):
        jfcl.simulate(FEDAVG, CLIENTS, key=jax.random.key(0), num_rounds=2, out=tmp_path / name)
    assert cli.main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "both")]) == 0
    assert sorted(path.name for path in (tmp_path / "both").iterdir()) == [
        "methods.png",
        "results.csv",
        "train_loss.png",
    ]


@pytest.mark.slow_cases("population")
@pytest.mark.parametrize("kind", ["clients", "population"])
def test_results_of_every_client_in_every_round(kind, tmp_path):
    def run(**options):
        options |= {"out": tmp_path / "run", "num_rounds": 5, "eval_every": 2, "resume": True, "keep_clients": True}
        if kind == "clients":
            return simulate(TWO, **options)
        store = ClientStore.from_clients(CLIENTS, cluster=CLUSTER)
        people = jfcl.Population(store, cohort=4, test_clients=store, evaluate=[1, 3, 4])
        return jfcl.simulate(IFCA, people, key=KEYS[0], **options)

    run(stop_after=3)
    history = run(metrics={"wrong": lambda outputs, batch, real: (outputs.argmax(-1) != batch["y"]).mean(where=real)})
    rows = list(csv.DictReader((tmp_path / "run" / "clients_by_round.csv").read_text().splitlines()))
    last = list(csv.DictReader((tmp_path / "run" / "clients.csv").read_text().splitlines()))
    assert [row for row in rows if row["round"] == "5"] == [{"round": "5"} | row for row in last]
    for record in history.records:  # a record's means are those of its clients
        mine = [row for row in rows if (row["round"], row["seed"]) == (str(record["round"]), str(record["seed"]))]
        assert len(mine) == len(last) / len({row["seed"] for row in last})
        assert np.mean([float(row["loss"]) for row in mine]) == pytest.approx(record["loss"], rel=1e-5)
        assert [int(row["cluster"]) for row in mine] == record["clients"]["cluster"] == record["cluster"]
    assert {(row["round"], row["wrong"] == "") for row in rows} == {("2", True), ("4", False), ("5", False)}
