"""Trackers: callbacks that send the records of a run to TensorBoard, Weights & Biases or MLflow.

    jfcl.simulate(..., out="runs/x", callbacks=[jfcl.experiments.trackers.TensorBoard()])

Each raises `ValueError` where its package is not installed. With a run's folder, a resumed run continues its tracked
run.
"""

import importlib
import os
import secrets
import shlex
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from jfcl.core import check, check_choice
from jfcl.simulation.callbacks import Callback, End, RunInfo
from jfcl.simulation.folder import read_json, write_json

__all__ = ["TRACKERS", "MLflow", "TensorBoard", "WandB", "tracker"]

FILE = "trackers.json"  # in the run's folder: the identity of the tracked run, by tracker
STATUS = {"finished": "FINISHED", "stopped": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}  # of MLflow
LONGEST = 6000  # characters of a parameter of MLflow
MOST_METRICS = 1000  # in one call of MLflow


def _library(package: str, extra: str) -> ModuleType:
    """Returns a package; `ValueError`, with the command that installs it, if it cannot be imported."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        remedy = f"pip install 'jfcl[{extra}]'"
        raise ValueError(f"track must be a tracker that is installed, got {extra!r} ({error}): {remedy}") from None


def scalars(records: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the numbers of one evaluation: of the only seed, or their means with `seed_S/NAME` of every seed.

    Example:
      >>> scalars([{"seed": 3, "round": 5, "accuracy": 0.5, "cluster": [0, 1]}])
      {'accuracy': 0.5}
      >>> scalars([{"seed": s, "round": 5, "accuracy": s / 4} for s in (1, 2)])
      {'accuracy': 0.375, 'seed_1/accuracy': 0.25, 'seed_2/accuracy': 0.5}
    """
    names = [name for name in records[0] if all(isinstance(row.get(name), (int, float)) for row in records)]
    names = [name for name in names if name not in ("seed", "round")]
    values = {name: sum(float(row[name]) for row in records) / len(records) for name in names}
    if len(records) > 1:
        values |= {f"seed_{row['seed']}/{name}": float(row[name]) for row in records for name in names}
    return values


def _name_of(run: RunInfo) -> str:
    """Returns the name of a run: that of its folder, or its description."""
    return run.description if run.folder is None else run.folder.resolve().name


def _tell(text: str) -> None:
    """Prints where the curves of a run are; above a progress bar, if there is one."""
    print(f"curves: {text}", file=sys.stderr)


def _identities(folder: Path | None) -> dict[str, str]:
    """Returns the identities of the run in a folder, by tracker."""
    has_file = folder is not None and (folder / FILE).exists()
    return read_json(folder / FILE, sealed=False) if has_file else {}


def _keep_identity(folder: Path | None, tracker: str, identity: str) -> None:
    """Keeps the identity of the run at a tracker in its folder."""
    if folder is not None:
        write_json(folder / FILE, _identities(folder) | {tracker: identity})


class TensorBoard(Callback):
    """A tracker that writes event files: the numbers of the records, the configuration, the reason of the end.

    A resumed run continues the curves: events of rounds after its checkpoint are marked as void.

    Args:
      folder: of the event files; default: `tensorboard` in the run's folder. A run without a folder needs it.
    """

    def __init__(self, folder: str | Path | None = None):
        self._library, self._folder = _library("tensorboardX", "tensorboard"), folder

    def on_start(self, run: RunInfo) -> None:
        accepted = "given, or the run kept in a folder: out of jfcl.simulate (--out on the command line)"
        check(self._folder is not None or run.folder is not None, "folder", self._folder, accepted)
        folder = Path(self._folder or run.folder / "tensorboard")
        # A file of its own for every part of a run; events of earlier parts after `run.round` are void.
        part = {"purge_step": run.round + 1, "filename_suffix": f".{run.round}"}
        self._writer = self._library.SummaryWriter(str(folder), **part)
        _tell(f"{folder}; to see them: tensorboard --logdir {shlex.quote(str(folder))}")
        texts = {name: str(v).replace("|", r"\|") for name, v in run.config.items() if v is not None}
        lines = [f"| {name} | {text} |" for name, text in texts.items()]
        self._writer.add_text("config", "\n".join(["| option | value |", "|---|---|", *lines]), run.round)

    def on_records(self, records: list[dict[str, Any]]) -> None:
        for name, value in scalars(records).items():
            self._writer.add_scalar(name, value, records[0]["round"])

    def on_checkpoint(self, round: int, folder: Path) -> None:
        self._writer.flush()

    def on_end(self, end: End) -> None:
        self._writer.add_text("ended", f"{end.status}: {end.reason}", end.round)
        self._writer.close()


