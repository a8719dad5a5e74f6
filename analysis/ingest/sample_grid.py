"""The grid of sample images that a training writes: found by its manifest, and copied into the dataset."""

from __future__ import annotations

import shutil
from pathlib import Path
from urllib.parse import quote

from inpaint_bench.core.records import Manifest

from .parts import SkippedFile, skipped

FOLDER = "quality"  # in a dataset: one image per run
MAX_BYTES = 4 * 2**20  # of one image
_MAGIC = {b"\x89PNG\r\n\x1a\n": ("png", "image/png"), b"\xff\xd8\xff": ("jpg", "image/jpeg")}


def find(folder: Path, manifest: Manifest) -> Path | None:
    """Return the image that a run's manifest names, where it is usable."""
    path = _named(folder, manifest)
    return path if path and not _problem(folder, path) else None


def copy(folder: Path, manifest: Manifest, dataset: Path) -> tuple[str | None, SkippedFile | None]:
    """Copy a run's image into the dataset. Return its path there, or the record of why it was skipped."""
    path = _named(folder, manifest)
    if path is None:
        return None, None
    if problem := _problem(folder, path):
        return None, skipped(path, "picture", problem, manifest.run_id)
    suffix, _ = media_type(path) or ("", "")
    target = dataset / FOLDER / f"{quote(manifest.run_id, safe='')}.{suffix}"
    target.parent.mkdir(exist_ok=True)
    shutil.copyfile(path, target)
    return str(target.relative_to(dataset)), None


def media_type(path: Path) -> tuple[str, str] | None:
    """Return suffix and media type by the content, because a page embeds the file under that type."""
    with path.open("rb") as raw:
        head = raw.read(8)
    return next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), None)


def _named(folder: Path, manifest: Manifest) -> Path | None:
    name = manifest.quality.pictures if manifest.quality else None
    return folder / name if name else None


def _problem(folder: Path, path: Path) -> str | None:
    """Return why the image cannot be copied, None where it can."""
    try:
        if folder.resolve() not in path.resolve().parents:
            return "the manifest names an image outside its run directory"
        if not path.is_file():
            return "the manifest names this image, and there is no such file"
        if path.stat().st_size > MAX_BYTES:
            return f"image of {path.stat().st_size:,} bytes; the limit is {MAX_BYTES:,}"
        return None if media_type(path) else "not a PNG or JPEG by its content"
    except OSError as error:
        return f"cannot be read ({error})"
