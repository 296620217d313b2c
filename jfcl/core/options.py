"""Options: declared by the annotations and the docstring of a function, with ranges and choices as metadata.

    def method(task, training, *, min_size: Annotated[int, Range(1)] = 1, linkage: Annotated[str, OneOf(LINKAGES)]):

A keyword-only argument is an option where its annotation names `bool`, `int`, `float` (or `Real`) or `str`, and beside
them `None`, paths and texts (`Literal`) alone, or a sequence of these that is marked by `SEVERAL`. Flags, the types in
files and checks of single values follow from it.
"""

import functools
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jfcl.core.checks import INT32_MAX, check, check_choice, check_count, is_concrete, require
from jfcl.core.names import flag_of, note_on

Real = float | jax.Array  # a float, which may be a tracer
MOST_REPEATED = 10**6  # repetitions inside one call of a compiled program; an interruption waits for its end
MOST_ADDED = 2**30  # counts that are added to others, or doubled, in int32
LONGEST_TEXT = 4096  # characters; the longest path on Linux
# Among the metadata of a sequence: its values are given one after the other, between spaces or commas, or spaces alone.
SEVERAL, EACH = "several", "each"
CLASSES = {bool: (bool, np.bool_), int: (int, np.integer), float: (int, float, np.integer, np.floating), str: str}


class Range(NamedTuple):
    """The integers from `least` to `most`."""

    least: int
    most: int = INT32_MAX

    def check(self, name: str, value: Any) -> None:
        """Raises `ValueError` for a value outside the range."""
        check(value <= self.most, name, value, f"at most {self.most}")
        check_count(name, value, least=self.least, most=self.most)


class Interval(NamedTuple):
    """The real numbers of an interval such as `"[0, 1)"`; infinity is accepted where the text ends in `"inf]"`."""

    text: str

    def check(self, name: str, value: Any) -> None:
        """Raises `ValueError` for a number outside the interval, and for one that float32 does not hold."""
        infinite = self.text.endswith("inf]")
        if not (infinite and value == math.inf):
            largest, smallest = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
            finite = "a number, or inf" if infinite else "finite"
            check(abs(value) <= largest, name, value, f"{finite}, at most {largest:.3g} in float32")
            check(value == 0 or abs(value) >= smallest, name, value, f"0, or at least {smallest:.3g} in float32")
        least, most = map(float, self.text[1:-1].split(","))
        above = value >= least if self.text[0] == "[" else value > least
        below = value <= most if self.text[-1] == "]" else value < most
        words = {"(0, inf)": "positive", "(0, inf]": "above 0", "[0, inf)": "0 or more"}
        check(above and below, name, value, words.get(self.text, f"in {self.text}"))


class OneOf(NamedTuple):
    """The names in `choices`, and with `find`, which raises `ValueError`, further texts, described by `form`."""

    choices: Collection[str]
    find: Callable[[str], Any] | None = None
    form: str = "`MODULE:NAME`"

    def check(self, name: str, value: Any) -> None:
        """Raises `ValueError`, with the nearest name, for an unknown one, and for what does not fit."""
        if self.find is not None:
            self.find(value)
        else:
            check_choice(name, value, self.choices)


class Search(NamedTuple):
    """The range of a real option in which `jfcl.shifts` searches, uniformly in its logarithm unless `log` is False."""

    low: float
    high: float
    log: bool = True

    def draws(self, rng: np.random.Generator, count: int) -> list[float]:
        """Returns random values of four digits, one from each of `count` equal parts of the range, in random order."""
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        values = low + (high - low) * (rng.permutation(count) + rng.random(count)) / max(count, 1)
        return [float(f"{math.exp(value) if self.log else value:.4g}") for value in values.tolist()]


class Needs(NamedTuple):
    """Another option, or either of two, without which (or without one of its `values`) this one has no effect."""

    option: str
    values: tuple = ()
    other: str = ""

    def are_met(self, options: Mapping[str, Any]) -> bool:
        """Returns whether `options` have what is needed: one of the values, or any but 0, False and None."""
        needed = [options.get(name) for name in (self.option, self.other)]
        return any(value in self.values if self.values else not is_concrete(value) or bool(value) for value in needed)

    def __str__(self) -> str:
        values = " or ".join(map(str, self.values))
        return " or ".join(flag_of(name) for name in (self.option, self.other) if name) + f" {values}" * bool(values)


class Reaches(NamedTuple):
    """The argument of a method's factory, or either of two, through which an option of a run reaches the method."""

    argument: str
    other: str = ""


HELD = {int: (Range(-INT32_MAX),), float: (Interval("(-inf, inf)"),)}  # what int32 and float32 hold


