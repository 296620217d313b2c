"""The rows that a method keeps of every client of a population, on the host; those of a cohort go to the device.

Small rows are in memory and part of every checkpoint. Large rows are files, read through memory maps and changed in
place by plain writes, so that a full disk is an error and not a signal. A journal keeps the rows that are overwritten
after a checkpoint, so that a run that was killed can return to it:

    rows-00.npy, ...   `[N, ...]`, one file per array of the state; sparse: a client that never took part takes no room
    undo-00000120      the contents, at the checkpoint of round 120, of all rows that have changed since

Every record of the journal carries its SHA-256, every row a CRC-32 in the checkpoint; both are verified before a run is
resumed.
"""

from __future__ import annotations

import hashlib
import io
import os
import tempfile
import weakref
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jfcl.core import files, num_bytes, plain

IN_MEMORY = 2**28  # bytes of rows of all clients; more is memory-mapped


class ClientRows:
    """`[N, ...]` arrays; only the rows of clients that have taken part are meaningful.

    Attributes:
      arrays: a list of `[N, ...]`, read-only by convention.
      seen: `[N]` bool: clients with a row that has been written.
      mapped: whether they are files.

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
        in_memory: float = IN_MEMORY,
    ):
        """Makes or opens rows.

        Args:
          count: the number of clients.
          row: the shape and type of a row of each array.
          folder: for the files of large rows; default: files without a name.
          resume: open the files of a checkpoint; nothing is written before `restore`.
          in_memory: bytes of all rows beyond which they are files.

        Raises:
          ValueError: with `resume`, a file is missing or was cut short.
        """
        whole = [jax.ShapeDtypeStruct((count, *r.shape), r.dtype) for r in row]
        self.mapped = num_bytes(whole) > in_memory
        self.folder = folder if self.mapped else None
        self.seen = np.zeros(count, bool)
        self._crc = np.zeros(count if self.mapped else 0, np.uint32)  # of each client's row
        self._journal: Path | None = None
        self._files: list[_RowFile] = []
        if not self.mapped:
            self.arrays = [np.zeros(w.shape, w.dtype) for w in whole]
            return
        if folder is not None:
            if not resume:
                folder.mkdir(parents=True, exist_ok=True)
            self._files = _open(folder, whole, resume)
        else:  # unlinked at once: the system frees their room with the arrays, or at the end of the process
            with tempfile.TemporaryDirectory(prefix="jfcl-", ignore_cleanup_errors=True) as scratch:
                self._files = _open(Path(scratch), whole, False)
        self.arrays = [file.array for file in self._files]

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
        if self._journal is not None:
            old = ids[self.seen[ids]]
            buffer = io.BytesIO()
            np.savez(buffer, ids=old, **{f"{i}": array[old] for i, array in enumerate(self.arrays)})
            data = buffer.getvalue()
            with files.opened(self._journal, os.O_WRONLY | os.O_APPEND) as descriptor:
                files.write_all(descriptor, len(data).to_bytes(8, "little") + hashlib.sha256(data).digest() + data)
                os.fsync(descriptor)  # complete and durable before the first row changes
        rows = [np.asarray(values, array.dtype) for array, values in zip(self.arrays, rows, strict=True)]
        self._put(ids, rows)
        if self.mapped:
            self._crc[ids] = _checksums(rows)
        self.seen[ids] = True

    def _put(self, ids: np.ndarray, rows: Sequence[np.ndarray]) -> None:
        for i, values in enumerate(rows):
            if self.mapped:
                self._files[i].write(ids, values)
            else:
                self.arrays[i][ids] = values

    def saved(self) -> dict[str, Any]:
        """Returns the part of a checkpoint that describes the rows."""
        return {"seen": self.seen, "crc": self._crc, "rows": [] if self.mapped else self.arrays}

    def checkpointing(self, round_: int) -> None:
        """Prepares a checkpoint of `round_`: its journal and its rows are on the disk before it is written."""
        if self.folder is not None:
            self._empty(self.folder / f"undo-{round_:08d}")
            self._sync()

    def checkpointed(self, round_: int) -> None:
        """Begins a new journal, after a checkpoint of `round_` with `saved` was written."""
        if self.folder is not None:
            self._journal = self.folder / f"undo-{round_:08d}"
            self._empty(self._journal)
            for old in self.folder.glob("undo-*"):
                if old != self._journal:
                    old.unlink()

    def _sync(self) -> None:
        for file in self._files:
            os.fsync(file.descriptor)

    def _empty(self, journal: Path) -> None:
        """Makes a journal, or empties one in place. If the disk fails the file stays: a checkpoint may need it."""
        with files.opened(journal, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as descriptor:
            os.fsync(descriptor)
        files.sync(self.folder)

    def verify(self, round_: int, saved: dict[str, Any]) -> None:
        """`ValueError` unless the rows, with the journal applied, are those of the checkpoint. Writes nothing."""
        if self.folder is None:
            return
        old: dict[int, int] = {}  # checksums of the former contents of changed rows; the earliest record counts
        for ids, rows in self._undo(round_):
            old |= dict(zip(ids.tolist(), _checksums(rows).tolist(), strict=True))
        seen = np.flatnonzero(saved["seen"])
        for start in range(0, len(seen), 4096):
            ids = seen[start : start + 4096]
            found = _checksums([array[ids] for array in self.arrays])
            found = np.array([old.get(c, crc) for c, crc in zip(ids.tolist(), found.tolist(), strict=True)])
            wrong = ids[found != saved["crc"][ids]]
            if len(wrong):
                raise ValueError(f"{self.folder} is damaged: the row of client {wrong[0]} differs from its checksum")

    def restore(self, round_: int, saved: dict[str, Any]) -> None:
        """Returns the rows to the checkpoint of `round_`, which `verify` has accepted."""
        self.seen[:] = saved["seen"]
        self._crc[:] = saved["crc"]
        if not self.mapped:
            for array, values in zip(self.arrays, saved["rows"], strict=True):
                array[:] = values
        elif self.folder is not None:
            for ids, rows in self._undo(round_):
                self._put(ids, rows)
            self._sync()  # before the journal is removed
            self.checkpointed(round_)

    def _undo(self, round_: int) -> list[tuple[np.ndarray, list[np.ndarray]]]:
        """Returns the ids and former rows of all changes since the checkpoint of `round_`, the latest first."""
        journal = self.folder / f"undo-{round_:08d}"
        if not journal.exists():
            raise ValueError(f"{journal} is missing: the rows of that checkpoint are lost")
        return _records(journal)[::-1]


def _checksums(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the CRC-32 of each client's row over all arrays `[C, ...]`, `[C]` uint32."""
    totals = [0] * (len(rows[0]) if rows else 0)
    for values in rows:
        if values.size:
            flat = np.ascontiguousarray(values).reshape(len(totals), -1).view(np.uint8)
            totals = [zlib.crc32(row, total) for row, total in zip(flat, totals, strict=True)]
    return np.array(totals, np.uint32)


