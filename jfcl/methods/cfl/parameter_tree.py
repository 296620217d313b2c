"""The parameter tree of Clustered Federated Learning (Sattler et al. 2021, section V-C): newcomers, leavers, paths.

Every split that `jfcl.cfl` carries out leaves a node with the model before it and the updates of its clients. A
newcomer goes from the root to a leaf by the similarity of its updates to those (Algorithm 4), and every client can use
any model on its path, from the most general one to its own cluster's.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jfcl import mapping
from jfcl.analysis import metrics
from jfcl.core.checks import check, require
from jfcl.core.clients import check_clients, check_examples, client_keys, max_examples, num_clients
from jfcl.core.parameters import is_finite, named_leaves, trained_part
from jfcl.core.types import Clients, PyTree, Task
from jfcl.kernels import OPERATORS
from jfcl.mapping.jitted import jitted
from jfcl.methods.cfl.rounds import hide
from jfcl.methods.cfl.splits import LATER_THAN_ALL, Sides, sketch
from jfcl.methods.cfl.state import CFLState
from jfcl.methods.cfl.tree_file import check_model, check_state, load_tree, save_tree
from jfcl.methods.round import initial_optimizers
from jfcl.robust.aggregate import where_rows
from jfcl.training import local


class Node(NamedTuple):
    """A cluster that exists or has existed, on the host.

    Attributes:
      parent: index of the parent in the list of nodes; -1 for the root.
      children: indices of the two children, the one that kept the slot first; `()` for a leaf.
      slot: the cluster's row in `state.params` and value in `state.cluster` (for leaves).
      round: the round of the split that created it, 0 for the root.
      clients: `[n]` indices of the clients in it (of inner nodes: of those that the bipartition compared).
      cross_similarity: of the bipartition that divided it; `nan` for a leaf.
      split: the slot under which `state.tree` keeps its division; -1 for a leaf.
    """

    parent: int
    children: tuple[int, ...]
    slot: int
    round: int
    clients: np.ndarray
    cross_similarity: float
    split: int


def nodes(state: CFLState) -> list[Node]:
    """Returns the tree as a list, parents before children: clusters in the order of their rounds.

    `state` is that of `jfcl.cfl`, of one seed, outside `jit`; `ValueError` for that of another method. After `S` splits
    there are `2 S + 1` nodes; the first is the root.

    Example:
      >>> import jax, jfcl
      >>> from jfcl.testing import problem
      >>> clients, _, task, training = problem()
      >>> algorithm = jfcl.cfl(task, training, eps_1=0.05, eps_2=0.1, max_clusters=2)
      >>> state, _ = jfcl.rollout(algorithm, clients, key=jax.random.key(0), num_rounds=20)
      >>> [(node.children, node.clients.tolist()) for node in nodes(state)]
      [((1, 2), [0, 1, 2, 3, 4, 5, 6]), ((), [0, 2, 3, 4]), ((), [1, 5, 6])]
    """
    check_state(state)
    cluster, active, parent = (np.asarray(x) for x in (state.cluster, state.active, state.parent))
    born, side, cross = (np.asarray(x) for x in (state.tree.born, state.tree.side, state.tree.cross_similarity))
    tree = [Node(-1, (), 0, 0, np.arange(0), np.nan, -1)]
    at = {0: 0}  # the node that is in a slot now
    for k in sorted(np.flatnonzero(active & (born > 0)).tolist(), key=lambda k: (born[k], parent[k])):
        p, first_child = int(parent[k]), len(tree)
        above = at[p]
        divided = {"children": (first_child, first_child + 1), "clients": np.flatnonzero(side[k] > 0), "split": k}
        tree[above] = tree[above]._replace(cross_similarity=float(cross[k]), **divided)
        tree += [Node(above, (), slot, int(born[k]), np.arange(0), np.nan, -1) for slot in (p, k)]
        at |= {p: first_child, k: first_child + 1}
    gone = np.asarray(state.excluded) > 0
    for slot, i in at.items():
        tree[i] = tree[i]._replace(clients=np.flatnonzero((cluster == slot) & ~gone))
    return tree


def first_split(state: CFLState) -> tuple[np.ndarray, np.ndarray]:
    """Returns the updates `[n, S]` that the first split compared, and the clusters `[n]` of their clients now.

    Without a split both are empty.
    """
    root = nodes(state)[0]
    compared = root.clients if root.split >= 0 else root.clients[:0]
    return np.asarray(state.tree.updates)[root.split][compared], np.asarray(state.cluster)[compared]


def models(state: CFLState) -> PyTree:
    """Returns the models of all `nodes(state)`, stacked in their order: pytree of `[nodes, ...]`."""
    tree = nodes(state)
    slot, split = (jnp.asarray([getattr(node, name) for node in tree]) for name in ("slot", "split"))
    before = jax.tree.map(lambda p: p[jnp.maximum(split, 0)], state.tree.model)
    return where_rows(split >= 0, before, jax.tree.map(lambda p: p[slot], state.params))


def path(state: CFLState, cluster: int) -> list[int]:
    """Returns the indices into `nodes(state)` from the root to the leaf of a cluster.

    `ValueError` for a cluster that does not exist.
    """
    ways = _paths(nodes(state))
    check(cluster in ways, "cluster", cluster, f"one of the clusters there are, {sorted(ways)}")
    return ways[cluster]


def _paths(nodes: list[Node]) -> dict[int, list[int]]:
    """Returns the `path` of every cluster."""
    ways = []
    for i, node in enumerate(nodes):  # parents come before children
        ways.append([*(ways[node.parent] if node.parent >= 0 else []), i])
    return {node.slot: way for node, way in zip(nodes, ways, strict=True) if not node.children}


class PathEvaluation(NamedTuple):
    """`node` `[N, L]`: every client's path, its leaf repeated at the end; `loss`, `accuracy` `[N, L]` of its models."""

    node: np.ndarray
    loss: np.ndarray
    accuracy: np.ndarray | None


