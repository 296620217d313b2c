"""Memory: what a program needs, checks before anything is computed, and clients in lots that need less of it."""

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jfcl import mapping
from jfcl.core import Algorithm, Clients, PyTree, Task, client_shapes, dense_start, max_examples, num_bytes, require
from jfcl.core.clients import num_clients, shape_struct
from jfcl.core.packed import unpacked
from jfcl.core.platforms import default_device
from jfcl.core.stacking import free_host_memory
from jfcl.mapping import hosts
from jfcl.mapping.jitted import jitted

# Bytes of a round's temporaries for each byte of the models and examples that train at once. On a CPU, only many models
# at once need much; on an accelerator, all layers' outputs of all clients are held, in padded layouts.
TEMPORARIES = {"cpu": 6, "gpu": 200, "tpu": 1000}
LOT = 2**15  # forward passes at once that keep an accelerator busy
_SIZE = re.compile(r"\b(\d+(?:\.\d+)?)([KMGT])(?:iB)?\b")  # in the errors of compilers
# A program of several devices of a CPU ends with another error than RESOURCE_EXHAUSTED.
_EXHAUSTED = re.compile(r"(?<=RESOURCE_EXHAUSTED: ).*[^.]|Out of memory.*[^.]")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class Memory(NamedTuple):
    """Bytes of a program on each chip, as its compiler counts them: padded layouts included."""

    arguments: int = 0
    results: int = 0
    temporaries: int = 0
    aliased: int = 0  # results that take the place of arguments

    @property
    def total(self) -> int:
        return self.arguments + self.results + self.temporaries - self.aliased


