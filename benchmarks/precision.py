"""What TF32 and bfloat16 inside matrix products do to results: the same runs with each, on a machine that has neither.

    python benchmarks/precision.py               needs MNIST (JFCL_DATA_DIR)

Accelerators round the operands of a product, to 10 or 7 bits behind the binary point, and add up in float32. So is it
done here, in every product and convolution of training and its gradients. Products that ask for full precision, those
of the clustering kernels, are left as they are, as an accelerator leaves them. Accuracies in %, mean and spread over
seeds; `difference` is in percentage points from float32, and `same_cluster`, of methods that find clusters, the share
of clients with the cluster that they have in float32.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import jax
import numpy as np
from common import report
from jax import lax

from jfcl.experiments import Config, run, setups
from jfcl.simulation.results import finds_clusters

MNIST = {"dataset": "mnist", "examples_per_client": 200, "seeds": 3, "eval_every": 5}
CNN = {"model": "cnn_mnist", "local_epochs": 1, "batch_size": 20, "lr": 0.05}
SPLITS = {"relative": True, "eps_1": 0.4, "eps_2": 0.5, "min_rounds": 5}
CASES = {
    "IFCA, MLP, 100 clients, rotation": Config("ifca", clients=100, rounds=30, restarts=3, restart_rounds=3, **MNIST),
    "CFL, MLP, 20 clients, label swap": Config(
        "cfl", clients=20, heterogeneity="label_swap", rounds=30, **SPLITS, **MNIST
    ),
    "FedAvg, CNN, 20 clients": Config(
        "fedavg", clients=20, clusters=1, heterogeneity="none", rounds=20, **CNN, **MNIST
    ),
    "Federated-Clustering, MLP, 20 clients, private label": Config(
        "federated_clustering",
        clients=20,
        heterogeneity="private_label",
        quantile=0.2,
        batch_size=50,
        rounds=100,
        **MNIST,
    ),
}
BITS = {"float32": None, "tf32": (8, 10), "bfloat16": (8, 7)}  # of exponent and mantissa
MODEL = "bfloat16 model"


@contextlib.contextmanager
def rounded_operands(bits: tuple[int, int] | None) -> Iterator[None]:
    """Products and convolutions traced inside round their operands, unless they ask for the highest precision."""
    products = (lax.dot_general_p, lax.conv_general_dilated_p)
    if bits is None:
        yield
        return

    def rounding(bind):
        def call(lhs, rhs, **params):
            asked = params.get("precision")
            if asked not in (lax.Precision.HIGHEST, (lax.Precision.HIGHEST,) * 2):
                lhs, rhs = (lax.reduce_precision(x, *bits) if x.dtype == np.float32 else x for x in (lhs, rhs))
            return bind(lhs, rhs, **params)

        return call

    for primitive in products:
        primitive.bind = rounding(primitive.bind)  # shadows the class's
    try:
        yield
    finally:
        for primitive in products:
            del primitive.bind


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows: list[dict[str, Any]] = []
    for case, config in CASES.items():
        clusters, means, losses = [], [], []
        for name in (*BITS, MODEL):
            jax.clear_caches()  # what was traced without rounding is not to be used again
            started = time.perf_counter()
            on_gpu = mock.patch.object(setups, "make_task", partial(setups.make_task, target="gpu"))
            with on_gpu if name == MODEL else rounded_operands(BITS[name]):
                summary, history, _ = run(dataclasses.replace(config, precision=name.split()[0]))
            losses.append(np.array(history.clients["loss"]))
            if name != "float32" and np.array_equal(losses[0], losses[-1]):
                raise RuntimeError(f"{case}: rounding to {name} changed nothing, so it was not done")
            accuracy = np.array([100 * row["accuracy"] for row in summary["per_seed"]])
            row = {"case": case, "products": name, "accuracy": accuracy.mean(), "spread": accuracy.std(ddof=1)}
            clusters.append(np.asarray(history.clients["cluster"]))
            means.append(accuracy.mean())
            if name != "float32":
                row["difference"] = round(float(means[-1] - means[0]), 3)
                row["same_cluster"] = float((clusters[-1] == clusters[0]).mean()) if finds_clusters(history) else None
            rows.append(row)
            took = time.perf_counter() - started
            print(f"{case}, {name}: {accuracy.mean():.2f} % in {took:.0f} s", file=sys.stderr, flush=True)
    columns = ["case", "products", "accuracy", "spread", "difference", "same_cluster"]
    report("precision", "Operands of products rounded", columns, rows)


if __name__ == "__main__":
    main()
