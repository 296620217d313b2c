"""The clock, the progress bar and Ctrl-C of a run; its warnings, and the errors that stop it."""

from __future__ import annotations

import contextlib
import functools
import math
import signal
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

from jfcl import mapping
from jfcl.simulation.evaluation import Subjects
from jfcl.simulation.folder import RunFolder

LONG_SECONDS = 20.0  # of a run that is worth a hint
FIRST_CHECKPOINT = 5.0  # seconds; a run that is stopped soon has then kept something


class DivergedError(RuntimeError):
    """A model, or every update of a round, is no longer finite."""


class CompileClock:
    """A clock of compilation; `seconds`: time of tracing, lowering and compiling in this thread while it is open."""

    _here = threading.local()  # `open`: the clocks of a thread

    def __enter__(self):
        self.seconds, self._spans = 0.0, []
        _listen_to_jax()
        self._here.__dict__.setdefault("open", []).append(self)
        return self

    @staticmethod
    def _listen(event: str, duration: float, **_):
        if event.startswith("/jax/core/compile/"):
            CompileClock.count(duration)

    @staticmethod
    def count(duration: float) -> None:
        """Adds the last `duration` seconds to the clocks that are open in this thread."""
        for clock in getattr(CompileClock._here, "open", ()):
            clock._count(duration)

    def _count(self, duration: float) -> None:
        end = time.perf_counter()
        begin = end - duration
        # A function is traced inside another one: spans within this one are already counted.
        while self._spans and self._spans[-1][0] >= begin:
            inner = self._spans.pop()
            self.seconds -= inner[1] - inner[0]
        begin = max(begin, self._spans[-1][1]) if self._spans else begin
        self._spans.append((begin, end))
        self.seconds += end - begin

    def __exit__(self, *_):
        self._here.open.remove(self)


@functools.cache
def _listen_to_jax() -> None:
    # jax calls a list of listeners in the thread that compiles. One listener serves all clocks, and stays: the removal
    # of one from the list would make jax skip the listener of another thread.
    jax.monitoring.register_event_duration_secs_listener(CompileClock._listen)


def compile_ahead(lowered: Sequence[jax.stages.Lowered]) -> Callable[[], None]:
    """Compiles programs in other threads: at once, and while this thread computes; returns a function that waits.

    XLA compiles one program by one thread. A function that was lowered for the same arguments finds its program when
    it is called after the wait, which counts as compilation and raises the error of a compiler. Processes that compile
    together must do so in the same order: with several of them nothing is compiled ahead.
    """
    futures = []
    if lowered and jax.process_count() == 1:
        pool = ThreadPoolExecutor(len(lowered), "compile")
        futures = [pool.submit(program.compile) for program in lowered]
        pool.shutdown(wait=False)

    def wait() -> None:
        began, waiting = time.perf_counter(), bool(futures)
        while futures:
            futures.pop(0).result()
        if waiting:
            CompileClock.count(time.perf_counter() - began)

    return wait


def progress_bar(is_shown: bool, *columns: Any) -> Progress:
    """Returns a bar of rich's `columns` on stderr, which vanishes at its end; terminals and notebooks alone show it."""
    console = Console(stderr=True)
    visible = console.is_interactive or console.is_jupyter  # elsewhere rich prints an empty line only
    return Progress(*columns, console=console, disable=not (is_shown and visible), transient=True)


class Watch:
    """The clock of a run, its progress bar, its handler of Ctrl-C, and the schedule of its checkpoints.

    Attributes:
      interrupted: whether Ctrl-C was pressed, which takes effect after the present rounds; a second one raises
        `KeyboardInterrupt` as soon as jax returns.
    """

    def __init__(self, num_rounds: int, *, description: str, progress: bool, checkpoint_seconds: float):
        self.interrupted = False
        self._compiling = CompileClock()
        counts = "{task.description}", BarColumn(), MofNCompleteColumn(), "{task.fields[rate]}"
        times = TimeElapsedColumn(), "left", TimeRemainingColumn()
        self._bar = progress_bar(progress, *counts, *times, "{task.fields[note]}")
        self._line = self._bar.add_task(description, total=num_rounds, rate="", note="", start=False)
        self._speaks, self._checkpoint_seconds = progress, checkpoint_seconds

    def __enter__(self):
        with contextlib.ExitStack() as opened:
            if threading.current_thread() is threading.main_thread():
                before = signal.signal(signal.SIGINT, self._interrupt)
                opened.callback(signal.signal, signal.SIGINT, before)
            opened.enter_context(self._compiling)
            self._open = opened.pop_all()
        self._opened = time.perf_counter()
        return self

    def __exit__(self, *_):
        if self._bar.live.is_started:
            self._bar.stop()
        self._open.close()

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

    def begin(self, done: int, final_round: int, clock: Sequence[float]) -> None:
        """Starts the bar at `done` rounds of `final_round`, which took the seconds `clock` in earlier calls."""
        self._resumed_at, self._final_round, self._earlier = done, final_round, clock
        self.saved()
        self._wait = self._checkpoint_seconds if any(clock) else min(FIRST_CHECKPOINT, self._checkpoint_seconds)
        self.show()
        self._bar.update(self._line, completed=done, total=final_round)

    def seconds(self) -> float:
        """Returns the time since the run was opened, without compilation."""
        return time.perf_counter() - self._opened - self._compiling.seconds

    def clock(self) -> tuple[float, float]:
        """Returns the seconds of running and of compiling, with those of earlier calls.

        A call that resumes a finished run has no round, and adds nothing.
        """
        if self._resumed_at >= self._final_round:
            return tuple(self._earlier)
        return self._earlier[0] + self.seconds(), self._earlier[1] + self._compiling.seconds

    def advance(self, done: int, latest: dict[str, Any]) -> None:
        """Moves the bar to `done` rounds; `latest` is the last record, or empty."""
        rate = f"{(done - self._resumed_at) / max(self.seconds(), 1e-9):.1f} rounds/s"
        note = f"accuracy {latest['accuracy']:.3f}" if "accuracy" in latest else ""
        self._bar.update(self._line, completed=done, rate=rate, note=note)

    def due(self) -> bool:
        """Returns whether it is time for a checkpoint."""
        return time.perf_counter() - self._saved_at >= self._wait

    def saved(self) -> None:
        """Notes the time of a checkpoint."""
        self._saved_at, self._wait = time.perf_counter(), self._checkpoint_seconds


