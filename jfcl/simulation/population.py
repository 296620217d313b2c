"""Populations of which the device holds one cohort: each round another one is drawn, trained and put back.

A round of a population is `algorithm.step` on a cohort. What the method keeps of each client (`client_rows`) waits
on the host for the client's next turn; a thread gathers the next cohort from the `ClientStore` while one trains.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jfcl.analysis import metrics
from jfcl.core import Algorithm, Clients, check, check_choice, check_count, check_key, check_state, is_finite
from jfcl.data.store import ClientStore, check_cohort, check_fits, example_shapes
from jfcl.execution import mapping, memory
from jfcl.simulation.client_rows import IN_MEMORY, ClientRows
from jfcl.simulation.cohorts import make_sampler, who_answers
from jfcl.simulation.folder import RunFolder
from jfcl.simulation.loop import MOST_CLUSTERS_KEPT, SERVE, SUMMED, History, finite_mean, found_clusters
from jfcl.simulation.progress import Watch, stop_if_diverged, stop_if_nothing_came, warn_if_never_examined, warn_once

_COHORT, _EVALUATED = range(2)  # streams of random numbers
REMEMBER = 1000  # clients whose last updates are compared besides the cohort's, where nothing else is asked for
NONE = np.zeros(0, np.int32)

Start = Callable[[jax.Array, Clients], Any]


class PopulationHistory(NamedTuple):
    """What `simulate_population` leaves behind; as `History`, but for:

    Attributes:
      state: after the last round; rows of clients are those of its cohort.
      clients: of the evaluated clients, `[1, E]` each: `examples` (in training), `cluster`, and `loss`, `accuracy`, ...
        of their test examples; and their `id`, `[E]`.
      rows: what is kept of every client of the population, a `jfcl.simulation.client_rows.ClientRows`.
    """

    records: list[dict[str, Any]]
    state: Any
    clients: dict[str, np.ndarray]
    rounds: int
    seconds: float
    compile_seconds: float
    client_steps: float
    rows: ClientRows

    series = History.series


class Cohort(NamedTuple):
    """One round's clients.

    Attributes:
      ids: `[C]`, ascending.
      size: `[C]` int32, 0 for those that did not answer.
      clients: on the device.
      asked, dropped, cut: how many were asked, did not answer, or came too late.
    """

    ids: np.ndarray
    size: np.ndarray
    clients: Clients
    asked: int
    dropped: int
    cut: int


# ---------------------------------------------------------------------------------------------------------------
# Which part of a state belongs to clients.


class Split(NamedTuple):
    """A state as two lists: what all clients share, and rows of clients. Hashable, so that programs can depend on it.

    Attributes:
      structure: the state's.
      axes: by leaf, the axis of its clients; None where it has none.
      personal: whether each client has a model of its own; then `cluster` only counts the cohort, and is nobody's.
      heard: of the rows, the one with the round of each client's last update; None where a method keeps no updates.
    """

    structure: Any
    axes: tuple[int | None, ...]
    personal: bool
    heard: int | None

    @property
    def of_clients(self) -> tuple[bool, ...]:
        """By leaf, whether it has a row for each client of the cohort."""
        return tuple(axis is not None for axis in self.axes)

    def apart(self, state: Any) -> tuple[list, list]:
        """`(common, rows)`; a row of clients is the first axis of each array in `rows`."""
        leaves = list(zip(jax.tree.leaves(state), self.axes, strict=True))
        common, rows = ([x for x, axis in leaves if (axis is None) == shared] for shared in (True, False))
        axes = [axis for axis in self.axes if axis is not None]
        return common, [_moved(x, axis, 0) for x, axis in zip(rows, axes, strict=True)]

    def together(self, common: Sequence, rows: Sequence) -> Any:
        """The state."""
        common, rows = iter(common), iter(rows)
        leaves = [next(common) if axis is None else _moved(next(rows), 0, axis) for axis in self.axes]
        return jax.tree.unflatten(self.structure, leaves)


def _moved(x: Any, source: int, target: int) -> Any:
    """An array, or its shape, with one axis moved; a placeholder without axes as it is."""
    if source == target or not hasattr(x, "shape"):
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.eval_shape(partial(jnp.moveaxis, source=source, destination=target), x)
    return jnp.moveaxis(x, source, target)


def split_state(init: Start, store: ClientStore, count: int) -> tuple[Split, Any]:
    """Returns how a state of `count` clients divides, and its shapes; from those of `init` for one client more.

    Raises:
      ValueError: more than one client axis, of methods that keep something for each pair of clients.
    """
    key = jax.eval_shape(lambda: jax.random.key(0))
    state, more = (jax.eval_shape(init, key, example_shapes(store, c)) for c in (count, count + 1))
    _check_splitting(state, more, count)
    axes, names = [], []
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(more), strict=True):
        follows = [axis for axis, (a, b) in enumerate(zip(one.shape, other.shape, strict=True)) if a != b]
        if len(follows) > 1 or any(one.shape[axis] != count for axis in follows):
            raise ValueError(
                "algorithm must be a method that can go on with other clients every round; this one compares all of"
                f" them with each other: state{jax.tree_util.keystr(path)} has shape {one.shape} for {count} clients."
                " Use simulate for it, with all clients on the device"
            )
        axes.append(follows[0] if follows else None)
        names.append(getattr(path[0], "name", None))
    personal = any(axis is not None for axis, name in zip(axes, names, strict=True) if name == "params")
    axes = [None if personal and name == "cluster" else axis for axis, name in zip(axes, names, strict=True)]
    paths = [
        path
        for (path, _), axis in zip(jax.tree_util.tree_leaves_with_path(state), axes, strict=True)
        if axis is not None
    ]
    heard = [i for i, path in enumerate(paths) if [getattr(p, "name", None) for p in path] == ["heard", "round"]]
    return Split(jax.tree.structure(state), tuple(axes), personal, heard[0] if heard else None), state


def _check_splitting(state: Any, more: Any, count: int) -> None:
    """`ValueError` for options of CFL that a population cannot have; `state` and `more` as in `split_state`."""
    if not hasattr(state, "active"):
        return
    k = len(state.active)
    check(k == len(more.active), "max_clusters", None, f"given for a cohort of {count}: the default depends on it")
    check(k != count, "cohort", count, f"another number than max_clusters, {k}, so that records can tell them apart")


def depends_on_clients(init: Start, store: ClientStore, cohort: int) -> list[bool]:
    """By leaf of the state, whether `init` computes it from the clients it is given, rather than from its key."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    clients = example_shapes(store, cohort)
    traced = jax.make_jaxpr(init)(key, clients)
    return _reached(traced.jaxpr, [False, *[True for _ in jax.tree.leaves(clients)]])


