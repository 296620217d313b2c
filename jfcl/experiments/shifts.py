"""`jfcl shifts`: methods x shifts x strengths x data sets x seeds, each method tuned with the same budget.

    settings.json   what all cells share     cells/NAME.json   a finished cell: trials, runs, results
    runs.csv        every run a row          lock, lock-I-N    of the processes that write

The cells do not depend on each other, nor on the process that runs them. Every file becomes visible whole.
"""

import contextlib
import dataclasses
import itertools
import json
import re
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from rich.progress import TimeElapsedColumn, TimeRemainingColumn

from jfcl import data, mapping
from jfcl.core import check, check_choice, files, platform, require, texts
from jfcl.core.options import SEVERAL, Interval, OneOf, Range, check_options
from jfcl.data.heterogeneity import HETEROGENEITY, shifts_of
from jfcl.experiments import jobs as processes
from jfcl.experiments import lookup
from jfcl.experiments.config import Config
from jfcl.experiments.shift_cells import MEASURED, SHIFTS, TEST_FRACTION, Cell, modes, run_cell
from jfcl.experiments.shift_results import FORMAT, REFERENCES, Result, digest_of, read_cell
from jfcl.experiments.shifts_page import write_page
from jfcl.robust import attacks
from jfcl.simulation.folder import check_folder, check_setting, environment
from jfcl.simulation.progress import progress_bar

RANKING_FILES = ("index.html", "table.tex", "runs.csv", "cells/", "settings.json")
ALWAYS = REFERENCES  # in every table
METHODS = (*ALWAYS, "cfl", "ifca", "fesem", "flhc", "one_shot", "pacfl", "stocfl", "fedem", "ditto")
OF_SHIFTS = ("rotation", "corruption", "label_permutation", "class", "mixture", "dirichlet")
QUICK = {"shifts": OF_SHIFTS[:5], "strengths": (1.0,), "seeds": 2, "budget": 4, "rounds": 60}
FULL = {"shifts": OF_SHIFTS, "strengths": (0.3, 0.6, 1.0), "seeds": 3, "budget": 12, "rounds": 100}
OF_RUNS = ("clients", "clusters", "model", "rounds", "local_steps", "batch_size")
OF_A_RUN = ("seed", "status", "reason", *(name for name in MEASURED if name not in ("curve", "per_client")))  # columns
PART = re.compile(r"(\d{1,6})/(\d{1,6})")


class Ranking(NamedTuple):
    """What `jfcl shifts` has left in its folder.

    Attributes:
      folder: that of the results.
      done, cells: the numbers of cells that are finished there, and of all.
      seconds: of this call.
      programs: compiled in the cells that this call has run.
      training: the share of training and evaluation in the time of these cells; the rest is compilation and data.
    """

    folder: Path
    done: int
    cells: int
    seconds: float
    programs: int
    training: float


