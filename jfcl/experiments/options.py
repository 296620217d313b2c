"""The options that are common to the methods, in groups: names, types, ranges, defaults and help, declared once.

Those of a method are declared in its factory (`jfcl.core.options`). Command-line flags, TOML files, `Config` and
`config.json` use the same names.
"""

import functools
from typing import Annotated, Literal

from jfcl import data, models
from jfcl.core.options import MOST_REPEATED, Interval, Needs, OneOf, Option, Range, Reaches, Real, Search, options_of
from jfcl.experiments import lookup
from jfcl.experiments.optimizers import OPTIMIZERS, SCHEDULES, SERVER_OPTIMIZERS
from jfcl.methods import METHODS
from jfcl.robust import attacks, privacy
from jfcl.simulation import cohorts, evaluation
from jfcl.training.augment import AUGMENTATIONS
from jfcl.training.local import KEEP

# Names of JAX. On a CPU all of them compute in float32 (measured with jax 0.10.2: the errors of one product are equal).
PRECISIONS = {"default": None, "float32": "float32", "tf32": "tensorfloat32", "bfloat16": "BF16_BF16_F32"}

Count = Annotated[int, Range(1)]
CountOrNone = Annotated[int | None, Range(1)]
Steps = Annotated[int | None, Range(1, MOST_REPEATED)]
Seed = Range(0, 2**32 - 1)
NotNegative = Annotated[Real, Interval("[0, inf)")]
OF_POPULATION, PRIVATE = Needs("population", other="store"), Needs("dp_clip")


def _of_partition(option: str) -> Needs:
    """Returns that an option needs one of the partitions that take it."""
    return Needs("partition", data.partition.partitions_with(option))


OF_SERVER, OF_MEAN, OF_PRIVACY = Reaches("server_optimizer"), Reaches("aggregator"), Reaches("dp")


class Data:
    """Data: which client holds which examples.

    Attributes:
      dataset: data set; 'jfcl list datasets' shows them, MODULE:FUNCTION is one of your own, FILE.csv (or .parquet) a
        table.
      by: column of a table with the client of each row; --clients is then the number of its clients.
      target: column of a table with the labels; default: label, y or another usual name.
      inputs: columns of a table that are inputs, comma separated; default: all others except those that number the
        rows.
      kind: what the targets of a table are; needed where whole numbers may be labels or values.
      heterogeneity: how the hidden clusters differ, several joined by +; 'jfcl list heterogeneities' shows them; sea,
        sine and circle have their own, tables have none, and the default with --drift is swap_pairs.
      strength: how much they differ, from 0 (not at all) to 1.
      mixture: clients mix clusters, in shares drawn from a Dirichlet distribution with this concentration; default:
        each client belongs to one.
      clients: number of clients; 10 by default with --drift.
      clusters: number of hidden clusters (one with --heterogeneity none), and of models where the method has one per
        cluster.
      examples_per_client: training examples per client; default: all there are.
      test_fraction: share of examples held out where there is no official test set.
      partition: how the examples of a cluster are dealt to its clients; 'jfcl list partitions'.
      alpha: concentration of --partition dirichlet, quantity and label_groups.
      exponent: exponent of --partition power_law.
      sigma: standard deviation of the logarithms of sizes of --partition lognormal.
      num_groups: number of groups of labels of --partition label_groups.
      labels_per_client: labels per client of --partition label and pathological.
      distribution: csv file for --partition distribution: a row per client, a column per label.
      reuse: how often an image is used: once per cluster (cluster) or once in all (none); auto: none if there are
        enough.
      drift: how the clusters of clients change over time; 'jfcl list drifts'.
      drift_steps: steps of time, among which the rounds are divided; default: 10, which the patterns A to F and W to Z
        have.
      drift_window: number of newest steps whose examples clients keep; default: all so far.
      newcomer_examples: test examples of each new client, which is evaluated under what the method serves it, by
        default the model of lowest loss on them.
      population: number of clients on the host, in place of --clients; a --cohort [100] is on the device at a time,
        with --examples-per-client [20] each.
      store: folder of the population's data, made if it does not exist; default: store in --out. An existing one is
        used without --population, and options that contradict it are refused.
      vocab_size: distinct words of a data set of texts.
      length: words to which every text is cut.
      data_seed: seed of the split into clients; the same for all --seeds.
      tuning_clients: further clients, with examples of their own, that take no part in the run: those that 'jfcl
        shifts' tuned the options on.
    """

    dataset: str = "digits"
    by: str | None = None
    target: str | None = None
    inputs: str | None = None
    kind: Annotated[str | None, OneOf(data.tables.KINDS)] = None
    heterogeneity: Annotated[str, OneOf(data.HETEROGENEITY, data.heterogeneity.shifts_of, "several joined by `+`")] = (
        "rotation"
    )
    strength: Annotated[float, Interval("[0, 1]")] = 1.0
    mixture: Annotated[float | None, Interval("(0, inf)")] = None
    clients: Count = 40
    clusters: Count = 4
    examples_per_client: CountOrNone = None
    test_fraction: Annotated[float, Interval("(0, 1)")] = 0.2
    partition: Annotated[str, OneOf(data.PARTITIONS)] = "iid"
    alpha: Annotated[float, _of_partition("alpha")] = 0.5
    exponent: Annotated[float, _of_partition("exponent")] = 1.0
    sigma: Annotated[float, _of_partition("sigma")] = 1.0
    num_groups: Annotated[int, Range(1), _of_partition("num_groups")] = 3
    labels_per_client: Annotated[int, Range(1), _of_partition("labels_per_client")] = 2
    distribution: Annotated[str | None, _of_partition("distribution")] = None
    reuse: Annotated[str, OneOf(("auto", "cluster", "none"))] = "auto"
    drift: Annotated[str | None, OneOf(data.PATTERNS)] = None
    drift_steps: Annotated[int | None, Range(2), Needs("drift")] = None
    drift_window: Annotated[int | None, Range(1), Needs("drift")] = None
    newcomer_examples: CountOrNone = None
    population: Annotated[int | None, Range(1, 10**8)] = None  # dealing the data to so many takes an hour
    store: str | None = None
    vocab_size: Annotated[int, Range(3)] = 10_000
    length: Annotated[int, Range(2)] = 32
    data_seed: Annotated[int, Seed] = 0
    tuning_clients: Annotated[int, Range(0)] = 0


