"""A population on the host, of which one cohort at a time is on the device.

A round of a population is `algorithm.step` on a cohort. The rows that the method keeps of each client (`client_rows`)
stay on the host until the client is drawn again.
"""

import math
import shutil
import zlib
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfcl import mapping
from jfcl.core import Algorithm, Clients, Served, check, check_count, check_integers, is_finite, require
from jfcl.core.options import check_options
from jfcl.data.store import ClientStore, Population, check_fits, check_store_labels, example_shapes
from jfcl.mapping import memory
from jfcl.mapping.jitted import RUNS_ONCE, jitted, strong
from jfcl.simulation import evaluation
from jfcl.simulation.client_rows import ClientRows
from jfcl.simulation.cohorts import COHORT_STREAM, DrawnCohort, make_sampler, prefetched, who_answers
from jfcl.simulation.evaluation import Assessment, Subjects
from jfcl.simulation.folder import Restored, RunFolder
from jfcl.simulation.layout import check_cohorts, serves_rows
from jfcl.simulation.loop import Block, read_checkpoint

NONE = np.zeros(0, np.int32)
EVALUATION_STREAM = COHORT_STREAM + 1  # of the random numbers of a run on the host

# The compiled parts. Algorithm and layout are static: a second call with the same objects compiles nothing.


def _with(clients: Clients, remembered: Any) -> Clients:
    """Returns `clients`, followed by clients with the ids `remembered` `[R]` and without examples."""
    count = len(remembered)
    if count == 0:
        return clients

    def extend(x):
        return jnp.concatenate([x, jnp.zeros((count, *x.shape[1:]), x.dtype)])

    ids = jnp.concatenate([clients.id, remembered])
    return Clients(jax.tree.map(extend, clients.examples), extend(clients.size), ids)


@partial(jitted, static_argnames=("algorithm", "layout"), compiler_options=RUNS_ONCE)
def _start(key, clients, remembered, *, algorithm, layout):
    """Returns the first state as `(common, rows)`."""
    clients = _with(clients, remembered)
    return strong(layout.apart(algorithm.init(jax.random.fold_in(key, 0), clients)))


@partial(jitted, static_argnames=("join", "layout"))
def _fresh(key, clients, remembered, *, join, layout):
    """Returns the first rows of clients. XLA removes all other computations of `join`."""
    return strong(layout.apart(join(jax.random.fold_in(key, 0), _with(clients, remembered)))[1])


@partial(jitted, static_argnames=("function",))
def _called(state, clients, *, function):
    """Calls `Algorithm.serve` or `Algorithm.refresh`."""
    return function(state, clients)


@partial(jitted, static_argnames=("algorithm", "layout"), donate_argnames="common")
def _round(key, t, common, rows, clients, remembered, *, algorithm, layout):
    """Returns `(common, rows, values, finite)` after round `t`; per-client metrics as means over participants."""
    clients = _with(clients, remembered)
    state, values = algorithm.step(jax.random.fold_in(key, t), layout.together(common, rows), clients)
    of_clients, took_part = {*layout.metrics} - {*algorithm.entries.largest}, clients.size > 0
    values = {name: evaluation.finite_mean(v, took_part) if name in of_clients else v for name, v in values.items()}
    return *strong(layout.apart(state)), values, is_finite(algorithm.serve(state, None).models)


# The source.


def _prepare(population, sampler, words, client_axis, hold, t: int) -> DrawnCohort:
    """Draws and gathers the cohort of round `t`, and sends it to the device; in the thread.

    It is divided among devices here if their number divides it, otherwise by the mapping.
    """
    size, asked = population.cohort, population.asked
    rng = np.random.default_rng([*words, COHORT_STREAM, t])
    ids = sampler(rng)
    chosen, answered, dropped = who_answers(rng, asked, size, population.dropout)
    clients = population.clients.gather(ids[chosen])
    if population.change is not None:
        clients = population.change(clients)
        check(isinstance(clients, Clients), "change", type(clients).__name__, "a function that returns Clients")
    sizes = np.where(answered, clients.size, 0).astype(np.int32)
    even = mapping.num_rows(client_axis, size) == size
    send = partial(mapping.place, client_axis) if even else jax.device_put
    counts = {"asked": asked, "dropped": dropped, "cut": max(asked - dropped - size, 0)}
    return DrawnCohort(ids[chosen], sizes, send(hold(clients)._replace(size=sizes)), counts)


