"""kNN-Per (Marfoq, Neglia, Kameni, Vidal 2022): a global model, and each client's neighbours in its representation."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from jfcl import mapping
from jfcl.core.checks import INT32_MAX, check, is_concrete
from jfcl.core.clients import num_clients
from jfcl.core.options import Interval, Real
from jfcl.core.types import Algorithm, Batch, Clients, PyTree, Task
from jfcl.kernels.base import sum_dtype
from jfcl.methods.averaging import AveragingState
from jfcl.methods.fedavg import fedavg
from jfcl.methods.options import AVERAGING, Count, Options, factory
from jfcl.methods.personal import PersonalState, serve_personal
from jfcl.models.tasks import predicted
from jfcl.training import local, losses

MIXINGS = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)  # the authors of Federated-Clustering try these
LEAST = 1e-7  # the least probability of a label: neighbours alone may give it 0
ROUGH = 1e-4  # rounding of squared distances, as a share of their scale, from which on they are computed exactly


class Neighbours(NamedTuple):
    """The models that clients predict with, `[N, ...]` each.

    Attributes:
      model: the global model.
      memory: `[M, H]`, the model's representations of the client's examples.
      label: `[M]` int32, their labels.
      size: `[]` int32, their number.
      mixing: `[]`, the weight of the neighbours, `λ`; 0 for a client without examples.
    """

    model: PyTree
    memory: jax.Array
    label: jax.Array
    size: jax.Array
    mixing: jax.Array


@factory(*AVERAGING)
def knn_per(
    task: Task,
    training: local.LocalTraining,
    *,
    num_neighbours: Count = 10,
    mixing: Annotated[Real | None, Interval("[0, 1]")] = None,
    validation: Annotated[float, Interval("(0, 1)")] = 0.2,
    scale: Annotated[Real | None, Interval("(0, inf)")] = None,
    **options: Unpack[Options],
) -> Algorithm:
    """Trains a model by FedAvg; each client predicts with `λ p_kNN(y | x) + (1 − λ) p_global(y | x)`, `λ` its own.

    `p_kNN` gives the labels of the `k` nearest of the client's own training examples the weights `exp(−d² / scale)`,
    where `d` is the distance in the global model's representation, `task.represent`, or its outputs where that is None.

    Args:
      task: a classification.
      training: as in `jfcl.fedavg`.
      num_neighbours: `k`, the number of neighbours, at most the number of training examples of any client.
      mixing: `λ`, the weight of the neighbours, in [0, 1] for all clients; default: each client's own, the best of
        `MIXINGS` (the first of equals) on its validation examples.
      validation: the share of a client's training examples, its last ones, that choose its `λ`. FedAvg does not train
        on them (of drifting data the newest); they are neighbours once `λ` is chosen. Unused with `mixing`.
      scale: what squared distances are divided by; default: the number of dimensions of the representation, as in the
        authors' code. (10 for the 10 outputs in the experiments of Federated-Clustering.)

    Returns:
      `Algorithm` with a `PersonalState`, whose `params` are `Neighbours` and whose `common` is FedAvg's state, and a
      task of its own: the mixture. Cost of a round: FedAvg's and a pass over all examples; their representations are
      kept: `O(N (D + M H))` memory, with the global model once per client.

    Raises:
      ValueError: an option outside its range; `k` larger than the smallest client's data; a task without labels; as in
        `jfcl.fedavg`.

    Example:
      >>> import jax, jfcl, numpy as np, optax
      >>> fed = jfcl.data.build("digits", num_clients=6, num_clusters=2, heterogeneity="private_label")
      >>> task = jfcl.models.classification(jfcl.models.MLP(10), fed.input_shape, 10)
      >>> algorithm = jfcl.knn_per(task, jfcl.local_training(optax.sgd(0.1), num_steps=10))
      >>> state, _ = jfcl.rollout(algorithm, fed.train, key=jax.random.key(0), num_rounds=3)
      >>> found = jfcl.evaluate(algorithm.task, state.params, fed.test, state.cluster)
      >>> bool(found["accuracy"].mean() > 0.75)  # one model for both clusters cannot reach this
      True
    """
    check(task.correct is not None and not task.perplexity, "task", "one without labels", "a classification")
    method = Mixture(task, task.represent or task.apply, num_neighbours, mixing, validation, scale)
    common = fedavg(task, training, **options)

    def personal_models(common_state: AveragingState, clients: Clients) -> Neighbours:
        """Returns every client's neighbours under the global model."""
        model, size = jax.tree.map(lambda p: p[0], common_state.params), jnp.asarray(clients.size)
        # The model is an argument: JAX cannot index arrays from outside in a function that `shard_map` divides.
        remember_all = options["client_axis"](partial(remember, method), in_axes=(None, 0, 0))
        memory, label, weight = remember_all(model, clients.examples, size)
        copies = jax.tree.map(lambda p: jnp.broadcast_to(p, (len(size), *p.shape)), model)
        return Neighbours(copies, memory, label.astype(jnp.int32), size, weight)

    def training_part(clients: Clients) -> Clients:
        return clients._replace(size=num_training(method, jnp.asarray(clients.size)))

    def enough_neighbours(clients: Clients) -> None:
        sizes = np.asarray(clients.size)
        least, source = int(sizes[sizes > 0].min(initial=INT32_MAX)), "the smallest client's examples"
        if mixing is None:
            num_trained = least - int(np.float32(validation) * np.float32(least))  # as `num_training` computes it
            least, source = min(num_trained, max(least - 1, 1)), source + " less those that choose its mixing weight"
        check(num_neighbours <= least, "num_neighbours", num_neighbours, f"at most {least}, {source}")

    def init(key: jax.Array, clients: Clients) -> PersonalState:
        if is_concrete(clients.size):
            enough_neighbours(clients)
        common_state = common.init(key, training_part(clients))
        cluster = jnp.arange(num_clients(clients), dtype=jnp.int32)
        params, rounds = personal_models(common_state, clients), jnp.zeros((), jnp.int32)
        return PersonalState(params, cluster, rounds, common=common_state)

    def step(key: jax.Array, state: PersonalState, clients: Clients):
        common_state, metrics = common.step(key, state.common, training_part(clients))
        params = personal_models(common_state, clients)
        metrics |= {"mixing": jnp.where(jnp.asarray(clients.size) > 0, params.mixing, jnp.nan)}
        return state._replace(params=params, round=state.round + 1, common=common_state), metrics

    def refresh(state: PersonalState, clients: Clients) -> PersonalState:
        return state._replace(params=personal_models(state.common, clients))

    return Algorithm(init, step, task_with_neighbours(method), enough_neighbours, refresh, serve_personal)