def shifts(
    *,
    methods: Annotated[Sequence[str] | None, SEVERAL] = None,
    shifts: Annotated[Sequence[str] | None, SEVERAL] = None,
    strengths: Annotated[Sequence[float] | None, SEVERAL, Interval("[0, 1]")] = None,
    datasets: Annotated[Sequence[str], SEVERAL] = ("digits",),
    seeds: Annotated[int | None, Range(1, 10**4)] = None,
    budget: Annotated[int | None, Range(1, 10**4)] = None,
    clients: Annotated[int, Range(2)] = 40,
    clusters: Annotated[int, Range(1)] = 4,
    model: str = "mlp",
    rounds: Annotated[int | None, Range(1)] = None,
    local_steps: Annotated[int, Range(1)] = 10,
    batch_size: Annotated[int | None, Range(1)] = None,
    examples_per_client: Annotated[int | None, Range(1)] = None,
    hostile: Annotated[float, Interval("[0, 1)")] = 0.0,
    attack: Annotated[str, OneOf(attacks.DATA_ATTACKS)] = "label_reverse",
    drift: Annotated[str | None, OneOf(data.PATTERNS)] = None,
    wrong_k: Annotated[Sequence[int], SEVERAL] = (),
    quick: bool = False,
    out: str | Path = "runs/shifts",
    part: str | None = None,
    jobs: Annotated[int | None, Range(1)] = None,
    data_dir: str | None = None,
    progress: bool = False,
) -> Ranking:
    """Ranks methods on shifts: tunes each with the same budget, runs it with fresh seeds, and keeps all in a folder.

    A cell of the table is one method on one shift at one strength. Further clients, with examples of their own, are
    held out: a method's options are chosen by the test accuracy of these clients, among the defaults and `budget - 1`
    random draws, the same for all methods. The reported clients take no part in this choice. Where the folder has
    finished cells of the same settings, they are kept, so that the same call continues what was stopped.

    Args:
      methods: names, also `MODULE:FACTORY` for one of your own; fedavg, local and oracle are always added; default:
        cfl, ifca, fesem, flhc, one_shot, pacfl, stocfl, fedem and ditto.
      shifts: names that 'jfcl list heterogeneities' shows, also joined by "+", and `dirichlet` (labels by client, no
        clusters; alpha from 10 to 0.1) and `mixture` (clients mix clusters with renamed labels; concentration from 10
        to 0.1); default: rotation, corruption, label_permutation, class, mixture and dirichlet.
      strengths: strengths of every shift, from 0 to 1; default: 0.3, 0.6 and 1.
      datasets: names that 'jfcl list datasets' shows, or `MODULE:FUNCTION`.
      seeds: runs of each cell; default: 3.
      budget: trials of each cell; default: 12.
      clients: number of clients that are reported; as many more are held out for tuning.
      clusters: number of hidden clusters, and of models where it is known.
      model: model, as in jfcl run.
      rounds: communication rounds of each run; default: 100.
      local_steps: local steps per round; federated_clustering and other methods that send gradients have their own.
      batch_size: examples per local step; default: all examples of the client.
      examples_per_client: training examples of each client; default: as many as every shift can give.
      hostile: share of clients that are hostile, in further cells at the largest strength.
      attack: the attack on their data.
      drift: pattern of clusters that change over time, in further cells at the largest strength.
      wrong_k: other numbers of models, in further cells at the largest strength.
      quick: a small setting: 5 shifts at full strength, 2 seeds, 4 trials, 60 rounds.
      out: folder for the results.
      part: share of the cells to run here, as 3/16; the parts may share one folder, or have folders that are copied
        into one.
      jobs: processes at a time, each on one core of a CPU; default: one for each core, 1 on an accelerator.
      data_dir: folder of official data files; default: $JFCL_DATA_DIR, else TFDS.
      progress: show a progress bar.

    Returns:
      `Ranking`. Cells run in processes of their own: a script calls this function under `if __name__ == "__main__":`.

    Raises:
      ValueError: before anything is computed, for unknown names, options that do not fit, a folder with other settings.
      ChildProcessError: a process was killed; finished cells are kept.

    Example:
      >>> import tempfile
      >>> small = {"methods": ["ifca"], "shifts": ["rotation"], "strengths": [1.0], "seeds": 1, "budget": 1}
      >>> ranking = shifts(**small, rounds=2, clients=4, clusters=2, out=Path(tempfile.mkdtemp()) / "shifts")
      >>> ranking.done, sorted(file.name for file in ranking.folder.glob("cells/*-known.json"))
      (4, ['digits-rotation-1-ifca-known.json'])
    """
    options = dict(locals())
    check_options(globals()["shifts"], options)
    processes.share_gpu()
    began, size = time.perf_counter(), QUICK if quick else FULL
    options |= {name: value for name, value in ({"methods": METHODS} | size).items() if options[name] is None}
    setting = make_setting(options)
    cells, folder = cells_of(setting), Path(out)
    mine = share_of(cells, part)
    check(platform() != "tpu" or jobs in (None, 1), "jobs", jobs, "1 on a TPU, which one process holds")
    jobs = jobs or (mapping.num_cores() if platform() == "cpu" else 1)

    # Run what is not finished.
    check_folder(folder, True, "ranking")
    folder.mkdir(parents=True, exist_ok=True)
    with files.lock(folder / ("lock" if part is None else f"lock-{part.replace('/', '-')}")):
        with _alone(folder):
            digest = begin_folder(folder, setting)
        unfinished = [cell for cell in mine if finished(folder, cell, digest) is None]
        with progress_bar(progress, TimeElapsedColumn(), "left", TimeRemainingColumn()) as bar:
            line = bar.add_task("cells", total=len(mine))

            def tick() -> None:
                bar.update(line, completed=len(mine) - sum(not _file(folder, cell).exists() for cell in unfinished))

            run = partial(run_chain, setting=setting, folder=folder, data_dir=data_dir)
            chains = {chain[0].name: partial(run, chain) for chain in chained(unfinished, jobs)}
            for _ in processes.in_processes(chains, jobs, cores=1 if platform() == "cpu" else None, tick=tick):
                tick()
        with _alone(folder):
            done = merge(folder, cells, digest)
        new = [finished(folder, cell, digest) for cell in unfinished]
    runs = [run for cell in new for run in (*cell.trials, *cell.runs)]
    runs += [cell.default for cell in new if cell.status == "ok" and not cell.is_default]
    share = sum(run["seconds"] or 0 for run in runs) / max(sum(cell.seconds for cell in new), 1e-9)
    programs = sum(cell.programs for cell in new)
    return Ranking(folder, done, len(cells), time.perf_counter() - began, programs, share)


