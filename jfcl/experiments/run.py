"""One configured run: from names and numbers to data, task, algorithm and simulation, and a folder of results.

`Config` is the single list of options: the command line's flags, the names in a TOML file, and `config.json` are all
made from it.
"""

from __future__ import annotations

import csv
import dataclasses
import inspect
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jfcl import attacks, data, hosts, kernels, mapping, models, parameter_tree, plots, probe
from jfcl.algorithms import METHODS
from jfcl.algorithms.splitting import CFLState
from jfcl.augment import AUGMENTATIONS
from jfcl.core import (
    Adversary,
    Algorithm,
    PyTree,
    Task,
    check,
    check_choice,
    check_count,
    check_labels,
    client_ids,
    max_examples,
    path_name,
)
from jfcl.data.heterogeneity import SELECTIVE
from jfcl.local import KEEP, LocalTraining, local_training, most_steps
from jfcl.metrics import rounds_to_recovery
from jfcl.population import SAMPLING
from jfcl.runs import RunFolder, finite_or_none, read_json, write_json
from jfcl.simulation import History, environment, simulate

SERVER_OPTIMIZERS = {
    "average": lambda lr: optax.sgd(lr),
    "momentum": lambda lr: optax.sgd(lr, momentum=0.9),
    "adam": lambda lr: optax.adam(lr, b1=0.9, b2=0.99, eps=1e-3),
}
# jax's names. On a CPU all of them compute in float32 (measured on jax 0.10.2: errors of one product alike).
PRECISIONS = {"float32": "float32", "tf32": "tensorfloat32", "bfloat16": "BF16_BF16_F32"}
# Options that are handed to the method under their own name, where they are given.
PASSED_ON = (
    "weights",
    "cohort",
    "stable_rounds",
    "identity_batch",
    "eps_1",
    "eps_2",
    "gamma_max",
    "max_clusters",
    "min_rounds",
    "min_size",
    "fallback_rounds",
    "tree_dim",
    "privacy",
    "similarity",
    "threshold",
    "radius",
    "quantile",
    "quantile_rule",
    "threshold_rounds",
    "subgroup_size",
    "warm_rounds",
    "local_rounds",
    "distance_threshold",
    "rounds_before",
    "distance",
    "linkage",
    "lam",
    "num_neighbours",
    "mixing",
)
MAPPINGS = ("vmap", "chunked", "sharded", "pmap", "auto")
SEED_METRICS = ("accuracy", "worst_client_accuracy", "loss", "cluster_accuracy", "adjusted_rand", "clusters_in_use")


