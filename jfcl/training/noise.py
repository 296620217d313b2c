"""Random numbers of optimisers: `optax.add_noise`, for one, keeps a random key in its state.

`optimizer.init` depends on neither client nor round: each state begins with the key of the optimiser itself.
`rekeyed` replaces it, at the beginning of each round of a client, by one that is derived from the client's key of the
round. Between rounds a method keeps the state `as_data`: plain integers, which stack, select and save as any array.
"""

from __future__ import annotations

import zlib
from typing import Any

import jax
import jax.numpy as jnp

from jfcl.core import PyTree, path_name
from jfcl.core.parameters import is_key, key_data, with_keys

STREAM = zlib.crc32(b"noise of the optimiser")  # folded into a client's key, which training splits, too
FIELDS = ("key", "rng", "rng_key")  # names that optax gives to keys of `jax.random.PRNGKey`, which are plain integers


def _is_key(path: tuple, leaf: Any) -> bool:
    """Returns whether a leaf of an optimiser's state is a random key, typed or of integers."""
    named = bool(path) and isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name in FIELDS
    return is_key(leaf) or (named and getattr(leaf, "dtype", None) == jnp.uint32 and leaf.ndim > 0)


def as_data(opt_state: PyTree) -> PyTree:
    """Returns `opt_state` with the integers of each typed key in its place."""
    return jax.tree.map(key_data, opt_state)


def rekeyed(key: jax.Array, opt_state: PyTree, like: PyTree) -> PyTree:
    """Returns `opt_state` with the keys of one client and round.

    Args:
      key: of this client and round. Keys derived from it in other ways are independent of those put in here.
      opt_state: as `optimizer.init` makes it, or `as_data` of that.
      like: the shapes of `optimizer.init`'s state.

    Returns:
      The state as `like` has it, with a key derived from `key` and its path in the place of each random key; the same
      object where it has none.
    """
    if not has_keys(like):
        return opt_state
    key = jax.random.fold_in(key, STREAM)

    def one(path, wanted, leaf):
        if not _is_key(path, wanted):
            return leaf
        leaf_key = jax.random.fold_in(key, zlib.crc32(path_name(path).encode()))
        return with_keys(jax.random.bits(leaf_key, jax.eval_shape(key_data, wanted).shape, jnp.uint32), wanted)

    return jax.tree_util.tree_map_with_path(one, like, opt_state)


def has_keys(opt_state: PyTree) -> bool:
    """Returns whether an optimiser's state, or its shapes, holds a random key."""
    return any(_is_key(path, leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state))
