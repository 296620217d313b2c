"""IFCA, the Iterative Federated Clustering Algorithm (Ghosh, Chung, Yin, Ramchandran 2020, Algorithm 2)."""

import zlib
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Unpack

import jax
import jax.numpy as jnp

from jfcl import mapping
from jfcl.core.checks import check, require
from jfcl.core.clients import drifts
from jfcl.core.options import MOST_ADDED, MOST_REPEATED, Interval, Needs, OneOf, Range
from jfcl.core.parameters import get_parameter, with_fixed
from jfcl.core.types import Algorithm, Batch, Clients, PyTree, Served, Task, dense_start
from jfcl.mapping.memory import in_lots
from jfcl.methods.averaging import Averaging, AveragingState, averaging
from jfcl.methods.options import AVERAGING, SCOPES, Count, Options, Rounds, factory
from jfcl.methods.restarts import with_balanced_start, with_restarts
from jfcl.training.local import LocalTraining, augmented, draw_batch
from jfcl.training.losses import fill_padding, lowest_loss, mean_loss, of_each_model, under_all

AVERAGE = ("models", "gradients")
IDENTITY_STREAM = zlib.crc32(b"examples to compare models on")  # folded into a client's key of a round


@factory(*AVERAGING, *SCOPES, "dp", weights="equal")
def ifca(
    task: Task,
    training: LocalTraining,
    *,
    num_clusters: Count,
    average: Annotated[str, OneOf(AVERAGE)] = "models",
    stable_rounds: Annotated[int | None, Range(1, MOST_ADDED)] = None,
    identity_batch: Annotated[int | None, Range(1)] = None,
    identity_augment: bool = False,
    min_share: Annotated[float | None, Interval("(0, 1]")] = None,
    restarts: Rounds = 1,
    restart_rounds: Annotated[int, Range(1, MOST_REPEATED), Needs("restarts")] = 1,
    **options: Unpack[Options],
) -> Algorithm:
    """Trains `K` models: each round every client trains the one of lowest loss on its data; the server averages them.

    Args:
      task: from `jfcl.models`, or your own.
      training: from `jfcl.local_training`. For `average="gradients"` it must be one step; its learning rate is the
        paper's gamma.
      num_clusters: `K`, the number of models.
      average: `"models"` (option II): a model becomes the mean of its clients' trained models; `"gradients"`
        (option I): it moves by the sum of its clients' gradients divided by the number `m` of machines. These are all
        clients with examples, in the cohort or not, with finite updates or not (line 14 of Algorithm 2); with
        `weights="size"`, `m` is the number of their examples. In a population (`jfcl.simulate`) they are the clients
        that answered.
      stable_rounds: the shortcut of section 4.3: while every client has kept its cluster in its last `stable_rounds`
        rounds, clients get their own model only and do not compare the others; default: never. In a population, this
        is decided in each round for its cohort.
      identity_batch: number of examples, drawn in each round, on which a client compares the models; default: all of
        its own (the paper). With `num_steps` and the same batch size they are the first batch of its training.
      identity_augment: a client compares the models on examples that the training's augmentation changes, with other
        random numbers for each model, as the authors' code for CIFAR-10 does; default: on the examples as they are (the
        paper). With an augmentation that changes all images alike, choices are partly random while the
        models differ little: clients that all chose one model may choose different ones again.
      min_share: initial models are drawn again until each is chosen by this share of a cohort; default: they are drawn
        once (the paper). The authors' code for CIFAR-10 has 0.35. Models of `init_params` are not drawn. The
        models that are sent for the draws are not in `bytes_down`.
      restarts: number of random initialisations; the one of lowest training loss after `restart_rounds` rounds is kept.
        A simulation counts these rounds before its own; their cost is in its first record (see `with_restarts`).
      restart_rounds: rounds of each of the `restarts`.

    Returns:
      `Algorithm` with an `AveragingState`. A client compares the models with its `personal` parameters in each. A model
      that no client picks keeps its parameters. Cost of a round: `K` forward passes over each client's data plus its
      local training; memory `O(chunk D + K D)`. The first dense layers of the `K` passes are one product, with which
      training in the span of the examples begins (`jfcl.training.span`). Bytes: each client gets `K` models (shared
      layers once) and sends one.

    Raises:
      ValueError: an option outside its range; `K` larger than the number of clients; more than one step with
        `"gradients"`; a shortcut that could begin while restarts are still compared; `min_share` above `1 / K`;
        restarts, `min_share` or the shortcut with `dp`; as in `jfcl.fedavg`. `check` refuses the shortcut with drifting
        data.

    Example:
      >>> import jax, jfcl, numpy as np, optax
      >>> task = jfcl.models.task(lambda key: {"b": jax.random.normal(key)}, lambda p, x: x + p["b"], kind="regression")
      >>> y = np.repeat(np.float32([1, 5, 1, 5]), 4).reshape(4, 4)
      >>> clients = jfcl.Clients({"x": np.zeros((4, 4), np.float32), "y": y}, np.full(4, 4, np.int32))
      >>> training = jfcl.local_training(optax.sgd(0.5), num_steps=1)
      >>> algorithm = jfcl.ifca(task, training, num_clusters=2, init_params={"b": np.float32([0, 9])})
      >>> state, _ = jfcl.rollout(algorithm, clients, key=jax.random.key(0), num_rounds=1)
      >>> state.params["b"].tolist(), state.cluster.tolist()
      ([1.0, 5.0], [0, 1, 0, 1])
    """
    init_params, dp, client_axis = options["init_params"], options["dp"], options["client_axis"]
    check(restarts == 1 or init_params is None, "restarts", restarts, "1 with init_params: all would start alike")
    if min_share is not None:
        most = f"at most 1 / {num_clusters}, an equal share for each model"
        check(num_clusters * min_share <= 1, "min_share", min_share, most)
        enough = options["cohort"] is None or options["cohort"] >= num_clusters
        check(enough, "cohort", options["cohort"], f"at least the {num_clusters} models, for min_share")
    steps = f"{average}, with num_steps={training.num_steps}"
    check(average == "models" or training.num_steps == 1, "average", steps, "models, or gradients of 1 local step")
    if stable_rounds is not None:
        fits = restarts == 1 or stable_rounds > restart_rounds
        check(fits, "stable_rounds", stable_rounds, f"more than the {restart_rounds} rounds of each restart")
    left_out = (restarts, stable_rounds, min_share) == (1, None, None)
    why = "they decide without noise"
    require(dp is None or left_out, f"leave out restarts, stable_rounds and min_share with dp: {why}")
    estimate = training._replace(batch_size=identity_batch, augment=None)

    # The products of the first layers with which a client chose its model begin its training, but on a TPU it is faster
    # to compute them again: there the K losses then keep no products, and the large product ends in the activations.
    comparing = task._replace(dense_start=None) if mapping.platform_of(client_axis) == "tpu" else task

    def choose(params):
        of_all = under_all(comparing, params) if options["personal"] is None else None

        def choice(key, examples, size, cluster, unchanged, personal):
            losses_of = of_all or under_all(with_fixed(task, personal), params)

            def compare():
                batch, count = examples, size
                if identity_batch is not None:  # with the key of the training, hence its first batch under num_steps
                    batch, real = draw_batch(task, estimate, key, examples, size)
                    count = real.sum()
                if identity_augment:
                    model = with_fixed(task, personal)
                    losses, products = losses_when_changed(model, training, params, key, batch, count), None
                else:
                    losses, products = losses_of(batch, count)
                best = jnp.argmin(losses).astype(jnp.int32)
                reusable = products is not None and identity_batch is None
                return best, jnp.ones((), bool), products[:, best] if reusable else None

            def stay():
                first = None if jax.tree.leaves(personal) else dense_start(comparing)
                products = None
                if first is not None and identity_batch is None and not identity_augment:
                    kernel = get_parameter(params, first.kernel)[cluster]
                    inputs = first.rows(comparing.inputs_of(fill_padding(examples, size)), kernel)
                    products = inputs @ kernel.astype(inputs.dtype)
                return cluster, jnp.zeros((), bool), products

            return compare() if stable_rounds is None else jax.lax.cond(unchanged < stable_rounds, compare, stay)

        return choice

    serve = LowestLoss(task, num_clusters, client_axis)
    choices = {"start": serve.choose, "choose": choose, "divide_by_all": average == "gradients"}
    rules = Averaging(task, training, num_clusters, at_most_clients=True, **choices, **options)
    algorithm = averaging(rules)._replace(serve=serve)
    if stable_rounds is not None:
        algorithm = algorithm._replace(check=partial(refuse_drift, stable_rounds))
    if min_share is not None and init_params is None:
        algorithm = with_balanced_start(algorithm, min_share=min_share, cohort=options["cohort"])
    if restarts == 1:
        return algorithm
    return with_restarts(algorithm, num_restarts=restarts, num_rounds=restart_rounds)