class Training:
    """Training: model, local training, rounds and cohorts.

    Attributes:
      model: model; 'jfcl list models' shows them, MODULE:NAME is one of your own.
      rounds: communication rounds.
      local_steps: local steps per round; default without --local-epochs: 10, or 1 where clients send gradients.
      local_epochs: passes over the client's examples per round, instead of steps.
      batch_size: examples per local step; default: all examples of the client.
      optimizer: optimiser of the clients; 'jfcl list optimizers' shows them.
      lr: local learning rate.
      momentum: local momentum; default: none, or 0.9 with --optimizer momentum and nesterov (momentum_clustering: 0.9,
        of the clients' gradients).
      schedule: learning-rate schedule over the local steps of the whole run, counted for the client with the most
        examples; 'jfcl list schedules'.
      lr_end: final share of the learning rate with --schedule cosine and warmup_cosine.
      warmup: share of the local steps in which --schedule warmup_cosine rises.
      step_rounds: rounds between two drops of --schedule step; default: a third of --rounds.
      step_factor: factor of each drop of --schedule step.
      lr_decay: factor on the learning rate after every round, for clients with equal numbers of steps.
      weight_decay: weight decay, added to the gradient; decoupled with --optimizer adamw and lion.
      decay_only: the only parameters with weight decay: those with a path that starts with one of these, comma
        separated.
      clip_norm: largest norm of a gradient, to which a longer one is scaled down; default: none.
      prox: mu of FedProx, or of the pull to the common model (stocfl).
      augment: random changes to training images; 'jfcl list augmentations' shows them, MODULE:NAME is one of your own.
      keep: optimiser state that a client keeps for the next round: nothing (default), schedule, or everything, momentum
        too (default where clients send gradients).
      num_models: number of models, or auto where the method can choose it (clove, fedgroup, flux, one_shot); default:
        --clusters.
      share: average the parameters with a path that starts with one of these over all clients, comma separated.
      personal: keep the parameters with a path that starts with one of these on each client, and never send them, comma
        separated.
      init_from: warm start: folder of a run of the same --model that ended with one model, or with the number needed
        here; default: random models.
      server_optimizer: step of the server along the mean update.
      server_lr: learning rate of the server.
      cohort: clients per round; default: all.
      sampling: how cohorts of a --population are drawn.
      dropout: probability that a client of a --population does not answer.
      stragglers: share of extra clients in the cohort of a --population, of which the slowest are cut.
      remember: clients outside the cohort of a --population that are compared by their last updates (cfl); default:
        1,000, or all.
    """

    model: Annotated[str, OneOf(models.MODELS, lookup.find_model)] = "mlp"
    rounds: Count = 100
    local_steps: Steps = None
    local_epochs: Steps = None
    batch_size: CountOrNone = None
    optimizer: Annotated[str, OneOf(OPTIMIZERS)] = "sgd"
    lr: Annotated[Real, Interval("(0, inf)"), Search(0.02, 2.0)] = 0.1
    momentum: Annotated[Real | None, Interval("[0, 1)")] = None
    schedule: Annotated[str, OneOf(SCHEDULES)] = "constant"
    lr_end: Annotated[float, Interval("[0, 1]"), Needs("schedule", ("cosine", "warmup_cosine"))] = 0.0
    warmup: Annotated[float, Interval("(0, 1)"), Needs("schedule", ("warmup_cosine",))] = 0.1
    step_rounds: Annotated[int | None, Range(1), Needs("schedule", ("step",))] = None
    step_factor: Annotated[float, Interval("(0, 1)"), Needs("schedule", ("step",))] = 0.1
    lr_decay: Annotated[float, Interval("(0, inf)"), Needs("schedule", ("constant",))] = 1.0
    weight_decay: NotNegative = 0.0
    decay_only: Annotated[str | None, Needs("weight_decay")] = None
    clip_norm: Annotated[Real | None, Interval("(0, inf)")] = None
    prox: NotNegative = 0.0
    augment: Annotated[str | None, OneOf(AUGMENTATIONS, lookup.find_augmentation)] = None
    keep: Annotated[str | None, OneOf(KEEP)] = None
    num_models: Annotated[int | Literal["auto"] | None, Range(1), Reaches("num_clusters")] = None
    share: Annotated[str | None, Reaches("shared")] = None
    personal: Annotated[str | None, Reaches("personal")] = None
    init_from: Annotated[str | None, Reaches("init_params")] = None
    server_optimizer: Annotated[str, OneOf(SERVER_OPTIMIZERS), OF_SERVER] = "average"
    server_lr: Annotated[Real, Interval("(0, inf)"), OF_SERVER] = 1.0
    cohort: Annotated[CountOrNone, Reaches("cohort")] = None
    sampling: Annotated[str, OneOf(cohorts.SAMPLING), OF_POPULATION] = "uniform"
    dropout: Annotated[float, Interval("[0, 1)"), OF_POPULATION] = 0.0
    stragglers: Annotated[float, Interval("[0, inf)"), OF_POPULATION] = 0.0
    remember: Annotated[int | None, Range(0), OF_POPULATION] = None


