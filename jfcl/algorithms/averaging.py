"""The round that FedAvg, the oracle and IFCA share: choose a model, train it locally, average per cluster.

A method is this round with its own way of choosing. The server only ever needs sums over each cluster's clients, so a
round takes `O(chunk * D + K * D)` memory, however many clients there are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jfcl.algorithms.aggregate import (
    add_sent,
    adversary_check,
    attacked,
    divide_rows,
    nothing_sent,
    robust_cluster_mean,
    where_rows,
)
from jfcl.client import local, noise
from jfcl.core import (
    Adversary,
    Algorithm,
    Batch,
    Clients,
    PyTree,
    Task,
    attack_key,
    check,
    check_choice,
    check_count,
    check_finite,
    client_ids,
    client_keys,
    is_finite,
    max_examples,
    num_bytes,
    num_clients,
    path_name,
    random_order,
    server_key,
    take_clients,
)
from jfcl.execution import mapping

WEIGHTS = ("size", "equal")
DIVIDE_BY = ("cluster", "participants", "all")

# (params [K, ...]) -> what each client of the round does, which is
# (the key of its training, its examples and size, its last cluster, rounds without a change of any client's cluster)
# -> (its cluster, whether it had to be sent all models to find it, the products of `local.train` if it knows them)
Choice = Callable[[jax.Array, Batch, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array | None]]
Choose = Callable[[PyTree], Choice]


class AveragingState(NamedTuple):
    """The state of FedAvg, local training, the oracle and IFCA.

    Attributes:
      params: pytree of `[K, ...]`, the models.
      cluster: `[N]` int32, the model that each client was last served.
      unchanged: `[N]` int32, for how many of its rounds the client's cluster has not changed.
      round: `[]` int32, rounds done.
      server: the server optimiser's state for each model, `[K, ...]`.
      client: the local optimisers' states `[N, ...]` under `keep="everything"`, else `()`.
    """

    params: PyTree
    cluster: jax.Array
    unchanged: jax.Array
    round: jax.Array
    server: PyTree
    client: PyTree


def keep_cluster(params: PyTree) -> Choice:
    """The choice of methods whose clusters are given."""
    return lambda key, examples, size, cluster, quiet: (cluster, jnp.zeros((), bool), None)


def client_weight(weights: str, size: jax.Array) -> jax.Array:
    """What a client counts in a mean: its `size`, or 1 (`"equal"`); 0 in any case if it has no examples."""
    return (size if weights == "size" else jnp.minimum(size, 1)).astype(jnp.float32)


def initial_models(task: Task, key: jax.Array, count: int, init_params: PyTree | None) -> PyTree:
    """`count` models `[count, ...]`: drawn from the task, or `init_params` (one model, or `count` of them stacked)."""
    # One after the other: XLA's CPU backend never ends the vmapped orthogonal initialisers of flax's LSTM cells.
    fresh = mapping.chunked(1)(task.init)(jax.random.split(key, count))
    if init_params is None:
        return fresh
    check_finite(init_params, "init_params")
    init_params = jax.tree.map(jnp.asarray, init_params)
    if jax.tree.structure(init_params) != jax.tree.structure(fresh):
        raise ValueError("init_params must have the structure of the task's parameters")

    def fit(path, given, drawn):
        if given.shape == drawn.shape:
            return given.astype(drawn.dtype)
        if given.shape == drawn.shape[1:]:
            return jnp.broadcast_to(given, drawn.shape).astype(drawn.dtype)
        name = jax.tree_util.keystr(path)
        raise ValueError(f"init_params{name} must have shape {drawn.shape} or {drawn.shape[1:]}, got {given.shape}")

    return jax.tree_util.tree_map_with_path(fit, init_params, fresh)


def initial_optimizers(training: local.LocalTraining, params: PyTree, clients: Clients) -> PyTree:
    """Every client's optimiser state `[N, ...]` under `keep="everything"`, else `()`."""
    if training.keep != "everything":
        return ()
    one = noise.as_data(training.optimizer.init(jax.tree.map(lambda p: p[0], params)))
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (num_clients(clients), *jnp.shape(x))), one)


def server_noise(optimizer: optax.GradientTransformation, clients_key: jax.Array, params: PyTree, state: PyTree):
    """The server optimiser's `state` `[K, ...]` with random keys, where it has any, of each model and this round."""
    like = jax.eval_shape(optimizer.init, jax.tree.map(lambda p: p[0], params))
    if not noise.has_keys(like):
        return state
    keys = jax.random.split(server_key(clients_key), len(jax.tree.leaves(params)[0]))
    return jax.vmap(partial(noise.rekeyed, like=like))(keys, state)


