"""A run's folder as far as it can be read, with a sentence on every part that is missing or damaged."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from jfcl.algorithms import METHODS
from jfcl.analysis import parameter_tree
from jfcl.analysis.parameter_tree import load_splits
from jfcl.core import PyTree
from jfcl.experiments.results import check_no_sweep, check_summary, is_number, is_whole
from jfcl.experiments.setups import load_params
from jfcl.simulation.folder import RunFolder, finite_or_none, identity, read_json, verify_file
from jfcl.simulation.records import from_line
from jfcl.simulation.results import summarize_records

MOST_LISTED = 5  # damaged lines that a sentence names
COUNTS = ("seed", "client", "examples", "true_cluster", "cluster", "model", "malicious")  # columns of integers
PARTS = ("config.json", "metrics.jsonl", "summary.json")


class Tree(NamedTuple):
    """A parameter tree, and the updates that its first split compared.

    Attributes:
      nodes: of `jfcl.parameter_tree.nodes`.
      compared: `[n]`, the clients of the first split.
      updates: `[n, S]`, their updates in that round; no rows if there was no split.
      cluster: `[n]`, their final clusters.
    """

    nodes: list[parameter_tree.Node]
    compared: np.ndarray
    updates: np.ndarray
    cluster: np.ndarray


class PartialRun(NamedTuple):
    """What can be read of a run.

    Attributes:
      folder: the run's folder.
      config: content of `config.json`; empty if it cannot be read. That of `jfcl.simulate` need not name a method.
      summary: content of `summary.json`; if it cannot be read, the results of the last round in the records.
      records: the whole lines of `metrics.jsonl`.
      clients: the columns of `clients.csv`; empty if it cannot be read; no `true_cluster` where it is unknown.
      is_finished: whether `summary.json` is there, damaged or not.
      checkpoints: the rounds with a checkpoint, latest first.
      problems: a sentence on every part that is missing or damaged.
    """

    folder: Path
    config: dict[str, Any]
    summary: dict[str, Any]
    records: list[dict[str, Any]]
    clients: dict[str, np.ndarray]
    is_finished: bool
    checkpoints: list[int]
    problems: list[str]

    def attempt(self, read: Callable[..., Any], *arguments: Any) -> Any:
        """Returns `read(*arguments)`, or None with its error among the `problems`."""
        try:
            return read(*arguments)
        except (ValueError, OSError, MemoryError) as error:
            if str(error) not in self.problems:
                self.problems.append(str(error) or type(error).__name__)
            return None

    def read_picture(self, name: str) -> bytes | None:
        """Returns `plots/NAME.png` of a finished run, or None if it is not there or damaged."""
        file = self.folder / "plots" / f"{name}.png"
        return self.attempt(_picture, file) if self.is_finished and file.is_file() else None

    def read_tree(self) -> Tree | None:
        """Returns the first seed's parameter tree; None for a run without one."""
        return self.attempt(_tree, self) if self._has("tree.npz") else None

    def models_size(self) -> int:
        """Returns the bytes of `params.npz`; 0 without it."""
        file = self.folder / "params.npz"
        return file.stat().st_size if file.is_file() else 0

    def read_models(self) -> PyTree | None:
        """Returns the first seed's models `[K, ...]`; None if they cannot be read."""
        return self.attempt(load_params, self.folder) if self._has("params.npz") else None

    def _has(self, name: str) -> bool:
        """Returns whether a result of a finished run is there, or should be."""
        return self.is_finished and (name in (self.summary.get("files") or {}) or (self.folder / name).exists())


