"""Private runs: from the options `--dp-...` to a mechanism, and from a finished run to its ε."""

from __future__ import annotations

from typing import Any

import numpy as np

from jfcl.core import check
from jfcl.experiments.config import Config, groups, of_population
from jfcl.experiments.own import find_method, is_on_updates
from jfcl.experiments.private_options import Privacy
from jfcl.robust.privacy import GaussianDP, accountant, default_delta, epsilon, noise_of_sums


def mechanism(config: Config) -> GaussianDP:
    """Returns the mechanism of `config`, with `dp_clip`."""
    return GaussianDP(
        clip=config.dp_clip,
        noise=config.dp_noise or 0.0,
        quantile=config.dp_quantile,
        min_size=config.dp_min_size or 1,
        sampling=config.dp_sampling or ("fixed" if of_population(config) else "poisson"),
    )


def check_private_run(config: Config) -> None:
    """Checks the options of private training against the others.

    Raises:
      ValueError: options without the one that they need; an attack, an aggregator or early stopping, which void the
        guarantee; cohorts that the accountant does not know; no accountant.
    """
    if config.dp_clip is None:
        for name in groups()[Privacy]:
            check(getattr(config, name) is None, name, getattr(config, name), "left out without --dp-clip")
        return
    accepted = "left out without --dp-noise above 0: without noise there is no epsilon"
    check(config.dp_delta is None or config.dp_noise, "dp_delta", config.dp_delta, accepted)
    accepted = "left out with --dp-clip: the updates of hostile clients are functions of those of the others"
    check(not is_on_updates(config.attack), "attack", config.attack, accepted)
    accepted = "left out with --dp-clip: the guarantee is that of a mean"
    check(config.aggregator is None, "aggregator", config.aggregator, accepted)
    accepted = "left out with --dp-clip: the round in which it ends a run follows from results without noise"
    check(config.patience is None, "patience", config.patience, accepted)
    if of_population(config):
        accepted = "fixed with --population, the cohorts of which have a fixed size"
        check(config.dp_sampling != "poisson", "dp_sampling", config.dp_sampling, accepted)
        check(config.sampling == "uniform", "sampling", config.sampling, "uniform with --dp-clip")
        accepted = "0 with --dp-clip: which clients are slow may depend on their data"
        check(config.stragglers == 0, "stragglers", config.stragglers, accepted)
    if config.dp_noise and config.dp_delta is None and not of_population(config):
        accepted = "given for one client: the default is a power of the number of clients, 1 here, and promises nothing"
        check(config.clients > 1, "dp_delta", None, accepted)
    if config.dp_noise:
        try:
            accountant()
        except ImportError as error:
            raise ValueError(f"dp_noise must be used with an accountant: {error}") from None


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
    delta = default_delta(num_clients) if config.dp_delta is None else config.dp_delta
    about = {"num_clients": num_clients, "cohort": config.cohort, "num_rounds": num_rounds, "delta": delta}
    found = epsilon(dp, **about) if dp.noise > 0 else None
    several = "num_clusters" in find_method(config.method).options
    count = (config.num_models or config.clusters) if several else 1
    shares = np.bincount(cluster, minlength=count) / len(cluster)
    scale, participants = noise_of_sums(dp, count) * clip, config.cohort or num_clients
    clusters = [
        {"cluster": k, "share": share, "epsilon": found, "noise": scale / max(participants * share, dp.min_size)}
        for k, share in enumerate(shares.tolist())
    ]
    of_rounds = {"clip": clip, "noise": dp.noise, "sampling": dp.sampling, "num_rounds": num_rounds}
    return {"epsilon": found, "delta": delta if found is not None else None, **of_rounds, "clusters": clusters}


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
