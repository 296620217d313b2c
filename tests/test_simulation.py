import inspect
import json
import os
import signal
import subprocess
import sys
import threading
import time
import types
import warnings
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from still_method import Still, still

import jfcl
from jfcl.core import Algorithm, Clients, Served
from jfcl.core.platforms import compiles_alone
from jfcl.mapping import jitted
from jfcl.mapping.axis import chunked
from jfcl.simulation import evaluation, loop, progress, resident
from jfcl.simulation.evaluation import Silence, adopted, choices_among, finite_mean, silence_after
from jfcl.simulation.leaves import read_leaves, write_leaves
from jfcl.testing import count_compilations, problem

CLIENTS, CLUSTER, TASK, TRAINING = problem()
IFCA = jfcl.ifca(TASK, TRAINING, num_clusters=2)
KEYS = jax.vmap(jax.random.key)(jnp.arange(3, dtype=jnp.uint32))


STILL = still(TASK, lambda key: {"w": jnp.zeros((2, 4)), "b": jnp.array([0.0, 1.0])})
FEDAVG = jfcl.fedavg(TASK, TRAINING)


def equal(a, b):
    return jax.tree.all(
        jax.tree.map(lambda x, y: bool(np.array_equal(np.asarray(x), np.asarray(y), equal_nan=True)), a, b)
    )


KEY = jax.random.key(3)


def sim(**options):
    options = {"key": KEY, "num_rounds": 6, "test_clients": CLIENTS, "true_cluster": CLUSTER} | options
    return jfcl.simulate(options.pop("algorithm", IFCA), options.pop("clients", CLIENTS), **options)


@pytest.mark.slow
def test_simulate_is_rollout():
    state, metrics = jax.jit(lambda: jfcl.rollout(IFCA, CLIENTS, key=jax.random.key(3), num_rounds=6))()
    history = sim()
    assert equal(history.state, state)
    assert history.rounds == 6
    assert history.records[-1]["bytes_up"] == pytest.approx(float(metrics["bytes_up"].sum()))
    assert history.client_steps == pytest.approx(float(metrics["client_steps"].sum()))
    np.testing.assert_allclose(history.records[-1]["train_loss"], metrics["loss"][-1].mean(), rtol=1e-6)


STARTS = {  # and the rounds in them
    "restarts": (jfcl.ifca(TASK, TRAINING, num_clusters=2, restarts=3, restart_rounds=4), 4),
    "local rounds": (jfcl.fesem(TASK, TRAINING, num_clusters=2, local_rounds=2), 2),
    "none": (IFCA, 0),
}


def test_methods_name_the_rounds_of_their_start():
    options = {"num_clusters": 2}
    warm = jfcl.hypcluster(TASK, TRAINING, warm_rounds=3, **options)
    assert [algorithm.init_rounds for algorithm, _ in STARTS.values()] == [before for _, before in STARTS.values()]
    assert warm.init_rounds == 3 and jfcl.hypcluster(TASK, TRAINING, **options).init_rounds == 0
    assert jfcl.one_shot(TASK, TRAINING, local_rounds=2, **options).init_rounds == 2
    assert jfcl.flhc(TASK, TRAINING, rounds_before=2, **options).init_rounds == 3
    assert jfcl.with_restarts(warm, num_restarts=4, num_rounds=2).init_rounds == 5


@pytest.mark.slow_cases("local rounds", "restarts")
@pytest.mark.parametrize(("algorithm", "before"), STARTS.values(), ids=STARTS)
def test_rounds_of_a_start_count(algorithm, before, tmp_path):
    seen = []

    class Seeing:
        def on_start(self, run):
            seen.append((run.round, run.num_rounds))

        def on_checkpoint(self, round, folder):
            seen.append(round)

    run = {"algorithm": algorithm, "num_rounds": 4, "out": tmp_path / "run", "resume": True, "callbacks": [Seeing()]}
    assert sim(**run, stop_after=3).ended == "stop_after is 3 rounds"
    history, last = sim(**run), before + 4
    assert seen == [(before, last), before + 3, (before + 3, last), last]
    # The rounds are those of `rollout`, and numbered after those of the start, the costs of which are in the first.
    state, metrics = jax.jit(lambda: jfcl.rollout(algorithm, CLIENTS, key=KEY, num_rounds=4))()
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), history.state, state)
    assert (history.rounds, history.init_rounds) == (last, before)
    assert [row["round"] for row in history.records] == [*range(before + 1, last + 1)]
    np.testing.assert_allclose([row["bytes_up"] for row in history.records], np.cumsum(metrics["bytes_up"]), rtol=1e-6)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [row["round"] for row in history.records]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["num_rounds"], summary["init_rounds"]) == (last, before)
    found = summary["per_seed"][0]["rounds_to_recovery"]
    assert found is None or found > before
    # Evaluations are at rounds that are multiples on this axis; a state that is passed in has no start.
    assert [row["round"] for row in sim(algorithm=algorithm, num_rounds=4, eval_every=3).records] == [
        t for t in range(before + 1, last + 1) if t % 3 == 0 or t == last
    ]
    more = sim(algorithm=algorithm, num_rounds=2, state=history.state)
    assert [row["round"] for row in more.records] == [1, 2]


