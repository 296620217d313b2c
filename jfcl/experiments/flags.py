"""Flags of the command line: those of `jfcl run` are derived from the options of `Config` and of the methods."""

from __future__ import annotations

import argparse
import itertools
import shutil
import textwrap
from collections.abc import Iterable
from pathlib import Path

from jfcl._version import __version__
from jfcl.core.names import NOTES, flag_of, option_hint
from jfcl.core.options import OneOf, Option, first_sentence, is_text, options_of
from jfcl.experiments.bench import sweep
from jfcl.experiments.config import all_options, common_options, groups, method_options, takes
from jfcl.experiments.config_file import read_config
from jfcl.experiments.own import find_method, is_own
from jfcl.experiments.sweeps import SEEDS, sweep_options
from jfcl.experiments.tables import lists
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
PLAIN = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
DATA_DIR = "folder of official data files; default: $JFCL_DATA_DIR, else TFDS"
METAVARS = {int: "N", float: "X", str: "NAME"}
MOST_CHOICES = 4  # in a metavar


class Parser(argparse.ArgumentParser):
    """argparse with errors as `ValueError`, the nearest name for an unknown flag, and the flags of a user's methods."""

    takes_method = False  # whether METHOD is an argument

    def parse_known_args(self, args=None, namespace=None):
        method = _own_method(self, args) if self.takes_method else None
        if method is not None:
            options = method_options(method)
            for name in options.keys() & ({action.dest for action in self._actions} - all_options().keys()):
                raise ValueError(f"argument {name} of method {method!r} must have another name: {self.prog} has one")
            self.conflict_handler = "resolve"  # a name that methods of the library have, perhaps with another type
            _add(self.add_argument_group(f"Method: options of {method}"), options.values())
        return super().parse_known_args(args, namespace)

    def parse_args(self, args=None, namespace=None):
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            options = [f.lstrip("-").replace("-", "_") for a in self._actions_of(parsed) for f in a.option_strings]
            name = unknown[0].split("=")[0][:100]
            if not name.startswith("-"):
                values = ",".join(itertools.takewhile(lambda text: not text.startswith("-"), unknown))[:100]
                option = [text for text in getattr(parsed, "grid", None) or () if "=" not in text][-1:]
                hint = f"; write --grid {option[0]}={values}" if option else ""
                raise ValueError(f"unexpected argument {name!r}{hint}")
            raise ValueError(f"unknown option {name}{option_hint(name.lstrip('-'), options, flag_of)}")
        return parsed

    def _actions_of(self, parsed: argparse.Namespace) -> list[argparse.Action]:
        """Returns the arguments of the command that was given; without one, those of this parser."""
        commands = next(action for action in self._actions if isinstance(action, argparse._SubParsersAction))
        return commands.choices.get(parsed.command, self)._actions

    def error(self, message):
        notes = [note for name, note in NOTES.items() if message.startswith(f"argument {flag_of(name)}: invalid")]
        raise ValueError(message + "".join(f" ({note})" for note in notes))


def _own_method(parser: argparse.ArgumentParser, args: list[str]) -> str | None:
    """Returns the `MODULE:FACTORY` that is METHOD among the arguments, or else the method of `--config`."""
    method, file, taker = None, None, None  # taker: of a flag that takes this text
    for text in args:
        flag, _, value = text.partition("=")
        if taker is None and method is None and is_own(text):  # later ones are values of the method's own flags
            method = text
        if taker is not None and taker.dest == "config":
            file = text
        elif taker is None and flag == "--config":
            file = value
        found = parser._option_string_actions.get(text) if taker is None else None
        taker = None if found is None or found.nargs == 0 else found
    if method is None and file and is_text(file) and Path(file).is_file():  # the command reports a missing one
        method = read_config(file).get("method")
    return method if is_own(method) else None


def _add(group: argparse._ArgumentGroup, options: Iterable[Option]) -> None:
    """Adds a flag for each option."""
    for option in options:
        there = flag_of(option.name) in group._option_string_actions
        if there and group.conflict_handler != "resolve":  # `jfcl plan` has a --target of its own
            continue
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


