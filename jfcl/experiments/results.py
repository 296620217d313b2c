"""The result files of a run: written at its end, and read again."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jfcl.analysis import plots
from jfcl.core import PyTree, Task, check, check_choice, check_count, client_ids, joined, mixture_task, plain
from jfcl.core.texts import csv_bytes
from jfcl.data import read_rows
from jfcl.experiments import serving
from jfcl.experiments.comparison import is_configured
from jfcl.experiments.config import Config, check_options, from_saved, of_population
from jfcl.experiments.privacy import privacy_of
from jfcl.experiments.setups import Setup, load_params, setup
from jfcl.mapping import hosts
from jfcl.methods.cfl import CFLState, parameter_tree
from jfcl.simulation import folder as runs
from jfcl.simulation.folder import RunFolder, finite_or_none, saved_config
from jfcl.simulation.loop import History
from jfcl.simulation.results import SEED_METRICS, clients_csv, summarize


def summarize_run(config: Config, history: History, parts: Setup) -> dict[str, Any]:
    """Returns the content of `summary.json`: plain JSON, with `None` for NaN and infinity."""
    summary = {
        "method": config.method,
        "dataset": config.dataset,
        "heterogeneity": config.heterogeneity,
        "description": parts.federation.description,
        "num_clients": len(parts.federation.cluster),
        "num_clusters": parts.federation.num_clusters,
        "split_hash": parts.federation.split_hash,
        **({} if parts.federation.table is None else {"table": parts.federation.table}),
        **summarize(history),
    }
    if config.dp_clip is not None:
        clusters = np.asarray(history.clients["cluster"])[0]
        clip = next(r for r in history.records if r["round"] == history.rounds).get("clip", config.dp_clip)
        summary["privacy"] = privacy_of(config, config.clients, history.rounds, clusters, clip)
    return finite_or_none(summary)


def _of_cohort(history: History) -> bool:
    """Returns whether the clients of the state are the last cohort of a population, not those that are evaluated."""
    return hasattr(history, "rows")


def write_results(out: Path, summary: dict[str, Any], history: History, parts: Setup) -> None:
    """Writes `clients.csv`, `params.npz`, the plots and, last, `summary.json`, which marks the run as finished.

    `personal.npz` holds personal parameters, and `mixture.npz` the weights of clients' mixtures, where the run has any
    and is not one of a population.
    """
    name, records = summary["method"], history.records
    served = history.served
    contents = _clients_csv(history, parts) | {"params.npz": _first_seeds(served.models)}
    own = served.personal
    if jax.tree.leaves(own) and not _of_cohort(history):
        contents["personal.npz"] = _first_seeds(own)
    if served.to is not None and served.to.ndim == 3 and not _of_cohort(history):
        contents["mixture.npz"] = _first_seeds({"weights": served.to})
    figures = {"loss": plots.curves({name: records}, "train_loss")}
    figures |= {of: plots.curves({name: records}, of) for of in ("accuracy", "perplexity") if of in history.clients}
    if "accuracy" in history.clients:  # not of a regression
        figures["clients"] = plots.client_accuracies({name: history.clients["accuracy"]})
    if isinstance(history.state, CFLState) and not _of_cohort(history) and history.state.active.shape[1] > 1:
        trees, drawn, summary["path_accuracy"] = _trees(history, parts)
        contents |= trees
        figures |= drawn
    if "cluster" in records[0]:
        figures["clusters"] = plots.assignments(records, parts.federation.cluster)
    contents |= {f"plots/{name}.png": plots.png(figure) for name, figure in figures.items()}
    runs.write_results(out, contents, summary)


def _clients_csv(history: History, parts: Setup) -> dict[str, bytes]:
    """Returns the tables of clients, with the hostile and the excluded ones where a run has any."""
    extra = {}
    if parts.malicious is not None:
        extra["malicious"] = parts.malicious
    if history.served.excluded is not None and not _of_cohort(history):
        extra["excluded_in_round"] = np.asarray(history.served.excluded)
    # With several processes this one holds some of the clients only, which are then numbered in their order.
    cluster, train = parts.federation.cluster, parts.federation.train
    ids = list(range(len(cluster))) if hosts.several() else client_ids(train).tolist()
    return clients_csv(history, parts.seeds, ids, cluster, extra)


def _first_seeds(tree: PyTree) -> bytes:
    """Returns the arrays of the first seed in `tree`, `[R, ...]` each, as the contents of an `.npz` file."""
    return serving.npz_bytes(jax.tree.map(lambda leaf: np.asarray(leaf[0]), tree))


def _trees(history: History, parts: Setup) -> tuple[dict[str, bytes], dict[str, plots.Figure], list[float] | None]:
    """Returns `tree.npz` and its picture for every seed, and `paths.csv`: each client under each model on its path.

    The files of further seeds are called `tree-SEED.npz`. With several processes, each of which holds some of the test
    examples, there is no `paths.csv`.

    Returns:
      The files; the figures; the first seed's mean accuracy over clients by level: under the root's model, one level
      down, ..., under their own; `None` where it is unknown.
    """
    contents, figures, lines, means = {}, {}, [], None
    ids = client_ids(parts.federation.train).tolist()
    for s, seed in enumerate(parts.seeds):
        name = "tree" if s == 0 else f"tree-{seed}"
        one = jax.tree.map(lambda x, s=s: x[s], history.state)
        buffer = io.BytesIO()
        parameter_tree.save_tree(buffer, one)
        contents[f"{name}.npz"] = buffer.getvalue()
        nodes = parameter_tree.nodes(one)
        figures[name] = plots.tree(nodes, parts.federation.cluster)
        if hosts.several():
            continue
        test = parts.federation.test
        found = parameter_tree.evaluate_paths(parts.task, one, test, client_axis=parts.client_axis)
        columns = {"loss": found.loss} | ({} if found.accuracy is None else {"accuracy": found.accuracy})
        for i, path in enumerate(found.node.tolist()):
            for level, node in enumerate(path):
                if not level or node != path[level - 1]:  # a leaf is repeated where other paths are longer
                    here = [nodes[node].round, *(f"{x[i, level]:.6g}" for x in columns.values())]
                    lines.append([seed, ids[i], level, node, *here])
        if s == 0 and found.accuracy is not None:
            means = np.nanmean(found.accuracy[np.asarray(test.size) > 0], axis=0).tolist()
    if lines:
        contents["paths.csv"] = csv_bytes([["seed", "client", "level", "node", "made_in_round", *columns], *lines])
    return contents, figures, means


class LoadedRun(NamedTuple):
    """A finished run: its `config`, its `setup` (data, task, algorithm, ...), its models and the model of each client.

    Attributes:
      params: pytree of `[K, ...]`, the models of the run's first seed, as in the state of its method.
      cluster: `[N]` int32: client `i` is served model `cluster[i]`.
      personal: pytree of `[N, ...]`, the clients' personal parameters; `()` where the run has none.
      weights: `[N, K]` float32, of a run with mixtures of models, those of each client; else None. `cluster` is then
        the model of the largest weight.
    """

    config: Config
    setup: Setup
    params: PyTree
    cluster: np.ndarray
    personal: PyTree = ()
    weights: np.ndarray | None = None

    @property
    def task(self) -> Task:
        """The task of the result of `model`."""
        return self.setup.task if self.weights is None else mixture_task(self.setup.task)

    def model(self, client: int) -> PyTree:
        """Returns the model of a client of the run, its personal parameters included; one model for one example.

        Of a mixture, it is all models and the client's weights, `(params, weights [K])`.

        Raises:
          ValueError: a client that is not in `0..N-1`.
        """
        check_count("client", client, least=0, most=len(self.cluster) - 1)
        if self.weights is not None:
            return jax.tree.map(jnp.asarray, (self.params, self.weights[client]))
        one = jax.tree.map(lambda p: jnp.asarray(p[self.cluster[client]]), self.params)
        return joined(one, jax.tree.map(lambda p: jnp.asarray(p[client]), self.personal))

    def predictor(self, client: int) -> Callable[[Any], jax.Array]:
        """Returns the compiled function `x [B, ...] -> outputs [B, ...]` of a client's model: logits, for classes.

        Raises:
          ValueError: as `model`.
        """
        return serving.predictor(self.task, self.model(client))

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
        """Returns rows of a frame `{"x", "y"}` as the table of the run was read; see `jfcl.data.read_rows`.

        Raises:
          ValueError: a run on other data than a table; a frame without its columns, or with other values.
        """
        table = self.setup.federation.table
        check(table is not None, "folder", self.config.dataset, "that of a run on a table")
        return read_rows(frame, table)

    def choose(self, examples: dict[str, Any], *, by: str = "loss") -> int:
        """Returns the cluster that fits the examples of a new client, the row of its model in `params`.

        Args:
          examples: `{"x": [B, ...], "y": [B, ...]}` and what else the loss reads; `{"x": [B, ...]}` for `by="inputs"`.
          by: `"loss"`: the model of lowest mean loss on them (IFCA's choice). `"inputs"`: the cluster of the run with
            the nearest mean input, for clients without labels. It distinguishes rotated images, not swapped labels.

        Raises:
          ValueError: an unknown `by`; examples of another shape than those of the run; a run with personal parameters,
            of which a new client has none.
        """
        accepted = "a run of single models; a new client's mixture is that of the algorithm's adopt"
        check(self.weights is None, "folder", "one with mixtures of models", accepted)
        accepted = "a run without personal parameters, of which a new client has none"
        check(not jax.tree.leaves(self.personal), "folder", "one with them", accepted)
        train = self.setup.federation.train
        return serving.choose(self.setup.task, self.params, self.cluster, train, examples, by)


def load_run(folder: str | Path, *, data_dir: str | None = None) -> LoadedRun:
    """Reads a finished run, with its models ready to use.

    Args:
      folder: that `jfcl run --out` made.
      data_dir: as in the run.

    Raises:
      ValueError: no finished run, damaged files, a run of a population (its models: `load_params`), data that the run
        was not on.

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
    summary, _ = read_run(folder)  # verifies the files
    folder = Path(folder)
    saved = saved_config(folder)
    accepted = "a run of the command line or jfcl.experiments.run; that of jfcl.simulate keeps no models and no options"
    check("key" not in saved or is_configured(saved), "folder", str(folder), accepted)
    options = check_options(from_saved(saved), str(folder / "config.json"))
    check("method" in options, str(folder / "config.json"), "no method", "the configuration of a run")
    config = Config(**options)
    check(not of_population(config), "folder", str(folder), "a run of clients, not of a population")
    # Devices, mapping and warm start do not matter for using the models, and may not exist on this machine.
    here = dataclasses.replace(config, devices=None, mapping=None, chunk=None, init_from=None)
    parts = setup(here, data_dir=data_dir)
    same = parts.federation.split_hash == saved.get("split_hash")
    check(same, "data_dir", data_dir, f"where the data of {folder} are: this split of {config.dataset} is another")
    served = _served(folder, summary, parts.seeds[0], len(parts.federation.cluster))
    state = jax.eval_shape(parts.algorithm.init, jax.random.key(0), parts.federation.train)
    like = jax.eval_shape(lambda state: parts.algorithm.serve(state, None), state)
    parts = parts._replace(task=parts.algorithm.task or parts.task)  # kNN-Per has a task of its own
    params = serving.structured(load_params(folder), like.models)
    own = serving.structured(load_params(folder, "personal"), like.personal)
    weights = None
    if like.to is not None and like.to.ndim == 2:
        shape = jax.ShapeDtypeStruct(like.to.shape, np.float32)
        weights = serving.structured(load_params(folder, "mixture"), {"weights": shape})["weights"]
    return LoadedRun(config, parts, params, served, own, weights)


def _served(folder: Path, summary: dict[str, Any], seed: int, num_clients: int) -> np.ndarray:
    """Returns the model `[N]` int32 of each client according to `clients.csv`, for one seed."""
    file, content = folder / "clients.csv", runs.read_verified(folder, summary, "clients.csv")
    try:
        lines = io.StringIO(content.decode(), newline="")
        rows = [row for row in csv.DictReader(lines) if int(row["seed"]) == seed]
        served = np.array([int(row.get("model") or row["cluster"]) for row in rows], np.int32)
    except (ValueError, KeyError, TypeError, OverflowError, csv.Error) as error:
        raise ValueError(f"{file} is damaged: {type(error).__name__}: {error}") from None
    check(len(served) == num_clients, str(file), f"{len(served)} rows of seed {seed}", f"of {num_clients} clients")
    return served


def read_run(folder: str | Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns `(summary, records)` of a finished run.

    Raises:
      ValueError: a folder without a finished run; a file that is missing, damaged or of another version.

    Example:
      >>> import tempfile
      >>> from jfcl.experiments import Config, run
      >>> folder = tempfile.mkdtemp()
      >>> _ = run(Config("fedavg", clients=4, rounds=2), out=folder)
      >>> summary, records = read_run(folder)
      >>> summary["num_rounds"], [record["round"] for record in records]
      (2, [1, 2])
    """
    plain.check_path("folder", folder)
    folder = Path(folder)
    plain.check_plain(folder)
    check_no_sweep(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} holds no finished run: it is not there")
    if not (folder / "summary.json").exists():
        raise ValueError(
            f"{folder} holds no finished run: summary.json is missing; 'jfcl report' shows what there is so far"
        )
    saved_config(folder)
    summary = runs.verify_results(folder)
    check_summary(summary, folder / "summary.json")
    records = read_records(folder)
    if not records:
        raise ValueError(f"{folder / 'metrics.jsonl'} is damaged: it holds no whole line")
    return summary, records


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Returns the records in `metrics.jsonl`, without a last line that is being written, or was cut short.

    Raises:
      ValueError: a line that is no record, or that has no round or seed, or text for a number.
    """
    records = RunFolder(folder).records()
    for i, record in enumerate(records, 1):
        if not is_whole(record):
            why = f"record {i} has no round or seed, or text for a number"
            raise ValueError(f"{folder / 'metrics.jsonl'} is damaged: {why}")
    return records


def check_no_sweep(folder: Path) -> None:
    """Raises `ValueError` for the folder of a sweep or an experiment, with what to do instead."""
    if (folder / "setting.json").exists() and not (folder / "config.json").exists():
        if not (folder / "cells").exists():
            raise ValueError(f"{folder} holds an experiment of a paper, and no run; its runs are in its folders")
        best = folder / "best.toml"
        how = f"run the best configuration with jfcl run --config {best} --out DIR" if best.exists() else "resume it"
        raise ValueError(f"{folder} holds a sweep, and no run; {how}")


def is_whole(record: dict[str, Any]) -> bool:
    """Returns whether a record has a round and a seed, and numbers under the names of metrics."""
    names = (*SEED_METRICS, "train_loss", "perplexity", "bytes_up", "bytes_down")
    cluster = record.get("cluster", [])
    whole = all(type(record.get(name)) is int for name in ("round", "seed"))
    whole &= isinstance(cluster, list) and all(type(k) is int and abs(k) < 2**31 for k in cluster)
    names += tuple(name for name in record if name.startswith("newcomer_"))
    return whole and all(is_number(record.get(name)) for name in names)


def is_number(value: Any) -> bool:
    """Returns whether `value` is a number of JSON, or None."""
    return value is None or isinstance(value, float) or (type(value) is int and abs(value) < 2**63)


def check_summary(summary: dict[str, Any], file: Path) -> None:
    """Raises `ValueError` for a summary without the entries of tables, or with text for a number."""

    def has_numbers(name: str) -> bool:
        values = summary.get(name)
        return isinstance(values, dict) and "clusters_in_use" in values and all(map(is_number, values.values()))

    numbers = ("num_clusters", "num_rounds", "bytes_up", "bytes_down", "client_steps_per_second")
    texts = ("method", "split_hash")
    wrong = [name for name in (*numbers, *texts) if name not in summary]
    optional = ("num_clients", "seconds", "compile_seconds", "rounds_per_second")
    wrong += [name for name in (*numbers, *optional) if not is_number(summary.get(name))]
    wrong += [name for name in texts if not isinstance(summary.get(name), str | None)]  # None: a run in Python
    wrong += ["num_rounds"] if summary.get("num_rounds", 0) is None else []
    wrong += [name for name in ("mean", "std") if not has_numbers(name)]
    if "mean" not in wrong and summary["mean"]["clusters_in_use"] is None:
        wrong.append("mean")
    if not {"mean", "std"} & set(wrong) and set(summary["mean"]) != set(summary["std"]):
        wrong.append("std")
    rows = summary.get("per_seed")
    whole = isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows)
    if not (whole and all(type(row.get("seed")) is int and all(map(is_number, row.values())) for row in rows)):
        wrong.append("per_seed")
    if wrong:
        raise ValueError(f"{file} is damaged: it does not have {', '.join(wrong)} as jfcl writes it")
