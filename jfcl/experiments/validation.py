"""Checks of a `Config`: every option by itself, and those that depend on each other, before data are loaded."""

from __future__ import annotations

from jfcl import kernels, models
from jfcl.core import check
from jfcl.core.options import MOST_REPEATED, Excludes, Needs
from jfcl.data.tables import is_file
from jfcl.experiments.config import (
    AS_DECLARED,
    OF_COHORTS,
    OF_PARTITION,
    Config,
    all_options,
    common_options,
    method_options,
    methods_with,
    of_population,
    partition_options,
    takes,
)
from jfcl.experiments.optimizers import OPTIMIZERS, SCHEDULE_OPTIONS
from jfcl.experiments.own import find_aggregator, find_method, is_on_data, required
from jfcl.experiments.privacy import check_private_run
from jfcl.experiments.used import method_defaults
from jfcl.robust import attacks


def check_values(config: Config) -> None:
    """Checks every option of `config` by itself: its type, its range, and that the method has it.

    Raises:
      ValueError: one does not fit; `validate` checks those that depend on each other and on the data as well.
    """
    check(isinstance(config.method, str), "method", config.method, "of type str")
    _check_names(config.method)
    for name, option in common_options().items():
        option.check(getattr(config, name))
    for name, value in config.options.items():
        all_options(config.method)[name].check(value)
    _check_method_has(config)


def _check_names(method: str) -> None:
    """Raises `ValueError` for an unknown method, and for options with the name of a common one, or no text."""
    declared, where = find_method(method).declared, f"argument {{}} of method {method!r} must have"
    for name in declared.keys() & {"method", "options", *common_options()} - set(AS_DECLARED):
        raise ValueError(f"{where.format(name)} another name: --{name.replace('_', '-')} is of every method")
    for name, option in method_options(method).items():
        if not option.text:
            raise ValueError(f"{where.format(name)} an entry under Args in the docstring, its flag's help")


def _check_method_has(config: Config) -> None:
    """Raises `ValueError` for given options that the method does not have, with the methods that do."""
    given = [name for name, option in common_options().items() if getattr(config, name) not in (option.default, None)]
    if of_population(config):
        given = [name for name in given if name != "cohort"]  # the population draws its cohorts itself
    refused = {name: methods_with(name) for name in [*given, *config.options] if not takes(config.method, name)}
    if refused:
        words = "; ".join(f"{name} (only {', '.join(methods)})" for name, methods in sorted(refused.items()))
        raise ValueError(f"method {config.method} has no option {words}")


def validate(config: Config) -> None:
    """Raises `ValueError` for every mistake that is visible without data."""
    check_values(config)
    _check_data(config)
    _check_training(config)
    _check_attack(config)
    _check_own(config)
    check_private_run(config)
    _check_run(config)


def _check_run(config: Config) -> None:
    if config.seed is not None and config.seeds != 1:
        raise ValueError(
            f"Give seed or seeds, not both (got {config.seed} and {config.seeds}): seed is one seed, "
            "and seeds is how many, from 0 on."
        )
    ends = config.patience is not None or config.monitor == Config.monitor
    check(ends, "monitor", config.monitor, "left out without --patience")
    for name, why in {"auto": ", which tries several", "vmap": ""}.items():
        fits = config.chunk is None or config.mapping != name
        check(fits, "chunk", config.chunk, f"left out with --mapping {name}{why}")
    given = config.chunk is not None or config.mapping != "chunked"
    check(given, "chunk", config.chunk, "given with --mapping chunked")
    one = config.devices is None or config.mapping not in ("vmap", "chunked")
    check(one, "devices", config.devices, f"left out with --mapping {config.mapping}, which is of one device")


def _check_data(config: Config) -> None:
    for name in ("by", "target", "inputs", "kind"):
        value = getattr(config, name)
        check(
            value is None or is_file(config.dataset), name, value, "left out unless --dataset is a table, as FILE.csv"
        )
    check(config.clusters <= config.clients, "clusters", config.clusters, f"at most the {config.clients} clients")
    for name, value in partition_options(config).items():
        takers = OF_PARTITION[name]
        check(config.partition in takers, name, value, f"left out without --partition {' or '.join(takers)}")
    table = config.partition != "distribution" or config.distribution is not None
    check(table, "distribution", config.distribution, "the csv file of a table with --partition distribution")
    if not of_population(config):
        for name in OF_COHORTS:
            value, default = getattr(config, name), common_options()[name].default
            check(value == default, name, value, "left out without --population")
    compares = config.remember is None or config.method == "cfl"
    check(compares, "remember", config.remember, f"left out: {config.method} compares no updates")
    if config.cohort is not None:
        check(config.cohort <= config.clients, "cohort", config.cohort, f"at most the {config.clients} clients")