# ---------------------------------------------------------------------------------------------------------------
# Settings and cells.


def make_setting(options: dict[str, Any]) -> dict[str, Any]:
    """Returns what all cells share, after a check of names and numbers; loads the data sets."""
    named = {name: options[name] for name in ("methods", "shifts", "strengths", "datasets")}
    for name, values in named.items():
        check(0 < len({*values}) == len(values), name, values, "at least one, each given once")
    names = [*(name for name in HETEROGENEITY if name != "none"), *SHIFTS]
    for name in (name for name in named["shifts"] if name not in SHIFTS):
        for one in name.split("+"):
            check_choice("shift", one, names)
        shifts_of(name)
    for k in options["wrong_k"]:
        is_other = 0 < k <= options["clients"] and k != options["clusters"]
        check(is_other, "wrong_k", k, f"other numbers than {options['clusters']}, from 1 to that of the clients")
    of_runs = {name: options[name] for name in OF_RUNS if options[name] is not None}
    Config("fedavg", **of_runs)  # refuses what no cell could run
    if options["hostile"]:
        Config("fedavg", clients=options["clients"], attack=options["attack"], malicious=options["hostile"])
    setting = {name: options[name] for name in ("seeds", "budget", "hostile", "attack", "drift")}
    setting |= {name: [*options[name]] for name in ("shifts", "datasets", "wrong_k")}
    setting["methods"] = [*ALWAYS, *(name for name in named["methods"] if name not in ALWAYS)]
    setting["strengths"] = sorted(map(float, named["strengths"]))
    of_data = {name: _of_data(name, of_runs, options) for name in named["datasets"]}
    return setting | {"of_runs": of_runs, "of_data": of_data}


