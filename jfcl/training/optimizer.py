"""One step of an optax optimiser, which may need the loss beside gradients and parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jfcl.core import PyTree, Task, check, trained_part

_ONE = {"w": jax.ShapeDtypeStruct((1,), jnp.float32)}  # the parameters of the smallest model


@contextlib.contextmanager
def _standard() -> Iterator[None]:
    """Promotes types and ranks as JAX does by default: a trial is not of the user's strictness."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def takes_loss(optimizer: optax.GradientTransformation, params: PyTree) -> bool:
    """Returns whether the update of an optimiser depends on the loss, as its argument `value`.

    Args:
      optimizer: of optax.
      params: of a model, which is tried if a step of a single number fails: a mask may need it.

    Example:
      >>> [takes_loss(optimizer, jnp.ones(3)) for optimizer in (optax.polyak_sgd(), optax.adam(0.1))]
      [True, False]
    """

    def step(params, loss):
        return optimizer.update(params, optimizer.init(params), params, value=loss)

    for like in (_ONE, params):
        try:
            with _standard():
                made = jax.make_jaxpr(step)(like, jax.ShapeDtypeStruct((), jnp.float32)).jaxpr
        except Exception:  # whatever an optimiser raises; most take no such argument
            continue
        return any(made.invars[-1] is one for one in [*made.outvars, *(v for eqn in made.eqns for v in eqn.invars)])
    return False


def optimizer_step(
    optimizer: optax.GradientTransformation, grads: PyTree, opt_state: PyTree, params: PyTree, loss: jax.Array | None
) -> tuple[PyTree, PyTree]:
    """Returns `(updates, opt_state)` of one step; an optimiser that takes it gets the loss `[]` as `value`."""
    with_loss = {"value": loss} if loss is not None and takes_loss(optimizer, params) else {}
    return optimizer.update(grads, opt_state, params, **with_loss)


def check_optimizer(argument: str, optimizer: Any, task: Task, *, with_loss: bool = True) -> None:
    """Checks that `optimizer_step` can do a step of a model.

    Args:
      argument: its name.
      optimizer: of optax.
      task: of the model, which is tried if a step of a single number fails: a mask may need it.
      with_loss: whether a loss is known.

    Raises:
      ValueError: an optimiser that needs more than gradients, parameters and the loss, or returns other shapes.
    """

    def fault(params: PyTree) -> str | None:
        def step(params, loss):
            state = optimizer.init(params)
            return (params, state), optimizer_step(optimizer, params, state, params, loss if with_loss else None)

        try:
            with _standard():
                before, after = jax.eval_shape(step, params, jax.ShapeDtypeStruct((), jnp.float32))
        except Exception as error:  # whatever an optimiser raises
            return f"{type(error).__name__}: {error}"
        same = jax.tree.structure(before) == jax.tree.structure(after)
        shapes = [[(x.shape, x.dtype) for x in jax.tree.leaves(tree)] for tree in (before, after)]
        return None if same and shapes[0] == shapes[1] else "its updates or its state change their shapes"

    check(hasattr(optimizer, "init") and hasattr(optimizer, "update"), argument, optimizer, "an optax optimiser")
    if fault(_ONE) is None:
        return
    why = fault(trained_part(task, jax.eval_shape(task.init, jax.random.key(0))))
    needs = "gradients, parameters and the loss (value)" if with_loss else "gradients and parameters"
    check(why is None, argument, why, f"an optax optimiser that needs {needs} alone, such as optax.adam(0.01)")
