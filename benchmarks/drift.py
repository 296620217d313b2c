"""FedDrift's tables on synthetic drift: accuracy on the data of the next step, with and without the cells that drift.

    python benchmarks/drift.py                                  # SINE-2 and CIRCLE-2, pattern Y, one seed
    python benchmarks/drift.py --only sea                       # SEA-4, pattern F
    python benchmarks/drift.py --only mnist --data-dir DATA     # MNIST-4, pattern F: long without a GPU
    python benchmarks/drift.py --only sea --rounds 20 --methods feddrift,fedavg
    python benchmarks/drift.py --only mnist --rounds 20 --hidden 64 --methods feddrift,fedavg --data-dir DATA

The paper's setting: 10 clients, 10 steps of 500 examples a client, 100 rounds a step, 50 local steps of batch 50 by
AMSGrad with weight decay 1e-3, learning rate 0.01 (MNIST: 0.001), one hidden layer of twice the inputs. As in the
authors' code, AMSGrad is PyTorch's, and clients keep its state from round to round, with FedDrift to the end of a step;
`--optimizer optax` begins anew in each round, with that of optax. The figures are means over steps. IFCA and the oracle
hold the newest step alone, FedAvg and FedDrift all up to now. `--rounds` and `--hidden` make it smaller: each of the
last two commands above takes minutes of processor time.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import jax
import optax
from common import report

import jfcl

COLUMNS = ["setting", "method", "seed", "stable", "all", "adjusted_rand", "models", "seconds"]
SETTINGS = {"sine": ("Y", 2, 0.2), "circle": ("Y", 2, 0.1), "sea": ("F", 4, 0.04), "mnist": ("F", 4, 0.1)}


def amsgrad(rate: float, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> optax.GradientTransformation:
    """AMSGrad as in PyTorch: it corrects the largest second moment, where optax takes the largest corrected one.

    With optax's, the first gradients limit all later steps.
    """

    def update(grads, state, params=None):
        count = state.count + 1
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, grads)
        nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state.nu, grads)
        largest = jax.tree.map(jax.numpy.maximum, state.nu_max, nu)
        first, second = (1 - b ** count.astype(jax.numpy.float32) for b in (b1, b2))
        steps = jax.tree.map(lambda m, v: -rate * m / first / (jax.numpy.sqrt(v / second) + eps), mu, largest)
        return steps, optax.ScaleByAmsgradState(count, mu, nu, largest)

    return optax.GradientTransformation(optax.scale_by_amsgrad().init, update)


def rows_of(name: str, seed: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The results of each method on a data set; as in the paper, accuracies in percent."""
    pattern, clusters, threshold = SETTINGS[name]
    heterogeneity = "swap_pairs" if name == "mnist" else name
    about = {"num_clients": 10, "num_clusters": clusters, "heterogeneity": heterogeneity, "examples_per_client": 5000}
    feds = {
        window: jfcl.data.build(name, drift=pattern, drift_window=window, seed=seed, data_dir=args.data_dir, **about)
        for window in (None, 1)
    }
    shape, classes = feds[None].input_shape, feds[None].num_classes
    width = args.hidden or 2 * math.prod(shape)
    task = jfcl.models.classification(jfcl.models.MLP(classes, hidden=width), shape, classes)
    rate = 0.001 if name == "mnist" else 0.01
    make, keep = (amsgrad, "everything") if args.optimizer == "paper" else (optax.amsgrad, "nothing")
    optimizer = optax.chain(optax.add_decayed_weights(1e-3), make(rate))
    training = jfcl.local_training(optimizer, num_steps=50, batch_size=50, keep=keep)
    methods = {
        "feddrift": (jfcl.feddrift(task, training, drift_threshold=threshold), None),
        "fedavg": (jfcl.fedavg(task, training), None),
        "ifca": (jfcl.ifca(task, training, num_clusters=clusters, weights="size"), 1),
        "oracle": (jfcl.oracle(task, training, cluster=feds[1].drift.cluster), 1),
    }
    rows = []
    for method in args.methods.split(","):
        algorithm, window = methods[method]
        options = {"num_rounds": 10 * args.rounds, "eval_every": 10 * args.rounds, "serve": "state"}
        history = jfcl.simulate(algorithm, feds[window], key=jax.random.key(seed), **options)
        found = jfcl.metrics.drift_results(history.records)
        means = {"stable": "next_stable_accuracy", "all": "next_accuracy"}
        row = {of: 100 * sum(found[metric]) / 10 for of, metric in means.items()}
        row |= {"adjusted_rand": sum(found["adjusted_rand"]) / 10, "models": history.records[-1].get("models")}
        row |= {"setting": f"{name}-{clusters}, {pattern}", "method": method, "seed": seed, "seconds": history.seconds}
        rows.append(row)
        print({of: round(value, 2) if isinstance(value, float) else value for of, value in row.items()}, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="of sine, circle, sea, mnist, with commas between; default: sine,circle")
    parser.add_argument("--methods", default="feddrift,fedavg,ifca,oracle", help="default: all")
    parser.add_argument("--rounds", type=int, default=100, help="rounds of a step")
    parser.add_argument("--hidden", type=int, help="units of the hidden layer; default: twice the inputs")
    parser.add_argument("--optimizer", default="paper", choices=("paper", "optax"), help="see above; default: paper")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--data-dir", help="of MNIST")
    args = parser.parse_args()
    names = (args.only or "sine,circle").split(",")
    rows = [row for name in names for seed in range(args.seeds) for row in rows_of(name, seed, args)]
    title = f"accuracy on the next step's data, {args.rounds} rounds a step"
    of = args.only.split(",") if args.only else ["optax"] * (args.optimizer == "optax")
    report("-".join(["drift", *of]), title, COLUMNS, rows)


if __name__ == "__main__":
    main()
