"""FLUX (Fenoglio, Li, Barbiero, Lane, Langheinrich, Gjoreski 2025): clusters by moments of the clients' features."""

from functools import partial
from typing import Annotated, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from jfcl import mapping
from jfcl.core import Algorithm, Clients, PyTree, Served, Task, check, mask
from jfcl.core.options import MOST_REPEATED, Interval, Range, Real, Search
from jfcl.kernels import cut, kmeans, knee, linkage_tree
from jfcl.mapping.columns import on_copies
from jfcl.methods.averaging import Averaging, AveragingState, averaging
from jfcl.methods.once import after_rounds, clustered_once, labels_of
from jfcl.methods.options import AVERAGING, Options, factory
from jfcl.training import local
from jfcl.training.losses import indexable

MISSING = -1.0  # mean and deviation of a label with fewer than two examples, as in the authors' code


class Descriptors(NamedTuple):
    """What is needed to describe a newcomer, and to compare it with the clusters.

    Attributes:
      model: `[...]`, the model by which clients are described.
      projection: `[H, L]`, of its representations.
      least, span: `[2]`, by which the means and the deviations are scaled.
      centers: `[K, 2 L]`, the scaled means and deviations of each cluster; infinity for one without clients.
      found: `[]` int32, the number of clusters.
      radius: `[]`, the distance up to which clients were joined; 0 with a given number of clusters.
    """

    model: PyTree
    projection: jax.Array
    least: jax.Array
    span: jax.Array
    centers: jax.Array
    found: jax.Array
    radius: jax.Array


