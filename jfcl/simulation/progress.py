"""The clock, the progress bar and Ctrl-C of a run; its warnings, and the errors that stop it."""

import functools
import math
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

from jfcl import mapping
from jfcl.core.platforms import compiles_alone, default_device
from jfcl.simulation.evaluation import Subjects
from jfcl.simulation.folder import RunFolder

COMPILING = "/jax/core/compile/"  # begins the names of jax's events
LONG_SECONDS = 20.0  # of a run that is worth a hint
HIGH = 10  # times the loss of guessing is no result of training
FIRST_CHECKPOINT = 5.0  # seconds; a run that is stopped soon has then kept something


class DivergedError(RuntimeError):
    """A model, or every update of a round, is no longer finite."""


class _Compiled(threading.local):
    """The time that this thread has spent with compilation: its seconds, and its last spans."""

    def __init__(self):
        self.seconds, self.spans = 0.0, deque(maxlen=10_000)


_compiled = _Compiled()


def compile_seconds() -> float:
    """Returns the time of tracing, lowering and compiling in this thread, from its first call on."""
    _listen_to_jax()
    return _compiled.seconds


def note_compilation(event: str, duration: float, **_) -> None:
    """Counts the last `duration` seconds of this thread, for an event of compilation."""
    if event.startswith(COMPILING):
        end, spans = time.perf_counter(), _compiled.spans
        begin = end - duration
        # A function is traced inside another one: spans within this one are already counted.
        while spans and spans[-1][0] >= begin:
            inner = spans.pop()
            _compiled.seconds -= inner[1] - inner[0]
        begin = max(begin, spans[-1][1]) if spans else begin
        spans.append((begin, end))
        _compiled.seconds += end - begin


@functools.cache
def _listen_to_jax() -> None:
    # jax calls a list of listeners in the thread that compiles. One listener serves all runs, and stays: the removal
    # of one from the list would make jax skip the listener of another thread.
    jax.monitoring.register_event_duration_secs_listener(note_compilation)


def compile_ahead(lowered: Sequence[jax.stages.Lowered]) -> Callable[[], None]:
    """Compiles programs in other threads: at once, and while this thread computes; returns a function that waits.

    XLA compiles one program by one thread. A function that was lowered for the same arguments finds its program when
    it is called after the wait, which counts as compilation and raises the error of a compiler. Processes that compile
    together must do so in the same order: with several of them nothing is compiled ahead, nor where `compiles_alone`.
    """
    futures = []
    if lowered and jax.process_count() == 1 and not compiles_alone(default_device()):
        pool = ThreadPoolExecutor(len(lowered), "compile")
        futures = [pool.submit(program.compile) for program in lowered]
        pool.shutdown(wait=False)

    def wait() -> None:
        began, waiting = time.perf_counter(), bool(futures)
        while futures:
            futures.pop(0).result()
        if waiting:
            note_compilation(COMPILING, time.perf_counter() - began)

    return wait


def progress_bar(progress: bool, *columns: Any) -> Progress:
    """Returns a bar on stderr that vanishes at its end; only terminals and notebooks show it, if `progress`."""
    console = Console(stderr=True)
    visible = console.is_interactive or console.is_jupyter  # elsewhere rich prints an empty line only
    columns = "{task.description}", BarColumn(), MofNCompleteColumn(), *columns
    return Progress(*columns, console=console, disable=not (progress and visible), transient=True)


class Watch:
    """The clock of a run or sweep, its progress bar, its handler of Ctrl-C, and the schedule of its checkpoints.

    Attributes:
      interrupted: whether Ctrl-C was pressed, which takes effect after the present rounds, or at the end of the run; a
        second one raises `KeyboardInterrupt` as soon as jax returns.
    """

    def __init__(self, num_rounds: int, *, description: str, progress: bool, checkpoint_seconds: float = math.inf):
        self.interrupted, self._done = False, 0
        self._speaks, self._checkpoint_seconds = progress, checkpoint_seconds
        columns = "{task.fields[rate]}", TimeElapsedColumn(), "left", TimeRemainingColumn(), "{task.fields[note]}"
        self._bar = progress_bar(progress, *columns)
        self._line = self._bar.add_task(description, total=num_rounds, rate="", note="", start=False)

    def __enter__(self):
        self._former = signal.getsignal(signal.SIGINT)  # None: of a program around Python, which could not be restored
        self._handles = threading.current_thread() is threading.main_thread() and self._former is not None
        if self._handles:
            signal.signal(signal.SIGINT, self._interrupt)
        self._opened, self._compiled_before = time.perf_counter(), compile_seconds()
        return self

    def __exit__(self, kind, *_):
        if self._bar.live.is_started:
            self._bar.stop()
        if self._handles:
            signal.signal(signal.SIGINT, self._former)
        if self.interrupted and kind is None:  # after the last rounds, while their results were written
            raise KeyboardInterrupt

    def _interrupt(self, *_):
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True
        self._bar.console.print("stopping after these rounds; Ctrl-C again stops at once")

    def show(self) -> None:
        """Shows the bar, if it is not there yet, with a note that programs compile."""
        self._bar.start()
        self._bar.start_task(self._line)
        self._bar.update(self._line, note="compiling")

    def tell(self, text: str) -> None:
        """Prints a line above the bar, where the run has one."""
        if self._speaks:
            self._bar.console.print(text, markup=False, soft_wrap=True)

    def begin(self, done: int, final_round: int, clock: Sequence[float] = (0.0, 0.0)) -> None:
        """Starts the bar at `done` rounds of `final_round`, which took the seconds `clock` in earlier calls."""
        self._earlier = clock
        self.saved()
        self._wait = self._checkpoint_seconds if any(clock) else min(FIRST_CHECKPOINT, self._checkpoint_seconds)
        self.show()
        self._bar.update(self._line, completed=done, total=final_round)

    def seconds(self) -> float:
        """Returns the time since the run was opened, without compilation."""
        return time.perf_counter() - self._opened - (compile_seconds() - self._compiled_before)

    def clock(self) -> tuple[float, float]:
        """Returns the seconds of running and of compiling, earlier calls included; without a round, those alone."""
        if not self._done:
            return tuple(self._earlier)
        return self._earlier[0] + self.seconds(), self._earlier[1] + compile_seconds() - self._compiled_before

    def advance(self, count: int, note: str) -> None:
        """Moves the bar by `count` rounds."""
        self._done += count
        rate = f"{self._done / max(self.seconds(), 1e-9):.1f} rounds/s"
        self._bar.update(self._line, advance=count, rate=rate, note=note)

    def due(self) -> bool:
        """Returns whether it is time for a checkpoint."""
        return time.perf_counter() - self._saved_at >= self._wait

    def saved(self) -> None:
        """Notes the time of a checkpoint."""
        self._saved_at, self._wait = time.perf_counter(), self._checkpoint_seconds


