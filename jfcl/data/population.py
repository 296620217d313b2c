"""A population: clients on the host, of which a simulation has one cohort at a time on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import jax

from jfcl.core import Clients
from jfcl.core.options import Interval, Range
from jfcl.data.store import ClientStore

ROWS_IN_MEMORY = 2**28  # bytes of rows of all clients; more is memory-mapped


class Population(NamedTuple):
    """Clients of any number on the host, how cohorts of them are drawn, and which of them are evaluated.

    Attributes:
      clients: the training examples of all clients.
      cohort: `C`, the number of clients in a round. (Methods have an option `cohort` for clients on the device.)
      test_clients: test examples of the same clients; without them nothing is evaluated.
      sampling: "uniform", "size" or "stratified", as in `jfcl.simulation.cohorts.make_sampler`.
      dropout: the probability, in [0, 1), that a sampled client does not answer. It then counts as a client without
        examples, and its row stays as it is.
      stragglers: over-selection, 0 or more: `C (1 + stragglers)` clients are drawn (rounded, a half to the even
        number), and the first `C` answers, in random order, make up the round. The others count as drawn (`asked`), but
        their work and bytes do not count.
      remember: for a method that keeps each client's last update (`cfl` with `cohort=C`): the number of clients outside
        the cohort, those with the latest updates, that are compared with the cohort. Default: 1,000, or all. Their
        rows, which hold the updates, are copied to the device in every round; their examples are not.
      join: `(key, clients) -> state`, which gives new clients their first rows; default: `algorithm.init`. Required if
        that learns models from the clients: for IFCA with restarts, the init of IFCA without; the first cohort then
        decides.
      change: `(clients) -> clients`, of NumPy arrays: applied to every cohort after it is gathered, for example
        `jfcl.attacks.poison` for malicious clients.
      evaluate: the number of evaluated clients, drawn once; or their ids.
      rows_in_memory: bytes of rows of all clients beyond which they are memory-mapped, in the run's folder if it has
        one. No effect on a run that is resumed.

    Example:
      >>> import numpy as np
      >>> people = Clients({"x": np.zeros((100, 4, 2), np.float32), "y": np.zeros((100, 4), np.int32)}, np.full(100, 4))
      >>> Population(ClientStore.from_clients(people), cohort=10, stragglers=0.5).asked
      15
    """

    clients: ClientStore
    cohort: Annotated[int, Range(1)]
    test_clients: ClientStore | None = None
    sampling: str = "uniform"
    dropout: Annotated[float, Interval("[0, 1)")] = 0.0
    stragglers: Annotated[float, Interval("[0, inf)")] = 0.0
    remember: Annotated[int | None, Range(0)] = None
    join: Callable[[jax.Array, Clients], Any] | None = None
    change: Callable[[Clients], Clients] | None = None
    evaluate: int | Sequence[int] = 1000
    rows_in_memory: Annotated[float, Interval("[0, inf]")] = ROWS_IN_MEMORY

    @property
    def asked(self) -> int:
        """The number of clients that are drawn for a round."""
        return round(self.cohort * (1 + self.stragglers))
