"""The experiments of Clustered Federated Learning (Sattler, Müller, Samek 2021): figures 3, 5, 6, 7, 8 and 9.

The paper leaves open: learning rates, the widths of its networks, ε₁ and ε₂, and which labels are swapped, of which it
has two examples. What stands here is ours: plain SGD at the rate of each setting; labels as in `jfcl.data` (the paper's
1 and 7, 3 and 5, and two pairs more); splits at the paper's rounds, by `min_rounds`, wherever `γ_max` allows them.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.papers import report
from benchmarks.papers.recipes import Bench, Outcome, Row, recipe
from jfcl import parameter_tree, plots
from jfcl.analysis.metrics import rounds_to_recovery
from jfcl.core import take_clients
from jfcl.experiments.config import Config
from jfcl.experiments.setups import setup
from jfcl.kernels import optimal_bipartition, pairwise_cosine, separation_gap, theory

SIMILARITIES = ("updates", "gradients")
NEVER = 1e-30  # as ε₁: no mean update is shorter, so nothing is split
UNSPLIT = {"eps_1": NEVER, "eps_2": 1.0, "max_clusters": 2, "tree_dim": 0}
CLIENTS = {"clients": 20, "clusters": 4, "track_gap": True}
# Time alone decides when a cluster may be split: the paper's rounds.
BY_SCHEDULE = {"eps_1": float("inf"), "eps_2": NEVER, "eval_every": 1}

# With every label in its share, every client has examples of the labels that its cluster exchanges, which of 20 random
# ones one in eighty has not. Updates separate better than gradients while training is far from its end, which smaller
# batches or longer steps bring on within the 50 rounds.
_GAPS = {"models": {"mnist": "cnn_mnist", "cifar10": "cnn5"}, "rounds": 50, "batch_size": 100, "lr": 0.05}
_GAPS |= {"partition": "stratified"}
_COUNTS = {"mnist": [10, 20, 50, 100, 150, 200], "cifar10": [100, 300, 500, 1000, 1500, 2400]}
_TRAINING = {"local_epochs": 3, "batch_size": 100, "lr": 0.1}
_LABEL_SWAP = _TRAINING | {"eps_1": 0.25, "eps_2": 0.42, "min_rounds": 10}
_LABEL_SWAP |= {"model": "cnn_mnist", "examples_per_client": 3000, "rounds": 100}
_FEWER = {"model": "mlp", "examples_per_client": 500, "rounds": 60}
_SCHEDULE = _TRAINING | {"max_clusters": 4, "seeds": 1}


@recipe("cfl.figure3", full={"most_clusters": 15, "noises": 40, "trials": 1000}, small={"noises": 20, "trials": 100})
def figure_3(bench: Bench, setting: dict[str, Any]) -> Outcome:
    """CFL, figure 3: probability of a correct split by clusters and noise.

    The figure shows where the theorem guarantees the split, and how often it is right beyond.
    """
    k = list(range(2, setting["most_clusters"] + 1))
    noise = np.linspace(0.05, 2.0, setting["noises"])
    found = split_probability(jax.random.key(0), k, noise, num_trials=setting["trials"])
    inside = np.asarray(found.guaranteed)
    rows = []
    for gamma in (0.5, 1.0, 1.2, 1.5, 2.0):
        g = int(np.abs(noise - gamma).argmin())
        for a in (k.index(clusters) for clusters in (2, 5, 10, 15) if clusters in k):
            row = {"clusters": k[a], "noise": float(noise[g]), "guaranteed": bool(inside[a, g])}
            row |= {"correct splits": float(found.correct[a, g]), "gap above 0": float(found.gap[a, g])}
            rows.append(row | {"paper": "≈ 1" if gamma <= 1.2 else ""})
    worst = float(np.asarray(found.correct)[inside].min())
    figure = _plot_splits(found, k, noise)
    return Outcome(rows, figure, f"inside the guaranteed region, the lowest share of correct splits is {worst:.3f}")


class SplitProbability(NamedTuple):
    """Shares of trials, `[A, G]` for `A` numbers of clusters and `G` noise levels.

    `correct`: the optimal bipartition separated no two clients of one cluster. `gap`: the separation gap was positive,
    which implies it. `guaranteed` bool: the noise is below `max_noise`, so that both must be 1.
    """

    correct: jax.Array
    gap: jax.Array
    guaranteed: jax.Array


def split_probability(
    key: jax.Array,
    num_clusters: Sequence[int],
    noise: Sequence[float],
    *,
    dim: int = 100,
    clients_per_cluster: int = 3,
    num_trials: int = 100,
) -> SplitProbability:
    """Estimates how often the optimal bipartition is correct for random gradients.

    In every trial the `k` clusters have Gaussian gradients that sum to zero, as at a stationary solution, and each
    client's differs from its cluster's by Gaussian noise of exactly `γ` times its cluster's length. (The paper gives
    the dimension, the number of clients and "normally distributed"; the rest is an interpretation.)

    Args:
      key: for the trials.
      num_clusters: `[A]` integers, each at least 2.
      noise: `[G]` values of `γ`, at least 0; above 1 is allowed here.
      dim: of the gradients.
      clients_per_cluster: 3 in the paper (`m = 3k`).
      num_trials: for every pair.

    Returns:
      `SplitProbability` of `[A, G]` arrays. Cost: `A G num_trials` bipartitions, in one compiled program.
    """
    counts, noise = jnp.asarray(num_clusters, jnp.int32), jnp.asarray(noise, jnp.float32)
    found = _split_probability(key, counts, noise, max(num_clusters), dim, clients_per_cluster, num_trials)
    return SplitProbability(*found, noise[None, :] < theory.max_noise(counts)[:, None])


@partial(jax.jit, static_argnames=("largest", "dim", "clients_per_cluster", "num_trials"))
def _split_probability(key, num_clusters, noise, largest, dim, clients_per_cluster, num_trials):
    clusters = jnp.arange(largest * clients_per_cluster, dtype=jnp.int32) // clients_per_cluster

    def trial(key, k, gamma):
        of_clusters, of_clients = jax.random.split(key)
        present = (jnp.arange(largest) < k)[:, None]
        truth = jnp.where(present, jax.random.normal(of_clusters, (largest, dim)), 0.0)
        truth = jnp.where(present, truth - truth.sum(axis=0, keepdims=True) / k.astype(jnp.float32), 0.0)
        error = jax.random.normal(of_clients, (len(clusters), dim))
        wanted = gamma * jnp.linalg.norm(truth[clusters], axis=1, keepdims=True)
        gradients = truth[clusters] + wanted * error / jnp.linalg.norm(error, axis=1, keepdims=True)
        active = clusters < k
        similarity = pairwise_cosine(gradients, mask=active)
        side = optimal_bipartition(similarity, active).side
        together = side.reshape(largest, clients_per_cluster)
        correct = (together.all(axis=1) | ~together.any(axis=1)).all()
        return correct, separation_gap(similarity, clusters, active) > 0

    def cell(k, gamma, key):
        correct, gap = jax.vmap(lambda key: trial(key, k, gamma))(jax.random.split(key, num_trials))
        return correct.mean(), gap.mean()

    shape = (len(num_clusters), len(noise))
    k, gamma = jnp.repeat(num_clusters, len(noise)), jnp.tile(noise, len(num_clusters))
    # One cell after the other bounds the memory.
    correct, gap = jax.lax.map(lambda at: cell(*at), (k, gamma, jax.random.split(key, len(k))))
    return correct.reshape(shape), gap.reshape(shape)


def _plot_splits(found: SplitProbability, num_clusters: Sequence[int], noise: np.ndarray) -> plots.Figure:
    """Plots where the theorem guarantees a correct split, and how often it is correct beyond."""
    figure = plots.new_figure(9, 3.8, layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    k = np.linspace(min(num_clusters), max(num_clusters), 200)
    for axes, values, title in zip(panels, (found.correct, found.gap), ("correct split", "gap > 0"), strict=True):
        style = {"vmin": 0, "vmax": 1, "cmap": "Blues", "shading": "nearest"}
        shown = axes.pcolormesh(num_clusters, noise, np.asarray(values).T, **style)
        axes.plot(k, theory.max_noise(k), color=plots.PALETTE[1], lw=2, label="guaranteed below")
        axes.set(xlabel="clusters $k$", title=f"P[{title}]")
    panels[0].set_ylabel(r"noise $\gamma_{max}$")
    panels[0].legend(loc="upper right")
    figure.colorbar(shown, ax=panels)
    return figure


def _gap_config(setting: dict[str, Any], dataset: str, similarity: str, examples: int, eval_every: int) -> Config:
    models = _GAPS["models"] | setting["models"]
    given = CLIENTS | UNSPLIT | {"model": models[dataset], "local_epochs": 3, "eval_every": eval_every}
    given |= {"dataset": dataset, "examples_per_client": examples, "similarity": similarity}
    return report.configure("cfl", setting | given | {"heterogeneity": "label_swap"})


def _gap_records(
    bench: Bench, setting: dict[str, Any], counts: dict[str, list[int]], eval_every: int
) -> dict[tuple[str, str, int], report.Records]:
    """Runs CFL without splits, by data set, by what is compared, and by the examples per client."""
    cells = [(dataset, of, n) for dataset in counts for of in SIMILARITIES for n in counts[dataset]]
    names = {"-".join(map(str, cell)): cell for cell in cells}
    runs = bench.run_all({name: _gap_config(setting, *cell, eval_every) for name, cell in names.items()})
    return {cell: runs[name][1] for name, cell in names.items()}


def _gap_figure(
    curves: dict[tuple[str, str], tuple[Sequence[int], np.ndarray]], xlabel: str, **style: Any
) -> plots.Figure:
    """A panel per data set: `curves` are the gaps of updates and of gradients, by x and seed."""
    datasets = list(dict.fromkeys(dataset for dataset, _ in curves))
    figure, [line] = report.panels(5 * len(datasets), 3.8, 1, len(datasets))
    for axes, dataset in zip(line, datasets, strict=True):
        for similarity in SIMILARITIES:
            report.plot_band(axes, *curves[dataset, similarity], label=similarity, **style)
        axes.axhline(0, color="0.5", lw=1)
        report.label_axes(axes, xlabel=xlabel, ylabel=r"separation gap $g(\alpha)$", title=dataset)
    return figure


@recipe(
    "cfl.figure5",
    full=_GAPS | {"examples": _COUNTS, "seeds": 5},
    small={"examples": {"mnist": [10, 20, 50, 100]}, "seeds": 3},
)
def figure_5(bench: Bench, setting: dict[str, Any]) -> Outcome:
    """CFL, figure 5: separation gap by examples per client, label swap."""
    paper = {"mnist": "above 0 from 20", "cifar10": "above 0 from about 500"}
    rows, curves = [], defaultdict(list)
    found = _gap_records(bench, setting, setting["examples"], setting["rounds"])
    for (dataset, similarity, examples), records in found.items():
        gaps = report.seed_columns(records, "separation_gap")[-1]
        curves[dataset, similarity].append(gaps)
        row = {"data": dataset, "examples": examples, "similarity of": similarity}
        row |= {"gap": float(gaps.mean()), "lowest seed": float(gaps.min())}
        rows.append(row | {"paper": paper[dataset] if similarity == "updates" else "below updates"})
    curves = {of: (setting["examples"][of[0]], np.array(gaps)) for of, gaps in curves.items()}
    return Outcome(rows, _gap_figure(curves, "examples per client", marker="."))


@recipe(
    "cfl.figure6",
    full=_GAPS | {"examples": {"mnist": 100, "cifar10": 1500}, "seeds": 5},
    small={"examples": {"mnist": 100}, "seeds": 2},
)
def figure_6(bench: Bench, setting: dict[str, Any]) -> Outcome:
    """CFL, figure 6: separation gap by round, label swap."""
    rows, curves = [], {}
    counts = {dataset: [examples] for dataset, examples in setting["examples"].items()}
    for (dataset, similarity, _), records in _gap_records(bench, setting, counts, 1).items():
        rounds, gaps = [r["round"] for r in report.first_seed(records)], report.seed_columns(records, "separation_gap")
        curves[dataset, similarity] = rounds, gaps
        row = {"data": dataset, "similarity of": similarity, "gap at the end": float(gaps[-1].mean())}
        row |= {"above 0 from round on": rounds_to_recovery(rounds, (gaps > 0).all(axis=1))}
        rows.append(row | {"paper": "about 10" if similarity == "updates" else ""})
    return Outcome(rows, _gap_figure(curves, "round"))


@recipe(
    "cfl.figure7",
    full=_TRAINING
    | {"model": "cnn_mnist", "examples_per_client": 25000, "rounds": 1000, "lr": 0.05, "seeds": 1}
    | {"split": {"rounds": 1000, "seeds": 3}},
    small={"model": "mlp", "examples_per_client": 1000, "lr": 0.1, "split": {"rounds": 300, "seeds": 3}},
)
def figure_7(bench: Bench, setting: dict[str, Any]) -> Outcome:
    """CFL, figure 7: update norms of incongruent and congruent clients.

    The norms are those of the mean and of the longest update, of two clients that disagree and of two that do not. The
    same runs at the default thresholds show whether such clients are split.
    """
    rows, (figure, [line]) = [], report.panels(10, 3.8, 1, 2)
    two = {"dataset": "mnist", "clients": 2, "clusters": 2, "eval_every": max(1, setting["rounds"] // 200)}
    configs = {}
    for kind, heterogeneity in (("incongruent", "label_swap"), ("congruent", "class")):
        config = report.configure("cfl", setting | two | UNSPLIT | {"heterogeneity": heterogeneity})
        free = dataclasses.replace(config, eps_1=None, eps_2=None, eval_every=10, **setting["split"])
        configs |= {kind: config, f"{kind}-split": free}
    runs = bench.run_all(configs)
    for axes, kind in zip(line, ("incongruent", "congruent"), strict=True):
        _, records = runs[kind]
        for name, label in (("mean_norm", "mean update"), ("max_norm", "longest update")):
            norms = report.seed_columns(records, name)
            axes.plot([r["round"] for r in report.first_seed(records)], norms.mean(axis=1), label=label)
            few = max(1, len(norms) // 20)
            row = {"clients": kind, "norm of": label, "first rounds": float(norms[:few].mean())}
            row |= {"last rounds": float(norms[-few:].mean())}
            stays = (kind, name) == ("incongruent", "max_norm")
            rows.append(row | {"paper": "stays up, even grows" if stays else "goes to 0"})
        free, (_, records) = configs[f"{kind}-split"], runs[f"{kind}-split"]
        when = [r["round"] for r in records if max(r["split_from"]) >= 0]
        until = f", by round {max(when)}" if when else f" in {free.rounds} rounds"
        row = {"clients": kind, "split": f"{len(when)} of {free.seeds} seeds{until}"}
        rows.append(row | {"paper": "split" if kind == "incongruent" else "never"})
        report.label_axes(axes, xlabel="round", ylabel="norm", title=kind, yscale="log")
    return Outcome(rows, figure)


def _stages(records: report.Records, paper: dict[str, str], metric: str) -> list[Row]:
    """A row per split of one seed's run, and one for its end."""
    rows = []
    for before, record in zip([{}, *records], records, strict=False):
        for slot, origin in enumerate(record["split_from"]):
            if origin >= 0:
                row = {"seed": record["seed"], "event": f"{origin} splits, {slot} is new", "round": record["round"]}
                row |= {metric: before.get(metric), "gap": float(report.column([record], "separation_gap", origin)[0])}
                rows.append(row | {"identity": record["cluster_accuracy"], "paper": paper["split"]})
    end = records[-1]
    row = {"seed": end["seed"], "event": f"end, {end['num_clusters']} clusters", "round": end["round"]}
    row |= {metric: end[metric], "gap": float(np.nanmax(report.column([end], "separation_gap")))}
    return [*rows, row | {"identity": end["cluster_accuracy"], "paper": paper["end"]}]