def _option(default: Any, text: str, group: str = "method") -> Any:
    return dataclasses.field(default=default, metadata={"help": text, "group": group})


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that decides a run's result. See `jfcl run --help` for the same list with explanations."""

    method: str
    dataset: str = _option("digits", "data set; 'jfcl list datasets' shows them", "data")
    heterogeneity: str = _option("rotation", "how the hidden clusters differ; 'jfcl list heterogeneities'", "data")
    clients: int = _option(40, "number of clients", "data")
    clusters: int = _option(4, "number of hidden clusters, and of models where the method has one per cluster", "data")
    examples_per_client: int | None = _option(
        None, "training examples per client; default: as many as there are", "data"
    )
    test_fraction: float = _option(0.2, "share of examples held out where there is no official test set", "data")
    partition: str = _option("iid", "how a cluster's examples are dealt to its clients; 'jfcl list partitions'", "data")
    alpha: float | None = _option(None, "concentration of --partition dirichlet", "data")
    exponent: float | None = _option(None, "exponent of --partition power_law", "data")
    labels_per_client: int | None = _option(None, "labels per client of --partition label", "data")
    reuse: str = _option(
        "auto", "may an image be used once per cluster (cluster), or only once (none)? auto: once if enough", "data"
    )
    newcomer_examples: int | None = _option(
        None, "also make new clients of so many test examples each, served the model of lowest loss", "data"
    )
    population: int | None = _option(
        None,
        "number of clients, in place of --clients, of which a --cohort [100] is on the device at a time, --examples-"
        "per-client [20] each",
        "data",
    )
    store: str | None = _option(
        None,
        "folder of the population's data, made if it is not there; default: store in --out. Without --population, one"
        " that is there is taken as it is",
        "data",
    )
    vocab_size: int = _option(10_000, "words told apart, of a data set of texts", "data")
    length: int = _option(32, "words that every text is cut to", "data")
    data_seed: int = _option(0, "seed of the split into clients; the same for all --seeds", "data")
    model: str = _option("mlp", "model; 'jfcl list models' shows them", "training")
    rounds: int = _option(100, "communication rounds", "training")
    local_steps: int | None = _option(
        None,
        "local steps per round (default, if --local-epochs is not given: 10; 1 where clients send gradients)",
        "training",
    )
    local_epochs: int | None = _option(
        None, "passes over the client's examples per round, instead of steps", "training"
    )
    batch_size: int | None = _option(None, "examples per local step; default: all of the client's", "training")
    lr: float = _option(0.1, "local learning rate", "training")
    momentum: float = _option(0.0, "local momentum", "training")
    lr_decay: float = _option(
        1.0, "factor on the learning rate after every round (for clients that do equal steps)", "training"
    )
    weight_decay: float = _option(0.0, "weight decay added to the gradient", "training")
    prox: float = _option(0.0, "FedProx's mu", "training")
    augment: str | None = _option(
        None, "random changes to the images that clients train on; 'jfcl list augmentations'", "training"
    )
    keep: str | None = _option(
        None,
        "what clients carry over to the next round: nothing (default), schedule or everything, momentum too (default of"
        " methods whose clients send gradients)",
        "training",
    )
    weights: str | None = _option(
        None, "what a client counts in a mean: size or equal; default: as in the method's paper"
    )
    cohort: int | None = _option(None, "clients per round; default: all")
    sampling: str = _option("uniform", "how cohorts of a --population are drawn: uniform, size or stratified")
    dropout: float = _option(0.0, "probability that a client of a --population does not answer")
    stragglers: float = _option(0.0, "share of a --population's cohort that is asked besides, the slowest being cut")
    server_optimizer: str = _option("average", "what the server does with the mean update: average, momentum, adam")
    server_lr: float = _option(1.0, "the server's learning rate")
    num_models: int | None = _option(None, "number of models, if not --clusters (ifca)")
    average: str = _option("models", "models (option II) or gradients (option I; needs --local-steps 1) (ifca)")
    share: str | None = _option(None, "share parameters whose path starts with one of these, comma separated (ifca)")
    identity_batch: int | None = _option(
        None, "examples on which clients compare the models, drawn anew each round; default: all of theirs (ifca)"
    )
    stable_rounds: int | None = _option(None, "send only the own model after so many rounds without a change (ifca)")
    restarts: int = _option(1, "initialisations to try (ifca)")
    restart_rounds: int = _option(5, "rounds before they are compared (ifca)")
    eps_1: float | None = _option(None, "split clusters whose mean update is shorter; default: 0.4 --relative (cfl)")
    eps_2: float | None = _option(None, "and whose longest update is longer; default: 0.5 --relative (cfl)")
    relative: bool = _option(False, "measure both in the first round's update norms; default if neither is given (cfl)")
    gamma_max: float | None = _option(None, "assumed approximation noise, in [0, 1) (cfl)")
    recursive: bool = _option(False, "clusters that stand still and are not split train no more (cfl)")
    max_clusters: int | None = _option(None, "clusters at most; default: 8 (cfl)")
    min_rounds: int | None = _option(None, "rounds that a cluster trains before it is split (cfl)")
    min_size: int | None = _option(None, "clients that either side of a split must have (cfl)")
    similarity: str | None = _option(None, "of updates (default) or gradients (cfl, byzantine_cfl)")
    validation: float | None = _option(
        None, "share of training examples that judges splits (cfl; default none), or chooses mixing weights (knn_per)"
    )
    fallback_rounds: int | None = _option(None, "rounds from a split to that judgement (cfl)")
    privacy: str | None = _option(
        None, "hide updates from the server: permutation, sign or rotation (cfl, byzantine_cfl)"
    )
    tree_dim: int | None = _option(None, "numbers kept of an update at a split, for newcomers (cfl)")
    track_gap: bool = _option(False, "record the separation gap, from the true clusters, every round (cfl)")
    threshold: float | None = _option(None, "shut out the smaller side below this similarity (byzantine_cfl)")
    quantile: float | None = _option(
        None, "cluster gradients within this quantile of the distances to the centre (*_clustering)"
    )
    quantile_rule: str | None = _option(
        None, "linear (NumPy's), or the authors' index, index_shrunk or index_strict (*_clustering)"
    )
    threshold_rounds: int | None = _option(None, "rounds of threshold clustering, 10 (*_clustering)")
    subgroup_size: int | None = _option(
        None, "cluster only random groups of so many clients; default: all (federated_clustering)"
    )
    warm_rounds: int | None = _option(None, "rounds of FedAvg in random parts to start from (hypcluster)")
    local_rounds: int | None = _option(None, "rounds that clients train alone at first (one_shot, fesem)")
    rounds_before: int | None = _option(None, "rounds of FedAvg before the clustering, 1 (flhc)")
    distance_threshold: float | None = _option(None, "keep updates nearer than this together (flhc)")
    distance: str | None = _option(None, "of updates: cosine (default) or euclidean (flhc)")
    linkage: str | None = _option(None, "complete (default) or single (flhc)")
    lam: float | None = _option(None, "how much personal models are drawn to the global one, 1 (ditto)")
    num_neighbours: int | None = _option(None, "nearest neighbours that are asked, 10 (knn_per)")
    mixing: float | None = _option(
        None, "weight of the neighbours in [0, 1]; default: each client's best on validation examples (knn_per)"
    )
    attack: str | None = _option(None, "what malicious clients do; 'jfcl list attacks' shows them", "attack")
    malicious: float = _option(0.0, "share of the clients that are malicious", "attack")
    aggregator: str | None = _option(
        None, "robust aggregator in place of the mean; 'jfcl list aggregators' shows them", "attack"
    )
    radius: float | None = _option(
        None, "of --aggregator centered_clip, or instead of --quantile (*_clustering)", "attack"
    )
    init_from: str | None = _option(None, "folder of a run of the same model to start from (warm start)")
    seeds: int = _option(1, "run with seeds 0..R-1, together", "run")
    seed: int | None = _option(None, "run with this seed alone", "run")
    eval_every: int | None = _option(None, "rounds between evaluations; default: about 50 in all", "run")
    chunk: int | None = _option(None, "clients trained at once; default: 1 on a CPU, all on an accelerator", "run")
    mapping: str | None = _option(
        None,
        "vmap, chunked, sharded (clients divided among devices; default where there are several) or pmap; auto: the"
        " fastest in a short probe",
        "run",
    )
    devices: int | None = _option(
        None, "devices to use; a CPU is divided into so many, which is often faster: try as many as cores", "run"
    )
    precision: str = _option(
        "float32",
        "inside matrix products, training's and the server's: float32, tf32 or bfloat16; no effect on a CPU",
        "run",
    )