def _reached(jaxpr: Any, sources: list[bool]) -> list[bool]:
    """By output of a jaxpr, whether any of the inputs that are `sources` flows into it. Loops count as a whole."""
    reached = {id(v) for v, is_source in zip(jaxpr.invars, sources, strict=True) if is_source}
    for equation in jaxpr.eqns:
        inputs = [id(v) in reached for v in equation.invars]
        inner = getattr(equation.params.get("jaxpr"), "jaxpr", None)
        if inner is not None and len(inner.invars) == len(inputs) and equation.primitive.name in ("jit", "pjit"):
            outputs = _reached(inner, inputs)
        else:
            outputs = [any(inputs)] * len(equation.outvars)
        reached |= {id(v) for v, hit in zip(equation.outvars, outputs, strict=True) if hit}
    return [id(v) in reached for v in jaxpr.outvars]


# ---------------------------------------------------------------------------------------------------------------
# The compiled parts. Algorithm, split and task are static: the same objects again compile nothing.


def _strong(tree: Any) -> Any:
    """The same numbers with types that stay: a Python scalar in a state would make the next round another program."""
    return jax.tree.map(lambda x: jax.lax.convert_element_type(x, x.dtype), tree)


def _with(clients: Clients, remembered: Any) -> Clients:
    """`clients`, and behind them those with the ids `remembered` `[R]`, without their examples."""
    count = len(remembered)
    if count == 0:
        return clients

    def behind(x):
        return jnp.concatenate([x, jnp.zeros((count, *x.shape[1:]), x.dtype)])

    return Clients(
        jax.tree.map(behind, clients.examples), behind(clients.size), jnp.concatenate([clients.id, remembered])
    )


