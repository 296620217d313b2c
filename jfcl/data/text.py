"""Text as token ids: lower-case words or characters, a vocabulary from the training split only."""

from __future__ import annotations

import itertools
import re
from collections import Counter

import jax
import numpy as np

from jfcl.core import aligned_zeros, check, check_choice, check_count
from jfcl.data.dataset import Dataset, normalised

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
