"""PACFL (Vahidian, Morafah, Wang, Kungurtsev, Chen, Shah, Lin 2023): clusters by angles between the clients' data."""

from typing import Annotated, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from jfcl.core import Algorithm, Clients, Served, Task, check, mask
from jfcl.core.options import Interval, OneOf, Range, Real, Search
from jfcl.kernels import ANGLES, LINKAGES, cut, linkage_tree, principal_vectors, subspace_angles
from jfcl.kernels.dendrogram import number_by_first
from jfcl.mapping.columns import on_copies, on_every_device
from jfcl.methods.averaging import Averaging, AveragingState
from jfcl.methods.once import clustered_once, clusters_in_use, labels_of
from jfcl.methods.options import AVERAGING, SCOPES, Count, Options, factory
from jfcl.methods.round import initial_models, initial_scopes, personal_of_newcomers
from jfcl.training import local


class Subspaces(NamedTuple):
    """The vectors that clients have sent, `[N, P, F]`, and the mean angles within and between their clusters, `[]`."""

    bases: jax.Array
    within: jax.Array
    between: jax.Array


@factory(*AVERAGING, *SCOPES)
def pacfl(
    task: Task,
    training: local.LocalTraining,
    *,
    num_clusters: Count,
    angle_threshold: Annotated[Real | None, Interval("[-1, inf]"), Search(2.0, 90.0)] = None,
    num_vectors: Annotated[int, Range(1, 1000)] = 3,
    by_label: bool = True,
    measure: Annotated[str, OneOf(ANGLES)] = "absolute",
    linkage: Annotated[str, OneOf(LINKAGES)] = "weighted",
    **options: Unpack[Options],
) -> Algorithm:
    """Clusters the clients once, before any training, by the angles between their data; then runs FedAvg inside.

    Each client sends the first left singular vectors of its inputs, as columns of a matrix, for each of its labels.

    Args:
      task, training: as in `jfcl.fedavg`.
      num_clusters: `K`, the number of clusters; with `angle_threshold`, the most there may be.
      angle_threshold: `β`, in degrees: clusters are merged up to this angle between them, which `linkage` defines; more
        than `K` clusters are merged until there are `K`. From 90 on (of `measure="sum"` more) it is FedAvg, below 0
        local training. The authors' 4.9 for CIFAR-10 with 2 labels a client, 9.88 for CIFAR-100 with 20.
      num_vectors: `p`, the number of vectors of each label; 3 to 5 in the paper.
      by_label: vectors for each label; else for all inputs together.
      measure: the angle of two clients, as in `jfcl.kernels.subspace_angles`.
      linkage: the angle of two clusters, as in `jfcl.kernels.linkage_tree`; the authors average the rows of merged
        clusters: `"weighted"`.
      init_params: one model that all start from.

    Returns:
      `Algorithm` with an `AveragingState`, and the further metrics `clusters_found`, `angle_within` and
      `angle_between`, means over pairs of clients in degrees (NaN without any). Clients that were not in training are
      served the cluster with the smallest mean angle to its members. Cost of `init`: the eigenvectors of a matrix of
      examples `[M, M]` (or inputs `[F, F]`, if smaller) for each label of a client, `N² P² F` multiplications with
      `P = p · labels`; memory `O(N P F + N²)`, of which the vectors stay in the state; of a round: FedAvg's. Bytes:
      `4 P F` are sent once, of the labels that a client has.

    Raises:
      ValueError: inputs of an integer type (words have no angle), `by_label` for a task without classes or with several
        labels an example, `K` larger than the number of clients, and as in `jfcl.fedavg`.

    Source: Efficient Distribution Similarity Identification in Clustered Federated Learning via Principal Angles
    Between Client Data Subspaces (AAAI 2023), Algorithm 1. The authors' code takes the smallest arc cosine of products
    of vectors with the signs that LAPACK gives them, by which equal subspaces can be 180 degrees apart: here
    `"absolute"` takes lines. Vectors of several labels are not orthogonal, so that this is not a principal angle; those
    of the other two measures are. Its newcomers are clustered with all clients at the start.

    Example:
      >>> import jax, jfcl, numpy as np, optax
      >>> task = jfcl.models.classification(jfcl.models.Linear(2), (3,), 2)
      >>> x = np.zeros((4, 6, 3), np.float32)
      >>> x[[0, 2], :, 0] = x[[1, 3], :, 1] = 1
      >>> clients = jfcl.Clients({"x": x, "y": np.zeros((4, 6), np.int32)}, np.full(4, 6, np.int32))
      >>> algorithm = jfcl.pacfl(task, jfcl.local_training(optax.sgd(0.1), num_steps=1), num_clusters=2)
      >>> algorithm.init(jax.random.key(0), clients).cluster.tolist()
      [0, 1, 0, 1]
    """
    client_axis = options["client_axis"]
    rules = Averaging(task, training, num_clusters, at_most_clients=True, **options)
    labels = task.num_classes if by_label else 1
    check(labels is not None, "by_label", True, "False for a task without a known number of classes")

    def bases_of(clients: Clients) -> jax.Array:
        def client(examples, size):
            x = examples["x"].reshape(len(examples["x"]), -1)
            groups = {"groups": examples["y"].astype(jnp.int32), "num_groups": labels} if by_label else {}
            vectors = principal_vectors(x, num_vectors, mask=jnp.arange(len(x)) < size, **groups)
            return vectors.reshape(-1, x.shape[1])

        x = clients.examples["x"]
        accepted = "of a floating-point type, as images / 255 are: between words there is no angle"
        kind = getattr(x, "dtype", type(x))
        check(jnp.issubdtype(kind, jnp.floating), 'examples["x"]', kind, accepted)
        if by_label:
            labels_of(clients, "by_label compares clients by them")
        return on_every_device(client_axis, client_axis(client)(clients.examples, jnp.asarray(clients.size)))

    def find(key: jax.Array, clients: Clients):
        bases = bases_of(clients)
        cluster, within, between = on_copies(client_axis, group)(bases, mask(clients).any(axis=1))
        model, of_all = initial_models(task, key, 1, options["init_params"]), jnp.zeros_like(cluster)
        return cluster, *initial_scopes(options["personal"], model, of_all), Subspaces(bases, within, between)

    def group(bases: jax.Array, real: jax.Array):
        angles = subspace_angles(bases, measure=measure)
        tree = linkage_tree(angles, linkage, mask=real)
        cluster = cut(tree, num_clusters=num_clusters, threshold=angle_threshold)
        if angle_threshold is not None:  # below 0, clients without examples are clusters of their own
            cluster = number_by_first(jnp.where(real, cluster, cluster[jnp.argmax(real)]), len(real))
        pairs = real[:, None] & real[None, :] & ~jnp.eye(len(real), dtype=bool)
        same = cluster[:, None] == cluster[None, :]
        within, between = (jnp.where(pairs & part, angles, jnp.nan) for part in (same, ~same))
        return cluster, jnp.nanmean(within), jnp.nanmean(between)

    def sent(state: AveragingState) -> jax.Array:
        vectors = (state.memory.bases != 0).any(axis=2).sum(axis=1)
        return vectors.astype(jnp.float32) * (4.0 * state.memory.bases.shape[2])

    def further(state: AveragingState, clients: Clients) -> dict[str, jax.Array]:
        angles = {"angle_within": state.memory.within, "angle_between": state.memory.between}
        return angles | {"clusters_found": clusters_in_use(state, clients)}

    def adopt(state: AveragingState, clients: Clients) -> Served:
        real = (state.memory.bases != 0).any(axis=(1, 2))
        angles = subspace_angles(bases_of(clients), state.memory.bases, measure=measure)
        members = jax.nn.one_hot(state.cluster, num_clusters, dtype=angles.dtype) * real[:, None].astype(angles.dtype)
        sums = jnp.matmul(angles, members, precision=jax.lax.Precision.HIGHEST)
        mean = sums / jnp.maximum(members.sum(axis=0), 1)[None, :]
        to = jnp.argmin(jnp.where((members.sum(axis=0) > 0)[None, :], mean, jnp.inf), axis=1).astype(jnp.int32)
        return Served(state.params, to, personal_of_newcomers(state.personal, real, len(to)))

    once = clustered_once(rules, find, further=further, messages=0, rounds=0, sent=sent)
    return once._replace(adopt=adopt)
