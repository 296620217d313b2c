"""How fast a round is: seconds, operations, memory and compilation of one method x model x mapping x size.

The floor of a round is its multiplications, counted from the model's layers as if done plainly: forward, weight
gradients, and input gradients of all layers but the first; for IFCA `K` forward passes over all examples more. Divided
by the seconds and by the speed of a large matrix product on the same machine, in the same run, it is the fraction of
the peak that a round reaches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jfcl import mapping
from jfcl.algorithms import fedavg, ifca, local_only
from jfcl.core import Algorithm, Clients, PyTree, Task, aligned_zeros
from jfcl.local import LocalTraining, local_training
from jfcl.models import MODELS, classification

# Called only when a mapping is used: some ask for devices.
MAPPINGS: dict[str, Callable[[], mapping.Mapping]] = {
    "chunked(1)": lambda: mapping.chunked(1),
    "chunked(4)": lambda: mapping.chunked(4),
    "chunked(10)": lambda: mapping.chunked(10),
    "vmap": lambda: jax.vmap,
}
METHODS: dict[str, Callable[..., Algorithm]] = {
    "fedavg": lambda task, training, clusters, **options: fedavg(task, training, **options),
    "local": lambda task, training, clusters, **options: local_only(task, training, **options),
    "ifca": lambda task, training, clusters, **options: ifca(task, training, num_clusters=clusters, **options),
}
INPUT_SHAPE, NUM_CLASSES = (28, 28, 1), 10  # of the generated images


class Case(NamedTuple):
    """The work of a round.

    Attributes:
      method: a name in `METHODS`.
      model: a name in `jfcl.models.MODELS`.
      clients: `N`.
      examples: `M`, of every client.
      batch: examples per local step; `None`: all.
      steps: local steps.
      clusters: `K`, of IFCA.
      lr: learning rate of plain SGD.
    """

    method: str
    model: str
    clients: int
    examples: int
    batch: int | None
    steps: int
    clusters: int = 1
    lr: float = 0.01


def make_task(model: str) -> Task:
    """A classifier of the generated images by a model of `jfcl.models`."""
    return classification(MODELS[model][0](NUM_CLASSES), INPUT_SHAPE, NUM_CLASSES)


def make_training(case: Case) -> LocalTraining:
    """Plain SGD for the case's steps."""
    return local_training(optax.sgd(case.lr), num_steps=case.steps, batch_size=case.batch)


def make_algorithm(case: Case, client_axis: mapping.Mapping, *, init_params: PyTree | None = None) -> Algorithm:
    """The case's method under a mapping, from models drawn at random or `init_params`."""
    options = {"client_axis": client_axis} | ({} if init_params is None else {"init_params": init_params})
    return METHODS[case.method](make_task(case.model), make_training(case), case.clusters, **options)


def make_clients(case: Case) -> Clients:
    """Random images and labels, on the device."""
    rng = np.random.default_rng(0)
    n, m = case.clients, case.examples
    x = aligned_zeros((n, m, *INPUT_SHAPE), np.float32)
    rng.random(out=x, dtype=np.float32)
    y = rng.integers(0, NUM_CLASSES, (n, m)).astype(np.int32)
    return jax.device_put(Clients({"x": x, "y": y}, jnp.full(n, m, jnp.int32)))


def make_round(case: Case, client_axis: mapping.Mapping) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """`(step, arguments)` of one round on random examples."""
    clients = make_clients(case)
    algorithm = make_algorithm(case, client_axis)
    state = jax.jit(algorithm.init)(jax.random.key(0), clients)
    return algorithm.step, (jax.random.key(1), state, clients)


def multiply_adds(module: nn.Module, input_shape: tuple[int, ...]) -> list[int]:
    """What one example's forward pass multiplies in each dense layer and convolution, from first to last.

    Example:
      >>> import jfcl
      >>> multiply_adds(jfcl.models.MLP(10), (28, 28, 1))
      [156800, 2000]
      >>> multiply_adds(jfcl.models.CNNMnist(10), (28, 28, 1))
      [540800, 3097600, 204800, 2560]
    """
    found: list[int] = []

    def note(call, args, kwargs, context):
        out = call(*args, **kwargs)
        if isinstance(context.module, (nn.Dense, nn.Conv)) and context.method_name == "__call__":
            kernel = context.module.variables["params"]["kernel"]
            found.append(math.prod(out.shape[1:]) * math.prod(kernel.shape[:-1]))
        return out

    def forward():
        with nn.intercept_methods(note):
            return module.init_with_output(jax.random.key(0), jnp.zeros((1, *input_shape)))

    jax.eval_shape(forward)
    return found


def floor_gflop(case: Case) -> float:
    """The multiplications and additions of one round, done plainly, in 10^9.

    Example:
      >>> case = Case("fedavg", "mlp", clients=1, examples=20, batch=10, steps=1)
      >>> floor_gflop(case) == 2 * 10 * (2 * 156_800 + 3 * 2_000) / 1e9
      True
    """
    first, *rest = multiply_adds(MODELS[case.model][0](NUM_CLASSES), INPUT_SHAPE)
    training = case.steps * (case.batch or case.examples) * (2 * first + 3 * sum(rest))
    choosing = case.clusters * case.examples * (first + sum(rest)) if case.method == "ifca" else 0
    return 2 * case.clients * (training + choosing) / 1e9


def measure(fn: Callable[..., Any], *args: Any, repeats: int, limit_mb: float = float("inf")) -> dict[str, Any]:
    """Compiles `fn(*args)` and runs it `repeats` times: compile seconds, seconds of each run, MB of temporaries.

    Where it would need more than `limit_mb` of temporaries it is not run: `seconds` is empty.

    Example:
      >>> found = measure(lambda x: x + 1, jnp.zeros(3), repeats=2)
      >>> len(found["seconds"]), sorted(found)
      (2, ['compile_seconds', 'seconds', 'temporary_mb'])
    """
    started = time.perf_counter()
    compiled = jax.jit(fn).lower(*args).compile()
    compile_seconds = time.perf_counter() - started
    memory = compiled.memory_analysis()
    temporaries = None if memory is None else memory.temp_size_in_bytes / 1e6
    seconds: list[float] = []
    if temporaries is not None and temporaries > limit_mb:
        return {"seconds": seconds, "compile_seconds": compile_seconds, "temporary_mb": temporaries}
    jax.block_until_ready(compiled(*args))  # the first run also touches its memory for the first time
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        seconds.append(time.perf_counter() - started)
    return {"seconds": seconds, "compile_seconds": compile_seconds, "temporary_mb": temporaries}


def sgemm_gflops(size: int = 2048) -> float:
    """The best of some `size` x `size` float32 matrix products, in 10^9 operations a second."""
    a = jnp.ones((size, size))
    return 2 * size**3 / min(measure(jnp.matmul, a, a, repeats=5)["seconds"]) / 1e9
