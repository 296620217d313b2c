"""LG-FedAvg (Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency 2020): local representations."""

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


def lg_fedavg(
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
    """Trains a common head by FedAvg on representations that each client keeps for itself.

    Args:
      personal: takes a parameter's path; true for the parameters of the representation. Default: all but the last dense
        layer.
      task, training, weights, server_optimizer, cohort, init_params, adversary, aggregator, dp, client_axis: as in
        `jfcl.fedavg`.

    Returns:
      `Algorithm` with an `AveragingState`: `params` holds the head `[1, ...]`, `personal` the representations
      `[N, ...]`. Cost of a round: that of FedAvg; memory `O(N D)`; bytes: those of the head.

    Raises:
      ValueError: a model without a known last dense layer, or without other layers, where `personal` is not given; as
        in `jfcl.fedavg`.

    Source: Think Locally, Act Globally: Federated Learning with Local and Global Representations, Algorithm 1, without
    its auxiliary and adversarial losses.

    Example:
      >>> import jax, jfcl, numpy as np, optax
      >>> task = jfcl.models.classification(jfcl.models.MLP(2, hidden=(5,)), (3,), 2)
      >>> rng = np.random.default_rng(0)
      >>> x, y = rng.normal(size=(4, 8, 3)).astype(np.float32), rng.integers(0, 2, (4, 8))
      >>> clients = jfcl.Clients({"x": x, "y": y}, np.full(4, 8, np.int32))
      >>> algorithm = jfcl.lg_fedavg(task, jfcl.local_training(optax.sgd(0.1), num_steps=1))
      >>> state = algorithm.init(jax.random.key(0), clients)
      >>> state, _ = jax.jit(algorithm.step)(jax.random.key(1), state, clients)
      >>> state.personal["Dense_0"]["kernel"].shape, state.params["Dense_1"]["kernel"].shape
      ((4, 3, 5), (1, 5, 2))
    """
    check_options(lg_fedavg, locals())
    local.check_parts(task, training)
    personal = personal or in_body(task)
    return fedavg(**locals())


def in_body(task: Task) -> Callable[[str], bool]:
    """Returns the choice, by a path, of the parameters outside the last dense layer."""
    head = in_head(task)
    return lambda path: not head(path)
