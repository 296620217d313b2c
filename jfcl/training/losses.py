"""Losses of one client: means over its real examples, under its own model and under several."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jfcl.core import Batch, Clients, PyTree, Task, by_platform, check, dense_start, get_parameter, unpacked, with_fixed
from jfcl.kernels.base import sum_dtype


def masked_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns the mean of `values` `[B]` where `mask` `[B]` is True; 0 where it is nowhere.

    The sum and the mean are float32 at least: 40,000 losses of 2.3 exceed the largest float16, and a sum of bfloat16
    numbers has two digits. `ValueError` for `values` of another shape, such as `[B, 1]` or a mean.

    Example:
      >>> import jax.numpy as jnp
      >>> float(masked_mean(jnp.array([1.0, 3.0, jnp.nan]), jnp.array([True, True, False])))
      2.0
    """
    accepted = f"{mask.shape}, one number for each example"
    shape = values.shape if hasattr(values, "shape") else type(values).__name__
    check(shape == mask.shape, "the shape of a task's losses (or of correct)", shape, accepted)
    dtype = sum_dtype(values)
    masked = jnp.where(mask, values, jnp.zeros_like(values))
    return masked.sum(dtype=dtype) / jnp.maximum(mask.sum(), 1).astype(dtype)


def fill_padding(examples: Batch, size: jax.Array, *, zeros: bool = False) -> Batch:
    """Returns one client's `examples` `[M, ...]`, unpacked, with the first one, or `zeros`, behind the first `size`.

    No NaN in padding can spread then. In training, padding counts with a factor of 0, and the gradient of a model may
    be NaN for an example of zeros, as that of a norm is. For a copy of an example it is as finite as for that example.
    A client without examples has zeros.
    """

    def fill(x):
        rows = x.reshape(len(x), -1)
        real = jax.lax.broadcasted_iota(jnp.asarray(size).dtype, rows.shape, 0) < size
        none = jnp.zeros_like(rows[:1])
        return jnp.where(real, rows, none if zeros else jnp.where(size > 0, rows[:1], none)).reshape(x.shape)

    def fill_once(x):
        """Takes float32 as integers: a TPU's compiler would round the examples of all clients to bfloat16 first."""
        if x.dtype != jnp.float32:
            return fill(x)
        bits = jax.lax.bitcast_convert_type(x, jnp.int32)
        return jax.lax.optimization_barrier(jax.lax.bitcast_convert_type(fill(bits), x.dtype))

    return unpacked(jax.tree.map(lambda x: by_platform(x, cpu=fill, accelerator=fill, tpu=fill_once), examples))


def mean_loss(task: Task, params: PyTree, examples: Batch, size: jax.Array) -> jax.Array:
    """Returns the mean loss of one model over one client's real examples, `[]` (0 for a client without any)."""
    real = jnp.arange(jax.tree.leaves(examples)[0].shape[0]) < size
    return masked_mean(task.loss(params, fill_padding(examples, size)), real)


def means(values: jax.Array, size: jax.Array) -> jax.Array:
    """Returns the means `[K]` of `values` `[M, K]` over one client's `size` real examples; zeros without any."""
    return jax.vmap(masked_mean, (1, None))(values, jnp.arange(len(values)) < size)


def example_losses(task: Task, params: PyTree, examples: Batch, size: jax.Array) -> jax.Array:
    """Returns the loss of each of one client's examples under each of `K` models, `[M, K]` float32.

    Losses that are not finite are infinite; those of padding have no meaning.
    """
    examples = fill_padding(examples, size)
    losses = of_each_model(task, lambda p: task.loss(p, examples), params).T.astype(jnp.float32)
    return jnp.where(jnp.isfinite(losses), losses, jnp.full_like(losses, jnp.inf))


