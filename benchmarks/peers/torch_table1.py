"""Rows of FC's table 1 "as the authors' code" in PyTorch, with that code's own random numbers; nothing of jfcl.

The code is github.com/liehe/PRFL, `mnist/`: models are drawn after `torch.manual_seed(SEED)`, and in every epoch the
images are divided among the clients by a permutation with the epoch's number for a seed. What is here takes the same
steps, for all clients at once.

    python -c "import jfcl, numpy; d = jfcl.data.load('mnist'); numpy.savez('mnist.npz', **d.train,
               **{'test_' + k: v for k, v in d.test.items()})"
    .venv-torch/bin/python benchmarks/peers/torch_table1.py mnist.npz rotation global --seeds 4

*Local* has no momentum there; `--momentum` gives it that of the others.
"""

import argparse
import json

import numpy as np
import torch

CLUSTERS, CLIENTS, EXAMPLES, BATCH, EPOCHS, STEP, MOMENTUM = 4, 300, 200, 32, 30, 0.1, 0.9
OF_VALIDATION = 10_000  # added to the epoch, for the batches on which IFCA's clients compare models
TRUE = torch.arange(CLIENTS) // (CLIENTS // CLUSTERS)


def drawn(count):
    """`count` models as PyTorch draws linear layers, stacked."""
    models = []
    for _ in range(count):
        layers = torch.nn.Linear(784, 200), torch.nn.Linear(200, 10)
        models.append([p.detach() for layer in layers for p in (layer.weight, layer.bias)])
    return [torch.stack(parts) for parts in zip(*models, strict=True)]


def probabilities(models, x):
    """Of models `[N, ...]` and images `[N, B, 784]`."""
    hidden = torch.relu(x @ models[0].mT + models[1][:, None])
    return torch.softmax(hidden @ models[2].mT + models[3][:, None], dim=-1)


def losses(models, x, y):
    """`[N]`: the mean of minus the label's probability."""
    return -probabilities(models, x).gather(-1, y[..., None])[..., 0].mean(dim=-1)


def gradients(models, x, y):
    models = [p.detach().requires_grad_() for p in models]
    return torch.autograd.grad(losses(models, x, y).sum(), models)


def heavy(momenta, steps):
    return list(steps) if momenta is None else [MOMENTUM * m + g for m, g in zip(momenta, steps, strict=True)]


def moved(models, steps):
    return [p - STEP * d for p, d in zip(models, steps, strict=True)]


def deal(seed):
    """The clients' images and labels in an epoch, `[N, 200, ...]`."""
    rows = torch.randperm(len(Y[0]), generator=torch.Generator().manual_seed(seed))
    parts = [rows[i::CLIENTS] for i in range(CLIENTS)]
    return [torch.stack([of[k][rows] for rows, k in zip(parts, TRUE, strict=True)]) for of in (X, Y)]


def batches(seed):
    x, y = deal(seed)
    return [(x[:, b : b + BATCH], y[:, b : b + BATCH]) for b in range(0, EXAMPLES, BATCH)]


def personal():
    """After every epoch: *local*, and Ditto, the global model of which stays as it begins."""
    start, momenta = drawn(1), None
    models = [p.expand(CLIENTS, *p.shape[1:]) for p in start]
    for epoch in range(EPOCHS):
        for x, y in batches(epoch):
            g = gradients(models, x, y)
            if args.method == "ditto" or args.momentum:
                g = momenta = heavy(momenta, g)
            if args.method == "ditto":
                g = [d + (v - w) for d, v, w in zip(g, models, start, strict=True)]
            models = moved(models, g)
        yield models, torch.arange(CLIENTS)


def of_clusters():
    """*Global*, and the ground truth, where each cluster has a model; all begin alike."""
    model_of, momenta = TRUE if args.method == "ground_truth" else torch.zeros_like(TRUE), None
    count = int(model_of.max()) + 1
    models = [p.expand(count, *p.shape[1:]) for p in drawn(1)]
    for epoch in range(EPOCHS):
        for x, y in batches(epoch):
            own = [[part[model_of == k].flatten(0, 1) for part in (x, y)] for k in range(count)]
            momenta = heavy(momenta, gradients(models, *(torch.stack(parts) for parts in zip(*own, strict=True))))
            models = moved(models, momenta)
        yield models, model_of


def ifca():
    """Clients compare models on other batches; a model moves by their momenta, divided by all clients."""
    models, momenta = drawn(CLUSTERS), None
    for epoch in range(EPOCHS):
        for (x, y), other in zip(batches(epoch), batches(OF_VALIDATION + epoch), strict=True):
            of_models = [losses([p[k : k + 1] for p in models], *other) for k in range(CLUSTERS)]
            chosen = torch.stack(of_models).argmin(dim=0)
            momenta = heavy(momenta, gradients([p[chosen] for p in models], x, y))
            shares = torch.nn.functional.one_hot(chosen, CLUSTERS).T.to(torch.float32) / CLIENTS
            models = moved(models, [torch.tensordot(shares, m, dims=1) for m in momenta])
        yield models, chosen


def accuracy(models, model_of):
    """Percent: each client has another 300th of the test images, some twice."""
    rows = torch.cat([torch.arange(10_000), torch.arange(200)])
    right = []
    for i, k in enumerate(TRUE):
        own = rows[i::CLIENTS]
        guesses = probabilities([p[model_of[i]][None] for p in models], TEST_X[k][own][None])[0].argmax(dim=1)
        right.append((guesses == TEST_Y[k][own]).float().mean().item())
    return 100 * float(np.mean(right))


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("arrays")
parser.add_argument("task", choices=("rotation", "private_label"))
parser.add_argument("method", choices=("local", "ditto", "ifca", "global", "ground_truth"))
parser.add_argument("--seeds", type=int, default=1)
parser.add_argument("--momentum", action="store_true")
args = parser.parse_args()
if args.momentum and args.method != "local":
    parser.error("--momentum is of local alone: the others have it")
arrays = np.load(args.arrays)
images, tests = (
    torch.from_numpy(((arrays[n].reshape(-1, 28, 28) - 0.1307) / 0.3081).astype(np.float32)) for n in ("x", "test_x")
)
labels, test_labels = (torch.from_numpy(arrays[n].astype(np.int64)) for n in ("y", "test_y"))
turned = args.task == "rotation"
X, TEST_X = ([torch.rot90(x, k * turned, (1, 2)).flatten(1) for k in range(CLUSTERS)] for x in (images, tests))
Y, TEST_Y = ([y if turned else (y + k) % 10 for k in range(CLUSTERS)] for y in (labels, test_labels))
run = {"ifca": ifca, "global": of_clusters, "ground_truth": of_clusters}.get(args.method, personal)
for seed in range(args.seeds):
    torch.manual_seed(seed)
    curve = []
    for models, model_of in run():
        curve.append(round(accuracy(models, model_of), 2))
    row = {"task": args.task, "method": args.method, "seed": seed, "accuracy %": curve[-1], "by epoch": curve}
    if args.method == "ifca":
        chosen = [torch.bincount(model_of[k == TRUE], minlength=CLUSTERS).tolist() for k in range(CLUSTERS)]
        row["models chosen by cluster"] = chosen
    print(json.dumps(row | ({"momentum": True} if args.momentum else {}) | {"torch": torch.__version__}), flush=True)
