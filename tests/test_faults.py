"""Faults are injected, not imagined: crashes after every write, lost writes, full disks, flipped bits, two processes.

Two laws throughout: a resumed run ends with the bits of one that was not interrupted, or it is refused; and a refused
command leaves every byte of the folder as it was.
"""

import errno
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
import unittest
import warnings
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import jfcl
from jfcl.core import files
from jfcl.simulation import folder as runs
from jfcl.testing import problem

CLIENTS, CLUSTER, TASK, TRAINING = problem()
IFCA = jfcl.ifca(TASK, TRAINING, num_clusters=2)
ROUNDS = 4
WRITES = ("open", "write", "pwrite", "fsync", "rename", "replace", "unlink", "mkdir", "rmdir", "ftruncate")


def results(out, history):
    """The files that a finished run leaves, as `jfcl.experiments.run` writes them."""
    contents = {"clients.csv": b"seed,client\n", "plots/a.png": b"png", "params.npz": str(history.state).encode()}
    runs.write_results(Path(out), contents, {"num_rounds": history.rounds})


def run(out=None, *, rounds=ROUNDS, resume=False, stop_after=None):
    """A run of `rounds` rounds with a record and a checkpoint in each, and its results."""
    history = jfcl.simulate(
        IFCA,
        CLIENTS,
        key=jax.random.key(3),
        num_rounds=rounds,
        true_cluster=CLUSTER,
        out=out,
        resume=resume,
        config=None if out is None else {"lr": 3, "num_rounds": rounds},
        checkpoint_seconds=0.0,
        stop_after=stop_after,
        summary=False,
    )
    if out is not None and history.rounds == rounds:
        results(out, history)
    return history


@cache
def wanted(rounds):
    return run(rounds=rounds)


def check_right(history):
    right = wanted(history.rounds)
    for a, b in zip(jax.tree.leaves(history.state), jax.tree.leaves(right.state), strict=True):
        np.testing.assert_array_equal(a, b)
    assert history.records == right.records


def digest(folder, but=None):
    """Of the names and the bytes below a folder."""
    found = hashlib.sha256()
    for path in sorted(p for p in Path(folder).rglob("*") if p.name != but):
        found.update(str(path.relative_to(folder)).encode() + b"\0")
        if path.is_file():
            found.update(path.read_bytes() + b"\0")
    return found.hexdigest()


def resume_or_begin(folder, rounds=ROUNDS):
    """What a user does after a crash: resume where there is a run, else begin."""
    return run(folder, rounds=rounds, resume=(Path(folder) / "config.json").exists())


# ---- Every write, rename and fsync -----------------------------------------------------------------------------------


