"""The types of the library: `Clients`, `Task`, `Algorithm`, `Served`, `Adversary`.

Shape letters used in every docstring of the library: `N` clients, `M` examples per client, `K` clusters (or models),
`D` flat parameters, `B` batch, `C` cohort, `T` rounds.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jfcl.core.checks import check, require
from jfcl.core.packed import unpacked
from jfcl.core.platforms import in_parts

PyTree = Any
Batch = dict[str, jax.Array]  # {"x": [B, ...], "y": [B, ...]}


class Clients(NamedTuple):
    """All clients of a simulation, stacked: row `i` of every array is client `i`.

    Attributes:
      examples: pytree of `[N, M, ...]` arrays; by convention `{"x": inputs, "y": targets}`. A client's real
        examples come first; the rest is padding, which never changes a result.
      size: `[N]` int32, the number of real examples; 0 for a client that only pads the client axis.
      id: `[N]` int32, the client's number in its population, from which its randomness is derived. `None` (the
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
    """A model that begins with a dense layer on its raw inputs, separated from its remaining layers.

    With it `jfcl.training.local` trains the layer in fewer operations (see `jfcl.training.span`), and IFCA computes
    the layers of `K` models as one. `jfcl.models` makes it for `Linear` and `MLP`. In a task of your own,
    `task.apply(params, x)` must be `apply(params, inputs(x) @ kernel, x)`, where `inputs` does not depend on the
    parameters, and `apply` depends on all of them except for the kernel.

    Attributes:
      kernel: the path of the layer's kernel, `[d, H]` or `[d]`, in the parameters, such as `"Dense_0/kernel"`.
      inputs: `(x) -> [B, d]`, the inputs of the layer. Where their type is less precise than the kernel's, as in a task
        in bfloat16, the products have that type too.
      apply: `(params, products, x) -> outputs`, with `products` `[B, H]` or `[B]` for `inputs(x) @ kernel`, without a
        bias.
      whole: the task's `apply`; a task with another `apply` has no dense start.
      bias: the path of a bias, `[H]` or `[]`, that `apply` adds to the products and uses nowhere else, trained with the
        kernel as the weight of an input that is always 1. `None`: none is known.

    Example:
      >>> import jax.numpy as jnp
      >>> def line(params, x):
      ...     return x @ params["w"] + params["b"]
      >>> def squares(outputs, batch):
      ...     return (outputs - batch["y"]) ** 2
      >>> start = DenseStart("w", lambda x: x, lambda params, products, x: products + params["b"], whole=line)
      >>> task = Task(lambda key: {"w": jnp.zeros(2), "b": jnp.zeros(())}, line, squares, dense_start=start)
      >>> dense_start(task) is start, dense_start(task._replace(apply=lambda params, x: x @ params["w"]))
      (True, None)
    """

    kernel: str
    inputs: Callable[[jax.Array], jax.Array]
    apply: Callable[[PyTree, jax.Array, jax.Array], jax.Array]
    whole: Callable[[PyTree, jax.Array], jax.Array]
    bias: str | None = None

    def rows(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        """Returns the inputs `[B, d]` in the type of the products with `kernel`."""
        x = self.inputs(x)
        narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < kernel.dtype.itemsize
        return x if narrow else x.astype(kernel.dtype)


class Task(NamedTuple):
    """A model, and what is computed from its outputs, for one client. `jfcl.models` makes one from a module.

    Attributes:
      init: `(key) -> params`, a pytree of arrays.
      apply: `(params, x [B, ...]) -> outputs [B, ...]`, in evaluation.
      cost: `(outputs, batch) -> [B]`, one loss per example, so that the library owns the mask and the mean.
      correct: `(outputs, batch) -> [B]` float, the mean of which is the accuracy; `None` for regression.
      mix: `(outputs [K, B, ...], weights [K]) -> outputs [B, ...]`, the outputs of a mixture of `K` models; weights sum
        to 1, and may be 0. `None`: not known.
      perplexity: whether the exponential of the loss is a perplexity, which is then reported (language models).
      represent: `(params, x [B, ...]) -> [B, H]`, the inputs of the model's last layer; `None`: not known, and
        methods take the outputs. Another `apply` needs another one.
      dense_start: the first layer, where it is dense on the raw inputs; otherwise `None`.
      num_classes: labels are integers in `0..num_classes-1`, which `jfcl.simulate` checks; `None`: not known.
      input_shape: the shape of one input, for a task that accepts flat inputs `[B, d]` too (see `mapping.held`);
        `None`: it does not.
      train_loss: `(key, params, batch, real) -> (losses [B], params)`, the loss in training where it differs from
        `loss`: `key` draws its random numbers (dropout), `real` `[B]` bool marks the examples that are not padding, and
        the returned parameters have new statistics. `None`: training uses `loss`.
      statistics: takes a parameter's path, such as `"BatchNorm_0/mean"`; true for statistics, which `train_loss`
        replaces and no optimiser moves. They are averaged like parameters, and left out of similarities, norms and
        robust aggregation. `None`: there are none.
      head: the path of the model's last dense layer, such as `"Dense_1"`; `None`: not known.
      reads: the names of the arrays that it reads in a batch, which `jfcl.simulate` checks; empty: not known.
      merge: `(params) -> params` of the task that this one was made from: with the frozen parameters, and with adapters
        added to their kernels (see `jfcl.models.merged`). `None`: the parameters are all there are.
      inputs: `(batch) -> x`, what `apply` reads of a batch, such as all words of a text but the last. `None`:
        `batch["x"]`.
      at_once: the largest number of examples whose outputs are in memory at a time, for large outputs; their
        activations are computed again for the gradient. `None`: all.

    Example:
      >>> import jax.numpy as jnp
      >>> task = Task(
      ...     init=lambda key: {"w": jnp.zeros(2)},
      ...     apply=lambda params, x: x @ params["w"],
      ...     cost=lambda outputs, batch: jnp.abs(outputs - batch["y"]),
      ... )
      >>> task.loss(task.init(None), {"x": jnp.ones((3, 2)), "y": jnp.arange(3.0)}).tolist()
      [0.0, 1.0, 2.0]
    """

    init: Callable[[jax.Array], PyTree]
    apply: Callable[[PyTree, jax.Array], jax.Array]
    cost: Callable[[jax.Array, Batch], jax.Array]
    correct: Callable[[jax.Array, Batch], jax.Array] | None = None
    mix: Callable[[jax.Array, jax.Array], jax.Array] | None = None
    perplexity: bool = False
    represent: Callable[[PyTree, jax.Array], jax.Array] | None = None
    dense_start: DenseStart | None = None
    num_classes: int | None = None
    input_shape: tuple[int, ...] | None = None
    train_loss: Callable[[jax.Array, PyTree, Batch, jax.Array], tuple[jax.Array, PyTree]] | None = None
    statistics: Callable[[str], bool] | None = None
    head: str | None = None
    reads: tuple[str, ...] = ()
    merge: Callable[[PyTree], PyTree] | None = None
    inputs: Callable[[Batch], PyTree] | None = None
    at_once: int | None = None

    def inputs_of(self, batch: Batch) -> PyTree:
        """Returns what `apply` reads of a batch."""
        batch = unpacked(batch)
        return batch["x"] if self.inputs is None else self.inputs(batch)

    def outputs(self, params: PyTree, batch: Batch) -> jax.Array:
        """Returns the model's outputs `[B, ...]` for a batch."""
        return self.apply(params, self.inputs_of(batch))

    def scores(self, function: Callable[[jax.Array, Batch], PyTree], params: PyTree, batch: Batch) -> PyTree:
        """Returns `function(outputs, batch)`, arrays `[B]` of independent examples, such as `cost` and `correct`."""

        def score(rows, part):
            x, batch = rows
            return function(self.apply(params, x), batch)

        return in_parts(score, (self.inputs_of(batch), batch), self.at_once)

    def loss(self, params: PyTree, batch: Batch) -> jax.Array:
        """Returns the loss of each example, `[B]`."""
        return self.scores(self.cost, params, batch)


class Served(NamedTuple):
    """What each client of a method is served; evaluation, records, files and plots are made of it alone.

    Attributes:
      models: pytree of `[K, ...]`.
      to: `[N]` int32, the model of each client; `[N, K]` float32, the weights of its mixture of models, with sum 1; or
        None: client `i` has a model of its own, row `i`.
      personal: pytree of `[N, ...]`, the clients' own parameters, which complete their models; None without any.
      found: `[N]` int32, the cluster that is reported for each client; None: its model, or that of the largest weight.
      active: `[K]` bool, the models that exist, for a method that adds models during a run; None: all do.
      excluded: `[N]` int32, the round in which each client was excluded, 0 for none; None where a method excludes none.
      shares: `[N, K]` float32, with sum 1: the shares of the clusters in each client's examples, as estimated by a
        method that serves no mixture; None: it estimates none.
    """

    models: PyTree
    to: jax.Array | None
    personal: PyTree = None
    found: jax.Array | None = None
    active: jax.Array | None = None
    excluded: jax.Array | None = None
    shares: jax.Array | None = None


def serve_clusters(state: Any, clients: Clients | None = None) -> Served:
    """Returns what a state with `params` `[K, ...]` and `cluster` `[N]` serves: the model of each client's cluster."""
    return Served(state.params, state.cluster)


class Entries(NamedTuple):
    """How records summarise the metrics of a method, and the notes that a user gets.

    A record has each metric's value in the last round, except for those named here.

    Attributes:
      sums: metrics that are summed over all rounds so far (as `bytes_up`, `bytes_down`, `client_steps` and
        `nonfinite` of every method).
      largest: integer metrics, recorded as their largest value since the previous record.
      ended: the reason why a run ends when the metric `ended` is true for all seeds.
      notes: `(record, is_last) -> texts by kind`. Each kind is shown once in a run, as a warning. It is called with
        every record, and with `is_last` again at the end of the run.
    """

    sums: tuple[str, ...] = ()
    largest: tuple[str, ...] = ()
    ended: str = "the method has ended"
    notes: Callable[[dict[str, Any], bool], dict[str, str]] | None = None


class Algorithm(NamedTuple):
    """A federated method as a few pure functions, in the manner of optax and blackjax.

    Attributes:
      init: `(key, clients) -> state`.
      step: `(key, state, clients) -> (state, metrics)`, one communication round. `key` is that round's own key.
      task: the task of the parameters in the state; the simulation evaluates with it.
      check: `(clients on the host) -> None`, raises `ValueError` for clients that the method does not support, where
        their shapes do not show it. The simulation calls it before anything is compiled.
      refresh: `(state, clients) -> state`, computes again the parts of the state of each client that follow from the
        shared ones. It is called for clients of a population, most of which were not in the last round's cohort.
      serve: `(state, clients) -> Served`, what each client is served after a round. `clients` are those in training,
        for methods in which a client chooses by its examples (IFCA: the model of lowest loss now); with None, what the
        state says. Default: the model `params[cluster[i]]` of the state.
      adopt: `(state, clients) -> Served` for clients that were not in training. Default: of the models that exist, the
        one of lowest loss on their examples, with the mean of the personal parameters.
      init_costs: `(state, clients) -> metrics`, the communication and computation of `init`, which `step` adds to those
        of the first round; left out where `init` has none.
      init_rounds: the number of rounds of training in `init`. A simulation numbers its own rounds after them.
      entries: how records summarise the metrics, and the notes that a user gets.
      last_updates: `(state) -> [N]` int32, an array of the state: the round of each client's last update, for a method
        that keeps it to compare the clients of a cohort with others. None: it keeps none.

    `state` is a NamedTuple of arrays. With the default of `serve` it has at least `params`, a pytree of `[K, ...]`
    arrays, and `cluster`, `[N]` int32: the model of client `i` is `params[cluster[i]]`. `metrics` is a flat dict of
    arrays with at least `loss` `[N]`, the mean training loss of every client's model over its local training (NaN for
    clients outside the round's cohort), and `bytes_up`, `bytes_down` `[]`, the communication of the whole round.

    Example:
      >>> import jax, jfcl, numpy as np, optax
      >>> task = jfcl.models.task(lambda key: {"b": jax.numpy.zeros(())}, lambda p, x: x + p["b"], kind="regression")
      >>> clients = jfcl.Clients({"x": np.zeros((2, 4), np.float32), "y": np.ones((2, 4), np.float32)}, np.full(2, 4))
      >>> algorithm = jfcl.fedavg(task, jfcl.local_training(optax.sgd(0.5), num_steps=1))
      >>> state = algorithm.init(jax.random.key(0), clients)
      >>> state, metrics = algorithm.step(jax.random.key(1), state, clients)
      >>> state.params["b"].tolist(), metrics["loss"].tolist()
      ([1.0], [1.0, 1.0])
    """

    init: Callable[[jax.Array, Clients], Any]
    step: Callable[[jax.Array, Any, Clients], tuple[Any, dict[str, jax.Array]]]
    task: Task | None = None
    check: Callable[[Clients], None] | None = None
    refresh: Callable[[Any, Clients], Any] | None = None
    serve: Callable[[Any, Clients | None], Served] = serve_clusters
    adopt: Callable[[Any, Clients], Served] | None = None
    init_costs: Callable[[Any, Clients], dict[str, jax.Array]] | None = None
    init_rounds: int = 0
    entries: Entries = Entries()
    last_updates: Callable[[Any], jax.Array] | None = None


class Adversary(NamedTuple):
    """Hostile clients that collude when updates are sent; attacks are in `jfcl.attacks`.

    Attributes:
      attack: `(key, updates [N, ...], malicious [N] bool, usable [N] bool) -> updates`. A further parameter
        named `cluster`, `[N]` int32, receives the clusters within which updates are averaged, and one named `ids`,
        `[N]` int32, the clients' ids, for results that do not depend on the order of the rows.
      malicious: `[N]` bool, by client id: the hostile clients.

    Example:
      >>> import jfcl, numpy as np
      >>> adversary = Adversary(jfcl.attacks.ipm(), np.array([False, True, False]))
      >>> adversary.malicious.sum()
      np.int64(1)
    """

    attack: Callable[[jax.Array, PyTree, jax.Array, jax.Array], PyTree]
    malicious: Any


def check_task(task: Any) -> None:
    """Raises `ValueError` unless `task` is a `Task` with its three functions."""
    accepted = "a Task, such as jfcl.models.classification and jfcl.models.task make"
    check(isinstance(task, Task), "task", type(task).__name__, accepted)
    for name in ("init", "apply", "cost"):
        check(callable(getattr(task, name)), f"task.{name}", getattr(task, name), "a function")
    functions = task.apply, task.cost, task.inputs
    fits = getattr(task.train_loss, "functions", functions) == functions
    remedy = "replace that too, or make the task by jfcl.models.task(..., cost=, train=)"
    require(fits, f"task.apply, task.cost or task.inputs is not that of task.train_loss: {remedy}")


def with_train_loss(task: Task, train_loss: Callable | None) -> Task:
    """Returns `task` with a loss in training of its own functions, so that `check_task` refuses others beside it."""
    if train_loss is not None:
        train_loss.functions = task.apply, task.cost, task.inputs
    return task._replace(train_loss=train_loss)


def mixture_task(task: Task) -> Task:
    """Returns the task of a mixture of `K` models, with parameters `(models [K, ...], weights [K])`, for evaluation."""

    def apply(params, x):
        models, weights = params
        return task.mix(jax.vmap(task.apply, (0, None))(models, x), weights)

    return task._replace(apply=apply, represent=None, dense_start=None, head=None, train_loss=None, statistics=None)


def check_mixes(task: Task) -> None:
    """Raises `ValueError` for a task whose models cannot be mixed."""
    remedy = "jfcl.models.task(..., mix=...) takes the function that gives the outputs of a mixture"
    require(task.mix is not None, f"models of this task cannot be mixed: {remedy}")


def dense_start(task: Task) -> DenseStart | None:
    """Returns the task's `DenseStart`, `None` if made for another `apply`, or where training has its own loss."""
    start = task.dense_start
    fits = start is not None and start.whole is task.apply and task.train_loss is None
    return start if fits else None
