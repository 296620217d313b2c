"""jfcl: clustered federated learning, all clients in one compiled program.

state = algorithm.init(key, clients)
state, metrics = algorithm.step(key, state, clients)
"""

from jfcl import attacks, augment, data, hosts, kernels, mapping, models, parameter_tree, plots, testing, theory
from jfcl._version import __version__
from jfcl.algorithms import (
    byzantine_cfl,
    cfl,
    ditto,
    fedavg,
    federated_clustering,
    fesem,
    flhc,
    hypcluster,
    ifca,
    knn_per,
    local_only,
    momentum_clustering,
    myopic_clustering,
    one_shot,
    oracle,
    with_restarts,
)
from jfcl.core import Adversary, Algorithm, Clients, DenseStart, Task, stack_clients
from jfcl.local import local_training
from jfcl.mapping import auto, chunked, client_mesh, pmapped, sharded
from jfcl.metrics import cluster_recovery, evaluate
from jfcl.parameter_tree import assign_newcomer
from jfcl.population import PopulationHistory, simulate_population
from jfcl.programs import clear_programs
from jfcl.simulation import History, rollout, simulate
from jfcl.watch import DivergedError

__all__ = [
    "Adversary",
    "Algorithm",
    "Clients",
    "DenseStart",
    "DivergedError",
    "History",
    "PopulationHistory",
    "Task",
    "__version__",
    "assign_newcomer",
    "attacks",
    "augment",
    "auto",
    "byzantine_cfl",
    "cfl",
    "chunked",
    "clear_programs",
    "client_mesh",
    "cluster_recovery",
    "data",
    "ditto",
    "evaluate",
    "fedavg",
    "federated_clustering",
    "fesem",
    "flhc",
    "hosts",
    "hypcluster",
    "ifca",
    "kernels",
    "knn_per",
    "local_only",
    "local_training",
    "mapping",
    "models",
    "momentum_clustering",
    "myopic_clustering",
    "one_shot",
    "oracle",
    "parameter_tree",
    "plots",
    "pmapped",
    "rollout",
    "sharded",
    "simulate",
    "simulate_population",
    "stack_clients",
    "testing",
    "theory",
    "with_restarts",
]