class Disk:
    """Interposed between the library and the operating system, for everything below `root`.

    `after(index, name)` is called after every operation; `before(index, name, args)` may raise in its place. `durable`
    is what a machine that loses its power would find: contents as of their last `fsync`, names as of the last
    `fsync` of their folder.
    """

    def __init__(self, monkeypatch, root, before=None, after=None):
        self.root, self.before, self.after, self.count = Path(root), before, after, 0
        self.real = {name: getattr(os, name) for name in WRITES}
        self.contents, self.names = {}, {}  # by inode; by folder's inode
        self.busy = False  # in one of these calls
        for name in WRITES:
            monkeypatch.setattr(os, name, self._wrap(name))

    def _mine(self, name, args, kwargs):
        if name == "open":
            return args[1] & (os.O_WRONLY | os.O_RDWR) and self._below(args[0])
        if name in ("write", "pwrite", "fsync", "ftruncate"):
            return self._below(os.readlink(f"/proc/self/fd/{args[0]}").removesuffix(" (deleted)"))
        if kwargs.get("dir_fd") is not None:
            return self._below(os.readlink(f"/proc/self/fd/{kwargs['dir_fd']}").removesuffix(" (deleted)"))
        return self._below(args[0])

    def _below(self, path):
        return isinstance(path, (str, os.PathLike)) and Path(os.path.abspath(path)).is_relative_to(self.root)

    def _wrap(self, name):
        def call(*args, **kwargs):
            if self.busy or not self._mine(name, args, kwargs):
                return self.real[name](*args, **kwargs)
            self.count += 1
            self.busy = True
            try:
                if self.before is not None:
                    self.before(self.count, name, args)
                found = self.real[name](*args, **kwargs)
                if name == "fsync":
                    self._note(args[0])
                if self.after is not None:
                    self.after(self.count, name)
            finally:
                self.busy = False
            return found

        return call

    def _note(self, descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        inode = os.stat(path).st_ino
        if os.path.isdir(path):
            self.names[inode] = {e.name: (e.inode(), e.is_dir()) for e in os.scandir(path)}
        else:
            self.contents[inode] = Path(path).read_bytes()

    def durable(self, to):
        """Writes to the folder `to` what a power cut would leave."""

        def put(inode, place):
            os.mkdir(place)
            for name, (child, is_dir) in self.names.get(inode, {}).items():
                if is_dir:
                    put(child, place / name)
                else:
                    (place / name).write_bytes(self.contents.get(child, b""))

        put(os.stat(self.root).st_ino, Path(to))


def snapshots(monkeypatch, tmp_path, durable, action):
    """The states of the run's folder after each operation of `action(folder)`."""
    root, found = tmp_path / "disk", []
    root.mkdir(exist_ok=True)

    def after(index, name):
        place = tmp_path / f"after-{index:04d}"
        if durable:
            disk.durable(place)
        else:
            shutil.copytree(root, place)
        if not found or digest(place) != digest(found[-1]):
            found.append(place)
        else:
            shutil.rmtree(place)

    with monkeypatch.context() as patched:
        disk = Disk(patched, root, after=after)
        if durable:  # what was there before is on the disk
            for path in [root, *root.rglob("*")]:
                descriptor = disk.real["open"](path, os.O_RDONLY)
                disk._note(descriptor)
                os.close(descriptor)
        action(root / "run")
    return found


def extend(folder):
    run(folder, rounds=2)
    run(folder, rounds=ROUNDS, resume=True)


@pytest.mark.parametrize("durable", [pytest.param(False, marks=pytest.mark.slow), True], ids=["killed", "power cut"])
def test_a_run_survives_a_crash_after_every_operation(durable, monkeypatch, tmp_path):
    found = snapshots(monkeypatch, tmp_path, durable, extend)
    assert len(found) > (12 if durable else 60)
    for folder in found:
        check_right(resume_or_begin(folder / "run"))
        lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        assert [line["round"] for line in lines] == [1, 2, 3, 4]
        runs.verify_results(folder / "run")
        left = {p.name for p in (folder / "run").rglob("*")}
        assert not [name for name in left if name.endswith(files.SUFFIX)]


def failing(number, code):
    """An operation that fails, as it would on a full disk or a broken one; a write has then written a part."""

    def before(count, name, args):
        if count == number:
            if name == "write":
                os.pwrite(args[0], bytes(args[1])[: len(args[1]) // 2], os.fstat(args[0]).st_size)
            if name == "pwrite":
                os.pwrite(args[0], bytes(args[1])[: len(args[1]) // 2], args[2])
            raise OSError(code, os.strerror(code))

    return before


def operations(monkeypatch, folder, action):
    with monkeypatch.context() as patched:
        disk = Disk(patched, folder.parent)
        action(folder)
    return disk.count


def fail_at_every(every, code, action, check, monkeypatch, tmp_path):
    """Repeats `action(folder)` with an error at one operation, another in each folder, and checks what it leaves."""
    total = operations(monkeypatch, tmp_path / "0" / "run", action)
    assert total > 100
    for number in range(1 + code % every, total + 1, every):  # other operations for each error
        folder = tmp_path / f"{number}" / "run"
        folder.parent.mkdir(exist_ok=True)
        with monkeypatch.context() as patched:
            Disk(patched, folder.parent, before=failing(number, code))
            try:
                action(folder)
            except OSError as error:
                assert error.errno == code
        check(folder)


@pytest.mark.slow_cases("full-29")
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 29])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["full", "broken"])
def test_an_error_of_the_disk_at_any_operation_costs_nothing(code, every, monkeypatch, tmp_path):
    def check(folder):
        check_right(resume_or_begin(folder))
        runs.verify_results(folder)

    fail_at_every(every, code, extend, check, monkeypatch, tmp_path)


def test_a_finished_run_that_is_resumed_on_a_full_disk_stays_finished(monkeypatch, tmp_path):
    folder = tmp_path / "a" / "run"
    run(folder)
    before = digest(folder, but="lock")
    total, refused = operations(monkeypatch, folder, lambda folder: run(folder, resume=True)), 0
    for number in range(1, total + 1, 7):
        with monkeypatch.context() as patched:
            Disk(patched, tmp_path, before=lambda count, name, args, n=number: full(count >= n and name == "write"))
            try:
                run(folder, resume=True)
            except OSError as error:
                assert error.errno == errno.ENOSPC
                assert digest(folder, but="lock") == before
                refused += 1
    assert refused > 1
    check_right(run(folder, resume=True))


DITTO = jfcl.ditto(TASK, jfcl.local_training(TRAINING.optimizer, num_steps=1))
STORE = jfcl.data.ClientStore.from_clients(CLIENTS, cluster=CLUSTER)


def run_population(out=None, resume=False):
    """Four rounds of a population whose rows are files."""
    people, options = (
        jfcl.Population(STORE, cohort=3, rows_in_memory=0),
        {"key": jax.random.key(5), "num_rounds": ROUNDS},
    )
    return jfcl.simulate(DITTO, people, out=out, resume=resume, checkpoint_seconds=0.0, **options)


@cache
def wanted_population():
    return run_population()


def check_population(folder):
    """Resumes a run, or begins it, and compares every bit."""
    history, right = run_population(folder, (folder / "config.json").exists()), wanted_population()
    seen = right.rows.seen
    np.testing.assert_array_equal(history.rows.seen, seen)
    pairs = [(history.state, right.state)]
    pairs += [(a[seen], b[seen]) for a, b in zip(history.rows.arrays, right.rows.arrays, strict=True)]
    for found, wanted in pairs:
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(a, b)
    assert history.records == right.records


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 29])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["full", "broken"])
def test_an_error_of_the_disk_below_the_rows_of_clients_costs_nothing(code, every, monkeypatch, tmp_path):
    fail_at_every(every, code, run_population, check_population, monkeypatch, tmp_path)


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 37])
def test_a_population_survives_a_kill_after_every_operation(every, monkeypatch, tmp_path):
    found = snapshots(monkeypatch, tmp_path, False, run_population)
    assert len(found) > 60
    for folder in found[::every]:
        check_population(folder / "run")


