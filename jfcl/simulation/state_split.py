"""The division of a state into arrays that all clients share, and rows of clients, which change with the cohort."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jfcl.core import Clients, check
from jfcl.data.store import ClientStore, example_shapes

Start = Callable[[jax.Array, Clients], Any]


class Split(NamedTuple):
    """A state as two lists: shared arrays, and rows of clients. Hashable, so that programs can depend on it.

    Attributes:
      structure: the state's.
      axes: by leaf, the client axis; None for shared arrays.
      personal: whether each client has a model of its own. `cluster` then counts the clients of the cohort, and is
        shared.
      heard: the index, among the rows, of the round of each client's last update; None where a method keeps no updates.
    """

    structure: Any
    axes: tuple[int | None, ...]
    personal: bool
    heard: int | None

    def apart(self, state: Any) -> tuple[list, list]:
        """Returns `(common, rows)`; the clients are the first axis of each array in `rows`."""
        leaves = list(zip(jax.tree.leaves(state), self.axes, strict=True))
        common = [x for x, axis in leaves if axis is None]
        return common, [_moved(x, axis, 0) for x, axis in leaves if axis is not None]

    def together(self, common: Sequence, rows: Sequence) -> Any:
        """Returns the state: the inverse of `apart`."""
        common, rows = iter(common), iter(rows)
        leaves = [next(common) if axis is None else _moved(next(rows), 0, axis) for axis in self.axes]
        return jax.tree.unflatten(self.structure, leaves)


def _moved(x: Any, source: int, target: int) -> Any:
    """Returns an array, or its shape, with one axis moved; a placeholder without axes as it is."""
    if source == target or not hasattr(x, "shape"):
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.eval_shape(partial(jnp.moveaxis, source=source, destination=target), x)
    return jnp.moveaxis(x, source, target)


def split_state(init: Start, store: ClientStore, count: int) -> tuple[Split, Any]:
    """Returns the division of a state of `count` clients, and its shapes.

    The client axes are those that grow with one client more.

    Raises:
      ValueError: an array with several client axes, of a method that keeps something for each pair of clients.
    """
    key = jax.eval_shape(lambda: jax.random.key(0))
    state, more = (jax.eval_shape(init, key, example_shapes(store, c)) for c in (count, count + 1))
    if hasattr(state, "active"):  # options of CFL that a population cannot have
        k, accepted = len(state.active), f"given for a cohort of {count}: the default depends on it"
        check(k == len(more.active), "max_clusters", None, accepted)
        check(
            k != count, "cohort", count, f"another number than max_clusters, {k}, so that records can tell them apart"
        )
    leaves = jax.tree_util.tree_leaves_with_path(state)
    names = [[getattr(part, "name", None) for part in path] for path, _ in leaves]
    axes = []
    for (path, one), other in zip(leaves, jax.tree.leaves(more), strict=True):
        grown = [axis for axis, (a, b) in enumerate(zip(one.shape, other.shape, strict=True)) if a != b]
        if len(grown) > 1 or any(one.shape[axis] != count for axis in grown):
            raise ValueError(
                "algorithm must be a method that allows other clients in every round; this one compares all of"
                f" them with each other: state{jax.tree_util.keystr(path)} has shape {one.shape} for {count} clients."
                " Use simulate for it, with all clients on the device"
            )
        axes.append(grown[0] if grown else None)
    personal = any(axis is not None and name[0] == "params" for axis, name in zip(axes, names, strict=True))
    axes = [None if personal and name[0] == "cluster" else axis for axis, name in zip(axes, names, strict=True)]
    rows = [name for axis, name in zip(axes, names, strict=True) if axis is not None]
    heard = rows.index(["heard", "round"]) if ["heard", "round"] in rows else None
    return Split(jax.tree.structure(state), tuple(axes), personal, heard), state


def depends_on_clients(init: Start, store: ClientStore, cohort: int) -> list[bool]:
    """Returns, by leaf of the state, whether `init` computes it from the clients rather than from its key alone."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    clients = example_shapes(store, cohort)
    traced = jax.make_jaxpr(init)(key, clients)
    return _reached(traced.jaxpr, [False, *[True for _ in jax.tree.leaves(clients)]])


def _reached(jaxpr: Any, sources: list[bool]) -> list[bool]:
    """Returns, by output of a jaxpr, whether any input in `sources` flows into it. A loop counts as one operation."""
    reached = {id(v) for v, is_source in zip(jaxpr.invars, sources, strict=True) if is_source}
    for equation in jaxpr.eqns:
        inputs = [id(v) in reached for v in equation.invars]
        inner = getattr(equation.params.get("jaxpr"), "jaxpr", None)
        if inner is not None and len(inner.invars) == len(inputs) and equation.primitive.name in ("jit", "pjit"):
            outputs = _reached(inner, inputs)
        else:
            outputs = [any(inputs)] * len(equation.outvars)
        reached |= {id(v) for v, hit in zip(equation.outvars, outputs, strict=True) if hit}
    return [id(v) in reached for v in jaxpr.outvars]
