"""The client axis: mappings from a function of one client to a function of all clients.

A *mapping* has the interface of `jax.vmap`: `mapping(fn, in_axes=0)` turns `fn` of one client into a function of
stacked clients. `jax.vmap` is one; `chunked(size)` bounds memory by vmapping `size` clients at a time; `sharded(mesh,
inner)` divides the clients among devices, of one process or of several, `pmapped` among those of one, as `jax.pmap`.
Results are the same. On a CPU one client at a time is the fastest, even more with a forced host device per core; on an
accelerator `jax.vmap` is.

Servers that need only sums over clients use `map_reduce`, which never holds the updates of all clients at once:
`O(chunk * D + K * D)` memory instead of `O(N * D)`, and only the sums are communicated between devices.

Methods map their clients by these functions alone, and leave loops and `jax.shard_map` to `jfcl.mapping`.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from jfcl.core import PyTree, check, check_count, platform
from jfcl.core.parameters import is_key

Mapping = Callable[..., Callable[..., Any]]

# Chunks that are summed separately before their sums are added. In float32, the error of a sum that grows by one client
# at a time is 3e-5 after 10,000 clients, and 1e-2 after a million.
BLOCK = 1024
MOST_CPU_DEVICES = 1024  # more take long to start, and are of no use


def _stacked(mapping: Mapping, fn: Callable[..., Any], in_axes: Any = 0) -> Callable[..., Any]:
    """Returns `mapping(fn, in_axes)`, the second result of a `map_reduce`."""
    reduced = map_reduce(mapping, lambda *args: ((), fn(*args)), lambda total, sent: total, (), in_axes)
    return lambda *args: reduced(*args)[1]


class chunked(NamedTuple):
    """A mapping of `size` clients at a time: `vmap` inside, a sequential loop outside.

    Memory falls from `O(N)` to `O(size)` copies of a client's temporaries.

    Attributes:
      size: clients per chunk, at least 1. Where it does not divide `N`, a smaller last chunk is compiled, too.

    Example:
      >>> import jax.numpy as jnp
      >>> chunked(2)(lambda x: x * x)(jnp.arange(5)).tolist()
      [0, 1, 4, 9, 16]
    """

    size: int
    __call__ = _stacked


@dataclass(frozen=True)
class sharded:
    """A mapping that divides the clients among the devices of `mesh`; each device maps its own with `inner`.

    Where the number of clients is not a multiple of the devices, every call appends rows of zeros; `place` does it once
    for a whole simulation. In `map_reduce`, such rows must add nothing to the total, as clients of size 0 do.

    Attributes:
      mesh: from `client_mesh`, or any mesh of `AxisType.Auto` axes in which the devices of a process lie next to each
        other; clients are divided along all of them.
      inner: the mapping of a device's own clients: `jax.vmap` or `chunked(size)`; default: `auto()` for its devices.

    Example:
      >>> import jax.numpy as jnp
      >>> sharded(client_mesh())(lambda x: x * x)(jnp.arange(5)).tolist()
      [0, 1, 4, 9, 16]
    """

    mesh: Mesh
    inner: Mapping | None = None
    __call__ = _stacked

    def __post_init__(self):
        if self.inner is None:
            object.__setattr__(self, "inner", auto(self.mesh))


@dataclass(frozen=True)
class pmapped:
    """As `sharded` over the first `num_devices` devices of this process, as `jax.pmap` divides (by `jax.shard_map`).

    `num_devices` is at most the devices of this process; default: all of them. `inner` is the mapping of a device's own
    clients; default: `auto()`.

    Example:
      >>> import jax.numpy as jnp
      >>> pmapped()(lambda x: x * x)(jnp.arange(5)).tolist()
      [0, 1, 4, 9, 16]
    """

    num_devices: int | None = None
    inner: Mapping | None = None
    __call__ = _stacked

    def __post_init__(self):
        if self.inner is None:
            object.__setattr__(self, "inner", auto())


def num_cores() -> int:
    """Returns the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def divide_cpu(count: int) -> None:
    """Divides the CPU into `count` devices, if JAX has not started its backend yet; else it keeps its devices."""
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", min(count, MOST_CPU_DEVICES))


def use_all_cores() -> Mapping:
    """Divides the CPU into a device for every core, and returns the mapping that divides the clients among them.

    One client rarely keeps all cores busy; two devices train two clients. Give the mapping to the factory and to
    `simulate`, both as `client_axis`. On an accelerator, and on one core, it is `auto()`. Call this function before JAX
    is first used, as the command line does by itself. A CPU that is divided already stays as it is.

    Raises `RuntimeError` if JAX has already started with a single device.

    Example:
      >>> client_axis = use_all_cores()  # doctest: +SKIP
      >>> client_axis  # of 2 cores  # doctest: +SKIP
      sharded(mesh=Mesh('clients': 2, axis_types=(Auto,)), inner=chunked(size=1))
    """
    divide_cpu(num_cores())
    if idle_cores():
        why = f"jax has started with one device for {num_cores()} cores"
        raise RuntimeError(f"{why}; call jfcl.use_all_cores() in a new process, before anything that uses jax")
    return auto() if platform() != "cpu" or num_cores() == 1 else sharded(client_mesh())


