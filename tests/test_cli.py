"""The command line, run in this process: results, resumption, and what bad input gets."""

import csv
import dataclasses
import gzip
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from unittest.mock import Mock

import jax
import numpy as np
import pytest
import rich.console

import jfcl
from jfcl import cli
from jfcl.cli import commands
from jfcl.cli.parser import parse
from jfcl.cli.tables import lists, numbers_table, titled
from jfcl.experiments import Config, load_run, population, run, setups, trackers
from jfcl.experiments.config import from_saved, to_saved
from jfcl.experiments.setups import make_training, matmul_precision
from jfcl.simulation.folder import RunFolder
from jfcl.simulation.resident import Resident

QUICK = ["--clients", "8", "--clusters", "2", "--rounds", "4", "--local-steps", "2", "--model", "linear", "--quiet"]


@pytest.fixture(autouse=True)
def _no_data_and_no_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("JFCL_DATA_DIR", raising=False)
    monkeypatch.setattr(cli, "_compilation_cache", lambda: None)
    monkeypatch.setenv("COLUMNS", "100")


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def finished(finished_runs, tmp_path_factory):
    """Two finished runs, of IFCA and FedAvg with `QUICK` and two seeds."""
    return shutil.copytree(finished_runs, tmp_path_factory.mktemp("cli") / "runs")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:round .*all clients use one")
def test_a_device_without_memory_is_named_and_the_run_continues(tmp_path, monkeypatch, capsys):
    """Another program has taken the memory that was free before the run."""
    whole, out = (
        [
            "run",
            "ifca",
            *QUICK,
            "--restarts",
            "1",
            "--eval-every",
            "2",
            "--out",
            str(tmp_path / name),
        ]
        for name in ("a", "b")
    )
    assert cli.main(whole) == 0
    advance = Resident.advance

    def exhausted(self, state, first, count, silence):
        if first > 2:
            text = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8.04GiB with allocator GPU_0_bfc"
            raise jax.errors.JaxRuntimeError(text)
        return advance(self, state, first, count, silence)

    monkeypatch.setattr(Resident, "advance", exhausted)
    assert cli.main([*out, "--checkpoint-seconds", "0"]) == 2
    message = " ".join(capsys.readouterr().err.split())
    told = "not enough memory: Out of memory while trying to allocate 8.04GiB with allocator GPU_0_bfc; train fewer"
    assert told in message
    assert (tmp_path / "b" / "checkpoints" / "2").is_dir()
    begun = []
    monkeypatch.setattr(Resident, "advance", lambda *args: (begun.append(args[2]), advance(*args))[1])
    assert cli.main([*out, "--resume"]) == 0 and begun[0] == 3
    one, other = (json.loads((tmp_path / name / "summary.json").read_text())["per_seed"] for name in ("a", "b"))
    assert one == other


def test_a_run_leaves_what_the_design_promises(finished):
    run = finished / "ifca"
    summary = json.loads((run / "summary.json").read_text())
    wanted = "method dataset num_clients num_clusters num_rounds seconds compile_seconds client_steps_per_second"
    wanted = [*wanted.split(), "bytes_up", "bytes_down", "device", "versions", "per_seed", "mean", "std"]
    assert set(wanted) <= set(summary)
    assert (summary["num_clients"], summary["num_clusters"], summary["num_rounds"]) == (8, 2, 9)
    metrics = ["accuracy", "worst_client_accuracy", "loss", "cluster_accuracy", "adjusted_rand", "clusters_in_use"]
    assert [row["seed"] for row in summary["per_seed"]] == [0, 1]
    for name in metrics:
        values = [row[name] for row in summary["per_seed"]]
        assert summary["mean"][name] == pytest.approx(np.mean(values))
        assert summary["std"][name] == pytest.approx(np.std(values, ddof=1))
    model = 4 * (64 * 10 + 10)
    sent = (4 + 5 * 5) * 8 * model  # 5 restarts of 5 rounds come before
    assert summary["bytes_up"] == sent and summary["bytes_down"] == 2 * sent
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(line["round"], line["seed"]) for line in lines] == [(t, s) for t in range(6, 10) for s in (0, 1)]
    table = (run / "clients.csv").read_text().splitlines()
    assert table[0] == "seed,client,examples,true_cluster,cluster,accuracy,loss" and len(table) == 1 + 2 * 8
    accuracy = np.mean([float(row.split(",")[5]) for row in table[1:9]])
    assert accuracy == pytest.approx(summary["per_seed"][0]["accuracy"], abs=1e-5)
    assert {p.name for p in (run / "plots").iterdir()} == {"accuracy.png", "loss.png", "clients.png", "clusters.png"}
    assert json.loads((run / "config.json").read_text())["method"] == "ifca"


def test_compare_prints_a_table_and_plots(finished, capsys):
    assert cli.main(["compare", str(finished / "ifca"), str(finished / "fedavg")]) == 0
    printed = capsys.readouterr().out
    accuracy = json.loads((finished / "ifca" / "summary.json").read_text())["mean"]["accuracy"]
    assert "ifca" in printed and "fedavg" in printed and f"{100 * accuracy:.1f}±" in printed
    assert "they differ in rounds: 9 (ifca), 4 (fedavg)\n" in printed  # not in the method, which is their name
    assert (finished / "compare" / "methods.png").stat().st_size > 1000
    with (finished / "compare" / "results.csv").open() as file:
        rows = {row["run"]: row for row in csv.DictReader(file)}
    assert float(rows["ifca"]["accuracy"]) == accuracy and rows["fedavg"]["seeds"] == rows["ifca"]["seeds"] == "2"
    # A line for each run, and what it shows as a dash is empty in the file.
    lines = {line.split()[0]: line.split() for line in printed.splitlines() if line[:4] in ("ifca", "feda")}
    assert len(lines) == 2 and lines["fedavg"][3:5] == ["–", "–"] and lines["fedavg"][6] == "–"
    for name in ("cluster_accuracy", "adjusted_rand", "rounds_to_recovery"):
        assert rows["fedavg"][name] == rows["fedavg"][f"{name}_std"] == "", name
    for name, column in (("accuracy", 1), ("worst_client_accuracy", 2), ("cluster_accuracy", 3)):
        shown = f"{100 * float(rows['ifca'][name]):.1f}±{100 * float(rows['ifca'][f'{name}_std']):.1f}"
        assert lines["ifca"][column] == shown, name
    assert "sent received" in " ".join(printed.split()) and "mean ± sample std over 2 seeds" in printed


