"""Forms of a computation in compiled programs: by platform, in parts of a batch, with noted bounds of loops."""

import contextlib
import importlib.util
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from jfcl.core.checks import check


def by_platform(
    *args: Any,
    cpu: Callable[..., Any],
    accelerator: Callable[..., Any],
    tpu: Callable[..., Any] | None = None,
    cuda: Callable[..., Any] | None = None,
) -> Any:
    """Returns `cpu(*args)` in a program for a CPU, `accelerator(*args)` in one for a GPU or TPU without its own form.

    The program's own platform decides, not that of this machine: a program that is compiled here for a TPU contains
    its form alone. All forms are traced (`cuda` only where JAX can compile for an NVIDIA GPU), so they should be small.
    """
    forms = ("cpu", cpu), ("tpu", tpu), ("cuda", cuda if compiles_for_cuda() else None)
    special = {name: form for name, form in forms if form not in (None, accelerator)}
    return jax.lax.platform_dependent(*args, default=accelerator, **special)


@cache
def compiles_for_cuda() -> bool:
    """Returns whether JAX's plugin for NVIDIA GPUs is installed; False where the GPU here is older than Ampere."""
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        return False
    device = jax.devices()[0]
    return device.platform != "gpu" or float(getattr(device, "compute_capability", 0)) >= 8


def platform(devices: Any = None) -> str:
    """Returns the platform of `devices`: `"cpu"`, `"gpu"` or `"tpu"`; default: that of the default device."""
    return (default_device() if devices is None else next(iter(devices))).platform


def compiles_alone(device: jax.Device) -> bool:
    """Returns whether programs for `device` are compiled one after another.

    libtpu 0.0.42 may end the process where two are compiled at a time for a TPU with SparseCores. v5e has none.
    """
    return device.platform == "tpu" and device.device_kind != "TPU v5 lite"


def default_device() -> jax.Device:
    """Returns the device of this process on which JAX computes where nothing else is said."""
    default = jax.config.jax_default_device
    if default is None or isinstance(default, str):
        return jax.local_devices(backend=default)[0]
    return default


def in_parts(function: Callable[[Any, Any], Any], rows: Any, most: int | None) -> Any:
    """Computes `function(rows, part)`, arrays `[B, ...]`, for at most `most` rows at a time (None: all).

    Row `i` must depend on row `i` of the pytree `rows` `[B, ...]` alone. `part` `[]` is the number of the part, for
    random numbers. Activations of a part are computed again for the gradient.
    """
    total = len(jax.tree.leaves(rows)[0])
    if most is None or total <= most:
        return function(rows, 0)
    count = -(-total // most)
    size = -(-total // count)

    def divide(x):
        padded = jnp.pad(x, ((0, count * size - total), *[(0, 0)] * (x.ndim - 1)))
        return padded.reshape(count, size, *x.shape[1:])

    recomputed = jax.checkpoint(function, prevent_cse=False)
    numbered = jax.tree.map(divide, rows), jnp.arange(count, dtype=jnp.int32)
    results = jax.lax.scan(lambda carry, part: (carry, recomputed(*part)), (), numbered)[1]
    for x in jax.tree.leaves(results):
        accepted = f"({size}, ...), one row for each of the {size} examples at once"
        check(x.shape[1:2] == (size,), "the shape of what is computed of a batch", x.shape[1:], accepted)
    return jax.tree.map(lambda x: x.reshape(count * size, *x.shape[2:])[:total], results)


def at_most(trips: int) -> contextlib.AbstractContextManager:
    """Notes, for `most_trips`, the largest number of trips of the loop that is traced inside."""
    return jax.named_scope(f"at_most_{trips}_trips")


def most_trips(attributes: str) -> int | None:
    """Returns the bound that is noted in the text of a compiled loop; None if there is none.

    Example:
      >>> most_trips('%w = (s32[]) while(%t), metadata={op_name="jit(power)/at_most_8_trips/while"}')
      8
    """
    match = re.search(r'op_name="[^"]*at_most_(\d+)_trips\)*/while"', attributes)
    return int(match[1]) if match else None
