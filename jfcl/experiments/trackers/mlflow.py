"""MLflow."""

from __future__ import annotations

import os
import shlex
import time
from typing import Any

from jfcl.experiments.trackers.common import keep_id, known_id, library, name_of, scalars, tell
from jfcl.simulation.callbacks import Callback, End, RunInfo

STATUS = {"finished": "FINISHED", "stopped": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
LONGEST = 6000  # characters of a parameter
MOST_METRICS = 1000  # in one call


class MLflow(Callback):
    """A tracker that logs to MLflow: the numbers of the records by round, and the configuration as parameters.

    A resumed run continues its run of MLflow.

    Args:
      tracking_uri: of the server, or of local files; default: that of MLflow (MLFLOW_TRACKING_URI).
      experiment: its name; default: MLFLOW_EXPERIMENT_NAME, or "jfcl".

    Raises:
      ValueError: mlflow is not installed.

    Example:
      >>> from jfcl.experiments import Config, run
      >>> run(Config("fedavg", clients=4, rounds=2), out="runs/x", callbacks=[MLflow()])  # doctest: +SKIP
    """

    def __init__(self, tracking_uri: str | None = None, experiment: str | None = None):
        self._library, self._uri = library("mlflow", "mlflow"), tracking_uri
        self._experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", "jfcl")

    def on_start(self, run: RunInfo) -> None:
        """Begins or resumes the tracked run."""
        self._client = self._library.MlflowClient(self._uri)
        self._id = known_id(run.folder, "mlflow")
        uri = self._uri or self._library.get_tracking_uri()
        view = "" if uri.startswith("http") else f"; to see them: mlflow ui --backend-store-uri {shlex.quote(uri)}"
        tell(f"{uri}, experiment {self._experiment}{view}")
        if self._id is not None:
            self._client.update_run(self._id, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = self._client.create_experiment(self._experiment) if found is None else found.experiment_id
        self._id = self._client.create_run(experiment, run_name=name_of(run)).info.run_id
        keep_id(run.folder, "mlflow", self._id)
        values = {name: str(value)[:LONGEST] for name, value in run.config.items() if value is not None}
        self._client.log_batch(self._id, params=[self._library.entities.Param(*pair) for pair in values.items()])

    def on_records(self, records: list[dict[str, Any]]) -> None:
        """Logs the numbers of the records."""
        when, metric = (int(1000 * time.time()), records[0]["round"]), self._library.entities.Metric
        metrics = [metric(name, value, *when) for name, value in scalars(records).items()]
        for first in range(0, len(metrics), MOST_METRICS):  # those of many seeds
            self._client.log_batch(self._id, metrics=metrics[first : first + MOST_METRICS])

    def on_end(self, end: End) -> None:
        """Ends the tracked run."""
        self._client.set_tag(self._id, "ended", f"{end.status}: {end.reason}")
        self._client.set_terminated(self._id, STATUS[end.status])