def in_lots(client_axis: mapping.Mapping, task: Task, clients: Clients, num_models: int = 1) -> mapping.Mapping:
    """Returns the mapping for losses of all examples: on an accelerator, of about `LOT` forward passes at once."""
    if mapping.platform_of(client_axis) == "cpu" or dense_start(task) is not None:
        return client_axis
    lot = mapping.chunked(max(LOT // (num_models * max_examples(clients)), 1))
    if isinstance(client_axis, mapping.sharded) and client_axis.inner is jax.vmap:
        return replace(client_axis, inner=lot)
    return lot if client_axis is jax.vmap else client_axis


def memory_of(compiled: Any) -> Memory:
    """Returns the bytes of a compiled program on each device; zeros where its compiler counts none."""
    analysis, parts = compiled.memory_analysis(), ("argument", "output", "temp", "alias")
    return Memory(*(int(getattr(analysis, f"{part}_size_in_bytes", 0)) for part in parts))


def exhausted(error: Exception) -> int | None:
    """Returns the bytes that a program would need, from the error of a compiler that refuses it; None for another."""
    text = str(error)
    if "RESOURCE_EXHAUSTED" not in text:
        return None
    sizes = [float(number) * _UNITS[unit] for number, unit in _SIZE.findall(text[:2000])]
    return int(max(sizes, default=0))


@contextlib.contextmanager
def out_of_memory() -> Iterator[None]:
    """Raises a `MemoryError` with a remedy where a device has no memory left for what runs inside; also a decorator."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        text = "".join(_EXHAUSTED.findall(str(error).splitlines()[0]))
        of_device = re.search("memory|allocat", text, re.IGNORECASE) and "Shared memory" not in text  # of a kernel
        if not of_device or hosts.is_of_a_lost_process(error):
            raise
        remedy = "train fewer clients at once (--chunk C, jfcl.chunked(C)), run fewer seeds, or end other programs here"
        raise MemoryError(f"{text[:200]}; {remedy}. The last checkpoint of a run in a folder is kept") from error


def free_memory() -> float:
    """Returns the free bytes of the default device (for a CPU: of the machine); infinite where they are not known."""
    device = default_device()
    if device.platform == "cpu":
        return free_host_memory()
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit", 0)
    return limit - stats["bytes_in_use"] if limit > 0 else float("inf")


def sharding_of(x: Any, mesh: Mesh, rows: int, axis: int = 0) -> NamedSharding:
    """Returns how an array of a round lies on `mesh`: divided along `axis` if that has the `rows` of all clients."""
    divided = np.shape(x)[axis : axis + 1] == (rows,)
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, mesh.axis_names) if divided else PartitionSpec())


def on_mesh(tree: PyTree, mesh: Mesh | None, rows: int, axis: int = 0) -> PyTree:
    """Returns the shapes of the arrays of a round on `mesh`, or on the default device; see `sharding_of`."""
    place = lambda x: None if mesh is None else sharding_of(x, mesh, rows, axis)  # noqa: E731
    return jax.tree.map(lambda x: shape_struct(x, np.shape(x), place(x)), tree)


def needed_memory(algorithm: Algorithm, clients: Clients, client_axis: mapping.Mapping) -> int:
    """Returns the bytes of one round with all `clients` (or their shapes) on each device, beside the clients' data.

    They are the compiler's own count, or, for a round that it refuses because it does not fit, those that it names.
    """
    mesh = client_axis.mesh if isinstance(client_axis, mapping.sharded) else None
    rows = mapping.num_rows(client_axis, num_clients(clients))
    shapes = on_mesh(client_shapes(clients, rows), mesh, rows)
    key = on_mesh(jax.eval_shape(lambda: jax.random.key(0)), mesh, rows)
    state = on_mesh(jax.eval_shape(algorithm.init, key, shapes), mesh, rows)
    data = num_bytes(shapes) // (1 if mesh is None else mesh.size)
    try:
        compiled = jitted(algorithm.step).lower(key, state, shapes).compile()
    except jax.errors.JaxRuntimeError as error:
        needed = exhausted(error)
        if needed is None:
            raise
        return max(needed - data, int(min(free_memory(), 1e15)) + 1)
    return max(memory_of(compiled).total - data, 0)


def check_memory(
    algorithm: Algorithm,
    clients: Clients,
    client_axis: mapping.Mapping,
    state: PyTree,
    *,
    copies: int | None = None,
    tests: Sequence[Clients] = (),
    seeds_at_once: int = 1,
) -> None:
    """Raises `ValueError`, with the number of clients at once that may fit, unless a run fits into memory.

    The sum is of the data, `tests` and twice the state, old and new; shapes are enough. `copies` of the data will be
    made: by default one, or none where the only device is the CPU, which uses the host's arrays. The temporaries of a
    round are those of the compiled program, which is compiled only where it might not fit.
    """
    n, free, parts, inner = num_clients(clients), free_memory(), 1, client_axis
    if hosts.several():  # all processes decide alike
        free = 1e6 * float(hosts.everybodys([int(min(free, 1e15) / 1e6)]).min())
    kind, sharing = mapping.platform_of(client_axis), 1
    if isinstance(client_axis, mapping.sharded):
        inner = client_axis.inner  # the devices that a CPU is divided into share its memory
        parts = jax.process_count() if kind == "cpu" else client_axis.mesh.size
        sharing = client_axis.mesh.size // parts

    def size(tree, skip=0):
        return float(sum(np.prod(x.shape[skip:]) * x.dtype.itemsize for x in jax.tree.leaves(tree)))

    # What stays on a device.
    if copies is None:
        copies = 0 if kind == "cpu" and inner is client_axis else 1
    data = (copies * size(clients.examples) + min(copies, 1) * sum(size(c.examples) for c in tests)) / parts
    models = sum(size(x) / (parts if x.shape[1:2] == (n,) else 1) for x in jax.tree.leaves(state))
    are_free = f"GB of memory, and {free / 1e9:.1f} GB are free"
    needed, advice = data + 2 * models, "use fewer clients or examples, or a smaller model"
    require(needed < free, f"data, models and states need {needed / 1e9:.1f} {are_free}; {advice}")

    # What a round needs beside.
    per_part = -(-n // parts)
    at_once = min(inner.size, per_part) if isinstance(inner, mapping.chunked) else per_part
    of_seed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state)
    served = jax.eval_shape(lambda state: algorithm.serve(state, None).models, of_seed)
    examples = jax.eval_shape(unpacked, clients.examples)  # as a round uses them
    model, example = size(served, 1), size(examples, 1)  # of `[K, ...]` and `[N, ...]`
    training = at_once * (model + example) if at_once > 1 or kind != "cpu" else 0
    if TEMPORARIES.get(kind, TEMPORARIES["gpu"]) * seeds_at_once * max(training, per_part * model) < free:
        return
    needed = seeds_at_once * sharing * needed_memory(algorithm, clients, client_axis)
    fits = int(at_once * (free - data) / max(needed, 1))  # at most: the results of all clients do not shrink
    chunks = f"chunks of at most {fits} clients (--chunk {fits}, jfcl.chunked({fits})) may fit"
    advice = chunks if fits else "use fewer clients or a smaller model"
    require(data + needed < free, f"a round needs {(data + needed) / 1e9:.1f} {are_free}; {advice}")
