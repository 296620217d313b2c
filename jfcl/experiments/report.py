"""`jfcl report`: one page of HTML on a run, or on several side by side."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from jfcl._version import __version__
from jfcl.analysis import plots
from jfcl.core import check, files, shown
from jfcl.core.plain import check_path
from jfcl.core.texts import printable
from jfcl.experiments import comparison
from jfcl.experiments.report_parts import Figure, Table, figure, parts_of
from jfcl.experiments.results import Results, read_results

NAME = "report.html"


def report(runs: str | Path | Sequence[str | Path], *, out: str | Path | None = None) -> Path:
    """Writes one page of HTML on a run, or on several side by side; it needs no other file and no network.

    The page has the results, the curves with bands over seeds, the cluster of each client over rounds, the similarities
    ordered by cluster, CFL's parameter tree, the worst clients, bytes and seconds, options, versions and the commands
    that resume the run. Of a run that is not finished it reports what there is, with a note on the page and a warning.
    Of more than 20 runs it shows tables of all, curves of the first 20, and no sections on single runs. Nothing else in
    the runs' folders changes.

    Args:
      runs: a run's folder, or several.
      out: the file, `*.html`; default: `report.html` in the folder of one run, or a new file beside the first of
        several.

    Returns:
      The file.

    Raises:
      ValueError: a folder without a run; a run that is damaged, or of another version; `out` with another ending; a run
        that another process writes, for a page in its folder.

    Example:
      >>> import tempfile
      >>> from jfcl.experiments import Config, run
      >>> folder = tempfile.mkdtemp()
      >>> _ = run(Config("fedavg", clients=4, rounds=2), out=folder)  # writes a report as well
      >>> report(folder).name
      'report.html'
    """
    folders = [runs] if isinstance(runs, str | Path) or not isinstance(runs, Iterable) else list(runs)
    named = comparison.by_name(folders)
    if out is None:
        file = Path(folders[0]) / NAME if len(folders) == 1 else comparison.beside(folders[0], "report", ".html")
    else:
        check_path("out", out)
        check(Path(out).suffix == ".html", "out", str(out), "a file that ends in .html")
        file = Path(out)
    found = {name: read_results(folder) for name, folder in named.items()}
    write_report(found, file)
    for run in found.values():
        if run.note:
            warnings.warn(f"in the report of {run.folder}: {run.note}", stacklevel=2)
    return file


def write_report(runs: dict[str, Results], file: Path) -> None:
    """Writes the page on runs, by their names, whole or not at all; in a run's folder, with the lock of the run."""
    content = page_of(runs)
    if not (file.parent / "config.json").exists():
        files.write_whole(file, content)
        return
    try:
        with files.lock(file.parent / "lock"):
            files.write_whole(file, content)
    except ValueError as error:
        raise ValueError(f"{error}; or write the report elsewhere with out (--out FILE.html)") from None


