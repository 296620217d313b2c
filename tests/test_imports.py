"""The architecture: imports point one way, functions and files are short, documented names exist."""

import ast
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import jfcl
from jfcl.methods import METHODS

# A module imports only from modules before it in this list.
ORDER = [
    "_version",
    "core",
    "kernels",
    "training",
    "mapping",
    "data",
    "models",
    "robust",
    "analysis",
    "methods",
    "simulation",
    "planning",
    "testing",
    "experiments",
    "cli",
    "__main__",
]
ROOT = Path(jfcl.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# Limits of the library's size.
MOST_ARROWS = 80  # pairs of folders and files at the top level in which one imports the other
MOST_BODY_LINES = 80  # of a function, without its docstring
MOST_FILE_LINES = 450


@cache
def parsed(file: Path) -> ast.AST:
    return ast.parse(file.read_text())


@cache
def nodes(file: Path) -> list[ast.AST]:
    return list(ast.walk(parsed(file)))


def imported(file: Path):
    for node in nodes(file):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "jfcl":
            parts = node.module.split(".")
            yield from [parts[1]] if len(parts) > 1 else [name.name for name in node.names]
        elif isinstance(node, ast.Import):
            yield from (name.name.split(".")[1] for name in node.names if name.name.startswith("jfcl."))


def test_imports_point_one_way():
    wrong = []
    for file in FILES:
        place = file.relative_to(ROOT).parts[0].removesuffix(".py")
        if place == "__init__":
            continue
        assert place in ORDER, f"{place} has no place in the order of imports"
        for name in imported(file):
            if name in ORDER and ORDER.index(name) > ORDER.index(place):
                wrong.append(f"{file.relative_to(ROOT)} imports {name}")
    assert not wrong, wrong


def modules():
    """Every module of the library: its name and the modules of the library that it imports, anywhere in the file."""
    files = {".".join(f.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): f for f in FILES}
    for name, file in files.items():
        found = set()
        for node in nodes(file):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "jfcl":
                each = [f"{node.module}.{alias.name}" for alias in node.names]
                found |= {module if module in files else node.module for module in each}
        yield name, found - {name}


def test_no_modules_import_each_other_in_a_circle():
    graph = dict(modules())
    while leaves := [name for name, found in graph.items() if not found & graph.keys()]:
        graph = {name: found for name, found in graph.items() if name not in leaves}
    assert not graph, {name: sorted(found & graph.keys()) for name, found in graph.items()}


def test_kernels_import_nothing_else_of_the_library_than_checks_and_platforms():
    for file in (ROOT / "kernels").rglob("*.py"):
        names = [n.module for n in nodes(file) if isinstance(n, ast.ImportFrom)]
        ours = {n for n in names if n.startswith("jfcl") and not n.startswith("jfcl.kernels")}
        assert ours <= {"jfcl.core.checks", "jfcl.core.platforms"}, file


def test_only_mapping_knows_how_clients_are_mapped():
    for file in FILES:
        if file.name in ("axis.py", "columns.py") or "kernels" in file.parts:
            continue
        attributes = [n for n in nodes(file) if isinstance(n, ast.Attribute)]
        assert not {n.attr for n in attributes} & {"shard_map", "pmap"}, file
        owner = {n: getattr(n.value, "attr", getattr(n.value, "id", "")) for n in attributes}  # jax.lax.map, lax.map
        uses_map = [n for n in attributes if n.attr == "map" and owner[n] == "lax"]
        assert not uses_map, file


def test_what_is_below_the_methods_knows_none_of_them():
    """What a method has to say it says through `Algorithm`: no text names one, no code reads a field of its state."""
    names, fields = {*METHODS} - {"local", "oracle"}, ("params", "cluster")  # those of the default of `serve`
    found = []
    for file in FILES:
        if file.relative_to(ROOT).parts[0] not in ("training", "mapping", "data", "models", "analysis", "simulation"):
            continue
        docs = {id(n.value) for n in nodes(file) if isinstance(n, ast.Expr)}
        for node in nodes(file):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                found += [(file.name, name) for name in names if re.search(rf"\b{name}\b", node.value)]
            elif isinstance(node, ast.Attribute):
                reads = getattr(node.value, "id", "") == "state" and node.attr not in (*fields, "_replace")
                found += [(file.name, node.attr)] if reads or node.attr in names else []
    assert not found


def test_what_is_above_the_methods_knows_their_registry_alone():
    """Defaults name methods there; no module of a method is imported, and no field of a state is read."""
    found = []
    for file in FILES:
        if file.relative_to(ROOT).parts[0] not in ("planning", "experiments", "cli"):
            continue
        for node in nodes(file):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jfcl.methods"):
                found += [(file.name, name.name) for name in node.names if name.name not in ("METHODS", "Method")]
            elif isinstance(node, ast.Attribute):
                of_state = "state" in (getattr(node.value, "id", ""), getattr(node.value, "attr", ""))
                found += [(file.name, node.attr)] if of_state and node.attr not in ("params", "cluster") else []
    assert not found


def test_no_tuple_is_a_function():
    """As a key of compiled programs it would equal tuples of other classes: one would be computed as the other."""
    for file in FILES:
        for node in (n for n in nodes(file) if isinstance(n, ast.ClassDef)):
            methods = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
            assert not ("__call__" in methods and "NamedTuple" in map(ast.unparse, node.bases)), (file, node.name)


def test_importing_jfcl_leaves_heavy_packages_alone():
    heavy = ("tensorflow", "tensorflow_datasets", "orbax", "pandas", "IPython", "matplotlib", "scipy.optimize", "chex")
    code = f"import sys, jfcl; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_there_are_few_arrows_between_rooms():
    room = {file: file.relative_to(ROOT).parts[0].removesuffix(".py") for file in FILES}
    arrows = {
        (room[file], name) for file in FILES for name in imported(file) if name in {*room.values()} - {room[file]}
    }
    assert len(arrows) <= MOST_ARROWS, sorted(arrows)


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every function of a module, nested ones too, by its qualified name."""
    for node in ast.iter_child_nodes(tree):
        inside = prefix
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            inside = f"{prefix}{node.name}."
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        yield from functions(node, inside)


def body_lines(function: ast.FunctionDef) -> int:
    """The lines of a function from its first statement, without its docstring."""
    statements = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return function.end_lineno - statements[0].lineno + 1 if statements else 0


def test_functions_and_files_are_short():
    for file in FILES:
        assert file.read_text().count("\n") <= MOST_FILE_LINES, file
        for function, node in functions(parsed(file)):
            assert body_lines(node) <= MOST_BODY_LINES, f"{file}: {function}"


def documents() -> Iterator[tuple[str, str, str]]:
    """Every page and notebook: its name, its Python code, and its text."""
    top = ROOT.parent
    pages = [*top.glob("docs/*.md"), *top.glob("docs/*/*.md")]
    for file in [top / "README.md", top / "CONTRIBUTING.md", *pages, top / "benchmarks/README.md"]:
        text = file.read_text()
        yield file.name, without_magics("\n".join(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL))), text
    for file in top.glob("notebooks/*.ipynb"):
        cells = json.loads(file.read_text())["cells"]
        kinds = {kind: ["".join(c["source"]) for c in cells if c["cell_type"] == kind] for kind in ("code", "markdown")}
        yield file.name, without_magics("\n".join(kinds["code"])), "\n".join(kinds["markdown"])


def without_magics(code: str) -> str:
    """Returns the code without the lines that are IPython's."""
    return re.sub(r"^\s*%.*", lambda m: m[0].replace("%", "pass  # "), code, flags=re.MULTILINE)


def names_in_code(code: str) -> set[str]:
    """The dotted names of the library that `code` imports or reads, such as `jfcl.kernels.krum`."""
    names, bound = set(), {}
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "jfcl":
                    names.add(alias.name)
                    bound[alias.asname or "jfcl"] = alias.name if alias.asname else "jfcl"
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "jfcl":
            bound |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        chain = []
        while isinstance(node, ast.Attribute):
            chain.insert(0, node.attr)
            node = node.value
        if isinstance(node, ast.Name) and node.id in bound and chain:
            names.add(".".join([bound[node.id], *chain]))
    return names | set(bound.values())


def exists(name: str) -> bool:
    """Whether a dotted name can be read after importing as many of its modules as there are."""
    parts = name.split(".")
    for i in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:i]))
        except ModuleNotFoundError:
            continue
        for part in parts[i:]:
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
        return True
    return False


def test_names_in_the_documentation_exist():
    names = {}
    for document, code, text in documents():
        found = names_in_code(code) | set(re.findall(r"`(jfcl(?:\.\w+)+)", text))
        names |= {name: document for name in found}
    assert {"jfcl.data.build", "jfcl.kernels.centered_clip", "jfcl.myopic_clustering"} <= names.keys()
    missing = {name: document for name, document in names.items() if not exists(name)}
    assert not missing


def test_a_script_beside_the_clone_finds_the_library(tmp_path):
    """Python takes any folder of that name, as the clone's, for a package, unless it finds one with __init__.py."""
    (tmp_path / "jfcl").mkdir()
    (tmp_path / "script.py").write_text("import importlib.util; print(importlib.util.find_spec('jfcl').origin)")
    found = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == jfcl.__file__
