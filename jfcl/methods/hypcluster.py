"""HypCluster (Mansour, Mohri, Ro, Suresh 2020): every client chooses among K models, which FedAvg trains."""

from typing import Annotated, Unpack

import jax
import jax.numpy as jnp

from jfcl.core import Algorithm, Clients, Task, check, random_order
from jfcl.core.options import MOST_REPEATED, Range
from jfcl.methods.averaging import Averaging, averaging, state_of
from jfcl.methods.ifca import ifca
from jfcl.methods.once import after_rounds, with_first_costs
from jfcl.methods.options import AVERAGING, SCOPES, Count, Options, factory
from jfcl.training import local


@factory(*AVERAGING, *SCOPES, "dp")
def hypcluster(
    task: Task,
    training: local.LocalTraining,
    *,
    num_clusters: Count,
    warm_rounds: Annotated[int, Range(0, MOST_REPEATED)] = 0,
    **options: Unpack[Options],
) -> Algorithm:
    """Runs IFCA's model averaging with clients weighted by size, usually with epochs, a cohort and a warm start.

    Args:
      task, training: as in `jfcl.ifca`.
      num_clusters: `K`.
      warm_rounds: rounds of FedAvg in each of `K` random parts of the clients. The models start from the results, which
        differ and are of some use to every client. A simulation counts these rounds before its own; their cost is in
        the metrics of its first round. Default: none.
      init_params: one model to start from, or `K` stacked: the other kind of warm start.

    Returns:
      `Algorithm` with an `AveragingState`. Cost of a round: that of IFCA.

    Raises:
      ValueError: warm rounds with `dp`; as in `jfcl.ifca`.

    Example:
      >>> import jax, jfcl, numpy as np, optax
      >>> task = jfcl.models.task(lambda key: {"b": jax.random.normal(key)}, lambda p, x: x + p["b"], kind="regression")
      >>> y = np.repeat(np.float32([1, 5, 1, 5]), 4).reshape(4, 4)
      >>> clients = jfcl.Clients({"x": np.zeros((4, 4), np.float32), "y": y}, np.full(4, 4, np.int32))
      >>> training = jfcl.local_training(optax.sgd(0.25), num_epochs=5)
      >>> algorithm = jfcl.hypcluster(task, training, num_clusters=2, init_params={"b": np.float32([0, 9])})
      >>> state, _ = jfcl.rollout(algorithm, clients, key=jax.random.key(0), num_rounds=3)
      >>> np.round(state.params["b"], 2).tolist(), state.cluster.tolist()
      ([1.0, 5.0], [0, 1, 0, 1])
    """
    fits = options["dp"] is None or warm_rounds == 0
    check(fits, "warm_rounds", warm_rounds, "0 with dp: an epsilon does not count them; give init_params")
    algorithm = ifca(task, training, num_clusters=num_clusters, **options)
    if not warm_rounds:
        return algorithm

    def init(key: jax.Array, clients: Clients):
        start_key, parts_key, rounds_key = jax.random.split(key, 3)
        parts = jnp.argsort(random_order(parts_key, clients)).astype(jnp.int32) % num_clusters
        rules = Averaging(task, training, num_clusters, start=lambda *_: parts, **options)
        end = after_rounds(averaging(rules), start_key, rounds_key, warm_rounds, clients)
        chosen = algorithm.serve.choose(end.params, clients, end.personal)
        return state_of(rules, clients, chosen, end.params, end.personal)

    cost = {"messages": warm_rounds, "rounds": warm_rounds, "more_steps": options["personal_steps"]}
    return with_first_costs(algorithm._replace(init=init), training, **cost, cohort=options["cohort"])
