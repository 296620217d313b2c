"""FedSoft (Ruan, Joe-Wong 2022): clients of several clusters, with models of their own near those of the clusters."""

import zlib
from dataclasses import dataclass
from typing import Annotated, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from jfcl import mapping
from jfcl.core.clients import Cohort, check_at_most_clients, client_keys, num_clients, take_clients
from jfcl.core.options import Interval, Range, Real, Search
from jfcl.core.parameters import num_bytes
from jfcl.core.types import Algorithm, Clients, PyTree, Served, Task
from jfcl.methods import round as phases
from jfcl.methods.averaging import Averaging
from jfcl.methods.mixture import spread
from jfcl.methods.options import SENDING, Count, Options, Rounds, factory
from jfcl.methods.personal import PersonalState, initial_state, next_personal, train_personal
from jfcl.robust.aggregate import attacked_models, cluster_mean, where_rows
from jfcl.training import local
from jfcl.training.losses import example_losses, means

CENTRES = zlib.crc32(b"centres")  # folded into the key of `init`
DRAW = zlib.crc32(b"clients of each centre")  # folded into the key of a round


@factory(*SENDING)
def fedsoft(
    task: Task,
    training: local.LocalTraining,
    *,
    num_clusters: Count,
    lam: Annotated[Real, Interval("[0, inf)"), Search(0.01, 1.0)] = 0.1,
    selection: Annotated[int | None, Range(1)] = None,
    estimate_every: Rounds = 1,
    smoothing: Annotated[Real, Interval("(0, 1]")] = 1e-4,
    **options: Unpack[Options],
) -> Algorithm:
    """Trains each client's own model on `f_i(w) + λ/2 Σ_k u_ik ‖w − c_k‖²`; a centre `c_k` is a mean of such models.

    `u_ik` is the share of the client's examples whose loss is lowest under the centre `k`.

    Args:
      task: as in `jfcl.fedavg`.
      training: of a client's model, which continues from its last one. The proximal term of the training is replaced.
      num_clusters: `K`, the number of centres.
      lam: `λ`, the strength of the pull to the centres, 0 or more: 0 is local training.
      selection: clients drawn for each centre in a round, without replacement, with probabilities
        `v_ik = u_ik n_i / Σ_j u_jk n_j`. One that is drawn for several centres trains once. A centre becomes the mean
        of the models of those drawn for it. Default: all clients train, and `c_k = Σ_i v_ik w_i`.
      estimate_every: rounds `τ` from one estimation of `u`, by all clients, to the next. In a population these are the
        clients of the cohort, and others keep their last `u`.
      smoothing: `σ`, the least `u_ik`, so that each centre has clients.
      weights: of `n_i`: `"size"`, or `"equal"` for 1; or an array `[N]`, by a client's id.
      init_params: of the centres: `K` models, stacked; or one, with which clients start too. Centres that start equal
        stay equal, except for rounding and draws. Default: random ones.

    Returns:
      `Algorithm` with a `PersonalState`: `params` are the clients' own models `w_i`, `common` the centres `c_k` `[K,
      ...]`, and `share` the importances `u_ik` `[N, K]`; zeros, which count as 1 / K, before a client's first
      estimation. Clients are served their own models, and the cluster that is reported is that of the largest `u_ik`; a
      client that was not in training, or of a population that has not been in a cohort, is served this centre. Metrics:
      those of `averaging`, `mixture_entropy` and `cluster_mass` as in `jfcl.fedem`, of `u_ik / Σ_k u_ik`. An adversary
      attacks the models that are sent. Cost of a round: a training of each client that is drawn; every `τ` rounds, `K`
      forward passes over all examples. Memory `O(N D + K D)`. Bytes: every `τ` rounds all clients get the `K` centres,
      and send `K` numbers; in the other rounds a client that trains gets `Σ_k u_ik c_k`. It sends its model.

    Raises:
      ValueError: `selection` above the number of clients; numbers outside their ranges; unknown `weights`.

    Source: FedSoft: Soft Clustered Federated Learning with Proximal Local Updating (Ruan, Joe-Wong 2022), Algorithms 1
    and 2. The published code stops with an error where it estimates `u`, and measures a client's accuracy on its
    training examples. It replaces zeros by `σ`, the same as here unless a share is below `σ`. Its clients keep Adam's
    state from round to round, which is `keep="everything"` of the training.

    Example:
      >>> import jax, jfcl, numpy as np, optax
      >>> task = jfcl.models.task(lambda _: {"b": jax.numpy.zeros(())}, lambda p, x: x + p["b"], kind="regression")
      >>> y = np.float32([[1, 1, 1, 1], [1, 1, 5, 5], [5, 5, 5, 5]])
      >>> clients = jfcl.Clients({"x": np.zeros((3, 4), np.float32), "y": y}, np.full(3, 4, np.int32))
      >>> options = {"num_clusters": 2, "init_params": {"b": np.float32([0, 6])}}
      >>> algorithm = jfcl.fedsoft(task, jfcl.local_training(optax.sgd(0.1), num_steps=20), **options)
      >>> state, _ = jfcl.rollout(algorithm, clients, key=jax.random.key(0), num_rounds=10)
      >>> np.round(state.share, 1).tolist()
      [[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]]
    """
    rules, start = Averaging(task, training, num_clusters, **options), options["init_params"]
    serve = ServeSoft(task, smoothing, rules.client_axis)

    def init(key: jax.Array, clients: Clients) -> PersonalState:
        n = num_clients(clients)
        centres = phases.initial_models(task, jax.random.fold_in(key, CENTRES), num_clusters, start)
        is_one = start is not None and jax.tree.map(jnp.shape, start) == jax.tree.map(lambda c: c.shape[1:], centres)
        first = initial_state(task, training, key, clients, start if is_one else None)
        return first._replace(share=jnp.zeros((n, num_clusters), jnp.float32), common=centres)

    def step(key: jax.Array, state: PersonalState, clients: Clients):
        # Estimate the importance of the centres for each client.
        centres, size, everyone = state.common, jnp.asarray(clients.size), phases.select_cohort(key, clients)
        is_due = state.round % estimate_every == 0
        estimated = jax.lax.cond(is_due, lambda: serve.estimate(centres, clients), lambda: state.share)
        estimated = where_rows(size > 0, estimated, state.share)
        share = importance(estimated)
        counts = share * phases.weights_of(rules.weights, clients)[:, None]
        cohort = everyone
        if selection is not None:
            counts = drawn(jax.random.fold_in(key, DRAW), counts, clients, selection)
            rows = jnp.argsort(~(counts > 0).any(axis=1))[: num_clusters * selection]
            cohort = Cohort(take_clients(clients, rows), rows.astype(jnp.int32), everyone.key)

        # Train the clients that were drawn, near the centres.
        begin, importances, counts = phases.take_rows(cohort, (state.params, share, counts))
        present = (counts > 0).any(axis=1)

        def pull(row):
            def mean(c):
                return jnp.tensordot((row / row.sum()).astype(c.dtype), c, 1, precision=jax.lax.Precision.HIGHEST)

            return jax.tree.map(mean, centres), lam * row.sum()

        trained, finite = train_personal(rules, cohort, state, pull, share)
        after = next_personal(cohort, state, trained, present & finite)

        # Average the models that are sent into the centres, and report.
        arguments = cohort.key, begin, trained.params, cohort.clients, present & finite, importances.argmax(axis=1)
        sent, usable = attacked_models(rules.adversary, *arguments)
        counts, all_one = counts * usable[:, None].astype(jnp.float32), jnp.zeros(len(usable), jnp.int32)
        mean_of = lambda weights: cluster_mean(sent, all_one, weights, 1, rules.client_axis)  # noqa: E731
        means_of = jax.vmap(mean_of, in_axes=1)(counts)
        new = where_rows(counts.sum(axis=0) > 0, jax.tree.map(lambda mean: mean[:, 0], means_of), centres)
        model, n = float(num_bytes(jax.tree.map(lambda c: c[0], centres))), num_clients(clients)
        mean = jnp.where(is_due, 0.0, model)  # of the centres, which a client computes by itself where it has them all
        metrics = phases.round_metrics(present, trained.loss, usable, trained.num_steps, model, mean)
        asked = is_due.astype(jnp.float32) * (size > 0).sum().astype(jnp.float32)
        metrics["loss"] = phases.loss_of_all(cohort, metrics["loss"], n)
        metrics["bytes_down"] += asked * (num_clusters * model)
        metrics["bytes_up"] += asked * (4.0 * num_clusters)
        metrics |= spread(share / share.sum(axis=1, keepdims=True), size)
        return after._replace(share=estimated, common=new), metrics

    def check_selection(clients: Clients) -> None:
        check_at_most_clients("selection", selection, int((np.asarray(clients.size) > 0).sum()))

    return Algorithm(init, step, task, check_selection, serve=serve, adopt=serve.adopt)


