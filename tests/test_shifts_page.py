"""The page and the table of `jfcl shifts`: made-up cells, with figures that are computed here again."""

import itertools
import json
import re
import shutil
from urllib.parse import unquote

import numpy as np
import pytest
import scipy.stats
from test_report import Page as Base

from jfcl.core import files
from jfcl.experiments import shifts_page
from jfcl.experiments.shift_results import FORMAT, digest_of, notes_on, rank, read_cells
from jfcl.experiments.shifts_page import write_page

LEVELS = {"fedavg": 0.6, "local": 0.7, "oracle": 0.9, "ifca": 0.86, "clove": 0.85, "pacfl": 0.75}
SHIFTS = ("rotation", "label_groups", "label_swap")


def made_up(folder, *, methods=LEVELS, data=("digits",), shifts=SHIFTS, strengths=(0.5, 1.0), seeds=2, clients=8):
    """Writes a folder of cells whose accuracies are drawn around `methods`."""
    rng, about = np.random.default_rng(0), {"budget": 3, "seeds": seeds}
    (folder / "cells").mkdir(parents=True)

    def cell(d, shift, strength, method, clusters, *, worse=0.0, hostile=0.0, wrong_k=None, drift=None, **changed):
        parts = [d, shift, f"{strength:g}", method, f"k{wrong_k}" if wrong_k else clusters, drift]
        name = "-".join([*filter(None, parts), *[f"hostile{hostile:g}"] * bool(hostile)])
        runs = []
        for seed in range(7, 7 + seeds):
            each = np.clip(rng.normal(methods[method] - 0.2 * worse - 0.1 * strength, 0.05, clients), 0, 1).round(4)
            curve = [[t, round(float(each.mean()) * (1 - 0.5**t), 4)] for t in range(1, 6)]
            costs = {
                "rounds_to_95": 5,
                "bytes_to_95": 1e6 * (method != "local") * rng.uniform(0.5, 20),
                "client_steps": 400,
            }
            costs["seconds"] = float(rng.uniform(1, 9))
            costs |= {"adjusted_rand": 0.9, "clusters_found": 4, "compile_seconds": 3.0, "joules": None}
            scores = {"accuracy": float(each.mean()), "worst_tenth": float(each.min()), "newcomers": None}
            ends = {"seed": seed, "status": "ok", "reason": "", "curve": curve, "per_client": each.tolist()}
            runs.append(ends | scores | costs)
        known = {"data": d, "shift": shift, "strength": strength, "method": method, "clusters": clusters}
        saved = {
            "format": FORMAT,
            "setting": digest_of(about),
            "cell": known | {"hostile": hostile, "wrong_k": wrong_k, "drift": drift},
            "command": f"jfcl run {method} --heterogeneity {shift} --strength {strength} --seed 7",
            "tuned": {"lr": 0.1},
            "trials": [{"options": {}, "score": 0.7}, *[{"options": {"lr": 0.1}, "score": 0.8}] * 2],
            "runs": runs,
            "default": {"accuracy": 0.4},
            "status": "ok",
            "reason": "",
            "programs": 2,
            "seconds": 12.5,
        }
        files.write_json(folder / "cells" / f"{name}.json", files.seal(saved | changed))
        return name

    for d in data:
        for shift in shifts:
            for strength in strengths:
                for method in methods:
                    plain = method in ("fedavg", "local", "oracle")
                    for clusters in [""] if plain else ["known", "auto"]:
                        cell(d, shift, strength, method, clusters, worse=0.5 * (clusters == "auto"))
    if "ifca" in methods:
        cell(data[0], shifts[0], 1.0, "ifca", "known", hostile=0.3, worse=1)
        cell(data[0], shifts[0], 1.0, "ifca", "given K", wrong_k=8, worse=0.2)
    files.write_json(folder / "settings.json", files.seal({"format": FORMAT, "setting": about}))
    return folder


def change(folder, name, **changed):
    """Changes a cell; `runs` are changes of each run."""
    file = folder / "cells" / f"{name}.json"
    saved = json.loads(file.read_text())
    for run, new in zip(saved["runs"], changed.pop("runs", []), strict=False):
        run |= new
    files.write_json(file, files.seal(saved | changed))


