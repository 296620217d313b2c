"""FedDrift (Jothimurugesan, Hsieh, Wang, Joshi, Gibbons 2023): models are made where clients drift, and merged."""

from functools import partial
from typing import Annotated, Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from jfcl import mapping
from jfcl.core.checks import INT32_MAX, check
from jfcl.core.clients import Cohort, client_ids, client_keys, drifts, mask, num_clients
from jfcl.core.options import Interval, OneOf, Range, Real, Search
from jfcl.core.parameters import num_bytes
from jfcl.core.platforms import at_most
from jfcl.core.types import Algorithm, Batch, Clients, Entries, PyTree, Served, Task
from jfcl.kernels import cut, linkage_tree
from jfcl.kernels.base import if_rare
from jfcl.mapping.columns import on_every_device
from jfcl.methods import averaging as inner
from jfcl.methods import round as phases
from jfcl.methods.averaging import Averaging, AveragingState, Report, checked, state_of
from jfcl.methods.options import AVERAGING, Options, factory
from jfcl.robust.aggregate import cluster_mean, where_rows
from jfcl.training import local
from jfcl.training.losses import fill_padding, indexable

COMPARE, START = ("accuracy", "loss"), ("one", "each")
STEP = "step"  # the leaf of the examples that has their time steps
OWNED = "owned"  # another one, in training: which of them are of the model
MODELS = 32  # default of `max_models`
ROUNDING = 1e-6  # of a difference of accuracies: 45 right of 50 less 43 is not more than 0.04
EVENTS = ("drifted", "merged", "capacity_reached")


class Cells(NamedTuple):
    """The models of all cells; a cell is the examples of one client and one time step.

    Attributes:
      step: `[N, M]` int32, the time steps of the examples in the last round; -1 for padding.
      model: `[N, M]` int32, the model of their cells; -1 for padding.
      score: `[N]`, of the best model on a client's newest cell, before training on it: the accuracy, or minus the loss.
      newest: `[]` int32, the time step; -1 before the first round.
      active: `[K]` bool, the models that exist.
      taken: `[]` int32, how many models were made so far. They take the rows in turn.
    """

    step: jax.Array
    model: jax.Array
    score: jax.Array
    newest: jax.Array
    active: jax.Array
    taken: jax.Array


