"""The local training of a run: optimisers and learning-rate schedules by the names that `jfcl run` takes."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import optax

from jfcl.core.checks import INT32_MAX, check, is_concrete
from jfcl.core.parameters import path_flags
from jfcl.experiments.lookup import find_augmentation, find_method
from jfcl.training.local import LocalTraining, local_training, most_steps


class Optimizer(NamedTuple):
    """An optimiser of the clients.

    Attributes:
      make: `(learning_rate, ...) -> GradientTransformation`, of optax.
      summary: one line for `jfcl list optimizers`.
      momentum: the default of `--momentum`; `None` where the optimiser takes none.
      decouples: whether its weight decay is multiplied by the learning rate alone (Loshchilov and Hutter 2019), and not
        added to the gradient.
    """

    make: Callable[..., optax.GradientTransformation]
    summary: str
    momentum: float | None = None
    decouples: bool = False


def _is_zero(value: Any) -> bool:
    """Returns whether an option is 0; a tracer is not."""
    return is_concrete(value) and value == 0


OPTIMIZERS = {
    "sgd": Optimizer(optax.sgd, "gradient descent, with --momentum if it is given", 0.0),
    "momentum": Optimizer(optax.sgd, "gradient descent with momentum 0.9", 0.9),
    "nesterov": Optimizer(partial(optax.sgd, nesterov=True), "with Nesterov's momentum 0.9 (Nesterov 1983)", 0.9),
    "adam": Optimizer(optax.adam, "moments 0.9 and 0.999 (Kingma and Ba 2015)"),
    "adamw": Optimizer(optax.adamw, "Adam with decoupled --weight-decay (Loshchilov and Hutter 2019)", decouples=True),
    "rmsprop": Optimizer(optax.rmsprop, "divides by the root of the mean square (Hinton 2012)"),
    "adagrad": Optimizer(optax.adagrad, "divides by the root of the sum of squares (Duchi et al. 2011)"),
    "lion": Optimizer(optax.lion, "signs of momenta, with decoupled --weight-decay (Chen et al. 2023)", decouples=True),
}
SCHEDULES = {
    "constant": "the same learning rate in every step",
    "cosine": "falls along half a cosine, to --lr-end of it at the end (Loshchilov and Hutter 2017)",
    "step": "is multiplied by --step-factor after every --step-rounds rounds",
    "warmup_cosine": "rises linearly over the share --warmup of the steps, then falls as with cosine",
}
SERVER_OPTIMIZERS = {
    "average": optax.sgd,
    "momentum": lambda lr: optax.sgd(lr, momentum=0.9),
    "adam": lambda lr: optax.adam(lr, b1=0.9, b2=0.99, eps=1e-3),
}


def make_training(config: Any, largest: int) -> LocalTraining:
    """Returns the local training of a `Config`; schedules count the steps of a client with `largest` examples."""
    of_method = find_method(config.method).options  # its momentum and prox are not those of the optimiser
    training = local_training(
        optax.sgd(config.lr),
        num_steps=config.local_steps,
        num_epochs=config.local_epochs,
        batch_size=config.batch_size,
        prox=0.0 if "prox" in of_method else config.prox,
        augment=None if config.augment is None else find_augmentation(config.augment),
        keep=config.keep,
    )
    # The gradient is clipped, then weight decay is added to it, unless the optimiser decouples the two.
    optimizer, decay = OPTIMIZERS[config.optimizer], config.weight_decay
    mask = None if config.decay_only is None else partial(path_flags, starting_with(config.decay_only))
    parts = [] if config.clip_norm is None else [optax.clip_by_global_norm(config.clip_norm)]
    options = {}
    if optimizer.decouples:
        options = {"weight_decay": decay, "mask": mask}
    elif not _is_zero(decay):
        parts.append(optax.add_decayed_weights(decay, mask))
    if optimizer.momentum is not None:
        momentum = optimizer.momentum if "momentum" in of_method or config.momentum is None else config.momentum
        options["momentum"] = None if _is_zero(momentum) else momentum
    parts.append(optimizer.make(_learning_rate(config, training, largest), **options))
    return training._replace(optimizer=optax.chain(*parts) if len(parts) > 1 else parts[0])


def _learning_rate(config: Any, training: LocalTraining, largest: int) -> float | optax.Schedule:
    """Returns the learning rate, or its schedule over the local steps of a client with `largest` examples."""
    lr, schedule = config.lr, config.schedule
    if schedule == "constant" and config.lr_decay == 1:
        return lr
    # The steps of the whole run.
    trained = find_method(config.method).trained
    largest = largest if trained is None else trained(config.values, largest)
    steps, before = most_steps(training, largest), config.restart_rounds if (config.restarts or 1) > 1 else 0
    total = (before + config.rounds) * steps
    accepted = f"such that the learning rate falls over at most {INT32_MAX} local steps, not {total}"
    check(total <= INT32_MAX, "rounds", config.rounds, accepted)
    # The schedule.
    if schedule in ("constant", "step"):
        every, factor = (1, config.lr_decay) if schedule == "constant" else (config.step_rounds, config.step_factor)
        every, falls = min(every * steps, INT32_MAX), optax.exponential_decay(1.0, 1, factor)
        # A whole number of falls: optax rounds a quotient down, which XLA multiplies by a reciprocal.
        share = lambda count: falls(count // every)  # noqa: E731
    else:
        rising = max(round(config.warmup * total), 1) if schedule == "warmup_cosine" else 0
        share = optax.cosine_decay_schedule(1.0, max(total - rising, 1), config.lr_end)
        if rising:
            share = optax.join_schedules([optax.linear_schedule(0.0, 1.0, rising), share], [rising])
    return lambda count: lr * share(count)


def beginnings(listed: str | None) -> tuple[str, ...]:
    """Returns the beginnings of paths in an option such as `--share`, separated by commas; none for None."""
    return () if listed is None else tuple(beginning.strip() for beginning in listed.split(","))


def starting_with(listed: str) -> Callable[[str], bool]:
    """Returns the predicate of the parameters that an option such as `--share` selects, by their paths."""
    return lambda path: path.startswith(beginnings(listed))
