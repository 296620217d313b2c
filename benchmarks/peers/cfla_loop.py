"""Rounds of IFCA or FL+HC with CFLA 1.0.4: its servers and clients, in one process.

Called by the benchmarks with a case as JSON; prints one JSON line (see job.py). Has an environment of its own (see
`make peers`). A round of FL+HC is one of FedAvg in each cluster; what comes before the clustering is not timed.

The rest of the job that CFLA has is another one:

* Its IFCA begins with `K` equal models, between which the order of a client's batches decides, by rounding. Here its
  server is given the models that all libraries start from.
* Its FeSEM begins with `K` equal models, too, of which the first is the nearest for every client: it is FedAvg. With
  different models no client would change its cluster; jfcl begins with k-means, as the paper.
* Its FedAvg trains with Adam and a decay of the weights; there is no choice.
"""

import copy
import json
import tempfile
import time

import job
import numpy as np
import torch
from cfla import __version__ as version
from cfla.framework.client.client_flhc import ClientFLHC
from cfla.framework.client.client_ifca import ClientIFCA
from cfla.framework.server.server_flhc import ServerFLHC
from cfla.framework.server.server_ifca import ServerIFCA
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch_loop import DEVICE, as_tensors, choose_threads, make_model, parameters


def main(case: dict, data: job.Data):
    n, m, k = case["clients"], case["examples"], case["clusters"]
    batch = case["batch"] or m
    epochs, left = divmod(case["steps"] * batch, m)
    if left:
        raise ValueError(f"CFLA does whole passes over the examples; got {case}")
    torch.manual_seed(0)
    x, y = as_tensors(json.dumps(case))
    threads = choose_threads(case, x[0], y[0])

    class Net(torch.nn.Sequential):  # CFLA makes its copies from the class alone
        def __init__(self, state=None):
            super().__init__(*make_model(case["model"]))
            if state is not None:
                self.load_state_dict(state)

    first = [make_model(case["model"], model).state_dict() for model in data.models]
    options = {"device": str(DEVICE), "fraction": 1.0, "train_fraction": 0.5, "batch_size": batch}
    options |= {"local_epochs": epochs, "learning_rate": case["lr"], "num_clusters": k, "n_clusters": k, "rounds": 1}
    options |= {"initial_rounds": 1, "cluster_rounds": 0, "distance_threshold": None, "clustering_metric": "euclidean"}
    options |= dict.fromkeys(("optimizer", "criterion"))  # not used
    with tempfile.TemporaryDirectory() as folder:
        options["output_dir"] = folder
        make_server, make_client = {"ifca": (ServerIFCA, ClientIFCA), "flhc": (ServerFLHC, ClientFLHC)}[case["method"]]
        server, clients = make_server(Net(first[0]), None, options), []
        for i in range(n):
            examples = TensorDataset(x[i], y[i])
            clients.append(make_client(i, examples, options, folder))
            # It tests a client before and after its training: on one image here.
            clients[i].train_loader = DataLoader(examples, batch_size=batch, shuffle=True)
            clients[i].test_loader = DataLoader(Subset(examples, [0]))
        server.set_clients(clients)
        if case["method"] == "ifca":
            server.cluster_centers = first
        else:
            server.pre_learning()
            updates = [client.train(server.global_model)[1] for client in clients]
            clusters = [*server.hierarchical_clustering(np.stack(updates)).values()]
            nets = [copy.deepcopy(server.global_model) for _ in clusters]

        seconds = []
        for _ in range(case["rounds"]):
            started = time.perf_counter()
            if case["method"] == "ifca":
                server.train(verbose=False)
            else:
                for net, members in zip(nets, clusters, strict=True):
                    server.federated_learning(net, members)
            seconds.append(time.perf_counter() - started)
    if case["method"] == "ifca":
        nets = [Net(state) for state in server.cluster_centers]
    more = {"versions": {"cfla": version, "torch": torch.__version__}, "threads": threads}
    return seconds, [parameters(net) for net in nets], more


if __name__ == "__main__":
    job.run(main)
