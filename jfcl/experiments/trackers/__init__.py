"""Trackers: callbacks that send the records of a run to TensorBoard, Weights & Biases or MLflow.

    jfcl.simulate(..., out="runs/x", callbacks=[jfcl.experiments.trackers.TensorBoard()])

With a run's folder, a resumed run continues its tracked run.
"""

from jfcl.core import check_choice
from jfcl.experiments.trackers.mlflow import MLflow
from jfcl.experiments.trackers.tensorboard import TensorBoard
from jfcl.experiments.trackers.wandb import WandB
from jfcl.simulation.callbacks import Callback

__all__ = ["TRACKERS", "MLflow", "TensorBoard", "WandB", "tracker"]

TRACKERS = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}  # each name is that of an extra, too


def tracker(name: str) -> Callback:
    """Returns the tracker of `jfcl run --track NAME`, with its default options.

    Raises:
      ValueError: an unknown name, or a tracker that is not installed.

    Example:
      >>> tracker("tensorbord")
      Traceback (most recent call last):
      ValueError: unknown track 'tensorbord': did you mean 'tensorboard'? Accepted: tensorboard, wandb, mlflow
    """
    check_choice("track", name, TRACKERS)
    return TRACKERS[name]()
