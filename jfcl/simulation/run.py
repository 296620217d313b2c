"""`simulate`: a run with all clients, or one cohort of a population at a time, on the device."""

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from jfcl import mapping
from jfcl.analysis.metrics import Metric
from jfcl.core import Algorithm, Clients, check, check_key, num_clients, require
from jfcl.core.clients import check_clients, check_examples, check_labels, check_no_bytes, check_stacked, drifts, mask
from jfcl.core.options import Interval, OneOf, Range, check_options
from jfcl.data.build import Federation
from jfcl.data.store import ClientStore, Population
from jfcl.mapping import hosts, memory
from jfcl.mapping.jitted import make_room_for_programs
from jfcl.simulation.callbacks import Callbacks, check_callbacks
from jfcl.simulation.evaluation import SERVE, check_evaluated, check_further
from jfcl.simulation.folder import RunFolder, check_folder
from jfcl.simulation.loop import History, Schedule, run_rounds
from jfcl.simulation.progress import Watch, warn_if_cores_are_idle
from jfcl.simulation.resident import Resident, build, first_row
from jfcl.simulation.results import keep_results
from jfcl.simulation.streamed import Streamed


@memory.out_of_memory()
def simulate(
    algorithm: Algorithm | Callable[..., Algorithm],
    clients: Clients | Federation | Population,
    *,
    key: jax.Array,
    num_rounds: Annotated[int, Range(1)],
    test_clients: Clients | None = None,
    newcomers: Clients | None = None,
    true_cluster: np.ndarray | None = None,
    serve: Annotated[str, OneOf(SERVE)] = "loss",
    hyperparams: dict[str, Any] | None = None,
    eval_every: Annotated[int, Range(1)] = 1,
    seeds: list[int] | None = None,
    seed_axis: mapping.Mapping | None = None,
    client_axis: mapping.Mapping | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    config: dict[str, Any] | None = None,
    checkpoint_seconds: Annotated[float, Interval("[0, inf]")] = 30.0,
    progress: bool = False,
    description: str = "rounds",
    stop_after: Annotated[int | None, Range(1)] = None,
    keep_clients: bool = False,
    state: Any = None,
    metrics: Mapping[str, Metric] | None = None,
    callbacks: Sequence[Any] = (),
    summary: bool = True,
) -> History:
    """Runs `algorithm` for `num_rounds` rounds with evaluations on the way; optionally keeps the run in a folder.

    The clients are on the device (`Clients`, or the `jfcl.data.Federation` that `jfcl.data.build` returns), or on the
    host, one cohort at a time on the device (`jfcl.Population`). Some methods end (`jfcl.cfl` with `recursive=True`,
    once every cluster is final). With all clients on the device, the run then stops at the first evaluation after the
    end in all seeds.

    A population may be of any size, with one seed in one process. With all of it as the cohort the results are those of
    its clients on the device. A client that takes part for the first time starts with the row of the state that
    `algorithm.init` gives it in its cohort. The method must not cluster all clients before the first round; one that
    compares clients compares those of a cohort.

    Args:
      algorithm: an `Algorithm`; or, with `hyperparams`, the function that makes one from them. A second call with the
        same object compiles nothing, also for other values of `hyperparams`. The programs, some ten megabytes, stay in
        memory until `jfcl.clear_programs()` drops them.
      clients: training data. A `Federation` gives `test_clients`, `newcomers` and `true_cluster` too, where these are
        left out; a `Population` has test examples and true clusters of its own.
      key: one key, or `[R]` of them: seeds, run together in one program. The cohort of round `t` depends on `key` and
        `t` alone.
      num_rounds: `T`. The rounds of a method's start (restarts, warm rounds, training before the clients are clustered)
        come before them and count: the run ends after `T` further rounds (`History.init_rounds`).
      test_clients: test examples, row `i` of client `i`; evaluated under the model that the client is served.
      newcomers: clients that are not in training, each evaluated under what the method's `adopt` serves it, by default
        the model of lowest loss on its examples (IFCA's inference); adds `newcomer_loss`, `newcomer_accuracy`.
      true_cluster: `[N]`, if known: adds `cluster_accuracy`, `adjusted_rand`, `nmi`, `purity` to the records. Clients
        with -1, for example malicious ones, do not count.
      serve: the model that a test client is served by a method with a choice among several (IFCA, HypCluster); others
        always serve the state's. "state": the model of the client's last round. "loss": the model of lowest loss on its
        training examples now, which costs `K` more passes over them in each evaluation of `test_clients`; the clusters
        in the records and in `History.clients` are then the models served.
      hyperparams: floats (or arrays) passed to `algorithm` inside the compiled program.
      eval_every: evaluations come after every round whose number it divides, and after the last round.
      seeds: names of the `R` keys in the records; default `0 .. R-1`.
      seed_axis: mapping over seeds; default: one after another on a CPU, `jax.vmap` elsewhere.
      client_axis: mapping for evaluations; default: `jfcl.auto()`. If it is `jfcl.sharded`, the clients are placed on
        its devices (give it to the algorithm too). With several processes, `clients` and `test_clients` are those of
        this process, `mapping.own_rows` (of a `Federation`, by `rows` of `jfcl.data.build`), and the first one writes
        all files.
      out: the run's folder: gets `config.json`, `metrics.jsonl`, `checkpoints/`, and once all rounds are done, or the
        method or a callback has ended the run, `summary.json` and `clients.csv`.
      resume: continue from the last checkpoint in `out`; from the start if there is none yet, or nothing at all. A
        `Federation` with another split is refused. Other data and the options of the method must be those of before:
        only `config` says whether they are.
      config: JSON-like description of the run, kept in `config.json`; a resumption with another one is refused. Put
        there what may change between calls, such as `{"lr": 0.1}`.
        Default: the numbers of the key, which always stand under "key" (of a population, with its cohorts under
        "cohorts"), and the `split_hash` of a `Federation` under "federation". Texts under "method" and "dataset" are
        shown by `jfcl compare` and `report`.
      checkpoint_seconds: least time between two checkpoints; the first one is made after 5 seconds, if that is less,
        and one always at the end and on Ctrl-C.
      progress: show a bar with rate and time left, and the round after which a resumed run continues.
      description: the label of the bar.
      stop_after: stop after this many of the `T` rounds, with a checkpoint (to run in instalments); default: never.
      keep_clients: also record the results of every client in every evaluated round: a record's `clients` holds the
        arrays of `History.clients`, and a run in a folder leaves `clients_by_round.csv`.
      state: to start from instead of `algorithm.init`: `History.state` of an earlier run, or the result of
        `jfcl.parameter_tree.enrol`; with a leading seed axis if several keys are given. Rounds count from 1 again and
        their randomness follows from `key`, so give another key than that of the earlier run. With `resume`, a
        checkpoint in `out` has precedence.
      metrics: functions `(outputs [M, ...], batch, real [M]) -> a number` of one client's outputs, by name, such as
        `{"f1": jfcl.metrics.macro_f1}`; `real` marks the examples that are not padding. The records have their means
        over test clients (and over newcomers), `History.clients` and `clients.csv` the number of each client.
      callbacks: objects with some of the methods of `jfcl.callbacks.Callback`, called in this order. They change no
        result, and a resumption may have others.
      summary: write the results into `out`; False for a caller that writes its own, as `jfcl.experiments.run` does.
        Without `test_clients`, a population leaves no `clients.csv`.

    Returns:
      `History`: `records` of the evaluated rounds, the last `state`, and in `clients` the final `cluster`, `model`,
      `loss` and `accuracy` of every client. Records of a population have further totals: `asked`, `dropped`, `cut`, and
      `seen`, the number of clients that have taken part. A population takes memory on the device for two cohorts and
      the models, and on the host for two cohorts, a few bytes a client, and the rows.

    Raises:
      ValueError: bad input, before anything is compiled.
      DivergedError: a model is no longer finite, or no client sent a finite update; the last good checkpoint stays.
      KeyboardInterrupt: on Ctrl-C, once the current rounds (about a second's worth, at least one) are done and saved.
      jfcl.callbacks.CallbackError: a callback raised; the current rounds are saved.
      OSError: for example, a store that cannot be read, in the thread that gathers cohorts.

    Example:
      >>> import jax, jfcl, numpy as np, optax
      >>> task = jfcl.models.task(lambda key: {"b": jax.numpy.zeros(())}, lambda p, x: x + p["b"], kind="regression")
      >>> clients = jfcl.Clients({"x": np.zeros((2, 4), np.float32), "y": np.ones((2, 4), np.float32)}, np.full(2, 4))
      >>> algorithm = jfcl.fedavg(task, jfcl.local_training(optax.sgd(0.25), num_steps=1))
      >>> history = jfcl.simulate(algorithm, clients, key=jax.random.key(0), num_rounds=2, test_clients=clients)
      >>> [round(r["loss"], 4) for r in history.records]
      [0.25, 0.0625]
      >>> store = jfcl.data.ClientStore.from_clients(clients)
      >>> people = jfcl.Population(store, cohort=1, test_clients=store)  # one client in each round
      >>> [round(r["loss"], 4) for r in jfcl.simulate(algorithm, people, key=jax.random.key(0), num_rounds=2).records]
      [0.25, 0.0625]
    """
    # Check the options.
    check_options(simulate, locals())
    check_key(key)
    check_callbacks(callbacks)
    require(out is not None or not resume, "resume needs out, the folder of the run")
    if out is not None:  # refuses before anything is traced
        hosts.by_first(lambda: check_folder(out, resume, "run"))
    check(config is None or isinstance(config, dict), "config", config, "a dict that JSON can hold")
    seeds, client_axis, further = seed_names(seeds, key.size), mapping.or_auto(client_axis), check_further(metrics)
    make_room_for_programs()

    # Check the data, and make the source of rounds of them.
    evaluated = {"test_clients": test_clients, "newcomers": newcomers, "true_cluster": true_cluster}
    split = {"federation": clients.split_hash} if isinstance(clients, Federation) else {}
    clients, evaluated, drift = _parts_of(clients, evaluated, num_rounds)
    ends = [num_rounds] if drift is None else drift.ends(num_rounds)
    store = isinstance(clients, ClientStore)
    check(not store, "clients", "a ClientStore", "a Population of it: jfcl.Population(store, cohort=100)")
    if isinstance(clients, Population):
        for name, value in (evaluated | {"hyperparams": hyperparams, "state": state, "seed_axis": seed_axis}).items():
            check(value is None, name, type(value).__name__, "left out for a population")
        tests = [clients.test_clients]
        until = num_rounds if stop_after is None else min(num_rounds, stop_after)
        source = Streamed(algorithm, clients, key, seeds, client_axis, until)
    else:
        true_cluster = evaluated.pop("true_cluster")
        tests = [*evaluated.values()]
        parts = {"clients": clients} | {name: part for name, part in evaluated.items() if part is not None}
        check_data(client_axis, parts, true_cluster)
        parts["clients"] = clients if drift is None else drift.clients(clients, 0)
        hyperparams = _for_each_seed(hyperparams, len(seeds))
        check_method(build(algorithm, first_row(hyperparams)), parts)
        seed_axis = seed_axis or (mapping.chunked(1) if len(seeds) == 1 else mapping.auto())
        if drift is None and state is None:
            warn_if_steps_come_at_once(clients)
        axes = {"row_axis": seed_axis, "client_axis": client_axis}
        evaluated |= {"true_cluster": true_cluster, "drift": drift, "ends": ends}
        source = Resident(algorithm, clients, key, hyperparams, seeds=seeds, state=state, **axes, **evaluated)
    fits = not further or any(part is not None for part in tests)
    check(fits, "metrics", [*(metrics or ())], "left out without test_clients and newcomers, whose outputs they are of")

    is_shown = progress and hosts.is_first()
    watch = Watch(num_rounds, description=description, progress=is_shown, checkpoint_seconds=checkpoint_seconds)
    with contextlib.ExitStack() as opened, watch:
        # Place the data. Up to the next step a refusal leaves no trace on the disk.
        watch.show()
        source.place(serve, further)

        # Begin or resume. A caller with results of its own, in a configuration of its own, may resume with another key.
        if summary or config is None or not source.resident:
            config = (config or {}) | source.identity | split
        config = config | {"num_rounds": num_rounds}
        if drift is not None:  # more rounds would be other steps
            config |= {"schedule_rounds": num_rounds}
        folder = None
        if out is not None:  # open in the first process, and None in the others
            folder = hosts.by_first(lambda: opened.enter_context(RunFolder.open(out, config, resume)))
        for part in (clients.clients, clients.test_clients) if resume and not source.resident else ():
            if part is not None:
                part.verify(progress=progress)
        start = source.start(folder, resume, num_rounds)
        last = num_rounds + start.totals.get("init_rounds", 0)
        if resume:
            hosts.by_first(lambda: folder.begin())
            is_there = folder is not None and folder.rounds()
            is_new = f"no checkpoint in {out} yet: beginning with the first round"
            watch.tell(f"resuming after round {start.round:,} of {last:,}" if is_there else is_new)

        # Run.
        called = Callbacks(callbacks, description, config, last, out)
        schedule = Schedule(eval_every, stop_after, keep_clients, ends)
        history = run_rounds(source, start, schedule, watch, folder, called)
        if summary and folder is not None and called.is_finished():
            keep_results(out, history, config, source.subjects, drift)
    warn_if_cores_are_idle(client_axis, history.seconds)
    return history


