"""`jfcl report`: one page of HTML on a run, or on several side by side."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from jfcl._version import __version__
from jfcl.analysis import plots
from jfcl.core import check, files
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
    return pages.get_template("report.html")


def page_of(runs: dict[str, Results]) -> bytes:
    """Returns the page on runs, by their names."""
    names, is_alone = list(runs), len(runs) == 1
    each = runs if len(runs) <= comparison.MOST_DRAWN else {}  # runs with sections of their own
    differ = [[option, *values.values()] for option, values in comparison.run_differences(runs).items()]
    page = _template().render(
        title=names[0] if is_alone else f"{len(runs)} runs{': ' * bool(each)}{', '.join(each)}",
        version=__version__,
        is_alone=is_alone,
        notes=[run.note for run in runs.values() if run.note],
        results=_results(runs),
        differences=Table("differences", ["option", *names], differ, kind="text") if differ else None,
        differences_notes=_sentences(comparison.differences_notes({name: run.config for name, run in runs.items()})),
        figures=_curves(dict(list(runs.items())[: comparison.MOST_DRAWN])),
        costs=_costs(runs),
        runs=[parts_of(run, "" if is_alone else f"{name}-") | {"name": name} for name, run in each.items()],
    )
    return f"{page}\n".encode(errors="replace")


def _sentences(notes: Iterable[str]) -> str:
    """Returns notes as one text.

    Example:
      >>> _sentences(["after round 9", "mean over seeds"])
      'After round 9. Mean over seeds.'
    """
    return " ".join(f"{note[0].upper()}{note[1:]}." for note in notes)


def _results(runs: dict[str, Results]) -> Table | None:
    """Returns the table of results; None where no round was evaluated."""
    summaries = {name: run.summary for name, run in runs.items() if run.summary["per_seed"]}
    if not summaries:
        return None
    heads, rows = comparison.results_rows(summaries)
    seeds = " or ".join(sorted({comparison.seeds_text(summary) for summary in summaries.values()}))
    rounds = list(dict.fromkeys(str(summary["num_rounds"]) for summary in summaries.values()))
    caption = _sentences([f"after round {' or '.join(rounds)}; {seeds}", *comparison.results_notes(summaries)])
    return Table("results", heads, rows, caption)


def _curves(runs: dict[str, Results]) -> list[Figure]:
    """Returns the figures that show all runs."""
    alone = next(iter(runs.values())) if len(runs) == 1 else None
    records = {plots.label(name): run.records for name, run in runs.items()}
    found = []

    def with_values(metric: str) -> dict[str, list[dict[str, Any]]]:
        return {name: rows for name, rows in records.items() if any(row.get(metric) is not None for row in rows)}

    band = "The line is the mean over seeds, the band reaches from the lowest to the highest seed."
    metrics = {
        "accuracy": ("accuracy", f"Accuracy on test examples, mean over clients. {band}"),
        "loss": ("train_loss", f"Loss of the local training. {band}"),
        "perplexity": ("perplexity", f"Perplexity on test examples. {band}"),
    }
    for name, (metric, caption) in metrics.items():
        rows = with_values(metric)
        found.append(figure(alone, name, partial(plots.curves, rows, metric) if rows else None, caption))
    accuracies = {plots.label(name): run.clients["accuracy"] for name, run in runs.items() if "accuracy" in run.clients}
    accuracies = {name: values for name, values in accuracies.items() if np.isfinite(values).any()}
    caption = "Final accuracy of every client, sorted; the clients of all seeds together."
    draw = partial(plots.client_accuracies, accuracies) if accuracies else None
    found.append(figure(alone, "clients", draw, caption))
    last = with_values("accuracy")
    if len(last) > 1:
        caption = (
            "Final accuracy: mean over clients, and of the worst client; with the sample standard deviation over seeds."
        )
        found.append(figure(None, "methods", partial(plots.bars, last), caption))
    return [one for one in found if one]


def _costs(runs: dict[str, Results]) -> Table:
    """Returns the table of bytes and seconds, a column for each run."""
    summaries = [run.summary for run in runs.values()]

    def numbers(name: str, digits: int) -> list[str]:
        return ["–" if (value := s.get(name)) is None else f"{value:,.{digits}f}" for s in summaries]

    def per_round(name: str) -> list[str]:
        totals = [(s.get(name), max(s["num_rounds"], 1)) for s in summaries]
        return [comparison.size_text(None if total is None else total / rounds) for total, rounds in totals]

    rows = {
        "rounds": [str(s["num_rounds"]) for s in summaries],
        "clients": numbers("num_clients", 0),
        "bytes up, all clients and rounds": [comparison.size_text(s.get("bytes_up")) for s in summaries],
        "bytes down, all clients and rounds": [comparison.size_text(s.get("bytes_down")) for s in summaries],
        "bytes up in a round": per_round("bytes_up"),
        "bytes down in a round": per_round("bytes_down"),
        "seconds, all seeds together": numbers("seconds", 1),
        "seconds of compilation": numbers("compile_seconds", 1),
        "rounds a second": numbers("rounds_per_second", 2),
        "client-steps a second": numbers("client_steps_per_second", 0),
        "device": [str(s.get("device") or "–") for s in summaries],
    }
    return Table("costs", ["", *runs], [[name, *values] for name, values in rows.items()])
