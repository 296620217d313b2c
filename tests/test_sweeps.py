"""Sweeps: cells against single runs, what is held out, what a kill leaves, and what the command line refuses."""

import dataclasses
import functools
import json
import os
import shutil
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import jfcl
from jfcl import cli
from jfcl.core import files
from jfcl.experiments import Config, run_sweep, sweeps
from jfcl.experiments.options import method_options
from jfcl.methods import METHODS
from jfcl.simulation.folder import RunFolder
from jfcl.simulation.grid import Group
from jfcl.simulation.progress import Watch
from jfcl.testing import problem

PROBLEM = problem("classification")
CLIENTS, HELD_OUT = jfcl.data.hold_out(PROBLEM.clients, 0.3)
TASK = PROBLEM.task
KEYS = jax.vmap(jax.random.key)(jnp.arange(2, dtype=jnp.uint32))
ROUNDS = 3


def make(lr, num_clusters=1, weights="size"):
    training = jfcl.local_training(optax.sgd(lr), num_steps=2)
    if num_clusters == 1:  # a program that compiles quickly
        return jfcl.fedavg(TASK, training, weights=weights)
    return jfcl.ifca(TASK, training, num_clusters=num_clusters, weights=weights)


def sweep(grid, **options) -> jfcl.Sweep:
    return jfcl.sweep(make, grid, CLIENTS, key=KEYS, num_rounds=ROUNDS, held_out=HELD_OUT, **options)


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "_compilation_cache", lambda: None)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow_cases("devices", "two sizes")
@pytest.mark.parametrize(
    ("row_axis", "sizes"), [(jax.vmap, [1]), (jax.vmap, [1, 2]), (None, [2])], ids=["vmap", "two sizes", "devices"]
)
def test_a_cell_is_a_run(row_axis, sizes):
    """Cells that are one program equal runs of their own, evaluated on the held-out examples."""
    options = {"key": KEYS, "num_rounds": ROUNDS, "eval_every": ROUNDS, "test_clients": HELD_OUT}
    grid, runs = {"num_clusters": sizes, "lr": [0.05, 0.3]}, []
    for k in sizes:
        maker = functools.partial(make, num_clusters=k)
        runs += [jfcl.simulate(maker, CLIENTS, hyperparams={"lr": lr}, **options).records for lr in grid["lr"]]
    found = sweep(grid, row_axis=row_axis, at_once=len(sizes) + 1 if row_axis else None)
    assert [(cell.values["num_clusters"], cell.values["lr"]) for cell in found.cells] == [
        (k, lr) for k in sizes for lr in grid["lr"]
    ]
    for cell, records in zip(found.cells, runs, strict=True):
        for row, record in zip(cell.per_seed, records, strict=True):
            assert row["seed"] == record["seed"] and not row["diverged"]
            for name in ("loss", "accuracy", "worst_client_accuracy", "pooled_accuracy"):
                assert row[name] == pytest.approx(record[name], abs=1e-5), (cell.values, name)
        losses = [row["loss"] for row in cell.per_seed]
        assert cell.mean["loss"] == pytest.approx(np.mean(losses)) and cell.std["loss"] == pytest.approx(
            np.std(losses, ddof=1)
        )
    scores = [cell.mean["accuracy"] for cell in found.cells]
    assert found.metric == "accuracy" and found.best == int(np.argmax(scores))
    assert found.rows()[-1]["accuracy"] == scores[-1] and found.rows()[-1]["num_clusters"] == sizes[-1]


@pytest.mark.slow
def test_a_cell_with_personal_parameters_is_a_run():
    def personal(lr):
        training = jfcl.local_training(optax.sgd(lr), num_steps=2)
        return jfcl.ifca(TASK, training, num_clusters=2, personal=lambda path: path == "b")

    options = {"key": KEYS, "num_rounds": ROUNDS}
    found = jfcl.sweep(personal, {"lr": [0.05, 0.3]}, CLIENTS, held_out=HELD_OUT, **options)
    for cell in found.cells:
        history = jfcl.simulate(
            personal, CLIENTS, eval_every=ROUNDS, test_clients=HELD_OUT, hyperparams=cell.values, **options
        )
        assert [row["loss"] for row in cell.per_seed] == pytest.approx([r["loss"] for r in history.records], abs=1e-5)


