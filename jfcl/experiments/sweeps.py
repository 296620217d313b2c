"""`jfcl sweep`: a method of `jfcl run` with all combinations of some of its options."""

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from jfcl import mapping
from jfcl.core import check, files, max_examples, require
from jfcl.core.names import flag_of, option_hint, renamed
from jfcl.core.options import Interval, OneOf, Option, Range, check_options
from jfcl.data import hold_out
from jfcl.experiments import setups
from jfcl.experiments.config import Config, to_saved
from jfcl.experiments.options import Data, Run, all_options
from jfcl.simulation.folder import check_folder
from jfcl.simulation.grid import METRICS, Sweep, check_grid, sweep

# Options with one value in a sweep. Those of the data and the attack decide which examples the cells are judged on.
OF_ALL_CELLS = (*Data.__annotations__, *Run.__annotations__, "rounds", "attack", "malicious")
OF_ALL_CELLS += ("init_from", "share", "personal")
REFUSED = ("drift", "patience", "population", "store")
BOOLEANS = {"true": True, "false": False}
SEEDS = 3  # of each cell, unless they are given
FILES = ("sweep.json", "best.toml", "heatmap.png")


def read_grid(texts: Sequence[str] | None, method: str | None = None) -> dict[str, list[Any]]:
    """Returns the values of every option in texts such as `"lr=0.01,0.1"`; `method`: for options of a user's own.

    Raises:
      ValueError: no text; another form; an unknown option, or one twice.

    Example:
      >>> read_grid(["lr=0.01,0.1", "num_clusters=2,4"])
      {'lr': [0.01, 0.1], 'num_models': [2, 4]}
    """
    require(texts, "Give a grid, --grid NAME=VALUE,VALUE,..., such as --grid lr=0.01,0.1.")
    schema, grid = all_options(method), {}
    for text in texts:
        flag, _, values = text.partition("=")
        check(flag.strip() and values.strip(), "grid", text, "NAME=VALUE,VALUE,..., such as lr=0.01,0.1")
        name = flag.strip().removeprefix("--").replace("-", "_")
        name = "num_models" if name == "num_clusters" else name  # as the factories call it
        if name not in schema:
            raise ValueError(f"grid: unknown option {flag[:100]!r}{option_hint(name, schema)}")
        check(name not in grid, "grid", flag, f"given once: {name} has two axes")
        grid[name] = [_read_value(schema[name], value.strip()) for value in values.split(",")]
    return grid


def _read_value(option: Option, text: str) -> Any:
    """Returns the value of an option in a text; else the text itself, which `Config` refuses."""
    try:
        return BOOLEANS[text.lower()] if option.kind is bool else option.kind(text)
    except (ValueError, KeyError):
        return text


