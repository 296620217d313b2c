"""Rounds with all clients on the device: one program for many rounds and seeds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jfcl import mapping
from jfcl.core import Algorithm, Clients, Served, check, check_served, client_shapes, is_finite, num_clients
from jfcl.mapping import hosts, layout, memory
from jfcl.mapping.jitted import RUNS_ONCE, jitted, strong, traced_once
from jfcl.simulation.evaluation import (
    EVENTS,
    MOST_LISTED,
    MOST_SILENT,
    SUMMED,
    Assessment,
    Silence,
    Subjects,
    check_clusters,
    check_step,
    evaluate_rows,
    finite_mean,
    found_clusters,
    is_mixture,
    serving_part,
    silence_after,
)
from jfcl.simulation.folder import Restored
from jfcl.simulation.loop import Block
from jfcl.simulation.progress import compile_ahead, warn_once

# ---------------------------------------------------------------------------------------------------------------
# The compiled parts. Algorithm, task and mappings are static: a second call with the same objects compiles nothing.


def build(algorithm, hyperparams) -> Algorithm:
    """Returns the algorithm, made from `hyperparams` where `algorithm` is a function of them."""
    made = algorithm if hyperparams is None else algorithm(**hyperparams)
    check(isinstance(made, Algorithm), "algorithm", made, "an Algorithm, or a function of hyperparams that returns one")
    return made


def _constrained(state, clients, client_axis):
    """Returns `state` with per-client arrays placed like the clients: a resumed run compiles the same program."""
    if not isinstance(client_axis, mapping.sharded):
        return state
    n = num_clients(clients)
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, _sharding(x.shape, n, client_axis)), state)


def _sharding(shape: tuple[int, ...], n: int, client_axis: mapping.sharded) -> NamedSharding:
    """Returns the sharding of an array of the state: `[R, N, ...]` as the clients, any other on every device."""
    spec = PartitionSpec(None, client_axis.mesh.axis_names) if shape[1:2] == (n,) else PartitionSpec()
    return NamedSharding(client_axis.mesh, spec)


@partial(jitted, static_argnames=("algorithm", "seed_axis", "client_axis"), compiler_options=RUNS_ONCE)
def _init(keys, clients, hyperparams, *, algorithm, seed_axis, client_axis):
    algorithm = build(algorithm, hyperparams)
    state = strong(seed_axis(lambda key: algorithm.init(jax.random.fold_in(key, 0), clients))(keys))
    jax.vmap(lambda s: check_served(algorithm, s, clients))(state)
    return _constrained(state, clients, client_axis)


def _add(total: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns `total`, a sum and its rounding error (Knuth's two-sum), plus `x`.

    Sums of whole numbers are exact up to 2^48, so that they do not depend on the number of rounds in one call.
    """
    high, low = total
    new = high + x
    part = new - high
    return new, low + ((high - (new - part)) + (x - part))


@partial(jitted, static_argnames=("algorithm", "seed_axis", "client_axis"), donate_argnames="state")
def _advance(keys, state, first, count, silence, clients, hyperparams, *, algorithm, seed_axis, client_axis):
    """Runs `count` rounds from round `first` on.

    Returns:
      `(state, values, sums, events, finite, silence, most)`: the metrics of the last round; the sums of `SUMMED` and
      the largest values of `EVENTS` over all rounds; whether the models are finite, `[R]`; the silence after the last
      round, and its largest count, `[R]`.
    """
    algorithm = build(algorithm, hyperparams)

    def shorten(values):  # the loss, and arrays too long for a record, as their mean over participating clients
        long = {name: v.ndim > 0 and v.shape[0] > MOST_LISTED for name, v in values.items()}
        return {name: finite_mean(v) if name == "loss" or long[name] else v for name, v in values.items()}

    def one_seed(key, state, silence):
        def one_round(t, carry):
            state, _, sums, events, silence, most = carry
            state, values = step(jax.random.fold_in(key, t), state, clients)
            silence = silence_after(silence, values)
            sums = {name: _add(sums[name], values[name].astype(jnp.float32)) for name in sums}
            events = {name: jnp.maximum(events[name], values[name].astype(jnp.int32)) for name in events}
            return state, values, sums, events, silence, jnp.maximum(most, silence.count)

        step, returned = traced_once(algorithm.step, key, state, clients)
        _, like = check_step(returned, state)
        last = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), like)
        sums = {name: (jnp.zeros(()), jnp.zeros(())) for name in SUMMED if name in like}
        events = {name: jnp.full(like[name].shape, -1, jnp.int32) for name in EVENTS if name in like}
        carry = state, last, sums, events, silence, silence.count
        state, last, sums, events, silence, most = jax.lax.fori_loop(first, first + count, one_round, carry)
        finite = is_finite(algorithm.serve(state, None).models)
        return state, shorten(last), sums, events, finite, silence, most

    state, *results = seed_axis(one_seed)(keys, state, silence)
    return _constrained(state, clients, client_axis), *results


# ---------------------------------------------------------------------------------------------------------------
# Padding clients, which fill up the devices: a checkpoint leaves them out.


