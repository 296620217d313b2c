"""The arguments of the commands: those of `jfcl run` are derived from the options of every run and of the method."""

from __future__ import annotations

import argparse
import itertools
import shutil
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

from jfcl._version import __version__
from jfcl.cli.commands import COMMANDS
from jfcl.core import check_choice
from jfcl.core.names import flag_of, note_on, option_hint
from jfcl.core.options import Interval, OneOf, Option, first_sentence, options_of
from jfcl.experiments import bench, compare, report, run, run_sweep, shifts
from jfcl.experiments.config import check_method_takes, read_config
from jfcl.experiments.lookup import find_method, is_import_path
from jfcl.experiments.options import GROUPS, all_options, common_options, method_options, takes
from jfcl.experiments.plan import plan_run
from jfcl.experiments.sweeps import SEEDS
from jfcl.experiments.trackers import TRACKERS
from jfcl.mapping import hosts
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
OF_RUNS = ("run", "plan", "sweep")
WITH_BAR = (*OF_RUNS, "shifts", "bench")
PLAIN = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
METAVARS = {int: "N", float: "X", str: "NAME"}
METAVARS |= {"out": "DIR", "data_dir": "DIR", "coordinator": "HOST:PORT"}
MOST_CHOICES = 4  # in a metavar


class Processes:
    """Options of several processes.

    Attributes:
      coordinator: address of process 0; on Cloud TPU and Slurm auto, without the next two options.
      num_processes: number of processes.
      process_id: number of this process, from 0.
      connect_seconds: seconds to wait for the other processes.
    """

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    connect_seconds: Annotated[float, Interval("(0, inf)")] = hosts.TIMEOUT


# The flags of a command beside the options of a run, by the titles of their groups: those of the keyword arguments of
# its function, or of the attributes of a class.
ARGUMENTS: dict[str, dict[str, Callable]] = {
    "run": {"Files": run, "Processes: the same command in each, on one machine or on several": Processes},
    "plan": {"Files": plan_run},
    "sweep": {"Sweep": run_sweep},
    "shifts": {"Ranking": shifts},
    "compare": {"Files": compare},
    "report": {"Files": report},
    "bench": {"Measurement": COMMANDS["bench"], "Setting": bench.sweep},
    "demo": {"Demo": COMMANDS["demo"]},
}
_FOLDERS = "folders written by 'jfcl run --out' or jfcl.simulate(out=)"
_TRACKED = f"send the records to {', '.join(TRACKERS)}; may be given several times"
_GRID = "values of an option, such as lr=0.01,0.1; once for each option. All combinations are run"
_CONFIG = "TOML file (or a run's config.json) with the names above; flags override it"
LISTS = {  # name, how often it may be given, name of a value, help
    "run": [("--track", "append", "NAME", _TRACKED)],
    "sweep": [("--grid", "append", "NAME=VALUES", _GRID)],
    "compare": [("runs", "+", "DIR", _FOLDERS)],
    "report": [("runs", "+", "DIR", _FOLDERS)],
    "list": [("what", "?", "WHAT", "one of the lists, such as methods")],
}


class Parser(argparse.ArgumentParser):
    """argparse with errors as `ValueError`, and what an unknown flag means; `method` is that of a run, if known.

    `jfcl run --help` is one screen, `jfcl run METHOD --help` explains the options of the method.
    """

    method: str | None = None

    def parse_args(self, args=None, namespace=None):
        parsed, unknown = self.parse_known_args(args, namespace)
        if not unknown:
            return parsed
        flags = [text.split("=")[0][:100] for text in unknown]
        if not flags[0].startswith("-"):
            raise ValueError(f"unexpected argument {flags[0]!r}")
        if self.method is not None:
            names = {flag.lstrip("-").replace("-", "_") for flag in flags} & all_options().keys()
            check_method_takes(self.method, dict.fromkeys(names, "given"))
        accepted = [flag.lstrip("-").replace("-", "_") for action in self._actions for flag in action.option_strings]
        raise ValueError(f"unknown option {flags[0]}{option_hint(flags[0].lstrip('-'), accepted, flag_of)}")

    def format_help(self):
        return super().format_help() if self.method or self.prog.split()[1] not in OF_RUNS else _run_overview(self)

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
    command, texts = argv[0], argv[1:]
    check_choice("command", command, COMMANDS)
    parser = parser_of(command, _method(texts) if command in OF_RUNS else None)
    args = parser.parse_args(texts, argparse.Namespace(command=command))
    for declaration in ARGUMENTS.get(command, {}).values():
        for option in flags_of(declaration):
            if option.several and hasattr(args, option.name):
                setattr(args, option.name, [*itertools.chain(*getattr(args, option.name))])
            option.check(getattr(args, option.name, option.default))
    return args


