"""Myopic- and Momentum-Clustering (Werner, He, Jordan, Jaggi, Karimireddy 2023, Algorithms 1 and 4)."""

from functools import partial
from typing import Annotated, Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from jfcl.core.clients import attack_key, check_at_most_clients, client_ids, client_keys, max_examples, num_clients
from jfcl.core.options import Interval, Real
from jfcl.core.parameters import is_finite, num_bytes
from jfcl.core.types import Algorithm, Clients, PyTree, Served, Task
from jfcl.kernels import squared_distances, threshold_clustering
from jfcl.kernels.base import if_rare
from jfcl.mapping.columns import over_columns
from jfcl.methods import round as phases
from jfcl.methods.federated_clustering import (
    DEFAULTS,
    THRESHOLD,
    ThresholdOptions,
    check_sends_gradients,
    gradient,
    model_keys,
    step_along,
    threshold,
)
from jfcl.methods.options import SENDING, Count, factory
from jfcl.methods.personal import initial_state
from jfcl.robust.aggregate import attacked, where_rows
from jfcl.training import local

MOST_STARTS = 1024  # of more points, these may be starts: a distance matrix of 4 MB at most


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
      chosen: `[]` bool: a round has chosen `centers`.
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
    """Returns each client's own model; the cluster to report is the centre along which it moved."""
    return Served(state.params, None, found=state.group)


OPTIONS = (*SENDING, *THRESHOLD, "centers")


@factory(*OPTIONS, **DEFAULTS, centers="densest")
def myopic_clustering(
    task: Task, training: local.LocalTraining, *, num_clusters: Count, **options: Unpack[ThresholdOptions]
) -> Algorithm:
    """Clusters the gradients that clients send, each at its own model, and moves each model along its cluster's centre.

    The paper's motivating example: gradients at different models are compared, so that mistakes accumulate, and at
    their optima all clients have the same gradient.

    Args:
      task: from `jfcl.models`, or your own.
      training: from `jfcl.local_training` with `num_steps=1`; its optimiser steps along the centre.
      num_clusters: `K` centres.

    Returns:
      `Algorithm` with a `CentersState`. Cost of a round: `N` gradients, `min(N, 1024) N D` operations for the densest
      starts of the centres (none to carry them over); memory `O(N D)`, and for these starts `3 min(N, 1024) N` numbers.
      Bytes: each client sends a gradient and gets a centre.

    Raises:
      ValueError: as `jfcl.federated_clustering`; `K` larger than the number of clients; more than one local step.

    Example:
      >>> import jax, jfcl, numpy as np, optax
      >>> task = jfcl.models.task(lambda key: {"b": jax.numpy.zeros(())}, lambda p, x: x + p["b"], kind="regression")
      >>> y = np.repeat(np.float32([1, 5, 1, 5]), 3).reshape(4, 3)
      >>> clients = jfcl.Clients({"x": np.zeros((4, 3), np.float32), "y": y}, np.full(4, 3, np.int32))
      >>> training = jfcl.local_training(optax.sgd(0.25), num_steps=1)
      >>> algorithm = jfcl.myopic_clustering(task, training, num_clusters=2, radius=0.1)
      >>> state, _ = jfcl.rollout(algorithm, clients, key=jax.random.key(0), num_rounds=1)
      >>> state.params["b"].tolist(), state.group.tolist()
      ([0.5, 2.5, 0.5, 2.5], [0, 1, 0, 1])
    """
    return centers_of(task, training, num_clusters, None, options)


@factory(*OPTIONS, **DEFAULTS, centers="densest")
def momentum_clustering(
    task: Task,
    training: local.LocalTraining,
    *,
    num_clusters: Count,
    momentum: Annotated[Real, Interval("[0, 1)")] = 0.9,
    **options: Unpack[ThresholdOptions],
) -> Algorithm:
    """Clusters the clients' momenta, which change slowly and are less noisy than gradients: `N` messages a round.

    Otherwise it is Myopic-Clustering: `m_i ← α g_i(x_i) + (1 − α) m_i`, where the first `m_i` is the first gradient
    (equation 29); the server threshold-clusters all `m_i` into `K` centres; `x_i ← x_i − η v_{k(i)}` (equation 30).

    Args:
      task, num_clusters: as in `jfcl.myopic_clustering`.
      training: as there. The optimiser steps along the centre of momenta, so it should have no momentum of its own.
      momentum: `1 − α`, the weight of the last momentum, in [0, 1); 0 is Myopic-Clustering.

    Returns:
      `Algorithm` with a `CentersState`. Cost of a round: that of Myopic-Clustering; memory `O(N D)`.

    Example:
      >>> import jax, jfcl, numpy as np, optax
      >>> task = jfcl.models.task(lambda key: {"b": jax.numpy.zeros(())}, lambda p, x: x + p["b"], kind="regression")
      >>> y = np.repeat(np.float32([1, 5, 1, 5]), 3).reshape(4, 3)
      >>> clients = jfcl.Clients({"x": np.zeros((4, 3), np.float32), "y": y}, np.full(4, 3, np.int32))
      >>> training = jfcl.local_training(optax.sgd(0.05), num_steps=1)
      >>> algorithm = jfcl.momentum_clustering(task, training, num_clusters=2, radius=0.1)
      >>> state, _ = jfcl.rollout(algorithm, clients, key=jax.random.key(0), num_rounds=200)
      >>> np.round(state.params["b"], 2).tolist()
      [1.0, 5.0, 1.0, 5.0]
    """

    return centers_of(task, training, num_clusters, momentum, options)