def neighbours(scale):
    """The scale of kNN-Per is read in predictions alone, by the task of the algorithm."""
    training = jfcl.local_training(optax.sgd(0.1), num_steps=1)
    return jfcl.knn_per(TASK, training, num_neighbours=2, mixing=0.5, scale=scale)


def mixed(weight):
    """A mixture of IFCA's models, with weights that an option gives."""

    def serve(state, clients):
        to = jnp.tile(jnp.stack([weight, 1 - weight]), (len(state.cluster), 1))
        return jfcl.Served(state.params, to.astype(jnp.float32))

    return make(0.1, num_clusters=2)._replace(serve=serve)


@pytest.mark.slow
@pytest.mark.parametrize(("maker", "grid"), [(neighbours, {"scale": [0.1, 100.0]}), (mixed, {"weight": [0.0, 1.0]})])
def test_a_cell_is_served_by_its_own_options(maker, grid):
    given = {"key": KEYS[:1], "num_rounds": 1, "held_out": HELD_OUT, "metric": "loss"}
    one, each = (jfcl.sweep(maker, grid, CLIENTS, traced=traced, **given) for traced in (None, ()))
    losses = [cell.mean["loss"] for cell in each.cells]
    assert len(set(losses)) == 2
    np.testing.assert_allclose([cell.mean["loss"] for cell in one.cells], losses, rtol=1e-5)


def test_a_diverged_cell_is_marked_and_the_others_continue(monkeypatch):
    """Regression on a constant: after T rounds of a step the loss is (1 - 2 lr)^(2 T), infinite in float32 at 1e30."""
    task = jfcl.models.task(lambda key: {"b": jnp.zeros(())}, lambda p, x: x + p["b"], kind="regression")
    clients = jfcl.Clients({"x": np.zeros((3, 5), np.float32), "y": np.ones((3, 5), np.float32)}, np.full(3, 5))

    def mean(lr):
        return jfcl.fedavg(task, jfcl.local_training(optax.sgd(lr), num_steps=1))

    rates = [1e30, np.inf, 0.1, 0.4]  # with the second no client sends a finite update, and the model stays as it is
    found = jfcl.sweep(mean, {"lr": rates}, clients, key=jax.random.key(0), num_rounds=4)
    assert [cell.per_seed[0]["diverged"] for cell in found.cells] == [True, True, False, False]
    assert found.cells[0].mean == {} and found.metric == "loss" and found.best == 3
    for lr, cell in list(zip(rates, found.cells, strict=True))[2:]:
        assert cell.mean["loss"] == pytest.approx((1 - 2 * lr) ** 8, rel=1e-4)
    axes = {"row_axis": jfcl.chunked(1), "client_axis": jfcl.sharded(jfcl.client_mesh())}  # 3 clients on 2 devices
    padded = jfcl.sweep(mean, {"lr": [0.4]}, clients, key=jax.random.key(0), num_rounds=4, **axes)
    assert padded.cells[0].mean["loss"] == pytest.approx(found.cells[3].mean["loss"], rel=1e-6)
    lost = jfcl.sweep(mean, {"lr": [1e30, 2e30, 3e30]}, clients, key=jax.random.key(0), num_rounds=4, out="lost")
    assert lost.best is None and json.loads(Path("lost/sweep.json").read_text())["best"] is None
    begin, begun = Watch.begin, []  # the rate of the bar is that of the cells that run
    monkeypatch.setattr(Watch, "begin", lambda self, *counts: begun.append(counts) or begin(self, *counts))
    Path("lost/cells/00001.json").unlink()
    options = {"key": jax.random.key(0), "num_rounds": 4, "out": "lost", "resume": True}
    assert jfcl.sweep(mean, {"lr": [1e30, 2e30, 3e30]}, clients, **options).cells == lost.cells and begun == [(8, 12)]


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5).filter(lambda sizes: max(sizes) > 1),
    share=st.floats(0.01, 0.99),
    padding=st.integers(0, 3),
    seed=st.integers(0, 3),
)
@example(sizes=[100], share=0.29, padding=0, seed=0)  # 28.999999999999996
def test_what_is_held_out(sizes, share, padding, seed):
    n, m = len(sizes), max(sizes) + padding
    x = np.arange(n * m, dtype=np.float32).reshape(n, m) + 1
    clients = jfcl.Clients({"x": x, "y": 10 * x[:, :, None]}, np.array(sizes, np.int32))
    parts = jfcl.data.hold_out(clients, share, seed=seed)
    for i, size in enumerate(sizes):
        held = 0 if size == 1 else min(max(int(round(share * size, 9)), 1), size - 1)
        assert [part.size[i] for part in parts] == [size - held, held]
        kept = [part.examples["x"][i] for part in parts]
        real = np.concatenate([values[: part.size[i]] for values, part in zip(kept, parts, strict=True)])
        assert sorted(real.tolist()) == x[i, :size].tolist()  # each once
        for values, part in zip(kept, parts, strict=True):
            assert (np.diff(values[: part.size[i]]) > 0).all() and not values[part.size[i] :].any()
            np.testing.assert_array_equal(part.examples["y"][i, :, 0], 10 * values)
    alone = (
        jfcl.data.hold_out(
            jfcl.Clients(jax.tree.map(lambda a: a[-1:], clients.examples), clients.size[-1:], np.array([n - 1])), 0.5
        )
        if sizes[-1] > 1
        else None
    )
    if alone is not None:  # other clients have no effect
        together = jfcl.data.hold_out(clients, 0.5)
        for part, whole in zip(alone, together, strict=True):
            np.testing.assert_array_equal(
                part.examples["x"][0, : part.size[0]], whole.examples["x"][-1, : whole.size[-1]]
            )