def full(is_full):
    if is_full:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


KILLED = """
import sys, jax
jax.config.update("jax_compilation_cache_dir", sys.argv[3])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
sys.path.insert(0, sys.argv[1])
import test_faults
print("ready", flush=True)
history = test_faults.resume_or_begin(sys.argv[2], 60)
print("done", flush=True)
if sys.argv[4] == "check":
    test_faults.check_right(history)
"""


@pytest.mark.slow
def test_a_hundred_kills_at_random_moments(tmp_path):
    """Set JFCL_KILLS to another number."""
    rng, in_the_middle = random.Random(1), 0

    def start(folder, what):
        here, cache = Path(__file__).parent, tmp_path / "cache"
        return subprocess.Popen(
            [sys.executable, "-c", KILLED, here, folder, cache, what], stdout=subprocess.PIPE, text=True
        )

    for i in range(int(os.environ.get("JFCL_KILLS", "100"))):
        folder = tmp_path / f"{i}"
        killed = start(folder, "run")
        assert killed.stdout.readline() == "ready\n"
        time.sleep(rng.uniform(0, 2.0))
        killed.kill()
        in_the_middle += (folder / "config.json").exists() and not (folder / "summary.json").exists()
        killed.communicate()
        finishes = start(folder, "check")
        assert finishes.communicate()[0] == "ready\ndone\n" and finishes.returncode == 0
        runs.verify_results(folder)
        shutil.rmtree(folder)
    print(f"{in_the_middle} of them while the run's folder was in use")
    assert in_the_middle


# ---- Damage ----------------------------------------------------------------------------------------------------------


def damage(folder, how, rng):
    """Damages something below the folder; returns words that say what."""
    there = sorted(p for p in Path(folder).rglob("*") if p.is_file() and p.name != "lock")
    path = rng.choice(there)
    data = bytearray(path.read_bytes())
    if how == "flip" and data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
    elif how == "cut":
        path.write_bytes(data[: rng.randrange(len(data) + 1)])
    elif how == "delete":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "swap lines":
        lines = data.splitlines(keepends=True)
        rng.shuffle(lines)
        path.write_bytes(b"".join(lines))
    elif how == "drop a line":
        lines = data.splitlines(keepends=True)
        if lines:
            del lines[rng.randrange(len(lines))]
        path.write_bytes(b"".join(lines))
    elif how == "checkpoints":
        shutil.rmtree(Path(folder) / "checkpoints")
    return f"{how} {path.relative_to(folder)}"


HOW = ("flip", "cut", "delete", "empty", "swap lines", "drop a line", "checkpoints")


