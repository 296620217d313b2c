"""Several processes that run one simulation together, each with its own devices and its own clients.

The first process writes records, checkpoints and progress for all. `jax.distributed` connects the devices. In a program
of one process these functions return their arguments unchanged.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jfcl.core import PyTree, check

HELLO = "jfcl-hello"
MOST = 2**16  # processes of one run
TIMEOUT = 60  # seconds that a process waits for the others to connect, and for a lost one to answer


def connect(coordinator: str, num_processes: int | None = None, process_id: int | None = None) -> None:
    """Connects the processes of one run; call it before any other function of JAX.

    Args:
      coordinator: `"host:port"` of the first process; or `"auto"` on Cloud TPU, Slurm and the other clusters that
        `jax.distributed.initialize` detects, without further arguments.
      num_processes: the number of processes.
      process_id: the number of this process, from 0.

    Raises:
      ValueError: numbers that do not fit; a port in use; processes that do not connect, or a coordinator that does not
        answer, within `TIMEOUT` seconds.

    Example:
      >>> connect("host0:1234", num_processes=2, process_id=2)
      Traceback (most recent call last):
      ValueError: process_id must be in 0..1, got 2
    """
    if coordinator == "auto":
        coordinator, num_processes, process_id = _surroundings()
        accepted = "given as host:port, with the number of processes and this one's: no cluster was detected here"
        check(None not in (coordinator, num_processes, process_id), "coordinator", "auto", accepted)
    host, _, port = coordinator.rpartition(":")
    check(bool(host) and port.isdigit(), "coordinator", coordinator, 'like "host:port", or "auto"')
    whole = num_processes is not None and 1 <= num_processes <= MOST
    check(whole, "num_processes", num_processes, f"an integer, at least 1 and at most {MOST}, with a coordinator")
    fits = process_id is not None and 0 <= process_id < num_processes
    check(fits, "process_id", process_id, f"in 0..{num_processes - 1}")
    check(0 < int(port) < 65536, "coordinator", coordinator, "of a port from 1 to 65535")
    # First without JAX: its own service and client end a process without an exception.
    if process_id == 0:
        _gather(int(port), num_processes)
    else:
        _announce(host, int(port), num_processes, process_id)
        _await(host, int(port)).close()
    try:
        jax.distributed.initialize(
            coordinator, num_processes, process_id, initialization_timeout=TIMEOUT, heartbeat_timeout_seconds=TIMEOUT
        )
    except RuntimeError as error:
        raise ValueError(
            f"coordinator: not all of the {num_processes} processes connected to {coordinator} within {TIMEOUT} seconds"
            f" ({str(error).splitlines()[0]})"
        ) from None


def _surroundings() -> tuple[str | None, int | None, int | None]:
    """Returns `(coordinator, num_processes, process_id)` from Slurm, Cloud TPU, ..., or None for unknown ones.

    This is the detection of `jax.distributed.initialize`, which has no public name.
    """
    from jax._src.clusters import ClusterEnv

    return ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, TIMEOUT)[:3]


def _gather(port: int, count: int) -> None:
    """Waits, as process 0, for a message of all others at `port`, and answers; `ValueError` if some are missing."""
    two = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if two else socket.AF_INET
    try:
        server = socket.create_server(("", port), family=family, dualstack_ipv6=two)
    except OSError as error:
        raise ValueError(f"coordinator: port {port} cannot be used ({error}); does another program use it?") from None
    there: dict[int, socket.socket] = {}
    until = time.monotonic() + TIMEOUT
    with contextlib.ExitStack() as stack, server:
        while len(there) < count - 1:
            server.settimeout(max(until - time.monotonic(), 0.01))
            try:
                guest = stack.enter_context(server.accept()[0])
                guest.settimeout(5)
                word, rank, of = guest.makefile().readline().split()
                known = word == HELLO and int(of) == count and 0 < int(rank) < count and int(rank) not in there
            except TimeoutError:
                if time.monotonic() < until:
                    continue
                missing = ", ".join(str(i) for i in range(1, count) if i not in there)
                raise ValueError(
                    f"coordinator: of the {count} processes, {missing} did not connect to port {port} within {TIMEOUT}"
                    " seconds"
                ) from None
            except (OSError, ValueError):  # another program
                continue
            if known:
                there[int(rank)] = guest
            elif word == HELLO:
                guest.sendall(f"process {rank} of {of} does not fit: there are {count}, each once\n".encode())
        for guest in there.values():
            guest.sendall(b"go\n")
        for guest in there.values():  # they close first, so that the port is free for jax's service at once
            with contextlib.suppress(OSError):
                guest.recv(1)


def _announce(host: str, port: int, count: int, process_id: int) -> None:
    """Sends a message to process 0, and waits for its answer; `ValueError` if there is none."""
    with _await(host, port) as guest:
        guest.settimeout(TIMEOUT + 10)
        try:
            guest.sendall(f"{HELLO} {process_id} {count}\n".encode())
            answer = guest.makefile().readline().strip()
        except OSError as error:
            answer = str(error)
    if answer != "go":
        raise ValueError(f"coordinator: {host}:{port} is not (any more) a process 0 that waits for others: {answer!r}")


def _await(host: str, port: int) -> socket.socket:
    """Connects as soon as a program listens at `host:port`."""
    until = time.monotonic() + TIMEOUT
    while True:
        try:
            return socket.create_connection((host, port), timeout=5)
        except OSError as error:
            if time.monotonic() > until:
                raise ValueError(
                    f"coordinator: {host}:{port} did not answer within {TIMEOUT} seconds ({error}); is the process with"
                    " id 0 running there, and the port open?"
                ) from None
            time.sleep(0.2)


def connected() -> bool:
    """Returns whether `connect` has connected this process to others; never starts a backend.

    Example:
      >>> connected()
      False
    """
    return jax.distributed.is_initialized()


def is_of_a_lost_process(error: Exception) -> bool:
    """Returns whether `error` is XLA's, of a collective without some of the processes."""
    of_collective = any(word in str(error) for word in ("Gloo", "NCCL", "coordination service"))
    own = "RESOURCE_EXHAUSTED" in str(error)  # this process's memory
    return connected() and (of_collective or (isinstance(error, jax.errors.JaxRuntimeError) and not own))


