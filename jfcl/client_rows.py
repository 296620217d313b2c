"""What a method keeps of every client of a population, on the host: rows that go to the device with their cohort.

Small ones are in memory and part of every checkpoint. Large ones are memory-mapped files, changed in place; what they
overwrite since the last checkpoint is kept in a journal, so that a run that was killed finds its way back to it:

    rows-00.npy, ...   `[N, ...]`, one file per array of the state; sparse: clients that never took part take no room
    undo-00000120      what rows held when the checkpoint of round 120 was made, where they have changed since
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

IN_MEMORY = 2**28  # bytes of rows of all clients; more is memory-mapped


class ClientRows:
    """`[N, ...]` arrays, of which the rows of clients that have taken part mean something.

    Attributes:
      arrays: a list of `[N, ...]`.
      seen: `[N]` bool: clients whose row has been written.
      mapped: whether they are files.

    Example:
      >>> rows = ClientRows(3, [jax.ShapeDtypeStruct((2,), np.float32)])
      >>> rows.write(np.array([1]), [np.float32([[5, 6]])])
      >>> rows.take(np.array([1, 2]), [np.zeros((2, 2), np.float32)])[0].tolist(), rows.seen.tolist()
      ([[5.0, 6.0], [0.0, 0.0]], [False, True, False])
    """

    def __init__(
        self,
        count: int,
        row: Sequence[jax.ShapeDtypeStruct],
        *,
        folder: Path | None = None,
        resume: bool = False,
        in_memory: float = IN_MEMORY,
    ):
        """Rows of `count` clients. `row`: the shape and type of each array's; `folder`: where large ones are kept.

        With `resume` they are those of a checkpoint: `ValueError` for a file that is missing or was cut short.
        """
        shapes = [(count, *r.shape) for r in row]
        self.mapped = (
            sum(np.prod(s, dtype=float) * r.dtype.itemsize for s, r in zip(shapes, row, strict=True)) > in_memory
        )
        self.folder = folder if self.mapped else None
        self.seen = np.zeros(count, bool)
        self._journal: Path | None = None
        if not self.mapped:
            self.arrays = [np.zeros(s, r.dtype) for s, r in zip(shapes, row, strict=True)]
        elif folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self.arrays = _open(folder, shapes, row, resume)
        else:  # unlinked at once: the system frees their room when the arrays are gone, however that happens
            with tempfile.TemporaryDirectory(prefix="jfcl-", ignore_cleanup_errors=True) as scratch:
                self.arrays = _open(Path(scratch), shapes, row, False)

    def take(self, ids: np.ndarray, fresh: Sequence[np.ndarray] | None) -> list[np.ndarray]:
        """The rows `[C, ...]` of clients `ids`; of those never seen, the rows of `fresh` `[C, ...]`."""
        new = ~self.seen[ids]
        taken = [array[ids] for array in self.arrays]
        if new.any():
            for mine, start in zip(taken, fresh, strict=True):
                mine[new] = np.asarray(start)[new]
        return taken

    def all_seen(self, ids: np.ndarray) -> bool:
        """Whether each of `ids` has a row."""
        return bool(self.seen[ids].all())

    def write(self, ids: np.ndarray, rows: Sequence[np.ndarray]) -> None:
        """Sets the rows of `ids`. Doing it twice does no harm."""
        if self._journal is not None:
            old = ids[self.seen[ids]]
            buffer = io.BytesIO()
            np.savez(buffer, ids=old, **{f"{i}": array[old] for i, array in enumerate(self.arrays)})
            data = buffer.getvalue()
            with self._journal.open("ab") as f:  # complete before the first row changes
                f.write(len(data).to_bytes(8, "little") + data)
        for array, values in zip(self.arrays, rows, strict=True):
            array[ids] = values
        self.seen[ids] = True

    def saved(self) -> dict[str, Any]:
        """What belongs into a checkpoint."""
        return {"seen": self.seen, "rows": [] if self.mapped else self.arrays}

    def checkpointing(self, round_: int) -> None:
        """A checkpoint of `round_` is about to be written: its journal is there before it."""
        if self.folder is not None:
            (self.folder / f"undo-{round_:08d}").write_bytes(b"")

    def checkpointed(self, round_: int) -> None:
        """A checkpoint of `round_` was written, with `saved` in it: the journal starts anew."""
        if self.folder is not None:
            self._journal = self.folder / f"undo-{round_:08d}"
            self._journal.write_bytes(b"")
            for old in self.folder.glob("undo-*"):
                if old != self._journal:
                    old.unlink()

    def restore(self, round_: int, saved: dict[str, Any]) -> None:
        """Goes back to the checkpoint of `round_`; `ValueError` if its journal is missing."""
        self.seen[:] = saved["seen"]
        if not self.mapped:
            for array, values in zip(self.arrays, saved["rows"], strict=True):
                array[:] = values
        elif self.folder is not None:
            journal = self.folder / f"undo-{round_:08d}"
            if not journal.exists():
                raise ValueError(f"{journal} is missing: what clients had at that checkpoint is lost")
            for record in reversed(_records(journal)):
                for i, array in enumerate(self.arrays):
                    array[record["ids"]] = record[f"{i}"]
            self.checkpointed(round_)


def _open(folder: Path, shapes, row, resume: bool) -> list[np.ndarray]:
    arrays = []
    for i, (shape, r) in enumerate(zip(shapes, row, strict=True)):
        file = folder / f"rows-{i:02d}.npy"
        if resume:
            try:
                np.lib.format.open_memmap(file, mode="r")  # "r+" would make a short file longer
                array = np.lib.format.open_memmap(file, mode="r+")
            except FileNotFoundError:
                raise ValueError(f"{file} is missing: what clients had at the last checkpoint is lost") from None
            except (ValueError, OSError) as error:
                raise ValueError(f"{file} was cut short or is damaged: {error}") from None
            if (array.shape, array.dtype) != (shape, r.dtype):
                raise ValueError(f"{file} must hold {r.dtype} {shape}, got {array.dtype} {array.shape}")
        else:
            array = np.lib.format.open_memmap(file, mode="w+", dtype=r.dtype, shape=shape)
        arrays.append(array.view(np.ndarray))
    return arrays


def _records(journal: Path) -> list[dict[str, np.ndarray]]:
    """What a journal holds; its last record may have been cut short, and then nothing of it had been overwritten."""
    data = journal.read_bytes()
    records, position = [], 0
    while position + 8 <= len(data):
        length = int.from_bytes(data[position : position + 8], "little")
        position += 8
        if position + length > len(data):
            break
        with np.load(io.BytesIO(data[position : position + length])) as record:
            records.append(dict(record))
        position += length
    return records
