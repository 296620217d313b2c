"""The findings of docs/ranking.md hold in the runs that it is made from, whatever their figures are."""

import csv
import importlib
import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

ROOT = Path(__file__).resolve().parents[1]
CONDITIONS = ("hostile", "drift", "wrong_k")
RANKINGS = sorted(file.stem.removeprefix("ranking-") for file in ROOT.glob("benchmarks/results/ranking-*.json"))


def read(name):
    """The results of a ranking, and its runs."""
    result = json.loads((ROOT / "benchmarks" / "results" / f"ranking-{name}.json").read_text())
    with (ROOT / "docs" / "_static" / "ranking" / name / "runs.csv").open() as file:
        return result, [row | {"strength": float(row["strength"])} for row in csv.DictReader(file)]


def ranked(result, runs, mode, *, hostile=0.0, drift="", wrong_k="", **where):
    """The runs that count in the ranks of a mode, or those of its settings under a condition, by method."""
    found, modes = {}, (f"given {wrong_k}",) if wrong_k else ("", mode)
    for run in runs:
        counts = [run["data"], run["shift"], run["strength"]] in result["settings"][mode] and run["clusters"] in modes
        under = (float(run["hostile"]), run["drift"], run["wrong_k"]) == (hostile, drift, wrong_k)
        if counts and under and all(run[key] == value for key, value in where.items()):
            found.setdefault(run["method"], []).append(run)
    return found


def means(result, runs, mode, column="accuracy", **where):
    """The mean of a column for each method, of the runs that have it."""
    found = {
        m: [float(run[column]) for run in of if run[column]] for m, of in ranked(result, runs, mode, **where).items()
    }
    return {method: np.mean(values) for method, values in found.items() if values}


@pytest.mark.parametrize("name", RANKINGS)
def test_the_findings_hold_in_the_runs(name):
    result, runs = read(name)
    *findings, of_ends = result["findings"]
    assert findings and all(finding["doubt"] for finding in findings)
    for finding in findings:
        values = []
        for figure in finding["figures"]:
            where = dict(figure["where"])
            values.append(means(result, runs, figure["mode"], figure["column"], **where)[where["method"]])
            seconds, text = figure["column"] == "seconds", figure["text"]
            assert (
                text == (f"{values[-1]:.2f} s" if seconds else f"{100 * values[-1]:.1f} %") and text in finding["text"]
            )
        assert all(values[first] > values[second] for first, second in finding["higher"])
        for best in finding["best"]:
            found = means(result, runs, best["mode"], best["column"], **best["where"])
            of = ranked(result, runs, best["mode"], **{n: v for n, v in best["where"].items() if n in CONDITIONS})
            ended = [m for m in of if {run["status"] for run in of[m]} <= {"ok", "collapsed"}]
            assert found[best["method"]] == max(found[m] for m in ended if m != "oracle")
        said = re.findall(r"\d+\.\d (?:%|s)", finding["text"])
        assert {*said} <= {figure["text"] for figure in finding["figures"]}  # no figure without its evidence
    assert of_ends["ends"] == Counter(run["status"] for run in runs)


@pytest.mark.parametrize("name", RANKINGS)
def test_the_tables_have_the_ranks_of_the_runs(name):
    result, runs = read(name)
    for mode, table in result["tables"].items():
        mean_ranks = {row["method"]: float(row["mean rank"].split()[0]) for row in table if "mean rank" in row}
        each = []
        for data, shift, strength in result["settings"][mode]:
            where = {"data": data, "shift": shift, "strength": strength}
            found, of = means(result, runs, mode, **where), ranked(result, runs, mode, **where)
            failed = {m: sum(not run["accuracy"] for run in of[m]) for m in mean_ranks}  # each is worse than any result
            each.append(scipy.stats.rankdata([round(2 * failed[m] - found.get(m, 0), 6) for m in mean_ranks]))
        np.testing.assert_allclose(np.mean(each, axis=0), [*mean_ranks.values()], atol=0.051)  # one decimal
        assert [*mean_ranks.values()] == sorted(mean_ranks.values())


