"""Draws `results/ratios.png` from the JSON files beside it: the time of every compared library, in times of jfcl's."""

import argparse
import json
from pathlib import Path

import matplotlib.pyplot as plt

from jfcl.analysis import plots

RESULTS = Path(__file__).resolve().parent / "results"
GPU = {
    "ifca, mlp": "IFCA, MLP",
    "fedavg, cnn": "FedAvg, CNN",
    "federated clustering, mlp": "Federated-Clustering, MLP",
    "cfl, mlp": "CFL, MLP",
}
OTHER = ("TF32 throughout", "autocast", "similarities")  # forms that compute less exactly, or other things
CPU = {"ifca mlp": "IFCA, MLP", "fedavg mlp": "FedAvg, MLP", "fedavg cnn": "FedAvg, CNN", "flhc mlp": "FL+HC, MLP"}


def rows(name: str) -> list[dict]:
    return json.loads((RESULTS / f"{name}.json").read_text())["rows"]


def on_cpu() -> dict[str, dict[str, float]]:
    """Returns `{job: {library: times ours}}` of the same jobs in every library, and of Federated-Clustering."""
    found = {}
    for row in rows("against-peers-cpu-2-cores"):
        if not row["library"].startswith("jfcl"):
            found.setdefault(CPU[row["job"]], {})[row["library"].split()[0]] = row["times_ours"]
    largest = {row["what"]: row["seconds"] for row in rows("federated-clustering-cpu-2-cores") if row["clients"] == 300}
    found["Federated-Clustering, MLP"] = {"PyTorch": largest["PyTorch loop"] / largest["jfcl"]}
    return found


def on_gpu() -> dict[str, dict[str, float]]:
    """Returns `{job: {library: times ours}}` with the fastest form of each library that computes as exactly as ours."""
    found = {}
    for key, job in GPU.items():
        timed = [row for row in rows("gpu-nvidia-h200") if row["row"] == key and "ms" in row]
        (ours,) = [row["ms"] for row in timed if row["what"] == "jfcl" and row["mapping"].startswith("default")]
        for library in ("PyTorch", "JAX"):
            of_library = [row for row in timed if row["what"].startswith(library)]
            fair = [row["ms"] for row in of_library if not any(part in row["what"] for part in OTHER)]
            if fair:
                found.setdefault(job, {})[{"JAX": "plain JAX"}.get(library, library)] = min(fair) / ours
        half = [row["ms"] for row in timed if row["what"] == "jfcl, bfloat16"]
        if half:
            found[job]["jfcl in bfloat16"] = half[0] / ours
    return found


def draw() -> plt.Figure:
    """Returns the figure: a panel for the CPU, and one for the GPU."""
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.2), gridspec_kw={"wspace": 0.5})
    libraries = ["PyTorch", "FedJAX", "pfl-research", "Flower", "CFLA", "plain JAX", "jfcl in bfloat16", "BlazeFL"]
    for axes, (title, jobs) in zip(
        panels, {"CPU of 2 cores": on_cpu(), "one NVIDIA H200": on_gpu()}.items(), strict=True
    ):
        place, ticks, labels = 0, [], []
        for job, ratios in jobs.items():
            first = place
            for library in (name for name in libraries if name in ratios):
                color = plots.PALETTE[libraries.index(library) % len(plots.PALETTE)]
                axes.barh(place, ratios[library], color=color, height=0.8)
                axes.text(ratios[library] * 1.04, place, f"{library} {ratios[library]:.1f}", va="center", fontsize=8)
                place += 1
            ticks, labels = [*ticks, (first + place - 1) / 2], [*labels, job]
            place += 0.7
        axes.axvline(1, color="#333333", lw=1.2)
        axes.set(xscale="log", xlim=(0.5, 80), yticks=ticks, yticklabels=labels, title=title, xlabel="time, jfcl = 1")
        axes.set_xticks([0.5, 1, 2, 5, 10, 20], ["0.5", "1", "2", "5", "10", "20"])
        axes.minorticks_off()
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    plots.save(draw(), RESULTS / "ratios.png")
