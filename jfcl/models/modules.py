"""Modules of flax.linen and flax.nnx as pure functions of one pytree of parameters, for training and for evaluation."""

import contextlib
import contextvars
import inspect
import re
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import errors, traverse_util
from jax.extend.core import get_opaque_trace_state

from jfcl.core import PyTree, check, require

# The paths of layers with frozen statistics: in training too, they normalise with their running statistics.
FROZEN_LAYERS = contextvars.ContextVar("frozen_layers", default=frozenset())
IS_TRAINING = ("train", "training", "is_train", "is_training")
IS_NOT_TRAINING = ("deterministic", "use_running_average", "inference")
OTHER_STREAMS = zlib.crc32(b"streams other than dropout's")  # folded into a client's key of a step
FLAGS = (*IS_TRAINING, *IS_NOT_TRAINING)
# Operations that keep the values of a softmax, and those that carry its sums.
SAME_VALUES = ("reshape", "squeeze", "convert_element_type", "copy")
OF_SUMS = (*SAME_VALUES, "broadcast_in_dim")
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Network(NamedTuple):
    """A module as functions, most as in `Task`; statistics stand beside the parameters of their layer."""

    name: str
    init: Callable[[jax.Array], PyTree]
    apply: Callable[[PyTree, jax.Array], jax.Array]
    # (key, params, x, real) -> (outputs, params), see `Task.train_loss`; None where it is `apply`.
    train: Callable[[jax.Array, PyTree, jax.Array, jax.Array], tuple[jax.Array, PyTree]] | None = None
    represent: Callable[[PyTree, jax.Array], jax.Array] | None = None
    statistics: Callable[[str], bool] | None = None
    head: str | None = None


def module_name(module: Any) -> str:
    """Returns the name of a module's class, or of the function that makes modules, for errors."""
    return getattr(getattr(module, "func", module), "__name__", type(module).__name__)


def training_flag(module: Any, name: str, argument: str | None) -> tuple[dict[str, bool], dict[str, bool]]:
    """Returns the arguments of `module.__call__` in evaluation and in training; empty ones where there is no flag."""
    arguments = inspect.signature(module.__call__).parameters
    if argument is not None:
        check(argument in arguments, "training_argument", argument, f"an argument of {name}: {', '.join(arguments)}")
    flag = next((a for a in (argument, *FLAGS) if a in arguments), None)
    for other, parameter in list(arguments.items())[1:]:
        if other != flag and parameter.default is parameter.empty and parameter.kind not in VARIADIC:
            remedy = f"give it a default, or, if it says whether it trains, name it by training_argument={other!r}"
            raise ValueError(f"{name}.__call__ needs the argument {other!r}: {remedy}")
    trains = flag not in IS_NOT_TRAINING
    return ({}, {}) if flag is None else ({flag: not trains}, {flag: trains})


def _booleans(module: Any) -> dict[str, bool]:
    """Returns the boolean arguments of `module.__call__` and their defaults."""
    arguments = inspect.signature(module.__call__).parameters
    return {name: argument.default for name, argument in arguments.items() if isinstance(argument.default, bool)}


def check_flag(module: Any, name: str, training: dict[str, bool], draws: Callable[[dict[str, bool]], bool]) -> None:
    """Refuses a module that draws random numbers only with a boolean argument that is not in `training`."""
    for argument, default in _booleans(module).items():
        if argument not in training and draws(training | {argument: not default}):
            names = ", ".join(IS_NOT_TRAINING if default else IS_TRAINING)
            other = "" if default else f", or give training_argument={argument!r}"
            keeps = "".join(f" (with training_argument={flag!r} it stays as it is)" for flag in training)
            what = f"{name} draws random numbers with {argument}={not default}, as dropout does in training"
            raise ValueError(f"{what}: rename this argument to one of {names}{other}{keeps}")


def _no_flag(module: Any, name: str) -> str:
    names = [f"training_argument={argument!r}" for argument, default in _booleans(module).items() if not default]
    what = f"{name} behaves differently in training (dropout, batch statistics), of which its __call__ is not told"
    return f"{what}: add one of {', '.join(FLAGS)}, or name yours by {' or '.join(names) or 'training_argument'}"


def row_mask(real: jax.Array, x: jax.Array) -> jax.Array | None:
    """Returns `real` `[B]` as a mask of `x` `[rows, ...]`, the first true if none is; None if rows are no examples."""
    repeats, remainder = divmod(len(x), len(real))
    real = real | (~real.any() & (jnp.arange(len(real)) == 0))
    return None if remainder else jnp.repeat(real, repeats).reshape(-1, *[1] * (x.ndim - 1))


