"""Random changes to a batch of images while clients train: for `jfcl.local_training(augment=...)`.

Each is `(key, batch) -> batch` and changes `batch["x"]` `[B, H, W, C]`, with separate draws for every image, except in
`tutorial_batch`. Maps beside it in the image's plane, `[B, H, W, ...]` targets or weights, are mirrored and cropped as
their image is, with zeros coming in; light and contrast are the image's alone. Changed examples are outside the span of
a client's examples, so that training does not use the span.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jfcl.core import Batch
from jfcl.core.checks import in_plane

Augment = Callable[[jax.Array, Batch], Batch]
Moves = Callable[[jax.Array, jax.Array], jax.Array]


def _images(move: Moves, shade: Moves = lambda key, image: image) -> Augment:
    """Returns an augmentation: `move(key, image [H, W, ...])` of images and maps, then `shade` of the images alone.

    Both get the key of the image.
    """

    def augment(key: jax.Array, batch: Batch) -> Batch:
        x = batch["x"]
        if x.ndim != 4:
            raise ValueError(f"augment needs images [B, H, W, C], got x of shape {x.shape}")
        keys = jax.random.split(key, len(x))

        def beside(path, leaf):
            moves = in_plane(leaf.shape, x.shape[1:3], f"augment: the array {jax.tree_util.keystr(path)}")
            return jax.vmap(move)(keys, leaf) if moves else leaf

        others = {name: leaf for name, leaf in batch.items() if name != "x"}
        image = jax.vmap(lambda key, image: shade(key, move(key, image)))(keys, x)
        return {**batch, **jax.tree_util.tree_map_with_path(beside, others), "x": image}

    return augment


def _flipped(key, image):
    return jnp.where(jax.random.bernoulli(key), image[:, ::-1], image)


def _window(key, image, height, width):
    """Returns a random window `[height, width, ...]` of `image`; raises `ValueError` for a smaller one."""
    if image.shape[0] < height or image.shape[1] < width:
        raise ValueError(f"augment needs images of {height} x {width} or more, got {image.shape[0]} x {image.shape[1]}")
    down_key, right_key = jax.random.split(key)
    down = jax.random.randint(down_key, (), 0, image.shape[0] - height + 1)
    right = jax.random.randint(right_key, (), 0, image.shape[1] - width + 1)
    rest = image.shape[2:]
    return jax.lax.dynamic_slice(image, (down, right, *[0] * len(rest)), (height, width, *rest))


def flip(key: jax.Array, batch: Batch) -> Batch:
    """Mirrors every image left to right with probability 1/2.

    Example:
      >>> batch = {"x": jnp.arange(6.0).reshape(1, 2, 3, 1)}
      >>> found = [flip(jax.random.key(i), batch)["x"][0, 0, :, 0].tolist() for i in range(20)]
      >>> sorted(set(map(tuple, found)))
      [(0.0, 1.0, 2.0), (2.0, 1.0, 0.0)]
    """
    return _images(_flipped)(key, batch)


def crop_flip(key: jax.Array, batch: Batch) -> Batch:
    """Moves every image by up to 4 pixels each way, zeros coming in, and mirrors it with probability 1/2.

    The usual "flips and crops" for CIFAR-10: a random crop of the image with 4 pixels of zeros around it.

    Example:
      >>> crop_flip(jax.random.key(0), {"x": jnp.ones((5, 32, 32, 3))})["x"].shape
      (5, 32, 32, 3)
    """

    def one(key, image):
        move, turn = jax.random.split(key)
        around = jnp.pad(image, ((4, 4), (4, 4), *[(0, 0)] * (image.ndim - 2)))
        return _flipped(turn, _window(move, around, *image.shape[:2]))

    return _images(one)(key, batch)


def tutorial(key: jax.Array, batch: Batch) -> Batch:
    """Augments CIFAR-10 as TensorFlow's tutorial: a random 24 x 24 window, mirrored or not, its light and contrast.

    Brightness moves by up to 63/255, contrast is multiplied by 0.2 to 1.8 around each channel's mean (pixels here are
    in [0, 1]). For `CNNCifar24`, which standardises its input, and takes the middle 24 x 24 of whole images.
    `ValueError` for smaller images.

    Example:
      >>> tutorial(jax.random.key(0), {"x": jnp.ones((5, 32, 32, 3)), "y": jnp.zeros(5)})["x"].shape
      (5, 24, 24, 3)
    """

    def moved(key, image):
        move, turn, _, _ = jax.random.split(key, 4)
        return _flipped(turn, _window(move, image, 24, 24))

    def shaded(key, image):
        _, _, light, spread = jax.random.split(key, 4)
        return _shaded(light, spread, image)

    return _images(moved, shaded)(key, batch)


def tutorial_batch(key: jax.Array, batch: Batch) -> Batch:
    """As `tutorial`, but with one window, brightness and contrast for all images of a batch, as in IFCA's code.

    Only whether an image is mirrored is drawn for each. (In that code, brightness moves by up to 63, which its network
    cancels: it subtracts each image's mean.) For `CNNCifar24`; `ValueError` for images smaller than 24 x 24.

    Example:
      >>> x = jnp.broadcast_to(jax.random.uniform(jax.random.key(1), (1, 32, 32, 3)), (9, 32, 32, 3))
      >>> found = tutorial_batch(jax.random.key(0), {"x": x})["x"]
      >>> len({float(image.sum().round(2)) for image in found}), len({float(image[0, 0, 0]) for image in found})
      (1, 2)
    """
    move, turns, light, spread = jax.random.split(key, 4)
    moved = lambda turn, image: _flipped(turn, _window(move, image, 24, 24))  # noqa: E731
    return _images(moved, lambda turn, image: _shaded(light, spread, image))(turns, batch)


def _shaded(light, spread, image):
    """Returns an image of another brightness and contrast."""
    image = image + jax.random.uniform(light, minval=-63 / 255, maxval=63 / 255)
    mean = image.mean(axis=(0, 1), keepdims=True)
    return mean + (image - mean) * jax.random.uniform(spread, minval=0.2, maxval=1.8)


AUGMENTATIONS = {"flip": flip, "crop_flip": crop_flip, "tutorial": tutorial, "tutorial_batch": tutorial_batch}
