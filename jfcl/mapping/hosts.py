"""Several processes that run one simulation together, each with its own devices and its own clients.

The first process writes records, checkpoints and progress for all. `jax.distributed` connects the devices. In a program
of one process these functions return their arguments unchanged.
"""

import errno
import json
import os
import re
import socket
import sys
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jfcl.core import PyTree, check, check_count
from jfcl.core.parameters import is_key, key_data, with_keys
from jfcl.core.texts import first_line

MOST = 2**16  # processes of one run
TIMEOUT = 60  # seconds that a process waits for the others to connect, and for a lost one to answer
FOREVER = 10**6  # seconds


def connect(
    coordinator: str, num_processes: int | None = None, process_id: int | None = None, timeout: float = TIMEOUT
) -> None:
    """Connects the processes of one run; call it before any other function of JAX.

    A process has all GPUs that it sees. Where Slurm or Open MPI start several tasks on a machine, each has its own:
    those that Slurm bound to it, or an equal share.

    The service of process 0 listens at the address of `coordinator` if that is one of its own, as 127.0.0.1; given a
    name, on all interfaces, since a machine may know its own name by another address than others do. It does not
    authenticate who connects.

    Args:
      coordinator: `"host:port"` of the first process; or `"auto"` on Cloud TPU, Slurm and the other clusters that
        `jax.distributed.initialize` detects, without further arguments.
      num_processes: the number of processes.
      process_id: the number of this process, from 0.
      timeout: seconds to wait for the other processes.

    Raises:
      ValueError: numbers that do not fit; a host that does not resolve; a port in use; GPUs that the tasks of a machine
        cannot share equally; processes that do not connect in time. The program must then end.

    Example:
      >>> connect("host0:1234", num_processes=2, process_id=2)
      Traceback (most recent call last):
      ValueError: process_id must be in 0..1, got 2
    """
    check(0 < timeout < np.inf, "timeout", timeout, "a number of seconds above 0")
    if coordinator == "auto":
        coordinator, num_processes, process_id = _surroundings(timeout)
    host, _, port = coordinator.rpartition(":")
    check(bool(host) and port.isdigit(), "coordinator", coordinator, 'like "host:port", or "auto"')
    check_count("num_processes", num_processes, most=MOST)
    fits = process_id is not None and 0 <= process_id < num_processes
    check(fits, "process_id", process_id, f"in 0..{num_processes - 1}")
    check(0 < int(port) < 65536, "coordinator", coordinator, "of a port from 1 to 65535")
    try:
        socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = f"the host {host!r} is not known on this machine ({error})"
        raise ValueError(f"coordinator: {why}; give the name or the address of the machine of process 0") from None
    options = {"local_device_ids": _local_gpus(), "cluster_detection_method": "deactivate"}
    if process_id == 0:
        options["coordinator_bind_address"] = _bind_address(host, int(port))
    _initialize(coordinator, num_processes, process_id, timeout, options)


def _initialize(coordinator: str, count: int, process_id: int, timeout: float, options: dict[str, Any]) -> None:
    """Calls `jax.distributed.initialize`; raises `ValueError` if that fails, or takes longer than `timeout` seconds.

    It runs in a thread, which is then left behind: a client of jax that waits in vain ends its process by SIGABRT.
    """
    options = options | {"initialization_timeout": FOREVER, "heartbeat_timeout_seconds": TIMEOUT}
    connected = Future()

    def work():
        try:
            connected.set_result(jax.distributed.initialize(coordinator, count, process_id, **options))
        except Exception as error:
            connected.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    try:
        connected.result(timeout)
    except TimeoutError:
        what = f"process {process_id} waited {timeout:g} seconds at {coordinator} in vain: not all of the {count}"
        remedy = "start each with the same coordinator and num_processes, its own process_id, and access to that port"
        raise ValueError(f"coordinator: {what} processes connected; {remedy}") from None
    except Exception as error:
        raise ValueError(f"coordinator: {first_line(error)}") from None


