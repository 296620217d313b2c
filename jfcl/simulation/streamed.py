"""Rounds with a cohort on the device at a time.

A round of a population is `algorithm.step` on a cohort. The rows that the method keeps of each client (`client_rows`)
stay on the host until the client is drawn again.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfcl.core import Algorithm, Clients, Served, check_served, is_finite
from jfcl.data.store import ClientStore, example_shapes
from jfcl.mapping import layout
from jfcl.mapping.jitted import RUNS_ONCE, jitted, strong
from jfcl.simulation.client_rows import ClientRows
from jfcl.simulation.cohorts import Cohort
from jfcl.simulation.evaluation import (
    EVENTS,
    MOST_LISTED,
    MOST_SILENT,
    SUMMED,
    Assessment,
    Subjects,
    check_clusters,
    evaluate_served,
    finite_mean,
    found_clusters,
    is_mixture,
    silence_after,
)
from jfcl.simulation.loop import Block
from jfcl.simulation.progress import warn_once
from jfcl.simulation.state_split import Split, Start, serves_rows

NONE = np.zeros(0, np.int32)

# ---------------------------------------------------------------------------------------------------------------
# The compiled parts. Algorithm and split are static: a second call with the same objects compiles nothing.


def _with(clients: Clients, remembered: Any) -> Clients:
    """Returns `clients`, followed by clients with the ids `remembered` `[R]` and without examples."""
    count = len(remembered)
    if count == 0:
        return clients

    def extend(x):
        return jnp.concatenate([x, jnp.zeros((count, *x.shape[1:]), x.dtype)])

    ids = jnp.concatenate([clients.id, remembered])
    return Clients(jax.tree.map(extend, clients.examples), extend(clients.size), ids)


@partial(jitted, static_argnames=("algorithm", "split"), compiler_options=RUNS_ONCE)
def _start(key, clients, remembered, *, algorithm, split):
    """Returns the first state, apart."""
    clients = _with(clients, remembered)
    state = algorithm.init(jax.random.fold_in(key, 0), clients)
    check_served(algorithm, state, clients)
    return strong(split.apart(state))


@partial(jitted, static_argnames=("join", "split"))
def _fresh(key, clients, remembered, *, join, split):
    """Returns the first rows of clients. XLA removes all other computations of `join`."""
    return strong(split.apart(join(jax.random.fold_in(key, 0), _with(clients, remembered)))[1])


@partial(jitted, static_argnames=("serve",))
def _served(state, clients, *, serve):
    """Returns what clients are served, as `Algorithm.serve`."""
    return serve(state, clients)


@partial(jitted, static_argnames=("algorithm", "split"), donate_argnames="common")
def _round(key, t, common, rows, clients, remembered, *, algorithm, split):
    """Returns `(common, rows, values, finite)` after round `t`; per-client metrics as means over participants."""
    clients = _with(clients, remembered)
    state, values = algorithm.step(jax.random.fold_in(key, t), split.together(common, rows), clients)
    n = clients.size.shape[0]
    of_clients = {name for name, v in values.items() if v.ndim > 0 and v.shape[0] == n} - {*EVENTS}
    values = {name: finite_mean(v) if name in of_clients else v for name, v in values.items()}
    return *strong(split.apart(state)), values, is_finite(algorithm.serve(state, None).models)


# ---------------------------------------------------------------------------------------------------------------
# The backend.


@dataclasses.dataclass
class Streamed:
    """A backend of `run_rounds` with a cohort on the device at a time; its state is the shared part of the algorithm's.

    Attributes:
      join: `(key, clients) -> state`, which gives clients their first rows.
      split, shapes: the division of the algorithm's state, and its shapes.
      cohort, remember: `C` and `R`, the numbers of clients that train, and of further clients with rows.
      rows: the rows of all clients.
      take: returns the cohort of a round.
    """

    algorithm: Algorithm
    store: ClientStore
    key: jax.Array
    join: Start
    split: Split
    shapes: Any
    cohort: int
    remember: int
    rows: ClientRows
    take: Callable[[int], Cohort]
    resident = False
    _drawn: Cohort | None = None  # of the last round

    def observe(
        self,
        seed: int,
        test_store: ClientStore | None,
        evaluated: np.ndarray,
        serve: str,
        client_axis: Any,
        further: tuple,
    ) -> None:
        """Prepares the evaluations, always of the clients `evaluated`, under the models that they are served."""
        split, algorithm, store = self.split, self.algorithm, self.store
        served = jax.eval_shape(lambda state: algorithm.serve(state, None), self.shapes)
        self._num_models = 1 if split.personal else jax.tree.leaves(served.models)[0].shape[0]
        self._evaluated, self._chooses = evaluated, serve == "loss"
        learners = example_shapes(store, self.cohort + self.remember) if self._chooses else None
        several = split.personal or self._num_models > 1 or bool(jax.tree.leaves(served.personal))
        self._needs_rows = several and serves_rows(algorithm, split, self.shapes, learners)
        self._tests = self._learners = true = None
        hold = partial(layout.held, client_axis, algorithm.task)
        if test_store is not None and algorithm.task is not None:
            self._tests = jax.device_put(hold(test_store.gather(evaluated)))
            if self._needs_rows or self._num_models > 1:
                self._learners = jax.device_put(hold(store.gather(evaluated)))
            known = store.cluster is not None and (store.cluster[evaluated] >= 0).any()
            true = store.cluster[evaluated] if known else None
        self._how = {"client_axis": client_axis, "further": further}
        self._refresh = jitted(algorithm.refresh) if algorithm.refresh else lambda state, clients: state
        test_size = None if self._tests is None else np.asarray(self._tests.size)
        is_listed = self._tests is not None and len(evaluated) <= MOST_LISTED
        classes = None if algorithm.task is None else algorithm.task.num_classes
        self.subjects = Subjects([seed], test_size, None, true, is_listed, classes)
        self.most_silent = min(len(store), MOST_SILENT)
        no_collapse = served.active is not None or is_mixture(served)  # one that is never split is none
        models = 1 if no_collapse else self._num_models
        self.warn = partial(warn_once, set(), num_models=models, num_clients=self.cohort, true_cluster=store.cluster)

    def advance(self, state, first, count, silence) -> Block:
        # The cohort, the remembered clients and their rows.
        drawn = self.take(first)
        others = self._heard_last(drawn.ids) if self.remember else NONE
        static = {"algorithm": self.algorithm, "split": self.split}
        if first == 1:
            common, before = _start(self.key, drawn.clients, others, **static)
        else:
            common, before = state, self._rows_of(drawn.ids, drawn.clients, others)

        # The round.
        args = (self.key, np.int32(first), common, jax.device_put(before), drawn.clients, others)
        common, after, values, finite = _round(*args, **static)
        after, values, finite = jax.device_get((after, values, finite))

        # The rows of participants change, and those of remembered clients where the server has changed them.
        changed = drawn.size > 0
        if self.remember:
            changed = np.concatenate([changed, self.rows.seen[others] & _differ(before, after, self.cohort)])
        self._drawn, self._after, self._changed = drawn, after, changed
        self._ids = np.concatenate([drawn.ids, others])
        sums = {name: [float(v)] for name, v in values.items() if name in SUMMED}
        sums |= {name: [float(getattr(drawn, name))] for name in ("asked", "dropped", "cut")}
        events = {name: np.asarray(values[name], np.int32)[None] for name in EVENTS if name in values}
        values = {name: v[None] for name, v in values.items()}
        silence = silence_after(silence, values)
        return Block(common, values, sums, events, finite[None], silence, silence.count)

    def compile(self) -> bool:
        return False  # the first round compiles its programs

    def commit(self) -> None:
        kept = np.flatnonzero(self._changed)
        self.rows.write(self._ids[kept], [values[kept] for values in self._after])

    def evaluate(self, state, values) -> Assessment:
        values = values | {"seen": self.rows.seen.sum(keepdims=True)}
        if self._tests is None:
            served = self.algorithm.serve(self.split.together(state, self._after), None)
            count = len(self._ids)
            return Assessment(np.asarray(found_clusters(served, (count,)))[None], values)
        to, found, held_out = jax.device_get(self._assess(state))
        if not self.split.personal:
            check_clusters(np.asarray(to), self._num_models)
        held_out = {name: v[None] for name, v in held_out.items()}
        return Assessment(np.asarray(found)[None], values, held_out)

    def _assess(self, common: list) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """Returns what the evaluated clients are served, their clusters, and the results of `metrics.evaluate`."""
        split, ids, learners = self.split, self._evaluated, self._learners
        rows = self._rows_of(ids, learners) if self._needs_rows else [0] * len(split.axes)
        state = self._refresh(split.together(common, rows), learners)
        if split.personal or self._num_models > 1 or self._needs_rows:
            served = _served(state, learners if self._chooses else None, serve=self.algorithm.serve)
        else:  # the only model
            served = self.algorithm.serve(state, None)._replace(to=jnp.zeros(len(ids), jnp.int32))
        if split.personal:
            served = served._replace(to=jnp.arange(len(ids), dtype=jnp.int32))
        results, found = evaluate_served(self.algorithm.task, served, self._tests, **self._how)
        return served.to, found, results

    @contextlib.contextmanager
    def snapshot(self, done, state, totals):
        self.rows.checkpointing(done)
        yield {"common": state, **self.rows.saved()}, {name: value[0] for name, value in totals.items()}
        self.rows.checkpointed(done)

    def final(self, state, done, assessment) -> tuple[Any, dict[str, np.ndarray], Served]:
        # The rows of the last cohort; of that of round `done` if none was drawn.
        cohort = self._drawn or self.take(done)
        rows = self._rows_of(cohort.ids, cohort.clients)
        whole = self.split.together(state, jax.tree.map(jnp.asarray, rows))
        clients = {"id": self._evaluated, "examples": self.store.sizes(self._evaluated)[None]}
        if self._tests is not None:
            clients |= (assessment or self.evaluate(state, {})).of_clients()
        return whole, clients, self.algorithm.serve(whole, None)

    def _rows_of(self, ids: np.ndarray, clients: Clients, remembered: np.ndarray = NONE) -> list:
        """Returns the rows of the clients `ids` and `remembered`; clients without a row get their first one."""
        fresh = partial(_fresh, self.key, clients, remembered, join=self.join, split=self.split)
        return self.rows.take(np.concatenate([ids, remembered]), lambda: jax.device_get(fresh()))

    def _heard_last(self, ids: np.ndarray) -> np.ndarray:
        """Returns `[R]` ids, ascending: the clients with the latest updates, without `ids`; ties are deterministic."""
        when = np.where(self.rows.seen, self.rows.arrays[self.split.heard], 0)
        when[ids] = -1
        return np.sort(np.argpartition(-when, self.remember - 1)[: self.remember]).astype(np.int32)


def _differ(before: list, after: list, first: int) -> np.ndarray:
    """Returns `[R]` bool: the rows from `first` on that differ in any bit."""
    found = np.zeros(len(after[0]) - first, bool)
    for old, new in zip(before, after, strict=True):
        pair = [np.ascontiguousarray(x[first:]).reshape(len(found), -1).view(np.uint8) for x in (old, new)]
        found |= (pair[0] != pair[1]).any(axis=1)
    return found
