"""The results of an evaluation, and the records and final arrays made of them, for every kind of simulation."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jfcl.analysis import metrics
from jfcl.core import Algorithm, Clients, Entries, Served, Task, check, check_served_to, named_leaves, num_clients
from jfcl.core.checks import is_real, require
from jfcl.core.types import check_task
from jfcl.mapping.jitted import jitted
from jfcl.mapping.memory import in_lots

SUMMED = ("bytes_up", "bytes_down", "client_steps", "nonfinite")  # of every method, beside its `Entries.sums`
SERVE = ("loss", "state")
MOST_SILENT = 100  # so many participants in a row without a finite update, or all clients: training has diverged
# Entries of a record that are not metrics of the method; so are those that begin with OF_NEWCOMERS or OF_NEXT.
OF_RECORDS = ("seed", "round", "train_loss", "clusters_in_use", "cluster", "excluded", "accuracy", "perplexity")
OF_RECORDS += ("pooled_accuracy", "worst_client_accuracy", "worst_decile_accuracy")
OF_RECORDS += ("cluster_accuracy", "adjusted_rand", "nmi", "purity", "clients", "step", "changed")
OF_RECORDS += ("asked", "dropped", "cut", "seen")  # of a population
OF_RECORDS += ("time", "silence", "init_rounds", "not_finite")  # of checkpoints, and of lines of metrics.jsonl
OF_NEWCOMERS, OF_NEXT = "newcomer_", "next_"
OF_TABLES = ("client", "true_cluster", "malicious", "excluded_in_round")  # columns of clients.csv
MOST_LISTED = 1000  # more would make metrics.jsonl unwieldy


def check_step(returned: Any, state: Any, clients: Clients, entries: Entries) -> tuple[Any, dict[str, Any]]:
    """Returns the `(state, metrics)` that a step has returned, arrays or their shapes; `ValueError` for other results.

    The state must keep the shapes and types of the `state` before. Metrics are a flat dict of arrays with `loss` `[N]`,
    without names that a record has for something else, and such that records can hold the `entries`.
    """
    several = isinstance(returned, tuple | list) and not hasattr(returned, "_fields")
    pair = several and len(returned) == 2 and isinstance(returned[1], dict)
    accepted = "a function that returns (state, metrics), with metrics in a dict"
    kinds = [type(x).__name__ for x in returned] if several else type(returned).__name__
    check(pair, "step", kinds, accepted)
    new, values = returned
    differ = unlike(new, state)
    check(not differ, "step", differ, "a function that keeps shapes and types of the state")
    odd = [name for name, value in values.items() if not is_real(value)]
    check(not odd, "metrics", ", ".join(map(str, odd)), "a flat dict of arrays of real numbers")
    if "loss" not in values:
        raise ValueError(f"the metrics of step have no 'loss', the training loss of each client: {sorted(values)}")
    shape, n = jnp.shape(values["loss"]), len(clients.size)
    check(shape == (n,), "the metric loss", list(shape), f"of shape [{n}], a training loss for each client")
    for names in (entries.sums, entries.largest):  # of a text, each letter would be a name
        check(not isinstance(names, str), "sums and largest of Entries", names, "tuples of names, such as ('splits',)")
    for name, value in values.items():
        taken = name in OF_RECORDS or name.startswith((OF_NEWCOMERS, OF_NEXT))
        check(not taken, "metrics", name, "other names: the records of a run have this one for a result of their own")
        is_number = name not in (*SUMMED, *entries.sums) or not value.shape
        check(is_number, f"the metric {name}", list(value.shape), "of shape [], as records have its sum over rounds")
        is_whole = name not in entries.largest or value.dtype.kind in "biu"
        check(is_whole, f"the metric {name}", value.dtype.name, "of integers, as records have its largest value")
    return new, values


def unlike(state: Any, wanted: Any) -> str:
    """Returns in words which arrays of a state do not have the shapes and types of `wanted`; empty without any."""

    def shapes(tree):
        return {name: f"{jnp.result_type(x)} {list(jnp.shape(x))}" for name, x in named_leaves(tree).items()}

    have, like = shapes(state), shapes(wanted)
    names = [name for name in sorted({*have, *like}) if have.get(name) != like.get(name)]
    return "; ".join(f"{n} is {have.get(n, 'absent')}, not {like.get(n, 'there')}" for n in names[:3])


def check_further(functions: Mapping[str, metrics.Metric] | None) -> tuple[tuple[str, metrics.Metric], ...]:
    """Returns the checked metrics (`metrics.check_metrics`); `ValueError` for the name of another entry of records."""
    further = metrics.check_metrics(functions)
    for name, _ in further:
        taken = name in (*OF_RECORDS, *OF_TABLES) or name.startswith((OF_NEWCOMERS, OF_NEXT))
        check(not taken, "metrics", name, "other names than those of entries of records and of columns of clients.csv")
    return further


def check_evaluated(task: Any, evaluated: Sequence[str]) -> None:
    """Raises `ValueError` unless there is a task for the `evaluated` clients, as the results would be missing."""
    needs = f"the task of its parameters, Algorithm(init, step, task), to evaluate {' and '.join(evaluated)}"
    require(task is not None or not evaluated, f"the algorithm needs {needs}")
    if task is not None:
        check_task(task)


def check_names(further: tuple[tuple[str, metrics.Metric], ...], own: Mapping[str, Any]) -> None:
    """Raises `ValueError` for a metric with the name of one of the method's own."""
    both = ", ".join(name for name, _ in further if name in own)
    check(not both, "metrics", both, "other names than those of the method's own metrics")


