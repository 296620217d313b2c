"""A file for each method or family: its state, its factory. A new method is such a file and a line in `METHODS`."""

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import numpy as np

from jfcl.core import Algorithm
from jfcl.core.options import Option, first_sentence, options_of
from jfcl.methods.cfl import byzantine_cfl, cfl, parameter_tree
from jfcl.methods.cfl_gp import cfl_gp
from jfcl.methods.clove import clove
from jfcl.methods.ditto import ditto
from jfcl.methods.fedavg import fedavg, fedbn, fedper, fedrep, lg_fedavg
from jfcl.methods.feddrift import feddrift
from jfcl.methods.fedem import fedem
from jfcl.methods.federated_clustering import federated_clustering
from jfcl.methods.fedgroup import fedgroup
from jfcl.methods.fedgwc import fedgwc
from jfcl.methods.fedrc import fedrc
from jfcl.methods.fedsoft import fedsoft
from jfcl.methods.fesem import fesem
from jfcl.methods.flhc import flhc
from jfcl.methods.flux import flux
from jfcl.methods.hypcluster import hypcluster
from jfcl.methods.ifca import ifca
from jfcl.methods.knn_per import knn_per
from jfcl.methods.local_only import local_only
from jfcl.methods.myopic_clustering import momentum_clustering, myopic_clustering
from jfcl.methods.one_shot import one_shot
from jfcl.methods.oracle import oracle
from jfcl.methods.pacfl import pacfl
from jfcl.methods.restarts import with_restarts
from jfcl.methods.stocfl import stocfl


class Method(NamedTuple):
    """A registered method.

    Attributes:
      make: its factory `(task, training, **options) -> Algorithm`.
      summary: one line for `jfcl list`.
      defaults: of `jfcl run`, where they differ from those of the factory or of other methods.
      by_client: whether there is a model for each client, and no clusters are found.
      chooses: whether clients choose the model of lowest loss, or weigh models by their losses.
      sends: whether clients send anything.
      finds_number_by: the option that decides on the number of clusters, where it finds this number itself;
        `num_clusters`, if it has one, is then the most there may be.
      tree: the module that reads and writes the tree of splits in its state (`save_tree`, `load_tree`, `nodes`,
        `first_split`), where it divides clusters; a run keeps the tree, and its report shows it.
      trained: `(options, M) -> count`: so many of a client's `M` examples are trained on; None: all. A schedule of the
        learning rate, which counts local steps, depends on it.
    """

    make: Callable[..., Algorithm]
    summary: str
    defaults: Mapping[str, Any] = MappingProxyType({})
    by_client: bool = False
    chooses: bool = False
    sends: bool = True
    finds_number_by: str | None = None
    tree: ModuleType | None = None
    trained: Callable[[Mapping[str, Any], int], int] | None = None

    @property
    def options(self) -> list[str]:
        """The names of the factory's keyword arguments."""
        return [p.name for p in inspect.signature(self.make).parameters.values() if p.kind is p.KEYWORD_ONLY]

    @property
    def declared(self) -> dict[str, Option]:
        """The keyword arguments that have a flag, as the factory's annotations and docstring declare them."""
        return {
            name: option._replace(default=self.defaults.get(name, option.default), text=first_sentence(option.text))
            for name, option in options_of(self.make).items()
        }

    @property
    def chooses_number(self) -> bool:
        """Whether `num_clusters` may be `"auto"`."""
        return "num_clusters" in self.declared and "auto" in self.declared["num_clusters"].words


def _without_validation(options: Mapping[str, Any], count: int, least: int = 0) -> int:
    """Returns the number of `count` examples that are trained on, without the validation examples, `least` or more."""
    aside = int(np.float32(options["validation"]) * np.float32(count))
    return max(count - max(aside, least), 1)


def _without_those_for_mixing(options: Mapping[str, Any], count: int) -> int:
    """Returns the number of `count` examples that are trained on: one at least chooses the mixing, if none is given."""
    return count if options["mixing"] is not None else _without_validation(options, count, least=1)


# Their clients send gradients: a step is a round, and momentum lasts from one to the next.
STEPWISE = MappingProxyType({"local_steps": 1, "keep": "everything"})
RESTARTS = MappingProxyType({"restarts": 5, "restart_rounds": 5})

