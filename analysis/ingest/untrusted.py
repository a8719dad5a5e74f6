"""Bounds of what is read from a run directory, and its texts for people.

What exceeds a bound is left out with a reason, and other run directories stay the same.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from inpaint_bench.core.errors import first_line

MAX_RECORD_BYTES = 64 * 2**20  # a manifest lists every skipped image, with some 100 bytes each
MAX_TEXT = 20_000  # characters of one text in a record: a message with the output of a compiler
MAX_ID = 200  # bytes of a run id, a site, a GPU as folder names, of which a file system takes 255
MAX_PART_BYTES = 256 * 2**20  # limit for a part or journal; those of 6,000 rows or a minute have less than 1 MiB
# Limit for one table in memory. Three days of eight GPUs at 10 Hz are 1.5 GiB.
MAX_TABLE_BYTES = 2 * 2**30
MAX_KERNELS = 50_000  # rows of a profile; a step of Stable Diffusion has some hundred
MAX_DETAIL = 1_000  # characters of one text in a table
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
