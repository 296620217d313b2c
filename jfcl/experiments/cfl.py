"""The experiments of Clustered Federated Learning (Sattler, Müller, Samek 2021): figures 3, 5, 6, 7, 8 and 9.

The paper leaves open: learning rates, the widths of its networks, which labels are swapped, ε₁ and ε₂. What stands
here is ours: plain SGD at the rate of each setting; labels as in `jfcl.data` (a pair of neighbours for each cluster);
splits at the paper's rounds, by `min_rounds`, wherever `γ_max` allows them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

from jfcl.algorithms import theory
from jfcl.analysis import parameter_tree, plots
from jfcl.analysis.metrics import rounds_to_recovery
from jfcl.core import take_clients
from jfcl.experiments.config import Config
from jfcl.experiments.recipes import Bench, Outcome, Recipe, Row
from jfcl.experiments.setups import setup

NEVER = 1e-30  # as ε₁: no mean update is shorter, so nothing is split


def _series(records: Sequence[Row], name: str, slot: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """`(rounds [E], values [E, R])` of one cluster's entry of a metric."""
    seeds = sorted({r["seed"] for r in records})
    rounds = [r["round"] for r in records if r["seed"] == seeds[0]]
    values = [[_number(r[name][slot]) for r in records if r["seed"] == seed] for seed in seeds]
    return np.array(rounds), np.array(values).T


def _number(value: float | None) -> float:
    return np.nan if value is None else value


def figure_3(bench: Bench, setting: dict[str, Any]) -> Outcome:
    """Where the theorem guarantees the split, and how often it is right beyond."""
    k = list(range(2, setting["most_clusters"] + 1))
    noise = np.linspace(0.05, 2.0, setting["noises"])
    found = theory.split_probability(jax.random.key(0), k, noise, num_trials=setting["trials"])
    inside = np.asarray(found.guaranteed)
    rows = []
    for gamma in (0.5, 1.0, 1.5, 2.0):
        g = int(np.abs(noise - gamma).argmin())
        for clusters in (2, 5, 10, 15):
            if clusters in k:
                a = k.index(clusters)
                row = {"clusters": clusters, "noise": float(noise[g]), "guaranteed": bool(inside[a, g])}
                row |= {"correct splits": float(found.correct[a, g]), "gap above 0": float(found.gap[a, g])}
                rows.append(row | {"paper": "≈ 1" if gamma <= 1.5 else ""})
    worst = float(np.asarray(found.correct)[inside].min())
    figure = plots.split_probability(found, k, noise)
    return Outcome(rows, figure, f"inside the guaranteed region, the lowest share of correct splits is {worst:.3f}")


def _gap_config(setting, dataset, examples, similarity, eval_every):
    return Config(
        "cfl",
        dataset=dataset,
        heterogeneity="label_swap",
        partition=setting["partition"],
        model=setting["models"][dataset],
        clients=20,
        clusters=4,
        examples_per_client=examples,
        rounds=setting["rounds"],
        local_epochs=3,
        batch_size=setting["batch_size"],
        lr=setting["lr"],
        seeds=setting["seeds"],
        eps_1=NEVER,
        eps_2=1.0,
        max_clusters=2,
        tree_dim=0,
        similarity=similarity,
        track_gap=True,
        eval_every=eval_every,
    )


