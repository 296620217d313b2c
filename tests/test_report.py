"""`jfcl report`: the page, parsed by `html.parser`, is compared with the run's files, which are read independently."""

import base64
import csv
import hashlib
import html.parser
import io
import itertools
import json
import random
import re
import shlex
import shutil
import threading
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

import jfcl
from jfcl import cli, plots
from jfcl.cli.parser import parse
from jfcl.core import files
from jfcl.experiments import Config, comparison, read_run, report, run
from jfcl.experiments.config import to_saved
from jfcl.experiments.report import commands, worst_clients
from jfcl.experiments.results import Results, read_results
from jfcl.simulation.folder import identity

notes = pytest.mark.filterwarnings("default:in the report of")  # which the command line prints
ROUNDS = 4
SHARED = {
    "clients": 6,
    "clusters": 2,
    "rounds": ROUNDS,
    "local_steps": 1,
    "model": "linear",
    "seeds": 2,
    "mapping": "vmap",
}
VOID = ("meta", "img")  # elements without an end


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch):
    monkeypatch.setattr(cli, "_compilation_cache", lambda: None)


@pytest.fixture(scope="session")
def finished(once):
    """Two finished runs, once for all workers: CFL with a tree, and local training with a model for each client."""

    def fill(folder):
        tree = {"eps_1": float("inf"), "eps_2": 1e-6, "max_clusters": 6, "heterogeneity": "label_swap"}
        run(Config("cfl", **tree, **SHARED), out=folder / "cfl")
        run(Config("local", **SHARED), out=folder / "local")

    return once("reported", fill)


@pytest.fixture
def undrawn(monkeypatch):
    """Pictures that are not looked at have no content, most of a report's time."""
    monkeypatch.setattr(plots, "png", lambda figure: b"\x89PNG\r\n\x1a\n" + bytes(16))


@pytest.fixture
def copy(finished, tmp_path):
    """A copy of the finished runs, to be changed."""
    shutil.copytree(finished, tmp_path / "runs")
    return tmp_path / "runs"


class Page(html.parser.HTMLParser):
    """The tables, pictures, options and texts of a page; every element must end where it should."""

    def __init__(self, content: bytes):
        super().__init__(convert_charrefs=True)
        self.tables, self.images, self.options, self.changed, self.attributes, self.tags = {}, {}, {}, set(), [], []
        self.texts, self.listed = [], {}
        self._open, self._name = [], None
        self.feed(content.decode("utf-8"))
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag == "img":
            assert given["id"] not in self.images
            self.images[given["id"]] = given
        if tag == "table":
            self._name = given["id"]
            assert self._name not in self.tables
            self.tables[self._name] = []
        if tag == "tr":
            self.tables[self._name].append([])
        if tag in ("td", "th"):
            self.tables[self._name][-1].append("")
        if tag == "li":
            self.texts.append("")
        if tag not in VOID:
            self._open.append((tag, given))

    def handle_endtag(self, tag):
        assert self._open.pop()[0] == tag

    def handle_data(self, data):
        self.texts.append(data)
        tag, given = self._open[-1] if self._open else ("", {})
        if tag in ("td", "th"):
            self.tables[self._name][-1][-1] += data
        if tag == "dt":
            self._option = data
        if tag == "dd":
            self.options[self._option] = data
            if given.get("class") == "changed":
                self.changed.add(self._option)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def rows(self, name: str) -> list[dict[str, str]]:
        head, *rows = self.tables[name]
        assert all(len(row) == len(head) for row in rows)
        return [dict(zip(head, row, strict=True)) for row in rows]

    def png(self, name: str) -> bytes:
        head, _, data = self.images[name]["src"].partition(",")
        assert head == "data:image/png;base64"
        return base64.b64decode(data, validate=True)


def page_of(folder: Path) -> Page:
    return Page((folder / "report.html").read_bytes())


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def clients_of(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO((folder / "clients.csv").read_text())))


def sizes(text: str) -> list[float]:
    """The numbers of bytes in a text such as "1.5 MB"."""
    unit = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}
    return [float(number) * unit[name] for number, name in re.findall(r"([\d.]+) (B|kB|MB|GB)\b", text)]


# ---------------------------------------------------------------------------------------------------------------
# A finished run.


@pytest.mark.parametrize("method", ["cfl", "local"])
def test_a_run_ends_with_a_page_of_its_results(finished, method):
    folder = finished / method
    page, summary = page_of(folder), json.loads((folder / "summary.json").read_text())
    [row] = page.rows("results")
    accuracy = [record["accuracy"] for record in summary["per_seed"]]
    worst = [record["worst_client_accuracy"] for record in summary["per_seed"]]
    assert row["run"] == method
    assert row["client acc. %"] == f"{100 * np.mean(accuracy):.1f}±{100 * np.std(accuracy, ddof=1):.1f}"
    assert row["worst client %"] == f"{100 * np.mean(worst):.1f}±{100 * np.std(worst, ddof=1):.1f}"
    sent = [float(s) for s in (*sizes(row["sent"]), *sizes(row["received"]))]
    assert sent == pytest.approx([summary["bytes_up"], summary["bytes_down"]], rel=0.05)
    # By seed.
    seeds = page.rows("seeds")
    assert [int(r["seed"]) for r in seeds] == [0, 1]
    assert [float(r["client acc. %"]) for r in seeds] == pytest.approx([100 * a for a in accuracy], abs=0.051)
    assert [float(r["test loss"]) for r in seeds] == pytest.approx(
        [r["loss"] for r in summary["per_seed"]], abs=0.00051
    )
    # Bytes and seconds.
    costs = {r[""]: r[method] for r in page.rows("costs")}
    assert (costs["rounds"], costs["clients"], costs["device"]) == ("4", "6", summary["device"])
    assert sizes(costs["bytes down, all clients and rounds of a seed"]) == pytest.approx(
        [summary["bytes_down"]], rel=0.05
    )
    assert float(costs["seconds, all seeds together"]) == pytest.approx(summary["seconds"], abs=0.051)
    speed = float(costs["rounds a second, each of all seeds"].replace(",", ""))
    assert speed == pytest.approx(ROUNDS / summary["seconds"], rel=0.01)
    # Options and versions.
    config = json.loads((folder / "config.json").read_text())
    names = {"rounds" if n == "num_rounds" else n for n, value in config.items() if value is not None}
    names -= {"versions", "split_hash", "given", "schedule_rounds"}
    assert set(page.options) == names
    assert {n: page.options[n] for n in SHARED} == {n: str(v) for n, v in SHARED.items()}
    own = {"eps_1", "eps_2", "max_clusters", "heterogeneity"} if method == "cfl" else set()
    assert page.changed >= {"clients", "clusters", "rounds", "local_steps", "model", "seeds"} | own
    assert not page.changed & {"dataset", "lr", "momentum", "attack", "restarts"}
    assert all(f"{name} {version}" in page.text for name, version in summary["versions"].items())
    assert config["split_hash"] in page.text
    assert f"Finished: {ROUNDS} rounds." in page.text and "Not finished" not in page.text


