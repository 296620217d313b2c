"""Two real processes on this machine: the same command in each, the results of one."""

import csv
import json
import os
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import jfcl
from jfcl import cli, hosts, mapping
from jfcl.mapping import axis as axis_module
from jfcl.mapping.memory import out_of_memory
from jfcl.methods import METHODS
from jfcl.testing import problem

METHOD = ["run", "ifca", "--clients", "9", "--clusters", "2", "--local-steps", "2", "--eval-every", "1", "--quiet"]
METHOD += ["--restarts", "1"]  # no rounds to find a start, so that records begin with round 1


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def start(folder, common, num_processes=2, options=([], [], []), method=METHOD):
    """The processes of one run, those whose `options` are not None; `folder` gets `out/` and `log-<process>`."""
    env = os.environ | {"JFCL_CACHE_DIR": ""}
    where = ["--coordinator", f"localhost:{free_port()}", "--num-processes", str(num_processes), "--devices", "1"]
    processes = []
    for i in [i for i in range(num_processes) if options[i] is not None]:
        command = [sys.executable, "-m", "jfcl", *method, *common, *where, "--process-id", str(i), "--out", "out"]
        command += options[i]
        with (folder / f"log-{i}").open("w") as log:
            processes.append(subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=env))
    return processes


def stop(processes):
    for p in processes:
        p.kill()
        p.wait()


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_two_processes_and_one_that_is_lost(tmp_path, capsys):
    """They find what one process finds; one is killed, the other says so; two go on, and then one alone."""
    processes = start(tmp_path, ["--rounds", "100000", "--checkpoint-seconds", "0"])
    lines = tmp_path / "out" / "metrics.jsonl"
    try:
        deadline = time.monotonic() + 240
        while not (lines.exists() and len(lines.read_text().splitlines()) >= 4):
            assert time.monotonic() < deadline and all(p.poll() is None for p in processes), (
                tmp_path / "log-0"
            ).read_text()
            time.sleep(0.1)
        processes[1].send_signal(signal.SIGKILL)
        assert processes[0].wait(timeout=100) == 1
    finally:
        stop(processes)
    said = (tmp_path / "log-0").read_text()
    assert "another process was lost; continue with --resume" in said and "Traceback" not in said
    rounds = str(len(records(tmp_path / "out")) + 2)
    processes = start(tmp_path, ["--rounds", str(int(rounds) - 1), "--resume"])
    assert [p.wait(timeout=240) for p in processes] == [0, 0], (tmp_path / "log-0").read_text()
    devices = ["--devices", "1", "--rounds", rounds]
    assert cli.main([*METHOD, *devices, "--out", str(tmp_path / "out"), "--resume"]) == 0
    assert cli.main([*METHOD, *devices, "--out", str(tmp_path / "alone")]) == 0
    ours, alone = records(tmp_path / "out"), records(tmp_path / "alone")
    assert [r["round"] for r in ours] == list(range(1, int(rounds) + 1))
    for a, b in zip(ours, alone, strict=True):
        np.testing.assert_allclose(a["loss"], b["loss"], rtol=1e-4)
        assert a["cluster"] == b["cluster"] and a["bytes_up"] == b["bytes_up"]


OF_TWO = """
import sys
from typing import Any, NamedTuple
import jax
jax.config.update("jax_num_cpu_devices", 1)
from jfcl import hosts
hosts.connect(sys.argv[1], 2, int(sys.argv[2]))
import jfcl
from jfcl.testing import problem
clients, cluster, task, training = problem()
axis = jfcl.sharded(jfcl.client_mesh())
mine = jax.tree.map(lambda x: x[jfcl.mapping.own_rows(axis, len(cluster))], clients)
ifca = jfcl.ifca(task, training, num_clusters=2, client_axis=axis)

class Keyed(NamedTuple):
    inner: Any
    keys: Any

def init(key, clients):
    return Keyed(ifca.init(key, clients), jax.random.split(key, len(clients.size)))

def step(key, state, clients):
    inner, metrics = ifca.step(key, state.inner, clients)
    return state._replace(inner=inner), metrics

algorithm = ifca._replace(init=init, step=step, serve=lambda state, clients: ifca.serve(state.inner, clients))
options = {"key": jax.random.key(0), "num_rounds": 2, "client_axis": axis}
half = jfcl.simulate(algorithm, mine, out="out", stop_after=1, **options)
jfcl.simulate(algorithm, mine, out="out", resume=True, **options)
jfcl.simulate(algorithm, mine, state=half.state, **options)
"""