FAILED = {"status": "diverged", "reason": "a model is not finite", "accuracy": None, "per_client": None, "curve": []}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return made_up(tmp_path_factory.mktemp("shifts") / "out")


@pytest.fixture(scope="module")
def page(folder):
    return Page(write_page(folder).read_bytes())


def cannot(folder, name, reason):
    """Makes a cell one that cannot run."""
    change(folder, name, status="cannot", reason=reason)
    file = folder / "cells" / f"{name}.json"
    files.write_json(
        file, files.seal(json.loads(file.read_text()) | {"runs": [], "tuned": {}, "default": {"accuracy": None}})
    )


class Page(Base):
    """The parts of a page, with the texts of cells that are links."""

    def handle_data(self, data):
        super().handle_data(data)
        if len(self._open) > 1 and [tag for tag, _ in self._open[-2:]] == ["td", "a"]:
            self.tables[self._name][-1][-1] += data


def cells_in(folder):
    """The cells of a folder, by name, read without the library."""
    return {file.stem: json.loads(file.read_text()) for file in (folder / "cells").iterdir()}


def accuracy(saved):
    """The mean accuracy of a cell's runs with results, in percent."""
    return 100 * np.mean([run["accuracy"] for run in saved["runs"] if run["accuracy"] is not None])


def rows_of(page, name):
    """The rows of a table of accuracies: `{method: [texts]}`."""
    groups, heads, *rows = page.tables[name]
    assert groups[0] == "" and heads[0] == "method"
    return {row[0]: row[1:] for row in rows}


def mean_ranks(folder, clusters, methods=LEVELS):
    """The mean ranks of the methods, by SciPy, and the accuracies by setting: no run has failed."""
    values = {}
    for saved in cells_in(folder).values():
        cell = saved["cell"]
        if cell["clusters"] in (clusters, "") and not cell["hostile"]:
            per_client = np.mean([run["per_client"] for run in saved["runs"]])
            values.setdefault((cell["shift"], cell["strength"]), {})[cell["method"]] = per_client
    table = np.array([[row[method] for method in methods] for _, row in sorted(values.items())])
    return dict(zip(methods, scipy.stats.rankdata(-table, axis=1).mean(axis=0), strict=True)), table


def test_every_number_leads_to_its_cell_with_the_command(page, folder):
    cells = cells_in(folder)
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids)) and set(cells) <= set(ids)
    links = [
        unquote(value[1:]) for tag, name, value in page.attributes if (tag, name) == ("a", "href") and value[0] == "#"
    ]
    assert set(links) == set(cells)
    for saved in cells.values():
        assert saved["command"] in page.text


def test_the_page_has_the_accuracies_and_needs_no_other_file(page, folder):
    cells = cells_in(folder)
    for mode in ("known", "auto"):
        rows = rows_of(page, f"heat-{mode}-digits")
        assert set(rows) == set(LEVELS)
        for method, texts in rows.items():
            end = method + f"-{mode}" * (method not in ("fedavg", "local", "oracle"))
            names = [f"digits-{shift}-{s:g}-{end}" for shift in sorted(SHIFTS) for s in (0.5, 1.0)]
            assert texts == [f"{accuracy(cells[name]):.1f}" for name in names]
    for name in page.images:
        assert page.png(name)[:4] == b"\x89PNG"
    assert {"script", "link"}.isdisjoint(page.tags)
    curves = [name for name in page.images if name.startswith("curves")]
    assert curves == [f"curves-digits-{shift}-" for shift in sorted(SHIFTS)]


