"""Folders that come from elsewhere: nothing outside of them is read or changed, nothing is waited for or believed."""

import csv
import hashlib
import io
import json
import os
import shutil
import socket
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import jfcl
from jfcl import cli, plots
from jfcl.core import files
from jfcl.core.plain import check_plain, open_plain
from jfcl.core.texts import csv_bytes, printable
from jfcl.data import ClientStore
from jfcl.experiments import Config, load_run, read_run, report, run, run_sweep
from jfcl.experiments.comparison import MOST_DRAWN, by_name, results_csv
from jfcl.simulation.folder import RunFolder, identity

OPTIONS = {"clients": 4, "clusters": 2, "rounds": 2, "model": "linear", "examples_per_client": 8}
ODD = ("link", "link to a folder", "broken link", "fifo", "socket")
# A name in each place of a run's folder that jfcl reads or writes.
NAMES = ["config.json", "config.json.tmp", "metrics.jsonl", "summary.json", "summary.json.tmp", "clients.csv", "lock"]
NAMES += [
    "params.npz",
    "personal.npz",
    "report.html",
    "report.html.tmp",
    "plots",
    "plots/accuracy.png",
    "plots/a.png.tmp",
]
NAMES += ["checkpoints", "checkpoints/2", "checkpoints/2/about.json", "checkpoints/2/state.bin", "checkpoints/3.tmp"]
NAMES += ["trackers.json", "client_rows", "client_rows/rows.bin", "store", "tree.npz"]


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("swept") / "sweep"
    run_sweep(Config("fedavg", **OPTIONS | {"rounds": 1}), {"lr": [0.1, 0.2]}, out=folder)
    return folder


@pytest.fixture
def copy(finished_run, tmp_path):
    shutil.copytree(finished_run, tmp_path / "run")
    return tmp_path / "run"


def content(folder: Path) -> dict[str, tuple]:
    """Every name below a folder, with its kind and bytes; no link is followed and no FIFO read."""
    found = {}
    for path in sorted(folder.rglob("*")):
        at = os.lstat(path)
        link = os.readlink(path) if path.is_symlink() else ""
        data = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        found[str(path.relative_to(folder))] = (at.st_mode, link, data)
    return found


def make_odd(place: Path, kind: str, outside: Path) -> None:
    """Puts something that is no plain file or folder at `place`; links lead to a copy of what was there."""
    place.parent.mkdir(exist_ok=True)
    if place.exists():
        shutil.move(place, outside / "moved")
    else:
        (outside / "moved").write_bytes(b"a secret, or a file of the user")
    (outside / "folder").mkdir()
    (outside / "folder" / "mine").write_text("mine")
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "socket":
        here = os.getcwd()
        os.chdir(place.parent)  # names of sockets are short
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(place.name)
        os.chdir(here)
    else:
        names = {"link": "moved", "link to a folder": "folder", "broken link": "none"}
        place.symlink_to(outside / names[kind])


@pytest.mark.slow_cases("link", "link to a folder", "broken link", "socket")
@pytest.mark.parametrize("kind", ODD)
def test_what_is_no_plain_file_is_refused_wherever_it_is(kind, finished_run, tmp_path, capsys):
    """By every command, before anything is changed; on a FIFO, a command that reads would hang."""
    for i, name in enumerate(NAMES):
        folder, outside = tmp_path / f"{i}" / "run", tmp_path / f"{i}" / "outside"
        outside.mkdir(parents=True)
        shutil.copytree(finished_run, folder)
        make_odd(folder / name, kind, outside)
        before = content(tmp_path / f"{i}")
        flags = [part for key, value in OPTIONS.items() for part in (f"--{key.replace('_', '-')}", str(value))]
        for command in (["report"], ["compare"], ["run", "fedavg", *flags, "--resume", "--out"]):
            assert cli.main([*command, str(folder)]) == 2, (command[0], name)
            said = " ".join(capsys.readouterr().err.split())
            assert "must be a file or a folder, but it is a " in said and name.split("/")[0] in said, said
        with pytest.raises(ValueError, match="must be a file or a folder, but it is a "):
            load_run(folder)
        assert content(tmp_path / f"{i}") == before, name


@pytest.mark.parametrize("kind", ODD)
def test_a_new_run_writes_through_nothing_that_is_there(kind, tmp_path):
    for i, name in enumerate(["config.json.tmp", "lock", "plots", "checkpoints", "metrics.jsonl", "report.html.tmp"]):
        folder, outside = tmp_path / f"{i}" / "run", tmp_path / f"{i}" / "outside"
        folder.mkdir(parents=True)
        outside.mkdir()
        make_odd(folder / name, kind, outside)
        before = content(tmp_path / f"{i}")
        with pytest.raises(ValueError, match="must be a file or a folder, but it is a "):
            run(Config("fedavg", **OPTIONS), out=folder)
        assert content(tmp_path / f"{i}") == before


