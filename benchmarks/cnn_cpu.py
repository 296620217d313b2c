"""Where a step of FedAvg with the papers' CNN spends its time on one core of a CPU, beside PyTorch's same layers.

    python benchmarks/cnn_cpu.py [--turns N] [--quick]

Every product and convolution of the forward and backward pass is timed alone, in a loop as in the compiled round
(XLA's CPU compiler has other kernels outside of loops), and so are pooling, bias and ReLU. A whole step is the time of
a round divided by its steps. `floor ms` is the time of the operations at the speed of a large product in float32, of
jax or of PyTorch, whichever is faster: a step that does these operations takes no less. Ours and PyTorch (`make
peers`) take turns on one core with one thread each; figures are medians over turns.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import report, run_peer
from floor import sgemm_gflops
from jax import lax

from jfcl.experiments import bench
from jfcl.models import conv
from jfcl.models.conv import max_pool

CASE = bench.Case("fedavg", "cnn_mnist", clients=10, examples=100, batch=20, steps=5, lr=0.05)
# Input, kernel and padding. The second layer's last row and column are in no pool, and jfcl leaves them out.
LAYERS = {
    "conv 1": ((20, 28, 28, 1), (5, 5, 1, 32), ((1, 1), (1, 1))),
    "conv 2": ((20, 13, 13, 32), (5, 5, 32, 32), ((1, 0), (1, 0))),
    "dense 1": ((20, 800), (800, 256), None),
    "dense 2": ((20, 256), (256, 10), None),
}
FORWARD, OF_WEIGHTS, OF_INPUT = "forward", "gradient of weights", "gradient of input"
PARTS = {"conv 1, pooling": (20, 26, 26, 32), "conv 2, pooling": (20, 10, 10, 32)}  # with bias and ReLU
SUM, REST, WHOLE = ("all products", ""), ("copies, update, the rest", ""), ("a whole step", "")


def apply(x: jax.Array, w: jax.Array, padding: Any) -> jax.Array:
    """One layer's product, as `jfcl.models` computes it."""
    return x @ w if padding is None else conv(x, w, (1, 1), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def operations() -> dict[tuple[str, str], tuple[Callable[..., Any], tuple[jax.Array, ...], float]]:
    """Every layer and pass: the function, its arguments, and its operations (0 of what is no product)."""
    rng, found = np.random.default_rng(0), {}
    normal = lambda shape: jnp.asarray(rng.standard_normal(shape, np.float32))  # noqa: E731
    for name, (inputs, kernel, padding) in LAYERS.items():
        layer = functools.partial(apply, padding=padding)
        x, w = normal(inputs), normal(kernel)
        g = normal(jax.eval_shape(layer, x, w).shape)
        flop = 2 * math.prod(g.shape) * math.prod(kernel[:-1])
        found[name, FORWARD] = layer, (x, w), flop
        found[name, OF_WEIGHTS] = lambda x, w, g, f=layer: jax.vjp(lambda w: f(x, w), w)[1](g), (x, w, g), flop
        if name != "conv 1":  # the images need no gradient
            found[name, OF_INPUT] = lambda x, w, g, f=layer: jax.vjp(lambda x: f(x, w), x)[1](g), (x, w, g), flop
    for name, shape in PARTS.items():
        part = lambda y, b: jax.nn.relu(max_pool(y, 2) + b.reshape(1, 1, 1, -1))  # noqa: E731
        y, b = normal(shape), normal(shape[-1:])
        g = normal(jax.eval_shape(part, y, b).shape)
        found[name, FORWARD] = part, (y, b), 0
        found[name, "backward"] = lambda y, b, g, f=part: jax.vjp(f, y, b)[1](g), (y, b, g), 0
    return found


def repeated(fn: Callable[..., Any], args: tuple[jax.Array, ...], times: int) -> Callable[[], Any]:
    """`fn(*args)` so many times in one compiled loop, in which no pass can begin before the one before it has ended."""

    def once(_, carry):
        _, args = lax.optimization_barrier(carry)
        return fn(*args), args

    def run(*args):
        start = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(fn, *args))
        return lax.fori_loop(0, times, once, (start, args))[0]

    return functools.partial(jax.jit(run).lower(*args).compile(), *args)


def seconds_of(run: Callable[[], Any], calls: int) -> float:
    """The fewest seconds of a call, after one that touches its memory for the first time."""
    found = []
    for _ in range(calls + 1):
        started = time.perf_counter()
        jax.block_until_ready(run())
        found.append(time.perf_counter() - started)
    return min(found[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=9, metavar="N", help="how often everything is timed [9]")
    parser.add_argument("--quick", action="store_true", help="one short turn, to see that it runs; writes nothing")
    args = parser.parse_args()
    turns, times = (1, 2) if args.quick else (args.turns, 50)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # before jax counts cores; PyTorch's process inherits it
    todo, arguments = operations(), bench.make_arguments(CASE)
    step = jax.jit(bench.make_algorithm(CASE, bench.MAPPINGS["chunked(1)"]()).step).lower(*arguments).compile()
    runs = {key: (repeated(fn, inputs, times), times) for key, (fn, inputs, _) in todo.items()}
    runs[WHOLE] = functools.partial(step, *arguments), CASE.clients * CASE.steps
    layers = {name: [inputs, kernel] for name, (inputs, kernel, _) in LAYERS.items()}
    case = CASE._asdict() | {"times": times, "layers": layers, "parts": PARTS}
    peaks, ours, torch = [], {key: [] for key in runs}, {key: [] for key in runs}
    for _ in range(turns):
        peaks.append(sgemm_gflops())
        for key, (run, count) in runs.items():
            ours[key].append(1e3 * seconds_of(run, 2) / count)
        measured = run_peer("torch", "torch_layers.py", case)
        for layer, of, seconds in measured["rows"] if measured else ():
            if (layer, of) in torch:
                torch[layer, of].append(1e3 * seconds)
        if measured:
            peaks.append(measured["gflops"])

    products = [key for key, (_, _, flop) in todo.items() if flop]
    flops = {key: flop for key, (_, _, flop) in todo.items()}
    flops |= {SUM: sum(flops.values()), WHOLE: sum(flops.values()), REST: 0}
    ms, of_torch = ({key: statistics.median(v) for key, v in found.items() if v} for found in (ours, torch))
    for found in (ms, of_torch) if of_torch else (ms,):
        found[SUM] = sum(found[key] for key in products)
        found[REST] = found[WHOLE] - sum(found[key] for key in todo)
    peak, others = max(peaks), measured["versions"] if measured else {}
    rows: list[dict[str, Any]] = [{"layer": "sgemm", "pass": "2048 x 2048", "gflops": peak, "runs": peaks} | others]
    for key in (*todo, SUM, REST, WHOLE):
        row = {"layer": key[0], "pass": key[1], "ms": ms[key], "share_of_step": ms[key] / ms[WHOLE]}
        if flops[key]:
            gflops = flops[key] / ms[key] / 1e6
            row |= {"gflops": gflops, "share_of_peak": gflops / peak, "floor_ms": flops[key] / peak / 1e6}
        rows.append(row | {"pytorch_ms": of_torch.get(key), "runs": ours.get(key), "runs_of_pytorch": torch.get(key)})
    columns = ["layer", "pass", "ms", "share_of_step", "gflops", "share_of_peak", "floor_ms", "pytorch_ms"]
    title = "A step of FedAvg with the papers' CNN, batch 20, on one core"
    report(None if args.quick else "cnn", title, columns, rows)


if __name__ == "__main__":
    main()
