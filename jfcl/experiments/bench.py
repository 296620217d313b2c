"""How fast a round is: seconds, operations, memory and compilation by method, model, mapping and number of clients.

`sweep` is `jfcl bench`; `benchmarks/` uses the parts. The floor of a round is its multiplications, counted from the
model's dense layers and convolutions as if done plainly: forward, weight gradients, and input gradients of all layers
but the first; for IFCA `K` forward passes over all examples more. Divided by the seconds and by the speed of a large
matrix product on the same machine, in the same run, it is the fraction of the peak that a round reaches.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jfcl import mapping
from jfcl.core import Algorithm, Clients, PyTree, Task, aligned_zeros, check, check_choice, check_count
from jfcl.core.options import Range, options_of
from jfcl.experiments.own import find_method, is_own, required
from jfcl.mapping import memory
from jfcl.models import LANGUAGE_MODELS, MODELS, classification
from jfcl.models.networks import Conv
from jfcl.simulation.folder import environment
from jfcl.training.local import LocalTraining, local_training

# Called only when a mapping is used: some ask for devices.
MAPPINGS: dict[str, Callable[[], mapping.Mapping]] = {
    **{f"chunked({size})": partial(mapping.chunked, size) for size in (1, 4, 10)},
    "vmap": lambda: jax.vmap,
    "sharded(chunked(1))": lambda: mapping.sharded(mapping.client_mesh(), mapping.chunked(1)),
    "sharded(vmap)": lambda: mapping.sharded(mapping.client_mesh(), jax.vmap),
    "pmap": mapping.pmapped,
}
METHODS = ("fedavg", "local", "ifca")  # beside those of `MODULE:FACTORY`
GIVEN = ("client_axis", "num_clusters")  # to a user's own methods
IMAGE_MODELS = [name for name in MODELS if name not in LANGUAGE_MODELS]
MOST_SECONDS = 60.0  # of a round that is run though no smaller one was
Count = Annotated[int, Range(1)]
INPUT_SHAPE, NUM_CLASSES = (28, 28, 1), 10  # of the generated images


class Case(NamedTuple):
    """The work of a round.

    Attributes:
      method: a name in `METHODS`, or `MODULE:FACTORY`.
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
    method = find_method(case.method)
    options |= {"num_clusters": case.clusters} if "num_clusters" in method.options else {}
    return method.make(make_task(case.model), make_training(case), **options)


def make_clients(case: Case) -> Clients:
    """Random images and labels, on the device."""
    rng = np.random.default_rng(0)
    n, m = case.clients, case.examples
    x = aligned_zeros((n, m, *INPUT_SHAPE), np.float32)
    rng.random(out=x, dtype=np.float32)
    y = rng.integers(0, NUM_CLASSES, (n, m)).astype(np.int32)
    return jax.device_put(Clients({"x": x, "y": y}, jnp.full(n, m, jnp.int32)))


def make_arguments(case: Case) -> tuple[jax.Array, Any, Clients]:
    """`(key, state, clients)` of a first round on random examples, which are the same for any mapping."""
    clients = make_clients(case)
    state = jax.jit(make_algorithm(case, mapping.auto()).init)(jax.random.key(0), clients)
    return jax.random.key(1), state, clients


def placed(client_axis: mapping.Mapping, arguments: tuple[jax.Array, Any, Clients]) -> tuple[jax.Array, Any, Clients]:
    """The arguments with the clients where the mapping wants them; their number must be a multiple of the devices."""
    key, state, clients = arguments
    return key, state, mapping.place(client_axis, clients)


def multiply_adds(module: nn.Module, input_shape: tuple[int, ...], dtype: Any = jnp.float32) -> list[int]:
    """What one example's forward pass multiplies in each dense layer and convolution, from first to last.

    `input_shape` and `dtype` are those of one input. Products of attention, of two activations, are not counted.

    Example:
      >>> import jfcl
      >>> multiply_adds(jfcl.models.MLP(10), (28, 28, 1))
      [156800, 2000]
      >>> multiply_adds(jfcl.models.CNNMnist(10), (28, 28, 1))
      [540800, 2560000, 204800, 2560]
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


def floor_gflop(case: Case) -> float:
    """The multiplications and additions of one round, done plainly, in 10^9.

    Example:
      >>> case = Case("fedavg", "mlp", clients=1, examples=20, batch=10, steps=1)
      >>> floor_gflop(case) == 2 * 10 * (2 * 156_800 + 3 * 2_000) / 1e9
      True
    """
    first, *rest = multiply_adds(MODELS[case.model][0](NUM_CLASSES), INPUT_SHAPE)
    training = case.steps * min(case.batch or case.examples, case.examples) * (2 * first + 3 * sum(rest))
    choosing = case.clusters * case.examples * (first + sum(rest)) if case.method == "ifca" else 0
    return 2 * case.clients * (training + choosing) / 1e9


def measure(
    fn: Callable[..., Any],
    *args: Any,
    repeats: int,
    limit_mb: float = math.inf,
    limit_seconds: float = math.inf,
) -> dict[str, Any]:
    """Compiles `fn(*args)` and runs it up to `repeats` times: compile seconds, seconds of each run, MB of temporaries.

    Where it would need more than `limit_mb` of temporaries it is not run: `seconds` is empty. Once the runs have taken
    `limit_seconds`, no other is begun (but the first, which is not counted, and a second).

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
    if temporaries is None or temporaries <= limit_mb:
        jax.block_until_ready(compiled(*args))  # the first run also touches its memory for the first time
        while len(seconds) < repeats and (not seconds or sum(seconds) < limit_seconds):
            started = time.perf_counter()
            jax.block_until_ready(compiled(*args))
            seconds.append(time.perf_counter() - started)
    return {"seconds": seconds, "compile_seconds": compile_seconds, "temporary_mb": temporaries}


