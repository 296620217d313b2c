"""`jfcl shifts`: what is held out, what a kill leaves, parts, and what is refused."""

import contextlib
import csv
import dataclasses
import gc
import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
import types
import weakref
from pathlib import Path

import jax
import numpy as np
import pytest
from scipy.special import log_softmax

import jfcl
from jfcl import cli
from jfcl.cli.commands import given_options
from jfcl.cli.parser import parse
from jfcl.core import Served, files
from jfcl.experiments import Config, jobs, run, shift_cells
from jfcl.experiments.shift_cells import (
    Cell,
    _maker,
    divided_clients,
    draw_trials,
    modes,
    options_of_cell,
    run_cell,
    run_once,
    searched,
)
from jfcl.experiments.shifts import cells_of, chained, make_setting, share_of
from jfcl.methods import METHODS
from jfcl.simulation.folder import check_folder
from jfcl.simulation.progress import DivergedError
from jfcl.testing import count_compilations, problem

SMALL = {
    "methods": ["oracle"],
    "shifts": ["rotation"],
    "strengths": [0.25, 0.5, 1.0],
    "seeds": 2,
    "budget": 2,
    "rounds": 4,
}
SMALL |= {"clients": 8, "clusters": 2, "model": "linear", "local_steps": 2, "examples_per_client": 20}
DEFAULTS = {"datasets": ("digits",), "batch_size": None, "hostile": 0.0, "attack": "label_reverse", "drift": None}
DEFAULTS |= {"wrong_k": (), "data_dir": None}
SHIFTS = sys.modules["jfcl.experiments.shifts"]  # the function has the name of its module
BASELINES, IN_PROCESSES = SHIFTS.ALWAYS, jobs.in_processes
MEASURED = ("seconds", "compile_seconds", "joules", "programs", "sha256")


@pytest.fixture(autouse=True, scope="module")
def _here():
    """Cells run in this process, which has compiled most of their programs already; the table is short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "in_processes", lambda parts, jobs, **_: [part() for part in parts.values()])
        patch.setattr(SHIFTS, "ALWAYS", ())
        patch.setattr(SHIFTS, "write_page", lambda folder: None)  # tests/test_shifts_page.py
        yield


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "_compilation_cache", lambda: None)
    monkeypatch.chdir(tmp_path)


def setting(**options) -> dict:
    return make_setting(DEFAULTS | SMALL | options)


def unmeasured(value):
    """Returns JSON without what depends on the machine and its load."""
    if isinstance(value, dict):
        return {name: unmeasured(v) for name, v in value.items() if name not in MEASURED}
    return [unmeasured(v) for v in value] if isinstance(value, list) else value


def results(folder) -> dict:
    """Returns the content of a folder that two runs must agree in, by file."""
    rows = list(csv.DictReader((folder / "runs.csv").read_text().splitlines()))
    cells = {file.name: unmeasured(json.loads(file.read_text())) for file in folder.glob("cells/*")}
    return cells | {"runs.csv": [{n: v for n, v in row.items() if n not in MEASURED} for row in rows]}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of an uninterrupted run."""
    return jfcl.shifts(**SMALL, out=tmp_path_factory.mktemp("shifts") / "whole", jobs=1).folder


def test_the_folder_has_every_cell_and_every_run_a_row(whole):
    found, rows = results(whole), results(whole)["runs.csv"]
    assert len(found) == 3 + 1 and len(rows) == 3 * 2 and all(row["status"] == "ok" for row in rows)
    cell = found["digits-rotation-1-oracle.json"]
    assert cell["cell"]["clusters"] == "" and [len(cell[name]) for name in ("trials", "runs")] == [2, 2]
    first = cell["runs"][0]
    assert first["adjusted_rand"] == 1 and first["clusters_found"] == 2 and 0 < first["newcomers"] <= 1
    assert np.mean(first["per_client"]) == pytest.approx(first["accuracy"], abs=1e-4)
    rounds = [t for t, accuracy in first["curve"] if accuracy >= 0.95 * first["accuracy"]]
    assert first["rounds_to_95"] == rounds[0] and first["bytes_to_95"] == rounds[0] * 2 * 8 * 650 * 4  # 64 x 10 + 10
    assert first["client_steps"] == 4 * 8 * 2


