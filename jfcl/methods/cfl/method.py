"""Clustered Federated Learning (Sattler, Müller, Samek 2021, Algorithms 3 and 5).

All clients start as one cluster. Where a cluster's mean update has become small although single clients' updates have
not, the clients' objectives differ: the cluster is split along the optimal bipartition of the cosine similarities of
their updates. Splits happen inside the compiled round, for all clusters at once.
"""

import math
import warnings
from functools import partial
from typing import Annotated, Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from jfcl.core import Algorithm, Clients, Served, Task, check, is_concrete
from jfcl.core.options import MOST_ADDED, Interval, Needs, OneOf, Range, Real, Search
from jfcl.kernels.bipartition import LINKAGES
from jfcl.kernels.theory import max_noise_of_split
from jfcl.methods.averaging import Averaging
from jfcl.methods.cfl import parameter_tree
from jfcl.methods.cfl.rounds import SIMILARITIES, Privacy, PrivacySeed, rounds
from jfcl.methods.cfl.server import Rules
from jfcl.methods.cfl.splits import split_clusters
from jfcl.methods.cfl.state import CFLState
from jfcl.methods.options import SCOPES, SENDING, Count, Options, factory
from jfcl.robust.aggregate import check_entries
from jfcl.training import local

LEAST_SHARE = 0.25  # of the first round's longest update: the least unit of ε₁


