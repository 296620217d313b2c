"""`check_algorithm`: the conformance test of every method of the library, also for users' own methods."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jfcl.core import Algorithm, Clients, PyTree, Served, Task, check_served, client_ids, num_clients, require
from jfcl.core.parameters import key_data, with_keys
from jfcl.mapping.axis import auto, chunked, client_mesh, sharded
from jfcl.mapping.jitted import strong
from jfcl.mapping.placement import place
from jfcl.models import classification
from jfcl.models import task as make_task
from jfcl.simulation import rollout
from jfcl.simulation.evaluation import check_clusters, found_clusters
from jfcl.simulation.resident import with_padding, without_padding
from jfcl.training.local import LocalTraining, local_training


class _Network(nn.Module):
    """A model that trains otherwise than it is evaluated: dropout, batch statistics."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.5)(nn.Dense(5)(x)))
        return nn.Dense(2)(nn.Dropout(0.2, deterministic=not train)(x))


class Problem(NamedTuple):
    """A small regression problem with two clusters, which a correct method solves in a few rounds.

    Attributes:
      clients: 7 clients of 3 to 6 examples, 4 inputs.
      cluster: `[7]`, the linear model (of two) that generates a client's targets.
      task: linear regression, started near zero.
      training: 3 full-batch steps of gradient descent.
    """

    clients: Clients
    cluster: np.ndarray
    task: Task
    training: LocalTraining


def problem(kind: str = "regression") -> Problem:
    """Returns the problem of `check_algorithm`.

    Args:
      kind: `"regression"`; `"classification"`: the labels are the targets' signs; `"network"`: the same for a network
        with dropout and batch normalisation.

    Example:
      >>> problem().cluster.tolist()
      [0, 1, 0, 1, 0, 1, 1]
    """
    rng = np.random.default_rng(0)
    cluster = np.array([0, 1, 0, 1, 0, 1, 1], np.int32)
    truth = np.array([[2, 2, -2, 1], [-2, -2, 2, -1]], np.float32)
    x = rng.normal(size=(7, 6, 4)).astype(np.float32)
    size = np.array([6, 5, 6, 3, 4, 6, 6], np.int32)
    y = np.einsum("nmd,nd->nm", x, truth[cluster]).astype(np.float32)
    real = np.arange(6) < size[:, None]
    clients = Clients({"x": x * real[:, :, None], "y": y * real}, size)

    def apply(params, x):
        return x @ params["w"] + params["b"]

    task = Task(
        init=lambda key: {"w": 0.3 * jax.random.normal(key, (4,)), "b": jnp.zeros(())},
        apply=apply,
        cost=lambda outputs, batch: 0.5 * (outputs - batch["y"]) ** 2,
    )
    if kind != "regression":
        labels = (clients.examples["y"] > 0).astype(np.int32)
        clients = clients._replace(examples={**clients.examples, "y": labels})

        def logits(params, x):
            return jnp.stack([-apply(params, x), apply(params, x)], axis=1)

        task = make_task(task.init, logits, kind="classification")
        if kind == "network":
            task = classification(_Network(), (4,), 2)
    return Problem(clients, cluster, task, local_training(optax.sgd(0.1), num_steps=3))


class count_compilations:
    """A context manager that counts the programs XLA compiles inside it, in its attribute `count`.

    Those that are read from JAX's cache do not count.

    Example:
      >>> import jax
      >>> f = jax.jit(lambda x: x + 1)
      >>> _ = f(jax.numpy.ones(3))
      >>> with count_compilations() as compiled:
      ...     _ = f(jax.numpy.ones(3))
      >>> compiled.count
      0
    """

    def __enter__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        jax.monitoring.register_event_listener(self._listen)
        return self

    def _listen(self, event: str, *_, **__):
        self.count += event == "/jax/core/compile/backend_compile_duration"
        self.count -= event == "/jax/compilation_cache/cache_hits"

    def __exit__(self, *_):
        jax.monitoring.unregister_event_duration_listener(self._listen)
        jax.monitoring.unregister_event_listener(self._listen)


def _assert_equal(a: Any, b: Any, what: str, *, tolerance: float = 0.0) -> None:
    """Asserts that two pytrees have the same structure and, up to `tolerance`, the same values."""
    assert jax.tree.structure(a) == jax.tree.structure(b), f"{what}: the structure differs"
    a, b = (jax.tree.map(key_data, tree) for tree in (a, b))
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        where = f"{what}: {jax.tree_util.keystr(path)}"
        if tolerance:
            np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance, err_msg=where)
        else:
            np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=where)


