"""The placement of the clients' data on devices, of one process or of several."""

import math

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jfcl.core import Clients, Task, check, client_ids, num_clients, shape_struct
from jfcl.mapping.axis import Mapping, platform_of, sharded


def num_rows(client_axis: Mapping, count: int) -> int:
    """Returns `count` plus the number of padding clients: a multiple of the devices of `client_axis`.

    Example:
      >>> import jfcl
      >>> num_rows(jax.vmap, 7), num_rows(sharded(jfcl.client_mesh(1)), 7)
      (7, 7)
    """
    return count if not isinstance(client_axis, sharded) else count + -count % client_axis.mesh.size


def own_rows(client_axis: Mapping, count: int) -> slice:
    """Returns the rows of `count` clients that this process holds: with several processes, those of its devices.

    The last devices may have fewer: 5 clients on 4 processes of one device are 2, 2, 1 and 0. Raises `ValueError` for a
    mesh without devices of this process, or in which they are not adjacent.

    Example:
      >>> own_rows(jax.vmap, 7)
      slice(0, 7, None)
    """
    if not isinstance(client_axis, sharded) or jax.process_count() == 1:
        return slice(0, count)
    total = num_rows(client_axis, count)
    per_device = total // client_axis.mesh.size
    ranks = [i for i, d in enumerate(client_axis.mesh.devices.flat) if d.process_index == jax.process_index()]
    check(len(ranks) > 0, "mesh", client_axis.mesh, f"of devices of every process, also of {jax.process_index()}")
    together = ranks[-1] - ranks[0] == len(ranks) - 1
    check(together, "mesh", client_axis.mesh, "one with the devices of a process next to each other")
    return slice(min(ranks[0] * per_device, count), min((ranks[-1] + 1) * per_device, count))


def place(client_axis: Mapping, clients: Clients, count: int | None = None) -> Clients:
    """Puts `clients` on the device, or divides them among the devices of a `sharded` mapping.

    `clients` are on the host; with several processes, those of this process (`own_rows`), with their ids, of `count`
    clients of all. The result has JAX arrays of `num_rows` rows: the last ones may be padding clients without examples,
    with the ids after the largest one.
    """
    if not isinstance(client_axis, sharded):
        return jax.device_put(clients._replace(size=np.asarray(clients.size)))
    count = num_clients(clients) if count is None else count
    total = num_rows(client_axis, count)
    sharding = NamedSharding(client_axis.mesh, PartitionSpec(client_axis.mesh.axis_names))
    rows = own_rows(client_axis, total)  # of the padded rows
    missing = rows.stop - rows.start - num_clients(clients)

    def put(x, padding=None):
        x = np.asarray(x)
        if missing:
            padding = np.zeros((missing, *x.shape[1:]), x.dtype) if padding is None else padding
            x = np.concatenate([x, padding])
        return jax.make_array_from_process_local_data(sharding, x, (total, *x.shape[1:]))

    ids = np.asarray(client_ids(clients)) + (rows.start if clients.id is None else 0)
    beyond = np.arange(1, missing + 1, dtype=ids.dtype) + ids.max(initial=rows.start - 1)
    return Clients(jax.tree.map(put, clients.examples), put(clients.size), put(ids, beyond))


def held(client_axis: Mapping, task: Task | None, clients: Clients | None) -> Clients | None:
    """Returns `clients` in the shapes in which the devices of `client_axis` should hold them, before `place`.

    A TPU pads the last two axes of an array, which are 28 and 1 for images of MNIST, to 8 and 128. So on an accelerator
    a task with an `input_shape` has its inputs flat, `[N, M, d]`.
    """
    accepts_flat = task is not None and task.input_shape is not None and task.inputs is None
    if clients is None or not accepts_flat or platform_of(client_axis) == "cpu":
        return clients

    def flat(x):
        shape = (*x.shape[:2], math.prod(x.shape[2:])) if len(x.shape) > 3 else x.shape
        return shape_struct(x, shape) if isinstance(x, jax.ShapeDtypeStruct) else x.reshape(shape)

    return clients._replace(examples={**clients.examples, "x": jax.tree.map(flat, clients.examples["x"])})
