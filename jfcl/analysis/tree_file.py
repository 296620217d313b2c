"""A parameter tree in one file: `save_tree`, `load_tree`, `load_splits`, and the checks of a state from outside."""

from __future__ import annotations

import io
from pathlib import Path
from typing import BinaryIO
from zipfile import BadZipFile

import jax
import jax.numpy as jnp
import numpy as np

from jfcl.core import PyTree, Task, check, files, named_leaves, plain
from jfcl.methods.cfl.state import CFLState, ParameterTree

_RECORD = ("cluster", "active", "parent", "since", "final", "round", "scale", "excluded")


def _named(tree: PyTree) -> dict[str, np.ndarray]:
    """Returns the arrays by name; types without a NumPy file format, such as bfloat16, as float32."""
    arrays = {name: np.asarray(x) for name, x in named_leaves(tree).items()}
    return {name: x.astype(np.float32) if x.dtype.kind == "V" else x for name, x in arrays.items()}


def save_tree(file: str | Path | BinaryIO, state: CFLState) -> None:
    """Writes a run's parameter tree to one `.npz` file: models, splits, updates, and the clients' clusters.

    The file becomes visible whole: a tree of this name stays until the new one is complete. It may also be a file that
    is open for writing in binary mode.
    """
    check_state(state)
    arrays = {f"params{name}": x for name, x in _named(state.params).items()}
    arrays |= {f"model{name}": x for name, x in _named(state.tree.model).items()}
    arrays |= {name: np.asarray(getattr(state, name)) for name in _RECORD}
    arrays |= {name: np.asarray(getattr(state.tree, name)) for name in ParameterTree._fields if name != "model"}
    content = io.BytesIO()
    np.savez(content, **arrays)
    if isinstance(file, str | Path):
        files.write_whole(Path(file), content.getvalue())
    else:
        file.write(content.getvalue())


def _read(file: str | Path) -> tuple[Path, dict[str, np.ndarray]]:
    """Returns the file of a parameter tree, and its arrays; raises `ValueError` for another file."""
    file = Path(file)
    file = file / "tree.npz" if file.is_dir() else file
    check(file.is_file(), "file", str(file), "a parameter tree that jfcl.cfl left (tree.npz in a run's folder)")
    try:
        with plain.reader(file) as f, np.load(f) as arrays:
            saved = {name: arrays[name] for name in arrays.files}
    # TypeError, AttributeError: of a `.npy`. NotImplementedError, RuntimeError: of a damaged directory in the archive.
    except (ValueError, OSError, EOFError, BadZipFile, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{file} is not a parameter tree, or is damaged: {error}") from None
    missing = [name for name in (*_RECORD, "born", "side", "updates", "privacy") if name not in saved]
    check(not missing, "file", str(file), f"a parameter tree; this one lacks {', '.join(missing)}")
    return file, saved


def _state(saved: dict[str, np.ndarray], params: PyTree, model: PyTree) -> CFLState:
    named = {name: jnp.asarray(saved[name]) for name in ParameterTree._fields if name != "model"}
    record = {name: jnp.asarray(saved[name]) for name in _RECORD}
    return CFLState(params=params, tree=ParameterTree(model=model, **named), client=(), **record)


def load_splits(file: str | Path) -> CFLState:
    """Reads the splits of a parameter tree, without the models, which need a task: `params` and `tree.model` are `()`.

    Args:
      file: `tree.npz`, or the run's folder.

    Raises:
      ValueError: no such file, a file without a parameter tree.

    Example:
      A tree without a split:

      >>> import tempfile, jfcl, optax
      >>> task = jfcl.models.classification(jfcl.models.Linear(10), (4,), 10)
      >>> algorithm = jfcl.cfl(task, jfcl.local_training(optax.sgd(0.2), num_steps=1), max_clusters=2)
      >>> clients = jfcl.stack_clients([{"x": np.ones((3, 4), np.float32), "y": np.zeros(3, np.int32)}] * 2)
      >>> file = Path(tempfile.mkdtemp()) / "tree.npz"
      >>> save_tree(file, algorithm.init(jax.random.key(0), clients))
      >>> [node.clients.tolist() for node in jfcl.parameter_tree.nodes(load_splits(file))]
      [[0, 1]]
    """
    return _state(_read(file)[1], (), ())


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
    file, saved = _read(file)
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    capacity = len(saved["active"])

    def read(part):
        there = {name.removeprefix(part): x for name, x in saved.items() if name.startswith(part)}
        here = named_leaves(shapes)
        differ = sorted(there.keys() ^ here.keys())
        check(not differ, "file", str(file), f"of this task's model, which differs in {', '.join(differ)}")
        for name, leaf in here.items():
            shape, wanted = there[name].shape, (capacity, *leaf.shape)
            check(shape == wanted, "file", str(file), f"of this task's model: {name} is {shape} there, {wanted} here")
        arrays = [jnp.asarray(there[name], leaf.dtype) for name, leaf in here.items()]
        return jax.tree.unflatten(jax.tree.structure(shapes), arrays)

    return _state(saved, read("params"), read("model"))


def check_state(state: CFLState) -> None:
    """Checks that `state` is a `CFLState` of one seed, or raises `ValueError`."""
    ok = isinstance(getattr(state, "tree", None), ParameterTree)
    check(ok, "state", type(state).__name__, "a CFLState, which jfcl.cfl leaves")
    shape = np.shape(state.cluster)
    check(len(shape) == 1, "state", f"cluster of shape {shape}", "of one seed: jax.tree.map(lambda x: x[s], state)")


def check_model(task: Task, params: PyTree, personal: PyTree = ()) -> None:
    """Checks that the models `params` `[K, ...]`, with the `personal` parameters, have the shapes of the task's model.

    Raises:
      ValueError: they do not.
    """
    one = named_leaves(jax.eval_shape(task.init, jax.random.key(0)))
    wanted = {name: leaf.shape for name, leaf in one.items()}
    have = {name: leaf.shape[1:] for part in (params, personal) for name, leaf in named_leaves(part).items()}
    check(have == wanted, "state", have, f"of the task's model {wanted}")


def check_no_personal(state: CFLState) -> None:
    """Raises `ValueError` for clients with personal parameters, which newcomers do not have."""
    own = sorted(named_leaves(state.personal))
    check(not own, "state", f"personal parameters {', '.join(own)}", "one of a run without them, to assign newcomers")
