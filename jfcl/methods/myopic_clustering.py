"""Myopic-Clustering (Werner, He, Jordan, Jaggi, Karimireddy 2023, Algorithm 1); its round is also Algorithm 4's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jfcl import mapping
from jfcl.core import (
    Adversary,
    Algorithm,
    Clients,
    PyTree,
    Served,
    Task,
    attack_key,
    check,
    check_count,
    check_finite,
    client_ids,
    client_keys,
    is_finite,
    max_examples,
    num_bytes,
    num_clients,
)
from jfcl.core.options import OneOf, check_options
from jfcl.kernels import squared_distances, threshold_clustering
from jfcl.kernels.base import if_rare
from jfcl.mapping.columns import over_columns
from jfcl.methods import round as phases
from jfcl.methods.federated_clustering import (
    Threshold,
    check_no_statistics,
    check_one_gradient,
    gradient,
    model_keys,
    threshold,
)
from jfcl.methods.options import Quantile, QuantileRule, Rounds, Weights
from jfcl.methods.personal import initial_state
from jfcl.robust.aggregate import attacked, clients_check, where_rows
from jfcl.training import local
from jfcl.training.optimizer import optimizer_step

CENTERS = ("densest", "carry")
DENSE_UP_TO = 1024  # clients: an [N, N] of 4 MB


class CentersState(NamedTuple):
    """The state of Myopic- and Momentum-Clustering.

    Attributes:
      params: pytree of `[N, ...]`: client `i`'s model is row `i`.
      cluster: `[N]` int32, `0 .. N-1`.
      group: `[N]` int32 in `0..K-1`: the centre along which each client moved last.
      round: `[]` int32, rounds done.
      begun: `[N]` bool: clients that have sent a finite vector, and so have a momentum.
      momentum: pytree of `[N, ...]`, the clients' momenta; `()` for Myopic-Clustering.
      client: the clients' optimiser states `[N, ...]` under `keep="everything"`, else `()`.
      centers: pytree of `[K, ...]`, the last round's centres, under `centers="carry"`, else `()`.
      chosen: `[]` bool: `centers` were given, or a round has chosen them.
    """

    params: PyTree
    cluster: jax.Array
    group: jax.Array
    round: jax.Array
    begun: jax.Array
    momentum: PyTree
    client: PyTree
    centers: PyTree = ()
    chosen: PyTree = ()


def serve(state: CentersState, clients: Clients | None) -> Served:
    """Returns each client's own model; reported is the centre along which it moved."""
    return Served(state.params, None, found=state.group)


def myopic_clustering(
    task: Task,
    training: local.LocalTraining,
    *,
    num_clusters: int,
    radius: Any = None,
    quantile: Quantile = None,
    threshold_rounds: Rounds = 10,
    quantile_rule: QuantileRule = "linear",
    weights: Weights = "equal",
    centers: Annotated[str, OneOf(CENTERS)] = "densest",
    init_centers: PyTree | None = None,
    init_params: PyTree | None = None,
    adversary: Adversary | None = None,
    client_axis: mapping.Mapping | None = None,
) -> Algorithm:
    """Clusters the gradients that clients send, each at its own model, and moves each model along its cluster's centre.

    The paper's motivating example: gradients at different models are compared, so that mistakes accumulate, and at
    their optima all clients have the same gradient.

    Args:
      task: from `jfcl.models`, or your own.
      training: from `jfcl.local_training` with `num_steps=1`; its optimiser steps along the centre.
      num_clusters: `K` centres.
      centers: their starts, which the paper leaves open. `"densest"`: in every round the gradients with most others
        around them, see `densest`. `"carry"`: the last round's centres; in the first round `init_centers`, or as
        `"densest"` without them.
      init_centers: pytree of `[K, ...]`, like stacked models: the starts of the first round under `centers="carry"`.
      radius, quantile, threshold_rounds, quantile_rule: as in `jfcl.federated_clustering`; `radius` may be `[K]` or
        `[threshold_rounds, K]`. Default of the first two: `quantile=1 / (2 K)`.
      weights, init_params, adversary, client_axis: as in `jfcl.federated_clustering`.

    Returns:
      `Algorithm` with a `CentersState`. Cost of a round: `N` gradients, `min(N, 1024) N D` operations for the densest
      starts of the centres (none to carry them over); memory `O(N D)`. Bytes: each client sends a gradient and gets a
      centre.

    Raises:
      ValueError: as `jfcl.federated_clustering`; `K` larger than the number of clients; more than one local step;
        an unknown `centers`; `init_centers` of other shapes, or without `centers="carry"`.

    Example:
      >>> import jax, jfcl, numpy as np, optax
      >>> task = jfcl.models.task(lambda key: {"b": jax.numpy.zeros(())}, lambda p, x: x + p["b"], kind="regression")
      >>> y = np.repeat(np.float32([1, 5, 1, 5]), 3).reshape(4, 3)
      >>> clients = jfcl.Clients({"x": np.zeros((4, 3), np.float32), "y": y}, np.full(4, 3, np.int32))
      >>> algorithm = jfcl.myopic_clustering(
      ...     task, jfcl.local_training(optax.sgd(0.25), num_steps=1), num_clusters=2, radius=0.1
      ... )
      >>> state = algorithm.init(jax.random.key(0), clients)
      >>> state, _ = jax.jit(algorithm.step)(jax.random.key(1), state, clients)
      >>> state.params["b"].tolist(), state.group.tolist()
      ([0.5, 2.5, 0.5, 2.5], [0, 1, 0, 1])
    """
    check_options(myopic_clustering, locals())
    return centers_of(send=lambda state, gradients: (gradients, ()), **locals())


