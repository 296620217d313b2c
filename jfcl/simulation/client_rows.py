"""The rows that a method keeps of every client of a population, on the host; those of a cohort go to the device.

Small rows are in memory and part of every checkpoint. Large rows are a file, read through a memory map and changed in
place by plain writes, so that a full disk is an error and not a signal. The file has two places for each client's row.
A checkpoint says which one holds it, with the CRC-32 of every row, and until the next checkpoint changes go to the
other place: a run that was killed finds the rows of its last checkpoint as they were. The file is sparse: a place that
was never written takes no room. All rows are verified before a run is resumed.
"""

import os
import tempfile
import weakref
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jfcl.core import files, plain
from jfcl.data.store import ROWS_IN_MEMORY


class ClientRows:
    """`[N, ...]` arrays; only the rows of clients that have taken part are meaningful.

    Attributes:
      seen: `[N]` bool: clients with a row that has been written.
      mapped: whether they are a file.

    Example:
      >>> rows = ClientRows(3, [jax.ShapeDtypeStruct((2,), np.float32)])
      >>> rows.write(np.array([1]), [np.float32([[5, 6]])])
      >>> rows.take(np.array([1, 2]), lambda: [np.zeros((2, 2), np.float32)])[0].tolist(), rows.seen.tolist()
      ([[5.0, 6.0], [0.0, 0.0]], [False, True, False])
    """

    def __init__(
        self,
        count: int,
        row: Sequence[jax.ShapeDtypeStruct],
        *,
        folder: Path | None = None,
        resume: bool = False,
        in_memory: float = ROWS_IN_MEMORY,
    ):
        """Makes the rows of `count` clients, in `folder` where they have more than `in_memory` bytes.

        With `resume`, opens the file of a checkpoint, which must be whole; `restore` follows.
        """
        dtype = np.dtype([(f"{i}", r.dtype, r.shape) for i, r in enumerate(row)])  # a client's row, without gaps
        self.mapped = count * dtype.itemsize > in_memory
        self.seen = np.zeros(count, bool)
        self._place, self._free = np.zeros((2, count), np.int8)  # of the present row, and of the next one
        self._crc = np.zeros(count if self.mapped else 0, np.uint32)  # of each client's row
        if not self.mapped:
            self._table = np.zeros((1, count), dtype)
        elif folder is not None:
            self._open(folder, (2, count), dtype, resume)
        else:  # unlinked at once: the system frees its room with the array, or at the end of the process
            with tempfile.TemporaryDirectory(prefix="jfcl-", ignore_cleanup_errors=True) as scratch:
                self._open(Path(scratch), (2, count), dtype, False)

    def _open(self, folder: Path, shape: tuple[int, int], dtype: np.dtype, resume: bool) -> None:
        self._file, wanted = folder / "rows.bin", shape[0] * shape[1] * dtype.itemsize
        if not resume:
            folder.mkdir(parents=True, exist_ok=True)
            with files.new_file(self._file) as descriptor:
                os.ftruncate(descriptor, wanted)
            files.sync(folder)
            files.sync(folder.parent)
        try:
            self._descriptor = plain.open_plain(self._file, os.O_RDWR)
        except FileNotFoundError:
            raise ValueError(f"{self._file} is missing: the rows of the last checkpoint are lost") from None
        weakref.finalize(self, os.close, self._descriptor)
        size = os.fstat(self._descriptor).st_size
        if size != wanted:
            raise ValueError(f"{self._file} was cut short or is damaged: it has {size} bytes, not {wanted}")
        with os.fdopen(self._descriptor, "rb", closefd=False) as file:
            self._table = np.memmap(file, dtype, "r", shape=shape).view(np.ndarray)

    @property
    def arrays(self) -> list[np.ndarray]:
        """All rows, `[N, ...]` each; copies of those in a file."""
        columns, every = range(len(self._table.dtype)), np.arange(len(self.seen))
        return [self.column(i, every) if self.mapped else self._table[f"{i}"][0] for i in columns]

    def column(self, i: int, ids: np.ndarray) -> np.ndarray:
        """Returns one array of the rows of clients `ids`, `[C, ...]`."""
        return self._table[f"{i}"][self._place[ids], ids]

    def take(self, ids: np.ndarray, fresh: Callable[[], Sequence[np.ndarray]]) -> list[np.ndarray]:
        """Returns the rows `[C, ...]` of clients `ids`; for clients never seen, those of `fresh()` `[C, ...]`."""
        new = ~self.seen[ids]
        if not new.any():
            return [self.column(i, ids) for i in range(len(self._table.dtype))]
        taken = [np.array(start) for start in fresh()]
        for i, rows in enumerate(taken):
            rows[~new] = self.column(i, ids[~new])
        return taken

    def write(self, ids: np.ndarray, rows: Sequence[np.ndarray]) -> None:
        """Sets the rows of `ids`. The operation is idempotent."""
        table = np.zeros(len(ids), self._table.dtype)
        for i, values in enumerate(rows):
            table[f"{i}"] = values
        place = self._free[ids]
        if self.mapped:
            first = (place.astype(np.int64) * len(self.seen) + ids) * table.dtype.itemsize
            with files.named(self._file):
                for start, row in zip(first.tolist(), _bytes(table), strict=True):
                    files.write_all(self._descriptor, row, start)
            self._crc[ids] = _checksums(table)
        else:
            self._table[place, ids] = table
        self._place[ids], self.seen[ids] = place, True

    def saved(self) -> dict[str, Any]:
        """Returns the part of a checkpoint that describes the rows."""
        return {"seen": self.seen, "crc": self._crc, "rows": [self._place] if self.mapped else self.arrays}

    def checkpointing(self) -> None:
        """Prepares a checkpoint: its rows are on the disk before it is written."""
        if self.mapped:
            os.fsync(self._descriptor)

    def checkpointed(self) -> None:
        """Keeps the rows of a checkpoint with `saved` that was written: others go to the other place."""
        if self.mapped:
            self._free[:] = self.seen & (self._place == 0)

    def restore(self, saved: dict[str, Any]) -> None:
        """Returns the rows to a checkpoint.

        Raises:
          ValueError: rows in the file are not those of the checkpoint; nothing was changed.
        """
        if self.mapped:
            (place,), seen = saved["rows"], np.flatnonzero(saved["seen"])
            for ids in np.array_split(seen, range(4096, len(seen), 4096)):
                wrong = ids[_checksums(self._table[place[ids], ids]) != saved["crc"][ids]]
                if len(wrong):
                    what = f"the row of client {wrong[0]} differs from its checksum; without the folder checkpoints/"
                    raise ValueError(f"{self._file} is damaged: {what} the run begins again")
            self._place[:] = place
        else:
            for array, values in zip(self.arrays, saved["rows"], strict=True):
                array[:] = values
        self.seen[:], self._crc[:] = saved["seen"], saved["crc"]
        self.checkpointed()


def _bytes(table: np.ndarray) -> np.ndarray:
    """Returns the bytes of each row, `[C, row]`."""
    return np.ascontiguousarray(table).view(np.uint8).reshape(len(table), table.dtype.itemsize)


def _checksums(table: np.ndarray) -> np.ndarray:
    """Returns the CRC-32 of each row, `[C]` uint32."""
    return np.array([zlib.crc32(row) for row in _bytes(table)], np.uint32)
