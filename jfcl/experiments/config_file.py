"""Options in a file: TOML, or the `config.json` of a run."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from jfcl.core import check
from jfcl.experiments.config import check_options, from_saved

LARGEST_CONFIG = 2**20  # bytes; the config.json of a run has about 2,000


def read_config(path: str, method: str | None = None) -> dict[str, Any]:
    """Reads options from a TOML file or a run's `config.json`; raises `ValueError` for wrong names and types.

    `method` is the one that they are for, where it is not that of the file.
    """
    file, where = Path(path), f"--config {path}"
    if not file.is_file():
        raise ValueError(f"{where}: {'it is no regular file' if file.exists() else 'no such file'}")
    with file.open("rb") as f:  # no more than that: the length of a file may be anything
        content = f.read(LARGEST_CONFIG + 1)
    if len(content) > LARGEST_CONFIG:
        raise ValueError(f"{where}: it must be a list of options of at most {LARGEST_CONFIG} bytes, and is larger")
    try:
        yaml = file.suffix.lower() in (".yaml", ".yml")
        check(not yaml, where, "YAML", "TOML, a line such as lr = 0.1 for each option, or the config.json of a run")
        text, is_json = content.decode(), file.suffix == ".json"
        raw = json.loads(text, object_pairs_hook=_without_repetition) if is_json else tomllib.loads(text)
    except RecursionError:
        raise ValueError(f"{where}: it is nested too deeply; it must hold names and values") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{where}: it must hold names and values, got {type(raw).__name__}")
    if is_json:
        check(not {"rounds", "num_rounds"} <= {*raw}, where, "rounds and num_rounds", "with one of the two")
    return check_options(from_saved(raw) if is_json else raw, where, method)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the dict of an object in a JSON file; raises `ValueError` for a name that it has twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} is given twice")
    return found
