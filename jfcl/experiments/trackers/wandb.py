"""Weights & Biases."""

from __future__ import annotations

import os
import secrets
import shlex
from pathlib import Path
from typing import Any

from jfcl.experiments.trackers.common import keep_id, known_id, library, name_of, scalars, tell
from jfcl.simulation.callbacks import Callback, End, RunInfo


class WandB(Callback):
    """A tracker that logs to Weights & Biases: the numbers of the records against `round`, and the configuration.

    A resumed run continues the run of the same identity, kept in the run's folder; rounds that run again are logged
    again, with equal values. With `mode="offline"` (or WANDB_MODE=offline) each part has files of its own, which
    `wandb sync` joins.

    Args:
      options: of `wandb.init`; default of `project`: WANDB_PROJECT, or "jfcl".

    Raises:
      ValueError: wandb is not installed.

    Example:
      >>> from jfcl.experiments import Config, run
      >>> run(Config("fedavg", clients=4, rounds=2), out="runs/x", callbacks=[WandB(mode="offline")])
      ... # doctest: +SKIP
    """

    def __init__(self, **options: Any):
        self._library, self._options = library("wandb", "wandb"), options

    def on_start(self, run: RunInfo) -> None:
        """Begins or resumes the tracked run."""
        identity = known_id(run.folder, "wandb") or secrets.token_hex(8)
        keep_id(run.folder, "wandb", identity)
        options = {"project": os.environ.get("WANDB_PROJECT", "jfcl"), "name": name_of(run), "dir": run.folder}
        options |= {"id": identity, "resume": "allow", "config": run.config}
        self._run = self._library.init(**(options | self._options))
        self._run.define_metric("*", step_metric="round")
        folder = shlex.quote(str(Path(self._run.dir).parent))
        tell(self._run.url or f"{folder}; to upload them after the run: wandb sync {folder}")

    def on_records(self, records: list[dict[str, Any]]) -> None:
        """Logs the numbers of the records."""
        self._run.log({"round": records[0]["round"], **scalars(records)})

    def on_end(self, end: End) -> None:
        """Ends the tracked run."""
        self._run.summary["ended"] = f"{end.status}: {end.reason}"
        self._run.finish(exit_code=int(end.status == "failed"))
