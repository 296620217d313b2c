"""FedRep (Collins, Hassani, Mokhtari, Shakkottai 2021): a common representation, and a head of each client."""

from __future__ import annotations

from collections.abc import Callable

import optax

from jfcl.core import Adversary, Algorithm, PyTree, Task, in_head
from jfcl.core.options import check_options
from jfcl.mapping.axis import Mapping
from jfcl.methods.fedavg import fedavg
from jfcl.methods.options import Rounds, Weights
from jfcl.robust.privacy import GaussianDP
from jfcl.training import local


def fedrep(
    task: Task,
    training: local.LocalTraining,
    *,
    personal_steps: Rounds = 10,
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
    """Trains in turn, in every round of a client, its own head and the common representation.

    A client takes `personal_steps` steps on its head under the round's representation, and then the steps of `training`
    on the representation under the new head. The server averages the representations.

    Args:
      personal_steps: `τ`, local steps on the head in every round.
      personal: takes a parameter's path; true for those of the head. Default: the last dense layer.
      training: of the representation. Its optimiser and batch size are those of the head too.
      task, weights, server_optimizer, cohort, init_params, adversary, aggregator, dp, client_axis: as in
        `jfcl.fedavg`.

    Returns:
      `Algorithm` with an `AveragingState` as that of `jfcl.fedper`. Cost of a round: `personal_steps` and the steps of
      `training`, each a forward and a backward pass; bytes: those of the representation.

    Raises:
      ValueError: a model without a known last dense layer, where `personal` is not given; `keep="everything"`; as in
        `jfcl.fedavg`.

    Source: Exploiting Shared Representations for Personalized Federated Learning, Algorithm 1.

    Example:
      >>> import jax, jfcl, numpy as np, optax
      >>> task = jfcl.models.classification(jfcl.models.MLP(2, hidden=(5,)), (3,), 2)
      >>> rng = np.random.default_rng(0)
      >>> x, y = rng.normal(size=(4, 8, 3)).astype(np.float32), rng.integers(0, 2, (4, 8))
      >>> clients = jfcl.Clients({"x": x, "y": y}, np.full(4, 8, np.int32))
      >>> algorithm = jfcl.fedrep(task, jfcl.local_training(optax.sgd(0.1), num_steps=1), personal_steps=5)
      >>> state = algorithm.init(jax.random.key(0), clients)
      >>> state, _ = jax.jit(algorithm.step)(jax.random.key(1), state, clients)
      >>> state.personal["Dense_1"]["kernel"].shape, state.params["Dense_0"]["kernel"].shape
      ((4, 5, 2), (1, 3, 5))
    """
    check_options(fedrep, locals())
    local.check_parts(task, training)
    personal = personal or in_head(task)
    return fedavg(**locals())
