"""A round of FedAvg with the deep models: seconds, multiplications, memory, with our convolutions and with XLA's.

    python benchmarks/models.py [--only NAME] [--quick]

Images of 32 x 32 x 3, texts of 32 words under a vocabulary of 10,000; float32, on one device. The network "with XLA's
convolutions" is the same one on `jax.lax.conv_general_dilated`, as flax has it without our option; wider ones take
minutes with these. `--quick`: narrow models and two clients, to see that it works; nothing is written.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import report
from floor import multiply_adds, sgemm_gflops
from jax import lax

import jfcl
from jfcl.experiments.bench import MAPPINGS, measure
from jfcl.models import LANGUAGE_MODELS, MODELS, classification, language_model, residual

NAMES = ("resnet18_gn", "resnet18_narrow", "mobilenet_gn", "vit", "gpt")
ALSO_PLAIN = ("resnet18_narrow",)
CLIENTS, EXAMPLES, BATCH, STEPS = 4, 20, 20, 2
SHAPE, CLASSES, LENGTH, WORDS = (32, 32, 3), 10, 32, 10_000
SMALL: dict[str, dict[str, Any]] = {name: {"depth": 1, "width": 12} for name in ("vit", "gpt")}
SMALL |= {name: {"width": 4, "stages": (1, 1)} for name in ("resnet18_gn", "resnet18_narrow")}
SMALL |= {"mobilenet_gn": {"width": 4, "blocks": ((2, 2),)}}
LIMIT_MB = 12_000


@contextmanager
def convolutions(plain: bool) -> Iterator[None]:
    """XLA's convolutions in the networks, instead of ours, while models are traced."""
    ours = residual.conv
    residual.conv = lax.conv_general_dilated if plain else ours
    try:
        yield
    finally:
        residual.conv = ours


def make(name: str, quick: bool) -> tuple[jfcl.Task, list[int]]:
    """A model's task, and the multiplications of its layers for one example."""
    module = partial(MODELS[name][0], **(SMALL[name] if quick else {}))
    if name in LANGUAGE_MODELS:
        words = 50 if quick else WORDS
        made = module(words)
        return language_model(made, LENGTH, words), multiply_adds(made, (LENGTH - 1,), jnp.int32)
    made = module(CLASSES)
    return classification(made, SHAPE, CLASSES), multiply_adds(made, SHAPE)


def make_clients(name: str, clients: int, examples: int) -> jfcl.Clients:
    """Random examples."""
    rng, shape = np.random.default_rng(0), (clients, examples)
    if name in LANGUAGE_MODELS:
        x = rng.integers(1, 50, (*shape, LENGTH)).astype(np.int32)
    else:
        x = rng.random((*shape, *SHAPE), np.float32)
    y = rng.integers(0, CLASSES, shape).astype(np.int32)
    return jax.device_put(jfcl.Clients({"x": x, "y": y}, jnp.full(clients, examples, jnp.int32)))


def rows_of(name: str, quick: bool) -> Iterator[dict[str, Any]]:
    """A row for each mapping and kind of convolutions."""
    clients, examples, batch = (2, 2, 2) if quick else (CLIENTS, EXAMPLES, BATCH)
    training = jfcl.local_training(optax.sgd(0.01), num_steps=STEPS, batch_size=batch)
    data = make_clients(name, clients, examples)
    for plain in (False, True) if name in ALSO_PLAIN else (False,):
        for mapping in ("chunked(1)", "vmap"):
            with convolutions(plain):
                task, (first, *rest) = make(name, quick)
                # An equal module would return the task that is there, with the other convolutions.
                jax.clear_caches()
                algorithm = jfcl.fedavg(task, training, client_axis=MAPPINGS[mapping]())
                state = jax.jit(algorithm.init)(jax.random.key(0), data)
                arguments = (jax.random.key(1), state, data)
                found = measure(algorithm.step, *arguments, repeats=1 if quick else 3, limit_mb=LIMIT_MB)
            runs = found.pop("seconds")
            gflop = 2 * clients * STEPS * batch * (2 * first + 3 * sum(rest)) / 1e9
            row = {"model": name, "what": mapping + (", XLA's convolutions" if plain else "")} | found
            if runs:
                middle = statistics.median(runs)
                row |= {"seconds": middle, "client_steps/s": clients * STEPS / middle, "gflops": gflop / middle}
                row |= {"runs": runs, "parameters": sum(p.size for p in jax.tree.leaves(state.params))}
            print(f"{name}, {row['what']}: {row.get('seconds', float('nan')):.3f} s", file=sys.stderr, flush=True)
            yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of the names of the models to run")
    parser.add_argument("--quick", action="store_true", help="narrow models, nothing is written")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 1)
    rows: list[dict[str, Any]] = [{"model": "sgemm", "what": "2048 x 2048", "gflops": sgemm_gflops()}]
    for name in NAMES:
        if args.only in name:
            rows += rows_of(name, args.quick)
    columns = ["model", "what", "seconds", "client_steps/s", "gflops", "compile_seconds", "temporary_mb"]
    title = f"One round of FedAvg: {CLIENTS} clients, {STEPS} steps of {BATCH} examples"
    report(None if args.quick else "-".join(["models", *args.only.split()]), title, columns, rows)


if __name__ == "__main__":
    main()