def sgemm_gflops(size: int = 2048) -> float:
    """The best of some `size` x `size` float32 matrix products, in 10^9 operations a second."""
    a = jnp.ones((size, size))
    return 2 * size**3 / min(measure(jnp.matmul, a, a, repeats=5)["seconds"]) / 1e9


def sweep(
    *,
    methods: Sequence[str] = ("fedavg", "ifca", "local"),
    models: Sequence[str] = ("mlp", "cnn_mnist"),
    mappings: Sequence[str] = ("chunked(1)", "chunked(4)", "vmap"),
    clients: Sequence[int] = (10, 100, 1000),
    examples: Count = 40,
    batch_size: Count = 20,
    local_steps: Count = 2,
    clusters: Count = 4,
    repeats: Count = 3,
    seconds: float = 1.0,
    tick: Callable[[str, int], None] = lambda what, total: None,
) -> dict[str, Any]:
    """Measures one round of every method x model x mapping x number of clients, on random images.

    Args:
      methods, models, mappings: names in `METHODS` or `MODULE:FACTORY`, in `IMAGE_MODELS`, in `MAPPINGS`.
      clients: numbers of clients, `N`.
      examples: per client. `M`.
      batch_size: examples per local step.
      local_steps: per round.
      clusters: models of ifca. `K`.
      repeats: timed runs of every round, of which the median.
      seconds: time for the runs of one round. A round that the one with fewer clients says will take longer is
        left out, and so is one with temporaries of more than half of the free memory; `left_out` says so.
      tick: called before every round with its name and the number of all rounds.

    Returns:
      `rows`, one for each round: `method`, `model`, `mapping`, `clients`, and, where it was run, `seconds` (median),
      `rounds/s`, `client_steps/s`, `gflops` (see the top of this file), `peak` (the fraction of `sgemm_gflops`),
      `temporary_mb` (beside the data and the models), `compile_seconds`, `runs`; else `left_out`. Beside them
      `settings`, `sgemm_gflops`, `device` and `versions`.

    Raises:
      ValueError: unknown names, counts that are not positive, more clusters than clients, a model that does not take
        images of 28 x 28.

    Example:
      >>> found = sweep(methods=["local"], models=["linear"], mappings=["vmap"], clients=[3], examples=4, batch_size=2)
      >>> [(row["clients"], row["seconds"] > 0) for row in found["rows"]]
      [(3, True)]
    """
    settings = {name: value for name, value in locals().items() if name != "tick"}
    for argument, given, known in (
        ("method", methods, METHODS),
        ("model", models, IMAGE_MODELS),
        ("mapping", mappings, MAPPINGS),
    ):
        check(len(given) > 0, f"{argument}s", given, "at least one name")
        for name in given:
            if argument == "method" and is_own(name):
                missing = [option for option in required(find_method(name)) if option not in GIVEN]
                check(not missing, "method", name, f"one that has a default for {', '.join(missing)}")
            else:
                check_choice(argument, name, known)
    check(len(clients) > 0, "clients", clients, "at least one number")
    for n in clients:
        check_count("clients", n)
    for name, option in options_of(sweep).items():
        option.check(settings[name])
    check(0 < seconds < math.inf, "seconds", seconds, "positive and finite")
    enough = "ifca" not in methods or clusters <= min(clients)
    check(enough, "clusters", clusters, f"at most the {min(clients)} clients there are, for ifca")
    for model in models:
        make_task(model)

    peak, limit_mb = sgemm_gflops(), memory.free_memory() / 2e6
    rows: list[dict[str, Any]] = []
    a_client: dict[tuple[str, ...], float] = {}  # seconds, with fewer clients
    sizes = sorted(set(clients))
    total = len(methods) * len(models) * len(mappings) * len(sizes)
    for n, method, model in itertools.product(sizes, methods, models):
        case = Case(method, model, n, examples, batch_size, local_steps, clusters)
        arguments = None  # made for the first mapping, the same for all
        for name in mappings:
            row: dict[str, Any] = {"method": method, "model": model, "mapping": name, "clients": n}
            rows.append(row)
            tick(f"{method}, {model}, {name}, {n} clients", total)
            expected = n * a_client.get((method, model, name), 0.0)
            if expected > seconds:
                row["left_out"] = f"takes {expected:.1f} s"
                continue
            least = floor_gflop(case) / peak  # Ctrl-C is not heard inside a round
            if least > max(seconds, MOST_SECONDS):
                row["left_out"] = f"takes at least {least:.1f} s"
                continue
            client_axis = MAPPINGS[name]()
            if mapping.num_rows(client_axis, n) != n:
                row["left_out"] = "clients are no multiple of the devices"
                continue
            arguments = make_arguments(case) if arguments is None else arguments
            step, its_own = make_algorithm(case, client_axis).step, placed(client_axis, arguments)
            found = measure(step, *its_own, repeats=repeats, limit_mb=limit_mb, limit_seconds=seconds)
            runs = found.pop("seconds")
            row |= found
            if not runs:
                row["left_out"] = f"needs {found['temporary_mb'] / 1000:.2g} GB"
                continue
            middle = statistics.median(runs)
            a_client[method, model, name] = middle / n
            gflops = floor_gflop(case) / middle
            speeds = {"rounds/s": 1 / middle, "client_steps/s": n * local_steps / middle}
            row |= {"seconds": middle, **speeds, "gflops": gflops, "peak": gflops / peak, "runs": runs}
    return {"settings": settings, **environment(), "sgemm_gflops": peak, "rows": rows}
