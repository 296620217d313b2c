"""What a wrong name means: the name of an option, method, ... in another library, or a nearly right one.

The names of other libraries, and what they are here, stand in `names.toml`.
"""

import contextlib
import difflib
import functools
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.resources import files
from typing import Any


@functools.cache
def _table() -> dict[str, Any]:
    """Returns the content of `names.toml`, each section as a dict from a name in other libraries to what it is here."""

    def by_name(section: dict[str, str]) -> dict[str, str]:
        return {name: ours for ours, names in section.items() for name in names.split()}

    read = tomllib.loads(files("jfcl.core").joinpath("names.toml").read_text())
    values = {kind: by_name(section) for kind, section in read["values"].items()}
    return {"notes": read["notes"], "values": values} | {key: by_name(read[key]) for key in ("options", "sentences")}


def flag_of(name: str) -> str:
    """Returns the flag of an option, such as `--local-steps`."""
    return "--" + name.replace("_", "-")


@contextlib.contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Replaces the argument with which a refusal begins, such as that of a factory, by the name that the user knows."""
    try:
        yield
    except ValueError as error:
        begin, name, rest = re.match(r"(unknown column for |)(\w*)(.*)", str(error), flags=re.DOTALL).groups()
        if type(error) is not ValueError or name not in names:
            raise
        raise ValueError(begin + names[name] + rest) from error


def note_on(option: str) -> str:
    """Returns a note in brackets on an option that has another unit in other libraries; else an empty text."""
    note = _table()["notes"].get(option)
    return f" ({note})" if note else ""


def option_hint(name: str, options: Iterable[str], form: Callable[[str], str] = repr) -> str:
    """Returns `": did you mean 'rounds'?"` for a wrong name of an option, or an empty text where none is near.

    `form` writes an option: `flag_of` for flags.

    Example:
      >>> option_hint("participation", ["rounds", "cohort"], flag_of), option_hint("ronds", ["rounds", "cohort"])
      (': did you mean --cohort (a number of clients, not a share)?', ": did you mean 'rounds'?")
    """
    name, table = name[:100].replace("-", "_").lower(), _table()
    ours = {option: option for option in options}
    if name in table["sentences"] and name not in ours:
        return f": {_filled(table['sentences'][name], form)}"
    if table["options"].get(name) == "method" and "method" not in ours:  # on the command line
        return ": METHOD comes first, as in jfcl run ifca"
    foreign = {other: option for other, option in table["options"].items() if option in ours}
    if name in foreign:
        return f": did you mean {form(foreign[name])}{note_on(foreign[name])}?"
    for names in (ours, foreign):
        if near := difflib.get_close_matches(name, names, n=1):
            return f": did you mean {form(names[near[0]])}?"
    return ""


def value_hint(kind: str, value: str, choices: Iterable[str]) -> str:
    """Returns `": did you mean 'ifca'?"` for a wrong name of a method, an attack, ..., or a full stop.

    Names of other libraries are answered by what they are here.

    Example:
      >>> [value_hint("method", name, ["fedavg", "ifca"]) for name in ("FedProx", "IFCA", "x")]
      [': it is fedavg with --prox.', ": did you mean 'ifca'?", '.']
    """
    choices, plain = {_plain(name): name for name in choices}, _plain(value)
    answer = _table()["values"].get(kind, {}).get(plain)
    if answer and plain not in choices:
        return f": {_filled(answer, flag_of)}" + "." * (not answer.endswith("?"))
    near = [plain] if plain in choices else difflib.get_close_matches(plain, choices, n=1, cutoff=0.5)
    return f": did you mean {choices[near[0]]!r}?" if near else "."


def _plain(name: str) -> str:
    return re.sub(r"[\W_]", "", name.lower())


def _filled(text: str, form: Callable[[str], str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda match: form(match[1]), text)
