"""Random starts: the best of several after some rounds (IFCA, section 6.1), or one where each model has clients."""

import jax
import jax.numpy as jnp

from jfcl.core import Algorithm, Clients, check_count
from jfcl.kernels.base import sum_dtype
from jfcl.methods.round import select_cohort

COSTS = ("bytes_up", "bytes_down", "client_steps")
MOST_DRAWS = 1000  # of initial models


def with_restarts(algorithm: Algorithm, *, num_restarts: int, num_rounds: int) -> Algorithm:
    """Returns `algorithm` started from the best of `num_restarts` initialisations after `num_rounds` rounds of each.

    The best has the lowest mean training loss, with clients weighted by their number of examples, among the
    initialisations with the fewest infinite losses or updates; a server knows all of these. (So restarts are not
    private: methods refuse their own `restarts` with `dp`.) The rounds of the restarts come before those of a
    simulation, the first of which is round `num_rounds + 1`, and has their cost in its metrics: `bytes_up`,
    `bytes_down` and `client_steps` are `1 + num_restarts * num_rounds` times its own, and `num_restarts` times those of
    `algorithm.init`, where it trains (`hypcluster`).

    Args:
      algorithm: its state must count its rounds in `round` `[]`.
      num_restarts, num_rounds: initialisations to try, and rounds of each before they are compared; at least 1.

    Returns:
      `Algorithm` of the same state and metrics. Cost of `init`: `num_restarts * num_rounds` rounds; memory: two states.

    Example:
      >>> import jax, jfcl, numpy as np, optax
      >>> task = jfcl.models.task(lambda key: {"b": jax.random.normal(key)}, lambda p, x: x + p["b"], kind="regression")
      >>> y = np.repeat(np.float32([1, 5, 1, 5]), 4).reshape(4, 4)
      >>> clients = jfcl.Clients({"x": np.zeros((4, 4), np.float32), "y": y}, np.full(4, 4, np.int32))
      >>> one = jfcl.hypcluster(task, jfcl.local_training(optax.sgd(0.25), num_steps=1), num_clusters=2)
      >>> best = jfcl.with_restarts(one, num_restarts=8, num_rounds=3)
      >>> best.init(jax.random.key(0), clients).cluster.tolist() in ([0, 1, 0, 1], [1, 0, 1, 0])
      True
    """
    check_count("num_restarts", num_restarts)
    check_count("num_rounds", num_rounds)

    def init(key: jax.Array, clients: Clients):
        def run(key):
            init_key, rounds_key = jax.random.split(key)

            def one_round(r, carry):
                state, _, _ = carry
                state, metrics = algorithm.step(jax.random.fold_in(rounds_key, r), state, clients)
                failed = jnp.isinf(metrics["loss"]).sum() + jnp.asarray(metrics.get("nonfinite", 0))
                return state, failed.astype(jnp.int32), mean_over_examples(metrics["loss"], clients.size)

            start = algorithm.init(init_key, clients), jnp.zeros((), jnp.int32), jnp.inf
            return jax.lax.fori_loop(0, num_rounds, one_round, start)

        def try_next(i, best):
            state, failed, loss = again(jax.random.fold_in(key, i))
            better = (i == 0) | (failed < best[1]) | ((failed == best[1]) & (loss < best[2]))
            return jax.tree.map(lambda a, b: jnp.where(better, a, b), (state, failed, loss), best)

        again = jax.jit(run, inline=True)  # traced once, for the carry and in the loop
        nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), again.eval_shape(key))
        return jax.lax.fori_loop(0, num_restarts, try_next, nothing)[0]

    def step(key: jax.Array, state, clients: Clients):
        first = (state.round == num_rounds).astype(jnp.float32)
        init_costs = {} if algorithm.init_costs is None else algorithm.init_costs(state, clients)
        state, metrics = algorithm.step(key, state, clients)
        costs = {name: metrics[name] for name in COSTS if name in metrics}
        paid = {name: num_restarts * (num_rounds * cost + init_costs.get(name, 0.0)) for name, cost in costs.items()}
        return state, metrics | {name: cost + first * paid[name] for name, cost in costs.items()}

    return algorithm._replace(init=init, step=step, init_rounds=algorithm.init_rounds + num_rounds)


def with_balanced_start(algorithm: Algorithm, *, min_share: float, cohort: int | None = None) -> Algorithm:
    """Returns `algorithm` with initial models that are drawn again until each is chosen by enough clients.

    Without this, all clients may choose the same one of several random models, and the others never train.

    Args:
      algorithm: its state has the models in `params` `[K, ...]`, and the clients' choices in `cluster` `[N]`.
      min_share: of the clients, that chooses each of the models at least. After 1,000 draws the most even one is kept.
      cohort: number of clients that choose, the same in every draw; default: all. A draw sends them `K` models for as
        many forward passes over their data, which are not in the metrics.
    """

    def init(key: jax.Array, clients: Clients):
        cohort_key, models_key = jax.random.split(key)
        few = select_cohort(cohort_key, clients, cohort).clients
        real = jnp.asarray(few.size) > 0

        def draw_next(carry):
            i, best, most = carry
            state = algorithm.init(jax.random.fold_in(models_key, i), few)
            rows = jnp.arange(len(jax.tree.leaves(state.params)[0]))
            clients_of = ((state.cluster[:, None] == rows[None, :]) & real[:, None]).sum(axis=0)
            share = clients_of.min() / jnp.maximum(real.sum(), 1)
            return i + 1, jnp.where(share > most, i, best), jnp.maximum(share, most)

        first = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), jnp.full((), -1.0)
        _, best, _ = jax.lax.while_loop(
            lambda carry: (carry[0] < MOST_DRAWS) & (carry[2] < min_share), draw_next, first
        )
        return algorithm.init(jax.random.fold_in(models_key, best), clients)

    return algorithm._replace(init=init)


def mean_over_examples(loss: jax.Array, size: jax.Array) -> jax.Array:
    """Returns the mean of the finite entries of `loss` `[N]`, weighted by `size` `[N]`; infinity if there are none.

    It is `[]`, float32 at least.
    """
    loss = loss.astype(sum_dtype(loss))
    size = jnp.asarray(size).astype(loss.dtype)
    weight = jnp.where(jnp.isfinite(loss), size, jnp.zeros_like(loss))
    mean = jnp.where(weight > 0, loss, jnp.zeros_like(loss)) @ weight / jnp.maximum(weight.sum(), 1.0)
    return jnp.where(weight.sum() > 0, mean, jnp.inf)
