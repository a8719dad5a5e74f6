"""A folder of photographs. Each is decoded once when the folder is opened, so that what cannot be read is
named and counted before the first step instead of ending the run in its third hour."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from ..config import DataConfig
from ..errors import UserError
from . import positions
from .positions import NoPosition, Row
from .source import Account, Pixels, Skipped

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
THREADS = 8  # Pillow decodes outside the interpreter lock
CHUNK = 256
SAY_AFTER_S = 5.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Photo:
    path: Path
    latitude: float
    longitude: float
    text: str


class FolderSource:
    """Images below a folder, each with a position; see `open`."""

    def __init__(self, photos: list[Photo], account: Account, resolution_px: int) -> None:
        self.account = account
        self.resolution_px = resolution_px
        self.positions = np.array([(p.latitude, p.longitude) for p in photos], np.float64)
        self.texts = [p.text for p in photos]
        self._paths = [p.path for p in photos]

    @classmethod
    def open(cls, config: DataConfig) -> FolderSource:
        """Check every image under `config.root` (hidden files apart) and keep the usable ones.

        Raises UserError where the folder is missing or holds no usable image.
        """
        root = Path(config.root or "")
        if not root.is_dir():
            raise UserError(f"data.root={root}: no such folder")
        rows = positions.read_metadata(root)
        files = _image_files(root)
        photos: list[Photo] = []
        skipped = _named_but_missing(rows, {f.relative_to(root).as_posix() for f in files})
        found = len(files) + len(skipped)
        looked_at = 0
        for result in _examine_all(root, files, rows or {}):
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
        return cls(photos, account, config.resolution_px)

    def __len__(self) -> int:
        return len(self._paths)

    def pixels(self, index: int) -> Pixels:
        """Upright, the centre square, resized. Raises RuntimeError naming a file that became unreadable."""
        path, side = self._paths[index], self.resolution_px
        try:
            with Image.open(path) as image:
                upright = ImageOps.exif_transpose(image).convert("RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise RuntimeError(f"{path}: was readable when the run began, now: {error}") from error
        return np.asarray(ImageOps.fit(upright, (side, side), method=Image.Resampling.BICUBIC))


def _image_files(root: Path) -> list[Path]:
    """Sorted, so that an index means the same image on every machine."""
    files = (path for path in root.rglob("*") if path.suffix.lower() in SUFFIXES)
    visible = (p for p in files if not any(part.startswith(".") for part in p.relative_to(root).parts))
    return sorted(path for path in visible if path.is_file())


def _named_but_missing(rows: dict[str, Row] | None, present: set[str]) -> list[Skipped]:
    absent = f"named in the metadata file, but no image of that name in the folder ({', '.join(SUFFIXES)})"
    return [Skipped(file=name, reason=absent) for name in sorted(set(rows or ()) - present)]


def _examine_all(root: Path, files: list[Path], rows: dict[str, Row]) -> Iterator[Photo | Skipped]:
    """In the order of `files`, a chunk at a time: a limit met early leaves the rest unread."""
    threads = min(THREADS, len(os.sched_getaffinity(0)))
    said, done, todo = time.monotonic(), 0, iter(files)
    with ThreadPoolExecutor(threads, thread_name_prefix="images") as pool:
        while chunk := list(islice(todo, CHUNK)):
            yield from pool.map(lambda path: _examine(root, path, rows), chunk)
            done += len(chunk)
            if time.monotonic() - said > SAY_AFTER_S:
                said = time.monotonic()
                log.info("checked %d of %d images", done, len(files))


def _examine(root: Path, path: Path, rows: dict[str, Row]) -> Photo | Skipped:
    """Decode the whole image (a truncated one only shows then) and find its position."""
    name = path.relative_to(root).as_posix()
    row = rows.get(name, Row())
    try:
        if path.stat().st_size == 0:
            return Skipped(file=name, reason="empty file")
        with Image.open(path) as image:
            image.load()
            ImageOps.exif_transpose(image)  # as `pixels` will: damaged EXIF is to show now
            latitude, longitude = positions.from_row(row) if row.has_position else positions.from_exif(image)
    except NoPosition as error:
        return Skipped(file=name, reason=str(error))
    except UnidentifiedImageError:
        return Skipped(file=name, reason="not an image that can be read")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        # Pillow says "truncated" as OSError and reports other damage as any of these.
        return Skipped(file=name, reason=f"damaged image: {error}")
    return Photo(path=path, latitude=latitude, longitude=longitude, text=row.text)
