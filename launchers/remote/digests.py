"""SHA-256 of the closed parts of a sweep, kept beside them so that a second `collect` need not read them all again.

A closed part never changes, so its size and times say that it is still the one that was read. It is a hint and no more:
what is sent is hashed as it goes, and a hint that was wrong is forgotten. All else is small, and read every time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from inpaint_bench.core.files import read_json, replace_text

from .bundle import SHA256, Member, Source, measure

FILE = ".digests.json"  # one for a whole sweep: file systems count files
PART = ".parquet"


class Digests:
    """Of the files of one sweep directory. `beat` is called again and again while a large file is read."""

    def __init__(self, folder: Path, beat: Callable[[], None] = lambda: None) -> None:
        self._folder, self._beat = folder, beat
        self._known: dict[str, Any] = {}
        self._changed = False
        with suppress(ValueError, OSError):
            known = read_json(folder / FILE)
            self._known = known if isinstance(known, dict) else {}

    def of(self, source: Source) -> Member:
        """Raises OSError where the file is not there (any more)."""
        if source.file is None or not source.path.endswith(PART):
            return measure(source, self._beat)
        stamp = _stamp(source.file)
        known = self._known.get(source.path)
        if isinstance(known, list) and known[:-1] == stamp and SHA256.fullmatch(str(known[-1])):
            return Member(path=source.path, size=stamp[0], sha256=known[-1])
        member = measure(source, self._beat)
        if _stamp(source.file) == stamp and member.size == stamp[0]:
            self._know(source.path, [*stamp, member.sha256])
        return member

    def arrived(self, path: str, sha256: str) -> None:
        """A verified file has just been put into place."""
        if path.endswith(PART):
            self._know(path, [*_stamp(self._folder / path), sha256])

    def forget(self, paths: Iterable[str]) -> None:
        for path in paths:
            self._changed |= self._known.pop(path, None) is not None

    def save(self) -> None:
        """A sweep that takes no file (somebody else's, a full disk) does without."""
        if self._changed:
            with suppress(OSError):
                replace_text(self._folder / FILE, json.dumps(self._known, separators=(",", ":")))

    def _know(self, path: str, entry: list[Any]) -> None:
        self._known[path] = entry
        self._changed = True


def _stamp(file: Path) -> list[int]:
    """The time of change too: one that was written over cannot look old by the other."""
    found = file.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns]