def read_partial(folder: str | Path) -> PartialRun:
    """Reads what is there of the run in `folder`.

    Raises:
      ValueError: neither `config.json` nor `metrics.jsonl` nor `summary.json` can be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} holds no run: it is {'a file' if folder.exists() else 'not there'}")
    check_no_sweep(folder)
    if not any((folder / name).exists() for name in PARTS):
        raise ValueError(f"{folder} holds no run: it has none of {', '.join(PARTS)}")
    run = PartialRun(folder, {}, {}, [], {}, False, RunFolder(folder).rounds(), [])
    # The three parts.
    config = run.attempt(_config, folder / "config.json")
    records = run.attempt(_records, run) or []
    summary = run.attempt(_summary, folder / "summary.json") if (folder / "summary.json").exists() else None
    if config is None and not records and summary is None:
        raise ValueError(f"{folder} holds no run that can be read: {'; '.join(run.problems)}")
    is_finished = (folder / "summary.json").exists()
    run = run._replace(config=config or {}, records=records, is_finished=is_finished)
    run = run._replace(summary=summary or _so_far(run))
    # What belongs to a finished run.
    if not is_finished:
        rest = "the results are those of its records; clients, models and trees are written at its end"
        run.problems.append(f"{folder / 'summary.json'} is missing: the run is not finished. Here, {rest}")
        return run
    run.attempt(_check_identity, run)
    if records:
        run.attempt(verify_file, folder, run.summary, "metrics.jsonl")
    has_clients = run._has("clients.csv") or "files" not in run.summary  # not by a population without test examples
    return run._replace(clients=(run.attempt(_clients, run) or {}) if has_clients else {})


def _config(file: Path) -> dict[str, Any]:
    config = read_json(file)
    if not isinstance(config.get("versions"), dict):
        raise ValueError(f"{file} is damaged, or is not of jfcl: it has no versions")
    rounds = config.get("num_rounds")
    if type(rounds) is not int and rounds is not None:
        raise ValueError(f"{file} is damaged: num_rounds is {rounds!r}")
    return config


def _records(run: PartialRun) -> list[dict[str, Any]]:
    """Returns the whole records of a run; other lines become a problem."""
    file = run.folder / "metrics.jsonl"
    if not file.is_file():
        raise ValueError(f"{file} is missing")
    lines = file.read_bytes().splitlines(keepends=True)
    found = [from_line(line) for line in lines]
    bad = [i for i, record in enumerate(found, 1) if record is None or not is_whole(record)]
    if bad == [len(lines)] and not lines[-1].endswith(b"\n"):
        bad = []  # of a run that is being written, or was stopped
        found = found[:-1]
    if bad:
        listed = ", ".join(map(str, bad[:MOST_LISTED])) + (", ..." if len(bad) > MOST_LISTED else "")
        run.problems.append(f"{file} is damaged: {len(bad)} of {len(lines)} lines are no records (line {listed})")
    if not lines:
        run.problems.append(f"{file} holds no line yet")
    return [record for i, record in enumerate(found, 1) if i not in set(bad)]


def _summary(file: Path) -> dict[str, Any]:
    summary = read_json(file)
    check_summary(summary, file)
    numbers = [summary.get(name) for name in ("num_clients", "seconds", "compile_seconds", "rounds_per_second")]
    numbers += [value for row in summary["per_seed"] for value in row.values()]
    if not all(is_number(value) for value in numbers):
        raise ValueError(f"{file} is damaged: it has text for a number")
    digests = summary.get("files") or {}
    if not isinstance(digests, dict) or not all(isinstance(text, str) for text in digests.values()):
        raise ValueError(f"{file} is damaged: files must be names and digests")
    return summary


def _check_identity(run: PartialRun) -> None:
    if run.config and run.summary.get("run") not in (None, identity(run.config)):
        raise ValueError(f"{run.folder / 'config.json'} is damaged: it differs from the one that the run ended with")


def _so_far(run: PartialRun) -> dict[str, Any]:
    """Returns what a summary holds, of the last round that all seeds have reached."""
    seeds = {record["seed"] for record in run.records}
    rounds = [record["round"] for record in run.records]
    last = max((t for t in set(rounds) if rounds.count(t) >= len(seeds)), default=0)
    config = run.config
    about = {"method": config.get("method"), "num_clusters": config.get("clusters"), "versions": config.get("versions")}
    clients = config.get("clients") if config.get("population") is None else config["population"]
    about |= {"num_clients": clients if is_number(clients) else None, "num_rounds": last}
    about["init_rounds"] = run.attempt(_init_rounds, run) if run.checkpoints else 0
    if config.get("heterogeneity") == "none":
        about["num_clusters"] = 1
    several = any(record.get("clusters_in_use") != 1 for record in run.records)
    method = METHODS.get(config.get("method"))  # None: of a user
    about["finds_clusters"] = several and not (method and method.by_client)
    if not last:
        empty = {"clusters_in_use": None}
        return about | {"per_seed": [], "mean": empty, "std": empty}
    found = finite_or_none(summarize_records(finite_or_none(run.records), last))
    return about | found | {name: found["mean"].get(name) for name in ("bytes_up", "bytes_down")}


def _init_rounds(run: PartialRun) -> int:
    file = run.folder / "checkpoints" / str(run.checkpoints[0]) / "about.json"
    totals = read_json(file).get("totals")
    found = totals.get("init_rounds", 0) if isinstance(totals, dict) else None
    if type(found) is not int:
        raise ValueError(f"{file} is damaged: it has no totals")
    return found


def _clients(run: PartialRun) -> dict[str, np.ndarray]:
    """Returns the columns of `clients.csv`: integers, or numbers that may be NaN."""
    file = run.folder / "clients.csv"
    verify_file(run.folder, run.summary, "clients.csv")
    try:
        with file.open(newline="") as f:
            rows = list(csv.DictReader(f))
        columns = {
            name: np.array(
                [(int if name in COUNTS else float)(row[name]) for row in rows], np.int64 if name in COUNTS else float
            )
            for name in (rows[0] if rows else ())
        }
    except (ValueError, KeyError, TypeError, OverflowError, csv.Error) as error:
        raise ValueError(f"{file} is damaged: {type(error).__name__}: {error}") from None
    missing = [name for name in ("seed", "client", "examples", "cluster") if name not in columns]
    if missing:
        raise ValueError(f"{file} is damaged: it lacks {', '.join(missing)}")
    return columns


def _picture(file: Path) -> bytes:
    content = file.read_bytes()
    try:
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            image.verify()
    except (OSError, SyntaxError, ValueError):  # the second: of a damaged chunk
        raise ValueError(f"{file} is damaged, and is drawn again") from None
    return content


def _tree(run: PartialRun) -> Tree:
    file = run.folder / "tree.npz"
    verify_file(run.folder, run.summary, file.name)
    try:
        state = load_splits(file)
        nodes, updates = parameter_tree.nodes(state), np.zeros((0, 0))
        compared = nodes[0].clients
        if nodes[0].split >= 0:
            updates = np.asarray(state.tree.updates)[nodes[0].split][compared]
        return Tree(nodes, compared, updates, np.asarray(state.cluster)[compared])
    except (KeyError, IndexError, TypeError, AttributeError) as error:  # of odd content
        raise ValueError(f"{file} is damaged: {type(error).__name__}: {error}") from None


def first_seed(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the rows of the first seed."""
    if not columns:
        return {}
    rows = columns["seed"] == columns["seed"][0]
    return {name: values[rows] for name, values in columns.items()}


def planned_rounds(run: PartialRun) -> int | None:
    """Returns the number of a run's last round, with the rounds of its method's start; None where it is unknown."""
    rounds = run.config.get("num_rounds")
    return None if rounds is None else rounds + (run.summary.get("init_rounds") or 0)


def clusters_by_round(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the first seed's records with the clusters of all clients, as many in each."""
    kept = [r for r in records if r.get("cluster")]
    return [r for r in kept if r["seed"] == kept[0]["seed"] and len(r["cluster"]) == len(kept[0]["cluster"])]
