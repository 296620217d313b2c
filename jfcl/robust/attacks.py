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
  >>> [sent(attack(), jnp.zeros(3, int)) for attack in (force_split, hijack)]
  [-4.0, 20.0]
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jfcl import mapping
from jfcl.core import Clients, PyTree, check, check_choice, client_ids, num_clients
from jfcl.kernels.base import sum_dtype
from jfcl.robust.aggregate import where_rows

UpdateAttack = Callable[..., PyTree]
# (rng, inputs [n, ...], labels [n], number of classes) -> (inputs, labels), of one client's real examples
DataAttack = Callable[[np.random.Generator, np.ndarray, np.ndarray, int], tuple[np.ndarray, np.ndarray]]


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


# On updates.


def _send(make: Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]) -> UpdateAttack:
    """Returns the attack in which malicious clients send `make(key, x [N, ...], malicious, good, ids)` of each leaf."""

    def attack(key, updates, malicious, usable, ids=None):
        good = usable & ~malicious
        ids = jnp.arange(len(good)) if ids is None else ids
        leaves, structure = jax.tree.flatten(updates)
        lies = [
            make(jax.random.fold_in(key, i), x.astype(sum_dtype(x)), malicious, good, ids).astype(x.dtype)
            for i, x in enumerate(leaves)
        ]
        return where_rows(malicious, jax.tree.unflatten(structure, lies), updates)

    return attack


def _send_within(make: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]) -> UpdateAttack:
    """Returns the attack in which malicious clients send `make(good_sum, num_good, num_malicious)` of their cluster."""

    def attack(key, updates, malicious, usable, cluster):
        good = usable & ~malicious
        cluster = jnp.unique(cluster, return_inverse=True, size=len(cluster))[1]  # in 0..N-1, also of 4 models for 2

        def within(x):  # added up over the sender's cluster
            return jax.ops.segment_sum(x, cluster, len(cluster))[cluster]

        def lie(x):
            wide = x.astype(sum_dtype(x))
            num_good, num_malicious = (
                within(kind.astype(wide.dtype)).reshape(-1, *[1] * (x.ndim - 1)) for kind in (good, malicious)
            )
            return make(within(where_rows(good, wide, jnp.zeros_like(wide))), num_good, num_malicious).astype(x.dtype)

        return where_rows(malicious, jax.tree.map(lie, updates), updates)

    return attack


def _good_mean(x: jax.Array, good: jax.Array) -> jax.Array:
    """Returns the mean of the good rows, `[1, ...]`."""
    kept = where_rows(good, x, jnp.zeros_like(x))
    return kept.sum(axis=0, keepdims=True) / jnp.maximum(good.sum(), 1).astype(x.dtype)


