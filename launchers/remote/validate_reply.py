"""What another machine says of a sweep's attempts, held against what can be before anything here rests on it.

It reaches the ledger, names folders and is shown: a word has nothing that a path or a shell would obey, a line nothing
that a terminal would. Every function raises ValueError for what cannot be.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from inpaint_bench.core.attempt_state import Leavings, SchedulerWord

from .ssh import printable

NUMBERS = 10**7
LATEST = 10**11  # seconds, of any clock or limit
_WORD = re.compile(r"[\w.:@%+-]{1,200}", re.ASCII)
_GROUP = re.compile(r"[\w-]{1,200}", re.ASCII)  # it is a folder's name
_TASK = re.compile(r"\d{1,18}_\d{1,9}", re.ASCII)


def number(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < NUMBERS:
        return value
    raise ValueError("not the number of a point or an attempt")


def word(value: Any) -> str:
    return _matched(_WORD, value)


def group(value: Any) -> str:
    return _matched(_GROUP, value)


def task(value: Any) -> str | None:
    """The job id of a task of an array, or None: never a process of this machine."""
    return None if value is None else _matched(_TASK, value)


def line(value: Any) -> str | None:
    """Text in one line, with nothing that steers a terminal."""
    if value is None or isinstance(value, str):
        return value and printable(value)
    raise ValueError("not a text")


def scheduler_word(content: Mapping[str, Any]) -> SchedulerWord:
    """Of a version there that writes more, or less, than this one."""
    state = content.get("state")
    return SchedulerWord(
        state=None if state is None else word(state),
        detail=line(content.get("detail")) or "",
        said=line(content.get("said")) or "",
        begins_unix=_seconds(content.get("begins_unix")),
        ends_unix=_seconds(content.get("ends_unix")),
        limit_s=_seconds(content.get("limit_s")),
    )


def leavings(content: Mapping[str, Any]) -> Leavings:
    """As `scheduler_word`. What a manifest holds is for its readers to judge, as with any manifest."""
    manifest = content.get("manifest")
    if manifest is not None and not isinstance(manifest, dict):
        raise ValueError("not a manifest")
    return Leavings(
        manifest=manifest,
        damaged=line(content.get("damaged")),
        telemetry=line(content.get("telemetry")),
        missing=line(content.get("missing")),
        exists=content.get("exists", True) is True,
        silent_s=_seconds(content.get("silent_s")),
    )


def _matched(pattern: re.Pattern[str], value: Any) -> str:
    if isinstance(value, str) and pattern.fullmatch(value):
        return value
    raise ValueError("not a word of its kind")


def _seconds(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < LATEST:
        return float(value)
    raise ValueError("not a time")
