"""Aggregators by name, alone or after pre-aggregators."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jfcl.core.checks import check, check_choice
from jfcl.kernels.clipping import centered_clip
from jfcl.kernels.geometric_median import geometric_median
from jfcl.kernels.medians import coordinate_median, mean_around_median, trimmed_mean
from jfcl.kernels.pre_aggregation import adaptive_clip, bucketing, clip_norms, nearest_neighbour_mixing
from jfcl.kernels.robust import counted, mean, num_excluded
from jfcl.kernels.selection import bulyan, krum, minimum_diameter, multi_krum

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
    "minimum_diameter": minimum_diameter,
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