def evaluate_paths(
    task: Task, state: CFLState, clients: Clients, *, client_axis: mapping.Mapping | None = None
) -> PathEvaluation:
    """Evaluates every client with each model on its path, from the most general one to its own.

    Args:
      task: of the run.
      state: of `jfcl.cfl`.
      clients: `[N]`, test examples of the clients of the run, in their order.

    Returns:
      `PathEvaluation`; `L` is the depth of the tree plus 1. `accuracy` is None for tasks without one. Cost: a forward
      pass over all examples for every level.

    Example:
      >>> import jax, jfcl, optax
      >>> task = jfcl.models.classification(jfcl.models.Linear(10), (4,), 10)
      >>> algorithm = jfcl.cfl(task, jfcl.local_training(optax.sgd(0.2), num_steps=1), max_clusters=2)
      >>> clients = jfcl.stack_clients([{"x": np.ones((3, 4), np.float32), "y": np.zeros(3, np.int32)}] * 2)
      >>> state = algorithm.init(jax.random.key(0), clients)  # without a split
      >>> found = evaluate_paths(task, state, clients)
      >>> found.node.tolist(), found.accuracy.shape, path(state, 0), models(state)["Dense_0"]["kernel"].shape
      ([[0], [0]], (2, 1), [0], (1, 4, 10))
    """
    n = num_clients(clients)
    check_model(task, state.params, state.personal)
    check(n == len(state.cluster), "clients", f"{n} clients", f"the {len(state.cluster)} clients of the run")
    ways = _paths(nodes(state))
    used = [ways[k] for k in np.asarray(state.cluster).tolist()]
    depth = max(map(len, used))
    node = np.array([way + way[-1:] * (depth - len(way)) for way in used], np.int32)
    evaluate = partial(metrics.evaluate, task, models(state), clients, personal=state.personal, client_axis=client_axis)
    levels = [evaluate(jnp.asarray(node[:, level])) for level in range(depth)]
    column = lambda name: np.stack([np.asarray(level[name]) for level in levels], axis=1)  # noqa: E731
    return PathEvaluation(node, column("loss"), column("accuracy") if "accuracy" in levels[0] else None)


class Assignment(NamedTuple):
    """`cluster` `[M]` int32; `similarity` `[M]` to the most similar client at the last split.

    It is `nan` without a split, and where the newcomer's update is not finite: such a one stays with those that stayed.
    """

    cluster: jax.Array
    similarity: jax.Array


def assign_newcomer(
    task: Task,
    training: local.LocalTraining,
    state: CFLState,
    newcomers: Clients,
    *,
    key: jax.Array,
    privacy: str | None = None,
    privacy_seed: int = 0,
    client_axis: mapping.Mapping | None = None,
) -> Assignment:
    """Leads new clients, one or many, from the root to a leaf (Algorithm 4).

    At every node a newcomer trains the node's model as the clients did, and goes to the side that holds the client
    with the most similar update.

    Args:
      task, training, privacy, privacy_seed: those of the run. (Newcomers know the clients' secret.)
      state: of `jfcl.cfl`; or from `load_tree`.
      newcomers: `M` clients, training examples.
      key: for their mini-batches.

    Returns:
      `Assignment`; newcomer `i` is then served `state.params[cluster[i]]`. Cost: one round of local training for each
      level of the tree, and `M N S` operations.

    Raises:
      ValueError: a state of another method, without updates (`tree_dim=0`), of another model, or with updates hidden
        in another way. (Not: by another secret, which the server cannot know.)

    Example:
      >>> import jax, jfcl
      >>> from jfcl.testing import problem
      >>> clients, _, task, training = problem()
      >>> algorithm = jfcl.cfl(task, training, eps_1=0.05, eps_2=0.1, max_clusters=2)
      >>> state, _ = jfcl.rollout(algorithm, clients, key=jax.random.key(0), num_rounds=20)
      >>> late = jax.tree.map(lambda x: x[1:2], clients)
      >>> jfcl.assign_newcomer(task, training, state, late, key=jax.random.key(1)).cluster.tolist()
      [1]
    """
    _check_newcomers(task, state, newcomers, "newcomers")
    if not jnp.any(state.tree.born > 0):  # no split
        count = num_clients(newcomers)
        return Assignment(jnp.zeros(count, jnp.int32), jnp.full(count, jnp.nan))
    check(state.tree.updates.shape[2] > 0, "tree_dim", 0, "above 0 in the run, to assign newcomers")
    hid = [None, *OPERATORS][int(state.tree.privacy)]
    check(privacy == hid, "privacy", privacy, f"{hid!r}, as in the run: updates hidden otherwise cannot be compared")
    options = {"privacy": privacy, "privacy_seed": privacy_seed, "client_axis": mapping.or_auto(client_axis)}
    return _assign(state, newcomers, key, task=task, training=training, **options)