def staged(bench: Bench, name: str, config: Config, paper: dict[str, str], metric: str) -> Outcome:
    """A run of `cfl`: a row per split, one for the end, and its curves with those of the separation gaps."""
    _, records = bench.run(name, config)
    rows, (figure, [[top], [bottom]]) = [], report.panels(6.4, 6.4, 2, sharex=True)
    for seed, mine in report.by_seed(records).items():
        rows += _stages(mine, paper, metric)
        report.plot_metric(top, mine, metric, label=f"seed {seed}")
    first = report.first_seed(records)
    for slot in range(len(first[0]["separation_gap"])):
        if alive := [r for r in first if slot < r["num_clusters"]]:
            report.plot_metric(bottom, alive, "separation_gap", slot=slot, label=f"cluster {slot}")
    bottom.axhline(0, color="0.5", lw=1)
    seed = first[0]["seed"]
    for axes in (top, bottom):
        for row in rows:
            if row["event"].endswith("new") and row["seed"] == seed:
                axes.axvline(row["round"], color="0.7", lw=1, ls=":")
    report.label_axes(top, 8, ylabel=f"mean client {metric}")
    report.label_axes(bottom, 8, xlabel="round", ylabel=f"separation gap, seed {seed}")
    return Outcome(rows, figure)


def _label_swap_config(setting: dict[str, Any], **changes: Any) -> Config:
    fixed = CLIENTS | {"dataset": "mnist", "heterogeneity": "label_swap", "max_clusters": 8, "relative": True}
    return report.configure("cfl", setting | fixed | {"eval_every": 1} | changes)