class Streamed:
    """A source of `run_rounds` with a cohort on the device at a time; its state is the shared part of the algorithm's.

    Attributes:
      client_rows: the rows of all clients, from `start` on.
    """

    resident = False

    def __init__(
        self,
        algorithm: Algorithm,
        population: Population,
        key: jax.Array,
        seeds: list,
        client_axis: mapping.Mapping,
        until: int,
    ):
        """Checks all arguments, the method and the memory, before anything is computed; `until` is the last round."""
        check(isinstance(algorithm, Algorithm), "algorithm", algorithm, "an Algorithm")
        require(jax.process_count() == 1, f"a population runs in one process, and this is one of {jax.process_count()}")
        check(key.ndim == 0, "key", key.shape, "a single key, for a population")
        _check_population(population, algorithm)
        store, tests, size = population.clients, population.test_clients, population.cohort
        sampler = make_sampler(store, population.asked, population.sampling)
        self._words = np.asarray(jax.random.key_data(key)).tolist()
        self._evaluated = evaluated = _evaluated(population.evaluate, len(store), self._words)
        tested = tests is None or (tests.sizes(evaluated) > 0).any()
        check(tested, "evaluate", population.evaluate, "clients of which one at least has test examples")
        self._algorithm, self._store, self._tests, self._key, self._seeds = algorithm, store, tests, key, seeds
        self._population, self._join, self._client_axis = population, population.join or algorithm.init, client_axis

        # The method and the memory.
        shapes_of = partial(example_shapes, store)
        checked = check_cohorts(algorithm, len(store), size, population.join, population.remember, shapes_of)
        self._remember, self._layout, self._shapes = checked
        _check_hardest(algorithm, store, size)
        self._hold = hold = partial(mapping.held, client_axis, algorithm.task)
        served = jax.eval_shape(lambda state: algorithm.serve(state, None), self._shapes)
        self._num_models = jax.tree.leaves(served.models)[0].shape[0]
        self._several = self._layout.personal or self._num_models > 1 or bool(jax.tree.leaves(served.personal))
        self._choices = evaluation.choices_among(served, self._num_models, size, store.cluster)
        self._is_tested = tests is not None
        judged = ([tests, store] if self._several else [tests]) if self._is_tested else []
        judged_shapes = [hold(example_shapes(part, len(evaluated))) for part in judged]
        with_seed = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), self._shapes)
        trained = hold(example_shapes(store, size + self._remember))
        memory.check_memory(algorithm, trained, client_axis, with_seed, copies=2, tests=judged_shapes)
        self.most_silent, self._drawn = min(len(store), evaluation.MOST_SILENT), None
        self._take = prefetched(partial(_prepare, population, sampler, self._words, client_axis, hold), until)

    @property
    def identity(self) -> dict[str, Any]:
        """The cohorts and their clients, for the run's configuration."""
        population, tests = self._population, self._tests
        drawn = {name: getattr(population, name) for name in ("cohort", "sampling", "dropout", "stragglers")}
        drawn |= {"key": self._words} | ({"remember": self._remember} if self._remember else {})
        drawn |= {"clients": len(self._store), "store": self._store.hash}
        drawn["test_store"] = None if tests is None else tests.hash
        return {"cohorts": drawn | {"evaluated": zlib.crc32(self._evaluated.tobytes())}}

    def place(self, serve: str, further: tuple) -> None:
        """Prepares the evaluations, always of the same clients, under the models that they are served."""
        algorithm, store, evaluated = self._algorithm, self._store, self._evaluated
        cohort = example_shapes(store, self._population.cohort + self._remember)
        if further:
            key = jax.eval_shape(lambda: jax.random.key(0))
            evaluation.check_names(further, jax.eval_shape(algorithm.step, key, self._shapes, cohort)[1])
        self._chooses = serve == "loss"
        learners = cohort if self._chooses else None
        self._needs_rows = self._several and serves_rows(algorithm, self._layout, self._shapes, learners)
        of_clients = jax.eval_shape(self._layout.apart, self._shapes)[1]
        self._unread = [np.zeros((1, *x.shape[1:]), x.dtype) for x in of_clients]  # in the place of rows
        self._test_clients = self._learners = true = sizes = None
        if self._is_tested:
            self._test_clients = jax.device_put(self._hold(self._tests.gather(evaluated)))
            sizes = np.asarray(self._test_clients.size)
            if self._needs_rows or self._num_models > 1:
                self._learners = jax.device_put(self._hold(store.gather(evaluated)))
            has_truth = store.cluster is not None and (store.cluster[evaluated] >= 0).any()
            true = store.cluster[evaluated] if has_truth else None
        self._options = {"client_axis": self._client_axis, "further": further}
        ids = evaluated.tolist() if self._is_tested else []
        self.subjects = Subjects(algorithm, self._seeds, ids, len(store), sizes, None, true, self._choices)

    def start(self, folder: RunFolder | None, resume: bool, num_rounds: int) -> Restored:
        """Returns the checkpoint that is resumed, or the beginning of a run, and sets `client_rows` accordingly."""
        common, of_clients = jax.eval_shape(self._layout.apart, self._shapes)
        row = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in of_clients]
        place = None if folder is None else folder.path / "client_rows"
        is_there, in_memory = resume and bool(folder.rounds()), self._population.rows_in_memory
        if is_there:  # the rows stay where they were
            in_memory = -1.0 if place.is_dir() else math.inf
        elif resume:  # rows of rounds that are begun again
            shutil.rmtree(place, ignore_errors=True)
        self.client_rows = ClientRows(len(self._store), row, folder=place, resume=is_there, in_memory=in_memory)
        like = {"common": common, **self.client_rows.saved()}
        restored = read_checkpoint(folder, like, num_rounds) if resume else None
        if restored is None:
            before = self._algorithm.init_rounds
            return Restored(before, [], {"init_rounds": before}, [])
        begun = {row["seed"] for row in restored.records}
        accepted = f"{', '.join(map(str, begun))}, the name in the records of {folder.path}"
        check(begun <= {*self._seeds}, "seeds", self._seeds, accepted)
        self.client_rows.restore(restored.state)
        return restored._replace(state=[jnp.asarray(x) for x in restored.state["common"]])

    def advance(self, state, first, count, silence) -> Block:
        # The cohort, the remembered clients and their rows.
        drawn, rows = self._take(first), self.client_rows
        remembered = self._latest(drawn.ids) if self._remember else NONE
        static = {"algorithm": self._algorithm, "layout": self._layout}
        if first == 1:
            common, before = _start(self._key, drawn.clients, remembered, **static)
        else:
            common, before = state, self._rows_of(drawn.ids, drawn.clients, remembered)

        # The round.
        args = (self._key, np.int32(first), common, jax.device_put(before), drawn.clients, remembered)
        common, after, values, finite = _round(*args, **static)
        after, values, finite = jax.device_get((after, values, finite))
        entries, per_seed = self._algorithm.entries, {name: v[None] for name, v in values.items()}
        silence = evaluation.silence_after(silence, per_seed)

        # The rows of participants change, and those of remembered clients where the server has changed them.
        changed = drawn.size > 0
        if self._remember:
            changed = np.concatenate([changed, rows.seen[remembered] & _differ(before, after, self._population.cohort)])
        self._drawn, self._after, written = drawn, after, np.flatnonzero(changed)
        rows.write(np.concatenate([drawn.ids, remembered])[written], [values[written] for values in after])
        sums = {name: [float(v)] for name, v in values.items() if name in (*evaluation.SUMMED, *entries.sums)}
        sums |= {name: [float(count)] for name, count in drawn.counts.items()}
        largest = {name: per_seed[name].astype(np.int32) for name in entries.largest if name in per_seed}
        return Block(common, per_seed, sums, largest, finite[None], silence, silence.count)

    def evaluate(self, state, values) -> Assessment:
        values = values | {"seen": self.client_rows.seen.sum(keepdims=True)}
        if self._test_clients is None:
            served = self._algorithm.serve(self._layout.together(state, self._after), None)
            count = self._population.cohort + self._remember
            if served.to is not None and not self._layout.personal:
                evaluation.check_clusters(np.asarray(served.to), self._num_models)
            return Assessment(np.asarray(evaluation.found_clusters(served, (count,)))[None], values)
        # What the evaluated clients are served.
        layout, ids, learners, algorithm = self._layout, self._evaluated, self._learners, self._algorithm
        rows = self._rows_of(ids, learners) if self._needs_rows else self._unread
        whole = layout.together(state, rows)
        if algorithm.refresh:
            whole = _called(whole, learners, function=algorithm.refresh)
        if layout.personal or self._num_models > 1 or self._needs_rows:
            served = _called(whole, learners if self._chooses else None, function=algorithm.serve)
        else:  # the only model
            served = algorithm.serve(whole, None)._replace(to=jnp.zeros(len(ids), jnp.int32))
        if layout.personal:
            served = served._replace(to=jnp.arange(len(ids), dtype=jnp.int32))

        results = evaluation.evaluate_served(algorithm.task, served, self._test_clients, **self._options)
        weights = served.to if evaluation.is_mixture(served) else served.shares
        to, (held_out, reported), weights = jax.device_get((served.to, results, weights))
        if not layout.personal:
            evaluation.check_clusters(np.asarray(to), self._num_models)
        if served.shares is not None:
            evaluation.check_clusters(np.asarray(served.shares), self._num_models)
        held_out, weights = {name: v[None] for name, v in held_out.items()}, None if weights is None else weights[None]
        more = {"weights": weights, "examples": self._store.sizes(ids)}
        return Assessment(np.asarray(reported)[None], values, held_out, **more)

    def saved(self, state) -> Any:
        return {"common": state, **self.client_rows.saved()}

    def final(self, state, done, assessment) -> tuple[Any, dict[str, np.ndarray], Served]:
        # The rows of the last cohort; of that of round `done` if none was drawn.
        cohort = self._drawn or self._take(done)
        rows = self._rows_of(cohort.ids, cohort.clients)
        whole = self._layout.together(state, jax.tree.map(jnp.asarray, rows))
        clients = {"id": self._evaluated, "examples": self._store.sizes(self._evaluated)[None]}
        if self._test_clients is not None:
            assessment = assessment or self.evaluate(state, {})
            clients |= assessment.of_clients()
            clients |= {} if assessment.weights is None else {"weights": assessment.weights}
        return whole, clients, self._algorithm.serve(whole, None)

    def _rows_of(self, ids: np.ndarray, clients: Clients, remembered: np.ndarray = NONE) -> list:
        """Returns the rows of the clients `ids` and `remembered`; clients without a row get their first one."""
        fresh = partial(_fresh, self._key, clients, remembered, join=self._join, layout=self._layout)
        return self.client_rows.take(np.concatenate([ids, remembered]), lambda: jax.device_get(fresh()))

    def _latest(self, ids: np.ndarray) -> np.ndarray:
        """Returns the ids `[R]`, ascending, of the clients with the latest updates besides `ids`."""
        rows, seen = self.client_rows, np.flatnonzero(self.client_rows.seen)
        when = np.zeros(len(rows.seen), np.int32)
        when[seen] = rows.column(self._layout.last_updates, seen)
        when[ids] = -1
        return np.sort(np.argpartition(-when, self._remember - 1)[: self._remember]).astype(np.int32)


