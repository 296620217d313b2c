"""An example of every figure of `jfcl.plots`, for its page in the API. The data are made up."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from jfcl.parameter_tree import Node
from matplotlib.figure import Figure

import jfcl

TRUE = np.repeat(np.arange(4), 6)


def records(last: float, speed: float, spread: float) -> list[dict]:
    """Returns the records of three seeds whose accuracy rises to `last`."""
    rng = np.random.default_rng(round(1000 * last))
    found = []
    for seed in range(3):
        shift = spread * rng.normal()
        for t in range(1, 41):
            accuracy = float(np.clip(last - (last - 0.1) * np.exp(-t / speed) + shift, 0, 1))
            found.append({"seed": seed, "round": t, "accuracy": accuracy, "worst_client_accuracy": accuracy - 0.2})
    return found


def runs() -> dict[str, list[dict]]:
    return {"ifca": records(0.93, 5, 0.01), "fedavg": records(0.78, 12, 0.02), "local": records(0.72, 3, 0.01)}


def client_accuracies() -> Figure:
    rng = np.random.default_rng(0)
    means = {"ifca": 0.93, "fedavg": 0.78, "local": 0.72}
    return jfcl.plots.client_accuracies({of: rng.normal(m, 0.06, 40).clip(0, 1) for of, m in means.items()})


def assignments() -> Figure:
    rng = np.random.default_rng(0)
    wrong = [rng.random(24) < 0.7 * np.exp(-t / 3) for t in range(1, 13)]
    clusters = [np.where(w, rng.integers(0, 4, 24), TRUE).tolist() for w in wrong]
    return jfcl.plots.assignments([{"seed": 0, "round": t + 1, "cluster": c} for t, c in enumerate(clusters)], TRUE)


def similarity() -> Figure:
    rng = np.random.default_rng(0)
    updates = rng.normal(size=(4, 30))[TRUE] + 0.8 * rng.normal(size=(24, 30))
    updates /= np.linalg.norm(updates, axis=1, keepdims=True)
    return jfcl.plots.similarity(updates @ updates.T, TRUE)


def tree() -> Figure:
    def some(*clusters):
        return np.flatnonzero(np.isin(TRUE, clusters))

    nodes = [
        Node(-1, (1, 2), 0, 0, some(0, 1, 2, 3), -0.21, 1),
        Node(0, (3, 4), 0, 10, some(0, 1), -0.35, 2),
        Node(0, (), 1, 10, some(2, 3), np.nan, -1),
        Node(1, (), 0, 20, some(0), np.nan, -1),
        Node(1, (), 2, 20, some(1), np.nan, -1),
    ]
    return jfcl.plots.tree(nodes, TRUE)


def heatmap() -> Figure:
    values = np.array([[0.71, 0.84, 0.82], [0.74, 0.93, 0.91], [np.nan, 0.88, 0.9]])
    return jfcl.plots.heatmap(values, {"lr": [0.03, 0.1, 0.3], "num_models": [2, 4, 8]}, label="accuracy")


def throughput() -> Figure:
    speeds = {("fedavg", "vmap"): 2400, ("fedavg", "sharded"): 8000, ("ifca", "vmap"): 2000, ("ifca", "sharded"): 4500}
    rows = [
        {"method": of, "model": "mlp", "mapping": how, "clients": n, "client_steps/s": speed * n / (n + 20)}
        for (of, how), speed in speeds.items()
        for n in (10, 100, 1000)
    ]
    return jfcl.plots.throughput(rows)


PLOTS: dict[str, Callable[[], Figure]] = {
    "curves": lambda: jfcl.plots.curves(runs()),
    "bars": lambda: jfcl.plots.bars(runs()),
    "client_accuracies": client_accuracies,
    "assignments": assignments,
    "similarity": similarity,
    "tree": tree,
    "heatmap": heatmap,
    "throughput": throughput,
}


def draw_plots(folder: Path) -> None:
    """Draws the pictures that are missing, or older than `jfcl.plots` or this file."""
    changed = max(Path(file).stat().st_mtime for file in (jfcl.plots.__file__, __file__))
    for name, draw in PLOTS.items():
        path = folder / f"{name}.svg"
        if not path.exists() or path.stat().st_mtime < changed:
            jfcl.plots.save(draw(), path)
