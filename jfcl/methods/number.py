"""The number of clusters, given or chosen by silhouettes, and clusters of points in that number."""

from functools import partial
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp

from jfcl.core.options import Range
from jfcl.kernels import cut_by_silhouette, kmeans, squared_distances

Number = Annotated[int | Literal["auto"], Range(1)]
Most = Annotated[int, Range(2, 1000)]  # clusters that "auto" may choose, and so the number of models
MANY = 30  # starts of k-means: ten may miss the optimum of points that hardly form clusters


@partial(jax.jit, static_argnames=("num_clusters", "auto", "num_restarts"))
def clusters_of(
    points: jax.Array, key: jax.Array, usable: jax.Array, *, num_clusters: int, auto: bool, num_restarts: int = 10
) -> tuple[jax.Array, Any]:
    """Clusters points by k-means, or with `auto` by Ward's dendrogram in as many clusters as silhouettes choose.

    It is compiled, where too few points leave clusters empty. Of the points `[N, D]`, those that are `usable` `[N]`
    bool count. With `auto`, `num_clusters` `K` is the largest number that is tried. `num_restarts` is that of k-means:
    `MANY` where points have few coordinates.

    Returns:
      `(cluster [N], scores)`, of points that do not count -1, or with `auto` that of the first one that does. `scores`
      `[K + 1]` are the mean silhouettes by the number of clusters, NaN where it is not tried; `()` without `auto`.
    """
    if not auto:
        return kmeans(points, num_clusters, key=key, mask=usable, num_restarts=num_restarts).cluster, ()
    distances = jnp.sqrt(squared_distances(points, mask=usable))
    chosen = cut_by_silhouette(distances, most=num_clusters, mask=usable)
    return chosen.cluster, chosen.scores


def of_scores(scores: Any) -> dict[str, jax.Array]:
    """Returns the metric `silhouettes` of the `scores` of `clusters_of`; none without `auto`."""
    return {} if isinstance(scores, tuple) else {"silhouettes": scores}
