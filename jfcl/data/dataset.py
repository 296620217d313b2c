"""A data set, the examples that are divided among clients, and its texts as token ids."""

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jfcl.core import aligned_zeros, named_leaves
from jfcl.core.checks import check, check_apart, check_choice, check_count, check_held, check_integers, require
from jfcl.data.values import array_of, as_numpy

PAD, UNKNOWN = 0, 1
TOKENS = ("words", "characters")
_WORD = re.compile(r"[^\W_]+|[^\w\s]")
_NUMBERS_TEXTS = "; np.unique(labels, return_inverse=True) numbers labels of all splits together, as from_frame does"


class Dataset(NamedTuple):
    """A data set on the host.

    Attributes:
      name: its name in `load`.
      train: `{"x": [n, ...], "y": [n]}`. Images are float32 in `[0, 1]`, `[n, H, W, C]`; text is an array of strings
        until `tokenize` makes it ids; labels are int32 from 0, regression targets float32. Further entries are arrays
        `[n, ...]` of numbers, or pytrees of them: weights, masks. They follow the examples everywhere.
      test: the official test split, with the same entries, or `None` where there is none.
      num_classes: `None` for regression, and for texts without labels.
      writer: `{"train": [n], "test": [n']}` int32, the writer of each example, or `None` where it is not known.
      description: one line.
      writer_names: the name of writer `i`, of any type: a user's key, a speaker; or `None`.
      tokens: of texts: what `tokenize` cuts them into, "words" or "characters".
      table: of a table, how it was read, for `jfcl.data.read_rows` (see `jfcl.data.tables`); `None` for other data
        sets.
      vocab_size: of tokens: the number of ids in all, else `None`.
    """

    name: str
    train: dict[str, np.ndarray]
    test: dict[str, np.ndarray] | None
    num_classes: int | None
    writer: dict[str, np.ndarray] | None
    description: str
    writer_names: Sequence[Any] | None = None
    tokens: str = "words"
    table: dict[str, Any] | None = None
    vocab_size: int | None = None


def normalised(dataset: Any, *, texts: bool = False) -> Dataset:
    """Returns a data set with arrays of NumPy in the place of frames, series, sparse matrices and tensors.

    What `Dataset` does not describe is refused, and numbers that JAX's types do not hold or tell apart. Inputs may be
    `texts`.
    """
    accepted = "a jfcl.data.Dataset (jfcl.data.from_frame makes one of a table)"
    check(isinstance(dataset, Dataset), "dataset", type(dataset).__name__, accepted)
    name, count, writer = f"data set {dataset.name!r}", dataset.num_classes, dataset.writer
    if count is not None:
        check_count(f"{name}: num_classes (None for a regression)", count)
    wheres = {split: f"{name} ({split})" for split in ("train", "test")[: 1 if dataset.test is None else 2]}
    splits = {split: _checked(getattr(dataset, split), where, count, texts) for split, where in wheres.items()}
    shapes = [{path: values.shape[1:] for path, values in named_leaves(part).items()} for part in splits.values()]
    accepted = f"those of training, {shapes[0]}"
    check(shapes[-1] == shapes[0], f"{name} (test): the shapes of its arrays", shapes[-1], accepted)
    if writer is not None:
        fits = isinstance(writer, dict) and all(split in writer for split in wheres)
        check(fits, f"{wheres['train']}: writer", type(writer).__name__, "a dict with the writer ids of each split")
        writer = {split: as_numpy(ids, f"{name}: writer") for split, ids in writer.items()}
        for split, where in wheres.items():
            check_integers(f"{where}: writer", writer[split], len(splits[split]["x"]))
    return dataset._replace(**splits, writer=writer)


def _checked(split: Any, where: str, num_classes: int | None, texts: bool) -> dict[str, Any]:
    """Returns a split as `normalised` does."""

    def array(path: Any, values: Any) -> np.ndarray:
        return array_of(values, f"{where}: {jax.tree_util.keystr(path, simple=True, separator='/')}")

    parts = split if isinstance(split, dict) else {}
    kinds, accepted = {name: type(values).__name__ for name, values in parts.items()}, "a dict with arrays 'x' and 'y'"
    check(hasattr(parts.get("x"), "shape") and hasattr(parts.get("y"), "shape"), where, kinds, accepted)
    split = jax.tree_util.tree_map_with_path(array, split)
    x, y = split["x"], split["y"]
    require(x.size > 0, f"{where}: the inputs are empty, of shape {list(x.shape)}")

    # Inputs.
    if x.dtype.kind in "fiu":
        is_bytes = x.dtype.kind in "iu" and (x.ndim > 2 or x.dtype == np.uint8)
        accepted = "of floating-point numbers, such as x / 255; token ids are int32 [n, L]"
        check(not is_bytes, f"{where}: images", f"{x.dtype} {list(x.shape)}", accepted)
        is_first = x.ndim == 4 and x.shape[1] <= 4 < min(x.shape[2:])
        accepted = "[n, H, W, C], with channels last: np.moveaxis(x, 1, -1) moves them (volumes have a fifth axis)"
        check(not is_first, f"{where}: images", list(x.shape), accepted)
    else:
        accepted = "numbers; jfcl.data.tokenize turns texts into ids, jfcl.data.from_frame images of PIL into arrays"
        check(texts and x.dtype == object, f"{where}: inputs", str(x.dtype), accepted)

    # All arrays.
    for name, values in named_leaves(split).items():
        name = {"['x']": "inputs", "['y']": "targets"}.get(name, name)
        fits = values.dtype != object or name == "inputs"
        accepted = f"numbers{_NUMBERS_TEXTS if name == 'targets' else ''}"
        check(fits, f"{where}: {name}", "texts", accepted)
        if len(values) != len(x):
            raise ValueError(f"{where}: {name} has {len(values)} entries for {len(x)} inputs; give one for each")
        check_held(f"{where}: {name}", values)
        if values.ndim <= 2 and (values.dtype.kind == "f" or (name == "inputs" and values.ndim == 1)):
            check_apart(f"{where}: {name}", values)
    if num_classes is not None:
        advice = "y.astype(np.int32)" if y.ndim == 1 else "y.argmax(-1) of one-hot rows"
        accepted = f"a label for each input, integers ({advice}); a regression has num_classes=None"
        check(y.ndim == 1 and y.dtype.kind in "iu", f"{where}: y", f"{y.dtype} {list(y.shape)}", accepted)
        fits = y.min() >= 0 and y.max() < num_classes
        check(fits, f"{where}: labels", [int(y.min()), int(y.max())], f"in 0..{num_classes - 1}")
        split["y"] = y.astype(np.int32)  # 8 bits may not hold what a shift renames them to
    return split


