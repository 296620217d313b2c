"""FedAvg: one model for all (McMahan et al. 2017, Algorithm 1), with any server optimiser (Reddi et al. 2021)."""

from __future__ import annotations

from collections.abc import Callable

import optax

from jfcl.core import Adversary, Algorithm, PyTree, Task
from jfcl.core.options import check_options
from jfcl.mapping.axis import Mapping
from jfcl.methods.averaging import Averaging, averaging
from jfcl.methods.options import PersonalSteps, Weights
from jfcl.robust.privacy import GaussianDP
from jfcl.training.local import LocalTraining


def fedavg(
    task: Task,
    training: LocalTraining,
    *,
    weights: Weights = "size",
    personal: Callable[[str], bool] | None = None,
    personal_steps: PersonalSteps = None,
    server_optimizer: optax.GradientTransformation | None = None,
    cohort: int | None = None,
    init_params: PyTree | None = None,
    adversary: Adversary | None = None,
    aggregator: Callable[..., PyTree] | None = None,
    dp: GaussianDP | None = None,
    client_axis: Mapping | None = None,
) -> Algorithm:
    """Trains one global model: each round the cohort's clients train it, and the server averages their models.

    Args:
      task: from `jfcl.models`, or your own.
      training: from `jfcl.local_training`; with `prox > 0` this is FedProx.
      weights: `"size"` (McMahan et al.) or `"equal"`; or an array `[N]`, the weight of each client by its id.
      personal: takes a parameter's path, e.g. `"Dense_1/kernel"`; true for the parameters that each client keeps,
        trains and never sends. `jfcl.fedper`, `fedrep`, `fedbn` and `lg_fedavg` are choices of them.
      personal_steps: local steps of each round on the personal parameters alone, before the others are trained with
        these as they are. Default: all parameters are trained at once.
      server_optimizer: takes the mean update as a descent direction, and the mean training loss of the round where it
        needs it (`value`): `optax.sgd(1.0, momentum=0.9)` is FedAvgM,
        `optax.adam(1e-2, b2=0.99, eps=1e-3)` FedAdam, with Adam's correction of the first steps; default: the mean of
        the clients' models.
      cohort: clients per round, drawn without replacement; default: all.
      init_params: a model to start from.
      adversary: hostile clients: `Adversary(attack, malicious)` with an attack of `jfcl.attacks`.
      aggregator: `(updates, mask=...) -> update`, a robust one from `jfcl.kernels` in place of the mean; clients then
        have equal weights.
      dp: differential privacy of each client, such as `jfcl.privacy.GaussianDP(clip=1.0, noise=1.0)`, with
        `weights="equal"`: clipped updates and Gaussian noise on their sums.
      client_axis: `jax.vmap`, `jfcl.chunked(size)`, ...; default: `jfcl.mapping.auto()`.

    Returns:
      `Algorithm` with an `AveragingState` of one model. Cost of a round: `C` local trainings; memory `O(chunk D)`.

    Raises:
      ValueError: unknown `weights`, a cohort that is not in `1..N`, `init_params` of another shape; a `personal`
        that holds for no parameter or for all; `personal_steps` without it; `dp` with an adversary, an aggregator,
        weights by size or batch statistics that are sent.

    Example:
      >>> import jax, jfcl, numpy as np, optax
      >>> task = jfcl.models.task(lambda key: {"w": jax.numpy.zeros(2)}, lambda p, x: x @ p["w"], kind="regression")
      >>> rng = np.random.default_rng(0)
      >>> x = rng.normal(size=(4, 8, 2)).astype(np.float32)
      >>> clients = jfcl.Clients({"x": x, "y": x @ np.float32([1, -1])}, np.full(4, 8, np.int32))
      >>> algorithm = jfcl.fedavg(task, jfcl.local_training(optax.sgd(0.2), num_steps=50))
      >>> state = algorithm.init(jax.random.key(0), clients)
      >>> state, metrics = jax.jit(algorithm.step)(jax.random.key(1), state, clients)
      >>> np.round(state.params["w"], 1).tolist()
      [[1.0, -1.0]]
    """
    check_options(fedavg, locals())
    return averaging(Averaging(num_clusters=1, **locals()))
