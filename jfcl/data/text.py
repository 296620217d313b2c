"""Text as token ids: lower-case words or characters, a vocabulary from the training split only."""

from __future__ import annotations

import re
import sys
from collections import Counter

import jax
import numpy as np

from jfcl.core import aligned_zeros, check, check_choice, check_count
from jfcl.data.dataset import Dataset

PAD, UNKNOWN = 0, 1
TOKENS = ("words", "characters")
_WORD = re.compile(r"[^\W_]+|[^\w\s]")


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

    Example:
      >>> x = np.array(["A cat, a dog", "a cow"])
      >>> data = Dataset("toy", {"x": x, "y": np.zeros(2, np.int32)}, None, 1, None, "")
      >>> data, words = tokenize(data, vocab_size=4, length=5)
      >>> data.train["x"].tolist(), words
      ([[2, 1, 3, 2, 1], [2, 1, 0, 0, 0]], ['<pad>', '<unknown>', 'a', ','])
    """
    check_choice("dataset.tokens", dataset.tokens, TOKENS)
    check_count("vocab_size", vocab_size, least=3)
    check_count("length", length, least=1 if dataset.tokens == "words" else 2)
    check(dataset.train["x"].dtype.kind in "UO", "dataset", dataset.train["x"].dtype, "a data set of strings")
    parts = {name: part for name, part in [("train", dataset.train), ("test", dataset.test)] if part is not None}
    if dataset.tokens == "characters":
        return _of_characters(dataset, parts, vocab_size, length)
    tokens = {name: [_WORD.findall(str(text).lower()) for text in part["x"]] for name, part in parts.items()}
    count = Counter(word for text in tokens["train"] for word in text)
    common = sorted(count, key=lambda word: (-count[word], word))[: vocab_size - 2]
    vocabulary = ["<pad>", "<unknown>", *common]
    ids = {word: i + 2 for i, word in enumerate(common)}
    encoded = {}
    for name, part in parts.items():
        x = aligned_zeros((len(part["x"]), length), np.int32)  # of PAD
        for row, words in zip(x, tokens[name], strict=True):
            row[: len(words)] = [ids.get(word, UNKNOWN) for word in words[:length]]
        encoded[name] = part | {"x": x}
    return dataset._replace(**encoded), vocabulary


def _of_characters(
    dataset: Dataset, parts: dict[str, dict[str, np.ndarray]], vocab_size: int, length: int
) -> tuple[Dataset, list[str]]:
    """Returns `tokenize` of characters: every text in rows that overlap by one character."""

    def codes_of(texts) -> np.ndarray:
        return np.frombuffer("".join(map(str, texts)).encode("utf-32-le", "surrogatepass"), np.uint32)

    characters, counts = np.unique(codes_of(parts["train"]["x"]), return_counts=True)
    common = characters[np.lexsort((characters, -counts))][: vocab_size - 2]
    id_of = np.full(sys.maxunicode + 1, UNKNOWN, np.int32)
    id_of[common] = np.arange(2, len(common) + 2)
    encoded, writer = {}, None if dataset.writer is None else {}
    for name, part in parts.items():
        ids = np.append(id_of[codes_of(part["x"])], np.int32(PAD))
        # Row r of a text begins at its character r (length - 1).
        sizes = np.array([len(str(text)) for text in part["x"]])
        ends, rows = np.cumsum(sizes), -(-np.maximum(sizes - 1, 0) // (length - 1))
        text = np.repeat(np.arange(len(sizes)), rows)
        nth = np.arange(len(text)) - (np.cumsum(rows) - rows)[text]
        x = aligned_zeros((len(text), length), np.int32)
        place = ((ends - sizes)[text] + nth * (length - 1))[:, None] + np.arange(length)
        x[:] = ids[np.where(place < ends[text][:, None], place, len(ids) - 1)]
        encoded[name] = jax.tree.map(lambda values: np.asarray(values)[text], part | {"x": part["y"]}) | {"x": x}  # noqa: B023
        if writer is not None:
            writer[name] = dataset.writer[name][text]
    return dataset._replace(**encoded, writer=writer), ["<pad>", "<unknown>", *map(chr, common)]
