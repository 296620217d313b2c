"""A part of every client's examples that is not trained on, to choose hyperparameters by."""

from __future__ import annotations

import jax
import numpy as np

from jfcl.core import Clients, check, client_ids, max_examples, stack_clients
from jfcl.core.checks import check_count


def hold_out(clients: Clients, share: float, *, seed: int = 0) -> tuple[Clients, Clients]:
    """Divides every client's examples at random into those to train on and those held out.

    Args:
      clients: `[N, M, ...]`, on the host.
      share: of each client's examples that are held out, in (0, 1): rounded down, at least one, and never all of them.
        A client with a single example keeps it for training.
      seed: of the draws. They depend on the client's id too, but not on other clients.

    Returns:
      `(train, held_out)`, `Clients` with the same ids in the same order, as NumPy arrays. Cost: a copy of the data.

    Raises:
      ValueError: a share outside (0, 1), no client with two examples.

    Example:
      >>> clients = Clients({"x": np.arange(20.0).reshape(2, 10, 1)}, np.array([10, 3], np.int32))
      >>> train, held_out = hold_out(clients, 0.2)
      >>> train.size.tolist(), held_out.size.tolist(), train.examples["x"].shape, held_out.examples["x"].shape
      ([8, 2], [2, 1], (2, 8, 1), (2, 2, 1))
    """
    check(0 < share < 1, "share", share, "in (0, 1)")
    check_count("seed", seed, least=0, most=2**32 - 1)
    size, ids, most = np.asarray(clients.size), np.asarray(client_ids(clients)), max_examples(clients)
    held = np.where(size > 1, np.clip((share * size + 1e-9).astype(int), 1, np.maximum(size - 1, 1)), 0)
    check((held > 0).any(), "clients", f"{size.max()} examples in the largest", "of two examples or more each")
    is_held = np.zeros((len(size), most), bool)
    for i, count in enumerate(held):
        drawn = np.random.default_rng([seed, int(ids[i])]).permutation(size[i])[:count]
        is_held[i, drawn] = True
    real = np.arange(most)[None, :] < size[:, None]
    return tuple(_kept(clients, real & part, ids) for part in (~is_held, is_held))


def _kept(clients: Clients, wanted: np.ndarray, ids: np.ndarray) -> Clients:
    """Returns the clients with the examples `wanted` `[N, M]` alone, in their order; padding is zero."""
    examples = jax.tree.map(np.asarray, clients.examples)

    def of_client(i):
        return jax.tree.map(lambda x: x[i, wanted[i]], examples)

    return stack_clients(map(of_client, range(len(wanted))))._replace(id=ids)
