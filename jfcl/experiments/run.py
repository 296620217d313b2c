"""One configured run: from names and numbers to a simulation and a folder of results."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jfcl.core import files
from jfcl.experiments.config import Config, to_saved
from jfcl.experiments.own import find_metrics
from jfcl.experiments.population import run_population
from jfcl.experiments.report import NAME, write_report
from jfcl.experiments.result_files import summarize_run, write_results
from jfcl.experiments.results import read_results
from jfcl.experiments.setups import Setup, matmul_precision, setup
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
    checkpoint_seconds: float = 30.0,
    callbacks: Sequence[Any] = (),
) -> tuple[dict[str, Any], History, Setup]:
    """Runs `config`; with `out`, leaves `summary.json`, `clients.csv`, `params.npz`, plots and `report.html`.

    `callbacks` are those of `jfcl.simulate`; `patience` of `config` adds `jfcl.callbacks.EarlyStopping`.

    Returns:
      `(summary, history, setup)`.

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
    if out is not None:
        hosts.by_first(lambda: check_folder(out, resume, "run"))  # refuses before data are loaded
    with contextlib.ExitStack() as opened:
        opened.enter_context(jax.default_matmul_precision(matmul_precision(config.precision)))
        if resume and out is not None:  # also while results are written
            lock = RunFolder(out).lock_path
            hosts.by_first(lambda: Path(out).is_dir() and opened.enter_context(files.lock(lock)))
        options = {"out": out, "resume": resume, "progress": progress, "checkpoint_seconds": checkpoint_seconds}
        options |= {"eval_every": config.eval_every, "serve": config.serve}
        stopping = [EarlyStopping(patience=config.patience, metric=config.monitor)] if config.patience else []
        options |= {"metrics": find_metrics(config.metrics) if config.metrics else None}
        options |= {"callbacks": [*stopping, *callbacks], "summary": False, "keep_clients": config.keep_clients}
        run_clients = run_population if config.of_population else _run_on_device
        found = run_clients(config, data_dir, options | {"description": config.method})
        if out is not None and hosts.is_first():
            _write_report(out, found[1].records)
        return found


def _write_report(out: str | Path, records: list[dict[str, Any]]) -> None:
    """Writes `report.html`; the run is finished also where that fails."""
    try:
        write_report({Path(out).resolve().name: read_results(Path(out), records)}, Path(out) / NAME)
    except (OSError, ValueError) as error:
        warnings.warn(f"the run in {out} is finished, but its report was not written: {error}", stacklevel=3)


def _run_on_device(
    config: Config, data_dir: str | None, options: dict[str, Any]
) -> tuple[dict[str, Any], History, Setup]:
    """`run` for clients that are all on the device; `options` are those of `simulate`."""
    parts, out = setup(config, data_dir=data_dir), options["out"]
    federation = parts.federation
    history = simulate(
        parts.algorithm,
        federation.train,
        key=jax.vmap(jax.random.key)(jnp.array(parts.seeds, jnp.uint32)),
        num_rounds=config.rounds,
        test_clients=federation.test,
        newcomers=federation.newcomers,
        true_cluster=parts.true_cluster,
        seeds=parts.seeds,
        client_axis=parts.client_axis,
        config=to_saved(config, federation.split_hash),
        **options,
    )
    summary = summarize_run(config, history, parts)
    if out is not None and hosts.is_first():
        write_results(Path(out), summary, history, parts)
    return summary, history, parts