@dataclass(frozen=True)  # equal ones share programs; a tuple would equal those of other classes
class ServeSoft:
    """`Algorithm.serve` of FedSoft; its arguments are those of the method."""

    task: Task
    smoothing: Real
    client_axis: mapping.Mapping

    def __call__(self, state: PersonalState, clients: Clients | None = None) -> Served:
        """Returns each client's own model, the cluster of its most important centre, and the importance of all.

        With `clients`, those without an estimation, which have no model either, are served that centre.
        """
        params, share = state.params, state.share
        if clients is not None:
            new = ~share.any(axis=1) & (jnp.asarray(clients.size) > 0)
            share = phases.known_or_fitted(new, lambda: self.estimate(state.common, clients), share)
            best = share.argmax(axis=1)
            params = where_rows(new, jax.tree.map(lambda c: c[best], state.common), params)
        share = importance(share)
        return Served(
            params, None, found=share.argmax(axis=1).astype(jnp.int32), shares=share / share.sum(axis=1)[:, None]
        )

    def adopt(self, state: PersonalState, clients: Clients) -> Served:
        """Returns the centres, and the most important one for each client that was not in training."""
        return Served(state.common, self.estimate(state.common, clients).argmax(axis=1).astype(jnp.int32))

    def estimate(self, centres: PyTree, clients: Clients) -> jax.Array:
        """Returns the importance `[N, K]` of the centres for each client."""
        return jnp.maximum(phases.fit_to_models(self, shares, centres, clients), self.smoothing)


