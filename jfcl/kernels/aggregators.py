"""Steps before an aggregator (clipping, mixing of nearest neighbours, buckets), and aggregators by name.

Each step returns `(updates, mask)` for the next:

    mixed, mask = nearest_neighbour_mixing(updates, num_malicious=2)
    result = krum(mixed, num_malicious=2, mask=mask)

`jfcl.kernels.make_aggregator("nearest_neighbour_mixing+krum", num_malicious=2)` is the same as one function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jfcl.core.checks import check, check_choice
from jfcl.kernels.base import PyTree, check_whole, is_computable
from jfcl.kernels.blocks import squared_norms, usable_rows
from jfcl.kernels.distances import squared_row_distances
from jfcl.kernels.robust import (
    at_most_half,
    check_minority,
    combine,
    coordinate_median,
    counted,
    mean,
    mean_around_median,
    num_excluded,
    trimmed_mean,
)
from jfcl.kernels.robust_vectors import bulyan, centered_clip, geometric_median, krum, multi_krum
from jfcl.kernels.similarity import scaled_rows, unit_scale


def _with_rows(updates: PyTree, rows: list[jax.Array]) -> PyTree:
    """Returns a pytree like `updates`, with the numbers of `rows` `[n, d]` for every leaf `[N, ...]`."""
    leaves, structure = jax.tree.flatten(updates)
    shaped = [x.reshape(len(x), *jnp.shape(leaf)[1:]) for x, leaf in zip(rows, leaves, strict=True)]
    return jax.tree.unflatten(structure, shaped)


@jax.jit
def _shorten(rows, usable, radius):
    norms = jnp.sqrt(squared_norms(rows))
    power, inverse = unit_scale(rows, usable)
    longer = norms > radius  # also where the square overflows
    power, inverse = jnp.where(longer, power, 1.0), jnp.where(longer, inverse * radius, 1.0)
    # In the type of the norms: rounded to 16 bits, the factor of a long update can be 0.
    return [usable_rows(scaled_rows(x, usable, (power, inverse)), usable) for x in rows]


def clip_norms(updates: PyTree, *, radius: Any, mask: jax.Array | None = None) -> tuple[PyTree, jax.Array]:
    """Shortens every update to a length of at most `radius`.

    Args:
      updates: `[N, D]` or a stacked pytree.
      radius: a number, or `[N]`, at least 0.
      mask: `[N]` bool, the clients that count.

    Returns:
      `(updates, mask)`: clients that do not count, or have NaN or infinity, as zeros and masked.

    Raises:
      ValueError: wrong rank or lengths; a negative radius.

    Cost: two passes.

    Example:
      >>> import jax.numpy as jnp
      >>> print(clip_norms(jnp.array([[3.0, 4.0], [0.3, 0.4]]), radius=1.0)[0].round(3))
      [[0.6 0.8]
       [0.3 0.4]]
    """
    rows, usable = counted(updates, mask)
    radius = jnp.asarray(radius, jnp.float32)
    check(radius.shape in ((), usable.shape), "radius", radius.shape, f"a number, or of shape {usable.shape}")
    if is_computable(radius):
        check((radius >= 0).all(), "radius", radius.tolist(), "at least 0, and not NaN")
    return _with_rows(updates, _shorten(rows, usable, radius)), usable


def adaptive_clip(updates: PyTree, *, num_malicious: int, mask: jax.Array | None = None) -> tuple[PyTree, jax.Array]:
    """ARC: shortens the `⌊2 (f/N) (N − f)⌋` longest updates to the length of the next (Allouah et al. 2025).

    Args:
      updates: `[N, D]` or a stacked pytree.
      num_malicious: `f`, less than half of the clients.
      mask: `[N]` bool, the clients that count.

    Returns:
      `(updates, mask)`, as `clip_norms`.

    Raises:
      ValueError: wrong rank or lengths; `2 f >= N`.

    Cost: two passes.

    Example:
      >>> import jax.numpy as jnp
      >>> adaptive_clip(jnp.array([[1.0], [2.0], [4.0], [8.0]]), num_malicious=1)[0].tolist()
      [[1.0], [2.0], [4.0], [4.0]]
    """
    check_minority(updates, num_malicious)
    rows, usable = counted(updates, mask)
    radius = _arc_radius(rows, usable, at_most_half(num_malicious, usable))
    return _with_rows(updates, _shorten(rows, usable, radius)), usable


@jax.jit
def _arc_radius(rows, usable, f):
    count = usable.sum()
    # floor(2 f (n - f) / n). The product may exceed int32: with an estimate in floats, the difference is small again,
    # and right although both of its terms wrap around.
    n = jnp.maximum(count, 1)
    estimate = (2 * f.astype(jnp.float32) * ((n - f) / n)).astype(jnp.int32)
    num_clipped = estimate + (2 * f * (n - f) - estimate * n) // n
    norms = jnp.where(usable, jnp.sqrt(squared_norms(rows)), -jnp.inf)
    longest_first = jnp.sort(norms, descending=True)
    return jnp.maximum(longest_first[jnp.minimum(num_clipped, len(usable) - 1)], 0.0)


def nearest_neighbour_mixing(
    updates: PyTree, *, num_malicious: int, mask: jax.Array | None = None
) -> tuple[PyTree, jax.Array]:
    """NNM: replaces every update by the mean of the `N − f` nearest to it, itself included (Allouah et al. 2023).

    Args:
      updates: `[N, D]` or a stacked pytree.
      num_malicious: `f`, less than half of the clients.
      mask: `[N]` bool, the clients that count.

    Returns:
      `(updates, mask)`, as `clip_norms`.

    Raises:
      ValueError: wrong rank or lengths; `2 f >= N`.

    Cost: `3 N² D` multiplications.

    Example:
      >>> import jax.numpy as jnp
      >>> nearest_neighbour_mixing(jnp.array([[0.0], [1.0], [10.0]]), num_malicious=1)[0].tolist()
      [[0.5], [0.5], [5.5]]
    """
    check_minority(updates, num_malicious)
    rows, usable = counted(updates, mask)
    keep = usable.sum() - at_most_half(num_malicious, usable)
    return _with_rows(
        updates, combine(rows, _nearest(squared_row_distances(rows, usable), usable, keep), usable)
    ), usable


@jax.jit
def _nearest(squares, usable, keep):
    """Returns `[N, N]` shares: equal for each usable row's `keep` nearest, which always include itself."""
    itself = jnp.eye(len(usable), dtype=bool)
    squares = jnp.where(usable, jnp.minimum(squares, jnp.finfo(squares.dtype).max), jnp.inf)  # unusable ones last
    squares = jnp.where(itself, -1.0, squares)  # a duplicate must not displace the update itself
    order = jnp.argsort(squares, axis=1, stable=True)
    rank = jnp.argsort(order, axis=1)
    near = (rank < keep) & usable[None, :] & usable[:, None]
    return near.astype(squares.dtype) / jnp.maximum(near.sum(axis=1, keepdims=True), 1).astype(squares.dtype)