@factory(*SENDING, *SCOPES, "cohort", "aggregator")
def cfl(
    task: Task,
    training: local.LocalTraining,
    *,
    # When a cluster is split.
    eps_1: Annotated[Real | None, Interval("(0, inf]")] = None,
    eps_2: Annotated[Real | None, Interval("(0, inf]")] = None,
    relative: bool | None = None,
    gamma_max: Annotated[Real, Interval("[0, 1)"), Search(0.0, 0.5, log=False)] = 0.0,
    min_rounds: Annotated[int, Range(1, MOST_ADDED)] = 1,
    max_clusters: Annotated[int | None, Range(1)] = None,
    recursive: bool = False,
    # Which clients are compared, by what, and how they are divided.
    similarity: Annotated[str, OneOf(SIMILARITIES)] = "updates",
    linkage: Annotated[str, OneOf(LINKAGES)] = "single",
    min_size: Annotated[int, Range(1, MOST_ADDED)] = 1,
    min_examples: Count = 1,
    # Splits that harm.
    validation: Annotated[float, Interval("[0, 1)")] = 0.0,
    fallback_rounds: Annotated[int, Range(1, MOST_ADDED), Needs("validation")] = 5,
    # What the server does not see, and what it records.
    privacy: Privacy = None,
    privacy_seed: PrivacySeed = 0,
    tree_dim: Annotated[int, Range(0)] = 1024,
    true_cluster: Any = None,
    **options: Unpack[Options],
) -> Algorithm:
    """Splits a cluster where the mean update is short and single updates are long (Algorithm 5).

    Every round, for every cluster `c`: if `‖Δθ_c‖ < ε₁` (the mean update) and `max_i ‖Δθ_i‖ > ε₂`, the optimal
    bipartition of `c` is computed; if `γ_max < sqrt((1 − α_cross) / 2)` (equation 39), it is carried out, and the
    children average their own updates of the round at once (as in Algorithm 1 of Byzantine CFL; Algorithm 5 leaves this
    open). Means are weighted by size, as in Algorithm 2 and equation 32; Algorithm 5 prints equal weights,
    `weights="equal"`.

    Args:
      task, training: the model and how a client trains it.
      eps_1: `ε₁`, above 0; default 0.4, relative. With infinity and a tiny `eps_2`, `min_rounds` and `gamma_max` alone
        decide.
      eps_2: `ε₂`, above 0; a cluster with shorter updates only is not split; default 0.5, relative, or 1.6 with
        `relative=False` (with 0.4 those of the authors' demonstration, 10 clients with EMNIST). A default is relative,
        whatever the other threshold is.
      relative: measure both thresholds in update norms of the first round, which hardly depend on model, data and
        learning rate. The unit of `ε₂` is the largest norm. The unit of `ε₁` is the norm of the mean, but at least a
        quarter of the largest: after FedAvg to convergence (`init_params`) the first mean is zero except for rounding,
        while the longest update vanishes only where all clients agree. (Cold starts have a mean of 0.3 to 0.8 of it.)
      gamma_max: `γ_max` in [0, 1), the assumed approximation noise; 0 accepts every bipartition of clients whose
        updates differ by more than rounding (`jfcl.kernels.similarity_tolerance`).
      min_rounds: rounds that a cluster trains before it may be split, counted from its own split.
      max_clusters: capacity, by default 8; a split that needs more is not carried out, and `capacity_reached` is set.
      recursive: Algorithm 3: a stationary cluster that is not split has ended; its clients train no more. With `cohort`
        a cluster ends in a round in which more than half of its clients took part.
        `simulate` ends when all clusters have.
      similarity: what is compared: `"updates"`, or full-batch `"gradients"` at the cluster's model, which cost one more
        pass over all examples, and one more message, in every round. `ε₁` and `ε₂` are then compared with norms of
        gradients (equation 33, Algorithm 3).
      linkage: `"single"` (equation 25), or `"complete"` as in the authors' code, which needs `min_size` 1.
      min_size: the least number of clients on either side of a split, at most half of all. The edge that is removed is
        the weakest of the maximum spanning tree that leaves this number on both sides; its similarity is `α_cross`.
      min_examples: clients with fewer examples are left out of norms, thresholds, units and bipartitions.
        They train, and count in the means of the models. At a split such a client goes to the side with the mean unit
        update that is most similar to its own update, and is compared again in every round until two rounds agree. (The
        mean of the others alone does not quite vanish; where small clients hold many examples together, raise `ε₁`.)
      validation: share of every client's examples, its last ones, that judge splits and are not trained on; 0: no
        split is judged. On them, the clients' mean accuracy (or mean loss, where a task has no accuracy) under their
        models is compared with that under the parent's model. Where it is worse the split is undone, and the parent is
        never split again (section II-A).
      fallback_rounds: rounds from a split to its comparison by `validation`; until then its sides are not split.
      privacy: `"permutation"`, `"sign"` or `"rotation"`: clients hide their updates by this secret orthonormal operator
        (section V-B, `jfcl.kernels.orthonormal`). Similarities, norms, splits and means are those of the open run, to
        rounding; so is a robust `aggregator` that commutes with the operator, as the coordinate-wise ones do with
        permutations and signs.
      privacy_seed: the seed of the clients' secret operator.
      tree_dim: numbers kept of every client's update at every split, for `jfcl.assign_newcomer`; 0 keeps none.
      true_cluster: `[N]`, if known, by a client's id: adds the metric `separation_gap` `[K]` (Definition 2), in every
        round. Clients with -1, for example malicious ones, do not count.
      cohort: clients drawn in each round, as in `fedavg`; default: all. The server keeps every client's last update
        and its age. A cluster is examined once half of its clients have sent an update since its last change: by the
        mean of their last updates, the longest update of this round, and the bipartition of the last updates.

    Returns:
      `Algorithm` with a `CFLState`; its `tree` is the parameter tree (`jfcl.parameter_tree`). Metrics beside the
      common ones: `mean_norm`, `max_norm`, `cross_similarity` `[K]` (`inf` where no bipartition was computed),
      `thresholds` `[2]` that the norms are compared with, `decisions` `[]` (bipartitions computed), `split_from` `[K]`
      (of new clusters: the parent; else -1), `num_clusters`, `capacity_reached` `[]`, `overflowed` `[K]`, `undone` `[]`
      with `validation`, and `ended` `[]` with `recursive`. (A record of `simulate` holds splits, full capacity and
      overflows of any round since the record before, and counts decisions and undone splits so far.)

      A client that was absent or sent NaN in the round of its cluster's split trains the model from before the split in
      its next round, and joins the side that is most similar to this update. A cluster whose model would overflow
      keeps its last finite model and is not examined any more; the other clusters continue. A client that was not in
      training goes down the tree, as `jfcl.assign_newcomer` leads it; without a tree (`tree_dim=0`), or with personal
      parameters, it is served the model of lowest loss on its examples.

      Memory: the updates `[N, D]` (with `cohort` twice), two models and a direction a cluster, `K N S` numbers for the
      tree (`S` at most `tree_dim`), and in rounds with bipartitions `N²`, up to 4,096 clients or an eighth of the
      updates, and always with `min_size` above 1 or complete linkage; beyond that, tiles. Cost of such a round: `N² D`
      besides training; several times that in tiles.

    Raises:
      ValueError: an option outside its range; `min_size` or `min_examples` that no split can satisfy; `cohort` with
        gradients.

    Warns:
      UserWarning: `eps_2` not above `eps_1`, where clients that agree are split too; from `simulate`, clients with too
        few examples for `validation`, overflows, and a run that ends with long updates and without any cluster
        examined.

    Example:
      >>> import jax, jfcl, numpy as np, optax
      >>> task = jfcl.models.task(lambda _: {"b": jax.numpy.zeros((1, 2))}, lambda p, x: x + p["b"], kind="regression")
      >>> y = np.repeat(np.float32([[1, 1], [-1, 1], [1, 1], [-1, 1]])[:, None], 3, axis=1)  # agree on one half
      >>> clients = jfcl.Clients({"x": np.zeros((4, 3, 2), np.float32), "y": y}, np.full(4, 3, np.int32))
      >>> training = jfcl.local_training(optax.sgd(0.2), num_steps=1)
      >>> algorithm = jfcl.cfl(task, training, eps_1=0.05, eps_2=0.1, max_clusters=3)
      >>> state, _ = jfcl.rollout(algorithm, clients, key=jax.random.key(0), num_rounds=60)
      >>> state.cluster.tolist(), state.parent.tolist()
      ([0, 1, 0, 1], [-1, 0, -1])
    """
    in_units = (eps_1 is None, eps_2 is None) if relative is None else (relative, relative)
    eps_1 = 0.4 if eps_1 is None else eps_1
    eps_2 = (0.5 if in_units[1] else 1.6) if eps_2 is None else eps_2
    accepted = f'"single" with min_size={min_size}: complete linkage has no spanning tree to choose an edge of'
    check(linkage == "single" or min_size == 1, "linkage", linkage, accepted)
    are_absolute = is_concrete(eps_1) and is_concrete(eps_2) and not any(in_units)
    if are_absolute and eps_2 <= eps_1 and not math.isinf(eps_1):  # infinite: `min_rounds` is to decide
        text = f"eps_2 ({eps_2}) is not above eps_1 ({eps_1}): clients that agree will be split too"
        warnings.warn(text, stacklevel=3)
    of_sides = max(min_rounds, fallback_rounds + 1) if validation else min_rounds  # judged before they are split again

    def thresholds(state):
        mean, longest = state.scale
        units = jnp.maximum(mean, LEAST_SHARE * longest), longest
        units = [unit if relative else jnp.ones(()) for unit, relative in zip(units, in_units, strict=True)]
        return jnp.stack([eps_1 * units[0], eps_2 * units[1]])

    def ripe(state, mean_norm, max_norm, members):
        below, above = thresholds(state)
        patience = jnp.where(state.since > 0, of_sides, min_rounds)
        stationary = (mean_norm < below) & (state.round + 1 - state.since >= patience)
        return stationary, stationary & (max_norm > above) & (members >= 2 * min_size)

    def accept(splits):  # equation 39
        return (max_noise_of_split(splits.cross_similarity) > gamma_max) & (splits.smaller >= min_size)

    compared = {"similarity": similarity, "linkage": linkage, "min_size": min_size, "min_examples": min_examples}
    judged = {"recursive": recursive, "validation": validation, "fallback_rounds": fallback_rounds}
    seen = {"privacy": privacy, "privacy_seed": privacy_seed, "tree_dim": tree_dim, "true_cluster": true_cluster}
    common = Averaging(task, training, max_clusters, **options)
    algorithm = rounds(Rules(common, ripe, accept, split_clusters, thresholds=thresholds, **compared, **judged, **seen))

    def adopt(state: CFLState, clients: Clients) -> Served:
        way = {"privacy": privacy, "privacy_seed": privacy_seed, "client_axis": common.client_axis}
        found = parameter_tree.lead(state, clients, jax.random.key(0), task=task, training=training, **way)
        return Served(state.params, found.cluster, active=state.active)

    has_tree = tree_dim > 0 and max_clusters != 1 and common.personal is None
    check_all = partial(_check, min_size, min_examples, validation, true_cluster)
    return algorithm._replace(check=check_all, adopt=adopt if has_tree else None)


def _check(min_size: int, min_examples: int, validation: float, true_cluster: Any, clients: Clients) -> None:
    """Raises `ValueError` where no split is possible with the sizes of all clients; warns of few for `validation`.

    Cohorts, which have ids, pass; also for them there must be a true cluster of each client, if any is given.
    """
    if is_concrete(true_cluster) and true_cluster is not None:
        check_entries("true_cluster", true_cluster, clients)
    size = np.asarray(clients.size)
    if clients.id is None and jax.process_count() == 1:
        able = int((size >= min_examples).sum())
        accepted = f"a number of examples that two clients at least have; {able} of {len(size)} have so many"
        check(min_examples == 1 or able >= 2, "min_examples", min_examples, accepted)
        accepted = f"at most {able // 2}, half of the {able} clients with min_examples={min_examples} or more"
        check(min_size == 1 or 2 * min_size <= able, "min_size", min_size, accepted)
    if is_concrete(validation) and validation:
        few = int((np.floor(np.float32(validation) * size.astype(np.float32)) == 0).sum())
        if few:
            text = f"validation is {validation}: {few} of {len(size)} clients have too few examples to judge a split by"
            warnings.warn(text, stacklevel=1)
