"""The notebooks: their structure as they are stored, and (slow) an execution from top to bottom on small settings."""

import builtins
import json
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
REFRESH = runpy.run_path(str(ROOT / "notebooks" / "refresh.py"))
LARGEST = 400_000  # bytes of a notebook with its outputs
SMALL = {"JFCL_NOTEBOOK_ROUNDS": "4", "JFCL_NOTEBOOK_CLIENTS": "2000"}
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/])/(?:home|root|tmp|usr|work|Users|content|var)/\w+")

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def code_cells(path: Path) -> list[dict]:
    return [cell for cell in read(path)["cells"] if cell["cell_type"] == "code"]


def text_of(output: dict) -> str:
    """The text that an output shows."""
    shown = [output.get("text", "")] + [v for kind, v in output.get("data", {}).items() if kind.startswith("text/")]
    return "\n".join("".join(part) for part in shown)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the notebook client and its dependencies
@each_notebook
def test_notebook_runs(path, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    for name, value in SMALL.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MPLBACKEND", raising=False)  # the notebook's own, which shows plots
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert all(output.output_type != "error" for output in outputs)


def test_the_notebooks_are_numbered():
    assert [path.stem[:3] for path in NOTEBOOKS] == [f"{i:02}_" for i in range(8)]


@each_notebook
def test_a_notebook_begins_with_its_title_a_badge_and_the_installation(path):
    first, second = read(path)["cells"][:2]
    title, empty, badge, *_ = "".join(first["source"]).splitlines()
    assert first["cell_type"] == "markdown"
    assert title.startswith("# ")
    assert (empty, badge) == ("", REFRESH["badge"](path.stem)), "run python notebooks/refresh.py --no-run"
    assert path.read_text().count("colab-badge") == 1
    assert second["cell_type"] == "code"
    assert "".join(second["source"]) == REFRESH["INSTALL"], "run python notebooks/refresh.py --no-run"


@each_notebook
def test_a_notebook_is_stored_with_its_outputs(path):
    assert path.stat().st_size < LARGEST
    notebook, cells = read(path), code_cells(path)
    executed = REFRESH["digest"](["".join(cell["source"]) for cell in cells])
    assert notebook["metadata"] == REFRESH["METADATA"] | {REFRESH["EXECUTED"]: executed}, "run make notebooks"
    assert all(cell["metadata"] == {} for cell in notebook["cells"])
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), "not run from top to bottom"
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data", "execute_result"}
    for output in outputs:
        assert output.get("name", "stdout") == "stdout", text_of(output)
        assert output.get("metadata", {}) == {}
        assert not ABSOLUTE_PATH.search(text_of(output)), text_of(output)


@pytest.mark.parametrize(
    "plugin, extra", [(None, "jax"), ("libtpu", "jax[tpu]"), ("jax_cuda12_plugin", "jax[cuda12]")], ids=str
)
def test_the_installation_keeps_the_plug_in_of_the_machine(plugin, extra, monkeypatch):
    """Runs the cell as IPython does, where `import jfcl` fails until pip has run."""
    TransformerManager = pytest.importorskip("IPython.core.inputtransformer2", reason="pip install '.[notebooks]'")
    source = TransformerManager.TransformerManager().transform_cell(REFRESH["INSTALL"])
    lines, names, plain = [], {"__builtins__": builtins}, builtins.__import__

    class Shell:
        def run_line_magic(self, magic, line):
            lines.append((magic, line.format(**names)))

    def refuse(name, *rest):
        if name == "jfcl" and not lines:
            raise ImportError(name)
        return plain(name, *rest)

    names["get_ipython"] = Shell
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == plugin or None)
    monkeypatch.setattr(builtins, "__import__", refuse)
    exec(compile(source, "cell", "exec"), names)
    assert lines == [("pip", f'install -q "jfcl" "{extra}"')]
    assert names["jfcl"].__name__ == "jfcl"


def test_the_documentation_lists_every_notebook():
    text = (ROOT / "docs" / "start" / "notebooks.md").read_text()
    assert [path.name for path in NOTEBOOKS if f"](../../notebooks/{path.name})" not in text] == []
