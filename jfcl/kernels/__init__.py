"""Kernels: functions of arrays. They depend on nothing else in the library, and are usable alone.

They compare clients (`pairwise_cosine`, `gram`, `squared_distances`), split them (`optimal_bipartition`,
`bipartition_of_updates`, dendrograms), cluster vectors (`threshold_clustering`, `kmeans`), and aggregate the updates of
clients of which some are hostile (`centered_clip` and the other `AGGREGATORS`; `make_aggregator` makes one by name).
"""

from jfcl.kernels.aggregators import (
    AGGREGATORS,
    PRE_AGGREGATORS,
    adaptive_clip,
    aggregator_options,
    bucketing,
    clip_norms,
    make_aggregator,
    nearest_neighbour_mixing,
)
from jfcl.kernels.assignment import least_cost_assignment
from jfcl.kernels.bipartition import Bipartition, optimal_bipartition, separation_gap
from jfcl.kernels.bipartition_of_updates import bipartition_of_updates
from jfcl.kernels.dendrogram import complete_linkage_tree, cut, single_linkage_tree
from jfcl.kernels.distances import gram, squared_distances
from jfcl.kernels.kmeans import KMeans, kmeans
from jfcl.kernels.linkage import LINKAGES, linkage_tree
from jfcl.kernels.operators import OPERATORS, Operator, orthonormal
from jfcl.kernels.profiles import profile_distances
from jfcl.kernels.robust import coordinate_median, mean, mean_around_median, trimmed_mean
from jfcl.kernels.robust_vectors import bulyan, centered_clip, geometric_median, krum, multi_krum
from jfcl.kernels.silhouette import ChosenCut, cut_by_silhouette, silhouette
from jfcl.kernels.similarity import pairwise_cosine, similarity_tolerance
from jfcl.kernels.subspaces import ANGLES, principal_vectors, subspace_angles
from jfcl.kernels.threshold import threshold_clustering

__all__ = [
    "AGGREGATORS",
    "ANGLES",
    "LINKAGES",
    "OPERATORS",
    "PRE_AGGREGATORS",
    "Bipartition",
    "ChosenCut",
    "KMeans",
    "Operator",
    "adaptive_clip",
    "aggregator_options",
    "bipartition_of_updates",
    "bucketing",
    "bulyan",
    "centered_clip",
    "clip_norms",
    "complete_linkage_tree",
    "coordinate_median",
    "cut",
    "cut_by_silhouette",
    "geometric_median",
    "gram",
    "kmeans",
    "krum",
    "least_cost_assignment",
    "linkage_tree",
    "make_aggregator",
    "mean",
    "mean_around_median",
    "multi_krum",
    "nearest_neighbour_mixing",
    "optimal_bipartition",
    "orthonormal",
    "pairwise_cosine",
    "principal_vectors",
    "profile_distances",
    "separation_gap",
    "silhouette",
    "similarity_tolerance",
    "single_linkage_tree",
    "squared_distances",
    "subspace_angles",
    "threshold_clustering",
    "trimmed_mean",
]