@pytest.mark.slow
def test_evaluation_and_seeds_change_nothing():
    often, rarely = sim(), sim(eval_every=4)
    assert equal(often.state, rarely.state)
    assert [r["round"] for r in rarely.records] == [4, 6]
    assert often.records[3] == rarely.records[0] and often.records[5] == rarely.records[1]
    together = sim(key=KEYS, seeds=[7, 8, 9], seed_axis=chunked(1))
    alone = sim(key=KEYS[1])
    assert equal(jax.tree.map(lambda x: x[1], together.state), alone.state)
    assert [r["seed"] for r in together.records[:3]] == [7, 8, 9]
    assert together.series("loss", 8)[1].tolist() == alone.series("loss")[1].tolist()
    for seed_axis in (jax.vmap, jfcl.sharded(jfcl.client_mesh(1))):
        other = sim(key=KEYS, seed_axis=seed_axis)
        for x, y in zip(jax.tree.leaves(other.state), jax.tree.leaves(together.state), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_a_second_call_compiles_nothing_and_gives_the_same_bits():
    first = sim(eval_every=4)
    with count_compilations() as compiled:
        second = sim(eval_every=4)
    assert compiled.count == 0
    assert equal(first.state, second.state) and first.records == second.records


def test_arrays_have_no_programs_of_their_own():
    """Neither those of the data, nor those of the last state; no other test has these shapes."""
    task = jfcl.models.classification(jfcl.models.Linear(31), (37,), 31)
    algorithm = still(task, lambda key: jax.tree.map(lambda x: x[None], task.init(key)))
    shard = {"x": np.zeros((5, 37), np.float32), "y": np.zeros(5, np.int32)}
    clients = jfcl.stack_clients([shard] * 41)
    sim(num_rounds=1)  # has compiled what does not depend on shapes
    with count_compilations() as compiled:
        sim(algorithm=algorithm, clients=clients, num_rounds=1, test_clients=clients, true_cluster=None)
    assert compiled.count == 4  # those of `init`, of rounds and of evaluations, and one that takes the row of the seed


@pytest.mark.slow
def test_ten_learning_rates_compile_once():
    def make(lr):
        return still(TASK, lambda key: {"w": lr * jax.random.normal(key, (1, 4)), "b": jnp.zeros(1)})

    def final(lr):
        return sim(algorithm=make, hyperparams={"lr": lr}).records[-1]["loss"]

    losses = [final(0.01)]
    with count_compilations() as compiled:
        losses += [final(lr) for lr in np.linspace(0.02, 0.1, 9)]
    assert compiled.count == 0
    assert len(set(losses)) == 10


def test_resumed_equals_uninterrupted_bit_for_bit(tmp_path):
    whole = sim(out=tmp_path / "whole", eval_every=2, key=KEYS)
    sim(out=tmp_path / "parts", eval_every=2, key=KEYS, stop_after=3)  # not even at an evaluation
    resumed = sim(out=tmp_path / "parts", eval_every=2, key=KEYS, resume=True)
    assert equal(whole.state, resumed.state)
    assert whole.records == resumed.records
    texts = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("whole", "parts")]
    assert texts[0] == texts[1] and len(texts[0].splitlines()) == 9
    assert resumed.client_steps == whole.client_steps
    again = sim(out=tmp_path / "parts", eval_every=2, key=KEYS, resume=True)  # nothing left to do
    assert equal(again.state, whole.state) and again.records == whole.records
    longer = sim(out=tmp_path / "parts", eval_every=2, key=KEYS, resume=True, num_rounds=8)
    assert equal(longer.state, sim(key=KEYS, num_rounds=8).state)


def test_lines_after_the_checkpoint_are_run_again(tmp_path):
    sim(out=tmp_path, stop_after=3)
    with (tmp_path / "metrics.jsonl").open("a") as f:  # a kill after the line and before the checkpoint
        f.write(json.dumps({"seed": 0, "round": 4, "loss": -1.0}) + '\n{"seed": 0, "rou')
    assert sim(out=tmp_path, resume=True).records == sim().records


def many_rounds(out, num_rounds=100_000, resume=False):
    clients, _, task, training = problem()
    algorithm = jfcl.ifca(task, training, num_clusters=2)
    options = {"eval_every": 1, "test_clients": clients, "out": out, "resume": resume, "checkpoint_seconds": 0.2}
    return jfcl.simulate(algorithm, clients, key=jax.random.key(3), num_rounds=num_rounds, **options)


@pytest.mark.slow
def test_kill_minus_nine_and_resume(tmp_path):
    script = "import sys, jax, jfcl\nfrom jfcl.testing import problem\njax.config.update('jax_num_cpu_devices', 2)\n"
    script += f"{inspect.getsource(many_rounds)}\nmany_rounds(sys.argv[1])"
    first = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "a")],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.time() + 120
    while not list((tmp_path / "a" / "checkpoints").glob("[0-9]*")) and time.time() < deadline:
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.wait()
    done = len((tmp_path / "a" / "metrics.jsonl").read_text().splitlines())
    assert 0 < done < 100_000, "it should have been killed on the way"
    resumed, whole = many_rounds(tmp_path / "a", done + 5, resume=True), many_rounds(tmp_path / "b", done + 5)
    jax.tree.map(np.testing.assert_array_equal, resumed.state, whole.state)
    assert len(resumed.records) == len(whole.records) == done + 5


def test_a_metric_of_as_many_models_as_there_are_clients_and_padding_is_whole(monkeypatch):
    def step(key, state, clients):
        state, metrics = STILL.step(key, state, clients)
        return state, metrics | {"of_models": jnp.arange(8.0), "of_clients": jnp.arange(8.0)[: len(clients.size)]}

    axis = jfcl.sharded(jfcl.client_mesh(2))  # 7 clients and one that pads
    record = sim(algorithm=STILL._replace(step=step), num_rounds=1, client_axis=axis).records[-1]
    assert record["of_models"] == list(range(8)) and record["of_clients"] == list(range(7))
    for most, wanted in ((7, list(range(7))), (6, 3.0)):  # a mean, where there are too many clients without padding
        monkeypatch.setattr(evaluation, "MOST_LISTED", most)
        record = sim(algorithm=STILL._replace(step=step), num_rounds=1, client_axis=axis).records[-1]
        assert record["of_clients"] == wanted and record["of_models"] == 3.5


