"""Language modelling: the next word of a text, from the words before it."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfcl.core import Clients, Task, check, check_count, is_concrete, mask, require
from jfcl.core.platforms import in_parts
from jfcl.core.types import with_train_loss
from jfcl.data.dataset import PAD
from jfcl.models.tasks import cross_entropy, is_right, mixed_logits, network, remembered
from jfcl.training.losses import masked_mean

MOST_LOGITS = 2**27  # half a gigabyte: 432 texts of 32 words under a vocabulary of 10,000


def language_model(module: Any, length: int, vocab_size: int, *, training_argument: str | None = None) -> Task:
    """Returns the task of next-word prediction by a flax module: cross-entropy of every word given its prefix.

    Batches are `{"x": token ids [B, L], "y": topics}`, as from `jfcl.data.tokenize`; topics are ignored. The inputs are
    `x[:, :-1]` and the targets `x[:, 1:]`. Padding (id 0) is never a target. `<unknown>` (id 1) is a word like any
    other, so perplexities are comparable only under the same vocabulary.

    The loss of a text is the mean over its own targets, and that of a client the mean over its texts. The perplexity of
    a client is the exponential of its loss, and its accuracy the mean over its texts of the share of words that are
    predicted. A text of one word has no target and counts as loss 0; `check_tokens` finds such texts.

    Args:
      module: maps token ids `[B, length - 1]` to logits `[B, length - 1, vocab_size]`. It may have dropout, not batch
        statistics.
      length: words per text, `L`, at least 2.
      vocab_size: number of token ids, at least 3.
      training_argument: as in `jfcl.models.classification`.

    Returns:
      `Task`, the same object for the same arguments. Memory: at most `MOST_LOGITS` logits at a time; larger batches are
      processed in parts, with activations computed again for the gradient.

    Raises:
      ValueError: outputs that do not fit the vocabulary; a module with batch statistics; from the task, inputs that are
        not integers `[B, length]` in the vocabulary.

    Source: CFL, section VI-C (figure 9, AG News).

    Example:
      >>> import jax, jfcl
      >>> lstm = language_model(jfcl.models.LSTMLanguageModel(50, 8, 8), length=6, vocab_size=50)
      >>> texts = {"x": jax.numpy.array([[7, 3, 9, 2, 4, 5], [8, 3, 0, 0, 0, 0]])}
      >>> lstm.loss(lstm.init(jax.random.key(0)), texts).shape
      (2,)
    """
    check_count("length", length, least=2)
    check_count("vocab_size", vocab_size, least=3)
    return remembered(_language_model, module, length, vocab_size, training_argument)


@lru_cache(maxsize=64)
def _language_model(module: Any, length: int, vocab_size: int, training_argument: str | None) -> Task:
    net = network(module, (length - 1,), jnp.int32, training_argument, (length - 1, vocab_size))
    why = "texts are processed in parts, which have no common statistics: use GroupNorm or LayerNorm"
    require(net.statistics is None, f"{net.name} keeps batch statistics, but {why}")

    def inputs(batch):
        x = batch["x"]
        check(jnp.issubdtype(x.dtype, jnp.integer), "x", x.dtype, "token ids, which are integers (jfcl.data.tokenize)")
        check(x.ndim == 2 and x.shape[1] == length, "x", x.shape, f"token ids of shape (B, {length})")
        if is_concrete(x) and x.size:
            low, high = int(x.min()), int(x.max())
            check(low >= 0 and high < vocab_size, "x", f"{low}..{high}", f"token ids in 0..{vocab_size - 1}")
        return x[:, :-1]

    def of_words(score: Callable) -> Callable:
        """Returns the mean `[B]` of `score(logits, targets)` over the targets of every text."""

        def mean(logits, batch):
            targets = batch["x"][:, 1:]
            return jax.vmap(masked_mean)(score(logits, targets), targets != PAD)

        return mean

    def train_loss(key, params, batch, real):
        def losses(rows, part):
            x, batch = rows
            logits, _ = net.train(jax.random.fold_in(key, part), params, x, jnp.ones(len(x), bool))
            return task.cost(logits, batch)

        return in_parts(losses, (inputs(batch), batch), task.at_once), params

    functions = net.init, net.apply, of_words(cross_entropy), of_words(is_right), mixed_logits
    at_once = max(1, MOST_LOGITS // ((length - 1) * vocab_size))
    task = Task(*functions, perplexity=True, head=net.head, reads=("x",), inputs=inputs, at_once=at_once)
    return with_train_loss(task, None if net.train is None else train_loss)


def check_tokens(clients: Clients, vocab_size: int, *, name: str = "clients") -> None:
    """Raises `ValueError` for concrete texts that would make a language model meaningless.

    These are `examples["x"]` that are not integers `[N, M, L]`, ids outside `0..vocab_size-1`, and texts without a
    second word, which have no targets.

    Example:
      >>> check_tokens(Clients({"x": np.array([[[2, 3, 9]]])}, np.array([1])), vocab_size=5)
      Traceback (most recent call last):
      ValueError: clients: token ids must lie in 0..4, got 9 at client 0
    """
    x = np.asarray(clients.examples["x"])
    fits = x.ndim == 3 and x.dtype.kind in "iu"
    check(fits, f"{name}.examples['x']", f"{x.dtype} {x.shape}", "integer token ids [N, M, L] (jfcl.data.tokenize)")
    real = np.asarray(mask(clients))
    bad = ((x < 0) | (x >= vocab_size)) & real[:, :, None]
    if bad.any():
        client = np.argwhere(bad)[0, 0]
        raise ValueError(f"{name}: token ids must lie in 0..{vocab_size - 1}, got {x[bad][0]} at client {client}")
    short = (x[:, :, 1:] == PAD).all(axis=2) & real
    if short.any():
        what = f"{short.sum()} text(s) without a second word, first at client {np.argwhere(short)[0, 0]}"
        raise ValueError(f"{name}: {what}, leave nothing to predict; drop them")
