"""Optimisers and learning-rate schedules by the names that `jfcl run` takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import optax

from jfcl.core import is_concrete
from jfcl.core.parameters import path_flags

Rate = Any  # a float, a tracer, or an optax schedule


class Optimizer(NamedTuple):
    """An optimiser of the clients.

    Attributes:
      make: `(learning_rate, momentum, weight_decay, mask) -> GradientTransformation`.
      summary: one line for `jfcl list optimizers`.
      momentum: its default where `--momentum` applies; `None` where the optimiser takes none.
      decouples: whether its weight decay is multiplied by the learning rate alone (Loshchilov and Hutter 2019), and not
        added to the gradient.
    """

    make: Callable[[Rate, float | None, float], optax.GradientTransformation]
    summary: str
    momentum: float | None = None
    decouples: bool = False


def _is_zero(value: Any) -> bool:
    """Returns whether an option is 0, and no tracer."""
    return is_concrete(value) and value == 0


OPTIMIZERS = {
    "sgd": Optimizer(
        lambda lr, m, *_: optax.sgd(lr, momentum=None if _is_zero(m) else m),
        "gradient descent, with --momentum if it is given",
        0.0,
    ),
    "momentum": Optimizer(lambda lr, m, *_: optax.sgd(lr, momentum=m), "gradient descent with momentum 0.9", 0.9),
    "nesterov": Optimizer(
        lambda lr, m, *_: optax.sgd(lr, momentum=m, nesterov=True), "with Nesterov's momentum 0.9 (Nesterov 1983)", 0.9
    ),
    "adam": Optimizer(lambda lr, *_: optax.adam(lr), "moments 0.9 and 0.999 (Kingma and Ba 2015)"),
    "adamw": Optimizer(
        lambda lr, _, decay, mask: optax.adamw(lr, weight_decay=decay, mask=mask),
        "Adam with decoupled --weight-decay (Loshchilov and Hutter 2019)",
        decouples=True,
    ),
    "rmsprop": Optimizer(lambda lr, *_: optax.rmsprop(lr), "divides by the root of the mean square (Hinton 2012)"),
    "adagrad": Optimizer(
        lambda lr, *_: optax.adagrad(lr), "divides by the root of the sum of squares (Duchi et al. 2011)"
    ),
    "lion": Optimizer(
        lambda lr, _, decay, mask: optax.lion(lr, weight_decay=decay, mask=mask),
        "signs of momenta, with decoupled --weight-decay (Chen et al. 2023)",
        decouples=True,
    ),
}
SCHEDULES = {
    "constant": "the same learning rate in every step",
    "cosine": "falls along half a cosine, to --lr-end of it at the end (Loshchilov and Hutter 2017)",
    "step": "is multiplied by --step-factor after every --step-rounds rounds",
    "warmup_cosine": "rises linearly over the share --warmup of the steps, then falls as with cosine",
}
SERVER_OPTIMIZERS = {
    "average": lambda lr: optax.sgd(lr),
    "momentum": lambda lr: optax.sgd(lr, momentum=0.9),
    "adam": lambda lr: optax.adam(lr, b1=0.9, b2=0.99, eps=1e-3),
}


def make_optimizer(
    name: str,
    lr: Rate,
    *,
    momentum: float | None = None,
    weight_decay: Any = 0.0,
    decay_only: Callable[[str], bool] | None = None,
    clip_norm: float | None = None,
) -> optax.GradientTransformation:
    """Returns an optimiser of `OPTIMIZERS`, after a clipping of the gradient's norm, and with weight decay.

    Args:
      name: of the optimiser.
      lr: learning rate, or an optax schedule.
      momentum: `None`: the default of the optimiser; optimisers without one ignore it.
      weight_decay: added to the (clipped) gradient, or decoupled where the optimiser has its own.
      decay_only: of the path of a parameter, such as `"Dense_0/kernel"`: does it decay? Default: all do.
      clip_norm: largest norm of the gradient of all parameters; a longer one is scaled down.

    Example:
      >>> import jax.numpy as jnp
      >>> optimizer = make_optimizer("sgd", 0.5, clip_norm=5.0)
      >>> optimizer.update(jnp.array([6.0, 8.0]), optimizer.init(jnp.zeros(2)))[0].tolist()
      [-1.5, -2.0]
    """
    chosen, mask = OPTIMIZERS[name], None if decay_only is None else partial(path_flags, decay_only)
    parts = [] if clip_norm is None else [optax.clip_by_global_norm(clip_norm)]
    if not (chosen.decouples or _is_zero(weight_decay)):
        parts.append(optax.add_decayed_weights(weight_decay, mask))
    optimizer = chosen.make(lr, chosen.momentum if momentum is None else momentum, weight_decay, mask)
    return optax.chain(*parts, optimizer) if parts else optimizer


def make_schedule(
    name: str, lr: Any, total: int, step: int = 1, *, lr_end: float = 0.0, warmup: float = 0.1, step_factor: float = 0.1
) -> Rate:
    """Returns a schedule of `SCHEDULES`, a function of the number of local steps done; `lr` itself for `"constant"`.

    Args:
      name: of the schedule.
      lr: the largest learning rate.
      total: local steps of the whole run.
      step: local steps between two falls of `"step"`.
      lr_end, warmup, step_factor: as the options of a run.

    Example:
      >>> rate = make_schedule("cosine", 0.4, 100)
      >>> [round(float(rate(t)), 3) for t in (0, 50, 100)]
      [0.4, 0.2, 0.0]
    """
    if name == "constant":
        return lr
    if name == "step":
        share = optax.exponential_decay(1.0, step, step_factor, staircase=True)
    else:
        rising = max(round(warmup * total), 1) if name == "warmup_cosine" else 0
        share = optax.cosine_decay_schedule(1.0, max(total - rising, 1), lr_end)
        if rising:
            share = optax.join_schedules([optax.linear_schedule(0.0, 1.0, rising), share], [rising])
    return lambda count: lr * share(count)
