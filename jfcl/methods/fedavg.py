"""FedAvg: one model for all (McMahan et al. 2017, Algorithm 1), with any server optimiser (Reddi et al. 2021).

FedPer, FedRep, LG-FedAvg and FedBN are FedAvg with a choice of the parameters that each client keeps.
"""

from typing import Unpack

import jax

from jfcl.core import Algorithm, Task, in_head, parameter_names
from jfcl.methods.averaging import Averaging, averaging
from jfcl.methods.options import AVERAGING, Options, Rounds, factory
from jfcl.training.local import LocalTraining


@factory(*AVERAGING, "personal", "personal_steps", "dp")
def fedavg(task: Task, training: LocalTraining, **options: Unpack[Options]) -> Algorithm:
    """Trains one global model: each round the cohort's clients train it, and the server averages their models.

    Args:
      task: from `jfcl.models`, or your own.
      training: from `jfcl.local_training`; with `prox > 0` this is FedProx.

    Returns:
      `Algorithm` with an `AveragingState` of one model. Cost of a round: `C` local trainings; memory `O(chunk D)`.

    Raises:
      ValueError: an option outside its range; `init_params` of another shape; a `personal` that holds for no parameter
        or for all; `personal_steps` without it; `dp` with an adversary, an aggregator, weights by size or batch
        statistics that are sent.

    Example:
      >>> import jax, jfcl, numpy as np, optax
      >>> task = jfcl.models.task(lambda key: {"w": jax.numpy.zeros(2)}, lambda p, x: x @ p["w"], kind="regression")
      >>> x = np.random.default_rng(0).normal(size=(4, 8, 2)).astype(np.float32)
      >>> clients = jfcl.Clients({"x": x, "y": x @ np.float32([1, -1])}, np.full(4, 8, np.int32))
      >>> algorithm = jfcl.fedavg(task, jfcl.local_training(optax.sgd(0.2), num_steps=50))
      >>> state, metrics = jfcl.rollout(algorithm, clients, key=jax.random.key(0), num_rounds=1)
      >>> np.round(state.params["w"], 1).tolist()
      [[1.0, -1.0]]
    """
    return averaging(Averaging(task, training, num_clusters=1, **options))


@factory(*AVERAGING, "personal", "dp")
def fedper(task: Task, training: LocalTraining, **options: Unpack[Options]) -> Algorithm:
    """Trains a common body by FedAvg, while each client keeps and trains its own head (personalisation layers).

    Source: Federated Learning with Personalization Layers (Arivazhagan, Aggarwal, Singh, Choudhary 2019), Algorithms 1
    and 2.

    Args:
      task, training: as in `jfcl.fedavg`.
      personal: takes a parameter's path, e.g. `"Dense_1/kernel"`; true for the personal ones. Default: the last dense
        layer.

    Returns:
      `Algorithm` with an `AveragingState`: `params` holds the body `[1, ...]`, `personal` the heads `[N, ...]`. All
      heads start equal. Cost of a round: that of FedAvg; bytes: those of the body.

    Raises:
      ValueError: a model without a known last dense layer, where `personal` is not given; as in `jfcl.fedavg`.

    Example:
      >>> import jax, jfcl
      >>> from jfcl.testing import problem
      >>> clients, _, task, training = problem("network")
      >>> state = jfcl.fedper(task, training).init(jax.random.key(0), clients)
      >>> state.personal["Dense_1"]["bias"].shape, state.params["Dense_0"]["bias"].shape
      ((7, 2), (1, 5))
    """
    options["personal"] = options["personal"] or in_head(task)
    return fedavg(task, training, **options)


