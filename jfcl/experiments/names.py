"""The option that a wrong name means: its name in another library, or a nearly right one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Names of options in Flower, FedJAX, PFLlib, FedML, scikit-learn and PyTorch, and what they are here.
_OF_OTHERS = {
    "lr": "learning_rate local_learning_rate client_lr client_learning_rate eta step_size",
    "rounds": "num_rounds n_rounds comm_round comm_rounds communication_rounds global_rounds num_server_rounds",
    "clients": "num_clients n_clients client_num_in_total num_users num_workers num_supernodes total_clients",
    "clusters": "num_clusters n_clusters k",
    "local_epochs": "epochs num_epochs n_epochs local_ep num_local_epochs client_epochs max_epochs",
    "local_steps": "steps num_steps num_local_steps local_iterations local_updates",
    "batch_size": "batch bs local_bs train_batch_size local_batch_size minibatch_size",
    "cohort": "clients_per_round client_num_per_round num_clients_per_round cohort_size fraction_fit join_ratio",
    "optimizer": "optim opt client_optimizer solver",
    "schedule": "scheduler lr_scheduler lr_schedule learning_rate_schedule",
    "lr_decay": "gamma learning_rate_decay learning_rate_decay_gamma",
    "clip_norm": "max_norm max_grad_norm grad_clip gradient_clip gradient_clip_val clip_grad_norm clipnorm",
    "weight_decay": "wd l2 weight_decay_rate l2_regularization",
    "warmup": "warmup_ratio warmup_steps",
    "prox": "mu proximal_mu fedprox_mu",
    "alpha": "dirichlet_alpha dir_alpha",
    "partition": "partitioner partition_method",
    "seed": "random_seed random_state manual_seed",
    "seeds": "num_seeds n_seeds",
    "num_models": "n_models",
    "examples_per_client": "samples_per_client num_samples_per_client",
    "eval_every": "eval_gap eval_interval frequency_of_the_test test_every",
    "server_lr": "server_learning_rate global_lr",
    "dataset": "data dataset_name",
    "model": "model_name arch architecture",
    "method": "algorithm algo strategy",
    "out": "output output_dir out_dir save_dir logdir log_dir",
    "data_dir": "data_path data_root datadir root",
    "devices": "num_devices n_devices",
}
OF_OTHERS = {other: ours for ours, others in _OF_OTHERS.items() for other in others.split()}


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns `": did you mean 'rounds'?"` for a wrong name, or an empty text where none is near."""
    near = near_option(name, known)
    return f": did you mean {near!r}?" if near else ""


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
