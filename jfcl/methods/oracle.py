"""The oracle: FedAvg inside the true clusters, the result of a clustering method without any mistake."""

from functools import partial
from typing import Unpack

import jax.numpy as jnp
import numpy as np

from jfcl.core import Algorithm, Task, check, client_ids, is_concrete, newest_step, num_clients
from jfcl.methods.averaging import Averaging, averaging
from jfcl.methods.options import AVERAGING, SCOPES, Options, factory
from jfcl.robust.aggregate import check_entries
from jfcl.training.local import LocalTraining


@factory(*AVERAGING, *SCOPES, "dp")
def oracle(
    task: Task, training: LocalTraining, *, cluster, num_clusters: int | None = None, **options: Unpack[Options]
) -> Algorithm:
    """Trains one model per true cluster by FedAvg ("ground truth" in the Federated-Clustering paper).

    Args:
      task, training: as in `jfcl.fedavg`.
      cluster: `[N]` integers in `0..K-1`, the true cluster of every client (where clients have ids: of id `i`). For
        drifting data `[T, N]`, at every step of time (`jfcl.data.Drift.cluster`): a client trains the model of its
        current cluster on all examples that it holds; with `drift_window=1` they all belong to that cluster.
      num_clusters: `K`; default: the largest of `cluster` plus one.

    Returns:
      `Algorithm` with an `AveragingState` of `K` models. Cost of a round: that of FedAvg.

    Raises:
      ValueError: a `cluster` that is not `[N]` or `[T, N]` integers in `0..K-1`; one by steps for data without steps;
        and as in `jfcl.fedavg`.

    Example:
      >>> import jax, jfcl, numpy as np, optax
      >>> task = jfcl.models.task(lambda key: {"b": jax.numpy.zeros(())}, lambda p, x: x + p["b"], kind="regression")
      >>> clients = jfcl.Clients(
      ...     {"x": np.zeros((2, 4), np.float32), "y": np.float32([[1] * 4, [5] * 4])}, np.full(2, 4, np.int32)
      ... )
      >>> algorithm = jfcl.oracle(task, jfcl.local_training(optax.sgd(0.5), num_steps=1), cluster=[0, 1])
      >>> state, _ = jfcl.rollout(algorithm, clients, key=jax.random.key(0), num_rounds=1)
      >>> state.params["b"].tolist()
      [1.0, 5.0]
    """
    if is_concrete(cluster):
        cluster = np.asarray(cluster)
        fits = cluster.ndim in (1, 2) and cluster.dtype.kind in "iu"
        check(fits, "cluster", cluster, "a vector of integers, or a matrix [steps, clients]")
        num_clusters = int(cluster.max()) + 1 if num_clusters is None else num_clusters
        check(cluster.min() >= 0 and cluster.max() < num_clusters, "cluster", cluster, f"in 0..{num_clusters - 1}")
    cluster = jnp.asarray(cluster, jnp.int32)

    def start(params, clients):
        n = num_clients(clients)
        now = cluster if cluster.ndim == 1 else cluster[newest_step(clients)]
        fits = clients.id is not None or now.shape == (n,)
        check(fits, "cluster", cluster.shape, f"of shape ({n},), one entry per client")
        return now[jnp.minimum(client_ids(clients), len(now) - 1)]  # ids beyond it are padding clients

    algorithm = averaging(Averaging(task, training, num_clusters, start=start, **options))
    if cluster.ndim == 2:
        inside = algorithm.step

        def step(key, state, clients):
            return inside(key, state._replace(cluster=start(None, clients)), clients)

        algorithm = algorithm._replace(step=step)
    return algorithm._replace(check=partial(check_entries, "cluster", cluster if cluster.ndim == 1 else cluster[0]))
