"""The picture of README and front page, from the runs of `make demo`: `python docs/_ext/front_picture.py runs/demo`."""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from jfcl.plots import PALETTE
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

import jfcl

NAMES = {
    "oracle": "oracle: knows the true clusters",
    "ifca": "IFCA: finds the clusters",
    "fedavg": "FedAvg: one model for all",
    "local": "local: one model per client",
}
COLORS = {"oracle": PALETTE[3], "ifca": PALETTE[2], "fedavg": PALETTE[0], "local": PALETTE[1]}
TEXTS = {"oracle": "#A34700", "ifca": "#006B4E", "fedavg": "#00598C", "local": "#855A00"}  # darker, to be read on white
LINES = {"oracle": ":", "ifca": "-", "fedavg": "--", "local": "-."}


def box(axes: plt.Axes, x: float, y: float, images: np.ndarray, color: str) -> None:
    """Draws a client: two of its images in a frame."""
    axes.add_patch(FancyBboxPatch((x, y), 2.2, 1, boxstyle="round,pad=0.12", fc="white", ec=color, lw=1.6))
    for left, image in zip((x, x + 1.2), images, strict=False):
        axes.imshow(image, cmap="gray_r", extent=(left, left + 1, y, y + 1), zorder=2)


def draw(folder: Path) -> plt.Figure:
    """Returns the picture: clients, the models of their clusters, and the accuracies of four methods by round."""
    fed = jfcl.data.build("digits", num_clients=40, num_clusters=4, heterogeneity="rotation")
    images, cluster = np.asarray(fed.train.examples["x"])[..., 0], np.asarray(fed.cluster)
    # The images keep their proportions, so each panel of clients gets the width that fills the common height.
    figure, height = plt.figure(figsize=(11, 3.3)), 0.76
    tall, wide = (-0.4, 7.5), {"hidden": (-0.3, 8.3), "found": (-0.3, 9.3)}
    widths = [height * 3.3 / 11 * (right - left) / (tall[1] - tall[0]) for left, right in wide.values()]
    hidden = figure.add_axes((0, 0.14, widths[0], height))
    found = figure.add_axes((widths[0] + 0.03, 0.14, widths[1], height))
    curves = figure.add_axes((sum(widths) + 0.08, 0.14, 0.92 - sum(widths), height))
    order = np.random.default_rng(0).permutation(np.concatenate([np.flatnonzero(cluster == k)[:3] for k in range(4)]))

    # Clients, whose clusters nobody knows.
    for place, client in enumerate(order):
        box(hidden, 2.9 * (place % 3), 2.05 * (3 - place // 3), images[client], "#999999")
    hidden.set_title("Clients of hidden clusters", fontsize=11)

    # The same clients by cluster, with a model for each.
    for k in range(4):
        y = 2.05 * (3 - k)
        for column, client in enumerate(order[cluster[order] == k][:2]):
            box(found, 2.9 * column, y, images[client], PALETTE[k])
        found.add_patch(
            FancyArrowPatch((5.4, y + 0.5), (6.5, y + 0.5), arrowstyle="-|>", mutation_scale=12, color="#555555")
        )
        found.add_patch(FancyBboxPatch((6.8, y), 2.2, 1, boxstyle="round,pad=0.12", fc=PALETTE[k], ec=PALETTE[k]))
        ink = "white" if k == 0 else "black"  # the blue box alone is dark
        found.text(7.9, y + 0.47, f"model {k + 1}", ha="center", va="center", color=ink, fontsize=9, weight="bold")
    found.set_title("A model for each cluster", fontsize=11)
    for axes, limits in zip((hidden, found), wide.values(), strict=True):
        axes.set(xlim=limits, ylim=tall)
        axes.set_axis_off()

    # Accuracy by round: mean and range of a standard deviation over the seeds.
    for name, words in NAMES.items():
        records = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        rounds = sorted({r["round"] for r in records if "accuracy" in r})
        values = np.array([[100 * r["accuracy"] for r in records if r.get("round") == t] for t in rounds])
        mean, std = values.mean(axis=1), values.std(axis=1, ddof=1)
        curves.plot(rounds, mean, color=COLORS[name], ls=LINES[name], lw=2)
        curves.fill_between(rounds, mean - std, mean + std, color=COLORS[name], alpha=0.15, lw=0)
        low = {"oracle": 2.6, "ifca": -5.2, "fedavg": -7.6, "local": -6}[name]
        curves.text(102, mean[-1] + low, words, color=TEXTS[name], ha="right", fontsize=9)
    curves.set(xlabel="round", xlim=(0, 106), ylim=(40, 100))
    curves.set_title("Accuracy on the clients' test images, %", fontsize=11)
    curves.grid(alpha=0.3)
    curves.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    jfcl.plots.save(draw(Path(sys.argv[1])), Path(__file__).resolve().parent.parent / "front.png")
