"""jfcl: clustered federated learning, all clients in one compiled program.

state = algorithm.init(key, clients)
state, metrics = algorithm.step(key, state, clients)
"""

import sys

from jfcl import data, kernels, mapping, models, testing
from jfcl._version import __version__
from jfcl.analysis import metrics, plots
from jfcl.analysis.metrics import cluster_recovery, evaluate
from jfcl.core import Adversary, Algorithm, Clients, DenseStart, Entries, Served, Task
from jfcl.core.stacking import concatenate_clients, stack_clients
from jfcl.data.store import Population
from jfcl.experiments.shifts import shifts
from jfcl.kernels import theory
from jfcl.mapping import hosts
from jfcl.mapping.axis import auto, chunked, client_mesh, pmapped, sharded, use_all_cores
from jfcl.methods import (
    byzantine_cfl,
    cfl,
    cfl_gp,
    clove,
    ditto,
    fedavg,
    fedbn,
    feddrift,
    fedem,
    federated_clustering,
    fedgroup,
    fedgwc,
    fedper,
    fedrc,
    fedrep,
    fedsoft,
    fesem,
    flhc,
    flux,
    hypcluster,
    ifca,
    knn_per,
    lg_fedavg,
    local_only,
    momentum_clustering,
    myopic_clustering,
    one_shot,
    oracle,
    pacfl,
    stocfl,
    with_restarts,
)
from jfcl.methods.cfl import parameter_tree
from jfcl.methods.cfl.parameter_tree import assign_newcomer
from jfcl.planning import targets
from jfcl.planning.plan import plan
from jfcl.robust import attacks, privacy
from jfcl.simulation import DivergedError, History, Sweep, callbacks, clear_programs, rollout, simulate, sweep
from jfcl.training import augment
from jfcl.training.local import local_training

# Import paths of users, whatever folder a module is in.
for _module in (attacks, augment, callbacks, hosts, mapping, metrics, parameter_tree, plots, privacy, targets, theory):
    sys.modules[f"jfcl.{_module.__name__.rpartition('.')[2]}"] = _module
