"""The optimal bipartition straight from the updates, without the matrix of similarities.

Borůvka's algorithm (1926): every group of clients joins the group of its most similar outsider, until one is left;
those joins are a maximum spanning tree. Similarities are computed in tiles and reduced at once to *candidates*: for
every client, its best outsider in each block of others. A candidate that has since joined the client's own group is
spent, yet its similarity still bounds from above what the block has to offer. So a row of similarities is computed
again only where such a bound exceeds the best outsider that the client's group is sure of; and never for the largest
group, since the others will join it.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jfcl.kernels.base import (
    PyTree,
    check,
    finite_rows,
    fold_blocks,
    product_of_rows,
    refuse_nonfinite,
    row_mask,
    rows_of,
    sum_dtype,
)
from jfcl.kernels.bipartition import Bipartition, float_of_key, order_key
from jfcl.kernels.similarity import scaled_rows, signed_sums, unit_scale

BLOCK_SIZE = 1024  # clients a side of a tile: 4 MB, large enough for the matrix product's full speed
MAX_BLOCKS = 64  # candidates kept for a client
NOTHING = -(2**31)  # below every similarity's key
UNKNOWN = 2**31 - 1  # above: the bound of a block that nobody has looked at


def bipartition_of_updates(
    updates: PyTree,
    active: jax.Array | None = None,
    *,
    block_size: int | None = None,
    sketch_dim: int | None = None,
    key: jax.Array | None = None,
) -> Bipartition:
    """`optimal_bipartition(pairwise_cosine(updates), active)` in memory that grows with N, not N².

    Args:
      updates: `[N, D]`, or a pytree of arrays stacked on a leading client axis; may be sharded over clients.
      active: `[N]` bool, the members of the cluster to split; default all.
      block_size: clients whose similarities to a block of others are computed at once; default 1024.
      sketch_dim: compare random projections of the updates to this many numbers instead. With probability
        `1 - δ`, no similarity and hence not `cross_similarity` is then off by more than
        `sqrt(8 ln(2 N² / δ) / sketch_dim)` (Johnson-Lindenstrauss; for N = 10⁴, δ = 0.01 and 4,000 numbers: 0.22.
        Typically it is off by `1 / sqrt(sketch_dim)`).
      key: of the random projection; default `jax.random.key(0)`.

    Returns:
      `Bipartition(side [N] bool, cross_similarity [])`; the same rule for equal similarities as `optimal_bipartition`
      (equal to within the rounding of the products, that is). Inside `jit`, rows with NaN or infinity have similarity
      -1 to everybody.

    Raises:
      ValueError: wrong rank or lengths, a block size or sketch size below 1; outside `jit`: active rows with NaN or
        infinity.

    Cost: one pass over all pairs, `2 N² D` operations at the speed of the matrix product, and usually less than one
    more where clusters stand apart (at worst `log2 N` more). Memory beside the updates: `O(N)`, 64 candidates of 8
    bytes for a client at most, and a few tiles. Under `vmap` every step of one is paid by all: use `jax.lax.map`.

    Example:
      >>> import jax.numpy as jnp
      >>> side, cross = bipartition_of_updates(jnp.array([[1.0, 0.1], [1.0, 0.0], [0.0, 1.0], [0.1, 1.0]]))
      >>> side.tolist(), round(float(cross), 3)
      ([False, False, True, True], 0.198)
    """
    rows = rows_of(updates)
    active = row_mask(active, len(rows[0]), name="active")
    check(block_size is None or block_size >= 1, "block_size", block_size, "at least 1")
    check(sketch_dim is None or sketch_dim >= 1, "sketch_dim", sketch_dim, "at least 1")
    refuse_nonfinite(rows, rows_that_count=active)
    key = jax.random.key(0) if key is None else key
    return _bipartition_of_updates(rows, active, key, block_size or BLOCK_SIZE, sketch_dim)[0]


def tiles_computed(updates: PyTree, active: jax.Array | None = None, *, block_size: int | None = None) -> jax.Array:
    """`[]` int32: how many strips of `block_size x N` similarities `bipartition_of_updates` computes (benchmarks)."""
    rows = rows_of(updates)
    active = row_mask(active, len(rows[0]), name="active")
    return _bipartition_of_updates(rows, active, jax.random.key(0), block_size or BLOCK_SIZE, None)[1]


class _State(NamedTuple):
    group: jax.Array  # [N] the first member of each client's group
    best: jax.Array  # [N, G] key of each client's best outsider in each block of clients, or a bound
    outsider: jax.Array  # [N, G] who that is; a member of the client's own group where it is a bound only
    joins: tuple[jax.Array, jax.Array, jax.Array]  # [R, N] each: from, to, key (NOTHING where there was no join)
    round: jax.Array
    strips: jax.Array


@partial(jax.jit, static_argnames=("block_size", "sketch_dim"))
def _bipartition_of_updates(rows, active, key, block_size, sketch_dim):
    count = len(active)
    finite = finite_rows(rows)
    if sketch_dim is not None:
        rows = [signed_sums(rows, finite, key, sketch_dim)]
    height = min(block_size, count)
    width = min(max(block_size, -(-count // MAX_BLOCKS)), count)
    num_blocks = -(-count // width)
    scale = unit_scale(rows, active & finite)
    places = jnp.arange(count, dtype=jnp.int32)
    num_rounds = math.ceil(math.log2(max(count, 2))) + 1

    def strip(who, group):
        """For the clients `who` `[height]`: the keys and names of their best outsiders in every block."""
        mine = [scaled_rows(x[who], (active & finite)[who], tuple(s[who] for s in scale)) for x in rows]

        def tile(start, length, found):
            cut = partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=length)
            product = sum(product_of_rows(a, cut(x), sum_dtype(*rows)) for a, x in zip(mine, rows, strict=True))
            for factor in scale:
                product = product * cut(factor).astype(product.dtype)[None, :]
            known = finite[who][:, None] & cut(finite)[None, :]
            similarity = jnp.where(known, jnp.clip(product, -1.0, 1.0), -1.0).astype(jnp.float32)
            outside = cut(active)[None, :] & (group[who][:, None] != cut(group)[None, :])
            keys = jnp.where(outside, order_key(similarity), NOTHING)
            highest = keys.max(axis=1)
            names = jnp.where(keys == highest[:, None], cut(places)[None, :], count).min(axis=1)
            place = (0, start // width)
            return tuple(
                jax.lax.dynamic_update_slice(array, column[:, None], place)
                for array, column in zip(found, (highest, names), strict=True)
            )

        empty = jnp.zeros((len(who), num_blocks), jnp.int32)
        return fold_blocks(tile, (empty, empty), count, width)

    def prospects(state):
        """Each client's sure best outsider, and whether a block could hold a better one for its group."""
        sure = state.group[state.outsider] != state.group[:, None]
        sure_keys = jnp.where(sure, state.best, NOTHING)
        bound = jnp.where(sure, NOTHING, state.best).max(axis=1)
        best = sure_keys.max(axis=1)
        of_group = jax.ops.segment_max(best, state.group, count)
        sizes = jax.ops.segment_sum(active.astype(jnp.int32), state.group, count)
        joins = active & (state.group != jnp.argmax(sizes))
        return sure_keys, best, of_group, joins, joins & (bound > of_group[state.group])

    def look(state, unsure):
        """Computes the rows of `height` clients that are unsure."""
        (who,) = jnp.nonzero(unsure, size=height, fill_value=count)
        best, outsider = strip(jnp.minimum(who, count - 1), state.group)
        return state._replace(
            best=state.best.at[who].set(best, mode="drop"),
            outsider=state.outsider.at[who].set(jnp.where(best == NOTHING, who[:, None], outsider), mode="drop"),
            strips=state.strips + 1,
        )

    def join(state, sure_keys, best, of_group, joins):
        """Every group but the largest joins that of its best outsider."""
        wins = joins & (best == of_group[state.group]) & (best != NOTHING)
        client = jax.ops.segment_min(jnp.where(wins, places, count), state.group, count)
        joined = client < count
        client = jnp.where(joined, client, 0)
        block = jnp.argmax(sure_keys[client], axis=1)
        record = (client, state.outsider[client, block], jnp.where(joined, of_group, NOTHING))
        return state._replace(
            group=connect(state.group, record[0], record[1], joined),
            joins=tuple(a.at[state.round].set(b) for a, b in zip(state.joins, record, strict=True)),
            round=state.round + 1,
        )

    def step(state):
        sure_keys, best, of_group, joins, unsure = prospects(state)
        return jax.lax.cond(
            unsure.any(), lambda: look(state, unsure), lambda: join(state, sure_keys, best, of_group, joins)
        )

    def several_groups(state):
        return (active & (state.group != state.group[jnp.argmax(active)])).any() & (state.round < num_rounds)

    nobody = jnp.zeros((num_rounds, count), jnp.int32)
    state = _State(
        group=places,
        best=jnp.full((count, num_blocks), UNKNOWN, jnp.int32),
        outsider=jnp.broadcast_to(places[:, None], (count, num_blocks)),
        joins=(nobody, nobody, jnp.full_like(nobody, NOTHING)),
        round=jnp.zeros((), jnp.int32),
        strips=jnp.zeros((), jnp.int32),
    )
    state = jax.lax.while_loop(several_groups, step, state)

    # The weakest join is the cross similarity; whom stronger ones connect to the first client is on its side.
    left, right, joined_at = (x.reshape(-1) for x in state.joins)
    happened = joined_at != NOTHING
    last = jnp.argmin(jnp.where(happened, joined_at, UNKNOWN))
    weakest = joined_at[last]
    # Two groups can choose the same pair, seen from either side, where its similarity is rounded differently.
    same_pair = (jnp.minimum(left, right) == jnp.minimum(left, right)[last]) & (
        jnp.maximum(left, right) == jnp.maximum(left, right)[last]
    )
    groups = connect(places, left, right, happened & (joined_at > weakest) & ~same_pair)
    two = active.sum() >= 2
    side = active & (groups != groups[jnp.argmax(active)]) & two
    return Bipartition(side, jnp.where(two, float_of_key(weakest), jnp.inf)), state.strips


def connect(group: jax.Array, left: jax.Array, right: jax.Array, keep: jax.Array) -> jax.Array:
    """`group` `[N]` (each client's group's first member) after joining `left[e]` with `right[e]` where `keep[e]`."""

    def hook(carry):
        old, _ = carry
        a, b = old[left], old[right]
        low = jnp.where(keep, jnp.minimum(a, b), a)
        new = old.at[a].min(low).at[b].min(jnp.where(keep, low, b))
        new = new[new]
        return new, (new != old).any()

    return jax.lax.while_loop(lambda carry: carry[1], hook, (group, jnp.ones((), bool)))[0]
