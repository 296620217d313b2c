"""Writes tables from benchmarks/results/, so that their figures are the measured ones.

    python benchmarks/tables.py

They are those of benchmarks/README.md, and of docs/reproduction/, where a row is a cell of a paper's table.
A table stands behind a line `<!-- NAME -->`, its JSON file without the ending, and an empty line; another ends it, and
versions and device follow.
PAGES says which columns it shows.
"""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

from common import RESULTS, ROOT, cell

TABLES = {
    "against-peers-cpu-2-cores": "job library seconds ms_a_client_step times_ours first_round accuracy",
    "models-cpu-2-cores": "model what seconds client_steps/s gflops compile_seconds temporary_mb",
    "cnn-cpu-2-cores": "layer pass ms share_of_step gflops share_of_peak floor_ms pytorch_ms",
    "population-cpu-2-cores": "case what seconds us_per_client ratio client_steps/s anonymous_mb store_mb",
    "kernels-cpu-2-cores": "kernel size what seconds times gflops gb/s temporary_mb",
    "kernels-convolution-cpu-2-cores": "kernel size what seconds times gflops",
    "precision-cpu-2-cores": "case products accuracy spread difference same_cluster",
    "cfl-round-cpu-2-cores": "clients parameters what seconds share_of_training gflops memory_mb updates_mb",
    "bench-cpu-2-cores": "method model mapping clients seconds client_steps/s temporary_mb",
    "checkpoint-cpu-2-cores": "what gb seconds fastest slowest gb/s speed_of_plain_write",
    "gpu-nvidia-h200": "row what mapping ms times_best_peer compile_seconds temporaries_gb",
    "measured-nvidia-h100-80gb-hbm3": "case mapping measured_ms compile_seconds",
    "targets": "case target mapping ms mfu temporaries_gb collectives sent_mb steps",
    "federated-clustering-cpu-2-cores": "clients what seconds us_per_pair gflops peak_mb times_torch",
}

AGREES, IN_PART = "agrees", "agrees in part"
BYZANTINE = "method data scenario seeds paper_% ours_% difference device verdict"
BOTH = ("mnist", "fashion_mnist")
SCENARIOS = ("byzantine", "noisy", "label flip", "clean")

# Tables of a paper: the columns, whose first ones order the rows, the files after the first, and the verdict of each
# item of the reproduction, `(which rows, verdict)`. The first row of an item shows its verdict.
CELLS: dict[str, dict[str, Any]] = {
    "reproduce/byzantine_cfl.table1-200-rounds": {
        "columns": BYZANTINE,
        "verdicts": [
            *[({"method": "CFL", "data": data, "scenario": of}, AGREES) for data in BOTH for of in SCENARIOS],
            ({"method": "FL", "data": "mnist"}, IN_PART),
            ({"method": "FL", "data": "fashion_mnist"}, AGREES),
        ],
    },
    "reproduce/byzantine_cfl.table1-200-rounds-inputs-of-the-code": {"columns": BYZANTINE},
    "reproduce/byzantine_cfl.table1-cifar10-printed": {
        "columns": BYZANTINE.replace(" seeds", ""),
        "verdicts": [({}, IN_PART)],
    },
    "reproduce/byzantine_cfl.table2-200-rounds": {
        "columns": BYZANTINE,
        "verdicts": [
            *[({"method": "CFL", "data": data}, IN_PART) for data in BOTH],
            *[({"method": "FL", "data": data}, AGREES) for data in BOTH],
        ],
    },
    "reproduce/ifca.table1-5-seeds": {
        "columns": "data method seeds paper_% ours_% difference device verdict",
        "with": ["reproduce/ifca.table1-4800-clients"],
        "verdicts": [({"data": f"mnist {size}"}, AGREES) for size in ("1200 x 200", "2400 x 100", "4800 x 50")],
    },
    "reproduce/federated_clustering.table1-cells": {
        "columns": "column task method seeds paper_% ours_% difference device verdict",
        "verdicts": [
            ({"column": "as the authors' code", "task": task}, IN_PART) for task in ("rotation", "private label")
        ],
    },
}
NAMES = {  # how the pages call what the files hold
    "mnist": "MNIST",
    "fashion_mnist": "Fashion-MNIST",
    "cifar10": "CIFAR-10",
    "digits_conditions": "Digits with hostile clients, drift and wrong numbers",
    "mnist_conditions": "MNIST with hostile clients, drift and wrong numbers",
    "byzantine": "Byzantine",
    "FL": "FedAvg",
    "fedavg": "global",
    "oracle": "ground truth",
    "local": "local",
    "ifca": "IFCA",
    "ditto": "Ditto",
    "knn_per": "kNN-Per",
    "federated_clustering": "Federated-Clustering",
    "mnist 1200 x 200": "1,200 × 200",
    "mnist 2400 x 100": "2,400 × 100",
    "mnist 4800 x 50": "4,800 × 50",
}
HEADERS = {"times_ours": "time, jfcl = 1", "times_torch": "speed, PyTorch = 1", "ms_a_client_step": "ms per step"}
TEXTS_OF_NUMBERS = {"ours_%", "paper_%", "difference"}
REPRODUCTION = ROOT.parent / "docs" / "reproduction"
PAGES = {ROOT / "README.md": TABLES}
PAGES |= {page: {name: of["columns"] for name, of in CELLS.items()} for page in sorted(REPRODUCTION.glob("*.md"))}


