"""The arguments of the commands: those of `jfcl run` are derived from the options of every run and of the method."""

import argparse
import inspect
import itertools
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from jfcl._version import __version__
from jfcl.cli.commands import COMMANDS
from jfcl.core import check_choice
from jfcl.core.names import flag_of, note_on, option_hint
from jfcl.core.options import SEVERAL, Interval, Needs, OneOf, Option, first_sentence, options_of
from jfcl.experiments import bench, compare, config, lookup, plan, report, run, run_sweep, shifts, sweeps
from jfcl.experiments.options import COMMON, GROUPS, all_options, takes
from jfcl.mapping import hosts
from jfcl.methods import METHODS

OF_RUNS = ("run", "plan", "sweep")
REFUSED = {"plan": plan.REFUSED, "sweep": sweeps.REFUSED}  # options of a run
METAVARS = {int: "N", float: "X", str: "NAME", "out": "DIR", "data_dir": "DIR", "runs": "DIR", "what": "WHAT"}
METAVARS |= {"config": "FILE", "grid": "NAME=VALUES", "coordinator": "HOST:PORT"}
FLAGS = {"progress": "--quiet", "chip": "--target"}  # that do not have the name of the argument
POSITIONAL = ("runs", "what")
FILES = "Files and settings"
MOST_CHOICES = 4  # in a metavar


class Configured:
    """Options of a command with those of a run.

    Attributes:
      config: TOML file (or a run's config.json) with the names above; flags override it.
    """

    config: str | None = None


class Processes:
    """Options of several processes.

    Attributes:
      coordinator: address of process 0, for the same command in several processes, on one machine or on several; on
        Cloud TPU and Slurm auto, without the next two options.
      num_processes: number of processes.
      process_id: number of this process, from 0.
      connect_seconds: seconds to wait for the other processes.
    """

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    connect_seconds: Annotated[float, Interval("(0, inf)")] = hosts.TIMEOUT


# The functions and classes whose keyword arguments and attributes are flags of a command, beside those of its own
# function and the options of a run.
FURTHER: dict[str, tuple[Callable, ...]] = {"run": (Configured, run, Processes), "plan": (Configured, plan.plan_run)}
FURTHER |= {"sweep": (Configured, run_sweep), "shifts": (shifts,), "compare": (compare,), "report": (report,)}
FURTHER |= {"bench": (bench.sweep,)}


