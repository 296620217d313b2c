"""What the traced program of a module shows before anything is compiled: a softmax at its end, errors of shapes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from flax import errors

SAME_VALUES = ("reshape", "squeeze", "convert_element_type", "copy")
OF_SUMS = (*SAME_VALUES, "broadcast_in_dim")


def ends_in_softmax(jaxpr: Any) -> bool:
    """Returns whether the outputs of a program are exponentials divided by their sum over the last axis."""
    by_output = {id(out): equation for equation in jaxpr.eqns for out in equation.outvars}

    def source(variable: Any, through: tuple[str, ...]) -> Any:
        """Returns the equation of a variable, or of that from which the operations `through` make it."""
        equation = by_output.get(id(variable))
        while equation is not None and equation.primitive.name in through:
            equation = by_output.get(id(equation.invars[0]))
        return equation

    last = source(jaxpr.outvars[0], SAME_VALUES)
    inner = None if last is None else last.params.get("jaxpr", last.params.get("call_jaxpr"))
    if inner is not None and len(last.outvars) == 1:  # a function under jit, or with derivatives of its own
        return ends_in_softmax(getattr(inner, "jaxpr", inner))
    if last is None or last.primitive.name != "div":
        return False
    above, below = source(last.invars[0], SAME_VALUES), source(last.invars[1], OF_SUMS)
    if above is None or below is None or (above.primitive.name, below.primitive.name) != ("exp", "reduce_sum"):
        return False
    summed = below.invars[0]
    return below.params["axes"] == (summed.aval.ndim - 1,) and source(summed, SAME_VALUES) is above


@contextlib.contextmanager
def explained(name: str, x: Any) -> Iterator[None]:
    """Names the batch `x` in errors of the module `name`.

    Type errors of JAX, errors of flax, and divisions by zero become `ValueError`; others stay as they are, with a note.
    """
    batch = f"a batch of inputs [{', '.join(map(str, ('B', *x.shape[1:])))}], here {x.shape} {x.dtype}"
    try:
        yield
    except ValueError as error:
        error.add_note(f"{name} was called on {batch}")
        raise
    except errors.InvalidRngError as error:
        remedy = "write nn.Dropout(rate, deterministic=not train), with an argument train of its __call__"
        raise ValueError(f"{name} draws random numbers in evaluation: {remedy}") from error
    except (TypeError, ZeroDivisionError, errors.FlaxError) as error:
        what = f"{type(error).__name__}: " + re.sub(r" \(https?://\S*\)$", "", str(error).split("\n")[0])
        raise ValueError(f"{name} must map {batch}, to as many rows of outputs; it fails: {what}") from error
