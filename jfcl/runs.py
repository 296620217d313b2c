"""A run's folder: configuration, metrics line by line, checkpoints. Written so that killing the process loses nothing.

    config.json     what was asked for          metrics.jsonl   a line per seed and evaluated round
    summary.json    the result                  clients.csv     final results of every client
    checkpoints/    the last two states         plots/*.png
    store/          a population's data         client_rows/    what a method keeps of its clients, where that is large

Only the process that runs a simulation writes here; everything is written to a new file and renamed, or appended in
whole lines.
"""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jfcl.core import PyTree

# May differ between a run and its resumption.
FREE = ("num_rounds", "out", "resume", "progress", "data_dir", "mapping", "chunk", "devices")
WRITTEN = (
    "metrics.jsonl",
    "summary.json",
    "clients.csv",
    "params.npz",
    "tree.npz",
    "paths.csv",
    "checkpoints",
    "plots",
)


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as JSON, whole or not at all."""
    scratch = path.with_name(path.name + ".tmp")
    scratch.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n")
    os.replace(scratch, path)


def read_json(path: Path) -> dict[str, Any]:
    """What `write_json` wrote; `ValueError` that names the file where it is damaged."""
    try:
        value = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is damaged: it must hold names and values, got {type(value).__name__}")
    return value


def finite_or_none(value: Any) -> Any:
    """`value` with NaN and infinities, which JSON does not have, as `None`; NumPy scalars and arrays as Python's."""
    if isinstance(value, dict):
        return {name: finite_or_none(v) for name, v in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [finite_or_none(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value


def _differ(name: str, old: Any, new: Any) -> str:
    """In what `old` and `new` differ, of dicts only the parts that do."""
    if isinstance(old, dict) and isinstance(new, dict):
        parts = [n for n in sorted({*old, *new}) if old.get(n) != new.get(n)]
        return "; ".join(_differ(f"{name}.{n}", old.get(n), new.get(n)) for n in parts)
    return f"{name}: it has {old!r}, asked for {new!r}"


class _Unfit(ValueError):
    """A checkpoint that can be read, but is of something else."""


class RunFolder:
    """The files of one run. Open it with `create` for a new run or `reopen` to go on with one."""

    def __init__(self, path: Path):
        self.path = Path(path)
        self._manager = None

    @classmethod
    def look(cls, path: str | Path, resume: bool) -> None:
        """`ValueError` where a new run could not begin in `path`, or (`resume`) none could go on."""
        there = (Path(path) / "config.json").exists()
        if resume and not there:
            raise ValueError(f"{path} holds no run to resume: config.json is missing")
        if there and not resume:
            raise ValueError(
                f"{path} already holds a run: resume it (--resume on the command line, resume=True in Python), or"
                " choose another folder"
            )

    @classmethod
    def create(cls, path: str | Path, config: dict[str, Any]) -> RunFolder:
        """A new run in `path`; `ValueError` if another one is there already."""
        folder = cls(path)
        cls.look(folder.path, False)
        if folder.path.exists() and not folder.path.is_dir():
            raise ValueError(f"{folder.path} is a file; the output folder must be a new or empty folder")
        there = [name for name in WRITTEN if (folder.path / name).exists()]
        if there:
            raise ValueError(f"{folder.path} holds {', '.join(there)} already; choose a new or empty folder")
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.metrics_path.write_text("")
        write_json(folder.path / "config.json", finite_or_none(config))
        return folder

    @classmethod
    def reopen(cls, path: str | Path, config: dict[str, Any]) -> RunFolder:
        """The run in `path`; `ValueError` if there is none or it was started with another configuration."""
        folder = cls(path)
        cls.look(folder.path, True)
        old = read_json(folder.path / "config.json")
        new = finite_or_none(config)
        missing = object()
        names = [n for n in sorted({*old, *new} - set(FREE)) if old.get(n, missing) != new.get(n, missing)]
        if names:
            said = "; ".join(_differ(n, old.get(n), new.get(n)) for n in names)
            raise ValueError(f"{folder.path} holds a run of another configuration ({said}); nothing was changed")
        if new.get("num_rounds", 0) > old.get("num_rounds", 0):
            (folder.path / "summary.json").unlink(missing_ok=True)  # it is no longer finished
            # So that it can be resumed from its own file again.
            write_json(folder.path / "config.json", old | {"num_rounds": new["num_rounds"]})
        return folder

    @property
    def metrics_path(self) -> Path:
        """`metrics.jsonl`."""
        return self.path / "metrics.jsonl"

    def has_checkpoint(self) -> bool:
        """Whether there is anything to restore, damaged or not."""
        return bool(self.manager.all_steps())

    @property
    def manager(self):
        """The orbax manager of `checkpoints/`."""
        if self._manager is None:
            import orbax.checkpoint as ocp  # takes a second to import, and most uses of jfcl need no checkpoint

            folder = (self.path / "checkpoints").absolute()
            folder.mkdir(parents=True, exist_ok=True)
            alone = ocp.options.MultiprocessingOptions(active_processes={0}, barrier_sync_key_prefix="first")
            options = ocp.CheckpointManagerOptions(
                max_to_keep=2,
                create=False,
                enable_async_checkpointing=False,
                multiprocessing_options=alone if jax.process_count() > 1 else ocp.options.MultiprocessingOptions(),
            )
            self._manager = ocp.CheckpointManager(folder, options=options)
        return self._manager

    def append(self, records: list[dict[str, Any]]) -> None:
        """Adds lines to `metrics.jsonl`."""
        with self.metrics_path.open("a") as f:
            f.write("".join(json.dumps(finite_or_none(r), allow_nan=False) + "\n" for r in records))

    def records(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`; a last line that was cut short by a kill is left out.

        Raises:
          ValueError: it is missing, or another line than the last is damaged.
        """
        if not self.metrics_path.exists():
            raise ValueError(f"{self.metrics_path} is missing")
        records, lines = [], self.metrics_path.read_text(errors="replace").splitlines()
        for i, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if isinstance(record, dict) and "round" in record:
                records.append(record)
            elif i < len(lines) or record is not None:
                raise ValueError(f"{self.metrics_path} is damaged: line {i} is no record; nothing was changed")
        return records

    def save(self, round_: int, state: PyTree, totals: dict[str, Any]) -> None:
        """A checkpoint of `state` after `round_` rounds, atomically; the two latest are kept."""
        import orbax.checkpoint as ocp

        if self.manager.latest_step() == round_:
            return
        leaves = {f"{i:04d}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}
        about = {"totals": totals, "shapes": {name: list(leaf.shape) for name, leaf in leaves.items()}}
        full = {name: leaf for name, leaf in leaves.items() if leaf.size}  # orbax refuses arrays without numbers
        args = ocp.args.Composite(state=ocp.args.StandardSave(full), about=ocp.args.JsonSave(about))
        self.manager.save(round_, args=args)
        self.manager.wait_until_finished()

    def restore(self, like: PyTree, *, any_round: bool = True) -> tuple[int, PyTree, dict[str, Any]] | None:
        """The latest checkpoint as `(round, state of the structure of like, totals)`; `None` if there is none.

        Where that is damaged, it goes, and the one before it is taken (unless `any_round` is False), with a warning.
        Lines of `metrics.jsonl` from after it are dropped: those rounds are run again.

        Raises:
          ValueError: checkpoints of another model or number of clients; only damaged ones.
        """
        rounds = sorted(self.manager.all_steps(), reverse=True)
        if not rounds:
            self._truncate(0)
            return None
        damage = None
        for round_ in rounds if any_round else rounds[:1]:
            try:
                state, totals = self._read(round_, like)
            except _Unfit as error:
                raise ValueError(str(error)) from None
            except Exception as error:  # of whatever kind orbax and tensorstore find a damaged file to be
                damage = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
                warnings.warn(f"the checkpoint of round {round_} in {self.path} is damaged ({damage})", stacklevel=3)
                continue
            for later in rounds[: rounds.index(round_)]:  # damaged: as long as they are there, orbax saves no others
                self.manager.delete(later)
            self._truncate(round_)
            return round_, state, totals
        raise ValueError(f"no checkpoint in {self.path} can be read: {damage}; nothing was changed")

    def _read(self, round_: int, like: PyTree) -> tuple[PyTree, dict[str, Any]]:
        import orbax.checkpoint as ocp

        wanted = {f"{i:04d}": np.zeros(x.shape, x.dtype) for i, x in enumerate(jax.tree.leaves(like))}
        about = self.manager.restore(round_, args=ocp.args.Composite(about=ocp.args.JsonRestore())).about
        if about["shapes"] != {name: list(leaf.shape) for name, leaf in wanted.items()}:
            raise _Unfit(
                f"the checkpoint of round {round_} in {self.path} is of another model or number of clients; nothing was"
                " changed"
            )
        full = {name: leaf for name, leaf in wanted.items() if leaf.size}
        saved = self.manager.restore(round_, args=ocp.args.Composite(state=ocp.args.StandardRestore(full)))
        leaves = [saved.state.get(name, wanted[name]) for name in sorted(wanted)]
        return jax.tree.unflatten(jax.tree.structure(like), leaves), about["totals"]

    def _truncate(self, round_: int) -> None:
        kept = [r for r in self.records() if r["round"] <= round_]
        scratch = self.metrics_path.with_name("metrics.jsonl.tmp")
        scratch.write_text("".join(json.dumps(r) + "\n" for r in kept))
        os.replace(scratch, self.metrics_path)


def environment() -> dict[str, Any]:
    """The device and versions that a figure was measured on: `{"device": ..., "versions": {...}}`."""
    import platform
    from importlib.metadata import version

    device = jax.devices()[0]
    kind = device.device_kind if device.platform != "cpu" else f"CPU, {os.cpu_count()} cores"
    names = ("jfcl", "jax", "jaxlib", "flax", "optax", "numpy")
    versions = {name: version(name) for name in names} | {"python": platform.python_version()}
    return {"device": f"{len(jax.devices())} x {kind}", "versions": versions}
