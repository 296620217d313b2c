"""FL+HC (Briggs, Fan, Andras 2020): hierarchical clustering of the clients' updates, once."""

from collections.abc import Callable
from typing import Annotated, Unpack

import jax
import jax.numpy as jnp

from jfcl.core import Algorithm, Clients, Task, attack_key, client_ids, is_finite
from jfcl.core.options import MOST_REPEATED, Interval, OneOf, Range, Real, Search
from jfcl.core.parameters import check_predicate, divided, num_bytes, parameter_names, trained_part
from jfcl.kernels import LINKAGES, cut, linkage_tree, pairwise_cosine, squared_distances
from jfcl.mapping.columns import over_columns
from jfcl.methods import round as phases
from jfcl.methods.averaging import Averaging, averaging
from jfcl.methods.once import after_rounds, clustered_once
from jfcl.methods.options import AVERAGING, SCOPES, Count, Options, factory
from jfcl.robust.aggregate import attacked, ravel_clients, where_rows
from jfcl.training import local

DISTANCES = ("cosine", "euclidean")


@factory(*AVERAGING, *SCOPES)
def flhc(
    task: Task,
    training: local.LocalTraining,
    *,
    num_clusters: Count,
    distance_threshold: Annotated[Real | None, Interval("[0, inf]"), Search(0.05, 2.0)] = None,
    rounds_before: Annotated[int, Range(0, MOST_REPEATED)] = 1,
    distance: Annotated[str, OneOf(DISTANCES)] = "cosine",
    linkage: Annotated[str, OneOf(LINKAGES)] = "complete",
    layers: Callable[[str], bool] | None = None,
    **options: Unpack[Options],
) -> Algorithm:
    """Clusters clients once, by a dendrogram of updates after some rounds of FedAvg; then runs FedAvg in each cluster.

    Args:
      task, training: as in `jfcl.fedavg`.
      num_clusters: `K`, the number of clusters; with `distance_threshold`, the most there may be.
      distance_threshold: groups are merged up to this distance between them, which `linkage` defines; more than `K`
        clusters are merged until there are `K`.
      rounds_before: rounds of FedAvg before the clustering, 0 or more. They, and the update, happen in `init`: a
        simulation counts them before its own, and their cost is in the metrics of its first round.
      distance: `"cosine"` (1 − similarity) or `"euclidean"`.
      linkage: the distance of two groups, as in `jfcl.kernels.linkage_tree`: `"complete"`, `"single"`, `"average"`, ...
      layers: takes a parameter's path, such as `"Dense_1/kernel"`; true for those whose updates are sent and compared.
        Those of the last layer, `distance="euclidean"` and `rounds_before=0` are FedClust's clustering (Islam et al.
        2024). Default: all.
      init_params: one model that all start from.

    Returns:
      `Algorithm` with an `AveragingState`; all its models start at FedAvg's. Statistics are not compared. Cost of
      `init`: `rounds_before + 1` local trainings of all, `N² D` operations, `O(N D + N²)` memory; of a round: FedAvg's.

    Raises:
      ValueError: an unknown distance or linkage, `K` larger than the number of clients, and as in `jfcl.fedavg`.

    Example:
      >>> import jax, jfcl, numpy as np, optax
      >>> task = jfcl.models.task(lambda _: {"b": jax.numpy.full((), 3.0)}, lambda p, x: x + p["b"], kind="regression")
      >>> y = np.repeat(np.float32([1, 5, 1, 5]), 4).reshape(4, 4)
      >>> clients = jfcl.Clients({"x": np.zeros((4, 4), np.float32), "y": y}, np.full(4, 4, np.int32))
      >>> algorithm = jfcl.flhc(task, jfcl.local_training(optax.sgd(0.25), num_steps=1), num_clusters=2)
      >>> algorithm.init(jax.random.key(0), clients).cluster.tolist()
      [0, 1, 0, 1]
    """
    rules = Averaging(task, training, num_clusters, at_most_clients=True, **options)
    if layers is not None:
        shapes = jax.eval_shape(task.init, jax.random.key(0))
        compared = parameter_names(divided(options["personal"], trained_part(task, shapes))[0])
        check_predicate("layers", layers, compared, some=compared, not_all=None)
    common = averaging(rules._replace(num_clusters=1, shared=None, cohort=None))

    def chosen(params):
        """Returns the part of a model or an update that is compared."""
        return params if layers is None else divided(layers, params)[1]

    def cluster_updates(updates, real):
        """Returns `((), cluster [N])` of the dendrogram of updates `[N, ...]`; `real` `[N]` bool: clients with one."""
        updates = ravel_clients(trained_part(task, updates))
        if distance == "cosine":
            distances = 1.0 - pairwise_cosine(updates, mask=real)
        else:
            distances = jnp.sqrt(squared_distances(updates, mask=real))
        tree = linkage_tree(distances, linkage, mask=real)
        return (), cut(tree, num_clusters=num_clusters, threshold=distance_threshold)

    def find(key: jax.Array, clients: Clients):
        start_key, rounds_key = jax.random.split(key)
        state = after_rounds(common, start_key, rounds_key, rounds_before, clients)

        # Train once more for the updates to compare. Nothing is averaged, but clients keep their personal parameters.
        def client(key, examples, size, cluster, local_state):
            opt_state, personal = local_state
            begin = jax.tree.map(lambda p: p[cluster], state.params)
            args = examples, size, opt_state, state.round
            _, update, personal = phases.train_scopes(rules, key, begin, personal, *args)
            update = chosen(update)
            return update, personal, is_finite((update, personal)) & (size > 0)

        last_key = jax.random.fold_in(rounds_key, rounds_before)
        cohort = phases.select_cohort(last_key, clients)
        client_rows = state.cluster, (state.client, state.personal)
        updates, personal, real = phases.train_clients(rules.client_axis, client, cohort, *client_rows)
        personal = where_rows(real, personal, state.personal)
        updates, real = attacked(rules.adversary, attack_key(last_key), updates, client_ids(clients), real)
        cluster = over_columns(rules.client_axis, jax.jit(cluster_updates))(updates, real)[1]
        return cluster, state.params, personal

    def not_sent(state):  # with `layers`, of the last of the models that a client would send
        model = jax.tree.map(lambda p: p[0], state.params)
        return float(num_bytes(chosen(model)) - num_bytes(model))

    rounds = rounds_before + 1
    costs = {"more_steps": rules.personal_steps} | ({} if layers is None else {"sent": not_sent})
    return clustered_once(rules, find, messages=rounds, rounds=rounds, **costs)