def in_types_of(params: PyTree, new: PyTree) -> PyTree:
    """Returns `new` in the types of `params`: statistics of wider inputs are wider."""
    return jax.tree.map(lambda old, x: x.astype(old.dtype), params, new)


def _joined_collections(variables: dict[str, PyTree], name: str) -> tuple[PyTree, dict[tuple, str]]:
    """Returns all collections of a module as one nested dict, and the collection of each path."""
    flat, origin = {}, {}
    for collection, tree in variables.items():
        for path, leaf in traverse_util.flatten_dict(tree).items():
            check(path not in flat, "module", name, "names that differ between parameters and other state")
            real = collection == "params" or jnp.issubdtype(leaf.dtype, jnp.floating)
            accepted = "batch statistics of real numbers alone; counters cannot be averaged over clients"
            check(real, f"state of {name}", f"{'/'.join(path)} of {leaf.dtype}", accepted)
            flat[path], origin[path] = leaf, collection
    return traverse_util.unflatten_dict(flat), origin


def in_collections(params: PyTree, collection_of: Callable[[tuple], str]) -> dict[str, PyTree]:
    """Returns parameters as flax's variables; `collection_of` a path names the collection of a parameter."""
    trees = {"params": {}}
    for path, leaf in traverse_util.flatten_dict(params).items():
        trees.setdefault(collection_of(path), {})[path] = leaf
    return {collection: traverse_util.unflatten_dict(tree) for collection, tree in trees.items()}


@contextlib.contextmanager
def explained(name: str, x: Any) -> Iterator[None]:
    """Names the batch `x` in errors of the module `name`.

    Type errors of JAX, errors of flax, and divisions by zero become `ValueError`; others stay as they are, with a note.
    """
    batch = f"a batch of inputs [{', '.join(map(str, ('B', *x.shape[1:])))}], here {x.shape} {x.dtype}"
    try:
        yield
    except ValueError as error:
        error.add_note(f"{name} was called on {batch}")
        raise
    except errors.InvalidRngError as error:
        remedy = "write nn.Dropout(rate, deterministic=not train), with an argument train of its __call__"
        raise ValueError(f"{name} draws random numbers in evaluation: {remedy}") from error
    except (TypeError, ZeroDivisionError, errors.FlaxError) as error:
        what = f"{type(error).__name__}: " + re.sub(r" \(https?://\S*\)$", "", str(error).split("\n")[0])
        raise ValueError(f"{name} must map {batch}, to as many rows of outputs; it fails: {what}") from error


def ends_in_softmax(jaxpr: Any) -> bool:
    """Returns whether the outputs of a program are exponentials divided by their sum over the last axis."""
    by_output = {id(out): equation for equation in jaxpr.eqns for out in equation.outvars}

    def source(variable: Any, through: tuple[str, ...]) -> Any:
        """Returns the equation of a variable, or of that from which the operations `through` make it."""
        equation = by_output.get(id(variable))
        while equation is not None and equation.primitive.name in through:
            equation = by_output.get(id(equation.invars[0]))
        return equation

    last = source(jaxpr.outvars[0], SAME_VALUES)
    inner = None if last is None else last.params.get("jaxpr", last.params.get("call_jaxpr"))
    if inner is not None and len(last.outvars) == 1:  # a function under jit, or with derivatives of its own
        return ends_in_softmax(getattr(inner, "jaxpr", inner))
    if last is None or last.primitive.name != "div":
        return False
    above, below = source(last.invars[0], SAME_VALUES), source(last.invars[1], OF_SUMS)
    if above is None or below is None or (above.primitive.name, below.primitive.name) != ("exp", "reduce_sum"):
        return False
    summed = below.invars[0]
    return below.params["axes"] == (summed.aval.ndim - 1,) and source(summed, SAME_VALUES) is above


