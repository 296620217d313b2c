"""Removal of compiled programs, which outlive the objects that they are compiled for."""

from __future__ import annotations

import gc

from jfcl.analysis import metrics
from jfcl.mapping.jitted import jitted
from jfcl.methods.cfl import parameter_tree
from jfcl.simulation import evaluation, grid_rows, on_device, streamed


def clear_programs() -> None:
    """Drops the compiled programs of `simulate`, `simulate_population`, `sweep`, `evaluate` and `assign_newcomer`.

    jax keeps the programs of every `Algorithm` and `Task` that one of these functions has run, some ten megabytes each,
    even after the last reference to the object is gone. A process that makes many of them (a search over
    hyperparameters; but see `hyperparams` of `simulate`) calls this function from time to time. A later call with an
    earlier object compiles again. Programs of other code stay; `jax.clear_caches()` drops those too. Call it while no
    simulation runs in another thread.

    Example:
      >>> import jax, jfcl, numpy as np, optax
      >>> from jfcl.testing import problem
      >>> clients, _, task, training = problem()
      >>> for count in (1, 2):
      ...     algorithm = jfcl.ifca(task, training, num_clusters=count)
      ...     history = jfcl.simulate(algorithm, clients, key=jax.random.key(0), num_rounds=1)
      ...     jfcl.clear_programs()
    """
    for module in (metrics, parameter_tree, evaluation, on_device, streamed, grid_rows):
        for value in vars(module).values():
            if isinstance(value, jitted):
                value.clear_cache()
    gc.collect()  # programs and the objects kept with them refer to each other