def test_two_processes_find_what_one_finds(tmp_path):
    """Also where the state holds random keys, the run is resumed, and another one begins with its state."""
    where = f"localhost:{free_port()}"
    processes = [subprocess.Popen([sys.executable, "-c", OF_TWO, where, str(i)], cwd=tmp_path) for i in range(2)]
    try:
        assert [p.wait(timeout=240) for p in processes] == [0, 0]
    finally:
        stop(processes)
    clients, _, task, training = problem()
    algorithm, options = jfcl.ifca(task, training, num_clusters=2), {"key": jax.random.key(0), "num_rounds": 2}
    alone = jfcl.simulate(algorithm, clients, **options).records
    two = records(tmp_path / "out")
    assert [r["round"] for r in two] == [1, 2]
    for a, b in zip(two, alone, strict=True):
        np.testing.assert_allclose(a["train_loss"], b["train_loss"], rtol=1e-4)
        assert a["cluster"] == b["cluster"] and a["bytes_up"] == b["bytes_up"]


@pytest.mark.slow
def test_two_processes_leave_the_results_of_all_clients(tmp_path):
    data = ["--dataset", "sine", "--heterogeneity", "sine", "--examples-per-client", "20"]
    processes = start(tmp_path, ["--rounds", "2", "--model", "linear", "--restarts", "1", *data])
    try:
        assert [p.wait(timeout=240) for p in processes] == [0, 0], (tmp_path / "log-0").read_text()
    finally:
        stop(processes)
    assert "2 devices of 1 host (2 x cpu), 2 processes" in (tmp_path / "log-0").read_text()
    with (tmp_path / "out" / "clients.csv").open() as f:
        rows = list(csv.DictReader(f))
    last = records(tmp_path / "out")[-1]
    assert [int(row["client"]) for row in rows] == list(range(9))
    assert [int(row["cluster"]) for row in rows] == last["cluster"]
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["num_clients"] == 9


EVERY_METHOD = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 1)
from jfcl import hosts
if len(sys.argv) > 2:
    hosts.connect(sys.argv[2], 2, int(sys.argv[3]))
from jfcl.methods import METHODS
from jfcl.experiments import Config, run
more = {"cfl": {"eps_1": 1e9, "eps_2": 1e-9, "gamma_max": 0.0}, "federated_clustering": {"quantile": 0.5}}
for method in sorted({*METHODS} - {"fedbn", "feddrift"}):  # for batch normalisation, for drift; all in one order
    own = more.get(method, {"model": "mlp"} if method in ("fedper", "fedrep", "lg_fedavg") else {})
    few = {"clients": 9, "clusters": 2, "rounds": 3, "batch_size": 30, "eval_every": 1, "model": "linear"}
    config = Config(method, **few | own)
    run(config, out=f"{sys.argv[1]}/{method}")
