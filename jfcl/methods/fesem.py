"""FeSEM (Xie, Long, Shen, Zhou, Wang, Jiang, Zhang 2021, multi-center federated learning)."""

from typing import Unpack

import jax
import jax.numpy as jnp

from jfcl import mapping
from jfcl.core.checks import check
from jfcl.core.clients import check_at_most_clients, num_clients
from jfcl.core.parameters import is_finite, num_bytes, trained_part
from jfcl.core.types import Algorithm, Clients, Task
from jfcl.kernels.base import rows_of
from jfcl.kernels.blocks import squared_norms
from jfcl.methods import round as phases
from jfcl.methods.averaging import Averaging
from jfcl.methods.once import with_first_costs
from jfcl.methods.one_shot import cluster_local_models
from jfcl.methods.options import SENDING, Count, Options, Rounds, factory
from jfcl.methods.personal import PersonalState
from jfcl.robust.aggregate import add_sent, attacked_models, divide_rows, nothing_sent, where_rows
from jfcl.training import local


@factory(*SENDING)
def fesem(
    task: Task,
    training: local.LocalTraining,
    *,
    num_clusters: Count,
    local_rounds: Rounds = 1,
    **options: Unpack[Options],
) -> Algorithm:
    """Runs EM in parameter space: a client trains its cluster's model and joins the cluster nearest to the result.

    E-step: `argmin_k ‖w_i − W_k‖`; M-step: `W_k` is the mean of its clients' `w_i`, by size unless `weights="equal"`
    (the paper's plain mean); then clients train from `W_k`.

    Args:
      task, training: as in `jfcl.fedavg`.
      num_clusters: `K`.
      local_rounds: rounds that clients train alone at first, in `init`; k-means of their models gives the first `W`.
        From random models no client would ever change its cluster. A simulation counts them before its own rounds;
        their cost is in the metrics of its first round.
      init_params: one model that all start from.
      adversary: hostile clients; the attack is on the difference of a client's model to the one it started from.

    Returns:
      `Algorithm` with the state `params` `[K, ...]`, `cluster`, `round`. Cost of a round: FedAvg's, and `N K D`;
      memory `O(chunk D + K D)`, with an adversary and in `init` `O(N D)`.

    Raises:
      ValueError: `K` larger than the number of clients, unknown `weights`, `keep="everything"`.

    Source: Multi-Center Federated Learning (2021). The authors' code (github.com/mingxuts/multi-center-fed-learning)
    forgets the centres: when it clusters, five steps of k-means begin at the weights of `K` clients, and see one layer.

    Example:
      >>> import jax, jfcl, numpy as np, optax
      >>> task = jfcl.models.task(lambda key: {"b": jax.numpy.zeros(())}, lambda p, x: x + p["b"], kind="regression")
      >>> y = np.repeat(np.float32([1, 5, 1, 5]), 4).reshape(4, 4)
      >>> clients = jfcl.Clients({"x": np.zeros((4, 4), np.float32), "y": y}, np.full(4, 4, np.int32))
      >>> algorithm = jfcl.fesem(task, jfcl.local_training(optax.sgd(0.1), num_steps=5), num_clusters=2)
      >>> state, _ = jfcl.rollout(algorithm, clients, key=jax.random.key(0), num_rounds=9)
      >>> sorted(np.round(state.params["b"], 2).tolist())
      [1.0, 5.0]
    """
    check(training.keep != "everything", "training.keep", training.keep, "nothing or schedule")
    rules = Averaging(task, training, num_clusters, **options)

    def init(key: jax.Array, clients: Clients) -> PersonalState:
        check_at_most_clients("num_clusters", num_clusters, num_clients(clients))
        cluster, params, *_ = cluster_local_models(rules, key, clients, local_rounds)
        return PersonalState(params, cluster.astype(jnp.int32), jnp.zeros((), jnp.int32), ())

    def step(key: jax.Array, state: PersonalState, clients: Clients):
        cohort, size = phases.select_cohort(key, clients), jnp.asarray(clients.size)

        def train(key, examples, size, cluster):
            begin = jax.tree.map(lambda p: p[cluster], state.params)
            trained = local.train(task, training, key, begin, examples, size, (), state.round)
            return trained.params, is_finite(trained.params), trained.loss, trained.num_steps

        def join(model, size, cluster, usable, weight):
            away = jax.tree.map(lambda w, p: w[None] - p, model, state.params)
            away = squared_norms(rows_of(trained_part(task, away)))
            nearest = jnp.where(usable & (size > 0), jnp.argmin(away).astype(jnp.int32), cluster)
            return (model, nearest, weight * usable.astype(jnp.float32)), nearest

        def train_and_join(key, examples, size, cluster, weight):
            model, finite, loss, steps = train(key, examples, size, cluster)
            sent, nearest = join(model, size, cluster, finite, weight)
            return sent, (nearest, finite, loss, steps)

        real, last, weights = size > 0, state.cluster, phases.weights_of(rules.weights, clients)
        if rules.adversary is None:
            (sums, weight), (cluster, finite, loss, steps) = phases.train_clients(
                rules.client_axis, train_and_join, cohort, last, weights, sum_into=state.params
            )
        else:
            sent, finite, loss, steps = phases.train_clients(rules.client_axis, train, cohort, last)
            begin = jax.tree.map(lambda p: p[last], state.params)
            sent, finite = attacked_models(rules.adversary, cohort.key, begin, sent, clients, finite & real, last)
            joined = mapping.map_reduce(rules.client_axis, join, add_sent, nothing_sent(state.params))
            (sums, weight), cluster = joined(sent, size, last, finite, weights)
        model = num_bytes(jax.tree.map(lambda p: p[0], state.params))
        metrics = phases.round_metrics(real, loss, finite, steps, model, model)
        params = where_rows(weight > 0, divide_rows(sums, weight, state.params), state.params)
        return PersonalState(params, cluster, state.round + 1, ()), metrics

    return with_first_costs(Algorithm(init, step, task), training, messages=1, rounds=local_rounds)
