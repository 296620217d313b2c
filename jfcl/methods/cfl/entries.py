"""What records hold of the metrics of CFL, and what a user is told of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from jfcl.core import Entries

FEW_ROUNDS = 10  # fewer are too few for a conclusion
NEVER = 1e-20  # an eps_1 below this is meant to prevent splits


def notes(record: dict[str, Any], is_last: bool) -> dict[str, str]:
    """Returns warnings of a record: full capacity and models that overflowed; at the end of a run, no decision."""
    if is_last:
        return _never_examined(record)
    found = {}
    if record.get("capacity_reached"):
        found["capacity"] = "a cluster would be split, but max_clusters are in use"
    if np.any(record.get("overflowed", False)):
        clusters = np.flatnonzero(record["overflowed"]).tolist()
        found["overflowed"] = (
            f"the models of clusters {clusters} overflowed; these clusters keep their last finite model and are not"
            " examined any more, the others go on"
        )
    return found


def _never_examined(record: dict[str, Any]) -> dict[str, str]:
    """Returns the reason why no cluster was examined for a split, where updates are long."""
    if record["round"] < FEW_ROUNDS or record.get("decisions", 1) or "thresholds" not in record:
        return {}
    mean, longest, (below, above) = record["mean_norm"][0], record["max_norm"][0], record["thresholds"]
    if longest <= above or below <= NEVER:
        return {}
    why = (
        f"but the mean update, {mean:.3g}, is not below eps_1, {below:.3g}: train for more rounds, or choose a larger"
        " eps_1"
        if not mean < below
        else f"and the mean update, {mean:.3g}, is below eps_1, {below:.3g}, but too few rounds have passed"
        " (min_rounds), or too few clients have a voice (min_size, min_examples, cohort)"
    )
    long = f"The longest update, {longest:.3g}, is above eps_2, {above:.3g}"
    return {"unexamined": f"no cluster was ever examined for a split. {long}, {why}"}


ENTRIES = Entries(
    sums=("undone", "decisions"),
    largest=("split_from", "capacity_reached", "overflowed"),
    ended="every cluster is final",
    notes=notes,
)