def _pad_examples(clients: Clients, extra: int, fill: float) -> Clients:
    """Returns `clients` with `extra` rows of `fill` after every client's examples."""

    def pad(x):
        x = np.asarray(x)
        value = fill if np.issubdtype(x.dtype, np.floating) else 0
        return np.pad(x, [(0, 0), (0, extra)] + [(0, 0)] * (x.ndim - 2), constant_values=value)

    return clients._replace(examples=jax.tree.map(pad, clients.examples))


def _pad_clients(clients: Clients, extra: int) -> Clients:
    """Returns `clients` followed by `extra` clients without examples."""
    rows, ids = [(0, extra)], np.asarray(client_ids(clients))
    examples = jax.tree.map(lambda x: np.pad(x, rows + [(0, 0)] * (np.ndim(x) - 1)), clients.examples)
    ids = np.concatenate([ids, ids.max() + 1 + np.arange(extra, dtype=ids.dtype)])
    return Clients(examples, np.pad(clients.size, rows), ids)


class _Trial(NamedTuple):
    """A method on a problem: `compiled` has `init` and `step` compiled, `whole` is its state after four rounds."""

    algorithm: Algorithm
    compiled: Algorithm
    clients: Clients
    key: jax.Array
    whole: Any


def _rounds(algorithm: Algorithm, key: jax.Array, state: Any, clients: Clients, first: int, last: int) -> Any:
    """Runs the rounds `first` to `last`, with the keys of a simulation."""
    for t in range(first, last + 1):
        state, _ = algorithm.step(jax.random.fold_in(key, t), state, clients)
    return state


def _run(algorithm: Algorithm, key: jax.Array, clients: Clients, num_rounds: int = 4) -> Any:
    """Returns the state after rounds from `init`."""
    return _rounds(algorithm, key, algorithm.init(jax.random.fold_in(key, 0), clients), clients, 1, num_rounds)


def _compiled(algorithm: Algorithm) -> Algorithm:
    init = jax.jit(lambda key, clients: strong(algorithm.init(key, clients)))  # as in a simulation
    return algorithm._replace(init=init, step=jax.jit(algorithm.step))


def _check_signature(algorithm: Any) -> None:
    name = type(algorithm).__name__
    assert isinstance(algorithm, Algorithm), f"the factory must return an Algorithm, got {name}"
    for fn, wanted in ((algorithm.init, 2), (algorithm.step, 3)):
        count = len(inspect.signature(fn).parameters)
        assert count == wanted, f"init takes (key, clients) and step (key, state, clients); one takes {count} arguments"


def _check_first_round(algorithm: Algorithm, compiled: Algorithm, key: jax.Array, clients: Clients) -> None:
    """Checks the states before and after a round, its metrics, and a second call: without compilation, the same bits.

    Eager and compiled results are equal up to rounding.
    """
    state = compiled.init(key, clients)
    new, metrics = compiled.step(key, state, clients)
    check_served(algorithm, state, clients)
    shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), s) for s in (state, new)]
    assert shapes[0] == shapes[1], f"step must keep the state's shapes and types: {shapes[0]} became {shapes[1]}"
    assert {"loss", "bytes_up", "bytes_down"} <= set(metrics), f"metrics must have loss, bytes_*; got {sorted(metrics)}"
    loss, n = metrics["loss"].shape, num_clients(clients)
    assert loss == (n,), f"the metric loss must be [N], got {loss}"
    assert metrics["bytes_up"].shape == metrics["bytes_down"].shape == (), "bytes_up and bytes_down must be scalars"
    served = algorithm.serve(new, None)
    if served.to is not None:
        check_clusters(np.asarray(served.to), jax.tree.leaves(served.models)[0].shape[0])

    with count_compilations() as compilations:
        again, _ = compiled.step(key, compiled.init(key, clients), clients)
        compiled.step(key, again, clients)
    assert compilations.count == 0, f"a second call compiled {compilations.count} program(s)"
    _assert_equal(new, again, "the same key must give the same bits")
    _assert_equal(new, algorithm.step(key, state, clients)[0], "eager and compiled", tolerance=1e-5)


