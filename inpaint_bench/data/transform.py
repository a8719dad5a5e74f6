"""From a decoded file to the pixels of the network: upright, RGB, the centre square, resized."""

from __future__ import annotations

import struct

import numpy as np
from PIL import ExifTags, Image, ImageOps

from .source import Mask, Pixels

VERSION = 1  # part of every prepared dataset's identity: raise it when other pixels come out
MIN_SIDE_PX = 16  # a shorter side holds no building, only what resizing would invent
WHITE, BLACK = (255, 255, 255, 255), (0, 0, 0, 255)  # what shows through where a picture, a mask is transparent
# What Pillow raises for bad files; the last two where EXIF has values of another type than its tags.
DAMAGE = (OSError, ValueError, SyntaxError, Image.DecompressionBombError, TypeError, struct.error)


class UnusableImage(ValueError):  # noqa: N818
    """Why an image or its mask cannot be used, in words."""


def upright(image: Image.Image) -> Image.Image:
    """Turned as its EXIF says, in 8-bit RGB. Raises UnusableImage: too small, or a mode whose white is not known."""
    turned = ImageOps.exif_transpose(image)
    if min(turned.size) < MIN_SIDE_PX:
        raise UnusableImage(f"too small: {turned.width} x {turned.height} px, the shorter side needs {MIN_SIDE_PX}")
    return _rgb(turned, WHITE)


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Width and height of `upright`, from the header alone."""
    sideways = image.getexif().get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
    return (image.height, image.width) if sideways else (image.width, image.height)


def square(image: Image.Image, side: int) -> Pixels:
    """RGB image -> [side, side, 3] uint8: its centre square, resized."""
    return np.asarray(ImageOps.fit(image, (side, side), method=Image.Resampling.BICUBIC))


def square_mask(mask: Image.Image, size: tuple[int, int], side: int) -> Mask:
    """The mask of an upright image of `size` (width, height) -> [side, side], 0 or 1, by the image's crop, nearest.

    White is 1. Raises UnusableImage where its shape is not the image's, or where nothing is left to repaint.
    """
    turned = ImageOps.exif_transpose(mask)
    width, height = turned.size
    if abs(width * size[1] - height * size[0]) > max(*size, width, height):  # by more than a rounded pixel
        raise UnusableImage(f"its mask has {width} x {height} px, the image {size[0]} x {size[1]}")
    fitted = ImageOps.fit(_rgb(turned, BLACK).convert("L"), (side, side), method=Image.Resampling.NEAREST)
    result = (np.asarray(fitted) > 127).astype(np.uint8)
    if not result.any():
        raise UnusableImage("its mask repaints nothing")
    return result


def _rgb(image: Image.Image, background: tuple[int, int, int, int]) -> Image.Image:
    if image.mode.startswith("I"):
        # Pillow's own conversion cuts at 255: a 16-bit picture would come out white.
        values = np.asarray(image, np.int64)
        if values.min() < 0 or values.max() > 65535:
            raise UnusableImage(f"mode {image.mode}: values beyond 16 bits")
        return Image.fromarray((values // 257).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise UnusableImage("mode F: floating point, its white is not known")
    if "A" in image.mode or "a" in image.mode or "transparency" in image.info:
        layers = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layers.size, background), layers).convert("RGB")
    return image.convert("RGB")
