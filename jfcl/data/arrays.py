"""`Clients` from what a user has for each of them: arrays, dictionaries, data sets in the manner of PyTorch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from jfcl.core import Clients, check, shown, stack_clients
from jfcl.data.columns import INPUTS, TARGETS, as_type, examples_of


def from_arrays(clients: Iterable[Any], *, pad_to: int | None = None) -> Clients:
    """Stacks one pair of inputs and targets per client, in the form that the tasks of `jfcl.models` read.

    Args:
      clients: of each client `(x, y)`: arrays `[m_i, ...]` and `[m_i]` (or lists of numbers). Or a dictionary with "x"
        and "y", or other usual names such as "image" and "label".
      pad_to: as in `jfcl.stack_clients`.

    Returns:
      `Clients` with examples `{"x": [N, M, ...], "y": [N, M]}` on the host. Single numbers and floats become float32,
      images of bytes (`[m, H, W]` or `[m, H, W, C]` uint8) float32 in `[0, 1]` with a channel axis, arrays of integers
      int32; integer targets int32, others float32.

    Raises:
      ValueError: no clients; a client that is no such pair, or has no examples; different numbers of inputs and
        targets; inputs of different shapes (with both); missing values; numbers that float32 or int32 cannot hold.

    Example:
      >>> clients = from_arrays([(np.ones((2, 3)), [0, 1]), {"image": np.ones((1, 3)), "label": [1]}])
      >>> clients.examples["x"].shape, clients.examples["y"].tolist(), clients.size.tolist()
      ((2, 2, 3), [[0, 1], [1, 0]], [2, 1])
    """
    is_one = isinstance(clients, dict) or _is_array(clients)
    is_one = is_one or (isinstance(clients, tuple) and len(clients) == 2 and all(map(_is_array, clients)))
    check(not is_one, "clients", type(clients), "a list with a pair (x, y) per client")
    return _stacked([_client(i, *_pair(i, client)) for i, client in enumerate(clients)], pad_to)


def from_torch(datasets: Iterable[Any], *, channels_first: bool = False, pad_to: int | None = None) -> Clients:
    """Stacks one `torch.utils.data.Dataset` per client: any object with `len` and rows `(x, y)` at `0 .. len-1`.

    PyTorch is not needed: a row may hold tensors, arrays, numbers or images.

    Args:
      datasets: of each client its data set, a `torch.utils.data.Subset` for example. Every row is read once.
      channels_first: the inputs are images `[C, H, W]`, as PyTorch has them; they become `[H, W, C]`.
      pad_to: as in `jfcl.stack_clients`.

    Returns:
      `Clients`, as from `from_arrays`.

    Raises:
      ValueError: a client without such rows, or of none; those of `from_arrays`.

    Example:
      >>> rows = [(np.zeros((3, 8, 8), np.float32), 1), (np.ones((3, 8, 8), np.float32), 0)]
      >>> from_torch([rows, rows[:1]], channels_first=True).examples["x"].shape
      (2, 2, 8, 8, 3)
    """
    clients = []
    for i, dataset in enumerate(datasets):
        sized = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and not isinstance(dataset, dict)
        check(sized and not _is_array(dataset), f"client {i}", type(dataset), "a data set with len and rows (x, y)")
        check(len(dataset) > 0, f"client {i}", "0 rows", "a data set with at least one")
        rows = [_pair(f"{i}, row {j}", dataset[j]) for j in range(len(dataset))]
        inputs = [_numpy(row[0]) for row in rows]
        if channels_first:
            odd = next((np.shape(one) for one in inputs if np.ndim(one) != 3), None)
            check(odd is None, "channels_first", odd, f"left out: inputs of client {i} are not [C, H, W]")
        x = examples_of(inputs, f"client {i}: x")
        if channels_first:
            x = np.ascontiguousarray(np.moveaxis(x, 1, -1))
        clients.append(_client(i, x, [_numpy(row[1]) for row in rows]))
    return _stacked(clients, pad_to)


def _stacked(clients: list[dict[str, np.ndarray]], pad_to: int | None) -> Clients:
    """Stacks clients, of which some may have integers where others have float32: float64 holds both, and is undone."""
    made = stack_clients(clients, pad_to=pad_to)
    as_float32 = {name: x.astype(np.float32) if x.dtype == np.float64 else x for name, x in made.examples.items()}
    return made._replace(examples=as_float32)


def _pair(client: Any, value: Any) -> tuple[Any, Any]:
    """Returns the inputs and targets of a client (or of a row)."""
    if isinstance(value, dict):
        found = [[name for name in names if name in value] for names in (INPUTS, TARGETS)]
        fits = all(len(names) == 1 for names in found)
        accepted = f"of one of {', '.join(INPUTS)} and one of {', '.join(TARGETS)}"
        check(fits, f"client {client}: the names", list(value), accepted)
        return value[found[0][0]], value[found[1][0]]
    fits = isinstance(value, tuple | list) and len(value) == 2
    size = f" of {len(value)}" if isinstance(value, tuple | list) else ""
    check(fits, f"client {client}", f"{type(value).__name__}{size}", "a pair (x, y), or a dict with 'x' and 'y'")
    return value[0], value[1]


def _client(client: int, x: Any, y: Any) -> dict[str, np.ndarray]:
    """Returns the arrays of a client with the types of the library."""
    where, x = f"client {client}", _numpy(x)
    several = np.ndim(x) > 0 if _is_array(x) else hasattr(x, "__iter__")
    check(several, f"{where}: x", x, "an array or a list with an entry for each example")
    none = np.size(x) == 0 if _is_array(x) else hasattr(x, "__len__") and len(x) == 0
    check(not none, f"{where}: x", "0 examples", "of at least one (leave out clients without examples)")
    x = examples_of(x, f"{where}: x")
    check(x.dtype != object, f"{where}: x", shown(x[0]), "numbers; texts become numbers by jfcl.data.tokenize")
    y = np.asarray(_numpy(y))
    check(y.dtype.kind in "biuf" and y.ndim > 0, f"{where}: y", f"{y.dtype} {y.shape}", "an array of numbers [m, ...]")
    check(len(x) == len(y), f"{where}: y", f"{len(y)} targets", f"of as many as the {len(x)} inputs")
    return {"x": x, "y": as_type(np.float32 if y.dtype.kind == "f" else np.int32, y, f"{where}: y")}


def _is_array(value: Any) -> bool:
    return hasattr(value, "__array__") or hasattr(value, "detach")


def _numpy(value: Any) -> Any:
    """Returns a tensor of PyTorch as an array, and other values as they are."""
    return value.detach().cpu().numpy() if hasattr(value, "detach") else value
