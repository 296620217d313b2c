"""Client-level differential privacy: clipped updates, Gaussian noise on the sums of the clusters, and its accounting.

DP-FedAvg (McMahan, Ramage, Talwar, Zhang 2018) for `K` models. In a round each participant computes its update with the
released models and its own data, and clips it to the L2 norm `C`. The server releases, for every cluster,

    S_k = sum_{i in k} min(1, C / norm(Δ_i)) Δ_i + N(0, (σ C)^2 I)

and computes everything else from these sums. A client contributes to only one of the sums (in a mixture there is one,
as its models are one update), so that all `K` sums together change by a vector of norm `C` at most when one client
joins or leaves: they are one Gaussian mechanism with the noise multiplier `σ`. This includes the cluster, where a
client chooses it by its own loss.

With one model the sum is divided by the expected number of participants, which is public (the fixed-denominator
estimator of McMahan et al.). With several models the sizes of the clusters depend on the data, so that they are
released with noise too, and each sum is divided by its noised size. Adaptive clipping releases a noised count as well.
Both are paid for by more noise on the sums (Andrew, Thakkar, McMahan, Ramaswamy 2021, Theorem 1), such that all
releases of a round together have the noise multiplier `noise`.

Not covered: metrics and evaluations of a simulation (losses, accuracies, the sizes and members of clusters), which are
computed without noise, and the choice of options by comparing runs. Noise is drawn in float32 by `jax.random`, which is
right for simulations; a deployment needs samplers that withstand attacks on floating-point numbers (Mironov 2012).
"""

import importlib
import logging
import math
import zlib
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp

from jfcl.core.checks import check, check_count
from jfcl.core.clients import Cohort, client_keys, random_order, take_clients
from jfcl.core.names import renamed
from jfcl.core.options import Interval, OneOf, Range, Real, check_options
from jfcl.core.parameters import divided, parameter_names
from jfcl.core.types import Clients, PyTree

__all__ = ["SAMPLING", "GaussianDP", "default_delta", "epsilon", "noise_of_sums"]

SAMPLING = ("poisson", "fixed")
STREAM = zlib.crc32(b"differential privacy")  # folded into the server's key
COUNT_NOISE = 4.0  # standard deviation of a cluster's released size, in multiples of `noise`; its sensitivity is 1
CLIP_NOISE = 5.0  # the same for the released number of clients inside the clipping norm; its sensitivity is 1/2
CLIP_RANGE = (1e-20, 1e20)  # of an adaptive clipping norm
OVERFLOW = 1e-12  # the probability that a Poisson cohort has more clients than there are rows for
INSTALL = "pip install 'jfcl[privacy]'"


class GaussianDP(NamedTuple):
    """The Gaussian mechanism of a method's rounds: `jfcl.fedavg(..., weights="equal", dp=GaussianDP(clip, noise))`.

    Clients have equal weights: weights by size would scale a client's influence, and the noise, by the largest size.

    Attributes:
      clip: `C`, the largest L2 norm of a client's update over all parameters that it sends; with `quantile`, of the
        first round.
      noise: `σ`, the noise multiplier of a round: the standard deviation of the noise is `σ C` on every coordinate of a
        cluster's sum, and slightly more where counts are released too. 0: updates are clipped, and nothing is private.
      quantile: adaptive clipping (Andrew et al. 2021): `C` follows this quantile of the norms of the updates, in
        `[0, 1]`, by `C exp(-clip_rate (b - quantile))` after a round in which the noised share `b` of updates is inside
        `C`. Default: `C` is fixed.
      clip_rate: the learning rate of `C`; the paper's is 0.2.
      min_size: the smallest released size of a cluster: with fewer clients in a round, noise included, its model stays
        as it is. Several times `4 noise` keeps noise away from models that no client uses.
      sampling: how a `cohort` is drawn. `"poisson"`: every client with examples independently, with the probability
        `cohort / N`. `"fixed"`: exactly `cohort` clients, without replacement.

    Example:
      >>> import jax, jfcl, numpy as np, optax
      >>> task = jfcl.models.task(lambda key: {"b": jax.numpy.zeros(())}, lambda p, x: x + p["b"], kind="regression")
      >>> y = np.float32([[1], [1], [1], [900]])
      >>> clients = jfcl.Clients({"x": np.zeros((4, 1), np.float32), "y": y}, np.full(4, 1, np.int32))
      >>> training = jfcl.local_training(optax.sgd(0.5), num_steps=1)
      >>> algorithm = jfcl.fedavg(task, training, weights="equal", dp=jfcl.privacy.GaussianDP(clip=2.0, noise=0.0))
      >>> state, _ = algorithm.step(jax.random.key(1), algorithm.init(jax.random.key(0), clients), clients)
      >>> state.params["b"].tolist()  # (1 + 1 + 1 + 2) / 4
      [1.25]
    """

    clip: Annotated[Real, Interval("(0, inf)")]
    noise: Annotated[Real, Interval("[0, inf)")]
    quantile: Annotated[Real | None, Interval("[0, 1]")] = None
    clip_rate: Annotated[Real, Interval("(0, inf)")] = 0.2
    min_size: Annotated[int, Range(1)] = 1
    sampling: Annotated[str, OneOf(SAMPLING)] = "poisson"


