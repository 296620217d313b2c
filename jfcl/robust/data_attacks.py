"""Attacks on the data of hostile clients; users import them from `jfcl.attacks`."""

from collections.abc import Callable

import numpy as np

from jfcl.core import Clients, check, check_choice, client_ids, num_clients, require

# (rng, inputs [n, ...], targets [n, ...], number of classes) -> (inputs, targets), of one client's real examples
DataAttack = Callable[[np.random.Generator, np.ndarray, np.ndarray, int | None], tuple[np.ndarray, np.ndarray]]


def label_zero(rng, x, y, num_classes):
    """Sets every label to 0 (Byzantine CFL's label flip).

    Example:
      >>> x, y = label_zero(np.random.default_rng(0), np.zeros((2, 4, 4, 1)), np.array([3, 4]), 10)
      >>> y.tolist()
      [0, 0]
    """
    return x, np.zeros_like(y)


def label_reverse(rng, x, y, num_classes):
    """Replaces label y by (number of classes − 1) − y.

    Example:
      >>> x, y = label_reverse(np.random.default_rng(0), np.zeros((2, 4, 4, 1)), np.array([3, 4]), 10)
      >>> y.tolist()
      [6, 5]
    """
    require(num_classes is not None, "attack label_reverse needs labels, and these are targets of a regression")
    return x, num_classes - 1 - y


def noisy_inputs(rng, x, y, num_classes):
    """Replaces every input by uniform noise in (−10, 10) (Byzantine CFL).

    Example:
      >>> x, y = noisy_inputs(np.random.default_rng(0), np.zeros((2, 4, 4, 1)), np.array([3, 4]), 10)
      >>> y.tolist(), bool(np.abs(x).max() > 9)
      ([3, 4], True)
    """
    is_float = np.issubdtype(x.dtype, np.floating)
    require(is_float, f"attack noisy_inputs needs inputs of floating-point numbers, and these are {x.dtype}")
    return rng.uniform(-10, 10, x.shape).astype(x.dtype), y


def backdoor(rng, x, y, num_classes):
    """Puts a bright 3 x 3 patch in the corner of half of the images, with label 0 for those (Gu et al. 2017).

    Example:
      >>> x, y = backdoor(np.random.default_rng(0), np.zeros((2, 4, 4, 1)), np.array([3, 4]), 10)
      >>> int((y == 0).sum()), int(x.sum())
      (1, 9)
    """
    require(x.ndim == 4, f"attack backdoor needs images [n, H, W, C], and the inputs have shape {x.shape}")
    x, y = x.copy(), y.copy()
    marked = rng.permutation(len(x))[: len(x) // 2]
    x[marked, -3:, -3:, :] = x.max(initial=1.0)
    y[marked] = 0
    return x, y


DATA_ATTACKS: dict[str, DataAttack] = {
    attack.__name__: attack for attack in (label_zero, label_reverse, noisy_inputs, backdoor)
}


def poison(
    clients: Clients, malicious: np.ndarray, attack: str | DataAttack, *, num_classes: int | None, seed: int = 0
) -> Clients:
    """Returns `clients` after an attack on the real examples of the malicious ones.

    Args:
      clients: with examples `{"x": inputs, "y": labels}`, on the host.
      malicious: `[N]` bool.
      attack: a name in `DATA_ATTACKS`, or a function `(rng, x [n, ...], y [n], num_classes) -> (x, y)` of the real
        examples of one client.
      num_classes: of the labels; `None` for a regression.
      seed: for attacks that draw.

    Returns:
      New `Clients`; the arrays of `clients` are not changed.

    Raises:
      ValueError: an unknown attack, `malicious` of another length, a function that returns other shapes.

    Example:
      >>> import numpy as np
      >>> clients = Clients({"x": np.zeros((2, 3, 1)), "y": np.array([[1, 2, 3], [4, 5, 6]])}, np.array([3, 2]))
      >>> poison(clients, np.array([False, True]), "label_reverse", num_classes=10).examples["y"].tolist()
      [[1, 2, 3], [5, 4, 6]]
    """
    if not callable(attack):
        check_choice("attack", attack, DATA_ATTACKS)
        attack = DATA_ATTACKS[attack]
    malicious = np.asarray(malicious)
    n = num_clients(clients)
    check(malicious.shape == (n,), "malicious", malicious.shape, f"of shape ({n},)")
    x, y = (np.array(clients.examples[part]) for part in ("x", "y"))
    y = y if num_classes is None else y.astype(np.int32)  # 8 bits may not hold all labels
    ids = np.asarray(client_ids(clients))
    for i in np.flatnonzero(malicious):
        m, rng = int(clients.size[i]), np.random.default_rng([seed, int(ids[i])])
        x[i, :m], y[i, :m] = _poisoned(attack, rng, x[i, :m], y[i, :m], num_classes)
    return clients._replace(examples={**clients.examples, "x": x, "y": y})


def _poisoned(attack: DataAttack, rng: np.random.Generator, x: np.ndarray, y: np.ndarray, num_classes: int):
    """Returns `attack(...)`; raises `ValueError` for results of other shapes or kinds, or labels of no class."""

    def form(array):
        return f"{array.dtype} {list(array.shape)}"

    result = attack(rng, x, y, num_classes)
    returned = f"one that returned {type(result).__name__}"
    accepted = f"a function that returns (x, y), {form(x)} and {form(y)}"
    check(isinstance(result, tuple) and len(result) == 2, "attack", returned, accepted)
    new_x, new_y = map(np.asarray, result)
    alike = all(np.can_cast(new.dtype, old.dtype, "same_kind") for new, old in ((new_x, x), (new_y, y)))
    fits = alike and (new_x.shape, new_y.shape) == (x.shape, y.shape)
    check(fits, "attack", f"one that returned {form(new_x)} and {form(new_y)}", accepted)
    if num_classes is not None:
        valid, accepted = ((new_y >= 0) & (new_y < num_classes)).all(), f"one with labels in 0..{num_classes - 1}"
        check(valid, "attack", f"one that returned labels {np.unique(new_y)}", accepted)
    return new_x, new_y