@factory(*AVERAGING, "personal", "dp")
def fedrep(
    task: Task, training: LocalTraining, *, personal_steps: Rounds = 10, **options: Unpack[Options]
) -> Algorithm:
    """Trains, in every round of a client, first its own head and then the common representation.

    A client takes `personal_steps` steps on its head under the round's representation, and then the steps of `training`
    on the representation under the new head. The server averages the representations.

    Source: Exploiting Shared Representations for Personalized Federated Learning (Collins, Hassani, Mokhtari,
    Shakkottai 2021), Algorithm 1, in which clients have equal weights (`weights="equal"`); the authors' code weighs
    them by size.

    Args:
      task: as in `jfcl.fedavg`.
      training: of the representation. Its optimiser and batch size are those of the head too.
      personal_steps: `τ`, local steps on the head in every round.
      personal: takes a parameter's path; true for those of the head. Default: the last dense layer.

    Returns:
      `Algorithm` with an `AveragingState` as that of `jfcl.fedper`. Cost of a round: `personal_steps` and the steps of
      `training`, each a forward and a backward pass; bytes: those of the representation.

    Raises:
      ValueError: as in `jfcl.fedper`; `keep="everything"`.

    Example:
      >>> import jax, jfcl, optax
      >>> task = jfcl.models.classification(jfcl.models.MLP(2, hidden=(5,)), (3,), 2)
      >>> algorithm = jfcl.fedrep(task, jfcl.local_training(optax.sgd(0.1), num_steps=1), personal_steps=5)
    """
    options["personal"] = options["personal"] or in_head(task)
    return fedavg(task, training, personal_steps=personal_steps, **options)


@factory(*AVERAGING, "personal", "dp")
def lg_fedavg(task: Task, training: LocalTraining, **options: Unpack[Options]) -> Algorithm:
    """Trains a common head by FedAvg on representations that each client keeps for itself.

    Source: Think Locally, Act Globally: Federated Learning with Local and Global Representations (Liang, Liu, Ziyin,
    Allen, Auerbach, Brent, Salakhutdinov, Morency 2020), Algorithm 1, without its auxiliary and adversarial losses. The
    authors' code has equal weights, `weights="equal"`.

    Args:
      task, training: as in `jfcl.fedavg`.
      personal: takes a parameter's path; true for the parameters of the representation. Default: all but the last dense
        layer.

    Returns:
      `Algorithm` with an `AveragingState`: `params` holds the head `[1, ...]`, `personal` the representations
      `[N, ...]`. Cost of a round: that of FedAvg; memory `O(N D)`; bytes: those of the head.

    Raises:
      ValueError: as in `jfcl.fedper`; a model without other layers, where `personal` is not given.

    Example:
      >>> import jax, jfcl, optax
      >>> task = jfcl.models.classification(jfcl.models.MLP(2, hidden=(5,)), (3,), 2)
      >>> algorithm = jfcl.lg_fedavg(task, jfcl.local_training(optax.sgd(0.1), num_steps=1))
    """
    if options["personal"] is None:
        head = in_head(task)
        options["personal"] = lambda path: not head(path)
    return fedavg(task, training, **options)


@factory(*AVERAGING, "dp")
def fedbn(task: Task, training: LocalTraining, **options: Unpack[Options]) -> Algorithm:
    """Runs FedAvg on all layers but those of batch normalisation, which each client keeps.

    Source: FedBN: Federated Learning on Non-IID Features via Local Batch Normalization (Li, Jiang, Zhang, Kamp, Dou
    2021), Algorithm 1. The authors' code has equal weights, `weights="equal"`.

    Args:
      task, training: as in `jfcl.fedavg`.

    Returns:
      `Algorithm` with an `AveragingState`: `personal` holds the statistics, scales and biases of batch normalisation,
      `[N, ...]`. Cost of a round: that of FedAvg.

    Raises:
      ValueError: a model without batch normalisation; as in `jfcl.fedavg`.

    Example:
      >>> import jax, jfcl
      >>> from jfcl.testing import problem
      >>> clients, _, task, training = problem("network")
      >>> state = jfcl.fedbn(task, training).init(jax.random.key(0), clients)
      >>> sorted(state.personal["BatchNorm_0"])
      ['bias', 'mean', 'scale', 'var']
    """
    names = parameter_names(jax.eval_shape(task.init, jax.random.key(0)))
    layers = {name.rpartition("/")[0] for name in names if task.statistics is not None and task.statistics(name)}
    if not layers:
        raise ValueError("FedBN needs a model with batch normalisation, such as resnet18_bn; this one has none")
    return fedavg(task, training, personal=lambda path: path.rpartition("/")[0] in layers, **options)
