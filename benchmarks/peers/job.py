"""What the scripts of all libraries share: the examples, the models they start from, and who judges the outcome.

Needs NumPy alone, since every library has an environment of its own. A *case* is a dict: `method` ("fedavg", "ifca",
"flhc"), `model` ("mlp", "cnn_mnist"), `clients`, `examples`, `batch` (`None`: all), `steps`, `clusters`, `lr`,
`rounds`, and `data`, the path of an `.npz` from `benchmarks/against_peers.py`, or nothing for random examples. FL+HC
starts from the first model alone.

A *model* is a list of `(kernel, bias)` from the first layer to the last, in jfcl's layouts: `[inputs, outputs]` of
dense layers (images are flattened rows first, channels last), `[height, width, inputs, outputs]` of convolutions.
"""

import json
import sys
from typing import Any, NamedTuple

import numpy as np

SHAPES = {
    "mlp": [(784, 200), (200, 10)],
    "cnn_mnist": [(5, 5, 1, 32), (5, 5, 32, 32), (800, 256), (256, 10)],
}


class Data(NamedTuple):
    """x `[N, M, 28, 28, 1]`, y `[N, M]`; the `K` models to start from; held-out examples of every kind of clients.

    `test_x` `[G, P, 28, 28, 1]`, `test_y` `[G, P]`; `kind` `[N]` says which a client's are. None with random examples.
    """

    x: np.ndarray
    y: np.ndarray
    models: list[list[tuple[np.ndarray, np.ndarray]]]
    test_x: np.ndarray | None = None
    test_y: np.ndarray | None = None
    kind: np.ndarray | None = None


def load(case: dict[str, Any]) -> Data:
    """The examples and first models of `case`."""
    if case.get("data"):
        with np.load(case["data"]) as file:
            layers = len(SHAPES[case["model"]])
            models = [
                [(file[f"kernel_{i}"][k], file[f"bias_{i}"][k]) for i in range(layers)] for k in range(case["clusters"])
            ]
            return Data(file["x"], file["y"], models, file["test_x"], file["test_y"], file["kind"])
    rng = np.random.default_rng(0)
    x = rng.random((case["clients"], case["examples"], 28, 28, 1), np.float32)
    y = rng.integers(0, 10, x.shape[:2]).astype(np.int32)
    return Data(x, y, [draw_model(rng, case["model"]) for _ in range(case["clusters"])])


def draw_model(rng: np.random.Generator, name: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """A model of LeCun's initialisation, zero biases."""
    shapes = SHAPES[name]
    return [
        (rng.standard_normal(s, np.float32) / np.sqrt(np.prod(s[:-1]), dtype=np.float32), np.zeros(s[-1], np.float32))
        for s in shapes
    ]


def logits(model: list[tuple[np.ndarray, np.ndarray]], x: np.ndarray) -> np.ndarray:
    """`[B, 10]` for images `[B, 28, 28, 1]`: convolutions with padding 1, ReLU and 2 x 2 max-pooling, dense layers."""
    for kernel, bias in model:
        if kernel.ndim == 4:
            padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
            windows = np.lib.stride_tricks.sliding_window_view(padded, kernel.shape[:2], axis=(1, 2))
            x = np.maximum(np.tensordot(windows, kernel, ((4, 5, 3), (0, 1, 2))) + bias, 0)
            b, h, w, c = x.shape
            x = x[:, : h // 2 * 2, : w // 2 * 2].reshape(b, h // 2, 2, w // 2, 2, c).max(axis=(2, 4))
        else:
            x = x.reshape(len(x), -1) @ kernel + bias
            x = np.maximum(x, 0) if kernel is not model[-1][0] else x
    return x


def mean_loss(model: list[tuple[np.ndarray, np.ndarray]], x: np.ndarray, y: np.ndarray) -> float:
    """The mean cross-entropy."""
    z = logits(model, x)
    z = z - z.max(axis=1, keepdims=True)
    return float(np.mean(np.log(np.exp(z).sum(axis=1)) - z[np.arange(len(y)), y]))


def accuracy(data: Data, models: list[list[tuple[np.ndarray, np.ndarray]]]) -> float:
    """Mean over clients of the accuracy, on their kind's test examples, of the model with the lowest training loss."""
    kinds, chosen = data.kind.tolist(), [0] * len(data.kind)
    if len(models) > 1:
        examples = zip(data.x, data.y, strict=True)
        chosen = [int(np.argmin([mean_loss(model, x, y) for model in models])) for x, y in examples]
    reached = {}
    for k, kind in set(zip(chosen, kinds, strict=True)):
        x, y = data.test_x[kind], data.test_y[kind]
        found = [logits(models[k], part).argmax(axis=1) for part in np.array_split(x, len(x) // 500 + 1)]
        reached[k, kind] = np.mean(np.concatenate(found) == y)
    return float(np.mean([reached[pair] for pair in zip(chosen, kinds, strict=True)]))


def run(main) -> None:
    """Runs `main(case, data) -> (seconds of each round, final models, more)` on the case given on the command line.

    Prints one line of JSON: `seconds`, `accuracy` (where there are test examples), and what `more` holds.
    """
    case = json.loads(sys.argv[1])
    data = load(case)
    seconds, models, more = main(case, data)
    judged = {} if data.kind is None else {"accuracy": accuracy(data, models)}
    print("\n" + json.dumps({"seconds": seconds, **judged, **more}))