METHODS = {
    "fedavg": Method(fedavg, "one model for all (McMahan et al. 2017); FedProx, FedAdam, FedAvgM by options"),
    "local": Method(local_only, "every client trains alone, nothing is sent", by_client=True, sends=False),
    "oracle": Method(oracle, "FedAvg inside the true clusters: what clustering can reach at best"),
    "ifca": Method(ifca, "clients pick the model of lowest loss (Ghosh et al. 2020)", RESTARTS, chooses=True),
    "cfl": Method(
        cfl,
        "clusters of diverging clients are split in two (Sattler et al. 2021)",
        finds_number_by="gamma_max",
        tree=parameter_tree,
        trained=_without_validation,
    ),
    "byzantine_cfl": Method(byzantine_cfl, "one model for the majority, dissenters are excluded (Sattler et al. 2020)"),
    "federated_clustering": Method(
        federated_clustering, "clients average gradients like their own (Werner et al. 2023)", STEPWISE, by_client=True
    ),
    "momentum_clustering": Method(momentum_clustering, "clients' momenta are clustered (Werner et al. 2023)", STEPWISE),
    "myopic_clustering": Method(myopic_clustering, "a warning: gradients at different models are clustered", STEPWISE),
    "hypcluster": Method(
        hypcluster, "IFCA by data sizes, with cohorts and warm starts (Mansour et al. 2020)", chooses=True
    ),
    "one_shot": Method(one_shot, "k-means of models trained alone, then FedAvg in each cluster (Ghosh et al. 2019)"),
    "flhc": Method(
        flhc,
        "a dendrogram of updates, then FedAvg in each cluster (Briggs et al. 2020)",
        finds_number_by="distance_threshold",
    ),
    "clove": Method(clove, "clients are clustered by their losses under all models (Bhatia et al. 2025)"),
    "cfl_gp": Method(cfl_gp, "clients are clustered by their mean gradients at all models (Kim et al. 2024)"),
    "pacfl": Method(
        pacfl,
        "a dendrogram of angles between the clients' data, once (Vahidian et al. 2023)",
        finds_number_by="angle_threshold",
    ),
    "fedgroup": Method(fedgroup, "groups by the directions of first updates (Duan et al. 2021); FlexCFL: --migrate"),
    "flux": Method(flux, "k-means or DBSCAN of the moments of features, once (Fenoglio et al. 2025)"),
    "stocfl": Method(
        stocfl,
        "clusters of similar clients merge as they are seen (Zeng et al. 2023)",
        finds_number_by="merge_threshold",
    ),
    "fedgwc": Method(fedgwc, "clusters are divided by rewards of losses, with --cohort (Licciardi et al. 2025)"),
    "feddrift": Method(
        feddrift,
        "models are made where data drift, and merged (Jothimurugesan et al. 2023)",
        finds_number_by="drift_threshold",
    ),
    "fesem": Method(fesem, "clients join the model nearest to their own (Xie et al. 2021)"),
    "fedem": Method(fedem, "each client has its own mixture of K models (Marfoq et al. 2021)", chooses=True),
    "fedrc": Method(fedrc, "FedEM's mixtures by concept, not by label (Guo et al. 2024)", chooses=True),
    "fedsoft": Method(fedsoft, "personal models pulled towards several centres (Ruan and Joe-Wong 2022)", chooses=True),
    "fedper": Method(fedper, "a common body, a head of each client (Arivazhagan et al. 2019)"),
    "fedrep": Method(fedrep, "as FedPer, head and body trained in turn (Collins et al. 2021)"),
    "lg_fedavg": Method(lg_fedavg, "a common head, a body of each client (Liang et al. 2020)"),
    "fedbn": Method(fedbn, "batch normalisation stays with the client (Li et al. 2021)"),
    "ditto": Method(ditto, "personal models held near the global one (Li et al. 2021)", by_client=True),
    "knn_per": Method(
        knn_per,
        "the global model mixed with nearest neighbours (Marfoq et al. 2022)",
        by_client=True,
        trained=_without_those_for_mixing,
    ),
}

__all__ = ["METHODS", "Method", "with_restarts", *sorted(method.make.__name__ for method in METHODS.values())]
