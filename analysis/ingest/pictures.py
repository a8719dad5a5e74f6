"""Sample pictures of runs: copied when runs are merged, and shown on the page without a file beside it."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import polars as pl

from analysis.ingest.parts import Skip
from analysis.units import gpu_label

FOLDER = "quality"  # in a dataset: one picture per run
LARGEST_BYTES = 4 * 2**20  # of one picture
PAGE_BYTES = 24 * 2**20  # of all pictures on one page
_KINDS = {b"\x89PNG\r\n\x1a\n": ("png", "image/png"), b"\xff\xd8\xff": ("jpg", "image/jpeg")}


def usable(folder: Path, manifest: dict[str, Any]) -> Path | None:
    """The picture that a run's manifest names, where it can be taken."""
    found = _named(folder, manifest)
    return found if found and not _objection(folder, found) else None


def copy(folder: Path, manifest: dict[str, Any], dataset: Path) -> tuple[str | None, Skip | None]:
    """Copy a run's picture into the dataset; its path there, or why it was left out."""
    found = _named(folder, manifest)
    if found is None:
        return None, None
    why = _objection(folder, found)
    if why:
        return None, Skip(path=str(found), code="picture", reason=why, run_id=str(manifest["run_id"]))
    kind = _kind(found)
    assert kind is not None
    target = dataset / FOLDER / f"{quote(str(manifest['run_id']), safe='')}.{kind[0]}"
    target.parent.mkdir(exist_ok=True)
    shutil.copyfile(found, target)
    return str(target.relative_to(dataset)), None


def _named(folder: Path, manifest: dict[str, Any]) -> Path | None:
    quality = manifest.get("quality")
    named = quality.get("pictures") if isinstance(quality, dict) else None
    return folder / str(named) if named else None


def _objection(folder: Path, path: Path) -> str | None:
    try:
        if folder.resolve() not in path.resolve().parents:
            return "the manifest names a picture outside its run directory"
        if not path.is_file():
            return "the manifest names this picture, and there is no such file"
        if path.stat().st_size > LARGEST_BYTES:
            return f"picture of {path.stat().st_size:,} bytes; {LARGEST_BYTES:,} are taken at most"
        return None if _kind(path) else "not a PNG or JPEG by its content"
    except OSError as error:
        return f"cannot be read ({error})"


def _kind(path: Path) -> tuple[str, str] | None:
    """Suffix and media type, by content: what a page embeds must be what it says."""
    with path.open("rb") as raw:
        head = raw.read(8)
    return next((kind for magic, kind in _KINDS.items() if head.startswith(magic)), None)


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A sample grid on the page, as a data URI."""

    run_id: str
    title: str
    uri: str


def embedded(folder: Path, runs: pl.DataFrame, cell_key: Sequence[str]) -> tuple[list[Picture], str]:
    """One sample grid per cell, of its first run that counts, up to the page's size; what was left out, in words."""
    known = runs.filter(pl.col("sample_grid").is_not_null())
    counted = known.filter("valid").sort("seed", "run_id", nulls_last=True)
    first = counted.unique(cell_key, keep="first", maintain_order=True)
    shown: list[Picture] = []
    room, lost = PAGE_BYTES, 0
    for row in first.iter_rows(named=True):
        path = folder / row["sample_grid"]
        kind = _kind(path) if path.is_file() else None
        if kind is None or path.stat().st_size > room:
            lost += 1
            continue
        content = path.read_bytes()
        room -= len(content)
        uri = f"data:{kind[1]};base64,{base64.b64encode(content).decode()}"
        title = f"{gpu_label(row['gpu'])}, batch {row['batch']}, {row['recipe']}, seed {row['seed'] or 0}"
        shown.append(Picture(run_id=row["run_id"], title=title, uri=uri))
    words = f"One run that counts per recipe, GPU and batch; all {known.height} are in the dataset's {FOLDER} folder."
    if lost:
        words += f" {lost} more are not on this page, which takes {PAGE_BYTES // 2**20} MiB of pictures."
    return shown, words if known.height else ""
