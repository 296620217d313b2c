"""Trained models in use: the predictor of a client, the choice of a new client, files for programs without jfcl."""

from __future__ import annotations

import importlib.util
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from jfcl.analysis.metrics import evaluate
from jfcl.core import Clients, PyTree, Task, check, check_choice, check_labels, named_leaves
from jfcl.core.files import write_whole
from jfcl.core.parameters import named_parameters

BY = ("loss", "inputs")
FORMATS = {".npz": None, ".safetensors": "safetensors", ".jax": "flatbuffers"}  # the package that writes each


def npz_bytes(tree: PyTree) -> bytes:
    """Returns the arrays of `tree`, under their paths, as the content of an `.npz` file; bfloat16 as float32."""
    buffer, arrays = io.BytesIO(), {name: np.asarray(array) for name, array in named_parameters(tree).items()}
    np.savez(buffer, **{name: x.astype(np.float32) if x.dtype.kind == "V" else x for name, x in arrays.items()})
    return buffer.getvalue()


def structured(arrays: PyTree, like: PyTree) -> PyTree:
    """Returns the arrays of a file in the structure and types of `like`; `()` where `like` has no leaves."""
    if not jax.tree.leaves(like):
        return ()
    rows, wanted = named_parameters(arrays), named_parameters(like)
    found, accepted = sorted(rows), f"those of the run: {list(wanted)}"
    check(found == sorted(wanted), "the models of the folder", found, accepted)
    leaves = [np.asarray(rows[name], leaf.dtype) for name, leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def predictor(task: Task, model: PyTree) -> Callable[[Any], jax.Array]:
    """Returns the compiled function of one model, `x [B, ...] -> outputs [B, ...]`.

    It raises `ValueError` for inputs of another shape than the task's, or that flattened: a model may take them, and
    read them wrongly (images with the channels first).
    """
    predict, wanted = jax.jit(task.apply), task.input_shape

    def outputs(x: Any) -> jax.Array:
        shape = np.shape(x)
        fits = wanted is None or (len(shape) > 1 and shape[1:] in (wanted, (math.prod(wanted),)))
        check(fits, "x", shape, f"of shape (B, *{wanted})")
        return predict(model, jnp.asarray(x))

    return outputs


def choose(task: Task, params: PyTree, cluster: np.ndarray, clients: Clients, examples: dict[str, Any], by: str) -> int:
    """Returns the row of `params` for a new client; see `LoadedRun.choose`."""
    check_choice("by", by, BY)
    needed = tuple(dict.fromkeys(("x", "y", *task.reads))) if by == "loss" else ("x",)
    missing = [name for name in needed if name not in examples]
    check(not missing, "examples", sorted(examples), f"with {' and '.join(needed)}, for by={by!r}")
    x = np.asarray(examples["x"])
    wanted = np.shape(clients.examples["x"])[2:]
    check(x.ndim > 1 and x.shape[1:] == wanted and len(x), "examples['x']", x.shape, f"of shape (B, *{wanted})")
    if by == "loss":
        for name, values in named_leaves(examples).items():
            shape = np.shape(values)
            check(shape[:1] == (len(x),), f"examples{name}", shape, f"one for each of the {len(x)} inputs")
        one = Clients(jax.tree.map(lambda values: np.asarray(values)[None], examples), np.array([len(x)], np.int32))
        if task.num_classes is not None:
            check_labels(one, task.num_classes, name="examples")
        return int(evaluate(task, params, one, None)["cluster"][0])
    means = {}
    for k in np.unique(cluster).tolist():
        rows = np.flatnonzero((cluster == k) & (np.asarray(clients.size) > 0))
        inputs = [np.asarray(clients.examples["x"][i, : clients.size[i]], np.float64) for i in rows]
        if inputs:
            means[k] = np.concatenate(inputs).mean(axis=0)
    new = x.astype(np.float64).mean(axis=0)
    return min(means, key=lambda k: float(np.square(means[k] - new).sum()))


def export_model(
    task: Task, model: PyTree, file: str | Path, *, input_shape: tuple[int, ...] | None = None, dtype: Any = None
) -> None:
    """Writes one model to a file, in the format of its suffix.

    Args:
      task: of the model.
      model: one model, as of `load_run(folder).model(client)`.
      file: `.npz`: the arrays under their paths, such as `Dense_0/kernel`; bfloat16, which NumPy does not have, as
        float32. `.safetensors`: the same in their own types. `.jax`: the compiled prediction with the arrays inside,
        for any batch size, on CPU, GPU and TPU. Without jfcl and flax,
        `jax.export.deserialize(bytearray(file.read_bytes())).call(x)` runs it.
      input_shape: of one input, for `.jax`; default: the task's. That of a language model is `(length,)`.
      dtype: of the inputs, for `.jax`; default: int32 for a language model, else float32.

    Raises:
      ValueError: another suffix; `.jax` without a known shape; `.safetensors` or `.jax` without the extra `serve`.

    Example:
      >>> import jfcl, tempfile
      >>> task = jfcl.models.classification(jfcl.models.Linear(3), (4,), 3)
      >>> file = Path(tempfile.mkdtemp()) / "model.jax"
      >>> export_model(task, task.init(jax.random.key(0)), file)
      >>> export.deserialize(bytearray(file.read_bytes())).call(np.ones((7, 4), np.float32)).shape
      (7, 3)
    """
    file = Path(file)
    check_choice("the suffix of file", file.suffix, FORMATS)
    needed = FORMATS[file.suffix]
    if needed is not None and importlib.util.find_spec(needed) is None:
        raise ValueError(f"file must be .npz without the package {needed}: pip install 'jfcl[serve]'")
    if file.suffix == ".npz":
        write_whole(file, npz_bytes(model))
    elif file.suffix == ".safetensors":
        from safetensors.numpy import save

        write_whole(file, save({name: np.asarray(array, order="C") for name, array in named_parameters(model).items()}))
    else:
        shape = task.input_shape if input_shape is None else tuple(input_shape)
        accepted = "given: the task does not know it; that of a language model is (length,)"
        check(shape is not None, "input_shape", None, accepted)
        (batch,) = export.symbolic_shape("b")
        dtype = (np.int32 if task.perplexity else np.float32) if dtype is None else dtype
        x = jax.ShapeDtypeStruct((batch, *shape), dtype)
        # One example mapped over a batch of symbolic size: modules may use `len(x)`, which must be a number.
        predict = jax.jit(jax.vmap(lambda one: task.apply(model, one[None])[0]))
        made = export.export(predict, platforms=("cpu", "cuda", "tpu"))(x)
        write_whole(file, bytes(made.serialize()))