def _differ(before: list, after: list, first: int) -> np.ndarray:
    """Returns `[R]` bool: the rows from `first` on that differ in any bit."""
    differ = np.zeros(len(after[0]) - first, bool)
    for old, new in zip(before, after, strict=True):
        pair = [np.ascontiguousarray(x[first:]).reshape(len(differ), -1).view(np.uint8) for x in (old, new)]
        differ |= (pair[0] != pair[1]).any(axis=1)
    return differ


# Checks.


def _evaluated(evaluate: Any, n: int, words: list[int]) -> np.ndarray:
    """Returns the ids of the evaluated clients, in ascending order if they are drawn."""
    if isinstance(evaluate, (int, np.integer)):
        check_count("evaluate", evaluate)
        count = min(int(evaluate), n)
        rng = np.random.default_rng([*words, EVALUATION_STREAM])
        return np.sort(rng.choice(n, count, replace=False, shuffle=False))
    ids = check_integers("evaluate", evaluate, within=(0, n - 1))
    check(len(np.unique(ids)) == len(ids), "evaluate", evaluate, "ids that are given once each")
    return ids.astype(np.int64)


def _check_population(population: Population, algorithm: Algorithm) -> None:
    """Raises `ValueError` for bad values of a population, and for labels that the model does not have."""
    store, tests = population.clients, population.test_clients
    accepted = "a ClientStore, such as ClientStore.from_clients(clients)"
    for name, part in (("clients", store), ("test_clients", store if tests is None else tests)):
        check(isinstance(part, ClientStore), name, type(part).__name__, accepted)
    check_options(Population, population._asdict())
    require("step" not in store.fields, "drifting data cannot be a population: the store has an array 'step'")
    check_count("cohort", population.cohort, most=len(store))
    asked = f"stragglers={population.stragglers} draws {population.asked} clients a round"
    require(population.asked <= len(store), f"{asked}, and there are {len(store)}")
    if tests is not None:
        check_fits(store, tests, "test_clients")
    evaluation.check_evaluated(algorithm.task, [] if tests is None else ["test_clients"])
    classes = None if algorithm.task is None else algorithm.task.num_classes
    for name, part in {"clients": store, "test_clients": tests}.items():
        if part is not None and "y" in part.fields and classes is not None:
            check_store_labels(part, classes, name)


def _check_hardest(algorithm: Algorithm, store: ClientStore, count: int) -> None:
    """Calls the algorithm's own check, if it has one, on the clients with the fewest examples."""
    if algorithm.check is not None:
        sizes = store.sizes().astype(np.int64)
        order = np.where(sizes > 0, sizes, np.iinfo(np.int64).max)
        hardest = store.gather(np.sort(np.argpartition(order, count - 1)[:count]))
        largest = np.flatnonzero(sizes)[-1].astype(hardest.id.dtype)  # which arguments by id must include as well
        algorithm.check(hardest._replace(id=np.maximum(hardest.id, largest)))
