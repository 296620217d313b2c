"""`Config`: the single list of options. The command line's flags, the names in a TOML file, and `config.json` are made
from it.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import math
import typing
from pathlib import Path
from typing import Any

import numpy as np
import optax

from jfcl import data, kernels, models
from jfcl.algorithms import METHODS, attacks
from jfcl.client.augment import AUGMENTATIONS
from jfcl.client.local import KEEP
from jfcl.core import INT32_MAX, check, check_choice, check_count, shown
from jfcl.simulation.cohorts import SAMPLING
from jfcl.simulation.evaluation import SERVE
from jfcl.simulation.folder import read_json

SERVER_OPTIMIZERS = {
    "average": lambda lr: optax.sgd(lr),
    "momentum": lambda lr: optax.sgd(lr, momentum=0.9),
    "adam": lambda lr: optax.adam(lr, b1=0.9, b2=0.99, eps=1e-3),
}
# jax's names. On a CPU all of them compute in float32 (measured on jax 0.10.2: errors of one product alike).
PRECISIONS = {"float32": "float32", "tf32": "tensorfloat32", "bfloat16": "BF16_BF16_F32"}
OF_PARTITION = {"alpha": "dirichlet", "exponent": "power_law", "labels_per_client": "label"}  # who takes which option
MAPPINGS = ("vmap", "chunked", "sharded", "pmap", "auto")
SEEDS = ("seed", "data_seed")  # 32 bits without a sign
INFINITE = ("eps_1", "eps_2", "radius", "distance_threshold")  # thresholds, which nothing is above
# Repetitions inside one call of the compiled program, for the end of which Ctrl-C waits.
REPEATED = ("local_steps", "local_epochs", "restarts", "restart_rounds", "warm_rounds", "local_rounds")
REPEATED += ("rounds_before", "threshold_rounds")
MOST_REPEATED = 10**6
MOST_SEEDS = 10**4
ADDED_TO = ("min_size", "min_rounds", "fallback_rounds", "stable_rounds")  # thresholds, also doubled, in int32
MOST_CLIENTS = 10**8  # of a population: dealing data to so many takes an hour
LONGEST_TEXT = 4096  # characters; a path is no longer on Linux


def _option(default: Any, text: str, group: str = "method") -> Any:
    return dataclasses.field(default=default, metadata={"help": text, "group": group})


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that decides a run's result. See `jfcl run --help` for the same list with explanations."""

    method: str
    dataset: str = _option("digits", "data set; 'jfcl list datasets' shows them", "data")
    heterogeneity: str = _option("rotation", "how the hidden clusters differ; 'jfcl list heterogeneities'", "data")
    clients: int = _option(40, "number of clients", "data")
    clusters: int = _option(
        4,
        "number of hidden clusters (one with --heterogeneity none), and of models where the method has one per cluster",
        "data",
    )
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
        " that is there is taken as it is, and options that say otherwise are refused",
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
    momentum: float | None = _option(
        None, "local momentum; default: none (momentum_clustering: 0.9, of the clients' gradients)", "training"
    )
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
    remember: int | None = _option(
        None,
        "clients beside a --population's cohort whose last updates are compared with the cohort's (cfl); default: 0",
    )
    server_optimizer: str = _option("average", "what the server does with the mean update: average, momentum, adam")
    server_lr: float = _option(1.0, "the server's learning rate")
    num_models: int | None = _option(None, "number of models, if not --clusters (methods that are told how many)")
    average: str = _option("models", "models (option II) or gradients (option I; needs --local-steps 1) (ifca)")
    divide_by: str | None = _option(
        None, "what sums of gradients are divided by with --average gradients: all (default) or participants (ifca)"
    )
    share: str | None = _option(None, "share parameters whose path starts with one of these, comma separated (ifca)")
    identity_batch: int | None = _option(
        None, "examples on which clients compare the models, drawn anew each round; default: all of theirs (ifca)"
    )
    stable_rounds: int | None = _option(None, "send only the own model after so many rounds without a change (ifca)")
    restarts: int = _option(1, "initialisations to try (ifca)")
    restart_rounds: int = _option(5, "rounds before they are compared (ifca)")
    eps_1: float | None = _option(None, "split clusters whose mean update is shorter; default: 0.4, relative (cfl)")
    eps_2: float | None = _option(None, "and whose longest is longer; default: 0.5, relative (cfl)")
    relative: bool = _option(False, "measure both in the first round's update norms, as one that is not given (cfl)")
    gamma_max: float | None = _option(None, "assumed approximation noise, in [0, 1) (cfl)")
    recursive: bool = _option(False, "clusters that stand still and are not split train no more (cfl)")
    max_clusters: int | None = _option(None, "clusters at most; default: 8 (cfl)")
    min_rounds: int | None = _option(None, "rounds that a cluster trains before it is split (cfl)")
    min_size: int | None = _option(None, "clients that either side of a split must have (cfl)")
    min_examples: int | None = _option(None, "clients with fewer examples have no voice in splits (cfl)")
    similarity: str | None = _option(None, "of updates (default) or gradients (cfl, byzantine_cfl)")
    validation: float | None = _option(
        None, "share of training examples that judges splits (cfl; default none), or chooses mixing weights (knn_per)"
    )
    fallback_rounds: int | None = _option(None, "rounds from a split to that judgement (cfl)")
    privacy: str | None = _option(
        None, "hide updates from the server: permutation, sign or rotation (cfl, byzantine_cfl)"
    )
    privacy_seed: int | None = _option(None, "the clients' secret, with --privacy; default: 0 (cfl, byzantine_cfl)")
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
    centers: str | None = _option(
        None, "start centres anew at the densest points, or carry the last round's over (myopic_, momentum_clustering)"
    )
    subgroup_size: int | None = _option(
        None, "cluster only random groups of so many clients; default: all (federated_clustering)"
    )
    warm_rounds: int | None = _option(None, "rounds of FedAvg in random parts to start from (hypcluster)")
    local_rounds: int | None = _option(None, "rounds that clients train alone at first (one_shot, fesem)")
    rounds_before: int | None = _option(None, "rounds of FedAvg before the clustering, 1 (flhc)")
    distance_threshold: float | None = _option(None, "keep updates nearer than this together (flhc)")
    distance: str | None = _option(None, "of updates: cosine (default) or euclidean (flhc)")
    linkage: str | None = _option(None, "complete (default of flhc) or single (default of cfl) (flhc, cfl)")
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
    init_from: str | None = _option(
        None,
        "warm start: folder of a run of the same --model, that ended with one model or with as many as there will be",
    )
    seeds: int = _option(1, "run with seeds 0..R-1, together", "run")
    seed: int | None = _option(None, "run with this seed alone", "run")
    eval_every: int | None = _option(None, "rounds between evaluations; default: about 50 in all", "run")
    serve: str = _option(
        "loss",
        "which model clients are tested with, of several that they choose among: that of lowest loss on their training"
        " examples now (loss), or the last one they chose in a round (state) (ifca, hypcluster)",
        "run",
    )
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
        "inside training's matrix products: float32, tf32 or bfloat16; no effect on a CPU",
        "run",
    )


