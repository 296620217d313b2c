"""Running an algorithm: `rollout`, a pure scan over rounds, and `simulate`, the same with everything a person wants.

Rounds are numbered from 1. The key of round `t` is `fold_in(key, t)`, that of `init` is `fold_in(key, 0)`; so a run
that was stopped and resumed, or evaluated at other rounds, equals one that was not, bit for bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jfcl.analysis import metrics
from jfcl.client.losses import lowest_loss
from jfcl.core import (
    Algorithm,
    Clients,
    Task,
    check,
    check_choice,
    check_clients,
    check_count,
    check_key,
    check_labels,
    check_state,
    is_finite,
    num_clients,
)
from jfcl.execution import hosts, mapping, memory
from jfcl.simulation.folder import RunFolder
from jfcl.simulation.progress import Watch, stop_if_diverged, stop_if_nothing_came, warn_if_never_examined, warn_once

# Over all rounds so far, in a record; and events of which it has the largest since the record before it. Of all else it
# has the last round's.
SUMMED = ("bytes_up", "bytes_down", "client_steps", "nonfinite", "undone", "decisions")
EVENTS = ("split_from", "capacity_reached", "overflowed")
BLOCK_SECONDS = 1.0  # of rounds in one call of the compiled program, about: so often the bar moves, and Ctrl-C is heard
SERVE = ("loss", "state")
MOST_CLUSTERS_KEPT = 1000  # clients whose cluster stands in every record; more would make metrics.jsonl unwieldy


class History(NamedTuple):
    """What a simulation leaves behind.

    Attributes:
      records: a dict per evaluated round and seed, plain numbers: ready for `pandas.DataFrame(history.records)`.
      state: the algorithm's last state; with a leading seed axis if several keys were given.
      clients: final per-client arrays, `[R, N]` each: `cluster`, `examples` (in training), and with test clients
        `model`, the one that the client is served, and of the test examples `loss` and `accuracy`.
      rounds: rounds done.
      seconds: wall time without compilation, of all parts of a run that was resumed.
      compile_seconds: time spent tracing and compiling, 0 for a second call with the same algorithm.
      client_steps: local steps of all clients, rounds and seeds.
    """

    records: list[dict[str, Any]]
    state: Any
    clients: dict[str, np.ndarray]
    rounds: int
    seconds: float
    compile_seconds: float
    client_steps: float

    def series(self, name: str, seed: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """`(rounds [E], values [E])` of one metric for `seed` (default: the first)."""
        seed = self.records[0]["seed"] if seed is None else seed
        chosen = [r for r in self.records if r["seed"] == seed]
        return np.array([r["round"] for r in chosen]), np.array([r[name] for r in chosen], np.float64)


def rollout(algorithm: Algorithm, clients: Clients, *, key: jax.Array, num_rounds: int, state: Any = None):
    """`num_rounds` rounds as one pure `lax.scan`: jit it, vmap it over keys and over anything that made `algorithm`.

    Args:
      algorithm: any `Algorithm`.
      clients: the training data.
      key: of the whole run.
      num_rounds: `T`, static.
      state: to start from instead of `algorithm.init`.

    Returns:
      `(state, metrics)`, metrics stacked over rounds `[T, ...]`.

    Example:
      >>> import jax, jfcl, numpy as np, optax
      >>> task = jfcl.models.task(lambda key: {"b": jax.numpy.zeros(())}, lambda p, x: x + p["b"], kind="regression")
      >>> clients = jfcl.Clients({"x": np.zeros((2, 4), np.float32), "y": np.ones((2, 4), np.float32)}, np.full(2, 4))
      >>> def final(lr):  # a factory takes tracers: one compiled program, three learning rates
      ...     algorithm = jfcl.fedavg(task, jfcl.local_training(optax.sgd(lr), num_steps=1))
      ...     return jfcl.rollout(algorithm, clients, key=jax.random.key(0), num_rounds=2)[0].params["b"][0]
      >>> jax.jit(jax.vmap(final))(jax.numpy.array([0.0, 0.25, 0.5])).tolist()
      [0.0, 0.75, 1.0]
    """
    check_count("num_rounds", num_rounds)
    if state is None:
        state = algorithm.init(jax.random.fold_in(key, 0), clients)

    def body(state, t):
        return algorithm.step(jax.random.fold_in(key, t), state, clients)

    return jax.lax.scan(body, state, jnp.arange(1, num_rounds + 1))


# ---------------------------------------------------------------------------------------------------------------
# The compiled parts of `simulate`. Algorithm, task and mappings are static: the same objects again compile nothing.


def _made(algorithm, hyperparams) -> Algorithm:
    return algorithm if hyperparams is None else algorithm(**hyperparams)


def _laid_out(state, clients, client_axis):
    """`state` with what belongs to clients where these are: so always, and a resumed run compiles the same program."""
    if not isinstance(client_axis, mapping.sharded):
        return state
    n = num_clients(clients)
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, _lies(x.shape, n, client_axis)), state)


def _lies(shape: tuple[int, ...], n: int, client_axis: mapping.sharded) -> NamedSharding:
    """Where an array of the state, `[R, ...]`, lies: `[R, N, ...]` beside the clients, all else on every device."""
    spec = PartitionSpec(None, client_axis.mesh.axis_names) if shape[1:2] == (n,) else PartitionSpec()
    return NamedSharding(client_axis.mesh, spec)


@partial(jax.jit, static_argnames=("algorithm", "seed_axis", "client_axis"))
def _init(keys, clients, hyperparams, *, algorithm, seed_axis, client_axis):
    algorithm = _made(algorithm, hyperparams)
    state = seed_axis(lambda key: algorithm.init(jax.random.fold_in(key, 0), clients))(keys)
    jax.vmap(lambda s: check_state(s, clients))(state)
    return _laid_out(state, clients, client_axis)


def finite_mean(values):
    """The mean of those of `values` that are finite; NaN where none is."""
    values = values.astype(jnp.float32)
    return jnp.nanmean(jnp.where(jnp.isfinite(values), values, jnp.nan))


def _add(total: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`total` and what was lost of it to rounding (Knuth's two-sum), plus `x`: of whole numbers, exact up to 2^48.

    So it does not matter how many rounds are added up in one go.
    """
    high, low = total
    new = high + x
    part = new - high
    return new, low + ((high - (new - part)) + (x - part))


