"""Gradient descent on a first dense layer, in the span of the client's examples.

Let a layer `W` `[d, H]` be multiplied by the client's examples `X` `[M, d]` themselves. Its gradient is `X^T D`, where
`D` `[M, H]` is that of the products `X W`. So an optimiser with updates linear in the gradients never leaves

    W = W_0 + X^T A,     X W = Z + G A,     Z = X W_0  [M, H],     G = X X^T  [M, M],

and moves `A` `[M, H]`, which begins at 0, by `D` exactly as it moves `W` by `X^T D`. With `Z` and `G` computed once per
client and round, a step on `B` examples costs `B M H` multiply-adds in this layer, not `2 B d H`. Nothing is
approximated; floating point rounds differently.

The gradient of a proximal term `mu / 2 ||W - W_0||^2`, which is `mu X^T A`, is in the span as well. A term that pulls
to another model `W'` adds one direction: with `V = W' - W_0`,

    W = W_0 + X^T A + c V,     X W = Z + G A + c X V,

the gradient of the term is `mu (X^T A + (c - 1) V)`. So `c`, a further row of `A`, begins at 0 and is pulled to 1.

A bias `b` of the layer is the weight of one more input, which is always 1: with `G + 1` in the place of `G`,
`b = b_0 + 1^T A`, and no step sums `D` over the examples.
"""

import math
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jfcl.core import Batch, DenseStart, PyTree, Task, by_platform, get_parameter, is_concrete, set_parameter
from jfcl.training.losses import mean_to_train

# The cost of reading and writing one weight in a step, in multiply-adds. Measured on a CPU with a device per core, in
# 13 cases (d 64 to 1,024, H 32 to 1,000, M 16 to 300, B 4 to 50): with it the costs below choose the faster way, or one
# within 15 % of it. With one device for both cores the span is up to 1.8 times as fast where the costs are equal.
PASS = 25
COUNTED = (0, 30, 1000, 10**6)  # steps before a trial: RAdam's first few are linear, a schedule may begin late
TOLERANCE = 1e-4  # of float32 rounding in a few steps on a few numbers, far below the effect of a non-linearity


class Span(NamedTuple):
    """The values of one client and round: `X` `[M, d]`, `Z` `[M, H]`, `G` `[M, M]` (or None, where `A` stays 0).

    All have the type of the inputs, which may have fewer digits than the parameters and `A`. With a pull to another
    model, `away` has its differences `V` `[d, H]` and those of the bias, and `away_products` are `X V` `[M, H]`.
    """

    inputs: jax.Array
    products: jax.Array
    gram: jax.Array | None
    away: tuple[jax.Array, jax.Array] | None = None
    away_products: jax.Array | None = None


def size_of(start: DenseStart, params: PyTree) -> tuple[int, int]:
    """Returns `(d, H)` of the kernel."""
    d, *width = get_parameter(params, start.kernel).shape
    return d, math.prod(width)


def plain_cost(m: int, batch_size: int, steps: int, d: int, h: int) -> int:
    """Returns the cost of a first layer `[d, H]` in a round, in multiply-adds: products, gradient, passes over it."""
    return steps * (2 * batch_size + PASS) * d * h


def span_cost(
    m: int, batch_size: int, steps: int, d: int, h: int, *, has_products: bool = False, pulled: bool = False
) -> int:
    """Returns the cost in the span of `m` examples, with one pass over the weights, or two where they are pulled.

    With `has_products`, `Z` is known.

    Example:
      >>> plain_cost(200, 200, 10, 784, 200) / span_cost(200, 200, 10, 784, 200)
      3.7...
      >>> plain_cost(200, 20, 10, 784, 200) / span_cost(200, 20, 10, 784, 200)  # one epoch does not quite repay `G`
      0.9...
    """
    ends = ((2 - has_products + pulled) * m + (1 + pulled) * PASS) * d * h
    return ends if one_full_step(m, batch_size, steps) else ends + m * m * d + steps * batch_size * m * h


def one_full_step(m: int, batch_size: int, steps: int) -> bool:
    """Returns whether a single step uses all examples: its products are `Z`, and `G` is not needed."""
    return steps == 1 and batch_size == m


