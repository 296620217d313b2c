"""Server-side aggregation: weighted and robust means of each cluster, attacks on updates, pytrees as matrices."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfcl import mapping
from jfcl.core.checks import check
from jfcl.core.clients import attack_key, client_ids, num_clients
from jfcl.core.parameters import copied, divided, is_finite, joined, path_name
from jfcl.core.types import Adversary, Clients, PyTree
from jfcl.kernels.blocks import product_over_rows


def per_row(scale: jax.Array, x: jax.Array) -> jax.Array:
    """Returns `scale` `[n]` in the shape and type to multiply `x` `[n, ...]`."""
    return scale.reshape(scale.shape + (1,) * (x.ndim - 1)).astype(x.dtype)


def where_rows(keep: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Returns row `i` of `new` where `keep[i]`, else of `old`; pytrees of `[n, ...]`, `keep` `[n]` bool."""
    return jax.tree.map(lambda a, b: jnp.where(per_row(keep, a).astype(bool), a, b), new, old)


def nothing_sent(like: PyTree) -> tuple[PyTree, jax.Array]:
    """Returns the initial sums of `add_sent`: zeros in the shapes of `like` `[K, ...]`, and the weight `[K]`.

    They are float32 at least: a sum of bfloat16 numbers stops growing after a few hundred of them.
    """
    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype if p.dtype.itemsize >= 4 else jnp.float32), like)
    return zeros, jnp.zeros(len(jax.tree.leaves(like)[0]))


def add_to_clusters(sums: PyTree, tree: PyTree, cluster: jax.Array, weights: jax.Array) -> PyTree:
    """Adds `weights[i] * tree[i]` to `sums[cluster[i]]` (to none for -1) for every row `i` with a weight above 0."""

    def add(total, x):
        counted, scale = jnp.where(per_row(weights, x) > 0, x, jnp.zeros_like(x)), weights.astype(total.dtype)
        counted = counted.astype(total.dtype)
        if len(x) == 1:
            return total.at[cluster[0]].add(counted[0] * scale[0], mode="drop", wrap_negative_indices=False)
        one_hot = jax.nn.one_hot(cluster, len(total), dtype=total.dtype, axis=0) * scale[None, :]
        return total + product_over_rows(product, one_hot, counted)

    product = partial(jnp.tensordot, axes=1, precision=jax.lax.Precision.HIGHEST)
    return jax.tree.map(add, sums, tree)


def add_sent(total: tuple[PyTree, jax.Array], sent: tuple[PyTree, jax.Array, jax.Array]) -> tuple[PyTree, jax.Array]:
    """Adds the messages `(tree, cluster, weights)` of clients to `(sums [K, ...], weight [K])`, as a fold."""
    tree, cluster, weights = sent
    ones = (weights > 0).astype(jnp.float32)
    return add_to_clusters(total[0], tree, cluster, weights), add_to_clusters(total[1], weights, cluster, ones)


def divide_rows(sums: PyTree, weights: jax.Array, like: PyTree) -> PyTree:
    """Returns `sums[k] / weights[k]` in the types of `like`, zeros where `weights[k]` is 0; pytrees of `[K, ...]`."""
    safe = jnp.where(weights > 0, weights, jnp.ones_like(weights))
    return jax.tree.map(lambda x, p: (x / per_row(safe, x)).astype(p.dtype), sums, like)


def add_updates(
    client_axis: mapping.Mapping, updates: PyTree, cluster: jax.Array, weight: jax.Array, like: PyTree
) -> tuple[PyTree, jax.Array]:
    """Returns `(sums [K, ...], weight [K])` of the updates `[C, ...]` of each cluster; `like` has the models' shape."""
    add_up = mapping.map_reduce(client_axis, lambda *sent: (sent, ()), add_sent, nothing_sent(like))
    return add_up(updates, cluster, weight)[0]


