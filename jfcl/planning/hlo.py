"""A reader of optimised XLA programs, `compiled.as_text()`: instructions, trip counts of loops, functions of Python."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jfcl.core.platforms import most_trips

BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "token": 0, "opaque": 0, "c64": 8, "c128": 16}
BYTES |= {f"{kind}{bits}": bits // 8 for kind in "suf" for bits in (8, 16, 32, 64)}
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*->.*\{\n((?:[^}\n].*\n|\n)*)", re.M)
_INSTRUCTION = re.compile(r"^[ \t]+(ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)(\(.*)", re.M)
_OPERAND = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"\b(?:body|calls|to_apply|(?:true|false)_computation|(?:branch|called)_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
_NAMES = re.compile(r"^(FileNames|FunctionNames)\n((?:\d+ .*\n)*)", re.M)
_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+) function_name_id=(\d+)", re.M)
_FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?", re.M)
_PACKAGE = Path(__file__).resolve().parent.parent


class Array(NamedTuple):
    """An array of a program: its dtype as XLA writes it, its shape, and whether it is in the main memory."""

    dtype: str
    shape: tuple[int, ...]
    in_memory: bool = True

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> float:
        return self.size * BYTES.get(self.dtype, 1)  # others: the kinds of f8


class Instruction(NamedTuple):
    """An instruction of a computation."""

    name: str  # unique in its computation
    op: str  # the opcode, such as "fusion"
    arrays: tuple[Array, ...]  # the results
    operands: tuple["Instruction", ...]
    inside: str  # the text between the parentheses, such as the value of a constant
    attributes: str  # the text behind them
    is_root: bool  # whether its result is that of the computation

    def __repr__(self) -> str:
        return f"<{self.name}: {self.op}>"  # without all instructions before it


class Program(NamedTuple):
    """A program: instructions by name, by computation; the entry; functions on a stack by its id, innermost first."""

    computations: dict[str, dict[str, Instruction]]
    entry: str
    stacks: dict[int, tuple[str, ...]]


def parse(text: str) -> Program:
    """Returns the program that `text` describes; raises `ValueError` without an entry computation."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry = None
    for is_entry, name, lines in _COMPUTATION.findall(text):
        computation = computations[name] = {}
        entry = name if is_entry else entry
        for found in _INSTRUCTION.finditer(lines):
            computation[found[2]] = _instruction(found, computation)
    if entry is None:
        raise ValueError("text must be an optimised XLA program with an ENTRY computation")
    return Program(computations, entry, _stacks(text))


def _instruction(found: re.Match, before: dict[str, Instruction]) -> Instruction:
    """Returns the instruction of a line, `name = type op(operands), attributes`."""
    root, name, kind, op, rest = found.groups()
    last = _closing(rest)
    inside = rest[1:last]
    arrays = tuple(
        Array(dtype, tuple(int(n.strip("<=")) for n in shape.split(",") if n), "S(" not in layout)
        for dtype, shape, layout in _ARRAY.findall(kind)
    )
    operands = tuple(before[n] for n in _OPERAND.findall(inside) if n in before)
    return Instruction(name, op, arrays, operands, inside, rest[last + 1 :], bool(root))


def _closing(text: str) -> int:
    """Returns the position of the bracket that closes the one at the beginning."""
    depth = 0
    for match in re.finditer(r"[([{}\])]", text):
        depth += 1 if match[0] in "([{" else -1
        if depth == 0:
            return match.start()
    return len(text) - 1


def _stacks(text: str) -> dict[int, tuple[str, ...]]:
    """Returns the functions on the stack of every id, the innermost first, without those of installed packages."""
    names = {title: dict(re.findall(r'^(\d+) "(.*)"$', rows, re.M)) for title, rows in _NAMES.findall(text)}
    functions = {
        number: _function(names["FileNames"].get(file, ""), names["FunctionNames"].get(function, ""))
        for number, file, function in _LOCATION.findall(text)
    }
    stacks: dict[int, tuple[str, ...]] = {}
    for number, location, caller in _FRAME.findall(text):  # it comes after its callers, whose ids are one too large
        function, callers = functions.get(location), stacks.get(int(caller or 0) - 1, ())
        stacks[int(number)] = (function, *callers) if function else callers
    return stacks


