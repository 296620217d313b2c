"""What the trackers share: their libraries, the numbers of a record, the identity of a tracked run."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from jfcl.simulation.callbacks import RunInfo
from jfcl.simulation.folder import read_json, write_json

FILE = "trackers.json"  # in the run's folder: the identity of the tracked run, by tracker


def library(package: str, extra: str) -> ModuleType:
    """Returns a package; `ValueError`, with the command that installs it, if it cannot be imported."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        how = f"pip install 'jfcl[{extra}]'"
        raise ValueError(f"track must be a tracker that is installed, got {extra!r} ({error}): {how}") from None


def scalars(records: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the numbers of one evaluation: of the only seed, or their means with `seed_S/NAME` of every seed.

    Example:
      >>> scalars([{"seed": 3, "round": 5, "accuracy": 0.5, "cluster": [0, 1]}])
      {'accuracy': 0.5}
      >>> scalars([{"seed": s, "round": 5, "accuracy": s / 4} for s in (1, 2)])
      {'accuracy': 0.375, 'seed_1/accuracy': 0.25, 'seed_2/accuracy': 0.5}
    """
    names = [name for name in records[0] if name not in ("seed", "round")]
    names = [name for name in names if all(isinstance(row.get(name), (int, float)) for row in records)]
    found = {name: sum(float(row[name]) for row in records) / len(records) for name in names}
    if len(records) > 1:
        found |= {f"seed_{row['seed']}/{name}": float(row[name]) for row in records for name in names}
    return found


def name_of(run: RunInfo) -> str:
    """Returns the name of a run: that of its folder, or its description."""
    return run.description if run.folder is None else run.folder.resolve().name


def tell(text: str) -> None:
    """Prints where the curves of a run are; above a progress bar, if there is one."""
    print(f"curves: {text}", file=sys.stderr)


def known_id(folder: Path | None, tracker: str) -> str | None:
    """Returns the identity of the run in `folder` at a tracker; None if it has none yet."""
    file = None if folder is None else folder / FILE
    return read_json(file, sealed=False).get(tracker) if file is not None and file.exists() else None


def keep_id(folder: Path | None, tracker: str, identity: str) -> None:
    """Keeps the identity of the run at a tracker in `folder`."""
    if folder is not None:
        file = folder / FILE
        write_json(file, (read_json(file, sealed=False) if file.exists() else {}) | {tracker: identity})