def right_or_refused(folder, rounds):
    """The two laws; returns the history, or None where the command was refused."""
    before = digest(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            history = resume_or_begin(folder, rounds)
        except ValueError as error:
            assert digest(folder) == before, error
            return None
    check_right(history)
    runs.verify_results(Path(folder))
    return history


@pytest.mark.parametrize("count", [28, pytest.param(1000, marks=pytest.mark.slow)])
def test_damage_is_refused_or_survived(count, tmp_path):
    rng = random.Random(0)
    run(tmp_path / "finished")
    run(tmp_path / "begun", stop_after=3)
    refused = 0
    for i in range(count):
        folder = tmp_path / "damaged"
        shutil.copytree(tmp_path / rng.choice(["finished", "begun"]), folder)
        said = damage(folder, HOW[i % len(HOW)], rng)
        try:
            refused += right_or_refused(folder, ROUNDS + rng.choice([0, 1])) is None
        except AssertionError as error:
            raise AssertionError(said) from error
        shutil.rmtree(folder)
    assert count / 8 < refused < count


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("metrics.jsonl", lambda t: t.replace('"round": 2', '"round": 3'), "its first 4 lines are not those"),
        ("metrics.jsonl", lambda t: "\n".join(t.split("\n")[1:]), "its first 4 lines are not those"),
        ("metrics.jsonl", lambda t: t.replace("seed", "x", 1), "its first 4 lines are not those"),
        ("metrics.jsonl", None, "its first 4 lines are not those"),
        ("config.json", lambda t: t.replace('"num_rounds": 4', '"num_rounds": null'), "num_rounds is None"),
        ("config.json", lambda t: t.replace('"lr": 3', '"lr": 4'), "another configuration"),
        ("config.json", lambda t: "[" * 100000, "config.json is damaged"),
        ("checkpoints", None, "its checkpoints are missing"),
    ],
)
def test_a_finished_run_that_is_damaged_keeps_its_result(file, change, words, tmp_path):
    run(tmp_path / "run")
    if file == "checkpoints":
        shutil.rmtree(tmp_path / "run" / file)
    elif change is None:
        (tmp_path / "run" / file).unlink()
    else:
        path = tmp_path / "run" / file
        text = path.read_text()
        assert change(text) != text
        path.write_text(change(text))
    before = digest(tmp_path / "run")
    with pytest.raises(ValueError, match=words):
        run(tmp_path / "run", rounds=6, resume=True)
    assert digest(tmp_path / "run") == before


def test_a_checkpoint_is_of_the_run_that_made_it(tmp_path):
    """Also where the options are read from the folder itself, and a changed file would agree with itself."""

    def begin(name, lr):
        with runs.RunFolder.open(tmp_path / name, {"lr": lr, "num_rounds": 4}) as folder:
            folder.save(1, {"w": np.float32(lr)}, {})

    begin("a", 0.1), begin("b", 0.3)
    like, options = {"w": np.float32(0)}, {"lr": 0.1, "num_rounds": 4}

    def restore(name):
        with runs.RunFolder.open(tmp_path / name, options, resume=True) as folder:
            folder.restore(like)

    shutil.rmtree(tmp_path / "a" / "checkpoints")
    shutil.copytree(tmp_path / "b" / "checkpoints", tmp_path / "a" / "checkpoints")
    with pytest.raises(ValueError, match="belongs to a run of another configuration"):
        restore("a")
    config = tmp_path / "b" / "config.json"
    config.write_text(config.read_text().replace('"lr": 0.3', '"lr": 0.1'))
    with pytest.raises(ValueError, match=r"or config\.json was changed since"):
        restore("b")
    run(tmp_path / "c")
    config = tmp_path / "c" / "config.json"
    config.write_text(config.read_text().replace('"lr": 3', '"lr": 4'))
    with pytest.raises(ValueError, match=r"config\.json is damaged: it differs from the one that the run ended with"):
        runs.verify_results(tmp_path / "c")


