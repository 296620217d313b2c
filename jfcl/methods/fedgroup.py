"""FedGroup (Duan et al. 2021) and FlexCFL (Duan et al. 2022): groups of clients by the directions of first updates."""

import zlib
from functools import partial
from typing import Annotated, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from jfcl import mapping
from jfcl.core.checks import check, is_number
from jfcl.core.clients import Cohort, mask, num_clients, random_order, take_clients
from jfcl.core.options import MOST_REPEATED, Interval, OneOf, Range, Real
from jfcl.core.parameters import is_finite, num_bytes, path_flags, trained_part
from jfcl.core.types import Algorithm, Clients, PyTree, Served, Task
from jfcl.kernels import cut, cut_by_silhouette, linkage_tree, pairwise_cosine, principal_vectors, profile_distances
from jfcl.kernels.base import rows_of
from jfcl.mapping.columns import on_copies
from jfcl.methods import round as phases
from jfcl.methods.assigned import UNSEEN, Assignment, assigned, embedded, embedded_again
from jfcl.methods.averaging import Averaging, AveragingState, state_of
from jfcl.methods.number import Most, Number, clusters_of, of_scores
from jfcl.methods.once import labels_of, with_first_costs
from jfcl.methods.options import AVERAGING, SCOPES, Options, factory
from jfcl.robust.aggregate import cluster_mean, filled_means, ravel_clients
from jfcl.training import local
from jfcl.training.losses import indexable

MEASURES = ("edc", "madc")
COLD_STREAM = zlib.crc32(b"first update of a client")  # folded into a client's key
ROUNDING = 1e-6  # of shares of labels: those of the same labels may differ between two programs
NONE = -2.0  # in the place of the cosine of no update, or to a group without members


class Groups(NamedTuple):
    """The memory of FedGroup.

    Attributes:
      start: the common start.
      directions: `[K, D]`, the groups' mean first updates.
      shares: `[N, classes]`, with `migrate` the shares of labels; else `()`.
      scores: `[K + 1]`, with `"auto"` the mean silhouettes by the number of groups; else `()`.
    """

    start: PyTree
    directions: jax.Array
    shares: jax.Array | tuple[()]
    scores: jax.Array | tuple[()]