@factory(*AVERAGING)
def flux(
    task: Task,
    training: local.LocalTraining,
    *,
    num_clusters: Annotated[int | Literal["auto"], Range(1)],
    most_clusters: Annotated[int, Range(1, 1000)] = 15,
    radius_scale: Annotated[Real, Interval("[0, inf)"), Search(0.3, 3.0)] = 1.0,
    rounds_before: Annotated[int, Range(1, MOST_REPEATED)] = 10,
    num_components: Annotated[int, Range(1, 1000)] = 10,
    by_label: bool = True,
    **options: Unpack[Options],
) -> Algorithm:
    """Clusters the clients once, by moments of their features under a common model; then runs FedAvg in each cluster.

    A client describes itself by the mean and the standard deviation of its features, of all examples and of those of
    each label. The first two need no label: a newcomer joins the cluster with the nearest ones.

    Args:
      task: as in `jfcl.fedavg`. The features are the inputs of its last dense layer, or its outputs where this layer is
        not known.
      training: as in `jfcl.fedavg`.
      num_clusters: `K`, the number of clusters that k-means finds; `"auto"`: clients are joined up to a distance, the
        knee of the distances to their nearest neighbours (DBSCAN with two points; see `jfcl.kernels.knee`).
      most_clusters: the number of models with `"auto"`, and so the most clusters; more of them are merged, the nearest
        first.
      radius_scale: a factor on the distance up to which `"auto"` joins clients.
      rounds_before: rounds of FedAvg of all clients before the clustering, at least 1. They happen in `init`: a
        simulation counts them before its own, and their cost is in the metrics of its first round.
      num_components: `L`, the number of components to which a random orthonormal projection reduces the features.
      by_label: moments of each label too; else clusters differ in their inputs only.
      init_params: one model that all start from.

    Returns:
      `Algorithm` with an `AveragingState`, and the further metrics `clusters_found` and, with `"auto"`, `radius`. All
      models start at FedAvg's. Clients that were not in training are served by their features alone, without labels. A
      client with features that are not finite joins the first cluster. Cost of `init`: the rounds of FedAvg, a pass
      over all examples, and k-means, or `N² P` operations, of `P = 2 L (1 + labels)` numbers for each client,
      which it sends once; of a round: FedAvg's. Memory `O(N P)`, with `"auto"` `O(N P + N²)`.

    Raises:
      ValueError: `by_label` for a task without classes or with several labels an example; `K` larger than the number of
        clients; as in `jfcl.fedavg`.

    Source: FLUX: Efficient Descriptor-Driven Clustered Federated Learning under Arbitrary Distribution Shifts (NeurIPS
    2025). The paper's text was not available; this is the authors' code (github.com/dariofenoglio98/FLUX, 43aadbe, with
    its defaults `Px_label_long` and `DBSCAN_no_outliers`; `"auto"` is its default, and `K` its `Kmeans_with_prior`).
    There the clustering begins once the accuracy on validation data grows by less than 0.06 a round; the projection is
    the principal components of 200 uniform random points, minus their mean; and features are those before the first
    dense layer of LeNet-5. A label with fewer than two examples has the moments -1, as there.

    Example:
      >>> import jax, jfcl, numpy as np, optax
      >>> task = jfcl.models.classification(jfcl.models.Linear(2), (3,), 2)
      >>> x = np.random.default_rng(0).normal(size=(4, 20, 3)).astype(np.float32)
      >>> x[[0, 2]] += 3
      >>> clients = jfcl.Clients({"x": x, "y": np.tile(np.int32([0, 1]), (4, 10))}, np.full(4, 20, np.int32))
      >>> algorithm = jfcl.flux(task, jfcl.local_training(optax.sgd(0.1), num_steps=1), num_clusters=2)
      >>> state = algorithm.init(jax.random.key(0), clients)
      >>> newcomers = jfcl.Clients({"x": x[:2] + 0.1}, np.full(2, 20, np.int32))
      >>> state.cluster.tolist() == algorithm.adopt(state, newcomers).to.tolist() * 2
      True
    """
    auto = num_clusters == "auto"
    k, labels = most_clusters if auto else num_clusters, task.num_classes if by_label else 0
    check(labels is not None, "by_label", True, "False for a task without a known number of classes")
    client_axis = options["client_axis"]
    rules = Averaging(task, training, k, at_most_clients=not auto, **options)
    common = averaging(rules._replace(num_clusters=1, cohort=None))

    def describe(model: PyTree, projection: jax.Array, clients: Clients, labels: int) -> jax.Array:
        client = partial(_moments, partial(_features, task), model, projection, labels)
        return client_axis(client)(clients.examples, jnp.asarray(clients.size))

    def find(key: jax.Array, clients: Clients):
        if by_label:
            labels_of(clients, "by_label compares clients by them")
        start_key, rounds_key, projection_key, cluster_key = jax.random.split(key, 4)

        # Train one model, and describe all clients by it.
        state = after_rounds(common, start_key, rounds_key, rounds_before, clients)
        model = jax.tree.map(lambda p: p[0], state.params)
        dim = jax.eval_shape(partial(_features, task, model), jax.tree.map(lambda x: x[0], clients.examples)).shape[1]
        projection = jnp.linalg.qr(jax.random.normal(projection_key, (dim, min(num_components, dim))))[0]
        moments = describe(model, projection, clients, labels)
        cluster, described = on_copies(client_axis, group)(moments, mask(clients).any(axis=1), cluster_key)
        return cluster, state.params, state.personal, Descriptors(model, projection, *described)

    def group(moments: jax.Array, real: jax.Array, key: jax.Array):
        """Returns the cluster of each client, and the `Descriptors` from `least` on."""
        real = real & jnp.isfinite(moments).all(axis=(1, 2))
        counts = real[:, None, None]
        moments = jnp.where(counts, moments, 0.0)

        # Scale each part to [0, 1] over clients and components.
        least = jnp.where(counts, moments, jnp.inf).min(axis=(0, 2))
        most = jnp.where(counts, moments, -jnp.inf).max(axis=(0, 2))
        span = jnp.where(most > least, most - least, 1.0)
        points = ((moments - least[None, :, None]) / span[None, :, None]).reshape(len(real), -1)

        # Cluster, and keep the means of the parts without labels.
        cluster, radius = _joined(points, real, k, radius_scale) if auto else (None, 0.0)
        if not auto:
            cluster = jnp.maximum(kmeans(points, k, key=key, mask=real).cluster, 0)
        row = jnp.where(real, cluster, k)
        size = jax.ops.segment_sum(jnp.ones(len(row)), row, k + 1)[:k, None]
        sums = jax.ops.segment_sum(points[:, : 2 * moments.shape[2]], row, k + 1)[:k]
        centers = jnp.where(size > 0, sums / jnp.maximum(size, 1), jnp.inf)
        count = (size > 0).sum().astype(jnp.int32)
        return cluster, (least[:2], span[:2], centers, count, jnp.asarray(radius, jnp.float32))

    def sent(state: AveragingState) -> float:
        return 4.0 * 2 * (1 + labels) * state.memory.projection.shape[1]

    def further(state: AveragingState, clients: Clients) -> dict[str, jax.Array]:
        return {"clusters_found": state.memory.found} | ({"radius": state.memory.radius} if auto else {})

    def adopt(state: AveragingState, clients: Clients) -> Served:
        memory = state.memory
        moments = describe(memory.model, memory.projection, clients, 0)
        points = ((moments - memory.least[None, :, None]) / memory.span[None, :, None]).reshape(len(moments), 1, -1)
        distances = jnp.square(points - memory.centers[None]).sum(axis=2)
        return Served(state.params, jnp.argmin(distances, axis=1).astype(jnp.int32))

    costs = {"messages": rounds_before, "rounds": rounds_before, "sent": sent}
    return clustered_once(rules, find, further=further, **costs)._replace(adopt=adopt)


