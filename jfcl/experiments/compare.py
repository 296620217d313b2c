"""`compare`: the table and the figures of finished runs, also for a paper."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jfcl.analysis import plots
from jfcl.core.files import write_whole
from jfcl.experiments import comparison
from jfcl.experiments.results import Results, read_finished

TEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "–": "--"}
TEX |= {character: f"\\{character}" for character in "&%$#_{}"} | {"<": r"\textless{}", ">": r"\textgreater{}"}


def compare(
    runs: Sequence[str | Path],
    *,
    out: str | Path | None = None,
    latex: bool = False,
    pdf: bool = False,
    svg: bool = False,
) -> list[Path]:
    """Writes the table and the figures of finished runs side by side, as `jfcl compare` does.

    Args:
      runs: the folders of the runs; a run has the name of its folder.
      out: a folder for the files; default: `compare/` beside the first run.
      latex: also write `results.tex`, a table for LaTeX with `\\usepackage{booktabs}`.
      pdf: also write the figures as PDF files as wide as a column of a paper with two columns, 3.25 inches.
      svg: the same as SVG files.

    Returns:
      The files: a curve over rounds, bars of the last round (both of the first 20 runs), `results.csv`, and those that
      are asked for.

    Raises:
      ValueError: a folder without a finished run.

    Example:
      >>> import tempfile
      >>> from jfcl.experiments import Config, run
      >>> folder = Path(tempfile.mkdtemp()) / "mean"
      >>> _ = run(Config("fedavg", clients=4, rounds=2), out=folder)
      >>> [file.name for file in compare([folder], latex=True, pdf=True)][2:]
      ['results.csv', 'results.tex', 'accuracy.pdf', 'methods.pdf']
    """
    return write_comparison(read_runs(runs), unused_folder(runs, out), latex=latex, pdf=pdf, svg=svg)


def read_runs(folders: Sequence[str | Path]) -> dict[str, Results]:
    """Reads finished runs, by their names."""
    return {name: read_finished(folder) for name, folder in comparison.by_name(folders).items()}


def run_differences(runs: dict[str, Results]) -> dict[str, dict[str, str]]:
    """Returns the options in which runs differ, as they were used, and the rounds that were computed."""
    done = {name: {"num_rounds": run.summary["num_rounds"]} for name, run in runs.items()}
    return comparison.differences({name: run.config | done[name] for name, run in runs.items()})


def unused_folder(runs: Sequence[str | Path], out: str | Path | None) -> Path:
    """Returns the folder of the files of a comparison: `out`, or a new one beside the first run."""
    return Path(out) if out else comparison.beside(runs[0], "compare")


def write_comparison(
    runs: dict[str, Results], out: Path, *, latex: bool = False, pdf: bool = False, svg: bool = False
) -> list[Path]:
    """Writes the files of `compare` into `out`, and returns them."""
    summaries = {name: run.summary for name, run in runs.items()}
    records = {plots.label(name): run.records for name, run in itertools.islice(runs.items(), comparison.MOST_DRAWN)}
    metric = comparison.judged_by(summary["mean"] for summary in summaries.values())
    if not any(row.get(metric) is not None for rows in records.values() for row in rows):  # nothing was evaluated
        metric = "train_loss"

    def figures() -> dict[str, plots.Figure]:
        bars = plots.bars(records) if metric == "accuracy" else plots.bars(records, [metric])
        return {metric: plots.curves(records, metric), "methods": bars}

    files = [plots.save(figure, out / f"{name}.png") for name, figure in figures().items()]
    texts = {"results.csv": comparison.results_csv(summaries)} | (
        {"results.tex": results_tex(summaries)} if latex else {}
    )
    for name, text in texts.items():
        write_whole(out / name, text.encode())
        files.append(out / name)
    for suffix in [".pdf"] * pdf + [".svg"] * svg:
        files += [plots.save(figure, out / f"{name}{suffix}", column=True) for name, figure in figures().items()]
    return files


def results_tex(summaries: dict[str, dict[str, Any]]) -> str:
    r"""Returns the table of results for LaTeX, with the rules of the package booktabs.

    Example:
      >>> rows = [{"accuracy": 0.5, "rounds_to_recovery": None}, {"accuracy": 0.75, "rounds_to_recovery": None}]
      >>> mean = {"accuracy": 0.625, "clusters_in_use": 1.0}
      >>> print(results_tex({"a_b": {"per_seed": rows, "mean": mean}}).splitlines()[-3])
      a\_b & 62.5 $\pm$ 17.7 & -- & -- & -- & 1.0 & -- & -- & -- \\
    """
    heads, rows = comparison.results_rows(summaries)
    heads = [" ".join(head.replace("-\n", "").split()) for head in heads]
    about = " or ".join(sorted({comparison.seeds_text(summary) for summary in summaries.values()}))
    lines = [[tex(cell).replace(r"$\pm$", r" $\pm$ ") for cell in row] for row in [heads, *rows]]
    head, *body = (" & ".join(cells) + r" \\" for cells in lines)
    columns = "l" + "r" * (len(heads) - 1)
    return "\n".join(
        [
            rf"% {about}; sent and received: bytes of all clients and rounds. Needs \usepackage{{booktabs}}.",
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            head,
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


def tex(text: str) -> str:
    r"""Returns a text as LaTeX prints it, on one line.

    Example:
      >>> print(tex("lr_0.1 & 50%"))
      lr\_0.1 \& 50\%
    """
    plain = re.sub(r"[\x00-\x1f\x7f]+", " ", text)
    return "".join(TEX.get(character, character) for character in plain)
