"""Hostile command lines, made of the parser's own flags: each ends with status 0 or 2, in time, and in words.

A flag that is added to the parser is covered without a change here. `make test` tries values that are refused before
anything compiles; the slow tests try twelve values for every flag, in a command that shares it one, and random pairs.
"""

import argparse
import faulthandler
import gzip
import json
import math
import os
import random
import shutil
import signal
import struct
import sys
import time
import traceback
import tracemalloc
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import jfcl
from jfcl import cli, experiments
from jfcl.cli import parser as arguments
from jfcl.core import check_count
from jfcl.experiments import Config, bench, load_run
from jfcl.methods import METHODS
from jfcl.planning import targets

TINY = ["--clients", "4", "--clusters", "2", "--rounds", "1", "--model", "linear", "--quiet"]
OF_SHIFTS = ["--clients=4", "--clusters=2", "--rounds=1", "--seeds=1", "--budget=1", "--jobs=1"]
BASE = {  # what stands before the flag in question, so that as little as can be is computed where it is accepted
    "run": ["run", "fedavg", *TINY],
    "compare": ["compare", "RUN"],  # a finished one
    "report": ["report", "RUN"],
    "list": ["list"],
    "bench": ["bench", "--methods=fedavg", "--models=mlp", "--clients=10", "--quiet", "--examples=4", "--repeats=1"],
    "demo": ["demo", "--seeds", "1", "--rounds", "1"],
    "plan": ["plan", "fedavg", *TINY, "--target", "v5e:1x1"],
    "sweep": ["sweep", "fedavg", *TINY, "--seeds", "1", "--grid", "prox=0"],
    "shifts": ["shifts", "--methods=fedavg", "--shifts=rotation", "--strengths=1", *OF_SHIFTS],
}
POPULATION = ["--population", "12", "--cohort", "4"]
DRIFT = ["--drift", "sudden", "--drift-steps", "2", "--rounds", "2"]
NEEDS = {  # flags that mean nothing without others
    "alpha": ["--partition", "dirichlet"],
    "exponent": ["--partition", "power_law"],
    "sigma": ["--partition", "lognormal"],
    "num_groups": ["--partition", "label_groups"],
    "labels_per_client": ["--partition", "label"],
    "distribution": ["--partition", "distribution"],
    "lr_end": ["--schedule", "cosine"],
    "warmup": ["--schedule", "warmup_cosine"],
    "step_rounds": ["--schedule", "step"],
    "step_factor": ["--schedule", "step"],
    "malicious": ["--attack", "sign_flip"],
    "attack": ["--malicious", "0.3"],
    "radius": ["--aggregator", "centered_clip"],
    "bucket_size": ["--aggregator", "bucketing+coordinate_median"],
    "restart_rounds": ["--restarts", "2"],
    "fallback_rounds": ["--validation", "0.3"],
    "sampling": POPULATION,
    "dropout": POPULATION,
    "stragglers": POPULATION,
    "remember": POPULATION,
    "population": ["--cohort", "4"],
    "length": ["--dataset", "ag_news", "--model", "lstm"],
    "vocab_size": ["--dataset", "ag_news", "--model", "lstm"],
    "drift_threshold": DRIFT,
    "max_models": DRIFT,
    "eager": DRIFT,
    "start": DRIFT,
}
LONG = "x" * 5000
VALUES = {
    int: ["0", "-1", "1", "3", "1000000000", "2147483647", "2147483648", str(10**12), "9" * 500, "1.5", "nan", ""],
    float: ["0", "-1", "0.5", "1", "1e-30", "1e30", "1e300", "-1e-320", "inf", "-inf", "nan", ""],
    str: ["", " ", "-", "nan", "0", "../..", "/dev/null", "/dev/zero", "é漢🙂", "a\nb\x1b[31m", "[red]%s{}$^", LONG],
    bool: ["", "1", "no"],
}
REFUSED = {int: ["-1", "2147483648", "1e3"], float: ["nan", "-inf", "x"], str: ["", "\x00", LONG], bool: ["1"]}
SECONDS = 120  # of which most is compilation, on a machine that does other things too
UNSAID = ("Traceback", "Error:", "object at 0x", "Unable to allocate", "bad_alloc")


class Hang(BaseException):
    """A command line that does not end; nothing that the command line catches."""


