"""A reader of optimised XLA programs, as text: computations, instructions, trip counts of loops, functions of Python.

`compiled.as_text()` of a program that `jax.jit(...).lower(...).compile()` made is all that it needs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jfcl.core import most_trips

BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "token": 0, "opaque": 0, "c64": 8, "c128": 16}
BYTES |= {f"{kind}{bits}": bits // 8 for kind in "suf" for bits in (8, 16, 32, 64)}
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*->.*\{$")
_NAME = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_OPERAND = re.compile(r"%([\w.\-]+)")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
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
    """An instruction.

    Attributes:
      name: unique in its computation.
      op: the opcode, such as `"fusion"`.
      arrays: the results.
      operands: names of instructions of the same computation.
      inside: the text between the parentheses, such as the value of a constant.
      attributes: the text behind them.
      is_root: whether its result is that of the computation.
    """

    name: str
    op: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    inside: str
    attributes: str
    is_root: bool


class Program(NamedTuple):
    """A program: instructions by name, by computation; the entry; functions on a stack by its id, innermost first."""

    computations: dict[str, dict[str, Instruction]]
    entry: str
    stacks: dict[int, tuple[str, ...]]


def parse(text: str) -> Program:
    """Returns the program that `text` describes.

    Raises:
      ValueError: a text without an entry computation.

    Example:
      >>> program = parse('''
      ... ENTRY %main (x: f32[2,3]) -> f32[2,3] {
      ...   %x = f32[2,3]{1,0} parameter(0)
      ...   ROOT %y = f32[2,3]{1,0} add(%x, %x)
      ... }''')
      >>> [(i.name, i.op, i.arrays[0].nbytes) for i in program.computations[program.entry].values()]
      [('x', 'parameter', 24), ('y', 'add', 24)]
    """
    computations: dict[str, dict[str, Instruction]] = {}
    tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
    entry, current, table = None, None, None
    for line in text.splitlines():
        if current is not None:
            if line.startswith("}"):
                current = None
            elif (found := _instruction(line)) is not None:
                current[found.name] = found
        elif (head := _HEAD.match(line)) is not None:
            current, table = computations.setdefault(head[2], {}), None
            entry = head[2] if head[1] else entry
        elif line in tables:
            table = tables[line]
        elif table is not None and line:
            number, _, value = line.partition(" ")
            table[int(number)] = value
    if entry is None:
        raise ValueError("text must be an optimised XLA program with an ENTRY computation")
    return Program(computations, entry, _stacks(tables))


def _instruction(line: str) -> Instruction | None:
    """Returns the instruction of a line, `name = type op(operands), attributes`; None for another line."""
    head = _NAME.match(line)
    if head is None:
        return None
    rest = line[head.end() :]
    end = _closing(rest) + 1 if rest.startswith("(") else rest.find(" ")
    kind, rest = rest[:end], rest[end:].lstrip()
    op, opened, _ = rest.partition("(")
    if not opened:
        return None
    last = len(op) + _closing(rest[len(op) :])
    inside = rest[len(op) + 1 : last]
    arrays = tuple(
        Array(dtype, tuple(int(n.strip("<=")) for n in shape.split(",") if n), "S(" not in layout)
        for dtype, shape, layout in _ARRAY.findall(kind)
    )
    return Instruction(head[2], op, arrays, tuple(_OPERAND.findall(inside)), inside, rest[last + 1 :], bool(head[1]))


def _closing(text: str) -> int:
    """Returns the position of the bracket that closes the one at the beginning."""
    depth = 0
    for match in re.finditer(r"[([{}\])]", text):
        depth += 1 if match[0] in "([{" else -1
        if depth == 0:
            return match.start()
    return len(text) - 1


def _stacks(tables: dict[str, dict[int, str]]) -> dict[int, tuple[str, ...]]:
    """Returns the functions on the stack of every id, the innermost first, without those of installed packages."""

    def fields(text):
        return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", text)}

    functions: dict[int, str] = {}
    for n, text in tables["FileLocations"].items():
        at = fields(text)
        file = tables["FileNames"].get(at.get("file_name_id"), "")
        function = tables["FunctionNames"].get(at.get("function_name_id"), "")
        functions[n] = _function(file.strip('"'), function.strip('"'))
    stacks: dict[int, tuple[str, ...]] = {}
    for n, text in tables["StackFrames"].items():  # a frame comes behind its callers; ids of callers are one too large
        at = fields(text)
        own = functions.get(at.get("file_location_id"))
        stacks[n] = ((own,) if own else ()) + stacks.get(at.get("parent_frame_id", 0) - 1, ())
    return stacks


# ---------------------------------------------------------------------------------------------------------------
# Attributes of instructions.


def attribute(instruction: Instruction, name: str) -> str | None:
    """Returns the value of an attribute that is one word, such as a computation or a direction."""
    found = re.search(rf"\b{name}=%?([\w.\-]+)", instruction.attributes)
    return found and found[1]


def numbers(instruction: Instruction, name: str) -> tuple[int, ...]:
    """Returns the value of an attribute that is a list, such as `lhs_contracting_dims={1,2}`."""
    found = re.search(rf"\b{name}=\{{([\d,]*)\}}", instruction.attributes)
    return tuple(int(n) for n in found[1].split(",") if n) if found else ()


def config(instruction: Instruction, name: str) -> str | None:
    """Returns the first value with that name in the compiler's own notes on an instruction, its `backend_config`."""
    found = re.search(rf'"{name}":\[?"?([\w.\-]+)', instruction.attributes)
    return found and found[1]


