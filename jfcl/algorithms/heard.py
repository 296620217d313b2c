"""The last known update of every client, for Clustered Federated Learning with a cohort in each round.

Two clients can be compared only where both updates are at hand, and a cohort seldom holds all clients of a cluster. So
the server keeps the last update of every client, and the round in which it was computed. An update from before the last
change of its cluster was computed at another model, and does not count.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jfcl.core import PyTree


class Heard(NamedTuple):
    """What the server remembers of each client.

    Attributes:
      update: pytree of `[N, ...]`, the last update, as it was sent.
      round: `[N]` int32, the round in which it was computed; 0 for clients without one. Its age is `state.round` less
        this.
      size: `[N]` int32, examples of the client; 0 for clients that the server has never seen.
      mute: `[N]` bool, clients whose last answer was not finite.
    """

    update: PyTree
    round: jax.Array
    size: jax.Array
    mute: jax.Array


def nothing_heard(sent: PyTree, count: int) -> Heard:
    """The `Heard` of `count` clients before the first round; `sent`: shapes of one client's update."""
    update = jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), sent)
    return Heard(update, jnp.zeros(count, jnp.int32), jnp.zeros(count, jnp.int32), jnp.zeros(count, bool))


def known_size(heard: Any, size: jax.Array) -> jax.Array:
    """`[N]` int32: `size`, of clients that are absent (0) the size that the server remembers."""
    size = jnp.asarray(size)
    return jnp.where(size > 0, size, heard.size) if isinstance(heard, Heard) else size


def listen(
    heard: Heard,
    new_round: jax.Array,
    size: jax.Array,
    rows: jax.Array,
    updates: PyTree,
    here: jax.Array,
    usable: jax.Array,
    counts: jax.Array,
) -> Heard:
    """Returns `heard` after a round.

    Args:
      heard: before it.
      new_round: `[]` int32, the round.
      size: `[N]` int32, as in `known_size`.
      rows: `[C]` int32, the clients of the cohort.
      updates: pytree of `[C, ...]`.
      here: `[C]` bool, clients that answered.
      usable: `[C]` bool; the others keep the update that they had.
      counts: `[C]` bool, whether the update was computed at the model of the client's cluster.
    """

    def put(old, new):
        keep = usable.reshape(-1, *[1] * (new.ndim - 1))
        return old.at[rows].set(jnp.where(keep, new, old[rows]))

    when = jnp.where(usable, jnp.where(counts, new_round, 0), heard.round[rows])
    return Heard(
        update=jax.tree.map(put, heard.update, updates),
        round=heard.round.at[rows].set(when),
        size=size,
        mute=heard.mute.at[rows].set(jnp.where(here, ~usable, heard.mute[rows])),
    )


def is_current(heard: Heard, since: jax.Array) -> jax.Array:
    """`[N]` bool: clients heard since the last change of their cluster, which was in round `since` `[N]`."""
    return heard.round > since


def forget(heard: Any, moved: jax.Array) -> Any:
    """`heard` without the updates of clients that have `moved` `[N]` bool to another cluster. `()` stays `()`."""
    return heard._replace(round=jnp.where(moved, 0, heard.round)) if isinstance(heard, Heard) else heard


def enough_heard(voice: jax.Array, able: jax.Array, cluster: jax.Array, capacity: int) -> jax.Array:
    """`[K]` bool: clusters of which at least half of the clients `able` to speak have a `voice`, `[N]` bool each."""
    count = [jax.ops.segment_sum(x.astype(jnp.int32), cluster, capacity) for x in (voice, able)]
    return (2 * count[0] >= count[1]) & (count[0] > 0)