def refuse_drift(stable_rounds: int, clients: Clients) -> None:
    """Raises `ValueError` for drifting data, where clients would never compare the models again once all are stable."""
    accepted = "left out for drifting data: once all are stable, no client would compare the models again"
    check(not drifts(clients), "stable_rounds", stable_rounds, accepted)


@dataclass(frozen=True)  # equal ones share programs; a tuple would equal those of other classes
class LowestLoss:
    """`Algorithm.serve` of methods in which a client chooses the model of lowest loss."""

    task: Task
    num_clusters: int
    client_axis: mapping.Mapping

    def __call__(self, state: AveragingState, clients: Clients | None) -> Served:
        """Returns the models of lowest loss on the clients' examples; without these, those that they chose last."""
        cluster, personal = state.cluster, state.personal
        if clients is not None and self.num_clusters > 1:
            cluster = self.choose(state.params, clients, personal)
        return Served(state.params, cluster, personal)

    def choose(self, params: PyTree, clients: Clients, personal: PyTree = ()) -> jax.Array:
        """Returns the model of lowest loss `[N]` int32 of each client."""
        axis = in_lots(self.client_axis, self.task, clients, self.num_clusters)
        return lowest_loss(self.task, params, clients, personal=personal, client_axis=axis)


def losses_when_changed(
    task: Task, training: LocalTraining, params: PyTree, key: jax.Array, examples: Batch, size: jax.Array
) -> jax.Array:
    """Returns one client's mean loss under each of `K` models, `[K]`, each on examples that are changed for it alone.

    `key` is that of the client's training. The loss of a model is infinite where it is not finite.
    """
    examples = fill_padding(examples, size)

    def one(key, model):
        return mean_loss(task, model, augmented(task, training, key, examples), size)

    keys = jax.random.split(jax.random.fold_in(key, IDENTITY_STREAM), len(jax.tree.leaves(params)[0]))
    losses = of_each_model(task, one, keys, params)
    return jnp.where(jnp.isfinite(losses), losses, jnp.full_like(losses, jnp.inf))
