"""Checks of arguments: each raises `ValueError` before anything is compiled, and lets tracers pass."""

import itertools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfcl.core.names import value_hint

INT32_MAX = 2**31 - 1  # counts are int32 on the device
INT32 = (-INT32_MAX, INT32_MAX)
SHOWN = 400  # characters of a refused value in a message; a longer one is shortened to its beginning and end


def is_concrete(value: Any) -> bool:
    """Returns False for a tracer, which has no value yet: validation skips tracers."""
    return not isinstance(value, jax.core.Tracer)


def check(ok: Any, argument: str, value: Any, accepted: str) -> None:
    """Raises `ValueError("<argument> must be <accepted>, got <value>")` unless `ok`; skips tracers.

    Example:
      >>> check(3 > 0, "num_rounds", 3, "positive")
      >>> check(-1 > 0, "num_rounds", -1, "positive")
      Traceback (most recent call last):
      ValueError: num_rounds must be positive, got -1
    """
    if is_concrete(ok) and not bool(ok):
        raise ValueError(f"{argument} must be {accepted}, got {shown(value)}")


def require(ok: Any, sentence: str) -> None:
    """Raises `ValueError(sentence)` unless `ok`, where what is wrong is not the value of one argument; skips tracers.

    Example:
      >>> require(3 > 0, "no client has an example")
    """
    if is_concrete(ok) and not bool(ok):
        raise ValueError(sentence)


def shown(value: Any) -> str:
    """Returns `repr(value)`, without the middle part where it is long, so that messages stay readable."""
    text = f"an integer of {value.bit_length()} bits" if type(value) is int and abs(value) >= 10**SHOWN else repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN // 2]}...{text[-SHOWN // 4 :]}"


def check_count(argument: str, value: Any, *, least: int = 1, most: int = INT32_MAX) -> None:
    """Raises `ValueError` unless a value is an integer from `least` to `most`, by default the largest of int32."""
    integer = _is_integer(value)
    above = f" and at most {most}" if integer and value > most else ""
    check(integer and least <= value <= most, argument, value, f"an integer, at least {least}{above}")


def check_integers(
    argument: str, values: Any, count: int | None = None, *, within: tuple[int, int] | None = None
) -> np.ndarray:
    """Returns a vector of `count` integers, by default at least one, from the first to the last of `within`.

    Raises:
      ValueError: other values.
    """
    values = np.asarray(values)
    fits = values.ndim == 1 and values.dtype.kind in "iu" and len(values) == (count or max(len(values), 1))
    accepted = f"a vector of {'' if count is None else f'{count} '}integers"
    check(fits, argument, f"{values.dtype} {list(values.shape)}", accepted)
    if within is not None:
        low, high = int(values.min()), int(values.max())
        check(within[0] <= low and high <= within[1], argument, [low, high], f"in {within[0]}..{within[1]}")
    return values


def check_shape(argument: str, shape: Any) -> tuple[int, ...]:
    """Returns `shape` as a tuple; raises `ValueError` unless it holds counts from 1."""
    is_shape = isinstance(shape, (tuple, list)) and all(_is_integer(n) and n >= 1 for n in shape)
    check(is_shape, argument, shape, "a tuple of integers, each at least 1, such as (28, 28, 1)")
    return tuple(map(int, shape))


def is_number(value: Any) -> bool:
    """Returns whether `value` is a real number and no tracer; a bool is not a number."""
    return isinstance(value, (float, np.floating)) or _is_integer(value)


def _is_integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def check_choice(argument: str, value: Any, choices: Iterable[str]) -> None:
    """Raises `ValueError`, which names the nearest choice, unless a value is one of `choices`.

    Example:
      >>> check_choice("method", "ifac", ["fedavg", "ifca"])
      Traceback (most recent call last):
      ValueError: unknown method 'ifac': did you mean 'ifca'? Accepted: fedavg, ifca
    """
    choices = list(choices)
    if value not in choices:
        choices = list(map(str, choices))  # columns of a frame may be numbers
        hint = value_hint(argument, str(value)[:SHOWN], choices)
        raise ValueError(f"unknown {argument} {shown(value)}{hint} Accepted: {', '.join(choices)}")