@recipe("cfl.label_swap", full=_LABEL_SWAP | {"seeds": 5}, small=_FEWER)
def label_swap(bench: Bench, setting: dict[str, Any]) -> Outcome:
    """CFL, Algorithm 5 on MNIST with label swap: the four clusters and no fifth.

    Clusters are split by the norms of updates alone. The paper has no figures for it.
    """
    return staged(bench, "run", _label_swap_config(setting), {"split": "gap > 0", "end": "4 clusters"}, "accuracy")


@recipe(
    "cfl.newcomers", full=_LABEL_SWAP | {"newcomers": 100, "newcomer_examples": [10, 20, 50, 100, 200]}, small=_FEWER
)
def newcomers(bench: Bench, setting: dict[str, Any]) -> Outcome:
    """CFL, Algorithm 4 on MNIST with label swap: newcomers led to their leaf.

    The tree is that of a `label_swap` run; a row for each number of examples that newcomers hold.
    """
    counts = setting["newcomer_examples"]
    at_end = {"eval_every": setting["rounds"]}  # all newcomers are evaluated under all models
    config = _label_swap_config(setting, seeds=1, newcomer_examples=max(counts), **at_end)
    bench.run("run", config)
    parts = setup(config, data_dir=bench.data_dir)
    state = parameter_tree.load_tree(bench.out / "run", parts.task)
    true = parts.federation.cluster
    leaves = set(state.cluster.tolist())
    of_leaf = {int(k): int(np.bincount(true[np.asarray(state.cluster) == k]).argmax()) for k in leaves}
    rows, rng = [], np.random.default_rng(0)
    chosen = np.sort(rng.permutation(len(parts.federation.newcomer_cluster))[: setting["newcomers"]])
    late = take_clients(parts.federation.newcomers, chosen)
    truth = parts.federation.newcomer_cluster[chosen]
    for count in counts:
        few = late._replace(size=np.minimum(late.size, count).astype(np.int32))
        found = parameter_tree.assign_newcomer(parts.task, parts.training, state, few, key=jax.random.key(1))
        right = np.array([of_leaf[int(k)] for k in found.cluster]) == truth
        row = {"examples": count, "newcomers": len(truth), "at the right leaf %": float(100 * right.mean())}
        rows.append(row | {"similarity at the last split": float(found.similarity.mean()), "paper": "not measured"})
    return Outcome(rows, plots.tree(parameter_tree.nodes(state), true))


