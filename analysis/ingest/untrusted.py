"""Bounds of what is read from a run directory, which anybody may have written.

What exceeds a bound is left out with a reason; of other run directories nothing changes.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from inpaint_bench.core import records
from inpaint_bench.core.errors import first_line

MAX_RECORD_BYTES = 64 * 2**20  # a manifest lists every skipped image, with some 100 bytes each
MAX_DEPTH = 30  # levels of a record; ours have six
MAX_TEXT = 20_000  # characters of one text in a record: a message with the output of a compiler
MAX_ID = 200  # bytes of a run id, a site, a GPU as folder names, of which a file system takes 255
MAX_ENTRIES = 50_000  # files in one folder: a part per minute fills 35 days
MAX_PART_BYTES = 256 * 2**20  # limit for a part or journal; those of 6,000 rows or a minute have less than 1 MiB
# Limit for one table in memory. Three days of eight GPUs at 10 Hz are 1.5 GiB.
MAX_TABLE_BYTES = 2 * 2**30
# What is compared one by one: without a bound a small file keeps the merge busy for hours.
MAX_DEVICES = 256  # more than a node with sixteen GPUs has, each in seven MIG instances
MAX_WINDOWS = 5_000
MAX_KERNELS = 50_000  # rows of a profile; a step of Stable Diffusion has some hundred
MAX_EVENTS = 20_000  # the sidecar writes at most some hundred per GPU
MAX_READING = 1e12  # largest reading of a sensor, in any unit that a column has
MAX_DETAIL = 1_000  # characters of one text in a table
_INTEGERS = range(-(2**63), 2**63)
_YEARS_NS = range(946_684_800 * 10**9, 4_102_444_800 * 10**9)  # 2000 to 2100
# Control characters, those that change the direction of text, line separators, and halves of surrogate pairs.
_NOT_PRINTED = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


class LeftOutError(Exception):
    """A run directory that is left out, with the code and the reason for skipped_files.parquet."""

    def __init__(self, code: str, reason: str, path: Path | None = None) -> None:
        super().__init__(reason)
        self.code, self.reason, self.path = code, reason, path


def printable(text: str, limit: int = MAX_TEXT) -> str:
    """Return text of one line for a terminal, a table or a page: nothing in it is a command to any of them."""
    if len(text) > limit:
        text = f"{text[:limit]} ... ({len(text):,} characters)"
    if text.isprintable():
        return text
    return _NOT_PRINTED.sub(lambda match: " " if match[0] in "\n\r\t" else f"\\x{ord(match[0]):02x}", text)


def path_text(path: Path) -> str:
    """Return a path as text that any file can hold; bytes that are not UTF-8 are escaped."""
    return printable(os.fsencode(path).decode("utf-8", "backslashreplace"))


def describe(error: BaseException) -> str:
    """Return the first line of an error."""
    if isinstance(error, OSError) and error.strerror:
        return printable(error.strerror, 200)
    return printable(first_line(error), 200)


def decode_record(content: bytes) -> Any:
    """Return the value of a JSON file with bounded depth, texts and numbers, and printable texts.

    Raise ValueError if a bound is exceeded, and for what is not JSON, NaN among it.
    """
    try:
        value = records.decode_record(content, Any)
    except RecursionError:
        raise ValueError(f"more than {MAX_DEPTH} levels deep") from None
    return _bounded(value, "$")


def _bounded(value: Any, place: str) -> Any:
    if isinstance(value, str):
        if len(value) > MAX_TEXT:
            raise ValueError(f"text of {len(value):,} characters at {place}; the limit is {MAX_TEXT:,}")
        return printable(value)
    if isinstance(value, int) and value not in _INTEGERS:
        raise ValueError(f"number beyond 64 bits at {place}")
    if isinstance(value, int) and place.endswith("_unix_ns") and value not in _YEARS_NS:
        raise ValueError(f"{value} at {place} is no time between 2000 and 2100")
    if place.count(".") + place.count("[") > MAX_DEPTH:
        raise ValueError(f"more than {MAX_DEPTH} levels deep")
    if isinstance(value, dict):
        return {printable(key, 200): _bounded(item, f"{place}.{printable(key, 50)}") for key, item in value.items()}
    if isinstance(value, list):
        return [_bounded(item, f"{place}[{index}]") for index, item in enumerate(value)]
    return value
