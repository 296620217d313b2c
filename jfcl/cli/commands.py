"""The commands of the command line; `jfcl.cli.parser` reads their arguments, `jfcl.cli` reports errors."""

import contextlib
import math
import os
import shlex
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
from rich.console import Console
from rich.progress import TimeElapsedColumn
from rich.text import Text

from jfcl import mapping
from jfcl.analysis import plots
from jfcl.cli import tables
from jfcl.core import check, check_choice, platform, require
from jfcl.core.names import flag_of
from jfcl.core.options import EACH, options_of
from jfcl.experiments import bench, comparison, lookup, plan, privacy, report, run, sweeps, trackers
from jfcl.experiments.config import Config, default_precision, read_config
from jfcl.experiments.options import CountOrNone, all_options, takes
from jfcl.experiments.shift_results import notes_on, read_cells
from jfcl.experiments.shifts import RANKING_FILES, shifts
from jfcl.mapping import hosts
from jfcl.planning import targets
from jfcl.simulation.folder import write_json
from jfcl.simulation.progress import DivergedError, progress_bar

EITHER = ({"seed", "seeds"}, {"local_steps", "local_epochs"}, {"radius", "quantile"})  # of which one is given
FIRST = """
  jfcl run ifca --clients 40 --clusters 4 --rounds 50 --restarts 5 --out runs/ifca
  jfcl run fedavg --clients 40 --clusters 4 --rounds 50 --out runs/fedavg
  jfcl compare runs/ifca runs/fedavg"""  # what a newcomer, who gives no METHOD, begins with
WELCOME = """\
1,797 real handwritten digits on 40 clients. Each client sees them rotated by
0, 90, 180 or 270 degrees, and the methods do not know by how much. Which one
classifies the test digits of every client best?
"""
ON_ONE_LINE = {"no_wrap": True, "overflow": "ignore"}  # a text that may be wider than the terminal, to be copied
DEMO = {"fedavg": {}, "local": {}, "ifca": {"restarts": 5, "restart_rounds": 5}, "oracle": {}}


def _start_devices(devices: int | None, default: int | None = None) -> None:
    """Divides the CPU into so many devices, by default into `default` or not at all, and starts the backend of JAX.

    Raises:
      ValueError: a number below 1; `JAX_PLATFORMS` names a backend that does not exist.
    """
    if devices or default:
        mapping.divide_cpu(devices or default)
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter from JAX_PLATFORMS=cuda without the CUDA plugin
        why = f", got {jax.config.jax_platforms!r}" + (f" ({str(error).splitlines()[0]})" if str(error) else "")
        raise ValueError(f"JAX_PLATFORMS must be unset, or name devices that jax finds here{why}") from None


def _find_devices(args: Namespace, config: Config) -> None:
    """Connects to the other processes and divides the CPU, where the options say so."""
    if args.coordinator is not None:
        if args.process_id is not None:  # jax ends a process without a word of ours where two have the same number
            text = f"process {args.process_id} of {args.num_processes}, each with its own --process-id, connects"
            Console(stderr=True, quiet=not args.progress).print(text)
        hosts.connect(args.coordinator, args.num_processes, args.process_id, args.connect_seconds)
    elif args.num_processes is not None or args.process_id is not None:
        raise ValueError("coordinator must be given with --num-processes and --process-id, got None")
    divides = config.mapping not in ("vmap", "chunked") and args.coordinator is None
    _start_devices(config.devices, min(mapping.num_cores(), config.clients) if divides else None)


def given_options(args: Namespace) -> dict[str, Any]:
    """Returns the method, and the options in `--config` and in flags."""
    options = {} if args.config is None else read_config(args.config, args.method)
    options |= {"method": args.method} if args.method else {}
    schema = all_options(options.get("method"))
    flags = {name: value for name, value in vars(args).items() if name in schema}
    replaced = {name for group in EITHER if flags.keys() & group for name in group}  # by a flag: what the file has
    options = {name: value for name, value in options.items() if name not in replaced} | flags
    if "method" not in options:
        raise ValueError(f"METHOD must be given, or stand in --config; 'jfcl list methods' shows them\n{FIRST}")
    return options


def _arguments(function: Callable, args: Namespace) -> dict[str, Any]:
    """Returns the keyword arguments of a function that have flags."""
    return {name: getattr(args, name) for name in options_of(function) if hasattr(args, name)}


