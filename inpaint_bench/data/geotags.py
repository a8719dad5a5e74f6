"""Positions of photographs: from a metadata file beside the images, or from EXIF.

Metadata files follow the Hugging Face imagefolder convention: metadata.csv, .jsonl or .parquet with a `file_name`
column relative to the folder; beside it we read `latitude`, `longitude` (degrees), `text` and `mask` (a file relative
to the folder, white = repaint). What is beyond this form is refused or said, never dropped or converted. EXIF positions
are rationals in the GPS directory (EXIF 2.32, 4.6.6).
"""

import codecs
import csv
import io
import json
import logging
import math
import os
import re
import reprlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from PIL import ExifTags, Image

from inpaint_bench.core.console import sanitize
from inpaint_bench.core.errors import UserError, undecodable_byte
from inpaint_bench.core.files import read_plain

METADATA_NAMES = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
COLUMNS = ("file_name", "latitude", "longitude", "text", "mask")
MAX_METADATA_BYTES = 2**30
# In a text of several lines with the separators of a row: it began and ended with quotation marks of two rows.
NEXT_ROW = re.compile(r"\.(jpe?g|png|webp|tiff?|avif|hei[cf])\s*([,;\t]|$)", re.IGNORECASE | re.MULTILINE)

log = logging.getLogger(__name__)


class PositionError(ValueError):
    """The reason why an image has no usable position."""


@dataclass(frozen=True, kw_only=True)
class MetadataRow:
    """One image's row of the metadata file; coordinates as the file has them, None if empty."""

    latitude: Any = None
    longitude: Any = None
    text: str = ""
    mask: str | None = None  # relative to the folder
    entries: tuple[int, ...] = ()  # numbers of the entries that name the image; more than one is a mistake


def read_metadata(root: Path) -> dict[str, MetadataRow] | None:
    """Return the rows by file name, or None if `root` has no metadata file.

    Columns that are not read are named in the log. Raises UserError if there are several files, if the file cannot be
    read, or if it lacks `file_name`.
    """
    present = [root / name for name in METADATA_NAMES if os.path.lexists(root / name)]
    if not present:
        return None
    if len(present) > 1:
        raise UserError(f"{root}: has {' and '.join(p.name for p in present)}; keep one of them")
    path = present[0]
    try:
        records = _read_records(path)
    except (OSError, ValueError, RecursionError) as error:  # Arrow's errors are ValueErrors
        raise UserError(f"{path}: cannot be read ({error})") from None
    rows: dict[str, MetadataRow] = {}
    for number, record in enumerate(records, start=1):
        name = record.get("file_name")
        if is_empty(name):
            columns = ", ".join(map(str, record)) or "nothing"
            raise UserError(f"{path}: entry {number} names no file in file_name (its columns: {columns})")
        if not isinstance(name, str):
            raise UserError(f"{path}: entry {number}: file_name={reprlib.repr(name)} must be a text")
        key = Path(name).as_posix()
        for column in ("text", "mask"):
            if is_empty(record.setdefault(column, "")):
                record[column] = ""
            elif not isinstance(record[column], str):
                raise UserError(f"{path}: entry {number}: {column}={reprlib.repr(record[column])} must be one text")
        # A duplicate does not spoil the whole file: `check_row` skips that image and lists its entries.
        row = MetadataRow(
            latitude=record.get("latitude"),
            longitude=record.get("longitude"),
            text=record["text"],
            mask=Path(record["mask"]).as_posix() if record["mask"] else None,
        )
        earlier = rows[key].entries if key in rows else ()
        if not earlier or row != replace(rows[key], entries=()):
            rows[key] = replace(row, entries=(*earlier, number))
    filled = {name: "" for record in records for name, value in record.items() if not is_empty(value)}
    if unused := [name for name in filled if name not in COLUMNS]:
        shown, used = ", ".join(map(repr, unused[:20])), ", ".join(COLUMNS)
        log.warning("%s", sanitize(f"{path}: columns that are not used: {shown}; used are {used}"))
    return rows


