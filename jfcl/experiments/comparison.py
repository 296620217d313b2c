"""Finished runs side by side: `compare`, the table of results, the options in which runs differ, files for a paper."""

import itertools
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jfcl.analysis import plots
from jfcl.analysis.metrics import FOUND, deviation
from jfcl.core import check, files, plain, texts
from jfcl.experiments.results import NO_OPTIONS, Results, read_finished
from jfcl.simulation.evaluation import OF_NEWCOMERS
from jfcl.simulation.grid import METRICS
from jfcl.simulation.results import BYTES

OF_CLUSTERS = ("cluster_accuracy", "adjusted_rand", "rounds_to_recovery")  # agreement with the true clusters
COLUMNS = {  # of tables: head, digits, scale
    "accuracy": ("client\nacc. %", 1, 100),
    "worst_client_accuracy": ("worst\nclient %", 1, 100),
    "perplexity": ("perplex-\nity", 1, 1),
    "loss": ("test\nloss", 3, 1),
    "cluster_accuracy": ("cluster\nacc. %", 1, 100),
    "adjusted_rand": ("adjusted\nRand", 2, 1),
    "clusters_in_use": ("clusters\nin use", 0, 1),
    "rounds_to_recovery": ("found at\nround", 0, 1),
}
MOST_DRAWN = 20  # runs in a picture, and with sections of their own in a report
TEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r" $\pm$ ", "–": "--"}
TEX |= {character: f"\\{character}" for character in "&%$#_{}"} | {"<": r"\textless{}", ">": r"\textgreater{}"}
# After the end of a row, a bracket would begin an option, and a star would be a part of that end.
TEX |= {"[": "{[}", "*": "{*}", "|": r"\textbar{}"}


def compare(
    runs: str | Path | Sequence[str | Path] | dict[str, Results],
    *,
    out: str | Path | None = None,
    latex: bool = False,
    pdf: bool = False,
    svg: bool = False,
) -> list[Path]:
    """Writes the table and the figures of finished runs side by side, as `jfcl compare` does.

    Args:
      runs: the folders of the runs, or one, or what `read_runs` returns for them; a run has the name of its folder.
      out: a folder for the files; default: a new one, `compare/`, beside the first run.
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
    runs = runs if isinstance(runs, dict) else read_runs(runs)
    out = Path(out) if out else beside(next(iter(runs.values())).folder, "compare")
    summaries = {name: run.summary for name, run in runs.items()}
    records = {plots.label(name): run.records for name, run in itertools.islice(runs.items(), MOST_DRAWN)}
    metric = judged_by(summary["mean"] for summary in summaries.values())
    if not any(row.get(metric) is not None for rows in records.values() for row in rows):  # nothing was evaluated
        metric = "train_loss"

    def save(suffix: str, *, column: bool) -> list[Path]:
        bars = plots.bars(records) if metric == "accuracy" else plots.bars(records, [metric])
        figures = {metric: plots.curves(records, metric), "methods": bars}
        return [plots.save(figure, out / f"{name}{suffix}", column=column) for name, figure in figures.items()]

    written = save(".png", column=False)
    for name, text_of in [("results.csv", results_csv), *[("results.tex", results_tex)] * latex]:
        files.write_whole(out / name, text_of(summaries).encode())
        written.append(out / name)
    for suffix in [".pdf"] * pdf + [".svg"] * svg:
        written += save(suffix, column=True)
    return written


def read_runs(folders: str | Path | Sequence[str | Path]) -> dict[str, Results]:
    """Reads finished runs, by their names."""
    return {name: read_finished(folder) for name, folder in by_name(folders).items()}


# ---------------------------------------------------------------------------------------------------------------
# Folders.


def by_name(folders: str | Path | Iterable[str | Path]) -> dict[str, Path]:
    """Returns the folders, or the one, by their names, or by their whole paths where a name is taken."""
    folders = [folders] if isinstance(folders, str | Path) or not isinstance(folders, Iterable) else list(folders)
    check(len(folders) > 0, "runs", folders, "at least one folder")
    named: dict[str, Path] = {}
    for folder in folders:
        plain.check_path("runs", folder)
        path = Path(os.path.abspath(folder))
        name, whole = (texts.printable(text).replace("\n", r"\n") for text in (path.name, path))
        named[name if name not in named else whole] = Path(folder)
    return named


def with_name(path: str | Path) -> Path:
    """Returns a path that ends in a name, also for the current folder."""
    path = Path(path)
    return path if path.name else path.resolve()


def unused(path: str | Path, suffix: str = "") -> Path:
    """Returns the first of `path`, `path-2`, `path-3`, ..., each with the suffix, that does not exist."""
    path = with_name(path)
    check(path.name, "out", str(path), "a new folder")
    names = (f"{path.name}{'' if i == 1 else f'-{i}'}{suffix}" for i in itertools.count(1))
    return next(file for name in names if not (file := path.with_name(name)).exists())


def beside(run: str | Path, name: str, suffix: str = "") -> Path:
    """Returns an unused path of a name beside a run's folder."""
    return unused(with_name(run).parent / name, suffix)