@factory(*AVERAGING, *SCOPES)
def fedgroup(
    task: Task,
    training: local.LocalTraining,
    *,
    num_clusters: Number,
    most_clusters: Most = 15,
    pretrain_steps: Annotated[int, Range(1, MOST_REPEATED)] = 50,
    pretrain_clients: Annotated[int | None, Range(1)] = None,
    measure: Annotated[str, OneOf(MEASURES)] = "edc",
    mixing: Annotated[Real, Interval("[0, inf)")] = 0.0,
    migrate: Annotated[Real | None, Interval("[0, 1]")] = None,
    **options: Unpack[Options],
) -> Algorithm:
    """Groups clients by the directions of their updates from a common start, each client once; FedAvg runs inside.

    Some clients train from the start before the first round, and are clustered. Later a client that takes part for the
    first time does the same (a cold start), and joins the group whose mean update is most similar to its own.

    Args:
      task, training: as in `jfcl.fedavg`.
      num_clusters: `K`, the number of groups; `"auto"`: that of the largest mean silhouette, in Ward's dendrogram of
        the cosines, or that of `"madc"` (see `jfcl.kernels.cut_by_silhouette`).
      most_clusters: the number of models with `"auto"`, and so the most groups.
      pretrain_steps: local steps from the common start.
      pretrain_clients: clients that are clustered before the first round; default: `20 K`, or all.
      measure: how updates are clustered: `"edc"`, by k-means of their cosines to the first `K` left singular vectors of
        all; `"madc"`, by complete linkage of the mean difference of two clients' cosines to all others.
      mixing: `η`, the weight with which the other groups' models, scaled to length 1, enter each model after a round,
        also those of groups without clients in the cohort.
      migrate: FlexCFL: a client whose shares of labels have changed by more than this, in total variation, since it
        joined its group starts cold again in its next round, on all examples that it then has; 0.1 stands for the
        authors' test. Further examples with the same shares of labels, and labels that are renamed without a change of
        their shares, are no reason. Default: never.
      init_params: one model, the common start.

    Returns:
      `Algorithm` with an `AveragingState`, and the further metrics `cold_starts` and `migrations` of a round,
      `clusters_found`, the groups that have been found, and with `"auto"` `silhouettes` `[most_clusters + 1]`, the mean
      ones by the number of groups. A client that has not taken part is served the model of lowest loss; one that was
      not in training starts cold; one whose first update is not finite starts cold again. The first models are the
      means of the pretrained ones, with equal weights. The pretraining is a round of `init`, with its cost in the
      metrics of the first round. Cost of a round: FedAvg's, and `pretrain_steps` for each cold start (where clients are
      mapped by `jax.vmap`, for all of the cohort in a round with one); memory `O(P D)` for `P` pretrained clients in
      `init`. Bytes: a model down and up for each pretraining and cold start, beside FedAvg's.

    Raises:
      ValueError: `K` larger than the number of clients, or of those that are pretrained; `migrate` for a task without
        classes; as in `jfcl.fedavg`.

    Source: FedGroup: Efficient Clustered Federated Learning via Decomposed Data-Driven Measure (Duan, Liu, Ji, Wu,
    Liang, Chen, Tan, Ren 2021); Flexible Clustered Federated Learning for Client-Level Data Distribution Shift (Duan,
    Liu, Ji, Wu, Liang, Chen, Tan 2022). The authors' code for migration compares counts of labels as if they were
    values, so that permuted labels are no change.

    Example:
      >>> import jax, jfcl, numpy as np, optax
      >>> task = jfcl.models.task(lambda _: {"b": jax.numpy.full((), 3.0)}, lambda p, x: x + p["b"], kind="regression")
      >>> y = np.repeat(np.float32([1, 5, 1, 5]), 4).reshape(4, 4)
      >>> clients = jfcl.Clients({"x": np.zeros((4, 4), np.float32), "y": y}, np.full(4, 4, np.int32))
      >>> algorithm = jfcl.fedgroup(task, jfcl.local_training(optax.sgd(0.25), num_steps=1), num_clusters=2)
      >>> state = algorithm.init(jax.random.key(0), clients)
      >>> np.round(state.params["b"][state.cluster], 1).tolist()
      [1.0, 5.0, 1.0, 5.0]
    """
    auto = num_clusters == "auto"
    k = most_clusters if auto else num_clusters
    wanted = 20 * k if pretrain_clients is None else pretrain_clients
    check(auto or wanted >= k, "pretrain_clients", pretrain_clients, f"at least the {k} groups")
    check(migrate is None or task.num_classes is not None, "migrate", migrate, "left out for a task without classes")
    cold = training._replace(num_steps=pretrain_steps, num_epochs=None, keep="nothing")
    rules = Averaging(task, training, k, at_most_clients=not auto, **options)
    grouping = Grouping(rules, auto, cold, wanted, measure, migrate)
    rules = rules._replace(init_params=None)
    if not is_number(mixing) or mixing > 0:
        rules = rules._replace(learn=partial(_mix, rules, mixing))
    grouped = assigned(rules, partial(_assign, grouping), remember=partial(_remember, grouping))
    grouped = grouped._replace(adopt=partial(_adopt, grouping))
    costs = {"messages": 1, "rounds": 1, "more_steps": rules.personal_steps}
    return with_first_costs(grouped, cold, **costs, cohort=wanted)


class Grouping(NamedTuple):
    """The arguments of FedGroup: `cold` trains the first updates, `count` clients send theirs in `init`."""

    rules: Averaging
    auto: bool
    cold: local.LocalTraining
    count: int
    measure: str
    migrate: Real | None


def _first_update(grouping: Grouping, start: PyTree, key, examples, size, personal) -> tuple[PyTree, jax.Array]:
    """Returns the update of one client from the common start, and whether it is finite and of any examples."""
    rules = grouping.rules._replace(training=grouping.cold)
    key, args = jax.random.fold_in(key, COLD_STREAM), (examples, size, (), jnp.zeros((), jnp.int32))
    _, update, _ = phases.train_scopes(rules, key, indexable(start), personal, *args)
    return update, is_finite(update) & (size > 0)