# ---------------------------------------------------------------------------------------------------------------
# The folder.

GRID = {"num_clusters": [1, 2], "lr": [0.05, 0.1, 0.3]}


class Killed(BaseException):
    """The end of the process."""


@pytest.mark.slow
def test_after_a_kill_at_any_write_the_result_is_the_same(monkeypatch):
    sweep(GRID, out="whole")
    whole = {name: Path("whole", name).read_bytes() for name in ("sweep.json", "heatmap.png")}
    assert sorted(p.name for p in Path("whole").iterdir()) == [
        "cells",
        "heatmap.png",
        "lock",
        "setting.json",
        "sweep.json",
    ]
    replace, run_rows, calls, left = os.replace, Group._run_rows, [], [0]

    def killed(*args):
        if not left[0]:
            raise Killed
        left[0] -= 1
        return replace(*args)

    def counted(self, *args):
        calls.append(1)
        return run_rows(self, *args)

    monkeypatch.setattr(Group, "_run_rows", counted)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(files.os, "replace", killed)
        sweep(GRID, out="killed")
    for writes in range(1, 8):  # setting.json, six cells, then the heat-map
        left[0] = writes
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(files.os, "replace", killed)
            sweep(GRID, out="killed")  # at first in the folder of a sweep that was not begun
        done = len(list(Path("killed", "cells").glob("?????.json")))
        assert done == writes - 1 and not Path("killed/sweep.json").exists()
        calls.clear()
        again = sweep(GRID, out="killed", resume=True)
        assert len(calls) == 6 - done  # two devices: a call is the two seeds of a cell
        assert {name: Path("killed", name).read_bytes() for name in whole} == whole
        assert len(again.cells) == 6
        shutil.rmtree("killed")


@pytest.mark.slow
def test_finished_cells_are_verified():
    sweep(GRID, out="out")
    whole, cell = Path("out/sweep.json").read_bytes(), Path("out/cells/00002.json")
    kept = cell.read_bytes()
    changed = json.loads(kept)
    changed["per_seed"][0]["accuracy"] = 1.0
    for damage in (kept[:50], json.dumps(changed).encode(), Path("out/cells/00001.json").read_bytes()):
        cell.write_bytes(damage)
        with pytest.warns(UserWarning, match=r"00002\.json .*the cell runs again"):
            sweep(GRID, out="out", resume=True)
        assert cell.read_bytes() == kept and Path("out/sweep.json").read_bytes() == whole


