"""What surrounds the rounds of a run: its clock, bar and Ctrl-C, and what a person is told, by warning or by error."""

from __future__ import annotations

import signal
import threading
import time
import warnings
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jfcl.simulation.folder import RunFolder


class DivergedError(RuntimeError):
    """A model, or everything that the clients sent in a round, is no longer finite."""


class CompileClock:
    """`seconds`: how long jax has been tracing, lowering and compiling in this thread while this is open."""

    _lock = threading.Lock()
    _open: ClassVar[dict[int, list[CompileClock]]] = {}  # by thread

    def __enter__(self):
        self.seconds, self._spans, self._thread = 0.0, [], threading.get_ident()
        with self._lock:
            if not self._open:
                jax.monitoring.register_event_duration_secs_listener(CompileClock._listen)
            self._open.setdefault(self._thread, []).append(self)
        return self

    @staticmethod
    def _listen(event: str, duration: float, **_):
        # jax has one list of listeners, which it calls in the thread that compiles. One listener serves all clocks: a
        # clock that registered its own would, on leaving the list, make jax skip that of another thread.
        if event.startswith("/jax/core/compile/"):
            for clock in CompileClock._open.get(threading.get_ident(), ()):
                clock._count(duration)

    def _count(self, duration: float) -> None:
        end = time.perf_counter()
        begin = end - duration
        # Functions are traced inside of others: what lies within this span has been counted.
        while self._spans and self._spans[-1][0] >= begin:
            inner = self._spans.pop()
            self.seconds -= inner[1] - inner[0]
        begin = max(begin, self._spans[-1][1]) if self._spans else begin
        self._spans.append((begin, end))
        self.seconds += end - begin

    def __exit__(self, *_):
        with self._lock:
            self._open[self._thread].remove(self)
            if not self._open[self._thread]:
                del self._open[self._thread]
            if not self._open:
                jax.monitoring.unregister_event_duration_listener(CompileClock._listen)


class Watch:
    """Watches a run from when it is opened: counts seconds, shows a bar, hears Ctrl-C, knows when to save.

    Attributes:
      interrupted: whether Ctrl-C was pressed. While jax computes nothing is heard; a second one is not waited with.
    """

    def __init__(self, num_rounds: int, *, description: str, progress: bool, checkpoint_seconds: float):
        self.interrupted = False
        self._compiling = CompileClock()
        console = Console(stderr=True)
        seen = console.is_interactive or console.is_jupyter  # elsewhere rich leaves nothing but an empty line
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            disable=not (progress and seen),
            transient=True,
        )
        self._line = self._bar.add_task(description, total=num_rounds, rate="", note="", start=False)
        self._checkpoint_seconds = checkpoint_seconds

    def __enter__(self):
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._before = signal.signal(signal.SIGINT, self._hear)
        self._compiling.__enter__()
        self._opened = time.perf_counter()
        return self

    def __exit__(self, *_):
        if self._bar.live.is_started:
            self._bar.stop()
        self._compiling.__exit__()
        if self._main:
            signal.signal(signal.SIGINT, self._before)

    def _hear(self, *_):
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True

    def begin(self, done: int, clock: Sequence[float]) -> None:
        """The rounds begin now, after `done` of them, which took `clock` in earlier calls. Shows the bar."""
        self._resumed_at, self._earlier = done, clock
        self.saved()
        self._bar.start()
        self._bar.start_task(self._line)
        self._bar.update(self._line, completed=done)

    def seconds(self) -> float:
        """Since this was opened, without compilation."""
        return time.perf_counter() - self._opened - self._compiling.seconds

    def clock(self) -> tuple[float, float]:
        """Seconds running and compiling, with those of earlier calls."""
        return self._earlier[0] + self.seconds(), self._earlier[1] + self._compiling.seconds

    def advance(self, done: int, latest: dict[str, Any]) -> None:
        """Moves the bar to `done` rounds; `latest` is the last record, if there is one."""
        rate = f"{(done - self._resumed_at) / max(self.seconds(), 1e-9):.1f} rounds/s"
        note = f"accuracy {latest['accuracy']:.3f}" if "accuracy" in latest else ""
        self._bar.update(self._line, completed=done, rate=rate, note=note)

    def due(self) -> bool:
        """Whether the last checkpoint is long ago."""
        return time.perf_counter() - self._saved_at >= self._checkpoint_seconds

    def saved(self) -> None:
        """To be called after a checkpoint."""
        self._saved_at = time.perf_counter()


