"""FedEM (Marfoq, Neglia, Bellet, Kameni, Vidal 2021), as a user writes a method with mixtures of models."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

import jfcl
from jfcl.training.losses import fill_padding


class State(NamedTuple):
    """`K` models, and each client's mixture of them, `[N, K]`."""

    params: dict
    mixture: jax.Array


def fedem(task, training, *, num_clusters: int, step_size: float = 0.5, client_axis=None):
    """Each client weighs the models by their likelihoods of its examples (E), and moves mixture and models (M).

    Args:
      num_clusters: models of the mixtures.
      step_size: of gradient descent.
    """

    def losses_of(params, examples, size):  # [K, M]; padding may be NaN
        return jax.vmap(task.loss, (0, None))(params, fill_padding(examples, size))

    def responsibilities(params, mixture, examples, size):  # [K, M] with the sum 1, divided by the number of examples
        q = jax.nn.softmax(jnp.log(mixture)[:, None] - losses_of(params, examples, size), axis=0)
        real = jnp.arange(q.shape[1]) < size
        q = jnp.where(real, q, 0)  # a client that only fills the axis may have a mixture of zeros
        return q / jnp.maximum(size, 1).astype(jnp.float32)

    def fitted(params, mixture, examples, size):
        share = responsibilities(params, mixture, examples, size).sum(axis=1)
        return jnp.where(size > 0, share, mixture)

    def uniform(clients):
        return jnp.full((clients.size.shape[0], num_clusters), 1 / num_clusters)

    def init(key, clients):
        return State(jax.vmap(task.init)(jax.random.split(key, num_clusters)), uniform(clients))

    def step(key, state, clients):
        def client(examples, size, mixture):
            q = responsibilities(state.params, mixture, examples, size)
            cost = lambda params: (q * losses_of(params, examples, size)).sum()  # noqa: E731
            move = lambda _, params: jax.tree.map(lambda p, g: p - step_size * g, params, jax.grad(cost)(params))  # noqa: E731
            params = jax.lax.fori_loop(0, training.num_steps, move, state.params)
            return params, fitted(state.params, mixture, examples, size), jnp.where(size > 0, cost(params), jnp.nan)

        params, mixture, loss = (client_axis or jax.vmap)(client)(clients.examples, clients.size, state.mixture)
        size = jnp.asarray(clients.size, jnp.float32)
        params = jax.tree.map(lambda p: jnp.tensordot(size / jnp.maximum(size.sum(), 1), p, 1), params)
        sent = jnp.float32(4 * sum(p.size for p in jax.tree.leaves(params))) * (size > 0).sum().astype(jnp.float32)
        return State(params, mixture), {"loss": loss, "bytes_up": sent, "bytes_down": sent}

    def adopt(state, clients):
        fit = lambda _, mixture: jax.vmap(fitted, (None, 0, 0, 0))(state.params, mixture, *clients[:2])  # noqa: E731
        return jfcl.Served(state.params, jax.lax.fori_loop(0, 10, fit, uniform(clients)))

    serve = lambda state, clients: jfcl.Served(state.params, state.mixture)  # noqa: E731
    return jfcl.Algorithm(init, step, task, serve=serve, adopt=adopt)