def _check_resumption(trial: _Trial) -> None:
    """Checks four rounds against a run resumed after two, and against the rounds in one `lax.scan`."""
    algorithm, compiled, clients, key, whole = trial
    stopped = _run(compiled, key, clients, 2)
    on_host = jax.tree.map(lambda x: np.asarray(key_data(x)), stopped)  # as in a checkpoint
    stopped = jax.tree.map(lambda x, like: with_keys(jnp.asarray(x), like), on_host, stopped)
    resumed = _rounds(compiled, key, stopped, clients, 3, 4)
    _assert_equal(whole, resumed, "a resumed run must equal an uninterrupted one")
    scan = jax.jit(lambda clients: rollout(algorithm, clients, key=key, num_rounds=4)[0])
    _assert_equal(whole, scan(clients._replace(id=None)), "rounds as one `lax.scan`", tolerance=1e-4)


def _check_mappings(trial: _Trial, make: Callable[[Any], Algorithm]) -> None:
    """Checks that `make(client_axis)` gives the same results for every mapping."""
    parts = sharded(client_mesh(2), chunked(3)) if len(jax.devices()) > 1 else chunked(3)
    axes = [axis for axis in (jax.vmap, chunked(1)) if axis != auto()]  # without the methods' default
    for axis in [*axes, parts]:
        mapped = _run(_compiled(make(axis)), trial.key, trial.clients)
        _assert_equal(trial.whole, mapped, f"client_axis={axis}", tolerance=1e-4)


def _check_padding(trial: _Trial, of_examples: float, of_clients: float) -> None:
    """Checks that padding changes nothing, up to the tolerances, also with the clients divided among devices."""
    _, compiled, clients, key, whole = trial
    padded = _run(compiled, key, _pad_examples(clients, 2, np.nan))
    padded = jax.tree.map(lambda w, p: p if w.shape == p.shape else p[:, : w.shape[1]], whole, padded)  # kept examples
    _assert_equal(whole, padded, "padding examples must not change a bit", tolerance=of_examples)

    n, served = num_clients(clients), compiled.serve(whole, None)
    even = _pad_clients(clients, 2 + n % 2)
    more = _run(compiled, key, even)
    stopped = jax.device_get(without_padding(_run(compiled, key, even, 2), whole))  # as in a checkpoint
    resumed = _rounds(compiled, key, with_padding(stopped, more), even, 3, 4)
    for state, what in ((more, "padding clients"), (resumed, "padding clients of a run that is resumed")):
        of_more = compiled.serve(state, None)
        models = jax.tree.map(lambda p: p[:n], of_more.models) if served.to is None else of_more.models
        _assert_equal(served.models, models, f"{what} must not change a model", tolerance=of_clients)
        rows = [s._replace(models=(), personal=(), active=None) for s in (served, of_more)]
        rows[1], personal = jax.tree.map(lambda x: x[:n], (rows[1], of_more.personal))
        _assert_equal(*rows, f"{what} must not change a cluster")
        text = f"{what} must not change personal parameters"
        _assert_equal(served.personal, personal, text, tolerance=of_clients)
    if len(jax.devices()) > 1:  # as `sharded` places them, with any mapping inside the method
        divided = _run(compiled, key, place(sharded(client_mesh(2)), even))
        _assert_equal(more, divided, "divided among two devices", tolerance=1e-4)


def _check_order(trial: _Trial) -> None:
    """Checks that the order of the clients does not matter, with padding clients among them."""
    n = num_clients(trial.clients)
    more = _pad_clients(trial.clients, 2 + n % 2)  # of the shapes of `_check_padding`, already compiled
    order = np.random.default_rng(1).permutation(num_clients(more))
    shuffled = _run(trial.compiled, trial.key, jax.tree.map(lambda x: x[order], more))
    first, second = (_of_clients(trial.compiled.serve(state, None)) for state in (trial.whole, shuffled))
    first = jax.tree.map(lambda x: x[order[order < n]], first)
    second = jax.tree.map(lambda x: x[order < n], second)
    _assert_equal(first, second, "clients in another order, with padding among them", tolerance=1e-4)


def _of_clients(served: Served) -> tuple[PyTree, PyTree]:
    """Returns each client's model, or the weighted mean of its mixture's parameters, and its personal parameters."""
    if served.to is None:
        return served.models, served.personal
    if served.to.ndim == 1:
        return jax.tree.map(lambda p: p[served.to], served.models), served.personal
    return jax.tree.map(lambda p: jnp.tensordot(served.to, p, 1), served.models), served.personal


