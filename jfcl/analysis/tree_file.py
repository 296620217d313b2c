"""A parameter tree in one file: `save_tree`, `load_tree`, and the checks of a state that came from outside."""

from __future__ import annotations

from pathlib import Path
from zipfile import BadZipFile

import jax
import jax.numpy as jnp
import numpy as np

from jfcl.algorithms.cfl.state import CFLState, ParameterTree
from jfcl.core import PyTree, Task, check

_RECORD = ("cluster", "active", "parent", "since", "final", "round", "scale", "excluded")


def _named(tree: PyTree) -> dict[str, np.ndarray]:
    """Returns the arrays by name; types without a NumPy file format, such as bfloat16, as float32."""
    leaves = [(jax.tree_util.keystr(p), np.asarray(x)) for p, x in jax.tree_util.tree_leaves_with_path(tree)]
    return {name: x.astype(np.float32) if x.dtype.kind == "V" else x for name, x in leaves}


def save_tree(file: str | Path, state: CFLState) -> None:
    """Writes a run's parameter tree to one `.npz` file: models, splits, updates, and the clients' clusters."""
    check_state(state)
    arrays = {f"params{name}": x for name, x in _named(state.params).items()}
    arrays |= {f"model{name}": x for name, x in _named(state.tree.model).items()}
    arrays |= {name: np.asarray(getattr(state, name)) for name in _RECORD}
    arrays |= {name: np.asarray(getattr(state.tree, name)) for name in ParameterTree._fields if name != "model"}
    np.savez(file, **arrays)


def load_tree(file: str | Path, task: Task) -> CFLState:
    """Reads a parameter tree that `save_tree` wrote (a run's `tree.npz`), for newcomers and paths.

    Args:
      file: `tree.npz`, or the run's folder.
      task: of the same model.

    Returns:
      `CFLState`, without the clients' optimisers.

    Raises:
      ValueError: no such file, a file without a parameter tree, a tree of another model.
    """
    file = Path(file)
    file = file / "tree.npz" if file.is_dir() else file
    check(file.is_file(), "file", str(file), "a parameter tree that jfcl.cfl left (tree.npz in a run's folder)")
    try:
        with file.open("rb") as f, np.load(f) as arrays:
            saved = {name: arrays[name] for name in arrays.files}
    except (ValueError, OSError, EOFError, BadZipFile, TypeError, AttributeError) as error:  # the last two: of `.npy`
        raise ValueError(f"{file} is not a parameter tree, or is damaged: {error}") from None
    missing = [name for name in (*_RECORD, "born", "side", "updates", "privacy") if name not in saved]
    check(not missing, "file", str(file), f"a parameter tree; this one lacks {', '.join(missing)}")
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    capacity = len(saved["active"])

    def read(part):
        leaves, structure = jax.tree_util.tree_flatten_with_path(shapes)
        names = [jax.tree_util.keystr(p) for p, _ in leaves]
        there = {name.removeprefix(part) for name in saved if name.startswith(part)}
        differ = sorted(there ^ set(names))
        check(not differ, "file", str(file), f"of this task's model, which differs in {', '.join(differ)}")
        for name, leaf in zip(names, (leaf for _, leaf in leaves), strict=True):
            shape, wanted = saved[part + name].shape, (capacity, *leaf.shape)
            check(shape == wanted, "file", str(file), f"of this task's model: {name} is {shape} there, {wanted} here")
        arrays = [jnp.asarray(saved[part + name], leaf.dtype) for name, (_, leaf) in zip(names, leaves, strict=True)]
        return jax.tree.unflatten(structure, arrays)

    tree = ParameterTree(
        model=read("model"), **{n: jnp.asarray(saved[n]) for n in ParameterTree._fields if n != "model"}
    )
    return CFLState(params=read("params"), tree=tree, client=(), **{name: jnp.asarray(saved[name]) for name in _RECORD})


def check_state(state: CFLState) -> None:
    """Checks that `state` is a `CFLState` of one seed, or raises `ValueError`."""
    ok = isinstance(getattr(state, "tree", None), ParameterTree)
    check(ok, "state", type(state).__name__, "a CFLState, which jfcl.cfl leaves")
    shape = np.shape(state.cluster)
    check(len(shape) == 1, "state", f"cluster of shape {shape}", "of one seed: jax.tree.map(lambda x: x[s], state)")


def check_model(task: Task, params: PyTree) -> None:
    """Checks that the models `params` `[K, ...]` have the shapes of the task's model, or raises `ValueError`."""

    def shapes(tree, of_one):
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {jax.tree_util.keystr(path): leaf.shape[not of_one :] for path, leaf in leaves}

    wanted, have = shapes(jax.eval_shape(task.init, jax.random.key(0)), True), shapes(params, False)
    check(have == wanted, "state", have, f"of the task's model {wanted}")
