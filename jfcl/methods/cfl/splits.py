"""Splits of clusters: a slot for each, its record in the parameter tree, and the clusters of all clients after it.

A bipartition places the clients that it compares. Others remain: clients that were absent or sent NaN in the round of
the split, clients with too few examples to be compared, clients of a population that are not on the device. One rule
places all of them. Every split leaves a *direction*: the mean unit update of the clients that moved minus that of the
clients that stayed, both scaled to length 1. The inner product of a client's update and the direction is positive where
the update is more similar to the side that moved.

A client that missed a split is *pending*. In its next round it trains the model from before that split, as the others
did (and as newcomers do in Algorithm 4 of the paper), so that all updates compared at a split belong to one model. One
round takes one level of the tree.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jfcl import mapping
from jfcl.core import Clients, PyTree, with_fixed
from jfcl.kernels.base import if_rare, rows_of
from jfcl.kernels.blocks import product_of_rows
from jfcl.kernels.similarity import signed_sums, unit_scale
from jfcl.methods.cfl.server import Comparison, Decision, Rules, Sent, Splits
from jfcl.methods.cfl.state import CFLState
from jfcl.robust.aggregate import cluster_mean
from jfcl.training import losses

SKETCH_COLUMNS = 4096  # columns of one block of a sketch; signs are drawn per block, so another number changes sketches
LATER_THAN_ALL = jnp.iinfo(jnp.int32).max
WORST = 1e30  # differences of it, summed over clients, stay finite


def allot(accept: jax.Array, used: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the slot of each accepted split, the lowest that is not `used`, else `K`; whether too few are free."""
    capacity = len(used)
    free = jnp.argsort(used, stable=True).astype(jnp.int32)
    turn = jnp.cumsum(accept).astype(jnp.int32) - 1
    fits = accept & (turn < (~used).sum())
    return jnp.where(fits, free[jnp.clip(turn, 0, capacity - 1)], capacity), (accept & ~fits).any()


def split_clusters(rules: Rules, state: CFLState, sent: Sent, comparison: Comparison) -> Decision:
    """Makes the second side of every accepted bipartition a cluster, while there are free slots."""
    into, full = allot(comparison.accepted, state.active | (state.parent >= 0))
    if rules.recursive:
        state = state._replace(final=state.final | (comparison.stationary & (into == len(state.active))))
    state, relocated = carry_out(rules, state, comparison.vectors, sent, comparison.splits, into)
    metrics = {}
    if rules.recursive:  # ended: all clusters with clients are final, and no client that can be placed waits for it
        waits = missed_splits(state)[1] & sent.able & sent.expected
        remaining = jax.ops.segment_sum((state.excluded == 0).astype(jnp.int32), state.cluster, len(state.active))
        metrics["ended"] = (state.final | ~state.active | (remaining == 0)).all() & ~waits.any()
    return state, into, full, jnp.where(relocated, 0.0, sent.weight), metrics