def _check_seeds(trial: _Trial, cluster: np.ndarray | None, num_rounds: int) -> None:
    """Checks four seeds under `vmap` against single runs and, unless `cluster` is None, that one of them finds it."""
    algorithm, compiled, clients, _, _ = trial
    keys = jax.vmap(jax.random.key)(jnp.arange(4, dtype=jnp.uint32))
    many = jax.jit(jax.vmap(lambda key: algorithm.init(jax.random.fold_in(key, 0), clients)))(keys)
    advance = jax.jit(
        jax.vmap(lambda key, t, state: algorithm.step(jax.random.fold_in(key, t), state, clients)[0], (0, None, 0))
    )
    for t in range(1, 5):
        many = advance(keys, t, many)
    for s in range(2):
        single = jax.tree.map(lambda x, s=s: x[s], many)
        _assert_equal(_run(compiled, keys[s], clients), single, f"seed {s} under vmap", tolerance=1e-4)
    if cluster is None:
        return
    for t in range(5, num_rounds + 1):
        many = advance(keys, t, many)
    served = jax.vmap(lambda state: algorithm.serve(state, None))(many)
    clusters = found_clusters(served, (len(keys), num_clients(clients)))
    same = (cluster[:, None] == cluster[None, :])[None]
    recovered = ((clusters[:, :, None] == clusters[:, None, :]) == same).all(axis=(1, 2)).any()
    assert recovered, f"no seed found the clusters {cluster.tolist()}: {clusters.tolist()}"


def check_algorithm(
    make_algorithm: Callable[..., Algorithm],
    *,
    recovers: bool = False,
    num_rounds: int = 20,
    kind: str = "regression",
    padding_tolerance: float = 0.0,
    examples_tolerance: float = 0.0,
) -> None:
    """Runs a method on a small problem and asserts the library's guarantees for every method.

    These are: the signature; the state contract; a `step` that keeps the state's structure and reports `loss`,
    `bytes_up` and `bytes_down`; the same bits from the same key; no second compilation; equal results eager and
    compiled, in one `lax.scan` and in single rounds, chunked, sharded and vmapped; no effect of padding examples and
    padding clients, whose rows in a state are zeros after a resumption; the same models for clients in another order,
    with padding clients among them; exact resumption; several seeds under `vmap` equal to single runs.

    Args:
      make_algorithm: `(task, training, client_axis=...) -> Algorithm`; use `functools.partial` for further options.
        Without a `client_axis` argument the mappings are not compared.
      recovers: also assert that at least one of four seeds finds the two clusters of the problem within `num_rounds`
        rounds.
      num_rounds: see `recovers`; at least 4.
      kind: of the problem: `"regression"`, `"classification"` for methods that need labels, or `"network"` for a model
        with dropout and batch normalisation.
      padding_tolerance: largest change of a model by padding clients. The guarantee is 0. Servers that multiply
        matrices over clients need slightly more, since the blocks of the product depend on the number of clients.
      examples_tolerance: the same for padding examples, for training in the span of the examples (see
        `jfcl.training.span`) and of several models side by side, which multiply matrices over examples, and for batch
        statistics, which are their sums.

    Raises:
      AssertionError: names the guarantee that is violated.

    Example:
      Takes some seconds; `tests/test_methods.py` runs it.

      >>> import jfcl
      >>> check_algorithm(jfcl.fedavg)  # doctest: +SKIP
    """
    require(__debug__, "check_algorithm needs Python without -O, which removes its assertions")
    clients, cluster, task, training = problem(kind)
    clients = clients._replace(id=np.asarray(client_ids(clients)))  # explicit ids, so that programs are shared below
    algorithm, key = make_algorithm(task, training), jax.random.key(0)
    _check_signature(algorithm)

    # Compilation dominates the time: `init` and `step` compile once per shape of the clients; rounds loop in Python.
    compiled = _compiled(algorithm)
    _check_first_round(algorithm, compiled, key, clients)
    trial = _Trial(algorithm, compiled, clients, key, _run(compiled, key, clients))
    _check_resumption(trial)
    if "client_axis" in inspect.signature(make_algorithm).parameters:
        _check_mappings(trial, lambda axis: make_algorithm(task, training, client_axis=axis))
    _check_padding(trial, examples_tolerance, padding_tolerance)
    _check_order(trial)
    _check_seeds(trial, cluster if recovers else None, num_rounds)
