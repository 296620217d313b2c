"""The client axis: sizes, ids, random keys and cohorts of stacked clients, and checks of them."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jfcl.core.checks import INT32_MAX, check, check_apart, check_held, check_unmasked, held_type, is_concrete, is_real
from jfcl.core.parameters import named_leaves
from jfcl.core.types import Algorithm, Clients, Served, Task, serve_clusters


def num_clients(clients: Clients) -> int:
    """Returns the length `N` of the client axis, padding clients included."""
    return clients.size.shape[0]


def max_examples(clients: Clients) -> int:
    """Returns the length `M` of the example axis, padding included."""
    return jax.tree.leaves(clients.examples)[0].shape[1]


def shape_struct(x: Any, shape: tuple[int, ...], sharding: Any = None) -> jax.ShapeDtypeStruct:
    """Returns `shape` with the type that the array `x`, also one of NumPy, has on a device."""
    dtype = jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def client_shapes(clients: Clients, count: int) -> Clients:
    """Returns the shapes of `count` such clients."""
    return jax.tree.map(lambda x: shape_struct(x, (count, *np.shape(x)[1:])), clients)


def client_ids(clients: Clients) -> jax.Array:
    """Returns `[N]` int32, the ids from which clients derive their randomness."""
    return jnp.arange(num_clients(clients), dtype=jnp.int32) if clients.id is None else jnp.asarray(clients.id)


def mask(clients: Clients) -> jax.Array:
    """Returns `[N, M]` bool, True at real examples."""
    return jnp.arange(max_examples(clients))[None, :] < jnp.asarray(clients.size)[:, None]


def drifts(clients: Clients) -> bool:
    """Returns whether the examples are of data that drift: they have their steps of time (see `jfcl.data.Drift`)."""
    return isinstance(clients.examples, dict) and "step" in clients.examples


def newest_step(clients: Clients) -> jax.Array:
    """Returns `[]` int32, the newest step of time among the real examples of drifting data."""
    if not drifts(clients):
        raise ValueError("the clients' data do not drift: their examples have no array 'step'")
    return jnp.where(mask(clients), jnp.asarray(clients.examples["step"], jnp.int32), jnp.int32(0)).max()


def client_keys(key: jax.Array, clients: Clients) -> jax.Array:
    """Returns `[N]` keys, one per client: functions of `key` and the client's id, not of its row, chunk or device."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, client_ids(clients))


def random_order(key: jax.Array, clients: Clients) -> jax.Array:
    """Returns `[N]` int32, the rows of `clients` in an order drawn by their ids, those without examples last."""
    draws = jax.vmap(jax.random.uniform)(client_keys(key, clients))
    return jnp.argsort(jnp.where(jnp.asarray(clients.size) > 0, draws, jnp.full_like(draws, 2))).astype(jnp.int32)


def attack_key(clients_key: jax.Array) -> jax.Array:
    """Returns the common key of the attackers in a round, derived from the clients' key by an id that no client has."""
    return jax.random.fold_in(clients_key, jnp.iinfo(jnp.int32).max)


def server_key(clients_key: jax.Array) -> jax.Array:
    """Returns the server's own key of a round, derived from the clients' key by an id that no client has."""
    return jax.random.fold_in(clients_key, jnp.iinfo(jnp.int32).max - 1)


def take_clients(clients: Clients, rows: jax.Array) -> Clients:
    """Returns the clients at `rows` (`[C]` int) as a cohort, with their ids."""
    return Clients(
        jax.tree.map(lambda x: jnp.asarray(x)[rows], clients.examples),
        jnp.asarray(clients.size)[rows],
        client_ids(clients)[rows],
    )


def check_stacked(clients: Any, name: str) -> None:
    """Raises `ValueError` unless `clients` are `Clients`, with arrays of sizes and ids."""
    accepted = "Clients, as from jfcl.stack_clients (of dicts of arrays) or jfcl.data.from_arrays (of (x, y) pairs)"
    check(isinstance(clients, Clients), name, type(clients), accepted)
    for part, values in {"size": clients.size, "id": clients.id}.items():
        fits = (part == "id" and values is None) or (hasattr(values, "dtype") and np.ndim(values) == 1)
        shown = f"{type(values).__name__} of shape {np.shape(values)}" if not fits else ""
        check(fits, f"{name}.{part}", shown, "an array [N] of integers, one for each client")