def attribute(instruction: Instruction, name: str) -> str | None:
    """Returns the value of an attribute that is one word, such as a computation or a direction."""
    match = re.search(rf"\b{name}=%?([\w.\-]+)", instruction.attributes)
    return match and match[1]


def numbers(instruction: Instruction, name: str) -> tuple[int, ...]:
    """Returns the value of an attribute that is a list, such as `lhs_contracting_dims={1,2}`."""
    match = re.search(rf"\b{name}=\{{([\d,]*)\}}", instruction.attributes)
    return tuple(int(n) for n in match[1].split(",") if n) if match else ()


def called(program: Program, instruction: Instruction) -> list[str]:
    """Returns the computations that an instruction runs as its body: one, several of a conditional, or none."""
    names = re.findall(r"[\w.\-]+", " ".join(_CALLED.findall(instruction.attributes)))
    return [name for name in names if name in program.computations]


def reachable(program: Program, name: str | None) -> Iterator[Instruction]:
    """Yields the instructions of a computation and of those that it calls, fusions too."""
    for instruction in program.computations.get(name, {}).values():
        yield instruction
        for inner in called(program, instruction):
            yield from reachable(program, inner)


def trip_count(program: Program, loop: Instruction) -> int | None:
    """Returns how often a loop runs its body, or the most that it may; None where the program does not show it.

    The compiler's own count where it notes one; else the bound of `jfcl.core.at_most`; else the constant that the
    condition compares the counter with, less the counter's first value.
    """
    noted = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
    most = int(noted[1]) if noted else most_trips(loop.attributes)
    if most is not None:
        return most
    condition = attribute(loop, "condition")
    inside = list(reachable(program, condition))
    constants = [i for i in inside if i.op == "constant" and i.arrays and i.arrays[0].shape == ()]
    limits = {int(i.inside) for i in constants if re.fullmatch(r"\d+", i.inside.strip()) and int(i.inside) > 0}
    compares = [i for i in inside if i.op == "compare"]
    if len(limits) != 1 or not compares:
        return None
    count = limits.pop() + any(attribute(i, "direction") == "LE" for i in compares)
    # The counter begins with 0, unless the program shows another constant.
    read = [i for i in program.computations[condition].values() if i.op == "get-tuple-element"]
    if len(read) == 1 and loop.operands and loop.operands[0].op == "tuple":
        value = loop.operands[0].operands[int(attribute(read[0], "index") or 0)]
        while value.op in ("copy", "bitcast") and value.operands:
            value = value.operands[0]
        if value.op == "constant" and re.fullmatch(r"\d+", value.inside.strip()):
            count -= int(value.inside)
    return max(count, 0)


def source(program: Program, instruction: Instruction) -> str:
    """Returns the function of Python that an instruction comes from, such as `"kernels.similarity.pairwise_cosine"`.

    It is the innermost one of this library or of a user's file; those of `mapping` and `core` count only where there is
    no other. The second half of a gradient has "(gradient)" behind it. What the compiler adds has none: "".
    """
    names = _functions(program, instruction)
    chosen = [name for name in names if not name.startswith(("mapping.", "core."))] or names
    backward = re.search(r'op_name="[^"]*transpose\(', instruction.attributes)
    return f"{chosen[0]}{' (gradient)' if backward else ''}" if chosen else ""


def is_kernel(program: Program, instruction: Instruction) -> bool:
    """Returns whether an instruction comes from `jfcl.kernels`; methods call `if_rare` of its `base`, too."""
    names = (name for name in _functions(program, instruction) if not name.startswith("kernels.base."))
    return any(name.startswith("kernels.") for name in names)


def _functions(program: Program, instruction: Instruction) -> tuple[str, ...]:
    """Returns the functions on the stack of an instruction, the innermost first."""
    frame = re.search(r"stack_frame_id=(\d+)", instruction.attributes)
    return program.stacks.get(int(frame[1]), ()) if frame else ()


def _function(file: str, function: str) -> str:
    """Returns the dotted name of a function; "" for one of an installed package, or for no function."""
    function, path = function.split(".<locals>")[0], Path(file)
    if path.is_relative_to(_PACKAGE):
        module = ".".join(path.relative_to(_PACKAGE).with_suffix("").parts)
        return f"{module}.{function}"
    installed = {"site-packages", "dist-packages", "jax", "flax", "optax"} & set(path.parts)
    return "" if installed or not path.suffix or function.startswith("<") else f"{path.stem}.{function}"
