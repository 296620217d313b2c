"""Metrics of models and of found clusters.

`evaluate` runs on the device, for one model or mixture of models per client. The argument `cluster` chooses it:
`Served.to` for the method's own choice (a *cluster* model, a mixture, or the client's own model), zeros for one
*global* model, `None` for the model of lowest loss on the evaluated data. The rest is NumPy on the host.
"""

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jfcl import mapping
from jfcl.core import Batch, Clients, PyTree, Task, check, check_mixes, copied, mixture_task, num_clients, with_fixed
from jfcl.core.checks import is_real
from jfcl.core.clients import check_clients, check_examples, check_labels
from jfcl.core.texts import first_line
from jfcl.kernels.base import sum_dtype
from jfcl.mapping.jitted import jitted
from jfcl.models.tasks import predicted
from jfcl.training.losses import fill_padding, masked_mean, under_all

__all__ = ["auc", "calibration_error", "check_metrics", "cluster_recovery", "confusion_matrix", "contingency"]
__all__ += ["deviation", "drift_results", "evaluate", "macro_f1", "mixture_recovery", "rounds_to_recovery", "summarize"]

Metric = Callable[[jax.Array, Batch, jax.Array], jax.Array]
RESERVED = ("loss", "accuracy", "perplexity", "cluster", "found", "model", "num_models", "examples", "id", "weights")
BINS = 15  # of equal width, of the probability of the predicted class
BACK = 0.95  # of the accuracy before a change; with it the run has recovered from the change
FOUND = 0.99  # the share of clients in the right cluster from which on the clusters count as found


def evaluate(
    task: Task,
    params: PyTree,
    clients: Clients,
    cluster: jax.Array | None = None,
    *,
    personal: PyTree = (),
    metrics: Mapping[str, Metric] | None = None,
    client_axis: mapping.Mapping | None = None,
) -> dict[str, jax.Array]:
    """Evaluates every client's model on that client's examples: loss and accuracy.

    Args:
      task: defines outputs, the loss and correct predictions.
      params: pytree of `[K, ...]`, the models.
      clients: the data to evaluate on, e.g. test examples; any number of clients.
      cluster: `[N]` int32, the model of each client; `[N, K]` float32, the weights of its mixture, of which `Task.mix`
        makes one model; `None`: the model of lowest loss on its examples.
      personal: pytree of `[N, ...]`, the clients' own parameters as in `state.personal`, which complete the model of
        each; `()`: there are none.
      metrics: further functions `(outputs [M, ...], batch, real [M]) -> array` of a client's outputs, by name; `real`
        marks the examples that are not padding. `jfcl.metrics` has `macro_f1`, `auc`, `calibration_error` and
        `confusion_matrix`. The same functions in a second call compile nothing.
      client_axis: a mapping; default: `jfcl.mapping.auto()`.

    Returns:
      `loss` `[N]`, `accuracy` `[N]` (where the task has one), `perplexity` `[N]` (of language models: `exp(loss)`) and
      `metrics`, NaN for clients without examples; `cluster` `[N]` int32, the model, or that of the largest weight. One
      forward pass over all examples, `K + 1` if `cluster` is None, `K` for mixtures; one program a task and mapping.

    Raises:
      ValueError: clients on the host (numpy) with NaN, or that the task cannot read; models without a leading axis;
        clusters on the host of another length, or outside `0 .. K-1`; weights that do not sum to 1; mixtures for a task
        without `mix`; `metrics` that are not functions, or that have the name of another result.

    Example:
      >>> import jax.numpy as jnp, numpy as np, jfcl
      >>> task = jfcl.models.task(lambda key: {"b": jnp.zeros(())}, lambda p, x: x + p["b"], kind="regression")
      >>> clients = jfcl.Clients({"x": np.zeros((3, 4)), "y": np.ones((3, 4))}, np.full(3, 4))
      >>> jfcl.evaluate(task, {"b": jnp.array([0.0, 1.0])}, clients, np.array([0, 1, 1]))["loss"].tolist()
      [1.0, 0.0, 0.0]
    """
    counts = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(params)}
    stacked = "models stacked on a leading axis, [K, ...]; jax.tree.map(lambda p: p[None], params) makes them of one"
    check(len(counts) == 1 and () not in counts, "params", f"leading axes {sorted(counts)}", stacked)
    if not isinstance(getattr(clients, "size", None), jax.Array):  # those on the device are a simulation's
        check_clients(clients, allow_empty=True)
        check_examples(clients, task)
        if task.num_classes is not None:
            check_labels(clients, task.num_classes)
    if not (cluster is None or isinstance(cluster, jax.Array)):  # those on the device are a method's: not waited for
        n, count, cluster = num_clients(clients), len(jax.tree.leaves(params)[0]), np.asarray(cluster)
        is_mixture = np.issubdtype(cluster.dtype, np.floating) and cluster.shape == (n, count)
        fits = is_mixture or (cluster.shape == (n,) and np.issubdtype(cluster.dtype, np.integer))
        accepted = f"an integer for each of the {n} clients, or weights of shape ({n}, {count})"
        check(fits, "cluster", cluster, accepted)
        if is_mixture:
            fits = (cluster >= 0).all() and np.allclose(cluster.sum(axis=1), 1, atol=1e-3)
            check(fits, "cluster", cluster, "weights of at least 0, with sum 1 for each client")
            cluster = cluster.astype(np.float32)
        else:
            check(((cluster >= 0) & (cluster < count)).all(), "cluster", cluster, f"in 0 .. {count - 1}")
    if cluster is not None and cluster.ndim == 2:
        check_mixes(task)
    static = {"task": task, "metrics": check_metrics(metrics), "client_axis": mapping.or_auto(client_axis)}
    return _evaluate(params, clients, cluster, personal, **static)


