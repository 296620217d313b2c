"""The result on each method's page: `python docs/_ext/method_results.py FOLDER [NAME ...]`.

It runs the first command of a page's section "Run it", and the baselines with the same flags, in FOLDER, where finished
runs are kept. It draws `docs/methods/results/NAME.png`, and writes the table between the page's comments `result`.
"""

import csv
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from jfcl.plots import PALETTE
from matplotlib.ticker import MaxNLocator

import jfcl

PAGES = Path(__file__).resolve().parent.parent / "methods"
STYLES = {"oracle": (PALETTE[2], ":"), "fedavg": (PALETTE[1], "--"), "local": (PALETTE[4], "-."), "": (PALETTE[0], "-")}
NAMES = {"oracle": "oracle", "fedavg": "FedAvg", "local": "local training"}
BASELINES = {"byzantine_cfl": ["fedavg"], "fedbn": ["fedavg", "local"]}
BASELINES |= {name: ["oracle", "fedavg"] for name in ("stocfl", "fedgwc")}  # with cohorts
DATA = {"digits": "the handwritten digits", "sine": "the points `sine`, whose labels drift in ten steps"}
CAPTION = """\
*Three seeds of {data}, with a band of a standard deviation; right, the clients of the first seed at the end.
The baselines run with the same flags.*"""
# Flags that the baselines do not have.
OF_METHODS = {"lam", "warm-rounds", "rounds-before", "personal-steps", "keep", "drift-threshold"}
# Further flags of a baseline: the examples of one step are of one cluster.
FURTHER = {("feddrift", "oracle"): ["--drift-window", "1"]}
ONE_STEP = {"momentum_clustering", "myopic_clustering"}  # a round is one step, also of the baselines


def command(page: str) -> list[str]:
    """Returns the arguments of the first command of a page, without `jfcl` and `--out`."""
    shell = re.search(r"```sh\n(.*?)```", page.partition("## Run it")[2], flags=re.DOTALL)[1]
    words = shlex.split(shell.replace("\\\n", " "))[1:]
    return words[: words.index("--out")]


def run(arguments: list[str], folder: Path) -> Path:
    """Runs a command in a folder named after it, unless it has been run, and returns the folder."""
    out = folder / re.sub(r"[^\w=]+", "-", "_".join(arguments[1:]))
    if not (out / "summary.json").exists():
        start = [sys.executable, "-m", "jfcl", *arguments, "--quiet", "--out", str(out), "--resume"]
        subprocess.run(start, check=True, cwd=folder, stdout=subprocess.DEVNULL)
    return out


def runs_of(name: str, page: str, folder: Path) -> dict[str, Path]:
    """Returns the folders of the runs of a page: the method's first, then those of the baselines."""
    for file, code in re.findall(r"<!-- file (\w+\.py) -->\n```python\n(.*?)```", page, flags=re.DOTALL):
        (folder / file).write_text(code)
    of_method = command(page)
    shared = " " + " ".join(of_method[2:])
    for flag in OF_METHODS:
        shared = re.sub(rf" --{flag} \S+", "", shared)
    shared += " --local-steps 1" * (name in ONE_STEP)
    baselines = [b for b in BASELINES.get(name, ["oracle", "fedavg", "local"]) if b != name]
    arguments = {b: ["run", b, *shared.split(), *FURTHER.get((name, b), [])] for b in baselines}
    return {name: run(of_method, folder)} | {b: run(arguments[b], folder) for b in baselines}


