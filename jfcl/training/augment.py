"""Random changes to a batch of images while clients train: for `jfcl.local_training(augment=...)`.

Each is `(key, batch) -> batch` and changes `batch["x"]` `[B, H, W, C]`, with separate draws for every image. Maps in
the image's plane, `[B, H, W, ...]` targets or weights, are mirrored and cropped as their image is, with zeros coming
in. Changed examples are outside the span of a client's examples, so that training does not use the span.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jfcl.core import Batch
from jfcl.core.checks import in_plane

__all__ = ["AUGMENTATIONS", "crop_flip", "flip"]


def of_images(move: Callable[[jax.Array, jax.Array], jax.Array], key: jax.Array, batch: Batch) -> Batch:
    """Returns `batch` after `move(key, image [H, W, ...])` of every image, and of the maps beside it with its key."""
    x = batch["x"]
    if x.ndim != 4:
        raise ValueError(f"augment needs images [B, H, W, C], got x of shape {x.shape}")
    keys = jax.random.split(key, len(x))

    def moved(path, leaf):
        moves = in_plane(leaf.shape, x.shape[1:3], f"augment: the array {jax.tree_util.keystr(path)}")
        return jax.vmap(move)(keys, leaf) if moves else leaf

    return jax.tree_util.tree_map_with_path(moved, batch)


def flipped(key: jax.Array, image: jax.Array) -> jax.Array:
    """Returns `image`, mirrored left to right with probability 1/2."""
    return jnp.where(jax.random.bernoulli(key), image[:, ::-1], image)


def window(key: jax.Array, image: jax.Array, height: int, width: int) -> jax.Array:
    """Returns a random window `[height, width, ...]` of `image`."""
    down_key, right_key = jax.random.split(key)
    down = jax.random.randint(down_key, (), 0, image.shape[0] - height + 1)
    right = jax.random.randint(right_key, (), 0, image.shape[1] - width + 1)
    trailing = image.shape[2:]
    return jax.lax.dynamic_slice(image, (down, right, *[0] * len(trailing)), (height, width, *trailing))


def flip(key: jax.Array, batch: Batch) -> Batch:
    """Mirrors every image left to right with probability 1/2.

    Example:
      >>> batch = {"x": jnp.arange(6.0).reshape(1, 2, 3, 1)}
      >>> images = [flip(jax.random.key(i), batch)["x"][0, 0, :, 0].tolist() for i in range(20)]
      >>> sorted(set(map(tuple, images)))
      [(0.0, 1.0, 2.0), (2.0, 1.0, 0.0)]
    """
    return of_images(flipped, key, batch)


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
        return flipped(turn, window(move, around, *image.shape[:2]))

    return of_images(one, key, batch)


AUGMENTATIONS = {"flip": flip, "crop_flip": crop_flip}
