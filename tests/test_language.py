"""Prose is plain technical English: arrays and clients are not people, and sentences use the field's terms.

`PHRASES` holds the words that do not belong, with what to write instead. The tests search the documentation, and the
comments and strings (docstrings, messages) of the Python files in `CHECKED`. They skip `inline code`, code blocks and
examples (`>>>`). `python tests/test_language.py FILE...` prints the matches in any files.
"""

import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "docs/*.md", "docs/[!_]*/*.md", "benchmarks/*.md", "notebooks/*.ipynb"]
CHECKED = ["jfcl/**/*.py", "tests/skeleton_method.py"]

# A pattern (any space stands for a space or a line break) and what to write instead.
PHRASES = {
    "nobody|everybody|everyone|somebody|someone": "no client, all clients, a client",
    "whom|whose|whoever|who": "that, of which, with",
    "told|said": "is given, reports, states",
    "asked(?! for)": "is requested, is drawn, is called",
    "mine": "own",
    "look(s|ed|ing)? at": "reads, compares, inspects",
    "anew": "again, new",
    "(go|goes|going|gone|went) on with": "continues with, is resumed",
    "(has|have|had) no (part|say|voice)": "is left out, does not influence",
    "let alone": "not to mention, or drop it",
    "by heart": "memorises",
    "(can|cannot|could) do with": "supports, does not support",
    "(is|are) not waited with": "immediately",
    "(has|have) to do with": "concerns",
    "discontented": "large update norm",
    "counts? in a mean": "weight in the average",
    "for ever|for good": "permanently, in all later rounds",
    "shut out|sat out|sits out": "excludes, is absent",
    "lies? about|sends? lies": "sends a false update",
    "know(s|n)? nothing": "is independent of",
}
WORDS = {re.compile(p.replace(" ", r"\s+"), re.IGNORECASE): advice for p, advice in PHRASES.items()}
SEARCH = re.compile(r"\b(?:" + "|".join(p.pattern for p in WORDS) + r")\b", re.IGNORECASE)
CODE = re.compile(r"```.*?```|`(?:[^`\n]|\n(?!\s*\n))*`|^\s*(?:>>>|\.\.\.)[^\n]*", re.DOTALL | re.MULTILINE)


def blanked(match: re.Match) -> str:
    """Spaces in the place of a match, so that offsets and lines stay."""
    return re.sub(r"[^\n]", " ", match[0])


def prose_of_markdown(text: str) -> str:
    """`text` with code blanked out."""
    return re.sub(r"^ {4}[^\n]*|" + CODE.pattern, blanked, text, flags=CODE.flags)


def prose_of_python(source: str) -> str:
    """`source` with everything blanked out but comments and strings of several words."""
    kept = [c if c == "\n" else " " for c in source]
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    strings = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}  # the latter from Python 3.12 on
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT or (token.type in strings and " " in token.string.strip()):
            begin = starts[token.start[0] - 1] + token.start[1]
            text = token.string.replace("#", " ")
            if re.match("r?f", text, re.IGNORECASE):  # an f-string before Python 3.12
                text = re.sub(r"\{[^{}]*\}", blanked, text)
            kept[begin : begin + len(text)] = text
    return CODE.sub(blanked, "".join(kept))


def pages(path: Path) -> Iterator[tuple[str, str]]:
    """The prose of a file: where it stands, and the text."""
    text, name = path.read_text(), str(path.relative_to(ROOT))
    if path.suffix == ".py":
        yield name, prose_of_python(text)
    elif path.suffix == ".md":
        yield name, prose_of_markdown(text)
    else:
        for i, cell in enumerate(json.loads(text)["cells"]):
            source = "".join(cell["source"])
            kind = prose_of_markdown if cell["cell_type"] == "markdown" else prose_of_python
            yield f"{name}, cell {i}", kind(re.sub(r"^\s*%.*", blanked, source, flags=re.MULTILINE))


def found(path: Path) -> list[str]:
    """Every match in a file, with its line and what to write instead."""
    hits = []
    for name, text in pages(path):
        for match in SEARCH.finditer(text):
            advice = next(advice for pattern, advice in WORDS.items() if pattern.fullmatch(match[0]))
            hits.append(f"{name}, line {text.count(chr(10), 0, match.start()) + 1}: {match[0]!r}; write: {advice}")
    return hits


@pytest.mark.parametrize("pattern", DOCUMENTS)
def test_the_documentation_is_plain(pattern):
    files = sorted(ROOT.glob(pattern))
    assert files, pattern
    hits = [hit for file in files for hit in found(file)]
    assert not hits, "\n".join(hits)


def test_the_library_is_plain():
    hits = [hit for pattern in CHECKED for file in sorted(ROOT.glob(pattern)) for hit in found(file)]
    assert not hits, "\n".join(hits)


def test_words_are_found_in_prose_and_not_in_code():
    source = (
        'asked = "told"  # one nobody\nx = f"{asked} was looked at {told}"\n"""`who` asks.\n\n>>> who\nfor\never"""\n'
    )
    words = [source[m.start() : m.end()] for m in SEARCH.finditer(prose_of_python(source))]
    assert words == ["nobody", "looked at", "for\never"]
    markdown = "Is told\n\n    told\n\n`told` ```\ntold\n``` goes\non with"
    assert [m[0] for m in SEARCH.finditer(prose_of_markdown(markdown))] == ["told", "goes\non with"]


if __name__ == "__main__":
    print("\n".join(hit for name in sys.argv[1:] for hit in found(Path(name).resolve())))
