"""Brings the notebooks up to date: the badge and the first cell that they share, and outputs from a new execution.

    python notebooks/refresh.py                   # all notebooks
    python notebooks/refresh.py 02_cfl_splits     # some
    python notebooks/refresh.py --no-run          # the shared parts alone
    python notebooks/refresh.py --stale           # those with other code, or of another version, than was executed

The outputs in a notebook are a cache: its metadata hold a digest of the code that they are of, and of jfcl's version.
`make docs` executes what is stale.

04_thousand_clients_on_a_tpu shows a plan where the extra plan-tpu is installed and JAX_PLATFORMS=cpu is set.
`repository` in docs/conf.py is the only place that names the repository on GitHub. `tests/test_notebooks.py` compares
the notebooks with this file.
"""

from __future__ import annotations

import argparse
import hashlib
import re
from pathlib import Path
from typing import Any

from jfcl import __version__

FOLDER = Path(__file__).resolve().parent
REPOSITORY = re.search(r'^repository = "(.*)"$', (FOLDER.parent / "docs" / "conf.py").read_text(), re.MULTILINE)[1]
BRANCH = "main"
METADATA = {
    "colab": {"provenance": []},
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
EXECUTED = "jfcl_executed"  # the digest of what the outputs are of
SHOWN = ("image/png", "text/html", "text/plain")  # the types of outputs that are stored

# The code cell below the title. An accelerator's plug-in must have the version of JAX, which pip may replace: the extra
# of JAX for the plug-in that is there makes pip install the two together.
INSTALL = f"""\
# Before the first release on PyPI, write the address of the repository,
# "git+https://github.com/{REPOSITORY}", or the folder of a copy.
JFCL = "jfcl"

try:
    import jfcl
except ImportError:
    from importlib.util import find_spec

    plugins = {{"libtpu": "tpu", "jax_cuda13_plugin": "cuda13", "jax_cuda12_plugin": "cuda12"}}
    JAX = next((f"jax[{{extra}}]" for plugin, extra in plugins.items() if find_spec(plugin)), "jax")
    %pip install -q "{{JFCL}}" "{{JAX}}"
    import jfcl"""


def badge(name: str) -> str:
    """Returns the Open-in-Colab badge of the notebook `name` in Markdown."""
    address = f"https://colab.research.google.com/github/{REPOSITORY}/blob/{BRANCH}/notebooks/{name}.ipynb"
    return f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({address})"


def digest(code: list[str]) -> str:
    """Returns the digest of jfcl's version and of a notebook's code cells."""
    return hashlib.sha256("\0".join([__version__, *code]).encode()).hexdigest()


def code_of(notebook: Any) -> list[str]:
    """Returns the code cells."""
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def set_shared_parts(notebook: Any, name: str) -> None:
    """Sets the badge below the title, the cell that installs jfcl, the names of cells and the metadata."""
    title, _, text = notebook.cells[0].source.partition("\n")
    lines = [line for line in text.strip().splitlines() if not line.startswith("[![Open in Colab]")]
    notebook.cells[0].source = "\n\n".join([title, badge(name), "\n".join(lines).strip()])
    notebook.cells[1].source = INSTALL
    executed = notebook.metadata.get(EXECUTED)
    notebook.metadata.clear()
    notebook.metadata.update(METADATA | {EXECUTED: executed})
    for i, cell in enumerate(notebook.cells):
        cell.id = f"cell-{i:02}"
        cell.metadata.clear()


def execute(notebook: Any) -> None:
    """Runs the notebook, without the warnings, times and versions that the client and the kernel add to it."""
    from nbclient import NotebookClient

    NotebookClient(notebook, timeout=1800, kernel_name="python3", record_timing=False).execute()
    notebook.metadata.clear()  # with the version of the kernel
    notebook.metadata.update(METADATA | {EXECUTED: digest(code_of(notebook))})
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]
            for output in cell.outputs:
                if "data" in output:
                    output.metadata = {}
                    output.data = {kind: value for kind, value in output.data.items() if kind in SHOWN}


def main() -> None:
    import nbformat

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="notebooks, such as 02_cfl_splits; default: all")
    parser.add_argument("--no-run", action="store_true", help="keep the outputs that are there")
    parser.add_argument("--stale", action="store_true", help="execute only what is not up to date")
    arguments = parser.parse_args()
    for name in arguments.names or sorted(path.stem for path in FOLDER.glob("*.ipynb")):
        path = FOLDER / f"{name}.ipynb"
        notebook = nbformat.read(path, as_version=4)
        set_shared_parts(notebook, name)
        is_stale = notebook.metadata[EXECUTED] != digest(code_of(notebook))
        if not arguments.no_run and (is_stale or not arguments.stale):
            print(f"{name} ...", flush=True)
            execute(notebook)
        nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