# Checks.


def check_mechanism(dp: Any) -> None:
    """Raises `ValueError` for other than a `GaussianDP` with values in their ranges; tracers pass."""
    check(isinstance(dp, GaussianDP), "dp", dp, "a jfcl.privacy.GaussianDP")
    with renamed({name: f"dp.{name}" for name in dp._fields}):
        check_options(GaussianDP, dp._asdict())


def check_private(rules: Any) -> None:
    """Raises `ValueError` where the guarantee of `rules.dp` does not hold with the other options of a method."""
    if rules.dp is None:
        return
    check_mechanism(rules.dp)
    task, equal = rules.task, isinstance(rules.weights, str) and rules.weights == "equal"
    check(equal, "weights", rules.weights, '"equal" with dp: a size would scale the influence of its client')
    for name in ("adversary", "aggregator"):
        check(getattr(rules, name) is None, name, getattr(rules, name), "left out with dp: no guarantee would hold")
    if task.statistics is not None:
        sent = parameter_names(divided(rules.personal, jax.eval_shape(task.init, jax.random.key(0)))[0])
        sent = [name for name in sent if task.statistics(name)]
        accepted = "personal with dp (as in jfcl.fedbn), or absent: noise makes variances negative; use group norm"
        check(not sent, "batch statistics", ", ".join(sent), accepted)


# The clipping norm.


def clip_of(dp: GaussianDP, clip: jax.Array | tuple[()]) -> Real:
    """Returns the clipping norm of a round: that of the state, or the fixed one where the state has `()`."""
    return dp.clip if dp.quantile is None else clip


# The cohort.


def most_drawn(cohort: int) -> int:
    """Returns the rows for a Poisson cohort of `cohort` expected clients; more come with a chance of 10⁻¹²."""
    log = -math.log(OVERFLOW)  # Bernstein's inequality
    return math.ceil(cohort + log / 3 + math.sqrt((log / 3) ** 2 + 2 * log * cohort))


def poisson_cohort(key: jax.Array, clients: Clients, count: int) -> Cohort:
    """Returns a cohort with every client drawn by itself, with the probability `count` over the clients with examples.

    The cohort has `most_drawn(count)` rows, those of clients that are not drawn with size 0.
    """
    cohort_key, clients_key = jax.random.split(key)
    rows = random_order(cohort_key, clients)[: most_drawn(count)]
    chosen = take_clients(clients, rows)
    # By ids, and in the order of `random_order`, whose float32 draws have 23 of these bits: too few for rare clients.
    draws = jax.vmap(jax.random.bits)(client_keys(cohort_key, chosen))
    share, bits = count / expected_participants(clients, None), jnp.iinfo(draws.dtype).bits
    limit = share * (2.0**bits * (1 - 2**-22))  # by rounding, too, no client is drawn more often than is accounted for
    drawn = (draws < limit.astype(draws.dtype)) | (share >= 1)
    return Cohort(chosen._replace(size=jnp.where(drawn, chosen.size, jnp.zeros_like(chosen.size))), rows, clients_key)


def expected_participants(clients: Clients, cohort: int | None) -> jax.Array:
    """Returns `[]` float32: the expected number of participants of a round, at most the clients with examples."""
    real = (jnp.asarray(clients.size) > 0).sum().astype(jnp.float32)
    return real if cohort is None else jnp.minimum(real, float(cohort))


# What a client sends, and what the server releases.


