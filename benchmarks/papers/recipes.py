"""The frame of the papers' experiments, each under a name: `python -m benchmarks.papers NAME`.

A recipe is a function from a setting (a dict of numbers) to the rows of a table and a picture. It does its runs through
`Bench`, which keeps every one in its own folder: a recipe that was killed goes on where it stopped, and does nothing
twice. What is damaged, or of another setting, is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.progress import track

from jfcl.analysis import plots
from jfcl.core import check, check_choice, check_count
from jfcl.core.files import read_json, seal, write_json
from jfcl.experiments.config import Config, to_saved
from jfcl.experiments.jobs import in_processes
from jfcl.experiments.results import read_run
from jfcl.experiments.run import run
from jfcl.simulation.folder import environment
from jfcl.simulation.records import finite_or_none
from jfcl.simulation.results import summarize_records
from jfcl.simulation.versions import saved_config

Row = dict[str, Any]
Run = tuple[dict[str, Any], list[dict[str, Any]]]  # summary and records
MADE = ("seconds", "jobs", "device", "versions")  # how a result was made
REPEATS = ("seeds", "trials")  # may grow in a folder: each seed and trial is kept by its number


class Bench(NamedTuple):
    """Where a recipe works: `out` is its folder, `data_dir` as in `jfcl run`, `progress` shows bars.

    `run_all` and `keep_all` compute what is missing; with `jobs` above 1 in processes of their own, so many at a time.
    """

    out: Path
    data_dir: str | None = None
    progress: bool = False
    jobs: int = 1

    def run(self, name: str, config: Config) -> Run:
        """`(summary, records)` of `config`: read from `out/name` if it has run there, resumed if it was stopped.

        Seeds that are missing there, after a call for fewer of them, run one by one, each in `out/name-seed-S`.
        """
        return self.run_all({name: config})[name]

    def run_all(self, configs: Mapping[str, Config]) -> dict[str, Run]:
        """Returns what `run(name, config)` does, for each name."""
        parts = {name: self._parts(name, config) for name, config in configs.items()}
        quiet = self._replace(progress=False)
        self._ahead({folder: partial(quiet._run, folder, one) for of in parts.values() for folder, one in of.items()})
        return {
            name: _joined([self._run(*part) for part in parts[name].items()], config.seeds)
            for name, config in configs.items()
        }

    def _parts(self, name: str, config: Config) -> dict[str, Config]:
        """Returns the runs of `config` by folder: that of the first seeds, and one for each seed that was added."""
        begun = (self.out / name / "config.json").exists()
        first = saved_config(self.out / name)["seeds"] if begun else config.seeds
        parts = {name: dataclasses.replace(config, seeds=first)}
        for seed in range(first, config.seeds):
            parts[f"{name}-seed-{seed}"] = dataclasses.replace(config, seeds=1, seed=seed)
        return parts

    def _run(self, name: str, config: Config) -> Run:
        folder = self.out / name
        if (folder / "summary.json").exists():
            saved = saved_config(folder)
            wanted = finite_or_none(to_saved(config, saved.get("split_hash", "")))
            differ = [k.removeprefix("num_") for k, v in wanted.items() if k != "given" and saved.get(k) != v]
            check(not differ, "out", str(self.out), f"a new folder: {name} there differs in {', '.join(differ)}")
            return read_run(folder)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="round .*: a cluster would be split")  # the table says so
            begun = (folder / "config.json").exists()
            run(config, out=folder, resume=begun, data_dir=self.data_dir, progress=self.progress)
        return read_run(folder)

    def keep(self, name: str, compute: Callable[..., Row], *args: Any) -> Row:
        """Returns what is in the file `name`; if there is none, writes that of `compute(*args)`."""
        file = self.out / f"{name}.json"
        if not file.exists():
            write_json(file, seal(compute(*args)))
        kept = read_json(file)
        del kept["sha256"]
        return kept

    def keep_all(self, calls: Mapping[str, tuple[Any, ...]], label: str) -> dict[str, Row]:
        """Returns what `keep(name, compute, *args)` does, for each name and its `(compute, *args)`."""
        quiet = self._replace(progress=False)
        self._ahead({f"{name}.json": partial(quiet.keep, name, *call) for name, call in calls.items()})
        return {name: self.keep(name, *call) for name, call in self._track(calls.items(), label)}

    def _ahead(self, parts: Mapping[str, Callable[[], Any]]) -> None:
        """Computes missing parts, several processes at a time, if `jobs` is above 1; a part is named by its file."""
        paths = {name: self.out / name for name in parts}
        there = {name for name, path in paths.items() if path.is_file() or (path / "summary.json").exists()}
        missing = {name: part for name, part in parts.items() if name not in there}
        jobs = min(self.jobs, len(missing))
        if jobs > 1:
            for _ in self._track(in_processes(missing, jobs), f"{jobs} at a time", len(missing)):
                pass

    def _track(self, steps: Iterable, label: str, total: int | None = None) -> Iterable:
        """Returns `steps`, and shows a bar while they are iterated over; `total`: the number of an iterator's."""
        return track(steps, label, total, disable=not self.progress, transient=True)


def _joined(runs: list[Run], seeds: int) -> Run:
    """Returns the results of the first `seeds` of several runs as those of one."""
    records = [r for _, mine in runs for r in mine if r["seed"] < seeds]
    seconds = sum(summary["seconds"] for summary, _ in runs)
    return runs[0][0] | summarize_records(records) | {"seconds": seconds}, records


class Outcome(NamedTuple):
    """`rows` of the table, with the paper's numbers beside ours where it gives any; a figure; `notes` to be printed."""

    rows: list[Row]
    figure: plots.Figure | None
    notes: str = ""


Make = Callable[[Bench, dict[str, Any]], Outcome]


