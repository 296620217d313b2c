"""Attacks that search for harm against robust aggregators that filter: FedAvg on digits, 3 of 10 clients hostile.

    python benchmarks/robust.py

A perceptron with 32 hidden units, 30 rounds of 5 full-batch steps of SGD at 0.1, data divided at random. The accuracy
is that of the benign clients, the mean of the seeds. MoNNA trusts a benign client, and attacks that search know the
aggregator.
"""

from __future__ import annotations

import argparse
from functools import partial

import jax
import numpy as np
import optax
from common import report

import jfcl
from jfcl import attacks, kernels

CLIENTS, MALICIOUS = 10, 3
ATTACKS = ("optimal_alie", "optimal_ipm", "min_max", "min_sum", "fang")
AGGREGATORS = ("mean", "caf", "smea", "monna", "dnc", "clipped_clustering", "sign_guard")


def accuracies(aggregator: str, args: argparse.Namespace) -> np.ndarray:
    """Returns the accuracy in percent of the benign clients after the last round, without an attack and with each."""
    malicious = np.arange(CLIENTS) >= CLIENTS - MALICIOUS
    fed = jfcl.data.build("digits", num_clients=CLIENTS)
    real = (np.arange(fed.test.examples["y"].shape[1]) < fed.test.size[:, None]) & ~malicious[:, None]
    test = {name: x[real] for name, x in fed.test.examples.items()}
    task = jfcl.models.classification(jfcl.models.MLP(10, hidden=(32,)), fed.input_shape, fed.num_classes)
    training = jfcl.local_training(optax.sgd(0.1), num_steps=5)
    known = {} if "num_malicious" not in kernels.aggregator_options(aggregator) else {"num_malicious": MALICIOUS}
    combine = kernels.make_aggregator(aggregator, **known)
    makes = [attacks.UPDATE_ATTACKS[name] for name in ATTACKS]
    sent = [make(combine) if make.__name__.startswith("optimal") else make() for make in makes]
    sent.insert(0, lambda key, updates, malicious, usable: updates)

    def run(case):  # one program for all attacks
        key, number = case

        def attack(key, updates, malicious, usable):
            return jax.lax.switch(number, sent, key, updates, malicious, usable)

        adversary = jfcl.Adversary(attack, malicious)
        algorithm = jfcl.fedavg(task, training, adversary=adversary, aggregator=combine, client_axis=jax.vmap)
        state = jfcl.rollout(algorithm, fed.train, key=key, num_rounds=args.rounds)[0]
        model = jax.tree.map(lambda x: x[0], state.params)
        return task.correct(task.apply(model, test["x"]), test).mean()

    keys = jax.random.split(jax.random.key(0), args.seeds)
    numbers = np.repeat(np.arange(len(sent), dtype=np.int32), args.seeds)
    found = jax.jit(partial(jax.lax.map, run))((keys[np.tile(np.arange(args.seeds), len(sent))], numbers))
    return 100 * np.asarray(found, np.float64).reshape(len(sent), args.seeds).mean(axis=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--aggregators", nargs="+", default=[*AGGREGATORS])
    args = parser.parse_args()
    rows = []
    for aggregator in args.aggregators:
        found = dict(zip(("none", *ATTACKS), accuracies(aggregator, args).round(1).tolist(), strict=True))
        rows.append({"aggregator": aggregator} | found)
        print(rows[-1], flush=True)
    title = f"Accuracy % on digits, {MALICIOUS} of {CLIENTS} clients hostile"
    report("robust", title, ["aggregator", "none", *ATTACKS], rows)


if __name__ == "__main__":
    main()