def in_span(
    start: DenseStart, optimizer: optax.GradientTransformation, params: PyTree, *, pulled: bool = False
) -> DenseStart | None:
    """Returns `start`, without its bias where that leaves the span under `optimizer`; None if the kernel does."""
    if start.bias is not None and stays_in_span(optimizer, params, start.kernel, start.bias, pulled):
        return start
    return start._replace(bias=None) if stays_in_span(optimizer, params, start.kernel, None, pulled) else None


def enter(
    start: DenseStart, params: PyTree, x: jax.Array, products: jax.Array | None, *, gram: bool, anchor: PyTree | None
) -> Span:
    """Returns the `Span` of one client's inputs `x`, finite in padding too, at `params`.

    `products` are `Z`, if known, and `anchor` is the model of the proximal term, if it is not `params`.
    """
    kernel = get_parameter(params, start.kernel)
    inputs = start.rows(x, kernel)
    if products is None:
        products = inputs @ kernel.astype(inputs.dtype)
    span = Span(inputs, products, None)
    if anchor is not None:
        kernel_away = get_parameter(anchor, start.kernel) - kernel
        bias_away = jnp.zeros(kernel.shape[1:], kernel.dtype)
        if start.bias is not None:
            bias_away = get_parameter(anchor, start.bias) - get_parameter(params, start.bias)
        away_products = inputs @ kernel_away.astype(inputs.dtype) + bias_away.astype(inputs.dtype)[None]
        span = span._replace(away=(kernel_away, bias_away), away_products=away_products)
    if not gram:
        return span
    of_bias = jnp.asarray(start.bias is not None, inputs.dtype)
    return span._replace(gram=inputs @ inputs.T + of_bias)


def coefficients(start: DenseStart, span: Span, params: PyTree, anchor: PyTree) -> tuple[PyTree, PyTree]:
    """Returns the trained parameters, and what the proximal term pulls them to.

    They are `params` with `A = 0` `[M, H]` in the place of the kernel, and with `c = 0`, if any, which is pulled to 1.
    """
    kernel, (m, *width) = get_parameter(params, start.kernel), span.products.shape
    a = jnp.zeros((m if span.away is None else m + 1, *width), kernel.dtype)
    params = set_parameter(params, start.kernel, a)
    if span.away is None:
        return params, params
    if start.bias is not None:  # it moves by `A` and `c` alone
        anchor = set_parameter(anchor, start.bias, get_parameter(params, start.bias))
    return params, set_parameter(anchor, start.kernel, a.at[-1].set(1))


def products(start: DenseStart, span: Span, params: PyTree, rows: jax.Array | None) -> jax.Array:
    """Returns the layer's products `[B, H]` at some rows (None: all); `params` has `A` in the place of the kernel."""
    if span.gram is None:
        return span.products
    z, g, away = (x if x is None or rows is None else x[rows] for x in (span.products, span.gram, span.away_products))
    a = get_parameter(params, start.kernel).astype(g.dtype)
    return z + g @ a if away is None else z + g @ a[:-1] + away * a[-1:]


def loss_and_gradient(
    task: Task, start: DenseStart, span: Span, params: PyTree, batch: Batch, rows: jax.Array | None, real: jax.Array
) -> tuple[jax.Array, PyTree]:
    """Returns the mean loss `[]` of the examples at `rows` (None: all), and its gradient with that of the span."""

    def mean_loss(p, z):
        return mean_to_train(task.cost(start.apply(p, z, task.inputs_of(batch)), batch), real)

    z = products(start, span, params, rows)
    loss, (grads, d) = jax.value_and_grad(mean_loss, argnums=(0, 1))(params, z)
    a = get_parameter(params, start.kernel)
    d = d.astype(a.dtype)
    whole = rows is None and span.away is None
    rows = slice(len(d)) if rows is None else rows
    of_all = d if whole else jnp.zeros_like(a).at[rows].add(d)  # rows drawn twice count twice
    if start.bias is not None:  # it stays at its first value, and its gradient is not computed
        grads = set_parameter(grads, start.bias, jnp.zeros_like(get_parameter(params, start.bias)))
    return loss, set_parameter(grads, start.kernel, of_all)