def to_saved(config: Config, split_hash: str) -> dict[str, Any]:
    """`config` as it stands in a run's `config.json`, beside the fingerprint of the split."""
    saved = dataclasses.asdict(config) | {"split_hash": split_hash}
    saved = {name: str(v) if isinstance(v, float) and math.isinf(v) else v for name, v in saved.items()}
    return saved | {"num_rounds": saved.pop("rounds")}


def to_resume(config: Config, split_hash: str, out: str | Path | None) -> dict[str, Any]:
    """`to_saved` for the run in the folder `out`, which an earlier version of the library may have begun.

    An option that its `config.json` does not name, and that has its default now, is left out: it was not there then.
    """
    saved, file = to_saved(config, split_hash), None if out is None else Path(out) / "config.json"
    if file is None or not file.exists():
        return saved
    old, default = read_json(file), to_saved(Config(config.method), split_hash)
    return {name: value for name, value in saved.items() if name in old or value != default[name]}


def from_saved(saved: dict[str, Any]) -> dict[str, Any]:
    """The options of `Config` in what a run's `config.json` holds; None is left out where it is the default."""
    others = ("num_rounds", "split_hash", "cohorts", "versions")  # cohorts: how those of a population were drawn
    options = {name: value for name, value in saved.items() if name not in others}
    options |= {"rounds": saved["num_rounds"]} if "num_rounds" in saved else {}
    fields, kinds = {f.name: f for f in dataclasses.fields(Config)}, option_types()
    options = {
        name: float(v) if kinds.get(name) is float and v in ("inf", "-inf") else v  # JSON has no infinity
        for name, v in options.items()
    }
    optional = {name for name, field in fields.items() if field.default is None}
    return {name: v for name, v in options.items() if v is not None or (name in fields and name not in optional)}