def test_drifting_data_are_learned_in_their_last_step():
    curve = [(1, 0, 0.9), (2, 0, 0.8), (3, 1, 0.3), (4, 1, 0.48), (5, 1, 0.5)]
    records = [{"round": t, "step": s, "accuracy": a, "bytes_up": t, "bytes_down": t} for t, s, a in curve]
    records = [row | {"worst_decile_accuracy": 0, "clusters_in_use": 1} for row in records]
    served = jfcl.Served({"b": np.zeros((1, 1))}, np.zeros(2, np.int32))
    history = types.SimpleNamespace(records=records, served=served, clients={"accuracy": np.array([[0.4, 0.6]])})
    vars(history).update(client_steps=9.0, seconds=1.0, compile_seconds=1.0)
    found = shift_cells.measured(history, np.zeros(2, int), Cell("sine", "sine", 1.0, "fedavg", "", drift="sudden"))
    assert (found["accuracy"], found["rounds_to_95"], found["bytes_to_95"], found["client_steps"]) == (0.5, 4, 8, 9)
    # A method of one's own that counts neither bytes nor steps has none, which is not 0.
    vars(history).update(client_steps=0.0, records=[{k: v for k, v in r.items() if "bytes" not in k} for r in records])
    found = shift_cells.measured(history, np.zeros(2, int), Cell("sine", "sine", 1.0, "fedavg", "", drift="sudden"))
    assert (found["accuracy"], found["bytes_to_95"], found["client_steps"]) == (0.5, None, None)


def test_the_best_trial_on_the_held_out_clients_is_run(whole):
    for cell in (json.loads(file.read_text()) for file in whole.glob("cells/*")):
        scores = [trial["score"] for trial in cell["trials"]]
        assert cell["tuned"] == cell["trials"][int(np.argmax(scores))]["options"]
        assert cell["trials"][0]["options"] == {} and 0.02 <= cell["trials"][1]["options"]["lr"] <= 2
        if not cell["tuned"]:
            assert cell["default"]["accuracy"] == cell["runs"][0]["accuracy"]


def of_command(whole) -> tuple[dict, Config]:
    """Returns a cell, and the configuration that its command has."""
    cell = json.loads((whole / "cells" / "digits-rotation-1-oracle.json").read_text())
    return cell, Config(**given_options(parse(shlex.split(cell["command"])[1:])))


def test_the_command_of_a_cell_has_its_options(whole):
    cell, config = of_command(whole)
    options = options_of_cell(Cell(**cell["cell"]), setting()) | cell["tuned"]
    assert config == Config("oracle", **options, seed=0) and config.tuning_clients == 8


@pytest.mark.slow
def test_the_command_of_a_cell_repeats_its_first_run(whole):
    cell, config = of_command(whole)
    assert run(config)[0]["per_seed"][0]["accuracy"] == pytest.approx(cell["runs"][0]["accuracy"], abs=1e-6)


def test_parts_merge_to_the_same_folder(whole, tmp_path):
    done = [jfcl.shifts(**SMALL, out=tmp_path / "parts", part=f"{i}/2", jobs=1).done for i in (2, 1)]
    assert done == [1, 3] and results(tmp_path / "parts") == results(whole)


def test_a_tpu_is_held_by_one_process(whole, tmp_path, monkeypatch):
    for module in (SHIFTS, jobs):
        monkeypatch.setattr(module, "platform", lambda: "tpu")
    monkeypatch.setattr(jobs, "in_processes", IN_PROCESSES)
    monkeypatch.setattr(jobs, "multiprocessing", None)
    assert results(jfcl.shifts(**SMALL, out=tmp_path / "tpu").folder) == results(whole)
    with pytest.raises(ValueError, match="jobs must be 1 on a TPU, which one process holds, got 2"):
        jfcl.shifts(**SMALL, out=tmp_path / "two", jobs=2)


