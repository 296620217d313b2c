"""docs/ranking.md from folders of `jfcl shifts`: a section for each, with tables and findings written from its runs.

    jfcl shifts --quick --out runs/quick     # 4 minutes on 2 cores
    python benchmarks/ranking.py runs/quick  # may be called again, with more cells, or with other folders

A ranking has the name of its folder. The call writes results/ranking-NAME.json, the page, the runs, the settings and
the table for LaTeX into docs/_static/ranking/NAME, and docs/ranking.md with all rankings that are there.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import shutil
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, ROOT
from tables import NAMES

from jfcl.core import files
from jfcl.core.names import flag_of
from jfcl.experiments.comparison import number
from jfcl.experiments.shift_cells import DRIFT_STEPS
from jfcl.experiments.shift_results import (
    BOUND,
    CONDITIONS,
    MODES,
    REFERENCES,
    STATUSES,
    Ranks,
    Result,
    digest_of,
    names_of,
    rank,
    read_cells,
)
from jfcl.experiments.shifts import cells_of, merge
from jfcl.experiments.shifts_page import choices

Row = dict[str, Any]
DOCS = ROOT.parent / "docs"
PUBLISHED = DOCS / "_static" / "ranking"
FIRST = ("method", "mean rank")  # columns
COPIED = ("index.html", "runs.csv", "settings.json", "table.tex")
MARKS = "<!-- written by benchmarks/ranking.py -->", "<!-- until here -->"
WHOLE = {"break_long_words": False, "break_on_hyphens": False}
NEAR = 0.02  # accuracies that are no further apart are near each other


# ---------------------------------------------------------------------------------------------------------------
# Tables.


def table_of(ranks: Ranks) -> list[Row]:
    """A row for each method, the best first: its accuracy under each shift, its mean rank with an interval, seconds."""
    rows, problems = [], list(dict.fromkeys(setting[:2] for setting in ranks.columns))
    alone = len({data for data, _ in problems}) == 1
    for i, method in enumerate(ranks.rows):
        row = {"method": method}
        for problem in problems:
            of = [ranks.cells[s, method] for s in ranks.columns if s[:2] == problem and (s, method) in ranks.cells]
            row[" ".join(names_of(problem)[alone:])] = text_of(of, sum(s[:2] == problem for s in ranks.columns))
        if i < len(ranks.methods):
            row["mean rank"] = f"{ranks.mean[i]:.1f} ({ranks.low[i]:.1f} to {ranks.high[i]:.1f})"
            row["s per run"] = number(ranks.over_settings("seconds")[i], None, 2)
        rows.append(row)
    return rows


def table_under_conditions(cells: Sequence[Result]) -> list[Row]:
    """A row for each method: its accuracy without and under each condition, over the shifts at the largest strength."""
    cells = [cell for cell in cells if cell.strength == max(c.strength for c in cells)]
    heads, count, rows = ["without"], len({cell.setting for cell in cells}), {}
    for cell in cells:
        clusters = "known" if cell.wrong_k else cell.clusters
        name = cell.method + ", unknown number" * (clusters == "auto")
        rows.setdefault(name, {}).setdefault(" ".join(cell.conditions) or "without", []).append(cell)
    heads += sorted({head for row in rows.values() for head in row} - {"without"})
    if len(heads) == 1:
        return []
    table = [{"method": name} | {head: text_of(of.get(head, ()), count) for head in heads} for name, of in rows.items()]
    return sorted(table, key=lambda row: -float(row["without"].split()[0].replace("–", "-1")))


def text_of(cells: Sequence[Result], count: int) -> str:
    """The mean over strengths, with that of the deviations over seeds; a dash where one of `count` cells has none."""
    means, deviations = zip(*[cell.over_seeds("accuracy") for cell in cells] or [(None, None)], strict=True)
    if len(cells) < count or None in means:
        return "–"
    std = None if None in deviations else float(np.mean(deviations))
    ends = Counter(run["status"] for cell in cells for run in cell.runs)
    few = f" ({ends['ok'] + ends['collapsed']}/{ends.total()})" * bool(ends["diverged"] + ends["failed"])
    text = number(float(np.mean(means)), std, 1, 100).replace("±", " ± ")
    return text + few + f" †{ends['collapsed']}" * bool(ends["collapsed"])


def markdown(rows: list[Row]) -> str:
    """A table in Markdown, with the rank beside the method, where narrow windows show it."""
    heads = sorted(dict.fromkeys(head for row in rows for head in row), key=lambda head: head not in FIRST)
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *([row.get(head, "–") for head in heads] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


# ---------------------------------------------------------------------------------------------------------------
# Findings.


class Evidence:
    """The runs that count in a ranking, and what a finding has said of them, which a test compares with runs.csv.

    Attributes:
      figures: each is the mean of a column over the runs that agree with `where`, with its text; runs under one of
        `CONDITIONS` count where `where` names it.
      higher: pairs of them; the first is larger.
      best: a column, `where` without a method, and the method that has the largest mean in it.
    """

    def __init__(self, rows: Sequence[Row], ranked: Sequence[Ranks]):
        self.rows, self.ranked = rows, ranked
        self.figures: list[Row] = []
        self.higher: list[tuple[int, int]] = []
        self.best: list[Row] = []

    def mean(self, column: str, mode: str, **where: Any) -> float:
        """The mean of a column over the ranked runs with results; NaN where there is none."""
        ranks = next(ranks for ranks in self.ranked if ranks.mode == mode)
        settings, modes = {*ranks.settings}, (f"given {where['wrong_k']}",) if "wrong_k" in where else (mode, "")
        values = [
            float(row[column])
            for row in self.rows
            if (row["data"], row["shift"], row["strength"]) in settings
            and row["clusters"] in modes
            and row[column] != ""
            and not any(row[name] for name in CONDITIONS if name not in where)
            and all(row[name] == value for name, value in where.items())
        ]
        return float(np.mean(values)) if values else float("nan")

    def figure(self, mode: str, column: str = "accuracy", **where: Any) -> str:
        """A mean as a text: in percent, or in seconds."""
        value = self.mean(column, mode, **where)
        text = f"{value:.2f} s" if column == "seconds" else f"{100 * value:.1f} %"
        self.figures.append({"text": text, "column": column, "mode": mode, "where": where, "value": value})
        return text

    def compare(self, first: int, second: int) -> None:
        """Notes which of two figures is larger."""
        a, b = (self.figures[i]["value"] for i in (first, second))
        if a != b:
            places = [i % len(self.figures) for i in (first, second)]
            self.higher.append(tuple(places if a > b else places[::-1]))

    def best_of(self, ranks: Ranks, column: str = "accuracy", **where: Any) -> str:
        """The method with the largest mean of a column; the oracle cannot be chosen, nor can one with failed runs."""
        can = choosable(ranks)
        if under := {name: value for name, value in where.items() if name in CONDITIONS}:
            of = [row for row in self.rows if all(row[name] == value for name, value in under.items())]
            can = sorted({row["method"] for row in of} - {row["method"] for row in of if not row["accuracy"]} - {BOUND})
        means = {m: self.mean(column, ranks.mode, method=m, **where) for m in can}
        found = max(means, key=lambda m: -1 if np.isnan(means[m]) else means[m])
        self.best.append({"column": column, "mode": ranks.mode, "where": where, "method": found})
        return found


def choosable(ranks: Ranks) -> list[str]:
    """The ranked methods but for the oracle, without those that have runs without results."""
    cells = [(m, [ranks.cells[s, m] for s in ranks.settings]) for m in ranks.methods]
    return [m for m, of in cells if all(cell.can_be_best for cell in of)]


def listed(names: Sequence[str]) -> str:
    """Names as a part of a sentence."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def whether_clusters_pay(say: Evidence, ranks: Ranks, about: Row) -> tuple[str, str] | None:
    """Compares one model for all with the models of the true clusters, at the largest strength."""
    if not {"fedavg", BOUND} <= {*ranks.methods}:
        return None
    top = max(setting[2] for setting in ranks.settings)
    with_clusters = {row["shift"] for row in say.rows if row["adjusted_rand"]}
    shifts = [s for d, s, strength in ranks.settings if strength == top and s in with_clusters]
    of = lambda m, shift: say.mean("accuracy", ranks.mode, method=m, shift=shift, strength=top)  # noqa: E731
    gain = {shift: of(BOUND, shift) - of("fedavg", shift) for shift in shifts}
    if len(gain) < 2:
        return None
    most, least, parts = max(gain, key=gain.get), min(gain, key=gain.get), []
    for shift in (most, least):
        one, of_clusters = (say.figure(ranks.mode, method=m, shift=shift, strength=top) for m in ("fedavg", BOUND))
        say.compare(-1, -2)
        parts.append(f"under {shift.replace('_', ' ')} {one} and {of_clusters}")
    title = "Whether clusters pay depends on the shift" if gain[least] < NEAR < gain[most] else None
    title = title or ("The true clusters pay under every shift" if gain[least] >= NEAR else "Clusters hardly pay here")
    text = f"At strength {top:g}, one model for all (fedavg) and the models of the true clusters ({BOUND}) reach "
    doubt = f"A model of a cluster sees the {about['images']} images of each of its clients alone; with more of them it"
    return f"**{title}.** {text}{'; '.join(parts)}.", f"{doubt} may gain more."