@pytest.mark.parametrize("name", ["clients.csv", "plots/a.png", "summary.json"])
def test_a_folder_in_the_place_of_a_result_costs_no_other_result(name, tmp_path):
    run(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    before = digest(tmp_path, but="lock")
    with pytest.raises(ValueError, match="must be a file, but it is a folder"):
        run(tmp_path, resume=True)
    assert digest(tmp_path, but="lock") == before
    (tmp_path / name).rmdir()
    check_right(run(tmp_path, resume=True))


@pytest.mark.parametrize("how", ["file", "other name"])
def test_odd_checkpoints_wedge_nothing(how, tmp_path):
    run(tmp_path / "run", stop_after=2)
    place = tmp_path / "run" / "checkpoints" / "2"
    shutil.move(place, tmp_path / "moved")
    if how == "file":
        place.write_text("")
    else:
        shutil.move(tmp_path / "moved", place.with_name("02"))
    (tmp_path / "run" / "notes.tmp").write_text("a user's own")
    if how == "file":
        before = digest(tmp_path)
        with pytest.raises(ValueError, match=r"2 is damaged .*: remove it, and the run continues"):
            run(tmp_path / "run", resume=True)
        assert digest(tmp_path) == before
        place.unlink()
    check_right(run(tmp_path / "run", resume=True))
    assert (tmp_path / "run" / "notes.tmp").exists()


@pytest.mark.parametrize("name", ["checkpoints", "metrics.jsonl"])
def test_what_is_of_another_kind_is_refused_before_anything_changes(name, tmp_path):
    run(tmp_path, stop_after=2)
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "checkpoints").write_text("") if name == "checkpoints" else (tmp_path / name).mkdir()
    before = digest(tmp_path)
    with pytest.raises(ValueError, match=f"{name} must be a "):
        run(tmp_path, resume=True)
    assert digest(tmp_path) == before


def test_results_that_were_changed_are_named(tmp_path):
    run(tmp_path)
    runs.verify_results(tmp_path)
    for name in ("clients.csv", "params.npz", "metrics.jsonl"):
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole.replace(whole[:1], b"?", 1))
        with pytest.raises(ValueError, match=f"{name} is damaged"):
            runs.verify_results(tmp_path)
        (tmp_path / name).write_bytes(whole)
    (tmp_path / "summary.json").write_text((tmp_path / "summary.json").read_text().replace('rounds": 4', 'rounds": 5'))
    with pytest.raises(ValueError, match=r"summary\.json is damaged: its content differs from its digest"):
        runs.verify_results(tmp_path)


def test_a_run_of_another_version_is_named(tmp_path):
    run(tmp_path, stop_after=2)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["versions"] == {"jfcl": jfcl.__version__, "jax": jax.__version__}
    (tmp_path / "config.json").write_text(json.dumps(saved | {"versions": {"jfcl": "0.1.3", "jax": "0.0"}}))
    before = digest(tmp_path)
    with pytest.raises(ValueError, match=rf"was made by jfcl 0\.1\.3, and this is jfcl {jfcl.__version__}: .*jfcl==0"):
        run(tmp_path, resume=True)
    assert digest(tmp_path) == before
    (tmp_path / "config.json").write_text(json.dumps(saved | {"versions": {"jfcl": jfcl.__version__, "jax": "0.0"}}))
    with pytest.warns(UserWarning, match=r"was begun with jfcl .*, jax 0\.0, and is resumed with jfcl"):
        check_right(run(tmp_path, resume=True))


def test_a_run_that_is_resumed_with_another_mapping_says_so(tmp_path):
    with runs.RunFolder.open(tmp_path, {"chunk": None, "devices": 2, "num_rounds": 3}):
        pass
    for chunk, devices, words in ((4, 2, r"\(chunk: it has None, asked for 4\)"), (None, 1, r"\(devices: it has 2")):
        config = {"chunk": chunk, "devices": devices, "num_rounds": 3}
        warned = pytest.warns(UserWarning, match=r"is resumed with another mapping " + words)
        with warned, runs.RunFolder.open(tmp_path, config, resume=True):
            pass
    same = {"chunk": None, "devices": 2, "num_rounds": 3}
    with runs.RunFolder.open(tmp_path, same, resume=True):  # warnings are errors here
        pass


def test_records_of_a_resumed_run_keep_what_json_does_not_have(tmp_path):
    record = {"seed": 0, "round": 1, "x": [float("inf"), 1.5, -float("inf")], "none": None, "y": float("nan"), "n": 2}
    with runs.RunFolder.open(tmp_path, {}) as folder:
        folder.append([record])
        folder.save(1, {"a": np.zeros(0), "b": np.float32(3)}, {"t": [float("inf")]})
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["x"] == [None, 1.5, None]
    with runs.RunFolder.open(tmp_path, {}, resume=True) as folder:
        found = folder.restore({"a": np.zeros(0), "b": np.float32(0)})
    assert str(found.records) == str([record]) and found.totals == {"t": [float("inf")]}


