"""A round of Federated-Clustering: every client's gradient at every client's model, threshold-clustered for each.

    python benchmarks/federated_clustering.py [--quick] [--no-peers] [--clients N ...]

MLP 784-200-10 (D = 159,010), batches of 32, quantile 0.2, 3 threshold rounds. The floors, for each of the N² pairs: 20
MFLOP (forward, and the weights' gradient), and D numbers that are written once and read twice in each threshold round,
4.5 MB. `peak_mb`: of the whole process.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import optax
from common import report, run_peer

import jfcl
from jfcl.experiments.bench import measure

BATCH, QUANTILE, THRESHOLD_ROUNDS = 32, 0.2, 3


def ours(clients: int, subgroup: int | None, repeats: int) -> dict[str, Any]:
    """Seconds of a round, compilation apart, and memory."""
    rng = np.random.default_rng(0)
    x = rng.random((clients, BATCH, 28, 28, 1), np.float32)
    data = jfcl.Clients({"x": x, "y": rng.integers(0, 10, (clients, BATCH)).astype(np.int32)}, np.full(clients, BATCH))
    task = jfcl.models.classification(jfcl.models.MLP(10), (28, 28, 1), 10)
    training = jfcl.local_training(optax.sgd(0.1), num_steps=1)
    algorithm = jfcl.federated_clustering(
        task, training, quantile=QUANTILE, threshold_rounds=THRESHOLD_ROUNDS, subgroup_size=subgroup
    )
    data = jax.device_put(data)
    state = jax.jit(algorithm.init)(jax.random.key(0), data)
    found = measure(algorithm.step, jax.random.key(1), state, data, repeats=repeats)
    return found | {"peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1.024e-3}


def in_a_process(clients: int, subgroup: int | None, repeats: int) -> dict[str, Any]:
    """`ours` in a process of its own, whose peak memory is then that of one case."""
    command = [sys.executable, __file__, "--case", json.dumps([clients, subgroup, repeats])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[50, 100, 300, 1000], metavar="N")
    parser.add_argument("--quick", action="store_true", help="20 clients, to see that it runs; writes nothing")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(ours(*json.loads(args.case))))
        return
    rows = []

    def add(clients: int, what: str, found: dict[str, Any], pairs: int) -> float:
        seconds = float(np.median(found["seconds"]))
        row = {"clients": clients, "what": what, "seconds": seconds, "us_per_pair": 1e6 * seconds / pairs}
        row |= {"gflops": 0.02 * pairs / seconds, "peak_mb": found["peak_mb"], "runs": found["seconds"]}
        rows.append(
            row | {name: found[name] for name in ("temporary_mb", "compile_seconds", "threads") if name in found}
        )
        return seconds

    for clients in [20] if args.quick else args.clients:
        repeats = 3 if clients <= 100 else 1
        case = {"clients": clients, "batch": BATCH, "quantile": QUANTILE, "threshold_rounds": THRESHOLD_ROUNDS}
        peer = None
        if not args.no_peers and clients <= 300:
            peer = run_peer("torch", "torch_pairs.py", case | {"repeats": repeats})
        mine = add(clients, "jfcl", in_a_process(clients, None, repeats), clients**2)
        if peer is not None:
            rows[-1]["times_torch"] = float(np.median(peer["seconds"])) / mine
            add(clients, "PyTorch loop", peer, clients**2)
        if clients >= 100:
            add(clients, "jfcl, subgroups of 20", in_a_process(clients, 20, 3), 20 * clients)
    columns = ["clients", "what", "seconds", "us_per_pair", "times_torch", "gflops", "peak_mb", "temporary_mb"]
    name = None if args.quick else "federated-clustering"
    title = "One round of Federated-Clustering; times torch: how often it fits into the PyTorch loop's"
    report(name, title, [*columns, "compile_seconds"], rows)


if __name__ == "__main__":
    main()
