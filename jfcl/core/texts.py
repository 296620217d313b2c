"""Texts from elsewhere, such as the names of folders, where they are shown: in a terminal, in HTML, in a table."""

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

FORMULAS = tuple("=+-@\t\r\n＝＋－＠")  # a spreadsheet computes a cell that begins with one of them


def printable(text: object) -> str:
    """Returns a text with control characters and other invisible ones as escapes, except for line breaks."""
    text = str(text)
    if text.isprintable():
        return text
    characters = (c if c.isprintable() or c in "\n\u00a0" else c.encode("unicode_escape").decode() for c in text)
    return "".join(characters)


def first_line(error: Exception) -> str:
    """Returns the first line of an error's message, or its type where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def csv_bytes(lines: Iterable[Sequence[Any]], *, end: str = "\r\n") -> bytes:
    """Returns a table as the content of a csv file, in which no text is a formula of a spreadsheet."""
    buffer = io.StringIO(newline="")
    csv.writer(buffer, lineterminator=end).writerows([_harmless(cell) for cell in line] for line in lines)
    return buffer.getvalue().encode(errors="backslashreplace")


def _harmless(cell: Any) -> Any:
    """Returns a cell with an apostrophe before what a spreadsheet would compute."""
    if not isinstance(cell, str) or not cell.lstrip(" ").startswith(FORMULAS):
        return cell
    try:
        float(cell)
        return cell
    except ValueError:
        return f"'{cell}"