def _cosines(grouping: Grouping, memory: Groups, key, examples, size, personal) -> jax.Array:
    """Returns the cosines `[K]` of one client's first update to the groups' directions; `NONE` where there is none."""
    update, usable = _first_update(grouping, memory.start, key, examples, size, personal)
    update = ravel_clients(jax.tree.map(lambda u: u[None], trained_part(grouping.rules.task, update)))
    similar = pairwise_cosine(jnp.concatenate([update, memory.directions.astype(update.dtype)]))[0, 1:]
    has_members = (memory.directions != 0).any(axis=1)
    may_join = has_members | ~has_members.any()  # without directions, all groups are alike
    return jnp.where(usable & may_join, similar.astype(jnp.float32), NONE)


def _remember(grouping: Grouping, key: jax.Array, clients: Clients, state: AveragingState) -> AveragingState:
    """Returns the state with the groups of the first clients, and their models."""
    rules, k, n = grouping.rules, grouping.rules.num_clusters, num_clients(clients)
    order_key, means_key, start_key, train_key = jax.random.split(key, 4)
    start, first = phases.initial_models(rules.task, start_key, 1, rules.init_params), jnp.zeros(n, jnp.int32)
    start, personal = phases.initial_scopes(rules.personal, start, first)
    start = jax.tree.map(lambda p: p[0], start)

    # Train some clients from the common start, and cluster their updates.
    rows = random_order(order_key, clients)[: min(grouping.count, n)]
    cohort = Cohort(take_clients(clients, rows), rows, train_key)
    shares = ()
    if grouping.migrate is not None:
        shares = jnp.zeros((n, rules.task.num_classes), jnp.float32).at[rows].set(_shares(cohort.clients, rules.task))
    train = partial(_first_update, grouping, start)
    updates, usable = embedded(rules, train, cohort, phases.take_rows(cohort, personal))
    flat = ravel_clients(trained_part(rules.task, updates))
    group = partial(_groups, num_clusters=k, auto=grouping.auto, measure=grouping.measure)
    group, scores = on_copies(rules.client_axis, group)(flat, means_key, usable)

    # A group without clients starts at the mean of all.
    counts, in_order = usable.astype(jnp.float32), mapping.chunked(1)
    still = jax.tree.map(lambda u: jnp.zeros_like(u[:1]), updates)
    mean = filled_means(rules, updates, group, counts, in_order, still)
    models = jax.tree.map(lambda s, m: s[None] + m, start, mean)

    seen = jnp.zeros(n, jnp.int32).at[rows].set(usable.astype(jnp.int32))
    directions = cluster_mean(flat, group, counts, k, in_order)
    memory, cluster = Groups(start, directions, shares, scores), first.at[rows].set(jnp.where(usable, group, 0))
    return state_of(rules, clients, cluster, models, personal, memory)._replace(unchanged=seen)


def _assign(grouping: Grouping, cohort: Cohort, state: AveragingState) -> Assignment:
    """Gives a cold start to clients that take part for the first time, or whose labels have changed."""
    memory, size = state.memory, jnp.asarray(cohort.clients.size)
    last, unchanged, personal = phases.take_rows(cohort, (state.cluster, state.unchanged, state.personal))
    moved = jnp.zeros(len(size), bool)
    if grouping.migrate is not None:
        shares, before = _shares(cohort.clients, grouping.rules.task), phases.take_rows(cohort, memory.shares)
        change = jnp.abs(shares - before).sum(axis=1) / 2
        moved = (size > 0) & (unchanged != UNSEEN) & (change > jnp.maximum(grouping.migrate, ROUNDING))
    is_cold = ((size > 0) & (unchanged == UNSEEN)) | moved
    none = jnp.full((len(size), grouping.rules.num_clusters), NONE, jnp.float32)
    similar = embedded_again(grouping.rules, partial(_cosines, grouping, memory), cohort, is_cold, none, personal)
    joins = is_cold & (similar.max(axis=1) > NONE)
    cluster = jnp.where(joins, jnp.argmax(similar, axis=1).astype(jnp.int32), last)
    if grouping.migrate is not None:
        shares = jnp.where(joins[:, None], shares, before)
        memory = memory._replace(shares=phases.put_rows(cohort, memory.shares, shares))
    cold = is_cold.astype(jnp.float32)
    steps = cold * float(grouping.cold.num_steps + (grouping.rules.personal_steps or 0))
    model = cold * float(num_bytes(memory.start))
    has_members = (memory.directions != 0).any(axis=1)
    counts = {"cold_starts": is_cold, "migrations": moved, "clusters_found": has_members}
    metrics = {name: which.sum().astype(jnp.int32) for name, which in counts.items()} | of_scores(memory.scores)
    seen = joins | (unchanged != UNSEEN)
    return Assignment(cluster, memory, assigned=seen, bytes_up=model, bytes_down=model, steps=steps, metrics=metrics)


