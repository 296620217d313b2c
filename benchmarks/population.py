"""Does the size of a population cost anything, and does a client cost the same in small and large simulations?

    python benchmarks/population.py                      everything; the populations are made in a temporary folder
    python benchmarks/population.py --clients 100000     a smaller population (--store DIR keeps it for the next time)

`cohorts`: a cohort of 1,000 out of a million clients beside a cohort of 1,000 out of 1,000, and beside `simulate` with
those 1,000 on the device; `ratio` is to the second. They take turns, so that all meet the same machine; the median of
their turns counts. `anonymous_mb` is the most memory that the process held and that is no mapped file, all told.

`sizes`: `simulate` with 100 to 100,000 clients, all in every round; `ratio` is the time per client over the best.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from common import report

import jfcl
from jfcl.data import ClientStore, generate_store, open_stores

COHORT, EXAMPLES = 1000, 20


class AnonymousMemory(threading.Thread):
    """Watches the process's memory that is no mapped file (Linux); `peak_mb` is the most it saw."""

    def __init__(self):
        super().__init__(daemon=True)
        self.peak_mb = 0.0

    def run(self) -> None:
        while True:
            text = Path("/proc/self/status").read_text()
            now = next(line for line in text.splitlines() if line.startswith("RssAnon"))
            self.peak_mb = max(self.peak_mb, 1.024e-3 * int(now.split()[1]))  # "kB" are 1,024 bytes
            time.sleep(0.02)


def make_algorithm(steps: int):
    """FedAvg of the MLP on digits."""
    task = jfcl.models.classification(jfcl.models.MLP(10), (8, 8, 1), 10)
    return jfcl.fedavg(task, jfcl.local_training(optax.sgd(0.1), num_steps=steps))


def make_store(folder: Path, clients: int) -> ClientStore:
    """The population in `folder`, made if it is not there."""
    path = folder / f"digits-{clients}"
    if path.exists():
        return open_stores(path)[0]
    print(f"making {path}", file=sys.stderr, flush=True)
    options = {"num_clusters": 4, "heterogeneity": "rotation", "examples_per_client": EXAMPLES}
    return generate_store(path, "digits", num_clients=clients, **options)[0]


def cohorts(folder: Path, clients: int, rounds: int, turns: int, steps: int) -> list[dict[str, Any]]:
    """Seconds a round of a cohort of a large population, of a small one, and of `simulate`."""
    large, small = (make_store(folder, n) for n in (clients, COHORT))
    memory = AnonymousMemory()
    memory.start()
    algorithm, key = make_algorithm(steps), jax.random.key(0)
    sources = {
        f"{COHORT} of {clients:,}": jfcl.Population(large, cohort=COHORT),
        f"{COHORT} of {COHORT:,}": jfcl.Population(small, cohort=COHORT),
        "simulate, on the device": small.gather(np.arange(COHORT)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sources}
    for name, source in sources.items():
        jfcl.simulate(algorithm, source, key=key, num_rounds=2, eval_every=2)  # compiles
        print(f"{name}: compiled", file=sys.stderr, flush=True)
    for _ in range(turns):
        for name, source in sources.items():
            started = time.perf_counter()
            jfcl.simulate(algorithm, source, key=key, num_rounds=rounds, eval_every=rounds)
            seconds[name].append((time.perf_counter() - started) / rounds)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    base = medians[f"{COHORT} of {COHORT:,}"]
    files = sum(f.stat().st_size for f in large.path.iterdir()) / 1e6
    rows = [
        {"case": "cohorts", "what": name, "seconds": medians[name], "ratio": medians[name] / base}
        | {"client_steps/s": COHORT * steps / medians[name], "runs": values}
        for name, values in seconds.items()
    ]
    rows[0] |= {"anonymous_mb": memory.peak_mb, "store_mb": files}
    return rows


def sizes(most: int, steps: int) -> list[dict[str, Any]]:
    """Seconds a client and round of `simulate`, for 100, 1,000, ... clients."""
    algorithm, key, rows = make_algorithm(steps), jax.random.key(0), []
    base = jfcl.data.build("digits", num_clients=50, examples_per_client=EXAMPLES).train
    n = 100
    while n <= most:
        x = jfcl.core.aligned_zeros((n, *base.examples["x"].shape[1:]), np.float32)
        y = jfcl.core.aligned_zeros((n, EXAMPLES), np.int32)
        for first in range(0, n, 50):
            x[first : first + 50], y[first : first + 50] = base.examples["x"], base.examples["y"]
        clients = jfcl.Clients({"x": x, "y": y}, np.full(n, EXAMPLES, np.int32))
        rounds = max(1, 20_000 // n)
        runs = []
        for turn in range(4):  # the first compiles
            history = jfcl.simulate(algorithm, clients, key=key, num_rounds=rounds, eval_every=rounds)
            if turn:
                runs.append(history.seconds / rounds)
        median = statistics.median(runs)
        rows.append(
            {"case": "sizes", "what": f"{n:,}", "seconds": median, "us_per_client": 1e6 * median / n, "runs": runs}
        )
        print(f"{n:,} clients: {1e6 * median / n:.1f} us a client", file=sys.stderr, flush=True)
        n *= 10
    best = min(row["us_per_client"] for row in rows)
    return [row | {"ratio": row["us_per_client"] / best} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1_000_000, help="clients of the large population")
    parser.add_argument("--most", type=int, default=100_000, help="clients of the largest simulation on the device")
    parser.add_argument("--rounds", type=int, default=10, help="of every turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="local steps a round")
    parser.add_argument("--store", help="folder to keep the populations in")
    parser.add_argument("--only", choices=["cohorts", "sizes"], help="one of the two parts")
    parser.add_argument("--dry", action="store_true", help="print, and write no results")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        if args.only != "sizes":
            folder = Path(args.store or scratch)
            rows += cohorts(folder, args.clients, args.rounds, args.turns, args.steps)
        if args.only != "cohorts":
            rows += sizes(args.most, args.steps)
    columns = ["case", "what", "seconds", "us_per_client", "ratio", "client_steps/s", "anonymous_mb", "store_mb"]
    title = f"One round; FedAvg, MLP 64-200-10, {EXAMPLES} examples a client, {args.steps} full-batch steps"
    report(None if args.dry else "population", title, columns, rows)


if __name__ == "__main__":
    main()
