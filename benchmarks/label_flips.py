"""FedAvg and CFL under label flips (Byzantine CFL, table 1): which setting gives the paper's accuracies?

    python benchmarks/label_flips.py --dataset mnist --epochs 5 --rounds 40
    python benchmarks/label_flips.py --dataset mnist --inputs standard --init torch --rounds 200
    python benchmarks/label_flips.py --dataset mnist --lr 0.03 --order fixed --rounds 200
    python benchmarks/label_flips.py --dataset mnist --inputs resized --init torch --rounds 200 --method CFL

30 % of the clients have the label 0 for all examples. With `--write`, a run adds its row to
results/label-flips-DEVICE.json.

`--inputs resized` is that of the first author's public code for other experiments: `CNNMnist32` of
`benchmarks/papers/networks.py`.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import report, rows_there

import jfcl
from benchmarks.papers.byzantine_cfl import OF_CODE
from benchmarks.papers.networks import with_torch_init
from jfcl.core import Clients
from jfcl.experiments import Config
from jfcl.experiments.setups import setup
from jfcl.training import local

COLUMNS = ["dataset", "method", "epochs", "lr", "inputs", "init", "order", "clients", "rounds", "attack", "accuracy"]
COLUMNS += ["last 5", "hostile excluded", "benign excluded", "by round", "seconds"]


def standardised(clients: Clients, mean: float, std: float) -> Clients:
    """Returns `clients` with inputs of mean 0 and standard deviation 1."""
    return clients._replace(
        examples=clients.examples | {"x": (clients.examples["x"] - np.float32(mean)) / np.float32(std)}
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the row of one setting, with the accuracy of the benign clients in 20 of the rounds.

    `last 5` is the mean of the last five of these.
    """
    if args.order == "fixed":  # no option of the library: every pass has the examples in the order of the split
        local.shuffled_rows = lambda key, size, max_examples: jnp.arange(max_examples)
    attack = None if args.attack == "none" else args.attack
    model = "cnn_mnist" if args.inputs != "resized" else OF_CODE[args.dataset]
    options = {"dataset": args.dataset, "heterogeneity": "none", "clusters": 1, "model": model, "batch_size": 100}
    options |= {"clients": args.clients, "examples_per_client": 600, "local_epochs": args.epochs, "lr": args.lr}
    options |= {"rounds": args.rounds, "attack": attack, "malicious": 0.3 if attack else 0.0}
    parts = setup(Config("fedavg", **options))
    train, test, task = parts.federation.train, parts.federation.test, parts.task
    if args.inputs == "standard":
        x = np.asarray(train.examples["x"])
        mean, std = float(x.mean()), float(x.std())
        train, test = standardised(train, mean, std), standardised(test, mean, std)
    if args.init == "torch":
        task = with_torch_init(task)
    make = {"FL": jfcl.fedavg, "CFL": jfcl.byzantine_cfl}[args.method]
    algorithm = make(task, parts.training, client_axis=parts.client_axis)
    began = time.perf_counter()
    history = jfcl.simulate(
        algorithm,
        train,
        key=jax.random.key(0),
        num_rounds=args.rounds,
        test_clients=test,
        eval_every=max(1, args.rounds // 20),
    )
    by_round = {str(row["round"]): round(100 * float(row["accuracy"]), 2) for row in history.records}
    accuracy = by_round[str(args.rounds)]
    late = float(np.mean(list(by_round.values())[-5:]))
    measured = {"accuracy": accuracy, "last 5": late, "accuracy by round": by_round}
    if args.method == "CFL":
        excluded = np.array(history.records[-1]["excluded"])
        measured |= {"hostile excluded": int((excluded[parts.malicious] > 0).sum())}
        measured |= {"benign excluded": int((excluded[~parts.malicious] > 0).sum()), "by round": int(excluded.max())}
    return vars(args) | measured | {"seconds": time.perf_counter() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", choices=("mnist", "fashion_mnist"), default="mnist")
    parser.add_argument("--method", choices=("FL", "CFL"), default="FL")
    parser.add_argument("--epochs", type=int, default=1, help="local epochs")
    parser.add_argument("--lr", type=float, default=0.01)
    accepted = ("pixels", "standard", "resized")
    parser.add_argument("--inputs", choices=accepted, default="pixels", help="in [0, 1], standardised, the authors'")
    parser.add_argument("--init", choices=("flax", "torch"), default="flax", help="whose default initialisation")
    parser.add_argument("--order", choices=("shuffled", "fixed"), default="shuffled", help="of a client's examples")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--attack", choices=("label_zero", "none"), default="label_zero")
    parser.add_argument("--write", action="store_true", help="to results/")
    args = parser.parse_args()
    write = vars(args).pop("write")  # the others are the setting
    if args.inputs == "resized" and args.init != "torch":
        parser.error("--inputs resized has --init torch")
    row = run(args)
    kept = rows_there("label-flips") if write else []
    others = [r for r in kept if any(r[name] != value for name, value in vars(args).items())]
    rows = sorted([*others, row], key=lambda r: [str(r.get(name)) for name in COLUMNS])
    name, command = "label-flips" if write else None, "python benchmarks/label_flips.py, with options"
    report(name, "FedAvg under label flips", COLUMNS, rows, command)


if __name__ == "__main__":
    main()
