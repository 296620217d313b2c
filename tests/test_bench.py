"""`jfcl bench` and what it is made of: counts against hand and XLA, rows against each other, bad input; no times."""

import argparse
import dataclasses
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jfcl
from benchmarks.papers import __main__ as papers
from benchmarks.papers.recipes import RECIPES, _check_entry
from jfcl import cli, plots
from jfcl.experiments import bench
from jfcl.experiments.config import to_saved
from jfcl.experiments.setups import malicious_clients
from jfcl.models import MODELS

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
TINY = {"methods": ["fedavg"], "models": ["linear"], "mappings": ["vmap"], "examples": 4, "batch_size": 2}


@pytest.fixture
def floor(monkeypatch):
    """The module `benchmarks/floor.py`."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("floor")


@pytest.mark.parametrize("model", ["mlp", pytest.param("cnn5", marks=pytest.mark.slow)])
def test_multiplications_are_those_that_xla_counts(model, floor):
    module, batch = MODELS[model][0](10), 8
    task = bench.make_task(model)
    params = jax.eval_shape(task.init, jax.random.key(0))
    x = jax.ShapeDtypeStruct((batch, *bench.INPUT_SHAPE), np.float32)
    counted = jax.jit(task.apply).lower(params, x).cost_analysis()["flops"]
    products = 2 * batch * sum(floor.multiply_adds(module, bench.INPUT_SHAPE))
    assert products == pytest.approx(counted, rel=0.05)  # XLA also counts biases, activations and pooling


def test_the_layers_of_a_step_have_its_multiplications(floor):
    cnn_cpu = importlib.import_module("cnn_cpu")
    products = sum(flop for _, _, flop in cnn_cpu.operations().values())
    first, *others = floor.multiply_adds(MODELS[cnn_cpu.CASE.model][0](10), bench.INPUT_SHAPE)
    assert products == 2 * cnn_cpu.CASE.batch * (2 * first + 3 * sum(others))  # forward, weights; inputs of all but one


@pytest.mark.slow
def test_the_profile_of_a_step_on_one_core():
    command = [sys.executable, BENCHMARKS / "cnn_cpu.py", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "conv 2" in done.stdout and "a whole step" in done.stdout


def test_measure_stops_at_its_limits():
    def work(x):
        return jnp.sin(x) @ jnp.cos(x)

    x = jnp.ones((64, 64))
    assert len(bench.measure(work, x, repeats=4)["seconds"]) == 4
    assert len(bench.measure(work, x, repeats=4, limit_seconds=0)["seconds"]) == 1
    found = bench.measure(work, x, repeats=4, limit_mb=0)
    assert found["seconds"] == [] and found["temporary_mb"] > 0


@pytest.mark.slow
def test_a_sweep_has_a_row_for_every_combination():
    wanted = {"methods": ["ifca", "local"], "models": ["linear"], "mappings": ["chunked(4)", "vmap"]}
    heard = []
    found = bench.sweep(
        **wanted,
        clients=[5],
        examples=4,
        batch_size=2,
        clusters=2,
        repeats=2,
        seconds=100.0,
        tick=lambda what, total: heard.append(total),
    )
    rows = found["rows"]
    names = [(r["clients"], r["method"], r["model"], r["mapping"]) for r in rows]
    assert len(set(names)) == 4 and heard == [4] * 4
    for row in rows:
        assert len(row["runs"]) == 2 and row["seconds"] == pytest.approx(np.median(row["runs"]))
        assert row["client_steps/s"] == pytest.approx(row["clients"] * 2 * row["rounds/s"])
    assert {"device", "versions", "settings"} <= set(found)
    assert json.loads(json.dumps(found["rows"])) == rows


def test_rounds_that_would_take_too_long_or_too_much_memory_are_left_out(monkeypatch):
    def measure(fn, *args, repeats, limit_mb, limit_seconds):
        return {"seconds": [2.0] * repeats * (limit_mb > 1), "compile_seconds": 1.0, "temporary_mb": 1.0}

    monkeypatch.setattr(bench, "measure", measure)
    small, large = bench.sweep(**TINY, clients=[2, 4], seconds=3.0)["rows"]
    assert small["client_steps/s"] == 2 and large["left_out"] == "takes 4.0 s" and "seconds" not in large
    monkeypatch.setattr(bench.memory, "free_memory", lambda: 0.0)
    (row,) = bench.sweep(**TINY, clients=[2])["rows"]
    assert row["left_out"].startswith("needs") and "seconds" not in row
    assert len(plots.throughput([row]).axes) == 1  # nothing to draw is no error


@pytest.mark.slow
def test_all_mappings_do_the_same_round():
    case = bench.Case("fedavg", "linear", clients=7, examples=6, batch=3, steps=2, lr=0.1)
    arguments = bench.make_arguments(case)
    states = [jax.jit(bench.make_algorithm(case, make()).step)(*arguments)[0] for make in bench.MAPPINGS.values()]
    for state in states[1:]:
        np.testing.assert_allclose(
            state.params["Dense_0"]["kernel"], states[0].params["Dense_0"]["kernel"], rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize(
    "options, said",
    [
        ({"methods": ["fedavgg"]}, "unknown method 'fedavgg': did you mean 'fedavg'"),
        ({"models": ["lstm"]}, "unknown model 'lstm'"),
        ({"models": ["vgg"]}, "images are too small for this model"),
        ({"mappings": ["chunked"]}, "unknown mapping 'chunked'"),
        ({"mappings": []}, "mappings must be at least one"),
        ({"clients": []}, "clients must be at least one"),
        ({"clients": [10, 0]}, "clients must be an integer, at least 1, got 0"),
        ({"local_steps": 0}, "local_steps must be an integer, at least 1"),
        ({"local_steps": 10**6}, "local_steps must be at most 10000"),
        ({"seconds": 0}, "seconds must be positive, got 0"),
        ({"methods": ["ifca"], "clients": [3], "clusters": 4}, "clusters must be at most the 3 clients there are"),
        ({"methods": ["jfcl:pacfl"], "clients": [3], "clusters": 4}, "at most the 3 clients there are, for jfcl:pacfl"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(monkeypatch, options, said):
    monkeypatch.setattr(bench, "measure", None)
    with pytest.raises(ValueError, match=said):
        bench.sweep(**options)


def test_throughput_draws_a_line_for_every_method_and_mapping():
    rows = [
        {"method": m, "model": d, "mapping": a, "clients": n, "client_steps/s": float(n)}
        for m in ("fedavg", "ifca")
        for d in ("mlp", "cnn_mnist")
        for a in ("vmap", "chunked(1)")
        for n in (1, 10)
    ]
    axes = plots.throughput(rows).axes
    assert [a.get_title() for a in axes] == ["mlp", "cnn_mnist"] and {len(a.lines) for a in axes} == {4}
    assert all(a.get_xscale() == a.get_yscale() == "log" for a in axes)


@pytest.mark.slow
def test_the_command_keeps_results_and_never_overwrites_them(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli, "_compilation_cache", None)  # compilation is measured, so nothing may come from a cache
    monkeypatch.setenv("COLUMNS", "80")
    command = ["bench", "--methods=fedavg", "--models=linear", "--clients=3", "--quiet", f"--out={tmp_path / 'b'}"]
    assert cli.main(command) == 0
    first = (tmp_path / "b" / "bench.json").read_bytes()
    assert {p.name for p in (tmp_path / "b").iterdir()} == {"bench.json", "throughput.png"}
    found = json.loads(first)
    assert {row["model"] for row in found["rows"]} == {"linear"} and found["settings"]["clients"] == [3]
    out = capsys.readouterr().out
    assert "fedavg" in out and "chunked(4)" in out and found["device"] in out and "…" not in out
    assert cli.main(command) == 0
    assert (tmp_path / "b" / "bench.json").read_bytes() == first and (tmp_path / "b-2" / "bench.json").exists()


def test_the_command_refuses_bad_input(tmp_path, capsys):
    assert cli.main(["bench", "--methods", "fedprox", "--out", str(tmp_path / "b")]) == 2
    assert "unknown method 'fedprox'" in capsys.readouterr().err and not (tmp_path / "b").exists()
    assert cli.main(["bench", "--clients", "ten"]) == 2


# The job that the peers are given (benchmarks/against_peers.py).


@pytest.fixture
def peers_job(monkeypatch):
    """The modules `against_peers` and `job`, as the scripts import them."""
    for folder in (BENCHMARKS, BENCHMARKS / "peers"):
        monkeypatch.syspath_prepend(folder)
    monkeypatch.delenv("JFCL_DATA_DIR", raising=False)
    return importlib.import_module("against_peers"), importlib.import_module("job")


SECTIONS = "bipartition cosine threshold clipping kmeans spectral aggregators of_updates convolution layers"


@pytest.mark.slow
@pytest.mark.parametrize("section", SECTIONS.split())
def test_the_kernels_and_what_they_are_compared_with_run(peers_job, monkeypatch, section):
    script = importlib.import_module("kernels")
    monkeypatch.setattr(script, "run_peer", lambda *_: None)
    assert [*script.SECTIONS] == SECTIONS.split()
    rows = script.SECTIONS[section](quick=True)
    assert rows and all(row["seconds"] > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("model, clusters", [("mlp", 1), ("mlp", 2), ("cnn_mnist", 1)])
def test_the_judge_of_all_libraries_agrees_with_jfcl(peers_job, tmp_path, model, clusters):
    against_peers, job = peers_job
    case = {"method": "ifca", "model": model, "clients": 4, "examples": 12, "clusters": clusters}
    case["data"] = str(tmp_path / "data.npz")
    assert against_peers.write_data(case, tmp_path / "data.npz") == "digits"
    data = job.load(case)
    assert data.x.shape == (4, 12, 28, 28, 1) and data.kind.tolist() == [i % clusters for i in range(4)]
    task, names = bench.make_task(model), sorted(bench.make_task(model).init(jax.random.key(0)))
    params = [{n: {"kernel": k, "bias": b} for n, (k, b) in zip(names, layers, strict=True)} for layers in data.models]
    reached = []
    for x, y, kind in zip(data.x, data.y, data.kind, strict=True):
        losses = [task.loss(p, {"x": x, "y": y}).mean() for p in params]
        np.testing.assert_allclose([job.mean_loss(layers, x, y) for layers in data.models], losses, rtol=1e-4)
        best = params[int(np.argmin(losses))]
        test = {"x": data.test_x[kind][:300], "y": data.test_y[kind][:300]}
        reached.append(task.scores(task.correct, best, test).mean())
    data = data._replace(test_x=data.test_x[:, :300], test_y=data.test_y[:, :300])
    assert job.accuracy(data, data.models) == pytest.approx(np.mean(reached), abs=0.004)  # one image in 300 may tie


def test_libraries_that_disagree_are_found_out(peers_job):
    rows = [{"job": "a", "library": name, "accuracy": value} for name, value in (("x", 0.9), ("y", 0.93))]
    peers_job[0].check_agreement(rows, 0.04)
    with pytest.raises(ValueError, match="a: accuracies differ by more than"):
        peers_job[0].check_agreement(rows, 0.02)


def test_a_row_names_the_version_of_the_peer_that_ran(peers_job, monkeypatch):
    against_peers = peers_job[0]
    result = {"seconds": [1.0, 1.0], "accuracy": 0.5, "versions": {"blazefl": "3.0.0"}}
    monkeypatch.setattr(against_peers, "write_data", lambda *_: "digits")
    monkeypatch.setattr(against_peers, "run_peer", lambda *_: result)
    rows = against_peers.run_job("fedavg mlp", {"clusters": 1} | against_peers.JOBS["fedavg mlp"], 2)
    assert [row["library"] for row in rows][-2:] == ["Flower 1.41", "BlazeFL 3.0.0"]


def test_the_tables_of_the_pages_are_those_of_the_results(peers_job):
    tables = importlib.import_module("tables")
    measured = {name for names in tables.PAGES.values() for name in names}
    measured = {name for name in measured if (BENCHMARKS / "results" / f"{name}.json").exists()}
    texts = [page.read_text() for page in tables.PAGES]
    assert all(any(f"<!-- {name} -->\n\n| " in text for text in texts) for name in measured)
    for page, names in tables.PAGES.items():
        text = page.read_text()
        assert tables.filled(text, names) == text, "run python benchmarks/tables.py"
        for target in re.findall(r"\]\((?!https:)([^)#]+)", text):
            assert (page.parent / target).exists(), target


def test_what_agrees_is_within_5_points_of_the_paper(peers_job):
    verdicts = importlib.import_module("verdicts")
    found = [row for _, rows in verdicts.panels() for row in rows if row[-1] == verdicts.AGREES]
    assert len(found) > 20 and [row for row in found if abs(row[2] - row[1]) > 5] == []


def test_a_result_has_the_command_that_made_it(peers_job, monkeypatch, tmp_path):
    common = importlib.import_module("common")
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["/clone/benchmarks/against_peers.py", "--only", "fedavg mlp"])
    common.report("times", "", ["seconds"], [{"seconds": 1.0}])
    [file] = tmp_path.iterdir()
    assert json.loads(file.read_text())["command"] == "python benchmarks/against_peers.py --only 'fedavg mlp'"

    monkeypatch.setattr(sys, "argv", [*sys.argv, "--turns", "1"])  # a trial
    common.report("times", "", ["seconds"], [{"seconds": 2.0}])
    assert json.loads(file.read_text())["rows"] == [{"seconds": 1.0}] and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("script, new", [("mixtures", 0), ("label_flips", 1)])
def test_a_trial_does_not_add_to_the_results_nor_rows_of_another_device(script, new, peers_job, monkeypatch):
    module, written = importlib.import_module(script), []
    monkeypatch.setattr(importlib.import_module("common"), "environment", lambda: {"device": "1 x NVIDIA H200"})
    monkeypatch.setattr(module, "report", lambda name, _, columns, rows, command: written.append((name, len(rows))))
    monkeypatch.setattr(module, "run", lambda args: vars(args) | {"accuracy": 1.0}, raising=False)
    monkeypatch.setattr(module, "PARTS", {"fedem": (lambda args: [], 1)}, raising=False)
    arguments = ["fedem"] if script == "mixtures" else []
    for more in ([], ["--write"]):
        monkeypatch.setattr(sys, "argv", [script, *arguments, *more])
        module.main()
    assert written == [(None, new), (script.replace("_", "-"), new)]


def test_rows_that_stay_keep_the_version_that_measured_them(peers_job, monkeypatch, tmp_path):
    common, name = importlib.import_module("common"), "mixtures"
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(common, "environment", lambda: {"device": "1 x CPU", "versions": {"jfcl": "0.1.0"}})
    common.report(name, "", ["value"], [{"value": 1.0}], "command")
    monkeypatch.setattr(common, "environment", lambda: {"device": "1 x CPU", "versions": {"jfcl": jfcl.__version__}})
    for _ in range(2):
        common.report(name, "", ["value"], [*common.rows_there(name), {"value": 2.0}], "command")
    assert common.rows_there(name) == [{"jfcl": "0.1.0", "value": 1.0}, {"value": 2.0}, {"value": 2.0}]


def test_the_commands_of_drift_write_the_files_that_hold_them(peers_job, monkeypatch):
    module, written = importlib.import_module("drift"), []
    monkeypatch.setattr(module, "rows_of", lambda *_: [])
    monkeypatch.setattr(module, "report", lambda name, *_: written.append(name))
    for file in (BENCHMARKS / "results").glob("drift*-cpu-2-cores.json"):
        monkeypatch.setattr(sys, "argv", shlex.split(json.loads(file.read_text())["command"])[1:])
        module.main()
        assert file.name == f"{written[-1]}-cpu-2-cores.json"
    assert len(written) > 3


class Parsed(Exception):
    """The options of a script are right; it does not run."""


def benchmark_commands() -> list[list[str]]:
    """Returns the commands of the scripts and of the papers' experiments, on all pages and in the results."""
    pages = [BENCHMARKS / "README.md", *BENCHMARKS.parent.glob("*.md"), *BENCHMARKS.parent.glob("docs/**/*.md")]
    results = [json.loads(file.read_text()) for file in BENCHMARKS.glob("results/**/*.json")]
    lines = [result.get("command") or "" for result in results]
    for text in (page.read_text().replace("\\\n", " ") for page in pages):
        lines += re.findall(r"^ *(python (?:benchmarks/|-m benchmarks\.papers).*)", text, re.MULTILINE)
        lines += [" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]
    found = []
    for line in (line.partition("  #")[0] for line in lines):
        if line.partition(" ")[0] in RECIPES:  # so do the pages of the papers write them
            line = f"python -m benchmarks.papers {line}"
        elif re.match(r"\w+\.py --", line):
            line = f"python benchmarks/{line}"
        is_form = re.search(r"\b(NAME|PART|TASK|DIR)\b|, (and|with) |…", line)  # no command, but what one is like
        if re.match(r"python (benchmarks/|-m benchmarks\.papers)", line) and not is_form:
            words = shlex.split(line.partition(" for the table")[0], comments=True)
            found.append(words[1 if words[1] != "-m" else 2 :])
    return found


def test_the_commands_of_the_pages_and_of_the_results_are_understood(peers_job, monkeypatch):
    parse_args = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser, args=None):
        parse_args(parser, args)
        raise Parsed

    commands, scripts = benchmark_commands(), {}
    assert len(commands) > 80
    for command, *words in commands:
        if command == "benchmarks.papers":
            args = papers.parser().parse_args(words)
            recipe = RECIPES[args.name] if args.name else None  # --list has none
            for entry, value in papers.changes_of(args).items():
                known = recipe.small if recipe.full[entry] is None else recipe.full
                _check_entry(entry, value, known[entry])
            continue
        script = BENCHMARKS.parent / command
        if "def main" not in script.read_text():
            assert not words, command
            continue
        if script not in scripts:
            spec = importlib.util.spec_from_file_location(f"script_{script.stem}", script)
            scripts[script] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(scripts[script])
        with monkeypatch.context() as patched, pytest.raises(Parsed):
            patched.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
            patched.setattr(sys, "argv", [command, *words])
            scripts[script].main()


