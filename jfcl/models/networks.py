"""The networks of the papers, as flax.linen modules. Inputs `[B, ...]` float32, outputs logits `[B, num_outputs]`.

Language models take token ids `[B, L]` and return logits for every position, `[B, L, num_outputs]`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from jfcl.models.conv import NHWC, conv, max_pool


class Linear(nn.Module):
    """One dense layer on the flattened input."""

    num_outputs: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(self.num_outputs)(x.reshape(len(x), -1))


def _dense(x: jax.Array, hidden: tuple[int, ...], num_outputs: int, **options: Any) -> jax.Array:
    """Returns the logits of dense layers on the flattened `x`; `options` are of the hidden ones, with ReLU."""
    x = x.reshape(len(x), -1)
    for width in hidden:
        x = nn.relu(nn.Dense(width, **options)(x))
    return nn.Dense(num_outputs)(x)


class MLP(nn.Module):
    """Dense layers with ReLU between, of the widths `hidden`: 784-200-10 on MNIST in IFCA and Federated-Clustering."""

    num_outputs: int
    hidden: tuple[int, ...] | int = (200,)

    def __post_init__(self):
        self.hidden = (self.hidden,) if isinstance(self.hidden, int) else tuple(self.hidden)
        super().__post_init__()

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return _dense(x, self.hidden, self.num_outputs)


class Conv(nn.Module):
    """A convolution of stride 1, 2 x 2 max-pooling with `pool`, and ReLU; parameters as those of `flax.linen.Conv`.

    Bias and ReLU come after pooling, which is cheaper and gives the same result. Pooling drops the last of an odd
    number of rows or columns, so the convolution does not compute it: its padding at that edge is one less. For the 11
    x 11 of the MNIST networks' second layer, that saves a sixth.

    Attributes:
      features: channels of the output.
      size: of the square kernel.
      padding: zeros at each edge, or "SAME", "VALID".
      pool: with pooling; or another pooling, a function of images that takes maxima.
    """

    features: int
    size: int
    padding: int | str
    pool: bool | Callable[[jax.Array], jax.Array] = False
    kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()
    bias_init: nn.initializers.Initializer = nn.initializers.zeros

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param("kernel", self.kernel_init, (self.size, self.size, x.shape[-1], self.features), jnp.float32)
        bias = self.param("bias", self.bias_init, (self.features,), jnp.float32)
        x, kernel, bias = nn.dtypes.promote_dtype(x, kernel, bias)
        padding = ((self.padding, self.padding),) * 2
        if isinstance(self.padding, str):
            padding = lax.padtype_to_pads(x.shape[1:3], kernel.shape[:2], (1, 1), self.padding)
        if self.pool is True:
            out = [n + low + high - self.size + 1 for n, (low, high) in zip(x.shape[1:3], padding, strict=True)]
            dropped = [n % 2 if n > 1 else 0 for n in out]
            padding = tuple((low, high - cut) for (low, high), cut in zip(padding, dropped, strict=True))
        x = conv(x, kernel, (1, 1), padding, dimension_numbers=NHWC, pooled=self.pool is True)
        if self.pool:
            x = max_pool(x, 2) if self.pool is True else self.pool(x)
        return nn.relu(x + bias.reshape(1, 1, 1, -1))


class CNN(nn.Module):
    """Convolutions with ReLU, each `(channels, side of the kernel, padding, with pooling)`, then dense layers."""

    num_outputs: int
    convolutions: tuple[tuple[int, int, int | str, bool], ...]
    dense: tuple[int, ...]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for features, size, padding, pool in self.convolutions:
            x = Conv(features, size, padding, pool)(x)
        return _dense(x, self.dense, self.num_outputs)


class CNNMnist(CNN):
    """The CNN of Byzantine CFL for MNIST and Fashion-MNIST: 234,090 parameters at 28 x 28 and 10 classes.

    Two 5 x 5 convolutions of 32 channels, each with padding 1, ReLU and 2 x 2 max-pooling, then dense layers of 256 and
    the classes. (The paper's 800 = 32 * 5 * 5 inputs of the first dense layer imply padding 1 in both convolutions.)
    """

    convolutions: tuple = ((32, 5, 1, True),) * 2
    dense: tuple = (256,)


class CNNCifar(CNN):
    """The CNN of IFCA for rotated CIFAR-10: "2 convolutional layers followed by 2 fully connected layers".

    The paper has no widths. Here: 5 x 5 convolutions of 64 channels with padding SAME, ReLU and 2 x 2 max-pooling, then
    dense layers of 384 and the classes.
    """

    convolutions: tuple = ((64, 5, "SAME", True),) * 2
    dense: tuple = (384,)


class CNNFemnist(CNN):
    """The CNN of IFCA for FEMNIST: two convolutions, each with max-pooling, then two dense layers.

    Widths as in LEAF's own FEMNIST model: 5 x 5 convolutions of 32 and 64 channels with padding SAME,
    a dense layer of 2,048, and the classes.
    """

    convolutions: tuple = ((32, 5, "SAME", True), (64, 5, "SAME", True))
    dense: tuple = (2048,)


class CNN5(CNN):
    """A CNN of 5 layers for CIFAR-10, as trained in CFL's figure 8: 122,570 parameters at 32 x 32 x 3 and 10 classes.

    The paper specifies only a "5-layer convolutional neural network". Here: the widths of TensorFlow's CIFAR-10
    tutorial, 3 x 3 convolutions of 32, 64 and 64 channels without padding, each with ReLU and the first two with 2 x 2
    max-pooling, then dense layers of 64 and the classes.
    """

    convolutions: tuple = ((32, 3, "VALID", True), (64, 3, "VALID", True), (64, 3, "VALID", False))
    dense: tuple = (64,)


class VGG(nn.Module):
    """The "simplified version of the popular VGG network" of Byzantine CFL, section 7.2: 865,482 parameters.

    3 x 3 convolutions of 32 | 64 | 128, 128 | 128, 128 | 128, 128 channels, each with ReLU, 2 x 2 max-pooling at every
    bar and after the last, then dense layers of 128, 128 and the classes. The paper's 128 inputs of the first dense
    layer imply padding 1, and images of 32 x 32.

    Chosen here, because the paper does not specify it: He's initialisation, without which 11 layers of ReLU learn
    slowly at first. The last layer has no ReLU, although in the paper "every convolutional and fully connected layer"
    has one: a class without any positive logit would never learn.

    Attributes:
      blocks, dense: channels of the convolutions of each block, and widths of the hidden dense layers.
    """

    num_outputs: int
    blocks: tuple[tuple[int, ...], ...] = ((32,), (64,), (128, 128), (128, 128), (128, 128))
    dense: tuple[int, ...] = (128, 128)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        he = nn.initializers.he_normal()
        for block in self.blocks:
            for features in block[:-1]:
                x = Conv(features, 3, 1, kernel_init=he)(x)
            x = Conv(block[-1], 3, 1, pool=True, kernel_init=he)(x)
        return _dense(x, self.dense, self.num_outputs, kernel_init=he)


class LSTMLanguageModel(nn.Module):
    """LSTM layers that predict the next word, as in CFL's figure 9; for `jfcl.models.language_model`.

    Token ids `[B, L]` to logits `[B, L, num_outputs]`, which depend on the words up to their position. The paper has no
    widths; these are moderate, because most of the work is in the last layer, `hidden * num_outputs`.

    Attributes:
      num_outputs, features: words of the vocabulary, and width of the embedding.
      hidden, num_layers: width and number of the LSTM layers.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> LSTMLanguageModel(50).init_with_output(jax.random.key(0), jnp.ones((2, 7), jnp.int32))[0].shape
      (2, 7, 50)
    """

    num_outputs: int
    features: int = 128
    hidden: int = 128
    num_layers: int = 2

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        # Not flax's orthogonal matrices: several QR decompositions under vmap hang on a CPU (jaxlib 0.10.2).
        cell = partial(nn.OptimizedLSTMCell, self.hidden, recurrent_kernel_init=nn.initializers.lecun_normal())
        x = nn.Embed(self.num_outputs, self.features)(x)
        for _ in range(self.num_layers):
            start = jnp.zeros((len(x), self.hidden), x.dtype)  # flax's has float32 in a model in bfloat16, too
            x = nn.RNN(cell())(x, initial_carry=(start, start))
        return nn.Dense(self.num_outputs)(x)
