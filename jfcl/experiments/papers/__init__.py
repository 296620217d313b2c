"""The papers' experiments, one file for each paper; importing them fills `jfcl.experiments.RECIPES`."""

from jfcl.experiments.papers import (
    byzantine_cfl,
    cfl,
    federated_clustering,
    federated_clustering_cifar,
    federated_clustering_mnist,
    ifca,
)

__all__ = [
    "byzantine_cfl",
    "cfl",
    "federated_clustering",
    "federated_clustering_cifar",
    "federated_clustering_mnist",
    "ifca",
]
