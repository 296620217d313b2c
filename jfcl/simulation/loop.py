"""The loop over rounds: `rollout`, a pure scan, and `run_rounds`, the one loop of `simulate`.

Rounds are numbered from 1, those of `init` included (`Algorithm.init_rounds`, `b`). The key of round `b + t` is
`fold_in(key, t)`, the key of `init` is `fold_in(key, 0)`. A run that is stopped and resumed, or evaluated at other
rounds, therefore equals an uninterrupted one bit for bit.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jfcl.analysis.metrics import deviation
from jfcl.core import Algorithm, Clients, PyTree, check, check_count
from jfcl.mapping import hosts, memory
from jfcl.simulation.callbacks import Callbacks, End
from jfcl.simulation.client_rows import ClientRows
from jfcl.simulation.evaluation import Silence, make_records
from jfcl.simulation.folder import Restored, RunFolder
from jfcl.simulation.progress import Watch, stop_if_diverged, warn_if_loss_is_high, warn_once

ALL_DONE = "all rounds are done"  # why most runs end
SHOWN = ("accuracy", "worst_client_accuracy", "loss", "train_loss", "clusters_in_use")  # by `print(history)`
BLOCK_SECONDS = 1.0  # approximate duration of one call of the compiled program; the bar and Ctrl-C wait for its end
MOST_ROUNDS = 2048  # in one call, which returns some metrics of every round


class History(NamedTuple):
    """The result of a simulation.

    Attributes:
      records: a dict per evaluated round and seed, plain numbers: ready for `pandas.DataFrame(history.records)`.
      state: the algorithm's last state; with a leading seed axis if several keys were given.
      clients: arrays of the final results per client, `[R, N]` each, in the order of the clients:

        * `cluster`: the cluster that is reported, as in the last record (see `serve` of `jfcl.simulate`);
        * `examples`: the number of its **training** examples;
        * with test clients, `model`: the row of `served.models` that the client is served. It differs from `cluster`
          where clients of one cluster have models of their own (Federated-Clustering);
        * with test clients, `loss`, `accuracy` (of classification) and `perplexity` (of language models): of that
          model on the client's test examples; NaN for a client without any.
      rounds: the number of the last round, those of the method's start included (`init_rounds`).
      seconds: wall time without compilation, of all parts of a run that was resumed.
      compile_seconds: time spent tracing and compiling, 0 for a second call with the same algorithm.
      client_steps: steps of the clients' optimisers, over all clients, rounds and seeds. A step that moves all models
        of a mixture counts once; models that a client trains apart have steps of their own.
      ended: why the run ended: all rounds are done, the method's reason (`Entries.ended`), or that of a callback.
      init_rounds: rounds of the method's start, which come before those of the simulation.
      served: what the clients are served in the last state, a `jfcl.Served`; with a leading seed axis as in `state`.
        With test clients it is what they were evaluated under: its `to` is `clients["model"]`, or the weights.
      rows: of a population, the rows that the method keeps of every client, a `jfcl.simulation.client_rows.ClientRows`;
        `state` and `served` then have those of the last cohort, and `clients` the evaluated clients, with their `id`
        `[E]`, and `weights` `[1, E, K]`, what `served.to` or `served.shares` is of them, where clients have mixtures.
    """

    records: list[dict[str, Any]]
    state: Any
    clients: dict[str, np.ndarray]
    rounds: int
    seconds: float
    compile_seconds: float
    client_steps: float
    ended: str
    init_rounds: int = 0
    served: Any = None
    rows: ClientRows | None = None

    def __repr__(self) -> str:
        """Returns three lines: the end, the mean ± sample deviation over seeds of the last records, the costs."""
        last = [row for row in self.records if row["round"] == self.records[-1]["round"]]
        seeds = f", {len(last)} seeds" if len(last) > 1 else ""
        names = [name for name in SHOWN if last and all(name in row for row in last)]
        columns = {name: [row[name] for row in last] for name in names}
        spread = {name: f" ± {deviation(values):.3g}" if seeds else "" for name, values in columns.items()}
        means = ", ".join(f"{name} {np.mean(values):.4g}{spread[name]}" for name, values in columns.items())
        rate = self.client_steps / max(self.seconds, 1e-9)
        return (
            f"{type(self).__name__}: {self.rounds} rounds{seeds}, {len(self.records)} records; {self.ended}\n"
            f"{means or 'no evaluation'}\n"
            f"{self.seconds:.1f} s + {self.compile_seconds:.1f} s compiling, {rate:,.0f} client steps/s"
        )

    def series(self, name: str, seed: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Returns `(rounds [E], values [E])` of one metric for `seed` (default: the first)."""
        seed = self.records[0]["seed"] if seed is None else seed
        chosen = [r for r in self.records if r["seed"] == seed]
        return np.array([r["round"] for r in chosen]), np.array([r[name] for r in chosen], np.float64)