def stop_if_diverged(finite: Any, silent: Any, t: int, seeds: Sequence, folder: RunFolder | None) -> None:
    """`DivergedError` if a model is not finite, or updates no longer are.

    Args:
      finite: `[R]`, whether the models of a seed are finite.
      silent: `[R]`, whether too many participants in a row have sent no finite update, by round `t`.
    """
    lost = {"a model is no longer finite": ~np.asarray(finite), "no client sent a finite update": np.asarray(silent)}
    kept = "" if folder is None else f"; give it another folder (--out), since {folder.path} keeps this run"
    if folder is not None and folder.has_checkpoint():
        kept += f" and its last good checkpoint, of round {folder.rounds()[0]}"
    for what, of_seeds in lost.items():
        for s in np.flatnonzero(of_seeds):
            how = f"a lower learning rate (--lr) usually helps{kept}"
            raise DivergedError(f"by round {t}, seed {seeds[s]}: {what}; {how}")


def warn_once(warned: set, rows: list[dict[str, Any]], subjects: Subjects, *, is_last: bool = False) -> None:
    """Warns, once for each kind in `warned`, of collapsed models, excluded updates, and what the method notes."""
    notes = subjects.entries.notes or (lambda row, is_last: {})
    for row in rows:
        found = notes(row, is_last)
        if subjects.choices > 1 and not is_last and row["clusters_in_use"] == 1:
            found["collapse"] = (
                f"all clients use one of the {subjects.choices} models; restarts or a warm start (init_params,"
                " --init-from), where the method has them, can prevent that"
            )
        if row.get("nonfinite") and not is_last:
            updates = f"{row['nonfinite']:.0f} client update(s)"
            found["nonfinite"] = f"{updates} so far held NaN or infinity and were left out"
        for kind in found.keys() - warned:
            warned.add(kind)
            warnings.warn(f"round {row['round']}, seed {row['seed']}: {found[kind]}", stacklevel=4)


HIGH = 10  # times the loss of guessing is no result of training


def warn_if_cores_are_idle(client_axis: mapping.Mapping, seconds: float) -> None:
    """Warns, once in a process, after a run of more than `LONG_SECONDS` with one client at a time on one device."""
    if seconds > LONG_SECONDS and isinstance(client_axis, mapping.chunked) and mapping.idle_cores():
        _warn_of_idle_cores()


@functools.cache
def _warn_of_idle_cores() -> None:
    warnings.warn(
        f"one of {mapping.num_cores()} cores trained most of the time; client_axis=jfcl.use_all_cores(), given to the"
        " method and to simulate, divides the clients among all",
        stacklevel=4,
    )


def warn_if_loss_is_high(records: list[dict[str, Any]], subjects: Subjects) -> None:
    """Warns once if a run ends with a training loss far above that of guessing, or above that of its first record.

    Args:
      records: all records of the run.
      subjects: with the seeds, and the number of classes; where that is unknown, the first records are compared with.
    """
    count = len(subjects.seeds)
    for first, last in zip(records[:count], records[-count:], strict=True):
        guess, what = first["train_loss"], f"round {first['round']}"
        if (subjects.num_classes or 0) > 1:
            guess, what = math.log(subjects.num_classes), "guessing"
        if guess > 0 and last["train_loss"] > HIGH * guess:
            warnings.warn(
                f"round {last['round']}, seed {last['seed']}: the training loss, {last['train_loss']:.3g}, is far above"
                f" that of {what}, {guess:.3g}; a lower learning rate (--lr) usually helps, and with hostile clients"
                " a robust aggregator",
                stacklevel=4,
            )
            return
