"""One configured run: from names and numbers to a simulation and a folder of results, which are written at its end."""

import contextlib
import io
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np

from jfcl.analysis import metrics, plots
from jfcl.core import check, client_ids, files, require
from jfcl.core.names import renamed
from jfcl.core.options import Interval
from jfcl.core.parameters import named_parameters
from jfcl.experiments.config import Config, to_saved
from jfcl.experiments.lookup import find_metrics
from jfcl.experiments.population import open_population, population_summary
from jfcl.experiments.privacy import privacy_of
from jfcl.experiments.report import NAME, write_report
from jfcl.experiments.results import read_results
from jfcl.experiments.setups import Setup, in_half, matmul_precision, names_of_method, setup
from jfcl.mapping import hosts
from jfcl.methods import METHODS
from jfcl.simulation.callbacks import EarlyStopping, check_callbacks
from jfcl.simulation.folder import RunFolder, check_folder, check_same, finite_or_none, write_results
from jfcl.simulation.loop import History
from jfcl.simulation.progress import DivergedError
from jfcl.simulation.resident import row_of
from jfcl.simulation.results import clients_csv, summarize
from jfcl.simulation.run import simulate

OF_DATA = ("split_hash", "schedule_rounds")  # names in config.json with values that follow from data, too


def run(
    config: Config,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    data_dir: str | None = None,
    progress: bool = False,
    checkpoint_seconds: Annotated[float, Interval("[0, inf)")] = 30.0,
    callbacks: Sequence[Any] = (),
) -> tuple[dict[str, Any], History, Setup]:
    """Runs `config`; with `out`, leaves `summary.json`, `clients.csv`, `params.npz`, plots and `report.html`.

    Args:
      config: the options of the run.
      out: folder for results; default: none are kept.
      resume: continue what was stopped in `out`.
      data_dir: folder of official data files; default: $JFCL_DATA_DIR, else TFDS.
      progress: show a progress bar.
      checkpoint_seconds: least time between two checkpoints, the first of which is made after 5 seconds.
      callbacks: those of `jfcl.simulate`; `patience` of `config` adds `jfcl.callbacks.EarlyStopping`.

    Returns:
      `(summary, history, setup)`. Of a population, `setup` has the clients that are evaluated, 1,000 at most.

    Raises:
      ValueError: before anything is computed, for options that do not fit.

    Example:
      >>> from jfcl.experiments import Config
      >>> summary, history, parts = run(Config("fedavg", clients=4, rounds=2))
      >>> history.rounds, len(parts.federation.cluster)
      (2, 4)
    """
    check_callbacks(callbacks)
    hosts.check_alike(config.values | {"out": out is not None, "resume": resume}, "options")
    require(out is not None or not resume, "resume needs out, the folder of the run")
    if out is not None:
        hosts.by_first(lambda: _check_out(out, config, resume))
    with contextlib.ExitStack() as opened:
        opened.enter_context(jax.default_matmul_precision(matmul_precision(config.precision)))
        opened.enter_context(renamed(names_of_method(config)))
        opened.enter_context(_remedy(config))
        if resume:  # also while results are written
            lock = RunFolder(out).lock_path
            hosts.by_first(lambda: Path(out).is_dir() and opened.enter_context(files.lock(lock)))
        given, of_population = sorted(config.given), config.of_population
        if of_population:
            config, parts, clients = opened.enter_context(open_population(config, data_dir, out, progress))
        else:
            parts = setup(config, data_dir=data_dir)
            clients = parts.federation
        keys = jax.vmap(jax.random.key)(np.array(parts.seeds, np.uint32))
        fits = config.patience is None or parts.task.correct is not None or config.monitor.endswith("loss")
        check(fits, "monitor", config.monitor, "loss or train_loss with a model that has no accuracy")
        stopping = [EarlyStopping(patience=config.patience, metric=config.monitor)] if config.patience else []
        history = simulate(
            parts.algorithm,
            clients,
            key=jax.random.key(parts.seeds[0]) if of_population else keys,
            num_rounds=config.rounds,
            true_cluster=None if of_population else parts.true_cluster,
            serve=config.serve,
            eval_every=config.eval_every,
            seeds=parts.seeds,
            client_axis=parts.client_axis,
            out=out,
            resume=resume,
            config=to_saved(config, parts.federation.split_hash) | {"given": given},
            checkpoint_seconds=checkpoint_seconds,
            progress=progress,
            description=config.method,
            keep_clients=config.keep_clients,
            metrics=find_metrics(config.metrics) if config.metrics else None,
            callbacks=[*stopping, *callbacks],
            summary=False,
        )
        summary = summarize_run(config, history, parts)
        summary |= population_summary(clients, history.records[-1]) if of_population else {}
        if out is not None and hosts.is_first():
            _write_results(Path(out), summary, history, parts)
            _write_report(out, history.records)
        return summary, history, parts


@contextlib.contextmanager
def _remedy(config: Config) -> Iterator[None]:
    """Says where a model diverged in bfloat16, since it may not in float32."""
    try:
        yield
    except DivergedError as error:
        if not in_half(config):
            raise
        raise DivergedError(f"{error}; the model is in bfloat16 (--precision): float32 may not diverge") from None


def _check_out(out: str | Path, config: Config, resume: bool) -> None:
    """Raises `ValueError`, before data are loaded, where another run is in `out`."""
    check_folder(out, resume, "run")
    if (Path(out) / "config.json").exists() and not config.of_population:  # whose store has options, too
        check_same(Path(out), to_saved(config, ""), OF_DATA)


