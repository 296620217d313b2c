"""Distances of clients by their similarities to all others."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jfcl.kernels.base import row_mask
from jfcl.kernels.similarity import as_similarity


def profile_distances(similarity: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
    """Returns the mean absolute difference between two clients' similarities to the others.

    It is FedGroup's MADC of cosine similarities (Duan et al. 2021): in high dimensions, the similarities to all others
    tell more than the one of the two.

    Args:
      similarity: `[N, N]`, symmetric.
      mask: `[N]` bool: clients that count.

    Returns:
      `[N, N]`, symmetric, with a zero diagonal; 0 for two clients without others, and for those that do not count.

    Raises:
      ValueError: similarities that are not square, not finite or not symmetric.

    Cost: `N³` operations, `O(N²)` memory.

    Example:
      >>> import jax.numpy as jnp
      >>> a = jnp.array([[1.0, 0.5, 0.25], [0.5, 1.0, -0.5], [0.25, -0.5, 1.0]])
      >>> profile_distances(a).tolist()
      [[0.0, 0.75, 1.0], [0.75, 0.0, 0.25], [1.0, 0.25, 0.0]]
    """
    similarity = as_similarity(similarity)
    return _profile_distances(similarity, row_mask(mask, len(similarity)))


@jax.jit
def _profile_distances(similarity, mask):
    counts = mask.astype(similarity.dtype)

    def to_all(i):
        apart = jnp.abs(similarity - similarity[i][None, :]) * counts[None, :]  # [j, z]
        pair = jnp.diagonal(apart) + apart[:, i]  # z is neither of the two
        num_others = counts.sum() - counts - counts[i]
        distance = (apart.sum(axis=1) - pair) / jnp.maximum(num_others, 1)
        return jnp.where(mask & mask[i] & (num_others > 0) & (jnp.arange(len(counts)) != i), distance, 0.0)

    distances = jax.lax.map(to_all, jnp.arange(len(similarity)))
    return jnp.maximum((distances + distances.T) / 2, 0.0)
