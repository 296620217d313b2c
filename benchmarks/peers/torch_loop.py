"""A round as a PyTorch loop, one client after another, as the papers' published code is written.

Called by the benchmarks with a case as JSON; prints one JSON line. Has an environment of its own (see `make peers`).
"""

import json
import sys
import time

import numpy as np
import torch
from torch import nn


def make_model(name: str, classes: int) -> nn.Module:
    """The same networks as `jfcl.models`."""
    if name == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, classes))
    conv = [nn.Conv2d(1, 32, 5, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    conv += [nn.Conv2d(32, 32, 5, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*conv, nn.Flatten(), nn.Linear(800, 256), nn.ReLU(), nn.Linear(256, classes))


def main(case: dict) -> dict:
    """Seconds of each round."""
    torch.manual_seed(0)
    n, m, k = case["clients"], case["examples"], case["clusters"]
    batch = case["batch"] or m
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.random((n, m, 1, 28, 28), np.float32))
    y = torch.from_numpy(rng.integers(0, 10, (n, m)))
    models = [make_model(case["model"], 10) for _ in range(k)]
    worker = make_model(case["model"], 10)
    loss_fn = nn.CrossEntropyLoss()

    def one_round():
        sums = [[torch.zeros_like(p) for p in model.parameters()] for model in models]
        counts = [0] * k
        for i in range(n):
            chosen = 0
            if k > 1:
                with torch.no_grad():
                    chosen = int(np.argmin([loss_fn(model(x[i]), y[i]).item() for model in models]))
            worker.load_state_dict(models[chosen].state_dict())
            optimizer = torch.optim.SGD(worker.parameters(), lr=0.01)
            order = torch.randperm(m)
            for t in range(case["steps"]):
                if batch == m:
                    data, target = x[i], y[i]
                else:
                    rows = order[(t * batch + torch.arange(batch)) % m]
                    data, target = x[i][rows], y[i][rows]
                optimizer.zero_grad()
                loss_fn(worker(data), target).backward()
                optimizer.step()
            counts[chosen] += 1
            for total, p in zip(sums[chosen], worker.parameters(), strict=True):
                total += p.detach()
        with torch.no_grad():
            for model, total, count in zip(models, sums, counts, strict=True):
                for p, s in zip(model.parameters(), total, strict=True):
                    if count:
                        p.copy_(s / count)

    seconds = []
    for _ in range(case["rounds"]):
        started = time.perf_counter()
        one_round()
        seconds.append(time.perf_counter() - started)
    return {"seconds": seconds, "versions": {"torch": torch.__version__}, "threads": torch.get_num_threads()}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