def densest(points: PyTree, usable: jax.Array, ids: jax.Array, rule: dict, num_clusters: int) -> PyTree:
    """Returns `K` of the points `[N, ...]` as starts of centres: one after the other, those with most points around.

    A start takes the points around it out of the choice of the next. With a radius, it is the point with most of the
    remaining points within the radius; with a quantile `q`, the one with the smallest distance to its `q N` nearest
    remaining points (to all that remain, where they are fewer). Unlike the farthest points, these are not outliers. Of
    more than `MOST_STARTS` points, only that number, drawn by the clients' `ids` `[N]`, can be starts, and no `[N, N]`
    is held.
    """
    rows, distances = distances_of_candidates(points, usable, ids)
    n, can_start = len(usable), usable[rows]
    radius, quantile = rule["radius"], rule["quantile"]
    by_radius = quantile is None and not isinstance(radius, str)
    reach = jnp.max(jnp.asarray(radius)) if by_radius else None
    share = 1 / (2 * num_clusters) if quantile is None else jnp.max(jnp.asarray(quantile))
    place = share * usable.sum().astype(jnp.float32) * (1 - 4 * jnp.finfo(jnp.float32).eps)  # 42 / 14 is 3 by rounding
    few = jnp.clip(jnp.ceil(place).astype(jnp.int32) - 1, 0, n - 1)

    # Of equals the one nearest to all, so that the order of the clients has no effect.
    remoteness = jnp.where(usable[None, :], distances, 0.0).sum(axis=1)

    def choose(k, carry):
        chosen, remaining = carry
        remaining = jnp.where(remaining[rows].any(), remaining, usable)  # no point remains: the next centre may share
        among = jnp.where(remaining[None, :] & can_start[:, None], distances, jnp.inf)
        if by_radius:
            radius = jnp.broadcast_to(reach, (len(among),))
        else:  # the distance to the `q N`-th nearest remaining point, or to the farthest
            radius = jnp.sort(among, axis=1)[:, jnp.clip(remaining.sum() - 1, 0, few)]
        near = among <= radius[:, None]
        rank = -near.sum(axis=1).astype(radius.dtype) if by_radius else radius
        best = jnp.lexsort((remoteness, rank, ~remaining[rows]))[0]
        point = rows[best]
        return chosen.at[k].set(point), remaining & ~near[best] & (jnp.arange(n) != point)

    chosen, _ = jax.lax.fori_loop(0, num_clusters, choose, (jnp.zeros(num_clusters, jnp.int32), usable))
    return jax.tree.map(lambda z: z[chosen], points)