def flags() -> list[tuple[str, argparse.Action]]:
    """`(command, action)` of all that the parser takes, but --help."""
    parsers = {command: arguments.parser_of(command) for command in arguments.COMMANDS}
    actions = [(command, action) for command, made in parsers.items() for action in made._actions]
    return [(c, a) for c, a in actions if not isinstance(a, argparse._HelpAction)]


FLAGS = flags()
NAMES = [f"{command}:{action.dest}" for command, action in FLAGS]


def kind(action: argparse.Action) -> type:
    if action.nargs == 0:
        return bool
    name = getattr(action.type, "__name__", "")  # of a type, or of the function that reads it and a few words
    return next((kind for kind in (int, float) if kind.__name__ == name), str)


def with_value(command: str, action: argparse.Action, value: str, *, method: str | None = None) -> list[str]:
    """A small command line in which `action` has `value`."""
    line = list(BASE[command])
    if command in ("run", "plan", "sweep"):
        takers = [name for name, m in METHODS.items() if action.dest in m.options]
        special = {
            "num_models": "ifca",
            "share": "ifca",
            "personal": "fedavg",
            "track_gap": "cfl",
            "radius": "fedavg",
            "remember": "cfl",
        }
        line[1] = method or special.get(action.dest, next(iter(takers), "fedavg"))
        line += NEEDS.get(action.dest, [])
    if not action.option_strings:
        return [command, value, *(["RUN"] if command in ("compare", "report") else [])]
    flag = action.option_strings[-1]
    if kind(action) is bool:
        return [*line, f"{flag}={value}" if value else flag]
    return [*line, f"{flag}={value}"]


def numbers(value):
    """All numbers in a JSON value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [n for v in value for n in numbers(v)]
    return [value] if isinstance(value, (int, float)) else []


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


def judge(line: list[str], folder: Path, capsys, *, named: list[str] = ()) -> int:
    """Runs a command line in `folder` and returns its status; fails unless that is 0, or 2 (or 1) with a sentence.

    `named`: what the sentence must contain one of.
    """
    line = [str(folder.parent / "finished") if part == "RUN" else part for part in line]
    out = folder / "out"
    if line[0] in ("run", "sweep", "demo", "bench", "compare") and not any(p.startswith("--out") for p in line):
        line = [*line, f"--out={out}"]
    before = contents(folder)
    capsys.readouterr()

    def hang(*_):
        raise Hang(line)

    old = signal.signal(signal.SIGALRM, hang)
    signal.alarm(SECONDS)
    faulthandler.dump_traceback_later(
        2 * SECONDS, exit=True, file=sys.__stderr__
    )  # inside a compiled program no signal is heard
    began = time.monotonic()
    try:
        status = cli.main(line)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
        faulthandler.cancel_dump_traceback_later()
    printed = capsys.readouterr()
    where = f"{line} -> {status} after {time.monotonic() - began:.1f} s: {printed.err[-3000:]!r}"
    assert status in (0, 1, 2), where
    assert not [word for word in UNSAID if word in printed.err], where
    if status == 1:
        assert "jfcl: stopped: " in printed.err, where  # it diverged
    if status == 2:
        said = printed.err.split("jfcl: error: ")
        assert len(said) == 2 and 10 < len(said[1].strip()) < 5000, where
        words = said[1].replace("-", "_").lower()
        assert not named or any(name and name.replace("-", "_").lower() in words for name in named), where
        assert contents(folder) == before, where
    if status == 0:
        for file in folder.rglob("summary.json"):
            summary = json.loads(file.read_text())
            assert all(math.isfinite(n) for n in numbers(summary)), where
            assert summary["mean"]["loss"] is not None, where
    return status


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """A folder of its own that relative paths lie in, and nothing of this machine's."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv("JFCL_DATA_DIR", raising=False)
    monkeypatch.setattr(cli, "_compilation_cache", lambda: None)


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "here"


# The last: jfcl's own remarks, on a run of one round; NumPy's of divisions and overflows are none.
quiet = pytest.mark.filterwarnings("default", "error::RuntimeWarning", "ignore:.*:UserWarning")


def names_of(action: argparse.Action, value: str) -> list[str]:
    flag = [s.removeprefix("--") for s in action.option_strings]
    other = {
        "num_models": "num_clusters",
        "local_steps": "num_steps",
        "local_epochs": "num_epochs",
        "what": "list",
    }
    shown = [value[:40]] if value.strip() else ["expected"]
    return [
        *flag,
        action.dest,
        str(action.metavar),
        other.get(action.dest, ""),
        action.dest.rstrip("s"),
        *shown,
        repr(value)[1:-1],
    ]