def test_the_folder_itself_may_be_a_link(copy, tmp_path):
    (tmp_path / "link").symlink_to(copy, target_is_directory=True)
    (copy / "wandb").mkdir()
    (copy / "wandb" / "latest-run").symlink_to(copy / "nowhere")  # as a tracker leaves it
    assert cli.main(["report", str(tmp_path / "link")]) == 0
    assert len(load_run(tmp_path / "link").cluster) == 4


def test_a_second_name_of_a_file_is_not_written_to(copy, tmp_path):
    for name in ("lock", "metrics.jsonl"):
        (tmp_path / name).write_bytes((copy / name).read_bytes())
        (copy / name).unlink()
        os.link(tmp_path / name, copy / name)
        before = (tmp_path / name).read_bytes()
        with pytest.raises(ValueError, match="is a hard link: copy the folder"):
            run(Config("fedavg", **OPTIONS | {"rounds": 3}), out=copy, resume=True)
        assert (tmp_path / name).read_bytes() == before
        (tmp_path / name).unlink()
    (tmp_path / "mine").write_text("mine")
    os.link(tmp_path / "mine", copy / "report.html.tmp")
    report(copy)
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ODD)
def test_sweeps_stores_and_experiments_are_read_like_runs(kind, tmp_path):
    config, grid = Config("fedavg", **OPTIONS | {"rounds": 1}), {"lr": [0.1, 0.2]}
    run_sweep(config, grid, out=tmp_path / "sweep")
    ClientStore.create(tmp_path / "store", [{"x": np.ones((2, 3), np.float32)}] * 2)
    (tmp_path / "outside").mkdir()
    for folder, name, read in (
        ("sweep", "setting.json", lambda: run_sweep(config, grid, out=tmp_path / "sweep", resume=True)),
        ("sweep", "cells/00001.json", lambda: run_sweep(config, grid, out=tmp_path / "sweep", resume=True)),
        ("sweep", "lock", lambda: run_sweep(config, grid, out=tmp_path / "sweep", resume=True)),
        ("store", "x.npy", lambda: ClientStore.open(tmp_path / "store")),
        ("store", "store.json", lambda: ClientStore.open(tmp_path / "store")),
    ):
        shutil.copytree(tmp_path / folder, tmp_path / "whole")
        make_odd(tmp_path / folder / name, kind, tmp_path / "outside")
        before = content(tmp_path)
        with pytest.raises(ValueError, match="must be a file or a folder, but it is a "):
            read()
        assert content(tmp_path) == before
        shutil.rmtree(tmp_path / folder)
        shutil.rmtree(tmp_path / "outside")
        (tmp_path / "outside").mkdir()
        shutil.move(tmp_path / "whole", tmp_path / folder)


def test_devices_and_folders_are_no_files(tmp_path):
    with pytest.raises(ValueError, match="must be a file, but it is a device"):
        open_plain("/dev/null")
    with pytest.raises(ValueError, match="must be a file, but it is a folder"):
        open_plain(tmp_path)
    check_plain(tmp_path / "nowhere")


# ---- What a file says ------------------------------------------------------------------------------------------------


def test_a_json_file_without_its_digest_is_refused(copy, swept, tmp_path):
    shutil.copytree(swept, tmp_path / "sweep")
    ClientStore.create(tmp_path / "store", [{"x": np.ones((2, 3), np.float32)}])
    places = [copy / "summary.json", copy / "checkpoints" / "2" / "about.json", tmp_path / "sweep" / "setting.json"]
    places += [
        tmp_path / "sweep" / "sweep.json",
        tmp_path / "sweep" / "cells" / "00000.json",
        tmp_path / "store/store.json",
    ]
    for file in places:
        value = json.loads(file.read_text())
        del value["sha256"]
        file.write_text(json.dumps(value))
        with pytest.raises(ValueError, match="is damaged: it lacks its digest"):
            files.read_json(file)


