"""One configured run: from names and numbers to a simulation and a folder of results."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from jfcl.core import check, files
from jfcl.core.names import renamed
from jfcl.core.options import Interval
from jfcl.data import Federation
from jfcl.experiments.config import Config, to_saved
from jfcl.experiments.lookup import find_metrics
from jfcl.experiments.population import open_population, population_summary
from jfcl.experiments.report import NAME, write_report
from jfcl.experiments.result_files import summarize_run, write_results
from jfcl.experiments.results import read_results
from jfcl.experiments.setups import Setup, matmul_precision, names_of_method, setup
from jfcl.mapping import hosts
from jfcl.simulation.callbacks import EarlyStopping, check_callbacks
from jfcl.simulation.folder import RunFolder, check_folder
from jfcl.simulation.loop import History
from jfcl.simulation.run import simulate


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
      >>> from jfcl.experiments import Config  # doctest: +SLOW
      >>> summary, history, parts = run(Config("fedavg", clients=4, rounds=2))
      >>> history.rounds, len(parts.federation.cluster)
      (2, 4)
    """
    check_callbacks(callbacks)
    hosts.check_alike(config.values | {"out": out is not None, "resume": resume}, "options")
    check(out is not None or not resume, "out", out, "the folder of the run to resume")
    if out is not None:
        hosts.by_first(lambda: check_folder(out, resume, "run"))  # refuses before data are loaded
    with contextlib.ExitStack() as opened:
        opened.enter_context(jax.default_matmul_precision(matmul_precision(config.precision)))
        opened.enter_context(renamed(names_of_method(config)))
        if resume:  # also while results are written
            lock = RunFolder(out).lock_path
            hosts.by_first(lambda: Path(out).is_dir() and opened.enter_context(files.lock(lock)))
        given, of_population = sorted(config.given), config.of_population
        open_clients = open_population if of_population else _open_clients
        with open_clients(config, data_dir, out, progress) as (config, parts, clients):
            keys = jax.vmap(jax.random.key)(jnp.array(parts.seeds, jnp.uint32))
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
            write_results(Path(out), summary, history, parts)
            _write_report(out, history.records)
        return summary, history, parts


@contextlib.contextmanager
def _open_clients(config: Config, data_dir: str | None, *_: Any) -> Iterator[tuple[Config, Setup, Federation]]:
    """`open_population` for clients that are all on the device."""
    parts = setup(config, data_dir=data_dir)
    yield config, parts, parts.federation


def _write_report(out: str | Path, records: list[dict[str, Any]]) -> None:
    """Writes `report.html`; the run is finished also where that fails."""
    try:
        write_report({Path(out).resolve().name: read_results(Path(out), records)}, Path(out) / NAME)
    except (OSError, ValueError) as error:
        warnings.warn(f"the run in {out} is finished, but its report was not written: {error}", stacklevel=3)
