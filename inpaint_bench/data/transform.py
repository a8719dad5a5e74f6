"""From a decoded file to the network's pixels: upright, RGB, cropped to the centre square, resized."""

from __future__ import annotations

import importlib.util
import logging
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps

from .source import Mask, Pixels

VERSION = 1  # part of every prepared dataset's identity: increase it when other pixels come out
MIN_SIDE_PX = 16  # resizing a smaller image would only invent detail
MAX_PIXELS = 178_956_970  # Pillow's own limit; decoded by every thread at once, 0.5 GB each
HEIC = ("HEIF",) if importlib.util.find_spec("pillow_heif") else ()
# Pillow reads more formats, and runs Ghostscript on PostScript of any name. JPEG includes MPO, of phones.
FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "AVIF", *HEIC)
ONE_PICTURE = ("PNG", "WEBP", "AVIF")  # further ones make it an animation; elsewhere they are previews and pages
NEEDS_HEIC = "HEIC, which needs pillow-heif: pip install 'inpaint-bench[heic]'"
WHITE, BLACK = (255, 255, 255, 255), (0, 0, 0, 255)  # behind transparent images and masks
# What Pillow raises for damaged files; RuntimeError for AVIF, the last two for EXIF values of another type than their
# tag's.
DECODE_ERRORS = (OSError, ValueError, SyntaxError, Image.DecompressionBombError, RuntimeError, TypeError, struct.error)

# Pillow says of damaged files on stderr what it raises too, and warns of large images and of metadata not read here.
warnings.filterwarnings("ignore", module="PIL")
logging.getLogger("PIL").setLevel(logging.CRITICAL)
if HEIC:
    import pillow_heif  # type: ignore[import-not-found,unused-ignore]

    pillow_heif.register_heif_opener()


class UnusableImageError(ValueError):
    """The reason why an image or its mask cannot be used."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Raise RuntimeError naming a file that cannot be decoded, though it could when the run began."""
    try:
        yield
    except DECODE_ERRORS as error:
        raise RuntimeError(f"{path}: cannot be read: {error}") from error


@contextmanager
def naming_mask(name: str) -> Iterator[None]:
    """Raise UnusableImageError naming a mask that cannot be read."""
    try:
        yield
    except UnusableImageError:
        raise
    except DECODE_ERRORS as error:
        raise UnusableImageError(f"its mask {name} cannot be read: {error}") from error


@contextmanager
def open_image(source: Path | BinaryIO) -> Iterator[Image.Image]:
    """Open an image without decoding it; of several pictures, the first. Raises DECODE_ERRORS."""
    with Image.open(source, formats=FORMATS) as image:
        if image.width * image.height > MAX_PIXELS:
            raise UnusableImageError(f"too large: {image.width} x {image.height} px, at most {MAX_PIXELS:,} in all")
        if image.format in ONE_PICTURE and getattr(image, "is_animated", False):
            raise UnusableImageError("animated: it has several pictures")
        yield image


def upright(image: Image.Image) -> Image.Image:
    """Rotate as EXIF says and convert to 8-bit RGB. Raises UnusableImageError: too small, or an unknown value range."""
    turned = ImageOps.exif_transpose(image)
    if min(turned.size) < MIN_SIDE_PX:
        raise UnusableImageError(
            f"too small: {turned.width} x {turned.height} px, the shorter side needs {MIN_SIDE_PX}"
        )
    return _to_rgb(turned, WHITE)


def center_square(image: Image.Image, side: int) -> Pixels:
    """Return the centre square of an RGB image, resized to [side, side, 3] uint8."""
    return np.asarray(ImageOps.fit(image, (side, side), method=Image.Resampling.BICUBIC))


def center_square_mask(mask: Image.Image, size: tuple[int, int], side: int) -> Mask:
    """Return the mask [side, side] of an upright image of `size` (width, height), cropped like the image; white is 1.

    Raises UnusableImageError if its shape is not the image's, or if nothing is left to repaint.
    """
    turned = ImageOps.exif_transpose(mask)
    width, height = turned.size
    if abs(width * size[1] - height * size[0]) > max(*size, width, height):  # differ by more than a rounded pixel
        raise UnusableImageError(f"its mask has {width} x {height} px, the image {size[0]} x {size[1]}")
    # Nearest neighbour: an interpolated edge would be neither kept nor repainted.
    fitted = ImageOps.fit(_to_rgb(turned, BLACK).convert("L"), (side, side), method=Image.Resampling.NEAREST)
    result = (np.asarray(fitted) > 127).astype(np.uint8)
    if not result.any():
        raise UnusableImageError("its mask repaints nothing")
    return result


def _to_rgb(image: Image.Image, background: tuple[int, int, int, int]) -> Image.Image:
    if image.mode.startswith("I"):
        # Pillow's own conversion clips at 255: a 16-bit image would come out white.
        values = np.asarray(image, np.int64)
        if values.min() < 0 or values.max() > 65535:
            raise UnusableImageError(f"mode {image.mode}: values beyond 16 bits")
        # 65535 // 257 = 255: white stays white.
        return Image.fromarray((values // 257).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise UnusableImageError("mode F: floating point, the value of white is unknown")
    # RGBA, LA, PA and the premultiplied RGBa, La; palettes announce transparency in `info`.
    if "A" in image.mode or "a" in image.mode or "transparency" in image.info:
        layers = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layers.size, background), layers).convert("RGB")
    return image.convert("RGB")
