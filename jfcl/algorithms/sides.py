"""The side of a split that a client belongs to, for clients that the bipartition did not place.

A bipartition places the clients that it compares. Others are left: clients that were absent or sent NaN in the round of
the split, clients with too few examples to have a voice, clients of a population that are not on the device. All of
them are placed by one rule. Every split leaves a *direction*, the mean unit update of the clients that moved less that
of the clients that stayed, each of them brought to length 1; a client belongs to the side that its own update is more
similar to, which is the sign of the inner product of its update and the direction.

A client that missed a split is *pending*. In its next round it trains the model from before that split, as the others
did, and as Algorithm 4 of the paper leads newcomers; so what is compared was computed at one model. One round takes one
level of the tree.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jfcl.core import PyTree
from jfcl.kernels.base import product_of_rows, rows_of
from jfcl.kernels.similarity import scaled_rows, unit_scale

LATER_THAN_ALL = jnp.iinfo(jnp.int32).max


class Sides(NamedTuple):
    """The directions of all splits, and which splits each client has been placed at.

    Attributes:
      direction: a list of `[K, d]` float32, one for each array of an update, by the slot of the cluster that the split
        made.
      placed: `[N]` int32, the round of the last split that the client was placed at; 0 before any.
      changing: `[N]` bool, clients without a voice whose side is still compared in every round; `()` where all clients
        have a voice.
    """

    direction: list[jax.Array]
    placed: jax.Array
    changing: jax.Array | tuple


def no_sides(sent: PyTree, capacity: int, count: int, *, small: bool) -> Sides:
    """The `Sides` before the first round.

    Args:
      sent: shapes of one client's update.
      capacity: `K`.
      count: `N`.
      small: whether there are clients without a voice.
    """
    lengths = [max(x.size, 1) for x in jax.tree.leaves(sent)]
    return Sides(
        direction=[jnp.zeros((capacity, d)) for d in lengths],
        placed=jnp.zeros(count, jnp.int32),
        changing=jnp.zeros(count, bool) if small else (),
    )


def missed_splits(state: Any) -> tuple[jax.Array, jax.Array]:
    """The first split of each client's cluster that the client was not placed at.

    Args:
      state: `CFLState`.

    Returns:
      `(split [N] int32, pending [N] bool)`: the slot of the cluster that it made, and whether there is one.
    """
    born = jnp.where(state.active, state.tree.born, 0)
    missed = state.parent[None, :] == state.cluster[:, None]
    missed = missed & (born[None, :] > state.sides.placed[:, None])
    first = jnp.argmin(jnp.where(missed, born[None, :], LATER_THAN_ALL), axis=1)
    return first.astype(jnp.int32), missed.any(axis=1)


def last_splits(state: Any) -> tuple[jax.Array, jax.Array]:
    """The last split that a client's cluster took part in, as the side that moved or as the one that stayed.

    Returns:
      `(split [N] int32, any [N] bool)`, as in `missed_splits`.
    """
    slots = jnp.arange(len(state.active), dtype=jnp.int32)
    born = jnp.where(state.active, state.tree.born, 0)
    mine = (slots[None, :] == state.cluster[:, None]) | (state.parent[None, :] == state.cluster[:, None])
    mine = mine & (born[None, :] > 0)
    return jnp.argmax(jnp.where(mine, born[None, :], 0), axis=1).astype(jnp.int32), mine.any(axis=1)


def add_directions(
    direction: list[jax.Array], vectors: PyTree, placed: jax.Array, moved: jax.Array, into: jax.Array
) -> list[jax.Array]:
    """`direction` with those of this round's splits.

    Args:
      direction: a list of `[K, d]`.
      vectors: pytree of `[N, ...]`, the updates that were compared.
      placed: `[N]` int32, the slot of the cluster that the split of the client's cluster makes; `K` for clients that no
        bipartition places in this round.
      moved: `[N]` bool, on the side that moves.
      into: `[K]` int32, the slots of the new clusters, `K` where there is no split.
    """
    rows, capacity = rows_of(vectors), len(into)
    counts = placed < capacity
    scale = unit_scale(rows, counts)
    slots = jnp.arange(capacity, dtype=jnp.int32)
    here = placed[None, :] == slots[:, None]
    units = [scaled_rows(x, counts, scale).astype(jnp.float32) for x in rows]

    def mean_direction(members):
        sums = [product_of_rows(members.astype(jnp.float32), x.T) for x in units]  # the length is divided out below
        every = jnp.ones(capacity, bool)
        factors = unit_scale(sums, every)
        return [scaled_rows(x, every, factors) for x in sums]

    moving, staying = mean_direction(here & moved[None, :]), mean_direction(here & ~moved[None, :])
    new = jnp.isin(slots, into)[:, None]
    return [jnp.where(new, m - s, old) for m, s, old in zip(moving, staying, direction, strict=True)]


def similarity_to_side(vectors: PyTree, usable: jax.Array, direction: list[jax.Array], split: jax.Array) -> jax.Array:
    """`[N]`: above 0 for clients whose update resembles the side of `split` `[N]` that moved, below 0 for the other.

    0 for clients that are not `usable` `[N]` bool, whose update is zero, or where the two resemblances are equal.
    """
    rows = rows_of(vectors)
    scale = unit_scale(rows, usable)
    product = sum(
        product_of_rows(scaled_rows(x, usable, scale).astype(jnp.float32), d)
        for x, d in zip(rows, direction, strict=True)
    )
    return jnp.take_along_axis(product, split[:, None], axis=1)[:, 0]


def split(
    state: Any, vectors: PyTree, voice: jax.Array, silent: jax.Array, moves: jax.Array, into: jax.Array
) -> tuple[Sides, jax.Array]:
    """Keeps the directions of this round's splits, and places the clients without a voice.

    Args:
      state: `CFLState` before the splits.
      vectors: pytree of `[N, ...]`, what was compared.
      voice, silent: `[N]` bool, clients of the clusters that are split: those that the bipartition placed, and those
        without a voice whose update is known.
      moves: `[N]` bool, clients with a voice on the side that moves.
      into: `[K]` int32, the slots of the new clusters, `K` where there is no split.

    Returns:
      `(sides, moves)`, with the clients without a voice.
    """
    capacity, sides, slot = len(into), state.sides, into[state.cluster]
    direction = add_directions(sides.direction, vectors, jnp.where(voice, slot, capacity), moves, into)
    changing = sides.changing
    if not isinstance(changing, tuple):
        similarity = similarity_to_side(vectors, silent, direction, jnp.minimum(slot, capacity - 1))
        moves, changing = moves | (silent & (similarity > 0)), changing | silent
    placed = jnp.where(voice | silent, state.round + 1, sides.placed)
    return Sides(direction, placed, changing), moves


def place(
    state: Any, vectors: PyTree, missed: jax.Array, pending: jax.Array, usable: jax.Array, able: jax.Array
) -> tuple[Any, jax.Array]:
    """Places pending clients at the split that they missed, and compares the sides of changing clients again.

    A pending client is placed once. A client without a voice that is in the wrong cluster pulls towards the right one
    and moves there; one in the right cluster is at rest, its update is noise, and so it may move away, and comes back
    in the next round. So its side is compared until two rounds agree. Equal similarities move no client.

    Args:
      state: `CFLState`.
      vectors: pytree of `[N, ...]`: of pending clients at the model before the split.
      missed, pending: of `missed_splits`, in the state with which the round began.
      usable: `[N]` bool, clients with a finite update of this round that this round's splits did not place.
      able: `[N]` bool, clients with a voice; a pending client without one begins to change when it is placed.

    Returns:
      `(state, moved [N] bool)`.
    """
    sides, pending = state.sides, pending & usable
    split, changing = missed, jnp.zeros_like(pending)
    if not isinstance(sides.changing, tuple):
        last, any_split = last_splits(state)
        changing = sides.changing & ~able & usable & any_split & ~missed_splits(state)[1]
        split = jnp.where(pending, missed, last)

    def compare():
        similarity = similarity_to_side(vectors, usable, sides.direction, split)
        toward = jnp.where(similarity > 0, split, state.parent[split])
        toward = jnp.where((pending | changing) & (similarity != 0), toward, state.cluster)
        moved = toward != state.cluster
        placed = jnp.where(pending | (changing & moved), state.tree.born[split], sides.placed)
        still = sides.changing
        if not isinstance(still, tuple):
            still = (still & ~(changing & ~moved)) | (pending & ~able)
        return toward, sides._replace(placed=placed, changing=still), moved

    still = (state.cluster, sides, jnp.zeros_like(pending))
    cluster, sides, moved = jax.lax.cond((pending | changing).any(), compare, lambda: still)
    return state._replace(cluster=cluster, sides=sides), moved
