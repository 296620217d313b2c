"""One file per method: its state, its factory. Adding one is that file and a line in `METHODS`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import NamedTuple

from jfcl.algorithms.byzantine_cfl import byzantine_cfl
from jfcl.algorithms.cfl import cfl
from jfcl.algorithms.fedavg import fedavg
from jfcl.algorithms.ifca import ifca
from jfcl.algorithms.local_only import local_only
from jfcl.algorithms.oracle import oracle
from jfcl.algorithms.restarts import with_restarts
from jfcl.core import Algorithm


class Method(NamedTuple):
    """A registered method.

    Attributes:
      make: its factory `(task, training, **options) -> Algorithm`.
      summary: one line for `jfcl list`.
      serves: whose model a client is served: "one global", "per cluster" or "per client".
    """

    make: Callable[..., Algorithm]
    summary: str
    serves: str

    @property
    def options(self) -> list[str]:
        """The names of the factory's keyword arguments."""
        return [p.name for p in inspect.signature(self.make).parameters.values() if p.kind is p.KEYWORD_ONLY]


METHODS = {
    "fedavg": Method(
        fedavg, "one model for all (McMahan et al. 2017); FedProx, FedAdam, FedAvgM by options", "one global"
    ),
    "local": Method(local_only, "every client trains alone, nothing is sent", "per client"),
    "oracle": Method(oracle, "FedAvg inside the true clusters: what clustering can reach at best", "per cluster"),
    "ifca": Method(ifca, "clients pick the model of lowest loss (Ghosh et al. 2020)", "per cluster"),
    "cfl": Method(cfl, "clusters whose clients pull apart are split in two (Sattler et al. 2021)", "per cluster"),
    "byzantine_cfl": Method(
        byzantine_cfl, "one model for the majority, dissenters are shut out (Sattler et al. 2020)", "one global"
    ),
}

__all__ = ["METHODS", "Method", "byzantine_cfl", "cfl", "fedavg", "ifca", "local_only", "oracle", "with_restarts"]