def _of_first(x: jax.Array, good: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns the row of the good client with the lowest id, in the shape of `x`."""
    first = jnp.argmin(jnp.where(good, ids, jnp.iinfo(jnp.int32).max))
    return x[first][None] + jnp.zeros_like(x)


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
        def draw(i):
            return mean + std * jax.random.normal(jax.random.fold_in(key, i), x.shape[1:], x.dtype)

        # On a CPU, drawing normal numbers takes longest here, and Federated-Clustering needs N updates of every client.
        def of_client(i, hostile):
            return jax.lax.cond(hostile, draw, lambda i: jnp.zeros(x.shape[1:], x.dtype), i)

        return mapping.auto()(of_client)(ids, malicious)

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
    """Returns the attack that sends the own update times `-scale`."""
    return _send(lambda key, x, malicious, good, ids: -scale * x)


def scaled(scale: float = 10.0) -> UpdateAttack:
    """Returns the attack that sends the own update times `scale`."""
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
    """Returns "a little is enough": the good mean less some standard deviations (Baruch, Baruch, Goldberg 2019).

    The default is the largest number with which a majority still supports the attackers: the quantile
    `(n − f − s) / (n − f)` of the normal distribution, with `s = ⌊n/2⌋ + 1 − f`, of the `n` clients that take part.
    """

    def lie(key, x, malicious, good, ids):
        mean = _good_mean(x, good)
        spread = jnp.sqrt(_good_mean(jnp.square(x - mean), good))
        z = deviations
        if z is None:
            count, num_good = good.sum() + malicious.sum(), good.sum()
            fooled = num_good - (count // 2 + 1 - malicious.sum())
            share = fooled.astype(jnp.float32) / jnp.maximum(num_good, 1).astype(jnp.float32)
            z = jnp.where(fooled > 0, jax.scipy.stats.norm.ppf(jnp.clip(share, 1e-6, 1 - 1e-6)), 0.0)
        return mean - jnp.asarray(z).astype(x.dtype) * spread + jnp.zeros_like(x)

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
    """Returns an attack on clustering by cosine: the good mean of the own cluster, `scale` times as long.

    Its direction is that of good updates, and the cluster's model moves too far.
    """
    return _send_within(lambda good_sum, num_good, num_malicious: scale * good_sum / jnp.maximum(num_good, 1))


UPDATE_ATTACKS: dict[str, Callable[..., UpdateAttack]] = {
    make.__name__: make
    for make in (gaussian, far, sign_flip, scaled, zero, nan, ipm, alie, mimic, opposite, force_split, hijack)
}


# On data.


def label_zero(rng, x, y, num_classes):
    """Sets every label to 0 (Byzantine CFL's label flip).

    Example:
      >>> x, y = label_zero(np.random.default_rng(0), np.zeros((2, 4, 4, 1)), np.array([3, 4]), 10)
      >>> y.tolist()
      [0, 0]
    """
    return x, np.zeros_like(y)


def label_reverse(rng, x, y, num_classes):
    """Replaces label y by (number of classes − 1) − y.

    Example:
      >>> x, y = label_reverse(np.random.default_rng(0), np.zeros((2, 4, 4, 1)), np.array([3, 4]), 10)
      >>> y.tolist()
      [6, 5]
    """
    return x, (num_classes - 1 - y).astype(y.dtype)


def noisy_inputs(rng, x, y, num_classes):
    """Replaces every input by uniform noise in (−10, 10) (Byzantine CFL).

    Example:
      >>> x, y = noisy_inputs(np.random.default_rng(0), np.zeros((2, 4, 4, 1)), np.array([3, 4]), 10)
      >>> y.tolist(), bool(np.abs(x).max() > 9)
      ([3, 4], True)
    """
    check(np.issubdtype(x.dtype, np.floating), "noisy_inputs", str(x.dtype), "for inputs of floating-point numbers")
    return rng.uniform(-10, 10, x.shape).astype(x.dtype), y


def backdoor(rng, x, y, num_classes):
    """Puts a bright 3 x 3 patch in the corner of half of the images, with label 0 for those (Gu et al. 2017).

    Example:
      >>> x, y = backdoor(np.random.default_rng(0), np.zeros((2, 4, 4, 1)), np.array([3, 4]), 10)
      >>> int((y == 0).sum()), int(x.sum())
      (1, 9)
    """
    check(x.ndim == 4, "backdoor", x.shape, "for images [n, H, W, C]")
    x, y = x.copy(), y.copy()
    # Not by the numbers of `rng` itself, with which `jfcl.data.hold_out` permutes the same examples.
    marked = rng.spawn(1)[0].permutation(len(x))[: len(x) // 2]
    x[marked, -3:, -3:, :] = x.max(initial=1.0)
    y[marked] = 0
    return x, y


DATA_ATTACKS: dict[str, DataAttack] = {
    attack.__name__: attack for attack in (label_zero, label_reverse, noisy_inputs, backdoor)
}


def poison(
    clients: Clients, malicious: np.ndarray, attack: str | DataAttack, *, num_classes: int, seed: int = 0
) -> Clients:
    """Returns `clients` after an attack on the real examples of the malicious ones.

    Args:
      clients: with examples `{"x": inputs, "y": labels}`, on the host.
      malicious: `[N]` bool.
      attack: a name in `DATA_ATTACKS`, or a function `(rng, x [n, ...], y [n], num_classes) -> (x, y)` of the real
        examples of one client.
      num_classes: of the labels.
      seed: for attacks that draw.

    Returns:
      New `Clients`; the arrays of `clients` are not changed.

    Raises:
      ValueError: an unknown attack, `malicious` of another length, a function that returns other shapes.

    Example:
      >>> import numpy as np
      >>> clients = Clients({"x": np.zeros((2, 3, 1)), "y": np.array([[1, 2, 3], [4, 5, 6]])}, np.array([3, 2]))
      >>> poison(clients, np.array([False, True]), "label_reverse", num_classes=10).examples["y"].tolist()
      [[1, 2, 3], [5, 4, 6]]
    """
    if not callable(attack):
        check_choice("attack", attack, DATA_ATTACKS)
        attack = DATA_ATTACKS[attack]
    malicious = np.asarray(malicious)
    n = num_clients(clients)
    check(malicious.shape == (n,), "malicious", malicious.shape, f"of shape ({n},)")
    x, y = (np.array(clients.examples[part]) for part in ("x", "y"))
    ids = np.asarray(client_ids(clients))
    for i in np.flatnonzero(malicious):
        m, rng = int(clients.size[i]), np.random.default_rng([seed, int(ids[i])])
        x[i, :m], y[i, :m] = _poisoned(attack, rng, x[i, :m], y[i, :m], num_classes)
    return clients._replace(examples={**clients.examples, "x": x, "y": y})


def _poisoned(attack: DataAttack, rng: np.random.Generator, x: np.ndarray, y: np.ndarray, num_classes: int):
    """Returns `attack(...)`; raises `ValueError` for results of other shapes or kinds, or labels of no class."""

    def form(array):
        return f"{array.dtype} {list(array.shape)}"

    found = attack(rng, x, y, num_classes)
    returned = f"one that returned {type(found).__name__}"
    accepted = f"a function that returns (x, y), {form(x)} and {form(y)}"
    check(isinstance(found, tuple) and len(found) == 2, "attack", returned, accepted)
    new_x, new_y = map(np.asarray, found)
    alike = all(np.can_cast(new.dtype, old.dtype, "same_kind") for new, old in ((new_x, x), (new_y, y)))
    fits = alike and (new_x.shape, new_y.shape) == (x.shape, y.shape)
    check(fits, "attack", f"one that returned {form(new_x)} and {form(new_y)}", accepted)
    known = ((new_y >= 0) & (new_y < num_classes)).all()
    check(known, "attack", f"one that returned labels {np.unique(new_y)}", f"one with labels in 0..{num_classes - 1}")
    return new_x, new_y