def to_saved(config: Config, split_hash: str) -> dict[str, Any]:
    """`config` as it stands in a run's `config.json`, beside the fingerprint of the split."""
    saved = dataclasses.asdict(config) | {"split_hash": split_hash}
    return saved | {"num_rounds": saved.pop("rounds")}


def from_saved(saved: dict[str, Any]) -> dict[str, Any]:
    """The options of `Config` in what a run's `config.json` holds: those that are not None."""
    options = saved | {"rounds": saved.get("num_rounds")}
    others = ("num_rounds", "split_hash", "cohorts")  # the last: how those of a population were drawn
    return {name: value for name, value in options.items() if value is not None and name not in others}


class Setup(NamedTuple):
    """What a `Config` stands for."""

    federation: Any
    task: Task
    algorithm: Algorithm
    seeds: list[int]
    client_axis: mapping.Mapping
    training: LocalTraining
    malicious: np.ndarray | None = None


def of_population(config: Config) -> bool:
    """Whether clients wait on the host and a cohort is on the device; see `jfcl.experiments.population`."""
    return config.population is not None or config.store is not None


def validate(config: Config) -> None:
    """Every mistake that can be seen without data, as a `ValueError`."""
    check_choice("method", config.method, METHODS)
    check_choice("heterogeneity", config.heterogeneity, data.HETEROGENEITY)
    check_choice("partition", config.partition, data.PARTITIONS)
    check_choice("model", config.model, models.MODELS)
    check_choice("server_optimizer", config.server_optimizer, SERVER_OPTIMIZERS)
    check_choice("precision", config.precision, PRECISIONS)
    if config.keep is not None:
        check_choice("keep", config.keep, KEEP)
    if config.augment is not None:
        check_choice("augment", config.augment, AUGMENTATIONS)
        images = config.model not in models.LANGUAGE_MODELS
        check(images, "augment", config.augment, f"left out: model {config.model!r} reads texts")
    counts = ("clients", "clusters", "rounds", "seeds", "restarts", "restart_rounds")
    maybe = (
        "examples_per_client",
        "local_steps",
        "local_epochs",
        "batch_size",
        "cohort",
        "num_models",
        "stable_rounds",
        "identity_batch",
    )
    for name in (*counts, *maybe, "eval_every", "chunk", "devices", "labels_per_client", "newcomer_examples"):
        value = getattr(config, name)
        if name in counts or value is not None:
            check_count(name, value)
    if config.mapping is not None:
        check_choice("mapping", config.mapping, MAPPINGS)
    check_count("vocab_size", config.vocab_size, least=3)
    check_count("length", config.length, least=2)
    for name in ("lr", "server_lr", "lr_decay"):
        check(getattr(config, name) > 0, name, getattr(config, name), "positive")
    for name in ("weight_decay", "prox"):
        check(getattr(config, name) >= 0, name, getattr(config, name), "0 or more")
    check(0 <= config.momentum < 1, "momentum", config.momentum, "in [0, 1)")
    check(0 < config.test_fraction < 1, "test_fraction", config.test_fraction, "between 0 and 1")
    check(config.clusters <= config.clients, "clusters", config.clusters, f"at most the {config.clients} clients")
    check_choice("sampling", config.sampling, SAMPLING)
    check(0 <= config.dropout < 1, "dropout", config.dropout, "in [0, 1)")
    check(config.stragglers >= 0, "stragglers", config.stragglers, "0 or more")
    if not of_population(config):
        for name, least in (("sampling", "uniform"), ("dropout", 0), ("stragglers", 0)):
            check(getattr(config, name) == least, name, getattr(config, name), "left out without --population")
    both = config.local_steps is not None and config.local_epochs is not None
    check(not both, "local_steps, local_epochs", (config.local_steps, config.local_epochs), "not both given")
    if config.cohort is not None:
        check(config.cohort <= config.clients, "cohort", config.cohort, f"at most the {config.clients} clients")
    for name in ("seed", "data_seed"):
        value = getattr(config, name)
        check(value is None or 0 <= value < 2**32, name, value, f"from 0 to {2**32 - 1}")
    check(config.seed is None or config.seeds == 1, "seed, seeds", (config.seed, config.seeds), "not both given")
    check(0 <= config.malicious < 1, "malicious", config.malicious, "a share in [0, 1)")
    if config.attack is not None:
        check_choice("attack", config.attack, attacks.UPDATE_ATTACKS | attacks.DATA_ATTACKS)
        check(config.malicious > 0, "malicious", config.malicious, "above 0 with --attack")
        some = round(config.malicious * config.clients)
        check(some > 0, "malicious", config.malicious, f"enough for one of the {config.clients} clients")
        sends = "adversary" in METHODS[config.method].options or config.attack in attacks.DATA_ATTACKS
        on_data = ", ".join(attacks.DATA_ATTACKS)
        check(sends, "attack", config.attack, f"one on data ({on_data}): {config.method} sends no updates")
    else:
        check(config.malicious == 0, "malicious", config.malicious, "left out without --attack")
    for name, partition in (("alpha", "dirichlet"), ("exponent", "power_law"), ("labels_per_client", "label")):
        unused = getattr(config, name) is not None and config.partition != partition
        check(not unused, name, getattr(config, name), f"left out without --partition {partition}")
    defaults = Config(config.method)
    if config.restarts == 1:
        given = config.restart_rounds
        check(given == defaults.restart_rounds, "restart_rounds", given, "left out without --restarts")
    if config.model not in models.LANGUAGE_MODELS:
        for name in ("vocab_size", "length"):
            given = getattr(config, name)
            check(given == getattr(defaults, name), name, given, f"left out: model {config.model!r} reads no texts")
    if config.aggregator is not None:
        check_choice("aggregator", config.aggregator, kernels.AGGREGATORS)
    if config.radius is not None:
        check(config.radius > 0, "radius", config.radius, "above 0")
        used = config.aggregator is not None or "radius" in METHODS[config.method].options
        check(used, "radius", config.radius, f"left out: {config.method} without --aggregator has none")


