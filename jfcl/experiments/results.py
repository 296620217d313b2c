"""The one reader of a run's folder: of a finished run, and of one that is running or was stopped."""

import contextlib
import csv
import io
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import numpy as np
from flax.traverse_util import unflatten_dict

from jfcl.core import PyTree, check, files, plain
from jfcl.core.parameters import named_parameters
from jfcl.methods import METHODS, Method
from jfcl.simulation.folder import RunFolder, finite_or_none, read_json, read_verified, saved_config, verify_results
from jfcl.simulation.results import summarize_records

# Entries of config.json.
NO_OPTIONS = ("split_hash", "federation", "cohorts", "key", "versions", "schedule_rounds", "given")
COUNTS = ("seed", "client", "examples", "true_cluster", "cluster", "model", "malicious")  # columns of integers


class Results(NamedTuple):
    """The content of a run's folder, finished or not.

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
        """What an unfinished run lacks; empty for a finished one."""
        if self.is_finished:
            return ""
        so_far = "the results are those of its records; clients, models and trees are written at its end"
        return f"{self.folder / 'summary.json'} is missing: the run is not finished. Here, {so_far}"

    @property
    def options(self) -> dict[str, Any]:
        """The options of the run that have a value, by their names in `Config`."""
        values = {name: v for name, v in self.config.items() if v is not None and name not in NO_OPTIONS}
        return {"rounds" if name == "num_rounds" else name: v for name, v in values.items()}

    @property
    def given(self) -> list[str]:
        """The names of the options that were given."""
        names = self.config.get("given")
        return names if isinstance(names, list) else []

    @property
    def planned_rounds(self) -> int | None:
        """The number of the last round, with the rounds of the method's start; None where it is unknown."""
        rounds = self.config.get("num_rounds")
        return None if rounds is None else rounds + (self.summary.get("init_rounds") or 0)

    def first_seed(self) -> dict[str, np.ndarray]:
        """Returns the columns of `clients.csv`, without the rows of other seeds than the first."""
        seeds = self.clients.get("seed", ())
        return {name: values[seeds == seeds[0]] for name, values in self.clients.items()}

    def read_picture(self, name: str) -> bytes | None:
        """Returns `plots/NAME.png` as the run has left it, or None."""
        try:
            return read_verified(self.folder, self.summary, f"plots/{name}.png") if self.is_finished else None
        except ValueError:  # removed, or of another run
            return None

    @property
    def tree(self) -> ModuleType | None:
        """The module that reads `tree.npz`, the splits of the first seed's clusters; None for a run without them."""
        method = _method(self.config)
        return method.tree if method and self.is_finished and "tree.npz" in self.summary["files"] else None


def read_results(folder: str | Path, records: list[dict[str, Any]] | None = None) -> Results:
    """Reads the run in `folder`; `records` are those of the run that has just ended there, which need not be read.

    Raises:
      ValueError: no run, a damaged one, or one of another version of jfcl.
    """
    plain.check_path("runs", folder)
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} holds no run: it is {'a file' if folder.exists() else 'not there'}")
    plain.check_plain(folder)
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} {_instead(folder)}")
    config, checkpoints = saved_config(folder), RunFolder(folder).rounds()
    if (folder / "summary.json").exists():
        summary = verify_results(folder, None if records is None else [])
        if not (summary.get("per_seed") and summary.get("mean")):
            raise ValueError(f"{folder / 'summary.json'} is damaged: it has no results in per_seed and mean")
        records = RunFolder(folder).records() if records is None else records
        clients = _columns(folder, summary) if "clients.csv" in summary["files"] else {}
        return Results(folder, config, summary, records, clients, True, checkpoints)
    records = RunFolder(folder).records() if (folder / "metrics.jsonl").exists() else []
    summary = _so_far(folder, config, records, checkpoints)
    return Results(folder, config, summary, records, {}, False, checkpoints)


def read_finished(folder: str | Path) -> Results:
    """Reads a finished run; `ValueError` as of `read_results`, and for one that goes on or was stopped."""
    run = read_results(folder)
    if not run.is_finished:
        why = "summary.json is missing; 'jfcl report' shows what there is so far"
        raise ValueError(f"{folder} holds no finished run: {why}")
    return run