def cells_of(name: str) -> list[dict[str, Any]]:
    """The rows of a table of a paper in their order, beside the paper and with their verdicts."""
    columns, verdicts = CELLS[name]["columns"].split(), CELLS[name].get("verdicts", [])
    rows: list[dict[str, Any]] = []
    for file in (name, *CELLS[name].get("with", ())):
        result = json.loads((RESULTS / f"{file}.json").read_text())
        rows += [beside_the_paper(row, result["device"]) for row in result["rows"]]
    first = [c for c in columns[:3] if c != "seeds"]
    seen: dict[str, list[Any]] = {}  # values of a column in the order in which they come
    for row in rows:
        for column in first:
            if row[column] not in seen.setdefault(column, []):
                seen[column].append(row[column])
    rows.sort(key=lambda row: [seen[column].index(row[column]) for column in first])
    shown = set()
    for row in rows:
        item = next((i for i, (where, _) in enumerate(verdicts) if where.items() <= row.items()), None)
        row["of"] = None if item is None else verdicts[item][1]
        row["verdict"] = None if item in shown else row["of"]
        shown.add(item)
    return [row | {column: NAMES.get(row[column], row[column]) for column in first} for row in rows]


def beside_the_paper(row: dict[str, Any], device: str) -> dict[str, Any]:
    """The row of a cell of a paper's table, with our mean and deviation, and the difference of the mean.

    `device` is that of seeds without a device of their own.
    """
    ours = row.get("clients %", row.get("accuracy %"))
    seeds = row["seeds"] if isinstance(row["seeds"], int) else len(row["seeds"])
    spread = f" ± {row['std']:.2f}" if seeds > 1 else ""
    paper, devices = row.get("paper %"), [_short(d) for d in row.get("device by seed", [device] * seeds)]
    return row | {
        "seeds": seeds,
        "ours_%": f"{ours:.2f}{spread}",
        "paper_%": None if paper is None else f"{paper:.2f}".removesuffix("0"),
        "difference": None if paper is None else f"{round(ours - paper, 1) + 0.0:+.1f}".replace("-", "−"),
        "device": ", ".join(dict.fromkeys(devices)),
    }


def _short(device: str) -> str:
    """`"CPU"` of `"1 x CPU, 2 cores"`, `"H100"` of `"1 x NVIDIA H100 80GB HBM3"`."""
    return "CPU" if "CPU" in device else device.partition(" x ")[2].removeprefix("NVIDIA ").split()[0]


def table(rows: list[dict[str, Any]], columns: list[str]) -> str:
    """Markdown; names to the left, numbers to the right. Rows that nobody measured are left out."""
    numbers = TEXTS_OF_NUMBERS | {c for c in columns if any(isinstance(row.get(c), float) for row in rows)}
    rows = [row for row in rows if any(row.get(c) is not None for c in columns if c in numbers)]
    shown = [c for c in columns if any(row.get(c) is not None for row in rows)]
    lines = [[HEADERS.get(c, c.replace("_", " ")) for c in shown], ["---:" if c in numbers else "---" for c in shown]]
    lines += [["" if row.get(c) is None else cell(row[c]) for c in shown] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def filled(text: str, tables: dict[str, str]) -> str:
    """`text` with every table whose results exist written anew."""
    for name, columns in tables.items():
        path = RESULTS / f"{name}.json"
        if path.exists() and f"<!-- {name} -->" in text:
            result = json.loads(path.read_text())
            rows = cells_of(name) if name in CELLS else result["rows"]
            body = f"<!-- {name} -->\n\n{table(rows, columns.split())}\n\n"
            if name not in CELLS:  # whose devices are a column
                made = [f"{part} {result['versions'][part]}" for part in ("jfcl", "jax")]
                body += f"*{', '.join([*made, *filter(None, [result.get('device')])])}*\n\n"
            old = rf"<!-- {re.escape(name)} -->\n\n((\|[^\n]*\n)+\n?)?(\*jfcl [^\n]*\*\n\n)?"
            text = re.sub(old, lambda _, body=body: body, text)
    return text


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for path, tables in PAGES.items():
        path.write_text(filled(path.read_text(), tables))


if __name__ == "__main__":
    main()