def stop_if_diverged(finite: Any, t: int, seeds: Sequence, folder: RunFolder | None) -> None:
    """`DivergedError` where not all of `finite` `[R]` are True: whether models are, by seed."""
    for s in np.flatnonzero(~np.asarray(finite)):
        raise _diverged(t, seeds[s], "a model is no longer finite", folder)


def stop_if_nothing_came(values: dict[str, Any], t: int, seeds: Sequence, folder: RunFolder | None) -> None:
    """`DivergedError` where by a round's metrics, `[R]` each, clients took part and none sent a finite update."""
    if "nonfinite" in values and "participants" in values:
        bad, present = np.asarray(values["nonfinite"]), np.asarray(values["participants"])
        for s in np.flatnonzero((bad == present) & (present > 0)):
            raise _diverged(t, seeds[s], "no client sent a finite update", folder)


def _diverged(t: int, seed, what: str, folder: RunFolder | None) -> DivergedError:
    kept = f"; the last good checkpoint stays in {folder.path}" if folder is not None else ""
    return DivergedError(f"by round {t}, seed {seed}: {what}; a lower learning rate usually helps{kept}")


def warn_once(warned: set, rows: list[dict[str, Any]], num_models: int, n: int, true_cluster: Any) -> None:
    """Says once what a person would want to know: collapsed models, updates left out."""
    alike = true_cluster is not None and len(np.unique(true_cluster[true_cluster >= 0])) == 1  # one model is right
    for row in rows:
        if 1 < num_models < n and not alike and row["clusters_in_use"] == 1 and "collapse" not in warned:
            warned.add("collapse")
            warnings.warn(
                f"round {row['round']}, seed {row['seed']}: all clients use one of the {num_models} models; restarts or"
                " a warm start (init_params, --init-from) can prevent that",
                stacklevel=3,
            )
        if row.get("capacity_reached") and "capacity" not in warned:
            warned.add("capacity")
            warnings.warn(
                f"round {row['round']}, seed {row['seed']}: a cluster would be split, but max_clusters are in use",
                stacklevel=3,
            )
        if row.get("nonfinite") and "nonfinite" not in warned:
            warned.add("nonfinite")
            warnings.warn(
                f"round {row['round']}, seed {row['seed']}: {row['nonfinite']:.0f} client update(s) so far held NaN or"
                " infinity and were left out",
                stacklevel=3,
            )
        if np.any(row.get("overflowed", False)) and "overflowed" not in warned:
            warned.add("overflowed")
            warnings.warn(
                f"round {row['round']}, seed {row['seed']}: the models of clusters"
                f" {np.flatnonzero(row['overflowed']).tolist()} overflowed; these clusters keep their last finite model"
                " and are not examined any more, the others go on",
                stacklevel=3,
            )


FEW_ROUNDS = 10  # of fewer, little can be said
NEVER = 1e-20  # an eps_1 below is meant to prevent splits


def warn_if_never_examined(rows: list[dict[str, Any]], num_rounds: int) -> None:
    """Warns once of a run of `jfcl.cfl` that ends without a decision although updates are long.

    Args:
      rows: the last record of each seed.
      num_rounds: rounds done.
    """
    for row in rows if num_rounds >= FEW_ROUNDS else []:
        if row.get("decisions", 1) or "thresholds" not in row:
            continue
        mean, longest, (below, above) = row["mean_norm"][0], row["max_norm"][0], row["thresholds"]
        if longest > above and below > NEVER:
            long = f"The longest update, {longest:.3g}, is above eps_2, {above:.3g}"
            why = (
                f"but the mean update, {mean:.3g}, is not below eps_1, {below:.3g}: train for more rounds, or choose a"
                " larger eps_1"
                if not mean < below
                else f"and the mean update, {mean:.3g}, is below eps_1, {below:.3g}, but too few rounds have passed"
                " (min_rounds), or too few clients have a voice (min_size, cohort)"
            )
            warnings.warn(
                f"round {row['round']}, seed {row['seed']}: no cluster was ever examined for a split. {long}, {why}",
                stacklevel=3,
            )
            return
