"""The platform that a computation runs on: a CPU has the fastest form of one kind, accelerators of another."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import jax


def by_platform(
    *args: Any,
    cpu: Callable[..., Any],
    accelerator: Callable[..., Any],
    tpu: Callable[..., Any] | None = None,
    cuda: Callable[..., Any] | None = None,
) -> Any:
    """Returns `cpu(*args)` in a program for a CPU, and `accelerator(*args)` in one for a GPU or TPU.

    The program's own platform decides, not that of this machine: a program that is compiled here for a TPU contains
    `accelerator` alone. All forms are traced, so they should be small.

    Args:
      args: pytrees of arrays.
      cpu, accelerator: the two forms, with results of equal structure, shapes and dtypes.
      tpu: the form for a TPU, where it differs from that for a GPU.
      cuda: the form for an NVIDIA GPU, where it differs. It is traced only where JAX can compile for one.

    Raises:
      TypeError: results of different structures, shapes or dtypes.

    Example:
      >>> import jax.numpy as jnp
      >>> by_platform(jnp.arange(3.0), cpu=jnp.sum, accelerator=lambda x: x @ jnp.ones(3)).tolist()
      3.0
    """
    forms = ("cpu", cpu), ("tpu", tpu), ("cuda", cuda if compiles_for_cuda() else None)
    others = {name: form for name, form in forms if form not in (None, accelerator)}
    return jax.lax.platform_dependent(*args, default=accelerator, **others)


@cache
def compiles_for_cuda() -> bool:
    """Returns whether JAX's plugin for NVIDIA GPUs is installed; False where the GPU here is older than Ampere."""
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        return False
    device = jax.devices()[0]
    return device.platform != "gpu" or float(getattr(device, "compute_capability", 0)) >= 8


def platform(devices: Any = None) -> str:
    """Returns the platform of `devices`: `"cpu"`, `"gpu"` or `"tpu"`; default: that of the default device.

    Example:
      >>> platform(jax.devices("cpu"))
      'cpu'
    """
    if devices is None:
        default = jax.config.jax_default_device
        if default is None:
            return jax.devices()[0].platform
        return default if isinstance(default, str) else default.platform
    return next(iter(devices)).platform
