"""Clustered Federated Learning (Sattler, Müller, Samek 2021, Algorithm 5) and its Byzantine variant (2020).

All clients start as one cluster. Where a cluster's mean update has become small although single clients' updates have
not, its clients want different things: it is split along the optimal bipartition of the cosine similarities of their
updates. Splits happen inside the compiled round, for all clusters at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jfcl import local, mapping
from jfcl.aggregate import (
    add_to_clusters,
    attacked,
    divide_rows,
    is_finite,
    num_bytes,
    robust_cluster_mean,
    where_rows,
)
from jfcl.algorithms.averaging import WEIGHTS, client_weight, initial_models, initial_optimizers
from jfcl.core import (
    Adversary,
    Algorithm,
    Clients,
    PyTree,
    Task,
    check,
    check_choice,
    check_count,
    client_ids,
    client_keys,
    is_concrete,
    max_examples,
    num_clients,
)
from jfcl.kernels import bipartition_of_updates, optimal_bipartition, pairwise_cosine
from jfcl.kernels.base import rows_of, squared_norms
from jfcl.theory import max_noise_of_split

SIMILARITIES = ("updates", "gradients")
DENSE_UP_TO = 4096  # clients whose similarities are kept as a matrix; beyond, they are computed in tiles


class CFLState(NamedTuple):
    """The state of Clustered Federated Learning; `K` is its capacity, clusters that exist are `active`.

    Attributes:
      params: pytree of `[K, ...]`, the clusters' models.
      cluster: `[N]` int32.
      active: `[K]` bool.
      parent: `[K]` int32, the cluster from which each was split; -1 for the first and for those that are not active.
      since: `[K]` int32, the round in which each cluster got its present members.
      round: `[]` int32, rounds done.
      scale: `[2]`, mean and largest update norm of the first round, for relative thresholds.
      excluded: `[N]` int32, the round in which a client was shut out (Byzantine variant); 0 for the others.
      client: the local optimisers' states `[N, ...]` under `keep="everything"`, else `()`.
    """

    params: PyTree
    cluster: jax.Array
    active: jax.Array
    parent: jax.Array
    since: jax.Array
    round: jax.Array
    scale: jax.Array
    excluded: jax.Array
    client: PyTree


class Splits(NamedTuple):
    """What a round has found out about each cluster, `[K]`, and which side every client would be on, `[N]` bool."""

    cross_similarity: jax.Array
    smaller: jax.Array
    side: jax.Array


def bipartitions(vectors: PyTree, cluster: jax.Array, usable: jax.Array, wanted: jax.Array) -> Splits:
    """The optimal bipartition of every wanted cluster.

    Args:
      vectors: pytree of `[N, ...]`, updates or gradients.
      cluster: `[N]` int32 in `0..K-1`.
      usable: `[N]` bool; clients that are not are on no side (False).
      wanted: `[K]` bool: clusters to look at.

    Returns:
      `Splits`; for clusters not wanted the cross similarity is `inf`.
    """
    count = len(cluster)
    dense = count <= DENSE_UP_TO
    given = pairwise_cosine(vectors, mask=usable) if dense else vectors
    split = optimal_bipartition if dense else bipartition_of_updates

    def one(k, wanted):
        members = usable & (cluster == k)
        nothing = (jnp.full((), jnp.inf), jnp.zeros((), jnp.int32), jnp.zeros(count, bool))

        def look():
            side, cross = split(given, members)
            ones = side.sum().astype(jnp.int32)
            return cross, jnp.minimum(ones, members.sum().astype(jnp.int32) - ones), side

        return jax.lax.cond(wanted, look, lambda: nothing)

    cross, smaller, sides = mapping.chunked(1)(one)(jnp.arange(len(wanted), dtype=jnp.int32), wanted)
    return Splits(cross, smaller, sides.any(axis=0))


class Accepted(NamedTuple):
    """`into` `[K]` int32: the slot of the new cluster, `K` where there is no split; `full` `[]` bool: too few slots."""

    into: jax.Array
    full: jax.Array


def allot(accept: jax.Array, active: jax.Array) -> Accepted:
    """Gives every accepted split (`[K]` bool) a slot that is not `active`, lowest first, while there are any."""
    capacity = len(active)
    free = jnp.argsort(active, stable=True).astype(jnp.int32)
    turn = jnp.cumsum(accept).astype(jnp.int32) - 1
    fits = accept & (turn < (~active).sum())
    return Accepted(jnp.where(fits, free[jnp.clip(turn, 0, capacity - 1)], capacity), (accept & ~fits).any())


def clustered(
    task: Task,
    training: local.LocalTraining,
    *,
    max_clusters: int,
    ripe: Callable[..., jax.Array],
    accept: Callable[[Splits], jax.Array],
    keep_larger: bool,
    similarity: str,
    weights: str,
    init_params: PyTree | None,
    adversary: Adversary | None,
    aggregator: Callable[..., PyTree] | None,
    client_axis: mapping.Mapping | None,
) -> Algorithm:
    """Builds the round that both variants share. Users want `cfl` or `byzantine_cfl`.

    Args:
      ripe: `(state, mean_norm [K], max_norm [K], size [K]) -> [K]` bool: which clusters to look at.
      accept: `(splits) -> [K]` bool: which bipartitions to carry out.
      keep_larger: instead of making the second side a cluster, shut the smaller side out for ever.
    """
    check_count("max_clusters", max_clusters)
    check_choice("similarity", similarity, SIMILARITIES)
    check_choice("weights", weights, WEIGHTS)
    client_axis = mapping.auto() if client_axis is None else client_axis

    def init(key: jax.Array, clients: Clients) -> CFLState:
        n = num_clients(clients)
        check(max_clusters <= n, "max_clusters", max_clusters, f"at most the {n} clients there are")
        one = initial_models(task, key, 1, init_params)
        params = jax.tree.map(lambda p: jnp.broadcast_to(p, (max_clusters, *p.shape[1:])), one)
        return CFLState(
            params=params,
            cluster=jnp.zeros(n, jnp.int32),
            active=jnp.arange(max_clusters) == 0,
            parent=jnp.full(max_clusters, -1, jnp.int32),
            since=jnp.zeros(max_clusters, jnp.int32),
            round=jnp.zeros((), jnp.int32),
            scale=jnp.zeros(2),
            excluded=jnp.zeros(n, jnp.int32),
            client=initial_optimizers(training, params, clients),
        )

    def means(updates: PyTree, cluster: jax.Array, weight: jax.Array) -> PyTree:
        """The weighted mean of each cluster's updates, `[K, ...]`, added up in the order of the clients."""
        if aggregator is not None:
            return robust_cluster_mean(aggregator, updates, cluster, weight > 0, max_clusters)

        def fold(total, sent):
            update, k, w = sent
            ones = (w > 0).astype(jnp.float32)
            return add_to_clusters(total[0], update, k, w), add_to_clusters(total[1], w, k, ones)

        zero = (
            jax.tree.map(lambda u: jnp.zeros((max_clusters, *u.shape[1:]), u.dtype), updates),
            jnp.zeros(max_clusters),
        )
        (sums, total), _ = mapping.map_reduce(client_axis, lambda u, k, w: ((u, k, w), ()), fold, zero)(
            updates, cluster, weight
        )
        return divide_rows(sums, total)

    def step(key: jax.Array, state: CFLState, clients: Clients):
        m, size = max_examples(clients), jnp.asarray(clients.size)
        _, clients_key = jax.random.split(key)  # as in `averaging`: the same clients see the same randomness

        def client(key, examples, size, cluster, opt_state):
            begin = jax.tree.map(lambda p: p[cluster], state.params)
            if training.keep != "everything":
                done = state.round * local.steps_per_round(training, size, m)
                opt_state = local.start_optimizer(training, begin, done)
            trained = local.train(task, training, key, begin, examples, size, opt_state)
            update = jax.tree.map(jnp.subtract, trained.params, begin)
            opt_state = trained.opt_state if training.keep == "everything" else ()
            return update, is_finite(update), trained.loss, trained.num_steps, opt_state

        updates, finite, loss, steps, opt_states = client_axis(client)(
            client_keys(clients_key, clients), clients.examples, size, state.cluster, state.client
        )
        present = (size > 0) & (state.excluded == 0)
        attack_key = jax.random.fold_in(clients_key, jnp.iinfo(jnp.int32).max)
        updates, usable = attacked(adversary, attack_key, updates, client_ids(clients), present & finite)
        weight = client_weight(weights, size) * usable.astype(jnp.float32)

        # How far each cluster still moves, and how far its most discontented client would.
        norms = jnp.sqrt(squared_norms(rows_of(updates)))
        max_norm = jax.ops.segment_max(jnp.where(usable, norms, 0.0), state.cluster, max_clusters)
        max_norm = jnp.maximum(max_norm, 0.0)
        mean_norm = jnp.sqrt(squared_norms(rows_of(means(updates, state.cluster, weight))))
        members = jax.ops.segment_sum(usable.astype(jnp.int32), state.cluster, max_clusters)
        scale = jnp.where(state.round == 0, jnp.stack([mean_norm[0], max_norm[0]]), state.scale)
        state = state._replace(scale=scale)
        wanted = state.active & ripe(state, mean_norm, max_norm, members)

        def look():
            if similarity == "updates":
                return bipartitions(updates, state.cluster, usable, wanted)

            def gradient(examples, size, cluster):
                begin = jax.tree.map(lambda p: p[cluster], state.params)
                return jax.grad(lambda p: local.mean_loss(task, p, examples, size))(begin)

            gradients = client_axis(gradient)(clients.examples, size, state.cluster)
            return bipartitions(gradients, state.cluster, usable, wanted)

        nothing = Splits(
            jnp.full(max_clusters, jnp.inf), jnp.zeros(max_clusters, jnp.int32), jnp.zeros(len(size), bool)
        )
        splits = jax.lax.cond(wanted.any(), look, lambda: nothing)
        wanted = wanted & accept(splits)
        new_round = state.round + 1

        if keep_larger:
            ones = jax.ops.segment_sum((splits.side & usable).astype(jnp.int32), state.cluster, max_clusters)
            out_is_side = 2 * ones <= members  # of halves the first client's stays
            leaves = wanted[state.cluster] & usable & (splits.side == out_is_side[state.cluster])
            excluded = jnp.where(leaves, new_round, state.excluded)
            weight = jnp.where(leaves, 0.0, weight)
            params, cluster, active, parent = state.params, state.cluster, state.active, state.parent
            since, full = state.since, jnp.zeros((), bool)
        else:
            accepted = allot(wanted, state.active)
            into = accepted.into
            moves = splits.side & (into[state.cluster] < max_clusters)
            cluster = jnp.where(moves, into[state.cluster], state.cluster).astype(jnp.int32)
            params = jax.tree.map(lambda p: p.at[into].set(p, mode="drop"), state.params)
            active = state.active.at[into].set(True, mode="drop")
            parent = state.parent.at[into].set(jnp.arange(max_clusters, dtype=jnp.int32), mode="drop")
            was_split = into < max_clusters
            since = jnp.where(was_split, new_round, state.since).at[into].set(new_round, mode="drop")
            excluded, full = state.excluded, accepted.full

        # The children average at once, each its own clients' updates of this round.
        step_by = means(updates, cluster, weight)
        params = jax.tree.map(jnp.add, params, step_by)
        # Free slots hold the first model, so that whoever looks for the best of all is not misled by an old one.
        params = where_rows(active, params, jax.tree.map(lambda p: jnp.broadcast_to(p[:1], p.shape), params))

        model = float(num_bytes(jax.tree.map(lambda p: p[0], params)))
        counted = present.astype(jnp.float32)
        new = CFLState(params, cluster, active, parent, since, new_round, scale, excluded, opt_states)
        metrics = {
            "loss": jnp.where(present, loss, jnp.full_like(loss, jnp.nan)),
            "bytes_up": counted.sum() * model,
            "bytes_down": counted.sum() * model,
            "client_steps": (counted * steps.astype(jnp.float32)).sum(),
            "participants": present.sum().astype(jnp.int32),
            "nonfinite": (present & ~usable).sum().astype(jnp.int32),
            "mean_norm": mean_norm,
            "max_norm": max_norm,
            "cross_similarity": splits.cross_similarity,
            "num_clusters": active.sum().astype(jnp.int32),
            "num_excluded": (excluded > 0).sum().astype(jnp.int32),
            "capacity_reached": full,
        }
        return new, metrics

    return Algorithm(init, step, task)