@recipe(
    "cfl.figure8",
    full=_SCHEDULE
    | {"examples_per_client": 2500, "partition": "iid", "rounds": 200, "min_rounds": 50, "gamma_max": 0.6},
    small={"examples_per_client": 300, "partition": "stratified", "batch_size": 50, "rounds": 64, "min_rounds": 16},
)
def figure_8(bench: Bench, setting: dict[str, Any]) -> Outcome:
    """CFL, figure 8: label permutation on CIFAR-10, splits at rounds 50, 100, 150."""
    images = {"dataset": "cifar10", "heterogeneity": "label_permutation", "model": "cnn5"}
    config = report.configure("cfl", setting | images | CLIENTS | BY_SCHEDULE)
    paper = {"split": "20 % before the first, gap > 0", "end": "4 clusters, close to 60 %, gap < 0"}
    return staged(bench, "run", config, paper, "accuracy")


@recipe(
    "cfl.figure9",
    full=_SCHEDULE
    | {"examples_per_client": None, "vocab_size": 10000, "length": 32, "rounds": 100, "min_rounds": 30}
    | {"lr": 1.0, "gamma_max": 0.0},
    small={"examples_per_client": 250, "vocab_size": 1000, "length": 16, "rounds": 24, "min_rounds": 8}
    | {"batch_size": 20},
)
def figure_9(bench: Bench, setting: dict[str, Any]) -> Outcome:
    """CFL, figure 9: next-word prediction on AG News, splits at rounds 30, 60, 90.

    Beside it, Federated Learning for as many rounds.
    """
    texts = {"dataset": "ag_news", "heterogeneity": "topic", "model": "lstm"}
    config = report.configure("cfl", setting | texts | CLIENTS | BY_SCHEDULE)
    outcome = staged(bench, "cfl", config, {"split": "43 before the first", "end": "below 36"}, "perplexity")
    plain = report.configure("fedavg", setting | texts | {"clients": 20, "clusters": 4, "eval_every": 1})
    _, records = bench.run("fedavg", plain)
    for record in (r for r in records if r["round"] == plain.rounds):
        row = {"seed": record["seed"], "event": "FL, end", "round": plain.rounds}
        outcome.rows.append(row | {"perplexity": record["perplexity"], "paper": "42"})
    top = outcome.figure.axes[0]
    report.plot_metric(top, report.first_seed(records), "perplexity", "k:", label="FL")
    report.label_axes(top, 8, yscale="log")
    return outcome