def test_the_worst_clients_are_those_of_the_table_of_clients(finished):
    of_client: dict[int, list[float]] = {}
    for row in clients_of(finished / "cfl"):
        of_client.setdefault(int(row["client"]), []).append(float(row["accuracy"]))
    wanted = sorted(of_client, key=lambda i: (np.mean(of_client[i]), i))
    rows = page_of(finished / "cfl").rows("worst")
    assert [int(row["client"]) for row in rows] == wanted
    for row in rows:
        values = of_client[int(row["client"])]
        found = [float(row[name]) for name in ("mean accuracy %", "lowest seed", "highest seed")]
        assert found == pytest.approx([100 * np.mean(values), 100 * min(values), 100 * max(values)], abs=0.051)
    first = {row["client"]: row for row in clients_of(finished / "cfl") if row["seed"] == "0"}
    assert all(row["true cluster"] == first[row["client"]]["true_cluster"] for row in rows)


def test_the_page_is_one_file_that_loads_nothing(finished):
    content = (finished / "cfl" / "report.html").read_bytes()
    page = Page(content)
    assert not {"script", "link", "iframe", "object", "embed", "form", "audio", "video", "source", "base"} & {
        *page.tags
    }
    loads = [(tag, name, value) for tag, name, value in page.attributes if name in ("src", "href", "srcset", "data")]
    assert loads and all((tag, name) == ("img", "src") for tag, name, _ in loads)
    assert all(value.startswith("data:image/png;base64,") for _, _, value in loads)
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert not re.findall(rb"url\(|@import|https?:", content)
    assert ("meta", "content", "default-src 'none'; img-src data:; style-src 'unsafe-inline'") in page.attributes
    assert b"prefers-color-scheme: dark" in content and b"@media print" in content
    for name, image in page.images.items():
        with Image.open(io.BytesIO(page.png(name))) as picture:
            assert picture.size == (int(image["width"]), int(image["height"]))
        assert len(image["alt"]) > 20


def test_the_pictures_of_a_run_are_drawn_once(finished):
    page = page_of(finished / "cfl")
    assert set(page.images) == {"accuracy", "loss", "clients", "clusters", "similarity", "tree"}
    for name in set(page.images) - {"similarity"}:
        assert page.png(name) == (finished / "cfl" / "plots" / f"{name}.png").read_bytes(), name


def test_clusters_are_not_drawn_of_a_method_that_finds_none(finished):
    assert "clusters" not in page_of(finished / "local").images
    assert not (finished / "local" / "plots" / "clusters.png").exists()


def test_the_splits_are_those_of_the_parameter_tree(finished):
    text = page_of(finished / "cfl").text
    with np.load(finished / "cfl" / "tree.npz") as tree:
        first = np.flatnonzero(tree["born"] == tree["born"][tree["born"] > 0].min())[0]
        compared, active = tree["side"][first] > 0, np.flatnonzero(tree["active"])
        across, born = tree["cross_similarity"][first], tree["born"][first]
        members = {k: int(np.sum(tree["cluster"] == k)) for k in active}
    assert re.search(rf"{compared.sum()} clients \([^)]*\), split in round {born}; largest similarity across", text)
    assert f"across {across:.3f}" in text
    assert len(active) > 1
    for k, count in members.items():
        assert re.search(rf"cluster {k}, since round \d+: {count} clients", text), k


def test_the_similarities_are_cosines(finished, copy, monkeypatch):
    drawn = []
    draw = plots.similarity
    monkeypatch.setattr(plots, "similarity", lambda m, c: drawn.append((m, c)) or draw(m, c))
    report(copy / "cfl")

    def cosine(a, b):
        return float(np.dot(a, b) / np.sqrt(np.dot(a, a) * np.dot(b, b)))

    with np.load(finished / "cfl" / "tree.npz") as tree:
        first = np.flatnonzero(tree["born"] == tree["born"][tree["born"] > 0].min())[0]
        rows, cluster = tree["updates"][first].astype(np.float64), tree["cluster"]
    order = sorted(range(6), key=lambda i: (cluster[i], i))
    [(matrix, shown)] = drawn
    assert shown.tolist() == cluster[order].tolist()
    np.testing.assert_allclose(matrix, [[cosine(rows[i], rows[j]) for j in order] for i in order], atol=1e-5)
    assert "approximate" not in page_of(copy / "cfl").text
    change(copy / "cfl", tree_dim=rows.shape[1])
    report(copy / "cfl")
    assert f"They are approximate, by {rows.shape[1]:,} sums" in page_of(copy / "cfl").text


def test_a_report_changes_nothing_else(copy):
    before = contents(copy)
    (copy / "cfl" / "report.html").unlink()
    assert cli.main(["report", str(copy / "cfl")]) == 0
    after = contents(copy)
    assert after.keys() == before.keys()
    assert {name for name in after if after[name] != before[name]} <= {"cfl/report.html"}


