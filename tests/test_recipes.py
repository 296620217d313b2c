"""The papers' experiments as recipes: the frame, and every recipe in a setting of seconds."""

import dataclasses
import json
import multiprocessing
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from matplotlib.figure import Figure

import jfcl
from benchmarks.papers import RECIPES, cfl, cfla, ifca, method_tables, recipes, report, reproduce
from benchmarks.papers import federated_clustering_cifar as fc_cifar
from benchmarks.papers import federated_clustering_mnist as fc
from benchmarks.papers.__main__ import changes_of, main, parser
from benchmarks.papers.byzantine_cfl import PAPER, SCENARIOS, of_paper
from benchmarks.papers.networks import LeNet5
from benchmarks.papers.recipes import Bench, Outcome, Recipe
from jfcl import cli, data, models
from jfcl.core import Clients
from jfcl.experiments import Config
from jfcl.experiments.config import to_saved
from jfcl.experiments.jobs import in_processes
from jfcl.training.local import local_training

CONFIG = Config("fedavg", clients=4, model="linear", rounds=2, examples_per_client=20)


def make(bench, setting):
    summary, records = bench.run("fedavg", dataclasses.replace(CONFIG, rounds=setting["rounds"]))
    return Outcome([{"accuracy": summary["mean"]["accuracy"], "rounds": len(records)}], Figure(), "a note")


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    """A recipe of a run, and one of trials."""

    def trials(bench, setting):
        kept = bench.keep_all({f"{s}": (dict, [["s", s]]) for s in range(setting["seeds"])}, "trials")
        return Outcome([{"sum": sum(row["s"] for row in kept.values())}], None)

    monkeypatch.setitem(RECIPES, "toy", Recipe("a toy", make, full={"rounds": 3}, small={"rounds": 2}))
    monkeypatch.setitem(RECIPES, "trials", Recipe("trials", trials, full={"seeds": 3}, small={"seeds": 2}))


def tiny(monkeypatch, name, **setting):
    """Sets the small setting of a recipe."""
    monkeypatch.setitem(RECIPES, name, RECIPES[name]._replace(small=RECIPES[name].small | setting))


@pytest.mark.slow
def test_a_recipe_keeps_its_runs_and_does_nothing_twice(tmp_path, monkeypatch, capsys):
    first = reproduce("toy", out=tmp_path)
    assert [row["rounds"] for row in first["rows"]] == [2]
    assert first["size"] == "small" and first["notes"] == "a note"
    assert json.loads((tmp_path / "result.json").read_text()) == first
    assert (tmp_path / "figure.png").stat().st_size > 0 and (tmp_path / "fedavg" / "summary.json").exists()
    assert {"device", "versions", "seconds", "title", "setting", "jobs"} <= first.keys()
    with monkeypatch.context() as patch:
        patch.setattr(recipes, "run", lambda *args, **options: pytest.fail("ran again"))
        assert reproduce("toy", out=tmp_path)["rows"] == first["rows"]
    for command in ("report", "compare"):
        assert cli.main([command, str(tmp_path)]) == 2
        assert "holds no run" in " ".join(capsys.readouterr().err.split())
    (tmp_path / "fedavg" / "summary.json").unlink()  # as if stopped in the middle
    assert reproduce("toy", out=tmp_path)["rows"] == first["rows"]
    # Nothing of another setting, damaged or of another version is read, and nothing changes.
    with pytest.raises(ValueError, match=r"another experiment was begun there \(rounds: 2, asked for 3\)"):
        reproduce("toy", out=tmp_path, full=True)
    with pytest.raises(ValueError, match="fedavg there differs in rounds"):
        Bench(tmp_path).run("fedavg", dataclasses.replace(CONFIG, rounds=3))
    (tmp_path / "fedavg" / "metrics.jsonl").write_text("cut off")
    with pytest.raises(ValueError, match=r"fedavg.metrics\.jsonl"):
        reproduce("toy", out=tmp_path)
    assert (tmp_path / "fedavg" / "metrics.jsonl").read_text() == "cut off"
    (tmp_path / "setting.json").unlink()
    with pytest.raises(ValueError, match="out must be a new folder: there are results, and no setting"):
        reproduce("toy", out=tmp_path)


