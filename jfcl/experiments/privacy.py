"""Private runs: from the options `--dp-...` to a mechanism, and from a finished run to its ε."""

from typing import Any

import numpy as np

from jfcl.experiments.config import Config
from jfcl.robust.privacy import GaussianDP, epsilon


def mechanism(config: Config) -> GaussianDP:
    """Returns the mechanism of `config`, with `dp_clip`."""
    names = ("clip", "noise", "quantile", "min_size", "sampling")
    return GaussianDP(**{name: getattr(config, f"dp_{name}") for name in names})


def privacy_of(
    config: Config, num_clients: int, num_rounds: int, cluster: np.ndarray, last: dict[str, Any]
) -> dict[str, Any]:
    """Returns the entry `privacy` of `summary.json`, of a run with `dp_clip`.

    `cluster` has the clusters of the evaluated clients at the end, `last` is a record of the last round. Of each sum
    that is released in a round (one of each cluster, or of a mixture one for all clients) it has the share of the
    clients, the ε of its members (None without noise), and the standard deviation of the noise on its mean update in
    the last round (NaN where it was not released).
    """
    dp, delta = mechanism(config), config.dp_delta
    spent = None
    if dp.noise > 0:
        spent = epsilon(dp, num_clients=num_clients, cohort=config.cohort, num_rounds=num_rounds, delta=delta)
    noise = np.atleast_1d(np.asarray(last["noise"], np.float64))
    shares = np.bincount(cluster, minlength=len(noise)) / len(cluster) if len(noise) > 1 else np.ones(1)
    clusters = [
        {"cluster": k, "share": share, "epsilon": spent, "noise": of_mean}
        for k, (share, of_mean) in enumerate(zip(shares.tolist(), noise.tolist(), strict=True))
    ]
    of_rounds = {"clip": last["clip"], "noise": dp.noise, "sampling": dp.sampling, "num_rounds": num_rounds}
    return {"epsilon": spent, "delta": delta, **of_rounds, "clusters": clusters}


def privacy_text(private: dict[str, Any]) -> str:
    """Returns the lines that `jfcl run` prints of the entry `privacy`."""
    if private["epsilon"] is None:
        return f"not private: updates are clipped to {private['clip']:.3g}, without noise (--dp-noise)"
    noise = ", ".join("–" if row["noise"] is None else f"{row['noise']:.2g}" for row in private["clusters"])
    return (
        "private: epsilon {epsilon:.3g} at delta {delta:.2g} after {num_rounds} rounds, for each client of any cluster"
        f"\nnoise on each coordinate of a cluster's mean update: {noise}; an update has norm {{clip:.3g}} at most"
    ).format(**private)