# ---------------------------------------------------------------------------------------------------------------
# The table of results.


def results_rows(summaries: dict[str, dict[str, Any]], *, further: bool = True) -> tuple[list[str], list[list[str]]]:
    """Returns the heads and the rows of a table with one line per run: mean ± sample standard deviation over seeds.

    Bytes are those that all clients have sent and received. A dash stands for what a summary, such as that of an
    unfinished run, does not have. With `further`, there is a column for each metric of the user.
    """
    first = judged_by(summary["mean"] for summary in summaries.values())
    if first == "accuracy" and any("perplexity" in summary["mean"] for summary in summaries.values()):
        first = "perplexity"
    metrics, rows = (first, "worst_client_accuracy", "cluster_accuracy", "adjusted_rand"), []
    names = dict.fromkeys(name for summary in summaries.values() for name in summary["mean"])
    users = [n for n in names if n not in (*COLUMNS, *BYTES) and not n.startswith(OF_NEWCOMERS)] if further else []
    for name, summary in summaries.items():
        cells = [number(*over_seeds(summary, metric), *COLUMNS[metric][1:]) for metric in metrics]
        recovered, seeds = recovered_seeds(summary), len(summary["per_seed"])
        at_round = number(over_seeds(summary, "rounds_to_recovery")[0], None, 0)
        at_round += f" ({recovered}/{seeds})" if 0 < recovered < seeds else ""
        sizes = (size_text(summary.get(name)) for name in BYTES)
        by_user = (number(*over_seeds(summary, metric), 3) for metric in users)
        rows.append([name, *cells, number(summary["mean"]["clusters_in_use"], None, 1), at_round, *sizes, *by_user])
    columns = (*metrics, "clusters_in_use", "rounds_to_recovery")
    return ["run", *(COLUMNS[name][0] for name in columns), "sent", "received", *users], rows


def results_csv(summaries: dict[str, dict[str, Any]]) -> str:
    """Returns the final results of all runs as csv; a cell is empty where the table of results has a dash."""
    names = list(dict.fromkeys(name for summary in summaries.values() for name in summary["mean"]))
    heads = (head for name in names for head in (name, f"{name}_std"))
    lines = [["run", "method", "seeds", "recovered_seeds", *heads]]
    for run, summary in summaries.items():
        recovered = recovered_seeds(summary) if compares_clusters(summary) else None
        cells = (cell for name in names for cell in over_seeds(summary, name))
        lines.append([run, summary["method"], len(summary["per_seed"]), recovered, *cells])
    return texts.csv_bytes(lines, end="\n").decode()


