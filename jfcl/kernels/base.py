"""Parts that the kernels share: checks of input, stacked pytrees as matrices, sums over devices that share columns."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfcl.core.checks import check, held_type

PyTree = Any
DENSE_UP_TO = 4096  # clients, up to which a method may have an [N, N] on every device: 64 MB
_ONE = np.float32(1)


def is_computable(*values: Any) -> bool:
    """Returns whether results computed from `values` are concrete: no tracers, and no program is being traced.

    Inside `jit` a constant is no tracer, but every result computed from it is.
    """
    leaves = jax.tree.leaves(values)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return False
    arrays = any(isinstance(leaf, jax.Array) for leaf in leaves)
    return not (arrays and isinstance(jax.lax.add(_ONE, _ONE), jax.core.Tracer))


def check_values(argument: str, values: Any, fits: Callable[[Any], Any], accepted: str) -> None:
    """Raises `ValueError` unless `fits(values)` holds for all numbers of an array; does nothing inside `jit`."""
    if is_computable(values):
        check(np.all(fits(values)), argument, np.asarray(values).tolist(), accepted)


def check_positive(argument: str, value: Any) -> None:
    """Raises `ValueError` unless a number, if concrete, is above 0."""
    check_values(argument, value, lambda value: np.ndim(value) == 0 and value > 0, "a number above 0")


def check_whole(argument: str, value: Any, least: int, most: int, why: str) -> None:
    """Raises `ValueError` unless a number, if concrete, is whole and from `least` to `most`, because of `why`."""
    fits = lambda value: np.ndim(value) == 0 and least <= value <= most and value == int(value)  # noqa: E731
    check_values(argument, value, fits, f"a whole number from {least} to {most} ({why})")


def rows_of(updates: PyTree, *, name: str = "updates") -> list[jax.Array]:
    """Returns the leaves `[N, ...]` of stacked `updates` as matrices `[N, d]` of floats, or raises `ValueError`."""
    leaves = jax.tree.leaves(updates)
    check(len(leaves) > 0, name, updates, "an array [N, D] or a pytree of arrays stacked on a leading client axis")
    shapes = [jnp.shape(leaf) for leaf in leaves]
    single = len(leaves) == 1 and not isinstance(updates, (dict, list, tuple))
    stacked = all(len(s) >= 1 and s[0] == shapes[0][0] for s in shapes)
    check(stacked, name, shapes, "stacked on one leading client axis [N, ...]")
    check(not single or len(shapes[0]) == 2, name, shapes[0], "of shape [N, D]")
    check(shapes[0][0] > 0, name, shapes[0], "of at least one client (N = 0)")
    types = [getattr(leaf, "dtype", np.dtype(object)) for leaf in leaves]  # the latter of a frame
    real = all(jnp.issubdtype(t, jnp.floating) or jnp.issubdtype(t, jnp.integer) for t in types)
    check(real and all(t == held_type(t) for t in types), name, types, "of real numbers in a type of JAX")
    leaves = [jnp.asarray(leaf, None if jnp.issubdtype(leaf.dtype, jnp.floating) else jnp.float32) for leaf in leaves]
    return [leaf if leaf.ndim == 2 else leaf.reshape(len(leaf), -1) for leaf in leaves]


def like(updates: PyTree, rows: list[jax.Array]) -> PyTree:
    """Returns a pytree like `updates`, with `rows` `[d]` or `[n, d]` in the place of each leaf `[N, ...]`."""
    leaves, structure = jax.tree.flatten(updates)
    shaped = [x.reshape(*x.shape[:-1], *jnp.shape(leaf)[1:]) for x, leaf in zip(rows, leaves, strict=True)]
    return jax.tree.unflatten(structure, shaped)


def row_mask(mask: jax.Array | None, count: int, *, name: str = "mask") -> jax.Array:
    """Returns `mask` as `[N]` bool, all True for `None`."""
    if mask is None:
        return jnp.ones(count, bool)
    mask = jnp.asarray(mask)
    check(mask.shape == (count,) and mask.dtype == bool, name, (mask.shape, mask.dtype), f"bool of shape ({count},)")
    return mask


def sum_dtype(*arrays: jax.Array) -> Any:
    """Returns the type of sums over `arrays`: float64 if one of them is, else float32."""
    return jnp.float64 if any(x.dtype == jnp.float64 for x in arrays) else jnp.float32


def if_rare(happens: jax.Array, rare: Callable[[], PyTree], usual: Callable[[], PyTree]) -> PyTree:
    """Returns `rare()` where `happens` `[]` bool, else `usual()`, as `jax.lax.cond`; both may use outer arrays.

    `jax.vmap` turns `lax.cond` into a selection, for which both branches are computed. Under `if_rare`, `rare` is
    computed only if it happens in at least one element of the batch.
    """
    (rare, tree, of_rare), (usual, usual_tree, of_usual) = (_with_operands(branch) for branch in (rare, usual))
    assert tree == usual_tree, (tree, usual_tree)

    @jax.custom_batching.custom_vmap
    def choose(happens, of_rare, of_usual):
        return jax.lax.cond(happens, lambda: rare(of_rare), lambda: usual(of_usual))

    @choose.def_vmap
    def choose_batched(size, batched, happens, of_rare, of_usual):
        axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, batched)

        def usual_of_all():
            return jax.vmap(usual, axes[2:], axis_size=size)(of_usual)

        def rare_of_some():
            both = jax.vmap(rare, axes[1:2], axis_size=size)(of_rare), usual_of_all()
            choose_one = lambda happens, x, y: jax.tree.map(partial(jnp.where, happens), x, y)  # noqa: E731
            return jax.vmap(choose_one, (axes[0], 0, 0))(happens, *both)

        out = if_rare(happens.any(), rare_of_some, usual_of_all)
        return out, jax.tree.map(lambda _: True, out)

    return jax.tree.unflatten(tree, choose(happens, of_rare, of_usual))


def _with_operands(branch: Callable[[], PyTree]) -> tuple[Callable[[list], list], Any, list]:
    """Returns `branch` as a function of its outer arrays to a list of leaves, their structure, and the outer arrays."""
    traced, shapes = jax.make_jaxpr(branch, return_shape=True)()
    return partial(jax.core.eval_jaxpr, traced.jaxpr), jax.tree.structure(shapes), traced.consts


COLUMNS = "columns_of_updates"  # the axis of a mesh on which each device has all rows, and a share of their columns


def sum_over_columns(x: PyTree) -> PyTree:
    """Returns `x`, sums over columns; where each device has a share of the columns, their total over the devices.

    The kernels that methods run inside a `shard_map` sum over columns by this function, once after their loops.
    """
    return jax.lax.psum(x, COLUMNS) if shares_columns() else x


def shares_columns() -> bool:
    """Returns whether a kernel runs on a device that has a share of the columns."""
    try:
        jax.lax.axis_size(COLUMNS)
    except NameError:
        return False
    return True