def _check_newcomers(task: Task, state: CFLState, newcomers: Clients, name: str) -> None:
    """Raises `ValueError` unless `newcomers` can join a run in `state`, without personal parameters, of this task."""
    check_state(state)
    names = ", ".join(sorted(named_leaves(state.personal)))
    require(not names, f"newcomers cannot join a run with personal parameters ({names}), of which they have none")
    check_model(task, state.params)
    check_clients(newcomers, name=name)
    check_examples(newcomers, task, name=name)


def lead(
    state: CFLState,
    newcomers: Clients,
    key: jax.Array,
    *,
    task: Task,
    training: local.LocalTraining,
    privacy: str | None,
    privacy_seed: int,
    client_axis: mapping.Mapping,
) -> Assignment:
    """Returns `assign_newcomer`, without its checks."""
    tree, m, size = state.tree, max_examples(newcomers), jnp.asarray(newcomers.size)

    def next_split(slot, seen):
        """Returns the first split of the cluster in `slot` after round `seen`, and whether there is one."""
        later = (state.parent == slot) & (tree.born > seen)
        return jnp.argmin(jnp.where(later, tree.born, LATER_THAN_ALL)), later.any()

    def train(key, examples, size, k):
        begin = jax.tree.map(lambda p: p[k], tree.model)
        done = (tree.born[k] - 1) * local.steps_per_round(training, size, m)
        opt_state = local.start_optimizer(training, trained_part(task, begin), done)
        trained = local.train(task, training, key, begin, examples, size, opt_state).params
        update = trained_part(task, jax.tree.map(jnp.subtract, trained, begin))
        return hide(update, privacy, privacy_seed)

    def side(update, k):
        """Returns whether the most similar client moved, and that similarity (Algorithm 4, lines 6 to 11)."""
        sent = tree.updates[k]
        lengths = jnp.linalg.norm(sent, axis=1) * jnp.linalg.norm(update)
        similarity = (sent @ update) / jnp.where(lengths > 0, lengths, 1.0)
        stayed, moved = (jnp.where(tree.side[k] == which, similarity, -jnp.inf).max() for which in (1, 2))
        return moved > stayed, jnp.maximum(stayed, moved)

    def descend(carry):
        slot, seen, similarity, level = carry
        k, inner = jax.vmap(next_split)(slot, seen)
        keys = client_keys(jax.random.fold_in(key, level), newcomers)
        updates = client_axis(train)(keys, newcomers.examples, size, k)
        finite = jax.vmap(is_finite)(updates)
        moves, nearest = mapping.chunked(1)(side)(sketch(updates, finite, tree.updates.shape[2]), k)
        nearest = jnp.where(finite, nearest, jnp.nan)
        slot = jnp.where(inner & moves, k, slot).astype(jnp.int32)
        return slot, jnp.where(inner, tree.born[k], seen), jnp.where(inner, nearest, similarity), level + 1

    def going(carry):
        return jax.vmap(next_split)(carry[0], carry[1])[1].any()

    nowhere = jnp.zeros(num_clients(newcomers), jnp.int32)
    start = nowhere, nowhere, jnp.full(len(nowhere), jnp.nan), 0
    slot, _, similarity, _ = jax.lax.while_loop(going, descend, start)
    return Assignment(slot, similarity)


_assign = partial(jitted, static_argnames=("task", "training", "privacy", "privacy_seed", "client_axis"))(lead)


