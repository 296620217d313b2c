"""The command line: `jfcl run`, `compare`, `list`, `reproduce`, `bench`, `demo` (also `python -m jfcl`)."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import inspect
import json
import os
import tomllib
import traceback
import warnings
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

EXAMPLES = """examples:
  jfcl run ifca --clients 40 --clusters 4 --rounds 100 --seeds 5 --restarts 5 --out runs/ifca
  jfcl run fedavg --clients 40 --clusters 4 --rounds 100 --seeds 5 --out runs/fedavg
  jfcl compare runs/ifca runs/fedavg
  jfcl run ifca --dataset mnist --data-dir DATA --clients 1200 --examples-per-client 200 --rounds 30 --out runs/mnist
  jfcl run fedavg --population 1000000 --cohort 1000 --sampling stratified --dropout 0.1 --rounds 50 --out runs/million
  jfcl run ifca --config experiment.toml --lr 0.05 --out runs/x        flags override the file
  jfcl run ifca --config runs/x/config.json --out runs/x --resume      go on with a run that was stopped
"""
GROUPS = {
    "data": "data: who holds what",
    "training": "training: model, rounds, local steps",
    "method": "method: options that some methods take",
    "attack": "attack: hostile clients, and aggregators that withstand them",
    "run": "run: seeds, evaluation, memory",
}
LISTS = (
    "methods",
    "datasets",
    "models",
    "heterogeneities",
    "partitions",
    "augmentations",
    "attacks",
    "aggregators",
    "recipes",
)
MOST_CPU_DEVICES = 1024  # starting more takes long, and is of no use
LONGEST_MESSAGE = 4000  # characters
LARGEST_CONFIG = 2**20  # bytes; a run's config.json has about 2,000
DEMO = {
    "fedavg": {},
    "local": {},
    "ifca": {"restarts": 5, "restart_rounds": 5},
    "oracle": {},
}


class _Parser(argparse.ArgumentParser):
    """argparse that names the nearest option instead of only refusing one."""

    def parse_args(self, args=None, namespace=None):
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flags = [s for action in _all_actions(self) for s in action.option_strings]
            name = unknown[0].split("=")[0][:100]
            near = difflib.get_close_matches(name, flags, n=1)
            raise ValueError(f"unknown option {name}" + (f": did you mean {near[0]}?" if near else ""))
        return parsed

    def error(self, message):
        raise ValueError(message)


def _all_actions(parser: argparse.ArgumentParser):
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                yield from _all_actions(sub)


def _fields() -> dict[str, tuple[dataclasses.Field, type]]:
    """The options of `Config`, and the type that the text of each is read as."""
    from jfcl.experiments import Config
    from jfcl.experiments.config import option_types

    return {f.name: (f, option_types()[f.name]) for f in dataclasses.fields(Config)}


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; `run`'s options come from `jfcl.experiments.Config`."""
    from jfcl import __version__

    parser = _Parser(
        prog="jfcl",
        description="Simulate clustered federated learning: many clients, hidden groups, one model per group.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"jfcl {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)

    run = commands.add_parser(
        "run",
        help="run one method and keep its results in a folder",
        description="Run one method. Options left out have the value in brackets.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    run.add_argument(
        "method",
        metavar="METHOD",
        nargs="?",
        help="fedavg, local, oracle, ifca, ...; 'jfcl list methods' shows all; default: that of --config",
    )
    groups = {name: run.add_argument_group(title) for name, title in GROUPS.items()}
    for name, (field, kind) in _fields().items():
        if name == "method":
            continue
        shown = "" if field.default is None or kind is bool else f" [{field.default}]"
        if kind is bool:
            groups[field.metadata["group"]].add_argument(
                "--" + name.replace("_", "-"),
                action="store_true",
                default=argparse.SUPPRESS,
                help=field.metadata["help"],
            )
            continue
        groups[field.metadata["group"]].add_argument(
            "--" + name.replace("_", "-"),
            type=kind,
            default=argparse.SUPPRESS,
            metavar={int: "N", float: "X", str: "NAME"}[kind],
            help=field.metadata["help"].replace("%", "%%") + shown,
        )
    files = run.add_argument_group("files")
    files.add_argument(
        "--data-dir", metavar="DIR", help="folder of official data files; else $JFCL_DATA_DIR, else TFDS"
    )
    files.add_argument("--out", metavar="DIR", help="folder for results, checkpoints and plots; default: none are kept")
    files.add_argument("--resume", action="store_true", help="go on with the run in --out from its last checkpoint")
    files.add_argument(
        "--config", metavar="FILE", help="TOML (or a run's config.json) with the names above; flags override"
    )
    files.add_argument(
        "--checkpoint-seconds", type=float, default=30.0, metavar="X", help="least time between two [30]"
    )
    files.add_argument("--quiet", action="store_true", help="no progress bar")
    several = run.add_argument_group("several processes: the same command in each, on one machine or on many")
    several.add_argument(
        "--coordinator", metavar="HOST:PORT", help="of process 0; auto on Cloud TPU and Slurm, without the other two"
    )
    several.add_argument("--num-processes", type=int, metavar="N", help="how many there are")
    several.add_argument("--process-id", type=int, metavar="N", help="which of them this is, from 0")

    compare = commands.add_parser("compare", help="table and plots of finished runs side by side", allow_abbrev=False)
    compare.add_argument("runs", nargs="+", metavar="DIR", help="folders that 'jfcl run --out' made")
    compare.add_argument("--out", metavar="DIR", help="folder for the plots; default: beside the first run, compare/")

    listing = commands.add_parser("list", help="methods, data sets, models, ... in one line each", allow_abbrev=False)
    listing.add_argument(
        "what",
        nargs="?",
        metavar="WHAT",
        help=", ".join(LISTS),
    )

    again = commands.add_parser(
        "reproduce",
        help="an experiment of one of the papers, its numbers beside ours",
        description="Run a paper's experiment: a table with the paper's numbers beside ours, and its picture."
        " What was already run in --out is not run again.",
        allow_abbrev=False,
    )
    again.add_argument("name", metavar="NAME", help="'jfcl list recipes' shows them")
    again.add_argument("--full", action="store_true", help="the paper's setting; default: one for a CPU of 2 cores")
    again.add_argument("--rounds", type=int, metavar="N", help="another number of rounds than the setting's")
    again.add_argument("--seeds", type=int, metavar="N", help="another number of seeds")
    again.add_argument("--examples-per-client", type=int, metavar="N", help="another number of examples")
    again.add_argument(
        "--data-dir", metavar="DIR", help="folder of official data files; else $JFCL_DATA_DIR, else TFDS"
    )
    again.add_argument("--out", metavar="DIR", help="folder for results [runs/reproduce/NAME-small, or -full]")
    again.add_argument("--quiet", action="store_true", help="no progress bars")

    bench = commands.add_parser(
        "bench",
        help="how fast rounds are here: method x model x mapping x number of clients",
        description="Measure one round of every method x model x mapping x number of clients on random images of"
        " 28 x 28: client-steps a second, the fraction of a large matrix product's speed, memory, compilation. Rounds"
        " that would take longer than --seconds are left out.",
        allow_abbrev=False,
    )
    bench.add_argument("--methods", nargs="+", metavar="NAME", help="of fedavg, ifca, local [all]")
    bench.add_argument("--models", nargs="+", metavar="NAME", help="see 'jfcl list models' [mlp cnn_mnist]")
    bench.add_argument("--mappings", nargs="+", metavar="NAME", help="how clients are mapped ['chunked(1)' ... vmap]")
    bench.add_argument("--clients", nargs="+", type=int, metavar="N", help="numbers of clients [10 100 1000]")
    bench.add_argument("--examples", type=int, metavar="N", help="per client [40]")
    bench.add_argument("--batch-size", type=int, metavar="N", help="examples per local step [20]")
    bench.add_argument("--local-steps", type=int, metavar="N", help="per round [2]")
    bench.add_argument("--clusters", type=int, metavar="N", help="models of ifca [4]")
    bench.add_argument("--repeats", type=int, metavar="N", help="timed runs of every round, of which the median [3]")
    bench.add_argument("--seconds", type=float, metavar="X", help="that the runs of one round may take [1]")
    bench.add_argument(
        "--devices", type=int, metavar="N", help="divide the CPU into so many; adds 'sharded(chunked(1))'"
    )
    bench.add_argument("--quick", action="store_true", help="fedavg, mlp, 10 clients only, where not said otherwise")
    bench.add_argument("--out", default="runs/bench", metavar="DIR", help="folder for results [runs/bench]")
    bench.add_argument("--quiet", action="store_true", help="no progress bar")

    demo = commands.add_parser("demo", help="IFCA against FedAvg, local training and the oracle on rotated digits")
    demo.add_argument("--out", default="runs/demo", metavar="DIR", help="folder for results [runs/demo]")
    demo.add_argument("--seeds", type=int, default=5, metavar="N", help="seeds [5]")
    demo.add_argument("--rounds", type=int, default=100, metavar="N", help="rounds [100]")
    return parser


def read_config(path: str) -> dict[str, Any]:
    """Options from a TOML file or a run's `config.json`, checked for unknown names and wrong types."""
    from jfcl.experiments.config import check_options, from_saved

    file, where = Path(path), f"--config {path}"
    if not file.is_file():
        raise ValueError(f"{where}: {'it is no regular file' if file.exists() else 'no such file'}")
    with file.open("rb") as f:  # never more than that: a file may be as long as its system likes
        content = f.read(LARGEST_CONFIG + 1)
    if len(content) > LARGEST_CONFIG:
        raise ValueError(f"{where}: it must be a list of options of at most {LARGEST_CONFIG} bytes, and is larger")
    try:
        raw = json.loads(content.decode()) if file.suffix == ".json" else tomllib.loads(content.decode())
    except RecursionError:
        raise ValueError(f"{where}: it is nested too deeply; it must hold names and values") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{where}: it must hold names and values, got {type(raw).__name__}")
    return check_options(from_saved(raw) if file.suffix == ".json" else raw, where)


def _number(value: float | None, std: float | None, digits: int) -> str:
    if value is None:
        return "–"
    return f"{value:.{digits}f}" + ("" if std is None else f"±{std:.{digits}f}")


def _bytes(value: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError


def results_table(summaries: dict[str, dict[str, Any]], title: str) -> Table:
    """One row per run: mean ± standard deviation over seeds. Narrow enough for a terminal of 80 columns."""
    look = {"box": SIMPLE_HEAD, "show_edge": False, "padding": 0}  # columns stand one blank apart
    table = Table(title=Text(title), title_justify="left", title_style="", header_style="bold", **look)
    table.add_column("run", overflow="fold")
    words = any("perplexity" in summary["mean"] for summary in summaries.values())
    heads = (
        "perplex-\nity" if words else "client\nacc. %",
        "worst\nclient %",
        "identity\nacc. %",
        "adjusted\nRand",
        "clusters\nin use",
    )
    for head in (*heads, "found at\nround", "sent up\nand down", "steps/s"):
        table.add_column(head, justify="right", no_wrap=True)
    for name, summary in summaries.items():
        mean, std = summary["mean"], summary["std"]
        several, alone = len(summary["per_seed"]) > 1, summary["num_clusters"] == 1  # which nobody can miss

        def cell(metric: str, scale: float, digits: int, mean=mean, std=std, several=several, alone=alone) -> str:
            if mean.get(metric) is None or (alone and metric in ("cluster_accuracy", "adjusted_rand")):
                return "–"
            return _number(scale * mean[metric], scale * std[metric] if several else None, digits)

        recovered = [row["rounds_to_recovery"] for row in summary["per_seed"]]
        found = [r for r in recovered if r is not None and not alone]
        rounds = "–" if not found else f"{sum(found) / len(found):.0f}"
        if found and len(found) < len(recovered):
            rounds += f"\n({len(found)} of {len(recovered)})"
        table.add_row(
            Text(name),
            cell("perplexity", 1, 1) if words else cell("accuracy", 100, 1),
            *[cell(metric, 100, 1) for metric in ("worst_client_accuracy", "cluster_accuracy")],
            cell("adjusted_rand", 1, 2),
            _number(mean["clusters_in_use"], None, 1),
            rounds,
            f"{_bytes(summary['bytes_up'])}\n{_bytes(summary['bytes_down'])}",
            f"{summary['client_steps_per_second']:,.0f}",
        )
    return table


def _say_seeds(summary: dict[str, Any]) -> str:
    count = len(summary["per_seed"])
    return f"mean ± std over {count} seeds" if count > 1 else f"seed {summary['per_seed'][0]['seed']}"


def _divide_cpu(devices: int | None) -> None:
    """Makes the CPU show so many devices, where that is asked for: before jax looks for them."""
    import jax

    from jfcl.core import check_count

    if devices is not None:
        check_count("devices", devices)
        with contextlib.suppress(RuntimeError):  # where jax is in use already, its devices are what they are
            jax.config.update("jax_num_cpu_devices", min(devices, MOST_CPU_DEVICES))


def _check_platform() -> None:
    """Starts jax's backend; `ValueError` where `JAX_PLATFORMS` asks for one that is not there."""
    import jax

    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter from JAX_PLATFORMS=cuda without jax's CUDA plugin
        asked = jax.config.jax_platforms
        why = f" ({str(error).splitlines()[0]})" if str(error) else ""
        raise ValueError(
            f"JAX_PLATFORMS must be unset, or name devices that jax finds here, got {asked!r}{why}"
        ) from None


def _check_folders(args: argparse.Namespace, *names: str) -> None:
    """`ValueError` for a name of a file or folder that cannot be one."""
    from jfcl.core import check
    from jfcl.experiments.config import is_text

    for name in names:
        given = getattr(args, name)
        for one in given if isinstance(given, list) else [given]:
            check(one is None or is_text(one), name, one, "the name of a file or folder, in UTF-8")
            folder = name != "data_dir" or one is None or not Path(one).is_file()
            check(folder, name, one, "a folder, and not a file")


def _check_out(out: str | None) -> None:
    """`ValueError` where nothing can be written in `out`, before anything is computed."""
    from jfcl.core import check

    if out is None:
        return
    there = Path(out)
    while not (there.exists() or there.is_symlink()) and there != there.parent:
        there = there.parent
    check(there.is_dir(), "out", out, f"a folder, but {there} is none")
    check(os.access(there, os.W_OK | os.X_OK), "out", out, f"in a folder that can be written: {there} cannot")


def _find_devices(args: argparse.Namespace, devices: int | None) -> None:
    """Divides the CPU and joins the other processes, where that is asked for."""
    from jfcl.execution import hosts

    _divide_cpu(devices)
    if args.coordinator is not None:
        hosts.connect(args.coordinator, args.num_processes, args.process_id)
    elif args.num_processes is not None or args.process_id is not None:
        raise ValueError("coordinator must be given with --num-processes and --process-id, got None")
    _check_platform()


def command_run(args: argparse.Namespace, console: Console) -> None:
    """`jfcl run`."""
    from jfcl.core import check
    from jfcl.execution import hosts
    from jfcl.experiments import Config, run
    from jfcl.experiments.config import check_values, of_population, validate

    _check_folders(args, "out", "data_dir", "config", "coordinator")
    check(args.checkpoint_seconds >= 0, "checkpoint_seconds", args.checkpoint_seconds, "0 or more")
    own = {name: value for name, value in vars(args).items() if name in _fields() and (name != "method" or value)}
    read = read_config(args.config) if args.config else {}
    if "method" not in read | own:
        raise ValueError("METHOD must be given, or stand in --config; 'jfcl list methods' shows them")
    config = Config(**read | own)
    (check_values if of_population(config) else validate)(config)  # a population's is complete when its store is read
    _check_out(args.out)
    _find_devices(args, config.devices)
    if not hosts.is_first():
        console = Console(quiet=True)
    summary, _, _ = run(
        config,
        out=args.out,
        resume=args.resume,
        data_dir=args.data_dir,
        progress=not args.quiet,
        checkpoint_seconds=args.checkpoint_seconds,
    )
    attack = "" if config.attack is None else f"; {config.malicious:.0%} malicious: {config.attack}"
    title = f"{summary['description']}{attack}; {_say_seeds(summary)}"
    console.print(results_table({summary["method"]: summary}, title))
    console.print(
        f"{summary['num_rounds']} rounds, {summary['rounds_per_second']:.2f} rounds/s, {summary['seconds']:.1f} s"
        f" + {summary['compile_seconds']:.1f} s compiling, on {summary['device']}"
    )
    if summary["num_rounds"] < config.rounds:
        console.print(f"note: ended after {summary['num_rounds']} of {config.rounds} rounds: every cluster is final")
    if config.method == "cfl" and summary["mean"]["clusters_in_use"] == 1:
        where = f"{args.out}/metrics.jsonl" if args.out else "metrics.jsonl (kept with --out)"
        console.print(
            f"note: no cluster was split. mean_norm and max_norm in {where} show what eps_1 and eps_2 could be"
        )
    along = summary.get("path_accuracy") or ()
    if len(along) > 1:
        steps = " → ".join(f"{100 * accuracy:.1f}" for accuracy in along)
        console.print(f"clients' accuracy along the parameter tree, from the first model to their own: {steps} %")
    if args.out:
        console.print(f"kept in {args.out}: summary.json, metrics.jsonl, clients.csv, plots/", markup=False)


def command_compare(args: argparse.Namespace, console: Console) -> None:
    """`jfcl compare`."""
    from jfcl.analysis import plots
    from jfcl.experiments import read_run

    _check_folders(args, "out", "runs")
    _check_out(args.out)
    runs = {}
    for folder in args.runs:
        path = Path(folder).resolve()
        runs[path.name if path.name not in runs else str(path)] = read_run(folder)
    summaries = {name: summary for name, (summary, _) in runs.items()}
    seeds = sorted({_say_seeds(summary) for summary in summaries.values()})
    console.print(results_table(summaries, f"{len(runs)} runs; {' or '.join(seeds)}"))
    differ = _differences(args.runs)
    if differ:
        console.print(f"they differ in {', '.join(differ)}", markup=False)
    splits = {summary["split_hash"] for summary in summaries.values()}
    if len(splits) > 1:
        console.print(f"note: these runs are on {len(splits)} different splits of the data")
    first = Path(args.runs[0]) if Path(args.runs[0]).name else Path(args.runs[0]).resolve()
    out = Path(args.out) if args.out else _unused(str(first.parent / "compare"))
    records = {name.replace("$", r"\$"): rows for name, (_, rows) in runs.items()}  # else matplotlib's mathematics
    plots.save(plots.curves(records), out / "accuracy.png")
    plots.save(plots.bars(records), out / "methods.png")
    console.print(f"plots: {out / 'accuracy.png'}, {out / 'methods.png'}", markup=False)


def _differences(folders: list[str]) -> list[str]:
    """The options in which runs differ, with the values they have."""
    from jfcl.simulation.folder import read_json

    configs = [read_json(Path(folder) / "config.json") for folder in folders]
    for config, folder in zip(configs, folders, strict=True):  # done, not asked for
        config["num_rounds"] = read_json(Path(folder) / "summary.json")["num_rounds"]
    for config in configs:
        if config.get("population") is not None or config.get("store") is not None:
            config["clients"] = None  # it counts nothing there
    names = dict.fromkeys(name for config in configs for name in config)
    said = []
    for name in names:
        values = list(dict.fromkeys(str(config.get(name)) for config in configs))
        if len(values) > 1 and name not in ("method", "split_hash", "cohorts", "key", "versions"):
            said.append(f"{name.removeprefix('num_')} ({', '.join('–' if v == 'None' else v for v in values)})")
    return said


def command_list(args: argparse.Namespace, console: Console) -> None:
    """`jfcl list`."""
    from jfcl import data, kernels, models
    from jfcl.algorithms import METHODS, attacks
    from jfcl.client.augment import AUGMENTATIONS
    from jfcl.core import check_choice
    from jfcl.experiments import RECIPES

    def first_lines(functions):
        return {name: (fn.__doc__ or "").split("\n")[0] for name, fn in functions.items()}

    tables = {
        "methods": {name: method.summary for name, method in METHODS.items()},
        "datasets": {name: entry[1] for name, entry in data.DATASETS.items()}
        | {"(any other)": "an image classification set of tensorflow-datasets, by its name there"},
        "models": {name: entry[1] for name, entry in models.MODELS.items()},
        "heterogeneities": {name: entry[1] for name, entry in data.HETEROGENEITY.items()},
        "partitions": {name: entry[1] for name, entry in data.PARTITIONS.items()},
        "augmentations": first_lines(AUGMENTATIONS),
        "attacks": first_lines(attacks.UPDATE_ATTACKS | attacks.DATA_ATTACKS),
        "aggregators": first_lines(kernels.AGGREGATORS),
        "recipes": {name: recipe.title for name, recipe in RECIPES.items()},
    }
    if args.what is not None:
        check_choice("list", args.what, LISTS)
    for title, rows in tables.items():
        if args.what in (None, title):
            table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
            for name, text in rows.items():
                table.add_row(f"  {name}", text)
            console.print(table, "")


def command_reproduce(args: argparse.Namespace, console: Console) -> None:
    """`jfcl reproduce`."""
    from jfcl.experiments import reproduce

    _check_folders(args, "out", "data_dir")
    _check_out(args.out)
    _check_platform()
    changes = {"rounds": args.rounds, "seeds": args.seeds, "examples_per_client": args.examples_per_client}
    result = reproduce(
        args.name, full=args.full, out=args.out, data_dir=args.data_dir, progress=not args.quiet, **changes
    )
    table = Table(title=result["title"], title_justify="left", title_style="", box=SIMPLE_HEAD, show_edge=False)
    columns = list(dict.fromkeys(name for row in result["rows"] for name in row))
    for name in columns:
        table.add_column(name)
    for row in result["rows"]:
        table.add_row(*[_cell(row.get(name)) for name in columns])
    console.print(table)
    if result["notes"]:
        console.print(result["notes"], markup=False)
    console.print(f"{result['size']} setting: {', '.join(f'{k} {v}' for k, v in result['setting'].items())}")
    console.print(f"{result['seconds']:.0f} s on {result['device']}")
    out = args.out or f"runs/reproduce/{result['name']}-{result['size']}"
    kept = "result.json, figure.png, and what was run" if any(Path(out).glob("*/")) else "result.json, figure.png"
    console.print(f"kept in {out}: {kept}", markup=False)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _unused(folder: str) -> Path:
    """`folder`, or the first of `folder-2`, `folder-3`, ... that does not exist: never over earlier results."""
    base = Path(folder) if Path(folder).name else Path(folder).resolve()
    if not base.name:
        raise ValueError(f"out must be a new folder, got {folder!r}")
    out, number = base, 1
    while out.exists():
        number += 1
        out = base.with_name(f"{base.name}-{number}")
    return out


def command_bench(args: argparse.Namespace, console: Console) -> None:
    """`jfcl bench`."""
    import jax

    from jfcl.analysis import plots
    from jfcl.core import check
    from jfcl.experiments import bench
    from jfcl.simulation.folder import write_json

    _check_folders(args, "out")
    out = _unused(args.out)
    _check_out(str(out))
    _divide_cpu(args.devices)
    _check_platform()
    most = len(jax.devices())
    check(args.devices is None or args.devices <= most, "devices", args.devices, f"at most the {most} there are")
    given = {name: value for name, value in vars(args).items() if value is not None}
    if args.devices is not None:
        given.setdefault("mappings", ["chunked(1)", "chunked(4)", "vmap", "sharded(chunked(1))"])
    options = {name: given[name] for name in inspect.signature(bench.sweep).parameters if name in given}
    if args.quick:
        options = {"methods": ["fedavg"], "models": ["mlp"], "clients": [10]} | options
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=args.quiet,
        transient=True,
    ) as bar:
        task = bar.add_task("speed of matrix products", total=None)
        tick = lambda what, total: bar.update(task, description=what, total=total, advance=1)  # noqa: E731
        found = bench.sweep(**options, tick=tick)
    title = "One round: {local_steps} local steps of batch {batch_size}, {examples} examples a client"
    look = {"box": SIMPLE_HEAD, "show_edge": False, "padding": 0}
    table = Table(title=title.format(**found["settings"]), title_justify="left", title_style="", **look)
    for name in ("method", "model", "mapping"):
        table.add_column(name, no_wrap=True)
    for head in ("clients", "rounds\n/s", "client-\nsteps/s", "of\npeak", "temp.\nMB", "compile\ns"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in found["rows"]:
        cells = [row["method"], row["model"], row["mapping"], f"{row['clients']:,}"]
        if "left_out" in row:
            cells += ["–", row["left_out"]]
        else:
            memory = "–" if row["temporary_mb"] is None else f"{row['temporary_mb']:,.1f}"
            rounds = row["rounds/s"]
            cells += [f"{rounds:,.0f}" if rounds >= 100 else f"{rounds:.3g}", f"{row['client_steps/s']:,.0f}"]
            cells += [f"{row['peak']:.0%}", memory]
            cells += [f"{row['compile_seconds']:.1f}"]
        table.add_row(*cells)
    console.print(table)
    console.print(
        f"peak: {found['sgemm_gflops']:.0f} GFLOP/s, float32 matrix products of 2,048 x 2,048 on {found['device']}."
        " Operations are counted from the models' layers."
    )
    out.mkdir(parents=True)
    write_json(out / "bench.json", found)
    plots.save(plots.throughput(found["rows"]), out / "throughput.png")
    console.print(f"kept in {out}: bench.json, throughput.png", markup=False)


def command_demo(args: argparse.Namespace, console: Console) -> None:
    """`jfcl demo`: the README's main job."""
    from jfcl.experiments import Config, run
    from jfcl.experiments.config import validate

    _check_folders(args, "out")
    out = _unused(args.out)
    _check_out(str(out))
    common = {"seeds": args.seeds, "rounds": args.rounds, "eval_every": 2}
    configs = [Config(method, **common, **options) for method, options in DEMO.items()]
    for config in configs:
        validate(config)
    _check_platform()
    console.print(
        "1,797 real handwritten digits on 40 clients. Each client sees them rotated by\n"
        "0, 90, 180 or 270 degrees, and nobody is told by how much. Who recognises\n"
        "held-out digits of its own kind best?\n"
    )
    for config in configs:
        run(config, out=out / config.method, progress=True)
    command_compare(argparse.Namespace(runs=[str(out / m) for m in DEMO], out=str(out / "compare")), console)
    console.print(f"IFCA, client by client: {out / 'ifca' / 'plots' / 'clusters.png'}")


COMMANDS = {
    "run": command_run,
    "compare": command_compare,
    "list": command_list,
    "reproduce": command_reproduce,
    "bench": command_bench,
    "demo": command_demo,
}


def _compilation_cache() -> None:
    """Compiled programs are kept between runs: the second start of the same run compiles next to nothing."""
    import jax

    from jfcl.simulation.probe import cache_dir

    folder = cache_dir()
    if jax.config.jax_compilation_cache_dir is None and folder is not None:
        jax.config.update("jax_compilation_cache_dir", str(folder / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0, 1 (failed), 2 (bad input), 130 (interrupted)."""
    console, errors = Console(highlight=False), Console(stderr=True, highlight=False, soft_wrap=True)
    if not console.is_terminal and "COLUMNS" not in os.environ:  # rich takes 80, too few for some names in tables
        console = Console(highlight=False, width=120)
    warnings.showwarning = lambda message, *_, **__: errors.print(Text.assemble(("note: ", "yellow"), str(message)))
    status = _main(argv, console, errors)
    if status:
        from jfcl.execution import hosts

        if hosts.connected():
            hosts.leave(status)
    return status


def _sentence(error: Exception) -> str:
    """What an error says, not longer than can be read."""
    said = str(error)
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        said = f"{error.filename}: {error.strerror}"
    if isinstance(error, MemoryError):
        said = f"there is not enough memory{': ' * bool(said)}{said}"
    return (
        said if len(said) <= LONGEST_MESSAGE else f"{said[: LONGEST_MESSAGE // 2]} ... {said[-LONGEST_MESSAGE // 4 :]}"
    )


def _main(argv: list[str] | None, console: Console, errors: Console) -> int:
    args = None
    try:
        parser = build_parser()
        args = parser.parse_args(argv)
        if args.command is None:
            parser.print_help()
            return 0
        if args.command != "bench":  # which measures compilation
            _compilation_cache()
        COMMANDS[args.command](args, console)
    except KeyboardInterrupt:
        kept = getattr(args, "out", None) if getattr(args, "command", None) == "run" else None
        begun = kept and (Path(kept) / "config.json").exists()
        how = f"; saved in {kept}, go on with the same command and --resume" if begun else ""
        errors.print(f"\ninterrupted{how or ('; nothing had begun' if kept else '')}", markup=False)
        return 130
    except Exception as error:
        from jfcl.execution import hosts
        from jfcl.simulation.progress import DivergedError

        if hosts.is_of_a_lost_process(error):
            how = "; go on with --resume, with any number of processes" if getattr(args, "out", None) else ""
            said = str(error).splitlines()[0]
            errors.print(f"jfcl: stopped: another process was lost{how} ({said})", markup=False)
            return 1
        if isinstance(error, DivergedError):
            errors.print("[red]jfcl: stopped:[/]", end=" ")
            errors.print(str(error), markup=False)
            return 1
        if isinstance(error, (ValueError, OSError, MemoryError)):  # OSError: a folder not to be written, a full disk
            errors.print("[red]jfcl: error:[/]", end=" ")
            errors.print(_sentence(error), markup=False)
            return 2
        if not hosts.connected():
            raise
        traceback.print_exc()  # and then leaves at once
        return 1
    return 0
