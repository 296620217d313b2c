"""The predicted price of a compiled program on a chip: seconds, operations, bytes, communication, sequential steps.

Counts are facts of the program. Seconds are predictions, good for comparing one program with another: loops are
multiplied by their trip counts, and an instruction costs

* on a TPU, the cycles that the compiler itself estimates for it;
* on a GPU, the longer one of its operations at `REACHED` of the chip's peak and its bytes at the chip's bandwidth,
  plus the launch of a kernel; a convolution with groups, some times that (`GROUPED`);
* a collective, its bytes over the links, plus `LATENCY`.

What the TPU compiler has no estimate for (gather, scatter, sort) is a guess, and is listed as one.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from jfcl.planning import hlo
from jfcl.planning.hlo import Instruction, Program
from jfcl.planning.targets import Chip, Target

REACHED = 0.7  # the fraction of a GPU's peak that large matrix products reach
LAUNCH = 3e-6  # seconds to start a kernel on a GPU
# How many times as long cuDNN's convolutions with groups take: medians of eight layers on an H100, a group per client.
GROUPED, GROUPED_FILTER = 6.0, 16.0  # the latter for gradients with respect to weights
LATENCY = 3e-6  # seconds of a collective without bytes
STARTUP = 1.2e-6  # seconds of an instruction on a TPU without an estimate, beside its bytes
ROW_CYCLES = 20  # cycles of a TPU to move one row in gather and scatter
SORT_FACTOR = 20  # passes over the data of a sort on a GPU
SCALAR_CYCLES = 10
MOST_PAIRS = 4_000_000  # of a convolution's outputs and window; above, its border is not looked for

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter", "collective-broadcast")
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"}
FREE |= {"opt-barrier", "optimization-barrier", "add-dependency", "domain", "async-update"}
COPIES = ("copy-start", "slice-start", "dynamic-slice-start")
SLICES = ("dynamic-slice", "slice", "gather")
ADDED = "compiler: layouts and copies"  # the part of instructions that no function stands for

Tally = Counter  # maps (kind, name) to a number; a loop multiplies all of them


class Loop(NamedTuple):
    """A loop of a program."""

    function: str  # that it comes from
    trips: int | None  # how often its body runs, at most; None, which counts as once, where the program does not say
    collectives: int  # in one trip


class Cost(NamedTuple):
    """What one run of a program costs on one of a target's chips; see `price`."""

    seconds: float  # predicted
    flops: float  # operations of matrix products and convolutions: a multiplication and an addition are two
    mfu: float  # `flops` a second as a fraction of the chip's bfloat16 peak
    bytes_moved: float  # between the chip and its memory
    collectives: dict[str, list[float]]  # by kind, `[number, bytes]`
    precision: dict[str, dict[str, float]]  # operations by origin, "training" or "kernels", and precision
    sequential_steps: int  # trips of innermost loops, one after the other
    parts: dict[str, float]  # predicted seconds by function, the longest first
    guessed: dict[str, float]  # the part of `seconds` that is a guess, by instruction
    loops: list[Loop]  # in the order in which they end


def price(program: str | Program, target: Target, *, rare: bool = True) -> Cost:
    """Returns the predicted cost of an optimised program on each chip of `target`.

    `program` is `compiled.as_text()`, or the result of `hlo.parse`. With `rare`, a conditional runs its longest branch,
    such as a split of CFL, and else its shortest. Raises `ValueError` for a text that is no optimised program.
    """
    program = hlo.parse(program) if isinstance(program, str) else program
    pricing = _Pricing(program, target, max if rare else min)
    tally = pricing.computation(program.entry)
    seconds = max(_total(tally, "seconds"), _total(tally, "copies")) + _total(tally, "network")
    flops = _total(tally, "flops")
    precision: dict[str, dict[str, float]] = {}
    for (where, name), value in _sums(tally, "flops").items():
        precision.setdefault(where, {})[name] = value
    return Cost(
        seconds=seconds,
        flops=flops,
        mfu=flops / target.chip.bfloat16 / seconds if seconds else 0.0,
        bytes_moved=_total(tally, "bytes"),
        collectives={kind: [int(tally["count", kind]), size] for kind, size in _sums(tally, "sent").items()},
        precision=precision,
        sequential_steps=int(_total(tally, "steps")),
        parts=_sums(tally, "seconds", "network"),
        guessed=_sums(tally, "guess"),
        loops=pricing.loops,
    )


def _total(tally: Tally, *kinds: str) -> float:
    return sum(value for (kind, _), value in tally.items() if kind in kinds)