@pytest.mark.parametrize("mode", ["known", "auto"])
@pytest.mark.parametrize("name", ["digits", "mnist"])
def test_a_doubt_names_the_method_that_leads_where_strengths_count_once(name, mode):
    result, runs = read(name)
    order = [row["method"] for row in result["tables"][mode] if "mean rank" in row]
    problems = {(data, shift) for data, shift, _ in result["settings"][mode]}
    each = [means(result, runs, mode, data=data, shift=shift) for data, shift in problems]
    ranks = scipy.stats.rankdata([[-round(of[m], 6) for m in order] for of in each], axis=1).mean(axis=0)
    of_method = dict(zip(order, ranks, strict=True))
    del of_method["oracle"]
    (first, *_), leader = of_method, min(of_method, key=of_method.get)
    (doubt,) = (f["doubt"] for f in result["findings"] if f"{first} has the best mean rank**" in f["text"])
    said = f"{leader} has the best mean rank ({of_method[leader]:.1f}; {first} {of_method[first]:.1f})"
    assert (said in doubt) == (of_method[leader] < of_method[first])


@pytest.mark.parametrize("name", RANKINGS)
def test_the_table_of_conditions_has_the_means_of_the_runs(name):
    result, runs = read(name)
    setting, found = result["setting"], 0
    under = {"without": {}, f"{setting['hostile']:.0%} hostile": {"hostile": setting["hostile"]}}
    under |= {f"drift {setting['drift']}": {"drift": setting["drift"]}}
    under |= {f"K = {k}": {"wrong_k": f"{k}"} for k in setting["wrong_k"]}
    for row in result.get("conditions", ()):
        method, _, unknown = row.pop("method").partition(", ")
        for head, text in row.items():
            of = means(result, runs, "auto" if unknown else "known", **under[head]).get(method)
            is_given = "wrong_k" in under[head]  # a number, which is then not unknown
            assert (text == "–") == (of is None or bool(unknown and is_given))
            if text != "–":
                assert float(text.split()[0]) == pytest.approx(100 * of, abs=0.0501)
                found += 1
    assert found or not any(setting[condition] for condition in CONDITIONS)


def test_the_page_is_written_from_the_results(monkeypatch):
    """Also from those of a folder: the page does not change when it is written again."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    page = (ROOT / "docs" / "ranking.md").read_text()
    assert importlib.import_module("ranking").page_of(page) == page


@pytest.mark.parametrize("name", RANKINGS)
def test_the_command_of_a_ranking_repeats_it(name, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    setting, ranking = read(name)[0]["setting"], importlib.import_module("ranking")
    assert ranking.command_of(setting, f"runs/{name}") == read(name)[0]["command"]
    hostile = ranking.command_of(setting | {"hostile": 0.25, "attack": "label_flip"}, "out")
    assert "--hostile 0.25" in hostile and "--attack label_flip" in hostile


@pytest.mark.parametrize("name", ["digits", "mnist"])
def test_the_advice_on_numbers_of_clusters_holds(name):
    """What docs/methods/index.md says of both data sets; a table has the best mean rank first."""
    known, auto = ([row["method"] for row in read(name)[0]["tables"][mode]] for mode in ("known", "auto"))
    with_clusters = [method for method in auto if method not in ("oracle", "fedavg", "local", "ditto")]
    assert {"clove", "stocfl"} <= {*with_clusters[:3]}
    if name == "mnist":  # 100 images per client
        assert known[:2] == ["oracle", "ifca"]
    else:  # 12
        assert {"flhc", "fesem", "one_shot", "clove", "fedavg"} <= {*known[: known.index("ifca")]}


@pytest.mark.parametrize("name", [name for name in RANKINGS if name.endswith("_conditions")])
def test_the_advice_on_drift_and_hostile_clients_holds(name):
    """What docs/methods/index.md says of both rankings with these."""
    result, runs = read(name)
    drifting = {mode: means(result, runs, mode, drift="sudden") for mode in ("auto", "known")}
    auto, known = (sorted(values.keys() - {"oracle"}, key=values.get)[::-1] for values in drifting.values())
    if name == "mnist_conditions":  # 20 images per client and step
        assert auto[0] == "feddrift" and set(known[:2]) == {"ifca", "clove"}
    else:  # three
        assert drifting["auto"]["feddrift"] < drifting["auto"]["fedavg"]
    lost = {mode: means(result, runs, mode) for mode in ("auto", "known")}
    for mode, values in lost.items():
        under = means(result, runs, mode, hostile=0.3)
        lost[mode] = {method: value - under[method] for method, value in values.items() if method in under}
    assert max(lost["auto"][method] for method in ("one_shot", "fedgroup", "cfl")) < 0.04
    assert min(lost["known"][method] for method in ("one_shot", "fedgroup")) > 0.07
