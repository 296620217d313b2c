"""Mixtures of models: FedAvg of the stack of `K` models, which each client weighs for each of its examples."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jfcl import mapping
from jfcl.core import Algorithm, Batch, Clients, PyTree, Served, Task, check, check_mixes, num_clients
from jfcl.methods import round as phases
from jfcl.methods.averaging import Averaging, AveragingState, averaging, state_of
from jfcl.training.local import LocalTraining, Trained
from jfcl.training.losses import example_losses, masked_mean, means
from jfcl.training.optimizer import check_optimizer, of_each

FIT_STEPS = 10  # EM steps with which a client fits its mixture that has not taken part in a round
WEIGHT = "responsibility"  # the name of a client's responsibilities `[M, K]` among its arrays


class Labels(NamedTuple):
    """What a server learns of the labels: a table, the mean of the clients' tables.

    Attributes:
      start: `(models [K, ...], clients) -> table`, before the first round.
      count: `(table, q [M, K], examples, size) -> table`, that of one client.
      log_factor: `(table, examples) -> [M, K]`, added to the logarithm of the responsibilities.
    """

    start: Callable[[PyTree, Clients], jax.Array]
    count: Callable[[jax.Array, jax.Array, Batch, jax.Array], jax.Array]
    log_factor: Callable[[jax.Array, Batch], jax.Array]


def mixture(
    task: Task, training: LocalTraining, num_clusters: int, hard: bool, labels: Labels | None, **options: Any
) -> Algorithm:
    """Builds a method with mixtures, for authors of methods; users call `jfcl.fedem` or `jfcl.fedrc`.

    Returns:
      `Algorithm` with an `AveragingState` of one model, `params` `{"models": [1, K, ...], "labels": [1, ...]}`, and
      `personal["mixture"]` `[N, K]`. Metrics of `averaging`, `mixture_entropy` `[]`, `cluster_mass` `[K]`.

    Raises:
      ValueError: optimisers that need the loss; as in `jfcl.fedavg`. `check` refuses a task without `mix`.
    """
    for name, optimizer in (("optimizer", training.optimizer), ("server_optimizer", options["server_optimizer"])):
        if optimizer is not None:  # the models have one loss, their sum
            check_optimizer(name, optimizer, task, with_loss=False)
    start, server = options.pop("init_params"), options.pop("server_optimizer")
    rules = Averaging(
        stacked(task, num_clusters, labels is not None),
        training._replace(optimizer=of_each(training.optimizer, "models"), augment=of_data(training.augment)),
        num_clusters=1,
        personal=lambda path: path == "mixture",
        train=partial(train, task, labels),
        server_optimizer=None if server is None else of_each(server, "models"),
        **options,
    )
    common, serve = averaging(rules), ServeMixture(task, rules.client_axis, hard)

    def init(key: jax.Array, clients: Clients) -> AveragingState:
        models = phases.initial_models(task, key, num_clusters, start)
        whole = stack_of(models, None if labels is None else labels.start(models, clients))
        whole, cluster = jax.tree.map(lambda p: p[None], whole), jnp.zeros(num_clients(clients), jnp.int32)
        return state_of(rules, clients, cluster, *phases.initial_scopes(rules.personal, whole, cluster))

    def step(key: jax.Array, state: AveragingState, clients: Clients):
        state, metrics = common.step(key, state, clients)
        return state, metrics | spread(state.personal["mixture"], jnp.asarray(clients.size))

    def check_all(clients: Clients) -> None:
        if not hard:
            check_mixes(task)
        names = sorted(clients.examples) if isinstance(clients.examples, dict) else type(clients.examples).__name__
        accepted = f"a dict of arrays, none of them named {WEIGHT!r}: mixtures add this one"
        check(isinstance(clients.examples, dict) and WEIGHT not in names, "clients.examples", names, accepted)

    return Algorithm(init, step, task, check_all, serve=serve, adopt=serve.adopt)


@dataclass(frozen=True)  # equal ones share programs; a tuple would equal those of other classes
class ServeMixture:
    """`Algorithm.serve` of methods with mixtures.

    Attributes:
      task, client_axis: of one model; the clients' mapping.
      hard: whether a client is served the model of the largest weight in its mixture, instead of the mixture.
    """

    task: Task
    client_axis: mapping.Mapping
    hard: bool

    def __call__(self, state: AveragingState, clients: Clients | None = None) -> Served:
        """Returns the models, and what each client is served of them.

        With `clients`, those that have not taken part, whose weights are still equal, are served what they fit.
        """
        models, weights = models_of(state), state.personal["mixture"]
        if clients is not None and weights.shape[1] > 1:
            new = (weights == equal_weights(weights.shape[1])[None]).all(axis=1) & (jnp.asarray(clients.size) > 0)
            weights = phases.known_or_fitted(new, lambda: phases.fit_to_models(self, fitted, models, clients), weights)
        return self.of(models, weights)

    def adopt(self, state: AveragingState, clients: Clients) -> Served:
        """Returns the models, and what clients that were not in training are served of them."""
        models = models_of(state)
        return self.of(models, phases.fit_to_models(self, fitted, models, clients))

    def of(self, models: PyTree, weights: jax.Array) -> Served:
        """Returns what clients with the mixtures `weights` `[N, K]` are served."""
        return Served(models, weights.argmax(axis=1).astype(jnp.int32) if self.hard else weights)


def models_of(state: AveragingState) -> PyTree:
    """Returns the models `[K, ...]` of a state."""
    return jax.tree.map(lambda p: p[0], state.params["models"])


def stack_of(models: PyTree, table: jax.Array | None) -> PyTree:
    """Returns the models `[K, ...]`, the mixture of a client at first, and the table of labels, as one model."""
    stack = {"models": models, "mixture": equal_weights(len(jax.tree.leaves(models)[0]))}
    return stack if table is None else stack | {"labels": table}


def equal_weights(num_clusters: int) -> jax.Array:
    """Returns the mixture `[K]` of a client before its first round."""
    return jnp.full(num_clusters, 1 / num_clusters, jnp.float32)


def stacked(task: Task, num_clusters: int, has_labels: bool) -> Task:
    """Returns the task of `stack_of` `K` models: the sum of their losses, each times its responsibility.

    The mixture and the table are statistics, which no optimiser moves.
    """

    def init(key: jax.Array) -> PyTree:
        models = jax.vmap(task.init)(jax.random.split(key, num_clusters))
        return stack_of(models, jnp.zeros((1, num_clusters)) if has_labels else None)

    def train_loss(key: jax.Array, stack: PyTree, batch: Batch, real: jax.Array) -> tuple[jax.Array, PyTree]:
        models = stack["models"]
        if task.train_loss is None:
            losses = jax.vmap(task.loss, (0, None))(models, batch)
        else:
            keys = jax.random.split(key, num_clusters)
            losses, models = jax.vmap(task.train_loss, (0, 0, None, None))(keys, models, batch, real)
        return (batch[WEIGHT].T.astype(losses.dtype) * losses).sum(axis=0), stack | {"models": models}

    def is_statistic(path: str) -> bool:
        part, _, name = path.partition("/")
        return part != "models" or (task.statistics is not None and task.statistics(name))

    absent = dict.fromkeys(("dense_start", "represent", "head", "merge"))
    return task._replace(init=init, train_loss=train_loss, statistics=is_statistic, **absent)


def of_data(augment: Callable[[jax.Array, Batch], Batch] | None) -> Callable[[jax.Array, Batch], Batch] | None:
    """Returns the augmentation of batches with responsibilities, which it neither sees nor changes."""
    if augment is None:
        return None
    return lambda key, batch: augment(key, {n: x for n, x in batch.items() if n != WEIGHT}) | {WEIGHT: batch[WEIGHT]}


def train(
    task: Task, labels: Labels | None, rules: Averaging, key, stack: PyTree, personal, examples: Batch, size, *args, **_
) -> tuple[Trained, PyTree, PyTree]:
    """Computes one client's responsibilities and mixture, and trains its models: a form of `round.train_scopes`."""
    losses = example_losses(task, stack["models"], examples, size)
    log_factor = 0.0 if labels is None else labels.log_factor(stack["labels"], examples)
    q, weights = responsibilities(personal["mixture"], losses, size, log_factor)
    with_q = personal | {"mixture": weights}, examples | {WEIGHT: q}
    trained, update, personal = phases.train_scopes(rules, key, stack, *with_q, size, *args)
    if labels is not None:  # the mean of the clients' models then has the mean of their tables
        update |= {"labels": labels.count(stack["labels"], q, examples, size) - stack["labels"]}
    return trained, update, personal


