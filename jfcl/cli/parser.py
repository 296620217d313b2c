"""The arguments of the commands: those of `jfcl run` are derived from the options of every run and of the method."""

from __future__ import annotations

import argparse
import itertools
import shutil
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jfcl._version import __version__
from jfcl.core import check_choice
from jfcl.core.names import flag_of, note_on, option_hint
from jfcl.core.options import OneOf, Option, first_sentence, is_text, options_of
from jfcl.experiments.config import check_method_takes, read_config
from jfcl.experiments.options import GROUPS, all_options, common_options, method_options, takes
from jfcl.experiments.own import find_method, is_own
from jfcl.experiments.sweeps import SEEDS, sweep_options
from jfcl.experiments.trackers import TRACKERS
from jfcl.mapping.hosts import TIMEOUT
from jfcl.methods import METHODS

EXAMPLES = """examples:
  jfcl run ifca --clients 40 --clusters 4 --rounds 100 --seeds 5 --restarts 5 --out runs/ifca
  jfcl run fedavg --clients 40 --clusters 4 --rounds 100 --seeds 5 --out runs/fedavg
  jfcl compare runs/ifca runs/fedavg
  jfcl report runs/ifca runs/fedavg --out both.html
  jfcl sweep ifca --clients 40 --grid lr=0.05,0.1,0.2 --grid num_models=2,4 --seeds 3 --out runs/sweep
  jfcl run ifca --dataset mnist --data-dir DATA --clients 1200 --examples-per-client 200 --rounds 30 --out runs/mnist
  jfcl run fedavg --population 1000000 --cohort 1000 --sampling stratified --dropout 0.1 --rounds 50 --out runs/million
  jfcl run ifca --config experiment.toml --lr 0.05 --out runs/x        flags override the file
  jfcl run ifca --config runs/x/config.json --out runs/x --resume      continue a run that was stopped
"""
COMMANDS = {  # the first three have the options of a run
    "run": "run one method and keep its results in a folder",
    "plan": "compile a run for a TPU or GPU that is not there: does it fit, and how long may a round take",
    "sweep": "run one method with all combinations of some options, and choose the best on held-out examples",
    "compare": "table and plots of finished runs side by side",
    "report": "one page of HTML on a run, or on several side by side; also unfinished ones",
    "list": "methods, data sets, models, ... in one line each",
    "bench": "speed of rounds on this machine: method x model x mapping x number of clients",
    "demo": "IFCA against FedAvg, local training and the oracle on rotated digits",
}
OF_RUNS = ("run", "plan", "sweep")
PLAIN = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
METAVARS = {int: "N", float: "X", str: "NAME"}
MOST_CHOICES = 4  # in a metavar


class Parser(argparse.ArgumentParser):
    """argparse with errors as `ValueError`, and what an unknown flag means; `method` is that of a run, if known."""

    method: str | None = None

    def parse_args(self, args=None, namespace=None):
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            names = [text.split("=")[0][:100] for text in unknown]
            if not names[0].startswith("-"):
                values = ",".join(itertools.takewhile(lambda text: not text.startswith("-"), unknown))[:100]
                option = [text for text in getattr(parsed, "grid", None) or () if "=" not in text][-1:]
                hint = f"; write --grid {option[0]}={values}" if option else ""
                raise ValueError(f"unexpected argument {names[0]!r}{hint}")
            if self.method is not None:
                wanted = {name.lstrip("-").replace("-", "_") for name in names} & all_options().keys()
                check_method_takes(self.method, dict.fromkeys(wanted, "given"))
            known = [flag.lstrip("-").replace("-", "_") for action in self._actions for flag in action.option_strings]
            raise ValueError(f"unknown option {names[0]}{option_hint(names[0].lstrip('-'), known, flag_of)}")
        return parsed

    def error(self, message):
        invalid = message.partition("argument --")[2].partition(": invalid")[0]
        raise ValueError(message + note_on(invalid.replace("-", "_")))


def parse(argv: list[str]) -> argparse.Namespace | None:
    """Returns the arguments of a command, with its name in `command`; None where nothing is asked but help.

    Raises:
      ValueError: an unknown command, an unknown flag, a value of another type.
    """
    if not argv or argv[0] in ("-h", "--help", "--version"):
        print(f"jfcl {__version__}" if argv[:1] == ["--version"] else overview())
        return None
    command, rest = argv[0], argv[1:]
    check_choice("command", command, COMMANDS)
    parser = parser_of(command, _method(rest) if command in OF_RUNS else None)
    return parser.parse_args(rest, argparse.Namespace(command=command))


def parser_of(command: str, method: str | None = None) -> Parser:
    """Returns the parser of a command; of a run, with the options of a method, or of all of them."""
    return _of_runs(command, method) if command in OF_RUNS else _of_others(command)


def overview() -> str:
    """Returns the text of `jfcl --help`."""
    about = "Simulate clustered federated learning: many clients, hidden clusters, one model per cluster."
    lines = [f"  {name:<9} {text}" for name, text in COMMANDS.items()]
    return "\n".join(["usage: jfcl COMMAND [options]", "", about, "", "commands:", *lines, "", EXAMPLES])


