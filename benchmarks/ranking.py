"""The tables of docs/ranking.md, from a folder of `jfcl shifts`.

jfcl shifts --quick --out runs/quick     # 18 minutes on 2 busy cores
python benchmarks/ranking.py runs/quick  # writes results/ranking-quick-{known,auto}.json and the runs, a CSV file
python benchmarks/tables.py              # writes the tables into the page
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from common import RESULTS, print_table

from jfcl.core import files
from jfcl.experiments.shift_results import Ranks, rank, read_cells


def rows_of(ranks: Ranks) -> list[dict[str, Any]]:
    """A row for each method, the best first: its accuracy on each setting, mean rank with interval, and costs."""
    rows = []
    for i, method in enumerate(ranks.rows):
        cells = {shift: ranks.cells[(data, shift, strength), method] for data, shift, strength in ranks.columns}
        row = {"method": method} | {shift: cell.text.replace("±", " ± ") for shift, cell in cells.items()}
        if i < len(ranks.methods):
            row["mean_rank"] = f"{ranks.mean[i]:.1f} ({ranks.low[i]:.1f} to {ranks.high[i]:.1f})"
            row["s_a_run"] = round(ranks.over_settings("seconds")[i], 1)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what jfcl shifts has left")
    parser.add_argument("--name", default="quick", help="of the files [quick]")
    args = parser.parse_args()
    about = files.read_json(args.folder / "settings.json")
    about = {name: about[name] for name in ("device", "versions", "setting")}
    for ranks in rank(read_cells(args.folder)):
        rows = rows_of(ranks)
        print_table(f"number of clusters: {ranks.mode}", [*rows[0]], rows, width=200)
        content = {"command": f"jfcl shifts --{args.name}", **about, "rows": rows}
        (RESULTS / f"ranking-{args.name}-{ranks.mode}.json").write_text(json.dumps(content, indent=1) + "\n")
    shutil.copyfile(args.folder / "runs.csv", RESULTS / f"ranking-{args.name}.csv")


if __name__ == "__main__":
    main()