@pytest.mark.usefixtures("undrawn")
def test_several_runs_side_by_side(copy, capsys):
    before = contents(copy)
    folders = [str(copy / "cfl"), str(copy / "local")]
    assert cli.main(["report", *folders]) == 0
    assert str(copy / "report.html") in capsys.readouterr().out.replace("\n", "")
    page = page_of(copy)
    for row, name in zip(page.rows("results"), ("cfl", "local"), strict=True):
        summary = json.loads((copy / name / "summary.json").read_text())
        assert row["run"] == name and row["client acc. %"].startswith(f"{100 * summary['mean']['accuracy']:.1f}±")
    differ = {row["option"]: (row["cfl"], row["local"]) for row in page.rows("differences")}
    assert differ["heterogeneity"] == ("label_swap", "rotation") and differ["eps_1"] == ("inf", "–")
    assert "lr" not in differ and "method" not in differ
    assert "2 different splits of the data" in page.text
    wanted = {"accuracy", "loss", "clients", "methods", "cfl-tree", "cfl-similarity"}
    assert wanted | {"cfl-clusters"} == set(page.images)
    assert {"cfl-worst", "local-worst", "cfl-seeds", "local-seeds"} <= set(page.tables)
    assert {name: data for name, data in contents(copy).items() if name != "report.html"} == before
    alone = Page(report(folders[1:], out=copy / "new" / "x.html").read_bytes())
    assert alone.tables == Page(before["local/report.html"]).tables
    assert comparison.unused(copy / "report", ".html") == copy / "report-2.html"  # what is there stays


@pytest.mark.usefixtures("undrawn")
def test_the_commands_on_the_page_are_those_of_the_command_line(finished, copy):
    stop(copy / "cfl")
    with pytest.warns(UserWarning, match="is missing"):
        report(copy / "cfl")
    for folder, resumes in ((finished / "cfl", True), (finished / "local", True), (copy / "cfl", False)):
        lines = re.findall(r"^jfcl .*$", "\n".join(page_of(folder).texts), flags=re.MULTILINE)
        resumed, repeated = [parse(shlex.split(line)[1:]) for line in lines]
        assert resumed.resume and resumed.out == str(folder) and resumed.config == str(folder / "config.json")
        assert getattr(resumed, "rounds", None) == (2 * ROUNDS if resumes else None)
        assert not repeated.resume and repeated.out != str(folder) and not Path(repeated.out).exists()
    # More rounds than a schedule is planned for are refused, and a run that ended early ends there again.
    run = read_results(finished / "cfl")
    scheduled, longer = (
        {**run.config, **change} for change in ({"schedule_rounds": ROUNDS}, {"num_rounds": ROUNDS + 1})
    )
    early = run.summary | {"ended": "every cluster is final"}
    for other in (run._replace(config=scheduled), run._replace(config=longer, summary=early)):
        assert "--resume" not in "".join(commands(other))
    # One that was resumed for fewer rounds than planned goes on to these.
    text = "".join(commands(run._replace(config=longer)))
    assert f"# continue to round {ROUNDS + 1}" in text and "--resume" in text and "--rounds" not in text


def change(folder: Path, **entries) -> None:
    """Changes entries of `config.json`, and the digests that hold them."""
    config = json.loads((folder / "config.json").read_text()) | entries
    (folder / "config.json").write_text(json.dumps(config))
    summary = json.loads((folder / "summary.json").read_text()) | {"run": identity(config)}
    (folder / "summary.json").write_text(json.dumps(files.seal(summary)))


@pytest.mark.usefixtures("undrawn")
def test_names_are_shown_as_they_are(copy):
    name = "<script>alert(1)</script> & $\\frac{x$ '\""
    folder = copy / name.replace("/", "|")
    shutil.move(copy / "local", folder)
    change(folder, store=None, share="<img src=x onerror=y>")
    report([folder, copy / "cfl"], out=copy / "both.html")
    page = Page((copy / "both.html").read_bytes())
    assert folder.name in [row["run"] for row in page.rows("results")] and folder.name in page.text
    assert page.options["share"] == "<img src=x onerror=y>"
    assert "script" not in page.tags and not [name for _, name, _ in page.attributes if name.startswith("on")]


# ---------------------------------------------------------------------------------------------------------------
# Unfinished and damaged runs.


def stop(folder: Path) -> None:
    """Leaves of a finished run what there is in its second round: the last line is cut short."""
    for name in ("summary.json", "clients.csv", "params.npz", "report.html"):
        (folder / name).unlink(missing_ok=True)
    for file in folder.glob("*.npz"):
        file.unlink()
    shutil.rmtree(folder / "plots")
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(b"".join([*lines[:5], lines[5][:40]]))  # two rounds, one seed of the third
    *earlier, last = sorted((folder / "checkpoints").iterdir(), key=lambda place: int(place.name))
    for place in earlier:  # of a slow machine, which makes several
        shutil.rmtree(place)
    last = last.rename(last.with_name("2"))
    before, about = b"".join(lines[:4]), json.loads((last / "about.json").read_text())
    about["records"] = {"count": 4, "bytes": len(before), "sha256": hashlib.sha256(before).hexdigest()}
    files.write_json(last / "about.json", files.seal(about))


@pytest.mark.usefixtures("undrawn")
@notes
def test_an_unfinished_run_is_reported_up_to_its_last_round(copy, capsys):
    folder = copy / "cfl"
    stop(folder)
    assert cli.main(["report", str(folder)]) == 0
    said = capsys.readouterr().err
    assert "summary.json is missing: the run is not finished" in " ".join(said.split())
    page = page_of(folder)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()[:5]]
    second = [r for r in records if r["round"] == 2]
    accuracy = [100 * r["accuracy"] for r in second]
    assert page.rows("results")[0]["client acc. %"] == f"{np.mean(accuracy):.1f}±{np.std(accuracy, ddof=1):.1f}"
    costs = {r[""]: r["cfl"] for r in page.rows("costs")}
    assert (costs["rounds"], costs["seconds, all seeds together"], costs["device"]) == ("2", "–", "–")
    assert sizes(costs["bytes up, all clients and rounds of a seed"]) == pytest.approx(
        [second[0]["bytes_up"]], rel=0.05
    )
    assert "Not finished: 2 of 4 rounds." in page.text and "summary.json is missing" in page.text
    assert "--resume continues from round 2." in page.text
    assert set(page.images) == {"accuracy", "loss", "clusters"} and "worst" not in page.tables
    # The results of an earlier end, as a run that is extended leaves them, are not those of this round.
    shutil.copy(copy / "local" / "clients.csv", folder)
    with pytest.warns(UserWarning, match=r"summary\.json is missing"):
        report(folder)
    assert "worst" not in page_of(folder).tables


