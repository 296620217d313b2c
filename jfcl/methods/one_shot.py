"""One-shot clustering of local models (Ghosh, Hong, Yin, Ramchandran 2019; IFCA's Algorithm 1 and baseline)."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp

from jfcl import mapping
from jfcl.core import Algorithm, Clients, PyTree, Task, divided, trained_part
from jfcl.kernels.base import DENSE_UP_TO
from jfcl.mapping.columns import over_columns
from jfcl.methods.averaging import Averaging, AveragingState
from jfcl.methods.number import Most, Number, clusters_of, of_scores
from jfcl.methods.once import clustered_once, clusters_in_use
from jfcl.methods.options import AVERAGING, SCOPES, Options, Rounds, factory
from jfcl.methods.personal import initial_state, train_alone
from jfcl.methods.round import weights_of
from jfcl.robust.aggregate import attacked_models, filled_means, ravel_clients
from jfcl.training import local


@factory(*AVERAGING, *SCOPES)
def one_shot(
    task: Task,
    training: local.LocalTraining,
    *,
    num_clusters: Number,
    most_clusters: Most = 15,
    local_rounds: Rounds = 10,
    **options: Unpack[Options],
) -> Algorithm:
    """Clusters the clients once, by k-means of models trained alone; then runs FedAvg inside each cluster.

    Args:
      task, training: as in `jfcl.fedavg`.
      num_clusters: `K`; `"auto"`: the number of clusters is that of the largest mean silhouette in Ward's dendrogram
        of the models (see `jfcl.kernels.cut_by_silhouette`).
      most_clusters: the number of models with `"auto"`, and so the most clusters.
      local_rounds: rounds (of `training`) that clients train alone before that, from one common model. They happen in
        `init`: a simulation counts them before its own, and their cost is in the metrics of its first round.
      init_params: one model that all start from.

    Returns:
      `Algorithm` with an `AveragingState`, and the further metrics `clusters_found` and, with `"auto"`, `silhouettes`
      `[most_clusters + 1]`, the mean ones by the number of clusters. Statistics are not compared. The models start at
      the means of their clients' models, shared parameters at the mean of all clients'. Cost of `init`: `local_rounds`
      local trainings of all, k-means of `N` points, `O(N D)` memory, with `"auto"` `O(N²)` more; of a round: FedAvg's.

    Raises:
      ValueError: `K` larger than the number of clients, and as in `jfcl.fedavg`.

    Example:
      >>> import jax, jfcl, numpy as np, optax
      >>> task = jfcl.models.task(lambda key: {"b": jax.numpy.zeros(())}, lambda p, x: x + p["b"], kind="regression")
      >>> y = np.repeat(np.float32([1, 5, 1, 5]), 4).reshape(4, 4)
      >>> clients = jfcl.Clients({"x": np.zeros((4, 4), np.float32), "y": y}, np.full(4, 4, np.int32))
      >>> algorithm = jfcl.one_shot(task, jfcl.local_training(optax.sgd(0.25), num_steps=1), num_clusters=2)
      >>> state = algorithm.init(jax.random.key(0), clients)
      >>> sorted(np.round(state.params["b"], 2).tolist()), bool(state.cluster[0] == state.cluster[2])
      ([1.0, 5.0], True)
    """
    auto = num_clusters == "auto"
    rules = Averaging(task, training, most_clusters if auto else num_clusters, at_most_clients=not auto, **options)

    def find(key: jax.Array, clients: Clients):
        return cluster_local_models(rules, key, clients, local_rounds, auto=auto)

    def further(state: AveragingState, clients: Clients) -> dict[str, jax.Array]:
        return {"clusters_found": clusters_in_use(state, clients)} | of_scores(state.memory)

    return clustered_once(rules, find, further=further, messages=1, rounds=local_rounds)


def cluster_local_models(
    rules: Averaging, key: jax.Array, clients: Clients, num_rounds: int, *, auto: bool = False
) -> tuple[jax.Array, PyTree, PyTree, Any]:
    """Clusters the clients by k-means (Lloyd) on the parameters of models that they train alone.

    Statistics are not compared. Clients without examples, or with a last round that has no finite model, are left out,
    and in cluster 0. The attack of an `adversary` is on the difference of what a client sends to what it started from.

    Returns:
      `(cluster [N], means [K, ...], personal [N, ...], scores)`; `personal` is `()` where a client keeps nothing,
      and `scores` are those of `clusters_of`.
    """
    task, client_axis, num_clusters = rules.task, rules.client_axis, rules.num_clusters
    start_key, rounds_key, means_key = jax.random.split(key, 3)

    def one_round(t, carry):
        key = jax.random.fold_in(rounds_key, t)
        state, _, usable = train_alone(rules, key, carry[0], clients)
        return state, usable

    start, size = initial_state(task, rules.training, start_key, clients, rules.init_params), jnp.asarray(clients.size)
    trained, usable = jax.lax.fori_loop(0, num_rounds, one_round, (start, size > 0))
    begin, (models, personal) = divided(rules.personal, start.params)[0], divided(rules.personal, trained.params)
    models, usable = attacked_models(rules.adversary, rounds_key, begin, models, clients, usable)

    def cluster_models(models, key, usable):
        points = ravel_clients(trained_part(task, models))
        return (), clusters_of(points, key, usable, num_clusters=num_clusters, auto=auto)

    if len(size) <= DENSE_UP_TO:
        cluster_models = over_columns(client_axis, cluster_models)
    cluster, scores = cluster_models(models, means_key, usable)[1]
    cluster = jnp.maximum(cluster, 0)
    counts = weights_of(rules.weights, clients) * usable.astype(jnp.float32)
    in_order = client_axis if isinstance(client_axis, mapping.sharded) else mapping.chunked(1)
    # A cluster that k-means left empty starts at the mean of all, or where all started.
    first = jax.tree.map(lambda b: b[:1], begin)
    means = filled_means(rules, models, cluster, counts, in_order, first)
    return cluster, means, personal, scores
