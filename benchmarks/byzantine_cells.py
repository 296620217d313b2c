"""Adds finished runs to the cells of Byzantine CFL's tables, benchmarks/results/reproduce/byzantine_cfl.table*.json.

    python benchmarks/byzantine_cells.py RUN...

RUN is the folder of some seeds of one cell: one of `python -m benchmarks.papers byzantine_cfl.table1 --full`, or of
`table2`, with any number of rounds, or one of `jfcl run byzantine_cfl` or `jfcl run fedavg` with the options of the
cell. Seeds are added in their order, 0 first; those that are in the table stay as they are. A run of another setting,
one that has not ended, and one without the next seed are refused. A clean run of CFL that excludes no client is FL to
the bit, and counts as both.
`python benchmarks/tables.py` then writes the pages.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from common import RESULTS

from benchmarks.papers import report
from benchmarks.papers.byzantine_cfl import METHODS, MODELS, PAPER, SCENARIOS, cell_config, of_paper, removals
from benchmarks.papers.recipes import RECIPES
from jfcl.experiments.config import to_saved
from jfcl.experiments.results import read_run

TABLES = {100: "byzantine_cfl.table1", 10: "byzantine_cfl.table2"}
FREE = ("given", "seed", "eval_every", "num_rounds", "precision")  # a run of a cell may have any
CURVE = 20  # rounds between two accuracies of the first seed that are kept


def cell_of(saved: dict[str, Any]) -> tuple[str, str, str]:
    """`(data, scenario, method)` of a run's `config.json`, whose options must be those of the cell."""
    if saved["clients"] not in TABLES:
        raise ValueError(f"clients: {saved['clients']}; the tables have {', '.join(map(str, TABLES))}")
    [method] = [name for name, of in METHODS.items() if of == saved["method"]]
    [scenario] = [name for name, attack in SCENARIOS.items() if attack == saved["attack"]]
    setting = RECIPES[TABLES[saved["clients"]]].full | {"seeds": 1, "inputs": _inputs(saved)}
    wanted = to_saved(cell_config(setting, saved["dataset"], scenario, method), saved["split_hash"])
    differ = [k for k, v in wanted.items() if k not in FREE and k in saved and saved[k] != v]
    if differ:
        raise ValueError(f"other options than the table's: {', '.join(f'{k} {saved[k]}' for k in differ)}")
    return saved["dataset"], scenario, method


def _inputs(saved: dict[str, Any]) -> str:
    return "text" if saved["model"] == MODELS[saved["dataset"]]["model"] else "code"


def add(run: str | Path) -> Path:
    """Adds the seeds of a run that its cell does not have, and returns the file."""
    config = json.loads((Path(run) / "config.json").read_text())
    data, scenario, method = cell_of(config)
    summary, records = read_run(run)
    name, rounds = TABLES[config["clients"]], summary["num_rounds"]
    suffix = "-inputs-of-the-code" if _inputs(config) == "code" else ""
    path = RESULTS / "reproduce" / f"{name}-{rounds}-rounds{suffix}.json"
    fewer = f", {rounds} of the paper's 200 rounds" if rounds != 200 else ""
    table = json.loads(path.read_text()) if path.exists() else {"name": name, "title": RECIPES[name].title + fewer}
    device = table.get("device", summary["device"])  # that of seeds for which none is noted
    where = {"rows": table.setdefault("rows", []), "clients": config["clients"], "rounds": rounds, "device": device}
    row, added = _row(key={"data": data, "scenario": scenario, "method": method}, **where), False
    next_seed, alone = row["seeds"], _ran_alone(Path(run))
    for of_seed in summary["per_seed"]:
        mine = [r for r in records if r["seed"] == of_seed["seed"]]
        found = removals(cell_config(RECIPES[name].full, data, scenario, method), mine) if method == "CFL" else None
        new = {
            "accuracy %": 100 * of_seed["accuracy"],
            "seconds": round(summary["seconds"] / len(summary["per_seed"])) if alone else None,
            "device": summary["device"],
            "products": config["precision"],
        }
        added |= _add_seed(row, of_seed["seed"], new, mine, found)
        if scenario == "clean" and found and not found["benign removed"]:
            fl = _row(key={"data": data, "scenario": scenario, "method": "FL"}, **where)
            added |= _add_seed(fl, of_seed["seed"], new | {"seconds": None}, mine, None)
    if not added:
        seeds = ", ".join(str(one["seed"]) for one in summary["per_seed"])
        raise ValueError(f"{run}: seed {seeds} of {data}, {scenario}, {method}; next is {next_seed}")
    datasets = json.dumps(["mnist", "fashion_mnist"])
    options = f"--full --set 'datasets={datasets}' --rounds {rounds} --set inputs={_inputs(config)}"
    command = f"python -m benchmarks.papers {name} {options}"
    table = {"device": summary["device"], "versions": summary["versions"], "command": command} | table
    table.setdefault("versions by device", {table["device"]: table["versions"]})
    table["versions by device"].setdefault(summary["device"], summary["versions"])
    table["rows"] = [r for r in table["rows"] if r["seeds"]]  # none of FL where CFL excludes a client in the first seed
    path.write_text(json.dumps(table, indent=1) + "\n")
    return path


