"""The terminal: the progress bar, Ctrl-C, and the text of a history."""

import io
import re
import signal
import time

import jax
import pytest
import rich.console
from still_method import still

import jfcl
from jfcl.data import ClientStore, generate, generate_store
from jfcl.simulation import progress
from jfcl.testing import problem

CLIENTS, _, TASK, TRAINING = problem()
STILL = still(TASK, lambda key: jax.tree.map(lambda x: x[None], TASK.init(key)), loss=lambda t: t)


@pytest.fixture
def screen(monkeypatch):
    """A terminal: what is written to it."""
    written = io.StringIO()

    def console(**_):
        return rich.console.Console(file=written, force_terminal=True, force_interactive=True, width=120)

    for module in (progress, generate):
        monkeypatch.setattr(module, "Console", console)
    return written


@pytest.mark.slow_cases("population")
@pytest.mark.parametrize("name", ["clients", "population"])
def test_the_bar_says_that_programs_compile(name, screen):
    def step(key, state, clients):
        time.sleep(0.2)  # while it is traced: longer than between two frames
        return method.step(key, state, clients)

    method = STILL if name == "clients" else jfcl.fedavg(TASK, TRAINING)
    algorithm, run = method._replace(step=step), {"key": jax.random.key(0), "num_rounds": 3, "progress": True}
    if name == "clients":
        jfcl.simulate(algorithm, CLIENTS, **run)
    else:
        jfcl.simulate(algorithm, jfcl.Population(ClientStore.from_clients(CLIENTS), cohort=4), **run)
    frames = re.findall(r"(\d)/3.*?left [-:\d]+ ?(\w*)", re.sub(r"\x1b\[[\d;]*m", "", screen.getvalue()))
    assert ("0", "compiling") in frames
    assert frames[-1] == ("3", "") and ("3", "compiling") not in frames


def test_a_store_that_is_built_has_a_bar(screen, tmp_path):
    generate_store(tmp_path / "a", "digits", num_clients=3000, examples_per_client=2, progress=True)
    assert "building the train store" in screen.getvalue()
    shown = screen.getvalue()
    generate_store(tmp_path / "b", "digits", num_clients=30, examples_per_client=2)
    assert screen.getvalue() == shown


# ---- Ctrl-C ---------------------------------------------------------------------------------------------------------


def test_ctrl_c_before_the_first_round_leaves_a_run_that_resumes(tmp_path, capsys):
    class Interrupt:
        def on_start(self, run):
            signal.raise_signal(signal.SIGINT)

    run = {"key": jax.random.key(0), "num_rounds": 2, "out": tmp_path}
    with pytest.raises(KeyboardInterrupt):
        jfcl.simulate(STILL, CLIENTS, **run, callbacks=[Interrupt()])
    assert "stopping after these rounds; Ctrl-C again stops at once" in capsys.readouterr().err
    assert not list((tmp_path / "checkpoints").iterdir())
    resumed = jfcl.simulate(STILL, CLIENTS, **run, resume=True)
    whole = jfcl.simulate(STILL, CLIENTS, **(run | {"out": None}))
    assert resumed.records == whole.records


def test_ctrl_c_after_the_last_round_stops_the_program_once_the_results_are_written(tmp_path):
    class Interrupt:
        def on_end(self, end):
            signal.raise_signal(signal.SIGINT)

    run = {"key": jax.random.key(0), "num_rounds": 2, "out": tmp_path}
    with pytest.raises(KeyboardInterrupt):
        jfcl.simulate(STILL, CLIENTS, **run, callbacks=[Interrupt()])
    assert (tmp_path / "summary.json").exists()
    assert jfcl.simulate(STILL, CLIENTS, **run, resume=True).rounds == 2


def test_a_handler_of_a_program_around_python_stays(monkeypatch):
    taken = []
    monkeypatch.setattr(signal, "getsignal", lambda _: None)
    monkeypatch.setattr(signal, "signal", lambda *handler: taken.append(handler))
    assert jfcl.simulate(STILL, CLIENTS, key=jax.random.key(0), num_rounds=1).rounds == 1
    assert not taken


# ---- The text of a history ------------------------------------------------------------------------------------------


def test_a_history_is_printed_in_three_lines():
    keys = jax.random.split(jax.random.key(0), 2)
    history = jfcl.simulate(STILL, CLIENTS, key=keys, num_rounds=3, test_clients=CLIENTS)
    lines = str(history).splitlines()
    losses = [row["loss"] for row in history.records[-2:]]
    assert len(lines) == 3 and all(len(line) <= 120 for line in lines)
    assert lines[0] == "History: 3 rounds, 2 seeds, 6 records; all rounds are done"
    assert f"loss {sum(losses) / 2:.4g} ± {abs(losses[0] - losses[1]) / 2**0.5:.3g}" in lines[1]
    options = {"num_rounds": 3, "eval_every": 9, "stop_after": 2, "test_clients": CLIENTS}
    lines = repr(jfcl.simulate(STILL, CLIENTS, key=keys, **options)).splitlines()
    assert lines[:2] == ["History: 2 rounds, 0 records; stop_after is 2 rounds", "no evaluation"]