def _without_padding(tree: Any, like: Any) -> Any:
    """Returns `tree`, cut to the shapes of `like`."""
    return jax.tree.map(lambda x, small: x[tuple(slice(0, s) for s in small.shape)], tree, like)


def _with_padding(small: Any, whole: Any) -> Any:
    """Returns `small` on the devices of `whole`, padded to its shapes with zeros: the inverse of `_without_padding`."""

    def put(array, like):
        host = np.pad(array, [(0, b - a) for a, b in zip(array.shape, like.shape, strict=True)])
        return jax.make_array_from_callback(host.shape, like.sharding, lambda index: host[index])

    return jax.tree.map(put, small, whole)


def _selection(serve: Callable[[Any], Served], like: Any) -> Callable[[Any], Served]:
    """Returns `serve`, without a call of JAX in every evaluation where its results are arrays of the state as they are.

    `like` has the shapes of the state.
    """
    traced, shapes = jax.make_jaxpr(serve, return_shape=True)(like)
    places = {id(v): i for i, v in enumerate(traced.jaxpr.invars)}
    chosen, structure = [places.get(id(v)) for v in traced.jaxpr.outvars], jax.tree.structure(shapes)
    if None in chosen:
        return serve

    def select(state):
        leaves = jax.tree.leaves(state)
        return jax.tree.unflatten(structure, [leaves[i] for i in chosen])

    return select


# ---------------------------------------------------------------------------------------------------------------
# The backend.


