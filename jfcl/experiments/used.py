"""The values that a run uses for options that are not given."""

from __future__ import annotations

import inspect
from typing import Any

from jfcl import data
from jfcl.experiments.comparison import is_configured
from jfcl.experiments.config import (
    OF_PARTITION,
    SAVED_ALWAYS,
    Config,
    all_options,
    as_dict,
    check_options,
    from_saved,
    method_options,
    of_population,
)
from jfcl.experiments.optimizers import OPTIMIZERS, SCHEDULE_OPTIONS
from jfcl.experiments.own import find_method, is_own
from jfcl.experiments.privacy import mechanism
from jfcl.methods import METHODS

EVALUATIONS = 50  # in a run, about
ALL = "all"
COHORT = 100  # of a population
BUCKET_SIZE = 2


def method_defaults(config: Config) -> dict[str, Any]:
    """Returns the options that `jfcl run` gives a method where none are given, and that its factory would not have.

    Restarts are left out where nothing is drawn, where the draws are chosen otherwise, and with one model.

    Example:
      >>> method_defaults(Config("ifca")), method_defaults(Config("ifca", min_share=0.1))
      ({'restarts': 5, 'restart_rounds': 5}, {'restart_rounds': 5})
    """
    found = dict(find_method(config.method).defaults)
    chosen = any(getattr(config, name) is not None for name in ("init_from", "dp_clip", "min_share", "stable_rounds"))
    if chosen or (config.num_models or config.clusters) == 1:
        found.pop("restarts", None)
    return found


def local_steps(config: Config) -> int | None:
    """Returns the local steps of a round; None where `local_epochs` counts them."""
    if config.local_epochs is not None:
        return None
    return config.local_steps or find_method(config.method).defaults.get("local_steps", 10)


def keep(config: Config) -> str:
    """Returns what a client keeps of its optimiser for the next round; a schedule keeps at least its count."""
    found = config.keep or find_method(config.method).defaults.get("keep", "nothing")
    falls = config.schedule not in (None, "constant") or config.lr_decay != 1
    return "schedule" if falls and found == "nothing" else found


def eval_every(config: Config) -> int:
    """Returns the rounds between two evaluations.

    Example:
      >>> eval_every(Config("ifca", rounds=200)), eval_every(Config("ifca", rounds=200, eval_every=7))
      (4, 7)
    """
    return config.eval_every or max(1, config.rounds // EVALUATIONS)


def used_options(config: Config) -> dict[str, Any]:
    """Returns all options of `config` with the values that a run uses, as far as they follow from the options alone.

    None stays where an option has no effect, or where data or devices decide.

    Example:
      >>> found = used_options(Config("ifca", rounds=200, clusters=3))
      >>> found["local_steps"], found["optimizer"], found["eval_every"], found["num_models"], found["cohort"]
      (10, 'sgd', 4, 3, 'all')
    """
    options, optimizer = find_method(config.method).options, OPTIMIZERS[config.optimizer or "sgd"]
    own = {name: option.default for name, option in method_options(config.method).items()}
    own |= {"restarts": method_defaults(config).get("restarts", 1)} if "restarts" in own else {}
    own |= {"optimizer": "sgd", "schedule": "constant", "batch_size": ALL, "examples_per_client": ALL}
    own |= {"local_steps": local_steps(config), "keep": keep(config), "eval_every": eval_every(config)}
    own |= {"num_models": config.clusters} if "num_clusters" in options else {}
    own |= {"cohort": ALL} if "cohort" in options else {}
    own |= {"cohort": min(COHORT, config.population or COHORT)} if of_population(config) else {}
    own |= {"momentum": optimizer.momentum} if "momentum" not in options else {}
    schedule = config.schedule or "constant"
    own |= {name: default for name, (users, default) in SCHEDULE_OPTIONS.items() if schedule in users}
    if "step_rounds" in own:
        own["step_rounds"] = max(config.rounds // 3, 1)
    dealing = inspect.signature(data.build).parameters
    own |= {name: dealing[name].default for name, takers in OF_PARTITION.items() if config.partition in takers}
    if config.aggregator is not None:
        own |= {"weights": "equal"}
        own |= {"bucket_size": BUCKET_SIZE} if "bucketing" in config.aggregator.split("+") else {}
    if config.dp_clip is not None:
        dp = mechanism(config)
        own |= {"weights": "equal", "dp_noise": dp.noise, "dp_min_size": dp.min_size, "dp_sampling": dp.sampling}
    given = as_dict(config) | dict.fromkeys(SAVED_ALWAYS.keys() - set(options))
    return {name: own.get(name) if value is None else value for name, value in given.items()}


def as_used(saved: dict[str, Any], where: str) -> dict[str, Any]:
    """Returns the content of the `config.json` of `jfcl run` with the values of `used_options` for those not given.

    That of a run in Python, and that of a user's own method, which would have to be imported, are returned as they are.

    Raises:
      ValueError: a value that is none of the option; `where` is the file.

    Example:
      >>> as_used({"method": "ifca", "clusters": 3, "num_models": None, "num_rounds": 9, "split_hash": ""}, "")
      {'method': 'ifca', 'clusters': 3, 'num_models': 3, 'num_rounds': 9, 'split_hash': ''}
    """
    if not is_configured(saved) or saved["method"] not in METHODS:
        return saved
    names = {*all_options(), "method", "num_rounds"}
    known = {name: value for name, value in saved.items() if name in names}
    options, declared = check_options(from_saved(known), where), all_options(saved["method"])
    for name, value in options.items():
        if name in declared and not (isinstance(value, str) and is_own(value)):  # which would be imported
            try:
                declared[name].check(value)
            except ValueError as error:
                raise ValueError(f"{where} is damaged: {error}") from None
    used = used_options(Config(**options))
    return {name: used.get(name) if value is None or name in SAVED_ALWAYS else value for name, value in saved.items()}