def _method(args: list[str]) -> str | None:
    """Returns METHOD, which comes first among the arguments of a run, or else the user's own method in `--config`."""
    if args and not args[0].startswith("-"):
        return args[0]
    files = [text for flag, text in itertools.pairwise(args) if flag == "--config"]
    files += [text.partition("=")[2] for text in args if text.startswith("--config=")]
    if files and is_text(files[-1]) and Path(files[-1]).is_file():  # the command reports a missing one
        method = read_config(files[-1]).get("method")
        return method if is_own(method) else None
    return None


# ---------------------------------------------------------------------------------------------------------------
# Commands with the options of a run.


def _of_runs(command: str, method: str | None) -> Parser:
    """Returns the parser of `run`, `plan` or `sweep`, with the options of a method, or of all of them."""
    summary = COMMANDS[command] if method is None else find_method(method).summary
    how = "" if method is None else "\n\nAn option that is left out has the value in brackets."
    usage, about = f"jfcl {command} {method or 'METHOD'} [options]", f"{summary[0].upper()}{summary[1:]}.{how}"
    parser = Parser(prog=f"jfcl {command}", usage=usage, description=about, add_help=False, **PLAIN)
    parser.method = method
    parser.add_argument("-h", "--help", action=_Help, help="show this text")
    what = "'jfcl list methods', or MODULE:FACTORY for your own; default: that of --config"
    parser.add_argument("method", metavar="METHOD", nargs="?", help=what)
    if command == "plan":
        known = "v5e:2x2 or v5e-4, v6e:2x4, v5p:2x2x2, ..., a100, h100, h200, b200, h100:8"
        parser.add_argument_group("Target").add_argument("--target", dest="chip", metavar="NAME", help=known)
    if command == "sweep":
        _add_sweep(parser.add_argument_group("Sweep"))
    own = all_options().keys() - common_options().keys() if method is None else method_options(method)
    if own:
        options = [option for name, option in all_options(method).items() if name in own]
        _add(parser.add_argument_group(f"Method: options of {method or 'single methods'}"), options)
    for group in GROUPS:
        options = [o for name, o in options_of(group).items() if method is None or takes(method, name)]
        options = [o for o in options if (command, o.name) != ("plan", "target")]
        options = [o._replace(default=SEEDS) if (command, o.name) == ("sweep", "seeds") else o for o in options]
        _add(parser.add_argument_group(group.__doc__.split("\n")[0].rstrip(".")), options)
    try:
        _add_files(parser, command)
    except argparse.ArgumentError as error:
        flag = str(error).split()[1].rstrip(":")
        raise ValueError(
            f"an argument of method {method!r} must have another name: jfcl {command} has {flag}"
        ) from None
    return parser


def _add(group: argparse._ArgumentGroup, options: Iterable[Option]) -> None:
    """Adds a flag for each option."""
    for option in options:
        text = first_sentence(option.text).replace("%", "%%")
        if option.kind is bool:
            group.add_argument(flag_of(option.name), action="store_true", default=argparse.SUPPRESS, help=text)
            continue
        choices = [name for accepts in option.metadata if isinstance(accepts, OneOf) for name in accepts.choices]
        group.add_argument(
            flag_of(option.name),
            type=option.kind,
            default=argparse.SUPPRESS,
            metavar=f"{{{','.join(choices)}}}" if 0 < len(choices) <= MOST_CHOICES else METAVARS[option.kind],
            help=text + ("" if option.default is None else f" [{option.default}]"),
        )


def _add_sweep(group: argparse._ArgumentGroup) -> None:
    what = "values of an option, such as lr=0.01,0.1; once for each option. All combinations are run"
    group.add_argument("--grid", action="append", metavar="NAME=VALUES", help=what)
    _add(group, sweep_options().values())


def _add_files(parser: argparse.ArgumentParser, command: str) -> None:
    """Adds the options of files, trackers and processes."""
    files, what = parser.add_argument_group("Files"), "results, checkpoints and plots"
    what = {"sweep": "sweep.json, best.toml, the finished cells and a heat-map"}.get(command, what)
    files.add_argument(
        "--data-dir", metavar="DIR", help="folder of official data files; default: $JFCL_DATA_DIR, else TFDS"
    )
    files.add_argument("--out", metavar="DIR", help=f"folder for {what}; default: none are kept")
    files.add_argument("--resume", action="store_true", help="continue what was stopped in --out")
    what = "TOML (or the config.json of a run) with the names above; flags override"
    files.add_argument("--config", metavar="FILE", help=what)
    files.add_argument("--quiet", action="store_true", help="no progress bar")
    if command != "run":
        return
    what = "least time between two checkpoints, the first of which is made after 5 seconds [30]"
    files.add_argument("--checkpoint-seconds", type=float, default=30.0, metavar="X", help=what)
    known = f"send the records to {', '.join(TRACKERS)}; may be given several times"
    files.add_argument("--track", action="append", default=[], metavar="NAME", help=known)
    several = parser.add_argument_group("Processes: the same command in each, on one machine or on several")
    what = "of process 0; auto on Cloud TPU and Slurm, without the next two"
    several.add_argument("--coordinator", metavar="HOST:PORT", help=what)
    several.add_argument("--num-processes", type=int, metavar="N", help="number of processes")
    several.add_argument("--process-id", type=int, metavar="N", help="number of this process, from 0")
    what = f"time to wait until all processes are there [{TIMEOUT}]"
    several.add_argument("--connect-seconds", type=float, default=TIMEOUT, metavar="X", help=what)


