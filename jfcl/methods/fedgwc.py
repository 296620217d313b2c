"""FedGWC (Licciardi, Leo, Fanì, Caputo, Ciccone 2025): clusters of clients by Gaussian rewards of their losses."""

from functools import partial
from typing import Annotated, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from jfcl.core import Algorithm, Clients, Cohort, Served, Task, check, num_clients, require
from jfcl.core.options import Interval, OneOf, Range, Real
from jfcl.core.platforms import at_most
from jfcl.kernels import spectral_clusters, squared_distances
from jfcl.mapping.columns import on_copies
from jfcl.methods import averaging as inner
from jfcl.methods import round as phases
from jfcl.methods.averaging import Averaging, AveragingState, Report, averaging
from jfcl.methods.options import AVERAGING, Options, factory
from jfcl.training import local

RELATIVE_TOLERANCE = 0.1  # times the squared share of a cohort: 0.001 for 10 of 100 clients
COMPARE = ("own", "others")
LEAST_VARIANCE = 1e-16  # added to that of the losses, as in the authors' code


class Interactions(NamedTuple):
    """What the server knows of the clients and clusters.

    Attributes:
      rewards: `[N, N]`, row `i`: the running means of client `i`'s rewards, in the rounds with each of the others.
      change: `[K]`, the running mean of the squared changes of a cluster's rewards.
      calm: `[K]` int32, for how many rounds it was below the tolerance.
      made: `[]` int32, the number of clusters.
    """

    rewards: jax.Array
    change: jax.Array
    calm: jax.Array
    made: jax.Array


