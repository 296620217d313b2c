"""How fast a round is: seconds, memory and compilation by method, model, mapping and number of clients.

`sweep` is `jfcl bench`; `benchmarks/` uses the parts.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jfcl import mapping
from jfcl.core import Algorithm, Clients, Task, aligned_zeros, check, check_choice
from jfcl.core.options import SEVERAL, Interval, Range, check_options
from jfcl.experiments.lookup import find_method, is_import_path, required
from jfcl.mapping import memory
from jfcl.models import LANGUAGE_MODELS, MODELS, classification
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
Count = Annotated[int, Range(1)]
Steps = Annotated[int, Range(1, 10_000)]  # Ctrl-C is not heard inside a round
INPUT_SHAPE, NUM_CLASSES = (28, 28, 1), 10  # of the generated images


class Case(NamedTuple):
    """The work of a round."""

    method: str  # a name in `METHODS`, or `MODULE:FACTORY`
    model: str
    clients: int
    examples: int  # of every client
    batch: int | None  # examples per local step; None: all
    steps: int
    clusters: int = 1  # the number of models, where a method has one for each
    lr: float = 0.01  # of plain SGD


def make_task(model: str) -> Task:
    """Returns a classifier of the generated images by a model of `jfcl.models`."""
    return classification(MODELS[model][0](NUM_CLASSES), INPUT_SHAPE, NUM_CLASSES)


def make_training(case: Case) -> LocalTraining:
    """Returns plain SGD for the case's steps."""
    return local_training(optax.sgd(case.lr), num_steps=case.steps, batch_size=case.batch)


def make_algorithm(case: Case, client_axis: mapping.Mapping, **options: Any) -> Algorithm:
    """Returns the case's method under a mapping, with options of its own such as `init_params`."""
    method = find_method(case.method)
    options |= {"num_clusters": case.clusters} if "num_clusters" in method.options else {}
    return method.make(make_task(case.model), make_training(case), client_axis=client_axis, **options)


def make_arguments(case: Case) -> tuple[jax.Array, Any, Clients]:
    """Returns `(key, state, clients)` of a first round on random images, which are the same for any mapping."""
    rng, n, m = np.random.default_rng(0), case.clients, case.examples
    x = aligned_zeros((n, m, *INPUT_SHAPE), np.float32)
    rng.random(out=x, dtype=np.float32)
    y = rng.integers(0, NUM_CLASSES, (n, m)).astype(np.int32)
    clients = jax.device_put(Clients({"x": x, "y": y}, jnp.full(n, m, jnp.int32)))
    state = jax.jit(make_algorithm(case, mapping.auto()).init)(jax.random.key(0), clients)
    return jax.random.key(1), state, clients


def measure(
    fn: Callable[..., Any], *args: Any, repeats: int, limit_mb: float = math.inf, limit_seconds: float = math.inf
) -> dict[str, Any]:
    """Compiles `fn(*args)` and runs it up to `repeats` times: compile seconds, seconds of each run, MB of temporaries.

    Where it would need more than `limit_mb` of temporaries it is not run: `seconds` is empty. Once the runs have taken
    `limit_seconds`, no other is begun (but the first, which is not counted, and a second).

    Example:
      >>> measured = measure(lambda x: x + 1, jnp.zeros(3), repeats=2)
      >>> len(measured["seconds"]), sorted(measured)
      (2, ['compile_seconds', 'seconds', 'temporary_mb'])
    """
    started = time.perf_counter()
    compiled = jax.jit(fn).lower(*args).compile()
    compile_seconds = time.perf_counter() - started
    analysis = compiled.memory_analysis()
    temporaries = None if analysis is None else analysis.temp_size_in_bytes / 1e6
    seconds: list[float] = []
    if temporaries is None or temporaries <= limit_mb:
        jax.block_until_ready(compiled(*args))  # the first run also touches its memory for the first time
        while len(seconds) < repeats and (not seconds or sum(seconds) < limit_seconds):
            started = time.perf_counter()
            jax.block_until_ready(compiled(*args))
            seconds.append(time.perf_counter() - started)
    return {"seconds": seconds, "compile_seconds": compile_seconds, "temporary_mb": temporaries}