@cache
def _template() -> Any:
    """Returns the template of the page, in which every text is escaped, and control characters are written out."""
    import jinja2  # only where a page is written
    from markupsafe import Markup

    pages = jinja2.Environment(
        loader=jinja2.PackageLoader("jfcl.experiments"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else printable(value),
    )
    pages.filters["shown"] = shown
    return pages.get_template("report.html")


def page_of(runs: dict[str, Results]) -> bytes:
    """Returns the page on runs, by their names."""
    names, is_alone = list(runs), len(runs) == 1
    each = runs if len(runs) <= comparison.MOST_DRAWN else {}  # runs with sections of their own
    differ = [[option, *values.values()] for option, values in comparison.run_differences(runs).items()]
    costs = [[name, *(text(run.summary) for run in runs.values())] for name, text in COSTS.items()]
    page = _template().render(
        title=names[0] if is_alone else f"{len(runs)} runs{': ' * bool(each)}{', '.join(each)}",
        version=__version__,
        is_alone=is_alone,
        notes=[run.note for run in runs.values() if run.note],
        results=_results(runs),
        differences=Table("differences", ["option", *names], differ, kind="text") if differ else None,
        differences_notes=_sentences(comparison.differences_notes({name: run.config for name, run in runs.items()})),
        figures=_curves(dict(list(runs.items())[: comparison.MOST_DRAWN])),
        costs=Table("costs", ["", *names], costs),
        runs=[parts_of(run, "" if is_alone else f"{name}-") | {"name": name} for name, run in each.items()],
    )
    return f"{page}\n".encode(errors="replace")


def _sentences(notes: Iterable[str]) -> str:
    """Returns notes as one text."""
    return " ".join(f"{note[0].upper()}{note[1:]}." for note in notes)


def _results(runs: dict[str, Results]) -> Table | None:
    """Returns the table of results; None where no round was evaluated."""
    summaries = {name: run.summary for name, run in runs.items() if run.summary["per_seed"]}
    if not summaries:
        return None
    heads, rows = comparison.results_rows(summaries)
    rounds = " or ".join(dict.fromkeys(str(summary["num_rounds"]) for summary in summaries.values()))
    first = f"after round {rounds}; {comparison.seeds_text(summaries)}"
    return Table("results", heads, rows, _sentences([first, *comparison.results_notes(summaries)]))


def _curves(runs: dict[str, Results]) -> list[Figure]:
    """Returns the figures that show all runs."""
    alone = next(iter(runs.values())) if len(runs) == 1 else None
    records = {plots.label(name): run.records for name, run in runs.items()}

    def with_values(metric: str) -> dict[str, list[dict[str, Any]]]:
        return {name: rows for name, rows in records.items() if any(row.get(metric) is not None for row in rows)}

    figures = []
    for name, metric, of in (
        ("accuracy", "accuracy", "Accuracy on test examples, mean over clients."),
        ("loss", "train_loss", "Loss of the local training."),
        ("perplexity", "perplexity", "Perplexity on test examples."),
    ):
        rows = with_values(metric)
        caption = f"{of} The line is the mean over seeds, the band reaches from the lowest to the highest seed."
        figures.append(figure(alone, name, partial(plots.curves, rows, metric) if rows else None, caption))
    accuracies = {plots.label(name): run.clients.get("accuracy", np.empty(0)) for name, run in runs.items()}
    accuracies = {name: values for name, values in accuracies.items() if np.isfinite(values).any()}
    draw = partial(plots.client_accuracies, accuracies) if accuracies else None
    caption = "Final accuracy of every client, sorted; the clients of all seeds together."
    figures.append(figure(alone, "clients", draw, caption))
    evaluated = with_values("accuracy")
    if len(evaluated) > 1:
        caption = "Final accuracy: mean over clients, and of the worst client; with the sample standard deviation over"
        figures.append(figure(None, "methods", partial(plots.bars, evaluated), f"{caption} seeds."))
    return [one for one in figures if one]


def _count(name: str, digits: int = 0) -> Callable[[dict[str, Any]], str]:
    return lambda summary: "–" if (value := summary.get(name)) is None else f"{value:,.{digits}f}"


def _size(name: str, *, each_round: bool = False) -> Callable[[dict[str, Any]], str]:
    def text(summary: dict[str, Any]) -> str:
        size, rounds = summary.get(name), max(summary["num_rounds"], 1) if each_round else 1
        return comparison.size_text(None if size is None else size / rounds)

    return text


COSTS = {  # the rows of the table of costs, from a summary
    "rounds": lambda summary: str(summary["num_rounds"]),
    "clients": _count("num_clients"),
    "bytes up, all clients and rounds": _size("bytes_up"),
    "bytes down, all clients and rounds": _size("bytes_down"),
    "bytes up in a round": _size("bytes_up", each_round=True),
    "bytes down in a round": _size("bytes_down", each_round=True),
    "seconds, all seeds together": _count("seconds", 1),
    "seconds of compilation": _count("compile_seconds", 1),
    "rounds a second": _count("rounds_per_second", 2),
    "client-steps a second": _count("client_steps_per_second"),
    "device": lambda summary: str(summary.get("device") or "–"),
}
