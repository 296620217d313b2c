"""The types everything is made of: `Clients`, `Task`, `Algorithm`, and what counts as bad input.

Shape letters used in every docstring of the library: `N` clients, `M` examples per client, `K` clusters (or models),
`D` flat parameters, `B` batch, `C` cohort, `T` rounds.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

INT32_MAX = 2**31 - 1  # what is counted is counted in int32 on the device
SHOWN = 400  # characters of a refused value in a message; of a longer one the beginning and the end

PyTree = Any
Batch = dict[str, jax.Array]  # {"x": [B, ...], "y": [B, ...]}


class Clients(NamedTuple):
    """All clients of a simulation, stacked: row `i` of every array is client `i`.

    Attributes:
      examples: pytree of `[N, M, ...]` arrays; by convention `{"x": inputs, "y": targets}`. A client's real
        examples come first; what stands behind them is padding and is never looked at.
      size: `[N]` int32, the number of real examples; 0 for a client that only pads the client axis.
      id: `[N]` int32, the client's name in its population, from which its randomness is derived. `None` (the
        default) means `0 .. N-1`.

    Example:
      >>> import numpy as np
      >>> clients = Clients({"x": np.zeros((3, 5, 2)), "y": np.zeros((3, 5))}, np.array([5, 2, 0], np.int32))
      >>> num_clients(clients), mask(clients).sum(axis=1).tolist()
      (3, [5, 2, 0])
    """

    examples: PyTree
    size: jax.Array
    id: jax.Array | None = None


class DenseStart(NamedTuple):
    """A model that begins with a dense layer on its raw inputs, told apart from what follows that layer.

    With it `jfcl.local` can train the layer in fewer operations (see `jfcl.span`), and IFCA compute that of `K` models
    as one. `jfcl.models` makes it for `Linear` and `MLP`; a user's own task may bring one:

      `task.loss(params, batch)` must be `loss(params, inputs(batch) @ kernel, batch)`, where `inputs` knows nothing of
      the parameters, and `loss` looks at all of them but the kernel.

    Attributes:
      kernel: the path of the layer's kernel, `[d, H]` or `[d]`, in the parameters, such as `"Dense_0/kernel"`.
      inputs: `(batch) -> [B, d]`, what the kernel multiplies.
      loss: `(params, products, batch) -> [B]`, with `products` `[B, H]` or `[B]` in the place of
        `inputs(batch) @ kernel`. A bias is no part of the products.
      whole: the task's `loss`; a task whose `loss` has been replaced by another has no dense start any more.

    Example:
      >>> import jax.numpy as jnp
      >>> def squares(params, products, batch):
      ...     return (products + params["b"] - batch["y"]) ** 2
      >>> def loss(params, batch):
      ...     return squares(params, batch["x"] @ params["w"], batch)
      >>> start = DenseStart("w", lambda batch: batch["x"], squares, whole=loss)
      >>> task = Task(lambda key: {"w": jnp.zeros(2), "b": jnp.zeros(())}, loss, None, dense_start=start)
      >>> dense_start(task) is start, dense_start(task._replace(loss=lambda params, batch: batch["y"]))
      (True, None)
    """

    kernel: str
    inputs: Callable[[Batch], jax.Array]
    loss: Callable[[PyTree, jax.Array, Batch], jax.Array]
    whole: Callable[[PyTree, Batch], jax.Array]


class Task(NamedTuple):
    """What a model is and how it is judged, for one client. Build one with `jfcl.models.classification` and the like.

    Attributes:
      init: `(key) -> params`, a pytree of arrays.
      loss: `(params, batch) -> [B]`, one loss per example, so that the library owns the mask and the mean.
      predict: `(params, inputs [B, ...]) -> outputs [B, ...]`.
      correct: `(params, batch) -> [B]` float, what "accuracy" is the mean of; `None` where there is none (regression).
      perplexity: the loss is one of a word, so that its exponential is a perplexity, and is reported (language models).
      represent: `(params, inputs [B, ...]) -> [B, H]`, what the model makes of inputs before its last layer; `None`
        where that is not known (kNN-Per then takes the outputs).
      dense_start: how the model begins, where that is a dense layer on the raw inputs; else `None`.
      num_classes: labels are integers in `0..num_classes-1`, which `jfcl.simulate` makes sure of; `None`: not known.
    """

    init: Callable[[jax.Array], PyTree]
    loss: Callable[[PyTree, Batch], jax.Array]
    predict: Callable[[PyTree, jax.Array], jax.Array]
    correct: Callable[[PyTree, Batch], jax.Array] | None = None
    perplexity: bool = False
    represent: Callable[[PyTree, jax.Array], jax.Array] | None = None
    dense_start: DenseStart | None = None
    num_classes: int | None = None


class Algorithm(NamedTuple):
    """A federated method as two pure functions, in the manner of optax and blackjax.

    Attributes:
      init: `(key, clients) -> state`.
      step: `(key, state, clients) -> (state, metrics)`, one communication round. `key` is that round's own key.
      task: the task whose parameters the state holds; the simulation evaluates with it.
      check: `(clients on the host) -> None`: a `ValueError` for clients that the method cannot do with, where shapes do
        not tell; the simulation asks before anything is compiled.
      refresh: `(state, clients) -> state`: what is kept of each client but follows from what all have in common, made
        anew; asked of a population's clients, most of whom took no part in the last round.
      by_loss: whether a client chooses among the models by its loss (IFCA). A simulation may then serve it the model of
        lowest loss now, in the place of the state's.

    `state` is a NamedTuple of arrays with at least `params`, a pytree of `[K, ...]` arrays, and `cluster`, `[N]` int32:
    client `i` is served the model `params[cluster[i]]`. `metrics` is a flat dict of arrays with at least `loss` `[N]`,
    the mean training loss of every client's model over its local training (NaN for clients that sat the round out),
    and `bytes_up`, `bytes_down` `[]`, the communication of the whole round, float32.
    """

    init: Callable[[jax.Array, Clients], Any]
    step: Callable[[jax.Array, Any, Clients], tuple[Any, dict[str, jax.Array]]]
    task: Task | None = None
    check: Callable[[Clients], None] | None = None
    refresh: Callable[[Any, Clients], Any] | None = None
    by_loss: bool = False


class Adversary(NamedTuple):
    """Hostile clients who act together when updates are sent; attacks are in `jfcl.attacks`.

    Attributes:
      attack: `(key, updates [N, ...], malicious [N] bool, usable [N] bool) -> updates`. With a fifth parameter called
        `cluster` it is also told, `[N]` int32, whose updates are averaged with whose.
      malicious: `[N]` bool, by client id: who they are.
    """

    attack: Callable[[jax.Array, PyTree, jax.Array, jax.Array], PyTree]
    malicious: Any


def dense_start(task: Task) -> DenseStart | None:
    """The task's `DenseStart`, unless its loss is not the one that it was made for."""
    start = task.dense_start
    return start if start is not None and start.whole is task.loss else None