def _sums(tally: Tally, *kinds: str) -> dict:
    """Returns the sums of some kinds by name, the largest first."""
    sums: Counter = Counter()
    for (kind, name), value in tally.items():
        if kind in kinds:
            sums[name] += value
    return dict(sums.most_common())


class _Pricing:
    """The tallies of a program's computations, each computed once."""

    def __init__(self, program: Program, target: Target, branch: Callable[..., Tally]):
        self.program, self.chip, self.count, self.branch = program, target.chip, target.count, branch
        self.loops: list[Loop] = []
        self._tallies: dict[str, Tally] = {}

    def computation(self, name: str | None) -> Tally:
        """Returns the tally of a computation and of all that it runs."""
        if name not in self._tallies:
            tally: Tally = Counter()
            for instruction in self.program.computations.get(name, {}).values():
                tally.update(self._instruction(instruction))
            self._tallies[name] = tally
        return self._tallies[name]

    def _instruction(self, i: Instruction) -> Tally:
        if i.op == "while":
            return self._loop(i)
        if i.op in ("conditional", "call", "async-start"):
            inner = [self.computation(name) for name in hlo.called(self.program, i)]
            if i.op == "conditional":
                return self.branch(inner, key=lambda tally: _total(tally, "seconds", "network"), default=Counter())
            return sum(inner, Counter())
        if i.op in FREE or i.op.endswith("-done"):
            return Counter()
        if i.op.removesuffix("-start") in COLLECTIVES:
            return self._collective(i)
        if i.op in COPIES:  # beside other work
            size = min((a.nbytes for a in i.arrays if a.size > 1), default=0)
            return Counter({("bytes", ""): size, ("copies", ""): size / self.chip.bandwidth})
        return self._plain(i)

    def _loop(self, i: Instruction) -> Tally:
        trips = hlo.trip_count(self.program, i)
        once = Counter(self.computation(hlo.attribute(i, "body")))
        collectives, inner_steps = (int(_total(once, kind)) for kind in ("count", "steps"))
        once.update(self.computation(hlo.attribute(i, "condition")))
        self.loops.append(Loop(self._part(i), trips, collectives))
        n = 1 if trips is None else trips
        return Counter({key: n * value for key, value in once.items()} | {("steps", ""): n * max(inner_steps, 1)})

    def _collective(self, i: Instruction) -> Tally:
        kind, n = i.op.removesuffix("-start"), self.count
        size, of_operands = (sum(a.nbytes for j in some for a in j.arrays) for some in ((i,), i.operands))
        if i.op in ("all-gather-start", "collective-permute-start"):  # operands stand beside results
            size -= of_operands
        elif kind == "reduce-scatter":  # a chip keeps a part of the sum
            size = of_operands
        sent = {"all-reduce": 2 * (n - 1) / n, "all-gather": (n - 1) / n, "reduce-scatter": (n - 1) / n}.get(kind, 1)
        seconds = sent * size / self.chip.link + LATENCY
        return Counter({("network", f"{self._part(i)} ({kind})"): seconds, ("sent", kind): size, ("count", kind): 1})

    def _part(self, i: Instruction) -> str:
        return hlo.source(self.program, i) or ADDED

    def _plain(self, i: Instruction) -> Tally:
        """Returns the tally of an instruction that computes."""
        chip, products = self.chip, 0.0
        tally = Counter({("bytes", ""): _bytes_moved(self.program, i)})
        memory = tally["bytes", ""] / chip.bandwidth
        where = "kernels" if hlo.is_kernel(self.program, i) else "training"
        for precision, count in operations(self.program, i, chip.is_tpu):
            tally["flops", (where, precision)] += count
            products += count / _rate(chip, precision)
        cycles = re.search(r'"estimated_cycles":"?(\d+)', i.attributes)
        if not chip.is_tpu:
            passes = SORT_FACTOR if i.op == "sort" else 1
            seconds = max(products / REACHED, memory * passes) * _slowdown(i) + LAUNCH
        elif cycles is not None:
            seconds = int(cycles[1]) / chip.clock
        else:
            rows = list(_rows_moved(self.program, i))
            seconds = self._guess(i, memory, sum(count for _, count in rows))
            tally["guess", rows[0][0] if rows else i.op] = seconds
        tally["seconds", self._part(i)] = seconds
        return tally

    def _guess(self, i: Instruction, memory: float, rows: float) -> float:
        """Returns the seconds of an instruction for which the TPU compiler has no estimate."""
        size, clock = max((a.size for a in i.arrays), default=1), self.chip.clock
        if i.op == "custom-call" and "Bit" in i.attributes[:200]:
            return 0.0
        if size == 1 and i.op not in ("fusion", "custom-call"):
            return SCALAR_CYCLES / clock
        if i.op == "sort":  # bitonic, on vectors of 8 x 128
            at = (hlo.numbers(i, "dimensions") or (-1,))[0]
            passes = math.log2(max(i.arrays[0].shape[at], 2))
            steps = passes * (passes + 1) / 2 * sum(a.size for a in i.arrays)
            return 6 * steps / (1024 * clock) + STARTUP
        return memory + (STARTUP if memory else STARTUP / 6) + ROW_CYCLES * rows / clock