@partial(jax.jit, static_argnames=("algorithm", "seed_axis", "client_axis"), donate_argnames="state")
def _advance(keys, state, first, count, clients, hyperparams, *, algorithm, seed_axis, client_axis):
    """`count` rounds from round `first` on.

    Returns:
      `(state, values, sums, events, finite)`: the metrics of the last round; of `SUMMED` the sums, and of `EVENTS` the
      largest values over all; whether the models are finite, `[R]`.
    """
    algorithm = _made(algorithm, hyperparams)

    def shorten(values):  # the loss, and what would make records unwieldy, as the mean over clients that took part
        long = {name: v.ndim > 0 and v.shape[0] > MOST_CLUSTERS_KEPT for name, v in values.items()}
        return {name: finite_mean(v) if name == "loss" or long[name] else v for name, v in values.items()}

    def one_seed(key, state):
        def one_round(t, carry):
            state, _, sums, events = carry
            state, values = algorithm.step(jax.random.fold_in(key, t), state, clients)
            sums = {name: _add(sums[name], values[name].astype(jnp.float32)) for name in sums}
            events = {name: jnp.maximum(events[name], values[name].astype(jnp.int32)) for name in events}
            return state, values, sums, events

        like = jax.eval_shape(algorithm.step, key, state, clients)[1]
        last = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), like)
        sums = {name: (jnp.zeros(()), jnp.zeros(())) for name in SUMMED if name in like}
        events = {name: jnp.full(like[name].shape, -1, jnp.int32) for name in EVENTS if name in like}
        state, last, sums, events = jax.lax.fori_loop(first, first + count, one_round, (state, last, sums, events))
        return state, shorten(last), sums, events, is_finite(state.params)

    state, *told = seed_axis(one_seed)(keys, state)
    return _laid_out(state, clients, client_axis), *told


@partial(jax.jit, static_argnames=("task", "seed_axis", "client_axis", "by_loss"))
def _evaluate(params, cluster, clients, learners, *, task, seed_axis, client_axis, by_loss):
    """`by_loss`: on the examples evaluated; with `learners`, the clients in training: on those of them."""

    def one_seed(params, cluster):
        if learners is not None:
            cluster = lowest_loss(task, params, learners, client_axis=client_axis)
        chosen = None if by_loss else cluster
        return metrics.evaluate(task, params, clients, chosen, client_axis=client_axis)

    return seed_axis(one_seed)(params, cluster)


