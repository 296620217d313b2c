"""Robust aggregators of ByzFL on the CPU, their results and seconds.

Called by the benchmarks with a case as JSON; prints one JSON line. Has an environment of its own (see `make peers`).
"""

import json
import sys
import time

import byzfl
import numpy as np


def main(case: dict) -> dict:
    """`{name: {"seconds": [...], "result": [...]}}` for the updates of `np.random.default_rng(0)`."""
    n, d, f = case["clients"], case["dim"], case["malicious"]
    updates = np.random.default_rng(0).standard_normal((n, d), np.float32)
    aggregators = {
        "coordinate_median": byzfl.Median(),
        "trimmed_mean": byzfl.TrMean(f=f),
        "mean_around_median": byzfl.Meamed(f=f),
        "krum": byzfl.Krum(f=f),
        "multi_krum": byzfl.MultiKrum(f=f),
        "geometric_median": byzfl.GeometricMedian(T=case["iterations"]),
        "centered_clip": byzfl.CenteredClipping(m=None, L=case["iterations"], tau=case["radius"]),
        "nearest_neighbour_mixing": byzfl.NNM(f=f),
        "adaptive_clip": byzfl.ARC(f=f),
    }
    found = {}
    for name, aggregate in aggregators.items():
        seconds = []
        for _ in range(case["repeats"]):
            started = time.perf_counter()
            result = aggregate(updates)
            seconds.append(time.perf_counter() - started)
        found[name] = {"seconds": seconds, "head": np.asarray(result).reshape(-1)[: case["head"]].tolist()}
    return found


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
