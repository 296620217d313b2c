"""Which mapping is the fastest for a task on this machine: a short probe, remembered for the next time."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from jfcl.core import Algorithm, Clients, num_bytes, num_clients
from jfcl.execution import hosts, mapping, memory
from jfcl.simulation.folder import environment, write_json

LEAST_CLIENTS = 64  # that are timed, where there are more than twice as many


def cache_dir() -> Path | None:
    """`$JFCL_CACHE_DIR`, else jfcl's folder in the user's cache; `None` if the variable is set to nothing."""
    named = os.environ.get("JFCL_CACHE_DIR")
    if named == "":
        return None
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jfcl"


def enough_clients(candidates: Iterable[mapping.Mapping]) -> int:
    """So many that every device has two of the largest chunks, and `LEAST_CLIENTS`, on which all mappings differ."""
    most = LEAST_CLIENTS * jax.process_count()
    for axis in candidates:
        inner, devices = (axis.inner, axis.mesh.size) if isinstance(axis, mapping.sharded) else (axis, 1)
        if isinstance(inner, mapping.chunked):
            most = max(most, 2 * inner.size * devices)
    return most


def seconds_per_client(algorithm: Algorithm, clients: Clients, client_axis: mapping.Mapping, few: int) -> float:
    """The faster of two rounds with `few` of the clients, after one that compiles, divided by their number.

    With all of them where there are less than twice as many, or where the method was told something of all: a cohort,
    true clusters, the size of groups.
    """
    some, n = num_clients(clients), hosts.total(num_clients(clients))
    own = mapping.own_rows(client_axis, few)
    holds = hosts.everybodys([some >= own.stop - own.start]).all()  # of the last processes' some are padding
    if n > 2 * few and holds and _takes(algorithm, clients, few):
        some, n = own.stop - own.start, few
    placed = mapping.place(client_axis, jax.tree.map(lambda x: x[:some], clients), n)
    step = jax.jit(algorithm.step)
    state = jax.jit(algorithm.init)(jax.random.key(0), placed)
    jax.block_until_ready(step(jax.random.key(1), state, placed))
    seconds = []
    for t in range(2):
        started = time.perf_counter()
        jax.block_until_ready(step(jax.random.key(t), state, placed))
        seconds.append(time.perf_counter() - started)
    return min(seconds) / n


def _takes(algorithm: Algorithm, clients: Clients, n: int) -> bool:
    """Whether `algorithm` does with `n` such clients."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    some = jax.tree.map(lambda x: jax.ShapeDtypeStruct((n, *np.shape(x)[1:]), x.dtype), clients)
    try:
        jax.eval_shape(algorithm.step, key, jax.eval_shape(algorithm.init, key, some), some)
    except ValueError:
        return False
    return True


def _known(file: Path | None) -> str | None:
    """The choice kept in `file`; None if there is none that can be read."""
    try:
        return None if file is None else json.loads(file.read_text())["fastest"]
    except (OSError, ValueError, TypeError, KeyError):
        return None


def fastest(
    make: Callable[[mapping.Mapping], Algorithm],
    clients: Clients,
    candidates: dict[str, mapping.Mapping],
    *,
    about: Any = None,
    show: bool = True,
) -> mapping.Mapping:
    """The candidate with the fastest rounds among those whose memory suffices; printed, and kept for the next time.

    Args:
      make: `(client_axis) -> Algorithm`.
      clients: training data, on the host.
      candidates: mappings by name.
      about: what besides shapes, device and versions decides the outcome, JSON-like: the method and its options.
        Without it nothing is looked up or kept.
      show: print the table to stderr.

    Returns:
      One of `candidates`. With several processes, the one that is the fastest for the first.

    Raises:
      ValueError: none fits into memory.

    Example:
      >>> import jfcl
      >>> from jfcl.testing import problem
      >>> clients, _, task, training = problem()
      >>> make = lambda axis: jfcl.fedavg(task, training, client_axis=axis)
      >>> fastest(make, clients, {"one at a time": jfcl.chunked(1)}, show=False)
      chunked(size=1)
    """
    sizes = [[list(np.shape(x)), str(x.dtype)] for x in jax.tree.leaves(clients)]
    key = hashlib.sha256(json.dumps([about, sizes, sorted(candidates), environment()]).encode()).hexdigest()[:16]
    folder = cache_dir()
    file = None if folder is None or about is None else folder / "mappings" / f"{key}.json"
    known = hosts.same_everywhere(_known(file))
    console = Console(stderr=True, quiet=not (show and hosts.is_first()))
    if known in candidates:
        console.print(f"mapping: {known}, as an earlier probe found ({file})")
        return candidates[known]

    limit = memory.free_memory() - num_bytes(clients.examples)
    n = hosts.total(num_clients(clients))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((n, *np.shape(x)[1:]), x.dtype), clients)
    table = Table(title="mapping: a short probe", title_justify="left")
    for head in ("mapping", "ms a client and round", "MB of temporaries"):
        table.add_column(head, justify="left" if head == "mapping" else "right")
    found, needs = {}, {}
    few = enough_clients(candidates.values())
    for name, axis in candidates.items():
        algorithm = make(axis)
        needs[name] = memory.needed_memory(algorithm, shapes, axis)
        fits = hosts.same_everywhere(needs[name] <= limit)
        if fits:
            found[name] = seconds_per_client(algorithm, clients, axis, few)
        table.add_row(name, f"{1000 * found[name]:.3g}" if fits else "too much memory", f"{needs[name] / 1e6:,.1f}")
    console.print(table)
    if not found:
        least = min(needs.values()) / 1e9
        raise ValueError(f"memory: {limit / 1e9:.1f} GB are free, but a round needs {least:.1f} GB with every mapping")
    best = hosts.same_everywhere(min(found, key=found.get))
    if file is not None and hosts.is_first():
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, {"fastest": best, "about": about, "seconds_per_client": found, **environment()})
        except OSError as error:
            console.print(f"mapping: the choice could not be kept for the next time ({error})")
    return candidates[best]