def densest(points: PyTree, usable: jax.Array, ids: jax.Array, rule: Threshold, num_clusters: int) -> PyTree:
    """Returns `K` of the points `[N, ...]` as starts of centres: one after the other, those with most points around.

    A start takes the points around it out of the choice of the next. With a radius, it is the point with most of the
    remaining points within the radius; with a quantile `q`, the one with the smallest distance to its `q N` nearest
    remaining points (to all that remain, where they are fewer). Unlike the farthest points, these are not outliers. Of
    more than `DENSE_UP_TO` points, only that number, drawn by the clients' `ids` `[N]`, can be starts, and no `[N, N]`
    is held.
    """
    rows, distances = distances_of_candidates(points, usable, ids)
    n = len(usable)
    by_radius = rule.quantile is None and not isinstance(rule.radius, str)
    reach = jnp.max(jnp.asarray(rule.radius)) if by_radius else None
    share = 1 / (2 * num_clusters) if rule.quantile is None else jnp.max(jnp.asarray(rule.quantile))
    few = jnp.clip(jnp.ceil(share * usable.sum().astype(jnp.float32)).astype(jnp.int32) - 1, 0, n - 1)
    can_start = usable[rows]

    # Of equals the one nearest to all, so that the order of the clients has no effect.
    remoteness = jnp.where(usable[None, :], distances, 0.0).sum(axis=1)

    def nearest(among, left):
        """Returns the distance of each candidate to its `q N`-th nearest remaining point, or to the farthest."""
        return jnp.sort(among, axis=1)[:, jnp.clip(left.sum() - 1, 0, few)]

    def choose(k, carry):
        chosen, left = carry
        free = left[rows]
        left = jnp.where(free.any(), left, usable)  # no point remains: the next centre may share
        free = jnp.where(free.any(), free, can_start)
        among = jnp.where(left[None, :] & can_start[:, None], distances, jnp.inf)
        radius = jnp.broadcast_to(reach, (len(among),)) if by_radius else nearest(among, left)
        near = among <= radius[:, None]
        rank = -near.sum(axis=1).astype(radius.dtype) if by_radius else radius
        best = jnp.lexsort((remoteness, rank, ~free))[0]
        point = rows[best]
        return chosen.at[k].set(point), left & ~near[best] & (jnp.arange(n) != point)

    chosen, _ = jax.lax.fori_loop(0, num_clusters, choose, (jnp.zeros(num_clusters, jnp.int32), usable))
    return jax.tree.map(lambda z: z[chosen], points)


