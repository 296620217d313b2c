"""TensorBoard, through tensorboardX."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from jfcl.core import check
from jfcl.experiments.trackers.common import library, scalars, tell
from jfcl.simulation.callbacks import Callback, End, RunInfo


class TensorBoard(Callback):
    """A tracker that writes event files: the numbers of the records, the configuration, the reason of the end.

    A resumed run continues the curves: events of rounds after its checkpoint are marked as void.

    Args:
      folder: of the event files; default: `tensorboard` in the run's folder. A run without a folder needs it.

    Raises:
      ValueError: tensorboardX is not installed; in a run, as `CallbackError`, no folder.

    Example:
      >>> from jfcl.experiments import Config, run
      >>> summary, *_ = run(Config("fedavg", clients=4, rounds=2), out="runs/x", callbacks=[TensorBoard()])
      ... # doctest: +SKIP
    """

    def __init__(self, folder: str | Path | None = None):
        self._library, self._folder = library("tensorboardX", "tensorboard"), folder

    def on_start(self, run: RunInfo) -> None:
        """Opens the event file."""
        accepted = "given, or the run kept in a folder: out of jfcl.simulate (--out on the command line)"
        check(self._folder is not None or run.folder is not None, "folder", self._folder, accepted)
        folder = Path(self._folder or run.folder / "tensorboard")
        # A file of its own for every part of a run; events of earlier parts after `run.round` are void.
        part = {"purge_step": run.round + 1, "filename_suffix": f".{run.round}"}
        self._writer = self._library.SummaryWriter(str(folder), **part)
        tell(f"{folder}; to see them: tensorboard --logdir {shlex.quote(str(folder))}")
        lines = [f"| {name} | {value} |" for name, value in run.config.items() if value is not None]
        self._writer.add_text("config", "\n".join(["| option | value |", "|---|---|", *lines]), run.round)

    def on_records(self, records: list[dict[str, Any]]) -> None:
        """Writes the numbers of the records."""
        for name, value in scalars(records).items():
            self._writer.add_scalar(name, value, records[0]["round"])

    def on_checkpoint(self, round: int, folder: Path) -> None:
        """Writes to the disk."""
        self._writer.flush()

    def on_end(self, end: End) -> None:
        """Closes the event file."""
        self._writer.add_text("ended", f"{end.status}: {end.reason}", end.round)
        self._writer.close()