def which_is_best(say: Evidence, ranks: Ranks, about: Row) -> tuple[str, str] | None:
    """Names the method of the best mean rank, and the best under each shift."""
    can = choosable(ranks)
    if len(can) < 2:
        return None
    first, winners = can[0], {}
    for shift in dict.fromkeys(setting[1] for setting in ranks.settings):
        winner = say.best_of(ranks, shift=shift)
        text = say.figure(ranks.mode, method=winner, shift=shift)
        winners.setdefault(winner, []).append(f"{shift.replace('_', ' ')} ({text})")
    i = ranks.methods.index(first)
    others = [j for j, m in enumerate(ranks.methods) if m not in (first, BOUND)]
    near = [ranks.methods[j] for j in others if abs(ranks.tested[j] - ranks.tested[i]) < ranks.difference]
    each = [f"{winner} under {listed(of)}" for winner, of in winners.items()]
    of_mode = f"With {'an' if ranks.mode == 'auto' else 'a'} {MODES[ranks.mode]}"
    text = f"**{of_mode}, {first} has the best mean rank** of those that can be chosen: {ranks.mean[i]:.1f}, with an "
    text += f"interval from {ranks.low[i]:.1f} to {ranks.high[i]:.1f}. "
    text += f"{'No other method is best under any shift' if [*winners] == [first] else 'The best by shift'}: "
    told = f"does not tell it from {'any other' if len(near) == len(others) else listed(near)}"
    told = told if near else "tells it from every other method"
    doubt = f"With {len(ranks.problems)} shifts the critical difference is {ranks.difference:.1f} ranks: Nemenyi's test"
    doubt = f"{doubt} {told}. The shifts share their images, and are not independent."
    leader = min((ranks.methods.index(m) for m in can), key=lambda j: ranks.tested[j])
    if ranks.tested[leader] < ranks.tested[i]:
        doubt += f" If the strengths of a shift count once, as in the test, {ranks.methods[leader]} has the best mean "
        doubt += f"rank ({ranks.tested[leader]:.1f}; {first} {ranks.tested[i]:.1f})."
    tied = sum(row[-1] != "–" for row in choices(ranks).rows)
    if tied:
        doubt += f" Under {tied} of {len(ranks.problems)} shifts others are as good within a standard deviation."
    return f"{text}{'; '.join(each)}.", doubt


