"""A parameter tree in one file: `save_tree`, `load_tree`, and the checks of a state from outside."""

from pathlib import Path
from typing import BinaryIO

import jax
import jax.numpy as jnp
import numpy as np

from jfcl.core import PyTree, Task, check, files, named_leaves, require
from jfcl.methods.cfl.state import CFLState, ParameterTree

_RECORD = ("cluster", "active", "parent", "since", "final", "round", "scale", "excluded")
_OF_TREE = tuple(name for name in ParameterTree._fields if name != "model")


def save_tree(file: str | Path | BinaryIO, state: CFLState) -> None:
    """Writes a run's parameter tree to one `.npz` file: models, splits, updates, and the clients' clusters.

    The file becomes visible whole: a tree of this name stays until the new one is complete. It may also be a file that
    is open for writing in binary mode. bfloat16, which NumPy's files do not have, is written as float32.
    """
    check_state(state)
    models = {"params": state.params, "model": state.tree.model}
    arrays = {f"{part}{name}": leaf for part, tree in models.items() for name, leaf in named_leaves(tree).items()}
    arrays |= {name: getattr(state, name) for name in _RECORD} | {name: getattr(state.tree, name) for name in _OF_TREE}
    content = files.npz_bytes(arrays)
    if isinstance(file, str | Path):
        files.write_whole(Path(file), content)
    else:
        file.write(content)


def load_tree(file: str | Path, task: Task | None = None) -> CFLState:
    """Reads a parameter tree that `save_tree` wrote (a run's `tree.npz`), for newcomers and paths.

    Args:
      file: `tree.npz`, or the run's folder.
      task: of the same model; without one, the splits are read and not the models.

    Returns:
      `CFLState`, without the clients' optimisers.

    Raises:
      ValueError: no such file, a file without a parameter tree, a tree of another model.

    Example:
      A tree without a split:

      >>> import tempfile, jfcl, optax
      >>> task = jfcl.models.classification(jfcl.models.Linear(10), (4,), 10)
      >>> algorithm = jfcl.cfl(task, jfcl.local_training(optax.sgd(0.2), num_steps=1), max_clusters=2)
      >>> clients = jfcl.stack_clients([{"x": np.ones((3, 4), np.float32), "y": np.zeros(3, np.int32)}] * 2)
      >>> file = Path(tempfile.mkdtemp()) / "tree.npz"
      >>> save_tree(file, algorithm.init(jax.random.key(0), clients))
      >>> [node.clients.tolist() for node in jfcl.parameter_tree.nodes(load_tree(file))]
      [[0, 1]]
    """
    file = Path(file)
    file = file / "tree.npz" if file.is_dir() else file
    check(file.is_file(), "file", str(file), "a parameter tree that jfcl.cfl left (tree.npz in a run's folder)")
    saved = files.read_npz(file)
    missing = [name for name in (*_RECORD, *_OF_TREE) if name not in saved]
    check(not missing, "file", str(file), f"a parameter tree; this one lacks {', '.join(missing)}")
    params, model = ((), ()) if task is None else (_models(saved, part, task, file) for part in ("params", "model"))
    tree, record = (jax.device_put({name: saved[name] for name in names}) for names in (_OF_TREE, _RECORD))
    return CFLState(params=params, tree=ParameterTree(model=model, **tree), client=(), **record)


def _models(saved: dict[str, np.ndarray], part: str, task: Task, file: Path) -> PyTree:
    """Returns the models `[K, ...]` whose names in the file begin with `part`."""
    like = jax.eval_shape(task.init, jax.random.key(0))
    rows = {name.removeprefix(part): x for name, x in saved.items() if name.startswith(part)}
    wanted = {name: (len(saved["active"]), *leaf.shape) for name, leaf in named_leaves(like).items()}
    have = {name: x.shape for name, x in rows.items()}
    differ = [name for name in sorted(have.keys() | wanted.keys()) if have.get(name) != wanted.get(name)]
    shapes = (f"{k} is {have.get(k, 'absent')} there, {wanted.get(k, 'absent')} here" for k in differ)
    require(not differ, f"{file} is of another model than this task's: {'; '.join(shapes)}")
    leaves = [jnp.asarray(rows[name], leaf.dtype) for name, leaf in named_leaves(like).items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def check_state(state: CFLState) -> None:
    """Checks that `state` is a `CFLState` of one seed, or raises `ValueError`."""
    ok = isinstance(getattr(state, "tree", None), ParameterTree)
    check(ok, "state", type(state).__name__, "a CFLState, which jfcl.cfl leaves")
    shape = np.shape(state.cluster)
    check(len(shape) == 1, "state", f"cluster of shape {shape}", "of one seed: jax.tree.map(lambda x: x[s], state)")


def check_model(task: Task, params: PyTree, personal: PyTree = ()) -> None:
    """Raises `ValueError` unless models `params` `[K, ...]`, with `personal` parameters, have the task's shapes."""
    like = named_leaves(jax.eval_shape(task.init, jax.random.key(0)))
    wanted = {name: leaf.shape for name, leaf in like.items()}
    have = {name: leaf.shape[1:] for part in (params, personal) for name, leaf in named_leaves(part).items()}
    check(have == wanted, "state", have, f"of the task's model {wanted}")
