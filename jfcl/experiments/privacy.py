"""Private runs: from the options `--dp-...` to a mechanism, and from a finished run to its ε."""

from __future__ import annotations

from typing import Any

import numpy as np

from jfcl.experiments.config import Config
from jfcl.robust.privacy import GaussianDP, epsilon, noise_of_sums


def mechanism(config: Config) -> GaussianDP:
    """Returns the mechanism of `config`, with `dp_clip`."""
    names = ("clip", "noise", "quantile", "min_size", "sampling")
    return GaussianDP(**{name: getattr(config, f"dp_{name}") for name in names})


def privacy_of(
    config: Config, num_clients: int, num_rounds: int, cluster: np.ndarray, clip: float, *, count: int
) -> dict[str, Any]:
    """Returns the entry `privacy` of `summary.json`, of a run with `dp_clip`.

    `cluster` has the clusters of the evaluated clients at the end, `clip` is the clipping norm of the last round,
    `count` the number of sums that are released in a round: one of each cluster, or of a mixture one for all clients.
    Of each it has the share of the clients, the ε of its members (None without noise) and the standard deviation of the
    noise on its mean update in a round with the expected number of participants.
    """
    dp, delta = mechanism(config), config.dp_delta
    participants = (config.cohort or num_clients) * (1 - config.dropout)
    spent = None
    if dp.noise > 0:
        spent = epsilon(dp, num_clients=num_clients, cohort=config.cohort, num_rounds=num_rounds, delta=delta)
    shares = np.bincount(cluster, minlength=count) / len(cluster) if count > 1 else np.ones(1)
    sizes = np.maximum(participants * shares, dp.min_size)
    if config.average == "gradients":  # their sums are divided by the clients of all clusters
        sizes[:] = participants if config.of_population or config.divide_by == "participants" else num_clients
    noise = noise_of_sums(dp, count) * clip / sizes
    clusters = [
        {"cluster": k, "share": share, "epsilon": spent, "noise": of_mean}
        for k, (share, of_mean) in enumerate(zip(shares.tolist(), noise.tolist(), strict=True))
    ]
    of_rounds = {"clip": clip, "noise": dp.noise, "sampling": dp.sampling, "num_rounds": num_rounds}
    return {"epsilon": spent, "delta": delta, **of_rounds, "clusters": clusters}


def privacy_text(private: dict[str, Any]) -> str:
    """Returns the lines that `jfcl run` prints of the entry `privacy`."""
    if private["epsilon"] is None:
        return f"not private: updates are clipped to {private['clip']:.3g}, without noise (--dp-noise)"
    noise = ", ".join(f"{row['noise']:.2g}" for row in private["clusters"])
    return (
        "private: epsilon {epsilon:.3g} at delta {delta:.2g} after {num_rounds} rounds, for each client of any cluster"
        f"\nnoise on each coordinate of a cluster's mean update: {noise}; an update has norm {{clip:.3g}} at most"
    ).format(**private)
