"""`jfcl run METHOD --population N`: clients in a store on the host, of which one cohort at a time is on the device."""

import contextlib
import dataclasses
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from jfcl import data, models
from jfcl.core import Clients, check, check_labels, require
from jfcl.core.names import renamed
from jfcl.data import ClientStore, Population, heterogeneity, pools
from jfcl.data.tables import is_file
from jfcl.experiments import lookup, setups
from jfcl.experiments.config import Config, check_options
from jfcl.experiments.options import OF_PARTITION
from jfcl.experiments.setups import Setup
from jfcl.robust import attacks
from jfcl.simulation.folder import differences
from jfcl.simulation.layout import Start, check_cohorts

EVALUATED = 1000  # clients, at most
OF_TABLE, OF_TEXTS = ("by", "target", "inputs", "kind"), ("vocab_size", "length")
# Options, and their names in the description of a store.
DEALT = {"population": "num_clients", "clusters": "num_clusters", "data_seed": "seed"}
DEALT |= {name: name for name in ("dataset", "examples_per_client", *setups.DEALT, *OF_TABLE, *OF_TEXTS)}


@contextlib.contextmanager
def open_population(
    config: Config, data_dir: str | None, out: str | Path | None, progress: bool
) -> Iterator[tuple[Config, Setup, Population]]:
    """Opens the population of a run, whose store is made if there is none.

    Yields:
      The configuration, with the options that describe the store; the `Setup` of the clients that are evaluated, 1,000
      at most; the population.

    Raises:
      ValueError: several processes; an existing store that differs from the options. A store that was made for a run
        that is refused is removed.
    """
    require(jax.process_count() == 1, "a population runs in one process; leave out num_processes")
    with contextlib.ExitStack() as stack:
        folder = config.store or (out and Path(out) / "store")
        if folder is None:
            scratch = tempfile.TemporaryDirectory(prefix="jfcl-", ignore_cleanup_errors=True)
            folder = Path(stack.enter_context(scratch)) / "store"
        new_stores = stack.enter_context(_cleared(Path(folder), out))
        config, store, tests, vocab_size = _make_or_open(config, Path(folder), data_dir, progress, new_stores)
        require("x" in store.fields, f"store {store.path} has no inputs 'x', but {sorted(store.fields)}")
        unknown = store.cluster is None and "cluster" in lookup.find_method(config.method).options
        require(not unknown, f"method {config.method} needs the true clusters, and the store does not know them")
        # Evaluated clients.
        malicious, rng = setups.malicious_clients(config), np.random.default_rng([config.data_seed, len(store)])
        benign = np.flatnonzero(~malicious)
        evaluated = np.sort(rng.choice(benign, min(EVALUATED, len(benign)), replace=False))
        cluster = np.zeros(len(store), np.int32) if store.cluster is None else np.asarray(store.cluster)
        sample = data.Federation(
            train=store.gather(evaluated),
            test=tests.gather(evaluated),
            cluster=cluster,
            num_clusters=store.about.get("num_clusters", max(int(cluster.max()) + 1, 1)),
            num_classes=store.about.get("num_classes"),
            input_shape=store.fields["x"].shape,
            split_hash=store.hash,
            description=store.about.get("description", f"{len(store)} clients"),
            mixture=data.mixture_of(store, evaluated),
            vocab_size=vocab_size,
        )
        fits = sample.num_classes is not None or vocab_size is not None
        require(fits, f"store {store.path} does not say its num_classes")
        if vocab_size is None:
            check_labels(sample.train, sample.num_classes)
        parts, join = _assembled(config, sample, store.max_size)
        parts = parts._replace(federation=sample._replace(cluster=cluster[evaluated]))
        # Attacks on data.
        change = None
        if lookup.is_on_data(config.attack):
            attack, num_classes = lookup.find_attack(config.attack), parts.federation.num_classes

            def change(cohort: Clients) -> Clients:
                hostile = malicious[cohort.id]
                return attacks.poison(cohort, hostile, attack, num_classes=num_classes, seed=config.data_seed)

            change(store.gather(np.flatnonzero(malicious)[:1]))  # what it refuses, it refuses before the run begins
        named = {name: getattr(config, name) for name in ("cohort", "sampling", "dropout", "stragglers", "remember")}
        population = Population(store, test_clients=tests, join=join, change=change, evaluate=evaluated, **named)
        yield config, parts, population


def population_summary(population: Population, last: dict[str, Any]) -> dict[str, Any]:
    """Returns the entries of `summary.json` that a population has, from its `last` record."""
    entries: dict[str, Any] = {"num_clients": len(population.clients), "cohort": population.cohort}
    entries |= {name: int(last[name]) for name in ("asked", "dropped", "cut", "seen")}
    entries["evaluated"] = len(population.evaluate)
    if "made" not in population.clients.about:  # of the user's clients: the options of a data set do not describe them
        entries |= {"dataset": None, "heterogeneity": None}
    return entries


@contextlib.contextmanager
def _cleared(folder: Path, out: str | Path | None) -> Iterator[list]:
    """Removes a store that was made for a run that is then refused, and `out` if it was made for that store.

    The store of a run that has begun is kept. The list that it yields is filled once this process has made the store.
    """
    run, new_out = Path(out or folder) / "config.json", out is not None and not Path(out).exists()
    new_stores, resumed = [], run.exists()
    try:
        yield new_stores
    except ValueError:
        if resumed or not run.exists():
            if new_stores:
                shutil.rmtree(folder, ignore_errors=True)
            if new_out:
                with contextlib.suppress(OSError):
                    Path(out).rmdir()
        raise


