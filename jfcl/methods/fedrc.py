"""FedRC (Guo, Tang, Lin 2024): FedEM that divides by the share of a label in each model, for clusters by concept."""

from functools import partial
from typing import Annotated, Unpack

import jax
import jax.numpy as jnp

from jfcl.core import Algorithm, Batch, Clients, PyTree, Task, check
from jfcl.core.options import Interval
from jfcl.methods.averaging import AveragingState
from jfcl.methods.mixture import Labels, mixture
from jfcl.methods.once import labels_of
from jfcl.methods.options import AVERAGING, Count, Options, factory
from jfcl.training.local import LocalTraining


@factory(*AVERAGING)
def fedrc(
    task: Task,
    training: LocalTraining,
    *,
    num_clusters: Count,
    hard: bool = False,
    floor: Annotated[float, Interval("(0, 1)")] = 1e-8,
    **options: Unpack[Options],
) -> Algorithm:
    """Trains `K` models and the clients' mixtures as FedEM, with `q_ijk ∝ π_ik exp(−ℓ_ijk) / T[y_ij, k]`.

    `T[y, k]` is the share of the label `y` in all that the model `k` is responsible for. Models thus do not divide the
    clients by their labels, nor by their inputs, but where the same inputs have different labels (concept shift).

    Args:
      task: a classification with one label for each example.
      training, num_clusters, init_params: as in `jfcl.fedem`.
      hard: as in `jfcl.fedem`; a client fits its mixture with constant `T`.
      floor: the least share of all examples by label and model, for those that no client had in the last round.

    Returns:
      `Algorithm` as that of `jfcl.fedem`. `params["labels"]` `[1, C, K]` are the shares of all examples of the last
      round by label and model (with `weights="equal"`, the means of the clients' shares), `T` times the share of each
      model; equal at first. It has the further metric `label_spread` `[K]`, the entropy of `T[:, k]`. Cost and memory
      are those of FedEM, and a sum `[C, K]` for each client. Bytes: `C K` numbers more in each direction.

    Raises:
      ValueError: a task without labels; as in `jfcl.fedem`. `init` refuses a model with one output for two labels, and
        `jfcl.simulate` examples without labels.

    Source: FedRC: Tackling Diverse Distribution Shifts Challenge in Federated Learning by Robust Clustering (Guo, Tang,
    Lin 2024), Algorithm 1. The authors' code counts labels over all `N` clients: those outside of the cohort have their
    last sums, and before their first round equal ones. Here only participants count, as in the mean of models. Its
    floor is of sums over examples, here of shares, so that it does not depend on their number. Its test for models of
    small weight, to drop them, is commented out, and absent here.

    Example:
      >>> import jax, jfcl, optax
      >>> fed = jfcl.data.build("digits", num_clients=6, num_clusters=2, heterogeneity="label_swap")
      >>> task = jfcl.models.classification(jfcl.models.Linear(10), fed.input_shape, 10)
      >>> algorithm = jfcl.fedrc(task, jfcl.local_training(optax.sgd(0.1), num_steps=2), num_clusters=2)
      >>> state = algorithm.init(jax.random.key(0), fed.train)
      >>> state, metrics = jax.jit(algorithm.step)(jax.random.key(1), state, fed.train)
      >>> state.params["labels"].shape, metrics["label_spread"].shape
      ((1, 10, 2), (2,))
    """
    is_labelled = task.correct is not None and not task.perplexity
    check(is_labelled, "task", "one without labels", "a classification: FedRC counts the labels of each model")

    def start(models: PyTree, clients: Clients) -> jax.Array:
        outputs = jax.eval_shape(jax.vmap(jax.vmap(task.outputs, (0, None)), (None, 0)), models, clients.examples)
        fits = outputs.ndim == 4 and outputs.shape[-1] > 1
        check(fits, "the model's outputs for a batch", ("B", *outputs.shape[3:]), "[B, C], one number for each label")
        shape = outputs.shape[-1], num_clusters
        return jnp.full(shape, 1 / (shape[0] * shape[1]), jnp.float32)

    labels = Labels(start, count, partial(log_factor, floor))
    common = mixture(task, training, num_clusters, hard, labels, **options)

    def step(key: jax.Array, state: AveragingState, clients: Clients):
        state, metrics = common.step(key, state, clients)
        shares = label_shares(state.params["labels"][0], floor)
        return state, metrics | {"label_spread": -jax.scipy.special.xlogy(shares, shares).sum(axis=0)}

    def check_labelled(clients: Clients) -> None:
        common.check(clients)
        labels_of(clients, "FedRC counts them")

    return common._replace(step=step, check=check_labelled)


def label_shares(table: jax.Array, floor: float) -> jax.Array:
    """Returns `T` `[C, K]`, the shares of the labels in each model; those in all, `table`, count `floor` at least."""
    table = jnp.maximum(table, floor)
    return table / table.sum(axis=0)[None]


def log_factor(floor: float, table: jax.Array, examples: Batch) -> jax.Array:
    """Returns `−log T[y, k]` of each of one client's examples, `[M, K]`."""
    is_label = jax.nn.one_hot(examples["y"], len(table), dtype=table.dtype)
    return -jnp.matmul(is_label, jnp.log(label_shares(table, floor)), precision=jax.lax.Precision.HIGHEST)


def count(table: jax.Array, q: jax.Array, examples: Batch, size: jax.Array) -> jax.Array:
    """Returns the shares of one client's examples by label and model, `[C, K]`, in the shape of `table`."""
    is_label = jax.nn.one_hot(examples["y"], len(table), dtype=table.dtype)
    return jnp.matmul(is_label.T, q, precision=jax.lax.Precision.HIGHEST) / jnp.maximum(size, 1).astype(q.dtype)
