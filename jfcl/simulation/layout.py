"""The division of a state into arrays that all clients share, and rows of clients, which change with the cohort."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.interpreters.partial_eval import dce_jaxpr

from jfcl.core import Algorithm, Clients, check, check_examples, check_served, serve_clusters
from jfcl.core.parameters import is_key
from jfcl.simulation.evaluation import check_step

Start = Callable[[jax.Array, Clients], Any]
REMEMBER = 1000  # default number of clients outside the cohort that are compared by their last updates
Cohorts = Callable[[int], Clients]  # the shapes of so many clients


class Layout(NamedTuple):
    """How a state divides into two lists: shared arrays, and rows of clients. Programs depend on it: it is hashable.

    Attributes:
      structure: the state's.
      axes: by leaf, the client axis; None for shared arrays.
      personal: whether each client has a model of its own. `cluster` then counts the clients of the cohort, and is
        shared.
      last_updates: the index, among the rows, of the round of each client's last update; None if none is kept.
      metrics: the names of the metrics with a number for each client.
    """

    structure: Any
    axes: tuple[int | None, ...]
    personal: bool
    last_updates: int | None
    metrics: tuple[str, ...] = ()

    def apart(self, state: Any) -> tuple[list, list]:
        """Returns `(common, rows)`; the clients are the first axis of each array in `rows`."""
        leaves = list(zip(jax.tree.leaves(state), self.axes, strict=True))
        rows = [_moved(x, axis, 0) for x, axis in leaves if axis is not None]
        return [x for x, axis in leaves if axis is None], rows

    def together(self, common: Sequence, rows: Sequence) -> Any:
        """Returns the state: the inverse of `apart`."""
        common, rows = iter(common), iter(rows)
        leaves = [next(common) if axis is None else _moved(next(rows), 0, axis) for axis in self.axes]
        return jax.tree.unflatten(self.structure, leaves)


def _moved(x: Any, source: int, target: int) -> Any:
    """Returns an array with one axis moved."""
    return x if source == target else jnp.moveaxis(x, source, target)


def layout_of(algorithm: Algorithm, init: Start, cohorts: Cohorts, count: int) -> tuple[Layout, Any]:
    """Returns the layout of a state of `count` clients, and its shapes. An axis of clients grows with their number.

    Raises:
      ValueError: an array with several client axes, of a method that keeps something for each pair of clients; a method
        that serves what `Served` cannot be, or a choice of its clients' own models.
    """
    key = jax.eval_shape(lambda: jax.random.key(0))
    state, more = (jax.eval_shape(init, key, cohorts(c)) for c in (count, count + 1))
    jax.eval_shape(partial(check_served, algorithm), state, cohorts(count))
    served, of_more = (jax.eval_shape(lambda state: algorithm.serve(state, None), s) for s in (state, more))
    if served.active is not None:  # numbers of models that a population cannot have
        k, accepted = len(served.active), f"given for a cohort of {count}: the default depends on it"
        check(k == len(of_more.active), "max_clusters", None, accepted)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    names = [[getattr(part, "name", None) for part in path] for path, _ in leaves]
    axes = []
    for (path, leaf), larger in zip(leaves, jax.tree.leaves(more), strict=True):
        grown = [axis for axis, (a, b) in enumerate(zip(leaf.shape, larger.shape, strict=True)) if a != b]
        if len(grown) > 1 or any(leaf.shape[axis] != count for axis in grown):
            raise ValueError(
                "algorithm must be a method that allows other clients in every round; this one compares all of"
                f" them with each other: state{jax.tree_util.keystr(path)} has shape {leaf.shape} for {count} clients."
                " Give it all clients on the device, as Clients"
            )
        if grown and is_key(leaf):
            what = f"state{jax.tree_util.keystr(path)} has random keys of clients, which a population does not keep"
            raise ValueError(f"{what}: make them in step, by jfcl.core.client_keys(key, clients)")
        axes.append(grown[0] if grown else None)
    # Each client has a model of its own: row `i`, also where the default of `serve` finds it by `cluster`.
    grown = jax.tree.leaves(served.models)[0].shape[0] != jax.tree.leaves(of_more.models)[0].shape[0]
    personal = served.to is None or grown
    fits = served.to is None or not grown or algorithm.serve is serve_clusters
    check(fits, "algorithm", "one that serves a choice of its clients' own models", "one with Served.to None")
    axes = [None if personal and name[0] == "cluster" else axis for axis, name in zip(axes, names, strict=True)]
    structure, last_updates = jax.tree.structure(state), None
    if algorithm.last_updates is not None:
        leaf = algorithm.last_updates(jax.tree.unflatten(structure, range(len(axes))))
        last_updates = sum(axis is not None for axis in axes[:leaf])
    return Layout(structure, tuple(axes), personal, last_updates), state


def serves_rows(algorithm: Algorithm, layout: Layout, state: Any, clients: Clients | None) -> bool:
    """Returns whether what clients are served depends on rows of the state; all arguments are shapes."""

    def serve(rows, common, clients):
        return algorithm.serve(layout.together(common, rows), clients)

    common, rows = jax.eval_shape(layout.apart, state)
    return uses(serve, rows, common, clients)


def uses(function: Callable, *arguments: Any) -> bool:
    """Returns whether a result of `function` is computed from its first argument; `arguments` are shapes."""
    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    _, are_used = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))  # by the elimination of dead code
    return any(are_used[: len(jax.tree.leaves(arguments[0]))])


def metrics_of_clients(algorithm: Algorithm, cohorts: Cohorts, count: int, state: Any) -> tuple[str, ...]:
    """Returns the names of the metrics with a number for each of `count` clients, whose `state` is given."""

    def lengths(count, state=None):
        clients, key = cohorts(count), jax.eval_shape(lambda: jax.random.key(0))
        state = jax.eval_shape(algorithm.init, key, clients) if state is None else state
        returned = jax.eval_shape(algorithm.step, key, state, clients)
        values = check_step(returned, state, clients, algorithm.entries)[1]
        return {name: v.shape[0] for name, v in values.items() if v.ndim}

    found = {name for name, length in lengths(count, state).items() if length == count}
    if found != {"loss"}:  # others may have this length by chance, such as those of as many models
        found = {name for name, length in lengths(count + 1).items() if length == count + 1 and name in found}
    return tuple(sorted(found))


def check_cohorts(
    algorithm: Algorithm, n: int, cohort: int, join: Start | None, remember: int | None, cohorts: Cohorts
) -> tuple[int, Layout, Any]:
    """Checks that an algorithm suits cohorts of `n` clients; `join` and `remember` as in `jfcl.Population`.

    Returns the number of remembered clients, the layout of the algorithm's state, and its shapes.
    """
    most = n - cohort
    fits = remember is None or remember <= most
    check(fits, "remember", remember, f"at most the {most} clients beside the cohort")
    if algorithm.task is not None:
        check_examples(cohorts(cohort), algorithm.task, name="clients")
    has_updates = algorithm.last_updates is not None
    accepted = "left out for a method that keeps no updates; where a method has an option cohort, give it as well"
    check(has_updates or not remember, "remember", remember, accepted)
    remember = min(REMEMBER, most) if has_updates and remember is None else remember or 0
    clients, key = cohorts(cohort + remember), jax.eval_shape(lambda: jax.random.key(0))
    try:
        layout, state = layout_of(algorithm, algorithm.init, cohorts, cohort + remember)
        metrics = metrics_of_clients(algorithm, cohorts, cohort + remember, state)
    except ValueError:
        raise
    except Exception as error:  # flax and jax have many kinds of errors for shapes that do not fit
        examples = ", ".join(f"{name} {x.dtype} {x.shape[2:]}" for name, x in clients.examples.items())
        raise ValueError(f"algorithm must be of a model for the store's examples, {examples}: {error}") from error
    if join is None:
        if uses(lambda clients, key: layout.apart(algorithm.init(key, clients))[0], clients, key):
            raise ValueError(
                "join must be given for this algorithm: its init learns models from the clients of the first cohort, so"
                " that it would give clients of later ones places among other models. Where options cause this, such as"
                " restarts or warm rounds, pass the init of the same method without; methods that cluster all clients"
                " before the first round need them all on the device, as Clients"
            )
    else:
        joined = jax.eval_shape(join, key, clients)
        shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), s) for s in (state, joined)]
        fits = shapes[0] == shapes[1] and layout_of(algorithm, join, cohorts, cohort + remember)[0] == layout
        check(fits, "join", join, "an init with states of the same shapes")
    return remember, layout._replace(metrics=metrics), state