@pytest.mark.parametrize("columns, width", [("40", 80), ("90", 90)])
def test_a_narrow_terminal_cuts_no_table(columns, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(cli, "run_command", lambda args, console: console.width == width or 1 / 0)
    assert cli.main(["list"]) == 0


@pytest.mark.slow
def test_the_same_command_gives_the_same_results(finished, tmp_path):
    assert cli.main(["run", "fedavg", *QUICK, "--seeds", "2", "--out", str(tmp_path / "again")]) == 0
    for name in ("metrics.jsonl", "clients.csv"):
        assert (tmp_path / "again" / name).read_bytes() == (finished / "fedavg" / name).read_bytes()


@pytest.mark.slow
def test_config_files_have_the_same_names_and_flags_override_them(finished, tmp_path, capsys):
    toml = 'dataset = "digits"\nclients = 8\nclusters = 2\nrounds = 3\nlocal-steps = 2\nlr = 1\n'
    toml += 'seeds = 2\nmodel = "linear"\n'
    (tmp_path / "x.toml").write_text(toml, encoding="utf-8-sig")  # with the mark of Windows
    base = ["run", "ifca", "--quiet", "--config"]
    options = ["--rounds", "4", "--lr", "0.1", "--out", str(tmp_path / "run")]
    assert cli.main([*base, str(tmp_path / "x.toml"), *options]) == 0
    assert (tmp_path / "run" / "clients.csv").read_bytes() == (finished / "ifca" / "clients.csv").read_bytes()
    kept = str(finished / "ifca" / "config.json")  # a run's own configuration does as well
    assert cli.main([*base, kept, "--out", str(tmp_path / "second")]) == 0
    assert (tmp_path / "second" / "clients.csv").read_bytes() == (finished / "ifca" / "clients.csv").read_bytes()
    for text, said in [
        ("clients = 4\n'round' = 3", "bad.toml, line 2: unknown option 'round': did you mean 'rounds'?"),
        ("clients = 4\n[round]\nx = 3", "bad.toml, line 2: unknown option 'round': did you mean 'rounds'?"),
        ("out = 'runs/x'", "unknown option 'out': it is a flag of jfcl run"),
        ("rounds = '3'", "rounds must be of type int, got '3'"),
        ("rounds = ", "--config"),
    ]:
        (tmp_path / "bad.toml").write_text(text)
        capsys.readouterr()
        assert cli.main([*base, str(tmp_path / "bad.toml")]) == 2
        assert said in capsys.readouterr().err
    (tmp_path / "bad.json").write_text('{"clients": 4, "round": 3}')
    assert cli.main([*base, str(tmp_path / "bad.json")]) == 2
    assert "bad.json, line 1: unknown option 'round'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_finished_run_goes_on_for_more_rounds(finished, tmp_path, capsys):
    shutil.copytree(finished / "fedavg", tmp_path / "run")
    more = [*QUICK[:5], "6", *QUICK[6:], "--eval-every", "1", "--seeds", "2"]
    out = ["--out", str(tmp_path / "run")]
    assert cli.main(["run", "fedavg", *more, "--serve", "state", "--resume", *out]) == 2
    assert "serve: it has 'loss', asked for 'state'" in capsys.readouterr().err
    assert cli.main(["run", "fedavg", *QUICK[:5], "6", *QUICK[6:], "--seeds", "2", "--resume", *out]) == 0
    assert cli.main(["run", "fedavg", *more, "--out", str(tmp_path / "whole")]) == 0
    whole, resumed = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "run"))
    assert whole["per_seed"] == resumed["per_seed"]
    assert (tmp_path / "whole" / "clients.csv").read_bytes() == (tmp_path / "run" / "clients.csv").read_bytes()


@pytest.mark.slow
def test_warm_start_from_another_run(finished, tmp_path):
    start = ["--init-from", str(finished / "ifca"), "--rounds", "1", "--out", str(tmp_path / "warm")]
    assert cli.main(["run", "ifca", *QUICK, *start]) == 0
    first = json.loads((finished / "ifca" / "metrics.jsonl").read_text().splitlines()[0])
    warm = json.loads((tmp_path / "warm" / "metrics.jsonl").read_text().splitlines()[0])
    assert warm["train_loss"] < first["train_loss"]


