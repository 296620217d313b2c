"""The optimal bipartition and the separation gap of every cluster."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jfcl import mapping
from jfcl.core import PyTree
from jfcl.kernels import bipartition_of_updates, optimal_bipartition, pairwise_cosine, similarity_tolerance
from jfcl.kernels import separation_gap as gap_of
from jfcl.kernels.base import DENSE_UP_TO
from jfcl.kernels.bipartition import Bipartition, bipartitions_of_clusters
from jfcl.mapping.columns import over_columns

# Beyond `DENSE_UP_TO` clients only a matrix this many times smaller than the updates; else tiles, computed repeatedly.
DENSE_SHARE = 8


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
    client_axis: mapping.Mapping = jax.vmap,
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
      client_axis: the clients' mapping.
      min_size, linkage: as in `cfl`. Complete linkage needs all similarities at once, for any number of clients.

    Returns:
      `Splits`; for clusters not wanted, and those without a bipartition of that size, the cross similarity is `inf`.
    """
    count, capacity = len(cluster), len(wanted)
    leaves = jax.tree.leaves(vectors)
    numbers = sum(leaf.size for leaf in leaves) // count
    coarsest = max((leaf.dtype for leaf in leaves), key=lambda dtype: jnp.finfo(dtype).eps)
    tolerance = similarity_tolerance(numbers, coarsest)
    dense = count <= max(DENSE_UP_TO, numbers // DENSE_SHARE) or linkage != "single"

    def one_by_one(bipartition, points, cluster, active):
        """Returns the `Bipartition` of all clusters by that of each, which skips those without two active clients."""
        nothing = Bipartition(jnp.zeros(count, bool), jnp.full((), jnp.inf, jnp.float32))

        def one(k):
            members = active & (cluster == k)

            def compute():
                side, cross = bipartition(points, members)
                return Bipartition(side, cross.astype(jnp.float32))

            return jax.lax.cond(members.sum() > 1, compute, lambda: nothing)

        side, cross = mapping.chunked(1)(one)(jnp.arange(capacity, dtype=jnp.int32))
        return Bipartition(side.any(axis=0), cross)

    def from_similarities(vectors, cluster, usable, active):
        similarity = pairwise_cosine(vectors, mask=usable)
        if linkage == "single":
            return (), bipartitions_of_clusters(similarity, active, cluster, capacity, min_size)
        return (), one_by_one(partial(optimal_bipartition, linkage=linkage), similarity, cluster, active)

    active = usable & wanted[cluster]
    if dense:
        side, cross = over_columns(client_axis, from_similarities)(vectors, cluster, usable, active)[1]
    else:
        side, cross = one_by_one(partial(bipartition_of_updates, min_size=min_size), vectors, cluster, active)

    ones, members = (jax.ops.segment_sum(x.astype(jnp.int32), cluster, capacity) for x in (side, active))
    smaller = jnp.where(1 - cross <= tolerance, 0, jnp.minimum(ones, members - ones))
    return Splits(cross.astype(jnp.float32), smaller, side)


def separation_gaps(
    vectors: PyTree,
    cluster: jax.Array,
    usable: jax.Array,
    true_cluster: Any,
    count: int,
    client_axis: mapping.Mapping = jax.vmap,
) -> jax.Array:
    """Returns `[K]`: the separation gap (Definition 2) in each of `count` clusters; NaN for fewer than two clients."""
    of_rows = jnp.pad(jnp.asarray(true_cluster), (0, len(cluster) - len(true_cluster)))  # padding clients

    def from_similarities(vectors, cluster, usable, of_rows):
        similarity = pairwise_cosine(vectors, mask=usable)

        def one(k):
            members = usable & (cluster == k)
            gap = gap_of(similarity, of_rows, members)
            return jnp.where(members.sum() > 1, gap, jnp.nan)

        return (), mapping.chunked(1)(one)(jnp.arange(count, dtype=jnp.int32))

    return over_columns(client_axis, from_similarities)(vectors, cluster, usable, of_rows)[1]
