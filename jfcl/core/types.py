"""The types everything is made of: `Clients`, `Task`, `Algorithm`, `Adversary`.

Shape letters used in every docstring of the library: `N` clients, `M` examples per client, `K` clusters (or models),
`D` flat parameters, `B` batch, `C` cohort, `T` rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

PyTree = Any
Batch = dict[str, jax.Array]  # {"x": [B, ...], "y": [B, ...]}


class Clients(NamedTuple):
    """All clients of a simulation, stacked: row `i` of every array is client `i`.

    Attributes:
      examples: pytree of `[N, M, ...]` arrays; by convention `{"x": inputs, "y": targets}`. A client's real
        examples come first; what stands behind them is padding and is never looked at.
      size: `[N]` int32, the number of real examples; 0 for a client that only pads the client axis.
      id: `[N]` int32, the client's name in its population, from which its randomness is derived. `None` (the
        default) means `0 .. N-1`.

    Example:
      >>> import numpy as np
      >>> clients = Clients({"x": np.zeros((3, 5, 2)), "y": np.zeros((3, 5))}, np.array([5, 2, 0], np.int32))
      >>> clients.size.shape, clients.examples["x"].shape
      ((3,), (3, 5, 2))
    """

    examples: PyTree
    size: jax.Array
    id: jax.Array | None = None


class DenseStart(NamedTuple):
    """A model that begins with a dense layer on its raw inputs, told apart from what follows that layer.

    With it `jfcl.client.local` can train the layer in fewer operations (see `jfcl.client.span`), and IFCA compute
    that of `K` models as one. `jfcl.models` makes it for `Linear` and `MLP`; a user's own task may bring one:

      `task.loss(params, batch)` must be `loss(params, inputs(batch) @ kernel, batch)`, where `inputs` knows nothing of
      the parameters, and `loss` looks at all of them but the kernel.

    Attributes:
      kernel: the path of the layer's kernel, `[d, H]` or `[d]`, in the parameters, such as `"Dense_0/kernel"`.
      inputs: `(batch) -> [B, d]`, what the kernel multiplies.
      loss: `(params, products, batch) -> [B]`, with `products` `[B, H]` or `[B]` in the place of
        `inputs(batch) @ kernel`. A bias is no part of the products.
      whole: the task's `loss`; a task whose `loss` has been replaced by another has no dense start any more.

    Example:
      >>> import jax.numpy as jnp
      >>> def squares(params, products, batch):
      ...     return (products + params["b"] - batch["y"]) ** 2
      >>> def loss(params, batch):
      ...     return squares(params, batch["x"] @ params["w"], batch)
      >>> start = DenseStart("w", lambda batch: batch["x"], squares, whole=loss)
      >>> task = Task(lambda key: {"w": jnp.zeros(2), "b": jnp.zeros(())}, loss, None, dense_start=start)
      >>> dense_start(task) is start, dense_start(task._replace(loss=lambda params, batch: batch["y"]))
      (True, None)
    """

    kernel: str
    inputs: Callable[[Batch], jax.Array]
    loss: Callable[[PyTree, jax.Array, Batch], jax.Array]
    whole: Callable[[PyTree, Batch], jax.Array]


class Task(NamedTuple):
    """What a model is and how it is judged, for one client. Build one with `jfcl.models.classification` and the like.

    Attributes:
      init: `(key) -> params`, a pytree of arrays.
      loss: `(params, batch) -> [B]`, one loss per example, so that the library owns the mask and the mean.
      predict: `(params, inputs [B, ...]) -> outputs [B, ...]`.
      correct: `(params, batch) -> [B]` float, what "accuracy" is the mean of; `None` where there is none (regression).
      perplexity: the loss is one of a word, so that its exponential is a perplexity, and is reported (language models).
      represent: `(params, inputs [B, ...]) -> [B, H]`, what the model makes of inputs before its last layer; `None`
        where that is not known (kNN-Per then takes the outputs).
      dense_start: how the model begins, where that is a dense layer on the raw inputs; else `None`.
      num_classes: labels are integers in `0..num_classes-1`, which `jfcl.simulate` makes sure of; `None`: not known.
    """

    init: Callable[[jax.Array], PyTree]
    loss: Callable[[PyTree, Batch], jax.Array]
    predict: Callable[[PyTree, jax.Array], jax.Array]
    correct: Callable[[PyTree, Batch], jax.Array] | None = None
    perplexity: bool = False
    represent: Callable[[PyTree, jax.Array], jax.Array] | None = None
    dense_start: DenseStart | None = None
    num_classes: int | None = None


class Algorithm(NamedTuple):
    """A federated method as two pure functions, in the manner of optax and blackjax.

    Attributes:
      init: `(key, clients) -> state`.
      step: `(key, state, clients) -> (state, metrics)`, one communication round. `key` is that round's own key.
      task: the task whose parameters the state holds; the simulation evaluates with it.
      check: `(clients on the host) -> None`: a `ValueError` for clients that the method cannot do with, where shapes do
        not tell; the simulation asks before anything is compiled.
      refresh: `(state, clients) -> state`: what is kept of each client but follows from what all have in common, made
        anew; asked of a population's clients, most of whom took no part in the last round.
      by_loss: whether a client chooses among the models by its loss (IFCA). A simulation may then serve it the model of
        lowest loss now, in the place of the state's.

    `state` is a NamedTuple of arrays with at least `params`, a pytree of `[K, ...]` arrays, and `cluster`, `[N]` int32:
    client `i` is served the model `params[cluster[i]]`. `metrics` is a flat dict of arrays with at least `loss` `[N]`,
    the mean training loss of every client's model over its local training (NaN for clients that sat the round out),
    and `bytes_up`, `bytes_down` `[]`, the communication of the whole round, float32.
    """

    init: Callable[[jax.Array, Clients], Any]
    step: Callable[[jax.Array, Any, Clients], tuple[Any, dict[str, jax.Array]]]
    task: Task | None = None
    check: Callable[[Clients], None] | None = None
    refresh: Callable[[Any, Clients], Any] | None = None
    by_loss: bool = False


class Adversary(NamedTuple):
    """Hostile clients who act together when updates are sent; attacks are in `jfcl.attacks`.

    Attributes:
      attack: `(key, updates [N, ...], malicious [N] bool, usable [N] bool) -> updates`. With a fifth parameter called
        `cluster` it is also told, `[N]` int32, whose updates are averaged with whose.
      malicious: `[N]` bool, by client id: who they are.
    """

    attack: Callable[[jax.Array, PyTree, jax.Array, jax.Array], PyTree]
    malicious: Any


def dense_start(task: Task) -> DenseStart | None:
    """The task's `DenseStart`, unless its loss is not the one that it was made for."""
    start = task.dense_start
    return start if start is not None and start.whole is task.loss else None