def make_training(config: Config, largest: int) -> LocalTraining:
    """How clients train: with `lr_decay`, the rate falls by that factor in a round of the `largest` client."""
    defaults = METHODS[config.method].defaults
    training = local_training(
        optax.sgd(config.lr),
        num_steps=(config.local_steps or defaults.get("local_steps", 10)) if config.local_epochs is None else None,
        num_epochs=config.local_epochs,
        batch_size=config.batch_size,
        prox=config.prox,
        augment=None if config.augment is None else AUGMENTATIONS[config.augment],
        keep=config.keep or defaults.get("keep", "nothing"),
    )
    lr: Any = config.lr
    if config.lr_decay != 1:
        lr = optax.exponential_decay(lr, most_steps(training, largest), config.lr_decay, staircase=True)
        if training.keep == "nothing":
            training = training._replace(keep="schedule")
    own = "momentum" not in METHODS[config.method].options  # else the method's, not the optimiser's
    optimizer = optax.sgd(lr, momentum=config.momentum or None if own else None)
    if config.weight_decay:
        optimizer = optax.chain(optax.add_decayed_weights(config.weight_decay), optimizer)
    return training._replace(optimizer=optimizer)


def load_params(folder: str | Path) -> PyTree:
    """The models `[K, ...]` of the last checkpoint of a run (of its first seed), as nested dicts, for a warm start."""
    saved = Path(folder) / "params.npz"
    if not saved.exists():
        raise ValueError(f"init_from must be the folder of a finished run, but {saved} does not exist")
    params: dict[str, Any] = {}
    try:
        with np.load(saved) as arrays:
            for path in arrays.files:
                *parents, name = path.split("/")
                node = params
                for parent in parents:
                    node = node.setdefault(parent, {})
                node[name] = arrays[path]
    except (BadZipFile, OSError, EOFError, ValueError) as error:
        raise ValueError(f"{saved} is damaged: {error}") from None
    return params


