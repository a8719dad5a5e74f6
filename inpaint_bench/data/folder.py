"""A folder of photographs. Each is read and decoded once when the folder is opened, so that unusable images are listed
with the reason before the first step, instead of ending the run in its third hour."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import UnidentifiedImageError

from inpaint_bench.core.config.bench import DataConfig
from inpaint_bench.core.console import sanitize
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import expand_path, read_plain
from inpaint_bench.core.records import SkippedImage

from . import geotags, transform
from .geotags import MetadataRow, PositionError
from .source import Inventory, Mask, Pixels, Source
from .transform import UnusableImageError

HEIC_SUFFIXES = (".heic", ".heif")
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".tif", ".tiff", ".avif", *(HEIC_SUFFIXES if transform.HEIC else ()))
# Why a file of another suffix is left out.
OTHER_FILES = {
    **dict.fromkeys(HEIC_SUFFIXES, transform.NEEDS_HEIC),
    **dict.fromkeys(
        (
            *(".3fr", ".arw", ".cr2", ".cr3", ".dng", ".erf", ".iiq", ".kdc", ".mrw", ".nef", ".nrw", ".orf"),
            *(".pef", ".raf", ".raw", ".rw2", ".rwl", ".sr2", ".srf", ".srw", ".x3f"),
        ),
        "RAW file of a camera: export it as JPEG or TIFF",
    ),
    **dict.fromkeys((".bmp", ".gif", ".jp2", ".jxl", ".psd", ".svg"), "image of a format that is not read: convert it"),
    **dict.fromkeys((".aae", ".json", ".pp3", ".thm", ".xmp"), "sidecar file of an image"),
    **dict.fromkeys((".avi", ".insv", ".m4v", ".mkv", ".mov", ".mp4"), "video"),
}
SHOWN = 20  # files that are left out, in the log; all are in the inventory
MAX_CAPTION_BYTES = 2**16
MAX_FILE_BYTES = 2**30  # read at once, by every thread
THREADS = 8  # Pillow decodes outside the interpreter lock
CHUNK = 256
LOG_INTERVAL_S = 5.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Photo:
    """A usable image of the folder."""

    size: tuple[int, int] = field(repr=False)  # width and height, upright; not part of the data's identity
    name: str  # relative to the folder
    latitude: float
    longitude: float
    text: str
    mask: str | None  # relative to the folder
    sha256: str  # of the files: image, then mask


class FolderSource(Source):
    """Images below a folder, each with a position."""

    def __init__(self, config: DataConfig) -> None:
        """Check every image under `config.root`, except hidden files, and keep the usable ones.

        Raises UserError if the folder is missing or holds no usable image.
        """
        root = check_folder(config.root)
        rows = geotags.read_metadata(root)
        # Masks may lie beside the photographs; they are not images of their own.
        masks = {row.mask for row in (rows or {}).values()}
        files, skipped = list_files(root)
        names = [name for name in files if name not in masks]
        skipped += rows_without_image(root, rows or {}, {*names, *(image.file for image in skipped)})
        found = len(names) + len(skipped)
        by_content: dict[tuple[str, float, float, str], Photo] = {}  # by content, position and text
        examined = 0
        # Results come in the order of the names, so data.num_images selects the same images on every machine.
        for result in _examine_all(root, names, rows, config.resolution_px):
            examined += 1
            if isinstance(result, SkippedImage):
                skipped.append(result)
            elif (key := (result.sha256, result.latitude, result.longitude, result.text)) in by_content:
                skipped.append(SkippedImage(file=result.name, reason="duplicate: an image before it is the same"))
            else:
                by_content[key] = result
                if len(by_content) == config.num_images:
                    break
        photos = list(by_content.values())
        if not photos:
            reasons = _common_reasons(skipped)
            raise UserError(f"data.root={root}: no usable image, {found} found, {len(skipped)} left out: {reasons}")
        for image in skipped[:SHOWN]:
            log.warning("left out %s", sanitize(f"{image.file}: {image.reason}"))
        if len(skipped) > SHOWN:
            log.warning("left out %d more", len(skipped) - SHOWN)
        beyond = len(names) - examined
        assert found == len(photos) + len(skipped) + beyond, "every file is counted once"
        self.inventory = Inventory(kind="folder", found=found, used=len(photos), beyond_limit=beyond, skipped=skipped)
        self.resolution_px = config.resolution_px
        self.positions = np.array([(p.latitude, p.longitude) for p in photos], np.float64)
        self.texts = [p.text for p in photos]
        self.names = [p.name for p in photos]
        # The repr of a Photo has all of its fields but the size, the hash of its files among them.
        self.identity = hashlib.sha256("\n".join(map(repr, photos)).encode()).hexdigest()
        self._root = root
        self._masks = [(p.mask, p.size) for p in photos]

    def pixels(self, index: int) -> Pixels:
        """Return the image upright, cropped to the centre square and resized."""
        path = self._root / self.names[index]
        with transform.naming(path), transform.open_image(path) as image:
            return transform.center_square(transform.upright(image), self.resolution_px)

    def own_mask(self, index: int) -> Mask | None:
        """Return the mask that the metadata file names, cropped like the image, or None."""
        name, image_size = self._masks[index]
        if name is None:
            return None
        path = self._root / name
        with transform.naming(path), transform.open_image(path) as mask:
            return transform.center_square_mask(mask, image_size, self.resolution_px)


def check_folder(root: str | None) -> Path:
    """Return `data.root`. Raises UserError where it is no folder, cannot be read, or holds no file of an image."""
    path = expand_path(root or "")
    if not path.is_dir():
        what = "is a file, not a folder" if path.exists() else "no such folder"
        raise UserError(f"data.root={path}: {what}")
    if not os.access(path, os.R_OK | os.X_OK):
        raise UserError(f"data.root={path}: you may not read this folder")
    if not any(_why_no_image(path, name) is None for name in _walk(path)):
        reasons = _common_reasons(list_files(path)[1])
        raise UserError(f"data.root={path}: no image in this folder ({', '.join(SUFFIXES)}): {reasons}")
    return path


def _common_reasons(left_out: list[SkippedImage]) -> str:
    counts = Counter(image.reason for image in left_out).most_common()
    shown = [f"{count} {reason}" for reason, count in counts[:3]]
    if others := sum(count for _, count in counts[3:]):
        shown.append(f"{others} for other reasons")
    return "; ".join(shown) or "it is empty"


def list_files(root: Path) -> tuple[list[str], list[SkippedImage]]:
    """Return the images below `root`, and every other file with the reason why it is none.

    Both are relative and sorted: an index means the same image on every machine. The metadata file and captions are
    in neither.
    """
    images, left_out = [], []
    reasons = {name: _why_no_image(root, name) for name in sorted(_walk(root), key=lambda name: Path(name).parts)}
    others = {str(Path(name).with_suffix(".txt")) for name, reason in reasons.items() if reason is None}
    others.update(geotags.METADATA_NAMES)
    for name, reason in reasons.items():
        if reason is None:
            images.append(name)
        elif name not in others:
            left_out.append(SkippedImage(file=escape_invalid(name), reason=reason))
    return images, left_out


def _walk(root: Path) -> Iterator[str]:
    """Yield everything below `root` but folders that were walked: files, links, and folders that cannot be read."""

    def relative(path: str) -> str:
        return Path(path).relative_to(root).as_posix()

    unreadable: list[str] = []
    for folder, folders, files in os.walk(root, onerror=lambda error: unreadable.append(str(error.filename))):
        yield from (relative(f"{folder}/{name}") for name in files)
        # A link to a folder is not followed: it may lead out of this one, or back into it.
        yield from (relative(f"{folder}/{name}") for name in folders if Path(folder, name).is_symlink())
    yield from map(relative, unreadable)


def _why_no_image(root: Path, name: str) -> str | None:
    """Return why a name below `root` is left out unopened, or None. A broken link of an image's name is not."""
    path = root / name
    if any(part.startswith(".") for part in Path(name).parts):
        return "hidden file"
    if path.is_dir():
        return "link to a folder, which is not followed" if path.is_symlink() else "folder that cannot be read"
    if path.suffix.lower() in SUFFIXES:
        return None
    return OTHER_FILES.get(path.suffix.lower(), "not an image")


