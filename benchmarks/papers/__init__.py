"""The papers' experiments, a file for each paper: `python -m benchmarks.papers NAME`, from the repository.

Importing them fills `RECIPES`. They are not installed with jfcl: beside ordinary runs they hold what only a
reproduction needs, such as the algorithms of the authors' code where they differ from the paper's text.
"""

from benchmarks.papers import (
    byzantine_cfl,
    cfl,
    cfla,
    failure_modes,
    federated_clustering,
    federated_clustering_cifar,
    federated_clustering_mnist,
    ifca,
    method_tables,
)
from benchmarks.papers.recipes import RECIPES, Recipe, reproduce

__all__ = ["RECIPES", "Recipe", "byzantine_cfl", "cfl", "cfla", "failure_modes", "federated_clustering", "ifca"]
__all__ += ["federated_clustering_cifar", "federated_clustering_mnist", "method_tables", "reproduce"]
