"""The options of private training, a group of those of `Config`."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from jfcl.core.options import Interval, OneOf, Range
from jfcl.robust.privacy import SAMPLING


@dataclasses.dataclass(frozen=True, kw_only=True)
class Privacy:
    """Privacy: differential privacy of each client, with equal weights.

    Attributes:
      dp_clip: largest norm of a client's update; larger ones are scaled down to it.
      dp_noise: noise multiplier: Gaussian noise of this multiple of --dp-clip on every cluster's sum of updates.
      dp_quantile: the clipping norm follows this quantile of the norms of updates, from --dp-clip on.
      dp_min_size: smallest size of a cluster in a round, noise included, with which its model changes; default: 1.
      dp_sampling: how --cohort is drawn: each client by itself (poisson, the default), or so many clients (fixed, the
        default with --population).
      dp_delta: delta of the epsilon that is reported; default: clients ** -1.1.
    """

    dp_clip: Annotated[float | None, Interval("(0, inf)")] = None
    dp_noise: Annotated[float | None, Interval("[0, inf)")] = None
    dp_quantile: Annotated[float | None, Interval("[0, 1]")] = None
    dp_min_size: Annotated[int | None, Range(1)] = None
    dp_sampling: Annotated[str | None, OneOf(SAMPLING)] = None
    dp_delta: Annotated[float | None, Interval("(0, 1)")] = None
