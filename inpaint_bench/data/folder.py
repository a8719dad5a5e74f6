"""A folder of photographs. Each is read and decoded once when the folder is opened, so that what cannot be used
is named and counted before the first step instead of ending the run in its third hour."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from inpaint_bench.core.config import DataConfig
from inpaint_bench.core.errors import UserError

from . import geotags, transform
from .geotags import NoPosition, Row
from .source import Account, Mask, Pixels, Skipped
from .transform import UnusableImage

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
THREADS = 8  # Pillow decodes outside the interpreter lock
CHUNK = 256
SAY_AFTER_S = 5.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Photo:
    name: str  # relative to the folder
    latitude: float
    longitude: float
    text: str
    mask: str | None  # relative to the folder
    sha256: str  # of the files: image, then mask


class FolderSource:
    """Images below a folder, each with a position; see `open`."""

    def __init__(self, root: Path, photos: list[Photo], account: Account, resolution_px: int) -> None:
        self.account = account
        self.resolution_px = resolution_px
        self.positions = np.array([(p.latitude, p.longitude) for p in photos], np.float64)
        self.texts = [p.text for p in photos]
        self.names = [p.name for p in photos]
        self.identity = hashlib.sha256("\n".join(map(repr, photos)).encode()).hexdigest()
        self._root = root
        self._masks = [p.mask for p in photos]

    @classmethod
    def open(cls, config: DataConfig) -> FolderSource:
        """Check every image under `config.root` (hidden files apart) and keep the usable ones.

        Raises UserError where the folder is missing or holds no usable image.
        """
        root = Path(config.root or "")
        if not root.is_dir():
            raise UserError(f"data.root={root}: no such folder")
        rows = geotags.read_metadata(root)
        masks = {row.mask for row in (rows or {}).values()}
        files = [path for path in image_files(root) if path.relative_to(root).as_posix() not in masks]
        photos: list[Photo] = []
        skipped = named_but_unused(root, rows or {}, {f.relative_to(root).as_posix() for f in files})
        found = len(files) + len(skipped)
        looked_at = 0
        for result in _examine_all(root, files, rows, config.resolution_px):
            looked_at += 1
            if isinstance(result, Skipped):
                skipped.append(result)
            else:
                photos.append(result)
                if len(photos) == config.num_images:
                    break
        if not photos:
            reasons = sorted({s.reason for s in skipped})
            why = f"; reasons: {'; '.join(reasons[:3])}" if reasons else f" ({', '.join(SUFFIXES)})"
            raise UserError(f"data.root={root}: no usable image, {found} found, {len(skipped)} skipped{why}")
        for one in skipped:
            log.warning("skipped %s: %s", one.file, one.reason)
        account = Account(
            kind="folder",
            found=found,
            used=len(photos),
            beyond_limit=len(files) - looked_at,
            skipped=skipped,
        )
        return cls(root, photos, account, config.resolution_px)

    def __len__(self) -> int:
        return len(self.names)

    def pixels(self, index: int) -> Pixels:
        """Upright, the centre square, resized. Raises RuntimeError naming a file that became unreadable."""
        path = self._root / self.names[index]
        try:
            with Image.open(path) as image:
                return transform.square(transform.upright(image), self.resolution_px)
        except transform.DAMAGE as error:
            raise _changed(path, error) from error

    def own_mask(self, index: int) -> Mask | None:
        """By the same crop as the image. Raises RuntimeError naming a file that became unreadable."""
        name = self._masks[index]
        if name is None:
            return None
        try:
            with Image.open(self._root / self.names[index]) as image, Image.open(self._root / name) as mask:
                return transform.square_mask(mask, transform.upright_size(image), self.resolution_px)
        except transform.DAMAGE as error:
            raise _changed(self._root / name, error) from error

    def close(self) -> None:
        """Nothing is held."""


def _changed(path: Path, error: Exception) -> RuntimeError:
    return RuntimeError(f"{path}: was readable when the run began, now: {error}")


def image_files(root: Path) -> list[Path]:
    """Sorted, so that an index means the same image on every machine. Symlinks to nothing are among them."""
    files = (path for path in root.rglob("*") if path.suffix.lower() in SUFFIXES)
    visible = (p for p in files if not any(part.startswith(".") for part in p.relative_to(root).parts))
    return sorted(path for path in visible if path.is_file() or not path.exists())


def named_but_unused(root: Path, rows: dict[str, Row], used: set[str]) -> list[Skipped]:
    """Images that have a row of their own and are not among those `used`."""
    masks = {row.mask for row in rows.values()}
    absent = f"named in the metadata file, but no image of that name in the folder ({', '.join(SUFFIXES)})"
    masking = "named as a mask too in the metadata file, so it is not used as an image"
    return [
        Skipped(file=legible(name), reason=masking if name in masks and (root / name).is_file() else absent)
        for name in sorted(rows.keys() - used)
    ]


def _examine_all(root: Path, files: list[Path], rows: dict[str, Row] | None, side: int) -> Iterator[Photo | Skipped]:
    """In the order of `files`, a chunk at a time: a limit met early leaves the rest unread."""
    threads = min(THREADS, len(os.sched_getaffinity(0)))
    said, done, todo = time.monotonic(), 0, iter(files)
    with ThreadPoolExecutor(threads, thread_name_prefix="images") as pool:
        while chunk := list(islice(todo, CHUNK)):
            yield from pool.map(lambda path: _examine(root, path, rows, side), chunk)
            done += len(chunk)
            if time.monotonic() - said > SAY_AFTER_S:
                said = time.monotonic()
                log.info("checked %d of %d images", done, len(files))


def _examine(root: Path, path: Path, rows: dict[str, Row] | None, side: int) -> Photo | Skipped:
    """Decode the whole image (a truncated one only shows then), find its position and its mask."""
    name = path.relative_to(root).as_posix()
    row = (rows or {}).get(name, Row())
    try:
        check_row(name, row)
        content = path.read_bytes()
        if not content:
            raise UnusableImage("empty file")
        with Image.open(io.BytesIO(content)) as image:
            upright = transform.upright(image)  # as `pixels` will: damaged EXIF is to show now
            latitude, longitude = geotags.from_row(row) if row.has_position else geotags.from_exif(image)
        if row.mask is not None:
            content += _examine_mask(root, row.mask, upright.size, side)
    except NoPosition as error:
        rowless = "no row in the metadata file; " if rows is not None and name not in rows else ""
        return Skipped(file=name, reason=f"{rowless}{error}")
    except transform.DAMAGE as error:
        return skipped(name, error)
    sha256 = hashlib.sha256(content).hexdigest()
    return Photo(name=name, latitude=latitude, longitude=longitude, text=row.text, mask=row.mask, sha256=sha256)


def check_row(name: str, row: Row) -> None:
    """Raises UnusableImage where an image's name or its row says nothing that can be used."""
    if any(legible(text) != text for text in (name, row.text, row.mask or "")):
        raise UnusableImage("its name, its text or its mask's name is not valid Unicode")
    if len(row.entries) > 1:
        entries = ", ".join(map(str, row.entries))
        raise UnusableImage(f"named more than once in the metadata file (entries {entries})")