@partial(jax.jit, static_argnames=("init", "split"))
def _start(key, clients, remembered, *, init, split):
    """The first state, apart."""
    clients = _with(clients, remembered)
    state = init(jax.random.fold_in(key, 0), clients)
    check_state(state, clients)
    return _strong(split.apart(state))


@partial(jax.jit, static_argnames=("join", "split"))
def _fresh(key, clients, remembered, *, join, split):
    """The rows that clients start with. XLA leaves out whatever else `join` would compute."""
    return _strong(split.apart(join(jax.random.fold_in(key, 0), _with(clients, remembered)))[1])


@partial(jax.jit, static_argnames=("step", "split"), donate_argnames="common")
def _round(key, t, common, rows, clients, remembered, *, step, split):
    clients = _with(clients, remembered)
    state, values = step(jax.random.fold_in(key, t), split.together(common, rows), clients)
    n = clients.size.shape[0]
    values = {  # of clients, the mean over those that took part
        name: finite_mean(v) if v.ndim > 0 and v.shape[0] == n else v for name, v in values.items()
    }
    return *_strong(split.apart(state)), values, is_finite(state.params)


class _Result(NamedTuple):
    """What a round has given: the state apart, rows and metrics on the host; `ids` `[C + R]`, the clients of the rows,
    and `changed` `[C + R]` bool, the rows to be kept."""

    round: int
    common: list
    rows: list
    values: dict[str, np.ndarray]
    cohort: Cohort
    ids: np.ndarray
    changed: np.ndarray


class _Done(NamedTuple):
    """What rounds have led to."""

    round: int
    common: list
    totals: dict[str, Any]


class _Judge:
    """Evaluates some clients, always the same, under the models that they would be served.

    Attributes:
      num_models: those that the method has for all clients; 1 where every client has its own.
    """

    def __init__(self, algorithm, split, shapes, store, test_store, evaluated, serve, client_axis, rows_of):
        self.num_models = 1 if split.personal else jax.tree.leaves(shapes.params)[0].shape[0]
        self._split, self._evaluated, self._rows_of = split, evaluated, rows_of
        choose = serve == "loss" and algorithm.by_loss
        self._by_rows = split.personal or (self.num_models > 1 and not choose)
        self._tests = self._learners = self._true = None
        if test_store is not None and algorithm.task is not None:
            self._tests = jax.device_put(test_store.gather(evaluated))
            if self._by_rows or self.num_models > 1:
                self._learners = jax.device_put(store.gather(evaluated))
            if store.cluster is not None:
                self._true = store.cluster[evaluated]
        self._ask = partial(metrics.evaluate, algorithm.task, client_axis=client_axis)
        self._refresh = jax.jit(algorithm.refresh) if algorithm.refresh else lambda state, clients: state

    def _assess(self, common: list) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """The clusters of the evaluated clients, and how good the models are that they are served."""
        split, ids, learners = self._split, self._evaluated, self._learners
        mine = self._rows_of(ids, learners) if self._by_rows else [0] * sum(split.of_clients)
        state = self._refresh(split.together(common, mine), learners)
        found = served = jnp.zeros(len(ids), jnp.int32)
        if split.personal:
            served = jnp.arange(len(ids), dtype=jnp.int32)
            found = getattr(state, "group", served)
        elif self.num_models > 1:
            found = served = state.cluster if self._by_rows else self._ask(state.params, learners, None)["cluster"]
        return jax.device_get((found, self._ask(state.params, self._tests, served)))

    def record(self, result: _Result) -> dict[str, Any]:
        """What is to be said of a round."""
        row: dict[str, Any] = {"round": result.round}
        if self._tests is not None:
            found, held_out = self._assess(result.common)
            row |= metrics.summarize(held_out, np.asarray(self._tests.size))
        else:
            found = np.asarray(found_clusters(self._split.together(result.common, result.rows)))
        row |= {"train_loss": float(result.values["loss"]), "clusters_in_use": len(np.unique(found))}
        if self._true is not None:
            row |= metrics.cluster_recovery(found, self._true)
        row |= {name: v.tolist() for name, v in result.values.items() if name != "loss" and name not in SUMMED}
        if self._tests is not None and len(found) <= MOST_CLUSTERS_KEPT:
            row["cluster"] = found.tolist()
        return row

    def final(self, common: list) -> dict[str, np.ndarray]:
        """Of every evaluated client the cluster, the model it is served, and how good that is; `{}` without tests."""
        if self._tests is None:
            return {}
        found, held_out = self._assess(common)
        return held_out | {"cluster": found, "model": held_out["cluster"]}