@pytest.mark.slow
def test_records_leave_out_the_clients_that_fill_up_devices():
    clients, _, task, training = problem("classification")
    axis = jfcl.sharded(jfcl.client_mesh(2))
    algorithm = jfcl.knn_per(task, training, num_neighbours=2, client_axis=axis)
    record = sim(algorithm=algorithm, clients=clients, test_clients=clients, num_rounds=1, client_axis=axis).records[0]
    assert len(record["mixing"]) == len(clients.size) == 7 and all(0 <= m <= 1 for m in record["mixing"])


@pytest.mark.slow
def test_it_does_not_matter_how_many_rounds_run_at_once(monkeypatch):
    """The program is called for about a second's rounds: sums of large whole numbers come out the same, and exact."""

    def step(key, state, clients):
        state, metrics = IFCA.step(key, state, clients)
        return state, metrics | {"bytes_up": jnp.float32(90_000_001.0) + 8 * state.round.astype(jnp.float32)}

    seen, advance = [], resident._advance
    for seconds, most in ((0.0, loop.MOST_ROUNDS), (1e6, loop.MOST_ROUNDS), (1e6, 8)):
        monkeypatch.setattr(loop, "BLOCK_SECONDS", seconds)
        for module in (loop, resident):
            monkeypatch.setattr(module, "MOST_ROUNDS", most)
        algorithm = Algorithm(IFCA.init, step, TASK)
        counts = []

        def counted(*args, counts=counts, **options):
            counts.append(int(args[5]))
            return advance(*args, **options)

        counted.lower = advance.lower
        monkeypatch.setattr(resident, "_advance", counted)
        history = sim(algorithm=algorithm, num_rounds=40, eval_every=20)
        seen.append((counts, history))
    (ones, short), (blocks, long), (bounded, third) = seen
    assert ones == [1] * 40 and blocks == [1, 19, 20] and bounded == [1, 8, 8, 3, 8, 8, 4]
    for other in (long, third):
        assert equal(short.state, other.state)
        assert [r["bytes_up"] for r in short.records] == [r["bytes_up"] for r in other.records]
    exact = sum(float(np.float32(90_000_001.0) + np.float32(8 * t)) for t in range(1, 41))
    assert short.records[-1]["bytes_up"] == exact


