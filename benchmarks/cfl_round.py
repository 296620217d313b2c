"""What clustering adds to a round of CFL: the same round with and without looking for splits, by the number of clients.

    python benchmarks/cfl_round.py [--quick] [--clients N ...]

Every client holds 600 examples and trains 3 epochs of batches of 100 (003's clients, 000's local work) on an MLP
64-1340-10 of 100,510 parameters; in the last case 64-134-10 of 10,060, of which 10,000 clients' similarities are more
numbers than an eighth of their updates, so that they are computed in tiles, and never all kept. The floors, in
operations: training 6 D for each example and epoch, so 10,800 N D; clustering N² D (half of the N² products, 2 D
each). So clustering is the smaller part up to N of some ten thousands. `memory_mb`: temporaries of the compiled round,
to be compared with `updates_mb`, the N updates themselves.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import report

import jfcl
from jfcl.core import aligned_zeros

EXAMPLES, EPOCHS, BATCH = 600, 3, 100
WIDE, NARROW = 1340, 134  # hidden units


def federation(count: int) -> jfcl.Clients:
    """Two kinds of clients: random inputs, labels by two different linear rules."""
    rng = np.random.default_rng(0)
    x = aligned_zeros((count, EXAMPLES, 64), np.float32)
    y = np.zeros((count, EXAMPLES), np.int32)
    rules = rng.standard_normal((2, 64, 10)).astype(np.float32)
    for i in range(count):
        x[i] = rng.standard_normal((EXAMPLES, 64), np.float32)
        y[i] = (x[i] @ rules[i % 2]).argmax(1)
    return jfcl.Clients({"x": x, "y": y}, np.full(count, EXAMPLES, np.int32))


def measure(count: int, hidden: int, repeats: int) -> list[dict[str, Any]]:
    task = jfcl.models.classification(jfcl.models.MLP(10, hidden=(hidden,)), (64,), 10)
    training = jfcl.local_training(optax.sgd(0.05), num_epochs=EPOCHS, batch_size=BATCH)
    clients = jax.device_put(federation(count))
    numbers = sum(p.size for p in jax.tree.leaves(jax.eval_shape(task.init, jax.random.key(0))))
    rows, calls = [], {}
    for what, eps_1 in (("training alone", 1e-30), ("with bipartition and split", jnp.inf)):
        algorithm = jfcl.cfl(task, training, eps_1=eps_1, eps_2=1e-20, max_clusters=2, tree_dim=256)
        step = jax.jit(algorithm.step)
        state = jax.jit(algorithm.init)(jax.random.key(0), clients)
        started = time.perf_counter()
        compiled = step.lower(jax.random.key(1), state, clients).compile()
        compile_seconds = time.perf_counter() - started
        calls[what] = partial(compiled, jax.random.key(1), state, clients)
        new, _ = jax.block_until_ready(calls[what]())  # not timed: it touches its memory for the first time
        memory = compiled.memory_analysis()
        rows.append(
            {
                "clients": count,
                "parameters": numbers,
                "what": what,
                "compile_seconds": compile_seconds,
                "clusters": int(new.active.sum()),
                "memory_mb": memory.temp_size_in_bytes / 1e6,
                "updates_mb": 4e-6 * count * numbers,
                "runs": [],
            }
        )
        del new
    for _ in range(repeats):  # in turn
        for row in rows:
            started = time.perf_counter()
            jax.block_until_ready(calls[row["what"]]())
            row["runs"].append(time.perf_counter() - started)
    for row in rows:
        row["seconds"] = float(np.median(row["runs"]))
    training, whole = (row["seconds"] for row in rows)
    clustering = whole - training
    rows.append({"clients": count, "parameters": numbers, "what": "clustering", "seconds": clustering})
    rows[-1]["gflops"] = 1e-9 * count**2 * numbers / clustering
    rows[-1]["share_of_training"] = clustering / training
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1000, 3000, 10_000], metavar="N")
    parser.add_argument("--quick", action="store_true", help="200 clients, to see that it runs; writes nothing")
    args = parser.parse_args()
    counts = [200] if args.quick else args.clients
    cases = [(count, WIDE) for count in counts] + [(count, NARROW) for count in counts if count >= 10_000]
    rows = [row for count, hidden in cases for row in measure(count, hidden, 1 if count >= 10_000 else 3)]
    columns = ["clients", "parameters", "what", "seconds", "share_of_training", "gflops", "memory_mb", "updates_mb"]
    report(None if args.quick else "cfl-round", "One round of CFL", [*columns, "compile_seconds"], rows)


if __name__ == "__main__":
    main()