def path_name(path: Iterable[Any]) -> str:
    """The name of a parameter, such as `"Dense_0/kernel"`, from its path in a pytree."""
    return "/".join(str(getattr(part, "key", getattr(part, "name", getattr(part, "idx", part)))) for part in path)


def get_parameter(params: PyTree, name: str) -> jax.Array:
    """The parameter called `name`, as `path_name` calls it; `ValueError` if there is none.

    Example:
      >>> get_parameter({"Dense_0": {"kernel": 3}}, "Dense_0/kernel")
      3
    """
    named = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    check(name in named, "parameter", name, f"one of {', '.join(named)}")
    return named[name]


def set_parameter(params: PyTree, name: str, value: Any) -> PyTree:
    """`params` with `value` in the place of the parameter called `name`.

    Example:
      >>> set_parameter({"Dense_0": {"bias": 1, "kernel": 2}}, "Dense_0/kernel", 5)
      {'Dense_0': {'bias': 1, 'kernel': 5}}
    """
    get_parameter(params, name)
    return jax.tree_util.tree_map_with_path(lambda path, p: value if path_name(path) == name else p, params)


def num_clients(clients: Clients) -> int:
    """The length `N` of the client axis, padding clients included."""
    return clients.size.shape[0]


def max_examples(clients: Clients) -> int:
    """The length `M` of the example axis, padding included."""
    return jax.tree.leaves(clients.examples)[0].shape[1]