class Attack:
    """Attack: malicious clients, and aggregators that withstand them.

    Attributes:
      attack: attack of the malicious clients; 'jfcl list attacks' shows them, MODULE:NAME is one of your own.
      malicious: share of the clients that are malicious.
      aggregator: robust aggregator in place of the mean, or pre-aggregators and an aggregator, as in nnm+krum; 'jfcl
        list aggregators' shows them, MODULE:NAME is one of your own.
      radius: radius of --aggregator centered_clip or clip_norms+..., or in place of --quantile (*_clustering).
      bucket_size: clients per bucket of --aggregator bucketing+...; default: 2.
    """

    attack: Annotated[str | None, OneOf({**attacks.UPDATE_ATTACKS, **attacks.DATA_ATTACKS}, lookup.find_attack)] = None
    malicious: Annotated[float, Interval("[0, 1)"), Needs("attack")] = 0.0
    aggregator: Annotated[str | None, OF_MEAN] = None
    radius: Annotated[Real | None, Interval("(0, inf]"), Reaches("aggregator", "radius")] = None
    bucket_size: Annotated[CountOrNone, OF_MEAN] = None


class Privacy:
    """Privacy: differential privacy of each client, with equal weights.

    Attributes:
      dp_clip: largest norm of a client's update; larger ones are scaled down to it.
      dp_noise: noise multiplier: Gaussian noise of this multiple of --dp-clip on every cluster's sum of updates.
      dp_quantile: the clipping norm starts at --dp-clip and follows this quantile of the norms of updates.
      dp_min_size: smallest size of a cluster in a round, noise included, with which its model changes.
      dp_sampling: how --cohort is drawn: each client independently (poisson, the default), or exactly this number
        (fixed, the default with --population).
      dp_delta: delta of the epsilon that is reported; default: clients ** -1.1.
    """

    dp_clip: Annotated[float | None, Interval("(0, inf)"), OF_PRIVACY] = None
    dp_noise: Annotated[float, Interval("[0, inf)"), PRIVATE, OF_PRIVACY] = 0.0
    dp_quantile: Annotated[float | None, Interval("[0, 1]"), PRIVATE, OF_PRIVACY] = None
    dp_min_size: Annotated[int, Range(1), PRIVATE, OF_PRIVACY] = 1
    dp_sampling: Annotated[str | None, OneOf(privacy.SAMPLING), PRIVATE, OF_PRIVACY] = None
    dp_delta: Annotated[float | None, Interval("(0, 1)"), Needs("dp_noise"), OF_PRIVACY] = None


