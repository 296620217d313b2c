"""What the pages show of the library itself, so that no page can go stale.

* `<!-- options of NAME -->` in a page becomes the table of a method's options, from its factory.
* `<!-- options of every run -->` becomes the tables of the options that are common to the methods.
* Every public module gets a page in `api/`, in the order of `api.py`, with pictures of its plots.
* Every method has its picture in `methods/pictures/`.
* The notebooks are copied to `notebooks/`, with the outputs that are committed.
* `OWNER/jfcl` becomes the repository that conf.py names.
* A link out of this folder leads to the page that includes the file.
"""

import contextlib
import importlib
import inspect
import re
import types
from collections.abc import Mapping
from pathlib import Path

from api import MODULES, SECTIONS
from docutils import nodes
from pictures import PICTURES, picture
from plot_pictures import PLOTS, draw_plots

from jfcl.core.names import flag_of
from jfcl.core.options import Option, Search, argument_texts, first_sentence
from jfcl.core.options import options_of as declared_options
from jfcl.experiments.options import GROUPS, STANDS_FOR
from jfcl.methods import METHODS

HERE = Path(__file__).resolve().parent.parent


def public_names(module: types.ModuleType) -> list[str]:
    """Returns the public names of a module, without modules."""

    def is_own(value):  # defined in this module, or, where it is a folder, in one of its files
        return f"{getattr(value, '__module__', '')}.".startswith(f"{module.__name__}.")

    def is_registry(value):
        return hasattr(module, "__path__") and isinstance(value, (Mapping, tuple))

    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    names = getattr(module, "__all__", None) or [
        name for name, value in public.items() if is_registry(value) or (callable(value) and is_own(value))
    ]
    return [name for name in names if not isinstance(getattr(module, name), types.ModuleType) and name != "__version__"]


def sections_of(name: str) -> dict[str, list[str]]:
    """Returns the names that the page of a module describes, by the titles of its sections."""
    module = importlib.import_module(name)
    if name not in SECTIONS:
        return {"": public_names(module)}
    sections = {title: [n for n in names.split() if hasattr(module, n)] for title, names in SECTIONS[name].items()}
    listed = {public for names in sections.values() for public in names}
    rest = [public for public in getattr(module, "__all__", ()) if public not in listed]
    rest = [public for public in public_names(module) if public in rest and not public.startswith("check_")]
    return sections | ({"Further": rest} if rest else {})


def entry(name: str, value: object) -> str:
    """Returns the directive that describes a public object."""
    if inspect.isclass(value):
        kinds = (types.FunctionType, classmethod, staticmethod, property)
        methods = [m for m, v in vars(value).items() if not m.startswith("_") and isinstance(v, kinds)]
        members = f"\n   :members: {', '.join(methods)}\n   :member-order: bysource" if methods else ""
        return f".. autoclass:: {name}{members}"
    if callable(value) and not isinstance(value, types.GenericAlias):
        short = name.removeprefix("jfcl.plots.")
        picture = f"\n\n.. image:: pictures/{short}.svg\n   :alt: An example of {name}" if short in PLOTS else ""
        return f".. autofunction:: {name}{picture}"
    keys = ", ".join(f"``{key}``" for key in value) if isinstance(value, (Mapping, tuple)) else ""
    return f".. py:data:: {name}\n\n   {keys}"


def page_of(name: str, described: dict[int, str]) -> str:
    """Returns the text of a module's page in the API; `described` has the names of objects with an entry."""
    module = importlib.import_module(name)
    about = re.sub(r"\n\n(?=    )", "\n\n.. code-block:: python\n\n", inspect.cleandoc(module.__doc__ or ""))
    if name == "jfcl":
        about = (
            "A method is a pair of pure functions::\n\n    state = algorithm.init(key, clients)\n"
            "    state, metrics = algorithm.step(key, state, clients)"
        )
    parts = [f"{name}\n{'=' * len(name)}", about]
    elsewhere = [described[id(getattr(module, p))] for p in public_names(module) if id(getattr(module, p)) in described]
    for title, names in sections_of(name).items():
        new = [public for public in names if id(getattr(module, public)) not in described]
        parts += [f"{title}\n{'-' * len(title)}"] if title and new else []
        if title == "Methods":
            links = ", ".join(f":py:obj:`{function}`" for function in elsewhere)
            parts.append(f"Each has a :doc:`page of its own <../methods/index>`: {links}.")
        for public in new:
            described[id(getattr(module, public))] = f"{name}.{public}"
            parts.append(entry(f"{name}.{public}", getattr(module, public)))
    if elsewhere and name != "jfcl":
        parts.append("Described on other pages: " + ", ".join(f":py:obj:`{other}`" for other in elsewhere) + ".")
    return "\n\n".join(parts) + "\n"