def test_the_shade_is_the_distance_to_the_best_method_that_can_be_chosen(page, folder):
    html = (folder / "index.html").read_text().partition('id="heat-known-digits"')[2].partition("</table>")[0]
    kinds = {
        m: re.findall('<td class="(.*?)">', row) for m, row in re.findall('<th scope="row">(.*?)</th>(.*?)</tr>', html)
    }
    cells, edges = cells_in(folder), [1, 2, 5, 10, 20]
    for i, setting in enumerate((shift, s) for shift in sorted(SHIFTS) for s in (0.5, 1.0)):
        of = [c for c in cells.values() if (c["cell"]["shift"], c["cell"]["strength"]) == setting]
        of = [c for c in of if c["cell"]["clusters"] in ("known", "") and not c["cell"]["hostile"]]
        values = {c["cell"]["method"]: accuracy(c) for c in of}
        best = max((m for m in values if m != "oracle"), key=values.get)
        for method, value in values.items():
            shade = sum(values[best] - value >= edge for edge in edges)
            assert kinds[method][i] == f"g{shade}" + " best" * (method == best)


def test_ranks_and_their_tests_are_those_of_scipy(page, folder):
    for mode in ("known", "auto"):
        ranks, table = mean_ranks(folder, mode)
        rows = page.rows(f"ranks-{mode}")
        assert [row["method"] for row in rows] == sorted(LEVELS, key=lambda m: ranks[m])
        for row in rows:
            low, high = map(float, row["95 % interval"].split(" to "))
            assert row["mean rank"] == f"{ranks[row['method']]:.2f}" and low <= ranks[row["method"]] <= high
        order = [list(LEVELS).index(row["method"]) for row in rows]
        shifts = table[:, order].reshape(3, 2, -1).mean(axis=1)  # strengths of a shift count once
        p = [scipy.stats.wilcoxon(a, b, method="exact").pvalue for a, b in itertools.pairwise(shifts.T)]
        assert min(p) == 0.25 and [float(row["p, next"] or "nan") for row in rows[:-1]] == [1.0] * len(p)  # Holm, of 5
        assert f"a shift has p = {scipy.stats.friedmanchisquare(*shifts.T).pvalue:.2g}: at least" in page.text
        others = shifts[:, [row["method"] not in ("oracle", "local") for row in rows]]
        assert f"for reference, p = {scipy.stats.friedmanchisquare(*others.T).pvalue:.2g}." in page.text
    assert "ifca has the lowest mean rank" in page.text and "but for the oracle" in page.text
    below = [row["method"] for row in page.rows("ranks-known")]
    assert f"Below local: {', '.join(below[below.index('local') + 1 :])}." in page.text
    assert "no p is below 0.25" in page.text and "count once" not in page.text


def test_another_leader_is_named_where_the_strengths_of_a_shift_count_once(tmp_path, no_pictures):
    strengths = (0.3, 0.6, 1.0)
    options = {"methods": {"ifca": 0.8, "clove": 0.8}, "shifts": SHIFTS[:2], "strengths": strengths, "seeds": 1}
    folder = made_up(tmp_path / "out", **options)
    for shift, strength in itertools.product(SHIFTS[:2], strengths):
        for method, at_most in (("ifca", 0.4), ("clove", 0.7)):  # ifca is better at two strengths, by less
            value = at_most if strength == 1.0 else 0.8 + 0.01 * (method == "ifca")
            name = f"digits-{shift}-{strength:g}-{method}-known"
            change(folder, name, runs=[{"accuracy": value, "per_client": [value] * 8}])
    text = Page(write_page(folder).read_bytes()).text.partition("Unknown number of clusters")[0]
    assert "ifca has the lowest mean rank, 1.33" in text
    assert "count once, as in the tests, clove has the lowest mean rank, 1.00, and ifca has 2.00." in text


def test_the_best_of_each_shift_is_not_the_oracle(page, folder):
    cells = cells_in(folder)
    for row, shift in zip(page.rows("choices-known"), sorted(SHIFTS), strict=True):
        means = {}
        for method in set(LEVELS) - {"oracle"}:
            name = method + "-known" * (method not in ("fedavg", "local"))
            means[method] = np.mean([accuracy(cells[f"digits-{shift}-{s:g}-{name}"]) for s in (0.5, 1)])
        best = max(means, key=means.get)
        assert row["best"] == best and row["accuracy %"].startswith(f"{means[best]:.1f}±")