def rows_without_image(root: Path, rows: dict[str, MetadataRow], images: set[str]) -> list[SkippedImage]:
    """Return the rows of the metadata file whose image is not among `images`."""
    masks = {row.mask for row in rows.values()}
    absent_reason = f"named in the metadata file, but no image of that name in the folder ({', '.join(SUFFIXES)})"
    mask_reason = "also named as a mask in the metadata file, so it is not used as an image"
    skipped = []
    for name in sorted(rows.keys() - images):
        is_mask = name in masks and (root / name).is_file()
        skipped.append(SkippedImage(file=escape_invalid(name), reason=mask_reason if is_mask else absent_reason))
    return skipped


def _examine_all(
    root: Path, names: list[str], rows: dict[str, MetadataRow] | None, side: int
) -> Iterator[Photo | SkippedImage]:
    """Yield results in the order of `names`, a chunk at a time: a limit reached early leaves the rest unread."""
    last_log = time.monotonic()
    with ThreadPoolExecutor(min(THREADS, len(os.sched_getaffinity(0))), thread_name_prefix="images") as pool:
        for first in range(0, len(names), CHUNK):
            yield from pool.map(lambda name: _examine(root, name, rows, side), names[first : first + CHUNK])
            if time.monotonic() - last_log > LOG_INTERVAL_S:
                last_log = time.monotonic()
                log.info("checked %d of %d images", min(first + CHUNK, len(names)), len(names))


