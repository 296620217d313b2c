"""StoCFL (Zeng, Hu, Liu, Yu, Wang, Xu 2023): clusters of clients that have been seen merge where they are similar."""

import zlib
from functools import partial
from typing import Annotated, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from jfcl.core.checks import INT32_MAX
from jfcl.core.clients import Cohort, check_at_most_clients, client_ids, max_examples, num_clients
from jfcl.core.options import Interval, Range, Real, Search
from jfcl.core.parameters import num_bytes, trained_part
from jfcl.core.platforms import at_most
from jfcl.core.types import Algorithm, Clients, PyTree, Served, Task
from jfcl.kernels import linkage_tree, pairwise_cosine
from jfcl.mapping.columns import over_columns
from jfcl.methods import averaging as inner
from jfcl.methods import round as phases
from jfcl.methods.assigned import UNSEEN, Assignment, embedded_again, update_of
from jfcl.methods.assigned import step as assigned_step
from jfcl.methods.averaging import Averaging, AveragingState, averaging
from jfcl.methods.options import AVERAGING, Options, factory
from jfcl.robust.aggregate import ravel_clients, where_rows
from jfcl.training import local

OBSERVE_STREAM = zlib.crc32(b"observation of a client")  # folded into a client's key


class Partition(NamedTuple):
    """What the server knows of the clients and clusters.

    Attributes:
      anchor: the model `[...]` from which clients are observed.
      common: the state of the common model, of FedAvg.
      seen: `[N, D]`, the update of each client from the anchor; zeros before its first round.
      into: `[K]` int32, the row that a cluster has merged into, or its own.
      first: `[K]` int32, the smallest id of a cluster's clients.
      size: `[K]` int32, the number of its clients; 0 for a row that no cluster has.
      taken: `[]` int32, the rows that clusters have or had, which are taken in order.
    """

    anchor: PyTree
    common: AveragingState
    seen: jax.Array
    into: jax.Array
    first: jax.Array
    size: jax.Array
    taken: jax.Array