def test_ctrl_c_saves(tmp_path, monkeypatch):
    calls, summarize = [], jfcl.metrics.summarize

    def interrupt(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return summarize(*args, **kwargs)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(jfcl.metrics, "summarize", interrupt)
        sim(out=tmp_path)
    assert [p.name for p in (tmp_path / "checkpoints").glob("[0-9]*")] == ["3"]
    resumed = sim(out=tmp_path, resume=True)
    assert equal(resumed.state, sim().state)
    assert [r["round"] for r in resumed.records] == [1, 2, 3, 4, 5, 6]


def exploding(key, state, clients):
    state, metrics = STILL.step(key, state, clients)
    bad = jnp.where(state.round >= 4, jnp.inf, 1.0)
    return state._replace(params=jax.tree.map(lambda p: p * bad, state.params)), metrics


def test_divergence_stops_with_a_clear_error_and_keeps_the_checkpoint(tmp_path):
    with pytest.raises(jfcl.DivergedError, match=r"round 4, seed 0: a model is no longer finite; a lower"):
        sim(algorithm=Algorithm(STILL.init, exploding, TASK), out=tmp_path, checkpoint_seconds=0.0)
    assert sorted(int(p.name) for p in (tmp_path / "checkpoints").glob("[0-9]*")) == [2, 3]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_sums_over_the_rounds_of_a_call_are_those_of_float64():
    def step(key, state, clients):
        state, metrics = STILL.step(key, state, clients)
        return state, metrics | {"bytes_up": jnp.where(state.round == 2, 2.0**24, 1.0)}

    history = sim(algorithm=Algorithm(STILL.init, step, TASK), num_rounds=5, eval_every=5)
    assert history.records[-1]["bytes_up"] == 2**24 + 4


def test_silence_within_a_call_of_the_program_is_divergence():
    """All clients are silent in round 3, of a call with rounds 2 to 6."""

    def step(key, state, clients):
        state, metrics = STILL.step(key, state, clients)
        return state, metrics | {"participants": jnp.int32(7), "nonfinite": jnp.where(state.round == 3, 7.0, 0.0)}

    with pytest.raises(jfcl.DivergedError, match="by round 6, seed 0: no client sent a finite update"):
        sim(algorithm=Algorithm(STILL.init, step, TASK), eval_every=6)


def test_updates_of_everyone_broken_is_an_error_and_of_one_a_note():
    x = CLIENTS.examples["x"].copy()
    x[1] = 3e38  # finite, but its gradient is not
    spoiled = Clients({"x": x, "y": CLIENTS.examples["y"]}, CLIENTS.size)
    with pytest.warns(UserWarning, match=r"1 client update\(s\) so far held NaN"):
        sim(algorithm=FEDAVG, clients=spoiled, num_rounds=1)
    x[:] = 3e38
    with pytest.raises(jfcl.DivergedError, match="no client sent a finite update"):
        sim(algorithm=FEDAVG, clients=Clients({"x": x, "y": CLIENTS.examples["y"]}, CLIENTS.size))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:round .* client update.s. so far held NaN")
def test_cohorts_of_hostile_clients_alone_are_no_divergence():
    """One client in a round, of which one in seven sends NaN: the models stay as they are, at whatever evaluations."""
    hostile = jfcl.Adversary(jfcl.attacks.nan(), np.arange(7) == 1)
    fed = jfcl.fedavg(TASK, TRAINING, cohort=1, adversary=hostile)
    often, rarely = (sim(algorithm=fed, num_rounds=30, eval_every=every) for every in (1, 30))
    assert equal(often.state, rarely.state) and often.records[-1]["nonfinite"] > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:round .* client update.s. so far held NaN")
def test_cohorts_without_a_finite_update_are_divergence_in_the_end(tmp_path):
    """Seven participants in a row, as many as there are clients; those before a stop count."""
    fed = jfcl.fedavg(TASK, TRAINING, cohort=2, adversary=jfcl.Adversary(jfcl.attacks.nan(), np.ones(7, bool)))
    for every in (1, 20):
        with pytest.raises(jfcl.DivergedError, match="no client sent a finite update"):
            sim(algorithm=fed, num_rounds=20, eval_every=every)
    assert sim(algorithm=fed, num_rounds=3).rounds == 3
    sim(algorithm=fed, num_rounds=20, stop_after=3, out=tmp_path)
    with pytest.raises(jfcl.DivergedError, match="by round 4"):
        sim(algorithm=fed, num_rounds=20, out=tmp_path, resume=True)


def test_small_rounds_at_the_end_are_no_silence():
    """The most participants of a round are 6: rounds of 2 do not count, rounds of 3 do; a finite update ends it."""
    found, silence = [], Silence(*np.zeros((2, 1), np.int32))
    for present, bad in ((4, 0), (6, 5), (6, 6), (2, 2), (3, 3), (0, 0), (3, 2), (1, 1)):
        silence = silence_after(silence, {"participants": np.array([present]), "nonfinite": np.array([bad])})
        found.append((silence.count.item(), silence.widest.item()))
    assert found == [(0, 4), (0, 6), (6, 6), (6, 6), (9, 6), (9, 6), (0, 6), (0, 6)]


def test_states_have_strong_types():
    """A weak type in the first state would make the program of a resumed run another one."""
    for algorithm in (jfcl.cfl(TASK, TRAINING), IFCA):
        axes = {"row_axis": jax.vmap, "client_axis": jax.vmap}
        source = resident.Resident(algorithm, CLIENTS, KEYS, None, seeds=[0, 1, 2], **axes)
        assert not any(x.weak_type for x in jax.tree.leaves(source.like))


@pytest.mark.slow
def test_sizes_of_other_integer_types():
    clients = CLIENTS._replace(size=CLIENTS.size.astype(np.int64))
    algorithm = jfcl.cfl(TASK, TRAINING, cohort=3)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        wide = sim(algorithm=algorithm, clients=clients, test_clients=None, num_rounds=2)
        narrow = sim(algorithm=algorithm, test_clients=None, num_rounds=2)
    assert equal(wide.state, narrow.state)


def test_clients_choose_among_models_where_one_model_is_a_collapse():
    served, one = Served({}, np.zeros(7, np.int32)), np.array([0, 0, 0, 0, 0, 0, -1])
    for given, models, true, choices in [
        (served, 2, None, 2),
        (served, 2, CLUSTER, 2),
        (served, 2, one, 1),  # those of a hostile client do not count
        (served, 2, one * 0 - 1, 2),
        (served, 6, None, 6),
        (served, 7, None, 1),  # as many as clients
        (served._replace(to=np.ones((7, 2), np.float32)), 2, None, 1),
        (served._replace(active=np.ones(2, bool)), 2, None, 1),
    ]:
        assert choices_among(given, models, 7, true) == choices


def test_means_are_of_finite_values():
    values, rows = jnp.array([1.0, jnp.inf, jnp.nan, 3.0]), jnp.array([True, True, True, False])
    assert finite_mean(values) == 2 and finite_mean(values, rows) == 1
    assert finite_mean(jnp.stack([values, values], axis=1), rows) == 1 and jnp.isnan(finite_mean(values, values > 5))


def test_collapse_warns_once():
    init = lambda key, clients: STILL.init(key, clients)._replace(cluster=jnp.zeros(7, jnp.int32))  # noqa: E731
    with pytest.warns(UserWarning, match="all clients use one of the 2 models") as caught:
        history = sim(algorithm=Algorithm(init, STILL.step, TASK))
    assert len(caught) == 1 and {r["clusters_in_use"] for r in history.records} == {1}
    aside = lambda key, clients: STILL.init(key, clients)._replace(cluster=jnp.zeros(7, jnp.int32).at[6].set(1))  # noqa: E731
    with pytest.warns(UserWarning, match="all clients use one"):  # but for a hostile one
        sim(algorithm=Algorithm(aside, STILL.step, TASK), true_cluster=np.array([0, 1, 0, 1, 0, 1, -1]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sim(algorithm=FEDAVG)  # one model is no collapse


def loss64(params, i, k):
    """The mean loss of client `i` under model `k`, in float64."""
    x, y = (CLIENTS.examples[name][i, : CLIENTS.size[i]].astype(np.float64) for name in "xy")
    w, b = (np.asarray(params[name][k], np.float64) for name in "wb")
    return 0.5 * np.mean((x @ w + b - y) ** 2)


def test_clients_are_served_the_model_of_lowest_loss_now_or_that_of_their_last_round():
    """One client takes part in a round: what the others chose, they chose among the models of the beginning."""
    algorithm = jfcl.ifca(TASK, TRAINING, num_clusters=2, cohort=1)
    now, then = (sim(algorithm=algorithm, num_rounds=5, serve=serve) for serve in ("loss", "state"))
    assert equal(now.state, then.state)
    losses = np.array([[loss64(now.state.params, i, k) for k in (0, 1)] for i in range(7)])
    lowest, last = losses.argmin(axis=1), np.asarray(now.state.cluster)
    assert (lowest != last).any()
    for history, served in ((now, lowest), (then, last)):
        assert history.records[-1]["cluster"] == served.tolist()
        for name in ("cluster", "model"):
            assert history.clients[name].tolist() == [served.tolist()]
        np.testing.assert_allclose(history.clients["loss"][0], losses[np.arange(7), served], rtol=1e-5)
        right = max(np.mean(served == CLUSTER), np.mean(served != CLUSTER))
        assert history.records[-1]["cluster_accuracy"] == pytest.approx(right)
    untested = sim(algorithm=algorithm, num_rounds=5, test_clients=None)  # nothing is evaluated
    assert untested.records[-1]["cluster"] == last.tolist() and "model" not in untested.clients


@pytest.mark.slow
def test_the_model_of_lowest_loss_is_the_same_on_two_devices():
    axis, options = jfcl.sharded(jfcl.client_mesh(2)), {"num_clusters": 2, "cohort": 1}
    plain, placed = (
        sim(algorithm=jfcl.ifca(TASK, TRAINING, **options, client_axis=a), num_rounds=5, client_axis=a)
        for a in (None, axis)
    )
    assert [r["cluster"] for r in plain.records] == [r["cluster"] for r in placed.records]
    for name in ("cluster", "model"):
        assert plain.clients[name].tolist() == placed.clients[name].tolist()
    np.testing.assert_allclose(plain.clients["loss"], placed.clients["loss"], rtol=1e-4)


@pytest.mark.slow
def test_losses_are_compared_only_where_clients_choose_among_models(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("losses under all models")

    one, two = (jfcl.ifca(TASK, TRAINING, num_clusters=k) for k in (1, 2))
    several = (two, jfcl.hypcluster(TASK, TRAINING, num_clusters=2, warm_rounds=1))
    several += (jfcl.ifca(TASK, TRAINING, num_clusters=2, restarts=2),)
    states = [algorithm.init(jax.random.key(0), CLIENTS) for algorithm in (one, *several)]
    monkeypatch.setattr(sys.modules["jfcl.methods.ifca"], "lowest_loss", refuse)
    assert not one.serve(states[0], CLIENTS).to.any()
    for algorithm, state in zip(several, states[1:], strict=True):
        assert algorithm.serve(state, None).to is state.cluster
        with pytest.raises(AssertionError, match="losses under all models"):
            algorithm.serve(state, CLIENTS)
    for algorithm in (jfcl.cfl(TASK, TRAINING), jfcl.one_shot(TASK, TRAINING, num_clusters=2)):
        state = algorithm.init(jax.random.key(0), CLIENTS)
        assert algorithm.serve(state, CLIENTS).to is state.cluster


def test_what_is_served_takes_no_memory_of_its_own():
    for history in (sim(), sim(key=KEYS)):
        for served, kept in zip(
            jax.tree.leaves(history.served.models),
            jax.tree.leaves(history.state.params),
            strict=True,
        ):
            assert served is kept


def test_newcomers_are_served_by_lowest_loss():
    history = sim(newcomers=CLIENTS)
    last = history.records[-1]
    assert last["newcomer_loss"] <= last["loss"] + 1e-6


@pytest.mark.parametrize("exists", [[True, False], [False, True]])
def test_newcomers_are_served_models_that_exist(exists):
    def serve(state, clients):
        return Served(state.params, state.cluster, active=jnp.array(exists))

    history = sim(algorithm=STILL._replace(serve=serve), newcomers=CLIENTS, num_rounds=1)
    only = jfcl.evaluate(TASK, history.state.params, CLIENTS, np.full(7, exists.index(True)))
    assert history.records[-1]["newcomer_loss"] == pytest.approx(float(only["loss"].mean()))


def test_newcomers_have_the_mean_of_what_clients_keep_without_padding():
    def serve(state, clients):
        return Served({"w": jnp.float32([5, 7])}, None, {"b": jnp.float32([1, 3, 90])})

    served = adopted(STILL._replace(serve=serve, adopt=None), None, CLIENTS, 2, 1)
    assert served.personal["b"].tolist() == [2.0] * 7 and served.models["w"].tolist() == [5.0]


@pytest.mark.slow
def test_entries_of_clusters_are_kept_where_there_are_as_many_clients():
    clients, _, task, training = problem()
    two = jax.tree.map(lambda x: x[:2], clients._replace(id=None))
    history = jfcl.simulate(jfcl.cfl(task, training, max_clusters=2), two, key=jax.random.key(0), num_rounds=1)
    assert len(history.records[0]["mean_norm"]) == 2 and isinstance(history.records[0]["train_loss"], float)


def test_records_are_ready_for_pandas():
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame(sim(key=KEYS).records)
    assert len(frame) == 18 and frame.groupby("seed")["loss"].last().notna().all()


NAMED = CLIENTS._replace(id=np.arange(7, dtype=np.int32))
NAMED_BACKWARDS = jax.tree.map(lambda x: x[::-1], NAMED)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_rounds": 0}, "num_rounds must be an integer, at least 1, got 0"),
        ({"eval_every": 0}, "eval_every"),
        ({"serve": "lost"}, "did you mean 'loss'"),
        ({"true_cluster": np.zeros(3)}, r"true_cluster must be of shape \(7,\)"),
        ({"true_cluster": np.full(7, -1)}, "true_cluster must be known of one client at least, got .-1 for all"),
        ({"test_clients": Clients({"x": np.zeros((2, 1, 4), np.float32)}, np.ones(2, np.int32))}, "of as many clients"),
        ({"seeds": [1, 2]}, "one for each of the 1 keys"),
        ({"seeds": ["a"]}, "seeds must be different integers, one for each of the 1 keys"),
        ({"seeds": [1, 1], "key": jax.random.split(jax.random.key(0))}, "seeds must be different integers"),
        ({"stop_after": 0}, "stop_after must be an integer, at least 1, got 0"),
        ({"resume": True}, "resume needs out, the folder of the run"),
        ({"checkpoint_seconds": "5"}, "checkpoint_seconds must be of type float, got '5'"),
        ({"checkpoint_seconds": float("nan")}, "checkpoint_seconds must be a number"),
        ({"config": ["a"]}, "config must be a dict"),
        ({"key": jax.random.split(KEY, 0)}, "key must be one key, or a vector of keys"),
        ({"key": jax.random.split(KEY, (2, 2))}, "key must be one key, or a vector of keys"),
        ({"true_cluster": np.full(7, 0.5)}, "true_cluster must be integers, the cluster of each client, got 'float64'"),
        ({"clients": CLIENTS._replace(size=[6] * 7)}, r"clients.size must be an array \[N\] of integers"),
        (
            {"clients": NAMED, "test_clients": NAMED_BACKWARDS},
            "test_clients.id must be the ids of the clients in training",
        ),
        ({"clients": CLIENTS._replace(size=np.array([0, 5, 6, 3, 4, 6, 6], np.int32))}, "without examples"),
    ],
)
def test_refuses_before_computing(options, words):
    KEY[None]  # an operation of JAX's own, which may be the first of its shape
    with count_compilations() as compiled, pytest.raises(ValueError, match=words):
        sim(**options)
    assert compiled.count == 0


class Bare(NamedTuple):
    params: dict


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda state, metrics: state,
            "step must be a function that returns .state, metrics., .*, got 'Still'",
        ),
        (lambda state, metrics: (metrics, state), r"step must be .* with metrics in a dict, got \['dict', 'Still"),
        (
            lambda state, metrics: (state, {"loss": metrics}),
            "metrics must be a flat dict of arrays of real numbers, got 'loss'",
        ),
        (
            lambda state, metrics: (state, {"bytes_up": metrics["loss"]}),
            r"no 'loss', .* of each client: \['bytes_up'\]",
        ),
        (
            lambda state, metrics: (state, metrics | {"loss": metrics["loss"].mean()}),
            r"loss must be of shape \[7\], a training loss for each client, got \[\]",
        ),
        (
            lambda state, metrics: (state._replace(cluster=state.cluster.astype(jnp.float32)), metrics),
            r"keeps shapes and types of the state, got .\.cluster is float32 \[7\], not int32 \[7\]",
        ),
        (
            lambda state, metrics: (state, metrics | {"bytes_up": metrics["loss"]}),
            r"the metric bytes_up must be of shape \[\], as records have its sum over rounds, got \[7\]",
        ),
        (
            lambda state, metrics: (state, metrics | {"own": jax.random.key(0)}),
            "dict of arrays of real numbers, got 'own",
        ),
        (
            lambda state, metrics: (state, metrics | {"time": jnp.int32(0)}),
            "metrics must be other names: .* got 'time'",
        ),
        (
            lambda state, metrics: (state._replace(cluster=state.cluster + 2), metrics),
            r"served must be in 0\.\.1, rows",
        ),
        (
            lambda state, metrics: (state._replace(cluster=state.cluster - 2), metrics),
            r"served must be in 0\.\.1, rows",
        ),
    ],
)
def test_a_step_that_breaks_its_contract_is_refused(change, words):
    def step(key, state, clients):
        return change(*STILL.step(key, state, clients))

    with pytest.raises(ValueError, match=words):
        sim(algorithm=Algorithm(STILL.init, step, TASK), num_rounds=1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda state: Bare(state.params),
            "state without the fields params and cluster needs .*serve.*; Bare has params",
        ),
        (
            lambda state: state._replace(cluster=state.cluster[:3]),
            r"served .* must be int32 \[7\], float32 \[7, 2\], or None",
        ),
        (
            lambda state: state._replace(cluster=state.cluster.astype(jnp.float32)),
            r"served .* must be int32 \[7\], .*, got .float32",
        ),
        (
            lambda state: state._replace(params={"a": jnp.zeros(2), "b": jnp.zeros(3)}),
            r"served models must be arrays \[K, ...",
        ),
    ],
)
def test_an_init_that_breaks_its_contract_is_refused(change, words):
    init = lambda key, clients: change(STILL.init(key, clients))  # noqa: E731
    with pytest.raises(ValueError, match=words):
        sim(algorithm=Algorithm(init, STILL.step, TASK))