def test_what_a_kill_leaves_is_continued_and_gives_the_same(whole, tmp_path):
    """A cell that was not written, one that was cut off, one that is damaged, and a file that was half written."""
    jfcl.shifts(**SMALL, out=tmp_path / "killed", jobs=1)
    cells = sorted((tmp_path / "killed" / "cells").iterdir())
    cells[0].unlink()
    cells[1].write_text(cells[1].read_text()[:1000])
    cells[2].write_text(cells[2].read_text().replace('"accuracy": 0', '"accuracy": 1', 1))
    cells[0].with_suffix(".json.tmp").write_text("{")
    with pytest.warns(UserWarning, match="is damaged: .*; the cell runs again"):
        assert jfcl.shifts(**SMALL, out=tmp_path / "killed", jobs=1).done == 3
    assert results(tmp_path / "killed") == results(whole)


def test_a_copy_of_a_cell_is_not_another_one(whole, tmp_path):
    folder = Path(shutil.copytree(whole, tmp_path / "copied"))
    cells = sorted((folder / "cells").iterdir())
    shutil.copy(cells[0], cells[1])
    with pytest.warns(UserWarning, match=rf"{cells[1].name} is damaged: .*{cells[0].stem}; the cell runs again"):
        jfcl.shifts(**SMALL, out=folder, jobs=1)
    assert results(folder) == results(whole)


def test_no_image_of_the_held_out_clients_is_trained_or_tested_on():
    """With strength 0 an image is the same bytes at every client."""
    cell = Cell("digits", "rotation", 0.0, "fedavg", "")
    parts = divided_clients(Config("fedavg", **options_of_cell(cell, setting())), None)
    images = [set() for _ in parts]
    for found, part in zip(images, parts, strict=True):
        for clients in filter(None, (part.train, part.test, part.newcomers)):
            x = np.asarray(clients.examples["x"])
            found |= {x[i, j].tobytes() for i, size in enumerate(clients.size) for j in range(size)}
    assert len(parts[0].cluster) == 8 and len(parts[1].cluster) == 8 and parts[0].newcomers is not None
    assert min(map(len, images)) > 300 and not images[0] & images[1]


def test_cells_are_those_of_all_names_modes_and_conditions():
    cells = cells_of(setting(methods=["clove"], hostile=0.25, drift="sudden", wrong_k=[1, 4]))
    of_clove = [cell.name.removeprefix("digits-rotation-") for cell in cells if cell.method == "clove"]
    of_1 = ["", "-hostile0.25", "-sudden"]
    expected = [f"1-clove-{mode}{more}" for mode in ("known", "auto") for more in of_1] + ["1-clove-k1", "1-clove-k4"]
    assert sorted(of_clove) == sorted(
        [*expected, *(f"{s}-clove-{mode}" for s in (0.25, 0.5) for mode in ("known", "auto"))]
    )
    assert {cell.method for cell in cells} == {"clove"} and BASELINES == ("fedavg", "local", "oracle")
    parts = [share_of(cells, f"{i}/3") for i in (1, 2, 3)]
    assert {*itertools.chain(*parts)} == {*cells} and max(map(len, parts)) - min(map(len, parts)) <= 1
    chains = chained(cells, 2)
    assert {*itertools.chain(*chains)} == {*cells} and sum(map(len, chains)) == len(cells)


def test_newcomers_of_few_clients_find_examples_in_a_cluster_with_labels_of_its_own():
    few, many = (setting(shifts=["class"], clients=n, clusters=4) for n in (8, 40))
    counts = [of["of_data"]["digits"]["newcomer_examples"] for of in (few, many)]
    config = Config("fedavg", **options_of_cell(Cell("digits", "class", 1.0, "fedavg", ""), few))
    size = divided_clients(config, None)[0].newcomers.size
    assert {*size[size > 0].tolist()} == {counts[0]} and counts[1] == 22


def test_hostile_clients_use_the_programs_of_the_others():
    plain = Cell("digits", "rotation", 1.0, "oracle", "")
    makers = []
    for cell in (plain, dataclasses.replace(plain, hostile=0.25)):
        config = Config("oracle", **options_of_cell(cell, setting(hostile=0.25)))
        makers.append(_maker(config, divided_clients(config, None)[0], ()))
    assert makers[0] is makers[1]
    assert chained([plain, cell], 1) == [[plain, cell]]


