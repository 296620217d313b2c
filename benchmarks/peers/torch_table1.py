"""Rows of FC's table 1 "as the authors' code" in PyTorch: how far the loss on probabilities leaves them to the seed.

Where all clients of a cluster take one step a round from the same model with as many examples each, FedAvg is gradient
descent on their batches together. That is all there is here: no federation, and nothing of jfcl.

    python -c "import jfcl, numpy; d = jfcl.data.load('mnist'); numpy.savez('mnist.npz', **d.train,
               **{'test_' + k: v for k, v in d.test.items()})"
    .venv-torch/bin/python benchmarks/peers/torch_table1.py mnist.npz rotation global --seeds 8
"""

import argparse
import json

import numpy as np
import torch
from torch import nn

CLUSTERS, CLIENTS, EXAMPLES, BATCH, EPOCHS = 4, 300, 200, 32, 30


def as_cluster_sees(task: str, x: np.ndarray, y: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Images turned by `k` quarters, or labels moved by `k`."""
    return (np.rot90(x, k, (1, 2)), y) if task == "rotation" else (x, (y + k) % 10)


def accuracy(arrays, task: str, method: str, seed: int) -> float:
    """Percent of the test images that clients get right, the mean over clusters."""
    x, test_x = ((arrays[n].reshape(-1, 28, 28) - 0.1307) / 0.3081 for n in ("x", "test_x"))
    y, test_y = (arrays[n].astype(np.int64) for n in ("y", "test_y"))
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    models = []
    for _ in range(1 if method == "global" else CLUSTERS):
        net = nn.Sequential(nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 10), nn.Softmax(1))
        models.append((net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)))
    for _ in range(EPOCHS):
        parts = rng.permutation(len(y))[: CLIENTS * EXAMPLES].reshape(CLUSTERS, -1, EXAMPLES)
        for start in range(0, EXAMPLES, BATCH):
            batches = []
            for k, mine in enumerate(parts):
                rows = mine[:, start : start + BATCH].ravel()
                batches.append([torch.from_numpy(a.copy()) for a in as_cluster_sees(task, x[rows], y[rows], k)])
            if method == "global":
                batches = [[torch.cat(parts) for parts in zip(*batches, strict=True)]]
            for (net, optimizer), (images, labels) in zip(models, batches, strict=True):
                optimizer.zero_grad()
                nn.functional.nll_loss(net(images), labels).backward()
                optimizer.step()
    right = []
    with torch.no_grad():
        for k in range(CLUSTERS):
            images, labels = as_cluster_sees(task, test_x, test_y, k)
            guesses = models[k % len(models)][0](torch.from_numpy(images.copy())).argmax(1).numpy()
            right.append((guesses == labels).mean())
    return 100 * float(np.mean(right))


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("arrays")
parser.add_argument("task", choices=("rotation", "private_label"))
parser.add_argument("method", choices=("global", "ground_truth"))
parser.add_argument("--seeds", type=int, default=3)
args = parser.parse_args()
mnist = np.load(args.arrays)
found = [accuracy(mnist, args.task, args.method, seed) for seed in range(args.seeds)]
print(json.dumps({"task": args.task, "method": args.method, "accuracy %": found, "torch": torch.__version__}))
print(f"{np.mean(found):.1f} ± {np.std(found):.1f}")
