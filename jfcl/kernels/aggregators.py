"""Steps before an aggregator (clipping, mixing of nearest neighbours, buckets), and aggregators by name."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jfcl.core.checks import check, check_choice, require
from jfcl.kernels import robust
from jfcl.kernels.base import PyTree, check_values, check_whole, like, sum_dtype
from jfcl.kernels.blocks import squared_norms, usable_rows
from jfcl.kernels.distances import squared_row_distances
from jfcl.kernels.robust import combine, counted, lowest, minority, shares
from jfcl.kernels.robust_filters import caf, clipped_clustering, dnc, monna, sign_guard, smea
from jfcl.kernels.robust_vectors import bulyan, centered_clip, geometric_median, krum, multi_krum
from jfcl.kernels.similarity import scaled_rows, unit_scale


def _norms(rows, usable):
    """Returns the norms `[N]`, also where squares over- or underflow, and the factors of `unit_scale`."""
    norms, (power, inverse) = jnp.sqrt(squared_norms(rows)), unit_scale(rows, usable)
    known = jnp.isfinite(norms) & (norms > 1e-15)
    return jnp.where(known | (inverse == 0), norms, 1 / inverse / power), power, inverse


@jax.jit
def _shorten(rows, usable, radius):
    norms, power, inverse = _norms(rows, usable)
    longer = norms > radius
    power, inverse = jnp.where(longer, power, 1.0), jnp.where(longer, inverse * radius, 1.0)
    # In the type of the norms: rounded to 16 bits, the factor of a long update can be 0.
    return [scaled_rows(x, usable, (power, inverse)) for x in rows]


def clip_norms(updates: PyTree, *, radius: Any, mask: jax.Array | None = None) -> tuple[PyTree, jax.Array]:
    """Shortens every update to a length of at most `radius`: a number, or `[N]`, at least 0.

    Masked updates become zeros. For the other arguments and the result see `jfcl.kernels`. Cost: two passes.

    Example:
      >>> import jax.numpy as jnp
      >>> print(clip_norms(jnp.array([[3.0, 4.0], [0.3, 0.4]]), radius=1.0)[0].round(3))
      [[0.6 0.8]
       [0.3 0.4]]
    """
    rows, usable = counted(updates, mask)
    radius = jnp.asarray(radius, sum_dtype(*rows))
    check(radius.shape in ((), usable.shape), "radius", radius.shape, f"a number, or of shape {usable.shape}")
    check_values("radius", radius, lambda radius: radius >= 0, "at least 0, and not NaN")
    return like(updates, _shorten(rows, usable, radius)), usable


def adaptive_clip(updates: PyTree, *, num_malicious: int, mask: jax.Array | None = None) -> tuple[PyTree, jax.Array]:
    """ARC: shortens the `⌊2 (f/N) (N − f)⌋` longest updates to the length of the next (Allouah et al. 2025).

    `f` is `num_malicious`, less than half of the clients; masked updates become zeros. For the arguments and the result
    see `jfcl.kernels`. Cost: two passes.

    Example:
      >>> import jax.numpy as jnp
      >>> adaptive_clip(jnp.array([[1.0], [2.0], [4.0], [8.0]]), num_malicious=1)[0].tolist()
      [[1.0], [2.0], [4.0], [4.0]]
    """
    rows, usable = counted(updates, mask)
    radius = _arc_radius(rows, usable, minority(num_malicious, usable))
    return like(updates, _shorten(rows, usable, radius)), usable


@jax.jit
def _arc_radius(rows, usable, f):
    count = usable.sum()
    # floor(2 f (n - f) / n). The product may exceed int32; its difference from an estimate in floats is small again,
    # and right although both of its terms wrap around.
    n = jnp.maximum(count, 1)
    estimate = (2 * f.astype(jnp.float32) * ((n - f) / n)).astype(jnp.int32)
    num_clipped = estimate + (2 * f * (n - f) - estimate * n) // n
    norms = jnp.where(usable, _norms(rows, usable)[0], -jnp.inf)
    longest_first = jnp.sort(norms, descending=True)
    return jnp.maximum(longest_first[jnp.minimum(num_clipped, len(usable) - 1)], 0.0)


def nearest_neighbour_mixing(
    updates: PyTree, *, num_malicious: int, mask: jax.Array | None = None
) -> tuple[PyTree, jax.Array]:
    """NNM: replaces every update by the mean of the `N − f` nearest to it, itself included (Allouah et al. 2023).

    `f` is `num_malicious`, less than half of the clients; masked updates become zeros. For the arguments and the result
    see `jfcl.kernels`. Cost: `3 N² D` operations.

    Example:
      >>> import jax.numpy as jnp
      >>> nearest_neighbour_mixing(jnp.array([[0.0], [1.0], [10.0]]), num_malicious=1)[0].tolist()
      [[0.5], [0.5], [5.5]]
    """
    rows, usable = counted(updates, mask)
    count = usable.sum() - minority(num_malicious, usable)
    mixing = _nearest(squared_row_distances(rows, usable), usable, count)
    return like(updates, combine(rows, mixing, usable)), usable


@jax.jit
def _nearest(squares, usable, count):
    """Returns `[N, N]` shares: equal for each usable row's `count` nearest, which always include itself."""
    squares = jnp.where(jnp.eye(len(usable), dtype=bool), -1.0, squares)  # a duplicate must not displace it
    near = jax.vmap(lowest, (0, None, None))(squares, usable, count)
    return usable_rows(near, usable)


