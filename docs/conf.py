"""The configuration of the documentation site; `make docs` builds it."""

import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # autodoc imports jfcl; no device is needed
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE / "_ext")]

from jfcl import __version__  # noqa: E402

project, author, copyright = "jfcl", "the authors of jfcl", "the authors of jfcl, Apache-2.0"
version = release = __version__

# The repository on GitHub: the only place that names it. After a change, run `python notebooks/refresh.py --no-run`.
repository = "OWNER/jfcl"

extensions = [
    "jfcl_pages",  # in _ext: the options of methods, the pages of the API, the notebooks, links to other folders
    "myst_nb",  # pages in Markdown, and notebooks
    "sphinx.ext.autodoc",  # docstrings
    "sphinx.ext.napoleon",  # in Google's style
    "sphinx-mathjax-offline",  # formulas, also without a network
    "sphinx_copybutton",
    "sphinx_design",  # the cards of the front page
]
exclude_patterns = ["_build", "_ext", "**/.ipynb_checkpoints"]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # the committed outputs are shown; `make docs` first executes notebooks of changed code

smartquotes = False  # `--` begins a flag
default_role = "py:obj"  # `name` in a docstring is code, and a link where it names something public
highlight_language = "none"
autodoc_typehints = "none"  # types and shapes are in the docstrings
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 100
napoleon_use_param = False  # several names may share an entry
napoleon_use_rtype = False
napoleon_custom_sections = [("Attributes", "params_style"), ("Returns", "prose")]  # prose: a colon ends no type

html_theme = "sphinx_book_theme"
html_title = f"jfcl {release}"
html_logo = html_favicon = "_static/logo.svg"
html_static_path = ["_static"]
html_css_files = ["jfcl.css"]
html_theme_options = {
    "use_download_button": False,
    "navbar_persistent": [],  # the field above the sidebar is enough
    "show_navbar_depth": 1,
    "show_toc_level": 2,
}
if not repository.startswith("OWNER/"):  # a link to it, once it has an address
    html_theme_options |= {"repository_url": f"https://github.com/{repository}", "use_repository_button": True}