def carry_out(
    rules: Rules, state: CFLState, vectors: PyTree, sent: Sent, splits: Splits, into: jax.Array
) -> tuple[CFLState, jax.Array]:
    """Carries out this round's splits, and places the clients that no bipartition places (see the module's docstring).

    Returns `(state, relocated [N] bool)`: clients that changed their cluster otherwise than in a split of this round,
    so that their update is of neither cluster's model. `vectors` were compared; `into` is from `allot`.
    """
    capacity, new_round, tree, sides = len(state.active), state.round + 1, state.tree, state.sides
    if not isinstance(sides, Sides):  # one cluster, never split
        return state, jnp.zeros(len(state.cluster), bool)
    slot, was_split = into[state.cluster], into < capacity
    here = sent.comparable & was_split[state.cluster]
    compared, small = here & sent.able, here & ~sent.able
    moves = splits.side & was_split[state.cluster]

    def record():
        # The tree.
        parts = jnp.where(moves, 2, jnp.where(compared, 1, 0)).astype(jnp.int8)
        side = jnp.where(state.cluster[None, :] == jnp.arange(capacity)[:, None], parts[None, :], jnp.int8(0))
        updates = sketch(rules.to_compare(sent.updates), compared, rules.tree_dim)
        updates = jnp.where((side > 0)[:, :, None], updates[None, :, :], 0.0)
        recorded = tree._replace(
            born=tree.born.at[into].set(new_round, mode="drop"),
            cross_similarity=tree.cross_similarity.at[into].set(splits.cross_similarity, mode="drop"),
            side=tree.side.at[into].set(side, mode="drop"),
            updates=tree.updates.at[into].set(updates, mode="drop"),
        )

        # The directions, by which small clients move too.
        client_axis, placed = rules.common.client_axis, jnp.where(compared, slot, capacity)
        direction = add_directions(client_axis, sides.direction, vectors, placed, moves, into)
        all_moves, changing = moves, sides.changing
        if not isinstance(changing, tuple):
            similarity = similarity_to_side(vectors, small, direction, jnp.minimum(slot, capacity - 1))
            all_moves, changing = moves | (small & (similarity > 0)), changing | small
        return recorded, Sides(direction, jnp.where(here, new_round, sides.placed), changing), all_moves

    tree, sides, moves = if_rare(was_split.any(), record, lambda: (tree, sides, moves))
    state = state._replace(
        cluster=jnp.where(moves, slot, state.cluster).astype(jnp.int32),
        active=state.active.at[into].set(True, mode="drop"),
        parent=state.parent.at[into].set(jnp.arange(capacity, dtype=jnp.int32), mode="drop"),
        since=jnp.where(was_split, new_round, state.since).at[into].set(new_round, mode="drop"),
        tree=tree,
        sides=sides,
    )
    return place_pending(state, vectors, sent, sent.usable & ~here)


def sketch(updates: PyTree, usable: jax.Array, dim: int) -> jax.Array:
    """Returns updates `[N, S]` in the form of `ParameterTree.updates`; zeros for clients not `usable` `[N]` bool."""
    rows = rows_of(updates)
    if sum(x.shape[1] for x in rows) <= dim:
        whole = jnp.concatenate([x.astype(jnp.float32) for x in rows], axis=1)
        return jnp.where(usable[:, None], whole, 0.0)
    if dim == 0:
        return jnp.zeros((len(usable), 0))
    return signed_sums(rows, usable, jax.random.key(0), dim, SKETCH_COLUMNS).astype(jnp.float32)


# The side of a client.


class Sides(NamedTuple):
    """The directions of all splits, and which splits each client has been placed at.

    Attributes:
      direction: a list of `[K, d]` float32, one for each array of an update, by the slot of the cluster that the split
        made.
      placed: `[N]` int32, the round of the last split at which the client was placed; 0 before any.
      changing: `[N]` bool, small clients (fewer than `min_examples`) whose side is still compared in every round; `()`
        where no client is small.
    """

    direction: list[jax.Array]
    placed: jax.Array
    changing: jax.Array | tuple


def no_sides(sent: PyTree, capacity: int, count: int, *, small: bool) -> Sides:
    """Returns the `Sides` before the first round; `sent`: shapes of an update; `small`: some clients may be small."""
    direction = [jnp.zeros((capacity, max(x.size, 1))) for x in jax.tree.leaves(sent)]
    return Sides(direction, jnp.zeros(count, jnp.int32), jnp.zeros(count, bool) if small else ())


def missed_splits(state: CFLState) -> tuple[jax.Array, jax.Array]:
    """Returns the first split of each client's cluster at which the client was not placed, and whether there is one.

    A split is named by the slot of the cluster that it made. In a state without `sides` no client is pending.
    """
    if not isinstance(state.sides, Sides):
        return state.cluster, jnp.zeros(state.cluster.shape, bool)
    born = jnp.where(state.active, state.tree.born, 0)
    missed = state.parent[None, :] == state.cluster[:, None]
    missed = missed & (born[None, :] > state.sides.placed[:, None])
    first = jnp.argmin(jnp.where(missed, born[None, :], LATER_THAN_ALL), axis=1)
    return first.astype(jnp.int32), missed.any(axis=1)


