"""The phases of a communication round: select a cohort, train it, aggregate, update the server's models, report.

Methods differ in the model that a client starts from and in the aggregation; the phases are the same functions.
"""

import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jfcl import mapping
from jfcl.core.checks import check, check_choice, check_finite, is_concrete, require
from jfcl.core.clients import Cohort, client_ids, client_keys, random_order, server_key, take_clients
from jfcl.core.parameters import check_part, divided, joined, parameter_names, part_like, trained_part, with_fixed
from jfcl.core.types import Clients, PyTree, Task
from jfcl.kernels.base import if_rare
from jfcl.mapping.memory import in_lots
from jfcl.robust.aggregate import add_sent, nothing_sent, where_rows
from jfcl.training import local
from jfcl.training.optimizer import as_data, optimizer_step, rekeyed

WEIGHTS = ("size", "equal")
PERSONAL_STREAM = zlib.crc32(b"personal parameters")  # folded into a client's key


def check_scopes(rules: Any) -> None:
    """Checks the choice of shared and personal parameters.

    Raises:
      ValueError: a predicate that holds for no parameter, `personal` for all; a parameter that is both;
        `personal_steps` without personal parameters, or with `keep="everything"`.
    """
    task, shared, personal = rules.task, rules.shared, rules.personal
    check_part("personal", personal, task)
    check_part("shared", shared, task, whole=True)
    if shared is not None and personal is not None:
        names = parameter_names(jax.eval_shape(task.init, jax.random.key(0)))
        both = [name for name in names if personal(name) and shared(name)]
        require(not both, f"parameters are shared or personal, not both: {', '.join(both)}")
    if rules.personal_steps is not None:
        check(personal is not None, "personal_steps", rules.personal_steps, "left out without personal")
        keep = rules.training.keep
        check(keep != "everything", "training.keep", keep, "nothing or schedule, with personal_steps")


# Initial state.


def initial_models(task: Task, key: jax.Array, count: int, init_params: PyTree | None) -> PyTree:
    """Returns `count` initial models, stacked: random ones, or `init_params`, which are one model or `count` stacked.

    Raises:
      ValueError: `init_params` of another structure or shape, or not finite.
    """
    # One model after the other: XLA's CPU backend does not finish the vmapped orthogonal initialisers of flax's LSTM.
    fresh = mapping.chunked(1)(task.init)(jax.random.split(key, count))
    if init_params is None:
        return fresh
    check_finite(init_params, "init_params")
    init_params = jax.tree.map(jnp.asarray, init_params)
    if jax.tree.structure(init_params) != jax.tree.structure(fresh):
        raise ValueError("init_params must have the structure of the task's parameters")

    def fit(path, array, drawn):
        if array.shape == drawn.shape:
            return array.astype(drawn.dtype)
        if array.shape == drawn.shape[1:]:
            return jnp.broadcast_to(array, drawn.shape).astype(drawn.dtype)
        name = jax.tree_util.keystr(path)
        raise ValueError(f"init_params{name} must have shape {drawn.shape} or {drawn.shape[1:]}, got {array.shape}")

    return jax.tree_util.tree_map_with_path(fit, init_params, fresh)


def initial_optimizers(task: Task, training: local.LocalTraining, params: PyTree, cluster: jax.Array | None) -> PyTree:
    """Returns the optimiser state of each client, `[N, ...]`, under `keep="everything"`, else `()`.

    Some optimisers, such as schedule-free ones, keep parameters in their state: those of the first model of the client,
    row `cluster[i]` of `params`; without clusters, row `i`.
    """
    if training.keep != "everything":
        return ()
    of_models = as_data(jax.vmap(training.optimizer.init)(trained_part(task, params)))
    return of_models if cluster is None else jax.tree.map(lambda x: x[cluster], of_models)


def initial_scopes(keeps: Callable[[str], bool] | None, params: PyTree, cluster: jax.Array) -> tuple[PyTree, PyTree]:
    """Returns the models `[K, ...]` without personal parameters, and each client's: those of its first model.

    `keeps` takes a parameter's path, and is true for those that clients keep. Both parts have one structure; the second
    is `()` where there are none.
    """
    params, personal = divided(keeps, params)
    return params, jax.tree.map(lambda p: p[cluster], personal)


def personal_of_newcomers(personal: PyTree, counts: jax.Array, num_newcomers: int) -> PyTree:
    """Returns the mean of the personal parameters `[N, ...]` of clients that count (`[N]` bool), for each newcomer."""
    kept = where_rows(counts, personal, jax.tree.map(jnp.zeros_like, personal))
    means = jax.tree.map(lambda x: x.sum(axis=0) / jnp.maximum(counts.sum(), 1).astype(x.dtype), kept)
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (num_newcomers, *x.shape)), means)


