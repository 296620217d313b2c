"""A FedAvg round with FedJAX 0.0.17 (its default backend, a jitted loop per client).

Called by the benchmarks with a case as JSON; prints one JSON line. Has an environment of its own (see `make peers`).
"""

import json
import sys
import time

import fedjax
import jax
import jax.numpy as jnp
import numpy as np
from fedjax.algorithms import fed_avg


def make_model(name: str):
    """`(init, apply)` of the same networks as `jfcl.models`."""

    def dense(key, inputs, outputs):
        return {"w": jax.random.normal(key, (inputs, outputs)) / inputs**0.5, "b": jnp.zeros(outputs)}

    def conv(x, layer):
        x = jax.lax.conv_general_dilated(
            x, layer["w"], (1, 1), ((1, 1), (1, 1)), dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x + layer["b"])
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    def init(key):
        keys = jax.random.split(key, 4)
        if name == "mlp":
            return [dense(keys[0], 784, 200), dense(keys[1], 200, 10)]
        filters = [
            {"w": jax.random.normal(k, (5, 5, c, 32)) / (25 * c) ** 0.5, "b": jnp.zeros(32)}
            for k, c in zip(keys[:2], (1, 32), strict=True)
        ]
        return [*filters, dense(keys[2], 800, 256), dense(keys[3], 256, 10)]

    def apply(params, x):
        for layer in params[:-2]:
            x = conv(x, layer)
        x = jax.nn.relu(x.reshape(len(x), -1) @ params[-2]["w"] + params[-2]["b"])
        return x @ params[-1]["w"] + params[-1]["b"]

    return init, apply


def main(case: dict) -> dict:
    """Seconds of each round after the first, which compiles."""
    n, m = case["clients"], case["examples"]
    rng = np.random.default_rng(0)
    x = rng.random((n, m, 28, 28, 1), np.float32)
    y = rng.integers(0, 10, (n, m))
    init, apply = make_model(case["model"])

    def loss(params, batch, rng):
        logits = jax.nn.log_softmax(apply(params, batch["x"]))
        return -jnp.take_along_axis(logits, batch["y"][:, None], axis=1).mean()

    hparams = fedjax.ShuffleRepeatBatchHParams(batch_size=case["batch"] or m, num_steps=case["steps"])
    algorithm = fed_avg.federated_averaging(
        jax.grad(loss), fedjax.optimizers.sgd(0.01), fedjax.optimizers.sgd(1.0), hparams
    )
    state = algorithm.init(init(jax.random.PRNGKey(0)))
    keys = jax.random.split(jax.random.PRNGKey(1), n)
    clients = [(i, fedjax.ClientDataset({"x": x[i], "y": y[i]}), keys[i]) for i in range(n)]
    seconds = []
    for _ in range(case["rounds"] + 1):
        started = time.perf_counter()
        state, _ = algorithm.apply(state, clients)
        jax.block_until_ready(state.params)
        seconds.append(time.perf_counter() - started)
    return {"seconds": seconds[1:], "versions": {"fedjax": "0.0.17", "jax": jax.__version__}}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