def _surroundings(timeout: float) -> tuple[str, int, int]:
    """Returns `(coordinator, num_processes, process_id)` from Slurm, Cloud TPU, ...; `ValueError` outside of them.

    This is the detection of `jax.distributed.initialize`, which has no public name.
    """
    from jax._src.clusters import ClusterEnv

    try:
        place = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, timeout)[:3]
        why = "no cluster was detected here; under Slurm, start the program with srun"
    except Exception as error:  # of a query of the cluster
        place, why = (None,), f"the cluster did not answer ({first_line(error)})"
    accepted = f"given as host:port, with the number of processes and this one's: {why}"
    check(None not in place, "coordinator", "auto", accepted)
    return place


def _local_gpus() -> list[int] | None:
    """Returns which of the GPUs that this process sees are its own; None for all.

    Left alone, `jax.distributed.initialize` gives a task of Slurm or Open MPI the one GPU with the task's number on its
    machine: one of eight where a task has the machine to itself, and one that it does not see where each sees its own.
    """
    env = os.environ
    if "SLURM_LOCALID" in env:
        index, tasks = int(env["SLURM_LOCALID"]), _slurm_tasks()
    else:  # of Open MPI, or alone
        index, tasks = (int(env.get(f"OMPI_COMM_WORLD_LOCAL_{name}", n)) for name, n in (("RANK", 0), ("SIZE", 1)))
    if tasks == 1 or "JAX_LOCAL_DEVICE_IDS" in env:
        return None
    visible = env.get("CUDA_VISIBLE_DEVICES", env.get("ROCR_VISIBLE_DEVICES"))
    numbers = (re.search(r"\d+$", env.get(f"SLURM_GPUS_{name}", "")) for name in ("ON_NODE", "PER_TASK"))  # "a100:8"
    of_machine, of_task = (number and int(number[0]) for number in numbers)
    seen = of_machine
    if visible is not None:
        seen = len([name for name in visible.split(",") if name and name != "NoDevFiles"])
    if seen is None:
        return [index]
    if seen in (0, of_task) or seen < (of_machine or tasks):
        return None
    if seen % tasks:
        why = f"the {tasks} tasks of this machine cannot share its {seen} GPUs equally"
        raise ValueError(f"{why}: start one (--ntasks-per-node 1), which uses all, or one for each GPU")
    return list(range(index * seen // tasks, (index + 1) * seen // tasks))


def _slurm_tasks() -> int:
    """Returns the number of tasks of this step of Slurm on this machine; 1 outside of a step."""
    steps = re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))  # "4(x2),3"
    of_nodes = [int(count) for count, times in steps for _ in range(int(times or 1))]
    return of_nodes[min(int(os.environ.get("SLURM_NODEID", 0)), len(of_nodes) - 1)]


def _bind_address(host: str, port: int) -> str | None:
    """Returns `host:port` if `host` is an address of this machine, else None; `ValueError` if the port is in use."""
    bare = host.strip("[]")
    is_address = bare == "localhost" or ":" in bare or bare.replace(".", "").isdigit()
    for place in ([bare] if is_address else []) + [""]:
        try:
            socket.create_server((place, port), family=socket.AF_INET6 if ":" in place else socket.AF_INET).close()
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                continue  # perhaps that of a router in front of this machine
            why = f"port {port} cannot be used here ({error})"
            raise ValueError(f"coordinator: {why}; does another program, or another process 0, use it?") from None
        return f"{host}:{port}" if place else None


def check_alike(values: dict[str, Any], name: str) -> None:
    """Raises `ValueError` in all processes unless each of them passes the same `values`, JSON-like."""
    mine = json.loads(json.dumps(values, default=str))
    first = same_everywhere(mine)
    differing = [key for key in sorted({*first, *mine}) if first.get(key) != mine.get(key)]
    which = np.flatnonzero(everybodys([bool(differing)])[:, 0]).tolist()
    if which:
        here = ", ".join(f"{key} is {first.get(key)!r} there and {mine.get(key)!r} here" for key in differing[:8])
        what = f"every process must be given the same, and processes {which} differ from process 0"
        raise ValueError(f"{name}: {what}{': ' * bool(here)}{here}")


