"""The trackers against the real libraries, without a network: what they keep is read back."""

import json
import shutil
import struct
import sys
import time

import jax
import pytest
from still_method import still

import jfcl
from jfcl import cli
from jfcl.experiments import trackers
from jfcl.simulation.callbacks import CallbackError, End, RunInfo
from jfcl.testing import problem

CLIENTS, _, TASK, _ = problem()
STILL = still(TASK, lambda key: jax.tree.map(lambda x: x[None], TASK.init(key)), loss=lambda t: t)
ROUNDS, NAMES = 5, ("loss", "train_loss", "bytes_up")
RUN = RunInfo("local", {}, 1, [], 0, [], None, dict)


def simulate(tracker, out, **options):
    options = {"num_rounds": ROUNDS, "test_clients": CLIENTS, "config": {"lr": 0.5}} | options
    return jfcl.simulate(STILL, CLIENTS, key=jax.random.key(3), out=out, callbacks=[tracker], **options)


def interrupted(make, out):
    """A run that is stopped after round 4, and continues at round 2, since its last checkpoint is lost."""
    simulate(make(), out, stop_after=2)
    simulate(make(), out, stop_after=4, resume=True)
    shutil.rmtree(out / "checkpoints" / "4")
    return simulate(make(), out, resume=True)


def expected(history):
    return {name: dict(zip(*(x.tolist() for x in history.series(name)), strict=True)) for name in NAMES}


