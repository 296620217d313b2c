"""The papers' synthetic problems: federations with known true models, as functions of their arguments and `seed`.

Client `i` is in cluster `i mod K`. The data of a client do not depend on the number of clients.
"""

from typing import Annotated

import numpy as np

from jfcl.core import Clients, check, check_at_most_clients
from jfcl.core.options import Interval, OneOf, Range, check_options
from jfcl.data.build import Federation, split_hash

Count, Scale = Annotated[int, Range(1)], Annotated[float, Interval("[0, inf)")]
Seed = Annotated[int, Range(0, 2**63 - 1)]


def ifca_regression(
    *,
    num_clients: Count = 100,
    examples_per_client: Count = 100,
    dim: Count = 1000,
    num_clusters: Count = 2,
    radius: Scale = 1.0,
    noise: Scale = 0.1,
    reading: Annotated[str, OneOf(("norm", "coordinate"))] = "norm",
    test_examples: Count = 10,
    seed: Seed = 0,
) -> Federation:
    """Draws linear regressions with one true vector per cluster: `y = <x, theta*_k> + noise`, `x ~ N(0, I)`.

    Args:
      radius: the paper's R. `reading="norm"` (the paper): `theta*` is a Bernoulli(0.5) vector scaled to norm R.
        `reading="coordinate"` (the authors' code): its coordinates are 0 or R.
      noise: standard deviation sigma of the noise.
      test_examples: test examples per client, drawn the same way.

    Returns:
      A `Federation` with `x` `[N, M, d]` and `y` `[N, M]` float32; `truth` is `theta*`, `[K, d]` float32. The vectors
      are drawn until none is zero and all differ; for `d` above 20 or so, the first draw is enough.

    Source: IFCA, section 6.1 (figure 3).

    Example:
      >>> fed = ifca_regression(num_clients=4, examples_per_client=5, dim=50, radius=2.0, noise=0.0)
      >>> bool(np.allclose(np.linalg.norm(fed.truth, axis=1), 2.0)), fed.train.examples["x"].shape
      (True, (4, 5, 50))
    """
    check_options(ifca_regression, locals())
    theta = _binary_vectors(np.random.default_rng([seed, 0]), num_clusters, dim)
    scale = radius / np.linalg.norm(theta, axis=1, keepdims=True) if reading == "norm" else radius
    name = f"IFCA's linear regression (R={radius:g} by {reading}, sigma={noise:g})"
    counts = examples_per_client, test_examples
    return _regression(name, theta * scale, np.zeros(num_clusters), num_clients, counts, noise, seed)


def fc_regression(
    *,
    num_clusters: Count = 4,
    clients_per_cluster: Count = 75,
    examples_per_client: Count = 9,
    dim: Count = 10,
    radius: Scale = 100.0,
    noise: Scale = 0.0,
    test_examples: Count = 10,
    seed: Seed = 0,
) -> Federation:
    """Draws linear regressions in which the inputs differ too: `x ~ N(k 1, I)`, `y = <x, theta*_k>`, with `k` from 1.

    Args:
      radius: `theta*_k` has coordinates 0 or `radius` (R = 100 in the paper), each with probability 0.5.
      noise: standard deviation of noise on `y`; none in the paper.

    Returns:
      A `Federation` of `K * clients_per_cluster` clients as from `ifca_regression`. With fewer examples than dimensions
      (the paper's 9 and 10) a client's data do not determine its `theta*`.

    Source: Federated-Clustering, section 4.1 (figures 2 and 3).

    Example:
      >>> fed = fc_regression(clients_per_cluster=4)
      >>> fed.train.examples["x"].shape, fed.truth.shape, sorted(set(fed.truth.ravel().tolist()))
      ((16, 9, 10), (4, 10), [0.0, 100.0])
    """
    check_options(fc_regression, locals())
    theta = radius * _binary_vectors(np.random.default_rng([seed, 0]), num_clusters, dim)
    name = f"Federated-Clustering's linear regression (R={radius:g}, sigma={noise:g})"
    num_clients, means = num_clusters * clients_per_cluster, np.arange(1, num_clusters + 1)
    counts = examples_per_client, test_examples
    return _regression(name, theta, means, num_clients, counts, noise, seed)


def _regression(name, theta, means, num_clients, counts, noise, seed) -> Federation:
    """Draws `x ~ N(mean_k 1, I)`, `y = <x, theta_k> + noise` in float64, client by client.

    `counts` has the numbers of training and test examples of each client.
    """
    num_clusters, dim = theta.shape
    check_at_most_clients("num_clusters", num_clusters, num_clients)
    cluster = (np.arange(num_clients) % num_clusters).astype(np.int32)

    def draw(stream: int, count: int) -> Clients:
        x = np.empty((num_clients, count, dim), np.float32)
        y = np.empty((num_clients, count), np.float32)
        for i, k in enumerate(cluster):
            rng = np.random.default_rng([seed, stream, i])
            x[i] = means[k] + rng.standard_normal((count, dim))
            # The target is that of the rounded inputs, so that without noise the fit is exact in float32.
            y[i] = x[i].astype(np.float64) @ theta[k] + noise * rng.standard_normal(count)
        return Clients({"x": x, "y": y}, np.full(num_clients, count, np.int32))

    train, test = draw(1, counts[0]), draw(2, counts[1])
    description = f"{name}: {num_clients} clients of {train.size[0]} examples, d={dim}, K={num_clusters}"
    # In the hash, clients' first inputs stand in the place of rows of a data set.
    firsts = np.ascontiguousarray(train.examples["x"][:, 0]).view(np.int32)
    digest, truth = split_hash([name, dim, seed], cluster, [train.size, *firsts]), theta.astype(np.float32)
    return Federation(train, test, cluster, num_clusters, None, (dim,), digest, description, truth=truth)


def _binary_vectors(rng: np.random.Generator, count: int, dim: int) -> np.ndarray:
    """Returns `[count, dim]` float64: different, non-zero Bernoulli(0.5) vectors."""
    most = 2 ** min(dim, 63) - 1
    check(count <= most, "num_clusters", count, f"at most {most} (non-zero vectors in {{0, 1}}^{dim})")
    if dim <= 12:  # few vectors: repeated draws until all differ could take long
        numbers = 1 + rng.permutation(2**dim - 1)[:count]
        return (numbers[:, None] >> np.arange(dim) & 1).astype(np.float64)
    vectors = rng.integers(0, 2, (count, dim))
    while True:
        redrawn = ~vectors.any(axis=1)
        redrawn[np.setdiff1d(np.arange(count), np.unique(vectors, axis=0, return_index=True)[1])] = True  # repetitions
        if not redrawn.any():
            return vectors.astype(np.float64)
        vectors[redrawn] = rng.integers(0, 2, (redrawn.sum(), dim))