def cluster_mean(
    tree: PyTree, cluster: jax.Array, weights: jax.Array, num_clusters: int, client_axis: mapping.Mapping = jax.vmap
) -> PyTree:
    """Returns the weighted mean of the rows of each cluster; zeros for a cluster without weight.

    Args:
      tree: pytree of `[N, ...]` floats.
      cluster: `[N]` int32 in `0..K-1`.
      weights: `[N]`, at least 0; rows of weight 0 are never part of a mean, NaN or not.
      num_clusters: `K`.
      client_axis: the clients' mapping. One that takes a client at a time adds them up in their order, so that clients
        of weight 0 behind the others do not change a bit.

    Returns:
      Pytree of `[K, ...]`.

    Example:
      >>> import jax.numpy as jnp
      >>> cluster_mean(jnp.array([1.0, 3.0, 5.0]), jnp.array([0, 0, 2]), jnp.ones(3), 3).tolist()
      [2.0, 0.0, 5.0]
    """
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct((num_clusters, *x.shape[1:]), x.dtype), tree)
    return divide_rows(*add_updates(client_axis, tree, cluster, weights.astype(jnp.float32), like), like)


def filled_means(
    rules: Any, tree: PyTree, cluster: jax.Array, weights: jax.Array, client_axis: mapping.Mapping, default: PyTree
) -> PyTree:
    """Returns `cluster_mean`, with the mean over all rows for clusters without weight and for shared parameters.

    `default` `[1, ...]` is that mean where no row has weight; `rules` have the clusters' number and what is `shared`.
    """
    means = cluster_mean(tree, cluster, weights, rules.num_clusters, client_axis)
    of_all = cluster_mean(tree, jnp.zeros_like(cluster), weights, 1, client_axis)
    of_all = jax.tree.map(lambda a, d: jnp.where((weights > 0).any(), a, d), of_all, default)
    of_all = jax.tree.map(lambda a, m: jnp.broadcast_to(a, m.shape), of_all, means)
    means = where_rows(jax.ops.segment_sum(weights, cluster, rules.num_clusters) > 0, means, of_all)
    return joined(divided(rules.shared, means)[0], divided(rules.shared, of_all)[1])


def check_aggregator(aggregator: Callable[..., PyTree] | None) -> None:
    """Raises `ValueError` unless `aggregator` is None, or can be called as `aggregator(updates, mask=...)`."""
    accepted = "a function (updates, mask=...) -> update, such as jfcl.kernels.make_aggregator returns for a name"
    check(aggregator is None or callable(aggregator), "aggregator", aggregator, accepted)
    if aggregator is not None:
        try:
            inspect.signature(aggregator).bind(None, mask=None, **taken_arguments(aggregator, key=None))
        except TypeError as error:
            raise ValueError(f"aggregator must be {accepted}; {error}") from None


def of_round(aggregator: Callable[..., PyTree], key: jax.Array) -> Callable[..., PyTree]:
    """Returns `aggregator` with the key of its random draws in a round, if it takes one and none is bound to it."""
    bound = getattr(aggregator, "keywords", {})
    return aggregator if "key" in bound else partial(aggregator, **taken_arguments(aggregator, key=key))


def clients_check(adversary: Adversary | None, weights: str | jax.Array = "size") -> Callable[[Clients], None] | None:
    """Returns the `Algorithm.check` that `malicious`, and weights that are given, have an entry for each client."""
    vectors = {} if isinstance(weights, str) else {"weights": weights}
    if adversary is not None:
        kind = "jfcl.Adversary(attack, malicious), with an attack such as jfcl.attacks.ipm() returns"
        is_one = isinstance(adversary, Adversary) and callable(adversary.attack) and _is_attack(adversary.attack)
        check(is_one, "adversary", adversary, kind)
        vectors["malicious"] = adversary.malicious

    def check_vectors(clients: Clients) -> None:
        for name, entries in vectors.items():
            check_entries(name, entries, clients)

    return check_vectors if vectors else None


def _is_attack(function: Callable) -> bool:
    """Returns whether a function takes the arguments of an attack; `ipm` does not, of which `ipm()` is one."""
    try:
        inspect.signature(function).bind(*range(4), **taken_arguments(function, cluster=0, ids=0))
    except TypeError:
        return False
    return True


def taken_arguments(function: Callable, **offered: Any) -> dict[str, Any]:
    """Returns those of the offered arguments that a function takes."""
    return {name: value for name, value in offered.items() if name in inspect.signature(function).parameters}