def figure_5(bench: Bench, setting: dict[str, Any]) -> Outcome:
    """The separation gap after training, by the number of examples on a client."""
    rows, figure = [], Figure(figsize=(5 * len(setting["examples"]), 3.8), layout="constrained")
    panels = np.atleast_1d(figure.subplots(1, len(setting["examples"])))
    paper = {"mnist": "above 0 from 20", "cifar10": "above 0 from about 500"}
    for axes, (dataset, counts) in zip(panels, setting["examples"].items(), strict=True):
        for similarity in ("updates", "gradients"):
            gaps = []
            for examples in counts:
                config = _gap_config(setting, dataset, examples, similarity, setting["rounds"])
                _, records = bench.run(f"{dataset}-{examples}-{similarity}", config)
                gaps.append(_series(records, "separation_gap")[1][-1])
                row = {"data": dataset, "examples": examples, "similarity of": similarity}
                row |= {"gap": float(np.mean(gaps[-1])), "lowest seed": float(np.min(gaps[-1]))}
                rows.append(row | {"paper": paper[dataset] if similarity == "updates" else "below updates"})
            gaps = np.array(gaps)
            (line,) = axes.plot(counts, gaps.mean(axis=1), marker=".", label=similarity)
            axes.fill_between(counts, gaps.min(axis=1), gaps.max(axis=1), color=line.get_color(), alpha=0.15)
        axes.axhline(0, color="0.5", lw=1)
        axes.set(xlabel="examples per client", ylabel=r"separation gap $g(\alpha)$", title=dataset)
        axes.legend()
    return Outcome(rows, figure)


def figure_6(bench: Bench, setting: dict[str, Any]) -> Outcome:
    """The separation gap over the rounds."""
    rows, figure = [], Figure(figsize=(5 * len(setting["examples"]), 3.8), layout="constrained")
    panels = np.atleast_1d(figure.subplots(1, len(setting["examples"])))
    for axes, (dataset, examples) in zip(panels, setting["examples"].items(), strict=True):
        for similarity in ("updates", "gradients"):
            config = _gap_config(setting, dataset, examples, similarity, 1)
            _, records = bench.run(f"{dataset}-{similarity}", config)
            rounds, gaps = _series(records, "separation_gap")
            (line,) = axes.plot(rounds, gaps.mean(axis=1), label=similarity)
            axes.fill_between(rounds, gaps.min(axis=1), gaps.max(axis=1), color=line.get_color(), alpha=0.15)
            row = {"data": dataset, "similarity of": similarity, "gap at the end": float(gaps[-1].mean())}
            row |= {"above 0 from round on": rounds_to_recovery([int(t) for t in rounds], (gaps > 0).all(axis=1))}
            rows.append(row | {"paper": "about 10" if similarity == "updates" else ""})
        axes.axhline(0, color="0.5", lw=1)
        axes.set(xlabel="round", ylabel=r"separation gap $g(\alpha)$", title=dataset)
        axes.legend()
    return Outcome(rows, figure)