def flags_of(declaration: Callable) -> list[Option]:
    """Returns the options of a function or class that have flags: all but `progress`, which --quiet stands for."""
    return [option for option in options_of(declaration).values() if option.name != "progress"]


def parser_of(command: str, method: str | None = None) -> Parser:
    """Returns the parser of a command; of a run, with the options of a method, or of all of them."""
    usage, description = None, _text_of(command)
    if command in OF_RUNS:
        usage = f"jfcl {command} {method or 'METHOD'} [options]"
    if method is not None:
        summary = find_method(method).summary
        description = f"{summary[0].upper()}{summary[1:]}.\n\nAn option that is left out has the value in brackets."
    parser = Parser(prog=f"jfcl {command}", usage=usage, description=description, **PLAIN)
    parser.method = method
    try:
        if command in OF_RUNS:
            _add_options(parser, command, method)
        _add_others(parser, command)
    except argparse.ArgumentError as error:
        flag = str(error).split()[1].rstrip(":")
        name = f"an argument of method {method!r} must have another name"
        raise ValueError(f"{name}: jfcl {command} has {flag}") from None
    return parser


def _text_of(command: str) -> str:
    """Returns what a command does."""
    return (COMMANDS[command].__doc__ or "").split("\n")[0]


def overview() -> str:
    """Returns the text of `jfcl --help`."""
    description = "Simulate clustered federated learning: many clients, hidden clusters, one model per cluster."
    lines = [f"  {command:<9} {_text_of(command)}" for command in COMMANDS]
    return "\n".join(["usage: jfcl COMMAND [options]", "", description, "", "commands:", *lines, "", EXAMPLES])


def _method(args: list[str]) -> str | None:
    """Returns METHOD, which comes first among the arguments of a run, or else the user's own method in `--config`."""
    if args and not args[0].startswith("-"):
        return args[0]
    files = [text for flag, text in itertools.pairwise(args) if flag == "--config"]
    files += [text.partition("=")[2] for text in args if text.startswith("--config=")]
    if files and Path(files[-1]).is_file():  # the command reports a missing one
        method = read_config(files[-1]).get("method")
        return method if is_import_path(method) else None
    return None


# ---------------------------------------------------------------------------------------------------------------
# Commands with the options of a run.


def _add_options(parser: Parser, command: str, method: str | None) -> None:
    """Adds METHOD and the options of `run`, `plan` or `sweep`: those of a method, or of all of them."""
    what = "'jfcl list methods', or MODULE:FACTORY for your own; default: that of --config"
    parser.add_argument("method", metavar="METHOD", nargs="?", help=what if method is None else argparse.SUPPRESS)
    if command == "plan":
        examples = "v5e:2x2 or v5e-4, v6e:2x4, v5p:2x2x2, ..., a100, h100, h200, b200, h100:8"
        parser.add_argument_group("Target").add_argument("--target", dest="chip", metavar="NAME", help=examples)
    names = method_options(method) if method else all_options().keys() - common_options().keys()
    options = [option for name, option in all_options(method).items() if name in names]
    if options:
        _add(parser.add_argument_group(f"Method: options of {method or 'single methods'}"), options)
    for group in GROUPS:
        of_group = options_of(group).items()  # any method runs on the cohorts of a population
        options = [o for name, o in of_group if method is None or takes(method, name) or name == "cohort"]
        options = [o for o in options if (command, o.name) != ("plan", "target")]
        options = [o._replace(default=SEEDS) if (command, o.name) == ("sweep", "seeds") else o for o in options]
        _add(parser.add_argument_group(group.__doc__.split("\n")[0].rstrip(".")), options)


