"""FedAvg's round for `K` models: each client trains the model that it chooses; each model moves by its clients' mean.

FedAvg, the oracle, IFCA, HypCluster and the methods that cluster once are this round with their own choice of a model.
The server needs only sums over the clients of each cluster, so that a round takes `O(chunk D + K D)` memory for any
number of clients.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jfcl import mapping
from jfcl.core.checks import check, check_count
from jfcl.core.clients import attack_key, check_at_most_clients, client_ids, num_clients, server_key
from jfcl.core.parameters import divided, is_finite, joined, num_bytes, path_flags, trained_part
from jfcl.core.types import Adversary, Algorithm, Clients, PyTree, Served, Task
from jfcl.methods import round as phases
from jfcl.robust import aggregate, privacy
from jfcl.robust.aggregate import attacked, divide_rows, where_rows
from jfcl.training import local
from jfcl.training.optimizer import as_data, check_optimizer

Choice = Callable[..., tuple[jax.Array, jax.Array, jax.Array | None]]
Choose = Callable[[PyTree], Choice]  # see `Averaging.choose`


class AveragingState(NamedTuple):
    """The state of FedAvg, the oracle, IFCA and the methods built on them.

    Attributes:
      params: pytree of `[K, ...]`, the models; `None` in the place of personal parameters.
      cluster: `[N]` int32, the model that each client was last served.
      unchanged: `[N]` int32, for how many of its rounds the client's cluster has not changed (of the methods of
        `jfcl.methods.assigned` one more, and 0 before the first).
      round: `[]` int32, rounds done.
      server: the server optimiser's state for each model, `[K, ...]`.
      client: the local optimisers' states `[N, ...]` under `keep="everything"`, else `()`.
      personal: the personal parameters `[N, ...]`, with `None` in the place of the others; `()` without any.
      clip: `[]`, the clipping norm of the next round under adaptive clipping (`dp`), else `()`.
      memory: what a method keeps besides, such as what it assigns clients by; else `()`.
    """

    params: PyTree
    cluster: jax.Array
    unchanged: jax.Array
    round: jax.Array
    server: PyTree
    client: PyTree
    personal: PyTree = ()
    clip: jax.Array | tuple[()] = ()
    memory: PyTree = ()


class Report(NamedTuple):
    """The results of the cohort's training besides the updates, `[C, ...]` each.

    Attributes:
      cluster: int32, the model that the client trained.
      compared: bool, whether it was sent all models for that.
      finite: bool, whether its update is.
      loss, num_steps: as in `jfcl.training.local.Trained`.
      opt_state, personal: as `client` and `personal` of `AveragingState`.
      inside: bool, whether the norm of its update is at most the clipping norm (`dp`), else `()`.
      losses: `[C, S]`, as in `jfcl.training.local.Trained`.
    """

    cluster: jax.Array
    compared: jax.Array
    finite: jax.Array
    loss: jax.Array
    num_steps: jax.Array
    opt_state: PyTree
    personal: PyTree
    inside: jax.Array | tuple[()] = ()
    losses: jax.Array | tuple[()] = ()


def one_cluster(params: PyTree, clients: Clients) -> jax.Array:
    """Returns the start `[N]` int32 with all clients in the first cluster."""
    return jnp.zeros(num_clients(clients), jnp.int32)


def keep_cluster(params: PyTree) -> Choice:
    """Returns the choice of methods with fixed clusters."""
    return lambda key, examples, size, cluster, unchanged, personal: (cluster, jnp.zeros((), bool), None)


class Averaging(NamedTuple):
    """The arguments of `averaging`.

    Attributes:
      task, training: the model and the local training.
      num_clusters: `K`.
      at_most_clients: whether there may be no more models than clients.
      start: `(params, clients) -> [N]` int32, the clusters before the first round; default: the first one.
      choose: how a client finds its cluster at the start of a round. `choose(params)`, of the models `[K, ...]`, does
        what is the same for all clients, and returns the function of one client `(key, examples, size, cluster,
        unchanged, personal) -> (cluster, compared, products)`. It gets the key of the client's training, its last
        cluster, the least `unchanged` of all clients, and its personal parameters; it returns its cluster, whether it
        compared all models, and the products of `local.train`, or None where they are not known.
      divide_by_all: whether the weights of all clients with examples, in the cohort or not, divide the sum of a
        cluster's updates; default: those of the clients in the sum.
      train: how a client trains its model, with the arguments and results of `round.train_scopes`, the default.
      anchor: the model that the proximal term of `training` pulls to; None: the one that a client starts from.
      learn: `(state, metrics, cohort, report, clients) -> (state, metrics)`, what the server does at the end of a round
        with the `Report` of the cohort, besides the updates; `finite` is then that of the updates after an attack.
      weights and the others: the common options of methods, `jfcl.methods.options.Options`.
    """

    task: Task
    training: local.LocalTraining
    num_clusters: int
    at_most_clients: bool = False
    start: Callable[[PyTree, Clients], jax.Array] = one_cluster
    choose: Choose = keep_cluster
    divide_by_all: bool = False
    train: Callable[..., tuple[local.Trained, PyTree, PyTree]] = phases.train_scopes
    anchor: PyTree | None = None
    learn: Callable[..., tuple[AveragingState, dict[str, jax.Array]]] | None = None
    weights: str | jax.Array = "size"
    shared: Callable[[str], bool] | None = None
    personal: Callable[[str], bool] | None = None
    personal_steps: int | None = None
    server_optimizer: optax.GradientTransformation | None = None
    cohort: int | None = None
    init_params: PyTree | None = None
    adversary: Adversary | None = None
    aggregator: Callable[..., PyTree] | None = None
    dp: privacy.GaussianDP | None = None
    client_axis: mapping.Mapping | None = None

    @property
    def server(self) -> optax.GradientTransformation:
        """The server's optimiser; by default its step is the mean update."""
        return optax.sgd(1.0) if self.server_optimizer is None else self.server_optimizer

    def initial_server(self, params: PyTree) -> PyTree:
        """Returns the state of the server's optimiser for each of the models `[K, ...]`."""
        return as_data(jax.vmap(self.server.init)(trained_part(self.task, params)))