def _examine(root: Path, name: str, rows: dict[str, MetadataRow] | None, side: int) -> Photo | SkippedImage:
    """Decode the whole image (only that shows a truncated one), find its position and its mask."""
    row = (rows or {}).get(name, MetadataRow())
    try:
        check_row(name, row)
        content = read_plain(root / name, follow_links=True, max_bytes=MAX_FILE_BYTES)
        if not content:
            raise UnusableImageError("empty file")
        # Phones send such files with the name of a JPEG.
        if not transform.HEIC and content[4:12] in (b"ftypheic", b"ftypheix", b"ftyphevc"):
            raise UnusableImageError(transform.NEEDS_HEIC)
        with transform.open_image(io.BytesIO(content)) as image:
            upright = transform.upright(image)  # as `pixels` will: damaged EXIF must show now
            (latitude, longitude), _ = geotags.find_position(row, image)
        text = row.text or _read_caption((root / name).with_suffix(".txt"))
        if row.mask is not None:
            # Image and mask are hashed together: another mask gives the data another identity.
            content += _examine_mask(root, row.mask, upright.size, side)
    # PositionError is a ValueError, and DECODE_ERRORS include ValueError: it has to be caught first.
    except PositionError as error:
        no_row = "no row in the metadata file; " if rows is not None and name not in rows else ""
        return SkippedImage(file=name, reason=f"{no_row}{error}")
    except transform.DECODE_ERRORS as error:
        return skipped_image(name, error)
    return Photo(
        size=upright.size,
        name=name,
        latitude=latitude,
        longitude=longitude,
        text=text,
        mask=row.mask,
        sha256=hashlib.sha256(content).hexdigest(),
    )


def _read_caption(path: Path) -> str:
    """Return the first line of NAME.txt beside NAME.jpg, as kohya's scripts do, or "". Raises UnusableImageError."""
    if not os.path.lexists(path):
        return ""
    try:
        content = read_plain(path, follow_links=True, max_bytes=MAX_CAPTION_BYTES)
        return (content.decode("utf-8-sig").splitlines() or [""])[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UnusableImageError(f"its caption {path.name} cannot be read: {error.args[-1]}") from None


def _examine_mask(root: Path, name: str, size: tuple[int, int], side: int) -> bytes:
    """Return the mask file's content. Raises UnusableImageError."""
    path = root / name
    # A metadata file from elsewhere must not reach files outside its folder.
    if ".." in Path(name).parts or Path(name).is_absolute():
        raise UnusableImageError(f"its mask {name} lies outside the folder")
    if not path.is_file():
        raise UnusableImageError(f"its mask {name} is missing")
    with transform.naming_mask(name):
        content = read_plain(path, follow_links=True, max_bytes=MAX_FILE_BYTES)
        if not content:
            raise UnusableImageError(f"its mask {name} is an empty file")
        with transform.open_image(io.BytesIO(content)) as mask:
            # As `own_mask` will decode it, for the errors alone.
            transform.center_square_mask(mask, size, side)
    return content


def check_row(name: str, row: MetadataRow) -> None:
    """Raise UnusableImageError if an image's name or its row of the metadata file cannot be used."""
    if any(escape_invalid(text) != text for text in (name, row.text, row.mask or "")):
        raise UnusableImageError("its name, its text or its mask's name is not valid Unicode")
    if len(row.entries) > 1:
        entries = ", ".join(map(str, row.entries))
        raise UnusableImageError(f"named more than once in the metadata file (entries {entries})")


def skipped_image(name: str, error: Exception) -> SkippedImage:
    """Return why an image cannot be used, from one of DECODE_ERRORS."""
    if isinstance(error, UnusableImageError):
        reason = str(error)
    elif isinstance(error, UnidentifiedImageError):
        reason = "not an image that can be read"
    elif isinstance(error, OSError) and error.errno is not None:  # Pillow's own, such as "truncated", have no number
        reason = f"cannot be read: {error.strerror}"
    else:
        reason = f"damaged image: {error}"
    return SkippedImage(file=escape_invalid(name), reason=reason)


def escape_invalid(text: str) -> str:
    """Return the text with everything that is not valid Unicode escaped."""
    # File names that are not UTF-8 reach Python with lone surrogates, which neither JSON nor Parquet can hold.
    return text.encode("utf-8", "backslashreplace").decode()