def _check_training(config: Config) -> None:
    both = config.local_steps is not None and config.local_epochs is not None
    if both:
        got = f"{config.local_steps} and {config.local_epochs}"
        raise ValueError(f"Give local_steps or local_epochs, not both (got {got}).")
    _check_optimizer(config)
    if config.augment is not None:
        images = config.model not in models.LANGUAGE_MODELS
        check(images, "augment", config.augment, f"left out: model {config.model!r} reads texts")
        fits = not config.augment.startswith("tutorial") or ":" in config.model
        check(fits, "augment", config.augment, "another one, or with a model of your own for images of 24 x 24")


def _check_optimizer(config: Config) -> None:
    """Checks the options of optimiser and schedule against each other."""
    name, schedule = config.optimizer or "sgd", config.schedule or "constant"
    of_method, takes_it = "momentum" in find_method(config.method).options, OPTIMIZERS[name].momentum is not None
    fits = of_method or takes_it or config.momentum is None
    check(fits, "momentum", config.momentum, f"left out with --optimizer {name}, which has its own")
    accepted = f"one without momentum: that of {config.method} is of the clients' gradients"
    check(not (of_method and OPTIMIZERS[name].momentum), "optimizer", name, accepted)
    decays = name != "adamw" or config.weight_decay != 0
    check(decays, "weight_decay", config.weight_decay, "above 0 with --optimizer adamw, which is adam without it")
    some = config.decay_only is None or config.weight_decay != 0
    check(some, "decay_only", config.decay_only, "left out without --weight-decay")
    for option, (schedules, _) in SCHEDULE_OPTIONS.items():
        value = getattr(config, option)
        accepted = f"left out without --schedule {' or '.join(schedules)}"
        check(value is None or schedule in schedules, option, value, accepted)
    if schedule != "constant":
        check(config.lr_decay == 1, "lr_decay", config.lr_decay, f"left out with --schedule {schedule}")
    falls = f"--schedule {schedule}" if schedule != "constant" else "--lr-decay"
    counts = schedule != "constant" or config.lr_decay != 1
    accepted = f"schedule or everything with {falls}, which counts the steps of all rounds"
    check(config.keep != "nothing" or not counts, "keep", config.keep, accepted)


def _check_attack(config: Config) -> None:
    options = set(find_method(config.method).options)
    if config.attack is not None:
        check(config.malicious > 0, "malicious", config.malicious, "above 0 with --attack")
        some = round(config.malicious * config.clients)
        accepted = f"enough for one of the {config.clients} clients, and not for all"
        check(0 < some < config.clients, "malicious", config.malicious, accepted)
        # Local training sends no updates: an attack on them changes only which clients are evaluated.
        attacked = "adversary" in options or config.method == "local" or is_on_data(config.attack)
        on_data = ", ".join(attacks.DATA_ATTACKS)
        accepted = f"one on data ({on_data}, or of your own): {config.method} has no argument adversary"
        check(attacked, "attack", config.attack, accepted)
    else:
        check(config.malicious == 0, "malicious", config.malicious, "left out without --attack")
    if config.aggregator is not None:
        weights = config.options.get("weights")
        check(weights is None, "weights", weights, "left out with --aggregator, which counts all clients alike")
        options |= set(kernels.aggregator_options(find_aggregator(config.aggregator)))
    for name in ("radius", "bucket_size"):
        fits = getattr(config, name) is None or name in options
        check(fits, name, getattr(config, name), "left out: neither method nor aggregator has one")


def _check_own(config: Config) -> None:
    """Checks the options of the method against each other, as their declarations `Need` and `Exclude` others."""
    given = config.options | {name: getattr(config, name) for name in common_options()}
    for name in required(find_method(config.method)):
        has = name not in method_options(config.method) or given.get(name) is not None
        check(has, name, None, f"given: method {config.method} has no default for it")
    for name, value in config.options.items():
        option = method_options(config.method)[name]
        for other in option.others(Needs):
            has = given.get(other) or method_defaults(config).get(other)
            check(has, name, value, f"left out without --{other.replace('_', '-')}")
        for other in option.others(Excludes):
            check(given.get(other) is None, name, value, f"left out with --{other.replace('_', '-')}")
    restarts = (config.restarts or 1, config.restart_rounds or 1)
    tried = restarts[0] * restarts[1] if restarts[0] > 1 else 1
    accepted = f"of a product of at most {MOST_REPEATED}"
    check(tried <= MOST_REPEATED, "restarts, restart_rounds", restarts, accepted)