def events_of(folder):
    """The events of a folder in the order of its files: records of a length, a checksum, the data, a checksum."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    # events.out.tfevents.SECONDS.HOST.ROUND: two parts of a run may begin at one round, or in one second.
    for file in sorted(folder.iterdir(), key=lambda file: (int(file.name.split(".")[3]), int(file.suffix[1:]))):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            found.append(Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return found


def curves(folder):
    """The curves of TensorBoard: the start of a session voids events of its step and later ones that came before."""
    found, texts = {}, {}
    for event in events_of(folder):
        if event.HasField("session_log"):
            found = {name: {t: v for t, v in of.items() if t < event.step} for name, of in found.items()}
        for value in event.summary.value:
            if value.HasField("tensor"):
                texts[value.tag.removesuffix("/text_summary")] = value.tensor.string_val[0].decode()
            else:
                assert event.step not in found.setdefault(value.tag, {})
                found[value.tag][event.step] = value.simple_value
    return found, texts


def test_tensorboard_continues_its_curves(tmp_path):
    pytest.importorskip("tensorboardX", reason="pip install 'jfcl[tensorboard]'")
    history = interrupted(trackers.TensorBoard, tmp_path)
    found, texts = curves(tmp_path / "tensorboard")
    for name, values in expected(history).items():
        assert found[name] == pytest.approx(values, rel=1e-6), name
    assert "| lr | 0.5 |" in texts["config"] and texts["ended"] == "finished: all rounds are done"


def test_tensorboard_shows_seeds_and_their_means(tmp_path):
    pytest.importorskip("tensorboardX", reason="pip install 'jfcl[tensorboard]'")
    tracker = trackers.TensorBoard(tmp_path / "events")
    tracker.on_start(RUN._replace(config={"by": "a|b"}))
    for t in (1, 2):
        tracker.on_records([{"seed": s, "round": t, "loss": t + s / 4, "cluster": [0]} for s in (0, 1)])
    tracker.on_end(End("finished", "all rounds are done", 2))
    found, texts = curves(tmp_path / "events")
    assert r"| by | a\|b |" in texts["config"]  # a bar would begin another cell
    assert found == {
        "loss": {1: 1.125, 2: 2.125},
        "seed_0/loss": {1: 1.0, 2: 2.0},
        "seed_1/loss": {1: 1.25, 2: 2.25},
    }


def wandb_records(file):
    """The records of a `.wandb` file: a LevelDB log after a header of 7 bytes, in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # no header fits into the rest of the block
            at += 32768 - at % 32768
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts, at = parts + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_wandb_continues_its_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="pip install 'jfcl[wandb]'")
    monkeypatch.setenv("WANDB_SILENT", "true")

    def make():
        time.sleep(1.1)  # wandb names the files of an offline part by the second of its beginning
        return trackers.WandB(mode="offline", project="tests")

    history = interrupted(make, tmp_path)
    identity = json.loads((tmp_path / "trackers.json").read_text())["wandb"]
    found, configs, ends, exits = {name: {} for name in NAMES}, [], [], []
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert [file.name for file in files] == [f"run-{identity}.wandb"] * 3  # `wandb sync` joins them
    for file in files:
        for record in wandb_records(file):
            if record.HasField("run"):
                assert (record.run.run_id, record.run.project) == (identity, "tests")
                configs.append({item.key: json.loads(item.value_json) for item in record.run.config.update})
            row = {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
            for name in NAMES if row else ():
                assert found[name].setdefault(row["round"], row[name]) == row[name]  # rounds that run again: the same
            ends += [json.loads(i.value_json) for i in record.summary.update if "ended" in (i.key, *i.nested_key)]
            exits += [record.exit.exit_code] if record.HasField("exit") else []
    assert found == expected(history)
    assert any(config.get("lr") == 0.5 for config in configs) and exits == [0] * len(files)
    assert ends[-1] == "finished: all rounds are done"


@pytest.mark.parametrize("store", ["sqlite", "files"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
def test_mlflow_continues_its_run(store, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="pip install 'jfcl[mlflow]'")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = f"sqlite:///{tmp_path}/mlflow.db" if store == "sqlite" else (tmp_path / "mlruns").as_uri()
    history = interrupted(lambda: trackers.MLflow(uri, "tests"), tmp_path / "run")
    client = mlflow.MlflowClient(uri)
    (kept,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert kept.info.run_id == json.loads((tmp_path / "run" / "trackers.json").read_text())["mlflow"]
    assert (kept.info.run_name, kept.info.status, kept.data.params) == ("run", "FINISHED", {"lr": "0.5"})
    assert kept.data.tags["ended"] == "finished: all rounds are done"
    for name, values in expected(history).items():
        found = {(metric.step, metric.value) for metric in client.get_metric_history(kept.info.run_id, name)}
        assert found == set(values.items()), name

    # An error, and several seeds.
    class Failing:
        def on_records(self, records):
            raise RuntimeError("no")

    tracker = trackers.MLflow(uri, "tests")
    with pytest.raises(CallbackError, match="Failing"):
        jfcl.simulate(
            STILL, CLIENTS, key=jax.random.split(jax.random.key(0)), num_rounds=2, callbacks=[tracker, Failing()]
        )
    failed = client.search_runs([kept.info.experiment_id], order_by=["attributes.start_time DESC"])[0]
    assert failed.info.status == "FAILED" and failed.data.tags["ended"].startswith("failed: CallbackError: callback")
    assert {"train_loss", "seed_0/train_loss", "seed_1/train_loss"} <= failed.data.metrics.keys()


@pytest.mark.parametrize("name, package", [("tensorboard", "tensorboardX"), ("wandb", "wandb"), ("mlflow", "mlflow")])
def test_a_tracker_that_is_not_installed_says_how(name, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=rf"track must be .* installed, got '{name}' .*: pip install 'jfcl\[{name}\]'"):
        trackers.tracker(name)


def test_damaged_identities_are_named(tmp_path):
    class Library:
        MlflowClient = staticmethod(lambda uri: None)

    tracker = trackers.MLflow.__new__(trackers.MLflow)
    tracker._library, tracker._uri = Library, None
    (tmp_path / "trackers.json").write_text("{")
    with pytest.raises(CallbackError, match=r"MLflow\.on_start raised ValueError: .*trackers\.json"):
        simulate(tracker, tmp_path)


@pytest.mark.slow
def test_the_command_line_tracks(tmp_path, capsys):
    pytest.importorskip("tensorboardX", reason="pip install 'jfcl[tensorboard]'")
    out = tmp_path / "run"
    command = ["run", "local", "--clients", "4", "--rounds", "2", "--quiet", "--out", str(out)]
    assert cli.main([*command, "--track", "tensorboard"]) == 0
    found, texts = curves(out / "tensorboard")
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert list(found["accuracy"].values()) == pytest.approx([row["accuracy"] for row in records], rel=1e-6)
    assert "| method | local |" in texts["config"]
    assert f"curves: {out}/tensorboard; to see them: tensorboard --logdir {out}/tensorboard" in capsys.readouterr().err


def test_tensorboard_needs_a_folder(tmp_path, monkeypatch, capsys):
    pytest.importorskip("tensorboardX", reason="pip install 'jfcl[tensorboard]'")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "local", "--clients", "4", "--rounds", "2", "--quiet", "--track", "tensorboard"]) == 2
    assert "--track tensorboard needs --out DIR" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(ValueError, match="folder must be given"):
        trackers.TensorBoard().on_start(RUN)
    assert not list(tmp_path.iterdir())


class Recorder:
    """A library of a tracker: every attribute and call is itself, but for those that are given."""

    def __init__(self, **given):
        self.__dict__.update(given)

    def __getattr__(self, name):
        return Recorder()

    def __call__(self, *_, **__):
        return self


@pytest.mark.parametrize(
    "uri, said",
    [
        (
            "sqlite:////a b/x.db",
            "x.db, experiment jfcl; to see them: mlflow ui --backend-store-uri 'sqlite:////a b/x.db'",
        ),
        ("https://host:5000", "curves: https://host:5000, experiment jfcl\n"),
    ],
)
def test_mlflow_says_where_its_curves_are(uri, said, monkeypatch, capsys):
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    monkeypatch.setitem(sys.modules, "mlflow", Recorder(get_tracking_uri=lambda: uri))
    trackers.MLflow().on_start(RUN)
    assert said in capsys.readouterr().err


def test_mlflow_takes_the_metrics_of_many_seeds_in_several_calls(monkeypatch):
    """More than 1,000 in one call are refused."""
    sent, entities = [], Recorder(Metric=lambda name, *_: name)
    client = Recorder(log_batch=lambda _, metrics=(), params=(): sent.append(metrics))
    library = Recorder(MlflowClient=lambda uri: client, entities=entities, get_tracking_uri=lambda: "https://x")
    monkeypatch.setitem(sys.modules, "mlflow", library)
    tracker = trackers.MLflow()
    tracker.on_start(RUN)
    tracker.on_records([{"seed": s, "round": 1, "accuracy": 0.5, "loss": 1.0} for s in range(600)])
    assert [len(names) for names in sent] == [0, 1000, 202]
    assert len({name for names in sent for name in names}) == 1202


@pytest.mark.parametrize(
    "url, said", [(None, "curves: '/a b/offline-run'; to upload them"), ("https://x/y", "curves: https://x/y\n")]
)
def test_wandb_says_where_its_curves_are(url, said, monkeypatch, capsys):
    run = Recorder(url=url, dir="/a b/offline-run/files", summary={})
    monkeypatch.setitem(sys.modules, "wandb", Recorder(init=lambda **_: run))
    trackers.WandB().on_start(RUN)
    assert said in capsys.readouterr().err
