"""Rounds of FedAvg or IFCA with BlazeFL 3 or 2.0.3: its pool of threads, one per core, that train clients.

Called by the benchmarks with a case as JSON; prints one JSON line (see job.py). Has an environment of its own (see
`make peers`). IFCA is not BlazeFL's: the server sends all models, a client picks one, the server averages by choice.
"""

import json
import os
import sys
import threading
import time
from dataclasses import dataclass
from importlib.metadata import version

import job
import numpy as np
import torch
from blazefl.core import BaseServerHandler, ThreadPoolClientTrainer, deserialize_model, serialize_model
from torch_loop import DEVICE, as_tensors, make_model, parameters, train


@dataclass
class Down:
    """What clients are sent: all models, each a flat tensor."""

    models: list[torch.Tensor]


@dataclass
class Up:
    """What a client sends: its choice, and its trained model."""

    cluster: int
    model: torch.Tensor


class Clients(ThreadPoolClientTrainer[Up, Down]):
    """Trains clients in threads, each with one network of its own."""

    def __init__(self, case: dict, x: torch.Tensor, y: torch.Tensor):
        self.case, self.x, self.y = case, x, y
        self.num_parallels, self.device, self.device_count = os.cpu_count(), str(DEVICE), torch.cuda.device_count()
        self.cache: list[Up] = []
        self.stop_event, self.of_thread = threading.Event(), threading.local()

    def worker(self, cid: int, device: str, payload: Down, stop_event: threading.Event) -> Up:
        if not hasattr(self.of_thread, "net"):
            self.of_thread.net = make_model(self.case["model"])
        net, x, y, chosen = self.of_thread.net, self.x[cid], self.y[cid], 0
        if len(payload.models) > 1:
            losses = []
            with torch.no_grad():
                for model in payload.models:
                    deserialize_model(net, model)
                    losses.append(torch.nn.functional.cross_entropy(net(x), y).item())
            chosen = int(np.argmin(losses))
        deserialize_model(net, payload.models[chosen])
        train(net, x, y, self.case)
        return Up(chosen, serialize_model(net))

    def uplink_package(self) -> list[Up]:
        package, self.cache = self.cache, []
        return package


class Server(BaseServerHandler[Up, Down]):
    """Averages by the cluster that clients chose; a model that none chose stays."""

    def __init__(self, case: dict, models: list[torch.Tensor]):
        self.case, self.models, self.cache, self.round = case, models, [], 0

    def sample_clients(self) -> list[int]:
        return list(range(self.case["clients"]))

    def is_stopped(self) -> bool:
        return self.round >= self.case["rounds"]

    def downlink_package(self) -> Down:
        return Down(self.models)

    def load(self, payload: Up) -> bool:
        self.cache.append(payload)
        complete = len(self.cache) == self.case["clients"]
        if complete:
            self.global_update(self.cache)
            self.cache = []
            self.round += 1
        return complete

    def global_update(self, buffer: list[Up]) -> None:
        for k in range(len(self.models)):
            trained = [up.model for up in buffer if up.cluster == k]
            if trained:
                self.models[k] = torch.zeros_like(trained[0])
                for model in trained:  # as BlazeFL's FedAvg does; a stack of all takes ten times as long
                    self.models[k].add_(model, alpha=1 / len(trained))


def main(case: dict, data: job.Data):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    nets = [make_model(case["model"], model) for model in data.models]
    clients, server = Clients(case, *as_tensors(json.dumps(case))), Server(case, [serialize_model(net) for net in nets])
    seconds = []
    while not server.is_stopped():
        started = time.perf_counter()
        clients.local_process(server.downlink_package(), server.sample_clients())
        for package in clients.uplink_package():
            server.load(package)
        seconds.append(time.perf_counter() - started)
    for net, model in zip(nets, server.models, strict=True):
        deserialize_model(net, model)
    versions = {name: version(name) for name in ("blazefl", "torch")} | {"python": sys.version.split(" (")[0]}
    return seconds, [parameters(net) for net in nets], {"versions": versions, "threads": clients.num_parallels}


if __name__ == "__main__":
    job.run(main)
