"""Images as what they show, in every mode of PIL and type of NumPy: float32 in `[0, 1]` with a channel axis.

Grey has one channel and colour three, red, green and blue; transparency is a further one. Integers have the white of
their type: 255 for bytes, 65,535 for 16 bits.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from jfcl.core import check

WHITE = {"bool": 1, "uint8": 255, "uint16": 65535}
_ORIENTATION = 0x0112  # the tag of EXIF
_GREY = ("1", "L", "LA", "La")  # modes of bytes without colour
_LABELS = ("1", "L", "P", "I", "I;16", "I;16L", "I;16B", "I;16N")


def is_picture(value: Any) -> bool:
    """Returns whether a value is an image of PIL, without importing it."""
    return hasattr(value, "getbands") and hasattr(value, "convert")


def picture(image: Any, where: str) -> np.ndarray:
    """Returns `[H, W, C]` float32 in `[0, 1]`, what an image of PIL shows; `ValueError` where that is not known."""
    try:
        image.load()
    except (OSError, ValueError, SyntaxError) as error:
        raise ValueError(f"{where} is an image that cannot be read ({error})") from None
    check(0 not in image.size, where, f"one of size {image.size}", "an image with pixels")
    frames = image.n_frames if getattr(image, "is_animated", False) and image.format != "MPO" else 1
    check(frames == 1, where, f"{frames} frames", "one of the frames (image.seek, image.copy)")
    image = _upright(image)
    transparent = getattr(image, "has_transparency_data", "transparency" in image.info)
    if image.mode[0] not in "IF":  # not of integers or floats
        values = unit(np.asarray(image.convert(("L" if image.mode in _GREY else "RGB") + "A" * transparent)))
    elif image.mode.startswith("I;16") and not transparent:
        values = unit(np.asarray(image))
    else:
        values = np.asarray(image)
        in_unit = image.mode == "F" and (values >= 0).all() and (values <= 1).all()
        what = f"one of mode {image.mode!r}, of unknown white, in {values.min():g}..{values.max():g}"
        accepted = "an array in [0, 1], such as np.asarray(image) / 65535 for 16 bits"
        check(in_unit, where, what + " and transparency" * transparent, accepted)
    return values if values.ndim == 3 else values[..., None]


def _upright(image: Any) -> Any:
    """Returns an image turned as the orientation that is stored with it says."""
    if image.getexif().get(_ORIENTATION, 1) == 1:
        return image
    from PIL import ImageOps

    return ImageOps.exif_transpose(image)


def pictures(rows: list[Any], where: str) -> np.ndarray:
    """Returns `[n, H, W, C]`, what images of PIL of one size show, with the channels that all of them need."""
    shown = []
    for i, row in enumerate(rows):
        check(is_picture(row), f"{where}: row {i}", type(row).__name__, "an image, as other rows are")
        shown.append(picture(row, f"{where}: row {i}"))
        size, first = shown[i].shape[:2], shown[0].shape[:2]
        check(size == first, f"{where}: the size of row {i}", size, f"{first}, that of row 0")
    return np.stack(alike(shown))


def alike(parts: Iterable[np.ndarray]) -> list[np.ndarray]:
    """Returns images `[..., C]` with the same channels: grey becomes colour, opaque gets alpha, if others have it."""
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
    """Returns `[H, W]` integers, the labels that an image of PIL holds as a target: its numbers as they are stored."""
    accepted = f"labels, as an image of one of the modes {', '.join(_LABELS)}; give other images as arrays"
    check(image.mode in _LABELS, where, f"an image of mode {image.mode!r}", accepted)
    return np.asarray(_upright(image))


def images_or_ids(array: np.ndarray, where: str) -> np.ndarray:
    """Returns numbers `[n, ...]` with their types settled: images as float32 in `[0, 1]`, others as they are.

    Integers with two axes or more an example are images, with one axis token ids; rows of bytes are refused.
    """
    what = f"{array.dtype} of shape {list(array.shape[1:])} an example"
    accepted = "images [n, H, W] or divided by 255, features as float32, or token ids as int32: bytes may be any"
    check(array.ndim != 2 or array.dtype != np.uint8, where, what, accepted)
    if array.dtype.kind not in "biu" or array.ndim <= 2:
        return array
    accepted = "uint8 (white is 255), uint16 (65535), or divided by its white, for images (token ids have one axis)"
    check(array.dtype.name in WHITE, where, f"images of unknown white, {what}", accepted)
    return unit(array if array.ndim > 3 else array[..., None])


def has_channels_first(shape: tuple[int, ...], where: str, channels_first: bool | None) -> bool:
    """Returns whether inputs `[n, ...]` of this shape are images `[n, C, H, W]`.

    It shows where one end of the three axes is 4 or less, and the other is not; otherwise `channels_first` must say it.
    """
    if len(shape) != 4:
        accepted = f"left out: the examples of {where} have shape {list(shape[1:])}, not [C, H, W]"
        check(not channels_first, "channels_first", channels_first, accepted)
        return False
    first, middle, last = shape[1:]
    is_first = first <= 4 < min(middle, last)
    accepted = f"True for [C, H, W], False for [H, W, C]: {where} has shape {[first, middle, last]}, which may be both"
    check(channels_first is not None or is_first or last <= 4 < first, "channels_first", None, accepted)
    return is_first if channels_first is None else channels_first


def channels_last(array: np.ndarray) -> np.ndarray:
    """Returns images `[n, C, H, W]` as `[n, H, W, C]`."""
    return np.ascontiguousarray(np.moveaxis(array, 1, -1))


def unit(array: np.ndarray) -> np.ndarray:
    """Returns integers of a type in `WHITE`, or truths, as float32 in `[0, 1]`."""
    return np.divide(array, np.float32(WHITE[array.dtype.name]), dtype=np.float32)