# ---------------------------------------------------------------------------------------------------------------
# The store.


def _make_or_open(
    config: Config, folder: Path, data_dir: str | None, progress: bool, new_stores: list
) -> tuple[Config, ClientStore, ClientStore, int | None]:
    """Opens the stores of `folder`, or makes them and adds the folder to `new_stores`.

    Returns the configuration with the options that describe them, both stores, and the size of the vocabulary of texts.
    """
    vocab_size = None
    if not folder.exists():
        require(config.population is not None, f"Give population (a number of clients): there is no store {folder} yet")
        dataset = setups.load_dataset(config, data_dir)
        vocab_size = dataset.vocab_size
        _rehearse(config, dataset)
    if not folder.exists():  # else another process has made it meanwhile
        if progress:
            Console(stderr=True).print(f"dealing {dataset.name} to {config.population:,} clients, in {folder}")
        names = (*(OF_TABLE if is_file(config.dataset) else ()), *(() if vocab_size is None else OF_TEXTS))
        about = {name: getattr(config, name) for name in ("dataset", *names)}  # the name that finds it again
        numbers = {"num_clients": config.population, "examples_per_client": config.examples_per_client}
        with renamed(setups.names_of_data(config)):
            dealt = numbers | setups.dealt(config)
            store, tests = data.generate_store(folder, dataset, about=about, progress=progress, **dealt)
        new_stores.append(folder)
        return dataclasses.replace(config, **_as_dealt(store)), store, tests, vocab_size
    store, tests = data.open_stores(folder)
    for part in (store, tests):
        part.verify(progress=progress)
    options, asked = _as_dealt(store), config.given if config.population is None else config.values
    if differ := differences(options, asked, [name for name in options if name in asked]):
        raise ValueError(f"store {folder} is of another population ({differ}); nothing was changed")
    config = dataclasses.replace(config, **options)
    of_texts = "vocab_size" in store.about.get("made", {})
    if config.model in models.LANGUAGE_MODELS or (lookup.is_import_path(config.model) and of_texts):
        vocab_size = setups.load_dataset(config, data_dir).vocab_size
    return config, store, tests, vocab_size


def _as_dealt(store: ClientStore) -> dict[str, Any]:
    """Returns the options of `Config` that describe a store."""
    deal = store.about.get("made", {"num_clients": len(store)})
    deal = {"strength": 1.0, "mixture": None} | deal if "heterogeneity" in deal else deal
    options = {option: deal[name] for option, name in DEALT.items() if name in deal}
    options |= {name: deal[name] for name, p in OF_PARTITION.items() if name in deal and deal.get("partition") in p}
    present = {name: value for name, value in options.items() if value is not None}
    check_options(present, f"{store.path or 'the store'}: store.json")  # it may come from elsewhere
    if options.get("heterogeneity") == "none":
        options.pop("clusters", None)  # --clusters are the models, then
    elif store.cluster is not None:
        options.setdefault("clusters", int(store.cluster.max()) + 1)
    return options


# ---------------------------------------------------------------------------------------------------------------
# The method.


def _rehearse(config: Config, dataset: data.Dataset) -> None:
    """Raises `ValueError` for options that the method refuses, before the data are dealt, which takes long."""
    fits = dataset.num_classes is not None or dataset.vocab_size is not None
    check(fits, "dataset", config.dataset, "a classification, or one of texts, with --population")
    most, largest_id = config.examples_per_client, config.clients - 1
    dataset = pools.with_channels(dataset, heterogeneity.shifts_of(config.heterogeneity) if config.strength else ())

    def cohorts(count):  # of the same example, without a copy
        examples = {n: np.broadcast_to(v[:1], (count, most, *v.shape[1:])) for n, v in dataset.train.items()}
        return Clients(examples, np.full(count, most, np.int32), largest_id - np.arange(count, dtype=np.int32)[::-1])

    cluster = (np.arange(min(config.clients, EVALUATED)) % setups.true_clusters(config)).astype(np.int32)
    fields = (setups.true_clusters(config), dataset.num_classes, tuple(dataset.train["x"].shape[1:]), "", "")
    sample = data.Federation(cohorts(1), cohorts(1), cluster, *fields, vocab_size=dataset.vocab_size)
    parts, join = _assembled(config, sample, most)
    check_cohorts(parts.algorithm, config.clients, config.cohort, join, config.remember, cohorts)
    if parts.algorithm.check is not None:
        parts.algorithm.check(cohorts(config.cohort))


def _assembled(config: Config, sample: data.Federation, most: int) -> tuple[Setup, Start | None]:
    """Returns the `Setup`, and the start of clients that never took part, or None; `most` are a client's examples."""

    def assembled(**changes) -> Setup:
        of_changes = dataclasses.replace(config, **changes)
        return setups.assemble(of_changes, sample, most, setups.mapping_of(config))

    join = None  # new clients start without what chose the first cohort's models: restarts, warm rounds, draws
    if config.restarts not in (None, 1) or config.warm_rounds or config.min_share:
        restarts = {} if config.restarts is None else {"restarts": 1}
        join = assembled(**restarts, warm_rounds=None, min_share=None).algorithm.init
    return assembled(), join
