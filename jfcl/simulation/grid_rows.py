"""Rows of a sweep: cells and seeds that are one compiled program, some of them at a time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jfcl import mapping
from jfcl.analysis import metrics
from jfcl.core import Algorithm, Clients, check, check_served, client_shapes, is_finite, num_clients
from jfcl.mapping import layout, memory
from jfcl.mapping.jitted import RUNS_ONCE, jitted, strong
from jfcl.simulation.evaluation import (
    MOST_SILENT,
    Silence,
    assess,
    evaluate_rows,
    serving_part,
    silence_after,
)
from jfcl.simulation.grid_results import static_options
from jfcl.simulation.loop import BLOCK_SECONDS
from jfcl.simulation.run import check_method


class Shared(NamedTuple):
    """What all cells share."""

    clients: Clients
    held_out: Clients
    keys: jax.Array
    num_rounds: int
    serve: str


def divided(row_axis: mapping.Mapping | None) -> mapping.Mapping:
    """Returns `row_axis`, or the mapping that divides rows among all devices where it is None."""
    mesh = mapping.client_mesh()
    return row_axis or (mapping.auto() if mesh.size == 1 else mapping.sharded(mesh, mapping.auto()))


class Group:
    """The cells of one compiled program: they differ in traced options alone.

    Attributes:
      task: of the algorithms.
    """

    def __init__(self, make, cells, numbers, traced, data, at_once, *, row_axis, client_axis):
        self._data = data
        self._axes = {"row_axis": row_axis, "client_axis": client_axis}
        self._program = {"make": make, "static": static_options(cells[numbers[0]], traced), "row_axis": row_axis}
        rows = list(itertools.product(numbers, range(len(data.keys))))
        algorithms = [make(**cells[i]) for i in numbers]
        made = algorithms[0]
        check(isinstance(made, Algorithm), "make", type(made).__name__, "a function that returns an Algorithm")
        check(made.task is not None, "make", "an Algorithm without task", "a function that returns one with a task")
        check_method(made, {"clients": data.clients, "held_out": data.held_out})
        self.task = made.task
        self._held = tuple(layout.held(client_axis, made.task, part) for part in (data.clients, data.held_out))
        self._values = {name: np.array([cells[i][name] for i, _ in rows], np.float32) for name in traced}
        self._rows = rows
        parts = [serving_part(one) for one in algorithms]
        self._serving = parts[0] if all(one == parts[0] for one in parts) else None  # None: it depends on the options
        self._size = self._rows_at_once(made, at_once)

    def _rows_at_once(self, made: Algorithm, at_once: int | None) -> int:
        """Returns the rows of one call; `ValueError` if a single one on each device does not fit into memory."""
        row_axis, client_axis = self._axes["row_axis"], self._axes["client_axis"]
        devices = row_axis.mesh.size if isinstance(row_axis, mapping.sharded) else 1
        most = -(-len(self._rows) // devices)
        is_cpu = mapping.platform_of(row_axis) == "cpu"
        each = min(most, at_once or (1 if is_cpu else most))
        shapes, tests = (client_shapes(part, num_clients(part)) for part in self._held)
        while True:
            like = self._shapes(each * devices, shapes)
            try:
                memory.check_memory(made, shapes, client_axis, like, others=[tests], seeds_at_once=each)
                return each * devices
            except ValueError:
                if each == 1 or at_once is not None:
                    raise
                each = -(-each // 2)

    def _shapes(self, count: int, clients: Clients) -> Any:
        """Returns the shapes of `count` states; `ValueError` for an option that cannot be a tracer."""
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), count))
        values = {name: jax.ShapeDtypeStruct((count,), jnp.float32) for name in self._values}
        one = jax.ShapeDtypeStruct((), jnp.int32)
        try:
            state = jax.eval_shape(partial(_start, **self._program), keys, values, clients)
            silence = Silence(*[jax.ShapeDtypeStruct((count,), jnp.int32)] * 2)
            jax.eval_shape(partial(_advance, **self._program), keys, values, state, one, one, silence, clients)
        except (TypeError, ValueError) as error:  # those of jax, of which some are ValueErrors, and of checks
            why = str(error).splitlines()[0]
            if not self._values or "trace" not in why.lower():
                raise
            names = ", ".join(self._values)
            raise ValueError(f"traced must be options that make takes as tracers, got {names} ({why})") from None
        return state

    def run(
        self, found: Collection[int], seeds: list[int], tick: Callable[[int, int], None]
    ) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        """Yields `(cell, per_seed)` of each cell when all its seeds are finished; those in `found` are skipped."""
        skipped, results = frozenset(found), {}
        row_axis = self._axes["row_axis"]
        everywhere = NamedSharding(row_axis.mesh, PartitionSpec()) if isinstance(row_axis, mapping.sharded) else None
        placed = jax.device_put(self._held, everywhere)
        for begin in range(0, len(self._rows), self._size):
            rows = self._rows[begin : begin + self._size]
            if all(cell in skipped for cell, _ in rows):
                tick(rows[0][0], len(rows) * self._data.num_rounds)
                continue
            for (cell, seed), result in zip(rows, self._run_rows(begin, len(rows), *placed, tick), strict=True):
                results.setdefault(cell, []).append({"seed": seeds[seed]} | result)
                if len(results[cell]) == len(seeds) and cell not in skipped:
                    yield cell, results.pop(cell)

    def _run_rows(self, begin: int, count: int, clients: Clients, held_out: Clients, tick) -> list[dict[str, Any]]:
        """Returns the results of `count` rows. Every call has equally many: the first row fills the last one up."""
        at = begin + np.arange(self._size)
        at = np.where(at < begin + count, at, begin)
        keys = self._data.keys[np.array([self._rows[i][1] for i in at])]
        values = {name: column[at] for name, column in self._values.items()}
        state = _start(keys, values, clients, **self._program)
        done, block, rounds = 0, 1, self._data.num_rounds
        diverged, ended = np.zeros(self._size, bool), np.zeros(self._size, bool)
        silence = Silence(*np.zeros((2, self._size), np.int32))
        while done < rounds and not (diverged | ended).all():  # rounds that are left out would change nothing
            length, started = min(block, rounds - done), time.perf_counter()
            first, number = np.int32(done + 1), np.int32(length)
            given = keys, values, state, first, number, silence, clients
            state, silence, lost, ended = _advance(*given, **self._program)
            lost, ended = jax.device_get((lost, ended))
            diverged |= lost
            took = time.perf_counter() - started
            block = int(np.clip(BLOCK_SECONDS * length / max(took, 1e-9), 1, 2**30))
            done += length
            tick(self._rows[begin][0], length * count)
        tick(self._rows[begin][0], (rounds - done) * count)
        learners = clients if self._data.serve == "loss" else None
        if self._serving is None:
            client_axis = self._axes["client_axis"]
            judged = _judge(values, state, held_out, learners, **self._program, client_axis=client_axis)
        else:
            judged = evaluate_rows(state, held_out, learners, algorithm=self._serving, **self._axes)
        del judged["found"]
        judged, size = jax.device_get(judged), np.asarray(self._data.held_out.size)
        results = []
        for i in range(count):
            summary = metrics.summarize({name: values[i] for name, values in judged.items()}, size)
            lost = bool(diverged[i]) or not np.isfinite(list(summary.values())).all()
            results.append({"diverged": lost} | ({} if lost else summary))
        return results


# ---------------------------------------------------------------------------------------------------------------
# The compiled parts. The function that makes the algorithm, and the options that are no tracers, are static.


def _made(make, static, values) -> Algorithm:
    return make(**{name: value for name, _, value in static}, **values)


@partial(jitted, static_argnames=("make", "static", "row_axis"), compiler_options=RUNS_ONCE)
def _start(keys, values, clients, *, make, static, row_axis):
    def one(key, values, clients):
        algorithm = _made(make, static, values)
        state = algorithm.init(jax.random.fold_in(key, 0), clients)
        check_served(algorithm, state, clients)
        return strong(state)

    return row_axis(one, in_axes=(0, 0, None))(keys, values, clients)


@partial(jitted, static_argnames=("make", "static", "row_axis"), donate_argnames="state")
def _advance(keys, values, state, first, count, silence, clients, *, make, static, row_axis):
    """Returns the states and the silence after `count` rounds, and whether training diverged and the method ended."""

    def one(key, values, state, first, count, silence, clients):
        algorithm = _made(make, static, values)
        most = jnp.clip((jnp.asarray(clients.size) > 0).sum(), 1, MOST_SILENT)

        def one_round(t, carry):
            state, silence, lost, _ = carry
            state, found = algorithm.step(jax.random.fold_in(key, t), state, clients)
            silence = silence_after(silence, found)
            served = algorithm.serve(state, None)
            lost |= ~is_finite((served.models, served.personal)) | (silence.count >= most)
            return state, silence, lost, jnp.all(found.get("ended", jnp.zeros((), bool)))

        no = jnp.zeros((), bool)
        return jax.lax.fori_loop(first, first + count, one_round, (state, silence, no, no))

    return row_axis(one, in_axes=(0, 0, 0, None, None, 0, None))(keys, values, state, first, count, silence, clients)


@partial(jitted, static_argnames=("make", "static", "row_axis", "client_axis"))
def _judge(values, state, held_out, learners, *, make, static, row_axis, client_axis):
    """Returns the results of `assess`, `[R, N]` each, of rows with algorithms that serve differently."""

    def one(values, state, held_out, learners):
        return assess(_made(make, static, values), state, held_out, learners, client_axis=client_axis)

    return row_axis(one, in_axes=(0, 0, None, None))(values, state, held_out, learners)
