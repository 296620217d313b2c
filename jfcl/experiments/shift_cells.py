"""One cell of `jfcl shifts`: a method on a shift, tuned on clients of their own, then run and measured on others."""

import contextlib
import dataclasses
import json
import shlex
import time
import warnings
import zlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jfcl import mapping
from jfcl.core import Algorithm, max_examples, num_clients
from jfcl.core.names import flag_of
from jfcl.core.options import Search
from jfcl.data import Dataset, Federation
from jfcl.data.build import select_clients
from jfcl.experiments import setups
from jfcl.experiments.config import Config
from jfcl.experiments.lookup import find_method
from jfcl.experiments.options import all_options, takes
from jfcl.simulation.evaluation import choices_among, evaluate_rows
from jfcl.simulation.loop import History
from jfcl.simulation.progress import DivergedError
from jfcl.simulation.results import finds_clusters
from jfcl.simulation.run import simulate
from jfcl.testing import count_compilations

# Shifts beside those of `jfcl.data.HETEROGENEITY`: their options by strength, from 0 (weak) to 1.
SHIFTS: dict[str, Callable[[float], dict[str, Any]]] = {
    "dirichlet": lambda s: {"heterogeneity": "none", "partition": "dirichlet", "alpha": round(10 ** (1 - 2 * s), 4)},
    "mixture": lambda s: {"heterogeneity": "private_label", "mixture": round(10 ** (1 - 2 * s), 4)},
}
TEST_FRACTION = 0.25  # of data sets without test examples of their own
DRIFT_STEPS = 4  # but for the patterns with ten
TUNING_SEED = 2**32 - 1  # the seeds of results are 0, 1, 2, ...
EVALUATIONS = 20  # in a run
NEAR = 0.95  # of the final accuracy
# Options that the programs of a run do not depend on, beside the clients themselves. Attacks here are on data.
NOT_OF_PROGRAMS = ("dataset", "heterogeneity", "strength", "mixture", "partition", "alpha", "attack", "malicious")
NOT_OF_PROGRAMS += ("newcomer_examples", "examples_per_client", "test_fraction", "tuning_clients", "eval_every")
NOT_OF_PROGRAMS += ("seed", "seeds")


@dataclasses.dataclass(frozen=True)
class Cell:
    """A method on a shift.

    Attributes:
      data, shift, strength, method: names, and the strength of the shift.
      clusters: the number of models: "known" (that of the hidden clusters), "auto" (the method finds it), "given 8", or
        "" of a method without such a number.
      hostile: the share of hostile clients.
      wrong_k: the number in `clusters` where it is given.
      drift: name of a pattern.
    """

    data: str
    shift: str
    strength: float
    method: str
    clusters: str
    hostile: float = 0.0
    wrong_k: int | None = None
    drift: str | None = None

    @property
    def name(self) -> str:
        """The name of its file, without the ending."""
        of_k = f"k{self.wrong_k}" if self.wrong_k else self.clusters
        parts = [self.data, self.shift, f"{self.strength:g}", self.method, of_k, self.drift or ""]
        parts += [f"hostile{self.hostile:g}"] if self.hostile else []
        return "-".join("".join(c if c.isalnum() or c in "._+" else "_" for c in part) for part in parts if part)


def modes(name: str) -> list[str]:
    """Returns the `Cell.clusters` of a method: with the true number of clusters, and without where it finds one.

    Example:
      >>> modes("ifca"), modes("clove"), modes("pacfl"), modes("cfl"), modes("oracle")
      (['known'], ['known', 'auto'], ['known', 'auto'], ['auto'], [''])
    """
    method = find_method(name)
    if "num_clusters" not in method.options or "cluster" in method.options:  # the oracle knows all clusters
        return [""] if method.finds_number_by is None else ["auto"]
    return ["known"] + ["auto"] * (method.chooses_number or method.finds_number_by is not None)


def searched(cell: Cell) -> dict[str, Search]:
    """Returns the options of a cell that are tuned, and their ranges.

    Example:
      >>> searched(Cell("digits", "rotation", 1.0, "ditto", ""))
      {'lam': Search(low=0.03, high=10.0, log=True), 'lr': Search(low=0.02, high=2.0, log=True)}
    """
    method = find_method(cell.method)
    options = sorted((all_options(cell.method) | method.declared).items())
    ranges = {name: span for name, option in options for span in option.metadata if isinstance(span, Search)}
    fixed = None if cell.clusters == "auto" else method.finds_number_by
    return {name: span for name, span in ranges.items() if name != fixed and takes(cell.method, name)}


