"""The site in docs/: every page is reachable, its links resolve, its code runs and its commands parse."""

import codeop
import importlib
import importlib.util
import inspect
import re
import runpy
import shlex
import sys
import tomllib
from pathlib import Path

import jax
import pytest

import jfcl.experiments
from jfcl.cli.commands import given_options
from jfcl.cli.parser import COMMANDS, parse
from jfcl.experiments import Config
from jfcl.methods import METHODS

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(p for p in DOCS.rglob("*.md") if not p.relative_to(DOCS).parts[0].startswith("_"))
GENERATED = ("api/", "notebooks/", "methods/pictures/")  # written by docs/_ext when the site is built
RUN_ELSEWHERE = {"howto/newcomers", "mappings", "populations"}  # by tests/test_readme.py
# Pages that compile much even when they are shortened.
SLOW = "data drift kernels method model optimizers predictions pretrained private results serve sweeps thresholds track"
SLOW = {"concepts/client_axis", *(f"howto/{name}" for name in SLOW.split()), *(f"methods/{name}" for name in METHODS)}
# A fenced block, with the HTML comments above it.
FENCE = re.compile(r"((?:<!-- [^>]* -->\n)*)^```(\w+)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)


def name_of(page: Path) -> str:
    return str(page.relative_to(DOCS).with_suffix(""))


def blocks(page: Path, language: str) -> list[tuple[str, str]]:
    """Returns `(notes, code)` of the fenced blocks of a page; notes are the HTML comments above them."""
    return [(notes, code) for notes, kind, code in FENCE.findall(page.read_text()) if kind == language]


def toctree(page: Path) -> list[str]:
    """Returns the names of the pages in the toctrees of a page."""
    names = []
    for body in re.findall(r"```\{toctree\}\n(.*?)```", page.read_text(), flags=re.DOTALL):
        names += [line.strip() for line in body.splitlines() if line.strip() and not line.startswith(":")]
    folder = page.parent
    names = [re.sub(r".*<(.*)>", r"\1", name) for name in names]  # without titles
    return [str((folder / name).resolve().relative_to(DOCS)) for name in names]


def test_every_page_is_reachable():
    found, new = set(), {"index"}
    while new:
        found |= new
        pages = [DOCS / f"{name}.md" for name in new]
        new = {child for page in pages if page.exists() for child in toctree(page)} - found
    missing = {name_of(page) for page in PAGES} - found
    assert not missing
    assert all((DOCS / f"{name}.md").exists() or name.startswith(GENERATED) for name in found)


def test_the_installation_lists_every_extra():
    page = (DOCS / "start" / "install.md").read_text().partition("| extra | for |")[2].partition("\n\n")[0]
    listed = re.findall(r"`([\w-]+)`", "\n".join(line.split("|")[1] for line in page.strip().splitlines()))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert sorted(listed) == sorted(extras)


def test_the_citation_names_this_version():
    assert f"\nversion: {jfcl.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_every_method_has_its_page():
    for name, method in METHODS.items():
        text = (DOCS / "methods" / f"{name}.md").read_text()
        assert f"<!-- options of {name} -->" in text, name
        assert f".. autofunction:: jfcl.{method.make.__name__}\n" in text, name
        for heading in ("Idea", "Formula", "Run it", "When to use it", "When not", "Cost", "Options", "Paper"):
            assert f"\n## {heading}\n" in text, (name, heading)
        assert f"](pictures/{name}.svg)" in text and f"](results/{name}.png)" in text, name


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_resolve(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", FENCE.sub("", page.read_text())):
        if re.match(r"\w+:", target):
            continue
        path = (page.parent / target).resolve()
        generated = path.is_relative_to(DOCS) and str(path.relative_to(DOCS)).startswith(GENERATED)
        assert path.exists() or (generated and path.suffix in (".svg", ".rst")), target


def commands(page: Path) -> list[str]:
    """Returns the commands in blocks of a page, in indented lines, and in its text unless they only name an option."""
    shell = "\n".join(code for kind in ("sh", "bash", "yaml") for _, code in blocks(page, kind)).replace("\\\n", " ")
    shell = re.sub(r"\$method\b", "fedavg", re.sub(r"\$[A-Z_]+", "0", shell))
    indented = "\n".join(re.findall(r"^    (jfcl .*)$", page.read_text().replace("\\\n", " "), flags=re.MULTILINE))
    started = r"^ *(?:srun (?:[-\w ]+ )?|nohup |exec )?(?:[~/]\S*/bin/)?(jfcl [^#\n>]*?)\s*(?:>.*|\s#.*)?$"
    in_text = re.findall(r"`(jfcl \w+ (?!--)[^`]*)`", FENCE.sub("", page.read_text()))
    in_text = [re.sub(r" (…|METHOD) ", " fedavg ", re.sub(r"\s+", " ", line)) for line in in_text]
    in_text = [line for line in in_text if not line.endswith(("--config", "--help"))]
    return re.findall(started, f"{shell}\n{indented}", flags=re.MULTILINE) + in_text


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_parse(page):
    for line in commands(page):
        if "NAME [" in line:  # the form of a command, not one
            continue
        args = parse(shlex.split(line)[1:])
        assert args.command in COMMANDS, line
        needs_a_file = re.search(r"--config|\.csv|[a-z_]:[A-Za-z_]", line)
        if args.command in ("run", "plan", "sweep") and not needs_a_file:
            Config(**given_options(args))


def test_commands_are_found():
    found = {page: commands(page) for page in PAGES}
    assert sum(map(len, found.values())) > 150
    assert [name_of(page) for page in PAGES if page.parent.name == "methods" and not found[page]] == ["methods/index"]


def shortened(code: str) -> str:
    """Returns `code` with two rounds in every run."""
    code = re.sub(r"restarts=\d+, restart_rounds=\d+", "restarts=2, restart_rounds=1", code)
    return re.sub(r"\b(num_rounds|rounds|eval_every|restarts)=\d+", r"\1=2", code)


def runnable() -> list:
    """Returns the pages with code: as it is (slow), and shortened, without blocks that are marked as slow.

    A page in `SLOW` runs as it is alone, and one that shortening does not change, shortened alone.
    """
    found = []
    for page in PAGES:
        code = [block for block in blocks(page, "python") if "<!-- not run" not in block[0]]
        if not code or name_of(page) in RUN_ELSEWHERE:
            continue
        if name_of(page) not in SLOW:
            found.append(pytest.param(page, True, id=f"{name_of(page)}, short"))
        if name_of(page) in SLOW or any(shortened(text) != text or "<!-- slow -->" in notes for notes, text in code):
            found.append(pytest.param(page, False, id=name_of(page), marks=pytest.mark.slow))
    return found


@pytest.mark.parametrize("page, is_short", runnable())
@pytest.mark.filterwarnings("ignore:.*all clients use one of the")
def test_code_runs(page, is_short, tmp_path, monkeypatch):
    """Runs the Python blocks of a page in order, in one namespace, with the promotion of types of users."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(ROOT / "tests"), *sys.path])
    names = {"__name__": "page"}
    for notes, code in blocks(page, "python"):
        if saved := re.search(r"<!-- file ((\w+)\.py) -->", notes):  # a module that the page tells to save
            Path(saved[1]).write_text(code)
            monkeypatch.delitem(sys.modules, saved[2], raising=False)
            continue
        needed = re.search(r"<!-- needs (\w+) -->", notes)  # an optional package
        if needed and importlib.util.find_spec(needed[1]) is None:
            continue
        if "<!-- not run" not in notes and not (is_short and "<!-- slow -->" in notes):
            names["ran"] = True
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
                exec(compile(shortened(code) if is_short else code, str(page), "exec"), names)
    if is_short and "ran" not in names:
        pytest.skip("all blocks of the page are slow (make test-slow)")
    assert "ran" in names, "no block of the page runs"


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.stem)
def test_code_can_be_pasted_into_a_prompt(page):
    """Python's plain prompt ends a loop, a function or a class at a blank line, and nowhere else."""
    for notes, code in blocks(page, "python"):
        if "<!-- file" in notes or code.startswith("%"):
            continue
        compiler, typed = codeop.CommandCompiler(), []
        for line in [*code.splitlines(), ""]:
            typed.append(line)
            if compiler("\n".join(typed)) is not None:
                typed.clear()
        assert not typed, typed


@pytest.mark.parametrize(
    "module", [jfcl, jfcl.data, jfcl.experiments, jfcl.kernels, jfcl.models], ids=lambda module: module.__name__
)
def test_every_public_function_has_an_example(module):
    functions = [getattr(module, name) for name in getattr(module, "__all__", None) or vars(module)]
    without = [f.__name__ for f in functions if inspect.isfunction(f) and ">>>" not in (f.__doc__ or "")]
    assert not without


def test_every_model_is_on_its_page():
    text = (DOCS / "howto" / "model.md").read_text()
    assert [name for name in jfcl.models.MODELS if f"`{name}`" not in text] == []


def test_the_api_has_every_public_module():
    text = (DOCS / "_ext" / "api.py").read_text()
    internal = {"sys", "analysis", "cli", "methods", "planning", "robust", "simulation", "training"}
    modules = {name for name, value in vars(jfcl).items() if inspect.ismodule(value) and name[0] != "_"} - internal
    assert [name for name in [*modules, "experiments"] if f'"jfcl.{name}": ' not in text] == []


def test_the_api_lists_names_that_are_there():
    sections = runpy.run_path(str(DOCS / "_ext" / "api.py"))["SECTIONS"]
    listed = [(module, name) for module, of in sections.items() for names in of.values() for name in names.split()]
    assert [pair for pair in listed if not hasattr(importlib.import_module(pair[0]), pair[1])] == []
