"""Server work where the clients are divided among devices: each device has all clients, and a share of the columns."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jfcl import mapping
from jfcl.core import PyTree
from jfcl.kernels.base import COLUMNS


def over_columns(client_axis: mapping.Mapping, kernel: Callable[..., tuple[PyTree, PyTree]]) -> Callable[..., Any]:
    """Maps a kernel over the columns of stacked clients where the clients are divided among devices.

    Each device then has all clients' rows of its share of the columns. What kernels sum over columns is summed over the
    devices (`jfcl.kernels.base.sum_over_columns`). `kernel` is `(stacked, *arguments) -> (columns, result)`: `stacked`
    is a pytree of `[N, ...]`, or several of one structure in a list; `columns` is `()`, or a pytree like it with any
    number of rows; `result` is the same on all devices.
    """
    if not isinstance(client_axis, mapping.sharded):
        return kernel
    mesh = Mesh(client_axis.mesh.devices.reshape(-1), (COLUMNS,), axis_types=(AxisType.Auto,))
    columns, same = PartitionSpec(None, COLUMNS), PartitionSpec()

    def as_matrix(x):
        x = x.reshape(len(x), -1)
        return jnp.pad(x, ((0, 0), (0, -x.shape[1] % mesh.size)))

    def as_placed(x):  # otherwise the compiler may divide earlier arrays into columns, too, with more communication
        divided = NamedSharding(client_axis.mesh, PartitionSpec(client_axis.mesh.axis_names))
        return x if len(x) % mesh.size else jax.lax.with_sharding_constraint(x, divided)

    def mapped(stacked, *arguments):
        specs = (columns, *[same] * len(arguments))
        run = jax.shard_map(kernel, mesh=mesh, in_specs=specs, out_specs=(columns, same), check_vma=False)
        moved, result = run(jax.tree.map(lambda x: as_matrix(as_placed(x)), stacked), *arguments)
        shapes = [x.shape[1:] for x in jax.tree.leaves(stacked[0] if isinstance(stacked, list) else stacked)]
        leaves, structure = jax.tree.flatten(moved)  # `shapes` beyond them are of no result
        leaves = [x[:, : math.prod(s)].reshape(len(x), *s) for x, s in zip(leaves, shapes, strict=False)]
        return jax.tree.unflatten(structure, leaves), result

    return mapped


def on_every_device(client_axis: mapping.Mapping, tree: PyTree) -> PyTree:
    """Returns small arrays of clients, such as losses `[C, K]`, on every device: divided, loops would send messages."""
    if not isinstance(client_axis, mapping.sharded):
        return tree
    same = NamedSharding(client_axis.mesh, PartitionSpec())
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, same), tree)


def on_copies(client_axis: mapping.Mapping, server: Callable[..., Any]) -> Callable[..., Any]:
    """Maps small work of the server such that every device does all of it, on copies of the arguments.

    The compiler would divide some array of clients, such as a mask, and send messages in every step of a loop.
    """
    if not isinstance(client_axis, mapping.sharded):
        return server
    same = PartitionSpec()
    return jax.shard_map(server, mesh=client_axis.mesh, in_specs=same, out_specs=same, check_vma=False)
