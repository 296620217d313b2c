"""`jax.jit` that does not write large arrays into the program."""

import gc
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jfcl.mapping import hosts

LARGE = 2**16  # bytes of an array from outside that becomes an argument
# Of programs that run once: LLVM unrolls random bits of some shapes, such as [200, 10], for seconds at its level 3.
RUNS_ONCE = {"xla_backend_optimization_level": 1}
MAPS, MOST_MAPS = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")  # of Linux


_EVERY: weakref.WeakSet["jitted"] = weakref.WeakSet()


def strong(tree: Any) -> Any:
    """Returns `tree` with strong types: a weak type, of a Python scalar, would make the next round another program."""
    return jax.tree.map(lambda x: jax.lax.convert_element_type(x, x.dtype), tree)


@partial(jax.jit, static_argnames=("jaxpr", "is_large", "is_donated", "structure"), donate_argnames="donated")
def _run(large, donated, retained, small, *, jaxpr, is_large, is_donated, structure):
    def together(flags, yes, no):
        yes, no = iter(yes), iter(no)
        return [next(yes if flag else no) for flag in flags]

    results = jax.core.eval_jaxpr(jaxpr, together(is_large, large, small), *together(is_donated, donated, retained))
    return jax.tree.unflatten(structure, results)


class jitted:
    """As `jax.jit`, but with large arrays that the function closes over as arguments of the program.

    `jax.jit` writes such an array, for example a frozen backbone, into every program as a constant: a copy in memory,
    of which compilation handles each number several times, and which the compiler's count of memory leaves out. Here
    all programs take the same array. (Arrays that a `jax.jit` inside the function closes over stay constants; functions
    of this class that are called inside are inlined.) Arguments of `static_argnames` are passed by name. `options` are
    further ones of `jax.jit`; `compiler_options` hold for programs without such arrays.

    Example:
      >>> import jax.numpy as jnp, numpy as np
      >>> weights = jnp.asarray(np.random.default_rng(0).normal(size=(200, 200)), jnp.float32)
      >>> product = jitted(lambda x: x @ weights)
      >>> compiled = product.lower(jnp.ones(200)).compile()
      >>> compiled.memory_analysis().argument_size_in_bytes == 4 * (200 * 200 + 200)
      True
    """

    def __init__(self, fn: Callable[..., Any], *, static_argnames: Sequence[str] = (), **options: Any):
        self._fn, self._static = fn, frozenset(static_argnames)
        self._jit = jax.jit(fn, static_argnames=tuple(static_argnames), **options)
        self._placed = {}  # large arrays, and these on all devices of a mesh
        _EVERY.add(self)

    def __call__(self, *args: Any, **options: Any) -> Any:
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((args, self._arrays(options)))):
            return self._fn(*args, **options)
        explicit = self._with_arguments(args, options, self._on_devices)
        return self._jit(*args, **options) if explicit is None else _run(*explicit[0], **explicit[1])

    def shapes(self, *args: Any, **options: Any) -> Any:
        """Returns the shapes of the results, as `jax.eval_shape` does; a call does not trace the function again."""
        return self._jit.eval_shape(*args, **options)

    def lower(self, *args: Any, **options: Any) -> jax.stages.Lowered:
        """Returns the program of these arguments, or of their shapes; a call finds it when it is compiled."""
        explicit = self._with_arguments(args, options, _shape)
        return self._jit.lower(*args, **options) if explicit is None else _run.lower(*explicit[0], **explicit[1])

    def clear_cache(self) -> None:
        """Drops the compiled programs of the function, and those of all functions of this class with large arrays."""
        self._placed.clear()
        self._jit.clear_cache()
        _run.clear_cache()

    def _arrays(self, options: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in options.items() if name not in self._static}

    def _with_arguments(self, args: tuple, options: dict[str, Any], place: Callable) -> tuple[tuple, dict] | None:
        """Returns the arguments and options of `_run`, with large arrays after `place`; None where there are none."""
        traced = self._jit.trace(*args, **options)  # the same jaxpr for the same arguments
        jaxpr, arrays = traced.jaxpr.jaxpr, traced.jaxpr.consts
        is_large = tuple(getattr(x, "nbytes", 0) >= LARGE for x in arrays)
        if not any(is_large):
            return None
        leaves = jax.tree.leaves((args, self._arrays(options)))
        is_donated = tuple(info.donated for info in jax.tree.leaves(traced.args_info))
        (large, small), (donated, retained) = _divided(is_large, arrays), _divided(is_donated, leaves)
        static = {"jaxpr": jaxpr, "is_large": is_large, "is_donated": is_donated, "structure": traced.out_tree}
        shardings = (getattr(x, "sharding", None) for x in leaves)
        meshes = (s.mesh for s in shardings if isinstance(s, NamedSharding) and s.mesh.size > 1)
        everywhere = next((NamedSharding(mesh, PartitionSpec()) for mesh in meshes), None)
        return ([place(x, everywhere) for x in large], donated, retained, small), static

    def _on_devices(self, x: Any, everywhere: NamedSharding | None) -> jax.Array:
        """Returns an array on every device, or one of NumPy on the default device; it is copied there once."""
        if everywhere is None and isinstance(x, jax.Array):
            return x
        if (id(x), everywhere) not in self._placed:
            values = x if isinstance(x, jax.Array) else np.asarray(x)
            if everywhere is not None and hosts.several():
                copy = hosts.replicate(values, everywhere.mesh)
            else:
                copy = jax.device_put(values, everywhere)
            self._placed[id(x), everywhere] = x, copy  # with `x`, so that no other array has its id
        return self._placed[id(x), everywhere][1]


def _divided(flags: tuple[bool, ...], values: Sequence[Any]) -> tuple[list, list]:
    """Returns the values with a true flag, and the others."""
    return tuple([x for x, flag in zip(values, flags, strict=True) if flag == wanted] for wanted in (True, False))


def _shape(x: jax.Array, everywhere: NamedSharding | None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere)


def clear_programs() -> None:
    """Drops the compiled programs of `simulate`, `sweep`, `evaluate`, and of the library's other functions.

    JAX keeps the programs of every `Algorithm` and `Task` that one of these functions has run, some ten megabytes each,
    even after the last reference to the object is gone. A process that makes many of them (a search over
    hyperparameters; but see `hyperparams` of `simulate`) calls this function from time to time, while no simulation
    runs in another thread. A later call with an earlier object compiles again. On Linux, `simulate` and `sweep` call it
    before a process has too many programs. `jax.clear_caches()` drops the programs of other code too.

    Example:
      >>> import jax, jfcl, numpy as np, optax
      >>> from jfcl.testing import problem
      >>> clients, _, task, training = problem()
      >>> for count in (1, 2):
      ...     algorithm = jfcl.ifca(task, training, num_clusters=count)
      ...     history = jfcl.simulate(algorithm, clients, key=jax.random.key(0), num_rounds=1)
      ...     jfcl.clear_programs()
    """
    for program in list(_EVERY):
        program.clear_cache()
    gc.collect()  # programs and the objects kept with them refer to each other


def has_many_programs() -> bool:
    """Returns whether this process has half of the memory maps that Linux allows it.

    Each program of a CPU has some hundreds of them. With one too many LLVM fails, and the process ends without a word.
    """
    try:
        return MAPS.read_bytes().count(b"\n") > int(MOST_MAPS.read_text()) / 2
    except (OSError, ValueError):  # another system
        return False


def make_room_for_programs() -> None:
    """Calls `clear_programs` if there are many; not in one of several processes, which compile together."""
    if not hosts.several() and has_many_programs():
        clear_programs()
