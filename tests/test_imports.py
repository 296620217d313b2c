"""The library is a stack: a module imports only from what stands before it in this list."""

import ast
import subprocess
import sys
from pathlib import Path

import jfcl

ORDER = [
    "_version",
    "kernels",
    "files",
    "core",
    "hosts",
    "mapping",
    "span",
    "noise",
    "local",
    "aggregate",
    "theory",
    "algorithms",
    "attacks",
    "augment",
    "data",
    "models",
    "metrics",
    "parameter_tree",
    "runs",
    "client_rows",
    "watch",
    "simulation",
    "probe",
    "cohorts",
    "population",
    "programs",
    "plots",
    "bench",
    "testing",
    "experiments",
    "cli",
    "__main__",
]
ROOT = Path(jfcl.__file__).parent


def imported(tree: ast.AST):
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "jfcl":
            parts = node.module.split(".")
            yield from [parts[1]] if len(parts) > 1 else [name.name for name in node.names]
        elif isinstance(node, ast.Import):
            yield from (name.name.split(".")[1] for name in node.names if name.name.startswith("jfcl."))


def test_imports_point_one_way():
    wrong = []
    for file in ROOT.rglob("*.py"):
        place = file.relative_to(ROOT).parts[0].removesuffix(".py")
        if place == "__init__":
            continue
        assert place in ORDER, f"{place} has no place in the order of imports"
        for name in imported(ast.parse(file.read_text())):
            if name in ORDER and ORDER.index(name) > ORDER.index(place):
                wrong.append(f"{file.relative_to(ROOT)} imports {name}")
    assert not wrong, wrong


def test_kernels_import_nothing_else_of_the_library():
    for file in (ROOT / "kernels").rglob("*.py"):
        assert set(imported(ast.parse(file.read_text()))) <= {"kernels"}, file


def test_only_mapping_knows_how_clients_are_mapped():
    for file in ROOT.rglob("*.py"):
        if file.name == "mapping.py" or "kernels" in file.parts:
            continue
        attributes = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Attribute)]
        assert not {n.attr for n in attributes} & {"shard_map", "pmap"}, file
        owner = {n: getattr(n.value, "attr", getattr(n.value, "id", "")) for n in attributes}  # jax.lax.map, lax.map
        uses_map = [n for n in attributes if n.attr == "map" and owner[n] == "lax"]
        assert not uses_map, file


def test_importing_jfcl_leaves_heavy_optional_packages_alone():
    heavy = ("tensorflow", "tensorflow_datasets", "orbax", "pandas", "IPython")
    code = f"import sys, jfcl; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
