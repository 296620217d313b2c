"""The papers' bounds on correct splits (Clustered Federated Learning).

`γ` (`gamma`) is a client's approximation noise, `‖∇R − ∇r_i‖ / ‖∇R‖`: how far its gradient is from that of its true
distribution (Clustered Federated Learning, equation 16). All functions take numbers or arrays, broadcast, and work
inside `jit`; outside, bad values raise a `ValueError`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jfcl.kernels.base import check_values

Number = Any  # a number or an array


def _numbers(name: str, value: Number, accepted: str, ok) -> jax.Array:
    """Returns `value` as floats, checked outside `jit`."""
    value = jnp.asarray(value, jnp.float32)
    check_values(name, value, ok, accepted)
    return value


def _clusters(num_clusters: Number) -> jax.Array:
    return _numbers("num_clusters", num_clusters, "at least 2", lambda x: x >= 2)


def intra_similarity_bound(gamma_i: Number, gamma_j: Number) -> jax.Array:
    """Returns the least cosine similarity of gradients of two clients with one distribution (CFL, equations 20 and 21).

        H = −γ_i γ_j + sqrt(1 − γ_i²) sqrt(1 − γ_j²)

    Either client's noise is in [0, 1).

    Example:
      >>> round(float(intra_similarity_bound(0.6, 0.0)), 3)
      0.8
    """
    return jnp.cos(_widest_angle(gamma_i, gamma_j))


def _widest_angle(gamma_i: Number, gamma_j: Number) -> jax.Array:
    """Returns the widest angle between two clients of one distribution: noise turns a gradient by at most `asin γ`."""
    accepted = "at least 0 and below 1", lambda x: (x >= 0) & (x < 1)
    noise = [_numbers(name, value, *accepted) for name, value in (("gamma_i", gamma_i), ("gamma_j", gamma_j))]
    i, j = jnp.broadcast_arrays(*noise)
    return jnp.arcsin(i) + jnp.arcsin(j)


def cross_similarity_bound(gamma_i: Number, gamma_j: Number, num_clusters: Number) -> jax.Array:
    """Returns the largest optimal cross similarity possible at a stationary solution (CFL, Theorem 1, equation 19).

        cos(π/(k−1)) H + sin(π/(k−1)) sqrt(1 − H²)   if H ≥ cos(π/(k−1)), else 1

    With the largest noise of all clients for both, in [0, 1), it holds for all. `num_clusters` is `k`, the number of
    true distributions, at least 2; for 2 the bound is `−H` (equation 22).

    Example:
      >>> float(cross_similarity_bound(0.0, 0.0, 2)), round(float(cross_similarity_bound(0.0, 0.0, 4)), 3)
      (-1.0, 0.5)
    """
    # The same as an angle: π/(k−1) between clusters minus the angle by noise. Through H, `sqrt(1 − H²)` would lose half
    # of the digits of small noise (3e-4 in float32, and too low for a bound), and its slope at 0 would be NaN.
    angle, k = jnp.broadcast_arrays(_widest_angle(gamma_i, gamma_j), _clusters(num_clusters))
    return jnp.cos(jnp.maximum(jnp.pi / (k - 1.0) - angle, 0.0))


def max_noise(num_clusters: Number) -> jax.Array:
    """Returns the noise of all clients below which the split is certainly correct (Byzantine CFL, Corollary 1).

        γ_max < sin(π / (4 (k − 1)))

    `num_clusters` is `k`, the number of true distributions, at least 2.

    Example:
      >>> round(float(max_noise(2)), 4), round(float(max_noise(4)), 4)
      (0.7071, 0.2588)
    """
    return jnp.sin(jnp.pi / (4.0 * (_clusters(num_clusters) - 1.0)))


def max_noise_of_split(cross_similarity: Number) -> jax.Array:
    """Returns the noise below which a split with this cross similarity is certainly correct (CFL, equation 39).

        γ_max < sqrt((1 − α_cross) / 2)

    CFL splits a cluster only where this exceeds its assumed `γ_max`. `cross_similarity` is `α_cross`, at least -1;
    `inf` (no bipartition) gives 0.

    Example:
      >>> float(max_noise_of_split(-1.0)), float(max_noise_of_split(1.0))
      (1.0, 0.0)
    """
    cross = _numbers("cross_similarity", cross_similarity, "at least -1", lambda x: x >= -1.001)
    return jnp.sqrt((1.0 - jnp.clip(cross, -1.0, 1.0)) / 2.0)
