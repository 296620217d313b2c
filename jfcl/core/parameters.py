"""Parameters as pytrees: their names, their size in bytes, and whether they are finite."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfcl.core.checks import check
from jfcl.core.platforms import by_platform
from jfcl.core.types import PyTree


def path_name(path: Iterable[Any]) -> str:
    """Returns the name of a parameter, such as `"Dense_0/kernel"`, from its path in a pytree."""
    return "/".join(str(getattr(part, "key", getattr(part, "name", getattr(part, "idx", part)))) for part in path)


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """Returns the leaves of `tree` by their paths, such as `"['Dense_0']['kernel']"`."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def named_parameters(params: PyTree) -> dict[str, Any]:
    """Returns the parameters by their `path_name`."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


def get_parameter(params: PyTree, name: str) -> jax.Array:
    """Returns the parameter with the `path_name` `name`, or raises `ValueError` if there is none.

    Example:
      >>> get_parameter({"Dense_0": {"kernel": 3}}, "Dense_0/kernel")
      3
    """
    named = named_parameters(params)
    check(name in named, "parameter", name, f"one of {', '.join(named)}")
    return named[name]


def set_parameter(params: PyTree, name: str, value: Any) -> PyTree:
    """Returns `params` with `value` in place of the parameter `name`.

    Example:
      >>> set_parameter({"Dense_0": {"bias": 1, "kernel": 2}}, "Dense_0/kernel", 5)
      {'Dense_0': {'bias': 1, 'kernel': 5}}
    """
    get_parameter(params, name)
    return jax.tree_util.tree_map_with_path(lambda path, p: value if path_name(path) == name else p, params)


def is_finite(tree: PyTree) -> jax.Array:
    """Returns `[]` bool: `tree` (of one client; vmap it for many) holds no NaN and no infinity."""

    def each(leaf):
        return jnp.isfinite(leaf).all()

    def largest(leaf):  # NaN is not below infinity; a TPU has no fast conjunction
        return jnp.abs(leaf).max(initial=0) < jnp.inf if jnp.issubdtype(leaf.dtype, jnp.floating) else each(leaf)

    def of_all(check):
        return lambda leaves: jnp.stack(list(map(check, leaves))).all()

    every = of_all(each)
    return by_platform(jax.tree.leaves(tree), cpu=every, accelerator=every, tpu=of_all(largest))


def num_bytes(tree: PyTree) -> int:
    """Returns the bytes of a pytree of arrays (or of their shapes): the cost of sending it once."""
    return sum(int(np.prod(np.shape(leaf))) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