def run_parser(
    parser: argparse.ArgumentParser, method: str | None, *, trackers: bool = True
) -> argparse.ArgumentParser:
    """Adds the arguments of `jfcl run` to a parser: with the options of one method, or of all for None."""
    _add_options(parser, method)
    files = _add_files(parser, "folder for results, checkpoints and plots; default: none are kept")
    files.add_argument(
        "--checkpoint-seconds",
        type=float,
        default=30.0,
        metavar="X",
        help="least time between two checkpoints, the first of which is made after 5 seconds [30]",
    )
    if trackers:
        known = f"send the records to {', '.join(TRACKERS)}; may be given several times"
        files.add_argument("--track", action="append", default=[], metavar="NAME", help=known)
    several = parser.add_argument_group("Processes: the same command in each, on one machine or on several")
    several.add_argument(
        "--coordinator", metavar="HOST:PORT", help="of process 0; auto on Cloud TPU and Slurm, without the next two"
    )
    several.add_argument("--num-processes", type=int, metavar="N", help="number of processes")
    several.add_argument("--process-id", type=int, metavar="N", help="number of this process, from 0")
    several.add_argument(
        "--connect-seconds",
        type=float,
        default=hosts.TIMEOUT,
        metavar="X",
        help=f"time to wait until all processes are there [{hosts.TIMEOUT}]",
    )
    return parser


def _add_options(parser: argparse.ArgumentParser, method: str | None, **defaults: int) -> None:
    """Adds METHOD and the options of a `Config`, some with other `defaults` in their help."""
    parser.add_argument("-h", "--help", action=_RunHelp, help="show this text")
    parser.takes_method = True
    what = "'jfcl list methods', or MODULE:FACTORY for your own; default: that of --config"
    parser.add_argument("method", metavar="METHOD", nargs="?", help=what)
    own = method_options(method) if method else {n: o for n, o in all_options().items() if n not in common_options()}
    if own:
        _add(parser.add_argument_group(f"Method: options of {method or 'single methods'}"), own.values())
    for group, options in groups().items():
        title = group.__doc__.split("\n")[0].rstrip(".")
        _add(
            parser.add_argument_group(title),
            [
                option._replace(default=defaults.get(name, option.default))
                for name, option in options.items()
                if method is None or takes(method, name)
            ],
        )


def _add_files(parser: argparse.ArgumentParser, out: str) -> argparse._ArgumentGroup:
    """Adds the options of files that several commands have; `out` explains --out."""
    files = parser.add_argument_group("Files")
    files.add_argument("--data-dir", metavar="DIR", help=DATA_DIR)
    files.add_argument("--out", metavar="DIR", help=out)
    files.add_argument("--resume", action="store_true", help="continue what was stopped in --out")
    files.add_argument(
        "--config", metavar="FILE", help="TOML (or the config.json of a run) with the names above; flags override"
    )
    files.add_argument("--quiet", action="store_true", help="no progress bar")
    return files


class _RunHelp(argparse._HelpAction):
    """`jfcl run --help`, one screen, or `jfcl run METHOD --help`, the options of the method."""

    def __call__(self, parser, namespace, values, option_string=None):
        method = getattr(namespace, "method", None)
        if method is None:
            print(run_overview(parser))
            parser.exit()
        summary = find_method(method).summary
        of_method = Parser(
            prog=parser.prog,
            usage=f"{parser.prog} {method} [options]",
            description=f"{summary}.\n\nAn option that is left out has the value in brackets.",
            add_help=False,
            **PLAIN,
        )
        PARSERS[parser.prog.split()[-1]](of_method, method).print_help()
        parser.exit()


def run_overview(parser: argparse.ArgumentParser) -> str:
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