@factory(*AVERAGING, weights="equal")
def stocfl(
    task: Task,
    training: local.LocalTraining,
    *,
    merge_threshold: Annotated[Real, Interval("[-2, 2]"), Search(0.0, 0.9, log=False)] = 0.3,
    max_clusters: Annotated[int | None, Range(1)] = None,
    prox: Annotated[Real, Interval("[0, inf)"), Search(0.005, 0.5)] = 0.05,
    observe_epochs: Annotated[int, Range(1, 10**6)] = 10,
    **options: Unpack[Options],
) -> Algorithm:
    """Begins with each client as a cluster, and merges the clusters of a cohort that are similar; FedAvg runs inside.

    A client that takes part for the first time sends its update from a common anchor. In each round the clusters of the
    cohort are compared by the means of their present clients' updates. A cluster's model is pulled to a common model,
    from which new clusters start.

    Args:
      task: as in `jfcl.fedavg`.
      training: as in `jfcl.fedavg`; of the common model. Its `prox` applies to that model.
      merge_threshold: `τ`: clusters with this cosine similarity or a larger one are merged, the most similar first. The
        authors' 0.2 to 0.3 for MNIST, 0.65 for CIFAR-10. Above 1, none merge; at -1 and below, all.
      max_clusters: the most models that are made; default: one for each client. Without a model left, a client is
        served the common model, and tries again in its next round.
      prox: `μ`, of the pull `μ/2 ‖θ - ω‖²` of a cluster's model to the common one.
      observe_epochs: full-batch steps from the anchor with which a client is observed.
      init_params: one model, the anchor.

    Returns:
      `Algorithm` with an `AveragingState`, whose `memory` has the common model, and the further metrics
      `clusters_found`, `merged` (clusters of the cohort that have merged into others) and `capacity_reached` (clients
      without a model). A client that was not in training is observed, and joins the most similar cluster if that is
      similar enough, else it is served the common model. One whose update from the anchor is not finite trains the
      common model, and is observed again. Cost of a round: two local trainings a client,
      `observe_epochs` steps of the new ones, `3 C² D` operations; memory `O(N D + K D)`. Bytes: two models down and
      up, of a client without a cluster's model one, and once one more.

    Raises:
      ValueError: `max_clusters` larger than the number of clients; as in `jfcl.fedavg`.

    Source: Stochastic Clustered Federated Learning (2023). In the authors' code the common model is trained by one
    client of the cohort after the other; here it is FedAvg's. Of two clusters that merge, the one with the smaller id
    gives its model, or the other one, if that has a model and more clients; without a model, the common one.

    Example:
      >>> import jax, jfcl, numpy as np, optax
      >>> task = jfcl.models.task(lambda _: {"b": jax.numpy.full((), 3.0)}, lambda p, x: x + p["b"], kind="regression")
      >>> y = np.repeat(np.float32([1, 5, 1, 5]), 4).reshape(4, 4)
      >>> clients = jfcl.Clients({"x": np.zeros((4, 4), np.float32), "y": y}, np.full(4, 4, np.int32))
      >>> algorithm = jfcl.stocfl(task, jfcl.local_training(optax.sgd(0.5), num_steps=9), prox=0.0)
      >>> state, _ = jfcl.rollout(algorithm, clients, key=jax.random.key(0), num_rounds=2)
      >>> np.round(state.params["b"][state.cluster], 1).tolist()
      [1.0, 5.0, 1.0, 5.0]
    """
    start, options["init_params"] = options["init_params"], None
    observing = training._replace(num_steps=observe_epochs, num_epochs=None, batch_size=None, prox=0.0, keep="nothing")
    rules = Averaging(task, training, 1, **options)
    common = averaging(rules)
    near = rules._replace(training=training._replace(prox=prox))

    def observe(anchor, key, examples, size):
        key = jax.random.fold_in(key, OBSERVE_STREAM)
        return update_of(task, observing, key, anchor, examples, size).astype(jnp.float32)

    def init(key: jax.Array, clients: Clients) -> AveragingState:
        n = num_clients(clients)
        check_at_most_clients("max_clusters", max_clusters, n)
        k = n if max_clusters is None else max_clusters
        anchor = jax.tree.map(lambda p: p[0], phases.initial_models(task, key, 1, start))
        state = inner.init(near._replace(num_clusters=k, init_params=anchor), key, clients)
        of_all = inner.init(rules._replace(init_params=anchor), key, clients)
        dim = ravel_clients(trained_part(task, of_all.params)).shape[1]
        rows, none, seen = jnp.arange(k, dtype=jnp.int32), jnp.zeros(k, jnp.int32), jnp.zeros((n, dim), jnp.float32)
        memory = Partition(anchor, of_all, seen, rows, none, none, jnp.zeros((), jnp.int32))
        return state._replace(memory=memory)

    def step(key: jax.Array, state: AveragingState, clients: Clients):
        memory, k = state.memory, len(state.memory.size)
        omega = jax.tree.map(lambda p: p[0], memory.common.params)
        of_all, of_common = common.step(key, memory.common, clients)
        assign = partial(_assign, near, partial(observe, memory.anchor), observe_epochs, merge_threshold, omega)
        state, metrics = assigned_step(near._replace(num_clusters=k, anchor=omega), assign, key, state, clients)
        for name in ("bytes_up", "bytes_down", "client_steps"):
            metrics[name] = metrics[name] + of_common[name]
        # Clients without a model of a cluster have trained the common one only.
        metrics["loss"] = jnp.where(state.cluster < 0, of_common["loss"], metrics["loss"])
        return state._replace(memory=state.memory._replace(common=of_all)), metrics

    def adopt(state: AveragingState, clients: Clients) -> Served:
        memory, k, n = state.memory, len(state.memory.size), num_clients(clients)
        new, zeros = Cohort(clients, None, jax.random.key(0)), jnp.zeros((n, memory.seen.shape[1]), jnp.float32)
        look = partial(observe, memory.anchor)
        updates = embedded_again(rules, look, new, jnp.asarray(clients.size) > 0, zeros)
        usable = jnp.isfinite(updates).all(axis=1)
        updates = jnp.where(usable[:, None], updates, 0.0)
        member = (state.unchanged != UNSEEN) & (state.cluster >= 0)
        row = jnp.where(member, memory.into[state.cluster], k)
        sums = jax.ops.segment_sum(memory.seen, row, k + 1)[:-1]  # cosines do not ask for a mean
        similar = pairwise_cosine(jnp.concatenate([updates, sums]))[:n, n:]
        similar = jnp.where((memory.size > 0)[None, :], similar, -3.0)
        nearest = jnp.argmax(similar, axis=1).astype(jnp.int32)
        return _served(state, jnp.where(usable & (similar.max(axis=1) >= merge_threshold), nearest, -1))

    return Algorithm(init, step, task, serve=lambda state, clients: _served(state), adopt=adopt)