def malicious_clients(config: Config) -> np.ndarray:
    """`[N]` bool: who is malicious, the same for all seeds of one split."""
    return attacks.choose_malicious(config.clients, config.malicious, seed=config.data_seed)


def make_aggregator(config: Config):
    """The aggregator of `config`, told how many clients may be malicious and how far to trust."""
    fn = kernels.AGGREGATORS[config.aggregator]
    takes = inspect.signature(fn).parameters
    given = {}
    if "num_malicious" in takes:
        given["num_malicious"] = round(config.malicious * (config.cohort or config.clients))
    if "radius" in takes:
        check(config.radius is not None, "radius", config.radius, f"given with --aggregator {config.aggregator}")
        given["radius"] = config.radius
    return partial(fn, **given)


def make_algorithm(config: Config, task: Task, training: LocalTraining, federation, client_axis) -> Algorithm:
    """The method of `config`, given those of its options that it takes; `ValueError` for options it does not have."""
    method = METHODS[config.method]
    options: dict[str, Any] = {"client_axis": client_axis}
    options |= {name: getattr(config, name) for name in PASSED_ON if getattr(config, name) is not None}
    options |= {name: True for name in ("relative", "recursive") if getattr(config, name)}
    if config.validation is not None:
        options["validation"] = config.validation
    if config.momentum and "momentum" in method.options:
        options["momentum"] = config.momentum
    if config.aggregator is not None and "radius" not in method.options:
        options.pop("radius", None)  # the aggregator's
    if config.track_gap:
        options["true_cluster"] = federation.cluster
    if config.attack in attacks.UPDATE_ATTACKS:
        options["adversary"] = Adversary(attacks.UPDATE_ATTACKS[config.attack](), malicious_clients(config))
    if config.aggregator is not None:
        options["aggregator"] = make_aggregator(config)
    if config.server_optimizer != "average" or config.server_lr != 1:
        options["server_optimizer"] = SERVER_OPTIMIZERS[config.server_optimizer](config.server_lr)
    if config.average != "models":
        options["average"] = config.average
    if config.share is not None:
        prefixes = tuple(p.strip() for p in config.share.split(","))
        paths = models.parameter_paths(task)
        for prefix in prefixes:
            known = any(path.startswith(prefix) for path in paths)
            check(known, "share", prefix, f"the beginning of one of the model's parameters: {', '.join(paths)}")
        options["shared"] = lambda path: path.startswith(prefixes)
    if config.restarts != 1:
        options |= {"restarts": config.restarts, "restart_rounds": config.restart_rounds}
    if config.init_from is not None:
        options["init_params"] = load_params(config.init_from)
    if config.num_models is not None:
        options["num_clusters"] = config.num_models
    unknown = sorted(set(options) - set(method.options))
    if unknown:
        takers = {o: [name for name, m in METHODS.items() if o in m.options] for o in unknown}
        called = {"num_clusters": "num_models", "shared": "share", "init_params": "init_from"}  # on the command line
        said = "; ".join(f"{called.get(o, o)} (only {', '.join(names)})" for o, names in takers.items())
        raise ValueError(f"method {config.method} has no option {said}")
    if "num_clusters" in method.options:
        options.setdefault("num_clusters", config.clusters)
    if "cluster" in method.options:
        options["cluster"] = federation.cluster
    return method.make(task, training, **options)


def attack_data(config: Config, federation):
    """`federation` with the malicious clients' data attacked, where that is the attack, and their tests left out."""
    train, test = federation.train, federation.test
    malicious = malicious_clients(config)[np.asarray(client_ids(train))]  # of this process's clients
    if config.attack in attacks.DATA_ATTACKS:
        train = attacks.poison(
            train, malicious, config.attack, num_classes=federation.num_classes, seed=config.data_seed
        )
    return federation._replace(train=train, test=test._replace(size=np.where(malicious, 0, test.size).astype(np.int32)))