def client_ids(clients: Clients) -> jax.Array:
    """`[N]` int32: the names that clients derive their randomness from."""
    return jnp.arange(num_clients(clients), dtype=jnp.int32) if clients.id is None else jnp.asarray(clients.id)


def mask(clients: Clients) -> jax.Array:
    """`[N, M]` bool: True at real examples."""
    return jnp.arange(max_examples(clients))[None, :] < jnp.asarray(clients.size)[:, None]


def client_keys(key: jax.Array, clients: Clients) -> jax.Array:
    """`[N]` keys, one per client, that depend on `key` and the client's id only: not on its row, chunk or device."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, client_ids(clients))


def random_order(key: jax.Array, clients: Clients) -> jax.Array:
    """`[N]` int32: the rows of `clients` in random order, those without examples behind. Each draws by its own id."""
    draws = jax.vmap(jax.random.uniform)(client_keys(key, clients))
    return jnp.argsort(jnp.where(jnp.asarray(clients.size) > 0, draws, jnp.full_like(draws, 2))).astype(jnp.int32)


def attack_key(clients_key: jax.Array) -> jax.Array:
    """The attackers' common key, of the one that the clients' are made from: of an id that no client has."""
    return jax.random.fold_in(clients_key, jnp.iinfo(jnp.int32).max)


def server_key(clients_key: jax.Array) -> jax.Array:
    """The server's own key of a round, of the one that the clients' are made from: of an id that no client has."""
    return jax.random.fold_in(clients_key, jnp.iinfo(jnp.int32).max - 1)


def take_clients(clients: Clients, rows: jax.Array) -> Clients:
    """The clients at `rows` (`[C]` int), as a cohort that keeps its ids."""
    return Clients(
        jax.tree.map(lambda x: jnp.asarray(x)[rows], clients.examples),
        jnp.asarray(clients.size)[rows],
        client_ids(clients)[rows],
    )


def free_host_memory() -> float:
    """Bytes that this machine, or the control group that it gives us, has left; infinite where nobody knows."""
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
        except (OSError, KeyError, ValueError):  # of another version, or no limit ("max")
            continue
    return min(free)


def aligned_zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """`np.zeros` whose memory starts at a multiple of 64 bytes, so that jax on a CPU takes it over without a copy.

    `ValueError` for more than there is: an operating system may give it, and end the program when it is used.
    """
    count = math.prod(shape) * np.dtype(dtype).itemsize
    if count > 2**27:  # of less, nobody runs out
        free = free_host_memory()
        check(
            count < free,
            "memory",
            f"{count / 1e9:.1f} GB for clients' examples {shape}",
            f"at most the {free / 1e9:.1f} GB that are free; use fewer clients or examples",
        )
    memory = np.zeros(count + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + count].view(dtype).reshape(shape)


def stack_clients(clients: Iterable[PyTree], *, pad_to: int | None = None) -> Clients:
    """Stacks ragged clients into `Clients`, padding each with zeros to the largest (or to `pad_to`) examples.

    Args:
      clients: one pytree of `[m_i, ...]` arrays per client, all of the same structure.
      pad_to: the length `M` of the example axis; at least the largest client.

    Returns:
      `Clients` of NumPy arrays (on the host).

    Raises:
      ValueError: no clients; arrays of one client that differ in length; a client larger than `pad_to`.

    Example:
      >>> import numpy as np
      >>> stack_clients([{"x": np.ones((2, 3))}, {"x": np.ones((1, 3))}]).size.tolist()
      [2, 1]
    """
    clients = list(clients)
    if not clients:
        raise ValueError("stack_clients needs at least one client, got none")
    sizes, structure = [], jax.tree.structure(clients[0])
    for i, client in enumerate(clients):
        if jax.tree.structure(client) != structure:
            raise ValueError(f"client {i}: its arrays are {jax.tree.structure(client)}, those of client 0 {structure}")
        lengths = {len(leaf) for leaf in jax.tree.leaves(client)}
        if len(lengths) != 1:
            raise ValueError(f"client {i}: its arrays must have one length, got {sorted(lengths)}")
        sizes.append(lengths.pop())
    longest = max(sizes)
    if pad_to is not None and pad_to < longest:
        raise ValueError(f"pad_to must be at least the largest client's {longest} examples, got {pad_to}")
    length = longest if pad_to is None else pad_to

    def stack(*leaves):
        leaves = [np.asarray(leaf) for leaf in leaves]
        shape = leaves[0].shape[1:]
        for i, leaf in enumerate(leaves):
            if leaf.shape[1:] != shape:
                raise ValueError(f"client {i}: its examples have shape {leaf.shape[1:]}, those of client 0 {shape}")
        out = aligned_zeros((len(leaves), length, *shape), np.result_type(*leaves))  # a type that holds them all
        for row, leaf in zip(out, leaves, strict=True):
            row[: len(leaf)] = leaf
        return out

    return Clients(jax.tree.map(stack, *clients), np.asarray(sizes, np.int32))


# ---------------------------------------------------------------------------------------------------------------
# Bad input. Everything below raises ValueError before anything is compiled, and lets tracers pass.


def is_concrete(value: Any) -> bool:
    """False for a tracer, whose value cannot be looked at: validation skips those."""
    return not isinstance(value, jax.core.Tracer)


def check(ok: Any, argument: str, value: Any, accepted: str) -> None:
    """Raises `ValueError("<argument> must be <accepted>, got <value>")` unless `ok`; skips tracers.

    Example:
      >>> check(3 > 0, "num_rounds", 3, "positive")
      >>> check(-1 > 0, "num_rounds", -1, "positive")
      Traceback (most recent call last):
      ValueError: num_rounds must be positive, got -1
    """
    if is_concrete(ok) and not bool(ok):
        raise ValueError(f"{argument} must be {accepted}, got {shown(value)}")


def shown(value: Any) -> str:
    """Returns `repr(value)`, of which a long one is cut in the middle: a message stays one that can be read.

    Example:
      >>> shown("ifca"), len(shown("x" * 10**6)) <= SHOWN
      ("'ifca'", True)
    """
    text = f"an integer of {value.bit_length()} bits" if type(value) is int and abs(value) >= 10**SHOWN else repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN // 2]}...{text[-SHOWN // 4 :]}"


def check_count(argument: str, value: Any, *, least: int = 1, most: int = INT32_MAX) -> None:
    """Checks that a value is an integer from `least` to `most`, by default the largest of int32.

    Raises:
      ValueError: it is not.

    Example:
      >>> check_count("num_rounds", 2**31)
      Traceback (most recent call last):
      ValueError: num_rounds must be an integer, at least 1 and at most 2147483647, got 2147483648
    """
    integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    above = f" and at most {most}" if integer and value > most else ""
    check(integer and least <= value <= most, argument, value, f"an integer, at least {least}{above}")


def check_finite(tree: PyTree, name: str) -> None:
    """Checks that the concrete arrays of `tree` hold neither NaN nor infinity; arrays of other processes pass.

    Raises:
      ValueError: one does; its path is named.

    Example:
      >>> check_finite({"a": np.ones(2), "b": np.array([1, np.nan])}, "init_params")
      Traceback (most recent call last):
      ValueError: init_params['b'] must be finite, got NaN or infinity
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if is_concrete(leaf) and getattr(leaf, "is_fully_addressable", True):
            fits = not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) or np.isfinite(np.asarray(leaf)).all()
            if not fits:
                raise ValueError(f"{name}{jax.tree_util.keystr(path)} must be finite, got NaN or infinity")