def _slowdown(i: Instruction) -> float:
    """Returns the factor on the roofline of a GPU's instruction: above 1 for a convolution with groups."""
    groups = re.search(r"(?:feature|batch)_group_count=(\d+)", i.attributes)
    if i.op != "custom-call" or not _is_library_call(i) or groups is None or int(groups[1]) == 1:
        return 1.0
    return GROUPED_FILTER if "convBackwardFilter" in i.attributes else GROUPED


def _rate(chip: Chip, precision: str) -> float:
    """Returns the operations a second of products at a precision."""
    kind, _, passes = precision.partition(" x ")
    rates = {"bfloat16": chip.bfloat16, "tf32": chip.tf32, "float32": chip.float32, "float64": chip.float32 / 2}
    return rates.get(kind, chip.bfloat16) / int(passes or 1)


def _precision(i: Instruction, dtypes: set[str], is_tpu: bool) -> str:
    """Returns the precision at which the chip multiplies, such as `"bfloat16"` for float32 arrays on a TPU."""
    algorithm = hlo.attribute(i, "algorithm") or ""
    if "bf16" in algorithm:
        passes = algorithm.rpartition("_x")[2]
        return f"bfloat16 x {passes}" if passes.isdigit() else "bfloat16"
    if "tf32" in algorithm:
        return "tf32"
    dtypes = dtypes - {"pred"} or dtypes  # a mask takes the other one's
    if not dtypes <= {"f32", "bf16", "f16"}:
        return "float64" if "f64" in dtypes else "/".join(sorted(dtypes))
    if "f32" not in dtypes:
        return "bfloat16"
    match = re.search(r'operand_precision"?[=:][{\[]"?(\w+)', i.attributes)
    asked = match[1].lower() if match else "default"
    if is_tpu:
        return {"highest": "float32", "high": "bfloat16 x 3"}.get(asked, "bfloat16")
    return "float32" if asked in ("high", "highest") else "tf32" if dtypes == {"f32"} else "bfloat16"


def operations(program: Program, i: Instruction, is_tpu: bool) -> Iterator[tuple[str, float]]:
    """Yields `(precision, operations)` of the products in an instruction, fusions inside."""
    if i.op in ("dot", "convolution") or (i.op == "custom-call" and _is_library_call(i)):
        inputs = [operand.arrays[0] for operand in i.operands[:2] if operand.arrays]
        if len(inputs) == 2:
            count = _convolution if "dim_labels=" in i.attributes else _dot
            lhs, rhs, out = (array.shape for array in (*inputs, i.arrays[0]))
            if "convBackwardInput" in i.attributes:  # cuDNN's labels are those of the convolution, not of its gradient
                lhs, out = out, lhs
            elif "convBackwardFilter" in i.attributes:
                rhs, out = out, rhs
            yield _precision(i, {array.dtype for array in inputs}, is_tpu), count(i, lhs, rhs, out)
    elif i.op == "custom-call" and 'name = "upper_products"' in i.attributes:  # of `kernels.gram_gpu`
        *tiles, _, height, width = i.arrays[0].shape  # of all models; a tile's parts share its columns
        yield "bfloat16 x 3", 2.0 * math.prod(tiles) * height * width * i.operands[0].arrays[0].shape[-1]
    elif i.op in ("fusion", "call", "map"):
        for inner in hlo.called(program, i):
            for instruction in program.computations[inner].values():
                yield from operations(program, instruction, is_tpu)


def _is_library_call(i: Instruction) -> bool:
    """Returns whether a custom call is a product of cuBLAS, or a convolution of cuDNN."""
    called = re.search(r'custom_call_target="([^"]*)"', i.attributes)
    return called is not None and any(name in called[1] for name in ("cublas", "cudnn$conv"))


def _dot(i: Instruction, lhs: tuple[int, ...], rhs: tuple[int, ...], out: tuple[int, ...]) -> float:
    contracted = hlo.numbers(i, "lhs_contracting_dims")
    if i.op == "custom-call":
        noted = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', i.attributes)
        contracted = map(int, re.findall(r"\d+", noted[1])) if noted else ()
    return 2.0 * math.prod(out) * math.prod(lhs[axis] for axis in contracted)


