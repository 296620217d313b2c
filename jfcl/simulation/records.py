"""The lines of `metrics.jsonl`.

A line is plain JSON, with null for NaN and infinities. Their exact values stand as text under `EXACT`, so that the
records of a resumed run equal those of an uninterrupted one.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

EXACT = "not_finite"


def finite_or_none(value: Any) -> Any:
    """Returns `value` with `None` for NaN and infinities, and with Python's types for NumPy scalars and arrays."""
    if isinstance(value, dict):
        return {name: finite_or_none(v) for name, v in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [finite_or_none(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value


def _spelled(value: Any) -> Any:
    """Returns `value` with text for numbers that are not finite: `"inf"`, `"-inf"`, `"nan"`."""
    if isinstance(value, (list, tuple)):
        return [_spelled(v) for v in value]
    if isinstance(value, dict):
        return {name: _spelled(v) for name, v in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _numbers(value: Any) -> Any:
    """The inverse of `_spelled`."""
    if isinstance(value, list):
        return [_numbers(v) for v in value]
    if isinstance(value, dict):
        return {name: _numbers(v) for name, v in value.items()}
    return float(value) if value in ("inf", "-inf", "nan") else value


def to_line(record: dict[str, Any]) -> bytes:
    """Returns the line of a record."""
    plain = {name: finite_or_none(value) for name, value in record.items()}
    exact = {name: _spelled(value) for name, value in record.items() if plain[name] != value}
    return (json.dumps(plain | ({EXACT: exact} if exact else {}), allow_nan=False) + "\n").encode()


def from_line(line: bytes) -> dict[str, Any] | None:
    """Returns the record of a line; `None` if the line holds none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_record = isinstance(found, dict) and isinstance(found.get("round"), int)
    if not is_record or not isinstance(found.get(EXACT, {}), dict):
        return None
    return found | _numbers(found.pop(EXACT, {}))
