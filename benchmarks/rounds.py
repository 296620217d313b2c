"""Rounds and client-steps per second: method x model x mapping, beside the loops a user would write or call instead.

    python benchmarks/rounds.py                  the whole table (make peers first, to have the peers in it)
    python benchmarks/rounds.py --only cnn       the cases whose name contains "cnn"

The floor of a case is its multiplications: `gflops` says how fast they were done, counted as if done plainly (forward,
weight gradients, and input gradients of all layers but the first; K forward passes more for IFCA), to be compared with
`sgemm`, the fastest large matrix product on the machine in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from typing import Any

import jax
from common import report, run_peer
from floor import floor_gflop, sgemm_gflops

from jfcl.experiments import bench
from jfcl.experiments.bench import Case, make_algorithm, make_arguments, measure
from jfcl.mapping.axis import divide_cpu

CASES = {  # and how many rounds of each are measured
    # IFCA's Table 1, m = 1200, n = 200: a round is 12,000 full-batch steps and 4 losses over 240,000 images.
    "ifca table 1": (Case("ifca", "mlp", clients=1200, examples=200, batch=None, steps=10, clusters=4), 2),
    "fedavg mlp": (Case("fedavg", "mlp", clients=100, examples=200, batch=20, steps=10), 5),
    "local mlp": (Case("local", "mlp", clients=100, examples=200, batch=20, steps=10), 5),
    "fedavg cnn b20": (Case("fedavg", "cnn_mnist", clients=100, examples=100, batch=20, steps=5), 3),
    # The CNN of Byzantine-CFL, 100 clients, batch 100.
    "fedavg cnn b100": (Case("fedavg", "cnn_mnist", clients=100, examples=200, batch=100, steps=2), 3),
}
MAPPINGS = {"one at a time": "chunked(1)", "chunks of 4": "chunked(4)", "chunks of 10": "chunked(10)", "vmap": "vmap"}
MAPPINGS["a device per core"] = "sharded(chunked(1))"  # the CPU as so many devices: in a process of its own, as all are
ON_ACCELERATOR = ("chunks of 10", "vmap")  # one at a time, ten thousand small steps wait for each other
LIMIT_MB = 16_000  # of temporaries; mappings that need more are not run


def measure_here(case: Case, mapping: str, rounds: int) -> dict[str, Any]:
    """One round of ours under a mapping, in this process, on as many devices as the mapping is for."""
    divide_cpu(os.cpu_count() if mapping.startswith("sharded") else 1)
    client_axis = bench.MAPPINGS[mapping]()
    arguments = bench.placed(client_axis, make_arguments(case))
    return measure(make_algorithm(case, client_axis).step, *arguments, repeats=rounds, limit_mb=LIMIT_MB)


def measure_apart(case: Case, mapping: str, rounds: int) -> dict[str, Any]:
    """The same in a new process, since a process cannot change its devices."""
    asked = json.dumps([case._asdict(), mapping, rounds])
    done = subprocess.run([sys.executable, __file__, "--here", asked], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of the names of the cases to run")
    parser.add_argument("--no-peers", action="store_true", help="jfcl alone")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here is not None:
        case, mapping, rounds = json.loads(args.here)
        print(json.dumps(measure_here(Case(**case), mapping, rounds)))
        return
    cpu = jax.default_backend() == "cpu"
    size = 2048 if cpu else 8192
    rows: list[dict[str, Any]] = [{"case": "sgemm", "what": f"{size} x {size}", "gflops": sgemm_gflops(size)}]
    mappings = MAPPINGS if cpu else {label: MAPPINGS[label] for label in ON_ACCELERATOR}
    for name, (case, rounds) in CASES.items():
        if args.only not in name:
            continue
        rounds = rounds if cpu else 5 * rounds
        found: list[dict[str, Any]] = []

        def add(what: str, measured: dict[str, Any], case=case, name=name, found=found) -> None:
            if not measured["seconds"]:
                found.append({"case": name, "what": what, "temporary_mb": measured["temporary_mb"]})
                return
            seconds = statistics.median(measured["seconds"])
            work = {"rounds/s": 1 / seconds, "client_steps/s": case.clients * case.steps / seconds}
            row = {"case": name, "what": what, "seconds": seconds, **work, "gflops": floor_gflop(case) / seconds}
            found.append(row | {k: v for k, v in measured.items() if k != "seconds"} | {"runs": measured["seconds"]})
            print(f"{name}, {what}: {seconds:.3f} s a round", file=sys.stderr, flush=True)

        peers = [] if args.no_peers or case.method == "local" else ["torch", "fedjax"]
        for peer in peers:
            if peer == "fedjax" and case.method == "ifca":
                continue
            timed = rounds if cpu else max(rounds // 10, 1)  # a loop of small steps waits for the host
            measured = run_peer(peer, f"{peer}_loop.py", case._asdict() | {"rounds": timed + 1})
            if measured is None:
                print(f"{peer}: not set up, see 'make peers'", file=sys.stderr)
            else:
                del measured["seconds"][0]  # in which some compile; "runs" of the row has the others
                add({"torch": "PyTorch loop", "fedjax": "FedJAX 0.0.17"}[peer], measured)
        for label, mapping in mappings.items():
            add(label, measure_apart(case, mapping, rounds) if cpu else measure_here(case, mapping, rounds))
        loop = next((row["seconds"] for row in found if row["what"] == "PyTorch loop"), None)
        for row in found:
            if loop is not None and "seconds" in row:
                row["times_torch"] = loop / row["seconds"]
        rows += [{"settings": case._asdict() | {"rounds": rounds}} | row for row in found]
        _report(rows, args.only, partial=True)
    _report(rows, args.only)


def _report(rows: list[dict[str, Any]], only: str, partial: bool = False) -> None:
    columns = ["case", "what", "seconds", "client_steps/s", "gflops", "times_torch", "compile_seconds", "temporary_mb"]
    title = "One round; times torch: how often a round fits into the PyTorch loop's"
    name = "-".join(["rounds", *only.split()])  # a part never over the whole
    report(name, title, columns, rows, partial=partial)


if __name__ == "__main__":
    main()