def test_programs_that_are_kept_hold_no_examples():
    config = Config("oracle", **options_of_cell(Cell("digits", "rotation", 1.0, "oracle", ""), setting()))
    clients, _ = divided_clients(config, None)
    make, examples = _maker(config, clients, ()), weakref.ref(clients.train.examples["x"])
    del clients, _
    gc.collect()
    assert make().task is not None and examples() is None


@pytest.mark.slow
def test_runs_that_differ_in_traced_options_compile_nothing():
    """Also where the method makes the functions by which it serves anew."""
    cell = Cell("digits", "rotation", 1.0, "fedem", "known")
    options = options_of_cell(cell, setting())
    clients, _ = divided_clients(Config("fedem", **options), None)
    first = run_once(cell, options, clients, 0)
    with count_compilations() as compiled:
        again = run_once(cell, options | {"lr": 0.2}, clients, 1)
    assert compiled.count == 0 and first["accuracy"] != again["accuracy"]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_ranges_in_which_its_options_are_valid(method):
    for clusters in modes(method):
        cell = Cell("digits", "rotation", 1.0, method, clusters)
        trials = draw_trials(cell, 4)
        assert trials == draw_trials(cell, 4) and {*trials[1]} == {*searched(cell)} and "lr" in trials[1]
        for trial in trials:
            Config(method, **options_of_cell(cell, setting()) | trial)


def test_all_methods_try_the_same_learning_rates_one_from_each_part_of_the_range():
    cells = [Cell("digits", "rotation", 1.0, name, modes(name)[0]) for name in METHODS]
    [rates] = {tuple(trial["lr"] for trial in draw_trials(cell, 6)[1:]) for cell in cells}
    span = searched(cells[0])["lr"]
    parts = np.log(np.array(rates) / span.low) / np.log(span.high / span.low)
    assert sorted((5 * parts).astype(int)) == [0, 1, 2, 3, 4]


def test_a_method_that_cannot_run_a_shift_says_why():
    cell = Cell("digits", "class", 1.0, "fedavg", "", drift="sudden")
    found = run_cell(cell, setting(shifts=["class"]), None)
    assert found["status"] == "cannot" and "with drift clients keep those that they have" in found["reason"]
    assert found["runs"] == [] and found["programs"] == 0


def test_runs_that_diverge_or_fail_are_counted(monkeypatch):
    errors = iter([DivergedError("by round 1, seed 0: no"), RuntimeError("no memory"), ValueError("later")] * 2)

    def fail(*_, **__):
        raise next(errors)

    monkeypatch.setattr(shift_cells, "simulate", fail)
    found = run_cell(Cell("digits", "rotation", 1.0, "fedavg", ""), setting(budget=3), None)
    assert [trial["status"] for trial in found["trials"]] == ["diverged", "failed", "failed"]
    assert [run["status"] for run in found["runs"]] == ["diverged", "failed"] and found["status"] == "ok"
    assert found["runs"][1]["reason"] == "RuntimeError: no memory" and found["runs"][1]["accuracy"] is None


def test_a_run_that_fails_at_its_newcomers_has_no_results(monkeypatch):
    def fail(*_):
        raise RuntimeError("no memory")

    cell = Cell("digits", "rotation", 1.0, "fedavg", "")
    options = options_of_cell(cell, setting())
    monkeypatch.setattr(shift_cells, "simulate", lambda *_, **__: None)
    monkeypatch.setattr(shift_cells, "measured", lambda *_: {"accuracy": 0.5})
    monkeypatch.setattr(shift_cells, "newcomer_accuracy", fail)
    found = run_once(cell, options, divided_clients(Config("fedavg", **options), None)[0], 0)
    assert found["status"] == "failed" and found["accuracy"] is None


