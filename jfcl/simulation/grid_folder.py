"""The folder of a sweep.

    setting.json   grid, seeds, rounds and configuration     cells/NUMBER.json   a finished cell
    sweep.json     all cells and the best                    heatmap.png         the first two options
    lock           the process that writes, or wrote last

`setting.json` and the cells hold their own digests, and a cell that of its setting. Every file becomes visible whole.
"""

import contextlib
import hashlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from jfcl.core import files
from jfcl.simulation.folder import check_folder, check_setting, environment
from jfcl.simulation.records import spelled
from jfcl.simulation.versions import VERSIONS, warn_of_versions

FORMAT = 1


class SweepFolder:
    """The files of one sweep, for the process that holds the folder's lock."""

    def __init__(self, path: str | Path, setting: dict[str, Any]):
        self.path, self._setting = Path(path), setting
        self._run = hashlib.sha256(json.dumps(setting, sort_keys=True).encode()).hexdigest()

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: str | Path, setting: dict[str, Any], resume: bool) -> Iterator[Self]:
        """Yields the folder of a new sweep, or of the sweep to resume, without what a stopped one has left.

        Raises:
          ValueError: as `check_folder`; a sweep with another setting; another process writes the folder. Nothing was
            changed.
        """
        folder = cls(path, json.loads(json.dumps(spelled(setting))))
        file = folder.path / "setting.json"
        resume = resume and file.exists()
        if not resume:
            folder.path.mkdir(parents=True, exist_ok=True)
        with files.lock(folder.path / "lock"):
            check_folder(path, resume, "sweep")
            if resume:
                warn_of_versions(folder.path, check_setting(file, folder._setting, "sweep", FORMAT))
            files.sign(folder.path / "lock")
            for place in (folder.path, folder.path / "cells"):
                files.remove_leftovers(place)
            (folder.path / "cells").mkdir(exist_ok=True)
            if not resume:
                begun = {"format": FORMAT, "setting": folder._setting, "versions": VERSIONS}
                files.write_json(file, files.seal(begun))
            yield folder

    def finished(self, cells: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
        """Returns `per_seed` of the finished cells; one that is damaged is left out, with a warning."""
        finished = {}
        for i, values in enumerate(cells):
            file = self._file(i)
            if not file.exists():
                continue
            try:
                cell = files.read_json(file, check_format=FORMAT)
                if cell.get("sweep") != self._run or cell.get("values") != spelled(values):
                    raise ValueError(f"{file} is of another sweep")
                finished[i] = cell["per_seed"]
            except ValueError as error:
                warnings.warn(f"{error}; the cell runs again", stacklevel=3)
        return finished

    def _file(self, cell: int) -> Path:
        return self.path / "cells" / f"{cell:05d}.json"

    def keep(self, cell: int, values: dict[str, Any], per_seed: list[dict[str, Any]]) -> None:
        """Writes a finished cell."""
        content = {"format": FORMAT, "sweep": self._run, "cell": cell, "values": values, "per_seed": per_seed}
        files.write_json(self._file(cell), files.seal(spelled(content)))

    def finish(self, best: int | None, cells: list[dict[str, Any]], picture: bytes | None) -> None:
        """Writes `sweep.json`, and `heatmap.png` if there is one."""
        result = {"format": FORMAT, **self._setting, "best": best, "cells": spelled(cells), **environment()}
        contents = {} if picture is None else {"heatmap.png": picture}
        files.replace_together(self.path, contents | {"sweep.json": files.json_bytes(files.seal(result))})