def _check_data(client_axis, clients, test_clients, newcomers, true_cluster) -> int:
    """How many clients there are in all processes; `ValueError` where what belongs to them does not fit."""
    spread = isinstance(client_axis, mapping.sharded)
    check(spread or jax.process_count() == 1, "client_axis", client_axis, "jfcl.sharded, with several processes")
    n = _check_rows(client_axis, clients, "clients")
    check(n >= jax.process_count(), "clients", n, f"at least one for each of the {jax.process_count()} processes")
    for name, part in (("clients", clients), ("test_clients", test_clients), ("newcomers", newcomers)):
        if part is not None and (num_clients(part) or jax.process_count() == 1):  # one of several may hold none
            check_clients(part, name=name, allow_empty=part is not clients)
    if test_clients is not None:
        rows = _check_rows(client_axis, test_clients, "test_clients")
        check(rows == n, "test_clients", f"{rows} clients", f"of as many clients as there are in training, {n}")
    if true_cluster is not None:
        check(np.shape(true_cluster) == (n,), "true_cluster", np.shape(true_cluster), f"of shape ({n},)")
        check((np.asarray(true_cluster) >= 0).any(), "true_cluster", "-1 for all", "known of one client at least")
    return n


def _check_rows(client_axis, clients: Clients, name: str) -> int:
    """How many clients there are in all processes, of which this one must hold those that `own_rows` says."""
    n = hosts.total(num_clients(clients))
    rows, own = mapping.own_rows(client_axis, n), num_clients(clients)
    check(own == rows.stop - rows.start, name, f"{own} clients in process {jax.process_index()}", f"those of {rows}")
    return n


def _cut(tree: Any, like: Any) -> Any:
    """`tree` without what padding clients have behind the others: cut to the shapes of `like`."""
    return jax.tree.map(lambda x, small: x[tuple(slice(0, s) for s in small.shape)], tree, like)


def _with_rows_behind(small: Any, whole: Any, n: int, client_axis: mapping.sharded) -> Any:
    """`small` on the devices, with zeros for padding clients behind as in `whole`: the inverse of `_cut`."""

    def put(given, like):
        host = np.pad(given, [(0, b - a) for a, b in zip(given.shape, like.shape, strict=True)])
        return jax.make_array_from_callback(host.shape, _lies(host.shape, n, client_axis), lambda index: host[index])

    return jax.tree.map(put, small, whole)