# ---------------------------------------------------------------------------------------------------------------
# Commands: each yields the texts and the tables that are printed.


@contextlib.contextmanager
def _bar(begin: str, progress: bool) -> Iterator[Callable[[str, int], None]]:
    """Shows a progress bar; yields `(description, number of all steps) -> None`, which moves it by one step."""
    with progress_bar(progress, TimeElapsedColumn()) as bar:
        task = bar.add_task(begin, total=None)
        yield lambda what, total: bar.update(task, description=what, total=total, advance=1)


def command_run(args: Namespace, *, track: Annotated[Sequence[str], EACH] = ()) -> Iterator[Any]:
    """Runs one method and keeps its results in a folder.

    Args:
      track: send the records to tensorboard, wandb or mlflow; may be given several times.
    """
    config, names = Config(**given_options(args)), dict.fromkeys(track)
    require(args.out is not None or "tensorboard" not in names, "--track tensorboard needs --out DIR for its files")
    callbacks = [trackers.tracker(name) for name in names]
    # Run.
    _find_devices(args, config)
    if hosts.connected():
        yield hosts.devices()
    summary, history, parts = run(config, **_arguments(run, args), callbacks=callbacks)
    yield from _results(config, summary, args.out)
    is_first, clusters = hosts.is_first(), history.clients["cluster"]
    notes = comparison.clusters_notes(summary, clusters, parts.true_cluster) if is_first else []
    yield from map("note: {}".format, notes)
    if notes:
        yield _remedies(config)


def _results(config: Config, summary: dict[str, Any], out: str | None) -> Iterator[Any]:
    """Yields what is printed of the results of a run."""
    attack = "" if config.attack is None else f"; {config.malicious:.0%} malicious: {config.attack}"
    summaries = {summary["method"]: summary}
    yield tables.results_table(summaries, f"{summary['description']}{attack}; {comparison.seeds_text(summaries)}")
    for name in lookup.find_metrics(config.metrics) if config.metrics else ():
        yield f"{name}: {comparison.number(*comparison.over_seeds(summary, name), 3)}"
    yield from map("note: {}".format, comparison.results_notes(summaries))
    if columns := summary.get("table", {}).get("left_out"):
        names = ", ".join(map(str, columns))
        yield f"note: columns left out, as they number the rows: {names}; those named in --inputs stay"
    # Costs.
    rounds, begun, steps = (summary[name] for name in ("num_rounds", "init_rounds", "client_steps_per_second"))
    start = f" (the first {begun} to find a start)" if begun else ""
    speed = f"{comparison.rate_text(summary['rounds_per_second'])} rounds/s"
    speed += "" if steps is None else f", {comparison.rate_text(steps)} client-steps/s"
    seconds = f"{summary['seconds']:.1f} s + {summary['compile_seconds']:.1f} s compiling, on {summary['device']}"
    precision = default_precision() if config.precision == "default" or platform() == "cpu" else config.precision
    yield f"{rounds} round{'s' * (rounds != 1)}{start}, {speed}, {seconds}, products in {precision}"
    if platform() == "cpu" and config.precision not in ("default", precision):
        yield f"note: --precision {config.precision} has no effect on a CPU, which computes in {precision}"
    if "privacy" in summary:
        yield privacy.privacy_text(summary["privacy"])
    if rounds < config.rounds + begun:
        yield f"note: ended after {rounds} of {config.rounds + begun} rounds: {summary['ended']}"
    kept = "summary.json, metrics.jsonl, clients.csv, report.html, plots/"
    yield f"kept in {out}: {kept}" if out else "nothing is kept without --out DIR"


def _remedies(config: Config) -> str:
    """Returns what can help where a method has not found the true clusters."""
    by_models = "num_models" if config.num_models == "auto" else None
    number = lookup.find_method(config.method).finds_number_by or by_models
    others = [] if number is None else [f"another {flag_of(number)}"]
    ways = ("restarts", "warm_rounds", "init_from")[config.dp_clip is not None :]  # restarts would decide without noise
    others += [flag_of(name) for name in ways if takes(config.method, name)]
    return f"{' or '.join([', '.join(others)] * bool(others) + ['more --rounds'])} can help"