def last_splits(state: CFLState) -> tuple[jax.Array, jax.Array]:
    """Returns the last split of each client's cluster, as either side of it, and whether there is one."""
    slots = jnp.arange(len(state.active), dtype=jnp.int32)
    born = jnp.where(state.active, state.tree.born, 0)
    took_part = (slots[None, :] == state.cluster[:, None]) | (state.parent[None, :] == state.cluster[:, None])
    took_part = took_part & (born[None, :] > 0)
    return jnp.argmax(jnp.where(took_part, born[None, :], 0), axis=1).astype(jnp.int32), took_part.any(axis=1)


def unit_factors(rows: list[jax.Array], counts: jax.Array) -> jax.Array:
    """Returns `[n]` float32, which scale rows `[n, d]`, of several arrays together, to length 1; 0 for the others."""
    power, inverse = unit_scale(rows, counts)
    return jnp.minimum(power * inverse, jnp.finfo(jnp.float32).max).astype(jnp.float32)


def add_directions(
    client_axis: mapping.Mapping,
    direction: list[jax.Array],
    vectors: PyTree,
    placed: jax.Array,
    moved: jax.Array,
    into: jax.Array,
) -> list[jax.Array]:
    """Returns `direction` with those of this round's splits, whose new clusters are in the slots `into`.

    `placed` `[N]` is the slot of the cluster that the split of the client's cluster makes, `K` for a client that no
    bipartition places in this round; `moved` `[N]` bool: on the side that moves.
    """
    capacity = len(into)
    slots = jnp.arange(capacity, dtype=jnp.int32)
    # The means of the sides' unit vectors, but for their lengths, without a copy of all updates.
    side = jnp.where(moved, placed, capacity + placed) % (2 * capacity)
    factors = unit_factors(rows_of(vectors), placed < capacity)
    weights = factors / jnp.maximum(factors.max(), jnp.finfo(jnp.float32).tiny)
    means = rows_of(cluster_mean(vectors, side, weights, 2 * capacity, client_axis))
    units = [x.astype(jnp.float32) for x in means]
    units = [x * unit_factors(units, jnp.ones(2 * capacity, bool))[:, None] for x in units]
    new = jnp.isin(slots, into)[:, None]
    return [jnp.where(new, x[:capacity] - x[capacity:], old) for x, old in zip(units, direction, strict=True)]


def similarity_to_side(vectors: PyTree, usable: jax.Array, direction: list[jax.Array], split: jax.Array) -> jax.Array:
    """Returns `[N]`, above 0 for updates more similar to the side of `split` `[N]` that moved, below 0 for the other.

    It is 0 for clients that are not `usable` `[N]` bool, for zero updates, and where both sides are equally similar.
    """
    rows = rows_of(vectors)
    product = sum(product_of_rows(x.astype(jnp.float32), d) for x, d in zip(rows, direction, strict=True))
    product = jnp.take_along_axis(product, split[:, None], axis=1)[:, 0]
    return jnp.where(usable, product * unit_factors(rows, usable), 0.0)


def place_pending(state: CFLState, vectors: PyTree, sent: Sent, usable: jax.Array) -> tuple[CFLState, jax.Array]:
    """Places pending clients at the split that they missed, and compares the sides of changing clients again.

    A pending client is placed once. The update of a small client points towards the right cluster while the client is
    in the wrong one. In the right cluster the update is noise: the client may move away, and comes back in the next
    round. So its side is compared until two rounds agree. Equal similarities move no client.

    `usable` `[N]` are the clients with a finite update of this round that this round's splits did not place. Returns
    `(state, moved [N] bool)`.
    """
    sides, pending = state.sides, sent.pending & usable
    split, changing, none_small = sent.missed, jnp.zeros_like(pending), isinstance(sides.changing, tuple)
    if not none_small:
        last, any_split = last_splits(state)
        changing = sides.changing & ~sent.able & usable & any_split & ~missed_splits(state)[1]
        split = jnp.where(pending, sent.missed, last)

    def compare():
        similarity = similarity_to_side(vectors, usable, sides.direction, split)
        toward = jnp.where(similarity > 0, split, state.parent[split])
        toward = jnp.where((pending | changing) & (similarity != 0), toward, state.cluster)
        moved = toward != state.cluster
        placed = jnp.where(pending | (changing & moved), state.tree.born[split], sides.placed)
        still = () if none_small else (sides.changing & ~(changing & ~moved)) | (pending & ~sent.able)
        return toward, sides._replace(placed=placed, changing=still), moved

    unmoved = state.cluster, sides, jnp.zeros_like(pending)
    cluster, sides, moved = if_rare((pending | changing).any(), compare, lambda: unmoved)
    return state._replace(cluster=cluster, sides=sides), moved


