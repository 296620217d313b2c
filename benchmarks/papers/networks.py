"""Networks of the authors' public code, where these are not those of the papers, and the augmentations of one of them.

They are for `--model MODULE:NAME` and `--augment MODULE:NAME`. `with_torch_init` begins any network as that code does.
"""

from __future__ import annotations

import math
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from jfcl.core import Batch, PyTree, Task
from jfcl.models.conv import conv
from jfcl.models.networks import Conv
from jfcl.training.augment import flipped, of_images, window


def _as_torch(fan_in: int) -> dict[str, nn.initializers.Initializer]:
    """Returns PyTorch's default initialisers of a layer: kernel and bias uniform in ±1 / sqrt(fan_in)."""

    def draw(key, shape, dtype=jnp.float32):
        return jax.random.uniform(key, shape, dtype, -(fan_in**-0.5), fan_in**-0.5)

    return {"kernel_init": draw, "bias_init": draw}


def with_torch_init(task: Task) -> Task:
    """Returns `task` with PyTorch's default initialisation of its dense layers and convolutions."""
    layers = jax.eval_shape(task.init, jax.random.key(0))

    def init(key: jax.Array) -> PyTree:
        drawn = {}
        for i, (name, layer) in enumerate(layers.items()):
            draw = _as_torch(math.prod(layer["kernel"].shape[:-1]))["kernel_init"]
            keys = jax.random.split(jax.random.fold_in(key, i), len(layer))
            drawn[name] = {part: draw(k, x.shape, x.dtype) for k, (part, x) in zip(keys, layer.items(), strict=True)}
        return drawn

    return task._replace(init=init)


class CNNMnist32(nn.Module):
    """The CNN of Byzantine-CFL (003) on images of 32 x 32, from which its 800 values follow without padding.

    It is that of the first author's public code for other experiments: 234,090 parameters at 10 classes. Images are
    enlarged (bilinear), less `mean` and divided by `std`; parameters begin with PyTorch's defaults. The page on
    reproduction compares FedAvg under label flips with it, and with `CNNMnist`.

    Attributes:
      num_outputs: logits.
      mean, std: that code's of MNIST; for Fashion-MNIST it has 0.1307 and 0.3081.

    Source: github.com/felisat/federated-learning, `cnn` and `get_default_data_transforms`.
    """

    num_outputs: int
    mean: float = 0.06078
    std: float = 0.1957

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = (jax.image.resize(x, (len(x), 32, 32, x.shape[-1]), "bilinear") - self.mean) / self.std
        for _ in range(2):
            x = Conv(32, 5, "VALID", pool=True, **_as_torch(25 * x.shape[-1]))(x)
        x = x.reshape(len(x), -1)
        x = nn.relu(nn.Dense(256, **_as_torch(x.shape[-1]))(x))
        return nn.Dense(self.num_outputs, **_as_torch(x.shape[-1]))(x)


cnn_fashion32 = partial(CNNMnist32, mean=0.1307, std=0.3081)  # with that code's numbers for Fashion-MNIST


def _middle(x: jax.Array, size: int) -> jax.Array:
    """Returns the middle `size x size` of images `[B, H, W, C]`."""
    if min(x.shape[1:3]) < size:
        raise ValueError(f"images of {x.shape[1]} x {x.shape[2]} are too small for this model: it uses {size} x {size}")
    top, left = (x.shape[1] - size) // 2, (x.shape[2] - size) // 2
    return x[:, top : top + size, left : left + size]


def _standardised(x: jax.Array) -> jax.Array:
    """Scales every image to mean 0 and standard deviation 1, as TensorFlow's `per_image_standardization`."""
    mean, std = (f(x, axis=(1, 2, 3), keepdims=True) for f in (jnp.mean, jnp.std))
    return (x - mean) / jnp.maximum(std, math.prod(x.shape[1:]) ** -0.5)


def _pool_overlapping(x: jax.Array) -> jax.Array:
    """Returns the maxima of 3 x 3 windows, two apart, with padding SAME, of images `[B, H, W, C]`."""
    for axis in (1, 2):
        [(low, high)] = lax.padtype_to_pads((x.shape[axis],), (3,), (2,), "SAME")
        padding = [(low, high, 0) if a == axis else (0, 0, 0) for a in range(4)]
        padded = lax.pad(x, jnp.array(-jnp.inf, x.dtype), padding)
        shifted = [lax.slice_in_dim(padded, i, padded.shape[axis] - 2 + i, 2, axis) for i in range(3)]
        x = jnp.maximum(jnp.maximum(*shifted[:2]), shifted[2])
    return x


def _response_normalised(x: jax.Array) -> jax.Array:
    """Divides by a power of the sum of squares over 9 neighbouring channels, as `tf.nn.lrn(x, 4, 1, 0.001 / 9, 0.75)`.

    The sum is a product with a banded matrix.
    """
    channel = jnp.arange(x.shape[-1])
    band = (jnp.abs(channel[:, None] - channel[None, :]) <= 4).astype(x.dtype)
    root = lax.rsqrt(1 + 0.001 / 9 * (jnp.square(x) @ band))
    return x * root * jnp.sqrt(root)  # to the power of -3/4