def test_every_script_answers_help():
    """Without a parser, `--help` would run it, and write the results of the repository again."""
    scripts = [file for file in BENCHMARKS.glob("*.py") if '__name__ == "__main__"' in file.read_text()]
    assert [file.name for file in scripts if ".parse_args(" not in file.read_text()] == []
    assert len(scripts) > 20


def test_a_cell_beside_the_paper(peers_job):
    beside = importlib.import_module("tables").beside_the_paper
    cpu, gpu = "1 x CPU, 2 cores", "1 x NVIDIA H100 80GB HBM3"
    one = {"seeds": 1, "accuracy %": 94.0, "paper %": None}
    shown = {"ours_%": "94.00", "paper_%": None, "difference": None, "device": "CPU"}
    assert beside(one, cpu) == one | shown
    two = {"seeds": [0, 1], "clients %": 94.0, "std": 0.5, "paper %": 95, "seconds by seed": [None, 10.0]}
    row = beside(two, gpu)
    assert row["seeds"] == 2 and row["ours_%"] == "94.00 ± 0.50" and row["difference"] == "−1.0"
    assert row["device"] == "H100"
    row = beside(two | {"seconds by seed": [1000, 10.0], "device by seed": [cpu, gpu]}, cpu)
    assert row["device"] == "CPU, H100"


