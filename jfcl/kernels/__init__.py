"""Kernels: arrays in, arrays out; usable alone, they know nothing of models, data or the rest of the library.

Compare clients (`pairwise_cosine`, `gram`, `squared_distances`), split them (`optimal_bipartition`,
`bipartition_of_updates`, dendrograms), cluster vectors (`threshold_clustering`), or make one vector of many in spite
of hostile ones (`centered_clip` and the other `AGGREGATORS`).
"""

from jfcl.kernels.bipartition import (
    Bipartition,
    complete_linkage_tree,
    cut,
    optimal_bipartition,
    separation_gap,
    single_linkage_tree,
)
from jfcl.kernels.bipartition_of_updates import bipartition_of_updates
from jfcl.kernels.clipping import centered_clip
from jfcl.kernels.kmeans import KMeans, kmeans
from jfcl.kernels.operators import OPERATORS, Operator, orthonormal
from jfcl.kernels.robust import (
    adaptive_clip,
    bucketing,
    bulyan,
    clip_norms,
    coordinate_median,
    geometric_median,
    krum,
    mean,
    mean_around_median,
    minimum_diameter,
    multi_krum,
    nearest_neighbour_mixing,
    trimmed_mean,
)
from jfcl.kernels.similarity import (
    SimilaritySummary,
    gram,
    pairwise_cosine,
    similarity_summary,
    similarity_tolerance,
    squared_distances,
)
from jfcl.kernels.threshold import threshold_clustering

# By name, for experiments and tests; all have the signature `f(updates, *, mask=None, return_excluded=False, ...)`.
AGGREGATORS = {
    "mean": mean,
    "centered_clip": centered_clip,
    "coordinate_median": coordinate_median,
    "trimmed_mean": trimmed_mean,
    "mean_around_median": mean_around_median,
    "krum": krum,
    "multi_krum": multi_krum,
    "bulyan": bulyan,
    "geometric_median": geometric_median,
    "minimum_diameter": minimum_diameter,
}

# These return `(updates, mask)` for an aggregator to go on with.
PRE_AGGREGATORS = {
    "clip_norms": clip_norms,
    "adaptive_clip": adaptive_clip,
    "nearest_neighbour_mixing": nearest_neighbour_mixing,
    "bucketing": bucketing,
}

__all__ = [
    "AGGREGATORS",
    "OPERATORS",
    "PRE_AGGREGATORS",
    "Bipartition",
    "KMeans",
    "Operator",
    "SimilaritySummary",
    "adaptive_clip",
    "bipartition_of_updates",
    "bucketing",
    "bulyan",
    "centered_clip",
    "clip_norms",
    "complete_linkage_tree",
    "coordinate_median",
    "cut",
    "geometric_median",
    "gram",
    "kmeans",
    "krum",
    "mean",
    "mean_around_median",
    "minimum_diameter",
    "multi_krum",
    "nearest_neighbour_mixing",
    "optimal_bipartition",
    "orthonormal",
    "pairwise_cosine",
    "separation_gap",
    "similarity_summary",
    "similarity_tolerance",
    "single_linkage_tree",
    "squared_distances",
    "threshold_clustering",
    "trimmed_mean",
]