def test_other_sweeps_are_refused_and_nothing_changes():
    grid, axes = {"num_clusters": [1], "lr": [0.1]}, {"row_axis": jax.vmap, "at_once": 2}
    sweep(grid, out="out", **axes)
    before = {p: p.read_bytes() for p in Path("out").rglob("*") if p.is_file()}
    for change, words in [
        ({"grid": grid | {"lr": [0.2]}}, r"another sweep \(grid.lr: it has \[0.1\], asked for \[0.2\]\)"),
        ({"metric": "loss"}, "metric: it has 'accuracy', asked for 'loss'"),
        ({"config": {"data": "other"}}, "config.data: it has None, asked for 'other'"),
        ({"resume": False}, r"already holds a sweep: resume it \(--resume"),
    ]:
        with pytest.raises(ValueError, match=words):
            sweep(**{"grid": grid, "out": "out", "resume": True} | axes | change)
        assert {p: p.read_bytes() for p in Path("out").rglob("*") if p.is_file()} == before
    refused = pytest.raises(ValueError, match="out holds a sweep already; choose a new or empty folder")
    with refused, RunFolder.open("out", {}):
        pass
    assert {p: p.read_bytes() for p in Path("out").rglob("*") if p.is_file()} == before
    Path("run").mkdir()
    Path("run/config.json").write_text("{}")
    with pytest.raises(ValueError, match="run holds a run"):
        sweep(grid, out="run", **axes)


@pytest.mark.parametrize(
    ("grid", "options", "words"),
    [
        ({}, {}, "grid must be a dict of options and their values, not empty"),
        ({"lr": []}, {}, "grid: lr must be a list of at least one value"),
        ({"lr": 0.1}, {}, "grid: lr must be a list of at least one value, got 0.1"),
        ({"lr": [0.1, 0.1]}, {}, "grid: lr has 0.1 twice"),
        ({"lr": [float("nan")]}, {}, "grid: lr must be numbers, texts or booleans, got nan"),
        ({"lr": [optax.sgd(0.1)]}, {}, "grid: lr must be numbers, texts or booleans"),
        ({"lr": [0.1], "weights": ["sizes"]}, {}, "unknown weights 'sizes': did you mean 'size'?"),
        ({"lr": [0.1], "num_clusters": [99]}, {}, "num_clusters must be at most"),
        (
            {"lr": [0.1], "num_clusters": [1, 2]},
            {"traced": ["lr", "num_clusters"]},
            "traced must be options that make takes",
        ),
        ({"lr": [0.1]}, {"traced": ["rl"]}, "unknown traced 'rl': did you mean 'lr'?"),
        ({"lr": [0.1], "weights": ["size"]}, {"traced": ["weights"]}, "traced: weights must be numbers"),
        ({"lr": [0.1]}, {"metric": "perplexity"}, "metric must be one that the task has"),
        ({"lr": [0.1]}, {"metric": "acuracy"}, "unknown metric"),
        ({"lr": [0.1]}, {"held_out": jfcl.Clients(HELD_OUT.examples, HELD_OUT.size[:1])}, "held_out must be of"),
        ({"lr": [0.1]}, {"seeds": [1]}, "seeds must be different integers, one for each of the 2 keys"),
        ({"lr": [0.1]}, {"at_once": 0}, "at_once must be an integer, at least 1, got 0"),
        ({"lr": [0.1]}, {"resume": True}, "resume needs out, the folder of the sweep"),
    ],
)
def test_bad_input_of_the_function(grid, options, words, monkeypatch):
    monkeypatch.setattr(Group, "_run_rows", None)
    given = {"held_out": HELD_OUT} | options
    with pytest.raises(ValueError) as error:
        jfcl.sweep(make, grid, CLIENTS, key=KEYS, num_rounds=ROUNDS, **given)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("rename", "words"),
    [
        ({"x": "image", "y": "label"}, r"clients.examples must be a dict with 'x' and 'y', got \['image', 'label'\]"),
        ({"y": "x", "x": "y"}, r"clients: inputs have shape \(\), but the model is made for \(4,\)"),
    ],
)
def test_examples_that_the_task_cannot_read_are_refused(rename, words):
    task = jfcl.models.classification(jfcl.models.Linear(2), (4,), 2)
    clients = CLIENTS._replace(examples={rename[name]: x for name, x in CLIENTS.examples.items()})
    with pytest.raises(ValueError, match=words):
        jfcl.sweep(
            functools.partial(jfcl.ifca, task, PROBLEM.training), {"num_clusters": [1]}, clients, key=KEYS, num_rounds=1
        )