def options_of(name: str) -> str:
    """Returns the table of a method's options in Markdown."""
    method = METHODS[name]
    described = argument_texts(method.make)
    texts = {option: described.get(option, "") for option in method.declared}
    if not texts:
        return "The method has no options of its own beside those of every run (`jfcl run --help`)."
    table = table_of(method.declared, texts)
    others = [option for option in method.declared if option in method.defaults]
    names = ", ".join(f"`{option}`" for option in others)
    note = f"\n\nThe default of {names} is that of `jfcl run`; the factory's is in its signature."
    return table + (note if others else "")


def options_of_every_run() -> str:
    """Returns the tables of the options that are common to the methods, a section for each group."""
    parts = []
    for group in GROUPS:
        options = declared_options(group)
        title, _, about = inspect.getdoc(group).splitlines()[0].rstrip(".").partition(": ")
        texts = {
            name: re.sub(r"'(jfcl [^']*)'|(--[a-z-]+\w)", r"`\1\2`", first_sentence(o.text))
            for name, o in options.items()
        }
        parts.append(f"## {title}\n\n{about.capitalize()}.\n\n{table_of(options, texts)}")
    return "\n\n".join(parts)


def table_of(options: Mapping[str, Option], texts: Mapping[str, str]) -> str:
    """Returns a table of options in Markdown, with a text for each."""
    flags = {argument: name for name, arguments in STANDS_FOR.items() for argument in arguments}
    lines = ["| option, flag | values | default | meaning |", "|---|---|---|---|"]
    for option in options.values():
        ranges = [accepted(m) for m in option.metadata if hasattr(m, "check")]
        kind = ", ".join(r for r in ranges if r) or {bool: "yes or no"}.get(option.kind, option.kind.__name__)
        kind += "".join(f"; tuned in {m.low:g} to {m.high:g}" for m in option.metadata if isinstance(m, Search))
        default = "–" if option.default is None else f"`{option.default}`"
        flag = flag_of(flags.get(option.name, option.name))
        flag = flag.replace("--", "--no-", 1) if option.kind is bool and option.default else flag  # turns it off
        cells = [f"`{option.name}`, `{flag}`", kind, default, texts[option.name]]
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines)


def accepted(metadata) -> str:
    """Returns the values that a `Range`, `Interval` or `OneOf` accepts, in Markdown."""
    if hasattr(metadata, "choices"):
        others = f" or {metadata.form}" if metadata.find else ""
        return " ".join(f"`{choice}`" for choice in metadata.choices) + others
    if hasattr(metadata, "text"):
        return f"`{metadata.text}`"
    return f"≥ {metadata.least}"


def write(path: Path, text: str) -> None:
    """Writes a file, unless it has that text already: a page that does not change is not built again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def generate(app) -> None:
    """Writes the pages of the API and the pictures, and copies the notebooks."""
    names = [name for group in MODULES.values() for name in group]
    described = {id(method.make): f"jfcl.{method.make.__name__}" for method in METHODS.values()}  # on their own pages
    for name in names:
        write(HERE / "api" / f"{name}.rst", page_of(name, described))
    for old in (HERE / "api").glob("*.rst"):
        if old.stem not in names:
            old.unlink()
    draw_plots(HERE / "api" / "pictures")
    for name in PICTURES:
        write(HERE / "methods" / "pictures" / f"{name}.svg", picture(name))
    notebooks = sorted((HERE.parent / "notebooks").glob("*.ipynb"))
    for old in {*(HERE / "notebooks").glob("*")} - {HERE / "notebooks" / notebook.name for notebook in notebooks}:
        old.unlink()
    for notebook in notebooks:
        text = notebook.read_text()
        if app.config.repository.startswith("OWNER/"):  # its badge would lead nowhere
            badge = r"\[!\[Open in Colab\]\([^)]*\)\]\([^)]*\)"
            text = re.sub(badge, "[Open this notebook](../start/notebooks.md)", text)
        write(HERE / "notebooks" / notebook.name, text)


def api_index() -> str:
    """Returns the list of the public modules in Markdown, with a toctree for each group."""
    parts = []
    for title, modules in MODULES.items():
        parts += [f"## {title}", "| module | content |\n|---|---|"]
        parts[-1] += "".join(f"\n| [`{name}`]({name}.rst) | {text} |" for name, text in modules.items())
        parts.append("```{toctree}\n:hidden:\n\n" + "\n".join(modules) + "\n```")
    return "\n\n".join(parts)


def contributing() -> str:
    """Returns CONTRIBUTING.md without its links, which are to files of the repository."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", (HERE.parent / "CONTRIBUTING.md").read_text())