def _add(group: argparse._ArgumentGroup, options: Iterable[Option], *, has_default: bool = False) -> None:
    """Adds a flag for each option; where it is not given, `has_default` says whether its default stands for it."""
    for option in options:
        more: dict[str, Any] = {"help": first_sentence(option.text).replace("%", "%%")}
        more["default"] = option.default if has_default else argparse.SUPPRESS
        if option.kind is bool:
            action = argparse.BooleanOptionalAction if option.default else "store_true"  # --no-NAME turns it off
            group.add_argument(flag_of(option.name), action=action, **more)
            continue
        choices = [name for accepts in option.metadata if isinstance(accepts, OneOf) for name in accepts.choices]
        name = METAVARS.get(option.name, METAVARS[option.kind])
        more["metavar"] = f"{{{','.join(choices)}}}" if 0 < len(choices) <= MOST_CHOICES else name
        default = " ".join(map(str, option.default or ())) if option.several else option.default
        more["help"] += "" if default in (None, "") else f" [{default}]"
        if option.several:
            more |= {"nargs": "+", "default": argparse.SUPPRESS}
        group.add_argument(flag_of(option.name), type=_reader(option), **more)


def _reader(option: Option) -> Any:
    """Returns the function that reads the value of a flag, or several between commas; errors name the option's type."""

    def read(text: str) -> Any:
        if option.several:
            return [option.kind(part) for part in text.split(",") if part]
        return text if text in option.words else option.kind(text)

    read.__name__ = option.kind.__name__
    return read


def _add_others(parser: argparse.ArgumentParser, command: str) -> None:
    """Adds the arguments that are no options of a run."""
    groups: dict[str, Any] = {}
    for title, declaration in ARGUMENTS.get(command, {}).items():
        groups[title] = parser.add_argument_group(title)
        _add(groups[title], flags_of(declaration), has_default=True)
    first = next(iter(groups.values()), parser)
    if command in OF_RUNS:
        first.add_argument("--config", metavar="FILE", help=_CONFIG)
    if command in WITH_BAR:
        first.add_argument("--quiet", dest="progress", action="store_false", help="no progress bar")
    for name, arity, metavar, text in LISTS.get(command, ()):
        several = {"action": "append"} if arity == "append" else {"nargs": arity}
        first.add_argument(name, metavar=metavar, help=text, **several)


def _run_overview(parser: argparse.ArgumentParser) -> str:
    """Returns the text of `jfcl run --help`: the flags by group, without those of single methods."""
    width = min(shutil.get_terminal_size().columns, 110) - 2
    wrap = textwrap.TextWrapper(width, subsequent_indent="  ", break_on_hyphens=False)
    prog, command = parser.prog, parser.prog.split()[-1]
    lines = [f"usage: {prog} METHOD [options]", "", *textwrap.wrap(parser.description, width), ""]
    lines += [f"  {prog + ' METHOD --help':<25} explains the options of METHOD and those below"]
    lines += ["  jfcl list                 names of methods, data sets, models, attacks, ...", ""]
    lines += [*wrap.wrap(f"METHOD: {', '.join(METHODS)}, or MODULE:FACTORY"), ""]
    wrap.initial_indent = "  "
    for group in parser._action_groups[2:]:
        if not group.title.startswith("Method"):
            flags = (action.option_strings[-1] for action in group._group_actions)
            lines += [group.title, *wrap.wrap(" ".join(flags))]
    also = {"plan": " --target v5e:2x4", "sweep": " --grid lr=0.05,0.1,0.2"}.get(command, "")
    example = f"example: {prog} ifca --clients 40 --clusters 4 --seeds 5{also} --out runs/ifca"
    return "\n".join([*lines, "", example, ""])
