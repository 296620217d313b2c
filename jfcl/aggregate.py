"""What a server does with what clients send: weighted means, means per cluster, and stacked pytrees as matrices."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jfcl import mapping
from jfcl.core import Adversary, PyTree


def _per_row(scale: jax.Array, x: jax.Array) -> jax.Array:
    """`scale` `[n]` shaped and typed to multiply `x` `[n, ...]`."""
    return scale.reshape(scale.shape + (1,) * (x.ndim - 1)).astype(x.dtype)


def is_finite(tree: PyTree) -> jax.Array:
    """`[]` bool: no NaN and no infinity anywhere in `tree` (of one client; vmap it for many)."""
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]).all()


def where_rows(keep: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Row `i` of `new` where `keep[i]`, else of `old`; both pytrees of `[n, ...]`, `keep` `[n]` bool."""
    return jax.tree.map(lambda a, b: jnp.where(_per_row(keep, a).astype(bool), a, b), new, old)


def weighted_mean(tree: PyTree, weights: jax.Array) -> PyTree:
    """The mean over the leading axis of `tree` (`[N, ...]`), row `i` counting `weights[i]`.

    Rows of weight 0 are never part of it, NaN or not; all weights 0 gives zeros.

    Example:
      >>> import jax.numpy as jnp
      >>> weighted_mean(jnp.array([[1.0, 2.0], [3.0, 6.0], [jnp.nan, 0.0]]), jnp.array([1.0, 3.0, 0.0])).tolist()
      [2.5, 5.0]
    """
    return jax.tree.map(lambda x: x[0], cluster_mean(tree, jnp.zeros(weights.shape, jnp.int32), weights, 1))


def add_to_clusters(sums: PyTree, tree: PyTree, cluster: jax.Array, weights: jax.Array) -> PyTree:
    """Adds `weights[i] * tree[i]` to `sums[cluster[i]]` for every row `i`.

    Args:
      sums: pytree of `[K, ...]`.
      tree: pytree of `[n, ...]`; rows of weight 0 are left out, NaN or not.
      cluster: `[n]` int32 in `0..K-1`.
      weights: `[n]` float32.

    Returns:
      Pytree of `[K, ...]`. Cost: `O(D)` for one row, else `O(n K D)` as one matrix product.
    """

    def add(total, x):
        x = jnp.where(_per_row(weights, x) > 0, x, jnp.zeros_like(x))
        if len(x) == 1:
            return total.at[cluster[0]].add(x[0] * weights[0].astype(x.dtype))
        one_hot = jax.nn.one_hot(cluster, len(total), dtype=x.dtype, axis=0) * weights[None, :].astype(x.dtype)
        return total + jnp.tensordot(one_hot, x, axes=1)

    return jax.tree.map(add, sums, tree)


def add_sent(total: tuple[PyTree, jax.Array], sent: tuple[PyTree, jax.Array, jax.Array]) -> tuple[PyTree, jax.Array]:
    """A fold for `mapping.map_reduce`: `(sums [K, ...], weight [K])` and what clients sent, `(tree, cluster, weights)`.

    `divide_rows` of the result is each cluster's weighted mean.
    """
    tree, cluster, weights = sent
    ones = (weights > 0).astype(jnp.float32)
    return add_to_clusters(total[0], tree, cluster, weights), add_to_clusters(total[1], weights, cluster, ones)


def divide_rows(sums: PyTree, weights: jax.Array) -> PyTree:
    """`sums[k] / weights[k]`, and zeros where `weights[k]` is 0; pytree of `[K, ...]`, `weights` `[K]`."""
    safe = jnp.where(weights > 0, weights, jnp.ones_like(weights))
    return jax.tree.map(lambda x: x / _per_row(safe, x), sums)


