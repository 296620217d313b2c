"""Trained models in use: a finished run with its models, the choice of a new client, files for other programs."""

import dataclasses
import importlib.util
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from jfcl.analysis.metrics import evaluate
from jfcl.core import Clients, PyTree, Served, Task, check, check_choice, check_labels, joined, mixture_task
from jfcl.core.checks import check_count, check_held, require
from jfcl.core.clients import check_examples, check_no_bytes
from jfcl.core.files import npz_bytes, write_whole
from jfcl.core.parameters import named_leaves, named_parameters
from jfcl.data import read_rows
from jfcl.experiments.comparison import is_configured
from jfcl.experiments.config import Config, from_saved
from jfcl.experiments.results import load_params, read_finished, structured
from jfcl.experiments.setups import Setup, setup
from jfcl.simulation.evaluation import adopted
from jfcl.simulation.folder import RunFolder
from jfcl.simulation.run import check_data

BY = ("loss", "inputs")
FORMATS = {".npz": None, ".safetensors": "safetensors", ".jax": "flatbuffers"}  # the package that writes each


class LoadedRun(NamedTuple):
    """A finished run: its `config`, its `setup` (data, task, algorithm, ...), its models and the model of each client.

    Attributes:
      params: pytree of `[K, ...]`, the models of the run's first seed, those of `History.served`.
      cluster: `[N]` int32: client `i` is served model `cluster[i]`.
      personal: pytree of `[N, ...]`, the clients' personal parameters; `()` where the run has none.
      weights: `[N, K]` float32, of a run with mixtures of models, those of each client; else None. `cluster` is then
        the model of the largest weight.
      adds_models: whether the method adds models during a run: those that no client is served may then not exist.
      folder: the run's folder.
    """

    config: Config
    setup: Setup
    params: PyTree
    cluster: np.ndarray
    personal: PyTree = ()
    weights: np.ndarray | None = None
    adds_models: bool = False
    folder: Path = Path()

    @property
    def task(self) -> Task:
        """The task that the results of `model` are parameters of."""
        return self.setup.task if self.weights is None else mixture_task(self.setup.task)

    def model(self, client: int) -> PyTree:
        """Returns the parameters of a client's model, its personal ones included.

        Of a mixture, they are those of all models and the client's weights, `(params, weights [K])`.

        Raises:
          ValueError: a client that is not in `0..N-1`.
        """
        check_count("client", client, least=0, most=len(self.cluster) - 1)
        if self.weights is not None:
            return jax.tree.map(jnp.asarray, (self.params, self.weights[client]))
        shared = jax.tree.map(lambda p: jnp.asarray(p[self.cluster[client]]), self.params)
        return joined(shared, jax.tree.map(lambda p: jnp.asarray(p[client]), self.personal))

    def predictor(self, client: int) -> Callable[[Any], jax.Array]:
        """Returns the compiled function `x [B, ...] -> outputs [B, ...]` of a client's model: logits, for classes.

        It raises `ValueError` for inputs of another shape than the task's, or that flattened, which a model may take
        and read wrongly (images with the channels first), and for integers as images of a run on floats.
        """
        model, predict, wanted = self.model(client), jax.jit(self.task.apply), self.task.input_shape
        trained = self.setup.federation.train.examples["x"]

        def outputs(x: Any) -> jax.Array:
            check_no_bytes("x", x, trained, 1)
            shape = np.shape(x)
            fits = wanted is None or (len(shape) > 1 and shape[0] and shape[1:] in (wanted, (math.prod(wanted),)))
            check(fits, "x", shape, f"of shape (B, *{wanted})")
            return predict(model, jnp.asarray(x))

        return outputs

    def client(self, name: Any) -> int:
        """Returns the client with a name in the table that the run was on: a value of its column `by`.

        Raises:
          ValueError: an unknown name, or a run without names of clients.
        """
        names = self.setup.federation.names
        check(names is not None, "name", name, "a number, as the clients of this run have no names")
        check_choice("name", name, names)
        return names.index(name)

    def read(self, frame: Any) -> dict[str, np.ndarray]:
        """Reads rows of a frame as the table of the run: `{"x", "y"}`; see `jfcl.data.read_rows`.

        Raises:
          ValueError: a run on other data than a table; a frame without its columns, or with other values.
        """
        table = self.setup.federation.table
        require(table is not None, f"the run is on {self.config.dataset!r}, and not on a table")
        return read_rows(frame, table)

    def choose(self, examples: dict[str, Any], *, by: str = "loss") -> int:
        """Returns the cluster that fits the examples of a new client, the row of its model in `params`.

        Args:
          examples: `{"x": [B, ...], "y": [B, ...]}` and what else the loss reads; `{"x": [B, ...]}` for `by="inputs"`.
          by: `"loss"`: the model of lowest mean loss on them (IFCA's choice), of a method that adds models among those
            that clients are served. `"inputs"`: the cluster of the run with the nearest mean input, for clients without
            labels. It distinguishes rotated images, not swapped labels.

        Raises:
          ValueError: an unknown `by`; examples of another shape than those of the run, or with NaN; a run with personal
            parameters, of which a new client has none.
        """
        remedy = "adopt fits a new client's"
        require(self.weights is None, f"clients of this run are served mixtures of all models; {remedy}")
        has_none = "clients of this run have personal parameters, and a new one has none"
        require(not jax.tree.leaves(self.personal), has_none)
        check_choice("by", by, BY)
        task, train, cluster = self.setup.task, self.setup.federation.train, self.cluster
        needed = tuple(dict.fromkeys(("x", "y", *task.reads))) if by == "loss" else ("x",)
        names = list(examples) if isinstance(examples, dict) else type(examples).__name__
        fits = isinstance(examples, dict) and set(needed) <= set(examples)
        check(fits, "examples", names, f"a dict with {' and '.join(needed)}, for by={by!r}")
        x = np.asarray(examples["x"])
        wanted = np.shape(train.examples["x"])[2:]
        check(x.ndim > 1 and x.shape[1:] == wanted and len(x), "examples['x']", x.shape, f"of shape (B, *{wanted})")
        check_no_bytes("examples['x']", x, train.examples["x"], 1)
        for name, values in named_leaves(examples).items():
            values, where = np.asarray(values), f"examples{name}"
            check(values.shape[:1] == (len(x),), where, values.shape, f"one for each of the {len(x)} inputs")
            check_held(where, values)
        if by == "loss":
            examples = jax.tree.map(lambda values: np.asarray(values)[None], examples)
            client = Clients(examples, np.array([len(x)], np.int32))
            if task.num_classes is not None:
                check_labels(client, task.num_classes, name="examples")
            among = np.unique(cluster if self.adds_models else np.arange(len(jax.tree.leaves(self.params)[0])))
            models = jax.tree.map(lambda p: p[among], self.params)
            return int(among[int(evaluate(task, models, client, None)["cluster"][0])])
        if (drift := self.setup.federation.drift) is not None:  # before the last step clients were in other clusters
            train = drift._replace(window=1).clients(train, drift.num_steps - 1)
        # The squared distance between mean inputs, of each cluster with examples that no attack has changed.
        hostile, new, distances = self.setup.malicious, x.astype(np.float64).mean(axis=0), {}
        counts = (np.asarray(train.size) > 0) & ~(np.zeros(len(cluster), bool) if hostile is None else hostile)
        for k in np.unique(cluster).tolist():
            rows = np.flatnonzero((cluster == k) & counts)
            if len(rows):
                inputs = [np.asarray(train.examples["x"][i, : train.size[i]], np.float64) for i in rows]
                distances[k] = float(np.square(np.concatenate(inputs).mean(axis=0) - new).sum())
        return min(distances, key=distances.get)

    def adopt(self, clients: Clients) -> Served:
        """Returns what the method serves clients that were not in training: `to` `[n]`, or weights `[n, K]`.

        It is the method's own rule where it has one, as in a simulation with `newcomers`: FedEM fits mixtures, CFL goes
        down its tree, PACFL compares angles. By default it is the model of lowest loss, with the mean of the personal
        parameters. The state is that of the first seed in the last checkpoint.

        Raises:
          ValueError: clients with other examples than those of the run; a folder without checkpoints.
        """
        algorithm, train = self.setup.algorithm, self.setup.federation.train
        check_data(jax.vmap, {"clients": train, "newcomers": clients})
        check_examples(clients, self.setup.task, name="newcomers")
        if self.setup.task.num_classes is not None:
            check_labels(clients, self.setup.task.num_classes, name="newcomers")
        keys = jax.random.split(jax.random.key(0), len(read_finished(self.folder).summary["per_seed"]))
        like = jax.eval_shape(jax.vmap(lambda key: algorithm.init(key, train)), keys)
        restored = RunFolder(self.folder).restore(like)
        require(restored is not None, f"{self.folder} has no checkpoint, which holds the state of the method")
        state = jax.tree.map(lambda rows: jnp.asarray(rows[0]), restored.state)
        served = adopted(algorithm, state, clients, len(self.cluster), len(jax.tree.leaves(self.params)[0]))
        if algorithm.adopt is not None:
            return served
        personal = () if served.personal is None else served.personal
        return served._replace(to=evaluate(self.setup.task, served.models, clients, None, personal=personal)["cluster"])


