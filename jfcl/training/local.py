"""Local training, written for ONE client; `jfcl.mapping` maps it over all clients."""

import warnings
import zlib
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jfcl.core.checks import check, is_concrete
from jfcl.core.options import Interval, OneOf, Range, Real, check_options
from jfcl.core.packed import unpacked
from jfcl.core.parameters import copied, divided, joined, named_parameters, trained_part
from jfcl.core.platforms import at_most
from jfcl.core.types import Batch, DenseStart, PyTree, Task, check_task, dense_start
from jfcl.training import optimizer as optimizers
from jfcl.training import span as spans
from jfcl.training.losses import fill_padding, training_loss

KEEP = ("nothing", "schedule", "everything")
SPAN = ("auto", "never", "always")
MODEL_STREAM = zlib.crc32(b"randomness of the model")  # folded into a client's key, which training splits, too


class LocalTraining(NamedTuple):
    """The local training of one round; built by `local_training`, which checks the arguments."""

    optimizer: optax.GradientTransformation
    num_steps: int | None
    num_epochs: int | None
    batch_size: int | None
    prox: Any
    augment: Callable[[jax.Array, Batch], Batch] | None
    keep: str
    span: str
    each_step: bool = False  # for methods: `Trained.losses`


class Trained(NamedTuple):
    """The result of one client's local training.

    Attributes:
      params: the trained model.
      loss: `[]`, the mean over local steps of the batch loss before each step, without the proximal term.
      num_steps: `[]` int32, local steps done.
      opt_state: the optimiser's state, for `keep="everything"`; `()` if the client trained in the span of its examples.
      losses: `[S]`, the batch loss before each of the local steps (`LocalTraining.each_step`), as many as a client may
        do, with 0 after its last one; else `()`.
    """

    params: PyTree
    loss: jax.Array
    num_steps: jax.Array
    opt_state: PyTree
    losses: jax.Array | tuple[()] = ()


def local_training(
    optimizer: optax.GradientTransformation,
    *,
    num_steps: Annotated[int | None, Range(1)] = None,
    num_epochs: Annotated[int | None, Range(1)] = None,
    batch_size: Annotated[int | None, Range(1)] = None,
    prox: Annotated[Real, Interval("[0, inf)")] = 0.0,
    augment: Callable[[jax.Array, Batch], Batch] | None = None,
    keep: Annotated[str, OneOf(KEEP)] = "nothing",
    span: Annotated[str, OneOf(SPAN)] = "auto",
) -> LocalTraining:
    """Defines the clients' training, by exactly one of `num_steps` and `num_epochs`, full batch or mini-batches.

    Args:
      optimizer: any optax optimiser, e.g. `optax.sgd(0.1, momentum=0.9)`, that needs no more than gradients, parameters
        and, as `optax.polyak_sgd` does, the loss of the batch (`value`). One that evaluates the model itself, as
        `optax.lbfgs`, or keeps two copies of it, as `optax.lookahead`, is refused by the method.
      num_steps: local steps a round. With mini-batches, the client's examples are shuffled once a round and used in
        turn, from the start again after the last, so that every batch is full.
      num_epochs: passes over the client's examples a round, reshuffled before each; a pass ends with a smaller batch
        where the size is not a multiple of `batch_size`, so clients with more examples do more steps.
      batch_size: examples per step; `None`, or at least `M`, means all of them at every step (no shuffling).
      prox: FedProx's mu, 0 or more: adds `mu / 2 * ||params - start||^2` to the loss (Li et al. 2020, eq. 2).
      augment: `(key, batch) -> batch`, applied to every batch, e.g. random flips.
      keep: the part of the optimiser's state that a client keeps for its next round. `"nothing"` restarts momentum and
        schedules; `"schedule"` restarts momentum and continues a learning-rate schedule, if its count is a state of its
        own, unlike that of `optax.contrib.prodigy`; `"everything"` keeps the whole state of each client (`O(N D)`
        memory). A schedule that continues counts every round, also those in which the client does not train, and each
        with the steps of the present one (with `num_epochs`, they change with the examples of drifting data); it begins
        again after rounds that are part of a method's `init`, as in `jfcl.one_shot`, except restarts. Random keys in
        the state, as in that of `optax.add_noise`, are never kept: the noise of a client follows from the key of the
        run, and differs between rounds and clients.
      span: whether a first dense layer on the raw inputs is trained in the span of the client's examples, which is the
        same except for rounding (see `jfcl.training.span`): `"auto"`, where it is possible and costs less; `"never"`;
        `"always"`, or a `ValueError` with the reason why it is not possible.

    Returns:
      `LocalTraining`, the second argument of every method.

    Raises:
      ValueError: for arguments outside these ranges.

    Warns:
      UserWarning: the optimiser has a learning-rate schedule, which `keep="nothing"` restarts in every round.

    Example:
      >>> import optax
      >>> local_training(optax.sgd(0.1), num_steps=10).num_steps
      10
    """
    check_options(local_training, locals())
    is_optimizer = hasattr(optimizer, "init") and hasattr(optimizer, "update")
    check(is_optimizer, "optimizer", optimizer, "an optax optimiser, such as optax.sgd(0.1)")
    if (num_steps is None) == (num_epochs is None):
        raise ValueError(f"give exactly one of num_steps and num_epochs, got {num_steps!r} and {num_epochs!r}")
    if is_concrete(prox):
        check(jnp.ndim(prox) == 0, "prox", prox, "one number")
        prox = float(prox)
    check(augment is None or callable(augment), "augment", augment, "a function (key, batch) -> batch, or None")
    is_scheduled = _has_state(optimizer, _counts_schedule)
    accumulates = is_scheduled and _has_state(optimizer, lambda state: isinstance(state, optax.MultiStepsState))
    accepted = "nothing for a schedule in optax.MultiSteps, which does not count local steps"
    check(keep == "nothing" or not accumulates, "keep", keep, accepted)
    if keep == "nothing" and is_scheduled:
        warnings.warn(
            "the optimizer's schedule begins again in every round; with keep='schedule' it counts on over the rounds",
            stacklevel=2,
        )
    return LocalTraining(optimizer, num_steps, num_epochs, batch_size, prox, augment, keep, span)


