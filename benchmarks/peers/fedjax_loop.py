"""Rounds of FedAvg or HypCluster with FedJAX 0.0.17 (its default backend, a jitted loop per client).

Called by the benchmarks with a case as JSON; prints one JSON line (see job.py). Has an environment of its own (see
`make peers`). The first round compiles. HypCluster is IFCA whose clients count by their data, alike where all have as
many.
"""

import time

import fedjax
import jax
import job
import numpy as np
from fedjax.algorithms import fed_avg, hyp_cluster


def apply(params, x):
    """The networks of `jfcl.models`, on a job's models."""
    for kernel, bias in params:
        if kernel.ndim == 4:
            x = jax.lax.conv_general_dilated(
                x, kernel, (1, 1), ((1, 1), (1, 1)), dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.relu(x + bias)
            x = jax.lax.reduce_window(x, -np.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        else:
            x = x.reshape(len(x), -1) @ kernel + bias
            x = jax.nn.relu(x) if bias is not params[-1][1] else x
    return x


def per_example_loss(params, batch, rng):
    """`[B]`: cross-entropy."""
    values = jax.nn.log_softmax(apply(params, batch["x"]))
    return -jax.numpy.take_along_axis(values, batch["y"][:, None], axis=1)[:, 0]


def main(case: dict, data: job.Data):
    n, m = case["clients"], case["examples"]
    # By default it would stop after one pass.
    hparams = fedjax.ShuffleRepeatBatchHParams(batch_size=case["batch"] or m, num_epochs=None, num_steps=case["steps"])
    client, server = fedjax.optimizers.sgd(case["lr"]), fedjax.optimizers.sgd(1.0)
    models = jax.tree_util.tree_map(jax.numpy.asarray, data.models)
    if case["clusters"] == 1:
        grad = jax.grad(lambda params, batch, rng: per_example_loss(params, batch, rng).mean())
        algorithm = fed_avg.federated_averaging(grad, client, server, hparams)
        state, of = algorithm.init(models[0]), lambda state: [state.params]
    else:
        whole = fedjax.PaddedBatchHParams(batch_size=m)
        algorithm = hyp_cluster.hyp_cluster(per_example_loss, client, server, whole, hparams)
        state, of = algorithm.init(models), lambda state: state.cluster_params
    keys = jax.random.split(jax.random.PRNGKey(1), n)
    clients = [(i, fedjax.ClientDataset({"x": data.x[i], "y": data.y[i]}), keys[i]) for i in range(n)]
    seconds = []
    for _ in range(case["rounds"]):
        started = time.perf_counter()
        state, _ = algorithm.apply(state, clients)
        jax.block_until_ready(of(state))
        seconds.append(time.perf_counter() - started)
    versions = {"fedjax": "0.0.17", "jax": jax.__version__}
    return seconds, jax.device_get(of(state)), {"versions": versions}


if __name__ == "__main__":
    job.run(main)