def test_conditions_show_the_change_and_what_was_not_run(page, folder):
    cells = cells_in(folder)
    base = accuracy(cells["digits-rotation-1-ifca-known"])
    for table, name in [("hostile", "ifca-known-hostile0.3"), ("wrong_k", "ifca-k8")]:
        value = accuracy(cells[f"digits-rotation-1-{name}"])
        assert rows_of(page, table) == {"ifca": [f"{value:.1f} ({value - base:+.1f})"]}
    assert "Drift Not run." in page.text and "Energy is not known" in page.text


def test_the_change_under_a_condition_is_that_of_the_same_clients(tmp_path, no_pictures):
    folder = made_up(tmp_path / "out", methods={"ifca": 0.8}, shifts=("rotation",), strengths=(1.0,))
    plain, hostile = (f"digits-rotation-1-ifca-known{end}" for end in ("", "-hostile0.3"))
    each = [[None, None, *run["per_client"][2:]] for run in cells_in(folder)[hostile]["runs"]]  # two have no tests
    change(folder, hostile, runs=[{"per_client": of, "accuracy": float(np.mean(of[2:]))} for of in each])
    cells = cells_in(folder)
    before = 100 * np.mean([run["per_client"][2:] for run in cells[plain]["runs"]])
    value = accuracy(cells[hostile])
    page = Page(write_page(folder).read_bytes())
    assert rows_of(page, "hostile") == {"ifca": [f"{value:.1f} ({value - before:+.1f})"]}
    assert f"{value - before:+.1f}" != f"{value - accuracy(cells[plain]):+.1f}"
    change(folder, hostile, runs=[run | {"accuracy": run["accuracy"] - 1e-4} for run in cells[plain]["runs"]])
    assert rows_of(Page(write_page(folder).read_bytes()), "hostile")["ifca"][0].endswith(" (+0.0)")


def test_the_table_for_latex_has_means_over_strengths(page, folder):
    lines = (folder / "table.tex").read_text().splitlines()
    cells = cells_in(folder)
    (first,) = (line for line in lines[: lines.index(r"\bottomrule")] if line.startswith("ifca"))
    expected = []
    for shift in sorted(SHIFTS):
        pair = [cells[f"digits-{shift}-{s:g}-ifca-known"]["runs"] for s in (0.5, 1)]
        mean = 100 * np.mean([run["accuracy"] for runs in pair for run in runs])
        std = 100 * np.mean([np.std([run["accuracy"] for run in runs], ddof=1) for runs in pair])
        expected.append(rf"{mean:.1f} $\pm$ {std:.1f}")
    assert re.sub(r"\\textbf\{(.*?)\}", r"\1", first).split(" & ")[1:4] == expected
    assert r"\textbf" not in "".join(line for line in lines if line.startswith("oracle"))
    assert lines.count(r"\toprule") == 2  # known and unknown numbers


@pytest.fixture
def no_pictures(monkeypatch):
    """Pages without pictures, which take most of the time."""
    monkeypatch.setattr(shifts_page, "figure", lambda *_: None)


def test_curves_are_of_one_strength(tmp_path, monkeypatch):
    folder = made_up(tmp_path / "out", methods=dict(list(LEVELS.items())[:4]), shifts=("rotation",))
    (folder / "cells" / "digits-rotation-1-ifca-known.json").unlink()  # not finished yet
    monkeypatch.setattr(shifts_page, "figure", lambda _, name, draw, caption: (name, draw.args[0], caption))
    cells = read_cells(folder)
    [(_, lines, caption)] = shifts_page.curves(cells, rank(cells)[0])
    assert [*lines] == ["oracle", "local", "fedavg"] and caption.startswith("digits rotation 1:")
    want = cells_in(folder)["digits-rotation-1-local"]["runs"]
    assert [row["accuracy"] for row in lines["local"]] == [a for run in want for _, a in run["curve"]]