def _adopt(grouping: Grouping, state: AveragingState, clients: Clients) -> Served:
    """Gives a cold start to clients that were not in training, with the mean of the personal parameters of members."""
    n, new, member = num_clients(clients), Cohort(clients, None, jax.random.key(0)), state.unchanged != UNSEEN
    personal = phases.personal_of_newcomers(state.personal, member | ~member.any(), n)
    compare = partial(_cosines, grouping, state.memory)
    none = jnp.full((n, grouping.rules.num_clusters), NONE, jnp.float32)
    similar = embedded_again(grouping.rules, compare, new, jnp.asarray(clients.size) > 0, none, personal)
    to = jnp.argmax(similar, axis=1).astype(jnp.int32)
    return Served(state.params, to, personal)


@partial(jax.jit, static_argnames=("num_clusters", "auto", "measure"))
def _groups(updates, key, usable, *, num_clusters, auto, measure):
    """Returns the group `[P]` int32 of each pretrained client, by its update `[P, D]`, and the silhouettes."""
    if measure == "edc":
        principal = principal_vectors(updates, num_clusters, mask=usable)[0]
        both = pairwise_cosine(jnp.concatenate([updates, principal.astype(updates.dtype)]))
        cosines = both[: len(updates), len(updates) :]
        group, scores = clusters_of(cosines, key, usable, num_clusters=num_clusters, auto=auto)
        return jnp.maximum(group, 0), scores
    distances = profile_distances(pairwise_cosine(updates, mask=usable), mask=usable)
    if auto:
        chosen = cut_by_silhouette(distances, most=num_clusters, linkage="complete", mask=usable)
        return chosen.cluster, chosen.scores
    return cut(linkage_tree(distances, "complete", mask=usable), num_clusters=min(num_clusters, len(updates))), ()


def _shares(clients: Clients, task: Task) -> jax.Array:
    """Returns each client's shares of labels, `[C, classes]`."""
    y = labels_of(clients, "migrate compares their shares")
    counts = jax.nn.one_hot(y, task.num_classes) * mask(clients)[:, :, None].astype(jnp.float32)
    counts = counts.sum(axis=1)
    return counts / jnp.maximum(counts.sum(axis=1), 1)[:, None]


def _mix(rules: Averaging, mixing, state: AveragingState, metrics, cohort: Cohort, report, clients):
    """Mixes the model of each group with those of the others, scaled to length 1, by `mixing`: `Averaging.learn`."""
    params, k = state.params, rules.num_clusters
    has_members = (state.memory.directions != 0).any(axis=1)
    norms = jnp.sqrt(sum(jnp.square(x).sum(axis=1) for x in rows_of(trained_part(rules.task, params))))
    scale = jnp.where(has_members & (norms > 0), mixing / jnp.where(norms > 0, norms, 1.0), 0.0)
    weights = jnp.where(jnp.eye(k, dtype=bool), 1.0, jnp.where(has_members[:, None], scale[None, :], 0.0))
    weights = weights / weights.sum(axis=1, keepdims=True)

    def mix(is_shared, p):
        return p if is_shared else jnp.tensordot(weights.astype(p.dtype), p, 1, precision=jax.lax.Precision.HIGHEST)

    flags = path_flags(rules.shared or (lambda path: False), params)
    return state._replace(params=jax.tree.map(mix, flags, params)), metrics