class OnDevice:
    """A backend of `run_rounds` with all clients on the device, and a leading seed axis in every array of the state.

    Attributes:
      like: shapes of the state without padding clients, those of a checkpoint. A run may thus be resumed on other
        devices.
      whole: shapes of the state on the devices.
    """

    resident = True

    def __init__(self, algorithm, clients, keys, seeds, hyperparams, seed_axis, client_axis):
        self._made = build(algorithm, hyperparams)
        self._seeds, self._seed_axis, self._client_axis = seeds, seed_axis, client_axis
        self._static = {"algorithm": algorithm, "seed_axis": seed_axis, "client_axis": client_axis}
        self._n = hosts.total(num_clients(clients))
        clients = layout.held(client_axis, self._made.task, clients)
        self._clients = clients._replace(size=clients.size.astype(np.int32))
        self._keys, self._hyperparams = keys, hyperparams
        shapes = client_shapes(self._clients, self._n)
        self.like = jax.eval_shape(partial(_init, **self._static), keys, shapes, hyperparams)

    def place(
        self, tests: Clients | None, newcomers: Clients | None, true_cluster: Any, serve: str, further: tuple
    ) -> None:
        """Moves the clients and the subjects of evaluations to the devices, if the memory suffices.

        Raises every `ValueError` of a round before anything is computed.
        """
        n, client_axis, seed_axis, made = self._n, self._client_axis, self._seed_axis, self._made

        self._further = further

        # Memory.
        tests, newcomers = (layout.held(client_axis, made.task, subjects) for subjects in (tests, newcomers))
        shapes = client_shapes(self._clients, n)
        others = [] if tests is None else [client_shapes(tests, n)]
        others += [] if newcomers is None else [newcomers]
        count = len(self._seeds)
        seeds_at_once = min(seed_axis.size, count) if isinstance(seed_axis, mapping.chunked) else count
        memory.check_memory(made, shapes, client_axis, self.like, others=others, seeds_at_once=seeds_at_once)

        # Placement.
        self._clients = mapping.place(client_axis, self._clients, n)
        test_size = new_size = None
        if tests is not None:
            tests = mapping.place(client_axis, tests, n)
            test_size = np.asarray(hosts.fetch(tests.size))[:n]
        if newcomers is not None:
            new_size = np.asarray(newcomers.size)
            if hosts.several():  # every process holds all newcomers
                own = mapping.own_rows(client_axis, len(new_size))
                newcomers = jax.tree.map(lambda x: x[own], newcomers)
            newcomers = mapping.place(client_axis, newcomers, len(new_size))
        self._tests, self._newcomers = tests, newcomers
        self._num_rows = num_clients(self._clients)
        self.most_silent = min(int((np.asarray(hosts.fetch(self._clients.size)) > 0).sum()), MOST_SILENT)

        # Evaluation. Methods that start with one cluster and split it have not collapsed while they have one, nor have
        # mixtures in which one model has the largest weight for all clients.
        self._serve = _selection(jax.vmap(lambda one: made.serve(one, None)), self.like)
        served = jax.eval_shape(self._serve, self.like)
        self._num_models = jax.tree.leaves(served.models)[0].shape[1]
        choose = serve == "loss" and tests is not None and made.task is not None
        self._learners = self._clients if choose else None
        true_cluster = None if true_cluster is None else np.asarray(true_cluster)
        classes = None if made.task is None else made.task.num_classes
        self.subjects = Subjects(self._seeds, test_size, new_size, true_cluster, n <= MOST_LISTED, classes)
        models = 1 if served.active is not None or is_mixture(served) else self._num_models
        self.warn = partial(warn_once, set(), num_models=models, num_clients=n, true_cluster=true_cluster)

        # Programs. A call finds the one that is compiled already, or waits for it.
        self.whole = self.like
        if self._num_rows != self._n:
            self.whole = jax.eval_shape(partial(_init, **self._static), self._keys, self._clients, self._hyperparams)
        if isinstance(client_axis, mapping.sharded):
            rows = self._num_rows
            self.whole = jax.tree.map(lambda x: x.update(sharding=_sharding(x.shape, rows, client_axis)), self.whole)
        one, silence = np.int32(1), Silence(*np.zeros((2, count), np.int32))
        args = (self._keys, self.whole, one, one, silence, self._clients, self._hyperparams)
        programs = [_advance.lower(*args, **self._static)]
        for data in (tests, newcomers) if made.task is not None else ():
            if data is not None:
                args, how = self._evaluation(self.whole, data)
                programs.append(evaluate_rows.lower(*args, **how))
        self._programs = programs

    def restore(self, restored: Restored | None) -> Restored:
        """Returns `restored` with its state on the devices; the beginning of a run if it is None.

        The programs are compiled from here on, since up to here the run may still be refused.
        """
        self._compiling = compile_ahead(self._programs)
        del self._programs
        if restored is None:
            state = _init(self._keys, self._clients, self._hyperparams, **self._static)
            return Restored(self._made.init_rounds, state, {"init_rounds": self._made.init_rounds}, [])
        if isinstance(self._client_axis, mapping.sharded):
            state = _with_padding(restored.state, self.whole)
        else:
            state = jax.device_put(restored.state)
        return restored._replace(state=state)

    def advance(self, state, first, count, silence) -> Block:
        args = (self._keys, state, np.int32(first), np.int32(count), silence, self._clients, self._hyperparams)
        self._compiling.wait()
        state, values, sums, events, finite, *silence = jax.block_until_ready(_advance(*args, **self._static))
        sums, events, silence = hosts.fetch((sums, events, silence))
        totals = {
            name: [float(h) + float(l) for h, l in zip(high, low, strict=True)] for name, (high, low) in sums.items()
        }
        return Block(state, values, totals, events, finite, *silence)

    def compile(self) -> bool:
        return self._compiling.wait()

    def commit(self) -> None:
        """Does nothing: the state of a block is complete."""

    def evaluate(self, state, values) -> Assessment:
        n, padded = self._n, self._num_rows
        held_out = self._losses(state, self._tests)
        newcomers = self._losses(state, self._newcomers)
        served = self._serve(state)._replace(models=None, personal=None)
        held_out, newcomers, values, served = hosts.fetch((held_out, newcomers, values, served))
        if served.to is not None:
            check_clusters(served.to[:, :n], self._num_models)
        if newcomers is not None and "model" in newcomers:
            to, count = newcomers.pop("model"), newcomers.pop("num_models")
            check_clusters(to[:, : len(self.subjects.new_size)], int(count[0]))
        of_seeds = len(self._seeds), padded
        cluster = found_clusters(served, of_seeds) if held_out is None else held_out.pop("found")

        # Padding clients are behind the others.
        values = {name: v[:, :n] if v.shape[1:] == (padded,) else v for name, v in values.items()}
        cluster, held_out, excluded = jax.tree.map(lambda x: x[:, :n], (cluster, held_out, served.excluded))
        newcomers = jax.tree.map(lambda x: x[:, : len(self.subjects.new_size)], newcomers)
        return Assessment(cluster, values, held_out, newcomers, excluded)

    def _losses(self, state: Any, data: Clients | None):
        """Returns the results of `evaluate_rows` on `data`, `[R, ...]` each; None without data or task."""
        if data is None or self._made.task is None:
            return None
        self._compiling.wait()
        args, how = self._evaluation(state, data)
        return evaluate_rows(*args, **how)

    def _evaluation(self, state: Any, data: Clients) -> tuple[tuple, dict[str, Any]]:
        """Returns the arguments of `evaluate_rows` for the test clients or the newcomers, and its static arguments."""
        learners, of_newcomers = self._learners, None
        if data is self._newcomers:
            learners, of_newcomers = None, (self._n, self._num_models)
        algorithm = serving_part(self._made)
        how = {"algorithm": algorithm, "row_axis": self._seed_axis, "client_axis": self._client_axis}
        return (state, data, learners), how | {"of_newcomers": of_newcomers, "further": self._further}

    @contextlib.contextmanager
    def snapshot(self, done, state, totals):
        yield hosts.fetch(_without_padding(state, self.like)), totals

    def final(self, state, done, assessment) -> tuple[Any, dict[str, np.ndarray], Served]:
        assessment = assessment or self.evaluate(state, {})
        sizes = np.tile(hosts.fetch(self._clients.size)[: self._n], (len(self._seeds), 1))
        kept = state if self._num_rows == self._n else _without_padding(state, self.like)
        return kept, assessment.of_clients() | {"examples": sizes}, self._serve(kept)