def averaging(rules: Averaging) -> Algorithm:
    """Builds an `Algorithm` of this round, for authors of methods; users call `fedavg`, `oracle` or `ifca`.

    Returns:
      An `Algorithm` with the metrics `loss` `[N]`, `bytes_up`, `bytes_down`, `client_steps`, `participants` and
      `nonfinite` (clients left out of the mean since their update held NaN or infinity), all `[]`; with `dp` also those
      of `jfcl.robust.privacy.metrics`.
    """
    check_count("num_clusters", rules.num_clusters)
    rules = checked(rules)
    algorithm = Algorithm(partial(init, rules), partial(step, rules), rules.task)
    return algorithm if rules.personal is None else algorithm._replace(serve=serve)


def checked(rules: Averaging) -> Averaging:
    """Checks the options that all averaging methods share, and returns `rules` with a client axis.

    Raises:
      ValueError: options outside their range; `shared` with a server optimiser or an aggregator, or an aggregator with
        `divide_by_all`; as from `round.check_scopes` and `privacy.check_private`.
    """
    local.check_parts(rules.task, rules.training)
    phases.check_weights(rules.weights)
    phases.check_scopes(rules)
    privacy.check_private(rules)
    if rules.server_optimizer is not None:
        accepted = "left out where parameters are shared: its state would differ between the copies of a shared layer"
        check(rules.shared is None, "server_optimizer", rules.server_optimizer, accepted)
        # The clients' losses are not private.
        check_optimizer("server_optimizer", rules.server_optimizer, rules.task, with_loss=rules.dp is None)
    plain = rules.aggregator is None or (rules.shared is None and not rules.divide_by_all)
    accepted = "left out where parameters are shared, or sums divided by more than the cluster's clients"
    check(plain, "aggregator", rules.aggregator, accepted)
    aggregate.check_aggregator(rules.aggregator)
    return rules._replace(client_axis=mapping.or_auto(rules.client_axis))


def serve(state: AveragingState, clients: Clients | None) -> Served:
    """Returns the models of the clusters, and the clients' personal parameters."""
    return Served(state.params, state.cluster, state.personal)


def init(rules: Averaging, key: jax.Array, clients: Clients) -> AveragingState:
    """Returns the state before the first round."""
    params = phases.initial_models(rules.task, key, rules.num_clusters, rules.init_params)
    if rules.shared is not None:  # all copies of a shared parameter start, and so stay, alike
        flags = path_flags(rules.shared, params)
        params = jax.tree.map(lambda f, p: jnp.broadcast_to(p[:1], p.shape) if f else p, flags, params)
    cluster = rules.start(params, clients)
    return state_of(rules, clients, cluster, *phases.initial_scopes(rules.personal, params, cluster))


def check_enough(rules: Averaging, clients: Clients) -> None:
    """Raises `ValueError` for fewer clients than in a cohort, or than models where these may be `at_most_clients`."""
    n = num_clients(clients)
    check_at_most_clients("cohort", rules.cohort, n)
    check_at_most_clients("num_clusters", rules.num_clusters if rules.at_most_clients else None, n)