def _parts_of(federation: Any, evaluated: dict[str, Any], num_rounds: int) -> tuple:
    """Returns the clients, `evaluated` with a federation's parts in the place of None, and its drift."""
    if not isinstance(federation, Federation):
        return federation, evaluated, None
    if (drift := federation.drift) is not None:
        accepted = "left out with drift, which has tests for each step"
        check(evaluated["test_clients"] is None, "test_clients", "Clients", accepted)
        accepted = f"at least {drift.num_steps}, one for each step of the drift"
        check(num_rounds >= drift.num_steps, "num_rounds", num_rounds, accepted)
    parts = {"test_clients": federation.test, "newcomers": federation.newcomers, "true_cluster": federation.cluster}
    evaluated = {name: parts[name] if value is None else value for name, value in evaluated.items()}
    return federation.train, evaluated, drift


def seed_names(seeds: Sequence[int] | None, count: int) -> list[int]:
    """Returns the names of `count` keys, by default `0 .. R-1`; `ValueError` unless they are different integers."""
    names = np.ravel(range(count) if seeds is None else seeds).tolist()
    fits = all(type(name) is int for name in names) and len(set(names)) == len(names) == count
    check(fits, "seeds", seeds, f"different integers, one for each of the {count} keys")
    return names


def _for_each_seed(hyperparams: Mapping[str, Any] | None, count: int) -> dict[str, np.ndarray] | None:
    """Returns hyperparameters as arrays `[R, ...]`, with types that do not depend on Python's."""
    if hyperparams is None:
        return None
    values = {name: np.asarray(value) for name, value in hyperparams.items()}
    for name, value in values.items():
        is_number = value.dtype.kind not in "OUS"
        check(is_number, f"hyperparams[{name!r}]", value, "a number, or an array of numbers")
    return {name: np.stack([jnp.asarray(value)] * count) for name, value in values.items()}