class _RowFile:
    """An `.npy` file of `[N, ...]` rows: `array`, a memory map for reads, and `descriptor`, for writes."""

    def __init__(self, file: Path, array: np.memmap):
        self.array, self._path, self._offset = array.view(np.ndarray), file, array.offset
        self.descriptor = plain.open_plain(file, os.O_WRONLY)
        weakref.finalize(self, os.close, self.descriptor)

    def write(self, ids: np.ndarray, values: np.ndarray) -> None:
        """Sets the rows `ids` to `values` `[C, ...]`."""
        if not len(ids):  # no client has answered, or no row was overwritten
            return
        flat = np.ascontiguousarray(values).reshape(len(ids), -1).view(np.uint8)
        with files.named(self._path):
            for c, data in zip(ids.tolist(), flat, strict=True):
                files.write_all(self.descriptor, data, self._offset + c * data.nbytes)


def _open(folder: Path, whole: Sequence[jax.ShapeDtypeStruct], resume: bool) -> list[_RowFile]:
    found = []
    for i, wanted in enumerate(whole):
        file = folder / f"rows-{i:02d}.npy"
        if not resume:
            file.unlink(missing_ok=True)
            np.lib.format.open_memmap(file, mode="w+", dtype=wanted.dtype, shape=wanted.shape)
        try:
            array = np.lib.format.open_memmap(file, mode="r")
        except FileNotFoundError:
            raise ValueError(f"{file} is missing: the rows of the last checkpoint are lost") from None
        except files.BAD_ARRAY as error:
            raise ValueError(f"{file} was cut short or is damaged: {error}") from None
        if array.dtype == np.dtype(f"V{wanted.dtype.itemsize}"):  # of bfloat16, which files of NumPy do not have
            array = array.view(wanted.dtype)
        if (array.shape, array.dtype) != (wanted.shape, wanted.dtype):
            raise ValueError(f"{file} must hold {wanted.dtype} {wanted.shape}, got {array.dtype} {array.shape}")
        found.append(_RowFile(file, array))
    return found


def _records(journal: Path) -> list[tuple[np.ndarray, list[np.ndarray]]]:
    """Returns the ids and rows of a journal, without a last record that was cut short: its rows were not overwritten.

    Raises:
      ValueError: another record is damaged.
    """
    data = plain.read_bytes(journal)
    records, position = [], 0
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
        with np.load(io.BytesIO(body)) as record:
            records.append((record["ids"], [record[f"{i}"] for i in range(len(record.files) - 1)]))
    return records
