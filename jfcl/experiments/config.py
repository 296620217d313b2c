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
from jfcl.core.options import Option
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
from jfcl.experiments.own import find_aggregator, find_method, table_defaults
from jfcl.experiments.validation import check_together
from jfcl.robust.privacy import default_delta

EVALUATIONS = 50  # in a run, about
LOCAL_STEPS = 10
COHORT, EXAMPLES = 100, 20  # of a population
BUCKET_SIZE = 2
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
        check_together(self)

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
    method, options = find_method(name), find_method(name).options
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
        return from_saved(raw, where, method=method, text=text)
    return check_options(raw, where, method, text)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the dict of an object in a JSON file; raises `ValueError` for a name that it has twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} is given twice")
    return found