# Splits that harm: the fall-back to the Federated Learning solution (section II-A).


def num_training(size: jax.Array, validation: float) -> jax.Array:
    """Returns how many of `size` examples are for training; the last ones, a share of `validation`, judge splits."""
    return size - jnp.floor(validation * size.astype(jnp.float32)).astype(size.dtype) if validation else size


def in_active_clusters(state: CFLState) -> CFLState:
    """Returns `state` with the clients of undone splits, which may have been absent then, in the parent's cluster."""
    k = state.cluster
    return state._replace(cluster=jnp.where(state.active[k], k, state.parent[k]))


def undo_harmful_splits(
    rules: Rules, state: CFLState, clients: Clients, is_shared: PyTree
) -> tuple[CFLState, jax.Array]:
    """Undoes the splits of `rules.fallback_rounds` ago after which their clients do worse on validation examples.

    Section II-A: "if after splitting up the clients a degradation in model performance is observed, it is always
    possible to fall back to the Federated Learning solution". The parent gets its clients and its model back, and is
    final. Parameters that `is_shared` (a pytree of bools, like a model) stay those of all clusters. A performance that
    is not finite is the worst of all. Returns `(state, undone [])`.
    """
    state = in_active_clusters(state)
    capacity, tree = len(state.active), state.tree
    due = state.active & (tree.born > 0) & (state.round - tree.born == rules.fallback_rounds)
    slots = jnp.arange(capacity, dtype=jnp.int32)
    # By cluster: the split that is due in which it was the new side, or the one that stayed.
    judged = jnp.full(capacity, -1, jnp.int32).at[jnp.where(due, state.parent, capacity)].set(slots, mode="drop")
    judged = jnp.where(due, slots, judged)

    def client(examples, size, cluster, personal):
        """Returns the gain of one client by the split that its cluster is judged for, and whether it counts."""
        task = rules.common.task
        task, k = with_fixed(task, personal) if jax.tree.leaves(personal) else task, judged[cluster]
        rows = jnp.arange(jax.tree.leaves(examples)[0].shape[0])
        aside = (rows >= num_training(size, rules.validation)) & (rows < size)
        filled = losses.fill_padding(examples, size)

        def performance(models, k):
            params = jax.tree.map(lambda p: p[k], models)
            scores = -task.loss(params, filled) if task.correct is None else task.scores(task.correct, params, filled)
            return losses.masked_mean(jnp.nan_to_num(scores, nan=-WORST, posinf=WORST, neginf=-WORST), aside)

        return performance(state.params, cluster) - performance(tree.model, k), (k >= 0) & aside.any()

    def judge():
        rows = clients.examples, jnp.asarray(clients.size), state.cluster, state.personal
        gain, counts = rules.common.client_axis(client)(*rows)
        gain = jnp.where(counts & (state.excluded == 0), gain, 0.0)
        undo = due & (jax.ops.segment_sum(gain, judged[state.cluster], capacity) < 0)
        target = jnp.where(undo, state.parent, capacity)

        def restored(p, m, stays):
            return p if stays else p.at[target].set(m, mode="drop")

        born, side = jnp.where(undo, 0, tree.born), jnp.where(undo[:, None], jnp.int8(0), tree.side)
        return state._replace(
            params=jax.tree.map(restored, state.params, tree.model, is_shared),
            cluster=jnp.where(undo[state.cluster], state.parent[state.cluster], state.cluster),
            active=state.active & ~undo,
            final=state.final.at[target].set(True, mode="drop"),
            tree=tree._replace(born=born, side=side),
        ), undo.sum().astype(jnp.int32)

    return if_rare(due.any(), judge, lambda: (state, jnp.zeros((), jnp.int32)))