@factory(*AVERAGING)
def feddrift(
    task: Task,
    training: local.LocalTraining,
    *,
    drift_threshold: Annotated[Real, Interval("[0, inf]"), Search(0.01, 0.3)] = 0.04,
    merge_threshold: Annotated[Real | None, Interval("[0, inf]")] = None,
    max_models: Annotated[int | None, Range(1, 10**6)] = None,
    eager: bool = False,
    compare: Annotated[str, OneOf(COMPARE)] = "accuracy",
    start: Annotated[str, OneOf(START)] = "one",
    **options: Unpack[Options],
) -> Algorithm:
    """Gives clients that drift models of their own, and merges models that fit each other's data.

    The clients' data come in time steps. When a new step begins, each client takes the best of all models for its new
    examples. If even that one is worse on them than the client's model was on the step before, the client has drifted,
    and gets a new model. Then the models from before this step are merged, where they are as good on each other's data
    as on their own. In every round of the step, a client trains each model that is in use on those of its cells (the
    examples of one step) that belong to this model, and FedAvg averages each model.

    Args:
      task: as in `jfcl.fedavg`.
      training: as in `jfcl.fedavg`. With `keep="everything"` a client keeps the optimiser's state of each model to the
        end of the step, as in the authors' code; memory `O(N K D)`.
      drift_threshold: `δ`: a client has drifted if its accuracy falls by more than that. The authors' 0.04 for SEA, 0.2
        for SINE, 0.1 for CIRCLE and MNIST. Infinite: never, which with `start="one"` is FedAvg on all data so far.
      merge_threshold: `δ'`: the models of a cluster lose at most this accuracy on each other's data; default: `δ`.
      max_models: models at a time; default: 32, with `start="each"` 32 more than clients. A client that drifts while
        all are in use stays with the best of them, and is counted in `capacity_reached`.
      eager: all clients that drift at a step share one new model, and none are merged (FedDrift-Eager).
      compare: how models are compared: by `"accuracy"`, or by `"loss"`; thresholds are then differences of losses.
      start: `"one"` model for all clients in the first step, or one for `"each"`.
      cohort: clients that train in a round. When a step begins, all clients are asked.
      init_params: one model; with `start="each"` also one for each client, stacked.

    Returns:
      `Algorithm` with an `AveragingState`, whose `memory` has the cells, and the further metrics `models`, `drifted`
      (clients), `merged` (models that others have taken in) and `capacity_reached`; records have the sums of the last
      three. `nonfinite` counts clients without a finite update of any model. A client that was not in training is
      served the model of lowest loss. The number of steps need not be known: a step begins when clients have examples
      of a later one. Cost of a round: a local training for each client of the cohort and model in use that has cells
      of it; on an accelerator, with `jax.vmap`, for each client and model in use. Cost of a new step: a forward pass
      over all examples for each model. Memory: `O(K D + N M)`. Bytes: a model down and up for each of these
      trainings; at a new step `K` models down to each client, and `K + K²` numbers up.

    Raises:
      ValueError: `compare="accuracy"` for a task without one; `max_models` below the number of clients with
        `start="each"`; as in `jfcl.fedavg`. `check` refuses examples without `"step"`, `[N, M]` integers in rising
        order.

    Source: Federated Learning under Distributed Concept Drift (2023), Algorithms 2 and 3 (Eager). As in the authors'
    code, a new model is a copy of the best one, and models are merged up to a distance of `δ'`, in the paper below
    it; a merged model is the mean by numbers of cells; and the accuracy of the first step is that of the untrained
    model, so that a client drifts at the second step only where its best model is worse than that one. The code
    compares models on a sample of 21 batches of their cells, here all are used. It forgets the model that was not
    used for longest if all are in use, here none is forgotten. With a model for each client at the start, its first new
    one takes the place of the second client's.

    Example:
      >>> import jax, jfcl, numpy as np, optax
      >>> task = jfcl.models.task(lambda _: {"b": jax.numpy.zeros(())}, lambda p, x: x + p["b"], kind="regression")
      >>> training = jfcl.local_training(optax.sgd(0.5), num_steps=1)
      >>> algorithm = jfcl.feddrift(task, training, drift_threshold=1.0, compare="loss")
      >>> y = np.float32([[1, 1, 5, 5], [1, 1, 1, 1], [1, 1, 5, 5]])  # two steps: two of the clients drift
      >>> step, size = np.tile(np.int32([0, 0, 1, 1]), (3, 1)), np.full(3, 2, np.int32)
      >>> clients = jfcl.Clients({"x": 0 * y, "y": y, "step": step}, size)
      >>> state = algorithm.init(jax.random.key(0), clients)
      >>> for now in (clients, clients._replace(size=2 * size)):
      ...     state, metrics = algorithm.step(jax.random.key(1), state, now)
      >>> state.params["b"][state.cluster].tolist(), int(metrics["drifted"])
      ([5.0, 1.0, 5.0], 2)
    """
    accepted = "loss for a task without an accuracy"
    check(compare == "loss" or task.correct is not None, "compare", compare, accepted)
    rules = checked(Averaging(task, training, 1, train=train_owned, learn=_with_finite, **options))
    rounding = ROUNDING if compare == "accuracy" else 0.0
    limits = drift_threshold, drift_threshold if merge_threshold is None else merge_threshold
    limits = tuple(limit + rounding for limit in limits)
    begin = partial(_begin, rules, limits, compare, eager, start == "each" and max_models is None)

    def init(key: jax.Array, clients: Clients) -> AveragingState:
        n, size = num_clients(clients), jnp.asarray(clients.size)
        num_first, more = (1, MODELS) if start == "one" else (n, n + MODELS)
        k = more if max_models is None else max_models
        check(k >= num_first, "max_models", k, f"at least {n}, the number of clients, with start='each'")
        begin_at = rules.init_params
        if start == "each" and begin_at is None:  # by the clients' ids
            begin_at = mapping.chunked(1)(task.init)(client_keys(key, clients))
        first = phases.initial_models(task, key, num_first, begin_at)
        rows = jnp.arange(k, dtype=jnp.int32)
        active = rows < 1 if start == "one" else jnp.zeros(k, bool).at[:n].set(size > 0)
        params = jax.tree.map(lambda p: p[jnp.where(active, rows, 0)], first)
        none = jnp.full_like(steps_of(clients), -1)
        scores, taken = jnp.full(n, -jnp.inf, jnp.float32), active.sum().astype(jnp.int32)
        cells = Cells(none, none, scores, none[0, 0], active, taken)
        cluster = jnp.zeros(n, jnp.int32) if start == "one" else rows[:n]
        state = state_of(rules, clients, cluster, params, (), cells)
        return state._replace(client=optimizers(rules, params, n))

    def step(key: jax.Array, state: AveragingState, clients: Clients):
        step, size = steps_of(clients), jnp.asarray(clients.size)
        is_new = (step != state.memory.step) & (size > 0)[:, None]  # a checkpoint has no cells of padding clients
        begins, none = is_new.any(), dict.fromkeys(EVENTS, jnp.zeros((), jnp.int32))
        num_models = state.memory.active.sum().astype(jnp.float32)
        state, events = if_rare(begins, lambda: begin(state, clients, step), lambda: (state, none))
        state, metrics = _train(rules._replace(cohort=None), options["cohort"], key, state, clients)
        model = num_bytes(jax.tree.map(lambda p: p[0], state.params))
        asked = (size > 0).sum().astype(jnp.float32) * begins.astype(jnp.float32) * num_models
        metrics["bytes_down"] = metrics["bytes_down"] + asked * model
        metrics["bytes_up"] = metrics["bytes_up"] + asked * 4 * (1 if eager else 1 + num_models)
        return state, metrics | events | {"models": state.memory.active.sum().astype(jnp.int32)}

    def serve(state: AveragingState, clients: Clients | None) -> Served:
        return Served(state.params, state.cluster, active=state.memory.active)

    entries = Entries(sums=EVENTS, notes=_notes)
    return Algorithm(init, step, task, check_steps, serve=serve, entries=entries)