"""


@pytest.mark.slow
def test_two_processes_find_what_one_finds_by_every_method(tmp_path):
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"JFCL_CACHE_DIR": ""}
    where = f"localhost:{free_port()}"
    processes = [
        subprocess.Popen([sys.executable, "-c", EVERY_METHOD, *arguments], cwd=tmp_path, env=env)
        for arguments in (["two", where, "0"], ["two", where, "1"], ["one"])
    ]
    try:
        assert [p.wait(timeout=1500) for p in processes] == [0, 0, 0]
    finally:
        stop(processes)
    for method in sorted({*METHODS} - {"fedbn", "feddrift"}):
        two, one = records(tmp_path / "two" / method), records(tmp_path / "one" / method)
        assert [r["round"] for r in two] == [r["round"] for r in one] and len(one) == 3
        for a, b in zip(two, one, strict=True):
            assert a.keys() == b.keys()
            assert a.get("cluster") == b.get("cluster"), method
            for name in ("loss", "client_accuracy", "accuracy", "bytes_up", "bytes_down", "client_steps"):
                given = [[np.nan if v is None else v for v in np.ravel(r.get(name, 0.0))] for r in (a, b)]
                np.testing.assert_allclose(*np.array(given, float), rtol=2e-3, atol=1e-3, err_msg=f"{method}: {name}")


@pytest.mark.slow
def test_two_processes_follow_drift(tmp_path):
    """They find what one process finds at every step of time, although one is killed on the way."""
    command = ["run", "feddrift", "--dataset", "sine", "--drift", "Y", "--drift-threshold", "0.2", "--quiet"]
    command += ["--clients", "11", "--examples-per-client", "100", "--model", "linear", "--lr", "0.5"]
    command += ["--clusters", "2", "--rounds", "20", "--eval-every", "1"]
    assert cli.main([*command, "--devices", "1", "--out", str(tmp_path / "alone")]) == 0
    processes, lines = start(tmp_path, ["--checkpoint-seconds", "0"], method=command), tmp_path / "out/metrics.jsonl"
    try:
        deadline = time.monotonic() + 240
        while not (lines.exists() and len(lines.read_text().splitlines()) >= 5) and processes[1].poll() is None:
            assert time.monotonic() < deadline, (tmp_path / "log-0").read_text()
            time.sleep(0.1)
        processes[1].send_signal(signal.SIGKILL)
        for p in processes:
            p.wait(timeout=100)
        processes = start(tmp_path, ["--resume"], method=command)
        assert [p.wait(timeout=600) for p in processes] == [0, 0], (tmp_path / "log-0").read_text()
    finally:
        stop(processes)
    two, one = records(tmp_path / "out"), records(tmp_path / "alone")
    assert [r["step"] for r in two] == [r["step"] for r in one] == np.repeat(np.arange(10), 2).tolist()
    for a, b in zip(two, one, strict=True):
        assert a.keys() == b.keys() and a["cluster"] == b["cluster"] and a["changed"] == b["changed"]
        for name in ("loss", "accuracy", "next_accuracy", "next_stable_accuracy", "bytes_up", "bytes_down"):
            given = [np.nan if r[name] is None else r[name] for r in (a, b)]
            np.testing.assert_allclose(*given, rtol=2e-3, atol=1e-3, err_msg=name)


CALLBACKS = """
import json, sys
import jax
jax.config.update("jax_num_cpu_devices", 1)
from jfcl import hosts
hosts.connect(sys.argv[1], 2, int(sys.argv[2]))
from jfcl.experiments import Config, run
from jfcl.simulation.callbacks import CallbackError

class Calls:
    def __init__(self, fails):
        self.calls, self.fails = [], fails
    def on_start(self, run):
        self.calls.append("start")
    def on_records(self, records):
        self.calls.append(records[0]["round"])
        if self.fails:
            raise OSError("no network")
        return "enough" if records[0]["round"] == 2 else None
    def on_end(self, end):
        self.calls.append(end.status)

config, found = Config("fedavg", clients=9, clusters=2, rounds=9, eval_every=1), []
for fails in (False, True):
    calls = Calls(fails)
    try:
        history = run(config, out=f"out-{fails}", callbacks=[calls])[1]
        found.append([history.rounds, history.ended, calls.calls])
    except CallbackError as error:
        found.append([str(error), calls.calls])
