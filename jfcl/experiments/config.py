"""`Config`: all options of a run. Command-line flags, TOML files and `config.json` use the same names.

The options of a method are declared in its factory (`jfcl.core.options`); those below are common to the methods.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from typing import Annotated, Any

from jfcl import data, models
from jfcl.core import INT32_MAX, platform, shown
from jfcl.core.names import NOTES, option_hint
from jfcl.core.options import MOST_REPEATED, Interval, OneOf, Option, Range, Real, options_of
from jfcl.data.targets import KINDS
from jfcl.experiments.optimizers import OPTIMIZERS, SCHEDULES, SERVER_OPTIMIZERS
from jfcl.experiments.own import Named, find_attack, find_method, find_model, is_own, table_defaults
from jfcl.experiments.private_options import Privacy
from jfcl.methods import METHODS
from jfcl.robust import attacks
from jfcl.simulation.cohorts import SAMPLING
from jfcl.simulation.evaluation import SERVE
from jfcl.training.augment import AUGMENTATIONS
from jfcl.training.local import KEEP

# Names of JAX. On a CPU all of them compute in float32 (measured with jax 0.10.2: the errors of one product are equal).
PRECISIONS = {"default": None, "float32": "float32", "tf32": "tensorfloat32", "bfloat16": "BF16_BF16_F32"}
OF_PARTITION = {  # option: the partitions that take it
    name: [p for p, (make, _) in data.PARTITIONS.items() if name in inspect.signature(make).parameters]
    for name in ("alpha", "exponent", "labels_per_client", "distribution")
}
MAPPINGS = ("vmap", "chunked", "sharded", "auto")
MONITORED = ("accuracy", "worst_client_accuracy", "loss", "train_loss")
MOST_SEEDS = 10**4
MOST_CLIENTS = 10**8  # of a population: dealing the data to so many takes an hour
# Options of single methods that config.json has held for every method since its first version, with these values where
# they are not given. They are part of the identity of a run, so they stay.
SAVED_ALWAYS = {"average": "models", "relative": False, "recursive": False}

Count = Annotated[int, Range(1)]
CountOrNone = Annotated[int | None, Range(1)]
Steps = Annotated[int | None, Range(1, MOST_REPEATED)]
Seed = Range(0, 2**32 - 1)
Positive = Annotated[float, Interval("(0, inf)")]
PositiveReal = Annotated[Real, Interval("(0, inf)")]
NotNegative = Annotated[float, Interval("[0, inf)")]
NotNegativeReal = Annotated[Real, Interval("[0, inf)")]
Share = Annotated[float, Interval("[0, 1)")]

OF_COHORTS = ("sampling", "dropout", "stragglers", "remember")  # of a population
AS_DECLARED = ("cohort", "momentum", "radius")  # common options that a factory declares itself, by the same name
# Common options that reach a method through arguments of its factory; a method without any of these refuses the option.
STANDS_FOR = {
    "num_models": ("num_clusters",),
    "share": ("shared",),
    "personal": ("personal",),
    "init_from": ("init_params",),
    "server_optimizer": ("server_optimizer",),
    "server_lr": ("server_optimizer",),
    "cohort": ("cohort",),
    "aggregator": ("aggregator",),
    "radius": ("aggregator", "radius"),
    "bucket_size": ("aggregator",),
    "track_gap": ("true_cluster",),
    **{field.name: ("dp",) for field in dataclasses.fields(Privacy)},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """Data: which client holds which examples.

    Attributes:
      dataset: data set; 'jfcl list datasets' shows them, MODULE:FUNCTION is one of your own, FILE.csv (or .parquet) a
        table.
      by: column of a table with the client of each row; --clients is then the number of its clients.
      target: column of a table with the labels; default: label, y or another usual name.
      inputs: columns of a table that are inputs, comma separated; default: all others but those that number the rows.
      kind: what the targets of a table are, where whole numbers may be both.
      heterogeneity: how the hidden clusters differ; 'jfcl list heterogeneities'.
      clients: number of clients.
      clusters: number of hidden clusters (one with --heterogeneity none), and of models where the method has one per
        cluster.
      examples_per_client: training examples per client; default: all there are.
      test_fraction: share of examples held out where there is no official test set.
      partition: how the examples of a cluster are dealt to its clients; 'jfcl list partitions'.
      alpha: concentration of --partition dirichlet; default: 0.5.
      exponent: exponent of --partition power_law; default: 1.
      labels_per_client: labels per client of --partition label and pathological; default: 2.
      distribution: csv file of --partition distribution: a row per client, a column per label.
      reuse: use of an image: once per cluster (cluster) or once in all (none); auto: once in all if enough.
      newcomer_examples: add new clients with so many test examples each, evaluated with the model of lowest loss.
      population: number of clients on the host, in place of --clients; a --cohort [100] is on the device at a time,
        with --examples-per-client [20] each.
      store: folder of the population's data, made if it does not exist; default: store in --out. An existing one is
        used without --population, and options that contradict it are refused.
      vocab_size: distinct words of a data set of texts.
      length: words to which every text is cut.
      data_seed: seed of the split into clients; the same for all --seeds.
    """

    dataset: str = "digits"
    by: str | None = None
    target: str | None = None
    inputs: str | None = None
    kind: Annotated[str | None, OneOf(KINDS)] = None
    heterogeneity: Annotated[str, OneOf(data.HETEROGENEITY)] = "rotation"
    clients: Count = 40
    clusters: Count = 4
    examples_per_client: CountOrNone = None
    test_fraction: Annotated[float, Interval("(0, 1)")] = 0.2
    partition: Annotated[str, OneOf(data.PARTITIONS)] = "iid"
    alpha: float | None = None
    exponent: float | None = None
    labels_per_client: CountOrNone = None
    distribution: str | None = None
    reuse: Annotated[str, OneOf(("auto", "cluster", "none"))] = "auto"
    newcomer_examples: CountOrNone = None
    population: Annotated[int | None, Range(1, MOST_CLIENTS)] = None
    store: str | None = None
    vocab_size: Annotated[int, Range(3)] = 10_000
    length: Annotated[int, Range(2)] = 32
    data_seed: Annotated[int, Seed] = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """Training: model, local training, rounds and cohorts.

    Attributes:
      model: model; 'jfcl list models' shows them, MODULE:NAME is one of your own.
      rounds: communication rounds.
      local_steps: local steps per round; default without --local-epochs: 10, or 1 where clients send gradients.
      local_epochs: passes over the client's examples per round, instead of steps.
      batch_size: examples per local step; default: all of the client.
      optimizer: optimiser of the clients; 'jfcl list optimizers' shows them. Default: sgd.
      lr: local learning rate.
      momentum: local momentum; default: none, or 0.9 with --optimizer momentum and nesterov (momentum_clustering: 0.9,
        of the clients' gradients).
      schedule: course of the learning rate over the local steps of the whole run, counted for the client with the most
        examples; 'jfcl list schedules'. Default: constant.
      lr_end: share of the learning rate that is left at the end of --schedule cosine and warmup_cosine; default: 0.
      warmup: share of the local steps in which --schedule warmup_cosine rises; default: 0.1.
      step_rounds: rounds between two falls of --schedule step; default: a third of --rounds.
      step_factor: factor of each fall of --schedule step; default: 0.1.
      lr_decay: factor on the learning rate after every round, for clients with equal numbers of steps.
      weight_decay: weight decay added to the gradient; decoupled with --optimizer adamw and lion.
      decay_only: weight decay for the parameters with a path that starts with one of these, comma separated.
      clip_norm: largest norm of a gradient, to which a longer one is scaled down; default: none.
      prox: mu of FedProx.
      augment: random changes to training images; 'jfcl list augmentations' shows them.
      keep: optimiser state that a client keeps for the next round: nothing (default), schedule, or everything, momentum
        too (default where clients send gradients).
      num_models: number of models; default: --clusters.
      share: share the parameters with a path that starts with one of these, comma separated.
      personal: the same for parameters that each client keeps and never sends.
      init_from: warm start: folder of a run of the same --model that ended with one model, or with the number needed
        here.
      server_optimizer: step of the server along the mean update.
      server_lr: learning rate of the server.
      cohort: clients per round; default: all.
      sampling: how cohorts of a --population are drawn.
      dropout: probability that a client of a --population does not answer.
      stragglers: share of extra clients in the cohort of a --population, of which the slowest are cut.
      remember: clients outside the cohort of a --population that are compared by their last updates (cfl).
    """

    model: Annotated[str, Named(models.MODELS, find_model)] = "mlp"
    rounds: Count = 100
    local_steps: Steps = None
    local_epochs: Steps = None
    batch_size: CountOrNone = None
    optimizer: Annotated[str | None, OneOf(OPTIMIZERS)] = None
    lr: PositiveReal = 0.1
    momentum: Annotated[Real | None, Interval("[0, 1)")] = None
    schedule: Annotated[str | None, OneOf(SCHEDULES)] = None
    lr_end: Annotated[float | None, Interval("[0, 1]")] = None
    warmup: Annotated[float | None, Interval("(0, 1)")] = None
    step_rounds: CountOrNone = None
    step_factor: Annotated[float | None, Interval("(0, 1)")] = None
    lr_decay: Positive = 1.0
    weight_decay: NotNegativeReal = 0.0
    decay_only: str | None = None
    clip_norm: Annotated[Real | None, Interval("(0, inf)")] = None
    prox: NotNegativeReal = 0.0
    augment: Annotated[str | None, OneOf(AUGMENTATIONS)] = None
    keep: Annotated[str | None, OneOf(KEEP)] = None
    num_models: CountOrNone = None
    share: str | None = None
    personal: str | None = None
    init_from: str | None = None
    server_optimizer: Annotated[str, OneOf(SERVER_OPTIMIZERS)] = "average"
    server_lr: PositiveReal = 1.0
    cohort: CountOrNone = None
    sampling: Annotated[str, OneOf(SAMPLING)] = "uniform"
    dropout: Share = 0.0
    stragglers: NotNegative = 0.0
    remember: Annotated[int | None, Range(0)] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attack:
    """Attack: malicious clients, and aggregators that withstand them.

    Attributes:
      attack: attack of the malicious clients; 'jfcl list attacks' shows them, MODULE:NAME is one of your own.
      malicious: share of the clients that are malicious.
      aggregator: robust aggregator in place of the mean, also after pre-aggregators as in nnm+krum; 'jfcl list
        aggregators' shows them, MODULE:NAME is one of your own.
      radius: of --aggregator centered_clip or clip_norms+..., or instead of --quantile (*_clustering).
      bucket_size: clients per bucket of --aggregator bucketing+...; default: 2.
    """

    attack: Annotated[str | None, Named({**attacks.UPDATE_ATTACKS, **attacks.DATA_ATTACKS}, find_attack)] = None
    malicious: Share = 0.0
    aggregator: str | None = None
    radius: Annotated[Real | None, Interval("(0, inf]")] = None
    bucket_size: CountOrNone = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Run: seeds, evaluation, devices.

    Attributes:
      seeds: run with seeds 0..R-1, together.
      seed: run with this seed alone.
      eval_every: rounds between evaluations; default: about 50 evaluations.
      patience: end the run once --monitor has not improved for so many rounds, in any seed; default: run all rounds.
      monitor: metric of --patience.
      serve: model that a client is tested with, where clients choose: that of lowest loss on its training examples at
        the evaluation (loss), or the one chosen in its last round (state).
      keep_clients: keep the results of every client in every evaluated round, in clients_by_round.csv.
      track_gap: record the separation gap, from the true clusters, every round.
      chunk: clients trained at once; default: 1 on a CPU, all on an accelerator.
      mapping: vmap, chunked, sharded (clients divided among devices; default with several devices), or auto: the
        fastest in a short probe.
      devices: devices to use; a CPU is divided into so many. Default: all. A CPU has one
        for each core, and a single one with --mapping vmap or chunked.
      precision: of matrix products in training; by default that of JAX: float32 on a CPU, tf32 on a GPU, bfloat16 on a
        TPU. On a GPU, bfloat16 is the whole model in it, not its parameters. No effect on a CPU.
    """

    seeds: Annotated[int, Range(1, MOST_SEEDS)] = 1
    seed: Annotated[int | None, Seed] = None
    eval_every: CountOrNone = None
    patience: CountOrNone = None
    monitor: Annotated[str, OneOf(MONITORED)] = "accuracy"
    serve: Annotated[str, OneOf(SERVE)] = "loss"
    keep_clients: bool = False
    track_gap: bool = False
    chunk: CountOrNone = None
    mapping: Annotated[str | None, OneOf(MAPPINGS)] = None
    devices: CountOrNone = None
    precision: Annotated[str, OneOf(PRECISIONS)] = "default"


@dataclasses.dataclass(frozen=True, init=False)
class Config(Data, Training, Attack, Privacy, Run):
    """All options that decide the result of a run: `Config("cfl", clients=20, eps_1=0.4)`.

    The options that are common to the methods are fields; `options` holds those of the method that are given. Both are
    keyword arguments, and attributes. `jfcl run METHOD --help` explains them. A method of your own is
    `"module:factory"`, which is imported.

    Raises:
      TypeError: a name that is no option of any method.
      ValueError: a `"module:factory"` that cannot be imported, or of another form.

    Example:
      >>> config = Config("cfl", clients=20, eps_1=0.4)
      >>> config.clients, config.eps_1, config.options
      (20, 0.4, {'eps_1': 0.4})
    """

    method: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)

    def __init__(self, method: str, *, options: dict[str, Any] | None = None, **given: Any):
        common, declared = common_options(), all_options(method)
        own = (options or {}) | {name: value for name, value in given.items() if name not in common}
        for name in own.keys() - declared.keys():
            raise TypeError(f"Config has no option {name!r}{option_hint(name, declared)}")
        given = {**table_defaults(given), **given}
        values = {name: given.get(name, option.default) for name, option in common.items()}
        # A value that stands for "not given" is not kept: configurations with and without it are equal.
        kept = {name: v for name, v in own.items() if v is not None and not _is_saved_always(name, v)}
        for name, value in (values | {"method": method, "options": kept}).items():
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        """An option of the method, given or its default; None for an option that only other methods have."""
        if name.startswith("__") or name in ("method", "options") or name not in all_options(self.method):
            raise AttributeError(f"Config has no option {name!r}")
        own = method_options(self.method)
        return self.options.get(name, own[name].default if name in own else None)