def filled(text: str) -> str:
    """Returns a page with what it takes from the library."""
    text = re.sub(r"<!-- options of (\w+) -->", lambda m: options_of(m[1]), text)
    text = text.replace("<!-- options of every run -->", options_of_every_run() if "of every run" in text else "")
    text = text.replace("<!-- modules of the API -->", api_index()) if "<!-- modules" in text else text
    return text.replace("<!-- text of CONTRIBUTING.md -->", contributing() if "<!-- text of" in text else "")


def outdated(app, env, added, changed, removed) -> list[str]:
    """Returns the pages that take something from the library which has changed, although the page has not."""
    taken = getattr(env, "jfcl_taken", {})
    here = taken.keys() & env.found_docs
    return [name for name in here if taken[name] != filled(Path(env.doc2path(name)).read_text())]


def merge(app, env, names, other) -> None:
    """Takes over what another process has remembered of the pages that it has read."""
    env.jfcl_taken = getattr(env, "jfcl_taken", {}) | getattr(other, "jfcl_taken", {})


def read(app, docname: str, source: list[str]) -> None:
    """Fills in what a page takes from the library, and mends links that lead out of this folder."""
    text = filled(source[0])
    if text != source[0]:  # remembered with the page, to see at the next build whether it has changed
        app.env.jfcl_taken = getattr(app.env, "jfcl_taken", {}) | {docname: text}
    text = text.replace("OWNER/jfcl", app.config.repository)
    up = "../" * docname.count("/")
    text = text.replace(f"]({up}../benchmarks/README.md)", f"]({up}benchmarks.md)")
    text = text.replace(f"]({up}../notebooks/", f"]({up}notebooks/")
    text = re.sub(rf"(?<!!)\[([^\]]*)\]\({re.escape(up)}\.\./[^)]*\)", r"\1", text)  # to files that no page includes
    source[0] = text


def join_names(app, what, name, obj, options, lines: list[str]) -> None:
    """Joins the names of an entry of a docstring where they fill several lines, which napoleon does not read."""
    i = 0
    while i + 1 < len(lines):
        if re.fullmatch(r"  (\w+, )*\w+,", lines[i]):
            lines[i : i + 2] = [f"{lines[i]} {lines[i + 1].strip()}"]
        else:
            i += 1


def set_type(app, doctree) -> None:
    """Makes dashes of the two hyphens that Sphinx puts behind names, and keeps `94.1 ± 0.4 %` together."""
    for text in list(doctree.findall(nodes.Text)):
        if not isinstance(text.parent, (nodes.literal, nodes.literal_block)):
            new = re.sub(r"(?<=\d) (?=%)| (?=± \d)|(?<=±) (?=\d)", "\u00a0", text.replace(" -- ", " – "))
            if new != text:
                text.parent.replace(text, nodes.Text(new))


def read_declared_signatures() -> None:
    """Makes autodoc take the signature of a decorated function as it is, where its source has other arguments."""
    for name in ("preserve_defaults", "_dynamic._preserve_defaults"):  # by the version of Sphinx
        with contextlib.suppress(ImportError):
            module = importlib.import_module(f"sphinx.ext.autodoc.{name}")
            of_source = module._get_arguments
            module._get_arguments = lambda made, of=of_source: None if hasattr(made, "__wrapped__") else of(made)


def setup(app):
    read_declared_signatures()
    app.setup_extension("sphinx.ext.autodoc")
    app.add_config_value("repository", "OWNER/jfcl", "env")
    app.connect("builder-inited", generate)
    app.connect("env-get-outdated", outdated)
    app.connect("env-merge-info", merge)
    app.connect("source-read", read)
    app.connect("autodoc-process-docstring", join_names, priority=400)  # before napoleon's 500
    app.connect("doctree-read", set_type)
    return {"parallel_read_safe": True}