def load_run(folder: str | Path, *, data_dir: str | None = None) -> LoadedRun:
    """Reads a finished run, with its models ready to use.

    Args:
      folder: one that `jfcl run --out` wrote.
      data_dir: as in the run.

    Raises:
      ValueError: no finished run, damaged files, a run of a population (its models: `load_params`), data that differ
        from the run's.

    Example:
      >>> import jfcl, tempfile
      >>> from jfcl.experiments import Config, run
      >>> folder = tempfile.mkdtemp()
      >>> _ = run(Config("ifca", clients=8, clusters=2, rounds=3), out=folder)
      >>> found = load_run(folder)
      >>> test = found.setup.federation.test
      >>> jfcl.evaluate(found.setup.task, found.params, test, found.cluster)["accuracy"].shape
      (8,)
      >>> x = test.examples["x"][0, :5]
      >>> found.predictor(0)(x).shape, found.choose({"x": x}, by="inputs") in (0, 1)
      ((5, 10), True)
    """
    run = read_finished(folder)  # verifies the files
    accepted = "a run of the command line or jfcl.experiments.run; that of jfcl.simulate keeps no models and no options"
    check(is_configured(run.config), "folder", str(folder), accepted)
    saved = run.config | {"metrics": None}  # what was recorded does not matter for using the models
    config = Config(**from_saved(saved, str(run.folder / "config.json")))
    check(not config.of_population, "folder", str(folder), "a run of clients, not of a population")
    # Devices, mapping and warm start do not matter for using the models, and may not exist on this machine.
    here = dataclasses.replace(config, devices=None, mapping=None, chunk=None, init_from=None)
    parts = setup(here, data_dir=data_dir)
    same = parts.federation.split_hash == run.config["split_hash"]
    check(same, "data_dir", data_dir, f"where the data of {folder} are: this split of {config.dataset} is another")
    columns = run.first_seed()
    cluster = np.asarray(columns.get("model", columns.get("cluster")), np.int32)
    # The models, in the structure of what is served.
    state = jax.eval_shape(parts.algorithm.init, jax.random.key(0), parts.federation.train)
    like = jax.eval_shape(lambda state: parts.algorithm.serve(state, None), state)
    task = parts.algorithm.task or parts.task  # kNN-Per has a task of its own
    parts = parts._replace(task=task._replace(input_shape=parts.task.input_shape))
    is_mixture = like.to is not None and like.to.ndim == 2
    wanted = {"params": like.models, "personal": like.personal}
    wanted["mixture"] = {"weights": jax.ShapeDtypeStruct(like.to.shape, np.float32)} if is_mixture else ()
    loaded = {part: structured(load_params(folder, part), tree) for part, tree in wanted.items()}
    weights = loaded["mixture"]["weights"] if is_mixture else None
    adds_models = like.active is not None
    return LoadedRun(config, parts, loaded["params"], cluster, loaded["personal"], weights, adds_models, run.folder)


