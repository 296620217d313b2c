"""The page and the LaTeX table of a folder of `jfcl shifts`; `templates/shifts.html` is the text of the page."""

import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict

from jfcl._version import __version__
from jfcl.analysis import plots, ranking
from jfcl.core import files
from jfcl.experiments import shift_results
from jfcl.experiments.comparison import number, size_text, tex, tex_table
from jfcl.experiments.report import Figure, Link, Table, figure, template
from jfcl.experiments.shift_results import BOUND, REFERENCES, Ranks, Result, names_of, share_ended, values_of

SHADES = (1, 2, 5, 10, 20)  # percentage points below the best of a column, where the next shade begins
MOST_LINES = 7  # in a picture of curves
PERCENT = partial(number, std=None, digits=1, scale=100)
COSTS = {  # columns of the table of costs: head, text of a value
    "accuracy": ("accuracy %", PERCENT),
    "worst_tenth": ("worst tenth %", PERCENT),
    "newcomers": ("new-\ncomers %", PERCENT),
    "adjusted_rand": ("adjusted Rand", partial(number, std=None, digits=2)),
    "clusters_found": ("clusters found", partial(number, std=None, digits=1)),
    "rounds_to_95": ("rounds to 95 %", partial(number, std=None, digits=1)),
    "bytes_to_95": ("bytes to 95 %", size_text),
    "client_steps": ("client steps", lambda value: "–" if value is None else f"{value:,.0f}"),
    "seconds": ("seconds", partial(number, std=None, digits=2)),
    "joules": ("joules", partial(number, std=None, digits=1)),
}


def write_page(folder: str | Path) -> Path:
    """Writes `index.html` and `table.tex` on the finished cells of `jfcl shifts` in a folder; returns the former.

    The page needs no other file; the table has the methods by shifts for each data set and mode, with the rules of the
    package booktabs. A run without results is in no mean: it is counted beside the figures of the others, and in ranks
    it is below all that have results. Raises `ValueError` for a folder without a finished cell, or with a damaged one.
    """
    folder = Path(folder)
    cells = shift_results.read_cells(folder)
    ranked = shift_results.rank(cells)
    page = template("shifts.html").render(  # it calls the functions below for what it shows
        command="shifts",
        title="Which method for which shift",
        version=__version__,
        page=sys.modules[__name__],
        titles=shift_results.MODES,
        conditions=shift_results.CONDITIONS,
        cells=cells,
        ranked=ranked,
        settings=_flat(files.read_json(folder / "settings.json")),
    )
    files.write_whole(folder / "table.tex", "\n".join(line for ranks in ranked for line in _tex(ranks)).encode())
    files.write_whole(folder / "index.html", f"{page}\n".encode(errors="replace"))
    return folder / "index.html"


# ---------------------------------------------------------------------------------------------------------------
# Tables.


def _heat(name: str, rows: dict[str, list[Result]], base: dict[str, Result | None]) -> Table:
    """Returns a table of accuracies, each shaded by how far it is below the best method of its column.

    Args:
      name: of the table.
      rows: the cells of each row; those of one setting and condition are a column.
      base: by the names of cells, those that they are compared with: the change is shown.
    """
    columns = sorted({(cell.setting, *cell.conditions) for cells in rows.values() for cell in cells})
    tables = [{(cell.setting, *cell.conditions): cell for cell in cells} for cells in rows.values()]
    lines, heads = [[row] for row in rows], []
    for column in columns:
        shift = names_of(column[0])
        heads.append((" ".join(shift), column[1]) if column[1:] else shift[1:])
        best = max((t[column].accuracy for t in tables if column in t and t[column].can_be_best), default=0.0)
        for line, table in zip(lines, tables, strict=True):
            line.append(_shown(table[column], best, base.get(table[column].name)) if column in table else Link("–"))
    groups = [*Counter(group for group, _ in heads).items()]
    return Table(name, ["method", *(head for _, head in heads)], lines, kind="heat", groups=groups)


