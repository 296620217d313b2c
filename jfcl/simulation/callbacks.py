"""Callbacks: code of the user that a run calls at its start, after evaluations and checkpoints, and at its end.

A callback is an object with at least one of the methods of `Callback`:

    class Print:
        def on_records(self, records):
            print(records[0]["round"], records[0]["accuracy"])

    jfcl.simulate(algorithm, clients, ..., callbacks=[Print()])

Callbacks see copies of the records and change no result. With several processes, the first one calls them. The
trackers in `jfcl.experiments.trackers` are callbacks too.
"""

import copy
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import jax

from jfcl.core import check, require
from jfcl.core.options import Interval, Range, check_options
from jfcl.mapping import hosts
from jfcl.simulation.folder import Restored

__all__ = ["Callback", "CallbackError", "EarlyStopping", "End", "RunInfo"]

METHODS = ("on_start", "on_records", "on_checkpoint", "on_end")
DECIDING = ("on_start", "on_records")  # those that may end a run
DECREASING = ("loss", "perplexity", "error", "mse", "mae", "nll")  # ends of the names of metrics that should fall


class CallbackError(RuntimeError):
    """A callback raised; the message names it, and the cause is its error."""


class RunInfo(NamedTuple):
    """A run at its start.

    Attributes:
      description: the label of the run; with `jfcl run`, the method.
      config: its configuration, as in `config.json`.
      num_rounds: the number of the last round: `T`, and the rounds of the method's start.
      seeds: the `R` names of the keys.
      round: rounds done: those of the method's start, and of earlier parts of a run that is resumed.
      records: the records of these rounds.
      folder: the run's folder, or None.
      state: `() -> state` of the method after the rounds that are done by the time of the call, on the host, with a
        seed axis `[R, ...]`; of a population, the arrays of a checkpoint. In one process only.
    """

    description: str
    config: dict[str, Any]
    num_rounds: int
    seeds: list
    round: int
    records: list[dict[str, Any]]
    folder: Path | None
    state: Callable[[], Any]


class End(NamedTuple):
    """The end of a run.

    Attributes:
      status: "finished": all rounds are done, or the method has ended. "stopped": by a callback, or by `stop_after`.
        "interrupted": by Ctrl-C. "failed": by an error.
      reason: a sentence; that of `History.ended`, or the message of the error.
      round: rounds done.
    """

    status: str
    reason: str
    round: int


class Callback:
    """The methods of a callback, which do nothing here; a callback need not be a subclass.

    A text returned by `on_start` or `on_records` ends the run at an evaluated round: the current one, otherwise the
    next. The text becomes `History.ended`. An exception ends the run too, as `CallbackError`, after a checkpoint.

    Example:
      >>> import jax, jfcl
      >>> from jfcl.testing import problem
      >>> class Enough(jfcl.callbacks.Callback):
      ...     def on_records(self, records):
      ...         return "two rounds are enough" if records[0]["round"] == 2 else None
      >>> clients, _, task, training = problem()
      >>> run = {"key": jax.random.key(0), "num_rounds": 9, "callbacks": [Enough()]}
      >>> history = jfcl.simulate(jfcl.fedavg(task, training), clients, **run)
      >>> history.rounds, history.ended
      (2, 'two rounds are enough')
    """

    def on_start(self, run: RunInfo) -> str | None:
        """Called before the first round, and again when a run is resumed."""

    def on_records(self, records: list[dict[str, Any]]) -> str | None:
        """Called after an evaluation, with a record for each seed, as in `History.records`."""

    def on_checkpoint(self, round: int, folder: Path) -> None:
        """Called when a checkpoint of `round` is on the disk, in the run's folder."""

    def on_end(self, end: End) -> None:
        """Called at the end, also after Ctrl-C or an error, if `on_start` returned."""


class EarlyStopping(Callback):
    """A callback that ends a run once a metric has not improved for `patience` rounds in any seed.

    The decision depends on the records alone: a run that is interrupted and resumed ends at the same round as one that
    is not. Resumed with another patience, or without this callback, an ended run continues. If the metric is measured
    on test clients, the final figures come from the data that chose the number of rounds; with "train_loss" they do
    not.

    Args:
      patience: rounds without improvement, 1 or more. Metrics are known at evaluations only (`eval_every`).
      metric: the name of a number in the records.
      lower_is_better: default: where the name ends in "loss", "perplexity", "error", "mse" (as "rmse"), "mae" or "nll".
      margin: 0 or more: a smaller change is no improvement.

    Raises:
      ValueError: a bad argument; in a run, as `CallbackError`, records without the metric.

    Example:
      >>> stopping = EarlyStopping(patience=2, metric="loss")
      >>> for t, loss in enumerate([0.9, 0.5, 0.6, 0.5], 1):
      ...     print(stopping.on_records([{"seed": 0, "round": t, "loss": loss}]))
      None
      None
      None
      loss has not improved for 2 rounds, since round 2
    """

    def __init__(
        self,
        *,
        patience: Annotated[int, Range(1)],
        metric: str = "accuracy",
        lower_is_better: bool | None = None,
        margin: Annotated[float, Interval("[0, inf)")] = 0.0,
    ):
        check_options(EarlyStopping.__init__, locals())
        self._patience, self._metric, self._margin = patience, metric, margin
        self._sign = -1 if (metric.endswith(DECREASING) if lower_is_better is None else lower_is_better) else 1
        self._best: dict[Any, tuple[float, int]] = {}  # of each seed: its value, with the sign, and its round

    def on_start(self, run: RunInfo) -> str | None:
        """Forgets an earlier run, and replays the records of this one."""
        self._best = {}
        return self.on_records(run.records) if run.records else None

    def on_records(self, records: list[dict[str, Any]]) -> str | None:
        """Returns the reason to stop, or None."""
        for row in records:
            value = row.get(self._metric)
            numbers = [name for name, v in row.items() if isinstance(v, (int, float)) and name not in ("seed", "round")]
            check(self._metric in numbers, "metric", self._metric, f"a number in the records: {', '.join(numbers)}")
            best, _ = self._best.setdefault(row["seed"], (-math.inf, row["round"]))
            if self._sign * value > best + self._margin:  # False for NaN
                self._best[row["seed"]] = (self._sign * value, row["round"])
        done, last = records[-1]["round"], max(round_ for _, round_ in self._best.values())
        stops = done - last >= self._patience
        return f"{self._metric} has not improved for {done - last} rounds, since round {last}" if stops else None