def leave(state: CFLState, who: jax.Array) -> CFLState:
    """Returns the state after some clients have left: they train no more, and their updates leave the parameter tree.

    Their clusters keep models and slots, so that nothing changes for the others. `who` is `[N]` bool, the clients that
    leave; continue from the state by `jfcl.rollout(..., state=...)`. `ValueError` for `who` of another shape or type.

    Example:
      >>> import jax, jfcl, numpy as np
      >>> from jfcl.testing import problem
      >>> clients, _, task, training = problem()
      >>> algorithm = jfcl.cfl(task, training, max_clusters=2)
      >>> state = leave(algorithm.init(jax.random.key(0), clients), np.arange(7) == 1)
      >>> int(jax.jit(algorithm.step)(jax.random.key(1), state, clients)[1]["participants"])
      6
    """
    check_state(state)
    who = jnp.asarray(who)
    n = len(state.cluster)
    check(who.shape == (n,) and who.dtype == bool, "who", (who.shape, who.dtype), f"bool of shape ({n},)")
    tree = state.tree
    return state._replace(
        excluded=jnp.where(who & (state.excluded == 0), jnp.maximum(state.round, 1), state.excluded),
        tree=tree._replace(
            side=jnp.where(who[None, :], jnp.int8(0), tree.side),
            updates=jnp.where(who[None, :, None], 0.0, tree.updates),
        ),
    )


def enrol(
    state: CFLState,
    clients: Clients,
    *,
    task: Task,
    training: local.LocalTraining,
    key: jax.Array,
    privacy: str | None = None,
    privacy_seed: int = 0,
    client_axis: mapping.Mapping | None = None,
) -> CFLState:
    """Returns the state with newcomers behind its clients, to continue the run with all of them.

    `assign_newcomer` assigns the newcomers to their clusters. Where the run kept no updates (`tree_dim=0`) they start
    in the first cluster, and the run places them, one split in each round, as clients that missed all splits.

    Args:
      state: of `jfcl.cfl`, of `N` clients and one seed.
      clients: the newcomers, `n` clients with training examples.
      task, training, key, privacy, privacy_seed, client_axis: as in `assign_newcomer`.

    Returns:
      `CFLState` of `N + n` clients, for `jfcl.simulate(..., state=...)` with the clients of the run followed by the
      newcomers. They are in no split of the parameter tree. Cost: that of `assign_newcomer`.

    Raises:
      ValueError: as in `assign_newcomer`; clients of another shape than the task's model takes; a state from which a
        run cannot continue, such as one of `load_tree`.

    Example:
      >>> import jax, jfcl
      >>> from jfcl.testing import problem
      >>> clients, _, task, training = problem()
      >>> algorithm = jfcl.cfl(task, training, eps_1=0.05, eps_2=0.1, max_clusters=2)
      >>> state, _ = jfcl.rollout(algorithm, clients, key=jax.random.key(0), num_rounds=20)
      >>> late = jax.tree.map(lambda x: x[1:2], clients)
      >>> state = enrol(state, late, task=task, training=training, key=jax.random.key(1))
      >>> every = jfcl.concatenate_clients(clients, late)
      >>> history = jfcl.simulate(algorithm, every, key=jax.random.key(2), num_rounds=1, state=state)
      >>> history.state.cluster.tolist()
      [0, 1, 0, 0, 0, 1, 1, 1]
    """
    _check_newcomers(task, state, clients, "clients")
    sides, tree, count = state.sides, state.tree, num_clients(clients)
    accepted = "the state of a run that splits clusters, as history.state has it (that of load_tree is not complete)"
    check(isinstance(sides, Sides), "state", "a state without sides", accepted)
    cluster, placed = jnp.zeros(count, jnp.int32), jnp.zeros(count, jnp.int32)
    if tree.updates.shape[2] > 0:
        options = {"privacy": privacy, "privacy_seed": privacy_seed, "client_axis": client_axis}
        cluster = assign_newcomer(task, training, state, clients, key=key, **options).cluster
        placed = jnp.full(count, state.round)

    def behind(x, axis=0, fill=0):
        """Returns `x` with rows of `fill` behind."""
        shape = [*x.shape[:axis], count, *x.shape[axis + 1 :]]
        return jnp.concatenate([x, jnp.full(shape, fill, x.dtype)], axis=axis)

    opt_states = state.client
    if jax.tree.leaves(opt_states):
        fresh = initial_optimizers(task, training, state.params, cluster)
        opt_states = jax.tree.map(lambda old, new: jnp.concatenate([old, new]), opt_states, fresh)
    changing = () if isinstance(sides.changing, tuple) else behind(sides.changing, fill=True)
    return state._replace(
        cluster=jnp.concatenate([state.cluster, cluster]),
        excluded=behind(state.excluded),
        tree=tree._replace(side=behind(tree.side, 1), updates=behind(tree.updates, 1)),
        client=opt_states,
        sides=sides._replace(placed=jnp.concatenate([sides.placed, placed]), changing=changing),
        heard=jax.tree.map(behind, state.heard),
    )
