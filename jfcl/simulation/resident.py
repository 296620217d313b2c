"""All clients on the device: one program for many rounds, and for many rows: seeds, and cells of a sweep."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jfcl import mapping
from jfcl.core import Algorithm, Clients, Served, check, check_served, client_shapes, is_finite, num_clients
from jfcl.core.parameters import is_key, key_data, with_keys
from jfcl.data.drift import Drift
from jfcl.mapping import hosts, memory
from jfcl.mapping.jitted import RUNS_ONCE, jitted, strong
from jfcl.simulation import evaluation
from jfcl.simulation.evaluation import Assessment, Silence, Subjects, evaluate_rows, serving_part
from jfcl.simulation.folder import Restored, RunFolder
from jfcl.simulation.loop import MOST_ROUNDS, Block, read_checkpoint
from jfcl.simulation.progress import compile_ahead

# The compiled parts. Algorithm and mappings are static: a second call with the same objects compiles nothing.


def build(algorithm, hyperparams) -> Algorithm:
    """Returns the algorithm of one row, made from its `hyperparams` where `algorithm` is a function of them."""
    method = algorithm
    if hyperparams is not None:
        method = algorithm(**hyperparams) if callable(algorithm) else None
    accepted = "an Algorithm, or with hyperparams a function of them that returns one"
    actual = type(algorithm if method is None else method).__name__
    check(isinstance(method, Algorithm), "algorithm", actual, accepted)
    return method


def first_row(rows: Any) -> Any:
    """Returns the first row of each array."""
    return jax.tree.map(lambda x: x[0], rows)


@partial(jitted, static_argnames=("row",))
def row_of(rows, *, row):
    """Returns one row of each array, by one program; without `jit` each shape has its own."""
    return jax.tree.map(lambda x: x[row], rows)


def _spread(place, state, clients, client_axis):
    """Returns `state` after `place(x, sharding)`: arrays `[R, N, ...]` divided as the clients, others on every device.

    A resumed run then compiles the same program.
    """
    if not isinstance(client_axis, mapping.sharded):
        return state
    mesh, n = client_axis.mesh, num_clients(clients)
    return jax.tree.map(lambda x: place(x, memory.sharding_of(x, mesh, n, axis=1)), state)


STATIC = ("algorithm", "row_axis", "client_axis")


@partial(jitted, static_argnames=STATIC, compiler_options=RUNS_ONCE)
def _init(keys, hyperparams, clients, *, algorithm, row_axis, client_axis):
    def one(key, hyperparams, clients):
        method = build(algorithm, hyperparams)
        state = method.init(jax.random.fold_in(key, 0), clients)
        check_served(method, state, clients)
        return strong(state)

    state = row_axis(one, in_axes=(0, 0, None))(keys, hyperparams, clients)
    return _spread(jax.lax.with_sharding_constraint, state, clients, client_axis)


@partial(jitted, static_argnames=STATIC, donate_argnames="state")
def _advance(keys, hyperparams, state, silence, first, count, clients, *, algorithm, row_axis, client_axis):
    """Returns the `Block` of `count` rounds from round `first` on, at most `MOST_ROUNDS`.

    Its sums are not summed yet: they are the metrics of every round, `[R, MOST_ROUNDS]` each, and zeros behind them.
    """

    def one(key, hyperparams, state, silence, first, count, clients):
        method = build(algorithm, hyperparams)

        def one_round(t, carry):
            state, _, sums, largest, silence, most = carry
            state, values = step(jax.random.fold_in(key, t), state, clients)
            silence = evaluation.silence_after(silence, values)
            sums = {name: put(x, values[name].astype(jnp.float32), t - first) for name, x in sums.items()}
            largest = {name: jnp.maximum(x, values[name].astype(jnp.int32)) for name, x in largest.items()}
            return state, values, sums, largest, silence, jnp.maximum(most, silence.count)

        put = partial(jax.lax.dynamic_update_index_in_dim, axis=0)
        step = jax.jit(method.step, inline=True)  # traced once, for the carry and in the loop
        _, like = evaluation.check_step(step.eval_shape(key, state, clients), state, clients, method.entries)
        last = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), like)
        summed = [name for name in (*evaluation.SUMMED, *method.entries.sums) if name in like]
        sums = dict.fromkeys(summed, jnp.zeros(MOST_ROUNDS, jnp.float32))
        least = jnp.iinfo(jnp.int32).min
        largest = {name: jnp.full_like(like[name], least, jnp.int32) for name in method.entries.largest if name in like}
        carry = state, last, sums, largest, silence, silence.count
        state, last, sums, largest, silence, most = jax.lax.fori_loop(first, first + count, one_round, carry)
        finite = is_finite(method.serve(state, None).models)
        last["loss"] = evaluation.finite_mean(last["loss"])  # over participating clients
        return Block(state, last, sums, largest, finite, silence, most)

    axes = (0, 0, 0, 0, None, None, None)
    block = row_axis(one, in_axes=axes)(keys, hyperparams, state, silence, first, count, clients)
    return block._replace(state=_spread(jax.lax.with_sharding_constraint, block.state, clients, client_axis))


def without_padding(tree: Any, like: Any) -> Any:
    """Returns `tree`, cut to the shapes of `like`: a checkpoint leaves out the clients that fill up the devices."""
    return jax.tree.map(lambda x, small: x[tuple(map(slice, small.shape))], tree, like)


def with_padding(small: Any, whole: Any) -> Any:
    """Returns `small` on the devices of `whole`, padded to its shapes with zeros."""

    def put(array, like):
        data, shape = key_data(array), jax.eval_shape(key_data, like).shape
        host = np.zeros(shape, data.dtype)
        host[tuple(map(slice, data.shape))] = data
        return with_keys(jax.make_array_from_callback(shape, like.sharding, lambda index: host[index]), like)

    return jax.tree.map(put, small, whole)


def _selection(serve: Callable[[Any], Served], like: Any) -> Callable[[Any], Served]:
    """Returns `serve`; where it returns arrays of the state unchanged, a function that selects them without JAX.

    `like` has the shapes of the state.
    """
    traced, shapes = jax.make_jaxpr(serve, return_shape=True)(like)
    places = {id(v): i for i, v in enumerate(traced.jaxpr.invars)}
    chosen, structure = [places.get(id(v)) for v in traced.jaxpr.outvars], jax.tree.structure(shapes)
    if None in chosen:
        return serve
    return lambda state: jax.tree.unflatten(structure, [jax.tree.leaves(state)[i] for i in chosen])


class Resident:
    """A source of `run_rounds` with all clients on the device, and a leading axis of rows in every array of the state.

    Attributes:
      rows: the keys `[R]`, and the hyperparameters of each row, `[R, ...]`, or None.
      method: the algorithm of the first row.
      like: shapes of the state without padding clients, those of a checkpoint. A run may thus be resumed on other
        devices.
      whole: shapes of the state on the devices.

    Of drifting data, `clients` have the examples of all steps of time. Their arrays at each step have the same shapes,
    so that the programs are those of the first one.
    """

    resident, client_rows = True, None

    def __init__(
        self,
        algorithm: Algorithm | Callable[..., Algorithm],
        clients: Clients,
        keys: jax.Array,
        hyperparams: Any,
        *,
        seeds: list,
        row_axis: mapping.Mapping,
        client_axis: mapping.Mapping,
        test_clients: Clients | None = None,
        newcomers: Clients | None = None,
        true_cluster: Any = None,
        state: Any = None,
        drift: Drift | None = None,
        ends: Sequence[int] = (),
    ):
        self._algorithm, self._seeds, self._row_axis, self._client_axis = algorithm, seeds, row_axis, client_axis
        self._static = {"algorithm": algorithm, "row_axis": row_axis, "client_axis": client_axis}
        self.method, again = (build(algorithm, first_row(hyperparams)) for _ in range(2))
        # Functions that an algorithm makes for itself would be another program in every call.
        is_same = serving_part(again) == serving_part(self.method)
        self._serving = serving_part(self.method) if is_same else algorithm
        self._n, self._single = hosts.total(num_clients(clients)), keys.ndim == 0
        self.identity = {"key": np.asarray(jax.random.key_data(keys)).tolist()}
        self.identity |= {} if seeds == list(range(len(seeds))) else {"seeds": seeds}
        mesh = client_axis.mesh if isinstance(client_axis, mapping.sharded) else None
        self.rows = hosts.replicate((keys[None] if self._single else keys, hyperparams), mesh)
        numbered = clients.id is None or hosts.several()
        self._ids = list(range(self._n)) if numbered else np.asarray(clients.id).tolist()
        self._held = partial(mapping.held, client_axis, self.method.task)
        self._drift, self._ends, self._all, self._step = drift, ends, clients, 0
        if drift is not None:
            clients, test_clients = drift.clients(clients, 0), drift.tests(0)
        clients, self._tests, self._newcomers = map(self._held, (clients, test_clients, newcomers))
        self._clients = clients._replace(size=clients.size.astype(np.int32))
        self.like = _init.shapes(*self.rows, client_shapes(self._clients, self._n), **self._static)
        self._true_cluster = None if true_cluster is None else np.asarray(true_cluster)
        self._first = None if state is None else self._checked(state)
        self._compiled, self._programs = compile_ahead(()), []

    def _checked(self, state: Any) -> Any:
        """Returns a copy of a user's first state; `ValueError` unless its shapes are those of the algorithm."""
        if self._single:
            state = jax.tree.map(lambda x: jnp.asarray(x)[None], state)
        differ = evaluation.unlike(state, self.like)
        accepted = "of this algorithm with these options, of these clients, with a seed axis if there are several keys"
        fits = not differ and jax.tree.structure(state) == jax.tree.structure(self.like)
        check(fits, "state", differ or type(state).__name__, accepted)

        def copied(x):  # since a round overwrites its state
            x = hosts.fetch(x)
            return jnp.array(x) if is_key(x) else np.array(x)

        return jax.tree.map(copied, state)

    def place(self, serve: str, further: tuple = (), serving: Any = None) -> None:
        """Moves the clients and those of evaluations to the devices, if the memory suffices.

        Raises every `ValueError` of a round before anything is computed. `serving` is the part of the algorithm that
        evaluations use, by default that of `method`; the function of hyperparameters where rows are served differently.
        """
        n, method, self._further, self._serving = self._n, self.method, further, serving or self._serving

        # Memory.
        tests, newcomers, true_cluster = self._tests, self._newcomers, self._true_cluster
        evaluated = [] if tests is None else [client_shapes(tests, n)] * (1 if self._drift is None else 2)
        evaluated += [] if newcomers is None else [newcomers]
        axis, count = self._row_axis, len(self._seeds)
        if isinstance(axis, mapping.sharded):
            axis, count = axis.inner, -(-count // axis.mesh.size)
        options = {"seeds_at_once": min(axis.size, count) if isinstance(axis, mapping.chunked) else count}
        shapes = client_shapes(self._clients, n)
        memory.check_memory(method, shapes, self._client_axis, self.like, tests=evaluated, **options)

        # Placement.
        place = partial(mapping.place, self._client_axis)
        if isinstance(self._row_axis, mapping.sharded):  # everything on every device
            everywhere = NamedSharding(self._row_axis.mesh, PartitionSpec())
            place = lambda part, count: jax.device_put(part, everywhere)  # noqa: E731
        self._place, self._upcoming = place, None
        self._clients = place(self._clients, n)
        test_size = new_size = None
        if tests is not None:
            self._tests = place(tests, n)
            test_size = np.asarray(hosts.fetch(self._tests.size))[:n]
        if newcomers is not None:
            new_size = np.asarray(newcomers.size)
            rows = mapping.own_rows(self._client_axis, len(new_size))  # every process holds all newcomers
            self._newcomers = place(jax.tree.map(lambda x: x[rows], newcomers), len(new_size))
        self._size = np.asarray(hosts.fetch(self._clients.size))[:n]
        self.most_silent = min(int((self._size > 0).sum()), evaluation.MOST_SILENT)

        # Evaluation.
        self._serve = _selection(jax.vmap(lambda state: method.serve(state, None)), self.like)
        self._served = jax.eval_shape(self._serve, self.like)
        self._num_models = jax.tree.leaves(self._served.models)[0].shape[1]
        self._learns = serve == "loss" and tests is not None
        choices = evaluation.choices_among(self._served, self._num_models, n, true_cluster)
        self.subjects = Subjects(method, self._seeds, self._ids, n, test_size, new_size, true_cluster, choices)
        if self._drift is not None:
            self._begin_step()

        # Programs. A call finds the one that is compiled already, or waits for it.
        whole = self.like
        if num_clients(self._clients) != n:
            whole = _init.shapes(*self.rows, self._clients, **self._static)
        self.whole = _spread(lambda x, where: x.update(sharding=where), whole, self._clients, self._client_axis)
        one, silence = np.int32(1), Silence(*np.zeros((2, len(self._seeds)), np.int32))
        args = *self.rows, self.whole, silence, one, one, self._clients
        if isinstance(self._row_axis, mapping.sharded):  # the programs depend on where the rows are
            _advance.shapes(*args, **self._static)
            return
        self._programs = [_advance.lower(*args, **self._static)]
        evaluation.check_names(further, self._metrics if further else {})
        lowered = [self._losses(self.whole, data, evaluate_rows.lower) for data in (self._tests, self._newcomers)]
        self._programs += filter(None, lowered)

    def start(self, folder: RunFolder | None, resume: bool, num_rounds: int) -> Restored:
        """Returns the checkpoint that is resumed with its state on the devices, or the beginning of a run.

        The programs are compiled from here on, since up to here the run may still be refused.
        """
        restored = read_checkpoint(folder, self.like, num_rounds) if resume else None
        if restored is not None:
            self._enter(restored.round - restored.totals.get("init_rounds", 0))
        if restored is None and self._first is not None:
            restored = Restored(0, self._first, {}, [])
        self._compiled, self._programs = compile_ahead(self._programs), []
        if restored is None:
            before = self.method.init_rounds
            return Restored(before, self.first_state(), {"init_rounds": before}, [])
        if isinstance(self._client_axis, mapping.sharded):
            return restored._replace(state=with_padding(restored.state, self.whole))
        return restored._replace(state=jax.device_put(restored.state))

    def first_state(self) -> Any:
        """Returns the state of `init`."""
        return _init(*self.rows, self._clients, **self._static)

    def _enter(self, round_: int) -> None:
        """Moves the data of the step of time to which a round belongs to the devices."""
        step = bisect_left(self._ends, round_)
        if self._drift is None or step == self._step:
            return
        self._step = step
        self._clients = self._tests = self._upcoming = None  # leave the memory to the next
        self._clients = self._place(self._held(self._drift.clients(self._all, step)), self._n)
        self._tests = self._place(self._held(self._drift.tests(step)), self._n)
        self._size = np.asarray(hosts.fetch(self._clients.size))[: self._n]
        self._begin_step()

    def _begin_step(self) -> None:
        """Places the tests of the next step of time, and sets what the records hold of the present one."""
        step, cluster = self._step, self._drift.cluster
        before, after = cluster[max(step - 1, 0)], cluster[min(step + 1, len(cluster) - 1)]
        self._upcoming = self._place(self._held(self._drift.tests(step + 1)), self._n)
        hidden = np.zeros(self._n, bool) if self._true_cluster is None else self._true_cluster < 0
        truth = np.where(hidden, -1, cluster[step])
        self.subjects = self.subjects._replace(
            true_cluster=truth,
            choices=evaluation.choices_among(self._served, self._num_models, self._n, truth),
            step=step,
            changed=int((cluster[step] != before).sum()),
            stays=after == cluster[step],
        )

    def advance(self, state, first, count, silence) -> Block:
        self._enter(first)
        args = *self.rows, state, silence, np.int32(first), np.int32(count), self._clients
        self._compiled()
        block = jax.block_until_ready(_advance(*args, **self._static))
        on_host = hosts.fetch(block._replace(state=None, values=None, finite=None))
        sums = {name: rounds.sum(axis=1, dtype=np.float64).tolist() for name, rounds in on_host.sums.items()}
        return on_host._replace(state=block.state, values=block.values, finite=block.finite, sums=sums)

    def evaluate(self, state, values) -> Assessment:
        n, padded, new = self._n, num_clients(self._clients), self.subjects.new_size
        results = [self._losses(state, data) for data in (self._tests, self._newcomers, self._upcoming)]
        served = self._serve(state)._replace(models=None, personal=None)
        (held_out, newcomers, upcoming), values, served = hosts.fetch((results, values, served))
        if served.to is not None:
            evaluation.check_clusters(served.to[:, :n], self._num_models)
        if served.shares is not None:
            evaluation.check_clusters(served.shares[:, :n], self._num_models)
        if newcomers is not None and "model" in newcomers:
            to, count = newcomers.pop("model"), newcomers.pop("num_models")
            evaluation.check_clusters(to[:, : len(new)], int(count[0]))
        of_seeds = len(self._seeds), padded
        cluster = evaluation.found_clusters(served, of_seeds) if held_out is None else held_out.pop("found")
        weights = None if held_out is None else held_out.pop("weights", None)
        if held_out is not None:  # served by the examples, too
            to = held_out["cluster"] if weights is None else weights
            evaluation.check_clusters(to[:, :n], self._num_models)

        # Padding clients are behind the others. Arrays too long for a record are left as their means.
        long = [name for name, v in values.items() if padded > n and v.shape[1:] == (padded,)]
        values = values | {name: values[name][:, :n] for name in long if self._metrics[name].shape == (n,)}
        long = [name for name, v in values.items() if v.ndim > 1 and v.shape[1] > evaluation.MOST_LISTED]
        values = values | {name: jax.device_get(jax.vmap(evaluation.finite_mean)(values[name])) for name in long}
        parts = cluster, held_out, served.excluded, upcoming, weights
        cluster, held_out, excluded, upcoming, weights = jax.tree.map(lambda x: x[:, :n], parts)
        newcomers = jax.tree.map(lambda x: x[:, : len(new)], newcomers)
        return Assessment(cluster, values, held_out, newcomers, excluded, upcoming, weights, self._size)

    @cached_property
    def _metrics(self) -> dict[str, Any]:
        """The shapes of the method's metrics without padding clients."""
        state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self.like)
        clients, key = client_shapes(self._clients, self._n), jax.eval_shape(lambda: jax.random.key(0))
        return jax.eval_shape(self.method.step, key, state, clients)[1]

    def held_out(self, state: Any, lost: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the results of the test clients, `[R, N]` each, also of the rows that are `lost`: have diverged."""
        results = jax.tree.map(lambda x: x[:, : self._n], jax.device_get(self._losses(state, self._tests)))
        to = results.get("weights", results["cluster"])
        sound = ~lost & np.isfinite(to).all(axis=tuple(range(1, to.ndim)))
        evaluation.check_clusters(to[sound], self._num_models)
        return results

    def _losses(self, state: Any, data: Clients | None, call: Callable = evaluate_rows) -> Any:
        """Returns the results `[R, ...]` of the test clients or of the newcomers; None without these."""
        if data is None:
            return None
        self._compiled()
        is_new = data is self._newcomers
        static = {"algorithm": self._serving, "of_newcomers": (self._n, self._num_models) if is_new else None}
        static |= {"row_axis": self._row_axis, "client_axis": self._client_axis, "further": self._further}
        hyperparams = self.rows[1] if self._serving is self._algorithm else None
        learners = self._clients if self._learns and not is_new else None
        return call(state, hyperparams, data, learners, **static)

    def saved(self, state) -> Any:
        return hosts.fetch(without_padding(state, self.like))

    def final(self, state, done, assessment) -> tuple[Any, dict[str, np.ndarray], Served]:
        assessment = assessment or self.evaluate(state, {})
        clients = assessment.of_clients()
        state = state if num_clients(self._clients) == self._n else without_padding(state, self.like)
        to = clients.get("model") if assessment.weights is None else assessment.weights
        choices = {"to": to, "found": clients["cluster"]}
        if self._single:
            state, choices = row_of(state, row=0), first_row(choices)
        served = self.method.serve(state, None) if self._single else self._serve(state)  # shares its arrays
        if self._learns:  # clients have chosen by their examples, also those that have not taken part
            known = {name: choice for name, choice in choices.items() if getattr(served, name) is not None}
            served = served._replace(**known)
        return state, clients, served