def _from_normal(std: float, bias: float) -> dict[str, nn.initializers.Initializer]:
    """Returns TensorFlow's initialisers: kernels normal, without what is beyond two deviations, and a constant bias."""
    return {"kernel_init": nn.initializers.truncated_normal(std), "bias_init": nn.initializers.constant(bias)}


class CNNCifar24(nn.Module):
    """The CNN of IFCA's (004) code for rotated CIFAR-10, the one of a TensorFlow tutorial: 1,068,298 parameters.

    The input is the middle 24 x 24 of every image, less its mean and divided by its standard deviation (at least
    `1/sqrt(pixels)`); images of 24 x 24, such as those of `tutorial`, are used whole. Two 5 x 5
    convolutions of 64 channels with ReLU, overlapping 3 x 3 max-pooling and local response normalisation, then dense
    layers of 384, 192 and the classes. The last layer begins near 0, so that all initial models have about the same
    loss. The code's weight decay is of the kernels of the hidden dense layers only:
    `--weight-decay 0.004 --decay-only Dense_0/kernel,Dense_1/kernel`.

    Source: github.com/jichan3751/ifca, `cifar/cifar10.py`.
    """

    num_outputs: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = _standardised(_middle(x, 24))
        x = _response_normalised(Conv(64, 5, "SAME", pool=_pool_overlapping, **_from_normal(0.05, 0.0))(x))
        x = _pool_overlapping(_response_normalised(Conv(64, 5, "SAME", **_from_normal(0.05, 0.1))(x)))
        x = x.reshape(len(x), -1)
        for width in (384, 192):
            x = nn.relu(nn.Dense(width, **_from_normal(0.04, 0.1))(x))
        return nn.Dense(self.num_outputs, **_from_normal(1 / 192, 0.0))(x)


def tutorial(key: jax.Array, batch: Batch) -> Batch:
    """Augments CIFAR-10 as TensorFlow's tutorial: a random 24 x 24 window, mirrored or not, its light and contrast.

    Brightness moves by up to 63/255, contrast is multiplied by 0.2 to 1.8 around each channel's mean (pixels here are
    in [0, 1]). For `CNNCifar24`, which standardises its input.
    """

    def moved(key, image):
        move, turn, _, _ = jax.random.split(key, 4)
        return flipped(turn, _window(move, image))

    def shaded(key, image):
        _, _, light, spread = jax.random.split(key, 4)
        return _shaded(light, spread, image)

    batch = of_images(moved, key, batch)
    return batch | {"x": jax.vmap(shaded)(jax.random.split(key, len(batch["x"])), batch["x"])}


def tutorial_batch(key: jax.Array, batch: Batch) -> Batch:
    """As `tutorial`, but with one window, brightness and contrast for all images of a batch, as in IFCA's code.

    Only whether an image is mirrored is drawn for each. (In that code, brightness moves by up to 63, which its network
    cancels: it subtracts each image's mean.)
    """
    move, turns, light, spread = jax.random.split(key, 4)
    batch = of_images(lambda turn, image: flipped(turn, _window(move, image)), turns, batch)
    return batch | {"x": jax.vmap(lambda image: _shaded(light, spread, image))(batch["x"])}


def _window(key, image):
    """Returns a random window of 24 x 24."""
    if min(image.shape[:2]) < 24:
        raise ValueError(f"augment needs images of 24 x 24 or more, got {image.shape[0]} x {image.shape[1]}")
    return window(key, image, 24, 24)


def _shaded(light, spread, image):
    """Returns an image of another brightness and contrast."""
    image = image + jax.random.uniform(light, minval=-63 / 255, maxval=63 / 255)
    mean = image.mean(axis=(0, 1), keepdims=True)
    return mean + (image - mean) * jax.random.uniform(spread, minval=0.2, maxval=1.8)


class LeNet5(nn.Module):
    """CFLA's LeNet-5 for MNIST: 61,706 parameters at 10 classes, with tanh, average pooling and PyTorch's first values.

    Source: github.com/Totorino02/CFLA, `LeNet5V1`.
    """

    num_outputs: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for channels, padding in ((6, 2), (16, 0)):
            first = _as_torch(25 * x.shape[-1])
            x = jnp.tanh(nn.Conv(channels, (5, 5), padding=padding, conv_general_dilated=conv, **first)(x))
            b, h, w, c = x.shape
            x = x.reshape(b, h // 2, 2, w // 2, 2, c).mean(axis=(2, 4))
        x = x.reshape(len(x), -1)
        for width in (120, 84):
            x = jnp.tanh(nn.Dense(width, **_as_torch(x.shape[-1]))(x))
        return nn.Dense(self.num_outputs, **_as_torch(x.shape[-1]))(x)