class _Help(argparse._HelpAction):
    """`jfcl run --help`, one screen, or `jfcl run METHOD --help`, the options of the method."""

    def __call__(self, parser, namespace, values, option_string=None):
        print(_run_overview(parser) if parser.method is None else parser.format_help())
        parser.exit()


def _run_overview(parser: argparse.ArgumentParser) -> str:
    """Returns the text of `jfcl run --help`: the flags by group, without those of single methods."""
    width = min(shutil.get_terminal_size().columns, 110) - 2
    lines = [
        f"usage: {parser.prog} METHOD [options]",
        "",
        *textwrap.wrap(parser.description, width),
        "",
        f"  {parser.prog + ' METHOD --help':<25} explains the options of METHOD and those below",
        "  jfcl list                 names of methods, data sets, models, attacks, ...",
        "",
        *textwrap.wrap(f"METHOD: {', '.join(METHODS)}, or MODULE:FACTORY", width, subsequent_indent="  "),
        "",
    ]
    for group in parser._action_groups[2:]:
        if group.title.startswith("Method"):
            continue
        flags = " ".join(action.option_strings[-1] for action in group._group_actions)
        indent = {"initial_indent": "  ", "subsequent_indent": "  ", "break_on_hyphens": False}
        lines += [group.title, *textwrap.wrap(flags, width, **indent)]
    command = parser.prog.split()[-1]
    also = {"plan": " --target v5e:2x4", "sweep": " --grid lr=0.05,0.1,0.2"}.get(command, "")
    example = f"example: {parser.prog} ifca --clients 40 --clusters 4 --seeds 5{also} --out runs/ifca"
    return "\n".join([*lines, "", example])


# ---------------------------------------------------------------------------------------------------------------
# Other commands.

_RUNS: dict[str, Any] = {"nargs": "+", "metavar": "DIR", "help": "folders of 'jfcl run --out' or jfcl.simulate(out=)"}
_QUIET = {"action": "store_true", "help": "no progress bar"}


def _numbers(default: int | None = None, **more: Any) -> dict[str, Any]:
    return {"type": int, "metavar": "N", "default": default} | more


OTHERS = {  # the arguments of each
    "compare": {
        "runs": _RUNS,
        "--out": {"metavar": "DIR", "help": "folder for the files; default: compare/ beside the first run"},
        "--latex": {"action": "store_true", "help": "also write results.tex, a table for LaTeX with booktabs"},
        "--pdf": {"action": "store_true", "help": "also write the figures as PDF, in the width of a paper's column"},
        "--svg": {"action": "store_true", "help": "also write the figures as SVG, in the width of a paper's column"},
    },
    "report": {
        "runs": _RUNS,
        "--out": {
            "metavar": "FILE.html",
            "help": "default: report.html in the folder of one run, or beside the first of several",
        },
    },
    "list": {"what": {"nargs": "?", "metavar": "WHAT", "help": "one of the lists, such as methods"}},
    "bench": {
        "--methods": {"nargs": "+", "metavar": "NAME", "help": "of fedavg, ifca, local [all], or MODULE:FACTORY"},
        "--models": {"nargs": "+", "metavar": "NAME", "help": "see 'jfcl list models' [mlp cnn_mnist]"},
        "--mappings": {"nargs": "+", "metavar": "NAME", "help": "mappings of the clients ['chunked(1)' ... vmap]"},
        "--clients": _numbers(nargs="+", help="numbers of clients [10 100 1000]"),
        "--devices": _numbers(help="divide the CPU into so many; adds 'sharded(chunked(1))'"),
        "--quick": {"action": "store_true", "help": "defaults: fedavg, mlp, 10 clients only"},
        "--out": {"default": "runs/bench", "metavar": "DIR", "help": "folder for results [runs/bench]"},
        "--quiet": _QUIET,
    },
    "demo": {
        "--out": {"default": "runs/demo", "metavar": "DIR", "help": "folder for results [runs/demo]"},
        "--seeds": _numbers(5, help="seeds [5]"),
        "--rounds": _numbers(100, help="rounds [100]"),
    },
}


def _of_others(command: str) -> Parser:
    parser = Parser(prog=f"jfcl {command}", description=f"{COMMANDS[command]}.".capitalize(), **PLAIN)
    for name, argument in OTHERS[command].items():
        parser.add_argument(name, **argument)
    if command == "bench":
        from jfcl.experiments.bench import sweep

        _add(parser.add_argument_group("Setting"), options_of(sweep).values())
    return parser