def round_metrics(present, loss, usable, steps, bytes_up, bytes_down) -> dict[str, jax.Array]:
    """The metrics of every method, from those of its clients, `[N]` or one number for all; absent clients do not count.

    `loss` `[N]` (NaN for the absent alone: who computed one that is no number has infinity), and `[]`: `bytes_up`,
    `bytes_down`, `client_steps`, `participants`, `nonfinite`.
    """

    def total(values):
        return (present.astype(jnp.float32) * jnp.asarray(values).astype(jnp.float32)).sum()

    return {
        "loss": jnp.where(present, jnp.where(jnp.isnan(loss), jnp.inf, loss), jnp.nan),
        "bytes_up": total(bytes_up),
        "bytes_down": total(bytes_down),
        "client_steps": total(steps),
        "participants": present.sum().astype(jnp.int32),
        "nonfinite": (present & ~usable).sum().astype(jnp.int32),
    }


def averaging(
    task: Task,
    training: local.LocalTraining,
    *,
    num_clusters: int,
    start: Callable[[PyTree, Clients], jax.Array],
    choose: Choose = keep_cluster,
    weights: str = "size",
    divide_by: str = "cluster",
    shared: Callable[[str], bool] | None = None,
    server_optimizer: optax.GradientTransformation | None = None,
    cohort: int | None = None,
    init_params: PyTree | None = None,
    adversary: Adversary | None = None,
    aggregator: Callable[..., PyTree] | None = None,
    client_axis: mapping.Mapping | None = None,
) -> Algorithm:
    """Builds an `Algorithm` of that round. Users want `fedavg`, `oracle` or `ifca`; method authors want this.

    Args:
      task, training: the model and how a client trains it.
      num_clusters: `K`.
      start: `(params, clients) -> [N]` int32, the clusters before the first round.
      choose: how one client finds its cluster at the start of a round.
      weights: `"size"` or `"equal"`, what a client counts in its cluster's mean.
      divide_by: the clients whose weights divide the sum of a cluster's updates: "cluster", those in the sum;
        "participants", those in the sum of any cluster; "all", those with examples, in the cohort or not, also where
        their updates are not finite.
      shared: says of a parameter's path, such as `"Dense_0/kernel"`, whether it is averaged over all clients.
      server_optimizer: steps along the mean update, e.g. `optax.adam(1e-2)` for FedAdam; default: apply it as it is.
      cohort: how many clients, drawn anew each round, take part; default: all.
      init_params: warm start: one model, or `K` stacked.
      adversary: hostile clients, see `jfcl.attacks`.
      aggregator: `(updates [N, ...], mask=[N]) -> [...]`, a robust one from `jfcl.kernels` in place of the mean;
        clients then count alike. With it or an adversary a round keeps all updates: `O(N D)` memory.
      client_axis: a mapping of `jfcl.mapping`; default: `mapping.auto()`.

    Returns:
      An `Algorithm` whose metrics are `loss` `[N]`, `bytes_up`, `bytes_down`, `client_steps`, `participants` and
      `nonfinite` (clients left out of the mean since their update held NaN or infinity), all `[]`.
    """
    local.check_parts(task, training)
    check_count("num_clusters", num_clusters)
    check_choice("weights", weights, WEIGHTS)
    check_choice("divide_by", divide_by, DIVIDE_BY)
    if cohort is not None:
        check_count("cohort", cohort)
    check(
        shared is None or server_optimizer is None,
        "server_optimizer",
        server_optimizer,
        "left out where parameters are shared: its state would differ between the copies of a shared layer",
    )
    alone = aggregator is None or (shared is None and divide_by == "cluster")
    accepted = "left out where parameters are shared, or sums divided by more than the cluster's clients"
    check(alone, "aggregator", aggregator, accepted)
    server_optimizer = optax.sgd(1.0) if server_optimizer is None else server_optimizer
    client_axis = mapping.auto() if client_axis is None else client_axis

    def is_shared(path) -> bool:
        return shared is not None and bool(shared(path_name(path)))

    def init(key: jax.Array, clients: Clients) -> AveragingState:
        n = num_clients(clients)
        check(cohort is None or cohort <= n, "cohort", cohort, f"at most the {n} clients there are")
        params = initial_models(task, key, num_clusters, init_params)
        if shared is not None:  # all copies of a shared parameter start, and so stay, alike
            params = jax.tree_util.tree_map_with_path(
                lambda path, p: jnp.broadcast_to(p[:1], p.shape) if is_shared(path) else p, params
            )
        return AveragingState(
            params=params,
            cluster=start(params, clients).astype(jnp.int32),
            unchanged=jnp.zeros(n, jnp.int32),
            round=jnp.zeros((), jnp.int32),
            server=noise.as_data(jax.vmap(server_optimizer.init)(params)),
            client=initial_optimizers(training, params, clients),
        )

    def step(key: jax.Array, state: AveragingState, clients: Clients):
        n, m = num_clients(clients), max_examples(clients)
        cohort_key, clients_key = jax.random.split(key)
        rows = None if cohort is None else random_order(cohort_key, clients)[:cohort]
        present = clients if rows is None else take_clients(clients, rows)
        old = (state.cluster, state.unchanged, state.client)
        last, unchanged, client_states = old if rows is None else jax.tree.map(lambda x: x[rows], old)

        idle = jnp.full_like(state.unchanged, jnp.iinfo(jnp.int32).max)
        quiet = jnp.where(jnp.asarray(clients.size) > 0, state.unchanged, idle).min()

        choice = choose(state.params)  # here, since what all clients need of the models is computed once

        def client(key, examples, size, cluster, opt_state):
            chosen, looked, products = choice(key, examples, size, cluster, quiet)
            begin = jax.tree.map(lambda p: p[chosen], state.params)
            opt_state = local.optimizer_at(training, begin, opt_state, state.round, size, m)
            trained = local.train(task, training, key, begin, examples, size, opt_state, products=products)
            update = jax.tree.map(jnp.subtract, trained.params, begin)
            finite = is_finite(update)
            weight = client_weight(weights, size) * finite.astype(jnp.float32)
            opt_state = local.carried(training, trained.opt_state)
            return (update, chosen, weight), (chosen, looked, finite, trained.loss, trained.num_steps, opt_state)

        zero = nothing_sent(state.params)
        given = (client_keys(clients_key, present), present.examples, jnp.asarray(present.size), last, client_states)
        if adversary is None and aggregator is None:
            (sums, weight), kept = mapping.map_reduce(client_axis, client, add_sent, zero)(*given)
            chosen, looked, finite, loss, steps, opt_states = kept
            usable = finite
        else:
            (updates, _, counts), kept = client_axis(client)(*given)
            chosen, looked, finite, loss, steps, opt_states = kept
            sent = finite & (jnp.asarray(present.size) > 0)
            updates, usable = attacked(adversary, attack_key(clients_key), updates, client_ids(present), sent, chosen)
            counts = counts * usable.astype(jnp.float32)
            (sums, weight), _ = mapping.map_reduce(client_axis, lambda *sent: (sent, ()), add_sent, zero)(
                updates, chosen, counts
            )

        total = client_weight(weights, jnp.asarray(clients.size)) if divide_by == "all" else weight
        all_weight = jnp.broadcast_to(total.sum(), weight.shape)
        own_mean = divide_rows(sums, weight if divide_by == "cluster" else all_weight, state.params)
        if aggregator is not None:
            own_mean = robust_cluster_mean(aggregator, updates, chosen, counts > 0, num_clusters)
        used = jax.tree.map(lambda _: weight > 0, state.params)
        mean = own_mean
        if shared is not None:
            totals = jax.tree.map(lambda s: jnp.broadcast_to(s.sum(axis=0, keepdims=True), s.shape), sums)
            flags = jax.tree_util.tree_map_with_path(lambda path, _: is_shared(path), state.params)
            mean = jax.tree.map(
                lambda f, o, a: a if f else o, flags, own_mean, divide_rows(totals, all_weight, state.params)
            )
            used = jax.tree.map(lambda f, u: jnp.broadcast_to(u.any(), u.shape) if f else u, flags, used)
        direction = jax.tree.map(jnp.negative, mean)  # the server descends, as optax's optimisers do
        server = server_noise(server_optimizer, clients_key, state.params, state.server)
        updates, server = jax.vmap(server_optimizer.update)(direction, server, state.params)
        server = noise.as_data(server)
        params = jax.tree.map(
            lambda u, new, p: where_rows(u, new, p), used, optax.apply_updates(state.params, updates), state.params
        )

        present_size = jnp.asarray(present.size)
        real = present_size > 0
        stayed = (chosen == last) & (state.round > 0)  # in the first round nothing has moved since `start` chose
        unchanged = jnp.where(stayed, unchanged + 1, jnp.zeros_like(unchanged))
        new = (chosen, unchanged, where_rows(finite & real, opt_states, client_states))
        if rows is not None:
            new = jax.tree.map(lambda o, x: o.at[rows].set(x), old, new)
        state = AveragingState(params, *new[:2], state.round + 1, where_rows(weight > 0, server, state.server), new[2])

        model = num_bytes(jax.tree.map(lambda p: p[0], state.params))
        common = 0
        if shared is not None:
            parts = jax.tree_util.tree_leaves_with_path(state.params)
            common = sum(num_bytes(p[0]) for path, p in parts if is_shared(path))
        down = common + (model - common) * jnp.where(looked, float(num_clusters), 1.0)
        metrics = round_metrics(real, loss, usable, steps, model, down)
        if rows is not None:
            metrics["loss"] = jnp.full(n, jnp.nan).at[rows].set(metrics["loss"])
        return state, metrics

    return Algorithm(init, step, task, adversary_check(adversary))