class Other(NamedTuple):
    nets: dict
    chosen: jax.Array
    round: jax.Array


def test_a_state_has_any_fields_where_a_method_says_what_it_serves():
    def init(key, clients):
        return Other(*STILL.init(key, clients))

    def step(key, state, clients):
        new, metrics = STILL.step(key, Still(*state), clients)
        return Other(*new), metrics

    def serve(state, clients):
        return Served(state.nets, state.chosen)

    assert sim(algorithm=Algorithm(init, step, TASK, serve=serve)).records == sim(algorithm=STILL).records


@pytest.mark.parametrize("part", ["found", "excluded"])
def test_clusters_and_rounds_that_are_served_are_integers(part):
    def serve(state, clients):
        return Served(state.params, state.cluster, **{part: state.cluster > 0})

    with pytest.raises(ValueError, match=rf"served {part} must be int32 \[7\], or None, got 'bool \[7\]'"):
        sim(algorithm=STILL._replace(serve=serve))


@pytest.mark.parametrize("part", ["test_clients", "newcomers"])
def test_an_algorithm_without_its_task_evaluates_nothing(part):
    """The results would be missing without a word."""
    without = STILL._replace(task=None)
    sim(algorithm=without, num_rounds=1, test_clients=None)
    with pytest.raises(ValueError, match=rf"Algorithm\(init, step, task\), to evaluate {part}"):
        sim(algorithm=without, **({"test_clients": None} | {part: CLIENTS}))