def load_dataset(config: Config, data_dir: str | None) -> tuple[data.Dataset, int | None]:
    """The data set of `config`, texts as token ids, and the size of their vocabulary; `None` for images."""
    dataset = data.load(config.dataset, data_dir=data_dir)
    texts = dataset.train["x"].dtype.kind in "UO"
    if texts != (config.model in models.LANGUAGE_MODELS):
        holds, reads = ("texts", "images") if texts else ("images", "texts")
        fitting = ", ".join(name for name in models.MODELS if (name in models.LANGUAGE_MODELS) == texts)
        raise ValueError(
            f"model {config.model!r} reads {reads}, but data set {config.dataset!r} holds {holds}; for those: {fitting}"
        )
    if not texts:
        return dataset, None
    kinds = ("none", *SELECTIVE)
    accepted = f"{', '.join(kinds[:-1])} or {kinds[-1]} for texts, as model {config.model!r} does not look at labels"
    check(config.heterogeneity in kinds, "heterogeneity", config.heterogeneity, accepted)
    check(config.attack not in attacks.DATA_ATTACKS, "attack", config.attack, "one on updates for texts")
    dataset, vocabulary = data.tokenize(dataset, vocab_size=config.vocab_size, length=config.length)
    return dataset, len(vocabulary)


def make_task(config: Config, federation: data.Federation, vocab_size: int | None) -> Task:
    """The model of `config` for the federation's classes, or for a vocabulary; `ValueError` for data unfit for it."""
    make = models.MODELS[config.model][0]
    if vocab_size is None:
        return models.classification(make(federation.num_classes), federation.input_shape, federation.num_classes)
    models.check_tokens(federation.train, vocab_size)
    models.check_tokens(federation.test, vocab_size, name="test clients")
    return models.language_model(make(vocab_size), config.length, vocab_size)


def matmul_precision(name: str) -> str:
    """jax's name of a `--precision`. XLA's CPU backend refuses some products in the bfloat16 of accelerators."""
    return "bfloat16" if name == "bfloat16" and jax.default_backend() == "cpu" else PRECISIONS[name]


def _mesh(config: Config):
    return mapping.client_mesh(config.devices if jax.process_count() == 1 else None)


def candidates(config: Config) -> dict[str, mapping.Mapping]:
    """The mappings that a probe compares: of one device, and of all where there are several."""
    sizes = (1, 4, 16) if jax.default_backend() == "cpu" else (32, 256)
    inner = {f"chunked({size})": mapping.chunked(size) for size in sizes if size < config.clients}
    inner |= {"vmap": jax.vmap}
    mesh = _mesh(config)
    if mesh.size == 1:
        return inner
    several = {f"sharded({name})": mapping.sharded(mesh, axis) for name, axis in inner.items()}
    return several if jax.process_count() > 1 else inner | several


def mapping_of(config: Config) -> mapping.Mapping:
    """The mapping that `config` names; by default the clients are divided where there are several devices."""
    inner = mapping.auto() if config.chunk is None else mapping.chunked(config.chunk)
    mesh = _mesh(config)
    name = config.mapping or ("sharded" if mesh.size > 1 else "inner")
    check(name != "chunked" or config.chunk is not None, "chunk", config.chunk, "given with --mapping chunked")
    check(name != "vmap" or config.chunk is None, "chunk", config.chunk, "left out with --mapping vmap")
    alone = jax.process_count() == 1 or name in ("sharded", "auto")
    check(alone, "mapping", name, "sharded (or auto) with several processes")
    if name == "pmap":
        return mapping.pmapped(mesh.size, inner)
    if name == "sharded" or (name == "auto" and jax.process_count() > 1):
        return mapping.sharded(mesh, inner)
    return jax.vmap if name == "vmap" else inner


def setup(config: Config, *, data_dir: str | None = None) -> Setup:
    """Builds data, task and algorithm; raises `ValueError` for everything that does not fit together."""
    validate(config)
    client_axis = mapping_of(config)
    dataset, vocab_size = load_dataset(config, data_dir)
    extra = {"alpha": config.alpha, "exponent": config.exponent, "labels_per_client": config.labels_per_client}
    federation = data.build(
        dataset,
        num_clients=config.clients,
        num_clusters=config.clusters,
        heterogeneity=config.heterogeneity,
        partition=config.partition,
        examples_per_client=config.examples_per_client,
        test_fraction=config.test_fraction,
        reuse=config.reuse,
        newcomer_examples=config.newcomer_examples,
        seed=config.data_seed,
        rows=partial(mapping.own_rows, client_axis),
        **{name: value for name, value in extra.items() if value is not None},
    )
    check_labels(federation.train, federation.num_classes)
    if config.attack is not None:
        federation = attack_data(config, federation)
    task = make_task(config, federation, vocab_size)
    training = make_training(config, max_examples(federation.train))
    make = partial(make_algorithm, config, task, training, federation)
    if config.mapping == "auto":
        said = [config.method, config.model, training.num_steps, training.num_epochs, training.batch_size]
        client_axis = probe.fastest(make, federation.train, candidates(config), about=said)
    algorithm = make(client_axis)
    seeds = list(range(config.seeds)) if config.seed is None else [config.seed]
    malicious = malicious_clients(config) if config.attack is not None else None
    return Setup(federation, task, algorithm, seeds, client_axis, training, malicious)