def idle_cores() -> int:
    """Returns the number of cores without a device of their own where the CPU is one device; else 0."""
    return num_cores() - 1 if platform() == "cpu" and jax.device_count() == 1 else 0


def client_mesh(num_devices: int | None = None) -> Mesh:
    """Returns a mesh with one axis, `"clients"`, over the first `num_devices` devices of all processes (default: all).

    The devices of a process are adjacent, so that its clients are too. (`jax.make_mesh` orders the devices of a TPU
    slice by their wiring, across processes.) A CPU is one device, unless `use_all_cores`, the command line, or
    `jax.config.update("jax_num_cpu_devices", 2)` at the beginning of a program has divided it.

    Raises `ValueError` for more devices than there are.

    Example:
      >>> client_mesh(1).size
      1
    """
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    wanted = len(devices) if num_devices is None else num_devices
    check_count("num_devices", wanted)
    hint = ""
    if devices[0].platform == "cpu":
        hint = '; more of a CPU are forced by jax.config.update("jax_num_cpu_devices", n) before jax is first used'
    check(wanted <= len(devices), "num_devices", wanted, f"at most the {len(devices)} there are{hint}")
    return Mesh(np.array(devices[:wanted]), ("clients",), axis_types=(AxisType.Auto,))


def platform_of(client_axis: Mapping | None) -> str:
    """Returns the platform of a mapping's devices: that of its mesh, or of the default device where it has none."""
    return platform(client_axis.mesh.devices.flat if isinstance(client_axis, sharded) else None)


def auto(mesh: Mesh | None = None) -> Mapping:
    """Returns the mapping for a device: one client at a time on a CPU, all at once on an accelerator.

    The device is one of `mesh`, by default JAX's default device.

    Example:
      >>> auto()(lambda x: x + 1)(jnp.zeros(3)).tolist()
      [1.0, 1.0, 1.0]
    """
    return chunked(1) if platform(mesh and mesh.devices.flat) == "cpu" else jax.vmap


def or_auto(client_axis: Mapping | None) -> Mapping:
    """Returns `client_axis`, or `auto()` for None; raises `ValueError` for what is no mapping, such as its name."""
    accepted = "a mapping, such as jax.vmap or jfcl.chunked(size)"
    check(client_axis is None or callable(client_axis), "client_axis", client_axis, accepted)
    return auto() if client_axis is None else client_axis


def map_reduce(
    mapping: Mapping,
    fn: Callable[..., tuple[PyTree, PyTree]],
    fold: Callable[[PyTree, PyTree], PyTree],
    zero: PyTree,
    in_axes: Any = 0,
) -> Callable[..., tuple[PyTree, PyTree]]:
    """Maps `fn` over clients, folds one of its two results into a running total and stacks the other.

    Args:
      mapping: `jax.vmap`, one of this file, or any function with their interface.
      fn: function of ONE client that returns `(sent, result)`.
      fold: `(total, sent stacked over some clients [c, ...]) -> total`. It must be a sum: folding two parts in
        sequence, or separately with an addition of the totals, equals folding all at once.
      zero: the total of no clients.
      in_axes: as in `jax.vmap`: 0 or None for every argument, or a tuple of them.

    Returns:
      A function of stacked arguments that returns `(total, results stacked [N, ...])`.

    Example:
      >>> import jax.numpy as jnp
      >>> add = lambda total, sent: total + sent.sum(axis=0)
      >>> total, squares = map_reduce(chunked(2), lambda x: (x, x * x), add, 0.0)(jnp.arange(3.0))
      >>> float(total), squares.tolist()
      (3.0, [0.0, 1.0, 4.0])
    """
    if isinstance(mapping, chunked):
        return _in_chunks(mapping.size, fn, fold, zero, in_axes)
    if isinstance(mapping, (sharded, pmapped)):
        return _over_devices(mapping, fn, fold, zero, in_axes)

    def whole(*args):
        sent, results = mapping(fn, in_axes=in_axes)(*args)
        return fold(zero, sent), results

    return whole


def _axes_of(args: tuple, in_axes: Any) -> tuple[tuple[int | None, ...], int]:
    """Returns `in_axes` as one entry, 0 or None, for each argument, and the number of clients."""
    axes = tuple(in_axes) if isinstance(in_axes, (tuple, list)) else (in_axes,) * len(args)
    leaves = jax.tree.leaves([arg for arg, axis in zip(args, axes, strict=True) if axis is not None])
    leading = len(leaves) > 0 and all(axis in (None, 0) for axis in axes)
    check(leading, "in_axes", in_axes, "0 and None only, and one 0: this mapping takes leading axes")
    lengths = {np.shape(leaf)[:1] for leaf in leaves}  # a slice beyond the end of one would be moved to its last rows
    fits = len(lengths) == 1 and min(lengths) > (0,)
    check(fits, "stacked arguments", sorted(lengths), "of one length, at least one client")
    return axes, lengths.pop()[0]


