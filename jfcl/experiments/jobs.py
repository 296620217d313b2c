"""Parts of a recipe in processes of their own, several at a time: `jfcl reproduce --jobs N`.

On a CPU every process has its share of the cores. On an accelerator the processes share its memory, so that one
compiles while another computes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import jax

from jfcl.execution import mapping

# Options of JAX that processes take over: where compiled programs are kept.
KEPT = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


class _Process(NamedTuple):
    name: str
    process: BaseProcess
    result: Connection
    slot: int


def share_accelerator() -> None:
    """Lets several processes share an accelerator's memory; to be called before JAX starts its backend."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def share_of_cores(cores: list[int], jobs: int, slot: int) -> list[int]:
    """Returns the cores of process `slot` of `jobs`: each core has one process at least, as evenly as possible.

    Example:
      >>> [share_of_cores([4, 5, 6, 7, 8], 2, slot) for slot in range(2)]
      [[4, 5], [6, 7, 8]]
      >>> [share_of_cores([0, 1], 3, slot) for slot in range(3)]
      [[0], [1], [0]]
    """
    if jobs >= len(cores):
        return [cores[slot % len(cores)]]
    return cores[slot * len(cores) // jobs : (slot + 1) * len(cores) // jobs]


def in_processes(parts: Mapping[str, Callable[[], Any]], jobs: int) -> Iterator[str]:
    """Calls the `parts`, at most `jobs` at a time, each in a new process; yields the name of each that has ended.

    Parts leave their results in files; they are pickled, and so are the errors they raise. Warnings of a part are
    repeated here. After an error, or Ctrl-C, no other part begins. Those that run are interrupted as by Ctrl-C, which
    a run answers with a checkpoint, and awaited; a second Ctrl-C ends them at once.

    Raises:
      MemoryError: a process was killed, which on Linux mostly is for want of memory.
      What a part raises.
    """
    share_accelerator()
    context = multiprocessing.get_context("spawn")
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    kept = {name: getattr(jax.config, name) for name in KEPT}
    waiting, running, free = list(parts.items()), [], list(range(jobs))[::-1]
    try:
        while waiting or running:
            while waiting and free:
                (name, part), slot = waiting.pop(0), free.pop()
                receiver, sender = context.Pipe(duplex=False)
                mine = share_of_cores(cores, jobs, slot) if cores else []
                process = context.Process(target=_work, args=(part, mine, kept, sender), name=f"jfcl {name}")
                process.start()
                sender.close()
                running.append(_Process(name, process, receiver, slot))
            ready = wait([one.result for one in running])
            for one in [one for one in running if one.result in ready]:
                running.remove(one)
                free.append(one.slot)
                _raise_failure(one)
                yield one.name
    finally:
        _stop([one.process for one in running])


def _raise_failure(one: _Process) -> None:
    """Waits for a process that has ended; repeats its warnings, and raises its error."""
    try:
        caught, error = one.result.recv()
    except EOFError:
        caught, error = [], None
    one.process.join()
    for text, category in caught:
        warnings.warn(text, category, stacklevel=4)
    if error is not None:
        raise error
    if one.process.exitcode != 0:
        raise MemoryError(
            f"the process of {one.name} was killed (exit status {one.process.exitcode}); call again with fewer jobs."
            " What has run is kept"
        )


def _stop(processes: list[BaseProcess]) -> None:
    """Interrupts the processes and waits for their end; ends them at once if that is interrupted."""
    try:
        for process in processes:
            with contextlib.suppress(OSError):
                os.kill(process.pid, signal.SIGINT)
        for process in processes:
            process.join()
    finally:
        for process in processes:
            process.kill()


def _work(part: Callable[[], Any], cores: list[int], options: dict[str, Any], result: Connection) -> None:
    """The main function of a process: calls `part`, and sends its warnings and its error."""
    os.setsid()  # Ctrl-C in the terminal reaches the parent alone, which passes it on
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if cores:
        os.sched_setaffinity(0, cores)
    for name, value in options.items():
        jax.config.update(name, value)
    error = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            mapping.divide_cpu(mapping.num_cores())
            part()
        except BaseException as raised:  # also that of Ctrl-C, which the parent has seen
            error = raised
    texts = [(str(one.message), one.category) for one in caught if issubclass(one.category, UserWarning)]
    try:
        result.send((texts, error))
    except Exception:  # an error that is not pickled
        result.send((texts, RuntimeError(f"{type(error).__name__}: {error}")))


def _end_with_parent() -> None:
    """Ends this process when its parent is killed."""
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)