def check_data(client_axis: mapping.Mapping, parts: dict[str, Clients], true_cluster: Any = None) -> None:
    """Raises `ValueError` for data that do not fit together, or do not fit the number of processes."""
    spread = isinstance(client_axis, mapping.sharded)
    check(spread or not hosts.several(), "client_axis", client_axis, "jfcl.sharded, with several processes")
    for name, part in parts.items():
        check_stacked(part, name)
    n = hosts.total(num_clients(parts["clients"]))
    check(n >= jax.process_count(), "clients", n, f"at least one for each of the {jax.process_count()} processes")
    rows = mapping.own_rows(client_axis, n)
    for name, part in parts.items():
        here = num_clients(part)
        if name != "newcomers":  # of which every process holds all
            total, accepted = hosts.total(here), f"of as many clients as there are in training, {n}"
            check(total == n, name, f"{total} clients", accepted)
            fits = here == rows.stop - rows.start
            check(fits, name, f"{here} clients in process {jax.process_index()}", f"those of {rows}")
        if here or not hosts.several():  # one of several may hold none
            check_clients(part, name=name, allow_empty=name != "clients")
            both = [p.examples for p in (part, parts["clients"])]
            if all(isinstance(examples, dict) and "x" in examples for examples in both):
                check_no_bytes(f"{name}.examples['x']", *(examples["x"] for examples in both), 2)
    ids, tests = parts["clients"].id, parts.get("test_clients")
    if tests is not None and tests.id is not None:  # without ids, clients are numbered by their rows
        ids = np.arange(rows.start, rows.stop) if ids is None else ids
        accepted = "the ids of the clients in training, in the same order"
        check(np.array_equal(ids, tests.id), "test_clients.id", np.asarray(tests.id), accepted)
    if true_cluster is not None:
        check(np.shape(true_cluster) == (n,), "true_cluster", np.shape(true_cluster), f"of shape ({n},)")
        kind = np.asarray(true_cluster).dtype
        check(kind.kind in "iu", "true_cluster", str(kind), "integers, the cluster of each client")
        check((np.asarray(true_cluster) >= 0).any(), "true_cluster", "-1 for all", "known of one client at least")


def warn_if_steps_come_at_once(clients: Clients) -> None:
    """Warns where a run begins with drifting data of several steps of time, such as `train` of a federation."""
    steps = np.unique(np.asarray(clients.examples["step"])[np.asarray(mask(clients))]) if drifts(clients) else ()
    if len(steps) > 1:
        what = f"the clients hold examples of {len(steps)} steps of time, all from the first round on"
        warnings.warn(f"{what}; only simulate(algorithm, federation, ...) goes from step to step", stacklevel=4)


def check_method(method: Algorithm, parts: dict[str, Clients]) -> None:
    """Raises `ValueError` for examples that the task cannot read, and for clients that the method does not support."""
    check_evaluated(method.task, [name for name in parts if name != "clients"])
    for name, part in parts.items() if method.task is not None else ():
        check_examples(part, method.task, name=name)
        if method.task.num_classes is not None and not hosts.several():
            check_labels(part, method.task.num_classes, name=name)
    if method.check is not None and num_clients(parts["clients"]):  # one of several processes may hold none
        method.check(parts["clients"])