def _is_saved_always(name: str, value: Any) -> bool:
    return name in SAVED_ALWAYS and (type(value), value) == (type(SAVED_ALWAYS[name]), SAVED_ALWAYS[name])


@functools.cache
def common_options() -> dict[str, Option]:
    """Returns the options that `Config` declares itself."""
    return {name: option for options in groups().values() for name, option in options.items()}


@functools.cache
def groups() -> dict[type, dict[str, Option]]:
    """Returns the common options of each group: `Data`, `Training`, `Attack`, `Privacy` and `Run`."""
    return {group: options_of(group) for group in (Data, Training, Attack, Privacy, Run)}


def method_options(method: str) -> dict[str, Option]:
    """Returns the options that the factory of a method declares, without those given by a common option."""
    stood_for = {argument for names in STANDS_FOR.values() for argument in names}
    declared = find_method(method).declared if method in METHODS or is_own(method) else {}
    return {name: o for name, o in declared.items() if name not in stood_for and name not in common_options()}


def all_options(method: str | None = None) -> dict[str, Option]:
    """Returns the common options and those of all methods; as `method` declares them, where others have them too."""
    return (
        _options_of_all(tuple(METHODS)) | (method_options(method) if isinstance(method, str) else {}) | common_options()
    )


@functools.cache
def _options_of_all(methods: tuple[str, ...]) -> dict[str, Option]:
    return {name: option for method in methods for name, option in method_options(method).items()}