def check_entries(argument: str, entries: Any, clients: Clients) -> None:
    """Raises `ValueError` unless `entries` are a vector with one for each client, by its id."""
    shape, n = np.shape(entries), num_clients(clients)
    if clients.id is None and jax.process_count() == 1:
        check(shape == (n,), argument, shape, f"of shape ({n},)")
    else:  # part of all clients
        largest = np.asarray(client_ids(clients))[np.asarray(clients.size) > 0].max(initial=-1)
        fits = len(shape) == 1 and shape[0] > largest
        check(fits, argument, shape, f"one for each client, also for {largest}")


def attacked(
    adversary: Adversary | None,
    key: jax.Array,
    updates: PyTree,
    ids: jax.Array,
    usable: jax.Array,
    cluster: jax.Array | None = None,
):
    """Returns the updates `[N, ...]` after the adversary's attack, and which of them count, `[N]` bool.

    Args:
      adversary: None changes nothing.
      key: the attackers' key of the round.
      updates: pytree of `[N, ...]`.
      ids: `[N]` int32, the clients of the updates; ids of padding clients may lie beyond `adversary.malicious`.
      usable: `[N]` bool, updates that count without the adversary. After it they count where they are still finite.
      cluster: `[N]` int32, within which updates are averaged, for attacks with this argument; default: all together.
    """
    if adversary is None:
        return updates, usable
    usable = usable & jax.vmap(is_finite)(updates)
    by_id = jnp.asarray(adversary.malicious)
    check(by_id.ndim == 1 and by_id.dtype == bool, "malicious", by_id.dtype, "bool, of shape [N]")
    malicious = by_id[jnp.minimum(ids, len(by_id) - 1)] & (ids < len(by_id)) & usable
    cluster = jnp.zeros(len(ids), jnp.int32) if cluster is None else cluster
    taken = taken_arguments(adversary.attack, cluster=cluster, ids=ids)  # `cluster` if it is aimed at clustering
    sent = adversary.attack(key, copied(updates), malicious, usable, **taken)
    check_returned("attack", sent, updates, "updates")
    updates = where_rows(malicious, sent, updates)  # hostile clients change no others' updates
    return updates, usable & jax.vmap(is_finite)(updates)


def check_returned(argument: str, returned: PyTree, wanted: PyTree, what: str) -> None:
    """Raises `ValueError` unless a function, which `argument` names, has returned arrays of the shapes of `wanted`."""
    shapes = [
        {path_name(path): list(jnp.shape(x)) for path, x in jax.tree.leaves_with_path(tree)}
        for tree in (returned, wanted)
    ]
    fits = shapes[0] == shapes[1]
    check(fits, argument, f"a function that returned {shapes[0]}", f"a function that returns {what} {shapes[1]}")


def attacked_models(
    adversary: Adversary | None,
    clients_key: jax.Array,
    begin: PyTree,
    models: PyTree,
    clients: Clients,
    usable: jax.Array,
    cluster: jax.Array | None = None,
) -> tuple[PyTree, jax.Array]:
    """Returns `attacked` for clients that send `models` `[N, ...]`: the attack is on their differences to `begin`."""
    if adversary is None:
        return models, usable
    updates = jax.tree.map(jnp.subtract, models, begin)
    updates, usable = attacked(adversary, attack_key(clients_key), updates, client_ids(clients), usable, cluster)
    return jax.tree.map(jnp.add, begin, updates), usable


def robust_cluster_mean(
    aggregator: Callable[..., PyTree], updates: PyTree, cluster: jax.Array, usable: jax.Array, num_clusters: int
) -> PyTree:
    """Returns `aggregator(updates, mask=members)` of each cluster, in turn: `[K, ...]`, 0 for one without members."""

    def one(k):
        members = usable & (cluster == k)
        mean = aggregator(copied(updates), mask=members)
        check_returned("aggregator", mean, jax.tree.map(lambda x: x[0], updates), "one update,")
        return jax.tree.map(lambda x: jnp.where(members.any(), x, jnp.zeros_like(x)), mean)

    return mapping.chunked(1)(one)(jnp.arange(num_clusters, dtype=jnp.int32))


def ravel_clients(tree: PyTree) -> jax.Array:
    """Returns a stacked pytree `[N, ...]` as one matrix `[N, D]`."""
    return jnp.concatenate([leaf.reshape(len(leaf), -1) for leaf in jax.tree.leaves(tree)], axis=1)