def _write_report(out: str | Path, records: list[dict[str, Any]]) -> None:
    """Writes `report.html`; the run is finished also where that fails."""
    try:
        write_report({Path(out).resolve().name: read_results(Path(out), records)}, Path(out) / NAME)
    except (OSError, ValueError) as error:
        warnings.warn(f"the run in {out} is finished, but its report was not written: {error}", stacklevel=3)


# ---------------------------------------------------------------------------------------------------------------
# The results.


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
    }
    summary |= {} if parts.federation.table is None else {"table": parts.federation.table}
    summary |= summarize(history)
    true, served = parts.federation.mixture, history.served
    mixtures = history.clients.get("weights", served.to if served.shares is None else served.shares)
    if true is not None and mixtures is not None and mixtures.shape[1:2] == true.shape[:1] and mixtures.ndim == 3:
        counts = parts.true_cluster >= 0  # not hostile clients
        recoveries = [metrics.mixture_recovery(np.asarray(weights)[counts], true[counts]) for weights in mixtures]
        summary |= {name: float(np.mean([recovery[name] for recovery in recoveries])) for name in recoveries[0]}
    if config.dp_clip is not None:
        clusters = np.asarray(history.clients["cluster"])[0]
        last = next(r for r in history.records if r["round"] == history.rounds)
        summary["privacy"] = privacy_of(config, config.clients, history.rounds, clusters, last)
    return finite_or_none(summary)


def silhouettes_by_number(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the silhouettes by the number of clusters as records, those of each seed's last round that has any.

    Example:
      >>> silhouettes_by_number([{"seed": 0, "round": 4, "silhouettes": [None, None, 0.5]}])
      [{'seed': 0, 'number of clusters': 2, 'mean silhouette': 0.5}]
    """
    scores = {r["seed"]: pairs for r in records if (pairs := _numbered(r.get("silhouettes", ())))}
    names = "number of clusters", "mean silhouette"
    return [{"seed": seed} | dict(zip(names, pair, strict=True)) for seed in scores for pair in scores[seed]]


def _numbered(scores: Any) -> list[tuple[int, float]]:
    """Returns `(place, score)` of the scores that are finite."""
    return [(k, score) for k, score in enumerate(scores) if score is not None and np.isfinite(score)]


def _write_results(out: Path, summary: dict[str, Any], history: History, parts: Setup) -> None:
    """Writes `clients.csv`, `params.npz`, the plots and, last, `summary.json`, which marks the run as finished.

    `personal.npz` holds personal parameters, and `mixture.npz` the weights of clients' mixtures, where the run has any
    and is not one of a population, whose state is that of the last cohort. Of a population `params.npz` holds the
    models that clients share, and is left out where each has a model of its own.
    """
    name, records, served = summary["method"], history.records, history.served
    of_all = history.rows is None  # the clients of the state are those that are evaluated
    arrays = {"params": served.models} if of_all or served.to is not None else {}
    if of_all and jax.tree.leaves(served.personal):
        arrays["personal"] = served.personal
    if of_all and served.to is not None and served.to.ndim == 3:
        arrays["mixture"] = {"weights": served.to}
    first = jax.tree.map(lambda x: np.asarray(x)[0] if of_all else np.asarray(x), arrays)  # a population has one seed
    contents = {f"{part}.npz": files.npz_bytes(named_parameters(tree)) for part, tree in first.items()}
    # The table of clients, with the hostile and the excluded ones where a run has any.
    extra = {} if parts.malicious is None else {"malicious": parts.malicious}
    if of_all and served.excluded is not None:
        extra["excluded_in_round"] = np.asarray(served.excluded)
    # With several processes this one holds some of the clients only, which are then numbered in their order.
    cluster, train, drift = parts.federation.cluster, parts.federation.train, parts.federation.drift
    ids = list(range(len(cluster))) if hosts.several() else client_ids(train).tolist()
    contents |= clients_csv(history, parts.seeds, ids, cluster if drift is None else drift.cluster, extra)
    if drift is not None:  # a callback may have ended the run before the last step
        cluster = drift.cluster[records[-1]["step"]]
    # Pictures, and the parameter trees.
    figures = {"loss": plots.curves({name: records}, "train_loss")}
    drawn = [metric for metric in ("accuracy", "perplexity") if metric in history.clients]
    if drift is not None:
        drawn += [metric for metric in ("next_accuracy", "adjusted_rand") if metric in records[0]]
    figures |= {metric: plots.curves({name: records}, metric) for metric in drawn}
    if "accuracy" in history.clients:  # not of a regression
        figures["clients"] = plots.client_accuracies({name: history.clients["accuracy"]})
    method = METHODS.get(name)  # None: of a user
    if of_all and method and method.tree and served.active.shape[1] > 1:
        for s, seed in enumerate(parts.seeds):
            label, tree = f"tree-{seed}" if s else "tree", row_of(history.state, row=s)
            method.tree.save_tree(buffer := io.BytesIO(), tree)
            contents[f"{label}.npz"] = buffer.getvalue()
            figures[label] = plots.tree(method.tree.nodes(tree), cluster)
    if "cluster" in records[0] and summary["finds_clusters"]:  # not of one model, or of one for each client
        figures["clusters"] = plots.assignments(records, cluster)
    if by_number := silhouettes_by_number(records):
        figures["silhouettes"] = plots.curves({name: by_number}, "mean silhouette", over="number of clusters")
    contents |= {f"plots/{name}.png": plots.png(figure) for name, figure in figures.items()}
    write_results(out, contents, summary)