def test_folders_are_never_overwritten(tmp_path):
    sim(out=tmp_path, config={"lr": 0.1}, algorithm=STILL)
    before = (tmp_path / "metrics.jsonl").read_text()
    with pytest.raises(ValueError, match="already holds a run: resume it"):
        sim(out=tmp_path, config={"lr": 0.1}, algorithm=None)  # before anything is traced
    with pytest.raises(ValueError, match=r"another configuration \(lr: it has 0.1, asked for 0.2\)"):
        sim(out=tmp_path, config={"lr": 0.2}, resume=True, algorithm=STILL)
    with pytest.raises(ValueError, match="of another model or number of clients"):
        sim(out=tmp_path, config={"lr": 0.1}, resume=True, algorithm=FEDAVG)
    with pytest.raises(ValueError, match="at least the 6 rounds already done"):
        sim(out=tmp_path, config={"lr": 0.1}, resume=True, num_rounds=5, algorithm=STILL)
    assert (tmp_path / "metrics.jsonl").read_text() == before
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match=r"holds metrics.jsonl, .*, checkpoints already"):
        sim(out=tmp_path, config={"lr": 0.1}, resume=True, algorithm=STILL)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"sums": "twos"}, r"sums and largest of Entries must be tuples of names, .* got 'twos'"),
        ({"sums": ("pair",)}, r"the metric pair must be of shape \[\], .* got \[2\]"),
        ({"largest": ("half",)}, "the metric half must be of integers, .* got 'float32'"),
    ],
)
def test_entries_that_records_cannot_hold_are_refused(entries, words):
    def step(key, state, clients):
        new, metrics = STILL.step(key, state, clients)
        return new, metrics | {"twos": jnp.int32(2), "pair": jnp.ones(2), "half": jnp.float32(0.5)}

    with pytest.raises(ValueError, match=words):
        sim(algorithm=Algorithm(STILL.init, step, TASK, entries=jfcl.Entries(**entries)))


