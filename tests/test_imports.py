"""The library is a stack: a module imports only from what stands before it in this list."""

import ast
import subprocess
import sys
from pathlib import Path

import jfcl

ORDER = [
    "_version",
    "core",
    "kernels",
    "client",
    "execution",
    "data",
    "models",
    "algorithms",
    "analysis",
    "simulation",
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


def modules():
    """Every module of the library: its name and the modules of the library that it imports, anywhere in the file."""
    files = {
        ".".join(f.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): f
        for f in ROOT.rglob("*.py")
    }
    for name, file in files.items():
        found = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "jfcl":
                each = [f"{node.module}.{alias.name}" for alias in node.names]
                found |= {module if module in files else node.module for module in each}
        yield name, found - {name}


def test_no_modules_import_each_other_in_a_circle():
    graph = dict(modules())
    while leaves := [name for name, found in graph.items() if not found & graph.keys()]:
        graph = {name: found for name, found in graph.items() if name not in leaves}
    assert not graph, {name: sorted(found & graph.keys()) for name, found in graph.items()}


def test_kernels_import_nothing_else_of_the_library_than_checks():
    for file in (ROOT / "kernels").rglob("*.py"):
        names = [n.module for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.ImportFrom)]
        ours = {n for n in names if n.startswith("jfcl") and not n.startswith("jfcl.kernels")}
        assert ours <= {"jfcl.core.checks"}, file


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
