"""Federated-Clustering (Werner, He, Jordan, Jaggi, Karimireddy 2023, Algorithm 2)."""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jfcl import mapping
from jfcl.core.checks import check, is_concrete, require
from jfcl.core.clients import attack_key, check_at_most_clients, client_ids, client_keys, num_clients, random_order
from jfcl.core.options import Interval, OneOf, Range, Real, Search
from jfcl.core.parameters import is_finite, num_bytes
from jfcl.core.types import Adversary, Algorithm, Batch, Clients, PyTree, Task
from jfcl.kernels import threshold_clustering
from jfcl.kernels.base import DENSE_UP_TO
from jfcl.kernels.threshold import QUANTILE_RULES, center_from_row
from jfcl.methods import round as phases
from jfcl.methods.options import SENDING, Options, Rounds, factory
from jfcl.methods.personal import PersonalState, initial_state, serve_personal
from jfcl.robust.aggregate import attacked, where_rows
from jfcl.training import local
from jfcl.training.optimizer import optimizer_step

CENTERS = ("densest", "carry")
MEMORY = 2**31  # bytes of gradients that a GPU has at once; temporaries are three times that


class ThresholdOptions(Options, total=False):
    """Options of the methods that cluster what clients send by `jfcl.kernels.threshold_clustering`.

    Attributes:
      radius: `τ` of Threshold-Clustering, in units of gradients; theory: `sqrt(σ Δ)`, between the noise of gradients
        within a cluster and the separation of clusters. A number, `[K]` or `[threshold_rounds, K]` for `K` centres (one
        in Federated-Clustering), or "three_means".
      quantile: in place of `radius`: the radius is this quantile of the distances of all gradients to the centre, in
        each threshold round; default: 0.2, the paper's, for one centre, and `1 / (2 K)` for several. Choose a cluster's
        share of the clients, or less.
      threshold_rounds: rounds of Threshold-Clustering, `L`.
      quantile_rule: how a quantile of distances is taken, as in `jfcl.kernels.threshold_clustering`.
      centers: the starts of several centres, which the paper leaves open. `"densest"`: in every round the gradients
        with most others around them, see `densest`. `"carry"`: the last round's centres; in the first round as
        `"densest"`.
    """

    radius: Any
    quantile: Annotated[Real | None, Interval("[0, 1]"), Search(0.1, 0.9, log=False)]
    threshold_rounds: Rounds
    quantile_rule: Annotated[str, OneOf(QUANTILE_RULES)]
    centers: Annotated[str, OneOf(CENTERS)]


THRESHOLD = ("radius", "quantile", "threshold_rounds", "quantile_rule")
DEFAULTS = {"weights": "equal", "threshold_rounds": 10, "quantile_rule": "linear"}


def threshold(options: ThresholdOptions, default: float) -> dict[str, Any]:
    """Returns the arguments of `threshold_clustering`, by default with a quantile of `default`."""
    radius, quantile = options["radius"], options["quantile"]
    require(radius is None or quantile is None, "Give radius or quantile, not both.")
    if radius is None and quantile is None:
        quantile = default
    if is_concrete(radius) and radius is not None and not isinstance(radius, str):
        check(np.all(np.asarray(radius) >= 0), "radius", radius, "0 or more")
    of_kernel = {"num_rounds": options["threshold_rounds"], "quantile_rule": options["quantile_rule"]}
    return {"radius": radius, "quantile": quantile} | of_kernel


def gradient(
    task: Task, params: PyTree, batch: Batch, real: jax.Array, key: jax.Array | None
) -> tuple[jax.Array, PyTree]:
    """Returns `(loss [], gradient)` of one model on one client's batch; `real` `[B]` bool marks its examples.

    `key` is that of `model_keys`.
    """
    return local.loss_and_gradient(task, key, params, (), batch, real)[:2]


def model_keys(task: Task, keys: jax.Array) -> jax.Array | None:
    """Returns the keys of the model's randomness (dropout), from those of clients; None for a model without any."""
    if task.train_loss is None:
        return None
    streams = partial(jax.random.fold_in, data=local.MODEL_STREAM)
    return streams(keys) if keys.ndim == 0 else jax.vmap(streams)(keys)


