"""Momentum-Clustering (Werner, He, Jordan, Jaggi, Karimireddy 2023, Algorithm 4)."""

from __future__ import annotations

from typing import Annotated, Any

import jax
import jax.numpy as jnp

from jfcl import mapping
from jfcl.core import Adversary, Algorithm, PyTree, Task
from jfcl.core.options import Interval, OneOf, Real, check_options
from jfcl.methods.myopic_clustering import CENTERS, centers_of
from jfcl.methods.options import Quantile, QuantileRule, Rounds, Weights, passed_on
from jfcl.training import local


def momentum_clustering(
    task: Task,
    training: local.LocalTraining,
    *,
    num_clusters: int,
    momentum: Annotated[Real, Interval("[0, 1)")] = 0.9,
    radius: Any = None,
    quantile: Quantile = None,
    threshold_rounds: Rounds = 10,
    quantile_rule: QuantileRule = "linear",
    weights: Weights = "equal",
    centers: Annotated[str, OneOf(CENTERS)] = "densest",
    init_centers: PyTree | None = None,
    init_params: PyTree | None = None,
    adversary: Adversary | None = None,
    client_axis: mapping.Mapping | None = None,
) -> Algorithm:
    """Clusters the clients' momenta, which change slowly and are less noisy than gradients: `N` messages a round.

    Otherwise it is Myopic-Clustering: `m_i ← α g_i(x_i) + (1 − α) m_i`, where the first `m_i` is the first gradient
    (equation 29); the server threshold-clusters all `m_i` into `K` centres; `x_i ← x_i − η v_{k(i)}` (equation 30).

    Args:
      momentum: `1 − α`, in [0, 1); 0 is Myopic-Clustering.
      task, training, num_clusters, radius, quantile, threshold_rounds, quantile_rule, weights, centers, init_centers,
        init_params, adversary, client_axis: as in `jfcl.myopic_clustering`; the centres are among momenta here. The
        optimiser steps along the centre of momenta, so it should have no momentum of its own.

    Returns:
      `Algorithm` with a `CentersState`. Cost of a round: as of Myopic-Clustering; memory `O(N D)`.

    Raises:
      ValueError: a momentum outside [0, 1), and as in `jfcl.myopic_clustering`.

    Example:
      >>> import jax, jfcl, numpy as np, optax
      >>> task = jfcl.models.task(lambda key: {"b": jax.numpy.zeros(())}, lambda p, x: x + p["b"], kind="regression")
      >>> y = np.repeat(np.float32([1, 5, 1, 5]), 3).reshape(4, 3)
      >>> clients = jfcl.Clients({"x": np.zeros((4, 3), np.float32), "y": y}, np.full(4, 3, np.int32))
      >>> training = jfcl.local_training(optax.sgd(0.05), num_steps=1)
      >>> algorithm = jfcl.momentum_clustering(task, training, num_clusters=2, radius=0.1)
      >>> state, _ = jfcl.rollout(algorithm, clients, key=jax.random.key(0), num_rounds=200)
      >>> np.round(state.params["b"], 2).tolist()
      [1.0, 5.0, 1.0, 5.0]
    """
    check_options(momentum_clustering, locals())
    given = passed_on(centers_of, locals())

    def send(state, gradients):
        def mix(keep, m, g):
            return jax.tree.map(lambda m, g: keep.astype(g.dtype) * m + (1 - keep).astype(g.dtype) * g, m, g)

        momenta = jax.vmap(mix)(jnp.where(state.begun, momentum, 0.0), state.momentum, gradients)
        return momenta, momenta

    return centers_of(**given, send=send, has_momenta=True)