def check_choice(argument: str, value: Any, choices: Iterable[str]) -> None:
    """One of `choices`, or a `ValueError` that names the nearest one.

    Example:
      >>> check_choice("method", "ifac", ["fedavg", "ifca"])
      Traceback (most recent call last):
      ValueError: unknown method 'ifac': did you mean 'ifca'? Accepted: fedavg, ifca
    """
    choices = list(choices)
    if value not in choices:
        near = difflib.get_close_matches(str(value)[:SHOWN], choices, n=1, cutoff=0.5)
        hint = f": did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"unknown {argument} {shown(value)}{hint} Accepted: {', '.join(choices)}")


def check_clients(clients: Clients, *, name: str = "clients", allow_empty: bool = False) -> None:
    """Looks at concrete `clients` for everything that would make a simulation meaningless.

    Raises:
      ValueError: leaves that disagree on `[N, M]`; sizes outside `0..M`; no client with an example (or, unless
        `allow_empty`, any client without one); NaN or infinite values in real examples; ids not `[N]`.
    """
    made = isinstance(clients, Clients)
    check(made, name, type(clients).__name__, "Clients; jfcl.stack_clients makes them of a list of clients' arrays")
    leaves = jax.tree.leaves(clients.examples)
    check(len(leaves) > 0, f"{name}.examples", clients.examples, "a pytree with at least one array")
    shapes = [np.shape(leaf) for leaf in leaves]
    agree = all(len(s) >= 2 and s[:2] == shapes[0][:2] for s in shapes)
    check(agree, f"{name}.examples", shapes, "arrays that share their leading axes [N, M]")
    n, m = shapes[0][:2]
    check(np.shape(clients.size) == (n,), f"{name}.size", np.shape(clients.size), f"of shape ({n},)")
    check(n > 0, f"{name}", n, "at least one client")
    if clients.id is not None:
        check(np.shape(clients.id) == (n,), f"{name}.id", np.shape(clients.id), f"of shape ({n},)")
    if not all(is_concrete(leaf) for leaf in [clients.size, *leaves]):
        return
    size = np.asarray(clients.size)
    check(np.issubdtype(size.dtype, np.signedinteger), f"{name}.size", size.dtype, "of a signed integer type")
    check(size.min() >= 0 and size.max() <= m, f"{name}.size", (size.min(), size.max()), f"between 0 and M={m}")
    check(size.max() > 0, f"{name}.size", 0, "positive for at least one client")
    if not allow_empty and size.min() == 0:
        rows = np.flatnonzero(size == 0)
        raise ValueError(
            f"{name}: {len(rows)} client(s) without examples (rows {rows[:5].tolist()}{'...' * (len(rows) > 5)});"
            " drop them, or give them data"
        )
    real = np.arange(m)[None, :] < size[:, None]
    for path, leaf in jax.tree.leaves_with_path(clients.examples):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            # The sum of a row is finite exactly when no entry is NaN or infinite (overflow of real data aside), and
            # needs no boolean copy of the data.
            sums = np.asarray(leaf).reshape(n, m, -1).sum(axis=2, dtype=np.float64)
            bad = np.flatnonzero((~np.isfinite(sums) & real).any(axis=1))
            if len(bad):
                where = jax.tree_util.keystr(path)
                raise ValueError(f"{name}.examples{where} holds NaN or infinite values at client(s) {bad[:5].tolist()}")


