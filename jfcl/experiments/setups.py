"""From a `Config` to data, task, local training, algorithm and mapping."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jfcl import data, kernels, mapping, models
from jfcl.core import Adversary, Algorithm, PyTree, Task, check, client_ids, is_concrete, max_examples, platform, shown
from jfcl.core.names import renamed
from jfcl.data import heterogeneity, tables
from jfcl.data.build import select_clients
from jfcl.experiments import lookup, privacy, results
from jfcl.experiments.config import Config
from jfcl.experiments.optimizers import SERVER_OPTIMIZERS, beginnings, make_training, starting_with
from jfcl.experiments.options import AS_DECLARED, OF_PARTITION, PRECISIONS, method_options
from jfcl.robust import attacks
from jfcl.simulation import probe
from jfcl.training.local import LocalTraining

DEALT = ("heterogeneity", "strength", "mixture", "partition", "test_fraction")  # of `data.build` and `generate_store`


class Setup(NamedTuple):
    """The parts of a run that a `Config` describes."""

    federation: Any
    task: Task
    algorithm: Algorithm
    seeds: list[int]
    client_axis: mapping.Mapping
    training: LocalTraining
    malicious: np.ndarray | None = None

    @property
    def true_cluster(self) -> np.ndarray:
        """The true clusters `[N]` of the clients, -1 for malicious ones, whose clusters are no result."""
        cluster = self.federation.cluster
        return cluster if self.malicious is None else np.where(self.malicious, -1, cluster)


def seeds_of(config: Config) -> list[int]:
    """Returns the seeds of a run."""
    return list(range(config.seeds)) if config.seed is None else [config.seed]


def malicious_clients(config: Config) -> np.ndarray:
    """Returns the mask `[N]` of the malicious clients, the same for all seeds of one split."""
    return attacks.choose_malicious(config.clients, config.malicious, seed=config.data_seed)


def true_clusters(config: Config) -> int:
    """Returns the number of hidden clusters: one, where nothing distinguishes any."""
    return 1 if config.heterogeneity == "none" else config.clusters


# ---------------------------------------------------------------------------------------------------------------
# The method.


def make_algorithm(config: Config, task: Task, training: LocalTraining, federation, client_axis) -> Algorithm:
    """Returns the method of `config`."""
    method = lookup.find_method(config.method)
    # Options with the same name and type in the factory, and those that stand for an object.
    names = [name for name in (*AS_DECLARED, *method_options(config.method)) if name in method.options]
    options: dict[str, Any] = {name: config.values[name] for name in names}
    if config.of_population and not config.remember:  # the cohort is all clients that are on the device
        options.pop("cohort", None)
    _check_beginnings(config, task)
    aggregator = None if config.aggregator is None else make_aggregator(config)
    if lookup.is_on_updates(config.attack) and "adversary" in method.options:
        attack = lookup.find_attack(config.attack, aggregator=aggregator)
        options["adversary"] = Adversary(attack, malicious_clients(config))
    is_average = config.server_optimizer == "average" and is_concrete(config.server_lr) and config.server_lr == 1
    options |= {
        "server_optimizer": None if is_average else SERVER_OPTIMIZERS[config.server_optimizer](config.server_lr),
        "aggregator": aggregator,
        "dp": None if config.dp_clip is None else privacy.mechanism(config),
        "shared": None if config.share is None else starting_with(config.share),
        "personal": None if config.personal is None else starting_with(config.personal),
        "init_params": None if config.init_from is None else _warm_start(config, task),
        "num_clusters": config.num_models if "num_clusters" in method.options else None,
        "cluster": oracle_clusters(federation) if "cluster" in method.options else None,
        "true_cluster": np.where(malicious_clients(config), -1, federation.cluster) if config.track_gap else None,
    }
    options = {name: value for name, value in options.items() if value is not None}
    algorithm = method.make(task, training, client_axis=client_axis, **options)
    check(isinstance(algorithm, Algorithm), f"the result of method {config.method!r}", algorithm, "an Algorithm")
    return algorithm


def oracle_clusters(federation: data.Federation) -> np.ndarray:
    """Returns the true clusters `[N]`, of drifting data `[T, N]`."""
    return federation.cluster if federation.drift is None else federation.drift.cluster


def _check_beginnings(config: Config, task: Task) -> None:
    """Checks that each beginning in `--share`, `--personal` and `--decay-only` is one of the model's parameters."""
    for option in ("share", "personal", "decay_only"):
        for beginning in beginnings(getattr(config, option)):
            paths = models.parameter_paths(task)
            fits = beginning and any(path.startswith(beginning) for path in paths)
            check(fits, option, beginning, f"the beginning of one of the model's parameters: {', '.join(paths)}")