def _shown(cell: Result, best: float, base: Result | None) -> Link:
    """Returns a cell as it is shown: its accuracy, or why there is none."""
    value = cell.accuracy
    if value is None:
        return Link("cannot" if cell.status == "cannot" else cell.marks.strip(), cell.name, "none")
    change = ""
    if base is not None and base.ended:
        before, now = values_of([base, cell])
        same_clients = np.nanmean(before[:, np.isfinite(now).any(axis=0)])
        change = f" ({100 * (value - same_clients):+z.1f})"
    below = round(100 * (best - value), 4)  # equal ones differ by the order of their sums
    shade, is_best = np.searchsorted(SHADES, below, side="right"), below == 0 and cell.can_be_best
    return Link(f"{100 * value:.1f}{change}{cell.marks}", cell.name, f"g{shade}" + " best" * is_best)


def heats(ranks: Ranks) -> dict[str, Table]:
    """Returns a table of accuracies for each data set."""
    tables = {}
    for data in dict.fromkeys(setting[0] for setting in ranks.columns):
        rows = {m: [cell for cell in ranks.cells.values() if (cell.data, cell.method) == (data, m)] for m in ranks.rows}
        tables[data] = _heat(f"heat-{ranks.mode}-{data}", rows, {})
    return tables


def condition(cells: Sequence[Result], field: str) -> Table | None:
    """Returns the accuracies under one of `CONDITIONS`, with the changes from the cells without it."""
    plain = {(c.setting, c.method, c.clusters): c for c in cells if not c.conditions}
    base, rows = {}, defaultdict(list)
    for cell in (cell for cell in cells if getattr(cell, field)):
        clusters = "known" if field == "wrong_k" else cell.clusters
        rows[cell.method + ", unknown number" * (clusters == "auto")].append(cell)
        base[cell.name] = plain.get((cell.setting, cell.method, clusters))
    return _heat(field, dict(sorted(rows.items())), base) if rows else None


def choices(ranks: Ranks) -> Table:
    """Returns the best method for each shift, and those that are as good within a standard deviation."""
    rows = []
    for problem, scores in zip(ranks.problems, ranks.scores.tolist(), strict=True):
        each = {m: score for m, score in zip(ranks.methods, scores, strict=True) if m != BOUND}
        best = max(each, key=lambda m: each[m], default=BOUND)
        cells = [ranks.cells[s, best] for s in ranks.settings if s[:2] == problem]
        accuracy, std = _over_cells(cells)
        least = each.get(best, 0.0) - (std or 0.0) - 1e-6  # equal ones differ by the order of their sums
        near = [m for m, score in each.items() if m != best and score >= least]
        text = number(accuracy, std, 1, 100) + share_ended(cells)
        rows.append([" ".join(names_of(problem)), best, text, ", ".join(near) or "–"])
    heads = ["data and shift", "best", "accuracy %", "as good within a standard deviation"]
    return Table(f"choices-{ranks.mode}", heads, rows, kind="text")


def _over_cells(cells: Sequence[Result]) -> tuple[float | None, float | None]:
    """Returns the mean accuracy of cells, and the mean of their standard deviations; None where a cell has none."""
    columns = [*zip(*(cell.over_seeds("accuracy") for cell in cells), strict=True)] or [(None,), (None,)]
    mean, std = (None if None in values else float(np.mean(values)) for values in columns)
    return mean, std


def ranks_table(ranks: Ranks) -> Table:
    """Returns the table of ranks, with the tests of neighbours."""
    p_values = ranking.neighbours(ranks.scores) if ranks.is_tested else [None] * (len(ranks.methods) - 1)
    after = ["–" if p is None else f"{p:.3g}" for p in p_values]
    columns = zip(ranks.methods, ranks.mean, ranks.low, ranks.high, [*after, ""], strict=True)
    rows = [[method, f"{mean:.2f}", f"{low:.2f} to {high:.2f}", p] for method, mean, low, high, p in columns]
    return Table(f"ranks-{ranks.mode}", ["method", "mean rank", "95 % interval", "p, next"], rows)