def who_loses_to_one_model(say: Evidence, ranks: Ranks, about: Row) -> tuple[str, str] | None:
    """Names the methods that are below FedAvg under the shift where these are most."""
    can = choosable(ranks)
    if "fedavg" not in can or len(can) < 3:
        return None
    below = {}
    for shift in dict.fromkeys(setting[1] for setting in ranks.settings):
        means = {m: say.mean("accuracy", ranks.mode, method=m, shift=shift) for m in can}
        below[shift] = sorted((m for m in can if means[m] < means["fedavg"]), key=means.get, reverse=True)
    most = max(below, key=lambda shift: len(below[shift]))
    doubt = f"Each was tuned in {about['budget']} trials: one with more options is searched less closely."
    if not below[most]:
        return "**No method loses to one model for all (fedavg)** under any shift.", doubt
    doubt = f"Under no other shift are they more. {doubt}"
    of_all = say.figure(ranks.mode, method="fedavg", shift=most)
    parts = []
    for m in below[most]:
        parts.append(f"{m} ({say.figure(ranks.mode, method=m, shift=most)})")
        say.compare(0, -1)
    title = f"Under {most.replace('_', ' ')}, {len(parts)} of {len(can) - 1} methods lose to one model for all"
    return f"**{title}** (fedavg, {of_all}): {listed(parts)}.", doubt