def labels_of(dataset: Dataset, split: str) -> np.ndarray:
    """Returns `[n]` the labels of a split, by which it is stratified; zeros where it has none."""
    y = getattr(dataset, split)["y"]
    return y if dataset.num_classes is not None else np.zeros(len(y), np.int32)


def tokenize(dataset: Dataset, *, vocab_size: int = 10_000, length: int = 32) -> tuple[Dataset, list[str]]:
    """Replaces texts by rows of token ids.

    Id 0 is padding, 1 any token that is not in the vocabulary; 2 and above are the most frequent tokens of the
    *training* split, most frequent first, ties in alphabetical order. The targets of a language model are `x` shifted
    by one, and the labels, which stay, distinguish topics.

    Words (`dataset.tokens`) are runs of letters and digits, and single punctuation marks except `_`, in lower case.
    Texts are cut to `length` tokens. Characters stay as they are, and a text becomes as many rows as it needs: a row
    begins with the last character of the row before, so that every character but the first is a target once. Texts with
    fewer than two characters are dropped. Further arrays of an example are those of each of its rows.

    Args:
      dataset: a data set of strings (`load("ag_news")`, `load("tiny_shakespeare")`).
      vocab_size, length: number of ids in all, at least 3, and tokens per row, at least 2 for characters.

    Returns:
      `(dataset, vocabulary)`: `x` is int32 `[n, L]`; `vocabulary[id]` is the token of an id.

    Raises:
      ValueError: no data set of texts, or one that `Dataset` does not describe.

    Example:
      >>> x = np.array(["A cat, a dog", "a cow"])
      >>> data = Dataset("toy", {"x": x, "y": np.zeros(2, np.int32)}, None, 1, None, "")
      >>> data, words = tokenize(data, vocab_size=4, length=5)
      >>> data.train["x"].tolist(), words
      ([[2, 1, 3, 2, 1], [2, 1, 0, 0, 0]], ['<pad>', '<unknown>', 'a', ','])
    """
    dataset = normalised(dataset, texts=True)
    check_choice("dataset.tokens", dataset.tokens, TOKENS)
    check_count("vocab_size", vocab_size, least=3)
    check_count("length", length, least=1 if dataset.tokens == "words" else 2)
    check(dataset.train["x"].dtype.kind in "UO", "dataset", dataset.train["x"].dtype, "a data set of strings")
    parts = {name: part for name, part in [("train", dataset.train), ("test", dataset.test)] if part is not None}
    cut = str if dataset.tokens == "characters" else lambda text: _WORD.findall(str(text).lower())
    tokens = {name: list(map(cut, part["x"])) for name, part in parts.items()}
    count = Counter(itertools.chain.from_iterable(tokens["train"]))
    common = sorted(count, key=lambda token: (-count[token], token))[: vocab_size - 2]
    ids = {token: i + 2 for i, token in enumerate(common)}
    encoded, writer = {}, None if dataset.writer is None else dict(dataset.writer)
    for name, part in parts.items():
        rows, text = [], []  # the tokens of each row, and the text that it is of
        for i, of_text in enumerate(tokens[name]):
            begins = [0] if dataset.tokens == "words" else range(0, len(of_text) - 1, length - 1)
            rows += [of_text[begin : begin + length] for begin in begins]
            text += [i] * len(begins)
        x = aligned_zeros((len(rows), length), np.int32)  # of PAD
        for out, row in zip(x, rows, strict=True):
            out[: len(row)] = [ids.get(token, UNKNOWN) for token in row]
        encoded[name] = jax.tree.map(lambda values: np.asarray(values)[text], part | {"x": part["y"]}) | {"x": x}  # noqa: B023
        if writer is not None:
            writer[name] = dataset.writer[name][text]
    vocabulary = ["<pad>", "<unknown>", *common]
    return dataset._replace(**encoded, writer=writer, vocab_size=len(vocabulary)), vocabulary
