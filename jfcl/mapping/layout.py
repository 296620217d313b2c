"""The shapes in which devices hold the clients' examples."""

from __future__ import annotations

import math

import jax

from jfcl import mapping
from jfcl.core import Clients, Task, shape_struct


def held(client_axis: mapping.Mapping, task: Task | None, clients: Clients | None) -> Clients | None:
    """Returns `clients` in the shapes in which the devices of `client_axis` should hold them, before `place`.

    A TPU pads the last two axes of an array, which are 28 and 1 for images of MNIST, to 8 and 128. So on an accelerator
    a task with an `input_shape` has its inputs flat, `[N, M, d]`. On a CPU, and for other tasks, nothing changes.

    Args:
      client_axis: the mapping of the simulation.
      task: of the method.
      clients: arrays, on the host or on a device, or their shapes (`jax.ShapeDtypeStruct`).

    Example:
      >>> import numpy as np
      >>> clients = Clients({"x": np.zeros((5, 9, 8, 8, 1)), "y": np.zeros((5, 9))}, np.full(5, 9))
      >>> held(jax.vmap, None, clients).examples["x"].shape
      (5, 9, 8, 8, 1)
    """
    accepts_flat = task is not None and task.input_shape is not None and task.inputs is None
    if clients is None or not accepts_flat or mapping.platform_of(client_axis) == "cpu":
        return clients
    x = clients.examples["x"]
    shape = (*x.shape[:2], math.prod(x.shape[2:])) if len(x.shape) > 3 else x.shape
    flat = shape_struct(x, shape) if isinstance(x, jax.ShapeDtypeStruct) else x.reshape(shape)
    return clients._replace(examples={**clients.examples, "x": flat})
