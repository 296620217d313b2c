"""Robust aggregators of ByzFL on the CPU, their results and seconds: of NumPy arrays or tensors, what is faster.

Called by the benchmarks with a case as JSON; prints one JSON line. Has an environment of its own (see `make peers`).
"""

import json
import statistics
import sys
import time

import byzfl
import numpy as np
import torch


def main(case: dict) -> dict:
    """`{name: {"seconds": [...], "of": ..., "head": [...]}}` for the updates of `np.random.default_rng(0)`.

    The first call is not counted.
    """
    n, d, f = case["clients"], case["dim"], case["malicious"]
    updates = np.random.default_rng(0).standard_normal((n, d), np.float32)
    aggregators = {  # made anew for every call: ByzFL's centered clipping remembers where it ended
        "coordinate_median": lambda: byzfl.Median(),
        "trimmed_mean": lambda: byzfl.TrMean(f=f),
        "mean_around_median": lambda: byzfl.Meamed(f=f),
        "krum": lambda: byzfl.Krum(f=f),
        "multi_krum": lambda: byzfl.MultiKrum(f=f),
        "geometric_median": lambda: byzfl.GeometricMedian(T=case["iterations"]),
        "centered_clip": lambda: byzfl.CenteredClipping(m=None, L=case["iterations"], tau=case["radius"]),
        "monna": lambda: byzfl.MoNNA(f=f),
        "nearest_neighbour_mixing": lambda: byzfl.NNM(f=f),
        "adaptive_clip": lambda: byzfl.ARC(f=f),
    }
    found = {}
    for name, make in aggregators.items():
        for kind, convert in {"NumPy": np.array, "PyTorch": torch.tensor}.items():
            seconds = []
            for _ in range(case["repeats"] + 1):
                aggregate, given = make(), convert(updates)  # a copy: its ARC writes into what it is given
                started = time.perf_counter()
                result = aggregate(given)
                seconds.append(time.perf_counter() - started)
            seconds = seconds[1:]
            if name not in found or statistics.median(seconds) < statistics.median(found[name]["seconds"]):
                head = np.asarray(result).reshape(-1)[: case["head"]].tolist()
                found[name] = {"seconds": seconds, "of": kind, "head": head}
    return found


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
