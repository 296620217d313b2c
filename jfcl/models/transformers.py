"""Transformers with pre-normalisation: a vision transformer for small images, and a decoder for language models."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from jfcl.core import check, check_choice

POOLS = ("mean", "token")
NORMAL = nn.initializers.normal(0.02)  # of GPT-2, and of the position tables of both


class Attention(nn.Module):
    """Scaled dot-product attention, `[B, L, width]` to `[B, L, width]`, in `heads` that divide the width.

    With `causal`, a place attends to itself and to those before it.
    """

    heads: int
    causal: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        *places, width = x.shape
        shape = (*places, self.heads, width // self.heads)
        query, key, value = (nn.Dense(width, name=name)(x).reshape(shape) for name in ("query", "key", "value"))
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / jnp.sqrt(jnp.array(shape[-1], x.dtype))
        if self.causal:
            seen = jnp.tril(jnp.ones((1, 1, places[-1], places[-1]), bool))
            scores = jnp.where(seen, scores, jnp.full_like(scores, -jnp.inf))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)
        return nn.Dense(width, name="out")(mixed.reshape(x.shape))


class TransformerBlock(nn.Module):
    """Attention, then a hidden layer with GELU; each after layer normalisation, and added to its input.

    `dropout` is the probability that a number of what is added is left out, in training.
    """

    heads: int
    causal: bool
    hidden: int
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        def added(out):
            return nn.Dropout(self.dropout, deterministic=not train)(out)

        x = x + added(Attention(self.heads, self.causal, name="attention")(nn.LayerNorm()(x)))
        hidden = nn.gelu(nn.Dense(self.hidden)(nn.LayerNorm()(x)))
        return x + added(nn.Dense(x.shape[-1])(hidden))


def _check(width: int, heads: int, dropout: float) -> None:
    check(heads >= 1 and width % heads == 0, "heads", heads, f"a divisor of the width {width}")
    check(0 <= dropout < 1, "dropout", dropout, "at least 0 and below 1")


class ViT(nn.Module):
    """A small vision transformer: 2.69 M parameters at 32 x 32 x 3 and 10 classes.

    Images are cut into patches, each of which a dense layer turns into `width` numbers; a learned position is added.
    Blocks of attention and a hidden layer follow, each after layer normalisation; then the mean over the patches (or a
    class token), layer normalisation, and a dense layer.

    Source: Dosovitskiy et al. 2021; the mean instead of the token as in Beyer, Zhai & Kolesnikov 2022.

    Attributes:
      num_outputs: logits.
      patch: height and width of a patch; must divide those of the images.
      width, depth, heads: numbers per patch, blocks, heads of attention, which must divide the width.
      hidden: width of a block's hidden layer; default: 4 times `width`.
      pool: "mean", or "token": a class token before the patches, of which the output is used.
      dropout: in training, see `TransformerBlock`, and of the first layer's outputs.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> tiny = ViT(10, width=8, depth=1, heads=2)
      >>> tiny.init_with_output(jax.random.key(0), jnp.ones((2, 8, 8, 3)))[0].shape
      (2, 10)
    """

    num_outputs: int
    patch: int = 4
    width: int = 192
    depth: int = 6
    heads: int = 3
    hidden: int | None = None
    pool: str = "mean"
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        check_choice("pool", self.pool, POOLS)
        _check(self.width, self.heads, self.dropout)
        b, h, w, c = x.shape
        p = self.patch
        check(h % p == 0 and w % p == 0, "patch", p, f"a divisor of the images' height and width, {h} and {w}")
        x = x.reshape(b, h // p, p, w // p, p, c).swapaxes(2, 3).reshape(b, -1, p * p * c)
        x = nn.Dense(self.width, name="patches")(x)
        if self.pool == "token":
            token = self.param("token", nn.initializers.zeros, (1, 1, self.width), jnp.float32)
            x = jnp.concatenate([jnp.broadcast_to(token, (b, 1, self.width)).astype(x.dtype), x], axis=1)
        x = x + self.param("positions", NORMAL, (1, x.shape[1], self.width), jnp.float32)
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        for _ in range(self.depth):
            x = TransformerBlock(self.heads, False, self.hidden or 4 * self.width, self.dropout)(x, train)
        x = nn.LayerNorm()(x)
        return nn.Dense(self.num_outputs)(x[:, 0] if self.pool == "token" else x.mean(axis=1))


class GPT(nn.Module):
    """A decoder in the form of GPT-2, for `jfcl.models.language_model`: 3.76 M parameters at 10,000 words.

    Token ids `[B, L]` to logits `[B, L, num_outputs]`, which depend on the words up to their position. Positions are
    learned, one fewer than the texts of the task have words, since the last word is never an input; longer texts are
    refused. Unlike GPT-2's, the last layer has its own weights (not those of the embedding), so that it can be
    personal, and attention weights have no dropout.

    Source: Radford et al. 2019.

    Attributes:
      num_outputs: words of the vocabulary.
      width, depth, heads, hidden, dropout: as in `ViT`, of words.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> tiny = GPT(50, width=8, depth=1, heads=2)
      >>> tiny.init_with_output(jax.random.key(0), jnp.ones((2, 7), jnp.int32))[0].shape
      (2, 7, 50)
    """

    num_outputs: int
    width: int = 128
    depth: int = 6
    heads: int = 4
    hidden: int | None = None
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        _check(self.width, self.heads, self.dropout)
        length = x.shape[1]
        if self.is_initializing():
            positions = self.param("positions", NORMAL, (length, self.width), jnp.float32)
        else:
            positions = self.get_variable("params", "positions")
        check(length <= len(positions), "words of a text", length, f"at most {len(positions)}, the learned positions")
        x = nn.Embed(self.num_outputs, self.width, embedding_init=NORMAL)(x) + positions[None, :length]
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        for _ in range(self.depth):
            x = TransformerBlock(self.heads, True, self.hidden or 4 * self.width, self.dropout)(x, train)
        return nn.Dense(self.num_outputs)(nn.LayerNorm()(x))
