"""The features of a frozen front of a model, computed once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jfcl.core import Clients, PyTree, Task, check, check_clients, check_count, check_task, mask, parameter_names
from jfcl.data.store import ClientStore
from jfcl.mapping.jitted import jitted
from jfcl.models.modules import at_layers

AT_ONCE = 512  # clients of a store of which the features are in memory


def of_features(task: Task, made: Task, params: PyTree, chosen: PyTree, fixed: PyTree) -> Task:
    """Returns `made`, the task of `frozen`, with the inputs of the last dense layer in place of `x`; see `frozen`.

    The front computes zeros from zeros, and XLA removes it, since nothing depends on it.
    """
    check(task.head is not None, "cache_features", True, "False: the last dense layer of this model is not known")
    accepted = "False: the shape of an input is not known (classification and regression have one)"
    known = task.input_shape is not None and task.features is None and task.inputs is None
    check(known, "cache_features", True, accepted)
    trained, last = parameter_names(chosen), [n for n in parameter_names(params) if n.startswith(f"{task.head}/")]
    accepted = f"true for the last dense layer's parameters and no others, {', '.join(last)}, with cache_features"
    check(trained == last, "trainable", f"a predicate that holds for {', '.join(trained)}", accepted)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), fixed)
    inputs = jax.ShapeDtypeStruct((2, *task.input_shape), jnp.float32)
    width = jax.eval_shape(task.represent, params, inputs).shape[1]

    def whole(head):
        def one(own, shape):
            return jnp.zeros(shape.shape, shape.dtype) if own is None else own

        return jax.tree.map(one, head, shapes, is_leaf=lambda x: x is None)

    def blank(x):
        accepted = f"(B, {width}), features that jfcl.models.cache_features(task, clients) computes"
        check(x.shape[1:] == (width,), "the shape of x", x.shape, accepted)
        return jnp.zeros((len(x), *task.input_shape), jnp.float32)

    def apply(head, x):
        def enter(layer, call, inputs, *args, **kwargs):
            is_head = "/".join(layer.path) == task.head
            return call(x.reshape(inputs.shape).astype(inputs.dtype) if is_head else inputs, *args, **kwargs)

        with at_layers(nn.Dense, enter):
            return task.apply(whole(head), blank(x))

    def features(x):
        return task.represent(params, x)

    x = jnp.asarray(np.random.default_rng(0).normal(size=inputs.shape), jnp.float32)
    wanted, found = task.apply(params, x), apply(chosen, features(x))
    same = np.allclose(wanted, found, rtol=1e-4, atol=1e-4 * float(jnp.abs(wanted).max()))
    accepted = f"False: the model's outputs depend on more than the inputs of one call of {task.head}"
    check(same, "cache_features", True, accepted)
    return made._replace(
        apply=apply,
        represent=lambda head, x: x,
        train_loss=None,
        statistics=None,
        input_shape=None,
        features=features,
    )


def cache_features(
    task: Task, clients: Clients | ClientStore, *, path: str | Path | None = None, batch_size: int = 256
) -> Clients | ClientStore:
    """Returns the clients with features in place of their inputs, as `task` takes them.

    Args:
      task: from `jfcl.models.frozen(..., cache_features=True)`.
      clients: with `examples["x"]` `[N, M, ...]`; or a store. Training, test and new clients each need the call.
      path: the folder of the new store, which is not there yet; for a store alone.
      batch_size: inputs at once.

    Returns:
      `Clients` of NumPy arrays with `examples["x"]` `[N, M, H]`, zeros where there is padding, and the other examples
      as they are. A store gives a store, with the same clusters. Cost: one forward pass of the frozen front over the
      real examples, and `H` floats an example on the host.

    Raises:
      ValueError: a task without cached features; inputs of another shape; `path` without a store, or a store without.

    Example:
      >>> import jax, jfcl
      >>> fed = jfcl.data.build("digits", num_clients=4, examples_per_client=20)
      >>> task = jfcl.models.classification(jfcl.models.MLP(10), fed.input_shape, fed.num_classes)
      >>> params, is_head = task.init(jax.random.key(0)), lambda path: path.startswith("Dense_1/")
      >>> probe = jfcl.models.frozen(task, params, trainable=is_head, cache_features=True)
      >>> cache_features(probe, fed.train).examples["x"].shape[2:]
      (200,)
    """
    check_task(task)
    check(task.features is not None, "task", "one of inputs", "made by jfcl.models.frozen(..., cache_features=True)")
    check_count("batch_size", batch_size)
    is_store = isinstance(clients, ClientStore)
    check(is_store == (path is not None), "path", path, "the folder of the new store, for a store and for no Clients")
    compute = jitted(task.features)
    if is_store:
        about = {name: clients.about[name] for name in ("num_classes", "description") if name in clients.about}
        each = _of_store(compute, clients, batch_size)
        return ClientStore.create(path, each, cluster=clients.cluster, **about)
    check_clients(clients, allow_empty=True)
    return _of_clients(compute, clients, batch_size)


def _of_clients(compute: Any, clients: Clients, batch_size: int) -> Clients:
    x, real = np.asarray(clients.examples["x"]), np.asarray(mask(clients))
    flat, places, features = x.reshape(-1, *x.shape[2:]), np.flatnonzero(real), None
    for first in range(0, max(len(places), 1), batch_size):
        rows = places[first : first + batch_size]
        missing = np.zeros((batch_size - len(rows), *x.shape[2:]), x.dtype)  # one program for all batches
        values = np.asarray(compute(np.concatenate([flat[rows], missing])))[: len(rows)]
        if features is None:
            features = np.zeros((real.size, *values.shape[1:]), values.dtype)
        features[rows] = values
    features = features.reshape(*real.shape, *features.shape[1:])
    return clients._replace(examples={**clients.examples, "x": features})


def _of_store(compute: Any, store: ClientStore, batch_size: int) -> Iterator[dict[str, np.ndarray]]:
    """Yields the examples of every client, without padding."""
    for first in range(0, len(store), AT_ONCE):
        some = store.gather(np.arange(first, min(first + AT_ONCE, len(store))))
        some = _of_clients(compute, some, batch_size)
        for i, size in enumerate(some.size):
            yield {name: values[i, :size] for name, values in some.examples.items()}
