"""One program for what tests would else run operation by operation, each of which is compiled on its own."""

from functools import partial

import jax

import jfcl


def rollout(algorithm, clients, *, key, num_rounds):
    """`jfcl.rollout`, with `init`."""
    return jax.jit(partial(jfcl.rollout, algorithm, num_rounds=num_rounds))(clients, key=key)
