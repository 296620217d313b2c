"""Splits of clusters: a slot for each, its record in the parameter tree, and the clusters of all clients after it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jfcl.core import PyTree
from jfcl.kernels.base import if_rare, rows_of
from jfcl.kernels.similarity import signed_sums
from jfcl.methods.cfl.bipartitions import Splits
from jfcl.methods.cfl.server import Decision, Found, Rules, Sent
from jfcl.methods.cfl.sides import Sides, missed_splits, place_pending, split_sides
from jfcl.methods.cfl.state import CFLState

SKETCH_COLUMNS = 4096  # columns of one block of a sketch; signs are drawn per block, so another number changes sketches


def allot(accept: jax.Array, used: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gives every accepted split (`[K]` bool) a slot that is not `used`, lowest first, while there are any.

    Returns:
      `(into [K] int32, full [] bool)`: the slot of the new cluster, `K` where there is no split; whether there were too
      few slots.
    """
    capacity = len(used)
    free = jnp.argsort(used, stable=True).astype(jnp.int32)
    turn = jnp.cumsum(accept).astype(jnp.int32) - 1
    fits = accept & (turn < (~used).sum())
    return jnp.where(fits, free[jnp.clip(turn, 0, capacity - 1)], capacity), (accept & ~fits).any()


def split_clusters(rules: Rules, state: CFLState, sent: Sent, found: Found) -> Decision:
    """Makes the second side of every accepted bipartition a cluster, while there are free slots."""
    into, full = allot(found.accepted, state.active | (state.parent >= 0))
    final = state.final
    if rules.recursive:
        final = final | (found.stationary & (into == len(state.active)))
    state, relocated = carry_out(rules, state._replace(final=final), found.vectors, sent, found.splits, into)
    metrics = {"ended": _has_ended(state, sent)} if rules.recursive else {}
    return state, into, full, jnp.where(relocated, 0.0, sent.weight), metrics


def carry_out(
    rules: Rules, state: CFLState, vectors: PyTree, sent: Sent, splits: Splits, into: jax.Array
) -> tuple[CFLState, jax.Array]:
    """Carries out this round's splits, and places the clients that no bipartition places (see `sides`).

    Args:
      rules: of the method.
      state: before the splits.
      vectors: pytree of `[N, ...]`, the updates or gradients that were compared.
      sent: the clients' messages.
      splits: the bipartitions.
      into: `[K]` int32, from `allot`.

    Returns:
      `(state, relocated [N] bool)`: clients that changed their cluster otherwise than in a split of this round, so that
      their update is of neither cluster's model.
    """
    capacity, new_round, tree = len(state.active), state.round + 1, state.tree
    if not isinstance(state.sides, Sides):  # one cluster, never split
        return state, jnp.zeros(len(state.cluster), bool)
    was_split = into < capacity
    split_here = was_split[state.cluster]
    voice = sent.comparable & sent.able & split_here
    silent = sent.comparable & ~sent.able & split_here
    moves = splits.side & split_here

    def record():
        parts = jnp.where(moves, 2, jnp.where(voice, 1, 0)).astype(jnp.int8)
        side = jnp.where(state.cluster[None, :] == jnp.arange(capacity)[:, None], parts[None, :], jnp.int8(0))
        updates = sketch(rules.compared(sent.updates), voice, rules.tree_dim)
        kept = jnp.where((side > 0)[:, :, None], updates[None, :, :], 0.0)
        recorded = tree._replace(
            born=tree.born.at[into].set(new_round, mode="drop"),
            cross_similarity=tree.cross_similarity.at[into].set(splits.cross_similarity, mode="drop"),
            side=tree.side.at[into].set(side, mode="drop"),
            updates=tree.updates.at[into].set(kept, mode="drop"),
        )
        return recorded, *split_sides(state, vectors, voice, silent, moves, into)

    tree, sides, moves = if_rare(was_split.any(), record, lambda: (tree, state.sides, moves))
    state = state._replace(
        cluster=jnp.where(moves, into[state.cluster], state.cluster).astype(jnp.int32),
        active=state.active.at[into].set(True, mode="drop"),
        parent=state.parent.at[into].set(jnp.arange(capacity, dtype=jnp.int32), mode="drop"),
        since=jnp.where(was_split, new_round, state.since).at[into].set(new_round, mode="drop"),
        tree=tree,
        sides=sides,
    )
    return place_pending(state, vectors, sent.missed, sent.pending, sent.usable & ~voice & ~silent, sent.able)


def _has_ended(state: CFLState, sent: Sent) -> jax.Array:
    """Returns `[]` bool: all clusters with clients are final, and no client that could be placed waits for its side."""
    waits = missed_splits(state)[1] & sent.able & sent.expected
    remaining = jax.ops.segment_sum((state.excluded == 0).astype(jnp.int32), state.cluster, len(state.active))
    return (state.final | ~state.active | (remaining == 0)).all() & ~waits.any()


def sketch(updates: PyTree, usable: jax.Array, dim: int) -> jax.Array:
    """Returns updates `[N, S]` in the form of `ParameterTree.updates`; zeros for clients not `usable` `[N]` bool."""
    rows = rows_of(updates)
    if sum(x.shape[1] for x in rows) <= dim:
        whole = jnp.concatenate([x.astype(jnp.float32) for x in rows], axis=1)
        return jnp.where(usable[:, None], whole, 0.0)
    if dim == 0:
        return jnp.zeros((len(usable), 0))
    return signed_sums(rows, usable, jax.random.key(0), dim, SKETCH_COLUMNS).astype(jnp.float32)