def costs(ranks: Ranks) -> dict[str, Any]:
    """Returns the table of costs, the picture of accuracy by cost, and `few`: whether any method has failed runs."""
    methods = ranks.methods
    labels = {m: m + share_ended([ranks.cells[s, m] for s in ranks.settings]) for m in methods}
    columns = {name: ranks.over_settings(name) for name in COSTS}
    columns = {name: values for name, values in columns.items() if values != [None] * len(methods)}
    texts = [[COSTS[name][1](value) for value in values] for name, values in columns.items()]
    rows = [list(row) for row in zip(labels.values(), *texts, strict=True)]
    table = Table(f"costs-{ranks.mode}", ["method", *(COSTS[name][0] for name in columns)], rows)
    # The picture, without the method that nobody can choose.
    chosen = [i for i, method in enumerate(methods) if method != BOUND]
    arrays = {name: np.array(values, float)[chosen] for name, values in columns.items()}
    shown = {COSTS[name][0]: arrays[name] for name in ("bytes_to_95", "client_steps", "seconds") if name in arrays}
    draw = None
    if shown:
        named = {labels[method] for method in REFERENCES if method in labels}
        points = [labels[methods[i]] for i in chosen], shown, 100 * arrays["accuracy"], named
        draw = partial(ranking.plot_costs, *points)
    few = methods != [*labels.values()]
    return {"table": table, "picture": figure(None, f"pareto-{ranks.mode}", draw), "few": few}


def failures(cells: Sequence[Result]) -> Table:
    """Returns how the runs of each method have ended, and a reason of those that have not ended well."""
    rows = []
    for method in sorted({cell.method for cell in cells}):
        of = [cell for cell in cells if cell.method == method]
        runs = [(run, cell) for cell in of for run in cell.runs]
        ends = Counter(run["status"] for run, _ in runs)
        accuracies = [run["accuracy"] for run, _ in runs if run["status"] == "collapsed"]
        of_collapsed = f"{ends['collapsed']} ({PERCENT(np.mean(accuracies))} %)" if accuracies else "0"
        reasons = [Link(str(run["reason"]), cell.name) for run, cell in runs if run["status"] != "ok"]
        cannot = [Link(str(cell.reason), cell.name) for cell in of if cell.status == "cannot"]
        counts = [ends["ok"], of_collapsed, ends["diverged"], ends["failed"], len(cannot)]
        rows.append([method, *counts, next(iter(reasons + cannot), Link(""))])
    heads = ["method", "ended well", "collapsed (their accuracy)", *shift_results.STATUSES[2:], "cells that cannot run"]
    return Table("failures", [*heads, "first reason"], rows, kind="reasons")


def below_default(cells: Sequence[Result]) -> tuple[int, Table | None]:
    """Returns how many cells have a figure at the defaults, and those where tuning is a standard deviation worse."""
    known = [cell for cell in cells if cell.default and cell.default["accuracy"] is not None]
    rows = []
    for cell in known:
        (tuned, std), default = cell.over_seeds("accuracy"), cell.default["accuracy"]
        if not cell.is_default and (tuned is None or tuned < default - (std or 0)):
            rows.append([cell.title, Link(cell.text, cell.name), PERCENT(default)])
    return len(known), Table("below-default", ["cell", "tuned %", "default %"], rows) if rows else None


# ---------------------------------------------------------------------------------------------------------------
# Figures and texts.


def intervals(ranks: Ranks) -> Figure | None:
    """Returns the picture of the mean ranks."""
    draw = partial(ranking.plot_ranks, ranks.methods, ranks.mean, ranks.low, ranks.high)
    return figure(None, f"intervals-{ranks.mode}", draw)


def difference(ranks: Ranks) -> Figure | None:
    """Returns the critical-difference diagram."""
    order = np.argsort(ranks.tested, kind="stable")
    names = [ranks.methods[i] for i in order]
    draw = partial(ranking.plot_difference, names, ranks.tested[order], ranks.difference)
    return figure(None, f"difference-{ranks.mode}", draw)


def curves(cells: Sequence[Result], ranks: Ranks) -> list[Figure | None]:
    """Returns the accuracy over rounds of each shift at its largest strength, and under drift, of the best methods."""
    others = [m for m in ranks.rows if m not in REFERENCES][: MOST_LINES - len(REFERENCES)]
    lines = [m for m in ranks.rows if m in REFERENCES or m in others]
    panels, drawn = defaultdict(list), []
    for cell in cells:
        if (cell.drift or not cell.conditions) and cell.clusters in (ranks.mode, "") and cell.method in lines:
            panels[cell.data, cell.shift, cell.drift or ""].append(cell)
    for key, panel in sorted(panels.items()):
        largest = max(cell.strength for cell in panel)
        of = {cell.method: cell for cell in panel if cell.strength == largest}
        each = {
            plots.label(m + share_ended([of[m]])): [
                {"seed": r["seed"], "round": t, "accuracy": a} for r in of[m].ended for t, a in r["curve"]
            ]
            for m in lines
            if m in of and of[m].ended
        }
        first = next(iter(of.values()))
        caption = f"{' '.join([*names_of(first.setting), *first.conditions])}: mean over seeds, and their range."
        drawn.append(figure(None, "-".join(["curves", *key]), partial(plots.curves, each) if each else None, caption))
    return drawn