def check_steps(clients: Clients) -> None:
    """Raises `ValueError` unless the examples have their time steps."""
    examples = clients.examples
    names = sorted(examples) if isinstance(examples, dict) else type(examples).__name__
    accepted = f"a dict with {STEP!r}, the time step of each example (drifting data: --drift, or drift= of build)"
    check(isinstance(examples, dict) and STEP in examples, "clients.examples", names, accepted)
    check(OWNED not in examples, "clients.examples", names, f"a dict of arrays, none of them named {OWNED!r}")
    step, real = np.asarray(examples[STEP]), np.asarray(mask(clients))
    fits = step.shape == real.shape and step.dtype.kind in "iu"
    check(fits, f"clients.examples[{STEP!r}]", f"{step.dtype} {list(step.shape)}", f"integers {list(real.shape)}")
    rises = (step >= 0).all(where=real) and (np.diff(step.astype(int), axis=1) >= 0).all(where=real[:, 1:])
    check(rises, f"clients.examples[{STEP!r}]", step, "0 or more, and never fall from a client's example to the next")


def steps_of(clients: Clients) -> jax.Array:
    """Returns the time steps `[N, M]` int32 of the examples, -1 for padding; data without steps are of one step."""
    steps = jnp.asarray(clients.examples[STEP]) if drifts(clients) else 0
    return jnp.where(mask(clients), steps, -1).astype(jnp.int32)


def optimizers(rules: Averaging, params: PyTree, count: int) -> PyTree:
    """Returns the optimiser states `[count, K, ...]` of clients at the beginning of a step; `()` if they keep none."""
    first = phases.initial_optimizers(rules.task, rules.training, params, None)
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), first)


def _notes(record: dict[str, Any], is_last: bool) -> dict[str, str]:
    """Returns the warning of a record in which a client drifted and no model was free."""
    full = bool(record.get("capacity_reached")) and not is_last
    return {"capacity": "a client has drifted while max_models were in use, and keeps the best of them"} if full else {}


def _look(task: Task, compare: str, models: PyTree, active: jax.Array, examples: Batch, size, step, *last):
    """Computes one client's part of the beginning of a step.

    Args:
      step: `[M]`, of its examples.
      last: `(step, model)` `[M]` of the examples in the last round.

    Returns:
      `(sums [K, K + 2], (model [M], new [M] bool, of_new [K + 2]))`: sums over its earlier examples by their model, and
      over those of new steps, of their scores under each model, of 1, and of 1 for the first of each cell.
    """
    k, m, real = len(active), len(step), step >= 0
    place = jnp.minimum(jnp.searchsorted(jnp.where(last[0] < 0, INT32_MAX, last[0]), step), m - 1)
    seen = real & (last[0][place] == step)
    model, new = jnp.where(seen, last[1][place], -1), real & ~seen
    begins = real & (step != jnp.concatenate([jnp.full(1, -1), step[:-1]]))
    examples, models = fill_padding(examples, size), indexable(models)

    def score(j, scores):
        params = jax.tree.map(lambda p: p[order[j]], models)
        values = task.scores(task.correct, params, examples) if compare == "accuracy" else -task.loss(params, examples)
        return scores.at[order[j]].set(jnp.where(jnp.isfinite(values), values, -jnp.inf).astype(jnp.float32))

    order = jnp.argsort(~active, stable=True)
    with at_most(k):
        scores = jax.lax.fori_loop(0, active.sum(), score, jnp.zeros((k, m), jnp.float32))
    values = jnp.concatenate([scores, jnp.stack([real, begins]).astype(jnp.float32)]).T
    sums = jax.ops.segment_sum(values, jnp.where(real, jnp.where(new, k, model), k + 1), k + 2)
    return sums[:k], (model, new, sums[k])


