"""`Config`: all options of a run, each with the value that the run uses.

The command line, TOML files, `config.json` and Python give some of them, by the same names; the others are derived
here, once. A `Config` is checked when it is made.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import tomllib
from pathlib import Path
from typing import Any

import jax

from jfcl import kernels
from jfcl.core import check, platform, shown
from jfcl.core.names import option_hint
from jfcl.core.options import MOST_REPEATED, Needs, Option
from jfcl.data.partition import OF_ONE_DIVISION
from jfcl.data.tables import is_file
from jfcl.experiments.optimizers import OPTIMIZERS
from jfcl.experiments.options import (
    AS_DECLARED,
    Attack,
    Data,
    Privacy,
    Run,
    Training,
    all_options,
    common_options,
    method_options,
    methods_with,
    takes,
)
from jfcl.experiments.own import (
    find_aggregator,
    find_method,
    is_on_data,
    is_on_updates,
    required,
    table_defaults,
)
from jfcl.robust import attacks
from jfcl.robust.privacy import accountant, default_delta
from jfcl.simulation.versions import check_version

EVALUATIONS = 50  # in a run, about
LOCAL_STEPS = 10
COHORT, EXAMPLES = 100, 20  # of a population
BUCKET_SIZE = 2
OF_TABLES = ("by", "target", "inputs", "kind")
LARGEST_FILE = 2**20  # bytes; the config.json of a run has about 2,000
# Entries of config.json that are no options; `cohorts`: how those of a population were drawn.
NO_OPTIONS = ("num_rounds", "split_hash", "cohorts", "versions", "schedule_rounds", "given")


@dataclasses.dataclass(frozen=True, init=False, eq=False)
class Config(Data, Training, Attack, Privacy, Run):
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
    given: dict[str, Any]
    values: dict[str, Any] = dataclasses.field(init=False, repr=False)

    def __init__(self, method: str, *, given: dict[str, Any] | None = None, **options: Any):
        check(isinstance(method, str), "method", method, "of type str")
        find_method(method)
        given = {name: value for name, value in ((given or {}) | options).items() if value is not None}
        known = all_options(method)
        for name in given.keys() - known.keys():
            raise TypeError(f"Config has no option {name!r}{option_hint(name, known)}")
        for name, value in given.items():
            if not isinstance(value, jax.Array):  # as in a sweep, perhaps a tracer
                known[name].check(value)
        check_method_takes(method, given)
        values = _resolved(method, given)
        fields = {"method": method, "given": given, "values": {"method": method} | values}
        self.__dict__.update(values | fields)
        _check_together(self)

    def __getattr__(self, name: str) -> None:
        """None, for an option that only other methods have."""
        if name.startswith("__") or "values" not in self.__dict__ or name not in all_options(self.method):
            raise AttributeError(f"Config has no option {name!r}")

    def __eq__(self, other: Any) -> bool:
        return self.values == other.values if isinstance(other, Config) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self.values.items()))

    @property
    def of_population(self) -> bool:
        """Whether clients are kept on the host and a cohort on the device; see `jfcl.experiments.population`."""
        return self.population is not None or self.store is not None


def check_method_takes(method: str, given: dict[str, Any]) -> None:
    """Raises `ValueError` for given options that the method does not have, with the methods that do."""
    common, names = common_options(), [name for name in given if not takes(method, name)]
    if {"population", "store"} & given.keys():  # the population draws its cohorts itself
        names = [name for name in names if name != "cohort"]
    names = [name for name in names if name not in common or given[name] != common[name].default]
    if names:
        words = "; ".join(f"{name} (only {', '.join(methods_with(name))})" for name in sorted(names))
        raise ValueError(f"method {method} has no option {words}")


def _resolved(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Returns all options of a run: those `given`, and for each other its default, or what follows from others."""
    method = find_method(name)
    options = method.options
    defaults = {option.name: option.default for option in (common_options() | method_options(name)).values()}
    found = defaults | table_defaults(given) | given

    def derive(**derived: Any) -> None:
        found.update({name: value for name, value in derived.items() if name in found and name not in given})

    derive(**{name: method.declared[name].default for name in AS_DECLARED if name in method.declared})
    if "momentum" not in options:
        derive(momentum=OPTIMIZERS[found["optimizer"]].momentum)
    if found["population"] is not None or found["store"] is not None:  # of a store, the number is known once it is open
        size = found["population"] or found["clients"]
        derive(clients=size, cohort=min(COHORT, size), examples_per_client=EXAMPLES)
    # Training.
    if found["local_epochs"] is None:
        derive(local_steps=method.defaults.get("local_steps", LOCAL_STEPS))
    keep, falls = method.defaults.get("keep", "nothing"), found["schedule"] != "constant" or found["lr_decay"] != 1
    derive(keep="schedule" if falls and keep == "nothing" else keep)  # a schedule counts the steps of all rounds
    if found["schedule"] == "step":
        derive(step_rounds=max(found["rounds"] // 3, 1))
    derive(eval_every=max(found["rounds"] // EVALUATIONS, 1))
    if "num_clusters" in options:
        derive(num_models=found["clusters"])
    # Restarts are of no use where nothing is drawn, where the draws are chosen otherwise, and with one model.
    chosen = any(found.get(name) is not None for name in ("init_from", "dp_clip", "min_share", "stable_rounds"))
    if chosen or found["num_models"] == 1:
        derive(restarts=1)
    # Robust and private means.
    if found["aggregator"] is not None or found["dp_clip"] is not None:
        derive(weights="equal")
    if found["aggregator"] is not None:
        needed = kernels.aggregator_options(find_aggregator(found["aggregator"]), required=True)
        derive(bucket_size=BUCKET_SIZE if "bucket_size" in needed else None)
    if found["dp_clip"] is not None:
        of_population = found["population"] is not None or found["store"] is not None
        derive(dp_sampling="fixed" if of_population else "poisson")
    if found["dp_noise"]:
        derive(dp_delta=default_delta(found["clients"]))
    return found


def default_precision() -> str:
    """Returns the `--precision` that is the default of this platform, which is that of JAX.

    Example:
      >>> default_precision() in ("float32", "tf32", "bfloat16")
      True
    """
    return {"cpu": "float32", "tpu": "bfloat16"}.get(platform(), "tf32")


# ---------------------------------------------------------------------------------------------------------------
# What depends on several options, and would give a wrong number, or one that misleads.


def _check_together(config: Config) -> None:
    """Raises `ValueError` for every mistake that is visible without data."""
    _check_needs(config)
    if config.of_population:
        _check_population(config)
    _check_data(config)
    _check_optimizer(config)
    _check_attack(config)
    if config.dp_clip is not None:
        _check_private(config)


def _check_needs(config: Config) -> None:
    options = common_options() | method_options(config.method)
    for name in required(find_method(config.method)):
        has = name not in options or config.values[name] is not None
        check(has, name, None, f"given: method {config.method} has no default for it")
    for name, value in config.given.items():
        for needs in options[name].metadata if name in options else ():
            if isinstance(needs, Needs) and value != options[name].default:
                check(needs.are_met(config.values), name, value, f"left out without {needs}")
    if config.seed is not None and config.seeds != 1:
        got = f"got {config.seed} and {config.seeds}"
        raise ValueError(f"Give seed or seeds, not both ({got}): seed is one seed, and seeds is how many, from 0 on.")
    if config.local_steps is not None and config.local_epochs is not None:
        got = f"{config.local_steps} and {config.local_epochs}"
        raise ValueError(f"Give local_steps or local_epochs, not both (got {got}).")
    restarts = (config.restarts or 1, config.restart_rounds or 1)
    tried = restarts[0] * restarts[1] if restarts[0] > 1 else 1
    check(tried <= MOST_REPEATED, "restarts, restart_rounds", restarts, f"of a product of at most {MOST_REPEATED}")


def _check_data(config: Config) -> None:
    for name in () if is_file(config.dataset) else OF_TABLES:
        value = getattr(config, name)
        check(value is None, name, value, "left out unless --dataset is a table, as FILE.csv")
    table = config.partition != "distribution" or config.distribution is not None
    check(table, "distribution", config.distribution, "the csv file of a table with --partition distribution")
    if config.store is None or config.population is not None:  # else the store knows its number of clients
        for name in ("clusters", "cohort"):
            fits = getattr(config, name) is None or getattr(config, name) <= config.clients
            check(fits, name, getattr(config, name), f"at most the {config.clients} clients")
    fits = config.augment is None or not config.augment.startswith("tutorial") or ":" in config.model
    check(fits, "augment", config.augment, "another one, or with a model of your own for images of 24 x 24")


def _check_optimizer(config: Config) -> None:
    name, schedule = config.optimizer, config.schedule
    of_method, takes_it = "momentum" in find_method(config.method).options, OPTIMIZERS[name].momentum is not None
    fits = of_method or takes_it or config.momentum is None
    check(fits, "momentum", config.momentum, f"left out with --optimizer {name}, which has its own")
    accepted = f"one without momentum: that of {config.method} is of the clients' gradients"
    check(not (of_method and OPTIMIZERS[name].momentum), "optimizer", name, accepted)
    counts = schedule != "constant" or config.lr_decay != 1
    falls = f"--schedule {schedule}" if schedule != "constant" else "--lr-decay"
    accepted = f"schedule or everything with {falls}, which counts the steps of all rounds"
    check(config.keep != "nothing" or not counts, "keep", config.keep, accepted)


def _check_attack(config: Config) -> None:
    options = set(find_method(config.method).options)
    if config.attack is not None:
        check(config.malicious > 0, "malicious", config.malicious, "above 0 with --attack")
        some, known = round(config.malicious * config.clients), config.store is None or config.population is not None
        accepted = f"enough for one of the {config.clients} clients, and not for all"
        check(0 < some < config.clients or not known, "malicious", config.malicious, accepted)
        # Local training sends no updates: an attack on them changes only which clients are evaluated.
        attacked = "adversary" in options or not find_method(config.method).sends or is_on_data(config.attack)
        on_data = ", ".join(attacks.DATA_ATTACKS)
        accepted = f"one on data ({on_data}, or of your own): {config.method} has no argument adversary"
        check(attacked, "attack", config.attack, accepted)
    if config.aggregator is not None:
        accepted = "left out with --aggregator, which counts all clients alike"
        check(config.weights in (None, "equal"), "weights", config.weights, accepted)
        options |= set(kernels.aggregator_options(find_aggregator(config.aggregator)))
    for name in ("radius", "bucket_size"):
        fits = getattr(config, name) is None or name in options
        check(fits, name, getattr(config, name), "left out: neither method nor aggregator has one")


def _check_private(config: Config) -> None:
    """Checks what would void the guarantee, or what its accountant does not know."""
    for name, why in {
        "attack": "the updates of hostile clients are functions of those of the others",
        "aggregator": "the guarantee is that of a mean",
        "patience": "the round in which it ends a run follows from results without noise",
    }.items():
        fits = getattr(config, name) is None or (name == "attack" and not is_on_updates(config.attack))
        check(fits, name, getattr(config, name), f"left out with --dp-clip: {why}")
    if config.of_population:
        accepted = "fixed with --population, the cohorts of which have a fixed size"
        check(config.dp_sampling == "fixed", "dp_sampling", config.dp_sampling, accepted)
        check(config.sampling == "uniform", "sampling", config.sampling, "uniform with --dp-clip")
        accepted = "0 with --dp-clip: which clients are slow may depend on their data"
        check(config.stragglers == 0, "stragglers", config.stragglers, accepted)
    if config.dp_noise:
        accepted = "given for one client: the default is a power of the number of clients, 1 here, and promises nothing"
        check(config.dp_delta < 1, "dp_delta", None, accepted)
        try:
            accountant()
        except ImportError as error:
            raise ValueError(f"dp_noise must be used with an accountant: {error}") from None


def _check_population(config: Config) -> None:
    accepted = "left out with --population or --store, which have their own number"
    fits = "clients" not in config.given or config.clients == config.population
    check(fits, "clients", config.clients, accepted)
    check(config.reuse == "auto", "reuse", config.reuse, "left out with --population: data are dealt several times")
    check(config.seeds == 1, "seeds", config.seeds, "1 with --population: run it once for each --seed")
    check(config.newcomer_examples is None, "newcomer_examples", config.newcomer_examples, "left out with --population")
    check(config.partition not in OF_ONE_DIVISION, "partition", config.partition, "another with --population")
    check(config.mapping != "auto", "mapping", config.mapping, "another with --population: the probe is of all clients")


# ---------------------------------------------------------------------------------------------------------------
# Files.


def to_saved(config: Config, split_hash: str) -> dict[str, Any]:
    """Returns the content of `config.json`: the options that the method has, which were given, and the split's hash."""
    saved = {name: value for name, value in config.values.items() if name == "method" or takes(config.method, name)}
    if saved["precision"] == "default":  # a run may continue on another platform
        saved["precision"] = default_precision()
    saved = {name: str(v) if isinstance(v, float) and math.isinf(v) else v for name, v in saved.items()}
    saved |= {"given": sorted(config.given), "split_hash": split_hash, "schedule_rounds": schedule_rounds(config)}
    return saved | {"num_rounds": saved.pop("rounds")}


def schedule_rounds(config: Config) -> int | None:
    """Returns the rounds over which the learning rate is planned, which no resumption can change; None without a plan.

    Example:
      >>> schedule_rounds(Config("fedavg", rounds=30, schedule="cosine")), schedule_rounds(Config("fedavg", rounds=30))
      (30, None)
    """
    return config.rounds if config.schedule != "constant" and "step_rounds" not in config.given else None


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
    options = {name: value for name, value in saved.items() if name not in NO_OPTIONS and value is not None}
    options |= {"rounds": saved["num_rounds"]} if "num_rounds" in saved else {}
    options = {name: float(v) if v in ("inf", "-inf") else v for name, v in options.items()}  # JSON has no inf
    options, names = check_options(options, where, method, text), saved.get("given")
    if not isinstance(names, list) or "method" not in options:
        return options
    given = {name: value for name, value in options.items() if name in (*names, "method")}
    derived = Config(**given).values
    return {name: value for name, value in options.items() if name in given or value != derived.get(name)}


def check_options(raw: dict[str, Any], where: str, method: str | None = None, text: str = "") -> dict[str, Any]:
    """Returns the options in `raw`, read from the file `where`, which has `text`; of `method`, or that in it.

    Raises:
      ValueError: a name that is no option, an option given twice (`local-steps` and `local_steps`), a value that is not
        one of the option.
    """
    method = method or raw.get("method")
    known = all_options(method if isinstance(method, str) else None)
    known, options = {"method": Option("method", str, False, None, "", ())} | known, {}
    for given, value in raw.items():
        name = given.replace("-", "_")
        lines = [i for i, line in enumerate(text.splitlines(), 1) if re.match(rf"\s*\"?{re.escape(given)}\b", line)]
        at = f"{where}, line {lines[0]}" if lines else where
        if name not in known:
            raise ValueError(f"{at}: unknown option {shown(given)}{option_hint(name, known)}")
        if name in options:
            raise ValueError(f"{at}: {name} is given twice")
        try:
            known[name].check(value)
        except ValueError as error:
            raise ValueError(f"{at}: {error}") from None
        options[name] = float(value) if known[name].kind is float else value
    return options


def read_config(path: str, method: str | None = None) -> dict[str, Any]:
    """Reads options from a TOML file or a run's `config.json`; raises `ValueError` for wrong names and values.

    `method` is the one that they are for, where it is not that of the file.
    """
    file, where = Path(path), f"--config {path}"
    if not file.is_file():
        raise ValueError(f"{where}: {'it is no regular file' if file.exists() else 'no such file'}")
    with file.open("rb") as f:  # no more than that: the length of a file may be anything
        content = f.read(LARGEST_FILE + 1)
    if len(content) > LARGEST_FILE:
        raise ValueError(f"{where}: it must be a list of options of at most {LARGEST_FILE} bytes, and is larger")
    try:
        yaml = file.suffix.lower() in (".yaml", ".yml")
        check(not yaml, where, "YAML", "TOML, a line such as lr = 0.1 for each option, or the config.json of a run")
        text, is_json = content.decode(), file.suffix == ".json"
        raw = json.loads(text, object_pairs_hook=_without_repetition) if is_json else tomllib.loads(text)
    except RecursionError:
        raise ValueError(f"{where}: it is nested too deeply; it must hold names and values") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{where}: it must hold names and values, got {type(raw).__name__}")
    if is_json:
        check(not {"rounds", "num_rounds"} <= {*raw}, where, "rounds and num_rounds", "with one of the two")
        if "versions" in raw:  # the configuration of a run
            check_version(Path(path).parent, raw["versions"])
        return from_saved(raw, where, method=method, text=text)
    return check_options(raw, where, method, text)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the dict of an object in a JSON file; raises `ValueError` for a name that it has twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} is given twice")
    return found