def simulate_population(
    algorithm: Algorithm,
    store: ClientStore,
    *,
    key: jax.Array,
    num_rounds: int,
    cohort: int,
    remember: int | None = None,
    sampling: str = "uniform",
    strata: Any = None,
    dropout: float = 0.0,
    stragglers: float = 0.0,
    join: Start | None = None,
    change: Callable[[Clients], Clients] | None = None,
    test_store: ClientStore | None = None,
    evaluate: int | Sequence[int] = 1000,
    serve: str = "loss",
    eval_every: int = 1,
    seed: int = 0,
    client_axis: mapping.Mapping | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    config: dict[str, Any] | None = None,
    checkpoint_seconds: float = 30.0,
    rows_in_memory: float = IN_MEMORY,
    progress: bool = False,
    description: str = "rounds",
    stop_after: int | None = None,
) -> PopulationHistory:
    """Runs `algorithm` on a population of any size, a cohort of which is on the device at a time.

    With the whole population as the cohort this is `simulate`. Clients that never took part start as `algorithm.init`
    has it for the cohort they are in.

    Args:
      algorithm: any whose rounds can be with other clients every time. Not those that cluster all clients before the
        first round (`one_shot`, `flhc`, `fesem`). `federated_clustering` and its like cluster the clients of a cohort.
        `cfl` splits a cluster by the clients of it that the cohort holds, `cfl(cohort=C)` also by the last updates of
        `remember` others; clients that missed a split are placed when they come, one split at a time. `byzantine_cfl`
        compares the clients of a cohort, so that hostile clients must be a minority of each.
      store: the clients.
      key: of the whole run. The cohort of round `t` depends on it and `t` alone.
      num_rounds: `T`.
      cohort: `C`, how many clients take part in a round.
      sampling, strata: as in `make_sampler`.
      dropout: the probability, in [0, 1), that a client that was asked does not answer. It is then as if it had no
        examples, and keeps what it had.
      stragglers: over-selection, 0 or more: `C (1 + stragglers)` clients are asked, and the first `C` to answer, in
        random order, make up the round. The others are cut: they count as asked, but their work and bytes do not.
      remember: `R`, for a method that keeps each client's last update (`cfl` with `cohort=C`): so many other clients,
        the last that were heard, are compared with those of the cohort. Default: 1,000, or all there are. Their rows,
        which hold the updates, travel to the device in every round; their examples do not.
      join: `(key, clients) -> state`, whose rows new clients start with; default: `algorithm.init`. Needed where that
        learns from the clients: for IFCA with restarts, pass the init of IFCA without; then the first cohort decides.
      change: `(clients) -> clients`, of NumPy arrays: what becomes of every cohort as it is gathered, such as
        `jfcl.attacks.poison` of the malicious.
      test_store: held-out examples of the same clients; without it nothing is evaluated.
      evaluate: how many clients, drawn once, are evaluated; or their ids.
      serve: as in `simulate`; the "state" of a client may be from long ago.
      client_axis: mapping used to evaluate; if it is `jfcl.sharded` (give it to the algorithm too), cohorts are divided
        among its devices.
      eval_every, out, resume, config, checkpoint_seconds, progress, description, stop_after: as in `simulate`.
      seed: the key's name in the records.
      rows_in_memory: what is kept of all clients is memory-mapped, in `out` if there is one, beyond so many bytes.

    Returns:
      `PopulationHistory`. Its records are those of `simulate` with, besides, totals so far: `asked`, `dropped`, `cut`,
      and `seen`, the clients that have taken part. Memory on the device: two cohorts and the models; on the host: two
      cohorts, a few bytes a client, and the rows.

    Raises:
      ValueError: bad input, before anything is compiled. What `simulate` raises; and what goes wrong in the thread.

    Example:
      >>> import jax, jfcl, numpy as np, optax
      >>> task = jfcl.models.task(lambda key: {"b": jax.numpy.zeros(())}, lambda p, x: x + p["b"], kind="regression")
      >>> people = ({"x": np.zeros(4, np.float32), "y": np.ones(4, np.float32)} for _ in range(100))
      >>> import tempfile
      >>> store = jfcl.data.ClientStore.create(tempfile.mkdtemp() + "/people", people)
      >>> algorithm = jfcl.fedavg(task, jfcl.local_training(optax.sgd(0.25), num_steps=1))
      >>> history = jfcl.simulate_population(
      ...     algorithm, store, key=jax.random.key(0), num_rounds=2, cohort=10, test_store=store
      ... )
      >>> [round(r["loss"], 4) for r in history.records]
      [0.25, 0.0625]
    """
    n = len(store)
    check_key(key)
    check_count("num_rounds", num_rounds)
    check_count("eval_every", eval_every)
    if stop_after is not None:
        check_count("stop_after", stop_after)
    check_cohort(store, cohort)
    check_choice("serve", serve, SERVE)
    check(0 <= dropout < 1, "dropout", dropout, "in [0, 1)")
    check(np.isfinite(stragglers) and stragglers >= 0, "stragglers", stragglers, "0 or more, a share of the cohort")
    asked = round(cohort * (1 + stragglers))
    check(asked <= n, "stragglers", stragglers, f"such that the {asked} clients asked are among the {n} there are")
    sampler = make_sampler(store, asked, sampling, strata)
    check(jax.process_count() == 1, "processes", jax.process_count(), "one, for populations")
    check(key.ndim == 0, "key", key.shape, "a single key")
    check(out is not None or not resume, "out", out, "the folder of the run to resume")
    if test_store is not None:
        check_fits(store, test_store, "test_store")
    words = np.asarray(jax.random.key_data(key)).tolist()
    evaluated = _evaluated(evaluate, n, words)
    if remember is not None:
        check_count("remember", remember, least=0)
        accepted = f"at most the {n - cohort} clients beside the cohort"
        check(remember <= n - cohort, "remember", remember, accepted)
    split, shapes = _check_algorithm(algorithm, store, cohort, join, remember or 0)
    if split.heard is None:
        accepted = "left out for a method that keeps no updates; give cfl the cohort as well"
        check(not remember, "remember", remember, accepted)
    elif remember is None:
        remember = min(REMEMBER, n - cohort)
        split, shapes = _check_algorithm(algorithm, store, cohort, join, remember)
    remember = remember or 0
    # Only where init learns from clients is there a difference: rows alone are then the other's.
    join = algorithm.init if join is None else join
    client_axis = mapping.auto() if client_axis is None else client_axis

    with_seed = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), shapes)
    memory.check_memory(algorithm, example_shapes(store, cohort + remember), client_axis, with_seed, copies=2)

    # Divided among devices where the cohort is a multiple of them; otherwise the mapping itself sees to it every time.
    even = mapping.num_rows(client_axis, cohort) == cohort
    send = partial(mapping.place, client_axis) if even else jax.device_put

    def prepare(t: int) -> Cohort:
        """Draws, gathers and sends off the cohort of round `t`; in the thread."""
        rng = np.random.default_rng([*words, _COHORT, t])
        ids = sampler(rng)
        chosen, answered, dropped = who_answers(rng, asked, cohort, dropout)
        clients = store.gather(ids[chosen])
        clients = clients if change is None else change(clients)
        size = np.where(answered, clients.size, 0).astype(np.int32)
        cut = max(asked - dropped - cohort, 0)
        return Cohort(ids[chosen], size, send(clients._replace(size=size)), asked, dropped, cut)

    thread = ThreadPoolExecutor(1, thread_name_prefix="jfcl-cohort")
    watch = Watch(num_rounds, description=description, progress=progress, checkpoint_seconds=checkpoint_seconds)
    with contextlib.ExitStack() as opened, watch, thread:
        folder = None
        if out is not None:
            about = {"clients": n, "store": store.hash, "cohort": cohort, "sampling": sampling, "dropout": dropout}
            about["test_store"] = None if test_store is None else test_store.hash
            about |= {"stragglers": stragglers, "key": words, "evaluated": zlib.crc32(evaluated.tobytes())}
            about["strata"] = None if strata is None else zlib.crc32(np.asarray(strata, np.int64).tobytes())
            about |= {"remember": remember} if remember else {}
            folder = (RunFolder.reopen if resume else RunFolder.create)(out, (config or {}) | {"cohorts": about})
            opened.callback(folder.close)
        for part in (store, test_store) if resume else ():
            if part is not None:
                part.verify(progress=progress)
        row = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in split.apart(shapes)[1]]
        kept_in = None if folder is None else folder.path / "client_rows"
        goes_on = resume and folder.has_checkpoint()
        if resume and not goes_on:  # nothing is left to be verified
            folder.restore(())
            folder.begin()
        rows = ClientRows(n, row, folder=kept_in, resume=goes_on, in_memory=rows_in_memory)
        done, records = _Done(0, [], {}), []
        like = {"common": split.apart(shapes)[0], **rows.saved()}
        restored = folder.restore(like, any_round=not rows.mapped) if goes_on else None
        if restored is not None:
            last, saved = restored.round, restored.state
            check(last <= num_rounds, "num_rounds", num_rounds, f"at least the {last} rounds already done")
            rows.verify(last, saved)
            folder.begin()
            rows.restore(last, saved)
            done = _Done(last, [jnp.asarray(x) for x in saved["common"]], restored.totals)
            records = restored.records
        until = num_rounds if stop_after is None else min(num_rounds, stop_after)

        def rows_of(ids: np.ndarray, clients: Clients, remembered: np.ndarray = NONE) -> list:
            """What is kept of the clients `ids` and of `remembered`; those that never took part start here."""
            ids = np.concatenate([ids, remembered])
            if rows.all_seen(ids):
                return rows.take(ids, None)
            return rows.take(ids, jax.device_get(_fresh(key, clients, remembered, join=join, split=split)))

        judge = _Judge(algorithm, split, shapes, store, test_store, evaluated, serve, client_axis, rows_of)

        def commit(result: _Result) -> _Done:
            """Puts a round's results in their places."""
            there = np.flatnonzero(result.changed)
            rows.write(result.ids[there], [values[there] for values in result.rows])
            added = {name: float(v) for name, v in result.values.items() if name in SUMMED}
            added |= {name: float(getattr(result.cohort, name)) for name in ("asked", "dropped", "cut")}
            totals = {name: done.totals.get(name, 0.0) + value for name, value in added.items()}
            return _Done(result.round, result.common, totals)

        result: _Result | None = None
        warned: set[str] = set()
        watch.begin(done.round, done.totals.pop("time", (0.0, 0.0)))
        coming = thread.submit(prepare, min(done.round + 1, until))
        while done.round < until:
            t = done.round + 1
            drawn = coming.result()  # raises what the thread raised
            if t < until:
                coming = thread.submit(prepare, t + 1)
            others = _last_heard(rows, split.heard, drawn.ids, remember) if remember else NONE
            if t == 1:
                common, before = _start(key, drawn.clients, others, init=algorithm.init, split=split)
            else:
                common, before = done.common, rows_of(drawn.ids, drawn.clients, others)
            new, mine, values, finite = _round(
                key,
                np.int32(t),
                common,
                jax.device_put(before),
                drawn.clients,
                others,
                step=algorithm.step,
                split=split,
            )
            mine, values, finite = jax.device_get((mine, values, finite))
            stop_if_diverged(finite[None], t, [seed], folder)
            stop_if_nothing_came({k: v[None] for k, v in values.items()}, t, [seed], folder)
            ids = np.concatenate([drawn.ids, others])
            changed = drawn.size > 0
            if remember:
                changed = np.concatenate([changed, rows.seen[others] & _differ(before, mine, cohort)])
            result = _Result(t, new, mine, values, drawn, ids, changed)
            done = commit(result)
            if t % eval_every == 0 or t == num_rounds:
                records.append({"seed": seed, **judge.record(result), **done.totals, "seen": int(rows.seen.sum())})
                if folder is not None:
                    folder.append(records[-1:])
                models = 1 if hasattr(shapes, "active") else judge.num_models  # one that is never split is no collapse
                warn_once(warned, records[-1:], models, cohort, store.cluster)
            watch.advance(t, records[-1] if records else {})
            if folder is not None and (watch.due() or watch.interrupted or t == until):
                rows.checkpointing(t)
                folder.save(t, {"common": done.common, **rows.saved()}, done.totals | {"time": watch.clock()})
                rows.checkpointed(t)
                watch.saved()
            if watch.interrupted:
                raise KeyboardInterrupt
        warn_if_never_examined(records[-1:], done.round)
        if result is None:  # a run that had already ended: its last cohort again
            drawn = coming.result()
        mine = rows_of(drawn.ids, drawn.clients)
        state = split.together(done.common, jax.tree.map(jnp.asarray, mine))
        final = {"id": evaluated, "examples": store.sizes(evaluated)[None]}
        final |= {name: np.asarray(value)[None] for name, value in judge.final(done.common).items()}
        seconds, compile_seconds = watch.clock()
    steps = done.totals.get("client_steps", 0.0)
    return PopulationHistory(records, state, final, done.round, seconds, compile_seconds, steps, rows)