def _begin(rules: Averaging, limits, compare, eager, grows, state: AveragingState, clients: Clients, step):
    """Returns `(state, events)` at the beginning of a time step: which clients have drifted, and which models merge.

    `grows`: the number of rows grows with that of clients; those for padding clients are not used.
    """
    cells, k = state.memory, len(state.memory.active)
    look = partial(_look, rules.task, compare, state.params, cells.active)
    add = lambda total, sent: total + sent.sum(axis=0)  # noqa: E731
    data = clients.examples, jnp.asarray(clients.size), step, cells.step, cells.model
    look_all = mapping.map_reduce(rules.client_axis, look, add, jnp.zeros((k, k + 2), jnp.float32))
    sums, (model, new, of_new) = look_all(*data)
    of_clients = of_new, state.cluster, cells.score, client_ids(clients)
    of_new, cluster, last, ids = on_every_device(rules.client_axis, of_clients)

    # Find each client's best model for its new examples, and the clients that have drifted.
    count, first, newest = of_new[:, k], cells.newest < 0, jnp.maximum(step.max(), cells.newest)
    has, scores = count > 0, of_new[:, :k] / jnp.maximum(count, 1)[:, None]
    ranked = jnp.where(cells.active[None, :], jnp.maximum(scores, jnp.finfo(scores.dtype).min), -jnp.inf)
    chosen = jnp.where(first, cluster, jnp.argmax(ranked, axis=1)).astype(jnp.int32)
    score = jnp.take_along_axis(scores, chosen[:, None], axis=1)[:, 0]
    drifted = has & (last - score > limits[0])

    # Give drifted clients free rows, in turn and by their ids; a new model is a copy of the best one.
    rows = jnp.arange(k, dtype=jnp.int32)
    count_rows = k - (jnp.asarray(clients.size) == 0).sum(dtype=jnp.int32) if grows else k
    turn = jnp.where(rows < count_rows, (cells.taken + rows) % count_rows, rows)
    used = cells.active | (rows >= count_rows)
    free = turn[jnp.argsort(used[turn], stable=True)]
    by_id = jnp.argsort(ids)
    count_before = jnp.cumsum(drifted[by_id]).astype(jnp.int32) - 1
    rank = jnp.zeros_like(chosen) if eager else jnp.zeros_like(chosen).at[by_id].set(count_before)
    fits = drifted & (rank < (~used).sum())
    target = jnp.where(fits, free[jnp.minimum(rank, k - 1)], chosen)
    place, copied = jnp.where(fits, target, k), chosen[by_id[jnp.argmax(drifted[by_id])]] if eager else chosen
    created = jnp.zeros(k, bool).at[place].set(True, mode="drop")
    moves = rows.at[place].set(copied, mode="drop")
    params, server = jax.tree.map(lambda x: x[moves], (state.params, state.server))

    # Merge the models from before this step.
    root = rows
    if not eager:
        sums = sums + jax.ops.segment_sum(of_new, jnp.where(has, target, k), k + 1)[:k]
        compared = cells.active & (sums[:, k] > 0) & ~first & (newest > cells.newest)
        root, params = _merged(params, sums, compared, limits[1])
    active = (cells.active | created) & (root == rows)
    events = drifted.sum(), (cells.active & (root != rows)).sum(), (drifted & ~fits).sum()
    model = jnp.where(new, target[:, None], model)
    model = jnp.where(model < 0, model, root[jnp.maximum(model, 0)])
    taken = cells.taken + created.sum().astype(jnp.int32)
    cells = Cells(step, model, jnp.where(has, score, last), newest, active, taken)
    cluster = root[jnp.where(has, target, cluster)]
    opt_states = optimizers(rules, params, len(cluster))
    state = state._replace(params=params, server=server, client=opt_states, cluster=cluster, memory=cells)
    return state, {name: value.astype(jnp.int32) for name, value in zip(EVENTS, events, strict=True)}


