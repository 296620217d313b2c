"""A round of Federated-Clustering as a PyTorch loop over all pairs of clients, as its authors' code is written.

Called by the benchmarks with a case as JSON; prints one JSON line. Has an environment of its own (see `make peers`).
One thread, or one per core: with which a client's part of the round is faster. These parts come before what is timed.
"""

import json
import os
import resource
import sys
import time

import numpy as np
import torch
from torch import nn


def main(case: dict) -> dict:
    """Seconds of each round, the number of threads, and the process's peak memory."""
    torch.manual_seed(0)
    n, batch = case["clients"], case["batch"]
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.random((n, batch, 784), np.float32))
    y = torch.from_numpy(rng.integers(0, 10, (n, batch)))
    models = [nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 10)) for _ in range(n)]
    loss_fn = nn.CrossEntropyLoss()

    def gradient(model, j):
        loss = loss_fn(model(x[j]), y[j])
        return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))])

    def threshold(points, center):
        for _ in range(case["threshold_rounds"]):
            distances = torch.linalg.vector_norm(points - center, dim=1)
            inside = distances <= torch.quantile(distances, case["quantile"])
            center = (points[inside].sum(dim=0) + (~inside).sum() * center) / n
        return center

    def center(i):
        points = torch.stack([gradient(models[i], j) for j in range(n)])
        return threshold(points, points[i])

    def one_round():
        centers = [center(i) for i in range(n)]
        with torch.no_grad():
            for model, new in zip(models, centers, strict=True):
                torch.nn.utils.vector_to_parameters(
                    torch.nn.utils.parameters_to_vector(model.parameters()) - 0.1 * new, model.parameters()
                )

    def seconds_of(fn, *args):
        started = time.perf_counter()
        fn(*args)
        return time.perf_counter() - started

    taken = {}
    for threads in (1, os.cpu_count()):
        torch.set_num_threads(threads)
        center(0)  # not the first time, which is slower
        taken[threads] = seconds_of(center, 0)
    threads = min(taken, key=taken.get)
    torch.set_num_threads(threads)
    seconds = [seconds_of(one_round) for _ in range(case["repeats"])]
    return {
        "seconds": seconds,
        "threads": threads,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1.024e-3,
    }


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