def rollout(algorithm: Algorithm, clients: Clients, *, key: jax.Array, num_rounds: int, state: Any = None):
    """Runs `num_rounds` rounds as one pure `lax.scan`, for use under `jit`, and under `vmap` over keys and options.

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


# The loop of `simulate`.


class Schedule(NamedTuple):
    """The rounds of a run; arguments of `simulate`, and `ends`, the last round of each step of time, or of the run."""

    eval_every: int
    stop_after: int | None
    keep_clients: bool
    ends: Sequence[int]


class Block(NamedTuple):
    """The outcome of consecutive rounds.

    Attributes:
      state: after the last of them.
      values: metrics of the last round, `[R, ...]` each.
      sums: sums over the rounds of metrics, one float per seed each.
      largest: the largest values over the rounds of metrics, `[R, ...]` each.
      finite: `[R]` bool, whether the models are finite.
      silence: of `[R]`, after the last round.
      most_silent: `[R]` int32, its largest count over the rounds.
    """

    state: Any
    values: dict[str, Any]
    sums: dict[str, list[float]]
    largest: dict[str, np.ndarray]
    finite: Any
    silence: Silence
    most_silent: np.ndarray


def run_rounds(
    source: Any, start: Restored, schedule: Schedule, watch: Watch, folder: RunFolder | None, callbacks: Callbacks
) -> History:
    """Runs the rounds after `start`, with evaluations, records, warnings, checkpoints and the progress bar.

    Args:
      source: the clients and the compiled programs, `Resident` or `Streamed`:

        * `subjects`: the evaluated clients, `Subjects`, of the present step of time;
        * `resident`: whether all clients stay on the device. Several rounds then run in one call, and the run stops
          when the method has ended. With cohorts, one round runs at a time, and `ended` holds for the cohort only;
        * `client_rows`: those of a population, or None;
        * `most_silent`: participants in a row without a finite update, which show that training has diverged;
        * `advance(state, first, count, silence) -> Block` runs `count` rounds from round `first` on, not counting those
          of the method's start; `state` is consumed; `silence` is that of the last block;
        * `evaluate(state, values) -> Assessment`; `values` are the metrics of the last round;
        * `saved(state)`: the arrays of a checkpoint, on the host;
        * `final(state, done, assessment)`: `state`, `clients` and `served` of `History` after `done` rounds, counted as
          in `advance`; `assessment` is that of the last round, or None.
      start: the state after `start.round` rounds; its totals hold `init_rounds`, those of the method's start.
      schedule, watch: the rounds, and an open clock.
      folder: the run's folder; None in every process but the first, and if nothing is kept.
      callbacks: those of the run, with its folder.

    Raises:
      DivergedError, KeyboardInterrupt, CallbackError: as `simulate`.
      MemoryError: the device has no memory left, although the check before the run found enough.
    """
    done, state, totals, records = start
    seeds, entries = source.subjects.seeds, source.subjects.algorithm.entries
    totals, records, warned, assessment = dict(totals), list(records), set(), None
    at_most = 1  # the duration of a first round decides how many run at once
    before = totals.pop("init_rounds", 0)
    ends = [before + end for end in schedule.ends]
    *changes, final_round = ends
    until = final_round if schedule.stop_after is None else min(final_round, before + schedule.stop_after)
    can_end = max(changes, default=before)  # a method ends after it, since the data change no more
    last, has_ended = records[-len(seeds) :], False
    with callbacks, memory.out_of_memory():  # callbacks are given the remedy
        # Begin, unless the run has ended already.
        callbacks.start(start, seeds, lambda: source.saved(state))
        callbacks.raise_failure()
        if last and all(row["round"] == done for row in last):
            has_ended = source.resident and done > can_end and all(row.get("ended", False) for row in last)
            until = done if has_ended or callbacks.reason else until
        watch.begin(done, final_round, totals.pop("time", (0.0, 0.0)))
        silence = Silence(*np.array(totals.pop("silence", np.zeros((2, len(seeds)))), np.int32))
        if hosts.everybodys([watch.interrupted]).any():  # nothing has changed
            raise KeyboardInterrupt

        while done < until:
            # Train, at most up to the next evaluation or change of the data, and stop where the models are lost.
            same_data = min(end for end in ends if end > done) - done
            count = min(schedule.eval_every - done % schedule.eval_every, until - done, at_most, same_data)
            began = watch.seconds()
            block = source.advance(state, done - before + 1, count, silence)
            if source.resident:
                at_most = rounds_at_once(count, watch.seconds() - began)
            done, state, silence, assessment = done + count, block.state, block.silence, None
            stop_if_diverged(block.finite, block.most_silent >= source.most_silent, done, seeds, folder)
            totals, callbacks.round = _add(totals, block), done

            # Evaluate and record.
            if done % schedule.eval_every == 0 or done in ends:
                has_ended = source.resident and done > can_end and bool(np.all(block.values.get("ended", False)))
                assessment = source.evaluate(state, block.values)
                rows = make_records(source.subjects, done, assessment, totals)
                if schedule.keep_clients:
                    lists = {name: np.asarray(values).tolist() for name, values in assessment.of_clients().items()}
                    rows = [row | {"clients": {n: v[s] for n, v in lists.items()}} for s, row in enumerate(rows)]
                records += rows
                if folder is not None:
                    folder.append(rows)
                warn_once(warned, rows, source.subjects)
                totals = {name: value for name, value in totals.items() if name not in entries.largest}
                callbacks.call("on_records", rows)
                until = done if has_ended or callbacks.reason else until
            latest = records[-len(seeds)] if records else {}
            watch.advance(count, f"accuracy {latest['accuracy']:.3f}" if "accuracy" in latest else "")

            # Save. The first process decides when, by its clock.
            decisions = hosts.everybodys([watch.due(), at_most, watch.interrupted])
            due, at_most = decisions[0, :2].tolist()
            is_interrupted = decisions[:, 2].any()
            if callbacks.folder is not None and (due or is_interrupted or callbacks.failure or done == until):
                arrays = source.saved(state)
                if folder is not None:
                    more = {"time": watch.clock(), "silence": np.array(silence).tolist(), "init_rounds": before}
                    folder.save(done, arrays, totals | more, source.client_rows)
                watch.saved()
                callbacks.call("on_checkpoint", done, callbacks.folder)
            callbacks.raise_failure()
            if is_interrupted:
                raise KeyboardInterrupt
        warn_once(warned, records[-len(seeds) :], source.subjects, is_last=True)
        warn_if_loss_is_high(records, source.subjects)
        ended = has_ended or done == final_round
        why = callbacks.reason or f"stop_after is {schedule.stop_after} rounds"
        reason = entries.ended if has_ended else ALL_DONE if ended else why
        callbacks.ended = End("finished" if ended else "stopped", reason, done)
    last_state, clients, served = source.final(state, done - before, assessment)  # `state` is that of callbacks
    steps, ended = sum(totals.get("client_steps", [0.0])), callbacks.ended.reason
    result = last_state, clients, done, *watch.clock(), steps, ended, before, served, source.client_rows
    return History(records, *result)


def rounds_at_once(count: int, seconds: float) -> int:
    """Returns the rounds of the next call of a program, from the duration of `count` of them."""
    return int(np.clip(BLOCK_SECONDS * count / max(seconds, 1e-9), 1, MOST_ROUNDS))


def _add(totals: dict[str, Any], block: Block) -> dict[str, Any]:
    """Returns `totals` with the sums and the largest values of `block`."""
    sums = {name: np.add(totals.get(name, 0.0), added).tolist() for name, added in block.sums.items()}
    return totals | sums | {name: np.maximum(x, totals.get(name, x)).tolist() for name, x in block.largest.items()}


def read_checkpoint(folder: RunFolder | None, like: PyTree, num_rounds: int) -> Restored | None:
    """Returns the last checkpoint, the same in every process, with a state like `like`; None without one.

    Raises:
      ValueError: as `RunFolder.restore`; more than `num_rounds` rounds are done, or so many without the evaluation that
        ends a run.
    """
    restored = hosts.by_first(lambda: folder.restore(like))
    shared = hosts.same_everywhere(None if restored is None else [restored.round, restored.totals, restored.records])
    if shared is None:
        return None
    done, totals, records = shared
    trained = done - totals.get("init_rounds", 0)
    check(trained <= num_rounds, "num_rounds", num_rounds, f"at least the {trained} rounds already done")
    may_end = trained < num_rounds or (records and records[-1]["round"] == done)
    check(may_end, "num_rounds", num_rounds, f"more than the {trained} rounds already done: the last is not evaluated")
    return Restored(done, hosts.same_arrays(restored and restored.state, like), totals, records)