def _convolution(i: Instruction, lhs: tuple[int, ...], rhs: tuple[int, ...], out: tuple[int, ...]) -> float:
    """Returns the operations of a convolution, without those on the zeros around and between its inputs."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", i.attributes)
    of_lhs, of_rhs, of_out = labels.groups()
    window = re.search(r"window=\{([^}]*)\}", i.attributes)
    fields = dict(field.split("=") for field in window[1].split()) if window else {}  # such as 3x3, and 1_1x1_1
    pairs = 1.0
    for axis, c in enumerate(sorted(c for c in of_rhs if c.isdigit())):
        names = (("size", 1), ("stride", 1), ("lhs_dilate", 1), ("rhs_dilate", 1), ("pad", 0))
        values = (fields[name].split("x")[axis].split("_")[0] if name in fields else default for name, default in names)
        size, stride, spread, dilated, low = map(int, values)
        inputs, outputs = lhs[of_lhs.index(c)], out[of_out.index(c)]
        if outputs * size > MOST_PAIRS:
            pairs *= outputs * size
            continue
        at = np.arange(outputs)[:, None] * stride + np.arange(size) * dilated - low
        pairs *= int(((at >= 0) & (at <= (inputs - 1) * spread) & (at % spread == 0)).sum())
    outer = out[of_out.index("b")] * out[of_out.index("f")] if {"b", "f"} <= set(of_out) else 1
    return 2.0 * pairs * outer * rhs[of_rhs.index("i")]


def _in_memory(arrays: Iterable[hlo.Array]) -> float:
    return sum(array.nbytes for array in arrays if array.in_memory)


def _bytes_moved(program: Program, i: Instruction) -> float:
    """Returns the bytes that an instruction reads from the chip's memory and writes there.

    An operand of which only slices are read has their bytes, and a result that replaces a slice of an operand the
    slice's.
    """
    if i.op in SLICES:
        return 2 * _in_memory(i.arrays)
    if i.op == "dynamic-update-slice" and len(i.operands) > 1:
        return 2 * _in_memory(i.operands[1].arrays)
    inner = program.computations.get(hlo.attribute(i, "calls") or "") if i.op == "fusion" else None
    if inner is None:
        return _in_memory(i.arrays) + sum(_in_memory(operand.arrays) for operand in i.operands)
    users: dict[str, list[Instruction]] = {}
    for instruction in inner.values():
        for operand in instruction.operands:
            users.setdefault(operand.name, []).append(instruction)
    parameters = {int(p.inside): p for p in inner.values() if p.op == "parameter"}
    results = [instruction for instruction in inner.values() if instruction.is_root]
    for result in results:
        results += result.operands if result.op in ("tuple", "bitcast", "reshape") else ()
    read, written = 0.0, _in_memory(i.arrays)
    for number, operand in enumerate(i.operands):
        whole, sliced, new = _in_memory(operand.arrays), 0.0, []
        for value, use in _uses(users, parameters[number]) if whole and number in parameters else ():
            if use.op in SLICES and use.operands[0] is value:
                sliced += sum(array.nbytes for array in use.arrays)
            elif use.op == "dynamic-update-slice" and use.operands[0] is value and use in results:
                new.append(sum(array.nbytes for array in use.operands[1].arrays))
            else:
                sliced = whole
        read += min(whole, sliced)
        written -= whole - sum(new) if new else 0.0  # in place
    return read + max(written, 0.0)


def _uses(users: dict[str, list[Instruction]], value: Instruction) -> Iterator[tuple[Instruction, Instruction]]:
    """Yields `(value, user)` of a value in a fusion, and of those that only change its shape."""
    for user in users.get(value.name, ()):
        if user.op in ("bitcast", "reshape"):
            yield from _uses(users, user)
        else:
            yield value, user


def _rows_moved(program: Program, i: Instruction) -> Iterator[tuple[str, float]]:
    """Yields `(opcode, rows)` of the gathers and scatters in an instruction."""
    for inner in program.computations.get(hlo.attribute(i, "calls") or "", {i.name: i}).values():
        if inner.op == "gather":
            yield inner.op, inner.arrays[0].size / max(math.prod(hlo.numbers(inner, "slice_sizes")), 1)
        elif inner.op == "scatter" and len(inner.operands) > 1:
            yield inner.op, math.prod(inner.operands[1].arrays[0].shape[:-1])
