"""Hidden updates (section V-B): clients send their updates through a secret orthonormal operator."""

from __future__ import annotations

import jax
from jax.flatten_util import ravel_pytree

from jfcl.core import PyTree
from jfcl.kernels import OPERATORS, orthonormal


def privacy_code(privacy: str | None) -> int:
    """Returns the value of `ParameterTree.privacy` for an operator's name, or None."""
    return 0 if privacy is None else 1 + list(OPERATORS).index(privacy)


def _operator(privacy: str, seed: int, dim: int):
    """Returns the clients' operator. Its key is independent of all keys of the server."""
    return orthonormal(privacy, jax.random.fold_in(jax.random.key(seed), 0x5EC8E7), dim)


def hide(update: PyTree, privacy: str | None, seed: int) -> PyTree:
    """Returns the message of a client: its update, or one vector `{"hidden": [P]}` where updates are hidden."""
    if privacy is None:
        return update
    flat = ravel_pytree(update)[0]
    return {"hidden": _operator(privacy, seed, len(flat)).apply(flat)}


def reveal(means: PyTree, like: PyTree, privacy: str | None, seed: int) -> PyTree:
    """Returns the mean updates `[K, ...]` behind the server's means of hidden updates; `like` is one model."""
    if privacy is None:
        return means
    flat, unravel = ravel_pytree(like)
    return jax.vmap(unravel)(_operator(privacy, seed, len(flat)).invert(means["hidden"]))
