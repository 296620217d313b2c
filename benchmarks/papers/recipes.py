"""The papers' experiments, each under a name: `python -m benchmarks.papers NAME`.

A recipe is a function from a setting (a dict of numbers) to the rows of a table and a picture. It does its runs through
`Bench`, which keeps every one in its own folder: a recipe that was killed goes on where it stopped, and does
nothing twice. Results of another setting are refused; damaged ones are set aside under another name, and run again.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.progress import track

from benchmarks.papers.jobs import in_processes
from jfcl.analysis import plots
from jfcl.core import check, check_choice, check_count, plain
from jfcl.core.files import seal
from jfcl.experiments.config import Config, to_saved
from jfcl.experiments.results import read_run
from jfcl.experiments.run import run
from jfcl.simulation.folder import environment, finite_or_none, read_json, write_json
from jfcl.simulation.results import summarize_records
from jfcl.simulation.versions import check_version

Row = dict[str, Any]
Run = tuple[dict[str, Any], list[dict[str, Any]]]  # summary and records
MOST_JOBS = 256  # processes at a time
REPEATS = ("seeds", "trials")  # may grow in a folder: each seed and trial is kept by its number


class Bench(NamedTuple):
    """Where a recipe works: `out` is its folder, `data_dir` as in `jfcl run`, `progress` shows bars.

    `run_all` and `keep_all` compute what is missing; with `jobs` above 1 in processes of their own, so many at a time.
    """

    out: Path
    data_dir: str | None
    progress: bool
    jobs: int = 1

    def run(self, name: str, config: Config) -> Run:
        """`(summary, records)` of `config`: read from `out/name` if it has run there, resumed if it was stopped.

        Seeds that are missing there, after a call for fewer of them, run one by one, each in `out/name-seed-S`.
        """
        return self.run_all({name: config})[name]

    def run_all(self, configs: Mapping[str, Config]) -> dict[str, Run]:
        """Returns what `run(name, config)` does, for each name."""
        parts = {name: self._parts(name, config) for name, config in configs.items()}
        own = self._replace(progress=False)
        self._ahead({folder: partial(own._run, folder, one) for some in parts.values() for folder, one in some.items()})
        return {name: self._joined(config, parts[name]) for name, config in configs.items()}

    def _parts(self, name: str, config: Config) -> dict[str, Config]:
        """Returns the runs of `config` by folder: that of the first seeds, and one for each seed that was added."""
        saved = self._saved(name)
        apart = any((self.out / f"{name}-seed-{seed}").exists() for seed in range(config.seeds))
        together = saved["seeds"] if saved else 0 if apart else config.seeds
        parts = {name: dataclasses.replace(config, seeds=together)} if together else {}
        for seed in range(together, config.seeds):
            parts[f"{name}-seed-{seed}"] = dataclasses.replace(config, seeds=1, seed=seed)
        return parts

    def _joined(self, config: Config, parts: Mapping[str, Config]) -> Run:
        """Returns the results of all parts as those of one run."""
        runs = [self._run(folder, one) for folder, one in parts.items()]
        records = [r for _, some in runs for r in some if config.seed is not None or r["seed"] < config.seeds]
        seconds = sum(summary["seconds"] for summary, _ in runs)
        return runs[0][0] | summarize_records(records) | {"seconds": seconds}, records

    def _run(self, name: str, config: Config) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        folder, saved = self.out / name, self._saved(name)
        if saved and (folder / "summary.json").exists():
            wanted = finite_or_none(to_saved(config, saved.get("split_hash", "")))
            differ = [k.removeprefix("num_") for k, v in wanted.items() if saved.get(k) != v]
            check(not differ, "out", str(self.out), f"a new folder: {name} there differs in {', '.join(differ)}")
            try:
                return read_run(folder)
            except ValueError as error:
                _set_aside(folder, error)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="round .*: a cluster would be split")  # the table says so
            started = (folder / "config.json").exists()
            run(config, out=folder, resume=started, data_dir=self.data_dir, progress=self.progress)
        return read_run(folder)

    def _saved(self, name: str) -> dict[str, Any] | None:
        """Returns the options of the run in the folder `name`, finished or not; None if there is none."""
        folder = self.out / name
        if not any((folder / file).exists() for file in ("config.json", "summary.json")):
            return None
        plain.check_plain(folder)
        try:
            saved = read_json(folder / "config.json", sealed=False)
            whole = isinstance(saved.get("versions"), dict) and type(saved.get("seeds")) is int
            check(whole, str(folder / "config.json"), "no versions, or no seeds", "the configuration of a run")
        except ValueError as error:
            return _set_aside(folder, error)
        check_version(folder, saved.get("versions"))
        return saved

    def keep(self, name: str, compute: Callable[..., Row], *args: Any) -> Row:
        """Returns what is in the file `name`; if there is none, or a damaged one, writes that of `compute(*args)`."""
        file = self.out / f"{name}.json"
        if os.path.lexists(file):
            try:
                return _part(file)
            except ValueError as error:
                _set_aside(file, error)
        write_json(file, seal(compute(*args) | {"part": name}))
        return _part(file)

    def keep_all(self, calls: Mapping[str, tuple[Any, ...]], label: str) -> dict[str, Row]:
        """Returns what `keep(name, compute, *args)` does, for each name and its `(compute, *args)`."""
        own = self._replace(progress=False)
        self._ahead({f"{name}.json": partial(own.keep, name, *call) for name, call in calls.items()})
        return {name: self.keep(name, *call) for name, call in self.track(calls.items(), label)}

    def _ahead(self, parts: Mapping[str, Callable[[], Any]]) -> None:
        """Computes missing parts, several processes at a time, if `jobs` is above 1; a part is named by its file."""
        paths = {name: self.out / name for name in parts}
        there = {name for name, path in paths.items() if path.is_file() or (path / "summary.json").exists()}
        missing = {name: part for name, part in parts.items() if name not in there}
        if self.jobs > 1 and len(missing) > 1:
            jobs = min(self.jobs, len(missing))
            for _ in self.track(in_processes(missing, jobs), f"{jobs} at a time", len(missing)):
                pass

    def track(self, steps: Iterable, label: str, total: int | None = None) -> Iterable:
        """Returns `steps`, and shows a bar while they are iterated over; `total`: the number of an iterator's."""
        return track(steps, label, total, disable=not self.progress, transient=True)