def test_list_and_help_name_everything(capsys):
    from jfcl import data, models
    from jfcl.methods import METHODS

    assert cli.main(["list"]) == 0
    printed = capsys.readouterr().out
    for name in [*METHODS, *data.DATASETS, *data.HETEROGENEITY, *data.PARTITIONS, *models.MODELS]:
        assert name in printed
    assert cli.main([]) == 0
    assert "jfcl run ifca" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        cli.main(["run", "--help"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    flags = "--dataset --heterogeneity --clients --clusters --examples-per-client --model --rounds --local-steps"
    flags += " --local-epochs --batch-size --lr --momentum --cohort --seeds --seed --eval-every --data-dir --out"
    assert {*flags.split(), "--resume", "--config"} <= set(printed.split())


@pytest.mark.parametrize("method", [[], ["local"]])
@pytest.mark.parametrize(
    ("command", "refused"),
    [
        ("run", []),
        ("plan", ["population", "store", "dropout", "sampling", "remember", "devices"]),
        ("sweep", ["population", "store", "stragglers", "drift", "drift-window", "patience", "monitor"]),
    ],
)
def test_help_names_no_option_that_the_command_refuses(command, refused, method, capsys):
    with pytest.raises(SystemExit):
        cli.main([command, *method, "--help"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  --")]
    named = {word.removeprefix("--") for line in lines for word in (line[:1] if method else line)}
    assert named.isdisjoint(refused) and {"clients", "rounds", "seeds"} <= named
    assert ("cohort" in named) == (command == "run" or not method)
    assert {"population", "patience", "devices"} <= named or command != "run"


@pytest.mark.parametrize(
    "command, said",
    [
        (["run", "ifac"], "unknown method 'ifac': did you mean 'ifca'?"),
        (["run", "ifca", "--dataset", "mnits"], "unknown dataset 'mnits': did you mean 'mnist'?"),
        (["run", "ifca", "--model", "mpl"], "unknown model 'mpl': did you mean 'mlp'?"),
        (["run", "ifca", "--heterogeneity", "rotated"], "did you mean 'rotation'?"),
        (["run", "ifca", "--partition", "dirichelt"], "did you mean 'dirichlet'?"),
        (["run", "ifca", "--rond", "3"], "unknown option --rond: did you mean --rounds?"),
        (["compare", "runs", "--seeds", "3"], "unknown option --seeds\n"),  # one of other commands
        (["rnu", "ifca"], "unknown command 'rnu': did you mean 'run'?"),
        (["reproduce", "ifca"], "python -m benchmarks.papers NAME"),
        (["run"], "METHOD"),
        (["list", "model"], "did you mean 'models'?"),
        (["run", "ifca", "--lr", "fast"], "--lr"),
        (["run", "ifca", "--lr", "-0.1"], "lr must be positive, got -0.1"),
        (["run", "ifca", "--rounds", "0"], "rounds must be an integer, at least 1, got 0"),
        (["run", "ifca", "--seeds", "0"], "seeds must be"),
        (["run", "ifca", "--precision", "float16"], "did you mean 'bfloat16'?"),
        (["run", "ifca", "--momentum", "1"], "momentum must be in [0, 1), got 1.0"),
        (["run", "ifca", "--local-steps", "2", "--local-epochs", "1"], "Give local_steps or local_epochs, not both"),
        (
            ["run", "ifca", "--clients", "3", "--clusters", "4"],
            "clusters must be at most the 3 clients there are",
        ),
        (["run", "ifca", "--clients", "9999"], "error: clients must be at most 1438, the training examples"),
        (["run", "ifca", "--cohort", "41"], "cohort must be at most the 40 clients there are, got 41"),
        (["run", "ifca", "--num-models", "41"], "num_models must be at most the 40 clients"),
        (["run", "ifca", "--num-models", "auto"], "num_models must be a number: method ifca does not choose it"),
        (["run", "fedavg", "--num-models", "auto"], "method fedavg has no option num_models"),
        (["run", "fedavg", "--restarts", "2"], "method fedavg has no option"),
        (["run", "ifca", "--model", "cnn_mnist"], "images are too small"),
        (["run", "ifca", "--partition", "writer"], "partition 'writer' needs writer ids, which 'digits' does not have"),
        (["run", "ifca", "--average", "gradients"], "average must be models, or gradients of 1 local step"),
        (["run", "ifca", "--share", "Dense_9"], "share must be the beginning of one of the model's parameters"),
        (["run", "ifca", "--init-from", "/nowhere"], "init_from must be the folder of a finished run"),
        (
            ["run", "fedavg", "--clients", "8", "--attack", "ipm", "--malicious", "0.95"],
            "malicious must be enough for one",
        ),
        (["run", "ifca", "--resume"], "resume needs out, the folder of the run"),
        (["run", "ifca", "--config", "/nowhere.toml"], "no such file"),
        (["run", "ifca", "--dataset", "mnist", "--data-dir", "/nowhere"], "looked for /nowhere/mnist/train-images"),
        (["compare", "/nowhere"], "holds no run"),
        (["run", "ifca", "--out", "/proc/1/nothing", "--rounds", "1"], "/proc/1/nothing"),
        (["run", "federated_clustering", "--subgroup-size", "41"], "subgroup_size must be at most the 40 clients"),
        (["run", "federated_clustering", "--subgroup-size", "1"], "subgroup_size must be an integer, at least 2"),
        (["run", "federated_clustering", "--radius", "1", "--quantile", "0.2"], "Give radius or quantile, not both"),
        (["run", "federated_clustering", "--local-epochs", "1"], "give local training by steps"),
        (["run", "momentum_clustering", "--momentum", "1"], "momentum must be in [0, 1), got 1.0"),
        (["run", "momentum_clustering", "--num-models", "41"], "num_models must be at most the 40 clients"),
        (["run", "fedavg", "--quantile", "0.2"], "method fedavg has no option quantile"),
        (["run", "fedavg", "--radius", "1"], "radius must be left out: neither method nor aggregator has"),
        (["run", "fedavg", "--radius", "1", "--aggregator", "krum"], "radius must be left out: neither"),
        (["run", "fedavg", "--bucket-size", "3", "--aggregator", "krum"], "bucket_size must be left out: neither"),
        (["run", "fedavg", "--aggregator", "nnm+krmu"], "unknown aggregator 'krmu': did you mean 'krum'?"),
        (["run", "fedavg", "--aggregator", "krum+nnm"], "and at the end one aggregator"),
        (
            ["run", "fedavg", "--aggregator", "clip_norms+krum"],
            "aggregator 'clip_norms+krum' needs radius",
        ),
        (["run", "fedavg", "--weights", "size", "--aggregator", "krum"], "weights must be left out with --aggregator"),
        (["run", "cfl", "--privacy-seed", "3"], "privacy_seed must be left out without --privacy, got 3"),
        (["run", "cfl", "--fallback-rounds", "3"], "fallback_rounds must be left out without --validation, got 3"),
        (["run", "ifca", "--share", "Dense_0,"], "share must be the beginning of one of the model's parameters"),
        (["run", "ifca", "--population", "50", "--cohort", "0"], "cohort must be an integer, at least 1, got 0"),
        (["run", "ditto", "--lam", "-1"], "lam must be 0 or more, got -1.0"),
        (["run", "knn_per", "--mixing", "1.5"], "mixing must be in [0, 1], got 1.5"),
        (["run", "knn_per", "--num-neighbours", "36"], "num_neighbours must be at most 28, the smallest client's"),
        (["run", "ifca", "--population", "0"], "population must be an integer, at least 1, got 0"),
        (["run", "ifca", "--population", "50", "--cohort", "51"], "cohort must be at most the 50 clients, got 51"),
        (["run", "ifca", "--population", "50", "--sampling", "sise"], "unknown sampling 'sise': did you mean 'size'?"),
        (["run", "ifca", "--population", "50", "--dropout", "1"], "dropout must be in [0, 1), got 1.0"),
        (["run", "ifca", "--population", "50", "--seeds", "2"], "seeds must be 1 with --population"),
        (["run", "ifca", "--population", "50", "--clients", "20"], "clients must be left out with --population or"),
        (["run", "ifca", "--dropout", "0.5"], "dropout must be left out without --population"),
        pytest.param(  # after dealing
            ["run", "one_shot", "--population", "8"], "need them all on the device, as Clients", marks=pytest.mark.slow
        ),
        (["run", "ifca", "--population", "50", "--reuse", "none"], "reuse must be left out with --population"),
        (["run"], "METHOD must be given, or stand in --config"),
        (["run"], "--restarts 5 --out runs/ifca\n  jfcl run fedavg"),
        (["run", "fedavg", "--malicious", "0.3"], "malicious must be left out without --attack, got 0.3"),
        (
            ["run", "fedavg", "--attack", "ipm", "--malicious", "0.01"],
            "enough for one of the 40 clients, and not for all, got 0.01",
        ),
        (["run", "fedavg", "--alpha", "0.1"], "alpha must be left out without --partition dirichlet"),
        (["run", "fedavg", "--seed", "4294967296"], "seed must be at most 4294967295, got 4294967296"),
        (["run", "fedavg", "--seed", "1", "--seeds", "2"], "Give seed or seeds, not both"),
        (["run", "fedavg", "--num-models", "3"], "method fedavg has no option num_models"),
        (["run", "cfl", "--remember", "5"], "remember must be left out without --population"),
        (
            ["run", "ifca", "--population", "50", "--cohort", "9", "--remember", "5"],
            "remember must be left out for a method that keeps no updates",
        ),
        (["run", "cfl", "--population", "50", "--cohort", "9", "--remember", "42"], "at most the 41 clients beside"),
        (["run", "ifca", "--store", "/nowhere/at/all"], "there is no store /nowhere/at/all yet"),
    ],
)
def test_bad_input_is_refused_in_words(command, said, capsys):
    assert cli.main(command) == 2
    printed = capsys.readouterr()
    assert said in printed.err and "Traceback" not in printed.err
    assert printed.out == ""


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ([], None),
        (["--precision", "float32"], "float32"),
        (["--precision", "tf32"], "tensorfloat32"),
        (["--precision", "bfloat16"], "bfloat16"),
        (["--population", "20", "--cohort", "5", "--precision", "tf32"], "tensorfloat32"),
    ],
)
def test_the_precision_asked_for_is_in_force_while_the_run_computes(options, wanted, monkeypatch, tmp_path):
    seen = []

    def noted(*args, **kwargs):
        seen.append(jax.config.jax_default_matmul_precision)
        raise KeyboardInterrupt

    monkeypatch.setitem(run.__globals__, "simulate", noted)
    before = jax.config.jax_default_matmul_precision
    few = QUICK[2:] if "--population" in options else QUICK
    assert cli.main(["run", "fedavg", *few, *options, "--out", str(tmp_path / "run")]) == 130
    assert seen == [wanted] and jax.config.jax_default_matmul_precision == before
    name = options[-1] if options else "default"
    for platform, default in (("gpu", "tf32"), ("tpu", "bfloat16")):
        monkeypatch.setitem(matmul_precision.__globals__, "platform", lambda platform=platform: platform)
        assert matmul_precision(name) == {"bfloat16": "BF16_BF16_F32"}.get(wanted, wanted)
        monkeypatch.setitem(to_saved.__globals__, "platform", lambda platform=platform: platform)
        saved = to_saved(Config("fedavg", precision=name), "h")["precision"]
        assert saved == (default if name == "default" else name)


def test_a_model_that_diverges_in_bfloat16_says_so(monkeypatch):
    config = Config("fedavg", clients=4, rounds=2, lr=1e30, seeds=1)
    with pytest.raises(jfcl.DivergedError, match=r"\(--lr\) usually helps$"):
        run(config)
    for module in (run, setups.setup):
        monkeypatch.setitem(module.__globals__, "in_half", lambda config, target=None: True)
    with pytest.raises(jfcl.DivergedError, match=r"in bfloat16 .* float32 may not diverge$"):
        run(config)


def test_nothing_is_overwritten(finished, capsys, monkeypatch):
    before = files(finished / "ifca")
    out = ["--out", str(finished / "ifca")]
    for command, said, loads in [
        (["run", "ifca", *QUICK, *out], "already holds a run", False),
        (["run", "ifca", *QUICK, "--seeds", "2", "--lr", "0.2", *out, "--resume"], "it has 0.1, asked for 0.2", False),
        (["run", "ifca", *QUICK[:5], "2", *QUICK[6:], "--seeds", "2", *out, "--resume"], "at least the 4 rounds", True),
    ]:
        with monkeypatch.context() as patch:
            if not loads:
                patch.setattr(setups, "load_dataset", None)
            assert cli.main(command) == 2
        assert said in capsys.readouterr().err
        assert files(finished / "ifca") == before


def test_a_folder_with_results_is_no_new_one(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text("mine")
    assert cli.main(["run", "ifca", *QUICK, "--out", str(tmp_path)]) == 2
    assert "holds metrics.jsonl already; choose a new or empty folder" in capsys.readouterr().err
    assert (tmp_path / "metrics.jsonl").read_text() == "mine"


def test_damaged_runs_are_named(finished, tmp_path, capsys):
    for file, content, command in [
        ("config.json", "{x", ["run", "--config", "RUN/config.json"]),
        ("config.json", "[1, 2]", ["run", "--config", "RUN/config.json"]),
        ("config.json", '{"method": "ifca", "rounds": 1, "num_rounds": 2}', ["run", "--config", "RUN/config.json"]),
        ("config.json", "{x", ["run", "ifca", *QUICK, "--out", "RUN", "--resume"]),
        ("summary.json", "{x", ["compare", "RUN"]),
        ("summary.json", "{}", ["compare", "RUN"]),
        ("metrics.jsonl", "", ["compare", "RUN"]),
        ("metrics.jsonl", '{"round": 1}\ngarbage\n{"round": 3}\n', ["compare", "RUN"]),
        ("metrics.jsonl", "null", ["compare", "RUN"]),
        ("metrics.jsonl", None, ["compare", "RUN"]),
        ("params.npz", "PK", ["run", "ifca", *QUICK, "--init-from", "RUN"]),
    ]:
        run = tmp_path / "run"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(finished / "ifca", run)
        (run / file).unlink()
        if content is not None:
            (run / file).write_text(content)
        assert cli.main([part.replace("RUN", str(run)) for part in command]) == 2
        printed = capsys.readouterr().err
        assert file in printed and "Traceback" not in printed


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_continues(tmp_path, capsys):
    run = tmp_path / "run"
    options = [*QUICK, "--checkpoint-seconds", "0", "--eval-every", "1", "--rounds", "3", "--out", str(run)]
    assert cli.main(["run", "fedavg", *options]) == 0
    whole = files(run)
    steps = sorted((run / "checkpoints").glob("[0-9]*"), key=lambda p: int(p.name))
    assert [p.name for p in steps] == ["2", "3"]
    for file in steps[1].rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    assert cli.main(["run", "fedavg", *options, "--resume"]) == 2
    assert "remove it, and the run continues from the checkpoint before it" in capsys.readouterr().err
    shutil.rmtree(steps[1])
    assert cli.main(["run", "fedavg", *options, "--resume"]) == 0
    assert files(run)["metrics.jsonl"] == whole["metrics.jsonl"]


@pytest.mark.slow
def test_a_longer_run_is_resumed_from_its_own_file(tmp_path):
    run = str(tmp_path / "run")
    assert cli.main(["run", "ifca", *QUICK, "--out", run]) == 0
    rounds = int(json.loads(Path(run, "config.json").read_text())["num_rounds"])
    own = ["run", "--config", f"{run}/config.json", "--out", run, "--resume", "--quiet"]
    assert cli.main([*own, "--rounds", str(rounds + 2)]) == 0
    assert cli.main(own) == 0
    summary = json.loads(Path(run, "summary.json").read_text())
    assert summary["num_rounds"] == rounds + 2 + summary["init_rounds"]


@pytest.mark.slow
def test_an_infinite_threshold_outlives_the_run(tmp_path):
    run = str(tmp_path / "run")
    splits = ["--eps-1", "inf", "--eps-2", "1e-30", "--min-rounds", "2"]
    assert cli.main(["run", "cfl", *QUICK, *splits, "--out", run]) == 0
    again = ["run", "--config", f"{run}/config.json", "--quiet"]
    assert cli.main([*again, "--out", run, "--resume"]) == 0
    assert cli.main([*again, "--out", f"{run}-2"]) == 0
    first, second = (Path(folder, "metrics.jsonl").read_text() for folder in (run, f"{run}-2"))
    assert first == second and '"num_clusters": 1' not in first.splitlines()[-1]


@pytest.mark.slow
def test_cfl_leaves_every_seeds_tree(tmp_path):
    splits = ["--eps-1", "inf", "--eps-2", "1e-30", "--min-rounds", "2", "--seeds", "2"]
    assert cli.main(["run", "cfl", *QUICK, *splits, "--out", str(tmp_path / "run")]) == 0
    assert all((tmp_path / "run" / name).exists() for name in ("tree.npz", "tree-1.npz", "plots/tree-1.png"))


def test_compare_tells_runs_of_one_name_apart_and_takes_names_as_they_are(finished, tmp_path, capsys):
    folders = [tmp_path / "a" / "out[k=4]", tmp_path / "b" / "out[k=4]"]
    for folder, method in zip(folders, ("ifca", "fedavg"), strict=True):
        shutil.copytree(finished / method, folder)
    assert cli.main(["compare", *map(str, folders), "--out", str(tmp_path / "brk[/k]")]) == 0
    printed = capsys.readouterr().out
    assert "2 runs" in printed and "out[k=4]" in printed.replace("\n", "") and (tmp_path / "brk[/k]").exists()


@pytest.mark.slow
def test_the_demo_runs_to_its_end(tmp_path, monkeypatch, capsys):
    shorter = {"fedavg": {"model": "linear"}, "ifca": {"model": "linear", "restarts": 1}}
    monkeypatch.setattr(commands, "DEMO", shorter)
    assert cli.main(["demo", "--rounds", "1", "--seeds", "1", "--out", str(tmp_path / "demo")]) == 0
    printed = capsys.readouterr().out
    assert "2 runs; seed 0" in printed
    assert set(files(tmp_path / "demo" / "compare")) == {"accuracy.png", "methods.png", "results.csv"}
    assert (tmp_path / "demo" / "ifca" / "plots" / "clusters.png").stat().st_size > 1000


@pytest.mark.slow
def test_a_run_that_goes_on_is_not_finished(finished, tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(finished / "fedavg", run)
    more = ["run", "fedavg", *QUICK[:4], "--rounds", "9", *QUICK[6:], "--seeds", "2", "--out", str(run), "--resume"]
    config = json.loads((run / "config.json").read_text()) | {"num_rounds": 9}
    with RunFolder.open(run, config, resume=True) as folder:
        folder.begin()  # and then it is killed
    assert cli.main(["compare", str(run)]) == 0  # it has no later checkpoint yet
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["jfcl.experiments.run"], "write_results", Mock(side_effect=KeyboardInterrupt))
        assert cli.main(more) == 130
    assert cli.main(["compare", str(run)]) == 2
    assert "holds no finished run" in capsys.readouterr().err
    assert cli.main(more) == 0 and cli.main(["compare", str(run)]) == 0


@pytest.mark.slow
def test_one_model_is_everybodys_start_but_not_that_of_several_clusters(finished, tmp_path, capsys):
    start = ["--init-from", str(finished / "fedavg"), "--out", str(tmp_path / "run")]
    assert cli.main(["run", "local", *QUICK, *start]) == 0
    capsys.readouterr()
    assert cli.main(["run", "one_shot", *QUICK, *start[:2], "--rounds", "1", "--precision", "bfloat16"]) == 0
    printed = capsys.readouterr().out
    assert "products in float32" in printed  # on a CPU, whatever was asked for
    assert "note: --precision bfloat16 has no effect on a CPU, which computes in float32" in " ".join(printed.split())
    assert "nothing is kept without --out DIR" in printed
    assert cli.main(["run", "hypcluster", *QUICK, *start[:2], "--warm-rounds", "1", "--rounds", "2"]) == 0
    capsys.readouterr()
    for method in ("ifca", "hypcluster"):
        assert cli.main(["run", method, *QUICK, *start[:2]]) == 2
        assert "of equals all clients would choose the first" in capsys.readouterr().err.replace("\n", " ")
    assert cli.main(["run", "local", *QUICK, *start[:2], "--model", "mlp"]) == 2
    assert "init_from must be a run that ended with models 'mlp'" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.slow
def test_found_clusters_and_served_models_are_told_apart(tmp_path):
    run = tmp_path / "run"
    assert cli.main(["run", "momentum_clustering", *QUICK, "--local-steps", "1", "--out", str(run)]) == 0
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    with (run / "clients.csv").open() as f:
        rows = list(csv.DictReader(f))
    assert [int(row["cluster"]) for row in rows] == last["cluster"]
    assert [int(row["model"]) for row in rows] == list(range(8)) == load_run(run).cluster.tolist()


@pytest.mark.slow
def test_who_takes_a_store_as_it_is_gets_its_clusters(tmp_path):
    store = ["--store", str(tmp_path / "store"), "--rounds", "1", "--local-steps", "1", "--cohort", "8", "--quiet"]
    asked = ["--population", "24", "--clusters", "6", "--heterogeneity", "private_label", "--examples-per-client", "9"]
    assert cli.main(["run", "ifca", *store, *asked, "--out", str(tmp_path / "made")]) == 0
    assert cli.main(["run", "ifca", *store, "--out", str(tmp_path / "taken")]) == 0
    assert cli.main(["run", "ifca", *store, *asked, "--out", str(tmp_path / "again")]) == 0
    assert len({(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("made", "taken", "again")}) == 1
    assert cli.main(["run", "oracle", *store, "--sampling", "stratified"]) == 0
    made, taken = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("made", "taken"))
    assert made.pop("given") != taken.pop("given")  # only one of them names the options of the store
    assert made == taken and (made["clusters"], made["population"], made["heterogeneity"]) == (6, 24, "private_label")
    resumed = ["run", "--config", str(tmp_path / "taken" / "config.json"), "--out", str(tmp_path / "taken"), "--resume"]
    assert cli.main([*resumed, "--rounds", "2", "--quiet"]) == 0


@pytest.mark.slow
def test_without_heterogeneity_one_model_is_right(tmp_path, recwarn):
    options = [*QUICK, "--heterogeneity", "none", "--rounds", "3", "--quiet", "--out", str(tmp_path / "run")]
    assert cli.main(["run", "ifca", *options]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["num_clusters"] == 1 and ", 1 cluster, " in summary["description"]
    assert load_run(tmp_path / "run").params["Dense_0"]["kernel"].shape[0] == 2  # --clusters are the models
    assert not [w for w in recwarn if "all clients use one of" in str(w.message)]


@pytest.mark.slow
def test_malicious_clients_are_in_no_cluster(tmp_path):
    attack = ["--clients", "12", "--clusters", "2", "--attack", "label_reverse", "--malicious", "0.34", "--quiet"]
    options = ["--heterogeneity", "private_label", "--rounds", "6", "--restarts", "4", "--out", str(tmp_path / "run")]
    assert cli.main(["run", "ifca", *attack, *options]) == 0
    with (tmp_path / "run" / "clients.csv").open() as f:
        good = [row for row in csv.DictReader(f) if row["malicious"] == "0"]
    assert len(good) == 8 and len({(row["true_cluster"], row["cluster"]) for row in good}) == 2  # found, all of them
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["mean"]["cluster_accuracy"] == summary["mean"]["adjusted_rand"] == 1


def test_compare_says_what_differs_and_keeps_earlier_pictures(finished, tmp_path, monkeypatch, capsys):
    def without_drawing(figure, path, **_):
        path.parent.mkdir(exist_ok=True)
        path.touch()
        return path

    monkeypatch.setattr("jfcl.analysis.plots.save", without_drawing)
    shutil.copytree(finished, tmp_path / "runs")
    runs = [str(p) for p in sorted((tmp_path / "runs").glob("*")) if (p / "summary.json").exists()]
    for expected in ("compare", "compare-2"):
        assert cli.main(["compare", *runs]) == 0
        assert (tmp_path / "runs" / expected / "accuracy.png").exists()
    (tmp_path / "runs" / "ifca").rename(tmp_path / "runs" / "mine")
    runs = [str(tmp_path / "runs" / name) for name in ("fedavg", "mine")]
    capsys.readouterr()
    assert cli.main(["compare", *runs, "--out", str(tmp_path / "plots")]) == 0
    assert (
        "they differ in method: fedavg (fedavg), ifca (mine); rounds: 4 (fedavg), 9 (mine)\n" in capsys.readouterr().out
    )
    monkeypatch.chdir(runs[0])
    assert cli.main(["compare", "."]) == 0
    assert (tmp_path / "runs" / "compare-3").exists() and Path(runs[0]).name in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    "aggregator", [["nnm+krum"], ["clip_norms+bucketing+trimmed_mean", "--radius", "2", "--bucket-size", "3"]]
)
def test_aggregators_after_pre_aggregators(aggregator, tmp_path):
    few = ["--clients", "12", "--clusters", "2", "--rounds", "2", "--local-steps", "1", "--model", "linear", "--quiet"]
    attacked = ["run", "fedavg", *few, "--attack", "sign_flip", "--malicious", "0.1", "--aggregator", *aggregator]
    assert cli.main([*attacked, "--out", str(tmp_path / "run")]) == 0
    assert json.loads((tmp_path / "run" / "config.json").read_text())["aggregator"] == aggregator[0]


@pytest.mark.slow
def test_aggregators_get_the_number_of_attackers_in_a_cohort(tmp_path):
    run = ["run", "fedavg", "--population", "60", "--cohort", "10", "--rounds", "2", "--quiet"]
    attacked = [*run, "--attack", "sign_flip", "--malicious", "0.2", "--aggregator", "trimmed_mean"]
    assert cli.main([*attacked, "--out", str(tmp_path / "run")]) == 0  # 12 of 60 would be too many for a cohort of 10


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* held NaN or infinity")
def test_a_population_under_attack(tmp_path):
    run = tmp_path / "run"
    options = ["--population", "60", "--cohort", "20", "--rounds", "3", "--clusters", "2", "--quiet", "--out", str(run)]
    for attack in ("nan", "label_zero"):
        assert cli.main(["run", "fedavg", *options, "--attack", attack, "--malicious", "0.5"]) == 0
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert (rows[-1]["nonfinite"] > 0) == (attack == "nan")
        with (run / "clients.csv").open() as f:
            assert len(list(csv.DictReader(f))) == 30  # the others are not judged
        shutil.rmtree(run)


def test_a_run_can_be_used_again(finished):
    from jfcl.experiments import load_run

    found = load_run(finished / "ifca")
    test = found.setup.federation.test
    accuracy = jfcl.evaluate(found.setup.task, found.params, test, found.cluster)["accuracy"]
    with (finished / "ifca" / "clients.csv").open() as f:
        rows = [float(row["accuracy"]) for row in csv.DictReader(f) if row["seed"] == "0"]
    np.testing.assert_allclose(accuracy, rows, atol=1e-5)


def test_a_run_can_be_used_where_it_could_not_be_made(finished, tmp_path):
    shutil.copytree(finished / "ifca", tmp_path / "ifca")
    config = json.loads((tmp_path / "ifca" / "config.json").read_text())
    config |= {"devices": 7, "mapping": "auto", "init_from": "/nowhere"}
    (tmp_path / "ifca" / "config.json").write_text(json.dumps(config))
    found = load_run(tmp_path / "ifca")
    assert found.config.devices == 7
    np.testing.assert_array_equal(found.cluster, load_run(finished / "ifca").cluster)


@pytest.mark.parametrize("what", lists())
def test_every_list(what, capsys):
    assert cli.main(["list", what]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(what) and "  Returns " not in printed  # with which a docstring opens


def test_the_title_of_a_table_is_one_line_however_narrow_the_table_is():
    console = rich.console.Console(width=100, file=io.StringIO())
    console.print(titled("a title of many words, " * 4, numbers_table(["n"], ["x"])))
    assert console.file.getvalue().splitlines()[0].strip() == ("a title of many words, " * 4).strip()


def test_a_corrupted_file_is_noticed(tmp_path, capsys):
    (tmp_path / "mnist").mkdir()
    with gzip.open(tmp_path / "mnist" / "train-images-idx3-ubyte.gz", "wb") as f:
        f.write(b"\0" * 100)
    assert cli.main(["run", "ifca", "--dataset", "mnist", "--data-dir", str(tmp_path)]) == 2
    assert "train-images-idx3-ubyte.gz is corrupted" in capsys.readouterr().err


def test_diverging_stops_with_status_1(tmp_path, capsys):
    assert cli.main(["run", "fedavg", *QUICK, "--seeds", "2", "--lr", "1e38", "--out", str(tmp_path / "x")]) == 1
    printed = capsys.readouterr().err
    assert "lower learning rate" in printed and "Traceback" not in printed


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path, capsys, monkeypatch):
    def press(records):
        if records[0]["round"] == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setitem(trackers.TRACKERS, "wandb", lambda: types.SimpleNamespace(on_records=press))
    run = ["run", "fedavg", *QUICK, "--seeds", "2", "--track", "wandb", "--out", str(tmp_path / "x")]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in the background
    try:
        assert cli.main(run) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    printed = capsys.readouterr().err
    assert "--resume" in printed and "Traceback" not in printed
    done = max(int(p.name) for p in (tmp_path / "x" / "checkpoints").glob("[0-9]*"))
    assert json.loads((tmp_path / "x" / "metrics.jsonl").read_text().splitlines()[-1])["round"] == done == 2


@pytest.mark.slow
def test_ctrl_c_ends_a_process(tmp_path):
    rounds = [*QUICK, "--eval-every", "1"]
    # Whoever runs the tests in the background may have Ctrl-C ignored, and children inherit that.
    hears = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)"
    start = f"{hears}; from jfcl.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", start, "run", "fedavg", *rounds, "--rounds", "100000", "--out", "x"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=os.environ.copy())
    try:
        metrics = tmp_path / "x" / "metrics.jsonl"
        deadline = time.monotonic() + 120
        while not (metrics.exists() and metrics.stat().st_size > 1000):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, printed = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "--resume" in printed and "Traceback" not in printed
    done = max(int(p.name) for p in (tmp_path / "x" / "checkpoints").glob("[0-9]*"))
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert lines[-1]["round"] == done > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* all clients use one of")  # after two rounds: it is the data that are looked at
def test_mnist_by_writer_and_other_official_files(data_dir, tmp_path):
    common = ["--data-dir", str(data_dir), "--rounds", "2", "--local-steps", "2", "--quiet"]
    by_speaker = ["--partition", "writer", "--clients", "6", "--clusters", "2", "--length", "20"]
    few = ["--clients", "20", "--examples-per-client", "20"]
    for name, options in {
        "writer": ["--dataset", "mnist_writers", "--partition", "writer", "--clients", "50", "--clusters", "2"],
        "cifar": ["--dataset", "cifar10", "--clusters", "2", "--model", "linear", *few],
        "fashion": ["--dataset", "fashion_mnist", "--heterogeneity", "label_swap", *few],
        "plays": ["--dataset", "tiny_shakespeare", "--heterogeneity", "none", "--model", "lstm", *by_speaker],
    }.items():
        assert cli.main(["run", "ifca", *common, *options, "--out", str(tmp_path / name)]) == 0
        assert json.loads((tmp_path / name / "summary.json").read_text())["num_rounds"] == 7  # five of its restarts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "options"),
    [
        (
            "federated_clustering",
            ["--quantile", "0.4", "--subgroup-size", "4", "--attack", "far", "--malicious", "0.25"],
        ),
        ("momentum_clustering", ["--momentum", "0.8", "--threshold-rounds", "3"]),
        ("hypcluster", ["--warm-rounds", "1"]),
        ("one_shot", ["--local-rounds", "2", "--num-models", "auto", "--most-clusters", "2"]),
        ("flhc", ["--rounds-before", "0", "--linkage", "single", "--distance", "euclidean"]),
        ("ditto", ["--lam", "0.5"]),
        ("knn_per", ["--num-neighbours", "3", "--validation", "0.3"]),
    ],
)
def test_the_methods_of_federated_clusterings_paper_run(method, options, tmp_path):
    few = ["--clients", "8", "--clusters", "2", "--rounds", "2", "--quiet"]
    assert cli.main(["run", method, *few, *options, "--out", str(tmp_path / method)]) == 0
    summary = json.loads((tmp_path / method / "summary.json").read_text())
    models = {"federated_clustering": 6, "ditto": 8, "knn_per": 8}  # one a client that is not malicious
    assert summary["method"] == method and 0.1 < summary["mean"]["accuracy"] <= 1
    in_use = summary["mean"]["clusters_in_use"]
    assert in_use == models[method] if method in models else in_use <= 2
    config = json.loads((tmp_path / method / "config.json").read_text())
    steps = 1 if "clustering" in method else 10
    assert (config["keep"], config["local_steps"]) == ("everything" if steps == 1 else "nothing", steps)
    assert summary["client_steps_per_second"] * summary["seconds"] >= 2 * 8 * steps * 0.99
    assert (tmp_path / method / "plots" / "silhouettes.png").exists() == ("auto" in options)


