"""Models that start from given parameters: frozen parts, low-rank adapters, flax variables.

Adapters are those of Hu et al. 2021 ("LoRA: Low-Rank Adaptation of Large Language Models").
"""

import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from flax.core import unfreeze

from jfcl.core.checks import check, check_count, check_finite, is_number, require
from jfcl.core.clients import check_clients, check_examples, mask
from jfcl.core.parameters import (
    check_predicate,
    joined,
    named_parameters,
    parts,
    path_flags,
    path_name,
    reparametrised,
    trained_part,
    with_fixed,
)
from jfcl.core.types import Clients, PyTree, Task, check_task, with_train_loss
from jfcl.mapping.jitted import jitted
from jfcl.models.modules import FROZEN_LAYERS, at_layers, in_collections

ADAPTERS = zlib.crc32(b"adapters")  # folded into the key of a model


def frozen(task: Task, params: PyTree, *, trainable: Callable[[str], bool], fresh: bool = False) -> Task:
    """Returns the task of a part of a model's parameters; the others are frozen, and kept once for all clients.

    A method's `state.params` then has the trained parameters alone, `[K, ...]`, with `None` in the place of the others;
    only they are sent, averaged, compared and counted as bytes. Frozen batch statistics do not move, and their layers
    normalise with them in training too. This holds for the batch normalisation of flax modules; a `train` function of
    `jfcl.models.task` is called as it is.

    Args:
      task: from `jfcl.models`, or your own.
      params: all parameters of one model, such as a pretrained one's; `from_flax` makes them from flax's variables.
      trainable: takes a parameter's path (`jfcl.models.parameter_paths(task)`), true for those that are trained.
        Statistics for which it is true move with the batches.
      fresh: whether each of the `K` models draws its trained parameters by `task.init`, as for a new head; default:
        they are those in `params`, equal in all models. Methods that choose a model by its loss need models that differ
        at the start.

    Returns:
      `Task`, without `dense_start`. Make it once: programs are compiled for each task object. `jfcl.models.merged`
      returns whole models.

    Raises:
      ValueError: `params` of another structure, other shapes, or not finite; `trainable` that holds for no parameter
        but statistics, or for all.

    Example:
      >>> import jax, jfcl
      >>> task = jfcl.models.classification(jfcl.models.MLP(10), (8, 8, 1), 10)
      >>> params = task.init(jax.random.key(0))
      >>> head = jfcl.models.frozen(task, params, trainable=lambda path: path.startswith("Dense_1/"))
      >>> jfcl.models.parameter_paths(head)
      ['Dense_1/bias', 'Dense_1/kernel']
    """
    params = fitting(task, params)
    check_trainable(task, params, trainable)
    chosen, fixed = parts(path_flags(trainable, params), params)
    part = with_fixed(with_frozen_statistics(task, chosen), fixed)
    before = task.merge or (lambda params: params)
    part = part._replace(merge=lambda p: before(joined(p, fixed)))
    return part if fresh else part._replace(init=lambda key: chosen)


def merged(task: Task, params: PyTree) -> PyTree:
    """Returns whole models: the parameters of the task that `frozen` or `lora` was given, adapters added.

    Args:
      task: from `frozen` or `lora`.
      params: of one model, as `jax.tree.map(lambda p: p[k], state.params)`, or under `jax.vmap` those of several.

    Example:
      >>> import jax, jfcl
      >>> task = jfcl.models.classification(jfcl.models.Linear(3), (4,), 3)
      >>> params = task.init(jax.random.key(0))
      >>> adapted = jfcl.models.lora(task, params, rank=1)
      >>> whole = merged(adapted, adapted.init(jax.random.key(1)))
      >>> whole["Dense_0"]["kernel"].shape, bool((whole["Dense_0"]["kernel"] == params["Dense_0"]["kernel"]).all())
      ((4, 3), True)
    """
    check_task(task)
    check(task.merge is not None, "task", "one with all its parameters", "made by jfcl.models.frozen or lora")
    return task.merge(params)


def cache_features(task: Task, params: PyTree, clients: Clients, *, batch_size: int = 256) -> Clients:
    """Returns the clients with features in place of their inputs: the inputs of a model's last dense layer.

    A linear model of the features is the model's last layer, of which a local step costs next to nothing. Training,
    test and new clients each need the call. The features are those of evaluation, without dropout.

    Args:
      task, params: of one model of which the last dense layer is known, as that of flax.linen modules is.
      batch_size: inputs at once.

    Returns:
      `Clients` of NumPy arrays with `examples["x"]` `[N, M, H]`, zeros where there is padding, and the other examples
      as they are. Cost: one forward pass over the real examples, and `H` floats an example on the host.

    Raises:
      ValueError: a model without a known last layer; parameters or clients that are not those of the task.

    Example:
      >>> import jax, jfcl
      >>> fed = jfcl.data.build("digits", num_clients=4, examples_per_client=20)
      >>> task = jfcl.models.classification(jfcl.models.MLP(10), fed.input_shape, fed.num_classes)
      >>> cache_features(task, task.init(jax.random.key(0)), fed.train).examples["x"].shape
      (4, 20, 200)
    """
    params = fitting(task, params)
    accepted = "of a flax.linen module, from classification or regression"
    known = task.head is not None and task.represent is not None
    check(known, "task", "a model of which the inputs of the last dense layer are not known", accepted)
    check_count("batch_size", batch_size)
    check_clients(clients, allow_empty=True)
    check_examples(clients, task)
    compute = jitted(lambda x: task.represent(params, x))
    x, real = np.asarray(clients.examples["x"]), np.asarray(mask(clients))
    flat, places, values = x.reshape(-1, *x.shape[2:]), np.flatnonzero(real), []
    for first in range(0, len(places), batch_size):
        rows = places[first : first + batch_size]
        batch = flat[np.resize(rows, batch_size)]  # full, so that one program is for all
        values.append(np.asarray(compute(batch))[: len(rows)])
    values = np.concatenate(values)
    features = np.zeros((*real.shape, *values.shape[1:]), values.dtype)
    features[real] = values
    return clients._replace(examples={**clients.examples, "x": features})


