"""CLoVE (Bhatia, Papadis, Kodialam, Lakshman, Chakrabarty 2025): clusters of clients by losses under all models."""

from functools import partial
from typing import Annotated, Any, Unpack

import jax
import jax.numpy as jnp

from jfcl.core.checks import check
from jfcl.core.clients import Cohort, drifts, newest_step, random_order, server_key
from jfcl.core.options import MOST_ADDED, OneOf, Range
from jfcl.core.parameters import with_fixed
from jfcl.core.types import Algorithm, Clients, Entries, Task
from jfcl.kernels import least_cost_assignment
from jfcl.mapping.columns import on_copies
from jfcl.methods.assigned import Assignment, assigned, embedded
from jfcl.methods.averaging import Averaging, AveragingState, bytes_sent
from jfcl.methods.number import MANY, Most, Number, clusters_of, of_scores
from jfcl.methods.options import AVERAGING, SCOPES, Options, factory
from jfcl.methods.round import rows_in_use, take_rows
from jfcl.training import local
from jfcl.training.losses import under_all

FIRST = ("random", "losses")


@factory(*AVERAGING, *SCOPES)
def clove(
    task: Task,
    training: local.LocalTraining,
    *,
    num_clusters: Number,
    most_clusters: Most = 15,
    first: Annotated[str, OneOf(FIRST)] = "random",
    square_root: bool = False,
    stable_rounds: Annotated[int | None, Range(1, MOST_ADDED)] = 3,
    **options: Unpack[Options],
) -> Algorithm:
    """Clusters the clients of each round by the vectors of their losses under all models; then runs FedAvg inside.

    Clients of one distribution have similar losses under every model, even under models that fit none of them. The
    clusters of k-means are assigned to models with the least total loss, so that no two clusters share a model; a model
    without a cluster stays as it is.

    Args:
      task, training: as in `jfcl.fedavg`.
      num_clusters: `K`, the number of models; `"auto"`: in each round, the number of clusters is that of the largest
        mean silhouette in Ward's dendrogram (see `jfcl.kernels.cut_by_silhouette`).
      most_clusters: the number of models with `"auto"`, and so the most clusters.
      first: clusters of the first round: `"random"`, equal parts of its clients, from which the models begin to differ;
        `"losses"`, as in every round.
      square_root: compare the square roots of losses, as the paper's theory does.
      stable_rounds: while every client of a cohort has kept its cluster in its last `stable_rounds` rounds, clients get
        their own model only, and are not clustered. Of drifting data these are rounds of the newest step of time, so
        that clients are clustered again when a step begins. Default: 3; None: never.

    Returns:
      `Algorithm` with an `AveragingState`, and the further metrics `clusters_found`, `compared` (1 in a round that
      clusters its clients, else 0), `nonfinite_losses` (clients with a loss that is not finite, which keep their
      cluster) and, with `"auto"`, `silhouettes` `[most_clusters + 1]`, the mean ones by the number of clusters, NaN
      where it was not tried. A client that has not taken part, or was not in training, is served the model of lowest
      loss. Cost of a round: `K` forward passes over each client's data plus its local training, k-means of `[C, K]`;
      memory `O(chunk D + K D)`. Bytes: each client gets `K` models (shared layers once) and sends one and `K` losses;
      once its cohort is stable, it gets one and sends one.

    Raises:
      ValueError: more clusters than clients in a round; as in `jfcl.fedavg`.

    Source: CLoVE: Personalized Federated Learning through Clustering of Loss Vector Embeddings (Bhatia, Papadis,
    Kodialam, Lakshman, Chakrabarty 2025). The authors' code (github.com/Nokia-Bell-Labs/Loss-Vector-based-Clustered-
    Federated-Learning, b602090) assigns the clients of supervised problems at random at first, and others by losses.
    Its three stable rounds include the one in which a client got its cluster, so that it compares once less
    (`stable_rounds=2`). Once the clusters are stable it never compares again, and ends with an error for a newcomer,
    where this method compares the round's clients. With square roots, it assigns models by the sums of the roots, here
    always of the losses. With an unknown `K` it repeats the clients of a cohort that is not larger than the most
    clusters, so that there are often as many clusters as clients; and k-means finds them, here Ward's dendrogram.

    Example:
      >>> import jax, jfcl, numpy as np, optax
      >>> task = jfcl.models.task(lambda key: {"b": jax.random.normal(key)}, lambda p, x: x + p["b"], kind="regression")
      >>> y = np.repeat(np.float32([1, 5, 1, 5]), 4).reshape(4, 4)
      >>> clients = jfcl.Clients({"x": np.zeros((4, 4), np.float32), "y": y}, np.full(4, 4, np.int32))
      >>> algorithm = jfcl.clove(task, jfcl.local_training(optax.sgd(0.5), num_steps=1), num_clusters=2)
      >>> state, _ = jfcl.rollout(algorithm, clients, key=jax.random.key(0), num_rounds=3)
      >>> sorted(state.params["b"].tolist()), bool(state.cluster[0] == state.cluster[2] != state.cluster[1])
      ([1.0, 5.0], True)
    """
    auto = num_clusters == "auto"
    k, count = most_clusters if auto else num_clusters, options["cohort"]
    check(auto or count is None or k <= count, "num_clusters", k, f"at most the {count} clients of a cohort")
    rules = Averaging(task, training, k, at_most_clients=not auto, **options)
    find = partial(_clusters, num_clusters=k, auto=auto, square_root=square_root)

    def assign(cohort: Cohort, state: AveragingState) -> Assignment:
        size = jnp.asarray(cohort.clients.size)
        last, unchanged, personal = take_rows(cohort, (state.cluster, state.unchanged, state.personal))
        of_all = None if jax.tree.leaves(personal) else under_all(task, state.params)

        def losses(key, examples, size, personal):
            return (of_all or under_all(with_fixed(task, personal), state.params))(examples, size)[0]

        def compare():
            vectors = embedded(rules, losses, cohort, personal)
            find_all = on_copies(rules.client_axis, find)
            cluster, scores, nonfinite = find_all(vectors, size > 0, last, server_key(cohort.key))
            return cluster, jax.tree.map(lambda x: x.astype(jnp.float32), scores), nonfinite, jnp.ones(())

        def keep():
            parts = jnp.argsort(random_order(server_key(cohort.key), cohort.clients)).astype(jnp.int32) % k
            cluster = jnp.where(state.round == 0, parts, last) if first == "random" else last
            untried = jnp.full(k + 1, jnp.nan, jnp.float32) if auto else ()
            return cluster, untried, jnp.zeros((), jnp.int32), jnp.zeros(())

        due = jnp.ones((), bool) if first == "losses" else state.round > 0
        memory = step_begun(state.memory, cohort.clients, state.round)
        if stable_rounds is not None:
            kept = jnp.where(size > 0, unchanged, jnp.iinfo(jnp.int32).max).min() - 1
            due &= jnp.minimum(kept, state.round - memory[1]) < stable_rounds
        cluster, scores, nonfinite, compared = jax.lax.cond(due, compare, keep)
        used = rows_in_use(cluster, size > 0, k)
        metrics = {"clusters_found": used.sum().astype(jnp.int32), "compared": compared, "nonfinite_losses": nonfinite}
        metrics |= of_scores(scores)
        one_model, all_models = bytes_sent(rules, state.params, jnp.ones((), bool))
        costs = {"bytes_up": compared * 4.0 * k, "bytes_down": compared * (all_models - one_model)}
        return Assignment(cluster, memory, metrics=metrics, **costs)

    def remember(key: jax.Array, clients: Clients, state: AveragingState) -> AveragingState:
        return state._replace(memory=jnp.zeros(2, jnp.int32))

    entries = Entries(largest=("nonfinite_losses",), notes=notes)
    return assigned(rules, assign, remember=remember)._replace(entries=entries)


