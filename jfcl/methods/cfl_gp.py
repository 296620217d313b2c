"""CFL-GP (Kim, Kim, de Veciana 2024): clusters of clients by their gradients at all models, averaged over rounds."""

from functools import partial
from typing import Annotated, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax

from jfcl.core.checks import check
from jfcl.core.clients import Cohort, client_ids, num_clients, server_key
from jfcl.core.options import MOST_ADDED, Range
from jfcl.core.parameters import num_bytes, trained_part
from jfcl.core.types import Algorithm, Clients, Task
from jfcl.kernels import kmeans, least_cost_assignment, principal_vectors
from jfcl.kernels.dendrogram import number_by_first
from jfcl.methods.assigned import UNSEEN, Assignment, assigned, embedded, update_of
from jfcl.methods.averaging import Averaging, AveragingState
from jfcl.methods.options import AVERAGING, Count, Options, factory
from jfcl.methods.round import put_rows, take_rows
from jfcl.robust.aggregate import ravel_clients
from jfcl.training import local
from jfcl.training.losses import under_all


class Profiles(NamedTuple):
    """The mean gradients of each client at each model, `[N, K, D]`, and the number of gradients in them, `[N, K]`."""

    gradients: jax.Array
    count: jax.Array


@factory(*AVERAGING)
def cfl_gp(
    task: Task,
    training: local.LocalTraining,
    *,
    num_clusters: Count,
    period: Annotated[int, Range(1, MOST_ADDED)] = 2,
    clustered_rounds: Annotated[int, Range(1, MOST_ADDED)] = 10,
    **options: Unpack[Options],
) -> Algorithm:
    """Clusters the clients by their gradients at all models, averaged over rounds; FedAvg runs in each cluster.

    In every second round of a first phase, all clients of the cohort send their gradients at the same model; the models
    take turns. The mean gradients at all models are a client's profile. Profiles are reduced to `K` numbers and
    clustered by k-means, and the clusters are matched with the models so that most clients keep theirs.

    Args:
      task, training: as in `jfcl.fedavg`.
      num_clusters: `K`, the number of models.
      period: clients are clustered in the first round, and in every `period`-th after it.
      clustered_rounds: the number of rounds after which clients are no longer clustered.
      init_params: a model for each cluster, stacked, or one; default: random ones.

    Returns:
      `Algorithm` with an `AveragingState`, and the further metrics `clustered` (1 in a round that clusters its clients,
      else 0) and `moved`, the number of clients with another cluster than before. A client that takes part without
      having been clustered trains the model of lowest loss, and is served it, as are clients that were not in
      training; one whose gradient is not finite keeps its cluster. Cost of a round: FedAvg's; with clustering, a
      gradient of each client and `C² K D` multiplications more; else `K` forward passes where clients have no cluster.
      Memory `O(N K D)`. Bytes: with clustering, a gradient up, and a model down for clients of other clusters than that
      of the model in turn; else all models down for clients without a cluster.

    Raises:
      ValueError: more clusters than clients in a round; as in `jfcl.fedavg`.

    Source: Clustered Federated Learning via Gradient-based Partitioning (ICML 2024). The paper's text was not
    available; this is the authors' code (github.com/Heasung-Kim/clustered-federated-learning-via-gradient-based-
    partitioning, 0b1b4dd) and their poster. In the code the model in turn is always the first, and the gradient of a
    client is at the model of its own cluster; here all clients are asked for the same one, as on the poster, and the
    models take turns, as the weights of the code's mean imply. There all clients have equal weights
    (`weights="equal"`), and train before they are clustered: an update from the model of the old cluster moves that of
    the new one. A gradient is computed on all examples, there on a batch. Neither says anything of cohorts: here
    absentees keep their profile and cluster, and where a client has not sent a gradient at a model, the mean of the
    other clients stands in its profile.

    Example:
      >>> import jax, jfcl, numpy as np, optax
      >>> task = jfcl.models.task(lambda key: {"b": jax.random.normal(key)}, lambda p, x: x + p["b"], kind="regression")
      >>> y = np.repeat(np.float32([1, 5, 1, 5]), 4).reshape(4, 4)
      >>> clients = jfcl.Clients({"x": np.zeros((4, 4), np.float32), "y": y}, np.full(4, 4, np.int32))
      >>> algorithm = jfcl.cfl_gp(task, jfcl.local_training(optax.sgd(0.5), num_steps=1), num_clusters=2)
      >>> state, _ = jfcl.rollout(algorithm, clients, key=jax.random.key(0), num_rounds=2)
      >>> np.round(state.params["b"][state.cluster], 1).tolist()
      [1.0, 5.0, 1.0, 5.0]
    """
    k, size = num_clusters, options["cohort"]
    check(size is None or k <= size, "num_clusters", k, f"at most the {size} clients of a cohort")
    rules = Averaging(task, training, k, at_most_clients=True, **options)
    one_step = local.local_training(optax.sgd(1.0), num_steps=1)  # its update is the gradient, with the other sign

    def remember(key: jax.Array, clients: Clients, state: AveragingState) -> AveragingState:
        n = num_clients(clients)
        dim = ravel_clients(trained_part(task, state.params)).shape[1]
        return state._replace(memory=Profiles(jnp.zeros((n, k, dim)), jnp.zeros((n, k), jnp.int32)))

    def assign(cohort: Cohort, state: AveragingState) -> Assignment:
        real, ids = jnp.asarray(cohort.clients.size) > 0, client_ids(cohort.clients)
        last, unchanged, profiles = take_rows(cohort, (state.cluster, state.unchanged, state.memory))
        turn = (state.round // period) % k
        in_turn = jax.tree.map(lambda p: p[turn], state.params)
        has_cluster, fresh = unchanged != UNSEEN, real & (unchanged == UNSEEN)

        def gradient(key, examples, size):
            return update_of(task, one_step, key, in_turn, examples, size).astype(profiles.gradients.dtype)

        def cluster_them():
            sent = embedded(rules, gradient, cohort)
            usable = real & jnp.isfinite(sent).all(axis=1)
            share = 1.0 / (profiles.count[:, turn] + 1).astype(sent.dtype)
            before = profiles.gradients[:, turn]
            mean = before + share[:, None] * (jnp.where(usable[:, None], sent, before) - before)
            gradients = profiles.gradients.at[:, turn].set(mean)
            count = profiles.count.at[:, turn].add(usable.astype(jnp.int32))
            new = Profiles(gradients, count)
            cluster = _clusters(new, usable, has_cluster, last, ids, server_key(cohort.key), num_clusters=k)
            return new, cluster, usable

        def keep():
            of_all = under_all(task, state.params)
            losses = partial(embedded, rules, lambda key, examples, size: of_all(examples, size)[0], cohort)
            lowest = jax.lax.cond(fresh.any(), lambda: jnp.argmin(losses(), axis=1).astype(jnp.int32), lambda: last)
            return profiles, jnp.where(fresh, lowest, last), jnp.zeros_like(has_cluster)

        due = (state.round % period == 0) & (state.round < clustered_rounds)
        profiles, cluster, clustered = jax.lax.cond(due, cluster_them, keep)
        compared = due.astype(jnp.float32)
        for_fresh = fresh.astype(jnp.float32) * (k - 1)
        further = jnp.where(due, (cluster != turn).astype(jnp.float32), for_fresh)  # models besides a client's own
        metrics = {"clustered": compared, "moved": (has_cluster & (cluster != last)).sum().astype(jnp.int32)}
        return Assignment(
            cluster,
            put_rows(cohort, state.memory, profiles),
            assigned=has_cluster | clustered,
            bytes_up=compared * float(num_bytes(trained_part(task, in_turn))),
            bytes_down=float(num_bytes(in_turn)) * further,
            steps=compared,
            metrics=metrics,
        )

    inside = assigned(rules, assign, remember=remember)

    def step(key: jax.Array, state: AveragingState, clients: Clients):
        state, metrics = inside.step(key, state, clients)
        return state._replace(cluster=jnp.maximum(state.cluster, 0)), metrics  # -1: it had none, and changed no model

    return inside._replace(step=step)


@partial(jax.jit, static_argnames="num_clusters")
def _clusters(profiles, usable, has_cluster, last, ids, key, *, num_clusters):
    """Returns the cluster `[C]` of each client; those not `usable` keep `last`, or get -1 without `has_cluster`."""
    # In the place of gradients that a client has not sent are the means of those of the others.
    has = (usable[:, None] & (profiles.count > 0))[..., None]
    gradients = jnp.where(has, profiles.gradients, 0.0)
    mean = gradients.sum(axis=0) / jnp.maximum(has.sum(axis=0), 1).astype(gradients.dtype)
    gradients = jnp.where(has, gradients, mean[None])
    # Clients stand in the order of their ids, by which clusters are numbered too: the draws of k-means follow it.
    order = jnp.argsort(jnp.where(usable, ids, jnp.iinfo(jnp.int32).max))
    points = jnp.where(usable[:, None], gradients.reshape(len(gradients), -1), 0.0)[order]
    vectors = principal_vectors(points, num_clusters, mask=usable[order])[0]
    reduced = jnp.matmul(points, vectors.T, precision=jax.lax.Precision.HIGHEST)
    cluster = jnp.maximum(kmeans(reduced, num_clusters, key=key, mask=usable[order]).cluster, 0)
    cluster = jnp.zeros_like(cluster).at[order].set(number_by_first(cluster, num_clusters))
    # Permute the numbers to those that most clients have.
    same = usable & has_cluster
    new, old = (jax.nn.one_hot(jnp.where(same, x, -1), num_clusters) for x in (cluster, last))
    model = least_cost_assignment(-jnp.matmul(new.T, old, precision=jax.lax.Precision.HIGHEST))[cluster]
    return jnp.where(usable, model, jnp.where(has_cluster, last, -1)).astype(jnp.int32)