def step_along(
    training: local.LocalTraining, key: jax.Array, params: PyTree, opt_state: PyTree, slope: PyTree, loss: jax.Array
) -> tuple[PyTree, PyTree]:
    """Returns one client's `(params, opt_state)` after a step along a clustered gradient; `key` is for noise in it."""
    opt_state = local.rekeyed(training, key, params, opt_state)
    updates, opt_state = optimizer_step(training.optimizer, slope, opt_state, params, loss)
    return optax.apply_updates(params, updates), opt_state


class Groups(NamedTuple):
    """Random subgroups of clients, drawn in each round.

    Attributes:
      rows, real: `[G, S]` int32 and bool, the clients of each group, and those of them that have examples.
      of: `[N]` int32, the group of each client.
    """

    rows: jax.Array
    real: jax.Array
    of: jax.Array


def draw_groups(key: jax.Array, clients: Clients, size: int) -> Groups:
    """Draws groups of `size` clients; the last is smaller where `size` does not divide `N`."""
    n = num_clients(clients)
    order, shape = random_order(key, clients), (-(-n // size), size)
    rows = jnp.pad(order, (0, math.prod(shape) - n)).reshape(shape)
    real = (jnp.arange(math.prod(shape)) < n).reshape(shape) & (jnp.asarray(clients.size) > 0)[rows]
    return Groups(rows, real, jnp.zeros(n, jnp.int32).at[order].set(jnp.arange(n, dtype=jnp.int32) // size))


@factory(*SENDING, *THRESHOLD, **DEFAULTS)
def federated_clustering(
    task: Task,
    training: local.LocalTraining,
    *,
    subgroup_size: Annotated[int | None, Range(2)] = None,
    client_axis: mapping.Mapping | None = None,
    **options: Unpack[ThresholdOptions],
) -> Algorithm:
    """Moves each client's model along the mean of the gradients, at that model, that are similar to the client's own.

    For client `i`: all clients' gradients `g_j(x_i)` at *its* model are threshold-clustered with one centre, which
    starts at `g_i(x_i)`; then `x_i ← x_i − η v_i`. No assignment is permanent, so no mistake lasts.

    Args:
      task: from `jfcl.models`, or your own.
      training: from `jfcl.local_training`, by `num_steps`. The first local step of a round goes along the clustered
        gradient, the others along the client's own (clustering only every s-th step). The optimiser gets the clustered
        gradient too: for momentum, `optax.sgd(lr, momentum=0.9)` and `keep="everything"`. With `batch_size`, all models
        have the same batch of client `j` in a round.
      subgroup_size: clusters only random groups of `S` clients, drawn in each round (section 4.2); default: all
        together. The last group is smaller where `S` does not divide `N`; a single client steps along its own gradient.
      adversary: hostile clients; the attack is on the gradients that they send, separately for each model.
      client_axis: mapping over the clients' models, each of which compares `S · D` numbers; default: one at a time on a
        CPU or TPU, as many as fit 2 GB on a GPU. A mapping of all models at once is divided likewise on a GPU or TPU.

    Returns:
      `Algorithm` with a `PersonalState`. With groups of `S` clients: `N S` gradients a round, those of a group at one
      model as one pass over all its batches; memory `O(chunk S D + N D)`. Bytes are those with a server that clusters:
      each client sends its model and `S − 1` gradients, and gets `S − 1` models and its centre. (In the paper clients
      cluster for themselves, and get `S − 1` gradients in place of a centre.) `nonfinite` counts clients by their own
      gradient and model; gradients of others with NaN, which every client leaves out for itself, are not counted.

    Raises:
      ValueError: an option outside its range; both `radius` and `quantile`; a subgroup of more than `N` clients; epochs
        instead of steps, a proximal term, `span="always"`.

    Warns:
      UserWarning: from `simulate`, where with this quantile every client trains alone, as with 0.2 and two to five
        clients.

    Example:
      >>> import jax, jfcl, numpy as np, optax
      >>> task = jfcl.models.task(lambda key: {"b": jax.numpy.zeros(())}, lambda p, x: x + p["b"], kind="regression")
      >>> y = np.repeat(np.float32([1, 5, 1, 5]), 3).reshape(4, 3)
      >>> clients = jfcl.Clients({"x": np.zeros((4, 3), np.float32), "y": y}, np.full(4, 3, np.int32))
      >>> training = jfcl.local_training(optax.sgd(0.25), num_steps=1)
      >>> algorithm = jfcl.federated_clustering(task, training, radius=4.0)
      >>> state, _ = jfcl.rollout(algorithm, clients, key=jax.random.key(0), num_rounds=20)
      >>> np.round(state.params["b"], 3).tolist()
      [1.0, 5.0, 1.0, 5.0]
    """
    rule, weights, adversary = threshold(options, 0.2), options["weights"], options["adversary"]
    check_sends_gradients(task, training)

    def init(key: jax.Array, clients: Clients) -> PersonalState:
        check_at_most_clients("subgroup_size", subgroup_size, num_clients(clients))
        return initial_state(task, training, key, clients, options["init_params"])

    def check_quantile(clients: Clients) -> None:
        """Warns of a quantile with which every client trains alone."""
        if jax.process_count() == 1:
            compared = int((np.asarray(clients.size) > 0).sum())
            warn_if_alone(rule["quantile"], min(compared, subgroup_size or compared), rule["quantile_rule"])

    def step(key: jax.Array, state: PersonalState, clients: Clients):
        # Draw the groups, and a batch of each client.
        n, size = num_clients(clients), jnp.asarray(clients.size)
        has_examples = size > 0
        group_key, clients_key = jax.random.split(key)
        keys = client_keys(clients_key, clients)
        counts = phases.weights_of(weights, clients)
        batches, real = jax.vmap(lambda *c: local.draw_batch(task, training, *c))(keys, clients.examples, size)
        groups = None if subgroup_size is None else draw_groups(group_key, clients, subgroup_size)
        width = n if groups is None else subgroup_size
        # All clients use these.
        drawn = batches, real, model_keys(task, keys), groups, attack_key(clients_key)
        common = *drawn, state.round, has_examples, client_ids(clients), counts

        # Train.
        # An accelerator multiplies matrices much faster than it reads them from memory.
        by_products = mapping.platform_of(client_axis) != "cpu" and width <= DENSE_UP_TO
        client = train_client(task, training, rule, adversary, by_products)
        model = num_bytes(jax.tree.map(lambda p: p[0], state.params))
        axis = models_at_once(width * model, client_axis)
        params, opt_states, loss, finite, compared = axis(client, in_axes=(None, 0, 0, 0, 0, 0, 0))(
            common, jnp.arange(n), keys, state.params, state.client, clients.examples, size
        )

        # Keep the models that are finite, and report.
        keep = finite & has_examples
        sent = compared.astype(jnp.float32) * float(model)  # may exceed int32
        metrics = phases.round_metrics(has_examples, loss, finite, compared + training.num_steps - 1, sent, sent)
        params, opt_states = where_rows(keep, (params, opt_states), (state.params, state.client))
        return PersonalState(params, state.cluster, state.round + 1, opt_states), metrics

    return Algorithm(init, step, task, check_quantile, serve=serve_personal)


def train_client(
    task: Task, training: local.LocalTraining, rule: dict[str, Any], adversary: Adversary | None, by_products: bool
) -> Callable:
    """Returns one client's part of the round: a step along the clustered gradient, then its own steps.

    It takes `(common, row, key, params, opt_state, examples, size)`, and returns `(params, opt_state, loss, finite,
    gradients compared)`. `common` is an argument, as a device holds only its own clients: batches `[N, B, ...]`, their
    real examples `[N, B]`, `model_keys` `[N]`, `Groups` or None, the attackers' key, the rounds before, and `[N]` each:
    which clients have examples, ids and weights.
    """
    # The step along the centre leaves the span of the client's own examples, and so does momentum after it.
    remaining = None if training.num_steps == 1 else training._replace(num_steps=training.num_steps - 1, span="never")

    def client(common, i, key, params, opt_state, examples, size):
        # The gradients of the client's group at its model.
        batches, in_batch, draws, groups, lies_key, rounds, has_examples, ids, counts = common
        if groups is None:
            rows, real, own_row = jnp.arange(len(ids)), has_examples, i
        else:
            rows, real = groups.rows[groups.of[i]], groups.real[groups.of[i]]
            own_row = jnp.argmax((rows == i) & (real | ~has_examples[i]))
            batches, in_batch, draws = jax.tree.map(lambda x: x[rows], (batches, in_batch, draws))
        losses, points = jax.vmap(partial(gradient, task, params))(batches, in_batch, draws)

        # Their centre, from the client's own gradient.
        own_gradient = jax.tree.map(lambda z: z[own_row], points)
        finite = is_finite(own_gradient)
        own_gradient = jax.tree.map(lambda g: jnp.where(finite, g, jnp.zeros_like(g)), own_gradient)
        own_lies = jax.random.fold_in(lies_key, ids[i])
        sent, usable = attacked(adversary, own_lies, points, ids[rows], real)
        options = rule | {"weights": counts[rows], "mask": usable}
        if by_products and adversary is None:
            center = center_from_row(sent, own_row, **options)
        else:
            start = jax.tree.map(lambda g: g[None], own_gradient)
            center = threshold_clustering(sent, start, **options, form="gram" if by_products else "auto")

        # A step along it, and the remaining steps.
        m = jax.tree.leaves(examples)[0].shape[0]
        opt_state = local.optimizer_at(training, params, opt_state, rounds, size, m)
        slope, loss = jax.tree.map(lambda v: v[0], center), losses[own_row]
        new, opt_state = step_along(training, jax.random.fold_in(key, 3), params, opt_state, slope, loss)
        if remaining is not None:
            trained = local.train(task, remaining, jax.random.fold_in(key, 2), new, examples, size, opt_state)
            new, opt_state = trained.params, trained.opt_state
            loss = (loss + trained.loss * remaining.num_steps) / training.num_steps
        return new, local.carried(training, opt_state), loss, finite & is_finite(new), real.sum()

    return client


def warn_if_alone(quantile: Any, count: int, rule: str) -> None:
    """Warns where only the client's own distance, 0, of `count` different ones is within the quantile."""
    if quantile is None or not is_concrete(quantile) or count < 2:
        return
    needed = 2 if rule in ("index_shrunk", "index_strict") else 1  # the least place that includes another gradient
    least = needed / (count - 1 if rule == "linear" else count)
    if needed >= count or np.max(quantile) < least * (1 - 1e-6):  # 0.2 of 5 is 1, as in the kernel
        nearest = f"the nearest other is within {math.ceil(1000 * least) / 1000:g}"
        other = nearest if needed < count else "no quantile includes another"
        text = f"quantile is {quantile} ({rule}) of the distances of {count} gradients, and holds a client's own alone"
        warnings.warn(f"{text}: every client trains alone; {other}", stacklevel=1)


def check_sends_gradients(task: Task, training: local.LocalTraining, *, steps: bool = True) -> None:
    """Raises `ValueError` for a `training` and a `task` that do not suit methods that cluster gradients.

    That is training by epochs, with a proximal term or `span="always"`; of more than one step, unless `steps`; and a
    model with batch statistics.
    """
    needed = [
        (task.statistics is None, "the model must have no batch statistics; one with group normalisation has none"),
        (training.num_steps is not None, "give local training by steps (num_steps; --local-steps), not by epochs"),
        (steps or training.num_steps == 1, f"local training must have one step, not {training.num_steps}"),
        (is_concrete(training.prox) and training.prox == 0, "prox must be 0"),
        (training.span != "always", "span must be auto or never, since centres leave the span of a client's examples"),
    ]
    for fits, what in needed:
        if not fits:
            raise ValueError(f"the clients of this method send gradients, which are clustered: {what}")


def models_at_once(num_bytes: int, client_axis: mapping.Mapping | None) -> mapping.Mapping:
    """Returns the mapping over models, each of which compares gradients of `num_bytes`.

    Without a mapping, that is one model at a time on a CPU or TPU, which would transpose the gradients of several, and
    on a GPU as many as `MEMORY` holds. So it is on each device of an accelerator's mapping of all models at once.
    """
    target = mapping.platform_of(client_axis)
    few = mapping.chunked(max(1, MEMORY // max(num_bytes, 1)) if target == "gpu" else 1)
    if client_axis is None or (client_axis is jax.vmap and target != "cpu"):
        return few
    many = isinstance(client_axis, mapping.sharded) and client_axis.inner is jax.vmap and target != "cpu"
    return replace(client_axis, inner=few) if many else client_axis