def test_a_method_says_what_records_hold_and_why_it_ends():
    def notes(record, is_last):
        return {"last": "the end"} if is_last else {"far": "far"} if record.pop("far") >= 4 else None

    def step(key, state, clients):
        new, metrics = STILL.step(key, state, clients)
        own = {"twos": jnp.int32(2), "far": new.round % 7, "below": new.round - 50, "ended": new.round >= 7}
        return new, metrics | own

    entries = jfcl.Entries(sums=("twos",), largest=("far", "below"), ended="seven are enough", notes=notes)
    with pytest.warns(UserWarning) as caught:
        history = sim(algorithm=Algorithm(STILL.init, step, TASK, entries=entries), num_rounds=20, eval_every=3)
    said = [str(w.message) for w in caught]
    assert said == ["round 6, seed 0: far", "round 9, seed 0: the end"]
    assert [(r["round"], r["twos"], r["far"]) for r in history.records] == [(3, 6.0, 3), (6, 12.0, 6), (9, 18.0, 2)]
    assert (history.rounds, history.ended, history.records[-1]["below"]) == (9, "seven are enough", -41)


def test_a_resumed_run_goes_on_until_all_seeds_have_ended(tmp_path):
    drawn = still(TASK, lambda key: {"w": jnp.zeros((1, 4)), "b": jax.random.normal(key, (1,))})

    def step(*args):
        state, metrics = drawn.step(*args)
        return state, metrics | {"ended": state.params["b"][0] > 0.5}  # of some seeds

    options = {"algorithm": drawn._replace(step=step), "key": KEYS, "num_rounds": 2, "out": tmp_path / "run"}
    first = sim(**options, stop_after=1)
    assert {row["ended"] for row in first.records} == {True, False}
    assert sim(**options, resume=True).rounds == 2


def test_a_function_is_no_algorithm():
    with pytest.raises(ValueError, match="algorithm must be an Algorithm, or with hyperparams a function of them that"):
        sim(algorithm=jfcl.ifca)
    with pytest.raises(ValueError, match=r"algorithm must be an Algorithm, or with hyperparams a .* got 'Algorithm'"):
        sim(hyperparams={"lr": 0.1})
    with pytest.raises(ValueError, match=r"hyperparams\['lr'\] must be a number"):
        sim(algorithm=lambda lr: IFCA, hyperparams={"lr": "fast"})
    with pytest.raises(ValueError, match=r"num_clusters cannot be one of hyperparams"):
        sim(algorithm=lambda k: jfcl.ifca(TASK, TRAINING, num_clusters=k), hyperparams={"k": 2})


def test_a_configuration_may_hold_what_json_spells_otherwise(tmp_path):
    with pytest.raises(ValueError, match="config must hold names, numbers, texts, lists and dicts, as JSON does"):
        sim(out=tmp_path, config={"folder": tmp_path})
    assert not list(tmp_path.iterdir())
    config = {"num_rounds": 9, "sizes": {10: (1, 2), 9: np.float32(0.5)}}
    sim(out=tmp_path, config=config, num_rounds=1)
    assert json.loads((tmp_path / "config.json").read_text())["num_rounds"] == 1  # that of the run
    assert sim(out=tmp_path, config=config, num_rounds=2, resume=True).rounds == 2


@pytest.mark.parametrize("key", [0, jax.random.PRNGKey(0), "key"])
def test_keys_are_those_of_jax_random_key(key):
    with pytest.raises(ValueError, match="key must be a key of"):
        sim(key=key)