@pytest.fixture
def cells(peers_job, monkeypatch, tmp_path):
    """`benchmarks/byzantine_cells.py`, with results in `tmp_path`, and a function that makes the folder of a run."""
    module = importlib.import_module("byzantine_cells")
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    (tmp_path / "reproduce").mkdir()
    results = {}
    monkeypatch.setattr(module, "read_run", lambda folder: results[folder])

    def run(method, seed, accuracy, excluded=(), scenario="label flip", device="1 x CPU, 2 cores", **changes):
        setting = RECIPES["byzantine_cfl.table2"].full | {"rounds": 20}
        seeds = seed if isinstance(seed, tuple) else (seed,)
        config = dataclasses.replace(module.cell_config(setting, "mnist", scenario, method), seeds=1, seed=seeds[0])
        folder = tmp_path / f"{method}-{seeds[0]}-{len(results)}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(to_saved(dataclasses.replace(config, **changes), "")))
        summary = {"num_rounds": 20, "seconds": sum(10.4 + s for s in seeds)}
        summary |= {"per_seed": [{"seed": s, "accuracy": accuracy} for s in seeds]}
        summary |= {"device": device, "versions": {"jax": "0"}}
        rounds = np.where(malicious_clients(config), 2, 0)  # 3 of 10
        rounds[list(excluded)] = 7
        records = [
            {"seed": s, "round": r, "accuracy": r / 100, "excluded": rounds.tolist()} for r in (5, 8, 20) for s in seeds
        ]
        results[folder] = summary, records
        return folder

    return module, run


