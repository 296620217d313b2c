"""Models that start from given parameters: frozen parts, flax variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from flax.core import unfreeze

from jfcl.core.checks import check, check_count, check_finite
from jfcl.core.clients import check_clients, check_examples, mask
from jfcl.core.parameters import check_predicate, joined, named_parameters, parts, path_flags, trained_part, with_fixed
from jfcl.core.types import Clients, PyTree, Task, check_task, with_train_loss
from jfcl.mapping.jitted import jitted
from jfcl.models.modules import FROZEN_LAYERS, in_collections


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