def what_the_number_is_worth(say: Evidence, ranks: Ranks, about: Row) -> tuple[str, str] | None:
    """Compares methods that are given the number of clusters with themselves without it."""
    modes = {r.mode: r for r in say.ranked}
    if len(modes) < 2 or ranks.mode != "known":
        return None
    other = modes["auto"]
    if {*ranks.settings} != {*other.settings}:
        return None
    both = [m for m in choosable(ranks) if m in choosable(other) and ranks.cells[ranks.settings[0], m].clusters]
    loss = {m: say.mean("accuracy", "known", method=m) - say.mean("accuracy", "auto", method=m) for m in both}
    if not loss:
        return None
    parts = []
    for m in dict.fromkeys([max(loss, key=loss.get), min(loss, key=loss.get)]):
        given, without = say.figure("known", method=m), say.figure("auto", method=m)
        say.compare(-1, -2)
        parts.append(f"{m} has {given} with it, and {without} without")
    much, little = max(loss.values()) > NEAR, min(loss.values()) <= NEAR
    title = {
        (True, True): "The number of clusters is worth much to some methods, and little to others",
        (True, False): "Every method loses without the number of clusters",
        (False, True): "The number of clusters need not be given here",
    }[much, little]
    doubt = f"What takes the place of the number was chosen in {about['budget']} trials; more of them may help."
    return f"**{title}.** Over all shifts, {', and '.join(parts)}.", doubt


def what_strength_does(say: Evidence, ranks: Ranks, about: Row) -> tuple[str, str] | None:
    """Compares the best method with FedAvg under the weakest and the strongest shifts."""
    strengths = sorted({setting[2] for setting in ranks.settings})
    if len(strengths) < 2 or "fedavg" not in ranks.methods or not choosable(ranks):
        return None
    gains, parts = [], []
    for strength in (strengths[0], strengths[-1]):
        best = say.best_of(ranks, strength=strength)
        text = say.figure(ranks.mode, method=best, strength=strength)
        if best == "fedavg":
            gains.append(0.0)
            parts.append(f"at strength {strength:g} fedavg itself is the best, with {text}")
            continue
        of_fedavg = say.figure(ranks.mode, method="fedavg", strength=strength)
        say.compare(-2, -1)
        gains.append(say.figures[-2]["value"] - say.figures[-1]["value"])
        parts.append(f"at strength {strength:g} {best} has {text}, and fedavg {of_fedavg}")
    title = "The stronger the shifts, the more the method matters"
    if gains[1] <= gains[0]:
        title = "The method matters no more under stronger shifts"
    doubt = "Means over shifts hide single ones, and strengths of different shifts cannot be compared."
    return f"**{title}.** Over all shifts, {'; '.join(parts)}.", doubt


def what_it_costs(say: Evidence, ranks: Ranks, about: Row) -> tuple[str, str] | None:
    """Names the fastest method near the best accuracy."""
    can = choosable(ranks)
    if len(can) < 2:
        return None
    best = say.best_of(ranks)
    accuracy = {m: say.mean("accuracy", ranks.mode, method=m) for m in can}
    near = [m for m in can if accuracy[m] >= accuracy[best] - NEAR]
    fast = min(near, key=lambda m: say.mean("seconds", ranks.mode, method=m))
    texts = {m: (say.figure(ranks.mode, method=m), say.figure(ranks.mode, "seconds", method=m)) for m in (best, fast)}
    text = f"{best} has the best mean accuracy ({texts[best][0]}, {texts[best][1]} a run)"
    if fast == best:
        title, text = f"{best} is accurate and fast", f"{text}, and no method within two points of it is faster"
    else:
        title = f"{fast} is nearly as accurate as {best}, and faster"
        text += f"; of those within two points of it, {fast} is the fastest ({texts[fast][0]}, {texts[fast][1]})"
        say.compare(-3, -1)
    doubt = "Seconds are of one machine beside other processes; an accelerator may order the methods otherwise."
    return f"**{title}:** {text}.", doubt


def who_is_served_worst(say: Evidence, ranks: Ranks, about: Row) -> tuple[str, str] | None:
    """Compares the best mean with the best worst tenth of the clients."""
    if len(choosable(ranks)) < 2:
        return None
    best, fair = say.best_of(ranks), say.best_of(ranks, "worst_tenth")
    parts = []
    for m in dict.fromkeys([best, fair]):
        worst, mean = (say.figure(ranks.mode, column, method=m) for column in ("worst_tenth", "accuracy"))
        parts.append(f"{worst} with {m} ({mean} over all clients)")
    title = "The best on average is also the best for those who are served worst"
    if best != fair:
        near = say.figures[2]["value"] - say.figures[0]["value"] < NEAR
        title = title.replace("is also", "is nearly" if near else "is not")
        say.compare(0, 2)
    text = f"**{title}.** The worst tenth of the clients has {listed(parts)}."
    return text, f"A tenth is {max(about['clients'] // 10, 1)} clients with few test images each."


