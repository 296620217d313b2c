"""Undoing splits that harm: the fall-back to the Federated Learning solution (section II-A)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jfcl import mapping
from jfcl.core import Clients, PyTree, Task, of_rest
from jfcl.kernels.base import if_rare
from jfcl.methods.cfl.state import CFLState
from jfcl.training import losses

WORST = 1e30  # differences of it, summed over clients, stay finite


def num_training(size: jax.Array, validation: float) -> jax.Array:
    """Returns how many of `size` examples are for training; the last ones, a share of `validation`, judge splits."""
    return size - jnp.floor(validation * size.astype(jnp.float32)).astype(size.dtype) if validation else size


def in_active_clusters(state: CFLState) -> CFLState:
    """Returns `state` with the clients of undone splits, which may have been absent then, in the parent's cluster."""
    k = state.cluster
    return state._replace(cluster=jnp.where(state.active[k], k, state.parent[k]))


def undo_harmful_splits(
    task: Task,
    state: CFLState,
    clients: Clients,
    validation: float,
    patience: int,
    is_shared: PyTree,
    client_axis: mapping.Mapping,
) -> tuple[CFLState, jax.Array]:
    """Undoes the splits of `patience` rounds ago after which their clients do worse on their validation examples.

    Section II-A: "if after splitting up the clients a degradation in model performance is observed, it is always
    possible to fall back to the Federated Learning solution". The parent gets its clients and its model back, and is
    final. Parameters that `is_shared` (a pytree of bools, like a model) stay those of all clusters. A performance that
    is not finite is the worst of all.

    Returns:
      `(state, undone [])`.
    """
    capacity = len(state.active)
    due = state.active & (state.tree.born > 0) & (state.round - state.tree.born == patience)
    slots = jnp.arange(capacity, dtype=jnp.int32)
    # By cluster: the split that is due in which it was the new side, or the one that stayed.
    judged = jnp.full(capacity, -1, jnp.int32).at[jnp.where(due, state.parent, capacity)].set(slots, mode="drop")
    judged = jnp.where(due, slots, judged)

    def performance(task, models, k, batch):
        params = jax.tree.map(lambda p: p[k], models)
        found = -task.loss(params, batch) if task.correct is None else task.scores(task.correct, params, batch)
        return jnp.nan_to_num(found, nan=-WORST, posinf=WORST, neginf=-WORST)

    def client(examples, size, cluster, own):
        of_client = of_rest(task, own) if jax.tree.leaves(own) else task
        k = judged[cluster]
        rows = jnp.arange(jax.tree.leaves(examples)[0].shape[0])
        aside = (rows >= num_training(size, validation)) & (rows < size)
        blank = losses.blank_padding(examples, size)
        now = losses.masked_mean(performance(of_client, state.params, cluster, blank), aside)
        before = losses.masked_mean(performance(of_client, state.tree.model, k, blank), aside)
        return now - before, (k >= 0) & aside.any()

    def judge():
        gain, counts = client_axis(client)(clients.examples, jnp.asarray(clients.size), state.cluster, state.personal)
        counts = counts & (state.excluded == 0)
        gain = jax.ops.segment_sum(jnp.where(counts, gain, 0.0), judged[state.cluster], capacity)
        undo = due & (gain < 0)
        target = jnp.where(undo, state.parent, capacity)

        def restored(p, m, stays):
            return p if stays else p.at[target].set(m, mode="drop")

        params = jax.tree.map(restored, state.params, state.tree.model, is_shared)
        return state._replace(
            params=params,
            cluster=jnp.where(undo[state.cluster], state.parent[state.cluster], state.cluster),
            active=state.active & ~undo,
            final=state.final.at[target].set(True, mode="drop"),
            tree=state.tree._replace(
                born=jnp.where(undo, 0, state.tree.born), side=jnp.where(undo[:, None], jnp.int8(0), state.tree.side)
            ),
        ), undo.sum().astype(jnp.int32)

    return if_rare(due.any(), judge, lambda: (state, jnp.zeros((), jnp.int32)))