def leave(start: DenseStart, span: Span, params: PyTree, begin: PyTree) -> PyTree:
    """Returns `params` with `W_0 + X^T A + c V` in the place of `A`; `begin` holds `W_0`, and the same of the bias."""
    kernel, a = (get_parameter(tree, start.kernel) for tree in (begin, params))
    x, bias = span.inputs, None if start.bias is None else get_parameter(begin, start.bias)
    if span.away is not None:
        c, a = a[-1:], a[:-1]
        kernel, bias = kernel + c * span.away[0], None if bias is None else bias + c[0] * span.away[1]
    moved = jnp.tensordot(x, a.astype(x.dtype), ((0,), (0,)), preferred_element_type=kernel.dtype)
    if bias is not None:
        params = set_parameter(params, start.bias, bias + _column_sums(a).astype(bias.dtype))
    return set_parameter(params, start.kernel, kernel + moved)


def _column_sums(a: jax.Array) -> jax.Array:
    """Returns the sums `[H]` of the columns of `a` `[M, H]`."""

    def reduced(a):
        return a.sum(axis=0)

    def product(a):  # a fifteenth of the reduction's time by XLA's estimate, which makes one of a single row of ones
        return (jnp.ones((2, len(a)), a.dtype) @ a)[0]

    return by_platform(a, cpu=reduced, accelerator=reduced, tpu=product)


def start_optimizer(optimizer: optax.GradientTransformation, opt_state: PyTree, params: PyTree) -> PyTree:
    """Returns `opt_state`, fresh but for its counters, for `params` with `A` in the place of the kernel."""
    fresh = optimizer.init(params)
    return jax.tree.map(lambda new, old: old if jnp.shape(new) == jnp.shape(old) else new, fresh, opt_state)


# Optimisers that stay in the span. A trial decides, since an optax optimiser has no such property.

# Results of trials, by the optimiser's `update`, kept as long as the optimiser exists.
_trials: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def stays_in_span(
    optimizer: optax.GradientTransformation, params: PyTree, kernel: str, bias: str | None, pulled: bool
) -> bool:
    """Returns whether `optimizer` moves `A` as it moves the kernel `W_0 + X^T A`, and other parameters equally.

    With the path of a `bias`, also whether it moves `A` as it moves the bias `b_0 + 1^T A`; with `pulled`, also whether
    it moves `c` as it moves kernel and bias along `V`. True of gradient descent, momentum, Nesterov, moving averages of
    gradients, and schedules; not of Adam, weight decay, or clipping. The trial is on arrays of a few random numbers in
    the shape of the tree `params`, with gradients of size 1e-8, 1 and 1e8 and unrelated values of kernel and `A`, from
    fresh states with counters of steps as in `COUNTED`. A learning rate that is a tracer is 0.3 in it.

    Cost: tenths of a second for the first of a kind, since jax compiles its operations; 20 to 40 ms for the next. The
    result is kept as long as the optimiser exists.
    """
    leaves, structure = jax.tree.flatten(params)
    case = (structure, tuple(map(jnp.shape, leaves)), kernel, bias, pulled)
    try:
        results = _trials.setdefault(optimizer.update, {})
    except TypeError:  # a callable without weak references
        results = {}
    if case not in results:
        ranks = jax.tree.map(jnp.ndim, params)
        results[case] = _is_alike(optimizer, params, kernel) and _try(optimizer, ranks, kernel, bias, pulled)
    return results[case]


def _is_alike(optimizer: optax.GradientTransformation, params: PyTree, kernel: str) -> bool:
    """Returns whether a step does the same with arrays of any size, as it does not under a mask that reads the sizes.

    It compares the programs for `params`, for those of a trial, and with few and many examples.
    """

    def shapes(shape: Callable[[jax.Array], tuple]) -> PyTree:
        return jax.tree.map(lambda p: jax.ShapeDtypeStruct(shape(p), jnp.float32), params)

    def program(tree: PyTree) -> list:
        return _operations(jax.make_jaxpr(lambda p: optimizer.update(p, optimizer.init(p), p))(tree))

    whole, width = shapes(jnp.shape), jnp.shape(get_parameter(params, kernel))[1:]
    spans = (jax.ShapeDtypeStruct((rows, *width), jnp.float32) for rows in (2, 10**5))
    trees = [whole, shapes(lambda p: (2,) * jnp.ndim(p)), *(set_parameter(whole, kernel, a) for a in spans)]
    try:
        first, *others = map(program, trees)
    except (AssertionError, TypeError, ValueError):
        return False
    return all(other == first for other in others)