def clipped(update: PyTree, clip: Real) -> tuple[PyTree, jax.Array]:
    """Returns one client's update with a norm of at most `clip`, in float32, and whether it had one before."""
    update = jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), update)
    largest = jnp.stack([jnp.abs(x).max(initial=0.0).astype(jnp.float32) for x in jax.tree.leaves(update)]).max()
    # Squares of numbers near 1 do not overflow. XLA may multiply by `1 / unit`, which is 0 from 9e37 on.
    unit = jnp.where(largest > 0, jnp.minimum(largest, 1e37), jnp.ones_like(largest))
    squares = jnp.stack([jnp.square(x / unit.astype(x.dtype)).sum() for x in jax.tree.leaves(update)])
    norm = unit * jnp.sqrt(squares.sum().astype(jnp.float32))
    scale = clip / jnp.maximum(norm, clip)
    return jax.tree.map(lambda x: x * scale.astype(x.dtype), update), norm <= clip


def noise_of_sums(dp: GaussianDP, num_clusters: int) -> Real:
    """Returns the standard deviation of the noise on the sums, in multiples of the clipping norm.

    With the counts that are released too, all releases of a round have the noise multiplier `dp.noise`:
    `noise⁻² = of_sums⁻² + (4 noise)⁻² + (2 · 5 noise)⁻²`, the second term for several clusters, the third for adaptive
    clipping.

    Example:
      >>> noise_of_sums(GaussianDP(1.0, 0.5), 1), round(noise_of_sums(GaussianDP(1.0, 0.5), 3), 4)
      (0.5, 0.5164)
    """
    of_sizes = COUNT_NOISE**-2 if num_clusters > 1 else 0.0
    of_clip = (2 * CLIP_NOISE) ** -2 if dp.quantile is not None else 0.0
    return dp.noise / math.sqrt(1 - of_sizes - of_clip)


def release(
    dp: GaussianDP, key: jax.Array, clip: Any, sums: PyTree, counts: jax.Array, expected: jax.Array
) -> tuple[PyTree, jax.Array]:
    """Returns the sums `[K, ...]` of clipped updates with noise, and the sizes `[K]`, zeros below `dp.min_size`.

    The sizes are `counts` with noise, or, of a single cluster, the `expected` participants, which are public.
    """
    leaves, structure = jax.tree.flatten(sums)
    of_leaves, of_sizes, _ = _keys(key, len(leaves))
    scale = noise_of_sums(dp, len(counts)) * clip_of(dp, clip)
    leaves = [x + scale * jax.random.normal(k, x.shape, x.dtype) for k, x in zip(of_leaves, leaves, strict=True)]
    if len(counts) > 1:
        sizes = counts + COUNT_NOISE * dp.noise * jax.random.normal(of_sizes, counts.shape, counts.dtype)
    else:
        sizes = jnp.broadcast_to(expected.astype(counts.dtype), counts.shape)
    is_kept = sizes >= dp.min_size
    leaves = [jnp.where(is_kept.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros_like(x)) for x in leaves]
    return jax.tree.unflatten(structure, leaves), jnp.where(is_kept, sizes, jnp.zeros_like(sizes))


def next_clip(
    dp: GaussianDP, key: jax.Array, clip: Any, inside: jax.Array, usable: jax.Array, like: PyTree, expected: jax.Array
) -> Any:
    """Returns the clipping norm of the next round, `[]` (Andrew et al. 2021, Algorithm 1); `()` where it is fixed.

    `inside` `[C]` bool are the updates with a norm of at most `clip`, `usable` `[C]` bool the participants with a
    finite one; of the sums `like` the number of leaves matters.
    """
    if dp.quantile is None:
        return clip
    of_clip = _keys(key, len(jax.tree.leaves(like)))[2]
    votes = jnp.where(usable, inside.astype(jnp.float32) - 0.5, 0.0).sum()
    share = 0.5 + (votes + CLIP_NOISE * dp.noise * jax.random.normal(of_clip, (), clip.dtype)) / expected
    # With few participants, the noise moves the norm at random, as far as infinity if nothing ends it.
    return jnp.clip(clip * jnp.exp(-dp.clip_rate * (share - dp.quantile)), *CLIP_RANGE)


