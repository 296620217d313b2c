"""The notebooks run top to bottom, on small settings."""

from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parent.parent / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the notebook client and its dependencies
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("JFCL_NOTEBOOK_ROUNDS", "4")
    monkeypatch.delenv("MPLBACKEND", raising=False)  # the notebook's own, which shows plots
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert all(output.output_type != "error" for output in outputs)


def test_there_are_notebooks():
    assert "00_quickstart" in [path.stem for path in NOTEBOOKS]
