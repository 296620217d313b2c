"""The optimal bipartition of a cluster (Clustered Federated Learning, equation 25 and Algorithm 1).

Merging the most similar pairs until two groups are left (single linkage) is Kruskal's maximum spanning tree without its
weakest edge. Prim's algorithm finds the same in N steps over one row of similarities each. The weakest similarity at
which a client joins the tree is the optimal cross similarity, and the clients that joined before are one side.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jfcl.core.checks import check
from jfcl.core.platforms import by_platform
from jfcl.kernels.base import row_mask
from jfcl.kernels.dendrogram import cut, linkage_tree
from jfcl.kernels.similarity import as_clusters, as_similarity
from jfcl.kernels.spanning_tree import cut_with_size, float_of_key, join_order, order_key, spanning_tree, weakest_joins

LINKAGES = ("single", "complete")


class Bipartition(NamedTuple):
    """Two sides of a cluster.

    Attributes:
      side: `[N]` bool, False for the first active client's side (and for inactive clients).
      cross_similarity: `[]`, the largest similarity across; `inf` where fewer than two clients are active, the minimum
        over no bipartition at all.
    """

    side: jax.Array
    cross_similarity: jax.Array


def optimal_bipartition(
    similarity: jax.Array, active: jax.Array | None = None, *, linkage: str = "single"
) -> Bipartition:
    """Returns the bipartition with the smallest largest similarity across (Clustered Federated Learning, equation 25).

    Where several bipartitions are optimal, the side of the first active client is the smallest possible: the clients
    connected to it through similarities above `cross_similarity`. That depends on the values alone.

    Args:
      similarity: `[N, N]`, symmetric (checked outside `jit`); the diagonal is not read.
      active: `[N]` bool, the members of the cluster to split; default all. Other clients change neither side.
      linkage: `"single"`: the paper's, exact. `"complete"`: the last merge of complete linkage, as in the authors'
        later public code; it keeps the sides compact and is not optimal in the paper's sense.

    Returns:
      `Bipartition(side [N] bool, cross_similarity [])`. Inside `jit`, NaN and infinite similarities count as -1.

    Cost: `N` steps of `O(N)`, each similarity read once. Complete linkage: at most `3 N` such steps, and a copy.

    Example:
      >>> import jax.numpy as jnp
      >>> a = jnp.array([[1.0, 0.9, 0.1], [0.9, 1.0, -0.2], [0.1, -0.2, 1.0]])
      >>> side, cross = optimal_bipartition(a)
      >>> side.tolist(), round(float(cross), 3)
      ([False, False, True], 0.1)
    """
    similarity = as_similarity(similarity)
    check(linkage in LINKAGES, "linkage", linkage, f"one of {LINKAGES}")
    return _optimal_bipartition(similarity, row_mask(active, len(similarity), name="active"), linkage)


@jax.jit(static_argnames="linkage")
def _optimal_bipartition(similarity, active, linkage):
    if linkage == "complete" and len(similarity) > 1:
        return _last_merge(similarity, active)
    side, cross = bipartitions_of_clusters(similarity, active, None, 1)
    return Bipartition(side, cross[0])


@jax.jit(static_argnames=("num_clusters", "min_size"))
def bipartitions_of_clusters(
    similarity: jax.Array, active: jax.Array, cluster: jax.Array | None, num_clusters: int, min_size: int = 1
) -> Bipartition:
    """Returns the `optimal_bipartition` of the active clients of every cluster, for the cost of one.

    With `min_size` above 1, the maximum spanning tree of the active clients loses its weakest edge with at least
    `min_size` clients on both sides, as in HDBSCAN's condensed tree (Campello, Moulavi, Sander 2013). The sides are the
    two components of the tree without that edge, and `cross_similarity` is its similarity. This is not the minimum of
    equation 25 over bipartitions with `min_size` clients on each side, which is reached by collecting the outliers of
    all groups on one side and separates no groups. Of equal similarities, that of the pair `(i, j)`, `i < j`, first in
    lexicographic order counts as the largest, so that the sides depend on the order of the clients too.

    Args:
      cluster: `[N]` int32 in `0..K-1`, or None: one cluster of all.
      min_size: the least number of clients on each side. Above 1, there are `2 N` steps of one number more.

    Returns:
      `Bipartition(side [N] bool, cross_similarity [K])`. Where no edge leaves `min_size` clients on both sides of a
      cluster, `side` is False for all of it, and its `cross_similarity` is `inf`.
    """
    labels = jnp.zeros(len(active), jnp.int32) if cluster is None else cluster

    def by_prim(similarity, active, labels):
        step, joined_at = join_order(similarity, active, None if cluster is None else labels)
        joined_at = jnp.where(active, joined_at[step], jnp.iinfo(joined_at.dtype).max)  # by client now
        weakest = jax.ops.segment_min(joined_at, labels, num_clusters)
        # The first weakest: the clients before it are connected by larger similarities.
        first = jax.ops.segment_min(jnp.where(joined_at == weakest[labels], step, len(step)), labels, num_clusters)
        return (step >= first[labels]) & active, weakest

    if min_size > 1:
        tree = spanning_tree(similarity, active, cluster)
        side, weakest, exists = cut_with_size(tree, active, labels, num_clusters, min_size)
    else:
        by_boruvka = partial(weakest_joins, num_clusters=num_clusters)
        side, weakest = by_platform(similarity, active, labels, cpu=by_prim, accelerator=by_boruvka)
        exists = jax.ops.segment_sum(active.astype(jnp.int32), labels, num_clusters) >= 2
        side = side & exists[labels]
    return Bipartition(side, jnp.where(exists, float_of_key(weakest), jnp.inf))


def _last_merge(similarity: jax.Array, active: jax.Array) -> Bipartition:
    """Returns the two clusters of the last merge of complete linkage."""
    # Negative, not less than 1, so that rounding makes no two of them equal.
    distances = jnp.where(jnp.isfinite(similarity), -similarity, jnp.ones_like(similarity))
    two = active.sum() >= 2
    tree = linkage_tree(distances, "complete", mask=active)
    side = (cut(tree, num_clusters=2) == 1) & active & two
    across = (side[:, None] & (~side & active)[None, :]) & two
    cross = jnp.where(across, float_of_key(order_key(similarity)), -jnp.inf).max()
    return Bipartition(side, jnp.where(two, cross, jnp.inf))


def separation_gap(similarity: jax.Array, clusters: jax.Array, active: jax.Array | None = None) -> jax.Array:
    """Returns the separation gap of the true clusters (Clustered Federated Learning, Definition 2).

    It is the smallest similarity of two clients of one true cluster minus the optimal cross similarity. Above 0, the
    optimal bipartition separates no two clients of one cluster. (The paper states "if and only if"; at or below 0 the
    bipartition can still be correct.)

    Args:
      similarity, active: see `optimal_bipartition`, the cost of which this is.
      clusters: `[N]` integers, the true clusters.

    Returns:
      `[]`. Where no two active clients share a cluster, no pair can be separated, and the smallest similarity counts
      as 1. With fewer than two active clients, `-inf`.

    Example:
      >>> import jax.numpy as jnp
      >>> a = jnp.array([[1.0, 0.9, 0.1], [0.9, 1.0, -0.2], [0.1, -0.2, 1.0]])
      >>> round(float(separation_gap(a, jnp.array([0, 0, 1]))), 3)
      0.8
    """
    similarity = as_similarity(similarity)
    clusters = as_clusters(clusters, len(similarity))
    return _separation_gap(similarity, clusters, row_mask(active, len(similarity), name="active"))


@jax.jit
def _separation_gap(similarity, clusters, active):
    pair = active[:, None] & active[None, :] & ~jnp.eye(len(active), dtype=bool)
    same = pair & (clusters[:, None] == clusters[None, :])
    intra = jnp.minimum(jnp.where(same, similarity, jnp.inf).min(), 1.0)
    return intra - _optimal_bipartition(similarity, active, "single").cross_similarity