# ---------------------------------------------------------------------------------------------------------------
# The command line.

QUICK = ["--clients=4", "--clusters=2", "--model=linear", "--local-steps=2", "--quiet"]


def test_a_flag_beside_its_values_in_the_grid_is_refused(capsys):
    assert cli.main(["sweep", "fedavg", *QUICK, "--lr=0.3", "--grid", "lr=0.1,0.2"]) == 2
    assert "give --lr or its values in --grid" in capsys.readouterr().err


@pytest.mark.slow
def test_the_best_configuration_runs(capsys):
    command = ["sweep", "fedavg", *QUICK, "--seeds=2", "--rounds=3", "--out=out"]
    grid = ["--grid", "lr=0.001,0.2", "--grid", "momentum=0,0.9"]
    assert cli.main([*command, *grid]) == 0
    printed = capsys.readouterr().out
    assert "4 configurations" in printed and "jfcl run fedavg --config out/best.toml --seed 2 --out out-best" in printed
    for command_of_runs in ("report", "compare"):
        assert cli.main([command_of_runs, "out"]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "out holds a sweep, and no run; run the best" in said and "--config out/best.toml --out" in said
    assert Path("out/heatmap.png").read_bytes()[1:4] == b"PNG"
    saved = json.loads(Path("out/sweep.json").read_text())
    best = saved["cells"][saved["best"]]
    assert saved["traced"] == ["lr", "momentum"] and best["values"]["lr"] == 0.2
    assert best["mean"]["accuracy"] == max(cell["mean"]["accuracy"] for cell in saved["cells"])
    chosen = tomllib.loads(Path("out/best.toml").read_text())
    assert chosen == best["values"] | {
        "method": "fedavg",
        "seeds": 2,
        "rounds": 3,
        "clients": 4,
        "clusters": 2,
        "model": "linear",
        "local_steps": 2,
    }
    assert cli.main(["run", "fedavg", "--config", "out/best.toml", "--quiet", "--out", "run"]) == 0
    config = json.loads(Path("run/config.json").read_text())
    assert {name: config[name] for name in best["values"]} == best["values"]
    # The test examples of the run are none that the sweep trained on or judged by.
    assert config["split_hash"] == saved["config"]["split_hash"]
    before = Path("out/sweep.json").read_bytes()
    again = [*command, *grid, "--resume", "--devices", "1"]
    assert cli.main(again) == 0 and Path("out/sweep.json").read_bytes() == before
    assert cli.main([*command, *grid[2:], "--grid", "lr=0.2", "--resume"]) == 2
    assert "out holds another sweep" in capsys.readouterr().err


def test_the_test_examples_are_not_read(monkeypatch):
    seen = {}

    def kept(make, grid, clients, *, held_out, **options):
        seen.update(clients=clients, held_out=held_out)
        raise Killed

    monkeypatch.setattr(sweeps, "sweep", kept)
    config = Config("fedavg", clients=4, clusters=2, model="linear")
    with pytest.raises(Killed):
        run_sweep(config, {"lr": [0.1]}, holdout=0.25)
    federation = jfcl.experiments.setup(config).federation

    def rows(clients, i):
        return {x.tobytes() for x in np.asarray(clients.examples["x"])[i, : clients.size[i]]}

    for i in range(4):
        train, held = rows(seen["clients"], i), rows(seen["held_out"], i)
        assert train | held == rows(federation.train, i) and not train & held
        assert len(held) == len(train | held) // 4 and not (train | held) & rows(federation.test, i)
    attacked = dataclasses.replace(config, attack="sign_flip", malicious=0.5)
    with pytest.raises(Killed):
        run_sweep(attacked, {"lr": [0.1]})
    judged = jfcl.experiments.setup(attacked).federation.test.size > 0
    assert judged.sum() == 2 and ((seen["held_out"].size > 0) == judged).all() and (seen["clients"].size > 0).all()


@pytest.mark.slow
def test_every_configuration_may_diverge(capsys):
    command = ["sweep", "fedavg", *QUICK, "--seed=3", "--rounds=2", "--out=out", "--grid=lr=1e38,1e37"]
    assert cli.main([*command, "--optimizer=sgd", "--prox=0"]) == 1
    printed = capsys.readouterr()
    assert "every configuration diverged" in printed.err and "–" in printed.out
    assert not Path("out/best.toml").exists() and Path("out/sweep.json").exists()


def traced_together(method):
    """The options that are tracers, as many at once as there may be; those of CFL exclude each other."""
    names = tuple(name for name, option in method_options(method).items() if option.traced)
    return [(name,) for name in names] if method == "cfl" else [names] if names else []


TRACED = [(method, names) for method in METHODS for names in traced_together(method)]
TRACED = [(method, names) for method, names in TRACED if method != "feddrift"]  # for data with steps; see its own tests
TRACED += [("fedavg", ("lr", "momentum", "weight_decay", "clip_norm", "prox", "server_lr"))]
TRACED += [("federated_clustering", ("radius",)), ("momentum_clustering", ("momentum",))]
TRACED += [("fedavg", ("warmup_cosine",))]
NEEDED = {"byzantine_cfl": {"attack": "sign_flip", "malicious": 0.3}, "eps_1": {"eps_2": 0.2}, "eps_2": {"eps_1": 0.2}}
NEEDED |= {"eps_1": {"eps_2": 1.0}, "eps_2": {"eps_1": 0.1}, "gamma_max": {"eps_1": 0.1, "eps_2": 1.0}}
NEEDED |= {"federated_clustering": {"quantile": 0.5}, "myopic_clustering": {"quantile": 0.5}}
NEEDED |= {"momentum_clustering": {"quantile": 0.5}, "warmup_cosine": {"schedule": "warmup_cosine"}}


@pytest.mark.slow_cases(
    "*_clustering-*", "*cfl-*", "fedavg-warmup_cosine", "fedgroup-*", "fedgwc-*", "flhc-*", "flux-*"
)
@pytest.mark.parametrize(
    ("method", "names"), TRACED, ids=lambda value: value if isinstance(value, str) else " ".join(value)
)
def test_options_that_are_declared_as_tracers_are(method, names, monkeypatch):
    monkeypatch.setattr(Group, "run", lambda *args: (_ for _ in ()).throw(Killed))
    needed = NEEDED.get(method, {}) | NEEDED.get(names[0], {})
    names = ("lr",) if names == ("warmup_cosine",) else names
    needed = {n: v for n, v in needed.items() if n not in names and not ("radius" in names and n == "quantile")}
    config = Config(method, clients=4, clusters=2, model="linear", local_steps=1, **needed)
    with pytest.raises(Killed), jax.numpy_dtype_promotion("standard"):  # which schedules of optax rely on
        run_sweep(config, {name: [0.5, 0.75] if name in (names[0], names[-1]) else [0.5] for name in names})


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "Give a grid, --grid NAME=VALUE,VALUE,..."),
        (["--grid", "lr"], "grid must be NAME=VALUE,VALUE,..., such as lr=0.01,0.1, got 'lr'"),
        (["--grid", "learning_rate=0.1"], "grid: unknown option 'learning_rate': did you mean 'lr'?"),
        (["--grid", "wieghts=size"], "grid: unknown option 'wieghts': did you mean 'weights'?"),
        (["--grid", "lr=0.1,-1"], "lr must be positive, got -1.0"),
        (["--grid", "lr=0.1,fast"], "lr must be of type float, got 'fast'"),
        (["--grid", "lr=0.1,"], "lr must be of type float, got ''"),
        (["--grid", "lr=0.1,0.1"], "grid: lr has 0.1 twice"),
        (["--grid", "optimizer=sgd,adm"], "unknown optimizer 'adm': did you mean 'adam'?"),
        (["--grid", "lr=0.1", "--grid", "lr=0.2"], "grid must be given once: lr has two axes, got 'lr'"),
        (["--grid", "num_models=2", "--grid", "num_clusters=2"], "grid must be given once: num_models has two axes"),
        (["--grid", "eps_1=0.1"], "method fedavg has no option eps_1 (only cfl)"),
        (["--grid", "lr=0.1", "0.3"], "unexpected argument '0.3'"),
        (["--grid", "clients=4,8"], "grid must be an option that may differ between cells; give --clients for all"),
        (["--grid", "seeds=1,2"], "give --seeds for all of them"),
        (["--grid", "momentum=0.1", "--optimizer", "adam"], "momentum must be left out with --optimizer adam"),
        (["--grid", "lr=0.1", "--metric", "acc"], "unknown metric 'acc': did you mean 'accuracy'?"),
        (["--grid", "lr=0.1", "--holdout", "1"], "holdout must be in (0, 1), got 1.0"),
        (["--grid", "lr=0.1", "--population", "100"], "clients must be left out with --population"),
        (["--grid", "lr=0.1", "--patience", "3"], "patience must be left out of a sweep, which judges the last"),
        (["--grid", "lr=0.1", "--coordinator", "auto"], "unknown option --coordinator"),
        (["--grid", "lr=0.1", "--resume"], "resume needs out, the folder of the sweep"),
        (["--grid", "model=linear,lstm"], "model 'lstm' reads texts, but data set 'digits' holds none"),
    ],
)
def test_bad_input_of_the_command(flags, words, capsys, monkeypatch):
    monkeypatch.setattr(Group, "_run_rows", None)
    others = [flag for flag in QUICK if "model" not in flag or "model=" not in "".join(flags)]
    assert cli.main(["sweep", "fedavg", *others, "--seeds", "1", *flags]) == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert not list(Path().iterdir())