def responsibilities(
    weights: jax.Array, losses: jax.Array, size: jax.Array, log_factor: jax.Array | float = 0.0
) -> tuple[jax.Array, jax.Array]:
    """Returns one client's responsibilities `[M, K]`, 0 for padding, and its next mixture `[K]`, their mean.

    `weights` `[K]` are its mixture, `losses` `[M, K]` the negative logarithms of the likelihoods; for `log_factor` see
    `Labels`.
    """
    q = jax.nn.softmax(jnp.log(weights)[None] - losses + log_factor, axis=1)
    real = jnp.arange(len(q)) < size
    return jnp.where(real[:, None], q, jnp.zeros_like(q)), jnp.where(size > 0, means(q, size), weights)


def fitted(task: Task, models: PyTree, examples: Batch, size: jax.Array) -> jax.Array:
    """Returns the mixture `[K]` of a client that was not in training, after steps from equal weights."""
    losses = example_losses(task, models, examples, size)
    start = equal_weights(losses.shape[1])
    return jax.lax.fori_loop(0, FIT_STEPS, lambda _, weights: responsibilities(weights, losses, size)[1], start)


def spread(weights: jax.Array, size: jax.Array) -> dict[str, jax.Array]:
    """Returns the metrics `mixture_entropy` and `cluster_mass` of the clients' mixtures `[N, K]`."""
    counts = size.astype(jnp.float32)
    entropy = -jax.scipy.special.xlogy(weights, weights).sum(axis=1)
    mass = (counts[:, None] * weights).sum(axis=0) / jnp.maximum(counts.sum(), 1)
    return {"mixture_entropy": masked_mean(entropy, size > 0), "cluster_mass": mass}