def command_plan(args: Namespace, *, chip: str | None = None, progress: bool = True) -> Iterator[Any]:
    """Compiles a run for a TPU or GPU that you do not have: does it fit, and how long may a round take.

    Args:
      chip: what to compile for: v5e:2x2 or v5e-4, v6e:2x4, v5p:2x2x2, ..., a100, h100, h200, b200, h100:8.
      progress: show a progress bar.
    """
    config = Config(**given_options(args))
    check(args.out is None or not Path(args.out, "config.json").exists(), "out", args.out, "a folder without a run")
    targets.only_compile()
    with _bar("compiling for a target", progress) as tick:
        planned = plan.plan_run(config, chip, **_arguments(plan.plan_run, args), tick=tick)
    for table in tables.plan_tables(planned, config):
        yield from (table, "")
    yield "Nothing was run. Memory and communication are facts of the programs, times are predictions."
    if args.out is not None:
        yield f"kept in {args.out}: {', '.join(plan.FILES)}"
    if not planned.fits:
        needed, limit = planned.needed_bytes / 1e9, planned.limit_bytes / 1e9
        advice = "a smaller --chunk, a --target of more chips, fewer clients or examples or a smaller model may fit"
        raise ValueError(f"memory: a round needs {needed:.1f} GB of the {limit:.1f} GB of a chip; {advice}")


def command_sweep(args: Namespace, *, grid: Annotated[Sequence[str] | None, EACH] = None) -> Iterator[Any]:
    """Runs one method with all combinations of some options, and chooses the best on held-out examples.

    Args:
      grid: values of an option, such as lr=0.01,0.1; once for each option. All combinations are run.
    """
    # Read and check the options.
    options = given_options(args)
    values = sweeps.read_grid(grid, options["method"])
    for name in sorted(values.keys() & vars(args).keys() - sweeps.OF_ALL_CELLS):  # those are refused in any grid
        raise ValueError(f"grid: give {flag_of(name)} or its values in --grid, not both")
    of_one_seed = {"seed", "population", "store"} & options.keys()  # a sweep refuses the latter two by their names
    config = Config(**(options if of_one_seed else {"seeds": sweeps.SEEDS} | options))
    runs = config.seeds * math.prod(map(len, values.values()))
    _start_devices(config.devices, min(mapping.num_cores(), runs))
    # Run, and print the best.
    swept = sweeps.run_sweep(config, values, **_arguments(sweeps.run_sweep, args))
    title = f"{config.method} on held-out training examples after {config.rounds} rounds, seeds: {config.seeds}"
    yield tables.sweep_table(swept, title)
    count = len(swept.cells)
    if count > tables.MOST_SHOWN:
        yield f"and {count - tables.MOST_SHOWN} more, not better than these"
    yield f"{count} configuration{'s' * (count > 1)}, {swept.seconds:.1f} s + {swept.compile_seconds:.1f} s compiling"
    if swept.best is None:
        raise DivergedError("every configuration diverged; lower learning rates usually help")
    if args.out:
        out = Path(args.out)
        yield f"kept in {args.out}: {', '.join(name for name in (*sweeps.FILES, 'cells/') if (out / name).exists())}"
        best, folder = (shlex.quote(str(file)) for file in (out / "best.toml", f"{out}-best"))
        fresh = swept.cells[0].per_seed[-1]["seed"] + 1  # of no cell
        yield Text(f"next: jfcl run {config.method} --config {best} --seed {fresh} --out {folder}", **ON_ONE_LINE)


def command_shifts(args: Namespace) -> Iterator[Any]:
    """Ranks methods, each tuned with the same budget on every shift: which method for which shift, at what cost."""
    result = shifts(**_arguments(shifts, args))
    cost = f"{result.programs} programs compiled, {result.training:.0%} of the time in training and evaluation"
    yield f"{result.done} of {result.cells} cells in {result.seconds:.0f} s, {cost}"
    yield from map("note: {}".format, notes_on(read_cells(result.folder)) if result.done else ())
    yield f"kept in {result.folder}: {', '.join(RANKING_FILES)}"
    if result.done < result.cells:
        yield "the cells that are left are those of other parts; the folder is whole once all are there"


