"""Rounds of FedAvg or IFCA with Flower's simulation engine: a ServerApp, a ClientApp, and Ray's actors beneath.

Called by the benchmarks with a case as JSON; prints one JSON line (see job.py). Has an environment of its own (see
`make peers`). One actor per core with one PyTorch thread each. IFCA is not Flower's: the ClientApp is sent all models
and picks one, the strategy averages by choice.
"""

import itertools
import json
import os
import sys
import time
import warnings
from importlib.metadata import version

os.environ.update(RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0", FLWR_TELEMETRY_ENABLED="0", RAY_USAGE_STATS_ENABLED="0")

import flwr
import job
import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch_loop import as_tensors, make_model, parameters, train


def make_client_app(text: str) -> ClientApp:
    """Trains the client named by its node's partition, on examples that its actor loaded once."""
    app = ClientApp()

    @app.train()
    def _(message: Message, context: Context):
        torch.set_num_threads(1)
        case = json.loads(text)
        x, y = as_tensors(text)  # of the module torch_loop, which the actor keeps
        x, y = (values[context.node_config["partition-id"]] for values in (x, y))
        given = message.content["arrays"].to_torch_state_dict()
        net, chosen = make_model(case["model"]), 0
        if case["clusters"] > 1:
            losses = []
            with torch.no_grad():
                for k in range(case["clusters"]):
                    net.load_state_dict(of_model(given, k))
                    losses.append(torch.nn.functional.cross_entropy(net(x), y).item())
            chosen = int(np.argmin(losses))
        net.load_state_dict(of_model(given, chosen) if case["clusters"] > 1 else given)
        train(net, x, y, case)
        content = {
            "arrays": ArrayRecord(net.state_dict()),
            "metrics": MetricRecord({"num-examples": len(y), "cluster": chosen}),
        }
        return Message(content=RecordDict(content), reply_to=message)

    return app


def of_model(arrays: dict, k: int) -> dict:
    """Model `k` of several in one record."""
    return {name.split("/")[1]: value for name, value in arrays.items() if name.startswith(f"{k}/")}


class IFCA(FedAvg):
    """Averages by the cluster that clients chose; a model that none chose stays."""

    def configure_train(self, server_round, arrays, config, grid):
        self.last = arrays.to_torch_state_dict()
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round, replies):
        found = {}
        for reply in replies:
            k = reply.content["metrics"]["cluster"]
            found.setdefault(k, []).append(reply.content["arrays"].to_torch_state_dict())
        new = dict(self.last)
        for k, models in found.items():
            for name in models[0]:
                new[f"{k}/{name}"] = torch.stack([model[name] for model in models]).mean(dim=0)
        return ArrayRecord(new), None


def main(case: dict, data: job.Data):
    nets = [make_model(case["model"], model) for model in data.models]
    times, final = [], {}
    app = ServerApp()

    @app.main()
    def _(grid: Grid, context: Context):
        if len(nets) == 1:
            kind, start = FedAvg, nets[0].state_dict()
        else:
            states = enumerate(net.state_dict() for net in nets)
            kind, start = IFCA, {f"{k}/{name}": value for k, state in states for name, value in state.items()}
        everyone = dict(min_train_nodes=case["clients"], min_available_nodes=case["clients"])  # from the first round on
        strategy = kind(fraction_train=1.0, fraction_evaluate=0.0, **everyone)

        def note(_, arrays):
            times.append(time.perf_counter())
            final["arrays"] = arrays

        strategy.start(grid=grid, initial_arrays=ArrayRecord(start), num_rounds=case["rounds"], evaluate_fn=note)

    actors = os.cpu_count()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        flwr.simulation.run_simulation(
            server_app=app,
            client_app=make_client_app(sys.argv[1]),
            num_supernodes=case["clients"],
            backend_config={
                "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
                "init_args": {"num_cpus": actors, "include_dashboard": False, "log_to_driver": False},
            },
        )
    arrays = final["arrays"].to_torch_state_dict()
    for k, net in enumerate(nets):
        net.load_state_dict(arrays if len(nets) == 1 else of_model(arrays, k))
    seconds = [b - a for a, b in itertools.pairwise(times)]
    versions = {name: version(name) for name in ("flwr", "ray", "torch")}
    return seconds, [parameters(net) for net in nets], {"versions": versions, "threads": actors}


if __name__ == "__main__":
    job.run(main)