def bucketing(
    updates: PyTree, *, bucket_size: int, key: jax.Array, mask: jax.Array | None = None
) -> tuple[PyTree, jax.Array]:
    """Returns the means of random buckets of `bucket_size` updates (Karimireddy, He, Jaggi 2022).

    Args:
      updates: `[N, D]` or a stacked pytree.
      bucket_size: `s`, from 1 to N.
      key: determines the buckets.
      mask: `[N]` bool, the clients that count; they fill the first buckets.

    Returns:
      `(updates, mask)` of `⌈N / s⌉` buckets; empty ones are masked.

    Raises:
      ValueError: wrong rank or lengths; a bucket size outside `1 .. N`.

    Cost: two passes.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> bucketing(jnp.array([[1.0], [2.0], [3.0], [6.0]]), bucket_size=4, key=jax.random.key(0))[0].tolist()
      [[3.0]]
    """
    rows, usable = counted(updates, mask)
    count = len(usable)
    check_whole("bucket_size", bucket_size, 1, count, "N")
    shuffled = jax.random.permutation(key, count)
    order = shuffled[jnp.argsort(~usable[shuffled], stable=True)]
    bucket = jnp.zeros(count, jnp.int32).at[order].set(jnp.arange(count, dtype=jnp.int32) // bucket_size)
    num_buckets = -(-count // bucket_size)
    members = (bucket[None, :] == jnp.arange(num_buckets, dtype=jnp.int32)[:, None]) & usable[None, :]
    sizes = members.sum(axis=1)
    mixing = members.astype(jnp.float32) / jnp.maximum(sizes, 1).astype(jnp.float32)[:, None]
    return _with_rows(updates, combine(rows, mixing, usable)), sizes > 0


# By name.

# All have the signature `f(updates, *, mask=None, return_excluded=False, ...)`.
AGGREGATORS = {
    "mean": mean,
    "centered_clip": centered_clip,
    "coordinate_median": coordinate_median,
    "trimmed_mean": trimmed_mean,
    "mean_around_median": mean_around_median,
    "krum": krum,
    "multi_krum": multi_krum,
    "bulyan": bulyan,
    "geometric_median": geometric_median,
}

# These return `(updates, mask)` for an aggregator.
PRE_AGGREGATORS = {
    "clip_norms": clip_norms,
    "adaptive_clip": adaptive_clip,
    "nearest_neighbour_mixing": nearest_neighbour_mixing,
    "bucketing": bucketing,
}
SHORT_NAMES = {"nnm": "nearest_neighbour_mixing"}
Parts = str | Sequence[str | Callable[..., Any]]


def _parts(named: Parts) -> list[Callable[..., Any]]:
    """Returns the functions of the names that are joined by `+`, or listed."""
    known = AGGREGATORS | PRE_AGGREGATORS
    listed = named.split("+") if isinstance(named, str) else named
    parts = [part if callable(part) else SHORT_NAMES.get(part, part) for part in listed]
    for part in parts:
        if not callable(part):
            check_choice("aggregator", part, [*known, *SHORT_NAMES])
    accepted = (
        f"any of the pre-aggregators ({', '.join([*PRE_AGGREGATORS, *SHORT_NAMES])}) and at the end one aggregator"
        f" ({', '.join(AGGREGATORS)}), joined by +"
    )
    *before, last = [*parts] or [""]
    fits = (callable(last) or last in AGGREGATORS) and all(callable(part) or part in PRE_AGGREGATORS for part in before)
    check(fits, "aggregator", _shown(named), accepted)
    return [part if callable(part) else known[part] for part in parts]


def _shown(named: Parts) -> str:
    """Returns the parts of an aggregator as one name."""
    if isinstance(named, str):
        return named
    return "+".join(getattr(p, "__name__", type(p).__name__) if callable(p) else str(p) for p in named)


def _options(part: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    of_parts, found = ("updates", "mask", "return_excluded"), {}
    for place, (name, option) in enumerate(inspect.signature(part).parameters.items()):
        if place > 0 and name not in of_parts and option.kind not in (option.VAR_KEYWORD, option.VAR_POSITIONAL):
            found[name] = option
    return found


def aggregator_options(name: Parts, *, required: bool = False) -> list[str]:
    """Returns the names of the options that `make_aggregator(name, ...)` takes.

    Args:
      name: as in `make_aggregator`.
      required: only those without a default in one of the parts.

    Raises:
      ValueError: an unknown name, or parts in another order than `make_aggregator` accepts.

    Example:
      >>> aggregator_options("nnm+krum"), aggregator_options("bucketing+mean")
      (['num_malicious'], ['bucket_size', 'key', 'weights'])
    """
    options = [(name, option) for part in _parts(name) for name, option in _options(part).items()]
    return list(dict.fromkeys(name for name, option in options if not required or option.default is option.empty))


def _check_pair(found: Any, part: Callable[..., Any], shown: str) -> None:
    """Raises `ValueError` unless a part before the last has returned updates and their mask, `[N]` bool."""
    fits = isinstance(found, tuple) and len(found) == 2
    if fits and found[1] is not None:  # as it may have been given
        rows = jnp.shape(jax.tree.leaves(found[0])[0])[:1]
        fits = getattr(found[1], "dtype", None) == jnp.bool_ and jnp.shape(found[1]) == rows
    accepted = "of functions that return (updates, mask) before the last one, which returns one update"
    check(fits, f"aggregator {shown!r}", f"{_shown([part])}, which returned {type(found).__name__}", accepted)


def make_aggregator(name: Parts, **options: Any) -> Callable[..., Any]:
    """Returns the aggregator of that name with its options, after any number of pre-aggregators.

    Args:
      name: an aggregator of `AGGREGATORS`, or pre-aggregators of `PRE_AGGREGATORS` and an aggregator joined by `+`, in
        the order in which they are applied: `"krum"`, `"nnm+krum"`, `"clip_norms+bucketing+geometric_median"`. `nnm` is
        short for `nearest_neighbour_mixing`. Or a list of them, in which functions of your own may stand:
        `["nnm", my_aggregator]`. One before the end returns `(updates, mask)`.
      options: each goes to every part that has an option of that name: `num_malicious=2` to both parts of `"nnm+krum"`.
        The `key` of `bucketing` is fixed, so that its buckets are the same in every call.

    Returns:
      `f(updates, *, mask=None, return_excluded=False)`, as the aggregators of `AGGREGATORS`. The clients that it counts
      as excluded are those with NaN or infinity in `updates`.

    Raises:
      ValueError: an unknown part, a pre-aggregator at the end, an aggregator before the end, an option that no part
        has, or one that a part needs and is missing.

    Example:
      >>> import jax.numpy as jnp
      >>> f = make_aggregator("nnm+krum", num_malicious=1)
      >>> f(jnp.array([[1.0], [1.5], [2.0], [50.0]]), return_excluded=True)
      (Array([1.5], dtype=float32), Array(0, dtype=int32))
    """
    accepted, shown = aggregator_options(name), _shown(name)
    for option in options:
        check(option in accepted, f"option of aggregator {shown!r}", option, f"one of {', '.join(accepted) or 'none'}")
    for option in aggregator_options(name, required=True):
        check(option in options, f"options of aggregator {shown!r}", sorted(options), f"given with {option}")
    *before, last = (
        partial(part, **{option: value for option, value in options.items() if option in _options(part)})
        for part in _parts(name)
    )
    if not before:
        return last

    def aggregator(updates, *, mask=None, return_excluded=False):
        excluded = num_excluded(mask, counted(updates, mask)[1]) if return_excluded else None
        for pre_aggregator in before:
            found = pre_aggregator(updates, mask=mask)
            _check_pair(found, pre_aggregator.func, shown)
            updates, mask = found
        result = last(updates, mask=mask)
        return (result, excluded) if return_excluded else result

    return aggregator