@pytest.mark.usefixtures("undrawn")
@notes
def test_a_folder_of_simulate_is_reported(finished, tmp_path):
    (tmp_path / "run").mkdir()
    records = (finished / "local" / "metrics.jsonl").read_text()
    (tmp_path / "run" / "metrics.jsonl").write_text(records)
    (tmp_path / "run" / "config.json").write_text(
        json.dumps({"key": [0, 0], "method": ["mine"], "versions": {"jfcl": jfcl.__version__, "jax": "1"}})
    )
    with pytest.warns(UserWarning, match=r"summary\.json is missing: the run is not finished"):
        report(tmp_path / "run")
    page = page_of(tmp_path / "run")
    assert "resume=True" in page.text and "jfcl run" not in page.text and page.options == {"method": "['mine']"}
    assert set(page.images) == {"accuracy", "loss", "clusters"}
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    with pytest.warns(UserWarning, match=r"summary\.json is missing"):
        report(tmp_path / "run")
    assert "No round was evaluated." in page_of(tmp_path / "run").text


def test_an_infinite_loss_is_the_worst():
    """That of a NaN has no test examples."""
    clients = {"seed": np.zeros(3, int), "client": np.arange(3), "loss": np.array([1.0, np.inf, np.nan])}
    table = worst_clients(Results(Path(), {}, {}, [], clients, True, []), "")
    assert [row[-1] for row in table.rows] == ["inf", "1.000"] and "2 worst of 2 clients" in table.caption


@pytest.mark.parametrize("finds", [True, False])
def test_clusters_of_a_method_that_finds_none_are_not_shown(finds):
    """They are the clients' own numbers, which would stand beside the true clusters."""
    clients = {"seed": np.zeros(3, int), "client": np.arange(3), "cluster": np.arange(3), "loss": np.ones(3)}
    table = worst_clients(Results(Path(), {}, {"finds_clusters": finds}, [], clients, True, []), "")
    assert ("cluster" in table.heads) == ("cluster" in table.caption) == finds


@pytest.mark.slow
def test_a_run_in_python_beside_one_of_the_command_line(finished, copy):
    clients, cluster, task, training = jfcl.testing.problem()
    options = {"num_rounds": 2, "test_clients": clients, "true_cluster": cluster, "config": {"clusters": 3}}
    folder = copy / "mine"
    jfcl.simulate(jfcl.fedavg(task, training), clients, key=jax.random.key(0), out=folder, **options)
    report([folder, finished / "cfl"], out=copy / "both.html")
    page = Page((copy / "both.html").read_bytes())
    summary = json.loads((folder / "summary.json").read_text())
    costs = {row[""]: row["mine"] for row in page.rows("costs")}
    assert float(costs["seconds, all seeds together"]) == pytest.approx(summary["seconds"], abs=0.051)
    assert (costs["clients"], costs["device"]) == (str(len(cluster)), summary["device"])
    differ = {row["option"]: (row["mine"], row["cfl"]) for row in page.rows("differences")}
    assert differ == {"clusters": ("3", "2"), "rounds": ("2", "4")}
    assert "Options and data of mine are not known" in page.text and "Not finished" not in page.text
    assert "mine-worst" in page.tables and "true cluster" in page.tables["mine-worst"][0]


@pytest.mark.usefixtures("undrawn")
def test_options_are_shown_as_they_were_used(copy):
    change(copy / "local", optimizer="sgd", eval_every=1)
    sides = Page(report([copy / "cfl", copy / "local"], out=copy / "x.html").read_bytes()).rows("differences")
    assert not {"optimizer", "eval_every"} & {row["option"] for row in sides}  # given or not, they are the same
    page = page_of(copy / "cfl")
    used = {"optimizer": "sgd", "schedule": "constant", "keep": "nothing", "eval_every": "1"}
    assert {name: page.options[name] for name in used} == used and not page.changed & set(used)
    assert page.options["min_rounds"] == "1" and not {"cohort", "patience"} & {*page.options}
    assert "training examples" in page.tables["worst"][0] and "clients with test examples" in page.text


