"""Ragged clients as stacked arrays, and the host memory for them."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jfcl.core.checks import check, check_unmasked, held_type, require, shown
from jfcl.core.packed import unpacked
from jfcl.core.types import Clients, PyTree


def free_host_memory() -> float:
    """Returns the free bytes of this machine, or of this process's control group; infinite where neither is known."""
    free = [float("inf")]
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free.append(1024.0 * int(lines["MemAvailable"].split()[0]))
    except (OSError, KeyError):
        pass
    group = Path("/sys/fs/cgroup")
    for limit, used, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            stat = dict(line.split() for line in (group / limit).with_name("memory.stat").read_text().splitlines())
            taken = int((group / used).read_text()) - int(stat[cached])
            free.append(float(int((group / limit).read_text()) - taken))
        except (OSError, KeyError, ValueError):  # another version of control groups, or no limit ("max")
            continue
    return min(free)


def aligned_zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Returns `np.zeros` in memory aligned to 64 bytes, which JAX on a CPU uses without a copy.

    Raises:
      ValueError: more than the free memory. (An operating system may grant it, and end the program on its use.)
    """
    count = math.prod(shape) * np.dtype(dtype).itemsize
    if count > 2**27:  # smaller arrays are not checked
        free = free_host_memory()
        remedy = "use fewer clients or examples, cut the largest client, as all are padded to it, or use a store"
        needed = f"the clients' examples {shape} need {count / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free"
        require(count < free, f"{needed}; {remedy} (jfcl.data.ClientStore)")
    memory = np.zeros(count + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + count].view(dtype).reshape(shape)


def concatenate_clients(*parts: Clients) -> Clients:
    """Returns the clients of all parts in one, in their order, with padding to the largest `M` of the parts.

    Returns:
      `Clients` of NumPy arrays (on the host), with ids where all parts have them.

    Raises:
      ValueError: no parts; examples of different names or shapes; ids that occur twice.

    Example:
      >>> import numpy as np
      >>> few, more = (stack_clients([{"x": np.ones((m, 3))}]) for m in (2, 5))
      >>> together = concatenate_clients(few, more)
      >>> together.size.tolist(), together.examples["x"].shape
      ([2, 5], (2, 5, 3))
    """
    check(len(parts) > 0, "parts", parts, "at least one Clients")
    ids = None
    if all(part.id is not None for part in parts):
        ids = np.concatenate([np.asarray(part.id) for part in parts])
        check(len(set(ids.tolist())) == len(ids), "ids", ids.tolist()[:8], "different for all clients")

    ragged = []
    for part in parts:
        examples = jax.tree.map(np.asarray, unpacked(part.examples))
        for i, size in enumerate(np.asarray(part.size)):
            ragged.append(jax.tree.map(lambda x, i=i, size=size: x[i, :size], examples))
    length = max(np.shape(x)[1] for part in parts for x in jax.tree.leaves(part.examples))
    return stack_clients(ragged, pad_to=length)._replace(id=ids)


def stack_clients(clients: Iterable[PyTree], *, pad_to: int | None = None) -> Clients:
    """Stacks ragged clients into `Clients` of NumPy arrays, padding each with zeros to the examples of the largest.

    Args:
      clients: one pytree of `[m_i, ...]` arrays per client, all of the same structure.
      pad_to: the length `M` of the example axis; at least the largest client.

    Raises:
      ValueError: no clients; arrays of one client that differ in length; arrays of two clients that differ in their
        names or in the shape of an example; numbers in place of arrays; a client larger than `pad_to`.

    Example:
      >>> import numpy as np
      >>> stack_clients([{"x": np.ones((2, 3))}, {"x": np.ones((1, 3))}]).size.tolist()
      [2, 1]
    """
    if isinstance(clients, dict):
        raise ValueError(f"clients must be a list with a dict per client, got one dict with {list(clients)}")
    clients = list(clients)
    if not clients:
        raise ValueError("stack_clients needs at least one client, got none")
    sizes, structure = [], jax.tree.structure(clients[0])
    for i, client in enumerate(clients):
        if jax.tree.structure(client) != structure:
            here, first = (list(c) if isinstance(c, dict) else jax.tree.structure(c) for c in (client, clients[0]))
            raise ValueError(f"client {i}: its arrays are {here}, those of client 0 {first}")
        if any(hasattr(leaf, "columns") for leaf in jax.tree.leaves(client)):
            raise ValueError(f"client {i}: its arrays must be arrays, not frames; jfcl.data.from_arrays takes those")
        if any(np.ndim(leaf) == 0 for leaf in jax.tree.leaves(client)):
            what = f"give an array of all its examples for each name, got {shown(client)} with single numbers"
            raise ValueError(f"client {i}: {what}; jfcl.data.from_arrays converts lists of numbers")
        lengths = {len(leaf) for leaf in jax.tree.leaves(client)}
        if len(lengths) != 1:
            raise ValueError(f"client {i}: its arrays must have one length, got {sorted(lengths)}")
        sizes.append(lengths.pop())
    length = max(sizes) if pad_to is None else pad_to
    check(length >= max(sizes), "pad_to", pad_to, f"at least the largest client's {max(sizes)} examples")

    def stack(*leaves):
        for i, leaf in enumerate(leaves):
            check_unmasked(f"client {i}", leaf)
        leaves = [np.asarray(leaf) for leaf in leaves]
        shape = leaves[0].shape[1:]
        for i, leaf in enumerate(leaves):
            if leaf.shape[1:] != shape:
                raise ValueError(f"client {i}: its examples have shape {leaf.shape[1:]}, those of client 0 {shape}")
        kind = held_type(np.result_type(*leaves))  # a type for all of them
        check(kind.kind in "biufcV", "clients", f"arrays of {kind}", "of arrays of numbers")
        out = aligned_zeros((len(sizes), length, *shape), kind)
        for row, leaf in zip(out, leaves, strict=True):
            row[: len(leaf)] = leaf
        return out

    return Clients(jax.tree.map(stack, *clients), np.asarray(sizes, np.int32))
