"""Rows of FC's table 1 "as the authors' code" in NumPy: local, Ditto, IFCA and kNN-Per, as they are there.

Nothing of jfcl. The code is github.com/liehe/PRFL, `mnist/`: a loss on probabilities, images drawn again in every
epoch; *local* steps without momentum, the global model of Ditto stays as it begins, IFCA chooses by another batch and
divides by the number of all clients, and kNN-Per remembers zeros with label 0 in place of the images of other clients
(`--no-zeros` leaves them out).

    python -c "import jfcl, numpy; d = jfcl.data.load('mnist'); numpy.savez('mnist.npz', **d.train,
               **{'test_' + k: v for k, v in d.test.items()})"
    python benchmarks/peers/numpy_table1.py mnist.npz rotation ditto --seeds 1
"""

import argparse
import json

import numpy as np

CLUSTERS, CLIENTS, EXAMPLES, BATCH, EPOCHS, STEP, MOMENTUM = 4, 300, 200, 32, 30, np.float32(0.1), np.float32(0.9)
NEIGHBOURS, SCALE, MIXINGS = 10, 10.0, (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
TRUE = np.arange(CLIENTS) // (CLIENTS // CLUSTERS)


def as_cluster_sees(x, y, k):
    """Images turned by `k` quarters, or labels moved by `k`; images as vectors."""
    seen = (np.rot90(x, k, (1, 2)), y) if args.task == "rotation" else (x, (y + k) % 10)
    return np.ascontiguousarray(seen[0]).reshape(len(x), -1), seen[1]


def deal(rng, each=EXAMPLES):
    """Images and labels of all clients, `[N, each, ...]`."""
    parts = rng.permutation(len(Y))[: CLIENTS * each].reshape(CLIENTS, each)
    dealt = [as_cluster_sees(X[rows], Y[rows], k) for rows, k in zip(parts, TRUE, strict=True)]
    return [np.stack(part) for part in zip(*dealt, strict=True)]


def initial(rng):
    """PyTorch's linear layers: uniform in `± 1 / sqrt(inputs)`."""
    shapes = (784, (784, 200)), (784, (200,)), (200, (200, 10)), (200, (10,))
    return [rng.uniform(-(n**-0.5), n**-0.5, shape).astype(np.float32) for n, shape in shapes]


def forward(model, x):
    """Hidden units, outputs and probabilities; models and inputs may have a leading axis of clients."""
    hidden = np.maximum(x @ model[0] + model[1][..., None, :], 0)
    outputs = hidden @ model[2] + model[3][..., None, :]
    powers = np.exp(outputs - outputs.max(axis=-1, keepdims=True))
    return hidden, outputs, powers / powers.sum(axis=-1, keepdims=True)


def of_labels(probabilities, y):
    return np.take_along_axis(probabilities, y[..., None], axis=-1)[..., 0]


def gradient(model, x, y):
    """Of the mean of minus the labels' probabilities."""
    hidden, _, p = forward(model, x)
    one = np.eye(10, dtype=np.float32)[y]
    d_outputs = -of_labels(p, y)[..., None] * (one - p) / x.shape[-2]
    d_hidden = (d_outputs @ np.swapaxes(model[2], -1, -2)) * (hidden > 0)
    turn = lambda a: np.swapaxes(a, -1, -2)  # noqa: E731
    return [turn(x) @ d_hidden, d_hidden.sum(-2), turn(hidden) @ d_outputs, d_outputs.sum(-2)]


def heavy(momenta, gradients):
    return gradients if momenta is None else [MOMENTUM * m + g for m, g in zip(momenta, gradients, strict=True)]


def moved(model, direction):
    return [p - STEP * d for p, d in zip(model, direction, strict=True)]


def accuracy(models, of):
    """Percent of all test images, as each client's cluster sees them; its model is row `of[i]`."""
    found = []
    for i, k in enumerate(TRUE):
        x, y = TESTS[k]
        found.append((forward([p[of[i]] for p in models], x)[1].argmax(axis=1) == y).mean())
    return 100 * float(np.mean(found))


def personal(rng):
    """*Local* and Ditto: a model for each client."""
    start = initial(rng)
    models, momenta = [np.repeat(p[None], CLIENTS, axis=0) for p in start], None
    for _ in range(EPOCHS):
        x, y = deal(rng)
        for b in range(0, EXAMPLES, BATCH):
            g = gradient(models, x[:, b : b + BATCH], y[:, b : b + BATCH])
            if args.method == "ditto":
                momenta = heavy(momenta, g)
                g = [m + v - w for m, v, w in zip(momenta, models, start, strict=True)]
            models = moved(models, g)
    return {"accuracy %": accuracy(models, np.arange(CLIENTS))}


def ifca(rng):
    models, momenta = [np.stack(parts) for parts in zip(*[initial(rng) for _ in range(CLUSTERS)], strict=True)], None
    for _ in range(EPOCHS):
        (x, y), (other_x, other_y) = deal(rng), deal(rng)
        for b in range(0, EXAMPLES, BATCH):
            own = slice(b, b + BATCH)
            likely = [
                of_labels(forward([p[k] for p in models], other_x[:, own])[2], other_y[:, own]).mean(axis=1)
                for k in range(CLUSTERS)
            ]
            chosen = np.argmax(likely, axis=0)
            momenta = heavy(momenta, gradient([p[chosen] for p in models], x[:, own], y[:, own]))
            for k in range(CLUSTERS):
                for p, m in zip(models, momenta, strict=True):
                    p[k] -= STEP * m[chosen == k].sum(axis=0) / CLIENTS
    counts = [np.bincount(chosen[k == TRUE], minlength=CLUSTERS).tolist() for k in range(CLUSTERS)]
    return {"accuracy %": accuracy(models, chosen), "models chosen by cluster": counts}


def common_model(rng, each):
    """FedAvg's: the clients' steps from one model are one step along their mean gradient."""
    model, momenta = initial(rng), None
    for _ in range(EPOCHS):
        x, y = deal(rng, each)
        for b in range(0, each, BATCH):
            parts = [
                gradient(model, x[k == TRUE, b : b + BATCH].reshape(-1, 784), y[k == TRUE, b : b + BATCH].ravel())
                for k in range(CLUSTERS)
            ]
            momenta = heavy(momenta, [np.mean(p, axis=0) for p in zip(*parts, strict=True)])
            model = moved(model, momenta)
    return model


def mixtures(model, memory, labels, x, shares):
    """The labels' probabilities by neighbours among `memory`, mixed with the model's in these shares."""
    at, keys, p = forward(model, x)[1], forward(model, memory)[1], forward(model, x)[2]
    if not args.no_zeros:  # ten are as good as 59,800
        keys, labels = np.concatenate([keys, np.zeros((NEIGHBOURS, 10))]), np.append(labels, [0] * NEIGHBOURS)
    distances = np.square(at[:, None] - keys[None]).sum(axis=2)
    near = np.argsort(distances, axis=1, kind="stable")[:, :NEIGHBOURS]
    weights = np.exp(-np.take_along_axis(distances, near, axis=1) / SCALE)
    own = (weights[:, :, None] * np.eye(10)[labels[near]]).sum(axis=1) / weights.sum(axis=1, keepdims=True)
    return [share * own + (1 - share) * p for share in shares]


def knn_per(rng):
    """The share is that of the lowest loss on test images, with a model of 80 % of the training images."""
    first, model = common_model(rng, EXAMPLES * 4 // 5), common_model(rng, EXAMPLES)
    x, y = deal(rng, EXAMPLES * 4 // 5)
    losses = np.zeros(len(MIXINGS))
    for i, k in enumerate(TRUE):
        rows = rng.integers(0, len(TESTS[k][1]), 6)
        some, labels = (part[rows] for part in TESTS[k])
        with np.errstate(divide="ignore"):
            losses += [-np.log(of_labels(p, labels)).mean() for p in mixtures(first, x[i], y[i], some, MIXINGS)]
    share = MIXINGS[int(np.argmin(losses))]
    (x, y), found = deal(rng), []
    for i, k in enumerate(TRUE):
        rows = rng.integers(0, len(TESTS[k][1]), 100)
        some, labels = (part[rows] for part in TESTS[k])
        found.append((mixtures(model, x[i], y[i], some, [share])[0].argmax(axis=1) == labels).mean())
    return {"accuracy %": 100 * float(np.mean(found)), "share of the neighbours": share}


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("arrays")
parser.add_argument("task", choices=("rotation", "private_label"))
parser.add_argument("method", choices=("local", "ditto", "ifca", "knn_per"))
parser.add_argument("--seeds", type=int, default=1)
parser.add_argument("--no-zeros", action="store_true")
args = parser.parse_args()
arrays = np.load(args.arrays)
X, TEST_X = (((arrays[n].reshape(-1, 28, 28) - 0.1307) / 0.3081).astype(np.float32) for n in ("x", "test_x"))
Y, TEST_Y = (arrays[n].astype(np.int64) for n in ("y", "test_y"))
TESTS = [as_cluster_sees(TEST_X, TEST_Y, k) for k in range(CLUSTERS)]
run = {"ifca": ifca, "knn_per": knn_per}.get(args.method, personal)
for seed in range(args.seeds):
    print(json.dumps({"task": args.task, "method": args.method, "seed": seed} | run(np.random.default_rng(seed))))