DAMAGE = {
    "missing": lambda file: file.unlink(),
    "cut": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "other": lambda file: file.write_bytes(b"PK\x03\x04 \xff no file of jfcl\n"),
    "empty": lambda file: file.write_bytes(b""),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_run_is_refused_in_a_sentence(damage, copy):
    for name in ("config.json", "summary.json", "metrics.jsonl", "clients.csv", "tree.npz", "params.npz"):
        if (name, damage) == ("summary.json", "missing"):
            continue  # an unfinished run
        whole = (copy / "cfl" / name).read_bytes()
        DAMAGE[damage](copy / "cfl" / name)
        before = contents(copy / "cfl")
        with pytest.raises(ValueError, match=rf"{name} is (missing|damaged)"):
            report(copy / "cfl")
        assert contents(copy / "cfl") == before
        (copy / "cfl" / name).write_bytes(whole)


@pytest.mark.slow_cases("of another run")
@pytest.mark.parametrize("how", ["missing", "of another run"])
def test_a_picture_that_the_run_did_not_leave_is_drawn_again(how, copy):
    file, shown = copy / "cfl" / "plots" / "accuracy.png", page_of(copy / "cfl").png("accuracy")
    if how == "of another run":
        shutil.copy(copy / "local" / "plots" / "accuracy.png", file)
    else:
        file.unlink()
    report(copy / "cfl")
    assert page_of(copy / "cfl").png("accuracy") == shown


def test_a_line_that_is_no_record_is_named(copy, capsys):
    file = copy / "local" / "metrics.jsonl"
    lines = file.read_text().splitlines()
    (copy / "local" / "summary.json").unlink()
    odd = [json.dumps(json.loads(lines[2]) | of) for of in ({"seed": "0"}, {"accuracy": "0.5"}, {"bytes_up": "x"})]
    for line in (lines[2][:50], *odd):
        file.write_text("\n".join([*lines[:2], line, *lines[3:]]) + "\n")
        assert cli.main(["report", str(copy / "local")]) == 2
        assert re.search(r"metrics\.jsonl is damaged: line 3", " ".join(capsys.readouterr().err.split()))
    # A number that is another than before the checkpoint.
    file.write_text("\n".join([*lines[:2], json.dumps(json.loads(lines[2]) | {"accuracy": 1.0}), *lines[3:]]) + "\n")
    assert cli.main(["report", str(copy / "local")]) == 2
    assert "metrics.jsonl is damaged: its first 8 lines" in " ".join(capsys.readouterr().err.split())
    shutil.rmtree(copy / "local" / "checkpoints")
    # Records that are none of a run: out of order, or with other things in the place of numbers.
    for of_last in ({}, {"loss": [{}]}, {"train_loss": {}}):
        last = [json.dumps(json.loads(line) | of_last) for line in lines[-2:]]
        file.write_text("\n".join([*lines[:-2], *last, *lines[: 2 * (not of_last)]]) + "\n")
        assert cli.main(["report", str(copy / "local")]) == 2
        assert "metrics.jsonl is damaged: its lines are not the" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_bytes_that_change_at_random_end_no_report(copy, capsys):
    rng, intact = random.Random(0), contents(copy / "cfl")
    names = [name for name in intact if name not in ("report.html", "lock") and "checkpoints" not in name]
    for _ in range(100):
        for name in rng.sample(names, 2):
            data = bytearray(intact[name])
            for _ in range(rng.choice([1, 5, 100])):
                data[rng.randrange(len(data))] = rng.randrange(256)
            (copy / "cfl" / name).write_bytes(bytes(data))
        assert cli.main(["report", str(copy / "cfl")]) in (0, 2)  # 0 where pictures alone have changed
        assert "Traceback" not in capsys.readouterr().err
        for name, data in intact.items():
            (copy / "cfl" / name).write_bytes(data)


# ---------------------------------------------------------------------------------------------------------------
# What is refused.


def test_what_is_no_run_is_refused(copy, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "config.json").write_text('{"name": "another program"}')
    (tmp_path / "file").write_text("x")
    (tmp_path / "ranking" / "cells").mkdir(parents=True)
    (tmp_path / "ranking" / "settings.json").write_text("{}")
    before, cfl = contents(tmp_path), str(copy / "cfl")
    cases = [
        ([str(tmp_path / "nowhere")], "holds no run: it is not there"),
        ([str(tmp_path / "file")], "holds no run: it is a file"),
        ([str(tmp_path / "empty")], "holds no run: config.json is missing"),
        ([str(tmp_path / "ranking")], "holds a ranking of jfcl shifts, and no run"),
        ([str(tmp_path)], f"config.json is missing; runs are in {tmp_path / 'foreign'}"),
        ([str(tmp_path / "foreign")], "was not made by jfcl: it has no versions"),
        ([cfl, str(tmp_path / "empty")], "holds no run"),
        ([cfl, "--out", str(tmp_path / "x.txt")], "out must be a file that ends in .html"),
        ([cfl, "--out", str(copy / "cfl" / "metrics.jsonl")], "out must be a file that ends in .html"),
        ([cfl, "--out", str(tmp_path / "file" / "x.html")], "out must be"),
        ([], "the following arguments are required"),
    ]
    for arguments, said in cases:
        assert cli.main(["report", *arguments]) == 2, arguments
        printed = " ".join(capsys.readouterr().err.split())
        assert said in printed and "Traceback" not in printed, (arguments, printed)
    assert contents(tmp_path) == before
    with pytest.raises(ValueError, match="runs must be at least one folder"):
        report([])
    with pytest.raises(ValueError, match="nowhere holds no run"):  # one folder, as in report
        comparison.compare("nowhere")


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_another_process_writes_is_reported_elsewhere(copy, capsys):
    held, done = threading.Event(), threading.Event()

    def write():
        with files.lock(copy / "cfl" / "lock"):
            held.set()
            done.wait(60)

    other = threading.Thread(target=write)  # which the lock refuses as it does a process
    other.start()
    assert held.wait(60)
    before = contents(copy)
    try:
        assert cli.main(["report", str(copy / "cfl")]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "in use by another process" in said and "--out FILE.html" in said
        assert contents(copy) == before
        assert cli.main(["report", str(copy / "cfl"), "--out", str(copy / "x.html")]) == 0
    finally:
        done.set()
        other.join()
    assert (copy / "x.html").exists()


def test_a_report_that_was_stopped_leaves_the_old_one(copy, monkeypatch):
    old = (copy / "cfl" / "report.html").read_bytes()
    report_of = copy / "cfl" / "report.html"

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(files, "write_all", full)
        with pytest.raises(OSError, match="No space left"):
            report(copy / "cfl")
    assert report_of.read_bytes() == old
    (copy / "cfl" / "report.html.tmp").write_bytes(b"half of it")
    files.remove_leftovers(copy / "cfl")
    assert not (copy / "cfl" / "report.html.tmp").exists()


def test_a_run_is_finished_also_if_its_report_cannot_be_written(copy):
    records = read_run(copy / "cfl")[1]
    (copy / "cfl" / "report.html").unlink()
    (copy / "cfl" / "report.html").mkdir()
    with pytest.warns(UserWarning, match="is finished, but its report was not written: .*must be a file"):
        run.__globals__["_write_report"](copy / "cfl", records)
    assert not list((copy / "cfl").glob("*.tmp"))


def test_a_new_run_does_not_replace_the_report_of_another(copy):
    for file in (copy / "cfl").iterdir():
        if file.name != "report.html":
            shutil.rmtree(file) if file.is_dir() else file.unlink()
    with pytest.raises(ValueError, match=r"holds report\.html already; choose a new or empty folder"):
        run(Config("fedavg", **SHARED), out=copy / "cfl")


# ---------------------------------------------------------------------------------------------------------------
# Colours.


def test_the_colours_differ_for_all_kinds_of_colour_vision():
    # Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB; distances in CIELAB.
    kinds = [np.eye(3)]
    kinds.append([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]])
    kinds.append([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]])
    kinds.append([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]])
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    rgb = np.array([[int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)] for color in plots.PALETTE])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    for kind in kinds:
        xyz = np.clip(linear @ np.array(kind).T, 0, 1) @ np.array(to_xyz).T / [0.9505, 1, 1.089]
        f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
        lab = np.stack([116 * f[:, 1] - 16, 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])], axis=1)
        distance = np.linalg.norm(lab[:, None] - lab[None], axis=-1)[np.triu_indices(len(lab), 1)]
        assert distance.min() > 15  # tab10: 4 (its brown and green, without red cones)