def make_aggregator(config: Config) -> Callable:
    """Returns the aggregator of `config`, with the number of malicious clients in a cohort and its other options."""
    parts = lookup.find_aggregator(config.aggregator)
    options = {
        "num_malicious": round(config.malicious * (config.cohort or config.clients)),
        "radius": config.radius,
        "bucket_size": config.bucket_size,
        "trusted": int(np.argmin(malicious_clients(config))) if config.cohort is None else None,  # the first benign one
    }
    taken = kernels.aggregator_options(parts)
    options = {name: value for name, value in options.items() if name in taken and value is not None}
    return kernels.make_aggregator(parts, **options)


def _warm_start(config: Config, task: Task) -> PyTree:
    """Returns the models of `--init-from`: `[K, ...]`, or one without that axis, from which all clients start."""
    params, like = results.load_params(config.init_from), jax.eval_shape(task.init, jax.random.key(0))
    try:
        params = results.structured(params, like)
        models.pretrained.fitting(task, jax.tree.map(lambda leaf: leaf[0], params))
    except ValueError as error:
        accepted = f"a run that ended with models {config.model!r} of these sizes ({error})"
        raise ValueError(f"init_from must be {accepted}, got {config.init_from!r}") from None
    if any(len(leaf) > 1 for leaf in jax.tree.leaves(params)):
        return params
    choose = lookup.find_method(config.method).chooses and not config.warm_rounds and config.num_models != 1
    accepted = "a run that ended with several models: of equals all clients would choose the first"
    check(not choose, "init_from", config.init_from, accepted)
    return jax.tree.map(lambda leaf: leaf[0], params)


# ---------------------------------------------------------------------------------------------------------------
# The data and the task.


def attack_data(config: Config, federation):
    """Applies an attack on data to the malicious clients of `federation`, and removes their test examples."""
    train, test = federation.train, federation.test
    malicious = malicious_clients(config)[np.asarray(client_ids(train))]  # of this process's clients
    if lookup.is_on_data(config.attack):
        attack = lookup.find_attack(config.attack)
        train = attacks.poison(train, malicious, attack, num_classes=federation.num_classes, seed=config.data_seed)
    size, drift = np.where(malicious, 0, test.size).astype(np.int32), federation.drift
    drift = None if drift is None else drift._replace(test=drift.test._replace(size=size))
    return federation._replace(train=train, test=test._replace(size=size), drift=drift)


def load_dataset(config: Config, data_dir: str | None) -> data.Dataset:
    """Returns the data set of `config`, texts as token ids."""
    if tables.is_file(config.dataset):
        x = None if config.inputs is None else [column.strip() for column in config.inputs.split(",")]
        columns = {"by": config.by, "x": x, "y": config.target, "kind": config.kind}
        with renamed({"frame": "dataset", "x": "inputs", "y": "target"}):
            dataset = data.from_frame(config.dataset, **columns, scale=True, name=Path(config.dataset).name)
    else:
        dataset = lookup.find_dataset(config.dataset, data_dir)
    texts = dataset.train["x"].dtype.kind in "UO"
    check_model_reads(config, texts)
    if not texts:
        return dataset
    kinds = ("none", *heterogeneity.SELECTIVE)
    accepted = f"{', '.join(kinds[:-1])} or {kinds[-1]} for texts, as model {config.model!r} does not use labels"
    check(config.heterogeneity in kinds, "heterogeneity", config.heterogeneity, accepted)
    check(not lookup.is_on_data(config.attack), "attack", config.attack, "one on updates for texts")
    return data.tokenize(dataset, vocab_size=config.vocab_size, length=config.length)[0]


def check_model_reads(config: Config, texts: bool) -> None:
    """Raises `ValueError` for a model of images on `texts`, and the other way round; a user's model may read both."""
    check(config.augment is None or not texts, "augment", config.augment, "left out for texts")
    if not lookup.is_import_path(config.model) and texts != (config.model in models.LANGUAGE_MODELS):
        holds, reads = ("texts", "images") if texts else ("none", "texts")
        fitting = ", ".join(name for name in models.MODELS if (name in models.LANGUAGE_MODELS) == texts)
        raise ValueError(
            f"model {config.model!r} reads {reads}, but data set {config.dataset!r} holds {holds}; for it: {fitting}"
        )