def results_tex(summaries: dict[str, dict[str, Any]]) -> str:
    r"""Returns the table of results for LaTeX, with the rules of the package booktabs.

    Example:
      >>> rows = [{"accuracy": 0.5, "rounds_to_recovery": None}, {"accuracy": 0.75, "rounds_to_recovery": None}]
      >>> mean = {"accuracy": 0.625, "clusters_in_use": 1.0}
      >>> print(results_tex({"a_b": {"per_seed": rows, "mean": mean}}).splitlines()[-3])
      a\_b & 62.5 $\pm$ 17.7 & -- & -- & -- & 1.0 & -- & -- & -- \\
    """
    heads, rows = results_rows(summaries)
    heads = [" ".join(head.replace("-\n", "").split()) for head in heads]
    needs = r"sent and received: bytes of all clients and rounds. Needs \usepackage{booktabs}."
    head, *body = ([tex(cell) for cell in row] for row in [heads, *rows])
    return "\n".join(tex_table([f"{seeds_text(summaries)}; {needs}"], head, body))


def tex_table(comments: Iterable[str], heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns the lines of a table for LaTeX, whose first column has names and the others numbers."""
    head, *body = (" & ".join(cells) + r" \\" for cells in [heads, *rows])
    begin = [*(f"% {comment}" for comment in comments), rf"\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}", r"\toprule"]
    return [*begin, head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}", ""]


def tex(text: str) -> str:
    r"""Returns a text as LaTeX prints it, on one line."""
    line = re.sub(r"[\x00-\x1f\x7f]+", " ", text)
    return "".join(TEX.get(character, character) for character in line)


def number(value: float | None, std: float | None, digits: int, scale: float = 1) -> str:
    """Returns `value`, and the standard deviation where there is one, times `scale`, with so many decimals.

    A value without a scale of its own, such as a loss, has so many digits where its decimals would be 0, or too long.

    Example:
      >>> number(0.25, 0.0625, 3), number(0.25, None, 1, 100), number(1.2e-6, 3e-8, 3)
      ('0.250±0.062', '25.0', '1.2e-06±3e-08')
    """
    if value is None:
        return "–"
    fits = digits < 3 or not value or 10.0**-digits <= abs(value) < 1e7
    form = f"z.{digits}{'f' if fits else 'g'}"
    return f"{scale * value:{form}}" + ("" if std is None else f"±{scale * std:{form}}")


def over_seeds(summary: dict[str, Any], metric: str) -> tuple[float | None, float | None]:
    """Returns the mean and the sample standard deviation of a metric over the seeds of a run.

    Both are None where a seed does not have the metric, or where clusters cannot agree with the true ones; the second
    also for one seed. Those of `rounds_to_recovery` are over the seeds that have found the clusters.
    """
    values = [row.get(metric) for row in summary["per_seed"]]
    numbers = [value for value in values if value is not None]
    lacking = len(numbers) < len(values) and metric != "rounds_to_recovery"
    if not numbers or lacking or (metric in OF_CLUSTERS and not compares_clusters(summary)):
        return None, None
    return float(np.mean(numbers)), deviation(numbers)


def size_text(value: float | None) -> str:
    """Returns a number of bytes in the largest fitting unit; a dash for None.

    Example:
      >>> size_text(1_500_000), size_text(999_960)
      ('1.5 MB', '1.0 MB')
    """
    if value is None:
        return "–"
    units = ("B", "kB", "MB", "GB", "TB")
    steps = next((i for i in range(len(units)) if round(value / 1000**i, min(i, 1)) < 1000), len(units) - 1)
    return f"{value / 1000**steps:.{min(steps, 1)}f} {units[steps]}"


def rate_text(value: float) -> str:
    """Returns a number of rounds or steps a second; those of slow ones have three digits.

    Example:
      >>> rate_text(1234.5), rate_text(0.00321)
      ('1,234', '0.00321')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def recovered_seeds(summary: dict[str, Any]) -> int:
    """Returns the number of seeds of a run that have found the true clusters; 0 where there are none to find."""
    count = sum(row["rounds_to_recovery"] is not None for row in summary["per_seed"])
    return count if compares_clusters(summary) else 0


def judged_by(results: Iterable[dict[str, Any]]) -> str:
    """Returns the metric that results are shown by: loss where no result has an accuracy, as with regressions."""
    return "accuracy" if any(result.get("accuracy") is not None for result in results) else "loss"


def compares_clusters(summary: dict[str, Any]) -> bool:
    """Returns whether the clusters of a run can agree with the true ones: it finds any, and there are several."""
    return summary.get("num_clusters") != 1 and summary.get("finds_clusters", True)


def seeds_text(summaries: dict[str, dict[str, Any]]) -> str:
    """Returns the seeds of runs, for the title of a table."""
    runs = [summary["per_seed"] for summary in summaries.values()]
    single = {f"seed {run[0]['seed']}" for run in runs if len(run) == 1}
    counts = " or ".join(map(str, sorted({len(run) for run in runs if len(run) > 1})))
    return " or ".join([f"mean ± sample std over {counts} seeds"] * bool(counts) + sorted(single))


def results_notes(summaries: dict[str, dict[str, Any]]) -> list[str]:
    """Returns notes that explain cells of the table of results."""
    notes = []
    if any(0 < recovered_seeds(summary) < len(summary["per_seed"]) for summary in summaries.values()):
        share = f"at least {FOUND:.0%} of the clients are and stay in the right cluster"
        notes.append(f"found at round, (n/m): in n of the m seeds, {share}; the round is the mean over these")
    accuracies = {"of newcomers": {name: over_seeds(s, "newcomer_accuracy") for name, s in summaries.items()}}
    for metric, of in (("next_accuracy", ""), ("next_stable_accuracy", ", of clients whose cluster stays")):
        drifts = {name: summary["drift"] for name, summary in summaries.items() if "drift" in summary}
        means = {name: (drift["mean"][metric], drift["std"][metric]) for name, drift in drifts.items()}
        accuracies[f"on the next step's data, before adapting{of}"] = means
    for what, means in accuracies.items():
        if cells := [f"{number(*mean, 1, 100)} % ({name})" for name, mean in means.items() if mean[0] is not None]:
            notes.append(f"client acc. {what}: {', '.join(cells)}")
    ended = {name: str(summary.get("ended")).partition(" has not improved for ") for name, summary in summaries.items()}
    if early := [f"{name} ({metric})" for name, (metric, waits, _) in ended.items() if waits and metric in METRICS]:
        notes.append(f"early stopping chose the rounds by the test examples of these figures: {', '.join(early)}")
    if len(summaries) > MOST_DRAWN:
        notes.append(f"pictures show the first {MOST_DRAWN} of the {len(summaries)} runs, tables all of them")
    return notes


def clusters_notes(summary: dict[str, Any], clusters: np.ndarray, true: np.ndarray) -> list[str]:
    """Returns notes on seeds that have not found the true clusters, and on models that share one.

    Args:
      summary: of the run.
      clusters, true: `[R, N]` and `[N]`, the clusters of the clients; true ones are -1 where they are unknown.

    Example:
      >>> rows = [{"seed": 0, "cluster_accuracy": 1.0}, {"seed": 1, "cluster_accuracy": 0.75}]
      >>> notes = clusters_notes({"per_seed": rows}, np.array([[0, 0, 1, 1], [0, 2, 1, 1]]), np.array([0, 0, 1, 1]))
      >>> print(*notes, sep="\\n")
      the true clusters are found in 1 of 2 seeds, and not in seed 1 (75.0 % of the clients)
      clients of one true cluster use several models in seed 1
      >>> clusters_notes({"per_seed": rows[1:]}, np.array([[0, 0, 1, 0]]), np.array([0, 0, 1, 1]))
      ['the true clusters are not found in seed 1 (75.0 % of the clients)']
    """
    has_truth = true >= 0
    if not compares_clusters(summary) or len(set(true[has_truth].tolist())) < 2:
        return []
    rows, notes = summary["per_seed"], []
    wrong = [row for row in rows if row["cluster_accuracy"] is not None and row["cluster_accuracy"] < FOUND]
    if wrong:
        shares = ", ".join(f"{row['seed']} ({100 * row['cluster_accuracy']:.1f} % of the clients)" for row in wrong)
        found_in = f"found in {len(rows) - len(wrong)} of {len(rows)} seeds, and not" if len(rows) > 1 else "not found"
        notes.append(f"the true clusters are {found_in} in seed{'s' * (len(wrong) > 1)} {shares}")
    shared = []  # seeds in which most clients of two models are from one true cluster
    for row, cluster in zip(rows, clusters, strict=True):
        models = np.unique(cluster[has_truth])
        most = {int(np.bincount(true[has_truth & (cluster == model)]).argmax()) for model in models}
        shared += [str(row["seed"])] if len(most) < len(models) else []
    if shared:
        in_seeds = f"in seed{'s' * (len(shared) > 1)} {', '.join(shared)}"
        notes.append(f"clients of one true cluster use several models {in_seeds}")
    return notes


# ---------------------------------------------------------------------------------------------------------------
# The options in which runs differ.


def is_configured(config: dict[str, Any]) -> bool:
    """Returns whether a `config.json` has all options, as that of `jfcl run`; that of `jfcl.simulate` does not."""
    return isinstance(config.get("method"), str) and "split_hash" in config


def differences_notes(runs: dict[str, Results]) -> list[str]:
    """Returns notes on runs that cannot be compared by their options alone."""
    splits = {run.config["split_hash"] for run in runs.values() if is_configured(run.config)}
    notes = [f"these runs are on {len(splits)} different splits of the data"] if len(splits) > 1 else []
    unknown = [name for name, run in runs.items() if not is_configured(run.config)]
    if unknown and len(runs) > 1:
        notes.append(f"options and data of {', '.join(unknown)} are not known, since config.json does not hold them")
    return notes


def run_differences(runs: dict[str, Results]) -> dict[str, dict[str, str]]:
    """Returns the options in which runs differ, as they were used, and the rounds that were computed."""
    return differences({name: run.config | {"num_rounds": run.summary["num_rounds"]} for name, run in runs.items()})


def differences(configs: dict[str, dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Returns the options in which runs differ, with the value in each run, by its name.

    An option that no run gives makes no difference, where methods have other defaults; nor does the method, where the
    name of every run holds it. `configs` are the contents of `config.json` of the runs.

    Example:
      >>> a, b = {"lr": 0.1, "weights": "size", "given": ["lr"]}, {"lr": 0.2, "weights": "equal", "given": []}
      >>> differences({"a": a, "b": b})
      {'lr': {'a': '0.1', 'b': '0.2'}}
    """
    compared = {"num_rounds", "method"}
    for config in configs.values():  # one of a run in Python does not say which options were given
        names = config.get("given")
        compared |= {*names} if isinstance(names, list) else {*config} - {*NO_OPTIONS}
    if all(str(config.get("method")) in name for name, config in configs.items()):
        compared.remove("method")
    differing = {}
    for option in dict.fromkeys(option for config in configs.values() for option in config if option in compared):
        values = {name: "–" if c.get(option) is None else str(c[option]) for name, c in configs.items()}
        unknown = [name for name, config in configs.items() if option not in config and not is_configured(config)]
        if len({value for name, value in values.items() if name not in unknown}) > 1:
            differing[option.removeprefix("num_")] = values | dict.fromkeys(unknown, "not known")
    return differing


def differences_text(differing: dict[str, dict[str, str]]) -> str:
    """Returns `differences` as a text, each value with the names of its runs."""
    parts = []
    for option, values in differing.items():
        runs = {value: ", ".join(name for name in values if values[name] == value) for value in values.values()}
        parts.append(f"{option}: {', '.join(f'{value} ({names})' for value, names in runs.items())}")
    return "; ".join(parts)
