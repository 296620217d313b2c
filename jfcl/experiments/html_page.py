"""HTML from texts, tables and pictures: one file without scripts, which loads nothing."""

from __future__ import annotations

import base64
import html
import struct
from collections.abc import Iterable, Sequence

from jfcl.core.texts import printable

# Pictures keep their white background on dark screens, dimmed: inverted colours are less distinct to the colour-blind.
CSS = """
:root { color-scheme: light dark; --ink: #1a1a1a; --page: #ffffff; --soft: #5c5c5c; --line: #d0d0d0; --note: #fff4d6; }
@media screen and (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e6; --page: #1a1a1a; --soft: #a8a8a8; --line: #444444; --note: #40340f; }
  img { filter: brightness(0.88); border-radius: 0.3rem; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 76rem; color: var(--ink); background: var(--page);
  font: 1rem/1.5 system-ui, "DejaVu Sans", sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0.5rem 0; }
h2 { font-size: 1.3rem; margin: 2rem 0 0.5rem; padding-bottom: 0.2rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 1.05rem; margin: 1.4rem 0 0.4rem; }
p { max-width: 48rem; margin: 0.5rem 0; }
.soft, figcaption, caption { color: var(--soft); font-size: 0.875rem; }
.note { background: var(--note); padding: 0.6rem 1rem; border-left: 0.3rem solid #E69F00; max-width: none; }
.note ul { margin: 0.3rem 0; padding-left: 1.2rem; }
.scroll { overflow-x: auto; margin: 0.6rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; overflow-wrap: normal; font-size: 0.94rem; }
caption { text-align: left; padding-bottom: 0.3rem; }
th, td { padding: 0.25rem 0.9rem 0.25rem 0; text-align: right; vertical-align: top; white-space: pre; }
th { font-weight: 600; }
thead th { border-bottom: 1px solid var(--line); white-space: normal; vertical-align: bottom; max-width: 8rem; }
tbody tr + tr > * { border-top: 1px solid var(--line); }
th:first-child, .text td, .text th { text-align: left; }
tbody th { font-weight: 400; white-space: normal; overflow-wrap: break-word; }
#costs tbody th { min-width: 9rem; }
.text td { white-space: normal; min-width: 6rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1rem 2rem; }
figure { margin: 0.6rem 0; }
figure img { display: block; max-width: 100%; height: auto; }
pre { overflow-x: auto; padding: 0.6rem 0.8rem; border: 1px solid var(--line); }
code { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 0.875rem; }
dl.options { columns: 19rem; column-gap: 2rem; margin: 0.5rem 0; font-size: 0.9rem; }
dl.options div { display: flex; gap: 0.8rem; justify-content: space-between; break-inside: avoid; }
dl.options dd { margin: 0; text-align: right; }
.changed { font-weight: 700; }
ul.tree, ul.tree ul { list-style: none; padding-left: 1.2rem; border-left: 1px solid var(--line); }
ul.tree { padding-left: 0; border: 0; }
@media print {
  body { max-width: none; padding: 0; font-size: 10pt; }
  .figures { grid-template-columns: 1fr 1fr; gap: 0 0.6cm; }
  figure img { max-width: min(100%, 11cm); }
  .scroll { overflow: visible; }
  table { font-size: 8.5pt; }
  figure, tr, .note { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
  pre { white-space: pre-wrap; }
}
"""
# The browser refuses whatever the page could try to load.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="generator" content="{generator}">
<title>{title}</title>
<style>{css}</style>
</head>
<body>
"""


def escaped(text: object) -> str:
    """Returns a text in which no character is read as HTML, and none is a control character.

    Example:
      >>> escaped("<b> & c")
      '&lt;b&gt; &amp; c'
    """
    return html.escape(printable(text))


def element(tag: str, text: object, **attributes: str) -> str:
    """Returns an element that holds a text; `_class` stands for the attribute `class`.

    Example:
      >>> element("p", "a < b", _class="soft")
      '<p class="soft">a &lt; b</p>'
    """
    given = "".join(f' {name.lstrip("_")}="{escaped(value)}"' for name, value in attributes.items() if value)
    return f"<{tag}{given}>{escaped(text)}</{tag}>"


def section(title: str, *parts: str, level: int = 2) -> str:
    """Returns a heading and parts in HTML; nothing where all parts are empty."""
    kept = [part for part in parts if part]
    return "\n".join([element(f"h{level}", title), *kept]) if kept else ""


def sentences(notes: Iterable[str]) -> str:
    """Returns notes as one text.

    Example:
      >>> sentences(["after round 9", "mean over seeds"])
      'After round 9. Mean over seeds.'
    """
    return " ".join(f"{note[0].upper()}{note[1:]}." for note in notes)


def items(texts: Iterable[object]) -> str:
    """Returns a list of texts."""
    return "<ul>\n" + "\n".join(element("li", text) for text in texts) + "\n</ul>"


def table(
    name: str, heads: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "", *, kind: str = ""
) -> str:
    """Returns a table: the first column has names, the others numbers, or texts for `kind="text"`.

    Args:
      name: of the table, its `id`.
      heads: of the columns; a line break in one becomes a blank, and none after a hyphen.
    """
    heads = [head.replace("-\n", "").replace("\n", " ") for head in heads]
    top = "".join(element("th", head, scope="col") for head in heads)
    body = []
    for first, *others in rows:
        cells = "".join(element("td", cell) for cell in others)
        body.append(f"<tr>{element('th', first, scope='row')}{cells}</tr>")
    about = element("caption", caption) if caption else ""
    attributes = f' class="{kind}"' if kind else ""
    lines = [f'<div class="scroll"><table id="{escaped(name)}"{attributes}>{about}<thead><tr>{top}</tr></thead><tbody>']
    return "\n".join([*lines, *body, "</tbody></table></div>"])


def options(name: str, values: Iterable[tuple[str, object, bool]]) -> str:
    """Returns a list of `(option, value, is_changed)` in columns; changed values are bold."""
    lines = [
        f"<div>{element('dt', option)}{element('dd', value, _class='changed' if is_changed else '')}</div>"
        for option, value, is_changed in values
    ]
    return "\n".join([f'<dl class="options" id="{escaped(name)}">', *lines, "</dl>"])


def figure(name: str, png: bytes, caption: str) -> str:
    """Returns a PNG file as a picture that is part of the page; the caption describes it."""
    width, height = struct.unpack(">II", png[16:24])
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    size = f'width="{width}" height="{height}"'
    image = f'<img id="{escaped(name)}" alt="{escaped(caption)}" {size} src="{source}">'
    return f"<figure>{image}{element('figcaption', caption)}</figure>"


def figures(parts: Iterable[str]) -> str:
    """Returns figures side by side, as many as fit."""
    kept = [part for part in parts if part]
    return "\n".join(['<div class="figures">', *kept, "</div>"]) if kept else ""


def commands(lines: Iterable[str]) -> str:
    """Returns lines for a terminal, or of a program."""
    return f"<pre><code>{escaped(chr(10).join(lines))}</code></pre>"


def page(title: str, generator: str, parts: Iterable[str]) -> bytes:
    """Returns the file.

    Example:
      >>> page("a run", "jfcl", [element("p", "text")]).decode().endswith("<p>text</p>\\n</body>\\n</html>\\n")
      True
    """
    head = HEAD.format(title=escaped(title), generator=escaped(generator), policy=escaped(POLICY), css=CSS)
    body = "\n".join(part for part in parts if part)
    return f"{head}{body}\n</body>\n</html>\n".encode(errors="replace")