class Computes(BaseException):
    """A command line that has been accepted, where the fast tests stop."""


@pytest.fixture
def no_computing(monkeypatch):
    """Whatever would compile or draw raises `Computes`."""
    from jfcl import plots
    from jfcl.experiments import jobs, sweeps
    from jfcl.experiments.run import run

    def computes(*args, **kwargs):
        raise Computes

    monkeypatch.setitem(run.__globals__, "simulate", computes)
    monkeypatch.setattr(sweeps, "sweep", computes)
    monkeypatch.setattr(jobs, "in_processes", computes)
    monkeypatch.setattr(bench, "measure", computes)
    monkeypatch.setattr(plots, "save", computes)


@pytest.fixture
def few_programs():
    """Thousands of programs in one process end it."""
    yield
    jfcl.clear_programs(), jax.clear_caches()


def check_all(cases: list[tuple[list[str], list[str]]], folder: Path, capsys) -> None:
    """Judges command lines one after the other, cleaning up behind each; fails with all that went wrong, in words."""
    failures = []
    for line, named in cases:
        try:
            judge(line, folder, capsys, named=named)
        except Computes:
            failures.append(f"{short(line)}: accepted")
        except (Exception, Hang) as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            what = str(error).split("\nassert ")[0].replace(LONG, "xxx...")[:1500]
            failures.append(f"{short(line)}: {type(error).__name__}: {what} ({where.filename}:{where.lineno})")
        for made in sorted(folder.rglob("*"), reverse=True):
            made.rmdir() if made.is_dir() and not made.is_symlink() else made.unlink()
    if failures:
        pytest.fail("\n\n".join([f"{len(failures)} of {len(cases)} command lines:", *failures]), pytrace=False)


def short(line: list[str]) -> str:
    return " ".join(repr(part[:60])[1:-1] for part in line)


@quiet
def test_every_flag_refuses_what_it_cannot_take(folder, capsys, no_computing):
    of_one_command = {action.dest: (command, action) for command, action in reversed(FLAGS)}
    cases = [
        (with_value(command, action, value), names_of(action, value))
        for command, action in of_one_command.values()
        for value in REFUSED[kind(action)][:1]
        if not (action.dest in ("seed", "data_seed") and value == "2147483648")  # of 32 bits, all of them
    ]
    check_all(cases, folder, capsys)


@pytest.mark.slow
@quiet
@pytest.mark.parametrize(("command", "action"), FLAGS, ids=NAMES)
def test_twelve_values_of_every_flag(command, action, folder, finished_run, capsys, monkeypatch, few_programs):
    if command in ("compare", "report"):
        shutil.copytree(finished_run, folder.parent / "finished")
    values = VALUES[kind(action)]
    if command != next(c for c, a in FLAGS if a.dest == action.dest):  # the flag of another command, as checked there
        values = values[2:3]
    if action.dest == "rounds":  # so many are accepted, and run for as long; see below
        values = [v for v in values if v not in ("1000000000", "2147483647")]
    last = []
    if command == "plan":  # an accepted value ends at the compiler, or at --population
        monkeypatch.setattr(targets, "mesh", no_compiler)
        last = ["compiler", "population"]
    cases = [(with_value(command, action, value), names_of(action, value) + last) for value in values]
    check_all(cases, folder, capsys)


def no_compiler(target: targets.Target):
    raise ValueError(f"target {target.name!r} needs a compiler")


@pytest.mark.slow
@quiet
@pytest.mark.parametrize("seed", range(40))
def test_random_pairs_of_flags(seed, folder, capsys, few_programs):
    rng = random.Random(seed)
    of_run = [action for command, action in FLAGS if command == "run" and action.option_strings]
    cases = []
    for _ in range(10):
        first, second = rng.sample(of_run, 2)
        value = {a.dest: rng.choice(likely(a, rng)) for a in (first, second)}
        line = with_value("run", first, value[first.dest], method=rng.choice(list(METHODS)))
        line += NEEDS.get(second.dest, []) if rng.random() < 0.5 else []
        flag = second.option_strings[-1]
        line += [flag if kind(second) is bool and not value[second.dest] else f"{flag}={value[second.dest]}"]
        cases.append((line, []))
    check_all(cases, folder, capsys)