class _Formatter(argparse.HelpFormatter):
    """Help with paragraphs, in which no flag is divided."""

    def _fill_text(self, text, width, indent):
        wrap = textwrap.TextWrapper(width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
        return "\n\n".join(map(wrap.fill, text.split("\n\n")))


class Parser(argparse.ArgumentParser):
    """argparse with errors as `ValueError`, and what an unknown flag means."""

    def parse_args(self, args=None, namespace=None):
        parsed, unknown = self.parse_known_args(args, namespace)
        if not unknown:
            return parsed
        flags = [text.split("=")[0][:100] for text in unknown]
        if not flags[0].startswith("-"):
            raise ValueError(f"unexpected argument {flags[0]!r}")
        actions = [action for action in self._actions if action.help != argparse.SUPPRESS] or self._actions
        accepted = [flag.lstrip("-").replace("-", "_") for action in actions for flag in action.option_strings]
        raise ValueError(f"unknown option {flags[0]}{option_hint(flags[0].lstrip('-'), accepted, flag_of)}")

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
    for option in arguments_of(command):
        if option.several and hasattr(args, option.name):
            setattr(args, option.name, [*itertools.chain(*getattr(args, option.name))])
        named = option._replace(name=FLAGS.get(option.name, option.name).lstrip("-"))
        named.check(getattr(args, option.name, option.default))
    return args


def arguments_of(command: str) -> list[Option]:
    """Returns the arguments of a command beside the options of a run."""
    declarations = (COMMANDS[command], *FURTHER.get(command, ()))
    return [option for declaration in declarations for option in options_of(declaration).values()]


def parser_of(command: str, method: str | None = None) -> Parser:
    """Returns the parser of a command; of a run, with the options of a method, or of all of them.

    `jfcl run --help` is one screen, with the names of the flags; `jfcl run METHOD --help` explains them.
    """
    usage, text, groups = None, _text_of(command), {}
    brief = command in OF_RUNS and method is None
    if command in OF_RUNS:
        usage, groups = f"jfcl {command} {method or 'METHOD'} [options]", _options_of_runs(command, method)
    if brief:
        text += f" jfcl {command} METHOD --help explains the options, jfcl list their values."
        text += f"\n\nMETHOD: {', '.join(METHODS)}, or MODULE:FACTORY"
    elif method is not None:
        summary = lookup.find_method(method).summary
        text = f"{summary[0].upper()}{summary[1:]}.\n\nAn option that is left out has the value in brackets."
    settings = {"formatter_class": _Formatter, "allow_abbrev": False, "add_help": False}
    parser = Parser(prog=f"jfcl {command}", usage=usage, description=text, **settings)
    parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    try:
        if command in OF_RUNS:
            parser.add_argument("method", nargs="?", help=argparse.SUPPRESS)
        for title, options in (groups | {FILES: arguments_of(command)}).items():
            group = parser.add_argument_group(title)
            shown = [option for option in options if title == FILES or _is_shown(option, command, method)]
            if brief and not title.startswith("Method"):
                group.description = " ".join(FLAGS.get(option.name, flag_of(option.name)) for option in shown)
            for option in options:
                _add(group, option, has_default=title == FILES, hidden=brief or option not in shown)
    except argparse.ArgumentError as error:
        flag = str(error).split()[1].rstrip(":")
        name = f"an argument of method {method!r} must have another name"
        raise ValueError(f"{name}: jfcl {command} has {flag}") from None
    return parser


def _is_shown(option: Option, command: str, method: str | None) -> bool:
    """Returns whether the help has an option of a run: hidden ones are refused later, with a reason."""
    refused = {*REFUSED.get(command, ())}
    needed = [{needs.option, needs.other} - {""} for needs in option.metadata if isinstance(needs, Needs)]
    if any(names <= refused for names in ({option.name}, *needed)):
        return False
    in_cohorts = option.name == "cohort" and "population" not in refused  # any method runs on those of a population
    return method is None or takes(method, option.name) or in_cohorts


def _options_of_runs(command: str, method: str | None) -> dict[str, list[Option]]:
    """Returns the options of `run`, `plan` or `sweep`, with those of a method, or of all, by the titles of groups."""
    schema, common = all_options(method), COMMON
    if command == "sweep":
        common = common | {"seeds": common["seeds"]._replace(default=sweeps.SEEDS)}
    groups = {f"Method: options of {method or 'single methods'}": [o for n, o in schema.items() if n not in common]}
    for group in GROUPS:  # a plan's --target is a chip, and no column of a table
        names = [name for name in options_of(group) if (command, name) != ("plan", "target")]
        groups[(group.__doc__ or group.__name__).split("\n")[0].rstrip(".")] = [common[name] for name in names]
    return groups


def _text_of(command: str) -> str:
    """Returns what a command does."""
    return (COMMANDS[command].__doc__ or "").split("\n")[0]


def overview() -> str:
    """Returns the text of `jfcl --help`: the commands, and these examples.

    examples:
      jfcl run ifca --clients 40 --clusters 4 --rounds 100 --seeds 5 --restarts 5 --out runs/ifca
      jfcl run fedavg --clients 40 --clusters 4 --rounds 100 --seeds 5 --out runs/fedavg
      jfcl compare runs/ifca runs/fedavg
      jfcl report runs/ifca runs/fedavg --out both.html
      jfcl sweep ifca --clients 40 --grid lr=0.05,0.1,0.2 --grid num_models=2,4 --seeds 3 --out runs/sweep
      jfcl plan ifca --clients 40 --clusters 4 --target v5e:2x4 --out plans/ifca
      jfcl run ifca --dataset mnist --data-dir DATA --clients 1200 --examples-per-client 200 --out runs/mnist
      jfcl run fedavg --population 1000000 --cohort 1000 --sampling stratified --rounds 50 --out runs/million
      jfcl run ifca --config experiment.toml --lr 0.05 --out runs/x        flags override the file
      jfcl run ifca --config runs/x/config.json --out runs/x --resume      continue a run that was stopped
    """
    description = "Simulate clustered federated learning: many clients, hidden clusters, one model per cluster."
    lines = [f"  {command:<9} {_text_of(command)}" for command in COMMANDS]
    examples = inspect.cleandoc(overview.__doc__ or "").partition("\n\n")[2]
    return "\n".join(["usage: jfcl COMMAND [options]", "", description, "", "commands:", *lines, "", examples, ""])


def _method(args: list[str]) -> str | None:
    """Returns METHOD, which comes first among the arguments of a run, or else the user's own method in `--config`."""
    if args and not args[0].startswith("-"):
        return args[0]
    files = [text for flag, text in itertools.pairwise(args) if flag == "--config"]
    files += [text.partition("=")[2] for text in args if text.startswith("--config=")]
    if files and Path(files[-1]).is_file():  # the command reports a missing one
        method = config.read_config(files[-1]).get("method")
        return method if lookup.is_import_path(method) else None
    return None


def _add(group: Any, option: Option, *, has_default: bool, hidden: bool) -> None:
    """Adds the flag of an option; where it is not given, `has_default` says whether its default stands for it."""
    name, flags = option.name, [FLAGS.get(option.name, flag_of(option.name))]
    more: dict[str, Any] = {"help": first_sentence(option.text).replace("%", "%%"), "dest": name}
    more["default"] = option.default if has_default and not option.several else argparse.SUPPRESS
    if name in POSITIONAL:
        flags = [more.pop("dest")]
    if name == "progress":
        more |= {"action": "store_false", "default": True, "help": "no progress bar"}
    elif option.kind is bool:
        more["action"] = argparse.BooleanOptionalAction if option.default else "store_true"  # --no-NAME turns it off
    else:
        names = [m for m in option.metadata if isinstance(m, OneOf) and m.find is None]
        choices = [choice for entry in names for choice in entry.choices]
        value = METAVARS.get(name, METAVARS[option.kind])
        more["metavar"] = f"{{{','.join(choices)}}}" if 0 < len(choices) <= MOST_CHOICES else value
        default = " ".join(map(str, option.default or ())) if option.several else option.default
        more["help"] += "" if default in (None, "") else f" [{default}]"
        more["type"] = _reader(option)
        if option.several == SEVERAL or (option.several and name in POSITIONAL):
            more |= {"nargs": "+", "action": "extend"}
        elif option.several or name in POSITIONAL:
            more |= {"action": "append"} if option.several else {"nargs": "?"}
    if hidden:
        more["help"] = argparse.SUPPRESS
    group.add_argument(*flags, **more)


def _reader(option: Option) -> Any:
    """Returns the function that reads the value of a flag, or several between commas; errors name the option's type."""

    def read(text: str) -> Any:
        if option.several:
            parts = [part for part in text.split(",") if part] if option.several == SEVERAL else []
            return [option.kind(part) for part in parts or [text]]
        return text if text in option.words else option.kind(text)

    read.__name__ = " or ".join([option.kind.__name__, *map(repr, option.words)])
    return read