def state_of(
    rules: Averaging, clients: Clients, cluster: jax.Array, params: PyTree, personal: PyTree, memory: PyTree = ()
) -> AveragingState:
    """Returns the state before the first round with these models, at which the optimisers start, too."""
    cluster = cluster.astype(jnp.int32)
    check_enough(rules, clients)
    models, row = params, cluster
    if rules.personal is not None and rules.training.keep == "everything":
        models, row = joined(personal, jax.tree.map(lambda p: p[cluster], params)), None
    return AveragingState(
        params=params,
        cluster=cluster,
        unchanged=jnp.zeros(num_clients(clients), jnp.int32),
        round=jnp.zeros((), jnp.int32),
        server=rules.initial_server(params),
        client=phases.initial_optimizers(rules.task, rules.training, models, row),
        personal=personal,
        clip=() if rules.dp is None or rules.dp.quantile is None else jnp.asarray(rules.dp.clip, jnp.float32),
        memory=memory,
    )


def step(rules: Averaging, key: jax.Array, state: AveragingState, clients: Clients):
    """Returns `(state, metrics)` after one round."""
    # Select the cohort.
    draws_each = rules.dp is not None and rules.dp.sampling == "poisson" and rules.cohort is not None
    select = privacy.poisson_cohort if draws_each else phases.select_cohort
    cohort = select(key, clients, rules.cohort)
    before = state.cluster, state.unchanged, (state.client, state.personal)
    last, unchanged, local_state = phases.take_rows(cohort, before)
    real = jnp.asarray(cohort.clients.size) > 0

    # Train it. The updates are added up as they are computed, unless an adversary or an aggregator needs them all.
    client = train_client(rules, state, clients)
    weights = phases.weights_of(rules.weights, cohort.clients)
    rows = last, local_state, weights
    if rules.adversary is None and rules.aggregator is None:
        sent, report = phases.train_clients(rules.client_axis, client, cohort, *rows, sum_into=state.params)
        usable = report.finite
    else:
        (updates, cluster, counts), report = phases.train_clients(rules.client_axis, client, cohort, *rows)
        key, ids, usable = attack_key(cohort.key), client_ids(cohort.clients), report.finite & real
        updates, usable = attacked(rules.adversary, key, updates, ids, usable, cluster)
        sent = updates, cluster, counts * usable.astype(jnp.float32)

    # Aggregate. With `dp` all that follows is computed from sums with noise.
    clip = state.clip
    if rules.dp is not None:
        expected = privacy.expected_participants(clients, rules.cohort)
        arguments = rules.dp, server_key(cohort.key), clip
        clip = privacy.next_clip(*arguments, report.inside, usable & real, sent[0], expected)
        sent = privacy.release(*arguments, *sent, expected)
    if rules.aggregator is not None:
        rules = rules._replace(aggregator=aggregate.of_round(rules.aggregator, server_key(cohort.key)))
    mean, changed, weight, divisor = mean_updates(rules, state.params, sent, clients)

    # Update the server's models.
    loss = None
    if rules.server_optimizer is not None and rules.dp is None:  # some optimisers take it
        counts = weights * (usable & real).astype(jnp.float32)
        loss = aggregate.cluster_mean(report.loss, report.cluster, counts, rules.num_clusters, rules.client_axis)
    params, server = phases.server_update(rules, cohort, state, mean, changed, loss)
    stayed = (report.cluster == last) & (state.round > 0)  # in the first round no cluster has changed since `start`
    unchanged = jnp.where(stayed, unchanged + real.astype(jnp.int32), jnp.zeros_like(unchanged))
    trained = report.finite & real & (report.cluster >= 0)  # -1: the client has no model, and trained one for nothing
    local_state = where_rows(trained, (report.opt_state, report.personal), local_state)
    after = report.cluster, unchanged, local_state
    cluster, unchanged, (opt_states, personal) = phases.put_rows(cohort, before, after)
    server = where_rows(weight > 0, server, state.server)
    new = AveragingState(params, cluster, unchanged, state.round + 1, server, opt_states, personal, clip, state.memory)

    # Report.
    up, down = bytes_sent(rules, state.params, report.compared)
    metrics = phases.round_metrics(real, report.loss, usable, report.num_steps, up, down)
    if rules.dp is not None:
        metrics |= privacy.metrics(rules.dp, state.clip, weight, divisor)
    if rules.learn is not None:
        new, metrics = rules.learn(new, metrics, cohort, report._replace(finite=usable), clients)
    return new, metrics | {"loss": phases.loss_of_all(cohort, metrics["loss"], num_clients(clients))}


