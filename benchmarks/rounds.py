"""Rounds and client-steps per second: method x model x mapping, beside the loops a user would write or call instead.

    python benchmarks/rounds.py                  the whole table (make peers first, to have the peers in it)
    python benchmarks/rounds.py --only cnn       the cases whose name contains "cnn"

The floor of a case is its multiplications: `gflops` says how fast they were done, counted as if done plainly (forward,
weight gradients, and input gradients of all layers but the first; K forward passes more for IFCA), to be compared with
`sgemm`, the fastest large matrix product on the machine in the same run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import measure, report, run_peer

import jfcl
from jfcl.core import aligned_zeros

CASES = {
    # IFCA's Table 1, m = 1200, n = 200: a round is 12,000 full-batch steps and 4 losses over 240,000 images.
    "ifca table 1": dict(
        method="ifca", model="mlp", clients=1200, examples=200, batch=None, steps=10, clusters=4, rounds=2
    ),
    "fedavg mlp": dict(
        method="fedavg", model="mlp", clients=100, examples=200, batch=20, steps=10, clusters=1, rounds=5
    ),
    "local mlp": dict(method="local", model="mlp", clients=100, examples=200, batch=20, steps=10, clusters=1, rounds=5),
    "fedavg cnn b20": dict(
        method="fedavg", model="cnn_mnist", clients=100, examples=100, batch=20, steps=5, clusters=1, rounds=3
    ),
    # The CNN of Byzantine-CFL, 100 clients, batch 100.
    "fedavg cnn b100": dict(
        method="fedavg", model="cnn_mnist", clients=100, examples=200, batch=100, steps=2, clusters=1, rounds=3
    ),
}
MAPPINGS = {
    "one at a time": jfcl.chunked(1),
    "chunks of 4": jfcl.chunked(4),
    "chunks of 10": jfcl.chunked(10),
    "vmap": jax.vmap,
}
# Millions of multiply-adds an example needs in the first layer, and in the others.
MACS = {"mlp": (0.1568, 0.002), "cnn_mnist": (26 * 26 * 25 * 32e-6, (11 * 11 * 800 * 32 + 800 * 256 + 2560) * 1e-6)}
LIMIT_MB = 16_000  # of temporaries; mappings that need more are not run


def gflop_per_round(case: dict[str, Any]) -> float:
    """The floor of a round in 10^9 operations."""
    first, rest = MACS[case["model"]]
    batch = case["batch"] or case["examples"]
    step = 2e-3 * batch * (2 * first + 3 * rest)
    choosing = 2e-3 * case["examples"] * (first + rest) * case["clusters"] if case["method"] == "ifca" else 0
    return case["clients"] * (case["steps"] * step + choosing)


def make_step(case: dict[str, Any], mapping):
    """`(step, arguments)` of one round."""
    rng = np.random.default_rng(0)
    n, m = case["clients"], case["examples"]
    x = aligned_zeros((n, m, 28, 28, 1), np.float32)
    rng.random(out=x, dtype=np.float32)
    y = rng.integers(0, 10, (n, m)).astype(np.int32)
    clients = jax.device_put(jfcl.Clients({"x": x, "y": y}, jnp.full(n, m, jnp.int32)))
    task = jfcl.models.classification(jfcl.models.MODELS[case["model"]][0](10), (28, 28, 1), 10)
    training = jfcl.local_training(optax.sgd(0.01), num_steps=case["steps"], batch_size=case["batch"])
    if case["method"] == "ifca":
        algorithm = jfcl.ifca(task, training, num_clusters=case["clusters"], client_axis=mapping)
    else:
        factory = {"fedavg": jfcl.fedavg, "local": jfcl.local_only}[case["method"]]
        algorithm = factory(task, training, client_axis=mapping)
    state = jax.jit(algorithm.init)(jax.random.key(0), clients)
    return algorithm.step, (jax.random.key(1), state, clients)


def sgemm_gflops() -> float:
    """The best of some 2048 x 2048 matrix products."""
    a = jnp.ones((2048, 2048))
    return 2 * 2048**3 / min(measure(jnp.matmul, a, a, repeats=5)["seconds"]) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of the names of the cases to run")
    parser.add_argument("--no-peers", action="store_true", help="jfcl alone")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = [{"case": "sgemm", "what": "2048 x 2048", "gflops": sgemm_gflops()}]
    for name, case in CASES.items():
        if args.only not in name:
            continue
        found: list[dict[str, Any]] = []

        def add(what: str, measured: dict[str, Any], case=case, name=name, found=found) -> None:
            if not measured["seconds"]:
                found.append({"case": name, "what": what, "temporary_mb": measured["temporary_mb"]})
                return
            seconds = statistics.median(measured["seconds"])
            work = {"rounds/s": 1 / seconds, "client_steps/s": case["clients"] * case["steps"] / seconds}
            row = {"case": name, "what": what, "seconds": seconds, **work, "gflops": gflop_per_round(case) / seconds}
            found.append(row | {k: v for k, v in measured.items() if k != "seconds"} | {"runs": measured["seconds"]})
            print(f"{name}, {what}: {seconds:.3f} s a round", file=sys.stderr, flush=True)

        peers = [] if args.no_peers or case["method"] == "local" else ["torch", "fedjax"]
        for peer in peers:
            if peer == "fedjax" and case["method"] == "ifca":
                continue
            measured = run_peer(peer, f"{peer}_loop.py", case)
            if measured is None:
                print(f"{peer}: not set up, see 'make peers'", file=sys.stderr)
            else:
                add({"torch": "PyTorch loop", "fedjax": "FedJAX 0.0.17"}[peer], measured)
        for label, mapping in MAPPINGS.items():
            step, arguments = make_step(case, mapping)
            add(label, measure(step, *arguments, repeats=case["rounds"], limit_mb=LIMIT_MB))
        loop = next((row["seconds"] for row in found if row["what"] == "PyTorch loop"), None)
        for row in found:
            if loop is not None and "seconds" in row:
                row["times_torch"] = loop / row["seconds"]
        rows += found
    columns = ["case", "what", "seconds", "client_steps/s", "gflops", "times_torch", "compile_seconds", "temporary_mb"]
    command = "python benchmarks/rounds.py" + (f" --only '{args.only}'" if args.only else "")
    title = "One round; times torch: how often a round fits into the PyTorch loop's"
    report("rounds", title, columns, [{"settings": CASES.get(row["case"])} | row for row in rows], command)


if __name__ == "__main__":
    main()
