"""Modules of flax.nnx as pure functions of one pytree of parameters."""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, traverse_util

from jfcl.core import check
from jfcl.core.parameters import is_key
from jfcl.models.modules import FROZEN_LAYERS, Network, check_flag, in_types_of, module_name, row_mask, training_flag


class _BatchNorm(nnx.BatchNorm):
    """Batch normalisation with statistics of real examples alone; if it is frozen, with its running ones."""

    def __call__(self, x, use_running_average=None, *, mask=None):
        if self.is_frozen:  # whatever the layer's attribute or its argument says
            return super().__call__(x, True, mask=mask)
        return super().__call__(x, use_running_average, mask=self.real_rows(x) if mask is None else mask)


@lru_cache
def _changed(kind: type) -> type:
    """Returns the class `kind`, `nnx.BatchNorm` or derived from it, with the calls of `_BatchNorm`."""
    return _BatchNorm if kind is nnx.BatchNorm else type(kind)(kind.__name__, (kind, _BatchNorm), {})


def _abstract(build: Callable[[jax.Array], Any], name: str) -> nnx.Module:
    """Returns the module that `build(key)` returns, with shapes for arrays."""
    try:
        abstract = nnx.eval_shape(lambda: build(jax.random.key(0)))
    except TypeError as error:
        accepted = "a flax.nnx module, or a function of rngs alone (functools.partial gives it its other arguments)"
        raise ValueError(f"module must be {accepted}; {name}(rngs=...) fails: {error}") from error
    check(isinstance(abstract, nnx.Module), "module", name, "a flax.nnx module, or a function of rngs that returns one")
    return abstract


def of_nnx(module: Any, input_shape: tuple[int, ...], dtype: Any, argument: str | None) -> Network:
    """Returns the functions of an nnx module, or of one that `module(rngs=...)` makes, see `tasks.network`."""
    name = module_name(module)

    def build(key):
        return module if isinstance(module, nnx.Module) else module(rngs=nnx.Rngs(key))

    abstract = _abstract(build, name)
    kinds = (nnx.Param, nnx.BatchStat, nnx.RngState, ...)
    evaluating, training = training_flag(abstract, name, argument)
    graph, of_params, of_statistics, of_rngs, other_state = nnx.split(abstract, *kinds)
    extra = [str(path) for path, _ in jax.tree_util.tree_leaves_with_path(other_state)]
    check(not extra, f"state of {name}", ", ".join(extra), "parameters, batch statistics and random keys alone")
    statistics = traverse_util.flatten_dict(nnx.to_pure_dict(of_statistics))
    differs = bool(statistics) or bool(jax.tree.leaves(of_rngs)) or bool(training)

    def together(*trees):
        flat = [traverse_util.flatten_dict(tree) for tree in trees]
        return traverse_util.unflatten_dict(flat[0] | flat[1])

    def init(key):
        _, *states, _, _ = nnx.split(build(key), *kinds)
        return together(*map(nnx.to_pure_dict, states))

    def filled(state, values):
        """Returns the nnx state `state` with the arrays of the flat dict `values`."""
        state = jax.tree.map(lambda x: x, state)
        nnx.replace_by_pure_dict(state, traverse_util.unflatten_dict(values))
        return state

    def fresh(key, x):
        """Returns new keys in the place of the keys `x`, which stacked layers have several of; zeros for a counter."""
        if not is_key(x):
            return jnp.zeros(x.shape, x.dtype)
        return jax.random.split(key, x.shape) if x.shape else key

    def model(params, key):
        flat = traverse_util.flatten_dict(params)
        stats = {path: flat.pop(path) for path in statistics}
        leaves, structure = jax.tree.flatten(of_rngs)
        rngs = [fresh(jax.random.fold_in(key, i), x) for i, x in enumerate(leaves)]
        states = filled(of_params, flat), filled(of_statistics, stats), jax.tree.unflatten(structure, rngs)
        return nnx.merge(graph, *states, other_state)

    def apply(params, x):
        whole = model(params, jax.random.key(0))
        whole.eval()
        return whole(x, **evaluating)

    def train(key, params, x, real, arguments=training):
        whole = model(params, key)
        whole.train()
        for path, part in nnx.iter_modules(whole):
            if isinstance(part, nnx.BatchNorm):
                object.__setattr__(part, "__class__", _changed(type(part)))
                object.__setattr__(part, "is_frozen", "/".join(map(str, path)) in FROZEN_LAYERS.get())
                object.__setattr__(part, "real_rows", partial(row_mask, real))
        outputs = whole(x, **arguments)
        new = nnx.to_pure_dict(nnx.split(whole, nnx.BatchStat, ...)[1])
        return outputs, in_types_of(params, together(params, new))

    def draws(arguments):
        key, x, real = jax.random.key(0), jax.ShapeDtypeStruct((2, *input_shape), dtype), jnp.ones(2, bool)
        try:
            program = jax.make_jaxpr(lambda params, x: train(key, params, x, real, arguments))
            return "random_bits" in str(program(jax.eval_shape(init, key), x))
        except ValueError as error:
            if "rngs" in str(error):
                advice = "give nnx.Dropout rngs=rngs, and nnx.MultiHeadAttention keep_rngs=True"
                raise ValueError(f"dropout of {name} has no random numbers: {advice}") from error
        except Exception:  # with arguments that are none of training; `network` names the errors of others
            pass
        return False

    if not draws(training) and argument is None:
        check_flag(abstract, name, training, draws)
    names = frozenset("/".join(map(str, path)) for path in statistics)
    return Network(name, init, apply, train if differs else None, None, names.__contains__ if names else None)
