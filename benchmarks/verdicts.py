"""Draws `docs/reproduction/verdicts.svg`: accuracies of the papers beside ours, in the colours of the verdicts.

    python benchmarks/verdicts.py

The figures are those of `results/reproduce/`, and the verdicts those of `tables.py`. A bar is a standard deviation.
"""

import argparse
import json

import matplotlib.pyplot as plt
import numpy as np
from common import RESULTS
from tables import AGREES, IN_PART, NAMES, REPRODUCTION, cells_of

from jfcl.analysis import plots

# Shape and colour, so that the chart is read without colours, too.
MARKS = {AGREES: ("o", plots.PALETTE[0]), IN_PART: ("^", "#B86E00"), "not reproduced": ("X", "#8B1A1A")}


def rows_of(name: str, labels: str, *, verdict: str | None = None, prefix: str = "") -> list[tuple]:
    """Returns `(label, paper, ours, deviation, verdict)` of the rows of a file that have a figure of the paper."""
    path, found = RESULTS / f"reproduce/{name}.json", []
    for row in json.loads(path.read_text())["rows"] if verdict else cells_of(f"reproduce/{name}"):
        if row.get("paper %") is None:
            continue
        label = ", ".join(NAMES.get(row[c], row[c]) for c in labels.split()).replace("Federated-Clustering", "FC")
        ours = row.get("clients %", row.get("accuracy %"))
        found.append((prefix + label, row["paper %"], ours, row.get("std") or 0, verdict or row["of"]))
    return found


def panels() -> list[tuple[str, list[tuple]]]:
    """Returns the four panels: a title, and its rows from above."""
    last = json.loads((RESULTS / "reproduce/cfl.figure8-full.json").read_text())["rows"][-1]
    missed = {"verdict": "not reproduced", "prefix": "former network, "}
    return [
        (
            "Byzantine CFL, table 1",
            rows_of("byzantine_cfl.table1-200-rounds", "data scenario method")
            + rows_of("byzantine_cfl.table1-cifar10-printed", "data scenario method"),
        ),
        ("Byzantine CFL, table 2", rows_of("byzantine_cfl.table2-200-rounds", "data scenario method")),
        (
            "Federated-Clustering (FC), table 1 and figure 6",
            rows_of("federated_clustering.table1-cells", "task method")
            + rows_of("federated_clustering.figure6-full", "attack method", verdict=IN_PART, prefix="figure 6, "),
        ),
        (
            "IFCA, table 1; CFL, figure 8",
            rows_of("ifca.table1-5-seeds", "data method")
            + rows_of("ifca.table1_cifar10-full", "method", verdict=IN_PART, prefix="CIFAR-10, ")
            + rows_of("ifca.table1_cifar10-former-network", "method", **missed)
            + [("figure 8, CIFAR-10, CFL", 60, 100 * last["accuracy"], 0, AGREES)],
        ),
    ]


def draw() -> plt.Figure:
    """Returns the chart: a panel for each group of tables, a row for each of their cells."""
    content = panels()
    heights = [max(len(content[i][1]), len(content[i + 1][1])) for i in (0, 2)]
    figure, grid = plt.subplots(
        2, 2, figsize=(9.4, 0.21 * sum(heights) + 1.6), layout="constrained", gridspec_kw={"height_ratios": heights}
    )
    for axes, (title, rows), height in zip(grid.flat, content, (h for h in heights for _ in (0, 1)), strict=True):
        places = range(len(rows))
        _, paper, ours, deviation, verdicts = (np.array(column) for column in zip(*rows, strict=True))
        axes.hlines(places, paper, ours, color="#BBBBBB", lw=1.5, zorder=1)
        axes.plot(paper, places, "D", ms=6, mfc="white", mec="#333333", zorder=2)
        for verdict, (mark, color) in MARKS.items():
            at = np.flatnonzero(verdicts == verdict)
            axes.errorbar(ours[at], at, xerr=deviation[at], fmt=mark, ms=6, color=color, capsize=2.5, lw=1.3, zorder=3)
        axes.set_yticks(places, [row[0] for row in rows], fontsize=9)
        axes.set(ylim=(height - 0.4, -0.6), xlim=(0, 103))
        axes.set_title(title, fontsize=10, loc="left")
        axes.grid(axis="x", alpha=0.3)
        axes.tick_params(axis="y", left=False)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[1]:
        axes.set_xlabel("accuracy, %")
    handles = [plt.Line2D([], [], ls="", marker="D", mfc="white", mec="#333333", label="the paper")]
    handles += [plt.Line2D([], [], ls="", marker=m, color=c, label=f"ours: {v}") for v, (m, c) in MARKS.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=4, frameon=False)
    return figure


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    # The same file from the same figures, and texts as texts, which makes it smaller.
    plt.rcParams |= {"svg.hashsalt": "jfcl", "svg.fonttype": "none"}
    draw().savefig(REPRODUCTION / "verdicts.svg", metadata={"Date": None})
