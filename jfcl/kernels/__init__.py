"""Kernels: functions of arrays, usable without the rest of the library.

They compare clients (`pairwise_cosine`, `squared_distances`), split them (`optimal_bipartition`,
`bipartition_of_updates`, dendrograms), cluster vectors (`threshold_clustering`, `kmeans`), and aggregate the updates of
clients of which some are hostile (`centered_clip` and the other `AGGREGATORS`; `make_aggregator` makes one by name).

Kernels raise `ValueError` for arguments of a wrong rank, length, type or range and, outside `jit`, for NaN or infinity
in rows that count; aggregators and `principal_vectors` leave such rows out. In their costs, a multiplication and an
addition are two operations. Distances are computed from squares in float32: one below 1e-19 counts as 0, and one above
1e19 as infinite. Cosines, `clip_norms`, `adaptive_clip`, medians and means have no such limits.

Every aggregator takes `updates`, `[N, D]` or a pytree of arrays stacked on a leading client axis, and returns `[D]` or
that pytree without the client axis. Common to all:

* `mask`: `[N]` bool, the clients that count.
* Clients with NaN or infinity in their update are left out.
* `weights`, where there are any: `[N]`, at least 0, scaled to sum to 1; default: all equal.
* `num_malicious`: how many of the clients that count may be hostile, `f` in the papers.
* The aggregate of no clients is zero, that of `centered_clip` its first centre.

The `PRE_AGGREGATORS` take the same `updates`, `mask` and `num_malicious`, and return `(updates, mask)` for the next
step, in which clients that do not count, or have NaN or infinity, are masked:

    mixed, mask = nearest_neighbour_mixing(updates, num_malicious=2)
    result = krum(mixed, num_malicious=2, mask=mask)

`make_aggregator("nearest_neighbour_mixing+krum", num_malicious=2)` is the same as one function.
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
from jfcl.kernels.dendrogram import LINKAGES, ChosenCut, cut, cut_by_silhouette, linkage_tree, silhouette
from jfcl.kernels.distances import profile_distances, squared_distances
from jfcl.kernels.kmeans import KMeans, kmeans
from jfcl.kernels.knee import knee
from jfcl.kernels.operators import OPERATORS, Operator, orthonormal
from jfcl.kernels.robust import coordinate_median, mean, mean_around_median, trimmed_mean
from jfcl.kernels.robust_filters import caf, clipped_clustering, dnc, monna, sign_guard, smea
from jfcl.kernels.robust_vectors import bulyan, centered_clip, geometric_median, krum, multi_krum
from jfcl.kernels.similarity import pairwise_cosine, similarity_tolerance
from jfcl.kernels.spectral import spectral_clusters
from jfcl.kernels.subspaces import ANGLES, principal_vectors, subspace_angles
from jfcl.kernels.threshold import threshold_clustering