def test_seeds_are_added_to_their_cell(cells):
    module, run = cells
    module.add(run("FL", 0, 0.5))
    path = module.add(run("CFL", 0, 0.9))
    benign = int(np.flatnonzero(~malicious_clients(module.cell_config(
        RECIPES["byzantine_cfl.table2"].full, "mnist", "label flip", "CFL")))[0])  # fmt: skip
    assert module.add(run("CFL", 1, 0.8, excluded=[benign])) == path
    result = json.loads(path.read_text())
    assert path.name == "byzantine_cfl.table2-20-rounds.json" and "20 of the paper's 200 rounds" in result["title"]
    cfl, fl = result["rows"]  # in the order of the paper's tables
    assert fl["method"] == "FL" and fl["accuracy %"] == 50 and fl["paper %"] == 81.6
    assert cfl["seeds"] == 2 and cfl["accuracy %"] == pytest.approx(85) and cfl["std"] == pytest.approx(50**0.5)
    assert cfl["adversaries removed"] == "3 of 3" and cfl["benign removed"] == 1 and cfl["all out by round"] == 2
    assert cfl["benign out in rounds"] == [7, 7] and fl.get("benign out in rounds") is None
    assert cfl["seconds by seed"] == [10, 11] and cfl["accuracy % by round"] == {"5": 5, "20": 20}


