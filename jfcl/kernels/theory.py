"""The papers' bounds: correct splits of Clustered Federated Learning, and the error of Threshold-Clustering.

`γ` (`gamma`) is a client's approximation noise, `‖∇R − ∇r_i‖ / ‖∇R‖`: how far its gradient is from that of its true
distribution (Clustered Federated Learning, equation 16). All functions take numbers or arrays, broadcast, and work
inside `jit`; outside, bad values raise a `ValueError`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jfcl.core.checks import check
from jfcl.kernels import optimal_bipartition, pairwise_cosine, separation_gap
from jfcl.kernels.base import is_computable

Number = Any  # a number or an array


def _numbers(name: str, value: Number, accepted: str, ok) -> jax.Array:
    """Returns `value` as floats, checked outside `jit`."""
    value = jnp.asarray(value, jnp.float32)
    if is_computable(value):
        check(ok(value).all(), name, value.tolist(), accepted)
    return value


def _noise(name: str, value: Number) -> jax.Array:
    return _numbers(name, value, "at least 0 and below 1", lambda x: (x >= 0) & (x < 1))


def _clusters(num_clusters: Number) -> jax.Array:
    return _numbers("num_clusters", num_clusters, "at least 2", lambda x: x >= 2)


def intra_similarity_bound(gamma_i: Number, gamma_j: Number) -> jax.Array:
    """Returns the least cosine similarity of gradients of two clients with one distribution (CFL, equations 20 and 21).

        H = −γ_i γ_j + sqrt(1 − γ_i²) sqrt(1 − γ_j²)

    Args:
      gamma_i, gamma_j: approximation noise of either client, in [0, 1).

    Raises:
      ValueError: noise outside [0, 1).

    Example:
      >>> round(float(intra_similarity_bound(0.6, 0.0)), 3)
      0.8
    """
    return jnp.cos(_widest_angle(gamma_i, gamma_j))


def _widest_angle(gamma_i: Number, gamma_j: Number) -> jax.Array:
    """Returns the widest angle between two clients of one distribution: noise turns a gradient by at most `asin γ`."""
    i, j = jnp.broadcast_arrays(_noise("gamma_i", gamma_i), _noise("gamma_j", gamma_j))
    return jnp.arcsin(i) + jnp.arcsin(j)


def cross_similarity_bound(gamma_i: Number, gamma_j: Number, num_clusters: Number) -> jax.Array:
    """Returns the largest optimal cross similarity possible at a stationary solution (CFL, Theorem 1, equation 19).

        cos(π/(k−1)) H + sin(π/(k−1)) sqrt(1 − H²)   if H ≥ cos(π/(k−1)), else 1

    Args:
      gamma_i, gamma_j: approximation noise, in [0, 1); with the largest of all clients for both, it holds for all.
      num_clusters: `k`, the number of true distributions, at least 2; for 2 it is `−H` (equation 22).

    Raises:
      ValueError: noise outside [0, 1), fewer than two clusters.

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

    Args:
      num_clusters: `k`, at least 2.

    Raises:
      ValueError: fewer than two clusters.

    Example:
      >>> round(float(max_noise(2)), 4), round(float(max_noise(4)), 4)
      (0.7071, 0.2588)
    """
    return jnp.sin(jnp.pi / (4.0 * (_clusters(num_clusters) - 1.0)))


def max_noise_of_split(cross_similarity: Number) -> jax.Array:
    """Returns the noise below which a split with this cross similarity is certainly correct (CFL, equation 39).

        γ_max < sqrt((1 − α_cross) / 2)

    CFL splits a cluster only where this exceeds its assumed `γ_max`.

    Args:
      cross_similarity: `α_cross`, at most 1; `inf` (no bipartition) gives 0.

    Raises:
      ValueError: a similarity below -1.

    Example:
      >>> float(max_noise_of_split(-1.0)), float(max_noise_of_split(1.0))
      (1.0, 0.0)
    """
    cross = _numbers("cross_similarity", cross_similarity, "at least -1", lambda x: x >= -1.001)
    return jnp.sqrt((1.0 - jnp.clip(cross, -1.0, 1.0)) / 2.0)


def threshold_radius(noise: Number, separation: Number) -> jax.Array:
    """Returns the radius for which Theorem 3.1 of Federated-Clustering holds, up to a constant: `τ = sqrt(σ Δ)`.

    Args:
      noise: `σ`, the standard deviation within a cluster, at least 0.
      separation: `Δ`, the distance of cluster means, above 0.

    Raises:
      ValueError: negative noise, a separation not above 0.

    Example:
      >>> float(threshold_radius(1.0, 16.0))
      4.0
    """
    return jnp.sqrt(_spread(noise) * _apart(separation))


def threshold_error_bound(
    noise: Number, separation: Number, cluster_size: Number, malicious_fraction: Number = 0.0
) -> jax.Array:
    """Returns the bound of Threshold-Clustering's squared error, up to a constant (Federated-Clustering, Theorem 3.1).

        E‖v − E z_i‖² ≲ σ²/n_i + σ³/Δ + β_i σ Δ

    Args:
      noise: `σ`, at least 0.
      separation: `Δ`, above 0.
      cluster_size: `n_i`, clients in the cluster, at least 1.
      malicious_fraction: `β_i` in [0, 1).

    Raises:
      ValueError: a value outside its range.

    Example:
      >>> float(threshold_error_bound(1.0, 10.0, 10))
      0.2...
    """
    s, d, n = _spread(noise), _apart(separation), _members(cluster_size)
    beta = _noise("malicious_fraction", malicious_fraction)
    s, d, n, beta = jnp.broadcast_arrays(s, d, n, beta)
    return s**2 / n + s**3 / d + beta * s * d


def threshold_error_lower_bound(noise: Number, separation: Number, cluster_size: Number) -> jax.Array:
    """Returns the lower bound of any algorithm's squared error, up to a constant (Federated-Clustering, Theorem 3.2).

        Ω(σ²/n_i + σ⁴/Δ²)

    Args:
      noise: `σ`, at least 0.
      separation: `Δ`, above 0.
      cluster_size: `n_i`, at least 1.

    Raises:
      ValueError: a value outside its range.

    Example:
      >>> float(threshold_error_lower_bound(1.0, 10.0, 10))
      0.1...
    """
    s, d, n = jnp.broadcast_arrays(_spread(noise), _apart(separation), _members(cluster_size))
    return s**2 / n + s**4 / d**2


def threshold_rounds(noise: Number, separation: Number, cluster_fraction: Number) -> jax.Array:
    """Returns the rounds that Threshold-Clustering needs for Theorem 3.1, `⌈max(1, log(σ/Δ) / log(1 − p_i/2))⌉`.

    Args:
      noise: `σ`, above 0 (at 0 the bound is infinite).
      separation: `Δ`, above 0.
      cluster_fraction: `p_i = n_i / N` in (0, 1].

    Returns:
      Floats with whole values.

    Raises:
      ValueError: a value outside its range.

    Example:
      >>> float(threshold_rounds(1.0, 100.0, 0.25))
      35.0
    """
    p = _numbers("cluster_fraction", cluster_fraction, "above 0 and at most 1", lambda x: (x > 0) & (x <= 1))
    s, d, p = jnp.broadcast_arrays(_spread(noise), _apart(separation), p)
    return jnp.ceil(jnp.maximum(1.0, jnp.log(s / d) / jnp.log1p(-p / 2.0)))


def _spread(noise):
    return _numbers("noise", noise, "at least 0", lambda x: x >= 0)


def _apart(separation):
    return _numbers("separation", separation, "above 0", lambda x: x > 0)


def _members(cluster_size):
    return _numbers("cluster_size", cluster_size, "at least 1", lambda x: x >= 1)


class SplitProbability(NamedTuple):
    """Shares of trials, `[A, G]` for `A` numbers of clusters and `G` noise levels.

    `correct`: the optimal bipartition separated no two clients of one cluster. `gap`: the separation gap was positive,
    which implies it. `guaranteed` bool: the noise is below `max_noise`, so that both must be 1.
    """

    correct: jax.Array
    gap: jax.Array
    guaranteed: jax.Array


def split_probability(
    key: jax.Array,
    num_clusters: Any,
    noise: Any,
    *,
    dim: int = 100,
    clients_per_cluster: int = 3,
    num_trials: int = 100,
) -> SplitProbability:
    """Estimates how often the optimal bipartition is correct for random gradients (the experiment of CFL's figure 3).

    In every trial the `k` clusters have Gaussian gradients that sum to zero, as at a stationary solution, and each
    client's differs from its cluster's by Gaussian noise of exactly `γ` times its cluster's length. (The paper gives
    the dimension, the number of clients and "normally distributed"; the rest is an interpretation.)

    Args:
      key: for the trials.
      num_clusters: `[A]` integers, each at least 2.
      noise: `[G]` values of `γ`, at least 0; above 1 is allowed here.
      dim: of the gradients.
      clients_per_cluster: 3 in the paper (`m = 3k`).
      num_trials: for every pair.

    Returns:
      `SplitProbability` of `[A, G]` arrays.

    Raises:
      ValueError: a value outside its range.

    Cost: `A G num_trials` bipartitions of the largest number of clients, in one compiled program.

    Example:
      >>> import jax
      >>> p = split_probability(jax.random.key(0), [2, 4], [0.1, 3.0], num_trials=20)
      >>> p.correct[:, 0].tolist(), p.guaranteed.tolist()
      ([1.0, 1.0], [[True, False], [True, False]])
    """
    counts = np.asarray(num_clusters)
    whole = counts.ndim == 1 and counts.size > 0 and np.issubdtype(counts.dtype, np.integer)
    check(whole and counts.min() >= 2, "num_clusters", num_clusters, "integers, at least 2, of shape [A]")
    counts = counts.tolist()
    noise = _numbers("noise", noise, "at least 0", lambda x: (x >= 0) & (x < jnp.inf))
    check(noise.ndim == 1 and noise.size > 0, "noise", noise.shape, "of shape [G], G at least 1")
    for name, value in (("dim", dim), ("clients_per_cluster", clients_per_cluster), ("num_trials", num_trials)):
        check(isinstance(value, int) and value >= 1, name, value, "an integer, at least 1")
    correct, gap = _split_probability(
        key, jnp.asarray(counts, jnp.int32), noise, max(counts), dim, clients_per_cluster, num_trials
    )
    guaranteed = noise[None, :] < max_noise(jnp.asarray(counts, jnp.float32))[:, None]
    return SplitProbability(correct, gap, guaranteed)


@partial(jax.jit, static_argnames=("largest", "dim", "clients_per_cluster", "num_trials"))
def _split_probability(key, num_clusters, noise, largest, dim, clients_per_cluster, num_trials):
    clusters = jnp.arange(largest * clients_per_cluster, dtype=jnp.int32) // clients_per_cluster

    def trial(key, k, gamma):
        of_clusters, of_clients = jax.random.split(key)
        present = (jnp.arange(largest) < k)[:, None]
        truth = jnp.where(present, jax.random.normal(of_clusters, (largest, dim)), 0.0)
        truth = jnp.where(present, truth - truth.sum(axis=0, keepdims=True) / k.astype(jnp.float32), 0.0)
        error = jax.random.normal(of_clients, (len(clusters), dim))
        wanted = gamma * jnp.linalg.norm(truth[clusters], axis=1, keepdims=True)
        gradients = truth[clusters] + wanted * error / jnp.linalg.norm(error, axis=1, keepdims=True)
        active = clusters < k
        similarity = pairwise_cosine(gradients, mask=active)
        side = optimal_bipartition(similarity, active).side
        together = side.reshape(largest, clients_per_cluster)
        correct = (together.all(axis=1) | ~together.any(axis=1)).all()
        return correct, separation_gap(similarity, clusters, active) > 0

    def cell(k, gamma, key):
        correct, gap = jax.vmap(lambda key: trial(key, k, gamma))(jax.random.split(key, num_trials))
        return correct.mean(), gap.mean()

    shape = (len(num_clusters), len(noise))
    k, gamma = jnp.repeat(num_clusters, len(noise)), jnp.tile(noise, len(num_clusters))
    # One cell after the other bounds the memory.
    correct, gap = jax.lax.map(lambda at: cell(*at), (k, gamma, jax.random.split(key, len(k))))
    return correct.reshape(shape), gap.reshape(shape)