def test_labels_that_the_model_does_not_know_are_refused_before_anything_is_written(tmp_path):
    task = jfcl.models.classification(jfcl.models.Linear(3), (4,), 3)
    algorithm = jfcl.fedavg(task, TRAINING)
    x = np.zeros((2, 3, 4), np.float32)
    for y, words in [
        (np.full((2, 3), 3), "labels must lie in 0..2, got 3"),
        (np.ones((2, 3)), "of an integer type, as y.astype"),
        (np.ones((2, 3, 3)), "of an integer type, as y.argmax"),
        (np.ones((2, 3, 3), int), "one label for each vector of logits .* .y.argmax.-1. of one-hot rows., got"),
    ]:
        clients = jfcl.Clients({"x": x, "y": y}, np.full(2, 3))
        with pytest.raises(ValueError, match=words):
            jfcl.simulate(algorithm, clients, key=jax.random.key(0), num_rounds=1, out=tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_what_is_compiled_within_something_else_is_counted_once(monkeypatch):
    from jfcl.simulation import progress as watch

    now = [0.0]
    monkeypatch.setattr(watch.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(watch, "_compiled", watch._Compiled())
    for end, duration in [(2, 1), (3, 0.5), (4, 3.5), (6, 1), (7, 4)]:  # the last reaches into the one before it
        now[0] = end
        watch.note_compilation("/jax/core/compile/x", duration)
    assert watch.compile_seconds() == 6.5  # from 0.5 to 7


def test_a_thread_counts_what_it_compiles_itself():
    from jfcl.simulation import progress as watch

    opened, compiled, found = threading.Event(), threading.Event(), []

    def idle():
        found.append(watch.compile_seconds())
        opened.set()
        compiled.wait(60)
        found.append(watch.compile_seconds())

    thread = threading.Thread(target=idle)
    thread.start()
    assert opened.wait(60)
    before = watch.compile_seconds()
    jax.jit(lambda x: x + 1)(np.float32(1)).block_until_ready()
    assert watch.compile_seconds() > before
    compiled.set()
    thread.join()
    assert found == [0.0, 0.0]


@pytest.mark.slow
def test_cleared_programs_are_compiled_again():
    first = sim(num_rounds=1)
    jfcl.clear_programs()
    with count_compilations() as compiled:
        second = sim(num_rounds=1)
    assert compiled.count >= 3 and equal(first.state, second.state)  # init, rounds, evaluation


def test_programs_are_dropped_before_linux_allows_no_more(monkeypatch, tmp_path):
    sim(num_rounds=1)
    monkeypatch.setattr(jitted, "MOST_MAPS", tmp_path / "most")
    for text, has_room in (("1000000", True), ("no number", True), ("100", False)):
        jitted.MOST_MAPS.write_text(text)
        with count_compilations() as compiled:
            sim(num_rounds=1)
        assert (compiled.count == 0) == has_room


@pytest.mark.slow_cases("sharded")
@pytest.mark.parametrize("axis", [jfcl.chunked(1), jfcl.sharded(jfcl.client_mesh(2))], ids=["chunked", "sharded"])
def test_a_program_is_compiled_once_and_ahead(axis):
    """The programs of a run are compiled side by side before they are called, and never again."""
    compiled = []

    def note(event, duration, fun_name="", **_):
        if event.endswith("backend_compile_duration") and fun_name.startswith("jit("):
            compiled.append((fun_name, threading.current_thread().name.split("_")[0]))

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        jfcl.clear_programs()
        for _ in range(2):
            sim(algorithm=STILL, num_rounds=3, client_axis=axis, test_clients=CLIENTS)
        ours = [row for row in compiled if row[0] in ("jit(_init)", "jit(_advance)", "jit(evaluate_rows)")]
        assert sorted(ours) == [
            ("jit(_advance)", "compile"),
            ("jit(_init)", "MainThread"),
            ("jit(evaluate_rows)", "compile"),
        ]
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


def test_programs_for_tpus_with_sparse_cores_are_compiled_one_after_another(monkeypatch):
    """Two at a time may end the process: CFL's candidates for `jfcl plan --target v6e:2x2` did in four of five runs."""
    kinds = [("cpu", "cpu"), ("tpu", "TPU v5 lite"), ("tpu", "TPU v6 lite")]
    devices = [types.SimpleNamespace(platform=platform, device_kind=kind) for platform, kind in kinds]
    assert [*map(compiles_alone, devices)] == [False, False, True]
    monkeypatch.setattr(progress, "default_device", lambda: devices[-1])
    progress.compile_ahead([object()])()  # which has no `compile`


def test_a_hint_of_idle_cores(monkeypatch):
    monkeypatch.setattr(progress.mapping, "idle_cores", lambda: 1)
    monkeypatch.setattr(progress, "LONG_SECONDS", -1.0)
    with pytest.warns(UserWarning, match="client_axis=jfcl.use_all_cores"):
        sim(algorithm=STILL, num_rounds=1, client_axis=jfcl.chunked(1))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_random_keys_of_a_state_are_restored(impl, tmp_path):
    state = {"key": jax.random.key(3, impl=impl), "keys": jax.random.split(jax.random.key(4, impl=impl), 2)}
    written = write_leaves(tmp_path / "state.bin", state)
    found = read_leaves(tmp_path / "state.bin", written, jax.eval_shape(lambda: state))
    for name, key in state.items():
        assert found[name].dtype == key.dtype and (found[name] == key).all()


def test_a_state_may_hold_random_keys(tmp_path):
    class Keyed(NamedTuple):
        params: object
        cluster: object
        key: object

    def init(key, clients):
        return Keyed(*STILL.init(key, clients)[:2], key)

    def step(key, state, clients):
        return state, STILL.step(key, STILL.init(key, clients), clients)[1]

    algorithm = Algorithm(init, step, TASK)
    run = partial(sim, algorithm=algorithm, client_axis=jfcl.sharded(jfcl.client_mesh(2)))
    first = run(out=tmp_path)
    for state in (run(state=first.state).state, run(out=tmp_path, resume=True).state):
        assert jnp.array_equal(jax.random.key_data(state.key), jax.random.key_data(first.state.key))


def test_a_federation_brings_its_tests_and_its_clusters():
    fed = jfcl.data.Federation(CLIENTS, CLIENTS, CLUSTER, 2, None, (4,), "", "", newcomers=CLIENTS)
    run = partial(jfcl.simulate, FEDAVG, key=KEY, num_rounds=1)
    whole = run(fed.train, test_clients=fed.test, newcomers=fed.newcomers, true_cluster=fed.cluster)
    assert run(fed).records == whole.records and "newcomer_loss" in whole.records[-1]
    darker = fed.test._replace(examples=fed.test.examples | {"x": fed.test.examples["x"] / 2})
    parts = {"test_clients": darker, "true_cluster": np.int32([0, 0, -1, 1, 0, 1, 1])}
    other = run(fed, **parts)
    assert other.records == run(fed.train, newcomers=fed.newcomers, **parts).records != whole.records
