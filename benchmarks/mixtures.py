"""FedEM, FedRC and FedSoft on the problems that they were made for, with the figures that are known of them.

    python benchmarks/mixtures.py fedem      # the synthetic data of FedEM: local, FedAvg and FedEM
    python benchmarks/mixtures.py fedsoft    # the regression of FedSoft: what clients are found to mix
    python benchmarks/mixtures.py fedrc      # three concepts on small images of Fashion-MNIST: FedRC, FedEM, IFCA
    python benchmarks/mixtures.py rounds     # seconds of a round, of these and other methods, beside its passes

With `--write`, a call replaces its rows in results/mixtures-DEVICE.json.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import report, rows_there

import jfcl
from jfcl.core import Algorithm, Clients, Task
from jfcl.data.sources import load

Row = dict[str, Any]
COLUMNS = ["part", "method", "setting", "known", "accuracy", "correlation", "adjusted_rand", "label_purity"]
COLUMNS += ["seconds_per_round", "times_passes", "seconds"]


# FedEM: section 4.1 and appendix I.1.4 of the paper, as the released generator makes it.


def synthetic(seed: int, num_clients: int = 300, width: int = 150, of_test: int = 300) -> tuple[Clients, Clients]:
    """Returns clients whose labels come from mixtures of three linear models, and their test examples.

    The best single model is their mean, so that the accuracy of FedAvg follows from the angles between the models:
    69.7 % with a standard deviation of 1.1 over draws. The known figures are of one draw; seed 11 has such angles.
    """
    rng = np.random.default_rng(seed)
    models = rng.uniform(-1, 1, (3, width))
    sizes = np.minimum(50 + rng.lognormal(4, 2, num_clients).astype(int), 1000)
    shares = rng.dirichlet([0.4] * 3, num_clients)

    def draw(count: int, share: np.ndarray) -> dict[str, np.ndarray]:
        x = rng.uniform(-1, 1, (count, width)).astype(np.float32)
        of = rng.choice(3, count, p=share)
        score = (x * models[of]).sum(1) + rng.normal(0, 0.1, count)
        return {"x": x, "y": (score > 0).astype(np.int32)}

    train = [draw(n, share) for n, share in zip(sizes, shares, strict=True)]
    return jfcl.stack_clients(train), jfcl.stack_clients([draw(of_test, share) for share in shares])


def logistic(width: int) -> Task:
    """Returns the task of logistic regression: the logit of the second class; that of the first is 0."""

    def init(key: jax.Array) -> dict[str, jax.Array]:
        return {"w": jax.random.uniform(key, (width,), minval=-1, maxval=1) / width**0.5, "b": jnp.zeros(())}

    def apply(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        z = x @ params["w"] + params["b"]
        return jnp.stack([jnp.zeros_like(z), z], axis=1)

    return jfcl.models.task(init, apply, kind="classification")


def fedem(args: argparse.Namespace) -> Iterator[Row]:
    known = {"local": "65.5 ± 0.5", "fedavg": "71.7 ± 0.5", "fedem": "FedAvg + 8 or more"}
    train, test = synthetic(args.seed)
    optimizer = optax.chain(optax.add_decayed_weights(5e-4), optax.sgd(args.lr, momentum=0.9))
    training = jfcl.local_training(optimizer, num_epochs=1, batch_size=128, keep="everything")  # as in the code
    task = logistic(150)
    makes = {
        "local": jfcl.local_only(task, training),
        "fedavg": jfcl.fedavg(task, training),
        "fedem": jfcl.fedem(task, training, num_clusters=3),
    }
    for name, algorithm in makes.items():
        history, seconds = simulated(algorithm, train, args, test_clients=test)
        accuracy = 100 * float(np.mean(history.clients["accuracy"][0]))
        setting = f"300 clients, lr {args.lr}, {args.rounds} rounds, seed {args.seed}"
        yield {"method": name, "setting": setting, "known": known[name], "accuracy": accuracy, "seconds": seconds}


def simulated(algorithm: Algorithm, train: Clients, args: argparse.Namespace, **options: Any):
    """Returns the history of a run, and its seconds."""
    began = time.perf_counter()
    how = {"num_rounds": args.rounds, "eval_every": args.rounds, "test_clients": train} | options
    return jfcl.simulate(algorithm, train, key=jax.random.key(args.seed), **how), time.perf_counter() - began


# FedSoft: the linear regression of section 5.


def regression(seed: int, num_clients: int = 100, width: int = 10) -> tuple[Clients, np.ndarray]:
    """Returns clients with examples of two linear models, and the share of the first in each."""
    rng = np.random.default_rng(seed)
    models, mix = rng.normal(0, 10**0.5, (2, width)), rng.uniform(size=num_clients)
    parts = []
    for share in mix:
        count = rng.integers(100, 201)
        x = rng.normal(size=(count, width)).astype(np.float32)
        of = (np.arange(count) >= round(share * count)).astype(int)
        y = (x * models[of]).sum(1) + rng.normal(size=count)
        parts.append({"x": x, "y": y.astype(np.float32)})
    return jfcl.stack_clients(parts), mix


def fedsoft(args: argparse.Namespace) -> Iterator[Row]:
    train, mix = regression(args.seed)
    width = train.examples["x"].shape[2]
    task = jfcl.models.task(
        lambda key: {"w": jax.random.normal(key, (width,))}, lambda params, x: x @ params["w"], kind="regression"
    )
    training = jfcl.local_training(optax.adam(5e-3), num_epochs=10, batch_size=10, keep="everything")
    for selection in (30, None):
        algorithm = jfcl.fedsoft(task, training, num_clusters=2, lam=1.0, selection=selection)
        history, seconds = simulated(algorithm, train, args)
        share = np.asarray(jax.tree.leaves(history.state.share)[0]).reshape(-1, len(mix), 2)[0]
        correlation = abs(np.corrcoef(share[:, 0], mix)[0, 1])
        setting = f"100 clients, {args.rounds} rounds, selection {selection}, seed {args.seed}"
        found = {"known": "0.98 or more", "correlation": float(correlation), "seconds": seconds}
        yield {"method": "fedsoft", "setting": setting} | found


# FedRC: three concepts, with other shares of the labels for each client.


class SmallCNN(nn.Module):
    """Two convolutions and two dense layers, for images of 14 x 14 pixels."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for channels in (16, 32):
            x = nn.max_pool(
                nn.relu(nn.Conv(channels, (3, 3), conv_general_dilated=jfcl.models.conv)(x)), (2, 2), (2, 2)
            )
        return nn.Dense(10)(nn.relu(nn.Dense(64)(x.reshape(len(x), -1))))


