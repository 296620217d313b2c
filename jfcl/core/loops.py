"""Bounds on the trips of loops, noted in programs: `jfcl plan` reads what a compiled loop does not show."""

from __future__ import annotations

import contextlib
import re

import jax


def at_most(trips: int) -> contextlib.AbstractContextManager:
    """Notes that the loop that is traced inside runs its body at most so often.

    For a loop over a number that is known only when the program runs. The program computes the same with it.

    Example:
      >>> import jax.numpy as jnp
      >>> def power(x, n):
      ...     with at_most(8):
      ...         return jax.lax.fori_loop(0, n, lambda _, y: y * x, jnp.ones_like(x))
      >>> float(jax.jit(power)(2.0, 3))
      8.0
    """
    return jax.named_scope(f"at_most_{trips}_trips")


def most_trips(attributes: str) -> int | None:
    """Returns the bound that is noted in the text of a compiled loop; None if there is none.

    Example:
      >>> most_trips('%w = (s32[]) while(%t), metadata={op_name="jit(power)/at_most_8_trips/while"}')
      8
    """
    found = re.search(r'op_name="[^"]*at_most_(\d+)_trips\)*/while"', attributes)
    return int(found[1]) if found else None