def importance(share: jax.Array) -> jax.Array:
    """Returns `share` `[N, K]`, with equal numbers for clients without an estimation, which have zeros."""
    return jnp.where(share.any(axis=1)[:, None], share, 1 / share.shape[1])


def shares(task: Task, centres: PyTree, examples: PyTree, size: jax.Array) -> jax.Array:
    """Returns the shares `[K]` of one client's examples of which the loss is lowest under each centre."""
    best = example_losses(task, centres, examples, size).argmin(axis=1)
    return means(jax.nn.one_hot(best, len(jax.tree.leaves(centres)[0]), dtype=jnp.float32), size)


def drawn(key: jax.Array, weights: jax.Array, clients: Clients, count: int) -> jax.Array:
    """Draws `count` clients for each centre without replacement, with probabilities as `weights` `[N, K]`.

    Those drawn have 1 in the result, `[N, K]` float32. The largest of `log(weight) + Gumbel noise` are such draws; the
    noise is a function of a client's id.
    """
    noise = jax.vmap(lambda key: jax.random.gumbel(key, weights.shape[1:]))(client_keys(key, clients))
    scores = jnp.where(weights > 0, jnp.log(weights) + noise, -jnp.inf)
    place = jnp.argsort(jnp.argsort(-scores, axis=0), axis=0)
    return ((place < count) & (weights > 0)).astype(jnp.float32)