def findings(ranks: Ranks) -> dict[str, Any]:
    """Returns what the sentences on the ranks say; `best` is the place of the first method that can be chosen."""
    methods, problems, mean_of = ranks.methods, len(ranks.problems), dict(zip(ranks.methods, ranks.mean, strict=True))
    best = next((i for i, method in enumerate(methods) if method != BOUND), None)
    tied = [m for i, m in enumerate(methods) if i != best and m != BOUND and mean_of[m] == ranks.mean[best]]
    below = {m: [other for other in methods if mean_of[other] > mean_of[m]] for m in REFERENCES[:2] if m in methods}
    facts = {"best": best, "tied": tied, "below": below, "left_out": ranks.rows[len(methods) :]}
    if best is None or not ranks.is_tested:
        return facts
    can = [i for i, method in enumerate(methods) if method != BOUND]
    facts["leader"] = min(can, key=lambda i: ranks.tested[i])
    pairs, near = ranking.neighbours(ranks.scores), np.abs(ranks.tested - ranks.tested[best]) < ranks.difference
    facts["near"] = [m for i, m in enumerate(methods) if near[i] and i != best]
    others = ranks.scores[:, [method not in (BOUND, "local") for method in methods]]
    if others.shape[1] > 1:
        facts["p_others"] = ranking.friedman(ranking.ranks(others).mean(axis=0), problems)[1]
    facts |= {"p": ranking.friedman(ranks.tested, problems)[1], "told": sum(p < ranking.LEVEL for p in pairs)}
    return facts | {"least": 2.0 ** (1 - problems), "too_few": 2.0 ** (1 - problems) * len(pairs) >= ranking.LEVEL}


# ---------------------------------------------------------------------------------------------------------------
# Settings, and the table for LaTeX.


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns settings without those inside others, which get both names, and with lists as texts."""
    others = {name: value for name, value in settings.items() if name not in ("format", "setting", "sha256")}
    flat = flatten_dict(settings.get("setting", {}) | others, sep=" ")
    return {name: ", ".join(map(str, value)) if isinstance(value, list) else value for name, value in flat.items()}


def _tex(ranks: Ranks) -> list[str]:
    """Returns the lines of a table for each data set: mean accuracy over strengths, and the mean rank."""
    lines, mode = [], shift_results.MODES[ranks.mode]
    rank_of = {m: f"{r:.2f}" for m, r in zip(ranks.methods, ranks.mean, strict=True)}
    for data in dict.fromkeys(setting[0] for setting in ranks.columns):
        heads, columns = ["method"], [[tex(method) for method in ranks.rows]]
        for shift in dict.fromkeys(setting[1] for setting in ranks.columns if setting[0] == data):
            settings = [setting for setting in ranks.columns if setting[:2] == (data, shift)]
            cells = {m: [ranks.cells[s, m] for s in settings if (s, m) in ranks.cells] for m in ranks.rows}
            means = {m: _over_cells(of if len(of) == len(settings) else ()) for m, of in cells.items()}
            whole = {m for m in cells if means[m][0] is not None and all(cell.can_be_best for cell in cells[m])}
            best, texts = max((means[m][0] for m in whole), default=None), []
            for method, of in cells.items():
                text, share = tex(number(*means[method], 1, 100)), share_ended(of).strip()
                is_best = method in whole and round(best - means[method][0], 6) == 0
                texts.append((rf"\textbf{{{text}}}" if is_best else text) + f" ({share})" * bool(share))
            heads.append(tex(shift.replace("_", " ")))
            columns.append(texts)
        rows = zip(*columns, (rank_of.get(m, "--") for m in ranks.rows), strict=True)
        comments = [
            f"{tex(data)}, {mode}: accuracy in % and its standard deviation over seeds, means over",
            "strengths; in brackets the runs with results, where some have none; mean ranks are over all data.",
            r"Needs \usepackage{booktabs}.",
        ]
        lines += tex_table(comments, [*heads, "mean rank"], rows)
    return lines