def from_flax(variables: PyTree) -> PyTree:
    """Returns the parameters of a jfcl task from flax's variables, the collections of a flax.linen module.

    Returns:
      One nested dict, with the statistics of a layer beside its parameters (`BatchNorm_0/mean`).

    Raises:
      ValueError: no "params"; the same path in two collections.

    Example:
      >>> from_flax({"params": {"BatchNorm_0": {"scale": 1}}, "batch_stats": {"BatchNorm_0": {"mean": 0}}})
      {'BatchNorm_0': {'scale': 1, 'mean': 0}}
    """
    variables = unfreeze(variables)
    is_flax = isinstance(variables, dict) and "params" in variables
    is_flax = is_flax and all(isinstance(tree, dict) for tree in variables.values())
    check(is_flax, "variables", variables, 'a dict of flax\'s collections, nested dicts, with "params" among them')
    flat = [pair for tree in variables.values() for pair in traverse_util.flatten_dict(tree).items()]
    check(len(dict(flat)) == len(flat), "variables", list(variables), "collections without a path in common")
    return traverse_util.unflatten_dict(dict(flat))


def to_flax(task: Task, params: PyTree) -> PyTree:
    """Returns flax's variables of a model, `{"params": ...}` and maybe `"batch_stats"`: the inverse of `from_flax`.

    Args:
      task: `params` are its own; for a task of `frozen` or `lora`, call `merged` first and give the task before.
      params: nested dict of one model.

    Example:
      >>> import jax, jfcl
      >>> task = jfcl.models.classification(jfcl.models.Linear(3), (4,), 3)
      >>> list(to_flax(task, task.init(jax.random.key(0))))
      ['params']
    """
    check_task(task)
    check(isinstance(params, Mapping), "params", type(params).__name__, "a nested dict, as in a flax module")
    is_statistic = task.statistics or (lambda path: False)
    return in_collections(params, lambda path: "batch_stats" if is_statistic("/".join(map(str, path))) else "params")


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
        require(not both, f"parameters have adapters (targets) or are trainable, not both: {', '.join(both)}")
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


# What `frozen` and `lora` share.


def fitting(task: Task, params: PyTree) -> PyTree:
    """Returns `params` as JAX arrays of the task's types; raises `ValueError` for others than the task's, and NaN."""
    check_task(task)
    params = unfreeze(params)
    like = jax.eval_shape(task.init, jax.random.key(0))
    wanted, shapes = ({n: np.shape(x) for n, x in named_parameters(tree).items()} for tree in (like, params))
    wrong = [n for n in {**wanted, **shapes} if shapes.get(n) != wanted.get(n)]
    if wrong or jax.tree.structure(like) != jax.tree.structure(params):
        is_flax = isinstance(params, dict) and "params" in params and "params" not in like
        hint = "; jfcl.models.from_flax(variables) makes them from flax's variables" if is_flax else ""
        mismatch = [f"{n} is {shapes.get(n, 'missing')}, where the task has {wanted.get(n, 'none')}" for n in wrong[:4]]
        what = "; ".join(mismatch) or "other containers"
        raise ValueError(f"params must have the structure and shapes of the task's parameters{hint}: {what}")
    narrows = jax.tree.map(lambda x, s: jnp.iscomplexobj(x) and jnp.issubdtype(s.dtype, jnp.floating), params, like)
    check(not any(jax.tree.leaves(narrows)), "params", "complex numbers", "real numbers, as the task's")
    with np.errstate(over="ignore"):  # a number that the task's type does not hold becomes infinite
        params = jax.tree.map(lambda x, s: jnp.asarray(x, s.dtype), params, like)
    check_finite(params, "params")
    return params


def check_trainable(task: Task, params: PyTree, trainable: Any) -> None:
    """Raises `ValueError` unless `trainable` holds for some parameters, not statistics alone, and not for all."""
    names, trained = (list(named_parameters(tree)) for tree in (params, trained_part(task, params)))
    check_predicate("trainable", trainable, names, some=trained, not_all=names)


def with_frozen_statistics(task: Task, trained: PyTree) -> Task:
    """Returns `task` with running statistics, in training too, in the layers whose statistics are not in `trained`."""
    if task.statistics is None:
        return task
    moving, names = (named_parameters(tree) for tree in (trained, jax.eval_shape(task.init, jax.random.key(0))))
    layers = frozenset(n.rpartition("/")[0] for n in names if task.statistics(n) and n not in moving)
    remain = any(map(task.statistics, moving))

    def train_loss(*args):
        token = FROZEN_LAYERS.set(FROZEN_LAYERS.get() | layers)
        try:
            return task.train_loss(*args)
        finally:
            FROZEN_LAYERS.reset(token)

    return with_train_loss(task, train_loss)._replace(statistics=task.statistics if remain else None)