@functools.cache
def option_types() -> dict[str, type]:
    """The type of every option of `Config`: of `int | None`, `int`."""
    hints = typing.get_type_hints(Config)
    names = [f.name for f in dataclasses.fields(Config)]
    return {n: next(t for t in (*typing.get_args(hints[n]), hints[n]) if t is not type(None)) for n in names}


def check_options(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """Returns the options in `raw`, which was read from the file `where`, as `Config` takes them.

    Raises:
      ValueError: a name that is no option, an option given twice (`local-steps` and `local_steps`), a value of another
        type.
    """
    kinds, options = option_types(), {}
    for given, value in raw.items():
        name = given.replace("-", "_")
        if name not in kinds:
            near = difflib.get_close_matches(name[:100], kinds, n=1)
            hint = f": did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{where}: unknown option {shown(given)}{hint}")
        if name in options:
            raise ValueError(f"{where}: {name} is given twice")
        kind = kinds[name]
        if kind is float and type(value) is int and abs(value) <= INT32_MAX:
            value = float(value)
        if type(value) is not kind:
            raise ValueError(f"{where}: {name} must be of type {kind.__name__}, got {shown(value)}")
        options[name] = value
    return options


def of_population(config: Config) -> bool:
    """Whether clients wait on the host and a cohort is on the device; see `jfcl.experiments.population`."""
    return config.population is not None or config.store is not None


def partition_options(config: Config) -> dict[str, Any]:
    """Those of `OF_PARTITION` that are given."""
    return {name: getattr(config, name) for name in OF_PARTITION if getattr(config, name) is not None}


def check_values(config: Config) -> None:
    """Checks every option of `config` by itself: its type, and that a number is one that int32 or float32 can hold.

    Raises:
      ValueError: one does not fit; what method, data and other options ask of it besides is `validate`'s.
    """
    classes = {int: (int, np.integer), float: (int, float, np.integer, np.floating), str: str, bool: bool}
    for field in dataclasses.fields(config):
        name, value, kind = field.name, getattr(config, field.name), option_types()[field.name]
        if value is None and field.default is None:
            continue
        fits = isinstance(value, classes[kind]) and (kind is bool or not isinstance(value, bool))
        check(fits, name, value, f"of type {kind.__name__}")
        if name in SEEDS:
            check(0 <= value < 2**32, name, value, f"from 0 to {2**32 - 1}")
        elif kind is int:
            bounds = {"population": MOST_CLIENTS, "seeds": MOST_SEEDS}
            bounds |= dict.fromkeys(REPEATED, MOST_REPEATED) | dict.fromkeys(ADDED_TO, 2**30)
            most = bounds.get(name, INT32_MAX)
            check(value <= most, name, value, f"at most {most}")
        elif kind is float:
            _check_real(name, value)
        elif kind is str:
            check(is_text(value), name, value, f"text of 1 to {LONGEST_TEXT} characters in UTF-8, none of them NUL")


def is_text(value: str) -> bool:
    """Whether `value` is a name that files and folders can have: not empty, not too long, in UTF-8 and without NUL."""
    encodable = not any("\ud800" <= character <= "\udfff" for character in value)
    return encodable and bool(value.strip()) and "\0" not in value and len(value) <= LONGEST_TEXT


def _check_real(name: str, value: Any) -> None:
    """A number, infinite only where that has a meaning, that is the same to float32, in which it is computed with."""
    if name in INFINITE and value == math.inf:
        return
    largest, smallest = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
    finite = "a number, or inf" if name in INFINITE else "finite"
    check(abs(value) <= largest, name, value, f"{finite}, at most {largest:.3g} in float32")
    check(value == 0 or abs(value) >= smallest, name, value, f"0, or at least {smallest:.3g} in float32")


