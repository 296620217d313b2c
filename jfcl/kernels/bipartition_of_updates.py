"""The optimal bipartition from the updates, without the matrix of similarities.

By Borůvka's algorithm (1926), every group of clients joins the group of its most similar outsider, until one group is
left. Similarities are computed in tiles and reduced at once to *candidates*: for every client, its best outsider in
each block of others. A candidate that has since joined the client's own group still bounds the block's similarities
from above. So a row of similarities is computed again only where such a bound exceeds the best known outsider of the
client's group, and never for the largest group, because the others join it.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jfcl.core.checks import check_count
from jfcl.kernels.base import PyTree, sum_dtype
from jfcl.kernels.bipartition import Bipartition
from jfcl.kernels.blocks import checked_rows, finite_rows, fold_blocks, product_of_rows
from jfcl.kernels.similarity import scaled_rows, unit_scale
from jfcl.kernels.spanning_tree import float_of_key, order_key

BLOCK_SIZE = 1024  # clients a side of a tile: 4 MB, large enough for the matrix product's full speed
MAX_BLOCKS = 64  # candidates kept for a client
NOTHING = -(2**31)  # below every similarity's key
UNKNOWN = 2**31 - 1  # above: the bound of a block that has not been computed


def bipartition_of_updates(
    updates: PyTree, active: jax.Array | None = None, *, block_size: int = BLOCK_SIZE
) -> Bipartition:
    """Returns `optimal_bipartition(pairwise_cosine(updates), active)` in memory that grows as N.

    Args:
      updates: `[N, D]`, or a pytree of arrays stacked on a leading client axis; may be sharded over clients.
      active: `[N]` bool, the members of the cluster to split; default all.
      block_size: the number of clients in a block; similarities of two blocks are computed at once.

    Returns:
      `Bipartition(side [N] bool, cross_similarity [] float32)`, with the rule of `optimal_bipartition` for similarities
      that are equal to within rounding, of float64 updates too. Inside `jit`, rows with NaN or infinity have similarity
      -1 to all others.

    Cost: one pass over all pairs, `2 N² D` operations at the speed of the matrix product, and usually less than one
    more where clusters are well separated (at worst `log2 N` more). Memory beside the updates: `O(N)`, 64 candidates of
    8 bytes for a client at most, and a few tiles. Under `vmap` every step of one runs for all: use `jax.lax.map`.

    Example:
      >>> import jax.numpy as jnp
      >>> side, cross = bipartition_of_updates(jnp.array([[1.0, 0.1], [1.0, 0.0], [0.0, 1.0], [0.1, 1.0]]))
      >>> side.tolist(), round(float(cross), 3)
      ([False, False, True, True], 0.198)
    """
    check_count("block_size", block_size)
    rows, active = checked_rows(updates, active, "updates", "active")
    return _bipartition_of_updates(rows, active, block_size)


class _State(NamedTuple):
    group: jax.Array  # [N] the first member of each client's group
    best: jax.Array  # [N, G] key of each client's best outsider in each block of clients, or a bound
    outsider: jax.Array  # [N, G] that outsider; a member of the client's own group where `best` is a bound only
    joins: jax.Array  # [R, 3, N] from, to, key (NOTHING where there was no join)
    round: jax.Array


class _Rows(NamedTuple):
    rows: list[jax.Array]
    scale: tuple[jax.Array, jax.Array]  # [N] each, the factors of `unit_scale`
    active: jax.Array
    finite: jax.Array


def _best_outsiders(problem: _Rows, chosen: jax.Array, group: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
    """Returns, for the clients `chosen` `[C]`, the keys and indices `[C, G]` of their best outsiders in every block."""
    count, dtype = len(group), sum_dtype(*problem.rows)
    places = jnp.arange(count, dtype=jnp.int32)
    usable, scale = (problem.active & problem.finite)[chosen], tuple(s[chosen] for s in problem.scale)
    scaled = [scaled_rows(x[chosen], usable, scale) for x in problem.rows]

    def tile(start, length, best):
        cut = partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=length)
        power, inverse = map(cut, problem.scale)

        def product_with(others):
            return sum(product_of_rows(a, x, dtype) for a, x in zip(scaled, others, strict=True))

        def with_rows():
            return product_with(map(cut, problem.rows)) * inverse[None, :]

        def with_scaled():  # where a product with a row itself could over- or underflow
            return product_with([scaled_rows(cut(x), cut(problem.active), (power, inverse)) for x in problem.rows])

        product = jax.lax.cond((power == 1).all(), with_rows, with_scaled)
        both_finite = problem.finite[chosen][:, None] & cut(problem.finite)[None, :]
        similarity = jnp.where(both_finite, jnp.clip(product, -1.0, 1.0), -1.0).astype(jnp.float32)
        outside = cut(problem.active)[None, :] & (group[chosen][:, None] != cut(group)[None, :])
        keys = jnp.where(outside, order_key(similarity), NOTHING)
        highest = keys.max(axis=1)
        outsiders = jnp.where(keys == highest[:, None], cut(places)[None, :], count).min(axis=1)
        put = partial(jax.lax.dynamic_update_slice, start_indices=(0, start // width))
        return tuple(put(array, column[:, None]) for array, column in zip(best, (highest, outsiders), strict=True))

    empty = jnp.zeros((len(chosen), -(-count // width)), jnp.int32)
    return fold_blocks(tile, (empty, empty), count, width)


@partial(jax.jit, static_argnames="block_size")
def _bipartition_of_updates(rows, active, block_size):
    count = len(active)
    finite = finite_rows(rows)
    height = min(block_size, count)
    width = min(max(block_size, -(-count // MAX_BLOCKS)), count)
    num_blocks = -(-count // width)
    problem = _Rows(rows, unit_scale(rows, active & finite), active, finite)
    places = jnp.arange(count, dtype=jnp.int32)
    num_rounds = math.ceil(math.log2(max(count, 2))) + 1

    def prospects(state):
        """Finds each client's best known outsider, and whether a block could hold a better one for its group."""
        sure = state.group[state.outsider] != state.group[:, None]
        sure_keys = jnp.where(sure, state.best, NOTHING)
        bound = jnp.where(sure, NOTHING, state.best).max(axis=1)
        best = sure_keys.max(axis=1)
        group_best = jax.ops.segment_max(best, state.group, count)
        sizes = jax.ops.segment_sum(active.astype(jnp.int32), state.group, count)
        joins = active & (state.group != jnp.argmax(sizes))
        return sure_keys, best, group_best, joins, joins & (bound > group_best[state.group])

    def compute(state, unsure):
        """Computes the similarities of `height` clients with unknown best outsiders."""
        chosen = jnp.nonzero(unsure, size=height, fill_value=count)[0].astype(jnp.int32)
        best, outsider = _best_outsiders(problem, jnp.minimum(chosen, count - 1), state.group, width)
        return state._replace(
            best=state.best.at[chosen].set(best, mode="drop"),
            outsider=state.outsider.at[chosen].set(jnp.where(best == NOTHING, chosen[:, None], outsider), mode="drop"),
        )

    def join(state, sure_keys, best, group_best, joins):
        """Joins every group but the largest to that of its best outsider."""
        wins = joins & (best == group_best[state.group]) & (best != NOTHING)
        client = jax.ops.segment_min(jnp.where(wins, places, count), state.group, count)
        joined = client < count
        client = jnp.where(joined, client, 0)
        block = jnp.argmax(sure_keys[client], axis=1)
        outsider = state.outsider[client, block]
        return state._replace(
            group=_connect(state.group, client, outsider, joined),
            joins=state.joins.at[state.round].set([client, outsider, jnp.where(joined, group_best, NOTHING)]),
            round=state.round + 1,
        )

    def step(state):
        *candidates, unsure = prospects(state)
        return jax.lax.cond(unsure.any(), lambda: compute(state, unsure), lambda: join(state, *candidates))

    def several_groups(state):
        return (active & (state.group != state.group[jnp.argmax(active)])).any() & (state.round < num_rounds)

    state = _State(
        group=places,
        best=jnp.full((count, num_blocks), UNKNOWN, jnp.int32),
        outsider=jnp.broadcast_to(places[:, None], (count, num_blocks)),
        joins=jnp.zeros((num_rounds, 3, count), jnp.int32).at[:, 2].set(NOTHING),
        round=jnp.zeros((), jnp.int32),
    )
    return _sides_of_weakest(jax.lax.while_loop(several_groups, step, state).joins, active)