def test_lines_differ_in_dashes_too_and_many_clusters_in_lightness():
    records = [{"seed": 0, "round": t, "accuracy": 0.5} for t in (1, 2)]
    lines = plots.curves({str(i): records for i in range(4)}).axes[0].lines
    assert len({line.get_linestyle() for line in lines}) == 4 and len({line.get_color() for line in lines}) == 4
    found = [plots.cluster_colors(20)(i) for i in range(20)]
    assert len(set(found)) == 20
    short = plots.curves({"a": records})
    short.canvas.draw()
    assert all(tick == int(tick) for tick in short.axes[0].get_xticks())
    unsorted = plots.assignments([{"seed": 0, "round": 1, "cluster": [2, 0, 2]}])
    assert unsorted.axes[0].images[0].get_array().tolist() == [[0], [2], [2]]
    for count in (1, 8, 10, 17):
        rows = [{"seed": 0, "round": 6 + t, "cluster": [0]} for t in range(count)]
        ticks = plots.assignments(rows).axes[1].get_xticks()
        assert 0 < len(ticks) <= 8 and len(set(np.diff(ticks).tolist())) <= 1  # evenly spaced


def test_the_legend_of_a_busy_machine_is_no_warning(monkeypatch):
    hours = itertools.count(0, 3600)
    monkeypatch.setattr("matplotlib.legend.time.perf_counter", lambda: next(hours))
    with warnings.catch_warnings(record=True) as warned:
        curves = plots.curves({"a": [{"seed": 0, "round": t, "accuracy": 0.5} for t in (1, 2)]})
        for figure in (curves, plots.client_accuracies({"a": np.array([0.5])})):
            figure.savefig(io.BytesIO())
    assert not warned and next(hours) > 0  # the legend has asked for the time


def test_plots_show_unknown_clusters_large_values_and_single_clients():
    of_one = plots.assignments([{"seed": 0, "round": 1, "cluster": [2, 0, 2]}], np.zeros(3, int))  # own data
    assert of_one.axes[0].get_ylabel() == "clients, sorted by last cluster"
    unknown = plots.assignments([{"seed": 0, "round": 1, "cluster": [0, 1]}], np.array([0, -1]))
    assert [panel.images[0].get_array().tolist() for panel in unknown.axes] == [[[0], [1]]] * 2
    assert plots.bars({"a": [{"seed": 0, "round": 1, "loss": 2.5}]}, ["loss"]).axes[0].get_ylim()[1] > 2.5
    assert plots.client_accuracies({"a": np.array([0.5])}).axes[0].lines[0].get_marker() == "."
    cells = plots.heatmap(np.array([[np.inf, 1.0]]), {"a": [1], "b": [1, 2]}, label="loss").axes[0]
    assert [text.get_text() for text in cells.texts] == ["diverged", "1"] and cells.patches[0].get_x() == 0.5


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ({"dp_clip": 1.0}, {"weights": "equal", "dp_noise": 0.0, "dp_min_size": 1, "dp_sampling": "poisson"}),
        ({"aggregator": "bucketing+krum"}, {"weights": "equal", "bucket_size": 2}),
        ({"partition": "dirichlet"}, {"alpha": 0.5}),
        ({"schedule": "cosine"}, {"keep": "schedule"}),
        ({"lr_decay": 0.9}, {"keep": "schedule"}),
        ({"population": 150}, {"cohort": 100}),
        ({"population": 30}, {"cohort": 30}),
    ],
)
def test_options_that_follow_from_others_are_shown_as_they_are_used(given, used):
    found = Config("fedavg", **given).values
    assert {name: found[name] for name in used} == used
    configs = {str(i): to_saved(Config("fedavg", **options), "") for i, options in enumerate((given, given | used))}
    assert comparison.differences(configs) == {}


def test_options_of_a_run_in_python_are_not_known_and_those_of_others_compared():
    options = {"a": {"attack": "ipm", "malicious": 0.1, "lr": 0.5}, "b": {"lr": 0.5}}
    configs = {name: to_saved(Config("fedavg", **given), "") for name, given in options.items()}
    found = comparison.differences(configs | {"c": {"key": [0, 1], "num_rounds": 9}})
    assert found["attack"] == {"a": "ipm", "b": "–", "c": "not known"}
    assert found["malicious"] == {"a": "0.1", "b": "0.0", "c": "not known"}
    assert found["rounds"]["c"] == "9" and "lr" not in found


def test_options_that_a_method_does_not_take_have_no_value_there():
    configs = {"a": to_saved(Config("fedavg"), ""), "b": to_saved(Config("ifca", restarts=5), "")}
    assert "restarts" not in configs["a"]
    found = comparison.differences(configs)
    assert found == {"method": {"a": "fedavg", "b": "ifca"}, "restarts": {"a": "–", "b": "5"}}


@pytest.mark.parametrize("count", [1, 2, 6])
def test_the_legend_of_the_bars_lies_within_their_frame(count):
    records = [{"seed": 0, "round": 1, "accuracy": 0.5, "worst_client_accuracy": 0.25}]
    figure = plots.bars({str(i): records for i in range(count)})
    figure.canvas.draw()
    frame, legend = figure.axes[0].get_window_extent(), figure.axes[0].get_legend().get_window_extent()
    assert frame.x0 < legend.x0 and legend.x1 < frame.x1


def drawn(figure):
    """A figure after it was drawn, and the places of its axes and of their names."""
    figure.canvas.draw()
    return figure.axes[0].get_window_extent(), [name.get_window_extent() for name in figure.axes[0].get_xticklabels()]


@pytest.mark.parametrize("column", [False, True])
def test_names_below_bars_and_their_legend_cover_nothing(column, tmp_path):
    records = [{"seed": 0, "round": 1, "accuracy": 0.5, "worst_client_accuracy": 0.25}]
    for names in (["a", "b"], ["ifca-rotation", "fedavg-rotation", "local-rotation"]):
        figure = plots.bars(dict.fromkeys(names, records))
        plots.save(figure, tmp_path / "a.svg", column=column)
        frame, places = drawn(figure)
        turned = {name.get_rotation() for name in figure.axes[0].get_xticklabels()} == {45}
        assert turned or not any(a.overlaps(b) for a, b in itertools.pairwise(places))
        assert figure.axes[0].get_legend().get_window_extent().y0 >= frame.y1
    long = plots.bars(dict.fromkeys(["out", f"/tmp/{'a-folder/' * 12}out"], records))
    plots.save(long, tmp_path / "a.svg", column=column)
    assert drawn(long)[0].height > 60
    many = plots.bars({f"run-{i}": records for i in range(20)})
    plots.save(many, tmp_path / "a.svg", column=column)
    assert drawn(many)[0].height > 60  # pixels at 100 to the inch


