"""Rounds of FedAvg or IFCA as a PyTorch loop, one client after another, as the papers' published code is written.

Called by the benchmarks with a case as JSON; prints one JSON line (see job.py). Has an environment of its own (see
`make peers`). Runs on the GPU where PyTorch finds one: all examples are there before the first round.
"""

import functools
import json
import os
import time

import job
import numpy as np
import torch
from torch import nn

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_model(name: str, model=None) -> nn.Module:
    """The networks of `jfcl.models`; with the parameters of `model`, a job's, if given."""
    if name == "mlp":
        net = nn.Sequential(nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 10))
    else:
        conv = [nn.Conv2d(1, 32, 5, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        conv += [nn.Conv2d(32, 32, 5, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        net = nn.Sequential(*conv, nn.Flatten(), nn.Linear(800, 256), nn.ReLU(), nn.Linear(256, 10))
    if model is not None:
        with torch.no_grad():
            for layer, (kernel, bias) in zip(layers(net), model, strict=True):
                layer.weight.copy_(torch.from_numpy(to_torch(kernel)))
                layer.bias.copy_(torch.from_numpy(bias))
    return net.to(DEVICE)


def layers(net: nn.Module) -> list[nn.Module]:
    """Those with parameters, from first to last."""
    return [layer for layer in net.modules() if isinstance(layer, (nn.Conv2d, nn.Linear))]


def to_torch(kernel: np.ndarray) -> np.ndarray:
    """A kernel in PyTorch's layout: outputs first, and behind a convolution images are flattened channels first."""
    if kernel.ndim == 4:
        return np.ascontiguousarray(kernel.transpose(3, 2, 0, 1))
    if len(kernel) == 800:  # the 5 x 5 x 32 outputs of the CNN's convolutions
        kernel = kernel.reshape(5, 5, 32, -1).transpose(2, 0, 1, 3).reshape(800, -1)
    return np.ascontiguousarray(kernel.T)


def from_torch(weight: np.ndarray) -> np.ndarray:
    """The inverse of `to_torch`."""
    if weight.ndim == 4:
        return weight.transpose(2, 3, 1, 0)
    kernel = weight.T
    if len(kernel) == 800:
        kernel = kernel.reshape(32, 5, 5, -1).transpose(1, 2, 0, 3).reshape(800, -1)
    return kernel


def parameters(net: nn.Module) -> list[tuple[np.ndarray, np.ndarray]]:
    """The model, as a job's."""
    return [(from_torch(la.weight.detach().cpu().numpy()), la.bias.detach().cpu().numpy()) for la in layers(net)]


@functools.cache
def as_tensors(case: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Examples and labels of a case, given as JSON, loaded once in a process: `[N, M, 1, 28, 28]`, `[N, M]`."""
    data = job.load(json.loads(case))
    x, y = torch.from_numpy(data.x).permute(0, 1, 4, 2, 3).contiguous(), torch.from_numpy(data.y).long()
    return x.to(DEVICE), y.to(DEVICE)


def train(net: nn.Module, x: torch.Tensor, y: torch.Tensor, case: dict) -> None:
    """One client's local steps: batches dealt out in turn from a fresh shuffle, or all examples at every step."""
    optimizer = torch.optim.SGD(net.parameters(), lr=case["lr"])
    m = len(y)
    batch = case["batch"] or m
    order = torch.randperm(m, device=DEVICE)
    for t in range(case["steps"]):
        rows = order[(t * batch + torch.arange(batch, device=DEVICE)) % m]
        inputs, target = (x, y) if batch == m else (x[rows], y[rows])
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), target).backward()
        optimizer.step()


def choose_threads(case: dict, x: torch.Tensor, y: torch.Tensor) -> int:
    """One thread, or one per core: with which a client's local steps are faster (small models gain nothing)."""
    if DEVICE.type != "cpu":
        return torch.get_num_threads()
    taken = {}
    for threads in (1, os.cpu_count()):
        torch.set_num_threads(threads)
        net = make_model(case["model"])
        train(net, x, y, case)  # not the first time, which is slower
        started = time.perf_counter()
        for _ in range(3):
            train(net, x, y, case)
        taken[threads] = time.perf_counter() - started
    threads = min(taken, key=taken.get)
    torch.set_num_threads(threads)
    return threads


def main(case: dict, data: job.Data):
    torch.manual_seed(0)
    n, k = case["clients"], case["clusters"]
    x, y = as_tensors(json.dumps(case))
    models = [make_model(case["model"], model) for model in data.models]
    worker = make_model(case["model"])
    threads = choose_threads(case, x[0], y[0])

    def one_round():
        sums = [[torch.zeros_like(p) for p in model.parameters()] for model in models]
        counts = [0] * k
        for i in range(n):
            chosen = 0
            if k > 1:
                with torch.no_grad():
                    losses = [nn.functional.cross_entropy(model(x[i]), y[i]).item() for model in models]
                chosen = int(np.argmin(losses))
            worker.load_state_dict(models[chosen].state_dict())
            train(worker, x[i], y[i], case)
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
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    more = {"versions": {"torch": torch.__version__}, "threads": threads}
    return seconds, [parameters(model) for model in models], more


if __name__ == "__main__":
    job.run(main)