def test_seeds_have_a_default_which_the_help_names(capsys, monkeypatch):
    assert cli.main(["sweep", "fedavg", "--population", "9", "--grid", "lr=0.1"]) == 2
    assert "population must be left out of a sweep" in capsys.readouterr().err
    asked = []
    monkeypatch.setattr(sweeps, "run_sweep", lambda config, *_, **__: asked.append(config.seeds) or 1 / 0)
    for flags in ([], ["--seed", "7"], ["--seeds", "2"]):
        assert cli.main(["sweep", "fedavg", *QUICK, "--grid", "lr=0.1", *flags]) == 1  # an error of the test's own
    assert asked == [3, 1, 2]
    with pytest.raises(SystemExit):
        cli.main(["sweep", "fedavg", "--help"])
    assert "number of seeds, 0, 1, ..., that run together [3]" in capsys.readouterr().out


def test_texts_of_best_toml_are_read_back():
    config = Config("ifca", dataset='a"b\\c\n\x7fé漢🙂', share="Dense_0", relative=None, seed=3, lr=0.1)
    cell = jfcl.simulation.grid.Cell({"lr": 0.25}, [], {"loss": 1.0}, {})
    found = jfcl.Sweep({"lr": [0.25]}, [cell], "loss", 0, 0.0, 0.0)
    read = tomllib.loads(sweeps.best_toml(config, found))
    assert read == {"method": "ifca", "dataset": config.dataset, "share": "Dense_0", "lr": 0.25, "seed": 3}
    texts = sweeps.best_toml(Config("cfl", eps_1=float("inf"), eps_2=1.0, recursive=True), found)
    assert tomllib.loads(texts)["eps_1"] == float("inf") and tomllib.loads(texts)["recursive"] is True