@pytest.mark.slow
def test_a_refused_resume_leaves_a_population_without_a_store_as_it_was(tmp_path, capsys):
    out, options = tmp_path / "run", ["--population", "30", "--cohort", "6", "--model", "linear", "--quiet"]
    command = ["run", "cfl", *options, "--remember", "12", "--clusters", "2", "--local-steps", "1", "--out", str(out)]
    assert cli.main([*command, "--rounds", "2"]) == 0
    shutil.rmtree(out / "store")
    before = {p: p.read_bytes() for p in sorted(out.rglob("*")) if p.is_file()}
    assert cli.main([*command, "--rounds", "3", "--lr", "0.3", "--resume"]) == 2
    assert "lr: it has 0.1, asked for 0.3" in capsys.readouterr().err
    assert {p: p.read_bytes() for p in sorted(out.rglob("*")) if p.is_file()} == before
    assert cli.main([*command, "--rounds", "3", "--resume"]) == 0  # the store is made again, the same
    assert (out / "store").is_dir() and len((out / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("method", "options", "said"),
    [
        ("stocfl", [], "max_clusters must be given for a cohort of 4"),
        ("ifca", ["--clusters", "5"], "clusters must be at most the 4 clients"),
        ("knn_per", ["--num-neighbours", "17"], "num_neighbours must be at most 16"),
    ],
)
def test_what_a_population_cannot_have_is_refused_before_data_are_dealt(method, options, said, tmp_path, capsys):
    command = ["run", method, "--population", "30", "--cohort", "4", *options, "--out", str(tmp_path / "run")]
    assert cli.main(command) == 2
    printed = capsys.readouterr().err
    assert said in printed and "dealing" not in printed and not (tmp_path / "run").exists()


def test_a_refused_run_removes_its_own_store_alone(tmp_path):
    """Another process may have made a store of that name meanwhile."""
    for made in (True, False):
        folder = tmp_path / "store"
        with pytest.raises(ValueError, match="refused"), population._cleared(folder, None) as stores:
            folder.mkdir()
            stores += [folder] * made
            raise ValueError("refused")
        assert folder.exists() is not made


@pytest.mark.parametrize("method", ["local", "fedsoft", "federated_clustering", "byzantine_cfl"])
def test_methods_without_an_option_cohort_have_the_cohorts_of_a_population(method):
    args = parse(["run", method, "--population", "50", "--cohort", "10"])
    assert (args.population, args.cohort) == (50, 10)
    config = Config(method, population=args.population, cohort=args.cohort)
    assert config.cohort == Config(**from_saved(to_saved(config, "h"))).cohort == 10


@pytest.mark.slow
def test_a_population_with_a_balanced_start():
    config = Config(
        "ifca", population=40, cohort=10, clusters=2, rounds=1, local_steps=1, model="linear", min_share=0.1
    )
    assert run(config)[0]["seen"] == 10


@pytest.mark.slow
def test_local_training_is_evaluated_on_the_clients_that_an_attack_leaves(tmp_path):
    config = Config("local", clients=6, clusters=2, rounds=1, local_steps=1, model="linear")
    plain, attacked = (
        run(dataclasses.replace(config, **options)) for options in ({}, {"attack": "ipm", "malicious": 0.3})
    )
    np.testing.assert_array_equal(*(jax.tree.leaves(h.state.params)[0] for _, h, _ in (plain, attacked)))
    hostile = np.isnan(attacked[1].clients["accuracy"][0])
    assert hostile.sum() == 2 and not np.isnan(plain[1].clients["accuracy"]).any()


OF_POPULATION = ["--population", "120", "--cohort", "20", "--dropout", "0.2", "--stragglers", "0.1"]
OF_POPULATION += ["--rounds", "3", "--local-steps", "1", "--model", "linear", "--clusters", "2", "--quiet"]
OF_POPULATION += ["--partition", "dirichlet", "--alpha", "5"]


@pytest.mark.slow
def test_a_population(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(population, "EVALUATED", 100)
    out, store = tmp_path / "run", tmp_path / "store"
    command = ["run", "fedavg", *OF_POPULATION, "--store", str(store)]
    assert cli.main([*command, "--rounds", "1", "--out", str(out)]) == 0
    resumed = ["run", "--config", str(out / "config.json"), "--rounds", "3", "--out", str(out), "--resume", "--quiet"]
    assert cli.main(resumed) == 0
    assert [r["round"] for r in map(json.loads, (out / "metrics.jsonl").read_text().splitlines())] == [1, 2, 3]
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["num_clients"], summary["cohort"], summary["evaluated"]) == (120, 20, 100)
    assert summary["asked"] == 3 * 22 and 0 < summary["seen"] <= 60 and summary["mean"]["accuracy"] > 0
    table = (out / "clients.csv").read_text().splitlines()
    assert len(table) == 101 and len({row.split(",")[1] for row in table[1:]}) == 100
    assert {p.name for p in out.iterdir()} >= {"metrics.jsonl", "config.json", "params.npz", "plots", "checkpoints"}
    capsys.readouterr()
    assert cli.main([*command, "--alpha", "0.5"]) == 2
    assert "alpha: it has 5.0, asked for 0.5" in capsys.readouterr().err.replace("\n", " ")
    x = store / "train" / "x.npy"
    x.write_bytes(x.read_bytes()[:-7])
    assert cli.main(command) == 2
    assert "x.npy was cut short" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.slow
def test_a_population_goes_on_from_the_store_that_is_there(tmp_path, capsys):
    out, store = tmp_path / "run", tmp_path / "store"
    command = ["run", "ifca", *OF_POPULATION, "--restarts", "1", "--store", str(store)]
    assert cli.main([*command, "--out", str(out)]) == 0
    resumed = ["run", "ifca", "--config", str(out / "config.json"), "--rounds", "5", "--out", str(out), "--resume"]
    assert cli.main([*resumed, "--quiet"]) == 0
    assert [r["round"] for r in map(json.loads, (out / "metrics.jsonl").read_text().splitlines())] == [1, 2, 3, 4, 5]
    store = store.rename(tmp_path / "moved")
    moved = ["--store", str(store), "--quiet"]
    assert cli.main([*resumed, *moved]) == 0, capsys.readouterr().err
    command[-1] = str(store)
    capsys.readouterr()
    for options, said in {
        "--heterogeneity none": "heterogeneity: it has 'rotation', asked for 'none'",
        "--dataset mnist --data-seed 3": "data_seed: it has 0, asked for 3; dataset: it has 'digits', asked for",
    }.items():
        assert cli.main([*command, *options.split()]) == 2
        assert said in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        ((), "interrupted\n"),
        (("config.json",), "what was saved is in"),
        (("setting.json", "cells/0.json"), "what was saved is in"),
    ],
)
def test_an_interruption_says_what_is_kept(kept, said, tmp_path, monkeypatch, capsys):
    def interrupted(args):
        for name in kept:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setitem(commands.COMMANDS, "run", interrupted)
    assert cli.main(["run", "fedavg", "--out", str(tmp_path)]) == 130
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("method", "options", "steps"), [("fedavg", {}, 2), ("cfl", {"validation": 0.5}, 1)])
def test_the_rate_falls_after_every_round_also_with_examples_kept_aside(method, options, steps):
    config = Config(method, lr=1.0, lr_decay=0.5, local_epochs=1, batch_size=5, **options)
    training = make_training(config, 10)
    gradient = {"w": np.float32(1)}
    state, moved = training.optimizer.init(gradient), []
    for _ in range(2 * steps):
        update, state = training.optimizer.update(gradient, state)
        moved.append(-float(update["w"]))
    assert moved == [1.0] * steps + [0.5] * steps


