"""Hostile clients: attacks on their data, and on the updates they send.

An attack on data changes the malicious clients' examples once, before the simulation (`poison`). An attack on updates
is a function `(key, updates, malicious, usable) -> updates` that methods call in every round before all clients send:
`updates` is a pytree of `[N, ...]`, `malicious` and `usable` (updates that count) are `[N]` bool. The attackers know
all good updates and act together, which is the worst case of the literature. Attacks aimed at clustering have a fifth
argument, `cluster` `[N]` int32: the server averages the updates of one cluster.

Example:
  What the third of three clients sends instead of 9, while the good ones send 1 and 3:

  >>> updates, malicious = jnp.array([[1.0], [3.0], [9.0]]), jnp.array([False, False, True])
  >>> def sent(attack, *cluster):
  ...     return attack(jax.random.key(0), updates, malicious, jnp.ones(3, bool), *cluster)[2].item()
  >>> [sent(attack()) for attack in (sign_flip, scaled, zero, nan, ipm, mimic, opposite)], sent(alie(2.0))
  ([-9.0, 90.0, 0.0, nan, -1.0, 1.0, -1.0], 0.0)
  >>> sent(min_max()), sent(min_sum()), sent(optimal_alie(kernels.coordinate_median))
  (1.0, 1.0, 12.0)
  >>> [sent(attack(), jnp.zeros(3, int)) for attack in (force_split, hijack)]
  [-4.0, 20.0]
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jfcl import kernels, mapping
from jfcl.core import PyTree, by_platform, check
from jfcl.kernels.base import sum_dtype
from jfcl.kernels.blocks import distances_from
from jfcl.kernels.distances import squared_row_distances
from jfcl.robust.aggregate import of_round, per_row, where_rows
from jfcl.robust.data_attacks import DATA_ATTACKS, DataAttack, backdoor, label_reverse, label_zero, noisy_inputs, poison

UpdateAttack = Callable[..., PyTree]


def choose_malicious(count: int, fraction: float, *, seed: int = 0) -> np.ndarray:
    """Draws `round(fraction * count)` of `count` clients at random: `[count]` bool.

    Raises:
      ValueError: a fraction outside [0, 1).

    Example:
      >>> choose_malicious(10, 0.3).sum()
      np.int64(3)
    """
    check(0 <= fraction < 1, "malicious", fraction, "a fraction in [0, 1)")
    chosen = np.zeros(count, bool)
    chosen[np.random.default_rng(seed).permutation(count)[: round(fraction * count)]] = True
    return chosen


def _send(make: Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]) -> UpdateAttack:
    """Returns the attack in which malicious clients send `make(key, x [N, ...], malicious, good, ids)` of each leaf."""

    def attack(key, updates, malicious, usable, ids=None):
        good = usable & ~malicious
        ids = jnp.arange(len(good)) if ids is None else ids
        lies = [make(jax.random.fold_in(key, i), x, malicious, good, ids) for i, x in enumerate(_wide(updates))]
        return _sent(updates, malicious, lies)

    return attack


def _send_within(make: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]) -> UpdateAttack:
    """Returns the attack in which malicious clients send `make(good_sum, num_good, num_malicious)` of their cluster."""

    def attack(key, updates, malicious, usable, cluster):
        good = usable & ~malicious
        cluster = jnp.unique(cluster, return_inverse=True, size=len(cluster))[1]  # in 0..N-1, also of 4 models for 2

        def within(x):  # added up over the sender's cluster
            return jax.ops.segment_sum(x, cluster, len(cluster))[cluster]

        def lie(x):
            counts = (per_row(within(kind.astype(x.dtype)), x) for kind in (good, malicious))
            return make(within(where_rows(good, x, jnp.zeros_like(x))), *counts)

        return _sent(updates, malicious, [lie(x) for x in _wide(updates)])

    return attack


def _good_mean(x: jax.Array, good: jax.Array) -> jax.Array:
    """Returns the mean of the good rows, `[1, ...]`."""
    good_rows = where_rows(good, x, jnp.zeros_like(x))
    return good_rows.sum(axis=0, keepdims=True) / jnp.maximum(good.sum(), 1).astype(x.dtype)


def _spread(x: jax.Array, good: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the mean of the good rows and their standard deviation in every coordinate, `[1, ...]` each."""
    mean = _good_mean(x, good)
    return mean, jnp.sqrt(_good_mean(jnp.square(x - mean), good))