ODD_STORES = {
    "a name that leads out": lambda s: [s[part].update({"../x": s[part].pop("x")}) for part in ("files", "fields")],
    "a whole path": lambda s: s["files"].update({"/tmp/x": s["files"]["x"]}),
    "no files": lambda s: s.pop("files"),
    "files as a list": lambda s: s.update(files=[]),
    "no fields": lambda s: s.update(fields={}),
    "a field of text": lambda s: s["fields"].update(x="float32"),
    "a shape of text": lambda s: s["fields"]["x"].update(shape="3"),
    "an unknown type": lambda s: s["fields"]["x"].update(dtype="complex64"),
    "a type of objects": lambda s: s["fields"]["x"].update(stored="O"),
    "no unit": lambda s: s["fields"]["x"].update(per_unit=0),
    "another entry": lambda s: s["fields"]["x"].update(more=1),
    "bytes as text": lambda s: s["files"]["x"].update(bytes="24"),
    "no digest of a file": lambda s: s["files"]["x"].pop("sha256"),
    "classes of text": lambda s: s.update(num_classes="ten"),
    "made as a list": lambda s: s.update(made=[1]),
    "a number for the description": lambda s: s.update(description=3),
    "nothing": lambda s: s.clear(),
}  # fmt: skip


@pytest.mark.parametrize("how", ODD_STORES)
def test_an_odd_store_is_a_sentence(how, tmp_path):
    ClientStore.create(tmp_path / "s", [{"x": np.ones((2, 3), np.float32)}, {"x": np.ones((1, 3), np.float32)}])
    shutil.copy(tmp_path / "s" / "x.npy", tmp_path / "x.npy")
    value = json.loads((tmp_path / "s" / "store.json").read_text())
    ODD_STORES[how](value)
    (tmp_path / "s" / "store.json").write_text(json.dumps(files.seal(value)))
    with pytest.raises(ValueError, match=r"store\.json"):
        ClientStore.open(tmp_path / "s")


def test_no_name_in_a_summary_leads_out(copy, tmp_path):
    read_run(copy / ".." / copy.name)  # the folder's own name is the user's
    (tmp_path / "mine.csv").write_text("mine")
    summary = json.loads((copy / "summary.json").read_text())
    summary["files"] = {"../mine.csv": hashlib.sha256(b"mine").hexdigest()}
    (copy / "summary.json").write_text(json.dumps(files.seal(summary)))
    for read in (read_run, report, load_run):
        with pytest.raises(ValueError, match="is none of the results of this run"):
            read(copy)


def test_another_version_is_named_and_nothing_changes(copy, capsys):
    config = json.loads((copy / "config.json").read_text()) | {"versions": {"jfcl": "0.1.7", "jax": "0.4"}}
    config |= {"option_of_before": 1}
    (copy / "config.json").write_text(json.dumps(config))
    summary = json.loads((copy / "summary.json").read_text()) | {"run": identity(config)}
    (copy / "summary.json").write_text(json.dumps(files.seal(summary)))
    before = content(copy)
    for command in (["report"], ["compare"], ["run", "--config", str(copy / "config.json"), "--resume", "--out"]):
        assert cli.main([*command, str(copy)]) == 2
        assert "was made by jfcl 0.1.7, and this is jfcl" in " ".join(capsys.readouterr().err.split())
    assert content(copy) == before


# ---- How it is shown -------------------------------------------------------------------------------------------------

NAME = "\x1b]0;owned\x07\x1b[2Jx\x9b31m\u202egpj\x7f"


def test_names_with_control_characters_are_written_as_escapes(copy, tmp_path, capsys):
    shutil.move(copy, tmp_path / NAME)
    assert cli.main(["report", str(tmp_path / NAME)]) == 0
    page = (tmp_path / NAME / "report.html").read_text()
    assert cli.main(["compare", str(tmp_path / NAME), "--out", str(tmp_path / "both")]) == 0
    (tmp_path / NAME / "summary.json").write_text("{}")
    assert cli.main(["compare", str(tmp_path / NAME)]) == 2
    said = capsys.readouterr()
    for text in (said.out, said.err, page, (tmp_path / "both" / "results.csv").read_text()):
        assert not [c for c in text if not (c.isprintable() or c == "\n")], repr(text)
        assert "owned" in text and r"\x1b]0;owned" in text
    assert plots.label("\x1b$") == r"\x1b\$" and list(by_name(["a\nb"])) == [r"a\nb"]


