"""The rows that a method keeps of every client of a population, on the host; those of a cohort go to the device.

Small rows are in memory and part of every checkpoint. Large rows are a file, read through a memory map and changed in
place by plain writes, so that a full disk is an error and not a signal. A journal keeps the rows that are overwritten
after a checkpoint, so that a run that was killed can return to it:

    rows.bin           `[N]` rows, one after the other; sparse: a client that never took part takes no room
    undo-00000120      the contents, at the checkpoint of round 120, of all rows that have changed since

Every record of the journal carries its SHA-256, every row a CRC-32 in the checkpoint; both are verified before a run is
resumed.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jfcl.core import files, plain
from jfcl.data.population import ROWS_IN_MEMORY


class ClientRows:
    """`[N, ...]` arrays; only the rows of clients that have taken part are meaningful.

    Attributes:
      arrays: a list of `[N, ...]`, read-only by convention.
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

        With `resume`, opens the file of a checkpoint, which must be whole; nothing is written before `restore`.
        """
        dtype = np.dtype([(f"{i}", r.dtype, r.shape) for i, r in enumerate(row)])  # a client's row, without gaps
        self.mapped = count * dtype.itemsize > in_memory
        self.folder = folder if self.mapped else None
        self.seen = np.zeros(count, bool)
        self._crc = np.zeros(count if self.mapped else 0, np.uint32)  # of each client's row
        self._journal: Path | None = None
        if not self.mapped:
            self._table = np.zeros(count, dtype)
        elif folder is not None:
            self._open(folder, count, dtype, resume)
        else:  # unlinked at once: the system frees its room with the array, or at the end of the process
            with tempfile.TemporaryDirectory(prefix="jfcl-", ignore_cleanup_errors=True) as scratch:
                self._open(Path(scratch), count, dtype, False)
        self.arrays = [self._table[name] for name in dtype.names or ()]

    def _open(self, folder: Path, count: int, dtype: np.dtype, resume: bool) -> None:
        self._file = folder / "rows.bin"
        if not resume:
            folder.mkdir(parents=True, exist_ok=True)
            with files.new_file(self._file) as descriptor:
                os.ftruncate(descriptor, count * dtype.itemsize)
        try:
            self._descriptor = plain.open_plain(self._file, os.O_RDWR)
        except FileNotFoundError:
            raise ValueError(f"{self._file} is missing: the rows of the last checkpoint are lost") from None
        weakref.finalize(self, os.close, self._descriptor)
        size, wanted = os.fstat(self._descriptor).st_size, count * dtype.itemsize
        if size != wanted:
            raise ValueError(f"{self._file} was cut short or is damaged: it has {size} bytes, not {wanted}")
        with os.fdopen(self._descriptor, "rb", closefd=False) as file:
            self._table = np.memmap(file, dtype, "r", shape=(count,)).view(np.ndarray)

    def take(self, ids: np.ndarray, fresh: Callable[[], Sequence[np.ndarray]]) -> list[np.ndarray]:
        """Returns the rows `[C, ...]` of clients `ids`; for clients never seen, those of `fresh()` `[C, ...]`."""
        new = ~self.seen[ids]
        if not new.any():
            return [array[ids] for array in self.arrays]
        taken = [np.array(start) for start in fresh()]
        for rows, array in zip(taken, self.arrays, strict=True):
            rows[~new] = array[ids[~new]]
        return taken

    def write(self, ids: np.ndarray, rows: Sequence[np.ndarray]) -> None:
        """Sets the rows of `ids`. The operation is idempotent."""
        table = np.zeros(len(ids), self._table.dtype)
        for name, values in zip(table.dtype.names or (), rows, strict=True):
            table[name] = values
        if self._journal is not None:
            old = ids[self.seen[ids]].astype(np.int64)
            data = old.tobytes() + self._table[old].tobytes()
            with files.opened(self._journal, os.O_WRONLY | os.O_APPEND) as descriptor:
                files.write_all(descriptor, len(data).to_bytes(8, "little") + hashlib.sha256(data).digest() + data)
                os.fsync(descriptor)  # complete and durable before the first row changes
        self._put(ids, table)
        self.seen[ids] = True

    def _put(self, ids: np.ndarray, table: np.ndarray) -> None:
        if not self.mapped:
            self._table[ids] = table
            return
        with files.named(self._file):
            for c, row in zip(ids.tolist(), _bytes(table), strict=True):
                files.write_all(self._descriptor, row, c * row.nbytes)
        self._crc[ids] = _checksums(table)

    def saved(self) -> dict[str, Any]:
        """Returns the part of a checkpoint that describes the rows."""
        return {"seen": self.seen, "crc": self._crc, "rows": [] if self.mapped else self.arrays}

    def checkpointing(self, round_: int) -> None:
        """Prepares a checkpoint of `round_`: its journal and its rows are on the disk before it is written."""
        if self.folder is not None:
            self._empty(self.folder / f"undo-{round_:08d}")
            os.fsync(self._descriptor)

    def checkpointed(self, round_: int) -> None:
        """Begins a new journal, after a checkpoint of `round_` with `saved` was written."""
        if self.folder is not None:
            self._journal = self.folder / f"undo-{round_:08d}"
            self._empty(self._journal)
            for old in self.folder.glob("undo-*"):
                if old != self._journal:
                    old.unlink()

    def _empty(self, journal: Path) -> None:
        """Makes a journal, or empties one in place. If the disk fails the file stays: a checkpoint may need it."""
        with files.opened(journal, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as descriptor:
            os.fsync(descriptor)
        files.sync(self.folder)

    def restore(self, round_: int, saved: dict[str, Any]) -> None:
        """Returns the rows to the checkpoint of `round_`.

        Raises:
          ValueError: the rows, with the journal applied, are not those of the checkpoint; nothing was changed.
        """
        changes = []
        if self.folder is not None:
            changes = self._changes(round_)
            self._verify(changes, saved)
        self.seen[:] = saved["seen"]
        self._crc[:] = saved["crc"]
        for array, values in zip(self.arrays, saved["rows"], strict=not self.mapped):
            array[:] = values
        for ids, table in changes:
            self._put(ids, table)
        if self.folder is not None:
            os.fsync(self._descriptor)  # before the journal is removed
            self.checkpointed(round_)

    def _verify(self, changes: Sequence[tuple[np.ndarray, np.ndarray]], saved: dict[str, Any]) -> None:
        before: dict[int, int] = {}  # checksums of the former contents of changed rows; the earliest record counts
        for ids, table in changes:
            before |= dict(zip(ids.tolist(), _checksums(table).tolist(), strict=True))
        seen = np.flatnonzero(saved["seen"])
        for start in range(0, len(seen), 4096):
            ids = seen[start : start + 4096]
            now = _checksums(self._table[ids]).tolist()
            now = np.array([before.get(c, crc) for c, crc in zip(ids.tolist(), now, strict=True)])
            wrong = ids[now != saved["crc"][ids]]
            if len(wrong):
                raise ValueError(f"{self.folder} is damaged: the row of client {wrong[0]} differs from its checksum")

    def _changes(self, round_: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns the ids and former rows of all changes since the checkpoint of `round_`, the latest first."""
        journal = self.folder / f"undo-{round_:08d}"
        if not journal.exists():
            without = "without the folder checkpoints/ the run begins again"
            raise ValueError(f"{journal} is missing: the rows of that checkpoint are lost; {without}")
        dtype, changes = self._table.dtype, []
        for data in _records(journal):
            count = len(data) // (8 + dtype.itemsize)
            changes.append((np.frombuffer(data, np.int64, count), np.frombuffer(data, dtype, count, 8 * count)))
        return changes[::-1]


def _bytes(table: np.ndarray) -> np.ndarray:
    """Returns the bytes of each row, `[C, row]`."""
    return np.ascontiguousarray(table).view(np.uint8).reshape(len(table), table.dtype.itemsize)


def _checksums(table: np.ndarray) -> np.ndarray:
    """Returns the CRC-32 of each row, `[C]` uint32."""
    return np.array([zlib.crc32(row) for row in _bytes(table)], np.uint32)


def _records(journal: Path) -> Iterator[bytes]:
    """Yields the records of a journal, without a last one that was cut short: its rows were not overwritten.

    Raises:
      ValueError: another record is damaged.
    """
    data, position = plain.read_bytes(journal), 0
    while position + 40 <= len(data):
        length = int.from_bytes(data[position : position + 8], "little")
        digest, body = data[position + 8 : position + 40], data[position + 40 : position + 40 + length]
        position += 40 + length
        if position > len(data):
            break
        if hashlib.sha256(body).digest() != digest:
            if position == len(data):
                break
            raise ValueError(f"{journal} is damaged: a record differs from its digest")
        yield body
