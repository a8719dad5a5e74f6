"""From a decoded file to the network's pixels: upright, RGB, cropped to the centre square, resized."""

import importlib.util
import io
import logging
import re
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import ExifTags, Image, ImageCms, ImageOps

from .source import Mask, Pixels

VERSION = 2  # part of the identity of photographs and prepared datasets: increase it when other pixels come out
MIN_SIDE_PX = 16  # resizing a smaller image would only invent detail
MAX_PIXELS = 178_956_970  # Pillow's own limit; decoded by every thread at once, 0.5 GB each
HEIC = ("HEIF",) if importlib.util.find_spec("pillow_heif") else ()
# Pillow reads more formats, and runs Ghostscript on PostScript of any name. JPEG includes MPO, of phones.
FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "AVIF", *HEIC)
ONE_PICTURE = ("PNG", "WEBP", "AVIF")  # further ones make it an animation; elsewhere they are previews and pages
NEEDS_HEIC = "HEIC, which needs pillow-heif: pip install 'inpaint-bench[heic]'"
# Colour space of a profile, and mode of its image: the mode in which it is applied.
PROFILE_MODES = {("RGB", "RGB"): "RGB", ("RGB", "L"): "RGB", ("GRAY", "L"): "L", ("CMYK", "CMYK"): "CMYK"}
SRGB_TOLERANCE = 2  # out of 255: profiles of sRGB differ by their rounding
SRGB = (0.45455, 0.3127, 0.329, 0.64, 0.33, 0.3, 0.6, 0.15, 0.06)  # gamma, white and primaries as PNG has them
UNCALIBRATED = 65535  # EXIF ColorSpace: not sRGB, such as Adobe RGB of a camera
TABLES, SCAN, END = b"\xff\xc4", b"\xff\xda", b"\xff\xd9"  # markers of a JPEG
HOLE = re.compile(b"\0{256,}")  # zeros that an encoder writes only for an even area
FILLER = bytes(range(1, 255)) * 8  # data that a JPEG's decoder reads only where its own has come to an end
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
def open_image(source: Path | BinaryIO) -> Iterator[Image.Image]:
    """Open an image without decoding it; of several pictures, the first. Raises DECODE_ERRORS."""
    with Image.open(source, formats=FORMATS) as image:
        if image.width * image.height > MAX_PIXELS:
            raise UnusableImageError(f"too large: {image.width} x {image.height} px, at most {MAX_PIXELS:,} in all")
        if image.format in ONE_PICTURE and getattr(image, "is_animated", False):
            raise UnusableImageError("animated: it has several pictures")
        yield image


def check_complete(image: Image.Image, content: bytes) -> None:
    """Raise ValueError if a decoded JPEG lacks data: libjpeg fills it with grey, and Pillow is not told.

    What looks like that is decoded again with other data in that place, which changes nothing in a complete image.
    """
    if image.format not in ("JPEG", "MPO"):
        return
    first, codes = 2, b""  # the first scan; what zeros mean in each Huffman table before it
    while (marker := content[first : first + 2]) != SCAN and first < len(content):
        # A byte FF before a marker is padding.
        size = 1 if marker == b"\xff\xff" else 2 + int.from_bytes(content[first + 2 : first + 4])
        tables = content[first + 4 : first + size] if marker == TABLES else b""
        while tables:
            codes, tables = codes + tables[17:18], tables[17 + sum(tables[1:17]) :]
        first += size
    end = content.find(END, first) % (len(content) + 1)

    def changes(data: bytes) -> bool:
        with Image.open(io.BytesIO(data + END), formats=FORMATS) as other:
            return other.tobytes() != image.tobytes()

    progressive = "progressive" in image.info
    corner = np.asarray(image.crop((image.width - 2, image.height - 2, *image.size)))
    may_be_cut = progressive or ((corner == 127) | (corner == 128)).all()
    if may_be_cut and changes(content[:end].rstrip(b"\xff") + FILLER):
        raise ValueError("its data ends early")
    for hole in (run.start() for run in HOLE.finditer(content, first, end)):
        scan = content.rfind(SCAN, 0, hole)
        # Zeros may mean "no change" and "end of block", or lower bits in a scan that begins with coefficient 0.
        even = content[scan + 5 + 2 * content[scan + 4]] == 0 if progressive else scan > first or not any(codes)
        if not even and changes(content[:hole]):
            raise ValueError("part of its data is zeros")