def _operations(program: Any) -> list:
    """Returns the operations of a jaxpr with the arguments that they read and the operations inside them: no sizes."""

    def is_program(x: Any) -> bool:
        return hasattr(x, "eqns")

    jaxpr, operations = getattr(program, "jaxpr", program), []
    places = {id(variable): i for i, variable in enumerate(jaxpr.invars)}
    for equation in jaxpr.eqns:
        inner = filter(is_program, jax.tree.leaves(list(equation.params.values()), is_leaf=is_program))
        read = [places.get(id(variable)) for variable in equation.invars]
        operations.append((equation.primitive.name, read, [_operations(part) for part in inner]))
    return operations


def _try(optimizer: optax.GradientTransformation, ranks: PyTree, kernel: str, bias: str | None, pulled: bool) -> bool:
    rng = np.random.default_rng(0)
    width = (2,) * (get_parameter(ranks, kernel) - 1)

    def draw(rows: int) -> PyTree:  # parameters, or gradients, with a kernel of `rows` rows
        values = jax.tree.map(lambda rank: rng.normal(size=(2,) * rank).astype(np.float32), ranks)
        return set_parameter(values, kernel, rng.normal(size=(rows, *width)).astype(np.float32))

    x = rng.normal(size=(4, 3)).astype(np.float32)
    many = 5 if pulled else 4
    short = draw(many)
    # The other parameters are the same on both sides; the kernel's are unrelated, so that any use of them shows.
    full = set_parameter(short, kernel, get_parameter(draw(3), kernel))
    slopes = [draw(many) for _ in range(4)]  # of as many steps
    if bias is not None:  # in the span it has no gradient
        slopes = [set_parameter(tree, bias, np.zeros_like(get_parameter(tree, bias))) for tree in slopes]
    away, bias_away = (rng.normal(size=shape).astype(np.float32) for shape in ((3, *width), width))

    def back(tree):  # from A to W, and to the bias
        a = get_parameter(tree, kernel)
        a, c = a[:4], a[4] if pulled else np.zeros_like(a[0])
        if bias is not None:
            tree = set_parameter(tree, bias, a.sum(axis=0) + c * bias_away)  # by nothing else, such as its decay
        return set_parameter(tree, kernel, np.tensordot(x.T, a, axes=1) + c * away)

    def gradients(scale):  # of W, and of A
        scaled = jax.tree.map(lambda g: g * np.float32(scale), slopes)
        return list(map(back, scaled)), scaled

    def updates(full_slopes, slopes):
        pairs = []
        for done in COUNTED:
            first, second = (_counted(optimizer.init(params), done) for params in (full, short))
            for f, s in zip(full_slopes, slopes, strict=True):
                u, first = optimizer.update(f, first, full)
                v, second = optimizer.update(s, second, short)
                pairs.append((u, v))
        return pairs

    try:
        with jax.ensure_compile_time_eval():
            traced, shapes = jax.make_jaxpr(updates, return_shape=True)(*gradients(1))
            constants = [c if is_concrete(c) else _stand_in(c) for c in traced.consts]
            moved = False
            for scale in (1e-8, 1, 1e8):
                inputs = jax.tree.leaves(gradients(scale))
                values = map(np.asarray, jax.core.eval_jaxpr(traced.jaxpr, constants, *inputs))
                for u, v in jax.tree.unflatten(jax.tree.structure(shapes), values):
                    if not all(map(_close, jax.tree.leaves(u), jax.tree.leaves(back(v)))):
                        return False
                    moved |= bool(np.any(get_parameter(u, kernel)))
            return moved
    except (AssertionError, TypeError, ValueError):  # an optimiser for other shapes, or that needs more than gradients
        return False


def _counted(opt_state: PyTree, done: int) -> PyTree:
    """Returns `opt_state` with all counters, whole numbers `[]`, at `done`."""

    def one(x):
        return jnp.full_like(x, done) if jnp.ndim(x) == 0 and jnp.issubdtype(x.dtype, jnp.integer) else x

    return jax.tree.map(one, opt_state)


def _stand_in(tracer: jax.Array) -> jax.Array:
    """Returns a value for a hyperparameter that is a tracer."""
    return jnp.full(tracer.shape, 0.3 if jnp.issubdtype(tracer.dtype, jnp.inexact) else 1, tracer.dtype)


def _close(u: jax.Array, v: jax.Array) -> bool:
    u, v = np.asarray(u, np.float64), np.asarray(v, np.float64)
    return bool(np.isfinite(u).all() and np.abs(u - v).max(initial=0) <= TOLERANCE * np.abs(v).max(initial=0))
