"""Parameters as pytrees: their names, their size, and parts of a model: statistics, the cluster's, the client's own.

A part of a pytree has its structure, with `None` in the place of the other leaves. JAX takes `None` for an empty
pytree, so that functions of parameters, optimisers included, apply to a part as they are.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfcl.core.checks import check, require
from jfcl.core.platforms import by_platform
from jfcl.core.types import PyTree, Task, with_train_loss


def path_name(path: Iterable[Any]) -> str:
    """Returns the name of a parameter, such as `"Dense_0/kernel"`, from its path in a pytree."""
    return "/".join(str(getattr(part, "key", getattr(part, "name", getattr(part, "idx", part)))) for part in path)


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """Returns the leaves of `tree` by their paths, such as `"['Dense_0']['kernel']"`."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def copied(tree: PyTree) -> PyTree:
    """Returns `tree` in containers of its own, for a function of a user, which may write into them."""
    return jax.tree.map(lambda x: x, tree)


def is_key(x: Any) -> bool:
    """Returns whether an array, or its shape, is one of random keys, as `jax.random.key` makes them."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def key_data(x: Any) -> Any:
    """Returns the integers of random keys; other arrays as they are."""
    return jax.random.key_data(x) if is_key(x) else x


def with_keys(data: Any, like: Any) -> Any:
    """Returns `data`, or the random keys of these integers where `like` is an array of keys: undoes `key_data`."""
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(jnp.empty(0, like.dtype))) if is_key(like) else data


def named_parameters(params: PyTree) -> dict[str, Any]:
    """Returns the parameters by their `path_name`."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


def get_parameter(params: PyTree, name: str) -> jax.Array:
    """Returns the parameter with the `path_name` `name`, or raises `ValueError` if there is none."""
    named = named_parameters(params)
    check(name in named, "parameter", name, f"one of {', '.join(named)}")
    return named[name]


def set_parameter(params: PyTree, name: str, value: Any) -> PyTree:
    """Returns `params` with `value` in place of the parameter `name`."""
    get_parameter(params, name)
    return jax.tree_util.tree_map_with_path(lambda path, p: value if path_name(path) == name else p, params)


def is_finite(tree: PyTree) -> jax.Array:
    """Returns `[]` bool: `tree` (of one client; vmap it for many) holds no NaN and no infinity."""

    def by_entries(leaf):
        return jnp.isfinite(leaf).all()

    def by_maximum(leaf):  # NaN is not below infinity; a TPU has no fast conjunction
        return jnp.abs(leaf).max(initial=0) < jnp.inf if jnp.issubdtype(leaf.dtype, jnp.floating) else by_entries(leaf)

    def of_all(check):
        return lambda leaves: jnp.stack(list(map(check, leaves))).all()

    entries = of_all(by_entries)
    return by_platform(jax.tree.leaves(tree), cpu=entries, accelerator=entries, tpu=of_all(by_maximum))


