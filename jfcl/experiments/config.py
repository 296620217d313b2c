"""`Config`: all options of a run, each with the value that the run uses.

The command line, TOML files, `config.json` and Python give some of them, by the same names; the others are derived
here, once. A `Config` is checked when it is made.
"""

import dataclasses
import functools
import itertools
import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from jfcl import kernels
from jfcl.core import check, check_choice, platform, require, shown
from jfcl.core.names import option_hint
from jfcl.core.options import Needs, Option
from jfcl.data import concepts, drift, tables
from jfcl.experiments import lookup
from jfcl.experiments import options as declared
from jfcl.experiments.optimizers import OPTIMIZERS
from jfcl.experiments.options import COMMON, all_options, method_options, methods_with, takes
from jfcl.robust import attacks, privacy
from jfcl.simulation.versions import check_version

EVALUATIONS = 50  # in a run, about
LOCAL_STEPS = 10
COHORT, EXAMPLES = 100, 20  # of a population
BUCKET_SIZE = 2
OF_DRIFT = {"heterogeneity": "swap_pairs", "clients": 10, "drift_steps": drift.STEPS}
METHOD = Option("method", str, None, "")
# Entries of config.json that are no options; `cohorts`: how those of a population were drawn.
NO_OPTIONS = ("split_hash", "cohorts", "versions", "schedule_rounds", "given")


@dataclasses.dataclass(frozen=True, init=False)
class Config(declared.Data, declared.Training, declared.Attack, declared.Privacy, declared.Run):
    """All options of a run, each with the value that it uses: `Config("cfl", clients=20, eps_1=0.4)`.

    Options are keyword arguments and attributes. Those that are left out, or None, are derived from the others: of
    `Config("ifca", rounds=200)`, `eval_every` is 4 and `num_models` is `clusters`. An attribute is None where there is
    no such part, such as `attack` or `cohort`, and for an option that only other methods have. `jfcl run METHOD --help`
    explains the options. A method of your own is `"module:factory"`, which is imported.

    Attributes:
      method: name of the method.
      given: the options that were given.
      values: all options by name, `method` included.

    Raises:
      TypeError: a name that is no option of any method.
      ValueError: a value that its option does not accept, or that does not fit the others; a method that is unknown, or
        cannot be imported.

    Example:
      >>> config = Config("ifca", rounds=200, clusters=3)
      >>> config.local_steps, config.optimizer, config.eval_every, config.num_models, config.restarts
      (10, 'sgd', 4, 3, 5)
      >>> dataclasses.replace(config, clusters=1).restarts
      1
    """

    method: str
    given: Mapping[str, Any] = dataclasses.field(compare=False)
    values: Mapping[str, Any] = dataclasses.field(init=False, repr=False, hash=False)

    def __init__(self, method: str, *, given: Mapping[str, Any] | None = None, **options: Any):
        METHOD.check(method)
        given = {name: value for name, value in ({**(given or {})} | options).items() if value is not None}
        schema = all_options(method)
        if unknown := [name for name in given if name not in schema]:
            raise TypeError(f"Config has no option {unknown[0]!r}{option_hint(unknown[0], schema)}")
        # Options that the method does not have.
        names = [name for name in given if not takes(method, name)]
        if {"population", "store"} & given.keys():  # the population draws its cohorts itself
            names = [name for name in names if name != "cohort"]
        if names := [name for name in names if name not in COMMON or given[name] != COMMON[name].default]:
            words = "; ".join(f"{name} (only {', '.join(methods_with(name))})" for name in sorted(names))
            raise ValueError(f"method {method} has no option {words}")
        for name in [name for name in given if not isinstance(given[name], jax.Array)]:  # as in a sweep, or a tracer
            schema[name].check(given[name])
        values = _resolved(method, given)
        parts = {"given": MappingProxyType(given), "values": MappingProxyType({"method": method} | values)}
        parts["method"] = method
        self.__dict__.update(dict.fromkeys(schema) | values | parts)  # None: options that only other methods have
        for fits, name, accepted in _rules(self):
            check(fits, name, getattr(self, name), accepted)

    def __reduce__(self):
        return functools.partial(Config, given=dict(self.given)), (self.method,)

    @property
    def of_population(self) -> bool:
        """Whether clients are on the host and a cohort on the device; see `jfcl.experiments.population`."""
        return self.population is not None or self.store is not None


