"""The arrays of a checkpoint, one after the other in one file, each with its SHA-256."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jfcl.core import PyTree, files, named_leaves, plain
from jfcl.core.parameters import is_key, key_data, with_keys


class UnusableError(ValueError):
    """An intact checkpoint of another run or version."""


def write_leaves(path: Path, state: PyTree) -> list[dict[str, Any]]:
    """Writes the arrays of `state`; returns the name, type, shape and SHA-256 of each."""
    leaves, digests = [], []
    with files.new_file(path) as descriptor, ThreadPoolExecutor(2) as hashing:
        for name, leaf in named_leaves(state).items():
            array = np.asarray(key_data(leaf))
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            digests.append(hashing.submit(hashlib.sha256, data))
            files.write_all(descriptor, data)
            leaves.append({"name": name, "dtype": str(array.dtype), "shape": list(array.shape)})
            if len(digests) > 2:  # hashing is slower than writing, and the host holds three arrays at most
                digests[-3].result()
    return [leaf | {"sha256": digest.result().hexdigest()} for leaf, digest in zip(leaves, digests, strict=True)]


def read_leaves(path: Path, leaves: list[dict[str, Any]], like: PyTree) -> PyTree:
    """Returns the arrays at `path` as a pytree like `like`; `leaves` is the result of `write_leaves`.

    Raises:
      UnusableError: names, types or shapes differ from those of `like`.
      ValueError: an array differs from its digest.
    """
    named = named_leaves(like)
    stored = {name: jax.eval_shape(key_data, x) if is_key(x) else x for name, x in named.items()}
    wanted = [{"name": name, "dtype": str(x.dtype), "shape": list(x.shape)} for name, x in stored.items()]
    if [{name: leaf[name] for name in ("name", "dtype", "shape")} for leaf in leaves] != wanted:
        raise UnusableError("is of another model or number of clients")
    arrays = []
    with plain.reader(path) as f:
        for leaf, (name, x) in zip(leaves, stored.items(), strict=True):
            array = np.empty(x.shape, x.dtype)
            data = array.reshape(-1).view(np.uint8)
            if f.readinto(data) != len(data) or hashlib.sha256(data).hexdigest() != leaf["sha256"]:
                raise ValueError(f"the array {name or 'of the state'} differs from its digest")
            arrays.append(with_keys(array, named[name]))
        if f.read(1):
            raise ValueError("state.bin is too long")
    return jax.tree.unflatten(jax.tree.structure(like), arrays)