def bucketing(
    updates: PyTree, *, bucket_size: int, key: jax.Array | None = None, mask: jax.Array | None = None
) -> tuple[PyTree, jax.Array]:
    """Returns the means of random buckets of `bucket_size` updates, from 1 to N (Karimireddy, He, Jaggi 2022).

    The result is `(updates, mask)` of `⌈N / bucket_size⌉` buckets, drawn by `key` (default: a fixed one). The clients
    that count fill the first ones, and empty ones are masked. For the arguments see `jfcl.kernels`. Cost: two passes.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> bucketing(jnp.array([[1.0], [2.0], [3.0], [6.0]]), bucket_size=4, key=jax.random.key(0))[0].tolist()
      [[3.0]]
    """
    rows, usable = counted(updates, mask)
    count = len(usable)
    check_whole("bucket_size", bucket_size, 1, count, "N")
    key = jax.random.key(0) if key is None else key
    draws = jax.random.uniform(key, (count,))  # of a client, the same with padding clients behind the others
    order = jnp.argsort(jnp.where(usable, draws, jnp.full_like(draws, 2)))
    num_buckets = -(-count // bucket_size)
    places = jnp.arange(num_buckets * bucket_size, dtype=jnp.int32)
    members = (places < usable.sum()).reshape(num_buckets, bucket_size)
    mixing = jax.vmap(shares)(members.astype(sum_dtype(*rows)), members)
    of_buckets = order[jnp.minimum(places, count - 1)].reshape(num_buckets, bucket_size)
    return like(updates, _bucket_means(rows, of_buckets, mixing)), members.any(axis=1)


@jax.jit
def _bucket_means(rows, of_buckets, mixing):
    """Returns `[B, d]` for every matrix: the sums of its rows `of_buckets` `[B, S]` with the weights `mixing`."""

    def means(x):
        dtype = sum_dtype(x)
        members = jnp.where((mixing > 0)[:, :, None], x[of_buckets].astype(dtype), jnp.zeros((), dtype))
        return (members * mixing.astype(dtype)[:, :, None]).sum(axis=1).astype(x.dtype)

    return list(map(means, rows))


# All have the signature `f(updates, *, mask=None, ...)`.
_OF_COORDINATES = (robust.coordinate_median, robust.trimmed_mean, robust.mean_around_median)
_OF_UPDATES = (krum, multi_krum, bulyan, geometric_median)
_FILTERS = (caf, smea, monna, dnc, clipped_clustering, sign_guard)
AGGREGATORS = {f.__name__: f for f in (robust.mean, centered_clip, *_OF_COORDINATES, *_OF_UPDATES, *_FILTERS)}
# These return `(updates, mask)` for an aggregator.
PRE_AGGREGATORS = {f.__name__: f for f in (clip_norms, adaptive_clip, nearest_neighbour_mixing, bucketing)}
SHORT_NAMES = {"nnm": "nearest_neighbour_mixing"}
Parts = str | Sequence[str | Callable[..., Any]]


def _parts(named: Parts) -> list[Callable[..., Any]]:
    """Returns the functions of the names that are joined by `+`, or listed."""
    functions = AGGREGATORS | PRE_AGGREGATORS
    parts = []
    for part in named.split("+") if isinstance(named, str) else named:
        if not callable(part):
            part = SHORT_NAMES.get(part, part)
            check_choice("aggregator", part, [*functions, *SHORT_NAMES])
        parts.append(part if callable(part) else functions[part])
    in_order = bool(parts) and parts[-1] not in PRE_AGGREGATORS.values()
    in_order = in_order and not any(part in AGGREGATORS.values() for part in parts[:-1])
    before, last = map(", ".join, ([*PRE_AGGREGATORS, *SHORT_NAMES], AGGREGATORS))
    accepted = f"any of the pre-aggregators ({before}) and at the end one aggregator ({last}), joined by +"
    check(in_order, "aggregator", _shown(named), accepted)
    return parts


def _shown(named: Parts) -> str:
    """Returns the parts of an aggregator as one name."""
    if isinstance(named, str):
        return named
    return "+".join(getattr(p, "__name__", type(p).__name__) if callable(p) else str(p) for p in named)


def _options(part: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Returns the parameters of a part beside the updates and the mask."""
    parameters = list(inspect.signature(part).parameters.values())[1:]
    return {p.name: p for p in parameters if p.name != "mask" and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}


def aggregator_options(name: Parts, *, required: bool = False) -> list[str]:
    """Returns the names of the options that `make_aggregator(name, ...)` takes.

    With `required`, they are those without a default in one of the parts. `name` and errors are those of
    `make_aggregator`.

    Example:
      >>> aggregator_options("nnm+krum"), aggregator_options("bucketing+mean")
      (['num_malicious'], ['bucket_size', 'key', 'weights'])
    """
    options = [(name, option) for part in _parts(name) for name, option in _options(part).items()]
    return list(dict.fromkeys(name for name, option in options if not required or option.default is option.empty))


def make_aggregator(name: Parts, **options: Any) -> Callable[..., Any]:
    """Returns the aggregator of that name with its options, after any number of pre-aggregators.

    Args:
      name: an aggregator of `AGGREGATORS`, or pre-aggregators of `PRE_AGGREGATORS` and an aggregator joined by `+`, in
        the order in which they are applied: `"krum"`, `"nnm+krum"`, `"clip_norms+bucketing+geometric_median"`. `nnm` is
        short for `nearest_neighbour_mixing`. Or a list of them, in which functions of your own may stand:
        `["nnm", my_aggregator]`. One before the end returns `(updates, mask)`.
      options: each goes to every part that has an option of that name: `num_malicious=2` to both parts of `"nnm+krum"`.
        With a `key`, the draws of `bucketing` and `dnc` are the same in every round; without, each has its own.

    Returns:
      `f(updates, *, mask=None, key=None)`, as the aggregators of `AGGREGATORS`; without `key` if that is an option, or
      if it is one aggregator that draws nothing.

    Raises:
      ValueError: unknown parts or another order of them; an option that no part has, or that is missing.

    Example:
      >>> import jax.numpy as jnp
      >>> f = make_aggregator("nnm+krum", num_malicious=1)
      >>> f(jnp.array([[1.0], [1.5], [2.0], [50.0]])).tolist()
      [1.5]
    """
    accepted, shown = aggregator_options(name), _shown(name)
    for option in options:
        check(option in accepted, f"option of aggregator {shown!r}", option, f"one of {', '.join(accepted) or 'none'}")
    for option in aggregator_options(name, required=True):
        require(option in options or option == "key", f"aggregator {shown!r} needs {option}")
    *before, last = (
        partial(part, **{option: value for option, value in options.items() if option in _options(part)})
        for part in _parts(name)
    )
    if not before:
        return last

    def aggregator(updates, *, mask=None, key=None):
        def call(part, updates, mask):
            drawn = {} if key is None or "key" not in _options(part.func) else {"key": key}
            return part(updates, mask=mask, **drawn)

        for pre_aggregator in before:
            pair = call(pre_aggregator, updates, mask)
            fits = isinstance(pair, tuple) and len(pair) == 2 and (pair[1] is None or hasattr(pair[1], "dtype"))
            returned = f"{_shown([pre_aggregator.func])}, which returned {type(pair).__name__}"
            before_last = "of functions that return (updates, mask) before the last one, which returns one update"
            check(fits, f"aggregator {shown!r}", returned, before_last)
            updates, mask = pair
        return call(last, updates, mask)

    return partial(aggregator, key=options["key"]) if "key" in options else aggregator
