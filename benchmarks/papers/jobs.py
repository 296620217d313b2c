"""Parts of a recipe in processes of their own, several at a time: `--jobs N`.

On a CPU every process has its share of the cores. On a GPU the processes share its memory, and one compiles while
another computes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import jax

from jfcl import mapping
from jfcl.core import check, platform

# Options of JAX that processes take over: where compiled programs are kept.
KEPT = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


class _Process(NamedTuple):
    name: str
    process: BaseProcess
    result: Connection
    slot: int

    def end(self) -> tuple[list[tuple[str, type]], BaseException | None] | None:
        """Waits for the end; returns the warnings and the error of the part, None if the process sent nothing."""
        found = None
        with contextlib.suppress(EOFError):
            found = self.result.recv()
        self.process.join()
        return found


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


def in_processes(parts: Mapping[str, Callable[[], Any]], jobs: int) -> Iterator[str]:
    """Calls the `parts`, at most `jobs` at a time, each in a new process; yields the name of each that has ended.

    Parts leave their results in files. Parts and their errors are pickled. Warnings of a part are repeated here. After
    an error, or Ctrl-C, no other part begins. Those that run are interrupted as by Ctrl-C, which a run answers with a
    checkpoint, and awaited; a second Ctrl-C ends them at once.

    Raises:
      ValueError: on a TPU, which one process holds alone.
      MemoryError: a process was killed; on Linux mostly because memory ran out.
      RuntimeError: a process ended without a result, as in a script without a main guard.
      What a part raises.
    """
    check(platform() != "tpu", "jobs", jobs, "1 on a TPU, which one process holds")
    share_gpu()
    context = multiprocessing.get_context("spawn")
    options = {name: getattr(jax.config, name) for name in KEPT}
    waiting, running, free = list(parts.items()), [], list(range(jobs))[::-1]
    try:
        while waiting or running:
            while waiting and free:
                (name, part), slot = waiting.pop(0), free.pop()
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(part, jobs, slot, options, sender), daemon=True)
                with _ctrl_c_ignored():
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
        _stop(running)


@contextlib.contextmanager
def _ctrl_c_ignored() -> Iterator[None]:
    """Ignores Ctrl-C until the end of the block; so does a process that begins there, until `_work`.

    Otherwise the process could end its imports with a traceback.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _raise_failure(one: _Process) -> None:
    """Waits for a process that is about to end; repeats its warnings, and raises its error."""
    found, status = one.end(), one.process.exitcode
    if found is None and status < 0:
        raise MemoryError(
            f"the process of {one.name} was killed (exit status {status}); call again with fewer jobs. What has run is"
            " kept"
        )
    if found is None:
        raise RuntimeError(
            f"the process of {one.name} ended with status {status} and no result; a script that starts processes needs"
            ' `if __name__ == "__main__":`'
        )
    caught, error = found
    for text, category in caught:
        warnings.warn(text, category, stacklevel=4)
    if error is not None:
        raise error


def _stop(running: list[_Process]) -> None:
    """Interrupts processes and waits for their end; ends them at once if that is interrupted."""
    try:
        for one in running:
            with contextlib.suppress(OSError):
                os.kill(one.process.pid, signal.SIGINT)
        for one in running:
            one.end()
    finally:
        for one in running:
            one.process.kill()


def _work(part: Callable[[], Any], jobs: int, slot: int, options: dict[str, Any], result: Connection) -> None:
    """The main function of a process: calls `part`, and sends its warnings and its error."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    if hasattr(os, "setsid"):
        os.setsid()  # Ctrl-C in the terminal reaches the parent alone, which passes it on
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for name, value in options.items():
        jax.config.update(name, value)
    error = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default", UserWarning)
        try:
            _take_share(jobs, slot)
            part()
        except BaseException as raised:  # also that of Ctrl-C, which the parent has seen
            error = _to_send(raised)
    texts = [(str(one.message), one.category) for one in caught if issubclass(one.category, UserWarning)]
    result.send((list(dict.fromkeys(texts)), error))


def _take_share(jobs: int, slot: int) -> None:
    """Takes the process's part of the cores, or of a GPU's memory, before JAX starts its backend."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{0.9 / jobs:.3f}")
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, share_of_cores(sorted(os.sched_getaffinity(0)), jobs, slot))
        mapping.divide_cpu(mapping.num_cores())
    else:
        mapping.divide_cpu(max(1, mapping.num_cores() // jobs))


def _to_send(error: BaseException) -> BaseException:
    """Returns the error with its traceback as a note, or one of its text if it cannot be pickled."""
    error.add_note(traceback.format_exc())
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError("".join(traceback.format_exception(error)))
    return error


def _end_with_parent() -> None:
    """Ends this process when its parent is killed."""
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)