def add_commands(commands: argparse._SubParsersAction) -> None:
    """Adds the commands with their arguments."""
    what = "run one method and keep its results in a folder"
    run_parser(commands.add_parser("run", help=what, description=_sentence(what), add_help=False, **PLAIN), None)
    what = "compile a run for a TPU or GPU that is not there: does it fit, and how long may a round take"
    _plan_parser(commands.add_parser("plan", help=what, description=_sentence(what), add_help=False, **PLAIN), None)
    what = "run one method with all combinations of some options, and choose the best on held-out examples"
    _sweep_parser(commands.add_parser("sweep", help=what, description=_sentence(what), add_help=False, **PLAIN), None)
    compare = commands.add_parser("compare", help="table and plots of finished runs side by side", allow_abbrev=False)
    compare.add_argument("runs", nargs="+", metavar="DIR", help="folders of 'jfcl run --out' or jfcl.simulate(out=)")
    compare.add_argument("--out", metavar="DIR", help="folder for the files; default: compare/ beside the first run")
    compare.add_argument("--latex", action="store_true", help="also write results.tex, a table for LaTeX with booktabs")
    for form in ("pdf", "svg"):
        what = f"also write the figures as {form.upper()}, in the width of a paper's column"
        compare.add_argument(f"--{form}", action="store_true", help=what)
    report = commands.add_parser(
        "report",
        help="one page of HTML on a run, or on several side by side; also unfinished ones",
        description="Write one page of HTML that needs no other file: curves, clusters, similarities, the worst"
        " clients, costs, options, and how to resume. Of a run that is unfinished or damaged, it reports the rest.",
        allow_abbrev=False,
    )
    report.add_argument("runs", nargs="+", metavar="DIR", help="folders of 'jfcl run --out' or jfcl.simulate(out=)")
    report.add_argument(
        "--out",
        metavar="FILE.html",
        help="default: report.html in the folder of one run, or beside the first of several",
    )
    listing = commands.add_parser("list", help="methods, data sets, models, ... in one line each", allow_abbrev=False)
    listing.add_argument("what", nargs="?", metavar="WHAT", help=", ".join(lists()))
    _add_bench(commands)
    demo = commands.add_parser("demo", help="IFCA against FedAvg, local training and the oracle on rotated digits")
    demo.add_argument("--out", default="runs/demo", metavar="DIR", help="folder for results [runs/demo]")
    demo.add_argument("--seeds", type=int, default=5, metavar="N", help="seeds [5]")
    demo.add_argument("--rounds", type=int, default=100, metavar="N", help="rounds [100]")


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _plan_parser(parser: argparse.ArgumentParser, method: str | None) -> argparse.ArgumentParser:
    """Adds the arguments of `jfcl plan` to a parser: the target, and those of `jfcl run`."""
    known = "v5e:2x2 or v5e-4, v6e:2x4, v5p:2x2x2, ..., a100, h100, h200, b200, h100:8"
    parser.add_argument_group("Target").add_argument("--target", metavar="NAME", help=known)
    return run_parser(parser, method, trackers=False)


def _sweep_parser(parser: argparse.ArgumentParser, method: str | None) -> argparse.ArgumentParser:
    """Adds the arguments of `jfcl sweep` to a parser: the grid, and the options of `jfcl run`."""
    group = parser.add_argument_group("Sweep")
    group.add_argument(
        "--grid",
        action="append",
        metavar="NAME=VALUES",
        help="values of an option, such as lr=0.01,0.1; once for each option. All combinations are run",
    )
    _add(group, sweep_options().values())
    _add_options(parser, method, seeds=SEEDS)
    _add_files(parser, "folder for sweep.json, best.toml, the finished cells and a heat-map; default: none are kept")
    return parser


PARSERS = {"run": run_parser, "plan": _plan_parser, "sweep": _sweep_parser}


def _add_bench(commands: argparse._SubParsersAction) -> None:
    bench = commands.add_parser(
        "bench",
        help="speed of rounds on this machine: method x model x mapping x number of clients",
        description="Measure one round of every method x model x mapping x number of clients on random images of"
        " 28 x 28: client-steps a second, the fraction of a large matrix product's speed, memory, compilation. Rounds"
        " that would take longer than --seconds are left out.",
        allow_abbrev=False,
    )
    bench.add_argument("--methods", nargs="+", metavar="NAME", help="of fedavg, ifca, local [all], or MODULE:FACTORY")
    bench.add_argument("--models", nargs="+", metavar="NAME", help="see 'jfcl list models' [mlp cnn_mnist]")
    bench.add_argument("--mappings", nargs="+", metavar="NAME", help="mappings of the clients ['chunked(1)' ... vmap]")
    bench.add_argument("--clients", nargs="+", type=int, metavar="N", help="numbers of clients [10 100 1000]")
    _add(bench, options_of(sweep).values())
    bench.add_argument(
        "--devices", type=int, metavar="N", help="divide the CPU into so many; adds 'sharded(chunked(1))'"
    )
    bench.add_argument("--quick", action="store_true", help="defaults: fedavg, mlp, 10 clients only")
    bench.add_argument("--out", default="runs/bench", metavar="DIR", help="folder for results [runs/bench]")
    bench.add_argument("--quiet", action="store_true", help="no progress bar")


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the whole command line."""
    parser = Parser(
        prog="jfcl",
        description="Simulate clustered federated learning: many clients, hidden clusters, one model per cluster.",
        epilog=EXAMPLES,
        **PLAIN,
    )
    parser.add_argument("--version", action="version", version=f"jfcl {__version__}")
    add_commands(parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser))
    return parser