class Run:
    """Run: seeds, evaluation, devices.

    Attributes:
      seeds: number of seeds, 0, 1, ..., that run together.
      seed: run with this one seed, in place of --seeds.
      eval_every: rounds between evaluations; default: about 50 evaluations.
      patience: end the run after this number of rounds without an improvement of --monitor, in any seed; default: run
        all rounds.
      monitor: metric for --patience.
      serve: model that a client is tested with, where clients choose: that of lowest loss on its training examples at
        the evaluation (loss), or the one chosen in its last round (state).
      metrics: also record these metrics of a client's outputs, separated by commas: macro_f1, auc (of two classes),
        calibration_error, or MODULE:NAME of a function (outputs, batch, real) -> number.
      keep_clients: keep the results of every client in every evaluated round, in clients_by_round.csv.
      track_gap: record the separation gap, from the true clusters, every round.
      chunk: clients trained at once; default: 1 on a CPU, all on an accelerator.
      mapping: vmap, chunked, sharded (clients divided among devices; default with several devices), pmap, or auto: the
        fastest in a short probe.
      devices: number of devices, into which a CPU is divided; default: all, of a CPU one for each core, or a single one
        with --mapping vmap or chunked.
      precision: precision of matrix products in training; the default is JAX's: float32 on a CPU, tf32 on a GPU,
        bfloat16 on a TPU. On a GPU, bfloat16 computes the whole model in bfloat16, with parameters in float32. No
        effect on a CPU.
    """

    seeds: Annotated[int, Range(1, 10**4)] = 1
    seed: Annotated[int | None, Seed] = None
    eval_every: CountOrNone = None
    patience: CountOrNone = None
    monitor: Annotated[str, OneOf(("accuracy", "worst_client_accuracy", "loss", "train_loss")), Needs("patience")] = (
        "accuracy"
    )
    serve: Annotated[str, OneOf(evaluation.SERVE)] = "loss"
    metrics: Annotated[str | None, OneOf(lookup.METRICS, lookup.find_metrics)] = None
    keep_clients: bool = False
    track_gap: Annotated[bool, Reaches("true_cluster")] = False
    chunk: CountOrNone = None
    mapping: Annotated[str | None, OneOf(("vmap", "chunked", "sharded", "pmap", "auto"))] = None
    devices: CountOrNone = None
    precision: Annotated[str, OneOf(PRECISIONS)] = "default"


# Common options that a factory declares itself, by the same name.
AS_DECLARED = ("cohort", "momentum", "prox", "radius")
GROUPS = (Data, Training, Attack, Privacy, Run)
COMMON = {name: option for group in GROUPS for name, option in options_of(group).items()}
NEEDS = [(name, m) for name, option in COMMON.items() for m in option.metadata if isinstance(m, Needs)]
OF_PARTITION = {name: needs.values for name, needs in NEEDS if needs.option == "partition"}
# Common options that reach a method through arguments of its factory; a method without any of these refuses the option.
STANDS_FOR = {name: m for name, option in COMMON.items() for m in option.metadata if isinstance(m, Reaches)}


def method_options(method: str) -> dict[str, Option]:
    """Returns the options that the factory of a method declares, without those given by a common option.

    Raises:
      ValueError: a method of a user with an option that has the name of a common one, or no text in the docstring.
    """
    of_common = {*AS_DECLARED, *(argument for arguments in STANDS_FOR.values() for argument in arguments)}
    options = {name: o for name, o in lookup.find_method(method).declared.items() if name not in of_common}
    for name, option in options.items() if lookup.is_import_path(method) else ():
        where = f"argument {name} of method {method!r} must have"
        if name in COMMON or name in ("method", "given", "values"):
            raise ValueError(f"{where} another name: --{name.replace('_', '-')} is of every method")
        if not option.text:
            raise ValueError(f"{where} an entry under Args in the docstring, its flag's help")
    return options


def all_options(method: str | None = None) -> dict[str, Option]:
    """Returns the common options and those of all methods; as `method` declares them, where others have them too."""
    return _options_of_all(tuple(METHODS)) | (method_options(method) if method else {}) | COMMON


@functools.cache
def _options_of_all(methods: tuple[str, ...]) -> dict[str, Option]:
    return {name: option for method in methods for name, option in method_options(method).items()}


def takes(method: str, name: str) -> bool:
    """Returns whether a method takes an option."""
    needed = set(STANDS_FOR.get(name, () if name in COMMON else (name,)))
    return not needed or not needed.isdisjoint(lookup.find_method(method).options)


def methods_with(name: str) -> list[str]:
    """Returns the methods of the library that take an option."""
    return [method for method in METHODS if takes(method, name)]