def cfl(
    task: Task,
    training: local.LocalTraining,
    *,
    eps_1: Any = 0.4,
    eps_2: Any = 1.6,
    relative: bool = False,
    gamma_max: Any = 0.0,
    max_clusters: int = 8,
    min_rounds: int = 1,
    min_size: int = 1,
    similarity: str = "updates",
    weights: str = "size",
    init_params: PyTree | None = None,
    adversary: Adversary | None = None,
    aggregator: Callable[..., PyTree] | None = None,
    client_axis: mapping.Mapping | None = None,
) -> Algorithm:
    """Splits a cluster once its model stands still although its clients pull, until nobody pulls (Algorithm 5).

    Every round, for every cluster `c`: if `‖Δθ_c‖ < ε₁` (the mean update) and `max_i ‖Δθ_i‖ > ε₂`, the optimal
    bipartition of `c` is computed; if `γ_max < sqrt((1 − α_cross) / 2)` (equation 39), it is carried out, and the
    children average their own updates of the round at once.

    Args:
      task, training: the model and how a client trains it.
      eps_1: `ε₁`, above 0. The defaults of both are those of the authors' demonstration (10 clients, EMNIST); they
        depend on model, data and learning rate.
      eps_2: `ε₂`, above 0; a cluster whose clients' updates are all shorter is finished.
      relative: measure `ε₁` in mean update norms of the first round, and `ε₂` in largest ones.
      gamma_max: `γ_max` in [0, 1), the assumed approximation noise; 0 accepts every bipartition.
      max_clusters: capacity; a split that would need more is not carried out, and `capacity_reached` says so.
      min_rounds: rounds that a cluster trains before it may be split, counted from its own split.
      min_size: clients that either side must have.
      similarity: of `"updates"`, or of full-batch `"gradients"` at the cluster's model (one more pass).
      weights: `"size"` (Algorithm 2) or `"equal"` (Algorithm 5 as printed).
      init_params: the first model.
      adversary: hostile clients, see `jfcl.attacks`.
      aggregator: a robust one from `jfcl.kernels` in place of each cluster's mean; clients then count alike.
      client_axis: a mapping of `jfcl.mapping`.

    Returns:
      `Algorithm` with a `CFLState`; metrics beside the common ones: `mean_norm`, `max_norm`, `cross_similarity` `[K]`
      (`inf` where no bipartition was computed), `num_clusters`, `capacity_reached` `[]`. Memory `O(N D)`, and
      `O(N²)` up to 4,096 clients in rounds that look for splits, tiles beyond. Cost of such a round: `N² D` besides
      training.

    Raises:
      ValueError: thresholds not above 0, `gamma_max` outside [0, 1), counts below 1, an unknown `similarity`.

    Example:
      >>> import jax, jfcl, numpy as np, optax
      >>> task = jfcl.models.task(lambda key: {"b": jax.numpy.zeros(2)}, lambda p, x: x + p["b"], kind="regression")
      >>> y = np.repeat(np.float32([[1, 1], [-1, 1], [1, 1], [-1, 1]])[:, None], 3, axis=1)  # agree on one half
      >>> clients = jfcl.Clients({"x": np.zeros((4, 3, 2), np.float32), "y": y}, np.full(4, 3, np.int32))
      >>> training = jfcl.local_training(optax.sgd(0.2), num_steps=1)
      >>> algorithm = jfcl.cfl(task, training, eps_1=0.05, eps_2=0.1, max_clusters=3)
      >>> state, _ = jfcl.rollout(algorithm, clients, key=jax.random.key(0), num_rounds=60)
      >>> state.cluster.tolist(), state.parent.tolist()
      ([0, 1, 0, 1], [-1, 0, -1])
    """
    for name, value in (("eps_1", eps_1), ("eps_2", eps_2)):
        if is_concrete(value):
            check(value > 0, name, value, "above 0")
    if is_concrete(gamma_max):
        check(0 <= gamma_max < 1, "gamma_max", gamma_max, "in [0, 1)")
    check_count("min_rounds", min_rounds)
    check_count("min_size", min_size)

    def ripe(state, mean_norm, max_norm, members):
        units = state.scale if relative else jnp.ones(2)
        still = (mean_norm < eps_1 * units[0]) & (max_norm > eps_2 * units[1])
        return still & (state.round + 1 - state.since > min_rounds) & (members >= 2 * min_size)

    def accept(splits):
        return (max_noise_of_split(splits.cross_similarity) > gamma_max) & (splits.smaller >= min_size)

    return clustered(
        task,
        training,
        max_clusters=max_clusters,
        ripe=ripe,
        accept=accept,
        keep_larger=False,
        similarity=similarity,
        weights=weights,
        init_params=init_params,
        adversary=adversary,
        aggregator=aggregator,
        client_axis=client_axis,
    )


