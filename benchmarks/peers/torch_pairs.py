"""A round of Federated-Clustering as a PyTorch loop over all pairs of clients, as its authors' code is written.

Called by the benchmarks with a case as JSON; prints one JSON line. Has an environment of its own (see `make peers`).
"""

import json
import resource
import sys
import time

import numpy as np
import torch
from torch import nn


def main(case: dict) -> dict:
    """Seconds of each round, and the process's peak memory."""
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

    def one_round():
        centers = []
        for i, model in enumerate(models):
            points = torch.stack([gradient(model, j) for j in range(n)])
            centers.append(threshold(points, points[i]))
        with torch.no_grad():
            for model, center in zip(models, centers, strict=True):
                torch.nn.utils.vector_to_parameters(
                    torch.nn.utils.parameters_to_vector(model.parameters()) - 0.1 * center, model.parameters()
                )

    seconds = []
    for _ in range(case["repeats"]):
        started = time.perf_counter()
        one_round()
        seconds.append(time.perf_counter() - started)
    return {"seconds": seconds, "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1.024e-3}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
