"""Where a photograph was taken: from a metadata file beside the images, or from EXIF.

Metadata files follow the Hugging Face imagefolder convention: metadata.csv, .jsonl or .parquet with a
`file_name` column relative to the folder; we read `latitude`, `longitude` (degrees), `text` and `mask` (a file
relative to the folder, white = repaint) beside it.
EXIF positions are rationals in the GPS directory (EXIF 2.32, 4.6.6).
"""

from __future__ import annotations

import csv
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from inpaint_bench.core.errors import UserError

NAMES = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
_GPS_DIRECTORY = 0x8825


class NoPosition(ValueError):  # noqa: N818
    """Why an image has no usable position, in words."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One image's line in the metadata file; coordinates as found there, None where empty."""

    latitude: Any = None
    longitude: Any = None
    text: str = ""
    mask: str | None = None  # relative to the folder
    entries: tuple[int, ...] = ()  # which entries of the metadata file name it; more than one is a mistake

    @property
    def has_position(self) -> bool:
        """One coordinate is enough to say that EXIF is not meant; the other is then missed by name."""
        return not (_empty(self.latitude) and _empty(self.longitude))


def read_metadata(root: Path) -> dict[str, Row] | None:
    """Rows by file name; None where `root` has no metadata file.

    Raises UserError where there are several, one cannot be read, or it lacks `file_name`.
    """
    present = [root / name for name in NAMES if (root / name).is_file()]
    if not present:
        return None
    if len(present) > 1:
        raise UserError(f"{root}: {' and '.join(p.name for p in present)} are both there; keep one of them")
    path = present[0]
    try:
        records = _records(path)
    except (OSError, ValueError, csv.Error) as error:  # Arrow's errors are ValueErrors
        raise UserError(f"{path}: cannot be read ({error})") from None
    rows: dict[str, Row] = {}
    for number, record in enumerate(records, start=1):
        name = record.get("file_name")
        if not isinstance(name, str) or not name:
            have = ", ".join(map(str, record)) or "nothing"
            raise UserError(f"{path}: entry {number} has no file_name (it has {have})")
        key = Path(name).as_posix()
        rows[key] = Row(
            latitude=record.get("latitude"),
            longitude=record.get("longitude"),
            text=str(record.get("text") or ""),
            mask=Path(str(record["mask"])).as_posix() if not _empty(record.get("mask")) else None,
            entries=(*(rows[key].entries if key in rows else ()), number),
        )
    return rows


def _records(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        return list(pq.read_table(path).to_pylist())
    with path.open(encoding="utf-8-sig", newline="") as lines:
        if path.suffix == ".csv":
            return list(csv.DictReader(lines))
        records = [json.loads(line) for line in lines if line.strip()]
    if not all(isinstance(record, dict) for record in records):
        raise ValueError("every line must be a JSON object")
    return records


def from_row(row: Row) -> tuple[float, float]:
    """Latitude and longitude in degrees. Raises NoPosition."""
    return _checked(_number("latitude", row.latitude), _number("longitude", row.longitude))


def from_exif(image: Image.Image) -> tuple[float, float]:
    """Latitude and longitude in degrees. Raises NoPosition."""
    gps = image.getexif().get_ifd(_GPS_DIRECTORY)
    if 2 not in gps or 4 not in gps:
        raise NoPosition("no position: neither in a metadata file nor in EXIF")
    latitude = _degrees(gps[2]) * _sign(gps.get(1), "N", "S")
    longitude = _degrees(gps[4]) * _sign(gps.get(3), "E", "W")
    return _checked(latitude, longitude)


def _degrees(value: Any) -> float:
    try:
        degrees, minutes, seconds = (float(part) for part in value)
    except (TypeError, ValueError, ZeroDivisionError):
        raise NoPosition("EXIF position is damaged: not degrees, minutes and seconds") from None
    if not (0 <= minutes < 60 and 0 <= seconds < 60):
        raise NoPosition(f"EXIF position is damaged: {minutes:g} minutes, {seconds:g} seconds")
    return degrees + minutes / 60 + seconds / 3600


def _sign(reference: Any, plus: str, minus: str) -> int:
    letter = reference.decode("ascii", "replace") if isinstance(reference, bytes) else str(reference or "")
    letter = letter.strip("\0 ").upper()
    if letter not in (plus, minus):
        raise NoPosition(f"EXIF position does not say {plus} or {minus}")  # its sign would be a guess
    return 1 if letter == plus else -1


def _number(name: str, value: Any) -> float:
    if _empty(value):
        raise NoPosition(f"{name} is missing")
    try:
        if not isinstance(value, bool):
            return float(value)
    except OverflowError:
        raise NoPosition(f"position out of range: {name} has {len(str(value))} digits") from None
    except (TypeError, ValueError):
        pass
    raise NoPosition(f"{name}={value!r} is not a number")


def _checked(latitude: float, longitude: float) -> tuple[float, float]:
    if not (math.isfinite(latitude) and abs(latitude) <= 90):
        raise NoPosition(f"position out of range: latitude {latitude:g} is not within -90..90")
    if not (math.isfinite(longitude) and abs(longitude) <= 180):
        raise NoPosition(f"position out of range: longitude {longitude:g} is not within -180..180")
    if latitude == longitude == 0:
        raise NoPosition("position is 0, 0: what cameras and tables write for none")
    return latitude, longitude


def _empty(value: Any) -> bool:
    """None, blank, or NaN: how pandas writes nothing into a column of numbers."""
    return value is None or (isinstance(value, str) and not value.strip()) or value != value
