"""Writes tables from benchmarks/results/, so that their figures are the measured ones.

    python benchmarks/tables.py

They are those of benchmarks/README.md, and of docs/reproduction/tables.md, where a row is a cell of a paper's table.
A table stands behind a line `<!-- NAME -->`, its JSON file without the ending, and an empty line; another ends it.
PAGES says which columns it shows.
"""

from __future__ import annotations

import json
import re
from typing import Any

from common import RESULTS, ROOT, cell

TABLES = {
    "against-peers-cpu-2-cores": "job library seconds ms_a_client_step times_ours first_round accuracy",
    "against-peers-cnn-cpu-2-cores": "job library seconds ms_a_client_step times_ours first_round accuracy",
    "rounds-cpu-2-cores": "case what seconds client_steps/s gflops times_torch compile_seconds temporary_mb",
    "models-cpu-2-cores": "model what seconds client_steps/s gflops compile_seconds temporary_mb",
    "population-cpu-2-cores": "case what seconds us_per_client ratio client_steps/s anonymous_mb store_mb",
    "kernels-cpu-2-cores": "kernel size what seconds times gflops gb/s temporary_mb",
    "kernels-convolution-cpu-2-cores": "kernel size what seconds times gflops",
    "precision-cpu-2-cores": "case products accuracy spread same_cluster",
    "cfl-round-cpu-2-cores": "clients parameters what seconds share_of_training gflops memory_mb updates_mb",
    "bench-cpu-2-cores": "method model mapping clients seconds client_steps/s peak temporary_mb",
    "checkpoint-cpu-2-cores": "what gb seconds fastest slowest gb/s speed_of_plain_write",
    "gpu-nvidia-h200": "row what mapping ms times_best_peer compile_seconds temporaries_gb",
    "measured-nvidia-h100-80gb-hbm3": "case mapping measured_ms compile_seconds",
    "targets": "case target mapping ms mfu temporaries_gb collectives sent_mb steps",
    "federated-clustering-cpu-2-cores": "clients what seconds us_per_pair gflops peak_mb times_torch",
}

CELLS = {
    "reproduce/byzantine_cfl.table1-200-rounds": "data scenario method rounds",
    "reproduce/byzantine_cfl.table1-200-rounds-inputs-of-the-code": "data scenario method rounds",
    "reproduce/byzantine_cfl.table2-200-rounds": "data scenario method rounds",
    "reproduce/ifca.table1-5-seeds": "data method rounds",
    "reproduce/ifca.table1-4800-clients": "data method rounds",
    "reproduce/federated_clustering.table1-cells": "task column method",
}
BESIDE_THE_PAPER = " seeds ours_% paper_% difference device seconds_a_run"
TEXTS_OF_NUMBERS = {"ours_%", "paper_%", "difference", "seconds_a_run"}
PAGES = {
    ROOT / "README.md": TABLES,
    ROOT.parent / "docs" / "reproduction" / "tables.md": {name: of + BESIDE_THE_PAPER for name, of in CELLS.items()},
}


def beside_the_paper(row: dict[str, Any], device: str) -> dict[str, Any]:
    """The row of a cell of a paper's table, with our mean and deviation, and the difference of the mean.

    `device` is that of seeds without a device of their own. Seconds are means over the seeds of a device.
    """
    ours = row.get("clients %", row.get("accuracy %"))
    seeds = row["seeds"] if isinstance(row["seeds"], int) else len(row["seeds"])
    spread = f" ± {row['std']:.2f}" if seeds > 1 else ""
    paper, devices = row.get("paper %"), [_short(d) for d in row.get("device by seed", [device] * seeds)]
    times: dict[str, list[float]] = {}
    for of, seconds in zip(devices, row.get("seconds by seed", []), strict=False):
        if seconds is not None:
            times.setdefault(of, []).append(seconds)
    means = {of: f"{sum(some) / len(some):,.0f}" for of, some in times.items()}
    mixed = len(set(devices)) > 1
    return row | {
        "seeds": seeds,
        "ours_%": f"{ours:.2f}{spread}",
        "paper_%": None if paper is None else f"{paper:g}",
        "difference": None if paper is None else f"{round(ours - paper, 1) + 0.0:+.1f}".replace("-", "−"),
        "device": ", ".join(dict.fromkeys(devices)),
        "seconds_a_run": "; ".join(f"{of} {mean}" if mixed else mean for of, mean in means.items()) or None,
    }


def _short(device: str) -> str:
    """`"CPU"` of `"1 x CPU, 2 cores"`, `"H100"` of `"1 x NVIDIA H100 80GB HBM3"`."""
    return "CPU" if "CPU" in device else device.partition(" x ")[2].removeprefix("NVIDIA ").split()[0]


def table(rows: list[dict[str, Any]], columns: list[str]) -> str:
    """Markdown; names to the left, numbers to the right. Rows that nobody measured are left out."""
    numbers = TEXTS_OF_NUMBERS | {c for c in columns if any(isinstance(row.get(c), float) for row in rows)}
    rows = [row for row in rows if any(row.get(c) is not None for c in columns if c in numbers)]
    shown = [c for c in columns if any(row.get(c) is not None for row in rows)]
    lines = [[c.replace("_", " ") for c in shown], ["---:" if c in numbers else "---" for c in shown]]
    lines += [["" if row.get(c) is None else cell(row[c]) for c in shown] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def filled(text: str, tables: dict[str, str]) -> str:
    """`text` with every table whose results exist written anew."""
    for name, columns in tables.items():
        path = RESULTS / f"{name}.json"
        if path.exists() and f"<!-- {name} -->" in text:
            result = json.loads(path.read_text())
            rows = result["rows"]
            rows = [beside_the_paper(row, result["device"]) for row in rows] if name in CELLS else rows
            body = f"<!-- {name} -->\n\n{table(rows, columns.split())}\n\n"
            text = re.sub(rf"<!-- {re.escape(name)} -->\n\n((\|[^\n]*\n)+\n?)?", lambda _, body=body: body, text)
    return text


def main() -> None:
    for path, tables in PAGES.items():
        path.write_text(filled(path.read_text(), tables))


if __name__ == "__main__":
    main()