def called(program: Program, instruction: Instruction) -> list[str]:
    """Returns the computations that an instruction runs as its body: one, several of a conditional, or none."""
    branches = re.search(r"branch_computations=\{([^}]*)\}", instruction.attributes)
    if branches:
        names = [n.strip().lstrip("%") for n in branches[1].split(",")]
    else:
        kinds = ("body", "calls", "to_apply", "true_computation", "false_computation", "called_computations")
        names = [attribute(instruction, kind) for kind in kinds]
    return [name for name in names if name in program.computations]


def reachable(program: Program, name: str | None) -> Iterator[Instruction]:
    """Yields the instructions of a computation and of those that it calls, fusions too."""
    for instruction in program.computations.get(name, {}).values():
        yield instruction
        for inner in called(program, instruction):
            yield from reachable(program, inner)


def trip_count(program: Program, computation: str, loop: Instruction) -> int | None:
    """Returns how often a loop runs its body, or the most that it may; None where the program does not show it.

    The compiler's own count where it notes one; else the bound of `jfcl.core.at_most`; else the constant that the
    condition compares the counter with, less the counter's first value.
    """
    noted = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if noted:
        return int(noted[1])
    most = most_trips(loop.attributes)
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
    return max(count - _first_value(program.computations[computation], program.computations[condition], loop), 0)


def _first_value(outer: dict[str, Instruction], condition: dict[str, Instruction], loop: Instruction) -> int:
    """Returns the value with which the counter of a loop begins; 0 where it is not a constant."""
    read = [i for i in condition.values() if i.op == "get-tuple-element"]
    start = outer.get(loop.operands[0]) if loop.operands else None
    if len(read) != 1 or start is None or start.op != "tuple":
        return 0
    value = outer.get(start.operands[int(attribute(read[0], "index") or 0)])
    while value is not None and value.op in ("copy", "bitcast") and value.operands:
        value = outer.get(value.operands[0])
    is_number = value is not None and value.op == "constant" and re.fullmatch(r"\d+", value.inside.strip())
    return int(value.inside) if is_number else 0


# ---------------------------------------------------------------------------------------------------------------
# Where an instruction comes from.


def source(program: Program, instruction: Instruction) -> str:
    """Returns the function of Python that an instruction comes from, such as `"kernels.similarity.pairwise_cosine"`.

    It is the innermost function of this library, or of a user's own file, on the stack; the mapping of clients and
    the core are passed over where there is another one. A gradient's second half has the name of the first, and
    "(gradient)". What the compiler adds itself, such as a change of layout, has no function: the result is "".
    """
    names = _functions(program, instruction)
    chosen = [name for name in names if not name.startswith(("mapping.", "core."))] or names
    backward = re.search(r'op_name="[^"]*transpose\(', instruction.attributes)
    return f"{chosen[0]}{' (gradient)' if backward else ''}" if chosen else ""


def is_kernel(program: Program, instruction: Instruction) -> bool:
    """Returns whether an instruction comes from `jfcl.kernels`."""
    return any(name.startswith("kernels.") for name in _functions(program, instruction))


def _functions(program: Program, instruction: Instruction) -> tuple[str, ...]:
    """Returns the functions on the stack of an instruction, the innermost first."""
    found = re.search(r"stack_frame_id=(\d+)", instruction.attributes)
    return program.stacks.get(int(found[1]), ()) if found else ()


def _function(file: str, function: str) -> str:
    """Returns the dotted name of a function; "" for one of an installed package, or for no function."""
    function, path = function.split(".<locals>")[0], Path(file)
    if path.is_relative_to(_PACKAGE):
        module = ".".join(path.relative_to(_PACKAGE).with_suffix("").parts)
        return f"{module}.{function}"
    installed = {"site-packages", "dist-packages", "jax", "flax", "optax"} & set(path.parts)
    return "" if installed or not path.suffix or function.startswith("<") else f"{path.stem}.{function}"