def export_model(
    task: Task, model: PyTree, file: str | Path, *, input_shape: tuple[int, ...] | None = None, dtype: Any = None
) -> None:
    """Writes one model to a file, in the format of its suffix.

    Args:
      task: of the model.
      model: one model, such as `load_run(folder).model(client)`.
      file: `.npz`: the arrays under their paths, such as `Dense_0/kernel`; bfloat16, which NumPy does not have, as
        float32. `.safetensors`: the same in their own types. `.jax`: the compiled prediction with the arrays inside,
        for any batch size, on CPU, GPU and TPU. Without jfcl and flax,
        `jax.export.deserialize(bytearray(file.read_bytes())).call(x)` runs it.
      input_shape: of one input, for `.jax`; default: the task's. That of a language model is `(length - 1,)`,
        since the last word of a text is no input (`GPT` takes no more words).
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
    check_choice("suffix", file.suffix, FORMATS)
    needed = FORMATS[file.suffix]
    if needed is not None and importlib.util.find_spec(needed) is None:
        raise ValueError(f"file must be .npz without the package {needed}: pip install 'jfcl[serve]'")
    if file.suffix == ".npz":
        content = npz_bytes(named_parameters(model))
    elif file.suffix == ".safetensors":
        from safetensors.numpy import save

        content = save({name: np.asarray(array, order="C") for name, array in named_parameters(model).items()})
    else:
        shape = task.input_shape if input_shape is None else tuple(input_shape)
        unknown = "which this task does not know; that of a language model is (length - 1,)"
        require(shape is not None, f"Give input_shape, {unknown}.")
        dtype = (np.int32 if task.perplexity else np.float32) if dtype is None else dtype
        x = jax.ShapeDtypeStruct((*export.symbolic_shape("b"), *shape), dtype)
        # One example mapped over a batch of symbolic size: modules may use `len(x)`, which must be a number.
        first = partial(jax.tree.map, lambda outputs: outputs[0])
        predict = jax.jit(jax.vmap(lambda example: first(task.apply(model, example[None]))))
        content = bytes(export.export(predict, platforms=("cpu", "cuda", "tpu"))(x).serialize())
    write_whole(file, content)