def step_begun(memory: jax.Array, clients: Clients, now: jax.Array) -> jax.Array:
    """Returns `[2]` int32, the newest step of time and the round in which it began, from the last ones, `memory`."""
    if not drifts(clients):
        return memory
    newest = newest_step(clients)
    return jnp.where(newest > memory[0], jnp.stack([newest, now]), memory)


@partial(jax.jit, static_argnames=("num_clusters", "auto", "square_root"))
def _clusters(losses, real, last, key, *, num_clusters, auto, square_root):
    """Returns the models `[C]` of clients with losses `[C, K]`, the silhouettes, and how many have NaN or infinity."""
    vectors = jnp.sqrt(losses) if square_root else losses
    valid = real & jnp.isfinite(vectors).all(axis=1)
    vectors = jnp.where(valid[:, None], vectors, 0.0)
    options = {"num_clusters": num_clusters, "auto": auto, "num_restarts": MANY}
    cluster, scores = clusters_of(vectors, key, valid, **options)
    # Each cluster gets a model, such that the sum of the members' losses is least.
    members = jax.nn.one_hot(cluster, losses.shape[1], dtype=losses.dtype, axis=0) * valid[None, :].astype(losses.dtype)
    total = jnp.matmul(members, jnp.where(valid[:, None], losses, 0.0), precision=jax.lax.Precision.HIGHEST)
    model = jnp.where(valid, least_cost_assignment(total)[jnp.maximum(cluster, 0)], last)
    return model, scores, (real & ~valid).sum().astype(jnp.int32)


def notes(record: dict[str, Any], is_last: bool) -> dict[str, str]:
    """Returns the warning of losses that are not finite."""
    count = record["nonfinite_losses"]
    text = f"{count} client(s) had a loss that is not finite, of one of the models at least, and kept their cluster"
    return {"losses": text} if count and not is_last else {}