def run_sweep(
    config: Config,
    grid: dict[str, list[Any]],
    *,
    metric: Annotated[str | None, OneOf(METRICS)] = None,
    holdout: Annotated[float, Interval("(0, 1)")] = 0.2,
    at_once: Annotated[int | None, Range(1)] = None,
    out: str | Path | None = None,
    resume: bool = False,
    data_dir: str | None = None,
    progress: bool = False,
) -> Sweep:
    """Runs `config` with all combinations of the options in `grid`, and judges them on held-out training examples.

    The test examples of `config` are not used: `jfcl run METHOD --config best.toml` trains the best configuration on
    all training examples, and reports the accuracy on the test examples.

    Args:
      config: the options of all cells, seeds included.
      grid: the values of each further option, by its name in `Config`. Numbers that the method takes as tracers, as its
        declaration shows, are arguments of one program.
      metric: result that the cells are judged by; default: accuracy, or loss where there is none.
      holdout: share of each client's training examples that the cells are judged on, and not trained on.
      at_once: runs on each device at once; default: 1 on a CPU, else as many as fit into memory.
      out: folder for the results: those of `jfcl.sweep`, and `best.toml`.
      resume: continue the sweep in `out`, or begin it; finished cells are kept.
      data_dir: folder of official data files; default: $JFCL_DATA_DIR, else TFDS.
      progress: show a progress bar.

    Raises:
      ValueError: before anything is compiled, for options that do not fit.

    Example:
      >>> from jfcl.experiments import Config
      >>> config = Config("fedavg", clients=4, clusters=2, model="linear", rounds=2)
      >>> swept = run_sweep(config, {"lr": [0.001, 0.1]})
      >>> swept.cells[swept.best].values
      {'lr': 0.1}
    """
    # Check every cell, without the data.
    check_options(run_sweep, locals())
    for name in REFUSED:
        accepted = "left out of a sweep, which judges the last round alone, of clients on a device with fixed data"
        check(getattr(config, name) is None, name, getattr(config, name), accepted)
    schema = all_options(config.method)
    for name in grid:
        accepted = f"an option that may differ between cells; give {flag_of(name)} for all of them"
        check(name in schema and name not in OF_ALL_CELLS, "grid", name, accepted)
    combinations = itertools.product(*check_grid(grid).values())
    cells = [dataclasses.replace(config, **dict(zip(grid, values, strict=True))) for values in combinations]
    if out is not None:
        check_folder(out, resume, "sweep")

    # Data, the same for all cells, and devices.
    one_device = "vmap" if config.mapping == "vmap" else "chunked"  # runs, not clients, are divided among the devices
    client_axis = setups.mapping_of(dataclasses.replace(config, mapping=one_device))
    mesh = mapping.client_mesh(config.devices)
    row_axis = mapping.auto() if mesh.size == 1 else mapping.sharded(mesh, mapping.auto())
    federation = setups.load_clients(cells[0], data_dir, client_axis)
    for cell in cells:
        setups.check_model_reads(cell, federation.vocab_size is not None)
    train, held_out = hold_out(federation.train, holdout, seed=config.data_seed)
    attackers = setups.malicious_clients(config)  # as in the final test, they do not count
    held_out = held_out._replace(size=np.where(attackers, 0, held_out.size).astype(np.int32))
    seeds = setups.seeds_of(config)

    # Run.
    setting = to_saved(config, federation.split_hash) | {"devices": None}  # a resumption may have others
    del setting["given"]
    named = renamed(setups.names_of_method(config, grid))
    with jax.default_matmul_precision(setups.matmul_precision(config.precision)), named:
        swept = sweep(
            setups.algorithms_of(config, federation, max_examples(train), client_axis),
            grid,
            train,
            key=jax.vmap(jax.random.key)(jnp.array(seeds, jnp.uint32)),
            num_rounds=config.rounds,
            held_out=held_out,
            metric=metric,
            traced=[name for name in grid if schema[name].traced],
            seeds=seeds,
            serve=config.serve,
            row_axis=row_axis,
            at_once=at_once,
            client_axis=client_axis,
            out=out,
            resume=resume,
            config=setting | {"holdout": holdout},
            progress=progress,
        )
    if out is not None and swept.best is not None:
        files.write_whole(Path(out) / "best.toml", best_toml(config, swept).encode())
    return swept


def best_toml(config: Config, swept: Sweep) -> str:
    """Returns the file with the options of the best cell that are not the defaults, as `jfcl run --config` reads it."""
    best = swept.cells[swept.best]
    chosen = dataclasses.replace(config, **best.values)
    options = {"method": chosen.method} | chosen.given | ({"seeds": chosen.seeds} if chosen.seed is None else {})
    score = f"{swept.metric.replace('_', ' ')} {best.mean[swept.metric]:.4g} on held-out training examples"
    lines = [f"# The best of {len(swept.cells)} configurations of jfcl sweep: {score}."]
    for name, value in options.items():
        if isinstance(value, (str, bool)):  # a text of JSON is one of TOML, but for DEL
            value = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        lines.append(f"{name} = {value}")
    return "\n".join(lines) + "\n"