def test_a_run_of_several_seeds_adds_those_that_its_cell_does_not_have(cells):
    module, run = cells
    module.add(run("CFL", 0, 0.9))
    three = run("CFL", (0, 1, 2), 0.6, excluded=[0])
    path = module.add(three)
    (row,) = json.loads(path.read_text())["rows"]
    assert row["accuracy % by seed"] == [90, 60, 60] and row["seeds"] == 3 and row["accuracy %"] == pytest.approx(70)
    assert row["seconds by seed"] == [10, 11, 11] and row["benign out in rounds"] == [7, 7]
    with pytest.raises(ValueError, match="seed 0, 1, 2 of mnist, label flip, CFL; next is 3"):
        module.add(three)


def test_a_cell_may_have_seeds_of_several_devices(cells):
    module, run = cells
    module.add(run("FL", 0, 0.5))
    path = module.add(run("FL", 1, 0.7, device="1 x NVIDIA H100", precision="tf32"))
    result = json.loads(path.read_text())
    assert result["device"] == "1 x CPU, 2 cores"
    assert (
        result["rows"][0]["device by seed"]
        == ["1 x CPU, 2 cores", "1 x NVIDIA H100"]
        == [*result["versions by device"]]
    )
    assert result["rows"][0]["products by seed"][1] == "tf32" and "byzantine_cfl.table2" in result["command"]
    del result["rows"][0]["device by seed"]  # as in files of one device
    path.write_text(json.dumps(result))
    module.add(run("FL", 2, 0.7))
    assert json.loads(path.read_text())["rows"][0]["device by seed"] == ["1 x CPU, 2 cores"] * 3