def distances_of_candidates(points: PyTree, usable: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the rows `[S]` int32 of the points `[N, ...]` that can be starts, and their distances `[S, N]`."""
    n = len(usable)
    if n <= MOST_STARTS:
        return jnp.arange(n, dtype=jnp.int32), jnp.sqrt(squared_distances(points, mask=usable))
    draws = jax.vmap(lambda i: jax.random.uniform(jax.random.fold_in(jax.random.key(0), i)))(ids)
    rows = jnp.argsort(jnp.where(usable, draws, 2.0))[:MOST_STARTS].astype(jnp.int32)
    candidates = jax.tree.map(lambda z: z[rows], points)
    return rows, jnp.sqrt(squared_distances(points, candidates, mask=usable)).T


def cluster_points(
    rule: dict, num_clusters: int, stacked: list, usable: jax.Array, ids: jax.Array, weight: jax.Array, is_first: Any
) -> tuple[PyTree, jax.Array]:
    """Returns the centres, and the nearest one of each client; `stacked` are the points, and any centres to carry."""
    points, *carried = stacked

    def new_starts():
        return densest(points, usable, ids, rule, num_clusters)

    starts = if_rare(is_first, new_starts, lambda: carried[0]) if carried else new_starts()
    form = "auto" if len(usable) <= MOST_STARTS else "direct"  # no [N, N] of many clients
    centers = threshold_clustering(points, starts, **rule, weights=weight, mask=usable, form=form)
    return centers, jnp.argmin(squared_distances(points, centers), axis=1).astype(jnp.int32)


def centers_of(
    task: Task, training: local.LocalTraining, num_clusters: int, momentum: Real | None, options: ThresholdOptions
) -> Algorithm:
    """Returns Momentum-Clustering (Algorithm 4), or with a `momentum` of None Myopic-Clustering (Algorithm 1)."""
    weights, adversary, client_axis = options["weights"], options["adversary"], options["client_axis"]
    rule, carry = threshold(options, 1 / (2 * num_clusters)), options["centers"] == "carry"
    check_sends_gradients(task, training, steps=False)

    def init(key: jax.Array, clients: Clients) -> CentersState:
        n = num_clients(clients)
        check_at_most_clients("num_clusters", num_clusters, n)
        start = initial_state(task, training, key, clients, options["init_params"])
        return CentersState(
            params=start.params,
            cluster=start.cluster,
            group=jnp.zeros(n, jnp.int32),
            round=start.round,
            begun=jnp.zeros(n, bool),
            momentum=() if momentum is None else jax.tree.map(jnp.zeros_like, start.params),
            client=start.client,
            centers=jax.tree.map(lambda p: jnp.zeros_like(p[:num_clusters]), start.params) if carry else (),
            chosen=jnp.zeros((), bool) if carry else (),
        )

    def mixed(keep, m, g):
        """Returns one client's momentum after the gradient `g`."""
        return jax.tree.map(lambda m, g: keep.astype(g.dtype) * m + (1 - keep).astype(g.dtype) * g, m, g)

    def step(key: jax.Array, state: CentersState, clients: Clients):
        # The clients' gradients, or momenta.
        m, ids, has_examples = max_examples(clients), client_ids(clients), jnp.asarray(clients.size) > 0
        cohort = phases.select_cohort(key, clients)

        def client(key, examples, size, params):
            batch = local.draw_batch(task, training, key, examples, size)
            return gradient(task, params, *batch, model_keys(task, key))

        loss, points = phases.train_clients(client_axis, client, cohort, state.params)
        if momentum is not None:
            points = jax.vmap(mixed)(jnp.where(state.begun, momentum, 0.0), state.momentum, points)
        finite = has_examples & jax.vmap(is_finite)(points)
        momenta = () if momentum is None else where_rows(finite, points, state.momentum)

        # Their centres.
        points, usable = attacked(adversary, attack_key(cohort.key), points, ids, finite, state.group)
        points = where_rows(usable, points, jax.tree.map(jnp.zeros_like, points))
        stacked = [points, state.centers] if carry else [points]
        is_first = ~state.chosen if carry else jnp.ones((), bool)
        weight = phases.weights_of(weights, clients)
        server = over_columns(client_axis, partial(cluster_points, rule, num_clusters))
        centers, group = server(stacked, usable, ids, weight, is_first)

        # A step of each client along the nearest one.
        def move(key, params, opt_state, k, loss):
            opt_state = local.optimizer_at(training, params, opt_state, state.round, 1, m)
            slope = jax.tree.map(lambda c: c[k], centers)
            params, opt_state = step_along(training, key, params, opt_state, slope, loss)
            return params, local.carried(training, opt_state)

        rows = client_keys(cohort.key, clients), state.params, state.client, group, loss
        params, opt_states = client_axis(move)(*rows)
        moved = usable & jax.vmap(is_finite)(params)  # a step may overflow
        model = num_bytes(jax.tree.map(lambda p: p[0], state.params))
        metrics = phases.round_metrics(has_examples, loss, moved, 1, model, model)
        new = state._replace(
            params=where_rows(moved, params, state.params),
            group=jnp.where(usable, group, state.group),
            round=state.round + 1,
            begun=state.begun | finite,
            momentum=momenta,
            client=where_rows(moved, opt_states, state.client),
            centers=centers if carry else (),
            chosen=state.chosen | finite.any() if carry else (),
        )
        return new, metrics

    return Algorithm(init, step, task, serve=serve)
