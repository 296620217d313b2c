"""Text as token ids: lower-case words, a vocabulary from the training split only."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np

from jfcl.core import aligned_zeros, check, check_count
from jfcl.data.dataset import Dataset

PAD, UNKNOWN = 0, 1
_WORD = re.compile(r"[^\W_]+|[^\w\s]")


def tokenize(dataset: Dataset, *, vocab_size: int = 10_000, length: int = 32) -> tuple[Dataset, list[str]]:
    """Replaces texts by rows of token ids.

    Tokens are runs of letters and digits, and single punctuation marks, in lower case. Id 0 is padding, 1 any word that
    is not in the vocabulary; 2 and above are the most frequent words of the *training* split, most frequent first, ties
    in alphabetical order. Texts are cut to `length` tokens. Labels are kept: the targets of a language model are `x`
    shifted by one, and the labels distinguish topics.

    Args:
      dataset: a data set of strings (`load("ag_news")`).
      vocab_size: number of ids in all, at least 3.
      length: tokens per text, `L`.

    Returns:
      `(dataset, vocabulary)`: `x` is int32 `[n, L]`; `vocabulary[id]` is the word of an id.

    Raises:
      ValueError: a data set that is not text; `vocab_size` below 3; `length` below 1, or too large for the memory.

    Example:
      >>> x = np.array(["A cat, a dog", "a cow"])
      >>> data = Dataset("toy", {"x": x, "y": np.zeros(2, np.int32)}, None, 1, None, "")
      >>> data, words = tokenize(data, vocab_size=4, length=5)
      >>> data.train["x"].tolist(), words
      ([[2, 1, 3, 2, 1], [2, 1, 0, 0, 0]], ['<pad>', '<unknown>', 'a', ','])
    """
    check_count("vocab_size", vocab_size, least=3)
    check_count("length", length)
    check(dataset.train["x"].dtype.kind in "UO", "dataset", dataset.train["x"].dtype, "a data set of strings")
    parts = {name: part for name, part in [("train", dataset.train), ("test", dataset.test)] if part is not None}
    split = {name: [_WORD.findall(str(text).lower()) for text in part["x"]] for name, part in parts.items()}
    count = Counter(word for text in split["train"] for word in text)
    common = sorted(count, key=lambda word: (-count[word], word))[: vocab_size - 2]
    vocabulary = ["<pad>", "<unknown>", *common]
    ids = {word: i + 2 for i, word in enumerate(common)}
    encoded = {}
    for name, part in parts.items():
        x = aligned_zeros((len(part["x"]), length), np.int32)  # of PAD
        for row, words in zip(x, split[name], strict=True):
            row[: len(words)] = [ids.get(word, UNKNOWN) for word in words[:length]]
        encoded[name] = {"x": x, "y": part["y"]}
    return dataset._replace(**encoded), vocabulary
