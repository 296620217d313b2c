"""CFL where most clients have few examples, and from FedAvg's optimum: `python benchmarks/cfl_small_clients.py`.

1,000 clients of four clusters, a linear regression of 10 unknowns each, sizes drawn from a power law (464 clients have
one example). A row has the sizes of the clusters found, and the adjusted Rand index among the clients with 20 examples
or more and among all.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import report

import jfcl
from jfcl.analysis.metrics import cluster_recovery

DIM, LARGEST, ENOUGH = 10, 200, 20


def problem(num_clients: int = 1000, *, seed: int = 51, num_clusters: int = 4):
    """`(task, clients, cluster)`: `y = <x, theta_k> + noise` with `N(0, 1)` inputs and truths; Zipf sizes up to 200."""
    rng = np.random.default_rng(seed)
    size = np.minimum(rng.zipf(1.65, num_clients), LARGEST).astype(np.int32)
    cluster = rng.integers(0, num_clusters, num_clients)
    theta = rng.standard_normal((num_clusters, DIM))
    x = rng.standard_normal((num_clients, LARGEST, DIM))
    y = np.einsum("nmd,nd->nm", x, theta[cluster]) + 0.1 * rng.standard_normal(x.shape[:2])
    clients = jfcl.Clients({"x": x.astype(np.float32), "y": y.astype(np.float32)}, size)
    task = jfcl.models.task(lambda key: {"w": jnp.zeros(DIM)}, lambda p, x: x @ p["w"], kind="regression")
    return task, clients, cluster


def main() -> None:
    """Runs, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args()
    task, clients, cluster = problem()
    large = np.flatnonzero(clients.size >= ENOUGH)
    print(f"{len(cluster)} clients, {(clients.size == 1).sum()} with one example, {len(large)} with {ENOUGH} or more")
    training, rows = jfcl.local_training(optax.sgd(0.05), num_steps=5), []

    def run(name, algorithm, clients=clients, cluster=cluster):
        state, metrics = jax.jit(
            lambda: jfcl.rollout(algorithm, clients, key=jax.random.key(0), num_rounds=args.rounds)
        )()
        found, big = np.asarray(state.cluster), clients.size >= ENOUGH
        sizes = np.bincount(found)[np.asarray(getattr(state, "active", np.ones(1, bool)))[: found.max() + 1]]
        rand = [cluster_recovery(found[who], cluster[who])["adjusted_rand"] for who in (big, big | True)]
        splits = (np.flatnonzero((np.asarray(metrics.get("split_from", [[-1]])) >= 0).any(axis=1)) + 1).tolist()
        found = {"sizes": sizes.tolist(), "splits in rounds": splits, "rand, large": rand[0], "rand, all": rand[1]}
        rows.append({"options": name} | found)
        return state

    run("default", jfcl.cfl(task, training))
    few = jax.tree.map(lambda x: x[large], clients)
    run("large clients alone", jfcl.cfl(task, training), few, cluster[large])
    run("min_size=20", jfcl.cfl(task, training, min_size=20))
    run("min_examples=20", jfcl.cfl(task, training, min_examples=20))
    fedavg = run("FedAvg", jfcl.fedavg(task, training))
    warm = {"init_params": jax.tree.map(lambda p: p[0], fedavg.params)}
    run("min_examples=20, from FedAvg's optimum", jfcl.cfl(task, training, min_examples=20, **warm))
    run("default, from FedAvg's optimum", jfcl.cfl(task, training, **warm))
    run("gradients", jfcl.cfl(task, training, min_examples=20, similarity="gradients"))
    run("cohort=200", jfcl.cfl(task, training, min_examples=20, cohort=200))
    report("cfl-small-clients", "CFL where most clients have few examples", list(rows[0]), rows)


if __name__ == "__main__":
    main()
