"""The documentation is correct: its code runs, its commands parse, its links resolve."""

import re
import shlex
from pathlib import Path

import pytest

from jfcl.cli.parser import COMMANDS, parse
from jfcl.methods import METHODS

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text()


def test_its_code_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    assert "num_rounds=50" in code
    for text, quick in {"num_rounds=50": "num_rounds=2", "restarts=5, ": "", "MLP(10)": "Linear(10)"}.items():
        code = code.replace(text, quick)
    exec(code, {})
    accuracy, identity = map(float, capsys.readouterr().out.split())
    assert 0 < accuracy <= 1 and 0 < identity <= 1


def test_its_commands_parse():
    lines = re.findall(
        r"^    (jfcl [^#\n]*?)(?:\s+#.*)?$|`(jfcl run [^`]*--out[^`]*|jfcl sweep [^`]*)`", TEXT, flags=re.MULTILINE
    )
    lines = [block or inline for block, inline in lines]
    assert len(lines) >= 3
    for line in lines:
        assert parse(shlex.split(line)[1:]).command in COMMANDS


@pytest.mark.slow
def test_the_page_on_newcomers(capsys):
    text = (ROOT / "docs" / "howto" / "newcomers.md").read_text()
    tree, *others = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    names = {}
    exec(tree, names)
    assert float(capsys.readouterr().out) == 1
    for code in others:
        exec(code, names)
    assert capsys.readouterr().out.endswith("(40,)\n")


def test_it_counts_the_methods():
    assert set(re.findall(r"(\d+)(?:%20| )methods", TEXT.partition("## Why not")[0])) == {str(len(METHODS))}


def test_it_is_short_and_shows_a_picture_at_once():
    assert TEXT.count("\n") <= 110
    assert "\n![" in "\n".join(TEXT.splitlines()[:20])
    assert (ROOT / "CONTRIBUTING.md").read_text().count("\n") <= 80


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])  # those of the site are in test_docs.py
def test_links_resolve(page):
    path = ROOT / page
    for target in re.findall(r"\]\(([^)]+)\)", path.read_text()):
        if target.startswith("https://"):  # `make links` asks these
            continue
        notebook = target.startswith("notebooks/") and (ROOT / target).exists()  # copied when the site is built
        assert notebook or (path.parent / target).exists(), target


@pytest.mark.slow
def test_the_page_on_populations(capsys, tmp_path, monkeypatch):
    text = (ROOT / "docs" / "populations.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    accuracy, seen, dropped = map(float, capsys.readouterr().out.split())
    assert accuracy > 0.6 and 1000 < seen < 2000 and 150 < dropped < 330
    for line in re.findall(r"^    (jfcl run [^#\n]*?)$", text, flags=re.MULTILINE):
        parse(shlex.split(line)[1:])


@pytest.mark.slow
def test_the_page_on_mappings(capsys):
    text = (ROOT / "docs" / "mappings.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    exec(code, {})
    assert capsys.readouterr().out == "41\n"
    for line in re.findall(r"^    (jfcl run [^#\n]*?)(?:\s+#.*)?$", text, flags=re.MULTILINE):
        parse(shlex.split(line)[1:])