def make_federation(
    config: Config, dataset: data.Dataset, rows: Callable[[int], slice] | None = None, *, everyone: bool = False
) -> data.Federation:
    """Returns the clients of `config`, of which `rows` are stacked; `everyone`: also those for tuning."""
    count = config.clients + config.tuning_clients
    names = ("examples_per_client", "reuse", "newcomer_examples", "drift_window")
    arguments = {name: getattr(config, name) for name in names}
    if config.tuning_clients:
        check(jax.process_count() == 1, "tuning_clients", config.tuning_clients, "0 with several processes")
        arguments["newcomers_of"] = config.clients
    with renamed(names_of_data(config)):
        if config.drift is not None:
            options = {"num_steps": config.drift_steps, "num_clusters": config.clusters, "seed": config.data_seed}
            pattern = data.drift_pattern(config.drift, config.clients, **options)
            arguments["drift"] = pattern[:, np.arange(count) % config.clients]  # those for tuning drift alike
        federation = data.build(dataset, num_clients=count, rows=rows, **arguments, **dealt(config))
    return federation if everyone or not config.tuning_clients else select_clients(federation, slice(config.clients))


def make_task(config: Config, federation: data.Federation, *, target: str | None = None) -> Task:
    """Returns the model of `config` for the federation's classes, its vocabulary, or the targets of a regression.

    On a GPU, `--precision bfloat16` is `models.in_bfloat16`, since rounding the operands alone is no faster there.
    `target` is the platform of the run, by default that of this machine.
    """
    vocab_size = federation.vocab_size
    if vocab_size is not None:
        models.check_tokens(federation.train, vocab_size)
        models.check_tokens(federation.test, vocab_size, name="test clients")
    num_outputs = vocab_size or federation.num_classes
    if num_outputs is None:
        targets = federation.train.examples["y"]
        num_outputs = math.prod(targets.shape[2:])
    model = lookup.find_model(config.model)(num_outputs)
    if isinstance(model, Task):
        task = model
    elif vocab_size is not None:
        task = models.language_model(model, config.length, vocab_size)
    elif federation.num_classes is not None:
        task = models.classification(model, federation.input_shape, federation.num_classes)
    else:
        accepted = (
            f"MODULE:NAME, a function that returns a jfcl.Task: {config.dataset!r} has neither labels nor numbers"
        )
        check(targets.dtype.kind == "f", "model", config.model, accepted)
        task = models.regression(model, federation.input_shape)
    return models.in_bfloat16(task) if in_half(config, target) else task


def in_half(config: Config, target: str | None = None) -> bool:
    """Returns whether the model of a run computes in bfloat16 on the platform `target`, by default this machine's."""
    return config.precision == "bfloat16" and (target or platform()) == "gpu"


def matmul_precision(name: str) -> str | None:
    """Returns the name of a `--precision` in JAX: XLA's CPU backend refuses some products in the BF16 of GPUs."""
    return "bfloat16" if name == "bfloat16" and platform() == "cpu" else PRECISIONS[name]


def _mesh(config: Config):
    return mapping.client_mesh(config.devices if jax.process_count() == 1 else None)


def candidates(config: Config) -> dict[str, mapping.Mapping]:
    """Returns the mappings that a probe compares: of one device, and of all where there are several."""
    sizes = (1, 4, 16) if platform() == "cpu" else (32, 256)
    inner = {f"chunked({size})": mapping.chunked(size) for size in sizes if size < config.clients}
    inner, mesh = inner | {"vmap": jax.vmap}, _mesh(config)
    if mesh.size == 1:
        return inner
    several = {f"sharded({name})": mapping.sharded(mesh, axis) for name, axis in inner.items()}
    return several if jax.process_count() > 1 else inner | several


def mapping_of(config: Config) -> mapping.Mapping:
    """Returns the mapping that `config` names; by default clients are divided among devices where there are several."""
    inner = mapping.auto() if config.chunk is None else mapping.chunked(config.chunk)
    mesh = _mesh(config)
    name = config.mapping or ("sharded" if mesh.size > 1 else "inner")
    fits = jax.process_count() == 1 or name in ("sharded", "auto")
    check(fits, "mapping", name, "sharded (or auto) with several processes")
    if name == "pmap":
        return mapping.pmapped(mesh.size, inner)
    if name == "sharded" or (name == "auto" and jax.process_count() > 1):
        return mapping.sharded(mesh, inner)
    return jax.vmap if name == "vmap" else inner


def dealt(config: Config) -> dict[str, Any]:
    """Returns the options by which clients get examples, as `data.build` and `data.generate_store` take them."""
    arguments = {name: getattr(config, name) for name in DEALT}
    options = {name: getattr(config, name) for name, takers in OF_PARTITION.items() if config.partition in takers}
    if "distribution" in options:
        options["distribution"] = _read_table(options["distribution"])
    return arguments | {"num_clusters": true_clusters(config), "seed": config.data_seed} | options