def takes(method: str, name: str) -> bool:
    """Returns whether a method takes an option."""
    needed = set(STANDS_FOR.get(name, () if name in common_options() else (name,)))
    return not needed or not needed.isdisjoint(find_method(method).options)


def methods_with(name: str) -> list[str]:
    """Returns the methods of the library that take an option."""
    return [method for method in METHODS if takes(method, name)]


def as_dict(config: Config) -> dict[str, Any]:
    """Returns all options by name: None for those of the method that are not given."""
    own = dict.fromkeys(method_options(config.method)) | SAVED_ALWAYS | config.options
    return {name: getattr(config, name) for name in ("method", *common_options())} | own


def default_precision() -> str:
    """Returns the `--precision` that is the default of this platform, which is that of JAX.

    Example:
      >>> default_precision() in PRECISIONS
      True
    """
    return {"cpu": "float32", "tpu": "bfloat16"}.get(platform(), "tf32")


def to_saved(config: Config, split_hash: str) -> dict[str, Any]:
    """Returns the content of `config.json`: the options, and the fingerprint of the split."""
    saved = as_dict(config) | {"split_hash": split_hash}
    if saved["precision"] == "default":  # a run may continue on another platform
        saved["precision"] = default_precision()
    saved = {name: str(v) if isinstance(v, float) and math.isinf(v) else v for name, v in saved.items()}
    saved["schedule_rounds"] = schedule_rounds(config)
    return saved | {"num_rounds": saved.pop("rounds")}