@pytest.mark.slow
def test_more_seeds_are_added_to_those_that_are_there(tmp_path, monkeypatch):
    config = dataclasses.replace(CONFIG, seeds=3)
    together = Bench(tmp_path / "together").run("runs", config)
    bench, ran = Bench(tmp_path / "grown"), []
    run = recipes.run
    monkeypatch.setattr(recipes, "run", lambda config, **o: ran.append((config.seeds, config.seed)) or run(config, **o))
    first = bench.run("runs", dataclasses.replace(config, seeds=1))
    summary, records = bench.run("runs", config)
    assert ran == [(1, None), (1, 1), (1, 2)] and bench.run("runs", config) == (summary, records)
    assert bench.run("runs", dataclasses.replace(config, seeds=1)) == first
    assert summary["seconds"] > first[0]["seconds"]
    key = lambda r: (r["round"], r["seed"])  # noqa: E731
    for mine, theirs in zip(sorted(records, key=key), sorted(together[1], key=key), strict=True):
        assert mine["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-5)
    for name in ("mean", "std"):
        assert summary[name]["loss"] == pytest.approx(together[0][name]["loss"], rel=1e-4)


def test_trials_are_computed_once_and_may_grow(tmp_path):
    first = reproduce("trials", out=tmp_path)
    assert first["rows"] == [{"sum": 1}] and not (tmp_path / "figure.png").exists()
    assert reproduce("trials", out=tmp_path) == first  # its seconds, too
    assert reproduce("trials", out=tmp_path, seeds=4)["rows"] == [{"sum": 6}]
    assert json.loads((tmp_path / "setting.json").read_text())["seeds"] == 4
    bench, file = Bench(tmp_path), tmp_path / "1.json"
    assert bench.keep("1", pytest.fail) == {"s": 1}
    for damaged in ("[", "{}", json.dumps(json.loads(file.read_text()) | {"s": 2})):
        file.write_text(damaged)
        with pytest.raises(ValueError, match=r"1\.json"):
            bench.keep("1", pytest.fail)
        assert file.read_text() == damaged


@pytest.mark.slow
def test_parts_in_processes_of_their_own(tmp_path, monkeypatch):
    """What two processes leave is what one leaves; what is there is not run again."""
    configs = {m: dataclasses.replace(CONFIG, method=m, clusters=2) for m in ("fedavg", "oracle")}
    mine = Bench(tmp_path / "one").run_all(configs)
    together = Bench(tmp_path / "two", jobs=2)
    monkeypatch.setattr(recipes, "run", lambda *args, **options: pytest.fail("ran here"))
    theirs = together.run_all(configs)
    assert list(theirs) == list(mine) == ["fedavg", "oracle"]
    for name, (summary, records) in theirs.items():
        assert [r["accuracy"] for r in records] == pytest.approx([r["accuracy"] for r in mine[name][1]], abs=0.02)
        assert summary["num_rounds"] == 2
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "two").rglob("*")}
    assert together.run_all(configs) == theirs
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "two").rglob("*")} == before


@pytest.mark.slow
def test_processes_share_a_folder_of_programs(tmp_path):
    """That of this process, or one for them alone, which is gone at the end."""
    told = "import jax, pathlib; pathlib.Path({!r}).write_text(str(jax.config.jax_compilation_cache_dir))"
    for folder in (None, str(tmp_path / "programs")):
        jax.config.update("jax_compilation_cache_dir", folder)
        list(in_processes({name: partial(exec, told.format(str(tmp_path / name))) for name in "ab"}, 2))
        jax.config.update("jax_compilation_cache_dir", None)
        [path] = {(tmp_path / name).read_text() for name in "ab"}
        assert path == folder or ("jfcl-programs-" in path and not Path(path).exists())


@pytest.mark.slow
def test_a_process_runs_one_part_after_another(tmp_path):
    told = "import os, pathlib; pathlib.Path({!r}).write_text(str(os.getpid()))"
    names = list(in_processes({name: partial(exec, told.format(str(tmp_path / name))) for name in "abcd"}, 2))
    assert sorted(names) == ["a", "b", "c", "d"] and len({(tmp_path / name).read_text() for name in names}) == 2


@pytest.mark.slow
def test_a_process_that_fails_ends_the_others(tmp_path, capfd):
    bench = Bench(tmp_path, jobs=2)
    waits = f"import pathlib, time\nwhile not pathlib.Path({str(tmp_path / 'good.json')!r}).exists(): time.sleep(0.01)"
    calls = {"good": (dict, [["a", 1]]), "bad": (exec, f"{waits}\nint('x')"), "late": (time.sleep, 600)}
    with pytest.raises(ChildProcessError, match=r"bad\.json has failed, its error stands above"):
        bench.keep_all(calls, "trials")
    assert "bad.json: invalid literal for int() with base 10: 'x'" in capfd.readouterr().err
    assert not (tmp_path / "bad.json").exists() and bench.keep("good", pytest.fail) == {"a": 1}


@pytest.mark.slow
def test_processes_that_are_killed_or_interrupted():
    with pytest.raises(ChildProcessError, match=r"the process of killed was killed by signal 6; .*fewer jobs"):
        list(in_processes({"killed": os.abort}, 1))
    slow = in_processes({"quick": dict, "slow": partial(time.sleep, 600)}, 2)
    assert next(slow) == "quick"
    slow.close()  # as an error, or Ctrl-C: it is interrupted, and awaited