def check_clients(clients: Clients, *, name: str = "clients", allow_empty: bool = False) -> None:
    """Raises `ValueError` for errors in concrete `clients` that would make a simulation meaningless.

    These are: leaves that disagree on `[N, M]`, or that are no real numbers of a type that JAX knows; sizes outside
    `0..M`; no client with an example (or, unless `allow_empty`, any client without one); in real examples NaN,
    infinity, missing values, numbers outside the range of their type in JAX, and float64 numbers that become equal in
    float32; ids that are not `[N]` different integers from 0 to 2^31 - 3.
    """
    check_stacked(clients, name)
    leaves = jax.tree.leaves(clients.examples)
    check(len(leaves) > 0, f"{name}.examples", clients.examples, "a pytree with at least one array")
    for where, leaf in named_leaves(clients.examples).items():
        if not is_real(leaf):
            actual = f"{leaf.dtype}" if hasattr(leaf, "dtype") else type(leaf).__name__
            advice = "give real and imaginary parts as two features, or see jfcl.data.from_arrays"
            raise ValueError(f"{name}.examples{where} must be an array of real numbers ({advice}), got {actual}")
    shapes = [np.shape(leaf) for leaf in leaves]
    agree = all(len(s) >= 2 and s[:2] == shapes[0][:2] for s in shapes)
    check(agree, f"{name}.examples", shapes, "arrays that share their leading axes [N, M]")
    n, m = shapes[0][:2]
    for part, value in {"size": clients.size, "id": clients.id}.items():
        check(value is None or np.shape(value) == (n,), f"{name}.{part}", np.shape(value), f"of shape ({n},)")
    check(n > 0, f"{name}", n, "at least one client")
    if not all(is_concrete(leaf) for leaf in [clients.size, *leaves]):
        return
    if clients.id is not None and is_concrete(clients.id):  # the last two of int32 are the keys of attackers and server
        ids = np.asarray(clients.id)
        fits = ids.dtype.kind in "iu" and ids.min() >= 0 and ids.max() < INT32_MAX - 1 and len(np.unique(ids)) == n
        check(fits, f"{name}.id", ids, f"different integers in 0..{INT32_MAX - 2}")
    size = np.asarray(clients.size)
    check(np.issubdtype(size.dtype, np.signedinteger), f"{name}.size", size.dtype, "of a signed integer type")
    check(size.min() >= 0 and size.max() <= m, f"{name}.size", (size.min(), size.max()), f"between 0 and M={m}")
    check(size.max() > 0, f"{name}.size", 0, "positive for at least one client")
    if not allow_empty and size.min() == 0:
        rows = np.flatnonzero(size == 0)
        some = f"rows {rows[:5].tolist()}{'...' * (len(rows) > 5)}"
        raise ValueError(f"{name}: {len(rows)} client(s) without examples ({some}); drop them, or give them data")
    real = (np.arange(m)[None, :] < size[:, None]).reshape(-1)
    for where, leaf in named_leaves(clients.examples).items():
        here = f"{name}.examples{where}"
        check_unmasked(here, leaf)
        accepted = f"of {held_type(leaf.dtype)}, a type that JAX knows (array.astype)"
        check(leaf.dtype == held_type(leaf.dtype), here, leaf.dtype.str, accepted)
        rows = np.asarray(leaf).reshape(n * m, *leaf.shape[2:])
        check_held(here, rows, real, per_client=m)
        if leaf.dtype == np.float64 and jax.dtypes.canonicalize_dtype(np.float64) == np.float32 and leaf.ndim <= 3:
            check_apart(here, rows[real])


def check_no_bytes(name: str, x: Any, trained: Any, axes: int) -> None:
    """Raises `ValueError` for bytes, and images of integers, where the inputs in training are floats, such as / 255.

    `axes` is the number of axes before those of an example: 1 for a batch, 2 for clients.
    """
    dtype = x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype
    integers = jnp.issubdtype(dtype, jnp.integer) and (dtype == np.uint8 or np.ndim(x) > axes + 1)
    odd = integers and jnp.issubdtype(trained.dtype, jnp.floating)
    check(not odd, name, f"{dtype}", "floats, as in training, such as images / 255")


def check_at_most_clients(argument: str, value: int | None, count: int) -> None:
    """Raises `ValueError` for a number of clusters or clients above the number `count` of clients; None passes."""
    check(value is None or value <= count, argument, value, f"at most the {count} clients there are")


def check_labels(clients: Clients, num_classes: int, *, name: str = "clients") -> None:
    """Raises `ValueError` unless the labels `examples["y"]` of real examples are integers in `0..num_classes-1`."""
    examples = clients.examples if isinstance(clients.examples, dict) else {}
    accepted = "a dict with labels 'y', for a task with num_classes"
    check("y" in examples, f"{name}.examples", list(examples) or type(clients.examples).__name__, accepted)
    y = np.asarray(examples["y"])
    accepted = f"labels of an integer type, as y.{'astype(np.int32)' if y.ndim == 2 else 'argmax(-1) of one-hot rows'}"
    check(np.issubdtype(y.dtype, np.integer), f'{name}.examples["y"]', y.dtype, accepted)
    real = np.arange(y.shape[1]) < np.asarray(clients.size)[:, None]
    real = real.reshape(*y.shape[:2], *[1] * (y.ndim - 2))
    bad = ((y < 0) | (y >= num_classes)) & real
    if bad.any():
        row = int(np.flatnonzero(bad.reshape(len(y), -1).any(axis=1))[0])
        raise ValueError(f"{name}: labels must lie in 0..{num_classes - 1}, got {int(y[bad][0])} at client {row}")