def fit_to_models(rules: Any, fit: Callable[..., jax.Array], models: PyTree, clients: Clients) -> jax.Array:
    """Returns `fit(task, models [K, ...], examples, size)` of each client; `rules` have the task and client axis."""
    axis = in_lots(rules.client_axis, rules.task, clients, len(jax.tree.leaves(models)[0]))
    of_each = axis(partial(fit, rules.task), in_axes=(None, 0, 0))
    return of_each(models, clients.examples, jnp.asarray(clients.size))


def known_or_fitted(new: jax.Array, fit: Callable[[], PyTree], known: PyTree) -> PyTree:
    """Returns `known` `[N, ...]`, with the rows of `fit()` for `new` clients `[N]` bool, computed if there are any."""
    return if_rare(new.any(), lambda: where_rows(new, fit(), known), lambda: known)


# Phase 1: the cohort.


def select_cohort(key: jax.Array, clients: Clients, count: int | None = None) -> Cohort:
    """Draws the cohort of a round: `count` clients with examples, without replacement; None: all clients.

    A client draws by its id, so that two methods with the same key have the same cohort, batches and noise.
    """
    cohort_key, clients_key = jax.random.split(key)
    if count is None:
        return Cohort(clients, None, clients_key)
    rows = random_order(cohort_key, clients)[:count]
    return Cohort(take_clients(clients, rows), rows, clients_key)


def take_rows(cohort: Cohort, arrays: PyTree) -> PyTree:
    """Returns the cohort's rows `[C, ...]` of `arrays` `[N, ...]`."""
    return arrays if cohort.rows is None else jax.tree.map(lambda x: x[cohort.rows], arrays)


def put_rows(cohort: Cohort, arrays: PyTree, new: PyTree) -> PyTree:
    """Returns `arrays` `[N, ...]` with the cohort's rows replaced by `new` `[C, ...]`."""
    return new if cohort.rows is None else jax.tree.map(lambda old, x: old.at[cohort.rows].set(x), arrays, new)


# Phase 2: training.


def rows_in_use(row: jax.Array, real: jax.Array, count: int) -> jax.Array:
    """Returns `[count]` bool: the models that clients have in `row` `[N]`, of the clients that are `real` `[N]`."""
    return jnp.zeros(count, bool).at[jnp.where(real, row, count)].set(True, mode="drop")


def train_clients(
    client_axis: mapping.Mapping, client: Callable[..., Any], cohort: Cohort, *rows: PyTree, sum_into: PyTree = None
) -> Any:
    """Trains the clients of the cohort.

    `client` is one client's part of the round, `(key, examples, size, *rows)`, with rows of pytrees `[C, ...]`.

    Returns:
      The stacked results of `client`. With `sum_into`, models `[K, ...]`, `client` returns `((update, cluster, weight),
      report)`, and the result is `((sums [K, ...], weight [K]), report)`: the weighted updates are added up as they
      are computed, in memory `O(chunk D + K D)` instead of `O(C D)`.
    """
    clients = cohort.clients
    arguments = (client_keys(cohort.key, clients), clients.examples, jnp.asarray(clients.size), *rows)
    if sum_into is None:
        return client_axis(client)(*arguments)
    return mapping.map_reduce(client_axis, client, add_sent, nothing_sent(sum_into))(*arguments)


def train_scopes(
    rules: Any, key: jax.Array, params: PyTree, personal: PyTree, *data: Any, products: jax.Array | None = None
) -> tuple[local.Trained, PyTree, PyTree]:
    """Trains one client's model: the parameters of its cluster and its personal ones.

    Args:
      rules: `jfcl.methods.averaging.Averaging`, with `task`, `training` and `anchor` of `local.train`. With
        `personal_steps` the client first trains its personal parameters for so many steps, and then the others with
        these fixed; None: all at once. A learning-rate schedule begins in each round at the step of the second part.
      key: as in `local.train`.
      params: the parameters of its cluster.
      personal: its personal ones; `()` if there are none.
      data, products: `examples`, `size`, `opt_state`, `rounds` and `products` of `local.train`.

    Returns:
      `(trained, update, personal)`: the update of `params`, and the new personal parameters. With `personal_steps` the
      loss is that of the second part, and the steps are those of both.
    """
    task, training, anchor = rules.task, rules.training, rules.anchor
    if rules.personal_steps is None:
        whole = joined(params, personal)
        anchor = None if anchor is None else joined(anchor, personal)
        trained = local.train(task, training, key, whole, *data, products=products, anchor=anchor)
        update = jax.tree.map(jnp.subtract, part_like(params, trained.params), params)
        return trained, update, part_like(personal, trained.params)
    of_personal, alone = with_fixed(task, params), training._replace(num_steps=rules.personal_steps, num_epochs=None)
    examples, size, _, rounds = data
    max_size = jax.tree.leaves(examples)[0].shape[0]
    start = local.optimizer_at(training, trained_part(task, personal), (), rounds, size, max_size)
    first = local.train(of_personal, alone, jax.random.fold_in(key, PERSONAL_STREAM), personal, examples, size, start)
    trained = local.train(with_fixed(task, first.params), training, key, params, *data, anchor=anchor)
    update = jax.tree.map(jnp.subtract, trained.params, params)
    return trained._replace(num_steps=first.num_steps + trained.num_steps), update, first.params