class Mixture(NamedTuple):
    """The arguments of `knn_per` that define predictions."""

    task: Task
    represent: Callable[[PyTree, jax.Array], jax.Array]
    num_neighbours: int
    mixing: Any
    validation: float
    scale: Any


def num_training(method: Mixture, size: jax.Array) -> jax.Array:
    """Returns how many of a client's examples FedAvg trains on; the others choose `λ`."""
    if method.mixing is not None:
        return size
    num_trained = size - jnp.floor(method.validation * size.astype(jnp.float32)).astype(size.dtype)
    return jnp.where(size > 1, jnp.minimum(num_trained, size - 1), size)


def neighbours(
    method: Mixture, memory: jax.Array, label: jax.Array, size: jax.Array, x: jax.Array, num_classes: int
) -> jax.Array:
    """Returns `[B, C]`: the label probabilities of `x` `[B, H]` by the `k` nearest of the first `size` of `memory`.

    Squared distances come from a matrix product. Where examples are so far apart that its rounding would change the
    weights, those of the `4 k` nearest are computed again, from differences.
    """
    x, memory = (part.astype(sum_dtype(part)) for part in (x, memory))
    real, count = jnp.arange(len(memory)) < size, min(method.num_neighbours, len(memory))
    width = jnp.asarray(memory.shape[1] if method.scale is None else method.scale, memory.dtype)
    center = jnp.where(real[:, None], memory, 0.0).sum(axis=0) / jnp.maximum(size, 1).astype(memory.dtype)
    around, of_x = memory - center[None], x - center[None]
    norms = jnp.where(real, jnp.square(around).sum(axis=1), 0.0)
    squares = jnp.square(of_x).sum(axis=1)[:, None] + norms[None, :]
    squares = squares - 2.0 * jnp.matmul(of_x, around.T, precision=jax.lax.Precision.HIGHEST)
    squares = jnp.where(real, jnp.maximum(squares, 0.0), jnp.inf)

    def from_differences():
        _, rows = jax.lax.top_k(-squares, min(4 * count, len(memory)))
        exact = mapping.chunked(1)(lambda row: jnp.square(x - memory[row]).sum(axis=1))(rows.T).T  # a [B, H] at a time
        near, places = jax.lax.top_k(-jnp.where(real[rows], exact, jnp.inf), count)
        return near, jnp.take_along_axis(rows, places, axis=1)

    is_rough = jnp.finfo(memory.dtype).eps * norms.max() > ROUGH * width
    near, rows = jax.lax.cond(is_rough, from_differences, lambda: tuple(jax.lax.top_k(-squares, count)))
    shares = jax.nn.softmax(jnp.maximum(near / width, jnp.finfo(near.dtype).min), axis=1)  # finite without examples
    return (shares[:, :, None] * jax.nn.one_hot(label[rows], num_classes)).sum(axis=1)


def remember(method: Mixture, model: PyTree, examples: Batch, size: jax.Array):
    """Returns one client's `(memory [M, H], label [M], λ [])` under the global model, see `Neighbours`."""
    examples = losses.fill_padding(examples, size)
    x, label = method.task.inputs_of(examples), examples["y"]
    memory = method.represent(model, x)
    if method.mixing is not None:
        return memory, label, jnp.where(size > 0, method.mixing, 0.0).astype(jnp.float32)
    outputs = method.task.apply(model, x)
    m, first = len(label), num_training(method, size)
    by_neighbours = neighbours(method, memory, label, first, memory, outputs.shape[1])
    judged = (jnp.arange(m) >= first) & (jnp.arange(m) < size)

    def num_right(share):
        guess = predicted(share * by_neighbours + (1 - share) * jax.nn.softmax(outputs))
        return ((guess == label) & judged).sum()

    candidates = jnp.array(MIXINGS, jnp.float32)
    best = candidates[jnp.argmax(jax.vmap(num_right)(candidates))]
    return memory, label, jnp.where(size > 0, best, jnp.zeros_like(best))


def task_with_neighbours(method: Mixture) -> Task:
    """Returns the task of the mixture, with `Neighbours` as parameters and logarithms of probabilities as outputs."""

    def apply(params: Neighbours, x):
        outputs = method.task.apply(params.model, x)
        represented = method.represent(params.model, x)
        by_neighbours = neighbours(method, params.memory, params.label, params.size, represented, outputs.shape[1])
        mixture = params.mixing * by_neighbours + (1 - params.mixing) * jax.nn.softmax(outputs)
        return jnp.log(jnp.maximum(mixture, LEAST))

    def cost(outputs, batch):
        return -jnp.take_along_axis(outputs, batch["y"][:, None], axis=1)[:, 0]

    same = ("init", "correct", "mix", "num_classes", "reads", "inputs", "at_once")
    return Task(apply=apply, cost=cost, **{name: getattr(method.task, name) for name in same})