def _sides_of_weakest(joins: jax.Array, active: jax.Array) -> Bipartition:
    """Returns the bipartition by the weakest join: clients connected to the first by stronger joins are on its side."""
    left, right, joined_at = joins.swapaxes(0, 1).reshape(3, -1)
    happened = joined_at != NOTHING
    last = jnp.argmin(jnp.where(happened, joined_at, UNKNOWN))
    weakest = joined_at[last]
    # Two groups can choose the same pair from either side, where its similarity is rounded differently.
    low, high = jnp.minimum(left, right), jnp.maximum(left, right)
    same_pair = (low == low[last]) & (high == high[last])
    places = jnp.arange(len(active), dtype=jnp.int32)
    groups = _connect(places, left, right, happened & (joined_at > weakest) & ~same_pair)
    two = active.sum() >= 2
    side = active & (groups != groups[jnp.argmax(active)]) & two
    return Bipartition(side, jnp.where(two, float_of_key(weakest), jnp.inf))


def _connect(group: jax.Array, left: jax.Array, right: jax.Array, keep: jax.Array) -> jax.Array:
    """Returns `group` `[N]` (first members of groups) after joining `left[e]` and `right[e]` where `keep[e]`."""

    def hook(carry):
        old, _ = carry
        a, b = old[left], old[right]
        low = jnp.where(keep, jnp.minimum(a, b), a)
        new = old.at[a].min(low).at[b].min(jnp.where(keep, low, b))
        new = new[new]
        return new, (new != old).any()

    return jax.lax.while_loop(lambda carry: carry[1], hook, (group, jnp.ones((), bool)))[0]
