"""What a report shows of a run's folder, of a finished run or of one that goes on or was stopped."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jfcl.core import PyTree, plain
from jfcl.experiments.results import check_no_sweep, check_summary, is_number, read_records
from jfcl.experiments.setups import load_params
from jfcl.methods import METHODS
from jfcl.methods.cfl import parameter_tree
from jfcl.simulation.folder import RunFolder, finite_or_none, read_json, read_verified, saved_config, verify_results
from jfcl.simulation.results import summarize_records

COUNTS = ("seed", "client", "examples", "true_cluster", "cluster", "model", "malicious")  # columns of integers


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
    """A run, finished or not.

    Attributes:
      folder: the run's folder.
      config: content of `config.json`. That of `jfcl.simulate` need not name a method.
      summary: content of `summary.json`; without it, the results of the last round in the records.
      records: those of `metrics.jsonl`.
      clients: the columns of `clients.csv`; empty without it; no `true_cluster` where it is unknown.
      is_finished: whether `summary.json` is there.
      checkpoints: the rounds with a checkpoint, latest first.
    """

    folder: Path
    config: dict[str, Any]
    summary: dict[str, Any]
    records: list[dict[str, Any]]
    clients: dict[str, np.ndarray]
    is_finished: bool
    checkpoints: list[int]

    @property
    def note(self) -> str:
        """What is not there of a run that is not finished; empty for others."""
        rest = "the results are those of its records; clients, models and trees are written at its end"
        missing = f"{self.folder / 'summary.json'} is missing: the run is not finished. Here, {rest}"
        return "" if self.is_finished else missing

    def read_picture(self, name: str) -> bytes | None:
        """Returns `plots/NAME.png` as the run has left it, or None: it is drawn again."""
        try:
            return read_verified(self.folder, self.summary, f"plots/{name}.png") if self.is_finished else None
        except ValueError:  # removed, or of another run
            return None

    def read_tree(self) -> Tree | None:
        """Returns the first seed's parameter tree; None for a run without one."""
        return _tree(self) if self._has("tree.npz") else None

    def models_size(self) -> int:
        """Returns the bytes of `params.npz`; 0 without it."""
        file = self.folder / "params.npz"
        return file.stat().st_size if self._has(file.name) and file.is_file() else 0

    def read_models(self) -> PyTree | None:
        """Returns the first seed's models `[K, ...]`; None for a run without them."""
        return load_params(self.folder) if self._has("params.npz") else None

    def _has(self, name: str) -> bool:
        return self.is_finished and name in self.summary["files"]


def read_partial(folder: str | Path, records: list[dict[str, Any]] | None = None) -> PartialRun:
    """Reads the run in `folder`; `records` are those of the run that has just ended there, which need not be read.

    Raises:
      ValueError: no run, a damaged one, or one of another version of jfcl.
    """
    plain.check_path("runs", folder)
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} holds no run: it is {'a file' if folder.exists() else 'not there'}")
    plain.check_plain(folder)
    check_no_sweep(folder)
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} holds no run: config.json is missing")
    config, checkpoints = saved_config(folder), RunFolder(folder).rounds()
    if (folder / "summary.json").exists():
        summary = verify_results(folder, None if records is None else [])
        check_summary(summary, folder / "summary.json")
        records = read_records(folder) if records is None else records
        clients = _clients(folder, summary) if "clients.csv" in summary["files"] else {}
        return PartialRun(folder, config, summary, records, clients, True, checkpoints)
    records = read_records(folder) if (folder / "metrics.jsonl").exists() else []
    before = _init_rounds(folder, checkpoints[0]) if checkpoints else 0
    return PartialRun(folder, config, _so_far(config, records, before), records, {}, False, checkpoints)


def _so_far(config: dict[str, Any], records: list[dict[str, Any]], before: int) -> dict[str, Any]:
    """Returns what a summary holds, of the last round that all seeds have reached; `before`: of a method's start."""
    seeds = {record["seed"] for record in records}
    rounds = Counter(record["round"] for record in records)
    last = max((t for t, count in rounds.items() if count >= len(seeds)), default=0)
    about = {"method": config.get("method"), "num_clusters": config.get("clusters"), "versions": config.get("versions")}
    clients = config.get("clients") if config.get("population") is None else config["population"]
    about |= {"num_clients": clients if is_number(clients) else None, "num_rounds": last}
    about["init_rounds"] = before
    if config.get("heterogeneity") == "none":
        about["num_clusters"] = 1
    several = any(record.get("clusters_in_use") != 1 for record in records)
    method = METHODS.get(config.get("method"))  # None: of a user
    about["finds_clusters"] = several and not (method and method.by_client)
    if not last:
        empty = {"clusters_in_use": None}
        return about | {"per_seed": [], "mean": empty, "std": empty}
    found = finite_or_none(summarize_records(finite_or_none(records), last))
    return about | found | {name: found["mean"].get(name) for name in ("bytes_up", "bytes_down")}


def _init_rounds(folder: Path, checkpoint: int) -> int:
    """Returns the rounds of the method's start, which a checkpoint has; 0 where that cannot be read."""
    try:
        totals = read_json(folder / "checkpoints" / str(checkpoint) / "about.json").get("totals")
    except ValueError:  # a damaged one is what --resume refuses, or does without
        return 0
    found = totals.get("init_rounds", 0) if isinstance(totals, dict) else 0
    return found if type(found) is int else 0


def _clients(folder: Path, summary: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns the columns of `clients.csv`: integers, or numbers that may be NaN."""
    file = folder / "clients.csv"
    content = read_verified(folder, summary, "clients.csv")
    try:
        rows = list(csv.DictReader(io.StringIO(content.decode(), newline="")))
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


def _tree(run: PartialRun) -> Tree:
    file = run.folder / "tree.npz"
    read_verified(run.folder, run.summary, file.name)
    try:
        state = parameter_tree.load_tree(file)
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
