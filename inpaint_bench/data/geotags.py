"""Positions of photographs: from a metadata file beside the images, or from EXIF.

Metadata files follow the Hugging Face imagefolder convention: metadata.csv, .jsonl or .parquet with a `file_name`
column relative to the folder; beside it we read `latitude`, `longitude` (degrees), `text` and `mask` (a file relative
to the folder, white = repaint). EXIF positions are rationals in the GPS directory (EXIF 2.32, 4.6.6).
"""

from __future__ import annotations

import csv
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import ExifTags, Image

from inpaint_bench.core.errors import UserError

METADATA_NAMES = ("metadata.csv", "metadata.jsonl", "metadata.parquet")


class PositionError(ValueError):
    """The reason why an image has no usable position."""


@dataclass(frozen=True, kw_only=True)
class MetadataRow:
    """One image's row of the metadata file; coordinates as the file has them, None where empty."""

    latitude: Any = None
    longitude: Any = None
    text: str = ""
    mask: str | None = None  # relative to the folder
    entries: tuple[int, ...] = ()  # numbers of the entries that name the image; more than one is a mistake


def read_metadata(root: Path) -> dict[str, MetadataRow] | None:
    """Return the rows by file name, or None if `root` has no metadata file.

    Raises UserError if there are several, if the file cannot be read, or if it lacks `file_name`.
    """
    present = [root / name for name in METADATA_NAMES if (root / name).is_file()]
    if not present:
        return None
    if len(present) > 1:
        raise UserError(f"{root}: has {' and '.join(p.name for p in present)}; keep one of them")
    path = present[0]
    try:
        records = _read_records(path)
    except (OSError, ValueError, csv.Error) as error:  # Arrow's errors are ValueErrors
        raise UserError(f"{path}: cannot be read ({error})") from None
    rows: dict[str, MetadataRow] = {}
    for number, record in enumerate(records, start=1):
        name = record.get("file_name")
        if not isinstance(name, str) or not name:
            columns = ", ".join(map(str, record)) or "nothing"
            raise UserError(f"{path}: entry {number} has no file_name (it has {columns})")
        key = Path(name).as_posix()
        # A duplicate does not spoil the whole file: `check_row` skips that image and lists its entries.
        rows[key] = MetadataRow(
            latitude=record.get("latitude"),
            longitude=record.get("longitude"),
            text=str(record.get("text") or ""),
            mask=Path(str(record["mask"])).as_posix() if not _is_empty(record.get("mask")) else None,
            entries=(*(rows[key].entries if key in rows else ()), number),
        )
    return rows


def _read_records(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        return list(pq.read_table(path).to_pylist())
    with path.open(encoding="utf-8-sig", newline="") as lines:  # Excel writes a byte order mark
        if path.suffix == ".csv":
            return list(csv.DictReader(lines))
        records = [json.loads(line) for line in lines if line.strip()]
    if not all(isinstance(record, dict) for record in records):
        raise ValueError("every line must be a JSON object")
    return records


def find_position(row: MetadataRow, image: Image.Image) -> tuple[tuple[float, float], str]:
    """Return latitude and longitude in degrees and their source, `metadata` or `EXIF`. Raises PositionError.

    EXIF is not meant where the row has one of the two: then the other is missing.
    """
    if _is_empty(row.latitude) and _is_empty(row.longitude):
        return _position_from_exif(image), "EXIF"
    return _checked(_parse_number("latitude", row.latitude), _parse_number("longitude", row.longitude)), "metadata"


def _position_from_exif(image: Image.Image) -> tuple[float, float]:
    tags = ExifTags.GPS
    gps = image.getexif().get_ifd(ExifTags.IFD.GPSInfo)
    if tags.GPSLatitude not in gps or tags.GPSLongitude not in gps:
        raise PositionError("no position: neither in EXIF nor in a metadata.csv (file_name, latitude, longitude)")
    latitude = _degrees(gps[tags.GPSLatitude]) * _sign(gps.get(tags.GPSLatitudeRef), "N", "S")
    longitude = _degrees(gps[tags.GPSLongitude]) * _sign(gps.get(tags.GPSLongitudeRef), "E", "W")
    return _checked(latitude, longitude)


def _degrees(value: Any) -> float:
    try:
        degrees, minutes, seconds = (float(part) for part in value)
    except (TypeError, ValueError, ZeroDivisionError):
        raise PositionError("EXIF position is damaged: not degrees, minutes and seconds") from None
    # 0/0, which cameras write without a fix, is NaN. The sign is in the reference, so nothing may be negative. 60 comes
    # from software that rounds up.
    if not (degrees >= 0 and 0 <= minutes <= 60 and 0 <= seconds <= 60):
        raise PositionError(f"EXIF position is damaged: {degrees:g} degrees, {minutes:g} minutes, {seconds:g} seconds")
    return degrees + minutes / 60 + seconds / 3600


def _sign(reference: Any, positive: str, negative: str) -> int:
    # EXIF pads the letter with a NUL, and some files store it as bytes.
    letter = reference.decode("ascii", "replace") if isinstance(reference, bytes) else str(reference or "")
    letter = letter.strip("\0 ").upper()
    if letter not in (positive, negative):
        raise PositionError(f"EXIF position does not say {positive} or {negative}")  # its sign would be a guess
    return 1 if letter == positive else -1


def _parse_number(name: str, value: Any) -> float:
    if _is_empty(value):
        raise PositionError(f"{name} is missing")
    try:
        # float(True) would be 1 degree.
        if not isinstance(value, bool):
            return float(value)
    # JSON allows integers that are too large for a float.
    except OverflowError:
        raise PositionError(f"position out of range: {name} has {len(str(value))} digits") from None
    except (TypeError, ValueError):
        pass
    raise PositionError(f"{name}={value!r} is not a number")


def _checked(latitude: float, longitude: float) -> tuple[float, float]:
    if not (math.isfinite(latitude) and abs(latitude) <= 90):
        swapped = "; are latitude and longitude swapped?" if abs(latitude) <= 180 and abs(longitude) <= 90 else ""
        raise PositionError(f"position out of range: latitude {latitude:g} is not within -90..90{swapped}")
    if not (math.isfinite(longitude) and abs(longitude) <= 180):
        raise PositionError(f"position out of range: longitude {longitude:g} is not within -180..180")
    if latitude == longitude == 0:
        raise PositionError("position is 0, 0, which cameras and tables write for an unknown one")
    return latitude, longitude


def _is_empty(value: Any) -> bool:
    """Return whether a cell is empty: None, blank, or NaN (pandas's empty cell in a column of numbers)."""
    return value is None or (isinstance(value, str) and not value.strip()) or value != value
