"""A `Task` from a flax module, linen or nnx, or from any pair of init and apply functions."""

import math
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from jfcl.core.checks import check, check_choice, check_count, check_shape
from jfcl.core.parameters import divided, joined, parameter_names
from jfcl.core.platforms import by_platform
from jfcl.core.types import Batch, DenseStart, PyTree, Task, check_task, dense_start, with_train_loss
from jfcl.models.modules import Network, at_layers, ends_in_softmax, explained, module_name, of_linen
from jfcl.models.networks import MLP, Linear

KINDS = ("classification", "regression")
DENSE_FIRST = (Linear, MLP)  # modules with a first layer, "Dense_0", on the flattened input


def task(
    init: Callable[[jax.Array], PyTree],
    apply: Callable[[PyTree, jax.Array], jax.Array],
    *,
    kind: str | None = None,
    cost: Callable[[jax.Array, Batch], jax.Array] | None = None,
    correct: Callable[[jax.Array, Batch], jax.Array] | None = None,
    mix: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
    half: bool = False,
    train: Callable[[jax.Array, PyTree, jax.Array, jax.Array], tuple[jax.Array, PyTree]] | None = None,
    statistics: Callable[[str], bool] | None = None,
) -> Task:
    """Returns a task from two functions, or three where training and evaluation differ.

    Args:
      init, apply, cost, correct, mix, statistics: as in `jfcl.Task`; `cost` stands in place of `kind`.
      kind: `"classification"`: cross-entropy of integer labels, logits `[B, num_classes]`, accuracy of the largest one.
        `"regression"`: squared error of outputs of the targets' shape, or with one more axis of length 1, summed over
        those of an example; no accuracy. A mixture has the logarithm of the mean of the probabilities, and the mean of
        the values.
      half: 1/2 of the squared error, for a regression.
      train: `(key, params, x [B, ...], real [B]) -> (outputs, params)`, the model in training: `key` draws its random
        numbers, `real` marks the examples that are not padding, and the returned parameters have new statistics.
        Default: `apply`.

    Returns:
      `Task`; its batches are `{"x": [B, ...], "y": [B, ...]}`, or have what `cost` reads.

    Example:
      >>> import jax.numpy as jnp
      >>> line = task(lambda key: {"w": jnp.ones(2)}, lambda params, x: x @ params["w"], kind="regression")
      >>> line.loss(line.init(None), {"x": jnp.ones((1, 2)), "y": jnp.zeros(1)}).tolist()
      [4.0]
      >>> robust = task(line.init, line.apply, cost=lambda outputs, batch: jnp.abs(outputs - batch["y"]))
      >>> robust.loss(robust.init(None), {"x": jnp.ones((1, 2)), "y": jnp.zeros(1)}).tolist()
      [2.0]
    """
    if (kind is None) == (cost is None):
        raise ValueError(f"Give either kind ({' or '.join(map(repr, KINDS))}) or cost, a function of the outputs.")
    if kind is not None:
        check_choice("kind", kind, KINDS)
    for name, function in {"cost": cost, "correct": correct, "mix": mix}.items():
        check(function is None or callable(function), name, function, "a function of the model's outputs")
    check(kind == "regression" or not half, "half", half, 'False without kind="regression", which has a squared error')
    check(train is not None or statistics is None, "statistics", statistics, "left out without train")
    if kind == "classification":
        cost = lambda outputs, batch: cross_entropy(outputs, batch["y"])  # noqa: E731
        correct = correct or (lambda outputs, batch: is_right(outputs, batch["y"]))
        mix = mix or mixed_logits
    elif kind == "regression":
        factor = 0.5 if half else 1.0
        cost, mix = lambda outputs, batch: factor * _squared_error(outputs, batch), mix or _mean

    def train_loss(key, params, batch, real):
        outputs, params = train(key, params, batch["x"], real)
        return cost(outputs, batch), params

    reads = ("x",) if kind is None else ("x", "y")
    made = Task(init, apply, cost, correct, mix, statistics=statistics, reads=reads)
    return with_train_loss(made, None if train is None else train_loss)


def _squared_error(outputs: jax.Array, batch: Batch) -> jax.Array:
    outputs, y = _wide(outputs), batch["y"]
    fits = outputs.shape in (y.shape, (*y.shape, 1))
    check(fits, "the shape of the model's outputs", outputs.shape, f"the targets' shape, {y.shape}, or {(*y.shape, 1)}")
    error = jnp.square(outputs.reshape(y.shape) - y)
    return error.reshape(len(error), -1).sum(axis=1)