def stop_if_diverged(finite: Any, silent: Any, t: int, seeds: Sequence, folder: RunFolder | None) -> None:
    """Raises `DivergedError` if models of a seed are not `finite`, or too many participants in a row were `silent`."""
    lost = {"a model is no longer finite": ~np.asarray(finite), "no client sent a finite update": np.asarray(silent)}
    hint = "" if folder is None else f"; give it another folder (--out), since {folder.path} keeps this run"
    if folder is not None and (rounds := folder.rounds()):
        hint += f" and its last good checkpoint, of round {rounds[0]}"
    for what, of_seeds in lost.items():
        for s in np.flatnonzero(of_seeds):
            remedy = f"a lower learning rate (--lr) usually helps{hint}"
            raise DivergedError(f"by round {t}, seed {seeds[s]}: {what}; {remedy}")


def warn_once(warned: set, rows: list[dict[str, Any]], subjects: Subjects, *, is_last: bool = False) -> None:
    """Warns, once for each kind in `warned`, of collapsed models, excluded updates, and what the method notes."""
    notes = subjects.algorithm.entries.notes or (lambda row, is_last: {})
    for row in rows:
        texts = dict(notes(dict(row), is_last) or {})
        if subjects.choices > 1 and not is_last and row["clusters_in_use"] == 1:
            texts["collapse"] = (
                f"all clients use one of the {subjects.choices} models; restarts, a warm start (init_params,"
                " --init-from) or another threshold, where the method has them, can prevent that"
            )
        if row.get("nonfinite") and not is_last:
            updates = f"{row['nonfinite']:.0f} client update(s)"
            texts["nonfinite"] = f"{updates} so far held NaN or infinity and were left out"
        for kind in [kind for kind in texts if kind not in warned]:
            warned.add(kind)
            warnings.warn(f"round {row['round']}, seed {row['seed']}: {texts[kind]}", stacklevel=5)


def warn_if_cores_are_idle(client_axis: mapping.Mapping, seconds: float) -> None:
    """Warns after a run of more than `LONG_SECONDS` with one client at a time on one device."""
    if seconds > LONG_SECONDS and isinstance(client_axis, mapping.chunked) and mapping.idle_cores():
        remedy = "client_axis=jfcl.use_all_cores(), given to the method and to simulate, divides the clients among all"
        warnings.warn(f"one of {mapping.num_cores()} cores trained most of the time; {remedy}", stacklevel=4)


def warn_if_loss_is_high(records: list[dict[str, Any]], subjects: Subjects) -> None:
    """Warns once if a run with these `records` ends with a training loss far above that of guessing among its classes.

    Where the number of classes is unknown, the loss of the first records takes the place of that of guessing.
    """
    count, num_classes = len(subjects.seeds), getattr(subjects.algorithm.task, "num_classes", None)
    for first, last in zip(records[:count], records[-count:], strict=True):
        guess, what = first["train_loss"], f"round {first['round']}"
        if (num_classes or 0) > 1:
            guess, what = math.log(num_classes), "guessing"
        if guess > 0 and last["train_loss"] > HIGH * guess:
            warnings.warn(
                f"round {last['round']}, seed {last['seed']}: the training loss, {last['train_loss']:.3g}, is far above"
                f" that of {what}, {guess:.3g}; a lower learning rate (--lr) usually helps, and with hostile clients"
                " a robust aggregator",
                stacklevel=5,
            )
            return