def _evaluated(evaluate: int | Sequence[int], n: int, words: list[int]) -> np.ndarray:
    """The ids of the clients that are evaluated, in ascending order where they are drawn."""
    if isinstance(evaluate, (int, np.integer)):
        check_count("evaluate", evaluate)
        count = min(int(evaluate), n)
        rng = np.random.default_rng([*words, _EVALUATED])
        return np.sort(rng.choice(n, count, replace=False, shuffle=False))
    ids = np.asarray(evaluate)
    fits = ids.ndim == 1 and len(ids) > 0 and ids.dtype.kind in "iu"
    check(fits, "evaluate", evaluate, "a number of clients, or a vector of ids")
    check(ids.min() >= 0 and ids.max() < n, "evaluate", (ids.min(), ids.max()), f"ids in 0..{n - 1}")
    return ids.astype(np.int64)


def _last_heard(rows: ClientRows, heard: int, ids: np.ndarray, count: int) -> np.ndarray:
    """`[R]` ids, ascending: the clients beside `ids` that were heard last; among equals any, always the same."""
    when = np.where(rows.seen, rows.arrays[heard], 0)
    when[ids] = -1
    return np.sort(np.argpartition(-when, count - 1)[:count]).astype(np.int32)


def _differ(before: list, after: list, first: int) -> np.ndarray:
    """`[R]` bool: rows from `first` on that a round has changed, in any bit."""
    found = np.zeros(len(after[0]) - first, bool)
    for old, new in zip(before, after, strict=True):
        pair = [np.ascontiguousarray(x[first:]).reshape(len(found), -1).view(np.uint8) for x in (old, new)]
        found |= (pair[0] != pair[1]).any(axis=1)
    return found


