"""The command line: `jfcl run`, `plan`, `sweep`, `shifts`, `compare`, `report`, `list`, `bench`, `demo`."""

import gc
import itertools
import os
import sys
import sysconfig
import traceback
import warnings
from pathlib import Path

import jax
from rich.console import Console
from rich.text import Text

from jfcl.cli.commands import run_command
from jfcl.cli.parser import parse
from jfcl.core.texts import printable
from jfcl.mapping import hosts
from jfcl.simulation import callbacks, probe, progress

LONGEST_MESSAGE = 4000  # characters


class _Console(Console):
    """A console that escapes the control characters of texts, such as names of folders."""

    def render(self, renderable, options=None):
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def _compilation_cache() -> None:
    """Keeps compiled programs between runs: the second start of the same run compiles almost nothing."""
    folder = probe.cache_dir()
    if jax.config.jax_compilation_cache_dir is None and folder is not None:
        jax.config.update("jax_compilation_cache_dir", str(folder / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0, 1 (failed), 2 (bad input), 130 (interrupted)."""
    if argv is None:  # the modules stay until the process ends: to look for garbage among them costs its end 0.3 s
        gc.freeze()
    plain = {"highlight": False, "emoji": False, "markup": False}  # a path may hold ":key:" or "[red]"
    if hasattr(sys.stdout, "reconfigure"):  # a character that its encoding does not have ends no command
        sys.stdout.reconfigure(errors="replace")
    console, errors = _Console(**plain), _Console(stderr=True, soft_wrap=True, **plain)
    if not console.is_terminal and "COLUMNS" not in os.environ:  # rich takes 80, too few for some names in tables
        console = _Console(width=120, **plain)
    elif console.width < 80:  # in less, tables lose the names of runs and cut numbers; a terminal wraps whole lines
        console = _Console(width=80, **plain)
    warnings.showwarning = lambda message, *_, **__: errors.print(Text.assemble(("note: ", "yellow"), str(message)))
    status = _main(sys.argv[1:] if argv is None else argv, console, errors)
    if status and hosts.connected():
        hosts.leave(status)
    return status


def _main(argv: list[str], console: Console, errors: Console) -> int:
    args = None
    try:
        args = parse(argv)
        if args is None:
            return 0
        if args.command not in ("bench", "plan"):  # what bench measures; what cannot be read back without the target
            _compilation_cache()
        run_command(args, console)
        return 0
    except KeyboardInterrupt:
        errors.print(f"\ninterrupted{_how_to_continue(args)}")
        return 130
    except Exception as error:
        if hosts.is_of_a_lost_process(error):
            remedy = "; continue with --resume, with any number of processes" if getattr(args, "out", None) else ""
            errors.print(f"jfcl: stopped: another process was lost{remedy} ({str(error).splitlines()[0]})")
            return 1
        stopped = isinstance(error, (progress.DivergedError, callbacks.CallbackError))
        if stopped or isinstance(error, (ValueError, OSError, MemoryError)):  # OSError: no permission, a full disk
            errors.print(Text.assemble((f"jfcl: {'stopped' if stopped else 'error'}:", "red"), " ", _sentence(error)))
            return 1 if stopped else 2
        if frames := _frames_of_user(error):
            head = "Traceback (most recent call last), in your files alone (JAX_TRACEBACK_FILTERING=off shows all):\n"
            text = [head, *traceback.format_list(frames), *traceback.format_exception_only(error)]
            errors.print("".join(text).rstrip())
            return 1
        if not hosts.connected():
            raise
        traceback.print_exc()  # main leaves at once
        return 1


def _frames_of_user(error: Exception) -> list[traceback.FrameSummary]:
    """Returns the frames of an error that are in a user's own module; none with `JAX_TRACEBACK_FILTERING=off`."""
    if os.environ.get("JAX_TRACEBACK_FILTERING") == "off":
        return []
    ours, others = str(Path(__file__).parents[1]), (sysconfig.get_path("stdlib"), "<")
    frames = traceback.extract_tb(error.__traceback__)
    called = itertools.dropwhile(lambda frame: not frame.filename.startswith(ours), frames)  # not the script
    own = (frame for frame in called if not frame.filename.startswith((ours, *others)))
    packages = {"site-packages", "dist-packages"}
    return [frame for frame in own if packages.isdisjoint(Path(frame.filename).parts)]


def _sentence(error: Exception) -> str:
    """Returns the message of an error, cut in the middle if it is long."""
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        text = f"{error.filename}: {error.strerror}"
    if isinstance(error, MemoryError):
        text = f"there is not enough memory{': ' * bool(text)}{text}"
    if len(text) <= LONGEST_MESSAGE:
        return text
    return f"{text[: LONGEST_MESSAGE // 2]} ... {text[-LONGEST_MESSAGE // 4 :]}"


def _how_to_continue(args) -> str:
    """Returns what an interrupted command says of its folder."""
    if getattr(args, "command", None) == "shifts" and Path(args.out, "settings.json").exists():
        return f"; finished cells are in {args.out}, continue with the same command"
    out = args.out if getattr(args, "command", None) in ("run", "sweep") else None
    if out is None or not any(Path(out, name).exists() for name in ("config.json", "setting.json")):
        return ""
    return f"; what was saved is in {out}, continue with the same command and --resume"
