"""Byzantine-robust Clustered Federated Learning (Sattler, Müller, Wiegand, Samek 2020, Algorithm 1)."""

from typing import Annotated, Unpack

import jax
import jax.numpy as jnp

from jfcl.core import Algorithm, Task
from jfcl.core.options import Interval, OneOf, Real, Search
from jfcl.methods.averaging import Averaging
from jfcl.methods.cfl.rounds import SIMILARITIES, Privacy, PrivacySeed, rounds
from jfcl.methods.cfl.server import Comparison, Decision, Rules, Sent
from jfcl.methods.cfl.state import CFLState
from jfcl.methods.options import SENDING, Options, factory
from jfcl.training import local


@factory(*SENDING, "personal", "personal_steps", "aggregator")
def byzantine_cfl(
    task: Task,
    training: local.LocalTraining,
    *,
    threshold: Annotated[Real, Interval("[-1, 1)"), Search(-0.2, 0.2, log=False)] = 0.02,
    similarity: Annotated[str, OneOf(SIMILARITIES)] = "updates",
    privacy: Privacy = None,
    privacy_seed: PrivacySeed = 0,
    **options: Unpack[Options],
) -> Algorithm:
    """Trains one model for the benign majority: excludes the smaller side of each bipartition below a threshold.

    Every round the optimal bipartition of the remaining clients is computed; if `α_cross < threshold`, its smaller side
    is excluded permanently. Random updates have similarities of the order of `1/√D`, so the paper's threshold needs
    models of many more than 2,500 parameters. The others' updates are averaged by size; the paper prints equal weights,
    `weights="equal"`, which are the same where clients hold equally many examples, as in its experiments. (The other
    branch of Algorithm 1, "regular CFL", keeps both sides as clusters: `jfcl.cfl` with `eps_1=jnp.inf`, `eps_2=1e-30`
    and `gamma_max=0.7`, for which equation 39 is `α_cross < 0.02`.)

    Args:
      task, training: as in `jfcl.cfl`.
      threshold: of `α_cross`, in [-1, 1): below it, the smaller side is excluded; the paper's is 0.02.
      similarity: what is compared: `"updates"`, or full-batch `"gradients"`.
      privacy: `"permutation"`, `"sign"` or `"rotation"`: clients hide their updates by this secret operator.
      privacy_seed: the seed of the clients' secret operator.

    Returns:
      `Algorithm` with a `CFLState` of one cluster; `state.excluded` has the round in which each client was excluded, 0
      for the others. A client that sends NaN or infinity is excluded at once. Of two equal halves, the one with the
      smallest id remains; of two remaining clients neither is a minority, and both stay. An update of zero has no
      similarity to others: its client is not compared in that round, nor excluded. Cost of a round: that of FedAvg and
      `N² D`; memory `O(N D)`, and `N²` as in `cfl`.

    Example:
      >>> import jax, jfcl, numpy as np, optax
      >>> task = jfcl.models.task(lambda _: {"b": jax.numpy.zeros((1, 2))}, lambda p, x: x + p["b"], kind="regression")
      >>> y = np.repeat(np.float32([[1, 1], [1, 2], [-9, -9]])[:, None], 3, axis=1)
      >>> clients = jfcl.Clients({"x": np.zeros((3, 3, 2), np.float32), "y": y}, np.full(3, 3, np.int32))
      >>> algorithm = jfcl.byzantine_cfl(task, jfcl.local_training(optax.sgd(0.5), num_steps=1))
      >>> state, _ = jfcl.rollout(algorithm, clients, key=jax.random.key(0), num_rounds=2)
      >>> state.excluded.tolist(), state.params["b"][0, 0].tolist()
      ([0, 0, 1], [1.0, 1.5])
    """

    def ripe(state, mean_norm, max_norm, members):
        return members >= 0, members >= 3

    def accept(splits):
        return splits.cross_similarity < threshold

    common = Averaging(task, training, 1, **options)
    secret = {"privacy": privacy, "privacy_seed": privacy_seed}
    return rounds(Rules(common, ripe, accept, exclude_minority, compares_zero=False, similarity=similarity, **secret))


def exclude_minority(rules: Rules, state: CFLState, sent: Sent, comparison: Comparison) -> Decision:
    """Excludes the clients on the smaller side of an accepted bipartition, and those that sent NaN or infinity.

    Of two equal halves that of the smallest id remains.
    """
    capacity, splits = len(state.active), comparison.splits
    ones = jax.ops.segment_sum((splits.side & comparison.compared).astype(jnp.int32), state.cluster, capacity)
    out_is_side = 2 * ones <= comparison.members
    on_smaller = splits.side == out_is_side[state.cluster]
    minority = comparison.accepted[state.cluster] & comparison.compared & on_smaller
    leaves = minority | (sent.present & ~sent.usable)
    state = state._replace(excluded=jnp.where(leaves, state.round + 1, state.excluded))
    into, full = jnp.full(capacity, capacity, jnp.int32), jnp.zeros((), bool)
    return state, into, full, jnp.where(leaves, 0.0, sent.weight), {}
