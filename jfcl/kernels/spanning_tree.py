"""The weakest edge of a spanning tree that leaves enough clients on both sides.

The Euler tour of a tree walks along every edge twice. Between the two lies the subtree below the edge, so positions on
the tour give the sizes of all subtrees at once. Pointer doubling (Tarjan and Vishkin 1985) finds the positions in
`log2 N` steps on whole arrays, however deep the tree is.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp


class TreeEdges(NamedTuple):
    """`[E]` each: the two ends int32, the similarity's integer key, and which edges exist (the others are ignored)."""

    left: jax.Array
    right: jax.Array
    key: jax.Array
    real: jax.Array


class TreeCut(NamedTuple):
    """`side` `[N]` bool: the part of the tree without the root; `key` `[]` of the edge cut; `found` `[]` bool."""

    side: jax.Array
    key: jax.Array
    found: jax.Array


def cut_with_size(edges: TreeEdges, root: jax.Array, count: int, min_size: int) -> TreeCut:
    """Cuts the weakest edge that leaves at least `min_size` nodes on both sides.

    Args:
      edges: the real ones are a tree that contains `root`.
      root: `[]` int32, a node.
      count: `N`; nodes are `0 .. N-1`, those outside the tree are on neither side.
      min_size: at least 1.

    Returns:
      `TreeCut`; where no edge leaves enough on both sides, `side` is all False and `key` means nothing. Of equal keys
      the edge `(i, j)`, `i < j`, that comes last in lexicographic order is the weakest.

    Cost: one sort of `2 E` integers and `O(E log E)` operations in `log2 E` steps.
    """
    position = tour_positions(edges, root, count)
    out, back = jnp.split(position, 2)
    enter, leave = jnp.minimum(out, back), jnp.maximum(out, back)
    below = (leave - enter + 1) // 2
    nodes = edges.real.sum().astype(jnp.int32) + 1
    usable = edges.real & (below >= min_size) & (nodes - below >= min_size)

    def among(usable, key, lowest):
        """Those of the `usable` with the lowest or highest `key`."""
        end = jnp.iinfo(key.dtype).max if lowest else jnp.iinfo(key.dtype).min
        masked = jnp.where(usable, key, jnp.array(end, key.dtype))
        return usable & (masked == (masked.min() if lowest else masked.max()))

    weakest = among(usable, edges.key, lowest=True)
    weakest = among(weakest, jnp.minimum(edges.left, edges.right), lowest=False)
    weakest = among(weakest, jnp.maximum(edges.left, edges.right), lowest=False)
    edge = jnp.argmax(weakest)
    found = usable.any()
    walked = (position >= enter[edge]) & (position < leave[edge]) & jnp.tile(edges.real, 2) & found
    target = jnp.concatenate([edges.right, edges.left])
    side = jnp.zeros(count, bool).at[jnp.where(walked, target, count)].set(True, mode="drop")
    return TreeCut(side, edges.key[edge], found)


def tour_positions(edges: TreeEdges, root: jax.Array, count: int) -> jax.Array:
    """`[2 E]` int32: when the Euler tour from `root` walks along each edge, left to right (`:E`) and back (`E:`).

    After `u -> v` the tour takes the edge that follows `v -> u` in the circle of all edges out of `v`.
    """
    num_walks = 2 * len(edges.left)
    source = jnp.where(jnp.tile(edges.real, 2), jnp.concatenate([edges.left, edges.right]), count)
    order = jnp.argsort(source, stable=True).astype(jnp.int32)
    sources = source[order]
    places = jnp.arange(num_walks, dtype=jnp.int32)
    first = jax.ops.segment_min(places, sources, count + 1, indices_are_sorted=True)
    is_last = jnp.append(sources[1:] != sources[:-1], True)
    following = jnp.zeros(num_walks, jnp.int32).at[order].set(order[jnp.where(is_last, first[sources], places + 1)])
    after = following[jnp.roll(places, num_walks // 2)]

    start = order[jnp.minimum(first[root], num_walks - 1)]
    is_end = after == start
    after = jnp.where(is_end, places, after)
    to_end = jnp.where(is_end, 0, 1)

    def double(_, carry):
        to_end, after = carry
        return to_end + to_end[after], after[after]

    to_end, _ = jax.lax.fori_loop(0, math.ceil(math.log2(num_walks)), double, (to_end, after))
    return to_end[start] - to_end
