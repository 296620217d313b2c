"""The experiments of Byzantine-robust CFL (Sattler, Müller, Wiegand, Samek 2020): figure 2, tables 1 and 2.

The paper leaves open the local epochs, here 1, and whether its tables are of 100 or of 10 clients: here the first is of
100, as figure 2 beside it. It also leaves open how inputs are scaled and parameters begin: `inputs="text"` has pixels
in [0, 1] and flax's initialisation, `"code"` what the first author's public code for other experiments has.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

from benchmarks.papers import report
from benchmarks.papers.recipes import Bench, Outcome, recipe
from jfcl.analysis import plots
from jfcl.core import check_choice
from jfcl.experiments.config import Config
from jfcl.experiments.setups import malicious_clients

SCENARIOS = {"byzantine": "gaussian", "noisy": "noisy_inputs", "label flip": "label_zero", "clean": None}
GREEN, RED = plots.PALETTE[2:4]
METHODS = {"FL": "fedavg", "CFL": "byzantine_cfl"}
MODELS = {
    "mnist": {"model": "cnn_mnist", "lr": 0.01},
    "fashion_mnist": {"model": "cnn_mnist", "lr": 0.01},
    "cifar10": {"model": "vgg", "lr": 0.01, "momentum": 0.9},
}
OF_CODE = {
    "mnist": "benchmarks.papers.networks:CNNMnist32",
    "fashion_mnist": "benchmarks.papers.networks:cnn_fashion32",
    "cifar10": "vgg",
}
# Accuracy in %, in the order of SCENARIOS, by the number of clients.
PAPER = {
    100: {
        "mnist": {"FL": (9.8, 96.9, 91.3, 97.5), "CFL": (93.19, 97.4, 97.4, 97.4)},
        "fashion_mnist": {"FL": (9.6, 77.12, 60.6, 79.9), "CFL": (78.0, 79.7, 79.7, 80.2)},
        "cifar10": {"FL": (None, 70.4, 40.1, 76.0), "CFL": (None, 74.6, 74.7, 75.3)},
    },
    10: {
        "mnist": {"FL": (9.8, 98.1, 81.6, 98.6), "CFL": (95.5, 98.4, 98.6, 98.5)},
        "fashion_mnist": {"FL": (9.6, 83.0, 68.4, 85.1), "CFL": (86.1, 85.4, 84.9, 85.1)},
        "cifar10": {"FL": (None, 73.7, None, 77.65), "CFL": (None, 74.3, None, 76.0)},
    },
}

_FULL = {"datasets": ["mnist", "fashion_mnist", "cifar10"], "methods": ["FL", "CFL"], "examples_per_client": None}
_FULL |= {"scenarios": list(SCENARIOS), "rounds": 200, "local_epochs": 1, "seeds": 3, "eval_every": 1}
_FULL |= {"inputs": "text"}
_SMALL = {"datasets": ["mnist"], "rounds": 40, "seeds": 1}


def cell_config(setting: dict[str, Any], dataset: str, scenario: str, method: str) -> Config:
    """Returns the run of one cell of a table: a data set, a scenario, and FL or CFL."""
    attack = SCENARIOS[scenario]
    given = setting | MODELS[dataset] | ({"model": OF_CODE[dataset]} if setting["inputs"] == "code" else {})
    given |= {"dataset": dataset, "attack": attack, "malicious": 0.3 if attack else 0.0}
    given |= {"inputs": None}  # an option of tables
    return report.configure(METHODS[method], given | {"heterogeneity": "none", "clusters": 1, "batch_size": 100})


def of_paper(clients: int, dataset: str, scenario: str, method: str) -> float | None:
    """Returns the paper's accuracy in a cell; None where it gives none, as for other numbers of clients."""
    return PAPER[clients][dataset][method][list(SCENARIOS).index(scenario)] if clients in PAPER else None


def removals(config: Config, records: list[dict[str, Any]]) -> dict[str, Any]:
    """Over all seeds: the clients excluded at the end, the last round of malicious ones, the rounds of benign ones."""
    malicious = malicious_clients(config)
    last = {r["seed"]: np.array(r["excluded"]) for r in records}
    removed = min(int((e[malicious] > 0).sum()) for e in last.values())
    rounds = [int(e[malicious].max(initial=0)) if (e[malicious] > 0).all() else None for e in last.values()]
    benign = sorted({int(round_) for e in last.values() for round_ in e[~malicious] if round_ > 0})
    return {
        "adversaries removed": f"{removed} of {malicious.sum()}",
        "benign removed": max(int((e[~malicious] > 0).sum()) for e in last.values()),
        "all out by round": None if None in rounds or not malicious.any() else max(rounds),
        "benign out in rounds": [benign[0], benign[-1]] if benign else None,
    }


@recipe(
    "byzantine_cfl.table2",
    title="Byzantine CFL, table 2: 10 clients, 3 of them hostile",
    full=_FULL | {"clients": 10},
    small=_SMALL | {"examples_per_client": 600},
)
@recipe(
    "byzantine_cfl.table1",
    title="Byzantine CFL, table 1 and figure 2: 100 clients, 30 of them hostile",
    full=_FULL | {"clients": 100},
    small=_SMALL | {"examples_per_client": 100},
)
def table(bench: Bench, setting: dict[str, Any]) -> Outcome:
    """Accuracies of FL and CFL in the four scenarios; α_cross per round as in figure 2."""
    check_choice("inputs", setting["inputs"], ["text", "code"])
    keys = list(product(setting["datasets"], setting["scenarios"], setting["methods"]))
    cells = [
        report.Cell(
            dict(zip(("data", "scenario", "method"), key, strict=True)),
            cell_config(setting, *key),
            {"paper %": of_paper(setting["clients"], *key)},
        )
        for key in keys
    ]
    rows, runs = report.run_cells(bench, cells)
    seen = {}
    for key, cell, row, records in zip(keys, cells, rows, runs, strict=True):
        if key[2] == "CFL":
            row |= removals(cell.config, records)
            seen[key[:2]] = records, malicious_clients(cell.config)
    notes = "" if setting["rounds"] == 200 else f"after {setting['rounds']} rounds; the paper's accuracies after 200"
    return Outcome(rows, _figure_2(setting["datasets"], setting["scenarios"], seen), notes)


def _figure_2(
    datasets: list[str], scenarios: list[str], seen: dict[tuple[str, str], tuple[report.Records, np.ndarray]]
) -> plots.Figure:
    """α_cross over the rounds of CFL; green: so many adversaries are separated, red: benign clients."""
    figure, grid = report.panels(3.6 * len(scenarios), 2.8 * len(datasets), len(datasets), len(scenarios))
    for axes, (dataset, scenario) in zip(grid.flat, product(datasets, scenarios), strict=True):
        axes.set_title(f"{dataset}, {scenario}", fontsize=9)
        if (dataset, scenario) not in seen:
            continue
        records, malicious = seen[dataset, scenario]
        first = report.first_seed(records)
        report.plot_metric(axes, first, "cross_similarity", slot=0, lw=1)
        axes.axhline(0.02, color="0.5", lw=1, ls="--")
        excluded = np.array(first[-1]["excluded"])
        for when in np.unique(excluded[excluded > 0]):
            these = excluded == when
            axes.axvline(when, color=RED if (these & ~malicious).any() else GREEN, lw=1, alpha=0.6)
            if these.sum() > 1:
                axes.annotate(str(these.sum()), (when, 0.02), fontsize=8)
    for axes in grid[:, 0]:
        axes.set_ylabel(r"$\alpha_{cross}$")
    for axes in grid[-1]:
        axes.set_xlabel("round")
    return figure