def skipped(name: str, error: Exception) -> Skipped:
    """Why an image cannot be used, by what was raised."""
    if isinstance(error, UnusableImage):
        reason = str(error)
    elif isinstance(error, UnidentifiedImageError):
        reason = "not an image that can be read"
    elif isinstance(error, OSError) and error.errno is not None:  # Pillow's own, such as "truncated", have no number
        reason = f"cannot be read: {error.strerror}"
    else:
        reason = f"damaged image: {error}"
    return Skipped(file=legible(name), reason=reason)


def legible(text: str) -> str:
    """The text, with what is not Unicode in it as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def _examine_mask(root: Path, name: str, size: tuple[int, int], side: int) -> bytes:
    """The mask file's content. Raises UnusableImage."""
    path = root / name
    if ".." in Path(name).parts or Path(name).is_absolute():
        raise UnusableImage(f"its mask {name} lies outside the folder")
    if not path.is_file():
        raise UnusableImage(f"its mask {name} is missing")
    try:
        content = path.read_bytes()
        if not content:
            raise UnusableImage(f"its mask {name} is an empty file")
        with Image.open(io.BytesIO(content)) as mask:
            transform.square_mask(mask, size, side)
    except UnusableImage:
        raise
    except transform.DAMAGE as error:
        raise UnusableImage(f"its mask {name} cannot be read: {error}") from error
    return content