def best_under(say: Evidence, ranks: Ranks, field: str, words: str) -> str | None:
    """Compares the best method under a condition, the best without it and FedAvg, each under it and without it."""
    values, at = {row[field] for row in say.rows if row[field]}, {"strength": max(s[2] for s in ranks.settings)}
    if len(values) != 1 or "fedavg" not in choosable(ranks):
        return None
    under, parts = {field: values.pop()}, []
    best, before = say.best_of(ranks, **at, **under), say.best_of(ranks, **at)
    for m in dict.fromkeys([best, before, "fedavg"]):
        without = say.figure(ranks.mode, method=m, **at) if m in ranks.methods else "no result"
        parts.append(f"{m} has {say.figure(ranks.mode, method=m, **at, **under)} ({without})")
    of_mode = f"With {'an' if ranks.mode == 'auto' else 'a'} {MODES[ranks.mode]}"
    return f"**{of_mode}, {best} is the best {words}{', as otherwise' * (best == before)}.** {listed(parts)}."


def what_hostile_clients_do(say: Evidence, ranks: Ranks, about: Row) -> tuple[str, str] | None:
    """Names the best method where some clients are hostile."""
    text = best_under(say, ranks, "hostile", f"if {100 * about['hostile']:g} % of the clients are hostile")
    doubt = "In brackets, without them, of all clients; under them, of the others. Their attack is "
    doubt += f"{about['attack']}; no method had a robust aggregator."
    given = {other.mode: other for other in say.ranked}.get("known")
    if text and ranks.mode == "auto" and given is not None:
        best, at = say.best[0]["method"], given.settings[0]
        if (at, best) in given.cells and given.cells[at, best].clusters:  # it takes a number
            where = {"hostile": about["hostile"], "strength": max(setting[2] for setting in ranks.settings)}
            text += f" Given the number of clusters, {best} has {say.figure('known', method=best, **where)}."
    return text and (text, doubt)


def what_drift_does(say: Evidence, ranks: Ranks, about: Row) -> tuple[str, str] | None:
    """Names the best method where clusters change over time."""
    text = best_under(say, ranks, "drift", f"after a {about['drift']} drift")
    each = f"{about['images'] / DRIFT_STEPS:g} of a client's {about['images']} images"
    return text and (text, f"In brackets, without drift. Each of {DRIFT_STEPS} steps of time has {each}.")


def what_a_wrong_number_does(say: Evidence, ranks: Ranks, about: Row) -> tuple[str, str] | None:
    """Names the best method for each wrong number of clusters, beside what it has with the right one."""
    numbers, at = sorted(about["wrong_k"]), {"strength": max(setting[2] for setting in ranks.settings)}
    if len(numbers) < 2 or not any(row["wrong_k"] for row in say.rows):
        return None
    parts = []
    for given in map(str, numbers):
        best = say.best_of(ranks, **at, wrong_k=given)
        now, right = (say.figure("known", method=best, **at, **of) for of in ({"wrong_k": given}, {}))
        parts.append(f"given {given}, {best} is the best with {now} ({right} with {about['clusters']})")
    say.compare(0, 2 * len(numbers) - 2)
    few, many = (say.figures[i]["value"] for i in (0, -2))
    title = "Too few models cost more than too many" if few < many else "Too many models cost more than too few"
    doubt = "Each was tuned for the number that it was given."
    return f"**{title}.** Of {about['clusters']} clusters, {'; '.join(parts)}.", doubt


FINDINGS: dict[Callable, tuple[str, ...]] = {  # with the modes in which each is looked for
    whether_clusters_pay: ("known",),
    which_is_best: ("known", "auto"),
    who_loses_to_one_model: ("known",),
    what_the_number_is_worth: ("known",),
    what_strength_does: ("known",),
    what_it_costs: ("known",),
    who_is_served_worst: ("known",),
}
UNDER_CONDITIONS = {what_hostile_clients_do: ("known", "auto"), what_drift_does: ("known", "auto")}
UNDER_CONDITIONS |= {what_a_wrong_number_does: ("known",)}