@jax.jit  # one program, since evaluations call it by itself
def _served(state: AveragingState, row: jax.Array | None = None) -> Served:
    """Returns the models of the clusters in `row`, by default the clients' own; the common model, first, for -1.

    It is the first, since there may be more rows of clusters where padding clients fill up the devices.
    """
    memory = state.memory
    if row is None:
        row = jnp.where(state.unchanged == UNSEEN, -1, state.cluster)
    models = jax.tree.map(lambda c, p: jnp.concatenate([c, p]), memory.common.params, state.params)
    to = jnp.where(row < 0, 0, memory.into[jnp.maximum(row, 0)] + 1).astype(jnp.int32)
    return Served(models, to, active=jnp.insert(memory.size > 0, 0, True))


def _assign(rules, observe, observe_epochs, threshold, omega, cohort: Cohort, state: AveragingState) -> Assignment:
    """Observes new clients, and merges the clusters of the cohort."""
    memory, ids, counts = state.memory, client_ids(cohort.clients), cohort.clients.size
    k, real = len(memory.size), jnp.asarray(counts) > 0
    last, unchanged, seen = phases.take_rows(cohort, (state.cluster, state.unchanged, memory.seen))
    is_new = real & (unchanged == UNSEEN)
    seen = embedded_again(rules, observe, cohort, is_new, seen)
    finite = jnp.isfinite(seen).all(axis=1)
    usable = real & finite
    row = jnp.where((unchanged == UNSEEN) | (last < 0), -1, memory.into[jnp.maximum(last, 0)])
    first, size = (jnp.where(row >= 0, x[row], single) for x, single in ((memory.first, ids), (memory.size, 1)))

    merge = over_columns(rules.client_axis, partial(_unions, threshold))
    place, stands, root, sizes, models, merged = merge(seen, usable, first, size, row)[1]
    places = jnp.arange(len(ids), dtype=jnp.int32)
    union = root[place]

    # The row of a union: that of its model, else the lowest that one of its clusters has, else the next free one.
    lowest = jax.ops.segment_min(jnp.where(usable & (row >= 0), row, k), union, len(ids))[union]
    lacks = stands & (root == places) & (lowest == k)
    rank = (lacks[None, :] & (first[None, :] < first[union][:, None])).sum(axis=1)
    free = memory.taken + rank
    target = jnp.where(lowest < k, lowest, jnp.where(free < k, free, -1))
    target = jnp.where(models[union] >= 0, models[union], target)
    target = jnp.where(usable, target, row).astype(jnp.int32)

    # The clusters after it.
    old_row = jnp.where(usable & (row >= 0), row, k)
    into = memory.into.at[old_row].set(target, mode="drop")
    new_row = jnp.where(usable & (target >= 0), target, k)
    new = memory._replace(
        seen=phases.put_rows(cohort, memory.seen, jnp.where(finite[:, None], seen, 0.0)),
        into=into[into],
        first=memory.first.at[new_row].set(first[union], mode="drop"),
        size=memory.size.at[old_row].set(0, mode="drop").at[new_row].set(sizes[union], mode="drop"),
        taken=memory.taken + (lacks & (free < k)).sum(dtype=jnp.int32),
    )
    is_fresh = jnp.zeros(k, bool).at[jnp.where(models[union] < 0, new_row, k)].set(True, mode="drop")
    fresh = jax.tree.map(lambda f, p: jnp.broadcast_to(f, p.shape), omega, state.params)
    begin = where_rows(is_fresh, (fresh, rules.initial_server(fresh)), (state.params, state.server))
    metrics = {"clusters_found": new.size > 0, "merged": merged, "capacity_reached": usable & (target < 0)}
    once, alone = is_new.astype(jnp.float32), (target < 0).astype(jnp.float32)  # the latter train the common model only
    sent = (once - alone) * float(num_bytes(memory.anchor))
    of_cluster = local.steps_per_round(rules.training, counts, max_examples(cohort.clients)).astype(jnp.float32)
    return Assignment(
        target,
        new,
        begin,
        assigned=usable | (unchanged != UNSEEN),
        bytes_up=sent,
        bytes_down=sent,
        steps=once * float(observe_epochs) - alone * of_cluster,
        metrics={name: values.sum().astype(jnp.int32) for name, values in metrics.items()},
    )


