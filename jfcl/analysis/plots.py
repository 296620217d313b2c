"""Pictures of runs: functions from records (dicts as in `History.records`) and results to a matplotlib `Figure`."""

from __future__ import annotations

import io
import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from cycler import Cycler, cycler

from jfcl.analysis.metrics import contingency, deviation
from jfcl.core import check, check_choice
from jfcl.core.files import write_whole
from jfcl.core.texts import printable

if TYPE_CHECKING:  # matplotlib takes as long to import as JAX: it is imported where a figure is made
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

Records = Sequence[dict[str, Any]]

# Colours that readers with any kind of colour vision can distinguish (Okabe and Ito 2008): blue, orange, green,
# vermilion, purple, sky blue, black, yellow. Lines differ in their dashes too: those of one colour, and in prints.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000", "#F0E442")
MOST_POINTS = 2_000  # of a curve, a few for each pixel
FORMATS = (".png", ".pdf", ".svg")
COLUMN = 3.25  # inches, of a paper with two columns
MOST_LETTERS = 36  # of names side by side below bars
MOST_NAMES = 6  # in a legend among the lines; more would cover these
MOST_PIXELS = 60_000  # on a side of a picture; matplotlib refuses 2^16
LINES = cycler(color=PALETTE * 4) + cycler(linestyle=[("-", "--", "-.", ":")[(i + i // 8) % 4] for i in range(32)])


def new_figure(width: float, height: float, *, layout: str | None = None) -> Figure:
    """Returns an empty figure, in inches.

    Example:
      >>> new_figure(6, 4).get_size_inches().tolist()
      [6.0, 4.0]
    """
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout=layout)


def _axes(style: Cycler, width: float = 6) -> tuple[Figure, Axes]:
    """Returns a figure with one frame, in which the lines have a style."""
    figure = new_figure(width, 3.8, layout="constrained")
    axes = figure.subplots()
    axes.set_prop_cycle(style)
    return figure, axes


def png(figure: Figure) -> bytes:
    """Returns `figure` as the content of a PNG file.

    Example:
      >>> png(new_figure(6, 4))[1:4]
      b'PNG'
    """
    return _content(figure, "png")


def _content(figure: Figure, form: str, *, whole: bool = False) -> bytes:
    """Returns `figure` as the content of a file of one of `FORMATS`; `whole`: in its own size, with its margins."""
    from matplotlib import rc_context

    buffer = io.BytesIO()
    dpi = min(120, MOST_PIXELS / max(figure.get_size_inches()))
    with rc_context({"pdf.fonttype": 42}):  # TrueType, as publishers ask for
        figure.savefig(buffer, format=form, dpi=dpi, bbox_inches=None if whole else "tight")
    return buffer.getvalue()


def save(figure: Figure, path: str | Path, *, column: bool = False) -> Path:
    """Writes `figure` as PNG, PDF or SVG, by the ending of the file's name; makes the folder.

    With `column` it is as wide as a column of a paper with two columns, 3.25 inches, with texts of 6 to 8 points; the
    figure is changed. `ValueError` for another ending.

    Example:
      >>> import tempfile
      >>> save(new_figure(6, 4), Path(tempfile.mkdtemp()) / "plots" / "empty.pdf").name
      'empty.pdf'
    """
    path = Path(path)
    check(path.suffix in FORMATS, "path", path.name, f"a name that ends in one of {', '.join(FORMATS)}")
    if column:
        _fit_column(figure)
    write_whole(path, _content(figure, path.suffix[1:], whole=column))  # and its folder
    return path


def _fit_column(figure: Figure) -> None:
    """Gives a figure the width of a column, thin lines, and texts that can be read there."""
    from matplotlib.legend import Legend
    from matplotlib.lines import Line2D
    from matplotlib.text import Text

    width, height = figure.get_size_inches()
    figure.set_size_inches(COLUMN, COLUMN * max(height / width, 0.6))  # bars of many runs are wide
    figure.set_layout_engine("constrained")
    for axes in figure.axes:
        axes.tick_params(labelsize=7)
    for text in figure.findobj(Text):
        text.set_fontsize(8 if text.get_fontsize() > 8 else 6)
    for text in (text for legend in figure.findobj(Legend) for text in legend.get_texts()):
        text.set_fontsize(6.5)
    for line in figure.findobj(Line2D):
        line.set_linewidth(min(line.get_linewidth(), 1.0))
        line.set_markersize(min(line.get_markersize(), 3.0))


def cluster_colors(count: int) -> Colormap:
    """Returns a colour for each of `count` clusters: those of `PALETTE`, or shades from dark to light for more.

    Example:
      >>> cluster_colors(3).N, cluster_colors(30).N
      (8, 30)
    """
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    return ListedColormap(PALETTE) if count <= len(PALETTE) else colormaps["viridis"].resampled(count)


def label(name: str) -> str:
    """Returns the name of a run as the label of its curve, in lines: matplotlib takes `$` as mathematics, hides `_a`.

    Example:
      >>> label("_a$")
      ' _a\\\\$'
    """
    return "\n".join(textwrap.wrap(" " * name.startswith("_") + printable(name), 60)).replace("$", r"\$")


def _add_legend(axes: Axes) -> None:
    """Names the lines: where the names cover least of these, and below the axes where they are many."""
    names = axes.get_legend_handles_labels()[1]
    if len(names) <= MOST_NAMES:
        axes.legend(loc="best")  # the default, which warns where a busy machine takes a second
        return
    longest, figure = max(map(len, names)), axes.figure
    columns = 3 if longest <= 12 else 2 if longest <= 20 else 1
    figure.set_figheight(figure.get_figheight() + 0.25 * -(-len("\n".join(names).splitlines()) // columns))
    figure.legend(loc="outside lower left", ncols=columns, fontsize=8)


def _whole_numbers() -> MaxNLocator:
    """Returns the ticks of an axis of rounds or clients."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(integer=True, steps=[1, 2, 5, 10], min_n_ticks=1)


def _by_round(records: Records, metric: str, over: str = "round") -> tuple[np.ndarray, np.ndarray]:
    """Returns `(rounds [E], values [E, R])`; NaN for a seed without a finite value at a round."""
    rounds = _spaced(sorted({r[over] for r in records}))
    seeds = sorted({r["seed"] for r in records})
    row, column = ({name: i for i, name in enumerate(names)} for names in (rounds, seeds))
    values = np.full((len(rounds), len(seeds)), np.nan)
    for r in records:
        value = r.get(metric)
        if r[over] in row and value is not None and math.isfinite(value):
            values[row[r[over]], column[r["seed"]]] = value
    return np.array(rounds), values


def _spaced(values: Sequence[Any]) -> list[Any]:
    """Returns all of `values`, or `MOST_POINTS` evenly spaced ones, the first and the last among them."""
    check(len(values) > 0, "records", [], "at least one")
    count = min(len(values), MOST_POINTS)
    return [values[i] for i in np.rint(np.linspace(0, len(values) - 1, count)).astype(int)]


def curves(
    runs: Mapping[str, Records], metric: str = "accuracy", *, label: str | None = None, over: str = "round"
) -> Figure:
    """Plots one metric over rounds, a line per run: mean over seeds, and a band from the lowest to the highest seed.

    `over` names another entry of the records for the horizontal axis. Of more than 2,000 rounds, 2,000 evenly spaced
    ones are drawn. For drifting data, a dotted line marks the rounds after which clients change their clusters.

    Example:
      >>> records = [{"seed": 0, "round": 1, "accuracy": 0.5}, {"seed": 0, "round": 2, "accuracy": 0.9}]
      >>> figure = curves({"ifca": records})
      >>> figure.axes[0].get_ylabel()
      'mean client accuracy'
    """
    fits = isinstance(runs, Mapping) and all(isinstance(row, dict) for records in runs.values() for row in records)
    check(fits, "runs", type(runs).__name__, "a dict of records by name, such as {'IFCA': history.records}")
    check_choice("metric", metric, {name: 0 for rows in runs.values() for row in rows[-1:] for name in row} or [metric])
    figure, axes = _axes(LINES)
    for name, records in runs.items():
        rounds, values = _by_round(records, metric, over)
        (line,) = axes.plot(rounds, values.mean(axis=1), label=name, marker="." if len(rounds) < 30 else None)
        axes.fill_between(rounds, values.min(axis=1), values.max(axis=1), color=line.get_color(), alpha=0.15, lw=0)
    for at in sorted({at for records in runs.values() for at in _changes(records)}):
        axes.axvline(at, color="0.6", ls=":", lw=1, zorder=0)
    axes.xaxis.set_major_locator(_whole_numbers())
    names = {"accuracy": "mean client accuracy", "adjusted_rand": "adjusted Rand index"}
    axes.set(xlabel=over, ylabel=label or names.get(metric, metric.replace("_", " ")))
    axes.grid(alpha=0.3)
    _add_legend(axes)
    return figure


def _changes(records: Records) -> list[int]:
    """Returns the rounds after which clients of drifting data change their clusters."""
    first = [r for r in records if r["seed"] == records[0]["seed"] and "step" in r]
    return [a["round"] for a, b in itertools.pairwise(first) if b["step"] != a["step"] and b["changed"]]


def bars(runs: Mapping[str, Records], metrics: Sequence[str] = ("accuracy", "worst_client_accuracy")) -> Figure:
    """Plots methods side by side: the last round's metrics, mean over seeds with the sample standard deviation.

    Example:
      >>> records = [{"seed": 0, "round": 1, "accuracy": 0.9, "worst_client_accuracy": 0.5}]
      >>> len(bars({"ifca": records}).axes[0].patches)
      2
    """
    figure, axes = _axes(cycler(color=PALETTE), max(1.6 + 1.1 * len(runs), 4.4))  # the legend has its width
    width, is_narrow = 0.8 / len(metrics), len(runs) > MOST_NAMES
    are_shares = all("accuracy" in metric for metric in metrics)  # others may be of any size and sign
    form, space = ".3f" if are_shares else ".3g", 0.3 if is_narrow else 0.1  # the space is that of the numbers
    for j, metric in enumerate(metrics):
        last = [_by_round(records, metric)[1][-1] for records in runs.values()]
        means, spread = [v.mean() for v in last], [deviation(v) or np.nan for v in last]
        at = np.arange(len(runs)) + (j - (len(metrics) - 1) / 2) * width
        shown = axes.bar(at, means, width * 0.92, yerr=spread, label=metric.replace("_", " "), capsize=3)
        axes.bar_label(shown, [f"{v:{form}}" for v in means], padding=2, fontsize=8, rotation=90 * is_narrow)
    turned = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if sum(map(len, runs)) > MOST_LETTERS else {}
    names = ["\n".join(textwrap.wrap(name, 24)) for name in runs]  # a path in one line can leave no room for the bars
    axes.set_xticks(np.arange(len(runs)), names, **turned)
    axes.set_ylim(0, 1 + space) if are_shares else axes.margins(y=space)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(metrics), frameon=False)  # above the bars
    axes.grid(axis="y", alpha=0.3)
    return figure


def match_clusters(found: np.ndarray, true: np.ndarray, others: Sequence[int] = ()) -> dict[int, int]:
    """Names found clusters after the true ones with which they share most clients; the others get unused numbers.

    Example:
      >>> match_clusters(np.array([7, 7, 3]), np.array([0, 0, 1]), others=[5])
      {3: 1, 7: 0, 5: 2}
    """
    from scipy.optimize import linear_sum_assignment  # takes long to import

    names, truth = np.unique(found).tolist(), np.unique(true).tolist()
    pairs = zip(*linear_sum_assignment(contingency(found, true), maximize=True), strict=True)
    matched = {names[row]: truth[column] for row, column in pairs}
    free = [name for name in dict.fromkeys([*names, *others]) if name not in matched]
    return matched | {name: truth[-1] + 1 + i for i, name in enumerate(free)}


def assignments(records: Records, true_cluster: np.ndarray | None = None, *, seed: int | None = None) -> Figure:
    """Plots clients by rounds: the colour is the cluster; clients are sorted by their true cluster (left strip).

    Args:
      records: with `cluster`, as kept for up to 1,000 clients.
      true_cluster: `[N]`, -1 where it is unknown; without it, or if all are the same, clients are sorted by their last
        cluster.
      seed: default: the first.

    Example:
      >>> records = [{"seed": 0, "round": t, "cluster": [1, 0]} for t in (1, 2)]
      >>> assignments(records, np.array([0, 1])).axes[1].get_xlabel()
      'round'
    """
    seed = records[0]["seed"] if seed is None and records else seed
    chosen = _spaced([r for r in records if r["seed"] == seed])
    clusters = np.array([r["cluster"] for r in chosen]).T  # [N, E]
    has_truth = true_cluster is not None and len(np.unique(true_cluster)) > 1
    sorted_by = np.asarray(true_cluster) if has_truth else clusters[:, -1]
    sorted_by = np.where(sorted_by < 0, sorted_by.max() + 1, sorted_by)  # unknown ones: last, in a colour of their own
    names = match_clusters(clusters[:, -1], sorted_by, np.unique(clusters).tolist())
    order = np.argsort(sorted_by, kind="stable")
    renamed = np.vectorize(names.get)(clusters)[order]
    figure = new_figure(6.4, 3.8)
    strip, axes = figure.subplots(1, 2, width_ratios=[1, 24])
    colors = cluster_colors(max([*names.values(), int(sorted_by.max())]) + 1)
    style = {"cmap": colors, "vmin": -0.5, "vmax": colors.N - 0.5, "aspect": "auto", "interpolation": "nearest"}
    strip.imshow(sorted_by[order][:, None], **style)
    kind = "true" if has_truth else "last"
    strip.yaxis.set_major_locator(_whole_numbers())
    strip.set(xticks=[], ylabel=f"clients, sorted by {kind} cluster", title=kind)
    axes.imshow(renamed, **style)
    rounds = [r["round"] for r in chosen]
    ticks = np.arange(0, len(rounds), -(-len(rounds) // 8))  # at most 8, evenly spaced
    axes.set_xticks(ticks, [rounds[t] for t in ticks])
    axes.set(yticks=[], xlabel="round", title="cluster of each client")
    return figure


def similarity(matrix: np.ndarray, cluster: np.ndarray) -> Figure:
    """Plots a matrix of cosine similarities `[N, N]`, its rows sorted by `cluster` `[N]`, with a line between clusters.

    Example:
      >>> matrix = np.array([[1.0, -0.5, 0.9], [-0.5, 1.0, -0.4], [0.9, -0.4, 1.0]])
      >>> similarity(matrix, np.array([0, 1, 0])).axes[0].images[0].get_array()[0].tolist()
      [1.0, 0.9, -0.5]
    """
    matrix, cluster = np.asarray(matrix), np.asarray(cluster)
    order = np.argsort(cluster, kind="stable")
    figure = new_figure(5.2, 4.2, layout="constrained")
    axes = figure.subplots()
    shown = axes.imshow(matrix[order][:, order], cmap="RdBu", vmin=-1, vmax=1, interpolation="nearest")
    starts = np.flatnonzero(np.diff(cluster[order])) + 0.5
    if len(starts) < len(cluster) - 1:  # clusters of single rows need no lines
        for draw, at in itertools.product((axes.axhline, axes.axvline), starts):
            draw(at, color="black", lw=0.8)
    axes.set(xticks=[], yticks=[], xlabel=f"{len(cluster)} rows, sorted by cluster")
    figure.colorbar(shown, ax=axes, label="cosine similarity")
    return figure


def client_accuracies(runs: Mapping[str, np.ndarray]) -> Figure:
    """Plots the sorted final accuracies of clients, a line per run of `[N]` or `[R, N]` (seeds are pooled).

    Example:
      >>> figure = client_accuracies({"ifca": np.array([0.9, 0.7, 0.8])})
      >>> figure.axes[0].lines[0].get_ydata().tolist()
      [0.7, 0.8, 0.9]
    """
    figure, axes = _axes(LINES)
    for name, values in runs.items():
        values = np.sort(np.asarray(values, np.float64)[np.isfinite(values)])
        axes.plot(np.linspace(0, 100, len(values)), values, label=name, marker="." if len(values) < 30 else None)
    axes.set(xlabel="clients, worst to best (%)", ylabel="accuracy on the client's test examples")
    axes.grid(alpha=0.3)
    _add_legend(axes)
    return figure


def tree(nodes: Sequence[Any], true_cluster: np.ndarray | None = None) -> Figure:
    """Plots a parameter tree (CFL's figure 4), rounds downwards: each cluster is a bar of its clients' true clusters.

    `nodes` come from `jfcl.parameter_tree.nodes`. Without `true_cluster` `[N]`, bars show the number of clients only.

    Example:
      >>> from jfcl.parameter_tree import Node
      >>> root = Node(-1, (1, 2), 0, 0, np.arange(3), -0.5, 1)
      >>> leaves = [Node(0, (), 0, 5, np.array([0, 2]), np.nan, -1), Node(0, (), 1, 5, np.array([1]), np.nan, -1)]
      >>> len(tree([root, *leaves]).axes)
      1
    """

    def leaves(i):
        return [i] if not nodes[i].children else [leaf for c in nodes[i].children for leaf in leaves(c)]

    place = {leaf: x for x, leaf in enumerate(leaves(0))}
    x = lambda i: float(np.mean([place[leaf] for leaf in leaves(i)]))  # noqa: E731
    last = max(node.round for node in nodes) or 1
    largest = max(len(node.clients) for node in nodes) or 1
    colors = cluster_colors(1 if true_cluster is None else int(np.max(true_cluster)) + 1)
    figure = new_figure(max(4.0, 1.6 * len(place)), 4.0)
    axes, thick = figure.subplots(), 0.06 * last
    for i, node in enumerate(nodes):
        middle, width = x(i), 0.8 * len(node.clients) / largest
        if node.parent >= 0:
            axes.plot([x(node.parent), middle], [nodes[node.parent].round, node.round], color="0.6", zorder=1)
        kinds = np.zeros(len(node.clients), int) if true_cluster is None else np.asarray(true_cluster)[node.clients]
        left = middle - width / 2
        for kind in np.unique(kinds):
            share = width * np.mean(kinds == kind)
            axes.barh(node.round, share, thick, left, color=colors(int(kind) % colors.N), edgecolor="white", zorder=2)
            left += share
        text = f"{len(node.clients)}" + (f", α = {node.cross_similarity:.2f}" if node.children else "")
        below = {"xytext": (0, -3), "textcoords": "offset points", "ha": "center", "va": "top"}
        below["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # over the lines
        axes.annotate(text, (middle, node.round + thick / 2), **below)
    axes.set(ylim=(1.21 * last, -0.09 * last), xlim=(-0.7, len(place) - 0.3), xticks=[], ylabel="round of the split")
    axes.yaxis.set_major_locator(_whole_numbers())
    axes.set_title("clients in each cluster; α: largest similarity across its split", fontsize=9)
    return figure


def throughput(rows: Sequence[dict[str, Any]]) -> Figure:
    """Plots client-steps per second by number of clients, a panel per model; colours are methods, dashes mappings.

    `rows` are those of `jfcl.experiments.bench.sweep`.

    Example:
      >>> row = {"method": "ifca", "model": "mlp", "mapping": "vmap", "clients": 10, "client_steps/s": 50.0}
      >>> throughput([row]).axes[0].get_title()
      'mlp'
    """
    rows = [row for row in rows if "client_steps/s" in row]
    names = ("model", "method", "mapping")
    models, methods, mappings = (list(dict.fromkeys(row[name] for row in rows)) for name in names)
    figure = new_figure(2 + 4 * max(1, len(models)), 3.8, layout="constrained")
    panels = figure.subplots(1, max(1, len(models)), squeeze=False, sharex=True)[0]
    for axes, model in zip(panels, models, strict=False):
        for (i, method), (j, mapping) in itertools.product(enumerate(methods), enumerate(mappings)):
            line = [r for r in rows if [r[name] for name in names] == [model, method, mapping]]
            style = {"color": PALETTE[i % len(PALETTE)], "ls": ("-", "--", ":", "-.")[j % 4], "marker": "."}
            clients, steps = ([r[name] for r in line] for name in ("clients", "client_steps/s"))
            axes.plot(clients, steps, label=f"{method}, {mapping}", **style)
        axes.set(xscale="log", yscale="log", xlabel="clients", title=model)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("client-steps a second")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    return figure


def heatmap(
    values: np.ndarray, axes: Mapping[str, Sequence[Any]], *, label: str, more_is_better: bool = True
) -> Figure:
    """Plots a matrix of results by two options, with the number in each cell and a frame around the best.

    Args:
      values: `[A, B]`; a value that is not finite is that of a diverged cell.
      axes: the two options by name, with `A` and `B` values.
      label: of the colours.
      more_is_better: whether the best, which is the brightest, is the largest or the smallest.

    Example:
      >>> figure = heatmap(np.array([[0.5, 0.9]]), {"lr": [0.1], "num_models": [2, 4]}, label="accuracy")
      >>> [text.get_text() for text in figure.axes[0].texts]
      ['0.5', '0.9']
    """
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    values = np.where(np.isfinite(values), values, np.nan).astype(np.float64)
    rows, columns = axes
    figure = new_figure(2.6 + 0.75 * values.shape[1], 1.6 + 0.45 * values.shape[0])
    panel = figure.subplots()
    colours = colormaps["cividis" if more_is_better else "cividis_r"].with_extremes(bad="0.9")
    image = panel.imshow(np.ma.masked_invalid(values), cmap=colours, aspect="auto")
    for (i, j), value in np.ndenumerate(values):
        text, size = (f"{value:.3g}", 8) if np.isfinite(value) else ("diverged", 7)
        is_light = np.mean(colours(image.norm(value))[:3]) > 0.5
        panel.text(j, i, text, fontsize=size, color="black" if is_light else "white", ha="center", va="center")
    if np.isfinite(values).any():
        i, j = np.unravel_index((np.nanargmax if more_is_better else np.nanargmin)(values), values.shape)
        panel.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, fill=False, edgecolor="#d7301f", lw=2.5))
    for set_ticks, names in zip((panel.set_yticks, panel.set_xticks), axes.values(), strict=True):
        set_ticks(range(len(names)), [f"{v:g}" if isinstance(v, float) else str(v) for v in names])
    panel.set(xlabel=columns, ylabel=rows)
    figure.colorbar(image, ax=panel, label=label)
    return figure
