"""Checks of a `Config` whose options depend on each other: what would give a wrong number, or one that misleads."""

from __future__ import annotations

from typing import Any

from jfcl import kernels
from jfcl.core import check
from jfcl.core.options import MOST_REPEATED, Needs
from jfcl.data.partition import OF_ONE_DIVISION
from jfcl.data.tables import is_file
from jfcl.experiments.optimizers import OPTIMIZERS
from jfcl.experiments.options import common_options, method_options
from jfcl.experiments.own import find_aggregator, find_method, is_on_data, is_on_updates, required
from jfcl.robust import attacks
from jfcl.robust.privacy import accountant

COMPARE_ALL = ("one_shot", "flhc", "fesem")  # methods that compare all clients with each other
OF_TABLES = ("by", "target", "inputs", "kind")


def check_together(config: Any) -> None:
    """Raises `ValueError` for every mistake that is visible without data; `config` is a `Config`."""
    _check_needs(config)
    if config.of_population:
        _check_population(config)
    _check_data(config)
    _check_optimizer(config)
    _check_attack(config)
    if config.dp_clip is not None:
        _check_private(config)


def _check_needs(config: Any) -> None:
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


def _check_data(config: Any) -> None:
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


def _check_optimizer(config: Any) -> None:
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


def _check_attack(config: Any) -> None:
    options = set(find_method(config.method).options)
    if config.attack is not None:
        check(config.malicious > 0, "malicious", config.malicious, "above 0 with --attack")
        some, known = round(config.malicious * config.clients), config.store is None or config.population is not None
        accepted = f"enough for one of the {config.clients} clients, and not for all"
        check(0 < some < config.clients or not known, "malicious", config.malicious, accepted)
        # Local training sends no updates: an attack on them changes only which clients are evaluated.
        attacked = "adversary" in options or config.method == "local" or is_on_data(config.attack)
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


def _check_private(config: Any) -> None:
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


def _check_population(config: Any) -> None:
    accepted = "left out with --population or --store, which have their own number"
    fits = "clients" not in config.given or config.clients == config.population
    check(fits, "clients", config.clients, accepted)
    check(config.method not in COMPARE_ALL, "method", config.method, "one that does not compare all clients")
    check(config.seeds == 1, "seeds", config.seeds, "1 with --population: run it once for each --seed")
    check(config.newcomer_examples is None, "newcomer_examples", config.newcomer_examples, "left out with --population")
    check(config.partition not in OF_ONE_DIVISION, "partition", config.partition, "another with --population")
    check(config.mapping != "auto", "mapping", config.mapping, "another with --population: the probe is of all clients")