def _unions(threshold, seen, usable, first, size, row):
    """Merges clusters by falling similarity down to the threshold, transitively; the smaller id stays.

    A cluster stands at the place of its first client in the cohort. `seen` `[C, D]` are the clients' first updates, of
    which those that are `usable` `[C]` count; `first`, `size`, `row` `[C]` are of their clusters: the least id, the
    number of clients, the row.

    Returns:
      `((), (place [C], stands [C], root [C], size [C], model [C], merged []))`: where the cluster of a client stands,
      the places with a cluster, the place of the smallest id in the union of each place, and there the number of its
      clients, and the row of the model that it starts from, -1 without one.
    """
    same = usable[:, None] & usable[None, :] & (first[:, None] == first[None, :])
    place = jnp.argmax(same, axis=1)
    stands = usable & (place == jnp.arange(len(usable), dtype=jnp.int32))
    member = (same & stands[None, :]).astype(seen.dtype)
    means = jnp.matmul(member.T, jnp.where(usable[:, None], seen, 0.0), precision=jax.lax.Precision.HIGHEST)
    similar = pairwise_cosine(means / jnp.maximum(member.sum(axis=0), 1)[:, None], mask=stands)
    count, places = len(stands), jnp.arange(len(stands), dtype=jnp.int32)
    tree = linkage_tree(1.0 - similar, "single", mask=stands)
    empty = places[:-1] < count - stands.sum()  # merges of places without a cluster, which change none
    applies = empty | (tree[:, 2] <= 1.0 - threshold)
    first, size, model = jnp.where(stands, first, INT32_MAX), jnp.where(stands, size, 0), jnp.where(stands, row, -1)

    def union(i, carry):
        place_of, root, size, model = carry  # of a node of the tree: the place at which its cluster stands
        a, b = place_of[tree[i, :2].astype(jnp.int32)]
        a, b = jnp.where(first[a] <= first[b], a, b), jnp.where(first[a] <= first[b], b, a)
        model = model.at[a].set(jnp.where((size[a] < size[b]) & (model[b] >= 0), model[b], model[a]))
        return place_of.at[count + i].set(a), jnp.where(root == b, a, root), size.at[a].add(size[b]), model

    unions = places, size, model
    if count > 1:
        with at_most(count - 1):
            carry = jnp.concatenate([places, places[1:]]), *unions
            _, *unions = jax.lax.fori_loop(0, applies.sum(), union, carry)
    return (), (place, stands, *unions, (applies & ~empty).sum())