def read_run(folder: str | Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns `(summary, records)` of a finished run.

    Raises:
      ValueError: a folder without a finished run; a file that is missing, damaged or of another version.

    Example:
      >>> import tempfile
      >>> from jfcl.experiments import Config, run
      >>> folder = tempfile.mkdtemp()
      >>> _ = run(Config("fedavg", clients=4, rounds=2), out=folder)
      >>> summary, records = read_run(folder)
      >>> summary["num_rounds"], [record["round"] for record in records]
      (2, [1, 2])
    """
    run = read_finished(folder)
    return run.summary, run.records


def load_params(folder: str | Path, part: str = "params") -> PyTree:
    """Returns the models `[K, ...]` of a finished run (of its first seed), as nested dicts, for a warm start.

    Args:
      folder: of the run.
      part: or "personal", the clients' personal parameters, or "mixture", the weights of their mixtures, `[N, ...]`
        each; `()` where the run has none.

    Raises:
      ValueError: no `params.npz` in the folder, or a damaged one.

    Example:
      >>> import tempfile
      >>> folder = Path(tempfile.mkdtemp())
      >>> np.savez(folder / "params.npz", **{"Dense_0/kernel": np.zeros((2, 4, 10))})  # as a run leaves it
      >>> load_params(folder)["Dense_0"]["kernel"].shape
      (2, 4, 10)
    """
    plain.check_plain(folder)
    saved = Path(folder) / f"{part}.npz"
    if not saved.is_file():
        if part != "params":
            return ()
        which = "a finished run of the command line or jfcl.experiments.run"
        unless = "a population in which each client has a model of its own leaves none"
        raise ValueError(f"init_from must be the folder of {which}, but {saved} does not exist ({unless})")
    arrays, params = files.read_npz(saved, lambda arrays: (arrays, unflatten_dict(arrays, sep="/")))
    counts = {array.shape[:1] for array in arrays.values()}
    check(len(counts) == 1 and min(counts) > (0,), str(saved), counts, "models of one number, at least 1")
    for path, array in arrays.items():
        check(array.dtype.kind in "fiu", f"{saved}: {path}", array.dtype, "numbers")
        check(np.isfinite(array).all(), f"{saved}: {path}", "NaN or infinity", "finite numbers")
    if (saved.parent / "summary.json").exists():
        verify_results(saved.parent, [saved.name])
    return params


def structured(arrays: PyTree, like: PyTree) -> PyTree:
    """Returns the arrays of a file in the structure and types of `like`; `()` where `like` has no leaves."""
    if not jax.tree.leaves(like):
        return ()
    rows, wanted = named_parameters(arrays), named_parameters(like)
    accepted = f"those of the run: {list(wanted)}"
    check(sorted(rows) == sorted(wanted), "the models of the folder", sorted(rows), accepted)
    leaves = [np.asarray(rows[name], leaf.dtype) for name, leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _method(config: dict[str, Any]) -> Method | None:
    """Returns the method of a run; None for one of a user, whose `config` may have anything in the place of a name."""
    name = config.get("method")
    return METHODS.get(name) if isinstance(name, str) else None


def _instead(folder: Path) -> str:
    """Describes what a folder without `config.json` holds instead of a run."""
    if (folder / "settings.json").exists():
        return "holds a ranking of jfcl shifts, and no run"
    if (folder / "cells").exists():
        return f"holds a sweep, and no run; run the best: jfcl run --config {folder / 'best.toml'} --out DIR"
    within = sorted(str(path.parent) for path in folder.glob("*/config.json"))
    return f"holds no run: config.json is missing{'; runs are in ' * bool(within)}{' '.join(within)}"


def _columns(folder: Path, summary: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns the columns of `clients.csv`: integers, or numbers that may be NaN."""
    lines = io.StringIO(read_verified(folder, summary, "clients.csv").decode(errors="replace"), newline="")
    try:
        head, *rows = csv.reader(lines)
        pairs = zip(head, zip(*rows, strict=True), strict=True)
        columns = {name: np.array(values, np.int64 if name in COUNTS else np.float64) for name, values in pairs}
        missing = [name for name in ("seed", "client", "examples", "cluster") if name not in columns]
        check(not missing, "the table", list(columns), f"one with {', '.join(missing)}")
    except (ValueError, OverflowError, csv.Error) as error:
        raise ValueError(f"{folder / 'clients.csv'} is damaged: {error}") from None
    return columns


@contextlib.contextmanager
def odd_records(folder: Path) -> Iterator[None]:
    """Names the records of an unfinished run, not all of which are verified, in the place of errors that they cause."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        why = f"its lines are not the records of a run ({type(error).__name__}: {error})"
        raise ValueError(f"{folder / 'metrics.jsonl'} is damaged: {why}") from error


def _so_far(
    folder: Path, config: dict[str, Any], records: list[dict[str, Any]], checkpoints: list[int]
) -> dict[str, Any]:
    """Returns the entries of a summary, of the last round that all seeds have reached."""
    about: dict[str, Any] = {}
    if checkpoints:  # the last has the rounds of the method's start, and the digest of the lines before it
        about = read_json(folder / "checkpoints" / str(checkpoints[0]) / "about.json")
        RunFolder(folder).verified(checkpoints[0], about["records"])
    seeds, rounds = {record["seed"] for record in records}, Counter(record["round"] for record in records)
    last = max((t for t, count in rounds.items() if count >= len(seeds)), default=0)
    clients = config.get("clients") if config.get("population") is None else config["population"]
    several = any(record.get("clusters_in_use") != 1 for record in records)
    method = _method(config)
    summary = {
        "method": config.get("method"),
        "num_clients": clients if isinstance(clients, int) else None,
        "num_clusters": 1 if config.get("heterogeneity") == "none" else config.get("clusters"),
        "num_rounds": last,
        "init_rounds": about.get("totals", {}).get("init_rounds", 0),
        "versions": config.get("versions"),
        "finds_clusters": several and not (method and method.by_client),
    }
    if not last:
        return summary | {"per_seed": [], "mean": {"clusters_in_use": None}}
    with odd_records(folder):
        summary |= finite_or_none(summarize_records(finite_or_none(records), last))
    return summary | {name: summary["mean"].get(name) for name in ("bytes_up", "bytes_down")}
