"""Arrays that lie in the plane of an image: masks and maps, which move as the image moves."""

from __future__ import annotations

import itertools


def in_plane(shape: tuple[int, ...], plane: tuple[int, int], name: str) -> bool:
    """Returns whether an array has the height and width of the images beside it, so that it must move with them.

    Args:
      shape: of the array, `[n, ...]`.
      plane: height and width of the images.
      name: of the array, for errors.

    Raises:
      ValueError: an array of another resolution or with its channels first, which may or may not be such a map.

    Example:
      >>> in_plane((5, 28, 28), (28, 28), "mask"), in_plane((5, 4), (28, 28), "box")
      (True, False)
    """
    plane = tuple(plane)
    if tuple(shape[1:3]) == plane:
        return True
    pairs = itertools.pairwise(shape[1:])
    if any(min(pair) > 1 and pair[0] * plane[1] == pair[1] * plane[0] for pair in pairs):
        raise ValueError(
            f"{name} has shape {list(shape[1:])} an example, beside images of {plane[0]} x {plane[1]}: whether it is a"
            f" map that must move with the image is not known. Give maps as [n, {plane[0]}, {plane[1]}, ...], and"
            " flatten what is none"
        )
    return False