def _part(file: Path) -> Row:
    """Returns the content of a part; `ValueError` if it is damaged, or that of another file."""
    found = read_json(file)
    check(found.pop("part", None) == file.stem, str(file), "another part", "the part of this name")
    del found["sha256"]
    return found


def _set_aside(path: Path, why: ValueError) -> None:
    """Renames a damaged result to the first free one of `NAME.damaged-1`, `NAME.damaged-2`, ..., with a warning."""
    names = (path.with_name(f"{path.name}.damaged-{i}") for i in itertools.count(1))
    aside = next(name for name in names if not os.path.lexists(name))
    path.rename(aside)
    warnings.warn(f"{why}; it is kept as {aside}, and computed again", stacklevel=4)


class Outcome(NamedTuple):
    """`rows` of the table, with the paper's numbers beside ours where it gives any; `figure`; `notes` to be printed."""

    rows: list[Row]
    figure: plots.Figure
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
    recipes: dict[str, Recipe] = RECIPES,
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
      recipes: all there are, by name; default: those of the papers.
      full: the paper's setting instead of the small one.
      out: its folder; default `runs/reproduce/NAME-small` or `-full`. A folder of the same setting is resumed, with as
        many seeds and trials as are asked for now: those that are there are not repeated.
      data_dir, progress: as in `jfcl run`.
      jobs: runs, trials or cells at a time, where the recipe has several that do not depend on each other. Above 1 each
        has a process of its own, with its share of a CPU's cores, or of a GPU's memory if JAX has not started yet; a
        script that asks for this needs a main guard.
      changes: entries of the setting to change, such as `rounds=40` or `mnist=[(1200, 200)]`; `None` leaves one as it
        is.

    Returns:
      What stands in `result.json`: `name`, `title`, `setting`, `rows`, `notes`, `seconds`, `jobs`, `device`,
      `versions`. With several jobs, the seconds of a row are those of a run beside others.

    Raises:
      ValueError: an unknown name, an entry that the setting does not have; what `jfcl.experiments.run` raises.
      MemoryError: a process of several was killed, mostly because memory ran out; what has run is kept.

    Example:
      >>> import tempfile
      >>> from benchmarks.papers import reproduce
      >>> result = reproduce("federated_clustering.figure7", rounds=2, seeds=1, out=tempfile.mkdtemp())
      >>> result["setting"]["rounds"], len(result["rows"])
      (2, 4)
    """
    check_choice("recipe", name, recipes)
    check_count("jobs", jobs, most=MOST_JOBS)
    chosen = recipes[name]
    setting = dict(chosen.full if full else chosen.small)
    for entry, value in changes.items():
        if value is None:
            continue
        check(entry in setting, entry, value, f"left out: {name} has {', '.join(setting)}")
        _check_entry(entry, value, chosen.full[entry], chosen.small[entry])
        setting[entry] = value
    out = Path(out or Path("runs") / "reproduce" / f"{name}-{'full' if full else 'small'}")
    new = not out.exists()
    for file in (out / "setting.json", out / "result.json", out / "figure.png"):
        check(not file.is_dir(), "out", str(out), f"a folder where {file.name} is a file, or is not there")
    plain.check_plain(out)
    out.mkdir(parents=True, exist_ok=True)
    _check_setting(out, {"name": name} | finite_or_none(setting))
    started = time.perf_counter()
    try:
        outcome = chosen.make(Bench(out, data_dir, progress, jobs), setting)
    except BaseException:
        if [file.name for file in out.iterdir()] == ["setting.json"]:  # nothing was begun
            (out / "setting.json").unlink()
            if new:
                out.rmdir()
        raise
    result = {
        "name": name,
        "title": chosen.title,
        "size": "full" if full else "small",
        "setting": setting,
        "rows": outcome.rows,
        "notes": outcome.notes,
        "seconds": time.perf_counter() - started,
        "jobs": jobs,
        **environment(),
    }
    result = finite_or_none(result)
    write_json(out / "result.json", result)
    plots.save(outcome.figure, out / "figure.png")
    return result


def _check_entry(entry: str, value: Any, full: Any, small: Any) -> None:
    """Checks that the value of an entry is like those of the settings: a count, a number, a text, a list, a dict.

    The elements of a list are numbers, or some of those of the paper's setting; a dict has some of its entries.
    """
    known = small if full is None else full
    if known is None or isinstance(known, int):
        check_count(entry, value, least=0 if 0 in (full, small) else 1)
    elif isinstance(known, dict):
        inside = isinstance(value, dict) and value and value.keys() <= known.keys()
        check(inside, entry, value, f"some of {json.dumps(known)}")
        for name, part in value.items():
            _check_entry(f"{entry}.{name}", part, known[name], known[name])
    elif isinstance(known, (list, tuple)):
        listed = isinstance(value, (list, tuple)) and len(value) > 0
        check(listed, entry, value, f"a list such as {json.dumps(known)}")
        parts = [tuple(v) if isinstance(v, list) else v for v in value]
        numbers = not isinstance(known[0], (str, list, tuple))
        fits = [isinstance(v, (int, float)) and not isinstance(v, bool) if numbers else v in known for v in parts]
        check(len(set(map(str, parts))) == len(parts), entry, value, "a list of different entries")
        check(all(fits), entry, value, f"a list of {'numbers' if numbers else f'entries of {json.dumps(known)}'}")
    else:
        number = isinstance(known, float) and isinstance(value, int) and not isinstance(value, bool)
        check(number or isinstance(value, type(known)), entry, value, f"like {json.dumps(known)}")


def _check_setting(out: Path, asked: dict[str, Any]) -> None:
    """Writes the setting to `out`; `ValueError` where the parts in `out` are of another setting but for `REPEATS`."""
    file = out / "setting.json"
    there = read_json(file) if file.exists() else asked
    names = [name for name in asked if name not in REPEATS]
    differ = [f"{k}: {there.get(k)}, asked for {asked.get(k)}" for k in names if there.get(k) != asked.get(k)]
    check(not differ, "out", str(out), f"a new folder: another experiment was begun there ({'; '.join(differ)})")
    write_json(file, seal(asked))