def check_finite(tree: Any, name: str) -> None:
    """Raises `ValueError` for NaN or infinity in an array of `tree`; tracers and arrays of other processes pass.

    Example:
      >>> check_finite({"a": np.ones(2), "b": np.array([1, np.nan])}, "init_params")
      Traceback (most recent call last):
      ValueError: init_params['b'] must be finite, got NaN or infinity
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        is_real = is_concrete(leaf) and jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
        if is_real and getattr(leaf, "is_fully_addressable", True) and not np.isfinite(np.asarray(leaf)).all():
            raise ValueError(f"{name}{jax.tree_util.keystr(path)} must be finite, got NaN or infinity")


def check_apart(name: str, columns: Any) -> None:
    """Raises `ValueError` unless float32, in which models compute, tells apart the numbers of each column.

    Different integers, or numbers close to each other for their size, must not become equal; those that differ by
    rounding in float64 may. `columns` are `[n]` or `[n, columns]`.
    """
    columns = np.asarray(columns)
    exact = columns.dtype.kind not in "iuf" or columns.dtype.itemsize <= 2 or columns.dtype == np.float32
    if exact or not columns.size:
        return
    columns = columns.reshape(len(columns), -1)
    largest = np.maximum(columns.max(axis=0), -columns.min(axis=0).astype(np.float64))
    span = columns.max(axis=0) - columns.min(axis=0).astype(np.float64)
    if not (largest <= np.finfo(np.float32).max).all():
        return  # others are refused elsewhere
    coarse = np.spacing(largest.astype(np.float32)) > 1e-4 * span
    for j in np.flatnonzero((coarse & (span > 0)) | (largest >= 2**24)):
        column = columns[:, j]
        in_last_digits = not coarse[j] or span[j] < 1e-13 * largest[j]  # such as 0.1 + 0.2 and 0.3
        if in_last_digits and (column != np.rint(column)).any():
            continue
        before, after = len(np.unique(column)), len(np.unique(column.astype(np.float32)))
        if after < before:
            where = f"{name} (column {j})" if columns.shape[1] > 1 else name
            what = f"{before} different ones that become {after}, around {largest[j]:.6g}"
            remedy = "leave out identifiers; make times and large numbers small, such as the days since the first one"
            raise ValueError(f"{where} must be of numbers that float32 tells apart, got {what}; {remedy}")


def check_held(name: str, array: np.ndarray, real: np.ndarray | None = None, *, per_client: int | None = None) -> None:
    """Raises `ValueError` unless numbers `[rows, ...]` are finite and in the range of their type in JAX.

    `real` `[rows]` bool are those that count. With `per_client` rows for each client, an error names the client.
    """
    floats = jnp.issubdtype(array.dtype, jnp.floating)
    if not array.size or not (floats or jnp.issubdtype(array.dtype, jnp.integer)):
        return
    rows, real = array.reshape(len(array), -1), np.ones(len(array), bool) if real is None else real
    if floats:
        # A sum of a row is finite exactly when its entries are (overflow of float64 aside), and needs no copy of them.
        with np.errstate(over="ignore", invalid="ignore"):
            bad = np.flatnonzero(~np.isfinite(rows.sum(axis=1, dtype=np.float64)) & real)
        if len(bad) and not np.isfinite(rows[bad]).all():
            first = bad[0] if per_client is None else f"client {bad[0] // per_client}"
            raise ValueError(f"{name}: NaN or infinity in {len(bad)} example(s), first at {first}; drop or fill them")
    held = jax.dtypes.canonicalize_dtype(array.dtype)
    if array.dtype.itemsize > held.itemsize and real.any():
        limits, accepted = (jnp.finfo if floats else jnp.iinfo)(held), f"of numbers that {held} holds, JAX's own type"
        for value in (rows.min(axis=1)[real].min(), rows.max(axis=1)[real].max()):
            check(limits.min <= value <= limits.max, name, value.item(), accepted)


def is_real(values: Any) -> bool:
    """Returns whether `values` are an array (or its shape) of real numbers or booleans."""
    kinds = (jnp.bool_, jnp.integer, jnp.floating)
    return hasattr(values, "dtype") and any(jnp.issubdtype(values.dtype, kind) for kind in kinds)


def check_unmasked(name: str, values: Any) -> None:
    """Raises `ValueError` for a masked array of NumPy with missing values: its numbers there are no data."""
    if np.ma.is_masked(values):
        raise ValueError(
            f"{name}: a masked array has missing values; fill them (values.filled), or leave out their rows"
        )


def held_type(dtype: np.dtype) -> np.dtype:
    """Returns the type that JAX accepts for a type of NumPy: in the machine's byte order, float64 for float128."""
    return np.dtype(np.float64) if dtype == np.longdouble else dtype if dtype.isnative else dtype.newbyteorder("=")


def check_key(key: Any) -> None:
    """Raises `ValueError` unless `key` is a typed key, as from `jax.random.key`, or a vector of at least one."""
    is_key = isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    check(is_key, "key", key, "a key of jax.random.key(seed)")
    check(key.ndim <= 1 and key.size > 0, "key", f"keys of shape {key.shape}", "one key, or a vector of keys")


def in_plane(shape: tuple[int, ...], plane: tuple[int, int], name: str) -> bool:
    """Returns whether an array `[n, ...]` has the height and width `plane` of the images beside it, and must move too.

    `ValueError` for one of another resolution or with its channels first, which may or may not be such a map.
    """
    plane = tuple(plane)
    if tuple(shape[1:3]) == plane:
        return True
    pairs = itertools.pairwise(shape[1:])
    if any(min(pair) > 1 and pair[0] * plane[1] == pair[1] * plane[0] for pair in pairs):
        what = f"{name} has shape {list(shape[1:])} an example: whether it is a map that must move is not known"
        raise ValueError(f"{what}. Give maps as [n, {plane[0]}, {plane[1]}, ...], and flatten what is none")
    return False