@pytest.mark.parametrize("column", [False, True])
def test_curves_of_many_runs_differ_and_are_not_below_their_names(column, tmp_path):
    curve = [{"seed": 0, "round": t, "accuracy": t / 9} for t in range(1, 9)]
    path = plots.label("/home/a/folder" * 20)  # as the name of one of two folders of one name
    figure = plots.curves({path: curve, plots.label("b"): curve})
    plots.save(figure, tmp_path / "a.svg", column=column)
    assert drawn(figure)[0].width > 100
    figure = plots.curves({f"a-run-with-a-long-name-{i}": curve for i in range(20)})
    assert len({(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines}) == 20
    plots.save(figure, tmp_path / "a.svg", column=column)
    frame, _ = drawn(figure)
    [legend] = figure.legends
    assert legend.get_window_extent().y1 < frame.y0 and frame.height > 60
    width = figure.get_window_extent().width
    assert frame.x1 <= width and legend.get_window_extent().x1 <= width


def test_one_round_has_no_fractions():
    figure = plots.curves({"a": [{"seed": 0, "round": 1, "accuracy": 0.5}]})
    figure.canvas.draw()
    assert all(name.get_text().isdigit() for name in figure.axes[0].get_xticklabels())


def test_seeds_that_found_the_clusters_are_explained():
    def rows(rounds, **summary):
        per_seed = [{"seed": s, "rounds_to_recovery": r} for s, r in enumerate(rounds)]
        return {"mean": {"clusters_in_use": 2.0}, "std": {}, "per_seed": per_seed, "num_clusters": 2} | summary

    assert comparison.seeds_text({"a": rows([3, 3]), "b": rows([2]), "c": rows([2] * 3), "d": rows([3, 4])}) == (
        "mean ± sample std over 2 or 3 seeds or seed 0"
    )
    [note] = comparison.results_notes({"a": rows([3, None]), "b": rows([2, 2])})
    assert "in n of the m seeds, at least 99% of the clients" in note
    assert comparison.results_rows({"a": rows([3, None])})[1][0][6] == "3 (1/2)"
    without = {"a": rows([2, 2]), "b": rows([None, None]), "c": rows([1, None], finds_clusters=False)}
    assert comparison.results_notes(without) == []
    assert comparison.results_rows(without)[1][2][6] == "–"
    lines = comparison.results_csv({name: run | {"method": "m"} for name, run in without.items()}).splitlines()
    assert [line.split(",")[:4] for line in lines[1:]] == [
        ["a", "m", "2", "2"],
        ["b", "m", "2", "0"],
        ["c", "m", "2", ""],  # of a method that finds none
    ]


def test_a_mean_over_seeds_is_of_all_of_them():
    """But for the rounds to recovery, which are those of the seeds that have found the clusters."""
    rows = [
        {"seed": 0, "accuracy": 0.5, "loss": 1.0, "cluster_accuracy": 0.75, "rounds_to_recovery": 4},
        {"seed": 1, "accuracy": 0.75, "loss": None, "cluster_accuracy": 0.995, "rounds_to_recovery": None},
    ]
    run = {"per_seed": rows, "num_clusters": 2, "mean": {"accuracy": 0.625, "clusters_in_use": 2.5}}
    assert comparison.over_seeds(run, "accuracy") == (0.625, pytest.approx(np.sqrt(2) / 8))
    assert comparison.over_seeds(run, "cluster_accuracy") == (0.8725, pytest.approx(0.245 / np.sqrt(2)))
    assert comparison.over_seeds(run, "rounds_to_recovery") == (4, None)
    assert comparison.over_seeds(run, "loss") == comparison.over_seeds(run | {"num_clusters": 1}, "adjusted_rand")
    assert comparison.over_seeds(run | {"num_clusters": 1}, "cluster_accuracy") == (None, None)
    # A run in perplexities beside one without any.
    text = [{"seed": 0, "accuracy": None, "perplexity": 2.0, "rounds_to_recovery": None}]
    text = {"per_seed": text, "num_clusters": 2, "mean": {"perplexity": 2.0, "accuracy": None, "clusters_in_use": 1.0}}
    heads, (first, second) = comparison.results_rows({"a": run, "b": text})
    assert heads[1] == "perplex-\nity" and first[1:4] == ["–", "–", "87.2±17.3"] and second[1] == "2.0"
    assert first[5:7] == ["2.5", "4 (1/2)"] and comparison.recovered_seeds(run | {"num_clusters": 1}) == 0
    # 99 % of the clients are enough; those of an unknown cluster say nothing.
    clusters, true = np.array([[0, 0, 1, 1], [1, 1, 0, 1]]), np.array([0, 0, 1, -1])
    [note] = comparison.clusters_notes(run, clusters, true)
    assert note == "the true clusters are found in 1 of 2 seeds, and not in seed 0 (75.0 % of the clients)"


def test_tables_of_files_and_pages_have_the_metrics_of_the_user():
    known = {"accuracy": 0.5, "bytes_up": 8.0, "newcomer_loss": 1.0, "rounds_to_recovery": None}
    rows = [{"seed": s} | known | {"macro_f1": f1} for s, f1 in enumerate([0.25, 0.5])]
    summaries = {"a": {"mean": known | {"clusters_in_use": 1.0, "macro_f1": 0.375}, "per_seed": rows}}
    summaries["b"] = {"mean": known | {"clusters_in_use": 1.0}, "per_seed": [{"seed": 0} | known]}
    heads, (first, second) = comparison.results_rows(summaries)
    assert (heads[-2:], first[-1], second[-1]) == (["received", "macro_f1"], "0.375±0.177", "–")
    assert r"0.375 $\pm$ 0.177 \\" in comparison.results_tex(summaries)
    assert comparison.results_rows(summaries, further=False)[0] == heads[:-1]  # in 80 columns


def test_values_that_are_not_finite_leave_a_gap():
    records = [{"seed": 0, "round": t, "train_loss": v} for t, v in ((1, 1.0), (2, float("inf")), (3, 2.0))]
    values = plots.curves({"x": records}, "train_loss").axes[0].lines[0].get_ydata()
    np.testing.assert_array_equal(values, [1.0, np.nan, 2.0])


def test_pictures_of_any_width_are_drawn():
    picture = Image.open(io.BytesIO(plots.png(Figure(figsize=(600, 1)))))
    assert picture.width < 2**16


@pytest.mark.slow_cases("a.pdf-%PDF")
@pytest.mark.parametrize(("name", "begins"), [("a.png", b"\x89PNG"), ("a.pdf", b"%PDF"), ("a.svg", b"<?xml")])
def test_plots_are_saved_in_the_format_of_their_name(name, begins, tmp_path):
    assert plots.save(Figure(), tmp_path / name).read_bytes().startswith(begins)


def test_other_formats_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a name that ends in one of .png, .pdf, .svg, got 'a.jpg'"):
        plots.save(Figure(), tmp_path / "a.jpg")


def test_labels_of_curves_are_shown_as_they_are():
    """matplotlib hides labels that begin with an underscore, and reads dollars as mathematics."""
    curve = [{"seed": 0, "round": 1, "accuracy": 0.5}]
    figure = plots.curves({plots.label(name): curve for name in ("_a", "b$")}, "accuracy")
    [legend] = [axes.get_legend() for axes in figure.axes]
    assert [text.get_text().strip() for text in legend.get_texts()] == ["_a", r"b\$"]


def test_an_unfinished_run_has_agreement_with_clusters_where_there_are_any(copy):
    """As a finished one: local training has a model for each client, and without heterogeneity there is one cluster."""
    stop(copy / "local")
    assert read_results(copy / "local").summary["finds_clusters"] is False
    stop(copy / "cfl")
    file = copy / "cfl" / "config.json"
    config = json.loads(file.read_text())
    assert config["clusters"] > 1 and read_results(copy / "cfl").summary["num_clusters"] == config["clusters"]
    file.write_text(json.dumps(config | {"heterogeneity": "none"}))
    assert read_results(copy / "cfl").summary["num_clusters"] == 1


@pytest.mark.slow_cases("figures")
@pytest.mark.parametrize("forms", [[], ["pdf", "svg"]], ids=["table", "figures"])
def test_a_comparison_for_a_paper(forms, finished, tmp_path):
    awkward = tmp_path / "*[a_b] 50% & #1 $x$ {y} ~^\\"
    shutil.copytree(finished / "local", awkward)
    runs = [str(finished / "cfl"), str(awkward)]
    flags = [f"--{form}" for form in ("latex", *forms)]
    assert cli.main(["compare", *runs, "--out", str(tmp_path / "out"), *flags]) == 0
    names = [f"{name}.{form}" for form in ("png", *forms) for name in ("accuracy", "methods")]
    assert {file.name for file in (tmp_path / "out").iterdir()} == {*names, "results.csv", "results.tex"}
    # The table: as many cells in each row, names as LaTeX prints them, numbers as in the csv file.
    rows = [
        line.removesuffix(r" \\") for line in (tmp_path / "out/results.tex").read_text().splitlines() if "&" in line
    ]
    head, cfl, local = ([cell.strip() for cell in re.split(r"(?<!\\)&", row)] for row in rows)
    assert len(head) == len(cfl) == len(local) == 9 and head[1] == r"client acc. \%"
    assert local[0] == r"{*}{[}a\_b] 50\% \& \#1 \$x\$ \{y\} \textasciitilde{}\textasciicircum{}\textbackslash{}"
    with (tmp_path / "out/results.csv").open() as file:
        numbers = {row["run"]: row for row in csv.DictReader(file)}["cfl"]
    mean, std = (100 * float(numbers[name]) for name in ("accuracy", "accuracy_std"))
    assert cfl[1] == rf"{mean:.1f} $\pm$ {std:.1f}" and local[3] == "--"
    # The figures: 3.25 inches are 234 points.
    for name in ("accuracy", "methods") if forms else ():
        [box] = re.findall(rb"/MediaBox \[ 0 0 ([\d.]+) ", (tmp_path / f"out/{name}.pdf").read_bytes())
        assert float(box) == 234 and 'width="234pt"' in (tmp_path / f"out/{name}.svg").read_text()


def test_numbers_near_zero_have_no_sign():
    assert comparison.number(-0.001, 0.002, 2) == "0.00±0.00" and comparison.number(-2.0, None, 3) == "-2.000"


@pytest.mark.parametrize("losses", [(-2.0, -1.0), (3e-4, 1e-4), (3e9, 1e9)])
def test_losses_of_any_size_are_shown(losses):
    axes = plots.bars({str(x): [{"seed": 0, "round": 1, "loss": x}] for x in losses}, ["loss"]).axes[0]
    low, high = axes.get_ylim()
    assert low <= min(losses) and high >= max(losses) and high - low < 2 * max(map(abs, losses))
    assert [float(text.get_text()) for text in axes.texts] == list(losses)
    assert [float(comparison.number(x, None, 3)) for x in losses] == list(losses)
    assert float(comparison.rate_text(abs(losses[0])).replace(",", "")) == abs(losses[0])


def test_an_infinite_loss_is_a_loss():
    summary = {"per_seed": [{"loss": None, "rounds_to_recovery": None}], "mean": {"loss": None, "clusters_in_use": 1.0}}
    heads, [row] = comparison.results_rows({"diverged": summary})
    assert heads[1] == "test\nloss" and row[1] == "–"


def test_curves_of_a_metric_that_was_not_recorded_are_refused():
    with pytest.raises(ValueError, match="'accuracy'"):
        plots.curves({"ifca": [{"seed": 0, "round": 1, "accuracy": 0.5}]}, "acuracy")


def test_pictures_of_no_records_are_refused():
    for draw in (lambda: plots.curves({"a": []}), lambda: plots.bars({"a": []}), lambda: plots.assignments([])):
        with pytest.raises(ValueError, match="records must be at least one"):
            draw()