def _of_first(x: jax.Array, good: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns the row of the good client with the lowest id, in the shape of `x`."""
    first = jnp.argmin(jnp.where(good, ids, jnp.iinfo(jnp.int32).max))
    return x[first][None] + jnp.zeros_like(x)


def _wide(updates: PyTree) -> list[jax.Array]:
    """Returns the leaves of `updates` in the types of their sums."""
    return [x.astype(sum_dtype(x)) for x in jax.tree.leaves(updates)]


def _sent(updates: PyTree, malicious: jax.Array, lies: list[jax.Array]) -> PyTree:
    """Returns `updates` with `lies` for each leaf, `N` rows or one for all, in the place of those of the malicious."""
    leaves, structure = jax.tree.flatten(updates)
    lies = [lie.reshape(len(lie), *x.shape[1:]).astype(x.dtype) for lie, x in zip(lies, leaves, strict=True)]
    return where_rows(malicious, jax.tree.unflatten(structure, lies), updates)


def _drawn(draw, key, x, malicious, ids):
    """Returns `draw(key, shape, dtype)` of each malicious client, and zeros of the others, in the shape of `x`."""

    def of_client(i, hostile):
        nothing = lambda i: jnp.zeros(x.shape[1:], x.dtype)  # noqa: E731
        return jax.lax.cond(hostile, lambda i: draw(jax.random.fold_in(key, i), x.shape[1:], x.dtype), nothing, i)

    # On a CPU, drawing numbers takes longest here, and Federated-Clustering needs N updates of every client.
    one_by_one, at_once = mapping.chunked(1)(of_client), jax.vmap(of_client)
    return by_platform(ids, malicious, cpu=one_by_one, accelerator=at_once)


def gaussian(std: float = 1.0, mean: float = 0.0) -> UpdateAttack:
    """Returns the attack that sends normal numbers instead of an update (Byzantine CFL: standard deviation 1).

    Cost: on a CPU, numbers are drawn for the malicious only, one client after another; elsewhere for all at once.

    Example:
      >>> malicious = jnp.arange(1000) >= 500
      >>> sent = gaussian(2.0)(jax.random.key(0), jnp.zeros((1000, 1)), malicious, jnp.ones(1000, bool))
      >>> bool((sent[:500] == 0).all()), round(float(sent[500:].std()))
      (True, 2)
    """

    def lie(key, x, malicious, good, ids):
        return _drawn(lambda *of: mean + std * jax.random.normal(*of), key, x, malicious, ids)

    return _send(lie)


def far() -> UpdateAttack:
    """Returns the attack with coordinates normal about 10^6, standard deviation 200 (Federated-Clustering, figure 6).

    Example:
      >>> sent = far()(jax.random.key(0), jnp.zeros((2, 1)), jnp.array([False, True]), jnp.ones(2, bool))
      >>> float(sent[0, 0]), round(float(sent[1, 0]), -4)
      (0.0, 1000000.0)
    """
    return gaussian(200.0, 1e6)


def sign_flip(scale: float = 1.0) -> UpdateAttack:
    """Returns the attack that sends `-scale` times the client's own update."""
    return _send(lambda key, x, malicious, good, ids: -scale * x)


def scaled(scale: float = 10.0) -> UpdateAttack:
    """Returns the attack that sends `scale` times the client's own update."""
    return _send(lambda key, x, malicious, good, ids: scale * x)


def zero() -> UpdateAttack:
    """Returns the attack that sends zeros."""
    return _send(lambda key, x, malicious, good, ids: jnp.zeros_like(x))


def nan() -> UpdateAttack:
    """Returns the attack that sends NaN in every coordinate."""
    return _send(lambda key, x, malicious, good, ids: jnp.full_like(x, jnp.nan))


def ipm(strength: float = 0.5) -> UpdateAttack:
    """Returns inner-product manipulation: `-strength` times the good mean (Xie, Koyejo, Gupta 2020)."""
    return _send(lambda key, x, malicious, good, ids: -strength * _good_mean(x, good) + jnp.zeros_like(x))


def alie(deviations: float | None = None) -> UpdateAttack:
    """Returns "a little is enough": the good mean minus some standard deviations (Baruch, Baruch, Goldberg 2019).

    The default is the largest number with which a majority still supports the attackers: the quantile
    `(n − f − s) / (n − f)` of the normal distribution, with `s = ⌊n/2⌋ + 1 − f`, of the `n` clients that take part.
    """

    def lie(key, x, malicious, good, ids):
        mean, spread = _spread(x, good)
        z = deviations
        if z is None:
            count, num_good = good.sum() + malicious.sum(), good.sum()
            fooled = num_good - (count // 2 + 1 - malicious.sum())
            share = fooled.astype(jnp.float32) / jnp.maximum(num_good, 1).astype(jnp.float32)
            z = jnp.where(fooled > 0, jax.scipy.stats.norm.ppf(jnp.clip(share, 1e-6, 1 - 1e-6)), 0.0)
        return mean - jnp.asarray(z).astype(x.dtype) * spread + jnp.zeros_like(x)

    return _send(lie)


def _search(lie: Callable[[jax.Array, jax.Array, jax.Array], jax.Array], aggregator: Callable | None) -> UpdateAttack:
    """Returns the attack `lie(mean, spread, τ)` with the `τ` that moves the aggregate farthest from the good mean.

    ByzFL's search: of 20 numbers the first is 0, and each of the others is the best so far plus a step, at first 10.
    The step doubles while the results become better; from the first that does not, it is always multiplied by 0.8.
    """
    aggregator = kernels.mean if aggregator is None else aggregator

    def attack(key, updates, malicious, usable):
        spreads = [_spread(x, usable & ~malicious) for x in _wide(updates)]
        tried = of_round(aggregator, key)  # the server's draws are not known

        def sent(size):
            return _sent(updates, malicious, [lie(mean, spread, size) for mean, spread in spreads])

        def moved(size):
            result = jax.tree.leaves(tried(sent(size), mask=usable))
            squares = [jnp.square(a.astype(m.dtype) - m[0]).sum() for a, (m, _) in zip(result, spreads, strict=True)]
            return sum(square.astype(jnp.float32) for square in squares)

        def attempt(_, carry):
            best, farthest, step, growing = carry
            result = moved(best + step)
            better = result > farthest
            growing &= better
            best, farthest = jnp.where(better, best + step, best), jnp.where(better, result, farthest)
            return best, farthest, step * jnp.where(growing, 2.0, 0.8), growing

        start = jnp.zeros(()), moved(jnp.zeros(())), jnp.full((), 10.0), jnp.ones((), bool)
        return sent(jax.lax.fori_loop(1, 20, attempt, start)[0])

    return attack


def optimal_alie(aggregator: Callable | None = None) -> UpdateAttack:
    """Returns ALIE with the most harmful strength: the good mean plus `τ` standard deviations (Allouah et al. 2023).

    Args:
      aggregator: `(updates, mask=...)`, against which `τ` is searched for, as ByzFL does, with the attackers' updates
        among all; default: the mean. On the command line, that of the run.

    Cost: 20 calls of the aggregator in each round. The standard deviations have the divisor `n`; ByzFL's code `n − 1`.
    """
    return _search(lambda mean, spread, size: mean + size.astype(mean.dtype) * spread, aggregator)


def optimal_ipm(aggregator: Callable | None = None) -> UpdateAttack:
    """Returns IPM with the most harmful strength: `−τ` times the good mean; the rest is as in `optimal_alie`."""
    return _search(lambda mean, spread, size: -size.astype(mean.dtype) * mean, aggregator)


def _retreat(length: Callable[..., jax.Array]) -> UpdateAttack:
    """Returns the attack `mean − γ p`, with the standard deviations `p`, and `γ = length(rows, mean, p, good)`."""

    def attack(key, updates, malicious, usable):
        good = usable & ~malicious
        rows = [x.reshape(len(x), -1) for x in _wide(updates)]
        means, stds = zip(*[_spread(x, good) for x in rows], strict=True)
        size = length(rows, [m[0] for m in means], [p[0] for p in stds], good)
        return _sent(updates, malicious, [m - size.astype(m.dtype) * p for m, p in zip(means, stds, strict=True)])

    return attack


def _product(left: list[jax.Array], right: list[jax.Array]) -> jax.Array:
    """Returns `left · right`, where the vectors of `right` may be the rows of matrices."""
    parts = [jnp.matmul(y, x, precision=jax.lax.Precision.HIGHEST) for x, y in zip(left, right, strict=True)]
    return sum(part.astype(jnp.float32) for part in parts)


def min_max() -> UpdateAttack:
    """Returns Min-Max: as far out as no good update is from another (Shejwalkar, Houmansadr 2021).

    The lie is `mean − γ p`, with the standard deviations `p` and the largest `γ` for which its distance to every good
    update is at most the largest distance of two good ones: a quadratic equation for each, solved exactly (the authors
    and Blades bisect).

    Cost: `N² D` operations, for the distances of good updates.
    """

    def length(rows, mean, p, good):
        squares = squared_row_distances(rows, good)
        largest = jnp.where(good[:, None] & good[None, :], squares, 0.0).max()
        norm = jnp.sqrt(_product(p, p))
        norm = jnp.where(norm > 0, norm, 1.0)
        along = jnp.where(good, _product(p, mean) - _product(p, rows), 0.0) / norm  # p · (mean − z) / ‖p‖
        room = jnp.maximum(largest - jnp.square(distances_from(rows, mean, good)), 0.0)
        reach = (along + jnp.sqrt(jnp.square(along) + room)) / norm
        return jnp.where(good.any(), jnp.where(good, reach, jnp.inf).min(), 0.0)

    return _retreat(length)


def min_sum() -> UpdateAttack:
    """Returns Min-Sum: the sum of squared distances to good updates is at most the largest of a good one.

    It is `mean − γ p` of Shejwalkar and Houmansadr (2021), as `min_max`, with `γ ‖p‖` the largest distance of a good
    update from their mean, which solves the condition. The authors' code has the smallest sum in its place, and so the
    smallest distance.

    Cost: three passes.
    """

    def length(rows, mean, p, good):
        farthest = jnp.where(good, distances_from(rows, mean, good), 0.0).max()
        norm = jnp.sqrt(_product(p, p))
        return farthest / jnp.where(norm > 0, norm, 1.0)

    return _retreat(length)


def fang() -> UpdateAttack:
    """Returns the attack on medians and trimmed means: just beyond all good numbers (Fang, Cao, Jia, Gong 2020).

    In every coordinate it sends a uniform number between the extreme of the good ones that is against the sign of their
    mean, and twice it, or half of it where that is farther out; 0 where the mean is 0. Every attacker draws its own.
    """

    def lie(key, x, malicious, good, ids):
        mean = _good_mean(x, good)
        none = jnp.full((), jnp.inf, x.dtype)
        lowest = where_rows(good, x, none + jnp.zeros_like(x)).min(axis=0, keepdims=True)
        highest = where_rows(good, x, jnp.zeros_like(x) - none).max(axis=0, keepdims=True)
        extreme = jnp.where(mean > 0, lowest, highest)
        beyond = jnp.where((extreme < 0) == (mean > 0), 2 * extreme, extreme / 2)
        share = _drawn(jax.random.uniform, key, x, malicious, ids)
        drawn = extreme + share * (beyond - extreme)
        return jnp.where(mean == 0, mean, drawn)

    return _send(lie)


def mimic() -> UpdateAttack:
    """Returns the attack that repeats the good client with the lowest id (Karimireddy, He, Jaggi 2022)."""
    return _send(lambda key, x, malicious, good, ids: _of_first(x, good, ids))


def opposite() -> UpdateAttack:
    """Returns the attack that sends minus the update of the good client with the lowest id.

    It is that of figure 6 of Federated-Clustering.
    """
    return _send(lambda key, x, malicious, good, ids: -_of_first(x, good, ids))


def force_split() -> UpdateAttack:
    """Returns an attack on CFL: the malicious clients of a cluster cancel its mean update, so that it is split.

    The mean is exactly zero where all clients have equal weights, nearly zero where they are weighted by size.
    """
    return _send_within(lambda good_sum, num_good, num_malicious: -good_sum / jnp.maximum(num_malicious, 1))


def hijack(scale: float = 10.0) -> UpdateAttack:
    """Returns an attack on clustering by cosine: the good mean of the client's cluster, `scale` times as long.

    Its direction is that of good updates, and the cluster's model moves too far.
    """
    return _send_within(lambda good_sum, num_good, num_malicious: scale * good_sum / jnp.maximum(num_good, 1))


_SIMPLE = (gaussian, far, sign_flip, scaled, zero, nan, mimic, opposite)
_HIDDEN = (ipm, optimal_ipm, alie, optimal_alie, min_max, min_sum, fang)
UPDATE_ATTACKS: dict[str, Callable[..., UpdateAttack]] = {
    make.__name__: make for make in (*_SIMPLE, *_HIDDEN, force_split, hijack)
}