def likely(action: argparse.Action, rng: random.Random) -> list[str]:
    """Values of which about half are sensible, by the names that `jfcl list` knows where there are any."""
    from jfcl import attacks, data, kernels, models
    from jfcl.training.augment import AUGMENTATIONS

    names = {
        "dataset": ["digits"],
        "heterogeneity": list(data.HETEROGENEITY),
        "partition": list(data.PARTITIONS),
        "model": ["linear", "mlp"],
        "attack": [*attacks.UPDATE_ATTACKS, *attacks.DATA_ATTACKS],
        "aggregator": [*kernels.AGGREGATORS, "nnm+krum", "bucketing+mean"],
        "augment": list(AUGMENTATIONS),
    }
    names |= {
        "keep": ["nothing", "schedule", "everything"],
        "weights": ["size", "equal"],
        "models": list(models.MODELS),
    }
    names |= {"mapping": ["vmap", "chunked", "sharded", "pmap"], "linkage": ["single"], "distance": ["euclidean"]}
    names |= {"optimizer": ["sgd", "adam", "lion"], "schedule": ["cosine", "step", "warmup_cosine"]}
    names |= {"server_optimizer": ["adam", "momentum"], "similarity": ["gradients"], "privacy": ["sign", "rotation"]}
    good = {int: ["1", "2", "3", "4"], float: ["0.3", "0.5", "1"], bool: [""], str: ["new"]}[kind(action)]
    bad = rng.sample([v for v in VALUES[kind(action)] if action.dest != "rounds" or len(v) < 4], 2)
    return [*names.get(action.dest, good), *bad]