def test_runs_on_the_inputs_of_the_code_have_a_table_of_their_own(cells):
    module, run = cells
    path = module.add(run("CFL", 0, 0.9, model="benchmarks.papers.networks:CNNMnist32"))
    assert path.name == "byzantine_cfl.table2-20-rounds-inputs-of-the-code.json"
    assert json.loads(path.read_text())["command"].endswith("--set inputs=code")


def test_a_clean_run_of_cfl_without_an_exclusion_counts_as_fl(cells):
    module, run = cells
    path = module.add(run("CFL", 0, 0.9, scenario="clean"))
    fl = next(r for r in json.loads(path.read_text())["rows"] if r["method"] == "FL")
    assert fl["accuracy %"] == 90 and fl["paper %"] == 98.6 and fl["seconds by seed"] == [None]
    with pytest.raises(ValueError, match="next is 1"):
        module.add(run("FL", 0, 0.9, scenario="clean"))
    module.add(run("CFL", 1, 0.8, scenario="clean", excluded=[4]))
    seeds = {r["method"]: r["seeds"] for r in json.loads(path.read_text())["rows"]}
    assert seeds == {"CFL": 2, "FL": 1}
    path.unlink()
    module.add(run("CFL", 0, 0.8, scenario="clean", excluded=[4]))
    module.add(run("CFL", 1, 0.9, scenario="clean"))  # FL's first seed is missing
    assert [r["method"] for r in json.loads(path.read_text())["rows"]] == ["CFL"]