def several() -> bool:
    """Returns whether this is one of several processes.

    Example:
      >>> several()
      False
    """
    return jax.process_count() > 1


def is_first() -> bool:
    """Returns whether this is the first process, which writes the results of all.

    Example:
      >>> is_first()
      True
    """
    return jax.process_index() == 0


def fetch(tree: PyTree) -> PyTree:
    """Returns the arrays of `tree` as whole NumPy arrays on the host. With several processes, all of them must call it.

    Example:
      >>> import jax.numpy as jnp
      >>> fetch({"a": jnp.arange(2)})
      {'a': array([0, 1], dtype=int32)}
    """

    def whole(x):
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
        is_key = isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        host = np.asarray(jax.random.key_data(x) if is_key else x)
        array = jax.make_array_from_callback(host.shape, everywhere, lambda index: host[index])
        return jax.random.wrap_key_data(array, impl=jax.random.key_impl(x)) if is_key else array

    return jax.tree.map(put, tree)


def same_everywhere(value: Any) -> Any:
    """Returns the first process's `value`, JSON-like, in all processes.

    Example:
      >>> same_everywhere({"rounds": 3})
      {'rounds': 3}
    """
    if not several():
        return value
    text = np.frombuffer(json.dumps(value).encode(), np.uint8) if is_first() else np.zeros(0, np.uint8)
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    buffer = np.zeros(length, np.uint8)
    buffer[: len(text)] = text
    return json.loads(np.asarray(multihost_utils.broadcast_one_to_all(buffer)).tobytes().decode())


def by_first(fn: Callable[[], Any]) -> Any:
    """Calls `fn` in the first process and returns its result there, None in the others.

    Raises:
      ValueError: in all processes, with the message of a `ValueError` or `OSError` of `fn`.

    Example:
      >>> by_first(lambda: "written")
      'written'
    """
    found, error = None, None
    try:
        found = fn() if is_first() else None
    except (ValueError, OSError) as raised:
        if not several():
            raise
        error = str(raised)
    error = same_everywhere(error)
    if error is not None:
        raise ValueError(error)
    return found


def same_arrays(tree: PyTree) -> PyTree:
    """Returns the first process's NumPy arrays in all processes; the others pass arrays of the same shapes."""
    if not several():
        return tree
    return jax.tree.map(np.asarray, multihost_utils.broadcast_one_to_all(tree))


def everybodys(values: Sequence[int]) -> np.ndarray:
    """Returns `[P, n]`, the `n` integers of every process, in the order of processes.

    Example:
      >>> everybodys([4, 5]).tolist()
      [[4, 5]]
    """
    if not several():
        return np.array([values], np.int32)
    return np.asarray(multihost_utils.process_allgather(np.array(values, np.int32)))


def total(count: int) -> int:
    """Returns the sum of every process's `count`.

    Example:
      >>> total(3)
      3
    """
    return int(everybodys([count]).sum())


def leave(status: int) -> None:
    """Ends this process at once after an error; an orderly end would wait for processes that wait for this one."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