@quiet
def test_odd_configurations_are_refused(folder, capsys, no_computing):
    (folder / "folder.toml").mkdir()
    (folder / "own.txt").write_text("x")
    os.mkfifo(folder / "pipe.toml")
    with (folder / "large.toml").open("wb") as f:
        f.truncate(10**10)
    contents = {
        "deep.toml": b"rounds = " + b"[" * 100_000,
        "deep.json": b'{"rounds": ' + b"[" * 100_000,
        "binary.toml": bytes(range(256)),
        "text.json": b'{"method": "fedavg", "num_rounds": "ten"}',
        "list.json": b'{"method": "fedavg", "lr": [0.1]}',
        "true.json": b'{"method": "fedavg", "rounds": true}',
        "nan.json": b'{"method": "fedavg", "lr": NaN}',
        "huge.json": b'{"method": "fedavg", "lr": 1' + b"0" * 400 + b"}",
        "table.toml": b'method = "fedavg"\n[lr]\nvalue = 1\n',
        "date.toml": b'method = "fedavg"\nlr = 1979-05-27\n',
        "twice.toml": b'method = "fedavg"\nlocal-steps = 1\nlocal_steps = 2\n',
        "twice.json": b'{"method": "fedavg", "lr": 0.1, "lr": 0.2}',
        "unknown.toml": b'method = "fedavg"\nlocal-step = 1\n',
        "empty.toml": b"",
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    before = sorted(folder.rglob("*"))
    said = {
        "text.json": "'ten'",
        "nan.json": "lr",
        "unknown.toml": "did you mean 'local_steps'?",
    }
    said |= {
        "empty.toml": "METHOD must be given",
        "twice.toml": "local_steps is given twice",
        "twice.json": "lr is given twice",
        "large.toml": "large.toml must be a file of less than 10 MB, got 10000000000",
    }
    files = [*contents, "folder.toml", "pipe.toml", "large.toml", "/dev/zero", "nowhere.toml", "own.txt/x.toml"]
    for name in files:
        assert cli.main(["run", "--config", name, "--out", "out"]) == 2
        printed = capsys.readouterr().err
        assert said.get(name, name) in printed and "Traceback" not in printed and len(printed) < 1000, name
    for out in ("own.txt", "own.txt/below", "\udcff"):
        assert cli.main(["run", "fedavg", *TINY, "--out", out]) == 2
        assert "out must be " in capsys.readouterr().err
    assert sorted(folder.rglob("*")) == before


@quiet
def test_odd_files_of_a_run_are_refused(folder, finished_run, capsys, no_computing):
    shutil.copytree(finished_run, folder / "run")
    summary, config = (json.loads((finished_run / name).read_text()) for name in ("summary.json", "config.json"))
    changed = [{"mean": None}, {"mean": {}}, {"std": {}}, {"per_seed": [1]}, {"per_seed": []}, {"per_seed": [{}]}]
    changed += [{"split_hash": None}, {"bytes_up": "x"}, {"num_clusters": None}, {"method": 3}, {"num_rounds": True}]
    texts = {"summary.json": [json.dumps(summary | change) for change in changed] + ["[" * 100_000, "null", ""]}
    texts["metrics.jsonl"] = ['{"round": 1}', '{"round": "1", "seed": 0}', '{"round": 1, "seed": 0, "accuracy": "x"}']
    texts["metrics.jsonl"] += ["[" * 100_000 + "\n{}"]
    texts["config.json"] = ["[" * 100_000, "3"]
    for name, odd in texts.items():
        for text in odd:
            (folder / "run" / name).write_text(text + "\n")
            assert cli.main(["compare", "run", "--out", "out"]) == 2
            printed = capsys.readouterr().err
            assert name in printed and "Traceback" not in printed, text[:100]
        shutil.copy(finished_run / name, folder / "run")
    clients = ["a,b\n1,2\n", "", "seed,client,cluster\n0,0,99999999999999\n", "seed,client,cluster\n0,0,1\n"]
    configs = [config | change for change in ({"newer_option": 1}, {"lr": "x"}, {"split_hash": "other"})]
    for name, text in [("clients.csv", t) for t in clients] + [("config.json", json.dumps(c)) for c in configs]:
        (folder / "run" / name).write_text(text)
        with pytest.raises(ValueError, match=name):
            load_run(folder / "run")
        shutil.copy(finished_run / name, folder / "run")
    shutil.move(folder / "run", folder / "$\\frac{x$")  # no formula
    with pytest.raises(Computes):
        cli.main(["compare", "$\\frac{x$", "--out", "out"])
    assert not (folder / "out").exists()


@quiet
def test_odd_warm_starts_are_refused(folder, finished_run, capsys, no_computing):
    (folder / "run").mkdir()
    file = folder / "run" / "params.npz"
    with np.load(finished_run / "params.npz") as arrays:
        good = dict(arrays)
    bias = good["Dense_0/bias"]
    changes = {"finite": np.where(bias == bias[0], np.nan, bias), "numbers": np.full(bias.shape, "x")}
    changes |= {"of one number": np.float32(1), "these sizes": bias[:, :3]}
    command = ["run", "fedavg", *TINY, "--init-from", "run"]
    for said, value in changes.items():
        np.savez(file, **good | {"Dense_0/bias": value})
        assert cli.main(command) == 2
        printed = capsys.readouterr().err
        assert said in printed and ("Dense_0/bias" in printed or value.dtype.kind == "f") and "learning" not in printed
    np.savez(file, **{name: value[:0] for name, value in good.items()})
    assert cli.main(command) == 2
    assert "at least 1" in capsys.readouterr().err
    np.savez(file, **good | {"Dense_0": bias})
    assert cli.main(command) == 2
    assert "those of the run: ['Dense_0/bias', 'Dense_0/kernel'], got ['Dense_0']" in capsys.readouterr().err
    np.savez_compressed(file, zeros=np.zeros(10**7, np.float32))
    assert cli.main(command) == 2
    assert "are compressed" in capsys.readouterr().err
    file.write_bytes(b"PK\x03\x04 and no more")
    assert cli.main(command) == 2
    assert "params.npz is damaged" in capsys.readouterr().err


def test_a_compressed_file_is_unpacked_as_far_as_its_header_says(folder, capsys, no_computing):
    (folder / "mnist").mkdir()
    file = folder / "mnist" / "train-images-idx3-ubyte.gz"
    header = {"good": (60_000, 28, 28), "large": (2**32 - 1,) * 3, "short": (10, 28, 28)}
    size = {"good": 10**8, "large": 100, "short": 100}
    for name in header:
        with gzip.open(file, "wb", compresslevel=1) as f:
            f.write(b"\0\0\x08\x03" + struct.pack(">3I", *header[name]) + bytes(size[name]))
        tracemalloc.start()
        assert cli.main(["run", "fedavg", "--dataset", "mnist", "--data-dir", str(folder)]) == 2
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        printed = capsys.readouterr().err
        assert "train-images-idx3-ubyte.gz is " in printed and "fetch it again" in printed
        assert most < 4 * size["good"]  # Python 3.12 joins what it has read in pieces


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--clients", "2147483647"], "GB are free; use fewer clients"),
        (["--clients", "2147483647", "--clusters", "2147483647"], "GB are free; use fewer clients"),
        (["--population", str(10**12)], "population must be at most 100000000"),
        (["--population", str(10**8), "--clusters", str(10**8)], "the store needs"),
        (["--population", "50", "--eps-1", "1"], "has no option eps_1"),
        (["--seeds", str(10**6)], "seeds must be at most 10000"),
        (["--devices", "100000"], "devices must be at most"),
        (["--local-steps", "2147483647"], "local_steps must be at most 1000000"),
        (["--rounds", "2000000000", "--lr-decay", "0.9", "--local-steps", "2"], "falls over at most 2147483647"),
        (["--lr", "1e39"], "lr must be finite, at most 3.4e+38 in float32"),
        (["--lr", "1e-40"], "lr must be 0, or at least 1.18e-38 in float32"),
        (["--server-lr", "inf"], "server_lr must be finite"),
        (["--checkpoint-seconds", "nan"], "checkpoint_seconds must be finite"),
    ],
)
def test_what_is_too_large_for_the_machine_is_said_at_once(options, said, folder, capsys, no_computing):
    assert cli.main(["run", "fedavg", "--quiet", "--model", "linear", *options, "--out", "out"]) == 2
    assert said in capsys.readouterr().err and not (folder / "out").exists()