class Recipe(NamedTuple):
    """An experiment of a paper.

    Attributes:
      title: one line: paper, figure or table, what it shows.
      make: `(bench, setting) -> Outcome`.
      full: the paper's setting.
      small: one that a CPU of 2 cores finishes in minutes.
    """

    title: str
    make: Make
    full: dict[str, Any]
    small: dict[str, Any]


RECIPES: dict[str, Recipe] = {}  # by name; the modules of `benchmarks.papers` fill it


def recipe(
    name: str, *, full: dict[str, Any], small: dict[str, Any], title: str | None = None
) -> Callable[[Make], Make]:
    """Registers the decorated function as a recipe, with the first line of its docstring for a title.

    `small` holds the entries in which the small setting differs from the full one.
    """

    def register(make: Make) -> Make:
        RECIPES[name] = Recipe(title or make.__doc__.split("\n")[0].rstrip("."), make, full, full | small)
        return make

    return register


def reproduce(
    name: str,
    *,
    full: bool = False,
    out: str | Path | None = None,
    data_dir: str | None = None,
    progress: bool = False,
    jobs: int = 1,
    **changes: Any,
) -> dict[str, Any]:
    """Runs a recipe and leaves `result.json` and `figure.png` in its folder, beside the folders of its runs.

    Args:
      name: of the recipe.
      full: the paper's setting instead of the small one.
      out: its folder; default `runs/reproduce/NAME-small` or `-full`. A folder of the same setting is resumed, with as
        many seeds and trials as are asked for now: those that are there are not repeated.
      data_dir, progress: as in `jfcl run`.
      jobs: runs, trials or cells at a time, where the recipe has several that do not depend on each other. Above 1 they
        run in so many processes, each with its share of a CPU's cores, or of a GPU's memory if JAX has not started yet;
        a script that asks for this needs a main guard.
      changes: entries of the setting to change, such as `rounds=40` or `mnist=[(1200, 200)]`.

    Returns:
      What stands in `result.json`: `name`, `title`, `setting`, `rows`, `notes`, `seconds`, `jobs`, `device`,
      `versions`. With several jobs, the seconds of a row are those of a run beside others. Where the folder is resumed,
      `seconds`, `jobs`, `device` and `versions` are of the last call that added to the rows.

    Raises:
      ValueError: an unknown name, an entry that the setting does not have, a folder of another setting, a damaged part;
        what `jfcl.experiments.run` raises.
      ChildProcessError: a process of several has failed; what has run is kept.

    Example:
      >>> import tempfile
      >>> from benchmarks.papers import reproduce
      >>> result = reproduce("federated_clustering.figure7", rounds=2, seeds=1, out=tempfile.mkdtemp())
      >>> result["setting"]["rounds"], len(result["rows"])
      (2, 4)
    """
    check_choice("recipe", name, RECIPES)
    check_count("jobs", jobs)
    recipe, size = RECIPES[name], "full" if full else "small"
    setting = dict(getattr(recipe, size))
    for entry, value in changes.items():
        check_choice("entry of the setting", entry, setting)
        _check_entry(entry, value, recipe.small[entry] if recipe.full[entry] is None else recipe.full[entry])
        setting[entry] = value
    out = Path(out or f"runs/reproduce/{name}-{size}")
    out.mkdir(parents=True, exist_ok=True)
    _begin(out, {"name": name} | finite_or_none(setting))
    started = time.perf_counter()
    try:
        outcome = recipe.make(Bench(out, data_dir, progress, jobs), setting)
    except BaseException:
        if [file.name for file in out.iterdir()] == ["setting.json"]:  # nothing was begun
            (out / "setting.json").unlink()
        raise
    result = {"name": name, "title": recipe.title, "size": size, "setting": setting, "rows": outcome.rows}
    result |= {"notes": outcome.notes, "seconds": time.perf_counter() - started, "jobs": jobs, **environment()}
    result = finite_or_none(result)
    with contextlib.suppress(ValueError, KeyError):  # rows that were all there keep their time and device
        before = read_json(out / "result.json", sealed=False)
        result |= {name: before[name] for name in MADE if before.get("rows") == json.loads(json.dumps(result["rows"]))}
    write_json(out / "result.json", result)
    if outcome.figure is not None:
        plots.save(outcome.figure, out / "figure.png")
    return result


def _check_entry(entry: str, value: Any, known: Any) -> None:
    """Raises `ValueError` for a value that is not like the `known` one of the paper's setting.

    A list has numbers, or some of the known texts and lists; a dict has some of the known entries.
    """
    value, known, like = *json.loads(json.dumps([value, known])), json.dumps(known)
    if known is None or type(known) is int:
        check_count(entry, value)
        return
    kinds = (int, float) if isinstance(known, float) else type(known)
    check(isinstance(value, kinds) and value not in ([], {}), entry, value, f"like {like}")
    if isinstance(known, (list, dict)) and not isinstance(next(iter(known)), (int, float)):
        check(all(part in known for part in value), entry, value, f"some of {like}")


def _begin(out: Path, setting: dict[str, Any]) -> None:
    """Writes the setting to `out`; `ValueError` where what is in `out` is of another one, but for `REPEATS`."""
    file = out / "setting.json"
    kept = [*out.glob("*.json"), *out.glob("*/*.json")]
    check(file.exists() or not kept, "out", str(out), "a new folder: there are results, and no setting.json")
    there = read_json(file) if file.exists() else setting
    names = [name for name in setting if name not in REPEATS]
    differ = [f"{k}: {there.get(k)}, asked for {setting[k]}" for k in names if there.get(k) != setting[k]]
    check(not differ, "out", str(out), f"a new folder: another experiment was begun there ({'; '.join(differ)})")
    write_json(file, seal(setting))