def _of_data(name: str, of_runs: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Returns the numbers of examples of each client, and of each newcomer, for a data set.

    The examples of a client are as many as those of the cluster with the fewest labels divide among its clients, where
    every cluster has labels of its own, and 5 % less since labels have different numbers of examples. A newcomer has at
    most that part of half of the test examples.
    """
    check(name.isprintable(), "datasets", name, "names of data sets")
    dataset = lookup.find_dataset(name, options["data_dir"])
    require(dataset.num_classes is not None, f"rankings are of classification, and {name!r} has no classes")
    count, k = len(dataset.train["y"]), of_runs["clusters"]
    train = count if dataset.test is not None else int(count * (1 - TEST_FRACTION))
    test = len(dataset.test["y"]) if dataset.test is not None else count - train
    everyone, labels = 2 * of_runs["clients"], max(dataset.num_classes // k, 1)
    per_client = options["examples_per_client"] or int(0.95 * train * labels / dataset.num_classes / -(-everyone // k))
    accepted = f"few enough for two examples of {name!r} each, and for the held-out ones"
    check(per_client > 1, "clients", of_runs["clients"], accepted)
    most = int(0.95 * (test // 2) * labels / dataset.num_classes)
    newcomer = max(min(test // 2 // max(of_runs["clients"] // k, 1), most), 2)
    return {"examples_per_client": per_client, "newcomer_examples": newcomer, "test_fraction": TEST_FRACTION}


def cells_of(setting: dict[str, Any]) -> list[Cell]:
    """Returns all cells, sorted by their names."""
    cells = []
    names = (setting[name] for name in ("datasets", "shifts", "strengths", "methods"))
    for dataset, shift, strength, method in itertools.product(*names):
        for clusters in modes(method):
            cell = Cell(dataset, shift, strength, method, clusters)
            cells.append(cell)
            if strength == max(setting["strengths"]):
                cells += [dataclasses.replace(cell, hostile=setting["hostile"])] * bool(setting["hostile"])
                cells += [dataclasses.replace(cell, drift=setting["drift"])] * bool(setting["drift"])
                wrong_numbers = setting["wrong_k"] if clusters == "known" else ()
                cells += [dataclasses.replace(cell, clusters=f"given {k}", wrong_k=k) for k in wrong_numbers]
    cells.sort(key=lambda cell: cell.name)
    twice = [a.name for a, b in itertools.pairwise(cells) if a.name == b.name]
    check(not twice, "names", twice, "different, also without the characters that no name of a file has")
    return cells


def share_of(cells: list[Cell], part: str | None) -> list[Cell]:
    """Returns the cells of a part such as "3/16": the third, and each sixteenth after it.

    Example:
      >>> share_of(list("abcde"), "2/3")
      ['b', 'e']
    """
    if part is None:
        return cells
    numbers = PART.fullmatch(part)
    fits = numbers is not None and 1 <= int(numbers[1]) <= int(numbers[2])
    check(fits, "part", part, "I/N with I from 1 to N, such as 3/16")
    return cells[int(numbers[1]) - 1 :: int(numbers[2])]


def chained(cells: list[Cell], jobs: int) -> list[list[Cell]]:
    """Returns chains of cells that share programs, each for one process; the longest is first, and no longer than fair.

    Example:
      >>> cells = [Cell("digits", "rotation", s, m, "") for s in (0.5, 1.0) for m in ("fedavg", "local")]
      >>> [[cell.method for cell in chain] for chain in chained(cells, jobs=2)]
      [['fedavg', 'fedavg'], ['local', 'local']]
    """
    by_program = defaultdict(list)
    for cell in cells:
        by_program[cell.data, cell.method, cell.clusters, bool(cell.drift)].append(cell)
    most = max(-(-len(cells) // jobs), 1)
    chains = [chain[i : i + most] for chain in by_program.values() for i in range(0, len(chain), most)]
    return sorted(chains, key=len, reverse=True)


# ---------------------------------------------------------------------------------------------------------------
# The folder.


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Waits until no other part writes the files that all parts write; `ValueError` after a minute."""
    with contextlib.ExitStack() as opened:
        for left in reversed(range(300)):
            try:
                opened.enter_context(files.lock(folder / "lock-of-all"))
                break
            except ValueError:
                if not left:
                    raise
                time.sleep(0.2)
        yield


def begin_folder(folder: Path, setting: dict[str, Any]) -> str:
    """Writes `settings.json` of a new folder, or checks that of an old one; returns the digest of the setting."""
    file, setting = folder / "settings.json", json.loads(json.dumps(setting))
    (folder / "cells").mkdir(exist_ok=True)
    if not file.exists():
        settings = {"format": FORMAT, "setting": setting, **environment()}
        files.write_json(file, files.seal(settings))
    check_setting(file, setting, "ranking", FORMAT)
    return digest_of(setting)


def _file(folder: Path, cell: Cell) -> Path:
    return folder / "cells" / f"{cell.name}.json"


def finished(folder: Path, cell: Cell, digest: str) -> Result | None:
    """Returns a finished cell; None where there is none, or with a warning where it is damaged.

    Raises:
      ValueError: a cell of other settings, such as of a part that does not fit the others.
    """
    file = _file(folder, cell)
    if not file.exists():
        return None
    try:
        result = read_cell(file, digest)
    except ValueError as error:
        warnings.warn(f"{error}; the cell runs again", stacklevel=3)
        file.unlink()
        return None
    if result is None:
        raise ValueError(f"{file} is of other settings than settings.json: the parts do not fit each other")
    return result


def run_chain(cells: Sequence[Cell], setting: dict[str, Any], folder: Path, data_dir: str | None) -> None:
    """Runs cells one after another in this process, and writes the file of each."""
    digest = digest_of(json.loads(json.dumps(setting)))
    for cell in cells:
        result = run_cell(cell, setting, data_dir)
        files.write_json(_file(folder, cell), files.seal({"format": FORMAT, "setting": digest} | result))


def merge(folder: Path, cells: Sequence[Cell], digest: str) -> int:
    """Writes `runs.csv`, the page and the table of all finished cells, and returns their number."""
    results = [result for cell in cells if (result := finished(folder, cell, digest)) is not None]
    lines = [[*Cell.__annotations__, *OF_A_RUN, "tuned"]]
    for result in results:
        of_cell = [getattr(result, name) for name in Cell.__annotations__]
        for run in result.runs or [{"status": result.status, "reason": result.reason}]:
            of_run = [run.get(name) for name in OF_A_RUN]
            lines.append([*of_cell, *of_run, json.dumps(result.tuned, sort_keys=True)])
    files.write_whole(folder / "runs.csv", texts.csv_bytes(lines, end="\n"))
    if results:
        write_page(folder)
    return len(results)