class Option(NamedTuple):
    """An option as it was declared.

    Attributes:
      name: as in Python; the flag is `--` and the name, with hyphens.
      kind: `bool`, `int`, `float` or `str`.
      default: the value where none is given.
      text: one line of help.
      metadata: the `Range`, `Interval`, `OneOf`, `Needs`, `Reaches` and `Search` of the annotation.
      members: the types that the annotation names. Instead of a text, its function checks arrays and a `Path` itself.
      traced: whether a value may be a tracer, an argument of the compiled program.
      words: texts that an option of another kind accepts too, such as `"auto"` beside a number.
      several: `SEVERAL` or `EACH` where a value is a sequence of such values, else empty.
    """

    name: str
    kind: type
    default: Any
    text: str
    metadata: tuple = ()
    members: tuple = ()
    traced: bool = False
    words: tuple[str, ...] = ()
    several: str = ""

    def check(self, value: Any) -> None:
        """Raises `ValueError` for a value of another type, or one that the annotation does not accept."""
        if self.several and value is not None:
            for one in value:
                self._replace(several="").check(one)
            return
        if (value is None and type(None) in self.members) or (isinstance(value, str) and value in self.words):
            return
        name, kind = self.name, self.kind
        fits = isinstance(value, CLASSES[kind]) and (kind is bool or not isinstance(value, bool))
        takes_arrays = kind is str and jax.Array in self.members
        alternatives = "".join(f" or {word!r}" for word in self.words) + " or an array" * takes_arrays
        check(fits, name, value, f"of type {kind.__name__}" + alternatives + note_on(name))
        if kind is str:
            encodable = "\0" not in value and not any("\ud800" <= character <= "\udfff" for character in value)
            fits = encodable and bool(value.strip()) and len(value) <= LONGEST_TEXT
            check(fits, name, value, f"text of 1 to {LONGEST_TEXT} characters in UTF-8, none of them NUL")
        accepted = [accepts for accepts in self.metadata if hasattr(accepts, "check")]
        for accepts in accepted or HELD.get(kind, ()):
            accepts.check(name, value)


def _members(hint: Any) -> tuple:
    """Returns the types that an annotation accepts."""
    hint = hint.__origin__ if hasattr(hint, "__metadata__") else hint
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


@functools.cache
def options_of(function: Callable) -> dict[str, Option]:
    """Returns the options among the keyword-only arguments of a function, or the attributes of a class.

    Example:
      >>> def method(*, linkage: typing.Annotated[str | None, OneOf(("single", "complete"))] = None, task: Any): ...
      >>> [(option.kind, option.default) for option in options_of(method).values()]
      [(<class 'str'>, None)]
    """
    hints, texts = typing.get_type_hints(function, include_extras=True), argument_texts(function)
    if isinstance(function, type):
        defaults = {name: vars(function)[name] for name in function.__annotations__}
    else:
        parameters = inspect.signature(function).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    options = {}
    for name, default in defaults.items():
        members, metadata = _members(hints.get(name)), getattr(hints.get(name), "__metadata__", ())
        several = next((mark for mark in (SEVERAL, EACH) if mark in metadata), "")
        if several:
            members = [part for member in members for part in typing.get_args(member) or (member,)]
        kind = next((kind for kind in CLASSES if kind in members), None)
        literals = [member for member in members if typing.get_origin(member) is typing.Literal]
        if kind is None or {*members} - {*CLASSES, *literals, type(None), jax.Array, Path}:
            continue
        default = None if default is inspect.Parameter.empty else default
        words = tuple(word for literal in literals for word in typing.get_args(literal))
        traced, text = jax.Array in members and kind is not str, texts.get(name, "")
        options[name] = Option(name, kind, default, text, metadata, tuple(members), traced, words, several)
    return options


def check_options(function: Callable, arguments: Mapping[str, Any]) -> None:
    """Checks the options of `function` among its `arguments`: its `locals()`, before it sets any.

    Tracers pass. All numbers of an array are checked where the annotation names arrays.

    Raises:
      ValueError: a value of another type, or one that the option's annotation does not accept.

    Example:
      >>> def method(*, momentum: typing.Annotated[Real, Interval("[0, 1)")] = 0.9):
      ...     check_options(method, locals())
      >>> method(momentum=np.float32([0.5, 1]))
      Traceback (most recent call last):
      ValueError: momentum must be in [0, 1), got 1.0
    """
    for name, option in options_of(function).items():
        value = arguments[name]
        is_array = isinstance(value, (np.ndarray, jax.Array)) and is_concrete(value) and jax.Array in option.members
        if Path in option.members or (is_array and not option.traced):
            continue
        if is_array:
            for extreme in (np.min, np.max) if value.size else ():
                option.check(float(extreme(np.asarray(value))))
        elif is_concrete(value):
            option.check(value)
        else:
            may_be_traced = option.kind is float or jax.Array in option.members
            require(may_be_traced, f"{name} cannot be one of hyperparams, as the compiled program depends on it")


@functools.cache
def argument_texts(documented: Any) -> dict[str, str]:
    """Returns the entries of the `Args` or `Attributes` section of a docstring, by name."""
    section = re.search(r"\n(?:Args|Attributes):\n((?:\n|  .*)*)", inspect.cleandoc(documented.__doc__ or ""))
    texts = {}
    for entry in re.split(r"\n(?=  \S)", section[1]) if section else []:
        names, _, text = entry.partition(": ")
        texts |= {name.strip(): " ".join(text.split()) for name in names.split(",")}
    return texts


def first_sentence(text: str) -> str:
    """Returns the first sentence of a docstring's entry, without markup and full stop.

    Example:
      >>> first_sentence('`"size"` (McMahan et al.) or `"equal"`. See there.')
      'size (McMahan et al.) or equal'
    """
    sentence = re.split(r"\.\s+(?=[A-Z`(\"])", text)[0]
    return re.sub(r'[`"]', "", sentence).rstrip(".")