def check_examples(clients: Clients, task: Task, *, name: str = "clients") -> None:
    """Raises `ValueError` unless examples have the arrays that `task.reads`, and inputs that the model accepts."""
    examples, names = clients.examples, " and ".join(map(repr, task.reads))
    if not task.reads:
        return
    if not isinstance(examples, dict):
        actual = f"{type(examples).__name__} of {len(jax.tree.leaves(examples))} array(s)"
        raise ValueError(f"{name}.examples must be a dict with {names}, got {actual}; jfcl.data.from_arrays makes one")
    missing = [key for key in task.reads if key not in examples]
    if missing:
        unread = [key for key in examples if key not in task.reads]
        rename = " and ".join(f"{old!r} to {new!r}" for old, new in zip(unread, missing, strict=False))
        hint = f"; rename {rename}" if len(unread) == len(missing) else ""
        raise ValueError(f"{name}.examples must be a dict with {names}, got {list(examples)}{hint}")
    wanted = task.input_shape if task.inputs is None else None
    if wanted is None:
        return
    shape = np.shape(examples["x"])[2:]
    if shape in (wanted, (math.prod(wanted),)):
        return
    try:
        params = jax.eval_shape(task.init, jax.random.key(0))
        jax.eval_shape(task.apply, params, shape_struct(examples["x"], (1, *shape)))
    except Exception:  # of any package that models are written in
        raise ValueError(f"{name}: inputs have shape {shape}, but the model is made for {wanted}") from None


def check_served(algorithm: Algorithm, state: Any, clients: Clients) -> None:
    """Raises `ValueError` unless what an algorithm serves in a state has the shapes of `Served` for these clients."""
    if algorithm.serve is serve_clusters:
        missing = [name for name in ("params", "cluster") if not hasattr(state, name)]
        if missing:
            fields = f"has {', '.join(state._fields)}" if hasattr(state, "_fields") else "is no named tuple"
            accepted = "a state without the fields params and cluster needs Algorithm(..., serve=)"
            raise ValueError(f"{accepted}, which says what clients are served; {type(state).__name__} {fields}")
    check_served_to("serve", algorithm.serve(state, None), num_clients(clients))


def check_served_to(name: str, served: Any, n: int) -> None:
    """Raises `ValueError` unless what the function `name` of an algorithm returns is a `Served` of `n` clients."""
    check(isinstance(served, Served), name, type(served).__name__, "a function that returns a Served")
    counts = {x.shape[:1] for x in jax.tree.leaves(served.models)}
    check(len(counts) == 1 and () not in counts, "the served models", sorted(counts), "arrays [K, ...] with one K")
    k = counts.pop()[0]
    to = "None" if served.to is None else f"{served.to.dtype} {list(served.to.shape)}"
    fits = k == n if served.to is None else to in (f"int32 [{n}]", f"float32 [{n}, {k}]")
    accepted = f"int32 [{n}], float32 [{n}, {k}], or None for {n} models, one for each client"
    check(fits, "the models that clients are served (cluster of the state, or Served.to)", to, accepted)
    rows = {"personal": served.personal, "found": served.found, "excluded": served.excluded, "shares": served.shares}
    for name, part in rows.items():
        lengths = {x.shape[:1] for x in jax.tree.leaves(part)}
        check(lengths <= {(n,)}, f"served {name}", sorted(lengths), f"rows of {n} clients")
        kind = f"{part.dtype} {list(part.shape)}" if name in ("found", "excluded") and part is not None else None
        check(kind in (None, f"int32 [{n}]"), f"served {name}", kind, f"int32 [{n}], or None")
    shares = None if served.shares is None else f"{served.shares.dtype} {list(served.shares.shape)}"
    fits = shares is None or (served.shares.ndim == 2 and served.shares.dtype == jnp.float32)
    check(fits, "served shares", shares, f"float32 [{n}, K], or None")
    active = None if served.active is None else served.active.shape
    check(active in (None, (k,)), "served active", active, f"of shape [{k}]")


class Cohort(NamedTuple):
    """The clients of one round.

    Attributes:
      clients: `Clients` of `C`, with their ids.
      rows: `[C]` int32, their rows among all `N` clients; None where the cohort is all clients, in order.
      key: the key of the round from which those of clients, adversary and server are derived.
    """

    clients: Clients
    rows: jax.Array | None
    key: jax.Array