def devices() -> str:
    """Returns the devices of the run in words, with the numbers of hosts and of processes; all processes must call it.

    Example:
      >>> devices()
      '... of 1 host (...), 1 process'
    """
    names = everybodys([zlib.crc32(socket.gethostname().encode()) >> 1])[:, 0]
    kinds = Counter(device.device_kind for device in jax.devices())

    def counted(count, noun, plural="s"):
        return f"{count} {noun}{'' if count == 1 else plural}"

    here = f"{counted(jax.device_count(), 'device')} of {counted(len(np.unique(names)), 'host')}"
    kinds = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    return f"{here} ({kinds}), {counted(jax.process_count(), 'process', 'es')}"


def connected() -> bool:
    """Returns whether `connect` has connected this process to others; never starts a backend."""
    return jax.distributed.is_initialized()


def is_of_a_lost_process(error: Exception) -> bool:
    """Returns whether `error` is XLA's, of a collective without some of the processes."""
    of_collective = any(word in str(error) for word in ("Gloo", "NCCL", "coordination service"))
    of_memory = any(word in str(error) for word in ("RESOURCE_EXHAUSTED", "Out of memory"))  # this process's own
    return connected() and (of_collective or (isinstance(error, jax.errors.JaxRuntimeError) and not of_memory))


def several() -> bool:
    """Returns whether this is one of several processes."""
    return jax.process_count() > 1


def is_first() -> bool:
    """Returns whether this is the first process, which writes the results of all."""
    return jax.process_index() == 0


def fetch(tree: PyTree) -> PyTree:
    """Returns the arrays of `tree` as whole NumPy arrays on the host; with several processes, all must call it.

    Arrays of random keys remain such.
    """

    def whole(x):
        if is_key(x):
            return with_keys(whole(key_data(x)), x)
        if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
            return np.asarray(x)
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))

    return jax.device_get(tree) if not several() else jax.tree.map(whole, tree)


def replicate(tree: PyTree, mesh: Mesh | None) -> PyTree:
    """Puts arrays that are equal in every process on all devices of `mesh`; returns `tree` itself with one process."""
    if not several():
        return tree
    everywhere = NamedSharding(mesh, PartitionSpec())

    def put(x):
        host = np.asarray(key_data(x))
        return with_keys(jax.make_array_from_callback(host.shape, everywhere, lambda index: host[index]), x)

    return jax.tree.map(put, tree)


def same_everywhere(value: Any) -> Any:
    """Returns the first process's `value`, JSON-like, in all processes."""
    if not several():
        return value
    text = np.frombuffer(json.dumps(value if is_first() else 0).encode(), np.uint8)
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    text = np.resize(text, length)  # what the others pass does not count
    return json.loads(np.asarray(multihost_utils.broadcast_one_to_all(text)).tobytes().decode())


def by_first(fn: Callable[[], Any]) -> Any:
    """Calls `fn` in the first process and returns its result there, None in the others.

    A `ValueError` or `OSError` of `fn` raises a `ValueError` in all processes.
    """
    if not several():
        return fn()
    result, error = None, None
    try:
        result = fn() if is_first() else None
    except (ValueError, OSError) as raised:
        error = str(raised)
    error = same_everywhere(error)
    if error is not None:
        raise ValueError(error)
    return result


def same_arrays(tree: PyTree | None, like: PyTree) -> PyTree:
    """Returns the first process's arrays, which have the shapes of `like`, in all processes; the others pass None."""
    if not several():
        return tree
    shapes = jax.eval_shape(partial(jax.tree.map, key_data), like)
    data = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes) if tree is None else jax.tree.map(key_data, tree)
    shared = jax.tree.map(np.asarray, multihost_utils.broadcast_one_to_all(data))
    return jax.tree.map(with_keys, shared, like)


def everybodys(values: Sequence[int]) -> np.ndarray:
    """Returns `[P, n]`, the `n` integers of every process, in the order of processes."""
    if not several():
        return np.array([values], np.int32)
    return np.asarray(multihost_utils.process_allgather(np.array(values, np.int32)))


def total(count: int) -> int:
    """Returns the sum of every process's `count`."""
    return int(everybodys([count]).sum())


def leave(status: int) -> None:
    """Ends this process at once after an error; an orderly end would wait for processes that wait for this one."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
