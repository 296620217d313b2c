"""Secret orthonormal operators that hide updates from the server (Clustered Federated Learning, section V-B).

All clients apply the same operator `P`, drawn from a seed that the server does not have, to their flattened updates.
Inner products, norms, similarities and hence splits are unchanged, and means commute with `P`. So the server computes
with `P Δθ`, and clients invert the result. The server has the lengths and similarities of updates, but not their
coordinates. The protection ends there: from some pairs of `Δθ` and `P Δθ` the operator can be computed.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jfcl.core.checks import check, check_count
from jfcl.kernels.blocks import HIGHEST


class Operator(NamedTuple):
    """A pair of functions: `apply`, `[..., D]` to `[..., P]` with `P = D` except for rotations, and `invert`."""

    apply: Callable[[jax.Array], jax.Array]
    invert: Callable[[jax.Array], jax.Array]


def permutation(key: jax.Array, dim: int) -> Operator:
    """Returns a random permutation of the coordinates. It is exact. Values stay visible, their places do not."""
    order = jax.random.permutation(key, dim)
    return Operator(*(partial(jnp.take, indices=places, axis=-1) for places in (order, jnp.argsort(order))))


def sign_flip(key: jax.Array, dim: int) -> Operator:
    """Returns a random sign for every coordinate. It is exact. Magnitudes stay visible."""
    signs = jax.random.rademacher(key, (dim,), jnp.int8)

    def flip(x):
        return x * signs.astype(x.dtype).reshape((1,) * (x.ndim - 1) + (dim,))

    return Operator(flip, flip)


def rotation(key: jax.Array, dim: int) -> Operator:
    """Returns a randomised Hadamard rotation: random signs, then a Walsh-Hadamard transform (Ailon, Chazelle 2009).

    Vectors are padded with zeros to the next power of two, `P`. Cost: `O(P log P)`.
    """
    flip = sign_flip(key, dim).apply
    padded = 2 ** math.ceil(math.log2(dim))

    def apply(x):
        return _hadamard(jnp.pad(flip(x), [(0, 0)] * (x.ndim - 1) + [(0, padded - dim)]))

    return Operator(apply, lambda y: flip(_hadamard(y)[..., :dim]))


def _hadamard(x: jax.Array) -> jax.Array:
    """Returns the Walsh-Hadamard transform over the last axis, orthonormal and so its own inverse.

    The matrix for `2^(6 a + b)` is a Kronecker product of `a` matrices of size 64 and one of `2^b`: a small matrix
    product along each of as many axes.
    """
    from scipy.linalg import hadamard  # takes long to import

    bits = x.shape[-1].bit_length() - 1
    factors = [64] * (bits // 6) + ([2 ** (bits % 6)] if bits % 6 else [])
    batch = x.shape[:-1]
    y = x.reshape(*batch, *factors)
    for axis, size in enumerate(factors, start=len(batch)):
        matrix = jnp.asarray(hadamard(size) / math.sqrt(size), x.dtype)
        y = jnp.moveaxis(jnp.tensordot(y, matrix, (axis, 0), precision=HIGHEST), -1, axis)
    return y.reshape(x.shape)


OPERATORS = {"permutation": permutation, "sign": sign_flip, "rotation": rotation}


def orthonormal(name: str, key: jax.Array, dim: int) -> Operator:
    """Returns a random orthonormal operator on vectors of `dim` numbers, and its inverse.

    Args:
      name: `"permutation"`, `"sign"` or `"rotation"` (randomised Hadamard).
      key: the clients' secret; the same key gives the same operator.
      dim: `D`, at least 1.

    Returns:
      `Operator(apply, invert)`, both for arrays `[..., D]` of any rank; rotations give `[..., P]` with `P` the next
      power of two. `invert(apply(x))` is `x`, bit for bit for permutations and signs.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> hide = orthonormal("rotation", jax.random.key(0), 3)
      >>> secret = hide.apply(jnp.array([3.0, 1.0, 4.0]))
      >>> secret.shape, round(float(jnp.linalg.norm(secret)), 4), hide.invert(secret).round(4).tolist()
      ((4,), 5.099, [3.0, 1.0, 4.0])
    """
    check(name in OPERATORS, "name", name, f"one of {tuple(OPERATORS)}")
    check_count("dim", dim)
    hide = OPERATORS[name](key, dim)

    def checked(function, dim):  # for real vectors of `dim` numbers; integers become floats
        def call(x):
            x = jnp.asarray(x)
            check(x.ndim >= 1 and x.shape[-1] == dim, "x", x.shape, f"of shape [..., {dim}]")
            return function(x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32))

        return call

    hidden_dim = jax.eval_shape(hide.apply, jax.ShapeDtypeStruct((dim,), jnp.float32)).shape[-1]
    return Operator(checked(hide.apply, dim), checked(hide.invert, hidden_dim))