@pytest.mark.slow
def test_momentum_of_zero_is_zero():
    losses = [
        run(jfcl.experiments.Config("momentum_clustering", clients=8, rounds=3, momentum=momentum))[1].clients["loss"]
        for momentum in (None, 0.9, 0.0)
    ]
    np.testing.assert_array_equal(losses[0], losses[1])
    assert not np.array_equal(losses[0], losses[2])


def test_a_flag_that_is_on_by_default_can_be_turned_off():
    args = parse(["run", "flux", "--no-by-label"])
    assert Config(**commands.given_options(args)).by_label is False


@pytest.mark.parametrize(
    ("options", "wanted"),
    [([], [6]), (["--clients", "4"], [4]), (["--mapping", "vmap"], []), (["--devices", "3"], [3])],
)
def test_the_cpu_has_a_device_for_every_core_by_default(monkeypatch, options, wanted):
    divided = []
    monkeypatch.setattr(commands.mapping, "divide_cpu", divided.append)
    monkeypatch.setattr(commands.mapping, "num_cores", lambda: 6)
    args = parse(["run", "fedavg", *options])
    commands._find_devices(args, Config(**commands.given_options(args)))
    assert divided == wanted


@pytest.mark.slow
def test_clients_that_join_a_population_start_without_warm_rounds():
    options = ["--population", "12", "--cohort", "4", "--rounds", "2", "--local-steps", "1", "--model", "linear"]
    assert cli.main(["run", "hypcluster", *options, "--clusters", "2", "--warm-rounds", "1", "--quiet"]) == 0


@pytest.mark.parametrize(
    ("method", "options", "remedies"),
    [
        ("ifca", {}, "--restarts, --init-from"),
        ("ifca", {"dp_clip": 1.0}, "--init-from"),  # restarts are refused there: they decide without noise
        ("hypcluster", {}, "--warm-rounds, --init-from"),
        ("clove", {"num_models": "auto"}, "another --num-models, --init-from"),
        ("stocfl", {}, "another --merge-threshold, --init-from"),
    ],
)
def test_what_helps_where_clusters_are_not_found_is_an_option_of_the_method(method, options, remedies):
    assert commands._remedies(Config(method, **options)) == f"{remedies} or more --rounds can help"