open(f"found-{sys.argv[2]}", "w").write(json.dumps(found))
"""


@pytest.mark.slow
def test_the_first_process_calls_the_callbacks_and_all_stop(tmp_path):
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"JFCL_CACHE_DIR": ""}
    where = f"localhost:{free_port()}"
    processes = [
        subprocess.Popen([sys.executable, "-c", CALLBACKS, where, str(i)], cwd=tmp_path, env=env) for i in range(2)
    ]
    try:
        assert [p.wait(timeout=240) for p in processes] == [0, 0]
    finally:
        stop(processes)
    first, second = (json.loads((tmp_path / f"found-{i}").read_text()) for i in range(2))
    error = "callback Calls.on_records raised OSError: no network, after round 1; out-True is saved up to there"
    assert first[0] == [2, "enough", ["start", 1, 2, "stopped"]] and second[0] == [2, "enough", []]
    assert first[1][0] == second[1][0] and first[1][0].startswith(error)
    assert first[1][1] == ["start", 1, "failed"] and second[1][1] == []
    assert [p.name for p in (tmp_path / "out-True" / "checkpoints").iterdir()] == ["1"]


@pytest.fixture
def asked(monkeypatch):
    """What `jax.distributed.initialize` was asked for; it connects to nobody."""
    given = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **options: given.update(options, args=args))
    for name in os.environ:
        if name.startswith(("SLURM_", "OMPI_", "CUDA_VISIBLE", "ROCR_VISIBLE", "JAX_LOCAL")):
            monkeypatch.delenv(name)
    return given


def test_what_does_not_come_is_said_in_time(monkeypatch):
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: time.sleep(60))
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"waited 0\.3 seconds at localhost:9 in vain: not all of the 2 processes"):
        hosts.connect("localhost:9", 2, 1, timeout=0.3)
    assert time.monotonic() - began < 10


def test_what_jax_refuses_is_said():
    with pytest.raises(ValueError, match=r"^coordinator: jax\.distributed\.initialize\(\) must be called before any"):
        hosts.connect("localhost:9", 2, 1)  # this process has devices already


@pytest.mark.parametrize("host", ["nowhere.invalid", "a" * 80, "256.1.1.1", "[::1::2]"])
def test_a_host_that_is_not_known(host, asked):
    with pytest.raises(ValueError, match=r"the host .* is not known on this machine .* the machine of process 0"):
        hosts.connect(f"{host}:1234", 2, 0)
    assert not asked


@pytest.mark.parametrize(
    ("host", "bound"),
    [("127.0.0.1", "127.0.0.1"), ("localhost", "localhost"), ("192.0.2.7", None), ("host0", None)],
)
def test_the_coordinator_listens_where_it_was_told(host, bound, asked, monkeypatch):
    """192.0.2.7 is of no machine: it may be that of a router in front of this one."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [])
    port = free_port()
    for process_id in (0, 1):
        hosts.connect(f"{host}:{port}", 2, process_id)
        wanted = bound and f"{bound}:{port}" if process_id == 0 else None
        assert asked.pop("coordinator_bind_address", None) == wanted


# Slurm: the GPUs of a process, by the variables of its task, as (what is set, the tasks' GPUs). A task sees what
# CUDA_VISIBLE_DEVICES names, and the numbers are of those.
EIGHT, EACH = ",".join(map(str, range(8))), [[i] for i in range(8)]
STEPS = {
    "one task a machine, of two": ({"STEP_TASKS_PER_NODE": "1(x2)", "GPUS_ON_NODE": "8"}, EIGHT, [None]),
    "outside of a step, in a batch file": ({"NTASKS_PER_NODE": "8"}, EIGHT, [None]),
    "of another number in the batch file": ({"STEP_TASKS_PER_NODE": "1(x2)", "NTASKS_PER_NODE": "8"}, EIGHT, [None]),
    "no GPU is masked": ({"STEP_TASKS_PER_NODE": "1(x2)"}, None, [None]),
    "a task a GPU, all visible": ({"STEP_TASKS_PER_NODE": "8(x2)", "GPUS_ON_NODE": "8"}, EIGHT, EACH),
    "a task a GPU, each sees its own": ({"STEP_TASKS_PER_NODE": "8", "GPUS_PER_TASK": "1"}, "0", [None] * 8),
    "each sees its own, by --gpu-bind": ({"STEP_TASKS_PER_NODE": "8", "GPUS_ON_NODE": "8"}, "5", [None] * 8),
    "each sees its own, of one model": ({"STEP_TASKS_PER_NODE": "4", "GPUS_PER_TASK": "a100:2"}, "0,1", [None] * 4),
    "two GPUs a task, all visible": ({"STEP_TASKS_PER_NODE": "4"}, EIGHT, [[0, 1], [2, 3], [4, 5], [6, 7]]),
    "on the second machine": ({"STEP_TASKS_PER_NODE": "1,2(x3)", "NODEID": "1"}, "0,1", [[0], [1]]),
    "parts of a GPU": ({"STEP_TASKS_PER_NODE": "2"}, "MIG-a,MIG-b", [[0], [1]]),
    "no mask, but a number": ({"STEP_TASKS_PER_NODE": "2", "GPUS_ON_NODE": "4"}, None, [[0, 1], [2, 3]]),
    "nothing known": ({"STEP_TASKS_PER_NODE": "2"}, None, [[0], [1]]),
    "CPUs": ({"STEP_TASKS_PER_NODE": "2"}, "NoDevFiles", [None, None]),
}


def slurm(monkeypatch, said, visible=None, process=0):
    """The variables of task `process` on its machine."""
    base = {"JOB_ID": "7", "STEP_NODELIST": "a,b", "NTASKS": "16", "PROCID": process, "LOCALID": process}
    for name, value in (base | said).items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