@pytest.mark.slow
@pytest.mark.parametrize("has_begun", [False, True])
def test_an_interrupted_process_prints_no_traceback(has_begun, tmp_path, capfd):
    """Neither one that still imports, nor one that has ended a part after the others were given up."""
    file, processes = tmp_path / "begun", set()
    deaf = f"import pathlib, signal, time; signal.signal(2, signal.SIG_IGN); pathlib.Path({str(file)!r}).touch()"

    def interrupt():
        processes.update(multiprocessing.active_children())
        if file.exists() == has_begun:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(in_processes({"deaf": partial(exec, f"{deaf}; time.sleep(2)")}, 1, tick=interrupt))
    assert [process.exitcode for process in processes] == [0 if has_begun else 130]
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.slow
def test_jobs_that_are_interrupted_or_killed_are_resumed(tmp_path):
    command = [sys.executable, "-m", "benchmarks.papers", "federated_clustering.figure5", "--rounds", "600"]
    command += ["--jobs", "2", "--out", str(tmp_path)]

    def begin_and_send(number):
        before = {file: file.stat().st_mtime_ns for file in tmp_path.glob("*/checkpoints/*")}
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            while before == {file: file.stat().st_mtime_ns for file in tmp_path.glob("*/checkpoints/*")}:
                assert process.poll() is None, process.communicate()[1]
                time.sleep(0.1)
            process.send_signal(number)
            return process.communicate()[1], process.returncode

    errors, status = begin_and_send(signal.SIGINT)
    assert status == 130 and "what has run is kept, continue with the same command" in errors
    assert len(list(tmp_path.glob("*/checkpoints/*"))) >= 2 and not (tmp_path / "result.json").exists()
    assert begin_and_send(signal.SIGKILL)[1] == -signal.SIGKILL
    time.sleep(2)  # the processes end when they see that their parent is gone
    done = subprocess.run([*command, "--quiet"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert [row["run"] for row in rows] == ["global", "local", "fc"]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("toy", {"seeds": 2}, "unknown entry of the setting 'seeds'"),
        ("toy", {"rounds": 0}, "rounds must be an integer, at least 1, got 0"),
        ("toy", {"jobs": 0}, "jobs must be an integer, at least 1, got 0"),
        ("cfl.figure33", {}, "unknown recipe 'cfl.figure33': did you mean 'cfl.figure3'"),
        ("ifca.table1", {"mnist": [[4800, 51]]}, "mnist must be some of .*4800, 50.*, got .*51"),
        ("ifca.figure3", {"radii": []}, "radii must be like .*, got "),
        ("ifca.figure3", {"reading": 3}, 'reading must be like "norm", got 3'),
        ("cfl.figure5", {"models": {"digits": "mlp"}}, "models must be some of"),
        ("cfl.figure5", {"lr": "fast"}, "lr must be like 0.05, got 'fast'"),
    ],
)
def test_what_does_not_fit_a_setting_is_refused(name, changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        reproduce(name, out=tmp_path / "none", **changes)
    assert not (tmp_path / "none").exists()


def test_a_recipe_that_could_not_begin_leaves_the_folder_free(tmp_path):
    for entry, said in {"panels": "panel 'n'", "start": "start 'banana'", "to": "to 'banana'"}.items():
        with pytest.raises(ValueError, match=f"unknown {said}"):
            reproduce("ifca.figure3", out=tmp_path, **{entry: "banana"})
        assert not list(tmp_path.iterdir())


def test_the_command_line(tmp_path, capsys):
    assert main(["--list"]) == 0
    assert "byzantine_cfl.table1" in capsys.readouterr().out
    name = "federated_clustering.figure7"
    assert main([name, "--set", "rounds=2", "--seeds", "1", "--quiet", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "paper's end" in printed and f"kept in {tmp_path}" in printed
    setting = json.loads((tmp_path / "setting.json").read_text())
    assert len(setting.pop("sha256")) == 64 and setting == {"name": name, "rounds": 2, "seeds": 1}
    assert main(["cfl.figure4"]) == 2
    assert "error: unknown recipe 'cfl.figure4'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([name, "--set", "rounds"])
    assert "give ENTRY=VALUE, such as panels=c, and not 'rounds'" in capsys.readouterr().err
    assert cli.main(["reproduce", "cfl.figure3"]) == 2
    assert "python -m benchmarks.papers NAME" in capsys.readouterr().err


def test_commands_in_the_documentation_fit_their_recipes(tmp_path, monkeypatch):
    root = Path(recipes.__file__).parents[2]
    pages = [root / "README.md", root / "benchmarks" / "README.md", *(root / "docs").rglob("*.md")]
    text = "\n".join(page.read_text() for page in pages).replace("\\\n", " ")
    commands = re.findall(r"python -m benchmarks\.papers ([^`\n#]*)", text)
    commands = [command for command in commands if "[" not in command.split("'")[0]]
    inline = re.findall(r"`([a-z_]+\.\w+ --(?:full|seeds|set|rounds) [^`]*)`", text)
    commands += [command.replace("\n", " ") for command in inline]
    results = [json.loads(file.read_text()) for file in (root / "benchmarks/results/reproduce").glob("*.json")]
    made = [r for r in results if (r.get("command") or "").startswith("python -m benchmarks.papers ")]
    of_results = {r["command"].partition("papers ")[2]: r.get("setting") for r in made}
    names = set()
    for i, command in enumerate([*commands, *of_results]):
        args = parser().parse_args(shlex.split(command))
        if args.name in (None, "NAME"):
            continue
        recipe = RECIPES[args.name]._replace(make=lambda bench, setting: Outcome([], None))
        monkeypatch.setitem(RECIPES, args.name, recipe)
        setting = reproduce(args.name, full=args.full, out=tmp_path / str(i), **changes_of(args))["setting"]
        names.add(args.name)
        if of_results.get(command):
            assert json.loads(json.dumps(setting)) == of_results[command], command
    assert len(names) > 10


def test_a_setting_holds_the_options_of_several_methods():
    setting = {"rounds": 3, "cohort": 6, "num_models": 2, "restarts": 4, "columns": ["a", "b"]}
    assert report.configure("local", setting) == Config("local", rounds=3)
    assert report.configure("fedavg", setting) == Config("fedavg", rounds=3, cohort=6)
    assert report.configure("ifca", setting) == Config("ifca", rounds=3, cohort=6, num_models=2, restarts=4)


def test_records_by_seed():
    records = [{"seed": s, "round": t, "gap": [10 * s + t, None]} for s in (1, 0) for t in (5, 6)]
    assert list(report.by_seed(records)) == [0, 1] and report.first_seed(records) == records[:2]
    np.testing.assert_array_equal(report.seed_columns(records, "gap"), [[5, 15], [6, 16]])
    assert np.isnan(report.seed_columns(records, "gap", slot=1)).all()
    assert report.mean_and_std([1.0, 3.0], "x") == {"x": 2.0, "std": pytest.approx(2**0.5)}


PAPERS = ("cfl", "byzantine_cfl", "federated_clustering", "ifca", "cfla", "clove", "pacfl", "fedem")


@pytest.mark.parametrize("name", RECIPES)
def test_settings_fit_together(name):
    recipe = RECIPES[name]
    assert set(recipe.full) == set(recipe.small) and recipe.title.count("\n") == 0
    assert {s["model"] for s in (recipe.full, recipe.small) if "model" in s} <= set(models.MODELS)
    assert name.split(".")[0] in PAPERS, name


def test_the_papers_tables_are_whole():
    for table in PAPER.values():
        for methods in table.values():
            assert all(len(row) == len(SCENARIOS) for row in methods.values())


@pytest.mark.slow
def test_figure_3(tmp_path, monkeypatch):
    tiny(monkeypatch, "cfl.figure3", most_clusters=5, noises=5, trials=5)
    result = reproduce("cfl.figure3", out=tmp_path)
    assert "the lowest share of correct splits is 1.000" in result["notes"]
    assert all(row["correct splits"] >= row["gap above 0"] for row in result["rows"])


@pytest.mark.slow
def test_figure_7_of_federated_clustering(tmp_path):
    rows = reproduce("federated_clustering.figure7", out=tmp_path, seeds=4)["rows"]
    for row in rows[:3]:  # where the blobs are apart, the end is sqrt(d (1 - 1/9)) standard deviations
        assert abs(row["end"] / (row["standard deviation"] * np.sqrt(10 * 8 / 9)) - 1) < 0.05
        assert abs(row["end"] / row["paper's end"] - 1) < 0.05


@pytest.mark.slow
def test_figure_2_of_federated_clustering(tmp_path):
    (row,) = reproduce("federated_clustering.figure2", out=tmp_path, clients_per_cluster=6, rounds=20)["rows"]
    assert 0 < row["intra, largest"] < 20 and row["inter, least"] > 1e4


@pytest.mark.slow
def test_figure_3_of_federated_clustering(tmp_path):
    rows = reproduce("federated_clustering.figure3", out=tmp_path, rounds=150, seeds=1)["rows"]
    end = {(r["clusters"], r["clients in each"], r["method"]): r["end error"] for r in rows}
    for panel in ((4, 4), (4, 16), (16, 4)):
        assert end[*panel, "oracle"] < end[*panel, "local"] < 1 < end[*panel, "fedavg"]
    assert end[4, 16, "federated_clustering"] < 1.5 * end[4, 16, "oracle"]


@pytest.mark.slow
@pytest.mark.parametrize("reading", ["norm", "coordinate"])
def test_figure_3_of_ifca(tmp_path, reading, monkeypatch):
    monkeypatch.setattr(ifca, "DIM", 20)
    setting = {"panels": "ac", "trials": 2, "inits": 3, "rounds": 100, "reading": reading, "start": "scaled"}
    setting |= {"radii": [0.05, 2.0], "noises": [0.1], "clients": [20], "examples": [50], "to": "nearest"}
    rows = reproduce("ifca.figure3", out=tmp_path, **setting)["rows"]
    success = {r["R"]: r["success"] for r in rows if r["panel"] == "a"}
    assert success[2.0] >= 0.5
    kept = len(list(tmp_path.glob("a-*.json")))
    assert kept == 2 and json.loads((tmp_path / "a-100-100-0.json").read_text())["cells"] == [[0.05, 0.1], [2.0, 0.1]]


@pytest.mark.parametrize("column", [fc.CODE, fc.CORRECTED])
def test_every_row_of_table_1_of_federated_clustering_has_a_method(column):
    clients = Clients({"x": np.zeros((8, 40, 28, 28, 1), np.float32), "y": np.zeros((8, 40), np.int32)}, np.full(8, 40))
    states = {}
    for name in fc.METHODS:
        algorithm = fc.table_1_method(name, column, np.arange(8) % 4, {"subgroup_size": 4})
        states[name] = jax.eval_shape(algorithm.init, jax.random.key(0), clients)
    assert states["knn_per"].params.memory.shape == (8, 40, 10)  # neighbours by the outputs


@pytest.mark.slow
def test_ditto_of_the_authors_code():
    """`m ← β m + g(v)`, `v ← v − η (m + λ (v − w))` with the initial `w`, on `½ (x + b − y)²` with x = 0."""
    task = models.task(lambda key: {"b": jnp.float32(0.3)}, lambda p, x: x + p["b"], kind="regression", half=True)
    targets = np.float32([1.0, 5.0, -3.0])
    clients = Clients({"x": np.zeros((3, 2), np.float32), "y": np.repeat(targets[:, None], 2, axis=1)}, np.full(3, 2))
    training = local_training(optax.trace(0.9), num_steps=1, keep="everything")
    algorithm = fc.ditto_of_the_code(task, training, lr=0.1, lam=0.5)
    state = algorithm.init(jax.random.key(0), clients)
    v, w, momentum = np.full(3, 0.3), 0.3, np.zeros(3)
    for t in range(5):
        state, _ = algorithm.step(jax.random.key(t), state, clients)
        momentum = 0.9 * momentum + v - targets
        v = v - 0.1 * (momentum + 0.5 * (v - w))
    np.testing.assert_allclose(state.params["b"], v, rtol=1e-5)
    np.testing.assert_allclose(state.common["b"], w, rtol=1e-5)


@pytest.mark.slow
def test_the_task_of_the_authors_code():
    """The loss is minus the softmax of the label, averaged; training begins as PyTorch's linear layers do."""
    task = fc.likelihood_task(fc.CODE)
    params = task.init(jax.random.key(0))
    for name, inputs in (("Dense_0", 784), ("Dense_1", 200)):
        for part in params[name].values():
            values = np.asarray(part).ravel() * inputs**0.5
            assert np.abs(values).max() <= 1 and (len(values) < 50 or np.abs(values).max() > 0.95)
            assert abs(values.std() - 3**-0.5) < (0.02 if len(values) > 1000 else 0.2)
    assert not np.array_equal(params["Dense_0"]["kernel"], task.init(jax.random.key(1))["Dense_0"]["kernel"])
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(5, 28, 28, 1)).astype(np.float32), "y": np.arange(5)}
    logits = np.asarray(task.apply(params, batch["x"]), np.float64)
    softmax = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(task.loss(params, batch), -softmax[np.arange(5), np.arange(5)], rtol=1e-4)


def test_batches_in_order_are_an_epoch():
    """As of a PyTorch loader: the images in turn, and the last batch with what is left."""
    size, most = np.array([70, 64, 5], np.int32), 70
    x = np.arange(3 * most).reshape(3, most)
    clients = Clients({"x": x}, size)
    turns = [fc.batch_in_order(clients, turn) for turn in range(3)]
    for i in range(3):
        seen = [np.asarray(turn.examples["x"][i, : turn.size[i]]) for turn in turns]
        np.testing.assert_array_equal(np.concatenate(seen), x[i, : size[i]])
    assert [turn.size.tolist() for turn in turns] == [[32, 32, 5], [32, 32, 0], [6, 0, 0]]


def test_an_epoch_in_order_is_gradient_descent_along_it():
    """Each round takes the next batch of `½ mean (b − y)²`, in both forms of local training without momentum."""
    task = models.task(lambda key: {"b": jnp.float32(0.3)}, lambda p, x: x + p["b"], kind="regression", half=True)
    y = np.random.default_rng(0).normal(size=(2, 2, 40)).astype(np.float32)  # of two epochs
    deal = (Clients({"x": np.zeros((2, 40), np.float32), "y": part}, np.full(2, 40, np.int32)) for part in y)
    one = local_training(optax.sgd(0.1), num_steps=1, batch_size=fc.BATCH, keep="everything")
    state = list(fc.trained(jfcl.local_only(task, one), deal, 0, epochs=2, rounds=2, in_order=True))[-1]
    b = np.full(2, 0.3)
    for part in y:
        for batch in (part[:, :32], part[:, 32:]):
            b = b - 0.1 * (b - batch.mean(axis=1))
    np.testing.assert_allclose(state.params["b"], b, rtol=1e-5)


@pytest.mark.slow
def test_clustering_in_every_other_round():
    """The step along the centre has the momentum of all gradients, those of rounds alone included."""
    task = models.task(lambda key: {"b": jnp.float32(0.3)}, lambda p, x: x + p["b"], kind="regression", half=True)
    y = np.float32([1.0, 1.2, 5.0, 5.2])
    clients = Clients({"x": np.zeros((4, 2), np.float32), "y": np.repeat(y[:, None], 2, axis=1)}, np.full(4, 2))
    one = local_training(fc_cifar.with_momentum(False), num_steps=1, keep="everything")
    alone = jfcl.local_only(task, one._replace(optimizer=fc_cifar.with_momentum(True)))
    algorithm = fc_cifar.clustering_every(jfcl.federated_clustering(task, one, radius=1.0), alone, every=2, rounds=5)
    state = algorithm.init(jax.random.key(0), clients)
    b, momentum = np.full(4, 0.3), np.zeros(4)
    for t in range(10):  # two epochs of five rounds: the second begins with a round alone, too
        state, _ = algorithm.step(jax.random.key(t), state, clients)
        gradient = b - y
        if t % 5 % 2 == 0:
            momentum = 0.9 * momentum + gradient
            b = b - 0.1 * gradient
            continue
        centre = gradient.copy()  # each client's centre begins at its own gradient at its model
        for i in range(4):
            points = b[i] - y
            for _ in range(10):
                near = np.abs(points - centre[i]) <= 1.0
                centre[i] = np.where(near, points, centre[i]).mean()
        momentum = 0.9 * momentum + centre
        b = b - 0.1 * momentum
    np.testing.assert_allclose(state.params["b"], b, rtol=1e-4)


@pytest.mark.slow
def test_vgg_16_of_the_authors_code():
    network = fc_cifar.VGG16()
    shapes = jax.eval_shape(network.init, jax.random.key(0), jnp.zeros((1, 32, 32, 3)))
    assert sum(p.size for p in jax.tree.leaves(shapes)) == 14_714_688 + 2 * (512 * 512 + 512) + 5130
    small = fc_cifar.VGG16(1, 8)
    task = models.classification(small, (32, 32, 3), 10)
    params = task.init(jax.random.key(0))
    kernel = np.asarray(params["Conv_12"]["kernel"])  # 3 x 3 x 8 x 8
    assert 0.8 < kernel.std() / (2 / (9 * 8)) ** 0.5 < 1.2
    assert np.abs(params["Dense_0"]["bias"]).max() <= 8**-0.5 and np.ptp(params["Dense_0"]["bias"]) > 0
    x = np.random.default_rng(0).uniform(size=(3, 32, 32, 3)).astype(np.float32)
    batch, real = {"x": x, "y": np.arange(3)}, np.ones(3, bool)
    losses = [float(task.train_loss(jax.random.key(s), params, batch, real)[0].mean()) for s in (1, 2)]
    assert losses[0] != losses[1]  # dropout


@pytest.mark.parametrize("redraw", [False, True])
def test_mnist_is_dealt_once_an_epoch(redraw):
    x = np.arange(40, dtype=np.float32)[:, None, None, None] * np.ones((1, 2, 2, 1), np.float32)
    dataset = data.Dataset("toy", {"x": x, "y": np.arange(40) % 10}, None, 10, None, "")
    cluster = np.array([0, 1, 2, 3])
    deal = fc.deal_images(dataset, "private_label", cluster, 0, redraw)
    first, second = next(deal), next(deal)
    for clients in (first, second):
        number = clients.examples["x"][:, :, 0, 0, 0].astype(int)
        assert sorted(number.ravel().tolist()) == list(range(40))
        np.testing.assert_array_equal(clients.examples["y"], (number % 10 + cluster[:, None]) % 10)
    assert (first.examples["x"] == second.examples["x"]).all() == (not redraw)


@pytest.mark.slow
def test_the_sweep_of_figure_3_is_ifca():
    """All trajectories at once, and one at a time by the algorithm itself."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((9, 6, 5)).astype(np.float32)
    y = rng.standard_normal((2, 9, 6)).astype(np.float32)
    starts = rng.standard_normal((4, 3, 5)).astype(np.float32)
    cell, lr = np.array([0, 1, 1, 0]), np.float32([0.5, 0.1, 1.0, 0.01])
    found = ifca.advance(starts, cell, lr, jnp.asarray(x), jnp.asarray(y), rounds=7)
    line = models.task(lambda key: {"w": jnp.zeros(5)}, lambda p, x: x @ p["w"], kind="regression")
    for p in range(4):
        algorithm = jfcl.ifca(
            line,
            local_training(optax.sgd(lr[p]), num_steps=1),
            num_clusters=3,
            average="gradients",
            init_params={"w": starts[p]},
        )
        clients = Clients({"x": x, "y": y[cell[p]]}, np.full(9, 6, np.int32))
        state = jfcl.rollout(algorithm, clients, key=jax.random.key(0), num_rounds=7)[0]
        np.testing.assert_allclose(found[p], state.params["w"], rtol=1e-5, atol=1e-6)
    assert np.abs(np.asarray(found) - starts).max() > 0.1


def test_a_trial_goes_on_where_models_come_near_late(monkeypatch):
    """Seed 3 succeeds after 300 rounds, although its models hardly come nearer in the first ones."""
    monkeypatch.setattr(ifca, "DIM", 60)
    monkeypatch.setattr(ifca, "LOT", 6)
    assert ifca.sweep_trial(3, [(1.0, 0.0)], 2, 20, 20, ifca._SWEEP | {"inits": 2}).tolist() == [True]
    fed = ifca.data.synthetic.ifca_regression(
        num_clients=20, examples_per_client=20, dim=60, noise=0.0, test_examples=1, seed=3
    )
    x, y = (np.asarray(fed.train.examples[name], float) for name in "xy")
    rng, ends = np.random.default_rng([3, 9]), []
    rng.standard_normal(y.shape)  # the noise, here times 0
    for start in rng.integers(0, 2, (2, 2, 60)):
        for lr in ifca.STEP_SIZES[2]:
            models = start.astype(float)
            with np.errstate(all="ignore"):
                for _ in range(300):
                    away = x @ models.T - y[:, :, None]
                    chosen = np.eye(2)[(away**2).mean(axis=1).argmin(axis=1)]
                    models -= lr * np.einsum("nmk,nk,nmd->kd", away, chosen, x) * 2 / y.size
            ends.append(ifca.distance_to_truth(models[None], fed.truth[None], "matched")[0])
    assert min(ends) <= 0.01


def test_the_clients_of_cfla():
    """Groups of labels share out all images of theirs; a client is tested on those on which it does not train."""
    y = np.random.default_rng(0).integers(0, 10, 3000)
    dataset = data.Dataset("made up", {"x": np.arange(3000)[:, None], "y": y}, None, 10, None, "")
    train, test, group = cfla.deal(dataset, 0, 0.2, 2000)
    assert np.bincount(group).tolist() == [18, 17, 15]
    for k, (first, last) in enumerate([(0, 4), (4, 7), (7, 9)]):
        parts = [(part, i) for i in np.flatnonzero(group == k) for part in (train, test)]
        rows = np.concatenate([part.examples["x"][i, : part.size[i], 0] for part, i in parts])
        assert sorted(rows) == np.flatnonzero((y >= first) & (y <= last)).tolist()
    assert (train.size == (train.size + test.size) // 5).all()
    network = jax.eval_shape(LeNet5(10).init, jax.random.key(0), jnp.zeros((1, 28, 28, 1)))
    assert sum(p.size for p in jax.tree.leaves(network)) == 61_706


def test_the_clients_of_clove_are_those_of_its_table(monkeypatch):
    monkeypatch.setattr(method_tables, "_federation", lambda data_dir, setting, of, **options: setting["clients"])
    monkeypatch.setattr(method_tables, "_trained", lambda of, clients, *rest: clients)
    full = RECIPES["clove.labels"].full
    assert {d: method_tables._clove_cell(None, full, {"data": d}) for d in full["datasets"]} == {
        "mnist": 25,
        "cifar10": 15,
    }


def test_distances_to_the_truth():
    truth = np.array([[[0.0, 0.0], [3.0, 4.0]]])
    found = np.array([[[3.0, 4.0], [0.0, 1.0]], [[0.0, 1.0], [0.0, 2.0]]])
    truth = np.repeat(truth, 2, axis=0)
    np.testing.assert_allclose(ifca.distance_to_truth(found, truth, "matched"), [0.5, (1 + np.hypot(3, 2)) / 2])
    np.testing.assert_allclose(ifca.distance_to_truth(found, truth, "nearest"), [0.5, 1.5])


_FEW = {"rounds": 2, "examples_per_client": 20, "seeds": 1, "local_epochs": 1, "batch_size": 10, "lr": 0.1}
TINY = {
    "cfl.figure5": {"examples": {"mnist": [10]}, "models": {"mnist": "linear"}, "rounds": 2, "seeds": 1},
    "cfl.figure6": {"examples": {"mnist": 10}, "models": {"mnist": "linear"}, "rounds": 2, "seeds": 2},
    "cfl.figure7": {"split": {"rounds": 10, "seeds": 2}, "rounds": 3, "examples_per_client": 20, "model": "linear"},
    "cfl.label_swap": _FEW | {"model": "linear", "min_rounds": 1, "eps_1": 2.0, "eps_2": 0.1},
    "cfl.newcomers": {"model": "linear", "rounds": 3, "examples_per_client": 20, "newcomer_examples": [5]}
    | {"newcomers": 8, "min_rounds": 1, "eps_1": 2.0, "eps_2": 0.1},
    "cfl.figure8": _FEW | {"min_rounds": 1, "gamma_max": 0.0},
    "cfl.figure9": _FEW | {"min_rounds": 1, "vocab_size": 50, "length": 6},
    "cfla.mnist": {"rounds": 5, "images": 15, "local_epochs": 1},
    "clove.labels": {"rounds": 2, "clients": 10, "examples_per_client": 10},
    "pacfl.labels": {
        "rounds": 2,
        "clients": 10,
        "cohort": 5,
        "clusters": 5,
        "examples_per_client": 10,
        "local_epochs": 1,
    },
    "fedem.readme": {"rounds": 2, "clients": 6, "examples_per_client": 20},
    "federated_clustering.figure4_code": {"clients": 8, "images": 40, "epochs": 2, "eval_every": 1, "every": 2}
    | {"channels": 1, "dense": 4, "subgroup_size": 4},
    "federated_clustering.figure6": {"clients": 8, "hostile": 2, "images": 33, "subgroup_size": 5, "epochs": 2},
    "federated_clustering.table1": {"clients": 20, "subgroup_size": 4, "epochs": 1, "epochs_of_fc": 1},
    "ifca.figure4": {"mnist": [(8, 20)], "rounds": 2},
    "ifca.table1": {"mnist": [(1200, 200)], "rounds": 1, "local_rounds": 1},
    "ifca.table1_cifar10": {"clients": 4, "cohort": 2, "examples_per_client": 10, "rounds": 1, "local_rounds": 1},
    "ifca.table2": {"clients": 20, "cohort": 4, "rounds": 2, "local_rounds": 1, "model": "linear"},
    "byzantine_cfl.table1": {"rounds": 2, "examples_per_client": 2, "clients": 10, "datasets": ["mnist"], "seeds": 1},
}


WITHOUT_FIGURE = ("federated_clustering.table1", "cfla.mnist", "clove.labels", "pacfl.labels", "fedem.readme")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:round .* all clients use one of the")  # after two rounds of a tiny run
@pytest.mark.filterwarnings("ignore:round .* the training loss")  # steps against the gradient, in figure 6
@pytest.mark.parametrize("name", TINY)
def test_recipes_on_real_data(name, tmp_path, data_dir, monkeypatch):
    tiny(monkeypatch, name, **TINY[name])
    with jax.numpy_dtype_promotion("standard"):  # optax's Adam is not strict
        result = reproduce(name, out=tmp_path, data_dir=str(data_dir))
    has_figure = name not in WITHOUT_FIGURE
    assert result["rows"] and (tmp_path / "figure.png").exists() == has_figure
    assert all(any(column.startswith("paper") for column in row) for row in result["rows"])
    for row in result["rows"]:
        if row.get("paper %") is not None:
            ours = next(row[name] for name in ("trained alone %", "clients %", "accuracy %") if name in row)
            assert row["difference"] == pytest.approx(ours - row["paper %"]) and row["seconds"] > 0
    for run in tmp_path.glob("*/config.json"):
        saved = json.loads(run.read_text())
        assert set(to_saved(Config(saved["method"]), "")) <= set(saved)


@pytest.mark.parametrize(("rounds", "last"), [((4, 9), 9), ((4, None), None)])
def test_the_clusters_of_ifca_are_found_when_all_seeds_have_them(rounds, last, monkeypatch):
    seeds = [{"accuracy": 0.9, "cluster_accuracy": 1.0, "rounds_to_recovery": at} for at in rounds]
    run = {"per_seed": seeds, "num_rounds": 10, "seconds": 1.0}, [{"round": 1, "seed": 0, "accuracy": 0.9}]
    of = lambda _, configs: {name: (run[0] | {"method": c.method}, run[1]) for name, c in configs.items()}  # noqa: E731
    monkeypatch.setattr(Bench, "run_all", of)
    row = ifca.table_1(Bench(Path()), RECIPES["ifca.table1"].small).rows[0]
    assert row["method"] == "ifca" and row["99 % from round"] == last


def test_other_numbers_of_clients_have_no_figures_of_the_paper():
    assert of_paper(100, "mnist", "noisy", "FL") == 96.9 and of_paper(20, "mnist", "noisy", "FL") is None


def test_a_split_before_the_first_record_has_a_row():
    record = {"seed": 0, "num_clusters": 2, "cluster_accuracy": 1.0, "accuracy": 0.5, "separation_gap": [0.1, 0.2]}
    records = [record | {"round": 1, "split_from": [-1, 0]}, record | {"round": 2, "split_from": [-1, -1]}]
    events = [row["event"] for row in cfl._stages(records, {"split": "", "end": ""}, "accuracy")]
    assert events == ["0 splits, 1 is new", "end, 2 clusters"]


def test_gaps_with_the_model_of_one_data_set():
    setting = RECIPES["cfl.figure5"].full | {"models": {"mnist": "mlp"}}
    models_of = {data: cfl._gap_config(setting, data, "updates", 20, 1).model for data in ("mnist", "cifar10")}
    assert models_of == {"mnist": "mlp", "cifar10": "cnn5"}
