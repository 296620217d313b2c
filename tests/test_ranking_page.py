"""The findings of docs/ranking.md hold in the runs that it is made from."""

import csv
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def accuracies() -> dict[tuple[str, str, str], float]:
    """The mean accuracy of each method, mode and shift."""
    found = defaultdict(list)
    with (ROOT / "benchmarks" / "results" / "ranking-quick.csv").open() as file:
        for row in csv.DictReader(file):
            found[row["method"], row["clusters"], row["shift"]].append(100 * float(row["accuracy"]))
    return {key: sum(values) / len(values) for key, values in found.items()}


def test_the_findings_hold_in_the_runs():
    found = accuracies()
    renamed = {key[:2]: value for key, value in found.items() if key[2] == "label_permutation"}
    corrupted = {key[:2]: value for key, value in found.items() if key[2] == "corruption"}
    fedavg, local, oracle = (renamed[name, ""] for name in ("fedavg", "local", "oracle"))
    assert len({method for method, _, _ in found}) == 12 and max(fedavg, local) < 0.7 * oracle
    assert sum(value > 80 for (_, mode), value in renamed.items() if mode == "known") == 5
    assert max(corrupted, key=corrupted.get) == ("pacfl", "known")
    assert corrupted["pacfl", "known"] > corrupted["fedavg", ""] > corrupted["oracle", ""]
    assert sum(value < renamed["pacfl", "known"] for (_, mode), value in renamed.items() if mode != "auto") == 1
    assert renamed["flhc", "known"] - renamed["flhc", "auto"] > 30
    assert renamed["cfl", "auto"] > 1.5 * renamed["flhc", "auto"]


def test_the_figures_of_the_findings_are_those_of_the_runs():
    """Every percentage in the text is the mean of some cell."""
    text = (ROOT / "docs" / "ranking.md").read_text()
    means = {f"{value:.1f}" for value in accuracies().values()}
    said = re.findall(r"(\d+\.\d) (?:to \d+\.\d )?%", text[text.index("## What was found") :])
    assert len(said) > 5 and {*said} <= means