def command_compare(args: Namespace, *, runs: Annotated[Sequence[str], EACH]) -> Iterator[Any]:
    """Compares finished runs side by side, in a table and plots.

    Args:
      runs: folders written by 'jfcl run --out' or jfcl.simulate(out=).
    """
    finished = comparison.read_runs(runs)
    # The table, and the differences that it does not show.
    summaries = {name: run.summary for name, run in finished.items()}
    title = f"{len(finished)} run{'s' * (len(finished) > 1)}; {comparison.seeds_text(summaries)}"
    yield tables.results_table(summaries, title)
    if differ := comparison.differences_text(comparison.run_differences(finished)):
        yield f"they differ in {differ}"
    yield from map("note: {}".format, comparison.results_notes(summaries) + comparison.differences_notes(finished))
    files = comparison.compare(finished, **_arguments(comparison.compare, args))
    yield f"kept: {', '.join(map(str, files))}"


def command_report(args: Namespace, *, runs: Annotated[Sequence[str], EACH]) -> Iterator[Any]:
    """Writes one page of HTML on a run, or on several side by side; also on unfinished ones.

    Args:
      runs: folders written by 'jfcl run --out' or jfcl.simulate(out=).
    """
    yield Text(f"kept in {report(runs, out=args.out)}", **ON_ONE_LINE)


def command_list(args: Namespace, *, what: str | None = None) -> Iterator[Any]:
    """Lists methods, data sets, models, ... in one line each.

    Args:
      what: one of the lists, such as methods.
    """
    if what is not None:
        check_choice("list", what, tables.lists())
    for table in tables.list_tables(tables.lists() if what is None else [what]):
        yield from (table, "")


def command_bench(
    args: Namespace, *, devices: CountOrNone = None, out: str = "runs/bench", progress: bool = True
) -> Iterator[Any]:
    """Measures rounds on this machine: method x model x mapping x number of clients.

    Args:
      devices: divide the CPU into this number of devices; see 'sharded(chunked(1))' among the mappings.
      out: folder for results.
      progress: show a progress bar.
    """
    folder = comparison.unused(out)
    _start_devices(devices)
    with _bar("rounds", progress) as tick:
        benchmark = bench.sweep(**_arguments(bench.sweep, args), tick=tick)
    yield tables.bench_table(benchmark)
    yield f"on {benchmark['device']}"
    folder.mkdir(parents=True)
    write_json(folder / "bench.json", benchmark)
    plots.save(plots.throughput(benchmark["rows"]), folder / "throughput.png")
    yield f"kept in {folder}: bench.json, throughput.png"


def command_demo(args: Namespace, *, out: str = "runs/demo", seeds: int = 5, rounds: int = 100) -> Iterator[Any]:
    """Runs IFCA against FedAvg, local training and the oracle on rotated digits.

    Args:
      out: folder for results.
      seeds: number of seeds.
      rounds: rounds of each method.
    """
    folder = comparison.unused(out)
    configs = [Config(method, seeds=seeds, rounds=rounds, eval_every=2, **options) for method, options in DEMO.items()]
    _start_devices(None, mapping.num_cores())
    yield WELCOME
    for config in configs:
        run(config, out=folder / config.method, progress=True)
    yield from command_compare(Namespace(out=folder / "compare"), runs=[str(folder / method) for method in DEMO])
    yield f"IFCA, client by client: {folder / 'ifca' / 'plots' / 'clusters.png'}"


# The docstrings are their help, keyword arguments are flags; the first three have the options of a run.
FUNCTIONS = (command_run, command_plan, command_sweep, command_shifts, command_compare, command_report)
FUNCTIONS += (command_list, command_bench, command_demo)
COMMANDS = {function.__name__.removeprefix("command_"): function for function in FUNCTIONS}


def run_command(args: Namespace, console: Console) -> None:
    """Runs the command of `args`, and prints the texts and tables that it yields; of several processes the first does.

    A command with `out` is refused where nothing can be written there, before anything is computed.
    """
    if (out := getattr(args, "out", None)) is not None:
        out = str(Path(out).parent) if args.command in ("report", "bench", "demo") else out  # a new name beside others
        existing = next(path for path in (Path(out), *Path(out).parents) if os.path.lexists(path))
        check(existing.is_dir(), "out", out, f"a folder, but {existing} is a file")
        is_open = os.access(existing, os.W_OK | os.X_OK)
        check(is_open, "out", out, f"in a folder that can be written: {existing} cannot")
    command = COMMANDS[args.command]
    for part in command(args, **_arguments(command, args)):
        if not hosts.connected() or hosts.is_first():
            console.print(part, crop=False)