@pytest.mark.parametrize("step", STEPS)
def test_slurm_gives_each_task_its_gpus(step, monkeypatch, asked):
    said, visible, wanted = STEPS[step]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [])
    found = []
    for process in range(len(wanted)):
        slurm(monkeypatch, said, visible, process)
        hosts.connect("auto")
        found.append(asked["local_device_ids"])
        assert asked["args"][1:] == (int(os.environ["SLURM_NTASKS"]), process)
        assert asked["cluster_detection_method"] == "deactivate"  # or jax would choose the GPUs after all
    assert found == wanted


def test_slurm_where_tasks_cannot_share_gpus(monkeypatch, asked):
    for tasks, gpus in (("3", EIGHT), ("8", "0,1,2,3")):
        slurm(monkeypatch, {"STEP_TASKS_PER_NODE": tasks, "GPUS_ON_NODE": str(gpus.count(",") + 1)}, gpus)
        with pytest.raises(ValueError, match=rf"the {tasks} tasks of this machine cannot share its .* GPUs equally"):
            hosts.connect("localhost:1234", 2, 0)
    assert not asked


def test_open_mpi_gives_each_task_its_gpus(monkeypatch, asked):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", EIGHT)
    for rank, size, wanted in ((0, 1, None), (1, 2, [4, 5, 6, 7])):
        monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", str(rank))
        monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", str(size))
        hosts.connect("localhost:1234", 2, rank)
        assert asked["local_device_ids"] == wanted


@pytest.mark.slow_cases("options", "only the second")
@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ([], ["--clients", "8", "--resume"], "every process must be given the same"),
        (["--connect-seconds", "1"], None, "process 0 waited 1 seconds"),
        (None, ["--connect-seconds", "1"], "process 1 waited 1 seconds"),
    ],
    ids=["options", "only the first", "only the second"],
)
def test_processes_that_do_not_fit(first, second, said, tmp_path):
    processes = start(tmp_path, [], options=(first, second))
    try:
        assert [p.wait(timeout=100) for p in processes] == [2] * len(processes)
    finally:
        stop(processes)
    for log in tmp_path.glob("log-*"):
        assert said in log.read_text() and "stack trace" not in log.read_text()


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "host0"])
def test_a_port_that_is_taken(name, asked, monkeypatch):
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setattr(hosts.socket, "getaddrinfo", lambda *_, **__: [])
        with pytest.raises(ValueError, match=rf"port {port} cannot be used here .*another process 0, use it\?"):
            hosts.connect(f"{name}:{port}", 2, 0)
        assert not asked
        hosts.connect(f"{name}:{port}", 2, 1)


@pytest.mark.slow
def test_what_the_first_process_refuses_all_refuse(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    processes = start(tmp_path, ["--rounds", "1"])
    try:
        assert [p.wait(timeout=100) for p in processes] == [2, 2]
    finally:
        stop(processes)
    for i in range(2):
        said = (tmp_path / f"log-{i}").read_text()
        assert "already holds a run" in said and "stack trace" not in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("localhost:99999", 2, 1), "coordinator must be of a port from 1 to 65535"),
        (("nowhere", 2, 0), 'coordinator must be like "host:port"'),
        (("localhost:1", None, 0), "num_processes must be an integer, at least 1"),
        (("localhost:1", 2, 2), r"process_id must be in 0..1, got 2"),
        (("localhost:1", 2, None), r"process_id must be in 0..1, got None"),
    ],
)
def test_refuses(arguments, said):
    with pytest.raises(ValueError, match=said):
        hosts.connect(*arguments)


def test_a_process_without_a_coordinator_is_refused(capsys):
    assert cli.main([*METHOD, "--num-processes", "2"]) == 2
    assert "coordinator must be given with --num-processes" in capsys.readouterr().err


class Device:
    platform = "cpu"

    def __init__(self, process_index):
        self.process_index = process_index


class Fake(Device):
    def __init__(self, process_index, id):
        super().__init__(process_index)
        self.id = id


