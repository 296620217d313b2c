"""Files of figures: PNG, PDF and SVG, also as wide as a column of a paper."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from jfcl.core import check
from jfcl.core.files import write_whole

if TYPE_CHECKING:  # matplotlib takes as long to import as JAX: it is imported where a figure is made
    from matplotlib.figure import Figure

FORMATS = (".png", ".pdf", ".svg")
COLUMN = 3.25  # inches, of a paper with two columns
MOST_LETTERS = 36  # of names side by side in a column
MOST_PIXELS = 60_000  # on a side of a picture; matplotlib refuses 2^16


def png(figure: Figure) -> bytes:
    """Returns `figure` as the content of a PNG file.

    Example:
      >>> from jfcl import plots
      >>> png(plots.new_figure(6, 4))[1:4]
      b'PNG'
    """
    return _content(figure, "png")


def _content(figure: Figure, form: str, *, whole: bool = False) -> bytes:
    """Returns `figure` as the content of a file of one of `FORMATS`; `whole`: in its own size, with its margins."""
    from matplotlib import rc_context

    buffer = io.BytesIO()
    dpi = min(120, MOST_PIXELS / max(figure.get_size_inches()))
    with rc_context({"pdf.fonttype": 42}):  # TrueType, as publishers ask for
        figure.savefig(buffer, format=form, dpi=dpi, bbox_inches=None if whole else "tight")
    return buffer.getvalue()


def save(figure: Figure, path: str | Path, *, column: bool = False) -> Path:
    """Writes `figure` as PNG, PDF or SVG, as the name of the file ends, making its folder.

    Args:
      column: write it as wide as a column of a paper with two columns, 3.25 inches, with texts of 6 to 8 points. The
        figure is changed.

    Raises:
      ValueError: another ending.

    Example:
      >>> import tempfile
      >>> from jfcl import plots
      >>> save(plots.new_figure(6, 4), Path(tempfile.mkdtemp()) / "plots" / "empty.pdf").name
      'empty.pdf'
    """
    path = Path(path)
    check(path.suffix in FORMATS, "path", path.name, f"a name that ends in one of {', '.join(FORMATS)}")
    if column:
        _fit_column(figure)
    write_whole(path, _content(figure, path.suffix[1:], whole=column))  # and its folder
    return path


def _fit_column(figure: Figure) -> None:
    """Gives a figure the width of a column, thin lines, and texts that can be read there."""
    from matplotlib.legend import Legend
    from matplotlib.lines import Line2D
    from matplotlib.text import Text
    from matplotlib.ticker import FixedFormatter

    width, height = figure.get_size_inches()
    figure.set_size_inches(COLUMN, COLUMN * min(height / width, 0.75))
    figure.set_layout_engine("constrained")
    for axes in figure.axes:
        axes.tick_params(labelsize=7)
        names = [text.get_text() for text in axes.get_xticklabels()]
        if isinstance(axes.xaxis.get_major_formatter(), FixedFormatter) and sum(map(len, names)) > MOST_LETTERS:
            axes.tick_params(axis="x", rotation=45)
    for text in figure.findobj(Text):
        text.set_fontsize(8 if text.get_fontsize() > 8 else 6)
    for text in (text for legend in figure.findobj(Legend) for text in legend.get_texts()):
        text.set_fontsize(6.5)
    for line in figure.findobj(Line2D):
        line.set_linewidth(min(line.get_linewidth(), 1.0))
        line.set_markersize(min(line.get_markersize(), 3.0))
