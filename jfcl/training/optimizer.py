"""One step of an optax optimiser, which may need the loss beside gradients and parameters, and its random numbers.

`optax.add_noise`, for one, keeps a random key in its state. `optimizer.init` depends on neither client nor round: each
state begins with the key of the optimiser itself. `rekeyed` replaces it, at the beginning of each round of a client, by
one that is derived from the client's key of the round. Between rounds a method keeps the state `as_data`: plain
integers, which stack, select and save as any array.
"""

import inspect
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jfcl.core import PyTree, Task, check, trained_part
from jfcl.core.parameters import is_key, key_data, path_name, with_keys

STREAM = zlib.crc32(b"noise of the optimiser")  # folded into a client's key, which training splits, too
FIELDS = ("key", "rng", "rng_key")  # names that optax gives to keys of `jax.random.PRNGKey`, which are plain integers


def optimizer_step(
    optimizer: optax.GradientTransformation, grads: PyTree, opt_state: PyTree, params: PyTree, loss: jax.Array | None
) -> tuple[PyTree, PyTree]:
    """Returns `(updates, opt_state)` of one step; an optimiser that takes it gets the loss `[]` as `value`."""
    arguments = inspect.signature(optimizer.update).parameters.values()
    takes_loss = loss is not None and any(a.name == "value" or a.kind is a.VAR_KEYWORD for a in arguments)
    return optimizer.update(grads, opt_state, params, **({"value": loss} if takes_loss else {}))


def of_each(optimizer: optax.GradientTransformation, part: str) -> optax.GradientTransformation:
    """Returns the optimiser that applies `optimizer` to each of the models `params[part]` `[K, ...]` by itself.

    Norms, trust ratios and the like are then those of one model. The other entries of `params` do not move.
    """

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        updates, state = jax.vmap(optimizer.update)(grads[part], state, params[part])
        return grads | {part: updates}, state

    return optax.GradientTransformation(lambda params: jax.vmap(optimizer.init)(params[part]), update)


def check_optimizer(argument: str, optimizer: Any, task: Task, *, with_loss: bool = True) -> None:
    """Raises `ValueError` for an optimiser that needs more than gradients, parameters and, `with_loss`, the loss.

    The model of `task` is tried if a step of a single number fails: a mask may need it.
    """

    def fault(params: PyTree) -> str | None:
        def step(params, loss):
            state = optimizer.init(params)
            return (params, state), optimizer_step(optimizer, params, state, params, loss if with_loss else None)

        try:  # types and ranks are promoted as JAX does by default, also under stricter rules of the user
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
                before, after = jax.eval_shape(step, params, jax.ShapeDtypeStruct((), jnp.float32))
        except Exception as error:  # whatever an optimiser raises
            return f"{type(error).__name__}: {error}"
        same = jax.tree.structure(before) == jax.tree.structure(after)
        shapes = [[(x.shape, x.dtype) for x in jax.tree.leaves(tree)] for tree in (before, after)]
        return None if same and shapes[0] == shapes[1] else "its updates or its state change their shapes"

    check(hasattr(optimizer, "init") and hasattr(optimizer, "update"), argument, optimizer, "an optax optimiser")
    if fault({"w": jax.ShapeDtypeStruct((1,), jnp.float32)}) is None:
        return
    why = fault(trained_part(task, jax.eval_shape(task.init, jax.random.key(0))))
    needs = "gradients, parameters and the loss (value)" if with_loss else "gradients and parameters"
    check(why is None, argument, why, f"an optax optimiser that needs {needs} alone, such as optax.adam(0.01)")


# Random numbers.


def _is_key(path: tuple, leaf: Any) -> bool:
    """Returns whether a leaf of an optimiser's state is a random key, typed or of integers."""
    named = bool(path) and isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name in FIELDS
    return is_key(leaf) or (named and getattr(leaf, "dtype", None) == jnp.uint32 and leaf.ndim > 0)


def as_data(opt_state: PyTree) -> PyTree:
    """Returns `opt_state` with the integers of each typed key in its place."""
    return jax.tree.map(key_data, opt_state)


def rekeyed(key: jax.Array, opt_state: PyTree, like: PyTree) -> PyTree:
    """Returns `opt_state` with the keys of one client and round.

    Each random key is replaced by one derived from its path and from `key`, that of this client and round. It is
    independent of keys derived from `key` in other ways. `opt_state` is as `optimizer.init` makes it, or `as_data` of
    that; the result is as `optimizer.init` makes it, of the shapes `like`. Without random keys it is the same object.
    """
    if not any(_is_key(path, leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(like)):
        return opt_state
    key = jax.random.fold_in(key, STREAM)

    def one(path, wanted, leaf):
        if not _is_key(path, wanted):
            return leaf
        leaf_key = jax.random.fold_in(key, zlib.crc32(path_name(path).encode()))
        return with_keys(jax.random.bits(leaf_key, jax.eval_shape(key_data, wanted).shape, jnp.uint32), wanted)

    return jax.tree_util.tree_map_with_path(one, like, opt_state)