class Mesh:
    """Of three processes with two devices each."""

    devices = np.array([Device(i // 2) for i in range(6)])
    size = 6


@pytest.mark.parametrize("count", [3, 4, 6, 8, 9, 11, 12, 40])
def test_processes_divide_the_clients(monkeypatch, count):
    monkeypatch.setattr(axis_module.jax, "process_count", lambda: 3)
    axis = mapping.sharded(Mesh())
    rows = []
    for process in range(3):
        monkeypatch.setattr(axis_module.jax, "process_index", lambda process=process: process)
        own = mapping.own_rows(axis, count)
        assert own.stop - own.start <= mapping.num_rows(axis, count) // 3
        rows += range(own.start, own.stop)
    assert rows == list(range(count))


def test_a_mesh_in_which_processes_alternate(monkeypatch):
    monkeypatch.setattr(axis_module.jax, "process_count", lambda: 3)
    monkeypatch.setattr(axis_module.jax, "process_index", lambda: 1)
    monkeypatch.setattr(Mesh, "devices", np.array([Device(i % 3) for i in range(6)]))
    with pytest.raises(ValueError, match="devices of a process next to each other"):
        mapping.own_rows(mapping.sharded(Mesh()), 12)


def test_the_devices_of_a_process_lie_next_to_each_other(monkeypatch):
    """As they do not in `jax.devices()` of some TPU slices, nor in what `jax.make_mesh` makes of them."""
    devices = jax.devices()
    mixed = [Fake(process, number) for number in range(2) for process in (1, 0, 2)]
    monkeypatch.setattr(axis_module.jax, "devices", lambda: mixed)
    monkeypatch.setattr(axis_module, "Mesh", lambda devices, *_, **__: devices)
    assert [d.process_index for d in mapping.client_mesh()] == [0, 0, 1, 1, 2, 2]
    assert [(d.process_index, d.id) for d in mapping.client_mesh(3)] == [(0, 0), (0, 1), (1, 0)]
    monkeypatch.undo()
    assert mapping.client_mesh().devices.tolist() == sorted(devices, key=lambda d: d.id)


@pytest.mark.parametrize("run", [cli.main, None], ids=["command line", "python"])
def test_more_processes_than_clients(monkeypatch, capsys, run):
    monkeypatch.setattr(axis_module.jax, "process_count", lambda: 20)
    if run:
        monkeypatch.setattr(hosts, "check_alike", lambda *_: None)
        assert run(METHOD) == 2
        said = capsys.readouterr().err
    else:
        clients, _, task, training = problem()
        monkeypatch.setattr(hosts, "total", lambda count: count)
        axis = mapping.sharded(mapping.client_mesh(1))
        with pytest.raises(ValueError) as raised:
            jfcl.simulate(jfcl.fedavg(task, training), clients, key=jax.random.key(0), num_rounds=1, client_axis=axis)
        said = str(raised.value)
    assert "clients must be at least one for each of the 20 processes" in said.replace("\n", " ")


@pytest.mark.slow
def test_a_process_without_a_client(tmp_path):
    """4 clients on 3 processes: 2, 2 and none; they find what one process finds."""
    options = ["--clients", "4", "--rounds", "2"]
    processes = start(tmp_path, options, 3)
    try:
        assert [p.wait(timeout=240) for p in processes] == [0, 0, 0], (tmp_path / "log-2").read_text()
    finally:
        stop(processes)
    assert cli.main([*METHOD, *options, "--devices", "1", "--out", str(tmp_path / "alone")]) == 0
    for a, b in zip(records(tmp_path / "out"), records(tmp_path / "alone"), strict=True):
        np.testing.assert_allclose(a["loss"], b["loss"], rtol=1e-4)
        assert a["cluster"] == b["cluster"] and len(a["cluster"]) == 4


def test_auto_where_nobody_knows(asked):
    with pytest.raises(ValueError, match="no cluster was detected here; under Slurm, start the program with srun"):
        hosts.connect("auto")


def test_own_memory_is_not_another_process(monkeypatch):
    monkeypatch.setattr(hosts, "connected", lambda: True)
    assert hosts.is_of_a_lost_process(jax.errors.JaxRuntimeError("UNAVAILABLE: peer closed"))
    assert hosts.is_of_a_lost_process(RuntimeError("Gloo all-reduce failed"))
    assert not hosts.is_of_a_lost_process(RuntimeError("a bug"))
    for kind in ("RESOURCE_EXHAUSTED", "INTERNAL: Error dispatching computation"):  # of one device, of several of a CPU
        error = jax.errors.JaxRuntimeError(f"{kind}: Out of memory allocating 8 bytes.")
        assert not hosts.is_of_a_lost_process(error)
        with pytest.raises(MemoryError, match=r"^Out of memory allocating 8 bytes; train fewer"), out_of_memory():
            raise error
