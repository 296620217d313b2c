"""`jfcl run METHOD --population N`: clients in a store on the host, of which one cohort at a time is on the device."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from jfcl import data
from jfcl.core import Clients, check, check_labels
from jfcl.data import ClientStore
from jfcl.experiments.config import Config, check_options, to_saved
from jfcl.experiments.options import OF_PARTITION
from jfcl.experiments.own import find_attack, find_method, is_on_data, is_own
from jfcl.experiments.result_files import summarize_run, write_results
from jfcl.experiments.setups import Setup, assemble, dealt, load_dataset, malicious_clients, mapping_of, true_clusters
from jfcl.models import LANGUAGE_MODELS
from jfcl.robust import attacks
from jfcl.simulation.loop import History
from jfcl.simulation.run import simulate
from jfcl.simulation.state_split import Start, check_algorithm

EVALUATED = 1000  # clients, at most
# Options, and their names in the description of a store.
DEALT = {"population": "num_clients", "clusters": "num_clusters", "data_seed": "seed"}
DEALT |= {name: name for name in ("dataset", "examples_per_client", "heterogeneity", "partition", "test_fraction")}
DEALT |= {"vocab_size": "vocab_size", "length": "length"}  # of texts


def run_population(
    config: Config, data_dir: str | None, options: dict[str, Any]
) -> tuple[dict[str, Any], History, Setup]:
    """Runs `config` as `run` does; the `Setup` and the files are of the clients that are evaluated, 1,000 at most.

    `options` are those of `simulate` that both kinds of runs have.

    Raises:
      ValueError: what `run` and `simulate` refuse; several seeds, newcomers; an existing store that
        differs from the options.
    """
    out, resume, asked = options["out"], options["resume"], sorted(config.given)
    check(jax.process_count() == 1, "num_processes", jax.process_count(), "left out with --population: one process")
    check(out is not None or not resume, "out", out, "the folder of the run to resume")
    with contextlib.ExitStack() as stack:
        folder = config.store or (out and Path(out) / "store")
        if folder is None:
            scratch = tempfile.TemporaryDirectory(prefix="jfcl-", ignore_cleanup_errors=True)
            folder = Path(stack.enter_context(scratch)) / "store"
        made = stack.enter_context(_cleared(Path(folder), out))
        config, store, tests, vocab_size, is_new = make_stores(config, Path(folder), data_dir, options["progress"])
        made += [folder] if is_new else []
        malicious = malicious_clients(config)
        rng = np.random.default_rng([config.data_seed, len(store)])
        good = np.flatnonzero(~malicious)
        evaluated = np.sort(rng.choice(good, min(EVALUATED, len(good)), replace=False))
        parts, join = _setup(config, store, tests, evaluated, vocab_size)
        change = None
        if is_on_data(config.attack):
            about = {"num_classes": parts.federation.num_classes, "seed": config.data_seed}
            change = partial(_poisoned, malicious=malicious, attack=find_attack(config.attack), **about)
            change(store.gather(np.flatnonzero(malicious)[:1]))  # what it refuses, it refuses before the run begins
        history = simulate(
            parts.algorithm,
            data.Population(
                store,
                test_clients=tests,
                **{name: getattr(config, name) for name in ("cohort", "sampling", "dropout", "stragglers", "remember")},
                join=join,
                change=change,
                evaluate=evaluated,
            ),
            key=jax.random.key(parts.seeds[0]),
            num_rounds=config.rounds,
            seeds=parts.seeds,
            client_axis=parts.client_axis,
            config=to_saved(config, store.hash) | {"given": asked},
            **options,
        )
    last = history.records[-1]
    summary = summarize_run(config, history, parts) | {"num_clients": len(store), "cohort": config.cohort}
    summary |= {name: int(last[name]) for name in ("asked", "dropped", "cut", "seen")} | {"evaluated": len(evaluated)}
    if "made" not in store.about:  # a store of the user's own clients: the options of a data set do not describe it
        summary |= {"dataset": None, "heterogeneity": None}
    if out is not None:
        state, served = jax.tree.map(lambda x: x[None], (history.state, history.served))
        write_results(Path(out), summary, history._replace(state=state, served=served), parts)
    return summary, history, parts


def _poisoned(clients: Clients, malicious: np.ndarray, **options: Any) -> Clients:
    """Returns a cohort after an attack on the data of its malicious clients."""
    return attacks.poison(clients, malicious[clients.id], **options)


@contextlib.contextmanager
def _cleared(folder: Path, out: str | Path | None) -> Iterator[list]:
    """Removes a store that was made for a run that is then refused, and `out` if it was made for that store.

    The store of a run that has begun is kept. One that was missing when the run was resumed is removed again.

    Yields:
      A list, which is filled once this process has made the store: that of another process stays.
    """
    made, new_out = [], out is not None and not Path(out).exists()
    run = None if out is None else Path(out) / "config.json"
    resumed = run is not None and run.exists()
    try:
        yield made
    except ValueError:
        if resumed or run is None or not run.exists():
            if made:
                shutil.rmtree(folder, ignore_errors=True)
            if new_out:
                with contextlib.suppress(OSError):
                    Path(out).rmdir()
        raise


def _rehearse(config: Config, dataset: data.Dataset, vocab_size: int | None) -> None:
    """Raises `ValueError` for options that the method refuses, before the data are dealt, which takes long."""
    most, largest_id = config.examples_per_client, config.clients - 1

    def cohorts(count):  # of the same example, without a copy
        examples = {n: np.broadcast_to(v[:1], (count, most, *v.shape[1:])) for n, v in dataset.train.items()}
        return Clients(examples, np.full(count, most, np.int32), largest_id - np.arange(count, dtype=np.int32)[::-1])

    cluster = (np.arange(min(config.clients, EVALUATED)) % true_clusters(config)).astype(np.int32)
    about = (true_clusters(config), dataset.num_classes, tuple(dataset.train["x"].shape[1:]), "", "")
    sample = data.Federation(cohorts(1), cohorts(1), cluster, *about)
    parts, join = _assembled(config, sample, vocab_size, most)
    check_algorithm(parts.algorithm, config.clients, config.cohort, join, config.remember, cohorts)
    if parts.algorithm.check is not None:
        parts.algorithm.check(cohorts(config.cohort))


def as_dealt(store: ClientStore) -> dict[str, Any]:
    """Returns the options of `Config` that describe a store."""
    made = store.about.get("made", {"num_clients": len(store)})
    options = {option: made[name] for option, name in DEALT.items() if name in made}
    options |= {name: made[name] for name, p in OF_PARTITION.items() if name in made and made.get("partition") in p}
    known = {name: value for name, value in options.items() if value is not None}
    check_options(known, f"{store.path or 'the store'}: store.json")  # it may come from elsewhere
    if options.get("heterogeneity") == "none":
        options.pop("clusters", None)  # --clusters are the models, then
    elif store.cluster is not None:
        options.setdefault("clusters", int(store.cluster.max()) + 1)
    return options


def check_dealt(config: Config, store: ClientStore, folder: Path) -> None:
    """Raises `ValueError` for options that contradict `store`: without a `--population`, those that are given."""
    asked = config.given if config.population is None else config.values
    differ = "; ".join(
        f"{name}: it has {value!r}, asked for {asked[name]!r}"
        for name, value in as_dealt(store).items()
        if name in asked and asked[name] != value
    )
    if differ:
        raise ValueError(f"store {folder} is of another population ({differ}); nothing was changed")


def make_stores(
    config: Config, folder: Path, data_dir: str | None, progress: bool
) -> tuple[Config, ClientStore, ClientStore, int | None, bool]:
    """Opens the stores of `folder`, or makes them if there are none.

    Returns:
      `(config, train, test, size of the vocabulary or None, whether they were made)`, `config` with the options that
      describe the stores.
    """
    if folder.exists():
        store, tests = data.open_stores(folder)
        for part in (store, tests):
            part.verify(progress=progress)
        check_dealt(config, store, folder)
        config = dataclasses.replace(config, **as_dealt(store))
        of_texts = "vocab_size" in store.about.get("made", {})
        texts = config.model in LANGUAGE_MODELS or (is_own(config.model) and of_texts)
        return config, store, tests, load_dataset(config, data_dir)[1] if texts else None, False
    check(config.population is not None, "population", None, f"given, as there is no store {folder} yet")
    dataset, vocab_size = load_dataset(config, data_dir)
    _rehearse(config, dataset, vocab_size)
    if folder.exists():  # another process has made them meanwhile
        return make_stores(config, folder, data_dir, progress)
    if progress:
        Console(stderr=True).print(f"dealing {dataset.name} to {config.population:,} clients, in {folder}")
    of_texts = {"vocab_size": config.vocab_size, "length": config.length} if vocab_size is not None else {}
    store, tests = data.generate_store(
        folder,
        dataset,
        num_clients=config.population,
        examples_per_client=config.examples_per_client,
        about={"dataset": config.dataset} | of_texts,  # by the name that finds it again
        progress=progress,
        **dealt(config),
    )
    return dataclasses.replace(config, **as_dealt(store)), store, tests, vocab_size, True


def _setup(config: Config, store: ClientStore, tests: ClientStore, evaluated: np.ndarray, vocab_size: int | None):
    """Returns the `Setup` of the evaluated clients, and the start of clients that never took part, or None."""
    unknown = store.cluster is None and "cluster" in find_method(config.method).options
    check(not unknown, "method", config.method, "one for unknown clusters")
    cluster = np.zeros(len(store), np.int32) if store.cluster is None else store.cluster
    sample = data.Federation(
        train=store.gather(evaluated),
        test=tests.gather(evaluated),
        cluster=cluster[evaluated],
        num_clusters=store.about.get("num_clusters", max(int(cluster.max()) + 1, 1)),
        num_classes=store.about.get("num_classes"),
        input_shape=store.fields["x"].shape,
        split_hash=store.hash,
        description=store.about.get("description", f"{len(store)} clients"),
    )
    check(sample.num_classes is not None or vocab_size is not None, "store", store.path, "one with its num_classes")
    if vocab_size is None:
        check_labels(sample.train, sample.num_classes)

    setup, join = _assembled(config, sample._replace(cluster=np.asarray(cluster)), vocab_size, store.max_size)
    return setup._replace(federation=sample), join


def _assembled(
    config: Config, sample: data.Federation, vocab_size: int | None, most: int
) -> tuple[Setup, Start | None]:
    """Returns the `Setup`, and the start of clients that never took part, or None; `most` are a client's examples."""

    def assembled(**changes) -> Setup:
        return assemble(dataclasses.replace(config, **changes), sample, vocab_size, most, mapping_of(config))

    join = None  # new clients start without what chose the first cohort's models: restarts, warm rounds, draws
    if config.restarts not in (None, 1) or config.warm_rounds or config.min_share:
        alone = {} if config.restarts is None else {"restarts": 1}
        join = assembled(**alone, warm_rounds=None, min_share=None).algorithm.init
    return assembled(), join