def check_key(key: Any) -> None:
    """`ValueError` for a key that `jax.random.key` did not make."""
    made = isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    check(made, "key", key, "a key of jax.random.key(seed)")


def check_labels(clients: Clients, num_classes: int, *, name: str = "clients") -> None:
    """Labels `examples["y"]` of real examples must be integers in `0..num_classes-1`, or `ValueError`."""
    y = np.asarray(clients.examples["y"])
    check(np.issubdtype(y.dtype, np.integer), f'{name}.examples["y"]', y.dtype, "labels of an integer type")
    real = np.asarray(mask(clients)).reshape(*y.shape[:2], *[1] * (y.ndim - 2))
    bad = ((y < 0) | (y >= num_classes)) & real
    if bad.any():
        row = int(np.flatnonzero(bad.reshape(len(y), -1).any(axis=1))[0])
        raise ValueError(f"{name}: labels must lie in 0..{num_classes - 1}, got {int(y[bad][0])} at client {row}")


def check_state(state: Any, clients: Clients) -> None:
    """The contract every `Algorithm` keeps: `params` stacked `[K, ...]`, `cluster` `[N]` int32."""
    chex.assert_shape(state.cluster, (num_clients(clients),))
    chex.assert_type(state.cluster, jnp.int32)
    chex.assert_equal_shape_prefix(jax.tree.leaves(state.params), 1)