def _of_clients(fn: Callable, args: Any, axes: tuple) -> list:
    """Applies `fn` to all arrays of those arguments that are stacked over clients."""
    return [arg if axis is None else jax.tree.map(fn, arg) for arg, axis in zip(args, axes, strict=True)]


def _in_chunks(most: int, fn, fold, zero, in_axes):
    """Returns the `map_reduce` of `chunked(most)`."""
    check_count("chunk size", most)

    def reduced(*args):
        axes, n = _axes_of(args, in_axes)
        size = min(most, n)

        def one_chunk(total, first, count=size):
            """Returns the total with `count` clients from row `first` on, and their results."""

            def row(x):  # one client has no client axis, so that XLA compiles plain matrix products and convolutions
                rows = jax.lax.dynamic_slice_in_dim(x, first, count)
                return rows[0] if count == 1 else rows

            taken = _of_clients(row, args, axes)
            if count == 1:
                sent, results = jax.tree.map(lambda x: jnp.asarray(x)[None], fn(*taken))
            else:
                sent, results = jax.vmap(fn, in_axes=axes)(*taken)
            return fold(total, sent), results

        def flat(results):
            return jax.tree.map(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), results)

        # Scans over row numbers, not over rows: the data are not reshaped, and so not copied into the loop.
        def one_block(total, first):
            part, results = jax.lax.scan(one_chunk, nothing, first + jnp.arange(BLOCK) * size)
            return jax.tree.map(jnp.add, total, part), flat(results)

        nothing = jax.tree.map(jnp.asarray, zero)
        total, parts, chunks = nothing, [], n // size
        blocks = chunks // BLOCK if chunks > 8 * BLOCK and jax.tree.leaves(zero) else 0
        if blocks:
            total, results = jax.lax.scan(one_block, nothing, jnp.arange(blocks) * BLOCK * size)
            parts.append(flat(results))
        if chunks > blocks * BLOCK:
            part, results = jax.lax.scan(one_chunk, nothing, jnp.arange(blocks * BLOCK, chunks) * size)
            total = jax.tree.map(jnp.add, total, part) if blocks else part
            parts.append(flat(results))
        if n % size:
            total, results = one_chunk(total, n - n % size, n % size)
            parts.append(results)
        return total, parts[0] if len(parts) == 1 else jax.tree.map(lambda *x: jnp.concatenate(x), *parts)

    return reduced


def _over_devices(mapping: sharded | pmapped, fn, fold, zero, in_axes):
    """Returns the `map_reduce` of `sharded` and `pmapped`: each device folds its clients, and totals are summed."""
    nested = isinstance(mapping.inner, (sharded, pmapped))
    check(not nested, "inner", mapping.inner, "the mapping of one device's clients: jax.vmap or jfcl.chunked(size)")

    def reduced(*args):
        axes, n = _axes_of(args, in_axes)
        mesh = _mesh_of(mapping)
        divided = PartitionSpec(mesh.axis_names)

        def on_device(zero, *args):
            total, results = map_reduce(mapping.inner, fn, fold, zero, axes)(*args)
            return jax.lax.psum(total, mesh.axis_names), results

        # With check_vma=True, a gradient inside with respect to parameters that all devices share would silently be
        # summed over devices: clients would train on each other's data.
        mapped = jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=tuple(PartitionSpec() if axis is None else divided for axis in (None, *axes)),
            out_specs=(PartitionSpec(), divided),
            check_vma=False,
        )
        nothing = jax.tree.map(jnp.asarray, zero)
        with _arrays_from_outside():
            if not n % mesh.size:
                return mapped(nothing, *args)
            total, results = mapped(nothing, *_of_clients(lambda x: _pad(x, -n % mesh.size), args, axes))
        return total, jax.tree.map(lambda x: x[:n], results)

    return reduced


@contextlib.contextmanager
def _arrays_from_outside() -> Iterator[None]:
    """Says what to do where JAX refuses an array that a function takes from outside, as `zeros_like` of a model."""
    try:
        yield
    except ValueError as error:
        if not str(error).startswith("Context mesh"):
            raise
        how = "give models to the function of one as arguments, client_axis(fn, in_axes=(None, 0))(model, examples)"
        raise ValueError(f"devices divide the clients: {how}") from error


def _mesh_of(mapping: sharded | pmapped) -> Mesh:
    """Returns the mesh of the devices of a mapping."""
    if isinstance(mapping, sharded):
        check(isinstance(mapping.mesh, Mesh), "sharded: mesh", mapping.mesh, "a mesh, such as jfcl.client_mesh()")
        return mapping.mesh
    here = jax.local_devices()
    count = len(here) if mapping.num_devices is None else mapping.num_devices
    check_count("pmapped: num_devices", count, most=len(here))
    return Mesh(np.array(here[:count]), ("clients",), axis_types=(AxisType.Auto,))


def _pad(x: jax.Array, count: int) -> jax.Array:
    """Appends `count` rows of zeros (for keys: of the first key) to `x` `[N, ...]`."""
    x = jnp.asarray(x)
    first = jnp.broadcast_to(x[:1], (count, *x.shape[1:]))
    return jnp.concatenate([x, first if is_key(x) else jnp.zeros_like(first)])
