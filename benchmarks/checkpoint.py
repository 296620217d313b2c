"""How fast a checkpoint is saved and restored, beside the speed of the disk in the same run.

    python benchmarks/checkpoint.py [--gigabytes 1] [--folder DIR]

`plain write` writes the same bytes to one file and waits for the disk (`fsync`): the floor. A checkpoint hashes every
array while it is written; restoring it reads the file and compares the digests.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from common import report

from jfcl.simulation.folder import RunFolder

REPEATS = 5


def seconds(fn: Callable[[], object]) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    fn()
    return time.perf_counter() - started


def plain_write(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """The bytes of all arrays in one file, on the disk on return."""
    with path.open("wb", buffering=0) as f:
        for array in arrays.values():
            view = memoryview(array).cast("B")
            while len(view):
                view = view[f.write(view) :]
        os.fsync(f.fileno())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--folder", type=Path, default=Path("."), help="on the disk to be measured")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    rows_of_state = int(args.gigabytes * 1e9 / 8 / 1000 / 4)
    state = {f"layer {i}": rng.random((rows_of_state, 1000), np.float32) for i in range(8)}
    size = sum(array.nbytes for array in state.values())
    args.folder.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=args.folder))
    found: dict[str, list[float]] = {"plain write": [], "save": [], "restore": []}
    try:
        for i in range(REPEATS):  # one after the other, since disks of shared machines change their speed
            found["plain write"].append(seconds(lambda: plain_write(place / "plain", state)))
            (place / "plain").unlink()
            with RunFolder.open(place / f"run-{i}", {}) as folder:
                found["save"].append(seconds(lambda folder=folder: folder.save(1, state, {})))
                found["restore"].append(seconds(lambda folder=folder: folder.restore(state)))
            shutil.rmtree(place / f"run-{i}")
    finally:
        shutil.rmtree(place, ignore_errors=True)
    floor = np.median(found["plain write"])
    rows = [
        {
            "what": what,
            "gb": size / 1e9,
            "seconds": float(np.median(times)),
            "fastest": min(times),
            "slowest": max(times),
            "gb/s": size / 1e9 / float(np.median(times)),
            "speed_of_plain_write": None if what == "restore" else float(floor / np.median(times)),
        }
        for what, times in found.items()
    ]
    report("checkpoint", "A checkpoint", list(rows[0]), rows)


if __name__ == "__main__":
    main()
