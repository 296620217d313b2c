"""What a wrong name means: the name of an option, method, ... in another library, or a nearly right one."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable

# Names of options in Flower, FedML, PFLlib, FedJAX, scikit-learn and PyTorch, and what they are here.
_OPTIONS = {
    "lr": "learning_rate local_learning_rate client_lr client_learning_rate eta eta_l step_size",
    "rounds": "num_rounds n_rounds comm_round comm_rounds communication_rounds global_rounds num_server_rounds gr",
    "clients": "num_clients n_clients client_num_in_total num_users num_workers num_supernodes total_clients nc"
    " num_partitions",
    "clusters": "num_clusters n_clusters k group_num",
    "local_epochs": "epochs num_epochs n_epochs local_ep num_local_epochs client_epochs max_epochs ls",
    "local_steps": "steps num_steps num_local_steps local_iterations local_updates batch_num_per_client bnpc",
    "batch_size": "batch bs local_bs train_batch_size local_batch_size minibatch_size lbs",
    "cohort": "clients_per_round client_num_per_round num_clients_per_round cohort_size num_sampled_clients"
    " fraction_fit fraction_train fraction_evaluate join_ratio jr participation participation_rate client_fraction"
    " sample_rate frac",
    "malicious": "num_byzantine byzantine_client_num num_malicious num_malicious_clients num_adversaries",
    "optimizer": "optim opt client_optimizer solver",
    "schedule": "scheduler lr_scheduler lr_schedule learning_rate_schedule",
    "lr_decay": "gamma learning_rate_decay learning_rate_decay_gamma ldg",
    "clip_norm": "max_norm max_grad_norm grad_clip gradient_clip gradient_clip_val clip_grad_norm clipnorm",
    "weight_decay": "wd l2 weight_decay_rate l2_regularization",
    "warmup": "warmup_ratio warmup_steps",
    "prox": "mu proximal_mu fedprox_mu",
    "alpha": "dirichlet_alpha dir_alpha partition_alpha",
    "partition": "partitioner partition_method split_method",
    "labels_per_client": "num_classes_per_partition classes_per_client num_shards_per_partition shards_per_client",
    "seed": "random_seed random_state manual_seed",
    "seeds": "num_seeds n_seeds times num_trials repeats",
    "num_models": "n_models",
    "examples_per_client": "samples_per_client num_samples_per_client",
    "eval_every": "eval_gap eval_interval frequency_of_the_test test_every eg eval_frequency",
    "server_lr": "server_learning_rate global_lr",
    "server_optimizer": "federated_optimizer",
    "dropout": "client_drop_rate cdr",
    "stragglers": "straggler_rate",
    "attack": "attack_type attack_mode",
    "aggregator": "defense_type defense aggregation aggregation_rule aggr",
    "dp_clip": "clipping_norm l2_norm_clip dp_clipping_norm",
    "dp_noise": "noise_multiplier dp_noise_multiplier",
    "dp_delta": "delta target_delta",
    "dataset": "data dataset_name",
    "model": "model_name arch architecture",
    "method": "algorithm algo strategy",
    "out": "output output_dir out_dir save_dir logdir log_dir save_folder_name",
    "data_dir": "data_path data_root datadir root data_cache_dir",
    "devices": "num_devices n_devices",
    "newcomer_examples": "num_new_clients nnc",
    "length": "max_len ml max_length",
    "personal_steps": "plocal_epochs pls personal_epochs",
}
OF_OTHERS = {other: ours for ours, others in _OPTIONS.items() for other in others.split()}
# Options that others give in another unit.
NOTES = {"cohort": "a number of clients, not a share", "malicious": "a share of the clients, not a number"}
# What needs a sentence; {name} is an option.
_GPU = "JAX takes the GPU or TPU that it finds; {devices} sets their number"
_ADAPTIVE = "it is fedavg with {server_optimizer} adam and {server_lr}, the adaptive optimiser of servers here"
SENTENCES = {
    "num_classes": "the data set knows its classes; {labels_per_client} deals so many to each client",
    "wandb": "did you mean {track} wandb?",
    "tensorboard": "did you mean {track} tensorboard?",
    "mlflow": "did you mean {track} mlflow?",
    "gpu": _GPU,
    "epsilon": "{dp_noise} sets the noise, and the run prints its epsilon",
    "server_momentum": "did you mean {server_optimizer} momentum?",
    "min_fit_clients": "every round has its whole {cohort}; a population has {dropout}",
}
_SAME = {
    "num_classes": "n_classes ncl nb classes",
    "wandb": "enable_wandb wandb_project use_wandb",
    "gpu": "gpus gpu_id device_id device use_gpu using_gpu cuda did dev",
    "min_fit_clients": "min_evaluate_clients min_available_clients",
}
SENTENCES |= {other: SENTENCES[name] for name, others in _SAME.items() for other in others.split()}

_ROBUST = "it is fedavg with {aggregator} %s and {malicious}"
_ABSENT = (
    "scaffold fednova moon feddyn perfedavg pfedme apfl fedala fedrod fedbabu fedproto fedfomo fedamp fedphp fedpac"
    " fedgen fedcac fedcp gpfl feddistill fml fedgc fedcross fedas fedmtl fedgh fedlc fedpcl dbe fedntd fedkd qfedavg"
    " mime mimelite agnosticfedavg faulttolerantfedavg feddf feddc turboaggregate hierarchicalfl hierfl splitnn"
    " fednas fedgkt asyncfedavg fedbuff feddrift fedsoft fedem fedrc pacfl fedgroup stocfl ccvr fedmd"
)
VALUES = {
    "method": {
        "fedprox": "it is fedavg with {prox}",
        "fedadam": "it is fedavg with {server_optimizer} adam",
        "fedopt": "it is fedavg with {server_optimizer} adam or momentum",
        "fedavgm": "it is fedavg with {server_optimizer} momentum",
        "fedyogi": _ADAPTIVE,
        "fedadagrad": _ADAPTIVE,
        "fedsgd": "it is fedavg with {local_steps} 1",
        "fedmedian": "it is fedavg with {aggregator} coordinate_median",
        "fedtrimmedavg": _ROBUST % "trimmed_mean",
        "krum": _ROBUST % "krum",
        "multikrum": _ROBUST % "multi_krum",
        "bulyan": _ROBUST % "bulyan",
        "rfa": "it is fedavg with {aggregator} geometric_median",
        "dpfedavg": "it is fedavg with {dp_clip} and {dp_noise}",
        "fedlora": "it is a model of jfcl.models.lora, with fedavg, in Python",
        "localonly": "did you mean 'local'?",
        "standalone": "did you mean 'local'?",
        "lgfedavg": "did you mean 'lg_fedavg'?",
        "clusteredfl": "did you mean 'cfl'?",
    }
    | dict.fromkeys(["dpfedavgfixed", "dpfedavgadaptive", "fedavgdp"], "it is fedavg with {dp_clip} and {dp_noise}")
    | dict.fromkeys(_ABSENT.split(), "jfcl does not have it; your own is MODULE:FACTORY"),
    "aggregator": {
        "median": "did you mean 'coordinate_median' or 'geometric_median'?",
        "fedmedian": "did you mean 'coordinate_median'?",
        "coordinatewisemedian": "did you mean 'coordinate_median'?",
        "rfa": "did you mean 'geometric_median'?",
        "fedtrimmedavg": "did you mean 'trimmed_mean'?",
        "coordinatewisetrimmedmean": "did you mean 'trimmed_mean'?",
        "meamed": "did you mean 'mean_around_median'?",
        "cclip": "did you mean 'centered_clip'?",
        "normdiffclipping": "did you mean 'clip_norms+mean', with {radius}?",
        "average": "did you mean 'mean'?",
        "fedavg": "did you mean 'mean'?",
    },
    "attack": dict.fromkeys(
        ["labelflip", "labelflipping"],
        "did you mean 'label_reverse' (label y becomes C - 1 - y) or 'label_zero' (every label becomes 0)?",
    )
    | {
        "byzantine": "did you mean 'gaussian' (random), 'zero', or 'sign_flip'?",
        "random": "did you mean 'gaussian'?",
        "noise": "did you mean 'gaussian', of updates, or 'noisy_inputs'?",
        "flip": "did you mean 'sign_flip', of updates, or 'label_reverse'?",
        "modelreplacement": "did you mean 'scaled'?",
        "littleisenough": "did you mean 'alie'?",
        "innerproductmanipulation": "did you mean 'ipm'?",
    },
    "partition": {
        "homo": "did you mean 'iid'?",
        "hetero": "did you mean 'dirichlet', with {alpha}?",
        "dir": "did you mean 'dirichlet', with {alpha}?",
        "lda": "did you mean 'dirichlet', with {alpha}?",
        "noniid": "did you mean 'dirichlet', with {alpha}, or 'label'?",
        "pat": "did you mean 'pathological', with {labels_per_client}?",
        "exdir": "did you mean 'dirichlet', with {alpha}?",
        "shards": "did you mean 'label', with {labels_per_client}?",
        "shard": "did you mean 'label', with {labels_per_client}?",
        "natural": "did you mean 'writer'?",
        "naturalid": "did you mean 'writer'?",
        "square": "did you mean 'power_law'?",
    },
    "server_optimizer": dict.fromkeys(["sgd", "fedavg", "none"], "did you mean 'average'?")
    | dict.fromkeys(["yogi", "adagrad", "fedyogi", "fedadagrad"], "did you mean 'adam'?"),
    "heterogeneity": dict.fromkeys(["rotated", "rotations"], "did you mean 'rotation'?"),
}


def flag_of(name: str) -> str:
    """Returns the flag of an option.

    Example:
      >>> flag_of("local_steps")
      '--local-steps'
    """
    return "--" + name.replace("_", "-")


def option_hint(name: str, known: Iterable[str], form: Callable[[str], str] = repr) -> str:
    """Returns `": did you mean 'rounds'?"` for a wrong name of an option, or an empty text where none is near.

    Args:
      name: the wrong name.
      known: the options that there are.
      form: how an option is written; `flag_of` for flags.

    Example:
      >>> option_hint("participation", ["rounds", "cohort"], flag_of), option_hint("ronds", ["rounds", "cohort"])
      (': did you mean --cohort (a number of clients, not a share)?', ": did you mean 'rounds'?")
    """
    known, name = list(known), name[:100].replace("-", "_").lower()
    if name in SENTENCES and name not in known:
        return f": {_filled(SENTENCES[name], form)}"
    if OF_OTHERS.get(name) == "method" and "method" not in known:  # on the command line
        return ": METHOD comes first, as in jfcl run ifca"
    near = near_option(name, known)
    note = f" ({NOTES[near]})" if near in NOTES and name in OF_OTHERS else ""
    return f": did you mean {form(near)}{note}?" if near else ""


def value_hint(what: str, value: str, known: Iterable[str]) -> str:
    """Returns `": did you mean 'ifca'?"` for a wrong name of a method, an attack, ..., or a full stop.

    Names of other libraries are answered by what they are here.

    Example:
      >>> [value_hint("method", name, ["fedavg", "ifca"]) for name in ("FedProx", "IFCA", "x")]
      [': it is fedavg with --prox.', ": did you mean 'ifca'?", '.']
    """
    known = {_plain(name): name for name in known}
    found = VALUES.get(what, {}).get(_plain(value))
    if found and _plain(value) not in known:
        return f": {_filled(found, flag_of)}" + "." * (not found.endswith("?"))
    near = (
        [_plain(value)] if _plain(value) in known else difflib.get_close_matches(_plain(value), known, n=1, cutoff=0.5)
    )
    return f": did you mean {known[near[0]]!r}?" if near else "."


def _plain(name: str) -> str:
    return re.sub(r"[\W_]", "", name.lower())


def _filled(text: str, form: Callable[[str], str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda found: form(found[1]), text)


def near_option(name: str, known: Iterable[str]) -> str | None:
    """Returns the option in `known` that a wrong name means: by its name in other libraries, or the nearest.

    Example:
      >>> near_option("num-epochs", ["rounds", "local_epochs"]), near_option("ronds", ["rounds", "local_epochs"])
      ('local_epochs', 'rounds')
    """
    name, ours = name[:100].replace("-", "_").lower(), {option: option for option in known}
    others = {other: option for other, option in OF_OTHERS.items() if option in ours}
    if name in others:
        return others[name]
    for names in (ours, others):
        if near := difflib.get_close_matches(name, names, n=1):
            return names[near[0]]
    return None