def _check_algorithm(
    algorithm: Algorithm, store: ClientStore, cohort: int, join: Start | None, remember: int = 0
) -> tuple[Split, Any]:
    """How the algorithm's state divides, and its shapes; `ValueError` for one that does not do for a population."""
    count = cohort + remember
    about = ", ".join(f"{name} {f.dtype} {f.shape}" for name, f in store.fields.items())
    key = jax.eval_shape(lambda: jax.random.key(0))
    try:
        split, state = split_state(algorithm.init, store, count)
        jax.eval_shape(algorithm.step, key, state, example_shapes(store, count))
    except ValueError:
        raise
    except Exception as error:  # whatever flax and jax think of shapes that do not fit
        raise ValueError(f"algorithm must be of a model for the store's examples, {about}: {error}") from error
    if join is None:
        learnt = depends_on_clients(algorithm.init, store, count)
        shared = [x for x, mine in zip(learnt, split.of_clients, strict=True) if not mine]
        if any(shared):
            raise ValueError(
                "join must be given for this algorithm: its init learns models from the clients of the first cohort, so"
                " that it would give clients of later ones places among other models. For IFCA with restarts, or"
                " HypCluster with warm rounds, pass the init of the same method without; methods that cluster all"
                " clients before the first round (one_shot, flhc, fesem) need them all: use simulate"
            )
    else:
        same = split_state(join, store, count)
        shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), s) for s in (state, same[1])]
        check(same[0] == split and shapes[0] == shapes[1], "join", join, "an init whose states have the same shapes")
    if algorithm.check is not None:  # asked about those for whom it is hardest: clients with few examples
        sizes = store.sizes().astype(np.int64)
        order = np.where(sizes > 0, sizes, np.iinfo(np.int64).max)
        algorithm.check(store.gather(np.sort(np.argpartition(order, cohort - 1)[:cohort])))
    return split, state
