"""The fastest mapping for a task on this machine: a short probe with a cached result."""

import contextlib
import hashlib
import json
import os
import timeit
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from jfcl import mapping
from jfcl.core import Algorithm, Clients, client_shapes, num_bytes, num_clients
from jfcl.mapping import hosts, memory
from jfcl.mapping.jitted import jitted
from jfcl.simulation.folder import environment, write_json

LEAST_CLIENTS = 64  # number of timed clients, if there are more than twice as many


def cache_dir() -> Path | None:
    """Returns `$JFCL_CACHE_DIR`, else jfcl's folder in the user's cache; `None` if it is empty, or there is no home."""
    named = os.environ.get("JFCL_CACHE_DIR")
    if named is not None:
        return Path(named) if named else None
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return None if cache == "~/.cache" else Path(cache) / "jfcl"


def enough_clients(candidates: Iterable[mapping.Mapping]) -> int:
    """Returns a number of clients that shows differences of mappings: two of the largest chunks for every device."""
    most = LEAST_CLIENTS * jax.process_count()
    for axis in candidates:
        inner, devices = (axis.inner, axis.mesh.size) if isinstance(axis, mapping.sharded) else (axis, 1)
        if isinstance(inner, mapping.chunked):
            most = max(most, 2 * inner.size * devices)
    return most


def seconds_per_client(algorithm: Algorithm, clients: Clients, client_axis: mapping.Mapping, few: int) -> float:
    """Returns the duration of the faster of two rounds with `few` of the clients, divided by their number.

    All clients train if there are less than twice as many, or if an option of the method depends on their number: a
    cohort, true clusters, the size of groups. A first round, which compiles, is not counted.
    """
    here, n = num_clients(clients), hosts.total(num_clients(clients))

    def timed(some: int, n: int) -> float:
        held = mapping.held(client_axis, algorithm.task, jax.tree.map(lambda x: x[:some], clients))
        placed = mapping.place(client_axis, held, n)
        step = jitted(algorithm.step)
        state = jitted(algorithm.init)(jax.random.key(0), placed)
        jax.block_until_ready(step(jax.random.key(1), state, placed))
        again = timeit.repeat(lambda: jax.block_until_ready(step(jax.random.key(0), state, placed)), repeat=2, number=1)
        return min(again) / n

    rows = mapping.own_rows(client_axis, few)
    holds = hosts.everybodys([here >= rows.stop - rows.start]).all()  # the last processes hold padding clients
    if n > 2 * few and holds:
        with contextlib.suppress(ValueError):
            return timed(rows.stop - rows.start, few)
    return timed(here, n)


def fastest(
    make: Callable[[mapping.Mapping], Algorithm],
    clients: Clients,
    candidates: dict[str, mapping.Mapping],
    *,
    options: Any = None,
    show: bool = True,
) -> mapping.Mapping:
    """Returns the candidate with the fastest rounds that fits into memory; prints and keeps the measurements.

    With several processes, it is the fastest one in the first process.

    Args:
      make: `(client_axis) -> Algorithm`.
      clients: training data, on the host.
      candidates: mappings by name.
      options: the method and its options, JSON-like: with shapes, device and versions, the key of the cache. Without it
        the cache is not used.
      show: print the table to stderr.

    Raises:
      ValueError: no candidate fits into memory.

    Example:
      >>> import jfcl
      >>> from jfcl.testing import problem
      >>> clients, _, task, training = problem()
      >>> make = lambda axis: jfcl.fedavg(task, training, client_axis=axis)
      >>> fastest(make, clients, {"one at a time": jfcl.chunked(1)}, show=False)
      chunked(size=1)
    """
    sizes = [[list(np.shape(x)), str(x.dtype)] for x in jax.tree.leaves(clients)]
    key = hashlib.sha256(json.dumps([options, sizes, sorted(candidates), environment()]).encode()).hexdigest()[:16]
    folder = cache_dir()
    file = None if folder is None or options is None else folder / "mappings" / f"{key}.json"
    cached = None
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # there is no file, or none that can be read
        cached = None if file is None else json.loads(file.read_text())["fastest"]
    cached = hosts.same_everywhere(cached)
    console = Console(stderr=True, quiet=not (show and hosts.is_first()))
    if cached in candidates:
        console.print(f"mapping: {cached}, as an earlier probe found ({file})")
        return candidates[cached]

    console.print(f"mapping: a short probe, which compiles and times a round with {', '.join(candidates)}")
    limit = memory.free_memory() - num_bytes(clients.examples)
    shapes = client_shapes(clients, hosts.total(num_clients(clients)))
    timings, needs = {}, {}
    few = enough_clients(candidates.values())
    for name, axis in candidates.items():
        algorithm = make(axis)
        needs[name] = memory.needed_memory(algorithm, shapes, axis)
        fits = hosts.same_everywhere(needs[name] <= limit)
        if fits:
            timings[name] = seconds_per_client(algorithm, clients, axis, few)
        spent = f"{1000 * timings[name]:.3g} ms a client and round" if fits else "too much memory"
        console.print(f"  {name}: {spent}, {needs[name] / 1e6:,.1f} MB beside the data")
    if not timings:
        least = min(needs.values()) / 1e9
        raise ValueError(f"memory: {limit / 1e9:.1f} GB are free, but a round needs {least:.1f} GB with every mapping")
    best = hosts.same_everywhere(min(timings, key=timings.get))
    if file is not None and hosts.is_first():
        try:
            write_json(file, {"fastest": best, "about": options, "seconds_per_client": timings, **environment()})
        except OSError as error:
            console.print(f"mapping: the choice could not be kept for the next time ({error})")
    return candidates[best]