def run(
    config: Config,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    data_dir: str | None = None,
    progress: bool = False,
    checkpoint_seconds: float = 30.0,
) -> tuple[dict[str, Any], History, Setup]:
    """Runs `config`; with `out`, leaves `summary.json`, `clients.csv`, `params.npz` and plots beside the records.

    Returns:
      `(summary, history, setup)`.

    Raises:
      ValueError: before anything is computed, for anything in `config` that does not fit.
    """
    if out is not None and not resume and hosts.is_first() and (Path(out) / "config.json").exists():
        RunFolder.create(out, {})  # refuses, before data are loaded
    if of_population(config):
        from jfcl.experiments.population import run_population

        with jax.default_matmul_precision(matmul_precision(config.precision)):
            return run_population(config, out, resume, data_dir, progress, checkpoint_seconds)
    parts = setup(config, data_dir=data_dir)
    federation = parts.federation
    every = config.eval_every or max(1, config.rounds // 50)
    with jax.default_matmul_precision(matmul_precision(config.precision)):
        history = simulate(
            parts.algorithm,
            federation.train,
            key=jax.vmap(jax.random.key)(jnp.array(parts.seeds, jnp.uint32)),
            num_rounds=config.rounds,
            test_clients=federation.test,
            newcomers=federation.newcomers,
            true_cluster=federation.cluster,
            eval_every=every,
            seeds=parts.seeds,
            client_axis=parts.client_axis,
            out=out,
            resume=resume,
            config=to_saved(config, federation.split_hash),
            checkpoint_seconds=checkpoint_seconds,
            progress=progress,
            description=config.method,
        )
    summary = summarize_run(config, history, parts)
    if out is not None and hosts.is_first():
        write_results(Path(out), summary, history, parts)
    return summary, history, parts


def summarize_run(config: Config, history: History, parts: Setup) -> dict[str, Any]:
    """What stands in `summary.json`: plain JSON, `None` for what is not a number."""
    last = [r for r in history.records if r["round"] == history.rounds]
    per_seed = []
    for record in last:
        mine = [r for r in history.records if r["seed"] == record["seed"]]
        right = [r.get("cluster_accuracy") for r in mine]  # None where nobody knows the true clusters
        recovered = None if None in right else rounds_to_recovery([r["round"] for r in mine], right)
        row = {"seed": record["seed"]} | {name: record.get(name) for name in SEED_METRICS}
        row |= {"rounds_to_recovery": recovered, "bytes_up": record["bytes_up"], "bytes_down": record["bytes_down"]}
        row |= {name: value for name, value in record.items() if name == "perplexity" or name.startswith("newcomer_")}
        per_seed.append(row)

    def over_seeds(statistic) -> dict[str, float | None]:
        names = [name for name in per_seed[0] if name != "seed"]
        columns = {name: [row[name] for row in per_seed] for name in names}
        return {name: None if None in values else float(statistic(values)) for name, values in columns.items()}

    summary = {
        "method": config.method,
        "dataset": config.dataset,
        "heterogeneity": config.heterogeneity,
        "description": parts.federation.description,
        "num_clients": len(parts.federation.cluster),
        "num_clusters": parts.federation.num_clusters,
        "num_rounds": history.rounds,
        "seconds": history.seconds,
        "compile_seconds": history.compile_seconds,
        "client_steps_per_second": history.client_steps / max(history.seconds, 1e-9),
        "rounds_per_second": history.rounds * len(parts.seeds) / max(history.seconds, 1e-9),
        "bytes_up": float(np.mean([row["bytes_up"] for row in per_seed])),
        "bytes_down": float(np.mean([row["bytes_down"] for row in per_seed])),
        **environment(),
        "split_hash": parts.federation.split_hash,
        "per_seed": per_seed,
        "mean": over_seeds(np.mean),
        "std": over_seeds(np.std),
    }
    return finite_or_none(summary)


def write_results(out: Path, summary: dict[str, Any], history: History, parts: Setup) -> None:
    """`summary.json`, `clients.csv`, `params.npz` and the plots of one run."""
    write_json(out / "summary.json", summary)
    federation = parts.federation
    names = [name for name in ("accuracy", "loss", "perplexity") if name in history.clients]
    with (out / "clients.csv").open("w", newline="") as f:
        table = csv.writer(f)
        extra = {}
        if parts.malicious is not None:
            extra["malicious"] = np.broadcast_to(parts.malicious, history.clients["cluster"].shape)
        if hasattr(history.state, "excluded"):
            extra["excluded_in_round"] = np.asarray(history.state.excluded)
        table.writerow(["seed", "client", "examples", "true_cluster", "cluster", *extra, *names])
        # With several processes this one holds some clients only; a federation's are then numbered as they come.
        ids = (np.arange(len(federation.cluster)) if hosts.several() else client_ids(federation.train)).tolist()
        for s, seed in enumerate(parts.seeds):
            for i in range(len(federation.cluster)):
                found = [
                    int(history.clients["examples"][s, i]),
                    int(federation.cluster[i]),
                    int(history.clients["cluster"][s, i]),
                    *[int(values[s, i]) for values in extra.values()],
                ]
                table.writerow([seed, ids[i], *found, *[f"{history.clients[name][s, i]:.6g}" for name in names]])
    first = jax.tree_util.tree_leaves_with_path(jax.tree.map(lambda p: np.asarray(p[0]), history.state.params))
    np.savez(out / "params.npz", **{path_name(path): leaf for path, leaf in first})
    name = summary["method"]
    plots.save(plots.curves({name: history.records}), out / "plots" / "accuracy.png")
    plots.save(plots.curves({name: history.records}, "train_loss"), out / "plots" / "loss.png")
    if "perplexity" in history.clients:
        plots.save(plots.curves({name: history.records}, "perplexity"), out / "plots" / "perplexity.png")
    plots.save(plots.client_accuracies({name: history.clients["accuracy"]}), out / "plots" / "clients.png")
    if isinstance(history.state, CFLState) and history.state.active.shape[1] > 1:
        one = jax.tree.map(lambda x: x[0], history.state)
        parameter_tree.save_tree(out / "tree.npz", one)
        plots.save(plots.tree(parameter_tree.nodes(one), federation.cluster), out / "plots" / "tree.png")
    if "cluster" in history.records[0]:
        plots.save(plots.assignments(history.records, federation.cluster), out / "plots" / "clusters.png")


class LoadedRun(NamedTuple):
    """A finished run: its `config`, its `setup` (data, task, algorithm, ...), its models and who is served which.

    Attributes:
      params: pytree of `[K, ...]`, the models of the run's first seed.
      cluster: `[N]` int32: client `i` is served model `cluster[i]`.
    """

    config: Config
    setup: Setup
    params: PyTree
    cluster: np.ndarray


def load_run(folder: str | Path, *, data_dir: str | None = None) -> LoadedRun:
    """What a finished run learnt, ready to use.

    Args:
      folder: that `jfcl run --out` made.
      data_dir: as in the run.

    Raises:
      ValueError: no finished run, damaged files, a run of a population (its models: `load_params`), data that the run
        was not on.

    Example:
      >>> import jfcl, tempfile
      >>> folder = tempfile.mkdtemp()
      >>> _ = run(Config("ifca", clients=8, clusters=2, rounds=3), out=folder)
      >>> found = load_run(folder)
      >>> test = found.setup.federation.test
      >>> jfcl.evaluate(found.setup.task, found.params, test, found.cluster)["accuracy"].shape
      (8,)
    """
    folder = Path(folder)
    read_run(folder)  # makes sure that there is one
    saved = read_json(folder / "config.json")
    config = Config(**from_saved(saved))
    check(not of_population(config), "folder", str(folder), "a run of clients, not of a population")
    parts = setup(config, data_dir=data_dir)
    same = parts.federation.split_hash == saved["split_hash"]
    check(same, "data_dir", data_dir, f"where the data of {folder} are: this split of {config.dataset} is another")
    with (folder / "clients.csv").open() as f:
        rows = [row for row in csv.DictReader(f) if int(row["seed"]) == parts.seeds[0]]
    return LoadedRun(config, parts, load_params(folder), np.array([int(row["cluster"]) for row in rows], np.int32))


def read_run(folder: str | Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """`(summary, records)` of a finished run; `ValueError` for a folder that holds none."""
    folder = Path(folder)
    if not (folder / "summary.json").exists():
        raise ValueError(f"{folder} holds no finished run: summary.json is missing")
    summary, records = read_json(folder / "summary.json"), RunFolder(folder).records()
    if not records:
        raise ValueError(f"{folder / 'metrics.jsonl'} is damaged: it holds no whole line")
    return summary, records