def check_metrics(metrics: Mapping[str, Metric] | None) -> tuple[tuple[str, Metric], ...]:
    """Returns `metrics` as pairs, in the order of their names; `ValueError` for other than functions by name."""
    fits = metrics is None or isinstance(metrics, Mapping)
    check(fits, "metrics", type(metrics).__name__, "a dict of functions (outputs, batch, real) by name")
    for name, function in (metrics or {}).items():
        check(isinstance(name, str) and name.isidentifier(), "metrics", name, "names such as 'macro_f1'")
        check(name not in RESERVED, "metrics", name, f"other names than those of results: {', '.join(RESERVED)}")
        accepted = "a function (outputs, batch, real) -> a number"
        check(callable(function), f"metrics[{name!r}]", function, accepted)
        try:
            inspect.signature(function).bind(*range(3))
        except (TypeError, ValueError) as error:  # the latter of builtins, whose signature is unknown
            raise ValueError(f"metrics[{name!r}] must be {accepted}; {error}") from None
    return tuple(sorted((metrics or {}).items()))


@partial(jitted, static_argnames=("task", "metrics", "client_axis"))
def _evaluate(params, clients, cluster, personal, *, task, metrics, client_axis):
    of_all = task

    def client(params, examples, size, k, own_params):
        task = with_fixed(of_all, own_params) if jax.tree.leaves(own_params) else of_all
        if k is None:
            k = jnp.argmin(under_all(task, params)(examples, size)[0]).astype(jnp.int32)
        if k.ndim:  # a mixture
            task, model, k = mixture_task(task), (params, k), jnp.argmax(k).astype(jnp.int32)
        else:
            model = jax.tree.map(lambda p: p[k], params)
        examples = fill_padding(examples, size, zeros=True)  # metrics may add up without `real`
        real = jnp.arange(jax.tree.leaves(examples)[0].shape[0]) < size
        scores = {"loss": task.cost} | ({} if task.correct is None else {"accuracy": task.correct})

        def score(outputs, batch):
            return {n: f(*copied((outputs, batch))) for n, f in scores.items()}, outputs if metrics else ()

        by_example, outputs = task.scores(score, model, examples)  # the outputs are computed once, also in parts
        result = {name: masked_mean(values, real) for name, values in by_example.items()}
        if task.perplexity:
            result["perplexity"] = jnp.exp(result["loss"])
        if metrics:
            result |= {name: _computed(name, function, outputs, examples, real) for name, function in metrics}
        result = {name: jnp.where(size > 0, value, jnp.full_like(value, jnp.nan)) for name, value in result.items()}
        return result | {"cluster": k}

    # The models are an argument: JAX cannot index arrays from outside in a function that `shard_map` divides.
    axes = (None, 0, 0, None if cluster is None else 0, 0)
    return client_axis(client, in_axes=axes)(params, clients.examples, clients.size, cluster, personal)