@factory(*AVERAGING)
def fedgwc(
    task: Task,
    training: local.LocalTraining,
    *,
    tolerance: Annotated[Real | None, Interval("[0, inf]")] = None,
    kernel_scale: Annotated[Real, Interval("(0, inf)")] = 4.0,
    compare: Annotated[str, OneOf(COMPARE)] = "own",
    most_parts: Annotated[int, Range(2, 100)] = 4,
    max_clusters: Annotated[int, Range(1, 10**6)] = 8,
    **options: Unpack[Options],
) -> Algorithm:
    """Divides clusters by Gaussian rewards of the clients' losses along their local steps; FedAvg runs in each cluster.

    In every round, a client's reward is high where its losses are near the mean of its cluster's cohort. The server
    keeps the mean rewards of every client in the rounds with each of the others. Once these no longer change, spectral
    clustering divides the cluster into parts of clients with similar rewards, if the parts are well separated. The
    parts may be divided again.

    Args:
      task: as in `jfcl.fedavg`.
      training: as in `jfcl.fedavg`, by `num_steps`: the losses of each step are compared.
      tolerance: `ε`: a cluster is due once the mean squared change of its rewards was below that for as many rounds as
        clients need to take part once; default: a tenth of the squared share of a cohort.
      kernel_scale: `γ`, of the affinity `exp(-γ ‖v_i - v_j‖²)` of two clients' rewards with all others.
      compare: `"own"` rewards of two clients in the rounds with the others, or those of the `"others"` in the rounds
        with them, as in the authors' code.
      most_parts: the largest number of parts that are tried. The number with the smallest Davies-Bouldin index is
        taken, if that is below 1.
      max_clusters: the number of models; a cluster is divided into no more parts than there are models left.
      cohort: clients per round, `C`; default: all, with which no cluster is divided: this is FedAvg. A cluster of `n`
        clients is divided into at most `n / C` parts.
      init_params: one model that all start from.

    Returns:
      `Algorithm` with an `AveragingState`, whose `memory` has the rewards, and the further metrics `clusters_found` and
      `changes` `[K]`, which are compared with the tolerance. All clients of a cluster are divided, even those that were
      absent. A client that was not in training is served the model of lowest loss. One with a loss or an update that is
      not finite gets no reward in this round. Cost of a round: FedAvg's, and `C²` numbers; of a division, the
      eigenvectors of an `[N, N]` matrix. Memory `O(N² + K D)`. Bytes: FedAvg's, and a number up for each local step.

    Raises:
      ValueError: training by `num_epochs`, in which clients have different numbers of steps; a cohort of one; as in
        `jfcl.fedavg`.

    Source: Interaction-Aware Gaussian Weighting for Clustered Federated Learning (ICML 2025). The paper's text was not
    available; this is the authors' code (github.com/davedleo/FedGWC, 24d0716), with these differences. There each
    cluster draws a cohort of its own, here there is one. There the rewards of a cohort are divided by their sum, about
    0.7 times its size, and begin at `1/N²`; here they are means, and begin at 0. The tolerance there is 1e-5, which for
    the means of 10 of 100 clients is about half of the default here. There the columns of the matrix are compared
    (`compare="others"`), which differ less, since a client changes the others' rewards only by its part in the mean.
    `kernel_scale` there is 4, on the command line 0.1. Small cohorts are filled up with random losses there.

    Example:
      >>> import jax, jfcl, numpy as np, optax
      >>> task = jfcl.models.task(lambda _: {"b": jax.numpy.zeros(())}, lambda p, x: x + p["b"], kind="regression")
      >>> y = np.random.default_rng(0).normal(size=(16, 9)).astype(np.float32)
      >>> y[::2] *= 5  # every second client has larger losses
      >>> clients = jfcl.Clients({"x": 0 * y, "y": y}, np.full(16, 9, np.int32))
      >>> algorithm = jfcl.fedgwc(task, jfcl.local_training(optax.sgd(0.1), num_steps=2), cohort=4)
      >>> state, _ = jfcl.rollout(algorithm, clients, key=jax.random.key(0), num_rounds=100)
      >>> int(state.memory.made)
      2
    """
    why = "FedGWC compares clients by the losses of equally many steps"
    require(training.num_epochs is None, f"{why}: give num_steps (--local-steps), not epochs")
    accepted = "at least 2: a client's losses are compared with those of others"
    check(options["cohort"] is None or options["cohort"] > 1, "cohort", options["cohort"], accepted)
    rules = Averaging(task, training._replace(each_step=True), max_clusters, **options)
    divide = partial(_parts, scale=kernel_scale, columns=compare == "others", most=most_parts)
    rules = rules._replace(learn=partial(_learn, rules, divide, tolerance))
    common = averaging(rules)

    def init(key: jax.Array, clients: Clients) -> AveragingState:
        state, n = inner.init(rules._replace(num_clusters=1), key, clients), num_clients(clients)
        models = state.params, state.server  # all start as one
        params, server = jax.tree.map(lambda x: jnp.broadcast_to(x, (max_clusters, *x.shape[1:])), models)
        change, calm = jnp.ones(max_clusters), jnp.zeros(max_clusters, jnp.int32)
        memory = Interactions(jnp.zeros((n, n)), change, calm, jnp.ones((), jnp.int32))
        return state._replace(params=params, server=server, memory=memory)

    def serve(state: AveragingState, clients: Clients | None) -> Served:
        return inner.serve(state, None)._replace(active=jnp.arange(max_clusters) < state.memory.made)

    return common._replace(init=init, serve=serve)


def _learn(
    rules: Averaging, divide, tolerance, state: AveragingState, metrics, cohort: Cohort, report: Report, clients
):
    """Updates the rewards of the cohort, and divides the clusters in which they do not change any more."""
    size = jnp.asarray(cohort.clients.size)
    usable = (size > 0) & report.finite & jnp.isfinite(report.losses).all(axis=1)
    weight = phases.weights_of(rules.weights, cohort.clients)
    rows = jnp.arange(len(size)) if cohort.rows is None else cohort.rows
    renew = on_copies(rules.client_axis, partial(_renewed, rules.num_clusters, divide, tolerance))
    of_cohort = report.losses, report.cluster, usable, weight, rows
    memory, cluster, moves, change = renew(state.memory, state.cluster, jnp.asarray(clients.size) > 0, *of_cohort)
    params, server = jax.tree.map(lambda x: x[moves], (state.params, state.server))
    unchanged = jnp.where(cluster == state.cluster, state.unchanged, 0)
    new = {"params": params, "server": server, "cluster": cluster, "unchanged": unchanged, "memory": memory}
    sent = metrics["bytes_up"] + metrics["participants"].astype(jnp.float32) * 4.0 * report.losses.shape[1]
    return state._replace(**new), metrics | {"bytes_up": sent, "clusters_found": memory.made, "changes": change}