def test_a_state_may_hold_random_keys_and_sixteen_bits(tmp_path):
    state = {"k": jax.random.split(jax.random.key(3), 2), "h": jnp.ones(3, jnp.bfloat16), "n": np.int32(4)}
    with runs.RunFolder.open(tmp_path, {}) as folder:
        folder.save(1, state, {})
    like = jax.eval_shape(lambda: state)
    with runs.RunFolder.open(tmp_path, {}, resume=True) as folder:
        found = folder.restore(like).state
    assert jnp.array_equal(jax.random.key_data(found["k"]), jax.random.key_data(state["k"]))
    assert found["h"].dtype == jnp.bfloat16 and found["h"].tolist() == [1, 1, 1] and found["n"] == 4


# ---- Two at once -----------------------------------------------------------------------------------------------------

HOLD = """
import sys
from pathlib import Path
from jfcl.core import files
with files.lock(Path(sys.argv[1]) / "lock"):
    files.sign(Path(sys.argv[1]) / "lock")
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_one_process_writes_at_a_time(tmp_path):
    run(tmp_path, stop_after=2)
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout.readline() == "held\n"
        before = digest(tmp_path)
        with pytest.raises(ValueError, match=f"is in use by another process .process {other.pid} on .*, since 20"):
            run(tmp_path, resume=True)
        assert digest(tmp_path) == before
    finally:
        other.kill()  # the system releases the lock
        other.communicate()
    check_right(run(tmp_path, resume=True))


def test_one_thread_writes_at_a_time(tmp_path):
    run(tmp_path, stop_after=2)
    errors = []

    def other():
        try:
            run(tmp_path, resume=True)
        except ValueError as error:
            errors.append(str(error))

    with files.lock(tmp_path / "lock"), files.lock(tmp_path / "lock"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert "is in use by" in errors[0]
    check_right(run(tmp_path, resume=True))


@pytest.mark.parametrize("left", [False, True])
def test_the_lock_of_a_new_folder_is_removed_once(left, monkeypatch, tmp_path):
    """A second removal might be that of the next process's lock; `left` is one of a process that was killed."""
    removed, unlink = [], Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda path, **options: removed.append(path.name) or unlink(path, **options))
    if left:
        (tmp_path / ".new.lock").touch()
    with files.new_folder(tmp_path / "new"):
        assert (tmp_path / ".new.lock").exists()
    assert removed == [".new.lock"] and [path.name for path in tmp_path.iterdir()] == ["new"]


# ---- All of it, in any order -----------------------------------------------------------------------------------------


class Folder(RuleBasedStateMachine):
    """Runs, stops, kills, damages, resumes and extends one folder."""

    @initialize(seed=st.integers(0, 2**32 - 1))
    def begin(self, seed):
        import tempfile

        self.rng = random.Random(seed)
        self.place = Path(tempfile.mkdtemp(prefix="jfcl-faults-"))
        self.folder = self.place / "run"
        self.rounds = 2

    def teardown(self):
        shutil.rmtree(self.place, ignore_errors=True)

    @rule(more=st.integers(0, 1))
    def go_on(self, more):
        self.rounds += more
        if self.folder.exists():
            if right_or_refused(self.folder, self.rounds) is None:
                shutil.rmtree(self.folder)
        else:
            check_right(run(self.folder, rounds=self.rounds))

    @rule(after=st.integers(1, 60))
    def kill(self, after):
        """The process ends in the middle of its n-th operation: none after it has an effect."""

        class Killed(BaseException):
            pass

        def before(count, name, args):
            if count >= after:
                raise Killed

        with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            Disk(patched, self.place, before=before)
            try:
                resume_or_begin(self.folder, self.rounds)
            except Killed:
                pass
            except ValueError:  # of damage
                return

    @precondition(lambda self: self.folder.exists() and any(p.name != "lock" for p in self.folder.rglob("*.*")))
    @rule(how=st.sampled_from(HOW))
    def harm(self, how):
        if how != "checkpoints" or (self.folder / "checkpoints").exists():
            damage(self.folder, how, self.rng)


FAST = settings(
    max_examples=6, stateful_step_count=8, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
TestFolder = Folder.TestCase
TestFolder.settings = FAST


@pytest.mark.slow
def test_the_folder_for_long():
    class Long(Folder):
        pass

    Long.TestCase.settings = settings(FAST, max_examples=300, stateful_step_count=20)
    outcome = unittest.TestResult()
    Long.TestCase().run(outcome)
    assert outcome.testsRun == 1 and outcome.wasSuccessful(), outcome.errors + outcome.failures
