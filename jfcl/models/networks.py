"""The networks of the papers, as flax.linen modules. Inputs `[B, ...]` float32, outputs logits `[B, num_outputs]`."""

from __future__ import annotations

import flax.linen as nn
import jax

from jfcl.models.conv import conv as fast_conv
from jfcl.models.conv import max_pool


class Linear(nn.Module):
    """One dense layer on the flattened input.

    Attributes:
      num_outputs: logits.
      squeeze: drop the output axis (for scalar regression with `num_outputs=1`).
      use_bias: with a bias.
    """

    num_outputs: int
    squeeze: bool = False
    use_bias: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(self.num_outputs, use_bias=self.use_bias)(x.reshape(len(x), -1))
        return x[:, 0] if self.squeeze else x


class MLP(nn.Module):
    """Dense layers with ReLU between: 784-200-10 in IFCA (rotated MNIST) and FC (table 1).

    Attributes:
      num_outputs: logits.
      hidden: widths of the hidden layers.
    """

    num_outputs: int
    hidden: tuple[int, ...] = (200,)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.reshape(len(x), -1)
        for width in self.hidden:
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(self.num_outputs)(x)


def _conv(features: int, size: int, padding) -> nn.Conv:
    return nn.Conv(features, (size, size), padding=padding, conv_general_dilated=fast_conv)


class CNNMnist(nn.Module):
    """The CNN of Byzantine-CFL (003) for MNIST and Fashion-MNIST: 225,034 parameters at 28 x 28 and 10 classes.

    Two 5 x 5 convolutions of 32 channels, each with padding 1, ReLU and 2 x 2 max-pooling, then dense layers of 256 and
    the classes. (The paper's 800 = 32 * 5 * 5 inputs of the first dense layer imply padding 1 in both convolutions.)
    """

    num_outputs: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = max_pool(nn.relu(_conv(32, 5, ((1, 1), (1, 1)))(x)), 2)
        x = nn.relu(nn.Dense(256)(x.reshape(len(x), -1)))
        return nn.Dense(self.num_outputs)(x)


class CNNCifar(nn.Module):
    """The CNN of IFCA (004) for rotated CIFAR-10: "2 convolutional layers followed by 2 fully connected layers".

    The paper gives no widths. Here: 5 x 5 convolutions of 64 channels with padding SAME, ReLU and 2 x 2 max-pooling,
    then dense layers of 384 and the classes, as in the TensorFlow tutorial that the preprocessing of the authors' code
    (24 x 24 crops) comes from, less its second hidden dense layer.
    """

    num_outputs: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = max_pool(nn.relu(_conv(64, 5, "SAME")(x)), 2)
        x = nn.relu(nn.Dense(384)(x.reshape(len(x), -1)))
        return nn.Dense(self.num_outputs)(x)


class CNNFemnist(nn.Module):
    """The CNN of IFCA (004) for FEMNIST: two convolutions, each with max-pooling, then two dense layers.

    Widths as in LEAF's FEMNIST model, whose data set it is: 5 x 5 convolutions of 32 and 64 channels with padding SAME,
    a dense layer of 2,048, and the classes.
    """

    num_outputs: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for features in (32, 64):
            x = max_pool(nn.relu(_conv(features, 5, "SAME")(x)), 2)
        x = nn.relu(nn.Dense(2048)(x.reshape(len(x), -1)))
        return nn.Dense(self.num_outputs)(x)