def _renewed(k, divide, tolerance, memory: Interactions, of_all, real, losses, cluster, usable, weight, rows):
    """Returns the `Interactions` after a round, the clusters of all clients, the old row of each model, and `change`.

    Args:
      memory: before the round.
      of_all, real: `[N]`, the clusters of all clients, and which ones have examples.
      losses, cluster, usable, weight, rows: `[C, S]` and `[C]`, of the cohort.
    """
    c, row = len(usable), jnp.where(usable, cluster, k)
    reward = _rewards(losses, weight, row, k)

    # The running means, of every two clients of a cluster that were here together.
    members = jax.ops.segment_sum(real.astype(jnp.float32), of_all, k)
    count = jax.ops.segment_sum(usable.astype(jnp.float32), row, k + 1)[:k]
    share, met = count / jnp.maximum(members, 1), count > 1
    place = jnp.ix_(rows, rows)
    pairs = usable[:, None] & (row[:, None] == row[None, :]) & met[cluster][:, None]
    step = share[cluster][:, None] * jnp.where(pairs, reward[:, None] - memory.rewards[place], 0.0)
    rewards = memory.rewards.at[place].add(step)
    squares = jax.ops.segment_sum(jnp.square(step).sum(axis=1), row, k + 1)[:k] / jnp.maximum(count, 1) ** 2
    change = jnp.where(met, memory.change + share * (squares - memory.change), memory.change)
    least = RELATIVE_TOLERANCE * jnp.square(c / real.sum()) if tolerance is None else tolerance
    calm = jnp.where(met, jnp.where(change < least, memory.calm + 1, 0), memory.calm)

    # Divide the clusters that are due, one after the other.
    limit = members.astype(jnp.int32) // c  # of the parts
    due = (calm >= jnp.maximum(jnp.round(real.sum() / c).astype(jnp.int32), 1)) & (limit > 1)
    order, numbers = jnp.argsort(~due, stable=True).astype(jnp.int32), jnp.arange(k, dtype=jnp.int32)

    def divide_next(j, carry):
        cluster, moves, num_used = carry
        part = divide(rewards, real & (of_all == order[j]), jnp.minimum(limit[order[j]], 1 + k - num_used))
        last = num_used + part.max()
        moves = jnp.where((numbers >= num_used) & (numbers < last), order[j], moves)
        return jnp.where(part > 0, num_used + part - 1, cluster), moves, last

    with at_most(k):
        divided, moves, num_used = jax.lax.fori_loop(0, due.sum(), divide_next, (of_all, numbers, memory.made))
    begins = due | (moves != numbers)
    memory = Interactions(rewards, jnp.where(begins, 1.0, change), jnp.where(begins, 0, calm), num_used)
    return memory, divided, moves, change


def _rewards(losses, weight, row, k):
    """Returns each client's reward `[C]` for losses `[C, S]` near the mean of its row; those in row `k` do not count.

    `weight`: `[C]`.
    """
    total = partial(jax.ops.segment_sum, segment_ids=row, num_segments=k + 1)
    weight = (weight / jnp.where(total(weight) > 0, total(weight), 1.0)[row])[:, None]
    losses = jnp.where((row < k)[:, None], losses, 0.0)
    away = jnp.square(losses - total(weight * losses)[row])
    return jnp.exp(-0.5 * away / (total(weight * away)[row] + LEAST_VARIANCE)).mean(axis=1)


@partial(jax.jit, static_argnames=("columns", "most"))
def _parts(rewards, member, limit, *, scale, columns, most):
    """Returns the part `[N]` int32 of each client of a cluster, of at most `limit`; 0 for others, or where none fit."""
    pairs = member[:, None] & member[None, :]
    least, highest = jnp.where(pairs, rewards, jnp.inf).min(), jnp.where(pairs, rewards, -jnp.inf).max()
    seen = jnp.where(pairs, (rewards - least) / jnp.maximum(highest - least, 1e-8), 0.0)
    seen = seen.T if columns else seen
    self_rewards = jnp.diagonal(seen)
    # Two clients are compared by their rewards with all others.
    of_themselves = jnp.square(self_rewards[:, None] - seen.T)
    squares = squared_distances(seen, mask=member) - of_themselves - of_themselves.T
    affinity = jnp.where(pairs, jnp.exp(-scale * jnp.maximum(squares, 0.0)), 0.0)
    part = spectral_clusters(affinity, most=most, limit=limit, mask=member).cluster
    return jnp.where(member, part, 0)
