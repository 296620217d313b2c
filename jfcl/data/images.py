"""Images as what they show, in every mode of PIL and type of NumPy: float32 in `[0, 1]` with a channel axis.

Grey has one channel and colour three, red, green and blue; transparency is a further one. Integers have the white of
their type: 255 for bytes, 65,535 for 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from jfcl.core import check

WHITE = {"bool": 1, "uint8": 255, "uint16": 65535}
_ORIENTATION = 0x0112  # the tag of EXIF
_SHOWN_IN = {"1": "L", "L": "L", "LA": "LA", "La": "LA", "P": "RGB", "PA": "RGBA", "RGB": "RGB", "RGBX": "RGB"}
_SHOWN_IN |= {"RGBA": "RGBA", "RGBa": "RGBA", "CMYK": "RGB", "YCbCr": "RGB", "LAB": "RGB", "HSV": "RGB"}
_TRANSPARENT = {"L": "LA", "RGB": "RGBA"}
_LABELS = ("1", "L", "P", "I", "I;16", "I;16L", "I;16B", "I;16N")


def is_picture(value: Any) -> bool:
    """Returns whether a value is an image of PIL, without importing it."""
    return hasattr(value, "getbands") and hasattr(value, "convert")


def picture(image: Any, where: str) -> np.ndarray:
    """Returns `[H, W, C]` float32 in `[0, 1]`, what an image of PIL shows.

    Raises:
      ValueError: 32-bit integers, and floats outside `[0, 1]`, of unknown white; several frames; an unknown mode; a
        file that is damaged or closed.
    """
    try:
        image.load()
    except (OSError, ValueError, SyntaxError) as error:
        raise ValueError(f"{where} is an image that cannot be read ({error})") from None
    if 0 in image.size:
        raise ValueError(f"{where} is an image without pixels, of size {image.size}")
    if getattr(image, "is_animated", False) and image.format != "MPO":
        raise ValueError(f"{where} is an image of {image.n_frames} frames; give one of them (image.seek, image.copy)")
    image = _upright(image)
    mode = image.mode
    transparent = getattr(image, "has_transparency_data", "transparency" in image.info)
    if mode in _SHOWN_IN:
        shown = _SHOWN_IN[mode]
        values = _divided(np.asarray(image.convert(_TRANSPARENT.get(shown, shown) if transparent else shown)))
    elif mode.startswith("I;16") and not transparent:
        values = _divided(np.asarray(image))
    else:
        values = np.asarray(image)
        if mode != "F" or not (values >= 0).all() or not (values <= 1).all():
            why = "with transparency" if transparent else f"with values from {values.min():g} to {values.max():g}"
            raise ValueError(
                f"{where} is an image of mode {mode!r} {why}, of unknown white; give an array in [0, 1], such as"
                " np.asarray(image) / 65535 for 16 bits"
            )
    return values if values.ndim == 3 else values[..., None]


def _upright(image: Any) -> Any:
    """Returns an image as cameras mean it to be turned, by the orientation that is stored beside its numbers."""
    if image.getexif().get(_ORIENTATION, 1) == 1:
        return image
    from PIL import ImageOps

    return ImageOps.exif_transpose(image)


def pictures(rows: list[Any], where: str) -> np.ndarray:
    """Returns `[n, H, W, C]`, what images of PIL show, with the channels that all of them need.

    Raises:
      ValueError: those of `picture`; images of different sizes; a row that is no image.
    """
    made = []
    for i, row in enumerate(rows):
        check(is_picture(row), f"{where}: row {i}", type(row).__name__, "an image, as other rows are")
        made.append(picture(row, f"{where}: row {i}"))
        sizes = [one.shape[:2] for one in (made[i], made[0])]
        check(sizes[0] == sizes[1], f"{where}: the size of row {i}", sizes[0], f"{sizes[1]}, that of row 0")
    return np.stack(alike(made))


def alike(parts: Iterable[np.ndarray]) -> list[np.ndarray]:
    """Returns images `[..., C]` with the same channels: grey becomes colour, opaque gets alpha, where others have it.

    Example:
      >>> [part.shape for part in alike([np.ones((2, 2, 1)), np.ones((2, 2, 3)), np.ones((2, 2, 2))])]
      [(2, 2, 4), (2, 2, 4), (2, 2, 4)]
    """
    parts = list(parts)
    channels = {part.shape[-1] for part in parts}
    if len(channels) == 1:
        return parts
    colours, alpha = 3 if max(channels) >= 3 else 1, any(count % 2 == 0 for count in channels)

    def widened(part):
        opaque = part.shape[-1] % 2 == 1
        colour = part if opaque else part[..., :-1]
        pieces = [np.broadcast_to(colour, (*colour.shape[:-1], colours))]
        if alpha:
            pieces.append(np.ones_like(part[..., :1]) if opaque else part[..., -1:])
        return np.concatenate(pieces, axis=-1)

    return [widened(part) for part in parts]


def labels_shown(image: Any, where: str) -> np.ndarray:
    """Returns `[H, W]` integers, the labels that an image of PIL holds as a target: its numbers as they are stored.

    Raises:
      ValueError: a mode of colours, or of floats.
    """
    if image.mode in _LABELS:
        return np.asarray(_upright(image))
    raise ValueError(
        f"{where} is an image of mode {image.mode!r}, but images beside the inputs hold labels, in one of the modes"
        f" {', '.join(_LABELS)}; give other images as arrays"
    )


def images_or_ids(array: np.ndarray, where: str) -> np.ndarray:
    """Returns numbers `[n, ...]` with their types settled: images as float32 in `[0, 1]`, others as they are.

    Integers with two axes or more an example are images, with one axis token ids.

    Raises:
      ValueError: images of integers of unknown white; rows of bytes, which may be flat images or token ids.
    """
    shape = list(array.shape[1:])
    if array.ndim == 2 and array.dtype == np.uint8:
        raise ValueError(
            f"{where}: rows of {shape[0]} bytes may be flat images, features or token ids. Give images as"
            " [n, H, W] or divided by 255, features as float32, and token ids as int32 (x.astype(np.int32))"
        )
    if array.dtype.kind not in "biu" or array.ndim <= 2:
        return array
    if array.dtype.name not in WHITE:
        raise ValueError(
            f"{where}: {array.dtype} of shape {shape} an example are images of unknown white (token ids have"
            " one axis). Give them as uint8 (white is 255) or uint16 (65535), or divide them by their white"
        )
    return _divided(array if array.ndim > 3 else array[..., None])


def has_channels_first(shape: tuple[int, ...], where: str, given: bool | None) -> bool:
    """Returns whether inputs `[n, ...]` of this shape are images `[n, C, H, W]`.

    It shows where one end of the three axes is 4 or less, and the other is not; otherwise `given` must say it.

    Raises:
      ValueError: a shape that does not show it; `given` for what is no image of three axes.
    """
    if len(shape) != 4:
        accepted = f"left out: the examples of {where} have shape {list(shape[1:])}, not [C, H, W]"
        check(not given, "channels_first", given, accepted)
        return False
    if given is not None:
        return given
    first, middle, last = shape[1:]
    if last <= 4 < first:
        return False
    if first <= 4 < min(middle, last):
        return True
    raise ValueError(
        f"channels_first must be given: {where} has shape {[first, middle, last]} an example, which does not show"
        " whether it is [C, H, W] (channels_first=True) or [H, W, C] (channels_first=False)"
    )


def channels_last(array: np.ndarray) -> np.ndarray:
    """Returns images `[n, C, H, W]` as `[n, H, W, C]`."""
    return np.ascontiguousarray(np.moveaxis(array, 1, -1))


def _divided(array: np.ndarray) -> np.ndarray:
    """Returns integers of a type in `WHITE`, or truths, as float32 in `[0, 1]`."""
    return np.divide(array, np.float32(WHITE[array.dtype.name]), dtype=np.float32)