def of_linen(module: nn.Module, input_shape: tuple[int, ...], dtype: Any, argument: str | None) -> Network:
    """Returns the functions of a linen module; see `jfcl.models.tasks.network`."""
    name, x = module_name(module), jax.ShapeDtypeStruct((2, *input_shape), dtype)
    evaluating, training = training_flag(module, name, argument)
    head = None

    def variables(key):
        nonlocal head
        values, head, _ = _last_dense(lambda: module.init(key, jnp.zeros((1, *input_shape), dtype), **evaluating))
        return values

    # Its state, and whether training differs from evaluation.
    try:
        with explained(name, jax.ShapeDtypeStruct((1, *input_shape), dtype)):
            shapes = jax.eval_shape(variables, jax.random.key(0))
    except ValueError as error:
        if not evaluating and ("deterministic" in str(error) or "use_running_average" in str(error)):
            raise ValueError(_no_flag(module, name)) from error
        raise
    mutable = sorted(set(shapes) - {"params"})
    if mutable and not training:
        raise ValueError(_no_flag(module, name))

    def program(arguments, **streams):
        """Returns the traced program as text."""
        traced = jax.make_jaxpr(lambda v, x: module.apply(v, x, **arguments, **streams, mutable=mutable))(shapes, x)
        return re.sub(r" at 0x\w+", "", str(traced))

    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(0)}
    with explained(name, x):
        evaluated = program(evaluating)
        trains = bool(mutable) or program(training, rngs=rngs) != evaluated

    def draws(arguments):
        try:
            return program(arguments, rngs=rngs).count("random_bits") > evaluated.count("random_bits")
        except Exception:  # with arguments that are none of training
            return False

    if not draws(training) and argument is None:
        check_flag(module, name, training, draws)
    _, collections = _joined_collections(shapes, name)
    statistics = frozenset("/".join(path) for path, collection in collections.items() if collection != "params")

    apart = partial(in_collections, collection_of=collections.__getitem__)

    def apply(params, x):
        return module.apply(apart(params), x, **evaluating)

    def represent(params, x):
        outputs, _, inputs = _last_dense(lambda: apply(params, x))
        return (outputs if inputs is None else inputs).reshape(len(x), -1)

    def train(key, params, x, real):
        def masked(layer, call, x, *args, **kwargs):
            """Gives batch normalisation the rows that are no padding, or its running statistics if they are frozen."""
            if "/".join(layer.path) in FROZEN_LAYERS.get():
                return _with_running_average(layer, call, x, kwargs)
            return call(x, *args, **{"mask": row_mask(real, x), **kwargs})

        # A stream of another name falls back to that of "params", and must not draw the numbers of dropout.
        rngs = {"params": jax.random.fold_in(key, OTHER_STREAMS), "dropout": key}
        with at_layers(nn.BatchNorm, masked):
            outputs, state = module.apply(apart(params), x, rngs=rngs, mutable=mutable, **training)
        new = _joined_collections({"params": apart(params)["params"], **state}, name)[0]
        return outputs, in_types_of(params, new)

    def init(key):
        return _joined_collections(variables(key), name)[0]

    is_statistic = statistics.__contains__ if statistics else None
    return Network(name, init, apply, train if trains else None, represent, is_statistic, head)


def at_layers(kind: type | tuple[type, ...], visit: Callable) -> contextlib.AbstractContextManager:
    """Calls `visit(layer, call, *args, **kwargs)` in place of `call(*args, **kwargs)` of linen layers of a kind."""

    def intercept(call, args, kwargs, context):
        if isinstance(context.module, kind) and context.method_name == "__call__":
            return visit(context.module, call, *args, **kwargs)
        return call(*args, **kwargs)

    require(__debug__, "models of flax.linen need Python without -O, since flax leaves a context by an assertion")
    return nn.intercept_methods(intercept)


def _last_dense(run: Callable[[], Any]) -> tuple[Any, str | None, jax.Array | None]:
    """Returns the result of `run`, and the path and the inputs of the last dense layer of flax.linen that it calls.

    They are None without one, or if it is inside a transformation of its own, as by `nn.remat` or `nn.scan`.
    """

    def trace():
        return get_opaque_trace_state(convention="flax")

    last, outside = (None, None), trace()

    def note(layer, call, inputs, *args, **kwargs):
        nonlocal last
        last = ("/".join(layer.path), inputs) if trace() == outside else (None, None)
        return call(inputs, *args, **kwargs)

    with at_layers(nn.Dense, note):
        return run(), *last


def _with_running_average(layer: nn.BatchNorm, call: Callable, x: jax.Array, kwargs: dict) -> jax.Array:
    """Returns the outputs of a layer as in evaluation, whatever its attribute or its argument says."""
    attribute = layer.use_running_average
    object.__setattr__(layer, "use_running_average", None)  # flax accepts the attribute or the argument, not both
    try:
        return call(x, **{**kwargs, "use_running_average": True})
    finally:
        object.__setattr__(layer, "use_running_average", attribute)