def cluster_mean(tree: PyTree, cluster: jax.Array, weights: jax.Array, num_clusters: int) -> PyTree:
    """The weighted mean of the rows of each cluster; zeros for a cluster without weight.

    Args:
      tree: pytree of `[N, ...]`.
      cluster: `[N]` int32 in `0..K-1`.
      weights: `[N]`, at least 0.
      num_clusters: `K`.

    Returns:
      Pytree of `[K, ...]`.

    Example:
      >>> import jax.numpy as jnp
      >>> cluster_mean(jnp.array([1.0, 3.0, 5.0]), jnp.array([0, 0, 2]), jnp.ones(3), 3).tolist()
      [2.0, 0.0, 5.0]
    """
    zeros = jax.tree.map(lambda x: jnp.zeros((num_clusters, *x.shape[1:]), x.dtype), tree)
    return divide_rows(*add_sent((zeros, jnp.zeros(num_clusters)), (tree, cluster, weights.astype(jnp.float32))))


def cluster_mean_in_order(
    client_axis: mapping.Mapping, tree: PyTree, cluster: jax.Array, weights: jax.Array, num_clusters: int
) -> PyTree:
    """`cluster_mean`, added up in the order of the clients where `client_axis` takes one at a time.

    Clients of weight 0 behind the others then do not change a bit.
    """
    zero = (jax.tree.map(lambda x: jnp.zeros((num_clusters, *x.shape[1:]), x.dtype), tree), jnp.zeros(num_clusters))
    total, _ = mapping.map_reduce(client_axis, lambda *sent: (sent, ()), add_sent, zero)(tree, cluster, weights)
    return divide_rows(*total)


def attacked(adversary: Adversary | None, key: jax.Array, updates: PyTree, ids: jax.Array, usable: jax.Array):
    """`updates` `[N, ...]` as the server gets them, and which of them count, `[N]` bool: finite, and usable before.

    `ids` `[N]` says which clients they are from; padding clients' ids may lie beyond `adversary.malicious`.
    """
    if adversary is None:
        return updates, usable
    known = jnp.asarray(adversary.malicious)
    malicious = known[jnp.minimum(ids, len(known) - 1)] & (ids < len(known)) & usable
    updates = adversary.attack(key, updates, malicious, usable)
    return updates, usable & jax.vmap(is_finite)(updates)


def robust_cluster_mean(
    aggregator: Callable[..., PyTree], updates: PyTree, cluster: jax.Array, usable: jax.Array, num_clusters: int
) -> PyTree:
    """`aggregator(updates, mask=members)` for every cluster, one after the other: pytree of `[K, ...]`."""

    def one(k):
        return aggregator(updates, mask=usable & (cluster == k))

    return mapping.chunked(1)(one)(jnp.arange(num_clusters, dtype=jnp.int32))


def stack_trees(trees: list[PyTree]) -> PyTree:
    """A list of `K` pytrees of one structure as one pytree of `[K, ...]`."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def ravel_clients(tree: PyTree) -> tuple[jax.Array, Callable[[jax.Array], PyTree]]:
    """A stacked pytree `[N, ...]` as one matrix `[N, D]`, and the way back (for any number of rows).

    Example:
      >>> import jax.numpy as jnp
      >>> matrix, unravel = ravel_clients({"w": jnp.zeros((3, 2, 2)), "b": jnp.ones((3, 1))})
      >>> matrix.shape, unravel(matrix[:1])["w"].shape
      ((3, 5), (1, 2, 2))
    """
    leaves, structure = jax.tree.flatten(tree)
    shapes = [leaf.shape[1:] for leaf in leaves]
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1].tolist()

    def unravel(matrix):
        parts = jnp.split(matrix, ends, axis=1)
        return jax.tree.unflatten(
            structure,
            [
                p.reshape(len(p), *shape).astype(leaf.dtype)
                for p, shape, leaf in zip(parts, shapes, leaves, strict=True)
            ],
        )

    return jnp.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1), unravel


def num_bytes(tree: PyTree) -> int:
    """The bytes of a pytree of arrays (or of their shapes): what sending it once costs."""
    return sum(int(np.prod(np.shape(leaf))) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