def _resolved(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Returns all options of a run: those `given`, and the others as they follow from these, or by default."""
    method = lookup.find_method(name)
    schema = COMMON | {n: o for n, o in method.declared.items() if n in declared.AS_DECLARED}
    defaults = {option.name: option.default for option in (schema | method_options(name)).values()}
    values = defaults | _of_data(given) | given

    def derive(**derived: Any) -> None:
        values.update({name: value for name, value in derived.items() if name in values and name not in given})

    if "momentum" not in method.options:
        derive(momentum=OPTIMIZERS[values["optimizer"]].momentum)
    of_population = values["population"] is not None or values["store"] is not None
    if of_population:  # of a store, the number of clients is known once it is open
        size = values["population"] or values["clients"]
        derive(clients=size, cohort=min(COHORT, size), examples_per_client=EXAMPLES)
    # Training.
    if values["local_epochs"] is None:
        derive(local_steps=method.defaults.get("local_steps", LOCAL_STEPS))
    keep, falls = method.defaults.get("keep", "nothing"), values["schedule"] != "constant" or values["lr_decay"] != 1
    derive(keep="schedule" if falls and keep == "nothing" else keep)  # a schedule counts the steps of all rounds
    if values["schedule"] == "step":
        derive(step_rounds=max(values["rounds"] // 3, 1))
    derive(eval_every=max(values["rounds"] // EVALUATIONS, 1))
    if "num_clusters" in method.options:
        derive(num_models=values["clusters"])
    # Restarts are of no use by default where nothing is drawn, where the draws are chosen otherwise, or with one model.
    chosen = any(values.get(name) is not None for name in ("init_from", "dp_clip", "min_share", "stable_rounds"))
    if "restarts" in method.defaults and (chosen or values["num_models"] == 1):
        derive(restarts=1)
    # Robust and private means.
    if values["aggregator"] is not None:
        needed = kernels.aggregator_options(lookup.find_aggregator(values["aggregator"]), required=True)
        derive(weights="equal", bucket_size=BUCKET_SIZE if "bucket_size" in needed else None)
    if values["dp_clip"] is not None:
        derive(weights="equal", dp_sampling="fixed" if of_population else "poisson")
    if values["dp_noise"]:
        derive(dp_delta=privacy.default_delta(values["clients"]))
    return values


def _of_data(given: dict[str, Any]) -> dict[str, Any]:
    """Returns what a drift decides, a synthetic problem with concepts, and a table.

    The clients of a table are the values of the column `by` that have two rows or more.
    """
    values: dict[str, Any] = {} if given.get("drift") is None else dict(OF_DRIFT)
    if given.get("dataset") in concepts.CONCEPTS:
        values |= {"heterogeneity": given["dataset"], "clusters": concepts.CONCEPTS[given["dataset"]].count}
    if tables.is_file(given.get("dataset")):
        values.setdefault("heterogeneity", "none")
        if "by" in given and given.get("partition", "writer") == "writer" and not {"population", "store"} & {*given}:
            values["partition"] = "writer"
            if "clients" not in given:
                file = Path(given["dataset"])
                changed = file.stat().st_mtime_ns if file.is_file() else None
                values["clients"] = _num_users(str(file), given["by"], changed)
                values["clusters"] = min(4, values["clients"])  # the number of models
    return values


@functools.lru_cache(maxsize=8)
def _num_users(file: str, by: str, changed: int | None) -> int:
    """Returns the number of clients of a table, at least 1; `changed`, the time of its file, is a key of the cache."""
    frame = tables.read_file(file, "dataset", by)
    check_choice("column for by", by, list(frame.columns))
    return max(int((frame[by].value_counts() > 1).sum()), 1)


def default_precision() -> str:
    """Returns the `--precision` that is the default of this platform, which is that of JAX."""
    return {"cpu": "float32", "tpu": "bfloat16"}.get(platform(), "tf32")


# ---------------------------------------------------------------------------------------------------------------
# What depends on several options, and would give a wrong number, or one that misleads. Rules are triples: whether
# the options fit, the option that is to blame, and its accepted values.


def _rules(config: Config) -> Iterator[tuple[Any, str, str]]:
    """Yields, of every mistake that is visible without data, whether there is none, the option, and what it accepts."""
    given, values, method = config.given, config.values, lookup.find_method(config.method)
    options, taken = COMMON | method_options(config.method), method.options
    # Options without which others have no effect, and those of which one is given.
    for name in [name for name in lookup.required(method.make) if name in options]:
        yield values[name] is not None, name, f"given: method {config.method} has no default for it"
    for name, option in [(name, options[name]) for name in given if name in options]:
        for needs in [entry for entry in option.metadata if isinstance(entry, Needs)]:
            yield given[name] == option.default or needs.are_met(values), name, f"left out without {needs}"
    for first, second, without in (("seed", "seeds", 1), ("local_steps", "local_epochs", None)):
        if values[first] is not None and values[second] != without:
            raise ValueError(f"Give {first} or {second}, not both (got {values[first]} and {values[second]}).")
    if config.of_population:
        fits = "clients" not in given or config.clients == config.population
        yield fits, "clients", "left out with --population or --store, which have their own number"
        for name in ("reuse", "newcomer_examples", "drift", "tuning_clients"):
            yield values[name] == options[name].default, name, "left out with --population"
        if config.population is not None:  # else the store knows its number of clients
            yield config.cohort <= config.clients, "cohort", f"at most the {config.clients} clients"
            fits = config.by is None or "partition" in given
            yield fits, "partition", "given with --by and --population, whose clients are not those of the table"
        yield config.seeds == 1, "seeds", "1 with --population: run it once for each --seed"
        yield config.mapping != "auto", "mapping", "another with --population: the probe is of all clients"
    # The data.
    for name in () if tables.is_file(config.dataset) else ("by", "target", "inputs", "kind"):
        yield values[name] is None, name, "left out unless --dataset is a table, as FILE.csv"
    if config.drift is not None:
        fits = config.heterogeneity != "none"
        yield fits, "heterogeneity", "another with --drift, by which clients change clusters; its default is swap_pairs"
        yield not config.track_gap, "track_gap", "left out with --drift: true clusters change"
        yield config.patience is None, "patience", "left out with --drift: the run would end before the last step"
    table = config.partition != "distribution" or config.distribution is not None
    yield table, "distribution", "the csv file of a table with --partition distribution"
    # Training.
    fits = config.num_models != "auto" or method.chooses_number
    yield fits, "num_models", f"a number: method {config.method} does not choose it"
    name, momentum = config.optimizer, OPTIMIZERS[config.optimizer].momentum
    fits = "momentum" in taken or momentum is not None or config.momentum is None
    yield fits, "momentum", f"left out with --optimizer {name}, which has its own"
    yield "momentum" not in taken or not momentum, "optimizer", f"one without momentum: {config.method} has its own"
    falls = "--lr-decay" if config.schedule == "constant" else f"--schedule {config.schedule}"
    fits = config.keep != "nothing" or (config.schedule == "constant" and config.lr_decay == 1)
    yield fits, "keep", f"schedule or everything with {falls}, which counts steps"
    # Hostile clients and robust means.
    if config.attack is not None:
        some = round(config.malicious * config.clients)
        is_counted = config.store is None or config.population is not None
        accepted = f"enough for one of the {config.clients} clients, and not for all"
        yield 0 < some < config.clients or not is_counted, "malicious", accepted
        # Local training sends no updates: an attack on them changes only which clients are evaluated.
        attacked = "adversary" in taken or not method.sends or lookup.is_on_data(config.attack)
        on_data = ", ".join(attacks.DATA_ATTACKS)
        yield attacked, "attack", f"one on data ({on_data}, or of your own): {config.method} has no argument adversary"
    if config.aggregator is not None:
        yield config.weights in (None, "equal"), "weights", "left out with --aggregator, which counts all clients alike"
        taken = [*taken, *kernels.aggregator_options(lookup.find_aggregator(config.aggregator))]
    for name in ("radius", "bucket_size"):
        yield values[name] is None or name in taken, name, "left out: neither method nor aggregator has one"
    # What would void the guarantee of privacy, or what its accountant does not know.
    if config.dp_clip is None:
        return
    fits, why = not lookup.is_on_updates(config.attack), "left out with --dp-clip: "
    yield fits, "attack", f"{why}the updates of hostile clients depend on those of others"
    yield config.aggregator is None, "aggregator", f"{why}the guarantee is that of a mean"
    yield config.patience is None, "patience", f"{why}the round of its end follows from results without noise"
    if config.of_population:
        yield config.dp_sampling == "fixed", "dp_sampling", "fixed with --population, as the size of its cohorts"
        yield config.sampling == "uniform", "sampling", "uniform with --dp-clip"
        yield config.stragglers == 0, "stragglers", "0 with --dp-clip: who is slow may depend on the data"
    if config.dp_noise:
        yield config.dp_delta < 1, "dp_delta", "given for one client: the default is 1 there, and promises nothing"
        try:
            privacy.accountant()
        except ImportError as error:
            raise ValueError(f"dp_noise must be used with an accountant: {error}") from None


# ---------------------------------------------------------------------------------------------------------------
# Files.


def to_saved(config: Config, split_hash: str) -> dict[str, Any]:
    """Returns the content of `config.json`: the options that the method has, which were given, and the split's hash."""
    saved = {name: value for name, value in config.values.items() if name == "method" or takes(config.method, name)}
    saved |= {"cohort": config.cohort} if config.of_population else {}  # with any method
    if saved["precision"] == "default":  # a run may continue on another platform
        saved["precision"] = default_precision()
    saved = {name: str(v) if isinstance(v, float) and math.isinf(v) else v for name, v in saved.items()}
    # The rounds over which a learning rate is planned, which no resumption can change.
    is_planned = config.schedule != "constant" and "step_rounds" not in config.given
    saved |= {"split_hash": split_hash, "schedule_rounds": config.rounds if is_planned else None}
    return saved | {"given": sorted(config.given), "num_rounds": saved.pop("rounds")}


def from_saved(saved: dict[str, Any], where: str = "config.json", *, method: str | None = None, text: str = "") -> dict:
    """Returns the options of `Config` in the content of a `config.json`: those given, and those changed in the file.

    Args:
      saved: the content; without an entry `given`, all that is not None is given.
      where, method, text: as in `check_options`.

    Raises:
      ValueError: as from `check_options`.

    Example:
      >>> from_saved({"method": "ifca", "clients": 8, "chunk": None, "num_rounds": 30})
      {'method': 'ifca', 'clients': 8, 'rounds': 30}
    """
    saved = {"rounds" if name == "num_rounds" else name: value for name, value in saved.items() if value is not None}
    options = {name: value for name, value in saved.items() if name not in NO_OPTIONS}
    options = {name: float(v) if v in ("inf", "-inf") else v for name, v in options.items()}  # JSON has no inf
    options, names = check_options(options, where, method, text), saved.get("given")
    if not isinstance(names, list) or "method" not in options:
        return options
    given = {name: value for name, value in options.items() if name in (*names, "method")}
    derived = Config(**given).values
    return {name: value for name, value in options.items() if name in given or value != derived.get(name)}


def check_options(raw: dict[str, Any], where: str, method: str | None = None, text: str = "") -> dict[str, Any]:
    """Returns the options in `raw`, read from the file `where`, which has `text`; of `method`, or that in it."""
    method = method or raw.get("method")
    schema = all_options(method if isinstance(method, str) else None) | {"method": METHOD}
    options: dict[str, Any] = {}
    for key, value in raw.items():
        name = key.replace("-", "_")
        begins = rf"(\s*\[*[\"']?|.*[{{,]\s*\"){re.escape(key)}[\"']?\s*[=:.\]]"  # in TOML, or JSON on one line
        lines = [i for i, line in enumerate(text.splitlines(), 1) if re.match(begins, line)]
        at = f"{where}, line {lines[0]}" if lines else where
        try:
            if name not in schema:
                raise ValueError(f"unknown option {shown(key)}{option_hint(name, schema)}")
            if name in options:
                raise ValueError(f"{name} is given twice")
            schema[name].check(value)
        except ValueError as error:
            raise ValueError(f"{at}: {error}") from None
        options[name] = float(value) if schema[name].kind is float else value
    return options


def read_config(path: str, method: str | None = None) -> dict[str, Any]:
    """Reads options from a TOML file or a run's `config.json`, for `method` where it is not that of the file."""
    file, where = Path(path), f"--config {path}"
    if not file.is_file():
        raise ValueError(f"{where}: {'it is no regular file' if file.exists() else 'no such file'}")
    yaml, is_json = file.suffix.lower() in (".yaml", ".yml"), file.suffix == ".json"
    check(file.stat().st_size < 10**7, where, file.stat().st_size, "a file of less than 10 MB")
    check(not yaml, where, "YAML", "TOML, a line such as lr = 0.1 for each option, or the config.json of a run")
    try:
        text = file.read_text(encoding="utf-8-sig")  # Windows may begin a file with a mark
        raw = json.loads(text, object_pairs_hook=_given_once) if is_json else tomllib.loads(text)
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{where}: it must hold names and values, got {type(raw).__name__}")
    if not is_json:
        return check_options(raw, where, method, text)
    require(not {"rounds", "num_rounds"} <= {*raw}, f"{where} has rounds and num_rounds: give one of the two")
    if "versions" in raw:  # the configuration of a run
        check_version(file.parent, raw["versions"])
    return from_saved(raw, where, method=method, text=text)


def _given_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns an object of JSON; `ValueError` for a name that occurs twice, of which Python takes the last value."""
    names = sorted(name for name, _ in pairs)
    if twice := [name for name, after in itertools.pairwise(names) if name == after]:
        raise ValueError(f"{twice[0]} is given twice")
    return dict(pairs)