def _has_state(optimizer: optax.GradientTransformation, kind: Callable[[Any], bool]) -> bool:
    """Returns whether the state of `optimizer`, for a small model, has a part for which `kind(part)` is true."""
    try:
        state = jax.eval_shape(optimizer.init, {"w": jax.ShapeDtypeStruct((1,), jnp.float32)})
    except Exception:  # an optimiser for the parameters of one model, as those with a mask may be
        return False
    return any(map(kind, jax.tree.leaves(state, is_leaf=kind)))


def _counts_schedule(state: Any) -> bool:
    """Returns whether `state`, a part of an optimiser's state, counts steps and nothing else, as for a schedule."""
    return getattr(state, "_fields", ()) == ("count",)


def check_parts(task: Any, training: Any) -> None:
    """Raises `ValueError` unless `task` is a task and `training` a training; they are easily exchanged."""
    check_task(task)
    accepted = "the result of jfcl.local_training(optimizer, num_steps=...)"
    check(isinstance(training, LocalTraining), "training", type(training).__name__, accepted)
    optimizers.check_optimizer("optimizer", training.optimizer, task)


def examples_per_step(training: LocalTraining, max_examples: int) -> int:
    """Returns `B`: the batch size, at most `max_examples`; all of these where it is None."""
    return max_examples if training.batch_size is None else min(training.batch_size, max_examples)