def decode_text(content: bytes) -> str:
    """Return the text of a file in UTF-8, or in UTF-16 if it begins with a byte order mark. Raises ValueError."""
    try:
        text = content.decode("utf-16" if content[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig")
    except UnicodeDecodeError as error:
        line, problem = undecodable_byte(error)
        raise ValueError(f"line {line}: {problem}; save it as UTF-8") from None
    if "\0" in text:
        raise ValueError("has NUL characters; a text in UTF-16 begins with a byte order mark")
    return text


def _read_records(path: Path) -> list[dict[str, Any]]:
    """Return the rows that are not empty. Raises OSError and ValueError."""
    content = read_plain(path, follow_links=True, max_bytes=MAX_METADATA_BYTES)
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pq.ParquetFile(pa.BufferReader(content)).read()
        _record([(name, None) for name in table.column_names])
        # Other columns may hold what Python has no type for, such as times in nanoseconds.
        used = [name for name in table.column_names if name in COLUMNS]
        others = {name: table[name].null_count < len(table) or None for name in table.column_names if name not in used}
        records = [row | others for row in table.select(used).to_pylist() or [{}] * len(table)]
    elif path.suffix == ".csv":
        records = _read_csv(decode_text(content))
    else:
        records = [_read_line(*line) for line in enumerate(io.StringIO(decode_text(content)), 1) if line[1].strip()]
    return [record for record in records if not all(map(is_empty, record.values()))]


def _read_line(number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line, object_pairs_hook=_record)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {number}, column {error.colno}: {error.msg}; every line is one JSON object") from None
    if not isinstance(record, dict):
        raise ValueError(f"line {number}: every line must be a JSON object")
    return record


def _read_csv(text: str) -> list[dict[str, Any]]:
    """Return the rows of a CSV file, whose header shows what separates its fields. Raises ValueError."""
    if match := re.match(r"\s*sep=[,;\t]\r?\n", text):  # Excel reads its separator from such a line
        text = text[match.end() :]
    separator = max(",;\t", key=next((line for line in text.splitlines() if line.strip()), "").count)
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True, strict=True)
    rows: list[list[str]] = []  # the header first
    try:
        for fields in lines:
            cells = [cell.strip() for cell in fields]
            width = len(rows[0]) if rows else 0
            while len(cells) > width and not cells[-1]:
                cells.pop()
            if any("\n" in text and text.count(separator) >= width - 1 and NEXT_ROW.search(text) for text in cells):
                raise csv.Error("has a text that goes on over the next row")
            if any(cells) and width not in (0, len(cells)):
                raise csv.Error(f"has {len(cells)} fields, the header {width}")
            rows += [cells] if any(cells) else []
    except csv.Error as error:
        advice = f"a text with {separator!r} or quotation marks stands in quotation marks, each one inside it doubled"
        raise ValueError(f"row {len(rows)}: {error}; {advice}") from None
    return [_record(list(zip(rows[0], row, strict=True))) for row in rows[1:]]


def _record(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"has {next(name for name in record if names.count(name) > 1)!r} more than once")
    return record


def find_position(row: MetadataRow, image: Image.Image) -> tuple[tuple[float, float], str]:
    """Return latitude and longitude in degrees and their source, `metadata` or `EXIF`. Raises PositionError.

    EXIF is not meant if the row has one of the two: then the other is missing.
    """
    if is_empty(row.latitude) and is_empty(row.longitude):
        return _position_from_exif(image), "EXIF"
    return _checked(_parse_number("latitude", row.latitude), _parse_number("longitude", row.longitude)), "metadata"


def _position_from_exif(image: Image.Image) -> tuple[float, float]:
    tags = ExifTags.GPS
    gps = image.getexif().get_ifd(ExifTags.IFD.GPSInfo)
    if tags.GPSLatitude not in gps or tags.GPSLongitude not in gps:
        raise PositionError(
            "no position: neither in EXIF nor in latitude and longitude of a metadata.csv or Parquet file"
        )
    if _letter(gps.get(tags.GPSStatus)) == "V":
        raise PositionError("EXIF position is not of a fix (GPSStatus V): it may be an earlier place")
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
    letter = _letter(reference)
    if letter not in (positive, negative):
        raise PositionError(f"EXIF position does not say {positive} or {negative}")  # its sign would be a guess
    return 1 if letter == positive else -1


def _letter(value: Any) -> str:
    # EXIF pads the letter with a NUL, and some files store it as bytes.
    text = value.decode("ascii", "replace") if isinstance(value, bytes) else str(value or "")
    return text.strip("\0 ").upper()


def _parse_number(name: str, value: Any) -> float:
    if is_empty(value):
        raise PositionError(f"{name} is missing")
    try:
        # float(True) would be 1 degree, and float("5_5") 55.
        if not isinstance(value, bool) and "_" not in str(value):
            return float(value)
    # JSON allows integers that are too large for a float.
    except OverflowError:
        raise PositionError(f"position out of range: {name} has {len(str(value))} digits") from None
    except (TypeError, ValueError):
        pass
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+,\d+", value):
        raise PositionError(f"{name} has a decimal comma; write a point, such as 55.6988")
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


def is_empty(value: Any) -> bool:
    """Return whether a cell is empty: None, blank, or NaN (pandas's empty cell in a column of numbers)."""
    return value is None or (isinstance(value, str) and value.strip().lower() in ("", "nan")) or bool(value != value)