class WandB(Callback):
    """A tracker that logs to Weights & Biases: the numbers of the records against `round`, and the configuration.

    A resumed run continues the run of the same identity, kept in the run's folder; rounds that run again are logged
    again, with equal values. With `mode="offline"` (or WANDB_MODE=offline) each part has files of its own, which
    `wandb sync` joins.

    Args:
      options: of `wandb.init`; default of `project`: WANDB_PROJECT, or "jfcl".
    """

    def __init__(self, **options: Any):
        self._library, self._options = _library("wandb", "wandb"), options

    def on_start(self, run: RunInfo) -> None:
        identity = _identities(run.folder).get("wandb") or secrets.token_hex(8)
        _keep_identity(run.folder, "wandb", identity)
        options = {"project": os.environ.get("WANDB_PROJECT", "jfcl"), "name": _name_of(run), "dir": run.folder}
        options |= {"id": identity, "resume": "allow", "config": run.config}
        self._run = self._library.init(**(options | self._options))
        self._run.define_metric("*", step_metric="round")
        folder = shlex.quote(str(Path(self._run.dir).parent))
        _tell(self._run.url or f"{folder}; to upload them after the run: wandb sync {folder}")

    def on_records(self, records: list[dict[str, Any]]) -> None:
        self._run.log({"round": records[0]["round"], **scalars(records)})

    def on_end(self, end: End) -> None:
        self._run.summary["ended"] = f"{end.status}: {end.reason}"
        self._run.finish(exit_code=int(end.status == "failed"))


class MLflow(Callback):
    """A tracker that logs to MLflow: the numbers of the records by round, and the configuration as parameters.

    Args:
      tracking_uri: of the server, or of local files; default: that of MLflow (MLFLOW_TRACKING_URI).
      experiment: its name; default: MLFLOW_EXPERIMENT_NAME, or "jfcl".
    """

    def __init__(self, tracking_uri: str | None = None, experiment: str | None = None):
        self._library, self._uri = _library("mlflow", "mlflow"), tracking_uri
        self._experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", "jfcl")

    def on_start(self, run: RunInfo) -> None:
        self._client = self._library.MlflowClient(self._uri)
        self._id = _identities(run.folder).get("mlflow")
        uri = self._uri or self._library.get_tracking_uri()
        view = "" if uri.startswith("http") else f"; to see them: mlflow ui --backend-store-uri {shlex.quote(uri)}"
        _tell(f"{uri}, experiment {self._experiment}{view}")
        if self._id is not None:
            self._client.update_run(self._id, status="RUNNING")
            return
        existing = self._client.get_experiment_by_name(self._experiment)
        experiment = self._client.create_experiment(self._experiment) if existing is None else existing.experiment_id
        self._id = self._client.create_run(experiment, run_name=_name_of(run)).info.run_id
        _keep_identity(run.folder, "mlflow", self._id)
        values = {name: str(value)[:LONGEST] for name, value in run.config.items() if value is not None}
        self._client.log_batch(self._id, params=[self._library.entities.Param(*pair) for pair in values.items()])

    def on_records(self, records: list[dict[str, Any]]) -> None:
        when, metric = (int(1000 * time.time()), records[0]["round"]), self._library.entities.Metric
        metrics = [metric(name, value, *when) for name, value in scalars(records).items()]
        for first in range(0, len(metrics), MOST_METRICS):  # those of many seeds
            self._client.log_batch(self._id, metrics=metrics[first : first + MOST_METRICS])

    def on_end(self, end: End) -> None:
        self._client.set_tag(self._id, "ended", f"{end.status}: {end.reason}")
        self._client.set_terminated(self._id, STATUS[end.status])


TRACKERS = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}  # each name is that of an extra, too


def tracker(name: str) -> Callback:
    """Returns the tracker of `jfcl run --track NAME`, with its default options.

    Example:
      >>> tracker("tensorbord")
      Traceback (most recent call last):
      ValueError: unknown track 'tensorbord': did you mean 'tensorboard'? Accepted: tensorboard, wandb, mlflow
    """
    check_choice("track", name, TRACKERS)
    return TRACKERS[name]()