def concepts(seed: int, num_clients: int = 36, size: int = 150, alpha: float = 1.0, data_dir: str | None = None):
    """Returns clients of Fashion-MNIST with `y`, `9 - y` or `y + 1` for a label, and the concept of each.

    Label shares are of Dir(alpha); half of the clients have images with noise. Pixels are averaged two by two.
    """
    rng = np.random.default_rng(seed)
    data = load("fashion_mnist", data_dir)
    x, y = data.train["x"].reshape(-1, 14, 2, 14, 2, 1).mean((2, 4)), data.train["y"]
    x = (x - x.mean()) / x.std()
    of_label = [list(rng.permutation(np.flatnonzero(y == c))) for c in range(10)]
    concept, parts = np.arange(num_clients) % 3, []
    for i in range(num_clients):
        labels = rng.choice(10, size, p=rng.dirichlet([alpha] * 10))
        rows = [of_label[c].pop() for c in labels]
        images = x[rows] + (0.5 * rng.normal(size=(size, 14, 14, 1)) if i % 2 else 0)
        shown = (labels, 9 - labels, (labels + 1) % 10)[concept[i]]
        parts.append({"x": images.astype(np.float32), "y": shown.astype(np.int32)})
    return jfcl.stack_clients(parts), concept


def fedrc(args: argparse.Namespace) -> Iterator[Row]:
    train, concept = concepts(args.seed, data_dir=args.data_dir)
    commonest = np.array([np.bincount(y, minlength=10).argmax() for y in train.examples["y"]])
    task = jfcl.models.classification(SmallCNN(), (14, 14, 1), 10)
    training = jfcl.local_training(optax.sgd(0.06, momentum=0.9), num_epochs=1, batch_size=30)
    for name in ("fedrc", "fedem", "ifca"):
        algorithm = getattr(jfcl, name)(task, training, num_clusters=3)
        history, seconds = simulated(algorithm, train, args, true_cluster=concept)
        of_labels = jfcl.metrics.cluster_recovery(found=history.clients["cluster"][0], true=commonest)
        row = {"adjusted_rand": float(history.records[-1]["adjusted_rand"]), "label_purity": of_labels["purity"]}
        setting = f"36 clients x 150 images of 14 x 14, {args.rounds} rounds, seed {args.seed}"
        known = {"fedrc": "the 3 concepts", "fedem": "not the concepts"}.get(name, "")
        yield {"method": name, "setting": setting, "known": known, "seconds": seconds} | row


