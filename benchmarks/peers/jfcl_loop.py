"""Rounds of FedAvg, IFCA or FL+HC with jfcl: one compiled round, called for every round.

Called by the benchmarks with a case as JSON; prints one JSON line (see job.py). Besides what job.py names, a case has
`mapping`, a name in `jfcl.experiments.bench.MAPPINGS`, `devices`, how many the CPU is made to show, and maybe `options`
of the method. The first round compiles.
"""

import time

import jax
import jax.numpy as jnp
import job

NAMES = {"mlp": ("Dense_0", "Dense_1"), "cnn_mnist": ("Conv_0", "Conv_1", "Dense_0", "Dense_1")}


def main(case: dict, data: job.Data):
    jax.config.update("jax_num_cpu_devices", case["devices"])  # before jax looks for devices
    import jfcl
    from jfcl.experiments import bench

    names = NAMES[case["model"]]
    stacked = [
        {"kernel": jnp.stack(kernels), "bias": jnp.stack(biases)}
        for kernels, biases in (zip(*copies, strict=True) for copies in zip(*data.models, strict=True))
    ]
    work = bench.Case(**{name: case[name] for name in bench.Case._fields})
    client_axis = bench.MAPPINGS[case["mapping"]]()
    first = dict(zip(names, stacked, strict=True))
    if case["method"] == "flhc":
        first = jax.tree.map(lambda p: p[0], first)
    algorithm = bench.make_algorithm(work, client_axis, init_params=first, **case.get("options", {}))
    clients = jfcl.Clients({"x": data.x, "y": data.y}, jnp.full(case["clients"], case["examples"], jnp.int32))
    clients = jfcl.mapping.place(client_axis, clients)
    state = jax.jit(algorithm.init)(jax.random.key(0), clients)
    step = jax.jit(algorithm.step)
    seconds = []
    for t in range(case["rounds"]):
        started = time.perf_counter()
        state, _ = jax.block_until_ready(step(jax.random.fold_in(jax.random.key(1), t), state, clients))
        seconds.append(time.perf_counter() - started)
    params = jax.device_get(state.params)
    models = [[(params[name]["kernel"][k], params[name]["bias"][k]) for name in names] for k in range(case["clusters"])]
    return seconds, models, {"versions": {"jfcl": jfcl.__version__, "jax": jax.__version__}}


if __name__ == "__main__":
    job.run(main)