def num_bytes(tree: PyTree) -> int:
    """Returns the bytes of a pytree of arrays (or of their shapes): the cost of sending it once."""
    return sum(int(np.prod(np.shape(leaf))) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


# ---------------------------------------------------------------------------------------------------------------
# Parts.


def path_flags(predicate: Callable[[str], bool], params: PyTree) -> PyTree:
    """Returns the structure of `params` with `predicate(path)`, a bool, in the place of each array."""
    return jax.tree_util.tree_map_with_path(lambda path, _: bool(predicate(path_name(path))), params)


def parts(flags: PyTree, tree: PyTree) -> tuple[PyTree, PyTree]:
    """Returns the leaves of `tree` with a true flag, and the others."""
    chosen = jax.tree.map(lambda f, x: x if f else None, flags, tree)
    return chosen, jax.tree.map(lambda f, x: None if f else x, flags, tree)


def joined(first: PyTree, second: PyTree) -> PyTree:
    """Returns the tree of two parts; `()` or None in place of `second` stands for a part without leaves.

    Example:
      >>> joined({"a": 1, "b": None}, {"a": None, "b": 2})
      {'a': 1, 'b': 2}
    """
    if second is None or (isinstance(second, tuple) and not second):
        return first
    return jax.tree.map(lambda a, b: b if a is None else a, first, second, is_leaf=lambda x: x is None)


def part_like(part: PyTree, tree: PyTree) -> PyTree:
    """Returns the leaves of `tree` that are not `None` in `part`."""
    if isinstance(part, tuple) and not part:
        return ()
    return jax.tree.map(lambda old, x: None if old is None else x, part, tree, is_leaf=lambda x: x is None)


def divided(predicate: Callable[[str], bool] | None, params: PyTree) -> tuple[PyTree, PyTree]:
    """Returns the parameters for which `predicate(path)` is false, and the others; `()` without a predicate."""
    if predicate is None:
        return params, ()
    chosen, others = parts(path_flags(predicate, params), params)
    return others, chosen


def trained_part(task: Task, params: PyTree) -> PyTree:
    """Returns `params`, or an update, without the task's statistics: what optimisers move and similarities compare."""
    return divided(task.statistics, params)[0]


def in_head(task: Task) -> Callable[[str], bool]:
    """Returns the predicate of the last dense layer's parameters; `ValueError` if it is unknown, or the only layer."""
    unknown = "the last dense layer of this task's model is not known (that of flax.linen modules is)"
    require(task.head is not None, f"personal must say which parameters are personal: {unknown}")
    names = parameter_names(jax.eval_shape(task.init, jax.random.key(0)))
    has_body = not all(name.startswith(f"{task.head}/") for name in names)
    require(has_body, f"the model has no body before its last dense layer: {task.head} is its only one")
    return lambda path: path.startswith(f"{task.head}/")


def check_part(argument: str, predicate: Callable[[str], bool] | None, task: Task, *, whole: bool = False) -> None:
    """Raises `ValueError` unless `predicate` holds for some parameters, and, unless `whole`, not for all trained."""
    if predicate is not None:
        shapes = jax.eval_shape(task.init, jax.random.key(0))
        names, trained = parameter_names(shapes), parameter_names(trained_part(task, shapes))
        check_predicate(argument, predicate, names, some=names, not_all=None if whole else trained)


def check_predicate(
    argument: str, predicate: Any, names: list[str], *, some: list[str], not_all: list[str] | None
) -> None:
    """Raises `ValueError` unless `predicate` holds for `some` of the paths `names`, and not for all of `not_all`."""
    check(callable(predicate), argument, predicate, "a function of a parameter's path, such as 'Dense_0/kernel'")
    listed = ", ".join(names)
    holds = any(map(predicate, some))
    require(holds, f"{argument} holds for no parameter; it must be true for some of {listed}")
    fails = not_all is None or not all(map(predicate, not_all))
    require(fails, f"{argument} holds for all parameters; it must be false for some of {listed}")


def parameter_names(params: PyTree) -> list[str]:
    """Returns the path of each parameter, such as `"Dense_0/kernel"`."""
    return list(named_parameters(params))


def reparametrised(
    task: Task, whole: Callable[[Callable], Callable], *, init: Callable, train_loss: Callable, merge: Callable | None
) -> Task:
    """Returns `task` with other parameters, without `dense_start`; `whole(function)` is a function of these."""
    named = {name: getattr(task, name) for name in ("apply", "represent")}
    functions = {name: None if function is None else whole(function) for name, function in named.items()}
    task = task._replace(**functions, init=init, dense_start=None, merge=merge)
    return with_train_loss(task, None if task.train_loss is None else train_loss)


def with_fixed(task: Task, fixed: Any) -> Task:
    """Returns the task of the parameters that are `None` in `fixed`; those in `fixed` stay as they are."""

    def whole(function):
        return lambda params, x: function(joined(params, fixed), x)

    def train_loss(key, params, batch, real):
        losses, new = task.train_loss(key, joined(params, fixed), batch, real)
        return losses, part_like(params, new)

    def init(key):
        return jax.tree.map(lambda f, x: x if f is None else None, fixed, task.init(key), is_leaf=lambda x: x is None)

    merge = None if task.merge is None else lambda params: task.merge(joined(params, fixed))
    return reparametrised(task, whole, init=init, train_loss=train_loss, merge=merge)