def validate(config: Config) -> None:
    """Every mistake that can be seen without data, as a `ValueError`."""
    check_values(config)
    check_choice("method", config.method, METHODS)
    check_choice("heterogeneity", config.heterogeneity, data.HETEROGENEITY)
    check_choice("partition", config.partition, data.PARTITIONS)
    check_choice("model", config.model, models.MODELS)
    check_choice("server_optimizer", config.server_optimizer, SERVER_OPTIMIZERS)
    check_choice("precision", config.precision, PRECISIONS)
    check_choice("serve", config.serve, SERVE)
    if config.keep is not None:
        check_choice("keep", config.keep, KEEP)
    if config.augment is not None:
        check_choice("augment", config.augment, AUGMENTATIONS)
        images = config.model not in models.LANGUAGE_MODELS
        check(images, "augment", config.augment, f"left out: model {config.model!r} reads texts")
        fits = config.augment != "tutorial" or config.model == "cnn_cifar24"
        check(fits, "augment", config.augment, "with --model cnn_cifar24, which looks at 24 x 24, or another")
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
    check(config.momentum is None or 0 <= config.momentum < 1, "momentum", config.momentum, "in [0, 1)")
    check(0 < config.test_fraction < 1, "test_fraction", config.test_fraction, "between 0 and 1")
    check(config.clusters <= config.clients, "clusters", config.clusters, f"at most the {config.clients} clients")
    check_choice("sampling", config.sampling, SAMPLING)
    check(0 <= config.dropout < 1, "dropout", config.dropout, "in [0, 1)")
    check(config.stragglers >= 0, "stragglers", config.stragglers, "0 or more")
    if not of_population(config):
        for name, least in (("sampling", "uniform"), ("dropout", 0), ("stragglers", 0), ("remember", None)):
            check(getattr(config, name) == least, name, getattr(config, name), "left out without --population")
    if config.remember is not None:
        check_count("remember", config.remember, least=0)
        check(config.method == "cfl", "remember", config.remember, f"left out: {config.method} compares no updates")
    both = config.local_steps is not None and config.local_epochs is not None
    check(not both, "local_steps, local_epochs", (config.local_steps, config.local_epochs), "not both given")
    if config.cohort is not None:
        check(config.cohort <= config.clients, "cohort", config.cohort, f"at most the {config.clients} clients")
    check(config.seed is None or config.seeds == 1, "seed, seeds", (config.seed, config.seeds), "not both given")
    check(0 <= config.malicious < 1, "malicious", config.malicious, "a share in [0, 1)")
    if config.attack is not None:
        check_choice("attack", config.attack, attacks.UPDATE_ATTACKS | attacks.DATA_ATTACKS)
        check(config.malicious > 0, "malicious", config.malicious, "above 0 with --attack")
        some = round(config.malicious * config.clients)
        accepted = f"enough for one of the {config.clients} clients, and not for all"
        check(0 < some < config.clients, "malicious", config.malicious, accepted)
        sends = "adversary" in METHODS[config.method].options or config.attack in attacks.DATA_ATTACKS
        on_data = ", ".join(attacks.DATA_ATTACKS)
        check(sends, "attack", config.attack, f"one on data ({on_data}): {config.method} sends no updates")
    else:
        check(config.malicious == 0, "malicious", config.malicious, "left out without --attack")
    for name, value in partition_options(config).items():
        check(config.partition == OF_PARTITION[name], name, value, f"left out without --partition {OF_PARTITION[name]}")
    if config.restarts == 1:
        given, default = config.restart_rounds, Config(config.method).restart_rounds
        check(given == default, "restart_rounds", given, "left out without --restarts")
    options = set(METHODS[config.method].options)
    if config.aggregator is not None:
        check_choice("aggregator", config.aggregator, kernels.AGGREGATORS)
        check(config.weights is None, "weights", config.weights, "left out with --aggregator, which counts all alike")
        options |= set(inspect.signature(kernels.AGGREGATORS[config.aggregator]).parameters)
    if config.radius is not None:
        check(config.radius > 0, "radius", config.radius, "above 0")
        check("radius" in options, "radius", config.radius, "left out: neither method nor aggregator has one")
        check(config.quantile_rule is None, "quantile_rule", config.quantile_rule, "left out with --radius")
    if not config.validation:
        given = config.fallback_rounds
        check(given is None, "fallback_rounds", given, "left out without --validation")
    given = config.privacy_seed
    check(given is None or config.privacy is not None, "privacy_seed", given, "left out without --privacy")
    check(given is None or 0 <= given < 2**32, "privacy_seed", given, f"from 0 to {2**32 - 1}")
    tried = config.restarts * config.restart_rounds if config.restarts > 1 else 1
    accepted = f"of a product of at most {MOST_REPEATED}"
    check(tried <= MOST_REPEATED, "restarts, restart_rounds", (config.restarts, config.restart_rounds), accepted)
    if config.mixing is not None:
        check(
            config.validation is None, "validation", config.validation, "left out with --mixing, which it would choose"
        )
    if config.mapping == "auto":
        check(config.chunk is None, "chunk", config.chunk, "left out with --mapping auto, which tries several")