def of_each_model(task: Task, function: Callable[..., jax.Array], *models: PyTree) -> jax.Array:
    """Returns `function(*model)` of each of the stacked `models` `[K, ...]` of a task.

    On a CPU it is of one after another: convolutions of several models at once take several times as long, and many
    times the memory of one. The first dense layers of several models are one product, and faster at once.
    """

    def at_once(models):
        return jax.vmap(function)(*models)

    def one_by_one(models):
        return jax.lax.scan(lambda none, model: (none, function(*model)), (), models)[1]

    if dense_start(task) is not None:
        return at_once(models)
    return by_platform(indexable(models), cpu=one_by_one, accelerator=at_once)


def training_loss(
    task: Task, key: jax.Array, params: PyTree, batch: Batch, real: jax.Array
) -> tuple[jax.Array, PyTree]:
    """Returns `(loss [], params)`: the mean training loss of one client's batch, and `params` with new statistics.

    `key` is for dropout and other randomness in training; `real` `[B]` bool marks the examples that are no padding.
    """
    if task.train_loss is None:
        return mean_to_train(task.loss(params, batch), real), params
    losses, params = task.train_loss(key, params, batch, real)
    return mean_to_train(losses, real), params


def mean_to_train(losses: jax.Array, real: jax.Array) -> jax.Array:
    """Returns `masked_mean`; `ValueError` for losses that are integers, of which all gradients are 0."""
    mean, kind = masked_mean(losses, real), losses.dtype
    accepted = "floating-point numbers, as others have no gradient"
    check(jnp.issubdtype(kind, jnp.floating), "the type of a task's losses", kind.name, accepted)
    return mean


def under_all(task: Task, params: PyTree) -> Callable[[Batch, jax.Array], tuple[jax.Array, jax.Array | None]]:
    """Returns the function with which one client compares `K` models `[K, ...]`.

    Returns:
      `(examples, size) -> (losses [K], products [M, K, H])`: its mean loss under each model, infinite where that is not
      finite, and the outputs of their first dense layers (None where the task has no `dense_start`).
    """
    start = dense_start(task)
    if start is not None:
        # [d, K, H]: side by side, so that every client multiplies one large matrix, which is laid out only once.
        kernels = jnp.moveaxis(get_parameter(params, start.kernel), 0, 1)

    def compare(examples, size):
        if start is None:
            losses, products = of_each_model(task, lambda p: mean_loss(task, p, examples, size), params), None
        else:
            examples = fill_padding(examples, size)
            x = task.inputs_of(examples)
            inputs = start.rows(x, kernels)
            real = jnp.arange(len(inputs)) < size
            flat = kernels.reshape(len(kernels), -1).astype(inputs.dtype)
            products = (inputs @ flat).reshape(len(inputs), *kernels.shape[1:])

            def loss(p, z):
                return masked_mean(task.cost(start.apply(p, z, x), examples), real)

            losses = jax.vmap(loss, in_axes=(0, 1))(params, products)
        return jnp.where(jnp.isfinite(losses), losses, jnp.full_like(losses, jnp.inf)), products

    return compare


def indexable(params: PyTree) -> PyTree:
    """Returns `params`, copied in a function that `shard_map` divides: JAX does not index arrays from outside there."""
    return jax.tree.map(jnp.copy, params) if jax.sharding.get_abstract_mesh().manual_axes else params


def lowest_loss(
    task: Task, params: PyTree, clients: Clients, *, personal: PyTree = (), client_axis: Callable
) -> jax.Array:
    """Returns each client's model of lowest loss, `[N]` int32, the first of equals (cluster identity estimate).

    Args:
      task, clients, client_axis: of the models `params` `[K, ...]`; the clients and their mapping.
      personal: the clients' own parameters `[N, ...]`, which complete each of the models; `()` if there are none.
    """
    of_all = None if jax.tree.leaves(personal) else under_all(task, params)

    def client(examples, size, own_params):
        compare = of_all or under_all(with_fixed(task, own_params), params)
        return jnp.argmin(compare(examples, size)[0]).astype(jnp.int32)

    return client_axis(client)(clients.examples, jnp.asarray(clients.size), personal)
