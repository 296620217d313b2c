"""Private runs: from the options `--dp-...` to a mechanism, and from a finished run to its ε."""

from __future__ import annotations

from typing import Any

import numpy as np

from jfcl.experiments.config import Config
from jfcl.robust.privacy import GaussianDP, epsilon, noise_of_sums


def mechanism(config: Config) -> GaussianDP:
    """Returns the mechanism of `config`, with `dp_clip`."""
    return GaussianDP(
        clip=config.dp_clip,
        noise=config.dp_noise,
        quantile=config.dp_quantile,
        min_size=config.dp_min_size,
        sampling=config.dp_sampling,
    )


def privacy_of(config: Config, num_clients: int, num_rounds: int, cluster: np.ndarray, clip: float) -> dict[str, Any]:
    """Returns the entry `privacy` of `summary.json`.

    Args:
      config: of the run, with `dp_clip`.
      num_clients: `N`, of a population all of it.
      num_rounds: `T`, those that were run.
      cluster: the clusters of the evaluated clients at the end.
      clip: the clipping norm of the last round.

    Returns:
      `epsilon` (None without noise), `delta`, `clip`, `noise`, `sampling`, and `clusters`: for each its number, the
      share of the clients, the ε of its members and the standard deviation of the noise on its mean update in a round
      with the expected number of participants.
    """
    dp = mechanism(config)
    about = {"num_clients": num_clients, "cohort": config.cohort, "num_rounds": num_rounds, "delta": config.dp_delta}
    found = epsilon(dp, **about) if dp.noise > 0 else None
    count = config.num_models or 1
    shares = np.bincount(cluster, minlength=count) / len(cluster)
    scale, participants = noise_of_sums(dp, count) * clip, config.cohort or num_clients
    clusters = [
        {"cluster": k, "share": share, "epsilon": found, "noise": scale / max(participants * share, dp.min_size)}
        for k, share in enumerate(shares.tolist())
    ]
    of_rounds = {"clip": clip, "noise": dp.noise, "sampling": dp.sampling, "num_rounds": num_rounds}
    return {"epsilon": found, "delta": config.dp_delta, **of_rounds, "clusters": clusters}


def privacy_text(found: dict[str, Any]) -> str:
    """Returns the lines that `jfcl run` prints of the entry `privacy`."""
    if found["epsilon"] is None:
        return f"not private: updates are clipped to {found['clip']:.3g}, without noise (--dp-noise)"
    noise = ", ".join(f"{row['noise']:.2g}" for row in found["clusters"])
    return (
        f"private: epsilon {found['epsilon']:.3g} at delta {found['delta']:.2g} after {found['num_rounds']} rounds, for"
        f" each client of any cluster\nnoise on each coordinate of a cluster's mean update: {noise}; an update has norm"
        f" {found['clip']:.3g} at most"
    )
