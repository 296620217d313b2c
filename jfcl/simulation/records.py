"""The lines of `metrics.jsonl`.

A line is plain JSON, with null for NaN and infinities. Their exact values stand as text under `EXACT`, so that the
records of a resumed run equal those of an uninterrupted one.
"""

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np

EXACT = "not_finite"


def _replaced(value: Any, replace: Callable[[Any], Any]) -> Any:
    """Returns `value` with `replace` applied to everything in its dicts and lists."""
    if isinstance(value, dict):
        return {name: _replaced(v, replace) for name, v in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [_replaced(v, replace) for v in value]
    return replace(value)


def finite_or_none(value: Any) -> Any:
    """Returns `value` with `None` for NaN and infinities, and with Python's types for NumPy scalars and arrays."""

    def plain(x):
        x = x.item() if isinstance(x, np.generic) else x
        return None if isinstance(x, float) and not math.isfinite(x) else x

    return _replaced(value, plain)


def spelled(value: Any) -> Any:
    """Returns `value` with text for numbers that are not finite: `"inf"`, `"-inf"`, `"nan"`."""
    return _replaced(value, lambda x: str(x) if isinstance(x, float) and not math.isfinite(x) else x)


def _numbers(value: Any) -> Any:
    """The inverse of `spelled`."""
    return _replaced(value, lambda x: float(x) if x in ("inf", "-inf", "nan") else x)


def to_line(record: dict[str, Any]) -> bytes:
    """Returns the line of a record."""
    plain = {name: finite_or_none(value) for name, value in record.items()}
    exact = {name: spelled(value) for name, value in record.items() if plain[name] != value}
    return (json.dumps(plain | ({EXACT: exact} if exact else {}), allow_nan=False) + "\n").encode()


def from_line(line: bytes) -> dict[str, Any] | None:
    """Returns the record of a line; `None` if the line holds none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_record = isinstance(record, dict) and all(type(record.get(name)) is int for name in ("round", "seed"))
    has_text = is_record and any(isinstance(value, str) for value in record.values())
    if not is_record or has_text or not isinstance(record.get(EXACT, {}), dict):
        return None
    return record | _numbers(record.pop(EXACT, {}))