def figure_7(bench: Bench, setting: dict[str, Any]) -> Outcome:
    """Norms of the mean and of the longest update, of two clients that disagree and of two that do not.

    And whether they are split where they may be: the same again, at the default thresholds.
    """
    rows, figure = [], Figure(figsize=(10, 3.8), layout="constrained")
    kinds = (("incongruent", "label_swap"), ("congruent", "class"))
    for axes, (kind, heterogeneity) in zip(figure.subplots(1, 2), kinds, strict=True):
        config = Config(
            "cfl",
            dataset="mnist",
            heterogeneity=heterogeneity,
            model=setting["model"],
            clients=2,
            clusters=2,
            examples_per_client=setting["examples_per_client"],
            rounds=setting["rounds"],
            local_epochs=setting["local_epochs"],
            batch_size=setting["batch_size"],
            lr=setting["lr"],
            seeds=setting["seeds"],
            eps_1=NEVER,
            eps_2=1.0,
            max_clusters=2,
            tree_dim=0,
            eval_every=max(1, setting["rounds"] // 200),
        )
        _, records = bench.run(kind, config)
        for name, label in (("mean_norm", "mean update"), ("max_norm", "longest update")):
            rounds, norms = _series(records, name)
            axes.plot(rounds, norms.mean(axis=1), label=label)
            few = max(1, len(norms) // 20)
            row = {"clients": kind, "norm of": label, "first rounds": float(norms[:few].mean())}
            row |= {"last rounds": float(norms[-few:].mean())}
            stays = (kind, name) == ("incongruent", "max_norm")
            rows.append(row | {"paper": "stays up, even grows" if stays else "goes to 0"})
        free = dataclasses.replace(config, eps_1=None, eps_2=None, eval_every=10, **setting["split"])
        _, records = bench.run(f"{kind}-split", free)
        when = [r["round"] for r in records if max(r["split_from"]) >= 0]
        said = f"{len(when)} of {free.seeds} seeds" + (
            f", by round {max(when)}" if when else f" in {free.rounds} rounds"
        )
        rows.append({"clients": kind, "split": said, "paper": "split" if kind == "incongruent" else "never"})
        axes.set(xlabel="round", ylabel="norm", title=kind, yscale="log")
        axes.legend()
    return Outcome(rows, figure)


def staged(bench: Bench, name: str, config: Config, paper: dict[str, str], metric: str) -> Outcome:
    """A run of `cfl`: a row per split, one for the end, and its curves with those of the separation gaps."""
    _, records = bench.run(name, config)
    seeds = sorted({r["seed"] for r in records})
    rows = []
    for seed in seeds:
        mine = [r for r in records if r["seed"] == seed]
        for before, record in pairwise(mine):
            for slot, origin in enumerate(record["split_from"]):
                if origin >= 0:
                    row = {"seed": seed, "event": f"{origin} splits, {slot} is new", "round": record["round"]}
                    row |= {metric: before[metric], "gap": _number(record["separation_gap"][origin])}
                    rows.append(row | {"identity": record["cluster_accuracy"], "paper": paper["split"]})
        end = mine[-1]
        gaps = np.array([_number(g) for g in end["separation_gap"]])
        row = {"seed": seed, "event": f"end, {end['num_clusters']} clusters", "round": end["round"]}
        row |= {metric: end[metric], "gap": float(np.nanmax(gaps)), "identity": end["cluster_accuracy"]}
        rows.append(row | {"paper": paper["end"]})
    figure = Figure(figsize=(6.4, 6.4), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)
    for seed in seeds:
        mine = [r for r in records if r["seed"] == seed]
        top.plot([r["round"] for r in mine], [_number(r[metric]) for r in mine], label=f"seed {seed}")
    mine = [r for r in records if r["seed"] == seeds[0]]
    for slot in range(len(mine[0]["separation_gap"])):
        alive = [(r["round"], _number(r["separation_gap"][slot])) for r in mine if slot < r["num_clusters"]]
        if alive:
            bottom.plot(*zip(*alive, strict=True), label=f"cluster {slot}")
    bottom.axhline(0, color="0.5", lw=1)
    for row in rows:
        if row["event"].endswith("new") and row["seed"] == seeds[0]:
            for axes in (top, bottom):
                axes.axvline(row["round"], color="0.7", lw=1, ls=":")
    top.set_ylabel(f"mean client {metric}")
    bottom.set(xlabel="round", ylabel=f"separation gap, seed {seeds[0]}")
    for axes in (top, bottom):
        axes.legend(fontsize=8)
    return Outcome(rows, figure)


def label_swap(bench: Bench, setting: dict[str, Any]) -> Outcome:
    """Label swap on MNIST, split by the norms of updates alone: the true clusters, then no further split."""
    return staged(bench, "run", _label_swap_config(setting), {"split": "gap > 0", "end": "4 clusters"}, "accuracy")


def _label_swap_config(setting: dict[str, Any]) -> Config:
    return Config(
        "cfl",
        dataset="mnist",
        heterogeneity="label_swap",
        clients=20,
        clusters=4,
        max_clusters=8,
        relative=True,
        track_gap=True,
        eval_every=1,
        **setting,
    )


def newcomers(bench: Bench, setting: dict[str, Any]) -> Outcome:
    """New clients led down the tree of a `label_swap` run by Algorithm 4, by how many examples they hold."""
    counts = setting["newcomer_examples"]
    rest = {name: value for name, value in setting.items() if name not in ("newcomer_examples", "newcomers")}
    config = _label_swap_config({**rest, "seeds": 1, "newcomer_examples": max(counts)})
    config = dataclasses.replace(config, eval_every=config.rounds)  # it evaluates all newcomers under all models
    bench.run("run", config)
    parts = setup(config, data_dir=bench.data_dir)
    state = parameter_tree.load_tree(bench.out / "run", parts.task)
    true = parts.federation.cluster
    of_leaf = {
        int(k): int(np.bincount(true[np.asarray(state.cluster) == k]).argmax()) for k in set(state.cluster.tolist())
    }
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


def _by_schedule(setting: dict[str, Any], **fixed: Any) -> Config:
    names = ("rounds", "local_epochs", "batch_size", "lr", "seeds", "min_rounds", "gamma_max", "examples_per_client")
    return Config(
        "cfl",
        clients=20,
        clusters=4,
        eps_1=float("inf"),  # time alone decides when to look for a split: the paper's rounds
        eps_2=NEVER,
        max_clusters=setting["max_clusters"],
        track_gap=True,
        eval_every=1,
        **{name: setting[name] for name in names},
        **fixed,
    )


def figure_8(bench: Bench, setting: dict[str, Any]) -> Outcome:
    """Label permutation on CIFAR-10: three splits."""
    data = {"dataset": "cifar10", "heterogeneity": "label_permutation", "partition": setting["partition"]}
    config = _by_schedule(setting, model="cnn5", **data)
    paper = {"split": "20 % before the first, gap > 0", "end": "4 clusters, close to 60 %, gap < 0"}
    return staged(bench, "run", config, paper, "accuracy")


def figure_9(bench: Bench, setting: dict[str, Any]) -> Outcome:
    """Language models on AG News: three splits; and Federated Learning for as many rounds."""
    data = {"dataset": "ag_news", "heterogeneity": "topic", "model": "lstm"}
    data |= {name: setting[name] for name in ("vocab_size", "length")}
    outcome = staged(
        bench, "cfl", _by_schedule(setting, **data), {"split": "43 before the first", "end": "below 36"}, "perplexity"
    )
    names = ("rounds", "local_epochs", "batch_size", "lr", "seeds", "examples_per_client")
    plain = Config("fedavg", clients=20, clusters=4, eval_every=1, **data, **{name: setting[name] for name in names})
    _, records = bench.run("fedavg", plain)
    for record in records:
        if record["round"] == plain.rounds:
            row = {"seed": record["seed"], "event": "FL, end", "round": plain.rounds}
            outcome.rows.append(row | {"perplexity": record["perplexity"], "paper": "42"})
    top = outcome.figure.axes[0]
    first = [r for r in records if r["seed"] == records[0]["seed"]]
    top.plot([r["round"] for r in first], [r["perplexity"] for r in first], "k:", label="FL")
    top.set_yscale("log")
    top.legend(fontsize=8)
    return outcome


# With every label in its share, every client has examples of the labels that its cluster exchanges, which of 20 random
# ones one in eighty has not. Updates separate better than gradients while training is far from its end, which smaller
# batches or longer steps bring on within the 50 rounds.
_GAPS = {"models": {"mnist": "cnn_mnist", "cifar10": "cnn5"}, "rounds": 50, "batch_size": 100, "lr": 0.05}
_GAPS |= {"partition": "stratified"}
_TRAINING = {"local_epochs": 3, "batch_size": 100, "lr": 0.1}
_RELATIVE = {"eps_1": 0.25, "eps_2": 0.42, "min_rounds": 10}
_LABEL_SWAP_FULL = _TRAINING | _RELATIVE | {"model": "cnn_mnist", "examples_per_client": 3000, "rounds": 100}
_LABEL_SWAP_SMALL = _TRAINING | _RELATIVE | {"model": "mlp", "examples_per_client": 500, "rounds": 60}
RECIPES = {
    "cfl.figure3": Recipe(
        "CFL, figure 3: probability of a correct split by clusters and noise",
        figure_3,
        full={"most_clusters": 15, "noises": 40, "trials": 1000},
        small={"most_clusters": 15, "noises": 20, "trials": 100},
    ),
    "cfl.figure5": Recipe(
        "CFL, figure 5: separation gap by examples per client, label swap",
        figure_5,
        full=_GAPS
        | {
            "examples": {"mnist": [10, 20, 50, 100, 150, 200], "cifar10": [100, 300, 500, 1000, 1500, 2400]},
            "seeds": 5,
        },
        small=_GAPS | {"examples": {"mnist": [10, 20, 50, 100]}, "seeds": 3},
    ),
    "cfl.figure6": Recipe(
        "CFL, figure 6: separation gap by round, label swap",
        figure_6,
        full=_GAPS | {"examples": {"mnist": 100, "cifar10": 1500}, "seeds": 5},
        small=_GAPS | {"examples": {"mnist": 100}, "seeds": 2},
    ),
    "cfl.figure7": Recipe(
        "CFL, figure 7: update norms of incongruent and congruent clients",
        figure_7,
        full=_TRAINING
        | {"model": "cnn_mnist", "examples_per_client": 25000, "rounds": 1000, "lr": 0.05, "seeds": 1}
        | {"split": {"rounds": 1000, "seeds": 3}},
        small=_TRAINING
        | {"model": "mlp", "examples_per_client": 1000, "rounds": 1000, "seeds": 1}
        | {"split": {"rounds": 300, "seeds": 3}},
    ),
    "cfl.label_swap": Recipe(
        "CFL, section VI-C on MNIST with label swap: the four clusters and no fifth",
        label_swap,
        full=_LABEL_SWAP_FULL | {"seeds": 5},
        small=_LABEL_SWAP_SMALL | {"seeds": 5},
    ),
    "cfl.newcomers": Recipe(
        "CFL, Algorithm 4 on MNIST with label swap: newcomers led to their leaf",
        newcomers,
        full=_LABEL_SWAP_FULL | {"newcomers": 100, "newcomer_examples": [10, 20, 50, 100, 200]},
        small=_LABEL_SWAP_SMALL | {"newcomers": 100, "newcomer_examples": [10, 20, 50, 100, 200]},
    ),
    "cfl.figure8": Recipe(
        "CFL, figure 8: label permutation on CIFAR-10, splits at rounds 50, 100, 150",
        figure_8,
        full=_TRAINING
        | {
            "examples_per_client": 2500,
            "partition": "iid",
            "rounds": 200,
            "min_rounds": 50,
            "gamma_max": 0.6,
            "max_clusters": 4,
            "seeds": 1,
        },
        small=_TRAINING
        | {
            "examples_per_client": 300,
            "partition": "stratified",
            "batch_size": 50,
            "rounds": 64,
            "min_rounds": 16,
            "gamma_max": 0.6,
            "max_clusters": 4,
            "seeds": 1,
        },
    ),
    "cfl.figure9": Recipe(
        "CFL, figure 9: next-word prediction on AG News, splits at rounds 30, 60, 90",
        figure_9,
        full=_TRAINING
        | {
            "examples_per_client": None,
            "vocab_size": 10000,
            "length": 32,
            "rounds": 100,
            "min_rounds": 30,
            "lr": 1.0,
            "gamma_max": 0.0,
            "max_clusters": 4,
            "seeds": 1,
        },
        small=_TRAINING
        | {
            "examples_per_client": 100,
            "vocab_size": 1000,
            "length": 16,
            "rounds": 32,
            "min_rounds": 8,
            "batch_size": 20,
            "lr": 1.0,
            "gamma_max": 0.0,
            "max_clusters": 4,
            "seeds": 1,
        },
    ),
}
