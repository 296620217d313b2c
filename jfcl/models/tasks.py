"""A `Task` from any flax.linen module, or from any pair of init and apply functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from jfcl.core import DenseStart, PyTree, Task, by_platform, check, check_choice, dense_start, path_name
from jfcl.models.networks import MLP, Linear

KINDS = ("classification", "regression")
DENSE_FIRST = (Linear, MLP)  # modules with a first layer, "Dense_0", on the flattened input


def task(
    init: Callable[[jax.Array], PyTree],
    apply: Callable[[PyTree, jax.Array], jax.Array],
    *,
    kind: str,
    half: bool = False,
) -> Task:
    """Returns a task from two functions.

    Args:
      init: `(key) -> params`.
      apply: `(params, x [B, ...]) -> outputs`: logits `[B, num_classes]` for classification, values of the targets'
        shape for regression.
      kind: `"classification"`: cross-entropy of integer labels, accuracy of the largest logit. `"regression"`: squared
        error, summed over the outputs of an example; no accuracy.
      half: regression with 1/2 of the squared error.

    Returns:
      `Task`; its batches are `{"x": [B, ...], "y": [B, ...]}`.

    Raises:
      ValueError: an unknown `kind`.

    Example:
      >>> import jax.numpy as jnp
      >>> line = task(lambda key: {"w": jnp.ones(2)}, lambda params, x: x @ params["w"], kind="regression")
      >>> line.loss(line.init(None), {"x": jnp.ones((1, 2)), "y": jnp.zeros(1)}).tolist()
      [4.0]
    """
    check_choice("kind", kind, KINDS)
    cost = _cost(kind, half)

    def loss(params, batch):
        return cost(apply(params, batch["x"]), batch["y"])

    def right(params, batch):
        return (jnp.argmax(apply(params, batch["x"]), axis=-1) == batch["y"]).astype(jnp.float32)

    return Task(init, loss, apply, right if kind == "classification" else None)


def _cost(kind: str, half: bool) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns the loss, `(outputs [B, ...], y [B, ...]) -> [B]`, in float32 at least."""

    def squared_error(outputs, y):
        outputs = _wide(outputs)
        wanted = f"the targets' shape, {y.shape} (squeeze=True drops an axis of length 1)"
        check(outputs.shape == y.shape, "the shape of the model's outputs", outputs.shape, wanted)
        error = jnp.square(outputs - y)
        return (0.5 if half else 1.0) * error.reshape(len(error), -1).sum(axis=1)

    return cross_entropy if kind == "classification" else squared_error


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) if x.dtype.itemsize < 4 else x


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns `-log softmax(logits)[label]`, `[...]`, of `logits` `[..., num_classes]` and `labels` `[...]`.

    Accelerators compare the classes with the label, since a gather is slow there. A label out of range gives NaN. The
    result is float32 at least.
    """

    def compared(logits, labels):
        chosen = jax.nn.one_hot(labels, logits.shape[-1], dtype=bool)
        losses = -jnp.where(chosen, jax.nn.log_softmax(logits), jnp.zeros_like(logits)).sum(axis=-1)
        in_range = (labels >= 0) & (labels < logits.shape[-1])
        return jnp.where(in_range, losses, jnp.full_like(losses, jnp.nan))

    return by_platform(_wide(logits), labels, cpu=optax.softmax_cross_entropy_with_integer_labels, accelerator=compared)


def functions_of(module: nn.Module, input_shape: tuple[int, ...], dtype=jnp.float32) -> tuple[Callable, Callable]:
    """Returns `(init, apply)` of a flax.linen module; raises `ValueError` if it has other state than parameters."""

    def init(key):
        return module.init(key, jnp.zeros((1, *input_shape), dtype))["params"]

    def apply(params, x):
        return module.apply({"params": params}, x)

    variables = jax.eval_shape(lambda: module.init(jax.random.key(0), jnp.zeros((1, *input_shape), dtype)))
    others = sorted(set(variables) - {"params"})
    if others:
        raise ValueError(
            f"{type(module).__name__} keeps state besides its parameters ({', '.join(others)}), which cannot be"
            " averaged over clients; use GroupNorm or LayerNorm instead of BatchNorm"
        )
    return init, apply


def representation(module: nn.Module) -> Callable[[PyTree, jax.Array], jax.Array]:
    """Returns `(params, x [B, ...]) -> [B, H]`: the inputs of the last dense layer of a module, or else its outputs.

    Example:
      >>> import jax, jax.numpy as jnp, jfcl
      >>> mlp = jfcl.models.MLP(10)
      >>> params = mlp.init(jax.random.key(0), jnp.zeros((1, 4)))["params"]
      >>> representation(mlp)(params, jnp.zeros((3, 4))).shape
      (3, 200)
    """

    def represent(params, x):
        entered = []

        def note(call, args, kwargs, context):
            if isinstance(context.module, nn.Dense) and context.method_name == "__call__":
                entered.append(args[0])
            return call(*args, **kwargs)

        with nn.intercept_methods(note):
            outputs = module.apply({"params": params}, x)
        return (entered[-1] if entered else outputs).reshape(len(x), -1)

    return represent


def _dense_start(module: nn.Module, made: Task, cost: Callable[[jax.Array, jax.Array], jax.Array]) -> DenseStart | None:
    """Returns the `DenseStart` of the modules in `DENSE_FIRST`, `None` for others."""
    if type(module) not in DENSE_FIRST:
        return None

    def loss(params, products, batch):
        def take(call, args, kwargs, context):
            layer = context.module
            if isinstance(layer, nn.Dense) and layer.name == "Dense_0" and context.method_name == "__call__":
                return products + layer.get_variable("params", "bias")[None] if layer.use_bias else products
            return call(*args, **kwargs)

        with nn.intercept_methods(take):
            return cost(module.apply({"params": params}, batch["x"]), batch["y"])

    return DenseStart("Dense_0/kernel", lambda batch: batch["x"].reshape(len(batch["x"]), -1), loss, made.loss)


@lru_cache(maxsize=64)
def _from_module(
    module: nn.Module, input_shape: tuple[int, ...], kind: str, half: bool, num_classes: int | None = None
) -> Task:
    init, apply = functions_of(module, input_shape)

    def of_flat(function):
        """Returns `function(params, x)` for `x` `[B, d]` too, with the numbers of each input side by side."""

        def apply_shaped(params, x):
            is_flat = x.shape[1:] == (math.prod(input_shape),)
            return function(params, x.reshape(len(x), *input_shape) if is_flat else x)

        return apply_shaped

    made = task(init, of_flat(apply), kind=kind, half=half)._replace(represent=of_flat(representation(module)))
    made = made._replace(num_classes=num_classes, input_shape=input_shape)
    return made._replace(dense_start=_dense_start(module, made, _cost(kind, half)))


def _output_shape(task: Task, input_shape: tuple[int, ...]) -> tuple[int, ...]:
    def outputs():
        return task.predict(task.init(jax.random.key(0)), jnp.zeros((2, *input_shape)))

    return jax.eval_shape(outputs).shape


def classification(module: nn.Module, input_shape: tuple[int, ...], num_classes: int) -> Task:
    """Returns the task of classification by a flax.linen module: cross-entropy on its logits.

    Args:
      module: maps `[B, *input_shape]` to logits `[B, num_classes]`; parameters only, no batch statistics.
      input_shape: of one example, e.g. `(28, 28, 1)`.
      num_classes: number of labels.

    Returns:
      `Task`, the same object for the same arguments, so that compiled programs are reused. Its parameters are the
      module's "params": a nested dict.

    Raises:
      ValueError: outputs that do not fit the classes; a module with other state than parameters.

    Example:
      >>> import jax, jfcl
      >>> mlp = classification(jfcl.models.MLP(10), (8, 8, 1), 10)
      >>> sum(p.size for p in jax.tree.leaves(mlp.init(jax.random.key(0))))
      15010
    """
    made = _from_module(module, tuple(input_shape), "classification", False, num_classes)
    shape = _output_shape(made, tuple(input_shape))
    if shape != (2, num_classes):
        raise ValueError(
            f"{type(module).__name__} must give {num_classes} logits an example, shape (B, {num_classes}), for"
            f" {num_classes} classes; it gives {('B', *shape[1:])}"
        )
    return made


def regression(module: nn.Module, input_shape: tuple[int, ...], *, half: bool = False) -> Task:
    """Returns the task of regression by a flax.linen module: the squared error, or half of it.

    Args:
      module: maps `[B, *input_shape]` to values of the targets' shape.
      input_shape: of one example.
      half: use 1/2 of the squared error.

    Returns:
      `Task` without an accuracy.

    Example:
      >>> import jfcl
      >>> regression(jfcl.models.Linear(1, squeeze=True), (3,)).correct is None
      True
    """
    return _from_module(module, tuple(input_shape), "regression", half)


@lru_cache(maxsize=64)
def in_bfloat16(task: Task) -> Task:
    """Returns `task` with its model in bfloat16, and parameters, their gradients, outputs and losses in float32.

    Rounded copies of the parameters and of `x` enter the model, so that products and activations are bfloat16. What a
    method does with parameters and updates stays float32: optimisers, similarities, sums. Training in the span of the
    examples multiplies the first layer in the default precision of the platform instead.

    Args:
      task: from `classification` or `regression`, or your own with batches `{"x": ..., "y": ...}`.

    Returns:
      `Task`, the same object for the same argument. An activation has 8 significant bits instead of 24, and half the
      bytes. It is meant for GPUs: on a TPU, products of float32 numbers are products of bfloat16 ones already, and its
      compiler predicts a slower round with this task.

    Example:
      >>> import jax, jfcl
      >>> task = in_bfloat16(classification(jfcl.models.MLP(10), (8, 8, 1), 10))
      >>> params = task.init(jax.random.key(0))
      >>> params["Dense_0"]["kernel"].dtype, task.predict(params, jnp.ones((1, 8, 8, 1))).dtype
      (dtype('float32'), dtype('float32'))
    """

    def narrow(tree):
        floats = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16) if floats(x) else x, tree)

    def of_inputs(function):
        return None if function is None else lambda params, x: _wide(function(narrow(params), narrow(x)))

    def of_batch(function):
        def narrowed(params, *rest):
            *products, batch = rest
            return _wide(function(narrow(params), *narrow(products), {**batch, "x": narrow(batch["x"])}))

        return None if function is None else narrowed

    loss, start = of_batch(task.loss), dense_start(task)
    return task._replace(
        loss=loss,
        predict=of_inputs(task.predict),
        correct=of_batch(task.correct),
        represent=of_inputs(task.represent),
        dense_start=None if start is None else start._replace(loss=of_batch(start.loss), whole=loss),
    )


def parameter_paths(task: Task) -> list[str]:
    """Returns the names of a task's parameters, such as `"Dense_0/kernel"`, the arguments of IFCA's `shared`.

    Example:
      >>> import jfcl
      >>> parameter_paths(classification(jfcl.models.Linear(10), (4,), 10))
      ['Dense_0/bias', 'Dense_0/kernel']
    """
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    return [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(shapes)]