def draw_trials(cell: Cell, budget: int) -> list[dict[str, float]]:
    """Returns the options of each trial: first the defaults, then random ones.

    The values of an option are the same for all methods that have it, such as the learning rate, and one from each part
    of its range: no method is better for its draws. Of an option without a default that finds the number of clusters,
    the first value is random too.
    """
    ranges, number = searched(cell), find_method(cell.method).finds_number_by
    rngs = {name: np.random.default_rng(zlib.crc32(name.encode())) for name in ranges}
    values = {name: span.draws(rngs[name], 1) + span.draws(rngs[name], budget - 1) for name, span in ranges.items()}
    trials = [dict(zip(values, each, strict=True)) for each in zip(*values.values(), strict=True)]
    drawn = number is not None and find_method(cell.method).declared[number].default is None
    return [{name: value for name, value in trials[0].items() if drawn and name == number}, *trials[1:]]


def options_of_cell(cell: Cell, setting: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of `Config` for a cell, but for the tuned ones and the seed."""
    shift = SHIFTS.get(cell.shift, lambda s: {"heterogeneity": cell.shift, "strength": s})(cell.strength)
    options = {"dataset": cell.data} | shift | setting["of_runs"] | setting["of_data"][cell.data]
    options |= {"tuning_clients": options["clients"], "mapping": "chunked"}
    if "local_steps" in find_method(cell.method).defaults:  # of its own: its clients send gradients
        del options["local_steps"]
    options["eval_every"] = max(options["rounds"] // EVALUATIONS, 1)
    if "mixture" in shift or cell.drift:
        del options["newcomer_examples"]
    if cell.drift:
        options |= {"drift": cell.drift} | ({"drift_steps": DRIFT_STEPS} if len(cell.drift) > 1 else {})
    if cell.hostile:
        options |= {"attack": setting["attack"], "malicious": cell.hostile}
    if cell.wrong_k:
        options["num_models"] = cell.wrong_k
    if cell.clusters == "auto" and takes(cell.method, "num_models"):
        by_option = find_method(cell.method).finds_number_by is not None
        options["num_models"] = options["clients"] if by_option else "auto"
    return options


def run_cell(cell: Cell, setting: dict[str, Any], data_dir: str | None) -> dict[str, Any]:
    """Tunes the method of a cell, runs it with fresh seeds, and returns the content of the cell's file."""
    began = time.perf_counter()
    result = {"cell": dataclasses.asdict(cell), "status": "ok", "reason": "", "command": "", "tuned": {}}
    result |= {"trials": [], "runs": [], "default": {"accuracy": None}}
    with count_compilations() as compiled:
        try:
            options = options_of_cell(cell, setting)
            result["command"] = command_of(Config(cell.method, **options, seed=0))
            clients, held_out = divided_clients(Config(cell.method, **options), data_dir)

            # Choose the options.
            on_held_out = options | {"eval_every": options["rounds"]}
            for trial in draw_trials(cell, setting["budget"]):
                run = run_once(cell, on_held_out | trial, held_out, TUNING_SEED, first=not result["trials"])
                outcome = {name: run[name] for name in ("status", "reason", "seconds", "compile_seconds")}
                result["trials"].append({"options": trial, "score": run["accuracy"]} | outcome)
            first = result["trials"][0]
            best = max(result["trials"], key=lambda trial: -1.0 if trial["score"] is None else trial["score"])

            # Run the best, and the defaults.
            options |= best["options"]
            result |= {"tuned": best["options"], "command": command_of(Config(cell.method, **options, seed=0))}
            result["runs"] = [run_once(cell, options, clients, seed) for seed in range(setting["seeds"])]
            run = result["runs"][0]
            if best is not first:
                run = run_once(cell, options_of_cell(cell, setting) | first["options"], clients, 0)
            names = ("seed", "accuracy", "status", "seconds", "compile_seconds")
            result["default"] = {name: run[name] for name in names}
        except ValueError as error:  # before anything was computed
            result |= {"status": "cannot", "reason": str(error), "runs": []}
    return result | {"programs": compiled.count, "seconds": time.perf_counter() - began}


def divided_clients(config: Config, data_dir: str | None) -> tuple[Federation, Federation]:
    """Returns the clients of `config`, and those on which options are tuned, after an attack on the data of both."""
    federation, n = setups.make_federation(config, _dataset(config.dataset, data_dir), everyone=True), config.clients
    # Evaluations have the same shapes for most shifts, and so the same programs.
    test, new = federation.test, federation.newcomers
    length = max(max_examples(test), 2 * -(-int(np.sum(test.size)) // len(test.size)))
    test = test._replace(examples=jax.tree.map(lambda x: _filled(x, 1, length), test.examples))
    if new is not None:
        examples = jax.tree.map(lambda x: _filled(x, 0, n), new.examples)
        new = new._replace(examples=examples, size=_filled(new.size, 0, n))
    federation = federation._replace(test=test, newcomers=new)
    parts = [select_clients(federation, rows) for rows in (slice(n), slice(n, None))]
    if config.attack is not None:
        parts = [setups.attack_data(config, part) for part in parts]
    return parts[0], parts[1]._replace(newcomers=None)


def _filled(x: np.ndarray, axis: int, length: int) -> np.ndarray:
    """Returns `x` with zeros at the end of an axis, up to a length."""
    return np.pad(x, [(0, max(length - x.shape[i], 0) if i == axis else 0) for i in range(x.ndim)])


@lru_cache(maxsize=1)
def _dataset(name: str, data_dir: str | None) -> Dataset:
    return setups.load_dataset(Config("fedavg", dataset=name), data_dir)


def run_once(
    cell: Cell, options: dict[str, Any], clients: Federation, seed: int, *, first: bool = False
) -> dict[str, Any]:
    """Runs a method with one seed; returns an entry of `runs`. Errors are results, but for a refusal of the `first`.

    Raises:
      ValueError: what a first run refuses, before anything is computed.
    """
    result: dict[str, Any] = {"seed": seed, "status": "ok", "reason": ""} | dict.fromkeys(MEASURED)
    try:
        with warnings.catch_warnings(action="ignore"):
            began = read_joules()
            config = Config(cell.method, **options)
            declared = all_options(cell.method) | find_method(cell.method).declared
            traced = {name: config.values.get(name) for name in searched(cell) if declared[name].traced}
            traced = {name: np.float32(value) for name, value in traced.items() if value is not None}
            make = _maker(config, clients, (*traced,))
            true_cluster = np.where(setups.malicious_clients(config), -1, clients.cluster)
            history = simulate(
                make,
                clients._replace(newcomers=None),
                key=jax.random.key(seed)[None],
                num_rounds=config.rounds,
                true_cluster=true_cluster,
                hyperparams=traced,
                eval_every=config.eval_every,
                seeds=[seed],
                client_axis=mapping.auto(),
            )
            joules = joules_since(began)
        of_newcomers = newcomer_accuracy(make, traced, history, clients)  # a run that fails here has no results
        result |= measured(history, true_cluster, cell)
        result |= {"joules": joules, "newcomers": of_newcomers}
    except DivergedError as error:
        result |= {"status": "diverged", "reason": str(error).partition(";")[0]}
    except Exception as error:
        if first and isinstance(error, ValueError):
            raise
        result |= {"status": "failed", "reason": f"{type(error).__name__}: {error}"[:500]}
    return result


MEASURED = ("accuracy", "worst_tenth", "newcomers", "adjusted_rand", "clusters_found", "rounds_to_95", "bytes_to_95")
MEASURED += ("client_steps", "seconds", "compile_seconds", "joules", "curve", "per_client")


def measured(history: History, true_cluster: np.ndarray, cell: Cell) -> dict[str, Any]:
    """Returns the results of a run."""
    records, last = history.records, history.records[-1]
    same_data = (record for record in records if record.get("step") == last.get("step"))  # before it they have drifted
    near = next(record for record in same_data if record["accuracy"] >= NEAR * last["accuracy"])
    finds = finds_clusters(history) and not find_method(cell.method).by_client
    models = jax.tree.leaves(history.served.models)[0].shape[1]
    choices = choices_among(history.served, models, len(true_cluster), true_cluster)
    collapsed = finds and choices > 1 and last["clusters_in_use"] == 1
    per_client = np.asarray(history.clients["accuracy"], np.float64).reshape(-1).round(4)
    return {
        "status": "collapsed" if collapsed else "ok",
        "reason": f"all clients use one of the {choices} models" if collapsed else "",
        "accuracy": last["accuracy"],
        "worst_tenth": last["worst_decile_accuracy"],
        "adjusted_rand": last.get("adjusted_rand") if finds and len({*true_cluster.tolist()} - {-1}) > 1 else None,
        "clusters_found": last["clusters_in_use"] if finds else None,
        "rounds_to_95": near["round"],
        # A method of one's own need not count these.
        "bytes_to_95": near["bytes_up"] + near["bytes_down"] if {"bytes_up", "bytes_down"} <= near.keys() else None,
        "client_steps": history.client_steps or None,
        "seconds": history.seconds,
        "compile_seconds": history.compile_seconds,
        "curve": [[record["round"], round(record["accuracy"], 6)] for record in records],
        "per_client": [None if np.isnan(x) else float(x) for x in per_client],
    }


def newcomer_accuracy(
    make: Callable[..., Algorithm], hyperparams: dict[str, Any], history: History, clients: Federation
) -> float | None:
    """Returns the mean accuracy of the newcomers after the last round, or None where there are none.

    Only then: of methods with a model for each client, newcomers try all of them, which takes longer than training.
    They choose by every second of their examples, and are evaluated on the others: the best of all clients' models on a
    few examples is good on these by chance.
    """
    if clients.newcomers is None:
        return None
    new, parts = clients.newcomers, []
    for first in (0, 1):
        examples = jax.tree.map(lambda x, first=first: x[:, first::2], new.examples)
        parts.append(new._replace(examples=examples, size=(new.size + 1 - first) // 2))
    learners, tests = parts
    rows = history.state, jax.tree.map(lambda x: x[None], hyperparams)
    models = jax.tree.leaves(history.served.models)[0].shape[1]
    axis, of_newcomers = mapping.auto(), (num_clients(clients.train), models)
    options = {"algorithm": make, "row_axis": mapping.chunked(1), "client_axis": axis, "of_newcomers": of_newcomers}
    results = jax.device_get(evaluate_rows(*rows, tests, learners, **options))
    return float(results["accuracy"][0][tests.size > 0].astype(np.float64).mean())


def command_of(config: Config) -> str:
    """Returns the command of `jfcl run` with the options of `config`.

    Example:
      >>> command_of(Config("ditto", lam=0.5, clients=8, seed=3))
      'jfcl run ditto --lam 0.5 --clients 8 --seed 3'
    """
    words = ["jfcl", "run", config.method]
    for name, value in config.given.items():
        if value is not False:
            words += [flag_of(name)] + ([] if value is True else [str(value)])
    return shlex.join(words)


# ---------------------------------------------------------------------------------------------------------------
# Programs: runs that differ in traced options, seeds, strengths and shifts share theirs.

_makers: dict[tuple, Callable[..., Algorithm]] = {}


def _maker(config: Config, clients: Federation, traced: tuple[str, ...]) -> Callable[..., Algorithm]:
    """Returns the function of the traced options that makes the method; the same object for runs of one program."""
    values = {name: v for name, v in config.values.items() if name not in (*NOT_OF_PROGRAMS, *traced)}
    of_clusters = setups.oracle_clusters(clients) if "cluster" in find_method(config.method).options else None
    largest = max_examples(clients.train)
    key = (json.dumps(values, default=str), traced, clients.input_shape, clients.num_classes, largest)
    key += (None if of_clusters is None else of_clusters.tobytes(),)
    if key not in _makers:
        # It is kept longer than the examples, of which those of any client do.
        train, test = jax.tree.map(lambda x: x[:1].copy(), (clients.train, clients.test))
        few = clients._replace(train=train, test=test, newcomers=None)
        _makers[key] = setups.algorithms_of(config, few, largest, mapping.auto())
    return _makers[key]


# ---------------------------------------------------------------------------------------------------------------
# Energy.

RAPL = Path("/sys/class/powercap")


def joules_since(began: list[tuple[float, float]]) -> float | None:
    """Returns the energy of the machine's processors and GPUs since `read_joules` returned `began`, None where unknown.

    Several processes at a time are measured together.
    """
    ended = read_joules()
    used = [
        end - begin + (span if end < begin else 0)  # after its largest value a counter begins anew
        for (begin, span), (end, _) in zip(began, ended, strict=False)
    ]
    return sum(used) if len(began) == len(ended) > 0 and min(used) >= 0 else None  # a counter may fail meanwhile


def read_joules() -> list[tuple[float, float]]:
    """Returns the counters of energy that this process may read, each with the joules after which it begins anew.

    They are RAPL's of processors (not that of the whole platform, which has these in it) and NVML's of NVIDIA GPUs.
    """
    counters = []
    for zone in sorted(RAPL.glob("intel-rapl:*")):
        with contextlib.suppress(OSError, ValueError):  # absent, or only root may read it
            if (zone / "name").read_text().startswith("package"):
                names = ("energy_uj", "max_energy_range_uj")
                counters.append(tuple(int((zone / name).read_text()) / 1e6 for name in names))
    with contextlib.suppress(Exception):  # not installed, no driver
        import pynvml  # optional

        pynvml.nvmlInit()
        for card in map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount())):
            with contextlib.suppress(pynvml.NVMLError):  # an older card
                counters.append((pynvml.nvmlDeviceGetTotalEnergyConsumption(card) / 1e3, 0.0))
    return counters