def upright(image: Image.Image) -> Image.Image:
    """Rotate as EXIF says and convert to 8 bits, in the image's own colours: RGB, L, or CMYK.

    Raises UnusableImageError: too small, or an unknown value range.
    """
    turned = ImageOps.exif_transpose(image)
    if min(turned.size) < MIN_SIDE_PX:
        raise UnusableImageError(
            f"too small: {turned.width} x {turned.height} px, the shorter side needs {MIN_SIDE_PX}"
        )
    if turned.mode != "CMYK":
        turned = _to_rgb(turned, WHITE).convert("L" if Image.getmodebase(turned.mode) == "L" else "RGB")
    turned.info["icc_profile"] = image.info.get("icc_profile") or b""
    return turned


@lru_cache(maxsize=64)
def colour_transform(profile: bytes, image_mode: str) -> tuple[str | None, ImageCms.ImageCmsTransform | None]:
    """Return the mode in which a profile is applied, None if it cannot be; and how, None if there is none, or sRGB."""
    if not profile:
        return "RGB", None
    try:
        opened = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        mode = PROFILE_MODES[opened.profile.xcolor_space.strip(), image_mode]
        transform = ImageCms.buildTransform(opened, ImageCms.createProfile("sRGB"), mode, "RGB")
        cube = np.indices((8, 8, 8)).T.reshape(1, -1, 3) * 36
        before = Image.fromarray(cube.astype(np.uint8)).convert(mode)
        change = np.asarray(ImageCms.applyTransform(before, transform), int) - np.asarray(before.convert("RGB"))
    except (ImageCms.PyCMSError, OSError, ValueError, KeyError, TypeError, ImportError):  # the last: without LittleCMS
        return None, None
    return mode, transform if np.abs(change).max() > SRGB_TOLERANCE else None


def colours_count(image: Image.Image, turned: Image.Image) -> bool:
    """Return whether an image is in sRGB as far as its file says, or is converted to it by `center_square`."""
    if profile := turned.info["icc_profile"]:
        return colour_transform(profile, turned.mode)[0] is not None
    stated = (image.info.get("gamma", SRGB[0]), *image.info.get("chromaticity", SRGB[1:]))
    other = "srgb" not in image.info and np.abs(np.subtract(stated, SRGB)).max() > 0.01
    return not other and image.getexif().get_ifd(ExifTags.IFD.Exif).get(ExifTags.Base.ColorSpace) != UNCALIBRATED


def version_of(image: Image.Image, turned: Image.Image) -> int:
    """Return the first version of this module that makes the same pixels of an image as this one."""
    converted = turned.mode == "CMYK" or colour_transform(turned.info["icc_profile"], turned.mode)[1]
    return VERSION if converted or (image.mode.startswith("I") and "transparency" in image.info) else 1


def center_square(image: Image.Image, side: int) -> Pixels:
    """Return the centre square of an upright image, resized to [side, side, 3] uint8 and converted to sRGB."""
    fitted = ImageOps.fit(image, (side, side), method=Image.Resampling.BICUBIC)
    mode, transform = colour_transform(image.info["icc_profile"], image.mode)
    return np.asarray(ImageCms.applyTransform(fitted.convert(mode), transform) if transform else fitted.convert("RGB"))


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
        grey = np.where(values == image.info.get("transparency", -1), background[0], values // 257)
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise UnusableImageError("mode F: floating point, the value of white is unknown")
    clear = image.info.get("transparency")
    if isinstance(clear, tuple) and max(clear) > 255:  # 16 bits, while Pillow reads the upper 8 of each colour
        image.info["transparency"] = tuple(value >> 8 for value in clear)
    # RGBA, LA, PA and the premultiplied RGBa, La; palettes announce transparency in `info`.
    if "A" in image.mode or "a" in image.mode or "transparency" in image.info:
        layers = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layers.size, background), layers).convert("RGB")
    return image.convert("RGB")
