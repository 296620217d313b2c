"""Checks of memory, before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from jfcl.core import Algorithm, Clients, PyTree, check, free_host_memory, num_clients
from jfcl.execution import hosts, mapping


def free_memory() -> float:
    """Returns the free bytes of the default device (for a CPU: of the machine); infinite where they are not known."""
    device = jax.local_devices()[0]
    stats = None if device.platform == "cpu" else device.memory_stats()
    if stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    return free_host_memory()


def needed_memory(algorithm: Algorithm, clients: Clients, client_axis: mapping.Mapping) -> int:
    """Returns the bytes of temporaries and results of one round with all `clients` (or their shapes), on each device.

    They are from the analysis of the compiled program. Nothing is run, and no data are placed. Cost: a compilation.
    """
    rows = mapping.num_rows(client_axis, num_clients(clients))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *np.shape(x)[1:]), x.dtype), clients)
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(algorithm.init, key, shapes)
    analysis = jax.jit(algorithm.step).lower(key, state, shapes).compile().memory_analysis()
    return 0 if analysis is None else int(analysis.temp_size_in_bytes + analysis.output_size_in_bytes)


def check_memory(
    algorithm: Algorithm,
    clients: Clients,
    client_axis: mapping.Mapping,
    state: PyTree,
    *,
    copies: int | None = None,
    others: Sequence[Clients] = (),
    seeds_at_once: int = 1,
) -> None:
    """Checks that a run fits into memory, before anything is computed.

    The sum is of the data, `others` (those of tests) and twice the state, old and new; shapes are enough. `copies` of
    the data will be made: by default one, or none where the only device is the CPU, which uses the host's arrays. The
    temporaries of a round are those of the compiled program, which is compiled only where it might not fit: where many
    clients train at once, or where the updates of all clients together are large.

    Raises:
      ValueError: with the bytes needed, the free bytes, and the number of clients at once that may fit.
    """
    n, free, parts, inner = num_clients(clients), free_memory(), 1, client_axis
    if hosts.several():  # all processes decide alike
        free = 1e6 * float(hosts.everybodys([int(min(free, 1e15) / 1e6)]).min())
    if isinstance(client_axis, mapping.sharded):
        inner = client_axis.inner  # the devices that a CPU is divided into share its memory
        parts = jax.process_count() if mapping.platform_of(client_axis) == "cpu" else client_axis.mesh.size

    def size(tree, skip=0):
        return float(sum(np.prod(x.shape[skip:]) * x.dtype.itemsize for x in jax.tree.leaves(tree)))

    if copies is None:
        copies = 0 if mapping.platform_of(client_axis) == "cpu" and inner is client_axis else 1
    data = copies * sum(size(c.examples) for c in (clients, *others)) / parts
    models = sum(size(x) / (parts if x.shape[1:2] == (n,) else 1) for x in jax.tree.leaves(state))
    check(
        data + 2 * models < free,
        "memory",
        f"{(data + 2 * models) / 1e9:.1f} GB of data, models and states",
        f"at most the {free / 1e9:.1f} GB that are free; use fewer clients or examples, or a smaller model",
    )
    at_once = inner.size if isinstance(inner, mapping.chunked) else -(-n // parts)
    model, example = size(state.params, 2), size(clients.examples, 1)  # of `[R, K, ...]` and `[N, ...]`
    training = at_once * (model + example) if at_once > 1 else 0
    if 3 * seeds_at_once * max(training, -(-n // parts) * model) < free / 2:
        return
    needed = seeds_at_once * needed_memory(algorithm, clients, client_axis)
    fits = int(at_once * (free - data) / needed)  # at most: the results of all clients do not shrink
    chunks = f"chunks of at most {fits} clients (--chunk {fits}, jfcl.chunked({fits})) may fit"
    advice = chunks if 0 < fits < at_once else "use fewer clients or a smaller model"
    check(
        data + needed < free,
        "memory",
        f"{(data + needed) / 1e9:.1f} GB",
        f"at most the {free / 1e9:.1f} GB that are free; {advice}",
    )
