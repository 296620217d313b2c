"""Plans: a method compiled for an accelerator that is absent, with its memory, communication and predicted time.

`plan` compiles `init` and `step` of a method with the real compiler of a target, for several mappings of the clients,
and runs nothing. It needs `libtpu` for TPUs and the CUDA plugin of JAX for GPUs (`docs/plan.md`).
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jfcl import mapping
from jfcl.core import Algorithm, Clients, PyTree, check, check_count, client_shapes, num_bytes, num_clients
from jfcl.core.platforms import compiles_alone
from jfcl.core.texts import first_line
from jfcl.mapping.jitted import jitted
from jfcl.mapping.memory import Memory, exhausted, memory_of, on_mesh, sharding_of
from jfcl.planning import targets
from jfcl.planning.cost import Cost, price
from jfcl.planning.targets import Target

Make = Callable[[mapping.Mapping], Algorithm]
Tick = Callable[[str, int], None]

CHUNKS = (1, 5, 10, 20, 64, 256)  # sizes near these are compared, beside vmap
AT_ONCE = 2  # compilations beside each other


class Candidate(NamedTuple):
    """A mapping that was compared.

    Attributes:
      mapping: `"vmap"` or `"chunked"`.
      chunk: clients at a time on each chip; None for all.
      needed_bytes: on each chip, with `other_bytes`.
      seconds: predicted, of a round; None for a program that the compiler refused.
    """

    mapping: str
    chunk: int | None
    needed_bytes: int
    seconds: float | None


class Plan(NamedTuple):
    """What a method needs on each chip of a target; see `plan`.

    Attributes:
      target: its name.
      mapping, chunk: those with the fastest rounds that fit: `"vmap"`, or `"chunked"` with `chunk` clients at a time.
        `"as made"`, None for an `Algorithm` that was made with its mapping.
      fits: whether `needed_bytes` are at most `limit_bytes`.
      argument_bytes, output_bytes, temp_bytes: of a round, as the compiler counts them.
      data_bytes: the part of `argument_bytes` that is clients' data, without the padding of layouts.
      other_bytes: what else is kept on the chip, such as the clients' test data.
      needed_bytes: data, models, state before and after a round, temporaries and `other_bytes`, or those of the start,
        if it needs more.
      limit_bytes: the memory of the chip.
      cost: of a round, predicted, with the longest branches; None where the compiler refused the program.
      common: the same with the shortest branches, so without what is rare, such as a split of CFL.
      init_seconds: predicted, of the start; None where the compiler refused it.
      candidates: the mappings that were compared, the fastest that fits first.
      step_hlo, init_hlo: the optimised programs.
    """

    target: str
    mapping: str
    chunk: int | None
    fits: bool
    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    data_bytes: int
    other_bytes: int
    needed_bytes: int
    limit_bytes: int
    cost: Cost | None
    common: Cost | None
    init_seconds: float | None
    candidates: list[Candidate]
    step_hlo: str
    init_hlo: str

    def __repr__(self) -> str:
        """Returns one line, without the programs."""
        size = f"{self.needed_bytes / 1e9:.3g} of {self.limit_bytes / 1e9:.3g} GB a chip"
        if self.cost is None:
            return f"<Plan for {self.target}: refused by the compiler, {size}>"
        axis = self.mapping if self.chunk is None else f"{self.mapping}({self.chunk})"
        speed = f"{1000 * self.cost.seconds:.3g} ms a round (predicted)"
        return f"<Plan for {self.target}: {'fits' if self.fits else 'does not fit'}, {size}; {axis}, {speed}>"

    def seconds(self, num_rounds: int) -> float:
        """Returns the predicted seconds of the start and `num_rounds` rounds; NaN where the compiler refused them."""
        if self.cost is None or self.init_seconds is None:
            return math.nan
        return self.init_seconds + num_rounds * self.cost.seconds

    def as_dict(self) -> dict[str, Any]:
        """Returns the content of `plan.json`: all but the programs."""
        content = {k: v for k, v in self._asdict().items() if k not in ("cost", "common", "step_hlo", "init_hlo")}
        content["common_seconds_per_round"] = None if self.common is None else self.common.seconds
        content["candidates"] = [c._asdict() for c in self.candidates]
        cost = dict.fromkeys(Cost._fields) if self.cost is None else self.cost._asdict()
        cost["loops"] = [loop._asdict() for loop in cost["loops"] or ()]
        return content | {"seconds_per_round": cost.pop("seconds")} | cost


class _Program(NamedTuple):
    """A program: the bytes that it needs, its text, memory and predicted cost, or the bytes alone if it is refused."""

    needed: int
    text: str = ""
    memory: Memory = Memory()
    cost: Cost | None = None

    @property
    def seconds(self) -> float | None:
        return self.cost and self.cost.seconds


def plan(
    algorithm: Algorithm | Make,
    clients: Clients,
    *,
    target: str,
    inner: Sequence[mapping.Mapping] | None = None,
    other_bytes: float = 0,
    seeds: int = 1,
    name: str = "this method",
    tick: Tick | None = None,
) -> Plan:
    """Compiles a method for an absent accelerator; returns what it needs and how long a round may take.

    Args:
      algorithm: a function `(client_axis) -> Algorithm`, of which several mappings are compared. An `Algorithm` is
        compiled as it was made: with `client_axis=jfcl.sharded(jfcl.targets.mesh(target), ...)`, or without a mesh
        for one chip.
      clients: training data, or their shapes: `Clients` of `jax.ShapeDtypeStruct`. Nothing is put on a device.
      target: `"v5e:2x4"`, `"h100"`, ...; see `jfcl.planning.targets`.
      inner: mappings of one chip's clients to compare: `jax.vmap`, `jfcl.chunked(size)`; default: `vmap` and chunks.
      other_bytes: what else each chip holds, such as test data.
      seeds: runs at once, as a leading axis of the state.
      name: of the method and its model, for messages.
      tick: is called as `tick(text, number of programs)` after the compilation of each.

    Returns:
      A `Plan`. Its cost is that of a compilation for every mapping: seconds to minutes.

    Raises:
      ValueError: an unknown target; a compiler that is missing or of another version; a method that the target cannot
        compile. A method that does not fit has a plan with `fits=False`.

    Example:
      >>> import jfcl
      >>> from jfcl.testing import problem
      >>> clients, _, task, training = problem()
      >>> found = plan(lambda axis: jfcl.fedavg(task, training, client_axis=axis), clients, target="v5e:2x2")
      ... # doctest: +SKIP
      >>> found.fits, found.mapping, f"{1000 * found.cost.seconds:.2f} ms"  # doctest: +SKIP
      (True, 'vmap', '0.12 ms')
    """
    chosen = targets.target(target)
    check_count("seeds", seeds)
    mesh = targets.mesh(chosen)
    if isinstance(algorithm, Algorithm):
        algorithms: dict[Any, Algorithm] = {None: algorithm}
    else:
        axes = candidates(num_clients(clients), mesh.size) if inner is None else inner
        check(len(axes) > 0, "inner", inner, "at least one mapping")
        algorithms = {axis: algorithm(mapping.sharded(mesh, axis)) for axis in axes}
    clients = mapping.held(mapping.sharded(mesh), next(iter(algorithms.values())).task, clients)
    work = _Work(chosen, mesh, clients, seeds, other_bytes, name, tick or (lambda text, total: None))
    with targets.not_cached():
        return work.plan(algorithms)


def candidates(clients: int, devices: int) -> list[mapping.Mapping]:
    """Returns the mappings of a chip's clients that a plan compares: `vmap`, and chunks of less than half of them.

    Sizes are the nearest ones that leave no rest, where there are such within a factor of two: by XLA's estimates a
    round is up to 6 % faster with these on a TPU.

    Example:
      >>> candidates(1200, 4)[1:]
      [chunked(size=1), chunked(size=5), chunked(size=10), chunked(size=20), chunked(size=60)]
    """
    per_device = -(-clients // devices)

    def nearest(size: int) -> int:
        even = (s for s in range(-(-size // 2), 2 * size + 1) if per_device % s == 0 and 2 * s < per_device)
        return min(even, key=lambda s: abs(math.log(s / size)), default=size)

    sizes = dict.fromkeys(map(nearest, CHUNKS))
    return [jax.vmap, *(mapping.chunked(size) for size in sizes if 2 * size < per_device)]


class _Work:
    """The compilations of one plan."""

    def __init__(self, chosen: Target, mesh: Mesh, clients: Clients, seeds: int, extra: float, what: str, tick: Tick):
        self.target, self.mesh, self.seeds, self.tick = chosen, mesh, seeds, tick
        self.other_bytes, self.refusal = int(extra), f"target {chosen.name!r} cannot compile {what}"
        self.rows = mapping.num_rows(mapping.sharded(mesh), num_clients(clients))
        like = Clients(clients.examples, clients.size, clients.size)  # ids are int32, as sizes are
        self.clients = on_mesh(client_shapes(like, self.rows), mesh, self.rows)
        self.axis = 0 if seeds == 1 else 1  # of the clients, in the state of all seeds
        key = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), seeds) if seeds > 1 else jax.random.key(0))
        self.key = on_mesh(key, mesh, self.rows, self.axis)

    def plan(self, algorithms: dict[Any, Algorithm]) -> Plan:
        """Returns the plan of the algorithm with the fastest rounds that fit, of those made for several mappings."""
        jobs = [
            (f"a round, {_described(axis)[2]}", algorithm.step, (self.key, self.state(algorithm), self.clients))
            for axis, algorithm in algorithms.items()
        ]
        rounds = dict(zip(algorithms, self.compiled(jobs, len(jobs) + 1), strict=True))
        compared = {
            axis: Candidate(*_described(axis)[:2], program.needed + self.other_bytes, program.seconds)
            for axis, program in rounds.items()
        }
        best = min(compared, key=lambda axis: self.order(compared[axis]))
        step, chosen = rounds[best], compared[best]
        [start] = self.compiled([("the start", algorithms[best].init, (self.key, self.clients))], len(jobs) + 1)
        needed, limit = max(step.needed, start.needed) + self.other_bytes, int(self.target.chip.memory)
        return Plan(
            target=self.target.name,
            mapping=chosen.mapping,
            chunk=chosen.chunk,
            fits=needed <= limit,
            argument_bytes=step.memory.arguments,
            output_bytes=step.memory.results - step.memory.aliased,
            temp_bytes=step.memory.temporaries,
            data_bytes=num_bytes(self.clients) // self.mesh.size,
            other_bytes=self.other_bytes,
            needed_bytes=needed,
            limit_bytes=limit,
            cost=step.cost,
            common=price(step.text, self.target, rare=False) if step.text else None,
            init_seconds=start.seconds,
            candidates=sorted(compared.values(), key=self.order),
            step_hlo=step.text,
            init_hlo=start.text,
        )

    def order(self, candidate: Candidate) -> tuple:
        """Returns a key that sorts candidates that fit by their seconds, and behind them the others by their size."""
        large = candidate.needed_bytes > self.target.chip.memory  # as of every program that is refused
        return large, candidate.needed_bytes if large else candidate.seconds

    def compiled(self, jobs: list[tuple[str, Callable, tuple]], steps: int) -> list[_Program]:
        """Returns the programs of functions, `(name, function, arguments)`."""
        at_once = 1 if compiles_alone(self.mesh.devices.flat[0]) else AT_ONCE
        with ThreadPoolExecutor(at_once) as pool:  # the compilers run outside of Python

            def finished(lowered, name):
                program = self.finished(lowered)
                self.tick(name, steps)
                return program

            # Traced here: a precision that is set for a block of code holds for one thread.
            futures = [pool.submit(finished, self.lowered(self.over_seeds(fn), *args), name) for name, fn, args in jobs]
            return [job.result() for job in futures]

    def over_seeds(self, fn: Callable) -> Callable:
        """Returns `init` or `step` mapped over the seeds, along all arguments but the clients."""
        if self.seeds == 1:
            return fn
        return lambda *args: jax.vmap(fn, in_axes=(0,) * (len(args) - 1) + (None,))(*args)

    def state(self, algorithm: Algorithm) -> PyTree:
        """Returns the shapes of the state: arrays of all clients are divided as the clients are."""
        state = jax.eval_shape(self.over_seeds(algorithm.init), self.key, self.clients)
        return on_mesh(state, self.mesh, self.rows, self.axis)

    def lowered(self, fn: Callable, *args: Any) -> jax.stages.Lowered:
        """Returns the program of `fn`, not yet compiled, with the state where a run keeps it."""

        def keep(x):
            return jax.lax.with_sharding_constraint(x, sharding_of(x, self.mesh, self.rows, self.axis))

        def placed(*args):
            out = fn(*args)
            state, *metrics = out if type(out) is tuple else (out,)
            state = jax.tree.map(keep, state)
            return (state, *metrics) if metrics else state

        try:
            return jitted(placed).lower(*args)
        except NotImplementedError as error:  # its message names the primitive
            raise ValueError(f"{self.refusal}: {first_line(error)}") from None

    def finished(self, lowered: jax.stages.Lowered) -> _Program:
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            needed = exhausted(error)
            if needed is None:
                raise ValueError(f"{self.refusal}: {first_line(error)}") from None
            return _Program(max(needed, int(self.target.chip.memory) + 1))
        text, memory = compiled.as_text(), memory_of(compiled)
        return _Program(memory.total, text, memory, price(text, self.target))


def _described(axis: mapping.Mapping | None) -> tuple[str, int | None, str]:
    """Returns a mapping's name and chunk size, and its name in words."""
    if isinstance(axis, mapping.chunked):
        return "chunked", axis.size, f"chunks of {axis.size}"
    return "as made" if axis is None else "vmap", None, "all clients at once"
