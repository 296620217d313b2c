"""Rounds of FedAvg with pfl-research 0.6.0: its simulated backend on a PyTorch model, in one process.

Called by the benchmarks with a case as JSON; prints one JSON line (see job.py). Has an environment of its own (see
`make peers`). It deals out batches in the order of the examples.
"""

import itertools
import json
import time

import job
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch_loop import as_tensors, choose_threads, make_model, parameters


class Net(torch.nn.Module):
    """What pfl asks of a model: its loss, and metrics."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def loss(self, x, y):
        return torch.nn.functional.cross_entropy(self.net(x), y)

    def metrics(self, x, y):
        with torch.no_grad():
            return {"loss": Weighted(self.loss(x, y).item() * len(y), len(y))}


class Clock(TrainingProcessCallback):
    """Notes when training began and every round ended."""

    def __init__(self):
        self.times = []

    def on_train_begin(self, *, model):
        self.times.append(time.perf_counter())
        return Metrics()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        self.times.append(time.perf_counter())
        return False, Metrics()


def main(case: dict, data: job.Data):
    if case["clusters"] > 1:
        raise ValueError("pfl has no method with several models")
    n, m = case["clients"], case["examples"]
    passes, rest = divmod(case["steps"] * (case["batch"] or m), m)
    if rest and passes:
        raise ValueError(f"pfl does whole passes over the examples, or less than one; got {case}")
    x, y = as_tensors(json.dumps(case))
    datasets = [PyTorchTensorDataset((x[i], y[i]), user_id=str(i)) for i in range(n)]
    in_turn = itertools.cycle(range(n))
    population = FederatedDataset(datasets.__getitem__, lambda: next(in_turn))
    threads = choose_threads(case, x[0], y[0])
    net = make_model(case["model"], data.models[0])
    module = Net(net)
    central = torch.optim.SGD(module.parameters(), lr=1.0)
    model = PyTorchModel(module, local_optimizer_create=torch.optim.SGD, central_optimizer=central)
    clock = Clock()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=case["rounds"],
            evaluation_frequency=case["rounds"] + 1,  # in the first round all the same
            train_cohort_size=n,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=population, val_data=population),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=passes or None,
            local_num_steps=None if passes else case["steps"],
            local_learning_rate=case["lr"],
            local_batch_size=case["batch"] or m,
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[clock],
        send_metrics_to_platform=False,
    )
    seconds = [b - a for a, b in itertools.pairwise(clock.times)]
    versions = {"pfl": "0.6.0", "torch": torch.__version__}
    return seconds, [parameters(net)], {"versions": versions, "threads": threads}


if __name__ == "__main__":
    job.run(main)