def from_saved(saved: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of `Config` in the content of a `config.json`, without those that are not given.

    Example:
      >>> from_saved({"method": "ifca", "clients": 8, "chunk": None, "num_rounds": 30})
      {'method': 'ifca', 'clients': 8, 'rounds': 30}
    """
    # cohorts: how those of a population were drawn
    others = ("num_rounds", "split_hash", "cohorts", "versions", "schedule_rounds")
    options = {name: v for name, v in saved.items() if name not in others and not _is_saved_always(name, v)}
    options |= {"rounds": saved["num_rounds"]} if "num_rounds" in saved else {}
    known, common = all_options(saved.get("method")), common_options()
    options = {
        name: float(v) if name in known and known[name].kind is float and v in ("inf", "-inf") else v  # JSON has no inf
        for name, v in options.items()
    }
    required = {"method", *(name for name, option in common.items() if not option.optional)}
    return {name: v for name, v in options.items() if v is not None or name in required}


def schedule_rounds(config: Config) -> int | None:
    """Returns the rounds over which the learning rate is planned, which no resumption can change; None without a plan.

    Example:
      >>> schedule_rounds(Config("fedavg", rounds=30, schedule="cosine")), schedule_rounds(Config("fedavg", rounds=30))
      (30, None)
    """
    planned = config.schedule not in (None, "constant") and config.step_rounds is None
    return config.rounds if planned else None


def check_options(raw: dict[str, Any], where: str, method: str | None = None) -> dict[str, Any]:
    """Returns the options in `raw`, read from the file `where`, with the types of `Config`; of `method`, or that in it.

    Raises:
      ValueError: a name that is no option, an option given twice (`local-steps` and `local_steps`), a value of another
        type.
    """
    known, options = all_options(method or raw.get("method")), {}
    kinds = {"method": str} | {name: option.kind for name, option in known.items()}
    for given, value in raw.items():
        name = given.replace("-", "_")
        if name not in kinds:
            raise ValueError(f"{where}: unknown option {shown(given)}{option_hint(name, kinds)}")
        if name in options:
            raise ValueError(f"{where}: {name} is given twice")
        kind = kinds[name]
        if kind is float and type(value) is int and abs(value) <= INT32_MAX:
            value = float(value)
        if type(value) is not kind:
            note = f" ({NOTES[name]})" if name in NOTES else ""
            raise ValueError(f"{where}: {name} must be of type {kind.__name__}{note}, got {shown(value)}")
        options[name] = value
    return options


def of_population(config: Config) -> bool:
    """Returns whether clients are kept on the host and a cohort on the device; see `jfcl.experiments.population`."""
    return config.population is not None or config.store is not None


def partition_options(config: Config) -> dict[str, Any]:
    """Returns those of `OF_PARTITION` that are given."""
    return {name: getattr(config, name) for name in OF_PARTITION if getattr(config, name) is not None}
