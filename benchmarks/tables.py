"""Writes the tables of benchmarks/README.md from benchmarks/results/*.json, so that its figures are the measured ones.

    python benchmarks/tables.py

A table stands behind a line `<!-- NAME -->`, the stem of its JSON file, and an empty one; another empty line ends it.
TABLES says which columns it shows.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
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
    "targets": "case target mapping ms mfu temporaries_gb collectives sent_mb steps",
    "federated-clustering-cpu-2-cores": "clients what seconds us_per_pair gflops peak_mb times_torch",
}


def table(rows: list[dict[str, Any]], columns: list[str]) -> str:
    """Markdown; names to the left, numbers to the right. Rows that nobody measured are left out."""
    rows = [row for row in rows if any(isinstance(row.get(c), float) for c in columns)]
    shown = [c for c in columns if any(row.get(c) is not None for row in rows)]
    numbers = {c for c in shown if any(isinstance(row.get(c), float) for row in rows)}
    lines = [[c.replace("_", " ") for c in shown], ["---:" if c in numbers else "---" for c in shown]]
    lines += [["" if row.get(c) is None else cell(row[c]) for c in shown] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def filled(text: str) -> str:
    """`text` with every table whose results exist written anew."""
    for name, columns in TABLES.items():
        path = RESULTS / f"{name}.json"
        if path.exists() and f"<!-- {name} -->" in text:
            found = json.loads(path.read_text())
            body = f"<!-- {name} -->\n\n{table(found['rows'], columns.split())}\n\n"
            text = re.sub(rf"<!-- {re.escape(name)} -->\n\n((\|[^\n]*\n)+\n?)?", lambda _, body=body: body, text)
    return text


def main() -> None:
    path = Path(ROOT / "README.md")
    path.write_text(filled(path.read_text()))


if __name__ == "__main__":
    main()
