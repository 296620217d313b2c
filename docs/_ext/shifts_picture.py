"""The picture of docs/howto/shifts.md, every shift on the same digits: `python docs/_ext/shifts_picture.py`."""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import jfcl
from jfcl.data.concepts import CONCEPTS
from jfcl.data.heterogeneity import HETEROGENEITY, SELECTIVE, VARIANTS

PAGE = Path(__file__).resolve().parent.parent / "howto"
SHOWN = [1, 2, 5, 7]  # digits
CLUSTERS = 3
TEXTS = ("#00598C", "#855A00", "#006B4E")  # the clusters' colours, darker, to be read on white
SHIFTS = [name for name in HETEROGENEITY if name not in ("none", *CONCEPTS)]


def examples(name: str, cluster: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns some digits of a cluster under a shift, and their labels."""
    digits = jfcl.data.load("digits").train
    rows = [np.flatnonzero(digits["y"] == digit)[0] for digit in (range(10) if name in SELECTIVE else SHOWN)]
    x, y = digits["x"][rows], digits["y"][rows]
    x = np.repeat(x, 3, axis=-1) if name == "colour" else x
    function, options = HETEROGENEITY[name][0], (CLUSTERS, 10, 0)
    new, labels = function(x, y, cluster, *options)
    if name in VARIANTS:  # the later digits are those of corrupted clients
        new[2:] = function(x, y, cluster + CLUSTERS, *options)[0][2:]
    return new[: len(SHOWN)], labels[: len(SHOWN)]


def draw() -> plt.Figure:
    """Returns the picture: a row for each shift, with three clusters of digits over their labels."""
    half = -(-len(SHIFTS) // 2)
    figure, axes = plt.subplots(1, 2, figsize=(11, 0.86 * half))
    for column, panel in enumerate(axes):
        for row, name in enumerate(SHIFTS[column * half : (column + 1) * half]):
            bottom = 1.75 * (half - 1 - row)
            panel.text(-0.3, bottom + 0.4, name, ha="right", va="center", fontsize=9.5, family="monospace")
            for k in range(CLUSTERS):
                images, labels = examples(name, k)
                for i, (image, label) in enumerate(zip(images, labels, strict=True)):
                    left = (len(SHOWN) + 0.8) * k + 1.05 * i
                    extent = (left, left + 1, bottom, bottom + 1)
                    shown = 1 - image if image.shape[-1] == 1 else image
                    panel.imshow(shown.squeeze(), cmap="gray", vmin=0, vmax=1, extent=extent)
                    panel.text(left + 0.5, bottom - 0.1, str(label), ha="center", va="top", fontsize=8, color=TEXTS[k])
        for k in range(CLUSTERS):
            middle, top = (len(SHOWN) + 0.8) * k + 2.1, 1.75 * half - 0.6
            panel.text(middle, top, f"cluster {k}", ha="center", color=TEXTS[k], fontsize=9.5, weight="bold")
        panel.set(xlim=(-4.6, 14), ylim=(-0.6, 1.75 * half))
        panel.set_axis_off()
    figure.subplots_adjust(0, 0, 1, 1, 0, 0)
    return figure


if __name__ == "__main__":
    jfcl.plots.save(draw(), PAGE / "shifts.png")