def _ran_alone(run: Path) -> bool:
    """Returns whether the run was not one of several jobs of an experiment, whose seconds say little."""
    result = run.parent / "result.json"
    return not result.exists() or json.loads(result.read_text()).get("jobs", 1) == 1


def _add_seed(
    row: dict[str, Any], seed: int, new: dict[str, Any], records: list[dict[str, Any]], found: dict[str, Any] | None
) -> bool:
    """Adds a seed to the row of its cell if it is the next one there; `found` are the `removals` of CFL."""
    if seed != row["seeds"]:
        return False
    for name, value in new.items():
        row[f"{name} by seed"].append(value)
    row |= report.mean_and_std(row["accuracy % by seed"]) | {"seeds": seed + 1}
    if found:
        _add_removals(row, found)
    if seed == 0:
        kept = [r for r in records if r["round"] % min(CURVE, row["rounds"] // 4) == 0]
        row["accuracy % by round"] = {str(r["round"]): round(100 * r["accuracy"], 2) for r in kept}
    return True


def _row(rows: list[dict[str, Any]], key: dict[str, str], clients: int, rounds: int, device: str) -> dict[str, Any]:
    """The row of a cell; a new one is put at its place in the order of the paper's tables.

    `device` is that of seeds for which none is noted.
    """
    data, scenario, method = key.values()
    for row in rows:
        if row | key == row:
            row.setdefault("device by seed", [device] * row["seeds"])  # rows of one device have none,
            row.setdefault("products by seed", ["float32"] * row["seeds"])  # and are of a CPU
            return row
    row = key | {"rounds": rounds, "seeds": 0, "accuracy %": None, "std": None}
    row |= {"paper %": of_paper(clients, data, scenario, method)}
    row |= {"accuracy % by seed": [], "seconds by seed": [], "device by seed": [], "products by seed": []}
    rows.append(row)
    order = [list(PAPER[clients]), list(SCENARIOS), list(METHODS)[::-1]]
    rows.sort(key=lambda r: [of.index(r[k]) for of, k in zip(order, key, strict=True)])
    return row


def _add_removals(row: dict[str, Any], new: dict[str, Any]) -> None:
    """Over all seeds: the fewest adversaries removed, the most benign clients; and their rounds."""
    if row["seeds"] == 1:
        row |= new
        return
    rounds = [row["all out by round"], new["all out by round"]]
    row["adversaries removed"] = min(row["adversaries removed"], new["adversaries removed"], key=_count)
    row["benign removed"] = max(row["benign removed"], new["benign removed"])
    row["all out by round"] = None if None in rounds else max(rounds)
    spans = [span for span in (row.get("benign out in rounds"), new["benign out in rounds"]) if span]
    row["benign out in rounds"] = [min(a for a, _ in spans), max(b for _, b in spans)] if spans else None


def _count(removed: str) -> int:
    return int(removed.split(" ")[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="+", help="the folder of some seeds of one cell")
    for run in parser.parse_args().run:
        print(f"added to {add(run)}")


if __name__ == "__main__":
    main()