def distances_of_candidates(points: PyTree, usable: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the rows `[S]` int32 of the points `[N, ...]` that can be starts, and their distances `[S, N]`."""
    n = len(usable)
    if n <= DENSE_UP_TO:
        return jnp.arange(n, dtype=jnp.int32), jnp.sqrt(squared_distances(points, mask=usable))
    draws = jax.vmap(lambda i: jax.random.uniform(jax.random.fold_in(jax.random.key(0), i)))(ids)
    rows = jnp.argsort(jnp.where(usable, draws, 2.0))[:DENSE_UP_TO].astype(jnp.int32)
    candidates = jax.tree.map(lambda z: z[rows], points)
    return rows, jnp.sqrt(squared_distances(points, candidates, mask=usable)).T


def centers_of(
    task: Task,
    training: local.LocalTraining,
    send: Callable[[CentersState, PyTree], tuple[PyTree, PyTree]],
    *,
    num_clusters: int,
    radius: Any,
    quantile: Any,
    threshold_rounds: int,
    quantile_rule: str,
    weights: str | jax.Array,
    centers: str,
    init_centers: PyTree | None,
    init_params: PyTree | None,
    adversary: Adversary | None,
    client_axis: mapping.Mapping | None,
    has_momenta: bool = False,
) -> Algorithm:
    """Returns the method of Algorithms 1 and 4.

    Args:
      send: `(state, gradients) -> (points, momenta)`, pytrees of `[N, ...]`; the server clusters the points.
      has_momenta: whether the state has momenta.
      task, training and the others: as in `myopic_clustering`.
    """
    local.check_parts(task, training)
    phases.check_weights(weights)
    check_count("num_clusters", num_clusters)
    if radius is None and quantile is None:
        quantile = 1 / (2 * num_clusters)
    rule = threshold(radius, quantile, threshold_rounds, quantile_rule)
    carry = centers == "carry"
    check(init_centers is None or carry, "init_centers", "given", 'left out unless centers="carry"')
    check_one_gradient(training, steps=False)
    check_no_statistics(task, "myopic_clustering and momentum_clustering")
    client_axis = mapping.or_auto(client_axis)

    def init(key: jax.Array, clients: Clients) -> CentersState:
        n = num_clients(clients)
        phases.check_at_most_clients("num_clusters", num_clusters, clients)
        start = initial_state(task, training, key, clients, init_params)
        momenta = jax.tree.map(jnp.zeros_like, start.params) if has_momenta else ()
        group, begun = jnp.zeros(n, jnp.int32), jnp.zeros(n, bool)
        first = first_centers(start.params, init_centers, num_clusters) if carry else ()
        chosen = jnp.asarray(init_centers is not None) if carry else ()
        own = start.params, start.cluster, group, start.round, begun, momenta, start.client
        return CentersState(*own, first, chosen)

    def cluster_points(stacked, usable, ids, weight, is_first):
        """Returns the centres, and the nearest one of each client."""
        points, *carried = stacked

        def new_starts():
            return densest(points, usable, ids, rule, num_clusters)

        starts = if_rare(is_first, new_starts, lambda: carried[0]) if carried else new_starts()
        form = "auto" if len(usable) <= DENSE_UP_TO else "direct"  # no [N, N] of many clients
        centers = threshold_clustering(points, starts, **rule._asdict(), weights=weight, mask=usable, form=form)
        return centers, jnp.argmin(squared_distances(points, centers), axis=1).astype(jnp.int32)

    def step(key: jax.Array, state: CentersState, clients: Clients):
        m, size = max_examples(clients), jnp.asarray(clients.size)
        has_examples = size > 0
        cohort = phases.select_cohort(key, clients)

        def client(key, examples, size, params):
            return gradient(task, params, *local.draw_batch(task, training, key, examples, size), model_keys(task, key))

        loss, gradients = phases.train_clients(client_axis, client, cohort, state.params)
        points, momenta = send(state, gradients)
        finite = has_examples & jax.vmap(is_finite)(points)
        ids = client_ids(clients)
        points, usable = attacked(adversary, attack_key(cohort.key), points, ids, finite, state.group)
        points = where_rows(usable, points, jax.tree.map(jnp.zeros_like, points))
        stacked = [points, state.centers] if carry else [points]
        server = over_columns(client_axis, cluster_points)
        is_first = ~state.chosen if carry else jnp.ones((), bool)
        centers, group = server(stacked, usable, ids, phases.weights_of(weights, clients), is_first)

        def move(key, params, opt_state, k, loss):
            opt_state = local.optimizer_at(training, params, opt_state, state.round, 1, m)
            opt_state = local.rekeyed(training, key, params, opt_state)
            slope = jax.tree.map(lambda c: c[k], centers)
            updates, opt_state = optimizer_step(training.optimizer, slope, opt_state, params, loss)
            return optax.apply_updates(params, updates), local.carried(training, opt_state)

        rows = client_keys(cohort.key, clients), state.params, state.client, group, loss
        params, opt_states = client_axis(move)(*rows)
        moved = usable & jax.vmap(is_finite)(params)  # a step may overflow
        model = num_bytes(jax.tree.map(lambda p: p[0], state.params))
        metrics = phases.round_metrics(has_examples, loss, moved, 1, model, model)
        new = CentersState(
            params=where_rows(moved, params, state.params),
            cluster=state.cluster,
            group=jnp.where(usable, group, state.group),
            round=state.round + 1,
            begun=state.begun | finite,
            momentum=where_rows(finite, momenta, state.momentum),
            client=where_rows(moved, opt_states, state.client),
            centers=centers if carry else (),
            chosen=state.chosen | finite.any() if carry else (),
        )
        return new, metrics

    return Algorithm(init, step, task, clients_check(adversary, weights), serve=serve)


def first_centers(params: PyTree, init_centers: PyTree | None, num_clusters: int) -> PyTree:
    """Returns `init_centers` in the types of models `[N, ...]`, or zeros `[K, ...]`.

    Raises:
      ValueError: `init_centers` of other shapes, or not finite.
    """
    zeros = jax.tree.map(lambda p: jnp.zeros((num_clusters, *p.shape[1:]), p.dtype), params)
    if init_centers is None:
        return zeros
    check_finite(init_centers, "init_centers")
    shapes = lambda tree: jax.tree.map(jnp.shape, tree)  # noqa: E731
    accepted = f"a tree of arrays [K, ...] like the models: {shapes(zeros)}"
    same = jax.tree.structure(init_centers) == jax.tree.structure(zeros) and shapes(init_centers) == shapes(zeros)
    check(same, "init_centers", shapes(init_centers), accepted)
    return jax.tree.map(lambda c, z: jnp.asarray(c).astype(z.dtype), init_centers, zeros)