# The cost of a round.


def rounds(args: argparse.Namespace) -> Iterator[Row]:
    """Times a round of each method, in turns, beside the trainings and the passes that it consists of.

    The rounds are those after the first one, in which StoCFL observes its clients and FedGroup trains its first models.
    """
    rng, count, size, k = np.random.default_rng(0), 60, 100, 3
    x, y = rng.normal(size=(count, size, 28, 28, 1)).astype(np.float32), rng.integers(0, 10, (count, size))
    clients = jax.tree.map(jnp.asarray, Clients({"x": x, "y": y.astype(np.int32)}, np.full(count, size, np.int32)))
    task = jfcl.models.classification(jfcl.models.MLP(10), (28, 28, 1), 10)._replace(dense_start=None)
    training = jfcl.local_training(optax.sgd(0.1), num_steps=5)
    makes = {"fedavg": jfcl.fedavg(task, training), "ifca": jfcl.ifca(task, training, num_clusters=k)}
    of_k_models = ("fedem", "fedrc", "fedsoft", "clove", "pacfl", "fedgroup")
    makes |= {name: getattr(jfcl, name)(task, training, num_clusters=k) for name in of_k_models}
    makes |= {
        "stocfl": jfcl.stocfl(task, training, max_clusters=k),
        "feddrift": jfcl.feddrift(task, training, max_models=k),
    }
    steps = {name: jax.jit(algorithm.step) for name, algorithm in makes.items()}
    states = {name: jax.jit(algorithm.init)(jax.random.key(0), clients) for name, algorithm in makes.items()}
    times: dict[str, list[float]] = {name: [] for name in makes}
    states = {name: step(jax.random.key(1), states[name], clients)[0] for name, step in steps.items()}
    jax.block_until_ready(states)
    for _ in range(args.rounds):
        for name, step in steps.items():
            began = time.perf_counter()
            jax.block_until_ready(step(jax.random.key(2), states[name], clients))
            times[name].append(time.perf_counter() - began)
    seconds = {name: float(np.median(each)) for name, each in times.items()}
    training_alone, passes = seconds["fedavg"], seconds["ifca"] - seconds["fedavg"]  # K forward passes
    sums = dict.fromkeys(("fedavg", "pacfl", "fedgroup", "feddrift"), training_alone)  # but for drift
    sums |= dict.fromkeys(("ifca", "fedsoft", "clove"), training_alone + passes)
    sums |= dict.fromkeys(("fedem", "fedrc"), k * training_alone + passes)
    sums["stocfl"] = 2 * training_alone  # of the cluster's model and of the common one
    for name, value in seconds.items():
        setting = f"MLP, {count} clients x {size} images, 5 full steps, K = {k}"
        yield {"method": name, "setting": setting, "seconds_per_round": value, "times_passes": value / sums[name]}


PARTS = {"fedem": (fedem, 200), "fedsoft": (fedsoft, 20), "fedrc": (fedrc, 40), "rounds": (rounds, 15)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, help="default: 200, 20, 40 and 15")
    parser.add_argument("--lr", type=float, default=0.1, help="of fedem")
    parser.add_argument("--data-dir")
    parser.add_argument("--write", action="store_true", help="to results/")
    args = parser.parse_args()
    part, default = PARTS[args.part]
    args.rounds = args.rounds or default
    rows = [{"part": args.part} | row for row in part(args)]
    kept = rows_there("mixtures") if args.write else []
    places = {(r["part"], r["method"], r["setting"]) for r in rows}
    kept = [r for r in kept if (r["part"], r["method"], r["setting"]) not in places]
    name = "mixtures" if args.write else None
    report(name, "Mixtures", COLUMNS, [*kept, *rows], "python benchmarks/mixtures.py PART")


if __name__ == "__main__":
    main()