def train_client(rules: Averaging, state: AveragingState, clients: Clients) -> Callable:
    """Returns one client's part of the round, for `train_clients`: the client chooses a model and trains it.

    It is `(key, examples, size, cluster, (opt_state, personal), weight) -> ((update, cluster, weight), Report)`; the
    weight of an update that is not finite becomes 0.
    """
    never = jnp.full_like(state.unchanged, jnp.iinfo(jnp.int32).max)
    unchanged = jnp.where(jnp.asarray(clients.size) > 0, state.unchanged, never).min()
    choice = rules.choose(state.params)

    def client(key, examples, size, cluster, local_state, weight):
        opt_state, personal = local_state
        chosen, compared, products = choice(key, examples, size, cluster, unchanged, personal)
        begin = jax.tree.map(lambda p: p[chosen], state.params)
        data = examples, size, opt_state, state.round
        trained, update, personal = rules.train(rules, key, begin, personal, *data, products=products)
        finite, inside = is_finite((update, personal)), ()
        if rules.dp is not None:
            update, inside = privacy.clipped(update, privacy.clip_of(rules.dp, state.clip))
        chosen = jnp.where(size > 0, chosen, cluster)  # a client without examples in this round keeps its cluster
        weight = weight * finite.astype(jnp.float32)
        report = Report(chosen, compared, finite, trained.loss, trained.num_steps, trained.opt_state, personal, inside)
        return (update, chosen, weight), report._replace(losses=trained.losses)

    return client


def mean_updates(
    rules: Averaging, params: PyTree, sent: tuple, clients: Clients
) -> tuple[PyTree, PyTree, jax.Array, jax.Array]:
    """Returns the mean update of each cluster: weighted, over all clusters for shared parameters, or robust.

    `sent` are `(sums [K, ...], weight [K])`, or the updates `(updates [C, ...], cluster [C], weight [C])`.

    Returns:
      `(mean [K, ...], changed: a pytree of [K] bool, weight [K], divisor [K])`: the models that the mean changes, the
      weight of the clients in each, and by what their sums are divided, but for those of shared parameters.
    """
    sums, weight = sent if len(sent) == 2 else aggregate.add_updates(rules.client_axis, *sent, params)
    changed = jax.tree.map(lambda _: weight > 0, params)
    if rules.aggregator is not None:
        updates, cluster, counts = sent
        updates = trained_part(rules.task, updates)
        mean = aggregate.robust_cluster_mean(rules.aggregator, updates, cluster, counts > 0, rules.num_clusters)
        statistics = divided(rules.task.statistics, divide_rows(sums, weight, params))[1]
        return joined(mean, statistics), changed, weight, weight

    def divide(of_cluster, total):
        """Returns the sums over the weight `of_cluster` `[K]`, those of shared parameters over all clients' `total`."""
        mean = divide_rows(sums, of_cluster, params)
        if rules.shared is None:
            return mean, changed
        flags = path_flags(rules.shared, params)
        totals = jax.tree.map(lambda s: jnp.broadcast_to(s.sum(axis=0, keepdims=True), s.shape), sums)
        mean = jax.tree.map(lambda f, m, t: t if f else m, flags, mean, divide_rows(totals, total, params))
        return mean, jax.tree.map(lambda f, c: jnp.broadcast_to(c.any(), c.shape) if f else c, flags, changed)

    total = phases.weights_of(rules.weights, clients) if rules.divide_by_all else weight
    of_all = jnp.broadcast_to(total.sum(), weight.shape)
    divisor = of_all if rules.divide_by_all else weight
    mean, changes = divide(divisor, of_all)
    if rules.task.statistics is not None and rules.divide_by_all:  # a step is smaller, statistics are means
        statistics, _ = divide(weight, jnp.broadcast_to(weight.sum(), weight.shape))
        mean = joined(trained_part(rules.task, mean), divided(rules.task.statistics, statistics)[1])
    return mean, changes, weight, divisor


def bytes_sent(rules: Averaging, params: PyTree, compared: jax.Array) -> tuple[float, jax.Array]:
    """Returns the bytes that each client sends and gets, `([], [C])`: one model; all where it compares them.

    Shared parameters of the `K` models are sent once.
    """
    model, common = float(num_bytes(jax.tree.map(lambda p: p[0], params))), 0.0  # may exceed int32
    if rules.shared is not None:
        flags = jax.tree.leaves(path_flags(rules.shared, params))
        common += sum(num_bytes(p[0]) for flag, p in zip(flags, jax.tree.leaves(params), strict=True) if flag)
    return model, common + (model - common) * jnp.where(compared, float(rules.num_clusters), 1.0)