def byzantine_cfl(
    task: Task,
    training: local.LocalTraining,
    *,
    threshold: Any = 0.02,
    similarity: str = "updates",
    weights: str = "size",
    init_params: PyTree | None = None,
    adversary: Adversary | None = None,
    aggregator: Callable[..., PyTree] | None = None,
    client_axis: mapping.Mapping | None = None,
) -> Algorithm:
    """One model for the benign majority: every round the smaller side of a bipartition below a threshold is shut out.

    (Sattler, Müller, Wiegand, Samek 2020, Algorithm 1.) Every round the optimal bipartition of the clients still in
    is computed; if `α_cross < threshold`, its smaller side is excluded for ever. Random updates have similarities of
    the order of `1/√D`, so the paper's threshold needs models of many more than 2,500 parameters.

    Args:
      task, training, init_params, adversary, aggregator, client_axis: as in `jfcl.cfl`.
      threshold: in (-1, 1); the paper's is 0.02.
      similarity, weights: as in `jfcl.cfl`.

    Returns:
      `Algorithm` with a `CFLState` of one cluster; `state.excluded` has the round in which each client was shut out,
      0 for those still in. Of two equal halves the first client's stays. Cost of a round: that of FedAvg and `N² D`;
      memory `O(N D + N²)` (tiles beyond 4,096 clients).

    Raises:
      ValueError: a threshold outside (-1, 1), an unknown `similarity`.

    Example:
      >>> import jax, jfcl, numpy as np, optax
      >>> task = jfcl.models.task(lambda key: {"b": jax.numpy.zeros(2)}, lambda p, x: x + p["b"], kind="regression")
      >>> y = np.repeat(np.float32([[1, 1], [1, 2], [-9, -9]])[:, None], 3, axis=1)
      >>> clients = jfcl.Clients({"x": np.zeros((3, 3, 2), np.float32), "y": y}, np.full(3, 3, np.int32))
      >>> algorithm = jfcl.byzantine_cfl(task, jfcl.local_training(optax.sgd(0.5), num_steps=1))
      >>> state, _ = jfcl.rollout(algorithm, clients, key=jax.random.key(0), num_rounds=2)
      >>> state.excluded.tolist(), state.params["b"][0].tolist()
      ([0, 0, 1], [1.0, 1.5])
    """
    if is_concrete(threshold):
        check(-1 < threshold < 1, "threshold", threshold, "in (-1, 1)")
    return clustered(
        task,
        training,
        max_clusters=1,
        ripe=lambda state, mean_norm, max_norm, members: members >= 3,
        accept=lambda splits: splits.cross_similarity < threshold,
        keep_larger=True,
        similarity=similarity,
        weights=weights,
        init_params=init_params,
        adversary=adversary,
        aggregator=aggregator,
        client_axis=client_axis,
    )