def draw(name: str, title: str, folders: dict[str, Path]) -> plt.Figure:
    """Returns the picture: accuracy by round with a band of a standard deviation, and the clients of the first seed."""
    figure, (curves, clients) = plt.subplots(
        1, 2, figsize=(8.4, 2.9), gridspec_kw={"width_ratios": [3, 2], "wspace": 0.28}
    )
    for of, folder in reversed(folders.items()):
        color, line = STYLES[of if of != name else ""]
        records = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
        rounds = sorted({r["round"] for r in records if "accuracy" in r})
        values = np.array([[100 * r["accuracy"] for r in records if r["round"] == t] for t in rounds])
        mean, std = values.mean(axis=1), values.std(axis=1, ddof=1)
        label = title if of == name else NAMES[of]
        front = 3 if of == "oracle" else 2  # its dots show on a line that they meet
        curves.plot(rounds, mean, color=color, ls=line, lw=2.2 if of == name else 1.6, label=label, zorder=front)
        curves.fill_between(rounds, mean - std, mean + std, color=color, alpha=0.15, lw=0)
        with (folder / "clients.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if row["accuracy"] not in ("", "nan")]
        first = sorted((100 * float(row["accuracy"]) for row in rows if row["seed"] == rows[0]["seed"]), reverse=True)
        clients.plot(range(1, len(first) + 1), first, color=color, ls=line, lw=2.2 if of == name else 1.6, zorder=front)
    curves.set(xlabel="round", ylabel="accuracy, %")
    curves.legend(frameon=False, fontsize=8.5, reverse=True)
    clients.xaxis.set_major_locator(MaxNLocator(integer=True))
    clients.set(xlabel="clients from the best to the worst", ylabel="accuracy, %", ylim=(-3, 103))
    for axes in (curves, clients):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def table(name: str, title: str, folders: dict[str, Path]) -> str:
    """Returns the table: a row for each run."""
    lines = ["| | accuracy % | worst client % | cluster acc. % | MB up | MB down |", "|---|---:|---:|---:|---:|---:|"]
    for of, folder in folders.items():
        summary = json.loads((folder / "summary.json").read_text())
        mean, std = summary["mean"], summary["std"]
        has_clusters = 1 < mean["clusters_in_use"] < summary["num_clients"]  # neither one model nor one for each client
        cells = [
            f"**{title}**" if of == name else f"[{NAMES[of]}]({of}.md)",
            f"{100 * mean['accuracy']:.1f} ± {100 * std['accuracy']:.1f}",
            f"{100 * mean['worst_client_accuracy']:.1f}",
            f"{100 * mean['cluster_accuracy']:.0f}" if has_clusters and of != "oracle" else "–",
            *(f"{summary[way] / 1e6:,.1f}" for way in ("bytes_up", "bytes_down")),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def drift_table(name: str, title: str, folders: dict[str, Path]) -> str:
    """Returns the table of runs on drifting data: means over the steps."""
    columns = {"accuracy": "accuracy %", "next_stable_accuracy": "before adapting, clients that stay %"}
    columns |= {"next_accuracy": "before adapting, all %", "adjusted_rand": "adjusted Rand"}
    heads = [*columns.values(), "MB up", "MB down"]
    lines = ["| | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(heads)]
    for of, folder in folders.items():
        summary = json.loads((folder / "summary.json").read_text())
        cells = [f"**{title}**" if of == name else f"[{NAMES[of]}]({of}.md)"]
        for key in columns:
            means = np.array([np.mean(seed[key]) for seed in summary["drift"]["per_seed"]])  # over the steps
            if key == "adjusted_rand":
                cells.append("–" if of in NAMES else f"{means.mean():.3f}")
            else:
                cells.append(f"{100 * means.mean():.1f} ± {100 * means.std(ddof=1):.1f}")
        cells += [f"{summary[way] / 1e6:,.1f}" for way in ("bytes_up", "bytes_down")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    folder, *names = sys.argv[1:]
    folder = Path(folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or [path.stem for path in sorted(PAGES.glob("*.md")) if "<!-- result -->" in path.read_text()]:
        path = PAGES / f"{name}.md"
        page = path.read_text()
        title = page.partition("\n")[0].removeprefix("# ")
        folders = runs_of(name, page, folder)
        jfcl.plots.save(draw(name, title, folders), PAGES / "results" / f"{name}.png")
        picture = f"![Accuracy of {title} and of the baselines, by round and by client](results/{name}.png)"
        summary = json.loads((folders[name] / "summary.json").read_text())
        caption = CAPTION.format(data=DATA[summary["dataset"]])
        caption = caption.replace("flags.", "flags and one local step.") if name in ONE_STEP else caption
        columns = (drift_table if "drift" in summary else table)(name, title, folders)
        body = f"{picture}\n\n{caption}\n\n{columns}"
        found = r"(<!-- result -->\n).*(<!-- end of result -->)"
        page = path.read_text()  # again: runs take a while
        path.write_text(re.sub(found, lambda m, body=body: f"{m[1]}\n{body}\n\n{m[2]}", page, flags=re.DOTALL))
        print(name, flush=True)


if __name__ == "__main__":
    main()
