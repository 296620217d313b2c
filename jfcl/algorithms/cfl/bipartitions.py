"""The optimal bipartition and the separation gap of every cluster."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jfcl.core import PyTree
from jfcl.execution import mapping
from jfcl.kernels import bipartition_of_updates, optimal_bipartition, pairwise_cosine, similarity_tolerance
from jfcl.kernels import separation_gap as gap_of

DENSE_UP_TO = 4096  # clients up to which the similarities are always kept as a matrix
DENSE_SHARE = 8  # beyond, only a matrix this many times smaller than the updates; else tiles, computed repeatedly


class Splits(NamedTuple):
    """The bipartition of each cluster.

    Attributes:
      cross_similarity: `[K]`, infinity where no bipartition was computed or possible.
      smaller: `[K]` int32, clients on the smaller side; 0 where all updates are alike but for rounding.
      side: `[N]` bool, each client's side in the bipartition of its cluster.
    """

    cross_similarity: jax.Array
    smaller: jax.Array
    side: jax.Array


def no_splits(capacity: int, count: int) -> Splits:
    """Returns the `Splits` of `K` clusters and `N` clients without a bipartition."""
    return Splits(jnp.full(capacity, jnp.inf, jnp.float32), jnp.zeros(capacity, jnp.int32), jnp.zeros(count, bool))


def bipartitions(
    vectors: PyTree,
    cluster: jax.Array,
    usable: jax.Array,
    wanted: jax.Array,
    *,
    min_size: int = 1,
    linkage: str = "single",
) -> Splits:
    """Computes the optimal bipartition of every wanted cluster.

    Args:
      vectors: pytree of `[N, ...]`, updates or gradients.
      cluster: `[N]` int32 in `0..K-1`.
      usable: `[N]` bool; the other clients are on no side (False).
      wanted: `[K]` bool.
      min_size, linkage: as in `cfl`. Complete linkage needs all similarities at once, for any number of clients.

    Returns:
      `Splits`; for clusters not wanted, and those without a bipartition of that size, the cross similarity is `inf`.
    """
    count = len(cluster)
    leaves = jax.tree.leaves(vectors)
    numbers = sum(leaf.size for leaf in leaves) // count
    coarsest = max((leaf.dtype for leaf in leaves), key=lambda dtype: jnp.finfo(dtype).eps)
    tolerance = similarity_tolerance(numbers, coarsest)
    dense = count <= max(DENSE_UP_TO, numbers // DENSE_SHARE) or linkage != "single"
    points = pairwise_cosine(vectors, mask=usable) if dense else vectors
    if linkage != "single":
        bipartition = partial(optimal_bipartition, linkage=linkage)
    else:
        bipartition = partial(optimal_bipartition if dense else bipartition_of_updates, min_size=min_size)

    def one(k, wanted):
        members = usable & (cluster == k)
        nothing = (jnp.full((), jnp.inf, jnp.float32), jnp.zeros((), jnp.int32), jnp.zeros(count, bool))

        def compute():
            side, cross = bipartition(points, members)
            ones = side.sum().astype(jnp.int32)
            smaller = jnp.minimum(ones, members.sum().astype(jnp.int32) - ones)
            return cross.astype(jnp.float32), jnp.where(1 - cross <= tolerance, 0, smaller), side

        return jax.lax.cond(wanted, compute, lambda: nothing)

    cross, smaller, sides = mapping.chunked(1)(one)(jnp.arange(len(wanted), dtype=jnp.int32), wanted)
    return Splits(cross, smaller, sides.any(axis=0))


def separation_gaps(vectors: PyTree, cluster: jax.Array, usable: jax.Array, true_cluster: Any, count: int) -> jax.Array:
    """Returns `[K]`: the separation gap (Definition 2) in each of `count` clusters; NaN for fewer than two clients."""
    similarity = pairwise_cosine(vectors, mask=usable)
    of_rows = jnp.pad(jnp.asarray(true_cluster), (0, len(cluster) - len(true_cluster)))  # padding clients

    def one(k):
        members = usable & (cluster == k)
        gap = gap_of(similarity, of_rows, members)
        return jnp.where(members.sum() > 1, gap, jnp.nan)

    return mapping.chunked(1)(one)(jnp.arange(count, dtype=jnp.int32))