def names_of_data(config: Config) -> dict[str, str]:
    """Returns the options that reach `data.build` and `data.generate_store` under other names, by these."""
    count = "clients" if config.population is None else "population"
    return {"num_clusters": "clusters", "num_clients": count, "num_steps": "drift_steps", "seed": "data_seed"}


def names_of_method(config: Config, further: Iterable[str] = ()) -> dict[str, str]:
    """Returns the options that reach a factory under other names, by these; `further` ones are given with `config`."""
    models = "num_models" if "num_models" in {*config.given, *further} else "clusters"
    return {"num_clusters": models, "init_params": "init_from", "num_rounds": "rounds", "shared": "share"}


def _read_table(path: str) -> np.ndarray:
    """Returns the numbers of a csv file without a header; raises `ValueError` for other files."""
    try:
        if not Path(path).is_file():  # a device may have no end
            raise OSError("there is no such file")
        return np.loadtxt(path, delimiter=",", ndmin=2, encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        accepted = "a csv file: a row of numbers per client, a column per label, no header"
        raise ValueError(f"distribution must be {accepted}, got {shown(path)}: {error}") from None


def algorithms_of(config: Config, federation: data.Federation, largest: int, client_axis: mapping.Mapping) -> Callable:
    """Returns the function of some options, which may be tracers, that makes the method with these and `config`."""

    task = functools.cache(lambda model: make_task(dataclasses.replace(config, model=model), federation))

    def make(**values: Any) -> Algorithm:
        chosen = dataclasses.replace(config, **values)
        return make_algorithm(chosen, task(chosen.model), make_training(chosen, largest), federation, client_axis)

    return make


def assemble(config: Config, federation: data.Federation, largest: int, client_axis: mapping.Mapping) -> Setup:
    """Builds task, local training and algorithm for clients of which the largest has `largest` examples."""
    task, training = make_task(config, federation), make_training(config, largest)
    make = functools.partial(make_algorithm, config, task, training, federation)
    if config.mapping == "auto":
        costless = ("mapping", "seed", "seeds", "data_seed", "rounds", "eval_every", "lr", "lr_decay", "init_from")
        costless += ("lr_end", "warmup", "step_rounds", "step_factor")
        costly = {name: value for name, value in config.values.items() if name not in costless}
        client_axis = probe.fastest(make, federation.train, candidates(config), options=costly)
    return Setup(federation, task, make(client_axis), seeds_of(config), client_axis, training)


def load_clients(config: Config, data_dir: str | None, client_axis: mapping.Mapping) -> data.Federation:
    """Returns this process's clients, after an attack on their data; for an accelerator, in bytes where possible."""
    rows = functools.partial(mapping.own_rows, client_axis)
    federation = make_federation(config, load_dataset(config, data_dir), rows)
    federation = federation if config.attack is None else attack_data(config, federation)
    return federation if mapping.platform_of(client_axis) == "cpu" else in_bytes(config, federation)


def in_bytes(config: Config, federation: data.Federation) -> data.Federation:
    """Returns `data.in_bytes(federation)`; `federation` for a method of the user, which may read the inputs itself."""
    return federation if lookup.is_import_path(config.method) else data.in_bytes(federation)


def most_held(federation: data.Federation) -> int:
    """Returns the most examples that a client holds at a time; of drifting data, those of a window of steps."""
    most, drift = max_examples(federation.train), federation.drift
    if drift is None or drift.window is None:
        return most
    newest = min(drift.window, drift.num_steps)  # the first steps have the examples that the number leaves over
    return most // drift.num_steps * newest + min(most % drift.num_steps, newest)


def setup(config: Config, *, data_dir: str | None = None) -> Setup:
    """Builds data, task and algorithm; raises `ValueError` for options that do not fit together.

    Example:
      >>> from jfcl.experiments import Config
      >>> parts = setup(Config("ifca", clients=8, clusters=2))
      >>> parts.federation.cluster.tolist(), parts.seeds
      ([0, 1, 0, 1, 0, 1, 0, 1], [0])
    """
    processes = jax.process_count()
    check(config.clients >= processes, "clients", config.clients, f"at least one for each of the {processes} processes")
    client_axis = mapping_of(config)
    federation = load_clients(config, data_dir, client_axis)
    parts = assemble(config, federation, most_held(federation), client_axis)
    return parts if config.attack is None else parts._replace(malicious=malicious_clients(config))