# Phase 3: aggregation.


def check_weights(weights: Any) -> None:
    """Raises `ValueError` unless `weights` is a name in `WEIGHTS`, or a vector of weights that are not all 0."""
    if isinstance(weights, str) or not hasattr(weights, "dtype"):
        check_choice("weights", weights, WEIGHTS)
    elif is_concrete(weights):
        values = np.asarray(weights)
        numbers = values.ndim == 1 and values.dtype.kind in "biuf" and values.size > 0
        accepted = f"one of {', '.join(WEIGHTS)}, or a vector of finite numbers, at least 0 and not all 0"
        fits = numbers and np.isfinite(values).all() and values.min() >= 0 and values.max() > 0
        check(fits, "weights", values if numbers else f"{values.dtype} {values.shape}", accepted)


def weights_of(weights: str | jax.Array, clients: Clients) -> jax.Array:
    """Returns the clients' weights `[N]` in a mean: sizes, 1 for `"equal"`, or those by id; 0 without examples."""
    size = jnp.asarray(clients.size)
    if isinstance(weights, str):
        return (size if weights == "size" else jnp.minimum(size, 1)).astype(jnp.float32)
    return jnp.where(size > 0, jnp.asarray(weights).astype(jnp.float32)[client_ids(clients)], 0.0)


# Phase 4: the server's models.


def server_update(
    rules: Any, cohort: Cohort, state: Any, mean: PyTree, changed: PyTree, loss: jax.Array | None
) -> tuple[PyTree, PyTree]:
    """Moves the server's models along the mean updates, by one step of the server's optimiser.

    The statistics of the task take the mean itself.

    Args:
      rules: of which the task and the server's optimiser are used.
      cohort: of the round; random keys in the optimiser's state are derived from its key.
      state: with the models `params` and their optimiser states `server`, `[K, ...]` each.
      mean: the mean updates, a pytree of `[K, ...]`; the optimiser gets their negatives as gradients.
      changed: a pytree of `[K]` bool; the other models stay as they are.
      loss: `[K]`, of the models' clients, for optimisers that take it; None: not known.

    Returns:
      `(params, server)`; the caller keeps the old `server` of models without an update.
    """
    task, optimizer = rules.task, rules.server
    weights, statistics = divided(task.statistics, state.params)
    mean, of_statistics = divided(task.statistics, mean)
    direction = jax.tree.map(jnp.negative, mean)
    opt_state, like = state.server, jax.eval_shape(optimizer.init, jax.tree.map(lambda p: p[0], weights))
    if jax.tree.leaves(like):
        keys = jax.random.split(server_key(cohort.key), len(jax.tree.leaves(weights)[0]))
        opt_state = jax.vmap(partial(rekeyed, like=like))(keys, opt_state)
    updates, opt_state = jax.vmap(partial(optimizer_step, optimizer))(direction, opt_state, weights, loss)
    new = joined(optax.apply_updates(weights, updates), jax.tree.map(jnp.add, statistics, of_statistics))
    return jax.tree.map(where_rows, changed, new, state.params), as_data(opt_state)


# Phase 5: metrics.


def round_metrics(present, loss, usable, steps, bytes_up, bytes_down) -> dict[str, jax.Array]:
    """Returns the metrics that all methods have.

    All arguments are `[C]`; steps and bytes may be one number for all clients. Clients that are `present` took part,
    and those that are `usable` sent a finite update. The metric `loss` `[C]` is NaN for absent clients, and infinity
    where the loss of a client that took part is NaN.
    """

    def total(values):
        return (present.astype(jnp.float32) * jnp.asarray(values, jnp.float32)).sum()

    return {
        "loss": jnp.where(present, jnp.where(jnp.isnan(loss), jnp.inf, loss), jnp.nan),
        "bytes_up": total(bytes_up),
        "bytes_down": total(bytes_down),
        "client_steps": total(steps),
        "participants": present.sum().astype(jnp.int32),
        "nonfinite": (present & ~usable).sum().astype(jnp.int32),
    }


def loss_of_all(cohort: Cohort, loss: jax.Array, count: int) -> jax.Array:
    """Returns the cohort's `loss` `[C]` as that of all `count` clients `[N]`, NaN for clients outside the cohort."""
    return loss if cohort.rows is None else jnp.full(count, jnp.nan).at[cohort.rows].set(loss)
