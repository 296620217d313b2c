"""The floor of a round: the multiplications of a model's dense layers and convolutions, and how fast they are here."""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jfcl.experiments.bench import measure
from jfcl.models.networks import Conv


def multiply_adds(module: nn.Module, input_shape: tuple[int, ...], dtype: Any = jnp.float32) -> list[int]:
    """What one example's forward pass multiplies in each dense layer and convolution, from first to last.

    `input_shape` and `dtype` are those of one input. Products of attention, of two activations, are not counted.
    """
    found: list[int] = []

    def note(call, args, kwargs, context):
        out = call(*args, **kwargs)
        if isinstance(context.module, (nn.Dense, nn.Conv, Conv)) and context.method_name == "__call__":
            kernel = context.module.variables["params"]["kernel"]
            pooled = 4 if getattr(context.module, "pool", False) else 1  # values of which one is left
            found.append(pooled * math.prod(out.shape[1:]) * math.prod(kernel.shape[:-1]))
        return out

    def forward():
        with nn.intercept_methods(note):
            return module.init_with_output(jax.random.key(0), jnp.zeros((1, *input_shape), dtype))

    jax.eval_shape(forward)
    return found


def sgemm_gflops(size: int = 2048) -> float:
    """The best of some `size` x `size` float32 matrix products, in 10^9 operations a second."""
    a = jnp.ones((size, size))
    return 2 * size**3 / min(measure(jnp.matmul, a, a, repeats=5)["seconds"]) / 1e9