def _merged(params: PyTree, sums: jax.Array, compared: jax.Array, threshold) -> tuple[jax.Array, PyTree]:
    """Merges the models `[K, ...]` that are `compared` `[K]` bool by complete linkage.

    `sums` `[K, K + 2]` are those of `_look`, over the examples of each model. Returns `(root [K], params)`: the model
    that each one is part of, the first of its cluster, and the models after it.
    """
    k, cells = len(compared), sums[:, -1]
    means = sums[:, :k] / jnp.maximum(sums[:, k], 1)[:, None]
    lost = jnp.diagonal(means)[None, :] - means  # of model a (column) on the examples of b (row)
    distances = jnp.maximum(jnp.maximum(lost, lost.T), 0.0)
    label = cut(linkage_tree(distances, "complete", mask=compared), threshold=threshold)
    same = (label[:, None] == label[None, :]) & compared[:, None] & compared[None, :] | jnp.eye(k, dtype=bool)
    root = jnp.argmax(same, axis=1).astype(jnp.int32)
    means = cluster_mean(params, root, jnp.where(compared, cells, 0.0), k)
    return root, where_rows((same.sum(axis=1) > 1) & (root == jnp.arange(k)), means, params)


def _train(rules: Averaging, count: int | None, key: jax.Array, state: AveragingState, clients: Clients):
    """Returns `(state, metrics)` after a round of FedAvg of each model in use, with a cohort of `count` clients."""
    cohort = phases.select_cohort(key, clients, count)
    some, active = cohort.clients, state.memory.active
    model, cluster, opt_states = phases.take_rows(cohort, (state.memory.model, state.cluster, state.client))
    n, c = num_clients(clients), num_clients(some)
    used = phases.rows_in_use(state.cluster, jnp.asarray(clients.size) > 0, len(active))
    order, none = jnp.argsort(~used, stable=True), jnp.zeros(c, jnp.int32)

    def train_model(j, carry):
        models, opt_states, loss, silent, totals = carry
        row, owned = order[j], (model == order[j]) & mask(some)
        data = some._replace(examples={**some.examples, OWNED: owned}, size=owned.sum(axis=1, dtype=jnp.int32))
        params, server = jax.tree.map(lambda x: x[row][None], models)
        single = AveragingState(params, none, none, state.round, server, jax.tree.map(lambda x: x[:, row], opt_states))
        new, metrics = inner.step(rules, key, single, data)
        models = jax.tree.map(lambda x, y: x.at[row].set(y[0]), models, (new.params, new.server))
        opt_states = jax.tree.map(lambda x, y: x.at[:, row].set(y), opt_states, new.client)
        loss = jnp.where(cluster == row, metrics["loss"], loss)
        silent &= ~(metrics["finite"] & (data.size > 0))
        return models, opt_states, loss, silent, {name: total + metrics[name] for name, total in totals.items()}

    real, totals = jnp.asarray(some.size) > 0, dict.fromkeys(("bytes_up", "bytes_down", "client_steps"), jnp.zeros(()))
    carry = (state.params, state.server), opt_states, jnp.full(c, jnp.nan), real, totals
    with at_most(len(active)):
        (params, server), opt_states, loss, silent, metrics = jax.lax.fori_loop(0, used.sum(), train_model, carry)
    counts = {"participants": real, "nonfinite": silent}
    metrics |= {name: which.sum().astype(jnp.int32) for name, which in counts.items()}
    metrics |= {"loss": phases.loss_of_all(cohort, loss, n)}
    opt_states = phases.put_rows(cohort, state.client, opt_states)
    return state._replace(params=params, server=server, client=opt_states, round=state.round + 1), metrics


def _with_finite(state: AveragingState, metrics, cohort: Cohort, report: Report, clients: Clients):
    """Adds the metric `finite` `[C]` bool, of the clients' updates of one model: `Averaging.learn`."""
    return state, metrics | {"finite": report.finite}


def train_owned(rules: Averaging, key, params, personal, examples, size, *args, **more):
    """Trains a model on those examples of one client that are `OWNED`: a form of `round.train_scopes`."""
    order = jnp.argsort(~examples[OWNED], stable=True)
    examples = {name: x[order] for name, x in examples.items() if name != OWNED}

    def train():
        return phases.train_scopes(rules, key, params, personal, examples, size, *args, **more)

    shapes = jax.eval_shape(train)
    return jax.lax.cond(size > 0, train, lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))