def _features(task: Task, model: PyTree, examples: PyTree) -> jax.Array:
    """Returns the features `[M, H]` of one client's examples."""
    features = (task.represent or task.apply)(indexable(model), task.inputs_of(examples))
    check(hasattr(features, "shape"), "task", "one with several outputs", "one with represent, the features of inputs")
    return features.reshape(len(features), -1).astype(jnp.float32)


def _moments(features, model: PyTree, projection: jax.Array, labels: int, examples: PyTree, size) -> jax.Array:
    """Returns `[2 + 2 labels, L]` of one client: mean and deviation of all examples, means and deviations by label."""
    z = jnp.matmul(features(model, examples), projection, precision=jax.lax.Precision.HIGHEST)
    member = (jnp.arange(len(z)) < size)[None, :]
    if labels:
        member = jnp.concatenate([member, member & (examples["y"][None] == jnp.arange(labels)[:, None])])
    count = member.sum(axis=1)
    divisor = jnp.maximum(count, 1).astype(z.dtype)[:, None]

    def mean(values):
        return jnp.where(member[:, :, None], values, 0.0).sum(axis=1) / divisor

    center = mean(z[None])
    deviation = jnp.sqrt(mean(jnp.square(z[None] - center[:, None, :])))
    enough = ((count > 1) | (jnp.arange(len(count)) == 0))[:, None]
    center, deviation = jnp.where(enough, center, MISSING), jnp.where(enough, deviation, MISSING)
    return jnp.concatenate([center[:1], deviation[:1], center[1:], deviation[1:]])


def _joined(points: jax.Array, real: jax.Array, most: int, scale) -> tuple[jax.Array, jax.Array]:
    """Returns `(cluster [N], radius [])`: the components of the clients that are within the radius of each other."""
    # From differences: the radius is a distance between neighbours, which may be small beside those of clusters.
    distances = mapping.chunked(1)(lambda point: jnp.sqrt(jnp.square(points - point[None]).sum(axis=1)))(points)
    pairs = real[:, None] & real[None, :] & ~jnp.eye(len(real), dtype=bool)
    nearest = jnp.where(pairs, distances, jnp.inf).min(axis=1)
    radius = scale * knee(nearest, mask=real & jnp.isfinite(nearest))
    tree = linkage_tree(distances, "single", mask=real)
    return cut(tree, num_clusters=min(most, len(real)), threshold=radius), radius