# The side of the run.


def check_callbacks(callbacks: Any) -> None:
    """Raises `ValueError` unless `callbacks` are objects with at least one of the methods."""
    check(isinstance(callbacks, (list, tuple)), "callbacks", callbacks, "a list of callbacks")
    for callback in callbacks:
        are_methods = [callable(getattr(callback, name)) for name in METHODS if hasattr(callback, name)]
        accepted = f"objects, not classes, with at least one of the methods {', '.join(METHODS)}"
        check(are_methods and all(are_methods) and not isinstance(callback, type), "callbacks", callback, accepted)


class Callbacks:
    """The callbacks of one run, as its loop calls them; a context that reports the end of the run.

    After every call, `reason` and `failure` are the same in all processes.

    Attributes:
      folder: the run's folder, in every process; None without one.
      round: rounds done; the loop keeps it up to date.
      ended: why the run ended without an error.
      reason: the text of a callback that ends the run, or None.
      failure: the error of a callback, or None. No callback is called afterwards, except for its end.
    """

    def __init__(self, callbacks: Sequence, description: str, config: dict, num_rounds: int, out: str | Path | None):
        self._all, self._started = list(callbacks), []
        self._run, self.folder = (description, config, num_rounds), None if out is None else Path(out)
        self.round, self.ended, self.reason, self.failure = 0, End("finished", "", 0), None, None

    def start(self, start: Restored, seeds: list, saved: Callable[[], Any]) -> None:
        """Calls `on_start`; `saved` returns the state of the present round."""

        def state():
            require(not hosts.several(), "state() works in a run of one process only")
            return copy.deepcopy(jax.device_get(saved()))

        self.round, info = start.round, RunInfo(*self._run, seeds, start.round, start.records, self.folder, state)
        for callback in self._all if hosts.is_first() else []:
            if self.failure is None and self._call(callback, "on_start", info):
                self._started.append(callback)
        self._share()

    def is_finished(self) -> bool:
        """Returns whether the run has ended without an error, and not only by `stop_after`."""
        return self.ended.status == "finished" or self.reason is not None

    def raise_failure(self) -> None:
        """Raises the error of a callback, if there is one."""
        if self.failure is not None:
            raise self.failure

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _) -> None:
        end = self.ended
        if error is not None:
            end = End("failed", f"{kind.__name__}: {error}", self.round)
        if isinstance(error, KeyboardInterrupt):
            end = End("interrupted", "interrupted by Ctrl-C", self.round)
        for callback in self._started:
            self._call(callback, "on_end", end)
        if error is None:  # otherwise other processes may not come here
            self._share()
            self.raise_failure()

    def call(self, method: str, *values: Any) -> None:
        """Calls a method of all callbacks that have begun."""
        for callback in self._started:
            if self.failure is None:
                self._call(callback, method, *values)
        self._share()

    def _call(self, callback: Any, method: str, *values: Any) -> bool:
        """Calls a method with copies of `values`, and returns whether it returned; the first error is kept."""
        try:
            answer = getattr(callback, method, lambda *_: None)(*copy.deepcopy(values))
            if method in DECIDING:
                if answer is not None and not isinstance(answer, str):
                    raise TypeError(f"it must return None or a text, not {type(answer).__name__}")
                self.reason = self.reason or answer
        except Exception as error:
            if self.failure is None:
                what = f"callback {type(callback).__name__}.{method} raised {type(error).__name__}: {error}"
                where = f"; {self.folder} is saved up to there, resume=True (--resume) continues" if self.folder else ""
                self.failure = CallbackError(f"{what}, after round {self.round}{where}")
                self.failure.__cause__ = error
            return False
        return True

    def _share(self) -> None:
        if self._all and hosts.several():
            message = None if self.failure is None else str(self.failure)
            self.reason, failure = hosts.same_everywhere([self.reason, message])
            self.failure = self.failure or (None if failure is None else CallbackError(failure))