def is_on_conditions(ranked: Sequence[Ranks], setting: Row) -> bool:
    """Whether a ranking is on hostile clients, drift or wrong numbers: it has these, and fewer than three shifts."""
    return any(setting[name] for name in CONDITIONS) and any(len(ranks.problems) < 3 for ranks in ranked)


def findings_of(ranked: Sequence[Ranks], rows: Sequence[Row], about: Row) -> Iterator[Row]:
    """The findings, each with its doubt and its evidence; of one shift alone there are none."""
    several = [ranks for ranks in ranked if len(ranks.problems) > 1]
    for find, modes in (UNDER_CONDITIONS if is_on_conditions(ranked, about) else FINDINGS | UNDER_CONDITIONS).items():
        for ranks in (ranks for ranks in several if ranks.mode in modes or len(ranked) == 1):
            say = Evidence(rows, ranked)
            if found := find(say, ranks, about):
                evidence = {"figures": say.figures, "higher": say.higher, "best": say.best}
                yield {"text": found[0], "doubt": found[1]} | evidence
    yield how_runs_end(rows)


def how_runs_end(rows: Sequence[Row]) -> Row:
    """Counts the runs that have not ended well, and names the method that has most of them."""
    ends, of_method = Counter(row["status"] for row in rows), {}
    for status in STATUSES[1:]:
        of_method[status] = Counter(row["method"] for row in rows if row["status"] == status).most_common(1)
    parts = [f"{ends[s]} {s} ({of_method[s][0][1]} of {of_method[s][0][0]})" for s in STATUSES[1:] if ends[s]]
    runs = sum(ends[status] for status in STATUSES)
    if parts:
        text = f"**Some runs do not end well.** Of {runs} runs {listed(parts)}."
    else:
        text = f"**All {runs} runs have ended well.** None has diverged, failed, or put all clients into one cluster."
    cannot = f" {ends['cannot']} cells cannot run." * bool(ends["cannot"])
    doubt = (
        "A collapsed run (all clients use one of several models) counts with its accuracy; other options may avoid it."
    )
    return {"text": text + cannot, "doubt": doubt, "ends": dict(ends)}


# ---------------------------------------------------------------------------------------------------------------
# The page.


def command_of(setting: Row, out: str) -> str:
    """The command of a ranking."""
    words = {"methods": [m for m in setting["methods"] if m not in REFERENCES]}
    words |= {name: setting[name] for name in ("shifts", "strengths", "datasets", "seeds", "budget")}
    conditions = [*CONDITIONS, *["attack"] * bool(setting["hostile"])]
    words |= setting["of_runs"] | {name: setting[name] for name in conditions if setting[name]}
    [images] = {of_data["examples_per_client"] for of_data in setting["of_data"].values()}
    words["examples_per_client"] = images
    each = {name: ",".join(map(str, v)) if isinstance(v, list) else str(v) for name, v in words.items()}
    flags = [f"{flag_of(name)} {value}" for name, value in each.items()]
    lines = textwrap.wrap(" ".join(flag.replace(" ", "\0") for flag in flags), 112, **WHOLE)
    return " \\\n    ".join(["jfcl shifts", *(line.replace("\0", " ") for line in lines), f"--out {out}"])