def _computed(name: str, function: Metric, outputs: jax.Array, examples: Batch, real: jax.Array) -> jax.Array:
    """Returns a metric of one client; `ValueError` for a function that asks for numbers while it is compiled."""
    try:
        value = function(*copied((outputs, examples)), real)
        fits = is_real(value) or isinstance(value, (int, float))
        check(fits, f"metrics[{name!r}]", value, "a function that returns one number")
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
        what = "that JAX compiles, which returns an array: no float(), no NumPy, no if, no mask as an index"
        raise ValueError(f"metrics[{name!r}] must be a function {what} ({first_line(error)})") from None
    return (value := jnp.asarray(value)).astype(jnp.result_type(value.dtype, jnp.float32))


def summarize(evaluation: dict[str, np.ndarray], size: np.ndarray) -> dict[str, float]:
    """Summarises the evaluation of all clients by one number for each metric.

    Args:
      evaluation: from `evaluate`, for one seed.
      size: `[N]`, the number of examples each client was evaluated on; clients with none are left out.

    Returns:
      `loss`, `accuracy`, `perplexity` and further metrics: means over clients; further metrics leave out the clients
      for which they are NaN (None if that is all of them). `pooled_accuracy`: the mean over examples.
      `worst_client_accuracy` and `worst_decile_accuracy`: the lowest, and the mean of the lowest tenth (at least one
      client).

    Example:
      >>> result = summarize({"loss": np.array([1.0, 3.0]), "accuracy": np.array([1.0, 0.5])}, np.array([30, 10]))
      >>> result["accuracy"], result["pooled_accuracy"], result["worst_client_accuracy"]
      (0.75, 0.875, 0.5)
    """
    real = np.asarray(size) > 0
    columns = {name: np.asarray(values, np.float64)[real] for name, values in evaluation.items()}
    summary = {name: float(columns[name].mean()) for name in ("loss", "perplexity") if name in columns}
    for name in (name for name in columns if name not in RESERVED):
        defined = columns[name][~np.isnan(columns[name])]
        summary[name] = float(defined.mean()) if len(defined) else None
    if "accuracy" in columns:
        accuracy = columns["accuracy"]
        worst = np.sort(accuracy)[: max(1, len(accuracy) // 10)]
        summary |= {
            "accuracy": float(accuracy.mean()),
            "pooled_accuracy": float(np.average(accuracy, weights=np.asarray(size)[real])),
            "worst_client_accuracy": float(worst[0]),
            "worst_decile_accuracy": float(worst.mean()),
        }
    return summary


def cluster_recovery(found: np.ndarray, true: np.ndarray) -> dict[str, float]:
    """Measures the agreement of found clusters with the true ones; names of clusters have no effect.

    Args:
      found: `[N]` integers, the clusters of a method: `state.cluster`, or `History.clients["cluster"][seed]`.
      true: `[N]` integers; clients with the true cluster -1, such as hostile ones, do not count. Name both
        arguments: with the two exchanged, `purity` and `clusters_in_use` differ.

    Returns:
      `cluster_accuracy`: the share of clients in the right cluster under the best one-to-one matching (Hungarian
      method; IFCA's figure 4). `adjusted_rand` (1 at agreement, 0 by chance), `nmi`, `purity` (share of clients in the
      majority of their found cluster); `clusters_in_use`, the found clusters of the clients that count.

    Example:
      >>> cluster_recovery(found=[2, 2, 0, 0], true=[0, 0, 1, 1])["cluster_accuracy"]
      1.0
      >>> cluster_recovery(found=[0, 0, 0, 0], true=[0, 0, 1, 1])["cluster_accuracy"]
      0.5
    """
    from scipy.optimize import linear_sum_assignment  # takes long to import

    found, true = np.asarray(found), np.asarray(true)
    if found.shape != true.shape or found.ndim != 1 or len(found) == 0:
        raise ValueError(f"found and true must be vectors of one length, got shapes {found.shape} and {true.shape}")
    for name, clusters in {"found": found, "true": true}.items():
        whole = clusters.dtype.kind in "iuf" and (np.isfinite(clusters) & (clusters == np.rint(clusters))).all()
        check(whole, name, clusters, "integers, the cluster of each client")
    counts = true >= 0
    if not counts.any():
        raise ValueError("true must have the cluster of one client at least, got -1 for all")
    table = contingency(found[counts], true[counts])
    matched = table[linear_sum_assignment(table, maximize=True)].sum()
    return {
        "cluster_accuracy": float(matched / table.sum()),
        "adjusted_rand": _adjusted_rand(table),
        "nmi": _normalized_mutual_information(table),
        "purity": float(table.max(axis=1).sum() / table.sum()),
        "clusters_in_use": len(table),
    }


def mixture_recovery(found: np.ndarray, true: np.ndarray) -> dict[str, float]:
    """Measures the agreement of clients' found mixtures with the true ones; the order of the models has no effect.

    Args:
      found: `[N, K']`, the weights of each client's mixture: `History.served.to[seed]` of a method that serves one, in
        a population `History.clients["weights"][0]`.
      true: `[N, K]`, the clusters' shares in its examples: `Federation.mixture`, or `jfcl.data.mixture_of`.

    Returns:
      Under the one-to-one matching of models and clusters with the least difference (Hungarian method; a model or a
      cluster without a partner counts with its whole weight): `mixture_error`, the mean over clients of the total
      variation distance, in `[0, 1]`; `mixture_correlation`, Pearson's, over all clients and clusters (NaN if one is
      constant).

    Example:
      >>> true = np.array([[0.9, 0.1], [0.2, 0.8]])
      >>> round(mixture_recovery(found=true[:, ::-1], true=true)["mixture_correlation"], 6)
      1.0
      >>> round(mixture_recovery(found=np.full((2, 2), 0.5), true=true)["mixture_error"], 6)
      0.35
    """
    from scipy.optimize import linear_sum_assignment  # takes long to import

    found, true = (np.asarray(shares, np.float64) for shares in (found, true))
    for name, shares in {"found": found, "true": true}.items():
        fits = shares.ndim == 2 and shares.size > 0 and np.allclose(shares.sum(axis=1), 1, atol=1e-3)
        check(fits, name, shares, "shares [N, K], with sum 1 for each client")
    check(len(found) == len(true), "found", f"{len(found)} clients", f"of the {len(true)} clients of true")
    count = max(found.shape[1], true.shape[1])
    found, true = (np.pad(shares, ((0, 0), (0, count - shares.shape[1]))) for shares in (found, true))
    rows, columns = linear_sum_assignment([np.abs(weights[:, None] - true).sum(axis=0) for weights in found.T])
    found, true = found[:, rows], true[:, columns]
    varies = min(found.std(), true.std()) > 1e-9
    return {
        "mixture_error": float(np.abs(found - true).sum(axis=1).mean() / 2),
        "mixture_correlation": float(np.corrcoef(found.ravel(), true.ravel())[0, 1]) if varies else float("nan"),
    }


def contingency(found: np.ndarray, true: np.ndarray) -> np.ndarray:
    """Returns the numbers of clients by found (rows) and true cluster (columns), `[N]` integers, in rising order."""
    (rows, i), (columns, j) = (np.unique(names, return_inverse=True) for names in (found, true))
    cells = i.astype(np.int64) * len(columns) + j
    return np.bincount(cells, minlength=len(rows) * len(columns)).reshape(len(rows), len(columns))


def _adjusted_rand(table: np.ndarray) -> float:
    """Returns the adjusted Rand index, from pairs of clients that are together in both, one or no clustering."""
    squares = [int((counts**2).sum()) for counts in (table, table.sum(axis=1), table.sum(axis=0))]
    clients = int(table.sum())
    both, only_found, only_true = squares[0] - clients, squares[1] - squares[0], squares[2] - squares[0]
    none = clients**2 - clients - both - only_found - only_true
    if only_found == only_true == 0:
        return 1.0
    expected = (both + only_true) * (only_true + none) + (both + only_found) * (only_found + none)
    return 2.0 * (both * none - only_found * only_true) / expected


def _normalized_mutual_information(table: np.ndarray) -> float:
    """Returns the mutual information of the clusterings, divided by the mean of their entropies."""
    from scipy.special import entr  # takes long to import

    share = table / table.sum()
    by_found, by_true = share.sum(axis=1), share.sum(axis=0)
    if len(by_found) == len(by_true) == 1:
        return 1.0
    shared = share[table > 0]
    parts = shared * np.log(shared / np.outer(by_found, by_true)[table > 0])
    information = parts[np.abs(parts) > np.finfo(float).eps].sum()  # independent clusterings have exactly 0
    entropies = entr(by_found).sum() + entr(by_true).sum()
    return float(np.clip(2.0 * information / entropies, 0.0, 1.0))


def deviation(values: Sequence[float]) -> float | None:
    """Returns the sample standard deviation (with the divisor `R - 1`) of `R` values; None for fewer than two.

    Every ± in tables, figures and files is this number.

    Example:
      >>> deviation([1.0, 3.0]) ** 2, deviation([1.0])
      (2.0000000000000004, None)
    """
    with np.errstate(invalid="ignore"):  # NaN with infinite values
        return float(np.std(np.asarray(values, np.float64), ddof=1)) if len(values) > 1 else None


def rounds_to_recovery(rounds: list[int], cluster_accuracy: list[float], *, level: float = FOUND) -> int | None:
    """Returns the first evaluated round from which `cluster_accuracy` stays at `level` or above; `None` without one.

    Example:
      >>> rounds_to_recovery([1, 2, 3, 4], [1.0, 0.5, 0.99, 1.0])
      3
    """
    below = [i for i, accuracy in enumerate(cluster_accuracy) if accuracy < level]
    stable = rounds[below[-1] + 1 :] if below else rounds
    return stable[0] if stable else None


def drift_results(records: Sequence[dict]) -> dict[str, list]:
    """Summarises one seed's run on drifting data, step by step.

    Args:
      records: those of one seed, as in `History.records`, of classification.

    Returns:
      Lists with an entry for each step that has ended or is in progress, from its last evaluated round: `round`;
      `changed`, the number of clients whose cluster changed when the step began; `accuracy`; `adjusted_rand`;
      `next_accuracy`, that of the same models on the tests of the next step, before they adapt (in the last step, on
      those of this step); `next_stable_accuracy`, that of the clients whose cluster stays. And `recovery`: after a
      change, the rounds until the accuracy is at least 95 % of the last one before it; None for a step without a
      change, and where the accuracy does not recover.

    Example:
      >>> accuracies = [(1, 0, 0.9), (2, 0, 1.0), (3, 1, 0.5), (4, 1, 0.7), (5, 2, 0.96)]
      >>> records = [{"round": t, "step": s, "changed": int(s == 1), "accuracy": a} for t, s, a in accuracies]
      >>> drift_results(records)["accuracy"], drift_results(records)["recovery"]
      ([1.0, 0.7, 0.96], [None, 3, None])
    """
    last = list({record["step"]: record for record in records}.values())
    names = ("round", "changed", "accuracy", "adjusted_rand", "next_accuracy", "next_stable_accuracy")
    results = {name: [record.get(name) for record in last] for name in names} | {"recovery": [None] * len(last)}
    for i, (before, step) in enumerate(itertools.pairwise(last), 1):
        later = (r for r in records if r["round"] > before["round"] and r["accuracy"] >= BACK * before["accuracy"])
        back = next(later, None) if step["changed"] else None
        results["recovery"][i] = None if back is None else back["round"] - before["round"]
    return results


# ---------------------------------------------------------------------------------------------------------------
# Metrics of one client's outputs, `(outputs, batch, real) -> []`: logits `[M, C]`, labels `batch["y"]` `[M]`, and
# `real` `[M]`, which marks the examples that are no padding.


def _logits(outputs: jax.Array, batch: Batch) -> jax.Array:
    """Returns logits `[M, C]`, float32 at least; `ValueError` for other outputs, such as those of a regression."""
    fits = jnp.issubdtype(jnp.result_type(batch["y"]), jnp.integer) and getattr(outputs, "ndim", 0) == 2
    check(fits, "the outputs", jax.tree.map(jnp.shape, outputs), "logits [M, C] of a classification, for this metric")
    return outputs.astype(sum_dtype(outputs))  # 16 bits do not hold numbers of pairs


def confusion_matrix(logits: jax.Array, batch: Batch, real: jax.Array) -> jax.Array:
    """Returns the numbers of examples by label (rows) and predicted class (columns; of NaN none), `[C, C]` float32.

    Example:
      >>> logits = jnp.array([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]])
      >>> confusion_matrix(logits, {"y": jnp.array([0, 1, 1])}, jnp.array([True, True, True])).tolist()
      [[1.0, 0.0], [1.0, 1.0]]
    """
    classes = _logits(logits, batch).shape[1]
    true, found = (jax.nn.one_hot(k, classes) for k in (batch["y"], predicted(logits)))
    return jnp.matmul((true * real[:, None].astype(true.dtype)).T, found, precision=jax.lax.Precision.HIGHEST)


def macro_f1(logits: jax.Array, batch: Batch, real: jax.Array) -> jax.Array:
    """Returns the mean F1 of the classes, `[]`, over those that occur among the client's labels or predictions.

    It equals `sklearn.metrics.f1_score(average="macro")`.

    Example:
      >>> logits = jnp.array([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]])
      >>> round(float(macro_f1(logits, {"y": jnp.array([0, 1, 1])}, jnp.array([True, True, True]))), 4)
      0.6667
    """
    table = confusion_matrix(logits, batch, real)  # without the rows of NaN
    labels = jax.nn.one_hot(jnp.where(real, batch["y"], -1), len(table)).sum(axis=0)
    counted = table.sum(axis=0) + labels
    f1 = 2 * jnp.diagonal(table) / jnp.maximum(counted, 1)
    return f1.sum() / jnp.maximum((counted > 0).sum(), 1).astype(f1.dtype)


def auc(logits: jax.Array, batch: Batch, real: jax.Array) -> jax.Array:
    """Returns the area under the ROC curve, `[]`, of two classes: the probability that a positive example ranks higher.

    Ties count one half; outputs of NaN are never higher. NaN for a client with one class only, which means over clients
    leave out. `ValueError` for other than two classes.

    Example:
      >>> logits = jnp.array([[0.0, 1.0], [0.0, 2.0], [0.0, 0.0]])
      >>> float(auc(logits, {"y": jnp.array([0, 1, 1])}, jnp.array([True, True, True])))
      0.5
    """
    logits = _logits(logits, batch)
    check(logits.shape[1] == 2, "the outputs", list(logits.shape), "logits of two classes for auc")
    score = logits[:, 1] - logits[:, 0]
    positive, negative = (((batch["y"] == k) & real).astype(score.dtype) for k in (1, 0))
    lower = jnp.sort(jnp.where(negative > 0, score, jnp.nan))  # NaN is behind all numbers
    twice = sum(jnp.searchsorted(lower, score, side=side) for side in ("left", "right")).astype(score.dtype)
    return (jnp.where(jnp.isnan(score), 0.0, twice) * positive / (2 * negative.sum())).sum() / positive.sum()


def calibration_error(logits: jax.Array, batch: Batch, real: jax.Array) -> jax.Array:
    """Returns the expected calibration error, `[]` (Guo, Pleiss, Sun, Weinberger 2017): 15 bins of equal width.

    It is the mean, over examples, of the distance between accuracy and mean probability in the bin of the example.

    Example:
      >>> logits = jnp.log(jnp.array([[0.8, 0.2], [0.8, 0.2]]))
      >>> round(float(calibration_error(logits, {"y": jnp.array([0, 1])}, jnp.array([True, True]))), 4)
      0.3
    """
    probability = jax.nn.softmax(_logits(logits, batch)).max(axis=-1)
    right = (predicted(logits) == batch["y"]).astype(probability.dtype)
    place = jnp.clip(jnp.ceil(probability * BINS).astype(jnp.int32) - 1, 0, BINS - 1)
    inside = jax.nn.one_hot(place, BINS, dtype=probability.dtype)
    gaps = jnp.abs((jnp.where(real, right - probability, 0.0)[:, None] * inside).sum(axis=0))
    return gaps.sum() / jnp.maximum(real.sum(), 1).astype(gaps.dtype)
