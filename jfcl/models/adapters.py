"""Low-rank adapters of dense kernels (Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models")."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jfcl.core import PyTree, Task, check, check_count, is_number, path_flags
from jfcl.core.parameters import named_parameters, parts, path_name, reparametrised
from jfcl.models.modules import at_layers
from jfcl.models.pretrained import check_trainable, fitting, with_frozen_statistics

ADAPTERS = zlib.crc32(b"adapters")  # folded into the key of a model


def lora(
    task: Task,
    params: PyTree,
    *,
    rank: int,
    targets: Callable[[str], bool] | None = None,
    alpha: float | None = None,
    trainable: Callable[[str], bool] | None = None,
    fresh: bool = False,
    spread: float = 0.0,
) -> Task:
    """Returns the task of low-rank adapters of a frozen model: `W + (alpha / rank) A B` in place of a kernel `W`.

    `A` `[d, rank]` is Gaussian with variance `1 / d` at the start, and `B` `[rank, H]` is zero (Hu et al. 2021, section
    4.1), so that every model starts as `params`. The adapters of `"Dense_0/kernel"` are the parameters
    `"Dense_0/kernel/a"` and `"Dense_0/kernel/b"`: they are stacked, averaged, clustered, compared, counted as bytes or
    kept by a client (`personal=`) as any parameter is. All others are as in `jfcl.models.frozen`.

    Args:
      task, params: as in `jfcl.models.frozen`.
      rank: from 1 to the smaller side of the smallest adapted kernel.
      targets: takes a parameter's path, true for the matrices that are adapted; default: all that are named "kernel".
      alpha: the scale; default: `rank`, so that the factor is 1.
      trainable: takes a parameter's path, true for parameters that are trained as they are, such as those of a new
        head.
      fresh: whether each model draws these by `task.init` instead of taking them from `params`.
      spread: the standard deviation of `B` at the start. With 0, as in the paper, all `K` models of a method are equal
        at the start, and clients that choose by loss all choose the first one: give a small number, such as 0.01, or a
        fresh head.

    Returns:
      `Task`. In dense layers of flax.linen modules an adapter is `(x A) B` beside `x W`: for each example `rank (d +
      H)` multiplications, and no copy of `W`. Where a matrix is used otherwise (flax.nnx, recurrent layers, weight
      normalisation, your own functions), the sum is computed in each step, `[d, H]` for each client that trains.

    Raises:
      ValueError: a number out of range; `targets` that hold for no parameter, or for one that is not a matrix, with the
        list of matrices; a parameter in both `targets` and `trainable`; those of `frozen`.

    Example:
      >>> import jax, jfcl
      >>> task = jfcl.models.classification(jfcl.models.MLP(10), (8, 8, 1), 10)
      >>> adapted = lora(task, task.init(jax.random.key(0)), rank=2, targets=lambda path: path == "Dense_0/kernel")
      >>> jfcl.models.parameter_paths(adapted)
      ['Dense_0/kernel/a', 'Dense_0/kernel/b']
    """
    params = fitting(task, params)
    shapes = _targets(task, params, targets)
    check_count("rank", rank, most=min(map(min, shapes.values())))
    positive = alpha is None or (is_number(alpha) and 0 < alpha < math.inf)
    check(positive, "alpha", alpha, "positive and finite, or left out for the rank")
    check(is_number(spread) and 0 <= spread < math.inf, "spread", spread, "0 or more, and finite")
    check(trainable is not None or not fresh, "fresh", fresh, "left out without trainable: only adapters are trained")
    if trainable is not None:
        check_trainable(task, params, trainable)
        both = [name for name in shapes if trainable(name)]
        check(not both, "targets, trainable", ", ".join(both), "true in one of them at most for a parameter")
    whole, fixed = parts(path_flags(trainable or (lambda path: False), params), params)
    scale = (rank if alpha is None else float(alpha)) / rank
    spread = float(spread)  # a number of NumPy may be wider than the parameters, and so would be their product

    def init(key):
        """Returns adapters in the place of their kernels, and the parameters that are trained as they are."""
        drawn = task.init(key) if fresh else whole

        def one(path, base, start):
            if path_name(path) not in shapes:
                return start if base is None else None
            number, (d, h) = [*shapes].index(path_name(path)), base.shape
            of_a, of_b = jax.random.split(jax.random.fold_in(jax.random.fold_in(key, ADAPTERS), number))
            a = jax.random.normal(of_a, (d, rank), base.dtype) / math.sqrt(d)
            b = spread * jax.random.normal(of_b, (rank, h), base.dtype) if spread else jnp.zeros((rank, h), base.dtype)
            return {"a": a, "b": b}

        return jax.tree_util.tree_map_with_path(one, fixed, drawn, is_leaf=_is_none)

    def merge(trained):
        """Returns the whole model."""

        def one(base, part):
            if part is None or base is None:
                return part if base is None else base
            return base + scale * (part["a"] @ part["b"]).astype(base.dtype)

        return jax.tree.map(one, fixed, trained, is_leaf=_is_none)

    def after_step(trained, new):
        """Returns the trained part of `new`, a whole model after a training step, which changes statistics alone."""
        return jax.tree.map(lambda base, part, x: x if base is None else part, fixed, trained, new, is_leaf=_is_none)

    base = with_frozen_statistics(task, whole)
    beside = _beside(shapes, merge, fixed, scale) if task.head is not None else None

    def adapted(function):
        """Returns `function` `(params, ...)` of whole models as one of adapters."""
        return (lambda trained, *args: function(merge(trained), *args)) if beside is None else beside(function)

    of_training = adapted(lambda params, key, *args: base.train_loss(key, params, *args))

    def train_loss(key, trained, batch, real):
        losses, new = of_training(trained, key, batch, real)
        return losses, after_step(trained, new)

    before = task.merge or (lambda params: params)
    return reparametrised(base, adapted, init=init, train_loss=train_loss, merge=lambda trained: before(merge(trained)))


def _is_none(x: Any) -> bool:
    return x is None


def _targets(task: Task, params: PyTree, targets: Callable[[str], bool] | None) -> dict[str, tuple]:
    """Returns the shapes of the adapted kernels by their names."""
    is_statistic = task.statistics or (lambda path: False)
    shapes = {name: x.shape for name, x in named_parameters(params).items()}
    matrices = {name: shape for name, shape in shapes.items() if len(shape) == 2 and not is_statistic(name)}
    check(targets is None or callable(targets), "targets", targets, "a function of a parameter's path")
    is_kernel = lambda name: name in matrices and name.rpartition("/")[2] == "kernel"  # noqa: E731
    names = list(filter(targets or is_kernel, shapes))
    listed = ", ".join(f"{n} {shape}" for n, shape in matrices.items()) or "the model has none"
    accepted = f"true for some of the matrices alone: {listed}"
    refused = ", ".join(name for name in names if name not in matrices) or "no parameter"
    check(names and set(names) <= set(matrices), "targets", refused, accepted)
    return {name: shapes[name] for name in names}


def _beside(shapes: dict[str, tuple], merge: Callable, fixed: PyTree, scale: float) -> Callable:
    """Returns the transformation of `function(model, ...)` to one of `(trained, ...)`: adapters beside dense layers.

    Other uses of a kernel, as with tied weights, read it with its adapter added, which no program computes unused.
    """
    kernels = named_parameters(fixed)

    def adapt(function):
        def run(trained, *operands):
            factors, plain = named_parameters(trained), False

            def without(layer, call, *args, **kwargs):
                """Calls a layer, and those inside of it, as they are."""
                nonlocal plain
                before, plain = plain, True
                out, plain = call(*args, **kwargs), before
                return out

            def add(layer, call, inputs, *args, **kwargs):
                name = "/".join((*layer.path, "kernel"))
                fits = type(layer) is nn.Dense and shapes.get(name) == (inputs.shape[-1], layer.features)
                if plain or not fits:
                    return call(inputs, *args, **kwargs)
                params = layer.variables["params"]  # in bfloat16, if the task is (`in_bfloat16`)
                params = {**params, "kernel": kernels[name].astype(params["kernel"].dtype)}
                out = without(layer, layer.clone(parent=None, name=None).apply, {"params": params}, inputs)
                a, b = (factors[f"{name}/{part}"].astype(out.dtype) for part in "ab")
                return out + scale * ((inputs.astype(out.dtype) @ a) @ b)

            # Normalised kernels are not the parameters themselves.
            with at_layers(nn.Dense, add), at_layers((nn.WeightNorm, nn.SpectralNorm), without):
                return function(merge(trained), *operands)

        return run

    return adapt