def check_clusters(to: np.ndarray, num_models: int) -> None:
    """Raises `ValueError` for clusters `[..., N]` that are no rows of the models, since JAX would take other rows.

    Weights of mixtures, floats `[..., N, K]`, must be at least 0, with sum 1.
    """
    if to.dtype.kind == "f":
        sums = to.sum(axis=-1)
        fits = (to >= 0).all() and np.allclose(sums, 1, atol=1e-3)
        odd = sums.ravel()[np.argmax(np.abs(sums - 1))] if to.size else 1.0
        check(fits, "the weights of a client's mixture", f"with sum {odd:.4g}", "at least 0, with sum 1")
        return
    fits = not to.size or (to.min() >= 0 and to.max() < num_models)
    accepted = f"in 0..{num_models - 1}, rows of the models"
    check(fits, "the models that clients are served", sorted(set(to.ravel().tolist()))[:8], accepted)


class Subjects(NamedTuple):
    """The clients of all evaluations of a run, and what its records hold of them.

    Attributes:
      algorithm: of the run, or of its first row.
      seeds: `R` names of the keys.
      ids: `[N]`, of the clients; empty where none is evaluated. Records list the clusters of at most `MOST_LISTED`.
      num_clients: of the run; more than `N` in a population.
      test_size, new_size: `[N]`, `[N']`, numbers of examples of the test clients and of the newcomers, or None.
      true_cluster: `[N]`, or None if it is unknown.
      choices: the number of models that clients choose among; 1 where it is no failure if all have the same.
      step: the step of time, from 0, of drifting data, else None.
      changed: the number of clients whose cluster changed when this step began.
      stays: `[N]` bool, the clients whose cluster is the same at the next step.
    """

    algorithm: Algorithm
    seeds: list
    ids: Sequence[int]
    num_clients: int
    test_size: np.ndarray | None
    new_size: np.ndarray | None
    true_cluster: np.ndarray | None
    choices: int
    step: int | None = None
    changed: int = 0
    stays: np.ndarray | None = None


def choices_among(served: Served, num_models: int, num_clients: int, true_cluster: np.ndarray | None) -> int:
    """Returns `Subjects.choices`.

    Methods that start with one cluster and split it have not collapsed while they have one, nor have mixtures in which
    one model has the largest weight for all clients, nor clients that are known to be of one cluster.
    """
    alike = true_cluster is not None and len(np.unique(true_cluster[true_cluster >= 0])) == 1
    none = served.active is not None or is_mixture(served) or alike or num_models >= num_clients
    return 1 if none else num_models


class Assessment(NamedTuple):
    """The evaluation of one state, as NumPy arrays with a leading axis of `R` seeds.

    Attributes:
      cluster: `[R, N]`, the clusters that are reported.
      values: metrics of the last round, `[R, ...]` each; further entries of the records.
      held_out: `[R, N]` each, of the test clients: `cluster`, the model that a client is served (of a mixture, that of
        the largest weight), and its `loss`, `accuracy`, …; None without test clients.
      newcomers: the same for newcomers, `[R, N']` each.
      upcoming: the same for the test examples of the next step of time, `[R, N]` each; None without drift.
      excluded: `[R, N]`, of methods that exclude clients: the round of the exclusion.
      examples: `[N]`, the clients' numbers of training examples; None where the clients are those of a cohort.
      weights: `[R, N, K]`: the weights of the mixtures that clients are served, where a method has mixtures; of clients
        of a population also the importance of centres.
    """

    cluster: np.ndarray
    values: dict[str, np.ndarray]
    held_out: dict[str, np.ndarray] | None = None
    newcomers: dict[str, np.ndarray] | None = None
    excluded: np.ndarray | None = None
    upcoming: dict[str, np.ndarray] | None = None
    weights: np.ndarray | None = None
    examples: np.ndarray | None = None

    def of_clients(self) -> dict[str, np.ndarray]:
        """Returns `cluster`, `examples`, and with test clients `model`, `loss`, `accuracy`, …: `[R, N]` each."""
        held_out = dict(self.held_out or {})
        served = {"model": held_out.pop("cluster")} if held_out else {}
        sizes = {} if self.examples is None else {"examples": np.tile(self.examples, (len(self.cluster), 1))}
        return {"cluster": self.cluster} | served | held_out | sizes