class _Judge(NamedTuple):
    """Evaluates states, and says in records what it found.

    Attributes:
      task: what the clients are asked; None: nothing.
      seeds: names of the keys.
      num_clients: without those that fill up devices.
      true_cluster: `[N]` or None.
      tests, newcomers: on the devices, or None.
      test_size, new_size: `[N]`, `[N']`, their numbers of examples.
      seed_axis, client_axis: mappings.
      learners: the clients in training, if the test clients are served the model of lowest loss on their examples; else
        None: that of the state.
    """

    task: Task | None
    seeds: list
    num_clients: int
    true_cluster: np.ndarray | None
    tests: Clients | None
    test_size: np.ndarray | None
    newcomers: Clients | None
    new_size: np.ndarray | None
    seed_axis: mapping.Mapping
    client_axis: mapping.Mapping
    learners: Clients | None

    @classmethod
    def place(cls, task, seeds, n, true_cluster, tests, newcomers, seed_axis, client_axis, learners) -> _Judge:
        """A judge whose test clients and newcomers lie where they are evaluated."""
        test_size = new_size = None
        if tests is not None:
            tests = mapping.place(client_axis, tests, n)
            test_size = np.asarray(hosts.fetch(tests.size))[:n]
        if newcomers is not None:
            new_size = np.asarray(newcomers.size)
            if jax.process_count() > 1:  # every process was given all of them
                own = mapping.own_rows(client_axis, len(new_size))
                newcomers = jax.tree.map(lambda x: x[own], newcomers)
            newcomers = mapping.place(client_axis, newcomers, len(new_size))
        true_cluster = None if true_cluster is None else np.asarray(true_cluster)
        learners = None if tests is None or task is None else learners
        axes = (seed_axis, client_axis, learners)
        return cls(task, seeds, n, true_cluster, tests, test_size, newcomers, new_size, *axes)

    def assess(self, state: Any, data: Clients | None, *, new: bool = False) -> dict[str, jax.Array] | None:
        """Loss and accuracy of `data`'s clients, `[R, ...]` each, under the models that they are served.

        `new`: they are newcomers, of whom there is nothing but `data`.
        """
        if data is None or self.task is None:
            return None
        axes = {"seed_axis": self.seed_axis, "client_axis": self.client_axis}
        learners = None if new else self.learners
        return _evaluate(state.params, state.cluster, data, learners, task=self.task, by_loss=new, **axes)

    def clusters(self, state: Any, held_out: dict[str, Any] | None) -> Any:
        """`[R, N]`: the clusters that are reported; `held_out` is what `assess` says of the test clients."""
        return found_clusters(state) if self.learners is None else held_out["cluster"]

    def records(self, state: Any, t: int, values: dict[str, Any], totals: dict[str, list]) -> tuple[list[dict], Any]:
        """The records of round `t`, one per seed, and what `assess` says of the test clients.

        `values` are the round's metrics `[R, ...]`; those in `SUMMED` and `EVENTS` are taken from `totals`.
        """
        n, padded = self.num_clients, state.cluster.shape[1]  # with the clients behind, which do not count
        held_out = self.assess(state, self.tests)
        held_out, new, values, cluster, excluded = hosts.fetch(
            (
                held_out,
                self.assess(state, self.newcomers, new=True),
                values,
                self.clusters(state, held_out),
                getattr(state, "excluded", None),
            )
        )
        cluster, excluded = cluster[:, :n], None if excluded is None else excluded[:, :n]
        values = {name: v[:, :n] if v.shape[1:] == (padded,) else v for name, v in values.items()}
        rows = []
        for s, seed in enumerate(self.seeds):
            row = {"seed": seed, "round": t}
            if held_out is not None:
                row |= metrics.summarize({k: v[s, :n] for k, v in held_out.items()}, self.test_size)
            if new is not None:
                summary = metrics.summarize({k: v[s, : len(self.new_size)] for k, v in new.items()}, self.new_size)
                row |= {f"newcomer_{name}": value for name, value in summary.items()}
            row["train_loss"] = float(values["loss"][s])
            row["clusters_in_use"] = len(np.unique(cluster[s]))
            if self.true_cluster is not None:
                row |= metrics.cluster_recovery(cluster[s], self.true_cluster)
            told = {name: v[s].tolist() for name, v in values.items() if name != "loss"}
            row |= told | {name: totals[name][s] for name in SUMMED if name in totals}
            row |= {name: np.array(totals[name][s], values[name].dtype).tolist() for name in EVENTS if name in totals}
            if n <= MOST_CLUSTERS_KEPT:
                row["cluster"] = cluster[s].tolist()
                if excluded is not None:
                    row["excluded"] = excluded[s].tolist()
            rows.append(row)
        return rows, held_out

    def final(self, state: Any, size: jax.Array, held_out: dict[str, Any] | None) -> dict[str, np.ndarray]:
        """What `History.clients` holds; `held_out` is what `assess` said of the test clients, if it was asked."""
        held_out = dict((self.assess(state, self.tests) if held_out is None else held_out) or {})
        cluster = self.clusters(state, held_out)
        served = {"model": held_out.pop("cluster")} if "cluster" in held_out else {}
        final = {"cluster": cluster} | served | held_out
        final["examples"] = jnp.broadcast_to(size, (len(self.seeds), len(size)))
        return {name: np.asarray(value)[:, : self.num_clients] for name, value in hosts.fetch(final).items()}


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
    state: Any = None,
) -> History:
    """Runs `algorithm` for `num_rounds` rounds, evaluating on the way; optionally keeps everything in a folder.

    A run of a method that says that it has ended (`jfcl.cfl` with `recursive=True`, once every cluster is final) stops
    at the next evaluation by which all seeds have; `History.rounds` is then below `num_rounds`.

    Args:
      algorithm: an `Algorithm`; or, with `hyperparams`, the function that makes one from them. The same object again
        compiles nothing, and with `hyperparams` other values neither. The programs stay in memory with the object, some
        ten megabytes, until `jfcl.clear_programs()` drops them.
      clients: training data.
      key: one key, or `[R]` of them: seeds, run together in one program.
      num_rounds: `T`.
      test_clients: held-out examples, row `i` of client `i`; evaluated under the model that the client is served.
      newcomers: clients that took no part, each evaluated under the model of lowest loss on its examples (IFCA's
        test-time inference); adds `newcomer_loss`, `newcomer_accuracy`.
      true_cluster: `[N]`, if known: adds `cluster_accuracy`, `adjusted_rand`, `nmi`, `purity` to the records. Clients
        with -1, malicious ones say, do not count.
      serve: the model that a test client is served by a method whose clients choose among several (`Algorithm.by_loss`:
        IFCA, HypCluster): that of lowest "loss" on its training examples now; or that of its "state", the one that it
        chose when it last took part. With "loss", each evaluation of `test_clients` takes `K` passes over the training
        examples besides, and the clusters in the records and in `History.clients` are the models served; without
        `test_clients`, they are the state's. Other methods serve the state's model in any case.
      hyperparams: floats (or arrays) passed to `algorithm` inside the compiled program.
      eval_every: rounds between evaluations; the last round is always evaluated.
      seeds: names of the `R` keys in the records; default `0 .. R-1`.
      seed_axis: mapping over seeds; default: what suits the backend: one after another on a CPU, `jax.vmap` elsewhere.
      client_axis: mapping used to evaluate; default: what suits the backend. If it is `jfcl.sharded`, the clients are
        placed on its devices (give it to the algorithm too); with several processes, `clients` and `test_clients` are
        this process's, `mapping.own_rows`, and everything that is kept is written by the first process.
      out: the run's folder: gets `config.json`, `metrics.jsonl`, `checkpoints/`.
      resume: go on from the last checkpoint in `out` (from the start if there is none yet).
      config: JSON-like description of the run, kept in `config.json`; resuming with another one is refused. Default:
        the numbers of the key.
      checkpoint_seconds: least time between two checkpoints; one is always made at the end and on Ctrl-C.
      progress: show a bar with rate and time left.
      description: what the bar calls the run.
      stop_after: stop as if interrupted once this many rounds are done (to run in instalments); default: never.
      state: to start from instead of `algorithm.init`: `History.state` of an earlier run, or what
        `jfcl.parameter_tree.enrol` makes of it; with a leading seed axis if several keys are given. Rounds count from 1
        again and their randomness follows from `key`, so give another key than that of the earlier run. With `resume`,
        a checkpoint in `out` has precedence.

    Returns:
      `History`.

    Raises:
      ValueError: bad input, before anything is compiled.
      DivergedError: a model went non-finite, or no client sent a finite update; the last good checkpoint stays.
      KeyboardInterrupt: on Ctrl-C, once the rounds at work (about a second's, at least one) are done and saved.

    Example:
      >>> import jax, jfcl, numpy as np, optax
      >>> task = jfcl.models.task(lambda key: {"b": jax.numpy.zeros(())}, lambda p, x: x + p["b"], kind="regression")
      >>> clients = jfcl.Clients({"x": np.zeros((2, 4), np.float32), "y": np.ones((2, 4), np.float32)}, np.full(2, 4))
      >>> algorithm = jfcl.fedavg(task, jfcl.local_training(optax.sgd(0.25), num_steps=1))
      >>> history = jfcl.simulate(algorithm, clients, key=jax.random.key(0), num_rounds=2, test_clients=clients)
      >>> [round(r["loss"], 4) for r in history.records]
      [0.25, 0.0625]
    """
    check_key(key)
    check_count("num_rounds", num_rounds)
    check_count("eval_every", eval_every)
    check_choice("serve", serve, SERVE)
    client_axis = mapping.auto() if client_axis is None else client_axis
    n = _check_data(client_axis, clients, test_clients, newcomers, true_cluster)
    check(out is not None or not resume, "out", out, "the folder of the run to resume")
    single = key.ndim == 0
    num_keys = 1 if single else len(key)
    seeds = list(range(num_keys)) if seeds is None else list(seeds)
    check(len(seeds) == num_keys, "seeds", seeds, f"one name for each of the {num_keys} keys")
    keys = key[None] if single else key
    if seed_axis is None:
        seed_axis = mapping.chunked(1) if len(keys) == 1 else mapping.auto()
    spread = isinstance(client_axis, mapping.sharded)
    mesh = client_axis.mesh if spread else None
    keys = hosts.replicate(keys, mesh)
    if hyperparams is not None:
        hyperparams = {name: jnp.asarray(np.asarray(value)) for name, value in hyperparams.items()}  # strongly typed
        hyperparams = hosts.replicate(hyperparams, mesh)

    made = _made(algorithm, hyperparams)
    if made.task is not None and made.task.num_classes is not None and jax.process_count() == 1:
        for name, part in (("clients", clients), ("test_clients", test_clients), ("newcomers", newcomers)):
            if part is not None:
                check_labels(part, made.task.num_classes, name=name)
    if made.check is not None and num_clients(clients):  # one of several processes may hold none
        made.check(clients)

    def of_all(part: Clients) -> Clients:
        """The shapes of all processes' clients."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((n, *np.shape(x)[1:]), x.dtype), part)

    shown = progress and hosts.is_first()
    watch = Watch(num_rounds, description=description, progress=shown, checkpoint_seconds=checkpoint_seconds)
    with contextlib.ExitStack() as opened, watch:
        static = {"algorithm": algorithm, "seed_axis": seed_axis, "client_axis": client_axis}
        # Shapes of the state without padding clients: what is kept, so that a run may be resumed on other devices.
        shapes = of_all(clients)
        like = jax.eval_shape(partial(_init, **static), keys, shapes, hyperparams)
        others = [] if test_clients is None else [of_all(test_clients)]
        others += [] if newcomers is None else [newcomers]
        seeds_at_once = min(seed_axis.size, len(keys)) if isinstance(seed_axis, mapping.chunked) else len(keys)
        memory.check_memory(made, shapes, client_axis, like, others=others, seeds_at_once=seeds_at_once)
        clients = mapping.place(client_axis, clients, n)
        several = jax.tree.leaves(like.params)[0].shape[1] > 1
        learners = clients if serve == "loss" and made.by_loss and several else None
        axes = (seed_axis, client_axis, learners)
        judge = _Judge.place(made.task, seeds, n, true_cluster, test_clients, newcomers, *axes)
        first = None if state is None else _first_state(state, like, single)
        # Whatever a round would refuse it refuses here, before anything is written or computed.
        whole = jax.eval_shape(partial(_init, **static), keys, clients, hyperparams)
        jax.eval_shape(partial(_advance, **static), keys, whole, np.int32(1), np.int32(1), clients, hyperparams)

        folder = None
        if out is not None:
            config = {"key": np.asarray(jax.random.key_data(key)).tolist()} if config is None else config
            folder = hosts.by_first(lambda: (RunFolder.reopen if resume else RunFolder.create)(out, config))
            opened.callback(folder.close if folder is not None else lambda: None)
        restored = _restore(folder, like) if resume else None
        if restored is None and first is not None:
            restored = 0, first, {}, []
        if restored is None:
            done, totals, records = 0, {}, []
            state = _init(keys, clients, hyperparams, **static)
        else:
            done, state, totals, records = restored
            check(done <= num_rounds, "num_rounds", num_rounds, f"at least the {done} rounds already done")
            rows = num_clients(clients)
            state = _with_rows_behind(state, whole, rows, client_axis) if spread else jax.device_put(state)
        if resume:
            hosts.by_first(lambda: folder.begin())

        # Methods that start with one cluster and split it have not collapsed while they have one.
        num_models = 1 if hasattr(state, "active") else jax.tree.leaves(state.params)[0].shape[1]
        warned: set[str] = set()
        latest: dict[str, Any] = {}
        held_out = None  # what the test clients say of the present state, once they were asked
        until = num_rounds if stop_after is None else min(num_rounds, stop_after)
        until = done if _have_ended(records[-len(seeds) :], done) else until
        at_most = 1  # rounds at once: a first one tells how long they take
        watch.begin(done, totals.pop("time", (0.0, 0.0)))
        while done < until:
            count = min(eval_every - done % eval_every, until - done, at_most)
            began = watch.seconds()
            state, values, sums, events, finite = jax.block_until_ready(
                _advance(keys, state, np.int32(done + 1), np.int32(count), clients, hyperparams, **static)
            )
            took = watch.seconds() - began
            at_most = int(np.clip(BLOCK_SECONDS * count / max(took, 1e-9), 1, 2**30))
            done, held_out = done + count, None
            stop_if_diverged(finite, done, seeds, folder)
            for name, (high, low) in hosts.fetch(sums).items():
                old = totals.get(name, [0.0] * len(seeds))
                totals[name] = [a + (float(h) + float(l)) for a, h, l in zip(old, high, low, strict=True)]
            for name, largest in hosts.fetch(events).items():
                totals[name] = np.maximum(largest, totals.get(name, -1)).tolist()
            if done % eval_every == 0 or done == num_rounds:
                rows, held_out = judge.records(state, done, values, totals)
                if _have_ended(rows, done):  # no client trains any more
                    until = done
                else:
                    stop_if_nothing_came(values, done, seeds, folder)
                records += rows
                if folder is not None:
                    folder.append(rows)
                warn_once(warned, rows, num_models, n, judge.true_cluster)
                latest = rows[0]
                totals = {name: value for name, value in totals.items() if name not in EVENTS}
            watch.advance(done, latest)
            said = hosts.everybodys([watch.due(), at_most, watch.interrupted])
            due, at_most = said[0, :2].tolist()  # by the first one's clock
            stop = said[:, 2].any()
            if out is not None and (due or stop or done == until):
                kept = hosts.fetch(_cut(state, like))
                if folder is not None:
                    folder.save(done, kept, totals | {"time": watch.clock()})
                watch.saved()
            if stop:
                raise KeyboardInterrupt
        warn_if_never_examined(records[-len(seeds) :], done)
        final = judge.final(state, clients.size, held_out)
        seconds, compile_seconds = watch.clock()
        if mapping.num_rows(client_axis, n) != n:
            state = _cut(state, like)
    if single:
        state = jax.tree.map(lambda x: x[0], state)
    steps = sum(totals.get("client_steps", []))
    return History(records, state, final, done, seconds, compile_seconds, steps)


def _first_state(state: Any, like: Any, single: bool) -> Any:
    """A user's `state` with a leading seed axis, on the host; `ValueError` unless its arrays are those of `like`."""
    if single:
        state = jax.tree.map(lambda x: jnp.asarray(x)[None], state)

    def shapes(tree):
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {jax.tree_util.keystr(path): f"{jnp.result_type(x)} {list(jnp.shape(x))}" for path, x in leaves}

    given, wanted = shapes(state), shapes(like)
    differ = [name for name in sorted({*given, *wanted}) if given.get(name) != wanted.get(name)]
    said = "; ".join(f"{name} is {given.get(name, 'absent')}, not {wanted.get(name, 'there')}" for name in differ[:3])
    accepted = "of this algorithm with these options, of these clients, and with a seed axis if there are several keys"
    fits = not differ and jax.tree.structure(state) == jax.tree.structure(like)
    check(fits, "state", said or type(state).__name__, accepted)
    return jax.tree.map(lambda x: np.array(hosts.fetch(x)), state)  # copies, since a round overwrites its state


def _have_ended(rows: list[dict[str, Any]], done: int) -> bool:
    """Whether the records `rows` of all seeds after `done` rounds say that the method has ended."""
    return bool(rows) and all(row.get("ended", False) and row["round"] == done for row in rows)


def _restore(folder: RunFolder | None, like: Any) -> tuple[int, Any, dict[str, Any], list[dict[str, Any]]] | None:
    """`(rounds done, state, totals, records)` of the last checkpoint, the same in every process; `None` without one."""
    found = hosts.by_first(lambda: folder.restore(like))
    about = hosts.same_everywhere(None if found is None else [found.round, found.totals, found.records])
    if about is None:
        return None
    state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like) if found is None else found.state
    return about[0], hosts.same_arrays(state), about[1], about[2]


def found_clusters(state: Any) -> Any:
    """`[N]`: which clients a method holds to be alike: `state.group` where it has that besides a model for each."""
    return getattr(state, "group", state.cluster)
