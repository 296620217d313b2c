"""IFCA on rotated CIFAR-10: are random models that clients choose evenly also those of their clusters?

    python benchmarks/ifca_starts.py --data-dir DATA --seeds 8
    python benchmarks/ifca_starts.py --data-dir DATA --seed 1 --rounds 12
    python benchmarks/ifca_starts.py --data-dir DATA --seed 1 --rounds 12 --changed
    python benchmarks/ifca_starts.py --data-dir DATA --seeds 5 --rounds 6 --small

Initial models are drawn until each is chosen by 35 % of a cohort of 20 of 200 clients, as in the paper's code. A row is
a draw: which share chose the model that fewer chose, and which share of the cohort is divided as its clusters are. With
`--rounds`, then a row a round: how many clients of each cluster chose each model. `--changed`: they compare the models
on changed images, one window, light and contrast for all images of a client and model (`identity_augment`). `--small`:
the recipe's small setting, 4 of 20 clients in a round.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from benchmarks.papers.ifca import cifar_config
from benchmarks.papers.recipes import RECIPES
from jfcl.experiments.setups import Setup, setup
from jfcl.methods.restarts import MOST_DRAWS
from jfcl.methods.round import select_cohort

RECIPE, MIN_SHARE = RECIPES["ifca.table1_cifar10"], 0.35


def draws(plain: Setup, key: jax.Array, cohort_size: int) -> Iterator[dict[str, Any]]:
    """The draws of `with_balanced_start` in a run with this key; `plain` draws once."""
    clients, true = jax.device_put(plain.federation.train), np.asarray(plain.federation.cluster)
    cohort_key, models_key = jax.random.split(jax.random.fold_in(key, 0))
    cohort = select_cohort(cohort_key, clients, cohort_size).clients
    choose = jax.jit(lambda key: plain.algorithm.init(key, cohort).cluster)
    true = true[np.asarray(cohort.id)]
    for draw in range(MOST_DRAWS):
        chosen = np.asarray(choose(jax.random.fold_in(models_key, draw)))
        share, agree = float(min(np.mean(chosen == 0), np.mean(chosen == 1))), float(np.mean(chosen == true))
        yield {"draw": draw, "share": round(share, 2), "as clusters": round(max(agree, 1 - agree), 2)}
        if share >= MIN_SHARE:
            return


def rounds(balanced: Setup, key: jax.Array, num_rounds: int) -> Iterator[dict[str, Any]]:
    """The choices in each round of a run, `[[a, b], [c, d]]`: `a` clients of cluster 0 chose model 0."""
    clients, true = jax.device_put(balanced.federation.train), np.asarray(balanced.federation.cluster)
    state = jax.jit(balanced.algorithm.init)(jax.random.fold_in(key, 0), clients)
    step = jax.jit(balanced.algorithm.step)
    for t in range(1, num_rounds + 1):
        state, metrics = step(jax.random.fold_in(key, t), state, clients)
        chosen, took_part = np.asarray(state.cluster), np.isfinite(np.asarray(metrics["loss"]))
        counts = [[int((took_part & (true == z) & (chosen == k)).sum()) for k in (0, 1)] for z in (0, 1)]
        yield {"round": t, "chosen": counts, "loss": round(float(np.nanmean(metrics["loss"])), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir")
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--changed", action="store_true")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    setting = RECIPE.small if args.small else RECIPE.full
    config = cifar_config("ifca", RECIPE.full | setting | {"changed": args.changed})
    parts = dataclasses.replace(config, min_share=None), config
    plain, balanced = (setup(part, data_dir=args.data_dir) for part in parts)
    for seed in range(args.seed, args.seed + args.seeds):
        key, given = jax.random.key(seed), {"seed": seed} | ({"small": True} if args.small else {})
        for row in draws(plain, key, setting["cohort"]):
            print(json.dumps(given | row), flush=True)
        for row in rounds(balanced, key, args.rounds):
            print(json.dumps(given | {"changed": args.changed} | row), flush=True)


if __name__ == "__main__":
    main()