def test_failures_are_counted_and_in_no_mean(tmp_path, no_pictures):
    folder = made_up(tmp_path / "out", methods=dict(list(LEVELS.items())[:5]), shifts=("rotation", "label_swap"))
    before = cells_in(folder)
    change(folder, "digits-rotation-1-ifca-known", runs=[FAILED])
    change(folder, "digits-rotation-0.5-ifca-known", runs=[{"status": "collapsed", "reason": "one model"}])
    change(folder, "digits-label_swap-1-clove-known", runs=[FAILED, FAILED])
    cannot(folder, "digits-label_swap-0.5-clove-auto", "<b>no labels</b>")
    change(folder, "digits-label_swap-1-local", default={"accuracy": 0.99})
    change(folder, "digits-label_swap-1-fedavg", default={"accuracy": 0.99}, tuned={})  # of one of the same runs
    drawn = [{"options": {"lr": 0.1}, "score": 0.7}]  # where an option has no default
    change(folder, "digits-label_swap-0.5-fedavg", default={"accuracy": 0.99}, trials=drawn)
    (folder / "cells" / "digits-rotation-1-ifca-auto.json").unlink()
    page = Page(write_page(folder).read_bytes())
    # So the command says when it ends.
    cells, of_runs = cells_in(folder), "3 diverged; index.html says why"
    title = "digits label swap 0.5 clove (unknown number of clusters)"
    assert [*notes_on(read_cells(folder))] == [
        f"1 of {len(cells)} cells cannot run; {title}: <b>no labels</b>",
        f"of {sum(len(saved['runs']) for saved in cells.values())} runs {of_runs}",
    ]
    rows = rows_of(page, "heat-known-digits")  # label_swap, then rotation
    second = 100 * before["digits-rotation-1-ifca-known"]["runs"][1]["accuracy"]
    assert rows["ifca"][2:] == [f"{accuracy(before['digits-rotation-0.5-ifca-known']):.1f} †1", f"{second:.1f} 1/2"]
    assert rows["clove"][1] == "0/2"
    # A method with a failed run is last in that setting: 5 with one, below it with two.
    ranks = {row["method"]: float(row["mean rank"]) for row in page.rows("ranks-known")}
    table = np.array([[float(rows[m][s].split()[0]) if "/" not in rows[m][s] else -1 for s in range(4)] for m in ranks])
    expected = scipy.stats.rankdata(-table, axis=0).mean(axis=1)
    assert [*ranks.values()] == [float(f"{rank:.2f}") for rank in expected] and [*rows] == [*ranks]
    # What is missing leaves its setting or its method out, and is said.
    auto = rows_of(page, "heat-auto-digits")
    assert auto["clove"][0] == "cannot" and auto["ifca"][3] == "–"
    assert "2 of 4 settings count in the ranks" in page.text
    assert "Not run, or not finished: 1 cell with unknown number of clusters." in page.text
    ends = {row["method"]: row for row in page.rows("failures")}
    assert ends["ifca"]["diverged"] == "1" and ends["clove"]["diverged"] == "2"
    collapsed = 100 * before["digits-rotation-0.5-ifca-known"]["runs"][0]["accuracy"]
    assert ends["ifca"]["collapsed (their accuracy)"] == f"1 ({collapsed:.1f} %)"
    assert ends["clove"]["cells that cannot run"] == "1" and "<b>no labels</b>" in page.text
    assert ends["clove"]["first reason"] == "a model is not finite"
    below = [row["cell"] for row in page.rows("below-default")]
    assert below == ["digits label swap 1 clove (known number of clusters)", "digits label swap 1 local"]
    costs = {row["method"]: row["accuracy %"] for row in page.rows("costs-known")}
    assert {"ifca 7/8", "clove 6/8", "local"} <= {*costs} and costs["clove 6/8"] == "–"
    assert "(3/4)" in (folder / "table.tex").read_text()
    # What is best of the runs that are left is not the best.
    change(folder, "digits-rotation-1-ifca-known", runs=[FAILED, {"accuracy": 1.0}])
    best = re.findall('<td class="g0 best"><a href="#(.*?)">', write_page(folder).read_text())
    assert "digits-rotation-1-clove-known" in best and "digits-rotation-1-ifca-known" not in best
    table = (folder / "table.tex").read_text().split("bottomrule")[0]
    (line,) = (line for line in table.splitlines() if line[:4] == "ifca")
    assert line.count("textbf") == 1 and "textbf" not in line.split("&")[2]


