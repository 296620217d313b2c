"""Attacks that search for harm against robust aggregators that filter: FedAvg on digits, 3 of 10 clients hostile.

    python benchmarks/robust.py

A perceptron with 32 hidden units, 30 rounds of 5 full-batch steps of SGD at 0.1, data divided at random. The accuracy
is that of the benign clients, the mean of the seeds. MoNNA trusts a benign client, and attacks that search know the
aggregator.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from common import report

import jfcl
from jfcl import attacks, kernels

CLIENTS, MALICIOUS = 10, 3
ATTACKS = ("optimal_alie", "optimal_ipm", "min_max", "min_sum", "fang")
AGGREGATORS = ("mean", "caf", "smea", "monna", "dnc", "clipped_clustering", "sign_guard")


def accuracy(attack: str | None, aggregator: str, args: argparse.Namespace) -> float:
    """Returns the accuracy in percent of the benign clients after the last round, the mean of the seeds."""
    malicious = np.arange(CLIENTS) >= CLIENTS - MALICIOUS
    fed = jfcl.data.build("digits", num_clients=CLIENTS)
    task = jfcl.models.classification(jfcl.models.MLP(10, hidden=(32,)), fed.input_shape, fed.num_classes)
    training = jfcl.local_training(optax.sgd(0.1), num_steps=5)
    known = {} if "num_malicious" not in kernels.aggregator_options(aggregator) else {"num_malicious": MALICIOUS}
    combine = kernels.make_aggregator(aggregator, **known)
    adversary = None
    if attack is not None:
        make = attacks.UPDATE_ATTACKS[attack]
        make = partial(make, combine) if attack.startswith("optimal") else make
        adversary = jfcl.Adversary(make(), malicious)
    algorithm = jfcl.fedavg(task, training, adversary=adversary, aggregator=combine, client_axis=jax.vmap)
    real = np.arange(fed.test.examples["y"].shape[1]) < fed.test.size[:, None]
    test = {name: x[real & ~malicious[:, None]] for name, x in fed.test.examples.items()}

    def run(key):
        state = jfcl.rollout(algorithm, fed.train, key=key, num_rounds=args.rounds)[0]
        model = jax.tree.map(lambda x: x[0], state.params)
        return task.correct(task.apply(model, test["x"]), test).mean()

    return 100 * float(jax.jit(partial(jax.lax.map, run))(jax.random.split(jax.random.key(0), args.seeds)).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--aggregators", nargs="+", default=[*AGGREGATORS])
    parser.add_argument("--attacks", nargs="+", default=["none", *ATTACKS])
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for aggregator in args.aggregators:
        rows.append({"aggregator": aggregator})
        for attack in args.attacks:
            rows[-1][attack] = round(accuracy(None if attack == "none" else attack, aggregator, args), 1)
        print(rows[-1], flush=True)
    whole = len(args.aggregators) == len(AGGREGATORS) and len(args.attacks) == 1 + len(ATTACKS)
    title = f"Accuracy % on digits, {MALICIOUS} of {CLIENTS} clients hostile"
    report("robust", title, ["aggregator", *args.attacks], rows, "python benchmarks/robust.py", partial=not whole)


if __name__ == "__main__":
    main()