REFUSED = {
    "methods must be at least one, each given once, got []": {"methods": []},
    "budget must be an integer, at least 1, got 0": {"budget": 0},
    "unknown method 'ifac': did you mean 'ifca'?": {"methods": ["ifac"]},
    "unknown shift 'rotatoin': did you mean 'rotation'?": {"shifts": ["rotatoin"]},
    "did you mean 'digits'?": {"datasets": ["digit"]},
    "strengths must be in [0, 1], got 1.5": {"strengths": [1.5]},
    "wrong_k must be other numbers than 2, from 1 to that of the clients, got 2": {"wrong_k": [2]},
    "part must be I/N with I from 1 to N, such as 3/16, got '4/3'": {"part": "4/3"},
    "few enough for two examples": {"clients": 2000, "clusters": 4, "examples_per_client": None},
    "unknown model": {"model": "mpl"},
    "enough for one of the 8 clients, and not for all": {"hostile": 0.01},
}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_input_is_refused_in_a_sentence(message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        jfcl.shifts(**SMALL | {"jobs": 1, "out": tmp_path / "new"} | REFUSED[message])
    assert not (tmp_path / "new" / "settings.json").exists()


def test_a_folder_of_other_settings_is_refused(whole):
    before = results(whole)
    with pytest.raises(ValueError, match=r"holds another ranking \(of_runs\.rounds: it has 4, .*nothing was changed"):
        jfcl.shifts(**SMALL | {"rounds": 5}, out=whole, jobs=1)
    about = files.read_json(whole / "settings.json")
    old = {name: value for name, value in about.items() if name != "sha256"} | {"versions": {"jfcl": "0.0.1"}}
    try:
        files.write_json(whole / "settings.json", files.seal(old))
        with pytest.raises(ValueError, match=r"was made by jfcl 0\.0\.1"):
            jfcl.shifts(**SMALL, out=whole, jobs=1)
    finally:
        files.write_json(whole / "settings.json", about)
    assert results(whole) == before


@pytest.mark.parametrize("kind, file", [("run", "config.json"), ("sweep", "setting.json")])
def test_a_ranking_is_no_part_of_another_folder(kind, file, tmp_path):
    (tmp_path / file).write_text("{}")
    with pytest.raises(ValueError, match=f"holds a {kind} already; choose a new or empty folder"):
        jfcl.shifts(**SMALL, out=tmp_path, jobs=1)
    assert [path.name for path in tmp_path.iterdir()] == [file]
    (tmp_path / file).rename(tmp_path / "settings.json")
    with pytest.raises(ValueError, match="holds a ranking already; choose a new or empty folder"):
        check_folder(tmp_path, False, kind)


def test_parts_of_other_settings_do_not_fit(whole, tmp_path):
    jfcl.shifts(**SMALL | {"seeds": 1}, out=tmp_path / "other", part="3/3", jobs=1)
    for file in (whole / "cells").glob("*-0.5-*"):
        (tmp_path / "other" / "cells" / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ValueError, match=r"is of other settings than settings\.json: the parts do not fit each other"):
        jfcl.shifts(**SMALL | {"seeds": 1}, out=tmp_path / "other", part="2/3", jobs=1)


@pytest.mark.slow
def test_a_method_of_a_user_is_ranked_by_the_command(tmp_path, capsys):
    flags = "--shifts rotation --strengths 1 --seeds 1 --budget 1 --rounds 2 --clients 8 --clusters 2 --model linear"
    flags += " --local-steps 2 --examples-per-client 20 --jobs 1 --quiet --part 2/2"
    status = cli.main(["shifts", "--methods", "skeleton_method:server_momentum,local", *flags.split(), "--out", "own"])
    out = capsys.readouterr().out
    assert status == 0 and "1 of 2 cells" in out and "those of other parts" in out
    (file,) = (tmp_path / "own" / "cells").iterdir()
    cell = json.loads(file.read_text())
    assert file.stem == "digits-rotation-1-skeleton_method_server_momentum" and cell["status"] == "ok"
    assert cell["runs"][0]["status"] == "ok" and cell["runs"][0]["accuracy"] > 0


def test_newcomers_are_not_evaluated_on_the_examples_by_which_they_choose():
    """Of 64 linear models, the best one on five examples is right for most of these, and for half of others."""
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=(40, 11, 3)).astype(np.float32), rng.integers(0, 2, (40, 11)).astype(np.int32)
    new = jfcl.Clients({"x": x, "y": y}, np.full(40, 10, np.int32))
    task = jfcl.models.classification(jfcl.models.Linear(2), (3,), 2)
    models = jax.vmap(task.init)(jax.random.split(jax.random.key(0), 64))
    algorithm = jfcl.fedavg(task, problem()[3])._replace(serve=lambda state, clients: Served(models, None))
    of_seed = Served(jax.tree.map(lambda x: x[None], models), None)
    history = types.SimpleNamespace(state=np.zeros((1, 2)), served=of_seed)
    clients = types.SimpleNamespace(train=new, newcomers=new)
    got = shift_cells.newcomer_accuracy(lambda: algorithm, {}, history, clients)
    weights, biases = (np.asarray(models["Dense_0"][name]) for name in ("kernel", "bias"))
    logits = np.einsum("nmd,kdc->nkmc", x[:, :10], weights) + biases[:, None]
    labels = np.broadcast_to(y[:, None, :10, None], (*logits.shape[:3], 1))
    losses = -np.take_along_axis(log_softmax(logits, axis=3), labels, axis=3)[..., 0]
    best = losses[:, :, ::2].mean(axis=2).argmin(axis=1)
    right = (logits.argmax(axis=3) == labels[..., 0])[np.arange(40), best, 1::2]
    assert got == pytest.approx(np.mean(right)) and 0.4 < got < 0.6


