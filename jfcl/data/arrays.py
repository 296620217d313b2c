"""`Clients` from what a user has for each of them: arrays, dictionaries, data sets in the manner of PyTorch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from jfcl.core import Clients, check, stack_clients
from jfcl.data.columns import INPUTS, TARGETS
from jfcl.data.tables import row_numbers
from jfcl.data.values import array_beside, as_numpy, as_type, inputs_of, is_table


def from_arrays(clients: Iterable[Any], *, channels_first: bool | None = None) -> Clients:
    """Stacks one pair of inputs and targets per client, in the form that the tasks of `jfcl.models` read.

    Args:
      clients: for each client `(x, y)`: arrays `[m_i, ...]` and `[m_i]` (or lists of numbers), or frames with columns
        of numbers, the same for all clients, and series. Or a dictionary with "x" and "y", or other usual names such as
        "image" and "label", and any further arrays `[m_i, ...]`, such as weights.
      channels_first: whether images are `[m_i, C, H, W]`, as in PyTorch, and become `[m_i, H, W, C]`. `None`: as
        their shape shows, where one of its ends is 4 or less.

    Returns:
      `Clients` with examples `{"x": [N, M, ...], "y": [N, M]}` on the host, and the further arrays under their names.
      Inputs: single numbers and floats become float32, rows of integers (token ids) int32. Images become float32 in
      `[0, 1]` with a channel axis: `[m, H, W]` or `[m, H, W, C]` of bytes, 16-bit integers or booleans, and lists of
      images of PIL in any mode, of which grey, colour and transparency (a further channel) may be mixed. Targets:
      integers int32, floats float32; images of PIL are maps of labels. Further arrays keep their values, in 32 bits at
      most.

    Raises:
      ValueError: no clients; a client that is not such a pair, or has no examples; different numbers of inputs and
        targets; inputs of different shapes; missing values; numbers that float32 or int32 cannot hold; images whose
        white value is unknown, such as integers of 32 bits; a shape that does not show where the channels are; a column
        of frames that numbers the rows, such as the index in a saved csv (`Unnamed: 0`).

    Example:
      >>> clients = from_arrays([(np.ones((2, 3)), [0, 1]), {"image": np.ones((1, 3)), "label": [1]}])
      >>> clients.examples["x"].shape, clients.examples["y"].tolist(), clients.size.tolist()
      ((2, 2, 3), [[0, 1], [1, 0]], [2, 1])
    """
    return _stacked((_parts(f"client {i}", client) for i, client in enumerate(clients)), channels_first)


def from_torch(datasets: Iterable[Any], *, channels_first: bool | None = None) -> Clients:
    """Stacks one `torch.utils.data.Dataset` per client: any object with `len` and rows `(x, y)` at `0 .. len-1`.

    PyTorch is not needed: a row may hold tensors, arrays, numbers or images, or be a dictionary, with further arrays.

    Args:
      datasets: the data set of each client, a `torch.utils.data.Subset` for example. Every row is read once.
      channels_first: as in `from_arrays`. Images of PIL have their channels last already.

    Returns:
      `Clients`, as from `from_arrays`.

    Example:
      >>> rows = [(np.zeros((3, 8, 8), np.float32), 1), (np.ones((3, 8, 8), np.float32), 0)]
      >>> from_torch([rows, rows[:1]]).examples["x"].shape
      (2, 2, 8, 8, 3)
    """

    def parts(i, dataset):
        sized = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        check(sized, f"client {i}", type(dataset), "a data set with len and rows (x, y)")
        check(len(dataset) > 0, f"client {i}", "0 rows", "a data set with at least one")
        return _columns(f"client {i}", [_parts(f"client {i}, row {j}", dataset[j]) for j in range(len(dataset))])

    return _stacked((parts(i, dataset) for i, dataset in enumerate(datasets)), channels_first)


def _columns(where: str, rows: list[Any]) -> Any:
    """Returns the entries of rows as one list, or a dict of lists where they are dicts."""
    if not isinstance(rows[0], dict):
        return [as_numpy(row, where) for row in rows]
    odd = next((row for row in rows if not isinstance(row, dict) or list(row) != list(rows[0])), None)
    check(odd is None, where, odd, f"of rows with the names {list(rows[0])}, as in the first")
    return {name: _columns(f"{where}: {name}", [row[name] for row in rows]) for name in rows[0]}


def _stacked(clients: Iterable[dict[str, Any]], channels_first: bool | None) -> Clients:
    """Stacks clients, of which some may have integers where others have float32: float64 holds both, and is undone."""
    beside, columns = [], []

    def inputs() -> Iterator[tuple[str, Any]]:
        for i, parts in enumerate(clients):
            x = parts.pop("x")
            beside.append(parts)
            columns.append(list(x.columns) if is_table(x) else None)
            check(columns[i] == columns[0], f"client {i}: x: columns", columns[i], f"{columns[0]}, as in client 0")
            yield f"client {i}: x", x

    xs, moved = inputs_of(inputs(), channels_first)
    if columns and columns[0]:
        numbers = row_numbers({name: [values] for name, values in zip(columns[0], np.concatenate(xs).T, strict=True)})
        check(not numbers, "x: columns", numbers, "of inputs: these number the rows of all clients; drop them")
    parts = [_client(f"client {i}", x, parts, moved) for i, (x, parts) in enumerate(zip(xs, beside, strict=True))]
    stacked = stack_clients(parts)
    as_float32 = jax.tree.map(lambda x: x.astype(np.float32) if x.dtype == np.float64 else x, stacked.examples)
    return stacked._replace(examples=as_float32)


def _parts(where: str, value: Any) -> dict[str, Any]:
    """Returns the inputs, the targets and the further arrays of a client (or of a row)."""
    if isinstance(value, dict):
        names = [[name for name in usual if name in value] for usual in (INPUTS, TARGETS)]
        accepted = f"of one of {', '.join(INPUTS)} and one of {', '.join(TARGETS)}"
        check(list(map(len, names)) == [1, 1], f"{where}: the names", list(value), accepted)
        (x,), (y,) = names
        return {"x": value[x], "y": value[y], **{name: value[name] for name in value if name not in (x, y)}}
    is_sequence = isinstance(value, tuple | list)
    what = f"{type(value).__name__}{f' of {len(value)}' if is_sequence else ''}"
    accepted = "a pair (x, y), or a dict with 'x' and 'y', and other names for further arrays"
    check(is_sequence and len(value) == 2, where, what, accepted)
    return {"x": value[0], "y": value[1]}


def _client(where: str, x: np.ndarray, parts: dict[str, Any], moved: bool) -> dict[str, Any]:
    """Returns the arrays of a client with the types of the library; `moved`: images had their channels first."""
    check(x.dtype != object, f"{where}: x", x[0], "numbers; texts become numbers by jfcl.data.tokenize")
    arrays = {n: array_beside(values, f"{where}: {n}", moved=moved, plane=x.shape[1:3]) for n, values in parts.items()}
    y = arrays["y"]
    check(not isinstance(y, dict), f"{where}: y", y, "an array of numbers [m, ...]")
    arrays["y"] = y if y.dtype.kind == "f" else as_type(np.int32, y, f"{where}: y")
    return {"x": x, **arrays}
