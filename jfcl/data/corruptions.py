"""Corruptions of images, by severity from 0 (none) to 5, and draws that depend on an example alone.

The constants are those of CIFAR-10-C; between whole severities they are interpolated.

Source: Hendrycks, Dietterich 2019 ("Benchmarking neural network robustness to common corruptions and perturbations").
"""

import hashlib

import numpy as np

from jfcl.core import check


def noise(x, level, draws):
    """Adds Gaussian noise of standard deviation `level`, drawn for each example from its entry in `draws`."""
    normals = [np.random.default_rng(draw).standard_normal(x.shape[1:], np.float32) for draw in draws.tolist()]
    return x + level * np.array(normals, np.float32).reshape(x.shape)


def blur(x, level, draws):
    """Blurs by a Gaussian of standard deviation `level` pixels."""
    from scipy.ndimage import gaussian_filter  # takes long to import

    return gaussian_filter(x, (0, level, level, 0), mode="nearest")


def contrast(x, level, draws):
    """Multiplies the distance of each pixel from the mean of its channel by `level`."""
    mean = x.mean(axis=(1, 2), keepdims=True)
    return (x - mean) * level + mean


def brightness(x, level, draws):
    """Adds `level` to the value of each pixel in HSV: to its largest colour, to which the others keep their ratio."""
    colours = x[..., : (x.shape[-1] - 1) // 2 * 2 + 1]  # without transparency
    value = colours.max(axis=-1, keepdims=True)
    ratio = np.where(value > 0, colours / np.where(value > 0, value, 1), 1)
    return np.concatenate([ratio * np.minimum(value + level, 1), x[..., colours.shape[-1] :]], axis=-1)


def pixelate(x, level, draws):
    """Replaces blocks of pixels by their mean: `int(level H)` rows of blocks, and `int(level W)` columns.

    A pixel is in the block that has its upper left corner; in CIFAR-10-C, in the one that has its centre.
    """

    def means(length):  # [length, length]: of the pixels in the same block
        block = np.arange(length) * max(int(level * length + 1e-9), 1) // length
        same = (block[:, None] == block).astype(x.dtype)
        return same / same.sum(axis=1, keepdims=True)

    return np.einsum("ij,njkc,lk->nilc", means(x.shape[1]), x, means(x.shape[2]))


CORRUPTIONS = {  # the function, and its level at severities 0 to 5
    "noise": (noise, (0, 0.04, 0.06, 0.08, 0.09, 0.10)),
    "blur": (blur, (0, 0.4, 0.6, 0.7, 0.8, 1)),
    "contrast": (contrast, (1, 0.75, 0.5, 0.4, 0.3, 0.15)),
    "brightness": (brightness, (0, 0.05, 0.1, 0.15, 0.2, 0.3)),
    "pixelate": (pixelate, (1, 0.95, 0.9, 0.85, 0.75, 0.65)),
}


def corrupt(x, kind: str, severity: float, *, seed=0) -> np.ndarray:
    """Returns images `[n, H, W, C]` in `[0, 1]` under one of `CORRUPTIONS`, of a severity from 0 to 5."""
    function, levels = CORRUPTIONS[kind]
    numbers = x.astype(np.result_type(x, np.float32), copy=False)  # SciPy has no filter of float16
    return np.clip(function(numbers, np.interp(severity, range(6), levels), draws_of(x, seed)), 0, 1).astype(x.dtype)


def check_images(x: np.ndarray, name: str) -> None:
    """Raises `ValueError` unless `x` are images `[n, H, W, C]` in `[0, 1]`."""
    check(np.ndim(x) == 4, name, np.shape(x), "images [n, H, W, C]")
    fits = x.dtype.kind == "f" and x.min(initial=0) >= 0 and x.max(initial=0) <= 1
    check(fits, name, f"{x.dtype} in {x.min(initial=0):g}..{x.max(initial=0):g}", "floats in [0, 1]")


def draws_of(x: np.ndarray, seed) -> np.ndarray:
    """Returns `[n]` uint64, a draw for each example, which depends on its values and on `seed` alone.

    An example thus has the same draw wherever it is: at any client, in a federation and in a population.
    """
    key = np.asarray(seed, np.int64).tobytes()
    digests = (hashlib.blake2b(row.tobytes(), digest_size=8, key=key).digest() for row in x)
    return np.frombuffer(b"".join(digests), "<u8")


def is_drawn(x: np.ndarray, seed, share: float) -> np.ndarray:
    """Returns `[n]` bool, a share of the examples: all with 1, otherwise those with the smallest `draws_of`."""
    return np.ones(len(x), bool) if share == 1 else draws_of(np.asarray(x), seed) < share * 2.0**64