class Silence(NamedTuple):
    """Participants that have sent no finite update.

    Attributes:
      count: `[]` int32, so many in a row up to the last round, without rounds of less than half of `widest`: the last
        active clients of a method that ends may be hostile.
      widest: `[]` int32, the most participants of a round.
    """

    count: Any
    widest: Any


def silence_after(silence: Silence, values: dict[str, Any]) -> Silence:
    """Returns the silence after a round with the metrics `values`, in arrays of their kind, NumPy's or JAX's."""
    if "nonfinite" not in values or "participants" not in values:
        return silence
    bad, present = (values[name].astype(np.int32) for name in ("nonfinite", "participants"))
    more, lost = (flag.astype(np.int32) for flag in (present > silence.widest, bad == present))
    widest = silence.widest + (present - silence.widest) * more
    counted = present * (2 * present >= widest).astype(np.int32)
    return Silence((silence.count + counted) * lost, widest)


def make_records(subjects: Subjects, t: int, assessment: Assessment, totals: dict[str, list]) -> list[dict[str, Any]]:
    """Returns the records of round `t`, one per seed; `totals`: the sums and the largest values, `[R, ...]` each."""
    rows = []
    for s, seed in enumerate(subjects.seeds):
        row = {"seed": seed, "round": t}

        # The models, and the clusters.
        if assessment.held_out is not None:
            row |= metrics.summarize({name: v[s] for name, v in assessment.held_out.items()}, subjects.test_size)
        if assessment.newcomers is not None:
            summary = metrics.summarize({name: v[s] for name, v in assessment.newcomers.items()}, subjects.new_size)
            row |= {f"{OF_NEWCOMERS}{name}": value for name, value in summary.items()}
        if subjects.step is not None:
            row |= {"step": subjects.step, "changed": subjects.changed}
        if assessment.upcoming is not None:
            row |= _upcoming({name: v[s] for name, v in assessment.upcoming.items()}, subjects)
        row["train_loss"] = float(assessment.values["loss"][s])
        row["clusters_in_use"] = len(np.unique(assessment.cluster[s]))
        if subjects.true_cluster is not None:
            row |= metrics.cluster_recovery(assessment.cluster[s], subjects.true_cluster)

        # Metrics of the method, and totals.
        row |= {name: v[s].tolist() for name, v in assessment.values.items() if name != "loss"}
        if 0 < len(subjects.ids) <= MOST_LISTED:
            row["cluster"] = assessment.cluster[s].tolist()
            if assessment.excluded is not None:
                row["excluded"] = assessment.excluded[s].tolist()
        for name, total in totals.items():
            is_largest = name in subjects.algorithm.entries.largest
            row[name] = np.array(total[s], assessment.values[name].dtype).tolist() if is_largest else total[s]
        rows.append(row)
    return rows


def _upcoming(results: dict[str, np.ndarray], subjects: Subjects) -> dict[str, Any]:
    """Returns the entries of a record on the next step: of all clients, and of those whose cluster stays."""
    row = {f"{OF_NEXT}{name}": value for name, value in metrics.summarize(results, subjects.test_size).items()}
    if "accuracy" in results:
        size = np.where(subjects.stays, subjects.test_size, 0)
        stable = metrics.summarize({"accuracy": results["accuracy"]}, size)["accuracy"] if size.any() else None
        row[f"{OF_NEXT}stable_accuracy"] = stable
    return row


def serving_part(algorithm: Algorithm) -> Algorithm:
    """Returns the part of an algorithm that evaluations use, so that algorithms that serve alike share a program."""
    return Algorithm(None, None, algorithm.task, serve=algorithm.serve, adopt=algorithm.adopt)


