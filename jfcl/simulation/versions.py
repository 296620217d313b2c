"""The configuration and the versions that made a folder: that of another version of jfcl is refused, and named."""

import warnings
from pathlib import Path
from typing import Any

import jax

from jfcl._version import __version__
from jfcl.core.files import read_json

UNCHANGED = "nothing was changed"
VERSIONS = {"jfcl": __version__, "jax": jax.__version__}


def check_version(folder: Path, versions: Any) -> None:
    """Raises `ValueError` unless `folder` was made by this version of jfcl: the first two numbers are the same."""
    if not isinstance(versions, dict) or not isinstance(versions.get("jfcl"), str):
        raise ValueError(f"{folder} is damaged, or was not made by jfcl: it has no versions")
    version = versions["jfcl"]
    if version.split(".")[:2] != __version__.split(".")[:2]:
        remedy = f"use that version (pip install jfcl=={version}), or run it again in another folder"
        raise ValueError(f"{folder} was made by jfcl {version}, and this is jfcl {__version__}: {remedy}; {UNCHANGED}")


def warn_of_versions(folder: Path, versions: dict[str, Any]) -> None:
    """Warns where a folder is resumed with another version of jax, or another release of this version of jfcl."""
    if versions != VERSIONS:
        old, new = (", ".join(f"{name} {version}" for name, version in v.items()) for v in (versions, VERSIONS))
        what = "what is computed from here on may differ from what the former versions compute"
        warnings.warn(f"{folder} was begun with {old}, and is resumed with {new}: {what}", stacklevel=5)


def saved_config(folder: str | Path) -> dict[str, Any]:
    """Returns the content of a run's `config.json`; `ValueError` if it is damaged or of another version of jfcl."""
    file = Path(folder) / "config.json"
    config = read_json(file, sealed=False)
    check_version(Path(folder), config.get("versions"))
    rounds = config.get("num_rounds", 0)
    if type(rounds) is not int or rounds < 0:
        raise ValueError(f"{file} is damaged: num_rounds is {rounds!r}")
    return config