@pytest.mark.parametrize("command", [["run", "fedavg"], ["bench"], ["demo"]])
@pytest.mark.parametrize(
    "error", [RuntimeError("Unable to initialize backend 'tpux': no such\nlist"), AssertionError()]
)
def test_a_platform_that_is_not_there_is_named(command, error, folder, capsys, monkeypatch, no_computing):
    def devices(*_):
        raise error

    monkeypatch.setattr(jax, "devices", devices)
    assert cli.main([*command, "--out", "out"]) == 2
    assert "jfcl: error: JAX_PLATFORMS must be unset" in capsys.readouterr().err and not (folder / "out").exists()


def test_counts_and_parameters_are_bounded_in_python_too():
    for call in (
        lambda: jfcl.local_training(optax.sgd(0.1), num_steps=2**31),
        lambda: jfcl.local_training(optax.sgd(0.1), num_steps=1, batch_size=np.int64(2**31)),
        lambda: jfcl.kernels.threshold_clustering(np.eye(2), radius=1.0, num_rounds=2**31),
        lambda: jfcl.kernels.centered_clip(np.eye(2), radius=1.0, num_iters=2**31),
        lambda: jfcl.kernels.kmeans(np.eye(2), 1, key=jax.random.key(0), num_restarts=2**31),
    ):
        with pytest.raises(ValueError, match="at most 2147483647, got "):
            call()
    with pytest.raises(ValueError, match="prox must be finite"):
        jfcl.local_training(optax.sgd(0.1), num_steps=1, prox=math.inf)
    for value in (True, 1.0, "1", None, -1):
        with pytest.raises(ValueError, match="seeds must be an integer, at least 1, got"):
            check_count("seeds", value)
    check_count("seeds", np.int32(2**31 - 1))
    with pytest.raises(ValueError, match="rounds must be of type int, got '3'"):
        experiments.run(Config("fedavg", rounds="3"))
    assert Config("cfl", eps_1=math.inf, eps_2=np.float32(1), rounds=np.int32(2))
    task = jfcl.models.classification(jfcl.models.Linear(2), (3,), 2)
    for bad in (np.nan, np.inf):
        params = jax.tree.map(lambda p, bad=bad: np.full(p.shape, bad, np.float32), task.init(jax.random.key(0)))
        algorithm = jfcl.fedavg(task, jfcl.local_training(optax.sgd(0.1), num_steps=1), init_params=params)
        clients = jfcl.Clients({"x": np.zeros((2, 4, 3), np.float32), "y": np.zeros((2, 4), np.int32)}, np.full(2, 4))
        with pytest.raises(ValueError, match=r"init_params\['Dense_0'\]\['bias'\] must be finite"):
            jax.eval_shape(algorithm.init, jax.random.key(0), clients)


@pytest.mark.slow
@quiet
@pytest.mark.parametrize("rounds", ["1000000000", "2147483647"])
def test_any_number_of_rounds_begins_and_is_interrupted(rounds, folder, capsys):
    old = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    hears = signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 20)
    try:
        assert cli.main(["run", "fedavg", *TINY, "--rounds", rounds, "--out", str(folder / "out")]) == 130
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
        signal.signal(signal.SIGINT, hears)
    assert "--resume" in capsys.readouterr().err and (folder / "out" / "config.json").exists()
