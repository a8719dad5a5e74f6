"""What another machine says of a sweep's attempts, held against what can be before anything here rests on it.

It reaches the ledger, names folders and is shown: a word has nothing that a path or a shell would obey, a line nothing
that a terminal would. Every function raises ValueError for what cannot be.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from inpaint_bench.core.attempt_state import RunArtifacts, SchedulerState

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


def scheduler_word(content: Mapping[str, Any]) -> SchedulerState:
    """Of a version there that writes more, or less, than this one."""
    state = content.get("state")
    return SchedulerState(
        state=None if state is None else word(state),
        detail=line(content.get("detail")) or "",
        raw=line(content.get("raw")) or "",
        start_unix=_seconds(content.get("start_unix")),
        end_unix=_seconds(content.get("end_unix")),
        time_limit_s=_seconds(content.get("time_limit_s")),
    )


def leavings(content: Mapping[str, Any]) -> RunArtifacts:
    """As `scheduler_word`. What a manifest holds is for its readers to judge, as with any manifest."""
    manifest = content.get("manifest")
    if manifest is not None and not isinstance(manifest, dict):
        raise ValueError("not a manifest")
    return RunArtifacts(
        manifest=manifest,
        damage=line(content.get("damage")),
        sidecar_status=line(content.get("sidecar_status")),
        missing_parts=line(content.get("missing_parts")),
        run_dir_exists=content.get("run_dir_exists", True) is True,
        manifest_age_s=_seconds(content.get("manifest_age_s")),
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
