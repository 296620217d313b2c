"""Deep convolutional networks in the form for images of 32 x 32: ResNet-18 and MobileNet, with group or batch norm.

A network with batch normalisation keeps running statistics, and its argument `train` matters. One with group
normalisation is the usual choice where clients have few or skewed examples: a client's batch statistics are those of
its own labels.
"""

import math
from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax

from jfcl.models.conv import conv

HE = nn.initializers.variance_scaling(2.0, "fan_out", "truncated_normal")
Norm = Callable[[int], nn.Module]  # from a number of channels


def group_norm(train: bool) -> Norm:
    """Returns group normalisation in 32 groups, or in the largest number that divides both 32 and the channels."""
    return lambda channels: nn.GroupNorm(math.gcd(32, channels))


def batch_norm(train: bool) -> Norm:
    """Returns batch normalisation by a batch's statistics in training, by running ones in evaluation."""
    return lambda channels: nn.BatchNorm(use_running_average=not train, momentum=0.9)


class ResidualBlock(nn.Module):
    """The basic block of a ResNet: two 3 x 3 convolutions, and the input added before the last ReLU.

    Where shapes change, the input passes through a 1 x 1 convolution of the block's stride. `features` are the channels
    of the output, `stride` is that of the first convolution, and `norm` comes after each convolution.
    """

    features: int
    stride: int
    norm: Norm

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layer = partial(nn.Conv, self.features, use_bias=False, kernel_init=HE, conv_general_dilated=conv)
        strides = (self.stride, self.stride)
        out = nn.relu(self.norm(self.features)(layer((3, 3), strides, padding=1)(x)))
        out = self.norm(self.features)(layer((3, 3), padding=1)(out))
        if x.shape != out.shape:
            x = self.norm(self.features)(layer((1, 1), strides, padding=0)(x))
        return nn.relu(out + x)


class ResNet(nn.Module):
    """A ResNet with group normalisation; by default ResNet-18 in its CIFAR form, 11.17 M parameters at 10 classes.

    The first convolution is 3 x 3 of stride 1, without pooling. Then stages of basic blocks, with twice the channels
    and half the height and width from each to the next, the mean over all places, and a dense layer.

    Source: He et al. 2016 (the network); Wu & He 2018 (group normalisation).

    Attributes:
      width: channels of the first stage. The work is proportional to its square.
      stages: blocks of each stage.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> tiny = ResNet(10, width=4, stages=(1, 1))
      >>> tiny.init_with_output(jax.random.key(0), jnp.ones((2, 8, 8, 3)))[0].shape
      (2, 10)
    """

    num_outputs: int
    width: int = 64
    stages: tuple[int, ...] = (2, 2, 2, 2)
    norm = staticmethod(group_norm)

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        norm = self.norm(train)
        x = nn.Conv(self.width, (3, 3), padding=1, use_bias=False, kernel_init=HE, conv_general_dilated=conv)(x)
        x = nn.relu(norm(self.width)(x))
        for stage, blocks in enumerate(self.stages):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                x = ResidualBlock(self.width * 2**stage, stride, norm)(x)
        return nn.Dense(self.num_outputs)(x.mean(axis=(1, 2)))


class ResNetBatchNorm(ResNet):
    """`ResNet` with batch normalisation, as published: the same parameters, and running statistics beside them."""

    norm = staticmethod(batch_norm)


MOBILE = ((2, 1), (4, 2), (4, 1), (8, 2), (8, 1), (16, 2), *[(16, 1)] * 5, (32, 2), (32, 1))


class MobileNet(nn.Module):
    """MobileNet with group normalisation, for images of 32 x 32: 3.22 M parameters at 10 classes.

    A 3 x 3 convolution of stride 1 (2 in the paper, for images of 224 x 224), then 13 depthwise-separable ones: 3 x 3
    in each channel alone, then 1 x 1 over all channels, with normalisation and ReLU after both.

    Source: Howard et al. 2017, table 1.

    Attributes:
      width: channels of the first convolution.
      blocks: `(channels of the output in widths, stride)` of each depthwise-separable convolution.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> tiny = MobileNet(10, width=4, blocks=((1, 1), (2, 2)))
      >>> tiny.init_with_output(jax.random.key(0), jnp.ones((2, 8, 8, 3)))[0].shape
      (2, 10)
    """

    num_outputs: int
    width: int = 32
    blocks: tuple[tuple[int, int], ...] = MOBILE
    norm = staticmethod(group_norm)

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        norm = self.norm(train)
        layer = partial(nn.Conv, use_bias=False, kernel_init=HE, conv_general_dilated=conv)
        x = nn.relu(norm(self.width)(layer(self.width, (3, 3), padding=1)(x)))
        for factor, stride in self.blocks:
            channels = x.shape[-1]
            x = layer(channels, (3, 3), (stride, stride), padding=1, feature_group_count=channels)(x)
            x = nn.relu(norm(channels)(x))
            x = nn.relu(norm(factor * self.width)(layer(factor * self.width, (1, 1), padding=0)(x)))
        return nn.Dense(self.num_outputs)(x.mean(axis=(1, 2)))


class MobileNetBatchNorm(MobileNet):
    """`MobileNet` with batch normalisation, as published."""

    norm = staticmethod(batch_norm)
