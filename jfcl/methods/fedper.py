"""FedPer (Arivazhagan, Aggarwal, Singh, Choudhary 2019): a common body, and a head of each client."""

from __future__ import annotations

from collections.abc import Callable

import optax

from jfcl.core import Adversary, Algorithm, PyTree, Task, in_head
from jfcl.core.options import check_options
from jfcl.mapping.axis import Mapping
from jfcl.methods.fedavg import fedavg
from jfcl.methods.options import Weights
from jfcl.robust.privacy import GaussianDP
from jfcl.training import local


def fedper(
    task: Task,
    training: local.LocalTraining,
    *,
    personal: Callable[[str], bool] | None = None,
    weights: Weights = "size",
    server_optimizer: optax.GradientTransformation | None = None,
    cohort: int | None = None,
    init_params: PyTree | None = None,
    adversary: Adversary | None = None,
    aggregator: Callable[..., PyTree] | None = None,
    dp: GaussianDP | None = None,
    client_axis: Mapping | None = None,
) -> Algorithm:
    """Trains a common body by FedAvg, while each client keeps and trains its own head (personalisation layers).

    Args:
      personal: takes a parameter's path, e.g. `"Dense_1/kernel"`; true for the personal ones. Default: the last dense
        layer.
      task, training, weights, server_optimizer, cohort, init_params, adversary, aggregator, dp, client_axis: as in
        `jfcl.fedavg`.

    Returns:
      `Algorithm` with an `AveragingState`: `params` holds the body `[1, ...]`, `personal` the heads `[N, ...]`. All
      heads start alike. Cost of a round: that of FedAvg; bytes: those of the body. It is
      `jfcl.fedavg(task, training, personal=...)`.

    Raises:
      ValueError: a model without a known last dense layer, where `personal` is not given; as in `jfcl.fedavg`.

    Source: Federated Learning with Personalization Layers, Algorithms 1 and 2.

    Example:
      >>> import jax, jfcl, numpy as np, optax
      >>> task = jfcl.models.classification(jfcl.models.MLP(2, hidden=(5,)), (3,), 2)
      >>> rng = np.random.default_rng(0)
      >>> x, y = rng.normal(size=(4, 8, 3)).astype(np.float32), rng.integers(0, 2, (4, 8))
      >>> clients = jfcl.Clients({"x": x, "y": y}, np.full(4, 8, np.int32))
      >>> algorithm = jfcl.fedper(task, jfcl.local_training(optax.sgd(0.1), num_steps=1))
      >>> state = algorithm.init(jax.random.key(0), clients)
      >>> state, _ = jax.jit(algorithm.step)(jax.random.key(1), state, clients)
      >>> state.personal["Dense_1"]["kernel"].shape, state.params["Dense_0"]["kernel"].shape
      ((4, 5, 2), (1, 3, 5))
    """
    check_options(fedper, locals())
    local.check_parts(task, training)
    personal = personal or in_head(task)
    return fedavg(**locals())