def metrics(dp: GaussianDP, clip: Any, sizes: jax.Array, divisor: jax.Array) -> dict[str, jax.Array]:
    """Returns the metrics of a private round.

    They are `clip` `[]`, its clipping norm, `released` `[]`, the number of released sums, and `noise` `[K]`, the
    standard deviation of the noise on each coordinate of a mean, a sum over its `divisor` `[K]`; NaN where the sum is
    not released.
    """
    clip, is_released = jnp.asarray(clip_of(dp, clip), jnp.float32), sizes > 0
    noise = noise_of_sums(dp, len(sizes)) * clip / jnp.where(is_released, divisor, jnp.nan)
    return {"clip": clip, "released": is_released.sum().astype(jnp.int32), "noise": noise.astype(jnp.float32)}


def _keys(key: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the keys of the noise on the leaves, in their order, on the sizes, and on the clipping norm."""
    keys = jax.random.split(jax.random.fold_in(key, STREAM), count + 2)
    return keys[:count], keys[count], keys[count + 1]


# Accounting.


def epsilon(
    dp: GaussianDP, *, num_clients: int, num_rounds: int, cohort: int | None = None, delta: float | None = None
) -> float:
    """Returns ε: the released models are (ε, δ)-differentially private with respect to one client's whole data.

    It is the same for a client of any cluster: all clients take part with the same probability, each in one sum. Small
    clusters pay with more noise instead: on their mean it is `σ C` divided by their size.

    Args:
      dp: the mechanism of every round.
      num_clients: `N`, clients with examples.
      num_rounds: `T`.
      cohort: of the method; default: all clients take part.
      delta: δ, well below `1 / N`; default: `N**-1.1`.

    Returns:
      ε by Rényi accounting (the moments accountant of McMahan et al.), from the package dp-accounting. Neighbouring
      data sets differ by one client that joins or leaves. For `sampling="fixed"` below `N` they differ by one client
      that is replaced by another, so that the sums change by `2 C`, and the bound on sampling without replacement is
      used, if it is the smaller. A Poisson cohort adds at most `(1 + e^ε) 10⁻¹² T` to δ, as its rows are limited.

    Raises:
      ValueError: no noise, or values out of range.
      ImportError: dp-accounting is not installed.

    Example:
      >>> dp = GaussianDP(clip=1.0, noise=1.3)
      >>> round(epsilon(dp, num_clients=60_000, cohort=150, num_rounds=6000, delta=1e-5), 4)
      0.7242
    """
    check_mechanism(dp)
    check_count("num_clients", num_clients)
    check_count("num_rounds", num_rounds, least=0)
    check(dp.noise > 0, "dp.noise", dp.noise, "above 0 for an epsilon: without noise there is no guarantee")
    if cohort is not None:
        check_count("cohort", cohort, most=num_clients)
    delta = default_delta(num_clients) if delta is None else delta
    check(0 < delta < 1, "delta", delta, "in (0, 1)")
    if num_rounds == 0:
        return 0.0
    accounting = accountant()
    relation, events = accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, [accounting.GaussianDpEvent(float(dp.noise))]
    if cohort is not None and cohort < num_clients:
        if dp.sampling == "poisson":
            events = [accounting.PoissonSampledDpEvent(cohort / num_clients, events[0])]
        else:  # the bound on sampling is the larger one for large cohorts
            relation, replaced = accounting.NeighboringRelation.REPLACE_ONE, accounting.GaussianDpEvent(dp.noise / 2)
            events = [replaced, accounting.SampledWithoutReplacementDpEvent(num_clients, cohort, replaced)]

    def bound(event):
        rdp = accounting.rdp.RdpAccountant(neighboring_relation=relation)
        return float(rdp.compose(event, num_rounds).get_epsilon(delta))

    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)  # no warnings of Rényi orders that are left out: any of the others give a bound
    try:
        return min(map(bound, events))
    finally:
        logger.setLevel(level)


def default_delta(num_clients: int) -> float:
    """Returns `N**-1.1`, the δ of the experiments of McMahan et al.

    Example:
      >>> default_delta(1000) < 1 / 1000
      True
    """
    return float(num_clients) ** -1.1


def accountant() -> Any:
    """Returns the module `dp_accounting`; raises `ImportError`, with the command that installs it, where it is not."""
    try:
        return importlib.import_module("dp_accounting")
    except ImportError as error:
        raise ImportError(f"an epsilon needs the package dp-accounting: {INSTALL}") from error