def sweep(
    *,
    methods: Annotated[Sequence[str], SEVERAL] = ("fedavg", "ifca", "local"),
    models: Annotated[Sequence[str], SEVERAL] = ("mlp", "cnn_mnist"),
    mappings: Annotated[Sequence[str], SEVERAL] = ("chunked(1)", "chunked(4)", "vmap"),
    clients: Annotated[Sequence[int], SEVERAL, Range(1)] = (10, 100, 1000),
    examples: Count = 40,
    batch_size: Count = 20,
    local_steps: Steps = 2,
    clusters: Count = 4,
    repeats: Count = 3,
    seconds: Annotated[float, Interval("(0, inf)")] = 1.0,
    tick: Callable[[str, int], None] = lambda what, total: None,
) -> dict[str, Any]:
    """Measures one round of every method x model x mapping x number of clients, on random images.

    Args:
      methods: any of fedavg, ifca and local, or `MODULE:FACTORY`.
      models: names of models that take images; 'jfcl list models'.
      mappings: mappings of the clients, such as sharded(vmap).
      clients: numbers of clients, `N`.
      examples: examples per client, `M`.
      batch_size: examples per local step.
      local_steps: local steps per round.
      clusters: models `K` of methods that have one for each cluster.
      repeats: timed runs of every round, of which the median.
      seconds: time for the runs of one round. A round that, judged by the one with fewer clients, will take longer is
        left out, and so is one with temporaries of more than half of the free memory; `left_out` says so.
      tick: called before every round with its name and the number of all rounds.

    Returns:
      `rows`, one for each round: `method`, `model`, `mapping`, `clients`, and, where it was run, `seconds` (median),
      `rounds/s`, `client_steps/s`, `temporary_mb` (beside the data and the models), `compile_seconds`, `runs`; else
      `left_out`. Beside them `settings`, `device` and `versions`.

    Raises:
      ValueError: unknown names, counts that are not positive, more clusters than clients, a model that does not take
        images of 28 x 28.
    """
    settings = {name: value for name, value in locals().items() if name != "tick"}
    check_options(sweep, settings)
    for argument, accepted in {"methods": METHODS, "models": IMAGE_MODELS, "mappings": MAPPINGS, "clients": ()}.items():
        check(len(settings[argument]) > 0, argument, settings[argument], "at least one")
        for value in settings[argument] if accepted else ():
            if argument == "methods" and is_import_path(value):
                missing = [option for option in required(find_method(value).make) if option not in GIVEN]
                check(not missing, "method", value, f"one that has a default for {', '.join(missing)}")
            else:
                check_choice(argument.removesuffix("s"), value, accepted)
    of_clusters = [method for method in methods if "num_clusters" in find_method(method).options]
    accepted = f"at most the {min(clients)} clients there are, for {', '.join(of_clusters)}"
    check(not of_clusters or clusters <= min(clients), "clusters", clusters, accepted)
    for model in models:
        make_task(model)  # refuses one that does not take the images

    rows: list[dict[str, Any]] = []
    of_a_client: dict[tuple[str, ...], float] = {}  # seconds, with fewer clients
    rounds = [*itertools.product(sorted(set(clients)), methods, models)]
    for n, method, model in rounds:
        case = Case(method, model, n, examples, batch_size, local_steps, clusters)
        arguments = None  # made for the first mapping, the same for all
        for name in mappings:
            rows.append({"method": method, "model": model, "mapping": name, "clients": n})
            tick(f"{method}, {model}, {name}, {n} clients", len(rounds) * len(mappings))
            expected = n * of_a_client.get((method, model, name), 0.0)
            if expected > seconds:
                rows[-1]["left_out"] = f"takes {expected:.1f} s"
                continue
            client_axis = MAPPINGS[name]()
            if mapping.num_rows(client_axis, n) != n:
                rows[-1]["left_out"] = "clients are not a multiple of the devices"
                continue
            arguments = make_arguments(case) if arguments is None else arguments
            rows[-1] |= _measure_round(case, client_axis, arguments, repeats, seconds)
            if "seconds" in rows[-1]:
                of_a_client[method, model, name] = rows[-1]["seconds"] / n
    return {"settings": settings, **environment(), "rows": rows}


def _measure_round(
    case: Case, client_axis: mapping.Mapping, arguments: tuple[jax.Array, Any, Clients], repeats: int, seconds: float
) -> dict[str, Any]:
    """Returns the entries of a row on a round, which is run if it fits into half of the free memory."""
    limits = {"limit_mb": memory.free_memory() / 2e6, "limit_seconds": seconds}
    key, state, clients = arguments
    placed = mapping.place(client_axis, clients)  # a multiple of the devices
    row = measure(make_algorithm(case, client_axis).step, key, state, placed, repeats=repeats, **limits)
    runs = row.pop("seconds")
    if not runs:
        return row | {"left_out": f"needs {row['temporary_mb'] / 1000:.2g} GB"}
    median = statistics.median(runs)
    speeds = {"rounds/s": 1 / median, "client_steps/s": case.clients * case.steps / median}
    return row | {"seconds": median, **speeds, "runs": runs}