def predicted(logits: jax.Array) -> jax.Array:
    """Returns the class of the largest logit, int32; -1, which is never right, where a logit is NaN."""
    return jnp.where(jnp.isnan(logits.max(axis=-1)), -1, jnp.argmax(logits, axis=-1)).astype(jnp.int32)


def is_right(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns 1.0 where the label has the largest logit, else 0.0."""
    return (predicted(logits) == labels).astype(jnp.float32)


def mixed_logits(logits: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns the logarithm of the mean of `K` models' probabilities: logits `[B, ..., num_classes]` again."""
    values, weights = _counted(jax.nn.log_softmax(_wide(logits)), weights)
    return jax.nn.logsumexp(values, axis=0, b=jnp.broadcast_to(weights, values.shape))


def _mean(values: jax.Array, weights: jax.Array) -> jax.Array:
    values, weights = _counted(_wide(values), weights)
    return (weights * values).sum(axis=0)


def _counted(values: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns values `[K, ...]`, 0 where a model does not count (it may have NaN), and weights of that rank."""
    weights = weights.astype(values.dtype).reshape(-1, *[1] * (values.ndim - 1))
    return jnp.where(weights > 0, values, jnp.zeros_like(values)), weights


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) if x.dtype.itemsize < 4 else x


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns `-log softmax(logits)[label]`, float32 at least, of `logits` `[..., num_classes]` and `labels` `[...]`.

    Accelerators compare the classes with the label, since a gather is slow there. A label out of range gives NaN.
    """
    wanted = f"{logits.shape[:-1]}, one label for each vector of logits {logits.shape} (y.argmax(-1) of one-hot rows)"
    check(labels.shape == logits.shape[:-1], "the shape of the labels", labels.shape, wanted)
    is_integer = jnp.issubdtype(labels.dtype, jnp.integer)
    check(is_integer, "the type of the labels", labels.dtype.name, "one of integers, as from y.astype(np.int32)")
    if labels.dtype.itemsize < 4:
        labels = labels.astype(jnp.int32)  # the number of classes may not fit into 8 bits

    def compared(logits, labels):
        chosen = jax.nn.one_hot(labels, logits.shape[-1], dtype=bool)
        return -jnp.where(chosen, jax.nn.log_softmax(logits), jnp.zeros_like(logits)).sum(axis=-1)

    classes = jnp.clip(labels, 0, logits.shape[-1] - 1)
    gathered = optax.softmax_cross_entropy_with_integer_labels
    losses = by_platform(_wide(logits), classes, cpu=gathered, accelerator=compared)
    # A product, so that the gradient is NaN too, and the client is left out and counted.
    return losses * jnp.where(labels == classes, 1.0, jnp.nan).astype(losses.dtype)


def network(
    module: Any, input_shape: tuple[int, ...], dtype: Any, training_argument: str | None, logits: tuple[int, ...] | None
) -> Network:
    """Returns the functions of a module, with the arguments of `classification`; `dtype` is that of the inputs.

    With `logits`, the shape of those of an example, it refuses other outputs, and warns of those of a softmax.
    """
    name, kind = module_name(module), type(module)
    is_class = isinstance(module, type) and issubclass(module, nn.Module)
    check(not is_class, "module", f"the class {name}", f"an instance of a flax.linen module, such as {name}(...)")
    of_images = kind.__module__.startswith("jfcl.models") and kind not in DENSE_FIRST
    is_first = len(input_shape) == 3 and input_shape[0] <= 4 < min(input_shape[1:])
    accepted = f"[H, W, C] for {name}; jfcl.data.from_torch and from_arrays move channels that are first"
    check(not (is_first and of_images), "input_shape", input_shape, accepted)
    is_image = len(input_shape) == 3 or not of_images or not jnp.issubdtype(dtype, jnp.floating)
    check(is_image, "input_shape", input_shape, f"[H, W, C] for {name}, which reads images; mlp and linear read any")
    if isinstance(module, nn.Module):
        net = of_linen(module, input_shape, dtype, training_argument)
    else:
        check(callable(module), "module", name, "a flax.linen module, a flax.nnx module, or a function of rngs")
        from jfcl.models.nnx_modules import of_nnx  # flax.nnx takes long to import

        net = of_nnx(module, input_shape, dtype, training_argument)
    x = jax.ShapeDtypeStruct((2, *input_shape), dtype)
    with explained(net.name, x):
        params = jax.eval_shape(net.init, jax.random.key(0))
        program, outputs = jax.make_jaxpr(net.apply, return_shape=True)(params, x)
    check(hasattr(outputs, "shape"), f"the outputs of {net.name}", type(outputs).__name__, "one array")
    check(jnp.issubdtype(outputs.dtype, jnp.floating), f"the outputs of {net.name}", outputs.dtype.name, "real numbers")
    if logits is not None:
        accepted = f"logits of shape {(2, *logits)} for a batch of 2"
        check(outputs.shape == (2, *logits), f"the outputs of {net.name}", outputs.shape, accepted)
        if ends_in_softmax(program.jaxpr):
            what = f"{net.name} ends in a softmax, and the loss applies one to its outputs: return the logits instead"
            warnings.warn(what, stacklevel=5)  # the call of the user
    return net


def _dense_start(module: nn.Module, whole: Callable) -> DenseStart | None:
    """Returns the `DenseStart` of the modules in `DENSE_FIRST`, with `whole` the task's `apply`; `None` for others."""
    if type(module) not in DENSE_FIRST:
        return None

    def apply(params, products, x):
        def take(layer, call, inputs):
            if layer.name != "Dense_0":
                return call(inputs)
            return products + layer.get_variable("params", "bias")[None]

        with at_layers(nn.Dense, take):
            return module.apply({"params": params}, x)

    def inputs(x):
        return _wide(x.reshape(len(x), -1))  # the layer computes in the wider of its types, those of the parameters

    return DenseStart("Dense_0/kernel", inputs, apply, whole, "Dense_0/bias")


def remembered(make: Callable[..., Task], module: Any, *options: Any) -> Task:
    """Returns `make(module, *options)` of a function with a cache; without it for a module that has no hash."""
    try:
        hash(module)
    except TypeError:  # of nn.Sequential([...]), for its list
        make = make.__wrapped__
    return make(module, *options)


@lru_cache(maxsize=64)
def _from_module(
    module: Any, input_shape: tuple[int, ...], training_argument: str | None, num_classes: int | None, half: bool
) -> Task:
    logits = None if num_classes is None else (num_classes,)
    net = network(module, input_shape, jnp.float32, training_argument, logits)

    def shaped(x):
        """Returns `x` `[B, *input_shape]`, also from inputs `[B, d]` with the numbers of each side by side."""
        return x.reshape(len(x), *input_shape) if x.shape[1:] == (math.prod(input_shape),) else x

    def of_inputs(function):
        return None if function is None else lambda params, x: function(params, shaped(x))

    def train(key, params, x, real):
        return net.train(key, params, shaped(x), real)

    trains = None if net.train is None else train
    kind = KINDS[0] if num_classes is not None else KINDS[1]
    apply, more = of_inputs(net.apply), {"num_classes": num_classes, "input_shape": input_shape, "head": net.head}
    result = task(net.init, apply, kind=kind, half=half, train=trains, statistics=net.statistics)
    return result._replace(represent=of_inputs(net.represent), dense_start=_dense_start(module, apply), **more)


def classification(
    module: Any, input_shape: tuple[int, ...], num_classes: int, *, training_argument: str | None = None
) -> Task:
    """Returns the task of classification by a flax module: cross-entropy on its logits.

    Args:
      module: maps `[B, *input_shape]` to logits `[B, num_classes]`. A flax.linen module; a flax.nnx module, the
        parameters of which every model starts from; or a function `(rngs) -> nnx module`, such as a class of nnx
        modules. It may have dropout and batch normalisation.
      input_shape: of one example, e.g. `(28, 28, 1)`.
      num_classes: number of labels.
      training_argument: the argument of the module's `__call__` that says whether it trains. Default: `train`,
        `training`, `is_train` or `is_training`, or, with the opposite meaning, `deterministic`, `use_running_average`
        or `inference`. A linen module may also ask `self.has_rng("dropout")`, which is true in training alone.

    Returns:
      `Task`, the same object for the same arguments, so that compiled programs are reused. (A module that holds lists,
      such as `nn.Sequential([...])`, has no hash: keep its task.) Its parameters are the module's "params", a nested
      dict, with batch statistics beside the parameters of their layer (`BatchNorm_0/mean`). In training, dropout draws
      from the client's key of the round, and batch statistics are those of the real examples of a batch.

    Raises:
      ValueError: outputs that do not fit the classes; a module with dropout or batch statistics and without an argument
        that says whether it trains; state other than statistics of real numbers.

    Warns:
      UserWarning: the module ends in a softmax, which the loss applies.

    Example:
      >>> import jax, jfcl
      >>> mlp = classification(jfcl.models.MLP(10), (8, 8, 1), 10)
      >>> sum(p.size for p in jax.tree.leaves(mlp.init(jax.random.key(0))))
      15010
    """
    accepted = "the number of labels; jfcl.models.regression is for targets of a regression"
    check(num_classes is not None, "num_classes", num_classes, accepted)
    check_count("num_classes", num_classes)
    shape = check_shape("input_shape", input_shape)
    return remembered(_from_module, module, shape, training_argument, num_classes, False)


def regression(
    module: Any, input_shape: tuple[int, ...], *, half: bool = False, training_argument: str | None = None
) -> Task:
    """Returns the task of regression by a flax module: the squared error, or with `half` 1/2 of it.

    Args:
      module: maps `[B, *input_shape]` to values of the targets' shape, or with one more axis of length 1; this and the
        others as in `classification`.

    Example:
      >>> import jfcl
      >>> regression(jfcl.models.Linear(1), (3,)).correct is None
      True
    """
    shape = check_shape("input_shape", input_shape)
    return remembered(_from_module, module, shape, training_argument, None, half)


@lru_cache(maxsize=64)
def in_bfloat16(task: Task) -> Task:
    """Returns `task` with its model in bfloat16, and parameters, their gradients, outputs and losses in float32.

    Rounded copies of the parameters and of `x` enter the model, so that products and activations are bfloat16: 8
    significant bits instead of 24, and half the bytes. What a method does with parameters and updates stays float32:
    optimisers, similarities, sums. It is meant for GPUs: on a TPU, products of float32 numbers are products of bfloat16
    ones already.

    Args:
      task: from `classification` or `regression`, or your own with batches `{"x": ..., "y": ...}`. (For `frozen` and
        `lora`, this function comes first.)

    Returns:
      `Task`, the same object for the same argument.

    Example:
      >>> import jax, jfcl
      >>> task = in_bfloat16(classification(jfcl.models.MLP(10), (8, 8, 1), 10))
      >>> params = task.init(jax.random.key(0))
      >>> params["Dense_0"]["kernel"].dtype, task.apply(params, jnp.ones((1, 8, 8, 1))).dtype
      (dtype('float32'), dtype('float32'))
    """
    check_task(task)
    accepted = "one with all its parameters: give in_bfloat16(task) to frozen or lora"
    check(task.merge is None, "task", "one with frozen parameters", accepted)

    def narrow(tree):
        floats = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16) if floats(x) else x, tree)

    def of_inputs(function):
        return None if function is None else lambda params, x: jax.tree.map(_wide, function(narrow(params), narrow(x)))

    def train_loss(key, params, batch, real):
        weights, statistics = divided(task.statistics, params)
        narrowed = joined(narrow(weights), statistics)  # running means of many rounds need more than 8 bits
        losses, new = task.train_loss(key, narrowed, {**batch, "x": narrow(batch["x"])}, real)
        return _wide(losses), joined(weights, divided(task.statistics, new)[1])

    def of_start(start, apply):
        def after(params, products, x):
            return _wide(start.apply(narrow(params), narrow(products), narrow(x)))

        return start._replace(inputs=lambda x: narrow(start.inputs(x)), apply=after, whole=apply)

    apply, start = of_inputs(task.apply), dense_start(task)
    start = None if start is None else of_start(start, apply)
    changed = task._replace(apply=apply, represent=of_inputs(task.represent), dense_start=start)
    return with_train_loss(changed, None if task.train_loss is None else train_loss)


def parameter_paths(task: Task) -> list[str]:
    """Returns the names of a task's parameters, such as `"Dense_0/kernel"`, the arguments of IFCA's `shared`.

    Example:
      >>> import jfcl
      >>> parameter_paths(classification(jfcl.models.Linear(10), (4,), 10))
      ['Dense_0/bias', 'Dense_0/kernel']
    """
    check_task(task)
    return parameter_names(jax.eval_shape(task.init, jax.random.key(0)))
