"""The settings with a known answer of the methods in which the server assigns clients: CLoVE and StoCFL.

    python benchmarks/assigned.py                                     # CLoVE on linear regression: seconds
    python benchmarks/assigned.py --only rotations --data-dir DATA    # CLoVE on MNIST, four rotations
    python benchmarks/assigned.py --only stocfl --data-dir DATA       # StoCFL on MNIST, four rotations

Linear regression (CLoVE): 25 clients of five clusters, 900 training examples of 20 inputs each, true models of length 1
that are at least `gap` and at most five times that apart, noise of 1e-4. The models start with length 1. The first
assignment is by losses; a round is 25 epochs of Adam. Rotations (CLoVE): ten clients of each rotation with 500 images,
the CNN of the authors' code, one epoch of Adam with a step of 1e-2 a round. StoCFL: 100 clients of each rotation with
600 images, an MLP, cohorts of 40 until all clients have been seen.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import report
from sklearn.metrics import adjusted_rand_score

import jfcl
from benchmarks.papers.method_tables import CNN
from jfcl.core import Clients
from jfcl.methods.assigned import UNSEEN

COLUMNS = ["setting", "method", "seed", "round", "seen", "adjusted_rand", "clusters", "accuracy"]


def linear(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The adjusted Rand index after each of five rounds, of CLoVE (also of the roots of losses) and of IFCA."""
    rows, dim, k = [], 20, 5
    task = jfcl.models.task(
        lambda key: {"w": jax.random.normal(key, (dim,)) / jnp.linalg.norm(jax.random.normal(key, (dim,)))},
        lambda params, x: x @ params["w"],
        kind="regression",
    )
    training = jfcl.local_training(optax.adam(1e-3), num_epochs=25, batch_size=100)
    clove = partial(jfcl.clove, task, training, num_clusters=k, first="losses", stable_rounds=None)
    makes = {
        "clove": clove(),
        "clove, square roots": clove(square_root=True),
        "ifca": jfcl.ifca(task, training, num_clusters=k, weights="size"),
    }
    programs = {name: (jax.jit(algorithm.init), jax.jit(algorithm.step)) for name, algorithm in makes.items()}
    for gap in (1.0, 0.1):
        for seed in range(args.seeds):
            clients, cluster = regression(gap, seed, dim, k)
            for name, (init, step) in programs.items():
                key = jax.random.key(seed)
                state = init(jax.random.fold_in(key, 0), clients)
                for t in range(1, 6):
                    state, _ = step(jax.random.fold_in(key, t), state, clients)
                    found = np.asarray(state.cluster)
                    row = {"setting": f"linear, gap {gap}", "method": name, "seed": seed, "round": t}
                    rand = float(adjusted_rand_score(cluster, found))
                    rows.append(row | {"adjusted_rand": rand, "clusters": len(set(found.tolist()))})
    return rows


def regression(gap: float, seed: int, dim: int, k: int) -> tuple[Clients, np.ndarray]:
    """Returns the clients, and their clusters: each model is a step of `gap` from another, scaled to length 1."""
    rng = np.random.default_rng(seed)
    first = rng.normal(size=dim)
    models = [first / np.linalg.norm(first)]
    while len(models) < k:
        step = rng.normal(size=dim)
        new = models[rng.integers(len(models))] + gap * step / np.linalg.norm(step)
        new /= np.linalg.norm(new)
        apart = np.linalg.norm(np.array(models) - new, axis=1)
        if apart.min() >= gap and apart.max() <= 5 * gap:
            models.append(new)
    truth, cluster = np.array(models), np.arange(25) % k
    x = rng.normal(size=(25, 900, dim)).astype(np.float32)
    y = np.einsum("nmd,nd->nm", x, truth[cluster]) + 1e-4 * rng.normal(size=(25, 900))
    return Clients({"x": x, "y": y.astype(np.float32)}, np.full(25, 900, np.int32)), cluster


def rotations(args: argparse.Namespace) -> list[dict[str, Any]]:
    """CLoVE's test accuracy on MNIST: 40 clients of four rotations, 500 images each."""
    rows, about = [], {"num_clients": 40, "num_clusters": 4, "examples_per_client": 500}
    for seed in range(args.seeds):
        fed = jfcl.data.build("mnist", heterogeneity="rotation", data_dir=args.data_dir, seed=seed, **about)
        task = jfcl.models.classification(CNN(10), (28, 28, 1), 10)
        training = jfcl.local_training(optax.adam(1e-2), num_epochs=1, batch_size=100)
        algorithm = jfcl.clove(task, training, num_clusters=4)
        rounds = args.rounds or 100
        history = jfcl.simulate(
            algorithm, fed.train, key=jax.random.key(seed), num_rounds=rounds, test_clients=fed.test,
            true_cluster=fed.cluster, eval_every=max(rounds // 10, 1),
        )  # fmt: skip
        for record in history.records:
            row = {"setting": "MNIST rotations", "method": "clove", "seed": seed, "round": record["round"]}
            row |= {"adjusted_rand": record["adjusted_rand"], "clusters": record["clusters_in_use"]}
            rows.append(row | {"accuracy": 100 * record["accuracy"]})
    return rows


def stocfl(args: argparse.Namespace) -> list[dict[str, Any]]:
    """StoCFL's clusters once all clients were seen: MNIST, 100 clients of each of four rotations."""
    rows, about = [], {"num_clients": 400, "num_clusters": 4, "examples_per_client": 600}
    for seed in range(args.seeds):
        fed = jfcl.data.build("mnist", heterogeneity="rotation", data_dir=args.data_dir, seed=seed, **about)
        task = jfcl.models.classification(jfcl.models.MLP(10, hidden=(args.hidden,)), (28, 28, 1), 10)
        # What the clusters are does not depend on the training.
        training = jfcl.local_training(optax.sgd(0.1), num_steps=1)
        algorithm = jfcl.stocfl(task, training, merge_threshold=args.threshold, max_clusters=80, cohort=40)
        step, clients = jax.jit(algorithm.step), jax.device_put(fed.train)
        state, t = jax.jit(algorithm.init)(jax.random.key(seed), clients), 0
        while t < 150 and not (np.asarray(state.unchanged) != UNSEEN).all():
            state, metrics = step(jax.random.fold_in(jax.random.key(seed), t), state, clients)
            t += 1
            if t % 10 == 0 or (np.asarray(state.unchanged) != UNSEEN).all():
                seen = np.asarray(state.unchanged) != UNSEEN
                rand = float(adjusted_rand_score(fed.cluster[seen], np.asarray(algorithm.serve(state, None).to)[seen]))
                row = {"setting": f"MNIST rotations, hidden {args.hidden}", "method": f"stocfl {args.threshold}"}
                row |= {"seed": seed, "round": t, "adjusted_rand": rand, "seen": int(seen.sum())}
                rows.append(row | {"clusters": int(metrics["clusters_found"])})
    return rows


SECTIONS = {"linear": linear, "rotations": rotations, "stocfl": stocfl}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SECTIONS, default="linear")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, help="of the rotations [100]")
    parser.add_argument("--threshold", type=float, default=0.3, help="of StoCFL")
    parser.add_argument("--hidden", type=int, default=2048, help="width of StoCFL's MLP")
    parser.add_argument("--data-dir")
    args = parser.parse_args()
    rows = SECTIONS[args.only](args)
    report(f"assigned-{args.only}", "Clients assigned by the server", COLUMNS, rows)


if __name__ == "__main__":
    main()
