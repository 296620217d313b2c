"""Parts of a long computation in processes of their own, several at a time: `--jobs N`.

On a CPU every process has its share of the cores. On a GPU the processes share its memory, and one compiles while
another computes. A program that one has compiled, the others read.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

import jax

from jfcl import mapping
from jfcl.core import check, platform
from jfcl.mapping.jitted import clear_programs

OF_CACHE = ("jax_enable_compilation_cache", "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
LEAST_COMPILATION = 0.1  # seconds, of a program that is kept for others


def share_gpu() -> None:
    """Lets several processes share a GPU's memory; to be called before JAX starts its backend."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def share_of_cores(cores: list[int], jobs: int, slot: int) -> list[int]:
    """Returns the cores of process `slot` of `jobs`, as evenly as possible, and at least one.

    Example:
      >>> [share_of_cores([4, 5, 6, 7, 8], 2, slot) for slot in range(2)]
      [[4, 5], [6, 7, 8]]
      >>> [share_of_cores([0, 1], 3, slot) for slot in range(3)]
      [[0], [1], [0]]
    """
    if jobs >= len(cores):
        return [cores[slot % len(cores)]]
    return cores[slot * len(cores) // jobs : (slot + 1) * len(cores) // jobs]


def in_processes(
    parts: Mapping[str, Callable[[], Any]], jobs: int, *, cores: int | None = None, tick: Callable[[], None] = int
) -> Iterator[str]:
    """Calls the `parts` in `jobs` new processes, one after another in each; yields the name of each that has ended.

    Parts are pickled, and leave their results in files. After an error, or Ctrl-C, no other part begins; those that run
    are interrupted as by Ctrl-C, which a run answers with a checkpoint, and awaited.

    Args:
      parts: functions without arguments, by their names.
      jobs: processes at a time.
      cores: of a CPU for each process; default: its share of them.
      tick: is called about once a second meanwhile.

    Raises:
      ValueError: `jobs` above 1 on a TPU, which one process holds alone: this one, which calls the parts itself.
      ChildProcessError: a part has failed, with its error on the standard error, or its process was killed.
    """
    if platform() == "tpu":
        check(jobs == 1, "jobs", jobs, "1 on a TPU, which one process holds")
        for name, part in parts.items():
            tick()
            part()
            yield name
        return
    share_gpu()
    context, waiting = multiprocessing.get_context("spawn"), list(parts.items())[::-1]
    processes, running = {}, {}  # and the names of the parts that they run, by the connection to each process
    cache = {name: getattr(jax.config, name) for name in OF_CACHE}

    def send_next(connection: Connection) -> None:
        running[connection], part = waiting.pop()
        with contextlib.suppress(OSError):  # the process was killed, as is seen below
            connection.send((running[connection], part))

    with tempfile.TemporaryDirectory(prefix="jfcl-programs-", ignore_cleanup_errors=True) as folder:
        if cache["jax_compilation_cache_dir"] is None:  # this process has no folder for programs
            cache |= dict(zip(OF_CACHE[1:], (folder, LEAST_COMPILATION), strict=True))
        try:
            for slot in range(min(jobs, len(waiting))):
                here, there = context.Pipe()
                process = context.Process(target=_work, args=(there, jobs, slot, cores, cache), daemon=True)
                _start(process)
                processes[here] = process
                there.close()  # the process has the only other one, so that its end is that of the connection
                send_next(here)
            while running:
                tick()
                for connection in wait(list(running), timeout=1.0):
                    name = running.pop(connection)
                    try:
                        connection.recv()
                    except (EOFError, OSError):
                        _raise_failure(name, processes[connection])
                    yield name
                    if waiting:
                        send_next(connection)
                    else:
                        connection.close()  # the process ends
        finally:
            for connection in running:
                with contextlib.suppress(OSError):
                    os.kill(processes[connection].pid, signal.SIGINT)
            for connection, process in processes.items():
                connection.close()
                process.join()


def _start(process: multiprocessing.process.BaseProcess) -> None:
    """Starts a process that Ctrl-C reaches in `_work` only: while it imports, its answer would be a traceback."""
    if hasattr(signal, "pthread_sigmask"):
        resource_tracker.ensure_running()  # in its first call it unblocks Ctrl-C
        former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)
    else:
        process.start()


def _raise_failure(name: str, process: multiprocessing.process.BaseProcess) -> None:
    """Raises `ChildProcessError` for a process that has ended before its part."""
    process.join()
    status = process.exitcode
    if status < 0:
        why = f"was killed by signal {-status}; if memory ran out, call again with fewer jobs"
        raise ChildProcessError(f"the process of {name} {why}. What has run is kept")
    raise ChildProcessError(f"{name} has failed, its error stands above. What has run is kept")


def _work(connection: Connection, jobs: int, slot: int, cores: int | None, cache: dict[str, Any]) -> None:
    """Runs in a process: takes its share of the cores, or of a GPU's memory, and calls the parts that it is sent."""
    for name, value in cache.items():
        jax.config.update(name, value)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    if hasattr(os, "setsid"):
        os.setsid()  # Ctrl-C in the terminal reaches the parent alone, which passes it on
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{0.9 / jobs:.3f}")
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, share_of_cores(sorted(os.sched_getaffinity(0)), jobs, slot)[:cores])
        mapping.divide_cpu(mapping.num_cores())
    else:
        mapping.divide_cpu(cores or max(1, mapping.num_cores() // jobs))
    try:
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # one that came meanwhile arrives now
        while True:
            name, part = connection.recv()
            try:
                part()
            except (ValueError, OSError, EOFError, MemoryError) as error:
                print(f"{name}: {error}", file=sys.stderr)
                sys.exit(1)
            connection.send(None)
            clear_programs()  # the next part has its own
    except (EOFError, ConnectionError):  # there are no more, or nobody waits for this one
        pass
    except KeyboardInterrupt:  # which the parent has seen
        sys.exit(130)


def _end_with_parent() -> None:
    """Ends this process when its parent is killed."""
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)
