"""`simulate`: a run with all clients on the device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfcl import mapping
from jfcl.analysis.metrics import Metric
from jfcl.core import (
    Algorithm,
    Clients,
    check,
    check_clients,
    check_examples,
    check_labels,
    check_made,
    client_ids,
    named_leaves,
    num_clients,
)
from jfcl.mapping import hosts, memory
from jfcl.simulation.callbacks import Callbacks
from jfcl.simulation.evaluation import check_further
from jfcl.simulation.folder import Restored
from jfcl.simulation.loop import History, check_run, open_folder, read_checkpoint, resumption, run_rounds, seed_names
from jfcl.simulation.on_device import OnDevice, build
from jfcl.simulation.progress import Watch, warn_if_cores_are_idle
from jfcl.simulation.results import keep_results


@memory.out_of_memory()
def simulate(
    algorithm: Algorithm | Callable[..., Algorithm],
    clients: Clients,
    *,
    key: jax.Array,
    num_rounds: int,
    test_clients: Clients | None = None,
    newcomers: Clients | None = None,
    true_cluster: np.ndarray | None = None,
    serve: str = "loss",
    hyperparams: dict[str, Any] | None = None,
    eval_every: int = 1,
    seeds: list[int] | None = None,
    seed_axis: mapping.Mapping | None = None,
    client_axis: mapping.Mapping | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    config: dict[str, Any] | None = None,
    checkpoint_seconds: float = 30.0,
    progress: bool = False,
    description: str = "rounds",
    stop_after: int | None = None,
    keep_clients: bool = False,
    state: Any = None,
    metrics: Mapping[str, Metric] | None = None,
    callbacks: Sequence[Any] = (),
    summary: bool = True,
) -> History:
    """Runs `algorithm` for `num_rounds` rounds with evaluations on the way; optionally keeps the run in a folder.

    Some methods end (`jfcl.cfl` with `recursive=True`, once every cluster is final). The run then stops at the first
    evaluation after the end in all seeds, before all rounds are done.

    Args:
      algorithm: an `Algorithm`; or, with `hyperparams`, the function that makes one from them. A second call with the
        same object compiles nothing, also for other values of `hyperparams`. The programs, some ten megabytes, stay in
        memory until `jfcl.clear_programs()` drops them.
      clients: training data.
      key: one key, or `[R]` of them: seeds, run together in one program.
      num_rounds: `T`. The rounds of a method's start (restarts, warm rounds, training before the clients are clustered)
        come before them and count: the run ends with round `T` and so many more (`History.init_rounds`).
      test_clients: test examples, row `i` of client `i`; evaluated under the model that the client is served.
      newcomers: clients that are not in training, each evaluated under the model of lowest loss on its examples
        (IFCA's test-time inference); adds `newcomer_loss`, `newcomer_accuracy`.
      true_cluster: `[N]`, if known: adds `cluster_accuracy`, `adjusted_rand`, `nmi`, `purity` to the records. Clients
        with -1, for example malicious ones, do not count.
      serve: the model that a test client is served by a method with a choice among several (IFCA,
        HypCluster). "loss": the model of lowest loss on the client's training examples now. "state": the model of the
        client's last round. "loss" costs `K` more passes over the training examples in each evaluation of
        `test_clients`, and the clusters in the records and in `History.clients` are the models served; without
        `test_clients`, they are those of the state. Other methods always serve the state's model.
      hyperparams: floats (or arrays) passed to `algorithm` inside the compiled program.
      eval_every: rounds between evaluations, those with a number that it divides; the last round is always evaluated.
      seeds: names of the `R` keys in the records; default `0 .. R-1`.
      seed_axis: mapping over seeds; default: one after another on a CPU, `jax.vmap` elsewhere.
      client_axis: mapping for evaluations; default: `jfcl.auto()`. If it is `jfcl.sharded`, the clients are placed on
        its devices (give it to the algorithm too). With several processes, `clients` and `test_clients` are those of
        this process, `mapping.own_rows`, and the first process writes all files.
      out: the run's folder: gets `config.json`, `metrics.jsonl`, `checkpoints/`, and once all rounds are done, or the
        method or a callback has ended the run, `summary.json` and `clients.csv`.
      resume: continue from the last checkpoint in `out`; from the start if there is none yet, or nothing at all.
      config: JSON-like description of the run, kept in `config.json`; a resumption with another one is refused.
        Default: the numbers of the key. Texts under "method" and "dataset" are shown by `jfcl compare` and `report`.
      checkpoint_seconds: least time between two checkpoints; the first one is made after 5 seconds, if that is less,
        and one always at the end and on Ctrl-C.
      progress: show a bar with rate and time left, and the round after which a resumed run continues.
      description: the label of the bar.
      stop_after: stop after this many of the `T` rounds, with a checkpoint (to run in instalments); default: never.
      keep_clients: also record the results of every client in every evaluated round: a record's `clients` holds the
        arrays of `History.clients` but `examples`, and a run in a folder leaves `clients_by_round.csv`.
      state: to start from instead of `algorithm.init`: `History.state` of an earlier run, or the result of
        `jfcl.parameter_tree.enrol`; with a leading seed axis if several keys are given. Rounds count from 1 again and
        their randomness follows from `key`, so give another key than that of the earlier run. With `resume`, a
        checkpoint in `out` has precedence.
      metrics: functions `(outputs [M, ...], batch, real [M]) -> a number` of one client's outputs, by name, such as
        `{"f1": jfcl.metrics.macro_f1}`; `real` marks the examples that are no padding. The records have their means
        over clients (and over newcomers), `History.clients` and `clients.csv` the number of each client.
      callbacks: objects with some of the methods of `jfcl.callbacks.Callback`, called in this order: early stopping,
        trackers. They change no result, and a resumption may have others.
      summary: write the results into `out`; False for a caller that writes its own, as `jfcl.experiments.run` does.

    Returns:
      `History`: `records` of the evaluated rounds, the last `state`, and in `clients` the final `cluster`, `model`,
      `loss` and `accuracy` of every client.

    Raises:
      ValueError: bad input, before anything is compiled.
      DivergedError: a model is no longer finite, or no client sent a finite update; the last good checkpoint stays.
      KeyboardInterrupt: on Ctrl-C, once the present rounds (about a second's, at least one) are done and saved.
      jfcl.callbacks.CallbackError: a callback raised; the present rounds are saved.

    Example:
      >>> import jax, jfcl, numpy as np, optax
      >>> task = jfcl.models.task(lambda key: {"b": jax.numpy.zeros(())}, lambda p, x: x + p["b"], kind="regression")
      >>> clients = jfcl.Clients({"x": np.zeros((2, 4), np.float32), "y": np.ones((2, 4), np.float32)}, np.full(2, 4))
      >>> algorithm = jfcl.fedavg(task, jfcl.local_training(optax.sgd(0.25), num_steps=1))
      >>> history = jfcl.simulate(algorithm, clients, key=jax.random.key(0), num_rounds=2, test_clients=clients)
      >>> [round(r["loss"], 4) for r in history.records]
      [0.25, 0.0625]
    """
    # Check the options, without the data.
    check_run(key, num_rounds, eval_every, stop_after, serve, out, resume, config, checkpoint_seconds, callbacks)
    accepted = "without: the numbers of the run's key have this name"
    check("key" not in (config or {}), "config", "an entry 'key'", accepted)
    further = check_further(metrics)
    client_axis = mapping.or_auto(client_axis)
    parts = {"clients": clients, "test_clients": test_clients, "newcomers": newcomers}
    parts = {name: part for name, part in parts.items() if part is not None}
    _check_data(client_axis, parts, true_cluster)

    # Keys, and hyperparameters with types that do not depend on Python's.
    single = key.ndim == 0
    keys = key[None] if single else key
    seeds = seed_names(seeds, len(keys))
    if seed_axis is None:
        seed_axis = mapping.chunked(1) if len(keys) == 1 else mapping.auto()
    mesh = client_axis.mesh if isinstance(client_axis, mapping.sharded) else None
    if hyperparams is not None:
        hyperparams = {name: jnp.asarray(np.asarray(value)) for name, value in hyperparams.items()}
    keys, hyperparams = hosts.replicate((keys, hyperparams), mesh)
    check_method(build(algorithm, hyperparams), parts)

    is_shown = progress and hosts.is_first()
    watch = Watch(num_rounds, description=description, progress=is_shown, checkpoint_seconds=checkpoint_seconds)
    with contextlib.ExitStack() as opened, watch:
        # Place the data. Up to the next step a refusal leaves no trace on the disk.
        watch.show("compiling")
        backend = OnDevice(algorithm, clients, keys, seeds, hyperparams, seed_axis, client_axis)
        first = None if state is None else _first_state(state, backend.like, single)
        backend.place(test_clients, newcomers, true_cluster, serve, further)

        # Begin or resume.
        if summary or config is None:  # a caller in Python may resume with another key
            config = _with_keys(config, key, seeds)
        folder = open_folder(opened, out, resume, config, num_rounds)
        restored = read_checkpoint(folder, backend.like, num_rounds) if resume else None
        if restored is None and first is not None:
            restored = Restored(0, first, {}, [])
        start = backend.restore(restored)
        if resume:
            hosts.by_first(lambda: folder.begin())
            watch.tell(resumption(out, restored, num_rounds))

        # Run.
        schedule = {
            "num_rounds": num_rounds,
            "eval_every": eval_every,
            "stop_after": stop_after,
            "keep_clients": keep_clients,
        }
        called = Callbacks(callbacks, description, config, num_rounds + start.totals.get("init_rounds", 0), out)
        history = run_rounds(backend, start, **schedule, watch=watch, folder=folder, callbacks=called)
        if summary and folder is not None and called.is_finished():
            n = history.clients["examples"].shape[1]  # of all processes
            ids = list(range(n)) if hosts.several() else client_ids(clients).tolist()
            about = {"config": config, "seeds": seeds, "ids": ids, "true_cluster": true_cluster}
            keep_results(out, history, **about, num_clients=n)
    warn_if_cores_are_idle(client_axis, history.seconds)
    if not single:
        return history
    state = jax.tree.map(lambda x: x[0], history.state)
    return history._replace(state=state, served=build(algorithm, hyperparams).serve(state, None))  # shares its arrays


# ---------------------------------------------------------------------------------------------------------------
# Checks.


def _check_data(client_axis: mapping.Mapping, parts: dict[str, Clients], true_cluster: Any) -> None:
    """`ValueError` for data that do not fit together, or not to the number of processes."""
    spread = isinstance(client_axis, mapping.sharded)
    check(spread or jax.process_count() == 1, "client_axis", client_axis, "jfcl.sharded, with several processes")
    for name, part in parts.items():
        check_made(part, name)
    n = _check_rows(client_axis, parts["clients"], "clients")
    check(n >= jax.process_count(), "clients", n, f"at least one for each of the {jax.process_count()} processes")
    for name, part in parts.items():
        if num_clients(part) or jax.process_count() == 1:  # one of several may hold none
            check_clients(part, name=name, allow_empty=name != "clients")
    if "test_clients" in parts:
        rows = _check_rows(client_axis, parts["test_clients"], "test_clients")
        check(rows == n, "test_clients", f"{rows} clients", f"of as many clients as there are in training, {n}")
        known, tests = (parts[name].id for name in ("clients", "test_clients"))
        if tests is not None:  # without ids, clients are numbered by their rows
            offset = mapping.own_rows(client_axis, n).start
            known = offset + np.arange(num_clients(parts["clients"])) if known is None else known
            same = np.array_equal(known, tests)
            check(same, "test_clients.id", np.asarray(tests), "the ids of the clients in training, in the same order")
    if true_cluster is not None:
        check(np.shape(true_cluster) == (n,), "true_cluster", np.shape(true_cluster), f"of shape ({n},)")
        kind = np.asarray(true_cluster).dtype
        check(kind.kind in "iu", "true_cluster", str(kind), "integers, the cluster of each client")
        check((np.asarray(true_cluster) >= 0).any(), "true_cluster", "-1 for all", "known of one client at least")


def _check_rows(client_axis, clients: Clients, name: str) -> int:
    """Returns the number of clients in all processes; `ValueError` unless this one holds those of `own_rows`."""
    n = hosts.total(num_clients(clients))
    rows, own = mapping.own_rows(client_axis, n), num_clients(clients)
    check(own == rows.stop - rows.start, name, f"{own} clients in process {jax.process_index()}", f"those of {rows}")
    return n


def check_method(made: Algorithm, parts: dict[str, Clients]) -> None:
    """Raises `ValueError` for examples that the task cannot read, and for clients that the method does not support.

    Args:
      made: the method.
      parts: the "clients" in training, and others in evaluations, by the names of the arguments.
    """
    for name, part in parts.items() if made.task is not None else ():
        check_examples(part, made.task, name=name)
        if made.task.num_classes is not None and not hosts.several():
            check_labels(part, made.task.num_classes, name=name)
    if made.check is not None and num_clients(parts["clients"]):  # one of several processes may hold none
        made.check(parts["clients"])


def _with_keys(config: dict[str, Any] | None, key: jax.Array, seeds: list) -> dict[str, Any]:
    """Returns the configuration of a run with its keys, and the names of its seeds where they are not the default."""
    own = {"key": np.asarray(jax.random.key_data(key)).tolist()}
    own |= {} if seeds == list(range(len(seeds))) else {"seeds": seeds}
    return own | (config or {})


def _first_state(state: Any, like: Any, single: bool) -> Any:
    """Returns a user's `state` with a seed axis, on the host; `ValueError` unless its shapes are those of `like`."""
    if single:
        state = jax.tree.map(lambda x: jnp.asarray(x)[None], state)

    def shapes(tree):
        return {name: f"{jnp.result_type(x)} {list(jnp.shape(x))}" for name, x in named_leaves(tree).items()}

    found, wanted = shapes(state), shapes(like)
    names = [name for name in sorted({*found, *wanted}) if found.get(name) != wanted.get(name)]
    difference = "; ".join(f"{n} is {found.get(n, 'absent')}, not {wanted.get(n, 'there')}" for n in names[:3])
    accepted = "of this algorithm with these options, of these clients, and with a seed axis if there are several keys"
    fits = not names and jax.tree.structure(state) == jax.tree.structure(like)
    check(fits, "state", difference or type(state).__name__, accepted)

    def copied(x):  # since a round overwrites its state
        return jnp.array(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.array(hosts.fetch(x))

    return jax.tree.map(copied, state)
