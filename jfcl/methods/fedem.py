"""FedEM (Marfoq, Neglia, Bellet, Kameni, Vidal 2021): clients with mixtures of models, by expectation-maximisation."""

from typing import Unpack

from jfcl.core import Algorithm, Task
from jfcl.methods.mixture import mixture
from jfcl.methods.options import AVERAGING, Count, Options, factory
from jfcl.training.local import LocalTraining


@factory(*AVERAGING, "dp")
def fedem(
    task: Task,
    training: LocalTraining,
    *,
    num_clusters: Count,
    hard: bool = False,
    **options: Unpack[Options],
) -> Algorithm:
    """Trains `K` models, of which each client has its own mixture `π_i`: each example is assumed to come from one.

    A client computes the responsibilities `q_ijk ∝ π_ik exp(−ℓ_ijk)` of the models for each of its examples, the
    E-step; its mixture becomes their mean over its examples; it trains each model on its examples with the weights
    `q_ijk`; the server averages the models by sizes. These last three are the M-step.

    Args:
      task: from `jfcl.models`, or your own with `mix`. Losses are taken for negative logarithms of likelihoods, as the
        cross-entropy is; half of a squared error is that of a Gaussian with variance 1.
      training: as in `jfcl.fedavg`. Each model has its own state of the optimiser; the batches are the same for all. A
        batch's loss is the mean of `Σ_k q_ijk ℓ_ijk`, not divided by `Σ_j q_ijk`.
      num_clusters: `K`, the number of models.
      hard: clients are served the model of the largest weight. Default: the mixture of the models' predictions. A
        client that was not in training, or is evaluated before its first round, fits its mixture alone, by 10 EM steps.
      init_params: one model, or `K` stacked. Models that start equal stay equal.

    Returns:
      `Algorithm` with an `AveragingState`: `params["models"]` `[1, K, ...]`, `personal["mixture"]` `[N, K]`, which a
      client outside the cohort keeps; equal weights at first. What is served is the `K` models and the mixtures. Its
      further metrics are `mixture_entropy` `[]`, the mean over clients, and `cluster_mass` `[K]`, the mean of the
      mixtures by sizes. Cost of a round: `K` trainings of each client, as products with a further axis of `K`, and `K`
      forward passes over its examples; `client_steps` counts a step of all `K` models once. Memory `O(chunk K D)`, and
      the activations of `K` models. Bytes: each client gets and sends `K` models.

    Raises:
      ValueError: an optimiser that needs the loss, such as `optax.polyak_sgd`; as in `jfcl.fedavg`. `jfcl.simulate`
        refuses a task without `mix`, unless `hard`.

    Source: Federated Multi-Task Learning under a Mixture of Distributions (Marfoq, Neglia, Bellet, Kameni, Vidal 2021),
    Algorithm 1 and its E- and M-step. The authors' code averages all `N` clients, where those outside the cohort count
    with their old models, so that models move less with smaller cohorts; here only participants are averaged. It keeps
    momentum from round to round, which is `keep="everything"` of the training.

    Example:
      >>> import jax, jfcl, numpy as np, optax
      >>> task = jfcl.models.task(lambda key: {"b": jax.random.normal(key)}, lambda p, x: x + p["b"], kind="regression")
      >>> y = np.float32([[0, 0, 0, 0], [0, 0, 6, 6]])  # the second client has examples of both models
      >>> clients = jfcl.Clients({"x": np.zeros((2, 4), np.float32), "y": y}, np.full(2, 4, np.int32))
      >>> start = {"b": np.float32([1, 5])}
      >>> training = jfcl.local_training(optax.sgd(0.2), num_steps=20)
      >>> algorithm = jfcl.fedem(task, training, num_clusters=2, init_params=start)
      >>> state, _ = jfcl.rollout(algorithm, clients, key=jax.random.key(0), num_rounds=10)
      >>> served = algorithm.serve(state, None)
      >>> np.abs(np.round(served.models["b"], 1)).tolist(), np.round(served.to, 2).tolist()
      ([0.0, 6.0], [[1.0, 0.0], [0.5, 0.5]])
    """
    return mixture(task, training, num_clusters, hard, None, **options)