@partial(jitted, static_argnames=("algorithm", "row_axis", "client_axis", "of_newcomers", "further"))
def evaluate_rows(
    state, hyperparams, clients, learners, *, algorithm, row_axis, client_axis, of_newcomers=None, further=()
):
    """Evaluates what clients are served in several states `[R, ...]`: of seeds, or rows of a sweep.

    `algorithm` is a `serving_part`, or a function of `hyperparams` `[R]`. With `learners`, the same clients with other
    examples (those in training), clients choose by these. For clients that were not in training, `of_newcomers` has
    the numbers of clients and of models without padding, which is behind them.

    Returns:
      The results of `metrics.evaluate`, `[R, N]` each. For clients of the run also `found`, the clusters to report, and
      of a method with mixtures `weights` `[R, N, K]`; for others, of a method with `adopt`, `model` `[R, N]` or
      `[R, N, K]`, what it serves, and the number of its models.
    """
    is_new = of_newcomers is not None

    def one(state, hyperparams, clients, learners):
        method = algorithm if hyperparams is None else algorithm(**hyperparams)
        by = clients if learners is None else learners
        served = adopted(method, state, by, *of_newcomers) if is_new else method.serve(state, learners)
        if not is_new or method.adopt is not None:
            check_served_to("adopt" if is_new else "serve", served, num_clients(clients))
            own = jnp.arange(num_clients(clients), dtype=jnp.int32)
            served = served._replace(to=own if served.to is None else served.to)
        if served.to is None and learners is not None:
            lowest, _ = evaluate_served(method.task, served, learners, client_axis=client_axis, further=())
            served = served._replace(to=lowest["cluster"])
        results, reported = evaluate_served(method.task, served, clients, client_axis=client_axis, further=further)
        if not is_new:
            return results | {"found": reported} | ({"weights": served.to} if is_mixture(served) else {})
        count = len(jax.tree.leaves(served.models)[0])
        return results if served.to is None else results | {"model": served.to, "num_models": jnp.int32(count)}

    return row_axis(one, in_axes=(0, 0, None, None))(state, hyperparams, clients, learners)


def evaluate_served(
    task: Task, served: Served, clients: Clients, *, client_axis: Any, further: tuple
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Evaluates what clients are served: returns the results of `metrics.evaluate`, and the clusters `[N]` to report.

    Where `served.to` is None, it is the model of the lowest loss.
    """
    to, personal = served.to, () if served.personal is None else served.personal
    models = len(jax.tree.leaves(served.models)[0]) if to is not None and to.ndim == 2 else 1
    options = {"metrics": dict(further), "client_axis": in_lots(client_axis, task, clients, models)}
    results = metrics.evaluate(task, served.models, clients, to, personal=personal, **options)
    for name, _ in further:
        shape = results[name].shape[1:]
        check(not shape, f"metrics[{name!r}]", f"an array of shape {shape}", "a function that returns one number")
    return results, results["cluster"] if served.found is None else served.found


def adopted(algorithm: Algorithm, state: Any, clients: Clients, all_clients: int, all_models: int) -> Served:
    """Returns what clients are served that were not in training; `to` is None for the model of lowest loss."""
    if algorithm.adopt is not None:
        return algorithm.adopt(state, clients)
    served, rows = algorithm.serve(state, None), num_clients(clients)
    means = jax.tree.map(lambda x: x[:all_clients].mean(axis=0), served.personal)
    personal = jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *x.shape)), means)
    models = jax.tree.map(lambda x: x[:all_models], served.models)
    if served.active is not None:  # a row without a model has that of the first row with one
        row = jnp.where(served.active, jnp.arange(len(served.active)), jnp.argmax(served.active))[:all_models]
        models = jax.tree.map(lambda x: x[row], models)
    return Served(models, None, personal)


def is_mixture(served: Served) -> bool:
    """Returns whether clients are served mixtures of models."""
    return served.to is not None and np.issubdtype(served.to.dtype, np.floating)


def found_clusters(served: Served, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the clusters to report of what clients are served, an array of `shape` `[..., N]` on the host."""
    if served.found is not None:
        return served.found
    if served.to is None:
        return np.broadcast_to(np.arange(shape[-1], dtype=np.int32), shape)
    return served.to if served.to.ndim == len(shape) else served.to.argmax(-1).astype(np.int32)


def finite_mean(values: jax.Array, rows: Any = True) -> jax.Array:
    """Returns the mean of the finite entries of `values` `[N, ...]`, of `rows` `[N]` bool; NaN if there are none."""
    values = values.astype(jnp.float32)
    counts = jnp.isfinite(values) & jnp.expand_dims(rows, tuple(range(jnp.ndim(rows), values.ndim)))
    return jnp.nanmean(jnp.where(counts, values, jnp.nan))