def test_no_cell_of_a_table_is_a_formula():
    texts = ['=HYPERLINK("x")', "+1+1", "-2+3", "@SUM(A1)", "\t=1", "\r=1", " =1", "＝1", "-", "plain", "a=b"]
    numbers = ["-0.5", "+1", "1e-3", "-inf", "nan", -0.5, 3, None]
    found = list(csv.reader(io.StringIO(csv_bytes([texts, numbers]).decode(), newline="")))
    assert found[0] == [f"'{text}" for text in texts[:9]] + ["plain", "a=b"]
    assert found[1] == ["-0.5", "+1", "1e-3", "-inf", "nan", "-0.5", "3", ""]
    summary = {"method": "@x", "mean": {"accuracy": -0.5}, "per_seed": [{"accuracy": -0.5, "rounds_to_recovery": None}]}
    assert results_csv({"=1+1": summary}).splitlines()[1] == "'=1+1,'@x,1,0,-0.5,"
    assert printable("a – b ± ü 手") == "a – b ± ü 手"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_a_terminal_that_lacks_a_character_ends_no_command(encoding, copy, monkeypatch):
    screen = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", screen)
    assert cli.main(["compare", str(copy), str(copy), "--out", str(copy.parent / "x")]) == 0
    screen.flush()
    assert b"run" in screen.buffer.getvalue()


# ---- Many ------------------------------------------------------------------------------------------------------------


def test_many_runs_are_one_small_page(copy, tmp_path, monkeypatch):
    runs = [tmp_path / f"r{i:02}" for i in range(MOST_DRAWN + 2)]
    for folder in runs:
        os.symlink(copy, folder)  # a user's own names
    drawn = []
    monkeypatch.setattr(plots, "png", lambda figure: drawn.append(figure) or b"\x89PNG\r\n\x1a\n" + bytes(16))
    page = report(runs, out=tmp_path / "many.html").read_text()
    assert len(drawn) == 4 and len(drawn[0].axes[0].lines) == MOST_DRAWN
    assert f"first {MOST_DRAWN} of the {len(runs)} runs" in page and page.count('<th scope="row">r21') == 1


@pytest.mark.parametrize("runs", [[{"seed": 0, "round": 1, "loss": 1.0}], {"a": "history"}])
def test_curves_take_records_by_name(runs):
    with pytest.raises(ValueError, match="runs must be a dict of records by name, such as"):
        plots.curves(runs)


def test_curves_of_many_rounds_have_the_first_and_the_last():
    records = [{"seed": s, "round": t, "loss": float(t + s)} for t in range(1, 30_001) for s in (0, 1)]
    (line,) = plots.curves({"a": records}, "loss").axes[0].lines
    x, y = line.get_data()
    assert len(x) == plots.MOST_POINTS and (x[0], x[-1]) == (1, 30_000) and np.array_equal(y, x + 0.5)


# ---- What is written, or not -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_extension_that_cannot_write_leaves_the_finished_run(tmp_path, monkeypatch):
    clients, cluster, task, training = jfcl.testing.problem()
    options = {"key": jax.random.key(0), "true_cluster": cluster, "checkpoint_seconds": 0.0, "out": tmp_path}
    jfcl.simulate(jfcl.fedavg(task, training), clients, num_rounds=2, **options)
    before = {name: data for name, data in content(tmp_path).items() if name != "lock"}

    def full(*_):
        raise OSError(28, "No space left on device")

    for at in ("jfcl.simulation.folder.write_leaves", "jfcl.simulation.folder.RunFolder._add"):
        with monkeypatch.context() as patched:
            patched.setattr(at, full)
            with pytest.raises(OSError, match="No space left"):
                jfcl.simulate(jfcl.fedavg(task, training), clients, num_rounds=4, resume=True, **options)
        after = {name: data for name, data in content(tmp_path).items() if name != "lock"}
        assert {n for n in {*before, *after} if before.get(n) != after.get(n)} <= {"config.json"}
        assert read_run(tmp_path)[0]["num_rounds"] == 2
    history = jfcl.simulate(jfcl.fedavg(task, training), clients, num_rounds=4, resume=True, **options)
    assert [r["round"] for r in RunFolder(tmp_path).records()] == [1, 2, 3, 4] and history.rounds == 4


def test_a_refused_resumption_of_a_sweep_changes_nothing(swept, tmp_path):
    config, grid = Config("fedavg", **OPTIONS | {"rounds": 1}), {"lr": [0.1, 0.2]}
    shutil.copytree(swept, tmp_path / "s")
    (tmp_path / "s" / "cells" / "00001.json").unlink()
    (tmp_path / "s" / "cells" / "00001.json").mkdir()
    before = content(tmp_path)
    with pytest.raises(ValueError, match=r"00001\.json must be a file"):
        run_sweep(config, grid, out=tmp_path / "s", resume=True)
    assert content(tmp_path) == before
    (tmp_path / "s" / "cells" / "00001.json").rmdir()
    before = content(tmp_path)
    with pytest.raises(ValueError, match="holds another sweep"):
        run_sweep(config, {"lr": [0.1, 0.3]}, out=tmp_path / "s", resume=True)
    assert content(tmp_path) == before