def section(name: str, result: Row) -> str:
    """The section of a ranking."""
    setting, ends = result["setting"], result["findings"][-1]["ends"]
    of_runs, title = setting["of_runs"], NAMES.get(name, name.replace("_", " ").capitalize())
    images = f"{of_runs['batch_size']} images" if "batch_size" in of_runs else "all images"
    shifts = listed([shift.replace("_", " ") for shift in setting["shifts"]])
    strengths = listed([f"{strength:g}" for strength in setting["strengths"]])
    runs = sum(ends.get(status, 0) for status in STATUSES)
    link = f'<a href="_static/ranking/{name}/{{}}">{{}}</a>'.format
    about = (
        f"{len(setting['methods'])} methods; the shifts {shifts} with strength {strengths}; "
        f"{setting['seeds']} seeds and {setting['budget']} trials of each cell; {runs:,} runs. "
        f"{of_runs['clients']} clients in {of_runs['clusters']} hidden clusters have {result['images']} training "
        f"images each{' (under dirichlet on average)' * ('dirichlet' in setting['shifts'])}; "
        f"as many further clients are held out for tuning. The model ({of_runs['model']}) is trained for "
        f"{of_runs['rounds']} rounds of {of_runs['local_steps']} steps with {images}; rounds that a method needs for "
        f"its start (restarts, or training before clients are clustered) come before these. "
        f"Device: {result['device']}. "
        f"{link('index.html', 'The page')} has every cell, its command and its options, and "
        f"{link('runs.csv', 'runs.csv')} every run."
    )
    further = [f"{100 * setting['hostile']:g} % hostile clients ({setting['attack']})"] * bool(setting["hostile"])
    further += [f"drift ({setting['drift']})"] * bool(setting["drift"])
    further += [f"{listed([*map(str, setting['wrong_k'])])} models instead"] * bool(setting["wrong_k"])
    about += f" At the largest strength also with {listed(further)}." * bool(further)
    if result["done"] < result["cells"]:
        about += (
            f" {result['done']} of {result['cells']} cells are finished; ranks and findings are over the shifts and "
        )
        about += "strengths in which all ranked methods have one."
    command = f"```sh\n{result['command']}\npython benchmarks/ranking.py runs/{name}\n```"
    lines = [f"## {title}", _wrapped(about), command]
    for mode in (mode for mode in MODES if mode in result["tables"]):
        lines += [f"### {title}: {MODES[mode]}", markdown(result["tables"][mode])]
    if "conditions" in result:
        lines += [f"### {title}: accuracy under each, mean over shifts", markdown(result["conditions"])]
    findings = [f"* {of['text']} *{of['doubt']}*" for of in result["findings"]]
    lines += [f"### {title}: what was found, and what limits it", "\n".join(_wrapped(of, "  ") for of in findings)]
    return "\n\n".join(lines)


def _wrapped(text: str, indent: str = "") -> str:
    whole = re.sub(r"(?<=\d) (?=%|s\b)", "\0", text)  # a number and its unit
    return textwrap.fill(whole, 148, subsequent_indent=indent, **WHOLE).replace("\0", " ")


def page_of(text: str) -> str:
    """The text of the page with the sections of all rankings, the largest first."""
    results = {file: json.loads(file.read_text()) for file in RESULTS.glob("ranking-*.json")}
    order = sorted(results, key=lambda file: (-results[file]["cells"], file.name))
    sections = [section(file.stem.removeprefix("ranking-"), results[file]) for file in order]
    (before, _, rest), (begin, end) = text.partition(MARKS[0]), MARKS
    return "\n\n".join([before + begin, *sections, end + rest.partition(end)[2]])


def publish(folder: Path) -> Path:
    """Writes the results of a folder of `jfcl shifts`, and copies what is published; returns the results' file."""
    settings, name = files.read_json(folder / "settings.json"), folder.resolve().name
    setting = settings["setting"]
    done = merge(folder, cells_of(setting), digest_of(setting))  # the last cells may be newer than the files of all
    cells = read_cells(folder)
    ranked = rank(cells)
    with (folder / "runs.csv").open() as file:
        rows = [r | {name: float(r[name]) for name in ("strength", "hostile")} for r in csv.DictReader(file)]
    result = {
        "command": command_of(setting, f"runs/{name}"),
        **{name: settings[name] for name in ("device", "versions", "setting")},
        "images": setting["of_data"][setting["datasets"][0]]["examples_per_client"],
        "done": done,
        "cells": len(cells_of(setting)),
        "settings": {ranks.mode: ranks.settings for ranks in ranked},
        "tables": {ranks.mode: table_of(ranks) for ranks in ranked if not is_on_conditions(ranked, setting)},
    }
    if under := table_under_conditions(cells):
        result["conditions"] = under
    result["findings"] = list(findings_of(ranked, rows, result | setting | setting["of_runs"]))
    (PUBLISHED / name).mkdir(parents=True, exist_ok=True)
    for copied in COPIED:
        shutil.copyfile(folder / copied, PUBLISHED / name / copied)
    file = RESULTS / f"ranking-{name}.json"
    file.write_text(json.dumps(result, indent=1) + "\n")
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="*", help="what jfcl shifts has left; none: the page alone")
    args = parser.parse_args()
    for folder in args.folder:
        print(f"written: {publish(folder)}")
    page = DOCS / "ranking.md"
    page.write_text(page_of(page.read_text()))
    print(f"written: {page}")


if __name__ == "__main__":
    main()