def test_seconds_of_runs_beside_others_are_left_out(cells):
    module, run = cells
    folder = run("FL", 0, 0.5)
    (folder.parent / "result.json").write_text(json.dumps({"jobs": 5}))
    assert json.loads(module.add(folder).read_text())["rows"][0]["seconds by seed"] == [None]


def test_runs_that_are_not_the_next_seed_of_a_cell_are_refused(cells):
    module, run = cells
    path = module.add(run("CFL", 0, 0.9))
    before = path.read_bytes()
    for wrong, why in (
        (run("CFL", 0, 0.9), "seed 0 of mnist, label flip, CFL; next is 1"),
        (run("CFL", 2, 0.9), "next is 1"),
        (run("CFL", 1, 0.9, lr=0.1), "other options than the table's: lr 0.1"),
        (run("FL", 0, 0.9, clients=20), "clients: 20; the tables have 100, 10"),
    ):
        with pytest.raises(ValueError, match=re.escape(why)):
            module.add(wrong)
    assert path.read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("job", ["fedavg mlp", "flhc mlp"])
def test_the_same_job_in_every_library_that_is_set_up(job):
    command = [sys.executable, BENCHMARKS / "against_peers.py", "--quick", "--only", job]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "jfcl, vmap" in done.stdout


@pytest.fixture(scope="module")
def gpu():
    """The module `benchmarks/gpu.py`, with the modules beside it."""
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("gpu")
    sys.path.remove(str(BENCHMARKS))