def most_steps(training: LocalTraining, max_examples: int) -> int:
    """Returns the local steps in one round of a client with `max_examples` examples."""
    return training.num_steps or training.num_epochs * -(-max_examples // examples_per_step(training, max_examples))


def steps_per_round(training: LocalTraining, size: jax.Array, max_examples: int) -> jax.Array:
    """Returns the local steps in one round, `[]` int32, of a client with `size` of at most `max_examples` examples."""
    if training.num_steps is not None:
        return jnp.asarray(training.num_steps, jnp.int32)
    batches = -(-jnp.asarray(size, jnp.int32) // examples_per_step(training, max_examples))
    return (training.num_epochs * batches).astype(jnp.int32)


def start_optimizer(training: LocalTraining, params: PyTree, steps_done: jax.Array) -> PyTree:
    """Returns a fresh optimiser state; unless `keep="nothing"`, its schedule has counted `steps_done` steps."""
    state = training.optimizer.init(params)
    return state if training.keep == "nothing" else at_step(state, steps_done)


def at_step(opt_state: PyTree, steps_done: jax.Array) -> PyTree:
    """Returns `opt_state` with all schedules, also that of `optax.add_noise`, at `steps_done` steps.

    Adam's own count belongs to its moments, and does not change.
    """

    def counts(state):
        return _counts_schedule(state) or isinstance(state, optax.AddNoiseState)

    def one(state):
        # The count is the first field; the optimiser of several models (`of_each`) has one for each.
        return state._replace(count=jnp.full_like(state[0], steps_done)) if counts(state) else state

    return jax.tree.map(one, opt_state, is_leaf=counts)


def shuffled_rows(key: jax.Array, size: jax.Array, max_examples: int) -> jax.Array:
    """Returns the rows `[M]` of a client's real examples in random order, those of padding behind them."""
    draws = jax.random.uniform(key, (max_examples,))
    return jnp.argsort(jnp.where(jnp.arange(max_examples) < size, draws, jnp.full_like(draws, 2)))


def take_rows(examples: Batch, rows: jax.Array, size: jax.Array) -> Batch:
    """Returns one client's examples at `rows` of real ones, which also fill a short batch; zeros without any."""
    return unpacked(jax.tree.map(lambda x: jnp.where(size > 0, x[rows], jnp.zeros_like(x[rows])), examples))


def augmented(task: Task, training: LocalTraining, key: jax.Array, batch: Batch) -> Batch:
    """Returns `batch` after the augmentation, if there is one, of inputs in the shape of the task's."""
    if training.augment is None:
        return batch
    if task.input_shape is not None:
        batch = {**batch, "x": batch["x"].reshape(len(batch["x"]), *task.input_shape)}
    batch = training.augment(key, copied(batch))
    check(batch is not None, "augment", None, "a function that returns the new batch")
    return batch


def draw_batch(
    task: Task, training: LocalTraining, key: jax.Array, examples: Batch, size: jax.Array
) -> tuple[Batch, jax.Array]:
    """Draws the batch of one client's next step, `(batch [B, ...], real [B] bool)`: all examples, or random ones."""
    m = jax.tree.leaves(examples)[0].shape[0]
    order_key, augment_key = jax.random.split(key)
    if training.batch_size is None or training.batch_size >= m:
        batch, real = fill_padding(examples, size), jnp.arange(m) < size
    else:
        slots = jnp.arange(training.batch_size)
        rows = shuffled_rows(order_key, size, m)[slots % jnp.maximum(size, 1)]
        batch, real = take_rows(examples, rows, size), slots < size
    return augmented(task, training, augment_key, batch), real


def optimizer_at(
    training: LocalTraining, params: PyTree, opt_state: PyTree, rounds: jax.Array, size: jax.Array, max_examples: int
) -> PyTree:
    """Returns one client's optimiser state at the start of a round after `rounds` of them; `opt_state` is its last."""
    steps_done = rounds * steps_per_round(training, size, max_examples)
    if training.keep == "everything":  # schedules count all rounds, with this client or without
        return at_step(opt_state, steps_done)
    return start_optimizer(training, params, steps_done)


def carried(training: LocalTraining, opt_state: PyTree) -> PyTree:
    """Returns the part of a client's optimiser state that a method's state keeps: `()` unless `keep="everything"`."""
    return optimizers.as_data(opt_state) if training.keep == "everything" else ()


def rekeyed(training: LocalTraining, key: jax.Array, params: PyTree, opt_state: PyTree) -> PyTree:
    """Returns `opt_state` with all random keys replaced by those of one client and round, derived from `key`."""
    return optimizers.rekeyed(key, opt_state, jax.eval_shape(training.optimizer.init, params))


def start_in_span(
    task: Task, training: LocalTraining, params: PyTree, max_examples: int, pulled: bool, has_products: bool
) -> DenseStart | None:
    """Returns the first layer that `train` trains in the span of the client's examples; None if it does not.

    With `pulled`, the proximal term pulls to another model than `params`; with `has_products`, those of the layer and
    the examples are known.

    Raises:
      ValueError: with `span="always"`, why it cannot.
    """
    start, found = dense_start(task), None
    if training.span == "never":
        return None
    if training.span == "auto" and start is not None:
        steps = examples_per_step(training, max_examples), most_steps(training, max_examples)
        counts = (max_examples, *steps, *spans.size_of(start, params))
        if spans.span_cost(*counts, has_products=has_products, pulled=pulled) >= spans.plain_cost(*counts):
            return None
    reason = "the optimizer is not linear in the gradients alone (as Adam, weight decay and clipping are not)"
    if start is None:
        reason = "the task has no dense_start (that of its apply)"
    elif training.augment is not None:
        reason = "augment changes the examples"
    elif training.keep == "everything":
        reason = 'with keep="everything" momentum comes from other rounds, and so from outside'
    else:
        found = spans.in_span(start, training.optimizer, params, pulled=pulled)
    fits = found is not None or training.span == "auto"
    check(fits, "span", "always", f"auto or never here: {reason}")
    return found


def loss_and_gradient(
    task: Task, key: jax.Array | None, params: PyTree, statistics: PyTree, batch: Batch, real: jax.Array
) -> tuple[jax.Array, PyTree, PyTree]:
    """Returns `(loss [], gradient, statistics)` of one model on a batch `[B, ...]`; `params` are without statistics."""

    def mean_loss(p):
        loss, new = training_loss(task, key, joined(p, statistics), batch, real)
        return loss, divided(task.statistics, new)[1]

    for name, p in named_parameters(params).items():
        accepted = "of floating-point numbers; keep what is not trained outside the parameters"
        check(jnp.issubdtype(p.dtype, jnp.inexact), f"the parameter {name}", p.dtype.name, accepted)
    (loss, statistics), grads = jax.value_and_grad(mean_loss, has_aux=True)(params)
    return loss, grads, statistics


def near_anchor(prox: Any, loss: jax.Array, grads: PyTree, params: PyTree, anchor: PyTree) -> tuple[jax.Array, PyTree]:
    """Adds FedProx's term, `prox / 2 * ||params - anchor||^2`, to the loss `[]`, and its gradient to `grads`."""
    away = jax.tree.map(jnp.subtract, params, anchor)
    squares = sum(jnp.square(x.astype(jnp.float32)).sum() for x in jax.tree.leaves(away))
    loss = loss + (0.5 * jnp.asarray(prox, jnp.float32) * squares).astype(loss.dtype)
    return loss, jax.tree.map(lambda g, x: g + jnp.asarray(prox, x.dtype) * x, grads, away)


def train(
    task: Task,
    training: LocalTraining,
    key: jax.Array,
    params: PyTree,
    examples: Batch,
    size: jax.Array,
    opt_state: PyTree,
    rounds: jax.Array | None = None,
    *,
    anchor: PyTree | None = None,
    products: jax.Array | None = None,
) -> Trained:
    """Trains one client's model on its own examples.

    Args:
      task, training: loss and model; from `local_training`.
      key: this client's key for this round.
      params: the model to start from.
      examples: pytree of `[M, ...]`.
      size: `[]` int32, how many of them are real. With 0 the loss is 0, and the result has no use: weight decay, for
        one, still moves the model.
      opt_state: the client's last, as in a method's state: `()` unless `keep="everything"`. Without `rounds`, that of
        the optimiser, from `start_optimizer`; random keys in it are replaced. Unless `training` has `keep="everything"`
        or `span="never"`, all of it but counters of steps must be as from `start_optimizer`.
      rounds: `[]` int32, rounds of the method done before this one; `opt_state` of the result is then the client's next
        one in the method's state.
      anchor: the model that the proximal term pulls to; `params` if None.
      products: `[M, H]`, of `params`'s first dense layer and the examples after `fill_padding`, if known; only training
        in the span uses them.

    Returns:
      `Trained`. Cost: `num_steps` forward and backward passes over a batch.
    """
    from chex import assert_trees_all_equal_shapes  # a twentieth of a second, which `jfcl --help` does not spend

    m = jax.tree.leaves(examples)[0].shape[0]
    batch_size = examples_per_step(training, m)
    full_batch = batch_size == m
    has_prox = not (is_concrete(training.prox) and training.prox == 0)
    pull = trained_part(task, anchor) if has_prox and anchor is not None else None
    params, statistics = divided(task.statistics, params)
    if rounds is not None:
        opt_state = optimizer_at(training, params, opt_state, rounds, size, m)
    opt_state = rekeyed(training, key, params, opt_state)
    start = start_in_span(task, training, params, m, pull is not None, products is not None)
    begin, anchor = params, params if pull is None else pull
    if full_batch or start is not None:
        examples = fill_padding(examples, size)
    if start is not None:
        gram = not spans.one_full_step(m, batch_size, most_steps(training, m))
        span = spans.enter(start, begin, task.inputs_of(examples), products, gram=gram, anchor=pull)
        params, anchor = spans.coefficients(start, span, begin, anchor)
        opt_state = spans.start_optimizer(training.optimizer, opt_state, params)
    order_key, augment_key = jax.random.split(key)
    model_key = jax.random.fold_in(key, MODEL_STREAM)

    def step(t, carry, rows, real):
        """Does one local step on the examples at `rows` (None: all)."""
        params, statistics, opt_state, losses = carry
        batch = examples if rows is None else take_rows(examples, rows, size)
        batch = augmented(task, training, jax.random.fold_in(augment_key, t), batch)
        step_key = None if task.train_loss is None else jax.random.fold_in(model_key, t)
        if start is None:
            loss, grads, statistics = loss_and_gradient(task, step_key, params, statistics, batch, real)
        else:
            loss, grads = spans.loss_and_gradient(task, start, span, params, batch, rows, real)
        objective = loss
        if has_prox:
            objective, grads = near_anchor(training.prox, loss, grads, params, anchor)
        updates, opt_state = optimizers.optimizer_step(training.optimizer, grads, opt_state, params, objective)
        assert_trees_all_equal_shapes(params, updates)  # a step is of the model's shapes, or would broadcast
        loss = loss.astype(losses.dtype)
        losses = losses.at[t].set(loss) if training.each_step else losses + loss
        return optax.apply_updates(params, updates), statistics, opt_state, losses

    losses = jnp.zeros(most_steps(training, m) if training.each_step else ())  # of each step, or their sum
    slots, carry = jnp.arange(batch_size), (params, statistics, opt_state, losses)
    num_steps = steps_per_round(training, size, m)
    if full_batch:

        def full_step(t, carry):
            return step(t, carry, None, jnp.arange(m) < size)

        # A static count where there is one: XLA's loops over a traced count cannot be unrolled or vmapped as cheaply.
        with at_most(most_steps(training, m)):
            carry = jax.lax.fori_loop(0, training.num_steps or num_steps, full_step, carry)
    elif training.num_steps is not None:
        order, cycle = shuffled_rows(order_key, size, m), jnp.maximum(size, 1)

        def cyclic_step(t, carry):
            return step(t, carry, order[(t * batch_size + slots) % cycle], slots < size)

        carry = jax.lax.fori_loop(0, training.num_steps, cyclic_step, carry)
    else:
        batches = -(-size // batch_size)

        def epoch(e, carry):
            order = shuffled_rows(jax.random.fold_in(order_key, e), size, m)

            def batch_step(b, c):
                positions = b * batch_size + slots
                return step(e * batches + b, c, order[jnp.minimum(positions, size - 1)], positions < size)

            with at_most(-(-m // batch_size)):
                return jax.lax.fori_loop(0, batches, batch_step, carry)

        carry = jax.lax.fori_loop(0, training.num_epochs, epoch, carry)
    params, statistics, opt_state, losses = carry
    if start is not None:
        params, opt_state = spans.leave(start, span, params, begin), ()
    loss = losses.sum() / jnp.maximum(num_steps, 1).astype(losses.dtype)
    opt_state = opt_state if rounds is None else carried(training, opt_state)
    return Trained(joined(params, statistics), loss, num_steps, opt_state, losses if training.each_step else ())
