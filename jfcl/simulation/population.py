"""`simulate_population`: a run with one cohort of a population on the device at a time."""

from __future__ import annotations

import contextlib
import math
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jfcl import mapping
from jfcl.analysis.metrics import Metric
from jfcl.core import Algorithm, Clients, Task, check, check_count
from jfcl.data.store import ClientStore, check_cohort, check_fits, check_store_labels, example_shapes
from jfcl.mapping import layout, memory
from jfcl.simulation.callbacks import Callbacks
from jfcl.simulation.client_rows import IN_MEMORY, ClientRows
from jfcl.simulation.cohorts import COHORT_STREAM, Cohort, cohort_stream, make_sampler, who_answers
from jfcl.simulation.evaluation import check_further
from jfcl.simulation.folder import Restored, RunFolder
from jfcl.simulation.loop import History, check_run, open_folder, read_checkpoint, resumption, run_rounds, seed_names
from jfcl.simulation.progress import Watch
from jfcl.simulation.results import keep_results
from jfcl.simulation.state_split import Start, check_algorithm
from jfcl.simulation.streamed import Streamed

OF_RUN = ("time", "silence", "init_rounds")  # totals of a checkpoint that are not of a seed
EVALUATION_STREAM = COHORT_STREAM + 1  # of the random numbers of a run on the host


class PopulationHistory(NamedTuple):
    """The result of `simulate_population`; as `History`, except for:

    Attributes:
      state: after the last round; rows of clients are those of its cohort.
      clients: of the evaluated clients, `[1, E]` each: the arrays of `History.clients`; and their `id`, `[E]`.
      rows: the rows of every client of the population, a `jfcl.simulation.client_rows.ClientRows`.
    """

    records: list[dict[str, Any]]
    state: Any
    clients: dict[str, np.ndarray]
    rounds: int
    seconds: float
    compile_seconds: float
    client_steps: float
    ended: str
    init_rounds: int
    served: Any
    rows: ClientRows

    __repr__ = History.__repr__
    series = History.series