def test_energy_is_that_of_the_processors(tmp_path, monkeypatch):
    """A machine with two processors, the memory of one, the whole platform, and a counter that nobody may read."""
    monkeypatch.setattr(shift_cells, "RAPL", tmp_path)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    zones = {"0": "package-0", "0:0": "dram", "1": "package-1", "2": "psys", "3": "package-2"}

    def write(**microjoules):
        for place, count in microjoules.items():
            (tmp_path / f"intel-rapl:{place[1:].replace('_', ':')}" / "energy_uj").write_text(f"{count}\n")

    assert shift_cells.joules_since(shift_cells.read_joules()) is None  # no counters
    for place, name in zones.items():
        zone = tmp_path / f"intel-rapl:{place}"
        zone.mkdir()
        (zone / "name").write_text(f"{name}\n")
        (zone / "max_energy_range_uj").write_text("9000000\n")
    write(_0=1_000_000, _0_0=0, _1=8_000_000, _2=0)
    began = shift_cells.read_joules()
    write(_0=3_500_000, _0_0=7_000_000, _1=500_000, _2=8_000_000)
    assert shift_cells.joules_since(began) == 2.5 + 1.5  # the second has begun anew
    (tmp_path / "intel-rapl:1" / "energy_uj").unlink()  # no longer for everybody: the run has its other results
    assert shift_cells.joules_since(began) is None


def test_energy_is_that_of_the_gpus_which_tell_it(tmp_path, monkeypatch):
    """NVML counts millijoules; the first card has no counter."""
    counts = iter([5_000, 12_500])  # at the beginning, at the end

    def read(card):
        if card == 0:
            raise KeyError("not supported")
        return next(counts)

    names = {"nvmlInit": int, "nvmlDeviceGetCount": lambda: 2, "nvmlDeviceGetHandleByIndex": int, "NVMLError": KeyError}
    nvml = types.SimpleNamespace(**names, nvmlDeviceGetTotalEnergyConsumption=read)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(shift_cells, "RAPL", tmp_path)
    assert shift_cells.joules_since(shift_cells.read_joules()) == 7.5


@pytest.mark.slow
def test_a_command_that_is_killed_at_random_moments_ends_as_an_uninterrupted_one(tmp_path):
    flags = (
        "--methods clove --shifts rotation --strengths 0.5,1 --seeds 1 --budget 2 --rounds 20 --clients 8 --clusters 2"
    )
    command = [sys.executable, "-m", "jfcl", "shifts", *flags.split(), "--jobs", "2", "--quiet", "--out"]
    began = time.perf_counter()
    subprocess.run([*command, "whole"], check=True)
    seconds, rng, kills = time.perf_counter() - began, np.random.default_rng(0), 0
    while True:
        process = subprocess.Popen([*command, "killed"])
        with contextlib.suppress(subprocess.TimeoutExpired):
            # It reads the programs of the whole one, and is faster: the first is killed early.
            assert process.wait((rng.uniform(0.3, 1) if kills else 0.15) * seconds) == 0
            break
        process.kill()
        process.wait()
        kills += 1
    assert kills and results(tmp_path / "killed") == results(tmp_path / "whole")
    assert all((tmp_path / "killed" / name).exists() for name in SHIFTS.RANKING_FILES)