def test_little_is_said_of_little(tmp_path, no_pictures):
    small = {
        "methods": {"fedavg": 0.5, "oracle": 0.9, "ifca": 0.8},
        "shifts": ("rotation",),
        "strengths": (1.0,),
        "seeds": 1,
    }
    folder = made_up(tmp_path / "out", **small)
    for file in (folder / "cells").glob("*-auto.json"):
        file.unlink()
    page = Page(write_page(folder).read_bytes())
    assert "too few methods or shifts for tests" in page.text
    assert "Unknown number of clusters Not run." in page.text
    assert [row["p, next"] for row in page.rows("ranks-known")] == ["–", "–", ""]
    for name in ("oracle", "ifca-known", "fedavg"):
        cannot(folder, f"digits-rotation-1-{name}", "no clusters")
    page = Page(write_page(folder).read_bytes())
    assert "No method can be ranked" in page.text and "ranks-known" not in page.tables
    assert r"ifca & -- & -- \\" in (folder / "table.tex").read_text()


def test_a_folder_without_whole_cells_is_refused(tmp_path):
    folder = made_up(tmp_path / "out", methods={"fedavg": 0.5}, shifts=("rotation",), strengths=(1.0,))
    file = folder / "cells" / "digits-rotation-1-fedavg.json"
    saved = json.loads(file.read_text())
    files.write_json(file, files.seal(saved | {"setting": "of others"}))
    with pytest.raises(ValueError, match="with a finished cell"):
        write_page(folder)
    files.write_json(file, files.seal(saved))
    copy = shutil.copy(file, file.with_stem("a copy"))
    with pytest.raises(ValueError, match=r"a copy\.json is damaged: .* digits-rotation-1-fedavg"):
        write_page(folder)
    copy.unlink()
    del saved["runs"]
    files.write_json(file, files.seal(saved))
    with pytest.raises(ValueError, match=r"fedavg.json is damaged: it lacks 'runs'"):
        write_page(folder)


def test_methods_without_a_number_of_clusters_are_ranked_among_themselves(tmp_path, no_pictures):
    folder = made_up(tmp_path / "out", methods={"fedavg": 0.5, "local": 0.7}, shifts=("rotation", "label_swap"))
    page = Page(write_page(folder).read_bytes())
    assert {row["method"]: row["mean rank"] for row in page.rows("ranks-known")} == {"local": "1.00", "fedavg": "2.00"}
    assert "ranks-auto" not in page.tables
    for file in sorted((folder / "cells").iterdir()):  # a part may have cells under conditions alone
        saved = json.loads(file.read_text())
        file = file.rename(file.with_stem(f"{file.stem}-hostile0.3"))
        files.write_json(file, files.seal(saved | {"cell": saved["cell"] | {"hostile": 0.3}}))
    page = Page(write_page(folder).read_bytes())
    assert len(rows_of(page, "hostile")) == 2 and page.text.count("Not run.") == 4


def test_equally_good_methods_are_tied_whatever_is_rounded(tmp_path, no_pictures):
    """A cell has the clients' accuracies with four decimals: 3 of 1/3 are less than 1, 0 and 0."""
    methods = {"fedavg": 0.6, "local": 0.7}
    folder = made_up(tmp_path / "out", methods=methods, shifts=SHIFTS[:1], strengths=(1.0,), seeds=1, clients=3)
    third = float(np.float32(1) / np.float32(3))
    for method, each, accuracy in (("fedavg", [0.3333] * 3, third), ("local", [1.0, 0.0, 0.0], 1 / 3)):
        change(folder, f"digits-rotation-1-{method}", runs=[{"per_client": each, "accuracy": accuracy}])
    [ranks] = rank(read_cells(folder))
    assert ranks.mean.tolist() == [1.5, 1.5]
    page = Page(write_page(folder).read_bytes())
    assert "in 1 setting; the same as local." in page.text and "Below" not in page.text
    assert page.rows("choices-known")[0]["as good within a standard deviation"] == "local"
    assert (folder / "table.tex").read_text().count("textbf") == 2
