"""The results of `jfcl shifts`: the one reader of its cells, and the ranks of the methods in them."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jfcl.analysis import ranking
from jfcl.analysis.metrics import deviation
from jfcl.core import check, files
from jfcl.experiments.comparison import number
from jfcl.experiments.shift_cells import Cell

MODES = {"known": "known number of clusters", "auto": "unknown number of clusters"}
REFERENCES = ("fedavg", "local", "oracle")
BOUND = "oracle"  # is given the true clusters: no method to choose
CONDITIONS = {  # fields of a cell: title, head of a column
    "wrong_k": ("Wrong number of clusters", "K = {}"),
    "hostile": ("Hostile clients", "{:.0%} hostile"),
    "drift": ("Drift", "drift {}"),
}
FORMAT = 2  # of the files in the folder
STATUSES = ("ok", "collapsed", "diverged", "failed")  # of a run; the first two have results


@dataclass(frozen=True, kw_only=True)
class Result(Cell):
    """A finished cell: the content of `cells/NAME.json`."""

    command: str
    tuned: dict[str, Any]
    trials: list[dict[str, Any]]
    runs: list[dict[str, Any]]
    default: dict[str, Any] | None
    status: str
    reason: str | None
    programs: int | None
    seconds: float | None

    @property
    def setting(self) -> tuple[str, str, float]:
        """The data set, the shift and its strength."""
        return self.data, self.shift, self.strength

    @property
    def is_default(self) -> bool:
        """Whether the best options are the defaults, whose run is then one of `runs`."""
        return self.tuned == self.trials[0]["options"]

    @property
    def ended(self) -> list[dict[str, Any]]:
        """The runs that have results."""
        return [run for run in self.runs if run["status"] in STATUSES[:2]]

    @property
    def can_be_best(self) -> bool:
        """Whether the method can be chosen, and every run has results."""
        return self.method != BOUND and len(self.ended) == len(self.runs) > 0

    def over_seeds(self, metric: str) -> tuple[float | None, float | None]:
        """Returns the mean and the sample standard deviation over the runs with results; None where one lacks it."""
        values = [run[metric] for run in self.ended]
        return (None, None) if not values or None in values else (float(np.mean(values)), deviation(values))

    @property
    def accuracy(self) -> float | None:
        """The mean accuracy of the runs with results."""
        return self.over_seeds("accuracy")[0]

    @property
    def marks(self) -> str:
        """What stands beside the figures: how many runs have results, and how many of these have collapsed."""
        collapsed = sum(run["status"] == "collapsed" for run in self.runs)
        return share_ended([self]) + f" †{collapsed}" * bool(collapsed)

    @property
    def text(self) -> str:
        """The accuracy in percent, with the standard deviation over seeds and the marks."""
        return number(*self.over_seeds("accuracy"), 1, 100) + self.marks

    @property
    def title(self) -> str:
        """What the cell is, as a text."""
        of = f" ({MODES[self.clusters]})" if self.clusters in MODES else ""
        return " ".join([*names_of(self.setting), f"{self.method}{of}", *self.conditions])

    @property
    def conditions(self) -> list[str]:
        """The conditions that the cell is under; none for most cells."""
        return [form.format(value) for name, (_, form) in CONDITIONS.items() if (value := getattr(self, name))]


class Ranks(NamedTuple):
    """The ranks in one of `MODES`. The methods are sorted by them.

    Attributes:
      mode: known or auto.
      cells: by setting and method, also those that are not ranked.
      settings, methods: the ranked ones; every one of them has a cell.
      mean, low, high: `[A]`, the mean ranks over settings with their intervals.
      problems: the pairs of a data set and a shift, whose strengths are not independent, and count once in tests.
      scores: `[P, A]`, `ranking.scores` of the problems.
    """

    mode: str
    cells: dict[tuple[tuple, str], Result]
    settings: list[tuple]
    methods: list[str]
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    problems: list[tuple]
    scores: np.ndarray

    @property
    def rows(self) -> list[str]:
        """All methods, the ranked ones first."""
        return self.methods + sorted({method for _, method in self.cells} - {*self.methods})

    @property
    def columns(self) -> list[tuple]:
        """All settings."""
        return sorted({setting for setting, _ in self.cells})

    @property
    def is_tested(self) -> bool:
        """Whether there are enough methods and problems for tests."""
        return len(self.methods) > 1 and len(self.problems) > 1

    @property
    def tested(self) -> np.ndarray:
        """The mean ranks over problems `[A]`, of the means over their strengths: those that tests compare."""
        return ranking.ranks(self.scores).mean(axis=0)

    @property
    def difference(self) -> float:
        """The critical difference of `tested`."""
        return ranking.critical_difference(len(self.methods), len(self.problems))

    def over_settings(self, metric: str) -> list[float | None]:
        """Returns the mean of each method over the ranked settings where any has the metric; None if it lacks one."""
        table = [[self.cells[s, m].over_seeds(metric)[0] for m in self.methods] for s in self.settings]
        columns = [*zip(*[row for row in table if any(v is not None for v in row)], strict=True)]
        return [
            None if None in values else float(np.mean(values)) for values in columns or [[None]] * len(self.methods)
        ]


def share_ended(cells: Sequence[Result]) -> str:
    """Returns how many runs of cells have results, of how many, after a space; nothing where all have."""
    ended, runs = (sum(len(getattr(cell, name)) for cell in cells) for name in ("ended", "runs"))
    return f" {ended}/{runs}" * (ended < runs)


def notes_on(cells: Sequence[Result]) -> Iterator[str]:
    """Yields a sentence on the cells that cannot run, and one on the runs without results."""
    cannot = [cell for cell in cells if cell.status == "cannot"]
    if cannot:
        yield f"{len(cannot)} of {len(cells)} cells cannot run; {cannot[0].title}: {cannot[0].reason}"
    ends = Counter(run["status"] for cell in cells for run in cell.runs)
    without = [f"{ends[status]} {status}" for status in STATUSES[2:] if ends[status]]
    if without:
        yield f"of {ends.total()} runs {' and '.join(without)}; index.html says why"


def digest_of(setting: dict[str, Any]) -> str:
    """Returns the name of a setting, as JSON has it, in its cells."""
    return hashlib.sha256(json.dumps(setting, sort_keys=True).encode()).hexdigest()[:16]


def read_cell(file: Path, digest: str) -> Result | None:
    """Reads a finished cell; None for one of another setting. Raises `ValueError` for a damaged file."""
    saved = files.read_json(file, check_format=FORMAT)
    if saved.get("setting") != digest:
        return None
    try:
        result = Result(**saved["cell"], **{name: saved[name] for name in Result.__annotations__})
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file} is damaged: it lacks {error}") from None
    if result.name != file.stem:  # a copy would count twice
        raise ValueError(f"{file} is damaged: it holds the cell {result.name}")
    return result


def read_cells(folder: Path) -> list[Result]:
    """Reads the finished cells in a folder that are of its setting, sorted by their names."""
    digest = digest_of(files.read_json(folder / "settings.json")["setting"])
    cells = [read_cell(file, digest) for file in sorted((folder / "cells").glob("*.json"))]
    cells = [cell for cell in cells if cell is not None]
    check(cells, "folder", str(folder), "a folder of jfcl shifts with a finished cell")
    return cells


def rank(cells: Sequence[Result]) -> list[Ranks]:
    """Returns the ranks in each of `MODES` in which there are cells; methods without a number of clusters are in both.

    Settings and methods are left out until every method has a cell in every setting.
    """
    plain = [cell for cell in cells if not cell.conditions]
    modes, ranked = [mode for mode in MODES if any(cell.clusters == mode for cell in plain)], []
    for mode in modes or ["known"] * bool(plain):
        table = {(c.setting, c.method): c for c in plain if c.clusters in (mode, "")}
        settings, methods = sorted({s for s, _ in table}), sorted({m for _, m in table})
        is_there = [[(s, m) in table and table[s, m].status == "ok" for m in methods] for s in settings]
        rows, columns = ranking.complete(np.array(is_there))
        settings, methods = [settings[i] for i in rows], [methods[i] for i in columns]
        values = [values_of([table[s, m] for m in methods]) for s in settings]
        scores = np.array([ranking.scores(each) for each in values]).reshape(len(settings), len(methods))
        mean = ranking.ranks(scores).mean(axis=0) if values else np.empty(0)
        low, high = ranking.rank_intervals(values) if values else (mean, mean)
        problems = list(dict.fromkeys(s[:2] for s in settings))
        of_problems = [scores[[s[:2] == problem for s in settings]].mean(axis=0) for problem in problems]
        of_problems = np.array(of_problems).reshape(len(problems), len(methods))
        order = np.argsort(mean, kind="stable")
        methods = [methods[i] for i in order] if values else []
        sorted_ones = (mean[order], low[order], high[order], problems, of_problems[:, order])
        ranked.append(Ranks(mode, table, settings, methods, *sorted_ones))
    return ranked


def values_of(cells: Sequence[Result]) -> np.ndarray:
    """Returns the accuracies `[A, R, N]` of cells with the same clients; NaN for runs without results.

    A cell has those of clients with four decimals. They are moved so that their mean is the accuracy of the run:
    methods that are equally good are then tied, and do not differ by what was rounded.
    """
    seeds = sorted({run["seed"] for cell in cells for run in cell.runs})
    of_runs = {(i, run["seed"]): run for i, cell in enumerate(cells) for run in cell.ended}
    most = max((len(run["per_client"]) for run in of_runs.values()), default=1)
    values = np.full((len(cells), max(1, len(seeds)), most), np.nan)
    for (i, seed), run in of_runs.items():
        accuracies = np.array(run["per_client"], float)
        values[i, seeds.index(seed), : len(accuracies)] = accuracies + (run["accuracy"] - np.nanmean(accuracies))
    return values


def names_of(setting: Sequence[Any]) -> list[str]:
    """Returns a setting, or a problem, as texts."""
    return [f"{part:g}" if isinstance(part, float) else str(part).replace("_", " ") for part in setting]