FORMS = [
    ("ifca, mlp", "bmm"),
    ("ifca, mlp", "bmm, bfloat16"),
    ("fedavg, cnn", "vmap(grad)"),
    ("federated clustering, mlp", "bmm, CUDA graph, Gram matrix in float32"),
    ("fedavg, resnet", "one by one, CUDA graph"),
    ("cfl, mlp", "bmm, similarities"),
    ("cfl, mlp", "bmm, bfloat16"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("row", "form"), FORMS)
def test_rounds_of_the_gpu_benchmark_do_the_same_work(row, form, gpu, tmp_path):
    """Ours, plain JAX and PyTorch give the same models; full batches, since each shuffles differently."""
    case, shape = gpu.CASES[row]
    steps = 1 if case.method == "federated clustering" else 2
    case = case._replace(**gpu.SMALL[row] | {"batch": None, "steps": steps})
    shape = (8, 8, 3) if shape == gpu.CIFAR else shape
    task, clients = gpu.make_task(case, shape, small=True), gpu.make_clients(case, shape)
    algorithm = gpu.make_algorithm(case, task)
    state = jax.jit(algorithm.init)(jax.random.key(0), clients)
    if case.method == "federated clustering":  # from one model the others' gradients would be the same for all
        shift = lambda p: p + 0.05 * jax.random.normal(jax.random.key(5), p.shape)  # noqa: E731
        state = state._replace(params=jax.tree.map(shift, state.params))
    models = gpu.first_models(case, state.params)
    expected = gpu.first_models(case, jax.jit(algorithm.step)(jax.random.key(1), state, clients)[0].params)
    moved = max(float(jnp.abs(expected[name] - models[name]).max()) for name in models)
    assert moved > 2e-3  # a round that does nothing would not agree

    x, y = clients.examples["x"], clients.examples["y"]
    plain = jax.jit(gpu.jax_plain.ROUNDS[case.method](case))(jax.random.key(1), models, x, y)
    for name in models:
        np.testing.assert_allclose(plain[name], expected[name], atol=1e-4, err_msg=name)

    process = gpu.start_torch()
    if process is None:
        pytest.skip("PyTorch is not set up (make peers)")
    np.savez(tmp_path / "models.npz", x=x, y=y, **models)
    files = {"models": str(tmp_path / "models.npz"), "results": str(tmp_path / "results.npz")}
    [said] = gpu.ask_torch(process, gpu.case_of_torch(case, shape, [form], 1, **files), 300)
    assert "error" not in said, said
    with np.load(tmp_path / "results.npz") as file:
        found = dict(file)
    assert set(found) == set(models)
    for name in models:
        if "bfloat16" in form:  # a hidden unit near 0 may be on the other side
            error, way = np.linalg.norm(found[name] - expected[name]), np.linalg.norm(expected[name] - models[name])
            assert error < 0.1 * way, name
        else:
            np.testing.assert_allclose(found[name], expected[name], atol=1e-3 * moved + 1e-5, err_msg=name)


@pytest.mark.slow
def test_the_gpu_benchmark_writes_what_it_measured(tmp_path):
    out = tmp_path / "gpu.json"
    command = [sys.executable, BENCHMARKS / "gpu.py", "--small", "--only", "cfl", "--rounds", "2", "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["not_measured"] == [] and found["versions"]["jax"] == jax.__version__
    ours, *peers = found["rows"]
    assert ours["what"] == "jfcl" and len(ours["runs_ms"]) == 2 and ours["mapping"].startswith("default")
    assert ours["times_best_peer"] == pytest.approx(min(p["ms"] for p in peers if "ms" in p) / ours["ms"])

    done = subprocess.run([*command, "--minutes", "0.001"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "cfl, mlp, jfcl" in " ".join(json.loads(out.read_text())["not_measured"])


def test_the_best_peer_is_as_exact_as_ours(gpu):
    times = {"jfcl": 10, "jfcl, bfloat16": 5, "PyTorch, bmm": 40, "PyTorch, bfloat16": 30}
    times |= {"PyTorch, bmm, TF32 throughout": 1, "PyTorch, autocast": 35, "PyTorch, bmm, similarities": 2}
    rows = [{"row": "a", "what": what, "ms": ms} for what, ms in times.items()]
    rows += [{"row": "b", "what": "JAX, vmap(grad)", "ms": 1}, {"row": "a", "what": "PyTorch, vmap", "error": "memory"}]
    gpu.add_ratios(rows)
    assert [row.get("times_best_peer") for row in rows[:3]] == [4, 6, None]
    assert rows[1]["best_peer"] == "PyTorch, bfloat16"
    rows = [{"row": "a", "what": what, "ms": 1} for what in ("jfcl, bfloat16", "PyTorch, bmm")]
    gpu.add_ratios(rows)
    assert "times_best_peer" not in rows[0]  # no peer was measured in bfloat16
