"""FedBN (Li, Jiang, Zhang, Kamp, Dou 2021): batch normalisation stays with the client."""

from __future__ import annotations

from collections.abc import Callable

import jax
import optax

from jfcl.core import Adversary, Algorithm, PyTree, Task, check, parameter_names
from jfcl.core.options import check_options
from jfcl.mapping.axis import Mapping
from jfcl.methods.fedavg import fedavg
from jfcl.methods.options import Weights
from jfcl.robust.privacy import GaussianDP
from jfcl.training import local


def fedbn(
    task: Task,
    training: local.LocalTraining,
    *,
    weights: Weights = "size",
    server_optimizer: optax.GradientTransformation | None = None,
    cohort: int | None = None,
    init_params: PyTree | None = None,
    adversary: Adversary | None = None,
    aggregator: Callable[..., PyTree] | None = None,
    dp: GaussianDP | None = None,
    client_axis: Mapping | None = None,
) -> Algorithm:
    """Runs FedAvg on all layers but those of batch normalisation, which each client keeps.

    Args:
      task, training, weights, server_optimizer, cohort, init_params, adversary, aggregator, dp, client_axis: as in
        `jfcl.fedavg`.

    Returns:
      `Algorithm` with an `AveragingState`: `personal` holds the statistics, scales and biases of batch normalisation,
      `[N, ...]`. Cost of a round: that of FedAvg. It is `jfcl.fedavg(task, training, personal=...)`.

    Raises:
      ValueError: a model without batch normalisation; as in `jfcl.fedavg`.

    Source: FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, Algorithm 1.

    Example:
      >>> import flax.linen as nn, jax, jfcl, numpy as np, optax
      >>> class Net(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x, train: bool):
      ...         return nn.Dense(2)(nn.BatchNorm(use_running_average=not train)(x))
      >>> task = jfcl.models.classification(Net(), (3,), 2)
      >>> rng = np.random.default_rng(0)
      >>> x, y = rng.normal(size=(4, 8, 3)).astype(np.float32), rng.integers(0, 2, (4, 8))
      >>> clients = jfcl.Clients({"x": x, "y": y}, np.full(4, 8, np.int32))
      >>> algorithm = jfcl.fedbn(task, jfcl.local_training(optax.sgd(0.1), num_steps=1))
      >>> state = algorithm.init(jax.random.key(0), clients)
      >>> sorted(state.personal["BatchNorm_0"]), state.personal["BatchNorm_0"]["mean"].shape
      (['bias', 'mean', 'scale', 'var'], (4, 3))
    """
    check_options(fedbn, locals())
    local.check_parts(task, training)
    personal = in_batch_normalisation(task)
    return fedavg(**locals())


def in_batch_normalisation(task: Task) -> Callable[[str], bool]:
    """Returns the choice, by a path, of the parameters in layers with batch statistics.

    Raises:
      ValueError: a model without any.
    """
    names = parameter_names(jax.eval_shape(task.init, jax.random.key(0)))
    layers = {name.rpartition("/")[0] for name in names if task.statistics is not None and task.statistics(name)}
    check(bool(layers), "task", "a model without batch statistics", "one with batch normalisation")
    return lambda path: path.rpartition("/")[0] in layers