@memory.out_of_memory()
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
    keep_clients: bool = False,
    metrics: Mapping[str, Metric] | None = None,
    callbacks: Sequence[Any] = (),
    summary: bool = True,
) -> PopulationHistory:
    """Runs `algorithm` on a population of any size, with one cohort on the device at a time.

    With the whole population as the cohort this is `simulate`. A client that takes part for the first time starts with
    the row that `algorithm.init` gives it in its cohort.

    Args:
      algorithm: a method that allows other clients in every round. Not those that cluster all clients before the first
        round (`one_shot`, `flhc`, `fesem`). `federated_clustering`, `myopic_clustering` and `momentum_clustering`
        cluster the clients of a cohort. `cfl` splits a cluster by its clients in the cohort, `cfl(cohort=C)` also by
        the last updates of `remember` others; a client that missed a split is placed in its next round, one split at a
        time. `byzantine_cfl` compares the clients of a cohort, so that hostile clients must be a minority of each.
      store: the clients.
      key: of the whole run. The cohort of round `t` depends on `key` and `t` alone.
      num_rounds: `T`.
      cohort: `C`, the number of clients in a round.
      sampling, strata: as in `jfcl.simulation.cohorts.make_sampler`.
      dropout: the probability, in [0, 1), that a sampled client does not answer. It then counts as a client without
        examples, and its row stays as it is.
      stragglers: over-selection, 0 or more: `C (1 + stragglers)` clients are drawn, and the first `C` answers, in
        random order, make up the round. The others are cut: they count as drawn (`asked`), but their work and bytes do
        not count.
      remember: `R`, for a method that keeps each client's last update (`cfl` with `cohort=C`): the number of clients
        outside the cohort, those with the latest updates, that are compared with the cohort. Default: 1,000, or all.
        Their rows, which hold the updates, are copied to the device in every round; their examples are not.
      join: `(key, clients) -> state`, which gives new clients their first rows; default: `algorithm.init`. Required if
        that learns models from the clients: for IFCA with restarts, pass the init of IFCA without restarts; the first
        cohort then decides.
      change: `(clients) -> clients`, of NumPy arrays: applied to every cohort after it is gathered, for example
        `jfcl.attacks.poison` for malicious clients.
      test_store: test examples of the same clients; without it nothing is evaluated.
      evaluate: the number of evaluated clients, drawn once; or their ids.
      serve: as in `simulate`; the "state" of a client is that of its last round.
      client_axis: mapping for evaluations; if it is `jfcl.sharded` (give it to the algorithm too), cohorts are divided
        among its devices.
      metrics, eval_every, out, resume, config, checkpoint_seconds, progress, description, stop_after, keep_clients,
        callbacks, summary: as in `simulate`. Without `test_store`, there is no `clients.csv`.
      seed: the key's name in the records.
      rows_in_memory: bytes of rows of all clients beyond which they are memory-mapped, in `out` if it is given. Of no
        effect on a run that is resumed: its rows stay where they were.

    Returns:
      `PopulationHistory`. Its records are those of `simulate` with further totals: `asked`, `dropped`, `cut`, and
      `seen`, the number of clients that have taken part. Memory on the device: two cohorts and the models; on the host:
      two cohorts, a few bytes a client, and the rows.

    Raises:
      ValueError: bad input, before anything is compiled. Also all errors of `simulate`, and errors of the thread that
        gathers cohorts.

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
    # Check the options.
    check(isinstance(algorithm, Algorithm), "algorithm", algorithm, "an Algorithm")
    check(
        isinstance(store, ClientStore), "store", type(store), "a ClientStore, such as ClientStore.from_clients(clients)"
    )
    n = len(store)
    further = _check_own(seed, config, rows_in_memory, dropout, stragglers, metrics)
    check_run(key, num_rounds, eval_every, stop_after, serve, out, resume, config, checkpoint_seconds, callbacks)
    check_cohort(store, cohort)
    asked = round(cohort * (1 + stragglers))
    check(asked <= n, "stragglers", stragglers, f"such that the {asked} clients drawn are among the {n} there are")
    sampler = make_sampler(store, asked, sampling, strata)
    check(jax.process_count() == 1, "processes", jax.process_count(), "one, for populations")
    check(key.ndim == 0, "key", key.shape, "a single key")
    _check_stores(store, test_store, algorithm.task)
    words = np.asarray(jax.random.key_data(key)).tolist()
    evaluated = _evaluated(evaluate, n, words)
    tested = test_store is None or (test_store.sizes(evaluated) > 0).any()
    check(tested, "evaluate", evaluate, "clients of which one at least has test examples")

    # Check that the method and the memory suffice.
    shapes_of = partial(example_shapes, store)
    remember, split, shapes = check_algorithm(algorithm, n, cohort, join, remember, shapes_of)
    _check_hardest(algorithm, store, cohort)
    client_axis = mapping.or_auto(client_axis)
    with_seed = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), shapes)
    hold = partial(layout.held, client_axis, algorithm.task)
    served = jax.eval_shape(lambda state: algorithm.serve(state, None), shapes)
    several = split.personal or jax.tree.leaves(served.models)[0].shape[0] > 1 or jax.tree.leaves(served.personal)
    judged = [] if test_store is None or algorithm.task is None else [test_store, store] if several else [test_store]
    others = [hold(example_shapes(part, len(evaluated))) for part in judged]
    trained = hold(example_shapes(store, cohort + remember))
    memory.check_memory(algorithm, trained, client_axis, with_seed, copies=2, others=others)

    # The cohorts. They are divided among devices here if their number divides the cohort, otherwise by the mapping.
    even = mapping.num_rows(client_axis, cohort) == cohort
    send = partial(mapping.place, client_axis) if even else jax.device_put

    def prepare(t: int) -> Cohort:
        """Draws and gathers the cohort of round `t`, and sends it to the device; in the thread."""
        rng = np.random.default_rng([*words, COHORT_STREAM, t])
        ids = sampler(rng)
        chosen, answered, dropped = who_answers(rng, asked, cohort, dropout)
        clients = store.gather(ids[chosen])
        clients = clients if change is None else change(clients)
        size = np.where(answered, clients.size, 0).astype(np.int32)
        cut = max(asked - dropped - cohort, 0)
        return Cohort(ids[chosen], size, send(hold(clients)._replace(size=size)), asked, dropped, cut)

    until = num_rounds if stop_after is None else min(num_rounds, stop_after)
    watch = Watch(num_rounds, description=description, progress=progress, checkpoint_seconds=checkpoint_seconds)
    with contextlib.ExitStack() as opened, watch, cohort_stream(prepare, until) as take:
        # Begin or resume. The configuration names the cohorts and their clients.
        drawn = {"cohort": cohort, "sampling": sampling, "dropout": dropout, "stragglers": stragglers, "key": words}
        drawn |= {"remember": remember} if remember else {}
        drawn |= _digests(store, test_store, evaluated, strata)
        config = (config or {}) | {"cohorts": drawn}
        folder = open_folder(opened, out, resume, config, num_rounds)
        for part in (store, test_store) if resume else ():
            if part is not None:
                part.verify(progress=progress)
        begin = Restored(algorithm.init_rounds, [], {"init_rounds": algorithm.init_rounds}, [])
        rows, start = _open_rows(folder, resume, begin, seed, n, split.apart(shapes), rows_in_memory, num_rounds)
        if resume:
            watch.tell(resumption(out, start if folder.has_checkpoint() else None, num_rounds))

        # Run.
        join = algorithm.init if join is None else join
        backend = Streamed(algorithm, store, key, join, split, shapes, cohort, remember, rows, take)
        backend.observe(seed, test_store, evaluated, serve, client_axis, further)
        schedule = {"num_rounds": num_rounds, "eval_every": eval_every, "stop_after": stop_after}
        called = Callbacks(callbacks, description, config, num_rounds + start.totals.get("init_rounds", 0), out)
        history = run_rounds(
            backend, start, **schedule, keep_clients=keep_clients, watch=watch, folder=folder, callbacks=called
        )
        history = PopulationHistory(*history, rows=rows)
        if summary and folder is not None and called.is_finished():
            about = {"config": config, "seeds": [seed], "ids": evaluated.tolist(), "num_clients": n}
            keep_results(out, history, **about, true_cluster=backend.subjects.true_cluster)
    return history


def _digests(store: ClientStore, test_store: ClientStore | None, evaluated: np.ndarray, strata: Any) -> dict[str, Any]:
    """Returns what identifies the clients of a run in its configuration."""
    tests, of_strata = None if test_store is None else test_store.hash, None
    if strata is not None:
        of_strata = zlib.crc32(np.asarray(strata, np.int64).tobytes())
    found = {"clients": len(store), "store": store.hash, "test_store": tests}
    return found | {"evaluated": zlib.crc32(evaluated.tobytes()), "strata": of_strata}


def _evaluated(evaluate: int | Sequence[int], n: int, words: list[int]) -> np.ndarray:
    """Returns the ids of the evaluated clients, in ascending order if they are drawn."""
    if isinstance(evaluate, (int, np.integer)):
        check_count("evaluate", evaluate)
        count = min(int(evaluate), n)
        rng = np.random.default_rng([*words, EVALUATION_STREAM])
        return np.sort(rng.choice(n, count, replace=False, shuffle=False))
    ids = np.asarray(evaluate)
    fits = ids.ndim == 1 and len(ids) > 0 and ids.dtype.kind in "iu"
    check(fits, "evaluate", evaluate, "a number of clients, or a vector of ids")
    check(ids.min() >= 0 and ids.max() < n, "evaluate", (ids.min(), ids.max()), f"ids in 0..{n - 1}")
    return ids.astype(np.int64)


def _check_own(seed: Any, config: Any, rows_in_memory: Any, dropout: float, stragglers: float, metrics: Any) -> tuple:
    """Raises `ValueError` for values of arguments that are none; returns the metrics, as `check_further`."""
    seed_names([seed], 1)
    check("cohorts" not in (config or {}), "config", "an entry 'cohorts'", "without: the run's cohorts have this name")
    number = isinstance(rows_in_memory, (int, float, np.number)) and rows_in_memory >= 0
    check(number, "rows_in_memory", rows_in_memory, "a number of bytes, at least 0")
    check(0 <= dropout < 1, "dropout", dropout, "in [0, 1)")
    check(np.isfinite(stragglers) and stragglers >= 0, "stragglers", stragglers, "0 or more, a share of the cohort")
    return check_further(metrics)


def _open_rows(
    folder: RunFolder | None,
    resume: bool,
    begin: Restored,
    seed: int,
    n: int,
    shapes: tuple[list, list],
    in_memory: float,
    num_rounds: int,
) -> tuple[ClientRows, Restored]:
    """Returns the rows of all `n` clients and the start of the run, `begin` without a checkpoint.

    `shapes` are those of a state, apart.

    A resumed run changes its folder only after the checkpoint and the rows are verified.
    """
    common, of_clients = shapes
    row = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in of_clients]
    place = None if folder is None else folder.path / "client_rows"
    has_checkpoint = resume and folder.has_checkpoint()
    if resume and not has_checkpoint:  # nothing is left to be verified
        folder.restore(())
        folder.begin()
        shutil.rmtree(place, ignore_errors=True)  # rows of rounds that are begun again
    if has_checkpoint:  # the rows stay where they were
        in_memory = -1.0 if place.is_dir() else math.inf
    rows = ClientRows(n, row, folder=place, resume=has_checkpoint, in_memory=in_memory)
    if not has_checkpoint:
        return rows, begin
    like = {"common": common, **rows.saved()}
    done, saved, totals, records = read_checkpoint(folder, like, num_rounds, any_round=not rows.mapped)
    begun = {row["seed"] for row in records}
    check(begun <= {seed}, "seed", seed, f"{', '.join(map(str, begun))}, the name in the records of {folder.path}")
    rows.verify(done, saved)
    folder.begin()
    rows.restore(done, saved)
    totals = {name: value if name in OF_RUN else [value] for name, value in totals.items()}
    return rows, Restored(done, [jnp.asarray(x) for x in saved["common"]], totals, records)


def _check_stores(store: ClientStore, test_store: ClientStore | None, task: Task | None) -> None:
    """Raises `ValueError` for test examples of another kind, and for labels that the model does not have."""
    if test_store is not None:
        check_fits(store, test_store, "test_store")
    for name, part in {"store": store, "test_store": test_store}.items():
        if part is not None and "y" in part.fields and task is not None and task.num_classes is not None:
            check_store_labels(part, task.num_classes, name)


def _check_hardest(algorithm: Algorithm, store: ClientStore, cohort: int) -> None:
    """Calls the algorithm's own check, if it has one, on the clients with the fewest examples."""
    if algorithm.check is not None:
        sizes = store.sizes().astype(np.int64)
        order = np.where(sizes > 0, sizes, np.iinfo(np.int64).max)
        hardest = store.gather(np.sort(np.argpartition(order, cohort - 1)[:cohort]))
        largest = np.flatnonzero(sizes)[-1].astype(hardest.id.dtype)  # which arguments by id must include as well
        algorithm.check(hardest._replace(id=np.maximum(hardest.id, largest)))
